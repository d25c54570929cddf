"""scheduler and sm_margin: what they may be, that a Sequential keeps them, and that they reach every kernel call."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fusible_ops as ops
from cute_kernels import ops as kernels
from cute_kernels.scheduling import ALONE, LONG_ROWS, Sharing, choose_scheduler, choose_wgrad_scheduler
from fusible_ops import call
from fusible_ops.sharing import BOUNDED, COUNTED, WGRADS, shared
from tests.cases import Splits
from tests.compare import assert_bitwise_equal
from tests.models import MLP, Inputs, as_if_on, step

SPLITS = Splits("small", (3, 0, 6), rows=11)
FULL = MLP("scaled_swiglu", bias=True, scale_bias=True)


def test_the_scheduler_is_static_unless_asked_or_beside_something() -> None:
    assert choose_scheduler(None, 0)[0] == "static"
    assert choose_scheduler(None, 8)[0] == "dynamic"
    assert [choose_scheduler(asked, margin)[0] for asked in ("static", "dynamic") for margin in (0, 8)] == [
        "static", "static", "dynamic", "dynamic",
    ]  # fmt: skip
    assert all(choose_scheduler(asked, margin)[1] for asked in (None, "static") for margin in (0, 8))


def test_weight_gradients_of_many_rows_are_dealt_out_as_ctas_go() -> None:
    assert [choose_wgrad_scheduler(None, 0, rows)[0] for rows in (LONG_ROWS - 1, LONG_ROWS)] == ["static", "dynamic"]
    for asked in ("static", "dynamic"):
        assert choose_wgrad_scheduler(asked, 0, LONG_ROWS)[0] == asked == choose_wgrad_scheduler(asked, 8, 1)[0]
    assert choose_wgrad_scheduler(None, 8, 1)[0] == "dynamic" and choose_wgrad_scheduler(None, 0, LONG_ROWS)[1]


@pytest.mark.parametrize("facts", [{"scheduler": "greedy"}, {"sm_margin": -1}], ids=str)
def test_what_they_may_be(facts: dict[str, Any]) -> None:
    (name,) = facts
    with pytest.raises(ValueError, match=name):
        ops.Sequential(ops.SwiGLU(), **facts)
    model = ops.Sequential(ops.SwiGLU())
    with pytest.raises(ValueError, match=name):
        setattr(model, name, facts[name])
    assert (model.scheduler, model.sm_margin) == (None, 0)


@pytest.mark.parametrize("margin", [1.5, "2", None, True, torch.tensor(2), [1]], ids=str)
def test_a_margin_is_an_int(margin: Any) -> None:
    with pytest.raises(TypeError, match="sm_margin must be an int of at least 0; got"):
        ops.Sequential(ops.SwiGLU(), sm_margin=margin)
    model = ops.Sequential(ops.SwiGLU())
    with pytest.raises(TypeError, match="sm_margin must be an int of at least 0; got"):
        model.sm_margin = margin
    assert model.sm_margin == 0


def test_a_sequential_keeps_them() -> None:
    model = FULL.build(SPLITS, "cpu", torch.float32, scheduler="dynamic", sm_margin=16)
    others = [model[:2], model + [ops.SwiGLU()], copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    assert [(m.scheduler, m.sm_margin) for m in others] == [("dynamic", 16)] * 4


class Recorder:
    """The operators, with the name and keyword arguments of every call kept."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        def run(*args: Any, plans: object = None, **kwargs: Any) -> Any:
            self.calls.append((name, kwargs))
            return getattr(kernels, name)(*args, **kwargs)

        return run


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    found = Recorder()
    monkeypatch.setattr(call, "entry_points", lambda *_: found)
    return found


def layer_step(mlp: MLP, parts: slice, **sequential: Any) -> dict[str, torch.Tensor]:
    """Results of one step of some of the layer's ops, as if on Hopper."""
    torch.manual_seed(0)
    with as_if_on("sm_90a"):
        model = mlp.build(SPLITS, "cpu", torch.bfloat16, on_unfused="error", **sequential)[parts]
        if len(model) == 3:
            return step(model, mlp, Inputs.random(SPLITS, mlp.hidden, "cpu", torch.bfloat16))
        x = torch.randn(SPLITS.rows, model[0].in_features, dtype=torch.bfloat16, requires_grad=True)
        probs = torch.rand(SPLITS.rows, requires_grad=True)
        y = model(x, *mlp.extras(SPLITS.tensor("cpu"), probs)[-model.groups()[0].num_extra_inputs :])
        y.sum().backward()
        return {"y": y.detach(), "dx": x.grad}


@pytest.mark.parametrize("parts", [slice(0, 3), slice(0, 2), slice(2, 3)], ids=["mlp", "linear_act", "linear"])
@pytest.mark.parametrize("scheduler", ["static", "dynamic"])
def test_every_kernel_call_shares(recorder: Recorder, scheduler: str, parts: slice) -> None:
    want = layer_step(FULL, parts)
    assert not any({"sm_margin", "counter"} & how.keys() for _, how in recorder.calls), "alone, no call says how"
    names = [name for name, _ in recorder.calls]
    recorder.calls.clear()
    got = layer_step(FULL, parts, scheduler=scheduler, sm_margin=8)
    for name in want:
        assert_bitwise_equal(got[name], want[name], name)
    dynamic = scheduler == "dynamic"
    assert [name.removesuffix("_and_counters") for name, _ in recorder.calls] == names
    working = [(name, how) for name, how in recorder.calls if name in BOUNDED]
    assert len(working) == len(names) - sum(name.startswith("group_offsets") for name in names)
    assert all(how["sm_margin"] == 8 for _, how in working)
    counters = [how["counter"] for name, how in working if dynamic and name in COUNTED]
    assert all("counter" not in how for name, how in working if not dynamic or name not in COUNTED)
    assert all(c.shape == (1,) and c.dtype == torch.int32 and not c.any() for c in counters)
    assert len({c.data_ptr() for c in counters}) == len(counters) == dynamic * sum(n in COUNTED for n in names)


