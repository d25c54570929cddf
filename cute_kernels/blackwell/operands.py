"""What the adapters are given and give: matrices with their scales, and what an activation is called there."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_kernels.activation import Activation
from cute_kernels.catalog import SM100_ACTIVATION
from cute_kernels.limits import dtype_name, raise_refusal

FP4 = torch.float4_e2m1fn_x2
FORMATS = {torch.float8_e8m0fnu: "mxfp8", torch.float8_e4m3fn: "nvfp4"}
BLOCKS = {"mxfp8": 32, "nvfp4": 16}
INTERLEAVE = 32
"""Gate columns, then as many up columns, and so on."""
TILE = 128
"""Rows, and four scales of each, make a tile of scales."""


class Operand(NamedTuple):
    """One operand of a product.

    data: BF16; E4M3 or E5M2; or E2M1, two values a byte along the last dimension (float4_e2m1fn_x2, or uint8).
    Rows are [M, K]; a weight is [E, N, K], as it lies or as the transposed view of [E, K, N] where an adapter says so.
    scale: as `scale_layout.swizzled_scale` gives it, of all rows as one matrix, or of each group's weight; None for
    BF16. E8M0 makes it MXFP8 (32 values a scale), E4M3 NVFP4 (16).
    """

    data: Tensor
    scale: Tensor | None = None

    @property
    def format(self) -> str:
        """ "bfloat16" (or whatever dtype it has), "mxfp8" or "nvfp4"."""
        return dtype_name(self.data.dtype) if self.scale is None else FORMATS[self.scale.dtype]

    @property
    def columns(self) -> int:
        """K, in values."""
        return self.data.shape[-1] * (2 if self.data.dtype in (torch.uint8, FP4) else 1)

    def rows_as_they_lie(self) -> Tensor:
        """The data, E2M1 in the dtype of its own."""
        return self.data.view(FP4) if self.data.dtype == torch.uint8 else self.data


def weight_and_major(data: Tensor) -> tuple[Tensor, str]:
    """(a weight [E, N, K] as it lies in memory, which of "n" and "k" is contiguous there)."""
    if data.is_contiguous():
        return data, "k"
    if data.mT.is_contiguous():
        return data.mT, "n"
    raise ValueError(f"a weight [E, N, K] must be contiguous, or its transposed view; strides are {data.stride()}")


def scale_settings(x: Operand) -> dict[str, Any]:
    """What an operation must be told of the scales."""
    return {"sf_vec_size": 16 if x.scale is None else BLOCKS[x.format]}


def empty_scale(rows: int, columns: int, like: Tensor) -> Tensor:
    """Room for the scales of [rows, columns] blocks in tiles of 128 x 4, in `like`'s dtype."""
    return like.new_empty(1, -(-rows // TILE), -(-columns // 4), 32, 4, 4)


class Quantised(NamedTuple):
    """An FP8 result, quantised twice: blocks along its columns, and along its rows."""

    rowwise: Operand
    columnwise: Operand


def empty_quantised(rows: int, columns: int, dtype: torch.dtype, like: Operand) -> Quantised:
    """Room for [rows, columns] in FP8, with scales like those of `like`."""
    assert like.scale is not None
    block = BLOCKS[like.format]
    return Quantised(
        Operand(_fp8(rows, columns, dtype, like.data), empty_scale(rows, -(-columns // block), like.scale)),
        Operand(_fp8(rows, columns, dtype, like.data), empty_scale(columns, -(-rows // block), like.scale)),
    )


def _fp8(rows: int, columns: int, dtype: torch.dtype, like: Tensor) -> Tensor:
    return torch.empty(rows, columns, dtype=dtype, device=like.device)


def act_func(activation: Activation) -> str:
    """What a GLU is called there. Their "geglu" is the clamped SwiGLU; a GeGLU by gelu_tanh they have none."""
    refusal = SM100_ACTIVATION.check({"activation": activation.kind})
    if refusal is not None:
        raise_refusal(refusal)
    return {"swiglu": "swiglu", "clamped_swiglu": "geglu"}[activation.kind]


def constants(activation: Activation) -> dict[str, float]:
    """A GLU's constants by the names they have there."""
    if activation.kind != "clamped_swiglu":
        return {"linear_offset": 0.0}
    limit = float("inf") if activation.limit is None else activation.limit
    clamp = {"glu_clamp_max": limit, "glu_clamp_min": -limit}
    return {"linear_offset": activation.offset, "geglu_alpha": activation.alpha, **clamp}
