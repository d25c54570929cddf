"""What fused operations in MXFP8 and NVFP4 on padded rows share: operands, products, parameters' gradients, weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cute_kernels.activation import Activation
from cute_kernels.blackwell import mxfp8_reference, nvfp4_reference
from cute_kernels.blackwell.operands import check_margin, operand
from cute_kernels.blackwell.rows import PaddedGroups
from cute_kernels.blackwell.scaled_reference import alpha_of
from cute_kernels.quantization.formats import Format
from cute_kernels.quantization.quantize import Quantized, quantize
from cute_kernels.quantization.scale_layout import from_storage
from fusible_ops import casts
from fusible_ops.fused.fp8_parts import DTYPE, made_anew
from fusible_ops.fused.parts import Contexts, LinearPart, viewed
from fusible_ops.op import FusedOperation, OperationContext, ParamGrads
from fusible_ops.parameters import as_one
from fusible_ops.quantized_parameters import as_held
from fusible_ops.quantized_tensor import QuantizedTensor
from fusible_ops.quantizer import Quantizer
from fusible_ops.recipe import Recipe


class Scaled(NamedTuple):
    """A quantised matrix as kernels take it, and in NVFP4 the largest magnitude of each group. All None: none."""

    data: Tensor | None = None
    scale: Tensor | None = None
    amax: Tensor | None = None

    def __bool__(self) -> bool:
        return self.data is not None


class AlongRows(Scaled):
    """A matrix [M, C] quantised along its rows, as an operand of a weight gradient. In NVFP4 it lies transposed."""

    @property
    def shape(self) -> tuple[int, int]:
        assert self.data is not None
        first, second = self.data.shape
        return (first, second) if self.amax is None else (2 * second, first)

    @property
    def dtype(self) -> torch.dtype:
        return DTYPE

    @property
    def device(self) -> torch.device:
        assert self.data is not None
        return self.data.device


# ----------------------------------------------------------------------------------------------------------------------
# Products


class Mxfp8Products:
    """Products in MXFP8 on the padded rows of `groups`; weight gradients under the names that `WeightGrad` calls."""

    def __init__(self, ctx: OperationContext, groups: PaddedGroups) -> None:
        self.kernels, self.formulas, self.groups, self.ends = ctx.kernels, ctx.formulas, groups, groups.ends

    def quantize(self, t: Tensor, quantizer: Quantizer, columnwise: bool = False) -> Scaled:
        """t [M, C] along C, or along M for a weight gradient."""
        return Scaled(*mxfp8_reference.quantize_rows(t, self.ends, columnwise))

    def gemm(self, x: Scaled, w: Scaled, bias: Tensor | None = None, bias_scale: Tensor | None = None) -> Tensor:
        """y = x W_gᵀ (+ s·b_g)."""
        return self.kernels.padded_mxfp8_gemm(*x[:2], *w[:2], self.ends, bias, bias_scale)

    def gemm_act(
        self,
        x: Scaled,
        w: Scaled,
        activation: Activation,
        bias: Tensor | None,
        probs: Tensor | None,
        quantizer: Quantizer,
        trains: bool,
    ) -> tuple[Scaled, Scaled, Tensor]:
        """(f(x W_gᵀ + b_g)·p quantised along its columns, along its rows if `trains`, the pre-activation)."""
        *act, act_t, scale_t, preact = self.kernels.padded_mxfp8_gemm_act(
            *x[:2], *w[:2], self.ends, activation, bias, probs
        )
        return Scaled(*act), Scaled(act_t, scale_t) if trains else Scaled(), preact

    def gemm_dact(
        self,
        dy: Scaled,
        w: Scaled,
        preact: Tensor,
        activation: Activation,
        probs: Tensor | None,
        need_dprobs: bool,
        need_dbias: bool,
        quantizer: Quantizer,
        usage: tuple[bool, bool],
    ) -> tuple[Scaled, Scaled, Tensor | None, Tensor | None]:
        """(the gradient of the pre-activation quantised along its columns and along its rows, as `usage` says; dprobs;
        dbias).
        """
        *row, column, scale, dprobs, dbias = self.kernels.padded_mxfp8_gemm_dact(
            *dy[:2], *w[:2], self.ends, preact, activation, probs, need_dprobs, need_dbias
        )
        return Scaled(*row), Scaled(column, scale), dprobs, dbias

    def grouped_wgrad(self, dy: AlongRows, x: AlongRows, offsets: Tensor, glu_interleave: int = 0) -> Tensor:
        return self.kernels.padded_mxfp8_wgrad(*dy[:2], *x[:2], self.ends)

    def grouped_wgrad_(
        self, out: Sequence[Tensor], dy: AlongRows, x: AlongRows, offsets: Tensor, glu_interleave: int, accumulate: bool
    ) -> None:
        self.kernels.padded_mxfp8_wgrad_(out, *dy[:2], *x[:2], self.ends, accumulate)


class Nvfp4Products(Mxfp8Products):
    """The same in NVFP4. Kernels give an activation and its gradient in BF16 with their largest magnitudes; PyTorch
    quantises them, as it does x and dy, into no copy but those that are wanted.
    """

    def quantize(self, t: Tensor, quantizer: Quantizer, columnwise: bool = False, amax: Tensor | None = None) -> Scaled:
        """amax: the largest magnitudes that it has, or if it is rotated will have, where they are known."""
        made, largest = nvfp4_reference.quantize_rows(t, self.ends, quantizer.format, columnwise, quantizer.state, amax)
        return Scaled(*made, largest)

    def gemm(self, x: Scaled, w: Scaled, bias: Tensor | None = None, bias_scale: Tensor | None = None) -> Tensor:
        return self.kernels.padded_nvfp4_gemm(*x[:2], *w[:2], self.ends, _alpha(x, w), bias, bias_scale)

    def gemm_act(
        self,
        x: Scaled,
        w: Scaled,
        activation: Activation,
        bias: Tensor | None,
        probs: Tensor | None,
        quantizer: Quantizer,
        trains: bool,
    ) -> tuple[Scaled, Scaled, Tensor]:
        rotates = trains and quantizer.format.hadamard
        act, preact, amax, rotated = self.kernels.padded_nvfp4_gemm_act(
            *x[:2], *w[:2], self.ends, _alpha(x, w), activation, bias, probs, rotates and activation.is_glu
        )
        row = self.quantize(act, quantizer, amax=amax)
        column = self.quantize(act, quantizer, True, rotated if rotates else amax) if trains else Scaled()
        return row, column, preact

    def gemm_dact(
        self,
        dy: Scaled,
        w: Scaled,
        preact: Tensor,
        activation: Activation,
        probs: Tensor | None,
        need_dprobs: bool,
        need_dbias: bool,
        quantizer: Quantizer,
        usage: tuple[bool, bool],
    ) -> tuple[Scaled, Scaled, Tensor | None, Tensor | None]:
        dpreact, amax, dprobs = self.kernels.padded_nvfp4_gemm_dact(
            *dy[:2], *w[:2], self.ends, _alpha(dy, w), preact, activation, probs, need_dprobs
        )
        dbias = self.formulas.grouped_dbias(dpreact, self.groups.padded_offsets) if need_dbias else None
        row = self.quantize(dpreact, quantizer, amax=amax) if usage[0] else Scaled()
        column = Scaled()
        if usage[1]:
            column = self.quantize(dpreact, quantizer, True, None if quantizer.format.hadamard else amax)
        return row, column, dprobs, dbias

    def grouped_wgrad(self, dy: AlongRows, x: AlongRows, offsets: Tensor, glu_interleave: int = 0) -> Tensor:
        return self.kernels.padded_nvfp4_wgrad(*dy[:2], *x[:2], self.ends, _alpha(dy, x))

    def grouped_wgrad_(
        self, out: Sequence[Tensor], dy: AlongRows, x: AlongRows, offsets: Tensor, glu_interleave: int, accumulate: bool
    ) -> None:
        self.kernels.padded_nvfp4_wgrad_(out, *dy[:2], *x[:2], self.ends, _alpha(dy, x), accumulate)


def products_of(ctx: OperationContext, groups: PaddedGroups) -> Mxfp8Products:
    """Those of the recipe."""
    assert ctx.recipe is not None
    return (Nvfp4Products if ctx.recipe.operand_format("input").two_level else Mxfp8Products)(ctx, groups)


class ScaledOperation(FusedOperation):
    """One whose weight gradients are from MXFP8 or NVFP4, and leave no SM free."""

    def check_margin(self, recipe: Recipe, sm_margin: int) -> None:
        check_margin("nvfp4" if recipe.operand_format("input").two_level else "mxfp8", sm_margin)


def _alpha(a: Scaled, b: Scaled) -> Tensor:
    assert a.amax is not None and b.amax is not None
    return alpha_of(a.amax, b.amax)


# ----------------------------------------------------------------------------------------------------------------------
# Gradients of parameters


def put_own_grads(
    part: LinearPart,
    ctxs: Contexts,
    places: tuple[list[ParamGrads], list[ParamGrads]],
    products: Mxfp8Products,
    rows: Tensor,
    dy: Tensor,
    x: Scaled,
    factors: Tensor | None,
    bias: Tensor | None,
) -> None:
    """The gradients of the parameters and of the scales of a linear into its places, from the gradient of its output.

    rows: that gradient as it came, dy: padded. x: the input along its rows, if the weights want a gradient. factors:
    what the bias is multiplied by in each row; bias: itself, if those want one.
    """
    ctx, (grads, extra_grads), offsets = ctxs[0], places, products.groups.offsets
    db = ctx.formulas.grouped_dbias(rows, offsets, factors) if part.wants_dbias(ctxs) else None
    if part.wants_dscales(ctxs):
        extra_grads[part.at] = [None, viewed(ctx.formulas.grouped_dscale(rows, bias, offsets), ctx.scales_shape)]
    if x or db is not None:
        dy_t = products.quantize(dy, ctxs[part.at].grad_quantizer, True) if x else Scaled()
        put_grads(part, ctxs, grads, products, dy_t, x, db)


def put_grads(
    part: LinearPart,
    ctxs: Contexts,
    grads: list[ParamGrads],
    products: Mxfp8Products,
    dy: Scaled,
    x: Scaled,
    db: Tensor | None,
) -> None:
    """The parameters' gradients of one linear into its place. db: its bias gradient, if that is wanted."""
    left, right = (AlongRows(*t) if t else None for t in (dy, x))
    part.put_grads(ctxs, grads, products, left, right, products.groups.padded_offsets, db=db)  # type: ignore[arg-type]


