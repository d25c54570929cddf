"""How both BF16 and FP16 weight-gradient kernels multiply: ragged operands through a ring, warpgroups in turn."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, const_expr, range_constexpr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor
from cutlass.tensor_utils import LayoutEnum

from cute_kernels.hopper.nvfp4_alpha import fake_amaxes
from cute_kernels.hopper.wgrad_operands import (
    BOX,
    THREADS,
    TILE_K,
    TILE_M,
    TILE_N,
    TURN_THREADS,
    TYPES,
    WARPS,
    ragged,
)
from cute_kernels.hopper.wgrad_results import Results, fake_results


class Product(NamedTuple):
    """A multiplication of one shape: WGMMA operation, operands by (k step, stage), and its part of the sums."""

    op: Any
    a: Any
    b: Any
    acc: Any


class TurnProducts(Results):
    """Static facts of the products. may_be_empty: a tile may have no k blocks."""

    may_be_empty: bool
    tile_n = TILE_N

    def __init__(self, options):
        super().__init__(options)
        self.cluster = options.config.cluster
        self.boxes = TILE_N // BOX
        self.box_k = TILE_K // self.cluster
        self.element = TYPES[options.element]
        self.dynamic = options.dynamic
        self.pieces = TILE_M // 64 * TILE_N // self.staged_cols

    def make_operands(self, dy, x):
        """((TMA atom, coordinates) of dy, those of x, flat; layouts in shared memory of dy's tiles, of x's, and of x's
        as boxes)."""
        tile = (TILE_M, TILE_N, TILE_K)
        a_layout = sm90.make_smem_layout_a(LayoutEnum.COL_MAJOR, tile, self.element, self.stages)
        b_layout = sm90.make_smem_layout_b(LayoutEnum.COL_MAJOR, tile, self.element, self.stages)
        columns = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.MN_SW128, self.element)
        boxes = self.stages * self.boxes * self.cluster
        box_layout = cute.tile_to_shape(columns, (BOX, self.box_k, boxes), (0, 1, 2))
        load = cpasync.CopyBulkTensorTileG2SOp()
        shared = cpasync.CopyBulkTensorTileG2SMulticastOp() if self.cluster > 1 else load
        a_one, b_one = cute.slice_(a_layout, (None, None, 0)), cute.slice_(box_layout, (None, None, 0))
        atoms = (
            *cpasync.make_tiled_tma_atom(load, ragged(dy), a_one, (TILE_M, TILE_K)),
            *cpasync.make_tiled_tma_atom(shared, ragged(x), b_one, (BOX, self.box_k)),
        )
        return atoms, (a_layout, b_layout, box_layout)

    def start_kernel(self, launcher, grid, stream):
        launcher.launch(
            grid=[grid, 1, 1],
            block=[THREADS, 1, 1],
            cluster=[self.cluster, 1, 1] if self.cluster > 1 else None,
            min_blocks_per_mp=1,
            stream=stream,
        )

    def make_ring(self, barriers):
        """Operand ring: one producer warp -> 4 consumer warps, in a cluster of 2 also those of the other CTA."""
        return pipeline.PipelineTmaAsync.create(
            num_stages=self.stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, WARPS * self.cluster),
            tx_count=(TILE_M + TILE_N) * TILE_K * self.element.width // 8,
            barrier_storage=barriers,
            cta_layout_vmnk=cute.make_layout((1, self.cluster, 1, 1)),
        )

    def product(self, rows: int, width: int, a, b, acc):
        """What multiplies the first `rows` rows and `width` columns of a tile: operation, fragments, its part of the
        sums."""
        mn = OperandMajorMode.MN
        mma = sm90.make_trivial_tiled_mma(self.element, self.element, mn, mn, Float32, (1, 1, 1), (64, width))
        mine = mma.get_slice(0)
        a_part = cute.local_tile(a, (rows, TILE_K, self.stages), (0, 0, 0))
        b_part = cute.local_tile(b, (width, TILE_K, self.stages), (0, 0, 0))
        shape, stride = ((2, 2, width // 8), rows // 64, 1), ((1, 2, 4), cute.size(acc) // (TILE_M // 64), 0)
        return Product(
            mma.op,
            mma.make_fragment_A(mine.partition_A(a_part)),
            mma.make_fragment_B(mine.partition_B(b_part)),
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
        if const_expr(self.may_be_empty):
            if blocks > 0:
                ring.consumer_release(last)
        else:
            ring.consumer_release(last)
        return state


def fake_arguments(options) -> tuple[Any, ...]:
    """dy, x, offsets, (out,) or (lowest, addresses), counter or None, largest magnitudes of NVFP4 operands or None,
    interleave block, strip, grid size, stream.
    options: `grouped_wgrad.WgradOptions`.
    """
    tokens, rows, cols, groups = (
        cute.sym_int(),
        cute.sym_int(divisibility=8),
        cute.sym_int(divisibility=8),
        cute.sym_int(),
    )

    def operand(width):
        shape, stride = (tokens, width), (cute.sym_int64(divisibility=8), 1)
        return make_fake_tensor(TYPES[options.element], shape, stride, assumed_align=16)

    return (
        operand(rows),
        operand(cols),
        make_fake_compact_tensor(Int32, (cute.sym_int(),), assumed_align=4),
        fake_results(options, groups, rows, cols),
        make_fake_compact_tensor(Int32, (cute.sym_int(),), assumed_align=4) if options.dynamic else None,
        fake_amaxes() if options.two_level else None,
        Int32(1),
        Int32(1),
        Int32(1),
        make_fake_stream(),
    )
