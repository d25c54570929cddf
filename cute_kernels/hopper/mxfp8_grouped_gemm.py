"""Products of operands that hold MXFP8 values, on SM90, whose results go through MXFP8. Formulas: `mxfp8_reference`.

Shapes, layouts, sharing and errors: as `grouped_gemm`, whose main loop and plans these are; bf16, weights [N, K].
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cute_kernels import launch
from cute_kernels.activation import Activation
from cute_kernels.catalog import SM90_MXFP8_GROUPED_GEMM_ACT, SM90_MXFP8_GROUPED_GEMM_DACT
from cute_kernels.facts import VECTOR_BYTES, ListFacts, TensorFacts, facts, facts_or_none, list_facts
from cute_kernels.hopper.grouped_gemm import Plan, launched, options_of, plan_of, spread_of, sum_of_rows
from cute_kernels.hopper.operands import KEPT, check_counter, check_shape, multiprocessors, readable
from cute_kernels.hopper.product_operands import (
    are_transposed,
    check_bias,
    check_factor,
    check_product,
    contiguous,
    factor_name,
    weight_sizes,
    whole,
)
from cute_kernels.mxfp8_reference import kept_shapes
from cute_kernels.quantization.quantize import Quantized, parts_of

MODULE = "cute_kernels.hopper.mxfp8_grouped_gemm_kernel"
ARCH = SM90_MXFP8_GROUPED_GEMM_DACT.arch
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
SLOT = 64
"""Rows that a product adds up: of a block of sums."""


@dataclass(frozen=True)
class SlotSumsOptions:
    """Sums of what products left for 64 rows each. interleaved, alone: as `rowwise.ColumnSumsOptions`'s."""

    interleaved: bool
    alone: bool = False


def mxfp8_grouped_gemm_act(
    x: Tensor,
    weights: Sequence[Tensor],
    offsets: Tensor,
    activation: Activation,
    bias: Tensor | None = None,
    probs: Tensor | None = None,
    glu_interleave: int = 0,
    save_preact: bool = True,
    quantize_preact: bool = False,
    sm_margin: int = 0,
    counter: Tensor | None = None,
) -> tuple[Tensor, Tensor | Quantized | None]:
    """`mxfp8_reference.mxfp8_grouped_gemm_act`; the tail of both results is undefined."""
    plan = _act_plan(
        facts(x), list_facts(weights), facts(offsets), activation, facts_or_none(bias), facts_or_none(probs),
        glu_interleave, save_preact, quantize_preact, sm_margin, facts_or_none(counter),
    )  # fmt: skip
    act = x.new_empty(plan.rows, plan.width)
    preact: Tensor | Quantized | None = None
    if plan.options.quantized_preact:
        shapes = kept_shapes(plan.rows, plan.n, activation.halves)
        preact = Quantized(x.new_empty(shapes[0], dtype=E4M3), x.new_empty(shapes[1], dtype=E8M0))
    elif save_preact:
        preact = x.new_empty(plan.rows, plan.n)
    data, scale = parts_of(preact)
    launched(plan, x, weights, offsets, counter, (act, data, whole(bias), contiguous(probs), _bytes(scale)))
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
    quantize_preact: bool,
    sm_margin: int,
    counter: TensorFacts | None,
) -> Plan:
    kernel = SM90_MXFP8_GROUPED_GEMM_ACT
    n, k = weight_sizes(kernel, weights)
    groups = check_product(kernel, "x", x, k, weights, offsets)
    check_bias(kernel, bias, groups, n, x)
    check_factor(kernel, "probs", probs, x)
    if n % activation.halves:
        raise ValueError(f"{kernel.name}: N is {n}, needs gate and up halves of the same size for {activation.kind}")
    _refuse_transposed(kernel.name, are_transposed(kernel, weights))
    options = options_of(
        kernel, "act", x.dtype, n, spread_of(kernel, x, groups), K=k, N=n, I=n // activation.halves,
        activation=activation, glu_interleave=glu_interleave, separate=weights.separate, has_bias=bias is not None,
        factor=factor_name(probs), keeps=save_preact, zero_tail=False, contracts_rows=False,
        dynamic=check_counter(kernel.name, counter, x), mxfp8=True, quantized_preact=save_preact and quantize_preact,
    )  # fmt: skip
    return plan_of(kernel, options, (x,), groups, n, k, n, sm_margin, False)


