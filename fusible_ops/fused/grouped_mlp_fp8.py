"""GroupedMLPFp8: linear, activation, linear in E4M3 blocks: four kernels forward and five backward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from fusible_ops.basic import Quantize
from fusible_ops.fused.fp8_parts import (
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
    like_rows_of,
    linear_at,
    no_grads,
    probs_of_tokens,
    row_factor,
    viewed,
)
from fusible_ops.fused.unfused import Unfused
from fusible_ops.groups import Groups, same_values
from fusible_ops.op import BasicOperation, FusedOperation, OperationContext, ParamGrads
from fusible_ops.quantized_linear import QuantizedLinear
from fusible_ops.quantized_parameters import read_by_backward


class GroupedMLPFp8(FusedOperation):
    """y = W2_g act(W1_g x + b1_g)·p + b2_g, grouped or dense, under `Float8BlockScaling`.

    Forward: quantise x; product + activation (× probs) + quantise, the pre-activation kept in BF16; product (+ bias).
    Backward: quantise dy; product + activation gradient + quantise (with the gradients of probs and bias); two weight
    gradients; the input's gradient. Every quantise gives both orientations in one pass, and only the transposed one of
    x and of the activation is saved. A `Quantize` between activation and second linear changes nothing.

    Two linears that are given different split sizes run as they do unfused: a block of one's groups may span two of the
    other's.
    """

    def __init__(self, basic_ops: Iterable[BasicOperation]) -> None:
        super().__init__(basic_ops)
        ops = self.fusible_parts()
        self.fc1, at = linear_at(ops, 0)
        self.act = activation_at(ops, at)
        middle = at + 1
        if isinstance(ops[middle], Quantize):
            middle += 1
        self.fc2, end = linear_at(ops, middle)
        if end != len(ops):
            raise TypeError(f"GroupedMLPFp8 takes linear, activation, linear; got {len(ops) - end} more ops")
        linears = QuantizedLinear(ops[:at]), QuantizedLinear(ops[self.fc2.at :])
        self.unfused = Unfused([linears[0], *ops[at : self.fc2.at], linears[1]])

    def keeps(self) -> dict[int, int]:
        return {2: self.act.at, 6: 0, 7: 0, 8: self.fc2.at, 9: self.fc2.at}

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: Tensor,
        *,
        basic_op_extra_inputs: Sequence[Sequence[Tensor]],
        basic_op_kwargs: Sequence[dict[str, Any]],
        **_: Any,
    ) -> tuple[Tensor, Sequence[Sequence[Tensor]]]:
        ctxs, extras, ctx = basic_op_ctxs, basic_op_extra_inputs, basic_op_ctxs[0]
        splits = self.fc1.split_sizes(extras)
        ctx.same_splits = same_values(splits, self.fc2.split_sizes(extras))
        if not ctx.same_splits:
            return self.unfused.forward(ctxs, input_, extras, basic_op_kwargs)
        kernels, dtype = ctx.kernels, checked_dtype(self.fc1.op, ctx, input_)
        recipe, records = ctx.recipe, ctxs[-1].requires_grad
        assert recipe is not None
        trains1, passes1 = (records and flag for flag in (ctx.wants[0], ctx.input_requires_grad))
        trains2, passes2 = (
            records and flag for flag in (ctxs[self.fc2.at].wants[0], ctxs[self.fc2.at].input_requires_grad)
        )
        probs, scales = self.act.probs(extras), self.fc2.scales(extras)
        rows, factors = row_factor(probs, dtype), row_factor(scales, dtype)
        if self.fc1.covers_all_rows:
            rows = probs_of_tokens(rows, ctxs[self.act.at])
        groups, padded = padded_groups(kernels, splits, input_)
        offsets = groups.offsets
        w1 = weights_of(self.fc1, ctxs, recipe, kernels, passes1, records)
        w2 = weights_of(self.fc2, ctxs, recipe, kernels, passes2, records)
        bias1, bias2 = self.fc1.bias(ctxs, dtype, records), self.fc2.bias(ctxs, dtype, records)
        x = copies_of(input_, groups, padded, recipe.operand_format("input"), kernels, True, trains1, False)
        act, preact = kernels.fp8_grouped_gemm_act(
            x.data,
            x.scale,
            w1.data,
            w1.scale,
            offsets,
            padded,
            self.act.op.activation,
            bias1,
            rows,
            rowwise=True,
            columnwise=trains2,
            save_preact=passes2,
            power_of_two=power_of_two(recipe),
        )
        y = kernels.fp8_grouped_gemm(act.data, act.scale, w2.data, w2.scale, offsets, bias2, factors)
        if records:
            ctx.splits, ctx.version, ctx.input_shape = groups.splits, groups.version, input_.shape
            ctx.probs_shape = None if probs is None else probs.shape
            ctx.scales_shape = None if scales is None else scales.shape
            for own, passes in ((ctx, passes1), (ctxs[self.fc2.at], passes2)):
                own.unchanged = read_by_backward(own.held) if passes else None
            kept1, kept2 = kept_of_weights(self.fc1, ctxs, w1), kept_of_weights(self.fc2, ctxs, w2)
            turned_copies = (x.data_t, x.scale_t, act.data_t, act.scale_t, *kept1, *kept2)
            kept_bias = bias2 if self.fc2.wants_dscales(ctxs) else None
            ctx.save_for_backward(offsets, padded, preact, rows, factors, kept_bias, *turned_copies)
        return like_rows_of(y, input_), [()] * len(ctxs)

    def fuser_backward(
        self, basic_op_ctxs: list[OperationContext], grad_output: Tensor, **_: Any
    ) -> tuple[Tensor | None, Sequence[ParamGrads], Sequence[ParamGrads]]:
        ctxs, ctx, recipe = basic_op_ctxs, basic_op_ctxs[0], basic_op_ctxs[0].recipe
        grads, extra_grads = no_grads(ctxs)
        if not ctx.same_splits:
            return self.unfused.backward(ctxs, grad_output, grads, extra_grads), grads, extra_grads
        assert recipe is not None
        offsets, padded, preact, rows, factors, bias2, *kept = ctx.take_saved()
        kernels = ctx.kernels
        x, act = turned(*kept[:2]), turned(*kept[2:4])
        w1 = turned_weights(self.fc1, ctxs, recipe, kernels, *kept[4:6])
        w2 = turned_weights(self.fc2, ctxs, recipe, kernels, *kept[6:])
        del kept
        groups, format = Groups(offsets, ctx.splits, ctx.version), recipe.operand_format("grad_output")
        dy, db = graded(self.fc2, ctxs, kernels, grad_output, groups, padded, format, factors, w2 is not None, act)
        if self.fc2.wants_dscales(ctxs):
            dscales = kernels.grouped_dscale(plain_rows(grad_output), bias2, offsets)
            extra_grads[self.fc2.at] = [None, viewed(dscales, ctx.scales_shape)]
        put_grads(self.fc2, ctxs, grads, kernels, turned(dy.data_t, dy.scale_t), act, padded, db)
        del act
        if w2 is None:
            return None, grads, extra_grads
        wants_db = self.fc1.wants_dbias(ctxs)
        dpreact, dprobs = kernels.fp8_grouped_gemm_dact(
            dy.data,
            dy.scale,
            w2.data,
            w2.scale,
            offsets,
            padded,
            preact,
            self.act.op.activation,
            rows,
            rowwise=w1 is not None,
            columnwise=x is not None or wants_db or w1 is None,
            need_dprobs=self.act.wants_dprobs(ctxs),
            need_dbias=wants_db,
            power_of_two=power_of_two(recipe),
        )
        if dprobs is not None:
            extra_grads[self.act.at] = [viewed(dprobs, ctx.probs_shape)]
        del dy, preact
        put_grads(self.fc1, ctxs, grads, kernels, turned(dpreact.data_t, dpreact.scale_t), x, padded, dpreact.sums)
        del x
        dx = None
        if w1 is not None:
            halves = self.act.op.activation.halves
            dx = kernels.fp8_grouped_gemm(dpreact.data, dpreact.scale, w1.data, w1.scale, offsets, halves=halves)
            dx = viewed(dx, ctx.input_shape)
        return dx, grads, extra_grads
