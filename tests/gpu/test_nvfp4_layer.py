"""The whole NVFP4 layer on Hopper: beside the unfused one, launches, graphs, the same bits, memory nobody wrote."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import fusible_ops as ops
from fusible_ops.fused import grouped_mlp_nvfp4, nvfp4_parts
from tests.bench.timing import launches
from tests.cases import SPLITS, Splits
from tests.compare import assert_bitwise_equal, relative_error
from tests.gpu.test_mxfp8_layer import FULL, TAIL, Layer
from tests.models import ACTIVATIONS, MLP, Inputs, step
from tests.places import HOPPER

pytestmark = HOPPER
RECIPE, NEAREST = ops.NVFP4BlockScaling(), ops.NVFP4BlockScaling(disable_stochastic_rounding=True)
PLAIN = ops.NVFP4BlockScaling(disable_stochastic_rounding=True, disable_rht=True, disable_2d_quantization=True)
RECIPES = {"default": RECIPE, "nearest": NEAREST, "plain": PLAIN}
NEAR = 0.1
"""A rounding of BF16 that falls otherwise moves E2M1 values by a step, up to a third of them."""


def compare(mlp: MLP, splits: Splits, recipe: ops.Recipe = NEAREST) -> None:
    model = mlp.build(splits, "cuda", torch.bfloat16, on_unfused="error")
    inputs = Inputs.random(splits, mlp.hidden, "cuda", torch.bfloat16)
    results = []
    with ops.autocast(recipe=recipe):
        for each in (model, ops.Sequential(dict(model.named_children()), rules=())):
            torch.manual_seed(7)
            results.append(step(each, mlp, inputs))
    got, want = results
    assert got.keys() == want.keys()
    for name, t in want.items():
        assert got[name].isfinite().all(), name
        error = relative_error(got[name].float(), t.float())
        assert error <= NEAR, f"{name}: {error:.4f} from the unfused one"


@pytest.mark.parametrize("splits", [*SPLITS, TAIL], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_beside_the_unfused_layer(splits: Splits, recipe: str) -> None:
    compare(MLP(hidden=160, intermediate=192, bias=True, scale_bias=True), splits, RECIPES[recipe])


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation(activation: str) -> None:
    compare(MLP(activation, hidden=256, intermediate=320), TAIL)


def test_interleaved_rows() -> None:
    compare(MLP(hidden=256, intermediate=320, interleave=32, bias=True), TAIL)


@pytest.mark.parametrize("splits", [TAIL, FULL], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_linear_alone(splits: Splits, recipe: str) -> None:
    """The same random bits, and sums in another order, rounded once."""
    op = ops.GroupedLinear(splits.groups, 256, 320, bias=True, device="cuda", dtype=torch.bfloat16)
    x, dy = (torch.randn(splits.rows, width, device="cuda").bfloat16() for width in (256, 320))
    x[splits.used :] = dy[splits.used :] = float("nan")
    results = []
    for options in ({"on_unfused": "error"}, {"rules": ()}):
        model, own = ops.Sequential(op, **options), x.clone().requires_grad_()
        torch.manual_seed(7)
        with ops.autocast(recipe=RECIPES[recipe]):
            y = model(own, splits.tensor("cuda"))
        results.append([y.detach(), *torch.autograd.grad(y, [own, *op.parameters()], dy)])
    for i, (a, b) in enumerate(zip(*results, strict=True)):
        assert relative_error(a.float(), b.float()) <= 4e-3, f"result {i}"


def gradients(layer: Layer) -> list[Tensor]:
    torch.manual_seed(7)
    return layer.gradients()


def test_launches() -> None:
    """Beside the kernels, memory set to zero for maxima, and both gradients' random bits."""
    layer = Layer(recipe=RECIPE)
    layer.gradients()
    y: list[Tensor] = []
    assert len(launches(lambda: y.append(layer.forward()))) <= 10
    wanted = [layer.x, layer.probs, *layer.model.parameters()]
    assert len(launches(lambda: torch.autograd.grad(y[0], wanted, layer.inputs.dy))) <= 12


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("splits", [TAIL, FULL], ids=str)
def test_maxima_from_products_change_no_bits(splits: Splits, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside looking for them in memory."""
    layer = Layer(splits, RECIPES[recipe], bias=True)
    want = gradients(layer)

    def looking(*args: Any, maxima: object = None, **how: Any) -> nvfp4_parts.Operand:
        return nvfp4_parts.operand_of(*args, **how)

    monkeypatch.setattr(grouped_mlp_nvfp4, "operand_of", looking)
    for i, (a, b) in enumerate(zip(gradients(layer), want, strict=True)):
        assert_bitwise_equal(a, b, f"result {i}")


def test_memory_that_nobody_wrote_is_never_used() -> None:
    """NaN wherever the allocator gives memory out: tails, padding of what is stored."""
    layer = Layer(TAIL, RECIPE, bias=True, scale_bias=True)
    want = gradients(layer)
    for _ in range(3):
        blocks = [torch.full((2**i,), float("nan"), device="cuda") for i in range(7, 24) for _ in range(8)]
        del blocks
        with torch.no_grad():
            for p in layer.model.parameters():
                p.mul_(1)  # quantise the weights anew
        for i, (a, b) in enumerate(zip(gradients(layer), want, strict=True)):
            assert a.isfinite().all()
            assert_bitwise_equal(a, b, f"result {i}")


def test_same_bits_in_100_runs() -> None:
    sizes = tuple(int(i * 397 % 611) for i in range(16))
    splits = Splits("uneven", sizes, sum(sizes) + 50)
    layer = Layer(splits, RECIPE, hidden=512, intermediate=384, bias=True)
    first = gradients(layer)
    different = torch.zeros(len(first), dtype=torch.int64, device="cuda")
    for _ in range(100):
        pairs = zip(gradients(layer), first, strict=True)
        different += torch.stack([(a.view(torch.uint8) != b.view(torch.uint8)).sum() for a, b in pairs])
    assert different.tolist() == [0] * len(first)


def test_graph_of_a_step_draws_other_bits_at_every_replay() -> None:
    """And without random bits gives those of an eager step."""
    for recipe in (NEAREST, RECIPE):
        layer = Layer(TAIL, recipe)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            want = layer.gradients()
            layer.gradients()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = layer.gradients()
        seen = []
        for _ in range(2):
            graph.replay()
            seen.append([t.clone() for t in got])
        assert_bitwise_equal(seen[0][0], want[0], "y")
        same = [torch.equal(a, b) for a, b in zip(*seen, strict=True)]
        assert all(same) if recipe is NEAREST else not all(same)


def test_separate_and_stacked_weights_give_the_same_bits() -> None:
    layer = Layer(recipe=RECIPE)
    want = gradients(layer)
    for p in reversed(list(layer.model.parameters())):
        p.data = p.data.clone()
    for i, (a, b) in enumerate(zip(gradients(layer), want, strict=True)):
        assert_bitwise_equal(a, b, f"result {i}")


def test_dynamic_scheduling_and_a_margin_give_the_same_bits() -> None:
    layer = Layer(recipe=RECIPE)
    want = gradients(layer)
    for options in ({"scheduler": "dynamic"}, {"sm_margin": 16}):
        layer.model = ops.Sequential(dict(copy.copy(layer.model).named_children()), on_unfused="error", **options)
        for i, (a, b) in enumerate(zip(gradients(layer), want, strict=True)):
            assert_bitwise_equal(a, b, f"result {i} with {options}")
