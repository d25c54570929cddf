"""FP8 grouped products on SM90 against `fp8_reference`: exact where sums are exact, bounded on random values."""

from __future__ import annotations

import pytest
import torch

from cute_kernels import fp8_reference as fp8
from cute_kernels import reference
from cute_kernels.activation import Activation
from cute_kernels.quantization.quantize import Quantized
from tests.cases import OFF_TILE, SPLITS, TAIL, Splits, full
from tests.compare import assert_as_accurate, assert_bitwise_equal

pytestmark = pytest.mark.gpu("sm_90a")

DEVICE = "cuda"
NAN = float("nan")
RAGGED = Splits("ragged", (300, 0, 5, 128, 0, 77), rows=600)
SKEWED = full("skewed", *([1] * 9), 1500, 0, 130)
MANY = Splits("many", tuple((i * 7) % 4 for i in range(1000)), rows=1700)
STEP = Activation("clamped_swiglu", 7.0, 1e5, 1.0)
"""A GLU without rounding: of integers its sigmoid is 0, 1/2 or 1."""
EXACT = (STEP, Activation("relu"), Activation("srelu"))
SMOOTH = (Activation("swiglu"), Activation("geglu"), Activation("clamped_swiglu", 1.0, 1.702, 1.0), Activation("gelu"))


def hopper(name: str):
    from cute_kernels.hopper import function

    return function(name)


def ids(value: object) -> str | None:
    return value.encode() if isinstance(value, Activation) else None


def offsets_of(splits: Splits) -> tuple[torch.Tensor, torch.Tensor]:
    return fp8.padded_group_offsets(splits.tensor(DEVICE), splits.rows)


def integers(*shape: int, largest: int = 3) -> torch.Tensor:
    """Values that E4M3 holds exactly at any scale that is a power of two."""
    return torch.randint(-largest, largest + 1, shape, device=DEVICE).bfloat16()


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).bfloat16()