# ----------------------------------------------------------------------------------------------------------------------
# Weights


def weights_of(
    part: LinearPart, ctxs: Contexts, format: Format, columnwise: bool, records: bool
) -> tuple[Scaled, Scaled]:
    """A linear's weights as the kernels read them: [G, N, K], and if `columnwise` for products that sum over N
    [G, K, N]. Quantised once per update, or as they are held.
    """
    own = ctxs[part.at].held
    parameters = own.weights

    def make() -> list[Tensor]:
        plain = as_one(parameters, 3).to(DTYPE)
        return _quantized(plain.mT if own.transposed else plain, format, columnwise)

    if not isinstance(parameters[0], QuantizedTensor):
        made = casts.cast(parameters, (format, columnwise, own.transposed, "padded"), records, make)
    else:
        held = as_held(own, columnwise, ctxs[part.at].owner)
        made = _as_operands(_from_storage(held, False), _from_storage(held, True), held.format)
    one = 3 if format.two_level else 2
    row, column = Scaled(*made[:one]), Scaled(*made[one:])
    if column.data is not None and not format.transposes:
        column = column._replace(data=column.data.mT)
    return row, column


def kept_of_weights(part: LinearPart, ctxs: Contexts, turned: Scaled) -> Scaled:
    """What backward keeps of a linear's weights: the copy for products that sum over N, or nothing (`made_anew`)."""
    return Scaled() if turned and made_anew(part, ctxs) else turned


