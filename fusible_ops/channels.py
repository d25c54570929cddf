"""Extra tensors of a run: which slot is the caller's, and which outputs feed inputs of later ops through a channel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

from torch import Tensor

if TYPE_CHECKING:
    from fusible_ops.op import BasicOperation

Ends = TypeVar("Ends", bound="ChannelEnds")
Slot = tuple[int, int]
"""(basic op, which of its extra inputs or outputs)."""


class ChannelEnds:
    """The extra inputs and outputs of one basic op, each the caller's unless bound to a named channel.

    A bound input gets what the earlier op of the same run put into the channel of that name. Bindings hold from the
    first run on that the op is part of, a call of the op alone included.
    Source: the interface is that of transformer_engine.pytorch.ops.BasicOperation (2.20).
    """

    num_extra_inputs: int = 0
    num_extra_outputs: int = 0
    overwrites_extra_inputs: bool = False
    overwrites_extra_grads: bool = False
    """Whether forward writes into extra inputs, backward into gradients of extra outputs: channels give it copies."""

    def open_channels(self) -> None:
        """Every slot is the caller's."""
        self._extra_input_channels: list[str | None] = [None] * self.num_extra_inputs
        self._extra_output_channels: list[str | None] = [None] * self.num_extra_outputs
        self._extra_output_to_caller = [True] * self.num_extra_outputs
        self._extra_tensor_channels_locked = False

    def set_extra_input_channel(self: Ends, index: int, channel: str | None) -> Ends:
        """Bind extra input `index` to a channel; None gives it back to the caller. Returns the op.

        Errors: IndexError for no such input; ValueError for a channel that is no name; RuntimeError once a run has it.
        """
        self._check(index, self.num_extra_inputs, "input", channel)
        self._extra_input_channels[index] = channel
        return self

    def set_extra_output_channel(self: Ends, index: int, channel: str | None, *, output_to_caller: bool = True) -> Ends:
        """Bind extra output `index` to a channel; None unbinds it. output_to_caller: whether it is returned besides.

        Errors: as `set_extra_input_channel`; TypeError for an output_to_caller that is no bool.
        """
        self._check(index, self.num_extra_outputs, "output", channel)
        if not isinstance(output_to_caller, bool):
            raise TypeError(f"output_to_caller must be a bool, got {output_to_caller!r}")
        self._extra_output_channels[index] = channel
        self._extra_output_to_caller[index] = output_to_caller or channel is None
        return self

    def _check(self, index: int, count: int, kind: str, channel: object) -> None:
        owner = type(self).__name__
        if not 0 <= index < count:
            raise IndexError(f"extra {kind} {index} of {owner} is out of range: it has {count}")
        if channel is not None and not (isinstance(channel, str) and channel):
            raise ValueError(f"a channel is a non-empty string, or None; got {channel!r}")
        if self._extra_tensor_channels_locked:
            raise RuntimeError(
                f"a run has already captured its channel routing from this {owner}; bind channels of new ops, before "
                "their first call"
            )


class Routing:
    """Where the extra tensors of a run go.

    sources: for each op and extra input the slot that feeds it, None for the caller's. consumers: for each op and extra
    output the ops that it feeds. public_inputs, public_outputs: the caller's slots, in order. is_plain: no channel is
    bound and there is no extra output.
    Errors: ValueError for a channel with several producers, without a producer, or without an earlier one.
    """

    def __init__(self, ops: Sequence[BasicOperation]) -> None:
        self.ops = ops
        producers: dict[str, Slot] = {}
        for i, op in enumerate(ops):
            for j, channel in enumerate(op._extra_output_channels):
                if channel is None:
                    continue
                if channel in producers:
                    raise ValueError(f"channel {channel!r} has multiple producers, ops {producers[channel][0]} and {i}")
                producers[channel] = (i, j)
        self.sources: list[list[Slot | None]] = [[None] * op.num_extra_inputs for op in ops]
        self.consumers: list[list[list[int]]] = [[[] for _ in range(op.num_extra_outputs)] for op in ops]
        for i, op in enumerate(ops):
            for j, channel in enumerate(op._extra_input_channels):
                if channel is not None:
                    self.sources[i][j] = source = _earlier(producers.get(channel), channel, i, op)
                    self.consumers[source[0]][source[1]].append(i)
            op._extra_tensor_channels_locked = True
        self.public_inputs = [(i, j) for i, own in enumerate(self.sources) for j, s in enumerate(own) if s is None]
        self.public_outputs = [
            (i, j) for i, op in enumerate(ops) for j, public in enumerate(op._extra_output_to_caller) if public
        ]
        bound = any(source is not None for own in self.sources for source in own)
        self.is_plain = not bound and not any(op.num_extra_outputs for op in ops)

    def placed(self, extra_inputs: Sequence[Tensor]) -> list[list[Tensor | None]]:
        """The caller's tensors in their slots; None where a channel feeds one."""
        places: list[list[Tensor | None]] = [[None] * op.num_extra_inputs for op in self.ops]
        for tensor, (i, j) in zip(extra_inputs, self.public_inputs, strict=False):
            places[i][j] = tensor
        return places

    def wants(self, public: Sequence[Sequence[bool]], first: int) -> list[tuple[bool, ...]]:
        """Which extra inputs require gradients, given the caller's: a channel's where the op that fills it comes after
        the first through which gradients flow.
        """
        wanted = []
        for own, sources in zip(public, self.sources, strict=True):
            flags = iter(own)
            wanted.append(tuple(next(flags) if source is None else source[0] >= first for source in sources))
        return wanted


def _earlier(producer: Slot | None, channel: str, index: int, op: BasicOperation) -> Slot:
    if producer is None:
        raise ValueError(f"channel {channel!r}, which op {index} ({type(op).__name__}) reads, has no producer")
    if producer[0] >= index:
        raise ValueError(f"channel {channel!r}, which op {index} ({type(op).__name__}) reads, has no earlier producer")
    return producer