def rows_of(values: torch.Tensor, splits: Splits) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows copy, with NaN in everything that no result may depend on."""
    data, scale = fp8.fp8_quantize(values, *offsets_of(splits), columnwise=False)[:2]
    data.view(torch.uint8)[splits.used :] = 0x7F
    scale[:, splits.used :] = NAN
    return data, scale


def weights_of(values: torch.Tensor, transposed: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """One copy of weights [G, N, K]; scales that only fill up a row are NaN."""
    copies = fp8.fp8_quantize_weight([values], transposed)
    return (copies.data_t, copies.scale_t) if transposed else (copies.data, copies.scale)


def scaled(values: torch.Tensor) -> torch.Tensor:
    """Rows and blocks of columns times various powers of two, so that scales differ."""
    rows = 2.0 ** torch.randint(-2, 3, (*values.shape[:-1], 1), device=DEVICE)
    blocks = 2.0 ** torch.randint(-2, 3, (-(-values.shape[-1] // 128),), device=DEVICE).repeat_interleave(128)
    return (values * rows * blocks[: values.shape[-1]]).bfloat16()


def in_tiles(values: torch.Tensor) -> torch.Tensor:
    """Blocks of weights times various powers of two."""
    g, n, k = values.shape
    blocks = 2.0 ** torch.randint(-2, 3, (g, -(-n // 128), -(-k // 128)), device=DEVICE)
    return (values * blocks.repeat_interleave(128, 1)[:, :n].repeat_interleave(128, 2)[..., :k]).bfloat16()


def poison(*shapes: tuple[int, ...]) -> None:
    """NaN in memory that the next allocations of these sizes are given."""
    held = [torch.full(shape, NAN, dtype=torch.bfloat16, device=DEVICE) for shape in shapes]
    del held


def check_tail(splits: Splits, *results: torch.Tensor) -> None:
    for result in results:
        tail = result[splits.used :]
        assert_bitwise_equal(tail, torch.zeros_like(tail), "tail")


def defined(copies: fp8.Fp8Copies, splits: Splits) -> dict[str, torch.Tensor]:
    """What is defined of the copies, by name, bytes as integers."""
    padded, found = int(offsets_of(splits)[1][-1]), {}
    if copies.data is not None:
        found["rows"] = copies.data[: splits.used].view(torch.uint8)
        found["row scales"] = copies.scale[:, : splits.used]
    if copies.data_t is not None:
        found["columns"] = copies.data_t[:, :padded].view(torch.uint8)
        found["column scales"] = copies.scale_t[: padded // 128, : copies.data_t.shape[0]]
    return found


def assert_same_copies(actual: fp8.Fp8Copies, expected: fp8.Fp8Copies, splits: Splits) -> None:
    mine, theirs = defined(actual, splits), defined(expected, splits)
    assert mine.keys() == theirs.keys()
    for what, value in mine.items():
        assert_bitwise_equal(value.contiguous(), theirs[what].contiguous(), what)


def assert_near_copies(
    actual: fp8.Fp8Copies, expected: fp8.Fp8Copies, splits: Splits, apart: torch.Tensor, differ: float, halves: int = 1
) -> None:
    """Where scales agree, bytes differ in at most a share `differ`, and by no more than values do that were `apart`
    [T, columns] before both were rounded to E4M3. At most 1 % of the scales differ, by one power of two.
    """
    mine, theirs = defined(actual, splits), defined(expected, splits)
    _, padded = offsets_of(splits)
    apart_t = torch.zeros(apart.shape[1], int(padded[-1]), device=DEVICE)
    start = 0
    for first, size in zip(padded.tolist(), splits.sizes, strict=False):
        apart_t[:, first : first + size] = apart[start : start + size].t()
        start += size
    for what, limit in (("rows", apart[: splits.used]), ("columns", apart_t)):
        scales = [copies[f"{what[:-1]} scales"].t() for copies in (mine, theirs)]
        same, ratio = scales[0] == scales[1], scales[0] / scales[1]
        assert ((ratio >= 0.5) & (ratio <= 2)).all() and same.float().mean() > 0.99, f"scales of {what}"
        width = limit.shape[1] // halves if what == "rows" else limit.shape[1]

        def spread(blocks: torch.Tensor, width: int = width) -> torch.Tensor:
            parts = blocks.unflatten(1, (-1, -(-width // 128))).repeat_interleave(128, 2)[..., :width]
            return parts.flatten(1)

        factors, counted = spread(scales[1]), spread(same)
        values = [copies[what].view(torch.float8_e4m3fn).float() for copies in (mine, theirs)]
        largest = torch.maximum(values[0].abs(), values[1].abs())
        step = torch.exp2(torch.log2(largest).floor().clamp(min=-6) - 3)
        excess = ((values[0] - values[1]).abs() - step) * factors - limit
        assert (excess[counted] <= 0).all(), f"{what}: {int((excess[counted] > 0).sum())} values are too far apart"
        share = (values[0] != values[1])[counted].float().mean().item()
        print(f"{what}: {share:.2%} of the bytes and {1 - same.float().mean():.2%} of the scales differ")
        assert share <= differ, f"{what}: {share:.2%} of the bytes differ"


def magnitudes(x: tuple, w: tuple, offsets: torch.Tensor) -> torch.Tensor:
    """Of each sum of a product, the sum of the magnitudes of its terms."""
    return reference.grouped_gemm(fp8.dequantized(*x).abs(), [fp8.dequantized_weights(*w).abs()], offsets)


ACCUMULATED = 2.0**-12
"""Error of a sum of 128 products in the tensor cores, relative to the sum of their magnitudes: they keep 13 bits."""


@pytest.mark.parametrize("splits", (*SPLITS, RAGGED, SKEWED), ids=str)
@pytest.mark.parametrize(("k", "n"), [(272, 400), (768, 1856), (2880, 192)])
def test_product_of_exact_sums(splits: Splits, k: int, n: int) -> None:
    check_product(splits, k, n)


def test_product_of_many_groups() -> None:
    check_product(MANY, 144, 80)


def check_product(splits: Splits, k: int, n: int) -> None:
    x, w = rows_of(scaled(integers(splits.rows, k)), splits), weights_of(in_tiles(integers(splits.groups, n, k)))
    offsets, _ = offsets_of(splits)
    poison((splits.rows, n))
    y = hopper("fp8_grouped_gemm")(*x, *w, offsets)
    assert_bitwise_equal(y, fp8.fp8_grouped_gemm(*x, *w, offsets), "y")
    check_tail(splits, y)


@pytest.mark.parametrize("factor", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [16, 192, 1040])
def test_product_with_bias(n: int, factor: torch.dtype | None) -> None:
    x, w = rows_of(integers(RAGGED.rows, 144), RAGGED), weights_of(integers(RAGGED.groups, n, 144))
    bias, scale = integers(RAGGED.groups, n), None
    if factor is not None:
        scale = integers(RAGGED.rows).to(factor)
        scale[RAGGED.used :] = NAN
    offsets, _ = offsets_of(RAGGED)
    y = hopper("fp8_grouped_gemm")(*x, *w, offsets, bias, scale)
    assert_bitwise_equal(y, fp8.fp8_grouped_gemm(*x, *w, offsets, bias, scale), "y")


@pytest.mark.parametrize(("k", "n"), [(1856, 768), (2880, 2880), (512, 384)])
def test_product_of_random_values(k: int, n: int) -> None:
    x, w = rows_of(normal(RAGGED.rows, k), RAGGED), weights_of(normal(RAGGED.groups, n, k))
    offsets, _ = offsets_of(RAGGED)
    y = hopper("fp8_grouped_gemm")(*x, *w, offsets)
    exact = reference.grouped_gemm(fp8.dequantized(*x), [fp8.dequantized_weights(*w)], offsets)
    assert_as_accurate(y, exact.bfloat16(), exact, "y")
    assert_bitwise_equal(hopper("fp8_grouped_gemm")(*x, *w, offsets), y, "again")


@pytest.mark.parametrize("splits", (OFF_TILE, RAGGED), ids=str)
@pytest.mark.parametrize(("i", "h"), [(192, 2880), (64, 272), (256, 144), (1856, 256)])
def test_gradient_of_halves(splits: Splits, i: int, h: int) -> None:
    """x's blocks are cut in each half, the weight's are not."""
    values, offsets = scaled(integers(splits.rows, 2 * i)), offsets_of(splits)
    halves = [rows_of(half.contiguous(), splits) for half in values.chunk(2, 1)]
    x = torch.cat([half[0].view(torch.uint8) for half in halves], 1).view(torch.float8_e4m3fn)
    x_scale = torch.cat([half[1] for half in halves])
    w = weights_of(in_tiles(integers(splits.groups, 2 * i, h)), transposed=True)
    dx = hopper("fp8_grouped_gemm")(x, x_scale, *w, offsets[0], halves=2)
    assert_bitwise_equal(dx, fp8.fp8_grouped_gemm(x, x_scale, *w, offsets[0], halves=2), "dx")
    check_tail(splits, dx)


def test_long_sums_do_not_drift() -> None:
    splits, k = full("one", 128), 16384
    ones = torch.full((128, k), 1.125, device=DEVICE).bfloat16()
    x, w = rows_of(ones, splits), weights_of(ones[None])
    y = hopper("fp8_grouped_gemm")(*x, *w, offsets_of(splits)[0]).float()
    assert ((y / 20736 - 1).abs() <= 2**-8).all()  # bf16
    _, preact = hopper("fp8_grouped_gemm_act")(*x, *w, *offsets_of(splits), Activation("relu"))
    assert_bitwise_equal(preact.float(), y, "preact")
    bias = torch.full((1, 128), -20736.0, device=DEVICE).bfloat16()
    rest = hopper("fp8_grouped_gemm")(*x, *w, offsets_of(splits)[0], bias).float()
    assert (rest.abs() <= 1e-4 * 20736).all()  # what bf16 would hide


def problem(splits: Splits, activation: Activation, k: int, i: int, exact: bool):
    """Operands of FC1 with an activation: x and w with their scales, bias, probs."""
    make = integers if exact else normal
    n = activation.halves * i
    x = rows_of(scaled(make(splits.rows, k)) if exact else make(splits.rows, k), splits)
    w = make(splits.groups, n, k)
    w = weights_of(in_tiles(w) if exact else w / k**0.5)
    bias = make(splits.groups, n)
    probs = torch.randint(1, 9, (splits.rows,), device=DEVICE) / 4 if exact else torch.rand(splits.rows, device=DEVICE)
    probs[splits.used :] = NAN
    return x, w, bias, probs


@pytest.mark.parametrize("activation", EXACT, ids=ids)
@pytest.mark.parametrize("splits", (*SPLITS, RAGGED, SKEWED), ids=str)
@pytest.mark.parametrize(("k", "i"), [(144, 192), (768, 384)])
def test_activation_of_exact_sums(activation: Activation, splits: Splits, k: int, i: int) -> None:
    x, w, bias, probs = problem(splits, activation, k, i, exact=True)
    offsets = offsets_of(splits)
    poison((splits.rows, 2 * i), (splits.rows, i))
    copies, preact = hopper("fp8_grouped_gemm_act")(*x, *w, *offsets, activation, bias, probs)
    expected, z = fp8.fp8_grouped_gemm_act(*x, *w, *offsets, activation, bias, probs)
    assert_bitwise_equal(preact[: splits.used], z[: splits.used], "preact")
    assert_same_copies(copies, expected, splits)


@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize(("rowwise", "columnwise", "save"), [(True, False, False), (False, True, False)])
@pytest.mark.parametrize("activation", [STEP, Activation("srelu")], ids=ids)
def test_activation_copies_by_themselves(
    activation: Activation, rowwise: bool, columnwise: bool, save: bool, power_of_two: bool
) -> None:
    x, w, _, probs = problem(RAGGED, activation, 272, 320, exact=True)
    arguments = (*x, *w, *offsets_of(RAGGED), activation, None, probs, rowwise, columnwise, save, power_of_two)
    copies, preact = hopper("fp8_grouped_gemm_act")(*arguments)
    assert preact is None
    assert_same_copies(copies, fp8.fp8_grouped_gemm_act(*arguments)[0], RAGGED)


@pytest.mark.parametrize("activation", SMOOTH, ids=ids)
@pytest.mark.parametrize(("k", "i"), [(2880, 1856), (768, 768)])
def test_activation_of_random_values(activation: Activation, k: int, i: int) -> None:
    """The pre-activation is as accurate as FP8 sums are; from there on bytes follow, but for what exp2 is off by."""
    x, w, bias, probs = problem(RAGGED, activation, k, i, exact=False)
    arguments = (*x, *w, *offsets_of(RAGGED), activation, bias, probs)
    copies, preact = hopper("fp8_grouped_gemm_act")(*arguments)
    expected, z = fp8.fp8_grouped_gemm_act(*arguments)
    used = slice(0, RAGGED.used)
    exact = reference.grouped_gemm(fp8.dequantized(*x), [fp8.dequantized_weights(*w)], arguments[4], bias.float())
    assert_as_accurate(preact[used], z[used], exact[used], "preact")
    apart = ACCUMULATED * magnitudes(x, w, arguments[4]) + 2.0**-8 * exact.abs()
    assert ((preact.float() - exact).abs() <= apart)[used].all(), "preact"
    act = reference.activation_forward(preact.float(), activation, probs.bfloat16())
    own = fp8.fp8_quantize(act, *offsets_of(RAGGED))
    assert_near_copies(copies, own, RAGGED, 1e-6 * act.abs(), 0.001)
    assert_near_copies(copies, expected, RAGGED, torch.full_like(act, float("inf")), 0.02)
    again, _ = hopper("fp8_grouped_gemm_act")(*arguments)
    assert_same_copies(again, copies, RAGGED)


@pytest.mark.parametrize("amax", [0.0, 1e-38, 2.0**-120, 1e30, float("inf"), NAN])
@pytest.mark.parametrize("power_of_two", [True, False])
def test_scales_of_extreme_blocks(amax: float, power_of_two: bool) -> None:
    """The bias makes a column, then a row, of the block as large as asked; the rest is zero."""
    splits = full("one", 130)
    x = rows_of(torch.zeros(130, 128, device=DEVICE).bfloat16(), splits)
    w = weights_of(torch.zeros(1, 128, 128, device=DEVICE).bfloat16())
    bias = torch.zeros(1, 128, device=DEVICE).bfloat16()
    bias[0, 5] = amax
    arguments = (*x, *w, *offsets_of(splits), Activation("relu"), bias, None, True, True, True, power_of_two)
    copies, _ = hopper("fp8_grouped_gemm_act")(*arguments)
    assert_same_copies(copies, fp8.fp8_grouped_gemm_act(*arguments)[0], splits)


def gradient(splits: Splits, activation: Activation, h: int, i: int, exact: bool):
    """Operands of the activation's gradient: dy and w2 with their scales, preact, probs."""
    make = integers if exact else normal
    dy = rows_of(scaled(make(splits.rows, h)) if exact else make(splits.rows, h), splits)
    w = make(splits.groups, h, i)
    w = weights_of(in_tiles(w) if exact else w / h**0.5, transposed=True)
    preact = make(splits.rows, activation.halves * i)
    preact[splits.used :] = NAN
    probs = torch.randint(1, 9, (splits.rows,), device=DEVICE) / 4 if exact else torch.rand(splits.rows, device=DEVICE)
    probs[splits.used :] = NAN
    return dy, w, preact, probs


