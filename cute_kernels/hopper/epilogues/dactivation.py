"""dpreact = (dA·p)·∂f, act = f·p, dprobs = Σ_columns dA·f: dA the FP32 sums of dy·W2, f of the saved pre-activation.

args: (dpreact [T, 2I or I], act [T, I] or None, partial [T, tiles] FP32 or None, preact as dpreact, probs [T] or None).

The producer brings the tile's pre-activation, 64 x 128 a half and warpgroup, into the staging tiles while the products
run. The gradients are written over it in place, act into a tile of its own, and all leave as 16-byte rows. dA is never
rounded. A row's sum over this tile's 128 columns goes to partial[row, column tile]; the host adds the tiles in order.
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


class Differentiate:
    """The gradient of an activation, formed from FP32 sums and the saved pre-activation."""

    def __init__(self, facts, has_act: bool, zero_tail: bool):
        self.facts, self.has_act, self.zero_tail = facts, has_act, zero_tail
        self.curve = functions(facts.kind)
        self.halves = self.fetched = 2 if self.curve.GATED else 1
        self.staging_tiles = self.halves + has_act

    class Args(NamedTuple):
        dpreact: cute.Tensor
        act: cute.Tensor | None
        partial: cute.Tensor | None
        preact: cute.Tensor
        probs: cute.Tensor | None

    def bias(self, args):
        return None

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

    def finish(self, args, held, acc, tile, room):
        pairs = epilogue.words(room.staging)
        for row in range(2):
            factor = None if held is None else held[row]
            total = self.finish_row(acc, pairs, row, factor, room, args.dpreact.element_type)
            if args.partial is not None:
                at = tile.row + room.row() + 8 * row
                write_row_sum(args.partial, total, at, tile.end, tile.column_tile, room.thread)
        room.barrier.arrive_and_wait()
        width = args.dpreact.shape[1] // self.halves
        column = tile.column_tile * epilogue.COLS
        for half in range(self.halves):
            self.write(room.tile(half), args.dpreact, tile, room, half * width + column, (half + 1) * width)
        if args.act is not None:
            self.write(room.tile(self.halves), args.act, tile, room, column, width)

    def write(self, staged, out, tile, room, column, column_end):
        epilogue.write_rows(staged, out, room.thread, tile.row, tile.end, column, column_end)

    def finish_row(self, acc, pairs, row: int, factor, room, dtype):
        """One of a thread's two rows: 16 pairs of columns in place; returns its share of Σ dA·f."""
        total = Float32(0.0)
        local = room.row() + 8 * row
        for block in range(epilogue.COLS // 8):
            word = 4 * block + room.thread % 4
            inputs = [epilogue.unpacked(pairs[local, word, room.first + half], dtype) for half in range(self.halves)]
            results = [[None, None] for _ in range(self.staging_tiles)]
            for e in range(2):
                grad = acc[4 * block + 2 * row + e]
                value, *slopes = self.curve.backward(self.facts, *(x[e].to(Float32) for x in inputs))
                total = total + grad * value
                scaled = grad if factor is None else grad * factor
                for half in range(self.halves):
                    results[half][e] = scaled * slopes[half]
                if self.has_act:
                    results[self.halves][e] = value if factor is None else value * factor
            for index, result in enumerate(results):
                pairs[local, word, room.first + index] = epilogue.packed(*result, dtype)
        return total
