"""What a layer stores, launches and returns: frozen parts, inference, memory, FP32 weights under autocast, main_grad.

Every test runs on the CPU (the fused operations on the operators' reference) and on a Hopper GPU.
"""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import fusible_ops as ops
from cute_kernels import reference
from fusible_ops import ranges
from tests.bench.timing import requested_bytes
from tests.cases import Splits, full
from tests.compare import assert_as_accurate, assert_bitwise_equal
from tests.models import MLP, Inputs, step
from tests.places import HOPPER, PLACES, RECIPE_PLACES, Place

FUSED = [
    pytest.param(Place("cpu", True), id="cpu-fused"),
    pytest.param(Place("cuda", True), id="cuda-fused", marks=HOPPER),
]
fused_places = pytest.mark.parametrize("place", FUSED, indirect=True)
SPLITS = Splits("tail", (96, 0, 130, 74), 512)
BF16 = torch.bfloat16


# ----------------------------------------------------------------------------------------------------------------------
# Frozen parts


def _backward_kernels(x: bool, fc1: bool, fc2: bool, probs: bool) -> list[str]:
    """What a backward has to run for these gradients, biases included."""
    before_fc2 = x or fc1 or probs
    wanted = ["grouped_gemm_dact"] if before_fc2 else []
    wanted += ["grouped_wgrad", "grouped_dbias"] if fc2 else []
    wanted += ["grouped_wgrad", "grouped_dbias"] if fc1 else []
    return sorted(wanted + (["grouped_gemm_dgrad"] if x else []))


@fused_places
@pytest.mark.parametrize("wants", list(itertools.product([False, True], repeat=4))[1:], ids=str)
def test_frozen_parts_launch_nothing(place: Place, wants: tuple[bool, bool, bool, bool]) -> None:
    want_x, want_fc1, want_fc2, want_probs = wants
    mlp = MLP("scaled_swiglu", bias=True)
    model = place.build(mlp, SPLITS)
    model[0].requires_grad_(want_fc1)
    model[2].requires_grad_(want_fc2)
    inputs = Inputs.random(SPLITS, mlp.hidden, place.device, BF16)
    exact = copy.deepcopy(model).float().requires_grad_()
    exact.rules, exact.on_unfused = (), "allow"
    results = step(exact, mlp, inputs.to(torch.float32))
    full_precision = [results["dx"], results["dprobs"], *(results[f"d{name}"] for name, _ in model.named_parameters())]
    sizes = SPLITS.tensor(place.device)
    outcomes = []
    for everything in (True, False):
        x = inputs.x.clone().requires_grad_(everything or want_x)
        probs = inputs.probs.clone().requires_grad_(everything or want_probs)
        model.zero_grad()
        y = model(x, *mlp.extras(sizes, probs))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profiler:
            y.backward(inputs.dy)
        outcomes.append([x.grad, probs.grad, *(p.grad for p in model.parameters())])
    found = [e.name.removeprefix("fusible_ops::") for e in profiler.events() if e.name.startswith("fusible_ops::")]
    assert sorted(found) == _backward_kernels(*wants)
    for everything, wanted, reference_grad in zip(*outcomes, full_precision, strict=True):
        if wanted is not None:
            assert_as_accurate(wanted, everything, reference_grad)


# ----------------------------------------------------------------------------------------------------------------------
# What is stored


