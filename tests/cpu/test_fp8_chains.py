"""Fused FP8 operations, on the operators' reference, against the unfused ops, and both against FP32."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fusible_ops as ops
from cute_kernels.quantization.formats import fp8_block
from fusible_ops.quantized_tensor import QuantizedTensor, quantized
from tests.cases import EVEN, OFF_TILE, SMALL_SPLITS, TAIL, Splits
from tests.compare import assert_bitwise_equal, relative_error
from tests.models import ACTIVATIONS, MLP, Inputs, as_if_on, step
from tests.recipe_chains import MIXES, Results, Run, assert_near, both, partly_frozen

BLOCK = ops.Float8BlockScaling()
F32 = ops.Float8BlockScaling(use_f32_scales=True)
KEPT = ops.Float8BlockScaling(preactivation="quantized")
KEPT_F32 = ops.Float8BlockScaling(use_f32_scales=True, preactivation="quantized")
BF16 = torch.bfloat16


def fused(model: ops.Sequential, recipe: ops.Recipe = BLOCK) -> ops.Sequential:
    """The same modules, as fused on Hopper; everything must fuse."""
    again = ops.Sequential(dict(model.named_children()), on_unfused="error")
    with as_if_on("sm_90a"):
        assert all(group.plan(again._target("sm_90a"), None, recipe).is_fused for group in again.groups())
    return again


def compare(model: ops.Sequential, run: Run, recipe: ops.Recipe = BLOCK, exact: Results | None = None) -> None:
    """y is bit for bit the unfused one; gradients are as accurate, and never far from the unfused ones."""
    got, want = both(model, run, recipe, fused)
    assert_bitwise_equal(got["y"], want["y"], "y")
    assert_near(got, want, 0.03, exact)


def compare_mlp(mlp: MLP, splits: Splits, recipe: ops.Recipe = BLOCK, **build: object) -> None:
    model = mlp.build(splits, "cpu", BF16, **build)
    inputs = Inputs.random(splits, mlp.hidden, "cpu", BF16)
    exact = step(mlp_in_fp32(model, mlp, splits), mlp, inputs.to(torch.float32))
    compare(model, lambda m: step(m, mlp, inputs), recipe, exact if splits.used > 8 else None)


def mlp_in_fp32(model: ops.Sequential, mlp: MLP, splits: Splits) -> ops.Sequential:
    other = mlp.build(splits, "cpu", torch.float32)
    other.load_state_dict(model.state_dict())
    return other


@pytest.mark.parametrize("splits", [*SMALL_SPLITS, OFF_TILE], ids=str)
@pytest.mark.parametrize("recipe", [BLOCK, F32], ids=["powers", "f32"])
def test_grouped_mlp(splits: Splits, recipe: ops.Recipe) -> None:
    compare_mlp(MLP(hidden=160, intermediate=192, bias=True, scale_bias=True), splits, recipe)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [False, True])
def test_every_activation(activation: str, bias: bool) -> None:
    compare_mlp(MLP(activation, hidden=144, intermediate=192, bias=bias), TAIL if bias else EVEN)


@pytest.mark.parametrize(
    "linear",
    [
        {"single_grouped_weight": True},
        {"transposed_weight": True},
        {"single_grouped_weight": True, "single_grouped_bias": True, "transposed_weight": True},
    ],
    ids=str,
)
def test_weights_however_they_lie(linear: dict) -> None:
    mlp = MLP(hidden=160, intermediate=128, bias=True, linear=linear)
    model, inputs = mlp.build(EVEN, "cpu", BF16), Inputs.random(EVEN, mlp.hidden, "cpu", BF16)
    compare(model, lambda m: step(m, mlp, inputs))


def test_weights_that_lie_apart() -> None:
    mlp = MLP(hidden=160, intermediate=128)
    model, inputs = mlp.build(EVEN, "cpu", BF16), Inputs.random(EVEN, mlp.hidden, "cpu", BF16)
    for p in model.parameters():
        p.data = p.data.clone()
    compare(model, lambda m: step(m, mlp, inputs))


def test_linears_that_read_one_weight_in_two_ways() -> None:
    a = ops.GroupedLinear(2, 64, 64, bias=False, device="cpu", dtype=BF16)
    b = ops.GroupedLinear(2, 64, 64, bias=False, transposed_weight=True, device="cpu", dtype=BF16)
    for g in range(2):
        setattr(b, f"weight{g}", getattr(a, f"weight{g}"))
    x, dy, sizes = torch.randn(20, 64).bfloat16(), torch.randn(20, 64).bfloat16(), torch.tensor([7, 13])
    for op in (a, b, a):
        compare(ops.Sequential(op), lambda m: run_step(m, x, dy, sizes))


def test_all_of_it_in_inference_mode() -> None:
    """Split sizes that it made are not known again once they changed."""
    op, x = ops.GroupedLinear(2, 64, 64, device="cpu", dtype=BF16), torch.randn(20, 64).bfloat16()
    model = fused(ops.Sequential(op, ops.GroupedLinear(2, 64, 64, device="cpu", dtype=BF16)))
    with torch.inference_mode(), ops.autocast(recipe=BLOCK), as_if_on("sm_90a"):
        sizes, x = torch.tensor([7, 13]), x.clone()
        for split in ([7, 13], [15, 5]):
            sizes.copy_(torch.tensor(split))
            other = torch.tensor(split)
            with torch.no_grad():
                want = ops.Sequential(dict(model.named_children()), rules=())(x, other, other)
            assert_bitwise_equal(model(x, sizes, sizes), want, str(split))


def test_weights_that_are_held_quantised() -> None:
    """The same bits as from plain weights of the same values."""
    mlp = MLP(hidden=160, intermediate=128, bias=True)
    with ops.quantized_model_init(recipe=BLOCK):
        model = mlp.build(EVEN, "cpu", BF16)
    inputs = Inputs.random(EVEN, mlp.hidden, "cpu", BF16)
    assert isinstance(model[0].weight0, QuantizedTensor)
    compare(model, lambda m: step(m, mlp, inputs))
    plain = mlp.build(EVEN, "cpu", BF16)
    plain.load_state_dict(model.state_dict())
    with ops.autocast(recipe=BLOCK), as_if_on("sm_90a"):
        assert_bitwise_equal(step(fused(plain), mlp, inputs)["dx"], step(fused(model), mlp, inputs)["dx"], "dx")


@pytest.mark.parametrize("unlike", ["copies", "format", "plain"])
def test_held_weights_unlike_each_other(unlike: str) -> None:
    """A missing copy is made; another format, or none, is refused, as unfused."""
    with ops.quantized_model_init(recipe=BLOCK):
        op = ops.GroupedLinear(2, 64, 64, device="cpu", dtype=BF16)
    x, dy, sizes = torch.randn(20, 64).bfloat16(), torch.randn(20, 64).bfloat16(), torch.tensor([7, 13])
    want = op.weight1
    assert isinstance(want, QuantizedTensor)
    if unlike == "copies":
        op.weight1 = torch.nn.Parameter(want.detach().with_usage(True, False))
        compare(ops.Sequential(op), lambda m: run_step(m, x, dy, sizes))
        return
    values = want.dequantize(BF16)
    op.weight1 = torch.nn.Parameter(values if unlike == "plain" else quantized(values, fp8_block()))
    model = fused(ops.Sequential(op))
    message = "all weights of an op must be held in one format"
    with ops.autocast(recipe=BLOCK), as_if_on("sm_90a"), pytest.raises(RuntimeError, match=message):
        model(x, sizes)


@MIXES
def test_frozen_parts(wants: tuple[bool, bool, bool, bool]) -> None:
    compare(*partly_frozen(wants))


@pytest.mark.parametrize("position", ["middle", "last", "first"])
def test_chains_with_quantize(position: str) -> None:
    """In the middle it is part of the fused MLP; FC1, activation and Quantize are one step with a quantised result."""
    mlp = MLP(hidden=160, intermediate=192, bias=True)
    model, inputs = mlp.build(TAIL, "cpu", BF16), Inputs.random(TAIL, mlp.hidden, "cpu", BF16)
    sizes = TAIL.tensor()
    parts = dict(model.named_children())
    if position == "middle":
        chain = {"fc1": parts["fc1"], "act": parts["act"], "quantize": ops.Quantize(), "fc2": parts["fc2"]}
        compare(ops.Sequential(chain), lambda m: step(m, mlp, inputs))
        return

    def run(m: ops.Sequential) -> dict[str, Tensor]:
        m.zero_grad()
        x, probs = inputs.x.clone().requires_grad_(), inputs.probs.clone().requires_grad_()
        q = m(x, sizes, probs)
        assert isinstance(q, QuantizedTensor)
        y = q if position == "last" else unfused_fc2(q, sizes)
        y.backward(inputs.dy[:, :1].expand_as(y) if position == "last" else inputs.dy)
        grads = {name: p.grad for name, p in (*m.named_parameters(), *unfused_fc2.named_parameters(prefix="fc2"))}
        results = {"y": y.detach() + 0, "dx": x.grad, "dprobs": probs.grad, **grads}
        return {name: t for name, t in results.items() if t is not None}

    unfused_fc2 = ops.Sequential(parts["fc2"], rules=())
    compare(ops.Sequential({"fc1": parts["fc1"], "act": parts["act"], "quantize": ops.Quantize()}), run)


def test_a_linear_alone() -> None:
    for splits, bias in ((TAIL, True), (OFF_TILE, False), (EVEN, True)):
        model = ops.Sequential(ops.GroupedLinear(splits.groups, 160, 80, bias=bias, device="cpu", dtype=BF16))
        x, dy = torch.randn(splits.rows, 160).bfloat16(), torch.randn(splits.rows, 80).bfloat16()
        x[splits.used :], dy[splits.used :] = float("nan"), float("nan")
        compare(model, lambda m, x=x, dy=dy, s=splits: run_step(m, x, dy, s.tensor()))


def run_step(model: ops.Sequential, x: Tensor, dy: Tensor, *extras: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = model(x, *extras)
    y.backward(dy)
    return {"y": y.detach(), "dx": x.grad, **{name: p.grad for name, p in model.named_parameters()}}


@pytest.mark.parametrize("bias", [False, True])
def test_dense_chains(bias: bool) -> None:
    common = {"bias": bias, "device": "cpu", "dtype": BF16}
    x, dy = torch.randn(3, 50, 160).bfloat16(), torch.randn(3, 50, 96).bfloat16()
    mlp = ops.Sequential(ops.Linear(160, 256, **common), ops.SwiGLU(), ops.Linear(128, 96, **common))
    compare(mlp, lambda m: run_step(m, x, dy))
    compare(ops.Sequential(ops.Linear(160, 96, **common)), lambda m: run_step(m, x, dy))
    quantised = ops.Sequential(ops.Linear(160, 192, **common), ops.SReLU(), ops.Quantize())

    def run(m: ops.Sequential) -> dict[str, Tensor]:
        results = run_step(m, x, dy.repeat(1, 1, 2))
        return results | {"y": results["y"] + 0}

    compare(quantised, run)


def test_two_splits_of_the_same_rows() -> None:
    """Each linear uses its own; a block of one's groups may span two of the other's, so they run as unfused."""
    mlp = MLP(hidden=160, intermediate=128, bias=True)
    splits = Splits("first", (9, 15, 8), 40)
    model, inputs = mlp.build(splits, "cpu", BF16), Inputs.random(splits, mlp.hidden, "cpu", BF16)
    second = torch.tensor([20, 0, 5])

    def run(m: ops.Sequential) -> dict[str, Tensor]:
        m.zero_grad()
        x = inputs.x.clone().requires_grad_()
        y = m(x, splits.tensor(), inputs.probs, second)
        y.backward(inputs.dy)
        return {"y": y.detach(), "dx": x.grad, **{name: p.grad for name, p in m.named_parameters()}}

    with ops.autocast(recipe=BLOCK):
        want = run(model)
        with as_if_on("sm_90a"):
            got = run(fused(model))
    for name in want:
        assert_bitwise_equal(got[name], want[name], name)


def test_a_quantised_input_and_gradient() -> None:
    """Of the same groups they are used as they are; what a user quantised otherwise is quantised anew."""
    op = ops.GroupedLinear(2, 160, 80, bias=True, device="cpu", dtype=BF16)
    alone = ops.Sequential(ops.Quantize(), op, ops.Quantize(False, True))
    sizes, x, dy = torch.tensor([7, 13]), torch.randn(20, 160).bfloat16(), torch.randn(20, 80).bfloat16()

    def run(m: ops.Sequential) -> dict[str, Tensor]:
        return run_step(m, x, dy, sizes)

    with ops.autocast(recipe=BLOCK):
        want = run(alone)
        with as_if_on("sm_90a"):
            again = ops.Sequential(dict(alone.named_children()))
            assert all(
                op.kind == "quantize" for op in again.groups()[0].plan(again._target("sm_90a"), None, BLOCK).unfused
            )
            got = run(again)
            q = quantized(x, fp8_block(), columnwise=False)
            y = ops.Sequential(op)(q, sizes)
    for name in want:
        assert_bitwise_equal(got[name], want[name], name)
    assert_bitwise_equal(y.detach(), want["y"], "y")


# ----------------------------------------------------------------------------------------------------------------------
# What is launched and kept


def watched(run: Callable[[], object]) -> tuple[object, list[str]]:
    """(what it returns, the operators that it runs, in order)."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profiler:
        result = run()
    events = sorted(profiler.events(), key=lambda e: e.time_range.start)
    return result, [e.name.removeprefix("fusible_ops::") for e in events if e.name.startswith("fusible_ops::")]


