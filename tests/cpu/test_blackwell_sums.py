"""`deterministic=False`: on Blackwell the kernel's own sums, by atomics; elsewhere nothing. On the double."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import fusible_ops as ops
from cute_kernels import launch
from cute_kernels import ops as kernels
from cute_kernels.blackwell import frontend, padded, padded_mxfp8
from fusible_ops.sharing import SUMMED
from tests import frontend_double
from tests.cases import Splits
from tests.compare import assert_as_accurate, assert_bitwise_equal
from tests.frontend_double import Operation
from tests.models import MLP, Inputs, as_if_on, step

TAIL = Splits("tail", (96, 0, 130, 74), 512)
FULL = MLP("scaled_swiglu", 64, 32, bias=True, scale_bias=True, interleave=32)
MXFP8 = ops.MXFP8BlockScaling()
RECIPES = pytest.mark.parametrize("recipe", [None, MXFP8], ids=["bf16", "mxfp8"])


@pytest.fixture(autouse=True)
def double(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """CPU tensors go through the adapters, to a double of cuDNN Frontend's classes."""
    monkeypatch.setattr(frontend, "library", lambda: frontend_double)
    monkeypatch.setattr("cute_kernels.blackwell.wgrad.library", lambda: frontend_double)
    monkeypatch.setattr(frontend, "on", lambda device: nullcontext())
    monkeypatch.setattr(Operation, "made", [])
    for prefix, module in (("padded_", padded), ("padded_mxfp8_", padded_mxfp8)):
        for name in ("gemm", "gemm_act", "gemm_dact", "wgrad", "wgrad_"):
            monkeypatch.setattr(kernels, prefix + name, getattr(module, prefix + name))
    launch.forget()
    yield
    launch.forget()


def results(
    model: ops.Sequential, recipe: ops.Recipe | None, arch: str = "sm_100a", mlp: MLP = FULL
) -> dict[str, Tensor]:
    inputs = Inputs.random(TAIL, mlp.hidden, "cpu", torch.bfloat16)
    with as_if_on(arch), ops.autocast(recipe=recipe) if recipe else nullcontext():
        return step(model, mlp, inputs)


def build(mlp: MLP = FULL, **sequential: Any) -> ops.Sequential:
    torch.manual_seed(0)
    return mlp.build(TAIL, "cpu", torch.bfloat16, **sequential)


def gradients_of_glus() -> list[Operation]:
    return [made for made in Operation.made if type(made).__name__ == "GroupedGemmDgluSm100"]


@RECIPES
def test_the_kernel_is_asked_for_its_sums(recipe: ops.Recipe | None) -> None:
    """Of what the deterministic way leaves out nothing is computed outside, and no result is less accurate."""
    model = build(deterministic=False, on_unfused="error")
    got = results(model, recipe)
    (made,) = gradients_of_glus()
    assert made.samples["dbias"] is not None and made.settings["_deterministic"] is False
    products = [made for made in Operation.made if type(made).__name__ in ("GroupedGemmSm100", "GroupedGemmQuantSm100")]
    assert sum(made.calls for made in products) == 2  # fc2 forward, fc1 input gradient
    want = results(build(), recipe)
    exact = results(copy.deepcopy(build(rules=())).float(), None, "cpu")
    for name, value in got.items():
        if not name.endswith("1"):  # an expert without tokens
            assert_as_accurate(value, want[name], exact[name], name)


@RECIPES
def test_the_default_asks_for_none_that_atomics_make(recipe: ops.Recipe | None) -> None:
    for mlp in (FULL, MLP("scaled_swiglu", 64, 32, interleave=32), MLP("swiglu", 64, 32, bias=True, interleave=32)):
        results(build(mlp, on_unfused="error"), recipe, mlp=mlp)
    for made in gradients_of_glus():
        assert made.samples["dbias"] is None
        assert made.settings["_deterministic"] or made.samples["prob"].unique().tolist() == [1.0]


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_squared_relu_s_dprobs_are_never_made_by_atomics(deterministic: bool) -> None:
    """Its kernel has a value for each tile too, so nothing would be gained."""
    mlp = MLP("scaled_srelu", 64, 32)
    results(build(mlp, on_unfused="error", deterministic=deterministic), MXFP8, mlp=mlp)
    (made,) = [made for made in Operation.made if type(made).__name__ == "GroupedGemmDsreluSm100"]
    assert made.settings["deterministic"] is True and made.samples["dprob_workspace"] is not None


