"""A grouped linear alone on Blackwell."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from cute_kernels.blackwell.rows import PaddedGroups
from fusible_ops.fused.grouped_linear import FusedGroupedLinear
from fusible_ops.fused.padded_products import PaddedProducts
from fusible_ops.fused.parts import Extras
from fusible_ops.op import OperationContext


class PaddedLinear(FusedGroupedLinear):
    """The same for kernels that want every group padded to 256 rows (`PaddedGroups`): x and dy are padded, y and dx
    unpadded, without a host sync. x is kept for backward as it came. Gradients of biases and of their scales are
    PyTorch's.
    """

    def offsets(self, ctx: OperationContext, rows: int, extras: Extras) -> Tensor:
        ctx.groups = PaddedGroups(self.fc.offsets(ctx.formulas, rows, extras), rows)
        return ctx.groups.padded_offsets

    def products(self, ctx: OperationContext) -> Any:
        return PaddedProducts(ctx, ctx.groups)

    def laid_out(self, ctx: OperationContext, t: Tensor) -> Tensor:
        return ctx.groups.pad(t if t.dim() == 2 else t.float())

    def as_given(self, ctx: OperationContext, t: Tensor) -> Tensor:
        return ctx.groups.unpad(t)
