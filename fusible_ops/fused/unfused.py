"""Ops one after another, as they run unfused: what a fused operation does where a call cannot be fused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fusible_ops.op import BasicOperation, FusedOperation, OperationContext, ParamGrads


class Unfused:
    """steps: what runs how many basic ops each, in order."""

    def __init__(self, steps: Sequence[BasicOperation | FusedOperation]) -> None:
        self.steps: list[tuple[BasicOperation | FusedOperation, slice]] = []
        at = 0
        for op in steps:
            count = len(op.fusible_parts())
            self.steps.append((op, slice(at, at + count)))
            at += count

    def forward(
        self,
        ctxs: list[OperationContext],
        x: Tensor,
        extra_inputs: Sequence[Sequence[Tensor]],
        kwargs: Sequence[dict[str, Any]],
    ) -> tuple[Tensor, Sequence[Sequence[Tensor]]]:
        """As `FusedOperation.fuser_forward`."""
        recipe = ctxs[0].recipe
        for i, (op, span) in enumerate(self.steps):
            before = after = None
            if recipe is not None:
                before = self.steps[i - 1][0].grad_output_format(recipe) if i else None
                after = self.steps[i + 1][0].input_format(recipe) if i + 1 < len(self.steps) else None
            x, _ = op.fuser_forward(
                ctxs[span],
                x,
                basic_op_extra_inputs=extra_inputs[span],
                prev_op_grad_output_quantizer=before,
                next_op_input_quantizer=after,
                basic_op_kwargs=kwargs[span],
            )
        return x, [()] * len(ctxs)

    def backward(
        self, ctxs: list[OperationContext], grad: Tensor, grads: list[ParamGrads], extra_grads: list[ParamGrads]
    ) -> Tensor | None:
        """As `FusedOperation.fuser_backward`, into `grads` and `extra_grads`; returns the gradient of the input."""
        passed: Tensor | None = grad
        for op, span in reversed(self.steps):
            own = ctxs[span]
            if passed is None or not any(ctx.requires_grad for ctx in own):
                return None
            passed, grads[span], extra_grads[span] = op.fuser_backward(
                own, passed, basic_op_grad_extra_outputs=[()] * len(own)
            )
        return passed
