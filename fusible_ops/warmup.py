"""Kernels compiled ahead of time: which ones a model needs, and a directory (a pack) that holds them.

    specs = kernels_of(model, "sm_90a")
    compile_pack(specs, Path("kernels"))

Neither needs a GPU, and the model may be on the meta device. Shipping a pack, and the licence of what compiles it:
docs/warmup.md.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from cute_kernels import launch
from cute_kernels.rehearsal import rehearsal
from cute_kernels.scheduling import LONG_ROWS
from cute_kernels.target import Target
from fusible_ops.autocast_mode import autocast
from fusible_ops.fuser import OperationFuser
from fusible_ops.grouped_linear import GroupedLinear
from fusible_ops.meta_run import Use, as_under, extra_inputs, input_width, on_meta
from fusible_ops.op import BasicOperation
from fusible_ops.sequential import Sequential
from patterns import Bound, Step

PLAIN = Use()
ROWS = (*range(64, 2113, 64), LONG_ROWS - 1, LONG_ROWS)
"""Row counts at which kernels are chosen anew (`cute_kernels.hopper.configs.row_class`, `cute_kernels.scheduling`), and
one for all beyond.
"""
ROWS_A_GROUP = 65
"""Rows a group beyond which weight gradients are the same."""


def kernels_of(model: nn.Module, arch: str = "sm_90a", use: Use = PLAIN) -> list[launch.Spec]:
    """The kernels of every `Sequential` in the model, for any row count; (device module, options, architecture).

    The model is left as it is. Ops that are not fused there need none; those that another library's kernels run, which
    cannot be kept (cuDNN Frontend's), are left out. Errors: ValueError for an unknown arch.
    """
    machine, copied = Target.named(arch), on_meta(model)
    with rehearsal(arch) as specs, autocast(enabled=use.recipe is not None, recipe=use.recipe), as_under(use.autocast):
        for run, step, _ in _fused(copied, machine, use):
            if all(bound.kernel.is_kept for bound in step.kernels):
                ops = run.ops[step.start : step.stop]
                _rehearse(OperationFuser(ops, rules=run.rules, sharing=run.sharing), use)
    return list(specs)


def compiled_at_first_call(model: nn.Module, arch: str, use: Use = PLAIN) -> list[tuple[str, list[Bound]]]:
    """The kernels of a model that no pack can hold, and that every process compiles anew (cuDNN Frontend's): for each
    fused step, the ops that it runs and its kernels. Steps that are alike share them.
    """
    found = []
    for _, step, title in _fused(model, Target.named(arch), use):
        later = [bound for bound in step.kernels if not bound.kernel.is_kept]
        found += [(title, later)] if later else []
    return found


def _fused(model: nn.Module, machine: Target, use: Use) -> Iterator[tuple[OperationFuser, Step, str]]:
    """Every step of a run in the model that a rule takes there; with its run, and what its ops are called."""
    for module in model.modules():
        for run in module.groups() if isinstance(module, Sequential) else ():
            if isinstance(run, OperationFuser):
                made = run.plan(machine, use.autocast, use.recipe)
                for step in made.steps:
                    if step.rule is not None:
                        yield run, step, ", ".join(op.title for op in made.chain.ops[step.start : step.stop])


def _rehearse(run: OperationFuser, use: Use) -> None:
    """Forward and backward of one run at every row count that matters."""
    groups = [op.num_groups for op in run.basic_ops if isinstance(op, GroupedLinear)]
    dtype = next((op.weight_dtype for op in run.basic_ops if op.weight_dtype), torch.get_default_dtype())
    _give_main_grads(run.basic_ops)
    for rows in (*ROWS, ROWS_A_GROUP * max(groups, default=1)):
        x = torch.empty(rows, input_width(run), dtype=dtype, device="meta")
        if use.training:
            y = run(x.requires_grad_(), *extra_inputs(run, rows, use))
            if y.requires_grad:
                y.backward(torch.empty_like(y))
        if use.inference:
            with torch.no_grad():
                run(x, *extra_inputs(run, rows, use))


def _give_main_grads(ops: Iterable[BasicOperation]) -> None:
    """FP32 `main_grad` buffers where ops add to them."""
    for op in ops:
        if getattr(op, "accumulate_into_main_grad", False):
            for p in op.parameters():
                p.main_grad = torch.empty_like(p, dtype=torch.float32, requires_grad=False)  # type: ignore[attr-defined]


# ----------------------------------------------------------------------------------------------------------------------
# Compiling


@dataclass(frozen=True)
class Compiled:
    """One kernel of a pack. new: it was compiled now, not there already. seconds: what that took."""

    spec: launch.Spec
    new: bool
    seconds: float


def compile_pack(
    specs: Sequence[launch.Spec], directory: Path, jobs: int = 1, report: Callable[[Compiled], None] = lambda made: None
) -> list[Compiled]:
    """Compile the kernels into `directory`, `jobs` at a time; `report` is told of each as it is done.

    Those that are there are left alone. Errors: `launch.MissingPackageError` without the compiler,
    `launch.CompileError`.
    """
    launch.toolchain()
    directory.mkdir(mode=0o755, parents=True, exist_ok=True)  # others may read it: a pack is handed on
    made = []
    context = multiprocessing.get_context("spawn")  # the compiler keeps its state in globals
    with ProcessPoolExecutor(max(1, min(jobs, len(specs))), mp_context=context) as pool:
        waiting = [pool.submit(_compile, spec, directory) for spec in specs]
        for done in as_completed(waiting):
            made.append(done.result())
            report(made[-1])
    return made


def _compile(spec: launch.Spec, directory: Path) -> Compiled:
    began = time.perf_counter()
    new = launch.precompile(*spec, pack=directory)
    return Compiled(spec, new, time.perf_counter() - began)
