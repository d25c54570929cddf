"""NVFP4 of words of two BF16 values on SM90 in few instructions, for groups whose largest magnitude is `usual`.

Bit for bit what `nvfp4_scales` gives (tests/cpu/test_nvfp4_packed.py). Factors that encode are 2^-14 times what they
are, those that decode 2^14 times. E2M1 then ends where FP16 does: a code, of 0 and 0.5 too, is what lies above bit 8 of
an FP16 value. To nearest: with e = max(m, 1.5) · 2^22, m - e is rounded to a step, ties to even, since e is a multiple
of two of them. Stochastically: m is cut to FP16, whose bits below the code are 1/512 step each, and a random byte is
added to them as an integer.

Exact where neither a factor nor a sum of a rotation, whose factor of a quarter comes with its last step, leaves FP32's
normal numbers. Nobody's model has other groups, but a result shall not depend on the kernel that makes it: those take
`Unusual`, which is `nvfp4_scales` in the same form.
"""

from cutlass import Boolean, Float32, Uint32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from cute_kernels.hopper import nvfp4_scales
from cute_kernels.hopper.epilogues.eights import permuted
from cute_kernels.hopper.fp8_scales import bf16_bits, halves_of, widen
from cute_kernels.hopper.nvfp4_scales import STEPS, block_scale, butterfly, codes, half_of, rounded_pair, values

USUAL = 2.0**-100, 2.0**100
"""Between which a usual group's 1 / S_enc is."""


def usual(inverse):
    """Whether a group with this 1 / S_enc is; not where it is NaN, or 1, as of an infinite magnitude."""
    inside = Boolean(inverse > Float32(USUAL[0])) & Boolean(inverse < Float32(USUAL[1]))
    return inside & Boolean(inverse != Float32(1.0))


_REGISTERS = ".reg .b32 x, m, e, t0, t1;"
_SCALED = "0f38800000"
"""2^-14."""

SCALES = f"""
    .reg .b16 pair, low, high; .reg .b32 a, b, x, y, e, s0, s1, both; .reg .pred p;
    {widen("a", "$4", False, "bfloat16")} {widen("b", "$4", True, "bfloat16")}
    mul.rn.f32 a, a, $5; mul.rn.f32 b, b, $5;
    cvt.rn.satfinite.e4m3x2.f32 pair, b, a; cvt.u32.u16 $3, pair;
    cvt.rn.f16x2.e4m3x2 both, pair; mov.b32 {{low, high}}, both; cvt.f32.f16 s0, low; cvt.f32.f16 s1, high;
    cvt.rn.bf16x2.f32 e, s1, s0; mov.b32 y, 0x46804680; mul.rn.bf16x2 $2, e, y;""" + "".join(
    f"""
    mul.rn.f32 x, s{i}, $6; rcp.approx.ftz.f32 y, x; neg.f32 x, x; fma.rn.f32 e, x, y, 0f3F800000;
    fma.rn.f32 y, y, e, y; mul.rn.f32 y, y, {_SCALED};
    setp.eq.f32 p, s{i}, 0f00000000; selp.b32 ${i}, 0x787FFFFF, y, p;"""
    for i in range(2)
)
"""The reciprocal is `rcp.rn` of numbers that are neither huge nor tiny: an approximation and one Newton step."""


def _magnitudes(step: str) -> str:
    """t0 and t1 of both values of $1, of which `step` makes it from a magnitude m."""
    return _REGISTERS + "".join(
        f"""
    {widen("x", "$1", i == 1, "bfloat16")} abs.f32 x, x; mul.rn.f32 m, x, ${2 + i}; {step.format(t=f"t{i}")}"""
        for i in range(2)
    )


_NEAREST = _magnitudes("max.f32 e, m, 0f38C00000; fma.rn.f32 m, e, 0fCA800000, m; fma.rn.f32 {t}, e, 0f4A800000, m;")
VALUES = f"""{_NEAREST}
    cvt.rn.bf16x2.f32 m, t1, t0; mov.b32 e, 0x39C039C0; min.xorsign.abs.bf16x2 m, m, e;
    lop3.b32 m, m, 0x7FFF7FFF, $1, 0xE2; mul.rn.bf16x2 $0, m, $4;"""
HALVES = f"""{_NEAREST}
    cvt.rn.f16x2.f32 m, t1, t0; mov.b32 e, 0x0E000E00; min.u16x2 $0, m, e;"""
"""What is too large even for FP32 gives minus infinity or NaN, which the minima take for more than 6, too."""
DRAWN_HALVES = f"""{_magnitudes("mov.b32 {t}, m;")}
    cvt.rz.f16x2.f32 m, t1, t0; shl.b32 e, $4, 1; add.u32 m, m, e; mov.b32 e, 0x0FFF0FFF; min.u16x2 $0, m, e;"""
DRAWN_VALUES = """.reg .b32 m, x;
    shr.u32 m, $1, 3; and.b32 m, m, 0x01C001C0; mov.b32 x, 0x77807780; mul.rn.bf16x2 m, m, x;
    lop3.b32 m, m, 0x7FFF7FFF, $2, 0xE2; mul.rn.bf16x2 $0, m, $3;"""
