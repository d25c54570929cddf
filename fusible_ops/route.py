"""What is kept of a call for others that are alike: which steps run, contexts made ready, plans of kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cute_kernels.facts import NO_PLANS, VECTOR_BYTES, Plans, likeness
from cute_kernels.quantization.formats import Format
from fusible_ops.op import BasicOperation, FusedOperation, OperationContext
from fusible_ops.parameters import Held
from fusible_ops.quantized_tensor import QuantizedTensor, format_of
from fusible_ops.recipe import Recipe


@dataclass(frozen=True)
class Step:
    """`op` runs the basic ops of `span`. name: of the rule and its ops, or of the unfused op, for profilers. before,
    after: the formats in which the steps around it quantise what it gives them, if they do. rule: the name of the rule
    that planned it, if one did.
    """

    op: BasicOperation | FusedOperation
    span: slice
    name: str
    before: Format | None = None
    after: Format | None = None
    rule: str = ""


class Route:
    """What calls with the same facts of all tensors, which require gradients alike, have in common.

    steps, backward_steps: what runs forward, backward. device: x's. autocast_dtype, recipe: those that are active.
    plain: all tensors are (`ops.are_plain`).
    keeps_plans: those facts say all about operands, so plans may be kept.
    """

    def __init__(
        self,
        steps: tuple[Sequence[Step], Sequence[Step]],
        device: torch.device,
        autocast_dtype: torch.dtype | None,
        recipe: Recipe | None,
        plain: bool,
        keeps_plans: bool,
    ) -> None:
        self.steps, self.backward_steps = steps
        self.device = device
        self.autocast_dtype, self.recipe = autocast_dtype, recipe
        self.plain, self.keeps_plans = plain, keeps_plans
        self.is_full = False
        """Whether calls have more than extra inputs of the caller's (`full_call.FullCall`)."""
        self.contexts: dict[Any, list[tuple[type[OperationContext], Plans]]] = {}
        """For each pattern of wanted gradients (see `OperationFuser.context_kinds`): of each basic op the kind of its
        context, and its plans.
        """
        self.went_back: set[tuple[bool, ...]] = set()
        """For which patterns of wanted gradients a backward has run, so that its kernels can be had."""
        self.failed = False
        """Whether a kernel of these steps could not be had."""
        self.unshortened: set[bool] = set()
        """Whether gradients are recorded, for calls for which no shortcut was asked since the last one was learnt; none
        while parameters move from call to call, since a shortcut knows addresses.
        """
        self._alike: list[Callable[..., bool]] = []  # for x and the parameters, then for each extra input
        self._addresses: list[int] = []
        self._moved = False  # the parameters, before the call learnt last, and no call has fitted since
        self._packed: list[tuple[bool, bool]] = []
        self._formats: list[Format | None] = []  # of the parameters, if some are quantised

    def plans(self, index: int) -> Plans:
        """New plans for basic op `index`. What steps after the first are given may differ where facts are the same."""
        return Plans() if self.keeps_plans and index < self.steps[0].span.stop else NO_PLANS

    def learn(
        self, x: Tensor, extra_inputs: Sequence[Tensor], parameters: Sequence[Tensor], held: Sequence[Held]
    ) -> None:
        """Let `fits` know a call of this route."""
        if not self._alike:
            made = [likeness(x, *parameters), *map(likeness, extra_inputs)]
            self._alike = [alike for alike in made if alike is not None]
        former, self._addresses = self._addresses, list(map(Tensor.data_ptr, parameters))
        self._moved = bool(former) and former != self._addresses
        self.unshortened = set() if self._moved else {True, False}
        self._packed = [(own.weights_packed, own.biases_packed) for own in held]
        quantized = QuantizedTensor in map(type, parameters)
        self._formats = list(map(format_of, parameters)) if quantized else []

    def fits(
        self, x: Tensor, extra_inputs: Sequence[Tensor], parameters: Sequence[Tensor], held: Sequence[Held]
    ) -> bool:
        """Whether a call is surely of this route: all has the facts of the call learnt last, and parameters lie where
        they lay. Then what is known of them is told to `held`.
        """
        if len(self._alike) != 1 + len(extra_inputs) or not self._alike[0](x, *parameters):
            return False
        for alike, t in zip(self._alike[1:], extra_inputs, strict=True):
            if not alike(t) or t.data_ptr() % VECTOR_BYTES:
                return False
        if x.data_ptr() % VECTOR_BYTES or list(map(Tensor.data_ptr, parameters)) != self._addresses:
            return False
        if self._formats and list(map(format_of, parameters)) != self._formats:
            return False
        for own, packed in zip(held, self._packed, strict=True):
            own.knows(packed)
        if self._moved:
            self._moved, self.unshortened = False, {True, False}
        return True
