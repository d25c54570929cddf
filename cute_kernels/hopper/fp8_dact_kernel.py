"""dpreact = (dŷ[rows of g] · Ŵ2_gᵀ · p) ∂f(preact) for every group g, quantised in rows and transposed, on SM90.

Operands as in `fp8_grouped_gemm_kernel`: dy [T, H], W [G, I, H] (the transposed copy) E4M3 with block scales,
contracted along their contiguous columns; I a multiple of 64. Offsets are read on the device.

Scales of a result need all 128 rows and 128 columns of a block. So a tile is 128 x 128 and belongs to one consumer
warpgroup, which makes it, quantises it, and never waits for another. A CTA has two, each with a ring and a warp that
fills it: one multiplies while the other quantises. Rows at or past a group's end are computed from whatever follows and
not stored.

128 contracted elements are multiplied by themselves, then scaled, both scales at once, and added in FP32: 64 rows x 128
columns at a time, for which instructions read less shared memory than for half the columns. Nothing of a warpgroup's
own overlaps with that; the other one's products do.

Rows of W are loaded so that what a thread holds of a row are eight neighbours in every 32 columns: of 32 rows, row
8 q + 2 h + e goes to place 8 h + 2 q + e.

The saved pre-activation follows the operands through the ring: a stage holds 64 rows of both halves (or all rows where
there is but one), in boxes of 64 bytes a row; of E4M3 the second half of each is not used, so that all stages have the
same bytes. Values are put aside there, so those stages are released after the epilogue. Read from global memory row by
row instead, each row waited some 3000 cycles (milliseconds on one H200, 2026-11-30, variants in turn; A dsv3_ep32, B
gptoss_ep4, C qwen3_30b of docs/performance.md):
                                                            A      B      C
    this kernel                                             0.997  0.756  0.329
    products of 64 x 64 in turn, one added meanwhile        1.010  0.755  0.332
    the pre-activation from global memory, 64 x 64          1.032  0.809  0.370
    the same, 64 x 128 (another run)                        1.020  0.818  0.370

Roles, one CTA per SM, 384 threads, each role walking the same schedule:
    warps 0, 1  load dy, its scales and W, then the pre-activation by TMA, each for its warpgroup; L2 fetches the latter
                when a tile begins
    warp 3      zeroes the tail of dprobs' parts
    warps 4-7, 8-11   two consumer warpgroups: products, then the epilogue
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
from cutlass.cutlass_dsl import dsl_user_op
from cutlass.tensor_utils import LayoutEnum

from cute_kernels.hopper.asm import asm
from cute_kernels.hopper.configs import CONSUMERS
from cute_kernels.hopper.epilogues import eights, epilogue
from cute_kernels.hopper.epilogues.eights_dactivation import Differentiate
from cute_kernels.hopper.epilogues.quantized_kept import DifferentiateKept
from cute_kernels.hopper.fp8_configs import BLOCK, HALF_BLOCK, Options
from cute_kernels.hopper.fp8_products import (
    INSTRUCTION_K,
    SCALE_ROWS,
    SCALE_STAGE,
    BlockSums,
    fake_gradient,
    products,
    release,
    scale_rows,
    sixteens,
)
from cute_kernels.hopper.grouped_gemm_kernel import matrix, strided_rows, vector
from cute_kernels.hopper.operand_views import partition, rows_view
from cute_kernels.hopper.schedule import Tile, locate, seek

W_BOXES = 2
"""W boxes of 64 rows in a stage."""
STAGE_BYTES = BLOCK * BLOCK
"""Of one operand in a stage."""
ROW_BLOCKS = BLOCK // HALF_BLOCK
"""Products of a stage: 64 rows each."""


class Walk(NamedTuple):
    """What a role needs to find its tiles: number `first`, and each `step` numbers further; columns of a group."""

    offsets: Any
    groups: Any
    columns: Any
    first: Any
    step: Any

    def column_tiles(self):
        """Computed anew each time: kept over the epilogue, it would spill."""
        return (Int32(epilogue.here(self.columns)) + BLOCK - 1) // BLOCK


class Ring(NamedTuple):
    """Shared memory of both rings' operands (dy, its scales, W as WGMMA reads it, W as boxes; in dy's and in W's place
    boxes of the pre-activation); stages of a tile's operands.
    """

    x: Any
    scales: Any
    w: Any
    w_boxes: Any
    inputs: tuple
    tiles: Any


class Fragments(NamedTuple):
    """What a warpgroup multiplies and where it adds: operands, the sums of a product, the tile's sums."""

    x: Any
    w: Any
    part: Any
    sums: Any


