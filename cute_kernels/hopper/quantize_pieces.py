"""Rows of groups in pieces on SM90: where a piece lies, and how the next is on its way while a warp quantises one.

A piece is a block of rows of one group x 128 columns, numbered columns first. Those of a CTA are neighbours, as many as
of any other (or one more), and its warps take them in turn; or, `scattered`, all warps of all CTAs take all of them in
turn, neighbouring CTAs neighbouring pieces: what is faster (docs/performance.md). Each warp has places in shared memory
of its own: it asks for a piece by TMA (`wgrad_operands.ragged`: rows past the group's end, and columns past the
matrix's, arrive as zeros), notes where it lies, and asks for another once a place is free. A barrier for each place,
nothing that two warps share.

A warp's next piece is often of another group. So each lane knows one of 32 groups that follow each other, and the warp
asks global memory again where these end, not for each piece: that and four divisions for NVFP4's factors were a fifth
of the instructions of a piece.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, Int64, Uint32, const_expr, range_constexpr
from cutlass.cute.nvgpu import cpasync

from cute_kernels.hopper.epilogues.eights import load_shared, store_shared
from cute_kernels.hopper.wgrad_operands import ragged, tokens_of

COLUMNS = 4
"""Of a thread, if it takes all rows."""
SPAN = 32 * COLUMNS


class Piece(NamedTuple):
    """Where a piece lies, or a thread's part of it: the first row and how many the group has from there; the row in the
    padded matrix; the first column.
    """

    row: Any
    left: Any
    padded: Any
    column: Any


class Way(NamedTuple):
    """A warp's pieces: number of the first, where they end, from one to the next; the last in blocks of rows and spans
    of columns, of which the matrix has so many.
    """

    first: Any
    end: Any
    step: Any
    blocks: Any
    spans: Any
    across: Any


class Groups(NamedTuple):
    """32 groups, of which each lane of a warp knows one. first: the number of lane 0's. shift: how far the lane's
    group's rows lie from its padded rows. last, stop: where both end; beyond the last group, where that ends.
    """

    first: Any
    shift: Any
    last: Any
    stop: Any


NO_GROUPS = -1, 0, 0, 0
"""`Groups` before any is known: all are passed."""


class Next(NamedTuple):
    """The piece to ask for: its block of rows, its span of columns; groups that it may be of."""

    block: Any
    span: Any
    groups: Groups


def address(matrix: cute.Tensor, row, column):
    """(address of matrix[row, column], bytes from row to row); rows are contiguous."""
    size = matrix.element_type.width // 8
    step = Int64(matrix.stride[0]) * size
    return matrix.iterator.toint() + Int64(row) * step + Int64(column) * size, step


@cute.jit
def find(padded: cute.Tensor, row):
    """The group whose padded rows `row` lies among; 32 places are looked at together, by a whole warp."""
    lane = cute.arch.lane_idx()
    groups = padded.shape[0] - 1
    low, span = Int32(0), Int32(groups)
    while span > 1:
        step = (span + 31) // 32
        beyond = padded[cutlass.min(low + (lane + 1) * step, groups)] > row
        low += cute.arch.popc(~cute.arch.vote_ballot_sync(beyond)) * step
        span = step
    return low


@cute.jit
def among(groups: Groups, top, offsets: cute.Tensor, padded: cute.Tensor):
    """(groups that a padded row is among, others if it is beyond these; the lane that knows its group)."""
    lane, passed = cute.arch.lane_idx(), cute.arch.popc(cute.arch.vote_ballot_sync(groups.stop <= top))
    if passed == 32:
        passed, first = Int32(0), find(padded, top)
        low, high = (cutlass.min(first + lane + more, padded.shape[0] - 1) for more in (0, 1))
        groups = Groups(first, offsets[low] - padded[low], offsets[high], padded[high])
    return groups, passed


def part_of(groups: Groups, knows, top, rows: int):
    """(the row of the matrix, how many of `rows` rows its group has from there) of a padded row of a lane's group."""
    shift, last = (cute.arch.shuffle_sync(x, offset=knows) for x in (groups.shift, groups.last))
    return top + shift, cutlass.max(cutlass.min(last - top - shift, rows), 0)


