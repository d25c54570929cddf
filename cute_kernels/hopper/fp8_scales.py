"""amax of a block -> its scales, and FP32 -> E4M3: what every quantising kernel on SM90 shares. No kernel by itself.

Equals `quantization.quantize.fp32_scale` and `quantization.casts.cast_fp8`, bit for bit: factor = 448 / amax (IEEE
division), 1 where amax is 0, Inf or NaN, the largest finite value of the source where it overflows; a power of two has
its mantissa cleared. The stored scale is 1 / factor; elements are cast(x · factor), saturating, NaN to 0x7F.

An amax is kept as the bits of |x|: as integers they order like the values, and NaN is the largest, so a maximum of
integers keeps NaN where a maximum of floats would drop it.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr
from cutlass.cutlass_dsl import dsl_user_op, select_

from cute_kernels.hopper.asm import asm

BLOCK = 128
E4M3_MAX = 448.0
INFINITY = 0x7F800000
MAGNITUDES = 0x7FFF7FFF  # of two 16-bit values
ABOVE = 0x7FFFFF - 0x600000  # what carries a mantissa of more than 1.75 = 448 / 256 into the exponent
LARGEST = {"bfloat16": 0x7F7F0000, "float16": 0x477FE000, "float32": 0x7F7FFFFF}  # finite, as FP32 bits
LEAST_SCALE = 0x00400000  # 2^-127, one over the largest power of two


@cute.jit
def scales(amax: Int32, power_of_two: cutlass.Constexpr, source: cutlass.Constexpr):
    """(factor to multiply with, scale to store), FP32, of a block whose amax has the FP32 bits `amax`.

    source: dtype, by name, that the block's values have.
    """
    bits = Int32(amax)
    plain = (bits == 0) | (bits >= INFINITY)
    if const_expr(power_of_two):
        # 448 / (m 2^e) is 1.75 / m · 2^(8 - e): a power of two less if m > 1.75.
        exponent = cutlass.min(262 - ((bits + ABOVE) >> 23), Int32(254))
        exponent = Int32(select_(plain, Int32(127), exponent))
        stored = Int32(select_(exponent == 254, Int32(LEAST_SCALE), (254 - exponent) << 23))
        return (exponent << 23).bitcast(Float32), stored.bitcast(Float32)
    else:
        quotient = (Float32(E4M3_MAX) / bits.bitcast(Float32)).bitcast(Int32)
        quotient = Int32(select_(quotient == INFINITY, Int32(LARGEST[source]), quotient))
        factor = Float32(select_(plain, Float32(1.0), quotient.bitcast(Float32)))
        return factor, Float32(1.0) / factor


@dsl_user_op
def pack4(first, second, third, fourth, *, loc=None, ip=None):
    """Four FP32 values as E4M3 bytes of one word, the first lowest."""
    text = """{
        .reg .b16 low, high;
        cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
        cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
        mov.b32 $0, {low, high};
    }"""
    return asm(Uint32, map(Float32, (first, second, third, fourth)), text, "=r,f,f,f,f", loc, ip)


def widen(target: str, word: str, upper: bool, source: str) -> str:
    """PTX: an FP32 register from half of a word."""
    if source == "bfloat16":
        return f"and.b32 {target}, {word}, 0xffff0000;" if upper else f"shl.b32 {target}, {word}, 16;"
    pair = "{none, half}" if upper else "{half, none}"
    return f"mov.b32 {pair}, {word}; cvt.f32.f16 {target}, half;"


@dsl_user_op
def pack_scaled(words, uppers, factor, source: str, *, loc=None, ip=None):
    """Four 16-bit values times a factor as E4M3 bytes of one word: of each of four words the upper or the lower half.

    In one piece: a compiler that sees the widened values of a tile keeps them, in twice the registers.
    """
    steps = "\n".join(f"{widen(f'x{i}', f'${i + 1}', uppers[i], source)} mul.f32 x{i}, x{i}, $5;" for i in range(4))
    text = f"""{{
        .reg .b16 low, high, half, none;
        .reg .b32 x0, x1, x2, x3;
        {steps}
        cvt.rn.satfinite.e4m3x2.f32 low, x1, x0;
        cvt.rn.satfinite.e4m3x2.f32 high, x3, x2;
        mov.b32 $0, {{low, high}};
    }}"""
    return asm(Uint32, (*map(Uint32, words), Float32(factor)), text, "=r,r,r,r,r,f", loc, ip)


@dsl_user_op
def add_half(total, word, upper: bool, source: str, *, loc=None, ip=None):
    """total + the upper (or lower) 16-bit value of a word, in FP32."""
    text = f"""{{
        .reg .b16 half, none;
        .reg .b32 x;
        {widen("x", "$2", upper, source)}
        add.f32 $0, $1, x;
    }}"""
    return asm(Float32, (Float32(total), Uint32(word)), text, "=f,f,r", loc, ip)


@dsl_user_op
def max_halves(first, second, *, loc=None, ip=None):
    """The larger of the two upper, and of the two lower 16-bit integers of two words."""
    return asm(Uint32, (Uint32(first), Uint32(second)), "max.u16x2 $0, $1, $2;", "=r,r,r", loc, ip)


@dsl_user_op
def halves_of(first, second, upper: bool, *, loc=None, ip=None):
    """The upper (or lower) 16 bits of two words as one word, those of the first below."""
    text = f"prmt.b32 $0, $1, $2, {0x7632 if upper else 0x5410};"
    return asm(Uint32, (Uint32(first), Uint32(second)), text, "=r,r,r", loc, ip)


FOURS = 0x1C1F
"""Of a shuffle, mask and clamp: lanes are counted within four neighbours."""


def exchanged(word, distance: int):
    """The word of the lane whose number differs in the bit `distance`."""
    return Uint32(cute.arch.shuffle_sync_bfly(word, offset=distance))


def bf16_bits(half):
    """The FP32 bits of a BF16 magnitude in the lower half of a word."""
    return Int32(half << 16)
