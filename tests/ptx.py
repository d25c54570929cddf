"""Runs the PTX of kernels that work on words, instruction by instruction, on tensors: each int64, of 32-bit words."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from torch import Tensor

from cute_kernels.quantization import casts

WORD = 0xFFFFFFFF
Combine = Callable[..., Tensor]


def fp32(word: Tensor) -> Tensor:
    return (word - (word >> 31 << 32)).to(torch.int32).view(torch.float32)


def bits32(value: Tensor) -> Tensor:
    return value.float().view(torch.int32).long() & WORD


def signed(bits: Tensor) -> Tensor:
    """The number that 16 bits are in two's complement."""
    return bits - (bits >> 15 << 16)


def half(word: Tensor, upper: int, dtype: torch.dtype) -> Tensor:
    return signed(word >> 16 * upper & 0xFFFF).to(torch.int16).view(dtype)


def joined(low: Tensor, high: Tensor) -> Tensor:
    """A word of two 16-bit values."""
    a, b = (x.view(torch.int16).long() if x.is_floating_point() else x for x in (low, high))
    return a & 0xFFFF | (b & 0xFFFF) << 16


def word_of(first: Tensor, second: Tensor) -> Tensor:
    return joined(first.bfloat16(), second.bfloat16())


def e4m3(word: Tensor) -> Tensor:
    return casts.cast_fp8(fp32(word)).view(torch.uint8).long()


def element(byte: Tensor) -> Tensor:
    return byte.to(torch.uint8).view(torch.float8_e4m3fn).float()


def _rounded(value: Tensor, how: str, dtype: torch.dtype) -> Tensor:
    """FP32 to 16 bits: `rn` to nearest, `rz` towards zero."""
    near = value.to(dtype)
    if how == "rn":
        return near
    bits = near.view(torch.int16)
    return (bits - (near.double().abs() > value.double().abs()).to(torch.int16)).view(dtype)


def _bytes_of(a: Tensor, b: Tensor, selector: Tensor) -> Tensor:
    both, digits = [*((a >> 8 * i & 255) for i in range(4)), *((b >> 8 * i & 255) for i in range(4))], int(selector)

    def chosen(digit: int) -> Tensor:
        byte = both[digit & 7]
        return (byte >> 7) * 255 if digit & 8 else byte

    return sum((chosen(digits >> 4 * i & 15) << 8 * i for i in range(4)), torch.tensor(0))


def _lop3(a: Tensor, b: Tensor, c: Tensor, table: Tensor) -> Tensor:
    """Bit i of the table: what becomes of the bits of a, b and c that i has, a's first."""
    found = torch.tensor(0)
    for i in range(8):
        if int(table) >> i & 1:
            found = found | (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return found & WORD


def _in_fp64(combine: Combine) -> Combine:
    """One operation on FP32 values, rounded once: FP64 holds what the kernels multiply and add well enough."""
    return lambda *words: bits32(combine(*(fp32(word).double() for word in words)))


def _of_bf16(combine: Combine) -> Combine:
    """One operation on each half, a BF16 value, rounded once."""
    halves = torch.bfloat16
    return lambda *words: joined(
        *(combine(*(half(word, upper, halves).double() for word in words)).to(halves) for upper in (0, 1))
    )


def _of_integers(combine: Combine, kind: str) -> Combine:
    """One operation on each half, an integer (`u16` or `s16`), without carries."""
    read = signed if kind == "s16" else lambda bits: bits
    return lambda *words: joined(*(combine(*(read(word >> 16 * i & 0xFFFF) for word in words)) for i in (0, 1)))


OPERATIONS: dict[str, Combine] = {
    "mov.b32": lambda a: a,
    "and.b32": torch.bitwise_and,
    "or.b32": torch.bitwise_or,
    "lop3.b32": _lop3,
    "prmt.b32": _bytes_of,
    "shl.b32": lambda a, b: a << b & WORD,
    "shr.u32": lambda a, b: a >> b,
    "add.u32": lambda a, b: a + b & WORD,
    "sub.u32": lambda a, b: a - b & WORD,
    "mul.lo.u32": lambda a, b: a * b & WORD,
    "mad.lo.u32": lambda a, b, c: a * b + c & WORD,
    "abs.f32": lambda a: a & 0x7FFFFFFF,
    "neg.f32": lambda a: a ^ 0x80000000,
    "max.f32": lambda a, b: bits32(torch.fmax(fp32(a), fp32(b))),
    "add.rn.f32": _in_fp64(torch.add),
    "mul.rn.f32": _in_fp64(torch.mul),
    "fma.rn.f32": _in_fp64(lambda a, b, c: a * b + c),
    "mul.rn.bf16x2": _of_bf16(torch.mul),
    "add.rn.bf16x2": _of_bf16(torch.add),
    "sub.rn.bf16x2": _of_bf16(torch.sub),
    "cvt.rn.satfinite.e4m3x2.f32": lambda a, b: e4m3(a) << 8 | e4m3(b),
    "cvt.rn.f16x2.e4m3x2": lambda a: joined(*(element(a >> s & 255).half() for s in (0, 8))),
    "cvt.u32.u16": lambda a: a,
    "cvt.f32.f16": lambda a: bits32(half(a, 0, torch.float16)),
    "setp.le.f32": lambda a, b: fp32(a) <= fp32(b),
    "setp.le.and.f32": lambda a, b, c: (fp32(a) <= fp32(b)) & c,
    "selp.b32": lambda a, b, c: torch.where(c, a, b),
}
for _kind in ("u16", "s16"):
    for _name, _combine in {"add": torch.add, "min": torch.minimum, "max": torch.maximum}.items():
        OPERATIONS[f"{_name}.{_kind}x2"] = _of_integers(_combine, _kind)
for _kind, _dtype in (("bf16", torch.bfloat16), ("f16", torch.float16)):
    for _how in ("rn", "rz"):
        OPERATIONS[f"cvt.{_how}.{_kind}x2.f32"] = lambda a, b, how=_how, dtype=_dtype: joined(
            _rounded(fp32(b), how, dtype), _rounded(fp32(a), how, dtype)
        )


def run(text: str, off: int = 0, **registers: Tensor) -> dict[str, Tensor]:
    """What is in the registers after the instructions. off: by how much the last bits of an approximation are."""
    found = dict(registers)

    def read(name: str) -> Tensor:
        if name.startswith("{"):
            return joined(*map(read, re.findall(r"[^{}, ]+", name)))
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
