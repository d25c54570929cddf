"""Low-precision formats as data: elements, scales, blocks, rounding. `quantize` gives the bytes.

A matrix is `[M, K]`; K is the dimension that a product sums over. One scale serves one block; `x ≈ element · scale`
(all scales are for decoding). Formats with equal fields give equal bytes: whatever changes a byte is a field here,
so a format is also the part of a kernel's or a rule's key that says what it reads and writes.

| format | block (rows x columns) | scale | data of the column-wise copy |
|---|---|---|---|
| `fp8_tensor` | the whole tensor | FP32 | the transposed bytes `[K, M]` |
| `fp8_block(dims=1)` | 1x128 | FP32, by default a power of two | `[K, M]`, quantised in blocks of 128 along M |
| `fp8_block(dims=2)` | 128x128 | FP32, by default a power of two | the transposed bytes `[K, M]` |
| `mxfp8(dims=1)` | 1x32 | E8M0 | `[M, K]`, not transposed, quantised in blocks 32x1 |
| `mxfp8(dims=2)` | 32x32 | E8M0 | the same bytes |
| `nvfp4(dims=1)` | 1x16 | E4M3, and one FP32 amax for the tensor | `[K, M/2]`, quantised in blocks of 16 along M |
| `nvfp4(dims=2)` | 16x16 | E4M3, and one FP32 amax for the tensor | the transposed codes `[K, M/2]` |

Sources: OCP Microscaling Formats (MX) 1.0 for E4M3, E5M2, E2M1 and E8M0; Transformer Engine 2.20 for the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

ROUNDINGS = ("nearest", "stochastic")


@dataclass(frozen=True)
class Element:
    """What one value is stored as.

    bits: of one value. max: the largest finite magnitude; conversions saturate there. dtype: of the stored tensor;
    E2M1 is stored as uint8, two codes a byte, the even index in the low half (`.view(torch.float4_e2m1fn_x2)` is free).
    has_nan: whether NaN can be stored; where it cannot, the block's scale carries it.
    """

    name: str
    bits: int
    max: float
    dtype: torch.dtype
    has_nan: bool = True

    @property
    def packed(self) -> int:
        """Values in one stored element."""
        return 8 * self.dtype.itemsize // self.bits


E4M3 = Element("E4M3", 8, 448.0, torch.float8_e4m3fn)
E5M2 = Element("E5M2", 8, 57344.0, torch.float8_e5m2)
E2M1 = Element("E2M1", 4, 6.0, torch.uint8, has_nan=False)


@dataclass(frozen=True)
class Scale:
    """What one scale is stored as, and how it is rounded: "nearest", or "up" to the next power of two."""

    name: str
    dtype: torch.dtype
    rounding: str


FP32 = Scale("FP32", torch.float32, "nearest")
FP32_POWER_OF_2 = Scale("FP32 power of two", torch.float32, "up")
E8M0 = Scale("E8M0", torch.float8_e8m0fnu, "up")
E4M3_SCALE = Scale("E4M3", torch.float8_e4m3fn, "nearest")


@dataclass(frozen=True)
class Format:
    """A quantised format: `x[i, j] ≈ element[i, j] · scale[block of (i, j)]`.

    block: (rows, columns) of a block, the columns along the summed dimension; None for one scale per tensor.
    divides: whether the block must divide the matrix, else the last block of a row or column may be short.
    two_level: each block's scale is relative to a scale that comes from the amax of the tensor.
    transposes: whether the column-wise copy lies transposed.
    amax_epsilon: least amax that a FP32 scale is computed from. rounding: of the elements, one of `ROUNDINGS`.
    hadamard: the column-wise copy of xᵀ is rotated by `hadamard.rotate` before it is quantised.
    """

    name: str
    element: Element
    scale: Scale
    block: tuple[int, int] | None
    divides: bool
    two_level: bool = False
    transposes: bool = True
    amax_epsilon: float = 0.0
    rounding: str = "nearest"
    hadamard: bool = False

    def __post_init__(self) -> None:
        if self.rounding not in ROUNDINGS:
            raise ValueError(f"rounding is {self.rounding!r}, needs one of: {', '.join(ROUNDINGS)}")
        if not 0 <= self.amax_epsilon < float("inf"):
            raise ValueError(f"amax_epsilon must be finite and not negative; it is {self.amax_epsilon}")

    @property
    def is_square(self) -> bool:
        """Whether one quantisation serves both directions: one scale per tensor, or a square block."""
        return self.block is None or self.block[0] == self.block[1]

    @property
    def exact_in_bfloat16(self) -> bool:
        """Whether values are exact in BF16 (above its subnormals): those whose scales are powers of two."""
        return self.scale in (FP32_POWER_OF_2, E8M0)

    @property
    def bytes_per_element(self) -> float:
        """Bytes of data and scales for one value of one direction, without padding."""
        scale_bytes = 0.0 if self.block is None else self.scale.dtype.itemsize / (self.block[0] * self.block[1])
        return self.element.bits / 8 + scale_bytes

    def multiple(self, columnwise: bool = False) -> tuple[int, int]:
        """What (M, K) must be multiples of to be quantised in this direction."""
        if self.block is None or not self.divides:
            return 1, 1
        along, across = self.block[1], self.block[0]
        return (along, across) if columnwise else (across, along)

    def __str__(self) -> str:
        return self.name


def _dims(dims: int) -> int:
    if dims not in (1, 2):
        raise ValueError(f"dims is {dims!r}, needs 1 or 2: blocks of one row, or square blocks")
    return dims


def _fp8(element: Element) -> str:
    if element not in (E4M3, E5M2):
        raise ValueError(f"element is {element.name}, needs E4M3 or E5M2")
    return element.name


def fp8_tensor(element: Element = E4M3, power_of_2: bool = False, amax_epsilon: float = 0.0) -> Format:
    """One FP32 scale from the tensor's own amax: TE's `Float8CurrentScaling`. power_of_2: round the scale up to one."""
    scale = FP32_POWER_OF_2 if power_of_2 else FP32
    name = f"FP8 {_fp8(element)} per tensor, {scale.name} scale"
    return Format(name, element, scale, None, False, amax_epsilon=amax_epsilon)


def fp8_block(
    element: Element = E4M3, dims: int = 1, force_pow_2_scales: bool = True, amax_epsilon: float = 0.0
) -> Format:
    """FP32 scales for blocks of 1x128 (dims=1: activations, gradients) or 128x128 (dims=2: weights): TE's
    `Float8BlockScaling`, whose `use_f32_scales=True` is `force_pow_2_scales=False` here.
    """
    block = (1, 128) if _dims(dims) == 1 else (128, 128)
    scale = FP32_POWER_OF_2 if force_pow_2_scales else FP32
    name = f"FP8 {_fp8(element)} {block[0]}x{block[1]}, {scale.name} scales"
    return Format(name, element, scale, block, False, amax_epsilon=amax_epsilon)


def mxfp8(element: Element = E4M3, dims: int = 1) -> Format:
    """E8M0 scales for blocks of 32 values (dims=1: 1x32, and 32x1 column-wise) or of 32x32 (dims=2), rounded up."""
    block = (1, 32) if _dims(dims) == 1 else (32, 32)
    return Format(f"MXFP8 {_fp8(element)} {block[0]}x{block[1]}", element, E8M0, block, True, transposes=False)


def nvfp4(dims: int = 1, hadamard: bool = False, stochastic: bool = False) -> Format:
    """E2M1 with E4M3 scales for 1x16 (dims=1) or 16x16 (dims=2) and one FP32 amax for the tensor.

    As TE's `NVFP4BlockScaling` has them: `nvfp4(hadamard=True)` for inputs, `nvfp4(2)` for weights,
    `nvfp4(hadamard=True, stochastic=True)` for gradients. Raises ValueError for square blocks with either: the two
    directions would not hold the same values.
    """
    if _dims(dims) == 2 and (hadamard or stochastic):
        raise ValueError("NVFP4 16x16 takes neither hadamard nor stochastic: both directions share one quantisation")
    block = (1, 16) if dims == 1 else (16, 16)
    rounding = "stochastic" if stochastic else "nearest"
    name = f"NVFP4 {block[0]}x{block[1]}{', rotated' * hadamard}{', stochastic' * stochastic}"
    return Format(name, E2M1, E4M3_SCALE, block, True, two_level=True, rounding=rounding, hadamard=hadamard)
