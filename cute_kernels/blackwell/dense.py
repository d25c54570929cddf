"""cuDNN Frontend's dense products with an activation (`GemmSwigluSm100`, `GemmSreluSm100`).

Their cache keys and compiled kernels hold the number of rows, so a new one compiles anew: for shapes that stay. The
rules use the grouped kernels with one group instead. Here a GLU's halves lie the other way round: blocks of 32 columns
of up, then of gate.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cute_kernels.blackwell.frontend import ones, run
from cute_kernels.blackwell.operands import (
    BLOCKS,
    INTERLEAVE,
    Operand,
    check_scaled,
    empty_quantised,
    in_three_dimensions,
    scale_settings,
    tiled,
)


def swapped_halves(weight: Tensor) -> Tensor:
    """A weight [N, K] or bias [N] whose rows are 32 of gate, 32 of up, ... as the dense kernel wants them: a copy with
    each pair of blocks exchanged.
    """
    return weight.unflatten(0, (-1, 2, INTERLEAVE)).flip(1).flatten(0, 2)


def dense_swiglu(x: Operand, weight: Operand, alpha: float = 1.0, sm_margin: int = 0) -> tuple[Tensor, Tensor]:
    """preact = round(α·x Wᵀ), act = round(silu(gate)·up); (act [M, N/2], preact [M, N]), both BF16.

    x [M, K], weight [N, K], rows in blocks of 32 of up, then 32 of gate (`swapped_halves`), in which order preact lies
    too. BF16, MXFP8 or NVFP4 (its alpha is that of the tensors). No bias, no probs: theirs has neither.
    """
    (rows, n), k = (x.data.shape[0], weight.data.shape[0]), x.columns
    preact, act = (torch.empty(rows, width, dtype=torch.bfloat16, device=x.data.device) for width in (n, n // 2))
    operands = _operands(x, weight) | {"ab12": in_three_dimensions(preact), "c": in_three_dimensions(act)}
    if x.format == "nvfp4":
        operands["amax"] = torch.full((1, 1, 1), float("-inf"), dtype=torch.float32, device=x.data.device)
    if rows:
        settings = {"alpha": alpha, **scale_settings(x)}
        kernel, limits = x.row("dense_swiglu")
        limits |= {"I": n // 2, "K": k}
        run(kernel, limits, "GemmSwigluSm100", (rows, n, k), operands, settings, sm_margin, alpha=alpha)
    return act, preact


def dense_srelu(
    x: Operand,
    weight: Operand,
    probs: Tensor | None = None,
    alpha: float = 1.0,
    norm_const: Tensor | None = None,
    act_dtype: torch.dtype = torch.bfloat16,
    sm_margin: int = 0,
) -> tuple[Tensor | Operand, Tensor]:
    """preact = round(α·x Wᵀ), act = round(max(α·x Wᵀ, 0)²·p); (act [M, N], BF16 or row-wise FP8; preact [M, N] BF16).

    x [M, K], weight [N, K], MXFP8 or NVFP4. probs: FP32 [M]; None: 1.
    """
    (rows, n), k, device = (x.data.shape[0], weight.data.shape[0]), x.columns, x.data.device
    preact = torch.empty(rows, n, dtype=torch.bfloat16, device=device)
    operands = _operands(x, weight) | {"c": in_three_dimensions(preact), "sfd": None, "norm_const": None}
    operands["prob"] = (ones(rows, device) if probs is None else probs).view(-1, 1, 1)
    if act_dtype.itemsize == 1:
        act: Tensor | Operand = empty_quantised(rows, n, act_dtype, x).rowwise
        assert isinstance(act, Operand) and act.scale is not None
        operands["d"] = in_three_dimensions(act.data)
        operands["sfd"] = tiled(act.scale, rows, -(-n // BLOCKS[x.format]))
        operands["norm_const"] = ones(1, device) if norm_const is None else norm_const
    else:
        act = torch.empty(rows, n, dtype=act_dtype, device=device)
        operands["d"] = in_three_dimensions(act)
        if x.format == "nvfp4":
            operands["amax"] = torch.full((1,), float("-inf"), dtype=torch.float32, device=device)
    if rows:
        settings = {"alpha": alpha, **scale_settings(x)}
        kernel, limits = x.row("dense_srelu")
        limits |= {"N": n, "K": k}
        run(kernel, limits, "GemmSreluSm100", (rows, n, k), operands, settings, sm_margin, alpha=alpha)
    return act, preact


def _operands(x: Operand, weight: Operand) -> dict[str, Any]:
    check_scaled(x=x, weight=weight)
    matrices = {"a": in_three_dimensions(x.rows_as_they_lie()), "b": in_three_dimensions(weight.rows_as_they_lie())}
    scales: dict[str, Any] = {"sfa": None, "sfb": None, "amax": None}
    if x.scale is not None and weight.scale is not None:
        blocks = -(-x.columns // BLOCKS[x.format])
        scales["sfa"] = tiled(x.scale, x.data.shape[0], blocks)
        scales["sfb"] = tiled(weight.scale, weight.data.shape[0], blocks)
    return matrices | scales
