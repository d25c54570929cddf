"""What the fused FP8 operations share: operands in E4M3 blocks, their weight gradients, and results as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_kernels.fp8_reference import Fp8Copies, Fp8Weights
from cute_kernels.quantization.formats import FP32_POWER_OF_2, Format
from cute_kernels.quantization.groups import group_multiple
from cute_kernels.quantization.quantize import Quantized
from fusible_ops import casts
from fusible_ops.fused.parts import Contexts, LinearPart, as_rows
from fusible_ops.groups import Groups, version_of
from fusible_ops.parameters import Unchanged
from fusible_ops.quantized_parameters import as_held
from fusible_ops.quantized_tensor import QuantizedTensor
from fusible_ops.recipe import Recipe

DTYPE = torch.bfloat16
"""What the kernels' products come out in."""


def power_of_two(recipe: Recipe) -> bool:
    """Whether scales are powers of two."""
    return recipe.operand_format("input").scale == FP32_POWER_OF_2


def weights_of(
    part: LinearPart, ctxs: Contexts, recipe: Recipe, kernels: Any, columnwise: bool, records: bool
) -> Fp8Weights:
    """A linear's weights as the kernels read them: quantised once per update, or as they are held.

    columnwise: with the transposed copy. records: whether gradients are recorded.
    """
    own = ctxs[part.at].held
    parameters, format = own.weights, recipe.operand_format("weight")
    if isinstance(parameters[0], QuantizedTensor):
        held = as_held(own, columnwise, ctxs[part.at].owner)
        row, column = held.rowwise, held.columnwise
        assert row is not None
        return Fp8Weights(row.data, row.scale, *((None, None) if column is None else column[:2]))

    def make() -> list[Tensor]:
        operands = [w.to(DTYPE) for w in own.operands(part.weight_dtype, records)]
        made = kernels.fp8_quantize_weight(operands, columnwise, power_of_two(recipe))
        return [t for t in made if t is not None]

    data, scale, *turned = casts.cast(parameters, (format, columnwise, own.transposed, "kernels"), records, make)
    return Fp8Weights(data, scale, *(turned or (None, None)))


def kept_of_weights(part: LinearPart, ctxs: Contexts, w: Fp8Weights) -> tuple[Tensor | None, Tensor | None]:
    """What backward keeps of a linear's weights: the transposed copy, or nothing (`made_anew`)."""
    return (None, None) if w.data_t is not None and made_anew(part, ctxs) else (w.data_t, w.scale_t)


def made_anew(part: LinearPart, ctxs: Contexts) -> bool:
    """Whether backward makes its copy of a linear's weights itself: of sharded ones, once they are gathered again; else
    all layers of a model would be in memory, in few bits, when backward begins. It then checks that they are the same.
    """
    own = ctxs[part.at]
    if not part.op.is_sharded or isinstance(own.held.weights[0], QuantizedTensor):
        return False
    own.unchanged = Unchanged(own.held.weights)
    return True


def turned_weights(
    part: LinearPart, ctxs: Contexts, recipe: Recipe, kernels: Any, data: Tensor | None, scale: Tensor | None
) -> Turned | None:
    """The transposed copy in backward, of which `kept_of_weights` kept this; None if the input wants no gradient."""
    if data is None and ctxs[part.at].input_requires_grad:
        data, scale = weights_of(part, ctxs, recipe, kernels, True, True)[2:]
    return turned(data, scale)


def copies_of(t: Tensor, groups: Groups, padded: Tensor, format: Format, kernels: Any, *usage: bool) -> Fp8Copies:
    """The copies of rows `t [..., K]`; those of a QuantizedTensor of the same groups and format as they are.

    usage: rowwise, columnwise, and whether column sums are wanted.
    """
    if isinstance(t, QuantizedTensor):
        rowwise, columnwise, sums = usage
        row, column = t.rowwise, t.columnwise
        fits = t.format == format and t.groups is not None and t.groups.are(groups) and not sums
        if fits and (row is not None or not rowwise) and (column is not None or not columnwise):
            both = (None, None)
            return Fp8Copies(*(row[:2] if row else both), *(column[:2] if column else both), None)  # type: ignore
        t = t.dequantize(DTYPE)
    if not any(usage):
        return Fp8Copies(None, None, None, None, None)
    rows = as_rows(t, DTYPE)
    return kernels.fp8_quantize(rows, groups.offsets, padded, *usage, format.scale == FP32_POWER_OF_2)


