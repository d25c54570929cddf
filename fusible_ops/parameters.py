"""The parameters of linears: one buffer behind many, operands for kernels, and where weight gradients go.

`GroupedLinear` keeps `weight{i}` and `bias{i}` as views of one buffer, so that a kernel reads them all as one `[G, N,
K]` tensor and nothing is stacked or copied per forward. If somebody replaced a parameter's storage, the kernels get a
list instead.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from cute_kernels.catalog import SEPARATE_SPAN_BYTES
from cute_kernels.facts import NO_PLANS, VECTOR_BYTES, WITHOUT_MEMORY, Plans, facts
from cute_kernels.reference import deinterleave, interleave
from fusible_ops import casts
from fusible_ops.quantized_tensor import QuantizedTensor, format_of


def parameters_of(op: nn.Module) -> list[Parameter]:
    """`op.parameters()` as a list; walks over submodules only where there are some."""
    if op._modules:
        return list(op.parameters())
    return [p for p in op._parameters.values() if p is not None]


@dataclass(frozen=True)
class Packing:
    """How gate and up rows lie in memory, and how in a state_dict: interleave sizes, 0 for plain halves."""

    stored: int
    packed: int

    def into_memory(self, t: Tensor, dim: int) -> Tensor:
        """A tensor of a state_dict as it lies in memory. dim: along which the rows are."""
        return interleave(deinterleave(t, self.stored, dim), self.packed, dim)

    def out_of_memory(self, t: Tensor, dim: int) -> Tensor:
        """The other way round."""
        return interleave(deinterleave(t, self.packed, dim), self.stored, dim)


_KIND = attrgetter("dtype", "shape")
_VERSION = attrgetter("_version")


def are_packed(tensors: Sequence[Tensor]) -> bool:
    """Whether the tensors are contiguous, of one shape and dtype, and lie one after another in one storage.

    Called for all parameters at every forward, since `p.data` may be replaced at any time: no loop in Python.
    """
    first, count = tensors[0], len(tensors)
    if isinstance(first, WITHOUT_MEMORY):
        return False
    start, step = first.data_ptr(), first.numel() * first.element_size()
    if step == 0 or list(map(Tensor.data_ptr, tensors)) != list(range(start, start + count * step, step)):
        return False
    if not all(map(Tensor.is_contiguous, tensors)) or list(map(_KIND, tensors)).count(_KIND(first)) != count:
        return False
    return first.untyped_storage().data_ptr() == tensors[-1].untyped_storage().data_ptr()


class Held:
    """The parameters of one op as a call finds them, and as kernels take them.

    parameters: all, in the order in which backward returns gradients. weights, biases: those of a linear.
    transposed: weights are stored [K, N]. weights_packed, biases_packed: whether they are one tensor or lie as one;
    found out when first asked, unless `knows` has told it.
    """

    __slots__ = ("_biases_packed", "_weights_packed", "biases", "parameters", "transposed", "weights")

    def __init__(
        self,
        parameters: Sequence[Parameter],
        weights: Sequence[Parameter] = (),
        biases: Sequence[Parameter] = (),
        transposed: bool = False,
    ) -> None:
        self.parameters, self.weights, self.biases, self.transposed = parameters, weights, biases, transposed
        self._weights_packed: bool | None = None
        self._biases_packed: bool | None = None

    @property
    def weights_packed(self) -> bool:
        if self._weights_packed is None:
            self._weights_packed = len(self.weights) < 2 or are_packed(self.weights)
        return self._weights_packed

    @property
    def biases_packed(self) -> bool:
        if self._biases_packed is None:
            self._biases_packed = len(self.biases) < 2 or are_packed(self.biases)
        return self._biases_packed

    @property
    def is_packed(self) -> bool:
        """Whether the weights, and the biases, are one tensor or lie as one."""
        return self.weights_packed and self.biases_packed

    def knows(self, packed: tuple[bool, bool]) -> None:
        """Whether weights and biases are packed."""
        self._weights_packed, self._biases_packed = packed

    def holds(self, t: Tensor) -> bool:
        """Whether t is, or views, one of the parameters."""
        place = t.untyped_storage()._cdata
        return any(p.untyped_storage()._cdata == place for p in self.parameters)

    def kind(self) -> tuple[object, ...]:
        """All that a call depends on beside values and addresses: facts and formats, of those that are packed the
        first's.
        """
        packed = self.weights and self.weights_packed and self.biases_packed
        each = (self.weights[0], *self.biases[:1]) if packed else self.parameters
        return tuple((facts(p), p.requires_grad, format_of(p)) for p in each)

    def operands(self, dtype: torch.dtype, records: bool) -> list[Tensor]:
        """The weights, [N, K]: `[one stacked tensor]`, or the separate tensors if they are not packed.

        A dtype that differs from the weights' (autocast) costs one stacked cast, kept as `casts` says; tensors too far
        apart for the kernels are stacked; quantised ones are dequantised. records: whether gradients are recorded.
        """
        stored = self._stored_weights(dtype, records)
        return [w.mT for w in stored] if self.transposed else stored

    def _stored_weights(self, dtype: torch.dtype, records: bool) -> list[Tensor]:
        weights = self.weights
        if isinstance(weights[0], QuantizedTensor):
            values = [p.dequantize(dtype) for p in weights if isinstance(p, QuantizedTensor)]
            return values if values[0].dim() == 3 else [torch.stack(values)]
        if weights[0].dtype is not dtype:
            return casts.cast(weights, (dtype, 3), records, lambda: [_cast(weights, self.weights_packed, 3, dtype)])
        casts.forget(weights)
        if self.weights_packed:
            return [_readable(joined(weights, 3))]
        separate = [_readable(p.detach()) for p in weights]
        if isinstance(separate[0], WITHOUT_MEMORY):
            return separate
        places = [t.data_ptr() for t in separate]
        if max(places) - min(places) > SEPARATE_SPAN_BYTES:
            return [torch.stack(separate)]
        return separate

    def bias(self, dtype: torch.dtype, records: bool) -> Tensor | None:
        """The biases as one `[G, N]` tensor, None if there are none; stacks them only if they are not packed."""
        biases = self.biases
        if not biases:
            return None
        if biases[0].dtype is not dtype:
            return casts.cast(biases, (dtype, 2), records, lambda: [_cast(biases, self.biases_packed, 2, dtype)])[0]
        casts.forget(biases)
        if self.biases_packed:
            return joined(biases, 2)
        return torch.stack([p.detach() for p in biases])


NOTHING_HELD = Held(())


def pack_(parameters: Sequence[Parameter]) -> None:
    """Move the parameters' values into one new buffer, each a view of it, unless they lie so already.

    Parameters of other classes (DTensors, of which each rank holds a shard) stay where they are.
    """
    first = parameters[0]
    if any(type(p) is not Parameter or p.device != first.device or p.dtype != first.dtype for p in parameters):
        return
    if are_packed(parameters):
        return
    buffer = torch.empty(len(parameters), *first.shape, dtype=first.dtype, device=first.device)
    with torch.no_grad():
        for p, place in zip(parameters, buffer, strict=True):
            place.copy_(p)
            p.data = place


def joined(tensors: Sequence[Tensor], dims: int) -> Tensor:
    """One tensor, or those that are packed, as one of `dims` dimensions without a copy."""
    first = tensors[0].detach()
    if len(tensors) == 1:
        return first if first.dim() == dims else first.unsqueeze(0)
    return first.as_strided((len(tensors), *first.shape), (first.numel(), *first.stride()))


def as_one(tensors: Sequence[Tensor], dims: int) -> Tensor:
    """`joined`, or where the tensors lie apart a stacked copy."""
    if len(tensors) == 1 or are_packed(tensors):
        return joined(tensors, dims)
    return torch.stack([t.detach() for t in tensors])


def _cast(parameters: Sequence[Tensor], packed: bool, dims: int, dtype: torch.dtype) -> Tensor:
    """All parameters in `dtype` in one new tensor of `dims` dimensions."""
    if packed or len(parameters) == 1:
        whole = joined(parameters, dims)
        return torch.empty(whole.shape, dtype=dtype, device=whole.device).copy_(whole)
    made = torch.empty(len(parameters), *parameters[0].shape, dtype=dtype, device=parameters[0].device)
    torch._foreach_copy_(list(made.unbind(0)), [p.detach() for p in parameters])
    return made


def _readable(t: Tensor) -> Tensor:
    """t contiguous and from a multiple of 16 bytes on, as kernels read it; t itself if it is so."""
    t = t.contiguous()
    return t if isinstance(t, WITHOUT_MEMORY) or t.data_ptr() % VECTOR_BYTES == 0 else t.clone()


class Unchanged:
    """Parameters as they are now; `check` raises if one was changed in place since.

    Autograd sees such a change only where it kept the tensor itself; of a stacked view it sees the first one's.
    """

    __slots__ = ("_parameters", "_versions")

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters, self._versions = parameters, _versions(parameters)

    def check(self, owner: str) -> None:
        """RuntimeError if a parameter is at another version."""
        versions = _versions(self._parameters)
        if versions == self._versions:
            return
        for i, (now, version) in enumerate(zip(versions, self._versions, strict=True)):
            if now != version:
                raise RuntimeError(
                    f"{owner}: parameter {i} was changed in place between forward and backward (version {version}, now "
                    f"{now}); its gradient would be wrong"
                )


def _versions(parameters: Sequence[Tensor]) -> list[int]:
    """How often each was changed in place; 0 for what inference mode made, of which nothing is counted."""
    try:
        return list(map(_VERSION, parameters))
    except RuntimeError:
        return [0 if p.is_inference() else p._version for p in parameters]


# ----------------------------------------------------------------------------------------------------------------------
# Weight gradients


@dataclass
class WeightGrad:
    """One weight-gradient product, computed when `compute` or `write` is called.

    dw_g = dy_gᵀ x_g. kernels: from `entry_points`, `reference` or `quantized_products`. glu_interleave: how the
    weight's rows lie. For a weight stored [K, N], dy and x have changed places. plans: for products that are alike.
    """

    kernels: Any
    dy: Tensor
    x: Tensor
    offsets: Tensor
    glu_interleave: int = 0
    plans: Plans = NO_PLANS

    def compute(self, weights: Sequence[Parameter]) -> list[Tensor]:
        """A fresh gradient for each parameter; views of one buffer. In FP32 for FP32 parameters (autocast)."""
        if weights[0].dtype is torch.float32 is not self.x.dtype:
            shape = (self.offsets.shape[0] - 1, self.dy.shape[1], self.x.shape[1])
            dw = torch.empty(shape, dtype=torch.float32, device=self.x.device)
            self.write([dw], accumulate=False)
        else:
            more = {} if self.plans is NO_PLANS else {"plans": self.plans}
            dw = self.kernels.grouped_wgrad(self.dy, self.x, self.offsets, self.glu_interleave, **more)
        if len(weights) > 1:
            return list(dw.unbind(0))
        return [dw if weights[0].dim() == 3 else dw.view_as(weights[0])]

    def write(self, out: Sequence[Tensor], accumulate: bool) -> None:
        """Write into, or add to, the given buffers (one `[G, N, K]` or G `[N, K]`)."""
        self.kernels.grouped_wgrad_(out, self.dy, self.x, self.offsets, self.glu_interleave, accumulate)


def main_grads(weights: Sequence[Parameter], owner: str) -> list[Tensor]:
    """Each weight's `main_grad` buffer, viewed as the weight is shaped.

    RuntimeError if one has none, or one of another shape (flat will do), of no float dtype or on another device.
    """
    buffers = []
    for w in weights:
        if hasattr(w, "__fsdp_param__") and hasattr(w, "get_main_grad"):
            w.main_grad = w.get_main_grad()  # type: ignore[attr-defined]
        buffer = getattr(w, "main_grad", None)
        if buffer is None:
            raise RuntimeError(
                f"{owner}: accumulate_into_main_grad=True, but a weight does not have a valid main_grad attribute "
                "(MAIN GRAD NOT FOUND); set weight.main_grad to a buffer of the weight's shape before backward"
            )
        flat = buffer.dim() == 1 and buffer.numel() == w.numel()
        if not (flat or buffer.shape == w.shape) or buffer.device != w.device or not buffer.is_floating_point():
            raise RuntimeError(
                f"{owner}: main_grad is {buffer.dtype} {tuple(buffer.shape)} on {buffer.device}; its weight needs a "
                f"float tensor {tuple(w.shape)}, or a flat one of as many elements, on {w.device}"
            )
        buffers.append(buffer.view(w.shape))
    return buffers


def accumulate_main_grads(weights: Sequence[Parameter], grad: WeightGrad, owner: str) -> list[Tensor | None]:
    """Add the product to the weights' `main_grad` (overwrite if `overwrite_main_grad`); what to return to autograd.

    Where a weight has the attribute `grad_added_to_main_grad`, it is set to True and autograd gets a dummy tensor
    (zero if `zero_out_wgrad`, else uninitialised), so that hooks still fire; without the attribute autograd gets None.
    """
    buffers = main_grads(weights, owner)
    accumulate = not getattr(weights[0], "overwrite_main_grad", False)
    if all(_writable(buffer) and buffer.dtype == buffers[0].dtype for buffer in buffers):
        together = len(buffers) == 1 or are_packed(buffers)
        grad.write([joined(buffers, 3)] if together else buffers, accumulate)
    else:
        for buffer, dw in zip(buffers, grad.compute(weights), strict=True):
            buffer.copy_(buffer + dw if accumulate else dw)
    return signal_added(weights)


def _writable(buffer: Tensor) -> bool:
    """Whether a kernel can write there: contiguous, from a multiple of 16 bytes on, of at most 4 bytes an element."""
    return buffer.is_contiguous() and buffer.data_ptr() % VECTOR_BYTES == 0 and buffer.element_size() <= 4


def signal_added(weights: Sequence[Parameter]) -> list[Tensor | None]:
    """What autograd gets for weights whose gradient goes into `main_grad`: see `accumulate_main_grads`.

    The dummies of one shape share their memory, which nobody reads.
    """
    dummies: list[Tensor | None] = []
    for w in weights:
        if not hasattr(w, "grad_added_to_main_grad"):
            dummies.append(None)
            continue
        w.grad_added_to_main_grad = True
        dummy = _dummy(w.shape, w.dtype, w.device)
        dummies.append(dummy.zero_().detach() if getattr(w, "zero_out_wgrad", False) else dummy.detach())
    return dummies


@functools.lru_cache(maxsize=64)
def _dummy(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)
