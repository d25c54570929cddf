"""Scales in two levels, as NVFP4 has them.

With A the largest magnitude of the tensor and a that of a block of 16 (or 16x16), all in FP32, each operation rounded:

    S_enc = min(2688 / A, FLT_MAX), 1 where A or that is 0          2688 = 6 · 448, the largest element times scale
    S     = E4M3(min(a · (S_enc · (1/6)), FLT_MAX))                 saturating; the block's stored scale
    x ≈ q · (S · A · (1/2688)),  q = E2M1(x · min(1 / (S · (1/S_enc)), FLT_MAX))

NaN in a block makes that block's scale NaN; in the tensor amax it makes all of them NaN, so it cannot be lost, although
E2M1 has none. Inf in the tensor leaves S_enc = 1, and dequantises to Inf and NaN.

Source: Transformer Engine 2.20 (`common/cast/nvfp4/core_nvfp4.cuh`, `custom_recipes/reference_nvfp4.py`, Apache-2.0).
"""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels.quantization.casts import cast_fp8

LARGEST = 2688.0
"""6 · 448: what the largest magnitude of a tensor is scaled to."""

_FLOAT_MAX = torch.finfo(torch.float32).max


def tensor_encode_scale(amax: Tensor) -> Tensor:
    """S_enc of the tensor amax A: FP32, A's shape."""
    scale = torch.full_like(amax, LARGEST) / amax
    return scale.clamp(max=_FLOAT_MAX).masked_fill((amax == 0) | (scale == 0), 1.0)


def block_scale(block_amax: Tensor, tensor_amax: Tensor) -> Tensor:
    """S: E4M3, block_amax's shape. Both FP32; tensor_amax broadcasts."""
    encode = tensor_encode_scale(tensor_amax) * (1 / 6)
    return cast_fp8((block_amax * encode).clamp(max=_FLOAT_MAX))


def block_encode_factor(scale: Tensor, tensor_amax: Tensor) -> Tensor:
    """What the values of a block with the stored scale S are multiplied by before they are rounded to E2M1. FP32."""
    decode = scale.float() * tensor_encode_scale(tensor_amax).reciprocal()
    return decode.reciprocal().clamp(max=_FLOAT_MAX)


def block_decode_factor(scale: Tensor, tensor_amax: Tensor) -> Tensor:
    """What E2M1 values of a block are multiplied by: S · A · (1/2688), FP32, in this order."""
    return scale.float() * tensor_amax * (1 / LARGEST)
