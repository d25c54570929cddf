"""Facts of one FP8 weight gradient -> how the SM90 kernel runs it. Plain Python; no CUTLASS, no GPU."""

from __future__ import annotations

from dataclasses import dataclass

from cute_kernels.hopper.grouped_wgrad_configs import SLOT_ROW_BYTES, SLOT_ROWS, STRIP_ROWS, rows_lie_together

TEAMS = 3
"""Warpgroups that multiply, each 64 rows of a tile."""

TILE_ROWS, TILE_COLUMNS = 64 * TEAMS, 128

STAGE_BYTES = (TILE_ROWS + TILE_COLUMNS) * (128 + 4)
"""A block of 128 tokens and its scales."""

STRIP = STRIP_ROWS // TILE_ROWS
"""Row tiles of a strip."""


@dataclass(frozen=True)
class Fp8WgradConfig:
    """Static shape of one kernel. Fields as in `grouped_wgrad_configs.WgradConfig`."""

    stages: int
    slots: int
    by_tma: bool

    def smem_bytes(self) -> int:
        """Shared memory used, in bytes, with an upper bound for barriers, plans and alignment."""
        staging = TEAMS * self.slots * SLOT_ROWS * SLOT_ROW_BYTES if self.by_tma else 0
        return self.stages * STAGE_BYTES + staging + 3072


def choose(out_bytes: int, accumulate: bool, rows: int, block: int) -> Fp8WgradConfig:
    """The configuration for a gradient of `rows` rows and elements of `out_bytes` bytes.

    block: rows of an interleaved block, 0 for none.
    """
    by_tma = not accumulate and out_bytes == 2 and rows_lie_together(rows, block)
    return Fp8WgradConfig(4 if by_tma else 5, 2, by_tma)


def grid(groups: int, rows: int, columns: int, sms: int) -> int:
    """CTAs to launch: one an SM, no more than there are tiles."""
    return max(1, min(sms, groups * -(-rows // TILE_ROWS) * -(-columns // TILE_COLUMNS)))
