"""OperationFuser: a run of adjacent ops, planned once and run as one autograd function.

Forward and backward walk over steps: an unfused basic op, or a fused operation over several. Which, the plan says
(`patterns.plan`); it depends on the chain, the device and the compute dtype, and is kept for each of those.
"""

from __future__ import annotations

import contextlib
import importlib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cute_kernels import reference
from cute_kernels.limits import dtype_name
from cute_kernels.target import Target
from fusible_ops.op import BasicOperation, FusedOperation, FusibleOperation, OperationContext
from patterns import RULES, Chain, Plan, Rule, explain, plan

ON_UNFUSED = ("allow", "warn", "error")


@dataclass(frozen=True)
class _Step:
    """`op` runs basic ops `start` to `stop`."""

    op: BasicOperation | FusedOperation
    start: int
    stop: int


class _Call:
    """One forward of a run, and what its backward needs."""

    def __init__(
        self,
        steps: Sequence[_Step],
        contexts: list[OperationContext],
        extra_inputs: list[Sequence[Tensor]],
        kwargs: Sequence[dict[str, Any]],
    ) -> None:
        self.steps = steps
        self.contexts = contexts
        self.extra_inputs = extra_inputs
        self.kwargs = kwargs
        self.param_counts: list[int] = []
        self.lead_splits: Tensor | None = None
        """Splits of the first grouped linear, if ops come before it: rows of no group are zeroed for them."""
        self.trail_splits: Tensor | None = None
        """Splits of the last grouped linear, if ops after it would put values into rows of no group."""
        self.trail_offsets: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        rows = x.shape[:-1].numel()
        x = _tokens_only(x, _offsets(self.lead_splits, rows))
        for step in self.steps:
            span = slice(step.start, step.stop)
            x, _ = step.op.fuser_forward(
                self.contexts[span],
                x,
                basic_op_extra_inputs=self.extra_inputs[span],
                prev_op_grad_output_quantizer=None,
                next_op_input_quantizer=None,
                basic_op_kwargs=self.kwargs[span],
            )
        self.trail_offsets = _offsets(self.trail_splits, rows)
        return _tokens_only(x, self.trail_offsets)

    def take_saved(self) -> list[Tensor | None]:
        """What all ops asked to keep, in order; the call itself keeps nothing."""
        saved = [t for ctx in self.contexts for t in ctx.to_save]
        self.saved_counts = [len(ctx.to_save) for ctx in self.contexts]
        self.extra_counts = [len(extras) for extras in self.extra_inputs]
        for ctx in self.contexts:
            ctx.to_save = ()
        saved.append(self.trail_offsets)
        self.extra_inputs, self.kwargs = [], []
        self.lead_splits = self.trail_splits = self.trail_offsets = None
        return saved

    def backward(self, saved: Sequence[Tensor | None], grad: Tensor | None) -> list[Tensor | None]:
        """Gradients of (x, all parameters, all extra inputs)."""
        for step in self.steps:
            for op, ctx in zip(step.op.fusible_parts(), self.contexts[step.start : step.stop], strict=True):
                if ctx.requires_grad:
                    op.check_backward(ctx.owner)
                if ctx.unchanged is not None:
                    ctx.unchanged.check(ctx.owner)
        if grad is not None:
            grad = _tokens_only(grad, saved[-1])
        at = 0
        for ctx, count in zip(self.contexts, self.saved_counts, strict=True):
            ctx.saved_tensors = tuple(saved[at : at + count])
            at += count
        param_grads: list[Sequence[Tensor | None]] = [[None] * n for n in self.param_counts]
        extra_grads: list[Sequence[Tensor | None]] = [[None] * n for n in self.extra_counts]
        for step in reversed(self.steps):
            span = slice(step.start, step.stop)
            contexts = self.contexts[span]
            if grad is None or not any(ctx.requires_grad for ctx in contexts):
                grad = None
                break
            grad, params, extras = step.op.fuser_backward(
                contexts, grad, basic_op_grad_extra_outputs=[()] * len(contexts)
            )
            param_grads[span] = params
            extra_grads[span] = extras
            for ctx in contexts:
                ctx.saved_tensors = ()
        for got, wanted in zip(param_grads, self.param_counts, strict=True):
            if len(got) != wanted:
                raise RuntimeError(f"an op returned {len(got)} parameter gradients, but it has {wanted} parameters")
        return [grad, *(g for grads in param_grads for g in grads), *(g for grads in extra_grads for g in grads)]


