"""One pass over BF16 matrices on SM90 that gives their MXFP8 values, in BF16 or as stored; and the way back.

    QuantizeRows   x [T, K] of groups: values in blocks of 1x32 and of 32x1, or of 32x32, the stored copy in 32x1
    Restore        the stored copy of QuantizeRows -> its values [T, K]

Layouts and formulas: `mxfp8_reference`. K is a multiple of 32, rows of x any multiple of 8 elements apart. A block of
32 rows begins at a group's first row or a multiple of 32 below it, so it never spans two; rows past the group's end are
not read and count as zeros.

Roles: warps that have nothing in common, persistent, one CTA an SM: each takes a piece of 32 rows x 128 columns (256 to
restore) after another. To quantise, a warp's next piece is on its way to shared memory (`quantize_pieces`) while it
works at one in registers, 4 columns a thread; to restore, a thread asks for 8 columns of all 32 rows at once.
A column's block is one thread's; a row's is that of 8 lanes, which meet by shuffles, two rows to a word.

Numerics: maxima are exact, products with powers of two FP32, one rounding to E4M3.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import BFloat16, Boolean, Float8E4M3FN, Int32, Int64, Uint8, Uint32, const_expr
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

from cute_kernels.hopper.epilogues.eights import load_global, store_global
from cute_kernels.hopper.fp8_scales import MAGNITUDES, bf16_bits, exchanged, halves_of, max_halves
from cute_kernels.hopper.mxfp8_scales import (
    BLOCK,
    decode_factor,
    elements,
    encode_factor,
    restored_word,
    scale_byte,
    values_of,
)
from cute_kernels.hopper.quantize_pieces import COLUMNS, Piece, Pieces, address, find
from cute_kernels.hopper.rowwise_kernel import row_matrix, vector_of

WARPS = 16
RESTORED_COLUMNS = 8


class Copies(NamedTuple):
    """Where results go, each None if not wanted: values in blocks of 1x32 and 32x1, the stored copy and its scales."""

    rows: Any
    columns: Any
    data: Any
    scale: Any


@cute.jit
def piece_of(index, spans, offsets, padded):
    """Piece `index` of those to restore: columns first, then rows of groups."""
    block = index // spans
    top = block * BLOCK
    group = find(padded, top)
    row = offsets[group] + top - padded[group]
    column = ((index - block * spans) * 32 + cute.arch.lane_idx()) * RESTORED_COLUMNS
    return Piece(row, cutlass.min(offsets[group + 1] - row, BLOCK), top, column)


class Quantize:
    """What a thread does with a piece. Its values are words [row][pair of columns]."""

    def __init__(self, square: bool):
        self.square = square

    def column_maxima(self, words):
        """The largest magnitudes of the thread's columns, two a word."""
        largest = [word & Uint32(MAGNITUDES) for word in words[0]]
        for row in words[1:]:
            largest = [max_halves(one, word & Uint32(MAGNITUDES)) for one, word in zip(largest, row, strict=True)]
        return largest

    def row_maxima(self, words):
        """The largest magnitudes of rows over the 8 lanes of a block, two rows a word."""
        found = []
        for r in range(0, BLOCK, 2):
            both = [max_halves(*(word & Uint32(MAGNITUDES) for word in row)) for row in words[r : r + 2]]
            largest = max_halves(halves_of(*both, False), halves_of(*both, True))
            for distance in (1, 2, 4):
                largest = max_halves(largest, exchanged(largest, distance))
            found.append(largest)
        return found

    def halves(self, largest):
        """The FP32 bits of both halves of a word of maxima."""
        return bf16_bits(largest & Uint32(0xFFFF)), bf16_bits(largest >> 16)

    def piece(self, words, width, copies: Copies, piece: Piece):
        """Everything that is wanted of one piece."""
        inside = piece.column < width
        if self.square:
            self.store_square(words, copies, piece, inside)
            return
        zero = Uint32(width) >> 31  # which only we know
        if copies.columns is not None or copies.data is not None:
            amax = [bits for largest in self.column_maxima(words) for bits in self.halves(largest)]
            bytes_ = [scale_byte(bits) for bits in amax]
            encode = [encode_factor(byte) for byte in bytes_]
            _, piece = self.later([], piece, zero & Uint32(bytes_[0]))
            if copies.columns is not None:
                factors = encode, [decode_factor(byte) for byte in bytes_]
                last = self.store_values(words, lambda r, last: factors, copies.columns, piece, inside)
                words, piece = self.later(words, piece, zero & last)
            if copies.data is not None:
                last = self.store_elements(words, encode, bytes_, copies, piece, inside)
                words, piece = self.later(words, piece, zero & last)
        if copies.rows is not None:
            self.store_rows(words, copies, piece, inside, zero)

    def later(self, words, piece: Piece, zero):
        """The same, not before `zero` is known: else what is formed of them for two copies stays in registers."""
        piece = piece._replace(row=piece.row + Int32(zero), left=piece.left + Int32(zero))
        return [[word ^ zero for word in row] for row in words], piece

    def store_rows(self, words, copies: Copies, piece: Piece, inside, zero):
        """Values in blocks of 1x32. The scales of a row wait for the row before."""
        maxima = self.row_maxima(words)

        def factors(r: int, last):
            largest = maxima[r // 2] if last is None else maxima[r // 2] | (zero & last)
            byte = scale_byte(self.halves(largest)[r % 2])
            return [encode_factor(byte)] * COLUMNS, [decode_factor(byte)] * COLUMNS

        self.store_values(words, factors, copies.rows, piece, inside)

    def store_square(self, words, copies: Copies, piece: Piece, inside):
        """Values in blocks of 32x32: one scale for 8 lanes."""
        largest = self.column_maxima(words)
        largest = max_halves(*largest)
        largest = max_halves(largest, largest >> 16)
        for distance in (1, 2, 4):
            largest = max_halves(largest, exchanged(largest, distance))
        byte = scale_byte(bf16_bits(largest & Uint32(0xFFFF)))
        factors = [encode_factor(byte)] * COLUMNS, [decode_factor(byte)] * COLUMNS
        self.store_values(words, lambda r, last: factors, copies.rows, piece, inside)

    def store_values(self, words, factors, out: cute.Tensor, piece: Piece, inside):
        """Rounded values to `out`. factors(row, a word of the row before or None): (to encode, to decode) by column."""
        start, step = address(out, piece.row, piece.column)
        last = None
        zero = Uint32(out.shape[1]) >> 31
        for r in range(BLOCK):
            if last is not None and r % 4 == 0:
                start += Int64(zero & last)  # addresses, too, wait
            encode, decode = factors(r, last)
            pairs = [slice(2 * i, 2 * i + 2) for i in range(COLUMNS // 2)]
            result = [restored_word(word, encode[at], decode[at]) for word, at in zip(words[r], pairs, strict=True)]
            store_global(start + r * step, 0, inside & (r < piece.left), result)
            last = result[0]
        return last

    def store_elements(self, words, encode, bytes_, copies: Copies, piece: Piece, inside):
        """E4M3 to the padded matrix, zeros in its padding, and the scales of the block."""
        start, step = address(copies.data, piece.padded, piece.column)
        for r in range(BLOCK):
            last = elements(words[r], encode)
            store_global(start + r * step, 0, inside, [last])
        packed = Uint32(bytes_[0])
        for i, byte in enumerate(bytes_[1:]):
            packed = packed | Uint32(byte) << (8 * (i + 1))
        place, _ = address(copies.scale, piece.padded // BLOCK, piece.column)
        store_global(place, 0, piece.column < copies.scale.shape[1], [packed])
        return last


class QuantizeRows(Quantize):
    """Rows of groups. scattered: see `quantize_pieces`."""

    def __init__(self, square: bool, scattered: bool):
        super().__init__(square)
        self.pieces = Pieces(BLOCK, WARPS, 1, scattered)

    @cute.jit
    def __call__(self, x: cute.Tensor, offsets: cute.Tensor, padded: cute.Tensor, copies: tuple, grid: Int32, stream):
        atom, tensor = self.pieces.source(x)
        self.Storage = self.pieces.storage()
        self.kernel(atom, tensor, offsets, padded, copies).launch(
            grid=[grid, 1, 1], block=[WARPS * 32, 1, 1], min_blocks_per_mp=1, stream=stream
        )

    @cute.kernel
    def kernel(
        self, atom: cute.CopyAtom, tensor: cute.Tensor, offsets: cute.Tensor, padded: cute.Tensor, copies: tuple
    ):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        memory = cutlass.memory.SmemAllocator().allocate(self.Storage)
        width, phase = tensor.shape[0], Int32(0)
        way, there = self.pieces.start(memory, warp, width, padded)
        if way.first < way.end:
            there = self.pieces.ask(memory, atom, tensor, warp, there, way, offsets, padded)
        for index in cutlass.range(way.first, way.end, way.step, unroll=1):
            piece, _, words = self.pieces.arrived(memory, warp, phase)
            words = words[:]
            phase ^= 1
            cute.arch.sync_warp()
            if index + way.step < way.end:
                there = self.pieces.ask(memory, atom, tensor, warp, there, way, offsets, padded)
            wanted = Boolean(piece.left > 0)
            if const_expr(Copies(*copies).data is not None):
                wanted = Boolean(True)  # zeros in the padding
            if wanted:
                self.piece(words, width, Copies(*copies), piece)


class Restore:
    """The values of a stored copy, where the rows were."""

    @cute.jit
    def __call__(
        self,
        data: cute.Tensor,
        scale: cute.Tensor,
        offsets: cute.Tensor,
        padded: cute.Tensor,
        out: cute.Tensor,
        grid: Int32,
        stream,
    ):
        self.kernel(data, scale, offsets, padded, out).launch(
            grid=[grid, 1, 1], block=[WARPS * 32, 1, 1], min_blocks_per_mp=1, stream=stream
        )

    @cute.kernel
    def kernel(
        self, data: cute.Tensor, scale: cute.Tensor, offsets: cute.Tensor, padded: cute.Tensor, out: cute.Tensor
    ):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        spans = (out.shape[1] + 32 * RESTORED_COLUMNS - 1) // (32 * RESTORED_COLUMNS)
        pieces = padded[padded.shape[0] - 1] // BLOCK * spans
        for index in cutlass.range(cta * WARPS + warp, pieces, ctas * WARPS, unroll=1):
            piece = piece_of(index, spans, offsets, padded)
            if piece.left > 0:
                self.piece(data, scale, piece, out)

    def piece(self, data: cute.Tensor, scale: cute.Tensor, piece: Piece, out: cute.Tensor):
        inside = piece.column < out.shape[1]
        start, step = address(data, piece.padded, piece.column)
        words = [load_global(start + r * step, 0, inside & (r < piece.left), 2) for r in range(BLOCK)]
        place, _ = address(scale, piece.padded // BLOCK, piece.column)
        packed = load_global(place, 0, inside, 2)
        decode = [decode_factor(Int32(packed[i // 4] >> (8 * (i % 4)) & Uint32(0xFF))) for i in range(RESTORED_COLUMNS)]
        target, step = address(out, piece.row, piece.column)
        for r in range(BLOCK):
            values = [values_of(words[r][i // 2], i % 2 == 1, decode[2 * i : 2 * i + 2]) for i in range(4)]
            store_global(target + r * step, 0, inside & (r < piece.left), values)


# ----------------------------------------------------------------------------------------------------------------------


def thirty_twos():
    return cute.sym_int(divisibility=32)


def dense(element, rows, columns):
    """A fake contiguous matrix."""
    return make_fake_compact_tensor(element, (rows, columns), stride_order=(1, 0), assumed_align=16)


def stored(columns):
    """(data, scales) of a fake stored copy."""
    return dense(Float8E4M3FN, cute.sym_int(), columns), dense(Uint8, cute.sym_int(), cute.sym_int(divisibility=128))


def places():
    return vector_of(Int32, cute.sym_int()), vector_of(Int32, cute.sym_int())


def build_rows(options):
    """x, offsets, padded, (rows, columns, data, scale) each or None, grid size, stream."""
    rows, columns = cute.sym_int(), thirty_twos()
    copies = (
        dense(BFloat16, rows, columns) if options.rowwise else None,
        dense(BFloat16, rows, columns) if options.columnwise else None,
        *(stored(columns) if options.stored else (None, None)),
    )
    x = row_matrix(BFloat16, rows, columns)
    all_three = options.rowwise and options.columnwise and options.stored  # scattered, that would spill
    return QuantizeRows(options.square, not all_three), (x, *places(), copies, Int32(1), make_fake_stream())


def build_restore(options):
    """data, scale, offsets, padded, out, grid size, stream."""
    columns = thirty_twos()
    out = dense(BFloat16, cute.sym_int(), columns)
    return Restore(), (*stored(columns), *places(), out, Int32(1), make_fake_stream())


_BUILDERS = {"QuantizeOptions": build_rows, "RestoreOptions": build_restore}


def build(options):
    """(jit function, fake arguments) of the kernel that `options`, one of `mxfp8_quantize`'s classes, belongs to."""
    return _BUILDERS[type(options).__name__](options)
