"""What benches measure beside time (`fusible_ops.bench.timing`): bytes that live tensors asked for, and launches."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

from fusible_ops.bench.timing import MIB, medians, uneven_splits

__all__ = ["MIB", "launch_times", "launches", "medians", "requested_bytes", "uneven_splits"]


def requested_bytes(what: str = "current") -> int:
    """Bytes that live tensors asked for ("current"), or the most since the last reset ("peak"): without what the
    allocator rounds up, which depends on what it has cached.
    """
    return torch.cuda.memory_stats()[f"requested_bytes.all.{what}"]


def launches(run: Callable[[], object]) -> list[str]:
    """Names of the kernels, copies and memsets that `run` puts on the device, as the profiler counts them."""
    return [name for name, _ in _profiled(run)]


def launch_times(run: Callable[[], object], rounds: int = 7) -> list[tuple[str, float]]:
    """(name, median milliseconds) of each launch of `run`, which makes the same ones every time, one after the other as
    they come: with the clock and the caches as the launches before leave them.
    """
    run()
    results = [_profiled(run) for _ in range(rounds)]
    return [(each[0][0], statistics.median(ms for _, ms in each)) for each in zip(*results, strict=True)]


def _profiled(run: Callable[[], object]) -> list[tuple[str, float]]:
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        run()
        torch.cuda.synchronize()
    events = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    events.sort(key=lambda e: e.time_range.start)
    return [(e.name, e.time_range.elapsed_us() / 1e3) for e in events]
