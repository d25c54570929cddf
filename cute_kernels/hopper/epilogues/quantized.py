"""FP32 values to E4M3 and their scales, in rows and transposed: what a finishing warpgroup does with a block.

A block is 128 rows x 128 columns, one scale for each of its rows and one for each of its columns. Its values are formed
from what the consumer warpgroups left in shared memory, by 128 threads that do nothing else, so that the next tile's
products hide it. Thread t has a patch of 16 rows x 8 columns: rows 16 (t // 16) + i, columns 8 (t % 16) + j.

    first pass    row by row: the maximum over 16 threads gives the row's scale, its bytes go to global memory, 128 of
                  a row side by side; the columns' maxima are kept in registers, then gathered in shared memory
    second pass   the values are formed again, scaled for their columns, and leave as 16 bytes of each column

Scales are those of `fp8_scales`.
"""

import functools
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr, range_constexpr
from cutlass.cute.nvgpu import CopyUniversalOp
from cutlass.cutlass_dsl import dsl_user_op, select_

from cute_kernels.hopper.asm import asm
from cute_kernels.hopper.epilogues import epilogue
from cute_kernels.hopper.fp8_scales import pack4, scales

BLOCK = 128
WARPS = 4
PATCH_ROWS, PATCH_COLS = 16, 8
BATCH = 4
"""Rows of a patch that are formed together: a word of a column."""
ACROSS = BLOCK // PATCH_COLS
"""Threads side by side over a row of the block."""


class Desk(NamedTuple):
    """What the finishing warpgroup has: the address of the tile that was handed over, FP32 room for maxima and for sums
    of columns [128, 4 warps, sides], a barrier of its own, a sink; and the thread.
    """

    tile: Any
    maxima: Any
    sums: Any
    barrier: Any
    sink: Any
    thread: Any
    warp: Any

    def row(self):
        """The first row of this thread's patch."""
        return self.thread // ACROSS * PATCH_ROWS

    def column(self):
        """The first column of this thread's patch."""
        return self.thread % ACROSS * PATCH_COLS


class Copies(NamedTuple):
    """Where one block's values go, and where it lies there.

    rows, row_scales, columns, column_scales: the whole results, None if not wanted. column: the block's first column
    in both copies, limit: where columns end. scale_row: of row_scales. token: the block's first padded token.
    """

    rows: Any
    row_scales: Any
    columns: Any
    column_scales: Any
    column: Any
    limit: Any
    scale_row: Any
    token: Any


# ----------------------------------------------------------------------------------------------------------------------
# Single values


@dsl_user_op
def larger(a, b, *, loc=None, ip=None):
    """max(|a|, |b|) in FP32, NaN if either is."""
    text = "{ .reg .f32 a, b; abs.f32 a, $1; abs.f32 b, $2; max.NaN.f32 $0, a, b; }"
    return asm(Float32, (Float32(a), Float32(b)), text, "=f,f,f", loc, ip)


@dsl_user_op
def bits_of(value, *, loc=None, ip=None):
    """The bits of a FP32 value."""
    return asm(Int32, [Float32(value)], "mov.b32 $0, $1;", "=r,f", loc, ip)


@dsl_user_op
def float_of(bits, *, loc=None, ip=None):
    """The FP32 value of 32 bits."""
    return asm(Float32, [Int32(bits)], "mov.b32 $0, $1;", "=f,r", loc, ip)


@dsl_user_op
def load_words(address, count: int, *, loc=None, ip=None):
    """2 or 4 words of shared memory, from a multiple of their size."""
    names = ", ".join(f"${i}" for i in range(count))
    text = f"ld.shared.v{count}.b32 {{{names}}}, [${count}];"
    return asm([Uint32] * count, [Int32(address)], text, "=r," * count + "r,~{memory}", loc, ip, effects=True)


@dsl_user_op
def store_vector(address, values, *, loc=None, ip=None):
    """Four FP32 values to shared memory, to a multiple of 16 bytes."""
    operands = Int32(address), *map(Float32, values)
    asm(None, operands, "st.shared.v4.f32 [$0], {$1, $2, $3, $4};", "r,f,f,f,f,~{memory}", loc, ip, effects=True)


