"""out[rows of g] = epilogue(x̂[rows of g] · Ŵ_gᵀ) for every group g, of E4M3 operands with block scales, on SM90.

Shapes: x [T, C] E4M3 with scales [⌈C/128⌉, ⌈T⌉₄] (1x128), W [G, N, C] E4M3 with scales [G, ⌈N/128⌉, ⌈⌈C/128⌉⌉₄]
(128x128); both are contracted along their contiguous columns, so a dgrad takes the transposed copy of the weights.
offsets [G+1] int32, read on the device. See `fp8_reference`.

FP8 products keep few bits of their sums. So 128 contracted elements are multiplied by themselves, then scaled, both
scales at once, and added in FP32. Two sums of 64 rows x 64 columns take turns: one is multiplied while the other is
added. ptxas keeps that asynchronous because nothing is in flight from one stage to the next.

Tiles of 128 rows x 256, 192 or 128 columns, 64 rows a consumer warpgroup. A tile never spans groups: rows at or past
the group's end are computed from whatever follows and not stored. A gated activation's tile is 128 gate and 128 up
columns.

Every 64 columns have one weight scale for 128 contracted elements, also where gate and up rows meet inside a block of
the stored weight: then they meet at a multiple of 64. In the gradient of such a weight (`halves` = 2) it is the
contraction that crosses blocks; x's are cut in each half, and the second half's products are scaled after 64 elements.

Roles, one CTA per SM, 384 or 512 threads, each role walking the same schedule:
    warp 0      loads x, its scales and W by TMA
    warp 2      zeroes the tail rows of y beside the products, by TMA
    warp 3      zeroes the tail of dprobs' parts
    warps 4-7, 8-11   two consumer warpgroups: products; a product alone they also store
    warps 12-15       what is quantised, they hand over through shared memory (`tile`) to a finishing warpgroup, which
                      works beside the next tile's products: so consumers need not meet over scales that both share

Barriers, named: of each consumer warpgroup and of the finishing one; and for each consumer warpgroup `full`, at which
it arrives and the finishing one waits, and `free`, the other way round, once ahead of the first tile.

The scales of x start at a row that is no multiple of 4, but TMA only reads from 16-byte addresses: 132 of them are
loaded, from the row rounded down. Scales of W come from global memory, those of the next stage ahead of time.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.memory as cutlass_memory
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as sm90
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cute.runtime import make_fake_stream
from cutlass.tensor_utils import LayoutEnum

from cute_kernels.hopper import bulk
from cute_kernels.hopper.configs import CONSUMERS
from cute_kernels.hopper.epilogues import epilogue, quantized
from cute_kernels.hopper.epilogues.quantized_activation import QuantizedActivate
from cute_kernels.hopper.epilogues.quantized_dactivation import QuantizedDifferentiate
from cute_kernels.hopper.epilogues.quantized_kept import QuantizedActivateKept, QuantizedDifferentiateKept
from cute_kernels.hopper.epilogues.store import Store
from cute_kernels.hopper.fp8_configs import BLOCK, HALF_BLOCK, Options
from cute_kernels.hopper.fp8_products import (
    INSTRUCTION_K,
    SCALE_ROWS,
    SCALE_STAGE,
    BlockSums,
    fake_copies,
    fake_gradient,
    fake_padded,
    fake_preact,
    products,
    release,
    scale_rows,
    sixteens,
)
from cute_kernels.hopper.grouped_gemm_kernel import DTYPES, matrix, strided_rows, vector
from cute_kernels.hopper.operand_views import partition, rows_view, weight_view
from cute_kernels.hopper.schedule import locate, seek

FINISHING = 1 + CONSUMERS
"""The finishing warpgroup's number."""


class Walk(NamedTuple):
    """What a role needs to find its tiles: number `first`, and each `step` numbers further."""

    offsets: Any
    groups: Any
    column_tiles: Any
    first: Any
    step: Any


