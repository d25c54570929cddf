"""NVFP4 of words of two BF16 values on SM90 in few instructions, for groups whose largest magnitude is `usual`.

Bit for bit what `nvfp4_scales` gives (tests/cpu/test_nvfp4_packed.py), of blocks that fit: whose elements no clamp is
needed for, none of them NaN. Others are those that a scale of 2^-6 or less has, and those larger than their group is
said to be. They take `Unusual`, which is `nvfp4_scales` in the same form; so do groups that are not usual, where
factors or sums of a rotation leave FP32's normal numbers.

To nearest: with e = max(m, 1.5) · 2^22, m - e is rounded to a step, ties to even, since e is a multiple of two of them
at ties. (m² + 12.5 times a constant in its place spares the comparison, and is wrong for six FP32 numbers.) Factors
that encode are 2^-6 times what they are, those that decode 2^6 times: of q · 2^-6 in E4M3 the code is bits 2 to 4. Four
columns of a row are a word of such bytes, in the order 0, 2, 1, 3; signs in bit 5. A product with 2^14 + 2^2 puts four
codes side by side.

Stochastically: 2^-14 and 2^14. E2M1 then ends where FP16 does: a code, of 0 and 0.5 too, is what lies above bit 8 of an
FP16 value. m is cut to FP16, whose bits below the code are 1/512 step each, and a random byte is added to them as an
integer.
"""

from cutlass import Boolean, Float32, Uint32
from cutlass.cutlass_dsl import dsl_user_op, select_

from cute_kernels.hopper import nvfp4_scales
from cute_kernels.hopper.asm import asm
from cute_kernels.hopper.epilogues.eights import permuted
from cute_kernels.hopper.fp8_scales import bf16_bits, halves_of, widen
from cute_kernels.hopper.nvfp4_scales import block_scale, butterfly, codes, half_of, rounded_pair, values

USUAL = 2.0**-90, 2.0**90
"""Between which a usual group's 1 / S_enc is."""


def usual(inverse):
    """Whether a group with this 1 / S_enc is; not where it is NaN, or 1, as of an infinite magnitude."""
    inside = Boolean(inverse > Float32(USUAL[0])) & Boolean(inverse < Float32(USUAL[1]))
    return inside & Boolean(inverse != Float32(1.0))


_REGISTERS = ".reg .b32 x, m, e, t<4>;"
ENCODES, DECODES = {False: 2.0**6, True: 2.0**14}, {False: 0x42804280, True: 0x46804680}
"""By how much factors are too small, and decode too much: to nearest and drawn; the same twice in BF16."""
LEAST = "0f04800000"
"""2^-118: added to what is none, its reciprocal is finite; what is some has a last place of more than twice that."""
FITS = 6.96
"""What the elements of a block may be at most, as its scale is encoded, to be rounded without a clamp. 6.38 is possible
where the scale is a normal number of E4M3, and the group's largest magnitude is what it was said to be."""

SCALES = f"""
    .reg .b16 pair, low, high; .reg .b32 a, b, x, y, e, s0, s1, both; .reg .pred p;
    {widen("a", "$5", False, "bfloat16")} {widen("b", "$5", True, "bfloat16")}
    mul.rn.f32 x, a, $6; mul.rn.f32 y, b, $6;
    cvt.rn.satfinite.e4m3x2.f32 pair, y, x; cvt.u32.u16 $3, pair;
    cvt.rn.f16x2.e4m3x2 both, pair; mov.b32 {{low, high}}, both; cvt.f32.f16 s0, low; cvt.f32.f16 s1, high;
    cvt.rn.bf16x2.f32 e, s1, s0; mul.rn.bf16x2 $2, e, $8;
    mul.rn.f32 s0, s0, $7; mul.rn.f32 x, s0, $9; setp.le.f32 p, a, x;
    mul.rn.f32 s1, s1, $7; mul.rn.f32 x, s1, $9; setp.le.and.f32 p, b, x, p; selp.b32 $4, 1, 0, p;""" + "".join(
    f"""
    add.rn.f32 x, s{i}, {LEAST}; rcp.approx.ftz.f32 y, x; neg.f32 x, x;
    fma.rn.f32 e, x, y, 0f3F800000; fma.rn.f32 ${i}, y, e, y;"""
    for i in range(2)
)
"""The reciprocal is `rcp.rn` of numbers that are neither huge nor tiny: an approximation and one Newton step."""


