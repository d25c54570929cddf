"""Kernels for Hopper (SM90). `host_functions()` are the entry points; CUTLASS is imported when a kernel is built."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace

_MODULES = {
    "grouped_gemm": "grouped_gemm",
    "grouped_gemm_": "grouped_gemm",
    "grouped_gemm_dgrad": "grouped_gemm",
    "grouped_gemm_act": "grouped_gemm",
    "grouped_gemm_dact": "grouped_gemm",
    "grouped_wgrad": "grouped_wgrad",
    "grouped_wgrad_": "grouped_wgrad",
    "group_offsets": "rowwise",
    "group_offsets_and_counters": "rowwise",
    "dact": "rowwise",
    "grouped_dbias": "rowwise",
    "grouped_dscale": "rowwise",
    "padded_group_offsets": "rowwise",
    "fp8_quantize": "fp8_quantize",
    "fp8_quantize_weight": "fp8_quantize",
    "fp8_grouped_gemm": "fp8_grouped_gemm",
    "fp8_grouped_gemm_act": "fp8_grouped_gemm",
    "fp8_grouped_gemm_dact": "fp8_grouped_gemm",
    "fp8_grouped_wgrad": "fp8_wgrad",
    "fp8_grouped_wgrad_": "fp8_wgrad",
    "mxfp8_quantize": "mxfp8_quantize",
    "mxfp8_dequantize": "mxfp8_quantize",
    "mxfp8_quantize_weight": "mxfp8_quantize",
    "mxfp8_grouped_gemm_act": "mxfp8_grouped_gemm",
    "mxfp8_grouped_gemm_dact": "mxfp8_grouped_gemm",
    "nvfp4_amax": "nvfp4_quantize",
    "nvfp4_quantize": "nvfp4_quantize",
    "nvfp4_dequantize": "nvfp4_quantize",
    "nvfp4_quantize_weight": "nvfp4_quantize",
    "nvfp4_grouped_gemm": "nvfp4_grouped_gemm",
    "nvfp4_grouped_gemm_dgrad": "nvfp4_grouped_gemm",
    "nvfp4_grouped_gemm_act": "nvfp4_grouped_gemm",
    "nvfp4_grouped_gemm_dact": "nvfp4_grouped_gemm",
    "nvfp4_grouped_wgrad": "nvfp4_grouped_wgrad",
    "nvfp4_grouped_wgrad_": "nvfp4_grouped_wgrad",
}


def function(name: str) -> Callable:
    """The host function called `name`, with the signature it has in `cute_kernels.reference`, `fp8_reference`,
    `mxfp8_reference` or `nvfp4_reference`."""
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


@functools.cache
def host_functions() -> SimpleNamespace:
    """All host functions by name; imported at the first call."""
    return SimpleNamespace(**{name: function(name) for name in _MODULES})
