"""MXFP8 values of activations, gradients and weights on SM90. Formulas and layouts: `mxfp8_reference`.

Shapes: x [T, K] bf16, K a multiple of 32; rows that 16-byte loads cannot address are copied first. offsets and padded:
int32 [G+1] on the device, never read here. Weights: one contiguous [G, N, K], or G contiguous [N, K] at multiples of 16
bytes (a launch each, into one result), N and K multiples of 32. No host sync; the same bits run after run.
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
from cute_kernels.catalog import SM90_MXFP8_DEQUANTIZE, SM90_MXFP8_QUANTIZE, SM90_MXFP8_QUANTIZE_WEIGHT
from cute_kernels.facts import VECTOR_BYTES, TensorFacts, facts
from cute_kernels.hopper.mxfp8_quantize_configs import RESTORE_WARPS, RESTORED_ROWS, WARPS, QuantizeOptions
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
from cute_kernels.mxfp8_reference import BLOCK, Mxfp8Copies, Mxfp8Weights, stored_shapes

MODULE = "cute_kernels.hopper.mxfp8_quantize_kernel"
ARCH = SM90_MXFP8_QUANTIZE.arch
SPAN, RESTORED_SPAN = 128, 256
"""Columns of a warp's piece, as the kernel and `quantize_pieces` have them."""


@dataclass(frozen=True)
class RestoreOptions:
    """There is one kernel."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What follows from the facts of all operands. readable: x may be read as it lies. grid: CTAs."""

    groups: int
    grid: int
    readable: bool


def mxfp8_quantize(
    x: Tensor,
    offsets: Tensor,
    padded: Tensor,
    rowwise: bool = True,
    columnwise: bool = True,
    stored: bool = False,
    sm_margin: int = 0,
) -> Mxfp8Copies:
    """`mxfp8_reference.mxfp8_quantize`."""
    plan = _plan(facts(x), facts(offsets), facts(padded), sm_margin)
    if not (rowwise or columnwise or stored):
        raise ValueError(f"{SM90_MXFP8_QUANTIZE.name}: needs one of rowwise, columnwise and stored")
    (rows, width), device = x.shape, x.device
    along, down = (x.new_empty(rows, width) if wanted else None for wanted in (rowwise, columnwise))
    data = scale = None
    if stored:
        shapes = stored_shapes(rows, plan.groups, width)
        data = torch.empty(shapes[0], dtype=torch.float8_e4m3fn, device=device)
        scale = torch.empty(shapes[1], dtype=torch.float8_e8m0fnu, device=device)
    if rows:
        kernel = launch.kernel(MODULE, QuantizeOptions(rowwise, columnwise, stored), ARCH)
        copies = (along, down, data, None if scale is None else scale.view(torch.uint8))
        x = x if plan.readable else readable(x)
        kernel(x, offsets, padded, copies, plan.grid, launch.current_stream(device))
    return Mxfp8Copies(along, down, data, scale)


@functools.lru_cache(KEPT)
def _plan(x: TensorFacts, offsets: TensorFacts, padded: TensorFacts, sm_margin: int) -> Plan:
    kernel = SM90_MXFP8_QUANTIZE
    if len(x.shape) != 2:
        raise ValueError(f"{kernel.name}: x has {len(x.shape)} dimensions, needs 2: [T, K]")
    rows, width = x.shape
    kernel.require(dtype=dtype_name(x.dtype), K=width)
    groups = check_offsets(kernel.name, offsets, x)
    check_shape(kernel.name, "padded", padded, (groups + 1,), x, (torch.int32,))
    pieces = stored_shapes(rows, groups, width)[0][0] // BLOCK * -(-width // SPAN)
    return Plan(groups, grid_of(kernel, x.device, pieces, WARPS, sm_margin), is_readable(x))


def mxfp8_dequantize(
    data: Tensor, scale: Tensor, offsets: Tensor, padded: Tensor, rows: int, sm_margin: int = 0
) -> Tensor:
    """`mxfp8_reference.mxfp8_dequantize`."""
    grid = _restore_grid(facts(data), facts(scale), facts(offsets), facts(padded), rows, sm_margin)
    out = torch.empty(rows, data.shape[1], dtype=torch.bfloat16, device=data.device)
    if rows:
        kernel = launch.kernel(MODULE, RestoreOptions(), ARCH)
        kernel(data, scale.view(torch.uint8), offsets, padded, out, grid, launch.current_stream(data.device))
    return out


@functools.lru_cache(KEPT)
def _restore_grid(
    data: TensorFacts, scale: TensorFacts, offsets: TensorFacts, padded: TensorFacts, rows: int, sm_margin: int
) -> int:
    kernel = SM90_MXFP8_DEQUANTIZE
    if len(data.shape) != 2:
        raise ValueError(f"{kernel.name}: data has {len(data.shape)} dimensions, needs 2: [P, K]")
    width = data.shape[1]
    kernel.require(K=width)
    groups = check_offsets(kernel.name, offsets, data)
    check_shape(kernel.name, "padded", padded, (groups + 1,), data, (torch.int32,))
    for name, t, shape, dtype in zip(
        ("data", "scale"),
        (data, scale),
        stored_shapes(rows, groups, width),
        (torch.float8_e4m3fn, torch.float8_e8m0fnu),
        strict=True,
    ):
        check_shape(kernel.name, name, t, shape, data, (dtype,))
        if not t.is_contiguous() or not t.aligned:
            raise ValueError(f"{kernel.name}: {name} needs to be contiguous from a multiple of {VECTOR_BYTES} bytes on")
    pieces = data.shape[0] // RESTORED_ROWS * -(-width // RESTORED_SPAN)
    return grid_of(kernel, data.device, pieces, RESTORE_WARPS, sm_margin)


def mxfp8_quantize_weight(
    weights: Sequence[Tensor], columnwise: bool = True, square: bool = False, sm_margin: int = 0
) -> Mxfp8Weights:
    """`mxfp8_reference.mxfp8_quantize_weight`."""
    options = QuantizeOptions(True, columnwise and not square, False, square)
    grid = _weight_grid(tuple(map(facts, weights)), sm_margin)
    first, stacked = weights[0], weights[0].dim() == 3
    shape = first.shape if stacked else (len(weights), *first.shape)
    rows = torch.empty(shape, dtype=first.dtype, device=first.device)
    columns = torch.empty_like(rows) if options.columnwise else None
    kernel = launch.kernel(MODULE, options, ARCH)
    stream = launch.current_stream(first.device)
    height = first.shape[:-1].numel()  # rows of all groups are one: blocks do not span two
    whole = torch.arange(0, 2 * height, height, dtype=torch.int32, device=first.device)
    for i, w in enumerate(weights):
        parts = (None if out is None else (out if stacked else out[i]).flatten(0, -2) for out in (rows, columns))
        kernel(w.detach().flatten(0, -2), whole, whole, (*parts, None, None), grid, stream)
    return Mxfp8Weights(rows, rows if square and columnwise else columns)


@functools.lru_cache(KEPT)
def _weight_grid(weights: tuple[TensorFacts, ...], sm_margin: int) -> int:
    kernel = SM90_MXFP8_QUANTIZE_WEIGHT
    rows, columns = check_plain_weights(kernel, weights)
    return grid_of(kernel, weights[0].device, rows // BLOCK * -(-columns // SPAN), WARPS, sm_margin)
