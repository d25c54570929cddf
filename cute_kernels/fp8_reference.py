"""The meaning of Hopper's FP8 block-scaled kernels in plain PyTorch, built on `quantization`; also their oracle.

Fused operations run it on a CPU. What an op means under a recipe is said above this package, in
`fusible_ops.quantized_linear`.

Recipe: E4M3, FP32 scales for decoding (`x ≈ data · scale`), powers of two unless asked otherwise; blocks of 1x128 along
the summed dimension for activations and gradients, 128x128 for weights. The rules of scales and rounding are those of
`quantization.quantize`. ⌈·⌉₄ rounds up to a multiple of 4 (16-byte rows of scales).

| copy | data | scale |
|---|---|---|
| rows of x `[T, K]` | `[T, K]` | `[⌈K/128⌉, ⌈T⌉₄]` |
| transposed x | `[K, P]`, P = `padded_rows(T, G)` | `[P/128, ⌈K⌉₄]` |
| pre-activation of h halves `[T, N]`, kept: a `Quantized` | `[T, N]` | `[h ⌈N/128h⌉, ⌈T⌉₄]` |
| weights | `[G, N, K]` | `[G, ⌈N/128⌉, ⌈⌈K/128⌉⌉₄]` |
| transposed weights | `[G, K, N]` | `[G, ⌈K/128⌉, ⌈⌈N/128⌉⌉₄]` |

In the transposed copy the tokens of group g are the columns padded[g], padded[g] + 1, …, and zeros fill up the last
block of 128, so no block spans two groups. Undefined, and never used: what lies past the last token in the rows copy
and past padded[G] in the transposed one, and scales that only fill up a row. Here the latter are NaN.

`offsets` and `padded` are int32 `[G+1]`, as `padded_group_offsets` gives them. `weights` as in `reference`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from cute_kernels import reference
from cute_kernels.activation import Activation
from cute_kernels.quantization.formats import fp8_block
from cute_kernels.quantization.groups import MULTIPLE, check_multiple, padded_offsets, quantize_groups
from cute_kernels.quantization.quantize import Quantized, quantize

BLOCK = 128
"""Values that share a scale along the summed dimension."""

SCALES_ALIGNED = 4
"""A row of scales starts at a multiple of so many."""


class Fp8Copies(NamedTuple):
    """Quantised copies of one matrix, each None if it was not asked for. sums: FP32 [G, K], of each group's rows."""

    data: Tensor | None
    scale: Tensor | None
    data_t: Tensor | None
    scale_t: Tensor | None
    sums: Tensor | None


class Fp8Weights(NamedTuple):
    """Quantised weights, and their transposed copy, None if it was not asked for."""

    data: Tensor
    scale: Tensor
    data_t: Tensor | None
    scale_t: Tensor | None


