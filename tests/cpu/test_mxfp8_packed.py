"""What MXFP8's kernels compute on two BF16 values of a word is what the casts say, for all values and all scales.

The kernels' PTX itself is interpreted (tests/ptx.py).
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cute_kernels.quantization import casts
from tests.ptx import half, joined, run, word_of

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed: the kernels' modules need it")

from cute_kernels.hopper import mxfp8_packed as packed

BF16 = torch.bfloat16
EVERY = torch.arange(0x10000)
"""The bits of all BF16 values."""


def same(got: Tensor, want: Tensor) -> Tensor:
    """Where BF16 values have the same bits, any NaN being like another."""
    return (got.view(torch.int16) == want.view(torch.int16)) | (got.isnan() & want.isnan())


def test_scales_of_all_maxima() -> None:
    """In each half, beside others in the other one."""
    largest = EVERY[:0x8000]
    halves = largest, largest.flip(0)
    found = run(packed.SCALES, **{"$3": joined(*halves)})
    for upper, one in enumerate(halves):
        scale = casts.cast_e8m0(half(one, 0, BF16).float() * torch.tensor(1 / 448))
        byte = scale.view(torch.uint8).long()
        assert torch.equal(found["$2"] >> 16 * upper & 0xFFFF, byte)
        assert bool(same(half(found["$0"], upper, BF16), casts.e8m0_reciprocal(scale).to(BF16)).all())
        decode = torch.exp2(byte.double() - 127).to(BF16)
        is_nan = byte == 255  # what decodes may be anything: NaN encodes
        assert torch.equal(half(found["$1"], upper, BF16)[~is_nan], decode[~is_nan]) and int(is_nan.sum()) == 127


def factors(byte: int) -> tuple[Tensor, Tensor]:
    """What encodes and what decodes, FP32 of one element."""
    decode = torch.full((1,), float("nan")) if byte == 255 else torch.exp2(torch.tensor([byte - 127.0]))
    return casts.e8m0_reciprocal(torch.tensor([byte], dtype=torch.uint8)), decode


def test_all_values_under_all_scales() -> None:
    """Of a block's scale: values that its maximum may bound, any value where it is NaN or infinite. The other half of
    the word holds another value, of a block with another scale.
    """
    least = casts.cast_e8m0(half(EVERY, 0, BF16).float().abs() * torch.tensor(1 / 448)).view(torch.uint8).long()
    infinite = int(least[0x7F80])
    for byte in range(256):
        sides = [(EVERY, byte, factors(byte)), (EVERY.flip(0), 255 - byte, factors(255 - byte))]
        encodes, decodes = zip(*(both for *_, both in sides), strict=True)
        registers = {"$1": joined(EVERY, EVERY.flip(0)), "$2": word_of(*encodes), "$3": word_of(*decodes)}
        found = run(packed.ROUNDED, **registers, **{"$4": torch.tensor(packed.APART)})["$0"]
        for upper, (bits, scale, (encode, decode)) in enumerate(sides):
            x = half(bits, 0, BF16)
            want = (casts.cast_fp8(x.float() * encode).float() * decode).to(BF16)
            may_be = (least[bits] <= scale) | (scale >= infinite)
            wrong = may_be & ~same(half(found, upper, BF16), want)
            assert not wrong.any(), f"half {upper}, scale {scale}: {int(wrong.sum())} values, the first {x[wrong][0]}"
