"""One pass over 16-bit matrices on SM90 that gives E4M3 copies, as they lie and transposed, with their scales.

    QuantizeRows      x [T, K] of groups: blocks of 1x128 in the rows copy, of 128x1 in the transposed one, column sums
    QuantizeWeights   w [G, N, K]: blocks of 128x128, the same values in both copies
    TileSums          sums[g] = Σ of what QuantizeRows left for each block of 128 tokens

Layouts and formulas: `fp8_reference`. K and N are multiples of 16; x's rows are contiguous, any multiple of 8 elements
apart. Rows of no group are not read into anything: a tile holds up to 128 rows of one group, TMA fills up with zeros.

Tile: 128 rows x 128 columns, one block in either direction. Thread t of 256 holds 8 x 8 values: rows 8 (t / 16) + ..,
columns 8 (t % 16) + .., read as 16 bytes of each row.
Roles, 896 threads, persistent, one CTA an SM: three teams of 8 warps quantise tiles in turn, warp 24 finds where the
tiles lie and loads them by TMA.
Pipeline: a ring of `stages` tiles, producer -> 8 warps of the team whose tile it is. Stages are a multiple of the
teams: each is always read by the same team, in order. (Else a team could wait for a stage's next but one phase while
the next is not yet complete, and a parity does not tell them apart.) Beside it twice as many notes of where a tile
lies, so that one is written before its stage is free.
Timeline of a tile: read it; columns' maxima by 8 rows to shared memory; release the stage, as all of it has arrived
(without columns: after the rows' scales); meet; 64 threads make the columns' scales while the others (and then they)
scale, round and store rows; meet; round columns into a transposed tile; meet; store its rows, 128 bytes of a column.
The transposed tile lies as 16 slots of 8 bytes a row; slot h of columns 8 c .. 8 c + 7 lies at h ^ c: writes of 8 bytes
and reads of 16 meet no bank twice. Where c is odd the two halves of 16 bytes are swapped, and swapped back.

Numerics: maxima are exact, products FP32, one rounding. Sums are FP32 in an order that the offsets alone decide.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.memory
import cutlass.pipeline as pipeline
from cutlass import Boolean, Float8E4M3FN, Float32, Int32, Int64, Uint16, Uint32, const_expr, range_constexpr
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream
from cutlass.cutlass_dsl import select_

from cute_kernels.hopper.fp8_scales import BLOCK, add_half, exchanged, halves_of, max_halves, pack_scaled, scales
from cute_kernels.hopper.operand_views import weight_view
from cute_kernels.hopper.quantize_pieces import find
from cute_kernels.hopper.rowwise_kernel import SPAN, ColumnSums, Teams, row_matrix, vector_of
from cute_kernels.hopper.rowwise_kernel import THREADS as SUM_THREADS
from cute_kernels.hopper.wgrad_operands import anew, ragged, tokens_of

TYPES = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}
TEAMS, WORKERS, WARPS = 3, 256, 8  # teams, their threads and warps
VECTOR = 8  # values of 16 bytes; rows and columns of a thread
ACROSS, CHUNKS = BLOCK // VECTOR, BLOCK // 16  # threads across a tile, and down; 16 bytes of a transposed row
PARTS = 4  # of a tile's rows, in which its columns are added up
MAGNITUDES = 0x7FFF7FFF
PRODUCER_REGISTERS, WORKER_REGISTERS = 24, 80
MEET = 1  # barrier of the first team, the others' follow


class Source(NamedTuple):
    """A TMA atom, and the coordinates it reads."""

    atom: Any
    tensor: Any


class Walk(NamedTuple):
    """How a matrix's tiles are numbered: blocks of rows, of columns, columns of a strip; this CTA, their number."""

    rows: Any
    columns: Any
    strip: Any
    first: Any
    step: Any


class Room(NamedTuple):
    """What a team has: the transposed tile, maxima of 8 and sums of 32 rows each, factors of columns and of rows, a
    barrier."""

    turned: Any
    maxima: Any
    sums: Any
    columns: Any
    rows: Any
    barrier: Any


