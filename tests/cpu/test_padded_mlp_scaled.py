"""The fused MLPs of Blackwell in MXFP8 and NVFP4 on the CPU: on their functions' reference, and on a double of cuDNN
Frontend.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fusible_ops as ops
from cute_kernels import launch
from cute_kernels import ops as kernels
from cute_kernels.blackwell import frontend, host_functions
from cute_kernels.quantization.formats import Format
from cute_kernels.quantization.quantize import Quantized
from fusible_ops.fused import padded_scaled_parts as module
from tests import frontend_double
from tests.cases import Splits, full
from tests.compare import assert_as_accurate, assert_bitwise_equal, relative_error
from tests.frontend_double import Operation
from tests.models import MLP, Inputs, as_if_on, step

FUNCTIONS = [name for name in vars(host_functions()) if name.startswith(("padded_mxfp8", "padded_nvfp4"))]
TAIL, WIDE = Splits("tail", (96, 0, 130, 74), 512), full("tiles", 255, 257, 0, 300)
MXFP8, MXFP8_SQUARE = ops.MXFP8BlockScaling(), ops.MXFP8BlockScaling(enable_2d_quantization=True)
RANDOM, NVFP4 = ops.NVFP4BlockScaling(), ops.NVFP4BlockScaling(disable_stochastic_rounding=True)
NVFP4_LINES = ops.NVFP4BlockScaling(disable_stochastic_rounding=True, disable_2d_quantization=True)
NVFP4_STRAIGHT = ops.NVFP4BlockScaling(disable_stochastic_rounding=True, disable_rht=True)
each_format = pytest.mark.parametrize("recipe", [MXFP8, NVFP4], ids=["mxfp8", "nvfp4"])


@pytest.fixture(autouse=True, params=["reference", "double"])
def functions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """What runs: what the operators do on a CPU, or the adapters, on a double of the package's classes."""
    if request.param == "double":
        monkeypatch.setattr(frontend, "library", lambda: frontend_double)
        monkeypatch.setattr("cute_kernels.blackwell.wgrad.library", lambda: frontend_double)
        monkeypatch.setattr(frontend, "on", lambda device: nullcontext())
        monkeypatch.setattr(Operation, "made", [])
        for name in FUNCTIONS:
            monkeypatch.setattr(kernels, name, getattr(host_functions(), name))
    launch.forget()
    yield request.param
    launch.forget()


def build(mlp: MLP, splits: Splits, **sequential: object) -> ops.Sequential:
    model = mlp.build(splits, "cpu", torch.bfloat16, on_unfused="error", **sequential)
    return model if mlp.interleave or not mlp.gated else model.pack_glu_weights_()


def fused_step(model: ops.Sequential, mlp: MLP, inputs: Inputs, recipe: ops.Recipe) -> dict[str, Tensor]:
    with as_if_on("sm_100a"), ops.autocast(recipe=recipe):
        return step(model, mlp, inputs)


def unfused_step(model: ops.Sequential, mlp: MLP, inputs: Inputs, recipe: ops.Recipe) -> dict[str, Tensor]:
    model.rules, model.on_unfused = (), "allow"
    with ops.autocast(recipe=recipe):
        return step(model, mlp, inputs)


def compare(mlp: MLP, every: tuple[Splits, ...], recipe: ops.Recipe, exact_recipe: ops.Recipe | None = None) -> None:
    """Fused as accurate as unfused in the same recipe, against FP32 in `exact_recipe`; and zero in the tail.

    Against FP32 in the same recipe only those values count that round to another side: whatever is quantised another
    way, from other blocks say, fails.
    """
    results: dict[str, list[list[Tensor]]] = {}
    for splits in every:
        model = build(mlp, splits)
        inputs = Inputs.random(splits, mlp.hidden, "cpu", torch.bfloat16)
        fused = fused_step(model, mlp, inputs, recipe)
        unfused = unfused_step(model, mlp, inputs, recipe)
        with ops.autocast(enabled=exact_recipe is not None, recipe=exact_recipe):
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


ACTIVATIONS = ["swiglu", "scaled_swiglu", "clamped_swiglu", "scaled_clamped", "srelu", "scaled_srelu"]


@pytest.mark.parametrize("activation", ["scaled_swiglu", "clamped_swiglu", "scaled_srelu", "scaled_tanh_srelu"])
@pytest.mark.parametrize("recipe", [MXFP8, RANDOM], ids=["mxfp8", "nvfp4"])
def test_fused_equals_unfused(activation: str, recipe: ops.Recipe) -> None:
    compare(MLP(activation, 160, 96, bias=True, scale_bias=True, interleave=32), (TAIL, WIDE), recipe)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [False, True])
