"""The MXFP8 kernels' entry points as operators, with the signatures of `mxfp8_reference`; see `ops` for the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cute_kernels import mxfp8_reference
from cute_kernels.activation import Activation
from cute_kernels.mxfp8_reference import Mxfp8Copies, Mxfp8Weights, kept_shapes, stored_shapes
from cute_kernels.quantization.quantize import Quantized, parts_of, whole_of
from cute_kernels.registry import (
    MARGIN,
    TILED,
    Pick,
    empty_as_none,
    hopper,
    none_as_empty,
    of_module,
    of_weights,
    plain,
    register,
    with_optional_results,
)

# ----------------------------------------------------------------------------------------------------------------------
# Implementations and shape functions


def _gemm_act(name: str, pick: Pick) -> Callable:
    def run(x, weights, offsets, activation, *args, **sharing):
        act, preact = pick(name)(x, weights, offsets, Activation.decode(activation), *args, **sharing)
        return none_as_empty((act, *parts_of(preact)), x)

    return run


def _gemm_dact(name: str, pick: Pick) -> Callable:
    def run(dy, weights, offsets, preact, preact_scale, activation, *args, **sharing):
        kept = whole_of(preact, preact_scale)
        return none_as_empty(
            pick(name)(dy, weights, offsets, kept, Activation.decode(activation), *args, **sharing), dy
        )

    return run


def _fake_quantize(x, offsets, padded, rowwise, columnwise, stored):
    rows, columns = (x.new_empty(x.shape) if wanted else None for wanted in (rowwise, columnwise))
    data = scale = None
    if stored:
        shapes = stored_shapes(x.shape[0], offsets.shape[0] - 1, x.shape[1])
        data = x.new_empty(shapes[0], dtype=torch.float8_e4m3fn)
        scale = x.new_empty(shapes[1], dtype=torch.float8_e8m0fnu)
    return none_as_empty((rows, columns, data, scale), x)


def _fake_dequantize(data, scale, offsets, padded, rows):
    return data.new_empty(rows, data.shape[1], dtype=torch.bfloat16)


def _fake_quantize_weight(weights, columnwise, square):
    first = weights[0]
    shape = first.shape if first.dim() == 3 else (len(weights), *first.shape)
    return none_as_empty((first.new_empty(shape), first.new_empty(shape) if columnwise and not square else None), first)


def _fake_gemm_act(x, weights, offsets, activation, bias, probs, glu_interleave, save_preact, quantize_preact):
    rows, columns, halves = x.shape[0], weights[0].shape[-2], Activation.decode(activation).halves
    act = x.new_empty(rows, columns // halves)
    preact = scale = None
    if save_preact:
        preact = x.new_empty(rows, columns, dtype=torch.float8_e4m3fn if quantize_preact else x.dtype)
    if save_preact and quantize_preact:
        scale = x.new_empty(kept_shapes(rows, columns, halves)[1], dtype=torch.float8_e8m0fnu)
    return none_as_empty((act, preact, scale), x)


def _fake_gemm_dact(
    dy,
    weights,
    offsets,
    preact,
    preact_scale,
    activation,
    probs,
    rowwise,
    columnwise,
    need_act,
    need_dprobs,
    need_dbias,
    glu_interleave,
):
    rows = dy.shape[0]
    copies = (dy.new_empty(preact.shape) if wanted else None for wanted in (rowwise, columnwise))
    act = dy.new_empty(rows, weights[0].shape[-1]) if need_act else None
    dprobs = dy.new_empty(rows, dtype=torch.float32) if need_dprobs else None
    shape = offsets.shape[0] - 1, preact.shape[1]
    dbias = dy.new_empty(shape, dtype=torch.float32) if need_dbias else None
    return none_as_empty((*copies, act, dprobs, dbias), dy)


_OPERATORS = (
    (
        "mxfp8_quantize(Tensor x, Tensor offsets, Tensor padded, bool rowwise, bool columnwise, bool stored, "
        f"{MARGIN}) -> (Tensor, Tensor, Tensor, Tensor)",
        with_optional_results,
        _fake_quantize,
    ),
    (
        f"mxfp8_dequantize(Tensor data, Tensor scale, Tensor offsets, Tensor padded, SymInt rows, {MARGIN}) -> Tensor",
        plain,
        _fake_dequantize,
    ),
    (
        f"mxfp8_quantize_weight(Tensor[] weights, bool columnwise, bool square, {MARGIN}) -> (Tensor, Tensor)",
        of_weights,
        _fake_quantize_weight,
    ),
    (
        "mxfp8_grouped_gemm_act(Tensor x, Tensor[] weights, Tensor offsets, str activation, Tensor? bias, "
        f"Tensor? probs, int glu_interleave, bool save_preact, bool quantize_preact, {TILED}) "
        "-> (Tensor, Tensor, Tensor)",
        _gemm_act,
        _fake_gemm_act,
    ),
    (
        "mxfp8_grouped_gemm_dact(Tensor dy, Tensor[] weights, Tensor offsets, Tensor preact, Tensor? preact_scale, "
        "str activation, Tensor? probs, bool rowwise, bool columnwise, bool need_act, bool need_dprobs, "
        f"bool need_dbias, int glu_interleave, {TILED}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
        _gemm_dact,
        _fake_gemm_dact,
    ),
)

_REFERENCE = of_module(mxfp8_reference)
for _schema, _make, _fake in _OPERATORS:
    _name = _schema.split("(", 1)[0]
    register(_schema, _make(_name, _REFERENCE), _make(_name, hopper), _fake)

_OPS = torch.ops.fusible_ops

# ----------------------------------------------------------------------------------------------------------------------
# Public functions

mxfp8_dequantize = _OPS.mxfp8_dequantize.default


def mxfp8_quantize(
    x: Tensor,
    offsets: Tensor,
    padded: Tensor,
    rowwise: bool = True,
    columnwise: bool = True,
    stored: bool = False,
    **sharing: Any,
) -> Mxfp8Copies:
    """`mxfp8_reference.mxfp8_quantize`."""
    parts = _OPS.mxfp8_quantize(x, offsets, padded, rowwise, columnwise, stored, **sharing)
    wanted = (rowwise, columnwise, stored, stored)
    return Mxfp8Copies(*(empty_as_none(t, w) for t, w in zip(parts, wanted, strict=True)))


def mxfp8_quantize_weight(
    weights: Sequence[Tensor], columnwise: bool = True, square: bool = False, **sharing: Any
) -> Mxfp8Weights:
    """`mxfp8_reference.mxfp8_quantize_weight`."""
    rows, columns = _OPS.mxfp8_quantize_weight(weights, columnwise, square, **sharing)
    return Mxfp8Weights(rows, empty_as_none(rows if square else columns, columnwise))


def mxfp8_grouped_gemm_act(
    x: Tensor,
    weights: Sequence[Tensor],
    offsets: Tensor,
    activation: Activation,
    bias: Tensor | None = None,
    probs: Tensor | None = None,
    glu_interleave: int = 0,
    save_preact: bool = True,
    quantize_preact: bool = False,
    **sharing: Any,
) -> tuple[Tensor, Tensor | Quantized | None]:
    """`mxfp8_reference.mxfp8_grouped_gemm_act`; kernels leave the tail of both results undefined."""
    operands = (x, weights, offsets, activation.encode(), bias, probs, glu_interleave, save_preact, quantize_preact)
    act, preact, scale = _OPS.mxfp8_grouped_gemm_act(*operands, **sharing)
    if not save_preact:
        return act, None
    return act, whole_of(preact, scale if quantize_preact else None)


def mxfp8_grouped_gemm_dact(
    dy: Tensor,
    weights: Sequence[Tensor],
    offsets: Tensor,
    preact: Tensor | Quantized,
    activation: Activation,
    probs: Tensor | None = None,
    rowwise: bool = True,
    columnwise: bool = True,
    need_act: bool = True,
    need_dprobs: bool = False,
    need_dbias: bool = False,
    glu_interleave: int = 0,
    **sharing: Any,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """`mxfp8_reference.mxfp8_grouped_gemm_dact`; kernels leave the tail of all but dprobs undefined."""
    wanted = (rowwise, columnwise, need_act, need_dprobs, need_dbias)
    operands = (dy, weights, offsets, *parts_of(preact), activation.encode(), probs)
    parts = _OPS.mxfp8_grouped_gemm_dact(*operands, *wanted, glu_interleave, **sharing)
    rows, columns, act, dprobs, dbias = (empty_as_none(t, w) for t, w in zip(parts, wanted, strict=True))
    return rows, columns, act, dprobs, dbias
