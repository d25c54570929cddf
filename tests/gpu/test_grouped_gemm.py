"""Grouped products on SM90 against the reference: splits, edges, interleaves, activations, separate weights."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from cute_kernels import launch, reference
from cute_kernels.activation import Activation
from cute_kernels.catalog import SM90_ACTIVATIONS
from tests.cases import SPLITS, Splits
from tests.compare import assert_as_accurate, assert_bitwise_equal

pytestmark = pytest.mark.gpu("sm_90a")

BF16, FP16 = torch.bfloat16, torch.float16
RAGGED = Splits("ragged", (300, 0, 5, 128, 0, 77), rows=600)
MANY = Splits("many", tuple((i * 7) % 4 for i in range(1000)), rows=1700)
SWIGLU = Activation("swiglu")
ACTIVATIONS = [Activation(kind) for kind in SM90_ACTIVATIONS if kind != "clamped_swiglu"] + [
    Activation("clamped_swiglu", 1.0, 1.702, 1.0),
    Activation("clamped_swiglu", None, 1.702, 0.0),
]
CLAMPED = Activation("clamped_swiglu", 1.0, 1.702, 1.0)
INTERLEAVES = (0, 1, 2, 8, 32, 64, 128)


def hopper(name: str):
    from cute_kernels.hopper import function

    return function(name)


def ids(value: object) -> str | None:
    return value.encode() if isinstance(value, Activation) else None


@pytest.fixture(params=["chosen", "128x192", "128x128"])
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The tiles that `choose` takes for few rows, and those for many."""
    from cute_kernels.hopper import configs, grouped_gemm

    if request.param != "chosen":
        rows, columns = map(int, request.param.split("x"))
        monkeypatch.setattr(configs, "TILES", ((rows, columns),))
    kept = [made for name, made in vars(grouped_gemm).items() if name.endswith(("options_of", "_plan"))]
    for made in kept:
        getattr(made, "cache_clear", lambda: None)()
    yield request.param
    for made in kept:
        getattr(made, "cache_clear", lambda: None)()


def offsets_of(splits: Splits) -> torch.Tensor:
    return reference.group_offsets(splits.tensor("cuda"), splits.rows)


