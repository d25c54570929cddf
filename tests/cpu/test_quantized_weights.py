"""Weights under a recipe: quantised once per update, never stale; held quantised; the state of delayed scaling."""

from __future__ import annotations

import contextlib
import copy
import io
import os
import pickle
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils.checkpoint import checkpoint

import fusible_ops as ops
from cute_kernels.quantization.quantize import quantize
from fusible_ops.autocast_mode import autocast, quantized_model_init
from fusible_ops.quantized_tensor import QuantizedTensor, quantized
from fusible_ops.quantizer import Quantizer
from fusible_ops.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Format, Recipe
from tests.cases import EVEN
from tests.compare import assert_bitwise_equal
from tests.models import MLP, Inputs, step

BLOCK = Float8BlockScaling()
RECIPES = [BLOCK, Float8CurrentScaling(), DelayedScaling()]
recipes = pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)
CPU = {"device": "cpu", "dtype": torch.bfloat16}
SIZES = torch.tensor([5, 15])


@contextlib.contextmanager
def quantised_weights() -> Iterator[list[bool]]:
    """The weights that are quantised within it, in order: whether with the column-wise copy."""
    seen: list[bool] = []
    run = Quantizer.matrices

    def matrices(self: Quantizer, x: Tensor, rowwise: bool = True, columnwise: bool = True) -> QuantizedTensor:
        seen.append(columnwise)
        return run(self, x, rowwise, columnwise)

    with mock.patch.object(Quantizer, "matrices", matrices):
        yield seen


def run(model: nn.Module, x: Tensor, *extras: Tensor, recipe: Recipe = BLOCK) -> Tensor:
    with autocast(recipe=recipe):
        return model(x, *extras)


def train(model: nn.Module, x: Tensor, *extras: Tensor, recipe: Recipe = BLOCK) -> Tensor:
    """A step whose loss is the sum; the gradient of x."""
    x = x.detach().requires_grad_()
    run(model, x, *extras, recipe=recipe).sum().backward()
    return x.grad


# ----------------------------------------------------------------------------------------------------------------------
# Once per update


@pytest.mark.parametrize("recipe", RECIPES[:2], ids=lambda recipe: type(recipe).__name__)
def test_quantised_once_for_all_forwards_of_an_update(recipe: Recipe) -> None:
    op = ops.GroupedLinear(2, 32, 24, **CPU)
    x = torch.randn(20, 32).bfloat16()
    optimizer = torch.optim.SGD(op.parameters(), lr=0.1)
    with quantised_weights() as seen:
        for _ in range(3):
            train(op, x, SIZES, recipe=recipe)
        assert seen == [True], "training: both copies, once"
        optimizer.step()
        train(op, x, SIZES, recipe=recipe)
        assert seen == [True, True]
        with torch.no_grad():
            run(op, x, SIZES, recipe=recipe)
            run(op, x, SIZES, recipe=recipe)
        assert seen == [True, True, False], "inference: the row-wise copy, once"


def test_delayed_scaling_quantises_at_every_forward() -> None:
    op = ops.GroupedLinear(2, 32, 24, **CPU)
    with quantised_weights() as seen:
        for _ in range(2):
            train(op, torch.randn(20, 32).bfloat16(), SIZES, recipe=DelayedScaling())
    assert seen == [True, True]


def test_a_frozen_first_layer_needs_no_column_wise_weight() -> None:
    op = ops.GroupedLinear(2, 32, 24, **CPU)
    with quantised_weights() as seen:
        run(op, torch.randn(20, 32).bfloat16(), SIZES).sum().backward()
    assert seen == [False] and op.weight0.grad is not None


CHANGES: dict[str, Callable[[Parameter], None]] = {
    "in place": lambda p: p.detach().mul_(2),
    "p.data = ": lambda p: setattr(p, "data", p.data * 2),
    "p.copy_": lambda p: p.detach().copy_(p.detach() * 2),
}


