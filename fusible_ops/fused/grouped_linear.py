"""A linear alone, or a linear and its activation, as kernels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from fusible_ops.fused.parts import (
    Extras,
    activation_at,
    as_rows,
    checked_dtype,
    incoming,
    interleaves,
    like_rows_of,
    linear_at,
    no_grads,
    probs_of_tokens,
    row_factor,
    viewed,
)
from fusible_ops.op import BasicOperation, FusedOperation, OperationContext, ParamGrads
from fusible_ops.parameters import Unchanged


class FusedGroupedLinear(FusedOperation):
    """y = x W_gᵀ (+ s·b_g), grouped or dense, rounded once. Ops after the linear are identities (Quantize without a
    recipe).
    """

    def __init__(self, basic_ops: Iterable[BasicOperation]) -> None:
        super().__init__(basic_ops)
        self.fc, _ = linear_at(self.fusible_parts(), 0)

    def keeps(self) -> dict[int, int]:
        return {0: 0}

    # How rows lie in the kernels' products: as they are given.

    def offsets(self, ctx: OperationContext, rows: int, extras: Extras) -> Tensor:
        """Where groups of the products' rows begin and end, of so many given rows. Asked first in a forward."""
        return self.fc.offsets(ctx.kernels, rows, extras)

    def products(self, ctx: OperationContext) -> Any:
        """The functions on such rows."""
        return ctx.kernels

    def laid_out(self, ctx: OperationContext, t: Tensor) -> Tensor:
        """Given rows as the products take them."""
        return t

    def as_given(self, ctx: OperationContext, t: Tensor) -> Tensor:
        """The way back."""
        return t

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: Tensor,
        *,
        basic_op_extra_inputs: Sequence[Sequence[Tensor]],
        **_: Any,
    ) -> tuple[Tensor, Sequence[Sequence[Tensor]]]:
        ctx, extras = basic_op_ctxs[0], basic_op_extra_inputs
        dtype = checked_dtype(self.fc.op, ctx, input_)
        x, scales = as_rows(input_, dtype), self.fc.scales(extras)
        needs_grad = basic_op_ctxs[-1].requires_grad
        weights = ctx.held.operands(dtype, needs_grad)
        bias = self.fc.bias(basic_op_ctxs, dtype, needs_grad)
        offsets = self.offsets(ctx, x.shape[0], extras)
        rows = row_factor(scales, dtype)
        rows = None if rows is None else self.laid_out(ctx, rows)
        y = self.products(ctx).grouped_gemm(self.laid_out(ctx, x), weights, offsets, bias, rows, plans=ctx.plans)
        if needs_grad:
            ctx.input_shape, ctx.dtype = input_.shape, dtype
            ctx.unchanged = Unchanged(ctx.held.weights) if ctx.input_requires_grad else None
            ctx.scales_shape = None if scales is None else scales.shape
            kept_x = x if ctx.wants[0] else None
            kept_bias = bias if self.fc.wants_dscales(basic_op_ctxs) else None
            ctx.save_for_backward(kept_x, offsets, rows, kept_bias, *(weights if ctx.input_requires_grad else ()))
        return like_rows_of(self.as_given(ctx, y), input_), [()] * len(basic_op_ctxs)

    def fuser_backward(
        self, basic_op_ctxs: list[OperationContext], grad_output: Tensor, **_: Any
    ) -> tuple[Tensor | None, Sequence[ParamGrads], Sequence[ParamGrads]]:
        ctx = basic_op_ctxs[0]
        x, offsets, rows, bias, *weights = ctx.take_saved()
        grads, extra_grads = no_grads(basic_op_ctxs)
        products, dy = self.products(ctx), self.laid_out(ctx, incoming(grad_output, ctx.dtype))
        x = None if x is None else self.laid_out(ctx, x)
        self.fc.put_grads(basic_op_ctxs, grads, products, dy, x, offsets, scales=rows, plans=ctx.plans)
        del x
        if self.fc.wants_dscales(basic_op_ctxs):
            dscales = self.as_given(ctx, products.grouped_dscale(dy, bias, offsets))
            extra_grads[0] = [None, viewed(dscales, ctx.scales_shape)]
        dx = None
        if ctx.input_requires_grad:
            dx = self.as_given(ctx, products.grouped_gemm_dgrad(dy, weights, offsets, plans=ctx.plans))
            dx = viewed(dx, ctx.input_shape)
        return dx, grads, extra_grads


