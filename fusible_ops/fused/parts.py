"""What fused operations see of a linear: a GroupedLinear, or a BasicLinear with its Bias, behind one interface."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cute_kernels import reference
from cute_kernels.facts import NO_PLANS, VECTOR_BYTES, WITHOUT_MEMORY, Plans
from fusible_ops.activations import ActivationOperation, ScaledActivation
from fusible_ops.grouped_linear import GroupedLinear
from fusible_ops.linear import BasicLinear, Bias
from fusible_ops.op import BasicOperation, OperationContext, ParamGrads
from fusible_ops.parameters import WeightGrad, accumulate_main_grads

Contexts = Sequence[OperationContext]
Extras = Sequence[Sequence[Tensor]]


def as_rows(t: Tensor, dtype: torch.dtype) -> Tensor:
    """t [..., C] as [T, C] in `dtype`; t itself if it is so."""
    rows = t if t.dim() == 2 else t.reshape(-1, t.shape[-1])
    return rows if rows.dtype is dtype else rows.to(dtype)


def checked_dtype(op: GroupedLinear | BasicLinear, ctx: OperationContext, input_: Tensor) -> torch.dtype:
    """The dtype to compute in. Raises for an input that the op cannot take."""
    known = ctx.plans.get(checked_dtype)
    if known is None:
        op.check_input(input_, ctx.owner)
        known = ctx.plans.keep(checked_dtype, ctx.compute_dtype(op.weight_dtype))
    return known


def incoming(grad: Tensor, dtype: torch.dtype) -> Tensor:
    """A gradient that autograd gives [..., C] as [T, C] in `dtype`, contiguous and from a multiple of 16 bytes on, so
    that it has the same facts at every backward.
    """
    rows = as_rows(grad, dtype)
    is_aligned = isinstance(rows, WITHOUT_MEMORY) or rows.data_ptr() % VECTOR_BYTES == 0
    if is_aligned and rows.stride() == (rows.shape[1], 1):
        return rows
    return torch.empty(rows.shape, dtype=dtype, device=rows.device).copy_(rows)


def like_rows_of(y: Tensor, x: Tensor) -> Tensor:
    """y [T, C] with the leading dimensions of x; y itself if x has one."""
    return y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[1])


def viewed(t: Tensor, shape: torch.Size) -> Tensor:
    """t as `shape`; t itself if it is so."""
    return t if t.shape == shape else t.view(shape)


def row_factor(t: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Probs or scales as kernels take them: flat, FP32 or the compute dtype (any other float becomes FP32)."""
    if t is None:
        return None
    flat = t if t.dim() == 1 else t.reshape(-1)
    return flat if flat.dtype in (torch.float32, dtype) else flat.float()


def probs_of_tokens(probs: Tensor | None, ctx: OperationContext) -> Tensor | None:
    """The probs of an activation, zero in the rows that `ctx.split_sizes` leave out.

    For kernels that look at more rows than those: of a dense linear, or of a linear with other splits.
    """
    if probs is None or ctx.split_sizes is None:
        return probs
    return reference.tokens_only(probs, reference.group_offsets(ctx.split_sizes, probs.shape[0]))


class GroupedPart:
    """A GroupedLinear at position `at` of the fused basic ops."""

    covers_all_rows = False

    def __init__(self, op: GroupedLinear, at: int) -> None:
        self.op, self.at = op, at
        self.out_features, self.transposed = op.out_features, op.transposed_weight

    @property
    def weight_dtype(self) -> torch.dtype:
        return self.op.weight_dtype

    def offsets(self, kernels: Any, rows: int, extras: Extras) -> Tensor:
        return kernels.group_offsets(extras[self.at][0], rows)

    def split_sizes(self, extras: Extras) -> Tensor | None:
        return extras[self.at][0]

    def bias(self, ctxs: Contexts, dtype: torch.dtype, records: bool) -> Tensor | None:
        return ctxs[self.at].held.bias(dtype, records) if self.op.has_bias else None

    def wants_dbias(self, ctxs: Contexts) -> bool:
        return self.op.has_bias and ctxs[self.at].wants[0]

    def scales(self, extras: Extras) -> Tensor | None:
        return extras[self.at][1] if self.op.scale_bias else None

    def wants_dscales(self, ctxs: Contexts) -> bool:
        """Whether the scales required a gradient at forward."""
        return self.op.scale_bias and ctxs[self.at].extra_wants[1]

    def put_grads(
        self,
        ctxs: Contexts,
        grads: list[ParamGrads],
        kernels: Any,
        dy: Tensor,
        x: Tensor | None,
        offsets: Tensor,
        **layout: Any,
    ) -> None:
        """Compute the parameters' gradients and put them in this op's place. `layout`: scales, glu_interleave, db,
        plans (see `GroupedLinear.parameter_grads`).
        """
        grads[self.at] = self.op.parameter_grads(ctxs[self.at], kernels, dy, x, offsets, **layout)


