"""Quantizer: how one operand of one op is quantised under a recipe."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cute_kernels.quantization.formats import Format
from cute_kernels.quantization.groups import group_amax
from cute_kernels.quantization.quantize import tensor_amax
from fusible_ops.delayed_scaling import DelayedScales, update_all
from fusible_ops.groups import Groups
from fusible_ops.quantized_tensor import QuantizedTensor, quantized


@dataclass(frozen=True)
class Quantizer:
    """format: what operands become. scales: under delayed scaling, the op's; first, step: which of them are this
    operand's, one for each group or one for all. state: of the random bits of a format that rounds stochastically
    (`random_bits.random_state`): the same bits whenever this quantiser is used.
    """

    format: Format
    scales: DelayedScales | None = None
    first: int = 0
    step: int = 1
    state: Tensor | None = None

    def rows(
        self,
        x: Tensor,
        groups: Groups,
        rowwise: bool = True,
        columnwise: bool = True,
        dtype: torch.dtype | None = None,
    ) -> QuantizedTensor:
        """`x [..., K]`, its rows in groups. dtype: the nominal one, x's by default."""
        factor = None
        if self.scales is not None:
            flat = x.detach().reshape(-1, x.shape[-1])
            factor = self._noted(group_amax(flat.abs().amax(1).float(), groups.offsets))
        return quantized(
            x, self.format, rowwise, columnwise, groups=groups, factor=factor, state=self.state, dtype=dtype
        )

    def matrices(self, x: Tensor, rowwise: bool = True, columnwise: bool = True) -> QuantizedTensor:
        """`x [..., M, K]`, each matrix for itself."""
        factor = None
        if self.scales is not None:
            amax = tensor_amax(x)
            factor = self._noted(amax.reshape(-1)).view(amax.shape)
        return quantized(x, self.format, rowwise, columnwise, factor=factor)

    def update(self) -> None:
        """Under delayed scaling, the scales of the next step."""
        if self.scales is not None:
            update_all([self.scales])

    def _noted(self, amax: Tensor) -> Tensor:
        """The scales to quantise with, FP32, one for each in amax; notes the largest magnitudes for the next update."""
        assert self.scales is not None
        tensors = slice(self.first, None, self.step)
        scale = self.scales.scale[tensors]
        if scale.shape[0] == 1 < amax.shape[0]:
            self.scales.note(amax.amax(0, keepdim=True), tensors)
            return scale.expand(amax.shape)
        self.scales.note(amax, tensors)
        return scale.clone()


def operand(
    t: Tensor, quantizer: Quantizer, groups: Groups, dtype: torch.dtype, rowwise: bool = True, columnwise: bool = True
) -> QuantizedTensor:
    """The rows `t [..., K]` as an operand `[T, K]` of a product with these copies; dtype: the compute dtype.

    A tensor that is quantised already so, for the same groups, is taken as it is; of others the values are quantised
    anew: a rotated copy, say, would be multiplied by one that is not.
    What a neighbour left unrounded (`unrounded`) is quantised from that, all else from its values in `dtype`.
    """
    if isinstance(t, QuantizedTensor):
        if t.format == quantizer.format and t.groups is not None and t.groups.are(groups):
            return t.as_rows().with_usage(rowwise, columnwise)
        t = t.dequantize(torch.float32)
    elif not is_unrounded(t):
        t = t.to(dtype)
    return quantizer.rows(t.reshape(-1, t.shape[-1]), groups, rowwise, columnwise, dtype)


# ----------------------------------------------------------------------------------------------------------------------
# Results that the next op quantises are not rounded to the compute dtype before, but for two-level formats: those need
# the largest magnitude of a whole tensor first, so the tensor is stored, as Transformer Engine stores it.


def may_stay_unrounded(neighbour: Format | None) -> bool:
    """Whether a result may be left in FP32 for a neighbour that quantises it so; None: it does not quantise."""
    return neighbour is not None and not neighbour.two_level


def unrounded(t: Tensor, dtype: torch.dtype) -> Tensor:
    """FP32 `t`, marked as a result whose nominal dtype is `dtype`: for a neighbour that quantises it, once."""
    t.nominal_dtype = dtype  # type: ignore[attr-defined]
    return t


def is_unrounded(t: Tensor) -> bool:
    """Whether `unrounded` made it."""
    return hasattr(t, "nominal_dtype")


def nominal_dtype(t: Tensor) -> torch.dtype:
    """The dtype that a result stands for."""
    return getattr(t, "nominal_dtype", t.dtype)
