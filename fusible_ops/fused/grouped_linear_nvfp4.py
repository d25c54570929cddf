"""GroupedLinearNvfp4: a linear alone in NVFP4, on BF16 tensor cores."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fusible_ops.fused.fp8_parts import plain_rows
from fusible_ops.fused.nvfp4_parts import (
    draw,
    kept_of_rows,
    kept_of_weights,
    operand_of,
    put_grads,
    weights_in_backward,
    weights_of,
)
from fusible_ops.fused.quantized_one import Call, QuantizedOne
from fusible_ops.op import ParamGrads


class GroupedLinearNvfp4(QuantizedOne):
    """A `QuantizedOne` under `NVFP4BlockScaling`.

    Forward: the largest magnitudes of x; quantise it in both orientations, one of them for backward; product. Backward:
    the same of dy; the values of x; two products; the bias gradient.
    """

    def product(
        self, call: Call, bias: Tensor | None, trains: bool, passes: bool
    ) -> tuple[Tensor, Sequence[Tensor | None]]:
        recipe, kernels = call.recipe, call.kernels
        w = weights_of(self.fc, call.ctxs, recipe, kernels, passes, call.records)
        quantizer = self.fc.op.quantizer(recipe, "input", call.rows.device)
        if call.records:
            draw([self.fc], call.ctxs, recipe, call.rows)
        x = operand_of(call.rows, call.groups, call.padded, quantizer, kernels, True, stored=trains)
        y = kernels.nvfp4_grouped_gemm(x.rows, [w.rows], call.groups.offsets, x.amax, w.amax, bias, call.factors)
        return y, (*kept_of_rows(x), *kept_of_weights(self.fc, call.ctxs, w))

    def gradients(self, call: Call, kept: list[Tensor | None], grads: list[ParamGrads]) -> Tensor | None:
        ctxs, grad, groups, padded, recipe, kernels, _, factors = call
        data, scale, x_amax, *w_kept = kept
        own = ctxs[0]
        w, w_amax = weights_in_backward(self.fc, ctxs, recipe, kernels, (w_kept[0], w_kept[1]), own.input_requires_grad)
        dy = operand_of(grad, groups, padded, own.grad_quantizer, kernels, w is not None, data is not None)
        db = kernels.grouped_dbias(plain_rows(grad), groups.offsets, factors) if self.fc.wants_dbias(ctxs) else None
        put_grads(self.fc, ctxs, grads, kernels, dy, (data, scale, x_amax), padded, db)
        if w is None:
            return None
        return kernels.nvfp4_grouped_gemm_dgrad(dy.rows, [w], groups.offsets, dy.amax, w_amax)
