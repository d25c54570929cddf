"""The whole FP8 layer on Hopper: exact bytes, launches, what is kept, when weights are quantised, the same bits."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fusible_ops as ops
from fusible_ops.quantized_tensor import quantized
from tests.bench.timing import launches, requested_bytes
from tests.cases import Splits, full
from tests.compare import assert_bitwise_equal, relative_error
from tests.models import MLP, Inputs, step
from tests.places import BLOCK, HOPPER

pytestmark = HOPPER
BF16 = {"device": "cuda", "dtype": torch.bfloat16}
KEPT = ops.Float8BlockScaling(preactivation="quantized")
TAIL = Splits("tail", (96, 0, 130, 74), 512)
FULL = full("full", 200, 0, 130, 182)


class Layer:
    """A fused layer, its inputs and whole steps of it under the recipe."""

    def __init__(
        self,
        splits: Splits = FULL,
        dtype: torch.dtype = torch.bfloat16,
        recipe: ops.Recipe = BLOCK,
        **options: object,
    ) -> None:
        self.recipe = recipe
        self.mlp, self.splits = MLP(**{"hidden": 256, "intermediate": 192, **options}), splits
        self.model = self.mlp.build(splits, "cuda", dtype, on_unfused="error")
        self.inputs = Inputs.random(splits, self.mlp.hidden, "cuda", torch.bfloat16)
        self.sizes = splits.tensor("cuda")
        self.x, self.probs = self.inputs.x.requires_grad_(), self.inputs.probs.requires_grad_()

    def forward(self, model: ops.Sequential | None = None) -> Tensor:
        with ops.autocast(recipe=self.recipe):
            return (model or self.model)(self.x, *self.mlp.extras(self.sizes, self.probs))

    def fresh(self) -> ops.Sequential:
        """Another module of the same weights, which has quantised nothing yet."""
        return copy.deepcopy(self.model)

    def gradients(self, model: ops.Sequential | None = None) -> list[Tensor]:
        """y and the gradients of x, probs and all parameters."""
        model = model or self.model
        y = self.forward(model)
        wanted = [self.x, self.probs, *(p for p in model.parameters() if p.requires_grad)]
        return [y.detach(), *torch.autograd.grad(y, wanted, self.inputs.dy)]


def assert_all_equal(got: list[Tensor], want: list[Tensor], what: str = "result") -> None:
    assert len(got) == len(want)
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert_bitwise_equal(a.detach(), b.detach(), f"{what} {i}")


# ----------------------------------------------------------------------------------------------------------------------
# Values


@pytest.mark.parametrize("width", [256, 320])
def test_bytes_of_exact_sums_are_those_of_quantize(width: int) -> None:
    """Small integers: every sum is exact, so FC1, relu² and quantise in one kernel give the bytes of `Quantize`."""
    fc1 = ops.GroupedLinear(FULL.groups, 256, width, bias=False, **BF16)
    with torch.no_grad():
        for p in fc1.parameters():
            p.copy_(torch.randint(-2, 3, p.shape))
    x = torch.randint(-1, 2, (FULL.rows, 256), **BF16)
    with ops.autocast(recipe=BLOCK), torch.no_grad():
        chain = ops.Sequential(fc1, ops.SReLU(), ops.Quantize(), on_unfused="error")
        got = chain(x, FULL.tensor("cuda")).rowwise
    parts = zip(x.float().split(FULL.sizes), fc1.weight_parameters(), strict=True)
    act = torch.cat([torch.relu(rows @ w.float().t()) ** 2 for rows, w in parts])
    want = quantized(act, BLOCK.operand_format("input")).rowwise
    assert_bitwise_equal(got.data, want.data, "data")
    assert_bitwise_equal(got.scale[:, : FULL.rows].contiguous(), want.scale[:, : FULL.rows].contiguous(), "scale")


@pytest.mark.parametrize("intermediate", [192, 1856])
@pytest.mark.parametrize("recipe", [BLOCK, KEPT], ids=["plain", "kept"])
def test_memory_that_nobody_wrote_is_never_used(recipe: ops.Recipe, intermediate: int) -> None:
    """NaN wherever the allocator gives memory out: padding of scales, tails, unused blocks of transposed copies."""
    layer = Layer(TAIL, recipe=recipe, intermediate=intermediate, bias=True, scale_bias=True)
    want = layer.gradients()
    for _ in range(3):
        blocks = [torch.full((2**i,), float("nan"), device="cuda") for i in range(7, 24) for _ in range(8)]
        del blocks
        with torch.no_grad():
            for p in layer.model.parameters():
                p.mul_(1)  # quantise the weights anew
        got = layer.gradients()
        assert all(t.isfinite().all() for t in got)
        assert_all_equal(got, want)


@pytest.mark.parametrize("recipe", [BLOCK, KEPT], ids=["plain", "kept"])
def test_same_bits_in_100_runs(recipe: ops.Recipe) -> None:
    sizes = tuple(int(i * 397 % 611) for i in range(16))
    splits = Splits("uneven", sizes, sum(sizes) + 50)
    layer = Layer(splits, recipe=recipe, hidden=512, intermediate=384, bias=True, scale_bias=True)
    first = layer.gradients()
    different = torch.zeros(len(first), dtype=torch.int64, device="cuda")
    for _ in range(100):
        pairs = zip(layer.gradients(), first, strict=True)
        different += torch.stack([(a.view(torch.uint8) != b.view(torch.uint8)).sum() for a, b in pairs])
    assert different.tolist() == [0] * len(first)


@pytest.mark.parametrize("activation", ["scaled_swiglu", "clamped_swiglu", "scaled_srelu", "gelu"])
@pytest.mark.parametrize("intermediate", [256, 320])
def test_a_pre_activation_that_is_kept_quantised(activation: str, intermediate: int) -> None:
    """The same y as without; gradients near the unfused ones."""
    mlp = MLP(activation, hidden=256, intermediate=intermediate, bias=True)
    model = mlp.build(TAIL, "cuda", torch.bfloat16, on_unfused="error")
    inputs = Inputs.random(TAIL, mlp.hidden, "cuda", torch.bfloat16)
    with ops.autocast(recipe=BLOCK):
        y = step(model, mlp, inputs)["y"]
    with ops.autocast(recipe=KEPT):
        got = step(model, mlp, inputs)
        want = step(ops.Sequential(dict(model.named_children()), rules=()), mlp, inputs)
    assert_bitwise_equal(got["y"], y, "y")
    for name, t in want.items():
        error = relative_error(got[name].float(), t.float())
        assert error <= 0.03, f"{name}: {error:.4f} from the unfused one"


def test_separate_and_stacked_weights_give_the_same_bits() -> None:
    layer = Layer(bias=True)
    want = layer.gradients()
    for p in reversed(list(layer.model.parameters())):
        p.data = p.data.clone()
    assert_all_equal(layer.gradients(), want, "apart")
    options = {"single_grouped_weight": True, "single_grouped_bias": True}
    single = Layer(bias=True, linear=options)
    single.model.load_state_dict(layer.model.state_dict())
    got = single.gradients()
    stacked = [torch.stack(part) for part in (want[3:7], want[7:11], want[11:15], want[15:19])]
    assert_all_equal(got, [*want[:3], *stacked], "stacked")


@pytest.mark.parametrize("frozen", ["fc1", "fc2", "x", "probs", "x and fc1"])
def test_frozen_parts_change_nothing_else(frozen: str) -> None:
    layer = Layer(bias=True)
    names = ["x", "probs", *(name for name, _ in layer.model.named_parameters())]
    want = dict(zip(names, layer.gradients()[1:], strict=True))
    for name, t in (("x", layer.x), ("probs", layer.probs), *layer.model.named_parameters()):
        t.requires_grad_(name.split(".")[0] not in frozen.split())
    y = layer.forward()
    left = {"x": layer.x, "probs": layer.probs, **dict(layer.model.named_parameters())}
    left = {name: t for name, t in left.items() if t.requires_grad}
    for name, grad in zip(left, torch.autograd.grad(y, list(left.values()), layer.inputs.dy), strict=True):
        assert_bitwise_equal(grad, want[name], name)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool) -> None:
    """The forward that is repeated in backward quantises the same bytes."""
    layer = Layer(bias=True)
    want = layer.gradients()

    def run(x: Tensor, probs: Tensor) -> Tensor:
        with ops.autocast(recipe=BLOCK):
            return layer.model(x, *layer.mlp.extras(layer.sizes, probs))

    y = checkpoint(run, layer.x, layer.probs, use_reentrant=reentrant)
    y.backward(layer.inputs.dy)
    got = [y.detach(), layer.x.grad, layer.probs.grad, *(p.grad for p in layer.model.parameters())]
    assert_all_equal(got, want)


def test_fp32_parameters_under_autocast() -> None:
    """The bits of BF16 weights; FP32 gradients."""
    layer = Layer(TAIL, torch.float32)
    narrow = copy.deepcopy(layer.model).bfloat16()
    with torch.autocast("cuda", torch.bfloat16):
        got = layer.gradients()
    want = layer.gradients(narrow)
    assert_all_equal(got[:3], want[:3])
    for a, b in zip(got[3:], want[3:], strict=True):
        assert a.dtype == torch.float32
        assert_bitwise_equal(a.bfloat16(), b)


# ----------------------------------------------------------------------------------------------------------------------
# What is launched and kept


def test_launches_of_a_layer() -> None:
    """Forward 4 (offsets, quantise, product with activation and quantise, product); backward 5, and dprobs added up."""
    layer = Layer(linear={"single_grouped_weight": True})
    results: list[Tensor] = []
    counts = []
    for _ in range(3):
        results.clear()
        layer.model.zero_grad()
        layer.x.grad = layer.probs.grad = None
        forward = launches(lambda: results.append(layer.forward()))
        backward = launches(lambda: results[0].backward(layer.inputs.dy))
        counts.append((len(forward), len(backward)))
    assert counts[0][0] == 6, "two more quantise the weights"
    assert counts[1:] == [(4, 6)] * 2, (counts, forward, backward)
    with torch.no_grad():
        layer.forward()
        assert len(launches(layer.forward)) == 4


@pytest.mark.parametrize("recipe", [BLOCK, KEPT], ids=["plain", "kept"])
def test_saved_bytes(recipe: ops.Recipe) -> None:
    """x and act in E4M3, one orientation; the pre-activation in BF16 or E4M3; one orientation of the weights."""
    layer = Layer(recipe=recipe, linear={"single_grouped_weight": True})
    saved: dict[int, Tensor] = {}

    def keep(t: Tensor) -> Tensor:
        saved[t.untyped_storage().data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        layer.forward()
    groups, rows, (h, i) = FULL.groups, FULL.rows, (layer.mlp.hidden, layer.mlp.intermediate)
    padded = (rows + 127 * groups) // 128 * 128
    eight = sorted(t.untyped_storage().nbytes() for t in saved.values() if t.element_size() == 1)
    kept = [rows * 2 * i] if recipe is KEPT else []
    assert eight == sorted([padded * h, padded * i, groups * 2 * i * h, groups * h * i, *kept])
    given = {t.untyped_storage().data_ptr() for t in (layer.x, layer.probs, *layer.model.parameters())}
    wide = [t.shape for at, t in saved.items() if t.dtype == torch.bfloat16 and at not in given]
    assert wide == ([] if kept else [(rows, 2 * i)])


def test_inference_keeps_one_orientation_of_the_weights() -> None:
    layer = Layer(linear={"single_grouped_weight": True})
    weights = sum(p.numel() for p in layer.model.parameters())
    held = []
    for context in (torch.no_grad, torch.enable_grad):
        before = requested_bytes()
        with context():
            layer.forward()
        held.append(requested_bytes() - before)
        layer.model.zero_grad()
    assert weights <= held[0] <= 1.1 * weights, "row-wise"
    assert 2 * weights <= held[0] + held[1] <= 2.1 * weights, "both"


# ----------------------------------------------------------------------------------------------------------------------
# When weights are quantised


def _in_place(layer: Layer) -> None:
    with torch.no_grad():
        for p in layer.model.parameters():
            p.mul_(2)


def _data(layer: Layer) -> None:
    for p in layer.model.parameters():
        p.data = 2 * p.data


def _optimizer(layer: Layer) -> None:
    for p in layer.model.parameters():
        p.grad = -p.detach()
    torch.optim.SGD(layer.model.parameters(), lr=1.0).step()
    layer.model.zero_grad()


def _load(layer: Layer) -> None:
    layer.model.load_state_dict({k: 2 * v if v.is_floating_point() else v for k, v in layer.model.state_dict().items()})


@pytest.mark.parametrize("change", [_in_place, _data, _optimizer, _load])
@pytest.mark.parametrize("evaluates", [False, True])
def test_an_update_is_seen(change: Callable, evaluates: bool) -> None:
    """Train, perhaps evaluate, double all weights, perhaps evaluate, train: as a module that never saw the old ones."""
    layer = Layer()
    old = layer.gradients()
    for _ in range(2):
        if evaluates:
            with torch.no_grad():
                layer.forward()
    change(layer)
    if evaluates:
        with torch.no_grad():
            assert_bitwise_equal(layer.forward(), layer.forward(layer.fresh()), "y in evaluation")
    assert_all_equal(layer.gradients(), layer.gradients(layer.fresh()))
    assert not torch.equal(layer.gradients()[1], old[1])


def test_dx_of_doubled_weights_is_doubled() -> None:
    """Evaluated between training steps, and evaluated first."""
    op = ops.GroupedLinear(FULL.groups, 256, 192, bias=False, **BF16)
    model, other = (ops.Sequential(op, on_unfused="error") for _ in range(2))  # they share the weights
    x, dy = torch.randn(FULL.rows, 256, requires_grad=True, **BF16), torch.randn(FULL.rows, 192, **BF16)
    sizes = FULL.tensor("cuda")

    def dx(of: ops.Sequential) -> Tensor:
        with ops.autocast(recipe=BLOCK):
            return torch.autograd.grad(of(x, sizes), x, dy)[0]

    with torch.no_grad(), ops.autocast(recipe=BLOCK):
        model(x, sizes)
    before = dx(model)
    with torch.no_grad(), ops.autocast(recipe=BLOCK):
        model(x, sizes)
    with torch.no_grad():
        for p in op.parameters():
            p.mul_(2)
    assert_bitwise_equal(dx(other), 2 * before)
    assert_bitwise_equal(dx(model), 2 * before)


def test_zeroed_data_gives_zero() -> None:
    layer = Layer()
    assert layer.forward().abs().sum() > 0
    for p in layer.model.parameters():
        p.data = torch.zeros_like(p)
    assert (layer.forward() == 0).all()


def test_held_weights_give_the_bits_of_plain_ones() -> None:
    """quantized_model_init: weights in FP8 alone, which the kernels read where they lie."""
    with ops.quantized_model_init(recipe=BLOCK):
        held = Layer(bias=True)
    plain = Layer(bias=True)
    plain.model.load_state_dict(held.model.state_dict())
    assert_all_equal(held.gradients(), plain.gradients())


def test_accumulating_into_main_grad() -> None:
    """Three micro-batches add the same FP32 numbers to 3.0; an empty expert's stays as it is."""
    layer = Layer(linear={"accumulate_into_main_grad": True})
    for start in (0.0, 3.0):
        for w in layer.model.parameters():
            w.main_grad, w.grad_added_to_main_grad = torch.full(w.shape, start, device="cuda"), False
        for _ in range(1 if start == 0 else 3):
            layer.forward().backward(layer.inputs.dy)
        if start == 0:
            once = [w.main_grad for w in layer.model.parameters()]
    for (name, w), dw in zip(layer.model.named_parameters(), once, strict=True):
        if FULL.sizes[int(name[-1])] == 0:
            assert (w.main_grad == 3.0).all(), name
        else:
            torch.testing.assert_close(w.main_grad, 3.0 + 3 * dw, rtol=1e-5, atol=1e-5)
