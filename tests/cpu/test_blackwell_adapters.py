"""The Blackwell adapters against a double of cuDNN Frontend: what they hand over means what our functions mean."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from cute_kernels import launch
from cute_kernels.activation import Activation
from cute_kernels.blackwell import dglu, frontend, padded, reference
from cute_kernels.blackwell.operands import Operand
from cute_kernels.blackwell.rows import GROUP_ROWS, PaddedGroups
from tests import frontend_double
from tests.compare import assert_as_accurate, assert_bitwise_equal
from tests.frontend_double import MARGIN, Operation

SIZES, ROWS, H, WIDTH = (30, 0, 300, 14), 400, 64, 64
SWIGLU, CLAMPED = Activation("swiglu"), Activation("clamped_swiglu", 7.0, 1.702, 0.5)
ACTIVATIONS = [SWIGLU, CLAMPED]


@pytest.fixture(autouse=True)
def double(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Operation]]:
    """The operations that were made. On the CPU no device becomes the current one."""
    monkeypatch.setattr(frontend, "library", lambda: frontend_double)
    monkeypatch.setattr(frontend, "on", lambda device: nullcontext())
    monkeypatch.setattr(Operation, "made", [])
    launch.forget()
    yield Operation.made
    launch.forget()


def groups(sizes: tuple[int, ...] = SIZES, rows: int = ROWS) -> PaddedGroups:
    offsets = torch.tensor([0, *torch.tensor(sizes).cumsum(0)], dtype=torch.int32)
    return PaddedGroups(offsets, rows)


def bf16(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape) * scale).bfloat16()


class Case:
    """Operands on padded rows."""

    def __init__(self, where: PaddedGroups) -> None:
        experts = where.ends.shape[0]
        self.ends = where.ends
        self.x, self.dy, self.probs = (where.pad(t) for t in (bf16(ROWS, H), bf16(ROWS, H), torch.rand(ROWS)))
        self.w1, self.w2 = bf16(experts, 2 * WIDTH, H, scale=0.3), bf16(experts, H, WIDTH, scale=0.3)
        self.b1, self.b2 = bf16(experts, 2 * WIDTH), bf16(experts, H)
        self.act = bf16(where.padded, WIDTH)


@pytest.fixture
def case() -> Case:
    return Case(groups())


def assert_same(name: str, *arguments: object) -> None:
    """The function of `padded` is as accurate as that of `reference`."""
    got, plain = (getattr(module, name)(*arguments) for module in (padded, reference))
    exact = getattr(reference, name)(*map(_widened, arguments))
    for i, parts in enumerate(zip(*(r if isinstance(r, tuple) else (r,) for r in (got, plain, exact)), strict=True)):
        if parts[0] is None:
            assert parts[1] is None
        else:
            assert_as_accurate(*parts, f"{name}[{i}]")


def _widened(argument: object) -> object:
    if isinstance(argument, list):
        return [_widened(t) for t in argument]
    return argument.float() if isinstance(argument, Tensor) and argument.is_floating_point() else argument


# ----------------------------------------------------------------------------------------------------------------------
# What a call means


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda a: a.kind)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("probs", [False, True])
def test_glu(case: Case, activation: Activation, bias: bool, probs: bool) -> None:
    factors = case.probs.bfloat16().float() if probs else None  # the reference rounds them to the compute dtype
    assert_same("padded_gemm_act", case.x, [case.w1], case.ends, activation, case.b1 if bias else None, factors)


def test_probs_are_rounded_to_the_compute_dtype_first(case: Case) -> None:
    call = (case.x, [case.w1], case.ends, SWIGLU, None)
    rounded = padded.padded_gemm_act(*call, case.probs.bfloat16().float())[0]
    assert_bitwise_equal(padded.padded_gemm_act(*call, case.probs)[0], rounded, "act")


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
def test_a_bias_scale_scales_the_bias_alone(case: Case, bias: bool, scaled: bool) -> None:
    """Without a bias their prob would multiply the product."""
    scale = case.probs if scaled else None
    assert_same("padded_gemm", case.act, [case.w2], case.ends, case.b2 if bias else None, scale)


def test_the_input_gradient_reads_the_forward_weight_where_it_lies(case: Case, double: list[Operation]) -> None:
    dy = bf16(case.x.shape[0], 2 * WIDTH)
    dx = padded.padded_gemm(dy, [case.w1.mT], case.ends)
    assert_bitwise_equal(dx, reference.padded_gemm(dy, [case.w1.mT], case.ends), "dx")
    (made,) = double
    assert made.settings["b_major"] == "n" and made.samples["b"].data_ptr() == case.w1.data_ptr()


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda a: a.kind)
@pytest.mark.parametrize("need_dprobs", [False, True])
@pytest.mark.parametrize("need_dbias", [False, True])
def test_dglu(case: Case, activation: Activation, need_dprobs: bool, need_dbias: bool, double: list[Operation]) -> None:
    preact = bf16(case.x.shape[0], 2 * WIDTH, scale=3.0)
    factors = case.probs.bfloat16().float()
    sums = need_dprobs, need_dbias
    assert_same("padded_gemm_dact", case.dy, [case.w2], case.ends, preact, activation, factors, *sums)
    names = [type(made).__name__ for made in double]
    assert names == (["GroupedGemmSm100"] if need_dprobs else ["GroupedGemmDgluSm100"])  # atomics are left out
    assert all(made.samples.get("dbias") is None for made in double)


def test_alpha_is_not_squared(case: Case) -> None:
    """Powers of four, whose roots are exact: scaling the rows of dy does the same, bit for bit."""
    preact, alpha = bf16(case.x.shape[0], 2 * WIDTH), torch.tensor([0.25, 1.0, 4.0, 16.0])
    call = (Operand(case.dy), Operand(case.w2.mT), case.ends, preact, SWIGLU, case.probs)
    scaled = dglu.dglu(*call, alpha=alpha).dpreact
    by_hand = dglu.dglu(Operand((case.dy.float() * alpha[_group_of_rows(case)][:, None]).bfloat16()), *call[1:]).dpreact
    assert isinstance(scaled, Tensor) and isinstance(by_hand, Tensor)
    assert_bitwise_equal(scaled, by_hand, "dpreact")


def _group_of_rows(case: Case) -> Tensor:
    return torch.bucketize(torch.arange(case.x.shape[0]), case.ends.long(), right=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("separate", [False, True])
def test_wgrad(case: Case, dtype: torch.dtype, accumulate: bool, separate: bool) -> None:
    start = 3.0 if accumulate else 0.0
    out = [torch.full((4, H, WIDTH), 3.0, dtype=kind) for kind in (dtype, dtype, torch.float32)]
    parts = list(out[0].unbind(0)) if separate else [out[0]]
    padded.padded_wgrad_(parts, case.dy, case.act, case.ends, accumulate)
    reference.padded_wgrad_([out[1]], case.dy, case.act, case.ends, accumulate)
    reference.padded_wgrad_([out[2]], case.dy.float(), case.act.float(), case.ends, accumulate)
    assert_as_accurate(*out, "dw")
    assert (out[0][1] == start).all()  # no tokens
    assert_same("padded_wgrad", case.dy, case.act, case.ends)


def test_no_rows_at_all_launches_nothing(double: list[Operation]) -> None:
    where = groups((0, 0), 0)
    assert where.padded == 0
    x, w1, w2 = bf16(0, H), bf16(2, 2 * WIDTH, H), bf16(2, H, WIDTH)
    act, preact = padded.padded_gemm_act(x, [w1], where.ends, SWIGLU)
    assert act.shape == (0, WIDTH) and preact.shape == (0, 2 * WIDTH)
    assert padded.padded_gemm(act, [w2], where.ends).shape == (0, H)
    assert padded.padded_gemm_dact(x, [w2], where.ends, preact, SWIGLU)[0].shape == (0, 2 * WIDTH)
    assert (padded.padded_wgrad(x, act, where.ends) == 0).all()
    out = torch.full((2, H, WIDTH), 3.0)
    padded.padded_wgrad_([out], x, act, where.ends, accumulate=True)
    assert (out == 3.0).all() and not double


# ----------------------------------------------------------------------------------------------------------------------
# What is not deterministic, what is kept, and for whom


def test_sums_of_atomics_are_asked_for_by_name(case: Case) -> None:
    preact = bf16(case.x.shape[0], 2 * WIDTH)
    call = (Operand(case.dy), Operand(case.w2.mT), case.ends, preact, SWIGLU, case.probs)
    for what in ("dprobs of BF16", "dbias"):
        asked = {"need_dbias" if what == "dbias" else "need_dprobs": True}
        with pytest.raises(NotImplementedError, match=f"sums {what} with atomics; compute it outside"):
            dglu.dglu(*call, **asked)
    made = dglu.dglu(*call, need_dprobs=True, deterministic=False)
    exact = [case.dy.float(), [case.w2.float()], case.ends, preact.float(), SWIGLU, case.probs, True]
    want = reference.padded_gemm_dact(case.dy, [case.w2], case.ends, preact, SWIGLU, case.probs, True)[1]
    assert made.dprobs is not None and want is not None
    assert_as_accurate(made.dprobs, want, reference.padded_gemm_dact(*exact)[1], "dprobs")


def test_one_operation_serves_every_row_count_and_scratch_is_each_call_s_own(double: list[Operation]) -> None:
    w1, w2 = bf16(4, 2 * WIDTH, H), bf16(4, H, WIDTH)
    scratch = set()
    compute = frontend_double.GroupedGemmDgluSm100.compute

    def watched(self: Operation, given: object) -> None:
        scratch.add(given.workspace)  # keeping it, so that no address is used twice
        compute(self, given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frontend_double.GroupedGemmDgluSm100, "compute", watched)
        for rows in (256, 400, 1024, 2000):
            where = groups((10, 20, 30, 40), rows)
            x = where.pad(bf16(rows, H))
            _, preact = padded.padded_gemm_act(x, [w1], where.ends, SWIGLU)
            padded.padded_gemm_dact(x, [w2], where.ends, preact, SWIGLU)
    assert [(type(made).__name__, made.calls) for made in double] == [
        ("GroupedGemmGluSm100", 4),
        ("GroupedGemmDgluSm100", 4),
    ]
    assert len({t.data_ptr() for t in scratch}) == 4


def test_the_margin_is_in_the_environment_for_the_compile_only(case: Case, double: list[Operation]) -> None:
    """In whole clusters of two; afterwards the variable is what it was; another margin is another operation."""
    for margin in (0, 1, 8):
        padded.padded_gemm(case.act, [case.w2], case.ends, sm_margin=margin)
        padded.padded_gemm(case.act, [case.w2], case.ends, sm_margin=margin)
        assert MARGIN not in os.environ
    assert [made.margin for made in double] == ["0", "1", "4"] and [made.calls for made in double] == [2, 2, 2]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MARGIN, "7")
        padded.padded_gemm(case.act, [case.w2], case.ends, sm_margin=16)
        assert os.environ[MARGIN] == "7" and double[-1].margin == "8"


def test_a_compile_that_fails_is_not_tried_again(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def compile(self: Operation) -> None:
        tried.append(self)
        raise RuntimeError("no")

    monkeypatch.setattr(frontend_double.GroupedGemmSm100, "compile", compile)
    for _ in range(2):
        with pytest.raises(launch.CompileError, match=r"cuDNN Frontend's GroupedGemmSm100 .* does not compile: no"):
            padded.padded_gemm(case.act, [case.w2], case.ends)
    assert len(tried) == 1 and MARGIN not in os.environ


def test_no_compile_forbids_what_is_not_there_yet(case: Case) -> None:
    padded.padded_gemm(case.act, [case.w2], case.ends)
    with launch.no_compile():
        padded.padded_gemm(case.act, [case.w2], case.ends)
        with pytest.raises(launch.CompileForbiddenError, match="cannot be kept on disk, so call it once before"):
            padded.padded_gemm(case.act, [case.w2], case.ends, case.b2)


# ----------------------------------------------------------------------------------------------------------------------
# Rows


@pytest.mark.parametrize("sizes", [SIZES, (0, 0, 0, 0), (256, 256), (1,), (0, 5), (5, 0), (255, 1, 257)], ids=str)
@pytest.mark.parametrize("tail", [0, 1, 100, 600])
def test_rows_are_padded_and_unpadded(sizes: tuple[int, ...], tail: int) -> None:
    used = sum(sizes)
    where = groups(sizes, used + tail)
    x = torch.randn(used + tail, 3)
    x[used:] = float("nan")
    y = where.pad(x)
    assert y.shape[0] == where.padded and where.padded % GROUP_ROWS == 0 and y.isfinite().all()
    ends = where.ends.tolist()
    assert all(end % GROUP_ROWS == 0 for end in ends) and ends == sorted(ends) and ends[-1] == where.padded
    assert where.ends.data_ptr() % 16 == 0 and where.ends.is_contiguous()
    at = 0
    for size, start, end in zip(sizes, [0, *ends], ends, strict=False):
        assert_bitwise_equal(y[start : start + size], x[at : at + size], "rows")
        assert (y[start + size : end] == 0).all()
        at += size
    back = where.unpad(torch.where(y == 0, float("nan"), y))
    assert_bitwise_equal(back[:used], x[:used], "rows")
    assert (back[used:] == 0).all()
    assert torch.equal(where.unpad(where.pad(x[:, 0]))[:used], x[:used, 0])