class GroupedLinearActivation(FusedOperation):
    """y = act(x W_gᵀ + b_g)·p, grouped or dense: one kernel forward, the pre-activation kept for backward.

    Ops after the activation are identities (Quantize without a recipe).
    """

    def __init__(self, basic_ops: Iterable[BasicOperation]) -> None:
        super().__init__(basic_ops)
        ops = self.fusible_parts()
        self.fc, at = linear_at(ops, 0)
        self.act = activation_at(ops, at)
        self.order, self.block = interleaves(self.fc, self.act)

    def keeps(self) -> dict[int, int]:
        return {0: 0, 1: self.act.at}

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: Tensor,
        *,
        basic_op_extra_inputs: Sequence[Sequence[Tensor]],
        **_: Any,
    ) -> tuple[Tensor, Sequence[Sequence[Tensor]]]:
        ctx, extras = basic_op_ctxs[0], basic_op_extra_inputs
        kernels, dtype = ctx.kernels, checked_dtype(self.fc.op, ctx, input_)
        probs = self.act.probs(extras)
        needs_grad = basic_op_ctxs[-1].requires_grad
        x, weights = as_rows(input_, dtype), ctx.held.operands(dtype, needs_grad)
        bias = self.fc.bias(basic_op_ctxs, dtype, needs_grad)
        rows = row_factor(probs, dtype)
        offsets = self.fc.offsets(kernels, x.shape[0], extras)
        if self.fc.covers_all_rows:
            rows = probs_of_tokens(rows, basic_op_ctxs[self.act.at])
        y, preact = kernels.grouped_gemm_act(
            x,
            weights,
            offsets,
            self.act.op.activation,
            bias,
            rows,
            self.act.op.glu_interleave,
            save_preact=needs_grad,
            preact_interleave=self.order,
            plans=ctx.plans,
        )
        if needs_grad:
            ctx.input_shape, ctx.dtype = input_.shape, dtype
            ctx.unchanged = Unchanged(ctx.held.weights) if ctx.input_requires_grad else None
            ctx.probs_shape = None if probs is None else probs.shape
            kept = weights if ctx.input_requires_grad else ()
            ctx.save_for_backward(x if ctx.wants[0] else None, preact, offsets, rows, *kept)
        return like_rows_of(y, input_), [()] * len(basic_op_ctxs)

    def fuser_backward(
        self, basic_op_ctxs: list[OperationContext], grad_output: Tensor, **_: Any
    ) -> tuple[Tensor | None, Sequence[ParamGrads], Sequence[ParamGrads]]:
        ctx = basic_op_ctxs[0]
        x, preact, offsets, rows, *weights = ctx.take_saved()
        grads, extra_grads = no_grads(basic_op_ctxs)
        kernels, dy = ctx.kernels, incoming(grad_output, ctx.dtype)
        dpreact, dprobs = kernels.dact(
            dy, preact, offsets, rows, self.act.op.activation, self.act.wants_dprobs(basic_op_ctxs), self.order
        )
        del preact
        self.fc.put_grads(
            basic_op_ctxs, grads, kernels, dpreact, x, offsets, glu_interleave=self.block, plans=ctx.plans
        )
        del x
        if dprobs is not None:
            extra_grads[self.act.at] = [viewed(dprobs, ctx.probs_shape)]
        dx = None
        if ctx.input_requires_grad:
            dx = viewed(
                kernels.grouped_gemm_dgrad(dpreact, weights, offsets, self.block, plans=ctx.plans), ctx.input_shape
            )
        return dx, grads, extra_grads
