"""GroupedMLPNvfp4: linear, activation, linear in NVFP4 on BF16 tensor cores."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from fusible_ops.fused.fp8_parts import plain_rows
from fusible_ops.fused.nvfp4_parts import (
    draw,
    kept_of_rows,
    kept_of_weights,
    operand_of,
    put_grads,
    rotates,
    weights_in_backward,
    weights_of,
)
from fusible_ops.fused.parts import interleaves
from fusible_ops.fused.quantized_mlp import Backward, Forward, QuantizedMLP
from fusible_ops.op import BasicOperation


class GroupedMLPNvfp4(QuantizedMLP):
    """A `QuantizedMLP` under `NVFP4BlockScaling`.

    What products read are BF16 tensors that hold an element times its block's scale, which they multiply exactly; what
    is left of both second levels multiplies their sums. Kept for backward are x and the activation, quantised down
    their tokens in four bits, and the pre-activation in BF16.
    Forward: the largest magnitudes of x; quantise it; product + activation (× probs), which leaves the activation's;
    quantise that; product (+ bias).
    Backward: the largest magnitudes of dy; quantise it in both directions; the activation's values; weight gradient;
    product + activation gradient (with that of probs), which leaves the largest magnitudes; quantise it; x's values;
    weight gradient; the input's gradient.
    """

    def __init__(self, basic_ops: Iterable[BasicOperation]) -> None:
        super().__init__(basic_ops)
        _, self.block = interleaves(self.fc1, self.act)

    def keeps(self) -> dict[int, int]:
        return {2: self.act.at, 3: self.act.at, 7: 0, 8: 0, 10: self.fc2.at, 11: self.fc2.at}

    def products(self, call: Forward) -> tuple[Tensor, Tensor | None, Sequence[Tensor | None]]:
        ctxs, recipe, kernels, records = call.ctxs, call.recipe, call.kernels, call.records
        groups, padded, offsets = call.groups, call.padded, call.groups.offsets
        if records:
            draw([self.fc1, self.fc2], ctxs, recipe, call.x)
        w1, w2 = (
            weights_of(fc, ctxs, recipe, kernels, passes, records)
            for fc, passes in zip((self.fc1, self.fc2), call.passes, strict=True)
        )
        quantizers = [fc.op.quantizer(recipe, "input", call.x.device) for fc in (self.fc1, self.fc2)]
        x = operand_of(call.x, groups, padded, quantizers[0], kernels, True, stored=call.trains[0])
        act, preact, *maxima = kernels.nvfp4_grouped_gemm_act(
            x.rows,
            [w1.rows],
            offsets,
            x.amax,
            w1.amax,
            self.act.op.activation,
            call.biases[0],
            call.probs,
            glu_interleave=self.block,
            save_preact=call.passes[1],
            rotated=rotates(quantizers[1], call.trains[1]),
        )
        a = operand_of(act, groups, padded, quantizers[1], kernels, True, stored=call.trains[1], maxima=maxima)
        y = kernels.nvfp4_grouped_gemm(a.rows, [w2.rows], offsets, a.amax, w2.amax, call.biases[1], call.scales)
        kept = (t for fc, w in ((self.fc1, w1), (self.fc2, w2)) for t in kept_of_weights(fc, ctxs, w))
        return y, preact, (*kept_of_rows(x), *kept_of_rows(a), *kept)

    def gradients(self, call: Backward) -> tuple[Tensor | None, Tensor | None]:
        ctxs, grad, groups, padded, recipe, kernels, preact, probs, scales, kept, grads = call
        del call
        x, a = (kept[0], kept[1], kept[2]), (kept[3], kept[4], kept[5])
        kept1, kept2 = (kept[6], kept[7]), (kept[8], kept[9])
        del kept
        own1, own2, offsets = ctxs[self.fc1.at], ctxs[self.fc2.at], groups.offsets
        w1, amax1 = weights_in_backward(self.fc1, ctxs, recipe, kernels, kept1, own1.input_requires_grad)
        w2, amax2 = weights_in_backward(self.fc2, ctxs, recipe, kernels, kept2, preact is not None)
        dy = operand_of(grad, groups, padded, own2.grad_quantizer, kernels, preact is not None, a[0] is not None)
        db = kernels.grouped_dbias(plain_rows(grad), offsets, scales) if self.fc2.wants_dbias(ctxs) else None
        put_grads(self.fc2, ctxs, grads, kernels, dy, a, padded, db)
        del a
        if preact is None:
            return None, None
        wants_x, wants_w = w1 is not None, x[0] is not None
        dpreact, dprobs, *maxima = kernels.nvfp4_grouped_gemm_dact(
            dy.rows,
            [w2],
            offsets,
            dy.amax,
            amax2,
            preact,
            self.act.op.activation,
            probs,
            need_dprobs=self.act.wants_dprobs(ctxs),
            rotated=rotates(own1.grad_quantizer, wants_w),
        )
        del preact, dy
        grad1 = operand_of(dpreact, groups, padded, own1.grad_quantizer, kernels, wants_x, wants_w, maxima=maxima)
        wants = self.fc1.wants_dbias(ctxs)
        db = kernels.grouped_dbias(dpreact, offsets, None, self.block) if wants else None
        del dpreact
        put_grads(self.fc1, ctxs, grads, kernels, grad1, x, padded, db, self.block)
        if w1 is None:
            return None, dprobs
        dx = kernels.nvfp4_grouped_gemm_dgrad(grad1.rows, [w1], offsets, grad1.amax, amax1, self.block)
        return dx, dprobs
