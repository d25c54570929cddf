"""The example of expert parallelism: what the ranks compute together is what one process computes, bit for bit."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fusible_ops as ops
from tests.compare import assert_bitwise_equal
from tests.models import as_if_on, no_host_sync
from tests.ranks import DEVICES, on_ranks

ROOT = Path(__file__).resolve().parents[1]
WIDTH, EXPERTS = 128, 4
SIZES = ((5, 0, 40, 9), (30, 1, 0, 2))
"""Rows of each expert that each rank has, at the first batch; at the second one rank has none, at the third both have
rows for the experts of one rank alone."""
BATCHES = (SIZES, ((0, 0, 0, 0), (3, 7, 0, 11)), ((0, 0, 12, 8), (0, 0, 40, 0)))
CAPACITIES = (None, 64, 8)
RECIPES = {"bf16": None, "fp8": ops.Float8BlockScaling()}


def example(name: str) -> ModuleType:
    """A module of the examples, which find their neighbours as when they are run."""
    folder = str(ROOT / "examples")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module(name)


def config_of(recipe: ops.Recipe | None = None) -> Any:
    return example("moe_lm").ModelConfig(
        width=WIDTH, heads=2, layers=1, experts=EXPERTS, top_k=2, expert_width=64, context=8,
        expert_dtype=torch.bfloat16, recipe=recipe,
    )  # fmt: skip


def experts_of(device: str, recipe: ops.Recipe | None) -> Any:
    torch.manual_seed(0)
    return example("moe_lm").Experts(config_of(recipe), torch.device(device))


def batch_of(device: str, rank: int, sizes: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows, splits, weights and the gradient of the answers of one rank."""
    generator = torch.Generator().manual_seed(rank)
    rows, grad = (torch.randn(sum(sizes), WIDTH, generator=generator).bfloat16().to(device) for _ in range(2))
    weights = torch.rand(sum(sizes), generator=generator).to(device)
    return rows.requires_grad_(), torch.tensor(sizes, device=device), weights.requires_grad_(), grad


def answered(layer: Any, batch: tuple[Tensor, ...]) -> list[Tensor]:
    """What the experts answer, and all gradients."""
    rows, sizes, weights, grad = batch
    y = layer.answers(rows, sizes, weights)
    parameters = list(layer.mlp.parameters())
    return [y.detach(), *torch.autograd.grad(y, [rows, weights, *parameters], grad)]


@contextlib.contextmanager
def fused(device: str):
    with as_if_on("sm_90a") if device == "cpu" else contextlib.nullcontext():
        yield


# ----------------------------------------------------------------------------------------------------------------------
# On the ranks


def all_of_it(device: str, rank: int) -> dict[str, Any]:
    return {"layers": layers(device, rank), "model": whole_model(device, rank)}


def layers(device: str, rank: int) -> dict[str, Any]:
    """Every batch, each way to travel."""
    parallel, found = example("expert_parallel"), {}
    for name, recipe in RECIPES.items():
        whole = experts_of(device, recipe)
        for capacity in CAPACITIES:
            part = parallel.ParallelExperts(config_of(recipe), torch.device(device), capacity)
            part.mlp.on_unfused = "error"
            state = {f"0.experts.{key}": value for key, value in whole.state_dict().items()}
            own = parallel.part_of(state, EXPERTS, rank, dist.get_world_size())
            part.load_state_dict({key.removeprefix("0.experts."): value for key, value in own.items()})
            with fused(device):
                answered(part, batch_of(device, rank, SIZES[rank]))  # kernels are loaded
            for i, sizes in enumerate(BATCHES):
                part.dropped.zero_()
                batch = batch_of(device, rank, sizes[rank])
                with fused(device), free_of_syncs(device, capacity):
                    found[f"{name} {capacity} {i}"] = answered(part, batch)
                found[f"{name} {capacity} {i} dropped"] = part.dropped.item()
    return found


def free_of_syncs(device: str, capacity: int | None) -> contextlib.AbstractContextManager[None]:
    """With a fixed capacity the host waits for nothing."""
    return no_host_sync(torch.device(device).type if capacity is not None else "cpu")


