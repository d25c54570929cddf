"""What MXFP8's kernels compute on two BF16 values of a word is what the casts say, for all values and all scales.

The kernels' PTX itself is interpreted, instruction by instruction.
"""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from cute_kernels.quantization import casts

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed: the kernels' modules need it")

from cute_kernels.hopper import mxfp8_packed as packed

BF16 = torch.bfloat16


def bits(values: Tensor) -> Tensor:
    """Of BF16 values, as int64 0 to 65535."""
    return values.view(torch.int16).long() & 0xFFFF


def values(halves: Tensor) -> Tensor:
    """BF16 values of such bits."""
    return (halves - (halves >= 0x8000).long() * 0x10000).to(torch.int16).view(BF16)


def signed(half: Tensor) -> Tensor:
    return (half ^ 0x8000) - 0x8000


def in_bf16(how: str, *operands: Tensor) -> Tensor:
    """One operation, rounded once: FP64 holds products, sums and differences of BF16 values well enough for that."""
    a, b = (values(half).double() for half in operands)
    result = {"mul": a * b, "add": a + b, "sub": a - b}[how]
    return bits(torch.where(result.isnan(), torch.tensor(float("nan"), dtype=torch.float64), result).to(BF16))


def run(text: str, **registers: Tensor) -> dict[str, Tensor]:
    """What is in the registers after the instructions, of one half of the words. Sums of whole words are such that no
    half carries into the other, which is checked.
    """
    found = dict(registers)

    def read(name: str) -> Tensor:
        if name in found:
            return found[name]
        number = int(name, 0)
        half = number & 0xFFFF
        assert number >> 16 in (half, 0), f"{name} is not the same twice"
        return torch.tensor(half)

    for line in filter(None, (line.strip() for line in text.replace("\n", " ").split(";"))):
        if line.startswith(".reg"):
            continue
        name, rest = line.split(maxsplit=1)
        target, *sources = (part.strip() for part in rest.split(","))
        if name == "lop3.b32":
            a, b, c = map(read, sources[:3])
            assert int(sources[3], 0) == (0xF0 & 0xCC) | 0xAA
            found[target] = a & b | c
            continue
        operands = [read(source) for source in sources]
        match = re.fullmatch(r"(\w+)(?:\.rn|\.lo)?\.(\w+)", name)
        assert match, name
        how, kind = match.groups()
        if kind == "bf16x2":
            result = in_bf16(how, *operands)
        elif kind in ("u16x2", "s16x2"):
            operands = [signed(half) for half in operands] if kind == "s16x2" else operands
            combine = {"min": torch.minimum, "max": torch.maximum, "add": torch.add}[how]
            result = combine(*operands) & 0xFFFF
        else:
            assert kind in ("b32", "u32")
            result = {
                "mov": lambda a: a,
                "and": torch.bitwise_and,
                "or": torch.bitwise_or,
                "sub": torch.sub,
                "mul": torch.mul,
                "mad": lambda a, b, c: a * b + c,
                "shr": lambda a, b: a >> b,
            }[how](*operands)
            assert int(result.min()) >= 0 and int(result.max()) <= 0xFFFF, f"{line} reaches into the other half"
            if how == "shr":
                assert not (operands[0] & 2 ** int(operands[1]) - 1).any(), f"{line} takes bits of the other half"
        found[target] = result
    return found


def same(got: Tensor, want: Tensor) -> Tensor:
    """Where BF16 values have the same bits, any NaN being like another."""
    return (bits(got) == bits(want)) | (got.isnan() & want.isnan())


def test_scales_of_all_maxima() -> None:
    largest = torch.arange(0x8000)
    found = run(packed.SCALES, **{"$3": largest})
    scale = casts.cast_e8m0(values(largest).float() * torch.tensor(1 / 448))
    byte = scale.view(torch.uint8).long()
    assert torch.equal(found["$2"], byte)
    assert bool(same(values(found["$0"]), casts.e8m0_reciprocal(scale).to(BF16)).all())
    decode = torch.exp2(byte.double() - 127).to(BF16)
    is_nan = byte == 255  # what decodes may be anything: NaN encodes
    assert torch.equal(values(found["$1"])[~is_nan], decode[~is_nan]) and int(is_nan.sum()) == 127


def test_all_values_under_all_scales() -> None:
    """Of a block's scale: values that its maximum may bound, any value where it is NaN or infinite."""
    every = torch.arange(0x10000)
    x = values(every)
    least = casts.cast_e8m0(x.float().abs() * torch.tensor(1 / 448)).view(torch.uint8).long()
    infinite = int(least[0x7F80])
    for byte in range(256):
        scale = torch.tensor([byte], dtype=torch.uint8)
        encode = casts.e8m0_reciprocal(scale)
        decode = torch.full((1,), float("nan")) if byte == 255 else torch.exp2(torch.tensor([byte - 127.0]))
        registers = {"$1": every, "$2": bits(encode.to(BF16)), "$3": bits(decode.to(BF16)), "$4": torch.tensor(0x240)}
        got = values(run(packed.ROUNDED, **registers)["$0"])
        want = (casts.cast_fp8(x.float() * encode).float() * decode).to(BF16)
        may_be = (least <= byte) | (byte >= infinite)
        wrong = may_be & ~same(got, want)
        assert not wrong.any(), f"scale {byte}: {int(wrong.sum())} values, the first {x[wrong][0]}"
    assert packed.APART == 0x240 << 16 | 0x240
