"""MXFP8 of pairs of BF16 values, both halves of a word at once: what the kernels that quantise on SM90 do.

Bit for bit what `mxfp8_scales` gives, for values of a block and that block's scale (tests/cpu/test_mxfp8_packed.py goes
through all BF16 values and scales).
"""

from cutlass import Uint32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from cute_kernels.hopper.fp8_scales import widen


def _asm(result, words, text: str, constraints: str, loc, ip):
    operands = [Uint32(word).ir_value(loc=loc, ip=ip) for word in words]
    return llvm.inline_asm(
        result, operands, f"{{ {text} }}", constraints, has_side_effects=False, is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
    )  # fmt: skip


def _both(half: int) -> str:
    """A word that holds a number of 16 bits twice."""
    return f"{half << 16 | half:#x}"


SCALES = f"""
    .reg .b32 x, far, k, nan;
    mov.b32 k, {_both(0x7F80)}; min.u16x2 x, $3, k;
    mov.b32 k, {_both(0x1F)}; add.u16x2 x, x, k;
    and.b32 x, x, {_both(0x7F80)};
    mov.b32 k, {_both(0x10000 - 0x400)}; add.s16x2 x, x, k;
    mov.b32 k, 0; max.s16x2 x, x, k;
    mov.b32 k, {_both(0x10000 - 0x7F7F)}; add.s16x2 far, $3, k;
    mov.b32 k, 0; max.s16x2 far, far, k;
    mov.b32 k, {_both(2)}; min.u16x2 far, far, k;
    mad.lo.u32 x, far, 0x380, x;
    mov.b32 k, {_both(0x7F80)}; min.u16x2 x, x, k;
    shr.u32 $2, x, 7;
    mov.b32 k, {_both(0x40)}; max.u16x2 $1, x, k;
    mov.b32 k, {_both(0x7F00)}; min.u16x2 x, x, k;
    sub.u32 x, k, x;
    mov.b32 k, {_both(0x40)}; max.u16x2 x, x, k;
    and.b32 nan, far, {_both(2)};
    mul.lo.u32 nan, nan, 0x3fe0;
    or.b32 $0, x, nan;"""
"""amax / 448 is 1.m / 1.75 · 2^(k - 8): its scale has the exponent k - 8, one more if 1.m is more than 1.75. `far` is 1
of infinity and 2 of NaN.
"""

LEAST = (127 - 6 + 4) << 7 | 0x40
"""Bits of 24 times E4M3's least normal number, in BF16: what to add, so that what is less is rounded to its steps."""

ROUNDED = f"""
    .reg .b32 y, c, s;
    mul.rn.bf16x2 y, $1, $2;
    and.b32 c, y, 0x7f807f80;
    add.u16x2 c, c, $4;
    mov.b32 s, {_both(LEAST)}; max.u16x2 c, c, s;
    add.rn.bf16x2 s, y, c;
    sub.rn.bf16x2 s, s, c;
    lop3.b32 s, y, 0x80008000, s, 0xEA;
    mul.rn.bf16x2 $0, s, $3;"""
"""A value y in [2^k, 2^k+1) is rounded to steps of 2^(k-3) by adding and taking away 24 · 2^k, whose last bit is that;
below 2^-6 by 24 · 2^-6. It never exceeds 448 but if it is infinite: then that number would be, too, but its bits, 2^k's
and a constant, are those of a negligible negative one. Zero's sign is put back.
"""

APART = 0x02400240
"""What makes the bits of 24 · 2^k of those of 2^k, twice."""


@dsl_user_op
def scale_pair(largest, *, loc=None, ip=None):
    """Of the bits of two largest magnitudes in BF16: what encodes and what decodes, words of two BF16 values, and the
    bytes of both scales as halves of a word.
    """
    found = _asm(llvm.StructType.get_literal([T.i32()] * 3), [largest], SCALES, "=&r,=&r,=&r,r", loc, ip)
    return [Uint32(llvm.extractvalue(T.i32(), found, [i], loc=loc, ip=ip)) for i in range(3)]


@dsl_user_op
def rounded_pair(word, encode, decode, apart, *, loc=None, ip=None):
    """Two BF16 values through E4M3. encode, decode: words of `scale_pair`. apart: `APART`, perhaps such that the
    compiler does not know it and keeps it in a register.
    """
    return Uint32(_asm(T.i32(), (word, encode, decode, apart), ROUNDED, "=r,r,r,r,r", loc, ip))


@dsl_user_op
def scaled_elements(words, encode, *, loc=None, ip=None):
    """Four BF16 values of two words as E4M3 bytes of one. encode: two words of `scale_pair`."""
    text = ".reg .b16 pair, first; .reg .b32 x0, x1, y;"
    for index in range(2):
        text += f"mul.rn.bf16x2 y, ${1 + index}, ${3 + index};"
        text += "".join(widen(f"x{i}", "y", i == 1, "bfloat16") for i in range(2))
        text += "cvt.rn.satfinite.e4m3x2.f32 pair, x1, x0;"
        text += "mov.b16 first, pair;" if index == 0 else "mov.b32 $0, {first, pair};"
    return Uint32(_asm(T.i32(), (*words, *encode), text, "=r,r,r,r,r", loc, ip))
