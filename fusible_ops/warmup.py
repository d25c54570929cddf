"""Kernels compiled ahead of time: which ones a model needs, and a directory (a pack) that holds them.

    specs = kernels_of(model, "sm_90a")
    compile_pack(specs, Path("kernels"))

Neither needs a GPU, and the model may be on the meta device. Shipping a pack, and the licence of what compiles it:
docs/warmup.md.
"""

from __future__ import annotations

import contextlib
import copy
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from cute_kernels import launch
from cute_kernels.rehearsal import rehearsal
from cute_kernels.target import Target
from fusible_ops import fuser
from fusible_ops.autocast_mode import autocast
from fusible_ops.fuser import OperationFuser
from fusible_ops.grouped_linear import GroupedLinear
from fusible_ops.op import BasicOperation
from fusible_ops.recipe import Recipe
from fusible_ops.sequential import Sequential

ROWS = tuple(range(64, 2113, 64))
"""Row counts at which kernels are chosen anew (`cute_kernels.hopper.configs.row_class`), and one for all beyond."""
ROWS_A_GROUP = 65
"""Rows a group beyond which weight gradients are the same."""


@dataclass(frozen=True)
class Use:
    """How a model is used, as far as kernels depend on it.

    training: forward and backward, with gradients of the input, of every parameter that requires one and of per-row
    factors. inference: forward under `torch.no_grad()`. probs, splits: dtypes of per-row factors and of split sizes.
    autocast: as under `torch.autocast(dtype=autocast)`. recipe: as under `autocast(recipe=recipe)`.
    """

    training: bool = True
    inference: bool = True
    probs: torch.dtype = torch.float32
    splits: torch.dtype = torch.int64
    autocast: torch.dtype | None = None
    recipe: Recipe | None = None


def kernels_of(model: nn.Module, arch: str = "sm_90a", use: Use = Use()) -> list[launch.Spec]:
    """The kernels of every `Sequential` in the model, for any row count; (device module, options, architecture).

    The model is left as it is. Ops that are not fused there need none. Errors: ValueError for an unknown arch.
    """
    machine, copied = Target.named(arch), _on_meta(model)
    with rehearsal(arch) as specs, autocast(enabled=use.recipe is not None, recipe=use.recipe), _as_under(use.autocast):
        for module in copied.modules():
            for run in module.groups() if isinstance(module, Sequential) else ():
                if isinstance(run, OperationFuser):
                    for step in run.plan(machine, use.autocast, use.recipe).steps:
                        if step.rule is not None:
                            ops = run.ops[step.start : step.stop]
                            _rehearse(OperationFuser(ops, rules=run.rules, sharing=run.sharing), use)
    return list(specs)


@contextlib.contextmanager
def _as_under(autocast_dtype: torch.dtype | None) -> Iterator[None]:
    """Runs believe that `torch.autocast` is active, which there is none of for the meta device."""
    former = fuser.autocast_dtype_on, fuser.without_autocast
    if autocast_dtype is not None:
        fuser.autocast_dtype_on = lambda device: autocast_dtype
        fuser.without_autocast = lambda device, active: contextlib.nullcontext()
    try:
        yield
    finally:
        fuser.autocast_dtype_on, fuser.without_autocast = former


def _on_meta(model: nn.Module) -> nn.Module:
    """A copy without values: parameters and buffers on the meta device, laid out as they are."""
    places: dict[int, object] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in model.parameters()
    }
    places |= {id(b): torch.empty_like(b, device="meta") for b in model.buffers()}
    return copy.deepcopy(model, places)


def _rehearse(run: OperationFuser, use: Use) -> None:
    """Forward and backward of one run at every row count that matters."""
    groups = [op.num_groups for op in run.basic_ops if isinstance(op, GroupedLinear)]
    dtype = next((op.weight_dtype for op in run.basic_ops if op.weight_dtype), torch.get_default_dtype())
    _give_main_grads(run.basic_ops)
    for rows in (*ROWS, ROWS_A_GROUP * max(groups, default=1)):
        x = torch.empty(rows, _input_width(run), dtype=dtype, device="meta")
        if use.training:
            y = run(x.requires_grad_(), *_extra_inputs(run, rows, use))
            if y.requires_grad:
                y.backward(torch.empty_like(y))
        if use.inference:
            with torch.no_grad():
                run(x, *_extra_inputs(run, rows, use))


def _extra_inputs(run: OperationFuser, rows: int, use: Use) -> Iterator[Tensor]:
    """Split sizes, the same tensor wherever the number of groups is, and per-row factors."""
    splits: dict[int, Tensor] = {}
    factors = torch.empty(rows, dtype=use.probs, device="meta", requires_grad=use.training)
    for op in run.basic_ops:
        for slot in range(op.num_extra_inputs):
            if slot == op.split_sizes_slot and isinstance(op, GroupedLinear):
                made = torch.empty(op.num_groups, dtype=use.splits, device="meta")
                yield splits.setdefault(op.num_groups, made)
            else:
                yield factors


def _input_width(run: OperationFuser) -> int:
    """Columns that the run's first op takes; of ops before the first linear, those that it makes of them."""
    wanted = next((width for op in run.basic_ops if (width := op.input_width()) is not None), 8)
    before = [*_leading(run.basic_ops)]
    for width in (wanted, 2 * wanted):
        given: int | None = width
        with contextlib.suppress(ValueError):
            for op in before:
                given = op.output_width(given)
            if given == wanted:
                return width
    return wanted


def _leading(ops: Sequence[BasicOperation]) -> Iterator[BasicOperation]:
    for op in ops:
        if op.input_width() is not None:
            return
        yield op


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