def rows_of(splits: Splits, columns: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Random rows; NaN where no group owns them."""
    x = torch.randn(splits.rows, columns, device="cuda").to(dtype)
    x[sum(splits.sizes) :] = float("nan")
    return x


def weights_of(splits: Splits, n: int, k: int, dtype: torch.dtype = BF16, separate: bool = False) -> list[torch.Tensor]:
    """Random weights; separate ones in shuffled order, with holes between them."""
    stacked = (torch.randn(splits.groups, n, k, device="cuda") / k**0.5).to(dtype)
    if not separate:
        return [stacked]
    found = [torch.empty(n, k, dtype=dtype, device="cuda") for _ in range(splits.groups)]
    order = sorted(range(splits.groups), key=lambda g: (g * 5) % 7)
    weights = [found[i] for i in order]
    for target, source in zip(weights, stacked, strict=True):
        target.copy_(source)
    return weights


def wide(value):
    """The same operands in FP32."""
    if isinstance(value, list):
        return [w.float() for w in value]
    return value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def poison(*shapes: tuple[int, ...]) -> None:
    """NaN in memory that the next allocations of these sizes are given."""
    held = [torch.full(shape, float("nan"), dtype=BF16, device="cuda") for shape in shapes]
    del held


def check(actual, name: str, *args, **kwargs) -> None:
    """Every result of the operator `name` against the reference in FP32 and in the operands' dtype."""
    function = getattr(reference, name)
    same = function(*args, **kwargs)
    full = function(*[wide(a) for a in args], **{key: wide(a) for key, a in kwargs.items()})
    if isinstance(actual, torch.Tensor):
        actual, same, full = (actual,), (same,), (full,)
    for index, (mine, theirs, exact) in enumerate(zip(actual, same, full, strict=True)):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            assert_as_accurate(mine, theirs, exact.to(torch.float32), f"{name}[{index}]")


def check_tail(splits: Splits, *results: torch.Tensor | None) -> None:
    for result in results:
        if result is not None:
            tail = result[sum(splits.sizes) :]
            assert_bitwise_equal(tail, torch.zeros_like(tail), "tail")


@pytest.mark.parametrize("splits", (*SPLITS, RAGGED, MANY), ids=str)
@pytest.mark.parametrize(("k", "n"), [(200, 392), (64, 2048)])
def test_store(splits: Splits, k: int, n: int, variant: str) -> None:
    x, w, offsets = rows_of(splits, k), weights_of(splits, n, k), offsets_of(splits)
    poison((splits.rows, n))
    y = hopper("grouped_gemm")(x, w, offsets)
    check(y, "grouped_gemm", x, w, offsets)
    check_tail(splits, y)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("n", [8, 120, 1032])
def test_store_with_bias_and_scale(dtype: torch.dtype, n: int, variant: str) -> None:
    x, w, offsets = rows_of(RAGGED, 136, dtype), weights_of(RAGGED, n, 136, dtype), offsets_of(RAGGED)
    bias = torch.randn(RAGGED.groups, n, device="cuda").to(dtype)
    scale = torch.rand(RAGGED.rows, device="cuda")
    for s in (None, scale):
        y = hopper("grouped_gemm")(x, w, offsets, bias, s)
        check(y, "grouped_gemm", x, w, offsets, bias, s)


def test_store_reads_strided_rows(variant: str) -> None:
    x, w, offsets = rows_of(RAGGED, 400), weights_of(RAGGED, 264, 200), offsets_of(RAGGED)
    for part in (x[:, 200:], x[:, :200]):
        assert_bitwise_equal(
            hopper("grouped_gemm")(part, w, offsets), hopper("grouped_gemm")(part.contiguous(), w, offsets), "strided"
        )


@pytest.mark.parametrize("splits", (*SPLITS, RAGGED, MANY), ids=str)
@pytest.mark.parametrize("k", [328, 2048])
def test_dgrad(splits: Splits, k: int, variant: str) -> None:
    dy, w, offsets = rows_of(splits, 200), weights_of(splits, 200, k), offsets_of(splits)
    dx = hopper("grouped_gemm_dgrad")(dy, w, offsets)
    check(dx, "grouped_gemm_dgrad", dy, w, offsets)
    check_tail(splits, dx)


@pytest.mark.parametrize("separate", [False, True], ids=["stacked", "separate"])
@pytest.mark.parametrize("block", [1, 8, 32, 64, 128])
def test_dgrad_interleaved(block: int, separate: bool, variant: str) -> None:
    width = 384 if block == 128 else 320 if block >= 32 else 328
    dy, offsets = rows_of(RAGGED, 2 * width), offsets_of(RAGGED)
    w = weights_of(RAGGED, 2 * width, 136, separate=separate)
    check(hopper("grouped_gemm_dgrad")(dy, w, offsets, block), "grouped_gemm_dgrad", dy, w, offsets, block)


@pytest.mark.parametrize("splits", (*SPLITS, RAGGED, MANY), ids=str)
@pytest.mark.parametrize("width", [136, 1040])
def test_act_swiglu(splits: Splits, width: int, variant: str) -> None:
    x, w, offsets = rows_of(splits, 72), weights_of(splits, 2 * width, 72), offsets_of(splits)
    act, preact = hopper("grouped_gemm_act")(x, w, offsets, SWIGLU)
    check((act, preact), "grouped_gemm_act", x, w, offsets, SWIGLU)
    check_tail(splits, act, preact)


@pytest.mark.parametrize("separate", [False, True], ids=["stacked", "separate"])
@pytest.mark.parametrize("block", INTERLEAVES)
def test_act_interleaved(block: int, separate: bool, variant: str) -> None:
    width = 384 if block >= 32 else 328
    x, offsets = rows_of(RAGGED, 136), offsets_of(RAGGED)
    w = weights_of(RAGGED, 2 * width, 136, separate=separate)
    bias = torch.randn(RAGGED.groups, 2 * width, device="cuda").to(BF16)
    probs = torch.rand(RAGGED.rows, device="cuda")
    result = hopper("grouped_gemm_act")(x, w, offsets, SWIGLU, bias, probs, block)
    check(result, "grouped_gemm_act", x, w, offsets, SWIGLU, bias, probs.to(BF16), block)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=ids)