def widened(words):
    """The BF16 values of some words, two each, in FP32."""
    return [float_of(bits) for word in words for bits in (Int32(word) << 16, Int32(word) & Int32(-0x10000))]


def where(condition, yes, no):
    """`yes` or `no`, without a branch."""
    return type(no)(select_(condition, yes, no))


def factor_of(amax, power_of_two: bool, source: str = "float32"):
    """(s, 1 / s) of a block's amax. source: dtype of its values."""
    return scales(bits_of(amax), power_of_two, source)


# ----------------------------------------------------------------------------------------------------------------------
# Blocks


def store_words(out: cute.Tensor, offset, words):
    """2 or 4 words to E4M3 data, `offset` bytes from its start."""
    there = cute.recast_ptr(out.iterator + cute.assume(offset, divby=4 * len(words)), dtype=Uint32)
    source = cute.make_rmem_tensor((len(words),), Uint32)
    for i, word in enumerate(words):
        source[i] = word
    copy = cute.make_copy_atom(CopyUniversalOp(), Uint32, num_bits_per_copy=32 * len(words))
    cute.copy(copy, source, cute.make_tensor(there, cute.make_layout(len(words))))


def over_row(values):
    """The largest magnitude of a row of the block, of which this thread has eight values."""
    most = larger(values[0], values[1])
    for value in values[2:]:
        most = larger(most, value)
    for offset in (1, 2, 4, 8):
        most = larger(most, cute.arch.shuffle_sync_bfly(most, offset=offset))
    return most


def row_factor(factors, i, desk: Desk):
    """The factor of row i of the patch: each lane holds that of one of its warp's rows."""
    return cute.arch.shuffle_sync(factors, offset=(desk.thread & ACROSS) + i)


def load_factors(probs, tile, desk: Desk):
    """This lane's factor, rounded to BF16 and widened; 0 for a row that the group does not have. None for None."""
    if probs is None:
        return None
    row = tile.row + desk.warp * 32 + desk.thread % 32
    return epilogue.row_factor(probs, row, tile.end).to(cutlass.BFloat16).to(Float32)