def used_of(kept: Quantized, splits: Splits) -> list[torch.Tensor]:
    """Bytes and scales of rows that there are."""
    used = splits.used
    return [kept.data[:used].contiguous().view(torch.uint8), kept.scale[:, :used].contiguous()]


@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("activation", EXACT, ids=ids)
@pytest.mark.parametrize("splits", (*SPLITS, RAGGED, SKEWED), ids=str)
@pytest.mark.parametrize(("k", "i"), [(144, 192), (768, 384)])
def test_kept_quantised_of_exact_sums(
    activation: Activation, splits: Splits, k: int, i: int, power_of_two: bool
) -> None:
    """act as without; the kept bytes and scales are those of a quantise; gradients as at those values."""
    x, w, bias, probs = problem(splits, activation, k, i, exact=True)
    arguments = (*x, *w, *offsets_of(splits), activation, bias, probs, True, True, True, power_of_two)
    poison((splits.rows, 2 * i), (splits.rows, i))
    copies, kept = hopper("fp8_grouped_gemm_act")(*arguments, True)
    expected, want = fp8.fp8_grouped_gemm_act(*arguments, True)
    for a, b in zip(used_of(kept, splits), used_of(want, splits), strict=True):
        assert_bitwise_equal(a, b, "kept")
    assert_same_copies(copies, expected, splits)


