"""Linears and MLPs fused in NVFP4 for Hopper, on the operators' reference, against the unfused ops in that recipe."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fusible_ops as ops
from cute_kernels.quantization.groups import padded_rows
from fusible_ops.quantized_tensor import QuantizedTensor
from patterns import explain
from tests import recipe_chains
from tests.cases import EVEN, OFF_TILE, SMALL_SPLITS, TAIL, Splits
from tests.compare import assert_bitwise_equal, relative_error
from tests.cpu.test_mxfp8_chains import run_alone
from tests.models import ACTIVATIONS, MLP, Inputs, as_if_on, step
from tests.recipe_chains import MIXES, Results, Run, assert_near, both, partly_frozen

BF16 = torch.bfloat16
RECIPES = {
    "default": ops.NVFP4BlockScaling(),
    "nearest": ops.NVFP4BlockScaling(disable_stochastic_rounding=True),
    "plain": ops.NVFP4BlockScaling(disable_stochastic_rounding=True, disable_rht=True, disable_2d_quantization=True),
    "stochastic_rows": ops.NVFP4BlockScaling(disable_rht=True, disable_2d_quantization=True),
}
NEAREST = RECIPES["nearest"]
FAR = 0.1
ROUNDING = 2**-7
"""Results that are rounded to BF16 once, from sums in another order and with alpha after them."""


def fused(model: ops.Sequential, recipe: ops.Recipe) -> ops.Sequential:
    return recipe_chains.fused(model, recipe, "_nvfp4")


def compare(model: ops.Sequential, run: Run, recipe: ops.Recipe = NEAREST, exact: Results | None = None) -> None:
    """A step of E2M1 is up to a third of a value, and one rounding to BF16 before it tips some values. So gradients are
    near the unfused ones, and as accurate.
    """
    got, want = both(model, run, recipe, fused)
    assert_near(got, want, FAR, exact)


def compare_mlp(mlp: MLP, splits: Splits, recipe: ops.Recipe = NEAREST) -> None:
    model = mlp.build(splits, "cpu", BF16)
    inputs = Inputs.random(splits, mlp.hidden, "cpu", BF16)
    other = mlp.build(splits, "cpu", torch.float32)
    other.load_state_dict(model.state_dict())
    exact = step(other, mlp, inputs.to(torch.float32))
    compare(model, lambda m: step(m, mlp, inputs), recipe, exact if splits.used > 8 else None)


@pytest.mark.parametrize("splits", [*SMALL_SPLITS, OFF_TILE], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_linear_alone(splits: Splits, recipe: str) -> None:
    """Nothing lies between quantise and product: all but the order of sums is the unfused one's, random bits too."""
    model = ops.Sequential(ops.GroupedLinear(splits.groups, 160, 96, bias=True, device="cpu", dtype=BF16))
    x, dy = torch.randn(splits.rows, 160).bfloat16(), torch.randn(splits.rows, 96).bfloat16()
    x[splits.used :], dy[splits.used :] = float("nan"), float("nan")

    def run(m: ops.Sequential) -> dict[str, Tensor]:
        m.zero_grad()
        own = x.clone().requires_grad_()
        y = m(own, splits.tensor())
        y.backward(dy)
        return {"y": y.detach(), "dx": own.grad, **{name: p.grad for name, p in m.named_parameters()}}

    got, want = both(model, run, RECIPES[recipe], fused)
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=ROUNDING, atol=2e-4)


@pytest.mark.parametrize("splits", [*SMALL_SPLITS, OFF_TILE], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_grouped_mlp(splits: Splits, recipe: str) -> None:
    compare_mlp(MLP(hidden=160, intermediate=192, bias=True, scale_bias=True), splits, RECIPES[recipe])


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
        (MLP(hidden=96, intermediate=128, interleave=64), NEAREST, "glu_interleave"),
        (MLP(hidden=96, intermediate=128, linear={"transposed_weight": True}), NEAREST, "weights [N, K]"),
        (MLP(hidden=96, intermediate=128), ops.NVFP4BlockScaling(backward_override="dequantized"), "override"),
    ],
    ids=["interleave", "transposed", "override"],
)
def test_what_runs_unfused_says_why(mlp: MLP, recipe: ops.Recipe, reason: str) -> None:
    model = mlp.build(TAIL, "cpu", BF16)
    with as_if_on("sm_90a"):
        told = explain(model.groups()[0].plan(model._target("sm_90a"), None, recipe))
    line, *_ = [line for line in told.splitlines() if line.startswith("    x grouped_mlp_nvfp4 ")]
    assert reason in line


@pytest.mark.parametrize("recipe", ["nearest", "plain"])
def test_weights_that_are_held_quantised(recipe: str) -> None:
    mlp = MLP(hidden=160, intermediate=128)
    with ops.quantized_model_init(recipe=RECIPES[recipe]):
        model = mlp.build(EVEN, "cpu", BF16)
    inputs = Inputs.random(EVEN, mlp.hidden, "cpu", BF16)
    assert isinstance(model[0].weight0, QuantizedTensor)
    compare(model, lambda m: step(m, mlp, inputs), RECIPES[recipe])
    compare(model, lambda m: step(m, mlp, inputs), RECIPES["plain" if recipe == "nearest" else "nearest"])


