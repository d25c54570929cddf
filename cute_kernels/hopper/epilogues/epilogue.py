"""What every epilogue shares: from sums in registers to rows in global memory.

A consumer warpgroup owns one or two blocks of 64 rows of a tile. Thread t of its 128 holds rows r and r + 8 of a block,
r = 16 (t // 32) + t % 32 // 4, and of every 8 columns the pair 2 (t % 4) + {0, 1}: element i of a 64 x 8n fragment is
row r + 8 (i // 2 % 2), column 8 (i // 4) + 2 (t % 4) + i % 2. A second block's fragment follows the first's. A gated
tile has 32 gate columns, the 32 up columns that belong to them, 32 gate columns, ...: gate and up meet in one thread.

Values leave in pieces of 64 rows x 32 columns: rounded, through a swizzled piece of shared memory, by TMA, while the
next piece is formed. No row is tested: the descriptor of a result is ragged. Its rows are seen as

    (2^30, columns, halves, 2^31 - 1, 2^31 - 1) with strides (s, 1, columns, 2^34 - s, s)

where row i of a group that ends at row `end` is (2^30 - (end - i), ., ., 2^30, end): its address is i·s, since 2^30
times 2^34 elements wrap to zero in 64 bits, and from `end` on it is out of range and not written. No descriptor is
rewritten. (The idea is public: Triton's ragged TMA.)

Hooks, in the order the main loop calls them:

    cut                     how the sums are cut into pieces
    pieces, fetched         pieces of shared memory a warpgroup has; those that TMA fills at a time, 0 if none
    sinks(args)             the results that leave by TMA, each with its number of halves
    bias(args)              the bias tensor, or None
    zeroed(args)            row-shaped results whose tail must be zero
    load(args, tile, room)                          before the products: what is needed per row and per column
    finish(args, held, acc, tile, room, phase)      after them; returns the phase of what is fetched next
    attended                whether a warp of the producer warpgroup fetches and sends
    attend(args, tile, room)                        what that warp does for a tile
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, Int64, Uint32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.cutlass_dsl import dsl_user_op

from cute_kernels.hopper.asm import asm

ROWS, COLS = 64, 32
"""Rows of a block of sums; columns of a piece."""
BIAS = 256
"""Bias values that a warpgroup has room for: two a thread, of columns t and t + 128 of the tile."""
RAGGED_ROWS = 2**30
FAR = 2**31 - 1


class Sink(NamedTuple):
    """A result that leaves by TMA: the atom and the coordinates it writes."""

    atom: Any
    tensor: Any


class Source(NamedTuple):
    """What TMA reads: the atom and the coordinates."""

    atom: Any
    tensor: Any


class Room(NamedTuple):
    """What one consumer warpgroup has: pieces from `first` on, 256 bias values, a barrier, sinks; and the thread.

    saved, filled: the Source of the saved pre-activation, and a transaction barrier for each set fetched from there.
    """

    staging: cute.Tensor
    first: Any
    bias: Any
    barrier: Any
    sinks: tuple
    saved: Any
    filled: Any
    thread: Any
    leads: Any

    def piece(self, index: int):
        """Piece `index` of this warpgroup."""
        return self.staging[None, None, self.first + index]

    def row(self):
        """The first of the two rows (of 64) whose sums this thread holds; the other lies 8 below."""
        return (self.thread // 32) * 16 + (self.thread % 32) // 4


class Cut(NamedTuple):
    """How a warpgroup's sums, `blocks` blocks of 64 rows x `tile_n` columns, are cut into pieces."""

    tile_n: int
    blocks: int

    def places(self, columns: int):
        """(block, first column) of each piece of the first `columns` columns."""
        return [(block, column) for block in range(self.blocks) for column in range(0, columns, COLS)]

    def sum_at(self, row: int, column: int) -> int:
        """Which of a thread's sums is the first of its pair in row `row` of its 2 a block, columns `column` to + 8."""
        return row // 2 * self.tile_n // 2 + column // 2 + row % 2 * 2

    def take(self, values: cute.Tensor, block: int, column: int, pieces: int = 1):
        """A thread's values of the piece that starts there, or of that and the next ones."""
        start = block * self.tile_n // 2 + column // 2
        return cute.make_tensor(values.iterator + start, cute.make_layout(pieces * COLS // 2))


def staging_layout(pieces: int, dtype):
    """`pieces` pieces one after another, swizzled over their rows of 64 bytes, or 32 of one-byte elements."""
    kinds = warpgroup.SmemLayoutAtomKind
    atom = warpgroup.make_smem_layout_atom(kinds.K_SW32 if dtype.width == 8 else kinds.K_SW64, dtype)
    return cute.tile_to_shape(atom, (ROWS, COLS, pieces), (0, 1, 2))


def ragged_view(out: cute.Tensor, halves: int):
    """A row-major result [T, W] as its ragged descriptor sees it."""
    columns = out.shape[1] // halves
    step = Int64(out.shape[1])
    shape = (RAGGED_ROWS, columns, halves, FAR, FAR)
    stride = (step, 1, columns if halves > 1 else 0, Int64(2**34) - step, step)
    return cute.make_tensor(out.iterator, cute.make_layout(shape, stride=stride))


def make_sink(out: cute.Tensor, halves: int):
    """(TMA atom, coordinates) that store pieces to `out`."""
    one = cute.slice_(staging_layout(1, out.element_type), (None, None, 0))
    return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), ragged_view(out, halves), one, (ROWS, COLS))


