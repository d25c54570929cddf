"""What the adapters are given and give: matrices with their scales, and what an activation is called there."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_kernels.activation import Activation
from cute_kernels.catalog import SM100, SM100_ACTIVATION, Kernel
from cute_kernels.limits import dtype_name, raise_refusal
from cute_kernels.quantization.formats import Format
from cute_kernels.quantization.quantize import Quantized
from cute_kernels.quantization.scale_layout import swizzled_scale

FP4 = torch.float4_e2m1fn_x2
FORMATS = {torch.float8_e8m0fnu: "mxfp8", torch.float8_e4m3fn: "nvfp4"}
BLOCKS = {"mxfp8": 32, "nvfp4": 16}
INTERLEAVE = 32
"""Gate columns, then as many up columns, and so on."""
TILE_COLUMNS = 256
"""Columns of a tile of a product; deterministic sums over columns have one part for each."""
TILE = 128
"""Rows, and four scales of each, make a tile of scales."""


class Operand(NamedTuple):
    """One operand of a product.

    data: BF16; E4M3 or E5M2; or E2M1, two values a byte along the last dimension (float4_e2m1fn_x2, or uint8).
    Rows are [M, K]; a weight is [E, N, K], as it lies or as the transposed view of [E, K, N] where an adapter says so.
    scale: as `scale_layout.swizzled_scale` gives it, of all rows as one matrix, or of each group's weight; None for
    BF16. E8M0 makes it MXFP8 (32 values a scale), E4M3 NVFP4 (16).
    """

    data: Tensor
    scale: Tensor | None = None

    @property
    def format(self) -> str:
        """ "bfloat16" (or whatever dtype it has), "mxfp8" or "nvfp4"."""
        return dtype_name(self.data.dtype) if self.scale is None else FORMATS[self.scale.dtype]

    @property
    def columns(self) -> int:
        """K, in values."""
        return self.data.shape[-1] * (2 if self.data.dtype in (torch.uint8, FP4) else 1)

    def row(self, name: str) -> tuple[Kernel, dict[str, object]]:
        """(the catalogue's row of the kernel that does `name` with such operands, the letter "dtype" of its limits)."""
        if self.scale is None:
            return SM100["bfloat16"][name], {"dtype": dtype_name(self.data.dtype)}
        return SM100[self.format][name], {"dtype": "bfloat16"}

    def rows_as_they_lie(self) -> Tensor:
        """The data, E2M1 in the dtype of its own."""
        return self.data.view(FP4) if self.data.dtype == torch.uint8 else self.data


def check_scaled(**operands: Operand) -> None:
    """ValueError unless the operands are of one format and as long, their values lie without gaps, and they have the
    scales that they need.

    For their operations, once built, look at none of it: a compiled kernel takes scales by their address alone, and of
    some the second operand's K too. Rows are [lines, K], a weight [E, lines, K], each with blocks along the last
    dimension.
    """
    (first, one), (second, other) = operands.items()
    if one.scale is not None and (one.format, one.columns) != (other.format, other.columns):
        raise ValueError(
            f"{first} is {one.format} and has {one.columns} columns, {second} {other.format} and {other.columns}"
        )
    for name, given in operands.items():
        if given.scale is None:
            continue
        *experts, lines, _ = given.data.shape
        if not (given.data.is_contiguous() or given.data.mT.is_contiguous()) or not given.scale.is_contiguous():
            raise ValueError(f"{name}: strides are {given.data.stride()}; values and scales must lie without gaps")
        blocks = -(-given.columns // BLOCKS[given.format])
        needed = math.prod(experts) * (-(-lines // TILE) * TILE) * (-(-blocks // 4) * 4)
        if given.scale.numel() != needed:
            raise ValueError(
                f"{name}: {given.scale.numel()} scales are given, needs {needed}: tiles of {TILE} x 4 blocks"
            )


def check_margin(format: str, sm_margin: int) -> None:
    """ValueError for a margin of a weight gradient from "mxfp8" or "nvfp4": its kernel leaves no SM free."""
    if sm_margin and format in BLOCKS:
        raise ValueError(f"sm_margin is {sm_margin}, needs 0: cuDNN Frontend's weight gradient from {format} has none")


def operand(copy: Quantized, format: Format, columnwise: bool = False, ends: Tensor | None = None) -> Operand:
    """A copy that `quantization.quantize` made, of rows or of weights, as kernels take it.

    ends: of a column-wise copy of rows, for a weight gradient.
    """
    lines = copy.data.shape[-1] if columnwise and not format.transposes else copy.data.shape[-2]
    scale = swizzled_scale(copy.scale, format, lines, columnwise)
    return Operand(copy.data, scale if ends is None else group_tiles(scale, ends))


def weight_and_major(data: Tensor) -> tuple[Tensor, str]:
    """(a weight [E, N, K] as it lies in memory, which of "n" and "k" is contiguous there)."""
    if data.is_contiguous():
        return data, "k"
    if data.mT.is_contiguous():
        return data.mT, "n"
    raise ValueError(f"a weight [E, N, K] must be contiguous, or its transposed view; strides are {data.stride()}")


def in_three_dimensions(t: Tensor) -> Tensor:
    """A contiguous matrix [M, X] as [M, X, 1], as some operations want it."""
    rows, columns = t.shape
    return t.as_strided((rows, columns, 1), (columns, 1, rows * columns))


def tiled(scale: Tensor, rows: int, columns: int, matrices: int = 1) -> Tensor:
    """Scales of `matrices` matrices of [rows, columns] blocks as the view (32, 4, rows/128, 4, columns/4, matrices) of
    their tiles, as some operations want them.
    """
    return scale.reshape(matrices, -(-rows // TILE), -(-columns // 4), 32, 4, 4).permute(3, 4, 1, 5, 2, 0)


def scale_settings(x: Operand) -> dict[str, Any]:
    """What an operation must be told of the scales."""
    return {"sf_vec_size": 16 if x.scale is None else BLOCKS[x.format]}


def empty_scale(rows: int, columns: int, like: Tensor) -> Tensor:
    """Room for the scales of [rows, columns] blocks in tiles of 128 x 4, in `like`'s dtype."""
    return like.new_empty(1, -(-rows // TILE), -(-columns // 4), 32, 4, 4)


class Quantised(NamedTuple):
    """An FP8 result, quantised twice: blocks along its columns, and along its rows.

    Scales of the second lie for each group by itself, one after another, as `wgrad` reads them (`group_tiles`).
    """

    rowwise: Operand
    columnwise: Operand


def empty_quantised(rows: int, columns: int, dtype: torch.dtype, like: Operand) -> Quantised:
    """Room for [rows, columns] in FP8, with scales like those of `like`."""
    assert like.scale is not None
    block = BLOCKS[like.format]
    return Quantised(
        Operand(_fp8(rows, columns, dtype, like.data), empty_scale(rows, -(-columns // block), like.scale)),
        Operand(_fp8(rows, columns, dtype, like.data), empty_scale(columns, -(-rows // block), like.scale)),
    )


def _fp8(rows: int, columns: int, dtype: torch.dtype, like: Tensor) -> Tensor:
    return torch.empty(rows, columns, dtype=dtype, device=like.device)


def group_tiles(scale: Tensor, ends: Tensor) -> Tensor:
    """Scales along rows M, `scale_layout.swizzled_scale`s of the whole [X, M], in the order in which `wgrad` reads
    them: the tiles of the first group's rows, then those of the second's, and so on. Same shape; no host sync.

    A tile is 128 rows of X times 4 blocks: 128 rows of M in MXFP8, 64 in NVFP4. Groups begin and end at tiles.
    """
    tiles, row, column = _tiles(scale, ends)
    return tiles[row, column].reshape(scale.shape).view(scale.dtype)


def tiles_of_rows(grouped: Tensor, ends: Tensor) -> Tensor:
    """The inverse of `group_tiles`."""
    tiles, row, column = _tiles(grouped, ends)
    plain = torch.empty_like(tiles).index_put((row, column), tiles.flatten(0, 1))
    return plain.reshape(grouped.shape).view(grouped.dtype)


def _tiles(scale: Tensor, ends: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(the bytes as [row tiles, column tiles, bytes of one], row and column of each tile in the order by groups)."""
    high, wide = scale.shape[-2] // TILE, scale.shape[-1] // 4
    ends = ends.long() * wide // ends[-1:].clamp(min=1)  # in tiles
    starts = torch.cat([torch.zeros_like(ends[:1]), ends[:-1]])
    place = torch.arange(high * wide, device=scale.device)
    group = torch.bucketize(place, high * ends, right=True).clamp_(max=ends.shape[0] - 1)
    first, width = starts[group], (ends - starts)[group].clamp(min=1)
    row, column = (place - high * first) // width, first + (place - high * first) % width
    return scale.view(torch.uint8).reshape(high, wide, TILE * 4), row, column


def act_func(activation: Activation) -> str:
    """What a GLU is called there. Their "geglu" is the clamped SwiGLU; a GeGLU by gelu_tanh they have none."""
    refusal = SM100_ACTIVATION.check({"activation": activation.kind})
    if refusal is not None:
        raise_refusal(refusal)
    return {"swiglu": "swiglu", "clamped_swiglu": "geglu"}[activation.kind]


def interleave_of(activation: Activation) -> int:
    """How the columns of its pre-activation lie: blocks of gate and up, or 0 where there are no halves."""
    return INTERLEAVE if activation.is_glu else 0


def glu_letters(activation: Activation, major: str) -> dict[str, object]:
    """The letters of a GLU's limits that follow from the activation and from how its weight lies."""
    own: dict[str, object] = {name: getattr(activation, name) for name in ("limit", "alpha", "offset")}
    own |= {"activation": activation.kind, "glu_interleave": INTERLEAVE, "transposed_weight": major == "n"}
    return own


def constants(activation: Activation) -> dict[str, float]:
    """A GLU's constants by the names they have there."""
    if activation.kind != "clamped_swiglu":
        return {"linear_offset": 0.0}
    limit = float("inf") if activation.limit is None else activation.limit
    clamp = {"glu_clamp_max": limit, "glu_clamp_min": -limit}
    return {"linear_offset": activation.offset, "geglu_alpha": activation.alpha, **clamp}
