"""tile number -> tile of a weight gradient, worked out by one warp a CTA ahead of the warps that work on it.

Shapes: offsets [G+1] int32. Every group with rows has the same number of tiles, an empty one has none. A unit is a
cluster's row tiles beside each other; of an odd number of them the last is taken alone, its columns side by side.
Numbers go group by group; in a group in strips of units, in a strip column after column, rows fastest.

Plans: a ring of DEPTH records in shared memory. The planning warp writes them, each of `readers` warps reads every one
in order. What a plan costs, some thousand cycles of divisions and dependent loads, nobody waits for.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr, range_constexpr

from cute_kernels.hopper import tickets

DEPTH_BITS, FIELDS = 2, 8
DEPTH = 1 << DEPTH_BITS
"""Records of the ring; int32 of a record: those of a Plan, and one unused."""


class Form(NamedTuple):
    """Static facts of all tiles: their rows, columns and tokens of a k block, and CTAs of a cluster."""

    rows: int
    columns: int
    tokens: int
    cluster: int


class Walk(NamedTuple):
    """What there is to walk: group ends, their number, the gradient's shape, units of a strip; and who walks: this
    cluster, their number, this CTA's place in its cluster."""

    offsets: Any
    groups: Any
    rows: Any
    cols: Any
    strip: Any
    first: Any
    step: Any
    rank: Any


class Plan(NamedTuple):
    """A tile: its group, -1 past the last tile; its first row and column; the group's k blocks, first token and tokens;
    whether the cluster's other CTA has other columns (1) or the same (0)."""

    group: Any
    row: Any
    col: Any
    blocks: Any
    first: Any
    tokens: Any
    lone: Any


class Plans(NamedTuple):
    """full, empty: DEPTH barriers each; wanted: one, which who loads a tile passes when it is about to need the next.
    records: int32 [FIELDS, DEPTH]."""

    full: Any
    empty: Any
    wanted: Any
    records: Any


@cute.jit
def column_tiles(walk: Walk, form: cutlass.Constexpr):
    return (walk.cols + form.columns - 1) // form.columns


@cute.jit
def units(walk: Walk, form: cutlass.Constexpr):
    return (walk.rows + form.rows - 1) // form.rows // form.cluster


@cute.jit
def tiles_of_group(walk: Walk, form: cutlass.Constexpr):
    """Tiles of one group, a cluster's together."""
    columns, whole = column_tiles(walk, form), units(walk, form)
    tiles = whole * columns
    if walk.rows > whole * form.cluster * form.rows:
        tiles += (columns + form.cluster - 1) // form.cluster
    return tiles


@cute.jit
def has_rows(walk: Walk, group):
    """Whether a group has rows, of a group for each lane; no group past the last has."""
    filled = Boolean(False)
    if group < walk.groups:
        filled = walk.offsets[group + 1] > walk.offsets[group]
    return filled


@cute.jit
def filled_groups(walk: Walk):
    """How many groups have rows. Called by a whole warp."""
    count, group = Int32(0), cute.arch.lane_idx()
    while group - cute.arch.lane_idx() < walk.groups:
        count += cute.arch.popc(cute.arch.vote_ballot_sync(has_rows(walk, group)))
        group += 32
    return count


@cute.jit
def seek(walk: Walk, ahead, group):
    """The group with `ahead` filled ones between it and `group`, a filled one or 0; `groups` or more if there is none.

    All 32 lanes of a warp call it alike; 32 groups are looked at together.
    """
    lane = cute.arch.lane_idx()
    searching = Boolean(group < walk.groups)
    while searching:
        mine = has_rows(walk, group + lane)
        filled = cute.arch.vote_ballot_sync(mine)
        before = cute.arch.popc(filled & ((1 << lane) - 1))
        found = cute.arch.vote_ballot_sync(mine and before == ahead)
        if found != 0:
            group += cute.arch.popc(found - 1)
            searching = Boolean(False)
        else:
            ahead -= cute.arch.popc(filled)
            group += 32
            searching = Boolean(group < walk.groups)
    return group


