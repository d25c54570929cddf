"""Conversions of single values between FP32 and E4M3, E5M2, E2M1 and E8M0, as the hardware's saturating ones do them.

Plain PyTorch, elementwise, no host sync, the same bits on CPU and CUDA. The rules are those of PTX
`cvt.rn.satfinite.{e4m3x2, e5m2x2, e2m1x2}.f32`, `cvt.rs.satfinite.e2m1x4.f32` and `cvt.rp.satfinite.ue8m0x2.f32`:

| input | E4M3 | E5M2 | E2M1 | E8M0 |
|---|---|---|---|---|
| larger than the largest, ±Inf | ±448 | ±57344 | ±6 | 2^127 (254) |
| NaN of either sign | 0x7F | 0x7F | +6 | 255 |
| -0, negative values that round to zero | -0 | -0 | -0 | |
| tie | even code | even code | even code | |
"""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels.quantization.formats import E2M1, E4M3, Element

E8M0_NAN = 255
"""The only E8M0 byte that is no power of two."""

_EXPONENT = 0x7F800000
_MANTISSA = 0x007FFFFF
_HALF_OF_LEAST_NORMAL = 0x00400000  # bits of the FP32 value 2^-127


def cast_fp8(x: Tensor, element: Element = E4M3) -> Tensor:
    """x rounded to E4M3 or E5M2, ties to even, saturating; NaN becomes 0x7F. Same shape, `element.dtype`.

    x: FP32 (narrower floats are widened first, which is exact).
    """
    finite = x.float().clamp(-element.max, element.max)
    return finite.masked_fill(finite.isnan(), float("nan")).to(element.dtype)


def cast_e8m0(x: Tensor) -> Tensor:
    """The smallest power of two that is at least x, as float8_e8m0fnu: byte e stands for 2^(e-127).

    x: FP32, not negative. 0 and everything up to 2^-127 give byte 0, values above 2^127 and Inf give 254, NaN 255.
    """
    bits = x.float().view(torch.int32)
    exponent, mantissa = (bits & _EXPONENT) >> 23, bits & _MANTISSA
    tiny = (exponent == 0) & (mantissa <= _HALF_OF_LEAST_NORMAL)
    byte = exponent + ((mantissa > 0) & ~tiny).int()
    byte = byte.clamp(max=254).masked_fill(x.isnan(), E8M0_NAN)
    return byte.to(torch.uint8).view(torch.float8_e8m0fnu)


def e8m0_reciprocal(scale: Tensor) -> Tensor:
    """2^(127-e) in FP32 for the E8M0 byte e; NaN for byte 255. Byte 254 gives the subnormal 2^-127."""
    byte = scale.view(torch.uint8).int()
    bits = torch.where(byte == 254, _HALF_OF_LEAST_NORMAL, (254 - byte) << 23)
    return bits.masked_fill(byte == E8M0_NAN, 0x7FC00000).int().view(torch.float32)


def cast_e2m1(x: Tensor, random_bytes: Tensor | None = None) -> Tensor:
    """Codes 0 to 15 of x rounded to E2M1, uint8, same shape: sign · 8 + index into 0, 0.5, 1, 1.5, 2, 3, 4, 6.

    Saturates; NaN becomes code 7. x: FP32. random_bytes: uint8, x's shape, rounds stochastically: with f the distance
    from the lower neighbour in 1/256 of the step (rounded down), the upper one is taken if f + byte >= 256.
    """
    x = x.float()
    magnitude = x.abs().masked_fill(x.isnan(), E2M1.max).clamp(max=E2M1.max)
    # Codes of one binade are equally far apart: steps of 0.5 below 2, of 1 below 4, of 2 above.
    low, middle = magnitude < 2, magnitude < 4
    steps = magnitude * torch.where(low, 2.0, torch.where(middle, 1.0, 0.5))
    start = torch.where(low, 0, torch.where(middle, 2, 4))
    if random_bytes is None:
        index = start + steps.round().int()
    else:
        whole = steps.floor()
        up = ((steps - whole) * 256).int() + random_bytes.int() >= 256
        index = start + whole.int() + up.int()
    negative = torch.signbit(x) & ~x.isnan()
    return (index + 8 * negative.int()).to(torch.uint8)


def decode_e2m1(codes: Tensor) -> Tensor:
    """The FP32 values of codes 0 to 15."""
    index = codes.int() & 7
    exponent, half = index >> 1, (index & 1).float()
    # index 0, 1: 0 and 0.5; else (1 + half/2) · 2^(exponent - 1)
    magnitude = torch.where(exponent == 0, half * 0.5, (1 + half * 0.5) * (1 << exponent).float() * 0.5)
    return torch.where(codes >= 8, -magnitude, magnitude)


def pack_e2m1(codes: Tensor) -> Tensor:
    """[..., K] codes -> [..., K/2] bytes, the even index in the low half. K is even."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_e2m1(packed: Tensor) -> Tensor:
    """[..., K/2] bytes -> [..., K] codes: the inverse of `pack_e2m1`."""
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)
