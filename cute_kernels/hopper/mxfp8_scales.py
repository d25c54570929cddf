"""amax of a block of 32 -> its E8M0 scale, and FP32 -> E4M3 -> BF16: what every MXFP8 kernel on SM90 shares.

Equals `quantization.casts` (`cast_e8m0`, `e8m0_reciprocal`, `cast_fp8`) bit for bit: byte e = ⌈log2(amax / 448)⌉ + 127,
elements cast(x · 2^(127 - e)), saturating; 255 and NaN where a block holds NaN. A value is element · 2^(e - 127),
formed in FP32 and rounded once to BF16, where it is exact above BF16's subnormals: four bits of mantissa.

An amax is kept as the bits of |x|, as in `fp8_scales`.
"""

import cutlass
from cutlass import Float32, Int32, Uint32
from cutlass.cutlass_dsl import dsl_user_op, select_

from cute_kernels.hopper.asm import asm
from cute_kernels.hopper.fp8_scales import widen

BLOCK = 32
ONE_OVER_LARGEST = 1 / 448
TINY = 0x00400000  # bits of 2^-127: the scale of byte 0, and one over that of byte 254
NAN = 0x7FC00000
LARGEST = 254 << 23  # bits of 2^127: the scale of byte 254


@dsl_user_op
def product(first, second, *, loc=None, ip=None):
    """first · second in FP32, subnormal numbers too."""
    return asm(Float32, (Float32(first), Float32(second)), "mul.rn.f32 $0, $1, $2;", "=f,f,f", loc, ip)


def scale_byte(amax):
    """The E8M0 byte of a block whose amax has the FP32 bits `amax`."""
    bits = product(Int32(amax).bitcast(Float32), Float32(ONE_OVER_LARGEST)).bitcast(Int32)
    byte = (bits + 0x7FFFFF) >> 23  # a mantissa of more than 1 carries into the exponent
    byte = Int32(select_(bits <= TINY, Int32(0), byte))
    # Above 2^127, and infinity: the largest power of two. NaN alone has more.
    capped = Int32(select_(byte > 254, Int32(254), byte))
    return Int32(select_(bits > 0x7F800000, Int32(255), capped))


def encode_factor(byte):
    """2^(127 - byte), FP32; NaN for 255."""
    bits = Int32(select_(byte == 254, Int32(TINY), (254 - byte) << 23))
    return Int32(select_(byte == 255, Int32(NAN), bits)).bitcast(Float32)


def decode_factor(byte):
    """2^(byte - 127), FP32; what 255 gives multiplies NaN only."""
    return Int32(select_(byte == 0, Int32(TINY), byte << 23)).bitcast(Float32)


def factors(amax):
    """(`encode_factor`, `decode_factor`) of the scale of a block with the largest magnitude amax, FP32, as bits: the
    lower half of both is zero. What decodes is finite where amax is NaN.
    """
    bits = product(amax, Float32(ONE_OVER_LARGEST)).bitcast(Int32)
    power = cutlass.min((bits + 0x7FFFFF) & 0x7F800000, Int32(LARGEST))  # as in `scale_byte`
    power = Int32(select_(bits <= TINY, Int32(0), power))
    encode = cutlass.max(Int32(LARGEST) - power, Int32(TINY))
    return Int32(select_(bits > 0x7F800000, Int32(NAN), encode)), cutlass.max(power, Int32(TINY))


_QUANTISE = """
    mul.rn.f32 x0, x0, {encode[0]}; mul.rn.f32 x1, x1, {encode[1]};
    cvt.rn.satfinite.e4m3x2.f32 pair, x1, x0;"""
_RESTORE = """
    cvt.rn.f16x2.e4m3x2 word, pair;
    mov.b32 {{low, high}}, word;
    cvt.f32.f16 x0, low; cvt.f32.f16 x1, high;
    mul.rn.f32 x0, x0, {decode[0]}; mul.rn.f32 x1, x1, {decode[1]};
    cvt.rn.bf16x2.f32 $0, x1, x0;"""
_REGISTERS = ".reg .b16 pair, low, high, half, none; .reg .b32 x0, x1, word;"


@dsl_user_op
def restored(first, second, encode, decode, *, loc=None, ip=None):
    """Two FP32 values through E4M3 with one scale: a word of two BF16 values, the first lower."""
    steps = (_QUANTISE + _RESTORE).format(encode=("$3", "$3"), decode=("$4", "$4"))
    text = f"{{ {_REGISTERS} mov.b32 x0, $1; mov.b32 x1, $2; {steps} }}"
    return asm(Uint32, map(Float32, (first, second, encode, decode)), text, "=r,f,f,f,f", loc, ip)


@dsl_user_op
def restored_apart(first, second, encode, decode, *, loc=None, ip=None):
    """The same with a scale each: `encode` is a pair, `decode` a word of two BF16 values, which are multiplied as such:
    rounded once too.
    """
    operands = *map(Float32, (first, second, *encode)), Uint32(decode)
    text = f"""{{ {_REGISTERS} mov.b32 x0, $1; mov.b32 x1, $2; {_QUANTISE.format(encode=("$3", "$4"))}
        cvt.rn.f16x2.e4m3x2 word, pair;
        mov.b32 {{low, high}}, word;
        cvt.f32.f16 x0, low; cvt.f32.f16 x1, high;
        cvt.rn.bf16x2.f32 word, x1, x0;
        mul.rn.bf16x2 $0, word, $5; }}"""
    return asm(Uint32, operands, text, "=r,f,f,f,f,r", loc, ip)


@dsl_user_op
def elements(words, encode, *, loc=None, ip=None):
    """Four BF16 values of two words as E4M3 bytes of one, with a factor each."""
    text = f"{{ {_REGISTERS} .reg .b16 first;"
    for index in range(2):
        text += "".join(widen(f"x{i}", f"${1 + index}", i == 1, "bfloat16") for i in range(2))
        text += _QUANTISE.format(encode=(f"${3 + 2 * index}", f"${4 + 2 * index}"))
        text += "mov.b16 first, pair;" if index == 0 else "mov.b32 $0, {first, pair}; }"
    return asm(Uint32, (*map(Uint32, words), *map(Float32, encode)), text, "=r,r,r,f,f,f,f", loc, ip)


@dsl_user_op
def wide_values(pair, factor, *, loc=None, ip=None):
    """Two E4M3 bytes, the lower ones of a word, times a factor in FP32."""
    text = f"""{{ {_REGISTERS}
        mov.b32 {{pair, none}}, $2;
        cvt.rn.f16x2.e4m3x2 word, pair;
        mov.b32 {{low, high}}, word;
        cvt.f32.f16 x0, low; cvt.f32.f16 x1, high;
        mul.rn.f32 $0, x0, $3; mul.rn.f32 $1, x1, $3; }}"""
    return asm([Float32] * 2, (Uint32(pair), Float32(factor)), text, "=&f,=f,r,f", loc, ip)


@dsl_user_op
def values_of(word, upper: bool, decode, *, loc=None, ip=None):
    """The lower or upper two of four E4M3 bytes as a word of two BF16 values, with a scale each."""
    take = "mov.b32 {none, pair}, $1;" if upper else "mov.b32 {pair, none}, $1;"
    steps = _RESTORE.format(decode=("$2", "$3"))
    text = f"{{ {_REGISTERS} {take} {steps} }}"
    return asm(Uint32, (Uint32(word), *map(Float32, decode)), text, "=r,r,f,f", loc, ip)
