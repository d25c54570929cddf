"""The Blackwell adapters in MXFP8 and NVFP4: bytes, scales and where they lie.

On a CPU against a double of cuDNN Frontend (`tests.frontend_double`), on a Blackwell against itself (not run yet).
A result is compared with the product of the values that the operands hold, in FP32; quantised results with the bytes
that `quantization.quantize` gives of it.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

import fusible_ops as ops
from cute_kernels import launch, reference
from cute_kernels.activation import Activation
from cute_kernels.activation_reference import activation_backward, activation_forward
from cute_kernels.blackwell import frontend
from cute_kernels.blackwell.dense import dense_srelu, dense_swiglu, swapped_halves
from cute_kernels.blackwell.dglu import dglu
from cute_kernels.blackwell.glu import glu
from cute_kernels.blackwell.glu_hadamard import glu_hadamard
from cute_kernels.blackwell.nvfp4_reference import of_stored
from cute_kernels.blackwell.operands import Operand, Quantised, group_tiles, operand, tiles_of_rows
from cute_kernels.blackwell.quant import quant
from cute_kernels.blackwell.rows import PaddedGroups
from cute_kernels.blackwell.srelu import dsrelu, srelu
from cute_kernels.blackwell.wgrad import wgrad
from cute_kernels.catalog import BLACKWELL
from cute_kernels.quantization.formats import Format, mxfp8, nvfp4
from cute_kernels.quantization.hadamard import rotate
from cute_kernels.quantization.quantize import Quantized, dequantize, quantize
from cute_kernels.quantization.scale_layout import swizzled_scale
from tests import frontend_double
from tests.cases import Splits
from tests.compare import assert_as_accurate, assert_bitwise_equal
from tests.frontend_double import Operation
from tests.models import MLP, Inputs, step

SIZES, ROWS, H, WIDTH = (30, 0, 300, 14), 400, 160, 96
E4M3 = torch.float8_e4m3fn
SWIGLU, CLAMPED = Activation("swiglu"), Activation("clamped_swiglu", 5.0, 1.5, 0.5)
SRELU, TANH_SRELU = Activation("srelu"), Activation("tanh_srelu", clamp_scale=5.0)
FORMATS = [mxfp8(), nvfp4()]


@pytest.fixture(autouse=True, params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu(*BLACKWELL))])
def double(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Operation] | None]:
    """The operations that the double made; None on a Blackwell, where there is none."""
    if request.param == "cuda":
        with torch.device("cuda"):
            yield None
        return
    monkeypatch.setattr(frontend, "library", lambda: frontend_double)
    monkeypatch.setattr("cute_kernels.blackwell.wgrad.library", lambda: frontend_double)
    monkeypatch.setattr(frontend, "on", lambda device: nullcontext())
    monkeypatch.setattr(Operation, "made", [])
    launch.forget()
    yield Operation.made
    launch.forget()


class Case:
    """x, dy [M, H], pre-activations [M, 2·WIDTH], probs, on padded rows; weights as kernels see them."""

    def __init__(self) -> None:
        offsets = torch.tensor([0, *torch.tensor(SIZES).cumsum(0)], dtype=torch.int32)
        self.where = PaddedGroups(offsets, ROWS)
        self.ends, self.offsets = self.where.ends, self.where.padded_offsets
        self.x, self.dy, self.act = (self.where.pad(torch.randn(ROWS, c).bfloat16()) for c in (H, H, WIDTH))
        self.probs = self.where.pad(torch.rand(ROWS))
        self.preact = torch.randn(self.where.padded, 2 * WIDTH).bfloat16()
        self.w1 = (torch.randn(4, 2 * WIDTH, H) * 0.3).bfloat16()
        self.w2 = (torch.randn(4, H, WIDTH) * 0.3).bfloat16()
        self.b1, self.b2 = torch.randn(4, 2 * WIDTH).bfloat16(), torch.randn(4, H).bfloat16()


@pytest.fixture
def case() -> Case:
    return Case()


class Copy:
    """A quantised copy: what kernels take, and the values that it holds."""

    def __init__(self, t: Tensor, format: Format, columnwise: bool = False, ends: Tensor | None = None) -> None:
        made = quantize(t, format, columnwise)
        self.operand, self.amax = operand(made, format, columnwise, ends), made.amax
        self.values = dequantize(made, format, columnwise)


def alphas(*copies: Copy) -> Tensor | None:
    """FP32 [E]: what NVFP4's products are multiplied by."""
    factors = [copy.amax / 2688 for copy in copies if copy.amax is not None]
    return (factors[0] * factors[1]).expand(4).contiguous() if factors else None


