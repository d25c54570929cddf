"""cuDNN Frontend's grouped products with a squared ReLU (`GroupedGemmSreluSm100`, `GroupedGemmDsreluSm100`): MXFP8,
NVFP4. Their matrices have three dimensions, and scales are views of tiles.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_kernels.activation import Activation
from cute_kernels.blackwell.frontend import ones, run
from cute_kernels.blackwell.operands import (
    BLOCKS,
    TILE_COLUMNS,
    Operand,
    Quantised,
    check_scaled,
    empty_quantised,
    in_three_dimensions,
    scale_settings,
    tiled,
)


class Srelu(NamedTuple):
    """preact: [M, N] BF16. act: [M, N], BF16 or FP8. amax: FP32 [E] of a BF16 act."""

    preact: Tensor
    act: Tensor | Quantised
    amax: Tensor | None


class Dsrelu(NamedTuple):
    """dpreact: [M, N], BF16 or FP8. act: the recomputed activation, of FP8 the copy along the rows alone. dprobs: FP32
    [M] or None. amax: FP32 [E] of a BF16 dpreact.
    """

    dpreact: Tensor | Quantised
    act: Operand
    dprobs: Tensor | None
    amax: Tensor | None


def srelu(
    x: Operand,
    weight: Operand,
    ends: Tensor,
    activation: Activation,
    probs: Tensor | None = None,
    bias: Tensor | None = None,
    alpha: Tensor | None = None,
    norm_const: Tensor | None = None,
    act_dtype: torch.dtype = torch.bfloat16,
    sm_margin: int = 0,
) -> Srelu:
    """preact = round(α_g·x W_gᵀ + b_g), act = round(f(α_g·x W_gᵀ + b_g)·p) with f of srelu or tanh_srelu.

    weight [E, N, K] contiguous. Others as in `glu.glu`.
    """
    rows, (experts, n), k = x.data.shape[0], weight.data.shape[:2], x.columns
    device = x.data.device
    preact = torch.empty(rows, n, dtype=torch.bfloat16, device=device)
    act, results, amax = _results(rows, n, act_dtype, x, norm_const, experts, "d")
    operands = _operands(x, weight, ends, probs, alpha) | results | {"c": in_three_dimensions(preact)}
    operands["bias"] = None if bias is None else bias.t()
    if rows:
        settings = _settings(activation, x, act_dtype)
        _run("srelu", "GroupedGemmSreluSm100", activation, (experts, n, k), x, operands, settings, sm_margin)
    return Srelu(preact, act, _largest(amax))


def dsrelu(
    dy: Operand,
    weight: Operand,
    ends: Tensor,
    preact: Tensor,
    activation: Activation,
    probs: Tensor | None = None,
    need_dprobs: bool = False,
    deterministic: bool = True,
    alpha: Tensor | None = None,
    norm_const: Tensor | None = None,
    dpreact_dtype: torch.dtype = torch.bfloat16,
    sm_margin: int = 0,
) -> Dsrelu:
    """dA = α_g·dy W_gᵀ, dpreact = (dA·p)·f', dprobs = Σ_columns dA·f, act = f(preact)·p.

    dy [M, K]; weight [E, N, K] contiguous, or of MXFP8 the transposed view of [E, K, N]. preact [M, N] BF16.
    deterministic: dprobs has one value for each tile of 256 columns, summed afterwards; else sums of atomics.
    """
    rows, (experts, n), k = dy.data.shape[0], weight.data.shape[:2], dy.columns
    device = dy.data.device
    slots = -(-n // TILE_COLUMNS) if deterministic else 0
    dpreact, results, amax = _results(rows, n, dpreact_dtype, dy, norm_const, experts, "d_row")
    act = torch.empty(rows, n, dtype=dpreact_dtype, device=device)
    act_scale = None
    if isinstance(dpreact, Quantised):
        act_scale = torch.empty_like(dpreact.columnwise.scale)  # type: ignore[arg-type]
    sums = torch.zeros(rows, max(slots, 1), 1, dtype=torch.float32, device=device)
    operands = _operands(dy, weight, ends, probs, alpha) | results
    operands |= {"c": in_three_dimensions(preact), "d_srelu": in_three_dimensions(act), "dbias": None}
    operands["sfd_col_d_srelu"] = None if act_scale is None else tiled(act_scale, n, -(-rows // BLOCKS[dy.format]))
    operands["dprob"] = torch.zeros(rows, 1, 1, dtype=torch.float32, device=device) if deterministic else sums
    operands["dprob_workspace"] = sums if deterministic else None
    if operands["d_col"] is None:
        operands["d_col"] = in_three_dimensions(torch.empty_like(act))
    if rows:
        settings = _settings(activation, dy, dpreact_dtype) | {"deterministic": deterministic}
        sizes = (experts, n, k, slots)
        _run("dsrelu", "GroupedGemmDsreluSm100", activation, sizes, dy, operands, settings, sm_margin)
    return Dsrelu(dpreact, Operand(act, act_scale), sums.sum((1, 2)) if need_dprobs else None, _largest(amax))


def _largest(amax: Tensor | None) -> Tensor | None:
    """Once the kernel has run: of a group without rows 0, where it leaves -inf."""
    return None if amax is None else amax.clamp_(min=0)


def _operands(x: Operand, weight: Operand, ends: Tensor, probs: Tensor | None, alpha: Tensor | None) -> dict[str, Any]:
    rows, (experts, n), device = x.data.shape[0], weight.data.shape[:2], x.data.device
    check_scaled(x=x, weight=weight)
    assert x.scale is not None and weight.scale is not None
    blocks = -(-x.columns // BLOCKS[x.format])
    return {
        "a": in_three_dimensions(x.rows_as_they_lie()), "b": weight.rows_as_they_lie().permute(1, 2, 0),
        "sfa": tiled(x.scale, rows, blocks), "sfb": tiled(weight.scale, n, blocks, experts), "padded_offsets": ends,
        "alpha": ones(experts, device) if alpha is None else alpha,
        "prob": (ones(rows, device) if probs is None else probs).view(-1, 1, 1),
    }  # fmt: skip


def _results(
    rows: int, n: int, dtype: torch.dtype, like: Operand, norm_const: Tensor | None, experts: int, name: str
) -> tuple[Tensor | Quantised, dict[str, Any], Tensor | None]:
    """(the result, the operands that it is written through, the largest magnitude of each group or None)."""
    device = like.data.device
    operands: dict[str, Any] = {"d_col": None, "sfd_row": None, "sfd_col": None, "norm_const": None, "amax": None}
    if dtype.itemsize > 1:
        plain = torch.empty(rows, n, dtype=dtype, device=device)
        amax = torch.full((experts, 1), float("-inf"), dtype=torch.float32, device=device)
        return plain, operands | {name: in_three_dimensions(plain), "amax": amax}, amax.squeeze(1)
    made, block = empty_quantised(rows, n, dtype, like), BLOCKS[like.format]
    (row, row_scale), (column, column_scale) = made
    assert row_scale is not None and column_scale is not None
    operands |= {name: in_three_dimensions(row), "d_col": in_three_dimensions(column)}
    operands |= {
        "sfd_row": tiled(row_scale, rows, -(-n // block)),
        "sfd_col": tiled(column_scale, n, -(-rows // block)),
    }
    operands["norm_const"] = ones(1, device) if norm_const is None else norm_const
    return made, operands, None


def _settings(activation: Activation, x: Operand, dtype: torch.dtype) -> dict[str, Any]:
    clamp = activation.clamp_scale if activation.kind == "tanh_srelu" else None
    return {"tanh_clamp_scale": clamp, "discrete_col_sfd": dtype.itemsize == 1, **scale_settings(x)}


def _run(
    what: str,
    name: str,
    activation: Activation,
    sizes: tuple[int, ...],
    x: Operand,
    operands: dict[str, Any],
    settings: dict[str, Any],
    sm_margin: int,
) -> None:
    kernel, limits = x.row(what)
    limits |= {"activation": activation.kind, "N": sizes[1], "K": sizes[2], "G": sizes[0]}
    run(kernel, limits, name, sizes, operands, settings, sm_margin)