def test_launches_that_share_a_counter_are_32_apart(recorder: Recorder) -> None:
    with as_if_on("sm_90a"):
        model = FULL.build(SPLITS, "cpu", torch.bfloat16, on_unfused="error", scheduler="dynamic")
        inputs = Inputs.random(SPLITS, FULL.hidden, "cpu", torch.bfloat16)
        y = model(inputs.x.requires_grad_(), *FULL.extras(SPLITS.tensor("cpu"), inputs.probs))
        for _ in range(12):
            y.backward(inputs.dy, retain_graph=True)
    used = [how["counter"].data_ptr() for name, how in recorder.calls if name in COUNTED]
    assert len(used) == 2 + 12 * 4
    assert len(set(used[:32])) == 32 and used[32:] == used[: len(used) - 32]


def test_a_delayed_weight_gradient_shares(recorder: Recorder) -> None:
    mlp = MLP("scaled_swiglu", linear={"delay_wgrad_compute": True})
    with as_if_on("sm_90a"):
        model = mlp.build(SPLITS, "cpu", torch.bfloat16, on_unfused="error", scheduler="dynamic", sm_margin=4)
        step(model, mlp, Inputs.random(SPLITS, mlp.hidden, "cpu", torch.bfloat16))
        recorder.calls.clear()
        for linear in (model[2], model[0]):
            linear.backward_dw()
    assert [(name, how["sm_margin"]) for name, how in recorder.calls] == [("grouped_wgrad", 4)] * 2
    assert len({how["counter"].data_ptr() for _, how in recorder.calls}) == 2


@pytest.mark.parametrize("scheduler", ["static", "dynamic"])
def test_fp8_kernels_leave_the_margin(recorder: Recorder, scheduler: str) -> None:
    """All that use more than one SM; their tiles are dealt out beforehand."""
    mlp = MLP("scaled_swiglu", 64, 64, bias=True, scale_bias=True)
    model = mlp.build(SPLITS, "cpu", torch.bfloat16, on_unfused="error")
    model.scheduler, model.sm_margin = scheduler, 8
    with as_if_on("sm_90a"), ops.autocast(recipe=ops.Float8BlockScaling()):
        step(model, mlp, Inputs.random(SPLITS, mlp.hidden, "cpu", torch.bfloat16))
    calls = [(name, how) for name, how in recorder.calls if name != "padded_group_offsets"]
    assert {name for name, _ in calls} >= {"fp8_quantize", "fp8_quantize_weight", "fp8_grouped_gemm_dact"}
    assert all(how["sm_margin"] == 8 and "counter" not in how for _, how in calls)


def test_changing_them_takes_effect(recorder: Recorder) -> None:
    with as_if_on("sm_90a"):
        model = FULL.build(SPLITS, "cpu", torch.bfloat16, on_unfused="error")
        inputs = Inputs.random(SPLITS, FULL.hidden, "cpu", torch.bfloat16)
        step(model, FULL, inputs)
        recorder.calls.clear()
        model.sm_margin = 12
        step(model, FULL, inputs)
    margins = [how["sm_margin"] for name, how in recorder.calls if name in BOUNDED]
    assert margins and set(margins) == {12}


def test_alone_the_kernels_are_called_as_they_are() -> None:
    plain = SimpleNamespace()
    assert shared(plain, ALONE, LONG_ROWS - 1, True) is plain and shared(plain, ALONE, LONG_ROWS, False) is plain
    assert shared(plain, Sharing("dynamic"), 1, False) is not plain


def test_alone_only_weight_gradients_of_many_rows_take_counters(recorder: Recorder) -> None:
    splits = Splits("long", (LONG_ROWS, 0), rows=LONG_ROWS)
    mlp = MLP("scaled_swiglu", hidden=8, intermediate=8)
    with as_if_on("sm_90a"):
        model = mlp.build(splits, "cpu", torch.bfloat16, on_unfused="error")
        step(model, mlp, Inputs.random(splits, mlp.hidden, "cpu", torch.bfloat16))
        with_counter = [(name, how["counter"].data_ptr()) for name, how in recorder.calls if "counter" in how]
        assert {name for name, _ in with_counter} <= WGRADS and len(set(with_counter)) == len(with_counter) == 2
        assert [name for name, _ in recorder.calls].count("group_offsets_and_counters") == 1
        assert "group_offsets" not in {name for name, _ in recorder.calls}
        recorder.calls.clear()
        with torch.no_grad():
            inputs = Inputs.random(splits, mlp.hidden, "cpu", torch.bfloat16)
            model(inputs.x, *mlp.extras(splits.tensor("cpu"), inputs.probs))
        assert all("counter" not in how for _, how in recorder.calls)
