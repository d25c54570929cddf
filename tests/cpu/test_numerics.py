"""The survey of a chain's numbers names the op where they go wrong, forward and backward, and changes nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fusible_ops as ops
from fusible_ops.numerics import first_wrong, look, survey
from tests.cases import Splits
from tests.models import MLP, Inputs, step


def made(splits: Splits) -> tuple[MLP, ops.Sequential, Inputs]:
    mlp = MLP(bias=True)
    inputs = Inputs.random(splits, mlp.hidden, "cpu", torch.float32)
    return mlp, mlp.build(splits, "cpu", torch.float32), inputs


def test_numbers_are_those_of_the_chain():
    splits = Splits("plain", (5, 0, 11), 16)
    mlp, model, inputs = made(splits)
    want = step(model, mlp, inputs)
    model.zero_grad()
    extras = mlp.extras(splits.tensor("cpu", torch.int64), inputs.probs)
    seen = {(one.op, one.what): one for one in survey(model, inputs.x, *extras, grad_output=inputs.dy)}
    assert seen["GroupedLinear fc2", "result"].amax == pytest.approx(float(want["y"].abs().max()))
    assert seen["", "gradient of the input"].amax == pytest.approx(float(want["dx"].abs().max()))
    assert seen["GroupedLinear fc1", "gradient of weight0"].amax == pytest.approx(
        float(want["dfc1.weight0"].abs().max())
    )
    assert seen["GroupedLinear fc1", "gradient of weight1"].zeros == 1.0
    assert first_wrong(seen.values()) is None
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("where", ["weight", "bias", "probs"])
def test_the_first_wrong_tensor_is_named(where: str):
    splits = Splits("plain", (5, 0, 11), 16)
    mlp, model, inputs = made(splits)
    probs = inputs.probs.clone()
    with torch.no_grad():
        if where == "probs":
            probs[7] = float("inf")
        else:
            getattr(model[2 if where == "weight" else 0], f"{where}2")[0] = float("nan")
    wrong = first_wrong(survey(model, inputs.x, *mlp.extras(splits.tensor("cpu", torch.int64), probs)))
    named = {
        "weight": "GroupedLinear fc2 weight2",
        "bias": "GroupedLinear fc1 bias2",
        "probs": "ScaledSwiGLU act result",
    }
    assert wrong is not None and f"{wrong.op} {wrong.what}" == named[where]
    assert where != "probs" or wrong.row == 7
    assert "not finite" in str(wrong)


def test_plain_modules_and_gradients_are_seen_too():
    model = ops.Sequential(ops.Linear(8, 8), nn.LayerNorm(8), ops.GELU())
    dy = torch.ones(4, 8)
    dy[2, 3] = float("nan")
    seen = survey(model, torch.randn(4, 8), grad_output=dy)
    wrong = first_wrong(seen)
    assert wrong is not None and (wrong.op, wrong.what, wrong.row) == ("GELU 2", "gradient of the result", 2)
    assert [one.op for one in seen if one.what == "result"] == ["Linear 0", "LayerNorm 1", "GELU 2"]


def test_a_tensor_without_elements_holds_nothing_wrong():
    assert look("", "", torch.empty(0, 4)).not_finite == 0
    half = look("", "", torch.tensor([[0.0, -3.0], [float("nan"), 1.0]]))
    assert (half.amax, half.not_finite, half.row, half.zeros) == (3.0, 1, 1, 0.25)
