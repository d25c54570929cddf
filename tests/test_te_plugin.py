"""Our operations in Transformer Engine's own fuser, on its own ops and parameters.

On a CPU with the Python of its wheel (`tests/te_wheel.py`), where our operators run the reference and Transformer
Engine's own kernels are missing, so a replay shows as the call of its ops; on a Hopper GPU with the real package.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import pickle
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import fusible_ops as ops
from cute_kernels.target import Target
from fusible_ops.call import Call
from fusible_ops.integrations import te_fused, te_whole
from fusible_ops.integrations import transformer_engine as plugin
from fusible_ops.integrations.te_parts import runs_of
from tests.bench.bench_te_plugin import plans_with_ours
from tests.cases import TAIL
from tests.compare import assert_bitwise_equal
from tests.models import MLP, Inputs, as_if_on, step
from tests.te_wheel import load

DEVICE = "cuda" if torch.cuda.is_available() and Target.of("cuda").arch == "sm_90a" else "cpu"
COMMON = {"device": DEVICE, "dtype": torch.bfloat16}
ACTIVATIONS = {
    "scaled_swiglu": lambda te: te.ScaledSwiGLU(),
    "scaled_clamped": lambda te: te.ScaledClampedQGeGLU(limit=1.0),
    "scaled_srelu": lambda te: te.ScaledSReLU(),
    "swiglu": lambda te: te.SwiGLU(),
    "geglu": lambda te: te.GEGLU(),
    "reglu": lambda te: te.ReGLU(),
}


@pytest.fixture
def te() -> Iterator[Any]:
    """Transformer Engine's ops, with our fusion installed; on a CPU as if it were Hopper."""
    module = load()
    plugin.install()
    try:
        if DEVICE == "cpu":
            with as_if_on("sm_90a"):
                yield module
        else:
            yield module
    finally:
        plugin.uninstall()


class Pair:
    """A grouped MLP of Transformer Engine's, and ours with the same values."""

    def __init__(
        self,
        te: Any,
        activation: str = "scaled_swiglu",
        bias: bool = True,
        width: tuple[int, int] = (64, 48),
        **linear: Any,
    ) -> None:
        self.mlp = MLP(activation, *width, bias=bias, scale_bias=bias, linear=linear)
        wide = self.mlp.intermediate * (2 if self.mlp.gated else 1)
        fc1 = te.GroupedLinear(TAIL.groups, self.mlp.hidden, wide, bias=bias, **COMMON, **linear)
        fc2 = te.GroupedLinear(
            TAIL.groups, self.mlp.intermediate, self.mlp.hidden, bias=bias, scale_bias=bias, **COMMON, **linear
        )
        self.theirs = te.Sequential(fc1, ACTIVATIONS[activation](te), fc2)
        self.ours = self.mlp.build(TAIL, DEVICE, torch.bfloat16)
        with torch.no_grad():
            for a, b in zip(self.theirs.parameters(), self.ours.parameters(), strict=True):
                a.copy_(b)
        self.inputs = Inputs.random(TAIL, self.mlp.hidden, DEVICE, torch.bfloat16)

    def extras(self, probs: Tensor) -> list[Tensor]:
        return self.mlp.extras(TAIL.tensor(DEVICE), probs)

    def train(self, model: Any | None = None) -> dict[str, Tensor]:
        """One step of theirs, named as `tests.models.step` names it."""
        model = self.theirs if model is None else model
        x, probs = self.inputs.x.clone().requires_grad_(), self.inputs.probs.clone().requires_grad_()
        y = model(x, *self.extras(probs))
        y.backward(self.inputs.dy)
        found = {"y": y.detach(), "dx": x.grad, "dprobs": probs.grad}
        names = [f"d{name}" for name, _ in self.ours.named_parameters()]
        found |= dict(zip(names, [p.grad for p in model.parameters()], strict=True))
        return {name: t for name, t in found.items() if t is not None}

    def fused(self) -> list[Any]:
        return [op for op, _ in self.theirs._module_groups[0]._forward_ops]


