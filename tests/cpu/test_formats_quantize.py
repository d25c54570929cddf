"""Rules of quantisation: rounding of scales, NaN, zeros and infinities, shapes, round trips, errors, storage order."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from cute_kernels.quantization import hadamard
from cute_kernels.quantization.casts import decode_e2m1, unpack_e2m1
from cute_kernels.quantization.formats import E2M1, E4M3, E5M2, Format, fp8_block, fp8_tensor, mxfp8, nvfp4
from cute_kernels.quantization.quantize import dequantize, quantize, quantize_blocks
from cute_kernels.quantization.random_bits import random_state
from cute_kernels.quantization.scale_layout import (
    from_storage,
    storage_shape,
    swizzle_128x4,
    swizzled_scale,
    to_storage,
    unswizzle_128x4,
)
from tests.compare import assert_as_accurate, assert_bitwise_equal
from tests.oracle_values import values

NAN, INF = float("nan"), float("inf")
FP8 = [fp8_tensor(), fp8_tensor(E5M2, True), fp8_block(), fp8_block(E5M2, 2), fp8_block(E4M3, 1, False)]
MX = [mxfp8(), mxfp8(E5M2), mxfp8(E4M3, 2)]
FP4 = [nvfp4(), nvfp4(2), nvfp4(hadamard=True), nvfp4(hadamard=True, stochastic=True)]
FORMATS = FP8 + MX + FP4


def u8(t: torch.Tensor) -> torch.Tensor:
    return t.clone(memory_format=torch.contiguous_format).reshape(t.shape or (1,)).view(torch.uint8)


def state_for(format: Format) -> torch.Tensor | None:
    return random_state() if format.rounding == "stochastic" else None


def block_of(amax: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[32, 32] whose rows and columns all hold ±amax as their largest magnitude."""
    x = torch.full((32, 32), amax / 8, dtype=dtype)
    x.fill_diagonal_(-amax)
    return x


# ----------------------------------------------------------------------------------------------------------------------
# Rounding, NaN, zeros


@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize(("amax", "byte"), [(448.0, 127), (448.5, 128), (500.0, 128), (896.0, 128), (896.5, 129)])
def test_mxfp8_scales_round_up(amax: float, byte: int, dims: int) -> None:
    format = mxfp8(E4M3, dims)
    for columnwise in (False, True):
        quantized = quantize(block_of(amax), format, columnwise)
        assert u8(quantized.scale).unique().tolist() == [byte]
        assert quantized.data.float().abs().max() <= 448
        # 448.5 rounded to BF16 first would be 448, one power of two too low
        assert dequantize(quantized, format, columnwise).abs().max() == quantized.data.float().abs().max() * 2.0 ** (
            byte - 127
        )


def test_e5m2_scales_round_up() -> None:
    for amax, byte in [(57344.0, 127), (57345.0, 128), (1.0, 112), (1.75, 112), (1.76, 113)]:
        assert u8(quantize(block_of(amax), mxfp8(E5M2)).scale).unique().tolist() == [byte]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("format", [mxfp8(), mxfp8(E4M3, 2)], ids=str)
def test_mxfp8_nan_reaches_the_scale_in_both_directions(format: Format, dtype: torch.dtype) -> None:
    x = torch.ones(32, 64, dtype=dtype)
    x[31, 5] = NAN
    for columnwise in (False, True):
        quantized = quantize(x, format, columnwise)
        scale = u8(quantized.scale)
        assert scale.max() == 255 and 0 < (scale == 255).sum() < scale.numel()
        back = dequantize(quantized, format, columnwise)
        assert back[31, 5].isnan()
        clean = back.isfinite()
        assert_bitwise_equal(back[clean], torch.ones_like(back[clean]), "blocks without NaN")
        assert (u8(quantized.data)[~clean] == 0x7F).all()


@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("columnwise", [False, True])
def test_zeros_stay_zeros(format: Format, columnwise: bool) -> None:
    quantized = quantize(torch.zeros(128, 256), format, columnwise, state_for(format))
    assert (u8(quantized.data) == 0).all()
    assert quantized.scale.float().isfinite().all()
    if format.scale.dtype == torch.float32:
        assert (quantized.scale == 1).all()
    elif format in MX:
        assert (u8(quantized.scale) != 255).all()
    assert_bitwise_equal(dequantize(quantized, format, columnwise), torch.zeros(128, 256), "zeros")


@pytest.mark.parametrize("format", FP8, ids=str)
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_fp8_scales_are_finite_and_positive_whatever_comes(format: Format, bad: float) -> None:
    x = values(130, 260)
    x[3, 200] = bad
    for columnwise in (False, True):
        quantized = quantize(x, format, columnwise)
        assert (quantized.scale.isfinite() & (quantized.scale > 0)).all()
        back = dequantize(quantized, format, columnwise)
        if bad == bad:
            assert back[3, 200] == (format.element.max if bad > 0 else -format.element.max)
        else:
            assert back[3, 200].isnan() and int(back.isnan().sum()) == 1


