"""dW_g = dy_gᵀ x_g for every group g: the weight gradient of a grouped linear on SM90.

Shapes: dy [T, N], x [T, K] bf16 or fp16, rows contiguous (any row stride that is a multiple of 8 elements); offsets
[G+1] int32; out [G, N, K] contiguous bf16, fp16 or fp32, or the lowest of G separate [N, K] tensors and an int64 table
of their addresses. N and K are multiples of 8. Rows outside a group never reach its sums, whatever they hold. An empty
group gives exact zeros, or, when accumulating, is left alone. With `interleaved`, dy's columns lie as [gate | up] and
the row of a gradient goes to blocks of `block` gate rows, then `block` up rows.

Numerics: FP32 sums, rounded once to out's type; accumulating adds that rounded value to what is there, in FP32, and
rounds again. Each element is written once per launch, so results are the same bits run after run. Equals
`reference.grouped_wgrad`.

Ragged loads: the summed dimension is tokens, so both operands must read zero past a group's end (0 x NaN is NaN).
Each is viewed with two extra dimensions whose strides cancel modulo 2^64 (`ragged`); a group then begins at a
coordinate such that its end is the end of the dimension, and the TMA unit fills in zeros. No descriptor is rewritten.
(Public idea: Triton's ragged TMA, QuACK.) Separate outputs are reached in a like way: one descriptor starts at the
lowest of them and has a dimension of 16-byte steps.

Roles, 384 threads: warps 0 to 3 and 4 to 7 are two warpgroups that each multiply and store whole tiles of 128 x 192,
in turn; warp 8 issues TMA, and its warpgroup gives registers away.
Pipelines: operand ring, producer -> 4 consumer warps (of the warpgroup whose tile it is; in a cluster of 2, also of
the same warpgroup of the other CTA, since half of x's tile comes from there). Turns: two named barriers of 256
threads. Staging: each warp has 16 rows of its warpgroup's slots to itself.
Schedule: persistent; cluster c takes tiles c, c + clusters, ..., or, dynamic, whichever is next when it asks (see
`tickets`); its warpgroups take them alternately, and each steps the ring over the other's k blocks. In a group tiles go
in strips (`place`), and each group starts a column later than the one before, so that narrow last columns do not always
meet the same CTA: those are multiplied at a width of 128 or 64.
Timeline of a warpgroup: wait for the turn; per k block wait for the stage, 8 WGMMA, release the stage before; pass the
turn on while the last WGMMA still run; then, while the other warpgroup multiplies, round and send the tile, 16 rows by
128 bytes a warp at a time. Accumulating, the old values are copied into the slots ahead (cp.async; the first before the
turn), added to, and sent from there. The producer fills the ring for the next tiles meanwhile.

Measured on one H200 (2026-11-30, BF16 operands, L2 flushed, variants in turn; milliseconds). (G, T, N, K):
    A (8, 32768, 4096, 7168)    B (32, 32768, 5760, 2880)    C (128, 65536, 1536, 2048)
    D (8, 32768, 7168, 2048)    E (32, 32768, 2880, 2880)    F (128, 65536, 2048, 768)
                                A      B      C      D      E      F
    BF16 out                    2.742  1.519  0.585  1.396  0.744  0.301
    QuACK 0.6.5, untuned        2.737  1.578  0.583  1.406  0.763  0.299
    torch._grouped_mm           2.880  2.049  0.819  1.468  1.010  0.402
    BF16 out, interleaved 32    2.786  1.632  0.627  1.412  0.783  0.320
    FP32 out                    2.722  1.566  0.710  1.466  0.828  0.366
    added to FP32               2.850  1.950  1.070  1.524  1.013  0.545
    its bytes at 4.2 TB/s       0.623  1.146  0.879  0.368  0.595  0.471
Slower: both warpgroups on one 128 x 256 tile, its epilogue exposed (3 to 23 %); reductions in L2 (`red`, TMA
reduce-add), which pass no more than about 1.1 TB/s here (C: 1.43); row tiles fastest without strips (D: 2 %); two or
three staging slots and 4 stages (C: 3 to 9 %): stores then come in bursts and hold up the loads.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.memory
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int16, Int32, Int64, const_expr, range_constexpr
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor
from cutlass.cutlass_dsl import T, dsl_user_op
from cutlass.tensor_utils import LayoutEnum

from cute_kernels.hopper import tickets
from cute_kernels.hopper.grouped_wgrad_configs import SLOT_ROW_BYTES, TILE_COLUMNS, TILE_ROWS, TILE_TOKENS

TILE_M, TILE_N, TILE_K = TILE_ROWS, TILE_COLUMNS, TILE_TOKENS
WIDTHS = (192, 128, 64)  # at which a tile is multiplied
BOX = 64  # columns of x in one TMA box: a 128-byte swizzle atom
THREADS, WARPS = 384, 4  # of a CTA; of a warpgroup
TURN, TURN_THREADS = 1, 256  # barrier of the first warpgroup's turn, the second's follows
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 24, 240
VECTOR_BYTES = 16  # what a lane copies at once
LANES = SLOT_ROW_BYTES // VECTOR_BYTES  # that copy a row together
STEPS = 16 * LANES // 32  # in which a warp copies 16 rows
FAR = 1 << 30  # extent of a ragged dimension; more than any row count
UNITS, FAR_UNITS = 1 << 30, 1 << 10  # of 16 bytes in two dimensions that reach separate outputs

TYPES = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16, "float32": cutlass.Float32}


@dsl_user_op
def anew(value: Int32, *, loc=None, ip=None):
    """`value`, of which the compiler does not know that it is the same: what follows from it is computed again here."""
    operand = Int32(value).ir_value(loc=loc, ip=ip)
    return Int32(
        llvm.inline_asm(
            T.i32(), [operand], "mov.b32 $0, $1;", "=r,r", has_side_effects=True, is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
        )
    )  # fmt: skip


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


class Target(NamedTuple):
    """Where results go.

    out: (stacked buffer,) or (lowest of separate ones, their addresses). atom, tensor: for TMA, or None.
    block: rows of an interleaved block.
    """

    out: Any
    atom: Any
    tensor: Any
    block: Any


class Product(NamedTuple):
    """A multiplication of one width: WGMMA operation, operands by (k step, stage), and its part of the sums."""

    op: Any
    a: Any
    b: Any
    acc: Any


class GroupedWgradSm90:
    """Static facts -> the kernel; see the module's text."""

    def __init__(self, options):
        config = options.config
        self.cluster, self.stages, self.slots = config.cluster, config.stages, config.slots
        self.by_tma = config.by_tma
        self.boxes = TILE_N // BOX
        self.box_k = TILE_K // self.cluster
        self.element = TYPES[options.element]
        self.out = TYPES[options.out]
        self.accumulate, self.dynamic = options.accumulate, options.dynamic
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
        """K blocks of a tile, none past the last. An empty group has one, all zeros, unless nothing is to be added."""
        blocks = Int32(0)
        if index < self.tiles(walk):
            group = index // self.tiles_of_group(walk)
            blocks = (walk.offsets[group + 1] - walk.offsets[group] + TILE_K - 1) // TILE_K
            if const_expr(not self.accumulate):
                blocks = cutlass.max(blocks, 1)
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
                if const_expr(self.accumulate):  # noqa: SIM102 (traced, then run)
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
                    self.send(slot, target, walk, tile.group, row, col, thread)
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
                        if const_expr(again == wide):
                            following = self.lines(target, walk, tile, 1, thread)
                        self.fetch(slots, following if again >= wide else lines, target, walk, tile, again, thread)
                    cute.arch.cp_async_commit_group()
            if const_expr(piece == wide - 1):
                lines = following if const_expr(self.accumulate) else self.lines(target, walk, tile, 1, thread)

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
        if const_expr(self.by_tma and not self.accumulate):
            return []  # TMA alone touches the rows
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
    return GroupedWgradSm90(options), (
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