def assert_alike(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for name, want in wanted.items():
        assert_bitwise_equal(got[name], want, name)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_an_unchanged_model_runs_our_kernels(te: Any, activation: str, bias: bool) -> None:
    pair = Pair(te, activation, bias)
    assert_alike(pair.train(), step(pair.ours, pair.mlp, pair.inputs))
    fuser = pair.theirs._module_groups[0]
    (op, at), (other, _) = *fuser._forward_ops, *fuser._backward_ops
    assert op is other and isinstance(op, te_fused.FusibleOpsRun) and at == [0, 1, 2]
    with torch.no_grad():
        y = pair.theirs(pair.inputs.x, *pair.extras(pair.inputs.probs))
        assert_bitwise_equal(y, pair.ours(pair.inputs.x, *pair.extras(pair.inputs.probs)))


def test_a_dense_mlp_in_the_middle_of_other_ops(te: Any) -> None:
    model = te.Sequential(te.ConstantScale(2.0), te.Linear(64, 96, **COMMON), te.SwiGLU(), te.Linear(48, 64, **COMMON))
    names = [name for name, _ in ops.Sequential(ops.Linear(64, 96)).named_parameters()]
    assert names == ["0.basic_ops.0.weight", "0.basic_ops.1.bias"]
    mine = ops.Sequential(
        ops.ConstantScale(2.0), ops.Linear(64, 96, **COMMON), ops.SwiGLU(), ops.Linear(48, 64, **COMMON)
    )
    with torch.no_grad():
        for a, b in zip(model.parameters(), mine.parameters(), strict=True):
            b.copy_(a)
    x, dy = torch.randn(24, 64, **COMMON), torch.randn(24, 64, **COMMON)
    results = []
    for each in (model, mine):
        given = x.clone().requires_grad_()
        y = each(given)
        y.backward(dy)
        results.append([y.detach(), given.grad, *(p.grad for p in each.parameters())])
    for got, want in zip(*results, strict=True):
        assert_bitwise_equal(got, want)
    placed = [(type(op).__name__, at) for op, at in model._module_groups[0]._forward_ops]
    assert placed == [("ConstantScale", [0]), ("FusibleOpsRun", [1, 2, 3, 4, 5])]


@pytest.mark.parametrize("wants", ["x", "weights", "probs"])
def test_only_wanted_gradients(te: Any, wants: str) -> None:
    pair = Pair(te)
    pair.theirs.requires_grad_(wants == "weights")
    x = pair.inputs.x.clone().requires_grad_(wants == "x")
    probs = pair.inputs.probs.clone().requires_grad_(wants == "probs")
    pair.theirs(x, *pair.extras(probs)).backward(pair.inputs.dy)
    whole = step(pair.ours, pair.mlp, pair.inputs)
    found = {"x": x.grad, "probs": probs.grad, "weights": pair.theirs[0].weight0.grad}
    assert [name for name, grad in found.items() if grad is not None] == [wants]
    assert_bitwise_equal(found[wants], whole[{"x": "dx", "probs": "dprobs", "weights": "dfc1.weight0"}[wants]])


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("delay", [False, True])
def test_main_grad_and_delayed_gradients(te: Any, overwrite: bool, delay: bool) -> None:
    pair = Pair(te, accumulate_into_main_grad=True, delay_wgrad_compute=delay)
    for model in (pair.theirs, pair.ours):
        for p in model.parameters():
            p.main_grad = torch.full(p.shape, 2.0, dtype=torch.float32, device=DEVICE)
            p.grad_added_to_main_grad, p.overwrite_main_grad, p.zero_out_wgrad = False, overwrite, True
    pair.train()
    step(pair.ours, pair.mlp, pair.inputs)
    names = [name for name, _ in pair.theirs.named_parameters()]
    for name, a, b in zip(names, pair.theirs.parameters(), pair.ours.parameters(), strict=True):
        is_weight = a.dim() == 2
        if is_weight:
            assert a.grad_added_to_main_grad and b.grad_added_to_main_grad and not a.grad.any()
        has_tokens = TAIL.sizes[int(name[-1])] > 0
        is_written = is_weight and not delay and (has_tokens or overwrite)
        assert (a.main_grad == 2.0).all() != is_written, name
    if delay:
        called = []
        pair.theirs[0].register_wgrad_accumulation_and_reduce_hooks(lambda: called.append(1))
        for model in (pair.theirs, pair.ours):
            model[2].backward_dw()
            model[0].backward_dw()
        assert called == [1]
    for a, b in zip(pair.theirs.parameters(), pair.ours.parameters(), strict=True):
        assert_bitwise_equal(a.main_grad, b.main_grad)


@contextlib.contextmanager
def shortcuts_only() -> Iterator[None]:
    """Within it a call that takes no shortcut raises."""
    with mock.patch.object(Call, "forward", side_effect=AssertionError("this call takes no shortcut")):
        yield


@pytest.mark.parametrize("apart", [False, True], ids=["packed", "apart"])
def test_calls_that_are_alike_take_a_shortcut(te: Any, apart: bool) -> None:
    """As our own Sequential's, and others are found."""
    pair = Pair(te, bias=False)
    if apart:
        for p in reversed(list(pair.theirs.parameters())):
            p.data = p.data.clone()
    for _ in range(3):
        wanted = pair.train()
        pair.theirs.zero_grad()
    with shortcuts_only():
        assert_alike(pair.train(), wanted)
    with torch.no_grad():
        for _ in range(3):
            pair.theirs(pair.inputs.x, *pair.extras(pair.inputs.probs))
        with shortcuts_only():
            assert_bitwise_equal(pair.theirs(pair.inputs.x, *pair.extras(pair.inputs.probs)), wanted["y"])
    x, probs = pair.inputs.x, pair.inputs.probs.clone().requires_grad_()
    for _ in range(3):  # x wants no gradient
        pair.theirs.zero_grad()
        pair.theirs(x, *pair.extras(probs)).backward(pair.inputs.dy)
        assert_bitwise_equal(pair.theirs[0].weight0.grad, wanted["dfc1.weight0"])
    pair.theirs.zero_grad()
    with torch.no_grad():
        for model in (pair.theirs, pair.ours):
            for i, p in enumerate(model.parameters()):
                p.data = torch.full_like(p, 0.01 * (i + 1))
    assert_alike(pair.train(), step(pair.ours, pair.mlp, pair.inputs))


@contextlib.contextmanager
def around_their_fuser() -> Iterator[None]:
    """Within it a call that Transformer Engine's fuser records, or hands to an operation, raises."""
    theirs = importlib.import_module("transformer_engine.pytorch.ops.fuser")._OperationFuserAutogradFunction
    with mock.patch.object(theirs, "forward", side_effect=AssertionError("their fuser runs this call")):
        yield


@pytest.mark.parametrize("kind", ["bias", "no bias", "accumulates", "delays", "block scaling"])
def test_calls_of_a_known_plan_go_around_their_fuser(te: Any, kind: str) -> None:
    """They give the bits that they give through it, and leave it as it leaves itself."""
    linear = {"accumulate_into_main_grad": kind == "accumulates", "delay_wgrad_compute": kind == "delays"}
    pair = Pair(te, bias=kind == "bias", width=(128, 128), **linear)

    def left() -> list[Any]:
        (fuser,) = pair.theirs._module_groups
        return [fuser.first_op_requiring_backward, fuser._forward_ops, fuser._backward_ops]

    def train() -> tuple[dict[str, Tensor], list[Any]]:
        pair.theirs.zero_grad()
        for p in pair.theirs.parameters():
            p.main_grad = torch.zeros_like(p, dtype=torch.float32)
        found = pair.train()
        for at in (2, 0):
            pair.theirs[at].backward_dw()
        grads = {name: t for name, p in pair.theirs.named_parameters() for t in (p.main_grad, p.grad) if t is not None}
        return found | grads, left()

    def evaluate() -> tuple[dict[str, Tensor], list[Any]]:
        x, *extras = given = [pair.inputs.x.clone(), *pair.extras(pair.inputs.probs.clone())]
        with torch.no_grad():
            y = pair.theirs(x, *extras)
        return {"y": y}, [*left(), *[t._do_not_clear for t in (y, *given)]]

    with under_block_scaling() if kind == "block scaling" else contextlib.nullcontext():
        train()
        evaluate()
        te_whole.put_back(te.fuser.OperationFuser)
        wanted = [train(), evaluate()]
        plugin.install()
        with around_their_fuser():
            for _ in range(3):
                for run, (results, state) in zip((train, evaluate), wanted, strict=True):
                    found, now = run()
                    assert_alike(found, results)
                    assert now == state


def test_what_their_fuser_does_once_for_an_autocast_is_done(te: Any) -> None:
    """The first node of a region brings the scales of delayed scaling up to date, when its backward has run."""
    pair = Pair(te, bias=False)
    for _ in range(2):
        pair.train()
    manager = importlib.import_module("transformer_engine.pytorch.quantization").FP8GlobalStateManager
    for first in (True, False):
        with (
            around_their_fuser(),
            mock.patch.object(manager, "is_first_fp8_module", return_value=first) as asked,
            mock.patch.object(manager, "reduce_and_update_fp8_tensors") as updated,
        ):
            pair.train()
        assert asked.call_count == 1 and updated.mock_calls == [mock.call(forward=False)] * first


def test_a_graph_of_the_gradient_may_be_asked_for(te: Any) -> None:
    """As where their fuser records the call: the gradient is there, and cannot itself be differentiated."""
    pair = Pair(te, bias=False)
    wanted = pair.train()
    x, probs = pair.inputs.x.clone().requires_grad_(), pair.inputs.probs.clone().requires_grad_()
    with around_their_fuser():  # the plan is made
        y = pair.theirs(x, *pair.extras(probs))
    (dx,) = torch.autograd.grad(y, x, pair.inputs.dy.clone().requires_grad_(), create_graph=True)
    assert_bitwise_equal(dx.detach(), wanted["dx"])
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


def test_a_fuser_of_another_version_stays_as_it_is(te: Any) -> None:
    class Fuser:
        def __call__(self) -> None: ...

    theirs = Fuser.__call__
    te_whole.replace(Fuser, "2.21.0")
    assert Fuser.__call__ is theirs
    te_whole.replace(Fuser, "2.20.3")
    assert Fuser.__call__ is not theirs
    te_whole.put_back(Fuser)
    assert Fuser.__call__ is theirs


def test_a_shortcut_behind_another_op(te: Any) -> None:
    """Inside their node the input requires nothing, and its gradient is wanted."""
    pair = Pair(te, bias=False)
    model = te.Sequential(te.ConstantScale(2.0), *pair.theirs)
    x, extras = pair.inputs.x, pair.extras(pair.inputs.probs.clone().requires_grad_())
    given, doubled = x.clone().requires_grad_(), (2 * x).requires_grad_()
    y = pair.ours(doubled, *extras)
    wanted = 2 * torch.autograd.grad(y, doubled, pair.inputs.dy)[0]
    for _ in range(3):
        torch.autograd.grad(model(given, *extras), given, pair.inputs.dy)
    with shortcuts_only():
        assert_bitwise_equal(torch.autograd.grad(model(given, *extras), given, pair.inputs.dy)[0], wanted)


@pytest.mark.parametrize("delay", [False, True])
def test_gradients_of_a_shortcut_go_into_main_grad(te: Any, delay: bool) -> None:
    pair = Pair(te, bias=False, accumulate_into_main_grad=True, delay_wgrad_compute=delay)
    for model in (pair.theirs, pair.ours):
        for p in model.parameters():
            p.main_grad = torch.full(p.shape, 2.0, dtype=torch.float32, device=DEVICE)
    for i in range(4):
        with shortcuts_only() if i == 3 else contextlib.nullcontext():
            pair.train()
            step(pair.ours, pair.mlp, pair.inputs)
        for model in (pair.theirs, pair.ours):
            for linear in (model[2], model[0]):
                linear.backward_dw()
    for a, b in zip(pair.theirs.parameters(), pair.ours.parameters(), strict=True):
        assert_bitwise_equal(a.main_grad, b.main_grad)
    assert (next(pair.theirs.parameters()).main_grad != 2.0).any()


def test_delayed_gradients_without_main_grad(te: Any) -> None:
    pair = Pair(te, bias=False, delay_wgrad_compute=True)
    assert all(p.skip_backward_post_hook for model in (pair.theirs, pair.ours) for p in model.parameters())
    pair.train()
    assert all(p.grad is None for p in pair.theirs.parameters())
    step(pair.ours, pair.mlp, pair.inputs)
    for model in (pair.theirs, pair.ours):
        for i in (2, 0):
            assert model[i].need_backward_dw()
            model[i].backward_dw()
            model[i].backward_dw()  # nothing waits
    for a, b in zip(pair.theirs.parameters(), pair.ours.parameters(), strict=True):
        assert_bitwise_equal(a.grad, b.grad)


def replays(pair: Pair, call: Any) -> bool:
    """Whether this call runs Transformer Engine's own ops, one by one."""
    asked: list[int] = []
    for i in (0, 2):
        op = pair.theirs[i]
        op.fuser_forward = lambda *args, op=op, **kwargs: asked.append(1) or _stand_in(op, args[1])
    pair.theirs[1].fuser_forward = lambda ctxs, x, **kwargs: (x[..., : pair.mlp.intermediate], [()])
    try:
        with torch.no_grad():
            call()
    finally:
        for op in pair.theirs:
            del op.fuser_forward
    return bool(asked)


def _stand_in(op: Any, x: Tensor) -> tuple[Tensor, list[tuple[()]]]:
    return x.new_zeros(*x.shape[:-1], op.out_features), [()]


def test_a_call_that_does_not_fit_replays_their_ops(te: Any) -> None:
    pair = Pair(te, bias=False)
    x, probs, sizes = pair.inputs.x, pair.inputs.probs, TAIL.tensor(DEVICE)
    assert not replays(pair, lambda: pair.theirs(x, sizes, probs, sizes))
    out = torch.empty_like(x)
    assert replays(pair, lambda: pair.theirs(x, sizes, probs, sizes, op_kwargs={pair.theirs[2]: {"output": out}}))
    if DEVICE == "cpu":
        with torch.autocast("cpu", torch.float32, enabled=False):
            assert not replays(pair, lambda: pair.theirs(x, sizes, probs, sizes))
    plugin.uninstall()
    assert replays(pair, lambda: pair.theirs(x, sizes, probs, sizes))
    plugin.install()
    assert not replays(pair, lambda: pair.theirs(x, sizes, probs, sizes))


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
def test_split_sizes_of_any_integers_anywhere(te: Any, dtype: torch.dtype) -> None:
    """As Transformer Engine takes them; on the CPU, as Megatron-Core has them."""
    pair = Pair(te, bias=False)
    x, probs, sizes = pair.inputs.x, pair.inputs.probs, TAIL.tensor("cpu").to(dtype)
    wanted = pair.theirs(x, *[TAIL.tensor(DEVICE), probs, TAIL.tensor(DEVICE)])
    assert not replays(pair, lambda: pair.theirs(x, sizes, probs, sizes))
    assert_bitwise_equal(pair.theirs(x, sizes, probs, sizes), wanted)


def test_split_sizes_go_where_the_input_is(te: Any) -> None:
    pair = Pair(te, bias=False)
    pair.train()
    (joint,) = pair.fused()
    sizes, elsewhere = TAIL.tensor("cpu").to(torch.uint8), torch.device("meta")
    given = [sizes, pair.inputs.probs, sizes]
    joint._put_splits_on(elsewhere, given)
    assert given[0] is given[2] and given[0].device == elsewhere and given[0].dtype is torch.int64
    assert given[1] is pair.inputs.probs


@pytest.mark.parametrize("activation", ["scaled_swiglu", "scaled_clamped", "scaled_srelu"])
@pytest.mark.parametrize("bias", [False, True])
def test_a_chain_as_megatron_core_makes_it(te: Any, activation: str, bias: bool) -> None:
    """Ops on the meta device, to which parameters that exist are given afterwards; gradients go to their main_grad."""
    pair = Pair(te, activation, bias)
    chain, (fc1, act, fc2) = te.Sequential(), pair.theirs
    for linear in (fc1, fc2):
        shell = te.GroupedLinear(
            TAIL.groups, linear.in_features, linear.out_features, bias=bias, device="meta", dtype=torch.bfloat16,
            accumulate_into_main_grad=True, delay_wgrad_compute=False,
            **({"scale_bias": True} if bias and linear is fc2 else {}),
        )  # fmt: skip
        for name, p in linear.named_parameters():
            shell.register_parameter(name, p)
            p.main_grad = torch.zeros_like(p, dtype=torch.float32)
            p.grad_added_to_main_grad = False
        chain.append(shell)
        if linear is fc1:
            chain.append(act)
    wanted = step(pair.ours, pair.mlp, pair.inputs)
    x, probs = pair.inputs.x.clone().requires_grad_(), pair.inputs.probs.clone().requires_grad_()
    sizes = TAIL.tensor("cpu")
    y = chain(x, sizes, probs, sizes, *([probs] if bias else []))
    y.backward(pair.inputs.dy)
    assert [type(op).__name__ for op, _ in chain._module_groups[0]._forward_ops] == ["FusibleOpsRun"]
    for name, t in {"y": y.detach(), "dx": x.grad, "dprobs": probs.grad}.items():
        assert_bitwise_equal(t, wanted[name], name)
    for (name, _), theirs in zip(pair.ours.named_parameters(), pair.theirs.parameters(), strict=True):
        if "weight" in name:
            assert theirs.grad_added_to_main_grad
            assert_bitwise_equal(theirs.main_grad.to(torch.bfloat16), wanted[f"d{name}"], name)


def test_models_that_are_not_ours_to_run_are_left_alone(te: Any) -> None:
    full = {**COMMON, "dtype": torch.float32}
    model = [te.GroupedLinear(2, 64, 96, **full), te.ScaledSwiGLU(), te.GroupedLinear(2, 48, 64, **full)]
    assert plugin.fuse(model) == model
    lone = te.Sequential(te.Linear(64, 64, **COMMON))
    assert plugin.fuse([lone[0].basic_ops[0], lone[0].basic_ops[1]]) == list(lone[0].basic_ops)

    class DelayedScaling:
        pass

    pair = Pair(te)
    assert plugin.fuse(list(pair.theirs), recipe=DelayedScaling()) == list(pair.theirs)


def under_block_scaling() -> Any:
    """Their autocast with the recipe, as their fuser sees it."""
    recipe = importlib.import_module("transformer_engine.common.recipe").Float8BlockScaling()
    manager = importlib.import_module("transformer_engine.pytorch.quantization").FP8GlobalStateManager
    quantizes = {"is_fp8_enabled": lambda: True, "get_fp8_recipe": lambda: recipe, "is_first_fp8_module": lambda: False}
    if DEVICE == "cpu":
        quantizes["fp8_graph_capturing"] = lambda: False
    return mock.patch.multiple(manager, **quantizes)


def test_under_their_block_scaling(te: Any) -> None:
    """What our own rules make of the recipe runs on their parameters; other recipes are Transformer Engine's."""
    pair = Pair(te, "scaled_swiglu", bias=False, width=(128, 128))
    with ops.autocast(recipe=ops.Float8BlockScaling()):
        wanted = step(pair.ours, pair.mlp, pair.inputs)
    with under_block_scaling():
        got = pair.train()
        (fused,) = pair.fused()
    assert isinstance(fused, te_fused.FusibleOpsRun) and fused.recipe == ops.Float8BlockScaling()
    assert_alike(got, wanted)


@pytest.mark.gpu("sm_90a")
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")  # of every graphed callable
def test_their_graphed_callables(te: Any) -> None:
    """Captured once, replayed with other splits, rows and probs: the bits of ours as it is called."""
    from transformer_engine.pytorch import make_graphed_callables

    pair = Pair(te, "scaled_swiglu", bias=False, width=(128, 128))
    sample = [t.clone() for t in (pair.inputs.x, *pair.extras(pair.inputs.probs))]
    for t in sample:
        t.requires_grad_(t.is_floating_point())
    graphed = make_graphed_callables(pair.theirs, tuple(sample))
    (fused,) = pair.fused()
    assert isinstance(fused, te_fused.FusibleOpsRun)
    for sizes in ([0, TAIL.rows, 0], [20, 1, 9], [0, 0, 0]):
        splits = torch.tensor(sizes, device=DEVICE, dtype=sample[1].dtype)
        results = []
        for model in (graphed, pair.ours):
            x, probs = pair.inputs.x.clone().requires_grad_(), pair.inputs.probs.clone().requires_grad_()
            model.zero_grad()
            y = model(x, splits, probs, splits)
            y.backward(pair.inputs.dy)
            results.append([y.detach().clone(), x.grad, probs.grad, *(p.grad.clone() for p in model.parameters())])
        for got, want in zip(*results, strict=True):
            assert_bitwise_equal(got, want, f"{sizes}")
        pair.inputs.x.normal_()


def test_weights_that_are_put_away_and_filled_anew(te: Any) -> None:
    """As FSDP2 does it: shards take their places; they come back where they were, with other values."""
    pair = Pair(te, bias=False, width=(128, 128))
    with under_block_scaling():
        pair.train()
        for linear in (pair.theirs[0], pair.theirs[2]):
            for name, gathered in list(linear.named_parameters()):
                linear._parameters[name] = torch.nn.Parameter(gathered.detach()[:1].clone())
                with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(gathered):
                    gathered.mul_(0.5)
                gathered.grad, linear._parameters[name] = None, gathered
        got = pair.train()
    with torch.no_grad():
        for p in pair.ours.parameters():
            p.mul_(0.5)
    with ops.autocast(recipe=ops.Float8BlockScaling()):
        assert_alike(got, step(pair.ours, pair.mlp, pair.inputs))
    again = pickle.loads(pickle.dumps(pair.theirs[0]._parameters))
    assert type(again) is type(copy.deepcopy(pair.theirs[0]._parameters)) is dict


def test_copies_and_pickles(te: Any) -> None:
    pair = Pair(te)
    wanted = pair.train()
    for other in (copy.deepcopy(pair.theirs), pickle.loads(pickle.dumps(pair.theirs))):
        with torch.no_grad():
            y = other(pair.inputs.x, *pair.extras(pair.inputs.probs))
        assert_bitwise_equal(y, wanted["y"])
        with torch.no_grad():
            for p in other.parameters():
                p.zero_()
            assert not other(pair.inputs.x, *pair.extras(pair.inputs.probs)).any()
    with torch.no_grad():
        assert_bitwise_equal(pair.theirs(pair.inputs.x, *pair.extras(pair.inputs.probs)), wanted["y"])


def test_checkpointing_recomputes(te: Any) -> None:
    pair = Pair(te)
    wanted = pair.train()
    pair.theirs.zero_grad()
    run = lambda *given: torch.utils.checkpoint.checkpoint(pair.theirs, *given, use_reentrant=False)  # noqa: E731
    run.parameters = pair.theirs.parameters
    assert_alike(pair.train(run), wanted)


@pytest.mark.parametrize("has_run", [False, True])
def test_a_compiled_model(te: Any, has_run: bool) -> None:
    """Their fuser is called outside of its graphs, also where the first forward is compiled and plans."""
    pair = Pair(te)
    wanted = step(pair.ours, pair.mlp, pair.inputs)
    if has_run:
        assert_alike(pair.train(), wanted)
        pair.theirs.zero_grad()
    compiled = torch.compile(pair.theirs, backend="eager")
    for planned in (has_run, True):
        with around_their_fuser() if planned else contextlib.nullcontext():
            assert_alike(pair.train(compiled), wanted)
        pair.theirs.zero_grad()


def test_explain_says_what_runs_what(te: Any) -> None:
    pair = Pair(te)
    text = plugin.explain(pair.theirs, "sm_90a")
    assert "grouped_mlp: fc1 = GroupedLinear [0], act = ScaledSwiGLU [1], fc2 = GroupedLinear [2]" in text
    assert "needs sm_90a; this is sm_80" in plugin.explain(pair.theirs, "sm_80")
    mixed = te.Sequential(te.ConstantScale(1.0), *pair.theirs)
    assert "ConstantScale [0]: Transformer Engine's own; no rule knows it" in plugin.explain(mixed, "sm_90a")


def test_install_twice_is_once_and_uninstall_gives_it_back(te: Any) -> None:
    fuser = te.fuser.OperationFuser
    functions, call = fuser.forward_backward_fusion_functions, fuser.__call__
    plugin.install()
    assert functions.count(plugin.fuse) == 1 and functions[0] is plugin.fuse and fuser.__call__ is call
    plugin.uninstall()
    plugin.uninstall()
    assert plugin.fuse not in functions and fuser.__call__ is call.__wrapped__


def test_a_plan_of_theirs_is_for_one_grad_mode(te: Any) -> None:
    """One that was made before stays; a later plan, of another grad mode, is ours; the bench needs that."""
    pair = Pair(te)
    (run,) = te.Sequential._make_module_groups(list(pair.theirs))
    x, splits, probs = pair.inputs.x, TAIL.tensor(DEVICE), pair.inputs.probs
    given = [[splits], [probs], [splits, probs]]
    plugin.uninstall()
    run.maybe_fuse_ops(True, None, x, given)
    plugin.install()
    run.maybe_fuse_ops(True, None, x, given)
    assert plans_with_ours(run) == [False]
    run.maybe_fuse_ops(False, None, x, given)
    assert plans_with_ours(run) == [False, True]


def test_all_of_their_activations_have_counterparts(te: Any) -> None:
    """Those that take no arguments, and those that must."""
    names = "GELU GEGLU GLU QGELU QGEGLU ReLU ReGLU SReLU SReGLU SiLU SwiGLU SiTUGLU ClampedSwiGLU Quantize"
    scaled = "ScaledSReLU ScaledSwiGLU ScaledSiTUGLU ScaledClampedQGeGLU"
    made = [getattr(te, name)() for name in (*names.split(), *scaled.split())]
    made.append(te.ScaledTanhSReLU(tanh_clamp_scale=2.0))
    (run,), unlike = runs_of(made)
    assert not unlike and [type(op).__name__.lower() for op in run.ours] == [type(op).__name__.lower() for op in made]


def test_activations_may_go_to_the_cpu_and_weights_stay(te: Any) -> None:
    """Where their CPU offload is on, what we keep is marked as they would mark it."""
    from transformer_engine.pytorch import cpu_offload

    marks: dict[str, list[Tensor]] = {"activation": [], "not": []}
    pair = Pair(te, bias=False)
    recorded = {
        "is_cpu_offload_enabled": lambda: True,
        "mark_activation_offload": lambda *t: marks["activation"].extend(t),
        "mark_not_offload": lambda *t: marks["not"].extend(t),
    }
    with mock.patch.multiple(cpu_offload, **recorded):
        got = pair.train()
    assert_alike(got, step(pair.ours, pair.mlp, pair.inputs))
    weights = {p.untyped_storage().data_ptr() for p in pair.theirs.parameters()}
    assert marks["not"] and all(t.untyped_storage().data_ptr() in weights for t in marks["not"])
    assert {t.shape[1] for t in marks["activation"] if t.dim() == 2} == {64, 96}
    assert not any(t.untyped_storage().data_ptr() in weights for t in marks["activation"])


def test_parameters_that_somebody_replaces_are_seen(te: Any) -> None:
    """What FSDP and expert parallelism do: other storage behind a parameter, other values in it."""
    pair = Pair(te, bias=False)
    pair.train()
    with torch.no_grad():
        for model in (pair.theirs, pair.ours):
            for i, p in enumerate(model.parameters()):
                p.grad = None
                p.data = torch.full_like(p, 0.01 * (i + 1))
    assert_alike(pair.train(), step(pair.ours, pair.mlp, pair.inputs))


def test_main_grads_of_parameters_that_others_took_the_places_of(te: Any) -> None:
    """The fuser knows those that were there first, which were frozen."""
    pair = Pair(te, accumulate_into_main_grad=True)
    pair.theirs.requires_grad_(False)
    pair.train()
    for linear in (pair.theirs[0], pair.theirs[2]):
        for name, p in list(linear.named_parameters()):
            setattr(linear, name, torch.nn.Parameter(p.detach().clone()))
    for model in (pair.theirs, pair.ours):
        for p in model.parameters():
            p.main_grad = torch.zeros_like(p, dtype=torch.float32)
    with around_their_fuser():
        pair.train()
    step(pair.ours, pair.mlp, pair.inputs)
    for a, b in zip(pair.theirs.parameters(), pair.ours.parameters(), strict=True):
        assert_bitwise_equal(a.main_grad, b.main_grad)
    assert pair.theirs[0].weight0.main_grad.any()
