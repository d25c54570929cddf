"""cuDNN Frontend's grouped weight gradient (`GroupedGemmWgradSm100`): BF16, MXFP8 and NVFP4."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cute_kernels.blackwell.frontend import library, run
from cute_kernels.blackwell.operands import Operand, check_margin, check_scaled, scale_settings
from cute_kernels.reference import each_group


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

    dy [M, N] and x [M, K], BF16 or the column-wise copies of MXFP8; of NVFP4 the transposed copies [N, M/2] and
    [K, M/2]. Scales: along the rows M, in the order of `operands.group_tiles`. A group without rows gives zeros.
    global_scales: NVFP4's, FP32 [E] of dy and of x, which every product is multiplied by.
    Errors: ValueError for a margin with scales, which they ignore there. With scales the first call reads `ends` on the
    host.
    """
    experts = ends.shape[0]
    a, b = (t if t.format == "nvfp4" else Operand(t.data.t(), t.scale) for t in (dy, x))  # [N, M], [K, M]
    (n, k), rows = (a.data.shape[0], b.data.shape[0]), a.columns
    if b.columns != rows:
        raise ValueError(f"dy has {rows} rows, x {b.columns}")
    check_scaled(dy=a, x=b)
    check_margin(x.format, sm_margin)
    if out is None:
        out = torch.empty(experts, n, k, dtype=torch.bfloat16, device=x.data.device)
    if not rows:
        return out if accumulate else out.zero_()
    operands: dict[str, Any] = {
        "a": a.rows_as_they_lie(), "b": b.rows_as_they_lie().t(), "sfa": a.scale, "sfb": b.scale,
        "offsets": ends, "wgrad": out, "global_scale_a": None, "global_scale_b": None,
    }  # fmt: skip
    settings: dict[str, Any] = {"accumulate_on_output": accumulate, **scale_settings(x)}
    if global_scales is not None:
        operands["global_scale_a"], operands["global_scale_b"] = global_scales
    more = {}
    if x.scale is not None:  # scratch of this call's own: two streams may call at once
        room = library().get_grouped_gemm_wgrad_workspace_size_sm100(experts)
        more["descriptor_workspace"] = torch.empty(room, dtype=torch.uint8, device=x.data.device)
    kernel, limits = x.row("wgrad")
    limits |= {"N": n, "K": k, "G": experts}
    run(kernel, limits, "GroupedGemmWgradSm100", (experts, n, k), operands, settings, sm_margin, **more)
    return out


def wgrad_into(
    out: Sequence[Tensor],
    dy: Operand,
    x: Operand,
    ends: Tensor,
    accumulate: bool = False,
    global_scales: tuple[Tensor, Tensor] | None = None,
    sm_margin: int = 0,
) -> None:
    """`wgrad` into one [E, N, K] or E [N, K] tensors. The kernel writes one: separate ones are written afterwards."""
    if len(out) == 1 and out[0].dim() == 3:
        wgrad(dy, x, ends, out[0], accumulate, global_scales, sm_margin)
        return
    parts = each_group(out)
    dw = parts[0].new_empty(ends.shape[0], *parts[0].shape)
    wgrad(dy, x, ends, dw, False, global_scales, sm_margin)
    for target, part in zip(parts, dw.unbind(0), strict=True):
        if accumulate:
            target.add_(part)
        else:
            target.copy_(part)
