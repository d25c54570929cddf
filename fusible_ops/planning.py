"""From the plan of a run to the steps that it takes: fused operations that rules name, or that somebody registered, and
unfused ops.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from cute_kernels.limits import dtype_name
from cute_kernels.target import Target
from fusible_ops import fusions
from fusible_ops.op import FusedOperation, FusibleOperation
from fusible_ops.recipe import Recipe
from fusible_ops.route import Step
from patterns import Chain, Plan, Refused, explain, plan

if TYPE_CHECKING:
    from fusible_ops.fuser import OperationFuser


def planned_steps(
    fuser: OperationFuser, device: torch.device, autocast_dtype: torch.dtype | None, recipe: Recipe | None
) -> tuple[Sequence[Step], Sequence[Step]]:
    """Those of forward, and of backward: one list, unless somebody registered a fusion."""
    fused = fusions.registered(fuser.basic_ops, recipe)
    if fused is None:
        made = fuser.plan(Target.of(device), autocast_dtype, recipe)
        steps = _told_neighbours(_by_rules(made, fuser.ops, fuser.names, fuser.on_unfused, recipe), recipe)
        return steps, steps
    taken = {i for placed in fused for op, span in placed if op.is_fused_op for i in range(span.start, span.stop)}
    rest: list[Step] = []
    target = Target.of(device)
    failed = fuser.failed(target, autocast_dtype, recipe)
    for start, ops, names in _runs(fuser, taken):
        chain = described(ops, names, autocast_dtype, recipe)
        made = plan(chain, target, fuser.rules, failed_among(ops, start, failed))
        for step in _by_rules(made, ops, names, fuser.on_unfused, recipe):
            rest.append(replace(step, span=slice(start + step.span.start, start + step.span.stop)))
    forward, backward = (
        [*rest, *[Step(op, span, type(op).__name__) for op, span in placed if span.start in taken]] for placed in fused
    )
    for steps in (forward, backward):
        steps.sort(key=lambda step: step.span.start)
    return _told_neighbours(forward, recipe), _told_neighbours(backward, recipe)


def foreseen(fuser: OperationFuser, made: Plan, recipe: Recipe | None) -> list[str]:
    """What calls by this plan of the run will raise, whatever input they are given: when, and with which text.

    Margins are looked at where no registered fusion takes ops of the run: what is left then may be other steps.
    """
    found = []
    for op, owner in fuser.named:
        try:
            op.check_parameters(op.hold(owner), owner)
        except (RuntimeError, TypeError, ValueError) as error:
            found.append(f"any call: {error}")
    if recipe is None or not fuser.sharing.sm_margin or fusions.registered(fuser.basic_ops, recipe) is not None:
        return found
    for step in _by_rules(made, fuser.ops, fuser.names, "allow", recipe):
        weights = [part.first_weight for part in step.op.fusible_parts()]
        if isinstance(step.op, FusedOperation) and any(w is not None and w.requires_grad for w in weights):
            try:
                step.op.check_margin(recipe, fuser.sharing.sm_margin)
            except ValueError as error:
                found.append(f"a call that records gradients: {error}")
    return list(dict.fromkeys(found))


def _runs(fuser: OperationFuser, taken: set[int]) -> Iterator[tuple[int, list[FusibleOperation], list[str]]]:
    """Runs of what no registered fusion takes: (their first basic op, ops, names). A container of which a part is taken
    is as many basic ops.
    """
    at, start = 0, 0
    ops: list[FusibleOperation] = []
    names: list[str] = []
    for op, name in zip(fuser.ops, fuser.names, strict=True):
        parts = op.fusible_parts()
        whole = taken.isdisjoint(range(at, at + len(parts)))
        for each in [op] if whole else parts:
            count = len(each.fusible_parts())
            if at in taken:
                if ops:
                    yield start, ops, names
                ops, names = [], []
            else:
                start = start if ops else at
                ops.append(each)
                names.append(name)
            at += count
    if ops:
        yield start, ops, names


def described(
    ops: Sequence[FusibleOperation], names: Sequence[str], autocast_dtype: torch.dtype | None, recipe: Recipe | None
) -> Chain:
    """The ops as plain data. The compute dtype is autocast's, else that of the first weights."""
    own = [part.weight_dtype for op in ops for part in op.fusible_parts() if part.weight_dtype is not None]
    dtype = autocast_dtype or (own[0] if own else torch.get_default_dtype())
    specs = [replace(op.describe(), name=op.name or name) for op, name in zip(ops, names, strict=True)]
    recipe_spec = None if recipe is None else recipe.describe()
    return Chain(tuple(specs), dtype_name(dtype), recipe_spec, autocast=autocast_dtype is not None)


