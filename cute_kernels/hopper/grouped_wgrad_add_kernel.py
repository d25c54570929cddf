"""out_g += dy_gᵀ x_g for every group g: the weight gradient of a grouped linear on SM90, added to what is there.

Shapes, roles, turns as in `grouped_wgrad_kernel`, but each role works out its tiles by itself (`place`), pairs are made
of an even number of row tiles only, and an empty group is left alone.

Numerics: FP32 sums, rounded to out's type, added to what is there in FP32, rounded again. Each element is written once
per launch, so results are the same bits run after run. Equals `reference.grouped_wgrad_`.

Timeline of a warpgroup's results: old values are copied into the slots ahead (cp.async; the first before the turn),
added to, and sent from there, 16 rows by 128 bytes a warp at a time.

Measured on one H200 (2026-11-30, added to FP32, L2 flushed, 11 rounds in turn; milliseconds), shapes as there:
                                A      B      C      D      E      F
    added to FP32               2.941  1.881  1.053  1.485  0.962  0.541
    its bytes at 4.1 TB/s       0.638  1.174  0.900  0.376  0.610  0.483
B and E: the epilogue takes 15,000 to 19,000 cycles a tile (four passes over shared memory, 8 bytes each) where products
take 10,750, so it is what is waited for. Slower: old values prefetched to L2 (4 to 11 %); 3 stages and more slots (8 to
15 %); reading, adding and storing from registers (11 to 150 %); reductions in L2 (`red`, TMA reduce-add), which pass no
more than about 1.1 TB/s here (C: 1.43).
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.memory
import cutlass.pipeline as pipeline
from cutlass import Float32, Int16, Int32, Int64, const_expr, range_constexpr
from cutlass.cute.nvgpu import cpasync

from cute_kernels.hopper import tickets
from cute_kernels.hopper.nvfp4_alpha import scaled
from cute_kernels.hopper.wgrad_operands import (
    BOX,
    CONSUMER_REGISTERS,
    PRODUCER_REGISTERS,
    TILE_K,
    TILE_M,
    TILE_N,
    TURN,
    TURN_THREADS,
    WARPS,
    anew,
    tokens_of,
)
from cute_kernels.hopper.wgrad_products import TurnProducts, fake_arguments
from cute_kernels.hopper.wgrad_results import AddedResults, Target, Tile

WIDTHS = (192, 128, 64)  # at which a tile is multiplied


class Walk(NamedTuple):
    """What a role needs to find its tiles: group ends, the gradient's shape, the strip, this cluster, their number,
    this CTA's place in its cluster, and the tickets if dynamic."""

    offsets: Any
    rows: Any
    cols: Any
    strip: Any
    first: Any
    step: Any
    rank: Any
    tickets: Any