def test_only_the_block_of_the_bad_value_has_scale_one() -> None:
    x = values(2, 256)
    good = quantize(x, fp8_block()).scale
    x[1, 130] = NAN
    scale = quantize(x, fp8_block()).scale
    assert scale[1, 1] == 1
    assert_bitwise_equal(scale[[0, 0, 1], [0, 1, 0]], good[[0, 0, 1], [0, 1, 0]], "other blocks")


def test_nvfp4_has_no_infinity_and_loses_no_nan() -> None:
    x = values(32, 64)
    x[0, 20] = NAN
    quantized = quantize(x, nvfp4())
    assert quantized.amax is not None and quantized.amax.isnan()
    assert (u8(quantized.scale) == 0x7F).all() and (quantized.data == 0x77).all()
    x[0, 20] = -INF
    quantized = quantize(x, nvfp4())
    assert quantized.scale.float().isfinite().all() and u8(quantized.scale)[0, 1] == 0x7E
    assert decode_e2m1(unpack_e2m1(quantized.data))[0, 20] == -6


# ----------------------------------------------------------------------------------------------------------------------
# FP32 scales


def test_fp32_scale_rules() -> None:
    def scales(amax: float, format: Format, dtype: torch.dtype = torch.float32) -> float:
        return quantize(torch.full((1, 128), amax, dtype=dtype), format).scale.flatten()[0].item()

    plain, power = fp8_block(E4M3, 1, False), fp8_block()
    third = torch.tensor(448.0) / torch.tensor(3.0)
    assert scales(3.0, plain) == third.reciprocal().item()
    assert scales(3.0, power) == 2.0**-7  # the factor 149.3 rounds down to 128
    assert scales(448.0, power) == 1.0 and scales(449.0, power) == 2.0
    # amax_epsilon is the least amax
    floored = dataclasses.replace(power, amax_epsilon=1.0)
    assert scales(1e-5, floored) == scales(1.0, power) == scales(0.0, floored)
    assert scales(2.0, floored) == scales(2.0, power)
    # a factor beyond FP32 becomes the largest finite value: of x's dtype for blocks, of FP32 for tensors
    tiny = 2.0**-133
    largest = {
        dtype: torch.tensor(torch.finfo(dtype).max).reciprocal().item() for dtype in (torch.float32, torch.bfloat16)
    }
    assert (
        scales(tiny, plain) == largest[torch.float32] and scales(tiny, plain, torch.bfloat16) == largest[torch.bfloat16]
    )
    assert scales(tiny, fp8_tensor(), torch.bfloat16) == largest[torch.float32]
    assert scales(tiny, power) == 2.0**-127
    assert scales(2.0**-24, plain, torch.float16) == torch.tensor(2.0**-24 / 448).item()  # past FP16, as it is


def test_gradients_in_e5m2_are_read_as_e5m2() -> None:
    """A dy whose only non-zero value is 1.0 dequantises to 1.0; the element type is part of the format."""
    dy = torch.zeros(128, 128)
    dy[5, 7] = 1.0
    for format in (fp8_block(E5M2), fp8_tensor(E5M2), mxfp8(E5M2), fp8_block(E4M3), mxfp8(E4M3)):
        for columnwise in (False, True):
            assert_bitwise_equal(dequantize(quantize(dy, format, columnwise), format, columnwise), dy, str(format))
    assert mxfp8(E5M2) != mxfp8(E4M3) and fp8_block(E5M2) != fp8_block(E4M3)


# ----------------------------------------------------------------------------------------------------------------------
# Shapes and round trips


@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("columnwise", [False, True])
def test_round_trip_is_idempotent(format: Format, columnwise: bool) -> None:
    """What is representable stays: quantising the dequantised matrix gives it back."""
    if format.hadamard or format.rounding == "stochastic":
        pytest.skip("the column-wise copy is another matrix")
    x = values(128, 256)
    once = dequantize(quantize(x, format, columnwise), format, columnwise)
    twice = dequantize(quantize(once, format, columnwise), format, columnwise)
    if format.scale == nvfp4().scale or format.scale.rounding != "up":
        assert_as_accurate(twice, once, once, str(format))
    else:
        assert_bitwise_equal(twice, once, str(format))


