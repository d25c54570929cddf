"""The largest magnitudes of NVFP4 operands on SM90: of values in registers, of an epilogue's pieces, of a group.

A magnitude is kept as the bits of |x|, as in `fp8_scales`. Those of a group meet in global memory by atomic maxima of
FP32 bits, so their order changes nothing.
"""

import functools
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, range_constexpr
from cutlass.cutlass_dsl import dsl_user_op, select_

from cute_kernels.hopper.asm import asm
from cute_kernels.hopper.epilogues import epilogue
from cute_kernels.hopper.epilogues.quantized import larger
from cute_kernels.hopper.fp8_scales import MAGNITUDES, bf16_bits, exchanged, halves_of, max_halves
from cute_kernels.hopper.nvfp4_scales import QUARTER, butterfly, half_of, larger_halves, rounded_pair

ROWS = 16
"""Of a piece, those of one warp: a block that is rotated."""
ROW_BYTES, CHUNK_BYTES = 2 * epilogue.COLS, 16


def column_maxima(words):
    """The largest magnitudes of the thread's columns, two a word."""
    return [functools.reduce(larger_halves, column) & Uint32(MAGNITUDES) for column in zip(*words, strict=True)]


def over_lanes(largest, lanes: int):
    """The largest of the lower, and of the upper halves of `lanes` neighbouring lanes' words."""
    distance = 1
    while distance < lanes:
        largest = max_halves(largest, exchanged(largest, distance))
        distance *= 2
    return largest


def largest_half(words):
    """The largest magnitude of all values of a thread, in the lower half of a word."""
    largest = functools.reduce(max_halves, column_maxima(words))
    return max_halves(largest, largest >> 16) & Uint32(0xFFFF)


def largest_of(words, lanes: int):
    """The FP32 bits of the largest magnitude of all values of `lanes` neighbouring lanes."""
    return bf16_bits(over_lanes(largest_half(words), lanes))


@dsl_user_op
def raise_to(address, bits, known, *, loc=None, ip=None):
    """Lane 0 raises an integer in global memory to `bits`, where it is less; never if `known` is not."""
    operands = Int64(address), Int32(bits), Int32(known)
    text = """{ .reg .pred p; .reg .b32 lane;
        mov.u32 lane, %laneid; setp.lt.s32 p, $2, $1; setp.eq.and.u32 p, lane, 0, p;
        @p red.relaxed.gpu.global.max.s32 [$0], $1; }"""
    asm(None, operands, text, "l,r,r,~{memory}", loc, ip, effects=True)


def place_of(amax, group):
    """The address of amax[group]."""
    return amax.iterator.toint() + Int64(group) * 4


def raise_group(amax, group, bits, known=-1):
    """amax[group] is at least the FP32 value of these bits, of which it is known to be at least `known`."""
    raise_to(place_of(amax, group), bits, known)


@dsl_user_op
def look(address, *, loc=None, ip=None):
    """An integer in global memory that others raise, as it is now or was."""
    text = "ld.relaxed.gpu.global.s32 $0, [$1];"
    return asm(Int32, [Int64(address)], text, "=r,l,~{memory}", loc, ip, effects=True)


# ----------------------------------------------------------------------------------------------------------------------
# Of an epilogue's pieces


@dsl_user_op
def load_turned(address, *, loc=None, ip=None):
    """Four 8 x 8 matrices of 16-bit values, of which each lane gives the address of a row. Of each, lane l gets column
    l // 4 of rows 2 (l % 4) and 2 (l % 4) + 1, a word.
    """
    text = "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0, $1, $2, $3}, [$4];"
    return asm([Uint32] * 4, [Int32(address)], text, "=r,=r,=r,=r,r,~{memory}", loc, ip, effects=True)


