"""dW_g = dy_gᵀ x_g on SM90, into a new tensor or the caller's buffers. Formula: `reference.grouped_wgrad`.

Shapes: dy [T, N], x [T, K] bf16 or fp16, N and K multiples of 8; offsets int32 [G+1]. Rows that 16-byte loads cannot
address (a transposed view, an expanded gradient) are copied first.
Buffers: one contiguous [G, N, K], or G contiguous [N, K] at multiples of 16 bytes, all bf16, fp16 or fp32.
sm_margin, counter, plans: as `grouped_gemm`.
Errors: ValueError, before anything is launched, that names the argument and the limit.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cute_kernels import launch
from cute_kernels.catalog import SM90_GROUPED_WGRAD
from cute_kernels.facts import NO_PLANS, VECTOR_BYTES, ListFacts, Plans, TensorFacts, facts, facts_or_none, list_facts
from cute_kernels.hashing import hashed_once
from cute_kernels.hopper.device_table import addresses, device_table
from cute_kernels.hopper.grouped_wgrad_configs import TILE_TOKENS, WgradConfig, choose
from cute_kernels.hopper.operands import (
    KEPT,
    check_counter,
    check_offsets,
    check_shape,
    is_readable,
    multiprocessors,
    readable,
)
from cute_kernels.limits import dtype_name

MODULE, MODULE_ADD = "cute_kernels.hopper.grouped_wgrad_kernel", "cute_kernels.hopper.grouped_wgrad_add_kernel"
NAME, ARCH = SM90_GROUPED_WGRAD.name, SM90_GROUPED_WGRAD.arch
OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@hashed_once
@dataclass(frozen=True)
class WgradOptions:
    """Static facts of one compiled kernel; dtypes by name.

    interleaved: rows of the gradient go to blocks of gate and up rows. separate: the output is G tensors.
    dynamic: tiles are taken through a counter (see `tickets`). two_level: as `configs.Options.two_level`.
    """

    element: str
    out: str
    config: WgradConfig
    accumulate: bool = False
    interleaved: bool = False
    separate: bool = False
    dynamic: bool = False
    two_level: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """What follows from the facts of all operands.

    rows: of dy and x; they may be read as they lie if readable. grid: CTAs.
    """

    options: WgradOptions
    rows: int
    strip: int
    grid: int
    readable: bool


def grouped_wgrad(
    dy: Tensor,
    x: Tensor,
    offsets: Tensor,
    glu_interleave: int = 0,
    sm_margin: int = 0,
    counter: Tensor | None = None,
    plans: Plans = NO_PLANS,
) -> Tensor:
    """`reference.grouped_wgrad`: [G, N, K] in x's dtype."""
    dw = x.new_empty(offsets.shape[0] - 1, dy.shape[1], x.shape[1])
    grouped_wgrad_([dw], dy, x, offsets, glu_interleave, False, sm_margin, counter, plans)
    return dw


def grouped_wgrad_(
    out: Sequence[Tensor],
    dy: Tensor,
    x: Tensor,
    offsets: Tensor,
    glu_interleave: int = 0,
    accumulate: bool = False,
    sm_margin: int = 0,
    counter: Tensor | None = None,
    plans: Plans = NO_PLANS,
) -> None:
    """`reference.grouped_wgrad_`: write into `out`, or add to it."""
    plan = plans.get(plan_of) or plans.keep(plan_of, plan_of(
        list_facts(out), facts(dy), facts(x), facts(offsets),
        glu_interleave, accumulate, sm_margin, facts_or_none(counter),
    ))  # fmt: skip
    launched(plan, out, dy, x, offsets, glu_interleave, accumulate, counter)