def test_kept_quantised_has_the_bytes_of_a_quantise() -> None:
    for power_of_two in (True, False):
        x, w, bias, probs = problem(RAGGED, SMOOTH[0], 768, 1856, exact=False)
        arguments = (*x, *w, *offsets_of(RAGGED), SMOOTH[0], bias, probs, True, True, True, power_of_two)
        (copies, kept), (plain, preact) = (hopper("fp8_grouped_gemm_act")(*arguments, q) for q in (True, False))
        assert_same_copies(copies, plain, RAGGED)
        for a, b in zip(used_of(kept, RAGGED), used_of(fp8.kept(preact, 2, power_of_two), RAGGED), strict=True):
            assert_bitwise_equal(a, b, "kept")


@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("activation", EXACT, ids=ids)
@pytest.mark.parametrize("splits", (*SPLITS, RAGGED, SKEWED), ids=str)
@pytest.mark.parametrize(("h", "i"), [(144, 192), (384, 768)])
def test_gradient_at_a_kept_pre_activation_of_exact_sums(
    activation: Activation, splits: Splits, h: int, i: int, power_of_two: bool
) -> None:
    dy, w, preact, probs = gradient(splits, activation, h, i, exact=True)
    kept = fp8.kept(preact, activation.halves, True)  # of small integers: read back as they were
    arguments = (*dy, *w, *offsets_of(splits), kept, activation, probs)
    asked = {"need_dprobs": True, "need_dbias": i == 192, "power_of_two": power_of_two}
    poison((splits.rows, 2 * i), (splits.rows, i))
    copies, dprobs = hopper("fp8_grouped_gemm_dact")(*arguments, **asked)
    expected, sums = fp8.fp8_grouped_gemm_dact(*arguments, **asked)
    assert_same_copies(copies, expected, splits)
    assert_as_accurate(dprobs, sums, sums, "dprobs")
    check_tail(splits, dprobs)
    if i == 192:
        assert_as_accurate(copies.sums, expected.sums, expected.sums, "dbias")


