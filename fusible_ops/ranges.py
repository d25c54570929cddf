"""Ranges that a profiler shows, named after rules and ops; where none is looking they cost one check.

Under `torch.profiler` and `torch.autograd.profiler.emit_nvtx()` they are `record_function` ranges (NVTX ones in the
latter); where Nsight Systems or Compute has started the process, NVTX ranges also without PyTorch's profiler.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from cute_kernels.target import is_traced

_NOTHING = contextlib.nullcontext()


def shown(name: str, direction: str) -> contextlib.AbstractContextManager[Any]:
    """The range "name direction" around what runs in it, if a profiler is looking."""
    if torch._C._autograd._profiler_enabled():
        return torch.profiler.record_function(f"{name} {direction}")
    return torch.cuda.nvtx.range(f"{name} {direction}") if is_traced() else _NOTHING