@pytest.mark.parametrize("how", [*CHANGES, "load_state_dict", "load_state_dict(assign)", "another parameter"])
@pytest.mark.parametrize("between", [None, torch.no_grad, torch.inference_mode])
def test_never_stale(how: str, between: Callable | None) -> None:
    """Train, eval, an update that doubles the weights, train: y and dx double exactly."""
    model = ops.Sequential(ops.GroupedLinear(2, 32, 24, bias=False, **CPU), ops.Identity())
    x = torch.randn(20, 32).bfloat16()
    before, dx = run(model, x, SIZES).detach(), train(model, x, SIZES)
    if between is not None:
        with between():
            run(model, x, SIZES)
    state = {name: t * 2 for name, t in model.state_dict().items()}
    if how.startswith("load"):
        model.load_state_dict(state, assign="assign" in how)
    elif how == "another parameter":
        for g in range(2):
            setattr(model[0], f"weight{g}", Parameter(state[f"0.weight{g}"]))
    else:
        with torch.no_grad():
            for p in model.parameters():
                CHANGES[how](p)
    assert_bitwise_equal(train(model, x, SIZES), dx * 2, "dx")
    assert_bitwise_equal(run(model, x, SIZES).detach(), before * 2, "y")
    with torch.no_grad():
        assert_bitwise_equal(run(model, x, SIZES), before * 2, "y of an evaluation")


def test_a_weight_that_is_put_away_and_filled_anew() -> None:
    """As FSDP2 does it: a shard takes its place; it comes back at its address and version with other values."""
    op, x = ops.GroupedLinear(2, 32, 24, bias=False, single_grouped_weight=True, **CPU), torch.randn(20, 32).bfloat16()
    dx, gathered = train(op, x, SIZES), op.weight
    op.weight = Parameter(gathered.detach()[:1].clone())
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(gathered):
        gathered.mul_(2)
    op.weight = gathered
    assert_bitwise_equal(train(op, x, SIZES), dx * 2, "dx")


def test_eval_first_then_train() -> None:
    op, x = ops.GroupedLinear(2, 32, 24, **CPU), torch.randn(20, 32).bfloat16()
    other = copy.deepcopy(op)
    with torch.no_grad():
        run(op, x, SIZES)
    assert_bitwise_equal(train(op, x, SIZES), train(other, x, SIZES), "dx")


def test_two_sequentials_that_share_a_weight() -> None:
    a, b = ops.GroupedLinear(2, 32, 24, **CPU), ops.GroupedLinear(2, 32, 24, **CPU)
    for g in range(2):
        setattr(b, f"weight{g}", getattr(a, f"weight{g}"))
    first, second, x = ops.Sequential(a), ops.Sequential(b), torch.randn(20, 32).bfloat16()
    dx = train(first, x, SIZES)
    with torch.no_grad():
        run(second, x, SIZES)
        for p in a.weight_parameters():
            p.mul_(2)
    assert_bitwise_equal(train(first, x, SIZES), dx * 2, "dx of the first")
    assert_bitwise_equal(train(second, x, SIZES), dx * 2, "dx of the second")


@pytest.mark.parametrize("features", [(32, 24), (32, 32)], ids=str)
def test_linears_that_read_one_weight_in_two_ways(features: tuple[int, int]) -> None:
    """A normal and a transposed linear share it: each its own copy, under a recipe and under torch's autocast."""
    a = ops.GroupedLinear(2, *features, bias=False, **CPU)
    b = ops.GroupedLinear(2, *features[::-1], bias=False, transposed_weight=True, **CPU)
    for g in range(2):
        setattr(b, f"weight{g}", getattr(a, f"weight{g}"))
    alone = [copy.deepcopy(op) for op in (a, b)]
    for mode in (lambda: autocast(recipe=BLOCK), lambda: torch.autocast("cpu", dtype=torch.float16)):
        for op, other in zip((a, b, a), (*alone, alone[0]), strict=True):
            x = torch.randn(20, op.in_features).bfloat16()
            with mode():
                assert_bitwise_equal(op(x, SIZES).detach(), other(x, SIZES).detach(), "y")


