"""A kernel that cannot be had: the fused step that wants it runs unfused, says so once, and is not tried again."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fusible_ops as ops
from cute_kernels import launch, target
from cute_kernels import ops as kernels
from cute_kernels.hopper import device_table
from tests.models import as_if_on

BF16 = {"device": "cpu", "dtype": torch.bfloat16}
GROUPS, HIDDEN, INTERMEDIATE, ROWS = 4, 64, 64, 32
CAUSE = "ptxas error: no registers left\nline 2 of a long log"


class Launches:
    """Stands for `launch.kernel`. failing: kinds of kernels (`kind_of`) that do not compile; the others do nothing."""

    def __init__(self) -> None:
        self.failing: set[str] = set()
        self.asked: list[str] = []

    def __call__(self, module: str, options: Any, arch: str) -> Callable[..., None]:
        kind = getattr(options, "kind", module.rpartition(".")[2])
        self.asked.append(kind)
        if kind in self.failing:
            raise launch.CompileError(f"{module} does not compile for {arch} with {kind}: {CAUSE}")
        return lambda *arguments: None


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    """CPU tensors take the host functions of Hopper, whose launches do nothing; what is unfused computes."""
    made = Launches()
    monkeypatch.setitem(kernels._HOSTS, "cpu", kernels._HOSTS["cuda"])
    monkeypatch.setattr(launch, "kernel", made)
    monkeypatch.setattr(launch, "current_stream", lambda device: 7)
    monkeypatch.setattr(device_table, "device_table", lambda values, *place: torch.tensor(values))
    with as_if_on("sm_90a"):
        yield made


def layer(on_unfused: str = "allow", **options: Any) -> ops.Sequential:
    torch.manual_seed(0)
    return ops.Sequential(
        ops.GroupedLinear(GROUPS, HIDDEN, 2 * INTERMEDIATE, bias=False, **BF16),
        ops.ScaledSwiGLU(),
        ops.GroupedLinear(GROUPS, INTERMEDIATE, HIDDEN, bias=False, **BF16),
        on_unfused=on_unfused,
        **options,
    )


def inputs() -> list[Tensor]:
    """x, splits, probs, and the same splits again."""
    generator = torch.Generator().manual_seed(1)
    splits = torch.full((GROUPS,), ROWS // GROUPS)
    x = torch.randn(ROWS, HIDDEN, generator=generator).bfloat16().requires_grad_()
    return [x, splits, torch.rand(ROWS, generator=generator).requires_grad_(), splits]


def trained(model: ops.Sequential) -> list[Tensor]:
    """y, and every gradient of a step."""
    model.zero_grad()
    arguments = inputs()
    y = model(*arguments)
    y.backward(torch.ones_like(y))
    return [y.detach(), arguments[0].grad, arguments[2].grad, *[p.grad for p in model.parameters()]]


def assert_same(found: list[Tensor], wanted: list[Tensor]) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b) and b.any()


@pytest.mark.parametrize("failing", ["rowwise_kernel", "act", "store"])
def test_a_forward_kernel_that_does_not_compile(launches: Launches, failing: str) -> None:
    """The first, one in the middle, the last: the result is that of a container without rules, and so is the next."""
    wanted = trained(layer(rules=()))
    launches.asked.clear()
    launches.failing = {failing}
    model = layer()
    assert model.explain().endswith("3 of 3 ops fused")
    with pytest.warns(UserWarning, match="runs unfused from now on") as told:
        assert_same(trained(model), wanted)
    assert len(told) == 1 and told[0].filename == __file__
    said = str(told[0].message)
    assert "does not compile for sm_90a" in said and "ptxas error: no registers left" in said and "doctor" in said
    assert "line 2" not in said and "grouped_mlp (GroupedLinear 0, ScaledSwiGLU 1, GroupedLinear 2)" in said
    assert launches.asked.count(failing) == 1
    launches.asked.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(trained(model), wanted)
        with torch.no_grad():
            assert torch.equal(model(*inputs()), wanted[0])
    assert not launches.asked
    explained = model.explain()
    assert "grouped_mlp  compile  needs its kernels; " in explained and "no registers left" in explained
    assert explained.endswith("0 of 3 ops fused")
    refusals = model.explain(as_data=True)[0]["refusals"]
    assert [r["rule"] for r in refusals if r["reasons"][0]["stage"] == "compile"] == ["grouped_mlp"]
    assert model.explain("sm_90a", dtype=torch.float16).endswith("3 of 3 ops fused"), "for other calls nothing is known"


def test_without_gradients(launches: Launches) -> None:
    launches.failing = {"act"}
    with torch.no_grad(), pytest.warns(UserWarning, match="no registers left") as told:
        y = layer()(*inputs())
    assert told[0].filename == __file__
    assert torch.equal(y, layer(rules=())(*inputs()).detach())


def test_shortcuts_and_routes_are_forgotten(launches: Launches) -> None:
    """A call of another kind fails after many that ran: from then on those are unfused too."""
    model = layer()
    for _ in range(4):
        model(*inputs()).sum().backward()
    launches.failing = {"act"}
    x, splits, probs, _ = inputs()
    with pytest.warns(UserWarning, match="runs unfused"):
        model(x, splits, probs.bfloat16(), splits)
    launches.asked.clear()
    assert_same(trained(model), trained(layer(rules=())))
    assert not launches.asked


def test_ops_around_the_step_run_once(launches: Launches) -> None:
    """What has run before the kernel failed is kept, what comes after runs as ever; extra outputs too."""
    ran = []

    class Counted(ops.Identity):
        def op_forward(self, ctx: Any, input_: Tensor, **keywords: Any) -> Tensor:
            ran.append(self)
            return input_ * 2

        def op_backward(self, ctx: Any, grad_output: Tensor) -> Any:
            return grad_output * 2, ()

    def chain(tapped: bool, **options: Any) -> ops.Sequential:
        tap = [ops.MakeExtraOutput()] if tapped else []
        return ops.Sequential(Counted(), *tap, *layer(), Counted(), *tap, **options)

    for tapped in (False, True):
        ran.clear()
        launches.failing = {"act"}
        model = chain(tapped)
        arguments = inputs()
        with pytest.warns(UserWarning, match="runs unfused") as told:
            results = model(*arguments)
        assert len(told) == 1 and len(ran) == 2
        other = inputs()
        wanted = chain(tapped, rules=())(*other)
        results, wanted = (results, wanted) if tapped else ((results,), (wanted,))
        for one in (results, wanted):
            sum(t.float().sum() for t in one).backward()
        assert_same([*results, arguments[0].grad], [*wanted, other[0].grad])


def fail(monkeypatch: pytest.MonkeyPatch, name: str, times_before: int = 0) -> list[str]:
    """The entry point `name` has no kernel from its call `times_before` on, and all others compute; its calls."""
    former, called = getattr(kernels, name), []

    def fails(*arguments: Any, **more: Any) -> Any:
        called.append(name)
        if len(called) > times_before:
            raise launch.CompileError(f"{name} does not compile for sm_90a: {CAUSE}")
        return former(*arguments, **more)

    monkeypatch.setattr(kernels, name, fails)
    return called


@pytest.mark.parametrize("recipe", [None, ops.Float8BlockScaling()])
@pytest.mark.parametrize("failing", ["gemm_dact", "wgrad", "gemm_dgrad"])
def test_a_backward_kernel_that_does_not_compile(monkeypatch: pytest.MonkeyPatch, failing: str, recipe: Any) -> None:
    """Its formula takes its place, and nothing is lost; the next call runs unfused."""
    if recipe is not None and failing == "gemm_dgrad":
        pytest.skip("that product is forward's too, in FP8")
    name = f"fp8_grouped_{failing}" if recipe else f"grouped_{failing}"
    with as_if_on("sm_90a"), ops.autocast(enabled=recipe is not None, recipe=recipe):
        wanted, unfused = trained(layer()), trained(layer(rules=()))
        called = fail(monkeypatch, name)
        model = layer()
        with pytest.warns(
            UserWarning, match=rf"grouped_mlp\w* .*backward: {name} .*no registers left; .*doctor"
        ) as told:
            assert_same(trained(model), wanted)
        assert len(told) == 1 and len(called) == (2 if failing == "wgrad" else 1)
        assert "compile  needs its kernels; " in model.explain()
        assert_same(trained(model), unfused)
        assert len(called) == (2 if failing == "wgrad" else 1), "tried again"


def test_what_backward_has_added_is_not_added_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """FC2's weight gradient is in main_grad when the kernel of FC1's turns out to be missing."""

    def summed() -> list[Tensor]:
        model = layer()
        for op in (model[0], model[2]):
            op.accumulate_into_main_grad = True
            for p in op.parameters():
                p.main_grad = torch.ones_like(p, dtype=torch.float32)
        model(*inputs()).float().sum().backward()
        return [p.main_grad for p in model.parameters()]

    with as_if_on("sm_90a"):
        wanted = summed()
        called = fail(monkeypatch, "grouped_wgrad_", times_before=1)
        with pytest.warns(UserWarning, match="backward: grouped_wgrad_ does not compile"):
            assert_same(summed(), wanted)
    assert len(called) == 2


def test_backwards_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several forwards before the first backward: none of them has taken a shortcut, whose backward asks for kernels
    that were never had."""
    with as_if_on("sm_90a"):
        model, wanted = layer(), trained(layer())
        fail(monkeypatch, "grouped_gemm_dact")
        calls = [(given, model(*given)) for given in (inputs() for _ in range(4))]
        for given, y in calls:
            model.zero_grad()
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                y.backward(torch.ones_like(y))
            assert_same([y, given[0].grad, given[2].grad, *[p.grad for p in model.parameters()]], wanted)
            assert [str(one.message) for one in told if "no registers left" in str(one.message)]