class Words:
    """The staging pieces as 32-bit pairs of a thread's own columns, at addresses that it works out once.

    Row r of a piece is four chunks of 16 bytes; chunk c lies where c xor (r / 2 % 4) says. That is the same 8 rows
    further down, so one offset a chunk serves all of a thread's rows and pieces.
    """

    def __init__(self, room: Room):
        self.base = cute.recast_ptr(room.piece(0).iterator, cute.make_swizzle(0, 4, 3), dtype=Uint32)
        row, word = room.row(), room.thread % 4
        start, turn = row * (COLS // 2), row // 2 % 4
        self.offsets = [start + 4 * (chunk ^ turn) + word for chunk in range(COLS // 8)]
        self.wide = [start + 4 * ((2 * run + word // 2) ^ turn) + word % 2 * 2 for run in range(COLS // 16)]

    def at(self, piece, row: int, chunk: int):
        """The pair in the thread's row (0, or 1: 8 below) and in columns 8 chunk to 8 chunk + 8, a tensor of one."""
        offset = self.offsets[chunk] + piece * (ROWS * COLS // 2) + row * (8 * COLS // 2)
        return cute.make_tensor(self.base + offset, cute.make_layout(1))

    def wide_at(self, piece, row: int, run: int, word: int):
        """Of the 4 neighbours that are the thread's, were 16 columns shared by 4, the first or the second pair."""
        offset = self.wide[run] + word + piece * (ROWS * COLS // 2) + row * (8 * COLS // 2)
        return cute.make_tensor(self.base + offset, cute.make_layout(1))


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


@dsl_user_op
def here(word, *, loc=None, ip=None):
    """`word`, computed at this point of the program and not later."""
    return asm(Uint32, [Uint32(word)], "mov.b32 $0, $1;", "=r,r", loc, ip, effects=True)


def rounded_now(cut: Cut, acc: cute.Tensor, room, end, dtype):
    """`rounded`, after adding the room's bias if one is given.

    All of it at once: left alone, the compiler rounds late, holds twice the registers and spills. With two blocks it
    would also read the whole bias first, so the warpgroup meets in between.
    """
    result = cute.make_rmem_tensor((cute.size(acc),), dtype)
    pairs = cute.make_tensor(cute.recast_ptr(result.iterator, dtype=Uint32), cute.make_layout(cute.size(acc) // 2))
    zero = Uint32(0)
    for column in range(0, cut.tile_n, 8):
        if room is not None:
            if cut.blocks > 1 and column % 64 == 0 and column:
                zero = meet(room.barrier, end)
            add_bias(cut, acc, room, None, column, zero)
        for row in range(2 * cut.blocks):
            i = cut.sum_at(row, column)
            pairs[i // 2] = here(packed(acc[i], acc[i + 1], dtype))
    return result


@dsl_user_op
def meet(barrier, end, *, loc=None, ip=None):
    """All 128 threads of the barrier meet. Returns 0, which the compiler cannot know earlier."""
    text = """{
        .reg .pred mine, any;
        setp.lt.s32 mine, $2, 0;
        barrier.cta.red.or.pred any, $1, 128, mine;
        selp.b32 $0, 1, 0, any;
    }"""
    return asm(Uint32, map(Int32, (barrier.barrier_id, end)), text, "=r,r,r,~{memory}", loc, ip, effects=True)


def not_before(zero, values: cute.Tensor):
    """The same 16-bit values, once `meet` has returned `zero`.

    Left alone, the compiler computes everything that leaves in later pieces before the first has left, and spills.
    """
    count = cute.size(values)
    result = cute.make_rmem_tensor((count,), values.element_type)
    source, target = (cute.recast_ptr(x.iterator, dtype=Uint32) for x in (values, result))
    source, target = (cute.make_tensor(x, cute.make_layout(count // 2)) for x in (source, target))
    for i in range(count // 2):
        target[i] = source[i] ^ zero
    return result


def stage(values: cute.Tensor, piece: cute.Tensor, thread):
    """A thread's rounded values into a piece, four 8 x 8 matrices at a time."""
    dtype = values.element_type
    k_major = OperandMajorMode.K
    mma = sm90.make_trivial_tiled_mma(dtype, dtype, k_major, k_major, Float32, (1, 1, 1), (ROWS, COLS))
    tiled = cute.make_tiled_copy_C(cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), dtype), mma)
    fragment = cute.make_tensor(values.iterator, cute.make_layout(((2, 2, COLS // 8), 1, 1)))
    cute.copy(tiled, tiled.retile(fragment), tiled.get_slice(thread).partition_D(piece))


@cute.jit
def wait_sent(leads, pending: cutlass.Constexpr):
    """The leading warp waits until all but `pending` of the sent pieces have been read out of shared memory."""
    if leads:
        cute.arch.cp_async_bulk_wait_group(pending, read=True)


@cute.jit
def send(leads, sink: Sink, piece: cute.Tensor, tile, column, half: cutlass.Constexpr):
    """The leading warp stores a piece to rows tile.row.. of its group, columns column.. of a half."""
    if leads:
        whole = sink.tensor[None, None, half, RAGGED_ROWS, tile.end]
        there = cute.domain_offset((RAGGED_ROWS - (tile.end - tile.row), column), whole)
        target = cute.local_tile(there, (ROWS, COLS), (0, 0))
        source, target = cpasync.tma_partition(
            sink.atom, 0, cute.make_layout(1), cute.group_modes(piece, 0, 2), cute.group_modes(target, 0, 2)
        )
        cute.copy(sink.atom, source, target)


@cute.jit
def close(leads):
    """The pieces sent since the last call are one group to wait for."""
    if leads:
        cute.arch.cp_async_bulk_commit_group()


def emit(values, number: int, slots: int, sink: Sink, tile, room: Room, place, half: int):
    """Piece `number` of a tile, a thread's rounded values, leaves for `place` (block, column).

    All slots are free when the tile begins; from then on who leads waits for the slot of the next piece before all
    meet, once a piece. Returns `meet`'s zero.
    """
    block, column = place
    piece = room.piece(number % slots)
    stage(values, piece, room.thread)
    rows = tile._replace(row=tile.row + block * ROWS)
    return leave([(sink, piece, column, half)], number, slots, rows, room)


def leave(sent, number: int, slots: int, tile, room: Room):
    """What is written in slot `number` % `slots` leaves: each (sink, piece, column, half), for rows tile.row... Returns
    `meet`'s zero.
    """
    cute.arch.fence_proxy("async.shared", space="cta")
    if number + 1 >= slots:
        wait_sent(room.leads, slots - 2)
    zero = meet(room.barrier, tile.end)
    for sink, piece, column, half in sent:
        send(room.leads, sink, piece, tile, column, half)
    close(room.leads)
    return zero


def row_factors(blocks, factors, tile, room: Room, zero=0):
    """The factors of this thread's rows, two a block, in FP32; None if there are none. zero: from `meet`."""
    if factors is None:
        return None
    first = tile.row + room.row() + Int32(zero)
    rows = [first + ROWS * block + step for block in blocks for step in (0, 8)]
    return [row_factor(factors, row, tile.end) for row in rows]


@cute.jit
def row_factor(factors: cute.Tensor, row, end):
    """factors[row] in FP32; 0 for a row that the group does not have."""
    value = Float32(0.0)
    if row < end:
        value = factors[row].to(Float32)
    return value


@cute.jit
def zero_sums(sums: cute.Tensor, first_row, worker, workers):
    """sums[first_row:] = 0, FP32 [T, tiles], by `workers` threads."""
    for row in cutlass.range(first_row + worker, sums.shape[0], workers, unroll=1):
        for tile in cutlass.range(sums.shape[1], unroll=1):
            sums[row, tile] = Float32(0.0)


@cute.jit
def bias_column(column, half, width, block: cutlass.Constexpr):
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


def held(cut: Cut, values, factors, tile, room: Room):
    """What is kept from before the products to after them: the factors of this thread's rows, None if absent.

    values: this thread's bias values, of the tile's columns t and t + 128; they go to shared memory at once. A
    warpgroup that holds two blocks has no registers to spare, but time: it reads the factors after the products.
    """
    if values is not None:
        for index, value in enumerate(values):
            room.bias[128 * index + room.thread] = value
        room.barrier.arrive_and_wait()
    return None if cut.blocks > 1 else row_factors([0], factors, tile, room)


def add_bias(cut: Cut, acc: cute.Tensor, room: Room, factors, column: int, zero=0):
    """8 columns of acc += factor of the row times bias; `factors` holds the rows', or is None for 1."""
    pairs = cute.make_tensor(cute.recast_ptr(room.bias.iterator, dtype=Uint32), cute.make_layout(BIAS // 2))
    values = unpacked(pairs[column // 2 + room.thread % 4 + Int32(zero)], room.bias.element_type)
    for row in range(2 * cut.blocks):
        for e in range(2):
            i, value = cut.sum_at(row, column) + e, values[e].to(Float32)
            acc[i] = acc[i] + (value if factors is None else factors[row] * value)
