"""Tile configurations and grids of the grouped products: pure functions, no GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cute_kernels.hopper.configs import (
    DACT_MXFP8,
    DACT_MXFP8_SUMS,
    MANY_ROWS,
    SMEM_BYTES,
    TILES,
    Config,
    Spread,
    choose,
    deepest,
    grid_size,
    row_class,
    sms_left,
)

EPILOGUES = [(kind, gated) for kind in ("store", "act", "dact") for gated in (False, True)]
CHOICES = [
    (kind, gated, choose(kind, columns, Spread(rows, groups), gated))
    for kind, gated in EPILOGUES
    for columns in (8, 128, 136, 512, 4096)
    for rows in (64, 256, 2048, 2049)
    for groups in (1, 64)
]


@pytest.mark.parametrize(("kind", "gated", "choice"), CHOICES)
def test_every_choice_runs_and_says_why(kind: str, gated: bool, choice) -> None:
    assert choice.config.refusals(kind, gated) == ()
    assert choice.config.smem_bytes() <= SMEM_BYTES
    assert choice.reasons and all(choice.reasons)


def tile(kind: str, columns: int, rows: int = MANY_ROWS + 1, groups: int = 1, sms: int = 132) -> tuple[int, int]:
    config = choose(kind, columns, Spread(rows, groups, sms)).config
    return config.tile_m, config.tile_n


def test_many_rows_take_the_widest_tiles_unless_they_multiply_zeros() -> None:
    assert choose("store", 4096).config == Config(stages=5, pieces=3)
    assert choose("act", 4096, gated=True).config == Config(stages=5, pieces=3)
    assert choose("dact", 2048, gated=True).config == Config(stages=4, pieces=6)
    assert choose("dact", 2048).config == Config(stages=4, pieces=4)
    assert tile("store", 2816) == (128, 192)  # 2.3 % zeros
    assert tile("store", 1024) == tile("store", 128) == (128, 128)  # 6 x 192 is 12.5 % more
    with pytest.raises(ValueError, match="kind"):
        choose("wgrad", 64)


def test_few_rows_take_tiles_that_fill_the_sms() -> None:
    assert tile("act", 3072, 256, 8) == (64, 128)  # 96 tiles, where 128 x 192 makes 32
    assert tile("act", 3072, 64, 8) == (64, 64)  # 48 tiles
    assert tile("act", 3072, 512, 1) == (128, 128)  # 96 tiles; those of 64 x 128 need a second round
    assert tile("act", 3072, 1024, 1) == (128, 192)  # 128 tiles
    assert tile("store", 7168, 256, 1) == (128, 128)
    assert tile("dact", 1536, 256, 8) == (64, 64)
    assert tile("act", 3072, 256, 8, sms=32) == (128, 192)  # one round of them as well


def test_groups_of_few_rows_take_tiles_of_64_rows_if_they_cost_no_more() -> None:
    assert tile("store", 7168, 256, 64) == (64, 128)
    assert tile("act", 4096, 2048, 64)[0] == 128


@pytest.mark.parametrize("rows", [64, 256, 2049])
@pytest.mark.parametrize("columns", [64, 72, 128, 136])
def test_where_rows_are_summed_one_tile_holds_few_columns(columns: int, rows: int) -> None:
    spread = Spread(rows, 64)
    plain, summing = (choose("dact", columns, spread, True, sums) for sums in (False, True))
    if columns <= 128:
        assert summing.config.column_tiles(columns) == 1
    else:
        assert summing == plain
    assert choose("dact", 128, Spread(64, 64), True).config.column_tiles(128) == 2


def test_row_counts_that_choose_tells_apart() -> None:
    assert [row_class(rows) for rows in (0, 1, 64, 65, 2048, 2049, 10**6)] == [0, 64, 64, 128, 2048, 2049, 2049]


@pytest.mark.parametrize(("kind", "gated"), EPILOGUES)
@pytest.mark.parametrize("shape", TILES)
def test_deepest_leaves_no_room_for_another_stage(shape: tuple[int, int], kind: str, gated: bool) -> None:
    config = deepest(*shape, kind, gated)
    deeper = replace(config, stages=config.stages + 1)
    assert config.refusals(kind, gated) == ()
    assert config.stages == 12 or any("shared memory" in text for text in deeper.refusals(kind, gated))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (Config(tile_m=192), "tile_m"),
        (Config(tile_n=256), "tile_n"),
        (Config(tile_n=160), "tile_n"),
        (Config(tile_k=128), "tile_k"),
        (Config(stages=1), "stages"),
        (Config(pieces=1), "pieces"),
        (Config(consumer_registers=256), "registers"),
        (Config(stages=6), "shared memory"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refusals_name_the_limit(config: Config, words: str) -> None:
    assert any(words in text for text in config.refusals("store"))


def test_sums_of_a_quantised_gradient_take_one_block_of_rows() -> None:
    config = Config(tile_m=128, tile_n=64, stages=4, pieces=9)
    assert config.refusals(DACT_MXFP8, True) == ()
    (text,) = config.refusals(DACT_MXFP8_SUMS, True)
    assert text.startswith("tile_m")


@pytest.mark.parametrize(
    ("kind", "gated", "pieces"),
    [("store", False, 2), ("act", True, 2), ("dact", False, 4), ("dact", True, 6)],
)
def test_pieces_are_refused_exactly_where_the_epilogue_lacks_them(kind: str, gated: bool, pieces: int) -> None:
    assert Config(stages=3, pieces=pieces).refusals(kind, gated) == ()
    (text,) = Config(stages=3, pieces=pieces - 1).refusals(kind, gated)
    assert text.startswith(f"pieces must be at least {pieces}")


def test_column_tiles_cover_all_columns() -> None:
    assert [Config().column_tiles(columns) for columns in (8, 192, 200)] == [1, 1, 2]


@pytest.mark.parametrize(
    ("rows", "groups", "column_tiles", "sms", "tile_m", "grid"),
    [
        (32768, 8, 16, 132, 128, 132),
        (32768, 8, 16, 100, 128, 100),
        (128, 1, 1, 132, 128, 2),  # one tile is needed, two is the bound for any split
        (128, 1, 1, 132, 64, 3),
        (1, 1024, 1, 132, 128, 1),
        (0, 4, 3, 132, 128, 1),
    ],
)
def test_grid(rows: int, groups: int, column_tiles: int, sms: int, tile_m: int, grid: int) -> None:
    assert grid_size(rows, groups, column_tiles, sms, tile_m) == grid


@pytest.mark.parametrize(
    ("margin", "cluster", "left"), [(0, 1, 132), (32, 1, 100), (131, 1, 1), (0, 2, 132), (31, 2, 100), (130, 2, 2)]
)
def test_a_margin_leaves_whole_clusters(margin: int, cluster: int, left: int) -> None:
    assert sms_left(132, margin, cluster) == left


@pytest.mark.parametrize(("margin", "cluster"), [(-1, 1), (132, 1), (1000, 1), (131, 2)])
def test_a_margin_that_leaves_nothing_is_refused(margin: int, cluster: int) -> None:
    with pytest.raises(ValueError, match=f"sm_margin is {margin}, needs 0 to"):
        sms_left(132, margin, cluster)
