"""A grouped linear alone on Blackwell, on the CPU: on its functions' reference, and on a double of cuDNN Frontend."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import fusible_ops as ops
from cute_kernels import launch
from cute_kernels import ops as kernels
from cute_kernels.blackwell import frontend, host_functions, mxfp8_reference
from tests import frontend_double
from tests.cases import SMALL_SPLITS, Splits, full
from tests.compare import assert_as_accurate, assert_bitwise_equal
from tests.frontend_double import Operation
from tests.models import as_if_on

TAIL, WIDE = Splits("tail", (96, 0, 130, 74), 512), full("tiles", 255, 257, 0, 300)
MXFP8, NVFP4 = ops.MXFP8BlockScaling(), ops.NVFP4BlockScaling(disable_stochastic_rounding=True)
RECIPES = pytest.mark.parametrize("recipe", [None, MXFP8, NVFP4], ids=["bf16", "mxfp8", "nvfp4"])


@pytest.fixture(autouse=True, params=["reference", "double"])
def functions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """What runs: what the operators do on a CPU, or the adapters, on a double of the package's classes."""
    if request.param == "double":
        monkeypatch.setattr(frontend, "library", lambda: frontend_double)
        monkeypatch.setattr("cute_kernels.blackwell.wgrad.library", lambda: frontend_double)
        monkeypatch.setattr(frontend, "on", lambda device: nullcontext())
        monkeypatch.setattr(Operation, "made", [])
        for prefix, name in itertools.product(("", "mxfp8_", "nvfp4_"), ("gemm", "wgrad", "wgrad_")):
            name = f"padded_{prefix}{name}"
            monkeypatch.setattr(kernels, name, getattr(host_functions(), name))
    launch.forget()
    yield request.param
    launch.forget()


def linear(groups: int, k: int = 64, n: int = 96, **arguments: Any) -> ops.GroupedLinear:
    made = ops.GroupedLinear(groups, k, n, device="cpu", dtype=torch.bfloat16, **arguments)
    with torch.no_grad():
        for p in made.parameters():
            p.copy_(torch.randn(p.shape) * (0.5 if p.dim() == 1 or p.shape[0] == 1 else p.shape[-1] ** -0.5))
    return made


def alone(splits: Splits, **arguments: Any) -> ops.Sequential:
    options = {name: arguments.pop(name) for name in ("sm_margin",) if name in arguments}
    return ops.Sequential({"fc": linear(splits.groups, **arguments)}, on_unfused="error", **options)


def inputs_of(model: ops.Sequential, splits: Splits) -> list[Tensor]:
    """x, the scales of the bias, dy; NaN in the tail."""
    generator = torch.Generator().manual_seed(1)
    k, n = model[0].in_features, model[-1].out_features
    made = [torch.randn(splits.rows, c, generator=generator).bfloat16() for c in (k, n)]
    made.insert(1, torch.rand(splits.rows, generator=generator).bfloat16().float())
    for t in made:
        t[splits.used :] = float("nan")
    return made


def step(
    model: ops.Sequential, splits: Splits, given: list[Tensor], recipe: ops.Recipe | None = None
) -> dict[str, Tensor]:
    """One forward and backward of a model whose grouped linears all take the same splits."""
    model.zero_grad()
    x, scales, dy = given
    x, scales = x.clone().requires_grad_(), scales.clone().requires_grad_()
    extras = []
    for op in model:
        if isinstance(op, ops.GroupedLinear):
            extras += [splits.tensor("cpu"), *([scales] if op.scale_bias else [])]
    with ops.autocast(recipe=recipe) if recipe else nullcontext():
        y = model(x, *extras)
    y.backward(dy)
    results = {"y": y.detach(), "dx": x.grad, "dscales": scales.grad}
    results |= {f"d{name}": p.grad for name, p in model.named_parameters()}
    return {name: t for name, t in results.items() if t is not None}


def fused_step(
    model: ops.Sequential, splits: Splits, given: list[Tensor], recipe: ops.Recipe | None = None
) -> dict[str, Tensor]:
    with as_if_on("sm_100a"):
        return step(model, splits, given, recipe)


