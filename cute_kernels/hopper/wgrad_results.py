"""What becomes of a warpgroup's sums in every weight-gradient kernel: where in the gradient they go, how they leave.

Each warp works by itself, 16 rows by 128 bytes at a time, in its own rows of its warpgroup's staging slots. The rows
leave by TMA, or, where 16 rows of a tile may lie apart in the weight, one by one. Separate outputs are reached through
one descriptor that starts at the lowest of them and has a dimension of 16-byte steps.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Boolean, Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.cute.runtime import make_fake_compact_tensor
from cutlass.cutlass_dsl import dsl_user_op, select_

from cute_kernels.hopper.asm import asm
from cute_kernels.hopper.grouped_wgrad_configs import SLOT_ROW_BYTES
from cute_kernels.hopper.wgrad_operands import TILE_M, TYPES, VECTOR_BYTES, anew
from cute_kernels.hopper.wgrad_tiles import filled_groups, has_rows

ZERO_BYTES = 4096  # what a CTA zeroes at once
LANES = SLOT_ROW_BYTES // VECTOR_BYTES  # that copy a row together
STEPS = 16 * LANES // 32  # in which a warp copies 16 rows
UNITS, FAR_UNITS = 1 << 30, 1 << 10  # of 16 bytes in two dimensions that reach separate outputs


@dsl_user_op
def rest(*, loc=None, ip=None):
    """A pause of some 100 ns."""
    asm(None, [], "nanosleep.u32 100;", "", loc, ip, effects=True)


class Target(NamedTuple):
    """Where results go.

    out: (stacked buffer,) or (lowest of separate ones, their addresses). atom, tensor: for TMA, or None.
    block: rows of an interleaved block.
    """

    out: Any
    atom: Any
    tensor: Any
    block: Any


class Tile(NamedTuple):
    """A tile of one group's gradient, by its first row and column."""

    group: Any
    row: Any
    col: Any


def fake_results(options, groups, rows, cols) -> tuple[Any, ...]:
    """(stacked buffer,), or of separate ones (the lowest, all addresses), to compile with."""
    shape = (rows, cols) if options.separate else (groups, rows, cols)
    order = tuple(reversed(range(len(shape))))
    out: tuple[Any, ...] = (make_fake_compact_tensor(TYPES[options.out], shape, stride_order=order, assumed_align=16),)
    if options.separate:
        out += (make_fake_compact_tensor(Int64, (groups,), assumed_align=8),)
    return out