@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("columnwise", [False, True])
def test_leading_dimensions_stand_alone(format: Format, columnwise: bool) -> None:
    if format.rounding == "stochastic":
        pytest.skip("random bytes follow the place in the whole tensor")
    x = torch.stack([values(64, 96), values(64, 96, 1, -20, 4), torch.zeros(64, 96).bfloat16()])
    together = quantize(x, format, columnwise)
    for g in range(3):
        alone = quantize(x[g], format, columnwise)
        assert_bitwise_equal(u8(together.data[g]), u8(alone.data), "data")
        assert_bitwise_equal(u8(together.scale[g]), u8(alone.scale), "scale")
        back = dequantize(together, format, columnwise)[g]
        assert_bitwise_equal(back, dequantize(alone, format, columnwise), "dequantised")


@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("columnwise", [False, True])
def test_no_rows(format: Format, columnwise: bool) -> None:
    quantized = quantize(torch.zeros(0, 64), format, columnwise, state_for(format))
    assert dequantize(quantized, format, columnwise).shape == (0, 64)


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_error_is_that_of_the_element(format: Format) -> None:
    x = torch.randn(256, 384)
    for columnwise in (False, True):
        back = dequantize(quantize(x, format, columnwise, state_for(format)), format, columnwise)
        if columnwise and format.hadamard:
            back = hadamard.rotate_back(back.t()).t()
        error = (back - x).norm() / x.norm()
        worst = {"E4M3": 0.04, "E5M2": 0.08, "E2M1": 0.2}[format.element.name]
        assert worst / 5 < error < worst, str(format)


def test_transposed_and_strided_inputs() -> None:
    x = values(64, 128)
    for format in (fp8_block(), mxfp8(), nvfp4(), nvfp4(2), fp8_tensor()):
        want = quantize(x, format)
        assert_bitwise_equal(u8(quantize(x.t().contiguous().t(), format).data), u8(want.data), "strided")
        turned = quantize(x.t(), format, columnwise=True)
        rows = u8(turned.data.t() if not format.transposes else turned.data)
        assert_bitwise_equal(rows, u8(want.data), "column-wise of the transpose")


def test_bytes_per_element() -> None:
    assert fp8_tensor().bytes_per_element == 1
    assert fp8_block().bytes_per_element == 1 + 4 / 128
    assert mxfp8().bytes_per_element == 1 + 1 / 32
    assert mxfp8(E4M3, 2).bytes_per_element == 1 + 1 / 1024
    assert nvfp4().bytes_per_element == 0.5 + 1 / 16


# ----------------------------------------------------------------------------------------------------------------------
# Errors


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: quantize(torch.zeros(4, 4, dtype=torch.float64), fp8_tensor()), "dtype is float64, needs bfloat16 or"),
        (lambda: quantize(torch.zeros(4), fp8_tensor()), r"shape is \(4,\), needs at least 2 dimensions"),
        (lambda: quantize(torch.zeros(4, 48), mxfp8()), "MXFP8 E4M3 1x32: K is 48, needs a multiple of 32"),
        (lambda: quantize(torch.zeros(48, 64), mxfp8(), True), "M is 48, needs a multiple of 32; grouped rows"),
        (lambda: quantize(torch.zeros(48, 64), mxfp8(E4M3, 2)), "M is 48, needs a multiple of 32"),
        (lambda: quantize(torch.zeros(4, 17), nvfp4()), "K is 17, needs a multiple of 16"),
        (lambda: quantize(torch.zeros(4, 16), nvfp4(stochastic=True)), "state is None, needs a random state"),
        (lambda: quantize(torch.zeros(4, 16), nvfp4(), state=random_state()), "state is given, needs none"),
        (lambda: quantize(torch.zeros(4, 16), nvfp4(stochastic=True), state=torch.zeros(2)), r"float32 \[2\] on cpu"),
        (lambda: quantize_blocks(torch.zeros(4, 16), nvfp4()), "amax is None, needs the largest magnitude"),
        (lambda: fp8_block(E2M1), "element is E2M1, needs E4M3 or E5M2"),
        (lambda: mxfp8(dims=3), "dims is 3, needs 1 or 2"),
        (lambda: nvfp4(2, hadamard=True), "takes neither hadamard nor stochastic"),
        (lambda: fp8_block(amax_epsilon=-1.0), "amax_epsilon must be finite"),
        (lambda: dataclasses.replace(nvfp4(), rounding="up"), "rounding is 'up'"),
        (lambda: hadamard.rotate(torch.zeros(4, 17)), "needs a multiple of 16"),
        (lambda: hadamard.rotate_back(torch.zeros(4, 17)), "needs a multiple of 16"),
        (lambda: to_storage(torch.zeros(()), fp8_tensor(), 4), "no block layout"),
        (lambda: storage_shape(fp8_tensor(), 4, 4), "no block layout"),
        (lambda: from_storage(torch.zeros(3, 4), fp8_block(), 5, 128), r"are \[3, 4\], need \[1, 8\]"),
        (lambda: swizzled_scale(torch.zeros(4, 1), fp8_block(), 4), "only one-byte scales"),
        (lambda: unswizzle_128x4(torch.zeros(128, 8, dtype=torch.uint8), 5, 3), "needs 128 x 4 bytes"),
    ],
)
def test_bad_input_is_refused_with_words(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


# ----------------------------------------------------------------------------------------------------------------------
# Storage


@pytest.mark.parametrize("format", [f for f in FORMATS if f.block is not None and f.rounding == "nearest"], ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(32, 64), (160, 2880), (288, 1856)])
@pytest.mark.parametrize("columnwise", [False, True])
def test_storage_round_trip_with_poisoned_padding(format: Format, rows: int, columns: int, columnwise: bool) -> None:
    """What the padding holds never matters; when written it is zero."""
    scale = quantize(values(rows, columns), format, columnwise).scale
    lines = columns if columnwise else rows
    stored = to_storage(scale, format, lines, columnwise)
    assert tuple(stored.shape) == storage_shape(format, rows, columns, columnwise)
    marked = torch.ones_like(scale.float()).to(scale.dtype) if scale.dtype == torch.float32 else scale
    real = u8(to_storage(torch.full_like(u8(marked), 255).view(scale.dtype), format, lines, columnwise)) == 255
    assert (u8(stored)[~real] == 0).all()
    poisoned = torch.where(real, u8(stored), 255).to(torch.uint8).view(stored.dtype).reshape(stored.shape)
    for buffer in (stored, poisoned):
        assert_bitwise_equal(u8(from_storage(buffer, format, rows, columns, columnwise)), u8(scale), str(format))


