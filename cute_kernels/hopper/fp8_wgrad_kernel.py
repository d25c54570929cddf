"""dW_g = dŷ_gᵀ x̂_g for every group g from transposed E4M3 copies: the FP8 weight gradient on SM90.

Shapes: dy [N, P], x [K, P] e4m3, tokens contiguous; their scales [P/128, N or K filled up] fp32; padded [G+1] int32,
multiples of 128: group g has the tokens padded[g] to padded[g+1], zeros among them where it was filled up. out
[G, N, K] contiguous bf16, fp16 or fp32, or the lowest of G separate [N, K] tensors and an int64 table of their
addresses. N and K are multiples of 16. Scales past N or K are not read, nor is anything past padded[G]. An empty group
gives exact zeros, or, when accumulating, is left alone. `interleaved`: as in `grouped_wgrad_kernel`.

Numerics: the tensor cores add up 128 tokens; each such sum is multiplied by the scales of its row and its column and
added in FP32 (one fused multiply-add); the total is rounded once to out's type. Accumulating adds that rounded value to
what is there, in FP32, and rounds again. Each element is written once: the same bits run after run. Equals
`fp8_reference.fp8_grouped_wgrad`, up to the tensor cores' own rounding of sums that need more than some 14 bits.

Roles, 512 threads: warps 0 to 11 are three warpgroups with 64 rows each of every tile of 192 x 128. The fourth gives
registers away: warp 12 issues TMA loads, warp 13 plans tiles (`wgrad_tiles`), warps 14 and 15 zero the gradients of
empty groups.
Pipelines: ring of (dy tile, x tile, their scales), warp 12 -> 12 consumer warps. Plans, warp 13 -> the 12 consumer
warps and warp 12. Staging: each warp has 16 rows of its warpgroup's slots to itself.
Schedule: persistent; CTA c takes tiles c, c + CTAs, ...
Timeline of a block: wait for the stage, 4 WGMMA, release the stage before, wait for the products, promote. Nothing of
a warpgroup's own overlaps: while it promotes or stores, the others' WGMMA fill the tensor cores, in whatever order they
come; one may be some blocks ahead of another, as far as the ring goes.
A stage is released only once the next block's WGMMA are issued, or the tile stored: both use what the promotion read,
so by then its scales have arrived in registers. Released straight after it, the last of them were still on their way
from a busy shared memory when TMA wrote the stage anew: 96 wrong elements in one of 200 runs.
A tile's results leave by TMA, 16 rows by 128 bytes a warp at a time, or from registers, 16 bytes a lane; what they are
added to is read into the registers of the last block's sums.

Measured on one H200 (2026-11-30, BF16 out, L2 flushed, variants in turn; milliseconds), FC1 of A dsv3_ep32,
B gptoss_ep4, C qwen3_30b (docs/performance.md):
                                                                  A      B      C
    this kernel                                                   1.863  1.129  0.481
    the BF16 kernel                                               2.654  1.430  0.587
    exponents of columns packed by a warp, added as integers      1.925  1.183  0.501
    scales of columns packed by a warp in pairs, as BF16          1.973  1.222  0.523
    warpgroups that multiply in turn                              2.159  1.204  0.515
in another run, where the BF16 kernel took                        2.575  1.396  0.577
    no scales of columns: one multiply-add an element             1.456  0.902  0.406
    no promotion at all                                           1.394  0.854  0.395
    nor results                                                   1.340  0.726  0.287
    two warpgroups, 128 x 256, two chunks of columns (before)     2.268  1.527  0.589
in a third run, where this kernel took                        1.949  1.114  0.458
    two warpgroups, each 128 x 96 of 128 x 192, no overlap      1.965  1.168  0.499
    the same, one 64 x 96 promoted beside the other's product   2.147  1.268  0.522
All right ones give the same bits. What scales of columns cost is less their multiplication than to read them: shared
memory returns 32 words a cycle, the same word to several lanes or not, so a pair of scales takes a warp two cycles and
four of them four, and more than half of the cycles are the products'. Packed scales need a quarter or half of them, and
more instructions. Also slower: a cluster of 2 that shares x's tile (by some percent), rows stored from registers in
BF16 (3 to 14 %), old values prefetched to L2 (up to 6 %).
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.memory
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float8E4M3FN, Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream
from cutlass.cutlass_dsl import select_
from cutlass.tensor_utils import LayoutEnum

from cute_kernels.hopper.fp8_scales import BLOCK
from cute_kernels.hopper.fp8_wgrad_configs import TEAMS, TILE_COLUMNS, TILE_ROWS
from cute_kernels.hopper.wgrad_operands import WARPS, anew
from cute_kernels.hopper.wgrad_results import Results, Target, fake_results
from cute_kernels.hopper.wgrad_tiles import (
    DEPTH,
    FIELDS,
    Form,
    Plans,
    Walk,
    make_plans,
    read,
    write_plans,
)

CONSUMERS = TEAMS * WARPS
THREADS = 32 * (CONSUMERS + 4)
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 32, 160
K_STEP = 32  # tokens of one WGMMA
ZERO_PACE = 1  # see `zero_empty`


class Source(NamedTuple):
    """A TMA atom and the coordinates it reads."""

    atom: Any
    tensor: Any


class Product(NamedTuple):
    """A warpgroup's multiplication: WGMMA operation, A and B fragments."""

    op: Any
    a: Any
    b: Any