@each_format
def test_what_is_quantised_is_what_unfused_is(activation: str, bias: bool, recipe: ops.Recipe) -> None:
    every = (TAIL, WIDE) if bias else (TAIL,)
    compare(MLP(activation, 160, 96, bias=bias, scale_bias=bias, interleave=32), every, recipe, recipe)


@pytest.mark.parametrize("activation", ["scaled_swiglu", "scaled_srelu"])
@pytest.mark.parametrize("recipe", [MXFP8_SQUARE, NVFP4_LINES, NVFP4_STRAIGHT], ids=["32x32", "1x16", "not rotated"])
def test_other_blocks_and_no_rotation(recipe: ops.Recipe, activation: str) -> None:
    compare(MLP(activation, 64, 96), (TAIL,), recipe, recipe)


@pytest.mark.parametrize("activation", ["swiglu", "scaled_swiglu", "srelu"])
@each_format
def test_padding_joins_no_block_and_no_maximum(activation: str, recipe: ops.Recipe) -> None:
    """Of a row of nothing but the bias the activation is far larger here than that of any token."""
    mlp, splits = MLP(activation, 64, 32, bias=True, interleave=32), full("few", 5, 0, 9, 3)
    model, inputs = build(mlp, splits), Inputs.random(splits, 64, "cpu", torch.bfloat16)
    inputs.x[:, 0] = 1
    with torch.no_grad():
        for g in range(splits.groups):
            getattr(model[0], f"bias{g}").fill_(960)
            getattr(model[0], f"weight{g}")[:, 0] = -960
    fused, unfused = (run(model, mlp, inputs, recipe) for run in (fused_step, unfused_step))
    with ops.autocast(recipe=recipe):
        exact = step(copy.deepcopy(model).float(), mlp, inputs.to(torch.float32))
    for name in ("y", "dfc2.weight0", "dfc2.weight2", "dfc2.weight3"):
        assert_as_accurate(fused[name], unfused[name], exact[name], name)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", [ops.SwiGLU, ops.SReLU], ids=lambda a: a.__name__)
@each_format
def test_dense(activation: Callable, bias: bool, recipe: ops.Recipe) -> None:
    """One group that holds every row; 3-D in, 3-D out."""
    common = {"bias": bias, "device": "cpu", "dtype": torch.bfloat16}
    width = 128 if activation is ops.SwiGLU else 64
    model = ops.Sequential(ops.Linear(96, width, **common), activation(), ops.Linear(64, 96, **common))
    if activation is ops.SwiGLU:
        model.pack_glu_weights_()
    x, dy, results = torch.randn(2, 65, 96).bfloat16(), torch.randn(2, 65, 96).bfloat16(), []
    for arch, dtype in (("sm_100a", torch.bfloat16), ("cpu", torch.bfloat16), ("cpu", torch.float32)):
        model.to(dtype)
        model.forget_plans()
        model.zero_grad()
        model.on_unfused = "error" if arch == "sm_100a" else "allow"
        leaf = x.clone().to(dtype).requires_grad_()
        with as_if_on(arch), ops.autocast(recipe=recipe):
            y = model(leaf)
        y.backward(dy.to(dtype))
        assert y.shape == x.shape == leaf.grad.shape
        results.append([y.detach(), leaf.grad, *(p.grad for p in model.parameters())])
    for fused, unfused, exact in zip(*results, strict=True):
        assert_as_accurate(fused, unfused, exact.float())


@pytest.mark.parametrize(
    "linear", [{"single_grouped_weight": True}, {"single_grouped_bias": True}], ids=lambda linear: next(iter(linear))
)
@each_format
def test_other_parameters(linear: dict, recipe: ops.Recipe) -> None:
    compare(MLP("scaled_swiglu", 64, 32, bias=True, linear=linear), (TAIL,), recipe)


