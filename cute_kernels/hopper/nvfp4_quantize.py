"""NVFP4 values of activations, gradients and weights on SM90, and their largest magnitudes. See `nvfp4_reference`.

Shapes: x [T, K] bf16, K a multiple of 16; rows that 16-byte loads cannot address are copied first. offsets and padded:
int32 [G+1] on the device, never read here. Weights: one contiguous [G, N, K], or G contiguous [N, K] at multiples of 16
bytes (launches of their own each, into one result), N and K multiples of 16. No host sync; the same bits run after run.
sm_margin: SMs to leave free.
Errors: ValueError, before anything is launched, that names the argument and the limit.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cute_kernels import launch
from cute_kernels.catalog import (
    SM90_NVFP4_AMAX,
    SM90_NVFP4_DEQUANTIZE,
    SM90_NVFP4_QUANTIZE,
    SM90_NVFP4_QUANTIZE_WEIGHT,
    Kernel,
)
from cute_kernels.facts import VECTOR_BYTES, TensorFacts, facts, facts_or_none
from cute_kernels.hopper.nvfp4_quantize_configs import AMAX_WARPS, RESTORE_WARPS, QuantizeOptions, warps_of
from cute_kernels.hopper.operands import (
    KEPT,
    check_offsets,
    check_plain_weights,
    check_shape,
    grid_of,
    is_readable,
    readable,
)
from cute_kernels.limits import dtype_name
from cute_kernels.nvfp4_reference import BLOCK, Nvfp4Copies, Nvfp4Weights, stored_shapes

MODULE = "cute_kernels.hopper.nvfp4_quantize_kernel"
ARCH = SM90_NVFP4_QUANTIZE.arch
COLUMNS = 4  # of a thread, as `quantize_pieces` has them
RESTORED_COLUMNS = 8
ROWS_WARPS = warps_of(QuantizeOptions(True, True, True))  # of every kind but square blocks


@dataclass(frozen=True)
class AmaxOptions:
    """rotates: also the largest magnitudes of the transpose once that is rotated."""

    rotates: bool


@dataclass(frozen=True)
class RestoreOptions:
    """There is one kernel."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What follows from the facts of all operands. readable: x may be read as it lies. grid: CTAs. lines: padded rows
    of the whole matrix."""

    groups: int
    grid: int
    readable: bool
    lines: int


def nvfp4_amax(
    x: Tensor, offsets: Tensor, padded: Tensor, rotated: bool, sm_margin: int = 0
) -> tuple[Tensor, Tensor | None]:
    """`nvfp4_reference.nvfp4_amax`."""
    plan = _plan(SM90_NVFP4_AMAX, facts(x), facts(offsets), facts(padded), None, None, None, AMAX_WARPS, sm_margin)
    amax, turned = no_maxima(plan.groups, rotated, x.device)
    if x.shape[0]:
        x = x if plan.readable else readable(x)
        kernel = launch.kernel(MODULE, AmaxOptions(rotated), ARCH)
        kernel(x, offsets, padded, amax, turned, plan.grid, launch.current_stream(x.device))
    return amax, turned


def no_maxima(groups: int, rotated: bool, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Where kernels leave largest magnitudes, none so far."""
    amaxes = torch.zeros(1 + rotated, groups, dtype=torch.float32, device=device).unbind(0)
    return amaxes[0], amaxes[1] if rotated else None


def nvfp4_quantize(
    x: Tensor,
    offsets: Tensor,
    padded: Tensor,
    amax: Tensor | None,
    column_amax: Tensor | None,
    state: Tensor | None = None,
    rowwise: bool = True,
    columnwise: bool = True,
    stored: bool = False,
    rotated: bool = False,
    sm_margin: int = 0,
) -> Nvfp4Copies:
    """`nvfp4_reference.nvfp4_quantize`."""
    given = (facts_or_none(t) for t in (amax, column_amax, state))
    plan = _plan(SM90_NVFP4_QUANTIZE, facts(x), facts(offsets), facts(padded), *given, ROWS_WARPS, sm_margin)
    down = columnwise or stored
    if not (rowwise or down):
        raise ValueError(f"{SM90_NVFP4_QUANTIZE.name}: needs one of rowwise, columnwise and stored")
    for name, t, wanted in (("amax", amax, rowwise), ("column_amax", column_amax, down)):
        if wanted and t is None:
            raise ValueError(f"{SM90_NVFP4_QUANTIZE.name}: {name} is None, needs the largest magnitudes of the groups")
    (rows, width), device = x.shape, x.device
    along = x.new_empty(rows, width) if rowwise else None
    columns = x.new_empty(plan.lines, width) if columnwise else None
    data = scale = None
    if stored:
        shapes = stored_shapes(rows, plan.groups, width)
        data = torch.empty(shapes[0], dtype=torch.uint8, device=device)
        scale = torch.empty(shapes[1], dtype=torch.float8_e4m3fn, device=device)
    if rows:
        x = x if plan.readable else readable(x)
        stream, how = launch.current_stream(device), (rotated and down, state is not None)
        copy = data, None if scale is None else scale.view(torch.uint8)
        runs = [(rowwise, columnwise, stored)]
        if columnwise and stored:  # both in one would spill, and nobody wants both
            runs = [(rowwise, True, False), (False, False, True)]
        for by_row, by_column, kept in runs:
            copies = (along if by_row else None, columns if by_column else None, *(copy if kept else (None, None)))
            largest = amax if by_row else None, column_amax if by_column or kept else None
            kernel = launch.kernel(MODULE, QuantizeOptions(by_row, by_column, kept, *how), ARCH)
            kernel(x, offsets, padded, *largest, state, copies, plan.lines, plan.grid, stream)
    return Nvfp4Copies(along, columns, data, scale)


