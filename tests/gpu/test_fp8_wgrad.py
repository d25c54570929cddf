"""The SM90 FP8 weight gradient: exact where sums are exact, else near FP32 sums of the dequantised operands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from cute_kernels import fp8_reference, reference
from cute_kernels.fp8_reference import dequantized_t
from cute_kernels.hopper.fp8_wgrad import fp8_grouped_wgrad, fp8_grouped_wgrad_
from tests.cases import SPLITS, Splits, full
from tests.compare import assert_as_accurate, assert_bitwise_equal

pytestmark = pytest.mark.gpu("sm_90a")

NAN = float("nan")
RAGGED = Splits("ragged", (200, 0, 233, 64, 331, 1, 15, 129), rows=1073)
SHAPES = ((576, 832), (80, 208), (16, 16), (256, 512), (208, 336), (384, 784))


@dataclass
class Problem:
    """Transposed copies with everything that may not be used poisoned, and the exact gradients by group, FP32."""

    operands: tuple[Tensor, ...]
    padded: Tensor
    exact: list[Tensor]


def poisoned(x: Tensor, offsets: Tensor, padded: Tensor, power_of_two: bool) -> tuple[Tensor, Tensor]:
    """x's transposed copy; NaN past padded[G] and in scales that only fill up."""
    data, scale = fp8_reference.fp8_quantize(x, offsets, padded, rowwise=False, power_of_two=power_of_two)[2:4]
    end = int(padded[-1])
    data.view(torch.uint8)[:, end:] = 0x7F
    scale[end // 128 :] = NAN
    scale[:, x.shape[1] :] = NAN
    return data, scale


def problem(splits: Splits, rows: int, columns: int, exact: bool = False, power_of_two: bool = True) -> Problem:
    """exact: small integers, whose sums no precision loses."""

    def values(width: int) -> Tensor:
        shape = (splits.rows, width)
        t = torch.randint(-3, 4, shape, device="cuda") if exact else torch.randn(shape, device="cuda")
        t = t.bfloat16()
        t[splits.used :] = NAN
        return t

    offsets, padded = fp8_reference.padded_group_offsets(splits.tensor("cuda"), splits.rows)
    operands = tuple(t for width in (rows, columns) for t in poisoned(values(width), offsets, padded, power_of_two))
    bounds = padded.tolist()
    tokens = [slice(bounds[g], bounds[g + 1]) for g in range(splits.groups)]
    dy, x = (dequantized_t(operands[i], operands[i + 1]).double() for i in (0, 2))
    return Problem(operands, padded, [(dy[:, part] @ x[:, part].t()).float() for part in tokens])


def poison(*shape: int, dtype=torch.bfloat16) -> None:
    """Leave NaN in the memory that the next tensor of this shape is likely to get."""
    torch.full(shape, NAN, dtype=dtype, device="cuda")


def check(got: Sequence[Tensor], want: Sequence[Tensor], splits: Splits, skip: int = -1) -> None:
    for g, size in enumerate(splits.sizes):
        if size == 0:
            assert_bitwise_equal(got[g], torch.zeros_like(got[g]), f"empty group {g}")
        elif g != skip:
            # Also FP32 results by the rule for BF16: the tensor cores add E4M3 products with some 14 bits.
            assert_as_accurate(got[g].bfloat16(), want[g].bfloat16(), want[g], f"group {g} of {size} rows")


@pytest.mark.parametrize("splits", (*SPLITS, RAGGED), ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_exact_sums(splits, shape):
    p = problem(splits, *shape, exact=True)
    poison(splits.groups, *shape)
    got = fp8_grouped_wgrad(*p.operands, p.padded)
    assert got.dtype == torch.bfloat16 and torch.equal(got, torch.stack(p.exact).bfloat16())


@pytest.mark.parametrize("splits", (full("one", 5000), full("two", 3000, 2999), RAGGED), ids=str)
@pytest.mark.parametrize("power_of_two", [True, False])
def test_random_sums(splits, power_of_two):
    for shape in SHAPES[:2]:
        p = problem(splits, *shape, power_of_two=power_of_two)
        poison(splits.groups, *shape)
        check(fp8_grouped_wgrad(*p.operands, p.padded), p.exact, splits)


def exact_gradients(p: Problem) -> list[Tensor]:
    """What the operands, as they are now, give."""
    dy, x = (dequantized_t(p.operands[i], p.operands[i + 1]).double() for i in (0, 2))
    bounds = p.padded.tolist()
    return [(dy[:, a:b] @ x[:, a:b].t()).float() for a, b in pairwise(bounds)]


@pytest.mark.parametrize("reach", [30, 90])
def test_scales_far_apart(reach):
    """Powers of two whose products fit an FP32 exponent, and those that do not; a block a group: no sum loses any."""
    splits = full("blocks", 128, 77, 1, 100)
    p = problem(splits, 208, 336, exact=True)
    for scale, width in zip(p.operands[1::2], (208, 336), strict=True):
        scale[:, :width] = torch.randint(-reach, reach + 1, (scale.shape[0], width), device="cuda").float().exp2()
    out = torch.full((splits.groups, 208, 336), NAN, device="cuda")
    fp8_grouped_wgrad_([out], *p.operands, p.padded)
    assert torch.equal(out, torch.stack(exact_gradients(p)))


def test_some_scales_are_no_powers_of_two():
    """One column's in some blocks, one row's in others."""
    p = problem(RAGGED, 208, 336, exact=True)
    p.operands[1][::3, 200] *= 1.5
    p.operands[3][1::3, 7] *= 1.25
    out = torch.full((RAGGED.groups, 208, 336), NAN, device="cuda")
    fp8_grouped_wgrad_([out], *p.operands, p.padded)
    assert torch.equal(out, torch.stack(exact_gradients(p)))


def test_equals_the_reference_on_exact_sums():
    p = problem(RAGGED, 80, 336, exact=True)
    want = fp8_reference.fp8_grouped_wgrad(*p.operands, p.padded, 4)
    assert torch.equal(fp8_grouped_wgrad(*p.operands, p.padded, 4), want)


@pytest.mark.parametrize("group", [0, 2, 5])
def test_nan_stays_in_its_group(group):
    p = problem(RAGGED, 576, 832)
    block = slice(int(p.padded[group]), int(p.padded[group]) + 1)
    for data in p.operands[::2]:
        data.view(torch.uint8)[:, block] = 0x7F
    got = fp8_grouped_wgrad(*p.operands, p.padded)
    assert got[group].isnan().all()
    check(got, p.exact, RAGGED, skip=group)


@pytest.mark.parametrize("block", [1, 3, 8, 32, 96])
def test_interleaved_rows(block):
    p = problem(RAGGED, 576, 336, exact=True)
    poison(RAGGED.groups, 576, 336)
    want = reference.interleave(torch.stack(p.exact).bfloat16(), block, 1)
    assert torch.equal(fp8_grouped_wgrad(*p.operands, p.padded, block), want)


def buffers(kind: str, splits: Splits, shape: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
    """The caller's buffers, not yet written."""
    if kind == "stacked":
        return [torch.empty(splits.groups, *shape, dtype=dtype, device="cuda")]
    return [torch.empty(shape, dtype=dtype, device="cuda") for _ in splits.sizes]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["stacked", "separate"])
@pytest.mark.parametrize("shape", [(576, 832), (256, 512)], ids=str)
def test_overwrites_buffers(dtype, kind, shape):
    p = problem(RAGGED, *shape, exact=True)
    out = buffers(kind, RAGGED, shape, dtype)
    for t in out:
        t.fill_(NAN)
    fp8_grouped_wgrad_(out, *p.operands, p.padded)
    for g, got in enumerate(reference.each_group(out)):
        assert torch.equal(got, p.exact[g].to(dtype)), f"group {g}"


ADDS = (  # dtype, kind, interleave, shape
    (torch.bfloat16, "stacked", 0, (64, 336)),
    (torch.bfloat16, "separate", 4, (64, 336)),
    (torch.float16, "separate", 32, (64, 336)),
    (torch.float32, "stacked", 0, (64, 336)),
    (torch.float32, "separate", 4, (64, 336)),
    (torch.float32, "stacked", 0, (768, 1040)),
    (torch.float32, "separate", 32, (768, 1040)),
    (torch.bfloat16, "stacked", 32, (768, 1040)),
    (torch.bfloat16, "separate", 0, (256, 512)),
)


@pytest.mark.parametrize("dtype, kind, block, shape", ADDS, ids=str)
def test_adds_to_buffers(dtype, kind, block, shape):
    p = problem(RAGGED, *shape, exact=True)
    out = buffers(kind, RAGGED, shape, dtype)
    for t in out:
        t.copy_(torch.randint(-50, 50, t.shape, device="cuda"))
    before = [t.clone() for t in reference.each_group(out)]
    fp8_grouped_wgrad_(out, *p.operands, p.padded, block, accumulate=True)
    for g, got in enumerate(reference.each_group(out)):
        if RAGGED.sizes[g] == 0:
            assert_bitwise_equal(got, before[g], f"empty group {g} is left alone")
        else:
            assert torch.equal(got, before[g] + reference.interleave(p.exact[g], block, 0).to(dtype)), f"group {g}"


def test_nothing_outside_the_buffers_is_written():
    """Separate buffers inside one allocation: what lies between them keeps its bits."""
    shape = (80, 336)
    p = problem(RAGGED, *shape, exact=True)
    whole = torch.full((RAGGED.groups, 2 * shape[0], shape[1]), 7.0, dtype=torch.bfloat16, device="cuda")
    out = [whole[g, : shape[0]] for g in range(RAGGED.groups)]
    fp8_grouped_wgrad_(out, *p.operands, p.padded)
    assert torch.equal(torch.stack(out), torch.stack(p.exact).bfloat16())
    assert_bitwise_equal(whole[:, shape[0] :], torch.full_like(whole[:, shape[0] :], 7.0))


def test_no_rows():
    splits = Splits("none", (0, 0, 0), rows=0)
    p = problem(splits, 80, 336)
    poison(3, 80, 336)
    got = fp8_grouped_wgrad(*p.operands, p.padded)
    assert_bitwise_equal(got, torch.zeros(3, 80, 336, dtype=torch.bfloat16, device="cuda"))
    out = torch.ones(3, 80, 336, device="cuda")
    fp8_grouped_wgrad_([out], *p.operands, p.padded, accumulate=True)
    assert (out == 1).all()


def test_many_groups():
    """1024 groups of 0, 1 or 2 rows: 8 tables of addresses."""
    sizes = tuple(g % 3 for g in range(1024))
    splits = Splits("many", sizes, sum(sizes) + 5)
    p = problem(splits, 16, 32, exact=True)
    out = [torch.full((16, 32), NAN, device="cuda") for _ in sizes]
    fp8_grouped_wgrad_(out, *p.operands, p.padded)
    assert torch.equal(torch.stack(out), torch.stack(p.exact))
    assert torch.equal(fp8_grouped_wgrad(*p.operands, p.padded), torch.stack(p.exact).bfloat16())


def test_more_elements_than_32_bits_count():
    splits = Splits("wide", (3,) * 34, 34 * 3)
    p = problem(splits, 8192, 8192, exact=True)
    got = fp8_grouped_wgrad(*p.operands, p.padded)
    for g in (0, 16, 33):
        assert torch.equal(got[g], p.exact[g].bfloat16()), f"group {g}"


REPEATED = (  # splits, N, K
    (full("uneven", 128, 128, 384, 128, 256, 128, 128, 256), 768, 2048),
    (full("many_groups", *(g % 40 for g in range(64))), 768, 512),
    (Splits("skewed_with_tail", (1, 900, 0, 15, 2000, 64, 333, 17), rows=3400), 576, 832),
)


@pytest.mark.parametrize("splits, rows, columns", REPEATED, ids=str)
def test_same_bits_in_100_runs_and_with_fewer_sms(splits, rows, columns):
    p = problem(splits, rows, columns)
    first = fp8_grouped_wgrad(*p.operands, p.padded)
    check(first, p.exact, splits)
    start = torch.randn(splits.groups, rows, columns, device="cuda")
    sums = start.clone()
    fp8_grouped_wgrad_([sums], *p.operands, p.padded, accumulate=True)
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for run in range(100):
        again = fp8_grouped_wgrad(*p.operands, p.padded, sm_margin=run % 100)
        different += (again.view(torch.int16) != first.view(torch.int16)).sum()
        more = start.clone()
        fp8_grouped_wgrad_([more], *p.operands, p.padded, accumulate=True, sm_margin=run % 7)
        different += (more.view(torch.int32) != sums.view(torch.int32)).sum()
    assert int(different) == 0


def test_graph_replays_with_other_splits():
    p, other = problem(RAGGED, 80, 336, exact=True), None
    out = torch.empty(RAGGED.groups, 80, 336, device="cuda")
    fp8_grouped_wgrad_([out], *p.operands, p.padded)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fp8_grouped_wgrad_([out], *p.operands, p.padded)
    other = problem(Splits("other", (129, 15, 1, 331, 64, 233, 0, 200), rows=RAGGED.rows), 80, 336, exact=True)
    for held, new in zip((*p.operands, p.padded), (*other.operands, other.padded), strict=True):
        held.copy_(new)
    out.fill_(NAN)
    graph.replay()
    assert torch.equal(out, torch.stack(other.exact))


def test_calls_that_cannot_be_taken_say_why():
    dy, dy_scale, x, x_scale = problem(RAGGED, 80, 336).operands
    padded = problem(RAGGED, 80, 336).padded
    with pytest.raises(ValueError, match=r"N is 72, needs a multiple of 16"):
        fp8_grouped_wgrad(dy[:72], dy_scale[:, :72].contiguous(), x, x_scale, padded)
    with pytest.raises(ValueError, match=r"x_t is float32"):
        fp8_grouped_wgrad(dy, dy_scale, x.float(), x_scale, padded)
    with pytest.raises(ValueError, match=r"offsets is int64"):
        fp8_grouped_wgrad(dy, dy_scale, x, x_scale, padded.long())
    with pytest.raises(ValueError, match=r"dy_scale_t is float32 \[3, 80\]"):
        fp8_grouped_wgrad(dy, dy_scale[:3], x, x_scale, padded)
    with pytest.raises(ValueError, match=r"glu_interleave is 7"):
        fp8_grouped_wgrad(dy, dy_scale, x, x_scale, padded, 7)
    with pytest.raises(ValueError, match=r"fp8_grouped_wgrad: out has 2 tensors"):
        fp8_grouped_wgrad_([torch.empty(80, 336, device="cuda")] * 2, dy, dy_scale, x, x_scale, padded)