@cute.jit
def read_column(address, thread, left, columns):
    """This lane's column of a piece, 16 rows, two a word: zeros past the first `left` rows and `columns` columns.
    address: of its row for `load_turned`.
    """
    words = cute.make_rmem_tensor((ROWS // 2,), Uint32)
    for half in range_constexpr(2):
        for i, word in enumerate(load_turned(address + half * (ROWS // 2 * ROW_BYTES))):
            words[4 * half + i] = word
    left -= Int32(thread >> 5) * ROWS
    if (left < ROWS) | (columns < epilogue.COLS):
        column = Int32((thread & 3) * 8 + (thread >> 2 & 7))
        rows = Int32(select_(column < columns, left, Int32(0)))
        for i in range_constexpr(ROWS // 2):
            kept = select_(rows > 2 * i, Uint32(0xFFFF), Uint32(0))
            words[i] = words[i] & Uint32(select_(rows > 2 * i + 1, Uint32(0xFFFFFFFF), kept))
    return words


class Maxima:
    """The largest magnitudes of what a warpgroup's pieces hold of a tile, and if asked of its rotated transpose.

    A tile begins at its group's first row or a multiple of 64 below, so a warp's 16 rows of a piece are a block that is
    rotated; rows past the group's end count as zeros, as in its padding. A warp reads the rows that it has written,
    rounded, back with a whole column a lane. Lane l's row of matrix i, where the matrices of a load are pairs of rows,
    is row 2 i + l % 2 of columns 8 (l % 8 // 2) to + 8: rows 2 (l % 4) of such a matrix are of columns 8 (l % 4).

    The rotation is that of `nvfp4_scales`. Rounding keeps order and signs, so the largest sum is rounded, not each.
    """

    def __init__(self, amax: cute.Tensor, turned_amax: cute.Tensor | None, tile, room):
        self.amax, self.turned_amax, self.tile, self.room = amax, turned_amax, tile, room
        self.found: Any = None
        """The largest magnitudes, in the lower half of what was read, in the upper of that once rotated."""

    def see(self, pieces, row, column, width, known=()):
        """Pieces, which this warp has written: rows row.., columns column.. of `width`.

        Nothing that is formed here is formed before `known`, FP32, and what was found so far: registers.
        """
        zero = Uint32(self.tile.end) >> 31
        for value in known:
            zero = zero & value.bitcast(Uint32)
        zero = zero if self.found is None else zero & self.found
        thread = Uint32(self.room.thread) ^ zero
        matrix = thread >> 3 & 3
        place = (thread >> 5) * ROWS + matrix * 2 + (thread & 1)
        place = Int32(place * ROW_BYTES + ((thread >> 1 & 3) ^ matrix) * CHUNK_BYTES)
        for piece in pieces:
            address = self.room.piece(piece).iterator.toint() + place
            self.add(read_column(address, thread, self.tile.end - row, width - column))

    def add(self, words):
        """One lane's words of `read_column`."""
        plain = words[0] & Uint32(MAGNITUDES)
        for i in range(1, ROWS // 2):
            plain = max_halves(plain, words[i] & Uint32(MAGNITUDES))
        found = max_halves(plain, plain >> 16) & Uint32(0xFFFF)
        if self.turned_amax is not None:
            first, *others = butterfly([half_of(words[i // 2], i % 2 == 1) for i in range(ROWS)])
            turned = functools.reduce(larger, others, first)
            found = halves_of(found, rounded_pair(turned * Float32(QUARTER), Float32(0.0)), False)
        self.found = found if self.found is None else max_halves(self.found, found)

    def leave(self):
        """The group's maxima are at least these."""
        found = over_lanes(self.found, 32)
        raise_group(self.amax, self.tile.group, bf16_bits(found & Uint32(0xFFFF)))
        if self.turned_amax is not None:
            raise_group(self.turned_amax, self.tile.group, bf16_bits(found >> 16))


def maxima_of(args: Any, tile, room) -> Maxima | None:
    """Of results whose epilogue is given somewhere to leave them."""
    return None if getattr(args, "amax", None) is None else Maxima(args.amax, args.turned_amax, tile, room)