def test_act_kinds(activation: Activation, variant: str) -> None:
    n = 264 * activation.halves
    x, w, offsets = 2 * rows_of(RAGGED, 136), weights_of(RAGGED, n, 136), offsets_of(RAGGED)
    probs = torch.rand(RAGGED.rows, device="cuda").to(BF16)
    act, preact = hopper("grouped_gemm_act")(x, w, offsets, activation, probs=probs)
    check((act, preact), "grouped_gemm_act", x, w, offsets, activation, probs=probs)
    rows = sum(RAGGED.sizes)
    same = reference.activation_forward(preact[:rows], activation, probs[:rows])
    full = reference.activation_forward(preact[:rows].double(), activation, probs[:rows].double())
    assert_as_accurate(act[:rows], same, full.float(), "act of the kernel's own preact")
    alone, nothing = hopper("grouped_gemm_act")(x, w, offsets, activation, probs=probs, save_preact=False)
    assert nothing is None
    assert_bitwise_equal(alone, act, "act without preact")


def stored(weights: list[torch.Tensor]) -> list[torch.Tensor]:
    """The same values stored [K, N], as the transposed views of that."""
    return [w.mT.contiguous().mT for w in weights]


@pytest.mark.parametrize(
    ("block", "separate"), [(0, False), (0, True), (1, False), (1, True), (8, False), (16, True), (32, False)]
)
def test_act_of_weights_stored_transposed(block: int, separate: bool, variant: str) -> None:
    """The pre-activation comes in the order of the weight's columns; the input's gradient takes it so."""
    width = 352 if block >= 16 else 328
    x, offsets = 2 * rows_of(RAGGED, 136), offsets_of(RAGGED)
    w = stored(weights_of(RAGGED, 2 * width, 136, separate=separate))
    bias = torch.randn(RAGGED.groups, 2 * width, device="cuda").to(BF16)
    probs = torch.rand(RAGGED.rows, device="cuda").to(BF16)
    poison((RAGGED.rows, width), (RAGGED.rows, 2 * width))
    result = hopper("grouped_gemm_act")(x, w, offsets, CLAMPED, bias, probs, block, preact_interleave=block)
    check(result, "grouped_gemm_act", x, w, offsets, CLAMPED, bias, probs, block, preact_interleave=block)
    check_tail(RAGGED, *result)
    act, preact = hopper("grouped_gemm_act")(x, [t.contiguous() for t in w], offsets, CLAMPED, bias, probs, block)
    assert_bitwise_equal(result[0], act, "act, however the weight lies")
    assert_bitwise_equal(result[1], reference.interleave(preact, block, 1), "preact")
    check(hopper("grouped_gemm_dgrad")(result[1], w, offsets), "grouped_gemm_dgrad", result[1], w, offsets)


@pytest.mark.parametrize("splits", (*SPLITS, MANY), ids=str)
def test_act_of_pairs_of_stored_columns(splits: Splits) -> None:
    x, w, offsets = rows_of(splits, 72), stored(weights_of(splits, 2 * 136, 72)), offsets_of(splits)
    result = hopper("grouped_gemm_act")(x, w, offsets, SWIGLU, glu_interleave=1, preact_interleave=1)
    check(result, "grouped_gemm_act", x, w, offsets, SWIGLU, glu_interleave=1, preact_interleave=1)
    check_tail(splits, *result)


