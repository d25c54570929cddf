"""The way from a call of a fused layer to its launches, on CPU tensors with kernels that do nothing.

What is asserted: how much Python a repeated call runs (seconds on a busy machine say nothing), and that what is kept
from call to call never changes a launch.
"""

from __future__ import annotations

import gc
import pickle
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import fusible_ops as ops
from cute_kernels import launch
from cute_kernels import ops as kernels
from cute_kernels.activation import Activation
from cute_kernels.facts import facts
from cute_kernels.hopper import device_table
from fusible_ops import casts, route
from fusible_ops.fused import mlp_shortcut
from fusible_ops.integrations import transformer_engine as plugin
from tests import te_wheel
from tests.models import as_if_on

BF16 = {"device": "cpu", "dtype": torch.bfloat16}
GROUPS, HIDDEN, INTERMEDIATE, ROWS = 8, 64, 64, 32


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """Every launch, as (module, options, arguments with facts in place of tensors). CPU tensors take host functions."""
    found: list[tuple[Any, ...]] = []

    def told(argument: Any) -> Any:
        if isinstance(argument, tuple):
            return tuple(map(told, argument))
        return facts(argument) if isinstance(argument, Tensor) else argument

    def kernel(module: str, options: object, arch: str) -> Callable[..., None]:
        return lambda *arguments: found.append((module, options, told(arguments)))

    monkeypatch.setitem(kernels._HOSTS, "cpu", kernels._HOSTS["cuda"])
    monkeypatch.setattr(launch, "kernel", kernel)
    monkeypatch.setattr(launch, "current_stream", lambda device: 7)
    monkeypatch.setattr(device_table, "device_table", lambda values, *place: torch.tensor(values))
    with as_if_on("sm_90a"):
        yield found


def layer(stacked: bool = True, bias: bool = False) -> ops.Sequential:
    common = {"bias": bias, "single_grouped_weight": stacked, "single_grouped_bias": stacked, **BF16}
    return ops.Sequential(
        ops.GroupedLinear(GROUPS, HIDDEN, 2 * INTERMEDIATE, **common),
        ops.ScaledSwiGLU(),
        ops.GroupedLinear(GROUPS, INTERMEDIATE, HIDDEN, **common),
        on_unfused="error",
    )


def apart(model: ops.Sequential) -> ops.Sequential:
    """The same, each parameter in memory of its own."""
    for p in reversed(list(model.parameters())):
        p.data = p.data.clone()
    return model