def test_launches() -> None:
    """Four forward, five backward; weights are quantised once for all of them; four without gradients too."""
    mlp = MLP(hidden=160, intermediate=128, bias=True)
    model, inputs = mlp.build(EVEN, "cpu", BF16), Inputs.random(EVEN, mlp.hidden, "cpu", BF16)
    sizes = EVEN.tensor()
    forward = ["padded_group_offsets", "fp8_quantize", "fp8_grouped_gemm_act", "fp8_grouped_gemm"]
    backward = ["fp8_quantize", "fp8_grouped_wgrad", "fp8_grouped_gemm_dact", "fp8_grouped_wgrad", "fp8_grouped_gemm"]
    with ops.autocast(recipe=BLOCK), as_if_on("sm_90a"):
        again = fused(model)
        for i in range(2):
            x, probs = inputs.x.clone().requires_grad_(), inputs.probs.clone().requires_grad_()
            y, calls = watched(lambda x=x, probs=probs: again(x, sizes, probs, sizes))
            once = ["fp8_quantize_weight"] * 2 if i == 0 else []
            assert calls == forward[:1] + once + forward[1:]
            assert watched(lambda y=y: y.backward(inputs.dy))[1] == backward
        with torch.no_grad():
            _, calls = watched(lambda: again(x, sizes, probs, sizes))
        assert calls == [forward[0], *["fp8_quantize_weight"] * 2, *forward[1:]]


