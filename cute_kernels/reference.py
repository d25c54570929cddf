"""What every kernel computes, in plain PyTorch: the unfused path, and the oracle the kernels are tested against.

Shapes: `x [T, K]`, `dy [T, N]`, `offsets` int32 `[G+1]` with a leading zero; `weights` is a list, either one stacked
`[G, N, K]` tensor or `G` tensors `[N, K]`. Rows from `offsets[G]` to `T` (the tail) may hold anything and never
influence a result; in row-shaped results they are zero. Empty groups give zero weight gradients.

Numerics: products, bias and activations are formed in FP32 (FP64 for FP64 inputs) and rounded once to the input dtype.
With `glu_interleave = g > 0` the rows of a weight or bias lie as blocks of g gate rows, then g linear rows; the
pre-activation and its gradient always lie as `[gate | linear]`.

Host sync: on CUDA, products within `catalog.DEVICE_OFFSETS` go through `torch.nn.functional.grouped_mm`, which reads
the offsets on the device; others loop over groups and read the offsets on the host (one sync).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from cute_kernels.activation import Activation
from cute_kernels.activation_reference import activation_backward, activation_forward, widened
from cute_kernels.catalog import DEVICE_OFFSETS
from cute_kernels.limits import dtype_name

# ----------------------------------------------------------------------------------------------------------------------
# Layout


def deinterleave(t: Tensor, block: int, dim: int) -> Tensor:
    """Blocks of `block` gate entries and `block` linear entries along `dim` -> `[gate | linear]`. 0 returns `t`
    itself.
    """
    if not block:
        return t
    dim %= t.dim()
    return t.unflatten(dim, (-1, 2, block)).transpose(dim, dim + 1).flatten(dim, dim + 2)


def interleave(t: Tensor, block: int, dim: int) -> Tensor:
    """The inverse of `deinterleave`. 0 returns `t` itself."""
    if not block:
        return t
    dim %= t.dim()
    return t.unflatten(dim, (2, -1, block)).transpose(dim, dim + 1).flatten(dim, dim + 2)


def each_group(weights: Sequence[Tensor]) -> Sequence[Tensor]:
    """One [N, K] tensor for each group."""
    return weights[0].unbind(0) if len(weights) == 1 and weights[0].dim() == 3 else weights


def as_stacked(weights: Sequence[Tensor]) -> Tensor:
    """One [G, N, K] tensor; copies only if the groups are separate tensors."""
    return weights[0] if len(weights) == 1 and weights[0].dim() == 3 else torch.stack(list(weights))


def group_offsets(split_sizes: Tensor, rows: int) -> Tensor:
    """offsets[g] = min(Σ_{j<g} max(split_sizes[j], 0), rows), int32 [G+1]. No host sync.

    split_sizes: int [G]. A negative size counts as zero and the sums are capped at `rows`, so whatever the
    device holds, no offset points outside the buffer.
    """
    ends = split_sizes.to(torch.int64).clamp(0, rows).cumsum(0).clamp(max=rows)
    return F.pad(ends, (1, 0)).to(torch.int32)


def group_offsets_and_counters(split_sizes: Tensor, rows: int, counters: int) -> tuple[Tensor, Tensor]:
    """(`group_offsets`, int32 [counters] of zero), for kernels that take tiles through counters."""
    return group_offsets(split_sizes, rows), torch.zeros(counters, dtype=torch.int32, device=split_sizes.device)


def valid_rows(rows: int, offsets: Tensor) -> Tensor:
    """bool [rows, 1]: whether a row belongs to a group."""
    return torch.arange(rows, device=offsets.device).unsqueeze(1) < offsets[-1]


def row_groups(rows: int, offsets: Tensor) -> Tensor:
    """int64 [rows]: the group of each row, G for the tail. No host sync."""
    index = torch.arange(rows, device=offsets.device, dtype=offsets.dtype)
    return torch.searchsorted(offsets[1:].contiguous(), index, right=True)


def tokens_only(t: Tensor, offsets: Tensor) -> Tensor:
    """t [T] or [T, C] with the rows past offsets[G] exactly zero, whatever they held. No host sync."""
    return torch.where(_as_mask(t, offsets), t, 0)


def _tokens_only_(t: Tensor, offsets: Tensor) -> Tensor:
    """The same in place, for a result that nobody else has."""
    return t.masked_fill_(~_as_mask(t, offsets), 0)


def _as_mask(t: Tensor, offsets: Tensor) -> Tensor:
    valid = valid_rows(t.shape[0], offsets)
    return valid if t.dim() == 2 else valid.squeeze(1)


# ----------------------------------------------------------------------------------------------------------------------
# Products


def uses_device_offsets(x: Tensor, width: int, groups: int) -> bool:
    """Whether a CUDA product of `x` with `width` output columns reads the offsets on the device (no host sync)."""
    facts = {"dtype": dtype_name(x.dtype), "K": x.shape[1], "N": width, "G": groups}
    return x.is_cuda and x.shape[0] > 0 and all(limit.check(facts) is None for limit in DEVICE_OFFSETS)


def _loop_product(x: Tensor, matrices: Sequence[Tensor], offsets: Tensor) -> Tensor:
    """FP32 [T, N]: x_g @ matrices[g] for the rows of each group, zero in the tail. Reads the offsets on the host."""
    y = widened(x.new_empty(0)).new_zeros(x.shape[0], matrices[0].shape[1])
    if x.shape[0] == 0:
        return y
    bounds = offsets.tolist()
    for g, matrix in enumerate(matrices):
        rows = slice(bounds[g], bounds[g + 1])
        y[rows] = widened(x[rows]) @ widened(matrix)
    return y


def _bias_columns(bias: Tensor, scale: Tensor | None, rows: int) -> tuple[Tensor, Tensor]:
    """(s [T, 8], b [G, N, 8]) in BF16 with s @ b_gᵀ = scale · bias_g exactly, to append to the K dimension.

    An FP32 scale is split into three BF16 parts; the remaining columns are zero (eight keep 16-byte rows).
    """
    left = bias.new_zeros(rows, 8)
    right = bias.new_zeros(*bias.shape, 8)
    if scale is None:
        left[:, 0] = 1
    else:
        rest = scale.float()
        for part in range(3):
            left[:, part] = rest
            rest = rest - left[:, part].float()
    right[..., :3] = bias.unsqueeze(-1)
    return left, right


def grouped_gemm(
    x: Tensor, weights: Sequence[Tensor], offsets: Tensor, bias: Tensor | None = None, bias_scale: Tensor | None = None
) -> Tensor:
    """y = x W_gᵀ (+ s·b_g) for the rows of group g; [T, N] in x's dtype, zero in the tail.

    bias: [G, N] in x's dtype. bias_scale: float [T], multiplies the bias only (`1` if absent).
    The sum is rounded once, after the bias.
    """
    rows = x.shape[0]
    if uses_device_offsets(x, weights[0].shape[-2], offsets.shape[0] - 1):
        stacked = as_stacked(weights)
        if bias is not None:
            left, right = _bias_columns(bias, bias_scale, rows)
            x, stacked = torch.cat([x, left], 1), torch.cat([stacked, right], 2)
        return _tokens_only_(F.grouped_mm(x, stacked.transpose(1, 2), offs=offsets[1:]), offsets)
    y = _loop_product(x, [w.t() for w in each_group(weights)], offsets)
    if bias is not None and rows:
        bounds = offsets.tolist()
        for g in range(len(bounds) - 1):
            part = slice(bounds[g], bounds[g + 1])
            y[part] += widened(bias[g]) if bias_scale is None else widened(bias_scale[part, None]) * widened(bias[g])
    return y.to(x.dtype)


def grouped_gemm_(
    out: Tensor,
    x: Tensor,
    weights: Sequence[Tensor],
    offsets: Tensor,
    bias: Tensor | None = None,
    bias_scale: Tensor | None = None,
) -> None:
    """`grouped_gemm` into `out` [T, N], whose tail is left alone."""
    y = grouped_gemm(x, weights, offsets, bias, bias_scale)
    out.copy_(torch.where(valid_rows(x.shape[0], offsets), y, out))


def grouped_gemm_dgrad(dy: Tensor, weights: Sequence[Tensor], offsets: Tensor, glu_interleave: int = 0) -> Tensor:
    """dx = dy W_g; [T, K] in dy's dtype, zero in the tail. dy's columns are `[gate | linear]`, W's rows interleaved."""
    if uses_device_offsets(dy, weights[0].shape[-1], offsets.shape[0] - 1):
        stacked = deinterleave(as_stacked(weights), glu_interleave, 1)
        return _tokens_only_(F.grouped_mm(dy, stacked, offs=offsets[1:]), offsets)
    matrices = [deinterleave(w, glu_interleave, 0) for w in each_group(weights)]
    return _loop_product(dy, matrices, offsets).to(dy.dtype)


