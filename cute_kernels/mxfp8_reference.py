"""The meaning of Hopper's MXFP8 kernels in plain PyTorch, built on `quantization`; also their CPU side and oracle.

Hopper multiplies no MXFP8, but every value of it, four bits of mantissa times a power of two, is exact in BF16 (above
BF16's subnormals). So products are those of BF16 with operands that hold MXFP8 values, and the sums are what a tensor
core for MXFP8 forms, in FP32. What an op means under a recipe is said above this package, in
`fusible_ops.quantized_linear`.

Recipe: E4M3, E8M0 scales rounded up, blocks of 32 along the summed dimension, of weights 32x32 if asked. The rules of
scales and rounding are those of `quantization.quantize`.

| copy | what it holds |
|---|---|
| rows `[T, K]` bf16 | x in blocks of 1x32 |
| columns `[T, K]` bf16 | x in blocks of 32x1 from each group's first row on, the last filled up with zeros |
| data `[P, K]`, scale `[ru(P/32, 4), ru(K, 128)]` | the same in E4M3 and E8M0 |
| data `[T, N]`, scale `[T, h ⌈N/32h⌉₄]` | a `Quantized`: a pre-activation of h halves in blocks of 1x32, likewise |

The third is `quantization.stored`'s order: group g begins at row padded[g] of data, P = `padded_rows(T, G, 32)`, its
scales have room for P/32 rows rounded up to 4.
Rows of no group may hold anything and count as zeros; those of results, and what lies past padded[G], are undefined.
`offsets` and `padded` are int32 `[G+1]`, as `padded_group_offsets(…, 32)` gives them. `weights` as in `reference`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cute_kernels import reference
from cute_kernels.activation import Activation
from cute_kernels.quantization import formats
from cute_kernels.quantization.groups import padded_rows
from cute_kernels.quantization.quantize import Quantized, dequantize, quantize
from cute_kernels.quantization.scale_layout import storage_shape
from cute_kernels.quantization.stored import quantize_stored, rows_of_values, stored_values

BLOCK = 32
"""Values that share a scale."""

FORMAT = formats.mxfp8()
SQUARE = formats.mxfp8(dims=2)


class Mxfp8Copies(NamedTuple):
    """Copies of one matrix, each None if it was not asked for; data and scale are one copy."""

    rows: Tensor | None
    columns: Tensor | None
    data: Tensor | None
    scale: Tensor | None


class Mxfp8Weights(NamedTuple):
    """Values of weights [G, N, K] in bf16, in blocks of 1x32 and of 32x1 (None if not asked for), or twice the same."""

    rows: Tensor
    columns: Tensor | None


def stored_shapes(rows: int, groups: int, columns: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Shapes of data and scale of the stored copy of a matrix [rows, columns]."""
    padded = padded_rows(rows, groups, BLOCK)
    return (padded, columns), storage_shape(FORMAT, padded, columns, columnwise=True)


