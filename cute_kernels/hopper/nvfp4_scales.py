"""NVFP4 of values in registers on SM90: scales in two levels, E2M1, the rotation, counter-based random bits.

Equals `quantization.nvfp4_scales`, `casts.cast_e2m1`, `hadamard.rotate` and `random_bits.philox` bit for bit. Hopper
converts no E2M1: adding a magic number whose last place is a step (0.5 below 2, 1 below 4, 2 above) rounds a magnitude
to steps, ties to even; stochastically, the last place is 1/256 step, what lies below is cut off, and a random byte is
added to it as an integer. A value is q·S, exact in BF16: so what is larger than 6 becomes 6 two at a time, in BF16.

An amax is kept as the bits of |x|, as in `fp8_scales`.
"""

import struct

from cutlass import Boolean, Float32, Int32, Int64, Uint32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op, select_

from cute_kernels.hopper.fp8_scales import widen
from cute_kernels.quantization.hadamard import SIGNS
from cute_kernels.quantization.nvfp4_scales import LARGEST
from cute_kernels.quantization.random_bits import MULTIPLIERS, ROUNDS, WEYL

QUARTER = 0.25
"""What makes the rotation orthogonal."""
_FLOAT_MAX = "0f7F7FFFFF"
_REGISTERS = """
    .reg .b16 low, high; .reg .b32 x, m, e, byte, signs, t<2>;"""
_MAGIC = """
    and.b32 e, m, 0x40800000; fma.rn.f32 e, e, {slope}, {start};"""
"""Two bits of a magnitude's exponent alone are 4 from 4 on, 2 from 2 on, and next to nothing below."""
_OFFSETS = -1, 12
"""What is added to slope and start makes the steps in magic numbers, modulo 8, what the code is more: 0, 2 and 4."""
_SIX = 0x40C040C0
_E4M3 = """{ .reg .b16 low, high; .reg .b32 both;
        cvt.rn.f16x2.e4m3x2 both, pair; mov.b32 {low, high}, both; cvt.f32.f16 $1, low; }"""


def _asm(result, operands, text: str, constraints: str, loc, ip):
    return llvm.inline_asm(
        result, operands, text, constraints, has_side_effects=False, is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
    )  # fmt: skip


def _words(found, count: int, loc, ip):
    return [Uint32(llvm.extractvalue(T.i32(), found, [i], loc=loc, ip=ip)) for i in range(count)]


def _kind(count: int):
    return llvm.StructType.get_literal([T.i32()] * count)


# ----------------------------------------------------------------------------------------------------------------------
# Scales


def tensor_factors(amax):
    """(S_enc · (1/6), 1 / S_enc) of the largest magnitude of a group, FP32."""
    encode = Float32(LARGEST) / amax
    bits = encode.bitcast(Int32)
    capped = Int32(select_(bits == 0x7F800000, Int32(0x7F7FFFFF), bits)).bitcast(Float32)
    encode = Float32(select_(Boolean(amax == 0.0) | (bits == 0), Float32(1.0), capped))
    return encode * Float32(1 / 6), Float32(1.0) / encode


@dsl_user_op
def block_scale(amax, encode, inverse, *, loc=None, ip=None):
    """(what values are multiplied by, S, both FP32, the E4M3 byte of S) of a block whose amax has these FP32 bits.
    encode, inverse: of `tensor_factors`.

    The reciprocal is `rcp.rn` without its branches: an approximation and one Newton step, of what is below 2^126 and
    kept above 2^-126.
    """
    operands = [Int32(amax).ir_value(loc=loc, ip=ip)]
    operands += [Float32(value).ir_value(loc=loc, ip=ip) for value in (encode, inverse)]
    text = f"""{{ .reg .b16 pair; .reg .b32 x, y, e, up; .reg .pred p;
        mul.rn.f32 x, $3, $4; min.NaN.f32 x, x, {_FLOAT_MAX};
        cvt.rn.satfinite.e4m3x2.f32 pair, 0f00000000, x; cvt.u32.u16 $2, pair; {_E4M3}
        mul.rn.f32 x, $1, $5; setp.lt.f32 p, x, 0f20000000; selp.b32 up, 0x5F800000, 0x3F800000, p;
        mul.rn.f32 x, x, up; rcp.approx.ftz.f32 y, x; neg.f32 x, x; fma.rn.f32 e, x, y, 0f3F800000;
        fma.rn.f32 y, y, e, y; mul.rn.f32 y, y, up; min.NaN.f32 y, y, {_FLOAT_MAX};
        setp.eq.f32 p, $1, 0f00000000; selp.b32 $0, 0x7F7FFFFF, y, p; }}"""
    found = _asm(_kind(3), operands, text, "=&r,=&r,=&r,r,f,f", loc, ip)
    factor, scale, byte = _words(found, 3, loc, ip)
    return factor.bitcast(Float32), scale.bitcast(Float32), byte


