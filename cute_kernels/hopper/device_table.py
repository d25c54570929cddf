"""Integers that the host knows (addresses of separate weights, say) as an int64 tensor on the device, without a sync.

Tables are remembered by (device, stream, values): weights keep their addresses, so a training step finds its tables
again. Under CUDA graph capture a fresh table is made and filled inside the graph, and nothing is remembered: the
graph then owns its memory, and a table that is filled only at replay is never handed to anybody else.
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cute_kernels import launch
from cute_kernels.catalog import SEPARATE_SPAN_BYTES, SM90_GROUPED_GEMM
from cute_kernels.facts import VECTOR_BYTES

MODULE = "cute_kernels.hopper.device_table_kernel"
VALUES = 128  # values that one launch carries, 1 KiB of arguments
REMEMBERED = 512  # tables

_tables: OrderedDict[tuple[torch.device, int, tuple[int, ...]], Tensor] = OrderedDict()
_lock = threading.Lock()


@dataclass(frozen=True)
class TableOptions:
    """Static facts of the kernel that fills a table."""

    count: int = VALUES


def device_table(values: tuple[int, ...], device: torch.device, stream: int, arch: str) -> Tensor:
    """int64 [len(values)] on `device`, ready for work on `stream` (the current stream of `device`)."""
    if _is_capturing(device):
        return _filled(values, device, stream, arch)
    key = (device, stream, values)
    with _lock:
        table = _tables.get(key)
        if table is not None:
            _tables.move_to_end(key)
            return table
    table = _filled(values, device, stream, arch)
    with _lock:
        _tables[key] = table
        while len(_tables) > REMEMBERED:
            _tables.popitem(last=False)
    return table


def _is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph records the current stream of the device."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def addresses(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """The address of each tensor's first element."""
    return tuple(map(Tensor.data_ptr, tensors))


def _filled(values: tuple[int, ...], device: torch.device, stream: int, arch: str) -> Tensor:
    table = torch.empty(len(values), dtype=torch.int64, device=device)
    fill = launch.kernel(MODULE, TableOptions(), arch)
    for first in range(0, len(values), VALUES):
        part = values[first : first + VALUES]
        fill(table, first, part + (0,) * (VALUES - len(part)), stream)
    return table


def distance_table(name: str, weights: Sequence[Tensor], device: torch.device, stream: int) -> tuple[Tensor, Tensor]:
    """(the tensor at the lowest address, int64 [G] distances from it in units of 16 bytes, on the device).

    Addresses are asked at every call: between forward and backward weights may get other memory.
    """
    lowest, distances = _distances(name, addresses(weights))
    return weights[lowest], device_table(distances, device, stream, SM90_GROUPED_GEMM.arch)


@functools.lru_cache(maxsize=512)
def _distances(name: str, places: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """(which address is lowest, distances from it in units of 16 bytes)."""
    lowest = min(places)
    span = max(places) - lowest
    if span > SEPARATE_SPAN_BYTES:
        raise ValueError(
            f"{name}: separate weights lie {span} bytes apart, needs at most {SEPARATE_SPAN_BYTES} (32 GiB); "
            "allocate them together or stack them"
        )
    return places.index(lowest), tuple((place - lowest) // VECTOR_BYTES for place in places)