class Results:
    """Static facts of the results, and the ways they leave. `element`: of the operands, which the subclass sets."""

    element: Any
    teams = 2
    """Warpgroups with results."""

    def __init__(self, options):
        config = options.config
        self.stages, self.slots = config.stages, config.slots
        self.by_tma = config.by_tma
        self.out = TYPES[options.out]
        self.interleaved = options.interleaved
        self.separate = options.separate
        self.out_bytes = self.out.width // 8
        self.staged_cols = SLOT_ROW_BYTES // self.out_bytes
        self.vector = VECTOR_BYTES // self.out_bytes
        self.span = 4 * self.vector
        """Columns of a row that the four lanes with its sums store at once."""

    def make_staging(self):
        """(swizzle of a staged piece, layout of the slots of all warpgroups)."""
        lines = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.out)
        return lines, cute.tile_to_shape(lines, (64, self.staged_cols, self.teams * self.slots), (0, 1, 2))

    def make_sink(self, out, lines):
        """(TMA atom, coordinates) that store boxes of 16 staged rows, clipped at N and K; Nones if none do.

        Coordinates: row, column, then the group; or, of separate tensors, two of the distance to the lowest.
        """
        if not self.by_tma:
            return None, None
        rows, cols = out.shape[-2], out.shape[-1]
        step = VECTOR_BYTES // self.out_bytes
        shape: tuple[Any, ...] = (rows, cols, UNITS, FAR_UNITS)
        stride: tuple[Any, ...] = (Int64(cols), 1, step, UNITS * step)
        if not self.separate:
            shape, stride = (rows, cols, out.shape[0]), (Int64(cols), 1, Int64(rows) * cols)
        box = (16, self.staged_cols)
        staged = cute.tile_to_shape(lines, box, (0, 1))
        view = cute.make_tensor(out.iterator, cute.make_layout(shape, stride=stride))
        return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), view, staged, box)

    @cute.jit
    def line(self, row, target: Target, walk):
        """Where in the weight a row of the gradient lies."""
        if const_expr(self.interleaved):
            half = walk.rows // 2
            up = row // half
            in_half = row - up * half
            row = (in_half // target.block) * (2 * target.block) + up * target.block + in_half % target.block
        return row

    @cute.jit
    def start(self, target: Target, walk, group):
        """Address of the group's gradient."""
        if const_expr(self.separate):
            address = target.out[1][group]
        else:
            address = target.out[0].iterator.toint() + Int64(group) * (Int64(walk.rows) * walk.cols * self.out_bytes)
        return address

    def vector_at(self, address):
        """16 bytes of a gradient."""
        pointer = cute.make_ptr(self.out, address, cute.AddressSpace.gmem, assumed_align=VECTOR_BYTES)
        return cute.make_tensor(pointer, cute.make_layout((self.vector,)))

    @cute.jit
    def coordinates(self, target: Target, group):
        """Coordinates of the group's gradient, for TMA."""
        if const_expr(self.separate):
            distance = (target.out[1][group] - target.out[0].iterator.toint()) // VECTOR_BYTES
            whole = target.tensor[None, None, Int32(distance % UNITS), Int32(distance // UNITS)]
        else:
            whole = target.tensor[None, None, group]
        return whole

    @cute.jit
    def send(self, slot, target: Target, whole, line, col, thread):
        """This warp's 16 staged rows leave by TMA, to `line` and the 15 after it of `whole` (see `coordinates`)."""
        box = (16, self.staged_cols)
        there = cute.local_tile(cute.domain_offset((line, col), whole), box, (0, 0))
        source = cute.local_tile(slot, box, (cute.arch.make_warp_uniform(thread // 32), 0))
        source, there = cpasync.tma_partition(
            target.atom, 0, cute.make_layout(1), cute.group_modes(source, 0, 2), cute.group_modes(there, 0, 2)
        )
        cute.copy(target.atom, source, there)

    @cute.jit
    def stage(self, part, slot, thread):
        """A 64-row piece of the accumulator -> staged rows. Each warp writes its own 16 rows only."""
        if const_expr(self.out.width == 16):
            rounded = cute.make_rmem_tensor(part.shape, self.out)
            rounded.store(part.load().to(self.out))
            k_major = OperandMajorMode.K
            shape = sm90.make_trivial_tiled_mma(
                self.element, self.element, k_major, k_major, Float32, (1, 1, 1), (64, self.staged_cols)
            )
            atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.out)
            copy = cute.make_tiled_copy_C(atom, shape)
            cute.copy(copy, copy.retile(rounded), copy.get_slice(thread).partition_D(slot))
        else:
            for pair in range_constexpr(self.staged_cols // 4):
                values = cute.make_tensor(part.iterator + 2 * pair, cute.make_layout((2,)))
                cute.autovec_copy(values, self.staged_pair(slot, pair, thread))

    @cute.jit
    def staged_pair(self, slot, pair: cutlass.Constexpr, thread):
        """Where elements 2 pair, 2 pair + 1 of a thread's share of a piece are staged."""
        row = thread // 32 * 16 + thread % 32 // 4 + 8 * (pair % 2)
        return cute.local_tile(slot[row, None], (2,), (4 * (pair // 2) + thread % 4,))

    @cute.jit
    def write_if(self, inside, values, there):
        if inside:
            cute.autovec_copy(values, there)

    @cute.jit
    def column_of_lane(self, thread):
        """First of a lane's columns in a span, after `vector_of`."""
        if const_expr(self.out.width == 16):
            column = (thread & 3) * 8
        else:
            column = (thread & 1) * 8 + (thread & 2) * 2
        return column

    @cute.jit
    def vector_of(self, acc, place: cutlass.Constexpr, chunk: cutlass.Constexpr, thread):
        """16 bytes of one row, rounded. Four lanes hold the sums of a row, two neighbours of every 8 columns each; they
        exchange them until each has neighbours only. place: rows r, r + 8, r + 64, r + 72 of the tile."""
        octets, values = self.span // 8, cute.make_rmem_tensor((self.vector,), self.out)
        sums = acc.iterator + place // 2 * (cute.size(acc) // 2) + chunk * octets * 4 + place % 2 * 2
        pairs = cute.make_tensor(sums, cute.make_layout((2, octets), stride=(1, 4)))
        cute.make_tensor(values.iterator, cute.make_layout((2, octets))).store(pairs.load().to(self.out))
        words = cute.recast_tensor(values, Int32)
        odd, high = Boolean((thread & 1) != 0), Boolean((thread & 2) != 0)
        if const_expr(self.out.width == 16):
            for low in (0, 2):
                exchange(words, low, low + 1, odd, 1)
            for low in (0, 1):
                exchange(words, low, low + 2, high, 2)
        else:
            for word in (0, 1):
                exchange(words, word, word + 2, odd, 1)
        return values

    @cute.jit
    def zero_empty(self, target: Target, walk, cta, ctas, worker, pace: cutlass.Constexpr):
        """Two warps: zeros for the gradients of groups without rows, in pieces that CTAs take in turn.

        Beside products they are paced to last as long, or they would take the memory's bandwidth from them: of R rows
        and E empty groups, N K cancels out, and a piece of 4096 bytes may take `pace` R / (E bytes of an element)
        cycles.
        """
        lane = cute.arch.lane_idx()
        empty = walk.groups - filled_groups(walk)
        if empty > 0:
            zeros = cute.make_rmem_tensor((self.vector,), self.out)
            zeros.fill(0.0)
            pause = pace * walk.offsets[walk.groups] // (empty * self.out_bytes)
            size = Int64(walk.rows) * walk.cols * self.out_bytes
            pieces = Int32((size + ZERO_BYTES - 1) // ZERO_BYTES)
            piece, base, due = Int32(cta), Int32(0), cute.arch.clock64()
            while base < walk.groups:
                mine = base + lane
                left = cute.arch.vote_ballot_sync(mine < walk.groups and not has_rows(walk, mine))
                while left != 0:
                    start = self.start(target, walk, base + cute.arch.popc((left & -left) - 1))
                    left = left & (left - 1)
                    while piece < pieces:
                        for i in range_constexpr(ZERO_BYTES // (64 * VECTOR_BYTES)):
                            at = Int64(piece) * ZERO_BYTES + (i * 64 + worker) * VECTOR_BYTES
                            if at < size:
                                cute.autovec_copy(zeros, self.vector_at(start + at))
                        piece += ctas
                        due += pause
                        while cute.arch.clock64() < due:
                            rest()
                    piece -= pieces
                base += 32


def exchange(words, low: int, up: int, is_upper, distance: int):
    """Between lanes `distance` apart: the lower keeps word `low` and gets the upper's, the upper keeps word `up`."""
    give = Int32(select_(is_upper, words[low], words[up]))
    got = cute.arch.shuffle_sync_bfly(give, offset=distance)
    words[low], words[up] = Int32(select_(is_upper, got, words[low])), Int32(select_(is_upper, words[up], got))


class AddedResults(Results):
    """Results that may be added to what is there: old values are fetched into the slots ahead, added to, and sent.

    Tiles of `tile_n` columns, of every group alike, are numbered as `place` has it. walk: offsets (group ends), rows,
    cols (the gradient's), strip, rank (this CTA's place in its cluster).
    """

    cluster: int
    tile_n: int
    corner: Any
    """(tile, piece, thread) -> first row and column of a warp's share of a piece."""

    @cute.jit
    def row_units(self, walk):
        """Row tiles, a cluster's together."""
        return (walk.rows + self.cluster * TILE_M - 1) // (self.cluster * TILE_M)

    @cute.jit
    def tiles_of_group(self, walk):
        """Tiles of one group, a cluster's together."""
        return self.row_units(walk) * ((walk.cols + self.tile_n - 1) // self.tile_n)

    @cute.jit
    def tiles(self, walk):
        """Tiles of all groups, a cluster's together."""
        return self.tiles_of_group(walk) * (walk.offsets.shape[0] - 1)

    @cute.jit
    def place(self, walk, index):
        """The tile with this index: strips of `strip` row units; in a strip column after column, rows fastest."""
        tiles = self.tiles_of_group(walk)
        group = index // tiles
        units = self.row_units(walk)
        local = (index - group * tiles + group * units) % tiles
        strip = local // (walk.strip * (tiles // units))
        local -= strip * walk.strip * (tiles // units)
        height = cutlass.min(units - strip * walk.strip, walk.strip)
        col = local // height
        unit = strip * walk.strip + local - col * height
        return Tile(group, (unit * self.cluster + walk.rank) * TILE_M, col * self.tile_n)

    def lines(self, target: Target, walk, row, thread):
        """Where in the weight the rows lie that a lane stores, of the 64 from `row` on."""
        thread = anew(thread)
        first = row + thread // 32 * 16 + thread % 32 // LANES
        return [self.line(first + step * (32 // LANES), target, walk) for step in range(STEPS)]

    @cute.jit
    def fetch_first(self, slots, target: Target, walk, tile: Tile, thread):
        if const_expr(self.by_tma):
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            cute.arch.sync_warp()
        lines = self.lines(target, walk, tile.row, thread)
        for piece in range_constexpr(self.slots):
            thread = anew(thread)
            self.fetch(slots, lines, target, walk, tile, piece, thread)
            cute.arch.cp_async_commit_group()

    @cute.jit
    def fetch(self, slots, lines, target: Target, walk, tile: Tile, piece: cutlass.Constexpr, thread):
        """Start to copy what the buffer holds at a piece into its slot; every lane what it will store."""
        copy = cute.make_copy_atom(cpasync.CopyG2SOp(cpasync.LoadCacheMode.GLOBAL), self.out, num_bits_per_copy=128)
        slot = slots[None, None, piece % self.slots]
        row, col = self.corner(tile, piece, thread)
        mine = col + thread % LANES * self.vector
        for step in range_constexpr(STEPS):
            place = step * (32 // LANES) + thread % 32 // LANES
            if row + place < walk.rows and mine < walk.cols:
                source = self.vector_of_line(target, walk, tile.group, lines[step], mine)
                cute.copy(copy, source, self.staged_vector(slot, place, thread))

    @cute.jit
    def staged_vector(self, slot, place, thread):
        """The 16 staged bytes that a lane fetches and stores in row `place` of its warp's 16."""
        row = thread // 32 * 16 + place
        return cute.local_tile(slot[row, None], (self.vector,), (thread % LANES,))

    @cute.jit
    def vector_of_line(self, target: Target, walk, group, line, col):
        """16 bytes of row `line` of the group's gradient."""
        base = self.start(target, walk, group)
        return self.vector_at(base + (Int64(line) * walk.cols + col) * self.out_bytes)

    @cute.jit
    def store_rows(self, slot, lines, target: Target, walk, group, row, col, thread):
        """This warp's 16 staged rows leave in whole rows, 16 bytes a lane."""
        mine = col + thread % LANES * self.vector
        for step in range_constexpr(STEPS):
            place = step * (32 // LANES) + thread % 32 // LANES
            if row + place < walk.rows and mine < walk.cols:
                values = cute.make_rmem_tensor((self.vector,), self.out)
                cute.autovec_copy(self.staged_vector(slot, place, thread), values)
                cute.autovec_copy(values, self.vector_of_line(target, walk, group, lines[step], mine))

    @cute.jit
    def add_staged(self, part, slot, thread):
        """Staged rows += a 64-row piece of the accumulator, rounded first. Each warp its own 16 rows only."""
        for pair in range_constexpr(self.staged_cols // 4):
            there = self.staged_pair(slot, pair, thread)
            values = cute.make_rmem_tensor((2,), self.out)
            cute.autovec_copy(there, values)
            mine = cute.make_tensor(part.iterator + 2 * pair, cute.make_layout((2,)))
            total = values.load().to(Float32) + mine.load().to(self.out).to(Float32)
            values.store(total.to(self.out))
            cute.autovec_copy(values, there)
