"""What users of low-precision recipes had to report elsewhere: formats mistaken, padding, rounding, NaN, zeros."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional as F

import fusible_ops as ops
from cute_kernels.quantization import scale_layout
from tests.cases import Splits
from tests.compare import assert_bitwise_equal, relative_error
from tests.models import MLP, Inputs, step
from tests.places import BLOCK, RECIPE_PLACES, Place

HYBRIDS = [
    ops.Float8BlockScaling(fp8_format=ops.Format.HYBRID),
    ops.Float8CurrentScaling(fp8_format=ops.Format.HYBRID),
]


@pytest.fixture(params=RECIPE_PLACES)
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    with request.param.context():
        yield request.param


# ----------------------------------------------------------------------------------------------------------------------
# The backward format is part of the key


@pytest.mark.parametrize("recipe", HYBRIDS, ids=lambda recipe: type(recipe).__name__)
def test_gradients_are_read_in_the_format_they_were_written_in(place: Place, recipe: ops.Recipe) -> None:
    """E5M2 bytes read as E4M3 would be too small by up to 2^7. A lone 1.0 in dy stays 1.0."""
    linear = ops.Linear(64, 48, bias=False, device=place.device, dtype=torch.bfloat16)
    with torch.no_grad():
        linear.weight.copy_(2.0 ** torch.randint(-2, 3, (48, 64)))
    x = torch.randn(20, 64, device=place.device, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.zeros(20, 48, device=place.device, dtype=torch.bfloat16)
    dy[7, 5] = 1.0
    with ops.autocast(recipe=recipe):
        y = linear(x)
    y.backward(dy)
    assert_bitwise_equal(x.grad[7], linear.weight.detach()[5], "dx of the one row")
    assert (x.grad[:7] == 0).all() and (x.grad[8:] == 0).all()


@pytest.mark.parametrize("recipe", HYBRIDS, ids=lambda recipe: type(recipe).__name__)
def test_gradients_have_the_right_size(place: Place, recipe: ops.Recipe) -> None:
    mlp, splits = MLP(hidden=256, intermediate=128), Splits("uneven", (40, 0, 50), 90)
    model = mlp.build(splits, place.device, torch.bfloat16)
    inputs = Inputs.random(splits, mlp.hidden, place.device, torch.bfloat16)
    with ops.autocast(recipe=recipe):
        got = step(model, mlp, inputs)
    with ops.autocast(enabled=False):
        want = step(model.float(), mlp, inputs.to(torch.float32))
    for name in ("y", "dx", "dprobs"):
        assert relative_error(got[name], want[name]) <= 0.1, name
        assert 0.9 <= got[name].float().norm() / want[name].norm() <= 1.1, name


# ----------------------------------------------------------------------------------------------------------------------
# Sizes that are no multiples of the block


@pytest.mark.parametrize(
    ("activation", "hidden", "intermediate"),
    [("scaled_swiglu", 208, 192), ("scaled_swiglu", 256, 2880), ("scaled_srelu", 144, 1856)],
)
def test_padding_of_scales_is_never_used(
    place: Place, activation: str, hidden: int, intermediate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scales that only fill up their storage are NaN: everything is as if they were zero. (The FP8 kernels' reference
    always has NaN there.)
    """
    mlp = MLP(activation, hidden=hidden, intermediate=intermediate, bias=True)
    splits = Splits("two", (5, 11), 20)
    model = place.build(mlp, splits)
    inputs = Inputs.random(splits, mlp.hidden, place.device, torch.bfloat16)
    want = step(model, mlp, inputs)

    def poisoned(scale: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        short = (0, -scale.shape[-1] % columns, 0, -scale.shape[-2] % rows)
        return F.pad(scale, short, value=float("nan")).contiguous()

    monkeypatch.setattr(scale_layout, "_pad", poisoned)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1)  # quantise the weights anew
    got = step(model, mlp, inputs)
    for name, t in want.items():
        assert t.isfinite().all(), name
        assert_bitwise_equal(got[name], t, name)
    with ops.autocast(enabled=False):
        wide = mlp.build(splits, place.device, torch.float32)
        wide.load_state_dict(model.state_dict())
        exact = step(wide, mlp, inputs.to(torch.float32))
    assert relative_error(got["y"], exact["y"]) <= 0.07


