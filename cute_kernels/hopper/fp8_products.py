"""What FP8 grouped products on SM90 share, whoever quantises: a stage's scales, instructions, the sums of columns that
are left for each 128 tokens, and what to compile with.
"""

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode
from cutlass.cute.runtime import make_fake_compact_tensor

from cute_kernels.hopper.fp8_configs import BLOCK, Options
from cute_kernels.hopper.grouped_gemm_kernel import DTYPES, matrix, vector
from cute_kernels.hopper.rowwise_kernel import SPAN, ColumnSums, Teams

INSTRUCTION_K = 32
SCALE_ROWS = BLOCK + 4
"""Scales of x in a stage: 128 from any row on, loaded from a multiple of 4."""
SCALE_STAGE = 160
"""Distance between stages of scales, in FP32 values: a multiple of 128 bytes."""


def products(columns: int, warpgroups: int = 1):
    """The instruction that multiplies 64 rows of each warpgroup and `columns` columns."""
    k_major, dtype = OperandMajorMode.K, Float8E4M3FN
    return sm90.make_trivial_tiled_mma(dtype, dtype, k_major, k_major, Float32, (warpgroups, 1, 1), (64, columns))


def release(pipe, state):
    """A consumer warp's share of giving a stage back. The pipeline's own asks for the thread's number each time."""
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(pipe.sync_object_empty.get_barrier(state.index))


class BlockSums(ColumnSums):
    """sums[g] = Σ of what a gradient left for each 128 tokens of group g: a team adds 256 columns, in order."""

    def __init__(self, alone: bool):
        self.teams = Teams(alone)

    @cute.jit
    def __call__(self, partial: cute.Tensor, padded: cute.Tensor, sums: cute.Tensor, ctas: Int32, stream):
        spans = (sums.shape[1] + SPAN - 1) // SPAN
        self.teams.launch(self.add_blocks(partial, padded, sums), sums.shape[0] * spans, ctas, stream)

    @cute.kernel
    def add_blocks(self, partial: cute.Tensor, padded: cute.Tensor, sums: cute.Tensor):
        team, first, step, thread = self.teams.place()
        groups, spans = sums.shape[0], (sums.shape[1] + SPAN - 1) // SPAN
        for unit in cutlass.range(first, groups * spans, step, unroll=1):
            span = unit // groups
            group = unit - span * groups
            begin, end = padded[group] // BLOCK, padded[group + 1] // BLOCK
            total = self.column_sum(partial, None, begin, end, span, team, thread)
            column = span * SPAN + thread
            if column < sums.shape[1]:
                sums[group, column] = total


# ----------------------------------------------------------------------------------------------------------------------
# What to compile with


def sixteens():
    """A dynamic extent that 16-byte rows of bytes divide."""
    return cute.sym_int(divisibility=16)


def scale_rows():
    """Scales whose rows start at multiples of 16 bytes."""
    return matrix(Float32, cute.sym_int(), cute.sym_int(divisibility=4))


def fake_copies(options: Options, rows, width) -> tuple:
    """Rows, their scales, columns, their scales; None for what is not asked for."""
    return (
        matrix(Float8E4M3FN, rows, width) if options.rowwise else None,
        scale_rows() if options.rowwise else None,
        matrix(Float8E4M3FN, width, cute.sym_int(divisibility=BLOCK)) if options.columnwise else None,
        scale_rows() if options.columnwise else None,
    )


def fake_padded(options: Options):
    """Where groups begin in the columns, if those are asked for."""
    return vector(Int32, cute.sym_int()) if options.columnwise else None


def fake_preact(options: Options, rows, columns) -> tuple:
    """(a pre-activation, its scales: one tensor, or none where it is not quantised)."""
    if options.quantized_preact:
        return matrix(Float8E4M3FN, rows, columns), (scale_rows(),)
    return matrix(BFloat16, rows, columns), ()


def fake_gradient(options: Options, rows, width) -> tuple:
    """The arguments of an epilogue that quantises a gradient, in the order of its Args."""
    partial = None
    if options.has_dprobs:
        partial = make_fake_compact_tensor(Float32, (rows, cute.sym_int()), stride_order=(1, 0), assumed_align=4)
    sums, dbias = (matrix(Float32, cute.sym_int(), width) if options.has_dbias else None for _ in range(2))
    factor = vector(DTYPES[options.factor], rows) if options.factor else None
    preact, scales = fake_preact(options, rows, width)
    given = *fake_copies(options, rows, width), partial, sums, dbias, preact, factor, fake_padded(options)
    return (*given, *scales)
