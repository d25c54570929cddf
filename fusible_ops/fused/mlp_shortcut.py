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

from cute_kernels.catalog import SEPARATE_SPAN_BYTES
from cute_kernels.facts import NO_PLANS, VECTOR_BYTES, Plans, likeness
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


def mlp_shortcut(
    mlp: GroupedMLP,
    ctxs: Sequence[OperationContext],
    x: Tensor,
    extra_inputs: Sequence[Tensor],
    sharing: Sharing,
    title: str,
) -> MLPShortcut | None:
    """For calls like the one of these contexts, whose forward has run.

    None unless kernels take all operands as they are: rows [T, H], weights of the same dtype without biases, flat
    probs, one tensor of split sizes for both linears. And none where gradients are recorded for some of x and the
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
    """Whether kernels read the weights of this linear where they lie, as [N, K]."""
    if not isinstance(part, GroupedPart) or part.op.has_bias or part.op.transposed_weight:
        return False
    weights = ctx.held.weights[:1] if ctx.held.weights_packed else ctx.held.weights
    places = list(map(Tensor.data_ptr, weights))
    return (
        all(map(Tensor.is_contiguous, weights))
        and not any(place % VECTOR_BYTES for place in places)
        and max(places) - min(places) <= SEPARATE_SPAN_BYTES
    )


class MLPShortcut:
    """See `fusible_ops.shortcut.Shortcut`. It keeps no tensor: a guard that knows facts, and addresses.

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
        self.plans1, self.plans2 = (Plans() if ctx.plans is NO_PLANS else ctx.plans for ctx in (first, second))
        self.owner1, self.owner2 = first.owner, second.owner
        parameters = [*first.held.weights, *second.held.weights]
        self.stacked, self.count1 = len(parameters) == 2, len(first.held.weights)
        self.packed1, self.packed2 = first.held.weights_packed, second.held.weights_packed
        self._guard, self._places = guard, list(map(Tensor.data_ptr, parameters))

    def call(self, x: Tensor, extra_inputs: Sequence[Tensor]) -> ShortCall | None:
        weights1, weights2 = self.fc1.weight_parameters(), self.fc2.weight_parameters()
        parameters = weights1 + weights2
        if len(parameters) != len(self._places) or len(extra_inputs) != 2 + self.has_probs:
            return None
        if extra_inputs[-1] is not extra_inputs[0] or not self._guard(x, *parameters, *extra_inputs[:-1]):
            return None
        if x.data_ptr() % VECTOR_BYTES or list(map(Tensor.data_ptr, parameters)) != self._places:
            return None
        return ShortCall(self, weights1, weights2)