def unfused_step(
    model: ops.Sequential, splits: Splits, given: list[Tensor], recipe: ops.Recipe | None = None
) -> dict[str, Tensor]:
    rules, on_unfused = model.rules, model.on_unfused
    model.rules, model.on_unfused = (), "allow"
    results = step(model, splits, given, recipe)
    model.rules, model.on_unfused = rules, on_unfused
    return results


def compare(every: tuple[Splits, ...], recipe: ops.Recipe | None, **arguments: Any) -> None:
    """Fused as accurate as unfused in the same recipe, against FP32 without one; and zero in the tail."""
    results: dict[str, list[list[Tensor]]] = {}
    for splits in every:
        model = alone(splits, **arguments)
        given = inputs_of(model, splits)
        fused, unfused = (run(model, splits, given, recipe) for run in (fused_step, unfused_step))
        exact = unfused_step(copy.deepcopy(model).float(), splits, [t.float() for t in given])
        assert fused.keys() == unfused.keys() == exact.keys()
        for name in fused:
            assert fused[name].shape == unfused[name].shape and fused[name].dtype == unfused[name].dtype, name
            flat = [t[name].flatten().float() for t in (fused, unfused, exact)]
            results.setdefault(name.rstrip("0123456789"), []).append(flat)
        for name in ("y", "dx", "dscales"):
            assert name not in fused or (fused[name][splits.used :] == 0).all(), f"{name} is not zero in the tail"
    for name, pieces in results.items():
        assert_as_accurate(*(torch.cat(same) for same in zip(*pieces, strict=True)), name)


@RECIPES
@pytest.mark.parametrize("bias", ["none", "bias", "scaled"])
def test_fused_equals_unfused(recipe: ops.Recipe | None, bias: str) -> None:
    small = SMALL_SPLITS if recipe is None else ()
    compare((*small, TAIL, WIDE), recipe, bias=bias != "none", scale_bias=bias == "scaled")


@RECIPES
@pytest.mark.parametrize(
    "arguments",
    [{"single_grouped_weight": True}, {"bias": True, "single_grouped_bias": True}, {"transposed_weight": True}],
    ids=lambda arguments: list(arguments)[-1],
)
def test_other_parameters(recipe: ops.Recipe | None, arguments: dict) -> None:
    compare((TAIL,), recipe, **arguments)


def test_other_blocks_of_weights_and_gradients_rounded_at_random() -> None:
    compare((TAIL,), ops.MXFP8BlockScaling(enable_2d_quantization=True))
    compare((TAIL,), ops.NVFP4BlockScaling(disable_2d_quantization=True))


@RECIPES
def test_the_adapters_that_run(recipe: ops.Recipe | None, functions: str) -> None:
    """Two products and a weight gradient, whatever becomes of the bias."""
    if functions != "double":
        return
    model = alone(TAIL, bias=True, scale_bias=True, sm_margin=0)
    fused_step(model, TAIL, inputs_of(model, TAIL), recipe)
    product = "GroupedGemmSm100" if recipe is None else "GroupedGemmQuantSm100"
    made = [type(operation).__name__ for operation in Operation.made for _ in range(operation.calls)]
    assert made == [product, "GroupedGemmWgradSm100", product]


@RECIPES
def test_what_explain_says(recipe: ops.Recipe | None) -> None:
    told = alone(TAIL).explain("sm_100a", recipe=recipe)
    name = f"grouped_linear{'' if recipe is None else '_mxfp8' if recipe is MXFP8 else '_nvfp4'}_sm100"
    assert f"{name}: fc = GroupedLinear fc\n" in told or f"{name}: GroupedLinear fc\n" in told
    assert told.endswith("1 of 1 ops fused")
    for arguments, text in (
        ({"k": 80}, "fc.in_features is 80, needs a multiple of 32; pad the layer's features"),
        ({"n": 80}, "fc.out_features is 80, needs a multiple of 32; pad the layer's features"),
    ):
        assert text in alone(TAIL, **arguments).explain("sm_100a", recipe=recipe)


