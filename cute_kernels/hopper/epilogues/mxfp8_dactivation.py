"""dpreact and act of `dactivation`, not rounded but through MXFP8 from FP32, as operands of the products that follow.

args: (rows [T, 2I or I] or None, columns like it or None, act [T, I] or None, partial [T, tiles] FP32 or None, preact
like rows, probs or None, sums [slots, 2I or I] FP32 or None, offsets, scales of a quantised preact or None: see
`mxfp8_kept`). Of dpreact: blocks of 1x32 in rows, for the input's gradient; of 32x1 in columns, as in act, for weight
gradients. Tiles begin at a group's first row, so 32 rows of a tile are a block; what lies past the group's end counts
as zero. Sums of dpreact's columns over 64 rows, which are not quantised, go to the slots that
`rowwise_kernel.ColumnSums` has for them.

A piece of 64 rows x 32 columns is worked on as a whole, 16 values of each result a thread. A row's block is in four
threads, each of which works out the scale of one of the four blocks that they share, and passes it round. A column's is
in eight lanes of two warps: each lane ends up with one column of its warp's 16 rows, leaves the maximum to the other
warp, and the factors of that column, once known, to its own warp.

Pieces of a warpgroup: two sets that TMA fills with the pre-activation, over which the rows copy is written; one each
for the columns copies of gate, up and act; one for maxima and factors, and one for sums, if any. A warp of the producer
warpgroup attends to it: it fetches the sets, and sends what is written. They meet twice a piece:

    free        128 threads wait for the attending warp, which comes when what was sent of the piece before has been
                read: the columns copies may be written, and what the others left (maxima, sums) read
    written     the attending warp waits for 128 threads, which go on with the next piece

So maxima and sums have two places, in turn: those of the next piece are written while others still read. A warp's
factors lie where its maxima of the piece before did: who read them has been at `free` since.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import BFloat16, Boolean, Float32, Int32, Uint16, Uint32, const_expr, range_constexpr

from cute_kernels.hopper.configs import CONSUMERS, SETS
from cute_kernels.hopper.epilogues import epilogue
from cute_kernels.hopper.epilogues.dactivation import Differentiate, write_row_sum
from cute_kernels.hopper.epilogues.eights import largest, share
from cute_kernels.hopper.epilogues.mxfp8_activation import CHUNKS
from cute_kernels.hopper.epilogues.preact import chosen_halves
from cute_kernels.hopper.epilogues.quantized import larger, where
from cute_kernels.hopper.fp8_scales import FOURS
from cute_kernels.hopper.mxfp8_scales import factors, restored_apart

WIDTH = 2 * CHUNKS
"""Columns of a piece that a thread has values of."""
PIECE_WORDS = epilogue.ROWS * epilogue.COLS // 2
"""Pairs of values of a piece."""
WARPS = 4
RESULTS = 3
"""The most columns copies."""
OWN = RESULTS * epilogue.COLS
"""Words of a warp's maxima of a piece."""
DECODES = 2 * WARPS * OWN
"""Where, in the piece of maxima, the factors that decode are: half words."""
UPPER = 0xFFFF0000
"""Of a word, the upper half."""
FREE, WRITTEN = 1 + 2 * CONSUMERS, 1 + 3 * CONSUMERS
"""The first warpgroup's barriers (see the module), after those of `grouped_gemm_kernel`."""


