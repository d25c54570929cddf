"""A linear alone in MXFP8 or NVFP4 on Blackwell."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from cute_kernels.blackwell.rows import PaddedGroups
from cute_kernels.quantization.formats import Format
from fusible_ops.fused.fp8_parts import plain_rows
from fusible_ops.fused.padded_products import padded
from fusible_ops.fused.padded_scaled_parts import (
    Scaled,
    ScaledOperation,
    kept_of_weights,
    products_of,
    put_own_grads,
    turned_weights,
    weights_of,
)
from fusible_ops.fused.parts import checked_dtype, like_rows_of, linear_at, no_grads, row_factor, viewed
from fusible_ops.fused.unfused import Unfused
from fusible_ops.op import BasicOperation, OperationContext, ParamGrads
from fusible_ops.quantized_linear import QuantizedLinear
from fusible_ops.quantized_parameters import read_by_backward
from fusible_ops.quantized_tensor import QuantizedTensor
from fusible_ops.quantizer import Quantizer, is_unrounded
from fusible_ops.recipe import Recipe
from fusible_ops.sharing import margin_of


class PaddedLinearScaled(ScaledOperation):
    """y = x W_gᵀ (+ s·b_g), grouped or dense, under `MXFP8BlockScaling` or `NVFP4BlockScaling`: what `QuantizedLinear`
    means, on rows padded as in `PaddedLinear`.

    Forward: quantise x; product. Backward: quantise dy; the weight gradient; the input's gradient. Weights are
    quantised and kept as in `PaddedMLPScaled`, and so is x. An input that is quantised already runs as it does unfused.
    """

    def __init__(self, basic_ops: Iterable[BasicOperation]) -> None:
        super().__init__(basic_ops)
        self.fc, _ = linear_at(self.fusible_parts(), 0)
        self.unfused = Unfused([QuantizedLinear(self.fusible_parts())])

    def input_format(self, recipe: Recipe) -> Format | None:
        return recipe.operand_format("input")

    def grad_output_format(self, recipe: Recipe) -> Format | None:
        return recipe.operand_format("grad_output")

    def keeps(self) -> dict[int, int]:
        return dict.fromkeys(range(3), 0)

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
        ctx.is_fused = not isinstance(input_, QuantizedTensor)
        if not ctx.is_fused:
            return self.unfused.forward(ctxs, input_, extras, basic_op_kwargs)
        dtype, recipe = checked_dtype(self.fc.op, ctx, input_), ctx.recipe
        assert recipe is not None
        records = ctxs[-1].requires_grad
        trains, passes = (records and flag for flag in (ctx.wants[0], ctx.input_requires_grad))
        if trains:
            self.check_margin(recipe, margin_of(ctx.kernels))
        rows, scales = _rows(input_), self.fc.scales(extras)
        groups = PaddedGroups(self.fc.offsets(ctx.formulas, rows.shape[0], extras), rows.shape[0])
        factors, bias = row_factor(scales, dtype), self.fc.bias(ctxs, dtype, records)
        w, w_t = weights_of(self.fc, ctxs, recipe.operand_format("weight"), passes, records)
        products, quantizer, x = products_of(ctx, groups), Quantizer(recipe.operand_format("input")), groups.pad(rows)
        y = products.gemm(products.quantize(x, quantizer), w, bias, padded(factors, groups))
        if records:
            ctx.groups, ctx.input_shape = groups, input_.shape
            ctx.scales_shape = None if scales is None else scales.shape
            ctx.unchanged = read_by_backward(ctx.held) if passes else None
            ctx.grad_quantizer = self.fc.op.quantizer(recipe, "grad_output", input_.device)
            ctx.save_for_backward(
                *(products.quantize(x, quantizer, True) if trains else Scaled()),
                *kept_of_weights(self.fc, ctxs, w_t),
                factors,
                bias if self.fc.wants_dscales(ctxs) else None,
            )
        return like_rows_of(groups.unpad(y), input_), [()] * len(ctxs)

    def fuser_backward(
        self, basic_op_ctxs: list[OperationContext], grad_output: Tensor, **_: Any
    ) -> tuple[Tensor | None, Sequence[ParamGrads], Sequence[ParamGrads]]:
        ctxs, ctx = basic_op_ctxs, basic_op_ctxs[0]
        grads, extra_grads = no_grads(ctxs)
        if not ctx.is_fused:
            return self.unfused.backward(ctxs, grad_output, grads, extra_grads), grads, extra_grads
        *operands, factors, bias = ctx.take_saved()
        x, w = Scaled(*operands[:3]), turned_weights(self.fc, ctxs, Scaled(*operands[3:]))
        del operands
        groups, products, rows = ctx.groups, products_of(ctx, ctx.groups), _rows(grad_output)
        dy, dx = groups.pad(rows), None
        put_own_grads(self.fc, ctxs, (grads, extra_grads), products, rows, dy, x, factors, bias)
        del x
        if w:
            dx = products.gemm(products.quantize(dy, ctx.grad_quantizer), w)
            dx = viewed(groups.unpad(dx), ctx.input_shape)
        return dx, grads, extra_grads


def _rows(t: Tensor) -> Tensor:
    """t as [T, C], to be quantised: in the compute dtype, or in FP32 if it was left unrounded for that."""
    return t.reshape(-1, t.shape[-1]) if is_unrounded(t) else plain_rows(t)
