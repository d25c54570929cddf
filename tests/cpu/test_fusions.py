"""Fused operations that a program registers for all runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import fusible_ops as ops
from fusible_ops import fusions
from tests.cases import TAIL
from tests.compare import assert_bitwise_equal
from tests.models import MLP, Inputs, as_if_on, step


@pytest.fixture(autouse=True)
def nothing_registered() -> Iterator[None]:
    yield
    for functions in (fusions.JOINT, fusions.FORWARD, fusions.BACKWARD):
        functions.clear()


class ScaledBias(ops.FusedOperation):
    """ConstantScale and Bias at once, forward and backward; counts what it runs."""

    def __init__(self, basic_ops):
        super().__init__(basic_ops)
        self.ran = []

    def fuser_forward(self, basic_op_ctxs, input_, **_):
        self.ran.append("forward")
        scale, bias = self.basic_ops
        return input_ * scale.scale + bias.bias, [(), ()]

    def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
        self.ran.append("backward")
        db = grad_output.reshape(-1, self.basic_ops[1].size).sum(0)
        return grad_output * self.basic_ops[0].scale, [[], [db]], [(), ()]


def pairs(made):
    """A fusion function that puts `made(scale, bias)` in the place of each ConstantScale, Bias."""

    def function(found, *, recipe):
        assert recipe is None
        out, at = [], 0
        while at < len(found):
            both = found[at : at + 2]
            if [type(op) for op in both] == [ops.ConstantScale, ops.Bias]:
                out.append(made(both))
                at += 2
            else:
                out.append(found[at])
                at += 1
        return out

    return function


def model_and_input() -> tuple[ops.Sequential, torch.Tensor]:
    model = ops.Sequential(
        ops.Linear(8, 16, device="cpu"), ops.ConstantScale(3.0), ops.Bias(16, device="cpu"), ops.GELU(),
        ops.Linear(16, 4, device="cpu"),
    )  # fmt: skip
    with torch.no_grad():
        for p in model.parameters():
            p.normal_()
    return model, torch.randn(5, 8)


def results(model: ops.Sequential, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = model(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("kind", ["forward_backward", "forward", "backward"])
def test_registered_fusions_run(kind: str) -> None:
    model, x = model_and_input()
    wanted = results(model, x)
    model._module_groups = None
    made: list[ScaledBias] = []
    getattr(ops, f"register_{kind}_fusion")(pairs(lambda both: made.append(ScaledBias(both)) or made[-1]))
    for got, want in zip(results(model, x), wanted, strict=True):
        torch.testing.assert_close(got, want)
    (fused,) = made
    assert fused.ran == {"forward_backward": ["forward", "backward"]}.get(kind, [kind])
    fuser = model._module_groups[0]
    in_forward, in_backward = ([op for op, _ in placed] for placed in (fuser._forward_ops, fuser._backward_ops))
    assert (fused in in_forward, fused in in_backward) == ("forward" in kind, "backward" in kind)
    assert [i for _, at in fuser._forward_ops for i in at] == list(range(7))


def test_what_is_left_the_rules_take() -> None:
    mlp = MLP("swiglu", bias=True)
    model = mlp.build(TAIL, "cpu", torch.bfloat16)
    model.append(ops.ConstantScale(0.5)).append(ops.Bias(64, device="cpu", dtype=torch.bfloat16))
    inputs = Inputs.random(TAIL, 64, "cpu", torch.bfloat16)
    with as_if_on("sm_90a"):
        wanted = step(model, mlp, inputs)
        model._module_groups = None
        ops.register_forward_backward_fusion(pairs(ScaledBias))
        got = step(model, mlp, inputs)
        names = [type(op).__name__ for op, _ in model._module_groups[0]._forward_ops]
        text = model.explain()
    assert names == ["GroupedMLP", "ScaledBias"]
    assert text.startswith(
        "registered, forward: ScaledBias takes ConstantScale, Bias\nregistered, backward: ScaledBias"
    )
    for name, want in wanted.items():
        assert_bitwise_equal(got[name], want, name)


def test_prepended_functions_come_first() -> None:
    model, x = model_and_input()
    asked = []
    for name in "ab":
        ops.register_forward_fusion(lambda found, *, recipe, name=name: asked.append(name) or found, prepend=True)
    model(x)
    assert asked == ["b", "a"]


@pytest.mark.parametrize(
    "wrong", [lambda found: found[:-1], lambda found: found[::-1], lambda found: [*found, found[0]]]
)
def test_a_function_may_not_lose_or_reorder_ops(wrong) -> None:
    model, x = model_and_input()
    ops.register_backward_fusion(lambda found, *, recipe: wrong(found))
    with pytest.raises(RuntimeError, match="Found mismatch after fusing operations"):
        model(x)


@pytest.mark.parametrize("output_to_caller", [False, True])
def test_a_fused_op_may_not_leave_out_what_somebody_wants(output_to_caller: bool) -> None:
    class Lost(ops.FusedOperation):
        def fuser_forward(self, basic_op_ctxs, input_, **_):
            return input_, [(None,)]

    made = ops.MakeExtraOutput().set_extra_output_channel(0, "x", output_to_caller=output_to_caller)
    model = ops.Sequential(made, ops.AddExtraInput().set_extra_input_channel(0, "x"))
    ops.register_forward_fusion(lambda found, *, recipe: [Lost(found[:1]), found[1]])
    with pytest.raises(RuntimeError, match="is public" if output_to_caller else "outside its forward fusion"):
        model(torch.ones(2))
