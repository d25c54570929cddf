"""MLPs fused in MXFP8 for Hopper, on the operators' reference, against the unfused ops, and both against FP32."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

import fusible_ops as ops
from cute_kernels.quantization.formats import mxfp8
from cute_kernels.quantization.groups import padded_rows
from fusible_ops.cli import models
from fusible_ops.meta_run import Use
from fusible_ops.picture import as_data
from fusible_ops.quantized_tensor import QuantizedTensor, quantized
from fusible_ops.warmup import kernels_of
from patterns import explain
from tests import recipe_chains
from tests.cases import EVEN, OFF_TILE, SMALL_SPLITS, TAIL, Splits
from tests.compare import assert_bitwise_equal, relative_error
from tests.models import ACTIVATIONS, MLP, Inputs, as_if_on, formed_from_kept, step
from tests.recipe_chains import MIXES, Results, Run, assert_near, both, partly_frozen

RECIPE = ops.MXFP8BlockScaling()
KEPT = ops.MXFP8BlockScaling(preactivation="quantized")
SQUARE = ops.MXFP8BlockScaling(enable_2d_quantization=True)
BF16 = torch.bfloat16


def fused(model: ops.Sequential, recipe: ops.Recipe = RECIPE) -> ops.Sequential:
    return recipe_chains.fused(model, recipe, "_mxfp8")


def compare(model: ops.Sequential, run: Run, recipe: ops.Recipe = RECIPE, exact: Results | None = None) -> None:
    """y is bit for bit the unfused one; gradients are as accurate, and never far from the unfused ones."""
    got, want = both(model, run, recipe, fused)
    assert_bitwise_equal(got["y"], want["y"], "y")
    assert_near(got, want, 0.03, exact)


def compare_mlp(mlp: MLP, splits: Splits, recipe: ops.Recipe = RECIPE) -> None:
    model = mlp.build(splits, "cpu", BF16)
    inputs = Inputs.random(splits, mlp.hidden, "cpu", BF16)
    other = mlp.build(splits, "cpu", torch.float32)
    other.load_state_dict(model.state_dict())
    exact = step(other, mlp, inputs.to(torch.float32))
    compare(model, lambda m: step(m, mlp, inputs), recipe, exact if splits.used > 8 else None)


@pytest.mark.parametrize("splits", [*SMALL_SPLITS, OFF_TILE], ids=str)
@pytest.mark.parametrize("recipe", [RECIPE, SQUARE], ids=["rows", "square"])
def test_grouped_mlp(splits: Splits, recipe: ops.Recipe) -> None:
    compare_mlp(MLP(hidden=160, intermediate=192, bias=True, scale_bias=True), splits, recipe)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation(activation: str) -> None:
    compare_mlp(MLP(activation, hidden=96, intermediate=160), TAIL)


@pytest.mark.parametrize("activation", ["scaled_swiglu", "clamped_swiglu"])
def test_interleaved_rows(activation: str) -> None:
    """In blocks of 32, a block of scales is of gate or of up."""
    compare_mlp(MLP(activation, hidden=96, intermediate=128, interleave=32, bias=True), TAIL)


@pytest.mark.parametrize(
    ("mlp", "recipe", "reason"),
    [
        (MLP(hidden=96, intermediate=128, interleave=64), RECIPE, "glu_interleave"),
        (MLP(hidden=96, intermediate=128, linear={"transposed_weight": True}), RECIPE, "weights [N, K]"),
        (MLP(hidden=96, intermediate=128), ops.MXFP8BlockScaling(fp8_format=ops.Format.HYBRID), "E5M2"),
        (MLP(hidden=96, intermediate=128), ops.MXFP8BlockScaling(backward_override="dequantized"), "override"),
    ],
    ids=["interleave", "transposed", "E5M2", "override"],
)
def test_what_runs_unfused_says_why(mlp: MLP, recipe: ops.Recipe, reason: str) -> None:
    model = mlp.build(TAIL, "cpu", BF16)
    with as_if_on("sm_90a"):
        told = explain(model.groups()[0].plan(model._target("sm_90a"), None, recipe))
    line, *_ = [line for line in told.splitlines() if line.startswith("    x grouped_mlp_mxfp8 ")]
    assert reason in line


@pytest.mark.parametrize("apart", [False, True])
def test_weights_however_they_lie(apart: bool) -> None:
    mlp = MLP(hidden=160, intermediate=128, linear={} if apart else {"single_grouped_weight": True})
    model, inputs = mlp.build(EVEN, "cpu", BF16), Inputs.random(EVEN, mlp.hidden, "cpu", BF16)
    for p in model.parameters() if apart else ():
        p.data = p.data.clone()
    compare(model, lambda m: step(m, mlp, inputs))


@pytest.mark.parametrize("recipe", [RECIPE, SQUARE], ids=["rows", "square"])
def test_weights_that_are_held_quantised(recipe: ops.Recipe) -> None:
    mlp = MLP(hidden=160, intermediate=128)
    with ops.quantized_model_init(recipe=recipe):
        model = mlp.build(EVEN, "cpu", BF16)
    inputs = Inputs.random(EVEN, mlp.hidden, "cpu", BF16)
    assert isinstance(model[0].weight0, QuantizedTensor)
    compare(model, lambda m: step(m, mlp, inputs), recipe)
    other = RECIPE if recipe is SQUARE else SQUARE
    compare(model, lambda m: step(m, mlp, inputs), other)


@pytest.mark.parametrize(
    "held",
    [ops.Float8BlockScaling(), ops.Float8CurrentScaling(), ops.NVFP4BlockScaling()],
    ids=lambda r: type(r).__name__,
)
def test_weights_that_are_held_in_another_format_are_not_quantised_again(held: ops.Recipe) -> None:
    """Where the scales are no powers of two, values are rounded to BF16 once."""
    mlp = MLP(hidden=160, intermediate=128)
    with ops.quantized_model_init(recipe=held):
        model = mlp.build(EVEN, "cpu", BF16)
    inputs = Inputs.random(EVEN, mlp.hidden, "cpu", BF16)
    with ops.autocast(recipe=RECIPE):
        want = step(model, mlp, inputs)
        with as_if_on("sm_90a"):
            got = step(fused(model), mlp, inputs)
    for name in ("y", "dx"):
        assert relative_error(got[name].float(), want[name].float()) <= 0.03, name


@MIXES
def test_frozen_parts(wants: tuple[bool, bool, bool, bool]) -> None:
    compare(*partly_frozen(wants))


def test_a_quantize_in_the_middle() -> None:
    mlp = MLP(hidden=160, intermediate=192)
    model, inputs = mlp.build(TAIL, "cpu", BF16), Inputs.random(TAIL, mlp.hidden, "cpu", BF16)
    parts = dict(model.named_children())
    chain = {"fc1": parts["fc1"], "act": parts["act"], "quantize": ops.Quantize(), "fc2": parts["fc2"]}
    compare(ops.Sequential(chain), lambda m: step(m, mlp, inputs))


def test_dense_mlp() -> None:
    common = {"device": "cpu", "dtype": BF16}
    x, dy = torch.randn(2, 80, 160).bfloat16(), torch.randn(2, 80, 96).bfloat16()
    model = ops.Sequential(ops.Linear(160, 256, **common), ops.SwiGLU(), ops.Linear(128, 96, **common))

    def run(m: ops.Sequential) -> dict[str, Tensor]:
        m.zero_grad()
        own = x.clone().requires_grad_()
        y = m(own)
        y.backward(dy)
        grads = {name: p.grad for name, p in m.named_parameters() if p.grad is not None}
        return {"y": y.detach(), **({} if own.grad is None else {"dx": own.grad}), **grads}

    compare(model, run)
    for p in model.parameters():
        p.requires_grad_(p.dim() == 1)
    compare(model, run)  # biases alone
    for p in model[0].parameters():
        p.requires_grad_(False)
    compare(model, run)
    rows = torch.randn(160, 128).bfloat16()
    compare(ops.Sequential(model[2]), lambda m: run_alone(m, rows))


def run_alone(m: ops.Sequential, x: Tensor) -> dict[str, Tensor]:
    """A linear whose input wants no gradient."""
    m.zero_grad()
    torch.manual_seed(1)
    y = m(x)
    y.backward(torch.randn_like(y))
    return {"y": y.detach(), **{name: p.grad for name, p in m.named_parameters() if p.grad is not None}}


@pytest.mark.parametrize("recipe", [RECIPE, SQUARE], ids=["rows", "square"])
def test_a_linear_alone(recipe: ops.Recipe) -> None:
    """Every gradient is bit for bit the unfused one: nothing lies between quantise and product."""
    for splits, bias in ((TAIL, True), (OFF_TILE, False), (EVEN, True)):
        model = ops.Sequential(ops.GroupedLinear(splits.groups, 160, 96, bias=bias, device="cpu", dtype=BF16))
        x, dy = torch.randn(splits.rows, 160).bfloat16(), torch.randn(splits.rows, 96).bfloat16()
        x[splits.used :], dy[splits.used :] = float("nan"), float("nan")

        def run(m: ops.Sequential, x=x, dy=dy, splits=splits) -> dict[str, Tensor]:
            m.zero_grad()
            own = x.clone().requires_grad_()
            y = m(own, splits.tensor())
            y.backward(dy)
            return {"y": y.detach(), "dx": own.grad, **{name: p.grad for name, p in m.named_parameters()}}

        with ops.autocast(recipe=recipe):
            want = run(model)
            with as_if_on("sm_90a"):
                got = run(fused(model, recipe))
        for name in want:
            assert_bitwise_equal(got[name], want[name], name)


def test_two_splits_of_the_same_rows() -> None:
    """A block of one's groups may span two of the other's, so they run as unfused."""
    mlp = MLP(hidden=160, intermediate=128)
    splits = Splits("first", (9, 15, 8), 40)
    model, inputs = mlp.build(splits, "cpu", BF16), Inputs.random(splits, mlp.hidden, "cpu", BF16)
    second = torch.tensor([20, 0, 5])

    def run(m: ops.Sequential) -> dict[str, Tensor]:
        m.zero_grad()
        x = inputs.x.clone().requires_grad_()
        y = m(x, splits.tensor(), inputs.probs, second)
        y.backward(inputs.dy)
        return {"y": y.detach(), "dx": x.grad, **{name: p.grad for name, p in m.named_parameters()}}

    with ops.autocast(recipe=RECIPE):
        want = run(model)
        with as_if_on("sm_90a"):
            got = run(fused(model))
    for name in want:
        assert_bitwise_equal(got[name], want[name], name)


def test_a_quantised_input() -> None:
    """Of the same groups it is used as it is; what a user quantised otherwise is quantised anew."""
    mlp = MLP("swiglu", hidden=160, intermediate=128)
    model = mlp.build(TAIL, "cpu", BF16)
    sizes, x = TAIL.tensor(), Inputs.random(TAIL, mlp.hidden, "cpu", BF16).x
    with ops.autocast(recipe=RECIPE):
        again = fused(model)
        want = model(x, sizes, sizes)
        q = quantized(x.nan_to_num(), mxfp8(), columnwise=False)
        with as_if_on("sm_90a"):
            first = ops.Sequential({"quantize": ops.Quantize(), **dict(model.named_children())})
            assert_bitwise_equal(first(x, sizes, sizes).detach(), want.detach(), "quantised for the same groups")
            assert_bitwise_equal(again(q, sizes, sizes).detach(), want.detach(), "quantised by a user")


# ----------------------------------------------------------------------------------------------------------------------
# A pre-activation that is kept quantised


@pytest.mark.parametrize("splits", [TAIL, OFF_TILE], ids=str)
@pytest.mark.parametrize(
    ("activation", "interleave"),
    [("scaled_swiglu", None), ("scaled_swiglu", 32), ("clamped_swiglu", None), ("scaled_srelu", None), ("gelu", None)],
)
def test_kept_quantised(splits: Splits, activation: str, interleave: int | None) -> None:
    """The same y; gradients as unfused, that of the second weight as if the activation had been formed from it."""
    mlp = MLP(activation, hidden=160, intermediate=192, interleave=interleave, bias=True)
    model, inputs = mlp.build(splits, "cpu", BF16), Inputs.random(splits, mlp.hidden, "cpu", BF16)
    with ops.autocast(recipe=RECIPE):
        y = step(model, mlp, inputs)["y"]
    with ops.autocast(recipe=KEPT):
        want = step(model, mlp, inputs)
        with formed_from_kept(model.act):
            again = step(model, mlp, inputs)
        with as_if_on("sm_90a"):
            got = step(fused(model, KEPT), mlp, inputs)
    assert_bitwise_equal(got["y"], y, "y")
    assert got.keys() == want.keys()
    for name, t in want.items():
        t = again[name] if name.startswith("dfc2.weight") else t
        error = relative_error(got[name].float(), t.float())
        assert error <= 0.03, f"{name}: {error:.4f} from the unfused one"


def test_kept_quantised_through_two_splits_is_unfused() -> None:
    mlp, splits = MLP(hidden=160, intermediate=128), Splits("first", (9, 15, 8), 40)
    model, inputs = mlp.build(splits, "cpu", BF16), Inputs.random(splits, mlp.hidden, "cpu", BF16)
    second = torch.tensor([20, 0, 5])
    results = []
    for place in (nullcontext(), as_if_on("sm_90a")):
        with ops.autocast(recipe=KEPT), place:
            x = inputs.x.clone().requires_grad_()
            y = ops.Sequential(dict(model.named_children()))(x, splits.tensor(), inputs.probs, second)
            results.append(torch.autograd.grad(y, [x, *model.parameters()], inputs.dy))
    for a, b in zip(*results, strict=True):
        assert_bitwise_equal(a, b)


def test_on_blackwell_linears_alone_are_fused() -> None:
    model = MLP(hidden=256, intermediate=256, interleave=32).build(TAIL, "cpu", BF16)
    told = model.explain("sm_100a", recipe=KEPT)
    at = next(i for i, line in enumerate(told.splitlines()) if line.startswith("    x grouped_mlp_mxfp8_sm100 "))
    assert "needs preactivation='high_precision'" in told.splitlines()[at]
    assert "2 of 3 ops fused" in told


def test_explain_and_the_picture_show_what_is_kept() -> None:
    model = MLP(hidden=256, intermediate=192).build(EVEN, "cpu", BF16)
    line = "    keeps the pre-activation for backward in MXFP8 E4M3 1x32: 396 bytes a row (768 in bfloat16)"
    assert line in model.explain("sm_90a", recipe=KEPT).splitlines()
    assert "keeps the pre-activation" not in model.explain("sm_90a", recipe=RECIPE)
    kept = {recipe: as_data(model, rows=1024, recipe=recipe)[0]["kept"] for recipe in (RECIPE, KEPT)}
    for recipe, form, size in ((RECIPE, "", 2), (KEPT, ", in FP8", 1)):
        found = [row["bytes"] for row in kept[recipe] if row["what"] == f"what GroupedLinear fc1 gives{form}"]
        assert found == [1024 * 384 * size], kept[recipe]
    scales = [row["bytes"] for row in kept[KEPT] if row["shape"] == [1024, 2 * 8]]
    assert scales == [1024 * 2 * 8]


def test_warm_up_lists_the_kernels_that_keep_it_quantised() -> None:
    model = MLP(hidden=256, intermediate=192, bias=True).build(EVEN, "cpu", BF16)
    found = [options for _, options, _ in kernels_of(model, "sm_90a", Use(recipe=KEPT))]
    kinds = {(o.kind, o.keeps, o.quantized_preact) for o in found if getattr(o, "mxfp8", False)}
    assert kinds == {("act", True, True), ("act", False, False), ("dact", True, True)}


# ----------------------------------------------------------------------------------------------------------------------
# What is launched and kept


def watched(run: Callable[[], object]) -> tuple[object, list[str]]:
    """(what it returns, the operators that it runs, in order)."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profiler:
        result = run()
    events = sorted(profiler.events(), key=lambda e: e.time_range.start)
    return result, [e.name.removeprefix("fusible_ops::") for e in events if e.name.startswith("fusible_ops::")]


