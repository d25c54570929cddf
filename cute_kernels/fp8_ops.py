"""The FP8 kernels' entry points as operators, with the signatures of `fp8_reference`; see `ops` for the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cute_kernels import fp8_reference
from cute_kernels.activation import Activation
from cute_kernels.fp8_reference import BLOCK, Fp8Copies, Fp8Weights, kept_shapes, scales_in_row
from cute_kernels.quantization.groups import padded_rows
from cute_kernels.quantization.quantize import Quantized, parts_of, whole_of
from cute_kernels.registry import MARGIN, Pick, empty_as_none, hopper, none_as_empty, plain, register

_E4M3 = torch.float8_e4m3fn

# ----------------------------------------------------------------------------------------------------------------------
# Implementations


def _quantize(pick: Pick) -> Callable:
    def run(x, *args, **sharing):
        return none_as_empty(pick("fp8_quantize")(x, *args, **sharing), x)

    return run


def _quantize_weight(pick: Pick) -> Callable:
    def run(weights, *args, **sharing):
        return none_as_empty(pick("fp8_quantize_weight")(weights, *args, **sharing), weights[0])

    return run


def _gemm_act(pick: Pick) -> Callable:
    def run(x, x_scale, w, w_scale, offsets, padded, activation, *rest, **sharing):
        act, preact = pick("fp8_grouped_gemm_act")(
            x, x_scale, w, w_scale, offsets, padded, Activation.decode(activation), *rest, **sharing
        )
        return none_as_empty((*act[:4], *parts_of(preact)), x)

    return run


def _gemm_dact(pick: Pick) -> Callable:
    def run(dy, dy_scale, w, w_scale, offsets, padded, preact, preact_scale, activation, *rest, **sharing):
        kept, activation = whole_of(preact, preact_scale), Activation.decode(activation)
        dpreact, dprobs = pick("fp8_grouped_gemm_dact")(
            dy, dy_scale, w, w_scale, offsets, padded, kept, activation, *rest, **sharing
        )
        return none_as_empty((*dpreact, dprobs), dy)

    return run


def _reference(name: str) -> Callable:
    """The reference called `name`; it ignores how a kernel shares the device."""
    formula = getattr(fp8_reference, name)
    return lambda *args, **sharing: formula(*args)


# ----------------------------------------------------------------------------------------------------------------------
# Shape functions


def _copies(like: Tensor, columns: int, offsets: Tensor, rowwise: bool, columnwise: bool, halves: int = 1):
    """Both copies of a matrix of `columns` columns with the rows of `like`."""
    rows, groups = like.shape[0], offsets.shape[0] - 1
    data = scale = data_t = scale_t = None
    if rowwise:
        blocks = halves * -(-columns // halves // BLOCK)
        data = like.new_empty(rows, columns, dtype=_E4M3)
        scale = like.new_empty(blocks, scales_in_row(rows), dtype=torch.float32)
    if columnwise:
        tokens = padded_rows(rows, groups)
        data_t = like.new_empty(columns, tokens, dtype=_E4M3)
        scale_t = like.new_empty(tokens // BLOCK, scales_in_row(columns), dtype=torch.float32)
    return data, scale, data_t, scale_t


def _sums(like: Tensor, columns: int, offsets: Tensor, wanted: bool):
    return like.new_empty(offsets.shape[0] - 1, columns, dtype=torch.float32) if wanted else None


def _fake_padded_group_offsets(split_sizes, rows, multiple=128):
    offsets = split_sizes.new_empty(split_sizes.shape[0] + 1, dtype=torch.int32)
    return offsets, torch.empty_like(offsets)


def _fake_quantize(x, offsets, padded, rowwise, columnwise, column_sums, power_of_two):
    copies = _copies(x, x.shape[1], offsets, rowwise, columnwise)
    return none_as_empty((*copies, _sums(x, x.shape[1], offsets, column_sums)), x)


def _fake_quantize_weight(weights, columnwise, power_of_two):
    rows, columns = weights[0].shape[-2:]
    groups = weights[0].shape[0] if weights[0].dim() == 3 else len(weights)

    def copy(rows, columns):
        scale = (groups, -(-rows // BLOCK), scales_in_row(-(-columns // BLOCK)))
        like = weights[0]
        return like.new_empty(groups, rows, columns, dtype=_E4M3), like.new_empty(scale, dtype=torch.float32)

    return none_as_empty((*copy(rows, columns), *(copy(columns, rows) if columnwise else (None, None))), weights[0])


def _fake_gemm(x, x_scale, w, w_scale, offsets, bias=None, bias_scale=None, halves=1):
    return x.new_empty(x.shape[0], w.shape[1], dtype=torch.bfloat16)


def _fake_gemm_act(
    x,
    x_scale,
    w,
    w_scale,
    offsets,
    padded,
    activation,
    bias,
    probs,
    rowwise,
    columnwise,
    save_preact,
    power_of_two,
    quantize_preact,
):
    rows, columns, halves = x.shape[0], w.shape[1], Activation.decode(activation).halves
    copies = _copies(x, columns // halves, offsets, rowwise, columnwise)
    preact = scale = None
    if save_preact:
        preact = x.new_empty(rows, columns, dtype=_E4M3 if quantize_preact else torch.bfloat16)
    if save_preact and quantize_preact:
        scale = x.new_empty(kept_shapes(rows, columns, halves)[1], dtype=torch.float32)
    return none_as_empty((*copies, preact, scale), x)


def _fake_gemm_dact(
    dy,
    dy_scale,
    w,
    w_scale,
    offsets,
    padded,
    preact,
    preact_scale,
    activation,
    probs,
    rowwise,
    columnwise,
    need_dprobs,
    need_dbias,
    power_of_two,
):
    columns = preact.shape[1]
    copies = _copies(dy, columns, offsets, rowwise, columnwise, Activation.decode(activation).halves)
    dprobs = dy.new_empty(dy.shape[0], dtype=torch.float32) if need_dprobs else None
    return none_as_empty((*copies, _sums(dy, columns, offsets, need_dbias), dprobs), dy)


def _fake_wgrad(dy_t, dy_scale_t, x_t, x_scale_t, padded, glu_interleave=0):
    return dy_t.new_empty(padded.shape[0] - 1, dy_t.shape[0], x_t.shape[0], dtype=torch.bfloat16)


def _fake_wgrad_(out, dy_t, dy_scale_t, x_t, x_scale_t, padded, glu_interleave=0, accumulate=False):
    return None


_OPERANDS = "Tensor x, Tensor x_scale, Tensor w, Tensor w_scale, Tensor offsets"
_TURNED = "Tensor dy_t, Tensor dy_scale_t, Tensor x_t, Tensor x_scale_t, Tensor padded, int glu_interleave=0"
_COPIES = "Tensor, Tensor, Tensor, Tensor"
_OPERATORS = (
    (
        "padded_group_offsets(Tensor split_sizes, SymInt rows, int multiple=128) -> (Tensor, Tensor)",
        plain,
        _fake_padded_group_offsets,
    ),
    (
        "fp8_quantize(Tensor x, Tensor offsets, Tensor padded, bool rowwise, bool columnwise, bool column_sums, "
        f"bool power_of_two, {MARGIN}) -> ({_COPIES}, Tensor)",
        lambda name, pick: _quantize(pick),
        _fake_quantize,
    ),
    (
        f"fp8_quantize_weight(Tensor[] weights, bool columnwise, bool power_of_two, {MARGIN}) -> ({_COPIES})",
        lambda name, pick: _quantize_weight(pick),
        _fake_quantize_weight,
    ),
    (
        f"fp8_grouped_gemm({_OPERANDS}, Tensor? bias=None, Tensor? bias_scale=None, int halves=1, {MARGIN}) -> Tensor",
        plain,
        _fake_gemm,
    ),
    (
        f"fp8_grouped_gemm_act({_OPERANDS}, Tensor padded, str activation, Tensor? bias, Tensor? probs, bool rowwise, "
        f"bool columnwise, bool save_preact, bool power_of_two, bool quantize_preact, {MARGIN}) "
        f"-> ({_COPIES}, Tensor, Tensor)",
        lambda name, pick: _gemm_act(pick),
        _fake_gemm_act,
    ),
    (
        f"fp8_grouped_gemm_dact({_OPERANDS}, Tensor padded, Tensor preact, Tensor? preact_scale, str activation, "
        "Tensor? probs, bool rowwise, bool columnwise, bool need_dprobs, bool need_dbias, bool power_of_two, "
        f"{MARGIN}) -> ({_COPIES}, Tensor, Tensor)",
        lambda name, pick: _gemm_dact(pick),
        _fake_gemm_dact,
    ),
    (f"fp8_grouped_wgrad({_TURNED}, {MARGIN}) -> Tensor", plain, _fake_wgrad),
    (f"fp8_grouped_wgrad_(Tensor(a!)[] out, {_TURNED}, bool accumulate=False, {MARGIN}) -> ()", plain, _fake_wgrad_),
)

for _schema, _make, _fake in _OPERATORS:
    _name = _schema.split("(", 1)[0]
    register(_schema, _make(_name, _reference), _make(_name, hopper), _fake)

_OPS = torch.ops.fusible_ops

# ----------------------------------------------------------------------------------------------------------------------
# Public functions

padded_group_offsets = _OPS.padded_group_offsets.default
fp8_grouped_gemm = _OPS.fp8_grouped_gemm.default
fp8_grouped_wgrad = _OPS.fp8_grouped_wgrad.default
fp8_grouped_wgrad_ = _OPS.fp8_grouped_wgrad_.default


def _made(parts: Sequence[Tensor], rowwise: bool, columnwise: bool, sums: bool) -> Fp8Copies:
    wanted = (rowwise, rowwise, columnwise, columnwise, sums)
    return Fp8Copies(*(empty_as_none(t, w) for t, w in zip(parts, wanted, strict=True)))


def fp8_quantize(
    x: Tensor,
    offsets: Tensor,
    padded: Tensor,
    rowwise: bool = True,
    columnwise: bool = True,
    column_sums: bool = False,
    power_of_two: bool = True,
    **sharing: Any,
) -> Fp8Copies:
    """`fp8_reference.fp8_quantize`."""
    parts = _OPS.fp8_quantize(x, offsets, padded, rowwise, columnwise, column_sums, power_of_two, **sharing)
    return _made(parts, rowwise, columnwise, column_sums)


def fp8_quantize_weight(
    weights: Sequence[Tensor], columnwise: bool = True, power_of_two: bool = True, **sharing: Any
) -> Fp8Weights:
    """`fp8_reference.fp8_quantize_weight`."""
    data, scale, data_t, scale_t = _OPS.fp8_quantize_weight(weights, columnwise, power_of_two, **sharing)
    return Fp8Weights(data, scale, empty_as_none(data_t, columnwise), empty_as_none(scale_t, columnwise))


def fp8_grouped_gemm_act(
    x: Tensor,
    x_scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    offsets: Tensor,
    padded: Tensor,
    activation: Activation,
    bias: Tensor | None = None,
    probs: Tensor | None = None,
    rowwise: bool = True,
    columnwise: bool = True,
    save_preact: bool = True,
    power_of_two: bool = True,
    quantize_preact: bool = False,
    **sharing: Any,
) -> tuple[Fp8Copies, Tensor | Quantized | None]:
    """`fp8_reference.fp8_grouped_gemm_act`."""
    operands = (x, x_scale, w, w_scale, offsets, padded, activation.encode(), bias, probs)
    flags = (rowwise, columnwise, save_preact, power_of_two, quantize_preact)
    *parts, preact, scale = _OPS.fp8_grouped_gemm_act(*operands, *flags, **sharing)
    act = _made([*parts, parts[0]], rowwise, columnwise, False)
    return act, whole_of(preact, scale if quantize_preact else None) if save_preact else None


def fp8_grouped_gemm_dact(
    dy: Tensor,
    dy_scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    offsets: Tensor,
    padded: Tensor,
    preact: Tensor | Quantized,
    activation: Activation,
    probs: Tensor | None = None,
    rowwise: bool = True,
    columnwise: bool = True,
    need_dprobs: bool = False,
    need_dbias: bool = False,
    power_of_two: bool = True,
    **sharing: Any,
) -> tuple[Fp8Copies, Tensor | None]:
    """`fp8_reference.fp8_grouped_gemm_dact`."""
    operands = (dy, dy_scale, w, w_scale, offsets, padded, *parts_of(preact), activation.encode(), probs)
    flags = (rowwise, columnwise, need_dprobs, need_dbias, power_of_two)
    *parts, dprobs = _OPS.fp8_grouped_gemm_dact(*operands, *flags, **sharing)
    return _made(parts, rowwise, columnwise, need_dbias), empty_as_none(dprobs, need_dprobs)
