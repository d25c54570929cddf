"""MXFP8 and NVFP4 recipes: random bits, rotation, widths that blocks do not divide, held weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fusible_ops as ops
from cute_kernels.quantization.formats import Format, mxfp8, nvfp4
from fusible_ops.groups import Groups
from fusible_ops.quantized_tensor import QuantizedTensor, quantized
from tests.cases import EVEN
from tests.compare import assert_bitwise_equal, relative_error
from tests.models import MLP, Inputs, step

MXFP8, NVFP4 = ops.MXFP8BlockScaling(), ops.NVFP4BlockScaling()
CPU = {"device": "cpu", "dtype": torch.bfloat16}
SIZES = torch.tensor([7, 13])


def gradients(op: ops.GroupedLinear, x: Tensor, dy: Tensor, repeats_forward: bool = False) -> tuple[Tensor, Tensor]:
    """(dx, dW of expert 0) of one step under NVFP4, from the generator as it is."""
    op.zero_grad()
    x = x.clone().requires_grad_()

    def run(x: Tensor) -> Tensor:
        with ops.autocast(recipe=NVFP4):
            return op(x, SIZES)

    y = checkpoint(run, x, use_reentrant=False) if repeats_forward else run(x)
    y.backward(dy)
    return x.grad, op.weight0.grad.clone()


def linear_and_data() -> tuple[ops.GroupedLinear, Tensor, Tensor]:
    op = ops.GroupedLinear(2, 64, 48, bias=False, **CPU)
    return op, torch.randn(20, 64).bfloat16(), torch.randn(20, 48).bfloat16()


# ----------------------------------------------------------------------------------------------------------------------
# Stochastic rounding


def test_random_bits_follow_the_generator_and_differ_from_step_to_step() -> None:
    op, x, dy = linear_and_data()
    torch.manual_seed(1)
    first, second = gradients(op, x, dy), gradients(op, x, dy)
    torch.manual_seed(1)
    again = gradients(op, x, dy)
    for name, a, b, c in zip(("dx", "dW"), first, second, again, strict=True):
        assert (a != b).any(), name
        assert_bitwise_equal(a, c, name)


def test_a_repeated_forward_repeats_the_bits() -> None:
    """Activation checkpointing restores the generator: gradients are those of a step without it."""
    op, x, dy = linear_and_data()
    torch.manual_seed(2)
    plain = gradients(op, x, dy)
    torch.manual_seed(2)
    for name, a, b in zip(("dx", "dW"), gradients(op, x, dy, repeats_forward=True), plain, strict=True):
        assert_bitwise_equal(a, b, name)


def test_rounding_is_right_in_the_mean() -> None:
    """Of n steps, dx deviates from the unrounded one by what one step does over √n; to nearest it stays where it is."""
    op, x, dy = linear_and_data()
    nearest = ops.NVFP4BlockScaling(disable_stochastic_rounding=True)
    want = torch.cat([dy[rows].float() @ w.dequantize(torch.float32) for rows, w in weights_of(op)])

    def mean(recipe: ops.Recipe, steps: int) -> float:
        total = torch.zeros_like(want)
        for _ in range(steps):
            leaf = x.clone().requires_grad_()
            with ops.autocast(recipe=recipe):
                y = op(leaf, SIZES)
            y.backward(dy)
            total += leaf.grad.float()
        return relative_error(total / steps, want)

    one, many = mean(NVFP4, 1), mean(NVFP4, 64)
    assert one <= 0.25 and many <= one / 4, (one, many)
    assert mean(nearest, 2) >= 2 * many


def weights_of(op: ops.GroupedLinear) -> list[tuple[slice, QuantizedTensor]]:
    """(rows, weight as NVFP4 has it) of both experts."""
    held = [quantized(w.detach(), NVFP4.operand_format("weight"), True, False) for w in (op.weight0, op.weight1)]
    return [(slice(0, 7), held[0]), (slice(7, 20), held[1])]


# ----------------------------------------------------------------------------------------------------------------------
# Quantised tensors


@pytest.mark.parametrize(
    "format", [mxfp8(), nvfp4(), nvfp4(hadamard=True), nvfp4(hadamard=True, stochastic=True)], ids=str
)
@pytest.mark.parametrize("grouped", [False, True])
def test_a_column_wise_copy_alone_still_has_the_values(format: Format, grouped: bool) -> None:
    """Not rotated, not padded, in its place."""
    x = torch.randn(32, 64).bfloat16()
    x[:, 5] *= 50  # what the rotation spreads
    groups = Groups(torch.tensor([0, 7, 7, 32], dtype=torch.int32)) if grouped else None
    q = quantized(x, format, False, True, groups=groups)
    assert q.rowwise is None and q.shape == x.shape and q.dequantize().dtype == torch.bfloat16
    assert relative_error(q.dequantize(torch.float32), x.float()) <= (0.05 if format == mxfp8() else 0.2)
    assert relative_error(q + 0, x) <= 0.2


# ----------------------------------------------------------------------------------------------------------------------
# Widths that blocks do not divide


@pytest.mark.parametrize(
    ("recipe", "widths", "message"),
    [
        (MXFP8, (48, 64), "GroupedLinear.*: MXFP8 E4M3 1x32 needs in_features to be a multiple of 32, got 48"),
        (MXFP8, (64, 48), "GroupedLinear.*: MXFP8 E4M3 1x32 needs out_features to be a multiple of 32, got 48"),
        (NVFP4, (40, 64), "NVFP4 1x16, rotated needs in_features to be a multiple of 16, got 40"),
        (NVFP4, (64, 31), "NVFP4 16x16 needs out_features to be a multiple of 16, got 31"),
    ],
    ids=str,
)
def test_widths_are_refused_with_words(recipe: ops.Recipe, widths: tuple[int, int], message: str) -> None:
    op = ops.GroupedLinear(2, *widths, **CPU)
    x = torch.randn(20, widths[0]).bfloat16().requires_grad_()
    with ops.autocast(recipe=recipe), pytest.raises(ValueError, match=message):
        op(x, SIZES)
    op(x, SIZES)  # nothing of it is left behind


def test_a_forward_alone_needs_only_what_it_quantises() -> None:
    """One scale for 1x32 along K: without gradients any number of output features will do."""
    op = ops.GroupedLinear(2, 64, 48, **CPU)
    with torch.no_grad(), ops.autocast(recipe=MXFP8):
        assert op(torch.randn(20, 64).bfloat16(), SIZES).shape == (20, 48)


@pytest.mark.parametrize("recipe", [MXFP8, NVFP4], ids=lambda recipe: type(recipe).__name__)
def test_quantize_refuses_a_width_too(recipe: ops.Recipe) -> None:
    for op in (ops.Quantize(), ops.Quantize(False, True)):
        with ops.autocast(recipe=recipe), pytest.raises(ValueError, match="the last dimension to be a multiple of"):
            op(torch.randn(20, 40).bfloat16().requires_grad_())


# ----------------------------------------------------------------------------------------------------------------------
# Bytes


def test_mxfp8_keeps_less_than_bfloat16() -> None:
    """Saved for backward: x and act once in eight bits (and scales), the pre-activation in sixteen."""
    sizes = torch.tensor([1000, 2000, 1000])
    x = torch.randn(4000, 128).bfloat16().requires_grad_()

    def saved(recipe: ops.Recipe | None) -> int:
        model = ops.Sequential(
            ops.GroupedLinear(3, 128, 128, bias=False, **CPU),
            ops.SwiGLU(),
            ops.GroupedLinear(3, 64, 128, bias=False, **CPU),
            rules=(),
        )
        weights = {p.data_ptr() for p in model.parameters()}
        kept: dict[int, int] = {}

        def note(t: Tensor) -> Tensor:
            if t.dim() == 2 and t.data_ptr() not in weights:
                kept[t.data_ptr()] = t.numel() * t.element_size()
            return t

        context = ops.autocast(enabled=recipe is not None, recipe=recipe)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t), context:
            model(x, sizes, sizes)
        return sum(kept.values())

    assert saved(MXFP8) <= 0.85 * saved(None)


# ----------------------------------------------------------------------------------------------------------------------
# Held weights


@pytest.mark.parametrize("recipe", [MXFP8, NVFP4], ids=lambda recipe: type(recipe).__name__)
def test_held_weights_train_like_plain_ones(recipe: ops.Recipe) -> None:
    """The first step has the bits of plain weights; an update is quantised anew; a checkpoint restores the bytes."""
    mlp = MLP(hidden=128, intermediate=64)
    inputs = Inputs.random(EVEN, mlp.hidden, "cpu", torch.bfloat16)
    plain = mlp.build(EVEN, "cpu", torch.bfloat16)
    with ops.quantized_model_init(recipe=recipe):
        held = mlp.build(EVEN, "cpu", torch.bfloat16)
    held.load_state_dict(plain.state_dict())
    results = []
    for model in (plain, held):
        torch.manual_seed(3)
        with ops.autocast(recipe=recipe):
            results.append(step(model, mlp, inputs))
    for name in results[0]:
        assert_bitwise_equal(results[1][name], results[0][name], name)
    weight = held[0].weight0
    assert isinstance(weight, QuantizedTensor) and weight.format == recipe.operand_format("weight")
    torch.optim.SGD(held.parameters(), lr=0.5).step()
    with ops.quantized_model_init(recipe=recipe):
        other = mlp.build(EVEN, "cpu", torch.bfloat16)
    other.load_state_dict(held.state_dict())
    with torch.no_grad(), ops.autocast(recipe=recipe):
        extras = (EVEN.tensor(), inputs.probs, EVEN.tensor())
        assert_bitwise_equal(other(inputs.x, *extras), held(inputs.x, *extras), "y of the copy")