@pytest.mark.parametrize("splits", [TAIL, OFF_TILE], ids=str)
@pytest.mark.parametrize("recipe", [KEPT, KEPT_F32], ids=["powers", "f32"])
@pytest.mark.parametrize("activation", ["scaled_swiglu", "clamped_swiglu", "scaled_srelu"])
def test_a_pre_activation_that_is_kept_quantised(splits: Splits, recipe: ops.Recipe, activation: str) -> None:
    """As unfused; y as without. Of halves of 192 and 320 columns the last block is short."""
    for intermediate in (192, 320):
        mlp = MLP(activation, hidden=160, intermediate=intermediate, bias=True)
        model, inputs = mlp.build(splits, "cpu", BF16), Inputs.random(splits, mlp.hidden, "cpu", BF16)
        if activation == "clamped_swiglu":  # whose gradient jumps: against FP32 single values decide
            compare(model, lambda m, mlp=mlp, inputs=inputs: step(m, mlp, inputs), recipe)
        else:
            compare_mlp(mlp, splits, recipe)
        results = []
        for each in (recipe, F32 if recipe is KEPT_F32 else BLOCK):
            with ops.autocast(recipe=each):
                results.append(step(model, mlp, inputs)["y"])
        assert_bitwise_equal(*results, "y")


