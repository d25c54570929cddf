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
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int16, Int32, Int64, const_expr, range_constexpr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor
from cutlass.tensor_utils import LayoutEnum

from cute_kernels.hopper import tickets
from cute_kernels.hopper.grouped_wgrad_configs import SLOT_ROW_BYTES
from cute_kernels.hopper.wgrad_operands import (
    BOX,
    CONSUMER_REGISTERS,
    FAR_UNITS,
    PRODUCER_REGISTERS,
    THREADS,
    TILE_K,
    TILE_M,
    TILE_N,
    TURN,
    TURN_THREADS,
    TYPES,
    UNITS,
    VECTOR_BYTES,
    WARPS,
    Product,
    Target,
    anew,
    ragged,
    tokens_of,
)

WIDTHS = (192, 128, 64)  # at which a tile is multiplied
LANES = SLOT_ROW_BYTES // VECTOR_BYTES  # that copy a row together
STEPS = 16 * LANES // 32  # in which a warp copies 16 rows


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


class Tile(NamedTuple):
    """A tile of one group's gradient, by its first row and column."""

    group: Any
    row: Any
    col: Any


class GroupedWgradAddSm90:
    """Static facts -> the kernel; see the module's text."""

    def __init__(self, options):
        config = options.config
        self.cluster, self.stages, self.slots = config.cluster, config.stages, config.slots
        self.by_tma = config.by_tma
        self.boxes = TILE_N // BOX
        self.box_k = TILE_K // self.cluster
        self.element = TYPES[options.element]
        self.out = TYPES[options.out]
        self.dynamic = options.dynamic
        self.interleaved = options.interleaved
        self.separate = options.separate
        self.out_bytes = self.out.width // 8
        self.staged_cols = SLOT_ROW_BYTES // self.out_bytes
        self.pieces = TILE_M // 64 * TILE_N // self.staged_cols
        self.vector = VECTOR_BYTES // self.out_bytes

    @cute.jit
    def __call__(
        self,
        dy: cute.Tensor,
        x: cute.Tensor,
        offsets: cute.Tensor,
        out: tuple,
        counter: cute.Tensor | None,
        block: Int32,
        strip: Int32,
        grid: Int32,
        stream,
    ):
        tile = (TILE_M, TILE_N, TILE_K)
        a_layout = sm90.make_smem_layout_a(LayoutEnum.COL_MAJOR, tile, self.element, self.stages)
        b_layout = sm90.make_smem_layout_b(LayoutEnum.COL_MAJOR, tile, self.element, self.stages)
        columns = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.MN_SW128, self.element)
        boxes = self.stages * self.boxes * self.cluster
        box_layout = cute.tile_to_shape(columns, (BOX, self.box_k, boxes), (0, 1, 2))
        load = cpasync.CopyBulkTensorTileG2SOp()
        shared = cpasync.CopyBulkTensorTileG2SMulticastOp() if const_expr(self.cluster > 1) else load
        a_one, b_one = cute.slice_(a_layout, (None, None, 0)), cute.slice_(box_layout, (None, None, 0))
        a_atom, a_tma = cpasync.make_tiled_tma_atom(load, ragged(dy), a_one, (TILE_M, TILE_K))
        b_atom, b_tma = cpasync.make_tiled_tma_atom(shared, ragged(x), b_one, (BOX, self.box_k))
        lines = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.out)
        staged_layout = cute.tile_to_shape(lines, (64, self.staged_cols, 2 * self.slots), (0, 1, 2))
        sink = (None, None)
        if const_expr(self.by_tma):
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
        self.kernel(a_atom, a_tma, b_atom, b_tma, offsets, out, *sink, counter, block, strip, *layouts).launch(
            grid=[grid, 1, 1],
            block=[THREADS, 1, 1],
            cluster=[self.cluster, 1, 1] if const_expr(self.cluster > 1) else None,
            min_blocks_per_mp=1,
            stream=stream,
        )

    def make_sink(self, out, lines):
        """(TMA atom, coordinates) that store boxes of 16 staged rows, clipped at N and K.

        Coordinates: row, column, then the group; or, of separate tensors, two of the distance to the lowest.
        """
        rows, cols = out.shape[-2], out.shape[-1]
        step = VECTOR_BYTES // self.out_bytes
        shape: tuple[Any, ...] = (rows, cols, UNITS, FAR_UNITS)
        stride: tuple[Any, ...] = (Int64(cols), 1, step, UNITS * step)
        if const_expr(not self.separate):
            shape, stride = (rows, cols, out.shape[0]), (Int64(cols), 1, Int64(rows) * cols)
        box = (16, self.staged_cols)
        staged = cute.tile_to_shape(lines, box, (0, 1))
        view = cute.make_tensor(out.iterator, cute.make_layout(shape, stride=stride))
        return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), view, staged, box)

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
        ring = pipeline.PipelineTmaAsync.create(
            num_stages=self.stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, WARPS * self.cluster),
            tx_count=(TILE_M + TILE_N) * TILE_K * self.element.width // 8,
            barrier_storage=storage.barriers.data_ptr(),
            cta_layout_vmnk=cute.make_layout((1, self.cluster, 1, 1)),
        )
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
            self.consume(a, b, ring, staged, target, walk, turn, thread % 128)

    @cute.jit
    def row_units(self, walk: Walk):
        """Row tiles, a cluster's together."""
        return (walk.rows + self.cluster * TILE_M - 1) // (self.cluster * TILE_M)

    @cute.jit
    def tiles_of_group(self, walk: Walk):
        """Tiles of one group, a cluster's together."""
        return self.row_units(walk) * ((walk.cols + TILE_N - 1) // TILE_N)

    @cute.jit
    def tiles(self, walk: Walk):
        """Tiles of all groups, a cluster's together."""
        return self.tiles_of_group(walk) * (walk.offsets.shape[0] - 1)

    @cute.jit
    def place(self, walk: Walk, index):
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
        return Tile(group, (unit * self.cluster + walk.rank) * TILE_M, col * TILE_N)

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
    def consume(self, a, b, ring, staged, target: Target, walk: Walk, turn, thread):
        """Warpgroup `turn` of two: every second tile of this CTA."""
        acc = cute.make_rmem_tensor((TILE_M * TILE_N // 128,), Float32)
        products = [self.product(width, a, b, acc) for width in WIDTHS]
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
                    self.finish(acc, slots, target, walk, tile, thread)
            else:
                state.advance(blocks)
            entry += 1
            index = self.number(walk, entry)
        if const_expr(self.by_tma):
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    def product(self, width: int, a, b, acc):
        """What multiplies the first `width` columns of a tile: operation, fragments, its part of the sums."""
        mn = OperandMajorMode.MN
        mma = sm90.make_trivial_tiled_mma(self.element, self.element, mn, mn, Float32, (1, 1, 1), (64, width))
        mine = mma.get_slice(0)
        part = cute.local_tile(b, (width, TILE_K, self.stages), (0, 0, 0))
        halves = TILE_M // 64
        shape, stride = ((2, 2, width // 8), halves, 1), ((1, 2, 4), cute.size(acc) // halves, 0)
        return Product(
            mma.op,
            mma.make_fragment_A(mine.partition_A(a)),
            mma.make_fragment_B(mine.partition_B(part)),
            cute.make_tensor(acc.iterator, cute.make_layout(shape, stride=stride)),
        )

    @cute.jit
    def multiply(self, ring, state, product, blocks, following):
        """The sum over all k blocks. The turn passes on while the last group of WGMMA is still in flight."""
        last = state.clone()
        for k in cutlass.range(blocks, unroll=1):
            ring.consumer_wait(state)
            atom = cute.make_mma_atom(product.op)
            atom.set(warpgroup.Field.ACCUMULATE, k > 0)
            warpgroup.fence()
            for step in range_constexpr(TILE_K // 16):
                at = (None, None, step, state.index)
                cute.gemm(atom, product.acc, product.a[at], product.b[at], product.acc)
                atom.set(warpgroup.Field.ACCUMULATE, True)
            warpgroup.commit_group()
            warpgroup.wait_group(1)
            if k > 0:
                ring.consumer_release(last)
                last.advance()
            state.advance()
        cute.arch.barrier_arrive(barrier_id=following, number_of_threads=TURN_THREADS)
        warpgroup.wait_group(0)
        if blocks > 0:
            ring.consumer_release(last)
        return state

    @cute.jit
    def finish(self, acc, slots, target: Target, walk: Walk, tile: Tile, thread):
        """Round, stage and send a warpgroup's tile; every warp by itself, 16 rows of some columns at a time."""
        values = 64 * self.staged_cols // 128
        lag, wide = 1 if self.by_tma else 0, self.pieces // 2
        lines = self.lines(target, walk, tile, 0, thread)
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
                    self.send(slot, target, walk, tile.group, row, col, thread)
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
                        following = self.lines(target, walk, tile, 1, thread)
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

    @cute.jit
    def fetch_first(self, slots, target: Target, walk: Walk, tile: Tile, thread):
        if const_expr(self.by_tma):
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            cute.arch.sync_warp()
        lines = self.lines(target, walk, tile, 0, thread)
        for piece in range_constexpr(self.slots):
            thread = anew(thread)
            self.fetch(slots, lines, target, walk, tile, piece, thread)
            cute.arch.cp_async_commit_group()

    @cute.jit
    def fetch(self, slots, lines, target: Target, walk: Walk, tile: Tile, piece: cutlass.Constexpr, thread):
        """Start to copy what the buffer holds at a piece into its slot; every lane what it will store."""
        copy = cute.make_copy_atom(cpasync.CopyG2SOp(cpasync.LoadCacheMode.GLOBAL), self.out, num_bits_per_copy=128)
        slot = slots[None, None, piece % self.slots]
        row, col = self.corner(tile, piece, thread)
        mine = col + thread % LANES * self.vector
        for step in range_constexpr(STEPS):
            place = step * (32 // LANES) + thread % 32 // LANES
            if row + place < walk.rows and mine < walk.cols:
                source = self.vector_at(target, walk, tile.group, lines[step], mine)
                cute.copy(copy, source, self.staged_vector(slot, place, thread))

    @cute.jit
    def staged_vector(self, slot, place, thread):
        """The 16 staged bytes that a lane fetches and stores in row `place` of its warp's 16."""
        row = thread // 32 * 16 + place
        return cute.local_tile(slot[row, None], (self.vector,), (thread % LANES,))

    @cute.jit
    def vector_at(self, target: Target, walk: Walk, group, line, col):
        """16 bytes of row `line` of the group's gradient."""
        if const_expr(self.separate):
            base = target.out[1][group]
        else:
            base = target.out[0].iterator.toint() + Int64(group) * (Int64(walk.rows) * walk.cols * self.out_bytes)
        address = base + (Int64(line) * walk.cols + col) * self.out_bytes
        pointer = cute.make_ptr(self.out, address, cute.AddressSpace.gmem, assumed_align=VECTOR_BYTES)
        return cute.make_tensor(pointer, cute.make_layout((self.vector,)))

    def lines(self, target: Target, walk: Walk, tile: Tile, half: int, thread):
        """Where in the weight the rows lie that a lane stores: of the upper or the lower 64 of a tile."""
        thread = anew(thread)
        first = tile.row + half * 64 + thread // 32 * 16 + thread % 32 // LANES
        return [self.line(first + step * (32 // LANES), target, walk) for step in range(STEPS)]

    @cute.jit
    def line(self, row, target: Target, walk: Walk):
        if const_expr(self.interleaved):
            half = walk.rows // 2
            up = row // half
            in_half = row - up * half
            row = (in_half // target.block) * (2 * target.block) + up * target.block + in_half % target.block
        return row

    @cute.jit
    def send(self, slot, target: Target, walk: Walk, group, row, col, thread):
        """This warp's 16 staged rows leave by TMA."""
        box = (16, self.staged_cols)
        if const_expr(self.separate):
            units = (target.out[1][group] - target.out[0].iterator.toint()) // VECTOR_BYTES
            whole = target.tensor[None, None, Int32(units % UNITS), Int32(units // UNITS)]
        else:
            whole = target.tensor[None, None, group]
        there = cute.local_tile(cute.domain_offset((self.line(row, target, walk), col), whole), box, (0, 0))
        source = cute.local_tile(slot, box, (cute.arch.make_warp_uniform(thread // 32), 0))
        source, there = cpasync.tma_partition(
            target.atom, 0, cute.make_layout(1), cute.group_modes(source, 0, 2), cute.group_modes(there, 0, 2)
        )
        cute.copy(target.atom, source, there)

    @cute.jit
    def store_rows(self, slot, lines, target: Target, walk: Walk, group, row, col, thread):
        """This warp's 16 staged rows leave in whole rows, 16 bytes a lane."""
        mine = col + thread % LANES * self.vector
        for step in range_constexpr(STEPS):
            place = step * (32 // LANES) + thread % 32 // LANES
            if row + place < walk.rows and mine < walk.cols:
                values = cute.make_rmem_tensor((self.vector,), self.out)
                cute.autovec_copy(self.staged_vector(slot, place, thread), values)
                cute.autovec_copy(values, self.vector_at(target, walk, group, lines[step], mine))

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

    @cute.jit
    def staged_pair(self, slot, pair: cutlass.Constexpr, thread):
        """Where elements 2 pair, 2 pair + 1 of a thread's share of a piece are staged."""
        row = thread // 32 * 16 + thread % 32 // 4 + 8 * (pair % 2)
        return cute.local_tile(slot[row, None], (2,), (4 * (pair // 2) + thread % 4,))


def build(options):
    """(jit function, fake arguments): dy, x, offsets, (out,) or (lowest, addresses), counter or None, interleave block,
    strip, grid size, stream. options: `grouped_wgrad.WgradOptions`.
    """
    tokens, rows, cols, groups = (
        cute.sym_int(),
        cute.sym_int(divisibility=8),
        cute.sym_int(divisibility=8),
        cute.sym_int(),
    )
    element = TYPES[options.element]

    def operand(width):
        return make_fake_tensor(element, (tokens, width), (cute.sym_int64(divisibility=8), 1), assumed_align=16)

    offsets = make_fake_compact_tensor(Int32, (cute.sym_int(),), assumed_align=4)
    shape = (rows, cols) if options.separate else (groups, rows, cols)
    order = tuple(reversed(range(len(shape))))
    out: tuple[Any, ...] = (make_fake_compact_tensor(TYPES[options.out], shape, stride_order=order, assumed_align=16),)
    if options.separate:
        out += (make_fake_compact_tensor(Int64, (groups,), assumed_align=8),)
    return GroupedWgradAddSm90(options), (
        operand(rows),
        operand(cols),
        offsets,
        out,
        make_fake_compact_tensor(Int32, (cute.sym_int(),), assumed_align=4) if options.dynamic else None,
        Int32(1),
        Int32(1),
        Int32(1),
        make_fake_stream(),
    )
