"""OperationFuser: a run of adjacent ops, planned once and run as one autograd function.

Forward and backward walk over steps: an unfused basic op, or a fused operation over several. Which, the plan says
(`patterns.plan`); it depends on the chain, the device, the compute dtype and the recipe, and is kept for each of those.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import Parameter

from cute_kernels.facts import WITHOUT_MEMORY, facts
from cute_kernels.launch import NoKernelError
from cute_kernels.ops import are_plain, formulas
from cute_kernels.scheduling import ALONE, Sharing
from cute_kernels.target import Target
from fusible_ops import checks
from fusible_ops.autocast_mode import current_recipe
from fusible_ops.call import Call, autocast_dtype_on, owned, record, without_autocast
from fusible_ops.channels import Routing
from fusible_ops.fallback import refused
from fusible_ops.op import BasicOperation, FusedOperation, FusibleOperation, OperationContext
from fusible_ops.parameters import Held
from fusible_ops.planning import described, failed_among, planned_steps, titled
from fusible_ops.quantized_tensor import QuantizedTensor, format_of
from fusible_ops.recipe import Float8BlockScaling, Recipe
from fusible_ops.route import Route, Step
from fusible_ops.shortcut import ShortCall, Shortcut
from patterns import RULES, Plan, Refused, Rule, plan
from patterns.break_even import least_rows, linears_of

ON_UNFUSED = ("allow", "warn", "error")
MOST_ROUTES = 2048
"""Kinds of calls that a run remembers; every row count makes a new one."""
MOST_RECENT = 4
"""Those of them that a call is compared with first, without taking facts; and shortcuts."""
AUTOMATIC = Float8BlockScaling()
"""What the recipe "auto" chooses where it pays."""


def _refuse_export() -> None:
    if torch.compiler.is_exporting():
        raise RuntimeError("fusible_ops cannot be exported with torch.export")


def _refuse_transforms() -> NoReturn:
    raise RuntimeError("fusible_ops does not run under torch.func transforms (grad, vmap, jvp); use autograd")


class OperationFuser:
    """A run of ops. Call it as `fuser(x, *extra_inputs)`.

    ops: basic ops and containers (`Linear`). names: what explain() and errors call them. rules: the rule set, `()`
    for none. on_unfused: "allow", "warn" (once for each plan) or "error" (RuntimeError at the first call) where an op
    runs unfused. sharing: how fused operations share the device.
    Errors: ValueError if two neighbours' widths differ, if extra inputs are missing or too many, for an unknown
    on_unfused.
    """

    def __init__(
        self,
        ops: Sequence[FusibleOperation],
        names: Sequence[str] | None = None,
        rules: tuple[Rule, ...] = RULES,
        on_unfused: str = "allow",
        sharing: Sharing = ALONE,
    ) -> None:
        self.ops = list(ops)
        self.names = list(names) if names is not None else ["" for _ in ops]
        self.rules = rules
        self.on_unfused = on_unfused
        self.sharing = ALONE if sharing == ALONE else sharing
        self.basic_ops = [part for op in self.ops for part in op.fusible_parts()]
        self.routing = Routing(self.basic_ops)
        self.num_extra_inputs = len(self.routing.public_inputs)
        self.num_extra_outputs = len(self.routing.public_outputs)
        self._linears = [op for op in self.basic_ops if op.first_weight is not None]
        self._titles = titled(self.ops, self.names)
        owners = [title for title, op in zip(self._titles, self.ops, strict=True) for _ in op.fusible_parts()]
        self.named = list(zip(self.basic_ops, owners, strict=True))
        """Each basic op with what errors call it."""
        grouped = [i for i, op in enumerate(self.basic_ops) if op.split_sizes_slot is not None]
        after = self.basic_ops[grouped[-1] + 1 :] if grouped else []
        self.lead = grouped[0] if grouped and grouped[0] > 0 else None
        """The first grouped linear, if ops come before it: rows of no group are zeroed for them."""
        self.trail = grouped[-1] if any(not op.keeps_zero_rows for op in after) else None
        """The last grouped linear, if ops after it would put values into rows of no group."""
        self.split_sources = [max((g for g in grouped if g < i), default=self.lead) for i in range(len(self.basic_ops))]
        """For each basic op the grouped linear whose splits say which of its rows are tokens, if there is one."""
        ends = list(itertools.accumulate((own.count(None) for own in self.routing.sources), initial=0))
        self._extra_spans = [slice(*ends_of_op) for ends_of_op in itertools.pairwise(ends)]
        self._routes: dict[Any, Route] = {}
        self._recent: list[Route] = []
        self._shortcuts: list[Shortcut] = []
        self._context_kinds: dict[Any, list[type[OperationContext]]] = {}
        self._steps: dict[Any, tuple[Sequence[Step], Sequence[Step]]] = {}
        self._least_rows: dict[Any, int | None] = {}
        self._failed: dict[Any, tuple[Refused, ...]] = {}
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
        failed = failed_among(self.ops, 0, self.failed(target, autocast_dtype, recipe))
        return plan(described(self.ops, self.names, autocast_dtype, recipe), target, self.rules, failed)

    def failed(self, target: Target, autocast_dtype: torch.dtype | None, recipe: Recipe | None) -> tuple[Refused, ...]:
        """Fused steps whose kernels turned out not to be had there; `start` and `stop` count basic ops."""
        return self._failed.get(self._kind(target, autocast_dtype, recipe), ())

    def fail(self, route: Route, step: Step, error: NoKernelError) -> None:
        """Remember that kernels of this step cannot be had: calls after this one run its ops unfused."""
        key = self._kind(Target.of(route.device), route.autocast_dtype, route.recipe)
        route.failed = True
        self._failed[key] = (*self._failed.get(key, ()), refused(step, error))
        self._routes, self._recent, self._shortcuts = {}, [], []
        self._steps, self._least_rows = {}, {}

    def _kind(self, place: Any, autocast_dtype: torch.dtype | None, recipe: Recipe | None) -> Any:
        """What a plan depends on: the machine or a device, and what else may differ between calls."""
        weights = [op.first_weight for op in self._linears]
        held = [(w.dtype, format_of(w)) for w in weights if w is not None]
        return place, autocast_dtype, recipe, *held

    def steps(
        self, device: torch.device, autocast_dtype: torch.dtype | None, recipe: Recipe | None
    ) -> tuple[Sequence[Step], Sequence[Step]]:
        """The steps for inputs on `device`, forward and backward; planned when first asked."""
        key = self._kind(device, autocast_dtype, recipe)
        steps = self._steps.get(key)
        if steps is None:
            steps = self._steps[key] = planned_steps(self, device, autocast_dtype, recipe)
        return steps

    def least_rows(self, target: Target, autocast_dtype: torch.dtype | None = None) -> int | None:
        """From how many rows on the recipe "auto" is `Float8BlockScaling` in training; None: it is none for any."""
        key = self._kind(target, autocast_dtype, AUTOMATIC)
        if key not in self._least_rows:
            made = self.plan(target, autocast_dtype, AUTOMATIC)
            steps = [linears_of(made.chain.ops[step.start : step.stop]) for step in made.steps if step.rule is not None]
            least = [least_rows(linears) for linears in steps if linears]
            fits = made.is_fused and bool(least) and None not in least
            self._least_rows[key] = max(filter(None, least)) if fits else None
        return self._least_rows[key]

    def _automatic(self, x: object, autocast_dtype: torch.dtype | None) -> Recipe | None:
        """What the recipe "auto" is for an input x."""
        if not isinstance(x, Tensor) or not x.dim():
            return None
        least = self.least_rows(Target.of(x.device), autocast_dtype)
        return AUTOMATIC if least is not None and x.shape[:-1].numel() >= least else None

    # What Transformer Engine calls these, for those who look.

    @property
    def _basic_ops(self) -> list[BasicOperation]:
        return self.basic_ops

    @property
    def _basic_op_extra_input_sources(self) -> list[list[tuple[int, int] | None]]:
        return self.routing.sources

    @property
    def _forward_ops(self) -> list[tuple[FusibleOperation, list[int]]]:
        return self._placed(0)

    @property
    def _backward_ops(self) -> list[tuple[FusibleOperation, list[int]]]:
        return self._placed(1)

    def _placed(self, direction: int) -> list[tuple[FusibleOperation, list[int]]]:
        """(op, its basic ops) of the steps planned last."""
        steps = list(self._steps.values())[-1][direction]
        return [(step.op, list(range(step.span.start, step.span.stop))) for step in steps]

    # -- running ---------------------------------------------------------------------------------------------------

    def __call__(
        self, x: Tensor, *extra_inputs: Tensor, basic_op_kwargs: Sequence[dict[str, Any]] | None = None
    ) -> Any:
        if torch._C._are_functorch_transforms_active():
            _refuse_transforms()
        active = current_recipe()
        if self._shortcuts and not (basic_op_kwargs or active):
            short = self.short_call(x, extra_inputs, torch.is_grad_enabled())
            if short is not None:
                return short.run(x, extra_inputs)
        autocast_dtype = autocast_dtype_on(x.device) if isinstance(x, Tensor) else None
        recipe = self._automatic(x, autocast_dtype) if isinstance(active, str) else active
        if recipe is None and isinstance(x, QuantizedTensor):
            x = x.dequantize()
        call, parameters = self.call_for(x, extra_inputs, autocast_dtype, recipe, basic_op_kwargs)
        route = call.route
        if basic_op_kwargs or route.is_full:
            return self._call_fully(call, x, extra_inputs, parameters, basic_op_kwargs)
        records = torch.is_grad_enabled()
        with without_autocast(x.device, autocast_dtype):
            if records:
                y = record(x, call, *parameters, *extra_inputs)
            else:
                needs = (False, False, *[p.requires_grad for p in parameters], *[False] * len(extra_inputs))
                y = owned(call.forward(x, needs, False), x)
        self.shorten(call, x, extra_inputs, records)
        return y

    def short_call(self, x: Tensor, extra_inputs: Sequence[Tensor], records: bool) -> ShortCall | None:
        """A call without a recipe by a shortcut, if one is for calls like it. records: gradients are recorded."""
        if not torch._C._is_any_autocast_enabled():
            for shortcut in self._shortcuts:
                if shortcut.records is records and (short := shortcut.call(x, extra_inputs)) is not None:
                    return short
        return None

    def call_for(
        self,
        x: Tensor,
        extra_inputs: Sequence[Tensor],
        autocast_dtype: torch.dtype | None,
        recipe: Recipe | None,
        basic_op_kwargs: Sequence[dict[str, Any]] | None = None,
    ) -> tuple[Call, list[Parameter]]:
        """A call with these tensors, which passed every check and has run nothing yet; the parameters that it found."""
        held = [op.hold(owner) for op, owner in self.named]
        extras = [extra_inputs[span] for span in self._extra_spans]
        parameters = [p for own in held for p in own.parameters]
        tensors = x, extra_inputs, parameters, held
        for route in () if basic_op_kwargs else self._recent:
            if route.autocast_dtype is autocast_dtype and route.recipe is recipe and route.fits(*tensors):
                break
        else:
            route = self._route(*tensors, extras, basic_op_kwargs, autocast_dtype, recipe)
        return Call(self, route, held, extras, [{} for _ in held]), parameters

    def _call_fully(
        self,
        plain: Call,
        x: Tensor,
        extra_inputs: Sequence[Tensor],
        parameters: Sequence[Tensor],
        kwargs: Sequence[dict[str, Any]] | None,
    ) -> Any:
        """A call with more than extra inputs: y, or (y, *extra outputs)."""
        from fusible_ops.full_call import FullCall, record_fully, separate

        held = plain.held
        call = FullCall(self, plain.route, held, self.routing.placed(extra_inputs), kwargs or [{} for _ in held])
        with without_autocast(x.device, call.route.autocast_dtype):
            if torch.is_grad_enabled():
                results = record_fully(x, call, *parameters, *extra_inputs)
            else:
                needs = (False, False, *[p.requires_grad for p in parameters], *[False] * len(extra_inputs))
                results = separate(call.forward(x, needs, False), x, call)
        return results[0] if len(results) == 1 else tuple(results)

    def shorten(self, call: Call, x: Tensor, extra_inputs: Sequence[Tensor], records: bool) -> None:
        """Have a shortcut for calls like this one, which has run forward, if there is one and none was asked for."""
        route = call.route  # another one than before if a kernel did not compile
        if records not in route.unshortened or (records and call.needs not in route.went_back):
            return
        route.unshortened.remove(records)
        step, *others = route.steps
        if (
            others
            or not self.routing.is_plain
            or not isinstance(step.op, FusedOperation)
            or route.autocast_dtype
            or route.recipe
        ):
            return
        made = step.op.shortcut(call.contexts, x, extra_inputs, self.sharing, step.name)
        if made is not None:
            self._shortcuts = [made, *self._shortcuts][:MOST_RECENT]

    def _route(
        self,
        x: Tensor,
        extra_inputs: Sequence[Tensor],
        parameters: Sequence[Tensor],
        held: Sequence[Held],
        extras: Sequence[Sequence[Tensor]],
        basic_op_kwargs: Sequence[dict[str, Any]] | None,
        autocast_dtype: torch.dtype | None,
        recipe: Recipe | None,
    ) -> Route:
        """The route of calls with these facts: one that is kept, else a new one, if the call passes every check."""
        for (op, owner), own in zip(self.named, held, strict=True):
            op.check_parameters(own, owner)
        kind, route = None, None
        if isinstance(x, WITHOUT_MEMORY):
            _refuse_export()
        else:
            with contextlib.suppress(AttributeError, RuntimeError, TypeError):  # not all are strided, of known shape
                kinds = [(facts(t), t.requires_grad) for t in (x, *extra_inputs)]
                kind = (autocast_dtype, recipe, *kinds, *[own.kind() for own in held])
                route = None if basic_op_kwargs else self._routes.get(kind)
        if route is not None:
            route.learn(x, extra_inputs, parameters, held)
            self._recent = [route, *[other for other in self._recent if other is not route]][:MOST_RECENT]
            return route
        self._check_call(x, extra_inputs, basic_op_kwargs)
        has_rows: Tensor | None = x
        for (op, owner), given in zip(self.named, extras, strict=True):
            if len(given) == op.num_extra_inputs:  # else a channel gives some of them
                op.check_call(has_rows, given, owner)
            has_rows = has_rows if op.keeps_rows else None
        plain = are_plain((x, *extra_inputs)) and are_plain(parameters)
        if not plain:
            for (_, owner), own in zip(self.named, held, strict=True):
                checks.whole(owner, own.parameters)
        keeps_plans = kind is not None and self.routing.is_plain and all(own.is_packed for own in held)
        like = x.device, autocast_dtype, recipe
        route = Route(self.steps(*like), *like, plain, keeps_plans)
        special = any(op.offload or op.overwrites_extra_inputs for op in self.basic_ops)
        route.is_full = special or not self.routing.is_plain or route.steps is not route.backward_steps
        if kind is not None and not basic_op_kwargs:
            if len(self._routes) >= MOST_ROUTES:
                self._routes.clear()
            self._routes[kind] = route
        return route

    def context_kinds(
        self, route: Route, held: Sequence[Held], needs: tuple[bool, ...], recorded: bool
    ) -> list[type[OperationContext]]:
        """The kind of each basic op's context. needs: which of x, one more argument, all parameters and all extra
        inputs require a gradient; recorded: whether they get one.
        """
        key = (route.plain, route.autocast_dtype, route.recipe, needs, recorded, *[len(own.parameters) for own in held])
        made = self._context_kinds.get(key)
        if made is None:
            made = self._context_kinds[key] = self._make_context_kinds(route, held, needs, recorded)
        return made

    def _make_context_kinds(
        self, route: Route, held: Sequence[Held], needs: tuple[bool, ...], recorded: bool
    ) -> list[type[OperationContext]]:
        flags = iter(needs[2:])
        wants = [tuple(itertools.islice(flags, len(own.parameters))) for own in held]
        public_wants = [tuple(itertools.islice(flags, own.count(None))) for own in self.routing.sources]
        for (op, owner), own, wanted in zip(self.named, held, wants, strict=True):
            op.check_wants(own, wanted, owner)
        flows = [any(a) or any(b) for a, b in zip(wants, public_wants, strict=True)]
        first = 0 if needs[0] else flows.index(True) if True in flows else len(flows)
        first = first if recorded else len(flows)
        extra_wants = self.routing.wants(public_wants, first)
        return [
            OperationContext.kind(
                requires_grad=i >= first,
                input_requires_grad=i > first or (i == first == 0 and needs[0]),
                autocast_dtype=route.autocast_dtype,
                recipe=route.recipe,
                formulas=formulas(route.plain),
                owner=owner,
                wants=wanted,
                extra_wants=extra,
            )
            for i, ((_, owner), wanted, extra) in enumerate(zip(self.named, wants, extra_wants, strict=True))
        ]

    def _check_call(self, x: Tensor, extra_inputs: Sequence[Tensor], kwargs: Sequence[dict[str, Any]] | None) -> None:
        if len(extra_inputs) != self.num_extra_inputs:
            wants = [f"{owner}: {op.num_extra_inputs}" for op, owner in self.named if op.num_extra_inputs]
            detail = f" ({', '.join(wants)})" if wants else ""
            raise ValueError(f"Expected {self.num_extra_inputs} extra inputs but got {len(extra_inputs)}{detail}")
        if not isinstance(x, Tensor):
            raise TypeError(f"the input must be a tensor, got {type(x).__name__}")
        for (op, owner), given in zip(self.named, kwargs or (), strict=bool(kwargs)):
            if op.known_kwargs is not None and (unknown := set(given) - set(op.known_kwargs)):
                raise TypeError(f"{owner} takes no keyword argument {sorted(unknown)[0]!r}")