# ----------------------------------------------------------------------------------------------------------------------
# Rounding, NaN, zeros


def test_a_nan_comes_out_and_spoils_nothing_else(place: Place) -> None:
    """In one token: its row of y, and the weight gradient of its group, are NaN; other groups and rows are not."""
    linear = ops.GroupedLinear(2, 64, 48, bias=False, device=place.device, dtype=torch.bfloat16)
    x = torch.randn(20, 64, device=place.device, dtype=torch.bfloat16)
    x[3, 10] = float("nan")
    x.requires_grad_()
    sizes = torch.tensor([8, 12], device=place.device)
    y = linear(x, sizes)
    y.backward(torch.ones_like(y))
    assert y[3].isnan().all() and y[8:].isfinite().all()
    assert linear.weight0.grad[:, 10].isnan().all() and linear.weight1.grad.isfinite().all()
    if place.recipe == BLOCK:  # one scale per group is NaN for the whole group
        assert y[:3].isfinite().all() and y[4:].isfinite().all()


def test_zeros_stay_zeros(place: Place) -> None:
    """Scales of blocks of zeros are finite and positive; nothing becomes 0/0."""
    q = ops.Quantize()(torch.zeros(5, 200, device=place.device, dtype=torch.bfloat16).requires_grad_())
    for name, part in q._parts().items():
        if name.endswith("scale"):
            assert part.isfinite().all() and (part > 0).sum() >= part[..., :1].numel()
    assert (q.dequantize() == 0).all()
    mlp, splits = MLP(hidden=160, intermediate=64, bias=True), Splits("two", (3, 4), 9)
    model = place.build(mlp, splits)
    inputs = Inputs.random(splits, mlp.hidden, place.device, torch.bfloat16)
    with torch.no_grad():
        for t in (inputs.x, inputs.dy, *model.parameters()):
            t.zero_()
    for name, t in step(model, mlp, inputs).items():
        assert (t == 0).all(), name


def test_the_scale_follows_the_fp32_activation(place: Place) -> None:
    """relu(x)² = 448.5 in FP32 needs another scale than 448, to which BF16 would round it first."""
    if place.recipe != BLOCK:
        pytest.skip("its scale is no power of two, so it moves with every bit")
    seq = ops.Sequential(ops.SReLU(), ops.Quantize())
    for value, scale in ((448.0, 1.0), (448.5, 2.0)):
        root = torch.full((1, 128), value, device=place.device).sqrt()
        q = seq(root)
        assert q.rowwise.scale.flatten()[0].item() == scale, value
    assert torch.tensor(448.5).bfloat16() == 448


# ----------------------------------------------------------------------------------------------------------------------
# Expert biases


def test_bias_gradients_come_from_the_plain_gradient(place: Place) -> None:
    """G=3, one empty: its gradient is zero; the others sum what was given, not what was quantised."""
    linear = ops.GroupedLinear(3, 64, 48, device=place.device, dtype=torch.bfloat16)
    dy = (1 + torch.rand(20, 48, device=place.device) / 7).bfloat16()
    y = linear(
        torch.randn(20, 64, device=place.device, dtype=torch.bfloat16), torch.tensor([8, 0, 12]).to(place.device)
    )
    y.backward(dy)
    assert (linear.bias1.grad == 0).all()
    for rows, b in ((slice(0, 8), linear.bias0), (slice(8, 20), linear.bias2)):
        torch.testing.assert_close(b.grad, dy[rows].float().sum(0).bfloat16(), rtol=2**-7, atol=0)
