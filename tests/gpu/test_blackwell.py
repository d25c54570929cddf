"""cuDNN Frontend's kernels on a Blackwell: each adapter against the reference, and the fused layer against unfused.

Not run yet. The reference is `cute_kernels.blackwell.reference`; what it stands on was compared with Hopper's kernels.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor

import fusible_ops as ops
from cute_kernels import launch
from cute_kernels.activation import Activation
from cute_kernels.blackwell import padded, reference
from cute_kernels.blackwell.rows import PaddedGroups
from cute_kernels.catalog import BLACKWELL
from tests.cases import Splits, full
from tests.compare import assert_as_accurate, assert_bitwise_equal, relative_error
from tests.models import MLP, Inputs, no_host_sync, step

pytestmark = pytest.mark.gpu(*BLACKWELL)

SPLITS = (
    full("one", 200),
    full("zeros", 0, 130, 0, 257),
    Splits("tail", (96, 0, 130, 74), 512),
    Splits("no_tokens", (0, 0, 0, 0), 64),
    Splits("no_rows", (0, 0, 0, 0), 0),
    full("uneven", 1, 0, 509, 256, 1, 0, 2, 1),
)
HIDDEN, WIDTH = 512, 256
SWIGLU, CLAMPED = Activation("swiglu"), Activation("clamped_swiglu", 7.0, 1.702, 0.5)


def bf16(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device="cuda") * scale).bfloat16()


class Case:
    """Operands on padded rows."""

    def __init__(self, splits: Splits) -> None:
        offsets = torch.tensor([0, *torch.tensor(splits.sizes).cumsum(0)], dtype=torch.int32, device="cuda")
        where = PaddedGroups(offsets, splits.rows)
        self.ends, experts, m = where.ends, splits.groups, where.padded
        self.x, self.dy = where.pad(bf16(splits.rows, HIDDEN)), where.pad(bf16(splits.rows, HIDDEN))
        self.probs = where.pad(torch.rand(splits.rows, device="cuda").bfloat16().float())
        self.act, self.preact = where.pad(bf16(splits.rows, WIDTH)), bf16(m, 2 * WIDTH, scale=3.0)
        self.w1, self.b1 = bf16(experts, 2 * WIDTH, HIDDEN, scale=HIDDEN**-0.5), bf16(experts, 2 * WIDTH)
        self.w2, self.b2 = bf16(experts, HIDDEN, WIDTH, scale=WIDTH**-0.5), bf16(experts, HIDDEN)


def compare(name: str, *arguments: object) -> None:
    """The function of `padded` is as accurate as that of `reference`."""
    got, plain = (getattr(module, name)(*arguments) for module in (padded, reference))
    exact = getattr(reference, name)(*map(_widened, arguments))
    for i, parts in enumerate(zip(*(r if isinstance(r, tuple) else (r,) for r in (got, plain, exact)), strict=True)):
        if parts[0] is not None:
            assert_as_accurate(*parts, f"{name}[{i}]")


def _widened(argument: object) -> object:
    if isinstance(argument, list):
        return [_widened(t) for t in argument]
    return argument.float() if isinstance(argument, Tensor) and argument.is_floating_point() else argument


@pytest.mark.parametrize("splits", SPLITS, ids=str)
@pytest.mark.parametrize("activation", [SWIGLU, CLAMPED], ids=lambda a: a.kind)
def test_glu_and_dglu(splits: Splits, activation: Activation) -> None:
    case = Case(splits)
    for bias, probs in ((None, None), (case.b1, case.probs)):
        compare("padded_gemm_act", case.x, [case.w1], case.ends, activation, bias, probs)
    for probs, need_dprobs in ((None, False), (case.probs, False), (case.probs, True)):
        backward = (case.dy, [case.w2], case.ends, case.preact, activation, probs, need_dprobs, need_dprobs)
        compare("padded_gemm_dact", *backward)


@pytest.mark.parametrize("splits", SPLITS, ids=str)
def test_products_and_weight_gradients(splits: Splits) -> None:
    case = Case(splits)
    for bias, scale in ((None, None), (case.b2, None), (case.b2, case.probs), (None, case.probs)):
        compare("padded_gemm", case.act, [case.w2], case.ends, bias, scale)
    compare("padded_gemm", case.preact, [case.w1.mT], case.ends)
    compare("padded_wgrad", case.dy, case.act, case.ends)
    for accumulate in (False, True):
        out = [torch.full((splits.groups, HIDDEN, WIDTH), 3.0, device="cuda") for _ in range(3)]
        padded.padded_wgrad_([out[0]], case.dy, case.act, case.ends, accumulate)
        reference.padded_wgrad_([out[1]], case.dy, case.act, case.ends, accumulate)
        reference.padded_wgrad_([out[2]], case.dy.float(), case.act.float(), case.ends, accumulate)
        assert_as_accurate(*out, f"accumulate={accumulate}")


MXFP8, NVFP4 = ops.MXFP8BlockScaling(), ops.NVFP4BlockScaling(disable_stochastic_rounding=True)
EACH = pytest.mark.parametrize("recipe", [None, MXFP8, NVFP4], ids=["bf16", "mxfp8", "nvfp4"])
CHAINS = [
    *((activation, recipe) for activation in ("swiglu", "scaled_swiglu") for recipe in (None, MXFP8, NVFP4)),
    *(
        (activation, recipe)
        for activation in ("scaled_clamped", "srelu", "scaled_srelu", "scaled_tanh_srelu")
        for recipe in (MXFP8, NVFP4)
    ),
]


def under(recipe: ops.Recipe | None) -> AbstractContextManager:
    return ops.autocast(recipe=recipe) if recipe else nullcontext()


@pytest.mark.parametrize(("activation", "recipe"), CHAINS, ids=lambda value: str(value).partition("(")[0])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("splits", SPLITS, ids=str)
def test_layer(activation: str, bias: bool, splits: Splits, recipe: ops.Recipe | None) -> None:
    """A training step without a host sync: as accurate as unfused, against FP32 without a recipe and, where there is
    one, with it; and zero in the tail.
    """
    mlp = MLP(activation, HIDDEN, WIDTH, bias=bias, scale_bias=bias)
    model = mlp.build(splits, "cuda", torch.bfloat16, on_unfused="error")
    plain = mlp.build(splits, "cuda", torch.bfloat16, rules=())
    plain.load_state_dict(model.state_dict())
    if mlp.gated:
        model.pack_glu_weights_()
    inputs = Inputs.random(splits, HIDDEN, "cuda", torch.bfloat16)
    with under(recipe):
        step(model, mlp, inputs, torch.int32)
        with no_host_sync("cuda"):
            fused = step(model, mlp, inputs, torch.int32)
        unfused = step(plain, mlp, inputs)
    if mlp.gated:
        for name in [name for name in fused if name.startswith("dfc1")]:
            dim = model[0].output_dim(name.removeprefix("dfc1."))
            fused[name] = model[0].packing.out_of_memory(fused[name], dim)
    for exact_recipe in {None, recipe}:
        with under(exact_recipe):
            exact = step(copy.deepcopy(plain).float(), mlp, inputs.to(torch.float32))
        for kind in {name.rstrip("0123456789") for name in fused}:  # of few rows, one value decides
            names = [name for name in fused if name.rstrip("0123456789") == kind]
            pieces = [torch.cat([t[name].flatten() for name in names]) for t in (fused, unfused, exact)]
            assert_as_accurate(*pieces[:2], pieces[2].to(pieces[0].dtype).float(), kind)
    for name in ("y", "dx", "dprobs"):
        if name in fused:
            assert (fused[name][splits.used :] == 0).all(), f"{name} is not zero in the tail"


def test_random_rounding_is_right_in_the_mean() -> None:
    """In NVFP4 the mean of 32 steps is closer to FP32 than a step is."""
    splits = SPLITS[2]
    mlp = MLP("scaled_swiglu", HIDDEN, WIDTH, interleave=32)
    model = mlp.build(splits, "cuda", torch.bfloat16)
    inputs = Inputs.random(splits, HIDDEN, "cuda", torch.bfloat16)
    with ops.autocast(recipe=ops.NVFP4BlockScaling()):
        steps = [step(model, mlp, inputs) for _ in range(32)]
    exact = step(copy.deepcopy(model).float(), mlp, inputs.to(torch.float32))
    for name in ("dx", "dfc1.weight0", "dfc2.weight0"):
        mean = torch.stack([results[name].float() for results in steps]).mean(0)
        assert relative_error(mean, exact[name]) < relative_error(steps[0][name].float(), exact[name]), name


@pytest.mark.parametrize("activation", [ops.SwiGLU, ops.SReLU], ids=lambda a: a.__name__)
@pytest.mark.parametrize("recipe", [MXFP8, NVFP4], ids=["mxfp8", "nvfp4"])
def test_dense_layer(activation: Callable, recipe: ops.Recipe) -> None:
    """One group that holds every row."""
    common = {"bias": True, "device": "cuda", "dtype": torch.bfloat16}
    width = WIDTH * (2 if activation is ops.SwiGLU else 1)
    model = ops.Sequential(
        ops.Linear(HIDDEN, width, **common),
        activation(**{"glu_interleave_size": 32} if activation is ops.SwiGLU else {}),
        ops.Linear(WIDTH, HIDDEN, **common),
    )
    x, dy, results = bf16(2, 65, HIDDEN), bf16(2, 65, HIDDEN), []
    for rules, dtype in ((model.rules, torch.bfloat16), ((), torch.bfloat16), ((), torch.float32)):
        model.to(dtype)
        model.rules, model.on_unfused = rules, "allow" if rules == () else "error"
        model.zero_grad()
        leaf = x.clone().to(dtype).requires_grad_()
        with ops.autocast(recipe=recipe):
            y = model(leaf)
        y.backward(dy.to(dtype))
        results.append([y.detach(), leaf.grad, *(p.grad for p in model.parameters())])
    for fused, unfused, exact in zip(*results, strict=True):
        assert_as_accurate(fused, unfused, exact.float())


@EACH
@pytest.mark.parametrize("splits", SPLITS, ids=str)
def test_linear_alone(splits: Splits, recipe: ops.Recipe | None) -> None:
    """The same of a grouped linear by itself, with a bias that is scaled in each row."""
    common = {"bias": True, "scale_bias": True, "device": "cuda", "dtype": torch.bfloat16}
    model = ops.Sequential(ops.GroupedLinear(splits.groups, HIDDEN, WIDTH, **common), on_unfused="error")
    plain = copy.deepcopy(model)
    plain.rules, plain.on_unfused = (), "allow"
    x, dy, scales = bf16(splits.rows, HIDDEN), bf16(splits.rows, WIDTH), torch.rand(splits.rows, device="cuda")
    for t in (x, dy, scales):
        t[splits.used :] = float("nan")

    def run(model: ops.Sequential, dtype: torch.dtype, recipe: ops.Recipe | None) -> dict[str, Tensor]:
        model.zero_grad()
        given, factors = x.clone().to(dtype).requires_grad_(), scales.clone().requires_grad_()
        with under(recipe):
            y = model(given, splits.tensor("cuda", torch.int32), factors)
        y.backward(dy.to(dtype))
        return {"y": y.detach(), "dx": given.grad, "dscales": factors.grad} | {
            name: p.grad for name, p in model.named_parameters()
        }

    run(model, torch.bfloat16, recipe)
    with no_host_sync("cuda"):
        fused = run(model, torch.bfloat16, recipe)
    unfused = run(plain, torch.bfloat16, recipe)
    exact = run(copy.deepcopy(plain).float(), torch.float32, None)
    for name, value in fused.items():
        assert_as_accurate(value, unfused[name], exact[name].to(value.dtype).float(), name)
    for name in ("y", "dx", "dscales"):
        assert (fused[name][splits.used :] == 0).all(), f"{name} is not zero in the tail"


@EACH
@pytest.mark.parametrize("activation", ["swiglu", "scaled_swiglu"])
def test_sums_by_atomics(activation: str, recipe: ops.Recipe | None) -> None:
    """`deterministic=False`: no less accurate than unfused in the same recipe."""
    splits = SPLITS[2]
    mlp = MLP(activation, HIDDEN, WIDTH, bias=True, interleave=32)
    model = mlp.build(splits, "cuda", torch.bfloat16, on_unfused="error", deterministic=False)
    plain = copy.deepcopy(model)
    plain.rules, plain.on_unfused = (), "allow"
    inputs = Inputs.random(splits, HIDDEN, "cuda", torch.bfloat16)
    with under(recipe):
        fused, unfused = step(model, mlp, inputs), step(plain, mlp, inputs)
    exact = step(copy.deepcopy(plain).float(), mlp, inputs.to(torch.float32))
    for name, value in fused.items():
        assert_as_accurate(value, unfused[name], exact[name].to(value.dtype).float(), name)


@EACH
def test_the_same_bits_run_after_run(recipe: ops.Recipe | None) -> None:
    """500 runs: the race of NVIDIA/cudnn-frontend#652 showed in a few of a hundred."""
    splits = full("eight", *[1024] * 8)
    mlp = MLP("scaled_swiglu", HIDDEN, WIDTH, bias=True, scale_bias=True)
    model = mlp.build(splits, "cuda", torch.bfloat16, on_unfused="allow").pack_glu_weights_()
    inputs = Inputs.random(splits, HIDDEN, "cuda", torch.bfloat16)
    with under(recipe):
        want = {name: t.clone() for name, t in step(model, mlp, inputs).items()}
        for _ in range(500):
            for name, t in step(model, mlp, inputs).items():
                assert_bitwise_equal(t, want[name], name)


