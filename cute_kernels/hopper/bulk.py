"""Zeros to global memory by the TMA unit, out of a piece of shared memory: no thread's stores, few instructions."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, range_constexpr
from cutlass.cutlass_dsl import dsl_user_op

from cute_kernels.hopper.asm import asm

ZERO_BYTES = 1024
"""Bytes of the piece. Writers whose pieces lie beside each other at any time were faster than with 8 KiB in turn."""


@dsl_user_op
def bulk_store(address, piece, size, *, loc=None, ip=None):
    """`size` bytes from `piece` in shared memory on to global memory; addresses and size are multiples of 16."""
    text = "cp.async.bulk.global.shared::cta.bulk_group [$0], [$1], $2;"
    asm(None, (Int64(address), Int32(piece), Int32(size)), text, "l,r,r", loc, ip, effects=True)


@cute.jit
def clear(zeros: cute.Tensor):
    """A warp fills the piece, int32 [ZERO_BYTES / 4], with zeros that the TMA unit sees."""
    for step in range_constexpr(ZERO_BYTES // 128):
        zeros[step * 32 + cute.arch.lane_idx()] = Int32(0)
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_warp()


@cute.jit
def zero_rows(out: cute.Tensor, first_row, zeros: cute.Tensor, worker, workers):
    """out[first_row:] = 0 by a warp of each worker; rows are contiguous and start at multiples of 16 bytes."""
    if cute.arch.lane_idx() == 0:
        row_bytes = Int64(out.shape[1]) * (out.element_type.width // 8)
        begin, end = out.iterator.toint() + first_row * row_bytes, out.iterator.toint() + out.shape[0] * row_bytes
        begin += Int64(worker) * ZERO_BYTES
        while begin < end:
            bulk_store(begin, zeros.iterator.toint(), Int32(cutlass.min(end - begin, Int64(ZERO_BYTES))))
            begin += Int64(workers) * ZERO_BYTES
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)
