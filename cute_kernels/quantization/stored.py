"""Quantised matrices in the storage that kernels read and write, and their values again.

A copy is `quantize.Quantized` with block scales as `scale_layout` stores them (one scale per tensor as it is). Matrices
`[..., M, K]` stand each for themselves; with `offsets` the rows `[T, K]` of groups do (`groups`), padded where
`groups.is_padded` says so.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels.quantization import hadamard
from cute_kernels.quantization.formats import Format
from cute_kernels.quantization.groups import (
    GroupedQuantized,
    dequantize_groups,
    group_multiple,
    is_padded,
    padded_offsets,
    quantize_groups,
    unpad_groups,
)
from cute_kernels.quantization.quantize import Quantized, dequantize, quantize
from cute_kernels.quantization.scale_layout import from_storage, to_storage


def quantize_stored(
    x: Tensor,
    format: Format,
    columnwise: bool = False,
    offsets: Tensor | None = None,
    factor: Tensor | None = None,
    state: Tensor | None = None,
) -> Quantized:
    """One copy of `x`. factor, state, errors: see `quantize.quantize` and `groups.quantize_groups`."""
    if offsets is None:
        made = quantize(x, format, columnwise, state, factor)
    else:
        made = Quantized(*quantize_groups(x, offsets, format, columnwise, state=state, factor=factor)[:3])
    if format.block is None:
        return made
    lines = x.shape[-1] if columnwise else made.data.shape[-2]
    return made._replace(scale=to_storage(made.scale, format, lines, columnwise))


def value_offsets(offsets: Tensor, format: Format, columnwise: bool = False) -> Tensor:
    """int32 [G+1]: where the groups lie in `stored_values`."""
    return padded_offsets(offsets, group_multiple(format)) if is_padded(format, columnwise) else offsets


def stored_values(
    copy: Quantized,
    format: Format,
    columns: int,
    columnwise: bool = False,
    offsets: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """What a product multiplies: x̂ as `[..., M, K]`, formed in FP32 and rounded once to `dtype`. columns: K.

    Of groups: `[rows, K]` with the groups at `value_offsets`, and zero elsewhere.
    """
    data, scale, amax = copy
    transposed = columnwise and format.transposes
    rows = data.shape[-1] * format.element.packed if transposed else data.shape[-2]
    if format.block is not None:
        scale = from_storage(scale, format, rows, columns, columnwise)
    if offsets is None:
        return dequantize(Quantized(data, scale, amax), format, columnwise, dtype)
    places = value_offsets(offsets, format, columnwise)
    return dequantize_groups(GroupedQuantized(data, scale, amax, places), format, columnwise, dtype)


def unrotated(values: Tensor, format: Format, columnwise: bool) -> Tensor:
    """`stored_values` without the rotation that the column-wise copy of some formats has; FP32 in, FP32 out."""
    return hadamard.rotate_back(values.mT).mT if columnwise and format.hadamard else values


def rows_of_values(values: Tensor, format: Format, columnwise: bool, offsets: Tensor, rows: int) -> Tensor:
    """`stored_values` of groups as the rows `[T, K]` that were quantised, zero in those of no group.

    Of a rotated copy they are what `unrotated` gives.
    """
    return unpad_groups(values, offsets, rows, group_multiple(format)) if is_padded(format, columnwise) else values