@pytest.mark.parametrize("block", [1, 8, 16, 32])
def test_dact_of_interleaved_columns(block: int, variant: str) -> None:
    """The bits of [gate | up], rearranged."""
    width = 352 if block >= 16 else 328
    dy, offsets = rows_of(RAGGED, 136), offsets_of(RAGGED)
    w, preact = weights_of(RAGGED, 136, width), 2 * rows_of(RAGGED, 2 * width)
    operands, wanted = (CLAMPED, torch.rand(RAGGED.rows, device="cuda")), {"need_act": True, "need_dprobs": True}
    want = hopper("grouped_gemm_dact")(dy, w, offsets, preact, *operands, **wanted)
    mixed = reference.interleave(preact, block, 1)
    for weights in (w, stored(w))[: 2 if block == 1 else 1]:
        got = hopper("grouped_gemm_dact")(dy, weights, offsets, mixed, *operands, **wanted, preact_interleave=block)
        check_tail(RAGGED, *got)
        assert_bitwise_equal(got[0], reference.interleave(want[0], block, 1), "dpreact")
        for name, mine, other in zip(("act", "dprobs"), got[1:], want[1:], strict=True):
            assert_bitwise_equal(mine, other, name)


def test_act_keeps_relative_accuracy_at_very_negative_gates() -> None:
    activation = Activation("clamped_swiglu", 7.0, 1.702, 1.0)
    gates = torch.tensor([-8.0, -20.0, -40.0, -3.0, 0.5, 7.5, -1.0, -60.0], device="cuda")
    x = torch.zeros(8, 8, device="cuda", dtype=BF16)
    x[:, 0] = 1
    w = torch.zeros(1, 16, 8, device="cuda", dtype=BF16)
    w[0, :8, 0], w[0, 8:, 0] = gates.to(BF16), 2
    offsets = torch.tensor([0, 8], dtype=torch.int32, device="cuda")
    act, _ = hopper("grouped_gemm_act")(x, [w], offsets, activation)
    g = gates.double().clamp(max=7)
    exact = g * torch.sigmoid(1.702 * g) * 3
    assert abs(exact[0].item() + 2.92993e-5) < 1e-10
    for column in range(8):
        assert_as_accurate(act[:, column], exact[column].to(BF16).expand(8), exact[column].expand(8).float())


@pytest.mark.parametrize("splits", (*SPLITS, RAGGED, MANY), ids=str)
def test_dact_swiglu(splits: Splits, variant: str) -> None:
    dy, w, offsets = rows_of(splits, 72), weights_of(splits, 72, 136), offsets_of(splits)
    preact, probs = rows_of(splits, 272), torch.rand(splits.rows, device="cuda")
    results = hopper("grouped_gemm_dact")(dy, w, offsets, preact, SWIGLU, probs, True, True)
    check(results, "grouped_gemm_dact", dy, w, offsets, preact, SWIGLU, probs.to(BF16), True, True)
    check_tail(splits, *results)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=ids)
def test_dact_kinds(activation: Activation, variant: str) -> None:
    dy, w, offsets = rows_of(RAGGED, 136), weights_of(RAGGED, 136, 264, separate=True), offsets_of(RAGGED)
    preact = 2 * rows_of(RAGGED, 264 * activation.halves)
    probs = torch.rand(RAGGED.rows, device="cuda").to(BF16)
    results = hopper("grouped_gemm_dact")(dy, w, offsets, preact, activation, probs, True, True)
    check(results, "grouped_gemm_dact", dy, w, offsets, preact, activation, probs, True, True)
    again = hopper("grouped_gemm_dact")(dy, w, offsets, preact, activation, probs, True, True)
    for name, first, second in zip(("dpreact", "act", "dprobs"), results, again, strict=True):
        assert_bitwise_equal(second, first, name)


def test_dact_without_options(variant: str) -> None:
    dy, w, offsets = rows_of(RAGGED, 136, FP16), weights_of(RAGGED, 136, 264, FP16), offsets_of(RAGGED)
    preact = rows_of(RAGGED, 528, FP16)
    results = hopper("grouped_gemm_dact")(dy, w, offsets, preact, SWIGLU, need_act=False)
    check(results, "grouped_gemm_dact", dy, w, offsets, preact, SWIGLU, need_act=False)