def launched(
    plan: Plan,
    out: Sequence[Tensor],
    dy: Tensor,
    x: Tensor,
    offsets: Tensor,
    glu_interleave: int,
    accumulate: bool,
    counter: Tensor | None,
    amaxes: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Launch on the current stream of x's device. amaxes: of NVFP4 operands."""
    if plan.rows == 0:
        if not accumulate:
            torch._foreach_zero_(list(out))
        return
    stream = launch.current_stream(x.device)
    target = lowest_and_table(out, x.device, stream) if plan.options.separate else (out[0],)
    if not plan.readable:
        dy, x = readable(dy), readable(x)
    kernel = launch.kernel(MODULE_ADD if accumulate else MODULE, plan.options, ARCH)
    kernel(dy, x, offsets, target, counter, amaxes, max(glu_interleave, 1), plan.strip, plan.grid, stream)


@functools.lru_cache(KEPT)
def plan_of(
    out: ListFacts,
    dy: TensorFacts,
    x: TensorFacts,
    offsets: TensorFacts,
    glu_interleave: int,
    accumulate: bool,
    sm_margin: int,
    counter: TensorFacts | None,
    two_level: bool = False,
) -> Plan:
    """What follows from all that, or ValueError."""
    groups = check_offsets(NAME, offsets, x)
    check_shape(NAME, "x", x, (dy.shape[0], x.shape[-1]), dy, (dy.dtype,))
    rows, columns = dy.shape[1], x.shape[1]
    check_out(NAME, out, groups, rows, columns, x)
    dynamic = check_counter(NAME, counter, x)
    few = dy.shape[0] <= TILE_TOKENS * groups
    options = _options(
        x.dtype,
        out.kinds[0].dtype,
        rows,
        columns,
        glu_interleave,
        accumulate,
        out.separate,
        dynamic,
        few,
        two_level,
    )
    sms = multiprocessors(SM90_GROUPED_WGRAD, x.device, sm_margin, options.config.cluster)
    grid = options.config.grid(groups, rows, columns, sms)
    return Plan(options, dy.shape[0], options.config.strip(), grid, is_readable(dy) and is_readable(x))


def lowest_and_table(out: Sequence[Tensor], device: torch.device, stream: int) -> tuple[Tensor, Tensor]:
    """Of separate buffers the one at the lowest address, and all addresses on the device."""
    table = addresses(out)
    return out[table.index(min(table))], device_table(table, device, stream, ARCH)


@functools.lru_cache(maxsize=4096)
def _options(
    element: torch.dtype,
    out: torch.dtype,
    rows: int,
    columns: int,
    block: int,
    accumulate: bool,
    separate: bool,
    dynamic: bool,
    few: bool,
    two_level: bool,
) -> WgradOptions:
    """Checks what does not depend on the call's memory, once for each shape."""
    SM90_GROUPED_WGRAD.require(dtype=dtype_name(element), K=columns, N=rows)
    check_interleave(NAME, block, rows)
    config = choose(rows, out.itemsize, accumulate, block, few).config
    dtypes = dtype_name(element), dtype_name(out)
    return WgradOptions(*dtypes, config, accumulate, block > 0, separate, dynamic, two_level)


def check_interleave(name: str, block: int, rows: int) -> None:
    """Raises ValueError unless blocks of gate and up rows tile a gradient of so many rows."""
    if block < 0 or (block and rows % (2 * block)):
        raise ValueError(f"{name}: glu_interleave is {block}, needs 0 or a divisor of I = N / 2 (N is {rows})")


def check_out(name: str, out: ListFacts, groups: int, rows: int, columns: int, x: TensorFacts) -> None:
    """Raises ValueError unless `out` is one stacked tensor or `groups` separate ones, as the kernel writes them."""
    if out.separate and out.length != groups:
        raise ValueError(f"{name}: out has {out.length} tensors, needs one [G, N, K] or {groups} [N, K]")
    dtype = out.kinds[0].dtype
    if dtype not in OUT_DTYPES:
        raise ValueError(f"{name}: out is {dtype_name(dtype)}, needs bfloat16, float16 or float32")
    for t in out.kinds:
        check_shape(name, "out", t, (rows, columns) if out.separate else (groups, rows, columns), x, (dtype,))
        if not t.aligned or not t.is_contiguous():
            raise ValueError(f"{name}: out needs to be contiguous and to start at a multiple of {VECTOR_BYTES} bytes")