def turned_weights(part: LinearPart, ctxs: Contexts, kept: Scaled) -> Scaled:
    """That copy in backward, of which `kept_of_weights` kept this; none if the input wants no gradient."""
    own = ctxs[part.at]
    if kept or not own.input_requires_grad:
        return kept
    assert own.recipe is not None
    return weights_of(part, ctxs, own.recipe.operand_format("weight"), True, True)[1]


def _quantized(plain: Tensor, format: Format, columnwise: bool) -> list[Tensor]:
    return _as_operands(quantize(plain, format, False), quantize(plain, format, True) if columnwise else None, format)


def _from_storage(held: QuantizedTensor, columnwise: bool) -> Quantized | None:
    """A copy that is held, its scales one for each block."""
    copy = held.columnwise if columnwise else held.rowwise
    if copy is None:
        return None
    n, k = held.shape[-2:]
    return copy._replace(scale=from_storage(copy.scale, held.format, n, k, columnwise))


def _as_operands(rowwise: Quantized | None, columnwise: Quantized | None, format: Format) -> list[Tensor]:
    """Data, scales and largest magnitudes of both copies, if there are both."""
    made: list[Tensor | None] = []
    for direction, copy in ((False, rowwise), (True, columnwise)):
        if copy is not None:
            made += [*operand(copy, format, direction), copy.amax]
    return [t for t in made if t is not None]