class Ring(NamedTuple):
    """Shared memory of the operands (x, its scales, W as WGMMA reads it, W as boxes); columns of a half, its stages."""

    x: Any
    scales: Any
    w: Any
    w_boxes: Any
    width: Any
    tiles: Any


class Fragments(NamedTuple):
    """What a consumer warpgroup multiplies and where it adds: operands, two sums in turn, the tile's sums."""

    x: Any
    w: Any
    parts: tuple
    sums: Any


class Fp8GroupedGemm:
    """The kernel for one set of options."""

    def __init__(self, options: Options):
        config: Any = options.config
        self.tile_n, self.stages, self.strip, self.pieces = config.tile_n, config.stages, config.strip, config.pieces
        self.chunks = config.chunks
        self.starts = tuple(sum(self.chunks[:number]) for number in range(len(self.chunks)))
        self.registers = config.producer_registers, config.consumer_registers, config.finishing_registers
        self.halves, self.finishes = options.halves, config.finishing_registers > 0
        self.epilogue, self.alone = make_epilogue(options), options.alone
        gated = options.kind == "act" and options.activation is not None and options.activation.is_glu
        self.boxes = 2 if gated else 1
        """W boxes a stage: gate rows and up rows."""
        step = HALF_BLOCK if config.tile_n % BLOCK else BLOCK
        self.scaled = (0, BLOCK, BLOCK + HALF_BLOCK) if options.straddles else tuple(range(0, config.tile_n, step))
        """Columns of a tile at which another scale of the weight may begin: up's are two where blocks straddle."""

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        x_scale: cute.Tensor,
        w: cute.Tensor,
        w_scale: cute.Tensor,
        offsets: cute.Tensor,
        epilogue_args: tuple,
        grid: Int32,
        stream,
    ):
        args = self.epilogue.Args(*epilogue_args)
        tile, box = (BLOCK, self.tile_n, BLOCK), (BLOCK, self.tile_n // self.boxes, BLOCK)
        layout_x = sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, tile, Float8E4M3FN, self.stages)
        layout_w = sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, tile, Float8E4M3FN, self.stages)
        layout_box = sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, box, Float8E4M3FN, self.stages * self.boxes)
        layout_s = cute.make_layout((SCALE_ROWS, 1, self.stages), stride=(1, 0, SCALE_STAGE))
        layout_tile = epilogue.staging_layout(CONSUMERS * self.pieces, BFloat16)
        if const_expr(self.finishes):
            layout_tile = self.epilogue.tile_layout(CONSUMERS)
        load = cpasync.CopyBulkTensorTileG2SOp()
        one = [cute.slice_(layout, (None, None, 0)) for layout in (layout_x, layout_box, layout_s)]
        view = weight_view(w, self.boxes, 0, False, False, False)
        if const_expr(self.halves > 1):
            view = self.contracted_in_halves(w)
        atom_x, tma_x = cpasync.make_tiled_tma_atom(load, rows_view(x, self.halves), one[0], (BLOCK, BLOCK))
        atom_w, tma_w = cpasync.make_tiled_tma_atom(load, view, one[1], (box[1], BLOCK))
        along_rows = cute.make_tensor(
            x_scale.iterator, cute.make_layout((x_scale.shape[1], x_scale.shape[0]), stride=(1, x_scale.shape[1]))
        )
        atom_s, tma_s = cpasync.make_tiled_tma_atom(load, along_rows, one[2], (SCALE_ROWS, 1))
        atom_0, tma_0 = None, None
        if const_expr(not self.finishes):
            atom_0, tma_0 = epilogue.make_sink(args.y, 1)
        elif const_expr(self.epilogue.stores_preact(args)):
            atom_0, tma_0 = self.epilogue.make_sink(args)
        mma = products(self.chunks[0], CONSUMERS)
        bias_values = CONSUMERS * epilogue.BIAS if const_expr(self.epilogue.bias(args) is not None) else 8
        columns = BLOCK * quantized.WARPS * self.epilogue.sides if const_expr(self.finishes) else 4
        sum_values = columns if const_expr(self.finishes and self.epilogue.has_sums) else 4

        @cute.struct
        class Storage:
            ring: cute.struct.MemRange[Int64, self.stages * 2]
            zeros: cute.struct.Align[cute.struct.MemRange[Int32, bulk.ZERO_BYTES // 4], 16]
            bias: cute.struct.Align[cute.struct.MemRange[BFloat16, bias_values], 16]
            maxima: cute.struct.Align[cute.struct.MemRange[Float32, columns], 16]
            sums: cute.struct.Align[cute.struct.MemRange[Float32, sum_values], 16]
            scales: cute.struct.Align[cute.struct.MemRange[Float32, SCALE_STAGE * self.stages], 128]
            x: cute.struct.Align[cute.struct.MemRange[Float8E4M3FN, cute.cosize(layout_x)], 1024]
            w: cute.struct.Align[cute.struct.MemRange[Float8E4M3FN, cute.cosize(layout_w)], 1024]
            tile: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(layout_tile)], 1024]

        self.Storage = Storage
        layouts = (layout_x, layout_w, layout_box, layout_s, layout_tile)
        sources = (atom_x, tma_x, atom_s, tma_s, atom_w, tma_w, atom_0, tma_0)
        self.kernel(*sources, w_scale, offsets, epilogue_args, mma, *layouts).launch(
            grid=[grid, 1, 1],
            block=[128 * (1 + CONSUMERS + self.finishes), 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
        )
        if const_expr(self.finishes and self.epilogue.has_sums):
            BlockSums(self.alone)(args.sums, args.padded, args.dbias, grid, stream)

    def contracted_in_halves(self, w: cute.Tensor):
        """w [G, N, C] as (N, C / 2, 2, G): what is contracted lies in two halves."""
        groups, rows, columns = w.shape
        width = Int64(columns)
        stride = (width, 1, columns // 2, width * rows)
        return cute.make_tensor(w.iterator, cute.make_layout((rows, columns // 2, 2, groups), stride=stride))

    @cute.kernel
    def kernel(
        self,
        atom_x: cute.CopyAtom,
        tma_x: cute.Tensor,
        atom_s: cute.CopyAtom,
        tma_s: cute.Tensor,
        atom_w: cute.CopyAtom,
        tma_w: cute.Tensor,
        atom_0,
        tma_0,
        w_scale: cute.Tensor,
        offsets: cute.Tensor,
        epilogue_args: tuple,
        mma: cute.TiledMma,
        layout_x: cute.ComposedLayout,
        layout_w: cute.ComposedLayout,
        layout_box: cute.ComposedLayout,
        layout_s: cute.Layout,
        layout_tile: cute.ComposedLayout,
    ):
        args = self.epilogue.Args(*epilogue_args)
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group_of_warps = cute.arch.make_warp_uniform(thread // 128)
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        if warp == 0:
            for atom in (atom_x, atom_s, atom_w):
                cpasync.prefetch_descriptor(atom)
        memory = cutlass_memory.SmemAllocator().allocate(self.Storage)
        pipe = pipeline.PipelineTmaAsync.create(
            num_stages=self.stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, 4 * CONSUMERS),
            tx_count=(BLOCK + self.tile_n) * BLOCK + SCALE_ROWS * 4,
            barrier_storage=memory.ring.data_ptr(),
            cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
        )
        ring = Ring(
            memory.x.get_tensor(layout_x.outer, swizzle=layout_x.inner),
            memory.scales.get_tensor(layout_s),
            memory.w.get_tensor(layout_w.outer, swizzle=layout_w.inner),
            memory.w.get_tensor(layout_box.outer, swizzle=layout_box.inner),
            cute.size(tma_w, mode=[1]),
            (cute.size(tma_w, mode=[1]) + BLOCK - 1) // BLOCK,
        )
        shared_tile = memory.tile.get_tensor(layout_tile.outer, swizzle=layout_tile.inner)
        box_n = self.tile_n // self.boxes
        column_tiles = (cute.size(tma_w, mode=[0]) + box_n - 1) // box_n
        walk = Walk(offsets, offsets.shape[0] - 1, column_tiles, cta, ctas)
        barrier = pipeline.NamedBarrier(barrier_id=group_of_warps, num_threads=128)
        sink = epilogue.Sink(atom_0, tma_0)
        if group_of_warps == 0:
            cute.arch.setmaxregister_decrease(self.registers[0])
            if warp == 0:
                x, scales = epilogue.Source(atom_x, tma_x), epilogue.Source(atom_s, tma_s)
                self.produce(pipe, ring, x, scales, epilogue.Source(atom_w, tma_w), walk)
            if warp >= 2:
                self.zero_tail(args, walk, memory.zeros.get_tensor(cute.make_layout(bulk.ZERO_BYTES // 4)), warp)
        if group_of_warps > 0 and group_of_warps < FINISHING:
            cute.arch.setmaxregister_increase(self.registers[1])
            consumer = group_of_warps - 1
            bias = memory.bias.get_tensor(cute.make_layout((epilogue.BIAS, CONSUMERS)))
            room = epilogue.Room(
                shared_tile,
                consumer * (self.epilogue.pieces if const_expr(self.finishes) else self.pieces),
                bias[None, consumer] if const_expr(self.epilogue.bias(args) is not None) else None,
                barrier,
                (sink,),
                None,
                None,
                thread % 128,
                warp % 4 == 0,
            )
            self.consume(pipe, ring, mma, room, args, w_scale, cute.size(tma_w, mode=[0]), walk, consumer)
        if const_expr(self.finishes):  # noqa: SIM102 (traced, then run)
            if group_of_warps == FINISHING:
                if const_expr(self.registers[2] > 128):
                    cute.arch.setmaxregister_increase(self.registers[2])
                else:
                    cute.arch.setmaxregister_decrease(self.registers[2])
                columns = cute.make_layout((BLOCK, quantized.WARPS, self.epilogue.sides))
                desk = quantized.Desk(
                    shared_tile.iterator.toint(),
                    memory.maxima.get_tensor(columns),
                    memory.sums.get_tensor(columns),
                    barrier,
                    sink,
                    thread % 128,
                    warp % 4,
                )
                self.complete(args, walk, shared_tile, desk)

    def full(self, consumer: int):
        """Where a consumer warpgroup tells that it has handed over, and the finishing one waits for that."""
        return pipeline.NamedBarrier(barrier_id=1 + FINISHING + consumer, num_threads=256)

    def free(self, consumer):
        """Where the finishing warpgroup tells that the tile may be overwritten, and a consumer one waits for that."""
        return pipeline.NamedBarrier(barrier_id=1 + FINISHING + CONSUMERS + consumer, num_threads=256)

    def seek(self, walk: Walk, index, group, first):
        """(group, first) of tile `index`; see `schedule`."""
        return seek(walk.offsets, walk.groups, walk.column_tiles, BLOCK, index, group, first)

    def locate(self, walk: Walk, index, group, first):
        """Where tile `index` lies."""
        return locate(walk.offsets, walk.column_tiles, BLOCK, self.strip, index, group, first)

    @cute.jit
    def produce(self, pipe, ring: Ring, x: epilogue.Source, scales: epilogue.Source, w: epilogue.Source, walk: Walk):
        """Warp 0: fill the ring, tile after tile."""
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)
        index, group, first = Int32(walk.first), Int32(0), Int32(0)
        group, first = self.seek(walk, index, group, first)
        while group < walk.groups:
            tile = self.locate(walk, index, group, first)
            tiles_x = cute.local_tile(cute.domain_offset((tile.row, 0, 0), x.tensor), (BLOCK, BLOCK), (0, None, None))
            from_fours = cute.domain_offset((tile.row // 4 * 4, 0), scales.tensor)
            tiles_s = cute.local_tile(from_fours, (SCALE_ROWS, 1), (0, None))
            box = (self.tile_n // self.boxes, BLOCK)
            tiles_w = cute.local_tile(w.tensor[None, None, None, tile.group], box, (tile.column_tile, None, None))
            to_x, from_x = partition(x.atom, ring.x, tiles_x)
            to_s, from_s = partition(scales.atom, ring.scales, tiles_s)
            to_w, from_w = partition(w.atom, ring.w_boxes, tiles_w)
            for half in range_constexpr(self.halves):
                for k in cutlass.range(ring.tiles, unroll=1):
                    pipe.producer_acquire(state)
                    full = pipe.producer_get_barrier(state)
                    cute.copy(x.atom, from_x[None, k, half], to_x[None, state.index], tma_bar_ptr=full)
                    for part in range_constexpr(self.boxes):
                        stage = self.boxes * state.index + part
                        cute.copy(w.atom, from_w[None, k, half + part], to_w[None, stage], tma_bar_ptr=full)
                    block = half * ring.tiles + k
                    cute.copy(scales.atom, from_s[None, block], to_s[None, state.index], tma_bar_ptr=full)
                    state.advance()
            index += walk.step
            group, first = self.seek(walk, index, group, first)
        pipe.producer_tail(state)

    @cute.jit
    def zero_tail(self, args, walk: Walk, zeros, warp):
        """Warps 2 and 3: rows of no group become zero where the host reads them."""
        first, zeroed = walk.offsets[walk.groups], self.epilogue.zeroed(args)
        if warp == 2:
            bulk.clear(zeros)
            for out in [out for out in zeroed if out.element_type.width == 16]:
                bulk.zero_rows(out, first, zeros, walk.first, walk.step)
        else:
            for sums in [out for out in zeroed if out.element_type.width == 32]:
                epilogue.zero_sums(sums, first, walk.first * 32 + cute.arch.lane_idx(), walk.step * 32)

    @cute.jit
    def consume(self, pipe, ring: Ring, mma, room, args, w_scale, width, walk: Walk, consumer):
        """A consumer warpgroup: products of its rows, then what becomes of them, tile after tile. width: W's rows in a
        half.
        """
        slice_of = mma.get_slice(consumer * 128)
        parts = [cute.make_rmem_tensor((max(self.chunks[turn::2]) // 2,), Float32) for turn in range(2)]
        fragments = Fragments(
            mma.make_fragment_A(slice_of.partition_A(ring.x)),
            [self.columns_of(ring.w, start, columns) for start, columns in zip(self.starts, self.chunks, strict=True)],
            tuple(parts),
            cute.make_rmem_tensor((self.tile_n // 2,), Float32),
        )
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        index, group, first = Int32(walk.first), Int32(0), Int32(0)
        group, first = self.seek(walk, index, group, first)
        while group < walk.groups:
            tile = self.locate(walk, index, group, first)
            tile = tile._replace(row=tile.row + consumer * epilogue.ROWS)
            held = self.epilogue.load(args, tile, room)
            scales = self.scales_of(w_scale, tile, width)
            scale_row = consumer * epilogue.ROWS + room.row() + tile.row % 4
            state = self.multiply(pipe, ring, state, fragments, scales, scale_row)
            if const_expr(self.finishes):
                self.epilogue.hand_over(args, held, fragments.sums, tile, room, self.free(consumer))
                self.full(consumer).arrive()
            else:
                epilogue.wait_sent(room.leads, 0)
                room.barrier.arrive_and_wait()  # all pieces are free
                self.epilogue.finish(args, held, fragments.sums, tile, room, None)
            index += walk.step
            group, first = self.seek(walk, index, group, first)
        if const_expr(not self.finishes):
            epilogue.wait_sent(room.leads, 0)

    @cute.jit
    def complete(self, args, walk: Walk, shared_tile, desk):
        """The finishing warpgroup: what consumers hand over, tile after tile."""
        index, group, first = Int32(walk.first), Int32(0), Int32(0)
        group, first = self.seek(walk, index, group, first)
        for consumer in range_constexpr(CONSUMERS):
            self.free(consumer).arrive()
        while group < walk.groups:
            tile = self.locate(walk, index, group, first)
            token = Int32(0)
            if const_expr(args.padded is not None):
                token = args.padded[tile.group] + tile.row - walk.offsets[tile.group]
            for consumer in range_constexpr(CONSUMERS):
                self.full(consumer).arrive_and_wait()
            now = desk._replace(thread=Int32(epilogue.here(desk.thread)))  # addresses kept over tiles would spill
            self.epilogue.finish(args, tile, token, shared_tile, now)
            for consumer in range_constexpr(CONSUMERS):
                self.free(consumer).arrive()
            index += walk.step
            group, first = self.seek(walk, index, group, first)

    def scales_of(self, w_scale: cute.Tensor, tile, width):
        """Rows of w's scales, one for each of `scaled` columns of the tile; past the last row, the last."""
        last, rows = w_scale.shape[1] - 1, []
        for column in self.scaled:
            half, inside = divmod(column, self.tile_n // self.boxes)
            row = half * width + tile.column_tile * (self.tile_n // self.boxes) + inside
            rows.append(w_scale[tile.group, cutlass.min(row // BLOCK, last), None])
        return rows

    def first_scale(self, ring: Ring, half: int, k):
        """The block of the weight's columns in which stage k of a half begins, and the last block of all."""
        return half * (ring.width // BLOCK) + k, (self.halves * ring.width + BLOCK - 1) // BLOCK - 1

    def read_scales(self, scales, ring: Ring, half: int, k, ahead: cute.Tensor):
        """The weight's scales of stage k of a half into `ahead`: those where it begins, and those where it ends."""
        block, last = self.first_scale(ring, half, k)
        for step in range(1 + half):
            for index, row in enumerate(scales):
                ahead[step * len(scales) + index] = row[cutlass.min(block + step, last)]

    @cute.jit
    def multiply(self, pipe, ring: Ring, state, fragments: Fragments, scales: list, scale_row):
        """fragments.sums = the products of one tile."""
        fragments.sums.fill(0.0)
        for half in range_constexpr(self.halves):
            ahead = cute.make_rmem_tensor((len(scales) * (1 + half),), Float32)
            self.read_scales(scales, ring, half, 0, ahead)
            for k in cutlass.range(ring.tiles, unroll=1):
                factors = [ahead[i] for i in range(cute.size(ahead))]
                self.read_scales(scales, ring, half, k + 1, ahead)
                pipe.consumer_wait(state)
                of_rows = [ring.scales[scale_row + 8 * step, 0, state.index] for step in range(2)]
                steps = self.steps(half, len(scales))
                self.issue(fragments, 0, steps[0], state.index)
                for number, (start, columns, _, factor) in enumerate(steps):
                    if const_expr(number + 1 < len(steps)):
                        self.issue(fragments, number + 1, steps[number + 1], state.index)
                        warpgroup.wait_group(1)
                    else:
                        warpgroup.wait_group(0)
                        release(pipe, state)
                        state.advance()
                    add = [[s * factors[factor + index] for s in of_rows] for index in range(len(scales))]
                    part = fragments.parts[number % 2]
                    for i in range_constexpr(columns // 2):
                        column, at = start + 8 * (i // 4), start // 2 + i
                        scale = sum(column >= first for first in self.scaled[1:])
                        fragments.sums[at] = fragments.sums[at] + part[i] * add[scale][i // 2 % 2]
        return state

    def steps(self, half: int, scales: int):
        """(first column, columns, its instructions, its first factor) of each product of a stage.

        In a second half each chunk is two products, before and after the 64 elements where blocks of the weight meet.
        """
        instructions = range(BLOCK // INSTRUCTION_K)
        chunks = tuple(zip(self.starts, self.chunks, strict=True))
        if half == 0:
            return [(*chunk, instructions, 0) for chunk in chunks]
        cut = len(instructions) // 2
        parts = (instructions[:cut], instructions[cut:])
        return [(*chunk, part, n * scales) for chunk in chunks for n, part in enumerate(parts)]

    def columns_of(self, w: cute.Tensor, start: int, columns: int):
        """Columns start.. of the product: rows of w in shared memory, of all stages, as WGMMA reads them."""
        one = sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, (BLOCK, columns, BLOCK), Float8E4M3FN, 1).outer
        stage = self.tile_n * BLOCK
        layout = cute.make_layout(
            (one.shape[0], one.shape[1], self.stages), stride=(one.stride[0], one.stride[1], stage)
        )
        mma = products(columns, CONSUMERS)
        return mma.make_fragment_B(mma.get_slice(0).partition_B(cute.make_tensor(w.iterator + start * BLOCK, layout)))

    def issue(self, fragments: Fragments, number: int, step, stage):
        """One product in flight, into the sums whose turn it is."""
        start, columns, instructions, _ = step
        mma = products(columns, CONSUMERS)
        atom = cute.make_mma_atom(mma.op)  # a fresh one: its flag must not leak across traced loops
        target = cute.make_tensor(
            fragments.parts[number % 2].iterator, mma.get_slice(0).partition_shape_C((BLOCK, columns))
        )
        w = fragments.w[self.starts.index(start)]
        warpgroup.fence()
        for k in instructions:
            atom.set(warpgroup.Field.ACCUMULATE, k != instructions[0])
            cute.gemm(atom, target, fragments.x[None, None, k, stage], w[None, None, k, stage], target)
        warpgroup.commit_group()


def make_epilogue(options: Options):
    """The epilogue object that the options ask for."""
    config: Any = options.config
    cut = epilogue.Cut(config.tile_n, 1)
    if options.kind == "store":
        return Store(cut, config.pieces, zero_tail=True)
    if options.kind == "act":
        activate = QuantizedActivateKept if options.quantized_preact else QuantizedActivate
        return activate(options.activation, cut, options.power_of_two)
    differentiate = QuantizedDifferentiateKept if options.quantized_preact else QuantizedDifferentiate
    return differentiate(options.activation, cut, options.power_of_two, options.has_dbias)


def build(options: Options):
    """(jit function, fake arguments) of the kernel for `options`."""
    rows, columns, contracted, groups = cute.sym_int(), sixteens(), sixteens(), cute.sym_int()
    x, w = strided_rows(Float8E4M3FN, rows, contracted), matrix(Float8E4M3FN, groups, columns, contracted)
    w_scale = matrix(Float32, groups, cute.sym_int(), cute.sym_int(divisibility=4))
    offsets, outputs = vector(Int32, cute.sym_int()), fake_epilogue(options, rows, columns)
    return Fp8GroupedGemm(options), (x, scale_rows(), w, w_scale, offsets, outputs, Int32(1), make_fake_stream())


def fake_epilogue(options: Options, rows, columns) -> tuple:
    """The epilogue's arguments, in the order of its Args."""
    factor = vector(DTYPES[options.factor], rows) if options.factor else None
    bias = matrix(BFloat16, cute.sym_int(), columns) if options.has_bias else None
    if options.kind == "store":
        return matrix(BFloat16, rows, columns), bias, factor
    width = sixteens()  # of what is quantised
    if options.kind == "dact":
        return fake_gradient(options, rows, width)
    preact, scales = fake_preact(options, rows, columns) if options.keeps else (None, ())
    return (*fake_copies(options, rows, width), preact, bias, factor, fake_padded(options), *scales)