@contextmanager
def _saved(model: torch.nn.Module, x: Tensor) -> Iterator[dict[int, int]]:
    """Bytes that autograd is given to keep, by storage; without the parameters' and the input's."""
    known = {t.untyped_storage().data_ptr() for t in (x, *model.parameters())}
    sizes: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in known:
            sizes[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        yield sizes


CHAINS = [
    ("mlp", lambda mlp, place, splits: place.build(mlp, splits)),
    ("linear and activation", lambda mlp, place, splits: place.build(mlp, splits)[:2]),
    ("linear", lambda mlp, place, splits: place.build(mlp, splits)[:1]),
]


@fused_places
@pytest.mark.parametrize(("name", "build"), CHAINS, ids=[name for name, _ in CHAINS])
@pytest.mark.parametrize("activation", ["scaled_swiglu", "srelu"])
def test_saved_bytes(place: Place, name: str, build: Callable, activation: str) -> None:
    """x (the caller's own), the pre-activation, and a few words a row and a group; the activation is never kept."""
    mlp, splits = MLP(activation, hidden=256, intermediate=128, bias=True), Splits("rows", (300, 0, 500, 24), 1024)
    model = build(mlp, place, splits)
    inputs = Inputs.random(splits, mlp.hidden, place.device, BF16)
    x, probs = inputs.x.clone().requires_grad_(), inputs.probs.clone().requires_grad_()
    extras = [t for t in mlp.extras(splits.tensor(place.device), probs)][: model.groups()[0].num_extra_inputs]
    with _saved(model, x) as sizes:
        y = model(x, *extras)
    preact = 0 if name == "linear" else splits.rows * model[0].out_features * 2
    words = 16 * (splits.rows + splits.groups)
    assert preact <= sum(sizes.values()) <= preact + words, (sizes, preact)
    y.sum().backward()


@pytest.mark.gpu("sm_90a")
@pytest.mark.parametrize("grad", [False, True])
def test_memory_of_a_forward(grad: bool) -> None:
    """After it: y, and with gradients the pre-activation. At its peak the activation too. no_grad never has a
    pre-activation.
    """
    place, splits = Place("cuda", True), full("rows", 2048, 0, 1048, 1000)
    mlp = MLP("scaled_swiglu", hidden=1024, intermediate=1024)
    model = place.build(mlp, splits)
    inputs, sizes = Inputs.random(splits, mlp.hidden, "cuda", BF16), splits.tensor("cuda")
    act = splits.rows * mlp.intermediate * 2
    y_bytes, preact, slack = splits.rows * mlp.hidden * 2, 2 * act if grad else 0, 64 * splits.rows
    for _ in range(2):
        y = None
        torch.cuda.reset_peak_memory_stats()
        before = requested_bytes()
        with torch.set_grad_enabled(grad):
            y = model(inputs.x, *mlp.extras(sizes, inputs.probs))
        after, peak = requested_bytes() - before, requested_bytes("peak") - before
    assert y is not None and y.requires_grad == grad
    assert y_bytes + preact <= after <= y_bytes + preact + slack
    assert peak <= y_bytes + preact + act + slack


@pytest.mark.parametrize("ops_of_it", [2, 3])
def test_backward_lets_go_of_what_it_has_used(ops_of_it: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pre-activation, and the recomputed activation, are gone when the input's gradient is allocated; not where
    the graph is kept.
    """
    place, mlp = Place("cpu", True), MLP("scaled_swiglu", bias=True)
    model, inputs = place.build(mlp, SPLITS)[:ops_of_it], Inputs.random(SPLITS, mlp.hidden, "cpu", BF16)
    made: list[StorageWeakRef] = []
    alive: list[int] = []

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

    monkeypatch.setattr(reference, "grouped_gemm_act", watched("grouped_gemm_act", 1))
    monkeypatch.setattr(reference, "grouped_gemm_dact", watched("grouped_gemm_dact", 1))
    monkeypatch.setattr(reference, "grouped_gemm_dgrad", dgrad)
    x = inputs.x.clone().requires_grad_()
    with place.context():
        y = model(x, *mlp.extras(SPLITS.tensor(), inputs.probs)[:ops_of_it])
    dy = torch.ones_like(y)
    y.backward(dy, retain_graph=True)
    first, x.grad = x.grad, None
    y.backward(dy)
    assert_bitwise_equal(x.grad, first)
    assert alive == [1, 0]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("ops_of_it", [2, 3])
def test_inference_asks_for_no_preactivation(mode: Callable, ops_of_it: int, monkeypatch: pytest.MonkeyPatch) -> None:
    place, mlp, results = Place("cpu", True), MLP("scaled_swiglu", bias=True), []
    model = place.build(mlp, SPLITS)[:ops_of_it]
    inputs = Inputs.random(SPLITS, mlp.hidden, "cpu", BF16)
    extras = mlp.extras(SPLITS.tensor(), inputs.probs)[:ops_of_it]
    run = reference.grouped_gemm_act
    monkeypatch.setattr(reference, "grouped_gemm_act", lambda *a, **k: results.append(run(*a, **k)) or results[-1])
    with place.context():
        expected = model(inputs.x, *extras).detach()
        with mode():
            y = model(inputs.x, *extras)
    assert results[0][1] is not None and results[1][1] is None
    assert_bitwise_equal(y.clone(), expected)


# ----------------------------------------------------------------------------------------------------------------------
# FP32 weights under autocast


class Casts(TorchDispatchMode):
    """Elements that are cast from FP32 parameters to 16 bits while it is active, over the parameters' elements."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.total, self.elements = sum(p.numel() for p in model.parameters()), 0
        self.pointers = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        source = args[1] if func is torch.ops.aten.copy_.default else args[0] if args else None
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default) and isinstance(source, Tensor):
            narrow = result.dtype in (torch.bfloat16, torch.float16)
            if source.dtype == torch.float32 and narrow and source.untyped_storage().data_ptr() in self.pointers:
                self.elements += source.numel()
        return result

    @property
    def times(self) -> float:
        return self.elements / self.total


class Layer:
    """An FP32 layer, its inputs, and a forward of it under autocast."""

    def __init__(self, place: Place, **linear: object) -> None:
        self.mlp = MLP("scaled_swiglu", hidden=64, intermediate=48, bias=True, linear=linear)
        self.place, self.model = place, place.build(self.mlp, SPLITS, torch.float32)
        self.inputs = Inputs.random(SPLITS, self.mlp.hidden, place.device, torch.float32)
        self.dy = self.inputs.dy.to(BF16)
        self.extras = self.mlp.extras(SPLITS.tensor(place.device), self.inputs.probs)

    def forward(self, x: Tensor | None = None, model: ops.Sequential | None = None, **autocast: object) -> Tensor:
        with torch.autocast(self.place.device, **{"dtype": BF16, **autocast}):
            return (model or self.model)(self.inputs.x if x is None else x, *self.extras)

    def fresh(self, dtype: torch.dtype = torch.float32) -> ops.Sequential:
        """Another module with the same weights."""
        other = self.place.build(self.mlp, SPLITS, dtype)
        other.load_state_dict(self.model.state_dict())
        return other

    def assert_up_to_date(self) -> None:
        """The next forward is what a fresh module gives."""
        assert_bitwise_equal(self.forward().detach(), self.forward(model=self.fresh()).detach())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("linear", [{}, {"single_grouped_weight": True, "single_grouped_bias": True}], ids=str)
def test_autocast_equals_weights_that_were_cast(place: Place, dtype: torch.dtype, linear: dict) -> None:
    """y, dx and dprobs have the bits of a 16-bit module; the gradients of FP32 parameters are FP32, and no worse."""
    layer = Layer(place, **linear)
    low, inputs = layer.fresh(dtype), layer.inputs
    x, probs = inputs.x.clone().requires_grad_(), inputs.probs.clone().requires_grad_()
    with torch.autocast(place.device, dtype):
        y = layer.model(x, *layer.mlp.extras(SPLITS.tensor(place.device), probs))
    y.backward(inputs.dy.to(dtype))
    expected = step(low, layer.mlp, inputs.to(dtype))
    exact_model = Place(place.device, False).build(layer.mlp, SPLITS, torch.float32)
    exact_model.load_state_dict(low.state_dict())
    rounded = Inputs(inputs.x.to(dtype).float(), inputs.probs.to(dtype).float(), inputs.dy.to(dtype).float(), SPLITS)
    exact = step(exact_model, layer.mlp, rounded)
    assert y.dtype == dtype and x.grad.dtype == torch.float32
    assert_bitwise_equal(y.detach(), expected["y"], "y")
    assert_bitwise_equal(x.grad, expected["dx"].float(), "dx")
    assert_bitwise_equal(probs.grad, expected["dprobs"], "dprobs")
    for name, p in layer.model.named_parameters():
        assert p.grad.dtype == torch.float32
        assert_as_accurate(p.grad, expected[f"d{name}"], exact[f"d{name}"], name)


def test_weights_are_cast_once_for_all_forwards_of_an_update(place: Place) -> None:
    layer = Layer(place)
    optimizer = torch.optim.SGD(layer.model.parameters(), lr=0.1)
    for _ in range(3):
        with Casts(layer.model) as casts:
            for _ in range(3):
                layer.forward().backward(layer.dy)
        assert casts.times == 1
        with Casts(layer.model) as casts, torch.no_grad():
            for _ in range(2):
                layer.forward()
        assert casts.times == 1  # evaluation has its own: weights may be swapped for it
        with Casts(layer.model) as casts:
            layer.forward(cache_enabled=False)
            layer.forward(cache_enabled=False)
        assert casts.times == 2
        optimizer.step()
        optimizer.zero_grad()


class _Careless(torch.optim.Optimizer):
    """Writes through `.data`, which no version counter sees."""

    def step(self) -> None:
        for p in self.param_groups[0]["params"]:
            p.data.mul_(0.5)


def _halve(how: str, model: ops.Sequential) -> None:
    """Halve parameters."""
    half = {name: 0.5 * p.detach() for name, p in model.named_parameters()}
    if how == "in place":
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.5)
    elif how == "data":
        for name, p in model.named_parameters():
            p.data = half[name]
    elif how == "load_state_dict":
        model.load_state_dict({**model.state_dict(), **half})
    elif how == "optimizer":
        for p in model.parameters():
            p.grad = 0.5 * p.detach()
        torch.optim.SGD(model.parameters(), lr=1.0).step()
    elif how == "careless optimizer":
        _Careless(model.parameters(), {}).step()
    elif how == "the last one":
        with torch.no_grad():
            list(model.parameters())[-1].mul_(0.5)