@RECIPES
def test_only_what_is_wanted_is_summed(recipe: ops.Recipe | None) -> None:
    """Without a bias no dbias; and MXFP8's dprobs then stay one for each tile, which costs nothing."""
    mlp = MLP("scaled_swiglu", 64, 32, interleave=32)
    got = results(build(mlp, deterministic=False), recipe, mlp=mlp)
    (made,) = gradients_of_glus()
    assert made.samples["dbias"] is None and made.settings["_deterministic"] is (recipe is not None)
    want = results(build(mlp), recipe, mlp=mlp)
    for name in ("y", "dprobs"):
        assert_as_accurate(got[name], want[name], want[name].float(), name)


def test_two_linears_with_different_splits_sum_by_their_own() -> None:
    """The bias gradient of the first is of its own groups, so the kernel, which has the second's, does not sum it."""
    inputs, values = Inputs.random(Splits("rows", (4, 0, 9), 20), 64, "cpu", torch.bfloat16), []
    for deterministic in (True, False):
        torch.manual_seed(0)
        model = FULL.build(Splits("rows", (4, 0, 9), 20), "cpu", torch.bfloat16, deterministic=deterministic)
        with as_if_on("sm_100a"):
            y = model(inputs.x.clone(), torch.tensor([4, 0, 9]), inputs.probs, torch.tensor([6, 6, 1]), inputs.probs)
        y.sum().backward()
        values.append({name: p.grad for name, p in model.named_parameters()})
    assert all(made.samples["dbias"] is None for made in gradients_of_glus())
    for name, grad in values[0].items():
        assert_as_accurate(values[1][name], grad, grad.float(), name)


def test_elsewhere_it_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    want = results(build(), None, "sm_90a")
    asked: list[str] = []
    for name in ("grouped_gemm_dact", "grouped_dbias", "grouped_wgrad", "grouped_gemm"):
        original = getattr(kernels, name)

        def watched(*args: Any, _original: Any = original, _name: str = name, **how: Any) -> Any:
            assert "deterministic" not in how
            asked.append(_name)
            return _original(*args, **how)

        monkeypatch.setattr(kernels, name, watched)
    got = results(build(deterministic=False, on_unfused="error"), None, "sm_90a")
    assert "grouped_gemm_dact" in asked
    for name, value in want.items():
        assert_bitwise_equal(got[name], value, name)
    model = build(deterministic=False)
    assert_bitwise_equal(results(model, None, "cpu")["y"], results(build(), None, "cpu")["y"], "unfused")


def test_a_sequential_keeps_it_and_checks_it() -> None:
    model = build(deterministic=False)
    others = [model[:2], model + [ops.SwiGLU()], copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    assert not any(other.deterministic for other in others) and build().deterministic is True
    assert "deterministic=False" in model.options_key
    with pytest.raises(TypeError, match="deterministic must be True or False; got 'no'"):
        build(deterministic="no")
    with pytest.raises(TypeError, match="deterministic must be True or False; got 0"):
        model.deterministic = 0
    model.deterministic = True
    results(model, None)
    assert not gradients_of_glus()  # dprobs are computed outside again


def test_every_operator_that_can_add_by_atomics_is_known() -> None:
    from torch._C import _jit_get_all_schemas

    named = {s.name.removeprefix("fusible_ops::") for s in _jit_get_all_schemas() if s.name.startswith("fusible_ops::")}
    flagged = {name for name in named if "deterministic" in str(getattr(torch.ops.fusible_ops, name).default._schema)}
    assert flagged == SUMMED