@pytest.mark.parametrize(("rows", "columns"), [(128, 4), (1, 1), (300, 9), (129, 90)])
def test_swizzle_puts_scale_i_j_where_the_product_looks(rows: int, columns: int) -> None:
    scale = torch.randint(1, 255, (rows, columns), dtype=torch.uint8)
    swizzled = swizzle_128x4(scale)
    assert swizzled.shape == (-(-rows // 128) * 128, -(-columns // 4) * 4)
    i, j = torch.arange(rows)[:, None], torch.arange(columns)[None, :]
    tile = (i // 128) * (swizzled.shape[1] // 4) + j // 4
    at = tile * 512 + (i % 32) * 16 + (i % 128) // 32 * 4 + j % 4
    assert_bitwise_equal(swizzled.flatten()[at], scale, "formula")
    assert int((swizzled != 0).sum()) == scale.numel()
    padding = torch.ones(swizzled.numel(), dtype=torch.bool)
    padding[at.flatten()] = False
    poisoned = torch.where(padding, 255, swizzled.flatten()).to(torch.uint8).reshape(swizzled.shape)
    assert_bitwise_equal(unswizzle_128x4(poisoned, rows, columns), scale, "round trip")
    stack = torch.stack([scale, scale.flip(0)])
    assert_bitwise_equal(swizzle_128x4(stack)[1], swizzle_128x4(scale.flip(0)), "leading dimensions")
    assert_bitwise_equal(unswizzle_128x4(swizzle_128x4(stack), rows, columns), stack, "leading dimensions")


@pytest.mark.parametrize("format", [mxfp8(), mxfp8(E4M3, 2), nvfp4(), nvfp4(2)], ids=str)
@pytest.mark.parametrize("columnwise", [False, True])
def test_swizzled_scale_is_the_swizzled_storage(format: Format, columnwise: bool) -> None:
    rows, columns = 160, 192
    scale = quantize(values(rows, columns), format, columnwise).scale
    lines = columns if columnwise else rows
    stored = to_storage(scale, format, lines, columnwise)
    outer = stored.mT if columnwise and not format.transposes else stored
    assert_bitwise_equal(
        u8(swizzled_scale(scale, format, lines, columnwise)), u8(swizzle_128x4(u8(outer))), str(format)
    )


# ----------------------------------------------------------------------------------------------------------------------
# Scales from elsewhere


def test_a_given_factor_replaces_the_tensor_s_own() -> None:
    """Delayed scaling: x · factor, saturating; stored is its reciprocal, once for each matrix."""
    x = torch.tensor([[[1.0, -3.0]], [[100.0, 0.5]]])
    for columnwise in (False, True):
        got = quantize(x, fp8_tensor(), columnwise, factor=torch.tensor([2.0, 8.0]))
        want = torch.tensor([[[2.0, -6.0]], [[448.0, 4.0]]])
        assert got.data.float().tolist() == (want.mT if columnwise else want).tolist()
        assert got.scale.tolist() == [0.5, 0.125]
