"""Traps of cuDNN Frontend that a call must not fall into: memory that streams share, the environment, the host's eyes.

On a double of its classes. What its real classes keep: `test_blackwell_calls`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from cute_kernels import launch
from cute_kernels.blackwell import dglu, frontend, padded
from cute_kernels.blackwell.mxfp8_reference import quantize_rows
from cute_kernels.blackwell.operands import Operand, group_tiles
from cute_kernels.blackwell.quant import quant
from cute_kernels.blackwell.rows import PaddedGroups
from cute_kernels.blackwell.wgrad import wgrad
from tests import frontend_double
from tests.blackwell_calls import E4M3, ENDS, MX_DY, MX_GRAD, MX_W2_BACK, PREACT, SWIGLU, W2, WIDTH, H, M, mxfp8
from tests.compare import assert_bitwise_equal
from tests.frontend_double import MARGIN, Operation


@pytest.fixture(autouse=True)
def double(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Operation]]:
    """The operations that were made."""
    monkeypatch.setattr(frontend, "library", lambda: frontend_double)
    monkeypatch.setattr("cute_kernels.blackwell.wgrad.library", lambda: frontend_double)
    monkeypatch.setattr(frontend, "on", lambda device: nullcontext())
    monkeypatch.setattr(Operation, "made", [])
    launch.forget()
    yield Operation.made
    launch.forget()


def bf16(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


def random_mxfp8(*shape: int) -> Operand:
    """Rows whose values are some E4M3, each block with the scale 1."""
    made = mxfp8(*shape)
    data = torch.randint(-3, 4, shape).float().to(E4M3)
    assert made.scale is not None
    made.scale.view(torch.uint8).fill_(127)
    return Operand(data, made.scale)


# ----------------------------------------------------------------------------------------------------------------------
# Memory and streams


def _dglu() -> Any:
    return dglu.dglu(MX_DY, MX_W2_BACK, ENDS, PREACT, SWIGLU, **MX_GRAD)


def _bf16_dglu() -> Any:
    return dglu.dglu(Operand(bf16(M, H)), Operand(W2.mT), ENDS, PREACT, SWIGLU)


def _wgrad() -> Any:
    return wgrad(random_mxfp8(M, H), random_mxfp8(M, WIDTH), ENDS)


@pytest.mark.parametrize(
    ("call", "scratch"),
    [(_dglu, "workspace"), (_bf16_dglu, "workspace"), (_wgrad, "descriptor_workspace")],
    ids=["mxfp8 dglu", "bf16 dglu", "mxfp8 wgrad"],
)
def test_scratch_is_each_call_s_own(call: Callable[[], Any], scratch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two streams may be in the same operation at once: what the first writes into, the second must not be given."""
    kept = []
    execute = Operation.execute

    def watched(self: Operation, **given: Any) -> None:
        kept.append(given[scratch])  # keeping it, so that no address is used twice
        execute(self, **given)

    monkeypatch.setattr(Operation, "execute", watched)
    for _ in range(3):
        call()
    assert len({t.data_ptr() for t in kept}) == 3 and all(t.numel() >= 128 for t in kept)
    assert len(Operation.made) == 1


def test_results_are_each_call_s_own() -> None:
    weight = bf16(4, H, WIDTH)
    first = padded.padded_gemm(bf16(M, WIDTH), [weight], ENDS)
    before = first.clone()
    second = padded.padded_gemm(bf16(M, WIDTH), [weight], ENDS)
    assert first.data_ptr() != second.data_ptr()
    assert_bitwise_equal(first, before, "the first result")


