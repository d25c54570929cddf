"""The meaning of Hopper's NVFP4 kernels in plain PyTorch, built on `quantization`; also their CPU side and oracle.

Hopper multiplies no NVFP4, but an element times the scale of its block, q·S, has at most 6 bits of mantissa and is
exact in BF16. So products are those of BF16 with operands that hold q·S, summed in FP32; what is left of both operands'
second level multiplies the sums:

    alpha_g = (A_g · (1/2688)) · (B_g · (1/2688))        A, B FP32 [G]: the largest magnitudes of each group

What an op means under a recipe is said above this package, in `fusible_ops.quantized_linear`. Where A is infinite, its
values there are infinite or NaN one by one; here sums are.

| copy | what it holds |
|---|---|
| rows `[T, K]` bf16 | q·S of x in blocks of 1x16 |
| columns `[P, K]` bf16 | q·S in blocks of 16x1 of each group, padded with zeros and then rotated if asked |
| data `[P, K/2]` uint8, scale `[P/16, K]` E4M3 | the same: codes, the even column in the low half, and S |

P = `padded_rows(T, G)`; group g begins at row padded[g]. A rotated group is summed over in its padded rows, so products
of columns take `padded` for offsets. Rows of no group may hold anything and count as zeros; those of rows, and what
lies past padded[G], are undefined. `offsets` and `padded` are int32 `[G+1]`, as `padded_group_offsets` gives them.
`weights` as in `reference`.

state: int64 [2] of `random_bits.random_state` to round stochastically: byte j of block b of x [T, K] (rows), or of its
transpose [K, P] (columns, the second stream), in row order. None: to nearest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cute_kernels import reference
from cute_kernels.activation import Activation
from cute_kernels.quantization import formats, hadamard
from cute_kernels.quantization.casts import decode_e2m1, pack_e2m1, unpack_e2m1
from cute_kernels.quantization.formats import Format
from cute_kernels.quantization.groups import group_amax, pad_groups, padded_offsets, padded_rows, quantize_padded
from cute_kernels.quantization.nvfp4_scales import LARGEST
from cute_kernels.quantization.quantize import quantize, spread

BLOCK = 16
"""Values that share a scale."""


class Nvfp4Copies(NamedTuple):
    """Copies of one matrix, each None if it was not asked for; data and scale are one copy."""

    rows: Tensor | None
    columns: Tensor | None
    data: Tensor | None
    scale: Tensor | None


class Nvfp4Weights(NamedTuple):
    """q·S of weights [G, N, K] in bf16, in blocks of 1x16 and of 16x1 (None if not asked for), or twice the same; the
    largest magnitudes FP32 [G].
    """

    rows: Tensor
    columns: Tensor | None
    amax: Tensor


def stored_shapes(rows: int, groups: int, columns: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Shapes of data and scale of the stored copy of a matrix [rows, columns]."""
    padded = padded_rows(rows, groups)
    return (padded, columns // 2), (padded // BLOCK, columns)


def alpha_of(first: Tensor, second: Tensor) -> Tensor:
    """alpha FP32 [G] of operands with these largest magnitudes."""
    return (first * (1 / LARGEST)) * (second * (1 / LARGEST))


# ----------------------------------------------------------------------------------------------------------------------
# Quantise


def nvfp4_amax(x: Tensor, offsets: Tensor, padded: Tensor, rotated: bool) -> tuple[Tensor, Tensor | None]:
    """The largest magnitudes of x [T, K] bf16 in each group, FP32 [G], and if asked those of its rotated transpose, NaN
    if there is one. No host sync.
    """
    amax = group_amax(x.abs().amax(1).float(), offsets)
    if not rotated:
        return amax, None
    wide, places = pad_groups(x, offsets)
    turned = hadamard.rotate(wide.mT.contiguous())
    return amax, group_amax(turned.abs().amax(0).float(), places)


def block_values(data: Tensor, scale: Tensor, format: Format) -> Tensor:
    """q·S of codes [..., M, K/2] with a scale for each block, bf16."""
    values = decode_e2m1(unpack_e2m1(data))
    assert format.block is not None
    return (values * spread(scale.float(), format.block, *values.shape[-2:])).bfloat16()


def as_stored(data: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """(data, scale) of the stored copy from codes [K, P/2] and scales [K, P/16] of the transpose."""
    return pack_e2m1(unpack_e2m1(data).mT.contiguous()), scale.mT.contiguous()


def nvfp4_quantize(
    x: Tensor,
    offsets: Tensor,
    padded: Tensor,
    amax: Tensor | None,
    column_amax: Tensor | None,
    state: Tensor | None = None,
    rowwise: bool = True,
    columnwise: bool = True,
    stored: bool = False,
    rotated: bool = False,
) -> Nvfp4Copies:
    """What is asked for of x [T, K] bf16. amax: for rows; column_amax: for columns and data, of the rotated transpose
    if that is `rotated`, see `nvfp4_amax`. No host sync.
    """
    format = formats.nvfp4(hadamard=rotated, stochastic=state is not None)
    rows = columns = data = scale = None
    if rowwise:
        made = quantize_padded(reference.tokens_only(x, offsets), offsets, format, False, state, amax=amax)
        rows = block_values(made.data, made.scale, format)
    if columnwise or stored:
        wide, places = pad_groups(x, offsets)
        made = quantize_padded(wide, places, format, True, state, amax=column_amax)
        if columnwise:
            columns = block_values(made.data, made.scale, format).mT.contiguous()
        if stored:
            data, scale = as_stored(made.data, made.scale)
    return Nvfp4Copies(rows, columns, data, scale)


def nvfp4_dequantize(data: Tensor, scale: Tensor, padded: Tensor) -> Tensor:
    """The columns copy [P, K] of a stored one."""
    values = decode_e2m1(unpack_e2m1(data))
    return (values * spread(scale.float(), (BLOCK, 1), *values.shape)).bfloat16()


def nvfp4_quantize_weight(weights: Sequence[Tensor], columnwise: bool = True, square: bool = False) -> Nvfp4Weights:
    """q·S of weights [N, K] bf16, blocks cut from the rows as they are stored. square: blocks of 16x16."""
    stacked, format = reference.as_stacked(weights), formats.nvfp4(2 if square else 1)
    made = quantize(stacked, format)
    rows = block_values(made.data, made.scale, format)
    assert made.amax is not None
    if not columnwise or square:
        return Nvfp4Weights(rows, rows if columnwise else None, made.amax)
    turned = quantize(stacked, format, True)
    return Nvfp4Weights(rows, block_values(turned.data, turned.scale, format).mT.contiguous(), made.amax)


# ----------------------------------------------------------------------------------------------------------------------
# Products


def _by_row(values: Tensor, offsets: Tensor, rows: int) -> Tensor:
    """values[g] for each row of group g, 0 for those of none; FP32 [rows, 1]."""
    return torch.cat([values, values.new_zeros(1)])[reference.row_groups(rows, offsets)][:, None]


def _wide(weights: Sequence[Tensor]) -> list[Tensor]:
    return [w.float() for w in weights]


def _product(
    x: Tensor,
    weights: Sequence[Tensor],
    offsets: Tensor,
    alpha: Tensor,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
) -> Tensor:
    """alpha·x Wᵀ (+ s·b) in FP32."""
    sums = reference.grouped_gemm(x.float(), _wide(weights), offsets) * _by_row(alpha, offsets, x.shape[0])
    if bias is None:
        return sums
    nothing = torch.zeros_like(x[:, :1], dtype=torch.float32)
    none = [w.new_zeros(w.shape[:-1] + (1,), dtype=torch.float32) for w in weights]
    return sums + reference.grouped_gemm(nothing, none, offsets, bias.float(), scale)


def nvfp4_grouped_gemm(
    x: Tensor,
    weights: Sequence[Tensor],
    offsets: Tensor,
    amax: Tensor,
    weight_amax: Tensor,
    bias: Tensor | None = None,
    bias_scale: Tensor | None = None,
) -> Tensor:
    """y = round(alpha_g·x W_gᵀ (+ s·b_g)), [T, N]; rows of no group are zero."""
    return _product(x, weights, offsets, alpha_of(amax, weight_amax), bias, bias_scale).to(x.dtype)


def nvfp4_grouped_gemm_dgrad(
    dy: Tensor,
    weights: Sequence[Tensor],
    offsets: Tensor,
    amax: Tensor,
    weight_amax: Tensor,
    glu_interleave: int = 0,
) -> Tensor:
    """dx = round(alpha_g·dy W_g), [T, K]. glu_interleave: as in `reference.grouped_gemm_dgrad`."""
    sums = reference.grouped_gemm_dgrad(dy.float(), _wide(weights), offsets, glu_interleave)
    return (sums * _by_row(alpha_of(amax, weight_amax), offsets, dy.shape[0])).to(dy.dtype)


def nvfp4_grouped_gemm_act(
    x: Tensor,
    weights: Sequence[Tensor],
    offsets: Tensor,
    amax: Tensor,
    weight_amax: Tensor,
    activation: Activation,
    bias: Tensor | None = None,
    probs: Tensor | None = None,
    glu_interleave: int = 0,
    save_preact: bool = True,
    rotated: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """(act, preact if asked, and `nvfp4_amax` of act): `reference.grouped_gemm_act` of preact = round(alpha_g·x W_gᵀ +
    b_g), stored as [gate | up].
    """
    preact = nvfp4_grouped_gemm(x, weights, offsets, amax, weight_amax, bias)
    preact = reference.deinterleave(preact, glu_interleave, 1)
    act = reference.activation_forward(preact, activation, probs, torch.float32).to(x.dtype)
    return act, preact if save_preact else None, *nvfp4_amax(act, offsets, padded_offsets(offsets), rotated)


def nvfp4_grouped_gemm_dact(
    dy: Tensor,
    weights: Sequence[Tensor],
    offsets: Tensor,
    amax: Tensor,
    weight_amax: Tensor,
    preact: Tensor,
    activation: Activation,
    probs: Tensor | None = None,
    need_dprobs: bool = False,
    rotated: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """(dpreact, dprobs FP32 [T] if asked, and `nvfp4_amax` of dpreact): `reference.grouped_gemm_dact` of dA =
    alpha_g·dy W_g in FP32.
    """
    sums = reference.grouped_gemm_dgrad(dy.float(), _wide(weights), offsets)
    grad = sums * _by_row(alpha_of(amax, weight_amax), offsets, dy.shape[0])
    p = None if probs is None else probs.to(preact.dtype)
    dpreact, dprobs = reference.dact(grad, preact.float(), offsets, p, activation, need_dprobs)
    dpreact = dpreact.to(dy.dtype)
    return dpreact, dprobs, *nvfp4_amax(dpreact, offsets, padded_offsets(offsets), rotated)


def nvfp4_grouped_wgrad(
    dy: Tensor, x: Tensor, offsets: Tensor, amax: Tensor, x_amax: Tensor, glu_interleave: int = 0
) -> Tensor:
    """dW_g = round(alpha_g·dy_gᵀ x_g), [G, N, K]. dy and x: columns copies, offsets: `padded`."""
    sums = reference.grouped_wgrad(dy.float(), x.float(), offsets, glu_interleave)
    return (sums * alpha_of(amax, x_amax)[:, None, None]).to(x.dtype)


def nvfp4_grouped_wgrad_(
    out: Sequence[Tensor],
    dy: Tensor,
    x: Tensor,
    offsets: Tensor,
    amax: Tensor,
    x_amax: Tensor,
    glu_interleave: int = 0,
    accumulate: bool = False,
) -> None:
    """The same FP32 sums into the caller's buffers, or added to what is there; see `reference.grouped_wgrad_`."""
    sums = nvfp4_grouped_wgrad(dy.float(), x.float(), offsets, amax, x_amax, glu_interleave)
    for target, dw in zip(reference.each_group(out), sums.unbind(0), strict=True):
        dw = dw.to(target.dtype)
        target.copy_(target + dw if accumulate else dw)
