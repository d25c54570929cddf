"""Quantizer: how one operand of one op is quantised under a recipe."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cute_kernels.quantization.formats import Format
from cute_kernels.quantization.groups import group_amax
from cute_kernels.quantization.quantize import tensor_amax
from fusible_ops.delayed_scaling import DelayedScales
from fusible_ops.quantized_tensor import QuantizedTensor, quantized


@dataclass(frozen=True)
class Quantizer:
    """format: what operands become. scales: under delayed scaling, the op's; first, step: which of them are this
    operand's, one for each group or one for all.
    """

    format: Format
    scales: DelayedScales | None = None
    first: int = 0
    step: int = 1

    def rows(
        self,
        x: Tensor,
        offsets: Tensor,
        rowwise: bool = True,
        columnwise: bool = True,
        dtype: torch.dtype | None = None,
    ) -> QuantizedTensor:
        """`x [..., K]`, its rows in the groups at `offsets`. dtype: the nominal one, x's by default."""
        factor = None
        if self.scales is not None:
            flat = x.detach().reshape(-1, x.shape[-1])
            factor = self._noted(group_amax(flat.abs().amax(1).float(), offsets))
        return quantized(x, self.format, rowwise, columnwise, offsets=offsets, factor=factor, dtype=dtype)

    def matrices(self, x: Tensor, rowwise: bool = True, columnwise: bool = True) -> QuantizedTensor:
        """`x [..., M, K]`, each matrix for itself."""
        factor = None
        if self.scales is not None:
            amax = tensor_amax(x)
            factor = self._noted(amax.reshape(-1)).view(amax.shape)
        return quantized(x, self.format, rowwise, columnwise, factor=factor)

    def _noted(self, amax: Tensor) -> Tensor:
        """The scales to quantise with, FP32 [tensors]; notes the largest magnitudes for the next update."""
        assert self.scales is not None
        tensors = slice(self.first, None, self.step)
        scale = self.scales.scale[tensors]
        if scale.shape[0] == 1 < amax.shape[0]:
            self.scales.note(amax.amax(0, keepdim=True), tensors)
            return scale.expand(amax.shape)
        self.scales.note(amax, tensors)
        return scale.clone()