def test_a_call_runs_on_the_device_of_its_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its current stream is the one that is taken: nothing names a stream, and the device is made the current one."""
    entered: list[torch.device] = []

    class Entered(nullcontext):
        def __init__(self, device: torch.device) -> None:
            super().__init__()
            entered.append(device)

    monkeypatch.setattr(frontend, "on", Entered)
    execute = Operation.execute

    def watched(self: Operation, **given: Any) -> None:
        assert entered and not {"stream", "current_stream"} & given.keys()
        execute(self, **given)

    monkeypatch.setattr(Operation, "execute", watched)
    padded.padded_gemm(bf16(M, WIDTH), [W2], ENDS)
    assert entered == [torch.device("cpu")]


# ----------------------------------------------------------------------------------------------------------------------
# The environment


@pytest.mark.parametrize("before", [None, "7"])
@pytest.mark.parametrize("where", ["__init__", "check_support", "compile", "execute", "nowhere"])
def test_the_margin_is_never_left_in_the_environment(
    where: str, before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever raises; and it is not there while an operation runs, where nothing reads it."""
    if before is not None:
        monkeypatch.setenv(MARGIN, before)
    original = getattr(Operation, where) if where != "nowhere" else None

    def raising(self: Operation, **given: Any) -> None:
        assert os.environ.get(MARGIN) == (before if where == "execute" else "8")
        raise ValueError("no")

    if original is not None:
        monkeypatch.setattr(Operation, where, raising)
    for _ in range(2):
        if original is None:
            padded.padded_gemm(bf16(M, WIDTH), [W2], ENDS, sm_margin=16)
        else:
            with pytest.raises((ValueError, launch.CompileError), match="no"):
                padded.padded_gemm(bf16(M, WIDTH), [W2], ENDS, sm_margin=16)
        assert os.environ.get(MARGIN) == before


def test_an_operation_that_could_not_be_constructed_is_constructed_by_the_next_right_call(
    double: list[Operation], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a wrong operand made fail says nothing of the next one."""

    def wrong(self: Operation) -> bool:
        raise ValueError("no")

    with monkeypatch.context() as patch:
        patch.setattr(Operation, "check_support", wrong)
        with pytest.raises(ValueError, match="no"):
            padded.padded_gemm(bf16(M, WIDTH), [W2], ENDS)
    assert padded.padded_gemm(bf16(M, WIDTH), [W2], ENDS).shape == (M, H)


# ----------------------------------------------------------------------------------------------------------------------
# Row counts, and what the host reads


def test_nothing_is_kept_for_a_row_count(double: list[Operation]) -> None:
    """As many operations, and as many entries of our own, for a hundred row counts as for one."""
    weight, counts = bf16(4, H, WIDTH), []
    for rows in range(256, 256 * 41, 256):
        ends = torch.tensor([0, 0, 256, rows], dtype=torch.int32)
        padded.padded_gemm(bf16(rows, WIDTH), [weight], ends)
        quant(random_mxfp8(rows, WIDTH), random_mxfp8(4, H, WIDTH), ends)
        wgrad(random_mxfp8(rows, H), random_mxfp8(rows, WIDTH), ends)
        counts.append((len(double), len(launch._built)))
    assert set(counts) == {(3, 3)}


def test_nothing_on_the_way_reads_the_device() -> None:
    """Padding, quantising, unpadding: the sizes of all follow from T and G, so that a graph can be captured."""
    with FakeTensorMode():
        offsets = torch.empty(5, dtype=torch.int32)
        where = PaddedGroups(offsets, 400)
        x = where.pad(torch.empty(400, 64, dtype=torch.bfloat16))
        assert x.shape[0] == where.padded == (400 + 4 * 255) // 256 * 256
        for columnwise in (False, True):
            made = quantize_rows(x, where.ends, columnwise)
            assert made.data.shape == x.shape and made.scale is not None
        group_tiles(made.scale, where.ends)
        assert where.unpad(x).shape == (400, 64)


@pytest.mark.parametrize("sizes", [(400, 0, 0, 0), (0, 0, 0, 400), (0, 0, 0, 0), (1, 1, 1, 1)], ids=str)
def test_the_last_group_runs_to_the_end_of_the_buffer_with_zero_rows(sizes: tuple[int, ...]) -> None:
    """So every row of every result is defined: the kernel is asked for all of them, and zeros give zeros."""
    offsets = torch.tensor([0, *torch.tensor(sizes).cumsum(0)], dtype=torch.int32)
    where = PaddedGroups(offsets, 400)
    x = torch.full((400, WIDTH), 7.0).bfloat16()
    y = padded.padded_gemm(where.pad(x), [bf16(4, H, WIDTH)], where.ends)
    assert int(where.ends[-1]) == y.shape[0] == where.padded and y.isfinite().all()
    used = int(offsets[-1])
    assert int((y != 0).any(1).sum()) == used  # as many rows as there are tokens; the rest are zeros
    assert where.unpad(y)[:used].any(1).all() and not where.unpad(y)[used:].any()
