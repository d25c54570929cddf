"""The SM90 quantise kernels against the reference, byte for byte: awkward values, ragged groups, edges, poison."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cute_kernels import fp8_reference
from cute_kernels.fp8_reference import padded_group_offsets
from cute_kernels.hopper.fp8_quantize import fp8_quantize, fp8_quantize_weight
from cute_kernels.quantization.groups import padded_rows
from tests.cases import SPLITS, Splits
from tests.compare import assert_as_accurate, assert_bitwise_equal

pytestmark = pytest.mark.gpu("sm_90a")

NAN, INF = float("nan"), float("inf")
RAGGED = Splits("ragged", (200, 0, 233, 64, 331, 1, 15, 129, 0, 512), rows=1600)
COLUMNS = (16, 128, 144, 768, 1856, 2880)
ASKED = {"both": {}, "rows": {"columnwise": False}, "columns": {"rowwise": False}, "sums": {"column_sums": True}}


def wide_range(*shape: int, dtype=torch.bfloat16) -> Tensor:
    """Normal values times powers of two from row to row and column to column."""
    far = 6 if dtype == torch.float16 else 40
    rows, columns = (torch.randint(-far, far + 1, (n,), device="cuda").exp2() for n in shape[-2:])
    return (torch.randn(shape, device="cuda") * rows[:, None] * columns.sqrt()).to(dtype)


def ties(*shape: int, dtype=torch.bfloat16) -> Tensor:
    """Multiples of 1/64 below 4: a fifth bit of the mantissa lies halfway between E4M3 values."""
    return (torch.randint(-255, 256, shape, device="cuda") / 64).to(dtype)


def special(*shape: int, dtype=torch.bfloat16) -> Tensor:
    """Zeros of both signs, subnormal, smallest and largest numbers, now and then Inf and NaN."""
    info = torch.finfo(dtype)
    values = torch.tensor(
        [0.0, -0.0, info.tiny, -info.tiny, info.smallest_normal / 4, -info.smallest_normal / 128, info.max, -info.max,
         1.75, 1.7578125, 448.0, 449.0, 1.0, -3.0, 1e-3], device="cuda", dtype=torch.float64,
    ).to(dtype)  # fmt: skip
    x = values[torch.randint(0, len(values), shape, device="cuda")]
    # Rows and columns of one magnitude, and blocks of nothing but zeros.
    x[::3] = values[torch.randint(2, 6, shape[-1:], device="cuda")]
    x[1::7] = 0
    x[:, ::16] = values[4]
    rare = torch.rand(shape, device="cuda")
    x[rare < 0.003] = INF
    x[rare > 0.997] = NAN
    x[rare > 0.999] = -INF
    return x


KINDS = {"wide_range": wide_range, "ties": ties, "special": special}


def poison(*shapes: tuple[int, ...]) -> None:
    """Leave bytes of 0xFF in the memory that the next tensors of so many bytes are likely to get."""
    held = [torch.full(shape, 255, dtype=torch.uint8, device="cuda") for shape in shapes]
    del held


def with_tail(x: Tensor, splits: Splits) -> Tensor:
    x[splits.used :] = NAN
    return x


def check(x: Tensor, splits: Splits, **asked: bool) -> None:
    (rows, columns), room = x.shape, padded_rows(splits.rows, splits.groups)
    offsets, padded = padded_group_offsets(splits.tensor("cuda"), rows)
    poison((rows, columns), (columns, room), (-(-columns // 128), 4 * fp8_reference.scales_in_row(rows)))
    got = fp8_quantize(x, offsets, padded, **asked)
    want = fp8_reference.fp8_quantize(x, offsets, padded, **asked)
    used, end = splits.used, int(padded[-1])
    for a, b in zip(got, want, strict=True):
        assert (a is None) == (b is None)
        assert a is None or (a.shape == b.shape and a.dtype == b.dtype)
    if got.data is not None:
        assert_bitwise_equal(got.data[:used], want.data[:used], "data")
        assert_bitwise_equal(got.scale[:, :used], want.scale[:, :used], "scale")
    if got.data_t is not None:
        assert_bitwise_equal(got.data_t[:, :end], want.data_t[:, :end], "transposed data")
        assert_bitwise_equal(got.scale_t[: end // 128, :columns], want.scale_t[: end // 128, :columns], "its scale")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("asked", ["both", "rows", "columns"])
def test_bytes(kind, power_of_two, dtype, asked):
    x = with_tail(KINDS[kind](RAGGED.rows, 528, dtype=dtype), RAGGED)
    check(x, RAGGED, power_of_two=power_of_two, **ASKED[asked])


@pytest.mark.parametrize("splits", SPLITS, ids=str)
@pytest.mark.parametrize("columns", [16, 272])
def test_splits(splits, columns):
    for kind in ("wide_range", "special"):
        check(with_tail(KINDS[kind](splits.rows, columns), splits), splits)


@pytest.mark.parametrize("columns", COLUMNS)
def test_edge_columns(columns):
    check(with_tail(wide_range(RAGGED.rows, columns), RAGGED), RAGGED)


def test_many_groups():
    """1024 groups of 0 to 300 rows."""
    sizes = tuple(g * 37 % 301 for g in range(1024))
    splits = Splits("many", sizes, sum(sizes) + 77)
    check(with_tail(wide_range(splits.rows, 144), splits), splits)


@pytest.mark.parametrize("asked", ASKED)
def test_many_tiles_a_cta(asked):
    """Every stage of every ring is filled many times; thrice, since what is too early may go well."""
    splits = Splits("long", (20_000, 1, 30_000, 11_111), rows=61_200)
    x = with_tail(wide_range(splits.rows, 1040), splits)
    for _ in range(3):
        check(x, splits, **ASKED[asked])


@pytest.mark.parametrize("splits", (*SPLITS, RAGGED), ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_column_sums(splits, dtype):
    for columns in (16, 400):
        x = with_tail(torch.randn(splits.rows, columns, device="cuda").to(dtype), splits)
        check(x, splits, column_sums=True)
        offsets, padded = padded_group_offsets(splits.tensor("cuda"), splits.rows)
        poison((splits.groups, 4 * columns))
        got = fp8_quantize(x, offsets, padded, column_sums=True).sums
        exact = torch.stack([x[part].double().sum(0) for part in splits.slices()])
        assert_as_accurate(got, exact.float(), exact)
        for g, size in enumerate(splits.sizes):
            assert size or (got[g] == 0).all()


def test_groups_do_not_mix():
    """NaN and huge values in one group leave the others' bytes alone."""
    x = with_tail(torch.randn(RAGGED.rows, 144, device="cuda").bfloat16(), RAGGED)
    offsets, padded = padded_group_offsets(RAGGED.tensor("cuda"), RAGGED.rows)
    before = fp8_quantize(x, offsets, padded, column_sums=True)
    spoiled = x.clone()
    spoiled[RAGGED.slices()[2]] = torch.tensor([NAN, 1e30], device="cuda").bfloat16().repeat(72)
    after = fp8_quantize(spoiled, offsets, padded, column_sums=True)
    for g in (0, 3, 4, 7):
        rows, tokens = RAGGED.slices()[g], slice(int(padded[g]), int(padded[g + 1]))
        assert_bitwise_equal(after.data[rows], before.data[rows])
        assert_bitwise_equal(after.scale[:, rows], before.scale[:, rows])
        assert_bitwise_equal(after.data_t[:, tokens], before.data_t[:, tokens])
        assert_bitwise_equal(after.sums[g], before.sums[g])


