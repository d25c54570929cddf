"""A pre-activation that is kept for backward in MXFP8: `mxfp8_activation` leaves and `mxfp8_dactivation` reads it so.

preact E4M3 [T, 2I or I] in blocks of 32 columns, scales bytes [T, 2 ⌈I/32⌉₄ or ⌈I/32⌉₄]: see `mxfp8_reference`. It is
quantised from its rounded values, which act is formed from too; read back, a value is element times scale in FP32.

A piece of 64 rows x 32 columns has half the bytes: two lie where `epilogue` has one, rows of 32 bytes, whose halves
change places in every second 4 rows. A row's block is in the four threads that share two rows of a piece of gate and
one of up: each of them has one of the four scales, of row q % 2 of half q / 2 for the q-th.
"""

import functools

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32, Int64, Uint16, Uint32
from cutlass.cutlass_dsl import dsl_user_op

from cute_kernels.hopper.asm import asm
from cute_kernels.hopper.configs import SETS
from cute_kernels.hopper.epilogues import epilogue
from cute_kernels.hopper.epilogues.dactivation import fill
from cute_kernels.hopper.epilogues.eights import over_row
from cute_kernels.hopper.epilogues.mxfp8_activation import CHUNKS, ActivateMxfp8
from cute_kernels.hopper.epilogues.mxfp8_dactivation import PIECE_WORDS, DifferentiateMxfp8
from cute_kernels.hopper.fp8_scales import FOURS
from cute_kernels.hopper.mxfp8_scales import BLOCK, decode_factor, elements, encode_factor, scale_byte, wide_values


def in_bytes(room):
    """The same room with its pieces cut in two, of E4M3."""
    layout = epilogue.staging_layout(2 * cute.size(room.staging) // (2 * PIECE_WORDS), Float8E4M3FN)
    start = cute.recast_ptr(room.staging.iterator, layout.inner, dtype=Float8E4M3FN)
    return room._replace(staging=cute.make_tensor(start, layout.outer), first=2 * room.first)


class Pairs:
    """Pieces of E4M3 as pairs of a thread's own columns; as `epilogue.Words`."""

    def __init__(self, room):
        self.base = cute.recast_ptr(room.piece(0).iterator, cute.make_swizzle(0, 4, 3), dtype=Uint16)
        start, turn = room.row() * (epilogue.COLS // 2) + room.thread % 4, room.row() // 4 % 2
        self.offsets = [start + 8 * (half ^ turn) for half in range(2)]

    def at(self, piece, row: int, chunk: int):
        """The pair in the thread's row (0, or 1: 8 below) and in columns 8 chunk to 8 chunk + 8, a tensor of one."""
        offset = self.offsets[chunk // 2] + 4 * (chunk % 2) + piece * PIECE_WORDS + row * (8 * epilogue.COLS // 2)
        return cute.make_tensor(self.base + offset, cute.make_layout(1))


def scale_address(scales: cute.Tensor, inputs: int, column, tile, room):
    """(address, whether it is there) of the scale that this thread has, of the piece from `column` on, rows tile.row..;
    see the module.
    """
    q, width = room.thread % 4, scales.shape[1]
    row, block = tile.row + room.row() + 8 * (q % 2), column // BLOCK
    there = (row < tile.end) & (block * inputs < width) & (q < 2 * inputs)
    return scales.iterator.toint() + Int64(row) * width + (q // 2 * (width // inputs) + block), there


@dsl_user_op
def store_byte(address, wanted, byte, *, loc=None, ip=None):
    """A byte to global memory, if `wanted`."""
    operands = Int64(address), Int32(wanted), Uint32(byte)
    text = "{ .reg .pred p; setp.ne.b32 p, $1, 0; @p st.global.u8 [$0], $2; }"
    asm(None, operands, text, "l,r,r,~{memory}", loc, ip, effects=True)


@dsl_user_op
def load_bytes(address, wanted, count: int, *, loc=None, ip=None):
    """2 or 4 bytes of global memory that nobody writes, the first lowest; 0 if not `wanted`."""
    text = f"{{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.b32 $0, 0; @p ld.global.nc.u{8 * count} $0, [$1]; }}"
    return asm(Uint32, (Int64(address), Int32(wanted)), text, "=&r,l,r", loc, ip, effects=True)


class ActivateKept(ActivateMxfp8):
    """The activation, its pre-activation kept quantised."""

    def keep(self, args, values: cute.Tensor, sent: int, place, tile, room):
        """Gate and up in one piece of staging memory."""
        (block, column), inputs = place, self.preact.inputs
        pieces = in_bytes(room)
        pairs, first = Pairs(pieces), 2 * (sent % self.pieces)
        count = 2 * CHUNKS
        words = cute.make_tensor(cute.recast_ptr(values.iterator, dtype=Uint32), cute.make_layout(inputs * count))
        scales = Uint32(0)
        for index in range(inputs):
            encode = []
            for row in range(2):
                places = [2 * (count * index + 2 * chunk + row) + e for chunk in range(CHUNKS) for e in range(2)]
                byte = scale_byte(over_row([values[i].to(Float32) for i in places]).bitcast(Int32))
                encode += [encode_factor(byte)] * 2
                scales = scales | Uint32(byte) << (8 * (2 * index + row))
            for chunk in range(CHUNKS):
                both = elements([words[count * index + 2 * chunk + row] for row in range(2)], encode)
                for row in range(2):
                    pairs.at(first + index, row, chunk)[0] = Uint16(both >> (16 * row))
        rows = tile._replace(row=tile.row + block * epilogue.ROWS)
        store_byte(*scale_address(args.scales, inputs, column, rows, room), scales >> Uint32(room.thread % 4 * 8))
        sink, halves = room.sinks[1], range(inputs)
        leaving = [(sink, pieces.piece(first + index), *self.preact.place(column, index)) for index in halves]
        zero = epilogue.leave(leaving, sent, self.pieces, rows, room)
        return sent + 1, epilogue.not_before(zero, values)


class DifferentiateKept(DifferentiateMxfp8):
    """The gradient at a pre-activation that was kept quantised."""

    def fill(self, number: int, row, tile, room, leads):
        slot, column = number % SETS, tile.column_tile * self.cut.tile_n + number * epilogue.COLS
        pieces = in_bytes(room)
        fill(leads, pieces, row, column, 2 * slot * self.set, room.filled + slot, self.inputs, True)

    def reader(self, args, tile, words, room):
        first = tile.column_tile * self.cut.tile_n
        place = scale_address(args.scales, self.inputs, first, tile, room)
        left = args.preact.shape[1] // self.inputs - first  # what only fills up a word may be anything
        held = load_bytes(*place, self.cut.tile_n // BLOCK) & Uint32(0xFFFFFFFF) >> Uint32(
            cutlass.max(32 - left // 4, 0)
        )
        pairs = Pairs(in_bytes(room))

        @functools.cache
        def factor(number: int, index: int, row: int):
            word = cute.arch.shuffle_sync(held, offset=2 * index + row, mask_and_clamp=FOURS)
            return decode_factor(Int32(Uint32(word) >> (8 * number) & Uint32(0xFF)))

        def read(number: int, row: int, chunk: int):
            set_ = 2 * (number % SETS * self.set)
            found = [Uint32(pairs.at(set_ + index, row, chunk)[0]) for index in range(self.inputs)]
            return [wide_values(pair, factor(number, index, row)) for index, pair in enumerate(found)]

        return read