def kept_shapes(rows: int, columns: int, halves: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Shapes of data and scale of a kept pre-activation [rows, columns]: of each half's scales four are a word."""
    return (rows, columns), (rows, halves * -(-columns // halves // (4 * BLOCK)) * 4)


# ----------------------------------------------------------------------------------------------------------------------
# Quantise


def mxfp8_quantize(
    x: Tensor,
    offsets: Tensor,
    padded: Tensor,
    rowwise: bool = True,
    columnwise: bool = True,
    stored: bool = False,
) -> Mxfp8Copies:
    """What is asked for of x [T, K] bf16 (or fp32, which is rounded once). No host sync."""
    rows = columns = data = scale = None
    if rowwise:
        copy = quantize_stored(x, FORMAT, offsets=offsets)
        rows = stored_values(copy, FORMAT, x.shape[1], False, offsets, torch.bfloat16)
    if columnwise or stored:
        copy = quantize_stored(x, FORMAT, True, offsets)
        if columnwise:
            columns = mxfp8_dequantize(copy.data, copy.scale, offsets, padded, x.shape[0])
        if stored:
            data, scale = copy.data, copy.scale
    return Mxfp8Copies(rows, columns, data, scale)


def mxfp8_dequantize(data: Tensor, scale: Tensor, offsets: Tensor, padded: Tensor, rows: int) -> Tensor:
    """The columns copy [rows, K] of a stored one."""
    values = stored_values(Quantized(data, scale), FORMAT, data.shape[1], True, offsets, torch.bfloat16)
    return rows_of_values(values, FORMAT, True, offsets, rows)


def mxfp8_quantize_weight(weights: Sequence[Tensor], columnwise: bool = True, square: bool = False) -> Mxfp8Weights:
    """Values of weights [N, K] bf16, blocks cut from the rows as they are stored. square: blocks of 32x32."""
    stacked, format = reference.as_stacked(weights), SQUARE if square else FORMAT

    def values(columnwise: bool) -> Tensor:
        return dequantize(quantize(stacked, format, columnwise), format, columnwise, torch.bfloat16)

    rows = values(False)
    if not columnwise:
        return Mxfp8Weights(rows, None)
    return Mxfp8Weights(rows, rows if square else values(True))


def kept(preact: Tensor, halves: int) -> Quantized:
    """A pre-activation [T, N] bf16 as it is kept."""
    (rows, columns), (data, scale, _) = preact.shape, quantize(preact, FORMAT)
    filled = scale.new_zeros(kept_shapes(rows, columns, halves)[1])
    filled.view(*_by_half(filled, halves))[..., : scale.shape[1] // halves] = scale.view(*_by_half(scale, halves))
    return Quantized(data, filled)


def kept_values(preact: Tensor | Quantized, halves: int) -> Tensor:
    """FP32 [T, N]: the values of a pre-activation, kept quantised or not."""
    if isinstance(preact, Tensor):
        return preact.float()
    blocks = preact.data.shape[1] // halves // BLOCK
    scale = preact.scale.view(*_by_half(preact.scale, halves))[..., :blocks].flatten(1)
    return dequantize(Quantized(preact.data, scale), FORMAT)


def _by_half(scale: Tensor, halves: int) -> tuple[int, int, int]:
    return scale.shape[0], halves, scale.shape[1] // halves


# ----------------------------------------------------------------------------------------------------------------------
# Products


def mxfp8_grouped_gemm_act(
    x: Tensor,
    weights: Sequence[Tensor],
    offsets: Tensor,
    activation: Activation,
    bias: Tensor | None = None,
    probs: Tensor | None = None,
    glu_interleave: int = 0,
    save_preact: bool = True,
    quantize_preact: bool = False,
) -> tuple[Tensor, Tensor | Quantized | None]:
    """`reference.grouped_gemm_act`, but act = f(preact)·p is the rows copy of its FP32 value, not that rounded to bf16.

    x and weights hold MXFP8 values. glu_interleave: 0 or a multiple of 32, so that blocks are of gate or of up.
    quantize_preact: the pre-activation is given quantised, from its BF16 values; act is formed from those.
    """
    preact = reference.deinterleave(reference.grouped_gemm(x, weights, offsets, bias), glu_interleave, 1)
    act = reference.activation_forward(preact, activation, probs, torch.float32)
    rows = mxfp8_quantize(act, offsets, offsets, columnwise=False).rows
    assert rows is not None
    if not save_preact:
        return rows, None
    return rows, kept(preact, activation.halves) if quantize_preact else preact


def mxfp8_grouped_gemm_dact(
    dy: Tensor,
    weights: Sequence[Tensor],
    offsets: Tensor,
    preact: Tensor | Quantized,
    activation: Activation,
    probs: Tensor | None = None,
    rowwise: bool = True,
    columnwise: bool = True,
    need_act: bool = True,
    need_dprobs: bool = False,
    need_dbias: bool = False,
    glu_interleave: int = 0,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """`reference.grouped_gemm_dact`, but gradient and activation are not rounded to bf16, only through MXFP8.

    dy and weights hold MXFP8 values; preact is as it was kept, which may be quantised. Returns (rows copy of dpreact,
    its columns copy, the columns copy of act·p, dprobs FP32 [T], sums of dpreact's rows FP32 [G, N], in the order of a
    bias that glu_interleave gives), each None if not asked for.
    """
    grad = reference.grouped_gemm_dgrad(dy.float(), [w.float() for w in weights], offsets)
    p, values = None if probs is None else probs.to(dy.dtype), kept_values(preact, activation.halves)
    dpreact, dprobs = reference.dact(grad, values, offsets, p, activation, need_dprobs)
    copies = mxfp8_quantize(dpreact, offsets, offsets, rowwise, columnwise)
    act = None
    if need_act:
        value = reference.activation_forward(values, activation, p)
        act = mxfp8_quantize(value, offsets, offsets, rowwise=False).columns
    dbias = reference.grouped_dbias(dpreact, offsets, None, glu_interleave) if need_dbias else None
    return copies.rows, copies.columns, act, dprobs, dbias
