"""A linear, a GLU and a linear on Blackwell: rows padded once at either end, cuDNN Frontend's kernels between."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from cute_kernels.blackwell.rows import PaddedGroups
from fusible_ops.fused.padded_products import PaddedProducts, padded
from fusible_ops.fused.parts import (
    as_rows,
    checked_dtype,
    incoming,
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


class PaddedMLP(FusedOperation):
    """y = W2_g act(W1_g x + b1_g)·p + b2_g, as `GroupedMLP`, for kernels that want every group padded to 256 rows.

    x, probs, scales and dy are padded (`PaddedGroups`: no host sync, zeros between), y, dx and dprobs unpadded; between
    them everything stays padded. The pre-activation lies as the rows of the first weight do, and so does its gradient,
    so nothing is interleaved or de-interleaved on the way. The padded x and the activation are kept for backward. Bias
    gradients, and those of the scales of a bias, are PyTorch's: theirs are sums of atomics.

    Two linears with different split sizes pad differently; then rows move between them.
    """

    def __init__(self, basic_ops: Iterable[BasicOperation]) -> None:
        super().__init__(basic_ops)
        ops = self.fusible_parts()
        self.fc1, self.act, self.fc2 = mlp_of(ops, "PaddedMLP")

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
        fc1, fc2, activation = self.fc1, self.fc2, self.act.op.activation
        ctx, ctx2, extras = basic_op_ctxs[0], basic_op_ctxs[fc2.at], basic_op_extra_inputs
        kernels, dtype = ctx.kernels, checked_dtype(fc1.op, ctx, input_)
        needs_grad = basic_op_ctxs[-1].requires_grad
        x = as_rows(input_, dtype)
        weights1, weights2 = ctx.held.operands(dtype, needs_grad), ctx2.held.operands(dtype, needs_grad)
        first = second = PaddedGroups(fc1.offsets(ctx.formulas, x.shape[0], extras), x.shape[0])
        if not same_values(fc1.split_sizes(extras), fc2.split_sizes(extras)):
            second = PaddedGroups(fc2.offsets(ctx.formulas, x.shape[0], extras), x.shape[0])
        x = first.pad(x)
        probs = row_factor(self.act.probs(extras), dtype)
        if fc1.covers_all_rows:
            probs = probs_of_tokens(probs, basic_op_ctxs[self.act.at])
        probs, scales = padded(probs, first), padded(row_factor(fc2.scales(extras), dtype), second)
        bias1 = fc1.bias(basic_op_ctxs, dtype, needs_grad)
        act, preact = kernels.padded_gemm_act(x, weights1, first.ends, activation, bias1, probs)
        if second is not first:
            act, preact = (second.pad(first.unpad(t)) for t in (act, preact))
            probs = None if probs is None else second.pad(first.unpad(probs))
        bias2 = fc2.bias(basic_op_ctxs, dtype, needs_grad)
        y = second.unpad(kernels.padded_gemm(act, weights2, second.ends, bias2, scales))
        if needs_grad:
            upstream = ctx2.input_requires_grad
            kept1, kept2 = weights1 if ctx.input_requires_grad else [], weights2 if upstream else []
            ctx.unchanged = Unchanged(ctx.held.weights) if kept1 else None
            ctx2.unchanged = Unchanged(ctx2.held.weights) if kept2 else None
            ctx.groups, ctx.num_weights1 = (first, second), len(kept1)
            ctx.probs_shape, ctx.scales_shape = (
                None if t is None else t.shape for t in (self.act.probs(extras), fc2.scales(extras))
            )
            ctx.input_shape, ctx.dtype = input_.shape, dtype
            ctx.save_for_backward(
                x if ctx.wants[0] else None,
                act if ctx2.wants[0] else None,
                preact if upstream else None,
                probs,
                scales,
                bias2 if fc2.wants_dscales(basic_op_ctxs) else None,
                *kept1,
                *kept2,
            )
        return like_rows_of(y, input_), [()] * len(basic_op_ctxs)

    def fuser_backward(
        self, basic_op_ctxs: list[OperationContext], grad_output: Tensor, **_: Any
    ) -> tuple[Tensor | None, Sequence[ParamGrads], Sequence[ParamGrads]]:
        fc1, fc2 = self.fc1, self.fc2
        ctx = basic_op_ctxs[0]
        x, act, preact, probs, scales, bias2, *weights = ctx.take_saved()
        weights1, weights2 = weights[: ctx.num_weights1], weights[ctx.num_weights1 :]
        (first, second), kernels = ctx.groups, ctx.kernels
        grads, extra_grads = no_grads(basic_op_ctxs)
        plain = incoming(grad_output, ctx.dtype)
        dy, dpreact, dprobs, db1, dx = second.pad(plain), None, None, None, None
        if preact is not None:
            sums = self.act.wants_dprobs(basic_op_ctxs), second is first and fc1.wants_dbias(basic_op_ctxs)
            dpreact, dprobs, db1 = kernels.padded_gemm_dact(
                dy, weights2, second.ends, preact, self.act.op.activation, probs, *sums
            )
        del preact
        products = PaddedProducts(ctx, second)
        fc2.put_grads(basic_op_ctxs, grads, products, dy, act, second.padded_offsets, scales=scales)
        del act
        if dprobs is not None:
            extra_grads[self.act.at] = [viewed(second.unpad(dprobs), ctx.probs_shape)]
        if dpreact is not None:
            dpreact = dpreact if second is first else first.pad(second.unpad(dpreact))
            fc1.put_grads(basic_op_ctxs, grads, PaddedProducts(ctx, first), dpreact, x, first.padded_offsets, db=db1)
        del x
        if ctx.input_requires_grad:
            assert dpreact is not None
            dx = PaddedProducts(ctx, first).grouped_gemm_dgrad(dpreact, weights1, first.padded_offsets)
            dx = viewed(first.unpad(dx), ctx.input_shape)
        if fc2.wants_dscales(basic_op_ctxs):
            dscales = ctx.formulas.grouped_dscale(plain, bias2, second.offsets)
            extra_grads[fc2.at] = [None, viewed(dscales, ctx.scales_shape)]
        return dx, grads, extra_grads
