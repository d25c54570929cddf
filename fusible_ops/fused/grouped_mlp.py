"""GroupedMLP: linear, activation, linear as three kernels forward (one for offsets) and five backward without bias."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from cute_kernels.facts import NO_PLANS, Plans
from cute_kernels.scheduling import Sharing
from fusible_ops.fused.mlp_shortcut import MLPShortcut, mlp_shortcut
from fusible_ops.fused.parts import (
    as_rows,
    checked_dtype,
    incoming,
    interleaves,
    like_rows_of,
    mlp_of,
    no_grads,
    probs_of_tokens,
    row_factor,
    viewed,
)
from fusible_ops.groups import same_values
from fusible_ops.op import BasicOperation, FusedOperation, OperationContext, ParamGrads
from fusible_ops.parameters import Unchanged


class GroupedMLP(FusedOperation):
    """y = W2_g act(W1_g x + b1_g)·p + b2_g, grouped or dense.

    Forward: product + activation (× probs), the pre-activation kept for backward; product (+ bias, scaled by its
    scales).
    Backward: product + activation gradient (with the recomputed activation and the gradient of probs), two weight
    gradients, the input's gradient, bias gradients. The activation itself is not stored, unless the second linear alone
    is trained: then its weight gradient needs nothing else.

    The two linears may be given different split sizes; each uses its own. Only then must the tail of what lies
    between them be defined, and the kernels zero it.
    """

    def __init__(self, basic_ops: Iterable[BasicOperation]) -> None:
        super().__init__(basic_ops)
        ops = self.fusible_parts()
        self.fc1, self.act, self.fc2 = mlp_of(ops, "GroupedMLP")
        self.order, self.block = interleaves(self.fc1, self.act)

    def keeps(self) -> dict[int, int]:
        return {0: 0, 1: self.fc2.at, 2: self.act.at}

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: Tensor,
        *,
        basic_op_extra_inputs: Sequence[Sequence[Tensor]],
        **_: Any,
    ) -> tuple[Tensor, Sequence[Sequence[Tensor]]]:
        fc1, fc2 = self.fc1, self.fc2
        ctx, ctx2, extras = basic_op_ctxs[0], basic_op_ctxs[fc2.at], basic_op_extra_inputs
        kernels, dtype = ctx.kernels, checked_dtype(fc1.op, ctx, input_)
        needs_grad = basic_op_ctxs[-1].requires_grad
        fc2_alone = needs_grad and not ctx2.input_requires_grad
        x, probs, scales = as_rows(input_, dtype), self.act.probs(extras), fc2.scales(extras)
        weights1, weights2 = ctx.held.operands(dtype, needs_grad), ctx2.held.operands(dtype, needs_grad)
        splits1, splits2 = fc1.split_sizes(extras), fc2.split_sizes(extras)
        offsets1 = fc1.offsets(kernels, x.shape[0], extras)
        same_offsets = same_values(splits1, splits2)
        plans1, plans2 = (ctx.plans, ctx2.plans) if same_offsets else (NO_PLANS, NO_PLANS)
        offsets2 = offsets1 if same_offsets else fc2.offsets(kernels, x.shape[0], extras)
        rows, factors = row_factor(probs, dtype), row_factor(scales, dtype)
        if fc1.covers_all_rows or not same_offsets:
            rows = probs_of_tokens(rows, basic_op_ctxs[self.act.at])
        bias1, bias2 = fc1.bias(basic_op_ctxs, dtype, needs_grad), fc2.bias(basic_op_ctxs, dtype, needs_grad)
        keeps = needs_grad and not fc2_alone
        y, act, preact = self.products(
            kernels, x, weights1, offsets1, bias1, rows, keeps, plans1, weights2, offsets2, bias2, factors, plans2
        )
        if needs_grad:
            kept1, kept2 = weights1 if ctx.input_requires_grad else [], [] if fc2_alone else weights2
            ctx.unchanged = Unchanged(ctx.held.weights) if kept1 else None
            ctx2.unchanged = Unchanged(ctx2.held.weights) if kept2 else None
            ctx.same_offsets, ctx.num_weights1 = same_offsets, len(kept1)
            ctx.probs_shape = None if probs is None else probs.shape
            ctx.scales_shape = None if scales is None else scales.shape
            ctx.input_shape, ctx.dtype = input_.shape, dtype
            ctx.save_for_backward(
                x if ctx.wants[0] else None,
                act if fc2_alone and ctx2.wants[0] else None,
                preact,
                offsets1,
                None if same_offsets else offsets2,
                rows,
                factors,
                bias2 if fc2.wants_dscales(basic_op_ctxs) else None,
                *kept1,
                *kept2,
            )
        return like_rows_of(y, input_), [()] * len(basic_op_ctxs)

    def products(
        self,
        kernels: Any,
        x: Tensor,
        weights1: Sequence[Tensor],
        offsets1: Tensor,
        bias1: Tensor | None,
        rows: Tensor | None,
        keeps: bool,
        plans1: Plans,
        weights2: Sequence[Tensor],
        offsets2: Tensor,
        bias2: Tensor | None,
        factors: Tensor | None,
        plans2: Plans,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """(y, activation, pre-activation if it `keeps` it) of rows x. Equal offsets are one tensor."""
        activation, block, same = self.act.op.activation, self.act.op.glu_interleave, offsets1 is offsets2
        y = x.new_empty(x.shape[0], self.fc2.out_features) if same else None
        act, preact = kernels.grouped_gemm_act(
            x, weights1, offsets1, activation, bias1, rows, block, keeps, not same, y, self.order, plans=plans1
        )
        if y is None:
            y = kernels.grouped_gemm(act, weights2, offsets2, bias2, factors, plans=plans2)
        else:
            kernels.grouped_gemm_(y, act, weights2, offsets2, bias2, factors, plans=plans2)
        return y, act, preact

    def shortcut(
        self,
        ctxs: Sequence[OperationContext],
        x: Tensor,
        extra_inputs: Sequence[Tensor],
        sharing: Sharing,
        title: str,
    ) -> MLPShortcut | None:
        return mlp_shortcut(self, ctxs, x, extra_inputs, sharing, title)

    def fuser_backward(
        self, basic_op_ctxs: list[OperationContext], grad_output: Tensor, **_: Any
    ) -> tuple[Tensor | None, Sequence[ParamGrads], Sequence[ParamGrads]]:
        fc1, act_op, fc2 = self.fc1, self.act.op, self.fc2
        ctx, ctx2 = basic_op_ctxs[0], basic_op_ctxs[fc2.at]
        x, act, preact, offsets1, offsets2, rows, scales, bias2, *weights = ctx.take_saved()
        weights1, weights2 = weights[: ctx.num_weights1], weights[ctx.num_weights1 :]
        offsets2 = offsets1 if ctx.same_offsets else offsets2
        grads, extra_grads = no_grads(basic_op_ctxs)
        kernels, dy = ctx.kernels, incoming(grad_output, ctx.dtype)
        plans1, plans2 = (ctx.plans, ctx2.plans) if ctx.same_offsets else (NO_PLANS, NO_PLANS)
        block, dpreact, dprobs, dx = self.block, None, None, None
        if preact is not None:
            dpreact, act, dprobs = kernels.grouped_gemm_dact(
                dy,
                weights2,
                offsets2,
                preact,
                act_op.activation,
                rows,
                need_act=ctx2.wants[0],
                need_dprobs=self.act.wants_dprobs(basic_op_ctxs),
                zero_tail=not ctx.same_offsets,
                preact_interleave=self.order,
                plans=plans2,
            )
        del preact
        fc2.put_grads(basic_op_ctxs, grads, kernels, dy, act, offsets2, scales=scales, plans=plans2)
        del act
        if dpreact is not None:
            fc1.put_grads(basic_op_ctxs, grads, kernels, dpreact, x, offsets1, glu_interleave=block, plans=plans1)
        del x
        if ctx.input_requires_grad:
            dx = viewed(kernels.grouped_gemm_dgrad(dpreact, weights1, offsets1, block, plans=plans1), ctx.input_shape)
        if dprobs is not None:
            extra_grads[self.act.at] = [viewed(dprobs, ctx.probs_shape)]
        if fc2.wants_dscales(basic_op_ctxs):
            extra_grads[fc2.at] = [None, viewed(kernels.grouped_dscale(dy, bias2, offsets2), ctx.scales_shape)]
        return dx, grads, extra_grads
