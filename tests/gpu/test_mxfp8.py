"""The SM90 MXFP8 kernels against `mxfp8_reference`: the same bits where sums are exact, nearly all elsewhere."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cute_kernels import mxfp8_reference as mx
from cute_kernels.activation import Activation
from cute_kernels.fp8_reference import padded_group_offsets
from cute_kernels.quantization.quantize import Quantized
from tests.cases import OFF_TILE, SPLITS, TAIL, Splits, full
from tests.compare import assert_bitwise_equal, relative_error

pytestmark = pytest.mark.gpu("sm_90a")

NAN, INF, DEVICE = float("nan"), float("inf"), "cuda"
RAGGED = Splits("ragged", (200, 0, 233, 64, 331, 1, 15, 129, 0, 512), rows=1600)
SKEWED = full("skewed", *([1] * 9), 1500, 0, 130)
COLUMNS = (32, 96, 128, 160, 768, 2880)
ASKED = {
    "rows and columns": {},
    "rows and stored": {"columnwise": False, "stored": True},
    "rows": {"columnwise": False},
    "columns": {"rowwise": False},
    "stored": {"rowwise": False, "columnwise": False, "stored": True},
    "all": {"stored": True},
}
EXACT = (Activation("clamped_swiglu", 7.0, 1e5, 1.0), Activation("relu"), Activation("srelu"))
"""Of small integers without rounding: of integers the first's sigmoid is 0, 1/2 or 1."""
SMOOTH = (Activation("swiglu"), Activation("geglu"), Activation("clamped_swiglu", 1.0, 1.702, 1.0), Activation("gelu"))


def hopper(name: str):
    from cute_kernels.hopper import function

    return function(name)


def ids(value: object) -> str | None:
    return value.encode() if isinstance(value, Activation) else None


def canonical(t: Tensor) -> Tensor:
    """One-byte floats as bytes; every NaN the same one."""
    return t.contiguous().view(torch.uint8) if t.element_size() == 1 else torch.where(t.isnan(), NAN, t).contiguous()


def assert_same(actual: Tensor, expected: Tensor, what: str) -> None:
    assert actual.shape == expected.shape and actual.dtype == expected.dtype, what
    assert_bitwise_equal(canonical(actual), canonical(expected), what)


def wide_range(*shape: int) -> Tensor:
    """Normal values times powers of two from row to row and column to column."""
    rows, columns = (torch.randint(-40, 41, (n,), device=DEVICE).exp2() for n in shape[-2:])
    return (torch.randn(shape, device=DEVICE) * rows[:, None] * columns.sqrt()).bfloat16()


def ties(*shape: int) -> Tensor:
    """Multiples of 1/64 below 4: a fifth bit of the mantissa lies halfway between E4M3 values."""
    return (torch.randint(-255, 256, shape, device=DEVICE) / 64).bfloat16()


def special(*shape: int) -> Tensor:
    """Zeros of both signs, subnormal, smallest and largest numbers, now and then Inf and NaN."""
    info = torch.finfo(torch.bfloat16)
    values = torch.tensor(
        [0.0, -0.0, info.tiny, -info.tiny, info.smallest_normal / 4, -info.smallest_normal / 128, info.max, -info.max,
         1.75, 1.7578125, 448.0, 450.0, 1.0, -3.0, 1e-3, 2.0**-118, 448 * 2.0**-127], device=DEVICE,
        dtype=torch.float64,
    ).bfloat16()  # fmt: skip
    x = values[torch.randint(0, len(values), shape, device=DEVICE)]
    x[::3] = values[torch.randint(2, 6, shape[-1:], device=DEVICE)]
    x[1::7] = 0
    x[:, ::16] = values[4]
    rare = torch.rand(shape, device=DEVICE)
    x[rare < 0.003] = INF
    x[rare > 0.997] = NAN
    x[rare > 0.999] = -INF
    return x


KINDS = {"wide_range": wide_range, "ties": ties, "special": special}


def poison(*shapes: tuple[int, ...]) -> None:
    """Leave bytes of 0xFF in the memory that the next tensors of so many bytes are likely to get."""
    held = [torch.full(shape, 255, dtype=torch.uint8, device=DEVICE) for shape in shapes]
    del held


def with_tail(x: Tensor, splits: Splits) -> Tensor:
    x[splits.used :] = NAN
    return x


