"""Products of row groups on SM90, with bias, activation or its gradient in the epilogue. Formulas: `reference`.

Shapes: x, dy [T, ·] bf16 or fp16, widths multiples of 8; offsets int32 [G+1] on the device, never read here. Rows that
16-byte loads cannot address (a transposed view, an expanded gradient) are copied first; weights never are.
Weights: one [G, N, K], or G tensors [N, K] at multiples of 16 bytes within 32 GiB of each other; contiguous, or stored
[K, N] and given as the transposed view, read where they lie.
preact_interleave: how the columns of a pre-activation and its gradient lie, 0 as [gate | up], else in blocks as
glu_interleave has a weight's rows. A product with a weight stored [K, N] leaves them as that weight's columns lie, so
it is glu_interleave there; with others it is 0.
sm_margin: SMs to leave free. counter: int32 [1] zero, if CTAs are to take tiles as they go (dynamic scheduling), and
zero again afterwards; launches that share one must not overlap. None: tiles are dealt out beforehand (static).
plans: where a caller keeps what follows from facts, for calls that are alike.
Errors: ValueError, before anything is launched, that names the argument and the limit.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cute_kernels import launch
from cute_kernels.activation import Activation
from cute_kernels.catalog import (
    SM90_GROUPED_GEMM,
    SM90_GROUPED_GEMM_ACT,
    SM90_GROUPED_GEMM_DACT,
    SM90_GROUPED_GEMM_DGRAD,
    Kernel,
)
from cute_kernels.facts import NO_PLANS, ListFacts, Plans, TensorFacts, facts, facts_or_none, list_facts
from cute_kernels.hopper.configs import DACT_MXFP8, DACT_MXFP8_SUMS, Options, Spread, choose, grid_size, row_class
from cute_kernels.hopper.device_table import distance_table
from cute_kernels.hopper.operands import KEPT, check_counter, check_shape, is_readable, multiprocessors, readable
from cute_kernels.hopper.product_operands import (
    are_transposed,
    check_bias,
    check_factor,
    check_interleave,
    check_order,
    check_preact_interleave,
    check_product,
    check_result,
    contiguous,
    factor_name,
    weight_sizes,
    whole,
)
from cute_kernels.limits import dtype_name

MODULE = "cute_kernels.hopper.grouped_gemm_kernel"
ARCH = SM90_GROUPED_GEMM.arch


@dataclass(frozen=True, slots=True)
class Plan:
    """What follows from the facts of all operands of one product.

    rows: of x. n, k: rows and columns of one group's weight. width: columns of the activation (of the pre-activation's
    gradient). tiles: column tiles of the product. grid: CTAs. readable: rows may be read as they lie.
    """

    kernel: Kernel
    options: Options
    rows: int
    n: int
    k: int
    width: int
    tiles: int
    grid: int
    readable: bool
    transposed: bool


def grouped_gemm(
    x: Tensor,
    weights: Sequence[Tensor],
    offsets: Tensor,
    bias: Tensor | None = None,
    bias_scale: Tensor | None = None,
    sm_margin: int = 0,
    counter: Tensor | None = None,
    plans: Plans = NO_PLANS,
    out: Tensor | None = None,
) -> Tensor:
    """`reference.grouped_gemm`: y [T, N]. out: as `grouped_gemm_`, and returned."""
    scale = None if bias is None else bias_scale
    plan = plans.get(_gemm_plan) or plans.keep(_gemm_plan, _gemm_plan(
        facts_or_none(out), facts(x), list_facts(weights), facts(offsets), facts_or_none(bias), facts_or_none(scale),
        sm_margin, facts_or_none(counter),
    ))  # fmt: skip
    y = x.new_empty(plan.rows, plan.n) if out is None else out
    launched(plan, x, weights, offsets, counter, (y, whole(bias), contiguous(scale)))
    return y


def grouped_gemm_(out: Tensor, x: Tensor, *others: Any, **how: Any) -> None:
    """`reference.grouped_gemm_`: into out [T, N], contiguous from a multiple of 16 bytes on; its tail is left alone."""
    grouped_gemm(x, *others, **how, out=out)  # type: ignore[misc]


@functools.lru_cache(KEPT)
def _gemm_plan(
    out: TensorFacts | None,
    x: TensorFacts,
    weights: ListFacts,
    offsets: TensorFacts,
    bias: TensorFacts | None,
    scale: TensorFacts | None,
    sm_margin: int,
    counter: TensorFacts | None,
) -> Plan:
    kernel = SM90_GROUPED_GEMM
    n, k = weight_sizes(kernel, weights)
    groups = check_product(kernel, "x", x, k, weights, offsets)
    check_bias(kernel, bias, groups, n, x)
    check_factor(kernel, "bias_scale", scale, x)
    check_result(kernel, "out", out, n, x)
    transposed = are_transposed(kernel, weights)
    options = options_of(
        kernel, "store", x.dtype, n, spread_of(kernel, x, groups), K=k, N=n, contracts_rows=transposed,
        separate=weights.separate, has_bias=bias is not None, factor=factor_name(scale), zero_tail=out is None,
        dynamic=check_counter(kernel.name, counter, x),
    )  # fmt: skip
    return plan_of(kernel, options, (x,), groups, n, k, n, sm_margin, transposed)


def grouped_gemm_dgrad(
    dy: Tensor,
    weights: Sequence[Tensor],
    offsets: Tensor,
    glu_interleave: int = 0,
    sm_margin: int = 0,
    counter: Tensor | None = None,
    plans: Plans = NO_PLANS,
) -> Tensor:
    """`reference.grouped_gemm_dgrad`: dx [T, K]."""
    plan = plans.get(_dgrad_plan) or plans.keep(_dgrad_plan, _dgrad_plan(
        facts(dy), list_facts(weights), facts(offsets), glu_interleave, sm_margin, facts_or_none(counter)
    ))  # fmt: skip
    dx = dy.new_empty(plan.rows, plan.k)
    launched(plan, dy, weights, offsets, counter, (dx, None, None))
    return dx


@functools.lru_cache(KEPT)
def _dgrad_plan(
    dy: TensorFacts,
    weights: ListFacts,
    offsets: TensorFacts,
    glu_interleave: int,
    sm_margin: int,
    counter: TensorFacts | None,
) -> Plan:
    kernel = SM90_GROUPED_GEMM_DGRAD
    n, k = weight_sizes(kernel, weights)
    groups = check_product(kernel, "dy", dy, n, weights, offsets)
    transposed = are_transposed(kernel, weights)
    check_interleave(kernel, glu_interleave, n, transposed)
    options = options_of(
        kernel, "store", dy.dtype, k, spread_of(kernel, dy, groups), K=k, N=n,
        contracts_rows=not transposed, separate=weights.separate, glu_interleave=glu_interleave,
        dynamic=check_counter(kernel.name, counter, dy),
    )  # fmt: skip
    return plan_of(kernel, options, (dy,), groups, n, k, k, sm_margin, transposed)


def grouped_gemm_act(
    x: Tensor,
    weights: Sequence[Tensor],
    offsets: Tensor,
    activation: Activation,
    bias: Tensor | None = None,
    probs: Tensor | None = None,
    glu_interleave: int = 0,
    save_preact: bool = True,
    zero_tail: bool = True,
    zero_tail_of: Tensor | None = None,
    preact_interleave: int = 0,
    sm_margin: int = 0,
    counter: Tensor | None = None,
    plans: Plans = NO_PLANS,
) -> tuple[Tensor, Tensor | None]:
    """`reference.grouped_gemm_act`: (act [T, I], preact [T, N] or None).

    zero_tail=False leaves the tail rows of both undefined. zero_tail_of: contiguous from a multiple of 16 bytes on.
    """
    plan = plans.get(_act_plan) or plans.keep(_act_plan, _act_plan(
        facts(x), list_facts(weights), facts(offsets), activation, facts_or_none(bias), facts_or_none(probs),
        glu_interleave, save_preact, zero_tail, facts_or_none(zero_tail_of), preact_interleave, sm_margin,
        facts_or_none(counter),
    ))  # fmt: skip
    act = x.new_empty(plan.rows, plan.width)
    preact = x.new_empty(plan.rows, plan.n) if save_preact else None
    launched(plan, x, weights, offsets, counter, (act, preact, whole(bias), contiguous(probs), zero_tail_of))
    return act, preact


@functools.lru_cache(KEPT)
def _act_plan(
    x: TensorFacts,
    weights: ListFacts,
    offsets: TensorFacts,
    activation: Activation,
    bias: TensorFacts | None,
    probs: TensorFacts | None,
    glu_interleave: int,
    save_preact: bool,
    zero_tail: bool,
    later: TensorFacts | None,
    preact_interleave: int,
    sm_margin: int,
    counter: TensorFacts | None,
) -> Plan:
    kernel = SM90_GROUPED_GEMM_ACT
    n, k = weight_sizes(kernel, weights)
    groups = check_product(kernel, "x", x, k, weights, offsets)
    check_bias(kernel, bias, groups, n, x)
    check_factor(kernel, "probs", probs, x)
    check_result(kernel, "zero_tail_of", later, None, x)
    if n % activation.halves:
        raise ValueError(f"{kernel.name}: N is {n}, needs gate and up halves of the same size for {activation.kind}")
    transposed = are_transposed(kernel, weights)
    check_order(kernel, preact_interleave, glu_interleave if activation.is_glu else 0, transposed)
    options = options_of(
        kernel, "act", x.dtype, n, spread_of(kernel, x, groups), K=k, N=n, I=n // activation.halves,
        activation=activation, glu_interleave=glu_interleave, preact_interleave=preact_interleave,
        separate=weights.separate, has_bias=bias is not None,
        factor=factor_name(probs), keeps=save_preact, zero_tail=zero_tail, contracts_rows=transposed,
        dynamic=check_counter(kernel.name, counter, x), zeroes_later=later is not None,
    )  # fmt: skip
    return plan_of(kernel, options, (x,), groups, n, k, n, sm_margin, transposed)


def grouped_gemm_dact(
    dy: Tensor,
    weights: Sequence[Tensor],
    offsets: Tensor,
    preact: Tensor,
    activation: Activation,
    probs: Tensor | None = None,
    need_act: bool = True,
    need_dprobs: bool = False,
    zero_tail: bool = True,
    preact_interleave: int = 0,
    sm_margin: int = 0,
    counter: Tensor | None = None,
    plans: Plans = NO_PLANS,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """`reference.grouped_gemm_dact`: (dpreact, act or None, dprobs FP32 [T] or None).

    zero_tail=False leaves the tail rows of dpreact and act undefined; those of dprobs are always zero.
    """
    plan = plans.get(_dact_plan) or plans.keep(_dact_plan, _dact_plan(
        facts(dy), list_facts(weights), facts(offsets), facts(preact), activation, facts_or_none(probs),
        need_act, need_dprobs, zero_tail, preact_interleave, sm_margin, facts_or_none(counter),
    ))  # fmt: skip
    dpreact = dy.new_empty(plan.rows, plan.width)
    act = dy.new_empty(plan.rows, plan.k) if need_act else None
    partial = dy.new_empty(plan.rows, plan.tiles, dtype=torch.float32) if need_dprobs else None
    preact = preact if plan.readable else readable(preact)
    launched(plan, dy, weights, offsets, counter, (dpreact, act, partial, preact, contiguous(probs)))
    return dpreact, act, None if partial is None else sum_of_rows(partial)


@functools.lru_cache(KEPT)
def _dact_plan(
    dy: TensorFacts,
    weights: ListFacts,
    offsets: TensorFacts,
    preact: TensorFacts,
    activation: Activation,
    probs: TensorFacts | None,
    need_act: bool,
    need_dprobs: bool,
    zero_tail: bool,
    preact_interleave: int,
    sm_margin: int,
    counter: TensorFacts | None,
) -> Plan:
    kernel = SM90_GROUPED_GEMM_DACT
    h, width = weight_sizes(kernel, weights)
    groups = check_product(kernel, "dy", dy, h, weights, offsets)
    check_shape(kernel.name, "preact", preact, (dy.shape[0], activation.halves * width), dy, (dy.dtype,))
    check_factor(kernel, "probs", probs, dy)
    check_preact_interleave(kernel, preact_interleave, activation, width)
    transposed = are_transposed(kernel, weights)
    options = options_of(
        kernel, "dact", dy.dtype, width, spread_of(kernel, dy, groups), H=h, I=width,
        activation=activation, contracts_rows=not transposed, separate=weights.separate, factor=factor_name(probs),
        preact_interleave=preact_interleave, keeps=need_act, has_dprobs=need_dprobs, zero_tail=zero_tail,
        dynamic=check_counter(kernel.name, counter, dy),
    )  # fmt: skip
    return plan_of(kernel, options, (dy, preact), groups, h, width, width, sm_margin, transposed)


def sum_of_rows(partial: Tensor) -> Tensor:
    """The sum of each row of [T, tiles]; of one tile it is that tile's, without a launch."""
    return partial.sum(1) if partial.shape[1] > 1 else partial.view(-1)


