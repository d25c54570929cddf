"""How TMA sees the two operands of a grouped product: the only device code that knows how GLU rows are interleaved.

A product contracts the operands' second mode. The weight's view has the modes (rows, contraction, half, group), x's
has the first three, so that one box is a rectangle of (rows, contraction) in one half:

    forward, store   x [T, K] as (T, K, 1)     w [N, K] as (N, K, 1, G)
    forward, gated   x [T, K] as (T, K, 1)     w [2I, K] as (I, K, 2, G): a gate box and an up box, never one in both
    dgrad            dy [T, N] as (T, N, 1)    w [N, K] as (K, N, 1, G)
    dgrad, gated     dy [T, 2I] as (T, I, 2)   w [2I, K] as (K, I, 2, G): both halves contracted in turn

and of weights stored [K, N], which contract their rows going forward,

    forward, gated   x [T, K] as (T, K, 1)     w [K, 2I] as (I, K, 2, G) if its columns are [gate | up], else as any

Interleaved in blocks of g, stored row 2 g b + g h + r is row g b + r of half h, so the I rows become the pair
(g, I / g) with strides (1, 2 g) rows; TMA counts that as one dimension more, five at most. Extents bound every half:
what a box covers beyond them is zero.

The group of separate tensors is a distance: one dimension of stride 16 bytes over the lowest tensor; the coordinate, a
tensor's distance from the lowest in units of 16 bytes, comes from a table. It spans 32 GiB.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int64, const_expr
from cutlass.cute.nvgpu import cpasync

ADDRESS_UNIT_BYTES = 16
ADDRESS_UNITS = 2**31 - 1


def half_rows(rows, width, block: int):
    """(shape, stride) of the rows of one half and the distance from gate to up, strides in elements."""
    if block == 0:
        return rows, width, width * rows
    if block == 1:
        return rows, width * 2, width
    return (block, rows // block), (width, width * (2 * block)), width * block


@cute.jit
def weight_view(
    w: cute.Tensor,
    halves: cutlass.Constexpr,
    block: cutlass.Constexpr,
    contract_rows: cutlass.Constexpr,
    halve_columns: cutlass.Constexpr,
    separate: cutlass.Constexpr,
):
    """w: stacked [G, N, K], or the lowest of separate tensors [N, K]. contract_rows: the product sums over its rows.
    halve_columns: the halves are [gate | up] columns, else rows, as `block` says."""
    rows, columns = (w.shape[0], w.shape[1]) if const_expr(separate) else (w.shape[1], w.shape[2])
    width = Int64(columns)
    if const_expr(halves == 1):
        row_shape, row_stride, half_stride = rows, width, 0
    elif const_expr(halve_columns):
        row_shape, row_stride, half_stride = rows, width, columns // 2
        columns = columns // 2
    else:
        row_shape, row_stride, half_stride = half_rows(rows // 2, width, block)
    if const_expr(separate):
        groups, group_stride = ADDRESS_UNITS, ADDRESS_UNIT_BYTES * 8 // w.element_type.width
    else:
        groups, group_stride = w.shape[0], width * rows
    if const_expr(contract_rows):
        shape, stride = (columns, row_shape, halves, groups), (1, row_stride, half_stride, group_stride)
    else:
        shape, stride = (row_shape, columns, halves, groups), (row_stride, 1, half_stride, group_stride)
    return cute.make_tensor(w.iterator, cute.make_layout(shape, stride=stride))


@cute.jit
def rows_view(x: cute.Tensor, halves: cutlass.Constexpr):
    """x [T, C] as (T, C / halves, halves)."""
    columns = x.shape[1] // halves
    stride = (x.stride[0], 1, columns if const_expr(halves > 1) else 0)
    return cute.make_tensor(x.iterator, cute.make_layout((x.shape[0], columns, halves), stride=stride))


def partition(atom, shared, tiles):
    """(shared memory by stage, source by tile) as the TMA atom wants them."""
    return cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2), cute.group_modes(tiles, 0, 2)
    )