class Words:
    """A thread's values of a piece, words [row][pair of columns], read from shared memory whenever asked for."""

    def __init__(self, place, rows: int):
        self.place, self.rows = place, rows

    def __getitem__(self, row):
        if isinstance(row, slice):
            return [self[r] for r in range(*row.indices(self.rows))]
        if row >= self.rows:
            raise IndexError(row)
        return load_shared(self.place, row * 2 * SPAN, COLUMNS // 2)


class Pieces:
    """Of `rows` rows, `stages` places for each of so many warps."""

    def __init__(self, rows: int, warps: int, stages: int, scattered: bool = False, factors: bool = False):
        self.rows, self.warps, self.stages, self.scattered, self.factors = rows, warps, stages, scattered, factors
        self.note_bytes = 32 if factors else 16

    def layout(self):
        """(column, row, place)."""
        count = self.stages * self.warps
        return cute.make_layout((SPAN, self.rows, count), stride=(1, SPAN, SPAN * self.rows))

    def source(self, x: cute.Tensor):
        """(TMA atom, the coordinates it reads) of a matrix."""
        one = cute.slice_(self.layout(), (None, None, 0))
        return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), ragged(x), one, (SPAN, self.rows))

    def target(self, out: cute.Tensor):
        """(TMA atom, the coordinates it writes) of a matrix whose pieces leave from where they were asked for to."""
        one = cute.slice_(self.layout(), (None, None, 0))
        return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), ragged(out), one, (SPAN, self.rows))

    def storage(self, words: int = 0):
        """kept: so many words that a warp may keep, a multiple of four."""
        count, room, lanes = self.stages * self.warps, words * self.warps, 128 * self.warps * self.factors

        @cute.struct
        class Storage:
            filled: cute.struct.MemRange[Int64, count]
            notes: cute.struct.Align[cute.struct.MemRange[Int32, self.note_bytes // 4 * count], 16]
            known: cute.struct.Align[cute.struct.MemRange[Int32, lanes], 16]
            kept: cute.struct.Align[cute.struct.MemRange[Int32, room], 16]
            x: cute.struct.Align[cute.struct.MemRange[BFloat16, count * SPAN * self.rows], 1024]

        return Storage

    @cute.jit
    def start(self, memory, warp, width, padded: cute.Tensor):
        """(a warp's way, the first piece to ask for)."""
        if cute.arch.lane_idx() == 0:
            for stage in range_constexpr(self.stages):
                cute.arch.mbarrier_init(memory.filled.data_ptr() + warp * self.stages + stage, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_warp()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        across = (width + SPAN - 1) // SPAN
        pieces = padded[padded.shape[0] - 1] // self.rows * across
        if const_expr(self.scattered):
            first, end, step = warp * ctas + cta, pieces, ctas * self.warps
        else:
            each = pieces // ctas
            more = pieces - each * ctas
            first = cta * each + cutlass.min(cta, more)
            end = first + each + Int32(cta < more)
            first += warp
            step = Int32(self.warps)
        way = Way(first, end, step, step // across, step % across, across)
        return way, Next(first // across, first % across, Groups(*map(Int32, NO_GROUPS)))

    @cute.jit
    def ask(
        self,
        memory,
        atom,
        tensor,
        slot,
        there: Next,
        way: Way,
        offsets: cute.Tensor,
        padded: cute.Tensor,
        factors_of=None,
    ):
        """A whole warp starts to load the piece `there` to a place that none of it reads any more; the next one.

        factors_of: four words of each group, by its number; those of the piece's are noted with it.
        """
        block, span, before = there
        top, column = block * self.rows, span * SPAN
        groups, knows = among(before, top, offsets, padded)
        row, left = part_of(groups, knows, top, self.rows)
        if const_expr(self.factors):  # noqa: SIM102 (traced, then run)
            if groups.first != before.first:
                cute.arch.sync_warp()  # what was there is noted
                mine = cutlass.min(groups.first + cute.arch.lane_idx(), padded.shape[0] - 2)
                store_shared(self.known(memory, slot) + cute.arch.lane_idx() * 16, 0, factors_of(mine))
                cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            facts = row, (groups.first + knows) * 64 + left, top, column
            store_shared(self.note(memory, slot), 0, [Uint32(x) for x in facts])
            if const_expr(self.factors):
                store_shared(self.note(memory, slot), 16, load_shared(self.known(memory, slot) + knows * 16, 0, 4))
        barrier = memory.filled.data_ptr() + slot
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, 2 * SPAN * self.rows)
        view = cute.domain_offset((column, 0), tokens_of(tensor, row, left))
        x = memory.x.get_tensor(self.layout())
        tile = cute.local_tile(view, (SPAN, self.rows), (0, 0))
        target, origin = cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(x, 0, 2), cute.group_modes(tile, 0, 2)
        )
        cute.copy(atom, origin, target[None, slot], tma_bar_ptr=barrier)
        block, span = block + way.blocks, span + way.spans
        if span >= way.across:
            block, span = block + 1, span - way.across
        return Next(block, span, groups)

    @cute.jit
    def send(self, memory, atom, tensor, slot, piece: Piece):
        """A whole warp has written a piece to a place, which leaves for `piece`, but for rows past the group's end."""
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        view = cute.domain_offset((piece.column, 0), tokens_of(tensor, piece.row, piece.left))
        x = memory.x.get_tensor(self.layout())
        tile = cute.local_tile(view, (SPAN, self.rows), (0, 0))
        origin, target = cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(x, 0, 2), cute.group_modes(tile, 0, 2)
        )
        cute.copy(atom, origin[None, slot], target)

    def known(self, memory, slot):
        """The address of four words of each group that the lanes of a place's warp know."""
        return Int32(memory.known.data_ptr().toint() + slot // self.stages * 512)

    def note(self, memory, slot):
        """The address of what is known of a place's piece; four factors from byte 16 on."""
        return Int32(memory.notes.data_ptr().toint() + slot * self.note_bytes)

    def there(self, memory, slot, phase):
        """A piece once it is there: (where it lies, its group, the address of its values)."""
        cute.arch.mbarrier_wait(memory.filled.data_ptr() + slot, phase)
        cute.arch.sync_warp()
        row, facts, top, column = (Int32(word) for word in load_shared(self.note(memory, slot), 0, 4))
        place = memory.x.data_ptr().toint() + slot * (2 * SPAN * self.rows)
        return Piece(row, facts & 63, top, column), facts >> 6, Int32(place)

    def arrived(self, memory, slot, phase):
        """The same for who takes 4 columns of all rows a thread: (where these lie, its group, their values)."""
        piece, group, place = self.there(memory, slot, phase)
        first = COLUMNS * cute.arch.lane_idx()
        return piece._replace(column=piece.column + first), group, Words(place + 2 * first, self.rows)
