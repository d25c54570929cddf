"""E4M3 copies of activations, gradients and weights on SM90. Formulas and layouts: `fp8_reference`.

Shapes: x [T, K] bf16 or fp16, K a multiple of 16; rows that 16-byte loads cannot address are copied first. offsets and
padded: int32 [G+1] on the device, never read here. Weights: one contiguous [G, N, K], or G contiguous [N, K] at
multiples of 16 bytes within 32 GiB of each other, or `mT` of such, N and K multiples of 16; never copied. No host sync;
the same bits run after run.
Errors: ValueError, before anything is launched, that names the argument and the limit.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cute_kernels import launch
from cute_kernels.catalog import SM90_FP8_QUANTIZE, SM90_FP8_QUANTIZE_WEIGHT
from cute_kernels.facts import VECTOR_BYTES, ListFacts, TensorFacts, facts, list_facts
from cute_kernels.fp8_reference import BLOCK, Fp8Copies, Fp8Weights, scales_in_row
from cute_kernels.hopper.configs import SMEM_BYTES
from cute_kernels.hopper.device_table import distance_table
from cute_kernels.hopper.operands import KEPT, check_offsets, check_shape, is_readable, multiprocessors, readable
from cute_kernels.hopper.product_operands import are_transposed
from cute_kernels.limits import dtype_name
from cute_kernels.quantization.groups import padded_rows

MODULE = "cute_kernels.hopper.fp8_quantize_kernel"
ARCH = SM90_FP8_QUANTIZE.arch
E4M3 = torch.float8_e4m3fn
TEAMS = 3  # the kernel's constant of that name
STRIP = 64
"""Column blocks of a strip, most matrices' width: 64 is 1 to 4 % faster than 8 on one H200, weights alike."""


@dataclass(frozen=True)
class QuantizeOptions:
    """Static facts of one compiled kernel. element: x's dtype, by name. stages: tiles of 32 KiB, loaded ahead."""

    element: str
    rowwise: bool
    columnwise: bool
    sums: bool
    power_of_two: bool
    stages: int


