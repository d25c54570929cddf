"""One pass over BF16 matrices on SM90 that gives their NVFP4 values in BF16, or as stored; their maxima; the way back.

    Amax           x [T, K] of groups: the largest magnitudes of each, and of its transpose once that is rotated
    QuantizeRows   x: q·S in blocks of 1x16 and of 16x1 (rotated or not), or of 16x16, the stored copy in 16x1
    Restore        the stored copy -> q·S [P, K]

Layouts and formulas: `nvfp4_reference`. K is a multiple of 16, rows of x any multiple of 8 elements apart. A block of
16 rows begins at a group's first row or a multiple of 16 below it; rows past the group's end are not read and count
as zeros.

Roles: warps that have nothing in common, persistent, one CTA an SM: each takes a piece of 16 rows x 128 columns (256 to
restore) after another. What is to be quantised is on its way to shared memory (`quantize_pieces`) two pieces ahead.
Timeline of a piece: a thread has 4 columns of all 16 rows. A column's block is then one thread's, and so is its
rotation; a row's is that of 4 lanes, who share its work: each forms the scales of four rows, and the random bytes of
every fourth, and they trade. Values are read again for the second copy, so that registers are left for more warps.

Bound by instructions, of which a value takes 30 to 50: see `nvfp4_scales`.

Numerics: maxima are exact; see `nvfp4_scales` for the rest. Largest magnitudes of groups meet by atomic maxima of bits,
once for each group that a warp has pieces of.
"""

import functools
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, Uint8, Uint32, const_expr
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
from cute_kernels.hopper.nvfp4_scales import (
    QUARTER,
    block_scale,
    butterfly,
    codes,
    half_of,
    larger_halves,
    picked,
    random_words,
    rotated,
    rounded_pair,
    scale_of,
    tensor_factors,
    values,
    values_of,
)
from cute_kernels.hopper.quantize_pieces import COLUMNS, Piece, Pieces, address
from cute_kernels.hopper.rowwise_kernel import row_matrix, vector_of

WARPS, FEW_WARPS, AMAX_WARPS, RESTORE_WARPS = 24, 20, 24, 24
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


