"""Weights in another dtype, as `torch.autocast` asks for them, or quantised: once per update, not once per forward.

A cast (or a quantised copy) is kept and used again while nothing says that its parameters changed. What says so: a
version counter (changes in place, `load_state_dict`), another storage, place or layout in it (`p.data = ...`), a step
of any torch optimizer in this process (some write through `p.data`, or from kernels of their own, which no version
counter sees), another parameter in its place (FSDP2 so gathers and shards), and a change between recording gradients
and not (weights may be swapped for an evaluation). Not seen is what a program itself writes, between two forwards of
the same kind, through `p.data`, a buffer behind it or NumPy: write to `p` under `torch.no_grad()` instead, or switch
keeping off with `torch.autocast(..., cache_enabled=False)`.

A CUDA graph holds a cast of its own, since each replay may follow an update that the host does not see. Parameters that
a graph has read, and all once a graph holds an optimizer step, are cast at every forward from then on.

What is kept costs the memory of the cast. It goes with the parameters, and at the first forward that does not use it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

from cute_kernels import launch
from cute_kernels.facts import WITHOUT_MEMORY, likeness


@dataclass(frozen=True)
class _Kept:
    """A cast, and the state of its parameters and of the world that it was made in.

    places: `_places` of the parameters. kinds: `_kinds` of them; alike: the same question, sooner answered, but it may
    say no where they are alike. storages: held weakly, so that their addresses stay taken without keeping their memory.
    """

    world: tuple[Any, ...]
    places: list[list[int]]
    kinds: list[Any]
    alike: Callable[..., bool] | None
    storages: tuple[StorageWeakRef, ...]
    tensors: list[Tensor]

    def are_like(self, parameters: Sequence[Tensor]) -> bool:
        """Whether these surely are of the kinds of its own."""
        return self.alike is not None and len(parameters) == len(self.storages) and self.alike(*parameters)


class _Optimizers:
    """Steps that torch optimizers made in this process, and whether a CUDA graph holds one and may repeat it."""

    def __init__(self) -> None:
        self.steps, self.is_captured, self._is_watching = 0, False, False

    def watch(self) -> None:
        """Begin to count; idempotent."""
        if not self._is_watching:
            register_optimizer_step_post_hook(self._stepped)
            self._is_watching = True

    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.steps += 1
        self.is_captured = self.is_captured or (
            torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
        )


_kept: WeakIdKeyDictionary = WeakIdKeyDictionary()  # first parameter -> _Kept, or None once a graph has captured it
_optimizers = _Optimizers()


def cast(parameters: Sequence[Tensor], form: Hashable, records: bool, make: Callable[[], list[Tensor]]) -> list[Tensor]:
    """`make()`, which gives the parameters in another form, or what it gave before.

    form: all that `make` depends on beside the parameters: a dtype, dimensions, a quantised format and its copies, how
    the parameters are read. records: gradients are recorded.
    """
    first = parameters[0]
    if isinstance(first, WITHOUT_MEMORY):  # in a compiler's graph it belongs to each run
        return make()
    if first.is_cuda and torch.cuda.is_current_stream_capturing():
        _kept[first] = None
        return make()
    known = _kept.get(first, _NEVER)
    alike = known is not None and known.are_like(parameters)
    if known is None or _optimizers.is_captured or not _may_keep(parameters, alike):
        return make()
    stream = launch.current_stream(first.device) if first.is_cuda else 0
    world = form, stream, records, torch.is_inference_mode_enabled(), _optimizers.steps
    places = _places(parameters)
    if known.world == world and known.places == places and (alike or known.kinds == _kinds(parameters)):
        return known.tensors
    _optimizers.watch()
    _kept.pop(first, None)  # before there is a second one
    storages = tuple(StorageWeakRef(p.untyped_storage()) for p in parameters)
    made = _kept[first] = _Kept(world, places, _kinds(parameters), likeness(*parameters), storages, make())
    return made.tensors


def forget(*several: Sequence[Tensor]) -> None:
    """Drop what is kept of these parameters: they are used as they are."""
    if _kept.data:
        for parameters in several:
            if _kept.get(parameters[0]) is not None:
                del _kept[parameters[0]]


def is_shard(p: Tensor | None) -> bool:
    """Whether p is a DTensor, of which this process holds a part. Told by its name: its module takes long to load."""
    return type(p).__name__ == "DTensor"


class ParameterOwner(nn.Module):
    """A module of which a parameter that another takes the place of loses what is kept of it. FSDP2 so exchanges shards
    and whole parameters, whose memory it frees and fills again where no version counter sees it.

    is_sharded: whether a parameter has been a shard.
    """

    is_sharded = False

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        if is_shard(param):
            self.is_sharded = True
        former = self._parameters.get(name)
        if former is not None and former is not param:
            forget([former])
        super().register_parameter(name, param)


def _may_keep(parameters: Sequence[Tensor], alike: bool) -> bool:
    """alike: to some of which a cast is kept, so that none is of inference mode."""
    return torch.is_autocast_cache_enabled() and (alike or not any(map(Tensor.is_inference, parameters)))


_CDATA, _VERSION, _KIND = attrgetter("_cdata"), attrgetter("_version"), attrgetter("dtype", "shape")


def _places(parameters: Sequence[Tensor]) -> list[list[int]]:
    """Where parameters lie, and how often each was changed in place: asked at every forward, so no loop in Python."""
    storages = map(Tensor.untyped_storage, parameters)
    return [list(map(_CDATA, storages)), list(map(Tensor.data_ptr, parameters)), list(map(_VERSION, parameters))]


def _kinds(parameters: Sequence[Tensor]) -> list[Any]:
    """How parameters lie there."""
    return [*map(_KIND, parameters), *map(Tensor.stride, parameters)]


_NEVER = _Kept((), [], [], None, (), [])
