"""Products of operands that hold NVFP4's q·S, on SM90, times alpha. Formulas: `nvfp4_reference`.

Shapes, layouts, sharing and errors: as `grouped_gemm`, whose kernels these are; bf16, weights [N, K]. The largest
magnitudes of both operands are FP32 [G]; each tile's sums are multiplied by their alpha before the epilogue. Those of
what is quantised next, act and dpreact, are formed in the epilogue that stores it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from cute_kernels.activation import Activation
from cute_kernels.catalog import (
    SM90_NVFP4_GROUPED_GEMM,
    SM90_NVFP4_GROUPED_GEMM_ACT,
    SM90_NVFP4_GROUPED_GEMM_DACT,
    SM90_NVFP4_GROUPED_GEMM_DGRAD,
    Kernel,
)
from cute_kernels.facts import ListFacts, TensorFacts, facts, facts_or_none, list_facts
from cute_kernels.hopper.grouped_gemm import Plan, launched, options_of, plan_of, spread_of, sum_of_rows
from cute_kernels.hopper.nvfp4_quantize import no_maxima
from cute_kernels.hopper.operands import KEPT, check_counter, check_shape, readable
from cute_kernels.hopper.product_operands import (
    are_transposed,
    check_bias,
    check_factor,
    check_interleave,
    check_product,
    contiguous,
    factor_name,
    weight_sizes,
    whole,
)

Facts = tuple[TensorFacts, ListFacts, TensorFacts, TensorFacts, TensorFacts]
"""Those of what every product is given: rows, weights, offsets, the largest magnitudes of both."""


def _facts(rows: Tensor, weights: Sequence[Tensor], offsets: Tensor, amax: Tensor, weight_amax: Tensor) -> Facts:
    return facts(rows), list_facts(weights), facts(offsets), facts(amax), facts(weight_amax)


def _checked(kernel: Kernel, name: str, operands: Facts, contracted: int) -> int:
    """The number of groups; ValueError if an operand does not fit. contracted: columns that rows need."""
    rows, weights, offsets, *amaxes = operands
    groups = check_product(kernel, name, rows, contracted, weights, offsets)
    for what, t in zip(("amax", "weight_amax"), amaxes, strict=True):
        check_shape(kernel.name, what, t, (groups,), rows, (torch.float32,))
    if are_transposed(kernel, weights):
        raise ValueError(f"{kernel.name}: weights are stored [K, N], needs contiguous [N, K]: blocks are cut from rows")
    return groups


def nvfp4_grouped_gemm(
    x: Tensor,
    weights: Sequence[Tensor],
    offsets: Tensor,
    amax: Tensor,
    weight_amax: Tensor,
    bias: Tensor | None = None,
    bias_scale: Tensor | None = None,
    sm_margin: int = 0,
    counter: Tensor | None = None,
) -> Tensor:
    """`nvfp4_reference.nvfp4_grouped_gemm`."""
    scale = None if bias is None else bias_scale
    operands = _facts(x, weights, offsets, amax, weight_amax)
    plan = _gemm_plan(operands, facts_or_none(bias), facts_or_none(scale), sm_margin, facts_or_none(counter))
    y = x.new_empty(plan.rows, plan.n)
    launched(plan, x, weights, offsets, counter, (y, whole(bias), contiguous(scale)), (amax, weight_amax))
    return y


@functools.lru_cache(KEPT)
def _gemm_plan(
    operands: Facts,
    bias: TensorFacts | None,
    scale: TensorFacts | None,
    sm_margin: int,
    counter: TensorFacts | None,
) -> Plan:
    kernel, (x, weights, *_) = SM90_NVFP4_GROUPED_GEMM, operands
    n, k = weight_sizes(kernel, weights)
    groups = _checked(kernel, "x", operands, k)
    check_bias(kernel, bias, groups, n, x)
    check_factor(kernel, "bias_scale", scale, x)
    options = options_of(
        kernel, "store", x.dtype, n, spread_of(kernel, x, groups), K=k, N=n, contracts_rows=False,
        separate=weights.separate, has_bias=bias is not None, factor=factor_name(scale),
        dynamic=check_counter(kernel.name, counter, x), two_level=True,
    )  # fmt: skip
    return plan_of(kernel, options, (x,), groups, n, k, n, sm_margin, False)


def nvfp4_grouped_gemm_dgrad(
    dy: Tensor,
    weights: Sequence[Tensor],
    offsets: Tensor,
    amax: Tensor,
    weight_amax: Tensor,
    glu_interleave: int = 0,
    sm_margin: int = 0,
    counter: Tensor | None = None,
) -> Tensor:
    """`nvfp4_reference.nvfp4_grouped_gemm_dgrad`."""
    operands = _facts(dy, weights, offsets, amax, weight_amax)
    plan = _dgrad_plan(operands, glu_interleave, sm_margin, facts_or_none(counter))
    dx = dy.new_empty(plan.rows, plan.k)
    launched(plan, dy, weights, offsets, counter, (dx, None, None), (amax, weight_amax))
    return dx


@functools.lru_cache(KEPT)
def _dgrad_plan(operands: Facts, glu_interleave: int, sm_margin: int, counter: TensorFacts | None) -> Plan:
    kernel, (dy, weights, *_) = SM90_NVFP4_GROUPED_GEMM_DGRAD, operands
    n, k = weight_sizes(kernel, weights)
    groups = _checked(kernel, "dy", operands, n)
    check_interleave(kernel, glu_interleave, n, False)
    options = options_of(
        kernel, "store", dy.dtype, k, spread_of(kernel, dy, groups), K=k, N=n, contracts_rows=True,
        separate=weights.separate, glu_interleave=glu_interleave, dynamic=check_counter(kernel.name, counter, dy),
        two_level=True,
    )  # fmt: skip
    return plan_of(kernel, options, (dy,), groups, n, k, k, sm_margin, False)


def nvfp4_grouped_gemm_act(
    x: Tensor,
    weights: Sequence[Tensor],
    offsets: Tensor,
    amax: Tensor,
    weight_amax: Tensor,
    activation: Activation,
    bias: Tensor | None = None,
    probs: Tensor | None = None,
    glu_interleave: int = 0,
    save_preact: bool = True,
    rotated: bool = False,
    sm_margin: int = 0,
    counter: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """`nvfp4_reference.nvfp4_grouped_gemm_act`; the tail of both results is undefined."""
    plan = _act_plan(
        _facts(x, weights, offsets, amax, weight_amax), activation, facts_or_none(bias), facts_or_none(probs),
        glu_interleave, save_preact, rotated, sm_margin, facts_or_none(counter),
    )  # fmt: skip
    act = x.new_empty(plan.rows, plan.width)
    preact = x.new_empty(plan.rows, plan.n) if save_preact else None
    maxima = no_maxima(amax.shape[0], rotated, x.device)
    epilogue = (act, preact, whole(bias), contiguous(probs), None, *maxima)
    launched(plan, x, weights, offsets, counter, epilogue, (amax, weight_amax))
    return act, preact, *maxima


@functools.lru_cache(KEPT)
def _act_plan(
    operands: Facts,
    activation: Activation,
    bias: TensorFacts | None,
    probs: TensorFacts | None,
    glu_interleave: int,
    save_preact: bool,
    rotated: bool,
    sm_margin: int,
    counter: TensorFacts | None,
) -> Plan:
    kernel, (x, weights, *_) = SM90_NVFP4_GROUPED_GEMM_ACT, operands
    n, k = weight_sizes(kernel, weights)
    groups = _checked(kernel, "x", operands, k)
    check_bias(kernel, bias, groups, n, x)
    check_factor(kernel, "probs", probs, x)
    if n % activation.halves:
        raise ValueError(f"{kernel.name}: N is {n}, needs gate and up halves of the same size for {activation.kind}")
    options = options_of(
        kernel, "act", x.dtype, n, spread_of(kernel, x, groups), K=k, N=n, I=n // activation.halves,
        activation=activation, glu_interleave=glu_interleave, separate=weights.separate, has_bias=bias is not None,
        factor=factor_name(probs), keeps=save_preact, zero_tail=False, contracts_rows=False,
        dynamic=check_counter(kernel.name, counter, x), two_level=True, rotates=rotated,
    )  # fmt: skip
    return plan_of(kernel, options, (x,), groups, n, k, n, sm_margin, False)


def nvfp4_grouped_gemm_dact(
    dy: Tensor,
    weights: Sequence[Tensor],
    offsets: Tensor,
    amax: Tensor,
    weight_amax: Tensor,
    preact: Tensor,
    activation: Activation,
    probs: Tensor | None = None,
    need_dprobs: bool = False,
    rotated: bool = False,
    sm_margin: int = 0,
    counter: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """`nvfp4_reference.nvfp4_grouped_gemm_dact`; the tail of dpreact is undefined."""
    plan = _dact_plan(
        _facts(dy, weights, offsets, amax, weight_amax), facts(preact), activation, facts_or_none(probs), need_dprobs,
        rotated, sm_margin, facts_or_none(counter),
    )  # fmt: skip
    dpreact = dy.new_empty(plan.rows, plan.width)
    partial = dy.new_empty(plan.rows, plan.tiles, dtype=torch.float32) if need_dprobs else None
    preact = preact if plan.readable else readable(preact)
    maxima = no_maxima(amax.shape[0], rotated, dy.device)
    epilogue = (dpreact, None, partial, preact, contiguous(probs), *maxima)
    launched(plan, dy, weights, offsets, counter, epilogue, (amax, weight_amax))
    return dpreact, None if partial is None else sum_of_rows(partial), *maxima


@functools.lru_cache(KEPT)
def _dact_plan(
    operands: Facts,
    preact: TensorFacts,
    activation: Activation,
    probs: TensorFacts | None,
    need_dprobs: bool,
    rotated: bool,
    sm_margin: int,
    counter: TensorFacts | None,
) -> Plan:
    kernel, (dy, weights, *_) = SM90_NVFP4_GROUPED_GEMM_DACT, operands
    h, width = weight_sizes(kernel, weights)
    groups = _checked(kernel, "dy", operands, h)
    check_shape(kernel.name, "preact", preact, (dy.shape[0], activation.halves * width), dy, (dy.dtype,))
    check_factor(kernel, "probs", probs, dy)
    options = options_of(
        kernel, "dact", dy.dtype, width, spread_of(kernel, dy, groups), H=h, I=width, activation=activation,
        contracts_rows=True, separate=weights.separate, factor=factor_name(probs), keeps=False,
        has_dprobs=need_dprobs, zero_tail=False, dynamic=check_counter(kernel.name, counter, dy), two_level=True,
        rotates=rotated,
    )  # fmt: skip
    return plan_of(kernel, options, (dy, preact), groups, h, width, width, sm_margin, False)
