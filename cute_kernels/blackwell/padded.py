"""The functions on padded rows in BF16, as `reference` has them, through cuDNN Frontend."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cute_kernels.activation import Activation
from cute_kernels.blackwell import reference
from cute_kernels.blackwell.dglu import dglu
from cute_kernels.blackwell.gemm import gemm
from cute_kernels.blackwell.glu import glu
from cute_kernels.blackwell.operands import Operand
from cute_kernels.blackwell.wgrad import wgrad, wgrad_into
from cute_kernels.reference import as_stacked


def padded_gemm(
    x: Tensor,
    weights: Sequence[Tensor],
    ends: Tensor,
    bias: Tensor | None = None,
    bias_scale: Tensor | None = None,
    sm_margin: int = 0,
) -> Tensor:
    return gemm(x, as_stacked(weights), ends, bias, bias_scale, sm_margin=sm_margin)


def padded_gemm_act(
    x: Tensor,
    weights: Sequence[Tensor],
    ends: Tensor,
    activation: Activation,
    bias: Tensor | None = None,
    probs: Tensor | None = None,
    sm_margin: int = 0,
) -> tuple[Tensor, Tensor]:
    factors = _rounded(probs, x)
    made = glu(Operand(x), Operand(as_stacked(weights)), ends, activation, factors, bias, sm_margin=sm_margin)
    assert isinstance(made.act, Tensor)
    return made.act, made.preact


def padded_gemm_dact(
    dy: Tensor,
    weights: Sequence[Tensor],
    ends: Tensor,
    preact: Tensor,
    activation: Activation,
    probs: Tensor | None = None,
    need_dprobs: bool = False,
    need_dbias: bool = False,
    sm_margin: int = 0,
    deterministic: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """deterministic: what the kernel sums with atomics is computed outside: dprobs from the product in FP32, and
    dpreact with it; dbias from dpreact. Else the kernel gives both, dbias as sums of BF16.
    """
    weight = as_stacked(weights).mT
    if need_dprobs and deterministic:
        grad = gemm(dy, weight, ends, dtype=torch.float32, sm_margin=sm_margin)
        dpreact, dprobs = reference.dact(grad, preact, activation, probs, need_dprobs)
        return dpreact, dprobs, reference.dbias(dpreact, ends) if need_dbias else None
    factors, sums = _rounded(probs, preact), need_dbias and not deterministic
    made = dglu(
        Operand(dy), Operand(weight), ends, preact, activation, factors, need_dprobs, sums, deterministic,
        sm_margin=sm_margin,
    )  # fmt: skip
    assert isinstance(made.dpreact, Tensor)
    if sums:
        assert made.dbias is not None
        return made.dpreact, made.dprobs, made.dbias.float()
    return made.dpreact, made.dprobs, reference.dbias(made.dpreact, ends) if need_dbias else None


def padded_wgrad(dy: Tensor, x: Tensor, ends: Tensor, sm_margin: int = 0) -> Tensor:
    return wgrad(Operand(dy), Operand(x), ends, sm_margin=sm_margin)


def padded_wgrad_(
    out: Sequence[Tensor], dy: Tensor, x: Tensor, ends: Tensor, accumulate: bool = False, sm_margin: int = 0
) -> None:
    wgrad_into(out, Operand(dy), Operand(x), ends, accumulate, sm_margin=sm_margin)


def _rounded(probs: Tensor | None, like: Tensor) -> Tensor | None:
    """Probs are rounded to the compute dtype first, and kernels take FP32."""
    return None if probs is None else probs.to(like.dtype).float()
