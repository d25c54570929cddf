"""Small ops without parameters: Quantize, ConstantScale, Identity."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from fusible_ops import checks
from fusible_ops.op import BasicOperation, OperationContext
from patterns.chain import OpSpec


class Quantize(BasicOperation):
    """The identity while no quantisation recipe is active.

    forward, backward: whether the tensor, and its gradient, are to be quantised under a recipe.
    Source: the interface is that of transformer_engine.pytorch.ops.Quantize (2.20).
    """

    known_kwargs = ()
    keeps_zero_rows = True

    def __init__(self, forward: bool = True, backward: bool = False) -> None:
        super().__init__()
        self.quantize_forward, self.quantize_backward = forward, backward

    def describe(self) -> OpSpec:
        return OpSpec("quantize", self.name, {"forward": self.quantize_forward, "backward": self.quantize_backward})

    def output_width(self, incoming: int | None) -> int | None:
        return incoming

    def op_forward(self, ctx: OperationContext, input_: Tensor, **_: Any) -> Tensor:
        return input_

    def op_backward(self, ctx: OperationContext, grad_output: Tensor) -> tuple[Tensor | None, Iterable[Tensor | None]]:
        return grad_output, []


class ConstantScale(BasicOperation):
    """y = scale·x, with a constant."""

    known_kwargs = ()
    keeps_zero_rows = True

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = float(scale)

    def describe(self) -> OpSpec:
        return OpSpec("constant_scale", self.name, {"scale": self.scale})

    def output_width(self, incoming: int | None) -> int | None:
        return incoming

    def op_forward(self, ctx: OperationContext, input_: Tensor, **_: Any) -> Tensor:
        checks.float_input(self.label(), input_)
        return input_ * self.scale

    def op_backward(self, ctx: OperationContext, grad_output: Tensor) -> tuple[Tensor | None, Iterable[Tensor | None]]:
        return grad_output * self.scale, []


class Identity(BasicOperation):
    """y = x."""

    known_kwargs = ()
    keeps_zero_rows = True

    def describe(self) -> OpSpec:
        return OpSpec("identity", self.name)

    def output_width(self, incoming: int | None) -> int | None:
        return incoming

    def op_forward(self, ctx: OperationContext, input_: Tensor, **_: Any) -> Tensor:
        return input_

    def op_backward(self, ctx: OperationContext, grad_output: Tensor) -> tuple[Tensor | None, Iterable[Tensor | None]]:
        return grad_output, []