def test_strided_and_transposed_input():
    offsets, padded = padded_group_offsets(RAGGED.tensor("cuda"), RAGGED.rows)
    x = with_tail(wide_range(RAGGED.rows, 272), RAGGED)
    want = fp8_quantize(x, offsets, padded)
    wider = torch.full((RAGGED.rows, 320), NAN, dtype=x.dtype, device="cuda")
    wider[:, 24 : 24 + 272] = x
    for view in (wider[:, 24 : 24 + 272], x.t().contiguous().t()):
        got = fp8_quantize(view, offsets, padded)
        assert_bitwise_equal(got.data[: RAGGED.used], want.data[: RAGGED.used])
        assert_bitwise_equal(got.data_t[:, : int(padded[-1])], want.data_t[:, : int(padded[-1])])


def test_same_bits_in_100_runs():
    x = with_tail(torch.randn(RAGGED.rows, 528, device="cuda").bfloat16(), RAGGED)
    offsets, padded = padded_group_offsets(RAGGED.tensor("cuda"), RAGGED.rows)
    end, used = int(padded[-1]), RAGGED.used
    first = fp8_quantize(x, offsets, padded, column_sums=True)
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(100):
        again = fp8_quantize(x, offsets, padded, column_sums=True)
        different += (again.sums != first.sums).sum()
        different += (again.data[:used].view(torch.uint8) != first.data[:used].view(torch.uint8)).sum()
        different += (again.data_t[:, :end].view(torch.uint8) != first.data_t[:, :end].view(torch.uint8)).sum()
    assert int(different) == 0


