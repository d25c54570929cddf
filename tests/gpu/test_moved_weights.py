"""Weights whose memory is freed after forward and elsewhere before backward, as FSDP2 gathers and frees them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

import fusible_ops as ops
from tests.cases import full
from tests.compare import assert_bitwise_equal
from tests.models import MLP, Inputs

pytestmark = pytest.mark.gpu("sm_90a")
SPLITS = full("uneven", 130, 0, 257, 1)


def move(parameters: Sequence[torch.nn.Parameter]) -> list[Tensor]:
    """Free their memory, have NaN in it, and give them memory elsewhere with the same values. What is in the way."""
    values = [p.detach().clone() for p in parameters]
    storages = {p.untyped_storage()._cdata: p.untyped_storage() for p in parameters}.values()
    sizes, places = [s.nbytes() for s in storages], [s.data_ptr() for s in storages]
    for storage in storages:
        storage.resize_(0)
    in_the_way: list[Tensor] = []
    for size, place in zip(sizes, places, strict=True):
        while not any(0 <= place - t.data_ptr() < t.nbytes for t in in_the_way):
            in_the_way.append(torch.full((size // 4,), float("nan"), device="cuda"))
            assert len(in_the_way) < 1000, "the allocator keeps that memory to itself"
    for storage, size in zip(storages, sizes, strict=True):
        storage.resize_(size)
    assert not {s.data_ptr() for s in storages} & set(places), "nothing has moved"
    for p, value in zip(parameters, values, strict=True):
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(p):
            p.copy_(value)
    return in_the_way


@pytest.mark.parametrize("recipe", [None, ops.Float8BlockScaling()], ids=["bf16", "fp8"])
@pytest.mark.parametrize("layout", ["packed", "separate", "single"])
def test_backward_finds_weights_where_they_are_then(layout: str, recipe: ops.Recipe | None) -> None:
    mlp = MLP(hidden=256, intermediate=128, linear={"single_grouped_weight": layout == "single"})
    model = mlp.build(SPLITS, "cuda", torch.bfloat16, on_unfused="error")
    parameters = list(model.parameters())
    if layout == "separate":
        for p in parameters:
            p.data = p.data.clone()
    inputs = Inputs.random(SPLITS, mlp.hidden, "cuda", torch.bfloat16)
    inputs.x.requires_grad_()

    def train(moves: bool) -> list[Tensor]:
        with ops.autocast(enabled=recipe is not None, recipe=recipe):
            y = model(inputs.x, *mlp.extras(SPLITS.tensor("cuda"), inputs.probs))
        kept = move(parameters) if moves else []
        grads = torch.autograd.grad(y, [inputs.x, *parameters], inputs.dy)
        del kept
        return [y.detach(), *grads]

    want = train(moves=False)
    for moves in (False, True, True, False):  # from the second call on, calls that are alike take a shorter way
        for got, wanted in zip(train(moves), want, strict=True):
            assert_bitwise_equal(got, wanted)
