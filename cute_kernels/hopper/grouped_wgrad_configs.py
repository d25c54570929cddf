"""Facts of one weight gradient -> how the SM90 kernel runs it, with the reasons. Plain Python; no CUTLASS, no GPU.

A `WgradConfig` is a value, part of the key a compiled kernel is cached under; `choose` is pure. The percentages were
measured on one H200 (2026-11-30) at the six shapes that `grouped_wgrad_kernel` lists.
"""

from __future__ import annotations

from dataclasses import dataclass

TILE_ROWS, TILE_COLUMNS, TILE_TOKENS = 128, 192, 64
"""What one warpgroup adds up: a tile of a gradient [N, K], and how many tokens a stage of the ring brings."""

SLOT_ROWS, SLOT_ROW_BYTES = 64, 128
"""A staging slot of a warpgroup; a warp owns 16 of its rows."""

STRIP_ROWS = 2048
"""Rows of a gradient whose tiles run together. 132 tiles of 128 x 192 then cover some 2000 rows and 1600 columns, which
asks for the fewest operand bytes from memory."""


@dataclass(frozen=True)
class WgradConfig:
    """Static shape of one kernel.

    cluster: CTAs that take row tiles beside each other and share x's tile. stages: of the operand ring. slots: staging
    slots a warpgroup. by_tma: results leave by TMA, 16 rows of the weight at a time; else by 16-byte row stores.
    """

    cluster: int
    stages: int
    slots: int
    by_tma: bool

    def smem_bytes(self) -> int:
        """Shared memory used, in bytes, with an upper bound for barriers."""
        operands = self.stages * (TILE_ROWS + TILE_COLUMNS) * TILE_TOKENS * 2
        return operands + 2 * self.slots * SLOT_ROWS * SLOT_ROW_BYTES + 1024

    def strip(self) -> int:
        """Clusters of row tiles in a strip."""
        return STRIP_ROWS // (TILE_ROWS * self.cluster)

    def grid(self, groups: int, rows: int, columns: int, sms: int) -> int:
        """CTAs to launch: one an SM, whole clusters, no more than there are tiles."""
        return max(1, min(sms // self.cluster, groups * self.tiles(rows, columns))) * self.cluster

    def tiles(self, rows: int, columns: int) -> int:
        """Tiles of one group, a cluster's together: row tiles beside each other, of a last odd one columns."""
        units, odd = divmod(-(-rows // TILE_ROWS), self.cluster)
        column_tiles = -(-columns // TILE_COLUMNS)
        return units * column_tiles + (-(-column_tiles // self.cluster) if odd else 0)


@dataclass(frozen=True)
class WgradChoice:
    """A configuration and why it was chosen, one sentence a fact."""

    config: WgradConfig
    reasons: tuple[str, ...]


def rows_lie_together(rows: int, block: int) -> bool:
    """Whether every 16 rows of a tile are 16 rows of the weight. block: as in `choose`."""
    return block == 0 or (block % 16 == 0 and rows % 32 == 0)


def choose(rows: int, out_bytes: int, accumulate: bool, block: int, few: bool = False) -> WgradChoice:
    """The configuration for a gradient of `rows` rows and elements of `out_bytes` bytes.

    block: rows of an interleaved block, 0 for none. few: a group has at most one k block of tokens, on average.
    """
    together = rows_lie_together(rows, block)
    if accumulate:
        return _choose_adding(rows, out_bytes, together)
    paired = rows > TILE_ROWS
    why_cluster = (
        "two CTAs share x's tile, or, of a last odd row tile, take two columns: up to 2 % faster"
        if paired
        else "one row tile: nobody to share x's tile with"
    )
    if out_bytes == 4:
        by_tma, why = False, "FP32 leaves from registers: 3 % faster than staged, which costs shared memory's bandwidth"
    elif not together:
        by_tma, why = False, "16 rows of a tile may lie apart in the weight: stored from registers"
    elif few:
        by_tma, why = False, "one k block a tile, so stores are all there is: 3 to 7 % faster from registers"
    else:
        by_tma, why = True, "16 rows of a tile are 16 rows of the weight: TMA stores them, up to 3 % faster"
    why_room = "5 stages; one slot of staging, if any: stores that wait for each other hold up the loads least"
    return WgradChoice(WgradConfig(2 if paired else 1, 5, 1, by_tma), (why_cluster, why, why_room))


def _choose_adding(rows: int, out_bytes: int, together: bool) -> WgradChoice:
    """For gradients that are added to what is there."""
    paired = -(-rows // TILE_ROWS) % 2 == 0
    why_cluster = (
        "row tiles pair, so two CTAs share x's tile: up to 2 % faster"
        if paired
        else "an odd number of row tiles: a pair more would multiply zeros, 2 to 4 % slower"
    )
    why_tma = (
        "16 rows of a tile are 16 rows of the weight: TMA stores them, up to 10 % faster than row by row"
        if together
        else "16 rows of a tile may lie apart in the weight: stored row by row"
    )
    why_room = "4 stages leave room to fetch old values ahead; 3 stages and more room are 6 to 12 % slower"
    slots = 4 if out_bytes == 4 else 3
    return WgradChoice(WgradConfig(2 if paired else 1, 4, slots, together), (why_cluster, why_tma, why_room))
