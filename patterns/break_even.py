"""From how many rows on E4M3 in blocks pays over BF16 in a training step: an estimate from the widths alone.

Of a fused layer on an H200. Each of a linear's three products takes as long as its arithmetic or its bytes, whichever
is longer. FP8 multiplies faster and reads half the bytes, but quantises: the first input and the last gradient, which
no product writes, into both orientations; and the weights, after each update. The rates are fitted to three layers'
forward and backward on an H200 (docs/performance.md, "The FP8 layer"): within 9 % of each of its times.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from typing import NamedTuple

from patterns.chain import LINEAR_KINDS, OpSpec

FP8_BLOCKS = "Float8BlockScaling"
"""The recipe that this is about."""
BF16_FLOPS, FP8_FLOPS = 700e12, 960e12
"""Floating-point operations a second of products and what is fused into them."""
BYTES = 2.4e12
"""Bytes a second, read and written; kernels of few bytes, and epilogues that quantise, included."""
LAUNCHES = 6 * 3e-6
"""Seconds that FP8's further launches take: two quantise rows, two weights, and each waits for the one before."""
MOST_ROWS = 2**24


class Linear(NamedTuple):
    """groups weights [n, k]."""

    groups: int
    k: int
    n: int


def linears_of(ops: Iterable[OpSpec]) -> tuple[Linear, ...]:
    """Those among the ops."""
    found = [op.facts for op in ops if op.kind in LINEAR_KINDS]
    return tuple(Linear(f.get("num_groups", 1), f["in_features"], f["out_features"]) for f in found)  # type: ignore


def bf16_seconds(linears: tuple[Linear, ...], rows: int) -> float:
    """Of forward and backward."""
    total = 0.0
    for groups, k, n in linears:
        moved = 2 * (rows * (k + n) + groups * k * n)
        total += 3 * max(2 * rows * k * n / BF16_FLOPS, moved / BYTES)
    return total


def fp8_seconds(linears: tuple[Linear, ...], rows: int, updates: bool) -> float:
    """The same in FP8. updates: weights changed since the last step, so they are quantised."""
    total = LAUNCHES + 4 * rows * (linears[0].k + linears[-1].n) / BYTES
    for groups, k, n in linears:
        weights = groups * k * n
        moved = (rows * (k + 2 * n) + weights, rows * (n + 2 * k) + weights, rows * (k + n) + 2 * weights)
        total += sum(max(2 * rows * k * n / FP8_FLOPS, one / BYTES) for one in moved)
        total += 4 * weights / BYTES if updates else 0.0
    return total


@functools.lru_cache(1024)
def least_rows(linears: tuple[Linear, ...], updates: bool = True) -> int | None:
    """The row count (to two digits) from which on FP8 is faster; None if it never is, up to 2^24 rows."""
    pays = None
    for step in itertools.count():
        rows = round(128 * 2 ** (step / 8))
        if rows > MOST_ROWS:
            return None if pays is None else _two_digits(pays)
        faster = fp8_seconds(linears, rows, updates) < bf16_seconds(linears, rows)
        pays = (pays or rows) if faster else None
    raise AssertionError


def _two_digits(number: int) -> int:
    unit = 10 ** max(0, len(str(number)) - 2)
    return -(-number // unit) * unit


def break_even(linears: tuple[Linear, ...]) -> str:
    """In words."""
    each, kept = least_rows(linears), least_rows(linears, updates=False)
    if kept is None:
        return "never pays over bfloat16: quantising costs more than the products save"
    text = f"{each:,} rows" if each is not None else "no number of rows"
    if each is not None and each <= 128:
        return "pays over bfloat16 with any number of rows"
    return f"pays over bfloat16 from about {text} on; between updates of the weights from {kept:,}"
