"""The MXFP8 functions on padded rows, as `mxfp8_reference` has them, through cuDNN Frontend."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cute_kernels.activation import Activation
from cute_kernels.blackwell.dglu import dglu
from cute_kernels.blackwell.glu import glu
from cute_kernels.blackwell.mxfp8_reference import gradients
from cute_kernels.blackwell.operands import Operand, Quantised
from cute_kernels.blackwell.quant import quant
from cute_kernels.blackwell.scaled_reference import rounded
from cute_kernels.blackwell.srelu import dsrelu, srelu
from cute_kernels.blackwell.wgrad import wgrad, wgrad_into

_FP8 = torch.float8_e4m3fn


def padded_mxfp8_gemm(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    ends: Tensor,
    bias: Tensor | None = None,
    bias_scale: Tensor | None = None,
    sm_margin: int = 0,
) -> Tensor:
    y = quant(Operand(x, x_scale), Operand(weight, weight_scale), ends, bias, bias_scale, sm_margin=sm_margin)
    assert isinstance(y, Tensor)
    return y


def padded_mxfp8_gemm_act(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    ends: Tensor,
    activation: Activation,
    bias: Tensor | None = None,
    probs: Tensor | None = None,
    sm_margin: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    given = Operand(x, x_scale), Operand(weight, weight_scale)
    run = glu if activation.is_glu else srelu
    made = run(*given, ends, activation, rounded(probs), bias, act_dtype=_FP8, sm_margin=sm_margin)
    return *_copies(made.act), made.preact


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
    sm_margin: int = 0,
    deterministic: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """deterministic: dbias, which the kernel sums with atomics, is computed outside, from the product in BF16 (the
    kernel itself gives FP8 alone), and all else with it. Else a GLU's kernel gives it, as sums of BF16.
    """
    given = Operand(dy, dy_scale), Operand(weight, weight_scale)
    if need_dbias and (deterministic or not activation.is_glu):
        grad = padded_mxfp8_gemm(dy, dy_scale, weight, weight_scale, ends, sm_margin=sm_margin)
        return gradients(grad.float(), ends, preact, activation, probs, need_dprobs, need_dbias)
    call = (*given, ends, preact, activation, rounded(probs), need_dprobs)
    if not need_dbias:
        run = dglu if activation.is_glu else dsrelu
        made = run(*call, dpreact_dtype=_FP8, sm_margin=sm_margin)
        return *_copies(made.dpreact), made.dprobs, None
    summed = dglu(*call, need_dbias, deterministic=False, dpreact_dtype=_FP8, sm_margin=sm_margin)
    assert summed.dbias is not None
    return *_copies(summed.dpreact), summed.dprobs, summed.dbias.float()


def padded_mxfp8_wgrad(
    dy: Tensor, dy_scale: Tensor, x: Tensor, x_scale: Tensor, ends: Tensor, sm_margin: int = 0
) -> Tensor:
    return wgrad(Operand(dy, dy_scale), Operand(x, x_scale), ends, sm_margin=sm_margin)


def padded_mxfp8_wgrad_(
    out: Sequence[Tensor],
    dy: Tensor,
    dy_scale: Tensor,
    x: Tensor,
    x_scale: Tensor,
    ends: Tensor,
    accumulate: bool = False,
    sm_margin: int = 0,
) -> None:
    wgrad_into(out, Operand(dy, dy_scale), Operand(x, x_scale), ends, accumulate, sm_margin=sm_margin)


def _copies(made: Tensor | Quantised) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Both copies of a result and their scales, those as two dimensions."""
    assert isinstance(made, Quantised)
    (row, row_scale), (column, column_scale) = made
    assert row_scale is not None and column_scale is not None
    return row, _in_two_dimensions(row_scale), column, _in_two_dimensions(column_scale)


def _in_two_dimensions(scale: Tensor) -> Tensor:
    """Tiles [1, R, C, 32, 4, 4] as they lie, in the shape of `scale_layout.swizzled_scale`."""
    _, high, wide, *_ = scale.shape
    return scale.view(high * 128, wide * 4)
