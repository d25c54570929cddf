"""tile -> (group, row tile, column tile), from group offsets that only the device knows.

Shapes: offsets [G+1] int32, offsets[0] = 0, non-decreasing. A group of n rows has ceil(n / tile_m) row tiles, each
with `col_tiles` column tiles; an empty group has none, and rows past offsets[G] have none. Tiles are numbered group by
group, inside a group row by row, columns fastest: tiles that run at the same time share rows of x and most of a weight.
Where column tiles lie in strips, a group is walked strip by strip, each as above: running tiles span fewer columns of
more rows, and what they read together is less.
CTA c of C takes tiles c, c + C, c + 2C, ...

`seek` moves forward only. It is called by whole warps: 32 groups are looked at together (a scan over their tile
counts, then a ballot), so a thousand groups cost some thirty steps and not a thousand.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr, range_constexpr
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream


class Tile(NamedTuple):
    """One tile of the output: its group, its first row (in the whole buffer), its column tile, the group's end row."""

    group: Int32
    row: Int32
    column_tile: Int32
    end: Int32


@cute.jit
def row_tiles(offsets: cute.Tensor, group, tile_m: cutlass.Constexpr):
    """Row tiles of `group`."""
    return (offsets[group + 1] - offsets[group] + (tile_m - 1)) // tile_m


@cute.jit
def inclusive_scan(value, lane):
    """Sum of `value` over this lane and the lanes below it."""
    total = value
    for step in range_constexpr(5):
        distance = 1 << step
        below = cute.arch.shuffle_sync_up(total, offset=distance, mask_and_clamp=0)
        if lane >= distance:
            total += below
    return total


@cute.jit
def seek(offsets: cute.Tensor, groups, col_tiles, tile_m: cutlass.Constexpr, tile, group, first):
    """(group, first) moved forward until `tile` lies in `group`, whose first tile is `first`.

    Where there is no such group, `group` is `groups`. All 32 lanes of a warp call it with the same arguments and get
    the same answer.
    """
    lane = cute.arch.lane_idx()
    searching = Boolean(group < groups)
    while searching:
        mine = group + lane
        count = Int32(0)
        if mine < groups:
            count = row_tiles(offsets, mine, tile_m) * col_tiles
        upto = inclusive_scan(count, lane)
        found = cute.arch.vote_ballot_sync(tile < first + upto)
        if found != 0:
            step = cute.arch.popc((found & -found) - 1)
            first += cute.arch.shuffle_sync(upto - count, offset=step)
            group += step
            searching = Boolean(False)
        else:
            first += cute.arch.shuffle_sync(upto, offset=31)
            group += 32
            searching = Boolean(group < groups)
    if group > groups:
        group = Int32(groups)
    return group, first


@cute.jit
def locate(offsets: cute.Tensor, col_tiles, tile_m: cutlass.Constexpr, strip: cutlass.Constexpr, tile, group, first):
    """The coordinates of `tile`, which `seek` found in `group`. strip: column tiles of a strip, 0 for all."""
    local, left, width = tile - first, Int32(0), col_tiles
    if const_expr(strip > 0):
        whole = row_tiles(offsets, group, tile_m) * strip
        left = (local // whole) * strip
        local = local % whole
        width = cutlass.min(col_tiles - left, strip)
    row_tile = local // width
    column_tile = left + local - row_tile * width
    return Tile(group, offsets[group] + row_tile * tile_m, column_tile, offsets[group + 1])


@dataclass(frozen=True)
class CountOptions:
    """Static facts of the counting kernel."""

    tile_m: int


class CountTiles:
    """visited[c] = number of tiles that CTA c takes: the schedule by itself, for tests."""

    def __init__(self, options: CountOptions):
        self.tile_m = options.tile_m

    @cute.jit
    def __call__(self, offsets: cute.Tensor, visited: cute.Tensor, col_tiles: Int32, stream):
        self.kernel(offsets, visited, col_tiles).launch(grid=[visited.shape[0], 1, 1], block=[32, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, offsets: cute.Tensor, visited: cute.Tensor, col_tiles: Int32):
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        groups = offsets.shape[0] - 1
        tile, group, first, count = Int32(cta), Int32(0), Int32(0), Int32(0)
        group, first = seek(offsets, groups, col_tiles, self.tile_m, tile, group, first)
        while group < groups:
            count += 1
            tile += ctas
            group, first = seek(offsets, groups, col_tiles, self.tile_m, tile, group, first)
        if cute.arch.lane_idx() == 0:
            visited[cta] = count


def build(options: CountOptions):
    """(jit function, fake arguments) of the counting kernel."""
    vector = lambda: make_fake_compact_tensor(Int32, (cute.sym_int(),), assumed_align=4)  # noqa: E731
    return CountTiles(options), (vector(), vector(), Int32(1), make_fake_stream())
