"""Which tile number comes next: computed (static), or taken from a counter in global memory (dynamic).

A worker is a CTA, or a cluster whose CTAs work on the same tile numbers. Entry e of its list of numbers is

    static    worker + e * workers
    dynamic   what the counter held when the worker's producer warp added 1 to it for the e-th time

Either way numbers grow along the list and the first one past the last tile ends it, so a worker that is slowed down by
something else on its SM takes fewer tiles when it asks for each. Every tile is computed by one worker in the same order
of sums: results are the same bits.

The counter (int32 [1]) is zero before and after: of T tiles, W workers ask T + W times, and who gets the last number,
T + W - 1, puts it back to zero. So a launch needs no other that clears it, and one counter serves launch after launch,
replays of a graph included, as long as they do not overlap.

Passing numbers round: a ring of DEPTH entries in shared memory of each CTA. The first CTA's producer warp writes them
(`publish`): it waits until entry e - DEPTH has been read in all CTAs, then stores e and arrives at a barrier, in a
cluster by st.async in each CTA. Every reading warp waits for that, reads, and arrives at a second barrier, in the first
CTA.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr, range_constexpr
from cutlass.cutlass_dsl import dsl_user_op

from cute_kernels.hopper.asm import asm

DEPTH = 4
"""Entries of the ring, a power of two: how far the producer warp may be ahead of the slowest reader."""
AHEAD = 4
"""Stages before the end of a tile's loads at which the next number is asked for: its latency, less than one
microsecond, passes meanwhile, and nobody holds a tile long before it can be worked on."""


class Tickets(NamedTuple):
    """counter: int32 [1] in global memory. full, empty: DEPTH barriers each. numbers: int32 [DEPTH]."""

    counter: Any
    full: Any
    empty: Any
    numbers: Any


@cute.jit
def make(counter: cute.Tensor, barriers: cute.Pointer, numbers: cute.Tensor, readers: cutlass.Constexpr):
    """The tickets of this CTA; `readers` warps of the whole cluster read each entry.

    Called by all threads before the initialisations of other barriers are fenced and the cluster meets.
    """
    if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
        with cute.arch.elect_one():
            for i in range_constexpr(DEPTH):
                cute.arch.mbarrier_init(barriers + i, 1)
                cute.arch.mbarrier_init(barriers + DEPTH + i, readers)
    return Tickets(counter, barriers, barriers + DEPTH, numbers)


@dsl_user_op
def take(tickets: Tickets, *, loc=None, ip=None):
    """The next number, in lane 0; not waited for before it is used.

    Predicated within the text: were it in a branch, ptxas would add for the whole warp at once, and wait.
    """
    address = tickets.counter.iterator.toint(loc=loc, ip=ip)
    text = """{
        .reg .pred asks;
        .reg .b32 lane;
        mov.u32 lane, %laneid;
        setp.eq.u32 asks, lane, 0;
        mov.b32 $0, 0;
        @asks atom.relaxed.gpu.global.add.u32 $0, [$1], 1;
    }"""
    return asm(Int32, [address], text, "=&r,l", loc, ip, effects=True)


@cute.jit
def publish(tickets: Tickets, entry, taken, ctas: cutlass.Constexpr, first: cutlass.Constexpr = 0):
    """Entry `entry` of the ring of CTAs `first` to `ctas` is lane 0's `taken`, which is returned in all lanes.

    first: 1 where nobody in the CTA that asks reads its ring.
    """
    number = cute.arch.shuffle_sync(taken, offset=0)
    slot = entry & (DEPTH - 1)
    cute.arch.mbarrier_wait(tickets.empty + slot, (entry // DEPTH + 1) & 1)
    cta = cute.arch.lane_idx()
    if first <= cta and cta < ctas:
        if const_expr(ctas > 1):
            cute.arch.mbarrier_arrive_and_expect_tx(tickets.full + slot, 4, cta)
            cute.arch.store_async_dsmem(tickets.numbers.iterator + slot, number, tickets.full + slot, cta)
        else:  # st.async in a kernel without clusters is an illegal instruction
            tickets.numbers[slot] = number
            cute.arch.mbarrier_arrive(tickets.full + slot)
    return number


@cute.jit
def read(tickets: Tickets, entry, ctas: cutlass.Constexpr):
    """Entry `entry`, in all lanes of a reading warp."""
    slot, number = entry & (DEPTH - 1), Int32(0)
    cute.arch.mbarrier_wait(tickets.full + slot, (entry // DEPTH) & 1)
    if cute.arch.lane_idx() == 0:  # who reads gives back: racecheck sees no order through the rest of the warp
        number = tickets.numbers[slot]
        cute.arch.mbarrier_arrive(tickets.empty + slot, 0 if const_expr(ctas > 1) else None)
    return cute.arch.make_warp_uniform(cute.arch.shuffle_sync(number, offset=0))


@cute.jit
def close(tickets: Tickets, number, tiles, workers):
    """Whose number is the last of all, with none left to ask, clears the counter."""
    if number == tiles + workers - 1:
        tickets.counter[0] = Int32(0)


@cute.jit
def drain(tickets: Tickets, entry):
    """Wait until all entries up to `entry`, the last, have been read: a CTA that has ended cannot be told of it."""
    for i in range_constexpr(1, DEPTH + 1):
        cute.arch.mbarrier_wait(tickets.empty + ((entry + i) & (DEPTH - 1)), ((entry + i) // DEPTH + 1) & 1)
