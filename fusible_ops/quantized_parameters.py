"""Weights as quantised products take them, and parameters that are held in a low-precision format."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import Parameter

from cute_kernels.quantization.quantize import Quantized
from fusible_ops import casts, checks
from fusible_ops.autocast_mode import ModelInit
from fusible_ops.op import BasicOperation
from fusible_ops.parameters import Held, are_packed
from fusible_ops.quantized_tensor import QuantizedTensor
from fusible_ops.quantizer import Quantizer


def as_quantized(
    held: Held, quantizer: Quantizer, columnwise: bool, records: bool, dtype: torch.dtype
) -> QuantizedTensor:
    """The weights as one quantised `[G, N, K]`: row-wise, and column-wise if asked for.

    Plain parameters are quantised from their values in `dtype`, once per update (see `casts`), under delayed scaling
    at every forward; quantised ones are taken as they are. records: whether gradients are recorded.
    """
    parameters = held.weights
    if isinstance(parameters[0], QuantizedTensor):
        return stacked(parameters).with_usage(True, columnwise)

    def make() -> list[Tensor]:
        plain = _plain(parameters).to(dtype)
        return [quantizer.matrices(plain.mT if held.transposed else plain, True, columnwise)]

    form = (quantizer.format, columnwise, dtype, held.transposed)
    (made,) = make() if quantizer.scales is not None else casts.cast(parameters, form, records, make)
    assert isinstance(made, QuantizedTensor)
    return made


def _plain(parameters: Sequence[Tensor]) -> Tensor:
    """Plain parameters as one tensor `[G, N, K]`; copies only if they lie apart."""
    first = parameters[0].detach()
    if len(parameters) == 1:
        return first if first.dim() == 3 else first.unsqueeze(0)
    if are_packed(parameters):
        return first.as_strided((len(parameters), *first.shape), (first.numel(), *first.stride()))
    return torch.stack([p.detach() for p in parameters])


def stacked(parameters: Sequence[Tensor]) -> QuantizedTensor:
    """Quantised matrices `[N, K]` as one `[G, N, K]`; the bytes are copied only if they lie apart."""
    held: list[QuantizedTensor] = list(parameters)  # type: ignore[arg-type]
    first = held[0]
    if len(held) == 1 and first.dim() == 3:
        return first

    def together(pick: Callable[[QuantizedTensor], Quantized | None]) -> Quantized | None:
        copies = [pick(q) for q in held]
        if copies[0] is None:
            return None
        parts = [_together([copy[i] for copy in copies if copy is not None]) for i in range(len(Quantized._fields))]
        return Quantized(*parts)  # type: ignore[arg-type]

    copies = together(lambda q: q.rowwise), together(lambda q: q.columnwise)
    return QuantizedTensor((len(held), *first.shape), first.dtype, first.format, *copies)


def _together(parts: Sequence[Tensor | None]) -> Tensor | None:
    first = parts[0]
    if first is None:
        return None
    if len(parts) == 1:
        return first.unsqueeze(0)
    tensors: list[Tensor] = list(parts)  # type: ignore[arg-type]
    if are_packed(tensors):
        return first.as_strided((len(tensors), *first.shape), (first.numel(), *first.stride()))
    if first.element_size() > 1:
        return torch.stack(tensors)
    return torch.stack([t.view(torch.uint8) for t in tensors]).view(first.dtype)


def pack_quantized_(parameters: Sequence[Tensor]) -> None:
    """Move the bytes of quantised matrices into common buffers, so that `stacked` copies nothing."""
    if parameters[0].dim() == 3:
        return
    whole = stacked(parameters)
    for i, p in enumerate(parameters):
        assert isinstance(p, QuantizedTensor)
        p.rowwise, p.columnwise = _matrix(whole.rowwise, i), _matrix(whole.columnwise, i)


def _matrix(copy: Quantized | None, index: int) -> Quantized | None:
    """One matrix of stacked ones, as views."""
    if copy is None:
        return None
    return Quantized(copy.data[index], copy.scale[index], None if copy.amax is None else copy.amax[index])


# ----------------------------------------------------------------------------------------------------------------------
# quantized_model_init


@contextlib.contextmanager
def new_values(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors `[..., N, K]` to write new values of the weights into: themselves, or of quantised ones plain tensors of
    their own, which they take over at the end.
    """
    if not isinstance(parameters[0], QuantizedTensor):
        yield list(parameters)
        return
    first = parameters[0]
    plain = [torch.empty(p.shape, dtype=first.dtype, device=first.device) for p in parameters]
    yield plain
    for p, values in zip(parameters, plain, strict=True):
        p.copy_(values)


def hold_quantized(op: BasicOperation, keys: Sequence[str], made: ModelInit | None) -> None:
    """Replace an op's weights (its parameters `keys`) by quantised ones, if `made` asks for it and they are plain.

    With the column-wise copy if gradients are being recorded.
    """
    plain: list[Parameter] = [op._parameters[key] for key in keys]  # type: ignore[misc]
    if made is None or isinstance(plain[0], QuantizedTensor):
        return
    checks.quantizable(op.label(), plain[0].dtype)
    quantizer = op.quantizer(made.recipe, "weight", plain[0].device)
    whole = quantizer.matrices(_plain(plain), True, torch.is_grad_enabled())
    for i, (key, p) in enumerate(zip(keys, plain, strict=True)):
        copies = whole.rowwise, whole.columnwise
        if p.dim() == 2:
            copies = _matrix(whole.rowwise, i), _matrix(whole.columnwise, i)
        held = QuantizedTensor(p.shape, p.dtype, whole.format, *copies, quantizer=_own(quantizer, i, len(keys)))
        parameter = Parameter(held, p.requires_grad)
        if made.preserve_high_precision_init_val:
            parameter.high_precision_init_val = p.detach().cpu().clone()  # type: ignore[attr-defined]
        op._parameters[key] = parameter


def _own(quantizer: Quantizer, index: int, count: int) -> Quantizer | None:
    """What quantises one of `count` weights anew when it is changed in place; None if its format says all."""
    if quantizer.scales is None:
        return None
    return replace(quantizer, first=quantizer.first + index * quantizer.step, step=quantizer.step * count)