def test_of_a_kept_pre_activation_a_byte_is_kept() -> None:
    mlp, splits = MLP(hidden=160, intermediate=192), Splits("rows", (100, 0, 28, 72), 256)
    model, inputs = mlp.build(splits, "cpu", BF16), Inputs.random(splits, mlp.hidden, "cpu", BF16)
    saved: dict[int, Tensor] = {}

    def keep(t: Tensor) -> Tensor:
        saved[t.untyped_storage().data_ptr()] = t
        return t

    with ops.autocast(recipe=KEPT), as_if_on("sm_90a"), torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        fused(model, KEPT)(inputs.x.clone().requires_grad_(), *mlp.extras(splits.tensor(), inputs.probs))
    shapes = [tuple(t.shape) for t in saved.values()]
    assert (256, 2 * 192) in shapes and (2 * 2, 256) in shapes
    assert not any(t.dtype == BF16 and t.shape == (256, 2 * 192) for t in saved.values())


def test_a_linear_and_activation_alone_run_unfused() -> None:
    model = ops.Sequential(ops.Linear(160, 256, device="cpu", dtype=BF16), ops.SwiGLU(), ops.Quantize())
    told = model.explain("sm_90a", recipe=KEPT)
    line, *_ = [line for line in told.splitlines() if line.startswith("    x linear_activation_fp8 ")]
    assert "needs preactivation='high_precision'" in line


