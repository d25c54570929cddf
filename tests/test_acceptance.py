"""Behaviour that users of such libraries had to report elsewhere, each with a small input of our own.

Every case runs unfused and through the fused operations, on the CPU (where the operators are the reference) and on a
Hopper GPU, plain and under recipes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch

import fusible_ops as ops
from fusible_ops.quantized_tensor import quantized
from patterns import RULES
from tests.cases import Splits
from tests.compare import assert_as_accurate, assert_bitwise_equal
from tests.models import MLP, Inputs, as_if_on, no_host_sync, step
from tests.places import PLACES, RECIPE_PLACES, Place


@pytest.fixture(params=[*PLACES, *RECIPE_PLACES])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    with request.param.context():
        yield request.param


def _poison_allocator(device: str, *sizes: int) -> None:
    """Leave NaN in freed blocks of the given sizes (in BF16 elements), so that memory nobody wrote shows."""
    if device == "cuda":
        blocks = [torch.full((size,), float("nan"), dtype=torch.bfloat16, device=device) for size in sizes * 3]
        del blocks


@pytest.mark.parametrize("activation", ["scaled_swiglu", "scaled_geglu", "scaled_srelu"])
@pytest.mark.parametrize("sizes", [(96, 0, 130, 74), (300,)], ids=["four_groups", "one_group"])
def test_garbage_in_the_tail_never_leaks(place: Place, activation: str, sizes: tuple[int, ...]) -> None:
    """NaN past the last token, three iterations: results equal those of a buffer that fits, and the tail is zero."""
    mlp = MLP(activation, hidden=256, intermediate=128, bias=True)
    long, short = Splits("long", sizes, 512), Splits("short", sizes, 300)
    model = place.build(mlp, long)
    inputs = Inputs.random(long, mlp.hidden, place.device, torch.bfloat16)
    cut = Inputs(inputs.x[:300].clone(), inputs.probs[:300].clone(), inputs.dy[:300].clone(), short)
    expected = step(model, mlp, cut)
    for _ in range(3):
        _poison_allocator(place.device, 512 * 256, 512 * 128, 512 * 256 * 2)
        got = step(model, mlp, inputs)
        for name, want in expected.items():
            rows = slice(0, 300) if name in ("y", "dx", "dprobs") else slice(None)
            assert want.isfinite().all(), name
            assert_bitwise_equal(got[name][rows], want, name)
        for name in ("y", "dx", "dprobs"):
            assert (got[name][300:] == 0).all(), f"{name} is not zero in the tail"


@pytest.mark.parametrize("sizes", [(0, 64, 0, 0, 32), (0, 64, 1, 7, 32), (40, 64, 1, 7, 0), (0, 0, 96, 0, 0)], ids=str)
@pytest.mark.parametrize("mode", ["grad", "accumulate", "overwrite"])
def test_experts_without_tokens(place: Place, sizes: tuple[int, ...], mode: str) -> None:
    """Their weight gradients are exactly zero, or untouched when accumulating; everybody else's are right."""
    splits = Splits("empty", sizes, sum(sizes))
    linear = {} if mode == "grad" else {"accumulate_into_main_grad": True}
    mlp = MLP(hidden=256, intermediate=128, linear=linear)
    model = place.build(mlp, splits)
    inputs = Inputs.random(splits, mlp.hidden, place.device, torch.bfloat16)
    start = {"grad": 0.0, "accumulate": 3.0, "overwrite": 1234.5}[mode]
    for w in model.parameters():
        w.main_grad = torch.full(w.shape, start, dtype=torch.float32, device=w.device)
        w.overwrite_main_grad, w.grad_added_to_main_grad = mode == "overwrite", False
    step(model, mlp, inputs)
    base = 3.0 if mode == "accumulate" else 0.0
    plain = mlp.build(splits, place.device, torch.bfloat16, rules=())
    plain.load_state_dict(model.state_dict())
    for p in plain.parameters():
        p.main_grad = torch.zeros(p.shape, dtype=torch.float32, device=p.device)
    step(plain, mlp, inputs)
    for (name, w), reference in zip(model.named_parameters(), plain.parameters(), strict=True):
        got = w.grad.float() if mode == "grad" else w.main_grad
        want = reference.grad.float() if mode == "grad" else reference.main_grad
        if sizes[int(name[-1])] == 0:
            assert (got == base).all(), f"{name} of an empty expert changed"
        else:
            assert ((got - base) - want).norm() <= place.bound * want.norm(), name
        if mode != "grad":
            assert w.grad_added_to_main_grad is True


