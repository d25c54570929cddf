"""dW_g = dy_gᵀ x_g for every group g: the weight gradient of a grouped linear on SM90, written over what was there.

Shapes: dy [T, N], x [T, K] bf16 or fp16, rows contiguous (any row stride that is a multiple of 8 elements); offsets
[G+1] int32; out [G, N, K] contiguous bf16, fp16 or fp32, or the lowest of G separate [N, K] tensors and an int64 table
of their addresses. N and K are multiples of 8. Rows outside a group never reach its sums, whatever they hold. An empty
group gives exact zeros. With `interleaved`, dy's columns lie as [gate | up] and the row of a gradient goes to blocks of
`block` gate rows, then `block` up rows. Ragged loads and separate outputs: see `wgrad_operands`.

Numerics: FP32 sums, rounded once to out's type. Each element is written once per launch, so results are the same bits
run after run. Equals `reference.grouped_wgrad`.

Roles, 384 threads: warps 0 to 3 and 4 to 7 are two warpgroups that each multiply and store whole tiles of 128 x 192, in
turn. The third gives registers away: warp 8 issues TMA loads, warp 9 plans tiles (`wgrad_tiles`), warps 10 and 11 zero
the gradients of empty groups.
Pipelines: operand ring, warp 8 -> 4 consumer warps (of the warpgroup whose tile it is; in a cluster of 2, also of the
same warpgroup of the other CTA, since half of x's tile comes from there). Plans, warp 9 -> the 8 consumer warps and
warp 8. Turns: two named barriers of 256 threads. Staging: each warp has 16 rows of its warpgroup's slots to itself.
Schedule: persistent; cluster c takes tiles c, c + clusters, ..., or, dynamic, whichever is next when it asks (see
`tickets`); its warpgroups take them alternately, and each steps the ring over the other's k blocks. Columns and rows of
zeros are multiplied at a width of 128 or 64, or a height of 64.
Timeline of a warpgroup: wait for the turn; per k block wait for the stage, 8 WGMMA, release the stage before; pass the
turn on while the last WGMMA still run; then, while the other warpgroup multiplies, round the sums and store them: by
TMA, 16 rows by 128 bytes a warp at a time, or from registers. The producer fills the ring for the next tiles meanwhile.

Measured on one H200 (2026-11-30, BF16 operands, L2 flushed, 21 rounds of variants in turn; milliseconds). (G, T, N, K):
    A (8, 32768, 4096, 7168)    B (32, 32768, 5760, 2880)    C (128, 65536, 1536, 2048)
    D (8, 32768, 7168, 2048)    E (32, 32768, 2880, 2880)    F (128, 65536, 2048, 768)
                                A      B      C      D      E      F
    BF16 out, by TMA            2.741  1.542  0.590  1.409  0.739  0.320
    from registers              2.751  1.558  0.606  1.414  0.745  0.324
    by TMA, dynamic             2.721  1.530  0.592  1.369  0.732  0.313
    QuACK 0.6.5, untuned        2.745  1.579  0.606  1.424  0.778  0.325
    before plans (a)            2.746  1.569  0.614  1.410  0.760  0.329
(a) each warp worked out its tiles by itself, 1300 cycles between tiles; an odd last row tile forbade pairs.
One group with rows of 64, (N, K) = (4096, 7168), 256 rows: 0.890 ms, 4.2 TB/s of zeros; bulk copies from shared memory
reached 2.65 TB/s (and delay loads), the tensor's own `zero_` 3.4. 65536 rows: 6.13 ms, unpaced 6.61.
Where the time goes (A, B, C, F): tensor cores busy 98.6, 99.1, 88.9, 89.0 % of it; the clock is 1.25 to 1.5 GHz.
Slower: both warpgroups on one 128 x 256 tile, its epilogue exposed (3 to 23 %); row tiles fastest without strips (D: 2
%); two or three staging slots and 4 stages (C: 5 %), three of half the size and 5 stages (C: 1.6 %); stores that L2 is
to evict first (D: 1 %; few rows a group: 8 % faster, as from registers).
"""

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
from cute_kernels.hopper.wgrad_results import Target
from cute_kernels.hopper.wgrad_tiles import DEPTH, FIELDS, Form, Plans, Walk, make_plans, read, write_plans

SHAPES = ((128, 192), (128, 128), (128, 64), (64, 192))  # rows and columns of a tile that are multiplied
ZERO_PACE = 2  # see `zero_empty`