def as_quantized_tensor(copies: Fp8Copies, shape: Sequence[int], format: Format, groups: Groups) -> QuantizedTensor:
    """The copies that a kernel gave as one tensor."""

    def copy(data: Tensor | None, scale: Tensor | None) -> Quantized | None:
        return None if data is None or scale is None else Quantized(data, scale)

    rowwise, columnwise = copy(copies.data, copies.scale), copy(copies.data_t, copies.scale_t)
    return QuantizedTensor(shape, DTYPE, format, rowwise, columnwise, groups)


class Turned(NamedTuple):
    """The transposed copy of a matrix [P, K], as an operand of a weight gradient."""

    data: Tensor
    scale: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.data.shape[1], self.data.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        return DTYPE

    @property
    def device(self) -> torch.device:
        return self.data.device


@dataclass(frozen=True)
class TurnedProducts:
    """The weight gradients of `Turned` operands, under the names that `WeightGrad` calls. offsets: the padded ones."""

    kernels: Any

    def grouped_wgrad(self, dy: Turned, x: Turned, offsets: Tensor, glu_interleave: int = 0) -> Tensor:
        return self.kernels.fp8_grouped_wgrad(*dy, *x, offsets, glu_interleave)

    def grouped_wgrad_(
        self, out: Sequence[Tensor], dy: Turned, x: Turned, offsets: Tensor, glu_interleave: int, accumulate: bool
    ) -> None:
        self.kernels.fp8_grouped_wgrad_(out, *dy, *x, offsets, glu_interleave, accumulate)


def turned(data: Tensor | None, scale: Tensor | None) -> Turned | None:
    """An operand of a weight gradient; None if it was not kept."""
    return None if data is None or scale is None else Turned(data, scale)


def put_grads(
    part: LinearPart,
    ctxs: Contexts,
    grads: list[Any],
    kernels: Any,
    dy: Turned | None,
    x: Turned | None,
    padded: Tensor,
    db: Tensor | None,
) -> None:
    """The parameters' gradients of one linear into its place. db: its bias gradient, if that is wanted."""
    part.put_grads(ctxs, grads, TurnedProducts(kernels), dy, x, padded, db=db)  # type: ignore[arg-type]


def graded(
    part: LinearPart,
    ctxs: Contexts,
    kernels: Any,
    grad: Tensor,
    groups: Groups,
    padded: Tensor,
    format: Format,
    factors: Tensor | None,
    passes: bool,
    x: Turned | None,
) -> tuple[Fp8Copies, Tensor | None]:
    """(the copies of a linear's dy that its products need, its bias gradient FP32 [G, N] if that is wanted).

    factors: what the bias is multiplied by in each row. passes: whether the input wants a gradient. x: the input, if
    the weight wants one.
    """
    wants = part.wants_dbias(ctxs)
    in_one_pass = wants and factors is None and x is not None and not isinstance(grad, QuantizedTensor)
    dy = copies_of(grad, groups, padded, format, kernels, passes, x is not None, in_one_pass)
    if wants and not in_one_pass:
        return dy, kernels.grouped_dbias(plain_rows(grad), groups.offsets, factors)
    return dy, dy.sums


def plain_rows(t: Tensor) -> Tensor:
    """t as [T, C] in the compute dtype."""
    return as_rows(t.dequantize(DTYPE) if isinstance(t, QuantizedTensor) else t, DTYPE).contiguous()


def padded_groups(kernels: Any, splits: Tensor | None, like: Tensor, recipe: Recipe) -> tuple[Groups, Tensor]:
    """(the groups of the rows of `like`, their offsets once each is padded as copies of this recipe's input are)."""
    count = like.shape[:-1].numel()
    sizes = torch.full((1,), count, dtype=torch.int32, device=like.device) if splits is None else splits
    offsets, padded = kernels.padded_group_offsets(sizes, count, group_multiple(recipe.operand_format("input")))
    return Groups(offsets, splits, version_of(splits)), padded
