"""The NVFP4 functions on padded rows, as `nvfp4_reference` has them, through cuDNN Frontend.

Of a GLU that `glu_hadamard` takes, both maxima are its own; else the rotated one is PyTorch's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cute_kernels.activation import Activation
from cute_kernels.blackwell.dglu import dglu
from cute_kernels.blackwell.glu import glu
from cute_kernels.blackwell.glu_hadamard import fits, glu_hadamard
from cute_kernels.blackwell.nvfp4_reference import of_stored, rotated_amax
from cute_kernels.blackwell.operands import Operand
from cute_kernels.blackwell.quant import quant
from cute_kernels.blackwell.scaled_reference import rounded
from cute_kernels.blackwell.srelu import dsrelu, srelu
from cute_kernels.blackwell.wgrad import wgrad, wgrad_into


def padded_nvfp4_gemm(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    ends: Tensor,
    alpha: Tensor,
    bias: Tensor | None = None,
    bias_scale: Tensor | None = None,
    sm_margin: int = 0,
) -> Tensor:
    given = Operand(x, x_scale), Operand(weight, weight_scale)
    y = quant(*given, ends, bias, bias_scale, alpha, sm_margin=sm_margin)
    assert isinstance(y, Tensor)
    return y


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
    sm_margin: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    given = Operand(x, x_scale), Operand(weight, weight_scale), ends, activation, rounded(probs), bias, alpha
    if fits(activation):
        full = glu_hadamard(*given, sm_margin=sm_margin)
        return full.act, full.preact, of_stored(full.amax), of_stored(full.rotated_amax) if rotates else None
    made = (glu if activation.is_glu else srelu)(*given, sm_margin=sm_margin)
    assert isinstance(made.act, Tensor) and made.amax is not None
    return made.act, made.preact, of_stored(made.amax), rotated_amax(made.act, ends) if rotates else None


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
    sm_margin: int = 0,
) -> tuple[Tensor, Tensor, Tensor | None]:
    given = Operand(dy, dy_scale), Operand(weight, weight_scale), ends, preact, activation, rounded(probs), need_dprobs
    made = (dglu if activation.is_glu else dsrelu)(*given, alpha=alpha, sm_margin=sm_margin)
    assert isinstance(made.dpreact, Tensor) and made.amax is not None
    return made.dpreact, of_stored(made.amax), made.dprobs


def padded_nvfp4_wgrad(
    dy: Tensor, dy_scale: Tensor, x: Tensor, x_scale: Tensor, ends: Tensor, alpha: Tensor, sm_margin: int = 0
) -> Tensor:
    scales = alpha, torch.ones_like(alpha)
    return wgrad(Operand(dy, dy_scale), Operand(x, x_scale), ends, global_scales=scales, sm_margin=sm_margin)


def padded_nvfp4_wgrad_(
    out: Sequence[Tensor],
    dy: Tensor,
    dy_scale: Tensor,
    x: Tensor,
    x_scale: Tensor,
    ends: Tensor,
    alpha: Tensor,
    accumulate: bool = False,
    sm_margin: int = 0,
) -> None:
    scales = alpha, torch.ones_like(alpha)
    wgrad_into(out, Operand(dy, dy_scale), Operand(x, x_scale), ends, accumulate, scales, sm_margin)
