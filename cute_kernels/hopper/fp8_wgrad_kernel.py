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

Roles, 384 threads: warps 0 to 3 and 4 to 7 are two warpgroups with 64 rows each of every tile of 128 x 192 or 256;
warp 8 issues TMA, and its warpgroup gives registers away.
Pipelines: ring of (dy tile, x tile, their scales), producer -> 8 consumer warps (in a cluster of 2 also those of the
other CTA, since half of x's tile comes from there). Staging: each warp has 16 rows of its warpgroup's slots to itself.
Schedule: persistent; cluster c takes tiles c, c + clusters, ...; in a group tiles go in strips (`place`), and each
group starts a column later than the one before.
Timeline of a block: wait for the stage; per chunk of columns 4 WGMMA, wait, promote; release the stage. Nothing of a
warpgroup's own overlaps: while it promotes, the other's WGMMA fill the tensor cores. Two sets of 192 columns' sums are
192 registers; 256 columns are multiplied as two chunks of 128 with one set of temporaries.
After the last block a warpgroup rounds and sends its tile, 16 rows by 128 bytes a warp at a time.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.memory
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float8E4M3FN, Float32, Int16, Int32, Int64, const_expr, range_constexpr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream
from cutlass.tensor_utils import LayoutEnum

from cute_kernels.hopper.wgrad_operands import (
    CONSUMER_REGISTERS,
    PRODUCER_REGISTERS,
    THREADS,
    TILE_M,
    WARPS,
    anew,
)
from cute_kernels.hopper.wgrad_results import AddedResults, Target, Tile, fake_results

BLOCK, TEAMS = 128, 2  # tokens with one scale; warpgroups that multiply
K_STEP = 32  # tokens of one WGMMA


class Walk(NamedTuple):
    """What a role needs to find its tiles: group ends, the gradient's shape, the strip, this cluster, their number, and
    this CTA's place in its cluster."""

    offsets: Any
    rows: Any
    cols: Any
    strip: Any
    first: Any
    step: Any
    rank: Any


class Source(NamedTuple):
    """A TMA atom and the coordinates it reads."""

    atom: Any
    tensor: Any


class Product(NamedTuple):
    """A multiplication of one width, in chunks: WGMMA operation, A and B fragments (B by chunk), columns of a chunk."""

    op: Any
    a: Any
    b: Any
    chunk: Any


class Scales(NamedTuple):
    """Scales of a stage's block in shared memory, by (row or column, stage)."""

    rows: Any
    columns: Any


class Fp8WgradSm90(AddedResults):
    """Static facts -> the kernel; see the module's text."""

    def __init__(self, options):
        super().__init__(options)
        config = options.config
        self.tile_n, self.chunks, self.buffers = config.columns, config.chunks, config.buffers
        self.element = Float8E4M3FN
        self.accumulate = options.accumulate
        self.pieces = self.tile_n // self.staged_cols

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
        tile = (TILE_M, self.tile_n, BLOCK)
        box = (TILE_M, self.tile_n // self.cluster, BLOCK)
        a_layout = sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, tile, self.element, self.stages)
        b_layout = sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, tile, self.element, self.stages)
        box_layout = sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, box, self.element, self.stages * self.cluster)
        load = cpasync.CopyBulkTensorTileG2SOp()
        shared = cpasync.CopyBulkTensorTileG2SMulticastOp() if const_expr(self.cluster > 1) else load
        a_one, b_one = cute.slice_(a_layout, (None, None, 0)), cute.slice_(box_layout, (None, None, 0))
        sources = (
            *cpasync.make_tiled_tma_atom(load, dy, a_one, (TILE_M, BLOCK)),
            *cpasync.make_tiled_tma_atom(shared, x, b_one, (box[1], BLOCK)),
            *self.make_scale_source(load, dy_scale, dy.shape[0], TILE_M),
            *self.make_scale_source(load, x_scale, x.shape[0], self.tile_n),
        )
        lines, staged_layout = self.make_staging()
        sink = self.make_sink(out[0], lines)

        @cute.struct
        class Storage:
            a: cute.struct.Align[cute.struct.MemRange[self.element, cute.cosize(a_layout)], 1024]
            b: cute.struct.Align[cute.struct.MemRange[self.element, cute.cosize(b_layout)], 1024]
            staged: cute.struct.Align[cute.struct.MemRange[self.out, cute.cosize(staged_layout)], 1024]
            a_scales: cute.struct.Align[cute.struct.MemRange[Float32, TILE_M * self.stages], 128]
            b_scales: cute.struct.Align[cute.struct.MemRange[Float32, self.tile_n * self.stages], 128]
            barriers: cute.struct.MemRange[Int64, 2 * self.stages]

        self.Storage = Storage
        layouts = (a_layout, b_layout, box_layout, staged_layout)
        self.kernel(*sources, padded, out, *sink, block, strip, *layouts).launch(
            grid=[grid, 1, 1],
            block=[THREADS, 1, 1],
            cluster=[self.cluster, 1, 1] if const_expr(self.cluster > 1) else None,
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
        storage = cutlass.memory.SmemAllocator().allocate(self.Storage)
        a = storage.a.get_tensor(a_layout.outer, swizzle=a_layout.inner)
        b = storage.b.get_tensor(b_layout.outer, swizzle=b_layout.inner)
        boxes = storage.b.get_tensor(box_layout.outer, swizzle=box_layout.inner)
        staged = storage.staged.get_tensor(staged_layout.outer, swizzle=staged_layout.inner)
        scales = Scales(
            storage.a_scales.get_tensor(cute.make_layout((TILE_M, 1, self.stages), stride=(1, 0, TILE_M))),
            storage.b_scales.get_tensor(cute.make_layout((self.tile_n, 1, self.stages), stride=(1, 0, self.tile_n))),
        )
        ring = pipeline.PipelineTmaAsync.create(
            num_stages=self.stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, TEAMS * WARPS * self.cluster),
            tx_count=(TILE_M + self.tile_n) * (BLOCK + 4),
            barrier_storage=storage.barriers.data_ptr(),
            cta_layout_vmnk=cute.make_layout((1, self.cluster, 1, 1)),
        )
        first, step, rank = cta // self.cluster, ctas // self.cluster, cta % self.cluster
        walk = Walk(padded, a_tma.shape[0], b_tma.shape[0], strip, first, step, rank)
        if warp_index >= TEAMS * WARPS:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp_index == TEAMS * WARPS:
                sources = Source(a_atom, a_tma), Source(b_atom, b_tma), Source(as_atom, as_tma), Source(bs_atom, bs_tma)
                self.produce(sources, a, boxes, scales, ring, walk)
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            team = cute.arch.make_warp_uniform(thread // 128)
            target = Target(out, out_atom, out_tma, block)
            self.consume(a, b, scales, ring, staged, target, walk, team, thread % 128)

    def partition(self, source: Source, shared, tiles):
        return cpasync.tma_partition(
            source.atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2), cute.group_modes(tiles, 0, 2)
        )

    @cute.jit
    def produce(self, sources, a, boxes, scales: Scales, ring, walk: Walk):
        """One warp: dy's tile, of x's tile the share of this CTA, and their scales, for every block of every tile."""
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)
        a_source, b_source, as_source, bs_source = sources
        for index in cutlass.range(walk.first, self.tiles(walk), walk.step, unroll=1):
            tile = self.place(walk, index)
            begin = walk.offsets[tile.group] // BLOCK
            blocks = walk.offsets[tile.group + 1] // BLOCK - begin
            box_rows = const_expr(self.tile_n // self.cluster)
            a_all = cute.domain_offset((tile.row, begin * BLOCK), a_source.tensor)
            b_all = cute.domain_offset((tile.col + walk.rank * box_rows, begin * BLOCK), b_source.tensor)
            as_all = cute.domain_offset((tile.row, begin), as_source.tensor)
            bs_all = cute.domain_offset((tile.col, begin), bs_source.tensor)
            a_to, a_from = self.partition(a_source, a, cute.local_tile(a_all, (TILE_M, BLOCK), (0, None)))
            b_to, b_from = self.partition(b_source, boxes, cute.local_tile(b_all, (box_rows, BLOCK), (0, None)))
            as_to, as_from = self.partition(as_source, scales.rows, cute.local_tile(as_all, (TILE_M, 1), (0, None)))
            bs_to, bs_from = self.partition(
                bs_source, scales.columns, cute.local_tile(bs_all, (self.tile_n, 1), (0, None))
            )
            for k in cutlass.range(blocks, unroll=1):
                ring.producer_acquire(state)
                full = ring.producer_get_barrier(state)
                cute.copy(a_source.atom, a_from[None, k], a_to[None, state.index], tma_bar_ptr=full)
                there = b_to[None, state.index * self.cluster + walk.rank]
                if const_expr(self.cluster > 1):
                    mask = Int16(2**self.cluster - 1)
                    cute.copy(b_source.atom, b_from[None, k], there, tma_bar_ptr=full, mcast_mask=mask)
                else:
                    cute.copy(b_source.atom, b_from[None, k], there, tma_bar_ptr=full)
                cute.copy(as_source.atom, as_from[None, k], as_to[None, state.index], tma_bar_ptr=full)
                cute.copy(bs_source.atom, bs_from[None, k], bs_to[None, state.index], tma_bar_ptr=full)
                state.advance()
        ring.producer_tail(state)

    @cute.jit
    def consume(self, a, b, scales: Scales, ring, staged, target: Target, walk: Walk, team, thread):
        """One of two warpgroups: 64 rows of every tile."""
        sums = cute.make_rmem_tensor((self.tile_n // 2,), Float32)
        temps = [cute.make_rmem_tensor((self.tile_n // self.chunks // 2,), Float32) for _ in range(self.buffers)]
        product = self.chunk_product(a, b, team)
        slots = cute.local_tile(staged, (64, self.staged_cols, self.slots), (0, 0, team))
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        row = team * 64 + thread // 32 * 16 + thread % 32 // 4
        for index in cutlass.range(walk.first, self.tiles(walk), walk.step, unroll=1):
            tile = self.place(walk, index)
            tile = tile._replace(row=tile.row + team * 64)
            blocks = (walk.offsets[tile.group + 1] - walk.offsets[tile.group]) // BLOCK
            if const_expr(self.accumulate):  # noqa: SIM102 (traced, then run)
                if blocks > 0:
                    self.fetch_first(slots, target, walk, tile, thread)
            state = self.multiply(ring, state, product, sums, temps, blocks, scales, row, thread)
            if blocks > 0 or not self.accumulate:
                self.finish(sums, slots, target, walk, tile, thread)
        if const_expr(self.by_tma):
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    def chunk_product(self, a, b, team):
        """What multiplies the first `width` columns of a tile."""
        chunk = self.tile_n // self.chunks
        k_major = OperandMajorMode.K
        mma = sm90.make_trivial_tiled_mma(
            self.element, self.element, k_major, k_major, Float32, (TEAMS, 1, 1), (64, chunk)
        )
        mine = mma.get_slice(team * 128)
        parts = [cute.local_tile(b, (chunk, BLOCK, self.stages), (c, 0, 0)) for c in range(self.chunks)]
        return Product(
            mma.op,
            mma.make_fragment_A(mine.partition_A(a)),
            tuple(mma.make_fragment_B(mine.partition_B(part)) for part in parts),
            chunk,
        )

    @cute.jit
    def multiply(self, ring, state, product: Product, sums, temps, blocks, scales: Scales, row, thread):
        """sums = the sum over all blocks of 128 tokens, each multiplied by itself, scaled and added in FP32."""
        chunk = const_expr(product.chunk)
        part = cute.make_layout(((2, 2, chunk // 8), 1, 1))
        sums.fill(0.0)
        for _ in cutlass.range(blocks, unroll=1):
            ring.consumer_wait(state)
            factors = [scales.rows[row + 8 * half, 0, state.index] for half in range(2)]
            for c in range_constexpr(self.chunks + self.buffers - 1):
                if const_expr(c < self.chunks):
                    atom = cute.make_mma_atom(product.op)
                    atom.set(warpgroup.Field.ACCUMULATE, False)
                    acc = cute.make_tensor(temps[c % self.buffers].iterator, part)
                    warpgroup.fence()
                    for step in range_constexpr(BLOCK // K_STEP):
                        at = (None, None, step, state.index)
                        cute.gemm(atom, acc, product.a[at], product.b[c][at], acc)
                        atom.set(warpgroup.Field.ACCUMULATE, True)
                    warpgroup.commit_group()
                done = const_expr(c - self.buffers + 1)
                if const_expr(done >= 0):
                    warpgroup.wait_group(min(self.buffers, self.chunks - done) - 1)
                    self.promote(sums, temps[done % self.buffers], done, chunk, factors, scales, state.index, thread)
            ring.consumer_release(state)
            state.advance()
        return state

    def promote(self, sums, temp, c: int, chunk: int, factors, scales: Scales, stage, thread):
        """A chunk of sums += what was multiplied, scaled by row and column."""
        pointer = scales.columns.iterator
        for j in range(chunk // 8):
            pair = cute.make_rmem_tensor((2,), Float32)
            at = stage * self.tile_n + thread % 4 * 2 + c * chunk + 8 * j
            cute.autovec_copy(cute.make_tensor(pointer + cute.assume(at, divby=2), cute.make_layout(2)), pair)
            for half in range(2):
                for e in range(2):
                    i = 4 * j + 2 * half + e
                    there = c * chunk // 2 + i
                    sums[there] = sums[there] + temp[i] * pair[e] * factors[half]

    @cute.jit
    def finish(self, acc, slots, target: Target, walk: Walk, tile: Tile, thread):
        """Round, stage and send a warpgroup's tile; every warp by itself, 16 rows of some columns at a time."""
        values = 64 * self.staged_cols // 128
        lag = 1 if self.by_tma else 0
        lines = self.lines(target, walk, tile.row, thread)
        for piece in range_constexpr(self.pieces):
            if const_expr(self.accumulate):
                thread = anew(thread)
            slot = slots[None, None, piece % self.slots]
            part = cute.make_tensor(acc.iterator + piece * values, cute.make_layout(((2, 2, values // 4), 1, 1)))
            row, col = self.corner(tile, piece, thread)
            if const_expr(self.accumulate):
                cute.arch.cp_async_wait_group(self.slots - 1 - lag)
            elif const_expr(self.by_tma):
                cute.arch.cp_async_bulk_wait_group(self.slots - 1, read=True)
            cute.arch.sync_warp()
            if row < walk.rows and col < walk.cols:
                if const_expr(self.accumulate):
                    self.add_staged(part, slot, thread)
                else:
                    self.stage(part, slot, thread)
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
            if const_expr(self.accumulate):
                again = const_expr(piece - lag + self.slots)
                if const_expr(piece >= lag):
                    if const_expr(again < self.pieces):
                        if const_expr(self.by_tma):
                            cute.arch.cp_async_bulk_wait_group(lag, read=True)
                            cute.arch.sync_warp()
                        self.fetch(slots, lines, target, walk, tile, again, thread)
                    cute.arch.cp_async_commit_group()

    @cute.jit
    def corner(self, tile: Tile, piece: cutlass.Constexpr, thread):
        """First row and column of a warp's share of a piece."""
        row = tile.row + cute.arch.make_warp_uniform(thread // 32) * 16
        return row, tile.col + piece * self.staged_cols

    def lines(self, target: Target, walk: Walk, row, thread):
        if self.by_tma and not self.accumulate:
            return []  # TMA alone touches the rows
        return super().lines(target, walk, row, thread)


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
