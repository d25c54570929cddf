"""Kernels as the ops of a run call them where they share the device: with a margin, with counters, or plainly."""

from __future__ import annotations

import functools
import itertools
from typing import Any

from torch import Tensor

from cute_kernels.scheduling import ALONE, Sharing

COUNTERS = 32
"""Counters of one call of a run. Launches take them in turn: two that share one are so many launches apart, or lie on
one stream; backward may run more than once, and weight gradients later and elsewhere."""
COUNTED = frozenset(
    f"grouped_{name}" for name in ("gemm", "gemm_", "gemm_dgrad", "gemm_act", "gemm_dact", "wgrad", "wgrad_")
)
"""Kernels that take tiles."""
_FP8 = (
    "quantize",
    "quantize_weight",
    *(f"grouped_{name}" for name in ("gemm", "gemm_act", "gemm_dact", "wgrad", "wgrad_")),
)
_PADDED = ("gemm", "gemm_act", "gemm_dact", "wgrad", "wgrad_")
BOUNDED = (
    COUNTED
    | {"dact", "grouped_dbias", "grouped_dscale"}
    | {f"fp8_{name}" for name in _FP8}
    | {f"padded_{name}" for name in _PADDED}
)
"""Kernels that use more than one SM."""


def shared(kernels: Any, sharing: Sharing) -> Any:
    """`kernels` (from `entry_points`) for one call of a run: themselves, or so that every launch shares as asked."""
    return kernels if sharing == ALONE else SharingKernels(kernels, sharing, Turns())


def shared_as(former: Any, kernels: Any) -> Any:
    """`kernels` for the backward of a forward that ran with `former`: the same sharing, the same counters."""
    return former.over(kernels) if isinstance(former, SharingKernels) else kernels


class Turns:
    """The counters of one call of a run, once there are some, and whose turn it is."""

    def __init__(self) -> None:
        self.counters: Tensor | None = None
        self.numbers = itertools.cycle(range(COUNTERS))

    def take(self) -> Tensor:
        assert self.counters is not None, "kernels that take tiles come after the group offsets"
        return self.counters.narrow(0, next(self.numbers), 1)


class SharingKernels:
    """Functions of `kernels` by name, called with the margin, and those that can with a counter.

    The first group offsets come with the counters of the whole call, all zero.
    """

    def __init__(self, kernels: Any, sharing: Sharing, turns: Turns) -> None:
        self._kernels, self._sharing, self._turns = kernels, sharing, turns
        self._dynamic = sharing.chosen()[0] == "dynamic"

    def over(self, kernels: Any) -> SharingKernels:
        """The same sharing of other functions."""
        return SharingKernels(kernels, self._sharing, self._turns)

    def group_offsets(self, split_sizes: Tensor, rows: int) -> Tensor:
        if not self._dynamic or self._turns.counters is not None:
            return self._kernels.group_offsets(split_sizes, rows)
        offsets, self._turns.counters = self._kernels.group_offsets_and_counters(split_sizes, rows, COUNTERS)
        return offsets

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._kernels, name)
        if self._dynamic and name in COUNTED:
            return functools.partial(self._call_with_counter, function)
        return functools.partial(function, sm_margin=self._sharing.sm_margin) if name in BOUNDED else function

    def _call_with_counter(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        return function(*args, sm_margin=self._sharing.sm_margin, counter=self._turns.take(), **kwargs)
