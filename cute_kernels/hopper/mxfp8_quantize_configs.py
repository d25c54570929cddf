"""How many warps a CTA of each of MXFP8's kernels that quantise and restore has. Plain Python; no CUTLASS, no GPU."""

from __future__ import annotations

from dataclasses import dataclass

RESTORE_WARPS = 16


@dataclass(frozen=True)
class QuantizeOptions:
    """Static facts of one compiled kernel: which results are wanted. square: rowwise is in blocks of 32x32."""

    rowwise: bool
    columnwise: bool
    stored: bool
    square: bool = False


def warps_of(options: QuantizeOptions) -> int:
    """As many as leave each thread the registers that it needs."""
    if options.square or (options.columnwise and options.stored):
        return 12
    return 14 if options.columnwise and options.rowwise else 16
