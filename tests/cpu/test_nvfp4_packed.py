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
def test_scales(amax: float, off: int) -> None:
    """Of all blocks' maxima, larger ones than the group's too."""
    encode, inverse = factors_of(amax)
    assert packed.USUAL[0] < float(inverse) < packed.USUAL[1] and float(inverse) != 1
    largest = torch.arange(0x8000)
    registers = {"$4": largest | largest.flip(0) << 16, "$5": bits32(encode), "$6": bits32(inverse)}
    found = run(packed.SCALES, off, **registers)
    wanted = [half(largest, 0, torch.bfloat16).float(), half(largest.flip(0), 0, torch.bfloat16).float()]
    for i, block in enumerate(wanted):
        scale = nvfp4_scales.block_scale(block, torch.tensor([amax]))
        assert torch.equal(found["$3"] >> 8 * i & 255, scale.view(torch.uint8).long())
        factor = nvfp4_scales.block_encode_factor(scale, torch.tensor([amax])) * 2.0**-14
        assert torch.equal(fp32(found[f"${i}"]).nan_to_num(), factor.nan_to_num())
        decode = half(found["$2"], i, torch.bfloat16).float()
        assert torch.equal(decode.nan_to_num(), (scale.float() * 2**14).nan_to_num())


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
    a, b = x[0::2], x[1::2]
    registers = {"$1": word_of(a, b)} | {f"${i}": bits32(torch.tensor(factor * 2.0**-14)) for i in (2, 3)}
    decode = word_of(torch.tensor(SCALE * 2**14), torch.tensor(SCALE / 2 * 2**14))
    if drawn is None:
        halves = run(packed.HALVES, **registers)["$0"]
        got = run(packed.VALUES, **registers, **{"$4": decode})["$0"]
        codes = [wanted(part, factor) for part in (a, b)]
    else:
        drawn, other = drawn[:, None], 255 - drawn[:, None]
        halves = run(packed.DRAWN_HALVES, **registers, **{"$4": drawn.long() | other.long() << 16})["$0"]
        got = run(packed.DRAWN_VALUES, **{"$1": halves, "$2": registers["$1"].expand_as(halves), "$3": decode})["$0"]
        codes = [wanted(part.expand_as(halves), factor, byte) for part, byte in ((a, drawn), (b, other))]
    nibbles = run(packed.NIBBLES, **{"$1": halves, "$2": halves})["$0"]
    nans = [part.isnan().expand_as(codes[0]) for part in (a, b)]
    for i, (code, is_nan) in enumerate(zip(codes, nans, strict=True)):
        for place in (4 * i, 16 + 4 * i):
            assert torch.equal(nibbles >> place & 7, code.long() & 7)
        value = half(got, i, torch.bfloat16).float()
        want = casts.decode_e2m1(code) * (SCALE / (1 + i))
        assert torch.equal(value[~is_nan].view(torch.int32), want[~is_nan].view(torch.int32)), "signs of zeros too"


@pytest.mark.parametrize("factor", FACTORS)
def test_nearest(factor: float) -> None:
    checked(grid(), factor)
    checked((grid().float() / min(factor, 1e30)).bfloat16(), factor)


@pytest.mark.parametrize("factor", FACTORS[2:])
def test_stochastic(factor: float) -> None:
    """All random bytes, of values beside each place where a sum with one of them reaches the next code."""
    at = torch.arange(0, 8 * 512) / 512
    values = torch.cat([at[:1024], at[1024::2], torch.tensor([7.99, 9.0, 1e4, float("inf"), float("nan")])])
    values = (values / min(factor, 1e30)).bfloat16()
    near = torch.cat([(values.view(torch.int16) + step).view(torch.bfloat16) for step in (0, 1)])
    near = torch.cat([near, -near])
    checked(near, factor, torch.arange(256, dtype=torch.uint8))
