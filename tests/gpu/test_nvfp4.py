"""The SM90 NVFP4 kernels against `nvfp4_reference`: the same bytes quantised, products near."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cute_kernels import nvfp4_reference as nv
from cute_kernels.activation import Activation
from cute_kernels.fp8_reference import padded_group_offsets
from cute_kernels.quantization.groups import padded_rows
from cute_kernels.quantization.random_bits import random_state
from tests.cases import OFF_TILE, SPLITS, TAIL, Splits, full
from tests.compare import assert_bitwise_equal, relative_error
from tests.gpu.test_mxfp8 import (
    DEVICE,
    KINDS,
    NAN,
    RAGGED,
    SKEWED,
    SMOOTH,
    all_but,
    assert_same,
    hopper,
    ids,
    normal,
    poison,
    wide_range,
    with_tail,
)

pytestmark = pytest.mark.gpu("sm_90a")

COLUMNS = (16, 48, 128, 160, 768, 2880)
ASKED = {
    "rows and columns": (True, True, False),
    "rows and stored": (True, False, True),
    "rows": (True, False, False),
    "columns": (False, True, False),
    "stored": (False, False, True),
    "all": (True, True, True),
}
LARGE = full("large", 3000, 0, 100)
GATED_AND_NOT = SMOOTH[0], SMOOTH[-1]
WAYS = [(False, False), (True, False), (False, True), (True, True)]
"""Whether columns are rotated, and whether values are rounded stochastically."""


def offsets_of(splits: Splits) -> tuple[Tensor, Tensor]:
    return padded_group_offsets(splits.tensor(DEVICE), splits.rows)


def check(
    x: Tensor,
    splits: Splits,
    asked: tuple[bool, bool, bool],
    rotated: bool,
    stochastic: bool,
    sm_margin: int = 0,
) -> None:
    """Largest magnitudes, copies and what is restored, bit for bit."""
    (rows, columns), room = x.shape, padded_rows(splits.rows, splits.groups)
    offsets, padded = offsets_of(splits)
    got_amax = hopper("nvfp4_amax")(x, offsets, padded, rotated, sm_margin)
    amax, turned = nv.nvfp4_amax(x, offsets, padded, rotated)
    for a, b in zip(got_amax, (amax, turned), strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert_same(a, b, "amax")
    state = random_state(DEVICE) if stochastic else None
    how = (amax, amax if turned is None else turned, state, *asked, rotated)
    poison((rows, 2 * columns), (room, 2 * columns), (room, columns // 2), (room // 16, columns))
    got = hopper("nvfp4_quantize")(x, offsets, padded, *how, sm_margin)
    want = nv.nvfp4_quantize(x, offsets, padded, *how)
    end = int(padded[-1])
    for a, b, size in zip(got, want, (splits.used, end, end, end // 16), strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.shape == b.shape
            assert_same(a[:size], b[:size], "copy")
    if got.data is not None and rows:
        restored = hopper("nvfp4_dequantize")(got.data, got.scale, padded)
        assert_same(restored[:end], nv.nvfp4_dequantize(want.data, want.scale, padded)[:end], "restored")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize(("rotated", "stochastic"), WAYS)
def test_bytes(kind: str, asked: str, rotated: bool, stochastic: bool) -> None:
    check(with_tail(KINDS[kind](RAGGED.rows, 544), RAGGED), RAGGED, ASKED[asked], rotated, stochastic)


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize(("rotated", "stochastic"), WAYS)
def test_groups_of_all_magnitudes(asked: str, rotated: bool, stochastic: bool) -> None:
    """Those near FP32's limits take another way than the others; sums of the last overflow when it is rotated."""
    exponents = (-130, -100, -92, -88, 0, 108, 112, 125)
    splits = Splits("magnitudes", (23,) * len(exponents), 23 * len(exponents) + 5)
    x = normal(splits.rows, 544)
    for group, exponent in enumerate(exponents):
        x[23 * group : 23 * (group + 1)] *= 2.0**exponent
    check(with_tail(x, splits), splits, ASKED[asked], rotated, stochastic)


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("left", [1, 3])
def test_few_multiprocessors(asked: str, left: int) -> None:
    for stochastic in (False, True):
        x = with_tail(wide_range(RAGGED.rows, 544), RAGGED)
        check(x, RAGGED, ASKED[asked], True, stochastic, all_but(left))


