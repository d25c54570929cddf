"""The three products of a linear on quantised operands, in plain PyTorch: what `QuantizedLinear` runs on.

The oracle of a linear's products on `QuantizedTensor`s, in any format. That of the FP8 kernels on Hopper, in their
layouts, is `cute_kernels.fp8_reference`.

Rows `x`, `dy` are `QuantizedTensor`s `[T, ·]` of groups, weights one `[G, N, K]`. Products multiply the dequantised
values of the copy that lies along the summed dimension, add up in FP32 and round once.

| product | left | right |
|---|---|---|
| y = x̂ Ŵᵀ | row-wise x | row-wise W |
| dx = dŷ Ŵ | row-wise dy | column-wise W |
| dW = dŷᵀ x̂ | column-wise dy | column-wise x |

Values whose scales are powers of two are exact in BF16, so BF16 products of them go the way of all BF16 products: no
host sync. Others are FP32 (see `reference`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cute_kernels import reference
from fusible_ops.quantized_tensor import QuantizedTensor


def _value_dtype(a: QuantizedTensor, b: QuantizedTensor, dtype: torch.dtype) -> torch.dtype:
    """What the values of both are exact in and a product that is rounded to `dtype` takes."""
    exact = a.format.exact_in_bfloat16 and b.format.exact_in_bfloat16
    return torch.bfloat16 if exact and dtype == torch.bfloat16 else torch.float32


def _row_values(rows: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """The row-wise copy's values where the rows were, [T, ·]."""
    if rows.rowwise is None:
        raise ValueError(f"{rows.title} has no row-wise copy")
    return rows.dequantize(dtype)


def grouped_gemm(
    x: QuantizedTensor,
    weights: QuantizedTensor,
    offsets: Tensor,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    bias_scale: Tensor | None = None,
) -> Tensor:
    """`reference.grouped_gemm` in `dtype`. bias: [G, N], rounded to `dtype`."""
    wide = _value_dtype(x, weights, dtype)
    wide_bias = None if bias is None else bias.to(wide)
    y = reference.grouped_gemm(_row_values(x, wide), [weights.values(False, wide)], offsets, wide_bias, bias_scale)
    return y.to(dtype)


def grouped_gemm_dgrad(dy: QuantizedTensor, weights: QuantizedTensor, offsets: Tensor, dtype: torch.dtype) -> Tensor:
    """`reference.grouped_gemm_dgrad` in `dtype`."""
    wide = _value_dtype(dy, weights, dtype)
    return reference.grouped_gemm_dgrad(_row_values(dy, wide), [weights.values(True, wide)], offsets).to(dtype)


def _column_values(dy: QuantizedTensor, x: QuantizedTensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(values of dy, of x, where the groups lie in both)."""
    offsets = x.value_offsets(columnwise=True)
    assert offsets is not None
    wide = _value_dtype(dy, x, dtype)
    return dy.values(True, wide), x.values(True, wide), offsets


def grouped_wgrad(dy: QuantizedTensor, x: QuantizedTensor, offsets: Tensor, glu_interleave: int = 0) -> Tensor:
    """`reference.grouped_wgrad` in x's nominal dtype."""
    dy_values, x_values, places = _column_values(dy, x, x.dtype)
    return reference.grouped_wgrad(dy_values, x_values, places, glu_interleave).to(x.dtype)


def grouped_wgrad_(
    out: Sequence[Tensor],
    dy: QuantizedTensor,
    x: QuantizedTensor,
    offsets: Tensor,
    glu_interleave: int = 0,
    accumulate: bool = False,
) -> None:
    """`reference.grouped_wgrad_`, whose sums are rounded to the dtype of `out` alone."""
    dy_values, x_values, places = _column_values(dy, x, out[0].dtype)
    reference.grouped_wgrad_(out, dy_values, x_values, places, glu_interleave, accumulate)
