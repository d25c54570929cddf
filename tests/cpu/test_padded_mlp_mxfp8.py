"""The fused MXFP8 MLP of Blackwell on the CPU: on its functions' reference, and on a double of cuDNN Frontend."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

import fusible_ops as ops
from cute_kernels import launch
from cute_kernels import ops as kernels
from cute_kernels.blackwell import frontend, padded_mxfp8
from cute_kernels.quantization.formats import Format
from cute_kernels.quantization.quantize import Quantized
from fusible_ops.fused import padded_mxfp8_parts as module
from tests import frontend_double
from tests.cases import Splits, full
from tests.compare import assert_as_accurate, assert_bitwise_equal
from tests.frontend_double import Operation
from tests.models import MLP, Inputs, as_if_on, step

FUNCTIONS = [f"padded_mxfp8_{name}" for name in ("gemm", "gemm_act", "gemm_dact", "wgrad", "wgrad_")]
TAIL, WIDE = Splits("tail", (96, 0, 130, 74), 512), full("tiles", 255, 257, 0, 300)
RECIPES = [ops.MXFP8BlockScaling(), ops.MXFP8BlockScaling(enable_2d_quantization=True)]


@pytest.fixture(autouse=True, params=["reference", "double"])
def functions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """What runs: what the operators do on a CPU, or the adapters, on a double of the package's classes."""
    if request.param == "double":
        monkeypatch.setattr(frontend, "library", lambda: frontend_double)
        monkeypatch.setattr("cute_kernels.blackwell.wgrad.library", lambda: frontend_double)
        monkeypatch.setattr(frontend, "on", lambda device: nullcontext())
        monkeypatch.setattr(Operation, "made", [])
        for name in FUNCTIONS:
            monkeypatch.setattr(kernels, name, getattr(padded_mxfp8, name))
    launch.forget()
    yield request.param
    launch.forget()


def build(mlp: MLP, splits: Splits, **sequential: object) -> ops.Sequential:
    model = mlp.build(splits, "cpu", torch.bfloat16, on_unfused="error", **sequential)
    return model if mlp.interleave else model.pack_glu_weights_()


def fused_step(model: ops.Sequential, mlp: MLP, inputs: Inputs, recipe: ops.Recipe = RECIPES[0]) -> dict[str, Tensor]:
    with as_if_on("sm_100a"), ops.autocast(recipe=recipe):
        return step(model, mlp, inputs)


def unfused_step(model: ops.Sequential, mlp: MLP, inputs: Inputs, recipe: ops.Recipe) -> dict[str, Tensor]:
    model.rules, model.on_unfused = (), "allow"
    with ops.autocast(recipe=recipe):
        return step(model, mlp, inputs)


def compare(mlp: MLP, every: tuple[Splits, ...], recipe: ops.Recipe = RECIPES[0]) -> None:
    """Fused as accurate as unfused in the same recipe, against FP32 without one; and zero in the tail."""
    results: dict[str, list[list[Tensor]]] = {}
    for splits in every:
        model = build(mlp, splits)
        inputs = Inputs.random(splits, mlp.hidden, "cpu", torch.bfloat16)
        fused = fused_step(model, mlp, inputs, recipe)
        unfused = unfused_step(model, mlp, inputs, recipe)
        exact = step(copy.deepcopy(model).float(), mlp, inputs.to(torch.float32))
        assert fused.keys() == unfused.keys() == exact.keys()
        for name in fused:
            assert fused[name].shape == unfused[name].shape and fused[name].dtype == unfused[name].dtype, name
            flat = [t[name].flatten().float() for t in (fused, unfused, exact)]
            results.setdefault(name.split(".")[0] + name.split(".")[-1][:4], []).append(flat)
        for name in ("y", "dx", "dprobs"):
            assert name not in fused or (fused[name][splits.used :] == 0).all(), f"{name} is not zero in the tail"
    for name, pieces in results.items():
        assert_as_accurate(*(torch.cat(same) for same in zip(*pieces, strict=True)), name)


@pytest.mark.parametrize("activation", ["swiglu", "scaled_swiglu", "clamped_swiglu", "scaled_clamped"])
@pytest.mark.parametrize("bias", [False, True])
def test_fused_equals_unfused(activation: str, bias: bool) -> None:
    compare(MLP(activation, 160, 96, bias=bias, scale_bias=bias, interleave=32), (TAIL, WIDE))


