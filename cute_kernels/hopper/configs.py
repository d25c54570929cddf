"""problem -> Config: tile shape, stages, shared memory, and the reasons; Options: all static facts. No CUTLASS.

A Config is a value: hashable, printable, part of the key that a compiled kernel is cached under. `choose` is pure.
"""

import math
from dataclasses import dataclass

from cute_kernels.activation import Activation
from cute_kernels.hashing import hashed_once

SMEM_BYTES = 232_448
"""Shared memory that one CTA may use on SM90, in bytes (227 KiB)."""

CONSUMERS = 2
"""Consumer warpgroups, which take whole tiles in turn."""

SETS = 2
"""Sets of pieces that a warpgroup fetches the saved pre-activation into, in turn."""

MANY_ROWS = 2048
"""Rows beyond which rounds of tiles are too many for the last one to matter, and one more row changes nothing."""

NARROW = 128
"""Columns up to which one tile holds them all where rows are summed."""

DACT_MXFP8, DACT_MXFP8_SUMS = "dact_mxfp8", "dact_mxfp8_sums"
"""What `choose` calls the epilogue "dact" in MXFP8, and that with the sums of columns, which need registers too."""

SUMS = {DACT_MXFP8: 128 * 128, DACT_MXFP8_SUMS: 64 * 128}
"""Values of a tile that leave room for what is worked on in registers, for those that need much."""

TILES = ((128, 192), (128, 128), (64, 128), (64, 64))
"""Tiles to choose from, (rows, columns), the first where all else is equal."""