@pytest.mark.parametrize("rows", [0, 256])
@pytest.mark.parametrize("accumulate", [False, True])
def test_a_rank_without_tokens(place: Place, rows: int, accumulate: bool) -> None:
    """The graph is there, gradients exist and are zero, main_grad is flagged but unchanged."""
    splits = Splits("cold", (0, 0, 0, 0), rows)
    mlp = MLP(hidden=256, intermediate=128, bias=True, linear={"accumulate_into_main_grad": accumulate})
    model = place.build(mlp, splits)
    for w in model.parameters():
        w.main_grad, w.grad_added_to_main_grad = torch.full_like(w, 3.0), False
    x = torch.randn(rows, 256, dtype=torch.bfloat16, device=place.device)
    probs = torch.rand(rows, device=place.device)
    device_splits = splits.tensor(place.device)
    with no_host_sync(place.device):
        y = model(x, device_splits, probs, device_splits)
        assert y.shape == (rows, 256) and y.grad_fn is not None
        y.backward(torch.randn_like(y))
    assert (y == 0).all()
    for name, p in model.named_parameters():
        if accumulate and "weight" in name:
            assert p.grad_added_to_main_grad and (p.main_grad == 3.0).all(), name
        else:
            assert (p.grad == 0).all(), name


def test_the_router_probability_scales_the_second_bias_too(place: Place) -> None:
    """One expert: y = 0.25·(64 + 4); db = Σ p·dy; dp = dy·(64 + 4) in every column."""
    splits = Splits("two", (2,), 2)
    mlp = MLP("scaled_srelu", hidden=16, intermediate=64, bias=True, scale_bias=True)
    model = place.build(mlp, splits)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
        model[0].bias0.fill_(1.0)  # the activation of every unit is max(1, 0)² = 1
        model[2].weight0.fill_(1.0)  # so every output is 64 before the probability
        model[2].bias0.fill_(4.0)
    x = torch.randn(2, 16, device=place.device, dtype=torch.bfloat16)
    probs = torch.tensor([0.25, 0.5], device=place.device, requires_grad=True)
    other = probs.detach().clone().requires_grad_()
    sizes = splits.tensor(place.device)
    y = model(x, sizes, probs, sizes, other)
    assert (y[0] == 17.0).all() and (y[1] == 34.0).all()
    y.backward(torch.ones_like(y))
    assert (model[2].bias0.grad == 0.75).all()
    assert (probs.grad == 64 * 16).all() and (other.grad == 4 * 16).all()


CLAMPED = [
    ((7.0, 1.702, 1.0), (10.0, -9.0), -41.99972),
    ((7.0, 1.702, 1.0), (-8.0, 2.0), -2.92993e-5),
    ((7.0, 1.702, 1.0), (3.0, 8.0), 23.85543),
    ((10.0, 1.0, 0.0), (10.0, -9.0), -89.99591),
]