class GroupedWgradAddSm90(TurnProducts, AddedResults):
    """Static facts -> the kernel; see the module's text."""

    may_be_empty = True

    @cute.jit
    def __call__(
        self,
        dy: cute.Tensor,
        x: cute.Tensor,
        offsets: cute.Tensor,
        out: tuple,
        counter: cute.Tensor | None,
        amaxes: tuple | None,
        block: Int32,
        strip: Int32,
        grid: Int32,
        stream,
    ):
        atoms, (a_layout, b_layout, box_layout) = self.make_operands(dy, x)
        lines, staged_layout = self.make_staging()
        sink = self.make_sink(out[0], lines)

        @cute.struct
        class Storage:
            a: cute.struct.Align[cute.struct.MemRange[self.element, cute.cosize(a_layout)], 1024]
            b: cute.struct.Align[cute.struct.MemRange[self.element, cute.cosize(b_layout)], 1024]
            staged: cute.struct.Align[cute.struct.MemRange[self.out, cute.cosize(staged_layout)], 1024]
            barriers: cute.struct.MemRange[Int64, 2 * self.stages]
            tickets: cute.struct.MemRange[Int64, 2 * tickets.DEPTH]
            numbers: cute.struct.MemRange[Int32, tickets.DEPTH]

        self.storage = Storage
        layouts = (a_layout, b_layout, box_layout, staged_layout)
        self.start_kernel(
            self.kernel(*atoms, offsets, out, *sink, counter, amaxes, block, strip, *layouts), grid, stream
        )

    @cute.kernel
    def kernel(
        self,
        a_atom: cute.CopyAtom,
        a_tma: cute.Tensor,
        b_atom: cute.CopyAtom,
        b_tma: cute.Tensor,
        offsets: cute.Tensor,
        out: tuple,
        out_atom,
        out_tma,
        counter: cute.Tensor | None,
        amaxes: tuple | None,
        block: Int32,
        strip: Int32,
        a_layout: cute.ComposedLayout,
        b_layout: cute.ComposedLayout,
        box_layout: cute.ComposedLayout,
        staged_layout: cute.ComposedLayout,
    ):
        thread, _, _ = cute.arch.thread_idx()
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        if warp_index == 0:
            cpasync.prefetch_descriptor(a_atom)
            cpasync.prefetch_descriptor(b_atom)
        storage = cutlass.memory.SmemAllocator().allocate(self.storage)
        a = storage.a.get_tensor(a_layout.outer, swizzle=a_layout.inner)
        b = storage.b.get_tensor(b_layout.outer, swizzle=b_layout.inner)
        boxes = storage.b.get_tensor(box_layout.outer, swizzle=box_layout.inner)
        staged = storage.staged.get_tensor(staged_layout.outer, swizzle=staged_layout.inner)
        taken = None
        if const_expr(self.dynamic):
            readers = 2 * WARPS * self.cluster + self.cluster - 1  # the producer warp of the first CTA writes
            numbers = storage.numbers.get_tensor(cute.make_layout(tickets.DEPTH))
            taken = tickets.make(counter, storage.tickets.data_ptr(), numbers, readers)
        ring = self.make_ring(storage.barriers.data_ptr())
        first, step, rank = cta // self.cluster, ctas // self.cluster, cta % self.cluster
        walk = Walk(offsets, a_tma.shape[0], b_tma.shape[0], strip, first, step, rank, taken)
        if warp_index >= 2 * WARPS:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp_index == 2 * WARPS:
                self.produce(a_atom, a_tma, b_atom, b_tma, a, boxes, ring, walk)
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            turn = cute.arch.make_warp_uniform(thread // 128)
            target = Target(out, out_atom, out_tma, block)
            self.consume(a, b, ring, staged, target, amaxes, walk, turn, thread % 128)

    @cute.jit
    def blocks_of(self, walk: Walk, index):
        """K blocks of a tile; an empty group has none, nor is there one past the last tile."""
        blocks = Int32(0)
        if index < self.tiles(walk):
            group = index // self.tiles_of_group(walk)
            blocks = (walk.offsets[group + 1] - walk.offsets[group] + TILE_K - 1) // TILE_K
        return blocks

    def number(self, walk: Walk, entry):
        """The number of this cluster's tile `entry`, for who only reads it; see `tickets`."""
        return tickets.read(walk.tickets, entry, self.cluster) if self.dynamic else walk.first + entry * walk.step

    @cute.jit
    def take(self, walk: Walk):
        """The first CTA of a cluster asks for the next number, which `pass_on` then makes tile `entry`."""
        taken = Int32(0)
        if const_expr(self.dynamic):  # noqa: SIM102 (traced, then run)
            if walk.rank == 0:
                taken = tickets.take(walk.tickets)
        return taken

    @cute.jit
    def pass_on(self, walk: Walk, entry, taken):
        number = taken
        if const_expr(self.dynamic):
            if walk.rank == 0:
                number = tickets.publish(walk.tickets, entry, taken, self.cluster)
            else:
                number = self.number(walk, entry)
        else:
            number = self.number(walk, entry)
        return number

    @cute.jit
    def produce(self, a_atom, a_tma, b_atom, b_tma, a, boxes, ring, walk: Walk):
        """One warp: dy's tile, and of x's tile the share of this CTA, for every k block of every tile."""
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)
        alone = cute.make_layout(1)
        tiles, entry = self.tiles(walk), Int32(0)
        index = self.pass_on(walk, entry, self.take(walk))
        while index < tiles:
            tile = self.place(walk, index)
            first = walk.offsets[tile.group]
            count = walk.offsets[tile.group + 1] - first
            a_all = cute.domain_offset((tile.row, 0), tokens_of(a_tma, first, count))
            b_all = cute.domain_offset((tile.col, 0), tokens_of(b_tma, first, count))
            a_tile = cute.local_tile(a_all, (TILE_M, TILE_K), (0, None))
            b_tile = cute.local_tile(b_all, (BOX, self.box_k), (None, None))
            a_to, a_from = cpasync.tma_partition(
                a_atom, 0, alone, cute.group_modes(a, 0, 2), cute.group_modes(a_tile, 0, 2)
            )
            b_to, b_from = cpasync.tma_partition(
                b_atom, 0, alone, cute.group_modes(boxes, 0, 2), cute.group_modes(b_tile, 0, 2)
            )
            blocks, taken = self.blocks_of(walk, index), Int32(0)
            if blocks == 0:
                taken = self.take(walk)
            for k in cutlass.range(blocks, unroll=1):
                if const_expr(self.dynamic):  # noqa: SIM102 (traced, then run)
                    if k == cutlass.max(blocks - tickets.AHEAD, 0):
                        taken = self.take(walk)
                ring.producer_acquire(state)
                full = ring.producer_get_barrier(state)
                cute.copy(a_atom, a_from[None, k], a_to[None, state.index], tma_bar_ptr=full)
                for box in range_constexpr(self.boxes):
                    source = b_from[None, box, k * self.cluster + walk.rank]
                    target = b_to[None, (state.index * self.boxes + box) * self.cluster + walk.rank]
                    if const_expr(self.cluster > 1):
                        cute.copy(b_atom, source, target, tma_bar_ptr=full, mcast_mask=Int16(2**self.cluster - 1))
                    else:
                        cute.copy(b_atom, source, target, tma_bar_ptr=full)
                state.advance()
            entry += 1
            index = self.pass_on(walk, entry, taken)
        if const_expr(self.dynamic):  # noqa: SIM102 (traced, then run)
            if walk.rank == 0:
                tickets.close(walk.tickets, index, tiles, walk.step)
                tickets.drain(walk.tickets, entry)
        ring.producer_tail(state)

    @cute.jit
    def consume(self, a, b, ring, staged, target: Target, amaxes, walk: Walk, turn, thread):
        """Warpgroup `turn` of two: every second tile of this CTA."""
        acc = cute.make_rmem_tensor((TILE_M * TILE_N // 128,), Float32)
        products = [self.product(TILE_M, width, a, b, acc) for width in WIDTHS]
        slots = cute.local_tile(staged, (64, self.staged_cols, self.slots), (0, 0, turn))
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        tiles, entry = self.tiles(walk), Int32(0)
        if turn == 1:
            cute.arch.barrier_arrive(barrier_id=TURN, number_of_threads=TURN_THREADS)
        index = self.number(walk, entry)
        while index < tiles:
            blocks = self.blocks_of(walk, index)
            if entry % 2 == turn:
                tile = self.place(walk, index)
                if blocks > 0:
                    self.fetch_first(slots, target, walk, tile, thread)
                cute.arch.barrier(barrier_id=TURN + turn, number_of_threads=TURN_THREADS)
                left, following = walk.cols - tile.col, TURN + 1 - turn
                if left <= WIDTHS[2]:
                    state = self.multiply(ring, state, products[2], blocks, following)
                elif left <= WIDTHS[1]:
                    state = self.multiply(ring, state, products[1], blocks, following)
                else:
                    state = self.multiply(ring, state, products[0], blocks, following)
                if blocks > 0:
                    sums = acc if amaxes is None else scaled(acc, amaxes, tile.group)
                    self.finish(sums, slots, target, walk, tile, thread)
            else:
                state.advance(blocks)
            entry += 1
            index = self.number(walk, entry)
        if const_expr(self.by_tma):
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def finish(self, acc, slots, target: Target, walk: Walk, tile: Tile, thread):
        """Round, stage and send a warpgroup's tile; every warp by itself, 16 rows of some columns at a time."""
        values = 64 * self.staged_cols // 128
        lag, wide = 1 if self.by_tma else 0, self.pieces // 2
        lines = self.lines(target, walk, tile.row, thread)
        for piece in range_constexpr(self.pieces):
            thread = anew(thread)
            slot = slots[None, None, piece % self.slots]
            part = cute.make_tensor(acc.iterator + piece * values, cute.make_layout(((2, 2, values // 4), 1, 1)))
            row, col = self.corner(tile, piece, thread)
            cute.arch.cp_async_wait_group(self.slots - 1 - lag)
            cute.arch.sync_warp()
            if row < walk.rows and col < walk.cols:
                self.add_staged(part, slot, thread)
                if const_expr(self.by_tma):
                    cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.sync_warp()
                if const_expr(self.by_tma):
                    whole = self.coordinates(target, tile.group)
                    self.send(slot, target, whole, self.line(row, target, walk), col, thread)
                else:
                    self.store_rows(slot, lines, target, walk, tile.group, row, col, thread)
            if const_expr(self.by_tma):
                cute.arch.cp_async_bulk_commit_group()
            again = const_expr(piece - lag + self.slots)
            if const_expr(piece >= lag):
                if const_expr(again < self.pieces):
                    if const_expr(self.by_tma):
                        cute.arch.cp_async_bulk_wait_group(lag, read=True)
                        cute.arch.sync_warp()
                    if const_expr(again == wide):
                        following = self.lines(target, walk, tile.row + 64, thread)
                    self.fetch(slots, following if again >= wide else lines, target, walk, tile, again, thread)
                cute.arch.cp_async_commit_group()
            if const_expr(piece == wide - 1):
                lines = following

    @cute.jit
    def corner(self, tile: Tile, piece: cutlass.Constexpr, thread):
        """First row and column of a warp's share of a piece."""
        wide = self.pieces // 2
        row = tile.row + piece // wide * 64 + cute.arch.make_warp_uniform(thread // 32) * 16
        return row, tile.col + piece % wide * self.staged_cols


def build(options):
    """(jit function, fake arguments); options: `grouped_wgrad.WgradOptions`."""
    return GroupedWgradAddSm90(options), fake_arguments(options)
