"""What NVFP4's kernels compute on words of two BF16 values of a usual group is what the formats say.

The kernels' PTX itself is interpreted (tests/ptx.py).
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cute_kernels.quantization import casts, nvfp4_scales
from tests.ptx import bits32, fp32, half, run, word_of

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed: the kernels' modules need it")

from cute_kernels.hopper import nvfp4_packed as packed


def factors_of(amax: float) -> tuple[Tensor, Tensor]:
    """`tensor_factors` of a group."""
    encode = nvfp4_scales.tensor_encode_scale(torch.tensor([amax]))
    return encode * (1 / 6), encode.reciprocal()


LIMITS = [2688 * limit * inside for limit, inside in zip(packed.USUAL, (1.001, 0.999), strict=True)]
GROUPS = 1.0, 3.7, 1e4, 1e-20, 1e20, *LIMITS
"""Largest magnitudes of groups."""


@pytest.mark.parametrize("amax", GROUPS)
@pytest.mark.parametrize("off", [-1, 0, 1])
@pytest.mark.parametrize("drawn", [False, True])
def test_scales(amax: float, off: int, drawn: bool) -> None:
    """Of all blocks' maxima, larger ones than the group's too; where they say that they fit."""
    encode, inverse = factors_of(amax)
    assert packed.USUAL[0] < float(inverse) < packed.USUAL[1] and float(inverse) != 1
    largest, times = torch.arange(0x8000), packed.ENCODES[drawn]
    blocks = [half(bits, 0, torch.bfloat16).float() for bits in (largest, largest.flip(0))]
    scales = [nvfp4_scales.block_scale(block, torch.tensor([amax])) for block in blocks]
    for first in (largest, torch.zeros_like(largest)):  # beside each, and beside none
        registers = {"$5": largest | (largest.flip(0) if first is largest else first) << 16, "$6": bits32(encode)}
        registers |= {"$7": bits32(inverse * times), "$8": torch.tensor(packed.DECODES[drawn])}
        found = run(packed.SCALES, off, **registers, **{"$9": bits32(torch.tensor(packed.FITS / times))})
        for i, scale in enumerate(scales):
            if i and first is not largest:
                continue
            assert torch.equal(found["$3"] >> 8 * i & 255, scale.view(torch.uint8).long())
            factor = nvfp4_scales.block_encode_factor(scale, torch.tensor([amax])) / times
            some = scale.float() > 0
            assert torch.equal(fp32(found[f"${i}"])[some], factor[some])
            assert fp32(found[f"${i}"])[scale.float() == 0].isfinite().all(), "times zeros it is zero"
            decode = half(found["$2"], i, torch.bfloat16).float()
            assert torch.equal(decode.nan_to_num(), (scale.float() * times).nan_to_num())
    fit = found["$4"] == 1
    block, scale = blocks[0], scales[0]
    assert (block[fit] * nvfp4_scales.block_encode_factor(scale, torch.tensor([amax]))[fit] < 6.99).all()
    assert not (fit & (scale.float() == 0) & (block != 0)).any() and fit[0]
    assert fit[(block <= amax) & (scale.float() >= 2**-6)].all(), "those of a group whose largest magnitude it is"


def grid() -> Tensor:
    """BF16 values: all to 8, of both signs, those past that in part; an even count."""
    every = torch.arange(0x10000)
    x = half(every, 0, torch.bfloat16)
    magnitude = x.float().abs()
    fine = (magnitude >= 2.0**-12) & (magnitude <= 8)
    kept = x[fine | (every % 37 == 0) | x.isnan() & (every % 8 == 0) | x.isinf()]
    return kept[: len(kept) // 2 * 2]


FACTORS = 1.0000001, 0.9999999, 0.61, 1.0, 1.37, 2.0**20, 3.3e-19, 3.4028235e38
SCALE = 0.8125
"""A block's scale."""


def wanted(x: Tensor, factor: float, byte: Tensor | None = None) -> Tensor:
    """Codes."""
    scaled = x.float() * torch.tensor(factor)
    return casts.cast_e2m1(scaled, None if byte is None else byte.expand(scaled.shape))


