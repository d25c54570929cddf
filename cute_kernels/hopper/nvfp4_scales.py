"""NVFP4 of values in registers on SM90: scales in two levels, E2M1, the rotation, counter-based random bits.

Equals `quantization.nvfp4_scales`, `casts.cast_e2m1`, `hadamard.rotate` and `random_bits.philox` bit for bit. Hopper
converts no E2M1: adding and taking away 1.5·2^23 steps rounds a magnitude to steps (0.5 below 2, 1 below 4, 2 above),
ties to even; stochastically, 1/256 steps and a random byte are added as integers. A value is q·S, exact in BF16.

An amax is kept as the bits of |x|, as in `fp8_scales`.
"""

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
    .reg .b16 pair, none, half; .reg .b32 x0, x1, m, e, t, byte, word, code;"""
_QUANTISE = """
    mul.rn.f32 {x}, {x}, {encode}; abs.f32 m, {x}; min.f32 m, m, 0f40C00000;
    max.f32 e, m, 0f3F800000; and.b32 e, e, 0x7F800000;"""
_NEAREST = "add.s32 e, e, 0x0B400000; add.rn.f32 m, m, e; sub.rn.f32 m, m, e;"
_STOCHASTIC = """
    sub.s32 t, 0x83800000, e; mul.rn.f32 m, m, t; cvt.rzi.s32.f32 t, m; bfe.u32 byte, {random}, {shift}, 8;
    add.s32 t, t, byte; shr.u32 t, t, 8; cvt.rn.f32.s32 m, t; sub.s32 e, e, 0x00800000; mul.rn.f32 m, m, e;"""


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
    """
    operands = [Int32(amax).ir_value(loc=loc, ip=ip)]
    operands += [Float32(value).ir_value(loc=loc, ip=ip) for value in (encode, inverse)]
    text = f"""{{ .reg .b16 pair, low, high; .reg .b32 x, word;
        mul.rn.f32 x, $3, $4; min.NaN.f32 x, x, {_FLOAT_MAX};
        cvt.rn.satfinite.e4m3x2.f32 pair, 0f00000000, x; cvt.u32.u16 $2, pair;
        cvt.rn.f16x2.e4m3x2 word, pair; mov.b32 {{low, high}}, word; cvt.f32.f16 x, low; mov.b32 $1, x;
        mul.rn.f32 x, x, $5; rcp.rn.f32 x, x; min.NaN.f32 $0, x, {_FLOAT_MAX}; }}"""
    found = _asm(_kind(3), operands, text, "=&r,=&r,=&r,r,f,f", loc, ip)
    factor, scale, byte = _words(found, 3, loc, ip)
    return factor.bitcast(Float32), scale.bitcast(Float32), byte


@dsl_user_op
def scale_of(word, index: int, *, loc=None, ip=None):
    """Byte `index` of a word, an E4M3 scale, as FP32."""
    text = f"""{{ .reg .b16 pair, low, high; .reg .b32 byte, both;
        bfe.u32 byte, $1, {8 * index}, 8; cvt.u16.u32 pair, byte; cvt.rn.f16x2.e4m3x2 both, pair;
        mov.b32 {{low, high}}, both; cvt.f32.f16 $0, low; }}"""
    return Float32(_asm(T.f32(), [Uint32(word).ir_value(loc=loc, ip=ip)], text, "=f,r", loc, ip))


# ----------------------------------------------------------------------------------------------------------------------
# Values