@pytest.mark.parametrize("mode", ["recipe", "torch"])
def test_a_weight_that_is_laid_out_anew(mode: str) -> None:
    op, x = ops.Linear(32, 32, bias=False, device="cpu", dtype=torch.float32), torch.randn(20, 32)
    (w,) = op.parameters()
    for _ in range(2):
        with autocast(recipe=BLOCK) if mode == "recipe" else torch.autocast("cpu", dtype=torch.bfloat16):
            assert_bitwise_equal(op(x).detach(), copy.deepcopy(op)(x).detach(), "y")
        w.data = w.data.t()


@recipes
def test_all_of_it_in_inference_mode(recipe: Recipe) -> None:
    """Split sizes and models that inference mode made have no version counter; results are those of no_grad."""
    op, x = ops.GroupedLinear(2, 32, 24, **CPU), torch.randn(20, 32).bfloat16()
    model = ops.Sequential(ops.Quantize(), op, ops.SwiGLU(), ops.GroupedLinear(2, 12, 8, **CPU))
    with torch.no_grad():
        want = run(copy.deepcopy(model), x, SIZES, SIZES, recipe=recipe)
    with torch.inference_mode():
        sizes, there = SIZES.clone(), copy.deepcopy(model)
        assert_bitwise_equal(run(there, x.clone(), sizes, sizes, recipe=recipe), want, "in inference mode")
        sizes.copy_(torch.tensor([15, 5]))
        got = run(there, x.clone(), sizes, sizes)
    other = torch.tensor([15, 5])
    with torch.no_grad():
        assert_bitwise_equal(got, run(copy.deepcopy(model), x, other, other), "other splits")
        assert_bitwise_equal(run(there, x, SIZES, SIZES), run(model, x, SIZES, SIZES), "made in it, called out of it")


@recipes
def test_gradients_of_a_model_that_inference_mode_made(recipe: Recipe) -> None:
    op, x = ops.GroupedLinear(2, 32, 24, **CPU), torch.randn(20, 32).bfloat16()
    with torch.inference_mode():
        there = copy.deepcopy(op)
    assert_bitwise_equal(train(there, x, SIZES, recipe=recipe), train(op, x, SIZES, recipe=recipe), "dx")
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        there(x.requires_grad_(), SIZES)


def test_recipes_in_turn_do_not_mix() -> None:
    op, x = ops.GroupedLinear(2, 32, 24, **CPU), torch.randn(20, 32).bfloat16()
    want = [run(copy.deepcopy(op), x, SIZES, recipe=recipe).detach() for recipe in RECIPES]
    for _ in range(2):
        got = [run(op, x, SIZES, recipe=recipe).detach() for recipe in RECIPES[:2]]
        for a, b in zip(got, want, strict=False):
            assert_bitwise_equal(a, b, "y")


# ----------------------------------------------------------------------------------------------------------------------
# What is saved