@pytest.mark.parametrize(("constants", "halves", "expected"), CLAMPED)
def test_clamped_swiglu_means_one_thing(place: Place, constants, halves, expected) -> None:
    """Gate and linear half are put in through FC1's bias; FC2 is the identity."""
    limit, alpha, offset = constants
    act = ops.ClampedSwiGLU(limit=limit, alpha=alpha, glu_linear_offset=offset)
    common = {"device": place.device, "dtype": torch.bfloat16}
    fc1, fc2 = ops.GroupedLinear(1, 16, 128, **common), ops.GroupedLinear(1, 64, 16, bias=False, **common)
    with torch.no_grad():
        fc1.weight0.zero_()
        fc1.bias0.copy_(torch.tensor(halves).repeat_interleave(64))
        fc2.weight0.copy_(torch.eye(64)[:16])
    model = ops.Sequential(fc1, act, fc2, **place.options())
    sizes = torch.tensor([3], device=place.device)
    y = model(torch.randn(3, 16, **common), sizes, sizes)
    want = torch.tensor(expected).bfloat16().item()
    if place.recipe is not None:  # FC2's input is quantised from FP32; a row holds one value
        row = torch.full((1, 64), expected, device=place.device)
        want = quantized(row, place.recipe.operand_format("input")).dequantize()[0, 0].bfloat16().item()
    assert (y == want).all(), (y[0, 0].item(), want)
    y.sum().backward()
    gate, linear = halves
    grads = fc1.bias0.grad
    assert ((grads[:16] == 0) == (gate > limit)).all()  # the units that FC2 passes on
    assert ((grads[64:80] == 0) == (abs(linear) > limit)).all()


@pytest.mark.parametrize("shape", [(64, 256), (2, 32, 256)], ids=str)
def test_fused_and_unfused_keep_the_shape(place: Place, shape: tuple[int, ...]) -> None:
    splits = Splits("even", (30, 34), 64)
    mlp = MLP("swiglu", hidden=256, intermediate=128)
    model = place.build(mlp, splits)
    sizes = splits.tensor(place.device)
    x = torch.randn(*shape, device=place.device, dtype=torch.bfloat16, requires_grad=True)
    y = model(x, sizes, sizes)
    y.backward(torch.randn_like(y))
    assert y.shape == x.grad.shape == shape


def test_never_silently_unfused() -> None:
    """explain() names the first unmet condition on one machine, fuses on another; "error" says the same."""
    plain = ops.Sequential(
        ops.GroupedLinear(4, 64, 128, device="cpu", dtype=torch.bfloat16),
        ops.SwiGLU(),
        ops.GroupedLinear(4, 64, 64, device="cpu", dtype=torch.bfloat16),
        on_unfused="error",
    )
    text = plain.explain("sm_100a")
    assert "glu_interleave_size is None, needs 32; pack_glu_weights_(interleave=32) does it" in text
    assert "3 of 3 ops fused" in plain.explain("sm_90a")
    verdicts = plain.explain("sm_100a", as_data=True)[0]
    assert {refused["rule"] for refused in verdicts["refusals"]} == {rule.name for rule in RULES}
    for arch in ("sm_80", "sm_89", "sm_120a", "cpu"):
        assert f"needs sm_90a; this is {arch}" in plain.explain(arch)
    sizes = torch.tensor([1, 2, 3, 4])
    with as_if_on("sm_100a"), pytest.raises(RuntimeError, match="glu_interleave_size is None, needs 32"):
        plain(torch.randn(10, 64).bfloat16(), sizes, sizes)
    with as_if_on("sm_90a"):
        plain.forget_plans()
        assert plain(torch.randn(10, 64).bfloat16(), sizes, sizes).shape == (10, 64)
    plain.pack_glu_weights_(interleave=32)
    assert "3 of 3 ops fused" in plain.explain("sm_100a") and "3 of 3 ops fused" in plain.explain("sm_90a")
    for arch in ("sm_100a", "sm_90a"):
        with as_if_on(arch):
            plain.forget_plans()
            assert plain(torch.randn(2, 5, 64).bfloat16(), sizes, sizes).shape == (2, 5, 64)


