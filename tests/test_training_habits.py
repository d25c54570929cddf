"""What training loops do around a layer: loss scaling, clipping, fused optimizers, parameter groups, averages,
evaluation between steps, activation checkpointing of both kinds.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fusible_ops as ops
from tests.cases import TAIL
from tests.compare import assert_bitwise_equal
from tests.models import MLP, Inputs
from tests.places import Place

BF16, FP16 = torch.bfloat16, torch.float16


class Model(nn.Module):
    """y = head(x + mlp(x)); called with the inputs of `tests.models.Inputs`."""

    def __init__(self, place: Place, dtype: torch.dtype = BF16) -> None:
        super().__init__()
        self.kind = MLP("scaled_swiglu", bias=True)
        self.mlp = place.build(self.kind, TAIL, dtype)
        self.head = nn.Linear(64, 4, device=place.device, dtype=dtype)

    def forward(self, x: Tensor, splits: Tensor, probs: Tensor) -> Tensor:
        return self.head(x + self.mlp(x, *self.kind.extras(splits, probs)))


def batch(place: Place, seed: int, dtype: torch.dtype = BF16) -> tuple[Tensor, Tensor, Tensor]:
    given = Inputs.random(TAIL, 64, place.device, dtype, seed)
    return given.x.nan_to_num(0.0), TAIL.tensor(place.device), given.probs.nan_to_num(0.5)


def loss_of(model: nn.Module, given: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    return model(*given).float().square().mean()


def state(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def test_grad_scaler(place: Place) -> None:
    """FP32 weights under FP16 autocast: an overflow skips the step and halves the scale."""
    model, given = Model(place, torch.float32), batch(place, 0, torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def backward(scale: float) -> torch.amp.GradScaler:
        optimizer.zero_grad()
        scaler = torch.amp.GradScaler(place.device, init_scale=scale)
        with torch.autocast(place.device, FP16):
            loss = loss_of(model, given)
        scaler.scale(loss).backward()
        return scaler

    before = state(model)
    scaler = backward(2.0**40)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**39
    for a, b in zip(state(model), before, strict=True):
        assert_bitwise_equal(a, b)
    backward(1.0)
    plain = [p.grad.clone() for p in model.parameters()]
    scaler = backward(16.0)
    scaler.unscale_(optimizer)
    for a, p in zip(plain, model.parameters(), strict=True):
        torch.testing.assert_close(p.grad, a, rtol=1e-2, atol=1e-4)
    scaler.step(optimizer)
    assert any(not torch.equal(a, b) for a, b in zip(state(model), before, strict=True))


def test_clipping_and_parameter_groups(place: Place) -> None:
    """Experts learn faster, biases decay not; the norm of all gradients together is clipped."""
    model, plain = Model(place), Model(Place(place.device, False))
    plain.load_state_dict(model.state_dict())
    for each in (model, plain):
        biases = [p for name, p in each.named_parameters() if "bias" in name]
        weights = [p for name, p in each.named_parameters() if "bias" not in name]
        groups = [{"params": weights, "lr": 0.1}, {"params": biases, "lr": 0.01, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, weight_decay=0.1)
        for seed in range(3):
            optimizer.zero_grad()
            loss_of(each, batch(place, seed)).backward()
            norm = nn.utils.clip_grad_norm_(each.parameters(), 0.01)
            assert norm > 0.01
            clipped = torch.stack([p.grad.float().norm() for p in each.parameters()]).norm()
            assert clipped <= 0.011
            optimizer.step()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert (a - b).float().norm() <= 0.2 * b.float().norm() + 0.05


@pytest.mark.parametrize("kind", ["foreach", "fused"])
def test_optimizers_that_write_many_parameters_at_once(place: Place, kind: str) -> None:
    """The next forward sees what they wrote: as one that steps parameter by parameter."""
    results = []
    for how in ({kind: True}, {"foreach": False}):
        torch.manual_seed(0)
        model = Model(place)
        optimizer = torch.optim.AdamW(model.parameters(), 0.002, **how)
        losses = []
        for _ in range(4):
            optimizer.zero_grad()
            loss = loss_of(model, batch(place, 0))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        results.append(losses)
    assert results[0] == pytest.approx(results[1], rel=0.05)
    assert results[0][-1] < results[0][0]


@pytest.mark.parametrize("autocast", [False, True])
def test_evaluation_between_steps(place: Place, autocast: bool) -> None:
    """Weights that an optimizer, or an average, changed are read anew, with gradients recorded or not."""
    model = Model(place, BF16).to(torch.float32 if autocast else BF16)
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    given = batch(place, 0, torch.float32 if autocast else BF16)

    def run(each: nn.Module) -> Tensor:
        with torch.autocast(place.device, BF16, enabled=autocast):
            return each(*given)

    for _ in range(3):
        with torch.no_grad():
            evaluated = run(model)
        trained = run(model)
        assert_bitwise_equal(trained.detach(), evaluated)
        optimizer.zero_grad()
        trained.float().square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            assert not torch.equal(run(model), evaluated)
            former = run(average)
            for a, p in zip(average.parameters(), model.parameters(), strict=True):
                a.lerp_(p, 0.5)
            assert not torch.equal(run(average), former)
    fresh = Model(place).to(torch.float32 if autocast else BF16)
    fresh.load_state_dict(average.state_dict())
    with torch.no_grad():
        assert_bitwise_equal(run(fresh), run(average))


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(place: Place, reentrant: bool) -> None:
    model = Model(place)
    x, splits, probs = batch(place, 0)
    results = []
    for call in (model, lambda *given: checkpoint(model, *given, use_reentrant=reentrant)):
        model.zero_grad()
        given, weights = x.clone().requires_grad_(), probs.clone().requires_grad_()
        y = call(given, splits, weights)
        y.float().square().mean().backward()
        results.append([y.detach(), given.grad, weights.grad, *(p.grad for p in model.parameters())])
    for a, b in zip(*results, strict=True):
        assert_bitwise_equal(a, b)


def test_gradients_add_up_over_micro_batches(place: Place) -> None:
    model = Model(place)
    parts = []
    for seed in range(3):
        model.zero_grad()
        loss_of(model, batch(place, seed)).backward()
        parts.append([p.grad.clone() for p in model.parameters()])
    model.zero_grad()
    for seed in range(3):
        loss_of(model, batch(place, seed)).backward()
    for sums, p in zip(zip(*parts, strict=True), model.parameters(), strict=True):
        torch.testing.assert_close(p.grad, sums[0] + sums[1] + sums[2], rtol=2e-2, atol=1e-4)


def test_hooks_see_what_parameters_get(place: Place) -> None:
    """What data parallelism and optimizers in backward hang on parameters."""
    model = Model(place)
    seen: list[str] = []
    hooks: list[Callable[[], None]] = []
    for name, p in model.named_parameters():
        hooks.append(p.register_post_accumulate_grad_hook(lambda p, name=name: seen.append(name)).remove)
    loss_of(model, batch(place, 0)).backward()
    assert sorted(seen) == sorted(name for name, _ in model.named_parameters())
    for remove in hooks:
        remove()


def test_nothing_of_a_step_is_kept_by_the_ops(place: Place) -> None:
    """A model that has trained copies to the same bytes as one that has not: no step hides in it."""
    model = Model(place)
    loss_of(model, batch(place, 0)).backward()
    other = ops.Sequential(*copy.deepcopy(list(model.mlp)), **place.options())
    given = batch(place, 1)
    with torch.no_grad():
        extras = model.kind.extras(*given[1:])
        assert_bitwise_equal(other(given[0], *extras), model.mlp(given[0], *extras))
