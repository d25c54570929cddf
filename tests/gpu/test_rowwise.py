"""The SM90 row-wise kernels against the reference: offsets, activation gradients, bias gradients."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from torch import Tensor

from cute_kernels import fp8_reference, reference
from cute_kernels.activation import Activation
from cute_kernels.catalog import SM90_ACTIVATIONS
from cute_kernels.hopper.operands import MOST_ROWS
from cute_kernels.hopper.rowwise import dact, group_offsets, grouped_dbias, grouped_dscale, padded_group_offsets
from tests.cases import OFF_TILE, SPLITS, TAIL, Splits
from tests.compare import assert_as_accurate, assert_bitwise_equal

pytestmark = pytest.mark.gpu("sm_90a")

NAN = float("nan")
LONG = Splits("long", (0, 5000, 1, 0, 255, 257, 3000), rows=9000)


def offsets_of(splits: Splits) -> Tensor:
    return torch.tensor([0, *accumulate(splits.sizes)], dtype=torch.int32, device="cuda")


def rows(splits: Splits, width: int, dtype=torch.bfloat16) -> Tensor:
    """Random rows; the tail is NaN."""
    t = torch.randn(splits.rows, width, device="cuda").to(dtype)
    t[splits.used :] = NAN
    return t


def poison(*shape: int, dtype=torch.float32) -> None:
    """Leave NaN in the memory that the next tensor of this shape is likely to get."""
    torch.full(shape, NAN, dtype=dtype, device="cuda")


# Offsets


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("groups", [1, 2, 31, 32, 33, 255, 256, 257, 1000, 1024, 4096, 10_000])
def test_offsets(dtype, groups):
    sizes = torch.randint(-3, 50, (groups,), device="cuda", dtype=dtype)
    total = int(sizes.clamp(min=0).sum())
    for limit in (total, total + 7, total // 2, 0):
        assert_bitwise_equal(group_offsets(sizes, limit), reference.group_offsets(sizes, limit))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("groups", [1, 2, 33, 255, 257, 1024, 10_000])
def test_padded_offsets(dtype, groups):
    sizes = torch.randint(-3, 400, (groups,), device="cuda", dtype=dtype)
    total = int(sizes.clamp(min=0).sum())
    for limit in (total, total + 7, total // 2, 0):
        for multiple in (32, 128):
            got = padded_group_offsets(sizes, limit, multiple)
            want = fp8_reference.padded_group_offsets(sizes, limit, multiple)
            for a, b in zip(got, want, strict=True):
                assert_bitwise_equal(a, b)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_offsets_of_a_strided_view(dtype):
    table = torch.randint(0, 50, (40, 3), device="cuda", dtype=dtype)
    assert_bitwise_equal(group_offsets(table[:, 1], 10_000), reference.group_offsets(table[:, 1], 10_000))
    one = torch.full((), 5, device="cuda", dtype=dtype).expand(9)
    assert_bitwise_equal(group_offsets(one, 10_000), reference.group_offsets(one, 10_000))


def test_offsets_never_wrap():
    sizes = torch.tensor([2**62, 2**62, 2**62, -(2**63), 2**31, 5], device="cuda")
    top = MOST_ROWS - 1
    assert group_offsets(sizes, top).tolist() == [0, *[top] * 6]
    many = torch.full((300,), top, dtype=torch.int32, device="cuda")
    assert group_offsets(many, top)[1:].unique().tolist() == [top]
    offsets, padded = padded_group_offsets(sizes, top, 32)
    assert offsets.tolist() == [0, *[top] * 6] and padded.tolist() == [0, *[-(-top // 32) * 32] * 6]


def test_offsets_say_why_not():
    with pytest.raises(ValueError, match=r"split_sizes is float32"):
        group_offsets(torch.ones(3, device="cuda"), 3)
    with pytest.raises(ValueError, match=r"G is 0"):
        group_offsets(torch.ones(0, dtype=torch.int32, device="cuda"), 3)


# Activation gradients

ACTIVATIONS = [Activation(kind) for kind in SM90_ACTIVATIONS if kind != "clamped_swiglu"] + [
    Activation("clamped_swiglu", 1.0, 1.702, 1.0),
    Activation("clamped_swiglu"),
]


def check_dact(splits: Splits, width: int, activation: Activation, probs: Tensor | None, dtype=torch.bfloat16) -> None:
    grad, preact = rows(splits, width, dtype), rows(splits, activation.halves * width, dtype)
    offsets = offsets_of(splits)
    poison(*preact.shape, dtype=dtype)
    got, sums = dact(grad, preact, offsets, probs, activation, need_dprobs=True)
    used = splits.used
    wide_probs = None if probs is None else probs.to(dtype).double()
    exact, exact_sums = reference.activation_backward(
        grad[:used].double(), preact[:used].double(), activation, None if probs is None else wide_probs[:used], True
    )
    same, same_sums = reference.dact(grad, preact, offsets, probs, activation, True)
    assert_as_accurate(got[:used], same[:used], exact, "dpreact")
    assert_as_accurate(sums[:used], same_sums[:used], exact_sums, "dprobs")
    for tail in (got[used:], sums[used:]):
        assert_bitwise_equal(tail, torch.zeros_like(tail), "tail")
    alone, nothing = dact(grad, preact, offsets, probs, activation)
    assert nothing is None
    assert_bitwise_equal(alone, got)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("probs", [None, torch.float32, torch.bfloat16], ids=str)
def test_dact(activation, probs):
    factors = None if probs is None else torch.rand(TAIL.rows, device="cuda").to(probs)
    check_dact(TAIL, 328, activation, factors)


@pytest.mark.parametrize("splits", SPLITS, ids=str)
def test_dact_splits(splits):
    check_dact(splits, 72, Activation("swiglu"), torch.rand(splits.rows, device="cuda"))


def test_dact_float16():
    check_dact(OFF_TILE, 8, Activation("geglu"), torch.rand(OFF_TILE.rows, device="cuda"), torch.float16)


def test_dact_of_views():
    """Columns of a wider tensor, and a transposed gradient."""
    wide = torch.randn(TAIL.rows, 400, device="cuda", dtype=torch.bfloat16)
    grad = torch.randn(72, TAIL.rows, device="cuda", dtype=torch.bfloat16).t()
    offsets = offsets_of(TAIL)
    got, _ = dact(grad, wide[:, 16 : 16 + 144], offsets, None, Activation("swiglu"))
    want, _ = dact(grad.contiguous(), wide[:, 16 : 16 + 144].contiguous(), offsets, None, Activation("swiglu"))
    assert_bitwise_equal(got, want)


@pytest.mark.parametrize("block", [1, 8, 16, 32])
def test_dact_of_interleaved_columns(block):
    """The bits of [gate | up], rearranged."""
    width, clamped = 352 if block >= 16 else 328, Activation("clamped_swiglu", 1.0, 1.702, 1.0)
    preact, grad = rows(TAIL, 2 * width), rows(TAIL, width)
    operands = offsets_of(TAIL), torch.rand(TAIL.rows, device="cuda"), clamped, True
    want = dact(grad, preact, *operands)
    got = dact(grad, reference.interleave(preact, block, 1), *operands, block)
    assert_bitwise_equal(got[0], reference.interleave(want[0], block, 1))
    assert_bitwise_equal(got[1], want[1])


# Bias gradients


def exact_dbias(dy: Tensor, splits: Splits, scale: Tensor | None, block: int) -> Tensor:
    wide = dy.double() if scale is None else dy.double() * scale.double()[:, None]
    return reference.interleave(torch.stack([wide[part].sum(0) for part in splits.slices()]), block, 1)


@pytest.mark.parametrize("splits", (*SPLITS, LONG), ids=str)
@pytest.mark.parametrize("scale", [None, torch.float32, torch.bfloat16], ids=str)
def test_dbias(splits, scale):
    for width in (8, 72, 256, 520):
        dy = rows(splits, width)
        factors = None if scale is None else torch.rand(splits.rows, device="cuda").to(scale)
        poison(splits.groups, width)
        got = grouped_dbias(dy, offsets_of(splits), factors)
        exact = exact_dbias(dy, splits, factors, 0)
        assert_as_accurate(got, exact.float(), exact, f"width {width}")
        for g, size in enumerate(splits.sizes):
            assert size or (got[g] == 0).all()


@pytest.mark.parametrize("block", [1, 3, 4, 36])
def test_dbias_interleaved(block):
    dy = rows(LONG, 72)
    exact = exact_dbias(dy, LONG, None, block)
    assert_as_accurate(grouped_dbias(dy, offsets_of(LONG), None, block), exact.float(), exact)


def test_dbias_keeps_nan_in_its_group():
    dy = rows(LONG, 136)
    dy[LONG.slices()[4]] = NAN
    got = grouped_dbias(dy, offsets_of(LONG))
    assert got[4].isnan().all()
    others = [g for g in range(LONG.groups) if g != 4]
    exact = exact_dbias(dy, LONG, None, 0)[others]
    assert_as_accurate(got[others], exact.float(), exact)


def test_dbias_same_bits_in_200_runs():
    dy, factors = rows(LONG, 520), torch.rand(LONG.rows, device="cuda")
    offsets = offsets_of(LONG)
    first = grouped_dbias(dy, offsets, factors)
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(200):
        different += (grouped_dbias(dy, offsets, factors).view(torch.int32) != first.view(torch.int32)).sum()
    assert int(different) == 0


@pytest.mark.parametrize("splits", (*SPLITS, LONG), ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_dscale(splits, dtype):
    for width in (8, 264, 1000):
        dy, bias = rows(splits, width, dtype), torch.randn(splits.groups, width, device="cuda").to(dtype)
        poison(splits.rows)
        got = grouped_dscale(dy, bias, offsets_of(splits))
        used = splits.used
        exact = torch.zeros(used, dtype=torch.float64, device="cuda")
        for g, part in enumerate(splits.slices()):
            exact[part] = dy[part].double() @ bias[g].double()
        assert_as_accurate(got[:used], exact.float(), exact, f"width {width}")
        assert_bitwise_equal(got[used:], torch.zeros_like(got[used:]), "tail")


def test_no_rows():
    offsets = torch.zeros(3, dtype=torch.int32, device="cuda")
    empty = torch.empty(0, 72, dtype=torch.bfloat16, device="cuda")
    assert (grouped_dbias(empty, offsets) == 0).all()
    assert grouped_dscale(empty, torch.ones(2, 72, dtype=torch.bfloat16, device="cuda"), offsets).shape == (0,)
    grad, sums = dact(empty[:, :32], empty[:, :64], offsets, None, Activation("swiglu"), need_dprobs=True)
    assert grad.shape == (0, 64) and sums.shape == (0,)


def test_graph_replays_with_other_splits():
    splits = Splits("first", (600, 0, 300, 33), rows=1000)
    other = Splits("other", (33, 500, 7, 400), rows=1000)
    dy, bias = rows(splits, 264), torch.randn(4, 264, device="cuda", dtype=torch.bfloat16)
    sizes = splits.tensor("cuda")

    def step() -> tuple[Tensor, Tensor]:
        offsets = group_offsets(sizes, dy.shape[0])
        return grouped_dbias(dy, offsets), grouped_dscale(dy, bias, offsets)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sums, dots = step()
    dy.copy_(rows(other, 264))
    sizes.copy_(other.tensor("cuda"))
    graph.replay()
    want_sums, want_dots = step()
    assert_bitwise_equal(sums, want_sums)
    assert_bitwise_equal(dots, want_dots)
