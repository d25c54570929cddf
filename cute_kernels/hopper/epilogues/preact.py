"""How the columns of a pre-activation lie, and where in a thread's registers the inputs of the function are then.

    block 0                 [x], or [gate | up] of a gated function
    block 1                 gate, up, gate, up, ...
    block b of 8, 16, 32    b columns of gate, the b of up that belong to them, b of gate, ...

The last two are orders of a weight stored [K, N], whose columns no box of TMA can take apart: the product's columns,
the pre-activation and its gradient keep the weight's order, so that products with that weight need to know nothing of
it.

Of 32 columns of the function (16 values a thread in two rows, see `epilogue`) the inputs are two pieces of 32 columns:
of gate and of up, or 64 stored columns beside each other. A thread holds columns 2t, 2t + 1 (t of 4) of every 8. Blocks
of 8 and more are whole eights, so only their order differs. In pairs those two columns are gate and up of one column of
the function: a thread has column 4o + t for every 8 stored columns o, and four lanes exchange results until each has
two neighbours of every 8.
"""

import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint32
from cutlass.cutlass_dsl import dsl_user_op, select_

from cute_kernels.hopper.asm import asm
from cute_kernels.hopper.epilogues import epilogue


@dsl_user_op
def chosen_halves(low, high, selector, *, loc=None, ip=None):
    """Two of the four 16-bit halves of two words: bytes `selector`, as PRMT has them."""
    return asm(Uint32, map(Uint32, (low, high, selector)), "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", loc, ip)


class Columns:
    """The order of a pre-activation's columns. inputs: of the function, 2 if it is gated."""

    def __init__(self, inputs: int, block: int):
        self.inputs, self.block = inputs, block
        self.halves = 1 if block else inputs
        """Halves that the tensor [T, C] is seen as."""
        self.pairs = block == 1

    def place(self, column, index: int):
        """(first column, half) of piece `index` of the inputs of the function's columns `column` to + 32."""
        return (self.inputs * column + epilogue.COLS * index, 0) if self.block else (column, index)

    def inputs_of(self, values: cute.Tensor):
        """Of a thread's values of all pieces, one after the other, the inputs of the function, 16 each."""
        count, eights = epilogue.COLS // 2, max(1, self.block // 8)
        if self.pairs:
            return [cute.make_tensor(values.iterator + i, cute.make_layout(count, stride=2)) for i in range(2)]
        if self.block in (0, epilogue.COLS):
            return [epilogue.part(values, i, count) for i in range(self.inputs)]
        layout = cute.make_layout(((4, eights, count // 4 // eights),), stride=((1, 4, 8 * eights),))
        return [cute.make_tensor(values.iterator + 4 * eights * i, layout) for i in range(2)]

    def row_of(self, value: int) -> int:
        """In which of a thread's two rows an input lies, of `inputs_of`."""
        return value % 2 if self.pairs else value // 2 % 2

    def eights_of(self, chunk: int):
        """(piece, eight of it) of each input, for columns 8 chunk to 8 chunk + 8 of the function; not in pairs."""
        if not self.block:
            return [(index, chunk) for index in range(self.inputs)]
        step = self.block // 8
        firsts = [chunk // step * 2 * step + chunk % step + step * index for index in range(2)]
        return [(first // 4, first % 4) for first in firsts]

    def rounded(self, results: cute.Tensor, dtype, thread):
        """A thread's 16 results in FP32, rounded, in the order of an epilogue's fragments."""
        if not self.pairs:
            return epilogue.rounded(results, dtype)
        words = cute.make_rmem_tensor((8,), Uint32)
        lane = thread % 32
        first, upper = (lane & ~3) + lane % 2 * 2, Boolean((lane & 2) != 0)
        selector = select_(upper, Int32(0x7632), Int32(0x5410))
        for chunk in range(4):
            for row in range(2):
                mine = epilogue.packed(results[4 * chunk + row], results[4 * chunk + 2 + row], dtype)
                left, right = (cute.arch.shuffle_sync(mine, offset=first + step) for step in range(2))
                words[2 * chunk + row] = chosen_halves(left, right, selector)
        return cute.make_tensor(cute.recast_ptr(words.iterator, dtype=dtype), cute.make_layout(16))
