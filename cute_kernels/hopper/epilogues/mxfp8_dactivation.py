"""dpreact and act of `dactivation`, not rounded but through MXFP8 from FP32, as operands of the products that follow.

args: (rows [T, 2I or I] or None, columns like it or None, act [T, I] or None, partial [T, tiles] FP32 or None, preact
like rows, probs or None, sums [slots, 2I or I] FP32 or None, offsets, scales of a quantised preact or None: see
`mxfp8_kept`). Of dpreact: blocks of 1x32 in rows, for the
input's gradient; of 32x1 in columns, as in act, for weight gradients. Tiles begin at a group's first row, so 32 rows of
a tile are a block; what lies past the group's end counts as zero. Sums of dpreact's columns over 64 rows, which are not
quantised, go to the slots that `rowwise_kernel.ColumnSums` has for them.

A piece of 64 rows x 32 columns is worked on as a whole, 16 values of each result a thread. A row's block is in four
threads. A column's is in eight lanes of two warps: each lane ends up with one column of its warp's 16 rows, leaves the
maximum to the other warp, and passes the scale's byte, of all results in one word, round to the lanes that need it.

Pieces of a warpgroup: two sets that TMA fills with the pre-activation, over which the rows copy is written; one each
for the columns copies of gate, up and act; one for the maxima. Those are written again only once the leading warp has
seen them leave, and has met the others over the maxima of the next piece.
"""

import functools
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Uint32, range_constexpr
from cutlass.cutlass_dsl import select_

from cute_kernels.hopper.configs import SETS
from cute_kernels.hopper.epilogues import epilogue
from cute_kernels.hopper.epilogues.dactivation import Differentiate, write_row_sum
from cute_kernels.hopper.epilogues.mxfp8_activation import CHUNKS, row_factors
from cute_kernels.hopper.epilogues.quantized import larger, where
from cute_kernels.hopper.mxfp8_scales import decode_factor, encode_factor, restored, restored_apart, scale_byte

WIDTH = 2 * CHUNKS
"""Columns of a piece that a thread has values of."""
PIECE_WORDS = epilogue.ROWS * epilogue.COLS // 2