def weight_of_dgrad(w: Tensor, format: Format) -> tuple[Operand, Copy]:
    """The weight of the product dy W as kernels take it, [E, K, N] from a column-wise copy."""
    copy = Copy(w, format, columnwise=True)
    if not format.transposes:
        return Operand(copy.operand.data.mT, copy.operand.scale), copy
    return copy.operand, copy


def as_accurate(got: Tensor, exact: Tensor, what: str) -> None:
    assert_as_accurate(got, exact.to(got.dtype), exact.float(), what)


def assert_is(made: Tensor | Quantised, exact: Tensor, ends: Tensor, what: str) -> None:
    """BF16 of `exact`; or both quantised copies of it, bytes and scales, those of the second by group."""
    if isinstance(made, Tensor):
        as_accurate(made, exact, what)
        return
    assert_is_copy(made.rowwise, exact, None, what)
    assert_is_copy(made.columnwise, exact, ends, what)


def assert_is_copy(copy: Operand, exact: Tensor, ends: Tensor | None, what: str) -> None:
    """`exact` in MXFP8, along its rows if `ends` are given."""
    columnwise = ends is not None
    want = quantize(exact, mxfp8(), columnwise)
    scale = swizzled_scale(want.scale, mxfp8(), exact.shape[1] if columnwise else exact.shape[0], columnwise)
    assert copy.scale is not None
    scale = group_tiles(scale, ends) if ends is not None else scale
    differ = (copy.data.float() != want.data.float()).float().mean()
    assert differ < 0.001, f"{what}: {differ:.4f} of the values differ"  # sums in another order: a step, rarely
    assert_bitwise_equal(copy.scale.view(torch.uint8).reshape(scale.shape), scale.view(torch.uint8), what)


# ----------------------------------------------------------------------------------------------------------------------
# Products


@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
def test_quant(case: Case, format: Format, bias: bool, scaled: bool) -> None:
    x, w = Copy(case.act, format), Copy(case.w2, format)
    given = (case.b2 if bias else None, case.probs if scaled else None)
    y = quant(x.operand, w.operand, case.ends, *given, alpha=alphas(x, w))
    assert isinstance(y, Tensor)
    wide = None if given[0] is None else given[0].float()
    as_accurate(y, reference.grouped_gemm(x.values, [w.values], case.offsets, wide, given[1]), "y")


def test_quant_into_fp8_and_from_the_column_wise_copy_of_a_weight(case: Case) -> None:
    dy, (weight, w) = Copy(case.preact, mxfp8()), weight_of_dgrad(case.w1, mxfp8())
    exact = reference.grouped_gemm_dgrad(dy.values, [w.values], case.offsets)
    dx = quant(dy.operand, weight, case.ends)
    assert isinstance(dx, Tensor)
    as_accurate(dx, exact, "dx")
    assert_is(quant(dy.operand, weight, case.ends, dtype=E4M3), exact, case.ends, "dx in FP8")


@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("activation", [SWIGLU, CLAMPED], ids=lambda a: a.kind)
@pytest.mark.parametrize("bias", [False, True])
def test_glu(case: Case, format: Format, activation: Activation, bias: bool) -> None:
    x, w = Copy(case.x, format), Copy(case.w1, format)
    dtype = E4M3 if format == mxfp8() else torch.bfloat16
    b = case.b1 if bias else None
    made = glu(x.operand, w.operand, case.ends, activation, case.probs, b, alphas(x, w), act_dtype=dtype)
    exact = reference.grouped_gemm(x.values, [w.values], case.offsets, None if b is None else b.float())
    act = activation_forward(reference.deinterleave(exact, 32, 1), activation, case.probs)
    as_accurate(made.preact, exact, "preact")
    assert_is(made.act, act, case.ends, "act")
    assert_is_amax(made.amax, act, case)


