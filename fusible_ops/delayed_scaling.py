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

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cute_kernels.quantization.formats import Element
from fusible_ops import saved_state
from fusible_ops.recipe import DelayedScaling

_FLOAT_MAX = torch.finfo(torch.float32).max


class DelayedScales:
    """The scales of an op's tensors in one direction, and what they come from. Updated in place, without a host sync.

    scale: FP32 [tensors], what a tensor is multiplied by. amax_history: FP32 [length, tensors]; row 0 is this step's.
    recipe, element, group: as of the last use; an update needs them.
    """

    def __init__(self, scale: Tensor, amax_history: Tensor) -> None:
        self.scale, self.amax_history = scale, amax_history
        self.recipe: DelayedScaling | None = None
        self.element: Element | None = None
        self.group: Any = None

    @staticmethod
    def fresh(tensors: int, length: int, device: torch.device) -> DelayedScales:
        """Scales of 1 and no history."""
        return DelayedScales(torch.ones(tensors, device=device), torch.zeros(length, tensors, device=device))

    def use(self, recipe: DelayedScaling, element: Element, device: torch.device, group: Any = None) -> None:
        """Make ready for a step: on `device`, with a history as long as the recipe has it, the recent part kept.

        group: the ranks that share their largest magnitudes, None for all, if there are several.
        """
        self.recipe, self.element, self.group = recipe, element, group
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

    def take(self, other: DelayedScales) -> None:
        """Go on from what another has come to, on the device where this is."""
        device = self.scale.device
        self.scale, self.amax_history = other.scale.to(device), other.amax_history.to(device)

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


_SUFFIXES = {"forward": "fwd", "backward": "bwd"}


def saved_scales(scales: Mapping[str, DelayedScales]) -> Tensor:
    """The scales of both directions as bytes, uint8 on the CPU, for a checkpoint, as Transformer Engine writes them
    (`saved_state`); empty if there are none.
    """
    if not scales:
        return torch.empty(0, dtype=torch.uint8)
    tensors = {
        mode: {f"scale_{_SUFFIXES[mode]}": s.scale.cpu(), f"amax_history_{_SUFFIXES[mode]}": s.amax_history.cpu()}
        for mode, s in scales.items()
    }
    lengths = {mode: DelayedScaling(amax_history_len=s.amax_history.shape[0]) for mode, s in scales.items()}
    recipes = {mode: s.recipe or lengths[mode] for mode, s in scales.items()}
    return torch.frombuffer(bytearray(saved_state.written(tensors, recipes)), dtype=torch.uint8)


def loaded_scales(state: Tensor | None, counts: Mapping[str, int], owner: str) -> dict[str, DelayedScales]:
    """What `saved_scales`, or Transformer Engine, wrote. counts: how many tensors each direction has.

    No code of the checkpoint runs. TypeError for what is no tensor, RuntimeError for anything else in one.
    """
    if state is None:
        return {}
    if not isinstance(state, Tensor):
        raise TypeError(f"{owner}: the checkpoint's _extra_state must be a tensor, got {type(state).__name__}")
    if not state.numel():
        return {}
    try:
        read = saved_state.read(state.cpu().numpy().tobytes())
        loaded = {
            mode: DelayedScales(read[mode][f"scale_{suffix}"], read[mode][f"amax_history_{suffix}"])
            for mode, suffix in _SUFFIXES.items()
            if mode in read and f"scale_{suffix}" in read[mode]
        }
    except Exception as error:
        raise RuntimeError(
            f"{owner}: the checkpoint's _extra_state ({state.numel()} bytes) holds no scales that this library, or "
            "Transformer Engine, saved; leave the _extra_state entries out to begin with fresh scales"
        ) from error
    for mode, scales in loaded.items():
        if scales.scale.shape != (counts[mode],):
            raise RuntimeError(
                f"{owner}: the checkpoint has delayed scales of {scales.scale.numel()} tensors in {mode}, but this op "
                f"has {counts[mode]}"
            )
    return loaded


def update_all(scales: Sequence[DelayedScales]) -> None:
    """Update each; where several ranks run, first take the largest magnitude of all ranks of its group."""
    if dist.is_available() and dist.is_initialized():
        shared = [s for s in scales if s.recipe is not None and s.recipe.reduce_amax]
        for group in dict.fromkeys(s.group for s in shared):
            if dist.get_world_size(group) > 1:
                _share([s.amax_history[0] for s in shared if s.group is group], group)
    for s in scales:
        s.update()


def _share(rows: Sequence[Tensor], group: Any) -> None:
    """Make each row the largest of all ranks', in one collective."""
    flat = torch.cat(list(rows))
    dist.all_reduce(flat, dist.ReduceOp.MAX, group)
    for row, largest in zip(rows, flat.split([row.shape[0] for row in rows]), strict=True):
        row.copy_(largest)
