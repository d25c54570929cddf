"""One pass over BF16 matrices on SM90 that gives their MXFP8 values, in BF16 or as stored; and the way back.

    QuantizeRows   x [T, K] of groups: values in blocks of 1x32 and of 32x1, or of 32x32, the stored copy in 32x1
    Restore        the stored copy of QuantizeRows -> its values [T, K]

Layouts and formulas: `mxfp8_reference`. K is a multiple of 32, rows of x any multiple of 8 elements apart. A block of
32 rows begins at a group's first row or a multiple of 32 below it, so it never spans two; rows past the group's end are
not read and count as zeros.

Roles: warps that have nothing in common, persistent, one CTA an SM: each takes a piece of 32 rows x 128 columns (16 x
256 to restore) after another. To quantise, a warp's next two pieces are on their way to shared memory
(`quantize_pieces`) while it works at one in registers: 8 neighbouring columns of every second row a thread, 16 bytes to
load and to store. A column's block is that of 2 lanes, a row's that of 4, who share the work at its scales: each forms
some and they trade. To restore, a thread asks for 8 columns of all rows of its next piece before it stores one.

Numerics: maxima are exact, products with powers of two too, one rounding to E4M3. A piece takes 1300 instructions of a
warp, rows and the stored copy wanted (2430 when a thread had 4 columns of all rows and values went through FP32).

Measured on one H200 (2026-12-01, shares of what a copy of 1 GiB moves, variants in turn; dsv3, gptoss, qwen3 of
docs/performance.md):                       rows and stored      rows and columns     restored
    this kernel, 12 warps with two places   0.89 0.88 0.87       0.92 0.87 0.90       0.90 0.85 0.89 (16 warps)
    16 (columns 14) with one                0.88 0.87 0.87       0.89 0.83 0.89
    10 with two                             0.86 0.84 0.85       0.89 0.83 0.89       0.88 0.81 0.88 (10 warps)
    8 with three                            0.89 0.89 0.87       0.89 0.84 0.88       0.89 0.83 0.88 (8 warps)
    6 with four                             0.86 0.85 0.86       0.87 0.81 0.87       0.88 0.81 0.86 (20 warps)
Before, in another run: groups found anew for each piece, a CTA's
warps beside each other and one place 0.87 0.84 0.85, 0.89 0.81 0.88, restored a whole block without the next on its
way 0.88 0.82 0.87 (as the second line 0.88 0.86 0.87, 0.90 0.82 0.89, restored 0.90 0.84 0.90). Earlier: 4 columns of
all rows a thread, FP32, 2 % slower; pieces of 64 columns and 24 or 28 warps, 0.81 to 0.84; x evicted from L2 first 1
to 2 % slower; a CTA's pieces neighbours 6 to 9 % slower.
"""

import functools
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import BFloat16, Boolean, Float8E4M3FN, Float32, Int32, Uint8, Uint32, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream
from cutlass.cutlass_dsl import select_

from cute_kernels.hopper.epilogues.eights import load_global, load_shared, permuted, share, store_global
from cute_kernels.hopper.fp8_scales import FOURS, MAGNITUDES, exchanged, halves_of
from cute_kernels.hopper.mxfp8_packed import APART, rounded_pair, scale_pair, scaled_elements
from cute_kernels.hopper.mxfp8_quantize_configs import RESTORE_WARPS, RESTORED_ROWS, WARPS
from cute_kernels.hopper.mxfp8_scales import BLOCK, decode_factor, values_of
from cute_kernels.hopper.nvfp4_scales import larger_halves
from cute_kernels.hopper.quantize_pieces import NO_GROUPS, SPAN, Groups, Piece, Pieces, address, among, part_of
from cute_kernels.hopper.rowwise_kernel import row_matrix, vector_of

COLUMNS = 8
"""Of a thread."""
WORDS = COLUMNS // 2
ACROSS = SPAN // COLUMNS
"""Lanes beside each other; the others have the next row."""
DOWN = 32 // ACROSS
ROWS = BLOCK // DOWN
"""Of a thread, every second."""
STAGES = 2
"""Pieces of a warp on their way to shared memory."""
LOADED = 2 * RESTORED_ROWS + 2
"""Words of a thread for a piece to restore: a value a byte, and scales."""


class Copies(NamedTuple):
    """Where results go, each None if not wanted: values in blocks of 1x32 and 32x1, the stored copy and its scales."""

    rows: Any
    columns: Any
    data: Any
    scale: Any


def larger_of(words):
    """The larger magnitudes of words' halves, of some sign."""
    return functools.reduce(larger_halves, words)


def shared(words, lane, distances):
    """`eights.share` of the larger magnitudes of words."""
    found = share(
        [word.bitcast(Float32) for word in words],
        lambda a, b: larger_halves(a.bitcast(Uint32), Float32(b).bitcast(Uint32)).bitcast(Float32),
        lane,
        distances,
    )
    return [word.bitcast(Uint32) & Uint32(MAGNITUDES) for word in found]