def assert_is_amax(amax: Tensor | None, of: Tensor, case: Case) -> None:
    """The largest magnitudes of the groups; 0 of one without rows."""
    if amax is not None:
        want = [of[s:e].abs().max() if e > s else torch.tensor(0.0) for s, e in _spans(case)]
        as_accurate(amax, torch.stack(want), "amax")


def _spans(case: Case) -> list[tuple[int, int]]:
    bounds = case.offsets.tolist()
    return list(itertools.pairwise(bounds))


@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("activation", [SWIGLU, CLAMPED], ids=lambda a: a.kind)
def test_dglu(case: Case, format: Format, activation: Activation, double: list[Operation] | None) -> None:
    dy, (weight, w) = Copy(case.dy, format), weight_of_dgrad(case.w2, format)
    dtype = E4M3 if format == mxfp8() else torch.bfloat16
    made = dglu(
        dy.operand, weight, case.ends, case.preact, activation, case.probs, True,
        alpha=alphas(dy, w), dpreact_dtype=dtype,
    )  # fmt: skip
    grad = reference.grouped_gemm_dgrad(dy.values, [w.values], case.offsets)
    plain = reference.deinterleave(case.preact.float(), 32, 1)
    dpreact, dprobs = activation_backward(grad, plain, activation, case.probs, True)
    assert_is(made.dpreact, reference.interleave(dpreact, 32, 1), case.ends, "dpreact")
    assert_is_amax(made.amax, dpreact, case)
    assert made.dprobs is not None and dprobs is not None
    as_accurate(made.dprobs, dprobs, "dprobs")
    if double is not None:
        assert double[0].settings["_deterministic"] and double[0].samples["dprob"].shape == (case.where.padded, 1, 1)


@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("accumulate", [False, True])
def test_wgrad(case: Case, format: Format, accumulate: bool) -> None:
    """Scales of the rows of a group lie together, whatever the other groups are."""
    dy, x = (Copy(t, format, columnwise=True, ends=case.ends) for t in (case.dy, case.act))
    factors = [(c.amax / 2688).expand(4).contiguous() for c in (dy, x) if c.amax is not None]
    out = torch.full((4, H, WIDTH), 3.0)
    wgrad(dy.operand, x.operand, case.ends, out, accumulate, (factors[0], factors[1]) if factors else None)
    exact = reference.grouped_wgrad(dy.values, x.values, case.offsets) + (3.0 if accumulate else 0.0)
    as_accurate(out, exact, "dw")
    assert (out[1] == (3.0 if accumulate else 0.0)).all()


def test_results_in_fp8_are_operands_of_weight_gradients(case: Case) -> None:
    x, w = Copy(case.x, mxfp8()), Copy(case.w1, mxfp8())
    made = glu(x.operand, w.operand, case.ends, SWIGLU, case.probs, act_dtype=E4M3).act
    assert isinstance(made, Quantised)
    dy = Copy(case.dy, mxfp8(), columnwise=True, ends=case.ends)
    got = wgrad(dy.operand, made.columnwise, case.ends)
    exact = reference.grouped_gemm(x.values, [w.values], case.offsets)
    act = activation_forward(reference.deinterleave(exact, 32, 1), SWIGLU, case.probs)
    values = dequantize(quantize(act, mxfp8(), columnwise=True), mxfp8(), columnwise=True)
    assert_as_accurate(got, reference.grouped_wgrad(dy.values, values, case.offsets).bfloat16(),
                       reference.grouped_wgrad(dy.values, values, case.offsets), "dw")  # fmt: skip


@pytest.mark.parametrize("bias", [False, True])
def test_rotated_maxima_are_those_of_our_rotation(case: Case, bias: bool) -> None:
    """And the others those of the activation before it is rounded."""
    x, w = Copy(case.x, nvfp4()), Copy(case.w1, nvfp4())
    b = case.b1 if bias else None
    made = glu_hadamard(x.operand, w.operand, case.ends, SWIGLU, case.probs, b, alphas(x, w))
    turned = rotate(made.act.float().T.contiguous()).abs()
    zero = torch.tensor(0.0)
    for name, got, of in (
        ("amax", of_stored(made.amax), lambda s, e: made.act[s:e].float().abs().max()),
        ("rotated_amax", made.rotated_amax, lambda s, e: turned[:, s:e].max()),
    ):
        want = torch.stack([of(s, e) if e > s else zero for s, e in _spans(case)])
        as_accurate(got, want, name)


