"""What NVFP4's kernels compute on words of two BF16 values of a usual group is what the formats say.

The kernels' PTX itself is interpreted, instruction by instruction.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from cute_kernels.quantization import casts, nvfp4_scales

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed: the kernels' modules need it")

from cute_kernels.hopper import nvfp4_packed as packed

WORD = 0xFFFFFFFF
Registers = dict[str, Tensor]


def fp32(word: Tensor) -> Tensor:
    return (word - (word >> 31 << 32)).to(torch.int32).view(torch.float32)


def bits32(value: Tensor) -> Tensor:
    return value.float().view(torch.int32).long() & WORD


def half(word: Tensor, upper: int, dtype: torch.dtype) -> Tensor:
    bits = word >> 16 * upper & 0xFFFF
    return (bits - (bits >> 15 << 16)).to(torch.int16).view(dtype)


def joined(low: Tensor, high: Tensor) -> Tensor:
    """A word of two 16-bit values."""
    a, b = (x.view(torch.int16).long() & 0xFFFF if x.is_floating_point() else x for x in (low, high))
    return a | b << 16


def rounded(value: Tensor, how: str, dtype: torch.dtype) -> Tensor:
    """FP32 to 16 bits: `rn` to nearest, `rz` towards zero."""
    near = value.to(dtype)
    if how == "rn":
        return near
    bits = near.view(torch.int16)
    return (bits - (near.double().abs() > value.double().abs()).to(torch.int16)).view(dtype)


def of_halves(combine: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype, a: Tensor, b: Tensor) -> Tensor:
    return joined(*(combine(half(a, upper, dtype), half(b, upper, dtype)) for upper in (0, 1)))


def smaller_of_magnitudes(a: Tensor, b: Tensor) -> Tensor:
    """The sign that both give, and the number where one is NaN."""
    sign = a.signbit() ^ b.signbit()
    least = torch.fmin(a.abs(), b.abs())
    return torch.where(sign, -least, least)


def bytes_of(a: Tensor, b: Tensor, selector: Tensor) -> Tensor:
    both, digits = [*((a >> 8 * i & 255) for i in range(4)), *((b >> 8 * i & 255) for i in range(4))], int(selector)
    return sum((both[digits >> 4 * i & 7] << 8 * i for i in range(4)), torch.tensor(0))


def lop3(a: Tensor, b: Tensor, c: Tensor, table: Tensor) -> Tensor:
    assert int(table) == (0xF0 & 0xCC) | (0xAA & ~0xCC)
    return a & b | c & ~b


def in_fp64(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """One operation on FP32 values, rounded once: FP64 holds what the kernels multiply and add well enough."""
    return lambda *words: bits32(function(*(fp32(word).double() for word in words)))


OPERATIONS: dict[str, Callable[..., Tensor]] = {
    "mov.b32": lambda a: a,
    "and.b32": torch.bitwise_and,
    "or.b32": torch.bitwise_or,
    "lop3.b32": lop3,
    "prmt.b32": bytes_of,
    "shl.b32": lambda a, b: a << b & WORD,
    "shr.u32": lambda a, b: a >> b,
    "add.u32": lambda a, b: a + b & WORD,
    "min.u16x2": lambda a, b: joined(*(torch.minimum(a >> s & 0xFFFF, b >> s & 0xFFFF) for s in (0, 16))),
    "abs.f32": lambda a: a & 0x7FFFFFFF,
    "neg.f32": lambda a: a ^ 0x80000000,
    "mul.rn.f32": in_fp64(torch.mul),
    "max.f32": in_fp64(torch.fmax),
    "fma.rn.f32": in_fp64(lambda a, b, c: a * b + c),
    "mul.rn.bf16x2": lambda a, b: of_halves(lambda x, y: (x.double() * y.double()).bfloat16(), torch.bfloat16, a, b),
    "min.xorsign.abs.bf16x2": lambda a, b: of_halves(smaller_of_magnitudes, torch.bfloat16, a, b),
    "cvt.rn.satfinite.e4m3x2.f32": lambda a, b: e4m3(a) << 8 | e4m3(b),
    "cvt.rn.f16x2.e4m3x2": lambda a: joined(*(element(a >> s & 255).half() for s in (0, 8))),
    "cvt.u32.u16": lambda a: a,
    "cvt.f32.f16": lambda a: bits32(half(a, 0, torch.float16)),
    "setp.eq.f32": lambda a, b: fp32(a) == fp32(b),
    "selp.b32": lambda a, b, c: torch.where(c, a, b),
}
for _kind, _dtype in (("bf16", torch.bfloat16), ("f16", torch.float16)):
    for _how in ("rn", "rz"):
        OPERATIONS[f"cvt.{_how}.{_kind}x2.f32"] = lambda a, b, how=_how, dtype=_dtype: joined(
            rounded(fp32(b), how, dtype), rounded(fp32(a), how, dtype)
        )


def e4m3(word: Tensor) -> Tensor:
    return casts.cast_fp8(fp32(word)).view(torch.uint8).long()


def element(byte: Tensor) -> Tensor:
    return byte.to(torch.uint8).view(torch.float8_e4m3fn).float()


def run(text: str, off: int = 0, **registers: Tensor) -> Registers:
    """What is in the registers after the instructions. off: by how much the last bits of an approximation are."""
    found = dict(registers)

    def read(name: str) -> Tensor:
        if name in found:
            return found[name]
        return torch.tensor(int(name[2:], 16) if name.startswith("0f") else int(name, 0))

    for line in filter(None, (line.strip() for line in text.replace("\n", " ").split(";"))):
        if line.startswith(".reg"):
            continue
        name, rest = line.split(maxsplit=1)
        target, *sources = re.findall(r"\{[^}]*\}|[^,\s]+", rest)
        operands = [read(source) for source in sources]
        if target.startswith("{"):
            for i, part in enumerate(target.strip("{}").split(",")):
                found[part.strip()] = operands[0] >> 16 * i & 0xFFFF
        elif name == "rcp.approx.ftz.f32":
            found[target] = bits32(1 / fp32(operands[0]).double()) + off
        else:
            found[target] = OPERATIONS[name](*operands)
    return found


def word_of(first: Tensor, second: Tensor) -> Tensor:
    return joined(first.bfloat16(), second.bfloat16())


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