def test_launches() -> None:
    """Four forward, six backward; weights are quantised once for all of them."""
    mlp = MLP(hidden=160, intermediate=128)
    model, inputs = mlp.build(EVEN, "cpu", BF16), Inputs.random(EVEN, mlp.hidden, "cpu", BF16)
    sizes = EVEN.tensor()
    forward = ["padded_group_offsets", "mxfp8_quantize", "mxfp8_grouped_gemm_act", "grouped_gemm"]
    backward = ["mxfp8_quantize", "mxfp8_grouped_gemm_dact", "grouped_wgrad", "mxfp8_dequantize", "grouped_wgrad"]
    with ops.autocast(recipe=RECIPE), as_if_on("sm_90a"):
        again = fused(model)
        for i in range(2):
            x, probs = inputs.x.clone().requires_grad_(), inputs.probs.clone().requires_grad_()
            y, calls = watched(lambda x=x, probs=probs: again(x, sizes, probs, sizes))
            once = ["mxfp8_quantize_weight"] * 2 if i == 0 else []
            assert calls == forward[:1] + once + forward[1:]
            assert watched(lambda y=y: y.backward(inputs.dy))[1] == [*backward, "grouped_gemm_dgrad"]


@pytest.mark.parametrize(("hidden", "intermediate"), [(448, 128), (128, 128), (512, 192)])
def test_what_is_kept(hidden: int, intermediate: int) -> None:
    """x in MXFP8 and the pre-activation in BF16, at most 0.85 of what BF16 keeps, or in MXFP8, at most 0.6: the bench's
    shapes, made smaller.
    """
    mlp = MLP(hidden=hidden, intermediate=intermediate)
    splits = Splits("rows", (768, 0, 256, 1024), 2048)
    model, inputs = mlp.build(splits, "cpu", BF16), Inputs.random(splits, mlp.hidden, "cpu", BF16)
    rows, groups = splits.rows, splits.groups

    def kept(recipe: ops.Recipe | None) -> int:
        """Bytes of what is no parameter and of no parameter's size."""
        saved: dict[int, Tensor] = {}

        def keep(t: Tensor) -> Tensor:
            saved[t.untyped_storage().data_ptr()] = t
            return t

        x, probs = inputs.x.clone().requires_grad_(), inputs.probs.clone().requires_grad_()
        chain = ops.Sequential(dict(model.named_children()), on_unfused="error")
        with (
            as_if_on("sm_90a"),
            ops.autocast(enabled=recipe is not None, recipe=recipe or RECIPE),
            torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t),
        ):
            chain(x, *mlp.extras(splits.tensor(), probs))
        return sum(t.nbytes for t in saved.values() if t.dim() < 3 and not isinstance(t, torch.nn.Parameter))

    plain = kept(None)
    room = padded_rows(rows, groups, 32)
    for recipe, bytes_of_preact, share in ((RECIPE, 2, 0.85), (KEPT, 1 + 1 / 32, 0.6)):
        quantised = kept(recipe)
        of_rows = room * hidden * (1 + 1 / 32) + rows * 2 * intermediate * bytes_of_preact
        assert of_rows <= quantised <= of_rows + 8 * rows + 3 * hidden + 64 * groups  # rows of scales in fours
        assert quantised <= share * plain


@pytest.mark.parametrize(
    ("hidden", "intermediate", "groups", "rows"),
    [(7168, 2048, 8, 32768), (2048, 768, 128, 65536), (2880, 2880, 32, 32768)],
    ids=["dsv3_ep32", "qwen3_30b", "gptoss_ep4"],
)
def test_bytes_kept_at_full_size(hidden: int, intermediate: int, groups: int, rows: int) -> None:
    """As Hopper's host functions allocate it for whatever splits; beside weights, the same until an update."""
    model = models.mlp(hidden, intermediate, groups)

    def kept(recipe: ops.Recipe | None) -> int:
        found = as_data(model, rows=rows, recipe=recipe)[0]["kept"]
        return sum(one["bytes"] for one in found if len(one["shape"]) < 3)

    plain = kept(None)
    assert plain == rows * (2 * hidden + 4 * intermediate + 4) + 4 * (groups + 1)
    assert kept(RECIPE) <= 0.85 * plain and kept(KEPT) <= 0.6 * plain
