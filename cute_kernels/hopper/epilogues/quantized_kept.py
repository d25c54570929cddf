"""A pre-activation kept for backward in E4M3 blocks: what `quantized_activation` leaves, and both gradients read.

preact E4M3 [T, 2I or I], scales FP32 [halves ⌈I/128⌉, ⌈T⌉₄], blocks of 128 columns cut in each half: see
`fp8_reference`. It is quantised from its rounded values, which act is formed from too, by the threads that form act;
read back, a value is element times scale in FP32.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Uint32

from cute_kernels.hopper.epilogues import eights, quantized
from cute_kernels.hopper.epilogues.eights import SPANS, Room
from cute_kernels.hopper.epilogues.eights_dactivation import Differentiate
from cute_kernels.hopper.epilogues.quantized import BLOCK, PATCH_COLS, Copies, Desk
from cute_kernels.hopper.epilogues.quantized_activation import QuantizedActivate
from cute_kernels.hopper.epilogues.quantized_dactivation import Differentiated, Gradient, QuantizedDifferentiate
from cute_kernels.hopper.mxfp8_scales import wide_values


def widened(words, scale):
    """The E4M3 values of some words, four each, times their scale in FP32."""
    return [value for word in words for half in (0, 16) for value in wide_values(Uint32(word) >> half, scale)]


def zero_of(scale):
    """The sign of a scale, from its bits: always 0, which the compiler does not know. What is widened so waits for what
    was before: left alone, the compiler widens all at once, and spills.
    """
    return Uint32(scale) >> 31


class QuantizedActivateKept(QuantizedActivate):
    """The activation, its pre-activation kept quantised."""

    class Args(NamedTuple):
        rows: cute.Tensor | None
        row_scales: cute.Tensor | None
        columns: cute.Tensor | None
        column_scales: cute.Tensor | None
        preact: cute.Tensor
        bias: cute.Tensor | None
        probs: cute.Tensor | None
        padded: cute.Tensor | None
        scales: cute.Tensor

    def stores_preact(self, args):
        """Nothing leaves by TMA."""
        return False

    def store_preact(self, args, tile, pieces, desk: Desk):
        width = args.preact.shape[1] // self.halves
        for block in range(self.width // BLOCK):
            column = tile.column_tile * self.width + block * BLOCK
            parts = [
                Copies(
                    args.preact, args.scales, None, None, half * width + column, (half + 1) * width,
                    half * (args.scales.shape[0] // self.halves) + column // BLOCK, None,
                )
                for half in range(self.halves)
            ]  # fmt: skip
            Kept(self, block, tuple(parts), tile, desk).quantize()


class Kept(quantized.Block):
    """The rounded pre-activation of one block of the tile, gate and up."""

    source = "bfloat16"
    at_once = 2

    def __init__(self, made_for: QuantizedActivateKept, block: int, copies: tuple, tile, desk: Desk):
        super().__init__(copies, made_for.power_of_two, tile, desk)
        self.made_for, self.block = made_for, block

    def row(self, held, step: int, i, first, count: int, counts: bool):
        vectors = self.made_for.vectors(self.block, i, self.desk)
        return [quantized.widened(quantized.load_words(vector, PATCH_COLS // 2)) for vector in vectors]


class KeptGradient(Gradient):
    """A gradient at a pre-activation that was kept quantised."""

    class Args(NamedTuple):
        rows: cute.Tensor | None
        row_scales: cute.Tensor | None
        columns: cute.Tensor | None
        column_scales: cute.Tensor | None
        partial: cute.Tensor | None
        sums: cute.Tensor | None
        dbias: cute.Tensor | None
        preact: cute.Tensor
        probs: cute.Tensor | None
        padded: cute.Tensor | None
        scales: cute.Tensor

    def scale_row(self, args, half: int, tile):
        return half * (args.scales.shape[0] // self.halves) + tile.column_tile


class DifferentiateKept(KeptGradient, Differentiate):
    """By the warpgroup that made the tile."""

    def fetch(self, args, row: int, tile, room: Room):
        """For each half and span words of four values; then for each half their scale."""
        at, scales = tile.row + room.row(row), []
        for half in range(self.halves):
            address = eights.place(args.scales, self.scale_row(args, half, tile), at)
            scales.append(eights.load_global(address, 0, at < tile.end, 1)[0])
        return super().fetch(args, row, tile, room) + scales

    def inputs_of(self, found, half: int, span: int, total):
        scale = found[self.halves * SPANS + half]
        later = zero_of(scale) & total.bitcast(Uint32)
        return widened([word ^ later for word in found[half * SPANS + span]], scale.bitcast(Float32))


class QuantizedDifferentiateKept(KeptGradient, QuantizedDifferentiate):
    """By the finishing warpgroup."""

    def differentiated(self, *given):
        return DifferentiatedKept(self, *given)


class DifferentiatedKept(Differentiated):
    """dgate and dup (or dx) of the tile."""

    def __init__(self, made_for: QuantizedDifferentiateKept, args, width, copies: tuple, tile, desk: Desk):
        super().__init__(made_for, args, width, copies, tile, desk)
        row = cutlass.min(tile.row + desk.warp * 32 + desk.thread % 32, tile.end - 1)
        self.scales = [args.scales[made_for.scale_row(args, half, tile), row] for half in range(made_for.halves)]
        """Of one of its warp's rows each lane has those."""
        self.zero = self.later = zero_of(quantized.bits_of(self.scales[0]))

    def batch(self, number, first, count: int):
        self.later = self.zero
        return super().batch(number, first, count)

    def row(self, held, step: int, i, first, count: int, counts: bool):
        """Of a batch a row waits for the one before."""
        results = super().row(held, step, i, first, count, counts)
        self.later = self.zero & Uint32(quantized.bits_of(results[0][-1]))
        return results

    def inputs_of(self, held, step: int, i, count: int):
        words, halves = count // 4, self.made_for.halves
        found = [held[(step * halves + half) * words :][:words] for half in range(halves)]
        scales = [quantized.row_factor(scale, i, self.desk) for scale in self.scales]
        return [widened([word ^ self.later for word in part], scale) for part, scale in zip(found, scales, strict=True)]