@dsl_user_op
def scale_of(word, index: int, *, loc=None, ip=None):
    """Byte `index` of a word, an E4M3 scale, as FP32."""
    text = f"""{{ .reg .b16 pair; .reg .b32 byte;
        bfe.u32 byte, $1, {8 * index}, 8; cvt.u16.u32 pair, byte; {_E4M3.replace("$1", "$0")} }}"""
    return Float32(_asm(T.f32(), [Uint32(word).ir_value(loc=loc, ip=ip)], text, "=f,r", loc, ip))


# ----------------------------------------------------------------------------------------------------------------------
# Values


def _pair(word, encode, random, shifts, step: str, rest: str, more, loc, ip):
    """What is made of both BF16 values of a word: `step` says how t<i> is made of its magnitude m and a random byte
    (<drawn>), with a magic number e, and `rest` what is made of t0 and t1.
    """
    operands = [Uint32(word).ir_value(loc=loc, ip=ip)]
    operands += [Float32(x).ir_value(loc=loc, ip=ip) for x in encode]
    operands += [Uint32(x).ir_value(loc=loc, ip=ip) for x in (*more, *(random or ()))]
    place = 22 if random is None else 14
    slope, start = (_hex(base + offset) for base, offset in zip((2**place, 1.5 * 2**place), _OFFSETS, strict=True))
    magic = _MAGIC.format(slope=slope, start=start)
    text = f"{{ {_REGISTERS}"
    for i in range(2):
        text += widen("x", "$1", i == 1, "bfloat16") + f"abs.f32 x, x; mul.rn.f32 m, x, ${2 + i};"
        text += step.format(magic=magic, t=f"t{i}", to=f"add.{'rn' if random is None else 'rz'}.f32 t{i}, m, e;")
        if random is not None:
            byte = f"shl.b32 byte, ${4 + len(more) + i}, {24 - shifts[i]}; shr.u32 byte, byte, 24;"
            text = text.replace("<drawn>", f"{byte} add.s32 t{i}, t{i}, byte;")
        text = text.replace("<drawn>", "")
    constraints = "=r,r,f,f" + ",r" * (len(operands) - 3)
    return Uint32(_asm(T.i32(), operands, f"{text} {rest} }}", constraints, loc, ip))


def _hex(value: float) -> str:
    return "0f" + struct.pack(">f", value).hex()


@dsl_user_op
def values(word, encode, decode, random=None, shifts=(0, 0), half=None, *, loc=None, ip=None):
    """q·S of two BF16 values, as a word of two. encode: a pair of factors; decode: a word of both S in BF16, or with
    the one of both in its half 0 or 1. random: a pair of words, of which the bytes from bits `shifts` on are used, or
    None.
    """
    whole = "" if random is None else "and.b32 {t}, {t}, 0xFFFFFF00;"
    step = "{magic} {to} <drawn>" + whole + "sub.rn.f32 {t}, {t}, e;"
    rest = f"""cvt.rn.bf16x2.f32 m, t1, t0; mov.b32 e, {_SIX:#x}; min.bf16x2 m, m, e;
        and.b32 signs, $1, 0x80008000; or.b32 m, m, signs;"""
    scale = "mov.b32 e, $4;"
    if half is not None:
        scale = f"mov.b32 {{low, high}}, $4; mov.b32 e, {'{low, low}' if half == 0 else '{high, high}'};"
    rest += f"{scale} mul.rn.bf16x2 $0, m, e;"
    return _pair(word, encode, random, shifts, step, rest, [decode], loc, ip)


@dsl_user_op
def codes(word, encode, random=None, shifts=(0, 0), *, loc=None, ip=None):
    """The codes of two BF16 values but for their signs, in bits 0 to 2 and 4 to 6; bits 3 and 7.. hold anything."""
    step = "min.f32 m, m, 0f40C00000; {magic} {to} <drawn>"
    how = "shl.b32 t1, t1, 4;" if random is None else "shr.u32 t0, t0, 8; shr.u32 t1, t1, 4;"
    rest = f"{how} and.b32 t0, t0, 7; and.b32 t1, t1, -8; or.b32 $0, t0, t1;"
    return _pair(word, encode, random, shifts, step, rest, [], loc, ip)


