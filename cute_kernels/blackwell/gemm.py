"""cuDNN Frontend's plain grouped product in BF16 (`GroupedGemmSm100`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cute_kernels.blackwell.frontend import ones, run
from cute_kernels.blackwell.operands import Operand, weight_and_major


def gemm(
    x: Tensor,
    weight: Tensor,
    ends: Tensor,
    bias: Tensor | None = None,
    bias_scale: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    sm_margin: int = 0,
) -> Tensor:
    """y = x W_gᵀ (+ s·b_g), rounded once; [M, N] in `dtype` (BF16, FP16, FP32).

    x [M, K] BF16; weight [E, N, K], contiguous or the transposed view of [E, K, N]. bias [E, N]; bias_scale: FP32 [M],
    the bias's alone. Their prob is that only where there is a bias; without one it multiplies the product, so there it
    is 1 whatever `bias_scale` says.
    """
    rows, (experts, n, k) = x.shape[0], weight.shape
    y = torch.empty(rows, n, dtype=dtype, device=x.device)
    if not rows:
        return y
    data, major = weight_and_major(weight)
    scales = bias is not None and bias_scale is not None
    operands: dict[str, Any] = {
        "a": x, "b": data, "bias": None if bias is None else bias.t(), "padded_offsets": ends,
        "alpha": ones(experts, x.device), "prob": bias_scale if scales else ones(rows, x.device),
        "c": y, "d": y,  # c is written only by operations that are asked for it
    }  # fmt: skip
    kernel, limits = Operand(x).row("gemm")
    limits |= {"N": n, "K": k, "G": experts}
    settings = {"b_major": major, "generate_c": False}
    run(kernel, limits, "GroupedGemmSm100", (experts, n, k), operands, settings, sm_margin)
    return y
