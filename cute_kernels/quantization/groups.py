"""Quantise rows that belong to groups: no block spans two groups, and amaxes are each group's own.

`x [T, K]` and `offsets` int32 `[G+1]` with a leading zero, as everywhere; G is at least 1. Rows past `offsets[G]` may
hold anything, NaN included, and never reach a result. Where blocks run down the rows, every group's rows begin at a
multiple of `group_multiple` in a padded copy of `padded_rows` rows, a size that the host knows without asking the
device. Padding is zeros before quantisation, so its data is zero too. No host sync.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cute_kernels.limits import Refusal, raise_refusal
from cute_kernels.quantization import hadamard
from cute_kernels.quantization.formats import Format
from cute_kernels.quantization.quantize import (
    block_bytes,
    check,
    dequantize_blocks,
    fp32_scale,
    quantize_blocks,
    transpose_data,
)
from cute_kernels.reference import row_groups, tokens_only

MULTIPLE = 128
"""Rows that a padded group is a multiple of, but for MXFP8: the block of FP8, and a tile of swizzled scales."""


class GroupedQuantized(NamedTuple):
    """data and scale: as `quantize.Quantized`, of all rows (or padded rows) as one matrix; one scale per tensor is
    FP32 [G]. amax: FP32 [G] of a two-level format, else None. offsets: int32 [G+1], where the groups' rows lie.
    """

    data: Tensor
    scale: Tensor
    amax: Tensor | None
    offsets: Tensor


# ----------------------------------------------------------------------------------------------------------------------
# Rows


def group_multiple(format: Format) -> int:
    """Rows that a padded group is a multiple of in a copy of this format: of MXFP8 a block, 32, is enough."""
    return MULTIPLE if format.block is None or format.transposes else max(format.block)


def check_multiple(name: str, multiple: int) -> None:
    """ValueError, in the name of a function, for a number of rows that no padded group is a multiple of."""
    if not 1 <= multiple <= MULTIPLE:
        raise ValueError(f"{name}: multiple is {multiple}, needs 1 to {MULTIPLE}")


def padded_rows(rows: int, groups: int, multiple: int = MULTIPLE) -> int:
    """The most rows that `groups` groups of together at most `rows` rows take once each is padded to `multiple`."""
    return (rows + (multiple - 1) * min(groups, rows)) // multiple * multiple


def padded_offsets(offsets: Tensor, multiple: int = MULTIPLE) -> Tensor:
    """int32 [G+1]: where the groups begin once each is padded to `multiple`; an empty group takes no rows."""
    sizes = (offsets.diff() + (multiple - 1)) // multiple * multiple
    return torch.cat([torch.zeros_like(offsets[:1]), sizes.cumsum(0).to(offsets.dtype)])


def _move(x: Tensor, source: Tensor, target: Tensor, rows: int) -> Tensor:
    """[rows, K]: the groups' rows of x at `source` offsets moved to `target` offsets, zero elsewhere."""
    group = row_groups(rows, target).clamp(max=target.shape[0] - 2)
    index = torch.arange(rows, device=x.device) - target[group] + source[group]
    valid = (index < source[group + 1]) & (index >= source[group])
    valid &= torch.arange(rows, device=x.device) < target[-1]
    if not x.shape[0]:
        return x.new_zeros(rows, *x.shape[1:])
    return torch.where(valid[:, None], x[index.clamp(0, x.shape[0] - 1)], 0)


def pad_groups(x: Tensor, offsets: Tensor, multiple: int = MULTIPLE) -> tuple[Tensor, Tensor]:
    """(x with each group padded to `multiple` rows of zeros `[padded_rows(T, G), K]`, the padded offsets)."""
    moved_to = padded_offsets(offsets, multiple)
    return _move(x, offsets, moved_to, padded_rows(x.shape[0], offsets.shape[0] - 1, multiple)), moved_to


def unpad_groups(padded: Tensor, offsets: Tensor, rows: int, multiple: int = MULTIPLE) -> Tensor:
    """The inverse of `pad_groups`: `[rows, K]`, zero in the tail. offsets: those without padding."""
    return _move(padded, padded_offsets(offsets, multiple), offsets, rows)


def group_amax(line_amax: Tensor, offsets: Tensor) -> Tensor:
    """FP32 [G]: the largest of each group's lines `line_amax [rows]`; NaN if there is one, 0 for an empty group."""
    member = (
        row_groups(line_amax.shape[0], offsets) == torch.arange(offsets.shape[0] - 1, device=offsets.device)[:, None]
    )
    if not line_amax.shape[0]:
        return line_amax.new_zeros(member.shape[0])
    return torch.where(member, line_amax, 0).amax(1)


# ----------------------------------------------------------------------------------------------------------------------
# Quantise