@RECIPES
def test_frozen_parts_and_inputs(recipe: ops.Recipe | None) -> None:
    """Whatever wants a gradient gets the one that all together get."""
    model = alone(TAIL, bias=True, scale_bias=True)
    given = inputs_of(model, TAIL)
    want, sizes = fused_step(model, TAIL, given, recipe), TAIL.tensor("cpu")
    for trains, x_wants, scales_want in itertools.product((True, False), repeat=3):
        if not (trains or x_wants or scales_want):
            continue
        model.requires_grad_(trains)
        model.zero_grad()
        x, scales = given[0].clone().requires_grad_(x_wants), given[1].clone().requires_grad_(scales_want)
        with as_if_on("sm_100a"), ops.autocast(recipe=recipe) if recipe else nullcontext():
            model(x, sizes, scales).backward(given[2])
        got = {"dx": x.grad, "dscales": scales.grad, **{f"d{n}": p.grad for n, p in model.named_parameters()}}
        for name, grad in got.items():
            if grad is not None:
                assert_bitwise_equal(grad, want[name], name)
        assert (x.grad is not None, scales.grad is not None) == (x_wants, scales_want)
        assert all((p.grad is not None) == trains for p in model.parameters())


@RECIPES
@pytest.mark.parametrize("mode", ["add", "overwrite"])
def test_main_grads(recipe: ops.Recipe | None, mode: str) -> None:
    """Three steps with the same input; an expert without tokens stays as it was, or becomes zero."""
    model, plain = alone(TAIL, bias=False, accumulate_into_main_grad=True), alone(TAIL, bias=False)
    plain.load_state_dict(model.state_dict())
    given = inputs_of(model, TAIL)
    for w in model.parameters():
        w.main_grad = torch.full(w.shape, 3.0)
        w.overwrite_main_grad, w.grad_added_to_main_grad = mode == "overwrite", False
    for _ in range(3):
        fused_step(model, TAIL, given, recipe)
    want = unfused_step(plain, TAIL, given, recipe)
    exact = unfused_step(copy.deepcopy(plain).float(), TAIL, [t.float() for t in given])
    for name, w in model.named_parameters():
        base, times = (3.0, 3) if mode == "add" else (0.0, 1)
        assert w.grad_added_to_main_grad is True
        if name.endswith("1"):
            assert (w.main_grad == base).all(), name
        else:
            assert_as_accurate((w.main_grad - base) / times, want[f"d{name}"].float(), exact[f"d{name}"], name)


@RECIPES
def test_a_gradient_that_waits(recipe: ops.Recipe | None) -> None:
    model, direct = alone(TAIL, delay_wgrad_compute=True), alone(TAIL)
    direct.load_state_dict(model.state_dict())
    given = inputs_of(model, TAIL)
    assert not any(name.startswith("dfc.weight") for name in fused_step(model, TAIL, given, recipe))
    model[0].backward_dw()
    want = fused_step(direct, TAIL, given, recipe)
    for name, p in model.named_parameters():
        assert_bitwise_equal(p.grad, want[f"d{name}"], name)


@RECIPES
@pytest.mark.parametrize("rows", [0, 256])
def test_a_rank_without_tokens(recipe: ops.Recipe | None, rows: int) -> None:
    splits = Splits("cold", (0, 0, 0, 0), rows)
    model = alone(splits, bias=True, scale_bias=True)
    results = fused_step(model, splits, inputs_of(model, splits), recipe)
    assert results["y"].shape == (rows, 96) and all((t == 0).all() for t in results.values())


@RECIPES
def test_garbage_in_the_tail_never_leaks(recipe: ops.Recipe | None) -> None:
    """The same bits as in a buffer that fits."""
    short = Splits("short", TAIL.sizes, TAIL.used)
    model = alone(TAIL, bias=True, scale_bias=True)
    given = inputs_of(model, TAIL)
    got = fused_step(model, TAIL, given, recipe)
    for name, value in fused_step(model, short, [t[: short.rows].clone() for t in given], recipe).items():
        rows = slice(0, short.rows) if name in ("y", "dx", "dscales") else slice(None)
        assert_bitwise_equal(got[name][rows], value, name)


