"""One pass over BF16 matrices on SM90 that gives their NVFP4 values in BF16, or as stored; their maxima; the way back.

    Amax           x [T, K] of groups: the largest magnitudes of each, and of its transpose once that is rotated
    QuantizeRows   x: q·S in blocks of 1x16 and of 16x1 (rotated or not), or of 16x16, the stored copy in 16x1
    Restore        the stored copy -> q·S [P, K]

Layouts and formulas: `nvfp4_reference`. K is a multiple of 16, rows of x any multiple of 8 elements apart. A block of
16 rows begins at a group's first row or a multiple of 16 below it; rows past the group's end are not read and count
as zeros.

Roles: warps that have nothing in common, persistent, one CTA an SM: each takes a piece of 16 rows x 128 columns (256 to
restore) after another. What is to be quantised is on its way to shared memory (`quantize_pieces`) five pieces ahead
(square blocks two, for maxima one), what is to be restored to registers one ahead.
Timeline of a piece: columns first, of which a thread has 4 in all 16 rows: a block is one thread's, and so is its
rotation. BF16 values are stored from registers, codes once they are side by side in shared memory. Then rows, of which
a thread has four whole blocks: q·S takes the place of x and leaves by one TMA store, which knows where the group ends;
the place is asked for again a piece later.

Numerics: maxima are exact; see `nvfp4_scales` for the rest. What is near FP32's limits, or its scale near E4M3's, takes
a longer way, `nvfp4_packed.Unusual`: the short one is exact but there. A warp chooses twice a piece.
Largest magnitudes of groups meet by atomic maxima of bits, once for each group that a warp has pieces of.

Measured on one H200 (2026-12-01, shares of what a copy of 1 GiB moves, variants in turn with nothing of theirs in L2;
dsv3, gptoss, qwen3 of docs/performance.md; rows and rotated columns, "drawn": stochastic):
                                          stored            both, drawn       both
    8 warps of 6 places                   0.89 0.87 0.92    0.91 0.85 0.90    0.93 0.87 0.92
    12 warps of 4 places                  0.90 0.87 0.90    0.89 0.82 0.88    0.93 0.87 0.92
    16 warps of 3 places                  0.89 0.85 0.87    0.89 0.81 0.87    0.93 0.84 0.91
    the kernel before                     0.88 0.80 0.80    0.89 0.77 0.82    0.90 0.82 0.87
    another run: this kernel, 8 warps     0.87 0.84 0.89    0.88 0.82 0.88    0.90 0.85 0.89
    the kernel before                     0.86 0.77 0.78    0.87 0.74 0.80    0.88 0.81 0.85
The kernel before: rows by 4 lanes, clamps, a group looked for with each piece, 20 warps (drawn 16) of 2 places.
What the first pieces of all warps take, and the last, memory has nothing to do meanwhile: so few warps. BF16 widened by
a product with the unit matrix, four values an instruction, saves a tenth of the instructions and nothing else.
Restored with 24 warps: 0.87 0.81 0.86, with 20, 16, 12 and 8: 0.87 0.80 0.86, 0.84 0.78 0.83, 0.85 0.78 0.84, 0.85 0.80
0.84. Largest magnitudes: 0.97 0.82 0.91. Weights in square blocks: 24 warps and neighbours, not compared.
"""

import functools
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, Uint8, Uint32, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream
from cutlass.cutlass_dsl import select_

from cute_kernels.hopper.epilogues.eights import load_global, load_shared, permuted, store_global, store_shared
from cute_kernels.hopper.epilogues.quantized import larger
from cute_kernels.hopper.fp8_scales import MAGNITUDES, bf16_bits, halves_of, max_halves
from cute_kernels.hopper.nvfp4_maxima import (
    column_maxima,
    largest_half,
    largest_of,
    look,
    over_lanes,
    place_of,
    raise_group,
)
from cute_kernels.hopper.nvfp4_packed import Unusual, Usual, usual
from cute_kernels.hopper.nvfp4_quantize_configs import AMAX_WARPS, RESTORE_WARPS, ahead_of, warps_of
from cute_kernels.hopper.nvfp4_scales import (
    QUARTER,
    block_scale,
    butterfly,
    half_of,
    larger_halves,
    random_words,
    rounded_pair,
    scale_of,
    tensor_factors,
    values,
    values_of,
)
from cute_kernels.hopper.quantize_pieces import COLUMNS, SPAN, Piece, Pieces, Words, address
from cute_kernels.hopper.rowwise_kernel import row_matrix, vector_of