def inputs(rows: int = ROWS) -> list[Tensor]:
    """x, splits, probs, and the same splits again."""
    splits = torch.full((GROUPS,), rows // GROUPS, dtype=torch.int32)
    return [torch.randn(rows, HIDDEN, **BF16).requires_grad_(), splits, torch.rand(rows).requires_grad_(), splits]


def python_calls(run: Callable[[], object]) -> int:
    """Python functions that `run` calls, without what the garbage collector may call meanwhile."""
    count = 0

    def profile(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    gc.collect()
    gc.disable()
    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


@pytest.mark.parametrize("shape", [layer, lambda *_: apart(layer(False))], ids=["packed", "apart"])
def test_weights_that_move_before_backward_are_found(
    launched: list, monkeypatch: pytest.MonkeyPatch, shape: Callable
) -> None:
    """The tables of backward's launches are of where weights lie then, also after a shortcut of forward."""
    seen: list[tuple[int, ...]] = []
    monkeypatch.setattr(
        device_table, "device_table", lambda values, *place: (seen.append(values), torch.tensor(values))[1]
    )
    model = shape(False)
    linears, in_the_way = [model[0].weight_parameters(), model[2].weight_parameters()], []
    for moves in (False, False, False, True):
        y = model(*inputs())
        for w in reversed(linears[0] + linears[1] if moves else []):  # as FSDP2 frees and fills them
            storage = w.untyped_storage()
            size = storage.nbytes()
            storage.resize_(0)
            in_the_way.append(torch.empty(size, dtype=torch.uint8))
            storage.resize_(size)
        seen.clear()
        y.sum().backward()
        places = [[w.data_ptr() for w in weights] for weights in linears]
        assert set(seen) <= {tuple((p - min(each)) // 16 for p in each) for each in places}
        assert bool(seen) == (shape is not layer)


LAYERS = {
    "stacked": lambda: layer(True),
    "discrete": lambda: layer(False),
    "apart": lambda: apart(layer(False)),
    "stacked with biases": lambda: layer(True, True),
}


@pytest.mark.parametrize("made", LAYERS)
def test_a_repeated_call_runs_little_python(launched: list, monkeypatch: pytest.MonkeyPatch, made: str) -> None:
    """Before routes and plans were kept, forward made 224 calls, with 64 discrete weights 478; backward 185 and 311.
    Without biases there is a shortcut. 19 calls of backward are PyTorch's own.

    Comprehensions are calls before Python 3.12: the bounds hold with them.
    """
    monkeypatch.setattr(launch, "kernel", lambda *spec: lambda *arguments: None)
    model, arguments = LAYERS[made](), inputs()
    grad, results = torch.ones(ROWS, HIDDEN, **BF16), []
    for _ in range(3 if made == "apart" else 2):  # where a shortcut has plans of its own
        model(*arguments).backward(grad)
    forward = python_calls(lambda: results.append(model(*arguments)))
    backward = python_calls(lambda: results[0].backward(grad))
    bounds = {"stacked with biases": (110, 115), "apart": (56, 75)}.get(made, (52, 70))
    assert forward <= bounds[0] and backward <= bounds[1], (forward, backward)


def counts_of(model: Any) -> list[int]:
    """Python calls of a repeated forward, of its backward, and of a forward without gradients."""
    arguments, grad, results = inputs(), torch.ones(ROWS, HIDDEN, **BF16), []
    for _ in range(3):
        model(*arguments).backward(grad)
        with torch.no_grad():
            model(*arguments)
    counts = [python_calls(lambda: results.append(model(*arguments))), python_calls(lambda: results[0].backward(grad))]
    with torch.no_grad():
        return [*counts, python_calls(lambda: model(*arguments))]


@pytest.mark.parametrize(
    ("bias", "bounds"), [(False, (15, 20, 10)), (True, (35, 20, 30))], ids=["without biases", "with biases"]
)
def test_transformer_engines_fuser_adds_little_python(
    launched: list, monkeypatch: pytest.MonkeyPatch, bias: bool, bounds: tuple[int, ...]
) -> None:
    """To calls of our own container, and nothing for each of the parameters. Through their fuser, with these 16 forward
    made 66 calls more (with biases, 32, 103), with 256 of them 306; backward 36 (32), without gradients 36 (56).
    """
    te = te_wheel.load()
    plugin.install()
    try:
        monkeypatch.setattr(launch, "kernel", lambda *spec: lambda *arguments: None)
        counts = []
        for kinds, act in ((te, te.ScaledSwiGLU()), (ops, ops.ScaledSwiGLU())):
            fc1 = kinds.GroupedLinear(GROUPS, HIDDEN, 2 * INTERMEDIATE, bias=bias, **BF16)
            fc2 = kinds.GroupedLinear(GROUPS, INTERMEDIATE, HIDDEN, bias=bias, **BF16)
            counts.append(counts_of(kinds.Sequential(fc1, act, fc2)))
    finally:
        plugin.uninstall()
    added = [theirs - ours for theirs, ours in zip(*counts, strict=True)]
    assert all(n <= bound for n, bound in zip(added, bounds, strict=True)), added


def test_a_kept_cast_is_found_again_with_no_python_for_each_parameter() -> None:
    made, counts = [], []

    def cast(parameters: list[Tensor]) -> list[Tensor]:
        return casts.cast(parameters, "kind", True, lambda: made.append(parameters) or [torch.empty(1)])

    for count in (2, 64):
        parameters = [torch.nn.Parameter(torch.randn(4, 4)) for _ in range(count)]
        first = cast(parameters)
        counts.append(python_calls(lambda parameters=parameters: cast(parameters)))
        assert cast(parameters) is first and made == [parameters]
        parameters[-1].data = parameters[-1].data.mT  # where it lay, and no version counter says so
        assert cast(parameters) is not first and len(made) == 2
        made.clear()
    assert counts[0] == counts[1]
    twice = [parameters[0], parameters[0]]
    assert cast(twice) is cast(twice)
    frozen = cast(parameters)
    assert cast([p.requires_grad_(False) for p in parameters]) is frozen


def _narrow(t: Tensor, start: int) -> Tensor:
    """The values of t [T, C] in rows 8 longer, from element `start` of the memory on."""
    wide = torch.zeros(t.shape[0], t.shape[1] + 8, dtype=t.dtype)
    wide[:, start : start + t.shape[1]] = t.detach()
    return wide[:, start : start + t.shape[1]].requires_grad_(t.requires_grad)


def _swap(model: ops.Sequential, change: Callable[[Tensor], Tensor]) -> None:
    p = next(model[2].parameters())
    p.data = change(p.data)


VARIANTS: dict[str, Callable[[ops.Sequential, list[Tensor]], list[Tensor]]] = {
    "the same": lambda model, given: given,
    "fewer rows": lambda model, given: inputs(16),
    "rows that lie apart": lambda model, given: [_narrow(given[0], 0), *given[1:]],
    "rows that do not start at 16 bytes": lambda model, given: [_narrow(given[0], 1), *given[1:]],
    "bf16 probs": lambda model, given: [*given[:2], given[2].detach().bfloat16(), given[3]],
    "strided probs": lambda model, given: [*given[:2], torch.rand(2 * ROWS)[::2], given[3]],
    "int64 splits": lambda model, given: [given[0], given[1].long(), given[2], given[3].long()],
    "two splits": lambda model, given: [*given[:3], given[3].clone()],
    "x without gradient": lambda model, given: [given[0].detach(), *given[1:]],
    "FC2 alone wants a gradient": lambda model, given: [
        *[t.detach() for t in given],
        model[0].requires_grad_(False),
    ][:4],
    "frozen FC2": lambda model, given: [*given, model[2].requires_grad_(False)][:4],
    "another weight": lambda model, given: _swap(model, torch.clone) or given,
    "a frozen weight in another order": lambda model, given: (
        _swap(model.requires_grad_(False), lambda w: w.mT.contiguous().mT) or given
    ),
    "a weight that does not start at 16 bytes": lambda model, given: (
        _swap(model, lambda w: torch.cat([w.new_zeros(1), w.flatten()])[1:].view(w.shape)) or given
    ),
    "3 dimensions": lambda model, given: [given[0].detach().view(2, -1, HIDDEN).requires_grad_(), *given[1:]],
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("made", ["stacked", "discrete", "apart"])
def test_what_is_kept_changes_no_launch(launched: list, made: str, variant: str) -> None:
    """After other calls, a call launches what the first call of a new container over the same ops launches."""
    model, given = LAYERS[made](), inputs()
    for arguments in (given, given, inputs(64), given):
        model(*arguments).sum().backward()
    arguments = VARIANTS[variant](model, given)
    recorded = []
    for container in (model, ops.Sequential(*model)):
        for contiguous in (True, False):
            launched.clear()
            y = container(*arguments)
            y.backward(torch.ones_like(y) if contiguous else torch.ones(1, **BF16).expand(y.shape))
            recorded.append(list(launched))
    assert len(recorded[0]) == len(recorded[2]) > 3
    assert recorded[0] == recorded[2] and recorded[1] == recorded[3]
    with torch.no_grad():
        launched.clear()
        model(*arguments)
        assert len(launched) in (3, 4)  # two splits: two offsets


def test_tables_say_where_separate_weights_lie_now(launched: list, monkeypatch: pytest.MonkeyPatch) -> None:
    tables: list[tuple[int, ...]] = []
    table = lambda values, *place: tables.append(values) or torch.tensor(values)  # noqa: E731
    monkeypatch.setattr(device_table, "device_table", table)
    model, arguments = apart(layer(False)), inputs()
    for i in range(10):
        if i == 5:
            _swap(model, torch.clone)
        places = [[p.data_ptr() for p in model[at].parameters()] for at in (0, 2)]
        first, second = (tuple((place - min(own)) // 16 for place in own) for own in places)
        tables.clear()
        model(*arguments).backward(torch.ones(ROWS, HIDDEN, **BF16))
        assert tables == [first, second, second, first]


def test_calls_are_known_again_without_the_compilers_guards(launched: list, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (route, mlp_shortcut):
        monkeypatch.setattr(module, "likeness", lambda *tensors: None)
    model, arguments = layer(), inputs()
    recorded = []
    for _ in range(4):
        launched.clear()
        model(*arguments).backward(torch.ones(ROWS, HIDDEN, **BF16))
        recorded.append(list(launched))
    assert len(recorded[0]) == 7 and recorded == [recorded[0]] * 4


def test_a_call_keeps_no_tensor(launched: list) -> None:
    """Routes, plans and guards know facts alone: a freed weight or input is free."""
    model, arguments = layer(), inputs()
    for _ in range(4):
        model(*arguments).backward(torch.ones(ROWS, HIDDEN, **BF16))
    launched.clear()
    storages = [StorageWeakRef(t.untyped_storage()) for t in (*arguments, model[0].weight)]
    del arguments
    model[0].weight = torch.nn.Parameter(torch.zeros_like(model[0].weight))
    assert all(storage.expired() for storage in storages)


class Watch(TorchDispatchMode):
    """Names of the operators that were called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Subclass(Tensor):
    """A tensor of somebody else's class."""


def test_operators_are_called_where_something_sees_them(launched: list) -> None:
    model, arguments = layer(), inputs()
    for _ in range(3):
        launched.clear()
        model(*arguments)
    assert len(launched) == 3
    with Watch() as watch:
        model(*arguments).sum().backward()
    assert sum(name.startswith("fusible_ops.grouped_") for name in watch.seen) == 6
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profiler:
        model(*arguments)
    assert any(event.name == "fusible_ops::grouped_gemm_act" for event in profiler.events())
    x, splits, probs, _ = arguments
    model(x.detach().as_subclass(Subclass), splits, probs, splits)
    assert len(launched) == 3, "CPU operators run the reference: nothing is launched"
    model(*arguments)
    assert len(launched) == 6


def test_checks_are_made_anew_for_every_kind_of_call(launched: list) -> None:
    model, (x, splits, probs, _) = layer(), inputs()
    model(x, splits, probs, splits)
    with pytest.raises(ValueError, match=r"one value for each of 32 rows"):
        model(x, splits, probs[:-1], splits)
    with pytest.raises(TypeError, match=r"must be int32 or int64"):
        model(x, splits.float(), probs, splits)
    with pytest.raises(ValueError, match=r"last dimension must be 64"):
        model(x[:, :-8], splits, probs, splits)
    with pytest.raises(ValueError, match=r"Expected 3 extra inputs but got 2"):
        model(x, splits, probs)
    model[2].weight.data = model[2].weight.data.double()
    with pytest.raises(RuntimeError, match=r"run unfused"):
        model(x, splits, probs, splits)
    assert len(launched) == 3


def test_a_hash_is_kept_and_stays_in_its_process() -> None:
    """Another hashes strings otherwise, and would not find what is equal."""
    activation = Activation("clamped_swiglu", limit=7.0)
    assert "_hash" not in vars(activation), "made inside a graph of torch.compile, it cannot be hashed"
    assert hash(activation) == vars(activation)["_hash"]
    again = pickle.loads(pickle.dumps(activation))
    assert "_hash" not in vars(again) and again == activation and hash(again) == hash(activation)