@RECIPES
def test_leading_dimensions_and_fp32_weights(recipe: ops.Recipe | None) -> None:
    splits = Splits("rows", (4, 0, 9), 20)
    model = alone(splits).float()
    x, sizes, results = torch.randn(2, 10, 64), splits.tensor("cpu"), []
    for arch, dtype in (("sm_100a", torch.bfloat16), ("cpu", torch.bfloat16), ("cpu", torch.float32)):
        model.on_unfused = "error" if arch != "cpu" else "allow"
        model.zero_grad()
        leaf = x.clone().requires_grad_()
        active = ops.autocast(recipe=recipe) if recipe and dtype != torch.float32 else nullcontext()
        with as_if_on(arch), torch.autocast("cpu", dtype, enabled=dtype != torch.float32), active:
            y = model(leaf, sizes)
        y.sum().backward()
        assert y.shape == (2, 10, 96) and y.dtype == dtype
        results.append([y.detach().float(), leaf.grad, *(p.grad for p in model.parameters())])
    for i, (fused, unfused, exact) in enumerate(zip(*results, strict=True)):
        assert fused.dtype == torch.float32
        if i != 3:  # an expert without tokens
            assert_as_accurate(fused, unfused, exact)
        else:
            assert not fused.any() and not unfused.any()


@pytest.mark.parametrize("recipe", [MXFP8, NVFP4], ids=["mxfp8", "nvfp4"])
@pytest.mark.parametrize("frozen", [None, "weight", "bias", "x"])
def test_dense(recipe: ops.Recipe, frozen: str | None) -> None:
    """One group that holds every row, whatever is frozen; 3-D in, 3-D out. In BF16 it is PyTorch's."""
    made = ops.Linear(64, 96, bias=True, device="cpu", dtype=torch.bfloat16)
    if frozen in ("weight", "bias"):
        getattr(made, frozen).requires_grad_(False)
    model = ops.Sequential(made, on_unfused="error")
    assert model.explain("sm_100a").endswith("0 of 1 ops fused")
    assert model.explain("sm_100a", recipe=recipe).splitlines()[1].startswith("linear_")
    x, dy, results = torch.randn(2, 65, 64).bfloat16(), torch.randn(2, 65, 96).bfloat16(), []
    for arch, dtype in (("sm_100a", torch.bfloat16), ("cpu", torch.bfloat16), ("cpu", torch.float32)):
        model.to(dtype)
        model.on_unfused = "error" if arch != "cpu" else "allow"
        model.zero_grad()
        leaf = x.clone().to(dtype).requires_grad_(frozen != "x")
        with as_if_on(arch), ops.autocast(recipe=recipe) if dtype != torch.float32 else nullcontext():
            y = model(leaf)
        y.backward(dy.to(dtype))
        assert y.shape == dy.shape
        found = {"y": y.detach(), "dx": leaf.grad, "dw": made.weight.grad, "db": made.bias.grad}
        results.append({name: t for name, t in found.items() if t is not None})
    assert results[0].keys() == results[1].keys() == results[2].keys() and len(results[0]) == 3 + (frozen is None)
    for name, value in results[0].items():
        assert_as_accurate(value, results[1][name], results[2][name], name)


def test_a_margin(functions: str) -> None:
    """It reaches every kernel; with weight gradients from MXFP8 or NVFP4, which have none, forward refuses it."""
    if functions != "double":
        return
    model = alone(TAIL, sm_margin=16)
    given = inputs_of(model, TAIL)
    fused_step(model, TAIL, given)
    assert [operation.margin for operation in Operation.made] == ["8"] * 3
    for recipe, name in ((MXFP8, "mxfp8"), (NVFP4, "nvfp4")):
        text = f"sm_margin is 16, needs 0: cuDNN Frontend's weight gradient from {name}"
        Operation.made.clear()
        with pytest.raises(ValueError, match=text) as raised:
            fused_step(model, TAIL, given, recipe)
        assert not Operation.made
        told = model.explain("sm_100a", recipe=recipe)
        assert told.startswith(f"raises in a call that records gradients: {raised.value}\n")
        both = ops.Sequential(model[0], linear(TAIL.groups, 96, 64), sm_margin=16).explain("sm_100a", recipe=recipe)
        assert both.count("raises in") == 1, "once for all ops"
        assert "raises" not in model.explain("sm_100a") + model.explain("sm_90a", recipe=recipe)
        model.requires_grad_(False)
        assert "raises" not in model.explain("sm_100a", recipe=recipe)
        model.requires_grad_(True)


