"""Kernels as the ops of a run call them where they share the device: with a margin, with counters, or plainly."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
from torch import Tensor

from cute_kernels.scheduling import ALONE, Sharing, choose_scheduler, choose_wgrad_scheduler

COUNTERS = 32
"""Counters of one call of a run. Launches take them in turn: two that share one are so many launches apart, or lie on
one stream; backward may run more than once, and weight gradients later and elsewhere."""
WGRADS = frozenset({"grouped_wgrad", "grouped_wgrad_", "nvfp4_grouped_wgrad", "nvfp4_grouped_wgrad_"})
COUNTED = (
    WGRADS
    | {f"grouped_{name}" for name in ("gemm", "gemm_", "gemm_dgrad", "gemm_act", "gemm_dact")}
    | {"mxfp8_grouped_gemm_act", "mxfp8_grouped_gemm_dact"}
    | {f"nvfp4_grouped_{name}" for name in ("gemm", "gemm_dgrad", "gemm_act", "gemm_dact")}
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
    | {"mxfp8_quantize", "mxfp8_dequantize", "mxfp8_quantize_weight"}
    | {f"nvfp4_{name}" for name in ("amax", "quantize", "dequantize", "quantize_weight")}
    | {f"padded_{format}{name}" for format in ("", "mxfp8_", "nvfp4_") for name in _PADDED}
)
"""Kernels that use more than one SM."""
SUMMED = frozenset(f"padded_{format}gemm_dact" for format in ("", "mxfp8_"))
"""Kernels that can add up by atomics."""


def shared(kernels: Any, sharing: Sharing, rows: int, records: bool) -> Any:
    """`kernels` (from `entry_points`) for one call of a run with so many rows: themselves, or so that every launch
    shares as it should. records: whether gradients are recorded.
    """
    counted = counted_kernels(sharing, rows, records)
    return SharingKernels(kernels, sharing, counted, Turns()) if counted or sharing != ALONE else kernels


def counted_kernels(sharing: Sharing, rows: int, records: bool) -> frozenset[str]:
    """Kernels that take their tiles through a counter."""
    asked = sharing.scheduler, sharing.sm_margin
    if choose_scheduler(*asked)[0] == "dynamic":
        return COUNTED
    return WGRADS if records and choose_wgrad_scheduler(*asked, rows)[0] == "dynamic" else frozenset()


def shared_as(former: Any, kernels: Any) -> Any:
    """`kernels` for the backward of a forward that ran with `former`: the same sharing, the same counters."""
    return former.over(kernels) if isinstance(former, SharingKernels) else kernels


def margin_of(kernels: Any) -> int:
    """SMs that `kernels` leave free."""
    return kernels.margin if isinstance(kernels, SharingKernels) else 0


class Turns:
    """The counters of one call of a run, once there are some, and whose turn it is."""

    def __init__(self) -> None:
        self.counters: Tensor | None = None
        self.numbers = itertools.cycle(range(COUNTERS))

    def take(self) -> Tensor:
        assert self.counters is not None
        return self.counters.narrow(0, next(self.numbers), 1)


class SharingKernels:
    """Functions of `kernels` by name, called with the margin, those of `counted` with a counter, and those that can add
    up by atomics so if they may.

    The first group offsets come with the counters of the whole call, all zero; if none come, a launch of its own makes
    them.
    """

    def __init__(self, kernels: Any, sharing: Sharing, counted: frozenset[str], turns: Turns) -> None:
        self._kernels, self._sharing, self._counted, self._turns = kernels, sharing, counted, turns

    @property
    def margin(self) -> int:
        return self._sharing.sm_margin

    def over(self, kernels: Any) -> SharingKernels:
        """The same sharing of other functions."""
        return SharingKernels(kernels, self._sharing, self._counted, self._turns)

    def group_offsets(self, split_sizes: Tensor, rows: int) -> Tensor:
        if not self._counted or self._turns.counters is not None:
            return self._kernels.group_offsets(split_sizes, rows)
        offsets, self._turns.counters = self._kernels.group_offsets_and_counters(split_sizes, rows, COUNTERS)
        return offsets

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._kernels, name)
        if name in self._counted:
            return functools.partial(self._call_with_counter, function)
        how: dict[str, Any] = {}
        if self._sharing.sm_margin and name in BOUNDED:
            how["sm_margin"] = self._sharing.sm_margin
        if not self._sharing.deterministic and name in SUMMED:
            how["deterministic"] = False
        return functools.partial(function, **how) if how else function

    def _call_with_counter(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        if self._turns.counters is None:  # the run's offsets came padded
            like = args[0] if isinstance(args[0], Tensor) else args[0][0]
            self._turns.counters = torch.zeros(COUNTERS, dtype=torch.int32, device=like.device)
        return function(*args, sm_margin=self._sharing.sm_margin, counter=self._turns.take(), **kwargs)