def grouped_wgrad(dy: Tensor, x: Tensor, offsets: Tensor, glu_interleave: int = 0) -> Tensor:
    """dW_g = dy_gᵀ x_g; [G, N, K] in x's dtype, exactly zero for an empty group. Rows come out interleaved as W's."""
    if uses_device_offsets(x, dy.shape[1], offsets.shape[0] - 1):
        dw = F.grouped_mm(dy.t(), x, offs=offsets[1:])
        dw = dw.masked_fill_((offsets.diff() <= 0)[:, None, None], 0)
    elif x.shape[0] == 0:
        dw = x.new_zeros(offsets.shape[0] - 1, dy.shape[1], x.shape[1])
    else:
        bounds = offsets.tolist()
        dw = x.new_empty(len(bounds) - 1, dy.shape[1], x.shape[1])
        for g in range(len(bounds) - 1):
            part = slice(bounds[g], bounds[g + 1])
            dw[g] = widened(dy[part]).t() @ widened(x[part])
    return interleave(dw, glu_interleave, 1)


def grouped_wgrad_(
    out: Sequence[Tensor], dy: Tensor, x: Tensor, offsets: Tensor, glu_interleave: int = 0, accumulate: bool = False
) -> None:
    """Write `grouped_wgrad` into `out` (one [G, N, K] or G [N, K] tensors of any float dtype), or add to it."""
    on_device = uses_device_offsets(x, dy.shape[1], offsets.shape[0] - 1)
    wide = out[0].dtype == torch.float32 and not on_device
    dw = grouped_wgrad(widened(dy) if wide else dy, widened(x) if wide else x, offsets, glu_interleave)
    for target, grad in zip(each_group(out), dw.unbind(0), strict=True):
        if accumulate:
            target.add_(grad.to(target.dtype))
        else:
            target.copy_(grad)