BLOCK = 16
BLOCKS, ACROSS = 4, SPAN // BLOCK
"""Blocks of a thread, in a column; of a row of a piece."""
ROWS_BYTES = 32 // ACROSS * 2 * SPAN
"""From one of a thread's blocks to the next."""
QUAD_BYTES = 4 * SPAN // 2
STAGED_BYTES = BLOCK * SPAN // 2
"""The codes of four rows, of a piece."""
RESTORED_COLUMNS = 8


class Copies(NamedTuple):
    """Where results go, each None if not wanted: q·S in blocks of 1x16 and 16x1, the stored copy and its scales."""

    rows: Any
    columns: Any
    data: Any
    scale: Any


def largest_turned(words, width):
    """The largest magnitude of the thread's columns once rotated, but for the factor of a quarter."""
    largest, zero = Float32(0.0), Uint32(0)
    for pair in range(COLUMNS // 2):
        column = [row[pair] ^ zero for row in words]
        both = [[half_of(word, upper) for word in column] for upper in (False, True)]
        largest = functools.reduce(larger, butterfly(both[0]) + butterfly(both[1]), largest)
        zero = zero_after(width, largest.bitcast(Uint32))
    return largest


def over_block(words):
    """The largest magnitude of the values of two blocks, in the halves of a word."""
    both = [functools.reduce(larger_halves, block) for block in words]
    return larger_halves(halves_of(*both, False), halves_of(*both, True)) & Uint32(MAGNITUDES)


def halves(largest):
    """The FP32 bits of both halves of a word of maxima."""
    return bf16_bits(largest & Uint32(0xFFFF)), bf16_bits(largest >> 16)


def factors_of(amax: cute.Tensor | None, column_amax: cute.Tensor | None, group):
    """`tensor_factors` of a group, of rows and of columns, four words; of what is not wanted zeros."""
    zeros = Float32(0.0), Float32(0.0)
    each = [zeros if one is None else tensor_factors(one[group]) for one in (amax, column_amax)]
    return [Float32(factor).bitcast(Uint32) for both in each for factor in both]


def limited(piece: Piece, out: cute.Tensor):
    """How many rows of the piece a thread has values of."""
    return Int32(select_(piece.column < out.shape[1], piece.left, Int32(0)))


def chosen(condition, yes, no):
    return Uint32(select_(condition, yes, no))


def zero_after(width, word):
    """0, known no sooner than `word`: what is formed of it is not formed before, and held in registers."""
    return Uint32(width) >> 31 & word


@cute.jit
def leave(found, group, amax: cute.Tensor, turned_amax: cute.Tensor | None):
    """The group's maxima are at least these, in the lower halves of a warp's words, those once rotated in the upper."""
    known = look(place_of(amax, group))
    turned_known = look(place_of(turned_amax, group)) if const_expr(turned_amax is not None) else known
    both = halves(over_lanes(found, 32))
    raise_group(amax, group, both[0], known)
    if const_expr(turned_amax is not None):
        raise_group(turned_amax, group, both[1], turned_known)


class Amax:
    """Largest magnitudes, FP32 [G], zero before."""

    def __init__(self):
        self.pieces = Pieces(BLOCK, AMAX_WARPS, 1)

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
        atom, tensor = self.pieces.source(x)
        self.Storage = self.pieces.storage()
        self.kernel(atom, tensor, offsets, padded, amax, turned_amax).launch(
            grid=[grid, 1, 1], block=[AMAX_WARPS * 32, 1, 1], min_blocks_per_mp=1, stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        atom: cute.CopyAtom,
        tensor: cute.Tensor,
        offsets: cute.Tensor,
        padded: cute.Tensor,
        amax: cute.Tensor,
        turned_amax: cute.Tensor | None,
    ):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        memory = cutlass.memory.SmemAllocator().allocate(self.Storage)
        width, phase = tensor.shape[0], Int32(0)
        way, there = self.pieces.start(memory, warp, width, padded)
        if way.first < way.end:
            there = self.pieces.ask(memory, atom, tensor, warp, there, way, offsets, padded)
        group, most = Int32(-1), Uint32(0)
        for index in cutlass.range(way.first, way.end, way.step, unroll=1):
            _, another, words = self.pieces.arrived(memory, warp, phase)
            words = words[:]
            phase ^= 1
            cute.arch.sync_warp()
            if index + way.step < way.end:
                there = self.pieces.ask(memory, atom, tensor, warp, there, way, offsets, padded)
            if another != group:
                if group >= 0:
                    leave(most, group, amax, turned_amax)
                group, most = another, Uint32(0)
            found = largest_half(words)
            if const_expr(turned_amax is not None):
                largest = largest_turned(words, width)
                turned_half = rounded_pair(largest * Float32(QUARTER), Float32(0.0))
                found = halves_of(found, turned_half, False) & Uint32(MAGNITUDES)
            most = max_halves(most, found)
        if group >= 0:
            leave(most, group, amax, turned_amax)


class QuantizeRows:
    """Rows of groups. options: `nvfp4_quantize_configs.QuantizeOptions`."""

    def __init__(self, options):
        self.square, self.rotates, self.stochastic = options.square, options.rotates, options.stochastic
        self.warps, self.ahead = warps_of(options), ahead_of(options)
        self.sends = options.rowwise and not options.square
        """Whether rows leave from where they were asked for to: a place is free one piece later."""
        self.pieces = Pieces(BLOCK, self.warps, self.ahead + self.sends, scattered=not options.square, factors=True)
        self.kept = options.stored * STAGED_BYTES // 4

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
        source, target = self.pieces.source(x), (None, None)
        if const_expr(self.sends):
            target = self.pieces.target(Copies(*copies).rows)
        self.Storage = self.pieces.storage(self.kept)
        self.kernel(*source, *target, offsets, padded, amax, column_amax, state, copies, lines).launch(
            grid=[grid, 1, 1], block=[self.warps * 32, 1, 1], min_blocks_per_mp=1, stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        atom: cute.CopyAtom,
        tensor: cute.Tensor,
        sink: cute.CopyAtom | None,
        sunk: cute.Tensor | None,
        offsets: cute.Tensor,
        padded: cute.Tensor,
        amax: cute.Tensor | None,
        column_amax: cute.Tensor | None,
        state: cute.Tensor | None,
        copies: tuple,
        lines: Int32,
    ):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        memory = cutlass.memory.SmemAllocator().allocate(self.Storage)
        if warp == 0:
            cpasync.prefetch_descriptor(atom)
        kept = Int32(memory.kept.data_ptr().toint() + warp * (4 * self.kept))
        stages, first = const_expr(self.pieces.stages), warp * self.pieces.stages
        turn, phase = Int32(0), Int32(0)
        asked = offsets, padded, functools.partial(factors_of, amax, column_amax)
        way, there = self.pieces.start(memory, warp, tensor.shape[0], padded)
        for stage in cutlass.range(self.ahead, unroll=1):
            if way.first + stage * way.step < way.end:
                there = self.pieces.ask(memory, atom, tensor, first + stage, there, way, *asked)
        for index in cutlass.range(way.first, way.end, way.step, unroll=1):
            slot, free = first + turn, first + turn
            if const_expr(self.sends):
                free = first + Int32(select_(turn == 0, Int32(stages - 1), turn - 1))
            piece, _, place = self.pieces.there(memory, slot, phase)
            note = self.pieces.note(memory, slot)
            turn += 1
            if turn == stages:
                turn, phase = Int32(0), phase ^ 1
            encode = self.factors(note, True)[0]
            if (piece.left > 0) | (encode != encode):  # NaN makes more than zeros of a group's padding
                if const_expr(self.square):
                    mine = piece._replace(column=piece.column + COLUMNS * cute.arch.lane_idx())
                    words = Words(place + 2 * COLUMNS * cute.arch.lane_idx(), BLOCK)
                    self.store_square(words, self.factors(note, False), Copies(*copies).rows, mine)
                else:
                    if const_expr(column_amax is not None):
                        self.columns(note, kept, place, Copies(*copies), piece, state, lines)
                    if const_expr(self.sends):
                        cute.arch.sync_warp()
                        self.rows(note, place, tensor.shape[0], piece, state)
                        self.pieces.send(memory, sink, sunk, slot, piece)
            else:
                self.store_zeros(kept, Copies(*copies), piece)
            if const_expr(self.sends):
                cute.arch.cp_async_bulk_commit_group()
                cute.arch.cp_async_bulk_wait_group(1, read=True)
            cute.arch.sync_warp()
            if index + self.ahead * way.step < way.end:
                there = self.pieces.ask(memory, atom, tensor, free, there, way, *asked)
        if const_expr(self.sends):
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    def factors(self, note, columns: bool):
        """`tensor_factors` of a piece's group, of rows or of columns."""
        encode, inverse = (word.bitcast(Float32) for word in load_shared(note, 16 + 8 * columns, 2))
        return encode, inverse

    def store_zeros(self, kept, copies: Copies, piece: Piece):
        """What lies in columns of no rows."""
        if copies.columns is not None:
            self.store_columns([[Uint32(0)] * (COLUMNS // 2)] * BLOCK, copies.columns, piece, 0)
        if copies.data is not None:
            lane = cute.arch.lane_idx()
            for quad in range(0, BLOCK, 4):
                store_shared(kept + 8 * lane, quad // 4 * QUAD_BYTES, [Uint32(0)] * 2)
            self.store_stored(kept, Uint32(0), copies, piece)

    def store_square(self, words, factors, out: cute.Tensor, piece: Piece):
        """q·S in blocks of 16x16: one scale for 4 lanes."""
        encode, decode, _ = block_scale(largest_of(words, 4), *factors)
        decode = rounded_pair(decode, decode)
        start, step = address(out, piece.row, piece.column)
        limit = limited(piece, out)
        for r, row in enumerate(words):
            store_global(start + r * step, 0, r < limit, [values(word, (encode, encode), decode) for word in row])

    @cute.jit
    def rows(self, note, place, width, piece: Piece, state: cute.Tensor | None):
        """q·S in blocks of 1x16, in place. A thread has four blocks, of rows four apart, one below the other.

        Of eight lanes four begin with the other half of a block, so that no bank is met twice.
        """
        lane = cute.arch.lane_idx()
        row, block = lane // ACROSS, lane % ACROSS
        first = place + row * (2 * SPAN) + block * (2 * BLOCK) + (lane & 4) * 4
        both = first, first ^ 16
        words = [[word for half in both for word in load_shared(half, i * ROWS_BYTES, 4)] for i in range(BLOCKS)]
        largest = [over_block(words[i : i + 2]) for i in range(0, BLOCKS, 2)]
        done = Boolean(False)
        random = None
        if const_expr(state is not None):
            first_block = (piece.row + row) * (width // BLOCK) + piece.column // BLOCK + block
            blocks = [first_block + BLOCKS * i * (width // BLOCK) for i in range(BLOCKS)]
            random = bytes_of(blocks, 0, state)
            turned = Boolean(lane & 4 != 0)
            random = [[chosen(turned, one[i ^ 2], one[i]) for i in range(4)] for one in random]
        encode, inverse = self.factors(note, False)
        plain = usual(inverse)
        if plain:
            scales = [Usual.scales(one, encode, inverse, False, self.stochastic) for one in largest]
            done = fit(scales)
            if done:
                self.write_rows(Usual, words, scales, random, both)
        if not done:
            scales = [Unusual.scales(one, encode, inverse, False, self.stochastic) for one in largest]
            self.write_rows(Unusual, words, scales, random, both)

    def write_rows(self, numbers, words, scales, random, places):
        for i, block in enumerate(words):
            encodes, decode, *_ = scales[i // 2]
            drawn, result = None, []
            for j, word in enumerate(block):
                if random is not None:
                    drawn = permuted(random[i][j // 2], Uint32(0), 0x4342 if j % 2 else 0x4140)
                result.append(numbers.values(word, (encodes[i % 2],) * 2, decode, drawn, i % 2))
            for half, there in enumerate(places):
                store_shared(there, i * ROWS_BYTES, result[4 * half : 4 * half + 4])

    @cute.jit
    def columns(self, note, kept, place, copies: Copies, piece: Piece, state: cute.Tensor | None, lines):
        """q·S in blocks of 16x1, or codes and scales, in padded rows. lines: padded rows of the matrix.

        A thread has 4 columns of all 16 rows.
        """
        words = Words(place + 2 * COLUMNS * cute.arch.lane_idx(), BLOCK)
        done = Boolean(False)
        plain = usual(self.factors(note, True)[1])
        if plain:
            mine, random, scales = self.scales_down(Usual, note, words, piece, state, lines)
            done = fit(scales)
            if done:
                self.write_columns(Usual, kept, mine, scales, random, copies, piece)
        if not done:
            mine, random, scales = self.scales_down(Unusual, note, words, piece, state, lines)
            self.write_columns(Unusual, kept, mine, scales, random, copies, piece)

    def scales_down(self, numbers, note, words, piece: Piece, state, lines):
        """(what lies in columns, their random bytes or None, the scales of two pairs of them)."""
        words = words[:]
        if self.rotates:
            pairs = [numbers.rotated(pair) for pair in zip(*words, strict=True)]
            words = [list(row) for row in zip(*pairs, strict=True)]
        largest, random = column_maxima(words), None
        encode, inverse = self.factors(note, True)
        if state is not None:
            column = piece.column + COLUMNS * cute.arch.lane_idx()
            blocks = [(column + i) * (lines // BLOCK) + piece.padded // BLOCK for i in range(COLUMNS)]
            random = bytes_of(blocks, 1, state)
        return words, random, [numbers.scales(one, encode, inverse, self.rotates, self.stochastic) for one in largest]

    def write_columns(self, numbers, kept, words, scales, random, copies: Copies, piece: Piece):
        encodes = [one[0] for one in scales]
        packed = permuted(scales[0][2], scales[1][2], 0x5410)
        for quad in range(0, BLOCK, 4):
            rows, drawn = words[quad : quad + 4], column_bytes(random, quad // 4)
            if copies.columns is not None:
                decodes = [one[1] for one in scales]
                results = [
                    [numbers.values(word, *how) for word, *how in zip(row, encodes, decodes, each, strict=True)]
                    for row, each in zip(rows, drawn, strict=True)
                ]
                self.store_columns(results, copies.columns, piece, quad)
            else:
                self.stage_codes(numbers, kept, rows, encodes, packed, drawn, quad)
        if copies.data is not None:
            self.store_stored(kept, packed, copies, piece)

    def store_columns(self, words, out: cute.Tensor, piece: Piece, first: int):
        column = piece.column + COLUMNS * cute.arch.lane_idx()
        start, step = address(out, piece.padded, column)
        for r, row in enumerate(words):
            store_global(start + Int64(Int32(step)) * (first + r), 0, column < out.shape[1], row)

    def stage_codes(self, numbers, kept, rows, encodes, packed, drawn, quad: int):
        """Codes of four rows to the warp's memory: two words a lane, two rows of four columns a word."""
        found = [numbers.codes(row, encodes, each, packed) for row, each in zip(rows, drawn, strict=True)]
        pairs = [halves_of(*found[i : i + 2], True) for i in (0, 2)]
        store_shared(kept + 8 * cute.arch.lane_idx(), quad // 4 * QUAD_BYTES, pairs)

    def store_stored(self, kept, packed, copies: Copies, piece: Piece):
        """The codes there, of which a lane takes eight bytes of each of four rows, and the scales, a word a lane."""
        lane = cute.arch.lane_idx()
        quad, columns = lane // ACROSS, lane % ACROSS
        cute.arch.sync_warp()
        place = kept + quad * QUAD_BYTES + columns * 32
        found = [load_shared(place, 16 * i, 4) for i in range(2)]
        start, step = address(copies.data, piece.padded + 4 * quad, piece.column // 2 + 8 * columns)
        inside = piece.column + BLOCK * columns < copies.scale.shape[1]
        for r in range(4):
            i, upper = divmod(r, 2)
            result = [halves_of(four[i], four[2 + i], upper == 1) for four in found]
            store_global(start + Int64(Int32(step)) * r, 0, inside, result)
        column = piece.column + COLUMNS * lane
        place, _ = address(copies.scale, piece.padded // BLOCK, column)
        store_global(place, 0, column < copies.scale.shape[1], [packed])


def fit(scales):
    """Whether `Usual` may be asked about values of a warp's blocks."""
    mine = functools.reduce(lambda one, other: one & other, [one[3] for one in scales])
    return Boolean(cute.arch.vote_all_sync(mine))


def bytes_of(blocks, stream: int, state):
    """`nvfp4_scales.random_words` of a state in global memory. blocks: numbers less than 2^32, as of any matrix that
    memory holds; what is alike in their counters is multiplied once.
    """
    return random_words([Int64(Uint32(block)) for block in blocks], stream, (state[0], state[1]))


def column_bytes(random, quad: int):
    """Of each of four rows, random bytes of its columns, two a word, in bits 0 and 16; or None."""
    if random is None:
        return [[None] * (COLUMNS // 2)] * 4
    words, rows = [column[quad] for column in random], []
    for upper in (0x5140, 0x7362):
        both = [permuted(*words[i : i + 2], upper) for i in range(0, COLUMNS, 2)]
        rows += [[permuted(one, Uint32(0), place) for one in both] for place in (0x4140, 0x4342)]
    return rows


class Restore:
    """q·S of a stored copy, in padded rows. A warp's next piece is on its way while it works at one."""

    @cute.jit
    def __call__(
        self, data: cute.Tensor, scale: cute.Tensor, padded: cute.Tensor, out: cute.Tensor, grid: Int32, stream
    ):
        self.kernel(data, scale, padded, out).launch(
            grid=[grid, 1, 1], block=[RESTORE_WARPS * 32, 1, 1], min_blocks_per_mp=1, stream=stream
        )

    @cute.kernel
    def kernel(self, data: cute.Tensor, scale: cute.Tensor, padded: cute.Tensor, out: cute.Tensor):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        spans = (out.shape[1] + 32 * RESTORED_COLUMNS - 1) // (32 * RESTORED_COLUMNS)
        pieces = padded[padded.shape[0] - 1] // BLOCK * spans
        first, step = warp * ctas + cta, ctas * RESTORE_WARPS
        words = cute.make_rmem_tensor((BLOCK + 2,), Uint32)
        self.load(data, scale, first, pieces, spans, words)
        for index in cutlass.range(first, pieces, step, unroll=1):
            mine = [words[i] for i in range(BLOCK + 2)]
            self.load(data, scale, index + step, pieces, spans, words)
            self.store(mine, index, spans, out)

    def place(self, index, spans):
        """(a piece's block of rows, the lane's first column)."""
        block = index // spans
        return block, ((index - block * spans) * 32 + cute.arch.lane_idx()) * RESTORED_COLUMNS

    def load(self, data: cute.Tensor, scale: cute.Tensor, index, pieces, spans, words):
        """A lane's codes of a piece, a word a row, and their scales, two words; zeros past the last piece."""
        block, column = self.place(index, spans)
        inside = (column < scale.shape[1]) & (index < pieces)
        start, step = address(data, block * BLOCK, column // 2)
        for r in range(BLOCK):
            words[r] = load_global(start + r * step, 0, inside, 1)[0]
        place, _ = address(scale, block, column)
        words[BLOCK], words[BLOCK + 1] = load_global(place, 0, inside, 2)

    def store(self, words, index, spans, out: cute.Tensor):
        block, column = self.place(index, spans)
        inside = column < out.shape[1]
        scales = [scale_of(words[BLOCK + i // 4], i % 4) for i in range(RESTORED_COLUMNS)]
        decode = [rounded_pair(*scales[i : i + 2]) for i in range(0, RESTORED_COLUMNS, 2)]
        target, step = address(out, block * BLOCK, column)
        for r, word in enumerate(words[:BLOCK]):
            store_global(target + r * step, 0, inside, values_of(word, decode))


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
    return QuantizeRows(options), (x, *places(), *amaxes, state, copies, Int32(1), Int32(1), make_fake_stream())


def build_restore(options):
    """data, scale, padded, out, grid size, stream."""
    columns = sixteens()
    out = dense(BFloat16, cute.sym_int(), columns)
    return Restore(), (*stored(columns), vector_of(Int32, cute.sym_int()), out, Int32(1), make_fake_stream())


_BUILDERS = {"AmaxOptions": build_amax, "QuantizeOptions": build_rows, "RestoreOptions": build_restore}


def build(options):
    """(jit function, fake arguments) of the kernel that `options` belongs to."""
    return _BUILDERS[type(options).__name__](options)