@pytest.mark.parametrize("splits", SPLITS, ids=str)
@pytest.mark.parametrize("columns", [32, 288])
def test_splits(splits: Splits, columns: int) -> None:
    for kind in ("wide_range", "special"):
        x = with_tail(KINDS[kind](splits.rows, columns), splits)
        for asked in ("rows and columns", "rows and stored"):
            check(x, splits, ASKED[asked], True, True)


@pytest.mark.parametrize("columns", COLUMNS)
def test_edge_columns(columns: int) -> None:
    check(with_tail(wide_range(RAGGED.rows, columns), RAGGED), RAGGED, ASKED["all"], True, True)


def test_many_groups() -> None:
    """1024 groups of 0 to 300 rows."""
    sizes = tuple(g * 37 % 301 for g in range(1024))
    splits = Splits("many", sizes, sum(sizes) + 77)
    check(with_tail(wide_range(splits.rows, 160), splits), splits, ASKED["all"], True, True)


def test_no_rows() -> None:
    x = torch.empty(0, 64, dtype=torch.bfloat16, device=DEVICE)
    offsets, padded = offsets_of(Splits("none", (0, 0), 0))
    amax, turned = hopper("nvfp4_amax")(x, offsets, padded, True)
    assert amax.tolist() == turned.tolist() == [0, 0]
    got = hopper("nvfp4_quantize")(x, offsets, padded, amax, turned, None, True, True, True, True)
    assert got.rows.shape == got.columns.shape == (0, 64) and got.data.shape == (0, 32)


