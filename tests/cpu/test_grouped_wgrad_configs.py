"""The configuration of the weight gradient: it fits, it is the one measured, and it says why."""

from __future__ import annotations

import itertools

import pytest

from cute_kernels.hopper.configs import SMEM_BYTES
from cute_kernels.hopper.grouped_wgrad_configs import TILE_COLUMNS, TILE_ROWS, WgradConfig, choose

ROWS = (8, 128, 136, 256, 1536, 2880, 4096, 5760, 7168)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("out_bytes", [2, 4])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("block", [0, 1, 32])
def test_every_choice_fits_and_gives_a_reason_for_each_part(rows, out_bytes, accumulate, block):
    choice = choose(rows, out_bytes, accumulate, block)
    assert choice.config.smem_bytes() <= SMEM_BYTES
    assert choice.config.strip() >= 1
    assert len(choice.reasons) == 3 and all(choice.reasons)


def test_slots_are_used_in_turn():
    """A tile uses each slot equally often, or the wait for a slot's last store would be too short."""
    for out_bytes, accumulate in itertools.product((2, 4), (False, True)):
        pieces = 2 * TILE_COLUMNS * out_bytes // 128
        assert pieces % choose(256, out_bytes, accumulate, 0).config.slots == 0


@pytest.mark.parametrize("rows, cluster", [(128, 1), (256, 2), (2880, 1), (4096, 2), (5760, 1), (1536, 2), (130, 2)])
def test_adding_pairs_only_where_row_tiles_pair(rows, cluster):
    assert choose(rows, 4, True, 0).config.cluster == cluster
    assert (-(-rows // TILE_ROWS) % 2 == 0) == (cluster == 2)


@pytest.mark.parametrize("rows, cluster", [(8, 1), (128, 1), (136, 2), (256, 2), (2880, 2), (5760, 2)])
def test_writing_pairs_where_there_are_two_row_tiles(rows, cluster):
    assert choose(rows, 2, False, 0).config.cluster == cluster


def test_tiles_of_a_group_cover_it_once():
    """Of a last odd row tile two columns go together; an odd last column has the pair's second CTA idle."""
    pair = choose(5760, 2, False, 0).config
    assert pair.tiles(5760, 2880) == 22 * 15 + 8
    assert pair.tiles(5632, 2880) == 22 * 15
    assert pair.tiles(2880, 2880) == 11 * 15 + 8
    assert choose(128, 2, False, 0).config.tiles(128, 2880) == 15


def test_results_leave_from_registers_where_that_is_faster_or_all_that_can_be():
    assert choose(576, 2, False, 0).config.by_tma
    assert not choose(576, 2, False, 0, few=True).config.by_tma
    assert not choose(576, 4, False, 0).config.by_tma
    assert choose(576, 4, True, 0).config.by_tma


@pytest.mark.parametrize(
    "rows, block, by_tma",
    [(576, 0, True), (72, 0, True), (576, 32, True), (576, 96, True), (576, 8, False), (48, 24, False)],
)
def test_tma_stores_where_16_rows_stay_together(rows, block, by_tma):
    assert choose(rows, 2, False, block).config.by_tma == by_tma
    if by_tma and block:
        where = lambda row: row % (rows // 2) // block * 2 * block + row // (rows // 2) * block + row % block  # noqa: E731
        for row in range(0, rows, 16):
            assert [where(row + i) for i in range(16)] == [where(row) + i for i in range(16)]


def test_grid_is_whole_clusters_and_never_more_than_the_tiles():
    single, pair = WgradConfig(1, 5, 1, True), WgradConfig(2, 5, 1, True)
    assert single.grid(128, 1536, 2048, 132) == 132 == pair.grid(128, 1536, 2048, 132)
    assert pair.grid(128, 1536, 2048, 131) == 130
    assert single.grid(1, 128, 192, 132) == 1 and pair.grid(1, 256, 192, 132) == 2
    assert single.grid(1, 128, 192, -5) == 1 and pair.grid(3, 256, 192, 1) == 2