@EACH
def test_one_compile_for_every_row_count_and_one_graph_for_every_split(recipe: ops.Recipe | None) -> None:
    splits = Splits("graph", (100, 0, 300, 50), 512)
    mlp = MLP("scaled_swiglu", HIDDEN, WIDTH)
    model = mlp.build(splits, "cuda", torch.bfloat16, on_unfused="allow").pack_glu_weights_()
    with under(recipe):
        step(model, mlp, Inputs.random(splits, HIDDEN, "cuda", torch.bfloat16))
        with launch.no_compile():
            for rows in (1, 64, 300, 4096, 4097):
                step(model, mlp, Inputs.random(Splits("rows", (rows, 0, 0, 0), rows), HIDDEN, "cuda", torch.bfloat16))
    x, probs = bf16(512, HIDDEN), torch.rand(512, device="cuda")
    sizes = splits.tensor("cuda")
    with torch.no_grad(), under(recipe):
        graph = torch.cuda.CUDAGraph()
        model(x, sizes, probs, sizes)
        with torch.cuda.graph(graph):
            y = model(x, sizes, probs, sizes)
        for others in ((512, 0, 0, 0), (0, 0, 0, 512), (7, 121, 256, 64)):
            sizes.copy_(torch.tensor(others))
            graph.replay()
            assert_bitwise_equal(y, model(x, sizes, probs, sizes), str(others))


@pytest.mark.parametrize("margin", [0, 16])
def test_a_margin_changes_no_bit(margin: int) -> None:
    splits = SPLITS[2]
    mlp = MLP("scaled_swiglu", HIDDEN, WIDTH, bias=True)
    model = mlp.build(splits, "cuda", torch.bfloat16).pack_glu_weights_()
    inputs = Inputs.random(splits, HIDDEN, "cuda", torch.bfloat16)
    want = step(model, mlp, inputs)
    model.sm_margin = margin
    for name, t in step(model, mlp, inputs).items():
        assert_bitwise_equal(t, want[name], name)
