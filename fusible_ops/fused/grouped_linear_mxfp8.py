"""GroupedLinearMxfp8: a linear alone in MXFP8, on BF16 tensor cores."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fusible_ops.fused.fp8_parts import plain_rows
from fusible_ops.fused.mxfp8_parts import copies_of, kept_of_weights, put_grads, weights_in_backward, weights_of
from fusible_ops.fused.quantized_one import Call, QuantizedOne
from fusible_ops.op import ParamGrads


class GroupedLinearMxfp8(QuantizedOne):
    """A `QuantizedOne` under `MXFP8BlockScaling`.

    Forward: quantise x in both orientations, one of them for backward; product. Backward: quantise dy likewise; the
    values of x; two products; the bias gradient.
    """

    def product(
        self, call: Call, bias: Tensor | None, trains: bool, passes: bool
    ) -> tuple[Tensor, Sequence[Tensor | None]]:
        recipe, kernels = call.recipe, call.kernels
        w = weights_of(self.fc, call.ctxs, recipe, kernels, passes, call.records)
        format = recipe.operand_format("input")
        x = copies_of(call.rows, call.groups, call.padded, format, kernels, True, stored=trains)
        y = kernels.grouped_gemm(x.rows, [w.rows], call.groups.offsets, bias, call.factors)
        return y, (x.data, x.scale, kept_of_weights(self.fc, call.ctxs, w))

    def gradients(self, call: Call, kept: list[Tensor | None], grads: list[ParamGrads]) -> Tensor | None:
        ctxs, grad, groups, padded, recipe, kernels, _, factors = call
        data, scale, w = kept
        w = weights_in_backward(self.fc, ctxs, recipe, kernels, w, ctxs[0].input_requires_grad)
        offsets = groups.offsets
        format = recipe.operand_format("grad_output")
        dy = copies_of(grad, groups, padded, format, kernels, w is not None, data is not None)
        db = kernels.grouped_dbias(plain_rows(grad), offsets, factors) if self.fc.wants_dbias(ctxs) else None
        x = None
        if data is not None:
            x = kernels.mxfp8_dequantize(data, scale, offsets, padded, grad.shape[:-1].numel())
        put_grads(self.fc, ctxs, grads, kernels, dy.columns, x, offsets, db)
        return None if w is None else kernels.grouped_gemm_dgrad(dy.rows, [w], offsets)