@cute.jit
def plan_of(walk: Walk, local, group, ordinal, form: cutlass.Constexpr):
    """Tile `local` of `group`, the `ordinal`-th with rows. Each group starts a column later than the one before, so
    that narrow last columns do not always meet the same CTA."""
    tiles, whole, columns = tiles_of_group(walk, form), units(walk, form), column_tiles(walk, form)
    local = (local + ordinal * whole) % tiles
    row, col, lone = Int32(0), Int32(0), Int32(0)
    if local < whole * columns:
        strip = local // (walk.strip * columns)
        local -= strip * walk.strip * columns
        height = cutlass.min(whole - strip * walk.strip, walk.strip)
        col = local // height
        row = (strip * walk.strip + local - col * height) * form.cluster + walk.rank
    else:
        row = whole * form.cluster
        col = (local - whole * columns) * form.cluster + walk.rank
        lone = Int32(1)
    first = walk.offsets[group]
    tokens = walk.offsets[group + 1] - first
    blocks = (tokens + form.tokens - 1) // form.tokens
    return Plan(group, row * form.rows, col * form.columns, blocks, first, tokens, lone)


@cute.jit
def make_plans(barriers: cute.Pointer, records: cute.Tensor, readers: cutlass.Constexpr):
    """The ring of this CTA, `readers` warps reading. Called by all threads before the initialisations of other barriers
    are fenced."""
    if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
        with cute.arch.elect_one():
            for i in range_constexpr(DEPTH):
                cute.arch.mbarrier_init(barriers + i, 1)
                cute.arch.mbarrier_init(barriers + DEPTH + i, readers)
            cute.arch.mbarrier_init(barriers + 2 * DEPTH, 1)
    return Plans(barriers, barriers + DEPTH, barriers + 2 * DEPTH, records)


@cute.jit
def write(plans: Plans, entry, plan: Plan):
    slot = entry & (DEPTH - 1)
    cute.arch.mbarrier_wait(plans.empty + slot, ((entry >> DEPTH_BITS) + 1) & 1)
    if cute.arch.lane_idx() == 0:
        for i, value in enumerate(plan):
            plans.records[i, slot] = value
        cute.arch.mbarrier_arrive(plans.full + slot)


@cute.jit
def read(plans: Plans, entry, fields: cutlass.Constexpr):
    """The first `fields` (4 or 8) of record `entry`, in all lanes of a reading warp."""
    slot = entry & (DEPTH - 1)
    cute.arch.mbarrier_wait(plans.full + slot, (entry >> DEPTH_BITS) & 1)
    values = cute.make_rmem_tensor((fields,), Int32)
    values.fill(0)
    if cute.arch.lane_idx() == 0:  # who reads gives back: racecheck sees no order through the rest of the warp
        cute.autovec_copy(cute.local_tile(plans.records[None, slot], (fields,), (0,)), values)
        cute.arch.mbarrier_arrive(plans.empty + slot)
    values = [cute.arch.shuffle_sync(values[i], offset=0) for i in range(min(fields, FIELDS - 1))]
    return tuple(map(cute.arch.make_warp_uniform, values))


@cute.jit
def write_plans(plans: Plans, taken, walk: Walk, form: cutlass.Constexpr):
    """One warp: a plan of each tile, ahead of those who work on it. taken: tickets, or None if numbers are static."""
    tiles = tiles_of_group(walk, form)
    entry, group, ordinal = Int32(0), Int32(0), Int32(0)
    index = number(plans, taken, walk, entry, form)
    group = seek(walk, index // tiles, group)
    ordinal = index // tiles
    while group < walk.groups:
        write(plans, entry, plan_of(walk, index - ordinal * tiles, group, ordinal, form))
        entry += 1
        index = number(plans, taken, walk, entry, form)
        group = seek(walk, index // tiles - ordinal, group)
        ordinal = index // tiles
    nothing = Int32(0)
    write(plans, entry, Plan(Int32(-1), nothing, nothing, nothing, nothing, nothing, nothing))
    if const_expr(taken is not None):  # noqa: SIM102 (traced, then run)
        if walk.rank == 0:
            tickets.close(taken, index, tiles * filled_groups(walk), walk.step)
            if const_expr(form.cluster > 1):
                tickets.drain(taken, entry)


@cute.jit
def number(plans: Plans, taken, walk: Walk, entry, form: cutlass.Constexpr):
    """The number of this cluster's tile `entry`; dynamic, asked for when the tile before is all but loaded."""
    result = walk.first + entry * walk.step
    if const_expr(taken is not None):
        if walk.rank == 0:
            if entry > 0:
                cute.arch.mbarrier_wait(plans.wanted, (entry - 1) & 1)
            asked = tickets.take(taken)
            if const_expr(form.cluster > 1):
                result = tickets.publish(taken, entry, asked, form.cluster, 1)
            else:
                result = cute.arch.shuffle_sync(asked, offset=0)
        else:
            result = tickets.read(taken, entry, form.cluster)
    return result
