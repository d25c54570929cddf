"""cuDNN Frontend's grouped weight gradient (`GroupedGemmWgradSm100`): BF16, MXFP8 and NVFP4."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cute_kernels.blackwell.frontend import run
from cute_kernels.blackwell.operands import Operand, scale_settings
from cute_kernels.catalog import SM100_WGRAD


def wgrad(
    dy: Operand,
    x: Operand,
    ends: Tensor,
    out: Tensor | None = None,
    accumulate: bool = False,
    global_scales: tuple[Tensor, Tensor] | None = None,
    sm_margin: int = 0,
) -> Tensor:
    """dW_g = dy_gᵀ x_g; [E, N, K]: `out` (BF16, FP16 or FP32, contiguous), overwritten or added to, or new in BF16.

    dy [M, N] and x [M, K] contiguous, or (FP8, FP4) transposed views of [N, M] and [K, M]; scales along the rows M,
    those of the column-wise copies. A group without rows gives zeros. global_scales: NVFP4's, FP32 [E] of dy and of x.
    Errors: ValueError for a margin with scales: they have none there.
    """
    experts, n, k = ends.shape[0], dy.data.shape[1], x.data.shape[1]
    if out is None:
        out = torch.empty(experts, n, k, dtype=torch.bfloat16, device=x.data.device)
    if not x.data.shape[0]:
        return out if accumulate else out.zero_()
    operands: dict[str, Any] = {
        "a": dy.rows_as_they_lie().t(), "b": x.rows_as_they_lie(), "sfa": dy.scale, "sfb": x.scale, "offsets": ends,
        "wgrad": out,
    }  # fmt: skip
    settings: dict[str, Any] = {"accumulate_on_output": accumulate, **scale_settings(x)}
    limits = {"dtype": x.format, "N": n, "K": k, "G": experts}
    run(SM100_WGRAD, limits, "GroupedGemmWgradSm100", (experts, n, k), operands, settings, sm_margin)
    return out
