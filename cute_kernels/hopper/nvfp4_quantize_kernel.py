"""One pass over BF16 matrices on SM90 that gives their NVFP4 values in BF16, or as stored; their maxima; the way back.

    Amax           x [T, K] of groups: the largest magnitudes of each, and of its transpose once that is rotated
    QuantizeRows   x: q·S in blocks of 1x16 and of 16x1 (rotated or not), or of 16x16, the stored copy in 16x1
    Restore        the stored copy -> q·S [P, K]

Layouts and formulas: `nvfp4_reference`. K is a multiple of 16, rows of x any multiple of 8 elements apart. A block of
16 rows begins at a group's first row or a multiple of 16 below it; rows past the group's end are not read and count
as zeros.

Roles: as in `mxfp8_quantize_kernel`: warps that have nothing in common, a piece of 16 rows x 128 columns (256 to
restore) after another. No shared memory, no barrier.
Timeline of a piece: the warp finds its group; a thread asks for 4 columns of all 16 rows at once. A column's block is
then one thread's, and so is its rotation; a row's is that of 4 lanes, who also share its random bytes: each makes those
of every fourth row, and they trade.

Numerics: maxima are exact; see `nvfp4_scales` for the rest. Largest magnitudes of groups meet by atomic maxima of bits.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, Uint8, Uint32, const_expr
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream
from cutlass.cutlass_dsl import select_

from cute_kernels.hopper.epilogues.eights import load_global, store_global
from cute_kernels.hopper.fp8_scales import MAGNITUDES, bf16_bits, exchanged, halves_of, max_halves
from cute_kernels.hopper.mxfp8_quantize_kernel import Piece, address, find
from cute_kernels.hopper.nvfp4_maxima import column_maxima, largest_of, raise_group
from cute_kernels.hopper.nvfp4_scales import (
    block_scale,
    codes,
    random_words,
    rotated,
    scale_of,
    tensor_factors,
    values,
    values_of,
)
from cute_kernels.hopper.rowwise_kernel import row_matrix, vector_of

WARPS = 16
BLOCK = 16
COLUMNS = 4
RESTORED_COLUMNS = 8


class Copies(NamedTuple):
    """Where results go, each None if not wanted: q·S in blocks of 1x16 and 16x1, the stored copy and its scales."""

    rows: Any
    columns: Any
    data: Any
    scale: Any


@cute.jit
def piece_of(index, spans, columns: cutlass.Constexpr, offsets, padded):
    """(piece `index` of groups, columns first, then rows; its group)."""
    block = index // spans
    top = block * BLOCK
    group = find(padded, top)
    row = offsets[group] + top - padded[group]
    column = ((index - block * spans) * 32 + cute.arch.lane_idx()) * columns
    return Piece(row, cutlass.min(offsets[group + 1] - row, BLOCK), top, column), group


def read(x: cute.Tensor, piece: Piece):
    """The thread's values, words [row][pair of columns]; zeros where the group or the matrix has none."""
    start, step = address(x, piece.row, piece.column)
    inside = piece.column < x.shape[1]
    return [load_global(start + r * step, 0, inside & (r < piece.left), COLUMNS // 2) for r in range(BLOCK)]


def turned(words, width):
    """The same, rotated down the rows, two columns after the other."""
    pairs = [rotated([row[0] for row in words])]
    for pair in range(1, COLUMNS // 2):
        zero = zero_after(width, pairs[-1][0])
        pairs.append(rotated([row[pair] ^ zero for row in words]))
    return [list(row) for row in zip(*pairs, strict=True)]


def row_maxima(words):
    """The largest magnitudes of rows over the 4 lanes of a block, two rows a word."""
    found = []
    for r in range(0, BLOCK, 2):
        both = [max_halves(*(word & Uint32(MAGNITUDES) for word in row)) for row in words[r : r + 2]]
        largest = max_halves(halves_of(*both, False), halves_of(*both, True))
        for distance in (1, 2):
            largest = max_halves(largest, exchanged(largest, distance))
        found.append(largest)
    return found


def halves(largest):
    """The FP32 bits of both halves of a word of maxima."""
    return bf16_bits(largest & Uint32(0xFFFF)), bf16_bits(largest >> 16)


def chosen(condition, yes, no):
    return Uint32(select_(condition, yes, no))


def zero_after(width, word):
    """0, known no sooner than `word`: what is formed of it is not formed before, and held in registers."""
    return Uint32(width) >> 31 & word


def later(words, piece: Piece, zero):
    """The same, not before `zero` is known."""
    piece = piece._replace(padded=piece.padded + Int32(zero), column=piece.column + Int32(zero))
    return [[word ^ zero for word in row] for row in words], piece


class Amax:
    """Largest magnitudes, FP32 [G], zero before."""

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        offsets: cute.Tensor,
        padded: cute.Tensor,
        amax: cute.Tensor,
        turned_amax: cute.Tensor | None,
        grid: Int32,
        stream,
    ):
        self.kernel(x, offsets, padded, amax, turned_amax).launch(
            grid=[grid, 1, 1], block=[WARPS * 32, 1, 1], min_blocks_per_mp=1, stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        x: cute.Tensor,
        offsets: cute.Tensor,
        padded: cute.Tensor,
        amax: cute.Tensor,
        turned_amax: cute.Tensor | None,
    ):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        spans = (x.shape[1] + 32 * COLUMNS - 1) // (32 * COLUMNS)
        pieces = padded[padded.shape[0] - 1] // BLOCK * spans
        for index in cutlass.range(cta * WARPS + warp, pieces, ctas * WARPS, unroll=1):
            piece, group = piece_of(index, spans, COLUMNS, offsets, padded)
            if piece.left > 0:
                words = read(x, piece)
                raise_group(amax, group, largest_of(words, 32))
                if const_expr(turned_amax is not None):
                    raise_group(turned_amax, group, largest_of(turned(words, x.shape[1]), 32))


class QuantizeRows:
    """Rows of groups. How: see `nvfp4_quantize.QuantizeOptions`."""

    def __init__(self, square: bool, rotates: bool):
        self.square, self.rotates = square, rotates

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        offsets: cute.Tensor,
        padded: cute.Tensor,
        amax: cute.Tensor | None,
        column_amax: cute.Tensor | None,
        state: cute.Tensor | None,
        copies: tuple,
        lines: Int32,
        grid: Int32,
        stream,
    ):
        self.kernel(x, offsets, padded, amax, column_amax, state, copies, lines).launch(
            grid=[grid, 1, 1], block=[WARPS * 32, 1, 1], min_blocks_per_mp=1, stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        x: cute.Tensor,
        offsets: cute.Tensor,
        padded: cute.Tensor,
        amax: cute.Tensor | None,
        column_amax: cute.Tensor | None,
        state: cute.Tensor | None,
        copies: tuple,
        lines: Int32,
    ):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        spans = (x.shape[1] + 32 * COLUMNS - 1) // (32 * COLUMNS)
        pieces = padded[padded.shape[0] - 1] // BLOCK * spans
        for index in cutlass.range(cta * WARPS + warp, pieces, ctas * WARPS, unroll=1):
            piece, group = piece_of(index, spans, COLUMNS, offsets, padded)
            wanted = Boolean(piece.left > 0)
            if const_expr(column_amax is not None):
                wanted = Boolean(True)  # zeros in the padding
            if wanted:
                self.piece(x, amax, column_amax, state, Copies(*copies), lines, piece, group)

    def piece(self, x: cute.Tensor, amax, column_amax, state, copies: Copies, lines, piece: Piece, group):
        """Everything that is wanted of one piece."""
        words = read(x, piece)
        if amax is not None:
            factors = tensor_factors(amax[group])
            if self.square:
                self.store_square(words, factors, copies.rows, piece)
            else:
                words, piece = later(words, piece, self.store_rows(words, factors, copies.rows, piece, state))
        if column_amax is not None:
            words = turned(words, x.shape[1]) if self.rotates else words
            self.store_columns(words, tensor_factors(column_amax[group]), copies, piece, state, lines)

    def store_square(self, words, factors, out: cute.Tensor, piece: Piece):
        """q·S in blocks of 16x16: one scale for 4 lanes."""
        encode, decode, _ = block_scale(largest_of(words, 4), *factors)
        start, step = address(out, piece.row, piece.column)
        inside = piece.column < out.shape[1]
        for r, row in enumerate(words):
            result = [values(word, (encode, encode), (decode, decode)) for word in row]
            store_global(start + r * step, 0, inside & (r < piece.left), result)

    def store_rows(self, words, factors, out: cute.Tensor, piece: Piece, state):
        """q·S in blocks of 1x16."""
        seeds = None if state is None else (state[0], state[1])
        maxima = row_maxima(words)
        start, step = address(out, piece.row, piece.column)
        inside = piece.column < out.shape[1]
        zero = Uint32(0)
        for first in range(0, BLOCK, 4):
            random = None
            if seeds is not None:
                random = self.row_bytes(out.shape[1], piece._replace(row=piece.row + Int32(zero)), first, seeds)
            for r in range(first, first + 4):
                encode, decode, _ = block_scale(halves(maxima[r // 2] | zero)[r % 2], *factors)
                result = []
                for pair, word in enumerate(words[r]):
                    how = () if random is None else ([random[r % 4]] * 2, (16 * pair, 16 * pair + 8))
                    result.append(values(word, (encode, encode), (decode, decode), *how))
                store_global(start + r * step, 0, inside & (r < piece.left), result)
                zero = zero_after(out.shape[1], result[0])
            start += Int64(zero)
        return zero

    def row_bytes(self, width, piece: Piece, first: int, seeds):
        """Of the random bytes of rows first.. to + 4 those of this lane's columns, a word a row."""
        lane = cute.arch.lane_idx()
        row = piece.row + first + lane % 4
        block = Int64(row) * (width // 16) + piece.column // 16
        words = random_words(block, 0, seeds)
        for distance in (1, 2):  # word w of lane l and word l of lane w change places
            upper = Boolean(lane & distance != 0)
            for low in [i for i in range(4) if not i & distance]:
                high = low + distance
                got = exchanged(chosen(upper, words[low], words[high]), distance)
                words[low], words[high] = chosen(upper, got, words[low]), chosen(upper, words[high], got)
        return words

    def store_columns(self, words, factors, copies: Copies, piece: Piece, state, lines):
        """q·S in blocks of 16x1, or codes and scales, in padded rows. lines: padded rows of the matrix."""
        amax = [bits for largest in column_maxima(words) for bits in halves(largest)]
        scales = [block_scale(bits, *factors) for bits in amax]
        random = None
        if state is not None:
            seeds = state[0], state[1]
            random = [self.column_words(piece, 0, seeds, lines, scales[0][2])]
            for i in range(1, COLUMNS):
                random.append(self.column_words(piece, i, seeds, lines, random[-1][0]))
        if copies.columns is not None:
            start, step = address(copies.columns, piece.padded, piece.column)
            inside = piece.column < copies.columns.shape[1]
            zero, result = Uint32(0), words[0]
            for r, row in enumerate(words):
                if r % 4 == 0 and r:
                    zero = zero_after(copies.columns.shape[1], result[0])
                    start += Int64(zero)
                result = []
                for pair, word in enumerate(row):
                    word = word ^ zero
                    both = scales[2 * pair : 2 * pair + 2]
                    encode, decode = ([one[i] for one in both] for i in range(2))
                    result.append(values(word, encode, decode, *self.column_bytes(random, pair, r)))
                store_global(start + r * step, 0, inside, result)
        if copies.data is not None:
            self.store_codes(words, scales, random, copies, piece)

    def column_words(self, piece: Piece, index: int, seeds, lines, before):
        """The random bytes of column `index` of the thread's, not before a word is known."""
        column = piece.column + index + Int32(zero_after(lines, before))
        return random_words(Int64(column) * (lines // 16) + piece.padded // 16, 1, seeds)

    def column_bytes(self, random, pair: int, row: int):
        """What `values` takes for two columns of a row."""
        if random is None:
            return ()
        return [random[2 * pair + i][row // 4] for i in range(2)], (8 * (row % 4),) * 2

    def store_codes(self, words, scales, random, copies: Copies, piece: Piece):
        """Codes, of which a lane stores eight in every second row, and the scales of the block."""
        odd = cute.arch.lane_idx() % 2
        start, step = address(copies.data, piece.padded + odd, piece.column // 2 - 2 * odd)
        inside = piece.column < copies.scale.shape[1]
        upper = Boolean(odd == 1)
        for first in range(0, BLOCK, 2):
            mine = []
            for r in range(first, first + 2):
                parts = []
                for pair, word in enumerate(words[r]):
                    encode = [one[0] for one in scales[2 * pair : 2 * pair + 2]]
                    parts.append(codes(word, encode, *self.column_bytes(random, pair, r)))
                mine.append(parts[0] | (parts[1] << 8))
            got = exchanged(chosen(upper, mine[0], mine[1]), 1)
            result = chosen(upper, got | (mine[1] << 16), mine[0] | (got << 16))
            store_global(start + first * step, 0, inside, [result])
            if first % 4:
                start += Int64(zero_after(copies.scale.shape[1], result))
        packed = scales[0][2]
        for i, (_, _, byte) in enumerate(scales[1:]):
            packed = packed | byte << (8 * (i + 1))
        place, _ = address(copies.scale, piece.padded // BLOCK, piece.column)
        store_global(place, 0, inside, [packed])


class Restore:
    """q·S of a stored copy, in padded rows."""

    @cute.jit
    def __call__(
        self, data: cute.Tensor, scale: cute.Tensor, padded: cute.Tensor, out: cute.Tensor, grid: Int32, stream
    ):
        self.kernel(data, scale, padded, out).launch(
            grid=[grid, 1, 1], block=[WARPS * 32, 1, 1], min_blocks_per_mp=1, stream=stream
        )

    @cute.kernel
    def kernel(self, data: cute.Tensor, scale: cute.Tensor, padded: cute.Tensor, out: cute.Tensor):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        spans = (out.shape[1] + 32 * RESTORED_COLUMNS - 1) // (32 * RESTORED_COLUMNS)
        pieces = padded[padded.shape[0] - 1] // BLOCK * spans
        for index in cutlass.range(cta * WARPS + warp, pieces, ctas * WARPS, unroll=1):
            block = index // spans
            row, column = block * BLOCK, ((index - block * spans) * 32 + cute.arch.lane_idx()) * RESTORED_COLUMNS
            self.piece(data, scale, row, column, out)

    def piece(self, data: cute.Tensor, scale: cute.Tensor, row, column, out: cute.Tensor):
        inside = column < out.shape[1]
        start, step = address(data, row, column // 2)
        words = [load_global(start + r * step, 0, inside, 1)[0] for r in range(BLOCK)]
        place, _ = address(scale, row // BLOCK, column)
        packed = load_global(place, 0, inside, 2)
        decode = [scale_of(packed[i // 4], i % 4) for i in range(RESTORED_COLUMNS)]
        target, step = address(out, row, column)
        for r, word in enumerate(words):
            result = [values_of(word, i, decode[2 * i : 2 * i + 2]) for i in range(4)]
            store_global(target + r * step, 0, inside, result)


# ----------------------------------------------------------------------------------------------------------------------


def sixteens():
    return cute.sym_int(divisibility=16)


def dense(element, rows, columns):
    """A fake contiguous matrix."""
    return make_fake_compact_tensor(element, (rows, columns), stride_order=(1, 0), assumed_align=16)


def stored(columns):
    """(data, scales) of a fake stored copy."""
    codes_of_rows = make_fake_compact_tensor(
        Uint8, (cute.sym_int(), cute.sym_int(divisibility=8)), stride_order=(1, 0), assumed_align=8
    )
    return codes_of_rows, dense(Uint8, cute.sym_int(), columns)


def places():
    return vector_of(Int32, cute.sym_int()), vector_of(Int32, cute.sym_int())


def maxima(wanted: bool):
    return vector_of(Float32, cute.sym_int()) if wanted else None


def build_amax(options):
    """x, offsets, padded, largest magnitudes, those once rotated or None, grid size, stream."""
    x = row_matrix(BFloat16, cute.sym_int(), sixteens())
    return Amax(), (x, *places(), maxima(True), maxima(options.rotates), Int32(1), make_fake_stream())


def build_rows(options):
    """x, offsets, padded, both largest magnitudes, state, (rows, columns, data, scale), each or None, padded rows,
    grid size, stream.
    """
    rows, columns = cute.sym_int(), sixteens()
    copies = (
        dense(BFloat16, rows, columns) if options.rowwise else None,
        dense(BFloat16, cute.sym_int(), columns) if options.columnwise else None,
        *(stored(columns) if options.stored else (None, None)),
    )
    x = row_matrix(BFloat16, rows, columns)
    amaxes = maxima(options.rowwise), maxima(options.columnwise or options.stored)
    state = vector_of(Int64, 2) if options.stochastic else None
    made = QuantizeRows(options.square, options.rotates)
    return made, (x, *places(), *amaxes, state, copies, Int32(1), Int32(1), make_fake_stream())


def build_restore(options):
    """data, scale, padded, out, grid size, stream."""
    columns = sixteens()
    out = dense(BFloat16, cute.sym_int(), columns)
    return Restore(), (*stored(columns), vector_of(Int32, cute.sym_int()), out, Int32(1), make_fake_stream())


_BUILDERS = {"AmaxOptions": build_amax, "QuantizeOptions": build_rows, "RestoreOptions": build_restore}


def build(options):
    """(jit function, fake arguments) of the kernel that `options`, one of `nvfp4_quantize`'s classes, belongs to."""
    return _BUILDERS[type(options).__name__](options)
