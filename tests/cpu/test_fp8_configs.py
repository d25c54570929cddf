"""Configurations of the FP8 grouped products: pure functions, no GPU."""

from __future__ import annotations

import pytest

from cute_kernels.activation import Activation
from cute_kernels.hopper.configs import SMEM_BYTES
from cute_kernels.hopper.fp8_configs import Config, OwnTiles, choose


@pytest.mark.parametrize("kind", ["store", "act", "dact"])
@pytest.mark.parametrize("columns", [16, 128, 768, 2880, 4096])
def test_every_choice_runs(kind: str, columns: int) -> None:
    for activation in (Activation("swiglu"), Activation("clamped_swiglu")):
        config = choose(kind, columns, 2048, activation)
        assert config.refusals() == () and config.smem_bytes() <= SMEM_BYTES


def test_products_take_the_tile_that_multiplies_fewer_zeros() -> None:
    assert [choose("store", n).tile_n for n in (2048, 2880, 768, 192, 256)] == [256, 192, 256, 192, 256]


def test_long_sums_take_narrow_tiles_unless_they_waste_much() -> None:
    assert [choose("store", n, 7168).tile_n for n in (4096, 7168, 256, 2048)] == [192, 192, 256, 192]


def test_gradients_have_tiles_of_their_own_unless_they_would_spill() -> None:
    assert choose("dact", 768, 2048, Activation("swiglu")) == OwnTiles()
    assert choose("dact", 768, 2048, Activation("clamped_swiglu")).finishing_registers


def test_column_tiles_cover_all_columns() -> None:
    act, dact = choose("act", 0), choose("dact", 0)
    assert [act.column_tiles(2 * i, 2) for i in (64, 128, 192, 2880)] == [1, 1, 2, 23]
    assert [act.column_tiles(n) for n in (64, 256, 320)] == [1, 1, 2]
    assert [dact.column_tiles(i) for i in (64, 128, 2880)] == [1, 1, 23]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (Config(tile_n=64), "tile_n"),
        (Config(chunks=(64, 64)), "chunks"),
        (Config(stages=1), "stages"),
        (Config(finishing_registers=72), "registers"),
        (Config(stages=5), "shared memory"),
        (OwnTiles(stages=2), "stages"),
        (OwnTiles(stages=4), "shared memory"),
    ],
)
def test_refusals_name_the_limit(config: Config | OwnTiles, words: str) -> None:
    assert any(words in text for text in config.refusals())


def test_kinds() -> None:
    with pytest.raises(ValueError, match="kind"):
        choose("wgrad", 64)
