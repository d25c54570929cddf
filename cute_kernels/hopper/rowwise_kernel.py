"""Kernels that pass over rows once, without tensor cores, on SM90: offsets, activation gradients, bias gradients.

    GroupOffsets   offsets[g] = min(Σ_{j<g} max(splits[j], 0), rows); if wanted, where padded groups begin,
                   and tile counters = 0
    Dact           dpreact = (dact·p)·∂f(preact), dprobs[row] = Σ_columns dact·f(preact)
    ColumnSums     db[g] = Σ_{rows of g} s·dy, in two stages
    RowDots        ds[row] = Σ_n dy[row, n]·bias[g, n]

Shapes: row-shaped operands [T, width] bf16 or fp16, rows contiguous (any row stride that is a multiple of 8), width a
multiple of 8; offsets [G+1] int32. Rows that belong to no group are read by none of them and are zero in row-shaped
results.
Numerics: FP32 inside, sums in an order that the offsets alone decide: the same bits run after run.
Roles: warps work alone and keep no state; a lane takes 8 neighbouring columns, 16 bytes of a 2-byte type.
Grids: a team of 256 threads takes a unit of work, 8 rows, say. There are as many CTAs of one team as units; but where
SMs are to stay free (`alone`), no more CTAs than SMs are left, each of four teams and with so much shared memory that
it has its SM to itself.
"""

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor

from cute_kernels.hopper.epilogues.activation import functions

TYPES = {
    "bfloat16": cutlass.BFloat16,
    "float16": cutlass.Float16,
    "float32": cutlass.Float32,
    "int32": cutlass.Int32,
    "int64": cutlass.Int64,
}
THREADS, WARPS = 256, 8  # of a team
ALONE_TEAMS, ALONE_BYTES = 4, 128 * 1024  # of a CTA that has its SM to itself: teams, shared memory (more than half)
VECTOR = 8  # columns of one lane
SPAN = 32 * VECTOR  # columns of one warp
CHUNK = 256  # rows that one CTA of ColumnSums adds up
BATCH = 4  # rows that a warp of ColumnSums has in flight

# ----------------------------------------------------------------------------------------------------------------------
# What they share


