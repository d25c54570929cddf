"""Products of row groups of E4M3 operands on SM90, and what is done with them in the same launch. Formulas:
`fp8_reference`.

Shapes: x, dy [T, ·] E4M3 in rows copies, weights [G, ·, ·] E4M3 that are contracted along their last dimension (a
gradient takes the transposed copy), all contiguous, widths multiples of 16; scales as `fp8_reference` has them; offsets
and padded int32 [G+1] on the device, never read here. No host sync; the same bits run after run.
sm_margin: SMs to leave free.
Errors: ValueError, before anything is launched, that names the argument and the limit.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cute_kernels import launch
from cute_kernels.activation import Activation
from cute_kernels.catalog import (
    SM90_FP8_GROUPED_GEMM,
    SM90_FP8_GROUPED_GEMM_ACT,
    SM90_FP8_GROUPED_GEMM_DACT,
    Kernel,
)
from cute_kernels.facts import VECTOR_BYTES, TensorFacts, facts, facts_or_none
from cute_kernels.fp8_reference import BLOCK, Fp8Copies, kept_shapes, scales_in_row
from cute_kernels.hopper.configs import grid_size
from cute_kernels.hopper.fp8_configs import Config, Options, OwnTiles, choose
from cute_kernels.hopper.operands import KEPT, check_offsets, check_shape, multiprocessors
from cute_kernels.hopper.product_operands import check_factor, contiguous, factor_name, whole
from cute_kernels.quantization.groups import padded_rows
from cute_kernels.quantization.quantize import Quantized, parts_of

MODULES = {
    Config: "cute_kernels.hopper.fp8_grouped_gemm_kernel",
    OwnTiles: "cute_kernels.hopper.fp8_dact_kernel",
}
"""The device module that a kind of configuration is for."""
ARCH = SM90_FP8_GROUPED_GEMM.arch
KEPT_IN = E4M3, FP32 = torch.float8_e4m3fn, torch.float32


@dataclass(frozen=True, slots=True)
class Plan:
    """What follows from the facts of all operands of one product.

    rows: of x. n: rows of one group's weight. tiles: column tiles of the product. tokens: padded ones. grid: CTAs.
    """

    options: Options
    rows: int
    n: int
    groups: int
    tiles: int
    tokens: int
    grid: int


def fp8_grouped_gemm(
    x: Tensor,
    x_scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    offsets: Tensor,
    bias: Tensor | None = None,
    bias_scale: Tensor | None = None,
    halves: int = 1,
    sm_margin: int = 0,
) -> Tensor:
    """`fp8_reference.fp8_grouped_gemm`: y [T, N] bf16."""
    scale = None if bias is None else bias_scale
    operands = (x, x_scale, w, w_scale, offsets)
    plan = _gemm_plan(tuple(map(facts, operands)), facts_or_none(bias), facts_or_none(scale), halves, sm_margin)
    y = torch.empty(plan.rows, plan.n, dtype=torch.bfloat16, device=x.device)
    _run(plan, operands, (y, whole(bias), contiguous(scale)))
    return y


@functools.lru_cache(KEPT)
def _gemm_plan(
    operands: tuple[TensorFacts, ...],
    bias: TensorFacts | None,
    scale: TensorFacts | None,
    halves: int,
    sm_margin: int,
) -> Plan:
    kernel, x = SM90_FP8_GROUPED_GEMM, operands[0]
    groups, n, k = _check_product(kernel, "x", operands, halves)
    _check_bias(kernel, bias, groups, n, x)
    check_factor(kernel, "bias_scale", scale, x)
    kernel.require(K=k, N=n)
    cut = 1 if k % (halves * BLOCK) == 0 else halves  # blocks that are cut in each half may be those cut through
    options = Options("store", choose("store", n, k), halves=cut, has_bias=bias is not None, factor=factor_name(scale))
    return _plan(kernel, options, x, groups, n, options.config.column_tiles(n), sm_margin)


def fp8_grouped_gemm_act(
    x: Tensor,
    x_scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    offsets: Tensor,
    padded: Tensor,
    activation: Activation,
    bias: Tensor | None = None,
    probs: Tensor | None = None,
    rowwise: bool = True,
    columnwise: bool = True,
    save_preact: bool = True,
    power_of_two: bool = True,
    quantize_preact: bool = False,
    sm_margin: int = 0,
) -> tuple[Fp8Copies, Tensor | Quantized | None]:
    """`fp8_reference.fp8_grouped_gemm_act`: (copies of act, preact bf16 [T, N] or None), with undefined tails."""
    operands = (x, x_scale, w, w_scale, offsets)
    plan = _act_plan(
        tuple(map(facts, operands)), facts(padded), activation, facts_or_none(bias), facts_or_none(probs),
        rowwise, columnwise, save_preact, power_of_two, quantize_preact, sm_margin,
    )  # fmt: skip
    act = _copies(plan, x.device, plan.n // activation.halves)
    preact: Tensor | Quantized | None = None
    if plan.options.quantized_preact:
        shapes = kept_shapes(plan.rows, plan.n, activation.halves)
        preact = Quantized(*(torch.empty(s, dtype=d, device=x.device) for s, d in zip(shapes, KEPT_IN, strict=True)))
    elif save_preact:
        preact = torch.empty(plan.rows, plan.n, dtype=torch.bfloat16, device=x.device)
    data, scale = parts_of(preact)
    outputs = (*act[:4], data, whole(bias), contiguous(probs), padded if columnwise else None)
    _run(plan, operands, outputs if scale is None else (*outputs, scale))
    return act, preact


@functools.lru_cache(KEPT)
def _act_plan(
    operands: tuple[TensorFacts, ...],
    padded: TensorFacts,
    activation: Activation,
    bias: TensorFacts | None,
    probs: TensorFacts | None,
    rowwise: bool,
    columnwise: bool,
    save_preact: bool,
    power_of_two: bool,
    quantize_preact: bool,
    sm_margin: int,
) -> Plan:
    kernel, x = SM90_FP8_GROUPED_GEMM_ACT, operands[0]
    groups, n, k = _check_product(kernel, "x", operands)
    check_shape(kernel.name, "padded", padded, (groups + 1,), x, (torch.int32,))
    _check_bias(kernel, bias, groups, n, x)
    check_factor(kernel, "probs", probs, x)
    _check_wanted(kernel, rowwise, columnwise)
    if n % activation.halves:
        raise ValueError(f"{kernel.name}: N is {n}, needs gate and up halves of the same size for {activation.kind}")
    width = n // activation.halves
    kernel.require(K=k, I=width, activation=activation.kind)
    options = Options(
        "act", choose("act", n), activation=activation, straddles=activation.is_glu and width % BLOCK != 0,
        has_bias=bias is not None, factor=factor_name(probs), keeps=save_preact,
        rowwise=rowwise, columnwise=columnwise, power_of_two=power_of_two,
        quantized_preact=save_preact and quantize_preact,
    )  # fmt: skip
    return _plan(kernel, options, x, groups, n, options.config.column_tiles(n, activation.halves), sm_margin)


def fp8_grouped_gemm_dact(
    dy: Tensor,
    dy_scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    offsets: Tensor,
    padded: Tensor,
    preact: Tensor | Quantized,
    activation: Activation,
    probs: Tensor | None = None,
    rowwise: bool = True,
    columnwise: bool = True,
    need_dprobs: bool = False,
    need_dbias: bool = False,
    power_of_two: bool = True,
    sm_margin: int = 0,
) -> tuple[Fp8Copies, Tensor | None]:
    """`fp8_reference.fp8_grouped_gemm_dact`: (copies and column sums of dpreact, dprobs FP32 [T] or None).

    The tail of dprobs is zero, that of the copies undefined. Column sums come with the transposed copy only.
    """
    operands, (data, scale) = (dy, dy_scale, w, w_scale, offsets), parts_of(preact)
    plan = _dact_plan(
        tuple(map(facts, operands)), facts(padded), facts(data), facts_or_none(scale), activation, facts_or_none(probs),
        rowwise, columnwise, need_dprobs, need_dbias, power_of_two, sm_margin,
    )  # fmt: skip
    device, columns = dy.device, activation.halves * plan.n
    dpreact = _copies(plan, device, columns, activation.halves)
    partial = torch.empty(plan.rows, plan.tiles, dtype=FP32, device=device) if need_dprobs else None
    sums = dbias = None
    if need_dbias:
        sums = torch.empty(plan.tokens // BLOCK, columns, dtype=FP32, device=device)
        dbias = (torch.empty if plan.rows else torch.zeros)(plan.groups, columns, dtype=FP32, device=device)
    outputs = (*dpreact[:4], partial, sums, dbias, data, contiguous(probs), padded if columnwise else None)
    _run(plan, operands, outputs if scale is None else (*outputs, scale))
    return dpreact._replace(sums=dbias), None if partial is None else partial.sum(1)


@functools.lru_cache(KEPT)
def _dact_plan(
    operands: tuple[TensorFacts, ...],
    padded: TensorFacts,
    preact: TensorFacts,
    preact_scale: TensorFacts | None,
    activation: Activation,
    probs: TensorFacts | None,
    rowwise: bool,
    columnwise: bool,
    need_dprobs: bool,
    need_dbias: bool,
    power_of_two: bool,
    sm_margin: int,
) -> Plan:
    kernel, dy = SM90_FP8_GROUPED_GEMM_DACT, operands[0]
    groups, width, h = _check_product(kernel, "dy", operands)
    check_shape(kernel.name, "padded", padded, (groups + 1,), dy, (torch.int32,))
    shapes = kept_shapes(dy.shape[0], activation.halves * width, activation.halves)
    _check_memory(kernel, "preact", preact, shapes[0], dy, torch.bfloat16 if preact_scale is None else E4M3)
    if preact_scale is not None:
        _check_memory(kernel, "preact's scale", preact_scale, shapes[1], dy, FP32)
    check_factor(kernel, "probs", probs, dy)
    _check_wanted(kernel, rowwise, columnwise, need_dbias)
    kernel.require(H=h, I=width, activation=activation.kind)
    options = Options(
        "dact", choose("dact", width, h, activation, preact_scale is not None), activation=activation,
        factor=factor_name(probs), rowwise=rowwise, columnwise=columnwise, power_of_two=power_of_two,
        has_dprobs=need_dprobs, has_dbias=need_dbias, alone=need_dbias and sm_margin > 0,
        quantized_preact=preact_scale is not None,
    )  # fmt: skip
    return _plan(kernel, options, dy, groups, width, options.config.column_tiles(width), sm_margin)


def _copies(plan: Plan, device: torch.device, columns: int, halves: int = 1) -> Fp8Copies:
    """Memory for the copies of a matrix of `columns` columns. halves: in which blocks of rows are cut."""
    data = scale = data_t = scale_t = None
    if plan.options.rowwise:
        data = torch.empty(plan.rows, columns, dtype=E4M3, device=device)
        blocks = halves * -(-columns // halves // BLOCK)
        scale = torch.empty(blocks, scales_in_row(plan.rows), dtype=FP32, device=device)
    if plan.options.columnwise:
        data_t = torch.empty(columns, plan.tokens, dtype=E4M3, device=device)
        scale_t = torch.empty(plan.tokens // BLOCK, scales_in_row(columns), dtype=FP32, device=device)
    return Fp8Copies(data, scale, data_t, scale_t, None)


def _plan(kernel: Kernel, options: Options, x: TensorFacts, groups: int, n: int, tiles: int, sm_margin: int) -> Plan:
    rows = x.shape[0]
    grid = grid_size(rows, groups, tiles, multiprocessors(kernel, x.device, sm_margin), BLOCK)
    return Plan(options, rows, n, groups, tiles, padded_rows(rows, groups), grid)


def _run(plan: Plan, operands: tuple[Tensor, ...], epilogue: tuple[Any, ...]) -> None:
    """Launch on the current stream of the operands' device; nothing where there are no rows."""
    if plan.rows:
        stream = launch.current_stream(operands[0].device)
        launch.kernel(MODULES[type(plan.options.config)], plan.options, ARCH)(*operands, epilogue, plan.grid, stream)


