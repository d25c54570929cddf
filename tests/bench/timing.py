"""What benches measure beside time (`fusible_ops.bench.timing`): bytes that live tensors asked for, and launches."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

from fusible_ops.bench.timing import MIB, medians, uneven_splits

__all__ = ["MIB", "launches", "medians", "requested_bytes", "uneven_splits"]


def requested_bytes(what: str = "current") -> int:
    """Bytes that live tensors asked for ("current"), or the most since the last reset ("peak"): without what the
    allocator rounds up, which depends on what it has cached.
    """
    return torch.cuda.memory_stats()[f"requested_bytes.all.{what}"]


def launches(run: Callable[[], object]) -> list[str]:
    """Names of the kernels, copies and memsets that `run` puts on the device, as the profiler counts them."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        run()
        torch.cuda.synchronize()
    return [e.name for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