class DifferentiateMxfp8(Differentiate):
    """The gradient of an activation and the recomputed activation, quantised."""

    in_place = True
    """Whether a thread reads of the pre-activation what it writes of the rows copy."""

    def __init__(self, facts, cut: epilogue.Cut, has_rows: bool, has_columns: bool, has_act: bool):
        super().__init__(facts, cut, 0, has_act, True)
        self.has_rows, self.has_columns = has_rows, has_columns
        self.set = self.inputs
        self.results = self.inputs * has_columns + has_act
        """Of columns copies, pieces."""
        self.first_result = SETS * self.set
        self.maxima = self.first_result + self.inputs + 1
        self.pieces = self.maxima + 1

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

    def finish_block(self, args, acc, tile, another, room, words, phase):
        cut, dtype = self.cut, BFloat16
        factors = epilogue.row_factors([0], args.probs, tile, room)
        factors = [1.0, 1.0] if factors is None else [factor.to(dtype).to(Float32) for factor in factors]
        rows, zero = [tile.row + room.row() + 8 * row for row in range(2)], Int32(Uint32(tile.end) >> 31)
        totals = [Float32(0.0), Float32(0.0)]
        read = self.reader(args, tile, words, dtype, room)
        count = cut.tile_n // epilogue.COLS
        for number in range(count):
            slot, first = number % SETS, number % SETS * self.set
            cute.arch.mbarrier_wait(room.filled + slot, phase ^ (number // SETS % 2))
            sums = cut.take(acc, 0, number * epilogue.COLS)
            values = self.differentiate(sums, functools.partial(read, number), factors, totals, Uint32(zero))
            wanted = values[: self.inputs] * self.has_columns + values[self.inputs :]
            later = zero if self.in_place else zero & totals[1].bitcast(Int32)
            own = self.leave_maxima(wanted, rows, tile.end, later, words, room)
            if args.sums is not None:
                self.leave_sums(values[: self.inputs], rows, tile.end, words, room)
            if self.has_rows and self.in_place:
                self.put_rows(values[: self.inputs], words, first)
            if wanted or not self.in_place:
                room.barrier.arrive_and_wait()
            if self.has_rows and not self.in_place:
                self.put_rows(values[: self.inputs], words, first)
            if wanted:
                if args.sums is not None:
                    self.put_sums(args, tile, tile.column_tile * cut.tile_n + number * epilogue.COLS, words, room)
                self.put_columns(wanted, own, Uint32(zero), words, room)
            cute.arch.fence_proxy("async.shared", space="cta")
            room.barrier.arrive_and_wait()
            self.send(room, tile, tile.column_tile * cut.tile_n + number * epilogue.COLS, first)
            if number + SETS < count:
                self.fill(number + SETS, tile.row, tile, room, room.leads)
            elif cut.blocks > 1:
                self.fill(number + SETS - count, tile.row + epilogue.ROWS, tile, room, room.leads & another)
        if args.partial is not None:
            for at, total in zip(rows, totals, strict=True):
                write_row_sum(args.partial, total, at, tile.end, tile.column_tile, room.thread)
        return phase ^ (count // SETS % 2)

    def reader(self, args, tile, words, dtype, room):
        """read(piece, row, chunk, zero) -> of each input of the function a pair of columns."""

        def read(number: int, row: int, chunk: int, zero):
            first = number % SETS * self.set
            fetched = [words.at(first + piece, row, at)[0] for piece, at in self.preact.eights_of(chunk)]
            return [epilogue.unpacked(word ^ zero, dtype) for word in fetched]

        return read

    def differentiate(self, sums, read, factors, totals, zero):
        """A thread's values of gate, up and act (if it is wanted), each [row][column]; adds dA·f to the totals.

        zero: nobody but us knows that it is; so half a row waits for the half before, and registers suffice.
        """
        values = [[[None] * WIDTH for _ in range(2)] for _ in range(self.inputs + self.has_act)]
        for row in range(2):
            for chunk in range(CHUNKS):
                if chunk % 2 == 0:
                    later = zero & (totals[row] if chunk else totals[0]).bitcast(Uint32)
                pairs = read(row, chunk, later)
                for e in range(2):
                    grad = sums[4 * chunk + 2 * row + e]
                    value, *slopes = self.curve.backward(self.facts, *(pair[e].to(Float32) for pair in pairs))
                    totals[row] = totals[row] + grad * value
                    scaled = grad * factors[row]
                    results = [scaled * slope for slope in slopes] + [value * factors[row]] * self.has_act
                    for result, found in zip(values, results, strict=True):
                        result[row][2 * chunk + e] = found
        return values

    def put_rows(self, values, words, first):
        """The rows copies, over what was fetched."""
        for piece, result in enumerate(values):
            for row in range(2):
                encode, decode = row_factors(result[row])
                for chunk in range(CHUNKS):
                    pair = result[row][2 * chunk : 2 * chunk + 2]
                    words.at(first + piece, row, chunk)[0] = restored(*pair, encode, decode)

    def leave_maxima(self, wanted, rows, end, zero, words, room):
        """The largest magnitude of this lane's column in the 16 rows of its warp, of each result; also for the other
        warp.
        """
        own: list[Any] = []
        for index, result in enumerate(wanted):
            later = zero & own[-1].bitcast(Int32) if own else zero  # one after the other: registers
            bounds = [row + later for row in rows]
            own.append(self.own_column(result, [bound < end for bound in bounds], room.thread % 32))
            self.word(words, index, room.thread // 32, room)[0] = own[-1].bitcast(Uint32)
        return own

    def leave_sums(self, values, rows, end, words, room):
        """The sum of this lane's column over the 16 rows of its warp, of gate and up, for the first warps."""
        there = [row < end for row in rows]
        for index, result in enumerate(values):
            parts = [[where(t, x, Float32(0.0)) for x in each] for t, each in zip(there, result, strict=True)]
            total = self.one_column([a + b for a, b in zip(*parts, strict=True)], room.thread % 32, lambda a, b: a + b)
            self.word(words, self.inputs + 1 + index, room.thread // 32, room)[0] = total.bitcast(Uint32)

    @cute.jit
    def put_sums(self, args, tile, column, words, room):
        """Warp 0 those of gate, warp 1 those of up: the four warps' sums, in order."""
        width = args.sums.shape[1] // self.inputs
        first = args.offsets[tile.group]
        slot = first // epilogue.ROWS + tile.group + (tile.row - first) // epilogue.ROWS
        for index in range_constexpr(self.inputs):
            there = column + self.column(room)
            if room.thread // 32 == index and there < width:
                total = Float32(0.0)
                for warp in range_constexpr(4):
                    total += self.word(words, self.inputs + 1 + index, warp, room)[0].bitcast(Float32)
                args.sums[slot, index * width + there] = total

    def put_columns(self, wanted, own, zero, words, room):
        """The columns copies, into their pieces."""
        packed = Uint32(0)
        for index, amax in enumerate(own):
            other = self.word(words, index, room.thread // 32 ^ 1, room)[0].bitcast(Float32)
            packed = packed | Uint32(scale_byte(larger(amax, other).bitcast(Int32))) << (8 * index)
        for chunk in range(CHUNKS):
            at = slice(2 * chunk, 2 * chunk + 2)
            bytes_ = [self.passed_on(packed, k, room) for k in range(2 * chunk, 2 * chunk + 2)]
            for index, result in enumerate(wanted):
                both = [Int32(byte >> (8 * index) & Uint32(0xFF)) for byte in bytes_]
                encode, decode = [encode_factor(byte) for byte in both], [decode_factor(byte) for byte in both]
                for row in range(2):
                    word = restored_apart(*result[row][at], encode, decode)
                    words.at(self.first_result + index, row, chunk)[0] = word
            packed = packed | zero & word  # the next ones wait: registers

    def passed_on(self, packed, k: int, room):
        """The scales of the k-th of this thread's columns."""
        return Uint32(cute.arch.shuffle_sync(packed, offset=room.thread % 4 + 4 * k))

    def word(self, words, index: int, warp, room):
        """Where a warp leaves the maximum of a result's column, that of this lane."""
        base = words.base + self.maxima * PIECE_WORDS
        return cute.make_tensor(base + (index * 4 + warp) * epilogue.COLS + self.column(room), cute.make_layout(1))

    def column(self, room):
        """Of a piece, the column that `one_column` leaves to this lane."""
        lane = room.thread % 32
        return lane // 8 * 8 + lane % 4 * 2 + lane // 4 % 2

    def own_column(self, result, valid, lane):
        """The largest magnitude of this lane's column in the 16 rows of this warp."""
        found = []
        for k in range(WIDTH):
            first, second = (where(valid[row], result[row][k], Float32(0.0)) for row in range(2))
            found.append(larger(first, second))
        return self.one_column(found, lane, larger)

    def one_column(self, found, lane, combine):
        """What eight lanes have of 8 columns, combined: lane l gets that of the k-th of a thread's columns, k = l / 4.
        In each step a lane keeps half of what it has.
        """
        for distance in (16, 8, 4):
            upper, half = Boolean(lane & distance != 0), len(found) // 2
            kept = [Float32(select_(upper, found[half + i], found[i])) for i in range(half)]
            sent = [Float32(select_(upper, found[i], found[half + i])) for i in range(half)]
            given = [cute.arch.shuffle_sync_bfly(value, offset=distance) for value in sent]
            found = [combine(*pair) for pair in zip(kept, given, strict=True)]
        return found[0]

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