def test_more_groups_than_torch_takes() -> None:
    splits = Splits("1500_groups", tuple((i * 5) % 3 for i in range(1500)), rows=1600)
    x, w, offsets = rows_of(splits, 64, FP16), weights_of(splits, 40, 64, FP16), offsets_of(splits)
    bias = torch.randn(splits.groups, 40, device="cuda").to(FP16)
    check(hopper("grouped_gemm")(x, w, offsets, bias), "grouped_gemm", x, w, offsets, bias)


def test_an_earlier_product_zeroes_the_tail() -> None:
    splits = Splits("tail", (300, 0, 5), rows=4000)
    x, w1, w2 = rows_of(splits, 136), weights_of(splits, 2 * 264, 136), weights_of(splits, 392, 264)
    offsets = offsets_of(splits)
    y = torch.full((splits.rows, 392), float("nan"), dtype=BF16, device="cuda")
    act, _ = hopper("grouped_gemm_act")(x, w1, offsets, SWIGLU, zero_tail=False, zero_tail_of=y)
    assert y[: splits.used].isnan().all()
    check_tail(splits, y)
    hopper("grouped_gemm_")(y, act, w2, offsets)
    assert_bitwise_equal(y, hopper("grouped_gemm")(act, w2, offsets), "y")


def test_sm_margin_changes_nothing(variant: str) -> None:
    x, w, offsets = rows_of(RAGGED, 200), weights_of(RAGGED, 392, 200), offsets_of(RAGGED)
    whole = hopper("grouped_gemm")(x, w, offsets)
    for margin in (4, 131):
        assert_bitwise_equal(hopper("grouped_gemm")(x, w, offsets, sm_margin=margin), whole, f"sm_margin={margin}")


def test_separate_weights_equal_stacked() -> None:
    x, offsets = rows_of(RAGGED, 200), offsets_of(RAGGED)
    separate = weights_of(RAGGED, 392, 200, separate=True)
    stacked = [torch.stack(separate)]
    assert_bitwise_equal(
        hopper("grouped_gemm")(x, separate, offsets), hopper("grouped_gemm")(x, stacked, offsets), "separate"
    )


def visited(sizes: list[int], rows: int, columns: int, ctas: int = 132) -> torch.Tensor:
    from cute_kernels.hopper.schedule import CountOptions

    offsets = reference.group_offsets(torch.tensor(sizes, device="cuda"), rows)
    counts = torch.full((ctas,), -1, dtype=torch.int32, device="cuda")
    count = launch.kernel("cute_kernels.hopper.schedule", CountOptions(128), "sm_90a")
    count(offsets, counts, columns, launch.current_stream(offsets.device))
    return counts


def test_tail_rows_cost_no_tiles() -> None:
    sizes = [700, 0, 1, 847, 500]
    small, large = visited(sizes, 2048, 16), visited(sizes, 32768, 16)
    assert_bitwise_equal(large, small, "tiles of each CTA")
    assert int(small.sum()) == 16 * (6 + 1 + 7 + 4)


def test_a_thousand_groups_are_walked_completely() -> None:
    sizes = [(i * 37) % 300 if i % 3 else 0 for i in range(1500)]
    counts = visited(sizes, sum(sizes), 3, 7)
    assert int(counts.sum()) == 3 * sum(-(-size // 128) for size in sizes)
    assert int(counts.max()) - int(counts.min()) <= 1


@pytest.mark.parametrize("separate", [False, True], ids=["stacked", "separate"])
def test_a_graph_replays_with_other_splits(separate: bool) -> None:
    x, offsets = rows_of(RAGGED, 136), offsets_of(RAGGED)
    w = weights_of(RAGGED, 2 * 264, 136, separate=separate)
    other = reference.group_offsets(torch.tensor([0, 200, 77, 1, 130, 0], device="cuda"), RAGGED.rows)
    act = hopper("grouped_gemm_act")
    expected = act(x, w, other, SWIGLU)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = act(x, w, offsets, SWIGLU)
    offsets.copy_(other)
    graph.replay()
    for name, mine, wanted in zip(("act", "preact"), replayed, expected, strict=True):
        assert_bitwise_equal(mine, wanted, name)
