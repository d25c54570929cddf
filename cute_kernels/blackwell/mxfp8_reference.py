"""What the MXFP8 functions on padded rows compute, in plain PyTorch: their CPU side, and what kernels must come near.

Rows, `ends` and the interleave are as `cute_kernels.blackwell` says. An operand is its E4M3 data and its E8M0 scales as
`scale_layout.swizzled_scale` gives them: of rows [M, K] along K; of a weight [E, N, K] along K, contiguous or the
transposed view of a column-wise copy. Operands of weight gradients are quantised along M, their scales in the order of
`operands.group_tiles`. Products are `scaled_reference.product`s. I: columns of the activation, N those before it, twice
as many for a GLU.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from cute_kernels import reference
from cute_kernels.activation import Activation
from cute_kernels.blackwell.operands import Operand, operand
from cute_kernels.blackwell.reference import dact, offsets_of
from cute_kernels.blackwell.scaled_reference import DTYPE, activated, along_rows, product, rounded
from cute_kernels.quantization.formats import mxfp8
from cute_kernels.quantization.quantize import quantize


def quantize_rows(t: Tensor, ends: Tensor, columnwise: bool = False) -> Operand:
    """t [M, C] as an operand: along C, or along M for a weight gradient."""
    return operand(quantize(t, mxfp8(), columnwise), mxfp8(), columnwise, ends if columnwise else None)


def quantized(t: Tensor, ends: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Data and scale of t [M, C] along C, and those along M."""
    return *quantize_rows(t, ends), *quantize_rows(t, ends, True)  # type: ignore[return-value]


def padded_mxfp8_gemm(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    ends: Tensor,
    bias: Tensor | None = None,
    bias_scale: Tensor | None = None,
) -> Tensor:
    """y = round(x W_gᵀ (+ s·b_g)); [M, N] BF16. bias: [E, N]; bias_scale: FP32 [M]."""
    return product(Operand(x, x_scale), Operand(weight, weight_scale), ends, bias, bias_scale).to(DTYPE)


def padded_mxfp8_gemm_act(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    ends: Tensor,
    activation: Activation,
    bias: Tensor | None = None,
    probs: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """preact = round(x W_gᵀ + b_g), act = f(preact)·p, quantised along its columns and along its rows.

    (data, scale, data along rows, its scale, preact [M, N] BF16). probs: FP32 [M], rounded to BF16 first.
    """
    preact = padded_mxfp8_gemm(x, x_scale, weight, weight_scale, ends, bias)
    return *quantized(activated(preact, activation, probs), ends), preact


def padded_mxfp8_gemm_dact(
    dy: Tensor,
    dy_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    ends: Tensor,
    preact: Tensor,
    activation: Activation,
    probs: Tensor | None = None,
    need_dprobs: bool = False,
    need_dbias: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """dA = dy W_gᵀ in FP32, then the gradients of `padded_mxfp8_gemm_act`. weight: [E, I, H], of the linear after it.

    (dpreact quantised both ways as act is there, dprobs FP32 [M] or None, dbias FP32 [E, N] or None). dbias is a sum
    of what is not quantised.
    """
    grad = product(Operand(dy, dy_scale), Operand(weight, weight_scale), ends)
    return gradients(grad, ends, preact, activation, probs, need_dprobs, need_dbias)


def gradients(
    grad: Tensor,
    ends: Tensor,
    preact: Tensor,
    activation: Activation,
    probs: Tensor | None,
    need_dprobs: bool,
    need_dbias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """The same from dA [M, I] itself, FP32."""
    dpreact, dprobs = dact(grad, preact.float(), activation, rounded(probs), need_dprobs)
    dbias = reference.grouped_dbias(dpreact, offsets_of(ends)) if need_dbias else None
    return *quantized(dpreact, ends), dprobs, dbias


def padded_mxfp8_wgrad(dy: Tensor, dy_scale: Tensor, x: Tensor, x_scale: Tensor, ends: Tensor) -> Tensor:
    """dW_g = dy_gᵀ x_g; [E, N, K] BF16. dy [M, N], x [M, K]."""
    return reference.grouped_wgrad(*_pair(dy, dy_scale, x, x_scale, ends), offsets_of(ends)).to(DTYPE)


def padded_mxfp8_wgrad_(
    out: Sequence[Tensor],
    dy: Tensor,
    dy_scale: Tensor,
    x: Tensor,
    x_scale: Tensor,
    ends: Tensor,
    accumulate: bool = False,
) -> None:
    """The same into `out` (one [E, N, K] or E [N, K] tensors), overwriting or adding."""
    reference.grouped_wgrad_(out, *_pair(dy, dy_scale, x, x_scale, ends), offsets_of(ends), 0, accumulate)


def _pair(dy: Tensor, dy_scale: Tensor, x: Tensor, x_scale: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    return along_rows(Operand(dy, dy_scale), ends), along_rows(Operand(x, x_scale), ends)
