"""GroupedMLPMxfp8: linear, activation, linear in MXFP8 on BF16 tensor cores: four kernels forward and six backward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from cute_kernels.quantization.quantize import Quantized
from fusible_ops.fused.fp8_parts import plain_rows
from fusible_ops.fused.mxfp8_parts import copies_of, kept_of_weights, put_grads, weights_in_backward, weights_of
from fusible_ops.fused.parts import interleaves
from fusible_ops.fused.quantized_mlp import Backward, Forward, QuantizedMLP
from fusible_ops.op import BasicOperation


class GroupedMLPMxfp8(QuantizedMLP):
    """A `QuantizedMLP` under `MXFP8BlockScaling`.

    What products read are BF16 tensors that hold MXFP8 values, which they multiply exactly. Kept for backward are x,
    quantised down its tokens, and the pre-activation, in BF16 or quantised along its rows; from what was kept the
    activation is computed again for the second weight's gradient.
    Forward: quantise x; product + activation (× probs) + quantise; product (+ bias).
    Backward: quantise dy in both directions; product + activation gradient + quantise, of dpreact in both directions
    and of the recomputed activation (with the gradients of probs and bias); the values of x; two weight gradients; the
    input's gradient.
    """

    def __init__(self, basic_ops: Iterable[BasicOperation]) -> None:
        super().__init__(basic_ops)
        _, self.block = interleaves(self.fc1, self.act)

    def keeps(self) -> dict[int, int]:
        return {2: self.act.at, 3: self.act.at, 7: 0, 8: 0}

    def products(self, call: Forward) -> tuple[Tensor, Tensor | Quantized | None, Sequence[Tensor | None]]:
        ctxs, recipe, kernels, records = call.ctxs, call.recipe, call.kernels, call.records
        offsets = call.groups.offsets
        # The second weight's gradient, too, needs the activation, and so what the input's needs.
        goes_back = call.passes[1] or call.trains[1]
        w1 = weights_of(self.fc1, ctxs, recipe, kernels, call.passes[0], records)
        w2 = weights_of(self.fc2, ctxs, recipe, kernels, goes_back, records)
        x = copies_of(
            call.x, call.groups, call.padded, recipe.operand_format("input"), kernels, True, stored=call.trains[0]
        )
        act, preact = kernels.mxfp8_grouped_gemm_act(
            x.rows,
            [w1.rows],
            offsets,
            self.act.op.activation,
            call.biases[0],
            call.probs,
            glu_interleave=self.block,
            save_preact=goes_back,
            quantize_preact=recipe.preactivation_format is not None,
        )
        y = kernels.grouped_gemm(act, [w2.rows], offsets, call.biases[1], call.scales)
        kept = (kept_of_weights(fc, ctxs, w) for fc, w in ((self.fc1, w1), (self.fc2, w2)))
        return y, preact, (x.data, x.scale, *kept)

    def gradients(self, call: Backward) -> tuple[Tensor | None, Tensor | None]:
        ctxs, grad, groups, padded, recipe, kernels, preact, probs, scales, kept, grads = call
        del call
        data, scale, w1, w2 = kept
        del kept
        db = kernels.grouped_dbias(plain_rows(grad), groups.offsets, scales) if self.fc2.wants_dbias(ctxs) else None
        if preact is None:
            put_grads(self.fc2, ctxs, grads, kernels, None, None, groups.offsets, db)
            return None, None
        w1 = weights_in_backward(self.fc1, ctxs, recipe, kernels, w1, ctxs[0].input_requires_grad)
        w2 = weights_in_backward(self.fc2, ctxs, recipe, kernels, w2, True)
        offsets, trains = groups.offsets, ctxs[self.fc2.at].wants[0]
        dy = copies_of(grad, groups, padded, recipe.operand_format("grad_output"), kernels, True, trains)
        wants_db1 = self.fc1.wants_dbias(ctxs)
        rows, columns, act, dprobs, db1 = kernels.mxfp8_grouped_gemm_dact(
            dy.rows,
            [w2],
            offsets,
            preact,
            self.act.op.activation,
            probs,
            rowwise=w1 is not None,
            columnwise=data is not None or wants_db1,  # whose sums come with the columns
            need_act=trains,
            need_dprobs=self.act.wants_dprobs(ctxs),
            need_dbias=wants_db1,
            glu_interleave=self.block,
        )
        del preact
        put_grads(self.fc2, ctxs, grads, kernels, dy.columns, act, offsets, db)
        del dy, act
        x = None
        if data is not None:
            x = kernels.mxfp8_dequantize(data, scale, offsets, padded, grad.shape[:-1].numel())
        put_grads(self.fc1, ctxs, grads, kernels, columns, x, offsets, db1, self.block)
        del x
        dx = None
        if w1 is not None:
            dx = kernels.grouped_gemm_dgrad(rows, [w1], offsets, self.block)
        return dx, dprobs
