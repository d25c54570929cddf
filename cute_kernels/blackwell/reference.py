"""What the functions on padded rows compute, in plain PyTorch: their CPU side, and what kernels must come near.

Rows, `ends` and the interleave are as `cute_kernels.blackwell` says; `weights` as in `cute_kernels.reference`.
Numerics are those of `cute_kernels.reference`. The kernels differ in one point: they form the activation from the
FP32 sum, before it is rounded to become the pre-activation.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional as F

from cute_kernels import reference
from cute_kernels.activation import Activation
from cute_kernels.activation_reference import activation_backward
from cute_kernels.blackwell.operands import INTERLEAVE, interleave_of


def offsets_of(ends: Tensor) -> Tensor:
    """int32 [E+1] with a leading zero."""
    return F.pad(ends, (1, 0))


def padded_gemm(
    x: Tensor, weights: Sequence[Tensor], ends: Tensor, bias: Tensor | None = None, bias_scale: Tensor | None = None
) -> Tensor:
    """y = x W_gᵀ (+ s·b_g); [M, N]. x [M, K], W [N, K] as it lies or the transposed view of [K, N]; bias [E, N]."""
    return reference.grouped_gemm(x, weights, offsets_of(ends), bias, bias_scale)


def padded_gemm_act(
    x: Tensor,
    weights: Sequence[Tensor],
    ends: Tensor,
    activation: Activation,
    bias: Tensor | None = None,
    probs: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """preact = round(x W_gᵀ + b_g), act = round(f(preact)·p); (act [M, I], preact [M, 2I]). probs: FP32 [M]."""
    act, preact = reference.grouped_gemm_act(x, weights, offsets_of(ends), activation, bias, probs, INTERLEAVE)
    assert preact is not None
    return act, reference.interleave(preact, INTERLEAVE, 1)


def padded_gemm_dact(
    dy: Tensor,
    weights: Sequence[Tensor],
    ends: Tensor,
    preact: Tensor,
    activation: Activation,
    probs: Tensor | None = None,
    need_dprobs: bool = False,
    need_dbias: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """dA = dy W_g in FP32, then the gradients of `padded_gemm_act`.

    (dpreact [M, 2I], dprobs FP32 [M] or None, dbias FP32 [E, 2I] or None).
    """
    plain = reference.deinterleave(preact, INTERLEAVE, 1)
    dpreact, _, dprobs = reference.grouped_gemm_dact(
        dy, weights, offsets_of(ends), plain, activation, probs, need_act=False, need_dprobs=need_dprobs
    )
    dpreact = reference.interleave(dpreact, INTERLEAVE, 1)
    return dpreact, dprobs, dbias(dpreact, ends) if need_dbias else None


def dbias(dpreact: Tensor, ends: Tensor) -> Tensor:
    """Σ of each group's rows; FP32 [E, N]."""
    return reference.grouped_dbias(dpreact, offsets_of(ends))


def dact(
    grad: Tensor, preact: Tensor, activation: Activation, probs: Tensor | None, need_dprobs: bool
) -> tuple[Tensor, Tensor | None]:
    """The same from dA [M, I] itself, of any activation."""
    block = interleave_of(activation)
    plain = reference.deinterleave(preact, block, 1)
    dpreact, dprobs = activation_backward(grad, plain, activation, probs, need_dprobs)
    return reference.interleave(dpreact, block, 1), dprobs


def padded_wgrad(dy: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """dW_g = dy_gᵀ x_g; [E, N, K] in x's dtype."""
    return reference.grouped_wgrad(dy, x, offsets_of(ends))


def padded_wgrad_(out: Sequence[Tensor], dy: Tensor, x: Tensor, ends: Tensor, accumulate: bool = False) -> None:
    """The same into `out` (one [E, N, K] or E [N, K] tensors), overwriting or adding."""
    reference.grouped_wgrad_(out, dy, x, offsets_of(ends), 0, accumulate)
