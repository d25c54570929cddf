"""QuantizedMLP: what MLPs have in common whose operands are quantised in blocks: the call around the products."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_kernels.quantization.quantize import Quantized, parts_of, whole_of
from fusible_ops.basic import Quantize
from fusible_ops.fused.fp8_parts import padded_groups, plain_rows
from fusible_ops.fused.parts import (
    activation_at,
    checked_dtype,
    like_rows_of,
    linear_at,
    no_grads,
    probs_of_tokens,
    row_factor,
    viewed,
)
from fusible_ops.fused.unfused import Unfused
from fusible_ops.groups import Groups, same_values
from fusible_ops.op import BasicOperation, FusedOperation, OperationContext, ParamGrads
from fusible_ops.quantized_linear import QuantizedLinear
from fusible_ops.quantized_parameters import read_by_backward
from fusible_ops.recipe import Recipe


class Forward(NamedTuple):
    """What the products of a forward are given.

    padded: the groups' offsets once each is padded to whole blocks. records: gradients are recorded. trains, passes:
    whether the first and the second linear's weights, and their inputs, want a gradient. probs, scales: factors of the
    activation's rows and of the second bias. biases: of both linears.
    """

    ctxs: list[OperationContext]
    x: Tensor
    groups: Groups
    padded: Tensor
    recipe: Recipe
    kernels: Any
    dtype: torch.dtype
    records: bool
    trains: tuple[bool, bool]
    passes: tuple[bool, bool]
    probs: Tensor | None
    scales: Tensor | None
    biases: tuple[Tensor | None, Tensor | None]


class Backward(NamedTuple):
    """What the products of a backward are given. kept: as the forward's products left it. grads: where gradients go."""

    ctxs: list[OperationContext]
    grad: Tensor
    groups: Groups
    padded: Tensor
    recipe: Recipe
    kernels: Any
    preact: Tensor | Quantized | None
    probs: Tensor | None
    scales: Tensor | None
    kept: list[Tensor | None]
    grads: list[ParamGrads]


class QuantizedMLP(FusedOperation):
    """y = W2_g act(W1_g x + b1_g)·p + b2_g, grouped or dense. A `Quantize` between activation and second linear changes
    nothing.

    Two linears that are given different split sizes run as they do unfused: a block of one's groups may span two of the
    other's.
    """

    def __init__(self, basic_ops: Iterable[BasicOperation]) -> None:
        super().__init__(basic_ops)
        ops = self.fusible_parts()
        self.fc1, at = linear_at(ops, 0)
        self.act = activation_at(ops, at)
        middle = at + 1
        if isinstance(ops[middle], Quantize):
            middle += 1
        self.fc2, end = linear_at(ops, middle)
        if end != len(ops):
            raise TypeError(f"{type(self).__name__} takes linear, activation, linear; got {len(ops) - end} more ops")
        linears = QuantizedLinear(ops[:at]), QuantizedLinear(ops[self.fc2.at :])
        self.unfused = Unfused([linears[0], *ops[at : self.fc2.at], linears[1]])

    @abstractmethod
    def products(self, call: Forward) -> tuple[Tensor, Tensor | Quantized | None, Sequence[Tensor | None]]:
        """(y [T, N], the pre-activation as it is kept if backward needs it, what else it needs)."""

    @abstractmethod
    def gradients(self, call: Backward) -> tuple[Tensor | None, Tensor | None]:
        """(dx [T, K], dprobs [T]), each if it is wanted; those of the parameters go to `call.grads`. Nobody else holds
        the call.
        """

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: Tensor,
        *,
        basic_op_extra_inputs: Sequence[Sequence[Tensor]],
        basic_op_kwargs: Sequence[dict[str, Any]],
        **_: Any,
    ) -> tuple[Tensor, Sequence[Sequence[Tensor]]]:
        ctxs, extras, ctx, ctx2 = basic_op_ctxs, basic_op_extra_inputs, basic_op_ctxs[0], basic_op_ctxs[self.fc2.at]
        splits = self.fc1.split_sizes(extras)
        ctx.same_splits = same_values(splits, self.fc2.split_sizes(extras))
        if not ctx.same_splits:
            return self.unfused.forward(ctxs, input_, extras, basic_op_kwargs)
        kernels, dtype = ctx.kernels, checked_dtype(self.fc1.op, ctx, input_)
        recipe, records = ctx.recipe, ctxs[-1].requires_grad
        assert recipe is not None
        trains = records and ctx.wants[0], records and ctx2.wants[0]
        passes = records and ctx.input_requires_grad, records and ctx2.input_requires_grad
        probs, scales = self.act.probs(extras), self.fc2.scales(extras)
        rows, factors = row_factor(probs, dtype), row_factor(scales, dtype)
        if self.fc1.covers_all_rows:
            rows = probs_of_tokens(rows, ctxs[self.act.at])
        groups, padded = padded_groups(kernels, splits, input_, recipe)
        biases = self.fc1.bias(ctxs, dtype, records), self.fc2.bias(ctxs, dtype, records)
        for own, wanted in zip((ctx, ctx2), passes, strict=True):
            own.unchanged = read_by_backward(own.held) if wanted else None
        y, preact, kept = self.products(
            Forward(
                ctxs, input_, groups, padded, recipe, kernels, dtype, records, trains, passes, rows, factors, biases
            )
        )
        if records:
            ctx.splits, ctx.version, ctx.input_shape = groups.splits, groups.version, input_.shape
            ctx.probs_shape = None if probs is None else probs.shape
            ctx.scales_shape = None if scales is None else scales.shape
            kept_bias = biases[1] if self.fc2.wants_dscales(ctxs) else None
            ctx.save_for_backward(groups.offsets, padded, *parts_of(preact), rows, factors, kept_bias, *kept)
        return like_rows_of(y, input_), [()] * len(ctxs)

    def fuser_backward(
        self, basic_op_ctxs: list[OperationContext], grad_output: Tensor, **_: Any
    ) -> tuple[Tensor | None, Sequence[ParamGrads], Sequence[ParamGrads]]:
        ctxs, ctx = basic_op_ctxs, basic_op_ctxs[0]
        grads, extra_grads = no_grads(ctxs)
        if not ctx.same_splits:
            return self.unfused.backward(ctxs, grad_output, grads, extra_grads), grads, extra_grads
        assert ctx.recipe is not None
        offsets, padded, data, scale, rows, factors, bias2, *kept = ctx.take_saved()
        preact = whole_of(data, scale)
        del data, scale
        if self.fc2.wants_dscales(ctxs):
            dscales = ctx.kernels.grouped_dscale(plain_rows(grad_output), bias2, offsets)
            extra_grads[self.fc2.at] = [None, viewed(dscales, ctx.scales_shape)]
        groups = Groups(offsets, ctx.splits, ctx.version)
        operands = [
            Backward(ctxs, grad_output, groups, padded, ctx.recipe, ctx.kernels, preact, rows, factors, kept, grads)
        ]
        del preact, kept  # nobody but `gradients` holds what is in there, which can so be freed early
        dx, dprobs = self.gradients(operands.pop())
        if dprobs is not None:
            extra_grads[self.act.at] = [viewed(dprobs, ctx.probs_shape)]
        return None if dx is None else viewed(dx, ctx.input_shape), grads, extra_grads
