"""QuantizedTensor: a tensor held in a low-precision format; any operation that knows no better sees its values.

    q = quantized(w, fp8_block(dims=2))             # both copies
    q.dequantize(), q + 1, F.linear(x, q)           # plain tensors
    q.copy_(w), q.mul_(2)                           # quantised anew, in place, once for each such operation
    q.to("cuda"), q.half()                          # the same bytes; the dtype is only that of its values

It is a `torch.Tensor`, so it can be a parameter, a result, a gradient, an entry of a state_dict, on any device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._pytree import tree_map

from cute_kernels.limits import dtype_name
from cute_kernels.quantization import formats, stored
from cute_kernels.quantization.formats import Format
from cute_kernels.quantization.quantize import Quantized
from cute_kernels.quantization.random_bits import random_state
from fusible_ops.groups import Groups

if TYPE_CHECKING:
    from fusible_ops.quantizer import Quantizer

_aten = torch.ops.aten


class QuantizedTensor(Tensor):
    """x̂ = data · scale. Its dtype is nominal: that of the values that `dequantize` gives.

    Matrices `[..., M, K]`, each for itself (`groups` is None), or rows `[..., K]` that belong to `groups`, no block or
    scale of which spans two of them; rows of no group are zero.

    rowwise, columnwise: the copy for products that sum over K, and that for those that sum over the rows (M); each may
    be None, but not both. A copy is as `cute_kernels.quantization.stored` has it.
    quantizer: what quantises it anew when it is changed in place; None: its format alone.
    """

    format: Format
    rowwise: Quantized | None
    columnwise: Quantized | None
    groups: Groups | None
    quantizer: Quantizer | None

    @staticmethod
    def __new__(
        cls,
        shape: Sequence[int],
        dtype: torch.dtype,
        format: Format,
        rowwise: Quantized | None,
        columnwise: Quantized | None,
        groups: Groups | None = None,
        *,
        quantizer: Quantizer | None = None,
        requires_grad: bool = False,
    ) -> QuantizedTensor:
        held = rowwise or columnwise
        if held is None:
            raise ValueError("a QuantizedTensor needs a row-wise or a column-wise copy")
        device = held.data.device
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device, requires_grad=requires_grad)
        made.format, made.rowwise, made.columnwise, made.groups = format, rowwise, columnwise, groups
        made.quantizer = quantizer
        return made

    @property
    def offsets(self) -> Tensor | None:
        """int32 [G+1]: where the groups' rows are; None for matrices."""
        return None if self.groups is None else self.groups.offsets

    # -- values ----------------------------------------------------------------------------------------------------

    def values(self, columnwise: bool = False, dtype: torch.dtype = torch.float32) -> Tensor:
        """What a product multiplies, formed in FP32 and rounded once to `dtype`: `[..., M, K]`; of groups `[rows, K]`
        with the groups at `value_offsets`, zero elsewhere.

        Raises ValueError if there is no copy of that direction.
        """
        copy = self.columnwise if columnwise else self.rowwise
        if copy is None:
            raise ValueError(f"{self.title} has no {'column' if columnwise else 'row'}-wise copy")
        return stored.stored_values(copy, self.format, self.shape[-1], columnwise, self.offsets, dtype)

    def value_offsets(self, columnwise: bool = False) -> Tensor | None:
        """int32 [G+1]: where the groups lie in `values`; None for matrices."""
        return None if self.offsets is None else stored.value_offsets(self.offsets, self.format, columnwise)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values as a plain tensor, of this tensor's dtype unless another is asked for. Gradients pass through.

        They are those of the row-wise copy if there is one, else of the column-wise one.
        """
        return _Dequantize.apply(self, dtype or self.dtype)

    def _plain(self, dtype: torch.dtype | None = None) -> Tensor:
        columnwise = self.rowwise is None
        dtype = dtype or self.dtype
        values = self.values(columnwise, torch.float32 if self.format.hadamard else dtype)
        values = stored.unrotated(values, self.format, columnwise).to(dtype)
        if self.offsets is not None:
            values = stored.rows_of_values(values, self.format, columnwise, self.offsets, self.shape[:-1].numel())
        return values.reshape(self.shape)

    def quantize_(self, source: Tensor) -> QuantizedTensor:
        """Take the values of `source` (of the same shape), quantised anew into the copies that there are.

        From another QuantizedTensor of the same format the bytes are copied.
        """
        if source.shape != self.shape:
            raise ValueError(f"{self.title}: the source must have that shape, got {tuple(source.shape)}")
        if isinstance(source, QuantizedTensor) and not self._can_copy(source):
            source = source.dequantize()
        fresh = source if isinstance(source, QuantizedTensor) else self._like(source)
        for mine, theirs in ((self.rowwise, fresh.rowwise), (self.columnwise, fresh.columnwise)):
            if mine is not None and theirs is not None:
                for target, value in zip(mine, theirs, strict=True):
                    if target is not None and value is not None:
                        target.copy_(value)
        return self

    def _can_copy(self, source: QuantizedTensor) -> bool:
        """Whether the bytes of `source` may be taken as they are."""
        has_all = (self.rowwise is None or source.rowwise is not None) and (
            self.columnwise is None or source.columnwise is not None
        )
        return has_all and source.format == self.format and self.groups is None and source.groups is None

    def _like(self, source: Tensor) -> QuantizedTensor:
        """`source` quantised as this tensor is."""
        usage = self.rowwise is not None, self.columnwise is not None
        source = source.detach().to(self.device)
        if self.quantizer is not None and self.groups is None:
            return self.quantizer.matrices(source, *usage)
        return quantized(source, self.format, *usage, groups=self.groups)

    # -- as a tensor -----------------------------------------------------------------------------------------------

    def _map(self, fn: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None) -> QuantizedTensor:
        """The same with `fn` applied to every tensor it holds; dtype: another nominal one."""

        def mapped(copy: Quantized | None) -> Quantized | None:
            if copy is None:
                return None
            return Quantized(fn(copy.data), fn(copy.scale), None if copy.amax is None else fn(copy.amax))

        groups = None if self.groups is None else self.groups._replace(offsets=fn(self.groups.offsets))
        copies = mapped(self.rowwise), mapped(self.columnwise)
        return QuantizedTensor(self.shape, dtype or self.dtype, self.format, *copies, groups, quantizer=self.quantizer)

    def as_rows(self) -> QuantizedTensor:
        """Rows of groups as `[T, K]`."""
        copies = self.rowwise, self.columnwise, self.groups
        return QuantizedTensor((self.shape[:-1].numel(), self.shape[-1]), self.dtype, self.format, *copies)

    def with_usage(self, rowwise: bool = True, columnwise: bool = True) -> QuantizedTensor:
        """The same values with these copies; one that is missing is quantised from the values of the other."""
        lacks = rowwise and self.rowwise is None, columnwise and self.columnwise is None
        row_copy, column_copy = self.rowwise if rowwise else None, self.columnwise if columnwise else None
        if any(lacks):
            made = quantized(self._plain(torch.float32), self.format, *lacks, groups=self.groups)
            row_copy, column_copy = row_copy or made.rowwise, column_copy or made.columnwise
        held = (self.format, row_copy, column_copy, self.groups)
        return QuantizedTensor(self.shape, self.dtype, *held, quantizer=self.quantizer)

    def get_high_precision_init_val(self) -> Tensor | None:
        """The first values of a parameter, on the CPU, if `quantized_model_init` was told to keep them."""
        return self.__dict__.get("high_precision_init_val")

    def clear_high_precision_init_val(self) -> None:
        """Drop them."""
        self.__dict__.pop("high_precision_init_val", None)

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, source: Tensor) -> None:
        if isinstance(source, QuantizedTensor) and source.shape == self.shape and source.device == self.device:
            self.format, self.groups = source.format, source.groups
            self.rowwise, self.columnwise = source.rowwise, source.columnwise
        else:
            self.quantize_(source)

    @property
    def title(self) -> str:
        """What it is, without the values."""
        return f"QuantizedTensor {self.format}, {dtype_name(self.dtype)} {tuple(self.shape)}"

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        copies = {"row-wise": self.rowwise, "column-wise": self.columnwise}
        described = " and ".join(name for name, copy in copies.items() if copy is not None)
        groups = "" if self.offsets is None else f", {self.offsets.shape[0] - 1} groups"
        with torch.no_grad():
            return f"{self.title}, {described}{groups}:\n{self._plain()}"

    def __reduce_ex__(self, protocol: Any) -> Any:
        copies = [None if copy is None else tuple(map(_as_bytes, copy)) for copy in (self.rowwise, self.columnwise)]
        is_parameter = isinstance(self, Parameter)
        held = (tuple(self.shape), self.dtype, self.format, *copies, self.offsets)
        return _rebuild, (*held, self.requires_grad, is_parameter)

    def _parts(self) -> dict[str, Tensor]:
        """Every tensor it holds, by the names of the fields below."""
        held = {"offsets": self.offsets}
        for direction, copy in (("rowwise", self.rowwise), ("columnwise", self.columnwise)):
            if copy is not None:
                held |= {f"{direction}_{field}": value for field, value in copy._asdict().items()}
        return {name: t for name, t in held.items() if t is not None}

    def __getattr__(self, name: str) -> Tensor | None:
        """`rowwise_data`, `rowwise_scale`, `rowwise_amax`, `columnwise_data`, …: a tensor of a copy, or None."""
        direction, _, field = name.partition("_")
        if direction not in ("rowwise", "columnwise") or field not in Quantized._fields:
            raise AttributeError(f"QuantizedTensor has no attribute {name!r}")
        copy = getattr(self, direction)
        return None if copy is None else getattr(copy, field)

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        return list(self._parts()), {"dtype": self.dtype, "format": self.format, "quantizer": self.quantizer}

    @staticmethod
    def __tensor_unflatten__(
        parts: dict[str, Tensor], facts: dict[str, Any], shape: Any, stride: Any
    ) -> QuantizedTensor:
        def copy(direction: str) -> Quantized | None:
            held = [parts.get(f"{direction}_{field}") for field in Quantized._fields]
            return None if held[0] is None else Quantized(*held)  # type: ignore[arg-type]

        copies = copy("rowwise"), copy("columnwise")
        offsets = parts.get("offsets")
        held = facts["format"], *copies, None if offsets is None else Groups(offsets)
        return QuantizedTensor(shape, facts["dtype"], *held, quantizer=facts["quantizer"])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _OWN:
            return _OWN[func](*args, **kwargs)
        return _on_values(func, args, kwargs)


def format_of(t: object) -> Format | None:
    """The format of a `QuantizedTensor`; None for anything else."""
    return t.format if isinstance(t, QuantizedTensor) else None


# ----------------------------------------------------------------------------------------------------------------------
# Making one


def quantized(
    x: Tensor,
    format: Format,
    rowwise: bool = True,
    columnwise: bool = True,
    *,
    groups: Groups | None = None,
    factor: Tensor | None = None,
    state: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> QuantizedTensor:
    """`x` quantised: matrices `[..., M, K]`, or with `groups` the rows `[..., K]` of those.

    dtype: the nominal one, x's by default. factor: what is multiplied by in place of the scale that its own largest
    magnitude gives, FP32, one for each matrix or group. state: of the random bits of a format that rounds
    stochastically (`random_bits.random_state`), by default a fresh one. Errors: see `quantize.check`.
    """
    if state is None and format.rounding == "stochastic":
        state = random_state(x.device)
    offsets = None if groups is None else groups.offsets
    source = x if groups is None else x.reshape(-1, x.shape[-1])
    copies = [
        stored.quantize_stored(source, format, direction, offsets, factor, state) if wanted else None
        for direction, wanted in ((False, rowwise), (True, columnwise))
    ]
    return QuantizedTensor(x.shape, dtype or x.dtype, format, copies[0], copies[1], groups)


def _as_bytes(t: Tensor | None) -> Tensor | None:
    """One-byte floats as uint8: plain `pickle` cannot read them."""
    return t.view(torch.uint8) if t is not None and t.element_size() == 1 else t


def _rebuild(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    format: Format,
    rowwise: tuple | None,
    columnwise: tuple | None,
    offsets: Tensor | None,
    requires_grad: bool,
    is_parameter: bool,
) -> Tensor:
    """What a pickle holds, as a tensor or parameter."""

    def copy(held: tuple | None) -> Quantized | None:
        if held is None:
            return None
        data, scale, amax = held
        return Quantized(data.view(format.element.dtype), scale.view(format.scale.dtype), amax)

    groups = None if offsets is None else Groups(offsets)
    made = QuantizedTensor(shape, dtype, format, copy(rowwise), copy(columnwise), groups)
    return Parameter(made, requires_grad) if is_parameter else made.requires_grad_(requires_grad)


torch.serialization.add_safe_globals([_rebuild, formats.Format, formats.Element, formats.Scale])
"""`torch.load` takes checkpoints with quantised weights as it takes others: all of this is plain data."""


class _Dequantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: QuantizedTensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = q.dtype
        return q._plain(dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.to(ctx.dtype), None


# ----------------------------------------------------------------------------------------------------------------------
# Operations


def _on_values(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation on the dequantised values; what it changed in place is quantised anew."""
    plain: dict[int, Tensor] = {}

    def dequantized(t: Any) -> Any:
        if not isinstance(t, QuantizedTensor):
            return t
        return plain.setdefault(id(t), t._plain())

    result = func(*tree_map(dequantized, args), **tree_map(dequantized, kwargs))
    if not func._schema.is_mutable:
        return result
    owners: dict[int, QuantizedTensor] = {}
    for at, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[at] if at < len(args) else kwargs.get(argument.name)
            for t in given if isinstance(given, (list, tuple)) else [given]:
                if isinstance(t, QuantizedTensor):
                    t.quantize_(plain[id(t)])
                    owners[id(plain[id(t)])] = t
    return tree_map(lambda t: owners.get(id(t), t), result)


def _detach(q: QuantizedTensor) -> QuantizedTensor:
    return q._map(lambda t: t)


def _clone(q: QuantizedTensor, memory_format: Any = None) -> QuantizedTensor:
    return q._map(torch.clone)


def _to_copy(
    q: QuantizedTensor, *, dtype: Any = None, device: Any = None, non_blocking: bool = False, **_: Any
) -> QuantizedTensor:
    """Another device; another nominal dtype: the bytes stay what they are."""
    return q._map(lambda t: t.to(device=device, non_blocking=non_blocking, copy=True), dtype)


def _copy_(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if isinstance(target, QuantizedTensor):
        return target.quantize_(source.expand(target.shape) if source.shape != target.shape else source)
    return target.copy_(source._plain(), non_blocking)  # type: ignore[attr-defined]


_OWN: dict[Any, Callable[..., Any]] = {
    _aten.detach.default: _detach,
    _aten.alias.default: _detach,
    _aten.clone.default: _clone,
    _aten._to_copy.default: _to_copy,
    _aten.copy_.default: _copy_,
}