def _magnitude(target: str, word: str, upper: bool, factor: str, step: str) -> str:
    """What `step` makes of m, a value of a word times a factor."""
    text = f"{widen('x', word, upper, 'bfloat16')} abs.f32 x, x; mul.rn.f32 m, x, {factor};"
    return f"\n    {text} {step.format(t=target)}"


_STEP = "max.f32 e, m, 0f3CC00000; fma.rn.f32 {t}, e, 0fCA800000, m; fma.rn.f32 {t}, e, 0f4A800000, {t};"
_PAIR = [("$1", False, "$2"), ("$1", True, "$3")]
_FOUR = [("$1", False, "$3"), ("$1", True, "$4"), ("$2", False, "$5"), ("$2", True, "$6")]
VALUES = f"""{_REGISTERS}{"".join(_magnitude(f"t{i}", *one, _STEP) for i, one in enumerate(_PAIR))}
    cvt.rn.bf16x2.f32 m, t1, t0; lop3.b32 m, m, 0x7FFF7FFF, $1, 0xE2; mul.rn.bf16x2 $0, m, $4;"""
CODES = f""".reg .b16 low, high; {_REGISTERS}{"".join(_magnitude(f"t{i}", *one, _STEP) for i, one in enumerate(_FOUR))}
    cvt.rn.satfinite.e4m3x2.f32 low, t2, t0; cvt.rn.satfinite.e4m3x2.f32 high, t3, t1; mov.b32 m, {{low, high}};
    prmt.b32 x, $1, $2, 0xFBD9; lop3.b32 m, x, 0x20202020, m, 0xEA; mul.lo.u32 $0, m, 0x4004;"""
DRAWN_HALVES = f"""{_REGISTERS}{"".join(_magnitude(f"t{i}", *one, "mov.b32 {t}, m;") for i, one in enumerate(_PAIR))}
    cvt.rz.f16x2.f32 m, t1, t0; shl.b32 e, $4, 1; add.u32 m, m, e; mov.b32 e, 0x0FFF0FFF; min.u16x2 $0, m, e;"""
DRAWN_VALUES = """.reg .b32 m, x;
    shr.u32 m, $1, 3; and.b32 m, m, 0x01C001C0; mov.b32 x, 0x77807780; mul.rn.bf16x2 m, m, x;
    lop3.b32 m, m, 0x7FFF7FFF, $2, 0xE2; mul.rn.bf16x2 $0, m, $3;"""
DRAWN_CODES = """.reg .b32 x, y;
    prmt.b32 x, $1, $2, 0x7351; and.b32 x, x, 0x0E0E0E0E; prmt.b32 y, $3, $4, 0xFBD9;
    lop3.b32 x, y, 0x10101010, x, 0xEA; mul.lo.u32 $0, x, 0x8008;"""


@dsl_user_op
def scales(largest, encode, inverse, drawn: bool, *, loc=None, ip=None):
    """`Usual.scales`."""
    operands = (
        Uint32(largest),
        Float32(encode),
        Float32(inverse),
        Uint32(DECODES[drawn]),
        Float32(FITS / ENCODES[drawn]),
    )
    kinds, constraints = [Float32] * 2 + [Uint32] * 3, "=&f,=&f,=&r,=&r,=&r,r,f,f,r,f"
    *factors, decode, byte, fits = asm(kinds, operands, f"{{ {SCALES} }}", constraints, loc, ip)
    return factors, decode, byte, Boolean(fits != 0)