@pytest.mark.parametrize("recipe", [ops.MXFP8BlockScaling(), ops.NVFP4BlockScaling()], ids=["mxfp8", "nvfp4"])
@pytest.mark.parametrize("linear", [ops.GroupedLinear, ops.Linear], ids=lambda linear: linear.__name__)
def test_never_silently_unfused_under_a_recipe(recipe: ops.Recipe, linear: type) -> None:
    """The same of a Blackwell's recipes, for MoE and dense layers; 3-D in, 3-D out."""
    groups = (4,) if linear is ops.GroupedLinear else ()
    made = [linear(*groups, 64, width, device="cpu", dtype=torch.bfloat16) for width in (128, 64)]
    model = ops.Sequential(made[0], ops.SwiGLU(), made[1], on_unfused="error")
    x, extras = torch.randn(2, 5, 64).bfloat16(), [torch.tensor([1, 2, 3, 4])] * 2 * len(groups)
    reason = "glu_interleave_size is None, needs 32; pack_glu_weights_(interleave=32) does it"
    assert reason in model.explain("sm_100a", recipe=recipe)
    with as_if_on("sm_100a"), ops.autocast(recipe=recipe):
        with pytest.raises(RuntimeError, match="glu_interleave_size is None, needs 32"):
            model(x, *extras)
        model.pack_glu_weights_(interleave=32)
        model.forget_plans()
        assert model(x, *extras).shape == (2, 5, 64)
    assert "3 of 3 ops fused" in model.explain("sm_100a", recipe=recipe)


@pytest.mark.parametrize("recipe", [None, ops.MXFP8BlockScaling()], ids=["bf16", "mxfp8"])
def test_gate_and_up_interleave_and_checkpoints(recipe: ops.Recipe | None) -> None:
    """Stored rows stay [gate | up]; one call packs them in memory, and what a model computes stays the same."""
    torch.manual_seed(0)
    mlp = MLP("scaled_swiglu", hidden=64, intermediate=64, bias=True)
    splits = Splits("small", (30, 34), 70)
    model = mlp.build(splits, "cpu", torch.bfloat16)
    inputs = Inputs.random(splits, 64, "cpu", torch.bfloat16)

    def y(model: ops.Sequential) -> torch.Tensor:
        with ops.autocast(recipe=recipe) if recipe else nullcontext():
            return step(model, mlp, inputs)["y"]

    plain, stored = y(model), copy.deepcopy(model.state_dict())
    model.pack_glu_weights_(interleave=32)
    for key, value in model.state_dict().items():
        assert_bitwise_equal(value, stored[key], key)
    assert_bitwise_equal(y(model), plain, "unfused, packed")
    with as_if_on("sm_100a"):
        fused = y(model)
        assert "3 of 3 ops fused" in model.explain("sm_100a", recipe=recipe)
    assert_as_accurate(fused, plain, plain.float(), "fused, packed")
    for packed in (False, True):  # save -> load -> save
        other = mlp.build(splits, "cpu", torch.bfloat16)
        other = other.pack_glu_weights_() if packed else other
        other.load_state_dict(model.state_dict())
        assert_bitwise_equal(y(other), plain, "loaded")
        for key, value in other.state_dict().items():
            assert_bitwise_equal(value, stored[key], key)
    with torch.no_grad():
        for p in model[0].weight_parameters():
            p.copy_(model[0].packing.into_memory(torch.arange(128.0)[:, None].expand(128, 64), 0))
    rows = [int(row) for row in model[0].weight_parameters()[0][:, 0]]
    assert rows == [*range(32), *range(64, 96), *range(32, 64), *range(96, 128)]
    with pytest.raises(ValueError, match="is packed already"):
        model.pack_glu_weights_()
    odd = MLP("scaled_swiglu", hidden=64, intermediate=80).build(splits, "cpu", torch.bfloat16)
    with pytest.raises(ValueError, match="has 80 gate columns, needs a multiple of 32"):
        odd.pack_glu_weights_()
    pairwise = MLP("scaled_swiglu", 64, 64, interleave=1).build(splits, "cpu", torch.bfloat16)
    assert "3 of 3 ops fused" in pairwise.explain("sm_90a")