@pytest.mark.parametrize("activation", SMOOTH, ids=ids)
@pytest.mark.parametrize(("h", "i"), [(2880, 1856), (768, 768)])
def test_gradient_at_a_kept_pre_activation(activation: Activation, h: int, i: int) -> None:
    """That at the same values in BF16, which hold them exactly, bit for bit."""
    dy, w, preact, probs = gradient(RAGGED, activation, h, i, exact=False)
    kept = fp8.kept(preact, activation.halves)
    values = fp8.kept_values(kept, activation.halves).bfloat16()
    results = [
        hopper("fp8_grouped_gemm_dact")(*dy, *w, *offsets_of(RAGGED), p, activation, probs, need_dprobs=True)
        for p in (kept, values)
    ]
    same = activation.kind != "gelu"  # whose other kernel rounds sums in another order
    if same:
        assert_same_copies(results[0][0], results[1][0], RAGGED)
    assert_as_accurate(results[0][1], results[1][1], results[1][1], "dprobs")


@pytest.mark.parametrize("activation", EXACT, ids=ids)
@pytest.mark.parametrize("splits", (*SPLITS, RAGGED, SKEWED), ids=str)
@pytest.mark.parametrize(("h", "i"), [(144, 192), (384, 768)])
def test_gradient_of_exact_sums(activation: Activation, splits: Splits, h: int, i: int) -> None:
    dy, w, preact, probs = gradient(splits, activation, h, i, exact=True)
    arguments = (*dy, *w, *offsets_of(splits), preact, activation, probs)
    poison((splits.rows, 2 * i), (splits.rows, i))
    copies, dprobs = hopper("fp8_grouped_gemm_dact")(*arguments, need_dprobs=True, need_dbias=i == 192)
    expected, sums = fp8.fp8_grouped_gemm_dact(*arguments, need_dprobs=True, need_dbias=i == 192)
    assert_same_copies(copies, expected, splits)
    assert_as_accurate(dprobs, sums, sums, "dprobs")
    check_tail(splits, dprobs)
    if i == 192:
        assert_as_accurate(copies.sums, expected.sums, expected.sums, "dbias")