def _offsets(split_sizes: Tensor | None, rows: int) -> Tensor | None:
    return None if split_sizes is None else reference.group_offsets(split_sizes, rows)


def _tokens_only(t: Tensor, offsets: Tensor | None) -> Tensor:
    """t [..., C] with the rows past the last group exactly zero; t itself if there are no groups."""
    rows = t.shape[:-1].numel()
    if offsets is None or t.dim() == 0 or rows == 0:
        return t
    return reference.tokens_only(t.reshape(rows, t.shape[-1]), offsets).view(t.shape)


_NOTHING = contextlib.nullcontext()


def _without_autocast(device: torch.device, active: torch.dtype | None) -> contextlib.AbstractContextManager[Any]:
    """Ops choose their compute dtype themselves, so autocast (`active`) must not touch the products inside them."""
    return _NOTHING if active is None else torch.autocast(device.type, enabled=False)


def _autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype of an active autocast on this kind of device, else None."""
    kind = device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return None


def _owned(y: Tensor, x: Tensor) -> Tensor:
    """y as a result that the caller may change in place: no view, and no memory of x (a run of identities)."""
    if y is x:
        return y.clone()
    if not y._is_view():
        return y
    if y.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() != 0:
        return y.clone()
    return torch.ops.aten._unsafe_view(y, y.shape)


class _Run(torch.autograd.Function):
    """A `_Call` as one autograd node. Arguments after `call`: all parameters, then all extra inputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: _Call, *tensors: Tensor) -> Tensor:
        y = _owned(call.forward(x), x)
        ctx.call = call
        ctx.save_for_backward(*call.take_saved())
        return y

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "fusible_ops has no double backward: gradients cannot be taken with create_graph=True through these ops"
            )
        with _without_autocast(grad_output.device, _autocast_dtype(grad_output.device)):
            dx, *rest = ctx.call.backward(ctx.saved_tensors, grad_output)
        return dx, None, *rest


