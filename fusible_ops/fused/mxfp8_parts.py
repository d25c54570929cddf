"""What fused MXFP8 operations on Hopper share: operands as BF16 tensors that hold MXFP8 values."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from cute_kernels.mxfp8_reference import Mxfp8Copies, Mxfp8Weights
from cute_kernels.quantization.formats import Format
from fusible_ops import casts
from fusible_ops.fused.fp8_parts import DTYPE, made_anew
from fusible_ops.fused.parts import Contexts, LinearPart, as_rows
from fusible_ops.groups import Groups
from fusible_ops.op import ParamGrads
from fusible_ops.quantized_parameters import as_held
from fusible_ops.quantized_tensor import QuantizedTensor
from fusible_ops.recipe import Recipe


def weights_of(
    part: LinearPart, ctxs: Contexts, recipe: Recipe, kernels: Any, columnwise: bool, records: bool
) -> Mxfp8Weights:
    """The values of a linear's weights as products read them: made once per update, or from those that are held.

    columnwise: with those of the input's gradient. records: whether gradients are recorded.
    """
    own = ctxs[part.at].held
    parameters, format = own.weights, recipe.operand_format("weight")
    if isinstance(parameters[0], QuantizedTensor):
        return Mxfp8Weights(*held_values(part, ctxs, columnwise))

    def make() -> list[Tensor]:
        operands = [w.to(DTYPE) for w in own.operands(part.weight_dtype, records)]
        rows, columns = kernels.mxfp8_quantize_weight(operands, columnwise, format.is_square)
        return [rows] if columns is None else [rows, columns]

    rows, *columns = casts.cast(parameters, (format, columnwise, "values"), records, make)
    return Mxfp8Weights(rows, columns[0] if columns else None)


def held_values(part: LinearPart, ctxs: Contexts, columnwise: bool) -> tuple[Tensor, Tensor | None]:
    """(values of the rows, of the columns if asked) of weights that are held quantised, in whatever format: products
    take them as they are.
    """
    held = as_held(ctxs[part.at].held, columnwise, ctxs[part.at].owner)
    return held.values(False, DTYPE), held.values(True, DTYPE) if columnwise else None


def kept_of_weights(part: LinearPart, ctxs: Contexts, w: Mxfp8Weights) -> Tensor | None:
    """What backward keeps of a linear's weights; of sharded ones nothing, as in `fp8_parts`."""
    return None if w.columns is None or made_anew(part, ctxs) else w.columns


def weights_in_backward(
    part: LinearPart, ctxs: Contexts, recipe: Recipe, kernels: Any, kept: Tensor | None, wanted: bool
) -> Tensor | None:
    """What `kept_of_weights` kept, or what it did not; None if it is not wanted."""
    return weights_of(part, ctxs, recipe, kernels, True, True).columns if kept is None and wanted else kept


def copies_of(
    t: Tensor,
    groups: Groups,
    padded: Tensor,
    format: Format,
    kernels: Any,
    rowwise: bool,
    columnwise: bool = False,
    stored: bool = False,
) -> Mxfp8Copies:
    """The copies of rows `t [..., K]`; of a QuantizedTensor of the same groups and format those that it holds."""
    if not (rowwise or columnwise or stored):
        return Mxfp8Copies(None, None, None, None)
    if isinstance(t, QuantizedTensor):
        row, column = t.rowwise, t.columnwise
        fits = t.format == format and t.groups is not None and t.groups.are(groups)
        if fits and (row is not None or not rowwise) and (column is not None or not (columnwise or stored)):
            rows = columns = None
            if rowwise:
                rows = as_rows(t.with_usage(True, False).dequantize(DTYPE), DTYPE)
            if columnwise:
                assert column is not None
                height = t.shape[:-1].numel()
                columns = kernels.mxfp8_dequantize(column.data, column.scale, groups.offsets, padded, height)
            kept = (column.data, column.scale) if stored and column is not None else (None, None)
            return Mxfp8Copies(rows, columns, *kept)
        t = t.dequantize(DTYPE)
    return kernels.mxfp8_quantize(as_rows(t, DTYPE), groups.offsets, padded, rowwise, columnwise, stored)


def put_grads(
    part: LinearPart,
    ctxs: Contexts,
    grads: list[ParamGrads],
    kernels: Any,
    dy: Tensor | None,
    x: Tensor | None,
    offsets: Tensor,
    db: Tensor | None,
    glu_interleave: int = 0,
) -> None:
    """The parameters' gradients of one linear into its place. x: None if the weights want none. db: its bias gradient,
    if that is wanted.
    """
    if x is not None or db is not None:
        columns: Any = dy
        part.put_grads(ctxs, grads, kernels, columns, x, offsets, db=db, glu_interleave=glu_interleave)
