"""What functions on padded rows have in common in MXFP8 and NVFP4, in plain PyTorch.

Products multiply the values that operands hold, E2M1 or E4M3 times scale, and add up in FP32. What remains of NVFP4's
two levels is a factor for each group, `alpha`: see `alpha_of`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels import reference
from cute_kernels.activation import Activation
from cute_kernels.activation_reference import activation_forward
from cute_kernels.blackwell.operands import BLOCKS, Operand, interleave_of, tiles_of_rows
from cute_kernels.blackwell.reference import offsets_of
from cute_kernels.quantization.casts import decode_e2m1, unpack_e2m1
from cute_kernels.quantization.nvfp4_scales import LARGEST
from cute_kernels.quantization.quantize import repeat
from cute_kernels.quantization.scale_layout import unswizzle_128x4

DTYPE = torch.bfloat16
"""What products, pre-activations and probs are rounded to."""


def alpha_of(a: Tensor, b: Tensor) -> Tensor:
    """FP32 [E]: what a product of two NVFP4 operands is multiplied by, given the largest magnitudes of their groups."""
    return (a / LARGEST) * (b / LARGEST)


def product(
    x: Operand,
    weight: Operand,
    ends: Tensor,
    bias: Tensor | None = None,
    bias_scale: Tensor | None = None,
    alpha: Tensor | None = None,
) -> Tensor:
    """α_g·x W_gᵀ (+ s·b_g); FP32 [M, N]. bias: [E, N]; bias_scale: FP32 [M]."""
    values = _values(weight)
    if alpha is not None:
        values *= alpha[:, None, None]
    wide = None if bias is None else bias.float()
    return reference.grouped_gemm(_values(x), [values], offsets_of(ends), wide, bias_scale)


def activated(preact: Tensor, activation: Activation, probs: Tensor | None) -> Tensor:
    """f(preact)·p; FP32 [M, I]."""
    plain = reference.deinterleave(preact.float(), interleave_of(activation), 1)
    return activation_forward(plain, activation, rounded(probs))


def rounded(probs: Tensor | None) -> Tensor | None:
    """FP32 probs with the values that they have in the compute dtype."""
    return None if probs is None else probs.to(DTYPE).float()


def along_rows(x: Operand, ends: Tensor, alpha: Tensor | None = None) -> Tensor:
    """An operand of weight gradients, in blocks along its rows: α_g·x; FP32 [M, C]."""
    assert x.scale is not None
    lines = Operand(x.data if x.format == "nvfp4" else x.data.mT, tiles_of_rows(x.scale, ends))
    values = _values(lines).mT
    if alpha is not None and values.shape[0]:
        values = values * alpha[reference.row_groups(values.shape[0], offsets_of(ends))].unsqueeze(1)
    return values


def _values(x: Operand) -> Tensor:
    """FP32 values of [..., R, K] in blocks along K."""
    assert x.scale is not None
    block = BLOCKS[x.format]
    data = decode_e2m1(unpack_e2m1(x.data)) if x.format == "nvfp4" else x.data.float()
    plain = unswizzle_128x4(x.scale, data.shape[-2], data.shape[-1] // block)
    return data * repeat(plain.float(), block, -1)
