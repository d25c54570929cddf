"""Every format's bytes against those of other projects."""

from __future__ import annotations

import math
import warnings

import pytest
import torch

from cute_kernels.quantization.formats import E4M3, E5M2, Element, Format, fp8_block, mxfp8, nvfp4
from cute_kernels.quantization.quantize import quantize
from cute_kernels.quantization.scale_layout import swizzle_128x4, to_storage
from tests.compare import assert_bitwise_equal
from tests.oracle_values import (
    FP8_BLOCKS,
    FP8_ROWS,
    FP8_TENSORS,
    MXFP8,
    MXFP8_ROWS,
    NVFP4,
    NVFP4_AMAX,
    NVFP4_ROWS,
    SWIZZLED,
    digest,
    values,
)


def u8(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view(torch.uint8)


def from_hex(text: str, *shape: int) -> torch.Tensor:
    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8).reshape(shape)


def quantize_both(x: torch.Tensor, format: Format) -> tuple[torch.Tensor, ...]:
    """(data, scale, column-wise data, column-wise scale)."""
    rows, columns = quantize(x, format), quantize(x, format, columnwise=True)
    return rows.data, rows.scale, columns.data, columns.scale


def test_small_nvfp4() -> None:
    rows = quantize(values(16, 32), nvfp4())
    assert_bitwise_equal(rows.data[:4], from_hex(NVFP4_ROWS[0], 4, 16), "data")
    assert_bitwise_equal(u8(rows.scale[:4]), from_hex(NVFP4_ROWS[1], 4, 2), "scale")
    assert rows.amax is not None and rows.amax.item() == NVFP4_AMAX


def test_small_mxfp8() -> None:
    rows = quantize(values(4, 64, 2, -20, 12), mxfp8())
    assert_bitwise_equal(u8(rows.data), from_hex(MXFP8_ROWS[0], 4, 64), "data")
    assert_bitwise_equal(u8(rows.scale), from_hex(MXFP8_ROWS[1], 4, 2), "scale")


def test_small_fp8_blocks() -> None:
    rows = quantize(values(2, 130, 7, -20, 12), fp8_block())
    assert_bitwise_equal(u8(rows.data), from_hex(FP8_ROWS[0], 2, 130), "data")
    assert_bitwise_equal(rows.scale.t(), torch.exp2(torch.tensor(FP8_ROWS[1]).float()).reshape(2, 2), "scale")


@pytest.mark.parametrize("format", FP8_BLOCKS, ids=str)
def test_fp8_blocks(format: Format) -> None:
    data, scale, columns, column_scale = quantize_both(values(200, 300, 5, -20, 12), format)
    stored = to_storage(scale, format, 200), to_storage(column_scale, format, 300, columnwise=True)
    assert tuple(map(digest, (data, stored[0], columns, stored[1]))) == FP8_BLOCKS[format]


@pytest.mark.parametrize("format", FP8_TENSORS, ids=str)
def test_fp8_tensors(format: Format) -> None:
    data, scale, columns, column_scale = quantize_both(values(64, 96, 6), format)
    assert (digest(data), scale.item(), digest(columns)) == FP8_TENSORS[format]
    assert column_scale.item() == scale.item() and scale.shape == ()


@pytest.mark.parametrize("format", MXFP8, ids=str)
def test_mxfp8(format: Format) -> None:
    assert tuple(map(digest, quantize_both(values(256, 512, 4, -30, 30), format))) == MXFP8[format]


@pytest.mark.parametrize("format", NVFP4, ids=str)
def test_nvfp4(format: Format) -> None:
    data, scale, columns, column_scale = quantize_both(values(256, 512, 1), format)
    stored = to_storage(scale, format, 256), to_storage(column_scale, format, 512, columnwise=True)
    assert tuple(map(digest, (data, stored[0], columns, stored[1]))) == NVFP4[format]


def test_swizzle() -> None:
    scale = torch.arange(130 * 6).remainder(251).to(torch.uint8).view(130, 6)
    assert digest(swizzle_128x4(scale)) == SWIZZLED


@pytest.mark.parametrize("element", [E4M3, E5M2], ids=lambda e: e.name)
def test_mxfp8_equals_torchao_if_it_is_installed(element: Element) -> None:
    """Byte for byte, but for blocks of scale byte 0: there torchao multiplies by 1, Transformer Engine by 2^127."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor", reason="torchao is not installed")
    x = torch.randn(256, 256) * torch.exp2(torch.randint(-30, 30, (256, 1)).float())
    for source in (x, x.bfloat16(), x.masked_fill(torch.rand_like(x) < 0.001, math.nan), x.clamp(min=0) * math.inf):
        scale, data = module.to_mx(source, element.dtype, 32, module.ScaleCalculationMode.RCEIL)
        ours = quantize(source, mxfp8(element))
        assert_bitwise_equal(u8(ours.scale), u8(scale), "scale")
        numbers = ~data.float().isnan()
        assert torch.equal(numbers, ~ours.data.float().isnan())
        assert_bitwise_equal(u8(ours.data)[numbers], u8(data)[numbers], "data")