def across(thread):
    """Which columns of a tile a thread has, in units of 8."""
    return thread & (ACROSS - 1)


def down(thread):
    """Which rows of a tile a thread has, in units of 8."""
    return thread >> 4


def vector(pointer, offset, count: int):
    """`count` elements, `offset` after `pointer`; offset is a multiple of count. (`align` would round at run time.)"""
    return cute.make_tensor(pointer + cute.assume(offset, divby=count), cute.make_layout(count))


def put(words, data: cute.Tensor, offset):
    """Words to E4M3 data, `offset` bytes from its start, in one store."""
    size = 4 * cute.size(words)
    there = cute.recast_ptr(data.iterator + cute.assume(offset, divby=size), dtype=Uint32)
    cute.autovec_copy(words, cute.make_tensor(there, cute.make_layout(size // 4)))


class Tiles:
    """What both kernels do with a tile. A thread's values are `words` [pair of columns, row], 4 x 8."""

    sums = False

    def __init__(self, options):
        self.element, self.source = TYPES[options.element], options.element
        self.power_of_two = options.power_of_two
        self.columnwise = options.columnwise
        self.stages = options.stages

    def tile_layout(self):
        """(column, row, stage) of the ring."""
        return cute.make_layout((BLOCK, BLOCK, self.stages), stride=(1, BLOCK, BLOCK * BLOCK))

    def make_source(self, view):
        """The TMA atom for whole tiles of a (column, row, ...) view."""
        one = cute.slice_(self.tile_layout(), (None, None, 0))
        return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), view, one, (BLOCK, BLOCK))

    def make_storage(self):
        element, stages = self.element, self.stages

        @cute.struct
        class Storage:
            ring: cute.struct.MemRange[Int64, 2 * stages]
            info: cute.struct.Align[cute.struct.MemRange[Int32, 8 * stages], 16]
            x: cute.struct.Align[cute.struct.MemRange[element, stages * BLOCK * BLOCK], 1024]
            teams: cute.struct.Align[cute.struct.MemRange[Uint32, TEAMS * sum(self.room_words())], 128]

        return Storage

    def room_words(self):
        """Words of shared memory of a team's parts, in the order of `Room`."""
        turned = BLOCK * BLOCK // 4 if self.columnwise else 0
        return turned, ACROSS * BLOCK // 2, PARTS * BLOCK if self.sums else 0, BLOCK, BLOCK

    def make_room(self, memory, team):
        sizes = self.room_words()
        base = memory.teams.data_ptr() + cute.assume(team * sum(sizes), divby=32)
        turned, maxima, sums, columns, rows = (base + sum(sizes[:i]) for i in range(5))

        def floats(pointer, *shape):
            return cute.make_tensor(cute.recast_ptr(pointer, dtype=Float32), cute.make_layout(shape))

        return Room(
            cute.make_tensor(turned, cute.make_layout(sizes[0])) if self.columnwise else None,
            cute.make_tensor(maxima, cute.make_layout((BLOCK // 2, ACROSS))),
            floats(sums, BLOCK, PARTS) if self.sums else None,
            floats(columns, BLOCK),
            floats(rows, BLOCK),
            pipeline.NamedBarrier(barrier_id=MEET + team, num_threads=WORKERS),
        )

    def make_ring(self, memory):
        return pipeline.PipelineTmaAsync.create(
            num_stages=self.stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, WARPS),
            tx_count=BLOCK * BLOCK * self.element.width // 8,
            barrier_storage=memory.ring.data_ptr(),
            cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
        )

    @cute.jit
    def place(self, walk: Walk, index):
        """(block of rows, block of columns) of a tile: strips of columns, in a strip row after row."""
        whole = walk.rows * walk.strip
        strip = index // whole
        local, left = index - strip * whole, strip * walk.strip
        width = cutlass.min(walk.columns - left, walk.strip)
        row = local // width
        return row, left + local - row * width

    @cute.jit
    def note(self, info, entry, facts):
        """The producer writes where a tile lies."""
        if cute.arch.lane_idx() == 0:
            for i in range_constexpr(4):
                info[i, entry] = facts[i]
        cute.arch.sync_warp()

    def noted(self, info, entry):
        facts = cute.make_rmem_tensor((4,), Int32)
        cute.autovec_copy(vector(info.iterator, 4 * entry, 4), facts)
        return [facts[i] for i in range(4)]

    @cute.jit
    def load(self, ring, x, source: Source, there, state):
        """The producer starts to load the tile at the corner of the view `there`."""
        ring.producer_acquire(state)
        tile = cute.local_tile(there, (BLOCK, BLOCK), (0, 0))
        target, origin = cpasync.tma_partition(
            source.atom, 0, cute.make_layout(1), cute.group_modes(x, 0, 2), cute.group_modes(tile, 0, 2)
        )
        cute.copy(source.atom, origin, target[None, state.index], tma_bar_ptr=ring.producer_get_barrier(state))

    def next_round(self, state):
        """The state of the team's next tile; the count is not used."""
        index = state.index + TEAMS
        over = Boolean(index >= self.stages)
        index = Int32(select_(over, index - self.stages, index))
        return pipeline.PipelineState(self.stages, state.count, index, state.phase ^ Int32(over))

    def read(self, x, state, thread):
        """A thread's values of the tile, two neighbouring columns a word: [pair, row]."""
        words = cute.make_rmem_tensor((VECTOR // 2, VECTOR), Uint32)
        pointer = cute.recast_ptr(x.iterator, dtype=Uint32)
        first = cute.crd2idx((across(thread) * VECTOR, down(thread) * VECTOR, state.index), x.layout) // 2
        for r in range(VECTOR):
            cute.autovec_copy(vector(pointer, first + r * (BLOCK // 2), VECTOR // 2), words[None, r])
        return words

    def magnitudes(self, words):
        """The bits of |x|, in the same places."""
        result = cute.make_rmem_tensor((VECTOR // 2, VECTOR), Uint32)
        for i in range(cute.size(words)):
            result[i] = words[i] & Uint32(MAGNITUDES)
        return result

    def amax_bits(self, half):
        """The FP32 bits of a 16-bit magnitude."""
        return Uint16(half).bitcast(self.element).to(Float32).bitcast(Int32)

    @cute.jit
    def store_rows(self, words, factors, data, first, columns, column, left, thread):
        """Scaled and rounded rows: row r of the tile to row first + r of data, if r < left."""
        mine, top = column * BLOCK + across(thread) * VECTOR, down(thread) * VECTOR
        rows = Int32(select_(mine < columns, left - top, Int32(0)))
        origin = Int64(first + top) * columns + mine
        for r in range_constexpr(VECTOR):
            packed = cute.make_rmem_tensor((2,), Uint32)
            for half in range_constexpr(2):
                pairs = [words[2 * half + i // 2, r] for i in range(4)]
                packed[half] = pack_scaled(pairs, (False, True, False, True), factors[r], self.source)
            if r < rows:
                put(packed, data, origin)
            origin += columns

    @cute.jit
    def turn(self, words, factors, room: Room, thread):
        """Scaled and rounded columns to the transposed tile, 8 tokens of a column at once."""
        first = across(thread) * VECTOR * (BLOCK // 4) + (down(thread) ^ across(thread)) * 2
        for e in range_constexpr(VECTOR):
            packed = cute.make_rmem_tensor((2,), Uint32)
            for half in range_constexpr(2):
                rows = [words[e // 2, 4 * half + r] for r in range(4)]
                packed[half] = pack_scaled(rows, (e % 2 == 1,) * 4, factors[e], self.source)
            cute.autovec_copy(packed, vector(room.turned.iterator, first + e * (BLOCK // 4), 2))

    @cute.jit
    def store_columns(self, room: Room, data, origin, pitch, columns, column, left, thread):
        """The transposed tile: its column c to row column · 128 + c of data, 16 tokens a thread; `left` tokens of it.

        origin: where the first column of the matrix has the tile's first token. pitch: from column to column.
        """
        chunk, top = thread & (CHUNKS - 1), thread >> 3
        lines = Int32(select_(chunk * 16 < left, columns - column * BLOCK - top, Int32(0)))
        origin += Int64(column * BLOCK + top) * pitch + chunk * 16
        swapped = Boolean(top >> 3 & 1 != 0)
        for i in range_constexpr(BLOCK * CHUNKS // WORKERS):
            step = const_expr(i * WORKERS // CHUNKS)  # columns further on
            at = (top + step) * (BLOCK // 4) + (chunk ^ ((top >> 4) + step // (2 * VECTOR))) * 4
            read = cute.make_rmem_tensor((4,), Uint32)
            cute.autovec_copy(vector(room.turned.iterator, at, 4), read)
            packed = cute.make_rmem_tensor((4,), Uint32)
            for word in range_constexpr(4):
                packed[word] = Uint32(select_(swapped, read[(word + 2) % 4], read[word]))
            if step < lines:
                put(packed, data, origin + Int64(step) * pitch)

    @cute.jit
    def read_factors(self, factors, part):
        """8 neighbouring factors out of shared memory."""
        result = cute.make_rmem_tensor((VECTOR,), Float32)
        cute.autovec_copy(vector(factors.iterator, part * VECTOR, VECTOR), result)
        return result


# ----------------------------------------------------------------------------------------------------------------------
# Rows of groups


class Copies(NamedTuple):
    """Where results go, each None if not wanted: the two copies with their scales, and sums of 128 tokens each."""

    data: Any
    scale: Any
    data_t: Any
    scale_t: Any
    partial: Any = None


class QuantizeRows(Tiles):
    """Blocks of 1x128 and of 128x1."""

    def __init__(self, options):
        super().__init__(options)
        self.rowwise, self.sums = options.rowwise, options.sums

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        offsets: cute.Tensor,
        padded: cute.Tensor,
        copies: tuple,
        strip: Int32,
        grid: Int32,
        stream,
    ):
        source = self.make_source(ragged(x))
        self.Storage = self.make_storage()
        self.kernel(*source, offsets, padded, copies[:5], strip).launch(
            grid=[grid, 1, 1],
            block=[TEAMS * WORKERS + 128, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
        )
        if const_expr(self.sums):
            TileSums()(copies[4], padded, copies[5], stream)

    @cute.kernel
    def kernel(
        self,
        atom: cute.CopyAtom,
        tensor: cute.Tensor,
        offsets: cute.Tensor,
        padded: cute.Tensor,
        copies: tuple,
        strip: Int32,
    ):
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        memory = cutlass.memory.SmemAllocator().allocate(self.Storage)
        x = memory.x.get_tensor(self.tile_layout())
        info = memory.info.get_tensor(cute.make_layout((4, 2 * self.stages)))
        ring = self.make_ring(memory)
        columns = tensor.shape[0]
        rows = padded[padded.shape[0] - 1] // BLOCK
        walk = Walk(rows, (columns + BLOCK - 1) // BLOCK, strip, cta, ctas)
        if warp >= TEAMS * WARPS:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp == TEAMS * WARPS:
                self.produce(ring, x, info, Source(atom, tensor), offsets, padded, walk)
        else:
            cute.arch.setmaxregister_increase(WORKER_REGISTERS)
            team = cute.arch.make_warp_uniform(thread // WORKERS)
            room = self.make_room(memory, team)
            self.work(ring, x, info, Copies(*copies), room, columns, walk, team, thread % WORKERS)

    @cute.jit
    def produce(self, ring, x, info, source: Source, offsets, padded, walk: Walk):
        """One warp: where each tile's rows lie, and its load."""
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)
        for index in cutlass.range(walk.first, walk.rows * walk.columns, walk.step, unroll=1):
            row, column = self.place(walk, index)
            group = find(padded, row * BLOCK)
            first = offsets[group] + row * BLOCK - padded[group]
            left = cutlass.min(offsets[group + 1] - first, BLOCK)
            # The producer's phase starts at 1, the teams' at 0.
            self.note(info, state.index + self.stages * (1 - state.phase), (first, left, row, column))
            self.load(
                ring, x, source, cute.domain_offset((column * BLOCK, 0), tokens_of(source.tensor, first, left)), state
            )
            state.advance()
        ring.producer_tail(state)

    @cute.jit
    def work(self, ring, x, info, copies: Copies, room: Room, columns, walk: Walk, team, thread):
        """Eight warps: every third tile of this CTA."""
        state = pipeline.PipelineState(self.stages, Int32(0), Int32(team), Int32(0))
        begin = walk.first + team * walk.step
        for _ in cutlass.range(begin, walk.rows * walk.columns, TEAMS * walk.step, unroll=1):
            ring.consumer_wait(state)
            thread = anew(thread)
            first, left, row, column = self.noted(info, state.index + self.stages * state.phase)
            if const_expr(self.sums):
                self.keep_sums(x, state, room, thread)
            words = self.read(x, state, thread)
            magnitudes = self.magnitudes(words)
            pairs = self.row_maxima(magnitudes) if const_expr(self.rowwise) else None
            if const_expr(self.columnwise):
                self.keep_maxima(magnitudes, room, thread)
            else:
                factors = self.scale_rows(pairs, room, copies.scale, first, column, left, thread)
            cute.arch.sync_warp()
            ring.consumer_release(state)
            state = self.next_round(state)
            if const_expr(self.columnwise):
                room.barrier.arrive_and_wait()
                self.scale_columns(room, copies.scale_t, row, column, columns, thread)
            if const_expr(self.sums):
                self.add_sums(room, copies.partial, row, column, columns, thread)
            if const_expr(self.rowwise):
                if const_expr(self.columnwise):
                    factors = self.scale_rows(pairs, room, copies.scale, first, column, left, thread)
                self.store_rows(words, factors, copies.data, first, columns, column, left, thread)
            if const_expr(self.columnwise):
                room.barrier.arrive_and_wait()
                thread = anew(thread)
                if const_expr(not self.power_of_two):
                    # Divisions need registers. `left` is at most 128; what could be kept from the rows is not.
                    for i in range_constexpr(cute.size(words)):
                        words[i] = words[i] ^ Uint32(left >> 8)
                self.turn(words, self.read_factors(room.columns, across(thread)), room, thread)
                room.barrier.arrive_and_wait()
                pitch = copies.data_t.shape[1]
                self.store_columns(room, copies.data_t, Int64(row) * BLOCK, pitch, columns, column, BLOCK, thread)

    def keep_maxima(self, magnitudes, room: Room, thread):
        """The largest of a thread's 8 rows, for its columns."""
        largest = cute.make_rmem_tensor((VECTOR // 2,), Uint32)
        for pair in range(VECTOR // 2):
            largest[pair] = magnitudes[pair, 0]
            for r in range(1, VECTOR):
                largest[pair] = max_halves(largest[pair], magnitudes[pair, r])
        cute.autovec_copy(largest, vector(room.maxima.iterator, thread * (VECTOR // 2), VECTOR // 2))

    @cute.jit
    def scale_columns(self, room: Room, scale_t, row, column, columns, thread):
        """Warps 0 and 1: scales of two columns a thread."""
        if thread < BLOCK // 2:
            largest = room.maxima[thread, 0]
            for part in range_constexpr(1, ACROSS):
                largest = max_halves(largest, room.maxima[thread, part])
            factors, stored = cute.make_rmem_tensor((2,), Float32), cute.make_rmem_tensor((2,), Float32)
            for half in range_constexpr(2):
                amax = self.amax_bits(largest >> 16 if half else largest & Uint32(0xFFFF))
                factors[half], stored[half] = scales(amax, self.power_of_two, self.source)
            cute.autovec_copy(factors, vector(room.columns.iterator, 2 * thread, 2))
            mine = column * BLOCK + 2 * thread
            if mine < columns:
                cute.autovec_copy(stored, vector(scale_t.iterator, Int64(row) * scale_t.shape[1] + mine, 2))

    def row_maxima(self, magnitudes):
        """The largest of a thread's columns, for its rows; two rows a word."""
        pairs = []
        for first in range(0, VECTOR, 2):
            both = [magnitudes[0, first], magnitudes[0, first + 1]]
            for row in range(2):
                for pair in range(1, VECTOR // 2):
                    both[row] = max_halves(both[row], magnitudes[pair, first + row])
            pairs.append(max_halves(halves_of(*both, False), halves_of(*both, True)))
        return pairs

    @cute.jit
    def scale_rows(self, pairs, room: Room, scale, first, column, left, thread):
        """Factors of a thread's 8 rows. 16 threads share them: in each step a thread keeps half of what it has."""
        for distance in (8, 4):
            upper, half = Boolean(thread & distance != 0), len(pairs) // 2
            kept = [Uint32(select_(upper, pairs[half + i], pairs[i])) for i in range(half)]
            sent = [Uint32(select_(upper, pairs[i], pairs[half + i])) for i in range(half)]
            pairs = [max_halves(kept[i], exchanged(sent[i], distance)) for i in range(half)]
        largest = pairs[0]
        for distance in (2, 1):
            largest = max_halves(largest, exchanged(largest, distance))
        amax = self.amax_bits(Uint32(select_(Boolean(thread & 2 != 0), largest >> 16, largest & Uint32(0xFFFF))))
        factor, stored = scales(amax, self.power_of_two, self.source)
        row = down(thread) * VECTOR + (across(thread) >> 1)
        cute.arch.sync_warp()
        if thread & 1 == 0:
            room.rows[row] = factor
            if row < left:
                scale[column, first + row] = stored
        cute.arch.sync_warp()
        return self.read_factors(room.rows, down(thread))

    def keep_sums(self, x, state, room: Room, thread):
        """Sums of 32 rows of two columns. Read once more: a thread that added up what it holds would hold too much."""
        pair, part = thread & (BLOCK // 2 - 1), thread >> 6
        pointer = cute.recast_ptr(x.iterator, dtype=Uint32)
        first = cute.crd2idx((2 * pair, part * (BLOCK // PARTS), state.index), x.layout) // 2
        sums = cute.make_rmem_tensor((2,), Float32)
        sums.fill(0.0)
        for r in range(BLOCK // PARTS):
            word = (pointer + (first + r * (BLOCK // 2))).load()
            for half in range(2):
                sums[half] = add_half(sums[half], word, half == 1, self.source)
        cute.autovec_copy(sums, vector(room.sums.iterator, 2 * thread, 2))

    @cute.jit
    def add_sums(self, room: Room, partial, row, column, columns, thread):
        """Warps 4 to 7: sums of the tile's rows, a column a thread."""
        if thread >= BLOCK:
            total = room.sums[thread - BLOCK, 0]
            for part in range_constexpr(1, PARTS):
                total += room.sums[thread - BLOCK, part]
            mine = column * BLOCK + thread - BLOCK
            if mine < columns:
                partial[row, mine] = total


class TileSums(ColumnSums):
    """A CTA, one team, adds up the sums of a group's blocks, 256 columns."""

    def __init__(self):
        self.teams = Teams(alone=False)

    @cute.jit
    def __call__(self, partial: cute.Tensor, padded: cute.Tensor, sums: cute.Tensor, stream):
        spans = (sums.shape[1] + SPAN - 1) // SPAN
        self.add_tiles(partial, padded, sums).launch(
            grid=[sums.shape[0], spans, 1], block=[SUM_THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def add_tiles(self, partial: cute.Tensor, padded: cute.Tensor, sums: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        group, span, _ = cute.arch.block_idx()
        total = self.column_sum(partial, None, padded[group] // BLOCK, padded[group + 1] // BLOCK, span, 0, thread)
        column = span * SPAN + thread
        if column < sums.shape[1]:
            sums[group, column] = total


# ----------------------------------------------------------------------------------------------------------------------
# Weights


class QuantizeWeights(Tiles):
    """Blocks of 128x128 of every group's weight."""

    def __init__(self, options):
        super().__init__(options)
        self.separate = options.separate

    @cute.jit
    def __call__(self, w: cute.Tensor, table: cute.Tensor | None, copies: tuple, strip: Int32, grid: Int32, stream):
        source = self.make_source(weight_view(w, 1, 0, True, False, self.separate))
        self.Storage = self.make_storage()
        self.kernel(*source, table, copies, strip).launch(
            grid=[grid, 1, 1],
            block=[TEAMS * WORKERS + 128, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, atom: cute.CopyAtom, tensor: cute.Tensor, table: cute.Tensor | None, copies: tuple, strip: Int32):
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        memory = cutlass.memory.SmemAllocator().allocate(self.Storage)
        x = memory.x.get_tensor(self.tile_layout())
        ring = self.make_ring(memory)
        columns, rows = tensor.shape[0], tensor.shape[1]
        walk = Walk((rows + BLOCK - 1) // BLOCK, (columns + BLOCK - 1) // BLOCK, strip, cta, ctas)
        if warp >= TEAMS * WARPS:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp == TEAMS * WARPS:
                self.produce(ring, x, Source(atom, tensor), table, copies[0].shape[0], walk)
        else:
            cute.arch.setmaxregister_increase(WORKER_REGISTERS)
            team = cute.arch.make_warp_uniform(thread // WORKERS)
            room = self.make_room(memory, team)
            self.work(ring, x, Copies(*copies), room, rows, columns, walk, team, thread % WORKERS)

    @cute.jit
    def produce(self, ring, x, source: Source, table, groups, walk: Walk):
        """One warp loads every tile of this CTA."""
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)
        each = walk.rows * walk.columns
        for index in cutlass.range(walk.first, groups * each, walk.step, unroll=1):
            group = index // each
            row, column = self.place(walk, index - group * each)
            if const_expr(self.separate):
                group = table[group].to(Int32)
            there = cute.domain_offset((column * BLOCK, row * BLOCK), source.tensor[None, None, 0, group])
            self.load(ring, x, source, there, state)
            state.advance()
        ring.producer_tail(state)

    @cute.jit
    def work(self, ring, x, copies: Copies, room: Room, rows, columns, walk: Walk, team, thread):
        """Eight warps: every third tile of this CTA."""
        state = pipeline.PipelineState(self.stages, Int32(0), Int32(team), Int32(0))
        each, turn, begin = walk.rows * walk.columns, Int32(0), walk.first + team * walk.step
        for index in cutlass.range(begin, copies.data.shape[0] * each, TEAMS * walk.step, unroll=1):
            group = index // each
            row, column = self.place(walk, index - group * each)
            ring.consumer_wait(state)
            words = self.read(x, state, thread)
            self.keep_maximum(self.magnitudes(words), room, turn, thread)
            cute.arch.sync_warp()
            ring.consumer_release(state)
            state = self.next_round(state)
            room.barrier.arrive_and_wait()
            factor, stored = self.scale(room, turn)
            turn = 1 - turn
            if thread == 0:
                copies.scale[group, row, column] = stored
                if const_expr(self.columnwise):
                    copies.scale_t[group, column, row] = stored
            left, factors = rows - row * BLOCK, [factor] * VECTOR
            self.store_rows(words, factors, copies.data, group * rows + row * BLOCK, columns, column, left, thread)
            if const_expr(self.columnwise):
                self.turn(words, factors, room, thread)
                room.barrier.arrive_and_wait()
                origin = Int64(group) * columns * rows + row * BLOCK
                self.store_columns(room, copies.data_t, origin, rows, columns, column, left, thread)

    @cute.jit
    def keep_maximum(self, magnitudes, room: Room, turn, thread):
        """The largest of a warp's values. Two sets in turn: a warp may be a tile ahead of those that read."""
        largest = magnitudes[0]
        for i in range_constexpr(1, cute.size(magnitudes)):
            largest = max_halves(largest, magnitudes[i])
        largest = cutlass.max(largest >> 16, largest & Uint32(0xFFFF))
        largest = Uint32(cute.arch.warp_redux_sync(largest, kind="umax"))
        if thread & 31 == 0:
            room.maxima[turn * WARPS + (thread >> 5)] = largest

    @cute.jit
    def scale(self, room: Room, turn):
        """(factor, stored scale) of the tile."""
        largest = room.maxima[turn * WARPS]
        for other in range_constexpr(1, WARPS):
            largest = cutlass.max(largest, room.maxima[turn * WARPS + other])
        return scales(self.amax_bits(largest), self.power_of_two, self.source)


# ----------------------------------------------------------------------------------------------------------------------


def compact(element, *shape):
    """Fake contiguous data."""
    return make_fake_compact_tensor(element, shape, stride_order=tuple(reversed(range(len(shape)))), assumed_align=16)


def scale_rows_of(*shape):
    """Fake FP32 scales whose rows are multiples of 4."""
    return compact(Float32, *shape, cute.sym_int(divisibility=4))


def sixteens():
    return cute.sym_int(divisibility=16)


def build_rows(options):
    """x, offsets, padded, (data, scale, data_t, scale_t, partial, sums) each or None, strip, grid size, stream."""
    rows, columns, tokens, blocks = cute.sym_int(), sixteens(), cute.sym_int(divisibility=BLOCK), cute.sym_int()
    copies = (
        compact(Float8E4M3FN, rows, columns) if options.rowwise else None,
        scale_rows_of(cute.sym_int()) if options.rowwise else None,
        compact(Float8E4M3FN, columns, tokens) if options.columnwise else None,
        scale_rows_of(blocks) if options.columnwise else None,
        row_matrix(Float32, blocks, columns) if options.sums else None,
        row_matrix(Float32, cute.sym_int(), columns) if options.sums else None,
    )
    x = row_matrix(TYPES[options.element], rows, columns)
    places = vector_of(Int32, cute.sym_int()), vector_of(Int32, cute.sym_int())
    return QuantizeRows(options), (x, *places, copies, Int32(1), Int32(1), make_fake_stream())


def build_weights(options):
    """w, table or None, (data, scale, data_t, scale_t), the latter two or None, strip, grid size, stream."""
    groups, rows, columns = cute.sym_int(), sixteens(), sixteens()
    shape = (rows, columns) if options.separate else (groups, rows, columns)
    w = compact(TYPES[options.element], *shape)
    table = make_fake_compact_tensor(Int64, (groups,), assumed_align=8) if options.separate else None
    copies = (
        compact(Float8E4M3FN, groups, rows, columns),
        scale_rows_of(groups, cute.sym_int()),
        compact(Float8E4M3FN, groups, columns, rows) if options.columnwise else None,
        scale_rows_of(groups, cute.sym_int()) if options.columnwise else None,
    )
    return QuantizeWeights(options), (w, table, copies, Int32(1), Int32(1), make_fake_stream())


_BUILDERS = {"QuantizeOptions": build_rows, "QuantizeWeightOptions": build_weights}


def build(options):
    """(jit function, fake arguments) of the kernel that `options`, one of `fp8_quantize`'s classes, belongs to."""
    return _BUILDERS[type(options).__name__](options)
