"""Named cases that every test of a grouped op goes through: awkward splits, and shapes small enough for a CPU.

@pytest.mark.parametrize("splits", SPLITS, ids=str)
def test_it(splits): ... splits.sizes, splits.rows, splits.tensor(device)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Splits:
    """Rows per group, and the rows of the input; `rows` may exceed the sum, and then the rest is the tail."""

    name: str
    sizes: tuple[int, ...]
    rows: int

    def __str__(self) -> str:
        return self.name

    @property
    def groups(self) -> int:
        return len(self.sizes)

    @property
    def used(self) -> int:
        return sum(self.sizes)

    def tensor(self, device: torch.device | str = "cpu", dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(self.sizes, dtype=dtype, device=device)

    def slices(self) -> list[slice]:
        """The rows of each group."""
        starts = [sum(self.sizes[:g]) for g in range(self.groups)]
        return [slice(start, start + size) for start, size in zip(starts, self.sizes, strict=True)]


def full(name: str, *sizes: int) -> Splits:
    """Splits whose sum is all of the rows."""
    return Splits(name, sizes, sum(sizes))


EVEN = full("even", 16, 16, 16, 16)
EMPTY_FIRST = full("empty_first", 0, 20, 12)
EMPTY_MIDDLE = full("empty_middle", 13, 0, 0, 19)
EMPTY_LAST = full("empty_last", 21, 11, 0)
ONE_TOKEN = full("one_token", 0, 1, 0)
ALL_IN_ONE = full("all_in_one", 0, 0, 40, 0)
ZERO_TOKENS = full("zero_tokens", 0, 0, 0)
ONE_GROUP = full("one_group", 33)
OFF_TILE = full("off_tile", 127, 129, 1, 255)
ON_TILE = full("on_tile", 128, 256, 0, 128)
TAIL = Splits("tail", (9, 0, 14), rows=40)
ONLY_TAIL = Splits("only_tail", (0, 0), rows=24)

SPLITS = (
    EVEN,
    EMPTY_FIRST,
    EMPTY_MIDDLE,
    EMPTY_LAST,
    ONE_TOKEN,
    ALL_IN_ONE,
    ZERO_TOKENS,
    ONE_GROUP,
    OFF_TILE,
    ON_TILE,
    TAIL,
    ONLY_TAIL,
)
"""Every case, small ones first to last; OFF_TILE and ON_TILE are around tiles of 128 rows."""

SMALL_SPLITS = (EVEN, EMPTY_MIDDLE, ONE_TOKEN, ALL_IN_ONE, ZERO_TOKENS, TAIL)
"""One of each kind, for tests with many other parameters."""


@dataclass(frozen=True)
class Shape:
    """Feature sizes of a gated MLP: H hidden, I intermediate (FC1 has 2I outputs)."""

    name: str
    hidden: int
    intermediate: int

    def __str__(self) -> str:
        return self.name


SHAPES = (
    Shape("tiny", 16, 8),
    Shape("odd_multiples_of_8", 40, 24),
    Shape("power_of_2", 64, 128),
    Shape("wide", 32, 160),
)
