"""Passes over rows on SM90: offsets, activation gradients, bias gradients. Formulas: the functions of `reference`.

Shapes: row-shaped operands [T, width] bf16 or fp16, width a multiple of 8; offsets int32 [G+1]. Rows that 16-byte loads
cannot address (a transposed view, an expanded gradient) are copied first. No host sync; the same bits run after run.
sm_margin: SMs to leave free.
Errors: ValueError, before anything is launched, that names the argument and the limit.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from cute_kernels import launch
from cute_kernels.activation import Activation
from cute_kernels.catalog import (
    SM90_DACT,
    SM90_GROUP_OFFSETS,
    SM90_GROUPED_DBIAS,
    SM90_GROUPED_DSCALE,
    SM90_PADDED_GROUP_OFFSETS,
)
from cute_kernels.hopper.operands import KEPT, MOST_ROWS, check_offsets, check_shape, multiprocessors, readable
from cute_kernels.hopper.product_operands import check_preact_interleave
from cute_kernels.limits import dtype_name
from cute_kernels.quantization.groups import MULTIPLE, check_multiple

MODULE = "cute_kernels.hopper.rowwise_kernel"
ARCH = SM90_DACT.arch
CHUNK = 256  # rows that one partial sum of grouped_dbias covers; the kernel's constant of that name
MOST_COUNTERS = 256  # one for each thread of the kernel
INDEX_DTYPES = (torch.int32, torch.int64)


@dataclass(frozen=True)
class GroupOffsetsOptions:
    """index: dtype of the split sizes, by name, as all dtypes here. counts: it clears tile counters too. padded: padded
    offsets are wanted too.
    """

    index: str
    counts: bool = False
    padded: bool = False


@dataclass(frozen=True)
class DactOptions:
    """probs: their dtype, or None for no probs. alone: CTAs have an SM each, and are no more than the call says.
    preact_interleave: blocks of gate and up columns, 0 for halves."""

    element: str
    activation: Activation
    probs: str | None
    need_dprobs: bool
    alone: bool = False
    preact_interleave: int = 0


@dataclass(frozen=True)
class ColumnSumsOptions:
    """scale: its dtype, or None for no scale. interleaved: sums lie as blocks of gate, up columns. alone: as Dact's."""

    element: str
    scale: str | None
    interleaved: bool
    alone: bool = False


@dataclass(frozen=True)
class RowDotsOptions:
    """Dot products of dy's rows with their group's bias. alone: as Dact's."""

    element: str
    alone: bool = False


def group_offsets(split_sizes: Tensor, rows: int) -> Tensor:
    """`reference.group_offsets`: int32 [G+1]. split_sizes may be a strided view."""
    return _offsets(split_sizes, rows)


def group_offsets_and_counters(split_sizes: Tensor, rows: int, counters: int) -> tuple[Tensor, Tensor]:
    """`reference.group_offsets_and_counters`: int32 [G+1], and so many zeros, at most 256; one launch."""
    if counters > MOST_COUNTERS:
        raise ValueError(f"{SM90_GROUP_OFFSETS.name}: counters is {counters}, needs at most {MOST_COUNTERS}")
    zeros = torch.empty(counters, dtype=torch.int32, device=split_sizes.device)
    return _offsets(split_sizes, rows, counters=zeros), zeros


def padded_group_offsets(split_sizes: Tensor, rows: int, multiple: int = MULTIPLE) -> tuple[Tensor, Tensor]:
    """`fp8_reference.padded_group_offsets`: two int32 [G+1] from one launch; multiple: 1 to 128."""
    check_multiple(SM90_PADDED_GROUP_OFFSETS.name, multiple)
    padded = torch.empty(split_sizes.numel() + 1, dtype=torch.int32, device=split_sizes.device)
    return _offsets(split_sizes, rows, padded=padded, multiple=multiple), padded


def _offsets(
    split_sizes: Tensor,
    rows: int,
    padded: Tensor | None = None,
    counters: Tensor | None = None,
    multiple: int = MULTIPLE,
) -> Tensor:
    shape, device = split_sizes.shape, split_sizes.device
    options = _offsets_options(split_sizes.dtype, shape, device, counters is not None, padded is not None)
    if rows >= MOST_ROWS:
        raise ValueError(f"{SM90_GROUP_OFFSETS.name}: T is {rows}, needs less than {MOST_ROWS}")
    offsets = torch.empty(shape[0] + 1, dtype=torch.int32, device=device)
    kernel = launch.kernel(MODULE, options, ARCH)
    kernel(split_sizes, offsets, padded, counters, rows, multiple, launch.current_stream(device))
    return offsets


@functools.lru_cache(KEPT)
def _offsets_options(
    index: torch.dtype, shape: torch.Size, device: torch.device, counts: bool, padded: bool
) -> GroupOffsetsOptions:
    if len(shape) != 1 or index not in INDEX_DTYPES:
        found = f"{dtype_name(index)} {list(shape)}"
        raise ValueError(f"{SM90_GROUP_OFFSETS.name}: split_sizes is {found}, needs int32 or int64 [G]")
    if shape[0] == 0:
        SM90_GROUP_OFFSETS.require(G=0)
    multiprocessors(SM90_GROUP_OFFSETS, device)
    return GroupOffsetsOptions(dtype_name(index), counts, padded)


