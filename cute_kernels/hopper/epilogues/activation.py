"""act = round(f(round(acc + b))·p): the activation of a product whose gate and up columns meet in one thread.

args: (act [T, I], preact [T, 2I or I] or None, bias [G, 2I or I] or None, probs [T] or None, later [T, ·] or None, the
result of a later product, whose tail is zeroed here; amax, turned_amax [G] FP32, each if given: see `nvfp4_maxima`, of
act). The pre-activation is rounded first, stored as `[gate | up]`, and f is computed in FP32 from the rounded value. A
gated tile's columns are 32 of gate, then the 32 of up that belong to them, and so on; or they are stored columns, and
the pre-activation is stored so (see `preact`).

The functions come from the module named as the activation, beside this one: `GATED`, `forward(facts, *inputs)` and
`backward(facts, *inputs)` (value, then one slope an input), written on FP32 scalars. A new activation is a new file.
"""

import importlib
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Float32

from cute_kernels.hopper.epilogues import epilogue
from cute_kernels.hopper.epilogues.preact import Columns
from cute_kernels.hopper.nvfp4_maxima import maxima_of

FUNCTIONS = "cute_kernels.hopper.epilogues"


def functions(kind: str):
    """The module that holds the activation `kind`."""
    return importlib.import_module(f"{FUNCTIONS}.{kind}")


class Activate:
    """Round to the pre-activation, store it if wanted, apply f and the row's factor, round, store."""

    fetched = 0
    attended = False

    def __init__(self, facts, cut: epilogue.Cut, pieces: int, glu_interleave: int, block: int, zero_tail: bool):
        self.facts, self.cut, self.pieces, self.zero_tail = facts, cut, pieces, zero_tail
        self.glu_interleave = glu_interleave
        self.curve = functions(facts.kind)
        self.preact = Columns(2 if self.curve.GATED else 1, block)
        self.width = cut.tile_n // self.preact.inputs
        """Columns of a tile's act."""

    class Args(NamedTuple):
        act: cute.Tensor
        preact: cute.Tensor | None
        bias: cute.Tensor | None
        probs: cute.Tensor | None
        later: cute.Tensor | None
        amax: cute.Tensor | None = None
        turned_amax: cute.Tensor | None = None

    def bias(self, args):
        return args.bias

    def sinks(self, args):
        results = ((args.act, 1), (args.preact, self.preact.halves))
        return results if args.preact is not None else results[:1]

    def zeroed(self, args):
        results = (args.act, args.preact) if self.zero_tail else ()
        return tuple(out for out in (*results, args.later) if out is not None)

    def load(self, args, tile, room):
        values = None
        if args.bias is not None:
            values, halves = [], self.preact.halves
            width = args.bias.shape[1] // halves
            for first in range(0, self.cut.tile_n, 128):
                run, inside = (first + room.thread) // epilogue.COLS, room.thread % epilogue.COLS
                column = tile.column_tile * (self.cut.tile_n // halves) + run // halves * epilogue.COLS + inside
                index = column
                if halves == 2:
                    index = epilogue.bias_column(column, run % halves, width, self.glu_interleave)
                values.append(epilogue.read_bias(args.bias, tile.group, index, column, width))
        return epilogue.held(self.cut, values, args.probs, tile, room)

    def finish(self, args, factors, acc, tile, room, phase):
        dtype, cut = args.act.element_type, self.cut
        preact = epilogue.rounded_now(cut, acc, None if args.bias is None else room, tile.end, dtype)
        sent, zero, maxima = 0, None, maxima_of(args, tile, room)
        if cut.blocks > 1:
            zero = epilogue.meet(room.barrier, tile.end)
            factors = epilogue.row_factors(range(cut.blocks), args.probs, tile, room, zero)
        if factors is not None:
            factors = [factor.to(dtype).to(Float32) for factor in factors]
        for block, column in cut.places(self.width):
            inputs, first = self.preact.inputs, tile.column_tile * self.width + column
            values = cut.take(preact, block, inputs * column, inputs)
            if zero is not None:
                values = epilogue.not_before(zero, values)
            if args.preact is not None:
                sent, values = self.keep(args, values, sent, (block, first), tile, room)
            results = self.apply(self.preact.inputs_of(values), block, factors)
            act = self.finished(results, dtype, room.thread)
            zero = epilogue.emit(act, sent, self.pieces, room.sinks[0], tile, room, (block, first), 0)
            if maxima is not None:
                row = tile.row + block * epilogue.ROWS
                maxima.see([sent % self.pieces], row, first, args.act.shape[1])
            sent += 1
        if maxima is not None:
            maxima.leave()
        return phase

    def keep(self, args, values: cute.Tensor, sent: int, place, tile, room):
        """A thread's values of all pieces of the pre-activation leave for `place` (block, column of act); returns how
        many have been sent then, and the values as act is formed from them."""
        block, column = place
        for index in range(self.preact.inputs):
            there, half = self.preact.place(column, index)
            piece = epilogue.part(values, index, epilogue.COLS // 2)
            epilogue.emit(piece, sent + index, self.pieces, room.sinks[1], tile, room, (block, there), half)
        return sent + self.preact.inputs, values

    def finished(self, results: cute.Tensor, dtype, thread):
        """A thread's results of a piece as they leave."""
        return self.preact.rounded(results, dtype, thread)

    def apply(self, inputs, block: int, factors):
        """f of a piece of rounded inputs, times the row's factor, in FP32."""
        count = cute.size(inputs[0])
        result = cute.make_rmem_tensor((count,), Float32)
        for i in range(count):
            value = self.curve.forward(self.facts, *(x[i].to(Float32) for x in inputs))
            result[i] = value if factors is None else value * factors[2 * block + self.preact.row_of(i)]
        return result