def test_backward_of_a_call_with_extra_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    def results() -> list[Tensor]:
        model, given = ops.Sequential(*layer(), ops.MakeExtraOutput()), inputs()
        y, tapped = model(*given)
        (y.float().sum() + 2 * tapped.float().sum()).backward()
        return [y, given[0].grad, *[p.grad for p in model.parameters()]]

    with as_if_on("sm_90a"):
        wanted = results()
        fail(monkeypatch, "grouped_gemm_dact")
        with pytest.warns(UserWarning, match="backward: grouped_gemm_dact does not compile"):
            assert_same(results(), wanted)


def test_every_entry_point_has_a_formula() -> None:
    functions = [
        name
        for name, value in vars(kernels).items()
        if callable(value) and hasattr(torch.ops.fusible_ops, name) and not name.startswith("_")
    ]
    assert len(functions) >= 30
    for name in functions:
        assert kernels.formula(name).__name__ == name


def test_a_dropped_layer_is_free_at_once(launches: Launches) -> None:
    """What is kept for a backward that fails keeps no layer: its memory does not wait for the garbage collector."""
    model = layer()
    for _ in range(4):
        model(*inputs()).sum().backward()
    known = weakref.ref(model.groups()[0])
    gc.collect()
    gc.disable()
    try:
        del model
        assert known() is None
    finally:
        gc.enable()