@functools.lru_cache(KEPT)
def _plan(
    kernel: Kernel,
    x: TensorFacts,
    offsets: TensorFacts,
    padded: TensorFacts,
    amax: TensorFacts | None,
    column_amax: TensorFacts | None,
    state: TensorFacts | None,
    warps: int,
    sm_margin: int,
) -> Plan:
    if len(x.shape) != 2:
        raise ValueError(f"{kernel.name}: x has {len(x.shape)} dimensions, needs 2: [T, K]")
    rows, width = x.shape
    kernel.require(dtype=dtype_name(x.dtype), K=width)
    groups = check_offsets(kernel.name, offsets, x)
    check_shape(kernel.name, "padded", padded, (groups + 1,), x, (torch.int32,))
    for name, t in (("amax", amax), ("column_amax", column_amax)):
        if t is not None:
            check_shape(kernel.name, name, t, (groups,), x, (torch.float32,))
            if not t.is_contiguous():
                raise ValueError(f"{kernel.name}: {name} needs to be contiguous")
    if state is not None:
        check_shape(kernel.name, "state", state, (2,), x, (torch.int64,))
    lines = stored_shapes(rows, groups, width)[0][0]
    return Plan(groups, _grid(kernel, x, lines, width, COLUMNS, warps, sm_margin), is_readable(x), lines)


def _grid(kernel: Kernel, x: TensorFacts, lines: int, width: int, columns: int, warps: int, sm_margin: int) -> int:
    """CTAs of so many warps for that many rows, whose threads take so many columns: at least a piece for each warp."""
    pieces = lines // BLOCK * -(-width // (32 * columns))
    return grid_of(kernel, x.device, pieces, warps, sm_margin)


def nvfp4_dequantize(data: Tensor, scale: Tensor, padded: Tensor, sm_margin: int = 0) -> Tensor:
    """`nvfp4_reference.nvfp4_dequantize`."""
    grid = _restore_grid(facts(data), facts(scale), facts(padded), sm_margin)
    out = torch.empty(data.shape[0], scale.shape[1], dtype=torch.bfloat16, device=data.device)
    if data.shape[0]:
        kernel = launch.kernel(MODULE, RestoreOptions(), ARCH)
        kernel(data, scale.view(torch.uint8), padded, out, grid, launch.current_stream(data.device))
    return out


@functools.lru_cache(KEPT)
def _restore_grid(data: TensorFacts, scale: TensorFacts, padded: TensorFacts, sm_margin: int) -> int:
    kernel = SM90_NVFP4_DEQUANTIZE
    if len(data.shape) != 2:
        raise ValueError(f"{kernel.name}: data has {len(data.shape)} dimensions, needs 2: [P, K/2]")
    lines, width = data.shape[0], 2 * data.shape[1]
    kernel.require(K=width)
    check_offsets(kernel.name, padded, data)
    check_shape(kernel.name, "data", data, (lines, width // 2), data, (torch.uint8,))
    check_shape(kernel.name, "scale", scale, (lines // BLOCK, width), data, (torch.float8_e4m3fn,))
    for name, t in (("data", data), ("scale", scale)):
        if not t.is_contiguous() or not t.aligned:
            raise ValueError(f"{kernel.name}: {name} needs to be contiguous from a multiple of {VECTOR_BYTES} bytes on")
    return _grid(kernel, data, lines, width, RESTORED_COLUMNS, RESTORE_WARPS, sm_margin)


def nvfp4_quantize_weight(
    weights: Sequence[Tensor], columnwise: bool = True, square: bool = False, sm_margin: int = 0
) -> Nvfp4Weights:
    """`nvfp4_reference.nvfp4_quantize_weight`."""
    options = QuantizeOptions(True, columnwise and not square, False, square=square)
    each = tuple(map(facts, weights))
    amax_grid, grid = (_weight_grid(each, warps, sm_margin) for warps in (AMAX_WARPS, warps_of(options)))
    first, stacked = weights[0], weights[0].dim() == 3
    shape = first.shape if stacked else (len(weights), *first.shape)
    device, (groups, height, _) = first.device, shape
    rows = torch.empty(shape, dtype=first.dtype, device=device)
    columns = torch.empty_like(rows) if options.columnwise else None
    amax = torch.zeros(groups, dtype=torch.float32, device=device)
    largest = launch.kernel(MODULE, AmaxOptions(False), ARCH)
    kernel = launch.kernel(MODULE, options, ARCH)
    stream, lines = launch.current_stream(device), height * (groups if stacked else 1)
    ends = torch.arange(0, lines + height, height, dtype=torch.int32, device=device)
    for i, w in enumerate(weights):
        flat, mine = w.detach().flatten(0, -2), amax if stacked else amax[i : i + 1]
        parts = (None if out is None else (out if stacked else out[i]).flatten(0, -2) for out in (rows, columns))
        largest(flat, ends, ends, mine, None, amax_grid, stream)
        down = None if columns is None else mine
        kernel(flat, ends, ends, mine, down, None, (*parts, None, None), lines, grid, stream)
    return Nvfp4Weights(rows, rows if square and columnwise else columns, amax)


@functools.lru_cache(KEPT)
def _weight_grid(weights: tuple[TensorFacts, ...], warps: int, sm_margin: int) -> int:
    kernel = SM90_NVFP4_QUANTIZE_WEIGHT
    rows, columns = check_plain_weights(kernel, weights)
    return _grid(kernel, weights[0], rows, columns, COLUMNS, warps, sm_margin)
