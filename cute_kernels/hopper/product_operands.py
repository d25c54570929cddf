"""What products ask of their operands before a launch, beside what `operands` asks of all.

Every function raises ValueError that names the kernel, the argument, and what it needs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels.activation import Activation
from cute_kernels.catalog import Kernel
from cute_kernels.facts import VECTOR_BYTES, ListFacts, TensorFacts
from cute_kernels.hopper.operands import check_offsets, check_shape
from cute_kernels.limits import STORED_INTERLEAVES, dtype_name

FACTOR_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def weight_sizes(kernel: Kernel, weights: ListFacts) -> tuple[int, int]:
    """(rows, columns) of one group's weight."""
    shapes = [list(kind.shape) for kind in weights.kinds[:1]]
    if not shapes or len(shapes[0]) != 2 + (not weights.separate):
        raise ValueError(f"{kernel.name}: weights starts with {shapes}, needs one [G, N, K] or G tensors [N, K]")
    rows, columns = shapes[0][-2:]
    return rows, columns


def check_product(
    kernel: Kernel, letter: str, x: TensorFacts, contracted: int, weights: ListFacts, offsets: TensorFacts
) -> int:
    """The number of groups, if operands fit each other and memory is as the kernel reads it."""
    groups = check_offsets(kernel.name, offsets, x)
    if len(x.shape) != 2:
        raise ValueError(f"{kernel.name}: {letter} has {len(x.shape)} dimensions, needs 2: [T, {contracted}]")
    first = weights.kinds[0]
    check_shape(kernel.name, letter, x, (x.shape[0], contracted), first, (first.dtype,))
    if weights.separate and weights.length != groups:
        raise ValueError(f"{kernel.name}: weights has {weights.length} tensors, needs one [G, N, K] or {groups} [N, K]")
    shape = tuple(first.shape) if weights.separate else (groups, *first.shape[1:])
    for w in weights.kinds:
        check_shape(kernel.name, "weights", w, shape, x, (x.dtype,))
        if not w.aligned:
            raise ValueError(f"{kernel.name}: weights need to start at a multiple of {VECTOR_BYTES} bytes")
    return groups


def are_transposed(kernel: Kernel, weights: ListFacts) -> bool:
    """Whether the weights are stored [K, N]; raises ValueError if they are neither that nor all contiguous."""
    if all(w.is_contiguous() for w in weights.kinds):
        return False
    if not all(w.is_transposed() for w in weights.kinds):
        raise ValueError(f"{kernel.name}: weights need to be contiguous, or all of them transposed views of such")
    return True


def check_bias(kernel: Kernel, bias: TensorFacts | None, groups: int, columns: int, x: TensorFacts) -> None:
    if bias is not None:
        check_shape(kernel.name, "bias", bias, (groups, columns), x, (x.dtype,))


def check_result(kernel: Kernel, letter: str, out: TensorFacts | None, columns: int | None, x: TensorFacts) -> None:
    """out: the caller's buffer [T, columns] in x's dtype, or None. columns: None for any multiple of 8."""
    if out is None:
        return
    wide = out.shape[-1] // 8 * 8 if columns is None else columns
    check_shape(kernel.name, letter, out, (x.shape[0], wide), x, (x.dtype,))
    if not out.is_contiguous() or not out.aligned:
        raise ValueError(
            f"{kernel.name}: {letter} needs to be contiguous and to start at a multiple of {VECTOR_BYTES} bytes"
        )


def check_factor(kernel: Kernel, letter: str, factor: TensorFacts | None, x: TensorFacts) -> None:
    if factor is not None:
        check_shape(kernel.name, letter, factor, (x.shape[0],), x, FACTOR_DTYPES)


def check_interleave(kernel: Kernel, block: int, rows: int, transposed: bool) -> None:
    """A gradient's weight rows are in blocks that tile both halves, and blocks and contraction tiles of 64 nest; of a
    weight stored [K, N] they are as the gradient's columns are."""
    if transposed and block:
        raise ValueError(f"{kernel.name}: glu_interleave is {block}, needs 0 for weights stored [K, N]")
    if block < 0 or (block and (rows % (2 * block) or (64 % block and block % 64))):
        raise ValueError(
            f"{kernel.name}: glu_interleave is {block}, needs 0 or a divisor of I = N / 2 = {rows // 2} "
            "that divides 64 or is a multiple of it"
        )


def check_order(kernel: Kernel, order: int, block: int, transposed: bool) -> None:
    """A product's columns come in the order of the columns that its weight is stored with, if they are columns."""
    wanted, stored = (block, "[K, N]") if transposed else (0, "[N, K]")
    if order != wanted:
        raise ValueError(f"{kernel.name}: preact_interleave is {order}, needs {wanted} for weights stored {stored}")


def check_preact_interleave(kernel: Kernel, block: int, activation: Activation, width: int) -> None:
    """Columns of a pre-activation lie as halves, or in blocks that kernels read."""
    if block and not (activation.is_glu and block in STORED_INTERLEAVES and width % block == 0):
        sizes = ", ".join(map(str, STORED_INTERLEAVES))
        raise ValueError(
            f"{kernel.name}: preact_interleave is {block}, needs 0, or for a gated function one of {sizes} that "
            f"divides I ({width})"
        )


def whole(bias: Tensor | None) -> Tensor | None:
    """The bias as kernels read it: contiguous, from a multiple of 16 bytes on."""
    if bias is None or (bias.is_contiguous() and bias.data_ptr() % VECTOR_BYTES == 0):
        return bias
    return bias.clone(memory_format=torch.contiguous_format)


def contiguous(factor: Tensor | None) -> Tensor | None:
    return None if factor is None else factor.contiguous()


def factor_name(factor: TensorFacts | None) -> str:
    return "" if factor is None else dtype_name(factor.dtype)