@pytest.mark.parametrize("scale_bias", [False, True])
def test_what_is_kept(scale_bias: bool) -> None:
    """x and act in E4M3, turned; the pre-activation in BF16; the turned weights; a few words a row and a group."""
    mlp = MLP(hidden=160, intermediate=128, bias=True, scale_bias=scale_bias)
    splits = Splits("rows", (100, 0, 28, 72), 256)
    model, inputs = mlp.build(splits, "cpu", BF16), Inputs.random(splits, mlp.hidden, "cpu", BF16)
    x, probs = inputs.x.clone().requires_grad_(), inputs.probs.clone().requires_grad_()
    saved: dict[int, Tensor] = {}

    def keep(t: Tensor) -> Tensor:
        saved[t.untyped_storage().data_ptr()] = t
        return t

    with ops.autocast(recipe=BLOCK), as_if_on("sm_90a"), torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        y = fused(model)(x, *mlp.extras(splits.tensor(), probs))
    padded = (256 + 127 * 4) // 128 * 128
    eight = [t.untyped_storage().nbytes() for t in saved.values() if t.element_size() == 1]
    assert sorted(eight) == sorted([padded * 160, padded * 128, 4 * 256 * 160, 4 * 128 * 160])
    known = {t.untyped_storage().data_ptr() for t in (x, probs, *model.parameters())}
    wide = [t for at, t in saved.items() if t.dtype == BF16 and at not in known]
    assert [t.shape for t in wide] == [(256, 256)], "the pre-activation alone"
    y.backward(inputs.dy)


