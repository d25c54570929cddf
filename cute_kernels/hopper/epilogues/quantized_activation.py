"""act = f(round(acc + b))·p, quantised once from FP32, in rows and transposed; the pre-activation is kept in BF16.

args: (rows E4M3 [T, I], row scales [⌈I/128⌉, ⌈T⌉₄], columns E4M3 [I, P], column scales [P/128, ⌈I⌉₄], preact BF16
[T, 2I or I], bias, probs, padded int32 [G+1]); what was not asked for is None. Layouts: `fp8_reference`.

Consumers round their sums into the tile, 128 rows x 256 columns of BF16 in pieces of 64 x 64, swizzled, and go on. A
finishing warp stores its 32 rows of it by TMA, and all finish: a gated tile is one block of 128 act columns, whose gate
lies in the first two pieces of a row and up in the others; else a tile is two blocks.
"""

from typing import NamedTuple

import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import BFloat16, Float32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup

from cute_kernels.hopper.epilogues import epilogue, quantized
from cute_kernels.hopper.epilogues.activation import functions
from cute_kernels.hopper.epilogues.quantized import BLOCK, Copies, Desk

PIECE_COLS = 64
PIECE_BYTES = epilogue.ROWS * PIECE_COLS * 2
PIECES = 4
"""Pieces of a warpgroup, side by side."""
STORED_ROWS = 32
"""Rows of a piece that a finishing warp stores."""


def swizzled(shape: tuple):
    """Pieces of rows of 128 bytes, swizzled."""
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16)
    return cute.tile_to_shape(atom, shape, tuple(range(len(shape))))