def test_square_blocks_of_weights() -> None:
    compare(MLP("scaled_swiglu", 64, 96), (TAIL,), RECIPES[1])


@pytest.mark.parametrize(
    "linear", [{"single_grouped_weight": True}, {"single_grouped_bias": True}], ids=lambda linear: next(iter(linear))
)
def test_other_parameters(linear: dict) -> None:
    compare(MLP("scaled_swiglu", 64, 32, bias=True, linear=linear), (TAIL,))


def test_the_adapters_that_run(functions: str) -> None:
    """Six calls of four classes; with a bias of FC1 a product in place of the GLU's gradient."""
    if functions != "double":
        return
    for bias, dact in ((False, "GroupedGemmDgluSm100"), (True, "GroupedGemmQuantSm100")):
        launch.forget()
        Operation.made.clear()
        mlp = MLP("scaled_swiglu", 64, 96, bias=bias, interleave=32)
        fused_step(build(mlp, TAIL), mlp, Inputs.random(TAIL, 64, "cpu", torch.bfloat16))
        made = [type(operation).__name__ for operation in Operation.made for _ in range(operation.calls)]
        gemm, wgrad = "GroupedGemmQuantSm100", "GroupedGemmWgradSm100"
        assert sorted(made) == sorted(["GroupedGemmGluSm100", gemm, dact, gemm, wgrad, wgrad])


def test_weights_are_quantised_once_per_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """And column-wise for backward alone."""
    made: list[bool] = []
    original = module.quantize

    def watched(t: Tensor, format: Format, columnwise: bool) -> Quantized:
        made.append(columnwise)
        return original(t, format, columnwise)

    monkeypatch.setattr(module, "quantize", watched)
    mlp = MLP("scaled_swiglu", 64, 32)
    model, inputs = build(mlp, TAIL), Inputs.random(TAIL, 64, "cpu", torch.bfloat16)
    first = fused_step(model, mlp, inputs)
    assert made == [False, True] * 2
    again = fused_step(model, mlp, inputs)
    assert len(made) == 4
    assert all(torch.equal(first[name], again[name]) for name in ("y", "dx"))
    with torch.no_grad():
        model[0].weight0.mul_(2)
    assert not torch.equal(fused_step(model, mlp, inputs)["y"], first["y"]) and len(made) == 6
    made.clear()
    with torch.no_grad(), as_if_on("sm_100a"), ops.autocast(recipe=RECIPES[0]):
        model(inputs.x, *mlp.extras(TAIL.tensor("cpu"), inputs.probs))
    assert made == [False] * 2


@pytest.mark.parametrize("recipe", RECIPES, ids=["1x32", "32x32"])
def test_weights_held_in_mxfp8_are_taken_as_they_are(recipe: ops.Recipe) -> None:
    """The bits of a model that quantises the same weights; held in the other blocks, the values are quantised anew."""
    mlp = MLP("scaled_swiglu", 64, 32, interleave=32)
    inputs = Inputs.random(TAIL, 64, "cpu", torch.bfloat16)
    model = build(mlp, TAIL)
    with ops.quantized_model_init(recipe=recipe):
        held = build(mlp, TAIL)
    with torch.no_grad():
        for mine, theirs in zip(held.parameters(), model.parameters(), strict=True):
            mine.copy_(theirs)
    want, got = fused_step(model, mlp, inputs, recipe), fused_step(held, mlp, inputs, recipe)
    for name, value in want.items():
        assert_bitwise_equal(got[name], value, name)
    (other,) = (r for r in RECIPES if r != recipe)
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), held.parameters(), strict=True):
            mine.copy_(theirs.dequantize())
    want, got = fused_step(model, mlp, inputs, other), fused_step(held, mlp, inputs, other)
    for name, value in want.items():
        assert_bitwise_equal(got[name], value, name)


