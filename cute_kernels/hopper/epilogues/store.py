"""y = acc (+ s·b): the product itself, rounded once.

args: (y [T, N], bias [G, N] or None, scale [T] or None). The bias is added in FP32; the scale multiplies the bias only
and is not rounded.
"""

from typing import NamedTuple

import cutlass.cute as cute

from cute_kernels.hopper.epilogues import epilogue


class Store:
    """Round and store. zero_tail: the rows of no group become zero."""

    pieces = 2
    sets = fetched = 0

    def __init__(self, tile_n: int, zero_tail: bool):
        self.tile_n, self.zero_tail = tile_n, zero_tail

    class Args(NamedTuple):
        y: cute.Tensor
        bias: cute.Tensor | None
        scale: cute.Tensor | None

    def bias(self, args):
        return args.bias

    def sinks(self, args):
        return ((args.y, 1),)

    def zeroed(self, args):
        return (args.y,) if self.zero_tail else ()

    def load(self, args, tile, room):
        values, factors = None, None
        if args.bias is not None:
            width = args.bias.shape[1]
            columns = [tile.column_tile * self.tile_n + epilogue.HALF * half + room.thread for half in range(2)]
            values = [epilogue.read_bias(args.bias, tile.group, column, column, width) for column in columns]
        if args.scale is not None:
            rows = (tile.row + room.row(), tile.row + room.row() + 8)
            factors = [epilogue.row_factor(args.scale, row, tile.end) for row in rows]
        return values, factors

    def finish(self, args, held, acc, tile, room, pipe, state):
        values, factors = held
        if values is not None:
            epilogue.keep_bias(values, room)
            epilogue.add_bias(acc, room, factors)
        y = epilogue.rounded(acc, args.y.element_type)
        for index in range(self.tile_n // epilogue.COLS):
            column = tile.column_tile * self.tile_n + index * epilogue.COLS
            epilogue.emit(epilogue.part(y, index, 32), index % 2, room.sinks[0], tile, room, column, 0)
        return state