@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize(("rowwise", "columnwise"), [(True, False), (False, True)])
@pytest.mark.parametrize("activation", [STEP, Activation("srelu")], ids=ids)
def test_gradient_copies_by_themselves(
    activation: Activation, rowwise: bool, columnwise: bool, power_of_two: bool
) -> None:
    dy, w, preact, _ = gradient(TAIL, activation, 272, 320, exact=True)
    arguments = (*dy, *w, *offsets_of(TAIL), preact, activation, None, rowwise, columnwise)
    copies, dprobs = hopper("fp8_grouped_gemm_dact")(*arguments, power_of_two=power_of_two)
    assert dprobs is None and copies.sums is None
    assert_same_copies(copies, fp8.fp8_grouped_gemm_dact(*arguments, power_of_two=power_of_two)[0], TAIL)


@pytest.mark.parametrize("activation", SMOOTH, ids=ids)
@pytest.mark.parametrize(("h", "i"), [(2880, 1856), (768, 768)])
def test_gradient_of_random_values(activation: Activation, h: int, i: int) -> None:
    dy, w, preact, probs = gradient(RAGGED, activation, h, i, exact=False)
    arguments = (*dy, *w, *offsets_of(RAGGED), preact, activation, probs)
    copies, dprobs = hopper("fp8_grouped_gemm_dact")(*arguments, need_dprobs=True, need_dbias=True)
    expected, sums = fp8.fp8_grouped_gemm_dact(*arguments, need_dprobs=True, need_dbias=True)
    ones = torch.ones(RAGGED.rows, i, device=DEVICE)
    factor, _ = reference.dact(ones, preact.float(), arguments[4], probs.bfloat16(), activation)
    apart = magnitudes(dy, w, arguments[4]).repeat(1, activation.halves)
    apart = apart * (ACCUMULATED * factor.abs() + 2.0**-20)
    assert_near_copies(copies, expected, RAGGED, apart, 0.02, activation.halves)
    assert_as_accurate(dprobs, sums.bfloat16().float(), sums, "dprobs")
    assert_as_accurate(copies.sums, expected.sums.bfloat16().float(), expected.sums, "dbias")
    again, same = hopper("fp8_grouped_gemm_dact")(*arguments, need_dprobs=True, need_dbias=True)
    assert_same_copies(again, copies, RAGGED)
    assert_bitwise_equal(same, dprobs, "dprobs again")
    assert_bitwise_equal(again.sums, copies.sums, "dbias again")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda a: a.update(x=a["x"].float()), "x is float32"),
        (lambda a: a.update(x_scale=a["x_scale"][:, :-4]), "x_scale"),
        (lambda a: a.update(w=a["w"].float()), "w is float32"),
        (lambda a: a.update(w_scale=a["w_scale"].double()), "w_scale"),
        (lambda a: a.update(offsets=a["offsets"].long()), "offsets"),
        (lambda a: a.update(halves=3), "halves"),
        (lambda a: a.update(bias=integers(2, 48)), "bias"),
    ],
)
def test_bad_operands_raise(change, words: str) -> None:
    splits = full("two", 8, 8)
    x, w = rows_of(integers(16, 256), splits), weights_of(integers(2, 64, 256))
    arguments = {"x": x[0], "x_scale": x[1], "w": w[0], "w_scale": w[1], "offsets": offsets_of(splits)[0]}
    change(arguments)
    with pytest.raises(ValueError, match=words):
        hopper("fp8_grouped_gemm")(**arguments)