class DifferentiateMxfp8(Differentiate):
    """The gradient of an activation and the recomputed activation, quantised."""

    attended = True

    def __init__(self, facts, cut: epilogue.Cut, has_rows: bool, has_columns: bool, has_act: bool, has_sums: bool):
        super().__init__(facts, cut, 0, has_act, True)
        self.has_rows, self.has_columns = has_rows, has_columns
        self.set = self.inputs
        self.first_result = SETS * self.set
        self.maxima = self.first_result + self.inputs + 1
        self.pieces = self.maxima + 1 + has_sums

    class Args(NamedTuple):
        rows: cute.Tensor | None
        columns: cute.Tensor | None
        act: cute.Tensor | None
        partial: cute.Tensor | None
        preact: cute.Tensor
        probs: cute.Tensor | None
        sums: cute.Tensor | None
        offsets: cute.Tensor
        scales: cute.Tensor | None

    def sinks(self, args):
        halves = self.preact.halves
        results = (args.rows, halves), (args.columns, halves), (args.act, 1)
        return tuple(result for result in results if result[0] is not None)

    def zeroed(self, args):
        """Nobody reads the others' tails."""
        return () if args.partial is None else (args.partial,)

    def meeting(self, first: int, room):
        """Of the warpgroup and who attends to it."""
        return pipeline.NamedBarrier(barrier_id=first + room.first // self.pieces, num_threads=128 + 32)

    @cute.jit
    def attend(self, args, tile, room):
        """What the attending warp does for a tile."""
        count = self.cut.tile_n // epilogue.COLS
        Differentiate.load(self, args, tile, room)
        for block in cutlass.range(self.cut.blocks, unroll=1):
            rows = tile._replace(row=tile.row + block * epilogue.ROWS)
            another = Boolean(block < self.cut.blocks - 1)
            for number in range_constexpr(count):
                self.meeting(FREE, room).arrive()
                self.meeting(WRITTEN, room).arrive_and_wait()
                column = tile.column_tile * self.cut.tile_n + number * epilogue.COLS
                self.send(room, rows, column, number % SETS * self.set)
                if const_expr(number + SETS < count):
                    self.fill(number + SETS, rows.row, tile, room, room.leads)
                elif const_expr(self.cut.blocks > 1):
                    self.fill(number + SETS - count, rows.row + epilogue.ROWS, tile, room, room.leads & another)

    def load(self, args, tile, room):
        """The factors of this thread's rows, before the products: nothing waits for them."""
        return epilogue.row_factors(range(self.cut.blocks), args.probs, tile, room)

    @cute.jit
    def finish(self, args, held, acc, tile, room, phase):
        """Block by block of a tile's rows; what is fetched and sent, `attend` does."""
        words = epilogue.Words(room)
        for block in cutlass.range(self.cut.blocks, unroll=1):
            rows = tile._replace(row=tile.row + block * epilogue.ROWS)
            probs = [Float32(1.0), Float32(1.0)]
            if const_expr(held is not None):
                probs = [where(block == 0, *pair) for pair in zip(held[:2], held[-2:], strict=True)]
                probs = [prob.to(BFloat16).to(Float32) for prob in probs]
            phase = self.finish_rows(args, probs, acc, rows, room, words, phase)
            if const_expr(self.cut.blocks > 1):
                now, later = (epilogue.part(acc, half, self.cut.tile_n // 2) for half in range(2))
                now.store(later.load())
        return phase

    def finish_rows(self, args, probs, acc, tile, room, words, phase):
        """The first block of sums, which belong to rows tile.row..; returns the phase of the next one."""
        rows = [tile.row + room.row() + 8 * row for row in range(2)]
        totals = [Float32(0.0), Float32(0.0)]
        read = self.reader(args, tile, words, room)
        count = self.cut.tile_n // epilogue.COLS
        for number in range(count):
            slot, place = number % SETS, number % 2
            cute.arch.mbarrier_wait(room.filled + slot, phase ^ (number // SETS % 2))
            sums = self.cut.take(acc, 0, number * epilogue.COLS)
            values = self.differentiate(sums, number, read, probs, totals)
            slopes = values[: self.inputs]
            wanted = slopes * self.has_columns + values[self.inputs :]
            own = self.leave_maxima(wanted, rows, tile, place, words, room)
            if args.sums is not None:
                self.leave_sums(slopes, rows, tile.end, place, words, room)
            self.meeting(FREE, room).arrive_and_wait()
            self.leave_factors(own, place, words, room)
            if self.has_rows:
                self.put_rows(slopes, words, slot * self.set, room)
            if wanted:
                cute.arch.sync_warp()
                self.put_columns(wanted, place, words, room)
            if args.sums is not None:
                column = tile.column_tile * self.cut.tile_n + number * epilogue.COLS
                self.put_sums(args, tile, column, place, words, room)
            cute.arch.fence_proxy("async.shared", space="cta")
            self.meeting(WRITTEN, room).arrive()
        if args.partial is not None:
            for at, total in zip(rows, totals, strict=True):
                write_row_sum(args.partial, total, at, tile.end, tile.column_tile, room.thread)
        return phase ^ (count // SETS % 2)

    def reader(self, args, tile, words, room):
        """read(piece, row, chunk) -> of each input of the function a pair of columns, in FP32."""

        def read(number: int, row: int, chunk: int):
            first = number % SETS * self.set
            fetched = [words.at(first + piece, row, at)[0] for piece, at in self.preact.eights_of(chunk)]
            return [[(word << 16).bitcast(Float32), (word & Uint32(UPPER)).bitcast(Float32)] for word in fetched]

        return read

    def differentiate(self, sums, number: int, read, probs, totals):
        """A thread's values of gate, up and act (if it is wanted), each [row][column]; adds dA·f to the totals."""
        values: list[Any] = [[[None] * WIDTH for _ in range(2)] for _ in range(self.inputs + self.has_act)]
        for row in range(2):
            for chunk in range(CHUNKS):
                pairs = read(number, row, chunk)
                for e in range(2):
                    grad = sums[4 * chunk + 2 * row + e]
                    value, *slopes = self.curve.backward(self.facts, *(pair[e] for pair in pairs))
                    totals[row] = totals[row] + grad * value
                    scaled = grad * probs[row]
                    results = [scaled * slope for slope in slopes] + [value * probs[row]] * self.has_act
                    for result, found in zip(values, results, strict=True):
                        result[row][2 * chunk + e] = found
        return values

    def put_rows(self, values, words, first, room):
        """The rows copies, over what was fetched."""
        found = share([largest(result[row]) for result in values for row in range(2)], larger, room.thread, (2, 1))[0]
        encode, decode = factors(found)
        packed, lanes = Uint32(encode) | Uint32(decode) >> 16, 4 // (2 * self.inputs)
        for piece, result in enumerate(values):
            for row in range(2):
                lane = lanes * (2 * piece + row)
                both = Uint32(cute.arch.shuffle_sync(packed, offset=lane, mask_and_clamp=FOURS))
                encodes = [(both & Uint32(UPPER)).bitcast(Float32)] * 2
                decodes = chosen_halves(both, both, Int32(0x1010))
                for chunk in range(CHUNKS):
                    pair = result[row][2 * chunk : 2 * chunk + 2]
                    words.at(first + piece, row, chunk)[0] = restored_apart(*pair, encodes, decodes)

    def leave_maxima(self, wanted, rows, tile, place: int, words, room):
        """The largest magnitude of this lane's column in the 16 rows of its warp, of each result; also for the other
        warp.
        """
        if not wanted:
            return []
        values = cute.make_rmem_tensor((len(wanted), 2, WIDTH), Float32)
        for index, result in enumerate(wanted):
            for row in range(2):
                for k in range(WIDTH):
                    values[index, row, k] = result[row][k]
        found = cute.make_rmem_tensor((len(wanted), WIDTH), Float32)
        larger_rows(found, values, rows, tile.row, tile.end, len(wanted))
        own = []
        for index in range(len(wanted)):
            own += share([found[index, k] for k in range(WIDTH)], larger, room.thread)
            self.word(words, place, index, room.thread // 32, room)[0] = own[-1].bitcast(Uint32)
        return own

    def leave_factors(self, own, place: int, words, room):
        """The factors of this lane's column of each result, for its warp: in the order of who reads them."""
        warp, lane = room.thread // 32, room.thread % 32
        order = lane % 4 * WIDTH + lane // 4
        others = [self.word(words, place, index, warp ^ 1, room)[0] for index in range(len(own))]
        for index, (amax, other) in enumerate(zip(own, others, strict=True)):
            encode, decode = factors(larger(amax, other.bitcast(Float32)))
            encodes, decodes = self.tables(words, place, index, warp)
            cute.make_tensor(encodes + order, cute.make_layout(1))[0] = Uint32(encode)
            halves = cute.recast_ptr(decodes, dtype=Uint16)
            cute.make_tensor(halves + order, cute.make_layout(1))[0] = Uint16(Uint32(decode) >> 16)

    def put_columns(self, wanted, place: int, words, room):
        """The columns copies, into their pieces."""
        quarter = room.thread % 4
        for index, result in enumerate(wanted):
            encodes, decodes = self.tables(words, place, index, room.thread // 32)
            encode = run_of(encodes + quarter * WIDTH, WIDTH)
            decode = run_of(decodes + quarter * (WIDTH // 2), WIDTH // 2)
            for chunk in range(CHUNKS):
                at = range(2 * chunk, 2 * chunk + 2)
                both = [encode[k].bitcast(Float32) for k in at]
                for row in range(2):
                    word = restored_apart(*(result[row][k] for k in at), both, decode[chunk])
                    words.at(self.first_result + index, row, chunk)[0] = word

    def leave_sums(self, values, rows, end, place: int, words, room):
        """The sum of this lane's column over the 16 rows of its warp, of gate and up, for the first warps."""
        there = [row < end for row in rows]
        for index, result in enumerate(values):
            parts = [[where(t, x, Float32(0.0)) for x in each] for t, each in zip(there, result, strict=True)]
            added = [a + b for a, b in zip(*parts, strict=True)]
            (total,) = share(added, lambda a, b: a + b, room.thread)
            self.sum_word(words, place, index, room.thread // 32, room)[0] = total.bitcast(Uint32)

    @cute.jit
    def put_sums(self, args, tile, column, place: cutlass.Constexpr, words, room):
        """Warp 0 those of gate, warp 1 those of up: the four warps' sums, in order."""
        width = args.sums.shape[1] // self.inputs
        first = args.offsets[tile.group]
        slot = first // epilogue.ROWS + tile.group + (tile.row - first) // epilogue.ROWS
        lane = room.thread % 32
        for index in range_constexpr(self.inputs):
            there = column + lane // 8 * 8 + lane % 4 * 2 + lane // 4 % 2
            if room.thread // 32 == index and there < width:
                total = Float32(0.0)
                for warp in range_constexpr(WARPS):
                    total += self.sum_word(words, place, index, warp, room)[0].bitcast(Float32)
                args.sums[slot, index * width + there] = total

    def word(self, words, place: int, index: int, warp, room):
        """Where a warp leaves the maximum of a result's column, that of this lane."""
        start = words.base + self.maxima * PIECE_WORDS + (place * WARPS * OWN + index * epilogue.COLS)
        return cute.make_tensor(start + warp * OWN + room.thread % 32, cute.make_layout(1))

    def sum_word(self, words, place: int, index: int, warp, room):
        """The same of sums."""
        start = words.base + (self.maxima + 1) * PIECE_WORDS + (place * self.inputs + index) * WARPS * epilogue.COLS
        return cute.make_tensor(start + warp * epilogue.COLS + room.thread % 32, cute.make_layout(1))

    def tables(self, words, place: int, index: int, warp):
        """Where a warp has what encodes and what decodes a result's columns, 8 of each of four threads."""
        start = words.base + self.maxima * PIECE_WORDS
        encodes = start + ((1 - place) * WARPS * OWN + index * epilogue.COLS) + warp * OWN
        return encodes, start + (DECODES + index * epilogue.COLS // 2) + warp * (OWN // 2)

    def send(self, room, tile, column, first):
        """What is in the pieces leaves."""
        sinks = iter(room.sinks)
        if self.has_rows:
            sink = next(sinks)
            for index in range(self.inputs):
                there, half = self.preact.place(column, index)
                epilogue.send(room.leads, sink, room.piece(first + index), tile, there, half)
        result = self.first_result
        if self.has_columns:
            sink = next(sinks)
            for index in range(self.inputs):
                there, half = self.preact.place(column, index)
                epilogue.send(room.leads, sink, room.piece(result + index), tile, there, half)
            result += self.inputs
        if self.has_act:
            epilogue.send(room.leads, next(sinks), room.piece(result), tile, column, 0)
        epilogue.close(room.leads)
        epilogue.wait_sent(room.leads, 0)


@cute.jit
def larger_rows(found: cute.Tensor, values: cute.Tensor, rows, first, end, count: cutlass.Constexpr):
    """found [result, column]: of values [result, row, column] the larger magnitude of both rows, `rows` of the block
    that begins at `first`; rows from `end` on count as zero.
    """
    if first + epilogue.ROWS <= end:
        for index in range_constexpr(count):
            for k in range_constexpr(WIDTH):
                found[index, k] = larger(values[index, 0, k], values[index, 1, k])
    else:
        for index in range_constexpr(count):
            for k in range_constexpr(WIDTH):
                one = where(rows[0] < end, values[index, 0, k], Float32(0.0))
                other = where(rows[1] < end, values[index, 1, k], Float32(0.0))
                found[index, k] = larger(one, other)


def run_of(start, count: int):
    """`count` words of shared memory, four at a time."""
    source = cute.make_ptr(Uint32, start.toint(), cute.AddressSpace.smem, assumed_align=16)
    held = cute.make_rmem_tensor((count,), Uint32)
    cute.autovec_copy(cute.make_tensor(source, cute.make_layout(count)), held)
    return held