@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("activation", [SRELU, TANH_SRELU], ids=lambda a: a.kind)
@pytest.mark.parametrize("bias", [False, True])
def test_srelu(case: Case, format: Format, activation: Activation, bias: bool) -> None:
    x, w = Copy(case.x, format), Copy(case.w1, format)
    dtype = E4M3 if format == mxfp8() else torch.bfloat16
    b = case.b1 if bias else None
    made = srelu(x.operand, w.operand, case.ends, activation, case.probs, b, alphas(x, w), act_dtype=dtype)
    exact = reference.grouped_gemm(x.values, [w.values], case.offsets, None if b is None else b.float())
    as_accurate(made.preact, exact, "preact")
    act = activation_forward(exact, activation, case.probs)
    assert_is(made.act, act, case.ends, "act")
    assert_is_amax(made.amax, act, case)


@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("activation", [SRELU, TANH_SRELU], ids=lambda a: a.kind)
@pytest.mark.parametrize("deterministic", [False, True])
def test_dsrelu(case: Case, format: Format, activation: Activation, deterministic: bool) -> None:
    dy, (weight, w) = Copy(case.dy, format), weight_of_dgrad(case.w1.mT.contiguous(), format)
    dtype = E4M3 if format == mxfp8() else torch.bfloat16
    made = dsrelu(
        dy.operand, weight, case.ends, case.preact, activation, case.probs, True, deterministic,
        alpha=alphas(dy, w), dpreact_dtype=dtype,
    )  # fmt: skip
    grad = reference.grouped_gemm_dgrad(dy.values, [w.values], case.offsets)
    dpreact, dprobs = activation_backward(grad, case.preact.float(), activation, case.probs, True)
    assert_is(made.dpreact, dpreact, case.ends, "dpreact")
    assert_is_amax(made.amax, dpreact, case)
    assert made.dprobs is not None and dprobs is not None
    as_accurate(made.dprobs, dprobs, "dprobs")
    act = activation_forward(case.preact.float(), activation, case.probs)
    if made.act.scale is None:
        as_accurate(made.act.data, act, "act")
    else:
        assert_is_copy(made.act, act, case.ends, "act")


@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("activation", [SWIGLU, SRELU], ids=lambda a: a.kind)
def test_gradients_of_probs_are_sums_over_all_columns(case: Case, format: Format, activation: Activation) -> None:
    """Of more than one tile of 256, each of which has a sum of its own."""
    columns, block = 320, 32 if activation.is_glu else 0
    dy, (weight, w) = Copy(case.dy, format), weight_of_dgrad((torch.randn(4, H, columns) * 0.3).bfloat16(), format)
    preact = torch.randn(case.where.padded, activation.halves * columns).bfloat16()
    made = (dglu if activation.is_glu else dsrelu)(
        dy.operand, weight, case.ends, preact, activation, case.probs, True,
        alpha=alphas(dy, w), dpreact_dtype=E4M3 if format == mxfp8() else torch.bfloat16,
    )  # fmt: skip
    grad = reference.grouped_gemm_dgrad(dy.values, [w.values], case.offsets)
    plain = reference.deinterleave(preact.float(), block, 1)
    _, dprobs = activation_backward(grad, plain, activation, case.probs, True)
    assert made.dprobs is not None and dprobs is not None
    as_accurate(made.dprobs, dprobs, "dprobs")


@pytest.mark.parametrize("format", [None, *FORMATS], ids=str)
def test_dense_swiglu(case: Case, format: Format | None) -> None:
    w = case.w1[0]
    x_values, w_values, x, weight, alpha = case.x.float(), w.float(), Operand(case.x), Operand(swapped_halves(w)), 1.0
    if format is not None:
        copies = Copy(case.x, format), Copy(w, format)
        (x, x_values), w_values = (copies[0].operand, copies[0].values), copies[1].values
        weight, factors = Copy(swapped_halves(w), format).operand, alphas(*copies)
        alpha = 1.0 if factors is None else float(factors[0])
    act, preact = dense_swiglu(x, weight, alpha)
    exact = x_values @ w_values.T
    as_accurate(preact, swapped_halves(exact.T.contiguous()).T, "preact")
    as_accurate(act, activation_forward(reference.deinterleave(exact, 32, 1), SWIGLU, None), "act")


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_dense_srelu(case: Case, format: Format) -> None:
    x, w = Copy(case.x, format), Copy(case.w1[0], format)
    factors = alphas(x, w)
    act, preact = dense_srelu(
        x.operand, w.operand, case.probs, 1.0 if factors is None else float(factors[0]),
        act_dtype=E4M3 if format == mxfp8() else torch.bfloat16,
    )  # fmt: skip
    exact = x.values @ w.values.T
    as_accurate(preact, exact, "preact")
    value = activation_forward(exact, SRELU, case.probs)
    if isinstance(act, Tensor):
        as_accurate(act, value, "act")
    else:
        assert_is_copy(act, value, None, "act")


