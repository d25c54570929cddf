"""Rows in another order, forward and backward without scattering: for examples/expert_parallel.py."""

from __future__ import annotations

import torch
from torch import Tensor


class Move(torch.autograd.Function):
    """y[i] = x[take[i]], or zero if that is no row of x; `put` is the inverse: x[j] lies in y[put[j]], if there."""

    @staticmethod
    def forward(ctx, x: Tensor, take: Tensor, put: Tensor) -> Tensor:
        ctx.save_for_backward(put)
        return moved(x, take)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        (put,) = ctx.saved_tensors
        return moved(grad, put), None, None


def moved(x: Tensor, take: Tensor) -> Tensor:
    """x[take], with zeros for what is no row of x."""
    if len(x) == 0:
        return x.new_zeros(len(take), *x.shape[1:])
    return x[take.clamp(max=len(x) - 1)].masked_fill_((take >= len(x))[:, None], 0)


def inverse(put: Tensor, size: int) -> Tensor:
    """take [size] with take[put[j]] = j; the others, and whatever is put beyond `size`, are len(put)."""
    take = put.new_full((size + 1,), len(put))
    return take.scatter_(0, put.clamp(max=size), torch.arange(len(put), device=put.device))[:size]


def by_expert(counts: Tensor, rows: int) -> Tensor:
    """Where each of `rows` rows goes that come rank by rank, in each by expert, if they are to lie by expert.

    counts: rows of each (rank, expert), [S, experts]; their sum is `rows`.
    """
    here = torch.arange(rows, device=counts.device)
    ends = counts.flatten().cumsum(0)
    block = torch.searchsorted(ends, here, right=True)
    turned = counts.t().flatten()
    starts = (turned.cumsum(0) - turned).view(counts.shape[1], -1).t().flatten()
    return here - (ends - counts.flatten())[block] + starts[block]
