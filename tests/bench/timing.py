"""What benches measure beside calls in turn (`fusible_ops.bench.timing`): bytes that live tensors asked for, launches,
and calls without a pause.
"""

from __future__ import annotations

import math
import statistics
import subprocess
from collections.abc import Callable, Mapping

import torch
from torch.profiler import ProfilerActivity, profile

from fusible_ops.bench.timing import MIB, medians, uneven_splits

__all__ = ["MIB", "launch_times", "launches", "medians", "requested_bytes", "sustained", "uneven_splits"]


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


def sustained(
    callables: Mapping[str, Callable[[], object]], seconds: float = 0.5, turns: int = 3
) -> dict[str, tuple[float, float, float]]:
    """(milliseconds a call, MHz of the SMs, watts) of each callable, run for so long without a pause and then timed for
    as long again; medians over its turns. One that raises is left out.

    Clock and power are what `nvidia-smi` says while the last calls run.
    """
    counts: dict[str, int] = {}
    found: dict[str, list[tuple[float, float, float]]] = {}
    for name, call in callables.items():
        try:
            call()
            counts[name] = max(1, int(seconds * 1e3 / medians({name: call}, rounds=3)[name]))
            found[name] = []
        except Exception as error:  # a peer that does not run is no reason to stop
            print(f"  {name} does not run: {type(error).__name__}: {str(error)[:200]}", flush=True)
    for _ in range(turns):
        for name, count in counts.items():
            found[name].append(_without_pause(callables[name], count))
    return {name: tuple(statistics.median(v) for v in zip(*each, strict=True)) for name, each in found.items()}


def _without_pause(call: Callable[[], object], count: int) -> tuple[float, float, float]:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(count):
        call()
    start.record()
    for _ in range(count):
        call()
    stop.record()
    clock, watts = _state()
    stop.synchronize()
    return start.elapsed_time(stop) / count, clock, watts


def _state() -> tuple[float, float]:
    """MHz of the SMs and watts of the current device, NaN where they cannot be asked for."""
    query = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits"]
    uuid = torch.cuda.get_device_properties().uuid
    try:
        told = subprocess.run([*query, f"--id=GPU-{uuid}"], capture_output=True, text=True, timeout=10, check=True)
        clock, watts = map(float, told.stdout.split(","))
    except (OSError, subprocess.SubprocessError, ValueError):
        return math.nan, math.nan
    return clock, watts
