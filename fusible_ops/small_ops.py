"""Small ops without parameters: Quantize, ConstantScale, Identity, Reshape, Dropout."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from cute_kernels.quantization.formats import Format
from fusible_ops import checks
from fusible_ops.groups import Groups
from fusible_ops.op import BasicOperation, OperationContext
from fusible_ops.quantized_tensor import QuantizedTensor
from fusible_ops.quantizer import nominal_dtype
from fusible_ops.recipe import Recipe
from patterns.chain import OpSpec


class Quantize(BasicOperation):
    """x quantised, as a `QuantizedTensor`, under a recipe; the identity where none is active.

    forward, backward: whether the tensor, and its gradient, are quantised: as the recipe has inputs, and gradients of
    outputs. A tensor that is quantised already stays as it is. Rows of the groups around the op are quantised group by
    group, others as one group; with the column-wise copy if gradients are recorded. Under a recipe with a
    backward_override gradients stay as they are.
    Errors: TypeError for an input that is no float, or FP64; ValueError for one without dimensions, or whose last one
    the blocks do not divide.
    Source: the interface is that of transformer_engine.pytorch.ops.Quantize (2.20).
    """

    known_kwargs = ()
    keeps_zero_rows = True
    graph_facts = ("quantize_forward", "quantize_backward")

    def __init__(self, forward: bool = True, backward: bool = False) -> None:
        super().__init__()
        self.quantize_forward, self.quantize_backward = forward, backward

    def describe(self) -> OpSpec:
        return OpSpec("quantize", self.name, {"forward": self.quantize_forward, "backward": self.quantize_backward})

    def output_width(self, incoming: int | None) -> int | None:
        return incoming

    def num_quantizers(self, mode: str) -> int:
        return int(self.quantize_forward if mode == "forward" else self.quantize_backward)

    def input_format(self, recipe: Recipe) -> Format | None:
        return recipe.operand_format("input") if self.quantize_forward else None

    def grad_output_format(self, recipe: Recipe) -> Format | None:
        wanted = self.quantize_backward and recipe.backward_override is None
        return recipe.operand_format("grad_output") if wanted else None

    def op_forward(self, ctx: OperationContext, input_: Tensor, **_: Any) -> Tensor:
        if ctx.recipe is None:
            return input_
        checks.float_input(ctx.owner, input_)
        checks.quantizable(ctx.owner, input_.dtype)
        if input_.dim() == 0:
            raise ValueError(f"{ctx.owner}: the input must have at least one dimension")
        for format in (
            self.input_format(ctx.recipe),
            self.grad_output_format(ctx.recipe) if ctx.requires_grad else None,
        ):
            if format is not None:
                checks.divides(ctx.owner, "the last dimension", input_.shape[-1], format, format.multiple()[1])
        groups = Groups.of(ctx.split_sizes, input_.shape[:-1].numel(), input_.device)
        ctx.grad_quantizer = None
        if ctx.requires_grad and self.grad_output_format(ctx.recipe) is not None:
            ctx.grad_quantizer = self.quantizer(ctx.recipe, "grad_output", input_.device)
            ctx.splits, ctx.version = groups.splits, groups.version
            ctx.save_for_backward(groups.offsets)
        if not self.quantize_forward or isinstance(input_, QuantizedTensor):
            return input_
        quantizer = self.quantizer(ctx.recipe, "input", input_.device)
        return quantizer.rows(input_, groups, columnwise=ctx.requires_grad, dtype=nominal_dtype(input_))

    def op_backward(self, ctx: OperationContext, grad_output: Tensor) -> tuple[Tensor | None, Iterable[Tensor | None]]:
        if ctx.recipe is None or ctx.grad_quantizer is None or isinstance(grad_output, QuantizedTensor):
            return grad_output, []
        (offsets,) = ctx.saved_tensors
        groups = Groups(offsets, ctx.splits, ctx.version)
        grad = ctx.grad_quantizer.rows(grad_output, groups, dtype=nominal_dtype(grad_output))
        ctx.grad_quantizer.update()
        return grad, []


class ConstantScale(BasicOperation):
    """y = scale·x, with a constant."""

    known_kwargs = ()
    keeps_zero_rows = True
    graph_facts = ("scale",)

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
    graph_facts = ("training",)

    def describe(self) -> OpSpec:
        return OpSpec("identity", self.name)

    def output_width(self, incoming: int | None) -> int | None:
        return incoming

    def op_forward(self, ctx: OperationContext, input_: Tensor, **_: Any) -> Tensor:
        return input_

    def op_backward(self, ctx: OperationContext, grad_output: Tensor) -> tuple[Tensor | None, Iterable[Tensor | None]]:
        return grad_output, []


class Reshape(BasicOperation):
    """y = x.reshape(shape), in which one dimension may be -1.

    Errors: ValueError for a last dimension that changes in a run with a grouped linear: its rows are tokens.
    Source: the interface is that of transformer_engine.pytorch.ops.Reshape (2.20).
    """

    known_kwargs = ()
    keeps_zero_rows = True
    graph_facts = ("shape",)
    keeps_rows = False

    def __init__(self, shape: Iterable[int]) -> None:
        super().__init__()
        self.shape = tuple(shape)

    def extra_repr(self) -> str:
        return f"shape={self.shape}"

    def describe(self) -> OpSpec:
        return OpSpec("reshape", self.name, {"shape": self.shape})

    def output_width(self, incoming: int | None) -> int | None:
        return self.shape[-1] if self.shape and self.shape[-1] > 0 else None

    def op_forward(self, ctx: OperationContext, input_: Tensor, **_: Any) -> Tensor:
        y = input_.reshape(self.shape)
        if ctx.split_sizes is not None and y.shape[-1:] != input_.shape[-1:]:
            raise ValueError(
                f"{ctx.owner}: {tuple(input_.shape)} to {tuple(y.shape)} changes what a row is, but rows are the "
                "tokens of a grouped linear in the same run; reshape outside of it"
            )
        ctx.input_shape = input_.shape
        return y

    def op_backward(self, ctx: OperationContext, grad_output: Tensor) -> tuple[Tensor | None, Iterable[Tensor | None]]:
        return grad_output.reshape(ctx.input_shape), []


class Dropout(BasicOperation):
    """y = x·m/(1 - p), each m being 0 with probability p, else 1; y = x in evaluation (`.eval()`).

    p: from 0 to 1 (all zeros); else ValueError. Random numbers are those of torch's generator of the input's device.
    The mask, a byte an element, is kept for backward.
    Source: the interface is that of transformer_engine.pytorch.ops.Dropout (2.20).
    """

    known_kwargs = ()
    keeps_zero_rows = True
    graph_facts = ("dropout_probability", "training")

    def __init__(self, p: float) -> None:
        if not isinstance(p, (int, float)) or not 0 <= p <= 1:
            raise ValueError(f"Dropout: p must be between 0 and 1, got {p!r}")
        super().__init__()
        self.dropout_probability = float(p)

    def extra_repr(self) -> str:
        return f"p={self.dropout_probability}"

    def describe(self) -> OpSpec:
        return OpSpec("dropout", self.name, {"p": self.dropout_probability})

    def output_width(self, incoming: int | None) -> int | None:
        return incoming

    def op_forward(self, ctx: OperationContext, input_: Tensor, **_: Any) -> Tensor:
        checks.float_input(ctx.owner, input_)
        ctx.drops = self.training
        if not self.training:
            return input_
        x = input_.to(ctx.compute_dtype(input_.dtype))
        kept = 1 - self.dropout_probability
        mask = torch.empty_like(x, dtype=torch.bool).bernoulli_(kept)
        ctx.scale = 1 / kept if kept else 0.0
        ctx.save_for_backward(mask)
        return x * mask * ctx.scale

    def op_backward(self, ctx: OperationContext, grad_output: Tensor) -> tuple[Tensor | None, Iterable[Tensor | None]]:
        if not ctx.drops:
            return grad_output, []
        (mask,) = ctx.saved_tensors
        return grad_output * mask * ctx.scale, []