def checked(x: Tensor, factor: float, drawn: Tensor | None = None) -> None:
    """Values and codes of pairs of neighbours of x."""
    times = packed.ENCODES[drawn is not None]
    a, b = x[0::2], x[1::2]
    factors = bits32(torch.tensor(factor / times))
    registers = {"$1": word_of(a, b), "$2": factors, "$3": factors}
    decode = word_of(torch.tensor(SCALE * times), torch.tensor(SCALE / 2 * times))
    if drawn is None:
        got = run(packed.VALUES, **registers, **{"$4": decode})["$0"]
        words = {"$1": registers["$1"], "$2": word_of(b, a)}
        nibbles = run(packed.CODES, **words, **{f"${i}": factors for i in range(3, 7)})["$0"]
        codes = [wanted(part, factor) for part in (a, b)]
        columns = [codes[0], codes[1], codes[1], codes[0]]
    else:
        drawn, other = drawn[:, None], 255 - drawn[:, None]
        halves = run(packed.DRAWN_HALVES, **registers, **{"$4": drawn.long() | other.long() << 16})["$0"]
        word = registers["$1"].expand_as(halves)
        got = run(packed.DRAWN_VALUES, **{"$1": halves, "$2": word, "$3": decode})["$0"]
        words = {"$1": halves, "$2": halves.roll(1, 1), "$3": word, "$4": word.roll(1, 1)}
        nibbles = run(packed.DRAWN_CODES, **words)["$0"]
        codes = [wanted(part.expand_as(halves), factor, byte) for part, byte in ((a, drawn), (b, other))]
        columns = [*codes, *(code.roll(1, 1) for code in codes)]
    for i, code in enumerate(columns):
        assert torch.equal(nibbles >> 16 + 4 * i & 15, code.long() & 15)
    for i, code in enumerate(codes):
        value = half(got, i, torch.bfloat16).float()
        want = casts.decode_e2m1(code) * (SCALE / (1 + i))
        assert torch.equal(value.view(torch.int32), want.view(torch.int32)), "signs of zeros too"


def fitting(x: Tensor, factor: float) -> Tensor:
    """An even count of values that a block that fits may have."""
    x = x[(x.float() * torch.tensor(factor)).abs() < 6.99]
    return x[: len(x) // 2 * 2]


@pytest.mark.parametrize("factor", FACTORS)
def test_nearest(factor: float) -> None:
    for x in (grid(), (grid().float() / min(factor, 1e30)).bfloat16()):
        checked(fitting(x, factor), factor)


def test_nearest_of_any_product() -> None:
    """FP32 numbers beside each element and each place between two of them, some of all others; as products with 1."""
    special = torch.tensor([i / 8 for i in range(1, 56)] + [1.8708284, 4.4158800])
    near = bits32(special)[:, None] + torch.arange(-4096, 4097)
    m = torch.cat([fp32(near.flatten()), torch.rand(2**20, generator=torch.Generator().manual_seed(0)) * 6.99])
    one = word_of(torch.ones_like(m).bfloat16(), torch.ones_like(m).bfloat16())
    factors = bits32(m / packed.ENCODES[False])
    decode = word_of(*[torch.full_like(m, packed.ENCODES[False])] * 2)
    want = casts.cast_e2m1(m)
    got = run(packed.VALUES, **{"$1": one, "$2": factors, "$3": factors, "$4": decode})["$0"]
    nibbles = run(packed.CODES, **{"$1": one, "$2": one}, **{f"${i}": factors for i in range(3, 7)})["$0"]
    for i in range(2):
        assert torch.equal(half(got, i, torch.bfloat16).float(), casts.decode_e2m1(want))
    for i in range(4):
        assert torch.equal(nibbles >> 16 + 4 * i & 15, want.long())


@pytest.mark.parametrize("factor", FACTORS[2:])
def test_stochastic(factor: float) -> None:
    """All random bytes, of values beside each place where a sum with one of them reaches the next code."""
    at = torch.arange(0, 8 * 512) / 512
    values = torch.cat([at[:1024], at[1024::2]])
    values = (values / min(factor, 1e30)).bfloat16()
    near = torch.cat([(values.view(torch.int16) + step).view(torch.bfloat16) for step in (0, 1)])
    near = torch.cat([near, -near])
    checked(fitting(near, factor), factor, torch.arange(256, dtype=torch.uint8))