@pytest.mark.parametrize(
    "held",
    [ops.MXFP8BlockScaling(), ops.Float8BlockScaling(), ops.Float8CurrentScaling()],
    ids=lambda r: type(r).__name__,
)
def test_weights_that_are_held_in_another_format_are_not_quantised_again(held: ops.Recipe) -> None:
    splits = EVEN
    with ops.quantized_model_init(recipe=held):
        model = ops.Sequential(ops.GroupedLinear(splits.groups, 160, 96, bias=True, device="cpu", dtype=BF16))
    x, dy = torch.randn(splits.rows, 160).bfloat16(), torch.randn(splits.rows, 96).bfloat16()

    def run(m: ops.Sequential) -> dict[str, Tensor]:
        own = x.clone().requires_grad_()
        y = m(own, splits.tensor())
        y.backward(dy)
        return {"y": y.detach(), "dx": own.grad}

    got, want = both(model, run, RECIPES["default"], fused)
    for name in want:
        assert relative_error(got[name].float(), want[name].float()) <= ROUNDING, name


def test_bits_are_drawn_where_a_gradient_arrives() -> None:
    """As unfused: a frozen first linear whose input wants no gradient draws none, and leaves the second its bits."""
    model = ops.Sequential(
        ops.Linear(96, 256, device="cpu", dtype=BF16), ops.SwiGLU(), ops.Linear(128, 64, device="cpu", dtype=BF16)
    )
    model[0].requires_grad_(False)
    rows = torch.randn(160, 96).bfloat16()
    drawn = []

    def run(m: ops.Sequential) -> dict[str, Tensor]:
        m.zero_grad()
        y = m(rows)
        drawn.append(torch.get_rng_state())
        y.backward(torch.ones_like(y))
        return {"y": y.detach(), **{name: p.grad for name, p in m.named_parameters() if p.grad is not None}}

    compare(model, run, RECIPES["default"])
    assert_bitwise_equal(*drawn)


@MIXES
def test_frozen_parts(wants: tuple[bool, bool, bool, bool]) -> None:
    compare(*partly_frozen(wants))


def test_dense_mlp() -> None:
    """With a weight that is frozen and a bias that is not."""
    common = {"device": "cpu", "dtype": BF16}
    x, dy = torch.randn(2, 80, 160).bfloat16(), torch.randn(2, 80, 96).bfloat16()
    model = ops.Sequential(ops.Linear(160, 256, **common), ops.SwiGLU(), ops.Linear(128, 96, **common))
    weights = [p for p in model.parameters() if p.dim() == 2]

    def run(m: ops.Sequential) -> dict[str, Tensor]:
        m.zero_grad()
        own = x.clone().requires_grad_()
        y = m(own)
        y.backward(dy)
        grads = {name: p.grad for name, p in m.named_parameters() if p.grad is not None}
        return {"y": y.detach(), "dx": own.grad, **grads}

    compare(model, run)
    for w in weights:
        w.requires_grad_(False)
    compare(model, run)
    rows = torch.randn(160, 128).bfloat16()
    compare(ops.Sequential(model[2]), lambda m: run_alone(m, rows))


def test_a_quantised_input() -> None:
    """Of the same groups it is used as it is."""
    mlp = MLP("swiglu", hidden=160, intermediate=128)
    model = mlp.build(TAIL, "cpu", BF16)
    sizes, inputs = TAIL.tensor(), Inputs.random(TAIL, mlp.hidden, "cpu", BF16)
    with ops.autocast(recipe=NEAREST), as_if_on("sm_90a"):
        chains = fused(model, NEAREST), ops.Sequential({"q": ops.Quantize(), **dict(model.named_children())})
        results = []
        for chain in chains:
            model.zero_grad()
            y = chain(inputs.x.clone().requires_grad_(), sizes, sizes)  # else a Quantize makes no copy for gradients
            y.backward(inputs.dy)
            results.append([y.detach(), *(p.grad.clone() for p in model.parameters())])
    for one, other in zip(*results, strict=True):
        assert_bitwise_equal(one, other)


class Amaxes(TorchDispatchMode):
    """Shapes of what largest magnitudes are looked for in, by a launch that does nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.fusible_ops.nvfp4_amax.default:
            self.shapes.append(tuple(args[0].shape))
        return func(*args, **(kwargs or {}))


def test_only_what_comes_from_outside_is_read_for_its_largest_magnitudes() -> None:
    """x and dy; those of the activation and of the pre-activation's gradient come from the products that store them."""
    mlp = MLP(hidden=160, intermediate=192)
    model, inputs = mlp.build(TAIL, "cpu", BF16), Inputs.random(TAIL, mlp.hidden, "cpu", BF16)
    with ops.autocast(recipe=RECIPES["default"]), as_if_on("sm_90a"), Amaxes() as amaxes:
        step(fused(model, RECIPES["default"]), mlp, inputs)
    assert amaxes.shapes == [(TAIL.rows, mlp.hidden)] * 2


def test_what_is_kept() -> None:
    """x and the activation in four bits and a half, the pre-activation in BF16."""
    mlp = MLP(hidden=448, intermediate=128)
    splits = Splits("rows", (384, 0, 128, 512), 1024)
    model, inputs = mlp.build(splits, "cpu", BF16), Inputs.random(splits, mlp.hidden, "cpu", BF16)
    rows, groups = splits.rows, splits.groups
    saved: dict[int, Tensor] = {}

    def keep(t: Tensor) -> Tensor:
        saved[t.untyped_storage().data_ptr()] = t
        return t

    x, probs = inputs.x.clone().requires_grad_(), inputs.probs.clone().requires_grad_()
    chain = fused(model, RECIPES["default"])
    with (
        as_if_on("sm_90a"),
        ops.autocast(recipe=RECIPES["default"]),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t),
    ):
        chain(x, *mlp.extras(splits.tensor(), probs))
    found = sum(t.nbytes for t in saved.values() if t.dim() < 3 and not isinstance(t, torch.nn.Parameter))
    four_bits = padded_rows(rows, groups) * (448 + 128) * (0.5 + 1 / 16)
    assert four_bits + rows * 256 * 2 <= found <= four_bits + rows * 256 * 2 + 8 * rows + 128 * groups
