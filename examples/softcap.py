"""An op of one's own, `Softcap`, and a rule of one's own that runs it and the linear before it as one step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import fusible_ops as fo
from patterns import Chain, OpSpec, Rule, slot


# --8<-- [start:op]
class Softcap(fo.BasicOperation):
    """y = cap·tanh(x / cap), in FP32, rounded once."""

    keeps_zero_rows = True

    def __init__(self, cap: float) -> None:
        super().__init__()
        self.cap = cap

    def describe(self) -> OpSpec:
        return OpSpec("softcap", self.name, {"cap": self.cap})

    def output_width(self, incoming: int | None) -> int | None:
        return incoming

    def op_forward(self, ctx: fo.OperationContext, input_: Tensor, **_: Any) -> Tensor:
        share = torch.tanh(input_.float() / self.cap)
        if ctx.requires_grad:
            ctx.save_for_backward(share)
        return (self.cap * share).to(input_.dtype)

    def op_backward(self, ctx: fo.OperationContext, grad_output: Tensor) -> tuple[Tensor, list[Tensor | None]]:
        (share,) = ctx.saved_tensors
        return (grad_output.float() * (1 - share * share)).to(grad_output.dtype), []  # no parameters


# --8<-- [end:op]
# --8<-- [start:fused]
class LinearSoftcap(fo.FusedOperation):
    """cap·tanh(x Wᵀ / cap) as one step; the product is not rounded in between."""

    def fuser_forward(
        self, basic_op_ctxs: list[fo.OperationContext], input_: Tensor, **_: Any
    ) -> tuple[Tensor, list[tuple[()]]]:
        ctx, cap = basic_op_ctxs[0], self.basic_ops[1].cap
        (weight,) = ctx.held.weights
        share = torch.tanh(input_.float() @ weight.detach().float().t() / cap)
        if basic_op_ctxs[-1].requires_grad:
            ctx.save_for_backward(input_, weight, share)
        return (cap * share).to(input_.dtype), [(), ()]

    def fuser_backward(
        self, basic_op_ctxs: list[fo.OperationContext], grad_output: Tensor, **_: Any
    ) -> tuple[Tensor, list[list[Tensor | None]], list[tuple[()]]]:
        x, weight, share = basic_op_ctxs[0].saved_tensors
        dz = grad_output.float() * (1 - share * share)
        dw = dz.flatten(0, -2).t() @ x.float().flatten(0, -2)
        return (dz @ weight.float()).to(x.dtype), [[dw.to(weight.dtype)], []], [(), ()]


# --8<-- [end:fused]
# --8<-- [start:rule]
RULE = Rule(
    name="linear_softcap",
    pattern=(slot("fc", "basic_linear"), slot("cap", "softcap")),
    guards=(),
    program="softcap:LinearSoftcap",  # loaded when a chain first needs it
    kernels=(),
    example=Chain((OpSpec("basic_linear", "fc"), OpSpec("softcap", "cap", {"cap": 30.0})), "bfloat16"),
)
# --8<-- [end:rule]
