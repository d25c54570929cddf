"""dW_g = dy_gᵀ x_g for every group g: the weight gradient of a grouped linear on SM90.

Shapes: dy [T, N], x [T, K] bf16 or fp16, rows contiguous (any row stride that is a multiple of 8 elements); offsets
[G+1] int32; out [G, N, K] contiguous bf16, fp16 or fp32, or an int64 table of G addresses of [N, K] tensors. N and K
are multiples of 8. Rows outside a group never reach its sums, whatever they hold. An empty group gives exact zeros,
or, when accumulating, is left alone. With `interleaved`, dy's columns lie as [gate | up] and the row of a gradient
goes to blocks of `block` gate rows, then `block` up rows.

Numerics: FP32 sums, rounded once to out's type; accumulating adds that rounded value to what is there, in the L2 cache
(FP32 subnormals count as zero there). Each element is written, or added to, exactly once per launch, so results are
the same bits run after run. Equals `reference.grouped_wgrad`.

Ragged loads: the summed dimension is tokens, so both operands must read zero past a group's end (0 x NaN is NaN).
Each is viewed with two extra dimensions whose strides cancel modulo 2^64 (`ragged`); a group then begins at a
coordinate such that its end is the end of the dimension, and the TMA unit fills in zeros. No descriptor is rewritten.
(Public idea: Triton's ragged TMA, QuACK.)

Roles, 384 threads: warps 0 to 7 are two warpgroups that multiply, 64 rows of a 128 x 256 tile each, and store; warp 8
issues TMA, and its warpgroup gives registers away. Pipelines: operand ring of 4 stages, producer -> 8 consumer warps.
Schedule: persistent; CTA c takes tiles c, c + grid, ... of the list (group, column tile, row tile), row tiles fastest.
Timeline of a consumer warp: wait for a stage, 4 WGMMA, release the stage before it; after the last stage round its 16
rows, 256 bytes of each at a time, into its own part of the staging tile and send them off in whole rows, 16 bytes a
lane: plain stores, or reductions when accumulating. Nothing waits for memory. The producer meanwhile fills the ring
for the next tile.

Measured on one H200 (2026-11-30, L2 flushed, variants in turn): BF16 out runs at 1.02 / 1.14 / 1.05 times the speed of
torch._grouped_mm for (G, T, N, K) = (8, 32768, 4096, 7168) / (128, 65536, 1536, 2048) / (32, 32768, 5888, 2944); FP32
accumulation takes 1.06 / 1.98 / 1.21 times as long as the BF16 store. Slower: rows by bulk copy (3 to 7 %), column
tiles fastest (1 %), 128 x 128 tiles with two CTAs an SM (4 to 9 %, 3 to 18 % when accumulating), bulk reduce-add from
a three-stage ring and twice the staging (2 to 15 %).
"""

import cutlass
import cutlass.cute as cute
import cutlass.memory
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, Int64, Uint32, const_expr, range_constexpr
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor
from cutlass.cutlass_dsl import dsl_user_op
from cutlass.tensor_utils import LayoutEnum

TILE_M, TILE_N, TILE_K, STAGES = 128, 256, 64, 4
THREADS, CONSUMER_WARPS = 384, 8
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 40, 232
ROW_BYTES, VECTOR_BYTES = 256, 16  # of a staged row, and of what a lane stores at once
LANES = ROW_BYTES // VECTOR_BYTES  # that store a row together
FAR = 1 << 30  # extent of a ragged dimension; more than any row count

TYPES = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16, "float32": cutlass.Float32}
ADD = {
    "bfloat16": "red.global.add.noftz.v4.bf16x2",
    "float16": "red.global.add.noftz.v4.f16x2",
    "float32": "red.global.add.v4.f32",
}


@dsl_user_op
def add_vector(instruction: str, address: Int64, words: list, *, loc=None, ip=None):
    """Add 16 bytes of values, given as four 32-bit words, to global memory; nothing comes back."""
    kind = "f" if isinstance(words[0], Float32) else "r"
    operands = [Int64(address), *words]
    llvm.inline_asm(
        None,
        [operand.ir_value(loc=loc, ip=ip) for operand in operands],
        f"{instruction} [$0], {{$1, $2, $3, $4}};",
        ",".join(["l", kind, kind, kind, kind]),
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )


