"""Keeping in host memory, until backward, what an op keeps of its input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

Op = TypeVar("Op", bound="Offloads")


class Offloads:
    """An op that may be told to."""

    offload: bool = False

    def fusible_parts(self) -> Sequence[Any]:
        raise NotImplementedError

    def offload_saved(self: Op, on: bool = True) -> Op:
        """What this op keeps of its input for backward waits in pinned host memory, if the op runs on a GPU.

        Of a fused chain only what is kept for this op. Copies go and come on the stream of the call, and nothing waits
        for them on the host. To be said before the first call. Returns the op.
        """
        for part in self.fusible_parts():
            part.offload = on
        return self


def in_host_memory(t: Tensor | None) -> Tensor | None:
    """A copy in pinned host memory, made on the current stream without waiting; t itself if it is on the CPU."""
    if t is None or not t.is_cuda:
        return t
    return torch.empty_like(t, device="cpu", pin_memory=True).copy_(t, non_blocking=True)