CHANGES = ("in place", "data", "load_state_dict", "optimizer", "careless optimizer", "the last one")


@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize("evaluates", [False, True])
def test_a_changed_parameter_is_cast_anew(place: Place, how: str, evaluates: bool) -> None:
    """Train, perhaps evaluate, change, and both again: everything is what a fresh module gives."""
    layer = Layer(place)
    for _ in range(2):
        layer.forward().backward(layer.dy)
        if evaluates:
            with torch.no_grad():
                layer.forward()
        _halve(how, layer.model)
        with torch.inference_mode():
            assert_bitwise_equal(layer.forward().clone(), layer.forward(model=layer.fresh()).clone())
        layer.assert_up_to_date()
        x, same = layer.inputs.x.clone().requires_grad_(), layer.inputs.x.clone().requires_grad_()
        layer.forward(x).backward(layer.dy)
        layer.forward(same, layer.fresh()).backward(layer.dy)
        assert_bitwise_equal(x.grad, same.grad)


def test_weights_swapped_for_an_evaluation(place: Place) -> None:
    """Averaged weights are copied in through `.data`, evaluated, and the trained ones copied back."""
    layer = Layer(place)
    trained = {name: p.detach().clone() for name, p in layer.model.named_parameters()}
    layer.forward().backward(layer.dy)
    for name, p in layer.model.named_parameters():
        p.data.copy_(0.5 * trained[name])
    with torch.no_grad():
        layer.assert_up_to_date()
    for name, p in layer.model.named_parameters():
        p.data.copy_(trained[name])
    layer.assert_up_to_date()


