"""dpreact = (dA·p)·∂f, act = f·p, dprobs = Σ_columns dA·f: dA the FP32 sums of dy·W2, f of the saved pre-activation.

args: (dpreact [T, 2I or I], act [T, I] or None, partial [T, tiles] FP32 or None, preact like dpreact, probs or None;
amax, turned_amax [G] FP32, each if given: see `nvfp4_maxima`, of dpreact).

The pre-activation comes in sets of pieces, 32 columns of gate and of up; each warpgroup has two sets in turn, fills the
first two of a tile before its products, and one again when what it holds has left. The gradients are written over it
in place, act into a piece beside it, and all leave by TMA. dA is never rounded. A row's sum over the tile's columns
goes to partial[row, column tile]; the host adds the tiles in order.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, const_expr, range_constexpr

from cute_kernels.hopper.configs import SETS
from cute_kernels.hopper.epilogues import epilogue
from cute_kernels.hopper.epilogues.activation import functions
from cute_kernels.hopper.epilogues.preact import Columns
from cute_kernels.hopper.nvfp4_maxima import maxima_of
from cute_kernels.hopper.operand_views import partition


@cute.jit
def write_row_sum(partial: cute.Tensor, total, row, end, column_tile, thread):
    """partial[row, column_tile] = total, summed over the four threads that share a row."""
    total += cute.arch.shuffle_sync_bfly(total, offset=1)
    total += cute.arch.shuffle_sync_bfly(total, offset=2)
    if thread % 4 == 0 and row < end:
        partial[row, column_tile] = total


@cute.jit
def fill(
    leads, room, row, column, first: cutlass.Constexpr, barrier, inputs: cutlass.Constexpr, apart: cutlass.Constexpr
):
    """The leading warp fetches a set: rows row.., from columns column.. on, to this warpgroup's pieces first.. `inputs`
    pieces, of as many halves, or beside each other."""
    if leads:
        atom, source = room.saved
        with cute.arch.elect_one():
            size = inputs * epilogue.ROWS * epilogue.COLS * room.staging.element_type.width // 8
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, size)
        which = (0, 0, None) if const_expr(apart) else (0, None, 0)
        boxes = cute.local_tile(cute.domain_offset((row, column, 0), source), (epilogue.ROWS, epilogue.COLS), which)
        target, boxes = partition(atom, room.staging, boxes)
        for index in range_constexpr(inputs):
            cute.copy(atom, boxes[None, index], target[None, room.first + first + index], tma_bar_ptr=barrier)


class Differentiate:
    """The gradient of an activation, formed from FP32 sums and the saved pre-activation."""

    attended = False

    def __init__(self, facts, cut: epilogue.Cut, block: int, has_act: bool, zero_tail: bool):
        self.facts, self.cut, self.has_act, self.zero_tail = facts, cut, has_act, zero_tail
        self.curve = functions(facts.kind)
        self.inputs = self.fetched = 2 if self.curve.GATED else 1
        self.preact = Columns(self.inputs, block)
        self.set = self.inputs + has_act
        """Pieces of a set: those fetched, then act."""
        self.pieces = SETS * self.set

    class Args(NamedTuple):
        dpreact: cute.Tensor
        act: cute.Tensor | None
        partial: cute.Tensor | None
        preact: cute.Tensor
        probs: cute.Tensor | None
        amax: cute.Tensor | None = None
        turned_amax: cute.Tensor | None = None

    def bias(self, args):
        return None

    def sinks(self, args):
        results = ((args.dpreact, self.preact.halves), (args.act, 1))
        return results if self.has_act else results[:1]

    def zeroed(self, args):
        """The partial sums' tail always: dprobs is added from all rows."""
        rows = (args.dpreact, args.act) if self.zero_tail else ()
        return tuple(out for out in (*rows, args.partial) if out is not None)

    def load(self, args, tile, room):
        for number in range(SETS):
            self.fill(number, tile.row, tile, room, room.leads)

    def fill(self, number: int, row, tile, room, leads):
        """Fetch what piece `number` of the block of rows `row`.. needs."""
        slot, column = number % SETS, tile.column_tile * self.cut.tile_n + number * epilogue.COLS
        (first, _), apart = self.preact.place(column, 0), self.preact.halves == self.inputs
        fill(leads, room, row, first, slot * self.set, room.filled + slot, self.inputs, apart)

    @cute.jit
    def finish(self, args, held, acc, tile, room, phase):
        """Block by block, each in the registers of the first.

        Unrolled, this was 95 KiB of code, and a call of few 128 x 192 tiles took 28 us where 128 x 128 took 16 (H200).
        """
        words = epilogue.Words(room)
        for block in cutlass.range(self.cut.blocks, unroll=1):
            rows = tile._replace(row=tile.row + block * epilogue.ROWS)
            another = Boolean(block < self.cut.blocks - 1)
            phase = self.finish_block(args, acc, rows, another, room, words, phase)
            if const_expr(self.cut.blocks > 1):
                now, later = (epilogue.part(acc, half, self.cut.tile_n // 2) for half in range(2))
                now.store(later.load())
        return phase

    def finish_block(self, args, acc, tile, another, room, words, phase):
        """The first block of sums, which belong to rows tile.row..; returns the phase of `another`, if there is one."""
        cut, dtype = self.cut, args.dpreact.element_type
        factors = epilogue.row_factors([0], args.probs, tile, room)
        factors = [1.0, 1.0] if factors is None else [factor.to(dtype).to(Float32) for factor in factors]
        totals, maxima = [Float32(0.0), Float32(0.0)], maxima_of(args, tile, room)
        count = cut.tile_n // epilogue.COLS
        for number in range(count):
            slot, first = number % SETS, number % SETS * self.set
            cute.arch.mbarrier_wait(room.filled + slot, phase ^ (number // SETS % 2))
            for row in range(2):
                sums = cut.take(acc, 0, number * epilogue.COLS)
                totals[row] += self.finish_row(sums, words, row, first, factors[row], dtype)
            column = tile.column_tile * cut.tile_n + number * epilogue.COLS
            if maxima is not None:
                cute.arch.sync_warp()
                width = args.dpreact.shape[1] // self.inputs
                known = [] if args.partial is None else totals
                maxima.see(range(first, first + self.inputs), tile.row, column, width, known)
            cute.arch.fence_proxy("async.shared", space="cta")
            room.barrier.arrive_and_wait()
            for index in range(self.set):
                sink, (there, half) = room.sinks[1], (column, 0)
                if index < self.inputs:
                    sink, (there, half) = room.sinks[0], self.preact.place(column, index)
                epilogue.send(room.leads, sink, room.piece(first + index), tile, there, half)
            epilogue.close(room.leads)
            epilogue.wait_sent(room.leads, 0)
            if number + SETS < count:
                self.fill(number + SETS, tile.row, tile, room, room.leads)
            elif cut.blocks > 1:
                self.fill(number + SETS - count, tile.row + epilogue.ROWS, tile, room, room.leads & another)
        if args.partial is not None:
            for row, total in enumerate(totals):
                at = tile.row + room.row() + 8 * row
                write_row_sum(args.partial, total, at, tile.end, tile.column_tile, room.thread)
        if maxima is not None:
            maxima.leave()
        return phase ^ (count // SETS % 2)

    def finish_row(self, acc, words, row: int, first, factor, dtype):
        """One of a thread's two rows of a piece, in place, in the set from piece `first` on; its share of Σ dA·f."""
        total = Float32(0.0)
        chunks = range(epilogue.COLS // 8)
        places = [self.places(words, row, first, chunk) for chunk in chunks]
        fetched = [[pair[0] for pair in pairs[: self.inputs]] for pairs in places]
        for chunk, pairs in enumerate(places):
            read = [epilogue.unpacked(word, dtype) for word in fetched[chunk]]
            results = [[None, None] for _ in pairs]
            for e in range(2):
                grad = acc[4 * chunk + 2 * row + e]
                at = [(e, index) if self.preact.pairs else (index, e) for index in range(self.inputs)]
                value, *slopes = self.curve.backward(self.facts, *(read[i][j].to(Float32) for i, j in at))
                total = total + grad * value
                scaled = grad * factor
                for (i, j), slope in zip(at, slopes, strict=True):
                    results[i][j] = scaled * slope
                if self.has_act:
                    results[self.inputs][e] = value * factor
            for pair, result in zip(pairs, results, strict=True):
                pair[0] = epilogue.packed(result[0], result[1], dtype)
        return total

    def places(self, words, row: int, first, chunk: int):
        """Where the words lie that a thread reads and writes for columns 8 chunk to 8 chunk + 8 of act."""
        if self.preact.pairs:
            found = [words.wide_at(first + chunk // 2, row, chunk % 2, word) for word in range(2)]
        else:
            found = [words.at(first + piece, row, eight) for piece, eight in self.preact.eights_of(chunk)]
        return found + [words.at(first + self.inputs, row, chunk)] * self.has_act