def test_fp32_weights_under_autocast_get_gradients_in_fp32() -> None:
    mlp = MLP("scaled_swiglu", 160, 96, bias=True, interleave=32)
    model, inputs = build(mlp, TAIL).float(), Inputs.random(TAIL, 160, "cpu", torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        fused = fused_step(model, mlp, inputs)
        unfused = unfused_step(model, mlp, inputs, RECIPES[0])
    exact = step(copy.deepcopy(model), mlp, inputs)
    for name, value in fused.items():
        assert value.dtype == unfused[name].dtype, name
        if not name.endswith("1"):  # an expert without tokens
            assert_as_accurate(value.float(), unfused[name].float(), exact[name], name)


def test_weights_stored_by_column_saved_tensors_in_host_memory_and_gradients_that_wait() -> None:
    """The bits of a layer without any of them."""
    mlp, inputs = MLP("scaled_swiglu", 64, 96, interleave=32), Inputs.random(TAIL, 64, "cpu", torch.bfloat16)
    model = build(mlp, TAIL)
    want = fused_step(model, mlp, inputs)
    common = {"bias": False, "device": "cpu", "dtype": torch.bfloat16, "delay_wgrad_compute": True}
    fc1 = ops.GroupedLinear(4, 64, 192, **common)
    fc2 = ops.GroupedLinear(4, 96, 64, transposed_weight=True, **common)
    other = ops.Sequential({"fc1": fc1, "act": ops.ScaledSwiGLU(glu_interleave_size=32), "fc2": fc2})
    other.on_unfused = "error"
    with torch.no_grad():
        for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
            mine.copy_(theirs if mine.shape == theirs.shape else theirs.mT)
    for op in other:
        op.offload_saved()
    got = fused_step(other, mlp, inputs)
    for linear in (fc1, fc2):
        linear.backward_dw()
    got |= {f"d{name}": p.grad.mT if "fc2" in name else p.grad for name, p in other.named_parameters()}
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert_bitwise_equal(got[name].contiguous(), value, name)


@pytest.mark.parametrize("mode", ["add", "overwrite"])
@pytest.mark.parametrize("separate", [False, True])
def test_main_grads(mode: str, separate: bool) -> None:
    """Three steps with the same input; an expert without tokens stays as it was, or becomes zero."""
    mlp = MLP("scaled_swiglu", 64, 32, linear={"accumulate_into_main_grad": True})
    model, plain = build(mlp, TAIL), build(MLP("scaled_swiglu", 64, 32), TAIL)
    plain.load_state_dict(model.state_dict())
    inputs = Inputs.random(TAIL, mlp.hidden, "cpu", torch.bfloat16)
    for linear in (model[0], model[2]):
        weights = linear.weight_parameters()
        whole = torch.full((len(weights), *weights[0].shape), 3.0)
        for w, part in zip(weights, whole.unbind(0), strict=True):
            w.main_grad = part.clone() if separate else part
            w.overwrite_main_grad, w.grad_added_to_main_grad = mode == "overwrite", False
    for _ in range(3):
        fused_step(model, mlp, inputs)
    want = unfused_step(plain, mlp, inputs, RECIPES[0])
    exact = step(copy.deepcopy(plain).float(), mlp, inputs.to(torch.float32))
    for name, w in model.named_parameters():
        base, times = (3.0, 3) if mode == "add" else (0.0, 1)
        assert w.grad_added_to_main_grad is True
        if name.endswith("1"):
            assert (w.main_grad == base).all(), name
        else:
            assert_as_accurate((w.main_grad - base) / times, want[f"d{name}"].float(), exact[f"d{name}"], name)


def test_frozen_parts_and_inputs() -> None:
    """Whatever wants a gradient gets the one that all together get."""
    mlp = MLP("scaled_swiglu", 32, 32)
    inputs, sizes = Inputs.random(TAIL, mlp.hidden, "cpu", torch.bfloat16), TAIL.tensor("cpu")
    model = build(mlp, TAIL)
    want = fused_step(model, mlp, inputs)
    for first, second, x_wants, probs_want in itertools.product((True, False), repeat=4):
        if not (first or second or x_wants or probs_want):
            continue
        for linear, wants in ((model[0], first), (model[2], second)):
            linear.requires_grad_(wants)
        model.zero_grad()
        x, probs = inputs.x.clone().requires_grad_(x_wants), inputs.probs.clone().requires_grad_(probs_want)
        with as_if_on("sm_100a"), ops.autocast(recipe=RECIPES[0]):
            model(x, sizes, probs, sizes).backward(inputs.dy)
        got = {"dx": x.grad, "dprobs": probs.grad, **{f"d{n}": p.grad for n, p in model.named_parameters()}}
        for name, grad in got.items():
            if grad is not None:
                assert_bitwise_equal(grad, want[name], name)
        assert (x.grad is not None) == x_wants and (probs.grad is not None) == probs_want
        assert all((p.grad is not None) == first for p in model[0].parameters())
        assert all((p.grad is not None) == second for p in model[2].parameters())


def test_two_linears_with_different_splits_run_as_unfused() -> None:
    mlp = MLP("scaled_swiglu", 32, 32)
    model = build(mlp, Splits("rows", (4, 0, 9), 20))
    inputs = Inputs.random(Splits("rows", (4, 0, 9), 20), 32, "cpu", torch.bfloat16)
    results = []
    for arch in ("sm_100a", "cpu"):
        model.on_unfused = "error" if arch != "cpu" else "allow"
        model.zero_grad()
        x = inputs.x.clone().requires_grad_()
        with as_if_on(arch), ops.autocast(recipe=RECIPES[0]):
            y = model(x, torch.tensor([4, 0, 9]), inputs.probs, torch.tensor([6, 7, 1]))
        y.backward(torch.ones_like(y))
        results.append([y.detach(), x.grad, *(p.grad for p in model.parameters())])
    for fused, unfused in zip(*results, strict=True):
        assert_bitwise_equal(fused, unfused)


def test_a_margin_reaches_all_but_weight_gradients_which_refuse_it(functions: str) -> None:
    if functions != "double":
        return
    mlp = MLP("scaled_swiglu", 64, 32)
    model, inputs = build(mlp, TAIL, sm_margin=16), Inputs.random(TAIL, 64, "cpu", torch.bfloat16)
    with pytest.raises(ValueError, match="sm_margin is 16, needs 0: cuDNN Frontend's weight gradient from mxfp8"):
        fused_step(model, mlp, inputs)
    assert {operation.margin for operation in Operation.made} == {"8"}
    model.requires_grad_(False)
    assert "dx" in fused_step(model, mlp, inputs)


@pytest.mark.parametrize("rows", [0, 256])
def test_a_rank_without_tokens(rows: int) -> None:
    splits = Splits("cold", (0, 0, 0, 0), rows)
    mlp = MLP("scaled_swiglu", 64, 32, bias=True, scale_bias=True)
    results = fused_step(build(mlp, splits), mlp, Inputs.random(splits, 64, "cpu", torch.bfloat16))
    assert results["y"].shape == (rows, 64)
    for name, t in results.items():
        assert (t == 0).all(), name


def test_explain_before_and_after_packing() -> None:
    model = MLP("scaled_swiglu", 64, 32).build(TAIL, "cpu", torch.bfloat16)
    told = model.explain(target="sm_100a", recipe=RECIPES[0])
    assert "act.glu_interleave_size is None, needs 32; pack_glu_weights_(interleave=32) does it\n" in told
    told = model.pack_glu_weights_(interleave=32).explain(target="sm_100a", recipe=RECIPES[0])
    assert "grouped_mlp_mxfp8_sm100: GroupedLinear fc1, ScaledSwiGLU act, GroupedLinear fc2" in told
    assert "cudnn_wgrad_mxfp8" in told and "3 of 3 ops fused" in told


def test_hybrid_and_other_widths_are_declined_by_name() -> None:
    model = MLP("scaled_swiglu", 64, 32, interleave=32).build(TAIL, "cpu", torch.bfloat16)
    told = model.explain(target="sm_100a", recipe=ops.MXFP8BlockScaling(fp8_format=ops.Format.HYBRID))
    assert "the recipe's backward format is MXFP8 E5M2 1x32, needs MXFP8 E4M3 1x32\n" in told
    narrow = MLP("scaled_swiglu", 48, 32, interleave=32).build(TAIL, "cpu", torch.bfloat16)
    told = narrow.explain(target="sm_100a", recipe=RECIPES[0])
    assert "fc1.in_features is 48, needs a multiple of 32; pad the layer's features\n" in told