def test_storage_that_comes_back_at_the_same_address_is_noticed(place: Place) -> None:
    """p.data = other values several times, which may get the memory of those before."""
    layer = Layer(place, single_grouped_weight=True)
    for value in range(1, 6):
        for linear in (layer.model[0], layer.model[2]):
            linear.weight.data = torch.full_like(linear.weight, 0.01 * value)
        layer.assert_up_to_date()


def test_a_copy_and_a_pickle_hold_no_cast(place: Place) -> None:
    layer = Layer(place)
    before = len(pickle.dumps(layer.model))
    expected = layer.forward().detach()
    assert len(pickle.dumps(layer.model)) == before
    other = copy.deepcopy(layer.model)
    with torch.no_grad():
        for p in layer.model.parameters():
            p.zero_()
    assert (layer.forward() == 0).all()
    assert_bitwise_equal(layer.forward(model=other).detach(), expected)


def test_nothing_is_kept_without_autocast(place: Place) -> None:
    """The cast dies with the first forward that does not use it, or with the parameters; without autocast there is
    none.
    """
    layer = Layer(place)
    layer.model.on_unfused = "allow"
    gc.collect()
    known = {id(t): weakref.ref(t) for t in gc.get_objects() if type(t) is Tensor}

    def new_narrow() -> list[weakref.ref]:
        gc.collect()
        found = [t for t in gc.get_objects() if type(t) is Tensor and (id(t) not in known or known[id(t)]() is not t)]
        return [weakref.ref(t) for t in found if t.dtype == BF16 and t.numel() >= 64 * 48]

    layer.model(layer.inputs.x, *layer.extras)
    assert not new_narrow()
    layer.forward()
    assert new_narrow()
    layer.model(layer.inputs.x, *layer.extras)
    assert not new_narrow()
    layer.forward()
    layer.model = None
    assert not new_narrow()


