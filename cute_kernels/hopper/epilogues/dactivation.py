"""dpreact = (dA·p)·∂f, act = f·p, dprobs = Σ_columns dA·f: dA the FP32 sums of dy·W2, f of the saved pre-activation.

args: (dpreact [T, 2I or I], act [T, I] or None, partial [T, tiles] FP32 or None, preact like dpreact, probs or None).

The pre-activation comes in sets of pieces, 64 columns of gate and of up a warpgroup, two sets in turn: the producer
fills one while the other is used. The gradients are written over it in place, act into a piece of its own; all leave
by TMA; a set is free again when its gradients have been read. dA is never rounded. A row's sum over the tile's columns
goes to partial[row, column tile]; the host adds the tiles in order.
"""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Float32

from cute_kernels.hopper.epilogues import epilogue
from cute_kernels.hopper.epilogues.activation import functions


@cute.jit
def write_row_sum(partial: cute.Tensor, total, row, end, column_tile, thread):
    """partial[row, column_tile] = total, summed over the four threads that share a row."""
    total += cute.arch.shuffle_sync_bfly(total, offset=1)
    total += cute.arch.shuffle_sync_bfly(total, offset=2)
    if thread % 4 == 0 and row < end:
        partial[row, column_tile] = total


@cute.jit
def release(leads, pipe, state):
    """The leading warp closes the group of sent pieces, waits until they are read, and gives the set back."""
    if leads:
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.sync_warp()  # the lane that sent may not be the lane that gives back
        pipe.consumer_release(state)


class Differentiate:
    """The gradient of an activation, formed from FP32 sums and the saved pre-activation."""

    sets = 2

    def __init__(self, facts, tile_n: int, has_act: bool, zero_tail: bool):
        self.facts, self.tile_n, self.has_act, self.zero_tail = facts, tile_n, has_act, zero_tail
        self.cut = epilogue.Cut(tile_n)
        self.curve = functions(facts.kind)
        self.halves = self.fetched = 2 if self.curve.GATED else 1
        self.pieces = self.sets * self.halves + 1

    class Args(NamedTuple):
        dpreact: cute.Tensor
        act: cute.Tensor | None
        partial: cute.Tensor | None
        preact: cute.Tensor
        probs: cute.Tensor | None

    def bias(self, args):
        return None

    def sinks(self, args):
        results = ((args.dpreact, self.halves), (args.act, 1))
        return results if self.has_act else results[:1]

    def zeroed(self, args):
        """The partial sums' tail always: dprobs is added from all rows."""
        rows = (args.dpreact, args.act) if self.zero_tail else ()
        return tuple(out for out in (*rows, args.partial) if out is not None)

    def load(self, args, tile, room):
        if args.probs is None:
            return None
        rows = (tile.row + room.row(), tile.row + room.row() + 8)
        dtype = args.dpreact.element_type
        return [epilogue.row_factor(args.probs, row, tile.end).to(dtype).to(Float32) for row in rows]

    def finish(self, args, held, acc, tile, room, pipe, state):
        pairs = epilogue.words(room.staging)
        totals = [Float32(0.0), Float32(0.0)]
        for index in range(self.tile_n // epilogue.COLS):
            slot = index % self.sets
            pipe.consumer_wait(state)
            room.barrier.arrive_and_wait()  # the leading warp has seen the last act piece read
            for row in range(2):
                factor = None if held is None else held[row]
                part = epilogue.part(acc, index, 32)
                totals[row] += self.finish_row(part, pairs, row, slot, factor, room, args.dpreact.element_type)
            cute.arch.fence_proxy("async.shared", space="cta")
            room.barrier.arrive_and_wait()
            column = tile.column_tile * self.tile_n + index * epilogue.COLS
            for half in range(self.halves):
                epilogue.send(room.leads, room.sinks[0], room.piece(slot * self.halves + half), tile, column, half)
            if self.has_act:
                epilogue.send(room.leads, room.sinks[1], room.piece(self.pieces - 1), tile, column, 0)
            release(room.leads, pipe, state)
            state.advance()
        if args.partial is not None:
            for row in range(2):
                at = tile.row + room.row() + 8 * row
                write_row_sum(args.partial, totals[row], at, tile.end, tile.column_tile, room.thread)
        return state

    def finish_row(self, acc, pairs, row: int, slot: int, factor, room, dtype):
        """One of a thread's two rows of a piece: 8 pairs of columns in place; returns its share of Σ dA·f."""
        total = Float32(0.0)
        local = room.row() + 8 * row
        places = [room.first + slot * self.halves + half for half in range(self.halves)]
        for block in range(epilogue.COLS // 8):
            word = 4 * block + room.thread % 4
            inputs = [epilogue.unpacked(pairs[local, word, place], dtype) for place in places]
            results = [[None, None] for _ in range(self.halves)]
            act = [None, None]
            for e in range(2):
                grad = acc[4 * block + 2 * row + e]
                value, *slopes = self.curve.backward(self.facts, *(x[e].to(Float32) for x in inputs))
                total = total + grad * value
                scaled = grad if factor is None else grad * factor
                for half in range(self.halves):
                    results[half][e] = scaled * slopes[half]
                act[e] = value if factor is None else value * factor
            for place, result in zip(places, results, strict=True):
                pairs[local, word, place] = epilogue.packed(result[0], result[1], dtype)
            if self.has_act:
                pairs[local, word, room.first + self.pieces - 1] = epilogue.packed(act[0], act[1], dtype)
        return total
