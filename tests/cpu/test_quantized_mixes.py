"""Weights of one op that are held unlike each other, and weights and delayed scales that come from elsewhere."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

import fusible_ops as ops
from fusible_ops.autocast_mode import autocast, quantized_model_init
from fusible_ops.quantized_tensor import QuantizedTensor
from fusible_ops.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Recipe
from tests.compare import assert_bitwise_equal

CPU = {"device": "cpu", "dtype": torch.bfloat16}
SIZES = torch.tensor([5, 15])
BLOCK, DELAYED = Float8BlockScaling(), DelayedScaling()


def held(recipe: Recipe = BLOCK, grad: bool = True) -> ops.GroupedLinear:
    torch.manual_seed(1)
    with quantized_model_init(recipe=recipe), torch.set_grad_enabled(grad):
        return ops.GroupedLinear(2, 32, 24, **CPU)


def called(op: nn.Module, recipe: Recipe | None = BLOCK) -> Tensor:
    with autocast(enabled=recipe is not None, recipe=recipe):
        return op(torch.ones(20, 32).bfloat16().requires_grad_(), *[SIZES] * isinstance(op, ops.GroupedLinear))


# ----------------------------------------------------------------------------------------------------------------------
# Unlike weights

OTHERS: dict[str, tuple[Callable[[], Parameter], str]] = {
    "plain": (lambda: ops.GroupedLinear(2, 32, 24, **CPU).weight0, "in high precision"),
    "another format": (lambda: held(Float8CurrentScaling()).weight0, "FP8 E4M3 per tensor, FP32 scale"),
}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("after", ["at once", "after a call"])
def test_a_mix_is_refused(other: str, at: int, after: str) -> None:
    op = held()
    if after == "after a call":
        called(op)
    make, name = OTHERS[other]
    setattr(op, f"weight{at}", make())
    second, first = (name, str(op.weight0.format)) if at else (str(op.weight1.format), name)
    message = re.escape(f"weight 1 is {second}, weight 0 is {first}; all weights of an op must be held in one format")
    with pytest.raises(RuntimeError, match=message):
        called(op)
    with pytest.raises(RuntimeError, match=message):
        called(op, None)


def test_a_mix_moves() -> None:
    op = held()
    op.weight0 = held(Float8CurrentScaling()).weight0
    want = [w.dequantize() for w in op.expert_weights()]
    for got, values in zip(op.to(torch.float32).expert_weights(), want, strict=True):
        assert_bitwise_equal(got.dequantize(torch.bfloat16), values, "values")


@pytest.mark.parametrize("lacking", [0, 1])
def test_copies_that_one_weight_lacks_are_made(lacking: int) -> None:
    """The row-wise copies are equal and blocks are square, so both copies hold the same values."""
    op, whole = held(), held()
    setattr(op, f"weight{lacking}", getattr(held(grad=False), f"weight{lacking}"))
    for model in (op, copy.deepcopy(op).to("cpu")):
        y, want = called(model), called(whole)
        assert_bitwise_equal(y.detach(), want.detach(), "y")
        for got, g in zip(
            torch.autograd.grad(y.sum(), model.parameters()),
            torch.autograd.grad(want.sum(), whole.parameters()),
            strict=True,
        ):
            assert_bitwise_equal(got, g, "gradients")


def test_quantised_weights_of_a_transposed_linear_are_refused() -> None:
    op = ops.GroupedLinear(2, 24, 32, transposed_weight=True, **CPU)
    for g, weight in enumerate(held().weight_parameters()):
        setattr(op, f"weight{g}", weight)
    with (
        pytest.raises(
            RuntimeError, match=r"transposed_weight=True needs weights in high precision; weight 0 is FP8 E4M3 128"
        ),
        autocast(recipe=BLOCK),
    ):
        op(torch.ones(20, 24).bfloat16(), SIZES)


# ----------------------------------------------------------------------------------------------------------------------
# Delayed scales


def made(kind: str) -> nn.Module:
    torch.manual_seed(1)
    with quantized_model_init(recipe=DELAYED):
        return ops.GroupedLinear(2, 32, 24, **CPU) if kind == "grouped" else ops.BasicLinear(32, 24, **CPU)


def step(op: nn.Module) -> None:
    called(op, DELAYED).sum().backward()
    op.zero_grad()
    with torch.no_grad():
        for p in op.parameters():
            p.mul_(0.5)


def loaded(op: nn.Module, kind: str, assign: bool) -> nn.Module:
    other = made(kind)
    other.load_state_dict(copy.deepcopy(op.state_dict()), assign=assign)
    return other


WAYS: dict[str, Callable[[nn.Module, str], nn.Module]] = {
    "load_state_dict": lambda op, kind: loaded(op, kind, False),
    "assign": lambda op, kind: loaded(op, kind, True),
    "deepcopy": lambda op, kind: copy.deepcopy(op),
    "pickle": lambda op, kind: pickle.loads(pickle.dumps(op)),
}


@pytest.mark.parametrize("kind", ["grouped", "basic"])
@pytest.mark.parametrize("way", WAYS)
def test_held_weights_go_on_with_the_scales_of_their_op(kind: str, way: str) -> None:
    """Bit for bit as the model that they come from, which they leave alone."""
    op = made(kind)
    for _ in range(3):
        step(op)
    other, kept = WAYS[way](op, kind), copy.deepcopy(op)
    for p in other.parameters():
        if isinstance(p, QuantizedTensor):
            assert p.quantizer is not None and p.quantizer.scales is other._scales["forward"]
    for _ in range(4):
        step(other)
    for a, b in zip(op._scales.values(), kept._scales.values(), strict=True):
        assert_bitwise_equal(a.scale, b.scale, "scale of the source")
        assert_bitwise_equal(a.amax_history, b.amax_history, "history of the source")
    for _ in range(4):
        step(op)
    for a, b in zip(op.parameters(), other.parameters(), strict=True):
        assert_bitwise_equal(a.dequantize(), b.dequantize(), "weights") if isinstance(a, QuantizedTensor) else None
    for mode, scales in op._scales.items():
        assert_bitwise_equal(scales.scale, other._scales[mode].scale, mode)