def offsets_of(splits: Splits) -> tuple[Tensor, Tensor]:
    return padded_group_offsets(splits.tensor(DEVICE), splits.rows, 32)


# ----------------------------------------------------------------------------------------------------------------------
# Quantise


def check(x: Tensor, splits: Splits, sm_margin: int = 0, **asked: bool) -> None:
    rows, columns = x.shape
    offsets, padded = offsets_of(splits)
    poison((rows, 2 * columns), (rows, 2 * columns), *mx.stored_shapes(splits.rows, splits.groups, columns))
    got = hopper("mxfp8_quantize")(x, offsets, padded, sm_margin=sm_margin, **asked)
    want = mx.mxfp8_quantize(x, offsets, padded, **asked)
    used, end = splits.used, int(padded[-1])
    for a, b, size in zip(got, want, (used, used, end, end // 32), strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.shape == b.shape
            assert_same(a[:size], b[:size], "copy")
    if got.data is not None and rows:
        poison((rows, 2 * columns))
        restored = hopper("mxfp8_dequantize")(got.data, got.scale, offsets, padded, rows)
        want = mx.mxfp8_dequantize(want.data, want.scale, offsets, padded, rows)
        assert_same(restored[:used], want[:used], "restored")


def all_but(left: int) -> int:
    """The margin that leaves so many SMs: their warps have many pieces each."""
    return torch.cuda.get_device_properties(DEVICE).multi_processor_count - left


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("left", [1, 3])
def test_few_multiprocessors(asked: str, left: int) -> None:
    check(with_tail(wide_range(RAGGED.rows, 544), RAGGED), RAGGED, all_but(left), **ASKED[asked])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("asked", ASKED)
def test_bytes(kind: str, asked: str) -> None:
    check(with_tail(KINDS[kind](RAGGED.rows, 544), RAGGED), RAGGED, **ASKED[asked])


@pytest.mark.parametrize("splits", SPLITS, ids=str)
@pytest.mark.parametrize("columns", [32, 288])
def test_splits(splits: Splits, columns: int) -> None:
    for kind in ("wide_range", "special"):
        check(with_tail(KINDS[kind](splits.rows, columns), splits), splits, stored=True)


@pytest.mark.parametrize("columns", COLUMNS)
def test_edge_columns(columns: int) -> None:
    check(with_tail(wide_range(RAGGED.rows, columns), RAGGED), RAGGED, stored=True)


def test_many_groups() -> None:
    """1024 groups of 0 to 300 rows."""
    sizes = tuple(g * 37 % 301 for g in range(1024))
    splits = Splits("many", sizes, sum(sizes) + 77)
    check(with_tail(wide_range(splits.rows, 160), splits), splits, stored=True)


def test_strided_and_transposed_input() -> None:
    offsets, padded = offsets_of(RAGGED)
    x = with_tail(wide_range(RAGGED.rows, 288), RAGGED)
    want = hopper("mxfp8_quantize")(x, offsets, padded)
    wider = torch.full((RAGGED.rows, 320), NAN, dtype=x.dtype, device=DEVICE)
    wider[:, 24 : 24 + 288] = x
    for view in (wider[:, 24 : 24 + 288], x.t().contiguous().t()):
        got = hopper("mxfp8_quantize")(view, offsets, padded)
        for a, b in zip(got[:2], want[:2], strict=True):
            assert_same(a[: RAGGED.used], b[: RAGGED.used], "copy")


def test_graph_replays_with_other_splits() -> None:
    x, sizes = wide_range(RAGGED.rows, 288), RAGGED.tensor(DEVICE)
    asked = {"stored": True}
    hopper("mxfp8_quantize")(x, *padded_group_offsets(sizes, RAGGED.rows, 32), **asked)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        offsets, padded = padded_group_offsets(sizes, RAGGED.rows, 32)
        got = hopper("mxfp8_quantize")(x, offsets, padded, **asked)
    for shift in (0, 3, 5):
        sizes.copy_(RAGGED.tensor(DEVICE).roll(shift))
        x.copy_(wide_range(RAGGED.rows, 288))
        graph.replay()
        want = mx.mxfp8_quantize(x, offsets.clone(), padded.clone(), **asked)
        for a, b, size in zip(got, want, (RAGGED.used,) * 2 + (int(padded[-1]), int(padded[-1]) // 32), strict=True):
            assert_same(a[:size], b[:size], "copy")


def test_more_elements_than_32_bits_count() -> None:
    """The last group of a matrix of 2.3 G elements has the bytes that it has alone."""
    rows, columns, last = 320_000, 7168, 1000
    x = torch.empty(rows, columns, dtype=torch.bfloat16, device=DEVICE).fill_(1.0)
    x[-last:].normal_()
    sizes = torch.tensor([rows - last, last], device=DEVICE)
    offsets, padded = padded_group_offsets(sizes, rows, 32)
    got = hopper("mxfp8_quantize")(x, offsets, padded, stored=True)
    alone = hopper("mxfp8_quantize")(x[-last:], *padded_group_offsets(sizes[1:], last, 32), stored=True)
    assert_same(got.rows[-last:], alone.rows, "rows")
    assert_same(got.columns[-last:], alone.columns, "columns")
    assert_same(got.data[int(padded[1]) :][:last], alone.data[:last], "data")
    restored = hopper("mxfp8_dequantize")(got.data, got.scale, offsets, padded, rows)
    assert_same(restored[-last:], alone.columns, "restored")


def test_no_rows() -> None:
    x = torch.empty(0, 64, dtype=torch.bfloat16, device=DEVICE)
    offsets, padded = padded_group_offsets(torch.zeros(3, dtype=torch.int32, device=DEVICE), 0, 32)
    got = hopper("mxfp8_quantize")(x, offsets, padded, stored=True)
    assert got.rows.shape == (0, 64) and got.data.shape == (0, 64)


@pytest.mark.parametrize("shape", [(32, 32), (128, 96), (160, 32), (768, 2048), (2880, 224)], ids=str)
@pytest.mark.parametrize("kind", ["stacked", "separate"])
@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("columnwise", [False, True])
def test_weights(shape: tuple[int, int], kind: str, square: bool, columnwise: bool) -> None:
    for values in KINDS.values():
        weights = [values(*shape) for _ in range(3)]
        weights = [torch.stack(weights)] if kind == "stacked" else weights
        got = hopper("mxfp8_quantize_weight")(weights, columnwise, square)
        want = mx.mxfp8_quantize_weight(weights, columnwise, square)
        assert_same(got.rows, want.rows, "rows")
        assert (got.columns is None) == (want.columns is None)
        if got.columns is not None:
            assert_same(got.columns, want.columns, "columns")


# ----------------------------------------------------------------------------------------------------------------------
# Products


def integers(*shape: int, largest: int = 3) -> Tensor:
    """Values that E4M3 holds exactly at any scale that is a power of two."""
    return torch.randint(-largest, largest + 1, shape, device=DEVICE).bfloat16()


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE).bfloat16()


def assert_near(actual: Tensor | None, expected: Tensor | None, used: int, what: str, differ: float = 0.0) -> None:
    """Equal but for a share `differ` of the values, which are off by a step of E4M3."""
    assert (actual is None) == (expected is None), what
    if actual is None or expected is None:
        return
    a, b = actual[:used], expected[:used]
    if not differ:
        assert_same(a, b, what)
        return
    assert a.isfinite().all(), what
    share = (a != b).float().mean().item() if a.numel() else 0.0
    assert share <= differ, f"{what}: {share:.5f} differ"
    assert relative_error(a, b) <= 0.01, what


@pytest.mark.parametrize("splits", [*SPLITS, RAGGED, SKEWED], ids=str)
@pytest.mark.parametrize("activation", EXACT, ids=ids)
def test_act_of_exact_sums(splits: Splits, activation: Activation) -> None:
    check_act(splits, activation, integers, 96, 160, 0.0)


@pytest.mark.parametrize("activation", SMOOTH, ids=ids)
@pytest.mark.parametrize(("width", "contracted"), [(768, 256), (96, 2880), (2880, 288)])
def test_act_of_random_sums(activation: Activation, width: int, contracted: int) -> None:
    for splits in (RAGGED, TAIL, OFF_TILE):
        check_act(splits, activation, normal, width, contracted, 0.01)


@pytest.mark.parametrize("splits", [*SPLITS, RAGGED, SKEWED], ids=str)
@pytest.mark.parametrize("activation", EXACT, ids=ids)
def test_kept_quantised_of_exact_sums(splits: Splits, activation: Activation) -> None:
    check_act(splits, activation, integers, 96, 160, 0.0, True)
    check_dact(splits, activation, integers, 96, 160, 0.0, True)


@pytest.mark.parametrize("activation", SMOOTH, ids=ids)
@pytest.mark.parametrize(("width", "contracted"), [(768, 256), (96, 2880), (2880, 288)])
def test_kept_quantised_of_random_sums(activation: Activation, width: int, contracted: int) -> None:
    for splits in (RAGGED, TAIL, full("large", 3000, 100)):
        check_act(splits, activation, normal, width, contracted, 0.01, True)
        check_dact(splits, activation, normal, width, contracted, 0.01, True)


def test_kept_quantised_has_the_bytes_of_a_quantise() -> None:
    """Of what is kept in BF16 otherwise, all magnitudes and not just small integers; act is the same bits."""
    splits, activation = RAGGED, SMOOTH[0]
    offsets, padded = offsets_of(splits)
    x = mx.mxfp8_quantize(wide_range(splits.rows, 256), offsets, padded).rows
    w = mx.mxfp8_quantize_weight([normal(splits.groups, 2 * 160, 256)], False).rows
    act, preact = hopper("mxfp8_grouped_gemm_act")(x, [w], offsets, activation)
    again, kept = hopper("mxfp8_grouped_gemm_act")(x, [w], offsets, activation, quantize_preact=True)
    assert_same(again[: splits.used], act[: splits.used], "act")
    want = mx.kept(preact, 2)
    assert_same(kept.data[: splits.used], want.data[: splits.used], "data")
    assert_same(real_scales(kept, 160, 2)[: splits.used], real_scales(want, 160, 2)[: splits.used], "scale")


def real_scales(kept: Quantized, width: int, halves: int) -> Tensor:
    """Those of blocks that there are, the rest only fills up."""
    rows, scales = kept.scale.shape
    return kept.scale.view(rows, halves, scales // halves)[..., : width // 32].contiguous()


def check_act(
    splits: Splits, activation: Activation, values, width: int, contracted: int, differ: float, quantised: bool = False
) -> None:
    offsets, padded = offsets_of(splits)
    columns, groups = activation.halves * width, splits.groups
    x = with_tail(mx.mxfp8_quantize(values(splits.rows, contracted), offsets, padded).rows, splits)
    w = mx.mxfp8_quantize_weight([values(groups, columns, contracted)], False).rows
    w = w if values is integers else (w.float() * contracted**-0.5).bfloat16()
    bias, probs = (
        values(groups, columns),
        integers(splits.rows).float() if values is integers else torch.rand(splits.rows, device=DEVICE),
    )
    probs[splits.used :] = NAN
    for weights, block, b, p, keep in (
        ([w], 0, None, None, True),
        ([*w.clone().unbind(0)], 32, bias, probs, True),
        ([w], 0, bias, probs, False),
    ):
        block = block if activation.is_glu else 0
        poison((splits.rows, 2 * width), (splits.rows, 2 * columns), (splits.rows, columns))
        got = hopper("mxfp8_grouped_gemm_act")(x, weights, offsets, activation, b, p, block, keep, quantised)
        want = mx.mxfp8_grouped_gemm_act(x, weights, offsets, activation, b, p, block, keep, quantised)
        if quantised and keep:
            values_of = [mx.kept_values(kept[1], activation.halves) for kept in (got, want)]
            assert_near(*values_of, splits.used, "preact", 5 * differ)
            if not differ:
                scales = [real_scales(kept[1], width, activation.halves)[: splits.used] for kept in (got, want)]
                assert_same(got[1].data[: splits.used], want[1].data[: splits.used], "data")
                assert_same(*scales, "scale")
        else:
            assert_near(got[1], want[1], splits.used, "preact", 5 * differ)
        assert_near(got[0], want[0], splits.used, "act", 2 * differ)


@pytest.mark.parametrize("splits", [*SPLITS, RAGGED, SKEWED], ids=str)
@pytest.mark.parametrize("activation", EXACT, ids=ids)
def test_dact_of_exact_sums(splits: Splits, activation: Activation) -> None:
    check_dact(splits, activation, integers, 96, 160, 0.0)


@pytest.mark.parametrize("activation", SMOOTH, ids=ids)
@pytest.mark.parametrize(("width", "contracted"), [(768, 256), (96, 2880), (2880, 288)])
def test_dact_of_random_sums(activation: Activation, width: int, contracted: int) -> None:
    for splits in (RAGGED, TAIL, OFF_TILE, full("large", 3000, 100)):
        check_dact(splits, activation, normal, width, contracted, 0.01)


def check_dact(
    splits: Splits, activation: Activation, values, width: int, contracted: int, differ: float, quantised: bool = False
) -> None:
    offsets, padded = offsets_of(splits)
    groups, rows = splits.groups, splits.rows
    dy = with_tail(mx.mxfp8_quantize(values(rows, contracted), offsets, padded).rows, splits)
    w = mx.mxfp8_quantize_weight([values(groups, contracted, width)]).columns
    preact: Tensor | Quantized = with_tail(values(rows, activation.halves * width), splits)
    sizes = preact.shape
    if quantised:
        preact = mx.kept(preact, activation.halves)
        preact.scale[splits.used :].view(torch.uint8).fill_(255)
    probs = integers(rows).float() if values is integers else torch.rand(rows, device=DEVICE)
    probs[splits.used :] = NAN
    block = 32 if activation.is_glu else 0
    for weights, p, wanted in (
        ([w], None, (True, True, True, False, False)),
        ([*w.clone().unbind(0)], probs, (True, True, True, True, False)),
        ([w], probs, (True, True, True, True, True)),
        ([w], None, (True, True, False, False, True)),
        ([w], probs, (True, False, False, True, False)),
        ([w], probs, (False, True, False, False, False)),
        ([w], probs, (False, False, True, True, False)),
    ):
        poison(*[(rows, 2 * n) for n in (sizes[1], sizes[1], width)], (rows, 4))
        got = hopper("mxfp8_grouped_gemm_dact")(dy, weights, offsets, preact, activation, p, *wanted, block)
        want = mx.mxfp8_grouped_gemm_dact(dy, weights, offsets, preact, activation, p, *wanted, block)
        for what, a, b in zip(("rows", "columns", "act"), got, want, strict=False):
            assert_near(a, b, splits.used, what, differ)
        if wanted[3]:
            torch.testing.assert_close(got[3], want[3], rtol=1e-4, atol=1e-3)
            tail = got[3][splits.used :]
            assert_bitwise_equal(tail, torch.zeros_like(tail), "tail of dprobs")
        if wanted[4]:
            torch.testing.assert_close(got[4], want[4], rtol=1e-4, atol=1e-3 * max(1.0, want[4].abs().max().item()))


def test_groups_do_not_mix() -> None:
    """NaN and huge values in one group leave the others' results alone."""
    activation, (offsets, _) = Activation("swiglu"), offsets_of(RAGGED)
    dy, w, preact = normal(RAGGED.rows, 160), normal(RAGGED.groups, 160, 96), normal(RAGGED.rows, 192)
    before = hopper("mxfp8_grouped_gemm_dact")(dy, [w], offsets, preact, activation)
    part = RAGGED.slices()[2]
    dy[part], preact[part] = NAN, 1e30
    after = hopper("mxfp8_grouped_gemm_dact")(dy, [w], offsets, preact, activation)
    for g in (0, 3, 4, 7):
        rows = RAGGED.slices()[g]
        for a, b in zip(after[:3], before[:3], strict=True):
            assert_same(a[rows], b[rows], f"group {g}")


def test_same_bits_in_100_runs() -> None:
    """More tiles than CTAs, so that every ring and every set is filled many times; static and dynamic."""
    splits = Splits("long", (9000, 1, 3000, 4111), rows=16_500)
    offsets, padded = offsets_of(splits)
    x, dy = normal(splits.rows, 512), normal(splits.rows, 256)
    w1, w2 = normal(splits.groups, 768, 512), normal(splits.groups, 256, 384)
    probs, activation = torch.rand(splits.rows, device=DEVICE), Activation("swiglu")

    def run(counter: Tensor | None) -> list[Tensor]:
        x_rows = hopper("mxfp8_quantize")(x, offsets, padded).rows
        act, preact = hopper("mxfp8_grouped_gemm_act")(x_rows, [w1], offsets, activation, None, probs, counter=counter)
        back = hopper("mxfp8_grouped_gemm_dact")(
            dy, [w2], offsets, preact, activation, probs, need_dprobs=True, need_dbias=True, counter=counter
        )
        return [*(t[: splits.used] for t in (x_rows, act, preact, *back[:4])), back[4]]

    first = run(None)
    different = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for i in range(100):
        counter = torch.zeros(1, dtype=torch.int32, device=DEVICE) if i % 2 else None
        for a, b in zip(run(counter), first, strict=True):
            different += (a != b).sum()
    assert int(different) == 0