def whole_model(device: str, rank: int) -> dict[str, Any]:
    """The example's training step in FP64: loss, norm of all gradients, gradients, each beside that of one process."""
    torch.set_default_dtype(torch.float64)
    parallel, demo, moe_lm = map(example, ("expert_parallel", "training", "moe_lm"))
    config = moe_lm.ModelConfig(
        width=16, heads=2, layers=2, experts=8, top_k=2, expert_width=8, context=8, expert_dtype=torch.float64
    )
    tokens = torch.randint(256, (8, 9), generator=torch.Generator().manual_seed(0)).to(device)
    found = {}
    for capacity, parts in ((None, 1), (64, 1), (None, 2), (64, 2), (66, 3)):  # no row is dropped
        whole, part = parallel.models(config, torch.device(device), seed=0, capacity=capacity, parts=parts)
        optimizer = parallel.ParallelOptimizer(part, demo.TrainConfig(steps=1, batch=8, learning_rate=1e-3))
        mine = tokens.chunk(dist.get_world_size())[rank]
        loss = parallel.accumulate(part, optimizer, mine, balance=0.01)
        alone = parallel.loss_of(whole, tokens, balance=0.01)
        alone.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in whole.parameters()])
        found[capacity, parts] = [(loss, alone.detach()), (optimizer.norm(), norm)]
        found[capacity, parts] += parallel.differences(whole, part).values()
    return found


# ----------------------------------------------------------------------------------------------------------------------
# Here


@pytest.fixture(scope="module", params=DEVICES)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict]]:
    return request.param, on_ranks(all_of_it, 2, request.param, tmp_path_factory.mktemp("ranks"))


def together(device: str, recipe: ops.Recipe | None, sizes: tuple[tuple[int, ...], ...]) -> list[list[Tensor]]:
    """What one process makes of the batches of both ranks, as each rank has it."""
    batches = [batch_of(device, rank, own) for rank, own in enumerate(sizes)]
    order = [(rank, row) for expert in range(EXPERTS) for rank, own in enumerate(sizes)
             for row in range(sum(own[:expert]), sum(own[: expert + 1]))]  # fmt: skip
    joined = [torch.stack([batches[rank][i][row].detach() for rank, row in order]) for i in (0, 2, 3)]
    total = torch.tensor(sizes, device=device).sum(dim=0)
    with fused(device):
        y, drows, dweights, *grads = answered(
            experts_of(device, recipe), (joined[0].requires_grad_(), total, joined[1].requires_grad_(), joined[2])
        )
    half, found = EXPERTS // 2, []
    for rank in range(2):
        mine = [i for i, (owner, _) in enumerate(order) if owner == rank]
        own = [g for first in (0, EXPERTS) for g in grads[first + rank * half : first + (rank + 1) * half]]
        found.append([t.cpu() for t in (y[mine], drows[mine], dweights[mine], *own)])
    return found


@pytest.mark.parametrize("batch", range(len(BATCHES)))
@pytest.mark.parametrize("capacity", CAPACITIES[:2])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_layer_on_two_ranks_is_the_layer(ranks: Any, recipe: str, capacity: int | None, batch: int) -> None:
    """Answers and gradients bit for bit: also of a rank without tokens, and of experts without any."""
    device, found = ranks
    for rank, want in enumerate(together(device, RECIPES[recipe], BATCHES[batch])):
        for i, (a, b) in enumerate(zip(found[rank]["layers"][f"{recipe} {capacity} {batch}"], want, strict=True)):
            assert_bitwise_equal(a, b, f"rank {rank}, result {i}")
        assert found[rank]["layers"][f"{recipe} {capacity} {batch} dropped"] == 0


