"""dpreact = (dA·p)·∂f, quantised once from FP32, in rows and transposed: dA the FP32 sums of dy·W2.

args: (rows E4M3 [T, 2I or I], row scales [halves ⌈I/128⌉, ⌈T⌉₄], columns E4M3 [2I or I, P], column scales
[P/128, ⌈2I or I⌉₄], partial [T, tiles] FP32, sums [P/128, 2I or I] FP32, dbias [G, 2I or I] FP32, preact BF16 like
rows, probs, padded int32 [G+1]); what was not asked for is None. Layouts: `fp8_reference`; blocks of rows are cut in
each half.

Consumers put their sums into the tile, 128 x 128 FP32, and go on. The finishing warpgroup makes a block of dgate and
one of dup of it; the saved pre-activation it reads from global memory, some rows ahead. A row's sum over the tile's
columns, Σ dA·f, goes to partial[row, column tile]; the host adds the tiles in order. The columns' sums over 128 tokens
go to `sums`; what is launched after the product adds a group's blocks into dbias.

The tile: 16 bytes c of row r lie at 512 r + 128 (c // 8) + 16 (c % 8 ^ r % 8 ^ c // 8 % 2), so that neither pairs of
columns nor patches meet a bank twice.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import CopyUniversalOp
from cutlass.cutlass_dsl import dsl_user_op

from cute_kernels.hopper.asm import asm
from cute_kernels.hopper.epilogues import epilogue, quantized
from cute_kernels.hopper.epilogues.activation import functions
from cute_kernels.hopper.epilogues.quantized import BATCH, BLOCK, PATCH_COLS, Copies, Desk

ROW_BYTES = BLOCK * 4
PIECES = 8
"""Pieces of 4 KiB of a consumer warpgroup: its half of the tile."""


def place(row, chunk):
    """Where 16 bytes of a row of the tile lie."""
    return row * ROW_BYTES + chunk // 8 * 128 + ((chunk % 8) ^ (row % 8) ^ (chunk // 8 % 2)) * 16


@dsl_user_op
def store_pair(address, first, second, *, loc=None, ip=None):
    """Two FP32 values to shared memory."""
    operands = Int32(address), Float32(first), Float32(second)
    asm(None, operands, "st.shared.v2.f32 [$0], {$1, $2};", "r,f,f,~{memory}", loc, ip, effects=True)


class Gradient:
    """Facts and results of an activation's gradient that is formed from FP32 sums and the saved pre-activation and
    quantised both ways.
    """

    class Args(NamedTuple):
        rows: cute.Tensor | None
        row_scales: cute.Tensor | None
        columns: cute.Tensor | None
        column_scales: cute.Tensor | None
        partial: cute.Tensor | None
        sums: cute.Tensor | None
        dbias: cute.Tensor | None
        preact: cute.Tensor
        probs: cute.Tensor | None
        padded: cute.Tensor | None

    def __init__(self, facts, power_of_two: bool, has_sums: bool):
        self.facts, self.power_of_two, self.has_sums = facts, power_of_two, has_sums
        self.curve = functions(facts.kind)
        self.halves = 2 if self.curve.GATED else 1

    def zeroed(self, args):
        """The partial sums' tail: dprobs is added from all rows."""
        return () if args.partial is None else (args.partial,)

    def copies(self, args, tile, token) -> tuple:
        """Where the tile's blocks go, one of each half."""
        width = args.preact.shape[1] // self.halves
        column = tile.column_tile * BLOCK
        return tuple(
            Copies(
                args.rows, args.row_scales, args.columns, args.column_scales, half * width + column,
                (half + 1) * width, half * ((width + BLOCK - 1) // BLOCK) + tile.column_tile, token,
            )
            for half in range(self.halves)
        )  # fmt: skip


class QuantizedDifferentiate(Gradient):
    """By the finishing warpgroup."""

    pieces = PIECES

    def __init__(self, facts, cut: epilogue.Cut, power_of_two: bool, has_sums: bool):
        super().__init__(facts, power_of_two, has_sums)
        self.cut, self.sides = cut, self.halves

    def bias(self, args):
        return None

    def tile_layout(self, consumers: int):
        """The memory of the tile; how values lie there is `place`'s business."""
        return epilogue.staging_layout(consumers * PIECES, BFloat16)

    def stores_preact(self, args):
        return False

    def load(self, args, tile, room):
        return None

    def hand_over(self, args, held, acc, tile, room, free):
        """Consumers, after the products: into the tile, once it is free."""
        free.arrive_and_wait()
        start = room.staging.iterator.toint()
        row, q = room.first // PIECES * epilogue.ROWS + room.row(), room.thread % 4
        for column in range(0, BLOCK, 8):
            for step in range(2):
                i = self.cut.sum_at(step, column)
                address = start + place(row + 8 * step, column // 4 + q // 2) + q % 2 * 8
                store_pair(address, acc[i], acc[i + 1])

    def finish(self, args, tile, token, pieces: cute.Tensor, desk: Desk):
        """The finishing warpgroup."""
        width, copies = args.preact.shape[1] // self.halves, self.copies(args, tile, token)
        block = self.differentiated(args, width, copies, tile, desk)
        block.quantize()
        block.store_totals(args.partial)
        if args.sums is not None:
            block.store_sums(args.sums)

    def differentiated(self, *given):
        return Differentiated(self, *given)


class Differentiated(quantized.Block):
    """dgate and dup (or dx) of the tile."""

    def __init__(self, made_for: QuantizedDifferentiate, args, width, copies: tuple, tile, desk: Desk):
        super().__init__(copies, made_for.power_of_two, tile, desk)
        self.made_for, self.preact, self.width = made_for, args.preact, width
        self.factors = quantized.load_factors(args.probs, tile, desk)
        self.counts = args.partial is not None
        self.total = cute.make_rmem_tensor((1,), Float32)
        self.sums = None
        if args.sums is not None:
            self.sums = cute.make_rmem_tensor((made_for.halves * PATCH_COLS,), Float32)
            self.sums.fill(0.0)

    def begin(self, first, count: int):
        words = count * self.preact.element_type.width // 32
        self.ahead = cute.make_rmem_tensor((BATCH * self.made_for.halves * words,), Uint32)
        self.fetch(0, first, count)

    def fetch(self, number, first, count: int):
        """The saved pre-activation of a batch. Rows and columns that are not there are read elsewhere, for nothing."""
        halves, words = self.made_for.halves, count * self.preact.element_type.width // 32
        column = cutlass.min(self.tile.column_tile * BLOCK + self.desk.column(), self.width - PATCH_COLS) + first
        copy = cute.make_copy_atom(CopyUniversalOp(), Uint32, num_bits_per_copy=32 * words)
        for step in range(BATCH):
            row = cutlass.min(self.tile.row + self.desk.row() + BATCH * number + step, self.tile.end - 1)
            for half in range(halves):
                at = Int64(row) * self.preact.shape[1] + half * self.width + column
                there = cute.recast_ptr(self.preact.iterator + cute.assume(at, divby=count), dtype=Uint32)
                target = cute.make_tensor(self.ahead.iterator + (step * halves + half) * words, cute.make_layout(words))
                cute.copy(copy, cute.make_tensor(there, cute.make_layout(words)), target)

    def batch(self, number, first, count: int):
        """What was fetched ahead; fetches the next."""
        fetched = [self.ahead[i] for i in range(cute.size(self.ahead))]
        self.fetch(number + 1, first, count)
        return fetched

    def inputs_of(self, held, step: int, i, count: int):
        """Of a row of a batch, for each half, the pre-activation's values."""
        words, halves = count // 2, self.made_for.halves
        return [quantized.widened(held[(step * halves + half) * words :][:words]) for half in range(halves)]

    def row(self, held, step: int, i, first, count: int, counts: bool):
        made_for, desk, tile = self.made_for, self.desk, self.tile
        inputs = self.inputs_of(held, step, i, count)
        row, chunk = desk.row() + i, (desk.column() + first) // 4
        grads = [
            quantized.float_of(word)
            for part in range(count // 4)
            for word in quantized.load_words(desk.tile + place(row, chunk + part), 4)
        ]
        valid = (tile.row + row < tile.end) & (tile.column_tile * BLOCK + desk.column() < self.width)
        factor = None if self.factors is None else quantized.row_factor(self.factors, i, desk)
        total = Float32(0.0)
        results: list[list] = [[] for _ in range(made_for.halves)]
        for j in range(count):
            value, *slopes = made_for.curve.backward(made_for.facts, *(x[j] for x in inputs))
            total = total + grads[j] * value
            grad = grads[j] if factor is None else grads[j] * factor
            for half, slope in enumerate(slopes):
                result = quantized.where(valid, grad * slope, Float32(0.0))
                results[half].append(result)
                if counts and self.sums is not None:
                    at = half * PATCH_COLS + j
                    self.sums[at] = self.sums[at] + result
        if counts and self.counts:
            total = quantized.where(valid, total, Float32(0.0))
            for offset in (1, 2, 4, 8):
                total = total + cute.arch.shuffle_sync_bfly(total, offset=offset)
            mine = desk.thread % quantized.ACROSS == i
            self.total[0] = quantized.where(mine, total, self.total[0])
        return results

    @cute.jit
    def store_totals(self, partial):
        """partial[row, column tile] = Σ dA·f, a row a lane."""
        if cutlass.const_expr(partial is not None):
            row = self.tile.row + self.desk.warp * 32 + self.desk.thread % 32
            if row < self.tile.end:
                partial[row, self.tile.column_tile] = self.total[0]

    @cute.jit
    def store_sums(self, out):
        """out[block of tokens, column] = sums of the columns over the block's rows."""
        desk, combine = self.desk, lambda a, b: a + b
        quantized.gather(self.sums, desk.sums, combine, desk)
        desk.barrier.arrive_and_wait()
        totals = quantized.gathered(desk.sums, combine, desk)
        for i in cutlass.range_constexpr(cute.size(self.sums)):
            part = self.copies[i // PATCH_COLS]
            column = part.column + desk.column() + i % PATCH_COLS
            if desk.thread < quantized.ACROSS and column < part.limit:
                out[part.token // BLOCK, column] = totals[i]
