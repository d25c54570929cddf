"""PaddedMLPScaled: a linear, an activation and a linear in MXFP8 or NVFP4 on Blackwell, by cuDNN Frontend's kernels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from cute_kernels.blackwell.rows import PaddedGroups
from fusible_ops.fused.fp8_parts import plain_rows
from fusible_ops.fused.padded_products import padded
from fusible_ops.fused.padded_scaled_parts import (
    Scaled,
    ScaledOperation,
    kept_of_weights,
    products_of,
    put_grads,
    put_own_grads,
    turned_weights,
    weights_of,
)
from fusible_ops.fused.parts import (
    Extras,
    checked_dtype,
    like_rows_of,
    mlp_of,
    no_grads,
    probs_of_tokens,
    row_factor,
    viewed,
)
from fusible_ops.fused.unfused import Unfused
from fusible_ops.groups import same_values
from fusible_ops.op import BasicOperation, OperationContext, ParamGrads
from fusible_ops.quantized_linear import QuantizedLinear
from fusible_ops.quantized_parameters import read_by_backward
from fusible_ops.quantizer import Quantizer
from fusible_ops.sharing import margin_of


class PaddedMLPScaled(ScaledOperation):
    """y = W2_g act(W1_g x + b1_g)·p + b2_g under `MXFP8BlockScaling` or `NVFP4BlockScaling`, on rows padded as in
    `PaddedMLP`; act is a GLU or a squared ReLU.

    Forward: quantise x; product + activation (× probs) + quantise, the pre-activation kept in BF16; product (+ bias).
    Backward: quantise dy; product + activation gradient + quantise; two weight gradients; the input's gradient. Weights
    are quantised once per update; those that are held in the recipe's format are taken as they are. Of x and of the
    activation only the copies along the rows are kept, of weights only the column-wise ones. x, dy and weights are
    quantised in PyTorch, bias gradients summed there. In MXFP8 the kernels quantise the activation and its gradient,
    but that of the activation is PyTorch's where FC1 has a bias; in NVFP4 PyTorch quantises both (`Nvfp4Products`).

    Random bits are drawn in forward, as unfused. Two linears that are given different split sizes run as they do
    unfused.
    """

    def __init__(self, basic_ops: Iterable[BasicOperation]) -> None:
        super().__init__(basic_ops)
        ops = self.fusible_parts()
        self.fc1, self.act, self.fc2 = mlp_of(ops, "PaddedMLPScaled")
        self.unfused = Unfused(
            [QuantizedLinear(ops[: self.act.at]), ops[self.act.at], QuantizedLinear(ops[self.fc2.at :])]
        )

    def keeps(self) -> dict[int, int]:
        return {**dict.fromkeys(range(3), 0), **dict.fromkeys(range(3, 6), self.fc2.at), 6: self.act.at}

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: Tensor,
        *,
        basic_op_extra_inputs: Sequence[Sequence[Tensor]],
        basic_op_kwargs: Sequence[dict[str, Any]],
        **_: Any,
    ) -> tuple[Tensor, Sequence[Sequence[Tensor]]]:
        ctxs, extras, fc1, fc2 = basic_op_ctxs, basic_op_extra_inputs, self.fc1, self.fc2
        ctx, ctx2 = ctxs[0], ctxs[fc2.at]
        ctx.same_splits = same_values(fc1.split_sizes(extras), fc2.split_sizes(extras))
        if not ctx.same_splits:
            return self.unfused.forward(ctxs, input_, extras, basic_op_kwargs)
        dtype, recipe = checked_dtype(fc1.op, ctx, input_), ctx.recipe
        assert recipe is not None
        records = ctxs[-1].requires_grad
        trains1, passes1 = (records and flag for flag in (ctx.wants[0], ctx.input_requires_grad))
        trains2, passes2 = (records and flag for flag in (ctx2.wants[0], ctx2.input_requires_grad))
        if trains1 or trains2:
            self.check_margin(recipe, margin_of(ctx.kernels))
        rows = plain_rows(input_)
        groups = PaddedGroups(fc1.offsets(ctx.formulas, rows.shape[0], extras), rows.shape[0])
        products = products_of(ctx, groups)
        factors = row_factor(fc2.scales(extras), dtype)
        bias1, bias2 = fc1.bias(ctxs, dtype, records), fc2.bias(ctxs, dtype, records)
        probs = self._probs(ctxs, extras, groups, bias1 is not None)
        (w1, w1_t), (w2, w2_t) = (
            weights_of(part, ctxs, recipe.operand_format("weight"), passes, records)
            for part, passes in ((fc1, passes1), (fc2, passes2))
        )
        x, quantizer = groups.pad(rows), Quantizer(recipe.operand_format("input"))
        act, act_t, preact = products.gemm_act(
            products.quantize(x, quantizer), w1, self.act.op.activation, bias1, probs, quantizer, trains2
        )
        y = products.gemm(act, w2, bias2, padded(factors, groups))
        if records:
            ctx.groups, ctx.input_shape = groups, input_.shape
            ctx.probs_shape, ctx.scales_shape = (
                None if t is None else t.shape for t in (self.act.probs(extras), fc2.scales(extras))
            )
            for part, last, passes in ((fc1, self.act.at - 1, passes1), (fc2, -1, passes2)):
                own = ctxs[part.at]
                own.unchanged = read_by_backward(own.held) if passes else None
                own.grad_quantizer = None
                if ctxs[last].requires_grad:
                    own.grad_quantizer = part.op.quantizer(recipe, "grad_output", input_.device)
            ctx.save_for_backward(
                *(products.quantize(x, quantizer, True) if trains1 else Scaled()),
                *act_t,
                preact if passes2 else None,
                *kept_of_weights(fc1, ctxs, w1_t),
                *kept_of_weights(fc2, ctxs, w2_t),
                probs,
                factors,
                bias2 if fc2.wants_dscales(ctxs) else None,
            )
        return like_rows_of(groups.unpad(y), input_), [()] * len(ctxs)

    def fuser_backward(
        self, basic_op_ctxs: list[OperationContext], grad_output: Tensor, **_: Any
    ) -> tuple[Tensor | None, Sequence[ParamGrads], Sequence[ParamGrads]]:
        ctxs, ctx, fc1, fc2 = basic_op_ctxs, basic_op_ctxs[0], self.fc1, self.fc2
        grads, extra_grads = no_grads(ctxs)
        if not ctx.same_splits:
            return self.unfused.backward(ctxs, grad_output, grads, extra_grads), grads, extra_grads
        saved = ctx.take_saved()
        x, act = Scaled(*saved[:3]), Scaled(*saved[3:6])
        w1, w2 = (turned_weights(part, ctxs, Scaled(*saved[at : at + 3])) for part, at in ((fc1, 7), (fc2, 10)))
        preact, (probs, factors, bias2) = saved[6], saved[13:]
        del saved
        groups, products, rows = ctx.groups, products_of(ctx, ctx.groups), plain_rows(grad_output)
        dy = groups.pad(rows)
        put_own_grads(fc2, ctxs, (grads, extra_grads), products, rows, dy, act, factors, bias2)
        del act
        if preact is None:
            return None, grads, extra_grads
        dpreact, dpreact_t, dprobs, db1 = products.gemm_dact(
            products.quantize(dy, ctxs[fc2.at].grad_quantizer),
            w2,
            preact,
            self.act.op.activation,
            probs,
            self.act.wants_dprobs(ctxs),
            fc1.wants_dbias(ctxs),
            ctx.grad_quantizer,
            (bool(w1), bool(x)),
        )
        del dy, preact
        if dprobs is not None:
            extra_grads[self.act.at] = [viewed(groups.unpad(dprobs), ctx.probs_shape)]
        if x or db1 is not None:
            put_grads(fc1, ctxs, grads, products, dpreact_t, x, db1)
        del x, dpreact_t
        dx = viewed(groups.unpad(products.gemm(dpreact, w1)), ctx.input_shape) if w1 else None
        return dx, grads, extra_grads

    def _probs(
        self, ctxs: list[OperationContext], extras: Extras, groups: PaddedGroups, has_bias: bool
    ) -> Tensor | None:
        """The probs of padded rows, FP32 [M]. Where an activation of nothing but a bias could join a block or a maximum
        of the tokens', padding has a prob of zero.
        """
        probs = self.act.probs(extras)
        if probs is None:
            return groups.tokens() if has_bias else None
        flat = row_factor(probs, ctxs[0].compute_dtype(self.fc1.weight_dtype))
        if self.fc1.covers_all_rows:
            flat = probs_of_tokens(flat, ctxs[self.act.at])
        return padded(flat, groups)