def test_rows_beyond_the_capacity_are_dropped(ranks: Any) -> None:
    """They are answered with zeros and get no gradient; the others are as if those had not been there."""
    device, found = ranks
    kept, places = [], []
    for own in SIZES:
        sizes, rows, at = [], [], 0
        for first in (0, 2):
            left = CAPACITIES[2]
            for size in own[first : first + 2]:
                sizes.append(min(size, left))
                rows += range(at, at + sizes[-1])
                left, at = left - sizes[-1], at + size
        kept.append(sizes)
        places.append(rows)
    whole = experts_of(device, None)
    for rank, (sizes, rows) in enumerate(zip(kept, places, strict=True)):
        y, drows, dweights, *_ = found[rank]["layers"][f"bf16 {CAPACITIES[2]} 0"]
        batch = batch_of(device, rank, SIZES[rank])
        few = [t.detach()[rows] for t in (batch[0], batch[2], batch[3])]
        with fused(device):
            want = answered(
                whole,
                (few[0].requires_grad_(), torch.tensor(sizes, device=device), few[1].requires_grad_(), few[2]),
            )
        for got, wanted in zip((y, drows, dweights), want, strict=False):
            assert_bitwise_equal(got[rows], wanted.cpu())
            rest = torch.ones(len(got), dtype=torch.bool).index_fill_(0, torch.tensor(rows), False)
            assert rest.sum() == sum(SIZES[rank]) - len(rows) > 0 and not got[rest].any()
        assert found[rank]["layers"][f"bf16 {CAPACITIES[2]} 0 dropped"] == sum(SIZES[rank]) - len(rows)


def test_a_model_on_two_ranks_has_the_loss_and_gradients_of_one_process(ranks: Any) -> None:
    for found in ranks[1]:
        for pairs in found["model"].values():
            for got, want in pairs:
                torch.testing.assert_close(got, want)


class Noted(torch.autograd.Function):
    """The identity; calls `note` forward and backward."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, note: Callable[[], None]) -> Tensor:
        ctx.note = note
        note()
        return t.view_as(t)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.note()
        return grad, None


@pytest.mark.parametrize(("parts", "travelling"), [(1, [0, 0]), (2, [2, 1, 1, 2])])
def test_a_part_travels_beside_the_products_of_another(
    monkeypatch: pytest.MonkeyPatch, parts: int, travelling: list[int]
) -> None:
    """How many exchanges are under way at each part's products, forward and backward: rows and weights of the next
    part, answers of the last; then their gradients.
    """
    parallel, moe_lm = example("expert_parallel"), example("moe_lm")
    under_way, found = [], []

    class Work:
        def __init__(self) -> None:
            under_way.append(self)

        def wait(self) -> None:
            under_way.remove(self)

    def exchange(result: Tensor, t: Tensor, *sizes: Any, async_op: bool = False) -> Work | None:
        result.copy_(t)
        return Work() if async_op else None

    answers = moe_lm.Experts.answers
    monkeypatch.setattr(
        moe_lm.Experts, "answers", lambda *args: Noted.apply(answers(*args), lambda: found.append(len(under_way)))
    )
    monkeypatch.setattr(dist, "all_to_all_single", exchange)
    monkeypatch.setattr(dist, "all_reduce", lambda t: None)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    layer = parallel.ParallelExperts(config_of(), torch.device("cpu"), capacity=64, parts=parts)
    x = torch.randn(32, WIDTH, requires_grad=True)
    layer(x)[0].sum().backward()
    assert found == travelling and not under_way and x.grad is not None


def test_it_runs_under_torchrun() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launch, str(ROOT / "examples" / "expert_parallel.py"), "--steps", "2", "--batch", "1", "--check"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    loss, alone, worst = re.match(r"loss (\S+), of one process (\S+); .*: (\S+)\n", done.stdout).groups()
    assert abs(float(loss) - float(alone)) < 1e-5 and float(worst) < 1e-5
    assert "step 1: loss" in done.stdout and "dropped" not in done.stdout


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ({"ranks": 3}, "4 experts cannot be shared equally by 3 ranks"),
        ({"capacity": 0}, "capacity must be at least 1; got 0"),
        ({"parts": 0}, "parts must be at least 1; got 0"),
    ],
)
def test_what_cannot_be(monkeypatch: pytest.MonkeyPatch, more: dict[str, int], match: str) -> None:
    """No rows at all from rank to rank would answer every token with zeros."""
    ranks = more.get("ranks", 2)
    monkeypatch.setattr(dist, "get_world_size", lambda: ranks)
    with pytest.raises(ValueError, match=match):
        example("expert_parallel").ParallelExperts(
            config_of(), torch.device("cpu"), more.get("capacity"), more.get("parts", 1)
        )