def failed_among(ops: Sequence[FusibleOperation], start: int, failed: Iterable[Refused]) -> tuple[Refused, ...]:
    """Those of `failed` that took some of these ops, the first of which is basic op `start`, counted in these ops
    instead of basic ops.
    """
    places = {start: 0}
    for i, op in enumerate(ops):
        start += len(op.fusible_parts())
        places[start] = i + 1
    return tuple(
        replace(one, start=places[one.start], stop=places[one.stop])
        for one in failed
        if one.start in places and one.stop in places
    )


def titled(ops: Sequence[FusibleOperation], names: Sequence[str]) -> list[str]:
    """What errors call the ops."""
    return [f"{type(op).__name__} {op.name or name}".rstrip() for op, name in zip(ops, names, strict=True)]


def _by_rules(
    made: Plan, ops: Sequence[FusibleOperation], names: Sequence[str], on_unfused: str, recipe: Recipe | None
) -> list[Step]:
    """Steps of these ops, of which `made` is the plan."""
    if made.unfused and on_unfused != "allow":
        text = explain(made)
        if on_unfused == "error":
            raise RuntimeError(f"some ops run unfused, and on_unfused='error':\n{text}")
        warnings.warn(f"some ops run unfused:\n{text}", stacklevel=9)  # the caller of the module
    steps: list[Step] = []
    at = 0
    for planned in made.steps:
        covered = ops[planned.start : planned.stop]
        titles = titled(covered, names[planned.start : planned.stop])
        parts = [part for op in covered for part in op.fusible_parts()]
        if planned.rule is not None:
            name = f"{planned.rule.name} ({', '.join(titles)})"
            op = _load(planned.rule.program)(parts)
            steps.append(Step(op, slice(at, at + len(parts)), name, rule=planned.rule.name))
        else:
            steps += _unfused(covered, titles, at, recipe)
        at += len(parts)
    return steps


def _unfused(ops: Sequence[FusibleOperation], titles: Sequence[str], at: int, recipe: Recipe | None) -> list[Step]:
    """Steps of these ops, the first of which is basic op `at`."""
    steps = []
    for op, title in zip(ops, titles, strict=True):
        quantizes = recipe is not None and op.quantized_program
        for runner in [_load(op.quantized_program)(op.fusible_parts())] if quantizes else op.unfused_steps():
            count = len(runner.fusible_parts())
            steps.append(Step(runner, slice(at, at + count), f"unfused {title}"))
            at += count
    return steps


def _told_neighbours(steps: list[Step], recipe: Recipe | None) -> list[Step]:
    """The steps, told in which formats those around them quantise what they give."""
    if recipe is None:
        return steps
    before = [None, *[step.op.grad_output_format(recipe) for step in steps]]
    after = [*[step.op.input_format(recipe) for step in steps[1:]], None]
    return [replace(step, before=b, after=a) for step, b, a in zip(steps, before, after, strict=False)]


def _load(program: str) -> type[FusedOperation]:
    """The fused operation with the dotted name "package.module:Class"."""
    module, _, name = program.partition(":")
    return getattr(importlib.import_module(module), name)
