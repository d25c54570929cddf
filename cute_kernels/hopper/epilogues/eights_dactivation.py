"""dpreact = (dA·p)·∂f, quantised once from FP32, in rows and transposed: dA the FP32 sums of dy·W2.

args: (rows E4M3 [T, 2I or I], row scales [halves ⌈I/128⌉, ⌈T⌉₄], columns E4M3 [2I or I, P], column scales
[P/128, ⌈2I or I⌉₄], partial [T, tiles] FP32, sums [P/128, 2I or I] FP32, dbias [G, 2I or I] FP32, preact BF16 like
rows, probs, padded int32 [G+1]); what was not asked for is None. Layouts: `fp8_reference`; blocks of rows are cut in
each half.

A tile makes a block of dgate and one of dup. The saved pre-activation lies in shared memory, 64 rows of it a stage of
the ring. dgate takes the place of the sums; dup that of the pre-activation, in FP32. A row's sum over the tile's
columns, Σ dA·f, goes to partial[row, column tile]; the host adds the tiles in order. The columns' sums over 128 tokens
go to `sums`; what is launched after the product adds a group's blocks into dbias.
"""

import functools

import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from cute_kernels.hopper.epilogues import eights, epilogue
from cute_kernels.hopper.epilogues.eights import BLOCK, EIGHT, HALF, ROWS, SPAN, SPANS, Room, sum_at
from cute_kernels.hopper.epilogues.quantized import widened
from cute_kernels.hopper.epilogues.quantized_dactivation import Gradient

WIDTH = SPANS * EIGHT
"""Values of a thread in a row."""