# ----------------------------------------------------------------------------------------------------------------------
# What does not fuse


@pytest.mark.parametrize(
    ("recipe", "changes", "reason"),
    [
        (
            ops.Float8BlockScaling(fp8_format=ops.Format.HYBRID),
            {},
            "the recipe's backward format is FP8 E5M2 1x128, FP32 power of two scales, needs FP8 E4M3 1x128",
        ),
        (ops.Float8BlockScaling(w_block_scaling_dim=1), {}, "the recipe's weight format is FP8 E4M3 1x128"),
        (
            ops.Float8BlockScaling(backward_override="dequantized"),
            {},
            "the recipe's backward_override is dequantized, needs a quantised backward",
        ),
        (ops.Float8CurrentScaling(), {}, "are for another recipe: grouped_mlp_fp8, mlp_fp8"),
        (BLOCK, {"intermediate": 96}, "fc2.in_features is 96, needs a multiple of 64; pad the layer's features"),
        (BLOCK, {"hidden": 24}, "fc1.in_features is 24, needs a multiple of 16"),
        (BLOCK, {"interleave": 8}, "act.glu_interleave is 8, needs gate and up rows as [gate | up]"),
    ],
)
def test_refusals(recipe: ops.Recipe, changes: dict, reason: str) -> None:
    """AC9 among them: what the kernels cannot read is declined by name, on a Hopper that could run the rest."""
    mlp = MLP(**{"hidden": 64, "intermediate": 128, **changes})
    model = mlp.build(EVEN, "cpu", BF16)
    assert reason in model.explain("sm_90a", recipe=recipe)
    with ops.autocast(recipe=recipe):
        assert reason in model.explain("sm_90a"), "the active recipe is the one explained"


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    model = MLP(hidden=64, intermediate=128).build(EVEN, "cpu", dtype)
    text = model.explain("sm_90a", recipe=BLOCK)
    assert f"fc1.compute_dtype is {str(dtype).removeprefix('torch.')}, needs bfloat16" in text


def test_the_plan_is_kept_for_each_recipe() -> None:
    mlp = MLP(hidden=64, intermediate=128)
    model = mlp.build(EVEN, "cpu", BF16)
    inputs = Inputs.random(EVEN, mlp.hidden, "cpu", BF16)
    with as_if_on("sm_90a"):
        for recipe in (None, BLOCK, F32, ops.Float8CurrentScaling()) * 2:
            with ops.autocast(enabled=recipe is not None, recipe=recipe):
                step(model, mlp, inputs)
    assert len(model.groups()[0]._steps) == 4


@pytest.mark.parametrize("linear", [{}, {"transposed_weight": True}], ids=["plain", "transposed"])
def test_fp32_weights_under_autocast(linear: dict) -> None:
    """They are rounded to BF16 and quantised, once per update; their gradients are FP32."""
    mlp = MLP(hidden=160, intermediate=128, bias=True, linear=linear)
    model, inputs = mlp.build(EVEN, "cpu", torch.float32), Inputs.random(EVEN, mlp.hidden, "cpu", torch.float32)
    inputs.dy = inputs.dy.bfloat16()
    want: dict[str, Tensor] = {}
    for fuse in (False, True):
        with torch.autocast("cpu", BF16), ops.autocast(recipe=BLOCK), as_if_on("sm_90a"):
            chain = ops.Sequential(dict(model.named_children()), **({} if fuse else {"rules": ()}))
            chain.on_unfused = "error" if fuse else "allow"
            got = step(chain, mlp, inputs)
        want = want or got
        for name, t in got.items():
            assert t.dtype == (BF16 if name == "y" else torch.float32), name
            assert relative_error(t.float(), want[name].float()) <= (0 if name == "y" else 0.03), name