def test_plain_fp32_runs_unfused_and_says_so() -> None:
    mlp = MLP("scaled_swiglu", hidden=64, intermediate=48, bias=True)
    model = mlp.build(SPLITS, "cpu", torch.float32)
    text = model.explain("sm_90a")
    assert "fc1.compute_dtype is float32, needs bfloat16 or float16" in text and "0 of 3 ops fused" in text
    assert "3 of 3 ops fused" in model.explain("sm_90a", dtype=torch.bfloat16)
    assert "3 of 3 ops fused" in model.explain("sm_90a", dtype=torch.float16)


# ----------------------------------------------------------------------------------------------------------------------
# What a profiler shows


def test_ranges_are_named_after_rules_and_ops(place: Place) -> None:
    mlp = MLP("scaled_swiglu", bias=True)
    model = place.build(mlp, SPLITS)
    inputs = Inputs.random(SPLITS, mlp.hidden, place.device, BF16)
    ops_of_it = ["GroupedLinear fc1", "ScaledSwiGLU act", "GroupedLinear fc2"]
    names = [f"grouped_mlp ({', '.join(ops_of_it)})"] if place.fused else [f"unfused {op}" for op in ops_of_it]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profiler:
        step(model, mlp, inputs)
    found = [e.name for e in sorted(profiler.events(), key=lambda e: e.time_range.start)]
    shown = [name for name in found if name.endswith((" forward", " backward")) and name.rsplit(" ", 1)[0] in names]
    assert shown == [f"{n} forward" for n in names] + [f"{n} backward" for n in reversed(names)]


