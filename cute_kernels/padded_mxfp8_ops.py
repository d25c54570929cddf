"""Entry points on padded rows in MXFP8, registered as `torch.ops.fusible_ops.*` beside those of `ops`, which passes
them on.

`blackwell` says what padded rows are, `blackwell.mxfp8_reference` what each function computes; that runs on CPU
tensors, cuDNN Frontend's kernels on CUDA. `sm_margin`: SMs to leave free; weight gradients can leave none (ValueError).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cute_kernels.activation import Activation
from cute_kernels.blackwell import mxfp8_reference
from cute_kernels.registry import MARGIN, SUMS, blackwell, empty_as_none, of_module, plain, register, with_activation

_BF16, _FP32 = torch.bfloat16, torch.float32

# ----------------------------------------------------------------------------------------------------------------------
# Shape functions


def _copies(x, x_scale, columns):
    """Room for rows as many as x's, quantised along their columns and along themselves."""
    rows = x.shape[0]
    data = [x.new_empty(rows, columns) for _ in range(2)]
    shapes = ((rows, -(-columns // 128) * 4), (-(-columns // 128) * 128, rows // 32))
    along, down = (x_scale.new_empty(shape) for shape in shapes)
    return data[0], along, data[1], down


def _fake_gemm(x, x_scale, weight, weight_scale, ends, bias=None, bias_scale=None):
    return x.new_empty(x.shape[0], weight.shape[1], dtype=_BF16)


def _fake_gemm_act(x, x_scale, weight, weight_scale, ends, activation, bias=None, probs=None):
    columns = weight.shape[1]
    return *_copies(x, x_scale, columns // Activation.decode(activation).halves), x.new_empty(
        x.shape[0], columns, dtype=_BF16
    )


def _fake_gemm_dact(
    dy, dy_scale, weight, weight_scale, ends, preact, activation, probs=None, need_dprobs=False, need_dbias=False
):
    columns = preact.shape[1]
    dprobs = dy.new_empty(dy.shape[0], dtype=_FP32) if need_dprobs else dy.new_empty(0)
    dbias = dy.new_empty(ends.shape[0], columns, dtype=_FP32) if need_dbias else dy.new_empty(0)
    return *_copies(dy, dy_scale, columns), dprobs, dbias


def _fake_wgrad(dy, dy_scale, x, x_scale, ends):
    return x.new_empty(ends.shape[0], dy.shape[1], x.shape[1], dtype=_BF16)


def _fake_wgrad_(out, dy, dy_scale, x, x_scale, ends, accumulate=False):
    return None


_PRODUCT = "Tensor weight, Tensor weight_scale, Tensor ends"
_PAIR = "Tensor dy, Tensor dy_scale, Tensor x, Tensor x_scale, Tensor ends"
_OPERATORS = (
    (
        f"padded_mxfp8_gemm(Tensor x, Tensor x_scale, {_PRODUCT}, Tensor? bias=None, Tensor? bias_scale=None, "
        f"{MARGIN}) -> Tensor",
        plain,
        _fake_gemm,
    ),
    (
        f"padded_mxfp8_gemm_act(Tensor x, Tensor x_scale, {_PRODUCT}, str activation, Tensor? bias=None, "
        f"Tensor? probs=None, {MARGIN}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
        with_activation,
        _fake_gemm_act,
    ),
    (
        f"padded_mxfp8_gemm_dact(Tensor dy, Tensor dy_scale, {_PRODUCT}, Tensor preact, str activation, "
        f"Tensor? probs=None, bool need_dprobs=False, bool need_dbias=False, {MARGIN}, {SUMS}) "
        "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
        with_activation,
        _fake_gemm_dact,
    ),
    (f"padded_mxfp8_wgrad({_PAIR}, {MARGIN}) -> Tensor", plain, _fake_wgrad),
    (
        f"padded_mxfp8_wgrad_(Tensor(a!)[] out, {_PAIR}, bool accumulate=False, {MARGIN}) -> ()",
        plain,
        _fake_wgrad_,
    ),
)

_REFERENCE = of_module(mxfp8_reference)
for _schema, _make, _fake in _OPERATORS:
    _name = _schema.split("(", 1)[0]
    register(_schema, _make(_name, _REFERENCE), _make(_name, blackwell), _fake)

_OPS = torch.ops.fusible_ops

# ----------------------------------------------------------------------------------------------------------------------
# Public functions

padded_mxfp8_gemm = _OPS.padded_mxfp8_gemm.default
padded_mxfp8_wgrad = _OPS.padded_mxfp8_wgrad.default
padded_mxfp8_wgrad_ = _OPS.padded_mxfp8_wgrad_.default


def padded_mxfp8_gemm_act(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    ends: Tensor,
    activation: Activation,
    bias: Tensor | None = None,
    probs: Tensor | None = None,
    **sharing: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`blackwell.mxfp8_reference.padded_mxfp8_gemm_act`."""
    return _OPS.padded_mxfp8_gemm_act(
        x, x_scale, weight, weight_scale, ends, activation.encode(), bias, probs, **sharing
    )  # fmt: skip


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
    **sharing: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """`blackwell.mxfp8_reference.padded_mxfp8_gemm_dact`. deterministic=False: dbias as sums of atomics."""
    *copies, dprobs, dbias = _OPS.padded_mxfp8_gemm_dact(
        dy, dy_scale, weight, weight_scale, ends, preact, activation.encode(), probs, need_dprobs, need_dbias, **sharing
    )
    return *copies, empty_as_none(dprobs, need_dprobs), empty_as_none(dbias, need_dbias)
