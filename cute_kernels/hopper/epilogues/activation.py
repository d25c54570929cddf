"""act = round(f(round(acc + b))·p): the activation of a product whose gate and up columns meet in one thread.

args: (act [T, I], preact [T, 2I or I] or None, bias [G, 2I or I] or None, probs [T] or None). The pre-activation is
rounded first, stored as `[gate | up]`, and f is computed in FP32 from the rounded value. A gated tile has 128 gate and
128 up columns; an activation of one input has 256 columns in two halves.

The functions come from the module named as the activation, beside this one: `GATED`, `forward(facts, *inputs)` and
`backward(facts, *inputs)` (value, then one slope an input), written on FP32 scalars. A new activation is a new file.
"""

import importlib
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Float32

from cute_kernels.hopper.epilogues import epilogue

FUNCTIONS = "cute_kernels.hopper.epilogues"


def functions(kind: str):
    """The module that holds the activation `kind`."""
    return importlib.import_module(f"{FUNCTIONS}.{kind}")


class Activate:
    """Round to the pre-activation, store it if wanted, apply f and the row's factor, round, store."""

    pieces = 2
    sets = fetched = 0

    def __init__(self, facts, tile_n: int, glu_interleave: int, zero_tail: bool):
        self.facts, self.tile_n, self.zero_tail = facts, tile_n, zero_tail
        self.glu_interleave = glu_interleave
        self.curve = functions(facts.kind)
        self.gated = self.curve.GATED

    class Args(NamedTuple):
        act: cute.Tensor
        preact: cute.Tensor | None
        bias: cute.Tensor | None
        probs: cute.Tensor | None

    def bias(self, args):
        return args.bias

    def sinks(self, args):
        results = ((args.act, 1), (args.preact, 2 if self.gated else 1))
        return results if args.preact is not None else results[:1]

    def zeroed(self, args):
        if not self.zero_tail:
            return ()
        return (args.act,) if args.preact is None else (args.act, args.preact)

    def column(self, tile, index: int):
        """The first column of piece `index` of the tile, within its half of the pre-activation."""
        first = tile.column_tile * (epilogue.HALF if self.gated else self.tile_n)
        return first + (index % 2 if self.gated else index) * epilogue.COLS

    def load(self, args, tile, room):
        values, factors = None, None
        width = args.act.shape[1]
        if args.bias is not None:
            values = []
            for half in range(2):
                column = self.column(tile, 2 * half) + room.thread
                if self.gated:
                    index = epilogue.bias_column(column, half, width, self.glu_interleave)
                else:
                    index = column
                values.append(epilogue.read_bias(args.bias, tile.group, index, column, width))
        if args.probs is not None:
            rows = (tile.row + room.row(), tile.row + room.row() + 8)
            factors = [epilogue.row_factor(args.probs, row, tile.end) for row in rows]
        return values, factors

    def finish(self, args, held, acc, tile, room, pipe, state):
        values, factors = held
        if values is not None:
            epilogue.keep_bias(values, room)
            epilogue.add_bias(acc, room, None)
        dtype = args.act.element_type
        preact = epilogue.rounded_now(acc, dtype)
        if factors is not None:
            factors = [factor.to(dtype).to(Float32) for factor in factors]
        sent = 0
        for index in range(2 if self.gated else self.tile_n // epilogue.COLS):
            inputs = [epilogue.part(preact, i, 32) for i in ((index, index + 2) if self.gated else (index,))]
            column = self.column(tile, index)
            if args.preact is not None:
                for half, values in enumerate(inputs):
                    epilogue.emit(values, sent % 2, room.sinks[1], tile, room, column, half)
                    sent += 1
            act = epilogue.rounded(self.apply(inputs, factors), dtype)
            epilogue.emit(act, sent % 2, room.sinks[0], tile, room, column, 0)
            sent += 1
        return state

    def apply(self, inputs, factors):
        """f of 32 rounded inputs a thread, times the row's factor, in FP32."""
        result = cute.make_rmem_tensor((32,), Float32)
        for i in range(32):
            value = self.curve.forward(self.facts, *(x[i].to(Float32) for x in inputs))
            result[i] = value if factors is None else value * factors[(i // 2) % 2]
        return result
