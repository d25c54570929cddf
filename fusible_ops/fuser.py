"""OperationFuser: a run of adjacent ops, planned once and run as one autograd function.

Forward and backward walk over steps: an unfused basic op, or a fused operation over several. Which, the plan says
(`patterns.plan`); it depends on the chain, the device, the compute dtype and the recipe, and is kept for each of those.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cute_kernels import reference
from cute_kernels.limits import dtype_name
from cute_kernels.quantization.formats import Format
from cute_kernels.target import Target
from fusible_ops.autocast_mode import current_recipe
from fusible_ops.op import BasicOperation, FusedOperation, FusibleOperation, OperationContext
from fusible_ops.parameters import Held
from fusible_ops.quantized_tensor import QuantizedTensor
from fusible_ops.ranges import shown
from fusible_ops.recipe import Recipe
from patterns import RULES, Chain, Plan, Rule, explain, plan

ON_UNFUSED = ("allow", "warn", "error")


@dataclass(frozen=True)
class _Step:
    """`op` runs the basic ops of `span`. name: of the rule and its ops, or of the unfused op, for profilers. before,
    after: the formats in which the steps around it quantise what it gives them, if they do.
    """

    op: BasicOperation | FusedOperation
    span: slice
    name: str
    before: Format | None = None
    after: Format | None = None


class _Call:
    """One forward of a run, and what its backward needs."""

    def __init__(
        self,
        fuser: OperationFuser,
        steps: Sequence[_Step],
        held: list[Held],
        extra_inputs: Sequence[Sequence[Tensor]],
        kwargs: Sequence[dict[str, Any]],
        autocast_dtype: torch.dtype | None,
        recipe: Recipe | None,
    ) -> None:
        self.fuser, self.steps = fuser, steps
        self.held, self.extra_inputs, self.kwargs = held, extra_inputs, kwargs
        self.autocast_dtype, self.recipe = autocast_dtype, recipe
        self.contexts: list[OperationContext] = []
        self.trail_offsets: Tensor | None = None

    def forward(self, x: Tensor, needs: tuple[bool, ...], recorded: bool) -> Tensor:
        """needs: which of x, all parameters and all extra inputs require a gradient. recorded: whether there will be
        a backward.
        """
        fuser = self.fuser
        contexts = self.contexts = fuser.contexts(self.held, needs, recorded)
        for ctx, held, source in zip(contexts, self.held, fuser.split_sources, strict=True):
            ctx.held, ctx.autocast_dtype, ctx.recipe = held, self.autocast_dtype, self.recipe
            ctx.split_sizes = self._splits(source)
        x = _tokens_only(x, _offsets(self._splits(fuser.lead), x))
        for step in self.steps:
            span = step.span
            with shown(step.name, "forward"):
                x, _ = step.op.fuser_forward(
                    contexts[span],
                    x,
                    basic_op_extra_inputs=self.extra_inputs[span],
                    prev_op_grad_output_quantizer=step.before,
                    next_op_input_quantizer=step.after,
                    basic_op_kwargs=self.kwargs[span],
                )
        self.trail_offsets = _offsets(self._splits(fuser.trail), x)
        return _tokens_only(x, self.trail_offsets)

    def _splits(self, index: int | None) -> Tensor | None:
        """The split sizes that basic op `index` was given."""
        if index is None:
            return None
        return self.extra_inputs[index][self.fuser.basic_ops[index].split_sizes_slot]  # type: ignore[index]

    def take_saved(self) -> list[Tensor | None]:
        """What all ops asked to keep, in order; the call itself keeps nothing."""
        saved: list[Tensor | None] = [self.trail_offsets]
        self.counts = []
        for ctx in self.contexts:
            saved += ctx.to_save
            self.counts.append(len(ctx.to_save))
            ctx.to_save, ctx.split_sizes = (), None
        self.extra_inputs, self.kwargs, self.trail_offsets = [], [], None
        return saved

    def backward(self, saved: Sequence[Tensor | None], grad: Tensor | None) -> list[Tensor | None]:
        """Gradients of (x, all parameters, all extra inputs)."""
        contexts = self.contexts
        for op, ctx in zip(self.fuser.basic_ops, contexts, strict=True):
            if ctx.requires_grad:
                op.check_backward(ctx)
            if ctx.unchanged is not None:
                ctx.unchanged.check(ctx.owner)
        if grad is not None:
            grad = _tokens_only(grad, saved[0])
        at = 1
        for ctx, count in zip(contexts, self.counts, strict=True):
            ctx.saved_tensors = tuple(saved[at : at + count])
            at += count
        param_grads: list[Sequence[Tensor | None]] = [[None] * len(held.parameters) for held in self.held]
        extra_grads: list[Sequence[Tensor | None]] = [[None] * op.num_extra_inputs for op in self.fuser.basic_ops]
        for step in reversed(self.steps):
            own = contexts[step.span]
            if grad is None or not any(ctx.requires_grad for ctx in own):
                grad = None
                break
            with shown(step.name, "backward"):
                grad, param_grads[step.span], extra_grads[step.span] = step.op.fuser_backward(
                    own, grad, basic_op_grad_extra_outputs=[()] * len(own)
                )
            for ctx in own:
                ctx.saved_tensors = ()
        result = [grad]
        for grads, held in zip(param_grads, self.held, strict=True):
            if len(grads) != len(held.parameters):
                raise RuntimeError(
                    f"an op returned {len(grads)} parameter gradients, but it has {len(held.parameters)} parameters"
                )
            result += grads
        for grads in extra_grads:
            result += grads
        return result


def _offsets(split_sizes: Tensor | None, x: Tensor) -> Tensor | None:
    return None if split_sizes is None else reference.group_offsets(split_sizes, x.shape[:-1].numel())


def _tokens_only(t: Tensor, offsets: Tensor | None) -> Tensor:
    """t [..., C] with the rows past the last group exactly zero; t itself if there are no groups."""
    if offsets is None or t.dim() == 0 or (rows := t.shape[:-1].numel()) == 0:
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
    if not y._is_view() or isinstance(y, QuantizedTensor):
        return y
    if y.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() != 0:
        return y.clone()
    return torch.ops.aten._unsafe_view(y, y.shape)


class _Run(torch.autograd.Function):
    """A `_Call` as one autograd node. Arguments after `call`: all parameters, then all extra inputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: _Call, *tensors: Tensor) -> Tensor:
        y = _owned(call.forward(x, ctx.needs_input_grad, True), x)
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