@pytest.mark.parametrize(
    ("activation", "bias", "recipe", "forward", "backward"),
    [
        ("scaled_swiglu", False, MXFP8, "Glu", "Dglu"),
        ("scaled_swiglu", True, MXFP8, "Glu", "Quant"),  # a bias gradient is summed outside
        ("scaled_srelu", False, MXFP8, "Srelu", "Dsrelu"),
        ("scaled_swiglu", True, NVFP4, "GluHadamard", "Dglu"),
        ("scaled_clamped", False, NVFP4, "Glu", "Dglu"),  # another clamp
        ("scaled_srelu", True, NVFP4, "Srelu", "Dsrelu"),
    ],
)
def test_the_adapters_that_run(
    functions: str, activation: str, bias: bool, recipe: ops.Recipe, forward: str, backward: str
) -> None:
    """Six calls."""
    if functions != "double":
        return
    mlp = MLP(activation, 64, 96, bias=bias, interleave=32)
    fused_step(build(mlp, TAIL), mlp, Inputs.random(TAIL, 64, "cpu", torch.bfloat16), recipe)
    made = [type(operation).__name__ for operation in Operation.made for _ in range(operation.calls)]
    wanted = [forward, "Quant", backward, "Quant", "Wgrad", "Wgrad"]
    assert sorted(made) == sorted(f"GroupedGemm{name}Sm100" for name in wanted)


def test_gradients_are_rounded_at_random_right_in_the_mean_and_again_alike() -> None:
    """The same bits from the same generator, others from another; the mean of n steps is closer than a step is."""
    mlp = MLP("scaled_swiglu", 64, 32)
    model, inputs = build(mlp, TAIL), Inputs.random(TAIL, 64, "cpu", torch.bfloat16)
    results = []
    for seed in (1, 1, *range(2, 17)):
        torch.manual_seed(seed)
        results.append(fused_step(model, mlp, inputs, RANDOM))
    first, again, *others = results
    for name, value in first.items():
        assert_bitwise_equal(value, again[name], name)
    assert_bitwise_equal(others[0]["y"], first["y"], "y")
    model.on_unfused = "allow"
    exact = step(copy.deepcopy(model).float(), mlp, inputs.to(torch.float32))
    for name in ("dx", "dfc1.weight0", "dfc2.weight0"):
        steps = torch.stack([r[name].float() for r in (first, *others)])
        assert (steps[0] != steps[1]).any(), name
        assert relative_error(steps.mean(0), exact[name]) < relative_error(steps[0], exact[name]), name


@pytest.mark.parametrize("trains", [(True, True), (False, True), (True, False)], ids=str)
def test_as_many_random_states_are_drawn_as_unfused(trains: tuple[bool, bool]) -> None:
    """So whatever is drawn after a layer does not depend on whether it is fused."""
    mlp = MLP("scaled_swiglu", 64, 32)
    model, sizes = build(mlp, TAIL), TAIL.tensor("cpu")
    for linear, wants in zip((model[0], model[2]), trains, strict=True):
        linear.requires_grad_(wants)
    after = []
    for arch in ("sm_100a", "cpu"):
        model.on_unfused = "error" if arch != "cpu" else "allow"
        torch.manual_seed(3)
        with as_if_on(arch), ops.autocast(recipe=RANDOM):
            model(torch.randn(512, 64).bfloat16(), *mlp.extras(sizes, torch.rand(512))).sum().backward()
        after.append(torch.rand(4))
    assert_bitwise_equal(*after)


def test_a_repeated_forward_repeats_the_bits() -> None:
    """Activation checkpointing restores the generator: gradients are those of a step without it."""
    mlp = MLP("scaled_swiglu", 64, 32)
    model, inputs = build(mlp, TAIL), Inputs.random(TAIL, 64, "cpu", torch.bfloat16)
    torch.manual_seed(2)
    want = fused_step(model, mlp, inputs, RANDOM)
    model.zero_grad()
    x, probs, sizes = inputs.x.clone().requires_grad_(), inputs.probs.clone().requires_grad_(), TAIL.tensor("cpu")

    def run(x: Tensor) -> Tensor:
        with ops.autocast(recipe=RANDOM):
            return model(x, *mlp.extras(sizes, probs))

    torch.manual_seed(2)
    with as_if_on("sm_100a"):
        checkpoint(run, x, use_reentrant=False).backward(inputs.dy)
    got = {"dx": x.grad, "dprobs": probs.grad, **{f"d{n}": p.grad for n, p in model.named_parameters()}}
    for name, grad in got.items():
        assert_bitwise_equal(grad, want[name], name)