def test_graph_replays_with_other_splits():
    x = wide_range(RAGGED.rows, 272)
    sizes = RAGGED.tensor("cuda")
    padded_group_offsets(sizes, RAGGED.rows)
    fp8_quantize(x, *padded_group_offsets(sizes, RAGGED.rows), column_sums=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        offsets, padded = padded_group_offsets(sizes, RAGGED.rows)
        got = fp8_quantize(x, offsets, padded, column_sums=True)
    for shift in (0, 3, 5):
        sizes.copy_(RAGGED.tensor("cuda").roll(shift))
        x.copy_(wide_range(RAGGED.rows, 272))
        graph.replay()
        want = fp8_quantize(x, offsets.clone(), padded.clone(), column_sums=True)
        end = int(padded[-1])
        assert_bitwise_equal(got.data[: RAGGED.used], want.data[: RAGGED.used])
        assert_bitwise_equal(got.data_t[:, :end], want.data_t[:, :end])
        assert_bitwise_equal(got.sums, want.sums)


def test_more_elements_than_32_bits_count():
    """The last group of a matrix of 2.3 G elements has the bytes that it has alone."""
    rows, columns, last = 320_000, 7168, 1000
    x = torch.empty(rows, columns, dtype=torch.bfloat16, device="cuda").fill_(1.0)
    x[-last:].normal_()
    sizes = torch.tensor([rows - last, last], device="cuda")
    offsets, padded = padded_group_offsets(sizes, rows)
    got = fp8_quantize(x, offsets, padded)
    alone = fp8_quantize(x[-last:], *padded_group_offsets(sizes[1:], last))
    assert_bitwise_equal(got.data[-last:], alone.data)
    there = slice(int(padded[1]), int(padded[1]) + last)
    assert_bitwise_equal(got.data_t[-256:, there], alone.data_t[-256:, :last])
    assert_bitwise_equal(got.scale_t[int(padded[1]) // 128][:columns], alone.scale_t[0][:columns])


def test_no_rows():
    x = torch.empty(0, 48, dtype=torch.bfloat16, device="cuda")
    offsets, padded = padded_group_offsets(torch.zeros(3, dtype=torch.int32, device="cuda"), 0)
    got = fp8_quantize(x, offsets, padded, column_sums=True)
    assert got.data.shape == (0, 48) and got.data_t.shape == (48, 0)
    assert_bitwise_equal(got.sums, torch.zeros(3, 48, device="cuda"))


# Weights


def check_weights(weights: list[Tensor], **asked: bool) -> None:
    groups, (rows, columns) = len(weights), weights[0].shape[-2:]
    poison((groups * rows, columns), (groups, columns, rows))
    got = fp8_quantize_weight(weights, **asked)
    want = fp8_reference.fp8_quantize_weight(weights, **asked)
    row_blocks, column_blocks = -(-rows // 128), -(-columns // 128)
    assert_bitwise_equal(got.data, want.data, "data")
    assert_bitwise_equal(got.scale[..., :column_blocks], want.scale[..., :column_blocks], "scale")
    assert (got.data_t is None) == (want.data_t is None)
    assert got.scale.shape == want.scale.shape and got.scale.is_contiguous()
    if got.data_t is not None:
        assert got.scale_t.shape == want.scale_t.shape
        assert_bitwise_equal(got.data_t, want.data_t, "transposed data")
        assert_bitwise_equal(got.scale_t[..., :row_blocks], want.scale_t[..., :row_blocks], "its scale")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("columnwise", [True, False])
def test_weight_bytes(kind, power_of_two, columnwise):
    for dtype in (torch.bfloat16, torch.float16):
        weights = [torch.stack([KINDS[kind](400, 528, dtype=dtype) for _ in range(3)])]
        check_weights(weights, power_of_two=power_of_two, columnwise=columnwise)


@pytest.mark.parametrize("shape", [(16, 16), (128, 128), (144, 16), (16, 272), (768, 2048), (2880, 208), (1856, 640)])
@pytest.mark.parametrize("kind", ["stacked", "separate", "stored [K, N]"])
def test_weight_shapes(shape, kind):
    weights = [wide_range(*shape) for _ in range(3)]
    if kind == "stacked":
        weights = [torch.stack(weights)]
    elif kind == "stored [K, N]":
        weights = [torch.stack([w.t() for w in weights]).contiguous().mT]
    check_weights(weights)
    check_weights(weights, columnwise=False)


def test_many_separate_weights():
    check_weights([wide_range(144, 272) for _ in range(200)])


def test_calls_that_cannot_be_taken_say_why():
    x = torch.zeros(RAGGED.rows, 72, dtype=torch.bfloat16, device="cuda")
    offsets, padded = padded_group_offsets(RAGGED.tensor("cuda"), RAGGED.rows)
    with pytest.raises(ValueError, match=r"K is 72, needs a multiple of 16"):
        fp8_quantize(x, offsets, padded)
    with pytest.raises(ValueError, match=r"dtype is float32"):
        fp8_quantize(x[:, :64].float(), offsets, padded)
    with pytest.raises(ValueError, match=r"padded is int32 \[3\]"):
        fp8_quantize(x[:, :64], offsets, padded[:3])
    with pytest.raises(ValueError, match=r"needs one of the copies"):
        fp8_quantize(x[:, :64], offsets, padded, rowwise=False, columnwise=False)
    with pytest.raises(ValueError, match=r"needs one of the copies, and columnwise for column_sums"):
        fp8_quantize(x[:, :64], offsets, padded, columnwise=False, column_sums=True)
    with pytest.raises(ValueError, match=r"N is 72, needs a multiple of 16"):
        fp8_quantize_weight([x[:72, :64].contiguous()])
    with pytest.raises(ValueError, match=r"weights is bfloat16 \[32, 64\]"):
        fp8_quantize_weight([x[:16, :64].contiguous(), x[:32, :64].contiguous()])