# ----------------------------------------------------------------------------------------------------------------------
# What is refused


def test_a_weight_gradient_from_scales_leaves_no_margin(case: Case) -> None:
    dy, x = (Copy(t, mxfp8(), columnwise=True, ends=case.ends).operand for t in (case.dy, case.act))
    with pytest.raises(
        ValueError, match="sm_margin is 16, needs 0: cuDNN Frontend's weight gradient from mxfp8 has none"
    ):
        wgrad(dy, x, case.ends, sm_margin=16)


@pytest.mark.parametrize(
    ("activation", "text"),
    [
        (Activation("clamped_swiglu", None), "limit is None, needs a number with clamped_swiglu"),
        (Activation("geglu"), "activation is geglu, needs swiglu or clamped_swiglu"),
        (Activation("situglu", beta1=4.0, beta2=25.0), "activation is situglu, needs swiglu or clamped_swiglu"),
    ],
)
def test_limits_are_those_of_the_catalogue(case: Case, activation: Activation, text: str) -> None:
    x, w = Copy(case.x, mxfp8()).operand, Copy(case.w1, mxfp8()).operand
    with pytest.raises(ValueError, match=text):
        glu(x, w, case.ends, activation, case.probs, act_dtype=E4M3)
    dy, (weight, _) = Copy(case.dy, mxfp8()).operand, weight_of_dgrad(case.w2, mxfp8())
    with pytest.raises(ValueError, match=text):
        dglu(dy, weight, case.ends, case.preact, activation, case.probs, dpreact_dtype=E4M3)


def test_constants_are_asked_for_whatever_was_built_before(case: Case) -> None:
    """Theirs has no key for what it has built in: a ReLU would run as a squared one, another clamp as its own."""
    x, w = Copy(case.x, nvfp4()), Copy(case.w1, nvfp4())
    given, alpha = (x.operand, w.operand, case.ends), alphas(x, w)
    srelu(*given, SRELU, case.probs, alpha=alpha)
    with pytest.raises(ValueError, match="activation is relu, needs srelu or tanh_srelu"):
        srelu(*given, Activation("relu"), case.probs, alpha=alpha)
    glu_hadamard(*given, Activation("clamped_swiglu", 7.0, 1.702, 1.0), case.probs, alpha=alpha)
    with pytest.raises(ValueError, match=r"limit is 5.0, needs 7.0 with clamped_swiglu"):
        glu_hadamard(*given, CLAMPED, case.probs, alpha=alpha)


def test_two_operands_that_do_not_fit_are_refused(case: Case) -> None:
    x, w = Copy(case.x, mxfp8()).operand, Copy(case.w1, nvfp4()).operand
    with pytest.raises(ValueError, match="x is mxfp8 and has 160 columns, weight nvfp4 and 160"):
        quant(x, w, case.ends)
    with pytest.raises(ValueError, match="x is mxfp8 and has 160 columns, weight mxfp8 and 96"):
        quant(x, Copy(case.w2, mxfp8()).operand, case.ends)


def test_narrow_widths_are_refused(case: Case) -> None:
    x, w = Copy(case.x[:, :48].repeat(1, 1), nvfp4()), Copy(case.w1[:, :, :48].contiguous(), nvfp4())
    with pytest.raises(ValueError, match="cudnn_quant_nvfp4: K is 48, needs a multiple of 32"):
        quant(x.operand, w.operand, case.ends, alpha=alphas(x, w))


# ----------------------------------------------------------------------------------------------------------------------
# Layouts