def mxfp8_grouped_gemm_dact(
    dy: Tensor,
    weights: Sequence[Tensor],
    offsets: Tensor,
    preact: Tensor | Quantized,
    activation: Activation,
    probs: Tensor | None = None,
    rowwise: bool = True,
    columnwise: bool = True,
    need_act: bool = True,
    need_dprobs: bool = False,
    need_dbias: bool = False,
    glu_interleave: int = 0,
    sm_margin: int = 0,
    counter: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """`mxfp8_reference.mxfp8_grouped_gemm_dact`; the tail of all but dprobs is undefined."""
    data, scale = parts_of(preact)
    plan = _dact_plan(
        facts(dy), list_facts(weights), facts(offsets), facts(data), facts_or_none(scale), activation,
        facts_or_none(probs), rowwise, columnwise, need_act, need_dprobs, need_dbias, sm_margin, facts_or_none(counter),
    )  # fmt: skip
    made = plan.options.rowwise, plan.options.columnwise
    rows, columns = (dy.new_empty(plan.rows, plan.width) if wanted else None for wanted in made)
    act = dy.new_empty(plan.rows, plan.k) if need_act else None
    partial = dy.new_empty(plan.rows, plan.tiles, dtype=torch.float32) if need_dprobs else None
    data = data if plan.readable or scale is not None else readable(data)
    slots = dbias = None
    if need_dbias:
        groups = offsets.shape[0] - 1
        slots = dy.new_empty(plan.rows // SLOT + groups, plan.width, dtype=torch.float32)
        dbias = (dy.new_empty if plan.rows else dy.new_zeros)(groups, plan.width, dtype=torch.float32)
    epilogue = (rows, columns, act, partial, data, contiguous(probs), slots, offsets, _bytes(scale))
    launched(plan, dy, weights, offsets, counter, epilogue)
    if slots is not None and plan.rows:
        block = glu_interleave if activation.is_glu else 0
        kernel = launch.kernel(MODULE, SlotSumsOptions(block > 0, sm_margin > 0), ARCH)
        most = multiprocessors(plan.kernel, dy.device, sm_margin)
        kernel(offsets, slots, dbias, max(block, 1), most, launch.current_stream(dy.device))
    return rows if rowwise else None, columns, act, None if partial is None else sum_of_rows(partial), dbias


@functools.lru_cache(KEPT)
def _dact_plan(
    dy: TensorFacts,
    weights: ListFacts,
    offsets: TensorFacts,
    preact: TensorFacts,
    scale: TensorFacts | None,
    activation: Activation,
    probs: TensorFacts | None,
    rowwise: bool,
    columnwise: bool,
    need_act: bool,
    need_dprobs: bool,
    need_dbias: bool,
    sm_margin: int,
    counter: TensorFacts | None,
) -> Plan:
    kernel = SM90_MXFP8_GROUPED_GEMM_DACT
    h, width = weight_sizes(kernel, weights)
    groups = check_product(kernel, "dy", dy, h, weights, offsets)
    if scale is None:
        check_shape(kernel.name, "preact", preact, (dy.shape[0], activation.halves * width), dy, (dy.dtype,))
    else:
        shapes = kept_shapes(dy.shape[0], activation.halves * width, activation.halves)
        for name, t, shape, dtype in zip(("preact", "its scale"), (preact, scale), shapes, (E4M3, E8M0), strict=True):
            check_shape(kernel.name, name, t, shape, dy, (dtype,))
            if not t.is_contiguous() or not t.aligned:
                wanted = f"contiguous from a multiple of {VECTOR_BYTES} bytes on"
                raise ValueError(f"{kernel.name}: {name} needs to be {wanted}")
    check_factor(kernel, "probs", probs, dy)
    if need_dbias and not columnwise:
        raise ValueError(f"{kernel.name}: need_dbias needs columnwise: who trains a bias trains its weight")
    if not (rowwise or columnwise or need_act or need_dprobs):
        raise ValueError(f"{kernel.name}: needs one of rowwise, columnwise, need_act and need_dprobs")
    _refuse_transposed(kernel.name, are_transposed(kernel, weights))
    options = options_of(
        kernel, "dact", dy.dtype, width, spread_of(kernel, dy, groups), H=h, I=width, activation=activation,
        contracts_rows=True, separate=weights.separate, factor=factor_name(probs), keeps=need_act,
        has_dprobs=need_dprobs, zero_tail=False, dynamic=check_counter(kernel.name, counter, dy), mxfp8=True,
        rowwise=rowwise or columnwise, columnwise=columnwise,  # columns without rows would spill, and are rarely wanted
        has_dbias=need_dbias, quantized_preact=scale is not None,
    )  # fmt: skip
    by_row = (dy, preact) if scale is None else (dy,)
    return plan_of(kernel, options, by_row, groups, h, width, width, sm_margin, False)


def _bytes(scale: Tensor | None) -> Tensor | None:
    return None if scale is None else scale.view(torch.uint8)


def _refuse_transposed(name: str, transposed: bool) -> None:
    if transposed:
        raise ValueError(f"{name}: weights are stored [K, N], needs contiguous [N, K]: blocks are cut from rows")
