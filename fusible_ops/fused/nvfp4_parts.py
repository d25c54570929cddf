"""What fused NVFP4 operations on Hopper share: operands as BF16 tensors that hold elements times block scales."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_kernels.nvfp4_reference import Nvfp4Weights, as_stored, block_values
from cute_kernels.quantization.nvfp4_scales import LARGEST
from cute_kernels.quantization.quantize import Quantized
from cute_kernels.quantization.scale_layout import from_storage
from fusible_ops import casts
from fusible_ops.fused import mxfp8_parts
from fusible_ops.fused.fp8_parts import DTYPE, made_anew
from fusible_ops.fused.parts import Contexts, LinearPart, as_rows
from fusible_ops.groups import Groups
from fusible_ops.op import ParamGrads
from fusible_ops.quantized_parameters import as_held
from fusible_ops.quantized_tensor import QuantizedTensor
from fusible_ops.quantizer import Quantizer
from fusible_ops.recipe import Recipe


class Operand(NamedTuple):
    """The copies of `nvfp4_reference.nvfp4_quantize` and the largest magnitudes that they belong to. None: not asked
    for.
    """

    rows: Tensor | None = None
    amax: Tensor | None = None
    columns: Tensor | None = None
    column_amax: Tensor | None = None
    data: Tensor | None = None
    scale: Tensor | None = None


def draw(parts: Sequence[LinearPart], ctxs: Contexts, recipe: Recipe, like: Tensor) -> None:
    """The quantisers of the linears' gradients, as unfused ones draw their random bits: in forward, and not where no
    gradient arrives.
    """
    for part in parts:
        own = ctxs[part.at]
        arrives = own.requires_grad or part.wants_dbias(ctxs)
        own.grad_quantizer = part.op.quantizer(recipe, "grad_output", like.device) if arrives else None


Maxima = tuple[Tensor, Tensor | None]
"""What `nvfp4_reference.nvfp4_amax` gives."""


def rotates(quantizer: Quantizer | None, down: bool) -> bool:
    """Whether a copy down the tokens is wanted and is rotated. quantizer: None where nothing is wanted."""
    return down and quantizer is not None and quantizer.format.hadamard


def operand_of(
    t: Tensor,
    groups: Groups,
    padded: Tensor,
    quantizer: Quantizer,
    kernels: Any,
    rowwise: bool,
    columnwise: bool = False,
    stored: bool = False,
    maxima: Maxima | None = None,
) -> Operand:
    """Rows `t [..., K]` quantised; of a QuantizedTensor of the same groups and format what it holds. maxima: of `t`, if
    they are known.
    """
    if not (rowwise or columnwise or stored):
        return Operand()
    format, offsets = quantizer.format, groups.offsets
    if isinstance(t, QuantizedTensor):
        lacks = (rowwise and t.rowwise is None) or ((columnwise or stored) and t.columnwise is None)
        fits = t.format == format and t.groups is not None and t.groups.are(groups)
        if fits and not (lacks and quantizer.state is not None):
            held = t.as_rows().with_usage(rowwise, columnwise or stored)
            return _held_operand(held, padded, kernels, rowwise, columnwise, stored)
        t = t.dequantize(DTYPE)
    x = as_rows(t, DTYPE)
    rotated = rotates(quantizer, columnwise or stored)
    amax, turned = maxima or kernels.nvfp4_amax(x, offsets, padded, rotated)
    column_amax = turned if rotated else amax
    copies = kernels.nvfp4_quantize(
        x, offsets, padded, amax, column_amax, quantizer.state, rowwise, columnwise, stored, rotated
    )
    return Operand(copies.rows, amax, copies.columns, column_amax, copies.data, copies.scale)


def _unpacked(t: QuantizedTensor, columnwise: bool) -> Quantized:
    """A copy that is held, its scales one for each block."""
    copy = t.columnwise if columnwise else t.rowwise
    assert copy is not None
    lines = 2 * copy.data.shape[-1] if columnwise else copy.data.shape[-2]
    return copy._replace(scale=from_storage(copy.scale, t.format, lines, t.shape[-1], columnwise))


def _held_operand(
    t: QuantizedTensor, padded: Tensor, kernels: Any, rowwise: bool, columnwise: bool, stored: bool
) -> Operand:
    made = Operand()
    if rowwise:
        row = _unpacked(t, False)
        made = made._replace(rows=block_values(row.data, row.scale, t.format), amax=row.amax)
    if columnwise or stored:
        column = _unpacked(t, True)
        data, scale = as_stored(column.data, column.scale)
        made = made._replace(column_amax=column.amax)
        if columnwise:
            made = made._replace(columns=kernels.nvfp4_dequantize(data, scale, padded))
        if stored:
            made = made._replace(data=data, scale=scale)
    return made


# ----------------------------------------------------------------------------------------------------------------------
# Weights


def weights_of(
    part: LinearPart, ctxs: Contexts, recipe: Recipe, kernels: Any, columnwise: bool, records: bool
) -> Nvfp4Weights:
    """A linear's weights as products read them: made once per update, or from those that are held.

    columnwise: with those of the input's gradient. records: whether gradients are recorded.
    """
    own = ctxs[part.at].held
    parameters, format = own.weights, recipe.operand_format("weight")
    if isinstance(parameters[0], QuantizedTensor):
        held = as_held(own, columnwise, ctxs[part.at].owner)
        if held.format.two_level:
            return _held_weights(held, columnwise)
        values = mxfp8_parts.held_values(part, ctxs, columnwise)
        return Nvfp4Weights(*values, values[0].new_full((values[0].shape[0],), LARGEST, dtype=torch.float32))

    def make() -> list[Tensor]:
        operands = [w.to(DTYPE) for w in own.operands(part.weight_dtype, records)]
        rows, columns, amax = kernels.nvfp4_quantize_weight(operands, columnwise, format.is_square)
        return [rows, amax] if columns is None else [rows, amax, columns]

    rows, amax, *columns = casts.cast(parameters, (format, columnwise, "values"), records, make)
    return Nvfp4Weights(rows, columns[0] if columns else None, amax)


def _held_weights(held: QuantizedTensor, columnwise: bool) -> Nvfp4Weights:
    row = _unpacked(held, False)
    rows = block_values(row.data, row.scale, held.format)
    assert row.amax is not None
    columns = None
    if columnwise and held.format.is_square:
        columns = rows
    elif columnwise:
        column = _unpacked(held, True)
        columns = block_values(column.data, column.scale, held.format).mT.contiguous()
    return Nvfp4Weights(rows, columns, row.amax)


KeptWeights = tuple[Tensor | None, Tensor | None]


def kept_of_weights(part: LinearPart, ctxs: Contexts, w: Nvfp4Weights) -> KeptWeights:
    """(columns, largest magnitudes) for backward; of sharded ones nothing, as in `fp8_parts`."""
    return (None, None) if w.columns is None or made_anew(part, ctxs) else (w.columns, w.amax)


def weights_in_backward(
    part: LinearPart, ctxs: Contexts, recipe: Recipe, kernels: Any, kept: KeptWeights, wanted: bool
) -> KeptWeights:
    """What `kept_of_weights` kept, or what it did not; Nones if it is not wanted."""
    if kept[0] is None and wanted:
        return weights_of(part, ctxs, recipe, kernels, True, True)[1:]
    return kept


# ----------------------------------------------------------------------------------------------------------------------
# Weight gradients


class ScaledWgrads:
    """Weight gradients of two operands with these largest magnitudes, under the names that `WeightGrad` calls."""

    def __init__(self, kernels: Any, amax: Tensor, x_amax: Tensor) -> None:
        self.kernels, self.amaxes = kernels, (amax, x_amax)

    def grouped_wgrad(self, dy: Tensor, x: Tensor, offsets: Tensor, glu_interleave: int = 0) -> Tensor:
        return self.kernels.nvfp4_grouped_wgrad(dy, x, offsets, *self.amaxes, glu_interleave)

    def grouped_wgrad_(
        self, out: Sequence[Tensor], dy: Tensor, x: Tensor, offsets: Tensor, glu_interleave: int, accumulate: bool
    ) -> None:
        self.kernels.nvfp4_grouped_wgrad_(out, dy, x, offsets, *self.amaxes, glu_interleave, accumulate)


KeptRows = tuple[Tensor | None, Tensor | None, Tensor | None]
"""(data, scale, largest magnitudes) of the input's stored copy; Nones if the weights want no gradient."""


def kept_of_rows(x: Operand) -> KeptRows:
    return (None, None, None) if x.data is None else (x.data, x.scale, x.column_amax)


def put_grads(
    part: LinearPart,
    ctxs: Contexts,
    grads: list[ParamGrads],
    kernels: Any,
    dy: Operand,
    kept: KeptRows,
    padded: Tensor,
    db: Tensor | None,
    glu_interleave: int = 0,
) -> None:
    """The parameters' gradients of one linear into its place. db: its bias gradient, if that is wanted."""
    data, scale, x_amax = kept
    x, products = None, kernels
    if data is not None:
        assert dy.column_amax is not None and x_amax is not None
        x = kernels.nvfp4_dequantize(data, scale, padded)
        products = ScaledWgrads(kernels, dy.column_amax, x_amax)
    mxfp8_parts.put_grads(part, ctxs, grads, products, dy.columns, x, padded, db, glu_interleave)