# ----------------------------------------------------------------------------------------------------------------------
# Bias gradients


def grouped_dbias(dy: Tensor, offsets: Tensor, scale: Tensor | None = None, glu_interleave: int = 0) -> Tensor:
    """db_g = Σ_rows s·dy; [G, N] FP32 (FP64 for FP64), zero for an empty group. No host sync, deterministic.

    On CUDA a one-hot product: the matrix [G, T] of row membership against s·dy, tail rows masked out of both. There an
    infinite gradient of one group makes the others' NaN.
    """
    rows = dy.shape[0]
    if not dy.is_cuda:
        values = widened(dy) if scale is None else widened(dy) * widened(scale)[:, None]
        bounds = offsets.tolist()
        sums = [values[bounds[g] : bounds[g + 1]].sum(0) for g in range(len(bounds) - 1)]
        return interleave(torch.stack(sums), glu_interleave, 1)
    member = row_groups(rows, offsets)[None, :] == torch.arange(offsets.shape[0] - 1, device=dy.device)[:, None]
    values = tokens_only(widened(dy), offsets)
    if scale is not None:
        values = values * tokens_only(widened(scale), offsets)[:, None]
    return interleave(member.to(values.dtype) @ values, glu_interleave, 1)


def grouped_dscale(dy: Tensor, bias: Tensor, offsets: Tensor) -> Tensor:
    """ds_row = Σ_n dy[row, n]·b_g[n]; [T] FP32 (FP64 for FP64), zero in the tail. No host sync."""
    rows = dy.shape[0]
    groups = row_groups(rows, offsets).clamp(max=bias.shape[0] - 1)
    products = (widened(dy) * widened(bias)[groups]).sum(1)
    return tokens_only(products, offsets)


