"""dW_g = dŷ_gᵀ x̂_g from transposed E4M3 copies on SM90, into a new tensor or the caller's buffers. Formula:
`fp8_reference.fp8_grouped_wgrad`.

Shapes: dy_t [N, P] and x_t [K, P] e4m3 with scales [P/128, N or K filled up to a multiple of 4] fp32, as
`fp8_reference.fp8_quantize` lays them out, contiguous; padded int32 [G+1]; N and K multiples of 16.
Buffers: as in `grouped_wgrad`.
Errors: ValueError, before anything is launched, that names the argument and the limit.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cute_kernels import launch
from cute_kernels.catalog import SM90_FP8_GROUPED_WGRAD
from cute_kernels.facts import ListFacts, TensorFacts, facts, list_facts
from cute_kernels.fp8_reference import BLOCK, scales_in_row
from cute_kernels.hopper.fp8_wgrad_configs import STRIP, Fp8WgradConfig, choose, grid
from cute_kernels.hopper.grouped_wgrad import check_interleave, check_out, lowest_and_table
from cute_kernels.hopper.operands import KEPT, check_offsets, check_shape, multiprocessors
from cute_kernels.limits import dtype_name

MODULE = "cute_kernels.hopper.fp8_wgrad_kernel"
NAME, ARCH = SM90_FP8_GROUPED_WGRAD.name, SM90_FP8_GROUPED_WGRAD.arch
E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Fp8WgradOptions:
    """Static facts of one compiled kernel: as `grouped_wgrad.WgradOptions`."""

    out: str
    config: Fp8WgradConfig
    accumulate: bool = False
    interleaved: bool = False
    separate: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """What follows from the facts of all operands. grid: CTAs."""

    options: Fp8WgradOptions
    grid: int


def fp8_grouped_wgrad(
    dy_t: Tensor,
    dy_scale_t: Tensor,
    x_t: Tensor,
    x_scale_t: Tensor,
    padded: Tensor,
    glu_interleave: int = 0,
    sm_margin: int = 0,
) -> Tensor:
    """`fp8_reference.fp8_grouped_wgrad`: [G, N, K] bf16. sm_margin: SMs to leave free."""
    dw = torch.empty(padded.shape[0] - 1, dy_t.shape[0], x_t.shape[0], dtype=torch.bfloat16, device=x_t.device)
    fp8_grouped_wgrad_([dw], dy_t, dy_scale_t, x_t, x_scale_t, padded, glu_interleave, sm_margin=sm_margin)
    return dw


def fp8_grouped_wgrad_(
    out: Sequence[Tensor],
    dy_t: Tensor,
    dy_scale_t: Tensor,
    x_t: Tensor,
    x_scale_t: Tensor,
    padded: Tensor,
    glu_interleave: int = 0,
    accumulate: bool = False,
    sm_margin: int = 0,
) -> None:
    """`fp8_reference.fp8_grouped_wgrad_`: write into `out`, or add to it. sm_margin: SMs to leave free."""
    operands = dy_t, dy_scale_t, x_t, x_scale_t, padded
    plan = _plan(list_facts(out), *map(facts, operands), glu_interleave, accumulate, sm_margin)
    if dy_t.shape[1] == 0:
        if not accumulate:
            torch._foreach_zero_(list(out))
        return
    stream = launch.current_stream(x_t.device)
    target = lowest_and_table(out, x_t.device, stream) if plan.options.separate else (out[0],)
    kernel = launch.kernel(MODULE, plan.options, ARCH)
    kernel(*operands, target, max(glu_interleave, 1), STRIP, plan.grid, stream)


@functools.lru_cache(KEPT)
def _plan(
    out: ListFacts,
    dy_t: TensorFacts,
    dy_scale_t: TensorFacts,
    x_t: TensorFacts,
    x_scale_t: TensorFacts,
    padded: TensorFacts,
    glu_interleave: int,
    accumulate: bool,
    sm_margin: int,
) -> Plan:
    groups = check_offsets(NAME, padded, x_t)
    (rows, tokens), columns = dy_t.shape, x_t.shape[0]
    expected = (
        ("dy_t", dy_t, (rows, tokens), E4M3),
        ("dy_scale_t", dy_scale_t, (tokens // BLOCK, scales_in_row(rows)), torch.float32),
        ("x_t", x_t, (columns, tokens), E4M3),
        ("x_scale_t", x_scale_t, (tokens // BLOCK, scales_in_row(columns)), torch.float32),
    )
    for letter, t, shape, dtype in expected:
        check_shape(NAME, letter, t, shape, x_t, (dtype,))
        if not t.is_contiguous() or not t.aligned:
            raise ValueError(f"{NAME}: {letter} needs to be contiguous and to start at a multiple of 16 bytes")
    if tokens % BLOCK:
        raise ValueError(f"{NAME}: P is {tokens}, needs a multiple of {BLOCK}; fp8_quantize makes such copies")
    check_out(NAME, out, groups, rows, columns, x_t)
    options = _options(out.kinds[0].dtype, rows, columns, glu_interleave, accumulate, out.separate)
    sms = multiprocessors(SM90_FP8_GROUPED_WGRAD, x_t.device, sm_margin)
    return Plan(options, grid(groups, rows, columns, sms))


def _options(
    out: torch.dtype, rows: int, columns: int, block: int, accumulate: bool, separate: bool
) -> Fp8WgradOptions:
    SM90_FP8_GROUPED_WGRAD.require(N=rows, K=columns)
    check_interleave(NAME, block, rows)
    config = choose(out.itemsize, accumulate, rows, block)
    return Fp8WgradOptions(dtype_name(out), config, accumulate, block > 0, separate)
