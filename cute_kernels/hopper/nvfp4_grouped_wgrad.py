"""Weight gradients of NVFP4 operands on SM90: those of `grouped_wgrad`, times alpha. Formulas: `nvfp4_reference`.

Shapes, layouts, sharing and errors: as `grouped_wgrad`, whose kernels these are; bf16. The largest magnitudes of both
operands are FP32 [G].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cute_kernels.catalog import SM90_NVFP4_GROUPED_WGRAD
from cute_kernels.facts import facts, facts_or_none, list_facts
from cute_kernels.hopper.grouped_wgrad import launched, plan_of
from cute_kernels.hopper.operands import check_shape
from cute_kernels.limits import dtype_name


def nvfp4_grouped_wgrad(
    dy: Tensor,
    x: Tensor,
    offsets: Tensor,
    amax: Tensor,
    x_amax: Tensor,
    glu_interleave: int = 0,
    sm_margin: int = 0,
    counter: Tensor | None = None,
) -> Tensor:
    """`nvfp4_reference.nvfp4_grouped_wgrad`."""
    dw = x.new_empty(offsets.shape[0] - 1, dy.shape[1], x.shape[1])
    nvfp4_grouped_wgrad_([dw], dy, x, offsets, amax, x_amax, glu_interleave, False, sm_margin, counter)
    return dw


def nvfp4_grouped_wgrad_(
    out: Sequence[Tensor],
    dy: Tensor,
    x: Tensor,
    offsets: Tensor,
    amax: Tensor,
    x_amax: Tensor,
    glu_interleave: int = 0,
    accumulate: bool = False,
    sm_margin: int = 0,
    counter: Tensor | None = None,
) -> None:
    """`nvfp4_reference.nvfp4_grouped_wgrad_`."""
    kernel = SM90_NVFP4_GROUPED_WGRAD
    kernel.require(dtype=dtype_name(x.dtype), N=dy.shape[1], K=x.shape[1])
    for name, t in (("amax", amax), ("x_amax", x_amax)):
        check_shape(kernel.name, name, t, (offsets.shape[0] - 1,), x, (torch.float32,))
    operands = (list_facts(out), facts(dy), facts(x), facts(offsets))
    plan = plan_of(*operands, glu_interleave, accumulate, sm_margin, facts_or_none(counter), True)
    launched(plan, out, dy, x, offsets, glu_interleave, accumulate, counter, (amax, x_amax))