@pytest.mark.parametrize("traced", [False, True])
def test_nvtx_ranges_only_where_a_tool_wants_them(traced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", opened.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: None)
    monkeypatch.setattr(ranges, "is_traced", lambda: traced)
    model = ops.Sequential({"act": ops.GELU()})
    model(torch.randn(3, 4, requires_grad=True)).sum().backward()
    assert opened == (["unfused GELU act forward", "unfused GELU act backward"] if traced else [])


# ----------------------------------------------------------------------------------------------------------------------
# Where weight gradients go


@pytest.mark.parametrize("place", [*PLACES, *RECIPE_PLACES], indirect=True)
@pytest.mark.parametrize("single", [False, True], ids=["separate", "single"])
@pytest.mark.parametrize("delay", [False, True], ids=["at_once", "delayed"])
@pytest.mark.parametrize("to", ["grad", "add", "overwrite"])
def test_three_micro_batches(place: Place, single: bool, delay: bool, to: str) -> None:
    """The sum of all arrives in .grad or main_grad (the last if it overwrites), whatever the layout; and bias
    gradients with it. main_grad appears only before backward.
    """
    linear = {"single_grouped_weight": single, "delay_wgrad_compute": delay}
    linear["accumulate_into_main_grad"] = to != "grad"
    sizes_of = {"intermediate": 64, "bias": True}
    mlp, plain = MLP("scaled_swiglu", linear=linear, **sizes_of), MLP("scaled_swiglu", **sizes_of)
    model, other = place.build(mlp, SPLITS), place.build(plain, SPLITS)
    other.load_state_dict(model.state_dict())
    inputs, sizes = Inputs.random(SPLITS, mlp.hidden, place.device, BF16), SPLITS.tensor(place.device)
    once = step(other, plain, inputs)
    linears = [model[0], model[2]]
    weights = [w for op in linears for w in op.weight_parameters()]
    start = 0.0 if to == "grad" else 3.0
    for i in range(3):
        y = model(inputs.x, *mlp.extras(sizes, inputs.probs))
        if i == 0 and to != "grad":
            for w in weights:
                w.main_grad = torch.full(w.shape, start, dtype=torch.float32, device=place.device)
                w.overwrite_main_grad, w.grad_added_to_main_grad = to == "overwrite", False
        y.backward(inputs.dy)
        if delay:
            for op in linears:
                op.backward_dw()
    for op, name in zip(linears, ("fc1", "fc2"), strict=True):
        got = [w.grad.float() if to == "grad" else w.main_grad for w in op.weight_parameters()]
        got = list(got[0].unbind(0)) if single else got
        for g, dw in enumerate(got):
            want = once[f"d{name}.weight{g}"].float()
            want = want if to == "overwrite" else start + 3 * want
            assert (dw - want).norm() <= 1e-2 * want.norm() + 1e-6, (name, g)
            bias = getattr(op, f"bias{g}").grad.float()
            wanted = 3 * once[f"d{name}.bias{g}"].float()
            assert (bias - wanted).norm() <= 1e-2 * wanted.norm() + 1e-6, (name, g)


# ----------------------------------------------------------------------------------------------------------------------
# Weights stored [K, N]

STORED = [
    {"transposed_weight": True},
    {"transposed_weight": True, "single_grouped_weight": True, "single_grouped_bias": True},
    {"transposed_weight": True, "accumulate_into_main_grad": True},
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "autocast"])
@pytest.mark.parametrize("linear", STORED, ids=["separate", "single", "main_grad"])
@pytest.mark.parametrize(
    ("activation", "interleave"),
    [("scaled_srelu", None), ("scaled_swiglu", None), ("swiglu", 1), ("scaled_clamped", 1), ("geglu", 8)],
)
def test_weights_stored_transposed(
    place: Place, activation: str, interleave: int | None, linear: dict, dtype: torch.dtype
) -> None:
    """The same numbers as from [N, K] weights, and gradients shaped as the weights are; nothing is copied."""
    mlp = MLP(activation, hidden=64, intermediate=48, bias=True, interleave=interleave, linear=linear)
    plain = MLP(activation, hidden=64, intermediate=48, bias=True, interleave=interleave)
    fuses = place.fused and (dtype == BF16 or place.device == "cuda")
    options = place.options() if fuses else {} if place.fused else {"rules": ()}
    model, other = mlp.build(SPLITS, place.device, dtype, **options), place.build(plain, SPLITS)
    state = {k: v.mT if ".weight" in k else v for k, v in other.state_dict().items()}
    model.load_state_dict(state)
    assert model[0].first_weight.shape[-2:] == (64, model[0].out_features)
    for w in (*model[0].weight_parameters(), *model[2].weight_parameters()):
        w.main_grad = torch.zeros(w.shape, dtype=torch.float32, device=place.device)
    exact = Place(place.device, False).build(plain, SPLITS, torch.float32)
    exact.load_state_dict(other.state_dict())
    inputs = Inputs.random(SPLITS, mlp.hidden, place.device, BF16)
    with torch.autocast(place.device, BF16, enabled=dtype == torch.float32):
        got = step(model, mlp, inputs)
    same, full_precision = step(other, plain, inputs), step(exact, plain, inputs.to(torch.float32))
    for op, name in ((model[0], "fc1"), (model[2], "fc2")):
        for w, key in zip(op.weight_parameters(), op._weight_keys, strict=True):
            grad = w.main_grad if op.accumulate_into_main_grad else w.grad
            assert grad.shape == w.shape
            parts = grad.unbind(0) if key == "weight" else [grad]
            keys = [f"d{name}.weight{g}" for g in range(SPLITS.groups)] if key == "weight" else [f"d{name}.{key}"]
            got |= {k: part.mT.to(same[k].dtype) for k, part in zip(keys, parts, strict=True)}
            got.pop(f"d{name}.weight", None)
        if op.single_grouped_bias:
            got |= {f"d{name}.bias{g}": b for g, b in enumerate(got.pop(f"d{name}.bias").unbind(0))}
    for name, want in same.items():
        assert_as_accurate(got[name].to(want.dtype), want, full_precision[name].to(want.dtype).float(), name)


