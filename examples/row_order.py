"""Rows in another order, forward and backward without scattering: for the examples' experts.

A row that lies nowhere has the place behind the last.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Order(NamedTuple):
    """Row i of those in order is of token `order[i] // k`; row r of the tokens, k for each, lies at `place[r]`.

    whole: every row lies somewhere. Rows in order that are none of the tokens' are any of them.
    """

    order: Tensor
    place: Tensor
    k: int
    whole: bool = True

    def spread(self, x: Tensor) -> Tensor:
        """x [T, ...], each k times -> rows in order."""
        return Spread.apply(x, self)

    def each(self) -> Order:
        """The order of what there is one of for each row, not for each token."""
        return self._replace(k=1)

    def collected(self, y: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows in order -> their sums over each token's k [T, ...], added up in the given type."""
        return Collect.apply(y, self, dtype)


class Spread(torch.autograd.Function):
    """Backward adds the k gradients of a token in a fixed order, so it gives the same bits run after run."""

    @staticmethod
    def forward(ctx, x: Tensor, order: Order) -> Tensor:
        ctx.order = order
        return spread(x, order)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return sums(grad, ctx.order, grad.dtype), None


class Collect(torch.autograd.Function):
    """The inverse of `Spread`."""

    @staticmethod
    def forward(ctx, y: Tensor, order: Order, dtype: torch.dtype) -> Tensor:
        ctx.order, ctx.dtype = order, y.dtype
        return sums(y, order, dtype)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        return spread(grad.to(ctx.dtype), ctx.order), None, None


def spread(x: Tensor, order: Order) -> Tensor:
    if len(x) == 0:
        return x.new_zeros(len(order.order), *x.shape[1:])
    return x[order.order // order.k if order.k > 1 else order.order]


def sums(y: Tensor, order: Order, dtype: torch.dtype) -> Tensor:
    place = order.place
    if order.whole:
        rows = y[place]
    else:
        rows = y[place.clamp(max=len(y) - 1)].masked_fill_((place == len(y))[:, None], 0)
    return rows.view(-1, order.k, y.shape[-1]).sum(dim=1, dtype=dtype) if order.k > 1 else rows.to(dtype)


def sorted_by(expert: Tensor) -> Order:
    """Rows of one expert beside one another, in order. expert [T, k]: where each token goes."""
    order = expert.flatten().argsort(stable=True)
    return Order(order, inverse(order, len(order)), expert.shape[1])


def inverse(put: Tensor, size: int) -> Tensor:
    """take [size] with take[put[j]] = j; the others, and whatever is put beyond `size`, are len(put)."""
    take = put.new_full((size + 1,), len(put))
    return take.scatter_(0, put.clamp(max=size), torch.arange(len(put), device=put.device))[:size]


def by_expert(counts: Tensor, rows: int) -> Order:
    """The order by expert of `rows` rows that come rank by rank, in each by expert.

    counts: rows of each (rank, expert), [S, experts]; their sum is `rows`.
    """
    here = torch.arange(rows, device=counts.device)
    ends = counts.flatten().cumsum(0)
    block = torch.searchsorted(ends, here, right=True)
    turned = counts.t().flatten()
    starts = (turned.cumsum(0) - turned).view(counts.shape[1], -1).t().flatten()
    place = here - (ends - counts.flatten())[block] + starts[block]
    return Order(inverse(place, rows), place, 1)


def with_room(order: Order, counts: Tensor, capacity: int) -> Order:
    """`order` where the rows for each rank lie in a part of `capacity` rows of their own; those beyond it are left out.

    counts: rows of each (rank, expert), [S, experts], as they lie in `order`.
    """
    rows, size = len(order.order), len(counts) * capacity
    here = torch.arange(rows, device=counts.device)
    ends = counts.sum(dim=1).cumsum(0)
    rank = torch.searchsorted(ends, here, right=True)
    at = here - (ends - counts.sum(dim=1))[rank]
    slot = torch.where(at < capacity, rank * capacity + at, size)
    taken = inverse(slot, size).clamp(max=max(rows - 1, 0))
    return Order(order.order[taken] if rows else taken, slot[order.place], order.k, whole=False)
