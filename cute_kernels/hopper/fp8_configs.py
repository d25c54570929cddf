"""problem -> Config and Options of the FP8 grouped products on SM90: tile, stages, shared memory. No CUTLASS.

As `configs`: values that are hashable and part of a compiled kernel's key; `choose` is pure.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from cute_kernels.activation import Activation
from cute_kernels.hopper.configs import CONSUMERS, SMEM_BYTES

BLOCK = 128
"""Values that share a scale along the summed dimension: what is summed before it is scaled and added in FP32."""

HALF_BLOCK = 64
"""Columns that have one scale of the weight everywhere, also where gate and up rows meet inside a block of it."""


@dataclass(frozen=True)
class Config:
    """Static shape of one kernel: tiles of 128 rows x tile_n columns, 128 contracted elements a stage.

    chunks: columns of each product instruction. Two sums take turns: one is scaled while the next is formed.
    pieces: a warpgroup's pieces of 16-bit staging memory, 64 rows x 32 columns: what a product alone rounds, swizzles
    and stores at a time.
    strip: column tiles after which the next row of tiles begins, 0 for all of them.
    finishing_registers: of the warpgroup that quantises what consumers hand over; 0 if there is none.
    """

    tile_n: int = 256
    stages: int = 4
    chunks: tuple[int, ...] = (64, 64, 64, 64)
    pieces: int = 3
    strip: int = 8
    producer_registers: int = 24
    consumer_registers: int = 240
    finishing_registers: int = 0

    def stage_bytes(self) -> int:
        """Rows of x, rows of the weight, and 132 scales of x in a multiple of 128 bytes."""
        return (BLOCK + self.tile_n) * BLOCK + 640

    def smem_bytes(self) -> int:
        """Upper bound of the shared memory used: operands, 2 KiB for barriers and bias, and staging or what is handed
        over, 64 KiB and 8 for the columns.
        """
        staging = 9 * 8192 if self.finishing_registers else CONSUMERS * self.pieces * 4096
        return self.stages * self.stage_bytes() + 2048 + staging

    def column_tiles(self, columns: int, halves: int = 1) -> int:
        """Tiles that cover `columns` columns of the product, of which each tile takes its share of every half."""
        return -(-columns // self.tile_n) if halves == 1 else -(-columns // halves // (self.tile_n // halves))

    def refusals(self) -> tuple[str, ...]:
        """Why this configuration cannot run; empty if it can."""
        threads = 128 * (self.producer_registers + CONSUMERS * self.consumer_registers + self.finishing_registers)
        checks = (
            (self.tile_n in (128, 192, 256), "tile_n must be 128, 192 or 256: whole chunks, sums that fit registers"),
            (sum(self.chunks) == self.tile_n, "chunks must add up to tile_n"),
            (self.stages >= 2, "stages must be at least 2: one is read while the next is filled"),
            (threads <= 65_536, f"registers of all threads must fit 65536; they are {threads}"),
            (self.smem_bytes() <= SMEM_BYTES, f"shared memory must fit {SMEM_BYTES} bytes; it is {self.smem_bytes()}"),
        )
        return tuple(text for holds, text in checks if not holds)


@dataclass(frozen=True)
class OwnTiles:
    """Static shape of a kernel whose warpgroups have tiles of 128 x 128 and rings of their own.

    stages: of each ring, of 128 contracted elements. The rest as in `Config`.
    """

    stages: int = 3
    strip: int = 8
    producer_registers: int = 24
    consumer_registers: int = 240

    def smem_bytes(self) -> int:
        """Upper bound of the shared memory used: operands, 9.25 KiB a warpgroup for its columns, and 1 KiB."""
        return CONSUMERS * (self.stages * (2 * BLOCK * BLOCK + 640) + 9472) + 1024

    def column_tiles(self, columns: int, halves: int = 1) -> int:
        """Tiles that cover `columns` columns of a product without halves."""
        assert halves == 1
        return -(-columns // BLOCK)

    def refusals(self) -> tuple[str, ...]:
        """Why this configuration cannot run; empty if it can."""
        checks = (
            (self.stages >= 3, "stages must be at least 3: two hold what is put aside while the next is filled"),
            (self.smem_bytes() <= SMEM_BYTES, f"shared memory must fit {SMEM_BYTES} bytes; it is {self.smem_bytes()}"),
        )
        return tuple(text for holds, text in checks if not holds)


@dataclass(frozen=True)
class Options:
    """Static facts of one kernel.

    kind: "store", "act" or "dact", the epilogue. straddles: gate and up rows meet inside a block of the weight.
    halves: of the contracted columns, whose blocks are cut separately (a gated gradient that straddles).
    factor: dtype of probs or of the bias scale, "" if absent. keeps: "act" stores the pre-activation. quantized_preact:
    in E4M3 blocks, in which "dact" reads it.
    rowwise, columnwise: the quantised copies wanted. has_dprobs, has_dbias: "dact" only. alone: SMs are to stay free.
    """

    kind: str
    config: Config | OwnTiles
    activation: Activation | None = None
    straddles: bool = False
    halves: int = 1
    has_bias: bool = False
    factor: str = ""
    keeps: bool = False
    quantized_preact: bool = False
    rowwise: bool = False
    columnwise: bool = False
    power_of_two: bool = True
    has_dprobs: bool = False
    has_dbias: bool = False
    alone: bool = False

    def __post_init__(self) -> None:
        facts = tuple(getattr(self, field.name) for field in fields(self))
        object.__setattr__(self, "_hash", hash(facts))

    def __hash__(self) -> int:
        """Computed once: every launch looks its kernel up."""
        return self._hash  # type: ignore[attr-defined]


LONG = 4096
"""Contracted elements from which on tiles of 192 columns were faster, by 6 % a column; shorter sums: as fast."""

HANDED_OVER = ("clamped_swiglu", "qgeglu", "reglu")
"""Activations whose gradient would spill in a warpgroup with a tile of its own."""

HANDED_OVER_KEPT = (*HANDED_OVER, "gelu")
"""Those at a pre-activation that was kept quantised."""


def choose(
    kind: str, columns: int, contracted: int = 0, activation: Activation | None = None, quantized_preact: bool = False
) -> Config | OwnTiles:
    """The configuration for one kernel; columns: of the product.

    Products take 192 columns where that multiplies fewer zeros, or not many more of long sums. An activation hands 64
    KiB a tile, 256 columns of 16-bit pre-activation, to a finishing warpgroup. So do gradients that need too many
    registers for a warpgroup with a tile of its own: 128 columns of FP32 sums.
    """
    if kind == "store":
        narrow, wide = (-(-columns // n) * n for n in (192, 256))
        fewer = narrow < wide or (contracted >= LONG and narrow <= 1.04 * wide)
        return Config(192, chunks=(96, 96), pieces=4) if fewer else Config()
    if kind == "act":
        return Config(256, stages=3, consumer_registers=208, finishing_registers=72)
    handed_over = HANDED_OVER_KEPT if quantized_preact else HANDED_OVER
    if kind == "dact" and activation is not None and activation.kind in handed_over:
        return Config(128, stages=4, chunks=(64, 64), consumer_registers=144, finishing_registers=200)
    if kind == "dact":
        return OwnTiles()
    raise ValueError(f"kind must be 'store', 'act' or 'dact'; it is {kind!r}")