def stage(values: cute.Tensor, piece: cute.Tensor, thread):
    """A thread's rounded values into a piece, four 8 x 8 matrices at a time."""
    k_major = OperandMajorMode.K
    mma = sm90.make_trivial_tiled_mma(
        BFloat16, BFloat16, k_major, k_major, Float32, (1, 1, 1), (epilogue.ROWS, PIECE_COLS)
    )
    tiled = cute.make_tiled_copy_C(cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), BFloat16), mma)
    fragment = cute.make_tensor(values.iterator, cute.make_layout(((2, 2, PIECE_COLS // 8), 1, 1)))
    cute.copy(tiled, tiled.retile(fragment), tiled.get_slice(thread).partition_D(piece))


class QuantizedActivate:
    """Round to the pre-activation; store it if wanted; apply f and the row's factor; quantise in both directions."""

    sides, has_sums, pieces = 1, False, PIECES

    def __init__(self, facts, cut: epilogue.Cut, power_of_two: bool):
        self.facts, self.cut, self.power_of_two = facts, cut, power_of_two
        self.curve = functions(facts.kind)
        self.halves = 2 if self.curve.GATED else 1
        self.width = cut.tile_n // self.halves
        """Columns of act in a tile."""

    class Args(NamedTuple):
        rows: cute.Tensor | None
        row_scales: cute.Tensor | None
        columns: cute.Tensor | None
        column_scales: cute.Tensor | None
        preact: cute.Tensor | None
        bias: cute.Tensor | None
        probs: cute.Tensor | None
        padded: cute.Tensor | None

    def bias(self, args):
        return args.bias

    def tile_layout(self, consumers: int):
        """The tile in shared memory."""
        return swizzled((epilogue.ROWS, PIECE_COLS, consumers * PIECES))

    def stores_preact(self, args):
        return args.preact is not None

    def make_sink(self, args):
        """(TMA atom, coordinates) that store a finishing warp's rows of a piece of the pre-activation."""
        box = (STORED_ROWS, PIECE_COLS)
        view = epilogue.ragged_view(args.preact, self.halves)
        return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), view, swizzled(box), box)

    def zeroed(self, args):
        return ()

    def load(self, args, tile, room):
        """Consumers, before the products."""
        if args.bias is None:
            return None
        values, width = [], args.bias.shape[1] // self.halves
        for half in range(2):
            column = tile.column_tile * self.width + room.thread
            if self.halves == 1:
                column = column + half * BLOCK
            index = column + half * (self.halves - 1) * width
            values.append(epilogue.read_bias(args.bias, tile.group, index, column, width))
        return epilogue.held(self.cut, values, None, tile, room)

    def hand_over(self, args, held, acc, tile, room, free):
        """Consumers, after them: into the tile, once it is free."""
        preact = epilogue.rounded_now(self.cut, acc, None if args.bias is None else room, tile.end, BFloat16)
        free.arrive_and_wait()
        for piece in range(PIECES):
            stage(epilogue.part(preact, piece, PIECE_COLS // 2), room.piece(piece), room.thread)
        cute.arch.fence_proxy("async.shared", space="cta")

    def finish(self, args, tile, token, pieces: cute.Tensor, desk: Desk):
        """The finishing warpgroup."""
        factors = quantized.load_factors(args.probs, tile, desk)
        if args.preact is not None:
            self.store_preact(args, tile, pieces, desk)
            if self.halves == 2 and args.columns is not None:
                cute.arch.cp_async_bulk_wait_group(0, read=True)  # values take the place of what they are formed from
                cute.arch.sync_warp()
        for block in range(self.width // BLOCK):
            column = tile.column_tile * self.width + block * BLOCK
            copies = Copies(
                args.rows, args.row_scales, args.columns, args.column_scales,
                column, self.limit(args), column // BLOCK, token,
            )  # fmt: skip

            if block:
                desk.barrier.arrive_and_wait()  # the maxima before have been read
            Activated(self, block, factors, copies, tile, desk).quantize()
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    def limit(self, args):
        return args.rows.shape[1] if args.rows is not None else args.columns.shape[0]

    def store_preact(self, args, tile, pieces: cute.Tensor, desk: Desk):
        """This warp's 32 rows of the tile leave by TMA."""
        atom, tensor = desk.sink
        first = epilogue.RAGGED_ROWS - (tile.end - tile.row) + desk.warp * STORED_ROWS
        per_half = PIECES // self.halves
        for piece in range(PIECES):
            half, inside = divmod(piece, per_half)
            column = tile.column_tile * self.width + inside * PIECE_COLS
            whole = tensor[None, None, half, epilogue.RAGGED_ROWS, tile.end]
            box = (STORED_ROWS, PIECE_COLS)
            target = cute.local_tile(cute.domain_offset((first, column), whole), box, (0, 0))
            source = cute.local_tile(pieces[None, None, desk.warp // 2 * PIECES + piece], box, (desk.warp % 2, 0))
            source, target = cpasync.tma_partition(
                atom, 0, cute.make_layout(1), cute.group_modes(source, 0, 2), cute.group_modes(target, 0, 2)
            )
            cute.copy(atom, source, target)
        cute.arch.cp_async_bulk_commit_group()

    def vectors(self, block: int, i, desk: Desk):
        """Addresses of row i of this thread's patch of a block, 16 bytes of gate and of up."""
        chunk = desk.column() // 8
        piece = desk.warp // 2 * PIECES + 2 * block + chunk // 8
        row = desk.row() % epilogue.ROWS + i
        return [
            desk.tile + piece * PIECE_BYTES + row * 128 + ((chunk % 8) ^ (i % 8)) * 16 + half * 2 * PIECE_BYTES
            for half in range(self.halves)
        ]


class Activated(quantized.Block):
    """act of one block of the tile, from the rounded pre-activation."""

    def __init__(self, made_for: QuantizedActivate, block: int, factors, copies: Copies, tile, desk: Desk):
        super().__init__((copies,), made_for.power_of_two, tile, desk)
        self.made_for, self.block, self.factors = made_for, block, factors

    def row(self, held, step: int, i, first, count: int, counts: bool):
        curve, facts, halves, desk = self.made_for.curve, self.made_for.facts, self.made_for.halves, self.desk
        vectors = self.made_for.vectors(self.block, i, desk)
        keeps = halves == 2 and self.copies[0].columns is not None
        if keeps and not counts:  # FP32, four columns where gate lay and four where up lay
            words = quantized.load_words(vectors[0] + first // 4 * 2 * PIECE_BYTES, 4)
            return [[quantized.float_of(word) for word in words]]
        inputs = [quantized.widened(quantized.load_words(vector + 2 * first, count // 2)) for vector in vectors]
        valid = self.tile.row + desk.row() + i < self.tile.end
        factor = None if self.factors is None else quantized.row_factor(self.factors, i, desk)
        result = []
        for j in range(count):
            value = curve.forward(facts, *(x[j] for x in inputs))
            value = value if factor is None else value * factor
            result.append(quantized.where(valid, value, Float32(0.0)))
        if keeps:
            for part, vector in enumerate(vectors):
                quantized.store_vector(vector, result[4 * part : 4 * part + 4])
        return [result]
