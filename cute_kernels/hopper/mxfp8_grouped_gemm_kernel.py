"""sums[g] = Σ of what a product left for each 64 rows of group g: the bias gradient of `mxfp8_dactivation`.

Stage 2 of `rowwise_kernel.ColumnSums`, in slots of 64 rows.
"""

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.runtime import make_fake_stream

from cute_kernels.hopper.epilogues import epilogue
from cute_kernels.hopper.rowwise_kernel import SPAN, ColumnSums, row_matrix, vector_of


class SlotSums(ColumnSums):
    """A team adds a group's slots, 256 columns."""

    chunk = epilogue.ROWS

    @cute.jit
    def __call__(
        self, offsets: cute.Tensor, partial: cute.Tensor, sums: cute.Tensor, block: Int32, ctas: Int32, stream
    ):
        spans = (sums.shape[1] + SPAN - 1) // SPAN
        self.teams.launch(self.add_slots(partial, offsets, sums, block), sums.shape[0] * spans, ctas, stream)


def build(options):
    """(jit function, fake arguments): offsets, partial, sums, block of gate columns, most CTAs, stream."""
    columns = cute.sym_int(divisibility=8)
    matrices = (row_matrix(Float32, cute.sym_int(), columns) for _ in range(2))
    return SlotSums(options), (vector_of(Int32, cute.sym_int()), *matrices, Int32(1), Int32(1), make_fake_stream())
