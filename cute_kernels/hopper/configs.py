"""problem -> Config: tile shape, stages, shared memory, and the reasons; Options: all static facts. No CUTLASS.

A Config is a value: hashable, printable, part of the key that a compiled kernel is cached under. `choose` is pure.
"""

from dataclasses import dataclass, fields
from typing import Any

from cute_kernels.activation import Activation

SMEM_BYTES = 232_448
"""Shared memory that one CTA may use on SM90, in bytes (227 KiB)."""

CONSUMERS = 2
"""Consumer warpgroups."""

MOST_PADDING = 1.05
"""Columns multiplied with tiles of 192 over columns multiplied with tiles of 256 from where on the latter are taken.

Turns were 2 to 15 % faster, padding counted in, where this ratio was 0.94 to 1.03 (H200, 2026-11-30, nine products).
"""


@dataclass(frozen=True)
class Config:
    """Static shape of one grouped-GEMM kernel. Tiles in elements, registers per thread.

    pingpong: the consumer warpgroups take whole tiles in turn; else they share each tile, 64 rows each.
    pieces: a warpgroup's pieces of staging memory, 64 rows x piece_cols: what it rounds, swizzles and stores at a time.
    strip: column tiles after which the next row of tiles begins, 0 for all of them.
    """

    tile_m: int = 128
    tile_n: int = 256
    tile_k: int = 64
    stages: int = 4
    pieces: int = 2
    piece_cols: int = 64
    pingpong: bool = False
    strip: int = 0
    producer_registers: int = 24
    consumer_registers: int = 240
    element_bytes: int = 2

    def smem_bytes(self) -> int:
        """Upper bound of the shared memory used: operands, staging, and one KiB each for barriers and bias."""
        operands = self.stages * (self.tile_m + self.tile_n) * self.tile_k
        staging = CONSUMERS * self.pieces * 64 * self.piece_cols
        return (operands + staging) * self.element_bytes + 2048

    def row_blocks(self) -> int:
        """Blocks of 64 rows whose sums one consumer warpgroup holds."""
        return self.tile_m // 64 if self.pingpong else self.tile_m // (64 * CONSUMERS)

    def column_tiles(self, columns: int) -> int:
        """Tiles that cover `columns` columns of the product."""
        return -(-columns // self.tile_n)

    def refusals(self) -> tuple[str, ...]:
        """Why this configuration cannot run; empty if it can."""
        threads = 128 * (self.producer_registers + CONSUMERS * self.consumer_registers)
        widths = (192,) if self.pingpong else (128, 256)
        checks = (
            (self.tile_m == 64 * CONSUMERS, f"tile_m must be {64 * CONSUMERS}: 64 rows a consumer warpgroup, or 128"),
            (self.tile_n in widths, f"tile_n must be one of {widths}: whole pieces, and sums that fit the registers"),
            (self.piece_cols in (32, 64), "piece_cols must be 32 or 64: rows of 64 or 128 bytes, swizzled"),
            (self.tile_k == 64, "tile_k must be 64: one 128-byte swizzle atom of 16-bit elements"),
            (self.stages >= 2, "stages must be at least 2: one is read while the next is filled"),
            (threads <= 65_536, f"registers of all threads must fit 65536; they are {threads}"),
            (self.smem_bytes() <= SMEM_BYTES, f"shared memory must fit {SMEM_BYTES} bytes; it is {self.smem_bytes()}"),
        )
        return tuple(text for holds, text in checks if not holds)


@dataclass(frozen=True)
class Options:
    """Static facts of one kernel.

    kind: "store", "act" or "dact", the epilogue. contracts_rows: the product sums over the weight's rows (dgrad, dact).
    separate: weights are G tensors. factor: dtype of probs or of the bias scale, "" if absent.
    keeps: the optional result is wanted (preact of "act", act of "dact"). has_dprobs: "dact" only.
    dynamic: tiles are taken through a counter (see `tickets`).
    """

    kind: str
    dtype: str
    config: Config
    contracts_rows: bool = False
    separate: bool = False
    activation: Activation | None = None
    glu_interleave: int = 0
    has_bias: bool = False
    factor: str = ""
    keeps: bool = True
    has_dprobs: bool = False
    zero_tail: bool = True
    dynamic: bool = False

    def __post_init__(self) -> None:
        facts = tuple(getattr(self, field.name) for field in fields(self))
        object.__setattr__(self, "_hash", hash(facts))

    def __hash__(self) -> int:
        """Computed once: every launch looks its kernel up."""
        return self._hash  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Choice:
    """A configuration and why it was chosen, one sentence a fact."""

    config: Config
    reasons: tuple[str, ...]


TURNS = (
    "192 columns, a whole tile a warpgroup in turn: one multiplies while the other is in its epilogue",
    "3 pieces of 4 KiB leave room for a fifth stage: up to 4 % faster than 4 pieces of 8 KiB and 4 stages",
    "strips of 8 column tiles: up to 8 % faster than whole rows of tiles",
    "no clusters: pairs of CTAs that share x were no faster, and slower where column tiles are odd",
)
"""Why a kernel takes turns, measured on an H200 (2026-11-30)."""


def deepest(tile_n: int, pieces: int, **facts: Any) -> Config:
    """The configuration of this tile with the most stages that fit."""
    for stages in range(8, 1, -1):
        config = Config(tile_n=tile_n, stages=stages, pieces=pieces, **facts)
        if not config.refusals():
            return config
    raise ValueError(f"no stage count fits tile_n={tile_n} with {pieces} pieces")


def choose(kind: str, columns: int, gated: bool = False, glu_interleave: int = 0) -> Choice:
    """The configuration for one kernel.

    kind: "store" (product, optional bias), "act" (product and activation) or "dact" (product and its gradient).
    columns: columns of the product as the weight states them (2I for a gated "act"). gated: f has two inputs.
    """
    if kind not in ("store", "act", "dact"):
        raise ValueError(f"kind must be 'store', 'act' or 'dact'; it is {kind!r}")
    halves = 2 if gated and kind == "act" else 1
    if kind == "dact":
        pieces = 5 if gated else 3
        beside = f"{pieces} pieces: two sets of {'gate and up' if gated else 'the pre-activation'} in turn, and act"
    else:
        why_not = against_pingpong(columns, halves, glu_interleave)
        if not why_not:
            return Choice(deepest(192, 3, piece_cols=32, pingpong=True, strip=8), TURNS)
        pieces, beside = 2, f"two pieces in turn, one fills while one is stored; {why_not}"
    if columns <= 128 and halves == 1:
        return Choice(deepest(128, pieces), ("128 columns: a wider tile would multiply zeros", beside))
    why = "gate and up halves of 128 columns meet in one thread" if halves == 2 else "fewest operand bytes"
    return Choice(deepest(256, pieces), (f"256 columns: {why}", beside))


def against_pingpong(columns: int, halves: int, glu_interleave: int) -> str:
    """Why warpgroups that take tiles of 192 columns in turn do not suit; empty if they do."""
    half, width = 192 // halves, columns // halves
    if halves == 2 and glu_interleave and half % glu_interleave:
        return f"no turns: boxes of {half} rows do not hold whole blocks of {glu_interleave}"
    narrow, wide = -(-width // half) * half, -(-width // (256 // halves)) * (256 // halves)
    if columns <= 128 or narrow > MOST_PADDING * wide:
        return "no turns: 192 columns would multiply more zeros"
    return ""


def grid_size(rows: int, groups: int, column_tiles: int, sms: int, tile_m: int = 128) -> int:
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