def _check_product(
    kernel: Kernel, letter: str, operands: tuple[TensorFacts, ...], halves: int = 1
) -> tuple[int, int, int]:
    """(groups, rows and columns of a weight), if operands fit each other and memory is as the kernel reads it."""
    x, x_scale, w, w_scale, offsets = operands
    if len(x.shape) != 2 or len(w.shape) != 3:
        found = f"{letter} has {len(x.shape)} dimensions and w {len(w.shape)}"
        raise ValueError(f"{kernel.name}: {found}, needs {letter} [T, K] and w [G, N, K]")
    groups, (rows, columns) = check_offsets(kernel.name, offsets, x), w.shape[1:]
    if halves not in (1, 2) or (halves == 2 and columns % 128):
        raise ValueError(f"{kernel.name}: halves is {halves} of {columns} columns, needs 1, or 2 of multiples of 64")
    blocks = halves * -(-columns // halves // BLOCK)
    _check_memory(kernel, letter, x, (x.shape[0], columns), x, E4M3)
    _check_memory(kernel, f"{letter}_scale", x_scale, (blocks, scales_in_row(x.shape[0])), x, FP32)
    _check_memory(kernel, "w", w, (groups, rows, columns), x, E4M3)
    shape = (groups, -(-rows // BLOCK), scales_in_row(-(-columns // BLOCK)))
    _check_memory(kernel, "w_scale", w_scale, shape, x, FP32)
    return groups, rows, columns


def _check_memory(
    kernel: Kernel, letter: str, t: TensorFacts, shape: tuple[int, ...], like: TensorFacts, dtype: torch.dtype
) -> None:
    check_shape(kernel.name, letter, t, shape, like, (dtype,))
    if not t.is_contiguous() or not t.aligned:
        wanted = f"contiguous and starting at a multiple of {VECTOR_BYTES} bytes"
        raise ValueError(f"{kernel.name}: {letter} needs to be {wanted}")


def _check_bias(kernel: Kernel, bias: TensorFacts | None, groups: int, columns: int, x: TensorFacts) -> None:
    if bias is not None:
        check_shape(kernel.name, "bias", bias, (groups, columns), x, (torch.bfloat16,))


def _check_wanted(kernel: Kernel, rowwise: bool, columnwise: bool, sums: bool = False) -> None:
    if not (rowwise or columnwise) or (sums and not columnwise):
        found = f"rowwise={rowwise}, columnwise={columnwise}, need_dbias={sums}"
        raise ValueError(f"{kernel.name}: {found}; needs rowwise or columnwise, and columnwise for need_dbias")
