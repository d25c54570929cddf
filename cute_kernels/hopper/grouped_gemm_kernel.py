"""out[rows of g] = epilogue(x[rows of g] · W_g) for every group g: the main loop of all row-ragged products on SM90.

Shapes: x [T, C] row-major; W stacked [G, N, K] or separate [N, K] tensors; offsets [G+1] int32, read on the device.
The product contracts K (forward: C = K, one output column a weight row) or N (dgrad and dact: C = N, one output column
a weight column). 16-bit elements, FP32 sums. What becomes of the sums is the epilogue's business.

Tiles of 128 or 64 rows x 192, 128 or 64 columns, 64 contracted elements a stage. A tile never spans groups: rows at or
past the group's end are computed from whatever follows (each row only reaches its own result) and not stored. The
columns of a gated tile are 32 of gate, the 32 of up that belong to them, 32 of gate, ...: one box of the weight each.
Or they are the columns of a weight stored [K, N] as they lie there, in blocks of 1 to 32 (see `epilogues.preact`).

Roles, one CTA per SM, 384 threads, each role walking the same schedule:
    warp 0      loads x and W tiles by TMA; dynamic, takes this CTA's tiles one by one (see `tickets`)
    warp 2      zeroes the results' tail rows, offsets[G] to T, beside the products, by TMA
    warp 3      zeroes the tail of the row sums, where there are any
    warps 1, 2  attend to a consumer warpgroup each, where its epilogue asks for that (see `mxfp8_dactivation`)
    warps 4-7, 8-11   two consumer warpgroups, in turn on a whole tile each (ping-pong): WGMMA, then the epilogue, which
                fetches by TMA what it reads besides (the saved pre-activation)

Pipelines:
    ring    warp 0 -> the 4 consumer warps of the tile (one arrival each), `stages` deep, one transaction count for x
            and W boxes; a warpgroup skips the stages of the other's tile
    filled  a warpgroup, or the warp that attends to it, -> the warpgroup: a transaction barrier for each of its two
            sets of fetched pieces; the first two of a tile are asked for before its products
    turns   two named barriers of 256 threads: a warpgroup waits at its own before it multiplies; the other arrives
            there when it has issued its last product, and once before the first tile

Timeline of a tile: the ring runs ahead into the next tile while its warpgroup is in the epilogue and the tensor cores
work for the other; inside the main loop one WGMMA group stays in flight and the stage before it is released.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.memory as cutlass_memory
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as sm90
from cutlass import Boolean, Float8E4M3FN, Float32, Int32, Int64, Uint8, const_expr, range_constexpr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor
from cutlass.tensor_utils import LayoutEnum

from cute_kernels.hopper import bulk, tickets
from cute_kernels.hopper.configs import CONSUMERS, SETS, Options
from cute_kernels.hopper.epilogues import epilogue
from cute_kernels.hopper.epilogues.activation import Activate
from cute_kernels.hopper.epilogues.dactivation import Differentiate
from cute_kernels.hopper.epilogues.mxfp8_activation import ActivateMxfp8
from cute_kernels.hopper.epilogues.mxfp8_dactivation import DifferentiateMxfp8
from cute_kernels.hopper.epilogues.mxfp8_kept import ActivateKept, DifferentiateKept
from cute_kernels.hopper.epilogues.store import Store
from cute_kernels.hopper.nvfp4_alpha import fake_amaxes, scale_sums
from cute_kernels.hopper.operand_views import partition, rows_view, weight_view
from cute_kernels.hopper.schedule import locate, seek

DTYPES = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16, "float32": cutlass.Float32}


class Walk(NamedTuple):
    """What a role needs to find its tiles: of this CTA the number among all of them, and the tickets if dynamic."""

    offsets: Any
    groups: Any
    column_tiles: Any
    cta: Any
    ctas: Any
    tickets: Any


class Ring(NamedTuple):
    """Shared memory of the operands (x, W as WGMMA reads it, W as boxes for TMA) and the contraction tiles a half."""

    x: Any
    w: Any
    w_boxes: Any
    tiles: Any


class GroupedGemm:
    """The kernel for one set of options."""

    def __init__(self, options: Options):
        config = options.config
        self.dtype = DTYPES[options.dtype]
        self.tile_m, self.tile_n, self.tile_k, self.stages = config.tile_m, config.tile_n, config.tile_k, config.stages
        self.registers = config.producer_registers, config.consumer_registers
        self.strip = config.strip
        self.contracts_rows, self.separate = options.contracts_rows, options.separate
        self.block, self.dynamic = options.glu_interleave, options.dynamic
        self.epilogue = make_epilogue(options)
        gated = options.kind == "act" and options.activation is not None and options.activation.is_glu
        self.halves = 2 if gated and not options.preact_interleave else 1
        """Halves of the weight's rows that meet in a tile, 32 of gate and 32 of up in turn; 1 where they lie so."""
        self.box_n = epilogue.COLS if self.halves == 2 else self.tile_n
        self.passes = 2 if options.kind == "store" and options.glu_interleave else 1
        """Halves that are contracted one after the other."""

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        w: cute.Tensor,
        table: cute.Tensor,
        offsets: cute.Tensor,
        counter: cute.Tensor | None,
        epilogue_args: tuple,
        alpha: tuple | None,
        grid: Int32,
        stream,
    ):
        tile, box = (self.tile_m, self.tile_n, self.tile_k), (self.tile_m, self.box_n, self.tile_k)
        w_major = LayoutEnum.COL_MAJOR if const_expr(self.contracts_rows) else LayoutEnum.ROW_MAJOR
        layout_x = sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, tile, self.dtype, self.stages)
        layout_box = sm90.make_smem_layout_b(w_major, box, self.dtype, self.stages * (self.tile_n // self.box_n))
        layout_w = sm90.make_smem_layout_b(w_major, tile, self.dtype, self.stages)
        if const_expr(self.contracts_rows and self.halves == 2):  # as the boxes are swizzled
            columns = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.MN_SW64, self.dtype)
            layout_w = cute.tile_to_shape(columns, (self.tile_n, self.tile_k, self.stages), (1, 0, 2))
        layout_staging = epilogue.staging_layout(CONSUMERS * self.epilogue.pieces, self.dtype)
        load = cpasync.CopyBulkTensorTileG2SOp()
        in_columns = self.contracts_rows and self.halves == 2
        view = weight_view(w, self.halves * self.passes, self.block, self.contracts_rows, in_columns, self.separate)
        one_x, one_box = cute.slice_(layout_x, (None, None, 0)), cute.slice_(layout_box, (None, None, 0))
        atom_x, tma_x = cpasync.make_tiled_tma_atom(load, rows_view(x, self.passes), one_x, (tile[0], tile[2]))
        atom_w, tma_w = cpasync.make_tiled_tma_atom(load, view, one_box, (box[1], box[2]))
        atom_e, tma_e = None, None
        if const_expr(self.epilogue.fetched > 0):
            saved = rows_view(self.epilogue.Args(*epilogue_args).preact, self.epilogue.preact.halves)
            one = cute.slice_(epilogue.staging_layout(1, saved.element_type), (None, None, 0))
            atom_e, tma_e = cpasync.make_tiled_tma_atom(load, saved, one, (epilogue.ROWS, epilogue.COLS))
        sinks = [epilogue.make_sink(*sink) for sink in self.epilogue.sinks(self.epilogue.Args(*epilogue_args))]
        sinks += [(None, None)] * (3 - len(sinks))
        major = OperandMajorMode.MN if const_expr(self.contracts_rows) else OperandMajorMode.K
        mma = sm90.make_trivial_tiled_mma(
            self.dtype, self.dtype, OperandMajorMode.K, major, Float32, (1, 1, 1), (64, self.tile_n)
        )
        bias_values = CONSUMERS * epilogue.BIAS if const_expr(self.has_bias(epilogue_args)) else 8

        @cute.struct
        class Storage:
            ring: cute.struct.MemRange[Int64, self.stages * 2]
            tickets: cute.struct.MemRange[Int64, tickets.DEPTH * 2]
            numbers: cute.struct.MemRange[Int32, tickets.DEPTH]
            filled: cute.struct.MemRange[Int64, CONSUMERS * SETS]
            zeros: cute.struct.Align[cute.struct.MemRange[Int32, bulk.ZERO_BYTES // 4], 16]
            bias: cute.struct.Align[cute.struct.MemRange[self.dtype, bias_values], 16]
            x: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_x)], 1024]
            w: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_w)], 1024]
            staging: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_staging)], 1024]

        self.Storage = Storage
        layouts = (layout_x, layout_w, layout_box, layout_staging)
        self.kernel(
            atom_x,
            tma_x,
            atom_w,
            tma_w,
            atom_e,
            tma_e,
            *sinks[0],
            *sinks[1],
            *sinks[2],
            table,
            offsets,
            counter,
            epilogue_args,
            alpha,
            mma,
            *layouts,
        ).launch(grid=[grid, 1, 1], block=[128 * (1 + CONSUMERS), 1, 1], min_blocks_per_mp=1, stream=stream)

    def has_bias(self, epilogue_args) -> bool:
        return self.epilogue.bias(self.epilogue.Args(*epilogue_args)) is not None

    @cute.kernel
    def kernel(
        self,
        atom_x: cute.CopyAtom,
        tma_x: cute.Tensor,
        atom_w: cute.CopyAtom,
        tma_w: cute.Tensor,
        atom_e,
        tma_e,
        atom_0,
        tma_0,
        atom_1,
        tma_1,
        atom_2,
        tma_2,
        table: cute.Tensor,
        offsets: cute.Tensor,
        counter: cute.Tensor | None,
        epilogue_args: tuple,
        alpha: tuple | None,
        mma: cute.TiledMma,
        layout_x: cute.ComposedLayout,
        layout_w: cute.ComposedLayout,
        layout_box: cute.ComposedLayout,
        layout_staging: cute.ComposedLayout,
    ):
        args = self.epilogue.Args(*epilogue_args)
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group_of_warps = cute.arch.make_warp_uniform(thread // 128)
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        if warp == 0:
            cpasync.prefetch_descriptor(atom_x)
            cpasync.prefetch_descriptor(atom_w)
        memory = cutlass_memory.SmemAllocator().allocate(self.Storage)
        if warp == 1:
            with cute.arch.elect_one():
                for barrier in range_constexpr(CONSUMERS * SETS):
                    cute.arch.mbarrier_init(memory.filled.data_ptr() + barrier, 1)
        taken = None
        if const_expr(self.dynamic):
            numbers = memory.numbers.get_tensor(cute.make_layout(tickets.DEPTH))
            taken = tickets.make(counter, memory.tickets.data_ptr(), numbers, 4 + self.epilogue.attended)
        pipe = pipeline.PipelineTmaAsync.create(
            num_stages=self.stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, 4),
            tx_count=(self.tile_m + self.tile_n) * self.tile_k * self.dtype.width // 8,
            barrier_storage=memory.ring.data_ptr(),
            cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
        )
        ring = Ring(
            memory.x.get_tensor(layout_x.outer, swizzle=layout_x.inner),
            memory.w.get_tensor(layout_w.outer, swizzle=layout_w.inner),
            memory.w.get_tensor(layout_box.outer, swizzle=layout_box.inner),
            (cute.size(tma_w, mode=[1]) + self.tile_k - 1) // self.tile_k,
        )
        tiles = memory.staging.get_tensor(layout_staging.outer, swizzle=layout_staging.inner)
        width = self.tile_n // self.halves
        column_tiles = (cute.size(tma_w, mode=[0]) + width - 1) // width
        walk = Walk(offsets, offsets.shape[0] - 1, column_tiles, cta, ctas, taken)
        filled = memory.filled.data_ptr()
        sinks = tuple(epilogue.Sink(*sink) for sink in ((atom_0, tma_0), (atom_1, tma_1), (atom_2, tma_2)))
        if group_of_warps == 0:
            cute.arch.setmaxregister_decrease(self.registers[0])
            if warp == 0:
                self.produce(pipe, ring, epilogue.Source(atom_x, tma_x), epilogue.Source(atom_w, tma_w), table, walk)
            if warp >= 2:
                self.zero_tail(args, walk, memory.zeros.get_tensor(cute.make_layout(bulk.ZERO_BYTES // 4)), warp)
            if const_expr(self.epilogue.attended):  # noqa: SIM102 (traced, then run)
                if warp == 1 or warp == 2:
                    consumer = warp - 1
                    first, saved = consumer * self.epilogue.pieces, epilogue.Source(atom_e, tma_e)
                    room = epilogue.Room(
                        tiles, first, None, None, sinks, saved, filled + consumer * SETS, thread, Boolean(True)
                    )
                    self.attend(room, args, walk, consumer)
        if group_of_warps > 0:
            cute.arch.setmaxregister_increase(self.registers[1])
            consumer = group_of_warps - 1
            bias = memory.bias.get_tensor(cute.make_layout((epilogue.BIAS, CONSUMERS)))
            room = epilogue.Room(
                tiles,
                consumer * self.epilogue.pieces,
                bias[None, consumer] if const_expr(self.has_bias(epilogue_args)) else None,
                pipeline.NamedBarrier(barrier_id=group_of_warps, num_threads=128),
                sinks,
                epilogue.Source(atom_e, tma_e),
                filled + consumer * SETS,
                thread % 128,
                Boolean(False) if const_expr(self.epilogue.attended) else warp % 4 == 0,
            )
            self.consume(pipe, ring, mma, room, args, alpha, walk, consumer)

    def number(self, walk: Walk, entry):
        """The number of this CTA's tile `entry`, for who only reads it; see `tickets`."""
        return tickets.read(walk.tickets, entry, 1) if self.dynamic else walk.cta + entry * walk.ctas

    def take(self, walk: Walk):
        """Ask for the next number, which `pass_on` then makes this CTA's tile `entry`."""
        return tickets.take(walk.tickets) if self.dynamic else Int32(0)

    def pass_on(self, walk: Walk, entry, taken):
        return tickets.publish(walk.tickets, entry, taken, 1) if self.dynamic else walk.cta + entry * walk.ctas

    def seek(self, walk: Walk, number, group, first):
        """(group, first) of tile `number`; see `schedule`."""
        return seek(walk.offsets, walk.groups, walk.column_tiles, self.tile_m, number, group, first)

    def locate(self, walk: Walk, number, group, first):
        """Where tile `number` lies."""
        return locate(walk.offsets, walk.column_tiles, self.tile_m, self.strip, number, group, first)

    @cute.jit
    def produce(self, pipe, ring: Ring, x: epilogue.Source, w: epilogue.Source, table, walk: Walk):
        """Warp 0: fill the ring, tile after tile."""
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)
        entry, group, first = Int32(0), Int32(0), Int32(0)
        number = self.pass_on(walk, entry, self.take(walk))
        group, first = self.seek(walk, number, group, first)
        while group < walk.groups:
            tile = self.locate(walk, number, group, first)
            place = group
            if const_expr(self.separate):
                place = table[group].to(Int32)
            rows = cute.domain_offset((tile.row, 0, 0), x.tensor)
            tiles_x = cute.local_tile(rows, (self.tile_m, self.tile_k), (0, None, None))
            box, boxes = (self.box_n, self.tile_k), self.tile_n // self.box_n
            tiles_w = cute.local_tile(w.tensor[None, None, None, place], box, (None, None, None))
            to_x, from_x = partition(x.atom, ring.x, tiles_x)
            to_w, from_w = partition(w.atom, ring.w_boxes, tiles_w)
            taken = Int32(0)
            for half in range_constexpr(self.passes):
                for k in cutlass.range(ring.tiles, unroll=1):
                    if const_expr(self.dynamic and half == self.passes - 1):  # noqa: SIM102 (traced, then run)
                        if k == cutlass.max(ring.tiles - tickets.AHEAD, 0):
                            taken = self.take(walk)
                    pipe.producer_acquire(state)
                    full = pipe.producer_get_barrier(state)
                    cute.copy(x.atom, from_x[None, k, half], to_x[None, state.index], tma_bar_ptr=full)
                    for part in range_constexpr(boxes):
                        row = tile.column_tile * (boxes // self.halves) + part // self.halves
                        source = from_w[None, row, k, half + part % self.halves]
                        cute.copy(w.atom, source, to_w[None, boxes * state.index + part], tma_bar_ptr=full)
                    state.advance()
            entry += 1
            number = self.pass_on(walk, entry, taken)
            group, first = self.seek(walk, number, group, first)
        if const_expr(self.dynamic):
            tickets.close(walk.tickets, number, first, walk.ctas)
            self.pass_on(walk, entry + 1, number)  # the other warpgroup's end
        pipe.producer_tail(state)

    @cute.jit
    def zero_tail(self, args, walk: Walk, zeros, warp):
        """Warps 2 and 3: rows of no group become zero."""
        first, zeroed = walk.offsets[walk.groups], self.epilogue.zeroed(args)
        if warp == 2:
            bulk.clear(zeros)
            for out in [out for out in zeroed if out.element_type.width == 16]:
                bulk.zero_rows(out, first, zeros, walk.cta, walk.ctas)
        else:
            for sums in [out for out in zeroed if out.element_type.width == 32]:
                epilogue.zero_sums(sums, first, walk.cta * 32 + cute.arch.lane_idx(), walk.ctas * 32)

    @cute.jit
    def attend(self, room, args, walk: Walk, consumer):
        """Warps 1 and 2: the tiles of a consumer warpgroup."""
        entry, group, first = Int32(consumer), Int32(0), Int32(0)
        number = self.number(walk, entry)
        group, first = self.seek(walk, number, group, first)
        while group < walk.groups:
            tile = self.locate(walk, number, group, first)
            self.epilogue.attend(args, tile, room)
            entry += CONSUMERS
            number = self.number(walk, entry)
            group, first = self.seek(walk, number, group, first)

    @cute.jit
    def consume(self, pipe, ring: Ring, mma, room, args, alpha, walk: Walk, consumer):
        """A consumer warpgroup: every other tile of the CTA, its products, times alpha if given, then the epilogue."""
        slice_of = mma.get_slice(0)
        fragment_x = mma.make_fragment_A(slice_of.partition_A(ring.x))
        fragment_w = mma.make_fragment_B(slice_of.partition_B(ring.w))
        acc = cute.make_rmem_tensor(slice_of.partition_shape_C((self.tile_m, self.tile_n)), Float32)
        sums = cute.make_tensor(acc.iterator, cute.make_layout(cute.size(acc)))
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        others = Int32(ring.tiles * self.passes)  # stages of a tile of the other warpgroup
        state.advance(consumer * others)
        if consumer == 1:
            self.turn(0).arrive()
        entry, group, first, phase = Int32(consumer), Int32(0), Int32(0), Int32(0)
        number = self.number(walk, entry)
        group, first = self.seek(walk, number, group, first)
        while group < walk.groups:
            tile = self.locate(walk, number, group, first)
            held = self.epilogue.load(args, tile, room)
            epilogue.wait_sent(room.leads, 0)
            self.turn(consumer).arrive_and_wait()
            state = self.multiply(pipe, ring, state, mma, acc, fragment_x, fragment_w, consumer)
            if const_expr(alpha is not None):
                scale_sums(sums, alpha, tile.group)
            phase = self.epilogue.finish(args, held, sums, tile, room, phase)
            state.advance(others)
            entry += CONSUMERS
            number = self.number(walk, entry)
            group, first = self.seek(walk, number, group, first)
        epilogue.wait_sent(room.leads, 0)

    def turn(self, consumer):
        """The barrier at which a warpgroup waits to multiply and the other lets it."""
        return pipeline.NamedBarrier(barrier_id=1 + CONSUMERS + consumer, num_threads=128 * CONSUMERS)

    @cute.jit
    def multiply(self, pipe, ring: Ring, state, mma, acc, fragment_x, fragment_w, consumer):
        """acc = the products of one tile; one WGMMA group stays in flight, the stage before it is released."""
        atom = cute.make_mma_atom(mma.op)
        atom.set(warpgroup.Field.ACCUMULATE, False)
        used = state.clone()
        pipe.consumer_wait(state)
        warpgroup.fence()
        for k in range_constexpr(self.tile_k // 16):
            cute.gemm(atom, acc, fragment_x[None, None, k, state.index], fragment_w[None, None, k, state.index], acc)
            atom.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()
        state.advance()
        for _ in cutlass.range(ring.tiles * self.passes - 1, unroll=1):
            pipe.consumer_wait(state)
            warpgroup.fence()
            for k in range_constexpr(self.tile_k // 16):
                cute.gemm(
                    atom, acc, fragment_x[None, None, k, state.index], fragment_w[None, None, k, state.index], acc
                )
            warpgroup.commit_group()
            warpgroup.wait_group(1)
            pipe.consumer_release(used)
            used.advance()
            state.advance()
        self.turn(1 - consumer).arrive()
        warpgroup.wait_group(0)
        pipe.consumer_release(used)
        return state


def make_epilogue(options: Options):
    """The epilogue object that the options ask for."""
    config = options.config
    cut = epilogue.Cut(config.tile_n, config.tile_m // 64)
    if options.kind == "store":
        return Store(cut, config.pieces, options.zero_tail)
    if options.kind == "act":
        blocks = options.glu_interleave, options.preact_interleave
        activate = (ActivateKept if options.quantized_preact else ActivateMxfp8) if options.mxfp8 else Activate
        return activate(options.activation, cut, config.pieces, *blocks, options.zero_tail)
    if options.mxfp8:
        differentiate = DifferentiateKept if options.quantized_preact else DifferentiateMxfp8
        wanted = options.rowwise, options.columnwise, options.keeps, options.has_dbias
        return differentiate(options.activation, cut, *wanted)
    return Differentiate(options.activation, cut, options.preact_interleave, options.keeps, options.zero_tail)


def build(options: Options):
    """(jit function, fake arguments) of the kernel for `options`."""
    dtype = DTYPES[options.dtype]
    rows, columns, contracted, groups = cute.sym_int(), eights(), eights(), cute.sym_int()
    w_rows, w_columns = (contracted, columns) if options.contracts_rows else (columns, contracted)
    w = matrix(dtype, w_rows, w_columns) if options.separate else matrix(dtype, groups, w_rows, w_columns)
    table = vector(Int64, groups) if options.separate else None
    offsets = vector(Int32, cute.sym_int())
    x, outputs = strided_rows(dtype, rows, contracted), fake_epilogue(options, rows, columns)
    counter = vector(Int32, cute.sym_int()) if options.dynamic else None
    alpha = fake_amaxes() if options.two_level else None
    return GroupedGemm(options), (x, w, table, offsets, counter, outputs, alpha, Int32(1), make_fake_stream())


def fake_epilogue(options: Options, rows, columns) -> tuple:
    """The epilogue's arguments, in the order of its Args."""
    dtype = DTYPES[options.dtype]
    factor = vector(DTYPES[options.factor], rows) if options.factor else None
    bias = matrix(dtype, cute.sym_int(), columns) if options.has_bias else None
    if options.kind == "store":
        return matrix(dtype, rows, columns), bias, factor
    amaxes: tuple = ()
    if options.two_level:
        amaxes = tuple(vector(Float32, cute.sym_int()) if wanted else None for wanted in (True, options.rotates))
    if options.kind == "act":
        act = matrix(dtype, rows, eights())
        if options.quantized_preact:
            data, scales = fake_kept(rows, cute.sym_int(divisibility=32))
            return act, data, bias, factor, scales
        later = matrix(dtype, rows, eights()) if options.zeroes_later else None
        return act, matrix(dtype, rows, columns) if options.keeps else None, bias, factor, later, *amaxes
    pre = cute.sym_int(divisibility=32) if options.quantized_preact else eights()
    act = matrix(dtype, rows, columns) if options.keeps else None
    partial = None
    if options.has_dprobs:
        partial = make_fake_compact_tensor(Float32, (rows, cute.sym_int()), stride_order=(1, 0), assumed_align=4)
    if options.mxfp8:
        copies = (matrix(dtype, rows, pre) if wanted else None for wanted in (options.rowwise, options.columnwise))
        sums = matrix(Float32, cute.sym_int(), pre) if options.has_dbias else None
        offsets = vector(Int32, cute.sym_int())
        preact, scales = fake_kept(rows, pre) if options.quantized_preact else (strided_rows(dtype, rows, pre), None)
        return *copies, act, partial, preact, factor, sums, offsets, scales
    return matrix(dtype, rows, pre), act, partial, strided_rows(dtype, rows, pre), factor, *amaxes


def fake_kept(rows, columns):
    """(data, scales) of a pre-activation in MXFP8."""
    return matrix(Float8E4M3FN, rows, columns), matrix(Uint8, rows, cute.sym_int(divisibility=4))


def eights():
    """A dynamic extent that 16-byte rows of 16-bit elements divide."""
    return cute.sym_int(divisibility=8)


def matrix(dtype, *shape):
    """A contiguous fake tensor, its last mode innermost."""
    order = tuple(range(len(shape) - 1, -1, -1))
    return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=16)


def strided_rows(dtype, rows, columns):
    """A fake matrix of contiguous rows that start at multiples of 16 bytes, some distance apart."""
    return make_fake_tensor(dtype, (rows, columns), stride=(cute.sym_int64(divisibility=8), 1), assumed_align=16)


def vector(dtype, size):
    return make_fake_compact_tensor(dtype, (size,), assumed_align=dtype.width // 8)
