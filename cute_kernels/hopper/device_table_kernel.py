"""table[first + i] = values[i]: host integers to device memory as kernel arguments.

Arguments are copied when the launch is recorded, so the values need no pinned buffer, no sync and no lifetime, and a
CUDA graph keeps them. Shapes: table [G] int64. One CTA of `options.count` threads; one value a thread.
"""

import cutlass.cute as cute
from cutlass import Int32, Int64, range_constexpr
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream


class FillTable:
    """Static facts -> the kernel."""

    def __init__(self, options):
        self.count = options.count

    @cute.jit
    def __call__(self, table: cute.Tensor, first: Int32, values: tuple, stream):
        self.kernel(table, first, values).launch(grid=[1, 1, 1], block=[self.count, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, table: cute.Tensor, first: Int32, values: tuple):
        thread, _, _ = cute.arch.thread_idx()
        mine = Int64(0)
        for first_of_run in range_constexpr(0, self.count, 32):
            for i in range_constexpr(first_of_run, min(first_of_run + 32, self.count)):
                if thread == i:
                    mine = values[i]
        if first + thread < table.shape[0]:
            table[first + thread] = mine


def build(options):
    """(jit function, fake arguments): table, first, values, stream. options: `device_table.TableOptions`."""
    table = make_fake_compact_tensor(Int64, (cute.sym_int(),), assumed_align=8)
    values = tuple(Int64(0) for _ in range(options.count))
    return FillTable(options), (table, Int32(0), values, make_fake_stream())
