"""What the fused MXFP8 operations on padded rows share: weights as operands, and gradients of parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_kernels.blackwell.mxfp8_reference import quantize_rows
from cute_kernels.blackwell.operands import operand
from cute_kernels.quantization.formats import Format
from cute_kernels.quantization.quantize import Quantized, quantize
from cute_kernels.quantization.scale_layout import from_storage
from fusible_ops import casts
from fusible_ops.fused.fp8_parts import DTYPE
from fusible_ops.fused.parts import Contexts, LinearPart, viewed
from fusible_ops.op import ParamGrads
from fusible_ops.parameters import as_one
from fusible_ops.quantized_parameters import as_held
from fusible_ops.quantized_tensor import QuantizedTensor


def put_own_grads(
    part: LinearPart,
    ctxs: Contexts,
    places: tuple[list[ParamGrads], list[ParamGrads]],
    rows: Tensor,
    dy: Tensor,
    x: AlongRows | None,
    factors: Tensor | None,
    bias: Tensor | None,
) -> None:
    """The gradients of the parameters and of the scales of a linear into its places, from the gradient of its output.

    rows: that gradient as it came, dy: padded. x: the input, if the weights want a gradient. factors: what the bias is
    multiplied by in each row; bias: itself, if those want one.
    """
    ctx, (grads, extra_grads) = ctxs[0], places
    db = ctx.formulas.grouped_dbias(rows, ctx.groups.offsets, factors) if part.wants_dbias(ctxs) else None
    if part.wants_dscales(ctxs):
        dscales = ctx.formulas.grouped_dscale(rows, bias, ctx.groups.offsets)
        extra_grads[part.at] = [None, viewed(dscales, ctx.scales_shape)]
    if x is not None:
        put_grads(part, ctxs, grads, along_rows(*quantize_rows(dy, ctx.groups.ends, True)), x, db)


def put_grads(
    part: LinearPart,
    ctxs: Contexts,
    grads: list[ParamGrads],
    dy: AlongRows | None,
    x: AlongRows | None,
    db: Tensor | None,
) -> None:
    """The parameters' gradients of one linear into its place. db: its bias gradient, if that is wanted."""
    groups, products = ctxs[0].groups, PaddedMxfp8Products(ctxs[0].kernels, ctxs[0].groups.ends)
    part.put_grads(ctxs, grads, products, dy, x, groups.padded_offsets, db=db)  # type: ignore[arg-type]


class AlongRows(NamedTuple):
    """A matrix [M, C] quantised along its rows, as an operand of a weight gradient."""

    data: Tensor
    scale: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    @property
    def dtype(self) -> torch.dtype:
        return DTYPE

    @property
    def device(self) -> torch.device:
        return self.data.device


def along_rows(data: Tensor | None, scale: Tensor | None) -> AlongRows | None:
    """An operand of a weight gradient; None if it was not kept."""
    return None if data is None or scale is None else AlongRows(data, scale)


@dataclass(frozen=True)
class PaddedMxfp8Products:
    """Weight gradients of operands quantised along their padded rows, under the names that `WeightGrad` calls."""

    kernels: Any
    ends: Tensor

    def grouped_wgrad(self, dy: AlongRows, x: AlongRows, offsets: Tensor, glu_interleave: int = 0) -> Tensor:
        return self.kernels.padded_mxfp8_wgrad(*dy, *x, self.ends)

    def grouped_wgrad_(
        self, out: Sequence[Tensor], dy: AlongRows, x: AlongRows, offsets: Tensor, glu_interleave: int, accumulate: bool
    ) -> None:
        self.kernels.padded_mxfp8_wgrad_(out, *dy, *x, self.ends, accumulate)


def weights_of(part: LinearPart, ctxs: Contexts, format: Format, columnwise: bool, records: bool) -> list[Tensor]:
    """A linear's weights [G, N, K] as the kernels read them: data, scales, and if `columnwise` those of the column-wise
    copy. Quantised once per update, or as they are held.
    """
    own = ctxs[part.at].held
    parameters = own.weights
    if isinstance(parameters[0], QuantizedTensor):
        held = as_held(own, columnwise, ctxs[part.at].owner)
        if held.format == format:
            return _as_operands(held.rowwise, held.columnwise, format, held=True)
        return _quantized(held.dequantize(DTYPE), format, columnwise)

    def make() -> list[Tensor]:
        plain = as_one(parameters, 3).to(DTYPE)
        return _quantized(plain.mT if own.transposed else plain, format, columnwise)

    return casts.cast(parameters, (format, columnwise, own.transposed, "padded"), records, make)


def _quantized(plain: Tensor, format: Format, columnwise: bool) -> list[Tensor]:
    copies = quantize(plain, format, False), quantize(plain, format, True) if columnwise else None
    return _as_operands(*copies, format)


def _as_operands(
    rowwise: Quantized | None, columnwise: Quantized | None, format: Format, held: bool = False
) -> list[Tensor]:
    """Data and scales of both copies, if there are both. held: their scales lie as a QuantizedTensor's."""
    made: list[Tensor] = []
    for direction, copy in ((False, rowwise), (True, columnwise)):
        if copy is None:
            continue
        if held:
            n, k = copy.data.shape[-2:]
            copy = Quantized(copy.data, from_storage(copy.scale, format, n, k, direction))
        made += [t for t in operand(copy, format, direction) if t is not None]
    return made
