"""PaddedMLPMxfp8: a linear, a GLU and a linear in MXFP8 on Blackwell, by cuDNN Frontend's kernels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from cute_kernels.blackwell.mxfp8_reference import quantize_rows
from cute_kernels.blackwell.rows import PaddedGroups
from fusible_ops.fused.fp8_parts import plain_rows
from fusible_ops.fused.padded_mxfp8_parts import along_rows, put_grads, put_own_grads, weights_of
from fusible_ops.fused.parts import checked_dtype, like_rows_of, mlp_of, no_grads, row_factor, viewed
from fusible_ops.fused.unfused import Unfused
from fusible_ops.groups import same_values
from fusible_ops.op import BasicOperation, FusedOperation, OperationContext, ParamGrads
from fusible_ops.quantized_linear import QuantizedLinear
from fusible_ops.quantized_parameters import read_by_backward


class PaddedMLPMxfp8(FusedOperation):
    """y = W2_g act(W1_g x + b1_g)·p + b2_g, grouped, under `MXFP8BlockScaling`, on rows padded as in `PaddedMLP`.

    Forward: quantise x; product + activation (× probs) + quantise, the pre-activation kept in BF16; product (+ bias).
    Backward: quantise dy; product + activation gradient + quantise; two weight gradients; the input's gradient. Weights
    are quantised once per update; those that are held in MXFP8 are taken as they are. Of x and of the activation only
    the copies along the rows are kept, of weights only the column-wise ones. x, dy and weights are quantised in
    PyTorch, bias gradients summed there; for that of FC1 the activation's gradient is PyTorch's too.

    Two linears that are given different split sizes run as they do unfused.
    """

    def __init__(self, basic_ops: Iterable[BasicOperation]) -> None:
        super().__init__(basic_ops)
        ops = self.fusible_parts()
        self.fc1, self.act, self.fc2 = mlp_of(ops, "PaddedMLPMxfp8")
        self.unfused = Unfused(
            [QuantizedLinear(ops[: self.act.at]), ops[self.act.at], QuantizedLinear(ops[self.fc2.at :])]
        )

    def keeps(self) -> dict[int, int]:
        return {0: 0, 1: 0, 2: self.fc2.at, 3: self.fc2.at, 4: self.act.at}

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: Tensor,
        *,
        basic_op_extra_inputs: Sequence[Sequence[Tensor]],
        basic_op_kwargs: Sequence[dict[str, Any]],
        **_: Any,
    ) -> tuple[Tensor, Sequence[Sequence[Tensor]]]:
        ctxs, extras = basic_op_ctxs, basic_op_extra_inputs
        ctx, ctx2 = ctxs[0], ctxs[self.fc2.at]
        ctx.same_splits = same_values(self.fc1.split_sizes(extras), self.fc2.split_sizes(extras))
        if not ctx.same_splits:
            return self.unfused.forward(ctxs, input_, extras, basic_op_kwargs)
        kernels, dtype, recipe = ctx.kernels, checked_dtype(self.fc1.op, ctx, input_), ctx.recipe
        assert recipe is not None
        records = ctxs[-1].requires_grad
        trains1, passes1 = (records and flag for flag in (ctx.wants[0], ctx.input_requires_grad))
        trains2, passes2 = (records and flag for flag in (ctx2.wants[0], ctx2.input_requires_grad))
        rows = plain_rows(input_)
        groups = PaddedGroups(self.fc1.offsets(ctx.formulas, rows.shape[0], extras), rows.shape[0])
        probs, scales = self.act.probs(extras), self.fc2.scales(extras)
        factors = row_factor(scales, dtype)
        padded_probs, padded_scales = (
            None if t is None else groups.pad(t.float()) for t in (row_factor(probs, dtype), factors)
        )
        format = recipe.operand_format("weight")
        w1, w2 = (
            weights_of(part, ctxs, format, passes, records)
            for part, passes in ((self.fc1, passes1), (self.fc2, passes2))
        )
        bias1, bias2 = self.fc1.bias(ctxs, dtype, records), self.fc2.bias(ctxs, dtype, records)
        x = groups.pad(rows)
        *act, act_t, act_t_scale, preact = kernels.padded_mxfp8_gemm_act(
            *quantize_rows(x, groups.ends), *w1[:2], groups.ends, self.act.op.activation, bias1, padded_probs
        )
        y = groups.unpad(kernels.padded_mxfp8_gemm(*act, *w2[:2], groups.ends, bias2, padded_scales))
        if records:
            ctx.groups, ctx.input_shape, ctx.num_weights1 = groups, input_.shape, len(w1) - 2
            ctx.probs_shape, ctx.scales_shape = (None if t is None else t.shape for t in (probs, scales))
            for own, passes in ((ctx, passes1), (ctx2, passes2)):
                own.unchanged = read_by_backward(own.held) if passes else None
            ctx.save_for_backward(
                *(quantize_rows(x, groups.ends, True) if trains1 else (None, None)),
                *((act_t, act_t_scale) if trains2 else (None, None)),
                preact if passes2 else None,
                padded_probs,
                factors,
                bias2 if self.fc2.wants_dscales(ctxs) else None,
                *w1[2:],
                *w2[2:],
            )
        return like_rows_of(y, input_), [()] * len(ctxs)

    def fuser_backward(
        self, basic_op_ctxs: list[OperationContext], grad_output: Tensor, **_: Any
    ) -> tuple[Tensor | None, Sequence[ParamGrads], Sequence[ParamGrads]]:
        ctxs, ctx = basic_op_ctxs, basic_op_ctxs[0]
        grads, extra_grads = no_grads(ctxs)
        if not ctx.same_splits:
            return self.unfused.backward(ctxs, grad_output, grads, extra_grads), grads, extra_grads
        x, x_scale, act, act_scale, preact, probs, factors, bias2, *weights = ctx.take_saved()
        w1, w2 = weights[: ctx.num_weights1], weights[ctx.num_weights1 :]
        del weights
        groups, kernels, ends = ctx.groups, ctx.kernels, ctx.groups.ends
        rows = plain_rows(grad_output)
        dy = groups.pad(rows)
        put_own_grads(self.fc2, ctxs, (grads, extra_grads), rows, dy, along_rows(act, act_scale), factors, bias2)
        del act, act_scale
        if preact is None:
            return None, grads, extra_grads
        *dpreact, dpreact_t, dpreact_t_scale, dprobs, db1 = kernels.padded_mxfp8_gemm_dact(
            *quantize_rows(dy, ends),
            w2[0].mT,
            w2[1],
            ends,
            preact,
            self.act.op.activation,
            probs,
            self.act.wants_dprobs(ctxs),
            self.fc1.wants_dbias(ctxs),
        )
        del dy, preact
        if dprobs is not None:
            extra_grads[self.act.at] = [viewed(groups.unpad(dprobs), ctx.probs_shape)]
        if x is not None:
            put_grads(self.fc1, ctxs, grads, along_rows(dpreact_t, dpreact_t_scale), along_rows(x, x_scale), db1)
        del x, x_scale, dpreact_t, dpreact_t_scale
        dx = None
        if w1:
            dx = kernels.padded_mxfp8_gemm(*dpreact, w1[0].mT, w1[1], ends)
            dx = viewed(groups.unpad(dx), ctx.input_shape)
        return dx, grads, extra_grads