NIBBLES = """.reg .b32 x, y;
    prmt.b32 x, $1, $2, 0x7531; shr.u32 y, x, 5; shr.u32 x, x, 1; lop3.b32 $0, x, 0x0F0F0F0F, y, 0xE2;"""


def _asm(result, operands, text: str, constraints: str, loc, ip):
    operands = [x.ir_value(loc=loc, ip=ip) for x in operands]
    return llvm.inline_asm(
        result, operands, f"{{ {text} }}", constraints, has_side_effects=False, is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
    )  # fmt: skip


@dsl_user_op
def scales(largest, encode, inverse, *, loc=None, ip=None):
    """`Usual.scales`."""
    operands = (Uint32(largest), Float32(encode), Float32(inverse))
    kinds = [T.f32()] * 2 + [T.i32()] * 2
    found = _asm(llvm.StructType.get_literal(kinds), operands, SCALES, "=&f,=&f,=&r,=&r,r,f,f", loc, ip)
    parts = [llvm.extractvalue(one, found, [i], loc=loc, ip=ip) for i, one in enumerate(kinds)]
    return [Float32(part) for part in parts[:2]], Uint32(parts[2]), Uint32(parts[3])


@dsl_user_op
def asked(text: str, words, encode=(), last=(), *, loc=None, ip=None):
    """The word that some instructions make of words, two factors, and more words."""
    operands = [*map(Uint32, words), *map(Float32, encode), *map(Uint32, last)]
    constraints = ["=r", *"r" * len(words), *"f" * len(encode), *"r" * len(last)]
    return Uint32(_asm(T.i32(), operands, text, ",".join(constraints), loc, ip))


@dsl_user_op
def quartered(a, b, *, loc=None, ip=None):
    """(a + b) / 4 and (a - b) / 4."""
    text = """.reg .f32 t, u; mul.rn.f32 t, $3, 0f3E800000; neg.f32 u, t;
        fma.rn.f32 $0, $2, 0f3E800000, t; fma.rn.f32 $1, $2, 0f3E800000, u;"""
    kind = llvm.StructType.get_literal([T.f32()] * 2)
    found = _asm(kind, (Float32(a), Float32(b)), text, "=&f,=&f,f,f", loc, ip)
    return [Float32(llvm.extractvalue(T.f32(), found, [i], loc=loc, ip=ip)) for i in range(2)]


class Usual:
    """What is done with words of two BF16 values, of a `usual` group.

    scales: of a word of two largest magnitudes (the factors that encode, FP32; those that decode, a word of BF16; the
    E4M3 bytes of S). encode, inverse: of `nvfp4_scales.tensor_factors`.
    values: q·S. encode: a pair of factors; decode: of both, or with the one of both in its half 0 or 1. drawn: None, or
    two random bytes, in bits 0 and 16.
    codes: of two words, but for signs, in bits 0 to 2, 4 to 6, 16 to 18 and 20 to 22; other bits hold anything.
    rotated: `nvfp4_scales.rotated`.
    """

    @staticmethod
    def scales(largest, encode, inverse):
        return scales(largest, encode, inverse)

    @staticmethod
    def values(word, encode, decode, drawn=None, half=None):
        if half is not None:
            decode = halves_of(decode, decode, half == 1)
        if drawn is None:
            return asked(VALUES, [word], encode, [decode])
        return asked(DRAWN_VALUES, [asked(DRAWN_HALVES, [word], encode, [drawn]), word, decode])

    @staticmethod
    def codes(words, encodes, drawn):
        halves = [
            asked(HALVES, [word], encode) if byte is None else asked(DRAWN_HALVES, [word], encode, [byte])
            for word, encode, byte in zip(words, encodes, drawn, strict=True)
        ]
        return asked(NIBBLES, halves)

    @staticmethod
    def rotated(words):
        columns = []
        for upper in (False, True):
            column = butterfly([half_of(word, upper) for word in words], STEPS[:-1])
            pairs = [quartered(column[i], column[i + 8]) for i in range(8)]
            columns.append([pair[0] for pair in pairs] + [pair[1] for pair in pairs])
        return [rounded_pair(*both) for both in zip(*columns, strict=True)]


class Unusual:
    """The same, of any group."""

    @staticmethod
    def scales(largest, encode, inverse):
        found = [block_scale(bf16_bits(bits), encode, inverse) for bits in (largest & Uint32(0xFFFF), largest >> 16)]
        return [one[0] for one in found], rounded_pair(found[0][1], found[1][1]), found[0][2] | found[1][2] << 8

    @staticmethod
    def values(word, encode, decode, drawn=None, half=None):
        return values(word, encode, decode, *_random(drawn), half=half)

    @staticmethod
    def codes(words, encodes, drawn):
        parts = [codes(*both, *_random(byte)) for *both, byte in zip(words, encodes, drawn, strict=True)]
        return permuted(*parts, 0x0400)

    @staticmethod
    def rotated(words):
        return nvfp4_scales.rotated(words)


def _random(drawn):
    return () if drawn is None else ((drawn, drawn), (0, 16))
