"""What only NVFP4 has: scales in two levels, the rotation, stochastic rounding."""

from __future__ import annotations

import inspect

import pytest
import torch

from cute_kernels.quantization import hadamard
from cute_kernels.quantization.casts import decode_e2m1, unpack_e2m1
from cute_kernels.quantization.formats import nvfp4
from cute_kernels.quantization.groups import dequantize_groups, pad_groups, quantize_groups
from cute_kernels.quantization.nvfp4_scales import (
    block_decode_factor,
    block_encode_factor,
    block_scale,
    tensor_encode_scale,
)
from cute_kernels.quantization.quantize import Quantized, dequantize, quantize
from cute_kernels.quantization.random_bits import random_state
from tests.compare import assert_as_accurate, assert_bitwise_equal
from tests.oracle_values import values

INF = float("inf")


def matrix(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """diag(s) H / 4, element by element: H[i, j] = (-1)^(bits that i and j share)."""
    i = torch.arange(16)
    shared = i[:, None] & i[None, :]
    odd = (shared ^ shared >> 1 ^ shared >> 2 ^ shared >> 3) & 1
    return torch.tensor(hadamard.SIGNS, dtype=dtype)[:, None] * (1 - 2 * odd).to(dtype) / 4


# ----------------------------------------------------------------------------------------------------------------------
# Scales


def test_tensor_scale_at_its_ends() -> None:
    amax = torch.tensor([0.0, 2688.0, 6.0, 1e-38, 2.0**-149, INF])
    largest = torch.finfo(torch.float32).max
    assert tensor_encode_scale(amax).tolist() == [1.0, 1.0, 448.0, largest, largest, 1.0]
    assert tensor_encode_scale(torch.tensor(float("nan"))).isnan()


def test_block_scale_is_relative_to_the_tensor() -> None:
    amax = torch.tensor(6.0)
    scale = block_scale(torch.tensor([6.0, 3.0, 6.0 / 448, 0.0, 1e-6]), amax)
    assert scale.float().tolist() == [448.0, 224.0, 1.0, 0.0, 0.0]
    assert block_decode_factor(scale, amax)[:2].tolist() == [1.0, 0.5]
    assert (
        block_encode_factor(scale, amax)[0] == 1
        and block_encode_factor(scale, amax)[3] == torch.finfo(torch.float32).max
    )


def test_values_of_a_block_without_scale_vanish() -> None:
    """A block so small that its scale rounds to zero saturates its codes, and dequantises to zero."""
    x = torch.full((1, 32), 1e-9)
    x[0, :16] = 6.0
    quantized = quantize(x, nvfp4())
    assert quantized.scale.float()[0].tolist() == [448.0, 0.0]
    assert decode_e2m1(unpack_e2m1(quantized.data))[0, 16:].unique().tolist() == [6.0]
    assert_bitwise_equal(dequantize(quantized, nvfp4())[0, 16:], torch.zeros(16), "small block")


def test_representable_values_come_back_exactly() -> None:
    codes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
    x = codes.repeat(16, 4)
    for format, columnwise in ((nvfp4(), False), (nvfp4(2), False), (nvfp4(2), True)):
        assert_bitwise_equal(dequantize(quantize(x, format, columnwise), format, columnwise), x, str(format))
    assert_bitwise_equal(dequantize(quantize(x.t(), nvfp4(), True), nvfp4(), True), x.t(), "column-wise")


# ----------------------------------------------------------------------------------------------------------------------
# Rotation


def test_signs_are_those_of_the_mask() -> None:
    assert sum(1 << i for i, sign in enumerate(hadamard.SIGNS) if sign < 0) == 0xD7E8
    assert list(inspect.signature(hadamard.rotate).parameters) == ["x"], "there is one rotation, not a choice of them"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_is_the_product_with_the_matrix(dtype: torch.dtype) -> None:
    whole = torch.randint(-32, 33, (64, 96)).to(dtype)  # sums are exact
    exact = (whole.double().reshape(64, 6, 16) @ matrix()).reshape(64, 96)
    assert_bitwise_equal(hadamard.rotate(whole), exact.to(dtype), "whole numbers")
    x = torch.randn(64, 96).to(dtype)
    exact = (x.double().reshape(64, 6, 16) @ matrix()).reshape(64, 96)
    plain = (x.reshape(64, 6, 16) @ matrix(dtype)).reshape(64, 96)
    assert_as_accurate(hadamard.rotate(x), plain, exact, "rotated")
    assert_as_accurate(hadamard.rotate_back(hadamard.rotate(x.float())), x.float(), x.float(), "and back")


def test_outliers_are_spread() -> None:
    x = torch.zeros(1, 16)
    x[0, 3] = 8.0
    assert hadamard.rotate(x).abs().unique().tolist() == [2.0]


def test_rotated_operands_give_the_plain_weight_gradient() -> None:
    """Two groups of 64 tokens, padded, rotated along the tokens, not quantised."""
    dy, x = torch.randn(128, 32), torch.randn(128, 48)
    offsets = torch.tensor([0, 64, 128], dtype=torch.int32)
    (dy_padded, padded), (x_padded, _) = pad_groups(dy, offsets), pad_groups(x, offsets)
    dy_rotated, x_rotated = hadamard.rotate(dy_padded.t()), hadamard.rotate(x_padded.t())
    for g in range(2):
        tokens, columns = slice(64 * g, 64 * g + 64), slice(int(padded[g]), int(padded[g + 1]))
        exact = dy[tokens].double().t() @ x[tokens].double()
        plain = dy[tokens].t() @ x[tokens]
        assert_as_accurate(dy_rotated[:, columns] @ x_rotated[:, columns].t(), plain, exact, f"dW of group {g}")


def test_only_the_columnwise_copy_is_rotated() -> None:
    x, format = values(32, 64), nvfp4(hadamard=True)
    assert_bitwise_equal(quantize(x, format).data, quantize(x, nvfp4()).data, "rows")
    turned = quantize(hadamard.rotate(x.t()), nvfp4())
    columns = quantize(x, format, columnwise=True)
    for mine, want in zip(columns, turned, strict=True):
        assert mine is not None and want is not None
        assert_bitwise_equal(mine, want, "columns")


# ----------------------------------------------------------------------------------------------------------------------
# Stochastic rounding


def blocks_with_thirds() -> torch.Tensor:
    """256 blocks of fifteen 0.3 and one 6.0, whose scale decodes to 1."""
    x = torch.full((256, 16), 0.3)
    x[:, 15] = 6.0
    return x


def decoded(quantized: Quantized) -> torch.Tensor:
    return dequantize(quantized, nvfp4(stochastic=True))


def test_stochastic_rounding_keeps_the_mean() -> None:
    x = blocks_with_thirds()
    assert decoded(quantize(x, nvfp4()))[:, :15].unique().tolist() == [0.5]
    drawn = decoded(quantize(x, nvfp4(stochastic=True), state=torch.tensor([1, 2])))
    assert drawn[:, :15].unique().tolist() == [0.0, 0.5] and (drawn[:, 15] == 6).all()
    assert abs(drawn[:, :15].mean().item() - 0.3) < 0.02
    below = decoded(quantize(-x, nvfp4(stochastic=True), state=torch.tensor([1, 2])))
    assert_bitwise_equal(below, -drawn, "negative")


def test_the_same_state_repeats_and_another_does_not() -> None:
    x, format = values(64, 64), nvfp4(hadamard=True, stochastic=True)
    for columnwise in (False, True):
        state = random_state()
        first = quantize(x, format, columnwise, state)
        assert_bitwise_equal(quantize(x, format, columnwise, state.clone()).data, first.data, "recomputed")
        for other in (random_state(), state + torch.tensor([0, 1]), state + torch.tensor([1, 0])):
            again = quantize(x, format, columnwise, other)
            assert not torch.equal(again.data, first.data)
            assert_bitwise_equal(again.scale, first.scale, "scales do not depend on it")


def test_directions_draw_independent_bits() -> None:
    x = torch.full((16, 16), 0.3)
    x.fill_diagonal_(6.0)  # symmetric: both directions quantise the same values
    format, state = nvfp4(stochastic=True), torch.tensor([5, 6])
    rows, columns = quantize(x, format, state=state), quantize(x, format, True, state)
    assert_bitwise_equal(rows.scale, columns.scale, "scales")
    assert not torch.equal(rows.data, columns.data)


def test_groups_draw_the_same_bits_wherever_the_tail_ends() -> None:
    x, format, state = values(100, 64), nvfp4(stochastic=True), torch.tensor([8, 9])
    offsets = torch.tensor([0, 40, 90], dtype=torch.int32)
    poisoned = x.clone()
    poisoned[90:] = float("nan")
    for columnwise in (False, True):
        first = quantize_groups(x, offsets, format, columnwise, state=state)
        second = quantize_groups(poisoned, offsets, format, columnwise, state=state)
        assert_bitwise_equal(first.data, second.data, "data")
        back = dequantize_groups(first, format, columnwise)
        inside = slice(0, 40)
        assert ((back[inside] - x[inside].float()).abs() <= x[inside].float().abs().max() / 3).all()
