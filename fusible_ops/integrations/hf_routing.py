"""Tokens to the rows of their experts and back, without the host: for experts modules of Hugging Face transformers.

T tokens, K choices of each, S = T·K rows, G experts. Rows are sorted by expert, in the order of tokens within one.
Neither direction scatters, forward or backward, so the same bits come out run after run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Routing:
    """order [S]: for each row its (token, choice), as token·K + choice. tokens [S]: the token of each row.
    places [T, K]: the row of each. splits [G]: rows of each expert. All int64. Rows past the last split belong to no
    expert here: choices of ids outside of 0 to G - 1.
    """

    order: Tensor
    tokens: Tensor
    places: Tensor
    splits: Tensor


def route(choices: Tensor, experts: int) -> Routing:
    """choices [T, K], of a signed integer dtype: expert ids from 0 on. Others, `experts` or more (somebody else's
    experts) or negative (nobody's), lie behind those.
    """
    least = torch.iinfo(choices.dtype).min  # whose bit turned over puts negative numbers behind the others
    ids, order = torch.sort(choices.reshape(-1) ^ least, stable=True)
    rows = torch.arange(ids.shape[0], dtype=order.dtype, device=order.device)
    places = torch.empty_like(order).scatter(0, order, rows)
    ends = torch.searchsorted(ids, torch.arange(least, least + experts + 1, dtype=ids.dtype, device=ids.device))
    return Routing(order, order // choices.shape[1], places.view(choices.shape), ends.diff())


def to_experts(x: Tensor, weights: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """x [T, H] and router weights [T, K] as rows: [S, H] and [S]."""
    return _ToExperts.apply(x, weights, routing.order, routing.tokens, routing.places)


def to_tokens(y: Tensor, routing: Routing) -> Tensor:
    """The sum of each token's K rows of y [S, H], in FP32 and rounded once: [T, H]."""
    return _ToTokens.apply(y, routing.tokens, routing.places)


def _sums(y: Tensor, places: Tensor) -> Tensor:
    return y.index_select(0, places.reshape(-1)).view(*places.shape, y.shape[1]).sum(dim=1)


class _ToExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor, order: Tensor, tokens: Tensor, places: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(places)
        ctx.set_materialize_grads(False)
        return x.index_select(0, tokens), weights.reshape(-1).index_select(0, order)

    @staticmethod
    def backward(ctx: Any, drows: Tensor | None, dprobs: Tensor | None) -> tuple[Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        dx = None if drows is None else _sums(drows, places)
        dweights = None if dprobs is None else dprobs.index_select(0, places.reshape(-1)).view(places.shape)
        return dx, dweights, None, None, None


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, tokens: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        return _sums(y, places)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        (tokens,) = ctx.saved_tensors
        return dout.index_select(0, tokens), None, None
