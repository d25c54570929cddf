"""Delayed scaling: the scale of a tensor comes from the largest magnitudes that it had in earlier steps.

Forward and backward quantise with the scale of the last update, `q = cast(x · scale)`, and note the largest magnitude.
An update, when the outermost `autocast` is left (forward), or when a run of ops has finished its backward, makes

    scale = (largest element / amax) / 2^margin        amax: the largest in the history, or the most recent

and keeps the old scale where amax is 0, Inf or NaN; a scale that overflows becomes the largest FP32. Then the history
moves on by one step. A tensor's first scale is 1. An op should run only once in each outermost `autocast`: a second run
notes its magnitudes into the same step.

Source: Transformer Engine 2.20, `common/recipe/delayed_scaling.cu` (Apache-2.0).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cute_kernels.quantization.formats import Element
from fusible_ops.recipe import DelayedScaling

_FLOAT_MAX = torch.finfo(torch.float32).max


class DelayedScales:
    """The scales of an op's tensors in one direction, and what they come from. Updated in place, without a host sync.

    scale: FP32 [tensors], what a tensor is multiplied by. amax_history: FP32 [length, tensors]; row 0 is this step's.
    recipe, element: as of the last use; an update needs them.
    """

    def __init__(self, scale: Tensor, amax_history: Tensor) -> None:
        self.scale, self.amax_history = scale, amax_history
        self.recipe: DelayedScaling | None = None
        self.element: Element | None = None

    @staticmethod
    def fresh(tensors: int, length: int, device: torch.device) -> DelayedScales:
        """Scales of 1 and no history."""
        return DelayedScales(torch.ones(tensors, device=device), torch.zeros(length, tensors, device=device))

    def use(self, recipe: DelayedScaling, element: Element, device: torch.device) -> None:
        """Make ready for a step: on `device`, with a history as long as the recipe has it, the recent part kept."""
        self.recipe, self.element = recipe, element
        if self.scale.device != device:
            self.scale, self.amax_history = self.scale.to(device), self.amax_history.to(device)
        length, tensors = self.amax_history.shape
        if length > recipe.amax_history_len:
            # Rows are in the order 0 (this step), oldest, …, most recent.
            recent = self.amax_history[length - recipe.amax_history_len + 1 :]
            self.amax_history = torch.cat([self.amax_history[:1], recent])
        elif length < recipe.amax_history_len:
            older = self.amax_history.new_zeros(recipe.amax_history_len - length, tensors)
            self.amax_history = torch.cat([self.amax_history[:1], older, self.amax_history[1:]])

    def note(self, amax: Tensor, tensors: slice) -> None:
        """Keep the larger of what this step has seen and `amax`, FP32 [tensors]; NaN is ignored."""
        row = self.amax_history[0, tensors]
        row.copy_(torch.fmax(row, amax))

    def update(self) -> None:
        """The scales of the next step."""
        recipe, history = self.recipe, self.amax_history
        assert recipe is not None and self.element is not None
        if callable(recipe.amax_compute_algo):
            amax = recipe.amax_compute_algo(history)
        else:
            amax = history[0] if recipe.amax_compute_algo == "most_recent" else history.amax(0)
        largest = self.element.max
        if recipe.scaling_factor_compute_algo is not None:
            self.scale.copy_(recipe.scaling_factor_compute_algo(amax, self.scale, largest, recipe))
        else:
            scale = torch.full_like(amax, largest) / amax / 2.0**recipe.margin
            scale = scale.masked_fill(scale.isinf(), _FLOAT_MAX)
            self.scale.copy_(torch.where((amax > 0) & amax.isfinite(), scale, self.scale))
        history.copy_(history.roll(-1, 0))
        history[0] = 0

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs, on the CPU."""
        return {"scale": self.scale.cpu(), "amax_history": self.amax_history.cpu()}


def update_all(scales: Iterable[DelayedScales], group: Any = None) -> None:
    """Update each; where several ranks run, first take the largest magnitude of all ranks of `group` (None: all)."""
    scales = list(scales)
    if dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1:
        shared = [s for s in scales if s.recipe is not None and s.recipe.reduce_amax]
        if shared:
            flat = torch.cat([s.amax_history[0] for s in shared])
            dist.all_reduce(flat, dist.ReduceOp.MAX, group)
            for s, row in zip(shared, flat.split([s.amax_history.shape[1] for s in shared]), strict=True):
                s.amax_history[0] = row
    for s in scales:
        s.update()