@dataclass(frozen=True)
class Config:
    """Static shape of one grouped-GEMM kernel. Tiles in elements, registers per thread.

    pieces: a warpgroup's pieces of staging memory, 64 rows x 32 columns: what is swizzled and stored at a time.
    strip: column tiles after which the next row of tiles begins, 0 for all of them.
    """

    tile_m: int = 128
    tile_n: int = 192
    tile_k: int = 64
    stages: int = 5
    pieces: int = 3
    strip: int = 8
    producer_registers: int = 24
    consumer_registers: int = 240
    element_bytes: int = 2

    def smem_bytes(self) -> int:
        """Upper bound of the shared memory used: operands, staging, and one KiB each for barriers, bias and zeros."""
        operands = self.stages * (self.tile_m + self.tile_n) * self.tile_k
        staging = CONSUMERS * self.pieces * 64 * 32
        return (operands + staging) * self.element_bytes + 3072

    def column_tiles(self, columns: int) -> int:
        """Tiles that cover `columns` columns of the product."""
        return -(-columns // self.tile_n)

    def refusals(self, kind: str, gated: bool = False) -> tuple[str, ...]:
        """Why this configuration cannot run that epilogue; empty if it can."""
        threads = 128 * (self.producer_registers + CONSUMERS * self.consumer_registers)
        pieces, what_for = fewest_pieces(kind, gated)
        checks = (
            (self.tile_m in (64, 128), "tile_m must be 64 or 128: blocks of 64 rows, and sums that fit the registers"),
            (self.tile_n in (64, 128, 192), "tile_n must be 64, 128 or 192: pieces in pairs, sums that fit"),
            (
                self.tile_m * self.tile_n <= SUMS.get(kind, 128 * 192),
                "tiles must be smaller: a piece's results are in registers beside the sums",
            ),
            (
                kind != DACT_MXFP8_SUMS or self.tile_m == 64,
                "tile_m must be 64: a slot for sums belongs to one block of rows, whose group has at least one",
            ),
            (self.tile_k == 64, "tile_k must be 64: one 128-byte swizzle atom of 16-bit elements"),
            (self.stages >= 2, "stages must be at least 2: one is read while the next is filled"),
            (self.pieces >= pieces, f"pieces must be at least {pieces}: {what_for}"),
            (threads <= 65_536, f"registers of all threads must fit 65536; they are {threads}"),
            (self.smem_bytes() <= SMEM_BYTES, f"shared memory must fit {SMEM_BYTES} bytes; it is {self.smem_bytes()}"),
        )
        return tuple(text for holds, text in checks if not holds)


@hashed_once
@dataclass(frozen=True)
class Options:
    """Static facts of one kernel.

    kind: "store", "act" or "dact", the epilogue. contracts_rows: the product sums over the rows of the weight as it is
    stored (dgrad, dact; others of a weight stored [K, N]). preact_interleave: blocks of the pre-activation's columns.
    separate: weights are G tensors. factor: dtype of probs or of the bias scale, "" if absent.
    keeps: the optional result is wanted (preact of "act", act of "dact"). has_dprobs: "dact" only.
    dynamic: tiles are taken through a counter (see `tickets`). zeroes_later: "act" zeroes the tail of a later result.
    mxfp8: act (of "act" and "dact") and dpreact go through MXFP8. rowwise, columnwise: the copies of dpreact wanted;
    has_dbias: and its sums. quantized_preact: "act" leaves and "dact" reads a pre-activation in MXFP8. two_level: sums
    are multiplied by what is left of NVFP4 operands' second level, and the largest magnitudes of act or dpreact are
    left; rotates: those of its rotated transpose too.
    """

    kind: str
    dtype: str
    config: Config
    contracts_rows: bool = False
    separate: bool = False
    activation: Activation | None = None
    glu_interleave: int = 0
    preact_interleave: int = 0
    has_bias: bool = False
    factor: str = ""
    keeps: bool = True
    has_dprobs: bool = False
    zero_tail: bool = True
    dynamic: bool = False
    zeroes_later: bool = False
    mxfp8: bool = False
    rowwise: bool = True
    columnwise: bool = True
    has_dbias: bool = False
    quantized_preact: bool = False
    two_level: bool = False
    rotates: bool = False


@dataclass(frozen=True)
class Choice:
    """A configuration and why it was chosen, one sentence a fact."""

    config: Config
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Spread:
    """What the host knows of the work: rows (as `row_class` says) of so many groups, on so many SMs; not the splits."""

    rows: int = MANY_ROWS + 1
    groups: int = 1
    sms: int = 132


COMMON = (
    "a whole tile a warpgroup in turn: one multiplies while the other is in its epilogue",
    "pieces of 4 KiB leave room for more stages: up to 4 % faster than pieces of 8 KiB",
    "strips of 8 column tiles: up to 8 % faster than whole rows of tiles",
    "no clusters: pairs of CTAs that share x were no faster, and slower where column tiles are odd",
)
"""Why every configuration is as it is, measured on an H200 (2026-11-30)."""


def fewest_pieces(kind: str, gated: bool) -> tuple[int, str]:
    """(pieces that a warpgroup's epilogue needs, what for)."""
    if kind in (DACT_MXFP8, DACT_MXFP8_SUMS):
        inputs = 2 if gated else 1
        sums = kind == DACT_MXFP8_SUMS
        what = f"{SETS} sets of the pre-activation, its columns copy and act's, and maxima{' and sums' * sums}"
        return (SETS + 1) * inputs + 2 + sums, what
    if kind == "dact":
        return SETS * (3 if gated else 2), f"{SETS} sets of {'gate, up' if gated else 'the pre-activation'} and act"
    return 2, "one is formed while one leaves"


def deepest(tile_m: int, tile_n: int, kind: str, gated: bool) -> Config:
    """The configuration of this tile with the most stages that fit beside the epilogue's pieces, three or more."""
    pieces = max(3, fewest_pieces(kind, gated)[0])
    configs = (Config(tile_m, tile_n, stages=stages, pieces=pieces) for stages in range(12, 1, -1))
    return next(config for config in configs if not config.refusals(kind, gated))


def clocks(tile_m: int, tile_n: int) -> float:
    """Clocks that a stage of such a tile takes an SM: the larger of multiplying and of loading 64 bytes a clock.

    128 x 128, where both are equal, was measured to take 4.5 % more, in products of many rows (H200, 2026-11-30).
    """
    multiplying, loading = tile_m * tile_n / 32, 2 * (tile_m + tile_n)
    return 1.045 * loading if multiplying == loading else max(multiplying, loading)


def cost(tile: tuple[int, int], columns: int, spread: Spread) -> float:
    """Clocks a stage that all tiles take, if the rows are in one group: of whole rounds of tiles where rows are few.

    It ordered the tiles as their times did in 84 products of 64 to 2048 rows, save for ties (H200, 2026-11-30).
    """
    tile_m, tile_n = tile
    rounds = -(-spread.rows // tile_m) * -(-columns // tile_n) / spread.sms
    return (math.ceil(rounds) if spread.rows <= MANY_ROWS else rounds) * clocks(*tile)


def choose(kind: str, columns: int, spread: Spread = Spread(), gated: bool = False, sums_rows: bool = False) -> Choice:
    """The configuration for one kernel.

    kind: "store" (product, optional bias), "act" (product and activation), "dact" (product and its gradient),
    DACT_MXFP8 or DACT_MXFP8_SUMS.
    columns: columns of the product as the weight states them (2I for a gated "act"). gated: f has two inputs.
    sums_rows: rows are also summed, over each tile's columns; where there are several, a launch adds them up.

    Nobody knows the splits here. The cost is that of all rows in one group, which leaves most SMs idle; where groups
    have 64 rows or fewer on average, tiles of 64 rows are taken if they cost no more than the widest tile, because
    even splits would leave half of every larger tile empty.
    """
    kinds = "store", "act", "dact", DACT_MXFP8, DACT_MXFP8_SUMS
    if kind not in kinds:
        raise ValueError(f"kind must be one of {', '.join(kinds)}; it is {kind!r}")
    fit = [tile for tile in TILES if tile[0] * tile[1] <= SUMS.get(kind, 128 * 192)]
    costs = {tile: cost(tile, columns, spread) for tile in fit}
    spares_sum = sums_rows and columns <= NARROW
    tiles = [tile for tile in costs if not spares_sum or columns <= tile[1]]
    low = [tile for tile in tiles if tile[0] == 64 and costs[tile] <= next(iter(costs.values()))]
    sparse = spread.rows <= 64 * spread.groups and bool(low)
    best = min(low if sparse else tiles, key=costs.__getitem__)
    shown = ", ".join(f"{m} x {n}: {clocks:.0f}" for (m, n), clocks in costs.items())
    why = [f"{best[0]} x {best[1]}: fewest clocks a stage if all rows are in one group ({shown})"]
    if sparse:
        why.append("of tiles of 64 rows: groups have no more than that on average, and the others would be half empty")
    if spares_sum:
        why.append("of tiles that hold all columns: no launch has to add up what several tiles sum of a row")
    return Choice(deepest(*best, kind, gated), (*why, *COMMON))


def row_class(rows: int) -> int:
    """Rows as `choose` sees them: in steps of 64, and all counts beyond MANY_ROWS alike."""
    return min(-(-rows // 64) * 64, MANY_ROWS + 1)


def grid_size(rows: int, groups: int, column_tiles: int, sms: int, tile_m: int) -> int:
    """CTAs to launch: one an SM, and no more than tiles can exist for any split of `rows`."""
    most_row_tiles = min(rows, rows // tile_m + groups)
    return max(1, min(sms, most_row_tiles * column_tiles))


def sms_left(sms: int, sm_margin: int, cluster: int = 1) -> int:
    """SMs that a margin leaves to a kernel, in whole clusters. ValueError if there are none."""
    left = (sms - sm_margin) // cluster * cluster
    if sm_margin < 0 or left <= 0:
        most = sms - cluster
        raise ValueError(f"sm_margin is {sm_margin}, needs 0 to {most} on {sms} SMs (clusters of {cluster})")
    return left
