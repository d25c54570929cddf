"""GroupedMLP: linear, activation, linear as three kernels forward (one for offsets) and five backward without bias."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from cute_kernels.ops import entry_points
from fusible_ops.activations import ScaledActivation
from fusible_ops.fused.parts import (
    activation_at,
    as_rows,
    like_rows_of,
    linear_at,
    no_grads,
    probs_of_tokens,
    row_factor,
    viewed,
)
from fusible_ops.groups import same_values
from fusible_ops.op import BasicOperation, FusedOperation, OperationContext, ParamGrads


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
        ops = self.parts = self.fusible_parts()
        self.fc1, self.act_at = linear_at(ops, 0)
        self.act = activation_at(ops, self.act_at)
        self.fc2, end = linear_at(ops, self.act_at + 1)
        if end != len(ops):
            raise TypeError(f"GroupedMLP takes linear, activation, linear; got {len(ops) - end} more ops")

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: Tensor,
        *,
        basic_op_extra_inputs: Sequence[Sequence[Tensor]],
        **_: Any,
    ) -> tuple[Tensor, Sequence[Sequence[Tensor]]]:
        ctx, extras = basic_op_ctxs[0], basic_op_extra_inputs
        probs = extras[self.act_at][0] if isinstance(self.act, ScaledActivation) else None
        self.fc1.op.check_input(input_, ctx.owner)
        dtype = ctx.compute_dtype(self.fc1.weight_dtype)
        needs_grad = basic_op_ctxs[-1].requires_grad
        fc2_alone = needs_grad and not basic_op_ctxs[self.fc2.at].input_requires_grad
        x, scales = as_rows(input_, dtype), self.fc2.scales(extras)
        weights1 = self.fc1.operands(basic_op_ctxs, dtype, needs_grad)
        weights2 = self.fc2.operands(basic_op_ctxs, dtype, needs_grad)
        splits1, splits2 = self.fc1.split_sizes(extras), self.fc2.split_sizes(extras)
        kernels = entry_points(x, splits1, splits2, probs, scales, weights1[0], weights2[0])
        offsets1 = self.fc1.offsets(kernels, x.shape[0], extras)
        offsets2 = offsets1 if same_values(splits1, splits2) else self.fc2.offsets(kernels, x.shape[0], extras)
        rows, factors = row_factor(probs, dtype), row_factor(scales, dtype)
        if self.fc1.covers_all_rows or offsets2 is not offsets1:
            rows = probs_of_tokens(rows, basic_op_ctxs[self.act_at])
        bias2 = self.fc2.bias(basic_op_ctxs, dtype, needs_grad)
        act, preact = kernels.grouped_gemm_act(
            x,
            weights1,
            offsets1,
            self.act.activation,
            self.fc1.bias(basic_op_ctxs, dtype, needs_grad),
            rows,
            self.act.glu_interleave,
            save_preact=needs_grad and not fc2_alone,
            zero_tail=offsets2 is not offsets1,
        )
        y = kernels.grouped_gemm(act, weights2, offsets2, bias2, factors)
        if needs_grad:
            ctx.same_offsets = offsets2 is offsets1
            ctx.unchanged = self.fc1.unchanged(basic_op_ctxs) if ctx.input_requires_grad else None
            basic_op_ctxs[self.fc2.at].unchanged = None if fc2_alone else self.fc2.unchanged(basic_op_ctxs)
            ctx.probs_require_grad = probs is not None and probs.requires_grad
            ctx.scales_require_grad = scales is not None and scales.requires_grad
            ctx.probs_shape = None if probs is None else probs.shape
            ctx.scales_shape = None if scales is None else scales.shape
            ctx.input_shape, ctx.dtype = input_.shape, dtype
            kept1 = weights1 if ctx.input_requires_grad else []
            ctx.num_weights1 = len(kept1)
            ctx.save_for_backward(
                x if ctx.wants[0] else None,
                act if fc2_alone and basic_op_ctxs[self.fc2.at].wants[0] else None,
                preact,
                offsets1,
                offsets2,
                rows,
                factors,
                bias2 if ctx.scales_require_grad else None,
                *kept1,
                *(() if fc2_alone else weights2),
            )
        return like_rows_of(y, input_), [()] * len(basic_op_ctxs)

    def fuser_backward(
        self, basic_op_ctxs: list[OperationContext], grad_output: Tensor, **_: Any
    ) -> tuple[Tensor | None, Sequence[ParamGrads], Sequence[ParamGrads]]:
        ctx = basic_op_ctxs[0]
        x, act, preact, offsets1, offsets2, rows, scales, bias2, *weights = ctx.saved_tensors
        weights1, weights2 = weights[: ctx.num_weights1], weights[ctx.num_weights1 :]
        grads, extra_grads = no_grads(self.parts, basic_op_ctxs)
        dy = as_rows(grad_output, ctx.dtype).contiguous()
        kernels = entry_points(dy, preact, offsets1, offsets2, rows, scales, *weights)
        dpreact, dprobs = None, None
        if preact is not None:
            dpreact, act, dprobs = kernels.grouped_gemm_dact(
                dy,
                weights2,
                offsets2,
                preact,
                self.act.activation,
                rows,
                need_act=basic_op_ctxs[self.fc2.at].wants[0],
                need_dprobs=ctx.probs_require_grad,
                zero_tail=not ctx.same_offsets,
            )
        self.fc2.put_grads(basic_op_ctxs, grads, kernels, dy, act, offsets2, scales=scales)
        block, dx = self.act.glu_interleave, None
        if dpreact is not None:
            self.fc1.put_grads(basic_op_ctxs, grads, kernels, dpreact, x, offsets1, glu_interleave=block)
        if ctx.input_requires_grad:
            dx = viewed(kernels.grouped_gemm_dgrad(dpreact, weights1, offsets1, block), ctx.input_shape)
        if dprobs is not None:
            extra_grads[self.act_at] = [viewed(dprobs, ctx.probs_shape)]
        if ctx.scales_require_grad:
            dscales = viewed(kernels.grouped_dscale(dy, bias2, offsets2), ctx.scales_shape)
            extra_grads[self.fc2.at] = [None, dscales]
        return dx, grads, extra_grads