class Teams:
    """How a kernel's units of work are spread over teams, and those over CTAs."""

    def __init__(self, alone: bool):
        self.alone, self.teams = alone, ALONE_TEAMS if alone else 1

    def launch(self, kernel, units, ctas, stream):
        """Launch it for so many units; ctas: the most if alone."""
        grid = cutlass.min((units + self.teams - 1) // self.teams, ctas) if self.alone else units
        smem = ALONE_BYTES if self.alone else None
        kernel.launch(grid=[grid, 1, 1], block=[THREADS * self.teams, 1, 1], smem=smem, stream=stream)

    def place(self):
        """(team, its first unit, the distance to its next, thread within the team)."""
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        team = thread // THREADS
        return team, cta * self.teams + team, ctas * self.teams, thread % THREADS


@cute.jit
def meet(team):
    """All threads of a team."""
    cute.arch.barrier(barrier_id=team + 1, number_of_threads=THREADS)


@cute.jit
def read_vector(x: cute.Tensor, row, column):
    """8 columns of a row in FP32."""
    raw = cute.make_rmem_tensor((VECTOR,), x.element_type)
    at = (x.iterator + cute.crd2idx((Int64(row), column), x.layout)).align(16)
    cute.autovec_copy(cute.make_tensor(at, cute.make_layout((VECTOR,))), raw)
    values = cute.make_rmem_tensor((VECTOR,), Float32)
    values.store(raw.load().to(Float32))
    return values


@cute.jit
def write_vector(values: cute.Tensor, x: cute.Tensor, row, column):
    """8 FP32 values, rounded, to a row."""
    rounded = cute.make_rmem_tensor((VECTOR,), x.element_type)
    rounded.store(values.load().to(x.element_type))
    at = (x.iterator + cute.crd2idx((Int64(row), column), x.layout)).align(16)
    cute.autovec_copy(rounded, cute.make_tensor(at, cute.make_layout((VECTOR,))))


@cute.jit
def warp_sum(value):
    """The sum over the warp's 32 lanes, in every lane."""
    for step in range_constexpr(5):
        value += cute.arch.shuffle_sync_bfly(value, offset=16 >> step)
    return value


@cute.jit
def group_of(offsets: cute.Tensor, row):
    """The group of a row that has one: the last g with offsets[g] <= row."""
    low, high = Int32(0), Int32(offsets.shape[0] - 1)
    while high - low > 1:
        middle = (low + high) // 2
        if offsets[middle] <= row:
            low = middle
        else:
            high = middle
    return low


def row_matrix(dtype, rows, width):
    """A fake [rows, width] tensor with any row stride that keeps rows 16-byte aligned."""
    return make_fake_tensor(dtype, (rows, width), (cute.sym_int64(divisibility=VECTOR), 1), assumed_align=16)


def vector_of(dtype, size):
    return make_fake_compact_tensor(dtype, (size,), assumed_align=dtype.width // 8)


# ----------------------------------------------------------------------------------------------------------------------
# Offsets


class GroupOffsets:
    """One CTA. Thread t adds up ceil(G / 256) neighbouring sizes; the sums are scanned by warps, then over warps.

    Adding numbers of [0, rows] and capping at rows is associative, so every step caps and 32 bits are enough to pass
    on. Padded offsets need the sizes that are left after capping, so they are scanned after the offsets.
    """

    def __init__(self, options):
        self.index = TYPES[options.index]

    @cute.jit
    def __call__(
        self,
        splits: cute.Tensor,
        offsets: cute.Tensor,
        padded: cute.Tensor | None,
        counters: cute.Tensor | None,
        rows: Int32,
        multiple: Int32,
        stream,
    ):
        self.kernel(splits, offsets, padded, counters, rows, multiple).launch(
            grid=[1, 1, 1], block=[THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        splits: cute.Tensor,
        offsets: cute.Tensor,
        padded: cute.Tensor | None,
        counters: cute.Tensor | None,
        rows: Int32,
        multiple: Int32,
    ):
        thread, _, _ = cute.arch.thread_idx()
        if const_expr(counters is not None):
            self.clear(counters, thread)
        memory = cutlass.memory.SmemAllocator()
        warp_totals = memory.allocate_tensor(Int32, cute.make_layout(WARPS), byte_alignment=16)
        groups = splits.shape[0]
        each = (groups + THREADS - 1) // THREADS
        begin = cutlass.min(thread * each, groups)
        end = cutlass.min(begin + each, groups)
        mine = Int32(0)
        for g in cutlass.range(begin, end, unroll=1):
            mine = self.add(mine, splits[g], rows)
        first = self.sum_below(mine, warp_totals, rows)
        total = first
        for g in cutlass.range(begin, end, unroll=1):
            total = self.add(total, splits[g], rows)
            offsets[g + 1] = total
        if thread == 0:
            offsets[0] = Int32(0)
        if const_expr(padded is not None):
            self.pad(splits, padded, rows, multiple, first, begin, end, warp_totals)

    @cute.jit
    def pad(self, splits, padded: cute.Tensor, rows, multiple, first, begin, end, warp_totals):
        """Sums of the capped sizes, each rounded up to a multiple. first: the offset of group `begin`."""
        mine, total = Int32(0), first
        for g in cutlass.range(begin, end, unroll=1):
            after = self.add(total, splits[g], rows)
            mine += (after - total + multiple - 1) // multiple * multiple
            total = after
        cute.arch.sync_threads()
        place, total = self.sum_below(mine, warp_totals, Int32(2**31 - 1)), first
        for g in cutlass.range(begin, end, unroll=1):
            after = self.add(total, splits[g], rows)
            place += (after - total + multiple - 1) // multiple * multiple
            total = after
            padded[g + 1] = place
        if cute.arch.thread_idx()[0] == 0:
            padded[0] = Int32(0)

    @cute.jit
    def sum_below(self, mine, warp_totals, cap):
        """The sum of `mine` over all threads before this one, capped."""
        thread, _, _ = cute.arch.thread_idx()
        lane, warp = thread % 32, thread // 32
        upto = mine
        for step in range_constexpr(5):
            below = cute.arch.shuffle_sync_up(upto, offset=1 << step)
            if lane >= 1 << step:
                upto = self.add(upto, below, cap)
        if lane == 31:
            warp_totals[warp] = upto
        cute.arch.sync_threads()
        total = cute.arch.shuffle_sync_up(upto, offset=1)
        if lane == 0:
            total = Int32(0)
        for other in range_constexpr(WARPS - 1):
            if other < warp:
                total = self.add(total, warp_totals[other], cap)
        return total

    @cute.jit
    def clear(self, counters: cute.Tensor, thread):
        if thread < counters.shape[0]:
            counters[thread] = Int32(0)

    @cute.jit
    def add(self, total, size, cap):
        """min(total + max(size, 0), cap); a size near the end of int64 does not wrap."""
        size = cutlass.min(cutlass.max(Int64(size), Int64(0)), Int64(cap))
        return Int32(cutlass.min(Int64(total) + size, Int64(cap)))


def build_group_offsets(options):
    """splits, offsets, padded offsets or None, counters (at most 256) or None, rows, what a padded group is a multiple
    of, stream.
    """
    splits = make_fake_tensor(
        TYPES[options.index], (cute.sym_int(),), (cute.sym_int64(),), assumed_align=TYPES[options.index].width // 8
    )
    padded = vector_of(Int32, cute.sym_int()) if options.padded else None
    counters = vector_of(Int32, cute.sym_int()) if options.counts else None
    offsets = vector_of(Int32, cute.sym_int())
    return GroupOffsets(options), (splits, offsets, padded, counters, Int32(0), Int32(1), make_fake_stream())


# ----------------------------------------------------------------------------------------------------------------------
# Activation gradients


class Dact:
    """A warp for each row. Formulas: the activation's module in `epilogues`; equals `reference.dact`."""

    def __init__(self, options):
        self.facts = options.activation
        self.curve = functions(options.activation.kind)
        self.halves = 2 if self.curve.GATED else 1
        self.block = options.preact_interleave
        self.element = TYPES[options.element]
        self.teams = Teams(options.alone)

    @cute.jit
    def __call__(
        self,
        dact: cute.Tensor,
        preact: cute.Tensor,
        offsets: cute.Tensor,
        probs: cute.Tensor | None,
        dpreact: cute.Tensor,
        dprobs: cute.Tensor | None,
        ctas: Int32,
        stream,
    ):
        units = (dact.shape[0] + WARPS - 1) // WARPS
        self.teams.launch(self.kernel(dact, preact, offsets, probs, dpreact, dprobs), units, ctas, stream)

    @cute.kernel
    def kernel(
        self,
        dact: cute.Tensor,
        preact: cute.Tensor,
        offsets: cute.Tensor,
        probs: cute.Tensor | None,
        dpreact: cute.Tensor,
        dprobs: cute.Tensor | None,
    ):
        _, first, step, thread = self.teams.place()
        lane = thread % 32
        for row in cutlass.range(first * WARPS + thread // 32, dact.shape[0], step * WARPS, unroll=1):
            valid = row < offsets[offsets.shape[0] - 1]
            factor = self.row_factor(probs, row, valid)
            total = Float32(0.0)
            width = dact.shape[1]
            for column in cutlass.range(lane * VECTOR, width, SPAN, unroll=2):
                total += self.columns(dact, preact, dpreact, row, column, width, valid, factor)
            if const_expr(dprobs is not None):
                total = warp_sum(total)
                if lane == 0:
                    dprobs[row] = total  # type: ignore[index]

    @cute.jit
    def row_factor(self, probs: cute.Tensor | None, row, valid):
        """The row's prob, rounded to the compute type; 1 if there are none."""
        factor = Float32(1.0)
        if const_expr(probs is not None):
            factor = self.rounded_prob(probs, row, valid)
        return factor

    @cute.jit
    def rounded_prob(self, probs: cute.Tensor, row, valid):
        factor = Float32(0.0)
        if valid:
            factor = probs[row].to(self.element).to(Float32)
        return factor

    @cute.jit
    def columns(self, dact, preact, dpreact, row, column, width, valid, factor):
        """8 columns of every half; returns their share of Σ dact·f."""
        slopes = [cute.make_rmem_tensor((VECTOR,), Float32) for _ in range(self.halves)]
        for half in range_constexpr(self.halves):
            slopes[half].fill(0.0)
        total = Float32(0.0)
        firsts = self.firsts(column, width)
        if valid:
            grad = read_vector(dact, row, column)
            vectors = [read_vector(preact, row, first) for first in firsts]
            for e in range_constexpr(VECTOR):
                at = self.inputs_at(e)
                value, *parts = self.curve.backward(self.facts, *(vectors[i][j] for i, j in at))
                total += grad[e] * value
                for half in range_constexpr(self.halves):
                    i, j = at[half]
                    slopes[i][j] = grad[e] * factor * parts[half]
        for i in range_constexpr(self.halves):
            write_vector(slopes[i], dpreact, row, firsts[i])
        return total

    def firsts(self, column, width):
        """Where the vectors begin that hold the inputs of 8 columns."""
        if self.block == 0:
            return [half * width + column for half in range(self.halves)]
        if self.block == 1:
            return [2 * column, 2 * column + VECTOR]
        gate = column // self.block * (2 * self.block) + column % self.block
        return [gate, gate + self.block]

    def inputs_at(self, e: int):
        """(vector, element) of each input of the e-th of 8 columns."""
        if self.block == 1:
            return [divmod(2 * e + half, VECTOR) for half in range(2)]
        return [(half, e) for half in range(self.halves)]


def build_dact(options):
    """dact, preact, offsets, probs or None, dpreact, dprobs or None, most CTAs, stream."""
    rows, width, both = cute.sym_int(), cute.sym_int(divisibility=VECTOR), cute.sym_int(divisibility=VECTOR)
    element = TYPES[options.element]
    kernel = Dact(options)
    wide = both if kernel.halves == 2 else width
    return kernel, (
        row_matrix(element, rows, width),
        row_matrix(element, rows, wide),
        vector_of(Int32, cute.sym_int()),
        None if options.probs is None else vector_of(TYPES[options.probs], rows),
        row_matrix(element, rows, wide),
        vector_of(Float32, rows) if options.need_dprobs else None,
        Int32(1),
        make_fake_stream(),
    )


# ----------------------------------------------------------------------------------------------------------------------
# Bias gradients


class ColumnSums:
    """Stage 1: a team adds up to 256 rows of a group, 256 columns, into partial[slot]. Stage 2: a team adds a group's
    slots.

    Chunk k of group g has slot offsets[g] // 256 + g + k. That is injective, needs no scan, and ends below T // 256 +
    G, which the host knows. In both stages warp w of 8 adds rows w, w + 8, ...; the 8 sums are added in order through
    shared memory.
    """

    chunk = CHUNK

    def __init__(self, options):
        self.interleaved, self.teams = options.interleaved, Teams(options.alone)

    @cute.jit
    def __call__(
        self,
        dy: cute.Tensor,
        offsets: cute.Tensor,
        scale: cute.Tensor | None,
        partial: cute.Tensor,
        sums: cute.Tensor,
        block: Int32,
        ctas: Int32,
        stream,
    ):
        spans = (dy.shape[1] + SPAN - 1) // SPAN
        self.teams.launch(self.add_rows(dy, offsets, scale, partial), partial.shape[0] * spans, ctas, stream)
        self.teams.launch(self.add_slots(partial, offsets, sums, block), sums.shape[0] * spans, ctas, stream)

    @cute.jit
    def first_slot(self, offsets: cute.Tensor, group):
        return offsets[group] // self.chunk + group

    @cute.kernel
    def add_rows(self, dy: cute.Tensor, offsets: cute.Tensor, scale: cute.Tensor | None, partial: cute.Tensor):
        team, first, step, thread = self.teams.place()
        slots, spans = partial.shape[0], (dy.shape[1] + SPAN - 1) // SPAN
        for unit in cutlass.range(first, slots * spans, step, unroll=1):
            span = unit // slots
            slot = unit - span * slots
            low, high = Int32(0), Int32(offsets.shape[0] - 1)
            while high - low > 1:
                middle = (low + high) // 2
                if self.first_slot(offsets, middle) <= slot:
                    low = middle
                else:
                    high = middle
            begin = offsets[low] + (slot - self.first_slot(offsets, low)) * CHUNK
            end = cutlass.min(begin + CHUNK, offsets[low + 1])
            if begin < end:
                total = self.column_sum(dy, scale, begin, end, span, team, thread)
                column = span * SPAN + thread
                if column < dy.shape[1]:
                    partial[slot, column] = total

    @cute.kernel
    def add_slots(self, partial: cute.Tensor, offsets: cute.Tensor, sums: cute.Tensor, block: Int32):
        team, first, step, thread = self.teams.place()
        groups, spans = sums.shape[0], (sums.shape[1] + SPAN - 1) // SPAN
        for unit in cutlass.range(first, groups * spans, step, unroll=1):
            span = unit // groups
            group = unit - span * groups
            begin = self.first_slot(offsets, group)
            end = begin + (offsets[group + 1] - offsets[group] + self.chunk - 1) // self.chunk
            total = self.column_sum(partial, None, begin, end, span, team, thread)
            column = span * SPAN + thread
            if column < sums.shape[1]:
                place = column
                if const_expr(self.interleaved):
                    half = sums.shape[1] // 2
                    up = column // half
                    in_half = column - up * half
                    place = (in_half // block) * (2 * block) + up * block + in_half % block
                sums[group, place] = total

    @cute.jit
    def column_sum(self, x: cute.Tensor, scale: cute.Tensor | None, begin, end, span, team, thread):
        """Σ of rows [begin, end) of the column span·256 + thread, by the whole team."""
        lane, warp = thread % 32, thread // 32
        column = span * SPAN + lane * VECTOR
        totals = cute.make_rmem_tensor((VECTOR,), Float32)
        totals.fill(0.0)
        if column < x.shape[1]:
            for first in cutlass.range(begin + warp, end, WARPS * BATCH, unroll=1):
                self.add_batch(x, scale, first, end, column, totals)
        memory = cutlass.memory.SmemAllocator()
        layout = cute.make_ordered_layout((self.teams.teams, WARPS, SPAN), order=(2, 1, 0))
        shared = memory.allocate_tensor(Float32, layout, byte_alignment=16)[team, None, None]
        meet(team)  # all have read the unit before
        cute.autovec_copy(totals, cute.local_tile(shared[warp, None], (VECTOR,), (lane,)))
        meet(team)
        total = Float32(0.0)
        for other in range_constexpr(WARPS):
            total += shared[other, thread]
        return total

    @cute.jit
    def add_batch(self, x, scale, first, end, column, totals):
        """Rows first, first + 8, ... of one batch: all are read before any is added."""
        raw = cute.make_rmem_tensor((VECTOR, BATCH), x.element_type)
        raw.fill(0)
        factors = cute.make_rmem_tensor((BATCH,), Float32)
        factors.fill(1.0)
        for i in range_constexpr(BATCH):
            row = first + i * WARPS
            if row < end:
                at = (x.iterator + cute.crd2idx((Int64(row), column), x.layout)).align(16)
                cute.autovec_copy(cute.make_tensor(at, cute.make_layout((VECTOR,))), raw[None, i])
                if const_expr(scale is not None):
                    factors[i] = scale[row].to(Float32)
        for i in range_constexpr(BATCH):
            values = raw[None, i].load().to(Float32)
            if const_expr(scale is not None):
                values = values * factors[i]
            totals.store(totals.load() + values)


def build_column_sums(options):
    """dy, offsets, scale or None, partial, sums, interleave block, most CTAs, stream."""
    rows, width, slots = cute.sym_int(), cute.sym_int(divisibility=VECTOR), cute.sym_int()
    return ColumnSums(options), (
        row_matrix(TYPES[options.element], rows, width),
        vector_of(Int32, cute.sym_int()),
        None if options.scale is None else vector_of(TYPES[options.scale], rows),
        row_matrix(Float32, slots, width),
        row_matrix(Float32, cute.sym_int(), width),
        Int32(1),
        Int32(1),
        make_fake_stream(),
    )


# ----------------------------------------------------------------------------------------------------------------------
# Gradients of a bias' scale


class RowDots:
    """A warp for each row: the row of dy times the bias of its group."""

    def __init__(self, options):
        self.teams = Teams(options.alone)

    @cute.jit
    def __call__(
        self, dy: cute.Tensor, bias: cute.Tensor, offsets: cute.Tensor, dots: cute.Tensor, ctas: Int32, stream
    ):
        units = (dy.shape[0] + WARPS - 1) // WARPS
        self.teams.launch(self.kernel(dy, bias, offsets, dots), units, ctas, stream)

    @cute.kernel
    def kernel(self, dy: cute.Tensor, bias: cute.Tensor, offsets: cute.Tensor, dots: cute.Tensor):
        _, first, step, thread = self.teams.place()
        lane = thread % 32
        for row in cutlass.range(first * WARPS + thread // 32, dy.shape[0], step * WARPS, unroll=1):
            total = Float32(0.0)
            if row < offsets[offsets.shape[0] - 1]:
                group = group_of(offsets, row)
                for column in cutlass.range(lane * VECTOR, dy.shape[1], SPAN, unroll=4):
                    left, right = read_vector(dy, row, column), read_vector(bias, group, column)
                    for e in range_constexpr(VECTOR):
                        total += left[e] * right[e]
            total = warp_sum(total)
            if lane == 0:
                dots[row] = total


def build_row_dots(options):
    """dy, bias, offsets, dots, most CTAs, stream."""
    rows, width = cute.sym_int(), cute.sym_int(divisibility=VECTOR)
    element = TYPES[options.element]
    return RowDots(options), (
        row_matrix(element, rows, width),
        row_matrix(element, cute.sym_int(), width),
        vector_of(Int32, cute.sym_int()),
        vector_of(Float32, rows),
        Int32(1),
        make_fake_stream(),
    )


_BUILDERS = {
    "GroupOffsetsOptions": build_group_offsets,
    "DactOptions": build_dact,
    "ColumnSumsOptions": build_column_sums,
    "RowDotsOptions": build_row_dots,
}


def build(options):
    """(jit function, fake arguments) of the kernel that `options`, one of `rowwise`'s option classes, belongs to."""
    return _BUILDERS[type(options).__name__](options)