def plan_of(
    kernel: Kernel,
    options: Options,
    by_row: tuple[TensorFacts, ...],
    groups: int,
    n: int,
    k: int,
    columns: int,
    sm_margin: int,
    transposed: bool,
) -> Plan:
    """by_row: operands that the kernel reads by rows, x first. columns: of the product."""
    rows, tiles = by_row[0].shape[0], options.config.column_tiles(columns)
    sms = multiprocessors(kernel, by_row[0].device, sm_margin)
    grid = grid_size(rows, groups, tiles, sms, options.config.tile_m)
    halves = 1 if options.activation is None else options.activation.halves
    width = k * halves if options.kind == "dact" else n // halves
    return Plan(kernel, options, rows, n, k, width, tiles, grid, all(map(is_readable, by_row)), transposed)


def launched(
    plan: Plan,
    x: Tensor,
    weights: Sequence[Tensor],
    offsets: Tensor,
    counter: Tensor | None,
    epilogue: tuple[Tensor | None, ...],
    amaxes: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Launch on the current stream of x's device; nothing where there are no rows. amaxes: of NVFP4 operands."""
    if plan.rows == 0:
        return
    stream = launch.current_stream(x.device)
    base, table = weights[0], None
    if plan.options.separate:
        base, table = distance_table(plan.kernel.name, weights, x.device, stream)
    base = base.mT if plan.transposed else base
    x = x if plan.readable else readable(x)
    launch.kernel(MODULE, plan.options, ARCH)(x, base, table, offsets, counter, epilogue, amaxes, plan.grid, stream)


@functools.lru_cache(maxsize=4096)
def options_of(
    kernel: Kernel,
    kind: str,
    dtype: torch.dtype,
    columns: int,
    spread: Spread,
    *,
    activation: Activation | None = None,
    glu_interleave: int = 0,
    K: int = 0,
    N: int = 0,
    I: int = 0,  # noqa: E741
    H: int = 0,
    **facts: Any,
) -> Options:
    """Checks what does not depend on the call's memory, once for each shape, and gathers it."""
    gated = activation is not None and activation.is_glu
    interleave = glu_interleave if activation is None or gated else 0
    kernel.require(
        dtype=dtype_name(dtype), K=K, N=N, I=I, H=H, glu_interleave=interleave,
        activation=activation and activation.kind, transposed_weight=kind == "act" and facts["contracts_rows"],
    )  # fmt: skip
    tiles_for = kind
    if kind == "dact" and facts.get("mxfp8"):
        tiles_for = DACT_MXFP8_SUMS if facts["has_dbias"] else DACT_MXFP8
    config = choose(tiles_for, columns, spread, gated, facts.get("has_dprobs", False)).config
    by_rows = 0 if facts.get("preact_interleave") else interleave
    return Options(kind, dtype_name(dtype), config, activation=activation, glu_interleave=by_rows, **facts)


def spread_of(kernel: Kernel, x: TensorFacts, groups: int) -> Spread:
    """What is known of the work before the device knows the splits; all SMs, so that a margin changes no bits."""
    return Spread(row_class(x.shape[0]), groups, multiprocessors(kernel, x.device, 0))