def turned(words, width):
    """The same, rotated down the rows, two columns after the other."""
    pairs = [rotated([row[0] for row in words])]
    for pair in range(1, COLUMNS // 2):
        zero = zero_after(width, pairs[-1][0])
        pairs.append(rotated([row[pair] ^ zero for row in words]))
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
        self.square, self.rotates = options.square, options.rotates
        few = options.stochastic and (options.stored or not options.rotates)  # registers
        self.warps = FEW_WARPS if few else WARPS
        self.pieces = Pieces(BLOCK, self.warps, STAGES)

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
            if (piece.left > 0) | (encode != encode):  # NaN makes more than zeros of a group's padding
                self.piece(words, width, kept, amax, column_amax, state, Copies(*copies), lines, piece)
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

    def piece(self, words, width, kept, amax, column_amax, state, copies: Copies, lines, piece: Piece):
        """Everything that is wanted of one piece."""
        if amax is not None:
            factors = self.factors(kept, False)
            if self.square:
                self.store_square(words, factors, copies.rows, piece)
            else:
                zero = self.store_rows(words, factors, copies.rows, piece, state)
                piece = piece._replace(padded=piece.padded + Int32(zero), column=piece.column + Int32(zero))
                words = words.after(zero)
        if column_amax is not None:
            words = turned(words, width) if self.rotates else words
            self.store_columns(words, self.factors(kept, True), copies, piece, state, lines)

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

    def store_rows(self, words, factors, out: cute.Tensor, piece: Piece, state):
        """q·S in blocks of 1x16."""
        scales = [block_scale(bits, *factors)[:2] for word in over_block(words) for bits in halves(word)]
        encodes = [one.bitcast(Uint32) for one, _ in scales]
        decodes = [rounded_pair(scales[i][1], scales[i + 1][1]) for i in (0, 2)]
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
                how = (None,) * 2 if state is None else ([random[r % 8]] * 2, (16 * pair, 16 * pair + 8))
                result.append(values(word, (encode, encode), decode, *how, r % 2))
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

    def store_columns(self, words, factors, copies: Copies, piece: Piece, state, lines):
        """q·S in blocks of 16x1, or codes and scales, in padded rows. lines: padded rows of the matrix."""
        amax = [bits for largest in column_maxima(words) for bits in halves(largest)]
        scales = [block_scale(bits, *factors) for bits in amax]
        random = None
        if state is not None:
            column = piece.column + Int32(zero_after(lines, scales[0][2]))
            blocks = [Int64(column + i) * (lines // 16) + piece.padded // 16 for i in range(COLUMNS)]
            random = random_words(blocks, 1, (state[0], state[1]))
        encodes = [[one[0] for one in scales[i : i + 2]] for i in range(0, COLUMNS, 2)]
        if copies.columns is not None:
            decodes = [rounded_pair(*(one[1] for one in scales[i : i + 2])) for i in range(0, COLUMNS, 2)]
            start, step = address(copies.columns, piece.padded, piece.column)
            inside = piece.column < copies.columns.shape[1]
            zero, result = Uint32(0), words[0]
            for r, row in enumerate(words):
                if r % 4 == 0 and r:
                    zero = zero_after(copies.columns.shape[1], result[0])
                    start += Int64(zero)
                result = []
                for pair, word in enumerate(row):
                    how = self.column_bytes(random, pair, r)
                    result.append(values(word ^ zero, encodes[pair], decodes[pair], *how))
                store_global(start + r * step, 0, inside, result)
        if copies.data is not None:
            self.store_codes(words, encodes, [byte for _, _, byte in scales], random, copies, piece)

    def column_bytes(self, random, pair: int, row: int):
        """What `values` takes for two columns of a row."""
        if random is None:
            return ()
        return [random[2 * pair + i][row // 4] for i in range(2)], (8 * (row % 4),) * 2

    def store_codes(self, words, encodes, scales, random, copies: Copies, piece: Piece):
        """Codes, of which a lane stores eight in every second row, and the scales of the block, given as bytes."""
        start, step, inside = self.place_of_codes(copies, piece)
        upper = Boolean(cute.arch.lane_idx() % 2 == 1)
        signed = Uint32(0)
        for i, byte in enumerate(scales):  # NaN's code is 7
            signed = signed | chosen(Uint32(byte) == Uint32(0x7F), Uint32(0), Uint32(0x80008 << 4 * i))
        for first in range(0, BLOCK, 2):
            found, signs = [], []
            for r in range(first, first + 2):
                row = words[r]
                parts = [codes(row[i], encodes[i], *self.column_bytes(random, i, r)) for i in range(COLUMNS // 2)]
                found.append(permuted(*parts, 0x40))
                signs.append(permuted(*row, 0xFBD9))
            mine = halves_of(*found, False) & Uint32(0x77777777)
            even, odds = (halves_of(*signs, up) for up in (False, True))
            mine = mine | (even & Uint32(0x0F0F0F0F) | odds & Uint32(0xF0F0F0F0)) & signed
            got = exchanged(chosen(upper, mine, mine >> 16), 1)
            result = picked(mine, got, chosen(upper, Uint32(0x3254), Uint32(0x5410)))
            store_global(start + first * step, 0, inside, [result])
            if first % 4:
                start += Int64(zero_after(copies.scale.shape[1], result))
        packed = scales[0]
        for i, byte in enumerate(scales[1:]):
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
            grid=[grid, 1, 1], block=[RESTORE_WARPS * 32, 1, 1], min_blocks_per_mp=1, stream=stream
        )

    @cute.kernel
    def kernel(self, data: cute.Tensor, scale: cute.Tensor, padded: cute.Tensor, out: cute.Tensor):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        spans = (out.shape[1] + 32 * RESTORED_COLUMNS - 1) // (32 * RESTORED_COLUMNS)
        pieces = padded[padded.shape[0] - 1] // BLOCK * spans
        for index in cutlass.range(warp * ctas + cta, pieces, ctas * RESTORE_WARPS, unroll=1):
            block = index // spans
            row, column = block * BLOCK, ((index - block * spans) * 32 + cute.arch.lane_idx()) * RESTORED_COLUMNS
            self.piece(data, scale, row, column, out)

    def piece(self, data: cute.Tensor, scale: cute.Tensor, row, column, out: cute.Tensor):
        inside = column < out.shape[1]
        start, step = address(data, row, column // 2)
        words = [load_global(start + r * step, 0, inside, 1)[0] for r in range(BLOCK)]
        place, _ = address(scale, row // BLOCK, column)
        packed = load_global(place, 0, inside, 2)
        scales = [scale_of(packed[i // 4], i % 4) for i in range(RESTORED_COLUMNS)]
        decode = [rounded_pair(*scales[i : i + 2]) for i in range(0, RESTORED_COLUMNS, 2)]
        target, step = address(out, row, column)
        for r, word in enumerate(words):
            result = values_of(word, decode)
            store_global(target + r * step, 0, inside, result)
            if r % 4 == 3:
                target += Int64(zero_after(out.shape[1], result[0]))


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
    """(jit function, fake arguments) of the kernel that `options`, one of `nvfp4_quantize`'s classes, belongs to."""
    return _BUILDERS[type(options).__name__](options)