def dact(
    dact: Tensor,
    preact: Tensor,
    offsets: Tensor,
    probs: Tensor | None,
    activation: Activation,
    need_dprobs: bool = False,
    preact_interleave: int = 0,
    sm_margin: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """`reference.dact`: (dpreact as preact, dprobs FP32 [T] or None)."""
    rows, width = dact.shape
    probs_dtype = None if probs is None else probs.dtype
    options = _dact_options(
        dact.dtype, width, activation, probs_dtype, need_dprobs, sm_margin > 0, preact_interleave
    )  # fmt: skip
    check_offsets(SM90_DACT.name, offsets, dact)
    check_shape(SM90_DACT.name, "preact", preact, (rows, activation.halves * width), dact, (dact.dtype,))
    if probs is not None:
        check_shape(SM90_DACT.name, "probs", probs, (rows,), dact, (dact.dtype, torch.float32))
        probs = probs.contiguous()
    sms = multiprocessors(SM90_DACT, dact.device, sm_margin)
    dpreact = torch.empty(preact.shape, dtype=preact.dtype, device=preact.device)
    dprobs = torch.empty(rows, dtype=torch.float32, device=dact.device) if need_dprobs else None
    if rows:
        kernel = launch.kernel(MODULE, options, ARCH)
        stream = launch.current_stream(dact.device)
        kernel(readable(dact), readable(preact), offsets, probs, dpreact, dprobs, sms, stream)
    return dpreact, dprobs


@functools.lru_cache(maxsize=4096)
def _dact_options(
    element: torch.dtype,
    width: int,
    activation: Activation,
    probs: torch.dtype | None,
    need_dprobs: bool,
    alone: bool,
    block: int,
) -> DactOptions:
    SM90_DACT.require(dtype=dtype_name(element), I=width, activation=activation.kind)
    check_preact_interleave(SM90_DACT, block, activation, width)
    probs_name = None if probs is None else dtype_name(probs)
    return DactOptions(dtype_name(element), activation, probs_name, need_dprobs, alone, block)


def grouped_dbias(
    dy: Tensor, offsets: Tensor, scale: Tensor | None = None, glu_interleave: int = 0, sm_margin: int = 0
) -> Tensor:
    """`reference.grouped_dbias`: FP32 [G, N]. scale: [T] FP32 or dy's dtype."""
    name = SM90_GROUPED_DBIAS.name
    rows, width = dy.shape
    scale_dtype = None if scale is None else scale.dtype
    options = _sums_options(dy.dtype, width, scale_dtype, glu_interleave, sm_margin > 0)
    groups = check_offsets(name, offsets, dy)
    if scale is not None:
        check_shape(name, "scale", scale, (rows,), dy, (dy.dtype, torch.float32))
        scale = scale.contiguous()
    sms = multiprocessors(SM90_GROUPED_DBIAS, dy.device, sm_margin)
    if rows == 0:
        return torch.zeros(groups, width, dtype=torch.float32, device=dy.device)
    sums = torch.empty(groups, width, dtype=torch.float32, device=dy.device)
    partial = torch.empty(rows // CHUNK + groups, width, dtype=torch.float32, device=dy.device)
    kernel = launch.kernel(MODULE, options, ARCH)
    kernel(readable(dy), offsets, scale, partial, sums, max(glu_interleave, 1), sms, launch.current_stream(dy.device))
    return sums


@functools.lru_cache(maxsize=4096)
def _sums_options(
    element: torch.dtype, width: int, scale: torch.dtype | None, block: int, alone: bool
) -> ColumnSumsOptions:
    SM90_GROUPED_DBIAS.require(dtype=dtype_name(element), N=width)
    if block < 0 or (block and width % (2 * block)):
        name = SM90_GROUPED_DBIAS.name
        raise ValueError(f"{name}: glu_interleave is {block}, needs 0 or a divisor of I = N / 2 (N is {width})")
    return ColumnSumsOptions(dtype_name(element), None if scale is None else dtype_name(scale), block > 0, alone)


def grouped_dscale(dy: Tensor, bias: Tensor, offsets: Tensor, sm_margin: int = 0) -> Tensor:
    """`reference.grouped_dscale`: FP32 [T], zero in the tail."""
    name = SM90_GROUPED_DSCALE.name
    rows, width = dy.shape
    options = _dots_options(dy.dtype, width, sm_margin > 0)
    groups = check_offsets(name, offsets, dy)
    check_shape(name, "bias", bias, (groups, width), dy, (dy.dtype,))
    sms = multiprocessors(SM90_GROUPED_DSCALE, dy.device, sm_margin)
    dots = torch.empty(rows, dtype=torch.float32, device=dy.device)
    if rows:
        kernel = launch.kernel(MODULE, options, ARCH)
        kernel(readable(dy), readable(bias), offsets, dots, sms, launch.current_stream(dy.device))
    return dots


@functools.lru_cache(maxsize=4096)
def _dots_options(element: torch.dtype, width: int, alone: bool) -> RowDotsOptions:
    SM90_GROUPED_DSCALE.require(dtype=dtype_name(element), N=width)
    return RowDotsOptions(dtype_name(element), alone)