def test_a_graph_draws_other_bits_at_every_replay() -> None:
    x = normal(256, 128)
    offsets, padded = offsets_of(Splits("one", (256,), 256))
    amax, _ = nv.nvfp4_amax(x, offsets, padded, False)
    arguments = (x, offsets, padded, amax, None)
    hopper("nvfp4_quantize")(*arguments, random_state(DEVICE), True, False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        state = random_state(DEVICE)
        got = hopper("nvfp4_quantize")(*arguments, state, True, False).rows
    seen = []
    for _ in range(2):
        graph.replay()
        assert_same(got, nv.nvfp4_quantize(*arguments, state, True, False).rows, "rows")
        seen.append(got.clone())
    assert not torch.equal(*seen)


@pytest.mark.parametrize("shape", [(16, 16), (128, 96), (160, 32), (768, 2048), (2880, 224)], ids=str)
@pytest.mark.parametrize("kind", ["stacked", "separate"])
@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("columnwise", [False, True])
def test_weights(shape: tuple[int, int], kind: str, square: bool, columnwise: bool) -> None:
    for values in KINDS.values():
        weights = [values(*shape) for _ in range(3)]
        weights = [torch.stack(weights)] if kind == "stacked" else weights
        got = hopper("nvfp4_quantize_weight")(weights, columnwise, square)
        want = nv.nvfp4_quantize_weight(weights, columnwise, square)
        for a, b in zip(got, want, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                assert_same(a, b, "weights")


# ----------------------------------------------------------------------------------------------------------------------
# Products


def amaxes(groups: int) -> tuple[Tensor, Tensor]:
    """Largest magnitudes whose alpha is near one, and another in each group."""
    return torch.rand(groups, device=DEVICE) * 2688 + 300, torch.rand(groups, device=DEVICE) * 2688 + 300


def assert_near(actual: Tensor | None, expected: Tensor | None, used: int, what: str) -> None:
    """Equal but for sums in another order, rounded once or twice."""
    assert (actual is None) == (expected is None), what
    if actual is not None and expected is not None:
        assert relative_error(actual[:used].float(), expected[:used].float()) <= 4e-3, what


def assert_maxima(stored: Tensor, offsets: Tensor, padded: Tensor, found: tuple[Tensor, Tensor | None]) -> None:
    """What a product left are the bits that the kernel finds, and those of the reference, in what it stored."""
    rotated = found[1] is not None
    for amax in (hopper("nvfp4_amax"), nv.nvfp4_amax):
        for a, b in zip(found, amax(stored, offsets, padded, rotated), strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                assert_same(a, b, "largest magnitudes")


def check_products(splits: Splits, activation: Activation, width: int, contracted: int) -> None:
    offsets, padded = offsets_of(splits)
    rows, groups, columns = splits.rows, splits.groups, activation.halves * width
    x, dy = (with_tail(normal(rows, contracted), splits) for _ in range(2))
    w1, w2 = normal(groups, columns, contracted), normal(groups, contracted, width)
    w1, w2 = (w * contracted**-0.5 for w in (w1, w2))
    both, bias = amaxes(groups), normal(groups, columns)
    probs = torch.rand(rows, device=DEVICE)
    preact = with_tail(normal(rows, columns), splits)
    for separate in (False, True):
        first, second = ([*w.clone().unbind(0)] if separate else [w] for w in (w1, w2))
        block = 32 if separate and activation.is_glu else 0
        for name, arguments in (
            ("nvfp4_grouped_gemm", (x, first, offsets, *both, bias, probs if separate else None)),
            ("nvfp4_grouped_gemm_dgrad", (preact, first, offsets, *both, block)),
            ("nvfp4_grouped_gemm_act", (x, first, offsets, *both, activation, bias, probs, block, separate, separate)),
            ("nvfp4_grouped_gemm_dact", (dy, second, offsets, *both, preact, activation, probs, True, separate)),
        ):
            got, want = hopper(name)(*arguments), getattr(nv, name)(*arguments)
            if not isinstance(got, Tensor):
                assert_maxima(got[0], offsets, padded, got[2:])
            for a, b in zip(*((t,) if isinstance(t, Tensor) else t[:2] for t in (got, want)), strict=True):
                if a is not None and a.dtype == torch.float32:
                    torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-2)
                else:
                    assert_near(a, b, splits.used, name)


@pytest.mark.parametrize("activation", SMOOTH, ids=ids)
@pytest.mark.parametrize(("width", "contracted"), [(768, 256), (96, 2880), (2880, 288)])
def test_products(activation: Activation, width: int, contracted: int) -> None:
    for splits in (RAGGED, SKEWED, TAIL, OFF_TILE):
        check_products(splits, activation, width, contracted)


def check_maxima(splits: Splits, activation: Activation, width: int, probs: Tensor, **sharing: object) -> None:
    """Of products whose rows differ a thousandfold from group to group, so that a neighbour's would be seen."""
    offsets, padded = offsets_of(splits)
    sizes = torch.tensor([1.0, 1e3, 1e-3], device=DEVICE).repeat(splits.groups)[: splits.groups]
    both = amaxes(splits.groups)[0] * sizes, amaxes(splits.groups)[1]
    x, dy, preact = (normal(splits.rows, n) for n in (64, 64, activation.halves * width))
    for t in (x, dy, preact):
        with_tail(t, splits)
    w1, w2 = normal(splits.groups, activation.halves * width, 64), normal(splits.groups, 64, width)
    for rotated in (False, True):
        poison((splits.rows, 2 * width), (splits.rows, 2 * activation.halves * width))
        act = hopper("nvfp4_grouped_gemm_act")(
            x, [w1], offsets, *both, activation, None, probs, 0, False, rotated, **sharing
        )
        assert_maxima(act[0], offsets, padded, act[2:])
        dact = hopper("nvfp4_grouped_gemm_dact")(
            dy, [w2], offsets, *both, preact, activation, probs, False, rotated, **sharing
        )
        assert_maxima(dact[0], offsets, padded, dact[2:])


@pytest.mark.parametrize("splits", [*SPLITS, RAGGED, SKEWED, LARGE], ids=str)
@pytest.mark.parametrize("width", [16, 48, 208, 768])
def test_maxima_of_products(splits: Splits, width: int) -> None:
    """Every tile of both epilogues; of widths that are no multiple of a piece a lane has columns that do not exist."""
    for activation in GATED_AND_NOT:
        check_maxima(splits, activation, width, torch.rand(splits.rows, device=DEVICE))


@pytest.mark.parametrize("width", [48, 768])
def test_maxima_of_products_that_are_not_finite(width: int) -> None:
    """Inf and NaN of a row are its group's, as is what sums overflow to; columns that do not exist have none."""
    for splits in (RAGGED, LARGE):
        for value in (float("inf"), NAN, 3e38, 1e30):
            probs = torch.rand(splits.rows, device=DEVICE)
            probs[splits.slices()[0].start + 3] = value
            probs[splits.slices()[-1].stop - 1] = value
            probs[splits.slices()[-1].stop - 2] = value
            for activation in GATED_AND_NOT:
                check_maxima(splits, activation, width, probs)


def test_maxima_of_products_by_tickets_and_with_a_margin() -> None:
    counter = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    for sharing in ({"counter": counter}, {"sm_margin": 100}):
        check_maxima(RAGGED, SMOOTH[0], 768, torch.rand(RAGGED.rows, device=DEVICE), **sharing)


@pytest.mark.parametrize("splits", [*SPLITS, RAGGED, SKEWED], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_weight_gradients(splits: Splits, dtype: torch.dtype) -> None:
    _, padded = offsets_of(splits)
    room, groups = padded_rows(splits.rows, splits.groups), splits.groups
    dy, x, both = normal(room, 192), normal(room, 160), amaxes(groups)
    want = nv.nvfp4_grouped_wgrad(dy.float(), x.float(), padded, *both, 32)
    got = hopper("nvfp4_grouped_wgrad")(dy, x, padded, *both, 32)
    assert relative_error(got.float(), want) <= 4e-3
    for separate in (False, True):
        for accumulate in (False, True):
            before = torch.ones(groups, 192, 160, dtype=dtype, device=DEVICE)
            out = [*before.clone().unbind(0)] if separate else [before.clone()]
            hopper("nvfp4_grouped_wgrad_")(out, dy, x, padded, *both, 32, accumulate)
            found = torch.stack(out) if separate else out[0]
            assert relative_error(found.float(), want + accumulate) <= 4e-3


def test_groups_do_not_mix() -> None:
    """NaN in one group, and its NaN magnitudes, leave the others' results alone."""
    offsets, padded = offsets_of(RAGGED)
    x, w = normal(RAGGED.rows, 160), normal(RAGGED.groups, 96, 160)
    amax, weight_amax = amaxes(RAGGED.groups)
    before = hopper("nvfp4_grouped_gemm")(x, [w], offsets, amax, weight_amax)
    part = RAGGED.slices()[2]
    x[part], amax[2] = NAN, NAN
    after = hopper("nvfp4_grouped_gemm")(x, [w], offsets, amax, weight_amax)
    found, _ = hopper("nvfp4_amax")(x, offsets, padded, True)
    assert found.isnan().tolist() == [g == 2 for g in range(RAGGED.groups)]
    for g in (0, 3, 4, 7):
        rows = RAGGED.slices()[g]
        assert_same(after[rows], before[rows], f"group {g}")


def test_same_bits_in_100_runs() -> None:
    splits = Splits("long", (9000, 1, 3000, 4111), rows=16_500)
    offsets, padded = offsets_of(splits)
    x, w, state = normal(splits.rows, 512), normal(splits.groups, 256, 512), random_state(DEVICE)

    def run() -> list[Tensor]:
        amax, turned = hopper("nvfp4_amax")(x, offsets, padded, True)
        copies = hopper("nvfp4_quantize")(x, offsets, padded, amax, turned, state, True, True, False, True)
        y = hopper("nvfp4_grouped_gemm")(copies.rows, [w], offsets, amax, amax)
        act, _, *maxima = hopper("nvfp4_grouped_gemm_act")(
            copies.rows, [w], offsets, amax, amax, SMOOTH[0], rotated=True
        )
        dw = hopper("nvfp4_grouped_wgrad")(copies.columns, copies.columns, padded, turned, turned)
        rows, columns = copies.rows[: splits.used], copies.columns[: int(padded[-1])]
        return [amax, turned, rows, columns, y, act[: splits.used], *maxima, dw]

    first = run()
    for _ in range(100):
        for a, b in zip(run(), first, strict=True):
            assert_bitwise_equal(a.contiguous(), b.contiguous())