@each_format
def test_weights_are_quantised_once_per_update(monkeypatch: pytest.MonkeyPatch, recipe: ops.Recipe) -> None:
    """And column-wise for backward alone."""
    made: list[bool] = []
    original = module.quantize

    def watched(t: Tensor, format: Format, columnwise: bool) -> Quantized:
        made.append(columnwise)
        return original(t, format, columnwise)

    monkeypatch.setattr(module, "quantize", watched)
    mlp = MLP("scaled_swiglu", 64, 32)
    model, inputs = build(mlp, TAIL), Inputs.random(TAIL, 64, "cpu", torch.bfloat16)
    first = fused_step(model, mlp, inputs, recipe)
    assert made == [False, True] * 2
    again = fused_step(model, mlp, inputs, recipe)
    assert len(made) == 4
    assert all(torch.equal(first[name], again[name]) for name in ("y", "dx"))
    with torch.no_grad():
        model[0].weight0.mul_(2)
    assert not torch.equal(fused_step(model, mlp, inputs, recipe)["y"], first["y"]) and len(made) == 6
    made.clear()
    with torch.no_grad(), as_if_on("sm_100a"), ops.autocast(recipe=recipe):
        model(inputs.x, *mlp.extras(TAIL.tensor("cpu"), inputs.probs))
    assert made == [False] * 2


@pytest.mark.parametrize(
    ("recipe", "other"),
    [(MXFP8, MXFP8_SQUARE), (MXFP8_SQUARE, MXFP8), (NVFP4, NVFP4_LINES), (NVFP4_LINES, NVFP4)],
    ids=["1x32", "32x32", "16x16", "1x16"],
)
def test_weights_that_are_held_quantised_are_taken_as_they_are(recipe: ops.Recipe, other: ops.Recipe) -> None:
    """The bits of a model that quantises the same weights; under a recipe with other blocks they stay what they are."""
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
    got = fused_step(held, mlp, inputs, other)
    for name, value in want.items():
        assert_bitwise_equal(got[name], value, name)