def test_group_tiles_puts_the_tiles_of_a_group_together() -> None:
    """Two row tiles; groups of 0, 2, 1 and 1 column tiles."""
    ends = torch.tensor([0, 256, 384, 512], dtype=torch.int32)
    tiles = torch.arange(8, dtype=torch.uint8).repeat_interleave(512).view(256, 16)
    got = group_tiles(tiles, ends).view(8, 512)[:, 0].tolist()
    assert got == [0, 1, 4, 5, 2, 6, 3, 7]
    assert_bitwise_equal(tiles_of_rows(group_tiles(tiles, ends), ends), tiles, "back")


def test_the_dense_kernel_s_halves_are_the_other_way_round() -> None:
    w = torch.arange(128.0).unsqueeze(1)
    rows = [*range(32, 64), *range(32), *range(96, 128), *range(64, 96)]
    assert swapped_halves(w)[:, 0].tolist() == [float(row) for row in rows]
    assert_bitwise_equal(swapped_halves(swapped_halves(w)), w, "twice")


def test_operand_of_square_blocks_has_a_scale_for_each_row() -> None:
    w = torch.randn(2, 64, 96).bfloat16()
    made = quantize(w, mxfp8(dims=2))
    got = operand(made, mxfp8(dims=2)).scale
    repeated = Quantized(made.data, made.scale.view(torch.uint8).repeat_interleave(32, 1).view(made.scale.dtype))
    assert got is not None
    assert_bitwise_equal(got, operand(repeated, mxfp8()).scale, "scale")


# ----------------------------------------------------------------------------------------------------------------------
# A whole layer


def test_results_fit_the_next_operation_a_layer_is_as_accurate_as_unfused(case: Case) -> None:
    """An MXFP8 MLP, forward and backward, each FP8 result handed on as it came, against the recipe's unfused ops."""
    splits = Splits("layer", SIZES, ROWS)
    mlp = MLP("scaled_swiglu", H, WIDTH, interleave=32)
    device = case.x.device.type
    plain = mlp.build(splits, device, torch.bfloat16, rules=())
    inputs = Inputs.random(splits, H, device, torch.bfloat16)
    with ops.autocast(recipe=ops.MXFP8BlockScaling()):
        unfused = step(plain, mlp, inputs)
    exact = step(copy.deepcopy(plain).float(), mlp, inputs.to(torch.float32))

    where, ends, (fc1, _, fc2) = case.where, case.ends, plain
    w1, w2 = (torch.stack([p.detach() for p in fc.parameters()]) for fc in (fc1, fc2))
    x, dy = where.pad(inputs.x), where.pad(inputs.dy)
    probs = where.pad(inputs.probs)

    def along_rows(t: Tensor) -> Operand:
        return Copy(t, mxfp8(), columnwise=True, ends=ends).operand

    first = glu(Copy(x, mxfp8()).operand, Copy(w1, mxfp8()).operand, ends, SWIGLU, probs, act_dtype=E4M3)
    assert isinstance(first.act, Quantised)
    y = quant(first.act.rowwise, Copy(w2, mxfp8()).operand, ends)
    back, _ = weight_of_dgrad(w2, mxfp8())
    middle = dglu(Copy(dy, mxfp8()).operand, back, ends, first.preact, SWIGLU, probs, True, dpreact_dtype=E4M3)
    assert isinstance(middle.dpreact, Quantised) and middle.dprobs is not None
    dx = quant(middle.dpreact.rowwise, weight_of_dgrad(w1, mxfp8())[0], ends)
    dw1 = wgrad(middle.dpreact.columnwise, along_rows(x), ends)
    dw2 = wgrad(along_rows(dy), first.act.columnwise, ends)
    assert isinstance(y, Tensor) and isinstance(dx, Tensor)

    fused = {"y": where.unpad(y), "dx": where.unpad(dx), "dprobs": where.unpad(middle.dprobs)}
    for fc, dw in (("fc1", dw1), ("fc2", dw2)):
        fused |= {f"d{fc}.weight{g}": dw[g] for g in range(len(SIZES))}
    assert fused.keys() == unfused.keys()
    for name, value in fused.items():
        assert_as_accurate(value, unfused[name], exact[name].to(value.dtype).float(), name)