def scales_in_row(count: int) -> int:
    """Scales that a row of `count` scales has room for."""
    return -(-count // SCALES_ALIGNED) * SCALES_ALIGNED


def _filled_up(scale: Tensor) -> Tensor:
    room = scales_in_row(scale.shape[-1]) - scale.shape[-1]
    return F.pad(scale, (0, room), value=float("nan")).contiguous()


def padded_group_offsets(split_sizes: Tensor, rows: int, multiple: int = MULTIPLE) -> tuple[Tensor, Tensor]:
    """(offsets, padded): `reference.group_offsets`, and where the groups begin once each is padded to a multiple of so
    many rows, 1 to 128.
    """
    check_multiple("padded_group_offsets", multiple)
    offsets = reference.group_offsets(split_sizes, rows)
    return offsets, padded_offsets(offsets, multiple)


# ----------------------------------------------------------------------------------------------------------------------
# Quantise


def fp8_quantize(
    x: Tensor,
    offsets: Tensor,
    padded: Tensor,
    rowwise: bool = True,
    columnwise: bool = True,
    column_sums: bool = False,
    power_of_two: bool = True,
) -> Fp8Copies:
    """Both copies of x [T, K] bf16 or fp16, and sums[g] = Σ of the rows of group g in FP32. Rows of no group count as
    zeros. No host sync.
    """
    format = fp8_block(force_pow_2_scales=power_of_two)
    data = scale = data_t = scale_t = sums = None
    if rowwise:
        data, scale = quantize_groups(x, offsets, format)[:2]
        scale = _filled_up(scale.t())
    if columnwise:
        data_t, scale_t = quantize_groups(x, offsets, format, columnwise=True)[:2]
        scale_t = _filled_up(scale_t.t())
    if column_sums:
        sums = reference.grouped_dbias(x, offsets)
    return Fp8Copies(data, scale, data_t, scale_t, sums)


def fp8_quantize_weight(weights: Sequence[Tensor], columnwise: bool = True, power_of_two: bool = True) -> Fp8Weights:
    """Both copies of weights [N, K] bf16 or fp16, blocks cut from the rows as they are stored."""
    format = fp8_block(dims=2, force_pow_2_scales=power_of_two)
    stacked = reference.as_stacked(weights)
    data, scale = quantize(stacked, format)[:2]
    data_t = scale_t = None
    if columnwise:
        data_t, scale_t = quantize(stacked, format, columnwise=True)[:2]
        scale_t = _filled_up(scale_t)
    return Fp8Weights(data, _filled_up(scale), data_t, scale_t)


def kept_shapes(rows: int, columns: int, halves: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Shapes of data and scale of a kept pre-activation [rows, columns]."""
    return (rows, columns), (halves * -(-columns // halves // BLOCK), scales_in_row(rows))


def kept(preact: Tensor, halves: int, power_of_two: bool = True) -> Quantized:
    """A pre-activation [T, N], or its gradient, as a rows copy whose blocks are cut in each of its halves."""
    format = fp8_block(force_pow_2_scales=power_of_two)
    parts = [quantize(half.contiguous(), format) for half in preact.chunk(halves, 1)]
    data = torch.cat([part.data.view(torch.uint8) for part in parts], 1).view(parts[0].data.dtype)
    return Quantized(data, torch.cat([_filled_up(part.scale.t()) for part in parts]))


def kept_values(preact: Tensor | Quantized, halves: int) -> Tensor:
    """FP32 [T, N]: the values of a pre-activation, kept quantised or not."""
    return preact.float() if isinstance(preact, Tensor) else dequantized(preact.data, preact.scale, halves)


def dequantized_t(data_t: Tensor, scale_t: Tensor) -> Tensor:
    """FP32 [K, P]: the values of a transposed copy."""
    return data_t.float() * scale_t[:, : data_t.shape[0]].t().repeat_interleave(BLOCK, 1)


def dequantized(data: Tensor, scale: Tensor, halves: int = 1) -> Tensor:
    """FP32 [T, K]: the values of a rows copy whose blocks are cut in each of `halves` halves of the columns."""
    rows, width = data.shape[0], data.shape[1] // halves
    factors = scale[:, :rows].unflatten(0, (halves, -1)).repeat_interleave(BLOCK, 1)[:, :width]
    return data.float() * factors.flatten(0, 1).t()


def dequantized_weights(data: Tensor, scale: Tensor) -> Tensor:
    """FP32 [G, N, K]: the values of either copy."""
    rows, columns = data.shape[1:]
    factors = scale.repeat_interleave(BLOCK, 1)[:, :rows].repeat_interleave(BLOCK, 2)[..., :columns]
    return data.float() * factors


# ----------------------------------------------------------------------------------------------------------------------
# Products


def fp8_grouped_gemm(
    x: Tensor,
    x_scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    offsets: Tensor,
    bias: Tensor | None = None,
    bias_scale: Tensor | None = None,
    halves: int = 1,
) -> Tensor:
    """y = x̂ Ŵ_gᵀ (+ s·b_g) for the rows of group g; [T, N] bf16, zero in the tail. Reads the offsets on the host.

    x [T, K] is a rows copy, w [G, N, K] either copy of the weights (the transposed one for a gradient). Every block of
    128 contracted values is summed by itself, scaled and added in FP32; the total is rounded once, after the bias. The
    rest as in `reference.grouped_gemm`. halves: 2 if x's blocks are cut in each half of its columns, as
    `fp8_grouped_gemm_dact` cuts those of a gate and an up half; the blocks of w never are.
    """
    return _product(x, x_scale, w, w_scale, offsets, bias, bias_scale, halves).bfloat16()


def _product(
    x: Tensor,
    x_scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    offsets: Tensor,
    bias: Tensor | None = None,
    bias_scale: Tensor | None = None,
    halves: int = 1,
) -> Tensor:
    """`fp8_grouped_gemm` before it is rounded."""
    wide = None if bias is None else bias.float()
    left, right = dequantized(x, x_scale, halves), dequantized_weights(w, w_scale)
    return reference.grouped_gemm(left, [right], offsets, wide, bias_scale)


def fp8_grouped_gemm_act(
    x: Tensor,
    x_scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    offsets: Tensor,
    padded: Tensor,
    activation: Activation,
    bias: Tensor | None = None,
    probs: Tensor | None = None,
    rowwise: bool = True,
    columnwise: bool = True,
    save_preact: bool = True,
    power_of_two: bool = True,
    quantize_preact: bool = False,
) -> tuple[Fp8Copies, Tensor | Quantized | None]:
    """preact = round(x̂ Ŵ_gᵀ + b_g) in bf16, act = f(preact)·p in FP32, quantised once: (copies of act, preact or None).

    probs are rounded to bf16 first. Weights and bias lie as `[gate | linear]`. Operands as in `fp8_grouped_gemm`.
    quantize_preact: preact is given quantised, from its bf16 values; act is formed from those.
    """
    preact = fp8_grouped_gemm(x, x_scale, w, w_scale, offsets, bias)
    act = reference.activation_forward(preact.float(), activation, None if probs is None else probs.bfloat16())
    copies = fp8_quantize(act, offsets, padded, rowwise, columnwise, power_of_two=power_of_two)
    if not save_preact:
        return copies, None
    return copies, kept(preact, activation.halves, power_of_two) if quantize_preact else preact


def fp8_grouped_gemm_dact(
    dy: Tensor,
    dy_scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    offsets: Tensor,
    padded: Tensor,
    preact: Tensor | Quantized,
    activation: Activation,
    probs: Tensor | None = None,
    rowwise: bool = True,
    columnwise: bool = True,
    need_dprobs: bool = False,
    need_dbias: bool = False,
    power_of_two: bool = True,
) -> tuple[Fp8Copies, Tensor | None]:
    """dA = dŷ Ŵ_g in FP32, its activation's gradients against the kept pre-activation, quantised once from FP32.

    w [G, I, H] is the transposed copy of the second linear's weights. Returns (copies of dpreact, with its column sums
    FP32 [G, N] if need_dbias; dprobs FP32 [T] or None, zero in the tail). The rows copy's blocks are cut in the gate
    half and in the linear half, each by itself: where I is no multiple of 128 a block would have values of both.
    """
    grad = _product(dy, dy_scale, w, w_scale, offsets)
    p = None if probs is None else probs.bfloat16()
    dpreact, dprobs = reference.dact(grad, kept_values(preact, activation.halves), offsets, p, activation, need_dprobs)
    copies = fp8_quantize(dpreact, offsets, padded, False, columnwise, need_dbias, power_of_two)
    if rowwise:
        data, scale, _ = kept(dpreact, activation.halves, power_of_two)
        copies = copies._replace(data=data, scale=scale)
    return copies, dprobs


# ----------------------------------------------------------------------------------------------------------------------
# Weight gradients


def fp8_grouped_wgrad(
    dy_t: Tensor, dy_scale_t: Tensor, x_t: Tensor, x_scale_t: Tensor, padded: Tensor, glu_interleave: int = 0
) -> Tensor:
    """dW_g = dŷ_gᵀ x̂_g, [G, N, K] bf16, from the transposed copies of dy [T, N] and x [T, K].

    Every block of 128 tokens is summed by itself, scaled and added in FP32; the total is rounded once. glu_interleave:
    as in `reference.grouped_wgrad`. Reads the offsets on the host.
    """
    out = dy_t.new_empty(padded.shape[0] - 1, dy_t.shape[0], x_t.shape[0], dtype=torch.bfloat16)
    fp8_grouped_wgrad_([out], dy_t, dy_scale_t, x_t, x_scale_t, padded, glu_interleave)
    return out


def fp8_grouped_wgrad_(
    out: Sequence[Tensor],
    dy_t: Tensor,
    dy_scale_t: Tensor,
    x_t: Tensor,
    x_scale_t: Tensor,
    padded: Tensor,
    glu_interleave: int = 0,
    accumulate: bool = False,
) -> None:
    """`fp8_grouped_wgrad` into `out`, one [G, N, K] or G [N, K] tensors, bf16, fp16 or fp32: overwriting, or adding to
    what is there the gradient rounded to out's dtype; an empty group then leaves its tensor alone.
    """
    dy, x, bounds = dequantized_t(dy_t, dy_scale_t), dequantized_t(x_t, x_scale_t), padded.tolist()
    for g, target in enumerate(reference.each_group(out)):
        tokens = slice(bounds[g], bounds[g + 1])
        grad = reference.interleave(dy[:, tokens] @ x[:, tokens].t(), glu_interleave, 0).to(target.dtype)
        if not accumulate:
            target.copy_(grad)
        elif bounds[g] < bounds[g + 1]:
            target += grad