# ----------------------------------------------------------------------------------------------------------------------
# Products with an activation


def dact(
    dact: Tensor,
    preact: Tensor,
    offsets: Tensor,
    probs: Tensor | None,
    activation: Activation,
    need_dprobs: bool = False,
    preact_interleave: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """`activation_backward` with tail rows exactly zero, whatever they held.

    preact_interleave: how the columns of preact and dpreact lie, as `glu_interleave` has a weight's rows.
    """
    preact = deinterleave(preact, preact_interleave, 1)
    dpreact, dprobs = activation_backward(dact, preact, activation, probs, need_dprobs)
    dpreact = interleave(dpreact, preact_interleave, 1)
    return _tokens_only_(dpreact, offsets), None if dprobs is None else _tokens_only_(dprobs, offsets)


def grouped_gemm_act(
    x: Tensor,
    weights: Sequence[Tensor],
    offsets: Tensor,
    activation: Activation,
    bias: Tensor | None = None,
    probs: Tensor | None = None,
    glu_interleave: int = 0,
    save_preact: bool = True,
    zero_tail: bool = True,
    zero_tail_of: Tensor | None = None,
    preact_interleave: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """preact = round(x W_gᵀ + b_g), act = round(f(preact)·p); (act [T, I], preact [T, N] or None), zero in the tail.

    zero_tail: a kernel may leave the tail undefined where it is False; here it is zero either way. zero_tail_of: a
    tensor [T, ·] in x's dtype whose tail becomes zero too: the result of a later `grouped_gemm_`. preact_interleave:
    how the columns of the preact that is returned lie; kernels want glu_interleave for weights stored [K, N], else 0.
    """
    if zero_tail_of is not None:
        _tokens_only_(zero_tail_of, offsets)
    preact = deinterleave(grouped_gemm(x, weights, offsets, bias), glu_interleave, 1)
    act = _tokens_only_(activation_forward(preact, activation, probs), offsets)
    return act, interleave(preact, preact_interleave, 1) if save_preact else None


def grouped_gemm_dact(
    dy: Tensor,
    weights: Sequence[Tensor],
    offsets: Tensor,
    preact: Tensor,
    activation: Activation,
    probs: Tensor | None = None,
    need_act: bool = True,
    need_dprobs: bool = False,
    zero_tail: bool = True,
    preact_interleave: int = 0,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """dA = dy W_g kept in FP32, then its activation's gradients against the saved pre-activation.

    Returns (dpreact [T, N], recomputed act·p [T, I] or None, dprobs FP32 [T] or None), zero in the tail.
    zero_tail: a kernel may leave the tail of dpreact and act undefined where it is False. preact_interleave: as `dact`.
    """
    grad = _loop_product(dy, each_group(weights), offsets)
    dpreact, dprobs = dact(grad, preact, offsets, probs, activation, need_dprobs, preact_interleave)
    plain = deinterleave(preact, preact_interleave, 1)
    act = _tokens_only_(activation_forward(plain, activation, probs), offsets)
    return dpreact, act if need_act else None, dprobs
