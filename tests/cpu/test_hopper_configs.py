"""Tile configurations and grids of the grouped products: pure functions, no GPU."""

from __future__ import annotations

import pytest

from cute_kernels.hopper.configs import SMEM_BYTES, Config, choose, deepest, grid_size, sms_left

TURNS = Config(tile_n=192, stages=5, pieces=3, piece_cols=32, pingpong=True, strip=8)
CHOICES = [
    choose(kind, columns, gated, interleave)
    for kind in ("store", "act", "dact")
    for columns in (8, 128, 136, 512, 4096)
    for gated in (False, True)
    for interleave in (0, 32, 128)
]


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_every_choice_runs_and_says_why(choice) -> None:
    assert choice.config.refusals() == ()
    assert choice.config.smem_bytes() <= SMEM_BYTES
    assert choice.reasons and all(choice.reasons)


def test_choices() -> None:
    assert choose("store", 4096).config == TURNS
    assert choose("act", 4096, gated=True, glu_interleave=32).config == TURNS
    assert choose("act", 4096).config == TURNS
    assert choose("store", 1024).config == Config(tile_n=256, stages=4, pieces=2)  # 6 x 192 is 12 % more
    assert choose("store", 128).config.tile_n == 128
    assert choose("act", 16, gated=True).config.tile_n == 256  # 128 gate and 128 up columns, however few are real
    assert choose("act", 4096, gated=True, glu_interleave=64).config.tile_n == 256  # 64 does not divide 96
    assert choose("dact", 4096, gated=True).config == Config(tile_n=256, stages=3, pieces=5)
    assert choose("dact", 4096).config == Config(tile_n=256, stages=3, pieces=3)
    assert choose("dact", 128, gated=True).config.tile_n == 128
    with pytest.raises(ValueError, match="kind"):
        choose("wgrad", 64)


def test_turns_leave_each_warpgroup_a_whole_tile() -> None:
    assert TURNS.row_blocks() == 2 and Config().row_blocks() == 1
    assert TURNS.smem_bytes() <= SMEM_BYTES < Config(tile_n=192, stages=6, pieces=3, pingpong=True).smem_bytes()


def test_deepest_leaves_no_room_for_another_stage() -> None:
    for tile_n, pieces in ((256, 2), (256, 5), (128, 3)):
        config = deepest(tile_n, pieces)
        deeper = Config(tile_n=tile_n, stages=config.stages + 1, pieces=pieces)
        assert config.stages == 8 or any("shared memory" in text for text in deeper.refusals())
    with pytest.raises(ValueError, match="no stage count"):
        deepest(256, 12)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (Config(tile_m=64), "tile_m"),
        (Config(tile_n=192), "tile_n"),
        (Config(tile_n=256, pingpong=True), "tile_n"),
        (Config(piece_cols=16), "piece_cols"),
        (Config(tile_k=128), "tile_k"),
        (Config(stages=1), "stages"),
        (Config(consumer_registers=256), "registers"),
        (Config(stages=5), "shared memory"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refusals_name_the_limit(config: Config, words: str) -> None:
    assert any(words in text for text in config.refusals())


def test_column_tiles_cover_all_columns() -> None:
    assert [Config().column_tiles(columns) for columns in (8, 256, 264)] == [1, 1, 2]


@pytest.mark.parametrize(
    ("rows", "groups", "column_tiles", "sms", "grid"),
    [
        (32768, 8, 16, 132, 132),
        (32768, 8, 16, 100, 100),
        (128, 1, 1, 132, 2),  # one tile is needed, two is the bound for any split
        (1, 1024, 1, 132, 1),
        (0, 4, 3, 132, 1),
    ],
)
def test_grid(rows: int, groups: int, column_tiles: int, sms: int, grid: int) -> None:
    assert grid_size(rows, groups, column_tiles, sms) == grid


@pytest.mark.parametrize(
    ("margin", "cluster", "left"), [(0, 1, 132), (32, 1, 100), (131, 1, 1), (0, 2, 132), (31, 2, 100), (130, 2, 2)]
)
def test_a_margin_leaves_whole_clusters(margin: int, cluster: int, left: int) -> None:
    assert sms_left(132, margin, cluster) == left


@pytest.mark.parametrize(("margin", "cluster"), [(-1, 1), (132, 1), (1000, 1), (131, 2)])
def test_a_margin_that_leaves_nothing_is_refused(margin: int, cluster: int) -> None:
    with pytest.raises(ValueError, match=f"sm_margin is {margin}, needs 0 to"):
        sms_left(132, margin, cluster)