@dataclass(frozen=True)
class QuantizeWeightOptions:
    """Static facts of one compiled kernel. separate: the weights are G tensors."""

    element: str
    columnwise: bool
    separate: bool
    power_of_two: bool
    stages: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What follows from the facts of all operands. readable: x may be read as it lies. grid: CTAs."""

    options: QuantizeOptions
    groups: int
    blocks: int
    column_blocks: int
    grid: int
    readable: bool


def fp8_quantize(
    x: Tensor,
    offsets: Tensor,
    padded: Tensor,
    rowwise: bool = True,
    columnwise: bool = True,
    column_sums: bool = False,
    power_of_two: bool = True,
    sm_margin: int = 0,
) -> Fp8Copies:
    """`fp8_reference.fp8_quantize`; column sums come with the transposed copy only. sm_margin: SMs to leave free."""
    plan = _plan(facts(x), facts(offsets), facts(padded), rowwise, columnwise, column_sums, power_of_two, sm_margin)
    (rows, columns), device, fp32 = x.shape, x.device, torch.float32
    data = scale = data_t = scale_t = partial = sums = None
    if rowwise:
        data = torch.empty(rows, columns, dtype=E4M3, device=device)
        scale = torch.empty(plan.column_blocks, scales_in_row(rows), dtype=fp32, device=device)
    if columnwise:
        data_t = torch.empty(columns, plan.blocks * BLOCK, dtype=E4M3, device=device)
        scale_t = torch.empty(plan.blocks, scales_in_row(columns), dtype=fp32, device=device)
    if column_sums:
        partial = torch.empty(plan.blocks, columns, dtype=fp32, device=device)
        sums = (torch.empty if rows else torch.zeros)(plan.groups, columns, dtype=fp32, device=device)
    if rows:
        copies = (data, scale, data_t, scale_t, partial, sums)
        x = x if plan.readable else readable(x)
        kernel = launch.kernel(MODULE, plan.options, ARCH)
        kernel(x, offsets, padded, copies, STRIP, plan.grid, launch.current_stream(device))
    return Fp8Copies(data, scale, data_t, scale_t, sums)


@functools.lru_cache(KEPT)
def _plan(
    x: TensorFacts,
    offsets: TensorFacts,
    padded: TensorFacts,
    rowwise: bool,
    columnwise: bool,
    sums: bool,
    power_of_two: bool,
    sm_margin: int,
) -> Plan:
    name = SM90_FP8_QUANTIZE.name
    if len(x.shape) != 2:
        raise ValueError(f"{name}: x has {len(x.shape)} dimensions, needs 2: [T, K]")
    rows, columns = x.shape
    SM90_FP8_QUANTIZE.require(dtype=dtype_name(x.dtype), K=columns)
    if not (rowwise or columnwise) or (sums and not columnwise):
        found = f"rowwise={rowwise}, columnwise={columnwise}, column_sums={sums}"
        raise ValueError(f"{name}: {found}; needs one of the copies, and columnwise for column_sums")
    groups = check_offsets(name, offsets, x)
    check_shape(name, "padded", padded, (groups + 1,), x, (torch.int32,))
    options = QuantizeOptions(dtype_name(x.dtype), rowwise, columnwise, sums, power_of_two, deepest(columnwise, sums))
    blocks, column_blocks = padded_rows(rows, groups) // BLOCK, -(-columns // BLOCK)
    grid = min(multiprocessors(SM90_FP8_QUANTIZE, x.device, sm_margin), blocks * column_blocks)
    return Plan(options, groups, blocks, column_blocks, grid, is_readable(x))


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """What follows from the facts of the weights. rows, columns: as they are stored; transposed: that is [K, N]."""

    options: QuantizeWeightOptions
    groups: int
    rows: int
    columns: int
    grid: int
    transposed: bool


def fp8_quantize_weight(
    weights: Sequence[Tensor], columnwise: bool = True, power_of_two: bool = True, sm_margin: int = 0
) -> Fp8Weights:
    """`fp8_reference.fp8_quantize_weight`. Of weights stored [K, N] (`mT` of what is contiguous) the two copies change
    places: a block is square. sm_margin: SMs to leave free.
    """
    plan = _weight_plan(list_facts(weights), columnwise, power_of_two, sm_margin)
    base, table, device = weights[0], None, weights[0].device
    stream = launch.current_stream(device)
    if plan.options.separate:
        base, table = distance_table(SM90_FP8_QUANTIZE_WEIGHT.name, weights, device, stream)
    stored = _square_copy(plan.groups, plan.rows, plan.columns, device)
    turned = _square_copy(plan.groups, plan.columns, plan.rows, device) if plan.options.columnwise else (None, None)
    kernel = launch.kernel(MODULE, plan.options, ARCH)
    kernel(base.mT if plan.transposed else base, table, (*stored, *turned), STRIP, plan.grid, stream)
    if not plan.transposed:
        return Fp8Weights(*stored, *turned)
    return Fp8Weights(*turned, *(stored if columnwise else (None, None)))


def _square_copy(groups: int, rows: int, columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(data, scales) of blocks of 128x128."""
    data = torch.empty(groups, rows, columns, dtype=E4M3, device=device)
    blocks = -(-rows // BLOCK), scales_in_row(-(-columns // BLOCK))
    return data, torch.empty(groups, *blocks, dtype=torch.float32, device=device)


@functools.lru_cache(KEPT)
def _weight_plan(weights: ListFacts, columnwise: bool, power_of_two: bool, sm_margin: int) -> WeightPlan:
    name, first, separate = SM90_FP8_QUANTIZE_WEIGHT.name, weights.kinds[0], weights.separate
    if len(first.shape) != 2 + (not separate):
        raise ValueError(f"{name}: weights starts with {list(first.shape)}, needs one [G, N, K] or G tensors [N, K]")
    rows, columns = first.shape[-2:]
    SM90_FP8_QUANTIZE_WEIGHT.require(dtype=dtype_name(first.dtype), N=rows, K=columns)
    for w in weights.kinds:
        check_shape(name, "weights", w, tuple(first.shape), first, (first.dtype,))
        if not w.aligned:
            raise ValueError(f"{name}: weights need to start at a multiple of {VECTOR_BYTES} bytes")
    transposed = are_transposed(SM90_FP8_QUANTIZE_WEIGHT, weights)
    if transposed:
        rows, columns = columns, rows
    groups = weights.length if separate else first.shape[0]
    turns = columnwise or transposed
    options = QuantizeWeightOptions(dtype_name(first.dtype), turns, separate, power_of_two, deepest(turns, False))
    tiles = groups * -(-rows // BLOCK) * -(-columns // BLOCK)
    grid = min(multiprocessors(SM90_FP8_QUANTIZE_WEIGHT, first.device, sm_margin), tiles)
    return WeightPlan(options, groups, rows, columns, grid, transposed)


def deepest(columnwise: bool, sums: bool) -> int:
    """The most stages, a multiple of the teams, that fit beside the teams' tiles, maxima, sums and factors."""
    team = BLOCK * BLOCK * columnwise + 16 * BLOCK * 2 + 4 * BLOCK * 4 * sums + 2 * BLOCK * 4
    barriers = 1024
    return (SMEM_BYTES - barriers - TEAMS * team) // (BLOCK * BLOCK * 2 * TEAMS) * TEAMS
