"""Calls of a fused grouped MLP that are alike take a shortcut: the same bits, and the contracts of any other call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import fusible_ops as ops
from cute_kernels import reference
from fusible_ops.call import Call
from fusible_ops.fused.grouped_mlp import GroupedMLP
from tests.cases import Splits
from tests.compare import assert_bitwise_equal
from tests.models import MLP, Inputs, step
from tests.places import HOPPER, Place


class Apart(MLP):
    """Weights that lie apart, the last at the lowest address or not, as it happens."""

    def build(self, *args: Any, **options: Any) -> ops.Sequential:
        model = super().build(*args, **options)
        for p in reversed(list(model.parameters())):
            p.data = p.data.clone()
        return model


SPLITS = Splits("tail", (9, 0, 14), rows=40)
STACKED = MLP("scaled_swiglu", linear={"single_grouped_weight": True})
CASES = {
    "stacked": STACKED,
    "discrete": MLP("scaled_swiglu"),
    "apart": Apart("scaled_swiglu"),
    "interleaved": replace(STACKED, activation="scaled_geglu", interleave=8),
    "unary": replace(STACKED, activation="scaled_srelu"),
    "without_probs": replace(STACKED, activation="swiglu"),
}


@pytest.fixture(params=[Place("cpu", True), pytest.param(Place("cuda", True), marks=HOPPER)], ids=["cpu", "sm_90a"])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    with request.param.context():
        yield request.param


@pytest.fixture(params=["stacked", "discrete", "apart"])
def mlp(request: pytest.FixtureRequest) -> MLP:
    return CASES[request.param]


@contextmanager
def shortcuts_only() -> Iterator[None]:
    """Within it a call that takes no shortcut raises."""
    with mock.patch.object(Call, "forward", side_effect=AssertionError("this call takes no shortcut")):
        yield


def inputs_for(place: Place, mlp: MLP, seed: int = 1) -> Inputs:
    return Inputs.random(SPLITS, mlp.hidden, place.device, torch.bfloat16, seed)


def warm(place: Place, mlp: MLP, **sequential: object) -> ops.Sequential:
    """The layer after some steps."""
    model = mlp.build(SPLITS, place.device, torch.bfloat16, **place.options(), **sequential)
    for _ in range(3):
        step(model, mlp, inputs_for(place, mlp))
    return model


def called(model: ops.Sequential, mlp: MLP, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """(x, y) of a call that takes a shortcut."""
    x, probs = inputs.x.clone().requires_grad_(), inputs.probs.clone().requires_grad_()
    with shortcuts_only():
        return x, model(x, *mlp.extras(SPLITS.tensor(x.device), probs))


@pytest.mark.parametrize("sharing", [{}, {"scheduler": "dynamic", "sm_margin": 4}], ids=["alone", "shared"])
@pytest.mark.parametrize("case", CASES)
def test_the_same_bits(place: Place, case: str, sharing: dict[str, object]) -> None:
    mlp = CASES[case]
    model = warm(place, mlp, **sharing)
    fresh, inputs = ops.Sequential(*model, **sharing), inputs_for(place, mlp, seed=2)
    with shortcuts_only():
        got = step(model, mlp, inputs)
    want = step(fresh, mlp, inputs)
    want = {key: want[other] for key, other in zip(got, want, strict=True)}
    for name in want:
        assert_bitwise_equal(got[name], want[name], name)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(place: Place, mlp: MLP, mode: Callable) -> None:
    model, inputs = warm(place, mlp), inputs_for(place, mlp)
    extras = mlp.extras(SPLITS.tensor(place.device), inputs.probs)
    want = step(model, mlp, inputs)["y"]
    with mode():
        for _ in range(3):
            model(inputs.x, *extras)
        with shortcuts_only():
            assert_bitwise_equal(model(inputs.x, *extras), want)


def test_a_second_backward_and_none_of_backward(place: Place, mlp: MLP) -> None:
    model, inputs = warm(place, mlp), inputs_for(place, mlp)
    x, y = called(model, mlp, inputs)
    with pytest.raises(RuntimeError, match="no double backward"):
        torch.autograd.grad(y, x, inputs.dy, create_graph=True)
    first = torch.autograd.grad(y, [x, *model.parameters()], inputs.dy, retain_graph=True)
    second = torch.autograd.grad(y, [x, *model.parameters()], inputs.dy)
    for a, b in zip(first, second, strict=True):
        assert_bitwise_equal(a, b)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.backward(inputs.dy)


@pytest.mark.parametrize("which", [0, -1])
def test_a_weight_that_was_changed_in_place(place: Place, mlp: MLP, which: int) -> None:
    model, inputs = warm(place, mlp), inputs_for(place, mlp)
    _, y = called(model, mlp, inputs)
    with torch.no_grad():
        list(model.parameters())[which].mul_(2)
    with pytest.raises(RuntimeError, match=r"changed in place|modified by an inplace operation"):
        y.backward(inputs.dy)


def test_a_weight_whose_values_lie_elsewhere_at_backward(place: Place, mlp: MLP) -> None:
    """Gradients are those of the weights that forward read."""
    model, inputs = warm(place, mlp), inputs_for(place, mlp)
    x, y = called(model, mlp, inputs)
    want = torch.autograd.grad(y, x, inputs.dy, retain_graph=True)[0]
    for p in model.parameters():
        p.data = torch.zeros_like(p)
    assert want.any()
    assert_bitwise_equal(torch.autograd.grad(y, x, inputs.dy)[0], want)


@pytest.mark.parametrize("delayed", [False, True])
def test_main_grad(place: Place, mlp: MLP, delayed: bool) -> None:
    mlp = replace(mlp, linear={**mlp.linear, "accumulate_into_main_grad": True, "delay_wgrad_compute": delayed})
    model, inputs = mlp.build(SPLITS, place.device, torch.bfloat16, **place.options()), inputs_for(place, mlp)
    parameters = list(model.parameters())

    def take() -> list[Tensor]:
        """What a step adds to main_grad, twice, to a one that was there."""
        for p in parameters:
            p.main_grad = torch.ones(p.shape, dtype=torch.float32, device=p.device)
        for _ in range(2):
            step(model, mlp, inputs)
            for linear in (model[2], model[0]):
                linear.backward_dw()
        assert all(p.grad is None for p in parameters)
        return [p.main_grad for p in parameters]

    want = take()
    with shortcuts_only():
        got = take()
    for a, b in zip(got, want, strict=True):
        assert_bitwise_equal(a, b)
    del parameters[0].main_grad
    _, y = called(model, mlp, inputs)
    if not delayed:
        with pytest.raises(RuntimeError, match="MAIN GRAD NOT FOUND"):
            y.backward(inputs.dy)


def test_what_is_asked_of_a_linear_between_forward_and_backward(place: Place, mlp: MLP) -> None:
    model, inputs = warm(place, mlp), inputs_for(place, mlp)
    want = step(model, mlp, inputs)["dfc2.weight" if mlp is STACKED else "dfc2.weight0"]
    model.zero_grad()
    _, y = called(model, mlp, inputs)
    model[2].delay_wgrad_compute = True
    y.backward(inputs.dy)
    weight = next(model[2].parameters())
    assert weight.grad is None and next(model[0].parameters()).grad is not None
    model[2].backward_dw()
    assert_bitwise_equal(weight.grad, want)


def test_saved_tensors_may_be_packed(place: Place, mlp: MLP) -> None:
    model, inputs = warm(place, mlp), inputs_for(place, mlp)
    x, y = called(model, mlp, inputs)
    want = torch.autograd.grad(y, [x, *model.parameters()], inputs.dy)
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or len(packed) - 1, packed.__getitem__):
        x, y = called(model, mlp, inputs)
    assert {t.shape for t in packed} >= {x.shape, (SPLITS.rows, 2 * mlp.intermediate), (SPLITS.groups + 1,)}
    for a, b in zip(torch.autograd.grad(y, [x, *model.parameters()], inputs.dy), want, strict=True):
        assert_bitwise_equal(a, b)


def test_a_forward_that_backward_repeats(place: Place, mlp: MLP) -> None:
    """Activation checkpointing: the first forward has taken no shortcut, its repetition takes one."""
    model, inputs = mlp.build(SPLITS, place.device, torch.bfloat16, **place.options()), inputs_for(place, mlp)
    x, extras = inputs.x.clone().requires_grad_(), mlp.extras(SPLITS.tensor(place.device), inputs.probs)
    y = checkpoint(model, x, *extras, use_reentrant=False)
    for _ in range(3):
        want = torch.autograd.grad(model(x, *extras), [x, *model.parameters()], inputs.dy)
    with shortcuts_only():
        got = torch.autograd.grad(y, [x, *model.parameters()], inputs.dy)
    for a, b in zip(got, want, strict=True):
        assert_bitwise_equal(a, b)


def test_other_calls_take_none(place: Place, mlp: MLP) -> None:
    """Whatever differs from the calls before is found, and decided anew."""
    model, inputs = warm(place, mlp), inputs_for(place, mlp)
    splits, probs = SPLITS.tensor(place.device), inputs.probs.clone().requires_grad_()
    x = inputs.x.clone().requires_grad_()

    def calls() -> Iterator[tuple[Tensor, ...]]:
        yield x[:-8].detach().requires_grad_(), splits, probs[:-8].detach().requires_grad_(), splits
        yield inputs.x, splits, probs, splits
        yield x, splits, probs.detach(), splits
        yield x, splits, probs.detach().bfloat16().requires_grad_(), splits
        yield x, splits, probs, splits.clone()
        yield x, splits.int(), probs, splits.int()
        yield x.detach().view(2, -1, mlp.hidden).requires_grad_(), splits, probs, splits
        first = next(model.parameters())
        first.data = first.data.clone()
        yield x, splits, probs, splits
        model.requires_grad_(False)
        yield x, splits, probs, splits

    for arguments in calls():
        with shortcuts_only(), pytest.raises(AssertionError, match="takes no shortcut"):
            model(*arguments)
        assert_bitwise_equal(model(*arguments), ops.Sequential(*model)(*arguments))
    with torch.autocast(place.device, torch.float16):
        assert model(x, splits, probs, splits).dtype is torch.float16
    with pytest.raises(ValueError, match="one value for each of 40 rows"):
        model(x, splits, probs[:-1], splits)


def test_weights_that_move_from_call_to_call_have_none(place: Place, mlp: MLP) -> None:
    """A shortcut for each place would cost more than it saves; once they stay there is one."""
    model, inputs = warm(place, mlp), inputs_for(place, mlp)
    with mock.patch.object(GroupedMLP, "shortcut", return_value=None) as asked:
        for _ in range(6):
            for p in model.parameters():
                p.data = p.data.clone()
            step(model, mlp, inputs)
    assert asked.call_count <= 1  # discrete weights, once they lie apart
    for _ in range(2):
        step(model, mlp, inputs)
    called(model, mlp, inputs)


def test_backward_lets_go_of_what_it_has_used(monkeypatch: pytest.MonkeyPatch, mlp: MLP) -> None:
    """As in test_contracts: the pre-activation and the recomputed activation are gone when dx is allocated."""
    place, made, alive = Place("cpu", True), [], []

    def watched(name: str, index: int) -> Callable:
        run = getattr(reference, name)

        def call(*args: object, **kwargs: object) -> object:
            results = run(*args, **kwargs)
            made.append(StorageWeakRef(results[index].untyped_storage()))
            return results

        return call

    def dgrad(*args: object, run: Callable = reference.grouped_gemm_dgrad) -> Tensor:
        alive.append(sum(not ref.expired() for ref in made))
        return run(*args)

    with place.context():
        model, inputs = warm(place, mlp), inputs_for(place, mlp)
        monkeypatch.setattr(reference, "grouped_gemm_act", watched("grouped_gemm_act", 1))
        monkeypatch.setattr(reference, "grouped_gemm_dact", watched("grouped_gemm_dact", 1))
        monkeypatch.setattr(reference, "grouped_gemm_dgrad", dgrad)
        _, y = called(model, mlp, inputs)
    y.backward(inputs.dy, retain_graph=True)
    y.backward(inputs.dy)
    assert alive == [1, 0]
