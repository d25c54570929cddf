"""FP32 values to E4M3 and their scales, in rows and transposed: what a warpgroup does with a tile of its own.

A tile is 128 rows x 128 columns of a product. Thread t (warp w, lane l) holds four of its rows, 16 w + l // 4 + {0, 8,
64, 72}, and of every 32 columns eight neighbours, from 8 (l % 4) on: the weight's rows are loaded in an order that
makes them neighbours. So what a thread has of a row in 32 columns is 16 bytes of BF16 or 8 bytes of E4M3, four threads
make whole sectors: rows leave without shared memory. Saved pre-activations come into the ring's stages, in boxes of 64
rows x 64 bytes, of which a warp's 16-byte accesses meet no bank twice.

    rows          the scale of 128 columns is a maximum over four threads
    transposed    the scale of 128 rows: maxima are halved among the lanes of a warp until each has its share of the
                  columns, meet in shared memory, and a thread makes the scales of a column or two. Rows r and r + 8 of
                  a column become one 16-bit unit, `stmatrix` transposes the units, and who reads 16 rows of a column
                  back puts the bytes in order and stores them
"""

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint16, Uint32
from cutlass.cutlass_dsl import dsl_user_op

from cute_kernels.hopper.asm import asm
from cute_kernels.hopper.epilogues import epilogue
from cute_kernels.hopper.epilogues.quantized import Copies, larger, where
from cute_kernels.hopper.fp8_scales import pack4, scales

BLOCK = 128
ROWS = 4
"""Rows of a thread."""
EIGHT, SPAN = 8, 32
"""Neighbouring columns of a thread, in every so many."""
SPANS = BLOCK // SPAN
HALF = 64
"""Columns of the transposed copy that are staged at a time, 128 bytes each."""
STAGED_BYTES = HALF * BLOCK
SOURCE = "float32"
BOXES, BOX_ROW_BYTES = 8, 64
"""Boxes of the pre-activation in a stage of the ring, four in either operand's place; bytes of one of their 64 rows."""
BOX_BYTES = HALF * BOX_ROW_BYTES


class Memory:
    """Where things lie in a warpgroup's shared memory, in bytes. columns: that are quantised together.

    First, 32 bytes a warp: what it keeps over the products. staged: of the transposed copy, 64 columns; before, maxima:
    FP32 [4 warps, columns]. factors: FP32 [columns].
    """

    def __init__(self, columns: int):
        self.staged = self.maxima = 128
        self.factors = self.staged + STAGED_BYTES
        self.size = self.factors + 4 * columns


class Inputs(NamedTuple):
    """Where a stage of the ring holds boxes of the pre-activation: address of the first four, distance of the others.

    ready: waits until they are there. Boxes are numbered by rows (64 of them), half and span.
    """

    first: Any
    distance: Any
    ready: Any