class DensePart:
    """A BasicLinear at position `at`, and the Bias after it if there is one: one group that holds every row."""

    covers_all_rows = True
    transposed = False

    def __init__(self, linear: BasicLinear, bias: Bias | None, at: int) -> None:
        self.op, self.bias_op, self.at = linear, bias, at
        self.out_features = linear.out_features

    @property
    def weight_dtype(self) -> torch.dtype:
        return self.op.weight_dtype

    def offsets(self, kernels: Any, rows: int, extras: Extras) -> Tensor:
        return kernels.group_offsets(torch.full((1,), rows, dtype=torch.int32, device=self.op.weight.device), rows)

    def split_sizes(self, extras: Extras) -> Tensor | None:
        return None

    def bias(self, ctxs: Contexts, dtype: torch.dtype, records: bool) -> Tensor | None:
        return None if self.bias_op is None else ctxs[self.at + 1].held.bias(dtype, records)

    def wants_dbias(self, ctxs: Contexts) -> bool:
        return self.bias_op is not None and ctxs[self.at + 1].wants[0]

    def scales(self, extras: Extras) -> Tensor | None:
        return None

    def wants_dscales(self, ctxs: Contexts) -> bool:
        return False

    def put_grads(
        self,
        ctxs: Contexts,
        grads: list[ParamGrads],
        kernels: Any,
        dy: Tensor,
        x: Tensor | None,
        offsets: Tensor,
        scales: Tensor | None = None,
        glu_interleave: int = 0,
        db: Tensor | None = None,
        plans: Plans = NO_PLANS,
    ) -> None:
        weights = ctxs[self.at].held.weights
        if x is not None:
            grad = WeightGrad(kernels, dy, x, offsets, glu_interleave, plans)
            if self.op.accumulate_into_main_grad:
                grads[self.at] = accumulate_main_grads(weights, grad, self.op.label())
            else:
                grads[self.at] = grad.compute(weights)
        if self.bias_op is not None and self.wants_dbias(ctxs):
            db = kernels.grouped_dbias(dy, offsets, None, glu_interleave) if db is None else db
            grads[self.at + 1] = [db.to(self.bias_op.bias.dtype).squeeze(0)]


class ActivationPart:
    """An activation at position `at`."""

    def __init__(self, op: ActivationOperation, at: int) -> None:
        self.op, self.at = op, at
        self.is_scaled = isinstance(op, ScaledActivation)

    def probs(self, extras: Extras) -> Tensor | None:
        return extras[self.at][0] if self.is_scaled else None

    def wants_dprobs(self, ctxs: Contexts) -> bool:
        """Whether the probs required a gradient at forward."""
        return self.is_scaled and ctxs[self.at].extra_wants[0]


LinearPart = GroupedPart | DensePart


def interleaves(fc: LinearPart, act: ActivationPart) -> tuple[int, int]:
    """(how the columns of the pre-activation between the two lie, glu_interleave of products with it and the weight).

    A weight stored [K, N] leaves the columns as its own, and then nothing is to be rearranged.
    """
    block = act.op.glu_interleave
    return (block, 0) if fc.transposed else (0, block)


def linear_at(ops: Sequence[BasicOperation], at: int) -> tuple[LinearPart, int]:
    """(the linear that starts at position `at`, the position after it)."""
    op = ops[at]
    if isinstance(op, GroupedLinear):
        return GroupedPart(op, at), at + 1
    if isinstance(op, BasicLinear):
        after = ops[at + 1] if at + 1 < len(ops) else None
        bias = after if isinstance(after, Bias) else None
        return DensePart(op, bias, at), at + (1 if bias is None else 2)
    raise TypeError(f"expected GroupedLinear or BasicLinear at position {at}, got {type(op).__name__}")


def activation_at(ops: Sequence[BasicOperation], at: int) -> ActivationPart:
    """The activation at position `at`."""
    op = ops[at]
    if not isinstance(op, ActivationOperation):
        raise TypeError(f"expected an activation at position {at}, got {type(op).__name__}")
    return ActivationPart(op, at)


def mlp_of(ops: Sequence[BasicOperation], owner: str) -> tuple[LinearPart, ActivationPart, LinearPart]:
    """Linear, activation, linear, which are all of `ops`. TypeError, in the name of `owner`, for anything else."""
    fc1, at = linear_at(ops, 0)
    act = activation_at(ops, at)
    fc2, end = linear_at(ops, at + 1)
    if end != len(ops):
        raise TypeError(f"{owner} takes linear, activation, linear; got {len(ops) - end} more ops")
    return fc1, act, fc2


def no_grads(ctxs: Contexts) -> tuple[list[ParamGrads], list[ParamGrads]]:
    """Empty places for the gradients of all parameters, and of all extra inputs."""
    return [[None] * len(ctx.wants) for ctx in ctxs], [[None] * len(ctx.extra_wants) for ctx in ctxs]
