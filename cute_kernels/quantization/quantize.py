"""Quantise and dequantise matrices in plain PyTorch: the bytes that every quantising kernel must give.

Shapes: `x [..., M, K]` in BF16, FP16 or FP32; each matrix of the leading dimensions stands alone. Blocks lie along K;
with `columnwise` they lie along M, for a product that sums over M. M = 0 is legal. ⌈·⌉ divides and rounds up.

| format | data | scale | column-wise data | column-wise scale |
|---|---|---|---|---|
| FP8 per tensor | `[M, K]` | `[]` | `[K, M]` | `[]` |
| FP8 1x128 | `[M, K]` | `[M, ⌈K/128⌉]` | `[K, M]` | `[K, ⌈M/128⌉]` |
| FP8 128x128 | `[M, K]` | `[⌈M/128⌉, ⌈K/128⌉]` | `[K, M]` | `[⌈K/128⌉, ⌈M/128⌉]` |
| MXFP8 1x32 | `[M, K]` | `[M, K/32]` | `[M, K]` | `[M/32, K]` |
| MXFP8 32x32 | `[M, K]` | `[M/32, K/32]` | `[M, K]` | `[M/32, K/32]` |
| NVFP4 1x16 | `[M, K/2]` | `[M, K/16]` | `[K, M/2]` | `[K, M/16]` |
| NVFP4 16x16 | `[M, K/2]` | `[M/16, K/16]` | `[K, M/2]` | `[K/16, M/16]` |

`scale_layout` turns these scales into Transformer Engine's padded storage and into the swizzled order of a product.

Numerics: maxima, scales and the products `x · factor` are FP32; x is rounded once, by `casts`. Rules of the scales,
with a the largest magnitude of the block (or tensor), NaN if there is one, and max that of the element:

- FP32: `s = max / max(a, amax_epsilon)` (IEEE division); 1 where that a is 0, Inf or NaN; an infinite s becomes the
  largest finite value, of x's dtype for blocks and of FP32 for tensors. Power of two: the mantissa of s is cleared.
  `q = cast(x · s)`; stored is `1 / s`, so it is always finite and positive. NaN is kept in the element.
- E8M0: byte `e = cast_e8m0(a · (1/max))`, `q = cast(x · 2^(127-e))`. NaN gives byte 255 and elements 0x7F. No element
  saturates but those of a block that holds Inf.
- NVFP4: see `nvfp4_scales`.

No host sync, no loop over elements; CPU and CUDA give the same bits.
Source: Transformer Engine 2.20, `common/recipe/recipe_common.cuh` and `common/cast` (Apache-2.0).
"""

from __future__ import annotations

from typing import NamedTuple, overload

import torch
from torch import Tensor
from torch.nn import functional as F

from cute_kernels.limits import Refusal, dtype_name, raise_refusal
from cute_kernels.quantization import hadamard, nvfp4_scales
from cute_kernels.quantization.casts import (
    cast_e2m1,
    cast_e8m0,
    cast_fp8,
    decode_e2m1,
    e8m0_reciprocal,
    pack_e2m1,
    unpack_e2m1,
)
from cute_kernels.quantization.formats import E8M0, FP32_POWER_OF_2, Format
from cute_kernels.quantization.random_bits import random_bytes

SOURCES = (torch.bfloat16, torch.float16, torch.float32)
"""The dtypes that can be quantised."""

_FLOAT_MAX = torch.finfo(torch.float32).max
_NO_MANTISSA = -0x00800000  # sign and exponent bits of FP32, as int32


class Quantized(NamedTuple):
    """data and scale as the table above has them; amax: FP32 [...] of a two-level format, else None."""

    data: Tensor
    scale: Tensor
    amax: Tensor | None = None


@overload
def parts_of(kept: None) -> tuple[None, None]: ...
@overload
def parts_of(kept: Tensor | Quantized) -> tuple[Tensor, Tensor | None]: ...
def parts_of(kept: Tensor | Quantized | None) -> tuple[Tensor | None, Tensor | None]:
    """(data, scale) of a tensor that may be kept quantised; of a plain one itself and None."""
    return (kept.data, kept.scale) if isinstance(kept, Quantized) else (kept, None)


def whole_of(data: Tensor, scale: Tensor | None) -> Tensor | Quantized:
    """The inverse of `parts_of`."""
    return data if scale is None else Quantized(data, scale)


# ----------------------------------------------------------------------------------------------------------------------
# Scales


def tensor_amax(x: Tensor) -> Tensor:
    """max |x| of each matrix, FP32 [...]; NaN if there is one, 0 for an empty matrix."""
    return block_amax(x, (max(x.shape[-2], 1), max(x.shape[-1], 1))).sum((-2, -1))


