"""cuDNN Frontend's grouped product with a GLU (`GroupedGemmGluSm100`): BF16, MXFP8 and NVFP4."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_kernels.activation import Activation
from cute_kernels.blackwell.frontend import ones, run
from cute_kernels.blackwell.operands import (
    Operand,
    Quantised,
    act_func,
    check_scaled,
    constants,
    empty_quantised,
    glu_letters,
    scale_settings,
    weight_and_major,
)


class Glu(NamedTuple):
    """preact: [M, N] BF16, interleaved. act: [M, N/2], BF16 or FP8. amax: FP32 [E] of a BF16 act, where scales are."""

    preact: Tensor
    act: Tensor | Quantised
    amax: Tensor | None


def glu(
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
) -> Glu:
    """preact = round(α_g·x W_gᵀ + b_g), act = round(f(α_g·x W_gᵀ + b_g)·p), f from the unrounded sum.

    x [M, K], weight [E, N, K] contiguous, rows interleaved by 32. ends: int32 [E], see `blackwell`. probs: FP32 [M];
    None: 1. bias: [E, N] BF16, rows as the weight's. alpha: FP32 [E]; None: 1. norm_const: FP32 [1], what FP8 results
    are multiplied by before their scales are taken; None: 1. act_dtype: E4M3 or E5M2 for MXFP8, else BF16.
    """
    check_scaled(x=x, weight=weight)
    rows, (experts, n, k) = x.data.shape[0], (*weight.data.shape[:2], x.columns)
    device, quantised = x.data.device, act_dtype.itemsize == 1
    preact = torch.empty(rows, n, dtype=torch.bfloat16, device=device)
    settings: dict[str, Any] = {"act_func": act_func(activation), "generate_c": x.scale is None, **scale_settings(x)}
    data, major = weight_and_major(weight.rows_as_they_lie())
    operands: dict[str, Any] = {
        "a": x.rows_as_they_lie(), "b": data,
        "sfa": x.scale, "sfb": weight.scale, "bias": None if bias is None else bias.t(),
        "padded_offsets": ends, "alpha": ones(experts, device) if alpha is None else alpha,
        "prob": ones(rows, device) if probs is None else probs, "c": preact,
        "d_col": None, "sfd_row": None, "sfd_col": None, "norm_const": None, "amax": None,
    }  # fmt: skip
    if quantised:
        settings["discrete_col_sfd"] = True
        act: Tensor | Quantised = empty_quantised(rows, n // 2, act_dtype, x)
        (operands["d"], operands["sfd_row"]), (operands["d_col"], operands["sfd_col"]) = act
        operands["norm_const"] = ones(1, device) if norm_const is None else norm_const
    else:
        act = operands["d"] = torch.empty(rows, n // 2, dtype=act_dtype, device=device)
        if x.scale is not None:
            operands["d_col"] = torch.empty_like(act)
            operands["amax"] = torch.full((experts, 1), float("-inf"), dtype=torch.float32, device=device)
    if rows:
        kernel, limits = x.row("glu")
        limits |= glu_letters(activation, major) | {"I": n // 2, "K": k, "G": experts}
        sizes = (experts, n, k)
        run(kernel, limits, "GroupedGemmGluSm100", sizes, operands, settings, sm_margin, **constants(activation))
    amax = operands["amax"]
    return Glu(preact, act, None if amax is None else amax.squeeze(1).clamp_(min=0))
