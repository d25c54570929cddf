"""Calls of a grouped MLP that are alike: what `GroupedMLP` does for them, with nothing left to decide.

A small layer's Python takes longer than its kernels. Here one guard says that a call is like an earlier one; then the
functions of `kernels` are called that `GroupedMLP` would call, with the arguments that it would give them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import methodcaller
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

from cute_kernels.facts import NO_PLANS, VECTOR_BYTES, likeness
from cute_kernels.ops import are_plain
from cute_kernels.scheduling import Sharing
from fusible_ops import casts
from fusible_ops.call import backward_kernels, forward_kernels, let_go, saved_for
from fusible_ops.fused.parts import GroupedPart, LinearPart, incoming
from fusible_ops.grouped_linear import GroupedLinear
from fusible_ops.op import OperationContext
from fusible_ops.parameters import Unchanged, WeightGrad, joined
from fusible_ops.ranges import shown

if TYPE_CHECKING:
    from fusible_ops.fused.grouped_mlp import GroupedMLP

Weights = tuple[Sequence[Parameter], Sequence[Parameter]]
"""The weights of both linears."""


def mlp_shortcut(
    mlp: GroupedMLP,
    ctxs: Sequence[OperationContext],
    x: Tensor,
    extra_inputs: Sequence[Tensor],
    sharing: Sharing,
    title: str,
) -> MLPShortcut | None:
    """For calls like the one of these contexts, whose forward has run.

    None unless kernels take all operands as they are: rows [T, H], packed weights of the same dtype without biases,
    flat probs, one tensor of split sizes for both linears. And none where gradients are recorded for some of x and the
    weights only.
    """
    first, second = ctxs[0], ctxs[mlp.fc2.at]
    if not (_is_taken_as_it_is(mlp.fc1, first) and _is_taken_as_it_is(mlp.fc2, second)):
        return None
    tensors = (x, *first.held.parameters, *second.held.parameters)
    splits, *probs, splits2 = extra_inputs
    if splits2 is not splits or x.dim() != 2 or any(p.dim() != 1 for p in probs):
        return None
    if any(t.dtype is not x.dtype for t in tensors) or any(p.dtype not in (torch.float32, x.dtype) for p in probs):
        return None
    if not are_plain((*tensors, *extra_inputs)) or any(map(methodcaller("is_inference"), tensors)):
        return None
    if first.requires_grad and not all((first.input_requires_grad, *first.wants, *second.wants)):
        return None
    guard = likeness(*tensors, splits, *probs)
    return None if guard is None else MLPShortcut(mlp, first, second, mlp.act.wants_dprobs(ctxs), guard, sharing, title)


def _is_taken_as_it_is(part: LinearPart, ctx: OperationContext) -> bool:
    """Whether plans for this linear are kept, and kernels read its weights where they lie, as [N, K]."""
    first = ctx.held.weights[0]
    return (
        ctx.plans is not NO_PLANS
        and isinstance(part, GroupedPart)
        and not part.op.has_bias
        and not part.op.transposed_weight
        and ctx.held.weights_packed
        and first.is_contiguous()
        and first.data_ptr() % VECTOR_BYTES == 0
    )


class MLPShortcut:
    """See `fusible_ops.op.Shortcut`. It keeps no tensor: a guard that knows facts, and addresses.

    first, second: contexts of the linears in the call that this was made after.
    """

    def __init__(
        self,
        mlp: GroupedMLP,
        first: OperationContext,
        second: OperationContext,
        wants_dprobs: bool,
        guard: Callable[..., bool],
        sharing: Sharing,
        title: str,
    ) -> None:
        self.mlp, self.sharing, self.title = mlp, sharing, title
        self.records, self.wants_dprobs, self.has_probs = first.requires_grad, wants_dprobs, mlp.act.is_scaled
        self.fc1: GroupedLinear = mlp.fc1.op  # type: ignore[assignment]
        self.fc2: GroupedLinear = mlp.fc2.op  # type: ignore[assignment]
        self.plans1, self.plans2 = first.plans, second.plans
        self.owner1, self.owner2 = first.owner, second.owner
        parameters = [*first.held.weights, *second.held.weights]
        self.stacked = len(parameters) == 2
        self._guard, self._places = guard, list(map(Tensor.data_ptr, parameters))

    def __call__(self, x: Tensor, extra_inputs: Sequence[Tensor]) -> Tensor | None:
        weights = self.fc1.weight_parameters(), self.fc2.weight_parameters()
        parameters = weights[0] + weights[1]
        if len(parameters) != len(self._places) or len(extra_inputs) != 2 + self.has_probs:
            return None
        if extra_inputs[-1] is not extra_inputs[0] or not self._guard(x, *parameters, *extra_inputs[:-1]):
            return None
        if x.data_ptr() % VECTOR_BYTES or list(map(Tensor.data_ptr, parameters)) != self._places:
            return None
        if self.records:
            return record(x, self, weights, extra_inputs, *parameters, *extra_inputs)
        return self.forward(x, weights, extra_inputs)[0]

    def forward(self, x: Tensor, weights: Weights, extra_inputs: Sequence[Tensor]) -> tuple[Any, ...]:
        """(y, kernels, what backward needs). It is what `GroupedMLP` keeps, in that order: whoever repeats a forward in
        backward compares, and may have got the one by a shortcut and not the other.
        """
        casts.forget(*weights)
        w1, w2 = joined(weights[0], 3), joined(weights[1], 3)
        probs = extra_inputs[1] if self.has_probs else None
        kernels = forward_kernels(x, True, self.sharing, self.records)
        with shown(self.title, "forward"):
            offsets = kernels.group_offsets(extra_inputs[0], x.shape[0])
            y, _, preact = self.mlp.products(
                kernels,
                x,
                [w1],
                offsets,
                None,
                probs,
                self.records,
                self.plans1,
                [w2],
                offsets,
                None,
                None,
                self.plans2,
            )
        return y, kernels, (x, preact, offsets, probs, w1, w2)

    def check_backward(self, weights: Weights, unchanged: tuple[Unchanged, Unchanged] | None) -> None:
        """As `Call.check_backward`."""
        if self.fc1.accumulate_into_main_grad or self.fc2.accumulate_into_main_grad:
            self.fc1.check_main_grads(weights[0], self.owner1)
            self.fc2.check_main_grads(weights[1], self.owner2)
        if unchanged is not None:
            unchanged[0].check(self.owner1)
            unchanged[1].check(self.owner2)

    def backward(self, kernels: Any, dy: Tensor, saved: list[Any], weights: Weights) -> tuple[Tensor | None, ...]:
        """Gradients of x, all weights, all extra inputs. `saved` is emptied."""
        x, preact, offsets, probs, w1, w2 = saved
        saved.clear()
        act_op, plans1, plans2 = self.mlp.act.op, self.plans1, self.plans2
        activation, block = act_op.activation, act_op.glu_interleave
        with shown(self.title, "backward"):
            dy = incoming(dy, x.dtype)
            dpreact, act, dprobs = kernels.grouped_gemm_dact(
                dy, [w2], offsets, preact, activation, probs, True, self.wants_dprobs, False, plans=plans2
            )
            del preact
            dw2 = self.fc2.weight_grads(weights[1], WeightGrad(kernels, dy, act, offsets, 0, plans2))
            del act
            dw1 = self.fc1.weight_grads(weights[0], WeightGrad(kernels, dpreact, x, offsets, block, plans1))
            del x
            dx = kernels.grouped_gemm_dgrad(dpreact, [w1], offsets, block, plans=plans1)
        return dx, *dw1, *dw2, None, *((dprobs, None) if self.has_probs else (None,))


class _Run(torch.autograd.Function):
    """One call as an autograd node. `tensors`: all weights, all extra inputs, for autograd."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        shortcut: MLPShortcut,
        weights: Weights,
        extra_inputs: Sequence[Tensor],
        *tensors: Tensor,
    ) -> Tensor:
        y, ctx.kernels, kept = shortcut.forward(x, weights, extra_inputs)
        ctx.save_for_backward(*kept)
        ctx.shortcut, ctx.weights = shortcut, weights
        # Autograd sees whether a tensor changes that it keeps: all of a stacked weight, of several the first.
        ctx.unchanged = None if shortcut.stacked else (Unchanged(weights[0]), Unchanged(weights[1]))
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        saved, shortcut = saved_for(ctx), ctx.shortcut
        shortcut.check_backward(ctx.weights, ctx.unchanged)
        let_go(ctx)
        kernels = backward_kernels(ctx.kernels, dy, are_plain((dy, *saved)))
        dx, *rest = shortcut.backward(kernels, dy, saved, ctx.weights)
        return dx, None, None, None, *rest


record = super(torch.autograd.Function, _Run).apply
"""As `fusible_ops.call.record`."""
