"""The NVFP4 kernels' entry points as operators, with the signatures of `nvfp4_reference`; see `ops` for the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cute_kernels import nvfp4_reference
from cute_kernels.activation import Activation
from cute_kernels.nvfp4_reference import Nvfp4Copies, Nvfp4Weights, stored_shapes
from cute_kernels.registry import (
    MARGIN,
    TILED,
    empty_as_none,
    hopper,
    none_as_empty,
    of_module,
    of_weights,
    plain,
    register,
    with_activation,
    with_optional_results,
)

# ----------------------------------------------------------------------------------------------------------------------
# Implementations and shape functions


def _fake_maxima(offsets, rotated):
    amax = offsets.new_empty(offsets.shape[0] - 1, dtype=torch.float32)
    return amax, torch.empty_like(amax) if rotated else None


def _fake_amax(x, offsets, padded, rotated):
    return none_as_empty(_fake_maxima(offsets, rotated), x)


def _fake_quantize(x, offsets, padded, amax, column_amax, state, rowwise, columnwise, stored, rotated):
    data_shape, scale_shape = stored_shapes(x.shape[0], offsets.shape[0] - 1, x.shape[1])
    rows = x.new_empty(x.shape) if rowwise else None
    columns = x.new_empty(data_shape[0], x.shape[1]) if columnwise else None
    data = x.new_empty(data_shape, dtype=torch.uint8) if stored else None
    scale = x.new_empty(scale_shape, dtype=torch.float8_e4m3fn) if stored else None
    return none_as_empty((rows, columns, data, scale), x)


def _fake_dequantize(data, scale, padded):
    return data.new_empty(data.shape[0], scale.shape[1], dtype=torch.bfloat16)


def _fake_quantize_weight(weights, columnwise, square):
    first = weights[0]
    shape = first.shape if first.dim() == 3 else (len(weights), *first.shape)
    columns = first.new_empty(shape) if columnwise and not square else None
    return none_as_empty((first.new_empty(shape), columns, first.new_empty(shape[0], dtype=torch.float32)), first)


def _fake_gemm(x, weights, offsets, amax, weight_amax, bias, bias_scale):
    return x.new_empty(x.shape[0], weights[0].shape[-2])


def _fake_dgrad(dy, weights, offsets, amax, weight_amax, glu_interleave):
    return dy.new_empty(dy.shape[0], weights[0].shape[-1])


def _fake_gemm_act(x, weights, offsets, amax, weight_amax, activation, bias, probs, block, save_preact, rotated):
    rows, columns = x.shape[0], weights[0].shape[-2]
    act = x.new_empty(rows, columns // Activation.decode(activation).halves)
    preact = x.new_empty(rows, columns) if save_preact else None
    return none_as_empty((act, preact, *_fake_maxima(offsets, rotated)), x)


def _fake_gemm_dact(dy, weights, offsets, amax, weight_amax, preact, activation, probs, need_dprobs, rotated):
    dprobs = dy.new_empty(dy.shape[0], dtype=torch.float32) if need_dprobs else None
    return none_as_empty((torch.empty_like(preact), dprobs, *_fake_maxima(offsets, rotated)), dy)


def _fake_wgrad(dy, x, offsets, amax, x_amax, glu_interleave):
    return x.new_empty(offsets.shape[0] - 1, dy.shape[1], x.shape[1])


def _fake_wgrad_(*_):
    return None


_AMAXES = "Tensor amax, Tensor weight_amax"
_FOUR = "(Tensor, Tensor, Tensor, Tensor)"
_OPERATORS = (
    (
        f"nvfp4_amax(Tensor x, Tensor offsets, Tensor padded, bool rotated, {MARGIN}) -> (Tensor, Tensor)",
        with_optional_results,
        _fake_amax,
    ),
    (
        "nvfp4_quantize(Tensor x, Tensor offsets, Tensor padded, Tensor? amax, Tensor? column_amax, Tensor? state, "
        f"bool rowwise, bool columnwise, bool stored, bool rotated, {MARGIN}) -> (Tensor, Tensor, Tensor, Tensor)",
        with_optional_results,
        _fake_quantize,
    ),
    (
        f"nvfp4_dequantize(Tensor data, Tensor scale, Tensor padded, {MARGIN}) -> Tensor",
        plain,
        _fake_dequantize,
    ),
    (
        f"nvfp4_quantize_weight(Tensor[] weights, bool columnwise, bool square, {MARGIN}) -> (Tensor, Tensor, Tensor)",
        of_weights,
        _fake_quantize_weight,
    ),
    (
        f"nvfp4_grouped_gemm(Tensor x, Tensor[] weights, Tensor offsets, {_AMAXES}, Tensor? bias, "
        f"Tensor? bias_scale, {TILED}) -> Tensor",
        plain,
        _fake_gemm,
    ),
    (
        f"nvfp4_grouped_gemm_dgrad(Tensor dy, Tensor[] weights, Tensor offsets, {_AMAXES}, int glu_interleave, "
        f"{TILED}) -> Tensor",
        plain,
        _fake_dgrad,
    ),
    (
        f"nvfp4_grouped_gemm_act(Tensor x, Tensor[] weights, Tensor offsets, {_AMAXES}, str activation, Tensor? bias, "
        f"Tensor? probs, int glu_interleave, bool save_preact, bool rotated, {TILED}) -> {_FOUR}",
        with_activation,
        _fake_gemm_act,
    ),
    (
        f"nvfp4_grouped_gemm_dact(Tensor dy, Tensor[] weights, Tensor offsets, {_AMAXES}, Tensor preact, "
        f"str activation, Tensor? probs, bool need_dprobs, bool rotated, {TILED}) -> {_FOUR}",
        with_activation,
        _fake_gemm_dact,
    ),
    (
        "nvfp4_grouped_wgrad(Tensor dy, Tensor x, Tensor offsets, Tensor amax, Tensor x_amax, int glu_interleave, "
        f"{TILED}) -> Tensor",
        plain,
        _fake_wgrad,
    ),
    (
        "nvfp4_grouped_wgrad_(Tensor(a!)[] out, Tensor dy, Tensor x, Tensor offsets, Tensor amax, Tensor x_amax, "
        f"int glu_interleave, bool accumulate, {TILED}) -> ()",
        plain,
        _fake_wgrad_,
    ),
)

_REFERENCE = of_module(nvfp4_reference)
for _schema, _make, _fake in _OPERATORS:
    _name = _schema.split("(", 1)[0]
    register(_schema, _make(_name, _REFERENCE), _make(_name, hopper), _fake)

_OPS = torch.ops.fusible_ops

# ----------------------------------------------------------------------------------------------------------------------
# Public functions

nvfp4_dequantize = _OPS.nvfp4_dequantize.default


def nvfp4_amax(
    x: Tensor, offsets: Tensor, padded: Tensor, rotated: bool, **sharing: Any
) -> tuple[Tensor, Tensor | None]:
    """`nvfp4_reference.nvfp4_amax`."""
    amax, turned = _OPS.nvfp4_amax(x, offsets, padded, rotated, **sharing)
    return amax, empty_as_none(turned, rotated)


def nvfp4_quantize(
    x: Tensor,
    offsets: Tensor,
    padded: Tensor,
    amax: Tensor | None,
    column_amax: Tensor | None,
    state: Tensor | None = None,
    rowwise: bool = True,
    columnwise: bool = True,
    stored: bool = False,
    rotated: bool = False,
    **sharing: Any,
) -> Nvfp4Copies:
    """`nvfp4_reference.nvfp4_quantize`."""
    wanted = (rowwise, columnwise, stored)
    parts = _OPS.nvfp4_quantize(x, offsets, padded, amax, column_amax, state, *wanted, rotated, **sharing)
    return Nvfp4Copies(*(empty_as_none(t, w) for t, w in zip(parts, (*wanted, stored), strict=True)))


def nvfp4_quantize_weight(
    weights: Sequence[Tensor], columnwise: bool = True, square: bool = False, **sharing: Any
) -> Nvfp4Weights:
    """`nvfp4_reference.nvfp4_quantize_weight`."""
    rows, columns, amax = _OPS.nvfp4_quantize_weight(weights, columnwise, square, **sharing)
    return Nvfp4Weights(rows, empty_as_none(rows if square else columns, columnwise), amax)


def nvfp4_grouped_gemm(
    x: Tensor,
    weights: Sequence[Tensor],
    offsets: Tensor,
    amax: Tensor,
    weight_amax: Tensor,
    bias: Tensor | None = None,
    bias_scale: Tensor | None = None,
    **sharing: Any,
) -> Tensor:
    """`nvfp4_reference.nvfp4_grouped_gemm`."""
    return _OPS.nvfp4_grouped_gemm(x, weights, offsets, amax, weight_amax, bias, bias_scale, **sharing)


def nvfp4_grouped_gemm_dgrad(
    dy: Tensor,
    weights: Sequence[Tensor],
    offsets: Tensor,
    amax: Tensor,
    weight_amax: Tensor,
    glu_interleave: int = 0,
    **sharing: Any,
) -> Tensor:
    """`nvfp4_reference.nvfp4_grouped_gemm_dgrad`."""
    return _OPS.nvfp4_grouped_gemm_dgrad(dy, weights, offsets, amax, weight_amax, glu_interleave, **sharing)


def nvfp4_grouped_gemm_act(
    x: Tensor,
    weights: Sequence[Tensor],
    offsets: Tensor,
    amax: Tensor,
    weight_amax: Tensor,
    activation: Activation,
    bias: Tensor | None = None,
    probs: Tensor | None = None,
    glu_interleave: int = 0,
    save_preact: bool = True,
    rotated: bool = False,
    **sharing: Any,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """`nvfp4_reference.nvfp4_grouped_gemm_act`; kernels leave the tail of both results undefined."""
    operands = (x, weights, offsets, amax, weight_amax, activation.encode(), bias, probs, glu_interleave)
    act, preact, largest, turned = _OPS.nvfp4_grouped_gemm_act(*operands, save_preact, rotated, **sharing)
    return act, empty_as_none(preact, save_preact), largest, empty_as_none(turned, rotated)


def nvfp4_grouped_gemm_dact(
    dy: Tensor,
    weights: Sequence[Tensor],
    offsets: Tensor,
    amax: Tensor,
    weight_amax: Tensor,
    preact: Tensor,
    activation: Activation,
    probs: Tensor | None = None,
    need_dprobs: bool = False,
    rotated: bool = False,
    **sharing: Any,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """`nvfp4_reference.nvfp4_grouped_gemm_dact`; kernels leave the tail of dpreact undefined."""
    operands = (dy, weights, offsets, amax, weight_amax, preact, activation.encode(), probs)
    dpreact, dprobs, largest, turned = _OPS.nvfp4_grouped_gemm_dact(*operands, need_dprobs, rotated, **sharing)
    return dpreact, empty_as_none(dprobs, need_dprobs), largest, empty_as_none(turned, rotated)


def nvfp4_grouped_wgrad(
    dy: Tensor, x: Tensor, offsets: Tensor, amax: Tensor, x_amax: Tensor, glu_interleave: int = 0, **sharing: Any
) -> Tensor:
    """`nvfp4_reference.nvfp4_grouped_wgrad`."""
    return _OPS.nvfp4_grouped_wgrad(dy, x, offsets, amax, x_amax, glu_interleave, **sharing)


def nvfp4_grouped_wgrad_(
    out: Sequence[Tensor],
    dy: Tensor,
    x: Tensor,
    offsets: Tensor,
    amax: Tensor,
    x_amax: Tensor,
    glu_interleave: int = 0,
    accumulate: bool = False,
    **sharing: Any,
) -> None:
    """`nvfp4_reference.nvfp4_grouped_wgrad_`."""
    _OPS.nvfp4_grouped_wgrad_(out, dy, x, offsets, amax, x_amax, glu_interleave, accumulate, **sharing)
