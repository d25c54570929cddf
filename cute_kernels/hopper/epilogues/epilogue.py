"""What every epilogue shares: from sums in registers to rows in global memory.

A consumer warpgroup owns 64 rows of a tile. Thread t of its 128 holds rows r and r + 8, where
r = 16 (t // 32) + (t % 32) // 4, and of every 8 columns the pair 2 (t % 4) + {0, 1}: element i of a 64 x 8n fragment is row r + 8 ((i // 2) % 2), column
8 (i // 4) + 2 (t % 4) + i % 2. So the gate half and the up half of a 64 x 256 fragment meet in one thread.

Values leave through a 64 x 128 tile of swizzled shared memory (stmatrix in, 16-byte rows out): memory wants whole rows.
Rows at or past the group's end and columns past the tensor's are not stored.

Hooks, in the order the main loop calls them:

    staging_tiles        how many 64 x 128 tiles a warpgroup needs
    fetched              how many of them the producer fills by TMA before the epilogue (0: none)
    bias(args)           the bias tensor, or None
    zeroed(args)         row-shaped results whose tail must be zero
    load(args, tile, room)          before the products: read what will be needed per row and per column
    finish(args, held, acc, tile, room)   after them
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int64, Uint32, const_expr, range_constexpr
from cutlass.cute.nvgpu import CopyUniversalOp, OperandMajorMode, warp, warpgroup

ROWS, COLS = 64, 128


class Room(NamedTuple):
    """What one consumer warpgroup has: staging tiles from `first` on, 256 bias values, a barrier; and the thread."""

    staging: cute.Tensor
    first: Any
    bias: Any
    barrier: Any
    thread: Any

    def tile(self, index: int):
        """Staging tile `index` of this warpgroup."""
        return self.staging[None, None, self.first + index]

    def row(self):
        """The first of the two rows (of 64) whose sums this thread holds; the other lies 8 below."""
        return (self.thread // 32) * 16 + (self.thread % 32) // 4


def staging_layout(tiles: int, dtype):
    """`tiles` staging tiles of 64 x 128, 128-byte swizzled, one after another."""
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, dtype)
    return cute.tile_to_shape(atom, (ROWS, COLS, tiles), (0, 1, 2))


def words(staging: cute.Tensor):
    """The same shared memory as 32-bit pairs. recast_tensor alone would drop the swizzle, so it is given again."""
    pointer = cute.recast_ptr(staging.iterator, cute.make_swizzle(3, 4, 3), dtype=Uint32)
    return cute.make_tensor(pointer, cute.recast_layout(32, 16, staging.layout))


def unpacked(word, dtype):
    """The two values of a 32-bit pair. (Recasting a tensor of one word would give both values the same address.)"""
    pair = cute.make_rmem_tensor((2,), dtype)
    cute.make_tensor(cute.recast_ptr(pair.iterator, dtype=Uint32), cute.make_layout(1))[0] = word
    return pair


def packed(first, second, dtype):
    """Two FP32 values rounded into one 32-bit pair."""
    pair = cute.make_rmem_tensor((2,), Float32)
    pair[0], pair[1] = first, second
    result = cute.make_rmem_tensor((2,), dtype)
    result.store(pair.load().to(dtype))
    return cute.make_tensor(cute.recast_ptr(result.iterator, dtype=Uint32), cute.make_layout(1))[0]


def part(values: cute.Tensor, half: int, count: int):
    """`count` values of a flat fragment from half * count on."""
    return cute.make_tensor(values.iterator + half * count, cute.make_layout(count))


def rounded(values: cute.Tensor, dtype):
    """The flat fragment rounded to `dtype`."""
    flat = cute.make_tensor(values.iterator, cute.make_layout(cute.size(values)))
    result = cute.make_rmem_tensor((cute.size(values),), dtype)
    result.store(flat.load().to(dtype))
    return result


def stage(values: cute.Tensor, tile: cute.Tensor, thread):
    """A thread's 64 rounded values of a 64 x 128 fragment into its staging tile, four 8 x 8 matrices at a time."""
    dtype = values.element_type
    k_major = OperandMajorMode.K
    mma = sm90.make_trivial_tiled_mma(dtype, dtype, k_major, k_major, Float32, (1, 1, 1), (ROWS, COLS))
    tiled = cute.make_tiled_copy_C(cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), dtype), mma)
    fragment = cute.make_tensor(values.iterator, cute.make_layout(((2, 2, COLS // 8), 1, 1)))
    cute.copy(tiled, tiled.retile(fragment), tiled.get_slice(thread).partition_D(tile))


@cute.jit
def write_rows(tile: cute.Tensor, out: cute.Tensor, thread, row, end, column, column_end):
    """A staging tile to out[row : min(row + 64, end), column : min(column + 128, column_end)], 16 bytes a thread."""
    copy = cute.make_copy_atom(CopyUniversalOp(), out.element_type, num_bits_per_copy=128)
    chunk = thread % 16
    mine = column + 8 * chunk
    for block in cutlass.range(2, unroll=1):  # a real loop: unrolled, ptxas computes the next values early and spills
        for step in range_constexpr(4):
            local = thread // 16 + 8 * (4 * block + step)
            if row + local < end and mine < column_end:
                values = cute.make_rmem_tensor((8,), out.element_type)
                cute.copy(copy, cute.local_tile(tile[local, None], (8,), (chunk,)), values)
                at = (out.iterator + cute.crd2idx((Int64(row + local), mine), out.layout)).align(16)
                cute.copy(copy, values, cute.make_tensor(at, cute.make_layout((8,))))


@cute.jit
def row_factor(factors: cute.Tensor, row, end):
    """factors[row] in FP32; 0 for a row that the group does not have."""
    value = Float32(0.0)
    if row < end:
        value = factors[row].to(Float32)
    return value


@cute.jit
def zero_rows(out: cute.Tensor, first_row, worker, workers):
    """out[first_row:] = 0 by `workers` threads; rows are contiguous, so the tail is one run of memory."""
    vector = const_expr(8 if out.element_type.width == 16 else 1)
    copy = cute.make_copy_atom(CopyUniversalOp(), out.element_type, num_bits_per_copy=vector * out.element_type.width)
    zeros = cute.make_rmem_tensor((vector,), out.element_type)
    zeros.fill(0.0)
    columns = out.shape[1] if const_expr(cute.rank(out) == 2) else 1
    index = Int64(first_row) * columns + Int64(worker) * vector
    total = Int64(out.shape[0]) * columns
    while index < total:
        at = (out.iterator + index).align(vector * out.element_type.width // 8)
        cute.copy(copy, zeros, cute.make_tensor(at, cute.make_layout((vector,))))
        index += Int64(workers) * vector


@cute.jit
def bias_column(column, half: cutlass.Constexpr, width, block: cutlass.Constexpr):
    """Where column `column` of half `half` lies among 2 * width stored columns, interleaved in blocks of `block`."""
    if const_expr(block == 0):
        return half * width + column
    else:
        return (column // block) * (2 * block) + half * block + column % block


@cute.jit
def read_bias(bias: cute.Tensor, group, index, column, width):
    """bias[group, index] if `column` < `width`, else 0."""
    value = bias.element_type(0.0)
    if column < width:
        value = bias[group, index]
    return value


def keep_bias(values, room: Room):
    """This thread's two bias values, of columns t and 128 + t of the tile, to shared memory for the whole warpgroup."""
    room.bias[room.thread] = values[0]
    room.bias[COLS + room.thread] = values[1]
    room.barrier.arrive_and_wait()


def add_bias(acc: cute.Tensor, room: Room, factors):
    """acc += factor of the row times bias of the column; `factors` holds the two rows', or is None for 1."""
    pairs = cute.make_tensor(cute.recast_ptr(room.bias.iterator, dtype=Uint32), cute.make_layout(COLS))
    for block in range(cute.size(acc) // 4):
        values = unpacked(pairs[4 * block + room.thread % 4], room.bias.element_type)
        for row in range(2):
            for column in range(2):
                value = values[column].to(Float32)
                i = 4 * block + 2 * row + column
                acc[i] = acc[i] + (value if factors is None else factors[row] * value)
