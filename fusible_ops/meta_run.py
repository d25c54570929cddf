"""A model's runs on the meta device: a copy without values, inputs for any row count, no GPU and no memory."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fusible_ops import fuser
from fusible_ops.fuser import OperationFuser
from fusible_ops.grouped_linear import GroupedLinear
from fusible_ops.op import BasicOperation
from fusible_ops.recipe import Recipe


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


def on_meta(model: nn.Module) -> nn.Module:
    """A copy without values: parameters and buffers on the meta device, laid out as they are."""
    places: dict[int, object] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in model.parameters()
    }
    places |= {id(b): torch.empty_like(b, device="meta") for b in model.buffers()}
    return copy.deepcopy(model, places)


@contextlib.contextmanager
def as_under(autocast_dtype: torch.dtype | None) -> Iterator[None]:
    """On the meta device runs believe that `torch.autocast` is active, which there is none of for it."""
    former = fuser.autocast_dtype_on, fuser.without_autocast
    if autocast_dtype is not None:
        dtype_on, without = former
        fuser.autocast_dtype_on = lambda device: autocast_dtype if device.type == "meta" else dtype_on(device)
        fuser.without_autocast = lambda device, active: (
            contextlib.nullcontext() if device.type == "meta" else without(device, active)
        )
    try:
        yield
    finally:
        fuser.autocast_dtype_on, fuser.without_autocast = former


def extra_inputs(run: OperationFuser, rows: int, use: Use) -> Iterator[Tensor]:
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


def input_width(run: OperationFuser) -> int:
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
