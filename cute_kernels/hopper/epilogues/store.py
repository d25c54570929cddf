"""y = acc (+ s·b): the product itself, rounded once.

args: (y [T, N], bias [G, N] or None, scale [T] or None). The bias is added in FP32; the scale multiplies the bias only
and is not rounded.
"""

from typing import NamedTuple

import cutlass.cute as cute

from cute_kernels.hopper.epilogues import epilogue


class Store:
    """Round and store. zero_tail: the rows of no group become zero."""

    fetched = 0
    attended = False

    def __init__(self, cut: epilogue.Cut, pieces: int, zero_tail: bool):
        self.cut, self.pieces, self.zero_tail = cut, pieces, zero_tail

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
        values = None
        if args.bias is not None:
            firsts, width = range(0, self.cut.tile_n, 128), args.bias.shape[1]
            columns = [tile.column_tile * self.cut.tile_n + first + room.thread for first in firsts]
            values = [epilogue.read_bias(args.bias, tile.group, column, column, width) for column in columns]
        return epilogue.held(self.cut, values, args.scale, tile, room)

    def finish(self, args, factors, acc, tile, room, phase):
        if self.cut.blocks > 1:
            factors = epilogue.row_factors(range(self.cut.blocks), args.scale, tile, room)
        if args.bias is not None:
            for column in range(0, self.cut.tile_n, 8):
                epilogue.add_bias(self.cut, acc, room, factors, column)
        y = epilogue.rounded(acc, args.y.element_type)
        first = tile.column_tile * self.cut.tile_n
        for number, (block, column) in enumerate(self.cut.places(self.cut.tile_n)):
            values, place = self.cut.take(y, block, column), (block, first + column)
            epilogue.emit(values, number, self.pieces, room.sinks[0], tile, room, place, 0)
        return phase