class Block:
    """One block of a tile for each of `copies` (its sides), which all come from the same rows.

    source: dtype of the values. at_once: rows that are formed together in the first pass.
    """

    source = "float32"
    at_once = BATCH

    def __init__(self, copies: tuple, power_of_two: bool, tile, desk: Desk):
        self.copies, self.power_of_two, self.tile, self.desk = copies, power_of_two, tile, desk
        self.sides = len(copies)

    def begin(self, first, count: int):
        """Before a pass over `count` columns of the patch from `first` on."""

    def batch(self, number, first, count: int):
        """Before the rows of a batch: what `row` will need of it."""

    def row(self, held, step: int, i, first, count: int, counts: bool):
        """Of each side, `count` FP32 values of row i of the patch from column `first` on; zero if there is no such row.

        held: what `batch` returned; step: the row of the batch. counts: it is the first pass.
        """
        raise NotImplementedError

    @cute.jit
    def quantize(self):
        """Both copies of the block."""
        desk, tile = self.desk, self.tile
        lane = desk.thread % 32
        maxima = cute.make_rmem_tensor((self.sides * PATCH_COLS,), Float32)
        inverses = cute.make_rmem_tensor((self.sides,), Float32)
        maxima.fill(0.0)
        self.begin(0, PATCH_COLS)
        for batch in cutlass.range(PATCH_ROWS // self.at_once, unroll=1):
            held = self.batch(batch, 0, PATCH_COLS)
            for step in range_constexpr(self.at_once):
                i = self.at_once * batch + step
                row = tile.row + desk.row() + i
                found = self.row(held, step, i, 0, PATCH_COLS, True)
                for side in range_constexpr(self.sides):
                    part, values = self.copies[side], found[side]
                    for j in range_constexpr(PATCH_COLS):
                        at = side * PATCH_COLS + j
                        maxima[at] = larger(maxima[at], values[j])
                    if const_expr(part.rows is not None):
                        factor, inverse = factor_of(over_row(values), self.power_of_two, self.source)
                        inverses[side] = where(lane % ACROSS == i, inverse, inverses[side])
                        column = part.column + desk.column()
                        if row < tile.end and column < part.limit:
                            words = [pack4(*[v * factor for v in values[at : at + 4]]) for at in (0, 4)]
                            store_words(part.rows, Int64(row) * part.rows.shape[1] + column, words)
        for side in range_constexpr(self.sides):
            part = self.copies[side]
            if const_expr(part.rows is not None):
                row = tile.row + desk.warp * 32 + lane
                if row < tile.end and part.column < part.limit:
                    part.row_scales[part.scale_row, row] = inverses[side]
        if const_expr(self.copies[0].columns is not None):
            gather(maxima, desk.maxima, larger, desk)
            desk.barrier.arrive_and_wait()
            self.store_columns()

    @cute.jit
    def store_columns(self):
        """After the meeting: scales of this thread's columns, 16 bytes of each, four columns at a time."""
        desk = self.desk
        factors = cute.make_rmem_tensor((self.sides * PATCH_COLS,), Float32)
        maxima = gathered(desk.maxima, larger, desk)
        for i in range_constexpr(self.sides * PATCH_COLS):
            factors[i], inverse = factor_of(maxima[i], self.power_of_two)
            part = self.copies[i // PATCH_COLS]
            column = part.column + desk.column() + i % PATCH_COLS
            if desk.thread < ACROSS and column < part.limit:
                part.column_scales[part.token // BLOCK, column] = inverse
        words = cute.make_rmem_tensor((PATCH_ROWS // BATCH, self.sides * 4), Uint32)
        words.fill(0)
        for half in cutlass.range(PATCH_COLS // 4, unroll=1):
            self.begin(4 * half, 4)
            for batch in cutlass.range(PATCH_ROWS // BATCH, unroll=1):
                held = self.batch(batch, 4 * half, 4)
                found = [self.row(held, step, BATCH * batch + step, 4 * half, 4, False) for step in range(BATCH)]
                for side in range_constexpr(self.sides):
                    for j in range_constexpr(4):
                        values = [row[side][j] * factors[side * PATCH_COLS + j] for row in found]
                        for before in range_constexpr(PATCH_ROWS // BATCH - 1):
                            words[before, 4 * side + j] = words[before + 1, 4 * side + j]
                        words[PATCH_ROWS // BATCH - 1, 4 * side + j] = pack4(*values)
            for side in range_constexpr(self.sides):
                part = self.copies[side]
                for j in range_constexpr(4):
                    at = part.column + desk.column() + 4 * half + j
                    if at < part.limit:
                        place = Int64(at) * part.columns.shape[1] + part.token + desk.row()
                        store_words(part.columns, place, [words[i, 4 * side + j] for i in range(PATCH_ROWS // BATCH)])
                    factors[side * PATCH_COLS + j] = factors[side * PATCH_COLS + 4 + j]


@cute.jit
def gather(values: cute.Tensor, room: cute.Tensor, combine: cutlass.Constexpr, desk: Desk):
    """Results of this thread's columns (of each side) over its rows, combined over the warp, to shared memory."""
    for i in range_constexpr(cute.size(values)):
        values[i] = combine(values[i], cute.arch.shuffle_sync_bfly(values[i], offset=ACROSS))
    if desk.thread % 32 < ACROSS:
        for i in range_constexpr(cute.size(values)):
            room[desk.column() + i % PATCH_COLS, desk.warp, i // PATCH_COLS] = values[i]


def gathered(room: cute.Tensor, combine, desk: Desk):
    """What all warps have gathered for this thread's columns (of each side), combined in order."""
    start, sides = room.iterator.toint() + 4 * desk.column(), cute.size(room) // (BLOCK * WARPS)
    results = []
    for side in range(sides):
        for first in range(0, PATCH_COLS, 4):
            parts = [
                [float_of(word) for word in load_words(start + 4 * (first + BLOCK * (side * WARPS + warp)), 4)]
                for warp in range(WARPS)
            ]
            results += [functools.reduce(combine, column) for column in zip(*parts, strict=True)]
    return results
