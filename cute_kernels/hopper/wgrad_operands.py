"""What weight-gradient kernels, and others that sum over tokens, share: the tile, ragged operands.

Ragged loads: the summed dimension is tokens, so both operands must read zero past a group's end (0 x NaN is NaN).
Each is viewed with two extra dimensions whose strides cancel modulo 2^64 (`ragged`); a group then begins at a
coordinate such that its end is the end of the dimension, and the TMA unit fills in zeros. No descriptor is rewritten.
(Public idea: Triton's ragged TMA, QuACK.)
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cutlass_dsl import dsl_user_op

from cute_kernels.hopper.asm import asm
from cute_kernels.hopper.grouped_wgrad_configs import TILE_COLUMNS, TILE_ROWS, TILE_TOKENS

TILE_M, TILE_N, TILE_K = TILE_ROWS, TILE_COLUMNS, TILE_TOKENS
BOX = 64  # columns of x in one TMA box: a 128-byte swizzle atom
THREADS, WARPS = 384, 4  # of a CTA; of a warpgroup
TURN, TURN_THREADS = 1, 256  # barrier of the first warpgroup's turn, the second's follows
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 24, 240
VECTOR_BYTES = 16  # what a lane copies at once
FAR = 1 << 30  # extent of a ragged dimension; more than any row count

TYPES = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16, "float32": cutlass.Float32}


@dsl_user_op
def anew(value: Int32, *, loc=None, ip=None):
    """`value`, of which the compiler does not know that it is the same: what follows from it is computed again here."""
    return asm(Int32, [Int32(value)], "mov.b32 $0, $1;", "=r,r", loc, ip, effects=True)


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