def is_padded(format: Format, columnwise: bool) -> bool:
    """Whether groups must be padded in this direction: where blocks, or rows of the copy, run along the tokens."""
    return columnwise or (format.block is not None and format.block[0] > 1)


def _line_grid(values: Tensor, offsets: Tensor, rows: int, every: int) -> Tensor:
    """[rows / every]: values[g] for every `every`-th line, 0 outside the groups."""
    lines = row_groups(rows, offsets)[::every]
    return torch.cat([values, torch.zeros_like(values[:1])])[lines]


def _grid(values: Tensor, offsets: Tensor, rows: int, format: Format, turn: bool) -> Tensor:
    """`values [G]` where `quantize_blocks` wants them: [blocks, 1], or [1, blocks] where tokens are the columns."""
    if format.block is None:
        return _line_grid(values, offsets, rows, 1)[:, None]
    lines = _line_grid(values, offsets, rows, format.block[1] if turn else format.block[0])
    return lines[None, :] if turn else lines[:, None]


def _check(x: Tensor, offsets: Tensor, format: Format, columnwise: bool, state: Tensor | None) -> None:
    if x.dim() != 2 or offsets.dim() != 1 or offsets.shape[0] < 2 or offsets.device != x.device:
        wanted = f"x [T, K] and offsets [G+1] on {x.device} with G of at least 1"
        found = f"x is {list(x.shape)}, offsets are {list(offsets.shape)} on {offsets.device}"
        raise_refusal(Refusal(format.name, "call", wanted, found))
    check(x[:0], format, columnwise, state)


def quantize_groups(
    x: Tensor,
    offsets: Tensor,
    format: Format,
    columnwise: bool = False,
    padded: bool = False,
    state: Tensor | None = None,
    factor: Tensor | None = None,
) -> GroupedQuantized:
    """`quantize` for the rows of each group by itself, in one matrix. Shapes as there, with M the rows or padded rows.

    Rows are padded where they must be (`is_padded`), and row-wise also if `padded` asks for it. Unpadded, the scales of
    tail rows are those of zeros. state, factor (FP32 [G]): as in `quantize`. Raises ValueError: see `quantize.check`;
    also for other shapes or devices of x and offsets.
    """
    _check(x, offsets, format, columnwise, state)
    if padded or is_padded(format, columnwise):
        x, offsets = pad_groups(x, offsets, group_multiple(format))
    else:
        x = tokens_only(x, offsets)
    return quantize_padded(x, offsets, format, columnwise, state, factor)


def quantize_padded(
    x: Tensor,
    offsets: Tensor,
    format: Format,
    columnwise: bool = False,
    state: Tensor | None = None,
    factor: Tensor | None = None,
    amax: Tensor | None = None,
) -> GroupedQuantized:
    """`quantize_groups` of rows as they lie: zero past the last group, groups at multiples of what blocks need.

    amax: of a two-level format each group's largest magnitude, FP32 [G], where it is known; of a column-wise copy that
    is rotated, that of the rotated values.
    """
    rows = x.shape[0]
    turn = columnwise and not format.is_square
    source = x.mT.contiguous() if turn else x
    if turn and format.hadamard:
        source = hadamard.rotate(source)
    grid = factors = None
    if format.two_level:
        if amax is None:
            amax = group_amax(source.abs().amax(0 if turn else 1).float(), offsets)
        grid = _grid(amax, offsets, rows, format, turn)
    if format.block is None:
        if factor is None:
            factor = fp32_scale(group_amax(source.abs().amax(1).float(), offsets), format, x.dtype)
        factors = _grid(factor, offsets, rows, format, turn)
    data, scale = quantize_blocks(source, format, grid, block_bytes(source, state, columnwise), factors)
    if format.block is None:
        assert factor is not None
        scale = factor.reciprocal()
    elif columnwise and turn != format.transposes:
        scale = scale.mT.contiguous()
    if columnwise and turn != format.transposes:
        data = transpose_data(data, format)
    return GroupedQuantized(data, scale, amax if format.two_level else None, offsets)


def dequantize_groups(
    quantized: GroupedQuantized, format: Format, columnwise: bool = False, dtype: torch.dtype = torch.float32
) -> Tensor:
    """x̂ as `[rows, K]`, the groups at `quantized.offsets`; padding and tail are zero. See `quantize.dequantize`."""
    data, scale, amax, offsets = quantized
    turn = columnwise and not format.is_square
    if columnwise and turn != format.transposes:
        data = transpose_data(data, format)
        scale = scale.mT if format.block is not None else scale
    rows = data.shape[-1] * format.element.packed if turn else data.shape[0]
    if format.block is None:
        scale = _grid(scale, offsets, rows, format, turn)
    grid = None if amax is None else _grid(amax, offsets, rows, format, turn)
    values = dequantize_blocks(data, scale, format, grid)
    values = values.mT if turn else values
    return tokens_only(values, offsets).to(dtype).contiguous()