def block_amax(x: Tensor, block: tuple[int, int]) -> Tensor:
    """max |x| of each block of `block` rows and columns, FP32 [..., ⌈M/rows⌉, ⌈K/columns⌉]; NaN if there is one."""
    rows, columns = (-(-size // step) for size, step in zip(x.shape[-2:], block, strict=True))
    short = (0, columns * block[1] - x.shape[-1], 0, rows * block[0] - x.shape[-2])
    blocks = F.pad(x, short).reshape(*x.shape[:-2], rows, block[0], columns, block[1])
    return blocks.abs().amax((-3, -1)).float()


def fp32_scale(amax: Tensor, format: Format, source: torch.dtype) -> Tensor:
    """The factor s that x is multiplied by; FP32, amax's shape. source: x's dtype."""
    amax = torch.where(amax < format.amax_epsilon, format.amax_epsilon, amax)
    scale = torch.full_like(amax, format.element.max) / amax
    largest = _FLOAT_MAX if format.block is None else torch.finfo(source).max
    scale = scale.masked_fill(scale.isinf(), largest).masked_fill((amax == 0) | ~amax.isfinite(), 1.0)
    if format.scale == FP32_POWER_OF_2:
        scale = (scale.view(torch.int32) & _NO_MANTISSA).view(torch.float32)
    return scale


def e8m0_scale(amax: Tensor, format: Format) -> Tensor:
    """The stored E8M0 scale of a block; float8_e8m0fnu, amax's shape."""
    return cast_e8m0(amax * (1 / format.element.max))


def repeat(t: Tensor, times: int, dim: int) -> Tensor:
    """Each entry of t `times` times in a row along `dim`."""
    dim %= t.dim()
    return t.unsqueeze(dim + 1).expand(*t.shape[: dim + 1], times, *t.shape[dim + 1 :]).flatten(dim, dim + 1)


def spread(grid: Tensor, block: tuple[int, int], rows: int, columns: int) -> Tensor:
    """[..., ⌈rows/·⌉, ⌈columns/·⌉] -> [..., rows, columns]: each entry for every value of its block."""
    wide = repeat(grid, block[1], -1)[..., :columns] if block[1] > 1 else grid
    return repeat(wide, block[0], -2)[..., :rows, :] if block[0] > 1 else wide


# ----------------------------------------------------------------------------------------------------------------------
# Blocks as they lie


def _needed(amax: Tensor | None, format: Format) -> Tensor:
    if amax is None:
        raise ValueError(f"{format}: amax is None, needs the largest magnitude of the tensor")
    return amax


def quantize_blocks(
    x: Tensor,
    format: Format,
    amax: Tensor | None = None,
    random: Tensor | None = None,
    factor: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(data, scale) of `x [..., M, K]` for blocks that lie as `format.block` has them.

    amax: FP32, needed for one scale per tensor, where it broadcasts to x and gives the scale its shape, and for
    two-level formats, where it broadcasts to the grid of blocks; ValueError without it.
    random: uint8 of x's shape for stochastic rounding. factor: what x is multiplied by, in place of the scale that amax
    gives; only for one scale per tensor.
    """
    rows, columns = x.shape[-2:]
    wide = x.float()
    if format.block is None:
        if factor is None:
            factor = fp32_scale(_needed(amax, format), format, x.dtype)
        return cast_fp8(wide * factor, format.element), factor.reciprocal()
    blocks = block_amax(x, format.block)
    if format.two_level:
        scale = nvfp4_scales.block_scale(blocks, _needed(amax, format))
        factor = nvfp4_scales.block_encode_factor(scale, _needed(amax, format))
        codes = cast_e2m1(wide * spread(factor, format.block, rows, columns), random)
        return pack_e2m1(codes), scale
    if format.scale == E8M0:
        scale = e8m0_scale(blocks, format)
        factor = e8m0_reciprocal(scale)
    else:
        factor = fp32_scale(blocks, format, x.dtype)
        scale = factor.reciprocal()
    return cast_fp8(wide * spread(factor, format.block, rows, columns), format.element), scale


def dequantize_blocks(data: Tensor, scale: Tensor, format: Format, amax: Tensor | None = None) -> Tensor:
    """The inverse of `quantize_blocks`, FP32; scale and amax broadcast as they do there."""
    values = decode_e2m1(unpack_e2m1(data)) if format.element.packed == 2 else data.float()
    if format.block is None:
        return values * scale
    if format.two_level:
        factor = nvfp4_scales.block_decode_factor(scale, _needed(amax, format))
    else:
        factor = scale.float()
    return values * spread(factor, format.block, *values.shape[-2:])


def transpose_data(data: Tensor, format: Format) -> Tensor:
    """The stored data of the transposed matrix, contiguous."""
    if format.element.packed == 2:
        return pack_e2m1(unpack_e2m1(data).mT.contiguous())
    return data.mT.contiguous()


# ----------------------------------------------------------------------------------------------------------------------
# Matrices


def check(x: Tensor, format: Format, columnwise: bool = False, state: Tensor | None = None) -> None:
    """Raises ValueError, before anything is computed, if `x` or `state` does not suit the format."""

    def refuse(wanted: str, found: str, fix: str = "") -> None:
        raise_refusal(Refusal(format.name, "call", wanted, found, fix))

    if x.dtype not in SOURCES:
        refuse(" or ".join(dtype_name(dtype) for dtype in SOURCES), f"dtype is {dtype_name(x.dtype)}")
    if x.dim() < 2:
        refuse("at least 2 dimensions [..., M, K]", f"shape is {tuple(x.shape)}")
    for letter, size, multiple in zip("MK", x.shape[-2:], format.multiple(columnwise), strict=True):
        if size % multiple:
            fix = "grouped rows are padded by quantize_groups" if letter == "M" else ""
            refuse(f"a multiple of {multiple}", f"{letter} is {size}", fix)
    if format.element.packed == 2 and x.shape[-1] % 2:
        refuse("an even number", f"K is {x.shape[-1]}")
    if (state is not None) != (format.rounding == "stochastic"):
        wanted = "a random state for stochastic rounding" if state is None else "none: the format rounds to nearest"
        refuse(wanted, "state is None" if state is None else "state is given", "see random_bits.random_state")
    if state is not None and (state.dtype != torch.int64 or state.shape != (2,) or state.device != x.device):
        wanted = f"int64 [2] on {x.device}"
        refuse(wanted, f"state is {dtype_name(state.dtype)} {list(state.shape)} on {state.device}")


def block_bytes(x: Tensor, state: Tensor | None, columnwise: bool) -> Tensor | None:
    """uint8 of x's shape: the random bytes of `state` for the blocks of sixteen of x in row order; None for None.

    Row-wise and column-wise use independent bytes.
    """
    return None if state is None else random_bytes(x.numel() // 16, state, int(columnwise)).reshape(x.shape)


def quantize(
    x: Tensor,
    format: Format,
    columnwise: bool = False,
    state: Tensor | None = None,
    factor: Tensor | None = None,
) -> Quantized:
    """`x [..., M, K]` in `format`, blocks along K, or along M if `columnwise`. Shapes and formulas: see the module.

    Both directions are quantised from x itself; formats with `is_square` give the same values in both. `hadamard`
    formats rotate only the column-wise copy, before its amax is taken.

    state: int64 [2] as `random_bits.random_state` gives it, for stochastic rounding and for nothing else; the same
    state gives the same bytes. factor: FP32 [...], what each matrix is multiplied by in place of the scale of its own
    amax (delayed scaling); only for one scale per tensor. Raises ValueError: see `check`.
    """
    check(x, format, columnwise, state)
    turn = columnwise and not format.is_square
    source = x.mT.contiguous() if turn else x
    if turn and format.hadamard:
        source = hadamard.rotate(source)
    amax = tensor_amax(source) if format.two_level or (format.block is None and factor is None) else None
    grids = [None if t is None else t[..., None, None] for t in (amax, factor)]
    data, scale = quantize_blocks(source, format, grids[0], block_bytes(source, state, columnwise), grids[1])
    if format.block is None:
        scale = scale[..., 0, 0]
    elif columnwise and turn != format.transposes:
        scale = scale.mT.contiguous()
    if columnwise and turn != format.transposes:
        data = transpose_data(data, format)
    return Quantized(data, scale, amax if format.two_level else None)


def dequantize(
    quantized: Quantized, format: Format, columnwise: bool = False, dtype: torch.dtype = torch.float32
) -> Tensor:
    """x̂ = data · scale as `[..., M, K]`, formed in FP32 and rounded once to `dtype`.

    columnwise: whether `quantized` is the column-wise copy. For a `hadamard` format that copy gives the rotated matrix
    (what a product of two such copies multiplies); `hadamard.rotate_back` along M undoes it.
    """
    data, scale, amax = quantized
    turn = columnwise and not format.is_square
    if columnwise and turn != format.transposes:
        data = transpose_data(data, format)
        scale = scale.mT if format.block is not None else scale
    if format.block is None:
        scale = scale[..., None, None]
    grid = None if amax is None else amax[..., None, None]
    values = dequantize_blocks(data, scale, format, grid)
    return (values.mT if turn else values).to(dtype).contiguous()
