"""Kernels for Hopper (SM90). `function(name)` gives a host function; CUTLASS is imported when a kernel is built."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

_MODULES = {
    "grouped_gemm": "grouped_gemm",
    "grouped_gemm_dgrad": "grouped_gemm",
    "grouped_gemm_act": "grouped_gemm",
    "grouped_gemm_dact": "grouped_gemm",
    "grouped_wgrad": "grouped_wgrad",
    "grouped_wgrad_": "grouped_wgrad",
    "group_offsets": "rowwise",
    "dact": "rowwise",
    "grouped_dbias": "rowwise",
    "grouped_dscale": "rowwise",
}


def function(name: str) -> Callable:
    """The host function called `name`, with the signature it has in `cute_kernels.reference`."""
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
