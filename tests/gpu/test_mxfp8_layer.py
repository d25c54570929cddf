"""The whole MXFP8 layer on Hopper: beside the unfused one, launches, graphs, the same bits, memory nobody wrote."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

import fusible_ops as ops
from tests.bench.timing import launches
from tests.cases import SPLITS, Splits, full
from tests.compare import assert_bitwise_equal, relative_error
from tests.models import ACTIVATIONS, MLP, Inputs, formed_from_kept, step
from tests.places import HOPPER

pytestmark = HOPPER
RECIPE, SQUARE = ops.MXFP8BlockScaling(), ops.MXFP8BlockScaling(enable_2d_quantization=True)
TAIL = Splits("tail", (96, 0, 130, 74), 512)
FULL = full("full", 200, 0, 130, 182)
KEPT = ops.MXFP8BlockScaling(preactivation="quantized")
NEAR = 0.03
"""How far results may be from the unfused ones: a rounding of BF16 that falls otherwise moves E4M3 values by a step."""


class Layer:
    """A fused layer, its inputs and whole steps of it under the recipe."""

    def __init__(self, splits: Splits = FULL, recipe: ops.Recipe | None = RECIPE, **options: object) -> None:
        self.mlp, self.splits, self.recipe = MLP(**{"hidden": 256, "intermediate": 192, **options}), splits, recipe
        self.model = self.mlp.build(splits, "cuda", torch.bfloat16, on_unfused="error")
        self.inputs = Inputs.random(splits, self.mlp.hidden, "cuda", torch.bfloat16)
        self.sizes = splits.tensor("cuda")
        self.x, self.probs = self.inputs.x.requires_grad_(), self.inputs.probs.requires_grad_()

    def forward(self, model: ops.Sequential | None = None) -> Tensor:
        with ops.autocast(enabled=self.recipe is not None, recipe=self.recipe):
            return (model or self.model)(self.x, *self.mlp.extras(self.sizes, self.probs))

    def gradients(self) -> list[Tensor]:
        """y and the gradients of x, probs and all parameters."""
        y = self.forward()
        wanted = [self.x, self.probs, *self.model.parameters()]
        return [y.detach(), *torch.autograd.grad(y, wanted, self.inputs.dy)]


def compare(mlp: MLP, splits: Splits, recipe: ops.Recipe = RECIPE) -> None:
    model = mlp.build(splits, "cuda", torch.bfloat16, on_unfused="error")
    inputs = Inputs.random(splits, mlp.hidden, "cuda", torch.bfloat16)
    with ops.autocast(recipe=recipe):
        got = step(model, mlp, inputs)
        want = step(ops.Sequential(dict(model.named_children()), rules=()), mlp, inputs)
    assert got.keys() == want.keys()
    for name, t in want.items():
        assert got[name].isfinite().all(), name
        error = relative_error(got[name].float(), t.float())
        assert error <= NEAR, f"{name}: {error:.4f} from the unfused one"


@pytest.mark.parametrize("splits", [*SPLITS, TAIL], ids=str)
@pytest.mark.parametrize("recipe", [RECIPE, SQUARE], ids=["rows", "square"])
def test_beside_the_unfused_layer(splits: Splits, recipe: ops.Recipe) -> None:
    compare(MLP(hidden=160, intermediate=192, bias=True, scale_bias=True), splits, recipe)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation(activation: str) -> None:
    compare(MLP(activation, hidden=256, intermediate=320), TAIL)


def test_interleaved_rows() -> None:
    compare(MLP(hidden=256, intermediate=320, interleave=32, bias=True), TAIL)


@pytest.mark.parametrize("splits", [TAIL, FULL], ids=str)
def test_kept_quantised(splits: Splits) -> None:
    """The same y as without; gradients near the unfused ones, the second weight's as if act came from what is kept."""
    for mlp in (MLP(hidden=160, intermediate=192, bias=True), MLP("scaled_srelu", hidden=256, intermediate=320)):
        model = mlp.build(splits, "cuda", torch.bfloat16, on_unfused="error")
        inputs = Inputs.random(splits, mlp.hidden, "cuda", torch.bfloat16)
        with ops.autocast(recipe=RECIPE):
            y = step(model, mlp, inputs)["y"]
        with ops.autocast(recipe=KEPT):
            got = step(model, mlp, inputs)
            unfused = ops.Sequential(dict(model.named_children()), rules=())
            want = step(unfused, mlp, inputs)
            with formed_from_kept(model.act):
                again = step(unfused, mlp, inputs)
        assert_bitwise_equal(got["y"], y, "y")
        for name, t in want.items():
            t = again[name] if name.startswith("dfc2.weight") else t
            error = relative_error(got[name].float(), t.float())
            assert error <= NEAR, f"{name}: {error:.4f} from the unfused one"


@pytest.mark.parametrize(
    ("hidden", "intermediate", "rows", "most"),
    [(7168, 2048, 4096, 0.7), (2880, 2880, 1024, 0.85), (2048, 768, 512, 0.75)],
)
def test_bytes_kept(hidden: int, intermediate: int, rows: int, most: float) -> None:
    """Of x and the pre-activation, and a little: with a quantised one at most 0.6 of what BF16 keeps. rows: of each
    group. x has room for each group's rows to be padded to 32.
    """
    splits = full("even", *([rows] * 4))
    kept = []
    for recipe in (None, RECIPE, KEPT):
        layer = Layer(splits, recipe, hidden=hidden, intermediate=intermediate)
        saved: dict[int, Tensor] = {}

        def keep(t: Tensor, saved: dict[int, Tensor] = saved) -> Tensor:
            saved[t.untyped_storage().data_ptr()] = t
            return t

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            layer.forward()
        weights = {p.untyped_storage().data_ptr() for p in layer.model.parameters()}
        kept.append(sum(t.nbytes for key, t in saved.items() if key not in weights and t.dim() < 3))
    assert kept[1] <= most * kept[0] and kept[2] <= 0.6 * kept[0], kept


