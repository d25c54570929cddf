"""cuDNN Frontend's plain grouped product of quantised operands (`GroupedGemmQuantSm100`): MXFP8 and NVFP4."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cute_kernels.blackwell.frontend import ones, run
from cute_kernels.blackwell.operands import (
    Operand,
    Quantised,
    check_scaled,
    empty_quantised,
    scale_settings,
    weight_and_major,
)


def quant(
    x: Operand,
    weight: Operand,
    ends: Tensor,
    bias: Tensor | None = None,
    bias_scale: Tensor | None = None,
    alpha: Tensor | None = None,
    norm_const: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    sm_margin: int = 0,
) -> Tensor | Quantised:
    """y = α_g·x W_gᵀ (+ s·b_g); [M, N] in `dtype`: BF16, FP16, of MXFP8 E4M3 or E5M2, of NVFP4 FP32.

    weight [E, N, K], contiguous, or of MXFP8 the transposed view of [E, K, N] (its column-wise copy). bias [E, N] BF16;
    bias_scale: FP32 [M], the bias's alone, as in `gemm.gemm`. alpha, norm_const: as in `glu.glu`.
    """
    check_scaled(x=x, weight=weight)
    rows, (experts, n), k = x.data.shape[0], weight.data.shape[:2], x.columns
    device, quantised = x.data.device, dtype.itemsize == 1
    data, major = weight_and_major(weight.rows_as_they_lie())
    operands: dict[str, Any] = {
        "a": x.rows_as_they_lie(), "b": data, "sfa": x.scale, "sfb": weight.scale, "padded_offsets": ends,
        "bias": None if bias is None else bias.t(), "alpha": ones(experts, device) if alpha is None else alpha,
        "prob": bias_scale if bias is not None else None,  # without a bias theirs multiplies the product
        "d_col": None, "sfd_row": None, "sfd_col": None, "norm_const": None, "amax": None,
    }  # fmt: skip
    if quantised:
        y: Tensor | Quantised = empty_quantised(rows, n, dtype, x)
        (operands["d"], operands["sfd_row"]), (operands["d_col"], operands["sfd_col"]) = y
        operands["norm_const"] = ones(1, device) if norm_const is None else norm_const
    else:
        y = operands["d"] = torch.empty(rows, n, dtype=dtype, device=device)
    if rows:
        settings = {"b_major": major, "discrete_col_sfd": quantised, **scale_settings(x)}
        kernel, limits = x.row("gemm")
        limits |= {"N": n, "K": k, "G": experts}
        run(kernel, limits, "GroupedGemmQuantSm100", (experts, n, k), operands, settings, sm_margin)
    return y
