"""act of `activation`, not rounded but through MXFP8 from FP32: the values of its rows copy (`mxfp8_reference`).

args: (act, preact, bias, probs, scales of a pre-activation that is quantised: see `mxfp8_kept`).

A piece is 32 columns of act, so a row's block is in the four threads that share the row.
"""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32, Uint32

from cute_kernels.hopper.epilogues import epilogue
from cute_kernels.hopper.epilogues.activation import Activate
from cute_kernels.hopper.epilogues.eights import over_row
from cute_kernels.hopper.mxfp8_scales import decode_factor, encode_factor, restored, scale_byte

CHUNKS = epilogue.COLS // 8


def row_factors(values):
    """(factor to encode, to decode) of the block of a row: 8 values each of the four threads that share it."""
    byte = scale_byte(over_row(values).bitcast(Int32))
    return encode_factor(byte), decode_factor(byte)


class ActivateMxfp8(Activate):
    """Round to the pre-activation, store it if wanted, apply f and the row's factor, quantise, store the values."""

    class Args(NamedTuple):
        act: cute.Tensor
        preact: cute.Tensor | None
        bias: cute.Tensor | None
        probs: cute.Tensor | None
        scales: cute.Tensor | None

    def zeroed(self, args):
        """Nobody reads the others' tails."""
        return ()

    def finished(self, results: cute.Tensor, dtype, thread):
        words = cute.make_rmem_tensor((2 * CHUNKS,), Uint32)
        for row in range(2):
            values = [results[4 * chunk + 2 * row + e] for chunk in range(CHUNKS) for e in range(2)]
            encode, decode = row_factors(values)
            for chunk in range(CHUNKS):
                words[2 * chunk + row] = restored(values[2 * chunk], values[2 * chunk + 1], encode, decode)
        return cute.make_tensor(cute.recast_ptr(words.iterator, dtype=dtype), cute.make_layout(4 * CHUNKS))