class GroupedWgradSm90(TurnProducts):
    """Static facts -> the kernel; see the module's text."""

    may_be_empty = False

    def __init__(self, options):
        super().__init__(options)
        self.form = Form(TILE_M, TILE_N, TILE_K, self.cluster)

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
            staged: cute.struct.Align[
                cute.struct.MemRange[self.out, cute.cosize(staged_layout) if self.by_tma else 8], 1024
            ]
            barriers: cute.struct.MemRange[Int64, 2 * self.stages]
            plans: cute.struct.MemRange[Int64, 2 * DEPTH + 1]
            records: cute.struct.Align[cute.struct.MemRange[Int32, DEPTH * FIELDS], 16]
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
            numbers = storage.numbers.get_tensor(cute.make_layout(tickets.DEPTH))
            taken = tickets.make(counter, storage.tickets.data_ptr(), numbers, max(1, self.cluster - 1))
        records = storage.records.get_tensor(cute.make_layout((FIELDS, DEPTH)))
        plans = make_plans(storage.plans.data_ptr(), records, 2 * WARPS + 1)
        ring = self.make_ring(storage.barriers.data_ptr())
        first, step, rank = cta // self.cluster, ctas // self.cluster, cta % self.cluster
        walk = Walk(offsets, offsets.shape[0] - 1, a_tma.shape[0], b_tma.shape[0], strip, first, step, rank)
        target = Target(out, out_atom, out_tma, block)
        if warp_index >= 2 * WARPS:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp_index == 2 * WARPS:
                self.produce(a_atom, a_tma, b_atom, b_tma, a, boxes, ring, plans, walk)
            elif warp_index == 2 * WARPS + 1:
                write_plans(plans, taken, walk, self.form)
            else:
                self.zero_empty(target, walk, cta, ctas, thread - 32 * (2 * WARPS + 2), ZERO_PACE)
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            turn = cute.arch.make_warp_uniform(thread // 128)
            self.consume(a, b, ring, plans, staged, target, amaxes, walk, turn, thread % 128)

    @cute.jit
    def produce(self, a_atom, a_tma, b_atom, b_tma, a, boxes, ring, plans: Plans, walk: Walk):
        """One warp: dy's tile, and of x's tile the share of this CTA, for every k block of every tile."""
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)
        alone, entry, lane = cute.make_layout(1), Int32(0), cute.arch.lane_idx()
        group, row, col, blocks, first, count, lone = read(plans, entry, FIELDS)
        while group >= 0:
            a_all = cute.domain_offset((row, 0), tokens_of(a_tma, first, count))
            b_all = cute.domain_offset((col, 0), tokens_of(b_tma, first, count))
            a_tile = cute.local_tile(a_all, (TILE_M, TILE_K), (0, None))
            b_tile = cute.local_tile(b_all, (BOX, self.box_k), (None, None))
            a_to, a_from = cpasync.tma_partition(
                a_atom, 0, alone, cute.group_modes(a, 0, 2), cute.group_modes(a_tile, 0, 2)
            )
            b_to, b_from = cpasync.tma_partition(
                b_atom, 0, alone, cute.group_modes(boxes, 0, 2), cute.group_modes(b_tile, 0, 2)
            )
            for k in cutlass.range(blocks, unroll=1):
                if const_expr(self.dynamic):  # noqa: SIM102 (traced, then run)
                    if k == cutlass.max(blocks - tickets.AHEAD, 0) and lane == 0 and walk.rank == 0:
                        cute.arch.mbarrier_arrive(plans.wanted)
                ring.producer_acquire(state)
                full = ring.producer_get_barrier(state)
                cute.copy(a_atom, a_from[None, k], a_to[None, state.index], tma_bar_ptr=full)
                if const_expr(self.cluster > 1):
                    readers = Int16(2**self.cluster - 1)
                    if lone != 0:
                        readers = Int16(1) << Int16(walk.rank)
                    self.load_x(b_atom, b_from, b_to, k, state.index, walk.rank, full, mcast_mask=readers)
                    if lone != 0:
                        self.load_x(b_atom, b_from, b_to, k, state.index, 1 - walk.rank, full, mcast_mask=readers)
                else:
                    self.load_x(b_atom, b_from, b_to, k, state.index, 0, full)
                state.advance()
            entry += 1
            group, row, col, blocks, first, count, lone = read(plans, entry, FIELDS)
        ring.producer_tail(state)

    def load_x(self, atom, source, target, k, stage, part, full, **multicast):
        """Part `part` of a k block's tokens of x, for all columns of a tile."""
        for box in range(self.boxes):
            to = (stage * self.boxes + box) * self.cluster + part
            cute.copy(atom, source[None, box, k * self.cluster + part], target[None, to], tma_bar_ptr=full, **multicast)

    @cute.jit
    def consume(self, a, b, ring, plans: Plans, staged, target: Target, amaxes, walk: Walk, turn, thread):
        """Warpgroup `turn` of two: every second tile of this CTA."""
        acc = cute.make_rmem_tensor((TILE_M * TILE_N // 128,), Float32)
        products = [self.product(*shape, a, b, acc) for shape in SHAPES]
        slots = None
        if const_expr(self.by_tma):
            slots = cute.local_tile(staged, (64, self.staged_cols, self.slots), (0, 0, turn))
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        entry = Int32(0)
        group, row, col, blocks = read(plans, entry, 4)
        if turn == 1:
            cute.arch.barrier_arrive(barrier_id=TURN, number_of_threads=TURN_THREADS)
        while group >= 0:
            if entry & 1 == turn:
                lines = None
                if const_expr(self.interleaved):  # divisions, while the other warpgroup multiplies
                    lines = [self.lines(target, walk, row, half, thread) for half in range(2)]
                cute.arch.barrier(barrier_id=TURN + turn, number_of_threads=TURN_THREADS)
                following = TURN + 1 - turn
                if walk.cols - col <= 64:
                    state = self.multiply(ring, state, products[2], blocks, following)
                elif walk.cols - col <= 128:
                    state = self.multiply(ring, state, products[1], blocks, following)
                elif walk.rows - row <= 64:
                    state = self.multiply(ring, state, products[3], blocks, following)
                else:
                    state = self.multiply(ring, state, products[0], blocks, following)
                sums = acc if amaxes is None else scaled(acc, amaxes, group)
                if const_expr(self.by_tma):
                    self.send_tile(sums, slots, lines, target, walk, group, row, col, thread)
                else:
                    self.store_tile(sums, lines, target, walk, group, row, col, thread)
            else:
                state.advance(blocks)
            entry += 1
            group, row, col, blocks = read(plans, entry, 4)
        if entry & 1 == turn:  # a turn that came and that nothing is left for
            cute.arch.barrier(barrier_id=TURN + turn, number_of_threads=TURN_THREADS)
        if const_expr(self.by_tma):
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    def lines(self, target: Target, walk: Walk, row, half: int, thread):
        """Where in the weight rows of the upper or the lower 64 of a tile lie: the first of the 16 that a warp sends,
        or the two that hold sums of this lane."""
        mine, apart = (0, (0,)) if const_expr(self.by_tma) else ((thread & 31) >> 2, (0, 8))
        first = row + half * 64 + cute.arch.make_warp_uniform(thread >> 5) * 16 + mine
        return [self.line(first + more, target, walk) for more in apart]

    def store_tile(self, acc, lines, target: Target, walk: Walk, group, row, col, thread):
        """Round a warpgroup's tile and store it, 16 bytes a lane, as `vector_of` forms them; in batches that grow as
        sums are done with and leave registers for addresses."""
        ahead = 1
        for half in range(2):
            thread = anew(thread)
            at = lines[half] if const_expr(self.interleaved) else self.lines(target, walk, row, half, thread)
            mine = col + self.column_of_lane(thread)
            first = row + half * 64 + (thread >> 5) * 16 + ((thread & 31) >> 2)
            start = self.start(target, walk, group) + Int64(mine) * self.out_bytes
            rows = [start + line * (Int64(walk.cols) * self.out_bytes) for line in at]
            inside = [first < walk.rows, first + 8 < walk.rows]
            places = [(i, chunk) for chunk in range(TILE_N // self.span) for i in range(2)]
            while places:
                batch, places = places[:ahead], places[ahead:]
                ahead = min(ahead + 1, 8)
                there = [self.vector_at(rows[i] + chunk * self.span * self.out_bytes) for i, chunk in batch]
                valid = [inside[i] & (mine + chunk * self.span < walk.cols) for i, chunk in batch]
                for (i, chunk), v, t in zip(batch, valid, there, strict=True):
                    self.write_if(v, self.vector_of(acc, 2 * half + i, chunk, thread), t)

    @cute.jit
    def send_tile(self, acc, slots, lines, target: Target, walk: Walk, group, row, col, thread):
        """Round, stage and send a warpgroup's tile; every warp by itself, 16 rows of some columns at a time."""
        values, wide = 64 * self.staged_cols // 128, self.pieces // 2
        first = row + cute.arch.make_warp_uniform(thread // 32) * 16
        for piece in range_constexpr(self.pieces):
            slot = slots[None, None, piece % self.slots]
            part = cute.make_tensor(acc.iterator + piece * values, cute.make_layout(((2, 2, values // 4), 1, 1)))
            at = col + piece % wide * self.staged_cols
            cute.arch.cp_async_bulk_wait_group(self.slots - 1, read=True)
            cute.arch.sync_warp()
            if first + piece // wide * 64 < walk.rows and at < walk.cols:
                self.stage(part, slot, thread)
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.sync_warp()
                half = const_expr(piece // wide)
                line = lines[half][0] if const_expr(self.interleaved) else first + half * 64
                self.send(slot, target, self.coordinates(target, group), line, at, thread)
            cute.arch.cp_async_bulk_commit_group()


def build(options):
    """(jit function, fake arguments); options: `grouped_wgrad.WgradOptions`."""
    return GroupedWgradSm90(options), fake_arguments(options)
