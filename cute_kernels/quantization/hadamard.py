"""The rotation by a signed Hadamard matrix: it spreads outliers before a weight gradient's operands become NVFP4.

Source: Transformer Engine 2.20 (`common/hadamard_transform`, Apache-2.0), for the signs and the order of rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""The signs of every rotation (TE's mask 0xD7E8 of the -1s). There is one, and no argument for another: the operands of
a weight gradient can only be rotated alike.
"""


def _hadamard(x: Tensor) -> Tensor:
    """x H for the 16x16 Sylvester-Hadamard matrix H, blocks of 16 along the last dimension, in x's dtype."""
    blocks = x.unflatten(-1, (-1, 16))
    for distance in (1, 2, 4, 8):
        pairs = blocks.unflatten(-1, (-1, 2, distance))
        first, second = pairs.unbind(-2)
        blocks = torch.stack([first + second, first - second], -2).flatten(-3)
    return blocks.flatten(-2)


def _signs(x: Tensor) -> Tensor:
    """SIGNS repeated along x's last dimension, in FP32; made on x's device without a copy from the host."""
    mask = sum(1 << i for i, sign in enumerate(SIGNS) if sign < 0)
    index = torch.arange(x.shape[-1], device=x.device) % 16
    return 1 - 2 * ((mask >> index) & 1).float()


def rotate(x: Tensor) -> Tensor:
    """x' = (x ∘ s) H / 4 in blocks of 16 along the last dimension; x's shape and dtype.

    Orthogonal: products of operands rotated along the summed dimension equal those of the operands themselves.
    The sums are formed in FP32 as a butterfly (partners 1, 2, 4, 8 apart) and rounded once to x's dtype, so they are
    the same bits everywhere; a tensor core that sums in another order may differ by one rounding.
    Raises ValueError if the last dimension is not a multiple of 16.
    """
    if x.shape[-1] % 16:
        raise ValueError(f"the last dimension is {x.shape[-1]}; the rotation needs a multiple of 16")
    return (_hadamard(x.float() * _signs(x)) * 0.25).to(x.dtype)


def rotate_back(x: Tensor) -> Tensor:
    """x = (x' H / 4) ∘ s: the inverse of `rotate`, rounded to x's dtype. Raises as it does."""
    if x.shape[-1] % 16:
        raise ValueError(f"the last dimension is {x.shape[-1]}; the rotation needs a multiple of 16")
    return (_hadamard(x.float()) * 0.25 * _signs(x)).to(x.dtype)
