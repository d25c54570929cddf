"""What the NVFP4 functions on padded rows compute, in plain PyTorch: their CPU side, and what kernels must come near.

Rows, `ends` and the interleave are as `cute_kernels.blackwell` says. An operand is its E2M1 data, two values a byte,
and its E4M3 scales as `scale_layout.swizzled_scale` gives them: of rows [M, K] along K; of a weight [E, N, K] along K,
for a product that sums over N its column-wise copy [E, K, N]. Operands of weight gradients are the transposed copies
[N, M], their scales in the order of `operands.group_tiles`. alpha: FP32 [E], what is left of both operands' second
level (`scaled_reference.alpha_of`). Products are `scaled_reference.product`s. I: columns of the activation, N those
before it, twice as many for a GLU.

Results that are quantised next come in BF16, as the recipe has them, with the largest magnitudes of each group, FP32
[E]: they are those of what is stored.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cute_kernels import reference
from cute_kernels.activation import Activation
from cute_kernels.blackwell.operands import Operand, operand
from cute_kernels.blackwell.reference import dact, offsets_of
from cute_kernels.blackwell.scaled_reference import DTYPE, activated, along_rows, product, rounded
from cute_kernels.quantization.formats import Format
from cute_kernels.quantization.groups import group_amax, quantize_padded
from cute_kernels.quantization.hadamard import rotate
from cute_kernels.quantization.quantize import Quantized


def quantize_rows(
    t: Tensor,
    ends: Tensor,
    format: Format,
    columnwise: bool = False,
    state: Tensor | None = None,
    largest: Tensor | None = None,
) -> tuple[Operand, Tensor]:
    """(t [M, C] as an operand, along C, or along M for a weight gradient; the largest magnitudes of its groups).

    state: of a format that rounds stochastically. largest: those magnitudes, of the transpose once that is rotated if
    it is, where they are known.
    """
    made = quantize_padded(t, offsets_of(ends), format, columnwise, state, amax=largest)
    assert made.amax is not None
    copy = Quantized(made.data, made.scale)
    return operand(copy, format, columnwise, ends if columnwise else None), made.amax


def padded_nvfp4_gemm(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    ends: Tensor,
    alpha: Tensor,
    bias: Tensor | None = None,
    bias_scale: Tensor | None = None,
) -> Tensor:
    """y = round(α_g·x W_gᵀ (+ s·b_g)); [M, N] BF16. bias: [E, N]; bias_scale: FP32 [M]."""
    return product(Operand(x, x_scale), Operand(weight, weight_scale), ends, bias, bias_scale, alpha).to(DTYPE)


def padded_nvfp4_gemm_act(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    ends: Tensor,
    alpha: Tensor,
    activation: Activation,
    bias: Tensor | None = None,
    probs: Tensor | None = None,
    rotates: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """preact = round(α_g·x W_gᵀ + b_g), act = round(f(preact)·p).

    (act [M, I] BF16, preact [M, N] BF16, the largest magnitudes of act, if `rotates` those of its transpose once that
    is rotated, else None). probs: FP32 [M], rounded to BF16 first.
    """
    preact = padded_nvfp4_gemm(x, x_scale, weight, weight_scale, ends, alpha, bias)
    act = activated(preact, activation, probs).to(DTYPE)
    return act, preact, amax(act, ends), rotated_amax(act, ends) if rotates else None


def padded_nvfp4_gemm_dact(
    dy: Tensor,
    dy_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    ends: Tensor,
    alpha: Tensor,
    preact: Tensor,
    activation: Activation,
    probs: Tensor | None = None,
    need_dprobs: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """dA = α_g·dy W_gᵀ in FP32, then the gradients of `padded_nvfp4_gemm_act`. weight: [E, I, H], of the linear after
    it: its column-wise copy.

    (dpreact [M, N] BF16, its largest magnitudes, dprobs FP32 [M] or None).
    """
    grad = product(Operand(dy, dy_scale), Operand(weight, weight_scale), ends, alpha=alpha)
    dpreact, dprobs = dact(grad, preact.float(), activation, rounded(probs), need_dprobs)
    dpreact = dpreact.to(DTYPE)
    return dpreact, amax(dpreact, ends), dprobs


def padded_nvfp4_wgrad(dy: Tensor, dy_scale: Tensor, x: Tensor, x_scale: Tensor, ends: Tensor, alpha: Tensor) -> Tensor:
    """dW_g = α_g·dy_gᵀ x_g; [E, N, K] BF16. dy [N, M], x [K, M]."""
    return reference.grouped_wgrad(*_pair(dy, dy_scale, x, x_scale, ends, alpha), offsets_of(ends)).to(DTYPE)


def padded_nvfp4_wgrad_(
    out: Sequence[Tensor],
    dy: Tensor,
    dy_scale: Tensor,
    x: Tensor,
    x_scale: Tensor,
    ends: Tensor,
    alpha: Tensor,
    accumulate: bool = False,
) -> None:
    """The same into `out` (one [E, N, K] or E [N, K] tensors), overwriting or adding."""
    pair = _pair(dy, dy_scale, x, x_scale, ends, alpha)
    reference.grouped_wgrad_(out, *pair, offsets_of(ends), 0, accumulate)


def _pair(
    dy: Tensor, dy_scale: Tensor, x: Tensor, x_scale: Tensor, ends: Tensor, alpha: Tensor
) -> tuple[Tensor, Tensor]:
    return along_rows(Operand(dy, dy_scale), ends, alpha), along_rows(Operand(x, x_scale), ends)


def amax(t: Tensor, ends: Tensor) -> Tensor:
    """FP32 [E]: the largest magnitudes of the groups of t [M, C]."""
    return group_amax(t.abs().amax(1).float(), offsets_of(ends))


def rotated_amax(t: Tensor, ends: Tensor) -> Tensor:
    """FP32 [E]: the same of its transpose, rotated along the rows."""
    return group_amax(rotate(t.mT.contiguous()).abs().amax(0).float(), offsets_of(ends))


def of_stored(largest: Tensor) -> Tensor:
    """Largest magnitudes of FP32 values as those of the values in BF16: rounding keeps their order."""
    return largest.to(torch.bfloat16).float()
