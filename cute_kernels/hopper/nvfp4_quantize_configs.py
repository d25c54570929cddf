"""How many warps a CTA of each of NVFP4's kernels of a matrix has, and how many pieces of each are on their way.

Plain Python; no CUTLASS, no GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

AMAX_WARPS, RESTORE_WARPS = 24, 24


@dataclass(frozen=True)
class QuantizeOptions:
    """Static facts of one compiled kernel: which results are wanted, of columnwise and stored one. square: rowwise is
    in blocks of 16x16. rotates: what lies in columns. stochastic: how values are rounded.
    """

    rowwise: bool
    columnwise: bool
    stored: bool
    rotates: bool = False
    stochastic: bool = False
    square: bool = False


def warps_of(options: QuantizeOptions) -> int:
    """Few: what the first pieces of all warps take, and the last, memory has nothing to do meanwhile."""
    return 24 if options.square else 8


def ahead_of(options: QuantizeOptions) -> int:
    """Pieces of a warp that are asked for: with rows, which leave from there, there is room for one more."""
    return 2 if options.square else 5
