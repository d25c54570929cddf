"""A linear alone, or a linear, its activation and a Quantize, in E4M3 blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from fusible_ops.fused.fp8_parts import (
    as_quantized_tensor,
    copies_of,
    graded,
    kept_of_weights,
    padded_groups,
    plain_rows,
    power_of_two,
    put_grads,
    turned,
    turned_weights,
    weights_of,
)
from fusible_ops.fused.parts import (
    activation_at,
    checked_dtype,
    linear_at,
    no_grads,
    probs_of_tokens,
    row_factor,
    viewed,
)
from fusible_ops.fused.quantized_one import Call, QuantizedOne
from fusible_ops.groups import Groups
from fusible_ops.op import BasicOperation, FusedOperation, OperationContext, ParamGrads
from fusible_ops.quantized_parameters import read_by_backward


class GroupedLinearFp8(QuantizedOne):
    """A `QuantizedOne` under `Float8BlockScaling`.

    Forward: quantise x in both orientations; product. Backward: quantise dy likewise, with its sums; two products.
    """

    def product(
        self, call: Call, bias: Tensor | None, trains: bool, passes: bool
    ) -> tuple[Tensor, Sequence[Tensor | None]]:
        recipe, kernels = call.recipe, call.kernels
        w = weights_of(self.fc, call.ctxs, recipe, kernels, passes, call.records)
        format = recipe.operand_format("input")
        x = copies_of(call.rows, call.groups, call.padded, format, kernels, True, trains, False)
        y = kernels.fp8_grouped_gemm(x.data, x.scale, w.data, w.scale, call.groups.offsets, bias, call.factors)
        return y, (x.data_t, x.scale_t, *kept_of_weights(self.fc, call.ctxs, w))

    def gradients(self, call: Call, kept: list[Tensor | None], grads: list[ParamGrads]) -> Tensor | None:
        ctxs, grad, groups, padded, recipe, kernels, _, factors = call
        x, w = turned(*kept[:2]), turned_weights(self.fc, ctxs, recipe, kernels, *kept[2:])
        kept.clear()
        format = recipe.operand_format("grad_output")
        dy, db = graded(self.fc, ctxs, kernels, grad, groups, padded, format, factors, w is not None, x)
        put_grads(self.fc, ctxs, grads, kernels, turned(dy.data_t, dy.scale_t), x, padded, db)
        del x
        return None if w is None else kernels.fp8_grouped_gemm(dy.data, dy.scale, *w, groups.offsets)


class GroupedLinearActivationFp8(FusedOperation):
    """y = quantised(act(x W_gᵀ + b_g)·p), grouped or dense, under `Float8BlockScaling`, as a `QuantizedTensor`.

    Forward: quantise x; product + activation (× probs) + quantise in both orientations. Backward: activation gradient,
    in BF16; quantise it, with the bias gradient; the input's and the weight gradient.
    """

    def __init__(self, basic_ops: Iterable[BasicOperation]) -> None:
        super().__init__(basic_ops)
        ops = self.fusible_parts()
        self.fc, at = linear_at(ops, 0)
        self.act = activation_at(ops, at)

    def keeps(self) -> dict[int, int]:
        return {2: self.act.at, 4: 0, 5: 0}

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
        splits, probs = self.fc.split_sizes(extras), self.act.probs(extras)
        rows = row_factor(probs, dtype)
        if self.fc.covers_all_rows:
            rows = probs_of_tokens(rows, ctxs[self.act.at])
        groups, padded = padded_groups(kernels, splits, input_, recipe)
        w = weights_of(self.fc, ctxs, recipe, kernels, passes, records)
        format = recipe.operand_format("input")
        x = copies_of(input_, groups, padded, format, kernels, True, trains, False)
        act, preact = kernels.fp8_grouped_gemm_act(
            x.data,
            x.scale,
            w.data,
            w.scale,
            groups.offsets,
            padded,
            self.act.op.activation,
            self.fc.bias(ctxs, dtype, records),
            rows,
            rowwise=True,
            columnwise=records,
            save_preact=records,
            power_of_two=power_of_two(recipe),
        )
        if records:
            ctx.splits, ctx.version, ctx.input_shape = groups.splits, groups.version, input_.shape
            ctx.probs_shape = None if probs is None else probs.shape
            ctx.unchanged = read_by_backward(ctx.held) if passes else None
            kept = kept_of_weights(self.fc, ctxs, w)
            ctx.save_for_backward(groups.offsets, padded, preact, rows, x.data_t, x.scale_t, *kept)
        width = self.fc.out_features // self.act.op.activation.halves
        return as_quantized_tensor(act, (*input_.shape[:-1], width), format, groups), [()] * len(ctxs)

    def fuser_backward(
        self, basic_op_ctxs: list[OperationContext], grad_output: Tensor, **_: Any
    ) -> tuple[Tensor | None, Sequence[ParamGrads], Sequence[ParamGrads]]:
        ctxs, ctx, recipe = basic_op_ctxs, basic_op_ctxs[0], basic_op_ctxs[0].recipe
        assert recipe is not None
        grads, extra_grads = no_grads(ctxs)
        offsets, padded, preact, rows, *kept = ctx.take_saved()
        grad, kernels = plain_rows(grad_output), ctx.kernels
        x, w = turned(*kept[:2]), turned_weights(self.fc, ctxs, recipe, kernels, *kept[2:])
        groups, format = Groups(offsets, ctx.splits, ctx.version), recipe.operand_format("grad_output")
        dpreact, dprobs = kernels.dact(
            grad, preact, offsets, rows, self.act.op.activation, need_dprobs=self.act.wants_dprobs(ctxs)
        )
        del grad, preact
        if dprobs is not None:
            extra_grads[self.act.at] = [viewed(dprobs, ctx.probs_shape)]
        dy, db = graded(self.fc, ctxs, kernels, dpreact, groups, padded, format, None, w is not None, x)
        put_grads(self.fc, ctxs, grads, kernels, turned(dy.data_t, dy.scale_t), x, padded, db)
        del x, kept
        dx = None
        if w is not None:
            dx = viewed(kernels.fp8_grouped_gemm(dy.data, dy.scale, *w, offsets), ctx.input_shape)
        return dx, grads, extra_grads