class ShortCall:
    """One call by a shortcut, as `fusible_ops.call.Call` is one of a run: forward, and what its backward needs."""

    __slots__ = ("kernels", "saved", "shortcut", "unchanged", "weights1", "weights2")

    def __init__(self, shortcut: MLPShortcut, weights1: list[Parameter], weights2: list[Parameter]) -> None:
        self.shortcut, self.weights1, self.weights2 = shortcut, weights1, weights2
        self.kernels: Any = None
        self.saved: list[Tensor | None] = []
        self.unchanged: tuple[Unchanged, Unchanged] | None = None

    @property
    def parameters(self) -> list[Parameter]:
        return self.weights1 + self.weights2

    def run(self, x: Tensor, extra_inputs: Sequence[Tensor]) -> Tensor:
        if self.shortcut.records:
            return record(x, self, extra_inputs, *self.weights1, *self.weights2, *extra_inputs)
        return self.forward(x, extra_inputs)

    def forward(self, x: Tensor, extra_inputs: Sequence[Tensor]) -> Tensor:
        shortcut = self.shortcut
        casts.forget(self.weights1, self.weights2)
        w1 = [joined(self.weights1, 3)] if shortcut.packed1 else list(map(Tensor.detach, self.weights1))
        w2 = [joined(self.weights2, 3)] if shortcut.packed2 else list(map(Tensor.detach, self.weights2))
        probs = extra_inputs[1] if shortcut.has_probs else None
        kernels = self.kernels = forward_kernels(x, True, shortcut.sharing, shortcut.records)
        with shown(shortcut.title, "forward"):
            offsets = kernels.group_offsets(extra_inputs[0], x.shape[0])
            y, _, preact = shortcut.mlp.products(
                kernels,
                x,
                w1,
                offsets,
                None,
                probs,
                shortcut.records,
                shortcut.plans1,
                w2,
                offsets,
                None,
                None,
                shortcut.plans2,
            )
        if shortcut.records:
            # Autograd sees whether a tensor changes that it keeps: all of a stacked weight, of several the first.
            self.unchanged = None if shortcut.stacked else (Unchanged(self.weights1), Unchanged(self.weights2))
            self.saved = [x, preact, offsets, probs, *w1, *w2]
        return y

    def take_saved(self) -> list[Tensor | None]:
        """What backward needs. It is what `GroupedMLP` keeps, in that order: whoever repeats a forward in backward
        compares, and may have got the one by a shortcut and not the other.
        """
        saved, self.saved = self.saved, []
        return saved

    def check_backward(self) -> None:
        """As `Call.check_backward`."""
        shortcut = self.shortcut
        if shortcut.fc1.accumulate_into_main_grad or shortcut.fc2.accumulate_into_main_grad:
            shortcut.fc1.check_main_grads(self.weights1, shortcut.owner1)
            shortcut.fc2.check_main_grads(self.weights2, shortcut.owner2)
        if self.unchanged is not None:
            self.unchanged[0].check(shortcut.owner1)
            self.unchanged[1].check(shortcut.owner2)

    def backward(self, saved: list[Any], dy: Tensor) -> list[Tensor | None]:
        """Gradients of x, all weights, all extra inputs. `saved` is emptied."""
        shortcut, kernels = self.shortcut, backward_kernels(self.kernels, dy, are_plain((dy, *saved)))
        x, preact, offsets, probs, *weights = saved
        saved.clear()
        count = 1 if shortcut.packed1 else shortcut.count1
        w1, w2 = weights[:count], weights[count:]
        act_op, plans1, plans2 = shortcut.mlp.act.op, shortcut.plans1, shortcut.plans2
        activation, block = act_op.activation, act_op.glu_interleave
        with shown(shortcut.title, "backward"):
            dy = incoming(dy, x.dtype)
            dpreact, act, dprobs = kernels.grouped_gemm_dact(
                dy, w2, offsets, preact, activation, probs, True, shortcut.wants_dprobs, False, plans=plans2
            )
            del preact
            dw2 = shortcut.fc2.weight_grads(self.weights2, WeightGrad(kernels, dy, act, offsets, 0, plans2))
            del act
            dw1 = shortcut.fc1.weight_grads(self.weights1, WeightGrad(kernels, dpreact, x, offsets, block, plans1))
            del x
            dx = kernels.grouped_gemm_dgrad(dpreact, w1, offsets, block, plans=plans1)
        return [dx, *dw1, *dw2, None, *((dprobs, None) if shortcut.has_probs else (None,))]


class _Run(torch.autograd.Function):
    """One call as an autograd node. `tensors`: all weights, all extra inputs, for autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: ShortCall, extra_inputs: Sequence[Tensor], *tensors: Tensor) -> Tensor:
        y = call.forward(x, extra_inputs)
        ctx.call = call
        ctx.save_for_backward(*call.take_saved())
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        saved = saved_for(ctx)
        ctx.call.check_backward()
        let_go(ctx)
        dx, *rest = ctx.call.backward(saved, dy)
        return dx, None, None, *rest


record = super(torch.autograd.Function, _Run).apply
"""As `fusible_ops.call.record`."""
