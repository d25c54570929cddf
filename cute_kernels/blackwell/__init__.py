"""Adapters to NVIDIA cuDNN Frontend's grouped-GEMM kernels for Blackwell (SM100, SM103): our call on one side, theirs
on the other, nothing else. `host_functions()` are the entry points; the package is imported when a kernel is built.

Compiled and call-checked on machines without a Blackwell (tests/cpu/test_blackwell_calls.py); not run on one yet.

What all share. M: rows of a padded buffer; E groups.

- **Padded rows** (`rows.PaddedGroups`): groups begin and end at multiples of 256 rows; rows of no token are zero; the
  last group runs to the end of the buffer. `ends` is int32 [E], cumulative, without a leading zero, a tensor of its
  own (16-byte aligned).
- **Interleave.** Columns of a gated pre-activation and of its gradient lie as weight rows do: 32 of gate, 32 of up, ...
- One object of theirs serves every M, is built once a process (`frontend.operation`), and needs no scratch memory that
  two streams would share: weights are one [E, N, K] tensor, and tiles are dealt out statically.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace

_MODULES = {
    "padded_gemm": "padded",
    "padded_gemm_act": "padded",
    "padded_gemm_dact": "padded",
    "padded_wgrad": "padded",
    "padded_wgrad_": "padded",
    "padded_mxfp8_gemm": "padded_mxfp8",
    "padded_mxfp8_gemm_act": "padded_mxfp8",
    "padded_mxfp8_gemm_dact": "padded_mxfp8",
    "padded_mxfp8_wgrad": "padded_mxfp8",
    "padded_mxfp8_wgrad_": "padded_mxfp8",
    "padded_nvfp4_gemm": "padded_nvfp4",
    "padded_nvfp4_gemm_act": "padded_nvfp4",
    "padded_nvfp4_gemm_dact": "padded_nvfp4",
    "padded_nvfp4_wgrad": "padded_nvfp4",
    "padded_nvfp4_wgrad_": "padded_nvfp4",
}


def function(name: str) -> Callable:
    """The host function called `name`, with the signature it has in `reference`, `mxfp8_reference` or
    `nvfp4_reference` there."""
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


@functools.cache
def host_functions() -> SimpleNamespace:
    """All host functions by name; imported at the first call."""
    return SimpleNamespace(**{name: function(name) for name in _MODULES})