@dsl_user_op
def asked(text: str, words, encode=(), last=(), *, loc=None, ip=None):
    """The word that some instructions make of words, two factors, and more words."""
    operands = [*map(Uint32, words), *map(Float32, encode), *map(Uint32, last)]
    constraints = ["=r", *"r" * len(words), *"f" * len(encode), *"r" * len(last)]
    return asm(Uint32, operands, f"{{ {text} }}", ",".join(constraints), loc, ip)


class Usual:
    """What is done with words of two BF16 values, of a `usual` group.

    scales: of a word of two largest magnitudes (the factors that encode, FP32; those that decode, a word of BF16; the
    E4M3 bytes of S; whether the others may be asked about values of these blocks: else `Unusual` is). encode, inverse:
    of `nvfp4_scales.tensor_factors`. turned: of what `rotated` gives.
    values: q·S. encode: a pair of factors; decode: of both, or with the one of both in its half 0 or 1. drawn: None, or
    two random bytes, in bits 0 and 16.
    codes: of the four columns of two words, in the upper half of one. scales: bytes of these columns.
    rotated: `nvfp4_scales.rotated`, but four times that: the largest magnitudes and factors are of such values.
    """

    @staticmethod
    def scales(largest, encode, inverse, turned: bool, drawn: bool):
        times = 4.0 if turned else 1.0
        return scales(largest, encode * Float32(1 / times), inverse * Float32(ENCODES[drawn] * times), drawn)

    @staticmethod
    def values(word, encode, decode, drawn=None, half=None):
        if half is not None:
            decode = halves_of(decode, decode, half == 1)
        if drawn is None:
            return asked(VALUES, [word], encode, [decode])
        return asked(DRAWN_VALUES, [asked(DRAWN_HALVES, [word], encode, [drawn]), word, decode])

    @staticmethod
    def codes(words, encodes, drawn, scales):
        if drawn[0] is None:
            return asked(CODES, words, [one for both in encodes for one in both])
        halves = [
            asked(DRAWN_HALVES, [word], encode, [byte])
            for word, encode, byte in zip(words, encodes, drawn, strict=True)
        ]
        return asked(DRAWN_CODES, [*halves, *words])

    @staticmethod
    def rotated(words):
        columns = [butterfly([half_of(word, upper) for word in words]) for upper in (False, True)]
        return [rounded_pair(*both) for both in zip(*columns, strict=True)]


class Unusual:
    """The same, of any values. codes: scales are bytes of E4M3, of which NaN's column has codes without signs."""

    @staticmethod
    def scales(largest, encode, inverse, turned: bool, drawn: bool):
        found = [block_scale(bf16_bits(bits), encode, inverse) for bits in (largest & Uint32(0xFFFF), largest >> 16)]
        factors, decode = [one[0] for one in found], rounded_pair(found[0][1], found[1][1])
        return factors, decode, found[0][2] | found[1][2] << 8, Boolean(True)

    @staticmethod
    def values(word, encode, decode, drawn=None, half=None):
        return values(word, encode, decode, *_random(drawn), half=half)

    @staticmethod
    def codes(words, encodes, drawn, scales):
        signed = Uint32(0)
        for i, place in enumerate((0, 2, 1, 3)):
            is_nan = scales & Uint32(0xFF << 8 * i) == Uint32(0x7F << 8 * i)
            signed = signed | Uint32(select_(is_nan, Uint32(0), Uint32(8 << 8 * place)))
        parts = [codes(*both, *_random(byte)) for *both, byte in zip(words, encodes, drawn, strict=True)]
        signs = (permuted(*words, 0xFBD9) & signed) * Uint32(0x10010)
        return permuted(*parts, 0x4000) & Uint32(0x77770000) | signs

    @staticmethod
    def rotated(words):
        return nvfp4_scales.rotated(words)


def _random(drawn):
    return () if drawn is None else ((drawn, drawn), (0, 16))