@pytest.mark.parametrize("recipe", [BLOCK, Float8CurrentScaling()], ids=lambda recipe: type(recipe).__name__)
def test_saved_operands_hold_one_direction(recipe: Recipe) -> None:
    """G=2, N=K=256: 131072 bytes of weights and their scales, and x column-wise; nothing in BF16."""
    op = ops.GroupedLinear(2, 256, 256, bias=False, **CPU)
    x, sizes = torch.randn(256, 256).bfloat16().requires_grad_(), torch.tensor([100, 156])
    saved: dict[int, Tensor] = {}

    def keep(t: Tensor) -> Tensor:
        saved[t.data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        y = run(op, x, sizes, recipe=recipe)
    eight = sum(t.nbytes for t in saved.values() if t.element_size() == 1)
    padded = 256 + 2 * 127 - (256 + 2 * 127) % 128  # rows of the column-wise copy, by what the host knows
    assert eight == 131072 + 256 * padded
    scales = sum(t.nbytes for t in saved.values() if t.dtype == torch.float32)
    assert scales == (2 * 2 * 4 * 4 + padded // 128 * 256 * 4 if recipe == BLOCK else 2 * 4 * 2)
    assert not any(t.dtype == torch.bfloat16 for t in saved.values())
    y.sum().backward()


def test_saved_tensors_may_be_packed_away() -> None:
    """Hooks see plain tensors, and may give back others with the same content."""
    op, x = ops.GroupedLinear(2, 32, 24, **CPU), torch.randn(20, 32).bfloat16()
    want = train(op, x, SIZES)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t.clone()):
        got = train(op, x, SIZES)
    assert_bitwise_equal(got, want, "dx")


def test_a_second_backward() -> None:
    op, x = ops.GroupedLinear(2, 32, 24, **CPU), torch.randn(20, 32).bfloat16().requires_grad_()
    y = run(op, x, SIZES)
    y.sum().backward(retain_graph=True)
    once = op.weight0.grad.clone()
    y.sum().backward()
    assert_bitwise_equal(op.weight0.grad, once * 2, "dw")


# ----------------------------------------------------------------------------------------------------------------------
# quantized_model_init

LINEARS: dict[str, Callable[[], ops.FusibleOperation]] = {
    "grouped": lambda: ops.GroupedLinear(2, 160, 72, **CPU),
    "single": lambda: ops.GroupedLinear(2, 160, 72, single_grouped_weight=True, **CPU),
    "linear": lambda: ops.Linear(160, 72, **CPU),
    "basic": lambda: ops.BasicLinear(160, 72, **CPU),
}


def made(kind: str, recipe: Recipe = BLOCK, **kwargs: bool) -> tuple[nn.Module, nn.Module]:
    """(an op with quantised weights, one with plain ones), from the same random state."""
    torch.manual_seed(1)
    with quantized_model_init(recipe=recipe, **kwargs):
        held = LINEARS[kind]()
    torch.manual_seed(1)
    return held, LINEARS[kind]()


def extras(kind: str) -> list[Tensor]:
    return [SIZES] if kind in ("grouped", "single") else []


def weights(op: nn.Module) -> dict[str, Parameter]:
    return {name: p for name, p in op.named_parameters() if "weight" in name}


@pytest.mark.parametrize("kind", LINEARS)
@pytest.mark.parametrize("recipe", RECIPES[:2], ids=lambda recipe: type(recipe).__name__)
def test_weights_are_held_quantised(kind: str, recipe: Recipe) -> None:
    """The bytes of the plain initialisation quantised; the same results under the recipe; values without it."""
    held, plain = made(kind, recipe)
    x = torch.randn(20, 160).bfloat16()
    for (name, q), w in zip(weights(held).items(), weights(plain).values(), strict=True):
        assert isinstance(q, QuantizedTensor) and isinstance(q, Parameter) and q.requires_grad
        assert q.shape == w.shape and q.dtype == w.dtype and q.columnwise is not None, name
        want = quantize(w.detach(), recipe.operand_format("weight"))
        assert_bitwise_equal(q.rowwise.data.view(torch.uint8), want.data.view(torch.uint8), name)
    with quantised_weights() as seen:
        got = train(held, x, *extras(kind), recipe=recipe)
    assert not seen, "what is quantised already is taken as it is"
    assert_bitwise_equal(got, train(plain, x, *extras(kind), recipe=recipe), "dx")
    for a, b in zip(weights(held).values(), weights(plain).values(), strict=True):
        assert_bitwise_equal(a.grad, b.grad, "dw")
        b.data = a.dequantize().detach()
    assert_bitwise_equal(held(x, *extras(kind)), plain(x, *extras(kind)), "without a recipe")
    assert not isinstance(
        next(p for n, p in held.named_parameters() if "bias" in n) if kind != "basic" else x, QuantizedTensor
    )


@pytest.mark.parametrize("kind", LINEARS)
def test_held_weights_train_and_move_like_others(kind: str) -> None:
    held, _ = made(kind)
    x = torch.randn(20, 160).bfloat16()
    first = run(held, x, *extras(kind)).detach()
    optimizer = torch.optim.SGD(held.parameters(), lr=0.5)
    train(held, x, *extras(kind))
    optimizer.step()
    after = run(held, x, *extras(kind)).detach()
    assert (after != first).any()
    for other in (copy.deepcopy(held), pickle.loads(pickle.dumps(held)), copy.deepcopy(held).to("cpu")):
        assert all(isinstance(p, QuantizedTensor) for p in weights(other).values())
        assert_bitwise_equal(run(other, x, *extras(kind)).detach(), after, "a copy")
    wide = copy.deepcopy(held).float()
    assert all(isinstance(p, QuantizedTensor) and p.dtype == torch.float32 for p in weights(wide).values())
    torch.testing.assert_close(run(wide, x.float(), *extras(kind)), after.float(), rtol=1e-2, atol=1e-2)
    held.reset_parameters()
    assert all(isinstance(p, QuantizedTensor) for p in weights(held).values())
    assert (run(held, x, *extras(kind)).detach() != after).any()


def test_separate_weights_stay_views_of_one_buffer() -> None:
    """Nothing is copied to stack them, also after a move."""
    held, _ = made("grouped")
    for op in (held, copy.deepcopy(held).float().bfloat16(), pickle.loads(pickle.dumps(held))):
        first, second = (p.rowwise.data for p in op.weight_parameters())
        assert second.data_ptr() - first.data_ptr() == first.numel()
        assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


def test_a_change_between_forward_and_backward_is_refused() -> None:
    held, _ = made("grouped")
    x = torch.randn(20, 160).bfloat16().requires_grad_()
    y = run(held, x, SIZES)
    with torch.no_grad():
        held.weight1.mul_(2)
    with pytest.raises(RuntimeError, match="parameter 1 was changed in place between forward and backward"):
        y.sum().backward()


def test_copies_that_are_made_and_first_values() -> None:
    with torch.no_grad():
        held, plain = made("grouped", preserve_high_precision_init_val=True)
    assert held.weight0.columnwise is None
    assert_bitwise_equal(held.weight1.get_high_precision_init_val(), plain.weight1.detach(), "first values")
    held.weight1.clear_high_precision_init_val()
    assert held.weight1.get_high_precision_init_val() is None
    x = torch.randn(20, 160).bfloat16()
    assert_bitwise_equal(train(held, x, SIZES), train(plain, x, SIZES), "the missing copy is made when it is needed")
    assert made("linear")[0].weight.get_high_precision_init_val() is None


def test_meta_parameters_are_quantised_when_they_become_real() -> None:
    with quantized_model_init(recipe=BLOCK):
        op = ops.GroupedLinear(2, 32, 24, device="meta")
    assert not isinstance(op.weight0, QuantizedTensor)
    op.reset_parameters()
    assert isinstance(op.weight0, QuantizedTensor) and not op.weight0.is_meta


def test_fp64_weights_cannot_be_held() -> None:
    with quantized_model_init(recipe=BLOCK), pytest.raises(TypeError, match="quantises bfloat16, float16 and float32"):
        ops.Linear(8, 8, dtype=torch.float64, device="cpu")


# ----------------------------------------------------------------------------------------------------------------------
# Checkpoints


def through_a_file(state: dict[str, Tensor]) -> dict[str, Tensor]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


@recipes
@pytest.mark.parametrize("source", ["held", "plain"])
@pytest.mark.parametrize("target", ["held", "plain"])
@pytest.mark.parametrize("layout", ["grouped", "single"])
def test_state_dicts_both_ways(recipe: Recipe, source: str, target: str, layout: str) -> None:
    """Keys never change; quantised to quantised keeps the bytes; strict loading, either layout into either."""
    pair = dict(zip(("held", "plain"), made("grouped", recipe), strict=True))
    torch.manual_seed(2)
    with quantized_model_init(enabled=target == "held", recipe=recipe):
        model = LINEARS[layout]()
    state = pair[source].state_dict()
    assert state.keys() == pair["plain"].state_dict().keys()
    model.load_state_dict(through_a_file(state))
    for g, w in enumerate(model.expert_weights()):
        want = getattr(pair[source], f"weight{g}").detach()
        if target == "plain" or source == "held":
            assert_bitwise_equal(w + 0, want + 0, "values")
        elif recipe != RECIPES[2]:
            assert_bitwise_equal(w + 0, quantized(want, recipe.operand_format("weight")) + 0, "quantised")


@recipes
def test_training_resumes_bit_for_bit(recipe: Recipe) -> None:
    """Three steps, a checkpoint, three more; the same in a new model from the checkpoint, delayed scales included."""
    mlp = MLP(hidden=64, intermediate=48, bias=True)
    inputs = Inputs.random(EVEN, mlp.hidden, "cpu", torch.bfloat16)

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        for _ in range(3):
            with autocast(recipe=recipe):
                results = step(model, mlp, inputs)
            optimizer.step()
        return results

    model = mlp.build(EVEN, "cpu", torch.bfloat16)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    steps(model, optimizer)
    state, moments = through_a_file(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    stateful = isinstance(recipe, DelayedScaling)
    assert all((state[f"{op}._extra_state"].numel() > 0) == stateful for op in ("fc1", "fc2"))
    assert state["act._extra_state"].numel() == 0
    want = steps(model, optimizer)
    again = mlp.build(EVEN, "cpu", torch.bfloat16)
    again.load_state_dict(state)
    resumed = torch.optim.Adam(again.parameters(), lr=0.01)
    resumed.load_state_dict(moments)
    got = steps(again, resumed)
    for name in want:
        assert_bitwise_equal(got[name], want[name], name)


@recipes
@pytest.mark.parametrize("when", ["before", "after"])
def test_copies_and_pickles_of_models(recipe: Recipe, when: str) -> None:
    mlp = MLP(hidden=64, intermediate=48)
    inputs = Inputs.random(EVEN, mlp.hidden, "cpu", torch.bfloat16)
    model = mlp.build(EVEN, "cpu", torch.bfloat16)
    if when == "after":
        with autocast(recipe=recipe):
            step(model, mlp, inputs)
    model.zero_grad()
    others = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    with autocast(recipe=recipe):
        want = step(model, mlp, inputs)
    for other in others:
        with autocast(recipe=recipe):
            got = step(other, mlp, inputs)
        for name in want:
            assert_bitwise_equal(got[name], want[name], name)


class _Evil:
    """Runs a command when unpickled."""

    def __reduce__(self):
        return os.system, ("exit 1",)


def test_other_extra_states_are_refused_with_words() -> None:
    op = ops.GroupedLinear(2, 32, 24, **CPU)
    foreign = torch.frombuffer(bytearray(pickle.dumps({"forward": {"scale_fwd": 1}})), dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="holds no scales that this library, or"):
        op.set_extra_state(foreign)
    evil = pickle.dumps({"forward": {"scale_fwd": _Evil()}})
    with pytest.raises(RuntimeError, match="holds no scales") as refused:
        op.set_extra_state(torch.frombuffer(bytearray(evil), dtype=torch.uint8))
    assert "system is nothing that an op's state is made of" in str(refused.value.__cause__)
    other = ops.GroupedLinear(3, 32, 24, **CPU)
    run(other, torch.randn(20, 32).bfloat16(), torch.tensor([5, 5, 10]), recipe=DelayedScaling())
    with pytest.raises(RuntimeError, match="delayed scales of 6 tensors in forward, but this op has 4"):
        op.set_extra_state(other.get_extra_state())
    op.set_extra_state(torch.empty(0, dtype=torch.uint8))
    assert op.get_extra_state().numel() == 0
    for nothing_of_ours in (b"pickled", {"scale": 1}):
        with pytest.raises(TypeError, match="GroupedLinear: the checkpoint's _extra_state must be a tensor, got"):
            op.set_extra_state(nothing_of_ours)


# ----------------------------------------------------------------------------------------------------------------------
# Activation checkpointing


@recipes
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_forward_that_backward_repeats(recipe: Recipe, reentrant: bool) -> None:
    """With autocast inside what is repeated the bits are the same; delayed scales have moved on, so that raises."""
    op, x = ops.GroupedLinear(2, 32, 24, **CPU), torch.randn(20, 32).bfloat16()
    want = train(op, x, SIZES, recipe=recipe)
    x.requires_grad_()
    y = checkpoint(lambda x: run(op, x, SIZES, recipe=recipe), x, use_reentrant=reentrant)
    if isinstance(recipe, DelayedScaling):
        with pytest.raises(RuntimeError, match="GroupedLinear: backward repeats a forward under DelayedScaling"):
            y.sum().backward()
        return
    y.sum().backward()
    assert_bitwise_equal(x.grad, want, "dx")


def test_a_forward_that_backward_repeats_without_its_recipe_raises() -> None:
    op, x = ops.GroupedLinear(2, 32, 24, **CPU), torch.randn(20, 32).bfloat16().requires_grad_()
    with autocast(recipe=BLOCK):
        y = checkpoint(lambda x: op(x, SIZES), x, use_reentrant=False)
    with pytest.raises(torch.utils.checkpoint.CheckpointError, match="A different number of tensors was saved"):
        y.sum().backward()


# ----------------------------------------------------------------------------------------------------------------------
# Delayed scaling in an op


def test_scales_of_a_linear_follow_its_operands() -> None:
    """Transformer Engine's: scale = (largest / amax) / 2^margin over all steps; input, weight, gradient each."""
    recipe = DelayedScaling(margin=2, fp8_format=Format.HYBRID, amax_history_len=8)
    with quantized_model_init(recipe=recipe):
        op = ops.BasicLinear(16, 16, device="cpu", dtype=torch.float32)
    for i, (x, w, dy) in enumerate([(1.5, 0.75, 3.0), (6.0, 0.5, 0.125), (2.0, 7.0, 96.0)]):
        nn.init.constant_(op.weight, w)
        with autocast(recipe=recipe):
            y = op(torch.full((16, 16), x, requires_grad=True))
        y.backward(torch.full((16, 16), dy))
        seen = [(1.5, 0.75, 3.0), (6.0, 0.5, 0.125), (2.0, 7.0, 96.0)][: i + 1]
        largest = [max(column) for column in zip(*seen, strict=True)]
        want = torch.tensor([448.0, 448.0, 57344.0]) / torch.tensor(largest) / 4
        assert_bitwise_equal(op._scales["forward"].scale, want[:2], "forward")
        assert_bitwise_equal(op._scales["backward"].scale, want[2:], "backward")


def test_the_first_step_uses_a_scale_of_one() -> None:
    recipe = DelayedScaling(amax_history_len=4)
    op = ops.BasicLinear(16, 16, device="cpu", dtype=torch.float32)
    x = torch.full((16, 16), 1000.0)
    with torch.no_grad():
        op.weight.copy_(torch.eye(16))
    assert (run(op, x, recipe=recipe) == 448).all(), "saturated"
    torch.testing.assert_close(run(op, x, recipe=recipe), x, rtol=0.07, atol=0)


def test_inference_leaves_delayed_scales_alone() -> None:
    recipe = DelayedScaling()
    op = ops.BasicLinear(16, 16, device="cpu")
    train(op, torch.randn(4, 16), recipe=recipe)
    before = op._scales["forward"].scale.clone()
    with torch.no_grad():
        run(op, torch.randn(4, 16) * 100, recipe=recipe)
    assert_bitwise_equal(op._scales["forward"].scale, before, "scales")