class Scales(NamedTuple):
    """Scales of a stage's block in shared memory, by (row or column, stage)."""

    rows: Any
    columns: Any


class Fp8WgradSm90(Results):
    """Static facts -> the kernel; see the module's text."""

    teams = TEAMS

    def __init__(self, options):
        super().__init__(options)
        self.element = Float8E4M3FN
        self.accumulate = options.accumulate
        self.form = Form(TILE_ROWS, TILE_COLUMNS, BLOCK, 1)

    @cute.jit
    def __call__(
        self,
        dy: cute.Tensor,
        dy_scale: cute.Tensor,
        x: cute.Tensor,
        x_scale: cute.Tensor,
        padded: cute.Tensor,
        out: tuple,
        block: Int32,
        strip: Int32,
        grid: Int32,
        stream,
    ):
        tile = (TILE_ROWS, TILE_COLUMNS, BLOCK)
        a_layout = sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, tile, self.element, self.stages)
        b_layout = sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, tile, self.element, self.stages)
        load = cpasync.CopyBulkTensorTileG2SOp()
        a_one, b_one = cute.slice_(a_layout, (None, None, 0)), cute.slice_(b_layout, (None, None, 0))
        sources = (
            *cpasync.make_tiled_tma_atom(load, dy, a_one, (TILE_ROWS, BLOCK)),
            *cpasync.make_tiled_tma_atom(load, x, b_one, (TILE_COLUMNS, BLOCK)),
            *self.make_scale_source(load, dy_scale, dy.shape[0], TILE_ROWS),
            *self.make_scale_source(load, x_scale, x.shape[0], TILE_COLUMNS),
        )
        lines, staged_layout = self.make_staging()
        sink = self.make_sink(out[0], lines)

        @cute.struct
        class Storage:
            a: cute.struct.Align[cute.struct.MemRange[self.element, cute.cosize(a_layout)], 1024]
            b: cute.struct.Align[cute.struct.MemRange[self.element, cute.cosize(b_layout)], 1024]
            staged: cute.struct.Align[
                cute.struct.MemRange[self.out, cute.cosize(staged_layout) if self.by_tma else 8], 1024
            ]
            a_scales: cute.struct.Align[cute.struct.MemRange[Float32, TILE_ROWS * self.stages], 128]
            b_scales: cute.struct.Align[cute.struct.MemRange[Float32, TILE_COLUMNS * self.stages], 128]
            barriers: cute.struct.MemRange[Int64, 2 * self.stages]
            plans: cute.struct.MemRange[Int64, 2 * DEPTH + 1]
            records: cute.struct.Align[cute.struct.MemRange[Int32, DEPTH * FIELDS], 16]

        self.Storage = Storage
        layouts = (a_layout, b_layout, staged_layout)
        self.kernel(*sources, padded, out, *sink, block, strip, *layouts).launch(
            grid=[grid, 1, 1],
            block=[THREADS, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
        )

    def make_scale_source(self, load, scale, count, width: int):
        """(TMA atom, coordinates) for the scales of `width` rows of one block; those past `count` are not read."""
        view = cute.make_tensor(scale.iterator, cute.make_layout((count, scale.shape[0]), stride=(1, scale.stride[0])))
        return cpasync.make_tiled_tma_atom(load, view, cute.make_layout((width, 1)), (width, 1))

    @cute.kernel
    def kernel(
        self,
        a_atom: cute.CopyAtom,
        a_tma: cute.Tensor,
        b_atom: cute.CopyAtom,
        b_tma: cute.Tensor,
        as_atom: cute.CopyAtom,
        as_tma: cute.Tensor,
        bs_atom: cute.CopyAtom,
        bs_tma: cute.Tensor,
        padded: cute.Tensor,
        out: tuple,
        out_atom,
        out_tma,
        block: Int32,
        strip: Int32,
        a_layout: cute.ComposedLayout,
        b_layout: cute.ComposedLayout,
        staged_layout: cute.ComposedLayout,
    ):
        thread, _, _ = cute.arch.thread_idx()
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        if warp_index == 0:
            cpasync.prefetch_descriptor(a_atom)
            cpasync.prefetch_descriptor(b_atom)
        storage = cutlass.memory.SmemAllocator().allocate(self.Storage)
        a = storage.a.get_tensor(a_layout.outer, swizzle=a_layout.inner)
        b = storage.b.get_tensor(b_layout.outer, swizzle=b_layout.inner)
        staged = storage.staged.get_tensor(staged_layout.outer, swizzle=staged_layout.inner)
        scales = Scales(
            storage.a_scales.get_tensor(cute.make_layout((TILE_ROWS, 1, self.stages), stride=(1, 0, TILE_ROWS))),
            storage.b_scales.get_tensor(cute.make_layout((TILE_COLUMNS, 1, self.stages), stride=(1, 0, TILE_COLUMNS))),
        )
        records = storage.records.get_tensor(cute.make_layout((FIELDS, DEPTH)))
        plans = make_plans(storage.plans.data_ptr(), records, CONSUMERS + 1)
        ring = pipeline.PipelineTmaAsync.create(
            num_stages=self.stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, CONSUMERS),
            tx_count=(TILE_ROWS + TILE_COLUMNS) * (BLOCK + 4),
            barrier_storage=storage.barriers.data_ptr(),
            cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
        )
        walk = Walk(padded, padded.shape[0] - 1, a_tma.shape[0], b_tma.shape[0], strip, cta, ctas, Int32(0))
        target = Target(out, out_atom, out_tma, block)
        if warp_index >= CONSUMERS:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp_index == CONSUMERS:
                sources = Source(a_atom, a_tma), Source(b_atom, b_tma), Source(as_atom, as_tma), Source(bs_atom, bs_tma)
                self.produce(sources, a, b, scales, ring, plans)
            elif warp_index == CONSUMERS + 1:
                write_plans(plans, None, walk, self.form)
            elif const_expr(not self.accumulate):
                self.zero_empty(target, walk, cta, ctas, thread - 32 * (CONSUMERS + 2), ZERO_PACE)
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            team = cute.arch.make_warp_uniform(thread // 128)
            self.consume(a, b, scales, ring, plans, staged, target, walk, team, thread % 128)

    def partition(self, source: Source, shared, tiles):
        return cpasync.tma_partition(
            source.atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2), cute.group_modes(tiles, 0, 2)
        )

    @cute.jit
    def produce(self, sources, a, b, scales: Scales, ring, plans: Plans):
        """One warp: tiles of dy and x, and their scales, for every block of every tile."""
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)
        a_source, b_source, as_source, bs_source = sources
        entry = Int32(0)
        group, row, col, blocks, token, _, _ = read(plans, entry, FIELDS)
        while group >= 0:
            begin = token // BLOCK
            a_all = cute.domain_offset((row, token), a_source.tensor)
            b_all = cute.domain_offset((col, token), b_source.tensor)
            as_all = cute.domain_offset((row, begin), as_source.tensor)
            bs_all = cute.domain_offset((col, begin), bs_source.tensor)
            a_to, a_from = self.partition(a_source, a, cute.local_tile(a_all, (TILE_ROWS, BLOCK), (0, None)))
            b_to, b_from = self.partition(b_source, b, cute.local_tile(b_all, (TILE_COLUMNS, BLOCK), (0, None)))
            as_to, as_from = self.partition(as_source, scales.rows, cute.local_tile(as_all, (TILE_ROWS, 1), (0, None)))
            bs_to, bs_from = self.partition(
                bs_source, scales.columns, cute.local_tile(bs_all, (TILE_COLUMNS, 1), (0, None))
            )
            for k in cutlass.range(blocks, unroll=1):
                ring.producer_acquire(state)
                full = ring.producer_get_barrier(state)
                cute.copy(a_source.atom, a_from[None, k], a_to[None, state.index], tma_bar_ptr=full)
                cute.copy(b_source.atom, b_from[None, k], b_to[None, state.index], tma_bar_ptr=full)
                cute.copy(as_source.atom, as_from[None, k], as_to[None, state.index], tma_bar_ptr=full)
                cute.copy(bs_source.atom, bs_from[None, k], bs_to[None, state.index], tma_bar_ptr=full)
                state.advance()
            entry += 1
            group, row, col, blocks, token, _, _ = read(plans, entry, FIELDS)
        ring.producer_tail(state)

    @cute.jit
    def consume(self, a, b, scales: Scales, ring, plans: Plans, staged, target: Target, walk: Walk, team, thread):
        """Warpgroup `team` of three: 64 rows of every tile."""
        sums = cute.make_rmem_tensor((TILE_COLUMNS // 2,), Float32)
        temp = cute.make_rmem_tensor((TILE_COLUMNS // 2,), Float32)
        product = self.product(a, b, team)
        slots = None
        if const_expr(self.by_tma):
            slots = cute.local_tile(staged, (64, self.staged_cols, self.slots), (0, 0, team))
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        entry = Int32(0)
        group, row, col, blocks = read(plans, entry, 4)
        while group >= 0:
            row += team * 64
            if row < walk.rows:
                state, last = self.multiply(ring, state, product, sums, temp, blocks, scales, team, thread)
                if const_expr(self.by_tma):
                    self.send_tile(sums, slots, target, walk, group, row, col, thread)
                else:
                    self.store_tile(sums, target, walk, group, row, col, thread)
                ring.consumer_release(last)
            else:
                state = self.pass_over(ring, state, blocks)
            entry += 1
            group, row, col, blocks = read(plans, entry, 4)
        if const_expr(self.by_tma):
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    def product(self, a, b, team):
        """What multiplies a warpgroup's rows with all columns of a tile."""
        k_major = OperandMajorMode.K
        shape = (64, TILE_COLUMNS)
        mma = sm90.make_trivial_tiled_mma(self.element, self.element, k_major, k_major, Float32, (1, 1, 1), shape)
        mine = mma.get_slice(0)
        a_part = cute.local_tile(a, (64, BLOCK, self.stages), (team, 0, 0))
        return Product(mma.op, mma.make_fragment_A(mine.partition_A(a_part)), mma.make_fragment_B(mine.partition_B(b)))

    @cute.jit
    def multiply(self, ring, state, product: Product, sums, temp, blocks, scales: Scales, team, thread):
        """sums = the sum over all blocks of 128 tokens, each multiplied by itself, scaled and added in FP32.

        (Next stage, the last one, which is still to be released.)
        """
        acc = cute.make_tensor(temp.iterator, cute.make_layout(((2, 2, TILE_COLUMNS // 8), 1, 1)))
        row = anew(team * 64 + thread // 32 * 16 + thread % 32 // 4)
        quarter = anew(thread % 4)
        sums.fill(0.0)
        before = state.clone()
        for k in cutlass.range(blocks, unroll=1):
            ring.consumer_wait(state)
            atom = cute.make_mma_atom(product.op)
            atom.set(warpgroup.Field.ACCUMULATE, False)
            warpgroup.fence()
            for step in range_constexpr(BLOCK // K_STEP):
                at = (None, None, step, state.index)
                cute.gemm(atom, acc, product.a[at], product.b[at], acc)
                atom.set(warpgroup.Field.ACCUMULATE, True)
            warpgroup.commit_group()
            if k > 0:
                ring.consumer_release(before)
                before.advance()
            factors = [scales.rows[row + 8 * half, 0, state.index] for half in range(2)]
            warpgroup.wait_group(0)
            self.promote(sums, temp, factors, scales, quarter, state.index)
            state.advance()
        return state, before

    def promote(self, sums, temp, factors, scales: Scales, quarter, stage):
        """Sums += what was multiplied, scaled by row and column."""
        for octet in range(TILE_COLUMNS // 8):
            pair = cute.make_rmem_tensor((2,), Float32)
            at = cute.assume(stage * TILE_COLUMNS + 8 * octet + 2 * quarter, divby=2)
            cute.autovec_copy(cute.make_tensor(scales.columns.iterator + at, cute.make_layout(2)), pair)
            for half in range(2):
                for e in range(2):
                    i = 4 * octet + 2 * half + e
                    sums[i] = sums[i] + temp[i] * pair[e] * factors[half]

    @cute.jit
    def pass_over(self, ring, state, blocks):
        """Blocks that give this warpgroup nothing."""
        for _ in cutlass.range(blocks, unroll=1):
            ring.consumer_wait(state)
            ring.consumer_release(state)
            state.advance()
        return state

    @cute.jit
    def send_tile(self, sums, slots, target: Target, walk: Walk, group, row, col, thread):
        """Round, stage and send a warpgroup's tile; every warp by itself, 16 rows of some columns at a time."""
        values = self.staged_cols // 2
        first = row + cute.arch.make_warp_uniform(thread // 32) * 16
        line = self.line(first, target, walk)
        for piece in range_constexpr(TILE_COLUMNS // self.staged_cols):
            slot = slots[None, None, piece % self.slots]
            part = cute.make_tensor(sums.iterator + piece * values, cute.make_layout(((2, 2, values // 4), 1, 1)))
            at = col + piece * self.staged_cols
            cute.arch.cp_async_bulk_wait_group(self.slots - 1, read=True)
            cute.arch.sync_warp()
            if first < walk.rows and at < walk.cols:
                self.stage(part, slot, thread)
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.sync_warp()
                self.send(slot, target, self.coordinates(target, group), line, at, thread)
            cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def store_tile(self, sums, target: Target, walk: Walk, group, row, col, thread):
        """Round a warpgroup's tile, add to it what is there if that is asked for, and store it, 16 bytes a lane, as
        `vector_of` forms them. What is there is read all at once, before anything is added."""
        thread = anew(thread)
        first = row + (thread >> 5) * 16 + ((thread & 31) >> 2)
        mine = col + self.column_of_lane(thread)
        start = self.start(target, walk, group) + Int64(mine) * self.out_bytes
        pitch = Int64(walk.cols) * self.out_bytes
        rows = [start + self.line(first + 8 * half, target, walk) * pitch for half in range(2)]
        places = [(half, chunk) for chunk in range(TILE_COLUMNS // self.span) for half in range(2)]
        valid = [(first + 8 * half < walk.rows) & (mine + chunk * self.span < walk.cols) for half, chunk in places]
        there = [rows[half] + chunk * self.span * self.out_bytes for half, chunk in places]
        old = []
        if const_expr(self.accumulate):
            anywhere = self.start(target, walk, group)
            for v, t in zip(valid, there, strict=True):
                old.append(cute.make_rmem_tensor((self.vector,), self.out))
                cute.autovec_copy(self.vector_at(Int64(select_(v, t, anywhere))), old[-1])
        for i, (half, chunk) in enumerate(places):
            values = self.vector_of(sums, half, chunk, thread)
            if const_expr(self.accumulate):
                values.store((old[i].load().to(Float32) + values.load().to(Float32)).to(self.out))
            self.write_if(valid[i], values, self.vector_at(there[i]))


def build(options):
    """(jit function, fake arguments): dy, its scales, x, its scales, padded, (out,) or (lowest, addresses), interleave
    block, strip, grid size, stream. options: `fp8_wgrad.Fp8WgradOptions`.
    """
    rows, cols, tokens, blocks, groups = (
        cute.sym_int(divisibility=16),
        cute.sym_int(divisibility=16),
        cute.sym_int(divisibility=BLOCK),
        cute.sym_int(),
        cute.sym_int(),
    )

    def data(width):
        return make_fake_compact_tensor(Float8E4M3FN, (width, tokens), stride_order=(1, 0), assumed_align=16)

    def scale():
        shape = (blocks, cute.sym_int(divisibility=4))
        return make_fake_compact_tensor(Float32, shape, stride_order=(1, 0), assumed_align=16)

    padded = make_fake_compact_tensor(Int32, (cute.sym_int(),), assumed_align=4)
    return Fp8WgradSm90(options), (
        data(rows),
        scale(),
        data(cols),
        scale(),
        padded,
        fake_results(options, groups, rows, cols),
        Int32(1),
        Int32(1),
        Int32(1),
        make_fake_stream(),
    )
