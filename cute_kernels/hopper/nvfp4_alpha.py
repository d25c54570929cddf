"""The sums of a product on SM90 times what is left of NVFP4 operands' second level: `nvfp4_reference.alpha_of`.

FP32. What a product is given are both operands' largest magnitudes in each group.
"""

import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.runtime import make_fake_compact_tensor

from cute_kernels.quantization.nvfp4_scales import LARGEST


def scale_sums(sums: cute.Tensor, amaxes: tuple, group):
    """A thread's sums of a tile of `group`, times its alpha."""
    first, second = (amax[group] * Float32(1 / LARGEST) for amax in amaxes)
    alpha = first * second
    for i in range(cute.size(sums)):
        sums[i] = sums[i] * alpha


def scaled(sums: cute.Tensor, amaxes: tuple, group):
    """The same as other values: sums that are changed where they are would be a product's input to the compiler."""
    result = cute.make_rmem_tensor((cute.size(sums),), Float32)
    result.store(sums.load())
    scale_sums(result, amaxes, group)
    return result


def fake_amaxes():
    """Both operands' largest magnitudes, FP32 [G], to compile with."""
    return tuple(make_fake_compact_tensor(Float32, (cute.sym_int(),), assumed_align=4) for _ in range(2))