def test_on_unfused_error_raises(launches: Launches) -> None:
    launches.failing = {"act"}
    model = layer("error")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(launch.CompileError, match="line 2 of a long log"):
            model(*inputs())
        with pytest.raises(RuntimeError, match=r"compile  needs its kernels.*no registers left"):
            model(*inputs())
    launches.failing = {"dact"}
    model = layer("error")
    y = model(*inputs())
    with pytest.raises(launch.CompileError, match="line 2 of a long log"):
        y.backward(torch.ones_like(y))
    with pytest.raises(RuntimeError, match=r"compile  needs its kernels.*no registers left"):
        model(*inputs())


@pytest.fixture
def machinery(launches: Launches, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[pytest.MonkeyPatch]:
    """The real `launch.kernel` over an empty cache directory."""
    monkeypatch.undo()
    monkeypatch.setitem(kernels._HOSTS, "cpu", kernels._HOSTS["cuda"])
    monkeypatch.setattr(launch, "current_stream", lambda device: 7)
    monkeypatch.setattr(target, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(target, "packs", lambda: ())
    launch.forget()
    monkeypatch.setattr(launch, "toolchain", lambda: {"cuda": "none"})
    yield monkeypatch
    monkeypatch.undo()
    launch.forget()


def test_a_compiler_that_fails(machinery: pytest.MonkeyPatch) -> None:
    tried = []

    def fails(module: str, *rest: Any) -> None:
        tried.append(module)
        raise OSError(CAUSE)

    machinery.setattr(launch, "compile_only", fails)
    with pytest.warns(UserWarning, match="rowwise_kernel does not compile for sm_90a .*ptxas error"):
        assert_same(trained(layer()), trained(layer(rules=())))
    assert len(tried) == 1
    with pytest.warns(UserWarning, match="rowwise_kernel does not compile for sm_90a .*ptxas error"):
        layer()(*inputs())
    assert len(tried) == 1, "another container does not try again what failed"


def test_a_toolchain_that_does_not_load(machinery: pytest.MonkeyPatch) -> None:
    """What was compiled does not load; what compiles is not there."""

    def export(spec: Any, key: str, folder: Path) -> list[Path]:
        (folder / f"{key}.so").write_bytes(b"no library")
        return [folder / f"{key}.so"]

    machinery.setattr(launch, "_export", export)
    with pytest.warns(UserWarning, match="rowwise_kernel does not load for sm_90a"):
        assert_same(trained(layer()), trained(layer(rules=())))

    def missing() -> None:
        raise launch.MissingPackageError("compiled kernels need the package x; install it with: pip install x")

    machinery.setattr(launch, "toolchain", missing)
    launch._failures.clear()
    with pytest.warns(UserWarning, match="pip install x"):
        assert_same(trained(layer()), trained(layer(rules=())))


def test_no_compile_raises(machinery: pytest.MonkeyPatch) -> None:
    """It says what is missing; nothing is refused because of it."""
    model = layer()
    for _ in range(2):
        with (
            ops.use_kernels(no_compile=True),
            pytest.raises(ops.CompileForbiddenError, match=r"cache key [0-9a-f]{64}"),
        ):
            model(*inputs())
    assert model.explain().endswith("3 of 3 ops fused")


def test_under_a_recipe(launches: Launches) -> None:
    """The recipe stays, its products unfused; calls without one are fused as before; "auto" chooses it no longer."""
    launches.failing = {"act"}
    model, blocks = layer(), ops.Float8BlockScaling()
    with ops.autocast(recipe=blocks):
        wanted = trained(layer(rules=()))
        with pytest.warns(UserWarning, match="fp8_grouped_gemm_kernel does not compile") as told:
            assert_same(trained(model), wanted)
        assert len(told) == 1
        assert_same(trained(model), wanted)
        assert "compile  needs its kernels" in model.explain()
    assert model.explain().endswith("3 of 3 ops fused")
    assert "recipe auto: none" in model.explain(recipe="auto")