class Differentiate(Gradient):
    """By the warpgroup that made the tile."""

    def __init__(self, facts, power_of_two: bool, has_sums: bool):
        super().__init__(facts, power_of_two, has_sums)
        self.memory = eights.Memory(self.halves * BLOCK)

    def finish(self, args, acc, tile, room: Room):
        room = room.here(self.memory)
        width, copies = args.preact.shape[1] // self.halves, self.copies(args, tile, None)
        firsts = cute.make_rmem_tensor((ROWS * WIDTH,), Float32)
        zero = Int32(epilogue.meet(room.barrier, tile.end))
        for row in range(ROWS):
            room = room.anew()
            if row % (ROWS // self.halves) == 0:
                room.inputs[row * self.halves // ROWS].ready()
            inputs = self.fetch(args, row, tile, room)
            cute.arch.sync_warp()  # of E4M3 inputs a lane will put values aside where its neighbours' were
            grads = self.sums_of(acc, row, tile, width, room)
            factor = eights.row_factor(args.probs, row, tile, room)
            results, total = self.differentiate(grads, inputs, factor)
            if args.partial is not None:
                self.store_total(args.partial, total, row, tile, room)
            maxima = [eights.over_row(values) for values in results]
            # The next row depends on them: left alone, the compiler works on all rows at once, and spills.
            tile = tile._replace(row=tile.row + (zero & (maxima[0].bitcast(Int32) | maxima[-1].bitcast(Int32))))
            for half, values in enumerate(results):
                if args.rows is not None:
                    factor, scale = eights.scale_of(maxima[half], self.power_of_two)
                    eights.store_row_scale(scale, room.row(row), tile, copies[half], room)
                    eights.store_row(values, factor, room.row(row), 0, tile, copies[half], room)
                if half == 0:
                    for i, value in enumerate(values):
                        firsts[row * WIDTH + i] = value
                elif args.columns is not None:
                    room.put_aside(row, values)
        if args.columns is not None:
            token = eights.record(room, 1)[3]
            copies = tuple(part._replace(token=token) for part in copies)
            self.transpose(args, firsts, copies, room)

    def sums_of(self, acc: cute.Tensor, row: int, tile, width, room: Room):
        """This thread's sums of a row; zero if the group does not have it, and for columns that are not there."""
        valid, sums = tile.row + room.row(row) < tile.end, []
        for span in range(SPANS):
            there = valid & (tile.column_tile * BLOCK + SPAN * span < width)
            sums += [eights.where(there, acc[sum_at(row, span, j)], Float32(0.0)) for j in range(EIGHT)]
        return sums

    def store_total(self, partial: cute.Tensor, total, row: int, tile, room: Room):
        """partial[row, column tile] = total over the four threads that share the row."""
        for offset in (1, 2):
            total = total + cute.arch.shuffle_sync_bfly(total, offset=offset)
        at = tile.row + room.row(row)
        wanted = (room.thread % 4 == 0) & (at < tile.end)
        eights.store_global(eights.place(partial, at, tile.column_tile), 0, wanted, [total.bitcast(Uint32)])

    def fetch(self, args, row: int, tile, room: Room):
        """Words of the saved pre-activation of a row, for each half and span; zero where there is none."""
        wanted = tile.row + room.row(row) < tile.end
        words = EIGHT * args.preact.element_type.width // 32
        places = [room.input_at(half, span, row, 4 * words) for half in range(self.halves) for span in range(SPANS)]
        return [eights.load_shared(*place, words, wanted) for place in places]

    def inputs_of(self, found, half: int, span: int, total):
        """The eight values of a half and span of what was fetched. total: of the spans before."""
        return widened(found[half * SPANS + span])

    def differentiate(self, grads, inputs, factor):
        """(a list of values for each half, Σ dA·f) of a row."""
        results: list[list] = [[] for _ in range(self.halves)]
        total = Float32(0.0)
        for span in range(SPANS):
            wide = [self.inputs_of(inputs, half, span, total) for half in range(self.halves)]
            for j in range(EIGHT):
                value, *slopes = self.curve.backward(self.facts, *(x[j] for x in wide))
                grad = grads[EIGHT * span + j]
                total = total + grad * value
                grad = grad if factor is None else grad * factor
                for half, slope in enumerate(slopes):
                    results[half].append(grad * slope)
        return results, total

    def values_of(self, firsts, half: int, first: int, room: Room):
        """(row, span, j) -> a side's value, spans counted from `first` on; what is aside is read when asked for."""
        if half == 0:
            return lambda row, span, j: firsts[row * WIDTH + (first + span) * EIGHT + j]

        @functools.cache
        def eight(row: int, span: int):
            return room.taken_back(row, (first + span) * EIGHT)

        return lambda row, span, j: eight(row, span)[j]

    def transpose(self, args, firsts, copies: tuple, room: Room):
        """The transposed copies of all sides, and the sums of their columns."""
        columns = self.halves * BLOCK
        if args.sums is not None:
            add = lambda a, b: a + b  # noqa: E731
            for half in range(self.halves):
                total = self.over_rows(firsts, half, add, room)
                eights.gather(total, SPANS, add, half * BLOCK, columns, room)
            room.barrier.arrive_and_wait()
            for half in range(self.halves):
                column = copies[half].column + room.thread
                total = eights.gathered(half * BLOCK + room.thread, add, columns, room)
                address = eights.place(args.sums, copies[half].token // BLOCK, column)
                eights.store_global(address, 0, column < copies[half].limit, [total.bitcast(Uint32)])
            room.barrier.arrive_and_wait()  # maxima may take the place of sums
        for half in range(self.halves):
            most = self.over_rows(firsts, half, eights.larger, room)
            eights.gather(most, SPANS, eights.larger, half * BLOCK, columns, room)
        room.barrier.arrive_and_wait()
        eights.share_column_scales(copies, 0, BLOCK, self.power_of_two, room)
        for half in range(self.halves):
            for start in range(0, BLOCK, HALF):
                if half or start:
                    room.barrier.arrive_and_wait()  # the columns before have been read
                values = self.values_of(firsts, half, start // SPAN, room)
                eights.stage_columns(values, half * BLOCK + start, room)
                room.barrier.arrive_and_wait()
                eights.send_columns(start, copies[half], room)

    def over_rows(self, firsts, half: int, combine, room: Room):
        """(span, j) -> this thread's rows of a side's column, combined."""
        values = self.values_of(firsts, half, 0, room)

        @functools.cache
        def eight(span: int):
            totals = [values(0, span, j) for j in range(EIGHT)]
            for row in range(1, ROWS):
                totals = [combine(total, values(row, span, j)) for j, total in enumerate(totals)]
            return totals

        return lambda span, j: eight(span)[j]
