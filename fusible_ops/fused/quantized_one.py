"""QuantizedOne: what linears alone have in common whose operands are quantised in blocks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from fusible_ops.fused.fp8_parts import padded_groups, plain_rows
from fusible_ops.fused.parts import checked_dtype, like_rows_of, linear_at, no_grads, row_factor, viewed
from fusible_ops.groups import Groups
from fusible_ops.op import BasicOperation, FusedOperation, OperationContext, ParamGrads
from fusible_ops.quantized_parameters import read_by_backward
from fusible_ops.recipe import Recipe


class Call(NamedTuple):
    """What products are given: rows is x or dy, factors are those of the bias. padded: the groups' offsets once each is
    padded to whole blocks. records: gradients are recorded.
    """

    ctxs: list[OperationContext]
    rows: Tensor
    groups: Groups
    padded: Tensor
    recipe: Recipe
    kernels: Any
    records: bool
    factors: Tensor | None


class QuantizedOne(FusedOperation):
    """y = x W_gᵀ (+ s·b_g), grouped or dense: what `QuantizedLinear` means, in kernels."""

    def __init__(self, basic_ops: Iterable[BasicOperation]) -> None:
        super().__init__(basic_ops)
        self.fc, _ = linear_at(self.fusible_parts(), 0)

    def keeps(self) -> dict[int, int]:
        return {4: 0, 5: 0}

    @abstractmethod
    def product(
        self, call: Call, bias: Tensor | None, trains: bool, passes: bool
    ) -> tuple[Tensor, Sequence[Tensor | None]]:
        """(y, what backward needs: of x first, two tensors)."""

    @abstractmethod
    def gradients(self, call: Call, kept: list[Tensor | None], grads: list[ParamGrads]) -> Tensor | None:
        """dx if it is wanted; the parameters' gradients go to `grads`."""

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: Tensor,
        *,
        basic_op_extra_inputs: Sequence[Sequence[Tensor]],
        **_: Any,
    ) -> tuple[Tensor, Sequence[Sequence[Tensor]]]:
        ctxs, extras, ctx = basic_op_ctxs, basic_op_extra_inputs, basic_op_ctxs[0]
        kernels, dtype = ctx.kernels, checked_dtype(self.fc.op, ctx, input_)
        recipe, records = ctx.recipe, ctxs[-1].requires_grad
        assert recipe is not None
        trains, passes = (records and flag for flag in (ctx.wants[0], ctx.input_requires_grad))
        scales = self.fc.scales(extras)
        factors = row_factor(scales, dtype)
        groups, padded = padded_groups(kernels, self.fc.split_sizes(extras), input_, recipe)
        bias = self.fc.bias(ctxs, dtype, records)
        call = Call(ctxs, input_, groups, padded, recipe, kernels, records, factors)
        ctx.unchanged = read_by_backward(ctx.held) if passes else None
        y, kept = self.product(call, bias, trains, passes)
        if records:
            ctx.splits, ctx.version, ctx.input_shape = groups.splits, groups.version, input_.shape
            ctx.scales_shape = None if scales is None else scales.shape
            kept_bias = bias if self.fc.wants_dscales(ctxs) else None
            ctx.save_for_backward(groups.offsets, padded, factors, kept_bias, *kept)
        return like_rows_of(y, input_), [()] * len(ctxs)

    def fuser_backward(
        self, basic_op_ctxs: list[OperationContext], grad_output: Tensor, **_: Any
    ) -> tuple[Tensor | None, Sequence[ParamGrads], Sequence[ParamGrads]]:
        ctxs, ctx = basic_op_ctxs, basic_op_ctxs[0]
        assert ctx.recipe is not None
        grads, extra_grads = no_grads(ctxs)
        offsets, padded, factors, bias, *kept = ctx.take_saved()
        if self.fc.wants_dscales(ctxs):
            dscales = ctx.kernels.grouped_dscale(plain_rows(grad_output), bias, offsets)
            extra_grads[0] = [None, viewed(dscales, ctx.scales_shape)]
        groups = Groups(offsets, ctx.splits, ctx.version)
        call = Call(ctxs, grad_output, groups, padded, ctx.recipe, ctx.kernels, True, factors)
        dx = self.gradients(call, kept, grads)
        return None if dx is None else viewed(dx, ctx.input_shape), grads, extra_grads