# ----------------------------------------------------------------------------------------------------------------------
# Neighbours


def test_a_quantize_without_a_recipe_is_taken_too() -> None:
    model = ops.Sequential(linear(4), ops.Quantize(), on_unfused="error")
    assert "2 of 2 ops fused" in model.explain("sm_100a")
    given, sizes = inputs_of(model[:1], TAIL), TAIL.tensor("cpu")
    want = fused_step(model[:1], TAIL, given)
    x = given[0].clone().requires_grad_()
    with as_if_on("sm_100a"):
        y = model(x, sizes)
    y.backward(given[2])
    assert_bitwise_equal(y.detach(), want["y"], "y")
    assert_bitwise_equal(x.grad, want["dx"], "dx")


@pytest.mark.parametrize("backward", [False, True])
def test_an_input_that_is_quantised_runs_as_unfused(backward: bool) -> None:
    """Both of its copies are taken as they are; so no bit differs, also where a copy of a copy would be another one."""
    model = ops.Sequential(ops.Quantize(forward=True, backward=backward), linear(4, bias=True))
    given = inputs_of(model[1:], TAIL)
    given[0] *= torch.exp2(torch.randint(-14, 1, given[0].shape)).bfloat16()
    fused, unfused = fused_step(model, TAIL, given, MXFP8), unfused_step(model, TAIL, given, MXFP8)
    for name, value in unfused.items():
        assert_bitwise_equal(fused[name], value, name)


@pytest.mark.parametrize("activation", [ops.ReLU, ops.GELU])
def test_an_activation_between_two_is_quantised_from_fp32(activation: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the second linear quantises, and what the first does of the gradient, are the bytes of the unfused chain."""
    model = ops.Sequential(linear(4), activation(), linear(4, 96, 64))
    given = inputs_of(model, TAIL)
    seen, original = [], mxfp8_reference.quantize_rows

    def watched(t: Tensor, *more: Any) -> Any:
        seen.append(t.dtype)
        return original(t, *more)

    monkeypatch.setattr(mxfp8_reference, "quantize_rows", watched)
    fused = fused_step(model, TAIL, given, MXFP8)
    unfused = unfused_step(model, TAIL, given, MXFP8)
    exact = unfused_step(copy.deepcopy(model).float(), TAIL, [t.float() for t in given])
    assert seen.count(torch.float32) == 4 and len(seen) == 8
    for name, value in fused.items():
        if not name.endswith("weight1"):  # an expert without tokens
            assert_as_accurate(value, unfused[name], exact[name], name)


def test_in_a_graph_of_torch_compile(functions: str) -> None:
    """Whole, for any number of rows, with eager's bits."""
    if functions == "double":  # a graph holds operators
        return
    torch._dynamo.reset()
    model = alone(TAIL, bias=True, scale_bias=True)
    with as_if_on("sm_100a"):
        compiled = torch.compile(copy.deepcopy(model), backend="aot_eager", fullgraph=True)
        for rows in (512, 600):
            splits = Splits("rows", TAIL.sizes, rows)
            given, sizes = inputs_of(model, splits), splits.tensor("cpu")
            want = fused_step(model, splits, given)
            x = given[0].clone().requires_grad_()
            y = compiled(x, sizes, given[1])
            y.backward(given[2])
            assert_bitwise_equal(y.detach(), want["y"], "y")
            assert_bitwise_equal(x.grad, want["dx"], "dx")