class OperationFuser:
    """A run of ops. Call it as `fuser(x, *extra_inputs)`.

    ops: basic ops and containers (`Linear`). names: what explain() and errors call them. rules: the rule set, `()`
    for none. on_unfused: "allow", "warn" (once for each plan) or "error" (RuntimeError at the first call) where an op
    runs unfused.
    Errors: ValueError if two neighbours' widths differ, if extra inputs are missing or too many, for an unknown
    on_unfused.
    """

    def __init__(
        self,
        ops: Sequence[FusibleOperation],
        names: Sequence[str] | None = None,
        rules: tuple[Rule, ...] = RULES,
        on_unfused: str = "allow",
    ) -> None:
        self.ops = list(ops)
        self.names = list(names) if names is not None else ["" for _ in ops]
        self.rules = rules
        self.on_unfused = on_unfused
        self.basic_ops = [part for op in self.ops for part in op.fusible_parts()]
        self.num_extra_inputs = sum(op.num_extra_inputs for op in self.basic_ops)
        self._linears = [op for op in self.basic_ops if op.weight_dtype is not None]
        self._titles = [
            f"{type(op).__name__} {op.name or name}".rstrip() for name, op in zip(self.names, self.ops, strict=True)
        ]
        self._owners = [title for title, op in zip(self._titles, self.ops, strict=True) for _ in op.fusible_parts()]
        grouped = [i for i, op in enumerate(self.basic_ops) if op.split_sizes_slot is not None]
        after = self.basic_ops[grouped[-1] + 1 :] if grouped else []
        self._lead = grouped[0] if grouped and grouped[0] > 0 else None
        self._trail = grouped[-1] if any(not op.keeps_zero_rows for op in after) else None
        for op in self.basic_ops:
            if op.num_extra_outputs:
                raise NotImplementedError(f"{type(op).__name__} has extra outputs, which are not supported")
        self._steps: dict[Any, list[_Step]] = {}
        self._check_widths()

    def _check_widths(self) -> None:
        """ValueError where an op cannot take what the op before it gives."""
        width, source = None, ""
        for title, op in zip(self._titles, self.ops, strict=True):
            for part in op.fusible_parts():
                wanted = part.input_width()
                if width is not None and wanted is not None and wanted != width:
                    raise ValueError(f"{source} gives {width} columns, but {title}, which follows it, takes {wanted}")
                try:
                    width, source = part.output_width(wanted if width is None else width), title
                except ValueError as error:
                    raise ValueError(f"{title}, after {source}: {error}" if source else f"{title}: {error}") from None

    # -- planning --------------------------------------------------------------------------------------------------

    def plan(self, target: Target, autocast_dtype: torch.dtype | None = None) -> Plan:
        """What runs what on `target`. autocast_dtype: as under `torch.autocast`; None: as the weights are."""
        own = self._linears[0].weight_dtype if self._linears else None
        dtype = autocast_dtype or own or torch.get_default_dtype()
        specs = [replace(op.describe(), name=op.name or name) for name, op in zip(self.names, self.ops, strict=True)]
        chain = Chain(tuple(specs), dtype_name(dtype), autocast=autocast_dtype is not None)
        return plan(chain, target, self.rules)

    def _build_steps(self, device: torch.device, autocast_dtype: torch.dtype | None) -> list[_Step]:
        made = self.plan(Target.of(device), autocast_dtype)
        if made.unfused and self.on_unfused != "allow":
            text = explain(made)
            if self.on_unfused == "error":
                raise RuntimeError(f"some ops run unfused, and on_unfused='error':\n{text}")
            warnings.warn(f"some ops run unfused:\n{text}", stacklevel=7)  # the caller of the module
        steps, at = [], 0
        for planned in made.steps:
            parts = [part for op in self.ops[planned.start : planned.stop] for part in op.fusible_parts()]
            if planned.program is not None:
                steps.append(_Step(_load(planned.program)(parts), at, at + len(parts)))
            else:
                steps += self._unfused(planned.start, planned.stop, at)
            at += len(parts)
        return steps

    def _unfused(self, start: int, stop: int, at: int) -> list[_Step]:
        """Steps of ops `start` to `stop`, the first of which is basic op `at`."""
        steps = []
        for op in self.ops[start:stop]:
            for runner in op.unfused_steps():
                count = len(runner.fusible_parts())
                steps.append(_Step(runner, at, at + count))
                at += count
        return steps

    def steps(self, x: Tensor, autocast_dtype: torch.dtype | None) -> list[_Step]:
        """The steps for an input like x; planned when first asked."""
        key = (x.device, autocast_dtype, *[op.weight_dtype for op in self._linears])
        steps = self._steps.get(key)
        if steps is None:
            steps = self._steps[key] = self._build_steps(x.device, autocast_dtype)
        return steps

    # -- running ---------------------------------------------------------------------------------------------------

    def __call__(
        self, x: Tensor, *extra_inputs: Tensor, basic_op_kwargs: Sequence[dict[str, Any]] | None = None
    ) -> Tensor:
        self._check_call(x, extra_inputs, basic_op_kwargs)
        autocast_dtype = _autocast_dtype(x.device)
        extras: list[Sequence[Tensor]] = []
        at = 0
        for op, owner in zip(self.basic_ops, self._owners, strict=True):
            own = extra_inputs[at : at + op.num_extra_inputs]
            op.check_call(x, own, owner)
            extras.append(own)
            at += op.num_extra_inputs
        params = [op.autograd_parameters() for op in self.basic_ops]
        first = self._first_op_requiring_grad(x, params, extras)
        contexts = self._contexts(first, x.requires_grad, autocast_dtype, extras)
        for ctx, own_params in zip(contexts, params, strict=True):
            ctx.wants = [p.requires_grad for p in own_params]
        kwargs = basic_op_kwargs or [{} for _ in self.basic_ops]
        call = _Call(self.steps(x, autocast_dtype), contexts, extras, kwargs)
        call.lead_splits, call.trail_splits = self._splits_at(self._lead, extras), self._splits_at(self._trail, extras)
        with _without_autocast(x.device, autocast_dtype):
            if first == len(self.basic_ops):
                with torch.no_grad():
                    return _owned(call.forward(x), x)
            call.param_counts = [len(p) for p in params]
            return _Run.apply(x, call, *(p for ps in params for p in ps), *extra_inputs)

    def _splits_at(self, index: int | None, extras: Sequence[Sequence[Tensor]]) -> Tensor | None:
        """The split sizes that basic op `index` was given."""
        return None if index is None else extras[index][self.basic_ops[index].split_sizes_slot]  # type: ignore[index]

    def _contexts(
        self, first: int, input_requires_grad: bool, autocast_dtype: torch.dtype | None, extras: list[Sequence[Tensor]]
    ) -> list[OperationContext]:
        """A context for each basic op; gradients flow from op `first` on."""
        contexts: list[OperationContext] = []
        split_sizes = self._splits_at(self._lead, extras)
        for i, (op, owner) in enumerate(zip(self.basic_ops, self._owners, strict=True)):
            wanted = i > first or (i == first == 0 and input_requires_grad)
            ctx = OperationContext(i >= first, wanted, autocast_dtype, owner)
            ctx.split_sizes = split_sizes
            contexts.append(ctx)
            if op.split_sizes_slot is not None:
                split_sizes = extras[i][op.split_sizes_slot]
        return contexts

    def _check_call(self, x: Tensor, extra_inputs: Sequence[Tensor], kwargs: Sequence[dict[str, Any]] | None) -> None:
        if len(extra_inputs) != self.num_extra_inputs:
            wants = [f"{owner}: {op.num_extra_inputs}" for op, owner in self._named() if op.num_extra_inputs]
            detail = f" ({', '.join(wants)})" if wants else ""
            raise ValueError(f"Expected {self.num_extra_inputs} extra inputs but got {len(extra_inputs)}{detail}")
        if not isinstance(x, Tensor):
            raise TypeError(f"the input must be a tensor, got {type(x).__name__}")
        if torch._C._are_functorch_transforms_active():
            raise RuntimeError("fusible_ops does not run under torch.func transforms (grad, vmap, jvp); use autograd")
        if torch.compiler.is_exporting():
            raise RuntimeError("fusible_ops cannot be exported with torch.export")
        for (op, owner), given in zip(self._named(), kwargs or (), strict=bool(kwargs)):
            if op.known_kwargs is not None and (unknown := set(given) - set(op.known_kwargs)):
                raise TypeError(f"{owner} takes no keyword argument {sorted(unknown)[0]!r}")

    def _named(self) -> list[tuple[BasicOperation, str]]:
        """Each basic op with what errors call it."""
        return list(zip(self.basic_ops, self._owners, strict=True))

    @staticmethod
    def _first_op_requiring_grad(
        x: Tensor, params: Sequence[Sequence[Tensor]], extras: Sequence[Sequence[Tensor]]
    ) -> int:
        """The first op through which a gradient flows; the number of ops if none does."""
        if not torch.is_grad_enabled():
            return len(params)
        if x.requires_grad:
            return 0
        for i, (own, given) in enumerate(zip(params, extras, strict=True)):
            if any(t.requires_grad for t in own) or any(t.requires_grad for t in given):
                return i
        return len(params)


def _load(program: str) -> type[FusedOperation]:
    """The fused operation with the dotted name "package.module:Class"."""
    module, _, name = program.partition(":")
    return getattr(importlib.import_module(module), name)
