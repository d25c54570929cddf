"""What backward keeps of quantised operands: plain tensors, and what they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cute_kernels.quantization.formats import Format
from fusible_ops.quantized_tensor import QuantizedTensor


def kept(q: QuantizedTensor) -> tuple[list[Tensor], Form]:
    """The plain tensors that it holds, to be saved for backward, and what `restored` needs beside them."""
    parts = q._parts()
    return list(parts.values()), Form(tuple(parts), q.shape, q.dtype, q.format)


def restored(parts: Sequence[Tensor], form: Form) -> QuantizedTensor:
    """The inverse of `kept`."""
    facts = {"dtype": form.dtype, "format": form.format, "quantizer": None}
    named = dict(zip(form.names, parts, strict=True))
    return QuantizedTensor.__tensor_unflatten__(named, facts, form.shape, None)


class Form(NamedTuple):
    """A QuantizedTensor without its tensors."""

    names: tuple[str, ...]
    shape: torch.Size
    dtype: torch.dtype
    format: Format