@pytest.mark.parametrize("splits", [TAIL, FULL], ids=str)
def test_a_linear_alone(splits: Splits) -> None:
    op = ops.GroupedLinear(splits.groups, 256, 320, bias=True, device="cuda", dtype=torch.bfloat16)
    x, dy = (torch.randn(splits.rows, width, device="cuda").bfloat16() for width in (256, 320))
    x[splits.used :] = dy[splits.used :] = float("nan")
    results = []
    for options in ({"on_unfused": "error"}, {"rules": ()}):
        model, own = ops.Sequential(op, **options), x.clone().requires_grad_()
        with ops.autocast(recipe=RECIPE):
            y = model(own, splits.tensor("cuda"))
        results.append([y.detach(), *torch.autograd.grad(y, [own, *op.parameters()], dy)])
    for i, (a, b) in enumerate(zip(*results, strict=True)):
        assert relative_error(a.float(), b.float()) <= 2e-3, f"result {i}"  # sums in another order, rounded once


def test_launches() -> None:
    layer = Layer()
    layer.gradients()
    y: list[Tensor] = []
    assert len(launches(lambda: y.append(layer.forward()))) == 4
    wanted = [layer.x, layer.probs, *layer.model.parameters()]
    assert len(launches(lambda: torch.autograd.grad(y[0], wanted, layer.inputs.dy))) <= 7


@pytest.mark.parametrize("recipe", [RECIPE, KEPT], ids=["plain", "kept"])
def test_memory_that_nobody_wrote_is_never_used(recipe: ops.Recipe) -> None:
    """NaN wherever the allocator gives memory out: tails, padding of what is stored."""
    layer = Layer(TAIL, recipe, bias=True, scale_bias=True)
    want = layer.gradients()
    for _ in range(3):
        blocks = [torch.full((2**i,), float("nan"), device="cuda") for i in range(7, 24) for _ in range(8)]
        del blocks
        with torch.no_grad():
            for p in layer.model.parameters():
                p.mul_(1)  # quantise the weights anew
        got = layer.gradients()
        for i, (a, b) in enumerate(zip(got, want, strict=True)):
            assert a.isfinite().all()
            assert_bitwise_equal(a, b, f"result {i}")


@pytest.mark.parametrize("recipe", [RECIPE, KEPT], ids=["plain", "kept"])
def test_same_bits_in_100_runs(recipe: ops.Recipe) -> None:
    sizes = tuple(int(i * 397 % 611) for i in range(16))
    layer = Layer(Splits("uneven", sizes, sum(sizes) + 50), recipe, hidden=512, intermediate=384, bias=True)
    first = layer.gradients()
    different = torch.zeros(len(first), dtype=torch.int64, device="cuda")
    for _ in range(100):
        pairs = zip(layer.gradients(), first, strict=True)
        different += torch.stack([(a.view(torch.uint8) != b.view(torch.uint8)).sum() for a, b in pairs])
    assert different.tolist() == [0] * len(first)


def test_graph_of_a_training_step_replays_with_other_splits() -> None:
    """Forward, backward and optimizer step captured once; replays equal eager steps of a copy, bit for bit."""
    layer, eager = Layer(TAIL), Layer(TAIL)
    eager.model.load_state_dict(layer.model.state_dict())
    optimizers = [torch.optim.SGD(each.model.parameters(), lr=1e-3) for each in (layer, eager)]

    def train(each: Layer, optimizer: torch.optim.Optimizer) -> Tensor:
        optimizer.zero_grad(set_to_none=False)
        y = each.forward()
        y.backward(each.inputs.dy)
        optimizer.step()
        return y.detach()

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for each, optimizer in zip((layer, eager), optimizers, strict=True):
            for _ in range(2):
                train(each, optimizer)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = train(layer, optimizers[0])
    for shift in (0, 1, 3):
        for each in (layer, eager):
            each.sizes.copy_(TAIL.tensor("cuda").roll(shift))
        graph.replay()
        want = train(eager, optimizers[1])
        assert_bitwise_equal(y, want, "y")
        for a, b in zip(layer.model.parameters(), eager.model.parameters(), strict=True):
            assert_bitwise_equal(a.detach(), b.detach(), "parameter")


def test_separate_and_stacked_weights_give_the_same_bits() -> None:
    layer = Layer()
    want = layer.gradients()
    for p in reversed(list(layer.model.parameters())):
        p.data = p.data.clone()
    for i, (a, b) in enumerate(zip(layer.gradients(), want, strict=True)):
        assert_bitwise_equal(a, b, f"result {i}")


@pytest.mark.parametrize("recipe", [RECIPE, KEPT], ids=["plain", "kept"])
def test_dynamic_scheduling_and_a_margin_give_the_same_bits(recipe: ops.Recipe) -> None:
    layer = Layer(recipe=recipe)
    want = layer.gradients()
    for options in ({"scheduler": "dynamic"}, {"sm_margin": 16}):
        layer.model = ops.Sequential(dict(copy.copy(layer.model).named_children()), on_unfused="error", **options)
        for i, (a, b) in enumerate(zip(layer.gradients(), want, strict=True)):
            assert_bitwise_equal(a, b, f"result {i} with {options}")
