"""What calls that are alike do with nothing left to decide: `Shortcut` makes them, a `ShortCall` is one of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor
from torch.nn import Parameter


class ShortCall(Protocol):
    """One call by a shortcut. parameters: of all ops, as it found them. The rest as `fusible_ops.call.Call`'s."""

    @property
    def parameters(self) -> Sequence[Parameter]: ...

    def run(self, x: Tensor, extra_inputs: Sequence[Tensor]) -> Tensor:
        """What the run gives, recorded for autograd if the shortcut is for such calls."""

    def forward(self, x: Tensor, extra_inputs: Sequence[Tensor]) -> Tensor: ...

    def take_saved(self) -> list[Tensor | None]: ...

    def check_backward(self) -> None: ...

    def backward(self, saved: list[Tensor | None], grad: Tensor) -> list[Tensor | None]: ...


class Shortcut(Protocol):
    """How a fused operation that is a whole run does calls that are alike, with nothing left to decide.

    records: whether for calls that record gradients; of such some have run backward before.
    """

    records: bool

    def call(self, x: Tensor, extra_inputs: Sequence[Tensor]) -> ShortCall | None:
        """A call with these; None if it is not alike. Nothing has run yet."""
