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
from fusible_ops.parameters import Held, Unchanged, as_one
from fusible_ops.quantized_tensor import QuantizedTensor
from fusible_ops.quantizer import Quantizer
from fusible_ops.recipe import DelayedScaling


def as_quantized(
    held: Held, quantizer: Quantizer, columnwise: bool, records: bool, dtype: torch.dtype, owner: str
) -> QuantizedTensor:
    """The weights as one quantised `[G, N, K]`: row-wise, and column-wise if asked for.

    Plain parameters are quantised from their values in `dtype`, once per update (see `casts`), under delayed scaling
    at every forward; quantised ones are taken as they are. records: whether gradients are recorded. owner: how an
    error calls the op. Raises as `check_alike` does: formats are no facts of tensors, so it may not have been asked.
    """
    parameters = held.weights
    if isinstance(parameters[0], QuantizedTensor):
        return as_held(held, columnwise, owner)

    def make() -> list[Tensor]:
        plain = as_one(parameters, 3).to(dtype)
        return [quantizer.matrices(plain.mT if held.transposed else plain, True, columnwise)]

    form = (quantizer.format, columnwise, dtype, held.transposed)
    (made,) = make() if quantizer.scales is not None else casts.cast(parameters, form, records, make)
    assert isinstance(made, QuantizedTensor)
    return made


def as_held(held: Held, columnwise: bool, owner: str) -> QuantizedTensor:
    """Weights that are held quantised as one `[G, N, K]`, as `as_quantized` gives them."""
    parameters = held.weights
    if not _alike(parameters):
        check_alike(parameters, held.transposed, owner)
        parameters = [q.with_usage(True, columnwise) for q in parameters]  # type: ignore[attr-defined]
    return stacked(parameters).with_usage(True, columnwise)


def _alike(parameters: Sequence[Tensor]) -> bool:
    """Whether all are quantised, in one format and with the same copies."""
    if not all(isinstance(p, QuantizedTensor) for p in parameters):
        return False
    held = [(q.format, q.rowwise is None, q.columnwise is None) for q in parameters]  # type: ignore[attr-defined]
    return held.count(held[0]) == len(held)


def check_alike(parameters: Sequence[Tensor], transposed: bool, owner: str) -> None:
    """RuntimeError unless a linear's weights are all plain, or all quantised in one format and not transposed."""
    held = [p.format if isinstance(p, QuantizedTensor) else None for p in parameters]
    first = held[0]
    for i, format in enumerate(held):
        if format != first:
            a, b = (str(f) if f else "in high precision" for f in (format, first))
            raise RuntimeError(
                f"{owner}: weight {i} is {a}, weight 0 is {b}; all weights of an op must be held in one format"
            )
    if transposed and first is not None:
        raise RuntimeError(f"{owner}: transposed_weight=True needs weights in high precision; weight 0 is {first}")


def stacked(parameters: Sequence[Tensor]) -> QuantizedTensor:
    """Quantised matrices `[N, K]`, held alike, as one `[G, N, K]`; the bytes are copied only if they lie apart."""
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
    tensors: list[Tensor] = list(parts)  # type: ignore[arg-type]
    if first.element_size() == 1:  # FP8 cannot be stacked
        return as_one([t.view(torch.uint8) for t in tensors], first.dim() + 1).view(first.dtype)
    return as_one(tensors, first.dim() + 1)


def pack_quantized_(parameters: Sequence[Tensor]) -> None:
    """Move the bytes of quantised matrices into common buffers, so that `stacked` copies nothing, if they are alike."""
    if parameters[0].dim() == 3 or not _alike(parameters):
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


def read_by_backward(held: Held) -> Unchanged | None:
    """What backward checks of weights whose own copies it reads; None for plain ones, of which it has copies."""
    return Unchanged(held.weights) if isinstance(held.weights[0], QuantizedTensor) else None


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
    whole = quantizer.matrices(as_one(plain, 3), True, torch.is_grad_enabled())
    for i, (key, p) in enumerate(zip(keys, plain, strict=True)):
        copies = whole.rowwise, whole.columnwise
        if p.dim() == 2:
            copies = _matrix(whole.rowwise, i), _matrix(whole.columnwise, i)
        held = QuantizedTensor(p.shape, p.dtype, whole.format, *copies)
        parameter = Parameter(held, p.requires_grad)
        if made.preserve_high_precision_init_val:
            parameter.high_precision_init_val = p.detach().cpu().clone()  # type: ignore[attr-defined]
        op._parameters[key] = parameter
    tie_quantizers(op, keys, made)


def tie_quantizers(op: BasicOperation, keys: Sequence[str], made: ModelInit | None) -> None:
    """Have an op's weights that `hold_quantized` made quantise themselves with the op's own delayed scales.

    To be called wherever weights or scales came from elsewhere: a copy, a pickle, `load_state_dict(assign=True)`.
    """
    if made is None or not (isinstance(made.recipe, DelayedScaling) and "forward" in op._scales):
        return
    quantizer = op.forward_quantizer(made.recipe.operand_format("weight"), "weight", op._scales["forward"])
    for i, key in enumerate(keys):
        p = op._parameters.get(key)
        if isinstance(p, QuantizedTensor):
            p.quantizer = replace(
                quantizer, first=quantizer.first + i * quantizer.step, step=quantizer.step * len(keys)
            )
