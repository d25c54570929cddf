"""GroupedMLPFp8: linear, activation, linear in E4M3 blocks: four kernels forward and five backward."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from cute_kernels.quantization.quantize import Quantized
from fusible_ops.fused.fp8_parts import (
    copies_of,
    graded,
    kept_of_weights,
    power_of_two,
    put_grads,
    turned,
    turned_weights,
    weights_of,
)
from fusible_ops.fused.quantized_mlp import Backward, Forward, QuantizedMLP


class GroupedMLPFp8(QuantizedMLP):
    """A `QuantizedMLP` under `Float8BlockScaling`.

    Forward: quantise x; product + activation (× probs) + quantise, the pre-activation kept in BF16 or quantised along
    its rows; product (+ bias).
    Backward: quantise dy; product + activation gradient + quantise (with the gradients of probs and bias); two weight
    gradients; the input's gradient. Every quantise gives both orientations in one pass, and only the transposed one of
    x and of the activation is saved.
    """

    def keeps(self) -> dict[int, int]:
        return {2: self.act.at, 3: self.act.at, 7: 0, 8: 0, 9: self.fc2.at, 10: self.fc2.at}

    def products(self, call: Forward) -> tuple[Tensor, Tensor | Quantized | None, Sequence[Tensor | None]]:
        ctxs, recipe, kernels, records = call.ctxs, call.recipe, call.kernels, call.records
        offsets = call.groups.offsets
        w1, w2 = (
            weights_of(fc, ctxs, recipe, kernels, passes, records)
            for fc, passes in zip((self.fc1, self.fc2), call.passes, strict=True)
        )
        usage = True, call.trains[0], False
        x = copies_of(call.x, call.groups, call.padded, recipe.operand_format("input"), kernels, *usage)
        act, preact = kernels.fp8_grouped_gemm_act(
            x.data,
            x.scale,
            w1.data,
            w1.scale,
            offsets,
            call.padded,
            self.act.op.activation,
            call.biases[0],
            call.probs,
            rowwise=True,
            columnwise=call.trains[1],
            save_preact=call.passes[1],
            power_of_two=power_of_two(recipe),
            quantize_preact=recipe.preactivation_format is not None,
        )
        y = kernels.fp8_grouped_gemm(act.data, act.scale, w2.data, w2.scale, offsets, call.biases[1], call.scales)
        kept1, kept2 = kept_of_weights(self.fc1, ctxs, w1), kept_of_weights(self.fc2, ctxs, w2)
        return y, preact, (x.data_t, x.scale_t, act.data_t, act.scale_t, *kept1, *kept2)

    def gradients(self, call: Backward) -> tuple[Tensor | None, Tensor | None]:
        ctxs, grad, groups, padded, recipe, kernels, preact, probs, scales, kept, grads = call
        del call
        x, act = turned(*kept[:2]), turned(*kept[2:4])
        w1 = turned_weights(self.fc1, ctxs, recipe, kernels, *kept[4:6])
        w2 = turned_weights(self.fc2, ctxs, recipe, kernels, *kept[6:])
        del kept
        offsets, format = groups.offsets, recipe.operand_format("grad_output")
        dy, db = graded(self.fc2, ctxs, kernels, grad, groups, padded, format, scales, w2 is not None, act)
        put_grads(self.fc2, ctxs, grads, kernels, turned(dy.data_t, dy.scale_t), act, padded, db)
        del act
        if w2 is None:
            return None, None
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
            probs,
            rowwise=w1 is not None,
            columnwise=x is not None or wants_db or w1 is None,
            need_dprobs=self.act.wants_dprobs(ctxs),
            need_dbias=wants_db,
            power_of_two=power_of_two(recipe),
        )
        del dy, preact
        put_grads(self.fc1, ctxs, grads, kernels, turned(dpreact.data_t, dpreact.scale_t), x, padded, dpreact.sums)
        del x
        dx = None
        if w1 is not None:
            halves = self.act.op.activation.halves
            dx = kernels.fp8_grouped_gemm(dpreact.data, dpreact.scale, w1.data, w1.scale, offsets, halves=halves)
        return dx, dprobs