_record = super(torch.autograd.Function, _Run).apply
"""`_Run.apply` without its walk over all arguments for what functorch left behind; under functorch no run gets here."""


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
        for op in self.basic_ops:
            if op.num_extra_outputs:
                raise NotImplementedError(f"{type(op).__name__} has extra outputs, which are not supported")
        grouped = [i for i, op in enumerate(self.basic_ops) if op.split_sizes_slot is not None]
        after = self.basic_ops[grouped[-1] + 1 :] if grouped else []
        self.lead = grouped[0] if grouped and grouped[0] > 0 else None
        """The first grouped linear, if ops come before it: rows of no group are zeroed for them."""
        self.trail = grouped[-1] if any(not op.keeps_zero_rows for op in after) else None
        """The last grouped linear, if ops after it would put values into rows of no group."""
        self.split_sources = [max((g for g in grouped if g < i), default=self.lead) for i in range(len(self.basic_ops))]
        """For each basic op the grouped linear whose splits say which of its rows are tokens, if there is one."""
        ends = list(itertools.accumulate((op.num_extra_inputs for op in self.basic_ops), initial=0))
        self._extra_spans = [slice(*ends_of_op) for ends_of_op in itertools.pairwise(ends)]
        self._contexts: dict[Any, list[OperationContext]] = {}
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

    def plan(self, target: Target, autocast_dtype: torch.dtype | None = None, recipe: Recipe | None = None) -> Plan:
        """What runs what on `target`. autocast_dtype: as under `torch.autocast`; None: as the weights are. recipe: the
        quantisation recipe.
        """
        own = self._linears[0].weight_dtype if self._linears else None
        dtype = autocast_dtype or own or torch.get_default_dtype()
        specs = [replace(op.describe(), name=op.name or name) for name, op in zip(self.names, self.ops, strict=True)]
        described = None if recipe is None else recipe.describe()
        chain = Chain(tuple(specs), dtype_name(dtype), described, autocast=autocast_dtype is not None)
        return plan(chain, target, self.rules)

    def _build_steps(
        self, device: torch.device, autocast_dtype: torch.dtype | None, recipe: Recipe | None
    ) -> list[_Step]:
        made = self.plan(Target.of(device), autocast_dtype, recipe)
        if made.unfused and self.on_unfused != "allow":
            text = explain(made)
            if self.on_unfused == "error":
                raise RuntimeError(f"some ops run unfused, and on_unfused='error':\n{text}")
            warnings.warn(f"some ops run unfused:\n{text}", stacklevel=7)  # the caller of the module
        steps: list[_Step] = []
        at = 0
        for planned in made.steps:
            parts = [part for op in self.ops[planned.start : planned.stop] for part in op.fusible_parts()]
            if planned.rule is not None:
                name = f"{planned.rule.name} ({', '.join(self._titles[planned.start : planned.stop])})"
                steps.append(_Step(_load(planned.rule.program)(parts), slice(at, at + len(parts)), name))
            else:
                steps += self._unfused(planned.start, planned.stop, at, recipe)
            at += len(parts)
        if recipe is None:
            return steps
        before = [None, *[step.op.grad_output_format(recipe) for step in steps]]
        after = [*[step.op.input_format(recipe) for step in steps[1:]], None]
        return [replace(step, before=b, after=a) for step, b, a in zip(steps, before, after, strict=False)]

    def _unfused(self, start: int, stop: int, at: int, recipe: Recipe | None) -> list[_Step]:
        """Steps of ops `start` to `stop`, the first of which is basic op `at`."""
        steps = []
        for op, title in zip(self.ops[start:stop], self._titles[start:stop], strict=True):
            quantizes = recipe is not None and op.quantized_program
            for runner in [_load(op.quantized_program)(op.fusible_parts())] if quantizes else op.unfused_steps():
                count = len(runner.fusible_parts())
                steps.append(_Step(runner, slice(at, at + count), f"unfused {title}"))
                at += count
        return steps

    def steps(self, x: Tensor, autocast_dtype: torch.dtype | None, recipe: Recipe | None) -> list[_Step]:
        """The steps for an input like x; planned when first asked."""
        key = (x.device, autocast_dtype, recipe, *[op.weight_dtype for op in self._linears])
        steps = self._steps.get(key)
        if steps is None:
            steps = self._steps[key] = self._build_steps(x.device, autocast_dtype, recipe)
        return steps

    # -- running ---------------------------------------------------------------------------------------------------

    def __call__(
        self, x: Tensor, *extra_inputs: Tensor, basic_op_kwargs: Sequence[dict[str, Any]] | None = None
    ) -> Tensor:
        self._check_call(x, extra_inputs, basic_op_kwargs)
        autocast_dtype, recipe = _autocast_dtype(x.device), current_recipe()
        if recipe is None and isinstance(x, QuantizedTensor):
            x = x.dequantize()
        held, extras = [], []
        for op, owner, span in zip(self.basic_ops, self._owners, self._extra_spans, strict=True):
            own = extra_inputs[span]
            op.check_call(x, own, owner)
            extras.append(own)
            held.append(op.hold(owner))
        kwargs = basic_op_kwargs or [{} for _ in self.basic_ops]
        steps = self.steps(x, autocast_dtype, recipe)
        call = _Call(self, steps, held, extras, kwargs, autocast_dtype, recipe)
        parameters = [p for own in held for p in own.parameters]
        with _without_autocast(x.device, autocast_dtype):
            if torch.is_grad_enabled():
                return _record(x, call, *parameters, *extra_inputs)
            needs = (False, False, *[p.requires_grad for p in parameters], *[False] * len(extra_inputs))
            return _owned(call.forward(x, needs, False), x)

    def contexts(self, held: Sequence[Held], needs: tuple[bool, ...], recorded: bool) -> list[OperationContext]:
        """A context for each basic op. needs: which of x, one more argument, all parameters and all extra inputs
        require a gradient; recorded: whether they get one.
        """
        key = (needs, recorded, *[len(own.parameters) for own in held])
        made = self._contexts.get(key)
        if made is None:
            made = self._contexts[key] = self._make_contexts(held, needs, recorded)
        return [ctx.copy() for ctx in made]

    def _make_contexts(self, held: Sequence[Held], needs: tuple[bool, ...], recorded: bool) -> list[OperationContext]:
        flags = iter(needs[2:])
        wants = [tuple(itertools.islice(flags, len(own.parameters))) for own in held]
        extra_wants = [tuple(itertools.islice(flags, op.num_extra_inputs)) for op in self.basic_ops]
        for op, own, owner, flag in zip(self.basic_ops, held, self._owners, wants, strict=True):
            op.check_wants(own, flag, owner)
        flows = [any(a) or any(b) for a, b in zip(wants, extra_wants, strict=True)]
        first = 0 if needs[0] else flows.index(True) if True in flows else len(flows)
        first = first if recorded else len(flows)
        return [
            OperationContext(i >= first, i > first or (i == first == 0 and needs[0]), owner, flag)
            for i, (owner, flag) in enumerate(zip(self._owners, wants, strict=True))
        ]

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


def _load(program: str) -> type[FusedOperation]:
    """The fused operation with the dotted name "package.module:Class"."""
    module, _, name = program.partition(":")
    return getattr(importlib.import_module(module), name)