@dsl_user_op
def prefetch(address, size, wanted, *, loc=None, ip=None):
    """L2 fetches `size` bytes from there on if `wanted`; both are multiples of 16."""
    operands = Int64(address), Int32(size), Int32(wanted)
    text = "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$0], $1; }"
    asm(None, operands, text, "l,r,r", loc, ip, effects=True)


def in_eights(w: cute.Tensor):
    """w [G, N, C] as ((2, 4, 4, G N / 32), C): rows in the order in which they are loaded."""
    groups, rows, columns = w.shape
    width = Int64(columns)
    shape = ((2, 4, 4, groups * (rows // 32)), columns)
    return cute.make_tensor(w.iterator, cute.make_layout(shape, stride=((width, 8 * width, 2 * width, 32 * width), 1)))


class Fp8GroupedDact:
    """The kernel for one set of options."""

    def __init__(self, options: Options):
        config = options.config
        self.stages, self.strip = config.stages, config.strip
        self.registers = config.producer_registers, config.consumer_registers
        differentiate = DifferentiateKept if options.quantized_preact else Differentiate
        self.epilogue = differentiate(options.activation, options.power_of_two, options.has_dbias)
        self.alone = options.alone
        self.preact = Float8E4M3FN if options.quantized_preact else BFloat16
        self.box_columns = eights.BOX_ROW_BYTES * 8 // self.preact.width

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
        args, stages = self.epilogue.Args(*epilogue_args), self.stages * CONSUMERS
        tile, box = (BLOCK, BLOCK, BLOCK), (BLOCK, HALF_BLOCK, BLOCK)
        layout_x = sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, tile, Float8E4M3FN, stages)
        layout_w = sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, tile, Float8E4M3FN, stages)
        layout_box = sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, box, Float8E4M3FN, stages * W_BOXES)
        layout_s = cute.make_layout((SCALE_ROWS, 1, stages), stride=(1, 0, SCALE_STAGE))
        load = cpasync.CopyBulkTensorTileG2SOp()
        one = [cute.slice_(layout, (None, None, 0)) for layout in (layout_x, layout_box, layout_s)]
        atom_x, tma_x = cpasync.make_tiled_tma_atom(load, rows_view(x, 1), one[0], (BLOCK, BLOCK))
        atom_w, tma_w = cpasync.make_tiled_tma_atom(load, in_eights(w), one[1], (HALF_BLOCK, BLOCK))
        along_rows = cute.make_tensor(
            x_scale.iterator, cute.make_layout((x_scale.shape[1], x_scale.shape[0]), stride=(1, x_scale.shape[1]))
        )
        atom_s, tma_s = cpasync.make_tiled_tma_atom(load, along_rows, one[2], (SCALE_ROWS, 1))

        box_p = cute.make_layout((HALF_BLOCK, self.box_columns), stride=(self.box_columns, 1))
        view = rows_view(args.preact, self.epilogue.halves)
        atom_p, tma_p = cpasync.make_tiled_tma_atom(load, view, box_p, (HALF_BLOCK, self.box_columns))

        @cute.struct
        class Storage:
            rings: cute.struct.MemRange[Int64, stages * 2]
            scales: cute.struct.Align[cute.struct.MemRange[Float32, SCALE_STAGE * stages], 128]
            rooms: cute.struct.Align[cute.struct.MemRange[Float8E4M3FN, CONSUMERS * self.epilogue.memory.size], 128]
            x: cute.struct.Align[cute.struct.MemRange[Float8E4M3FN, cute.cosize(layout_x)], 1024]
            w: cute.struct.Align[cute.struct.MemRange[Float8E4M3FN, cute.cosize(layout_w)], 1024]

        self.Storage = Storage
        sources = atom_x, tma_x, atom_s, tma_s, atom_w, tma_w, atom_p, tma_p
        layouts = layout_x, layout_w, layout_box, layout_s
        self.kernel(*sources, w.shape[1], w_scale, offsets, epilogue_args, *layouts).launch(
            grid=[grid, 1, 1], block=[128 * (1 + CONSUMERS), 1, 1], min_blocks_per_mp=1, stream=stream
        )
        if const_expr(self.epilogue.has_sums):
            BlockSums(self.alone)(args.sums, args.padded, args.dbias, grid, stream)

    @cute.kernel
    def kernel(
        self,
        atom_x: cute.CopyAtom,
        tma_x: cute.Tensor,
        atom_s: cute.CopyAtom,
        tma_s: cute.Tensor,
        atom_w: cute.CopyAtom,
        tma_w: cute.Tensor,
        atom_p: cute.CopyAtom,
        tma_p: cute.Tensor,
        width: Int32,
        w_scale: cute.Tensor,
        offsets: cute.Tensor,
        epilogue_args: tuple,
        layout_x: cute.ComposedLayout,
        layout_w: cute.ComposedLayout,
        layout_box: cute.ComposedLayout,
        layout_s: cute.Layout,
    ):
        args = self.epilogue.Args(*epilogue_args)
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group_of_warps = cute.arch.make_warp_uniform(thread // 128)
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        if warp == 0:
            for atom in (atom_x, atom_s, atom_w, atom_p):
                cpasync.prefetch_descriptor(atom)
        memory = cutlass_memory.SmemAllocator().allocate(self.Storage)
        pipe = pipeline.PipelineTmaAsync.create(
            num_stages=self.stages * CONSUMERS,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, 4),
            tx_count=2 * STAGE_BYTES + SCALE_ROWS * 4,
            barrier_storage=memory.rings.data_ptr(),
            cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
        )
        ring = Ring(
            memory.x.get_tensor(layout_x.outer, swizzle=layout_x.inner),
            memory.scales.get_tensor(layout_s),
            memory.w.get_tensor(layout_w.outer, swizzle=layout_w.inner),
            memory.w.get_tensor(layout_box.outer, swizzle=layout_box.inner),
            tuple(self.boxes_in(area) for area in (memory.x, memory.w)),
            # Of a loop that may not run the compiler keeps no state in uniform registers.
            cutlass.max((cute.size(tma_x, mode=[1]) + BLOCK - 1) // BLOCK, 1),
        )
        groups = offsets.shape[0] - 1
        if group_of_warps == 0:
            cute.arch.setmaxregister_decrease(self.registers[0])
            if warp < CONSUMERS:
                walk = Walk(offsets, groups, width, cta + warp * ctas, ctas * CONSUMERS)
                pairs = (atom_x, tma_x), (atom_s, tma_s), (atom_w, tma_w), (atom_p, tma_p)
                sources = [epilogue.Source(*pair) for pair in pairs]
                self.produce(pipe, ring, sources, args.preact, width, walk, warp * self.stages)
            if warp == 3:
                for sums in self.epilogue.zeroed(args):
                    epilogue.zero_sums(sums, offsets[groups], cta * 32 + cute.arch.lane_idx(), ctas * 32)
        if group_of_warps > 0:
            cute.arch.setmaxregister_increase(self.registers[1])
            consumer = group_of_warps - 1
            walk = Walk(offsets, groups, width, cta + consumer * ctas, ctas * CONSUMERS)
            room = eights.Room(
                memory.rooms.data_ptr().toint() + consumer * self.epilogue.memory.size,
                pipeline.NamedBarrier(barrier_id=group_of_warps, num_threads=128),
                thread % 128,
            )
            self.consume(pipe, ring, room, args, w_scale, cute.size(tma_x, mode=[1]), walk, consumer * self.stages)

    def boxes_in(self, area):
        """An operand's stages, as boxes of the pre-activation."""
        shape = HALF_BLOCK, self.box_columns, eights.BOXES // 2 * self.stages * CONSUMERS
        layout = cute.make_layout(shape, stride=(self.box_columns, 1, HALF_BLOCK * self.box_columns))
        return cute.make_tensor(cute.recast_ptr(area.data_ptr(), dtype=self.preact), layout)

    def seek(self, walk: Walk, index, group, first):
        """(group, first) of tile `index`; see `schedule`."""
        return seek(walk.offsets, walk.groups, walk.column_tiles(), BLOCK, index, group, first)

    def locate(self, walk: Walk, index, group, first):
        """Where tile `index` lies."""
        return locate(walk.offsets, walk.column_tiles(), BLOCK, self.strip, index, group, first)

    def based(self, state, base):
        """A state of one ring as one of both, of which its own begins at stage `base`."""
        return pipeline.PipelineState(self.stages * CONSUMERS, state.count, base + state.index, state.phase)

    @cute.jit
    def produce(self, pipe, ring: Ring, sources: list, preact: cute.Tensor, width, walk: Walk, base):
        """Warps 0 and 1: fill the ring, tile after tile."""
        x, scales, w, p = sources
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)
        index, group, first = Int32(walk.first), Int32(0), Int32(0)
        group, first = self.seek(walk, index, group, first)
        while group < walk.groups:
            tile = self.locate(walk, index, group, first)
            tiles_x = cute.local_tile(cute.domain_offset((tile.row, 0, 0), x.tensor), (BLOCK, BLOCK), (0, None, 0))
            from_fours = cute.domain_offset((tile.row // 4 * 4, 0), scales.tensor)
            tiles_s = cute.local_tile(from_fours, (SCALE_ROWS, 1), (0, None))
            tiles_w = cute.local_tile(w.tensor, (HALF_BLOCK, BLOCK), (None, None))
            to_x, from_x = partition(x.atom, ring.x, tiles_x)
            to_s, from_s = partition(scales.atom, ring.scales, tiles_s)
            to_w, from_w = partition(w.atom, ring.w_boxes, tiles_w)
            box = tile.group * (width // HALF_BLOCK) + W_BOXES * tile.column_tile
            self.prefetch(preact, tile, width)
            for k in cutlass.range(ring.tiles, unroll=1):
                here = self.based(state, base)
                pipe.producer_acquire(here)
                full = pipe.producer_get_barrier(here)
                cute.copy(x.atom, from_x[None, k], to_x[None, here.index], tma_bar_ptr=full)
                for half in range_constexpr(W_BOXES):
                    cute.copy(
                        w.atom, from_w[None, box + half, k], to_w[None, W_BOXES * here.index + half], tma_bar_ptr=full
                    )
                cute.copy(scales.atom, from_s[None, k], to_s[None, here.index], tma_bar_ptr=full)
                state.advance()
            for number in range_constexpr(self.epilogue.halves):
                here = self.based(state, base)
                pipe.producer_acquire(here)
                full = pipe.producer_get_barrier(here)
                self.load_inputs(p, ring, tile, number, here.index, full)
                # scales again: every stage has the same bytes
                cute.copy(scales.atom, from_s[None, 0], to_s[None, here.index], tma_bar_ptr=full)
                state.advance()
            index += walk.step
            group, first = self.seek(walk, index, group, first)

    def load_inputs(self, p: epilogue.Source, ring: Ring, tile, number: int, stage, full):
        """The boxes of the pre-activation of a tile's stage `number` of them."""
        for box in range(eights.BOXES):
            rows, half, span = eights.place_of_box(number, box, self.epilogue.halves)
            corner = cute.domain_offset((tile.row, tile.column_tile * BLOCK + span * eights.SPAN, 0), p.tensor)
            tiles = cute.local_tile(corner, (HALF_BLOCK, self.box_columns), (None, 0, None))
            operand, inside = divmod(box, eights.BOXES // 2)
            to, origin = partition(p.atom, ring.inputs[operand], tiles)
            there = to[None, eights.BOXES // 2 * stage + inside]
            cute.copy(p.atom, origin[None, rows, half], there, tma_bar_ptr=full)

    def prefetch(self, preact: cute.Tensor, tile, width):
        """L2 fetches the tile's pre-activation, a row of a half a lane at a time."""
        column = tile.column_tile * BLOCK
        size = cutlass.min(width - column, BLOCK) * (preact.element_type.width // 8)
        for half in range(self.epilogue.halves):
            for step in range(BLOCK // 32):
                row = tile.row + step * 32 + cute.arch.lane_idx()
                prefetch(eights.place(preact, row, half * width + column), size, row < tile.end)

    @cute.jit
    def consume(self, pipe, ring: Ring, room, args, w_scale, contracted, walk: Walk, base):
        """A consumer warpgroup: every other tile of the CTA, its products, then what becomes of them."""
        mma = products(BLOCK)
        slice_of = mma.get_slice(0)
        sums = cute.make_rmem_tensor((BLOCK,), Float32)
        fragments = Fragments(
            mma.make_fragment_A(slice_of.partition_A(ring.x)),
            mma.make_fragment_B(slice_of.partition_B(ring.w)),
            cute.make_rmem_tensor(slice_of.partition_shape_C((HALF_BLOCK, BLOCK)), Float32),
            sums,
        )
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        index, group, first = Int32(walk.first), Int32(0), Int32(0)
        group, first = self.seek(walk, index, group, first)
        while group < walk.groups:
            tile = self.locate(walk, index, group, first)
            scales = w_scale[tile.group, tile.column_tile, None]
            eights.put_record(room, 0, tile)
            token = Int32(0)
            if const_expr(args.padded is not None):
                token = args.padded[tile.group] + tile.row - walk.offsets[tile.group]
            eights.put_record(room, 1, (index, group, first, token))
            scale_row = room.row(0) + tile.row % 4
            state = self.multiply(pipe, ring, state, fragments, scales, contracted, scale_row, base)
            tile = Tile(*eights.record(room, 0))
            stages, state = self.following(state, base)
            self.epilogue.finish(args, sums, tile, room._replace(inputs=self.inputs_in(pipe, ring, stages)))
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_warp()
            for stage in stages:
                release(pipe, stage)
            index, group, first, _ = eights.record(room, 1)
            index += walk.step
            group, first = self.seek(walk, index, group, first)

    def following(self, state, base):
        """(the next states, of stages that hold a tile's pre-activation; the one after them)."""
        found = []
        for _ in range(self.epilogue.halves):
            found.append(self.based(state, base))
            state = state.clone()
            state.advance()
        return found, state

    def inputs_in(self, pipe, ring: Ring, stages: list):
        """What the epilogue has to know of them."""
        first, distance = ring.x.iterator.toint(), self.stages * CONSUMERS * STAGE_BYTES  # W's stages come after dy's
        return [
            eights.Inputs(first + stage.index * STAGE_BYTES, distance, lambda stage=stage: pipe.consumer_wait(stage))
            for stage in stages
        ]

    @cute.jit
    def multiply(self, pipe, ring: Ring, state, fragments: Fragments, scales, contracted, scale_row, base):
        """fragments.sums = the products of a tile."""
        fragments.sums.fill(0.0)
        last_block = (Int32(epilogue.here(contracted)) + BLOCK - 1) // BLOCK - 1
        for k in cutlass.range(ring.tiles, unroll=1):
            factor = scales[cutlass.min(k, last_block)]
            here = self.based(state, base)
            pipe.consumer_wait(here)
            rows = [ring.scales[scale_row + eights.row_step(index), 0, here.index] for index in range(eights.ROWS)]
            for block, two in enumerate((rows[:2], rows[2:])):
                self.issue(fragments, block, here.index)
                warpgroup.wait_group(0)
                if const_expr(block + 1 == ROW_BLOCKS):
                    release(pipe, here)
                    state.advance()
                self.promote(fragments, block, [scale * factor for scale in two])
        return state

    def promote(self, fragments: Fragments, block: int, factors: list):
        """The tile's sums += 64 rows' product, scaled."""
        for i in range(BLOCK // 2):
            at = block * HALF_BLOCK + i
            fragments.sums[at] = fragments.sums[at] + fragments.part[i] * factors[i // 2 % 2]

    def issue(self, fragments: Fragments, block: int, stage):
        """64 rows' product in flight."""
        atom = cute.make_mma_atom(products(BLOCK).op)  # a fresh one: its flag must not leak across traced loops
        x, w = fragments.x[None, block, None, stage], fragments.w[None, 0, None, stage]
        x, w = (
            cute.make_tensor(
                t.iterator, cute.make_layout((t.shape[0], 1, t.shape[1]), stride=(t.stride[0], 0, t.stride[1]))
            )
            for t in (x, w)
        )
        warpgroup.fence()
        for k in range(BLOCK // INSTRUCTION_K):
            atom.set(warpgroup.Field.ACCUMULATE, k != 0)
            cute.gemm(atom, fragments.part, x[None, None, k], w[None, None, k], fragments.part)
        warpgroup.commit_group()


def build(options: Options):
    """(jit function, fake arguments) of the kernel for `options`."""
    rows, columns, contracted, groups = cute.sym_int(), cute.sym_int(divisibility=64), sixteens(), cute.sym_int()
    x, w = strided_rows(Float8E4M3FN, rows, contracted), matrix(Float8E4M3FN, groups, columns, contracted)
    w_scale = matrix(Float32, groups, cute.sym_int(), cute.sym_int(divisibility=4))
    offsets, outputs = vector(Int32, cute.sym_int()), fake_gradient(options, rows, cute.sym_int(divisibility=64))
    return Fp8GroupedDact(options), (x, scale_rows(), w, w_scale, offsets, outputs, Int32(1), make_fake_stream())
