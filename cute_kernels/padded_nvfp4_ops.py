"""Entry points on padded rows in NVFP4, registered as `torch.ops.fusible_ops.*` beside those of `ops`, which passes
them on.

`blackwell` says what padded rows are, `blackwell.nvfp4_reference` what each function computes; that runs on CPU
tensors, cuDNN Frontend's kernels on CUDA. `sm_margin`: SMs to leave free; weight gradients can leave none (ValueError).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cute_kernels.activation import Activation
from cute_kernels.blackwell import nvfp4_reference
from cute_kernels.registry import MARGIN, blackwell, empty_as_none, of_module, plain, register, with_activation

_BF16 = torch.bfloat16

# ----------------------------------------------------------------------------------------------------------------------
# Shape functions


def _fake_gemm(x, x_scale, weight, weight_scale, ends, alpha, bias=None, bias_scale=None):
    return x.new_empty(x.shape[0], weight.shape[1], dtype=_BF16)


def _fake_gemm_act(
    x, x_scale, weight, weight_scale, ends, alpha, activation, bias=None, probs=None, rotates=False
):  # fmt: skip
    rows, columns = x.shape[0], weight.shape[1]
    act = x.new_empty(rows, columns // Activation.decode(activation).halves, dtype=_BF16)
    rotated = torch.empty_like(alpha) if rotates else x.new_empty(0)
    return act, x.new_empty(rows, columns, dtype=_BF16), torch.empty_like(alpha), rotated


def _fake_gemm_dact(
    dy, dy_scale, weight, weight_scale, ends, alpha, preact, activation, probs=None, need_dprobs=False
):  # fmt: skip
    dprobs = alpha.new_empty(dy.shape[0]) if need_dprobs else dy.new_empty(0)
    return torch.empty_like(preact), torch.empty_like(alpha), dprobs


def _fake_wgrad(dy, dy_scale, x, x_scale, ends, alpha):
    return x.new_empty(ends.shape[0], dy.shape[0], x.shape[0], dtype=_BF16)


def _fake_wgrad_(out, dy, dy_scale, x, x_scale, ends, alpha, accumulate=False):
    return None


_PRODUCT = "Tensor weight, Tensor weight_scale, Tensor ends, Tensor alpha"
_PAIR = "Tensor dy, Tensor dy_scale, Tensor x, Tensor x_scale, Tensor ends, Tensor alpha"
_OPERATORS = (
    (
        f"padded_nvfp4_gemm(Tensor x, Tensor x_scale, {_PRODUCT}, Tensor? bias=None, Tensor? bias_scale=None, "
        f"{MARGIN}) -> Tensor",
        plain,
        _fake_gemm,
    ),
    (
        f"padded_nvfp4_gemm_act(Tensor x, Tensor x_scale, {_PRODUCT}, str activation, Tensor? bias=None, "
        f"Tensor? probs=None, bool rotates=False, {MARGIN}) -> (Tensor, Tensor, Tensor, Tensor)",
        with_activation,
        _fake_gemm_act,
    ),
    (
        f"padded_nvfp4_gemm_dact(Tensor dy, Tensor dy_scale, {_PRODUCT}, Tensor preact, str activation, "
        f"Tensor? probs=None, bool need_dprobs=False, {MARGIN}) -> (Tensor, Tensor, Tensor)",
        with_activation,
        _fake_gemm_dact,
    ),
    (f"padded_nvfp4_wgrad({_PAIR}, {MARGIN}) -> Tensor", plain, _fake_wgrad),
    (
        f"padded_nvfp4_wgrad_(Tensor(a!)[] out, {_PAIR}, bool accumulate=False, {MARGIN}) -> ()",
        plain,
        _fake_wgrad_,
    ),
)

_REFERENCE = of_module(nvfp4_reference)
for _schema, _make, _fake in _OPERATORS:
    _name = _schema.split("(", 1)[0]
    register(_schema, _make(_name, _REFERENCE), _make(_name, blackwell), _fake)

_OPS = torch.ops.fusible_ops

# ----------------------------------------------------------------------------------------------------------------------
# Public functions

padded_nvfp4_gemm = _OPS.padded_nvfp4_gemm.default
padded_nvfp4_wgrad = _OPS.padded_nvfp4_wgrad.default
padded_nvfp4_wgrad_ = _OPS.padded_nvfp4_wgrad_.default


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
    **sharing: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """`blackwell.nvfp4_reference.padded_nvfp4_gemm_act`."""
    *made, rotated = _OPS.padded_nvfp4_gemm_act(
        x, x_scale, weight, weight_scale, ends, alpha, activation.encode(), bias, probs, rotates, **sharing
    )
    return *made, empty_as_none(rotated, rotates)


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
    **sharing: Any,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`blackwell.nvfp4_reference.padded_nvfp4_gemm_dact`."""
    dpreact, amax, dprobs = _OPS.padded_nvfp4_gemm_dact(
        dy, dy_scale, weight, weight_scale, ends, alpha, preact, activation.encode(), probs, need_dprobs, **sharing
    )
    return dpreact, amax, empty_as_none(dprobs, need_dprobs)