def test_transposed_weights_as_hugging_face_has_them() -> None:
    """gate_up_proj [E, H, 2I] with pairs of columns, down_proj [E, I, H]: taken as they are, memory shared."""
    experts, hidden, intermediate = 3, 16, 24
    gate_up, down = torch.randn(experts, hidden, 2 * intermediate), torch.randn(experts, intermediate, hidden)
    common = {"bias": False, "device": "cpu", "single_grouped_weight": True, "transposed_weight": True}
    fc1 = ops.GroupedLinear(experts, hidden, 2 * intermediate, **common)
    fc2 = ops.GroupedLinear(experts, intermediate, hidden, **common)
    fc1.weight.data, fc2.weight.data = gate_up, down
    model = ops.Sequential(fc1, ops.ClampedSwiGLU(glu_interleave_size=1), fc2)
    x, sizes = torch.randn(9, hidden), torch.tensor([4, 0, 5])
    rows = []
    for part, w1, w2 in zip(x.split([4, 0, 5]), gate_up, down, strict=True):
        h = part @ w1
        gate, up = h[:, ::2].clamp(max=7.0), h[:, 1::2].clamp(-7.0, 7.0)
        rows.append((gate * torch.sigmoid(1.702 * gate) * (up + 1)) @ w2)
    torch.testing.assert_close(model(x, sizes, sizes), torch.cat(rows))
    assert "3 of 3 ops fused" in model.to(torch.bfloat16).explain("sm_90a")
    model[1] = ops.ClampedSwiGLU(glu_interleave_size=2)
    text = model.explain("sm_90a")
    assert "transposed_weight is True, needs False with glu_interleave_size 2" in text and "2 of 3 ops fused" in text


def test_transposed_weights_are_drawn_as_nn_linear_draws_them() -> None:
    torch.manual_seed(7)
    op = ops.GroupedLinear(2, 16, 24, device="cpu", transposed_weight=True)
    torch.manual_seed(7)
    for w in (op.weight0, op.weight1):
        assert_bitwise_equal(w.detach().mT.contiguous(), torch.nn.Linear(16, 24, bias=False).weight.detach())


# ----------------------------------------------------------------------------------------------------------------------


def test_a_clamp_without_limit_is_plain_swiglu(place: Place) -> None:
    """limit=None, alpha=1, offset=0: the same bits, gradients too."""
    splits = full("rows", 40, 0, 88)
    plain = place.build(MLP("swiglu", bias=True), splits)
    clamp = ops.ClampedSwiGLU(limit=None, alpha=1.0, glu_linear_offset=0.0)
    clamped = ops.Sequential({"fc1": plain[0], "act": clamp, "fc2": plain[2]}, **place.options())
    mlp, inputs = MLP("swiglu", bias=True), Inputs.random(splits, 64, place.device, BF16)
    expected, got = step(plain, mlp, inputs), step(clamped, mlp, inputs)
    for name, want in expected.items():
        assert_bitwise_equal(got[name], want, name)
