"""Warps of a CTA of MXFP8's kernels that quantise and restore, rows of a piece. Plain Python; no CUTLASS, no GPU."""

from __future__ import annotations

from dataclasses import dataclass

WARPS, RESTORE_WARPS = 12, 16
RESTORED_ROWS = 16
"""Of a piece to restore: half a block, so that a thread has room for the next."""


@dataclass(frozen=True)
class QuantizeOptions:
    """Static facts of one compiled kernel: which results are wanted. square: rowwise is in blocks of 32x32."""

    rowwise: bool
    columnwise: bool
    stored: bool
    square: bool = False