@dsl_user_op
def values_of(word, scales, *, loc=None, ip=None):
    """q·S of the eight codes of a word, as four words of two BF16 values. scales: four words of both S in BF16."""
    operands = [Uint32(x).ir_value(loc=loc, ip=ip) for x in (word, *scales)]
    text = "{ .reg .b32 even, code, high, low, sign, value; shl.b32 even, $4, 4; and.b32 code, $4, 0x77777777;"
    for half in range(2):  # bytes of E2M1's values in BF16
        text += "" if half == 0 else "shr.u32 code, code, 16;"
        text += "prmt.b32 high, 0x3F3F3F00, 0x40404040, code; prmt.b32 low, 0xC0800000, 0xC0804000, code;"
        for i in range(2):
            at = 2 * half + i
            text += f"""prmt.b32 value, low, high, {0x5140 if i == 0 else 0x7362};
                prmt.b32 sign, even, $4, {0x4000 + 0x1010 * at:#x};
                and.b32 sign, sign, 0x80008000; or.b32 value, value, sign; mul.rn.bf16x2 ${at}, value, ${5 + at};"""
    found = _asm(_kind(4), operands, text + "}", "=&r,=&r,=&r,=&r" + ",r" * 5, loc, ip)
    return _words(found, 4, loc, ip)


# ----------------------------------------------------------------------------------------------------------------------
# The rotation


@dsl_user_op
def larger_halves(first, second, *, loc=None, ip=None):
    """The larger magnitudes of two words of two BF16 values, NaN if one is; of some sign."""
    operands = [Uint32(word).ir_value(loc=loc, ip=ip) for word in (first, second)]
    return Uint32(_asm(T.i32(), operands, "max.NaN.xorsign.abs.bf16x2 $0, $1, $2;", "=r,r,r", loc, ip))


@dsl_user_op
def half_of(word, upper: bool, *, loc=None, ip=None):
    """One of the two BF16 values of a word, in FP32."""
    text = widen("$0", "$1", upper, "bfloat16")
    return Float32(_asm(T.f32(), [Uint32(word).ir_value(loc=loc, ip=ip)], text, "=f,r", loc, ip))


@dsl_user_op
def rounded_pair(first, second, *, loc=None, ip=None):
    """Two FP32 values as a word of two BF16 values."""
    operands = [Float32(value).ir_value(loc=loc, ip=ip) for value in (first, second)]
    return Uint32(_asm(T.i32(), operands, "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", loc, ip))


def butterfly(column):
    """16 FP32 values of a column, rotated but for the factor of a quarter."""
    column = [value if sign > 0 else -value for value, sign in zip(column, SIGNS, strict=True)]
    for distance in (1, 2, 4, 8):
        result = list(column)
        for i in range(16):
            if not i & distance:
                result[i] = column[i] + column[i + distance]
                result[i + distance] = column[i] - column[i + distance]
        column = result
    return column


def rotated(words):
    """16 values of two columns, a word of two BF16 a row, rotated down the rows."""
    columns = []
    for upper in (False, True):
        column = butterfly([half_of(word, upper) for word in words])
        columns.append([value * Float32(QUARTER) for value in column])
    return [rounded_pair(*both) for both in zip(*columns, strict=True)]


# ----------------------------------------------------------------------------------------------------------------------
# Random bits


@dsl_user_op
def random_words(blocks, stream: int, state, *, loc=None, ip=None):
    """The sixteen random bytes of each of some blocks, four words. state: (seed, offset), int64."""
    operands = [Int64(value).ir_value(loc=loc, ip=ip) for value in (*state, *blocks)]
    count = len(blocks)
    steps = f"""{{ .reg .b32 c<{4 * count}>, k<2>, h<2>, l<2>; .reg .b64 product;
        mov.b64 {{k0, k1}}, ${4 * count};"""
    for block in range(count):
        c = [f"c{4 * block + i}" for i in range(4)]
        steps += f"mov.b64 {{{c[0]}, {c[1]}}}, ${4 * count + 2 + block}; mov.b64 {{{c[2]}, {c[3]}}}, ${4 * count + 1};"
        if stream:
            steps += f"add.u32 {c[1]}, {c[1]}, 0x80000000;"
    for turn in range(ROUNDS):
        for block in range(count):
            c = [f"c{4 * block + i}" for i in range(4)]
            for i in range(2):
                steps += f"mul.wide.u32 product, {c[2 * i]}, {MULTIPLIERS[i]:#x}; mov.b64 {{l{i}, h{i}}}, product;"
            steps += f"xor.b32 {c[0]}, h1, {c[1]}; xor.b32 {c[0]}, {c[0]}, k0; mov.b32 {c[1]}, l1;"
            steps += f"xor.b32 {c[2]}, h0, {c[3]}; xor.b32 {c[2]}, {c[2]}, k1; mov.b32 {c[3]}, l0;"
        if turn < ROUNDS - 1:
            steps += "".join(f"add.u32 k{i}, k{i}, {WEYL[i]:#x};" for i in range(2))
    steps += "".join(f"mov.b32 ${i}, c{i};" for i in range(4 * count)) + "}"
    found = _asm(_kind(4 * count), operands, steps, "=&r," * 4 * count + "l" + ",l" * (1 + count), loc, ip)
    words = _words(found, 4 * count, loc, ip)
    return [words[i : i + 4] for i in range(0, 4 * count, 4)]
