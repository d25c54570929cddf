"""Rows by expert and back, for whatever ids a router gives."""

from __future__ import annotations

import pytest
import torch

from fusible_ops.integrations.hf_routing import route, to_experts, to_tokens
from tests.compare import assert_bitwise_equal

EXPERTS = 4
CHOICES = {
    "all here": [[0, 1], [3, 2], [1, 1], [2, 0]],
    "elsewhere": [[4, 1], [3, 9], [1, 4], [4, 0]],
    "negative": [[-1, 1], [3, -1], [-7, -1], [-1, 0]],
    "both": [[-1, 4], [3, 5], [-2, 1], [4, -1]],
    "none": [[-1, 4], [-1, -1], [7, 4], [4, -1]],
    "ends": [[-(2**31), 2**31 - 1], [0, 3], [-(2**31) + 1, 0], [2**31 - 2, 3]],
}


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("kind", CHOICES)
def test_every_id(kind: str, dtype: torch.dtype) -> None:
    """Each expert has its own rows, in the order of tokens; ids of no expert here have the rows behind them all."""
    choices = torch.tensor(CHOICES[kind], dtype=dtype)
    routing = route(choices, EXPERTS)
    ids = choices.flatten().tolist()
    here = [[at for at, i in enumerate(ids) if i == expert] for expert in range(EXPERTS)]
    used = sum(map(len, here))
    assert routing.splits.tolist() == list(map(len, here))
    assert routing.order[:used].tolist() == [at for rows in here for at in rows]
    assert sorted(routing.order.tolist()) == list(range(len(ids)))
    assert_bitwise_equal(routing.order[routing.places.flatten()], torch.arange(len(ids)))


@pytest.mark.parametrize("kind", CHOICES)
def test_what_a_token_gets(kind: str) -> None:
    """The sum over its choices that are here, and gradients of those alone."""
    torch.manual_seed(0)
    choices = torch.tensor(CHOICES[kind])
    x, weights = torch.randn(4, 8, dtype=torch.float64), torch.rand(4, 2, dtype=torch.float64)
    x.requires_grad_(), weights.requires_grad_()
    factors = torch.tensor([2.0, 3.0, 5.0, 7.0], dtype=torch.float64)
    routing = route(choices, EXPERTS)
    rows, probs = to_experts(x, weights, routing)
    used = int(routing.splits.sum())
    scale = torch.cat([factors.repeat_interleave(routing.splits), torch.zeros(len(rows) - used, dtype=torch.float64)])
    out = to_tokens(rows * (probs * scale)[:, None], routing)
    inside = (choices >= 0) & (choices < EXPERTS)
    share = torch.where(inside, factors[choices.clamp(0, EXPERTS - 1)], 0) * weights
    want = share.sum(1, keepdim=True) * x
    torch.testing.assert_close(out, want)
    got = torch.autograd.grad(out.sum(), [x, weights])
    for a, b in zip(got, torch.autograd.grad(want.sum(), [x, weights]), strict=True):
        torch.testing.assert_close(a, b)