@cute.jit
def ragged(x: cute.Tensor):
    """(tokens, F) -> (F, FAR, 2^31-1, 2^31-1): index (FAR - n + i, FAR, first + n) lands on token first + i, and i >=
    n is out of range. The strides of the last three dimensions cancel FAR modulo 2^64: FAR (s + (2^34 - s)) = 2^64
    elements.
    """
    stride = x.stride[0]
    shape = (x.shape[1], FAR, 2**31 - 1, 2**31 - 1)
    return cute.make_tensor(x.iterator, cute.make_layout(shape, stride=(1, stride, 2**34 - stride, stride)))


@cute.jit
def tokens_of(x: cute.Tensor, first, count):
    """The (F, tokens) view of a ragged tensor that starts at token `first` and reads zero from `count` on."""
    return cute.domain_offset((0, FAR - count), x[None, None, FAR, first + count])


class GroupedWgradSm90:
    """Static facts -> the kernel; see the module's text."""

    def __init__(self, options):
        self.element = TYPES[options.element]
        self.out = TYPES[options.out]
        self.accumulate = options.accumulate
        self.interleaved = options.interleaved
        self.separate = options.separate
        self.out_bytes = self.out.width // 8
        self.staged_cols = ROW_BYTES // self.out_bytes
        self.vector = VECTOR_BYTES // self.out_bytes
        self.add = ADD[options.out]

    @cute.jit
    def __call__(
        self, dy: cute.Tensor, x: cute.Tensor, offsets: cute.Tensor, out: cute.Tensor, block: Int32, grid: Int32, stream
    ):
        mn = OperandMajorMode.MN
        mma = sm90.make_trivial_tiled_mma(self.element, self.element, mn, mn, Float32, (2, 1, 1), (64, TILE_N))
        tile = (TILE_M, TILE_N, TILE_K)
        a_layout = sm90.make_smem_layout_a(LayoutEnum.COL_MAJOR, tile, self.element, STAGES)
        b_layout = sm90.make_smem_layout_b(LayoutEnum.COL_MAJOR, tile, self.element, STAGES)
        load = cpasync.CopyBulkTensorTileG2SOp()
        a_one, b_one = cute.slice_(a_layout, (None, None, 0)), cute.slice_(b_layout, (None, None, 0))
        a_atom, a_tma = cpasync.make_tiled_tma_atom(load, ragged(dy), a_one, (TILE_M, TILE_K))
        b_atom, b_tma = cpasync.make_tiled_tma_atom(load, ragged(x), b_one, (TILE_N, TILE_K))
        rows = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.out)
        staged_layout = cute.tile_to_shape(rows, (64, self.staged_cols, 2), (0, 1, 2))

        @cute.struct
        class Storage:
            a: cute.struct.Align[cute.struct.MemRange[self.element, cute.cosize(a_layout)], 1024]
            b: cute.struct.Align[cute.struct.MemRange[self.element, cute.cosize(b_layout)], 1024]
            staged: cute.struct.Align[cute.struct.MemRange[self.out, cute.cosize(staged_layout)], 1024]
            barriers: cute.struct.MemRange[Int64, 2 * STAGES]

        self.storage = Storage
        self.kernel(a_atom, a_tma, b_atom, b_tma, offsets, out, block, mma, a_layout, b_layout, staged_layout).launch(
            grid=[grid, 1, 1], block=[THREADS, 1, 1], min_blocks_per_mp=1, stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        a_atom: cute.CopyAtom,
        a_tma: cute.Tensor,
        b_atom: cute.CopyAtom,
        b_tma: cute.Tensor,
        offsets: cute.Tensor,
        out: cute.Tensor,
        block: Int32,
        mma: cute.TiledMma,
        a_layout: cute.ComposedLayout,
        b_layout: cute.ComposedLayout,
        staged_layout: cute.ComposedLayout,
    ):
        thread, _, _ = cute.arch.thread_idx()
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_index == 0:
            cpasync.prefetch_descriptor(a_atom)
            cpasync.prefetch_descriptor(b_atom)
        storage = cutlass.memory.SmemAllocator().allocate(self.storage)
        a = storage.a.get_tensor(a_layout.outer, swizzle=a_layout.inner)
        b = storage.b.get_tensor(b_layout.outer, swizzle=b_layout.inner)
        staged = storage.staged.get_tensor(staged_layout.outer, swizzle=staged_layout.inner)
        ring = pipeline.PipelineTmaAsync.create(
            num_stages=STAGES,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, CONSUMER_WARPS),
            tx_count=(TILE_M + TILE_N) * TILE_K * self.element.width // 8,
            barrier_storage=storage.barriers.data_ptr(),
            cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
        )
        if warp_index >= CONSUMER_WARPS:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp_index == CONSUMER_WARPS:
                self.produce(a_atom, a_tma, b_atom, b_tma, offsets, a, b, ring)
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            rows, cols = a_tma.shape[0], b_tma.shape[0]
            slab = cute.arch.make_warp_uniform(thread // 128)
            self.consume(offsets, rows, cols, out, block, mma, a, b, ring, staged[None, None, slab], slab, thread % 128)

    @cute.jit
    def place(self, tile, rows, cols):
        """(group, row tile, column tile)."""
        row_tiles, col_tiles = (rows + TILE_M - 1) // TILE_M, (cols + TILE_N - 1) // TILE_N
        rest = tile // row_tiles
        group = rest // col_tiles
        return group, tile - rest * row_tiles, rest - group * col_tiles

    @cute.jit
    def tiles(self, offsets, rows, cols):
        return ((rows + TILE_M - 1) // TILE_M) * ((cols + TILE_N - 1) // TILE_N) * (offsets.shape[0] - 1)

    @cute.jit
    def produce(self, a_atom, a_tma, b_atom, b_tma, offsets, a, b, ring):
        """One warp: both operands of every k block of every tile of this CTA."""
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        rows, cols = a_tma.shape[0], b_tma.shape[0]
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, STAGES)
        alone = cute.make_layout(1)
        for tile in cutlass.range(cta, self.tiles(offsets, rows, cols), ctas, unroll=1):
            group, m, n = self.place(tile, rows, cols)
            first = offsets[group]
            count = offsets[group + 1] - first
            a_tile = cute.local_tile(tokens_of(a_tma, first, count), (TILE_M, TILE_K), (m, None))
            b_tile = cute.local_tile(tokens_of(b_tma, first, count), (TILE_N, TILE_K), (n, None))
            a_to, a_from = cpasync.tma_partition(
                a_atom, 0, alone, cute.group_modes(a, 0, 2), cute.group_modes(a_tile, 0, 2)
            )
            b_to, b_from = cpasync.tma_partition(
                b_atom, 0, alone, cute.group_modes(b, 0, 2), cute.group_modes(b_tile, 0, 2)
            )
            for k in cutlass.range((count + TILE_K - 1) // TILE_K, unroll=1):
                ring.producer_acquire(state)
                barrier = ring.producer_get_barrier(state)
                cute.copy(a_atom, a_from[None, k], a_to[None, state.index], tma_bar_ptr=barrier)
                cute.copy(b_atom, b_from[None, k], b_to[None, state.index], tma_bar_ptr=barrier)
                state.advance()
        ring.producer_tail(state)

    @cute.jit
    def consume(self, offsets, rows, cols, out, block, mma, a, b, ring, staged, slab, thread):
        """One warpgroup: rows 64 slab .. 64 slab + 63 of every tile of this CTA."""
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        mine = mma.get_slice(slab * 128)
        a_frag = mma.make_fragment_A(mine.partition_A(a))
        b_frag = mma.make_fragment_B(mine.partition_B(b))
        acc = cute.make_rmem_tensor(mine.partition_shape_C((TILE_M, TILE_N)), Float32)
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, STAGES)
        for tile in cutlass.range(cta, self.tiles(offsets, rows, cols), ctas, unroll=1):
            group, m, n = self.place(tile, rows, cols)
            k_blocks = (offsets[group + 1] - offsets[group] + TILE_K - 1) // TILE_K
            state = self.multiply(ring, state, mma, acc, a_frag, b_frag, k_blocks)
            wanted = k_blocks > 0 if const_expr(self.accumulate) else True
            if wanted:
                row0, col0 = m * TILE_M + slab * 64, n * TILE_N
                self.finish(acc, staged, out, group, row0, col0, rows, cols, block, thread)

    @cute.jit
    def multiply(self, ring, state, mma, acc, a_frag, b_frag, k_blocks):
        """acc = the sum over all k blocks; one group of WGMMA stays in flight and the stage before it is released."""
        atom = cute.make_mma_atom(mma.op)
        atom.set(warpgroup.Field.ACCUMULATE, True)
        acc.fill(0.0)
        done = state.clone()
        for k in cutlass.range(k_blocks, unroll=1):
            ring.consumer_wait(state)
            warpgroup.fence()
            for step in range_constexpr(TILE_K // 16):
                at = (None, None, step, state.index)
                cute.gemm(atom, acc, a_frag[at], b_frag[at], acc)
            warpgroup.commit_group()
            warpgroup.wait_group(1)
            if k > 0:
                ring.consumer_release(done)
                done.advance()
            state.advance()
        warpgroup.wait_group(0)
        if k_blocks > 0:
            ring.consumer_release(done)
        return state

    @cute.jit
    def finish(self, acc, staged, out, group, row0, col0, rows, cols, block, thread):
        """Round, stage and store a warpgroup's sums; every warp by itself, 16 rows of some columns at a time."""
        lane, warp_row = thread % 32, (thread // 32) * 16
        places = [warp_row + (32 // LANES) * step + lane // LANES for step in range(LANES // 2)]
        targets = [self.row_address(out, group, row0 + place, rows, cols, block) for place in places]
        values = 64 * self.staged_cols // 128
        for piece in range_constexpr(TILE_N // self.staged_cols):
            col = col0 + piece * self.staged_cols
            if col < cols:
                cute.arch.sync_warp()
                part = cute.make_tensor(acc.iterator + piece * values, cute.make_layout(((2, 2, values // 4), 1, 1)))
                self.stage(part, staged, thread)
                cute.arch.sync_warp()
                mine = col + (lane % LANES) * self.vector
                for step in range_constexpr(LANES // 2):
                    if row0 + places[step] < rows and mine < cols:
                        source = cute.local_tile(staged[places[step], None], (self.vector,), (lane % LANES,))
                        self.store(source, targets[step] + Int64(mine) * self.out_bytes)

    @cute.jit
    def store(self, source, address):
        """16 staged bytes to a global address, or added to what is there."""
        values = cute.make_rmem_tensor((self.vector,), self.out)
        cute.autovec_copy(source, values)
        if const_expr(self.accumulate):
            words = values if const_expr(self.out.width == 32) else cute.recast_tensor(values, Uint32)
            add_vector(self.add, address, [words[i] for i in range(4)])
        else:
            target = cute.make_ptr(self.out, address, cute.AddressSpace.gmem, assumed_align=VECTOR_BYTES)
            cute.autovec_copy(values, cute.make_tensor(target, cute.make_layout((self.vector,))))

    @cute.jit
    def row_address(self, out, group, row, rows, cols, block):
        """The global address of row `row` of the group's gradient, as it lies in the weight."""
        if const_expr(self.interleaved):
            half = rows // 2
            up = row // half
            in_half = row - up * half
            row = (in_half // block) * (2 * block) + up * block + in_half % block
        if const_expr(self.separate):
            base = out[group]
        else:
            base = out.iterator.toint() + Int64(group) * (Int64(rows) * cols * self.out_bytes)
        return base + Int64(row) * cols * self.out_bytes

    @cute.jit
    def stage(self, part, staged, thread):
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
            cute.copy(copy, copy.retile(rounded), copy.get_slice(thread).partition_D(staged))
        else:
            row = (thread // 32) * 16 + thread % 32 // 4
            for pair in range_constexpr(self.staged_cols // 4):
                values = cute.make_tensor(part.iterator + 2 * pair, cute.make_layout((2,)))
                place = cute.local_tile(staged[row + 8 * (pair % 2), None], (2,), (4 * (pair // 2) + thread % 4,))
                cute.autovec_copy(values, place)


def build(options):
    """(jit function, fake arguments): dy, x, offsets, out or addresses, interleave block, grid size, stream.

    options: `grouped_wgrad.WgradOptions`.
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
    if options.separate:
        out = make_fake_compact_tensor(Int64, (groups,), assumed_align=8)
    else:
        shape = (groups, rows, cols)
        out = make_fake_compact_tensor(TYPES[options.out], shape, stride_order=(2, 1, 0), assumed_align=16)
    return GroupedWgradSm90(options), (
        operand(rows),
        operand(cols),
        offsets,
        out,
        Int32(1),
        Int32(1),
        make_fake_stream(),
    )
