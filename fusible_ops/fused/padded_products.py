"""Products and sums on rows padded for Blackwell's kernels, under the names of those on rows without padding."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from cute_kernels.blackwell.rows import PaddedGroups
from cute_kernels.facts import NO_PLANS, Plans
from fusible_ops.op import OperationContext


class PaddedProducts:
    """Functions on the padded rows of `groups`, whose `padded_offsets` they are given."""

    def __init__(self, ctx: OperationContext, groups: PaddedGroups) -> None:
        self._kernels, self._ends = ctx.kernels, groups.ends
        self.grouped_dbias, self.grouped_dscale = ctx.formulas.grouped_dbias, ctx.formulas.grouped_dscale

    def grouped_gemm(
        self,
        x: Tensor,
        weights: Sequence[Tensor],
        offsets: Tensor,
        bias: Tensor | None = None,
        bias_scale: Tensor | None = None,
        plans: Plans = NO_PLANS,
    ) -> Tensor:
        return self._kernels.padded_gemm(x, weights, self._ends, bias, bias_scale)

    def grouped_gemm_dgrad(
        self, dy: Tensor, weights: Sequence[Tensor], offsets: Tensor, plans: Plans = NO_PLANS
    ) -> Tensor:
        return self._kernels.padded_gemm(dy, [w.mT for w in weights], self._ends)

    def grouped_wgrad(
        self, dy: Tensor, x: Tensor, offsets: Tensor, glu_interleave: int = 0, plans: Plans = NO_PLANS
    ) -> Tensor:
        return self._kernels.padded_wgrad(dy, x, self._ends)

    def grouped_wgrad_(
        self, out: Sequence[Tensor], dy: Tensor, x: Tensor, offsets: Tensor, glu_interleave: int, accumulate: bool
    ) -> None:
        self._kernels.padded_wgrad_(out, dy, x, self._ends, accumulate)


def padded(rows: Tensor | None, groups: PaddedGroups) -> Tensor | None:
    """Probs or scales as FP32 [M]; None if there are none."""
    return None if rows is None else groups.pad(rows.float())
