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

    staging_tiles = 1
    fetched = 0

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

    def zeroed(self, args):
        if not self.zero_tail:
            return ()
        return (args.act,) if args.preact is None else (args.act, args.preact)

    def columns(self, tile, half: int, width):
        """First column of this half of the tile: in act, in the pre-activation; and the half's end there."""
        if self.gated:
            first = tile.column_tile * epilogue.COLS
            return first, half * width + first, (half + 1) * width
        first = tile.column_tile * self.tile_n + half * epilogue.COLS
        return first, first, width

    def load(self, args, tile, room):
        values, factors = None, None
        width = args.act.shape[1]
        if args.bias is not None:
            values = []
            for half in range(2):
                first, _, _ = self.columns(tile, half, width)
                column = first + room.thread
                if self.gated:
                    index = epilogue.bias_column(column, half, width, self.glu_interleave)
                else:
                    index = column
                values.append(epilogue.read_bias(args.bias, tile.group, index, column, width))
        if args.probs is not None:
            rows = (tile.row + room.row(), tile.row + room.row() + 8)
            factors = [epilogue.row_factor(args.probs, row, tile.end) for row in rows]
        return values, factors

    def finish(self, args, held, acc, tile, room):
        values, factors = held
        if values is not None:
            epilogue.keep_bias(values, room)
            epilogue.add_bias(acc, room, None)
        dtype, width = args.act.element_type, args.act.shape[1]
        preact = epilogue.rounded(acc, dtype)
        halves = self.tile_n // epilogue.COLS
        if args.preact is not None:
            for half in range(halves):
                _, column, column_end = self.columns(tile, half, width)
                self.emit(epilogue.part(preact, half, 64), args.preact, tile, room, column, column_end)
        if factors is not None:
            factors = [factor.to(dtype).to(Float32) for factor in factors]
        for half in range(1 if self.gated else halves):
            inputs = [epilogue.part(preact, h, 64) for h in ((0, 1) if self.gated else (half,))]
            column, _, _ = self.columns(tile, half, width)
            self.emit(epilogue.rounded(self.apply(inputs, factors), dtype), args.act, tile, room, column, width)

    def apply(self, inputs, factors):
        """f of the rounded inputs, times the row's factor, in FP32."""
        result = cute.make_rmem_tensor((64,), Float32)
        for i in range(64):
            value = self.curve.forward(self.facts, *(x[i].to(Float32) for x in inputs))
            result[i] = value if factors is None else value * factors[(i // 2) % 2]
        return result

    def emit(self, values, out, tile, room, column, column_end):
        """64 rounded values a thread through the staging tile to `out`."""
        staging = room.tile(0)
        room.barrier.arrive_and_wait()
        epilogue.stage(values, staging, room.thread)
        room.barrier.arrive_and_wait()
        epilogue.write_rows(staging, out, room.thread, tile.row, tile.end, column, column_end)