class Room(NamedTuple):
    """What a warpgroup has: shared memory from address `base` on, a barrier; the thread; how memory is divided.

    inputs: of each stage that holds the pre-activation, `Inputs`.
    """

    base: Any
    barrier: Any
    thread: Any
    memory: Any = None
    inputs: Any = None

    def row(self, index: int):
        """Row `index` of this thread's four, of the tile's."""
        return self.thread // 32 * 16 + self.thread % 32 // 4 + row_step(index)

    def column(self):
        """The first of this thread's eight columns in every 32."""
        return self.thread % 4 * EIGHT

    def here(self, memory: Memory):
        """The same room, its addresses computed from here on: kept over the products, they would spill."""
        return self.anew()._replace(base=Int32(epilogue.here(self.base)), memory=memory)

    def anew(self):
        """The same room, what follows from the thread's number computed from here on."""
        return self._replace(thread=Int32(epilogue.here(self.thread)))

    def input_at(self, half: int, span: int, row: int, size: int):
        """(address, offset) of this thread's `size` bytes of the pre-activation, beside those of three others."""
        stage, box = divmod((row // 2 * len(self.inputs) + half) * SPANS + span, BOXES)
        operand, inside = divmod(box, BOXES // 2)
        lane, found = self.thread % 32, self.inputs[stage]
        address = found.first + (self.thread // 32 * 16 + lane // 4) * BOX_ROW_BYTES + lane % 4 * size
        return address, operand * found.distance + inside * BOX_BYTES + row % 2 * 8 * BOX_ROW_BYTES

    def put_aside(self, row: int, values):
        """A row of this thread's values, 16 bytes at a time, to where what they came from was."""
        for i in range(0, len(values), 4):
            words = [value.bitcast(Uint32) for value in values[i : i + 4]]
            store_shared(*self.input_at(i // 4 % 2, i // EIGHT, row, 16), words)

    def taken_back(self, row: int, first: int):
        """Eight of them, from `first` on."""
        words = [word for i in range(2) for word in load_shared(*self.input_at(i, first // EIGHT, row, 16), 4)]
        return [word.bitcast(Float32) for word in words]


def place_of_box(stage: int, box: int, halves: int) -> tuple[int, int, int]:
    """(which 64 rows, half, span) of a box of the pre-activation."""
    rows, inside = divmod(stage * BOXES + box, halves * SPANS)
    return rows, *divmod(inside, SPANS)


def row_step(index: int) -> int:
    """How far row `index` of a thread's four lies below the first."""
    return index // 2 * 64 + index % 2 * 8


def sum_at(row: int, span: int, j: int) -> int:
    """Which of a thread's sums is column j of its eight, in columns 32 span.. of row `row`."""
    return row // 2 * HALF + 16 * span + 4 * (j // 2) + 2 * (row % 2) + j % 2


# ----------------------------------------------------------------------------------------------------------------------
# Single values


def largest(values):
    """The largest magnitude of some values."""
    while len(values) > 1:
        pairs = [larger(a, b) for a, b in zip(values[::2], values[1::2], strict=False)]
        values = pairs + values[len(pairs) * 2 :]
    return values[0]


@dsl_user_op
def permuted(a, b, selector: int, *, loc=None, ip=None):
    """Four bytes chosen from two words."""
    return asm(Uint32, (Uint32(a), Uint32(b)), f"prmt.b32 $0, $1, $2, {selector};", "=r,r,r", loc, ip)


# ----------------------------------------------------------------------------------------------------------------------
# Memory


def _names(first: int, count: int) -> str:
    return "{" + ", ".join(f"${first + i}" for i in range(count)) + "}"


@dsl_user_op
def load_shared(address, offset: int, count: int, wanted=None, *, loc=None, ip=None):
    """`count` words (1, 2 or 4) of shared memory from address + offset on; zeros if not `wanted`."""
    vector = f".v{count}" if count > 1 else ""
    names = _names(0, count) if count > 1 else "$0"
    text = f"ld.shared{vector}.b32 {names}, [${count}+{offset}];"
    operands, outputs = [Int32(address)], "=r," * count
    if wanted is not None:
        zeros = " ".join(f"mov.b32 ${i}, 0;" for i in range(count))
        text = f"{{ .reg .pred p; setp.ne.b32 p, ${count + 1}, 0; {zeros} @p {text} }}"
        operands.append(Int32(wanted))
        outputs = "=&r," * count
    constraints = outputs + ",".join("r" * len(operands)) + ",~{memory}"
    return asm([Uint32] * count, operands, text, constraints, loc, ip, effects=True)


@dsl_user_op
def store_shared(address, offset: int, words, *, loc=None, ip=None):
    """1, 2 or 4 words to shared memory."""
    count = len(words)
    vector = f".v{count}" if count > 1 else ""
    names = _names(1, count) if count > 1 else "$1"
    text = f"st.shared{vector}.b32 [$0+{offset}], {names};"
    constraints = "r" + ",r" * count + ",~{memory}"
    asm(None, (Int32(address), *map(Uint32, words)), text, constraints, loc, ip, effects=True)


@dsl_user_op
def load_global(address, offset: int, wanted, count: int, *, loc=None, ip=None):
    """`count` words (1, 2 or 4) of global memory from address + offset; zeros if not `wanted`."""
    vector = f".v{count}" if count > 1 else ""
    names = _names(0, count) if count > 1 else "$0"
    zeros = " ".join(f"mov.b32 ${i}, 0;" for i in range(count))
    text = f"""{{ .reg .pred p; setp.ne.b32 p, ${count + 1}, 0; {zeros}
        @p ld.global{vector}.b32 {names}, [${count}+{offset}]; }}"""
    operands, constraints = (Int64(address), Int32(wanted)), "=&r," * count + "l,r,~{memory}"
    return asm([Uint32] * count, operands, text, constraints, loc, ip, effects=True)


@dsl_user_op
def load_half(address, wanted, *, loc=None, ip=None):
    """16 bits of global memory that nobody writes; zeros if not `wanted`."""
    text = "{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.b16 $0, 0; @p ld.global.nc.b16 $0, [$1]; }"
    return asm(Uint16, (Int64(address), Int32(wanted)), text, "=&h,l,r", loc, ip, effects=True)


@dsl_user_op
def store_global(address, offset: int, wanted, words, *, loc=None, ip=None):
    """1, 2 or 4 words to global memory, at address + offset, if `wanted`."""
    count = len(words)
    vector = f".v{count}" if count > 1 else ""
    names = _names(2, count) if count > 1 else "$2"
    text = f"{{ .reg .pred p; setp.ne.b32 p, $1, 0; @p st.global{vector}.b32 [$0+{offset}], {names}; }}"
    operands, constraints = (Int64(address), Int32(wanted), *map(Uint32, words)), "l,r" + ",r" * count + ",~{memory}"
    asm(None, operands, text, constraints, loc, ip, effects=True)


@dsl_user_op
def store_transposed(address, offset: int, words, *, loc=None, ip=None):
    """Four 8 x 8 matrices of 16-bit units, transposed, to rows of 16 bytes: lane l gives the address of row l."""
    operands = Int32(address), *map(Uint32, words)
    text = f"stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [$0+{offset}], {{$1, $2, $3, $4}};"
    asm(None, operands, text, "r,r,r,r,r,~{memory}", loc, ip, effects=True)


def put_record(room: Room, number: int, facts):
    """Four integers that a warp keeps over the products, out of registers: as its record `number`, of two."""
    store_shared(room.base + room.thread // 32 * 32, 16 * number, [Uint32(fact) for fact in facts])


def record(room: Room, number: int):
    """The same again."""
    return [Int32(word) for word in load_shared(room.base + room.thread // 32 * 32, 16 * number, 4)]


def place(out: cute.Tensor, row, column):
    """The address of out[row, column]; rows are contiguous."""
    return out.iterator.toint() + (Int64(row) * out.shape[1] + column) * (out.element_type.width // 8)


# ----------------------------------------------------------------------------------------------------------------------
# Rows


def row_factor(factors, row: int, tile, room: Room):
    """The factor of row `row` of this thread's four, rounded to BF16 and widened; None for None."""
    if factors is None:
        return None
    at = tile.row + room.row(row)
    address = factors.iterator.toint() + Int64(at) * (factors.element_type.width // 8)
    if factors.element_type.width == 32:
        value = load_global(address, 0, at < tile.end, 1)[0].bitcast(Float32)
    else:
        value = load_half(address, at < tile.end).bitcast(factors.element_type).to(Float32)
    return value.to(BFloat16).to(Float32)


def over_row(values):
    """The largest magnitude of a row, of which this thread has these values."""
    most = largest(values)
    for offset in (1, 2):
        most = larger(most, cute.arch.shuffle_sync_bfly(most, offset=offset))
    return most


def store_row(values, factor, row, first, tile, part: Copies, room: Room):
    """A thread's values of a row times its factor, eight of every 32 columns from column `first` of the block on."""
    address = place(part.rows, tile.row + row, part.column + first + room.column())
    for span in range(len(values) // EIGHT):
        eight = [value * factor for value in values[EIGHT * span : EIGHT * (span + 1)]]
        wanted = (tile.row + row < tile.end) & (part.column + first + SPAN * span < part.limit)
        store_global(address, SPAN * span, wanted, [pack4(*eight[:4]), pack4(*eight[4:])])


def store_row_scale(scale, row, tile, part: Copies, room: Room):
    """The scale of a row, by one of the four threads that share it."""
    wanted = (room.thread % 4 == 0) & (tile.row + row < tile.end) & (part.column < part.limit)
    store_global(place(part.row_scales, part.scale_row, tile.row + row), 0, wanted, [scale.bitcast(Uint32)])


def scale_of(amax, power_of_two: bool):
    """(factor, scale) of a block with this amax."""
    return scales(amax.bitcast(Int32), power_of_two, SOURCE)


# ----------------------------------------------------------------------------------------------------------------------
# Columns


def share(values, combine, lane, distances=(16, 8, 4)):
    """Of several results those over the lanes at these distances, of which each lane gets its share: in each step it
    keeps half of what it has, the upper one if its number has that bit; what is single stays with both.
    """
    for distance in distances:
        if len(values) == 1:
            values = [combine(values[0], cute.arch.shuffle_sync_bfly(values[0], offset=distance))]
            continue
        upper, half = lane & distance != 0, len(values) // 2
        kept = [where(upper, values[half + i], values[i]) for i in range(half)]
        sent = [where(upper, values[i], values[half + i]) for i in range(half)]
        values = [combine(k, cute.arch.shuffle_sync_bfly(s, offset=distance)) for k, s in zip(kept, sent, strict=True)]
    return values


def gather(value, spans: int, combine, first: int, columns: int, room: Room):
    """This warp's results for columns first.. of `columns`, to shared memory [4 warps, columns].

    value(span, j): this thread's result for a column, over its rows. 64 columns at a time, for they fill registers.
    """
    lane = room.thread % 32
    column = first + lane // 16 * SPAN + room.column() + lane // 4 % 4 * 2
    address = room.base + (room.thread // 32 * columns + column) * 4
    for start in range(0, spans, 2):
        mine = share([value(start + span, j) for span in range(2) for j in range(EIGHT)], combine, lane)
        store_shared(address, room.memory.maxima + start * SPAN * 4, [result.bitcast(Uint32) for result in mine])


def gathered(column, combine, columns: int, room: Room):
    """The result for a column over all warps, in order."""
    words = [load_shared(room.base + column * 4, room.memory.maxima + warp * columns * 4, 1)[0] for warp in range(4)]
    found = [word.bitcast(Float32) for word in words]
    total = found[0]
    for value in found[1:]:
        total = combine(total, value)
    return total


def share_column_scales(parts: tuple, first: int, columns: int, power_of_two: bool, room: Room):
    """After the meeting: a thread makes scales of columns, of `columns` a part, from `first` of its block on."""
    total = len(parts) * columns
    for start in range(0, total, BLOCK):
        index = start + room.thread % min(total, BLOCK)
        factor, scale = scale_of(gathered(index, larger, total, room), power_of_two)
        store_shared(room.base + index * 4, room.memory.factors, [factor.bitcast(Uint32)])
        part = parts[start // columns]
        column = part.column + first + index % columns
        wanted = column < part.limit
        store_global(place(part.column_scales, part.token // BLOCK, column), 0, wanted, [scale.bitcast(Uint32)])
    room.barrier.arrive_and_wait()


def stage_columns(values, first: int, room: Room):
    """64 columns of values(row, span, j), scaled, as E4M3 into staging memory. first: their first factor."""
    lane, warp = room.thread % 32, room.thread // 32
    key = lane % 8
    column = key // 2 * EIGHT + lane // 8 * 2 + key % 2
    line = room.base + column * BLOCK
    for span in range(HALF // SPAN):
        factors = []
        for four in range(2):
            address = room.base + room.column() * 4
            words = load_shared(address, room.memory.factors + (first + SPAN * span + 4 * four) * 4, 4)
            factors += [word.bitcast(Float32) for word in words]
        for block in range(2):
            words = [
                pack4(*[values(2 * block + step, span, j) * factors[j] for j in pair for step in range(2)])
                for pair in ((0, 1), (2, 3), (4, 5), (6, 7))
            ]
            store_transposed(line + ((warp + 4 * block) ^ key) * 16, room.memory.staged + span * SPAN * BLOCK, words)


def send_columns(first, part: Copies, room: Room):
    """64 columns of a block, from `first` on, out of staging memory, after the warpgroup has met.

    A thread takes 16 rows of a column, which lie as 0, 8, 1, 9, ..., 7, 15.
    """
    chunk = room.thread % 8
    for step in range(HALF * 8 // 128):
        line = step * 16 + room.thread // 8
        key = line // EIGHT % 4 * 2 + line % 2
        words = load_shared(room.base + line * BLOCK + (chunk ^ key) * 16, room.memory.staged, 4)
        ordered = [permuted(*words[2 * i : 2 * i + 2], selector) for selector in (0x6420, 0x7531) for i in range(2)]
        column = part.column + first + line
        address = place(part.columns, column, part.token + chunk * 16)
        store_global(address, 0, column < part.limit, ordered)
