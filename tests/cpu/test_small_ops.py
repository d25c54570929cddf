"""Reshape, Dropout, and the arguments of the small activations."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import fusible_ops as ops
from tests.compare import assert_bitwise_equal


def test_reshape_there_and_back() -> None:
    model = ops.Sequential(ops.Reshape((4, -1, 8)), ops.Identity())
    x = torch.randn(3, 32, requires_grad=True)
    y = model(x)
    assert_bitwise_equal(y, x.detach().reshape(4, -1, 8))
    dy = torch.randn_like(y)
    y.backward(dy)
    assert_bitwise_equal(x.grad, dy.reshape(3, 32))


def test_reshape_around_a_grouped_linear_keeps_rows() -> None:
    grouped = ops.GroupedLinear(2, 8, 16, device="cpu")
    x, sizes = torch.randn(6, 8), torch.tensor([1, 4])
    y = ops.Sequential(ops.Reshape((2, 3, 8)), grouped, ops.Reshape((6, 16)))(x, sizes)
    assert_bitwise_equal(y, grouped(x, sizes))
    with pytest.raises(ValueError, match=r"Reshape 0: \(12, 4\) to \(6, 8\) changes what a row is"):
        ops.Sequential(ops.Reshape((6, 8)), grouped)(torch.randn(12, 4), sizes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("p", [0.0, 0.25, 0.9, 1.0])
def test_dropout(p: float, dtype: torch.dtype) -> None:
    """What is left is scaled, the gradient goes the same way, and about p of it is gone."""
    model = ops.Sequential(ops.Dropout(p))
    x = (torch.rand(64, 128) + 0.5).to(dtype).requires_grad_()
    y = model(x)
    kept = y != 0
    scale = 1 / (1 - p) if p < 1 else 0.0
    assert_bitwise_equal(y, torch.where(kept, x.detach() * scale, 0).to(dtype))
    assert abs(kept.float().mean().item() - (1 - p)) <= 4 * math.sqrt(p * (1 - p) / x.numel())
    dy = torch.randn_like(y)
    y.backward(dy)
    assert_bitwise_equal(x.grad, (dy * kept * scale).to(dtype))
    other = model(x)
    assert p in (0.0, 1.0) or not torch.equal(other, y)
    model.eval()
    assert_bitwise_equal(model(x), x.detach())


@pytest.mark.parametrize("p", [-0.1, 1.5, math.nan, "0.1", None])
def test_dropout_refuses_what_is_no_probability(p: Any) -> None:
    with pytest.raises(ValueError, match="p must be between 0 and 1"):
        ops.Dropout(p)


@pytest.mark.parametrize("make", [ops.SiTUGLU, ops.ScaledSiTUGLU])
@pytest.mark.parametrize(("name", "value"), [("beta1", 0.0), ("beta1", -1.0), ("beta2", math.inf), ("beta2", math.nan)])
def test_situglu_betas(make: type, name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        make(**{name: value})


@pytest.mark.parametrize("value", [0.0, -2.0, math.inf, math.nan])
def test_tanh_clamp_scale(value: float) -> None:
    with pytest.raises(ValueError, match="tanh_clamp_scale must be finite and positive"):
        ops.ScaledTanhSReLU(tanh_clamp_scale=value)


@pytest.mark.parametrize("make", [ops.ScaledSwiGLU, ops.ScaledSiTUGLU, ops.ScaledGeGLU, ops.ScaledClampedQGeGLU])
def test_gated_ones_refuse_recomputation_in_the_mlp(make: type) -> None:
    assert make().activation_recompute_in_mlp is False
    with pytest.raises(ValueError, match="does not support activation recomputation"):
        make(activation_recompute_in_mlp=True)


def test_the_others_take_it() -> None:
    assert ops.ScaledSReLU(activation_recompute_in_mlp=True).activation_recompute_in_mlp
    assert ops.ScaledTanhSReLU(tanh_clamp_scale=2.0, activation_recompute_in_mlp=True).activation_recompute_in_mlp


def test_constants_are_shown_and_described() -> None:
    op = ops.ScaledSiTUGLU(beta1=3)
    assert "beta1=3.0, beta2=25.0" in repr(op)
    assert op.describe().facts["beta1"] == 3.0 and op.describe().facts["clamp_scale"] is None


def test_scales_belong_to_the_rows_after_a_reshape() -> None:
    model = ops.Sequential(ops.Reshape((-1, 8)), ops.ScaledSReLU())
    x, scales = torch.randn(3, 16), torch.rand(6)
    assert_bitwise_equal(model(x, scales), ops.ScaledSReLU()(x.reshape(6, 8), scales))