def twice(word, upper: bool):
    """One half of a word, in both."""
    return halves_of(word, word, upper)


class Quantize:
    """What a thread does with its part of a piece: words [row][pair of columns]."""

    def __init__(self, square: bool):
        self.square = square

    def piece(self, words, width, copies: Copies, piece: Piece, lane):
        """Everything that is wanted of one piece. What is formed for a copy waits for the copy before, or it would stay
        in registers.
        """
        inside = piece.column < width
        if const_expr(self.square):
            self.store_square(words, copies.rows, piece, inside, lane)
            return
        zero = Uint32(width) >> 31  # which only we know
        last = Uint32(0)
        if const_expr(copies.columns is not None or copies.data is not None):
            found = [scale_pair(word) for word in self.column_maxima(words, lane)]
            encode = self.everyones([one[0] for one in found], lane)
            if const_expr(copies.columns is not None):
                factors = encode, self.everyones([one[1] for one in found], lane)
                last = self.store_values(words, lambda row: factors, copies.columns, piece, inside)
                encode = [word | (zero & last) for word in encode]
            if const_expr(copies.data is not None):
                last = self.store_elements(words, encode, copies.data, piece, inside)
                self.store_scales([one[2] for one in found], copies.scale, piece, lane)
        if const_expr(copies.rows is not None):
            self.store_rows(words, copies.rows, piece, inside, lane, zero & last)

    def column_maxima(self, words, lane):
        """Of the thread's columns and the same of the rows between, a half of them a lane, two a word."""
        return shared([larger_of(column) for column in zip(*words, strict=True)], lane, (ACROSS,))

    def everyones(self, words, lane):
        """What both lanes of some columns have of them, for all of these."""
        first = lane % ACROSS
        return [
            Uint32(cute.arch.shuffle_sync(word, offset=first + half * ACROSS)) for half in range(DOWN) for word in words
        ]

    def store_rows(self, words, out: cute.Tensor, piece: Piece, inside, lane, zero):
        """Values in blocks of 1x32: maxima of two rows a word, of which each of 4 lanes gets some."""
        pairs = []
        for row in range(0, ROWS, 2):
            both = [larger_of(words[row + i]) for i in range(2)]
            pairs.append(larger_halves(halves_of(*both, False), halves_of(*both, True)))
        found = [[word | zero for word in scale_pair(largest)] for largest in shared(pairs, lane, (2, 1))]

        def factors(row: int):
            owner, index = divmod(row // 2, len(found))
            mine = [cute.arch.shuffle_sync(word, offset=owner, mask_and_clamp=FOURS) for word in found[index][:2]]
            return [[twice(word, row % 2 == 1)] * WORDS for word in mine]

        self.store_values(words, factors, out, piece, inside)

    def store_square(self, words, out: cute.Tensor, piece: Piece, inside, lane):
        """Values in blocks of 32x32: one scale for 8 lanes."""
        largest = larger_of([larger_of(row) for row in words])
        largest = larger_halves(largest, largest >> 16)
        for distance in (1, 2, ACROSS):
            largest = larger_halves(largest, exchanged(largest, distance))
        found = scale_pair(largest & Uint32(0x7FFF))
        factors = [[twice(word, False)] * WORDS for word in found[:2]]
        self.store_values(words, lambda row: factors, out, piece, inside)

    def store_values(self, words, factors, out: cute.Tensor, piece: Piece, inside):
        """Rounded values to `out`. factors(row): words that encode and words that decode its columns."""
        start, step = address(out, piece.row, piece.column)
        apart = Uint32(APART) | Uint32(out.shape[1]) >> 31  # kept in a register
        for row in range(ROWS):
            result = [rounded_pair(*each, apart) for each in zip(words[row], *factors(row), strict=True)]
            store_global(start + row * DOWN * step, 0, inside & (row * DOWN < piece.left), result)
        return result[0]

    def store_elements(self, words, encode, data: cute.Tensor, piece: Piece, inside):
        """E4M3 to the padded matrix, zeros in its padding."""
        start, step = address(data, piece.padded, piece.column)
        for row in range(ROWS):
            result = [scaled_elements(words[row][i : i + 2], encode[i : i + 2]) for i in (0, 2)]
            store_global(start + row * DOWN * step, 0, inside, result)
        return result[0]

    def store_scales(self, pairs, scale: cute.Tensor, piece: Piece, lane):
        """Bytes of 4 columns a lane."""
        column = piece.column + lane // ACROSS * (COLUMNS // DOWN)
        place, _ = address(scale, piece.padded // BLOCK, column)
        store_global(place, 0, column < scale.shape[1], [permuted(*pairs, 0x6420)])


class QuantizeRows(Quantize):
    """Rows of groups."""

    def __init__(self, square: bool):
        super().__init__(square)
        self.pieces = Pieces(BLOCK, WARPS, STAGES, scattered=True)

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
        warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
        memory = cutlass.memory.SmemAllocator().allocate(self.Storage)
        if warp == 0:
            cpasync.prefetch_descriptor(atom)
        width, turn, phase = tensor.shape[0], Int32(0), Int32(0)
        way, there = self.pieces.start(memory, warp, width, padded)
        for stage in cutlass.range(STAGES, unroll=1):
            if way.first + stage * way.step < way.end:
                there = self.pieces.ask(memory, atom, tensor, warp * STAGES + stage, there, way, offsets, padded)
        row, column = lane // ACROSS, lane % ACROSS * COLUMNS
        for index in cutlass.range(way.first, way.end, way.step, unroll=1):
            slot = warp * STAGES + turn
            piece, _, place = self.pieces.there(memory, slot, phase)
            place += 2 * (row * SPAN + column)
            words = [load_shared(place, i * DOWN * 2 * SPAN, WORDS) for i in range(ROWS)]
            turn += 1
            if turn == STAGES:
                turn, phase = Int32(0), phase ^ 1
            cute.arch.sync_warp()
            if index + STAGES * way.step < way.end:
                there = self.pieces.ask(memory, atom, tensor, slot, there, way, offsets, padded)
            wanted = Boolean(piece.left > 0)
            if const_expr(Copies(*copies).data is not None):
                wanted = Boolean(True)  # zeros in the padding
            if wanted:
                mine = Piece(piece.row + row, piece.left - row, piece.padded + row, piece.column + column)
                self.piece(words, width, Copies(*copies), mine, lane)


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
            grid=[grid, 1, 1], block=[RESTORE_WARPS * 32, 1, 1], min_blocks_per_mp=1, stream=stream
        )

    @cute.kernel
    def kernel(
        self, data: cute.Tensor, scale: cute.Tensor, offsets: cute.Tensor, padded: cute.Tensor, out: cute.Tensor
    ):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        spans = (out.shape[1] + 32 * COLUMNS - 1) // (32 * COLUMNS)
        pieces = padded[padded.shape[0] - 1] // RESTORED_ROWS * spans
        first, step = warp * ctas + cta, ctas * RESTORE_WARPS
        words, groups = cute.make_rmem_tensor((LOADED,), Uint32), Groups(*map(Int32, NO_GROUPS))
        groups, piece = self.load(data, scale, first, pieces, spans, groups, offsets, padded, words)
        for index in cutlass.range(first, pieces, step, unroll=1):
            mine, this = [words[i] for i in range(LOADED)], piece
            groups, piece = self.load(data, scale, index + step, pieces, spans, groups, offsets, padded, words)
            self.store(mine, this, out)

    def load(self, data, scale, index, pieces, spans, groups, offsets, padded, words):
        """(groups, a piece): a lane's values of it, two words a row, and their scales; none past the last piece."""
        number = cutlass.min(index, pieces - 1)
        block = number // spans
        top, column = block * RESTORED_ROWS, ((number - block * spans) * 32 + cute.arch.lane_idx()) * COLUMNS
        groups, knows = among(groups, top, offsets, padded)
        row, left = part_of(groups, knows, top, RESTORED_ROWS)
        left = Int32(select_((column < data.shape[1]) & (index < pieces), left, Int32(0)))
        start, step = address(data, top, column)
        for r in range(RESTORED_ROWS):
            words[2 * r], words[2 * r + 1] = load_global(start + r * step, 0, r < left, 2)
        place, _ = address(scale, top // BLOCK, column)
        words[LOADED - 2], words[LOADED - 1] = load_global(place, 0, left > 0, 2)
        return groups, Piece(row, left, top, column)

    def store(self, words, piece: Piece, out: cute.Tensor):
        packed = words[LOADED - 2 :]
        decode = [decode_factor(Int32(packed[i // 4] >> (8 * (i % 4)) & Uint32(0xFF))) for i in range(COLUMNS)]
        target, step = address(out, piece.row, piece.column)
        for r in range(RESTORED_ROWS):
            values = [values_of(words[2 * r + i // 2], i % 2 == 1, decode[2 * i : 2 * i + 2]) for i in range(4)]
            store_global(target + r * step, 0, r < piece.left, values)


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
    return QuantizeRows(options.square), (x, *places(), copies, Int32(1), make_fake_stream())


def build_restore(options):
    """data, scale, offsets, padded, out, grid size, stream."""
    columns = thirty_twos()
    out = dense(BFloat16, cute.sym_int(), columns)
    return Restore(), (*stored(columns), *places(), out, Int32(1), make_fake_stream())


_BUILDERS = {"QuantizeOptions": build_rows, "RestoreOptions": build_restore}


def build(options):
    """(jit function, fake arguments) of the kernel that `options` belongs to."""
    return _BUILDERS[type(options).__name__](options)
