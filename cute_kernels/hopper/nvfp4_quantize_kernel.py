"""One pass over BF16 matrices on SM90 that gives their NVFP4 values in BF16, or as stored; their maxima; the way back.

    Amax           x [T, K] of groups: the largest magnitudes of each, and of its transpose once that is rotated
    QuantizeRows   x: q·S in blocks of 1x16 and of 16x1 (rotated or not), or of 16x16, the stored copy in 16x1
    Restore        the stored copy -> q·S [P, K]

Layouts and formulas: `nvfp4_reference`. K is a multiple of 16, rows of x any multiple of 8 elements apart. A block of
16 rows begins at a group's first row or a multiple of 16 below it; rows past the group's end are not read and count
as zeros.

Roles: warps that have nothing in common, persistent, one CTA an SM: each takes a piece of 16 rows x 128 columns (256 to
restore) after another. What is to be quantised is on its way to shared memory (`quantize_pieces`) two pieces ahead,
what is to be restored to registers one ahead.
Timeline of a piece: a thread has 4 columns of all 16 rows. A column's block is then one thread's, and so is its
rotation; a row's is that of 4 lanes, who share its work: each forms the scales of four rows, and the random bytes of
every fourth, and they trade. Values are read again for the second copy, so that registers are left for more warps.

Numerics: maxima are exact; see `nvfp4_scales` for the rest. A piece of a group whose largest magnitude is near FP32's
limits takes a longer way, `nvfp4_packed.Unusual`: the short one is exact but there. A warp chooses once a piece.
Largest magnitudes of groups meet by atomic maxima of bits, once for each group that a warp has pieces of.

Measured on one H200 (2026-12-01, shares of what a copy of 1 GiB moves, variants in turn; dsv3, gptoss, qwen3 of
docs/performance.md; rows and rotated columns, "drawn": stochastic):
                                    stored            both, drawn       both              restored
    this kernel                     0.86 0.76 0.80    0.88 0.76 0.80    0.88 0.80 0.84    0.86 0.79 0.85
    24 warps (drawn 20), neighbours 0.80 0.72 0.79    0.84 0.72 0.81    0.87 0.76 0.85    0.86 0.79 0.85
    20 warps, neighbours            0.79 0.72 0.79    0.84 0.72 0.81    0.87 0.76 0.85    0.83 0.76 0.82
    16 warps, neighbours            0.79 0.72 0.79    0.84 0.73 0.81    0.86 0.76 0.85    0.86 0.79 0.85
    `Unusual` for all, as the first 0.80 0.73 0.79    0.72 0.66 0.70    0.86 0.76 0.85    0.83 0.75 0.82
16 warps keep three pieces on their way (drawn two). Largest magnitudes: 0.91 0.73 0.80; with pieces of all CTAs mixed
0.83 0.41 0.47, as a warp then meets more groups. Restored with 20, 24, 16, 24 and 24 warps, of the last none ahead.
Weights in square blocks: 24 warps and neighbours, not compared.
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
from cute_kernels.hopper.fp8_scales import FOURS, MAGNITUDES, bf16_bits, exchanged, halves_of, max_halves
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
from cute_kernels.hopper.nvfp4_scales import (
    QUARTER,
    block_scale,
    butterfly,
    half_of,
    larger_halves,
    picked,
    random_words,
    rounded_pair,
    scale_of,
    tensor_factors,
    values,
    values_of,
)
from cute_kernels.hopper.quantize_pieces import COLUMNS, Piece, Pieces, address
from cute_kernels.hopper.rowwise_kernel import row_matrix, vector_of

AMAX_WARPS, RESTORE_WARPS = 24, 20
STAGES = 2
"""Pieces of a warp in shared memory."""
BLOCK = 16
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


def turned(numbers, words, width):
    """The same, rotated down the rows, two columns after the other."""
    pairs = [numbers.rotated([row[0] for row in words])]
    for pair in range(1, COLUMNS // 2):
        zero = zero_after(width, pairs[-1][0])
        pairs.append(numbers.rotated([row[pair] ^ zero for row in words]))
    return [list(row) for row in zip(*pairs, strict=True)]


def over_block(words):
    """The largest magnitudes of four rows over the 4 lanes of a block, two rows a word: each lane gets other rows."""
    lane, found = cute.arch.lane_idx(), []
    for r in range(0, BLOCK, 2):
        both = [larger_halves(*row) for row in words[r : r + 2]]
        found.append(larger_halves(halves_of(*both, False), halves_of(*both, True)) & Uint32(MAGNITUDES))
    for distance in (1, 2):
        upper, half = Boolean(lane & distance != 0), len(found) // 2
        kept = [chosen(upper, found[half + i], found[i]) for i in range(half)]
        sent = [chosen(upper, found[i], found[half + i]) for i in range(half)]
        found = [max_halves(mine, exchanged(word, distance)) for mine, word in zip(kept, sent, strict=True)]
    return found


def of_row(words, row: int):
    """Row `row`'s of the words, one a row or two, that each of a block's lanes has: those of `over_block`'s rows."""
    owner = row // 8 + row // 4 % 2 * 2
    return Uint32(cute.arch.shuffle_sync(words[row % 4 * len(words) // 4], offset=owner, mask_and_clamp=FOURS))


def halves(largest):
    """The FP32 bits of both halves of a word of maxima."""
    return bf16_bits(largest & Uint32(0xFFFF)), bf16_bits(largest >> 16)


def traded(words):
    """Word w of lane l and word l of lane w of four lanes change places."""
    lane = cute.arch.lane_idx()
    for distance in (1, 2):
        upper = Boolean(lane & distance != 0)
        for low in [i for i in range(4) if not i & distance]:
            high = low + distance
            got = exchanged(chosen(upper, words[low], words[high]), distance)
            words[low], words[high] = chosen(upper, got, words[low]), chosen(upper, words[high], got)
    return words


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
    """Rows of groups. options: `nvfp4_quantize.QuantizeOptions`."""

    def __init__(self, options):
        self.square, self.rotates, self.warps = options.square, options.rotates, warps_of(options)
        self.pieces = Pieces(BLOCK, self.warps, STAGES, scattered=not options.square)

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
        atom, tensor = self.pieces.source(x)
        self.Storage = self.pieces.storage()
        self.kernel(atom, tensor, offsets, padded, amax, column_amax, state, copies, lines).launch(
            grid=[grid, 1, 1], block=[self.warps * 32, 1, 1], min_blocks_per_mp=1, stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        atom: cute.CopyAtom,
        tensor: cute.Tensor,
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
        kept = Int32(memory.kept.data_ptr().toint() + warp * 16)
        width, known, turn = tensor.shape[0], Int32(-1), Int32(0)
        way, there = self.pieces.start(memory, warp, width, padded)
        for stage in cutlass.range(STAGES, unroll=1):
            if way.first + stage * way.step < way.end:
                slot = STAGES * warp + stage
                there = self.pieces.ask(memory, atom, tensor, slot, there, way, offsets, padded)
        for index in cutlass.range(way.first, way.end, way.step, unroll=1):
            slot = STAGES * warp + turn % STAGES
            piece, group, words = self.pieces.arrived(memory, slot, turn // STAGES % 2)
            turn += 1
            if group != known:
                known = group
                self.keep_factors(kept, amax, column_amax, group)
            encode = self.factors(kept, True)[0]
            plain = Boolean(True)
            if const_expr(amax is not None):
                plain = plain & usual(self.factors(kept, False)[1])
            if const_expr(column_amax is not None):
                plain = plain & usual(self.factors(kept, True)[1])
            if (piece.left > 0) | (encode != encode):  # NaN makes more than zeros of a group's padding
                if const_expr(self.square):
                    self.store_square(words, self.factors(kept, False), Copies(*copies).rows, piece)
                else:
                    if plain:
                        self.piece(Usual, words, width, kept, amax, column_amax, state, Copies(*copies), lines, piece)
                    else:
                        self.piece(Unusual, words, width, kept, amax, column_amax, state, Copies(*copies), lines, piece)
            else:
                self.store_zeros(Copies(*copies), piece)
            cute.arch.sync_warp()
            if index + STAGES * way.step < way.end:
                there = self.pieces.ask(memory, atom, tensor, slot, there, way, offsets, padded)

    @cute.jit
    def keep_factors(self, kept, amax, column_amax, group):
        """Leaves a group's `tensor_factors`, of rows and of columns, where the warp keeps them: they are divisions."""
        found = []
        for one in (amax, column_amax):
            both = (Float32(0.0), Float32(0.0)) if const_expr(one is None) else tensor_factors(one[group])
            found += [Float32(factor).bitcast(Uint32) for factor in both]
        if cute.arch.lane_idx() == 0:
            store_shared(kept, 0, found)
        cute.arch.sync_warp()

    def factors(self, kept, columns: bool):
        return [word.bitcast(Float32) for word in load_shared(kept, 8 * columns, 2)]

    def piece(self, numbers, words, width, kept, amax, column_amax, state, copies: Copies, lines, piece: Piece):
        """Everything that is wanted of one piece. numbers: `Usual` or `Unusual`, as its group is."""
        if amax is not None:
            zero = self.store_rows(numbers, words, self.factors(kept, False), copies.rows, piece, state)
            piece = piece._replace(padded=piece.padded + Int32(zero), column=piece.column + Int32(zero))
            words = words.after(zero)
        if column_amax is not None:
            words = turned(numbers, words, width) if self.rotates else words
            self.store_columns(numbers, words, self.factors(kept, True), copies, piece, state, lines)

    def store_zeros(self, copies: Copies, piece: Piece):
        """What lies in columns of no rows."""
        if copies.columns is not None:
            start, step = address(copies.columns, piece.padded, piece.column)
            inside = piece.column < copies.columns.shape[1]
            for r in range(BLOCK):
                store_global(start + r * step, 0, inside, [Uint32(0)] * (COLUMNS // 2))
        if copies.data is not None:
            start, step, inside = self.place_of_codes(copies, piece)
            for r in range(0, BLOCK, 2):
                store_global(start + r * step, 0, inside, [Uint32(0)])
            place, _ = address(copies.scale, piece.padded // BLOCK, piece.column)
            store_global(place, 0, inside, [Uint32(0)])

    def place_of_codes(self, copies: Copies, piece: Piece):
        """(where a lane's codes begin, bytes from row to row, whether it has any): eight in every second row."""
        odd = cute.arch.lane_idx() % 2
        start, step = address(copies.data, piece.padded + odd, piece.column // 2 - 2 * odd)
        return start, step, piece.column < copies.scale.shape[1]

    def store_square(self, words, factors, out: cute.Tensor, piece: Piece):
        """q·S in blocks of 16x16: one scale for 4 lanes."""
        encode, decode, _ = block_scale(largest_of(words, 4), *factors)
        decode = rounded_pair(decode, decode)
        start, step = address(out, piece.row, piece.column)
        limit = limited(piece, out)
        for r, row in enumerate(words):
            store_global(start + r * step, 0, r < limit, [values(word, (encode, encode), decode) for word in row])

    def store_rows(self, numbers, words, factors, out: cute.Tensor, piece: Piece, state):
        """q·S in blocks of 1x16."""
        scales = [numbers.scales(largest, *factors) for largest in over_block(words)]
        encodes = [one.bitcast(Uint32) for both, _, _ in scales for one in both]
        decodes = [decode for _, decode, _ in scales]
        start, step = address(out, piece.row, piece.column)
        limit = limited(piece, out)
        zero, random, decode = Uint32(0), [], Uint32(0)
        for r, row in enumerate(words):
            if state is not None and r % 8 == 0:
                random = self.row_bytes(out.shape[1], piece._replace(row=piece.row + Int32(zero)), r, state)
            encode = of_row(encodes, r).bitcast(Float32)
            decode = decode if r % 2 else of_row(decodes, r)
            result = []
            for pair, word in enumerate(row):
                drawn = permuted(random[r % 8], Uint32(0), 0x4342 if pair else 0x4140) if random else None
                result.append(numbers.values(word, (encode, encode), decode, drawn, r % 2))
            store_global(start + r * step, 0, r < limit, result)
            if r % 4 == 3:
                zero = zero_after(out.shape[1], result[0])
                start += Int64(zero)
        return zero

    def row_bytes(self, width, piece: Piece, first: int, state):
        """Of the random bytes of rows first.. to + 8 those of this lane's columns, a word a row."""
        row = piece.row + first + cute.arch.lane_idx() % 4
        blocks = [Int64(row + four) * (width // 16) + piece.column // 16 for four in (0, 4)]
        return [word for words in random_words(blocks, 0, (state[0], state[1])) for word in traded(words)]

    def store_columns(self, numbers, words, factors, copies: Copies, piece: Piece, state, lines):
        """q·S in blocks of 16x1, or codes and scales, in padded rows. lines: padded rows of the matrix."""
        scales = [numbers.scales(largest, *factors) for largest in column_maxima(words)]
        random = None
        if state is not None:
            column = piece.column + Int32(zero_after(lines, scales[0][2]))
            blocks = [Int64(column + i) * (lines // 16) + piece.padded // 16 for i in range(COLUMNS)]
            random = random_words(blocks, 1, (state[0], state[1]))
        encodes = [both for both, _, _ in scales]
        if copies.columns is not None:
            decodes = [decode for _, decode, _ in scales]
            start, step = address(copies.columns, piece.padded, piece.column)
            inside = piece.column < copies.columns.shape[1]
            zero, result = Uint32(0), words[0]
            for r, row in enumerate(words):
                if r % 4 == 0 and r:
                    zero = zero_after(copies.columns.shape[1], result[0])
                    start += Int64(zero)
                drawn = self.column_bytes(random, r)
                each = zip(row, encodes, decodes, drawn, strict=True)
                result = [numbers.values(word ^ zero, *how) for word, *how in each]
                store_global(start + r * step, 0, inside, result)
        if copies.data is not None:
            self.store_codes(
                numbers, words, encodes, permuted(scales[0][2], scales[1][2], 0x5410), random, copies, piece
            )

    def column_bytes(self, random, row: int):
        """Random bytes of a row's columns, two a word, in bits 0 and 16; or None of each."""
        if random is None:
            return [None] * (COLUMNS // 2)
        first = row % 4
        pairs = [[random[i + j][row // 4] for j in range(2)] for i in range(0, COLUMNS, 2)]
        return [permuted(*pair, first | 4 + first << 8) & Uint32(0x00FF00FF) for pair in pairs]

    def store_codes(self, numbers, words, encodes, packed, random, copies: Copies, piece: Piece):
        """Codes, of which a lane stores eight in every second row, and the scales of the block, a word."""
        start, step, inside = self.place_of_codes(copies, piece)
        upper = Boolean(cute.arch.lane_idx() % 2 == 1)
        signed = Uint32(0)
        for i in range(COLUMNS):  # NaN's code is 7
            is_nan = packed & Uint32(0xFF << 8 * i) == Uint32(0x7F << 8 * i)
            signed = signed | chosen(is_nan, Uint32(0), Uint32(0x80008 << 4 * i))
        for first in range(0, BLOCK, 2):
            rows = words[first : first + 2]
            found = [numbers.codes(row, encodes, self.column_bytes(random, first + i)) for i, row in enumerate(rows)]
            signs = [permuted(*row, 0xFBD9) for row in rows]
            mine = permuted(*found, 0x6420) & Uint32(0x77777777)
            even, odds = (halves_of(*signs, up) for up in (False, True))
            mine = mine | (even & Uint32(0x0F0F0F0F) | odds & Uint32(0xF0F0F0F0)) & signed
            got = exchanged(chosen(upper, mine, mine >> 16), 1)
            result = picked(mine, got, chosen(upper, Uint32(0x3254), Uint32(0x5410)))
            store_global(start + first * step, 0, inside, [result])
            if first % 4:
                start += Int64(zero_after(copies.scale.shape[1], result))
        place, _ = address(copies.scale, piece.padded // BLOCK, piece.column)
        store_global(place, 0, inside, [packed])


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


def warps_of(options) -> int:
    """As many as leave each thread the registers that it needs."""
    if options.stochastic:
        return 14 if options.rowwise and options.columnwise and not options.rotates else 16
    return 24 if options.square else 20


def build_restore(options):
    """data, scale, padded, out, grid size, stream."""
    columns = sixteens()
    out = dense(BFloat16, cute.sym_int(), columns)
    return Restore(), (*stored(columns), vector_of(Int32, cute.sym_int()), out, Int32(1), make_fake_stream())


_BUILDERS = {"AmaxOptions": build_amax, "QuantizeOptions": build_rows, "RestoreOptions": build_restore}


def build(options):
    """(jit function, fake arguments) of the kernel that `options`, one of `nvfp4_quantize`'s classes, belongs to."""
    return _BUILDERS[type(options).__name__](options)
