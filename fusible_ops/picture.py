"""What a Sequential does, as data and as a page to look at: launches with their work, what is kept for backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cute_kernels.limits import dtype_name
from cute_kernels.rehearsal import rehearsal
from cute_kernels.target import Target
from fusible_ops.autocast_mode import autocast
from fusible_ops.fuser import OperationFuser
from fusible_ops.meta_run import Use, as_under, extra_inputs, input_width, on_meta
from fusible_ops.planning import foreseen
from fusible_ops.recipe import Recipe
from fusible_ops.sequential import Sequential
from patterns.picture import page
from patterns.work import MACHINES, launches

ROWS = 8192


def picture(
    model: Sequential,
    target: str = "sm_90a",
    rows: int = ROWS,
    dtype: torch.dtype | None = None,
    recipe: Recipe | None = None,
) -> str:
    """`as_data` as one HTML page that needs nothing else: ops, fused regions, launches against the machine's limits,
    what is kept for backward; conditions that kept a rule out show where the pointer rests. Arguments: as there.
    """
    return page(as_data(model, target, rows, dtype, recipe))


def as_data(
    model: Sequential,
    target: str = "sm_90a",
    rows: int = ROWS,
    dtype: torch.dtype | None = None,
    recipe: Recipe | None = None,
) -> list[dict[str, Any]]:
    """`Sequential.explain(as_data=True)`, and for each run at so many rows: "machine"; "launches" of each step
    (operations, bytes, the least seconds, see `patterns.work`); "kept": tensors that forward keeps for backward beside
    parameters, with their bytes, None where an op cannot be run without values (unfused ones, another library's).

    target: an architecture by name. dtype: as under `torch.autocast` in it. recipe: as under `autocast(recipe=recipe)`.
    No GPU is needed. Errors: ValueError for an unknown target.
    """
    found: list[dict[str, Any]] = []
    use = Use(autocast=dtype, recipe=recipe)
    machine = MACHINES.get(target)
    copied: Sequential = on_meta(model)  # type: ignore[assignment]
    for given, group in zip(model.groups(), copied.groups(), strict=True):
        if not (isinstance(given, OperationFuser) and isinstance(group, OperationFuser)):
            found.append({"module": type(group).__name__})
            continue
        plan = group.plan(Target.named(target), dtype, recipe)
        data = {**plan.as_data(), "raises": foreseen(given, plan, recipe)}
        data |= {"rows": rows, "machine": machine.name if machine else None}
        data["titles"] = [op.title for op in plan.chain.ops]
        data["why_not"] = [
            [f"{refused.rule}: {refused.first.stage}: {refused.first}" for refused in plan.why_not(s.start, s.stop)]
            for s in plan.steps
        ]
        data["launches"] = [
            [
                {
                    "kernel": launch.kernel,
                    "use": launch.use,
                    "backward": launch.backward,
                    "flops": launch.flops,
                    "bytes": launch.bytes,
                    "seconds": launch.seconds(machine),
                    "binds": launch.binds(machine),
                }
                for launch in launches(plan, step, rows)
            ]
            for step in plan.steps
        ]
        rehearsed = all(bound.kernel.is_kept for step in plan.steps for bound in step.kernels)
        data["kept"] = _kept(group, target, rows, use) if rehearsed else None
        found.append(data)
    return found


def _kept(run: OperationFuser, target: str, rows: int, use: Use) -> list[dict[str, Any]] | None:
    """The tensors that a forward of so many rows keeps for backward, beside parameters."""
    dtype = next((op.weight_dtype for op in run.basic_ops if op.weight_dtype), torch.get_default_dtype())
    x = torch.empty(rows, input_width(run), dtype=dtype, device="meta", requires_grad=True)
    extras = list(extra_inputs(run, rows, use))
    names = {_storage(p): "" for op in run.basic_ops for p in op.parameters()}
    names |= {_storage(t): "extra input" for t in extras} | {_storage(x): "the input"}
    kept: dict[int, Tensor] = {}

    def keep(t: Tensor) -> Tensor:
        if names.get(_storage(t)) != "":
            kept.setdefault(_storage(t), t)
        return t

    quantized = autocast(enabled=use.recipe is not None, recipe=use.recipe)
    watched = torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t)
    try:
        with rehearsal(target), quantized, as_under(use.autocast), watched:
            y = run(x, *extras)
    except (NotImplementedError, RuntimeError):
        return None
    names.setdefault(_storage(y), "the result")
    return [
        {
            "what": names.get(key) or _guess(t, run, rows),
            "shape": list(t.shape),
            "dtype": dtype_name(t.dtype),
            "bytes": t.untyped_storage().nbytes(),
        }
        for key, t in kept.items()
    ]


def _guess(t: Tensor, run: OperationFuser, rows: int) -> str:
    """What a tensor made in between is, by its shape."""
    if t.dtype == torch.int32:
        return "where groups start"
    if t.dtype == torch.float8_e4m3fn and t.dim() == 3:
        return "weights in FP8, the same until an update"
    if t.dtype == torch.float8_e8m0fnu or (t.dtype == torch.float32 and t.dim() > 1):
        return "scales of FP8"
    for op, title in run.named:
        if t.shape == (rows, op.output_width(op.input_width())):
            return f"what {title} gives" + ", in FP8" * (t.dtype == torch.float8_e4m3fn)
    if t.dtype == torch.float8_e4m3fn:
        return "rows in FP8"
    return "made in between"


def _storage(t: Tensor) -> int:
    return t.untyped_storage()._cdata
