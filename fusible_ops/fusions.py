"""Fusions that a program registers for all runs, as Transformer Engine has them. Rules, which know when they apply and
say why not, are the other way (`patterns.Rule`, given to a `Sequential`).

A fusion function is `fn(ops, *, recipe) -> ops`: it gets the basic ops of a run, some of which earlier functions may
have replaced, and puts a `FusedOperation` in the place of those that it takes. It sees ops and the recipe (None where
nothing is quantised), not tensors. What fusion functions leave alone the rules may take. A run is planned once for
each kind of call: functions registered after that do not reach it.
Source: the interface is that of transformer_engine.pytorch.ops (2.20).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fusible_ops.op import BasicOperation, FusedOperation, FusibleOperation

FusionFunction = Callable[..., Sequence[FusibleOperation]]

JOINT: list[FusionFunction] = []
FORWARD: list[FusionFunction] = []
BACKWARD: list[FusionFunction] = []


def register_forward_backward_fusion(op_fusion_func: FusionFunction, prepend: bool = False) -> None:
    """Fused operations of this function run forward and backward. They may keep what only their backward knows.

    prepend: ask it before the functions that are registered already.
    """
    JOINT.insert(0 if prepend else len(JOINT), op_fusion_func)


def register_forward_fusion(op_fusion_func: FusionFunction, prepend: bool = False) -> None:
    """The same, forward alone: each basic op's context must be filled as the op itself would, which runs backward."""
    FORWARD.insert(0 if prepend else len(FORWARD), op_fusion_func)


def register_backward_fusion(op_fusion_func: FusionFunction, prepend: bool = False) -> None:
    """The same, backward alone: it finds contexts as the basic ops' own forward filled them."""
    BACKWARD.insert(0 if prepend else len(BACKWARD), op_fusion_func)


Placed = list[tuple[BasicOperation | FusedOperation, slice]]
"""What runs which basic ops, in order."""


def registered(ops: Sequence[BasicOperation], recipe: Any) -> tuple[Placed, Placed] | None:
    """(forward, backward) of these basic ops, as registered functions fuse them; None if there are none.

    RuntimeError if a function gives other ops, or in another order.
    """
    if not (JOINT or FORWARD or BACKWARD):
        return None
    joint = _applied(JOINT, ops, recipe)
    return tuple(_placed(_applied(functions, joint, recipe), ops) for functions in (FORWARD, BACKWARD))  # type: ignore[return-value]


def told(ops: Sequence[BasicOperation], recipe: Any) -> list[str]:
    """Which registered fusions take which of these ops, a line each; nothing where there are none."""
    lines: list[str] = []
    for direction, placed in zip(("forward", "backward"), registered(ops, recipe) or (), strict=False):
        for op, span in placed:
            if op.is_fused_op:
                names = ", ".join(type(part).__name__ for part in ops[span])
                lines.append(f"registered, {direction}: {type(op).__name__} takes {names}")
    return lines


def _applied(
    functions: Sequence[FusionFunction], ops: Sequence[FusibleOperation], recipe: Any
) -> Sequence[FusibleOperation]:
    for function in functions:
        ops = function(list(ops), recipe=recipe)
    return ops


def _placed(fused: Sequence[FusibleOperation], ops: Sequence[BasicOperation]) -> Placed:
    placed, at = [], 0
    for op in fused:
        parts = list(op.basic_ops) if isinstance(op, FusedOperation) else [op]
        if [id(part) for part in parts] != [id(own) for own in ops[at : at + len(parts)]]:
            _refuse(fused, ops)
        placed.append((op, slice(at, at + len(parts))))
        at += len(parts)
    if at != len(ops):
        _refuse(fused, ops)
    return placed  # type: ignore[return-value]


def _refuse(fused: Sequence[object], ops: Sequence[object]) -> None:
    names = [[type(op).__name__ for op in given] for given in (ops, fused)]
    raise RuntimeError(f"Found mismatch after fusing operations (basic_ops={names[0]}, fused_ops={names[1]})")
