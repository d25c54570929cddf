"""Entry points on padded rows, registered as `torch.ops.fusible_ops.*` beside those of `ops`, which passes them on.

`blackwell` says what padded rows are, `blackwell.reference` what each function computes; that runs on CPU tensors,
cuDNN Frontend's kernels on CUDA. `sm_margin`: SMs to leave free.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cute_kernels.activation import Activation
from cute_kernels.blackwell import reference
from cute_kernels.registry import MARGIN, SUMS, blackwell, empty_as_none, of_module, plain, register, with_activation

# ----------------------------------------------------------------------------------------------------------------------
# Shape functions


def _fake_gemm(x, weights, ends, bias=None, bias_scale=None):
    return x.new_empty(x.shape[0], weights[0].shape[-2])


def _fake_gemm_act(x, weights, ends, activation, bias=None, probs=None):
    columns = weights[0].shape[-2]
    return x.new_empty(x.shape[0], columns // 2), x.new_empty(x.shape[0], columns)


def _fake_gemm_dact(dy, weights, ends, preact, activation, probs, need_dprobs, need_dbias):
    dprobs = dy.new_empty(dy.shape[0], dtype=torch.float32) if need_dprobs else dy.new_empty(0)
    sums = dy.new_empty(ends.shape[0], preact.shape[1], dtype=torch.float32) if need_dbias else dy.new_empty(0)
    return torch.empty_like(preact), dprobs, sums


def _fake_wgrad(dy, x, ends):
    return x.new_empty(ends.shape[0], dy.shape[1], x.shape[1])


def _fake_wgrad_(out, dy, x, ends, accumulate=False):
    return None


_OPERATORS = (
    (
        f"padded_gemm(Tensor x, Tensor[] weights, Tensor ends, Tensor? bias=None, Tensor? bias_scale=None, {MARGIN}) "
        "-> Tensor",
        plain,
        _fake_gemm,
    ),
    (
        "padded_gemm_act(Tensor x, Tensor[] weights, Tensor ends, str activation, Tensor? bias=None, "
        f"Tensor? probs=None, {MARGIN}) -> (Tensor, Tensor)",
        with_activation,
        _fake_gemm_act,
    ),
    (
        "padded_gemm_dact(Tensor dy, Tensor[] weights, Tensor ends, Tensor preact, str activation, Tensor? probs, "
        f"bool need_dprobs, bool need_dbias, {MARGIN}, {SUMS}) -> (Tensor, Tensor, Tensor)",
        with_activation,
        _fake_gemm_dact,
    ),
    (f"padded_wgrad(Tensor dy, Tensor x, Tensor ends, {MARGIN}) -> Tensor", plain, _fake_wgrad),
    (
        f"padded_wgrad_(Tensor(a!)[] out, Tensor dy, Tensor x, Tensor ends, bool accumulate=False, {MARGIN}) -> ()",
        plain,
        _fake_wgrad_,
    ),
)

_REFERENCE = of_module(reference)
for _schema, _make, _fake in _OPERATORS:
    _name = _schema.split("(", 1)[0]
    register(_schema, _make(_name, _REFERENCE), _make(_name, blackwell), _fake)

_OPS = torch.ops.fusible_ops

# ----------------------------------------------------------------------------------------------------------------------
# Public functions

padded_gemm = _OPS.padded_gemm.default
padded_wgrad = _OPS.padded_wgrad.default
padded_wgrad_ = _OPS.padded_wgrad_.default


def padded_gemm_act(
    x: Tensor,
    weights: Sequence[Tensor],
    ends: Tensor,
    activation: Activation,
    bias: Tensor | None = None,
    probs: Tensor | None = None,
    **sharing: Any,
) -> tuple[Tensor, Tensor]:
    """`blackwell.reference.padded_gemm_act`."""
    return _OPS.padded_gemm_act(x, weights, ends, activation.encode(), bias, probs, **sharing)


def padded_gemm_dact(
    dy: Tensor,
    weights: Sequence[Tensor],
    ends: Tensor,
    preact: Tensor,
    activation: Activation,
    probs: Tensor | None = None,
    need_dprobs: bool = False,
    need_dbias: bool = False,
    **sharing: Any,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """`blackwell.reference.padded_gemm_dact`. deterministic=False: dprobs and dbias as sums of atomics."""
    dpreact, dprobs, dbias = _OPS.padded_gemm_dact(
        dy, weights, ends, preact, activation.encode(), probs, need_dprobs, need_dbias, **sharing
    )
    return dpreact, empty_as_none(dprobs, need_dprobs), empty_as_none(dbias, need_dbias)