def _pair(word, factors, random, shifts, finish: str, end: str, loc, ip):
    """Both halves of a word of two BF16 values through E2M1; `finish` says what becomes of each."""
    operands = [Uint32(word).ir_value(loc=loc, ip=ip)]
    operands += [Float32(x).ir_value(loc=loc, ip=ip) for x in factors]
    operands += [Uint32(x).ir_value(loc=loc, ip=ip) for x in random or ()]
    text = f"{{ {_REGISTERS}"
    text += "".join(widen(f"x{i}", "$1", i == 1, "bfloat16") for i in range(2))
    for i in range(2):
        text += _QUANTISE.format(x=f"x{i}", encode=f"${2 + i}")
        if random is None:
            text += _NEAREST
        else:
            text += _STOCHASTIC.format(random=f"${2 + len(factors) + i}", shift=shifts[i])
        text += finish.format(x=f"x{i}", decode=f"${4 + i}", first=8 * i // 2)
    constraints = "=r,r" + ",f" * len(factors) + ",r" * len(random or ())
    return Uint32(_asm(T.i32(), operands, f"{text} {end} }}", constraints, loc, ip))


@dsl_user_op
def values(word, encode, decode, random=None, shifts=(0, 0), *, loc=None, ip=None):
    """q·S of two BF16 values, as a word of two. encode, decode: pairs of factors. random: a pair of words, of which the
    bytes from bits `shifts` on are used, or None.
    """
    finish = "copysign.f32 m, {x}, m; mul.rn.f32 {x}, m, {decode};"
    return _pair(word, (*encode, *decode), random, shifts, finish, "cvt.rn.bf16x2.f32 $0, x1, x0;", loc, ip)


@dsl_user_op
def codes(word, encode, random=None, shifts=(0, 0), *, loc=None, ip=None):
    """The codes of two BF16 values in 8 bits, the first in the lower four."""
    finish = """
        mul.rn.f32 m, m, 0f00800000; shr.u32 m, m, 22; shr.u32 {x}, {x}, 31; shl.b32 {x}, {x}, 3;
        or.b32 {x}, {x}, m; shl.b32 {x}, {x}, {first};"""
    return _pair(word, encode, random, shifts, finish, "or.b32 $0, x0, x1;", loc, ip)


@dsl_user_op
def values_of(word, index: int, decode, *, loc=None, ip=None):
    """q·S of codes 2 index and 2 index + 1 of the eight of a word, as a word of two BF16 values. decode: both S."""
    operands = [Uint32(word).ir_value(loc=loc, ip=ip), *(Float32(x).ir_value(loc=loc, ip=ip) for x in decode)]
    text = f"{{ {_REGISTERS}"
    for i in range(2):
        at = 8 * index + 4 * i
        text += f"""bfe.u32 m, $1, {at}, 3; shl.b32 m, m, 22; mul.rn.f32 m, m, 0f7E800000;
            bfe.u32 code, $1, {at + 3}, 1; shl.b32 code, code, 31; or.b32 m, m, code;
            mul.rn.f32 x{i}, m, ${2 + i};"""
    return Uint32(_asm(T.i32(), operands, f"{text} cvt.rn.bf16x2.f32 $0, x1, x0; }}", "=r,r,f,f", loc, ip))


# ----------------------------------------------------------------------------------------------------------------------
# The rotation


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
def random_words(block, stream: int, state, *, loc=None, ip=None):
    """The sixteen random bytes of a block, four words. state: (seed, offset), int64."""
    operands = [Int64(value).ir_value(loc=loc, ip=ip) for value in (block, *state)]
    steps = """{ .reg .b32 c<4>, k<2>, h<2>, l<2>;
        mov.b64 {c0, c1}, $4; mov.b64 {k0, k1}, $5; mov.b64 {c2, c3}, $6;"""
    if stream:
        steps += "add.u32 c1, c1, 0x80000000;"
    for turn in range(ROUNDS):
        for i in range(2):
            steps += f"mul.hi.u32 h{i}, c{2 * i}, {MULTIPLIERS[i]:#x}; mul.lo.u32 l{i}, c{2 * i}, {MULTIPLIERS[i]:#x};"
        steps += "xor.b32 c0, h1, c1; xor.b32 c0, c0, k0; xor.b32 c2, h0, c3; xor.b32 c2, c2, k1;"
        steps += "mov.b32 c1, l1; mov.b32 c3, l0;"
        if turn < ROUNDS - 1:
            steps += "".join(f"add.u32 k{i}, k{i}, {WEYL[i]:#x};" for i in range(2))
    steps += "".join(f"mov.b32 ${i}, c{i};" for i in range(4)) + "}"
    return _words(_asm(_kind(4), operands, steps, "=&r,=&r,=&r,=&r,l,l,l", loc, ip), 4, loc, ip)
