"""The SM90 weight gradient against FP32 sums: ragged groups, poisoned memory, every kind of output buffer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from cute_kernels import reference
from cute_kernels.hopper.grouped_wgrad import grouped_wgrad, grouped_wgrad_
from tests.cases import SPLITS, Splits, full
from tests.compare import assert_as_accurate, assert_bitwise_equal

pytestmark = pytest.mark.gpu("sm_90a")

RAGGED = Splits("ragged", (200, 0, 233, 64, 331, 1, 15, 129), rows=1073)
LARGER_SPLITS = (*SPLITS, RAGGED)
SHAPES = ((576, 832), (72, 200), (8, 8), (256, 512), (200, 328))
NAN = float("nan")


def problem(splits: Splits, rows: int, columns: int, dtype=torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    """(dy, x, offsets); the tail is NaN."""
    dy = torch.randn(splits.rows, rows, device="cuda").to(dtype)
    x = torch.randn(splits.rows, columns, device="cuda").to(dtype)
    dy[splits.used :] = NAN
    x[splits.used :] = NAN
    offsets = torch.tensor([0, *accumulate(splits.sizes)], dtype=torch.int32, device="cuda")
    return dy, x, offsets


def poison(*shape: int, dtype=torch.bfloat16) -> None:
    """Leave NaN in the memory that the next tensor of this shape is likely to get."""
    torch.full(shape, NAN, dtype=dtype, device="cuda")


def expected(dy: Tensor, x: Tensor, splits: Splits, block: int = 0) -> tuple[list[Tensor], list[Tensor]]:
    """(FP32 sums, what PyTorch gives in the operands' dtype) for each group, rows as the weight has them."""
    wide = [dy[part].float().t() @ x[part].float() for part in splits.slices()]
    same = [dy[part].t() @ x[part] for part in splits.slices()]
    return [reference.interleave(w, block, 0) for w in wide], [reference.interleave(s, block, 0) for s in same]


def check(got: Sequence[Tensor], dy: Tensor, x: Tensor, splits: Splits, block: int = 0, skip: int = -1) -> None:
    wide, same = expected(dy, x, splits, block)
    for g, size in enumerate(splits.sizes):
        if g == skip:
            continue
        if size == 0:
            assert_bitwise_equal(got[g], torch.zeros_like(got[g]), f"empty group {g}")
        else:
            assert_as_accurate(got[g], same[g], wide[g], f"group {g} of {size} rows")


@pytest.mark.parametrize("splits", LARGER_SPLITS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_new_tensor(splits, shape):
    dy, x, offsets = problem(splits, *shape)
    poison(splits.groups, *shape)
    check(grouped_wgrad(dy, x, offsets), dy, x, splits)


def test_float16():
    dy, x, offsets = problem(RAGGED, 136, 264, torch.float16)
    poison(RAGGED.groups, 136, 264, dtype=torch.float16)
    check(grouped_wgrad(dy, x, offsets), dy, x, RAGGED)


@pytest.mark.parametrize("group", [0, 2, 5])
def test_nan_stays_in_its_group(group):
    dy, x, offsets = problem(RAGGED, 576, 832)
    for t in (dy, x):
        t[RAGGED.slices()[group]] = NAN
    got = grouped_wgrad(dy, x, offsets)
    assert got[group].isnan().all()
    check(got, dy, x, RAGGED, skip=group)


@pytest.mark.parametrize("block", [1, 3, 8, 32, 96])
def test_interleaved_rows(block):
    dy, x, offsets = problem(RAGGED, 576, 200)
    poison(RAGGED.groups, 576, 200)
    got = grouped_wgrad(dy, x, offsets, block)
    check(got, dy, x, RAGGED, block)
    assert_bitwise_equal(got, reference.interleave(grouped_wgrad(dy, x, offsets), block, 1))


def buffers(kind: str, splits: Splits, shape: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
    """The caller's buffers, not yet written."""
    if kind == "stacked":
        return [torch.empty(splits.groups, *shape, dtype=dtype, device="cuda")]
    return [torch.empty(shape, dtype=dtype, device="cuda") for _ in splits.sizes]


def groups_of(out: list[Tensor]) -> Sequence[Tensor]:
    return out[0].unbind(0) if out[0].dim() == 3 else out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["stacked", "separate"])
@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_overwrites_buffers(dtype, kind, shape):
    dy, x, offsets = problem(RAGGED, *shape)
    out = buffers(kind, RAGGED, shape, dtype)
    for t in out:
        t.fill_(NAN)
    grouped_wgrad_(out, dy, x, offsets)
    wide, _ = expected(dy, x, RAGGED)
    for g, got in enumerate(groups_of(out)):
        assert_as_accurate(got, wide[g].to(dtype), wide[g], f"group {g}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["stacked", "separate"])
@pytest.mark.parametrize("block", [0, 4])
def test_adds_to_buffers(dtype, kind, block):
    shape = (72, 200)
    dy, x, offsets = problem(RAGGED, *shape)
    out = buffers(kind, RAGGED, shape, dtype)
    for t in out:
        t.normal_()
    before = [t.clone() for t in groups_of(out)]
    grouped_wgrad_(out, dy, x, offsets, block, accumulate=True)
    wide, _ = expected(dy, x, RAGGED, block)
    for g, got in enumerate(groups_of(out)):
        if RAGGED.sizes[g] == 0:
            assert_bitwise_equal(got, before[g], f"empty group {g} is left alone")
        else:
            in_two_roundings = before[g] + wide[g].to(dtype)
            assert_as_accurate(got, in_two_roundings, before[g].float() + wide[g], f"group {g}")


@pytest.mark.parametrize("kind", ["stacked", "separate"])
@pytest.mark.parametrize("block", [0, 32, 48])
@pytest.mark.parametrize("adds", [False, True])
def test_pairs_of_row_tiles(kind, block, adds):
    """Two CTAs share x's tile, many tiles a CTA, interleaved rows by TMA."""
    splits, (rows, columns) = REPEATED[0][0], (768, 1096)
    dy, x, offsets = problem(splits, rows, columns)
    out = buffers(kind, splits, (rows, columns), torch.float32)
    for t in out:
        t.normal_() if adds else t.fill_(NAN)
    before = [t.clone() for t in groups_of(out)]
    grouped_wgrad_(out, dy, x, offsets, block, accumulate=adds)
    wide, _ = expected(dy, x, splits, block)
    for g, got in enumerate(groups_of(out)):
        want = before[g] + wide[g] if adds else wide[g]
        assert_as_accurate(got, want, want, f"group {g}")


def test_nothing_outside_the_buffers_is_written():
    """Separate buffers inside one allocation: what lies between them keeps its bits."""
    splits, shape = RAGGED, (72, 200)
    dy, x, offsets = problem(splits, *shape)
    whole = torch.full((splits.groups, 2 * shape[0], shape[1]), 7.0, dtype=torch.bfloat16, device="cuda")
    out = [whole[g, : shape[0]] for g in range(splits.groups)]
    grouped_wgrad_(out, dy, x, offsets)
    check(out, dy, x, splits)
    assert_bitwise_equal(whole[:, shape[0] :], torch.full_like(whole[:, shape[0] :], 7.0))


def test_strided_and_expanded_operands():
    splits, (rows, columns) = RAGGED, (72, 200)
    dy, x, offsets = problem(splits, rows, columns)
    want = grouped_wgrad(dy, x, offsets)
    wider = torch.full((splits.rows, rows + 40), NAN, dtype=dy.dtype, device="cuda")
    wider[:, 8 : 8 + rows] = dy
    odd = torch.full((splits.rows, columns + 3), NAN, dtype=x.dtype, device="cuda")
    odd[:, 1 : 1 + columns] = x
    assert_bitwise_equal(grouped_wgrad(wider[:, 8 : 8 + rows], odd[:, 1 : 1 + columns], offsets), want)
    assert_bitwise_equal(grouped_wgrad(dy.t().contiguous().t(), x, offsets), want)
    ones = torch.ones((), dtype=dy.dtype, device="cuda")
    assert_bitwise_equal(
        grouped_wgrad(ones.expand(splits.rows, rows), x, offsets),
        grouped_wgrad(torch.ones_like(dy), x, offsets),
    )


def test_no_rows():
    offsets = torch.zeros(4, dtype=torch.int32, device="cuda")
    dy, x = (torch.empty(0, width, dtype=torch.bfloat16, device="cuda") for width in (72, 200))
    poison(3, 72, 200)
    assert_bitwise_equal(grouped_wgrad(dy, x, offsets), torch.zeros(3, 72, 200, dtype=torch.bfloat16, device="cuda"))
    out = torch.ones(3, 72, 200, device="cuda")
    grouped_wgrad_([out], dy, x, offsets, accumulate=True)
    assert (out == 1).all()


def test_many_groups():
    """1024 groups of 0, 1 or 2 rows: 8 tables of addresses."""
    sizes = tuple(g % 3 for g in range(1024))
    splits = Splits("many", sizes, sum(sizes) + 5)
    dy, x, offsets = problem(splits, 16, 24)
    out = [torch.full((16, 24), NAN, device="cuda") for _ in sizes]
    grouped_wgrad_(out, dy, x, offsets)
    got = torch.stack(out)
    wide, _ = expected(dy, x, splits)
    assert_as_accurate(got, torch.stack(wide), torch.stack(wide))
    assert_as_accurate(grouped_wgrad(dy, x, offsets), got.to(torch.bfloat16), torch.stack(wide))


def test_more_elements_than_32_bits_count():
    splits = Splits("wide", (3,) * 34, 34 * 3)
    dy, x, offsets = problem(splits, 8192, 8192)
    got = grouped_wgrad(dy, x, offsets)
    for g in (0, 16, 33):
        part = splits.slices()[g]
        assert_as_accurate(got[g], dy[part].t() @ x[part], dy[part].float().t() @ x[part].float(), f"group {g}")


REPEATED = (  # splits, N, K
    (full("uneven", 128, 128, 384, 128, 256, 128, 128, 256), 768, 2048),
    (full("many_groups", *(g % 40 for g in range(64))), 768, 512),
    (full("skewed", 4096, 1, 1, 1, 1, 1, 1, 1), 768, 2048),
    (Splits("skewed_with_tail", (1, 900, 0, 15, 2000, 64, 333, 17), rows=3400), 576, 832),
)


@pytest.mark.parametrize("splits, rows, columns", REPEATED, ids=str)
def test_same_bits_in_200_runs_and_with_fewer_sms(splits, rows, columns):
    dy, x, offsets = problem(splits, rows, columns)
    first = grouped_wgrad(dy, x, offsets)
    check(first, dy, x, splits)
    start = torch.randn(splits.groups, rows, columns, device="cuda")
    sums = start.clone()
    grouped_wgrad_([sums], dy, x, offsets, accumulate=True)
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for run in range(200):
        again = grouped_wgrad(dy, x, offsets, sm_margin=run % 100)
        different += (again.view(torch.int16) != first.view(torch.int16)).sum()
        more = start.clone()
        grouped_wgrad_([more], dy, x, offsets, accumulate=True, sm_margin=run % 7)
        different += (more.view(torch.int32) != sums.view(torch.int32)).sum()
    assert int(different) == 0


@pytest.mark.parametrize("splits, rows, columns", (*REPEATED, (RAGGED, 128, 832)), ids=str)
@pytest.mark.parametrize("accumulate", [False, True])
def test_tiles_taken_through_a_counter_have_the_same_bits(splits, rows, columns, accumulate):
    dy, x, offsets = problem(splits, rows, columns)
    start = torch.randn(splits.groups, rows, columns, device="cuda")
    want, counter = start.clone(), torch.zeros(1, dtype=torch.int32, device="cuda")
    grouped_wgrad_([want], dy, x, offsets, accumulate=accumulate)
    for margin in range(20):
        got = start.clone()
        grouped_wgrad_([got], dy, x, offsets, accumulate=accumulate, sm_margin=margin, counter=counter)
        assert_bitwise_equal(got, want)
        assert int(counter) == 0


SPARSE = (  # group sizes, all but a few empty
    tuple(300 if g == 40 else 0 for g in range(100)),
    tuple(1 if g in (0, 31, 32, 99) else 0 for g in range(100)),
    (0,) * 70,
)


@pytest.mark.parametrize("sizes", SPARSE, ids=("one", "ends", "none"))
@pytest.mark.parametrize("kind", ["stacked", "separate"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_mostly_empty_groups(sizes, kind, dtype):
    splits, shape = Splits("sparse", sizes, sum(sizes) + 3), (392, 200)
    dy, x, offsets = problem(splits, *shape)
    out = buffers(kind, splits, shape, dtype)
    for t in out:
        t.fill_(NAN)
    grouped_wgrad_(out, dy, x, offsets)
    wide, _ = expected(dy, x, splits)
    for g, got in enumerate(groups_of(out)):
        assert_as_accurate(got, wide[g].to(dtype), wide[g], f"group {g}")
    for t in out:
        t.fill_(7.0)
    grouped_wgrad_(out, dy, x, offsets, accumulate=True)
    for g, got in enumerate(groups_of(out)):
        if sizes[g] == 0:
            assert_bitwise_equal(got, torch.full_like(got, 7.0), f"empty group {g} is left alone")


@pytest.mark.parametrize("kind", ["stacked", "separate"])
def test_graph_replays_with_other_splits(kind):
    shape = (72, 200)
    dy, x, offsets = problem(RAGGED, *shape)
    out = buffers(kind, RAGGED, shape, torch.float32)
    grouped_wgrad_(out, dy, x, offsets)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grouped_wgrad_(out, dy, x, offsets)
    other = Splits("other", (129, 15, 1, 331, 64, 233, 0, 200), rows=RAGGED.rows)
    dy2, x2, offsets2 = problem(other, *shape)
    dy.copy_(dy2)
    x.copy_(x2)
    offsets.copy_(offsets2)
    for t in out:
        t.fill_(NAN)
    graph.replay()
    wide, _ = expected(dy2, x2, other)
    for g, got in enumerate(groups_of(out)):
        assert_as_accurate(got, wide[g], wide[g], f"group {g}")


def test_calls_that_cannot_be_taken_say_why():
    dy, x, offsets = problem(RAGGED, 72, 200)
    with pytest.raises(ValueError, match=r"N is 68, needs a multiple of 8"):
        grouped_wgrad(dy[:, :68].contiguous(), x, offsets)
    with pytest.raises(ValueError, match=r"dtype is float32"):
        grouped_wgrad(dy.float(), x.float(), offsets)
    with pytest.raises(ValueError, match=r"offsets is int64"):
        grouped_wgrad(dy, x, offsets.long())
    with pytest.raises(ValueError, match=r"glu_interleave is 5"):
        grouped_wgrad(dy, x, offsets, 5)
    with pytest.raises(ValueError, match=r"x is bfloat16 \[10, 200\]"):
        grouped_wgrad(dy, x[:10], offsets)
    with pytest.raises(ValueError, match=r"out has 2 tensors"):
        grouped_wgrad_([torch.empty(72, 200, device="cuda")] * 2, dy, x, offsets)
    with pytest.raises(ValueError, match=r"out needs to be contiguous"):
        grouped_wgrad_([torch.empty(8, 200, 72, device="cuda").transpose(1, 2)], dy, x, offsets)