@each_format
def test_fp32_weights_under_autocast_get_gradients_in_fp32(recipe: ops.Recipe) -> None:
    mlp = MLP("scaled_swiglu", 160, 96, bias=True, interleave=32)
    model, inputs = build(mlp, TAIL).float(), Inputs.random(TAIL, 160, "cpu", torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        fused = fused_step(model, mlp, inputs, recipe)
        unfused = unfused_step(model, mlp, inputs, recipe)
    exact = step(copy.deepcopy(model), mlp, inputs)
    for name, value in fused.items():
        assert value.dtype == unfused[name].dtype, name
        if not name.endswith("1"):  # an expert without tokens
            assert_as_accurate(value.float(), unfused[name].float(), exact[name], name)


@each_format
def test_weights_stored_by_column_saved_tensors_in_host_memory_and_gradients_that_wait(recipe: ops.Recipe) -> None:
    """The bits of a layer without any of them."""
    mlp, inputs = MLP("scaled_swiglu", 64, 96, interleave=32), Inputs.random(TAIL, 64, "cpu", torch.bfloat16)
    model = build(mlp, TAIL)
    want = fused_step(model, mlp, inputs, recipe)
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
    got = fused_step(other, mlp, inputs, recipe)
    for linear in (fc1, fc2):
        linear.backward_dw()
    got |= {f"d{name}": p.grad.mT if "fc2" in name else p.grad for name, p in other.named_parameters()}
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert_bitwise_equal(got[name].contiguous(), value, name)


@each_format
def test_of_sharded_weights_nothing_is_kept_for_backward(recipe: ops.Recipe) -> None:
    """The bits of a layer that keeps its copies; a change between forward and backward is seen."""
    mlp, inputs = MLP("scaled_swiglu", 64, 96, interleave=32), Inputs.random(TAIL, 64, "cpu", torch.bfloat16)
    model, kept = build(mlp, TAIL), []

    def pack(t: Tensor) -> Tensor:
        kept.append(t.dim() == 3 and t.element_size() == 1)
        return t

    results = []
    for is_sharded in (False, True):
        kept.clear()
        model[0].is_sharded = model[2].is_sharded = is_sharded
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            results.append(fused_step(model, mlp, inputs, recipe))
        assert any(kept) == (not is_sharded)
    for name, value in results[0].items():
        assert_bitwise_equal(results[1][name], value, name)
    with as_if_on("sm_100a"), ops.autocast(recipe=recipe):
        y = model(inputs.x.clone().requires_grad_(), *mlp.extras(TAIL.tensor("cpu"), inputs.probs))
    with torch.no_grad():
        model[2].weight0.mul_(2)
    with pytest.raises(RuntimeError, match="changed"):
        y.backward(inputs.dy)


@pytest.mark.parametrize("mode", ["add", "overwrite"])
@pytest.mark.parametrize("separate", [False, True])
@each_format
def test_main_grads(mode: str, separate: bool, recipe: ops.Recipe) -> None:
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
        fused_step(model, mlp, inputs, recipe)
    want = unfused_step(plain, mlp, inputs, recipe)
    exact = step(copy.deepcopy(plain).float(), mlp, inputs.to(torch.float32))
    for name, w in model.named_parameters():
        base, times = (3.0, 3) if mode == "add" else (0.0, 1)
        assert w.grad_added_to_main_grad is True
        if name.endswith("1"):
            assert (w.main_grad == base).all(), name
        else:
            assert_as_accurate((w.main_grad - base) / times, want[f"d{name}"].float(), exact[f"d{name}"], name)


@each_format
def test_frozen_parts_and_inputs(recipe: ops.Recipe) -> None:
    """Whatever wants a gradient gets the one that all together get."""
    mlp = MLP("scaled_swiglu", 32, 32)
    inputs, sizes = Inputs.random(TAIL, mlp.hidden, "cpu", torch.bfloat16), TAIL.tensor("cpu")
    model = build(mlp, TAIL)
    want = fused_step(model, mlp, inputs, recipe)
    for first, second, x_wants, probs_want in itertools.product((True, False), repeat=4):
        if not (first or second or x_wants or probs_want):
            continue
        for linear, wants in ((model[0], first), (model[2], second)):
            linear.requires_grad_(wants)
        model.zero_grad()
        x, probs = inputs.x.clone().requires_grad_(x_wants), inputs.probs.clone().requires_grad_(probs_want)
        with as_if_on("sm_100a"), ops.autocast(recipe=recipe):
            model(x, sizes, probs, sizes).backward(inputs.dy)
        got = {"dx": x.grad, "dprobs": probs.grad, **{f"d{n}": p.grad for n, p in model.named_parameters()}}
        for name, grad in got.items():
            if grad is not None:
                assert_bitwise_equal(grad, want[name], name)
        assert (x.grad is not None) == x_wants and (probs.grad is not None) == probs_want
        assert all((p.grad is not None) == first for p in model[0].parameters())
        assert all((p.grad is not None) == second for p in model[2].parameters())


@each_format
def test_two_linears_with_different_splits_run_as_unfused(recipe: ops.Recipe) -> None:
    mlp = MLP("scaled_swiglu", 32, 32)
    model = build(mlp, Splits("rows", (4, 0, 9), 20))
    inputs = Inputs.random(Splits("rows", (4, 0, 9), 20), 32, "cpu", torch.bfloat16)
    results = []
    for arch in ("sm_100a", "cpu"):
        model.on_unfused = "error" if arch != "cpu" else "allow"
        model.zero_grad()
        x = inputs.x.clone().requires_grad_()
        with as_if_on(arch), ops.autocast(recipe=recipe):
            y = model(x, torch.tensor([4, 0, 9]), inputs.probs, torch.tensor([6, 7, 1]))
        y.backward(torch.ones_like(y))
        results.append([y.detach(), x.grad, *(p.grad for p in model.parameters())])
    for fused, unfused in zip(*results, strict=True):
        assert_bitwise_equal(fused, unfused)


@each_format
def test_a_margin_is_refused_before_anything_runs_if_weights_want_gradients(functions: str, recipe: ops.Recipe) -> None:
    """Theirs is the one kernel without a margin; to all others it is given."""
    mlp = MLP("scaled_swiglu", 64, 32)
    model, inputs = build(mlp, TAIL, sm_margin=16), Inputs.random(TAIL, 64, "cpu", torch.bfloat16)
    with pytest.raises(ValueError, match=r"sm_margin is 16, needs 0: cuDNN Frontend's weight gradient from (mx|nv)fp"):
        fused_step(model, mlp, inputs, recipe)
    assert not Operation.made
    with torch.no_grad(), as_if_on("sm_100a"), ops.autocast(recipe=recipe):
        model(inputs.x, *mlp.extras(TAIL.tensor("cpu"), inputs.probs))
    model.requires_grad_(False)
    assert "dx" in fused_step(model, mlp, inputs, recipe)
    if functions == "double":
        assert {operation.margin for operation in Operation.made} == {"8"}


@pytest.mark.parametrize("name", ["GroupedGemmQuantSm100", "GroupedGemmDgluSm100", "GroupedGemmWgradSm100"])
@each_format
def test_a_kernel_that_does_not_compile(
    functions: str, recipe: ops.Recipe, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found in forward, the layer runs unfused; in backward PyTorch computes what the kernel would have. Either way
    said once, and unfused from the next step on.
    """
    if functions != "double":
        return

    def compile(self: Operation) -> None:
        raise RuntimeError("no registers left")

    monkeypatch.setattr(getattr(frontend_double, name), "compile", compile)
    mlp = MLP("scaled_swiglu", 64, 32, interleave=32)
    model, inputs = mlp.build(TAIL, "cpu", torch.bfloat16), Inputs.random(TAIL, 64, "cpu", torch.bfloat16)
    where = "runs unfused from now on" if name == "GroupedGemmQuantSm100" else "backward: cuDNN Frontend"
    with pytest.warns(UserWarning, match=f"{where}.*no registers left"):
        first = fused_step(model, mlp, inputs, recipe)
    then, unfused = (run(model, mlp, inputs, recipe) for run in (fused_step, unfused_step))
    with ops.autocast(recipe=recipe):
        exact = step(copy.deepcopy(model).float(), mlp, inputs.to(torch.float32))
    for kind in {key.rstrip("0123456789") for key in unfused}:  # of few rows, one value decides
        keys = [key for key in unfused if key.rstrip("0123456789") == kind]
        assert_as_accurate(*(torch.cat([t[key].flatten() for key in keys]).float() for t in (first, unfused, exact)))
    for key, value in unfused.items():
        assert_bitwise_equal(then[key], value, key)


@pytest.mark.parametrize("rows", [0, 256])
@each_format
def test_a_rank_without_tokens(rows: int, recipe: ops.Recipe) -> None:
    splits = Splits("cold", (0, 0, 0, 0), rows)
    mlp = MLP("scaled_swiglu", 64, 32, bias=True, scale_bias=True)
    results = fused_step(build(mlp, splits), mlp, Inputs.random(splits, 64, "cpu", torch.bfloat16), recipe)
    assert results["y"].shape == (rows, 64)
    for name, t in results.items():
        assert (t == 0).all(), name


@pytest.mark.parametrize(
    ("activation", "row", "kernel"),
    [
        ("scaled_swiglu", "grouped_mlp", "glu_hadamard"),
        ("scaled_clamped", "grouped_mlp_any_clamp", "glu"),
        ("scaled_srelu", "grouped_mlp_srelu", "srelu"),
    ],
)
@pytest.mark.parametrize("format", ["mxfp8", "nvfp4"])
def test_explain_before_and_after_packing(activation: str, row: str, kernel: str, format: str) -> None:
    mlp, recipe = MLP(activation, 64, 32), {"mxfp8": MXFP8, "nvfp4": RANDOM}[format]
    model = mlp.build(TAIL, "cpu", torch.bfloat16)
    if mlp.gated:
        told = model.explain(target="sm_100a", recipe=recipe)
        assert "act.glu_interleave_size is None, needs 32; pack_glu_weights_(interleave=32) does it\n" in told
        model.pack_glu_weights_(interleave=32)
    if format == "mxfp8" and mlp.gated:
        row, kernel = "grouped_mlp", "glu"
    told = model.explain(target="sm_100a", recipe=recipe)
    assert f"{row}_{format}_sm100: GroupedLinear fc1, Scaled" in told and "3 of 3 ops fused" in told
    assert f"cudnn_{kernel}_{format} " in told and f"cudnn_wgrad_{format} " in told


def test_hybrid_and_other_widths_are_declined_by_name() -> None:
    model = MLP("scaled_swiglu", 64, 32, interleave=32).build(TAIL, "cpu", torch.bfloat16)
    told = model.explain(target="sm_100a", recipe=ops.MXFP8BlockScaling(fp8_format=ops.Format.HYBRID))
    assert "the recipe's backward format is MXFP8 E5M2 1x32, needs MXFP8 E4M3 1x32\n" in told
    for recipe in (MXFP8, RANDOM):
        narrow = MLP("scaled_swiglu", 48, 32, interleave=32).build(TAIL, "cpu", torch.bfloat16)
        told = narrow.explain(target="sm_100a", recipe=recipe)
        assert "fc1.in_features is 48, needs a multiple of 32; pad the layer's features\n" in told
