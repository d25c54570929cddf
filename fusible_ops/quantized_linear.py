"""QuantizedLinear: a linear under a recipe, unfused.

The oracle of fused operations that quantise, under any recipe. Its products are those of `quantized_products`; kernels
have oracles of their own: `cute_kernels.fp8_reference` on Hopper, `cute_kernels.blackwell.mxfp8_reference` and
`cute_kernels.blackwell.nvfp4_reference` on Blackwell.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from cute_kernels import reference
from cute_kernels.quantization.formats import Format
from fusible_ops import checks, quantized_products
from fusible_ops.fused.parts import as_rows, like_rows_of, linear_at, no_grads, viewed
from fusible_ops.groups import Groups
from fusible_ops.kept import kept, restored
from fusible_ops.op import BasicOperation, FusedOperation, OperationContext, ParamGrads
from fusible_ops.parameters import Unchanged
from fusible_ops.quantized_parameters import as_quantized
from fusible_ops.quantized_tensor import QuantizedTensor
from fusible_ops.quantizer import is_unrounded, operand
from fusible_ops.recipe import ROLES, Recipe


class QuantizedLinear(FusedOperation):
    """y = x̂ Ŵ_gᵀ (+ s·b_g), grouped or dense, with input, weight and gradient quantised as the active recipe has it.

    Forward multiplies the row-wise copies; backward keeps only the column-wise ones, of x if the weight is trained and
    of W if the input wants a gradient: dx = dŷ Ŵ, dW = dŷᵀ x̂. Biases, and their gradients, are not quantised. Sums are
    FP32, rounded once after the bias. With a `backward_override` backward is not quantised.

    An input that is quantised already, in the recipe's format and for the same groups, is used as it is.
    """

    def __init__(self, basic_ops: Iterable[BasicOperation]) -> None:
        super().__init__(basic_ops)
        self.parts = self.fusible_parts()
        self.fc, end = linear_at(self.parts, 0)
        if end != len(self.parts):
            raise TypeError(f"QuantizedLinear takes one linear; got {len(self.parts) - end} more ops")

    def input_format(self, recipe: Recipe) -> Format | None:
        return recipe.operand_format("input")

    def grad_output_format(self, recipe: Recipe) -> Format | None:
        return None if recipe.backward_override else recipe.operand_format("grad_output")

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: Tensor,
        *,
        basic_op_extra_inputs: Sequence[Sequence[Tensor]],
        **_: Any,
    ) -> tuple[Tensor, Sequence[Sequence[Tensor]]]:
        ctx, extras, op = basic_op_ctxs[0], basic_op_extra_inputs, self.fc.op
        recipe = ctx.recipe
        assert recipe is not None
        op.check_input(input_, ctx.owner)
        dtype, device = ctx.compute_dtype(self.fc.weight_dtype), input_.device
        for quantized_from in (self.fc.weight_dtype, dtype):
            checks.quantizable(ctx.owner, quantized_from)
        groups = Groups.of(self.fc.split_sizes(extras), input_.shape[:-1].numel(), device)
        records = basic_op_ctxs[-1].requires_grad
        trains, passes = records and ctx.wants[0], records and ctx.input_requires_grad
        override = recipe.backward_override
        self._check_widths(recipe, passes and override is None, ctx.owner)
        x_quantizer, w_quantizer = (op.quantizer(recipe, role, device) for role in ("input", "weight"))
        x = operand(input_, x_quantizer, groups, dtype, columnwise=trains and override is None)
        weights = as_quantized(ctx.held, w_quantizer, passes and override is None, records, dtype, ctx.owner)
        bias, scales = self.fc.bias(basic_op_ctxs, dtype, records), self.fc.scales(extras)
        rows = None if scales is None else scales.reshape(-1)
        y = quantized_products.grouped_gemm(x, weights, groups.offsets, dtype, bias, rows)
        if records:
            ctx.input_shape, ctx.dtype, ctx.override = input_.shape, dtype, override
            ctx.splits, ctx.version = groups.splits, groups.version
            ctx.scales_shape = scales.shape if scales is not None and self.fc.wants_dscales(basic_op_ctxs) else None
            if override is None:
                ctx.grad_quantizer = op.quantizer(recipe, "grad_output", device)
            if passes and (override is not None or isinstance(ctx.held.weights[0], QuantizedTensor)):
                ctx.unchanged = Unchanged(ctx.held.weights)
            x_kept: Sequence[Tensor] = ()
            w_kept: Sequence[Tensor] = ()
            if override == "high_precision":
                x_kept = [as_rows(_plain(input_, dtype), dtype)] if trains else ()
                w_kept = ctx.held.operands(dtype, records) if passes else ()
            else:
                copies = (False, True) if override is None else (True, False)
                if trains:
                    x_kept, ctx.x_form = kept(x.with_usage(*copies))
                if passes:
                    w_kept, ctx.w_form = kept(weights.with_usage(*copies))
            ctx.num_x = len(x_kept)
            ctx.save_for_backward(groups.offsets, rows, None if ctx.scales_shape is None else bias, *x_kept, *w_kept)
        return like_rows_of(y, input_), [()] * len(basic_op_ctxs)

    def fuser_backward(
        self, basic_op_ctxs: list[OperationContext], grad_output: Tensor, **_: Any
    ) -> tuple[Tensor | None, Sequence[ParamGrads], Sequence[ParamGrads]]:
        ctx = basic_op_ctxs[0]
        offsets, rows, bias, *operands = ctx.saved_tensors
        x_kept, w_kept = operands[: ctx.num_x], operands[ctx.num_x :]
        grads, extra_grads = no_grads(basic_op_ctxs)
        plain = _plain(grad_output, ctx.dtype).reshape(-1, self.fc.out_features)
        if ctx.scales_shape is not None:
            extra_grads[0] = [None, viewed(reference.grouped_dscale(plain, bias, offsets), ctx.scales_shape)]
        if ctx.override is not None:
            dx = self._plain_products(basic_op_ctxs, grads, plain.to(ctx.dtype), x_kept, w_kept, offsets, rows)
        else:
            dx = None
            dy: Any = None
            x = restored(x_kept, ctx.x_form) if x_kept else None
            if x is not None or w_kept:
                groups = Groups(offsets, ctx.splits, ctx.version)
                copies = bool(w_kept), x is not None
                dy = operand(grad_output, ctx.grad_quantizer, groups, ctx.dtype, *copies)
            if w_kept:
                dx = quantized_products.grouped_gemm_dgrad(dy, restored(w_kept, ctx.w_form), offsets, ctx.dtype)
            db = reference.grouped_dbias(plain, offsets, rows) if self.fc.wants_dbias(basic_op_ctxs) else None
            self.fc.put_grads(basic_op_ctxs, grads, quantized_products, dy, x, offsets, db=db)
            ctx.grad_quantizer.update()
        return None if dx is None else viewed(dx, ctx.input_shape), grads, extra_grads

    def _check_widths(self, recipe: Recipe, passes: bool, owner: str) -> None:
        """ValueError unless blocks divide the widths. passes: whether backward quantises for the input's gradient."""
        x, w, dy = (recipe.operand_format(role) for role in ROLES)
        k, n = ("in_features", self.fc.op.in_features), ("out_features", self.fc.out_features)
        wanted = [(k, x, x.multiple()[1])]
        for columnwise in (False, True)[: 1 + passes]:
            rows, columns = w.multiple(columnwise)
            wanted += [(n, w, rows), (k, w, columns)]
        if passes:
            wanted.append((n, dy, dy.multiple()[1]))
        for (what, size), format, multiple in wanted:
            checks.divides(owner, what, size, format, multiple)

    def _plain_products(
        self,
        ctxs: list[OperationContext],
        grads: list[ParamGrads],
        dy: Tensor,
        x_kept: Sequence[Tensor],
        w_kept: Sequence[Tensor],
        offsets: Tensor,
        rows: Tensor | None,
    ) -> Tensor | None:
        """Backward in high precision: dx, and the parameters' gradients into `grads`."""
        ctx = ctxs[0]
        x, weights = x_kept[0] if x_kept else None, list(w_kept)
        if ctx.override == "dequantized":
            x = restored(x_kept, ctx.x_form).dequantize(ctx.dtype) if x_kept else None
            weights = [restored(w_kept, ctx.w_form).dequantize(ctx.dtype)] if w_kept else []
        self.fc.put_grads(ctxs, grads, reference, dy.contiguous(), x, offsets, scales=rows)
        return reference.grouped_gemm_dgrad(dy, weights, offsets) if weights else None


def _plain(t: Tensor, dtype: torch.dtype) -> Tensor:
    """t as a plain tensor in `dtype`, or in FP32 if it holds more than that."""
    if isinstance(t, QuantizedTensor):
        return t.dequantize(dtype)
    return t if is_unrounded(t) else t.to(dtype)
