"""The order in which scales are stored: Transformer Engine's padded storage, and the 128x4 tiles of a product.

`quantize` gives scales with one entry per block in the order of the data. Storage has the shapes of TE 2.20's quantised
tensors (ru(x, n) rounds x up to a multiple of n; M and K are those of the matrix before quantisation):

| format | storage, row-wise | storage, column-wise |
|---|---|---|
| FP8 1x128 | `[⌈K/128⌉, ru(M, 4)]` | `[⌈M/128⌉, ru(K, 4)]` |
| FP8 128x128 | `[⌈M/128⌉, ru(⌈K/128⌉, 4)]` | `[⌈K/128⌉, ru(⌈M/128⌉, 4)]` |
| MXFP8 | `[ru(M, 128), ru(K/32, 4)]` | `[ru(M/32, 4), ru(K, 128)]` |
| NVFP4 | `[ru(M, 128), ru(K/16, 4)]` | `[ru(K, 128), ru(M/16, 4)]` |

The square blocks of MXFP8 and NVFP4 are stored once for each of their rows (columns, in MXFP8's column-wise copy).
Padding is zero bytes when written, and never looked at when read. Leading dimensions are kept.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from cute_kernels.quantization.formats import Format
from cute_kernels.quantization.quantize import repeat


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _pad(scale: Tensor, rows: int, columns: int) -> Tensor:
    """Zero bytes up to multiples of `rows` and `columns`, contiguous."""
    short = (0, -scale.shape[-1] % columns, 0, -scale.shape[-2] % rows)
    if scale.dtype == torch.float32:
        return F.pad(scale, short).contiguous()
    return F.pad(scale.view(torch.uint8), short).contiguous().view(scale.dtype)


def _alignment(format: Format, columnwise: bool) -> tuple[int, int]:
    """What the rows and columns of the storage are multiples of."""
    if format.scale.dtype == torch.float32:
        return 1, 4
    return (4, 128) if columnwise and not format.transposes else (128, 4)


def _repeated_dim(format: Format, columnwise: bool) -> int:
    return -1 if columnwise and not format.transposes else -2


def storage_shape(format: Format, rows: int, columns: int, columnwise: bool = False) -> tuple[int, int]:
    """The storage's last two dimensions for a matrix of `rows` x `columns` (M x K)."""
    if format.block is None:
        raise ValueError(f"{format}: one scale per tensor has no block layout")
    if columnwise and format.transposes:
        rows, columns = columns, rows
    across, along = format.block
    if columnwise and not format.transposes:
        across, along = along, across
    if format.scale.dtype != torch.float32 and format.is_square:
        across, along = (across, 1) if _repeated_dim(format, columnwise) == -1 else (1, along)
    shape = -(-rows // across), -(-columns // along)
    if format.scale.dtype == torch.float32 and not format.is_square:
        shape = shape[1], shape[0]
    down, right = _alignment(format, columnwise)
    return _round_up(shape[0], down), _round_up(shape[1], right)


def to_storage(scale: Tensor, format: Format, rows: int, columnwise: bool = False) -> Tensor:
    """`quantize`'s scale in TE's padded storage: a new contiguous tensor of the scale's dtype, padding zero.

    rows: M, or K for a column-wise copy: how many lines of one entry each a square block stands for.
    """
    if format.block is None:
        raise ValueError(f"{format}: one scale per tensor has no block layout")
    if format.scale.dtype == torch.float32 and not format.is_square:
        scale = scale.mT
    elif format.scale.dtype != torch.float32 and format.is_square:
        dim = _repeated_dim(format, columnwise)
        scale = repeat(scale, format.block[0], dim).narrow(dim, 0, rows)
    return _pad(scale, *_alignment(format, columnwise))


def from_storage(stored: Tensor, format: Format, rows: int, columns: int, columnwise: bool = False) -> Tensor:
    """The inverse of `to_storage` for a matrix of `rows` x `columns` (M x K); padding is ignored, whatever it holds.

    Raises ValueError if `stored` has not the shape of `storage_shape`.
    """
    wanted = storage_shape(format, rows, columns, columnwise)
    if tuple(stored.shape[-2:]) != wanted:
        raise ValueError(f"{format}: stored scales are {list(stored.shape[-2:])}, need {list(wanted)}")
    assert format.block is not None
    across, along = format.block
    if columnwise and format.transposes:
        rows, columns = columns, rows
    elif columnwise:
        across, along = along, across
    height, width = -(-rows // across), -(-columns // along)
    if format.scale.dtype == torch.float32 and not format.is_square:
        return stored[..., :width, :height].mT.contiguous()
    if format.scale.dtype != torch.float32 and format.is_square:
        repeats = (1, across) if _repeated_dim(format, columnwise) == -1 else (across, 1)
        stored = stored[..., :: repeats[0], :: repeats[1]]
    return stored[..., :height, :width].contiguous()


def swizzle_128x4(scale: Tensor) -> Tensor:
    """[..., R, C] one-byte scales -> [..., ru(R, 128), ru(C, 4)] in the order that block-scaled products read.

    R: rows of the operand; C: its blocks along the summed dimension (for MXFP8's column-wise copy give `scale.mT`).
    Tiles of 128x4 lie one after the other, row by row of tiles; in a tile, scale (i, j) is byte
    `(i % 32) · 16 + (i // 32) · 4 + j`. Padding is zero bytes.

    Source: cuBLAS, "1D block scaling factors layout".
    """
    rows, columns = _round_up(scale.shape[-2], 128), _round_up(scale.shape[-1], 4)
    tiles = _pad(scale, 128, 4).view(torch.uint8).reshape(*scale.shape[:-2], rows // 128, 4, 32, columns // 4, 4)
    return tiles.transpose(-4, -2).reshape(*scale.shape[:-2], rows, columns).view(scale.dtype)


def unswizzle_128x4(swizzled: Tensor, rows: int, columns: int) -> Tensor:
    """The inverse of `swizzle_128x4`, [..., rows, columns]; padding is ignored, whatever it holds.

    swizzled: its last two dimensions hold ru(rows, 128) · ru(columns, 4) bytes, in any shape; else raises ValueError.
    """
    high, wide = _round_up(rows, 128), _round_up(columns, 4)
    if swizzled.shape[-2] * swizzled.shape[-1] != high * wide:
        raise ValueError(f"{list(swizzled.shape[-2:])} holds no {rows} x {columns} scales; needs {high} x {wide} bytes")
    lead = swizzled.shape[:-2]
    tiles = swizzled.contiguous().view(torch.uint8).reshape(*lead, high // 128, wide // 4, 32, 4, 4)
    plain = tiles.transpose(-4, -2).reshape(*lead, high, wide)
    return plain[..., :rows, :columns].contiguous().view(swizzled.dtype)


def swizzled_scale(scale: Tensor, format: Format, rows: int, columnwise: bool = False) -> Tensor:
    """`quantize`'s E8M0 or E4M3 scale, swizzled as the operand of a product. rows: as in `to_storage`."""
    if format.scale.dtype == torch.float32:
        raise ValueError(f"{format}: only one-byte scales are swizzled")
    outer = scale.mT if columnwise and not format.transposes else scale
    if format.is_square:
        assert format.block is not None
        outer = repeat(outer, format.block[0], -2).narrow(-2, 0, rows)
    return swizzle_128x4(outer.contiguous())
