"""What tests of operations fused under recipes share: what is run, and what is asked of two results of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fusible_ops as ops
from patterns import explain
from tests.cases import TAIL
from tests.compare import floor, relative_error
from tests.models import MLP, Inputs, as_if_on

Results = dict[str, Tensor]
Run = Callable[[ops.Sequential], Results]
WORSE = 1.05
"""How much larger the error of a fused gradient against FP32 may be than that of the unfused one."""
MIXES = pytest.mark.parametrize("wants", list(itertools.product([False, True], repeat=4))[1:], ids=str)
"""Every mix of what is wanted of (x, fc1, fc2, probs), but for nothing."""


def fused(model: ops.Sequential, recipe: ops.Recipe, rules: str) -> ops.Sequential:
    """The same modules, as fused on Hopper; one rule, whose name ends so, must take all of them."""
    again = ops.Sequential(dict(model.named_children()), on_unfused="error")
    with as_if_on("sm_90a"):
        (group,) = again.groups()
        plan = group.plan(again._target("sm_90a"), None, recipe)
        assert [step.rule and step.rule.name.endswith(rules) for step in plan.steps] == [True], explain(plan)
    return again


def both(model: ops.Sequential, run: Run, recipe: ops.Recipe, fuse: Callable) -> tuple[Results, Results]:
    """(fused, unfused) results, of the same random bits. fuse: (model, recipe) to the fused one."""
    with ops.autocast(recipe=recipe):
        torch.manual_seed(7)
        want = run(model)
        torch.manual_seed(7)
        with as_if_on("sm_90a"):
            got = run(fuse(model, recipe))
    assert got.keys() == want.keys()
    for name in want:
        assert got[name].shape == want[name].shape and got[name].dtype == want[name].dtype, name
        assert got[name].isfinite().all(), name
    return got, want


def assert_near(got: Results, want: Results, far: float, exact: Results | None) -> None:
    """Fused results are no further than `far` from the unfused ones, and as accurate where the exact ones are known."""
    for name, t in want.items():
        error = relative_error(got[name].float(), t.float())
        assert error <= far, f"{name}: {error:.4f} from the unfused one"
    for name, truth in (exact or {}).items():
        mine, theirs = relative_error(got[name].float(), truth), relative_error(want[name].float(), truth)
        assert mine <= WORSE * theirs + floor(torch.bfloat16), f"{name}: error {mine:.4f}, unfused {theirs:.4f}"


def partly_frozen(wants: tuple[bool, bool, bool, bool]) -> tuple[ops.Sequential, Run]:
    """A grouped MLP of which that much wants gradients, and a step of it."""
    mlp = MLP(hidden=160, intermediate=128, bias=True)
    model, inputs = mlp.build(TAIL, "cpu", torch.bfloat16), Inputs.random(TAIL, mlp.hidden, "cpu", torch.bfloat16)
    for op, want in ((model[0], wants[1]), (model[2], wants[2])):
        op.requires_grad_(want)

    def run(m: ops.Sequential) -> Results:
        m.zero_grad()
        x, probs = inputs.x.clone().requires_grad_(wants[0]), inputs.probs.clone().requires_grad_(wants[3])
        y = m(x, *mlp.extras(TAIL.tensor(), probs))
        y.backward(inputs.dy)
        results = {"y": y.detach(), "dx": x.grad, "dprobs": probs.grad}
        results |= {name: p.grad for name, p in m.named_parameters()}
        return {name: t for name, t in results.items() if t is not None}

    return model, run
