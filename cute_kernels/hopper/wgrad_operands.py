"""What the two weight-gradient kernels share: the tile, ragged operands, where results go.

Ragged loads: the summed dimension is tokens, so both operands must read zero past a group's end (0 x NaN is NaN).
Each is viewed with two extra dimensions whose strides cancel modulo 2^64 (`ragged`); a group then begins at a
coordinate such that its end is the end of the dimension, and the TMA unit fills in zeros. No descriptor is rewritten.
(Public idea: Triton's ragged TMA, QuACK.) Separate outputs are reached in a like way: one descriptor starts at the
lowest of them and has a dimension of 16-byte steps.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from cute_kernels.hopper.grouped_wgrad_configs import TILE_COLUMNS, TILE_ROWS, TILE_TOKENS

TILE_M, TILE_N, TILE_K = TILE_ROWS, TILE_COLUMNS, TILE_TOKENS
BOX = 64  # columns of x in one TMA box: a 128-byte swizzle atom
THREADS, WARPS = 384, 4  # of a CTA; of a warpgroup
TURN, TURN_THREADS = 1, 256  # barrier of the first warpgroup's turn, the second's follows
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 24, 240
VECTOR_BYTES = 16  # what a lane copies at once
FAR = 1 << 30  # extent of a ragged dimension; more than any row count
UNITS, FAR_UNITS = 1 << 30, 1 << 10  # of 16 bytes in two dimensions that reach separate outputs

TYPES = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16, "float32": cutlass.Float32}


@dsl_user_op
def anew(value: Int32, *, loc=None, ip=None):
    """`value`, of which the compiler does not know that it is the same: what follows from it is computed again here."""
    operand = Int32(value).ir_value(loc=loc, ip=ip)
    return Int32(
        llvm.inline_asm(
            T.i32(), [operand], "mov.b32 $0, $1;", "=r,r", has_side_effects=True, is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
        )
    )  # fmt: skip


@cute.jit
def ragged(x: cute.Tensor):
    """(tokens, F) -> (F, FAR, 2^31-1, 2^31-1): index (FAR - n + i, FAR, first + n) lands on token first + i, and i >=
    n is out of range. The strides of the last three dimensions cancel FAR modulo 2^64: FAR (s + (2^34 - s)) = 2^64
    elements.
    """
    stride = x.stride[0]
    shape = (x.shape[1], FAR, 2**31 - 1, 2**31 - 1)
    return cute.make_tensor(x.iterator, cute.make_layout(shape, stride=(1, stride, 2**34 - stride, stride)))


@cute.jit
def tokens_of(x: cute.Tensor, first, count):
    """The (F, tokens) view of a ragged tensor that starts at token `first` and reads zero from `count` on."""
    return cute.domain_offset((0, FAR - count), x[None, None, FAR, first + count])


class Target(NamedTuple):
    """Where results go.

    out: (stacked buffer,) or (lowest of separate ones, their addresses). atom, tensor: for TMA, or None.
    block: rows of an interleaved block.
    """

    out: Any
    atom: Any
    tensor: Any
    block: Any


class Product(NamedTuple):
    """A multiplication of one shape: WGMMA operation, operands by (k step, stage), and its part of the sums."""

    op: Any
    a: Any
    b: Any
    acc: Any
