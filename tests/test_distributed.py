"""A grouped MLP under DDP and FSDP2 on two ranks, one of them at times without a single token.

Gradients and weights are those of one process that has the tokens of both. Between CPU processes by gloo, between two
GPUs by NCCL.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fusible_ops as ops
from tests.cases import Splits, full
from tests.compare import assert_bitwise_equal
from tests.models import MLP, Inputs
from tests.ranks import DEVICES, on_ranks, planned

RANKS = 2
HOT, WARM = full("hot", 50, 0, 90), full("warm", 3, 70, 1)
COLD, ONLY_TAIL = Splits("cold", (0, 0, 0), 0), Splits("only_tail", (0, 0, 0), 32)
STEPS = ((HOT, WARM), (HOT, COLD), (ONLY_TAIL, HOT), (COLD, COLD))
"""What each rank has at each step."""
BLOCK = ops.Float8BlockScaling()


@dataclass(frozen=True)
class Case:
    """A layer, and how it runs. mixed: parameters are FP32, and BF16 where they are gathered."""

    name: str
    recipe: ops.Recipe | None = None
    fused: bool = True
    mixed: bool = False
    bias: bool = True
    linear: dict[str, Any] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        return self.name

    @property
    def mlp(self) -> MLP:
        return MLP("scaled_swiglu", hidden=128, intermediate=64, bias=self.bias, scale_bias=True, linear=self.linear)

    def build(self, device: str) -> ops.Sequential:
        torch.manual_seed(0)
        dtype = torch.float32 if self.mixed else torch.bfloat16
        return self.mlp.build(HOT, device, dtype, on_unfused="error" if self.fused else "allow")

    @contextlib.contextmanager
    def running(self, device: str) -> Iterator[None]:
        kind = torch.device(device).type
        with planned(kind, self.fused), ops.autocast(enabled=self.recipe is not None, recipe=self.recipe):
            yield

    def inputs(self, splits: Splits, device: str, seed: int) -> Inputs:
        return Inputs.random(splits, self.mlp.hidden, device, torch.bfloat16, seed)

    def forward(self, model: nn.Module, inputs: Inputs) -> Tensor:
        return model(inputs.x, *self.mlp.extras(inputs.splits.tensor(inputs.x.device), inputs.probs))

    def backward(self, model: nn.Module, splits: Splits, device: str, seed: int) -> Tensor:
        """Adds to the parameters' gradients; y."""
        inputs = self.inputs(splits, device, seed)
        inputs.x.requires_grad_()
        y = self.forward(model, inputs)
        y.backward(inputs.dy)
        assert inputs.x.grad is not None and y.shape == inputs.x.shape
        assert not y[splits.used :].any() and not inputs.x.grad[splits.used :].any()
        return y.detach()


CASES = (
    Case("bf16"),
    Case("fp8", BLOCK),
    Case("unfused", fused=False),
    Case("one_weight_fp8", BLOCK, bias=False, linear={"single_grouped_weight": True}),
    Case("mixed", mixed=True),
    Case("mixed_fp8", BLOCK, mixed=True, bias=False, linear={"single_grouped_weight": True}),
)
DDP_CASES = CASES[:2]
DELAYED = Case("delayed", ops.DelayedScaling(), fused=False)


def whole(t: Tensor) -> Tensor:
    """All of a sharded tensor."""
    return (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().clone()


def trained(case: Case, model: nn.Module, device: str, ranks: Sequence[int]) -> list[Tensor]:
    """Training steps with what these ranks have: y of each, then each gradient, of each step; the weights at last.

    Several ranks: one after the other in this process, and the mean of their gradients. The second update is made by
    hand, not by an optimizer.
    """
    parameters, found = list(model.parameters()), []
    optimizer = torch.optim.SGD(parameters, lr=0.25)
    with case.running(device):
        for i, step in enumerate(STEPS):
            optimizer.zero_grad()
            gradients: list[list[Tensor]] = []
            for rank in ranks:
                found.append(case.backward(model, step[rank], device, i))
                gradients.append([p.grad for p in parameters])
                assert all(grad is not None for grad in gradients[-1]), "every parameter has a gradient"
                if len(ranks) > 1:
                    optimizer.zero_grad()
            if len(ranks) > 1:
                for p, *each in zip(parameters, *gradients, strict=True):
                    p.grad = torch.stack(each).to(p.dtype).sum(dim=0) / len(each)
            found += [whole(p.grad) for p in parameters]
            if i == 1:
                with torch.no_grad():
                    for p in parameters:
                        p.mul_(0.5)
            else:
                optimizer.step()
    return found + [whole(p) for p in parameters]


# ----------------------------------------------------------------------------------------------------------------------
# On the ranks


def sharded(case: Case, device: str) -> ops.Sequential:
    model = case.build(device)
    bf16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    return fully_shard(model, mp_policy=bf16 if case.mixed else MixedPrecisionPolicy())


def data_parallel(device: str, rank: int) -> dict[str, list[Tensor]]:
    ids = None if device == "cpu" else [device]
    return {
        str(case): trained(case, DistributedDataParallel(case.build(device), device_ids=ids), device, [rank])
        for case in DDP_CASES
    }


def fully_sharded(device: str, rank: int) -> dict[str, list[Tensor]]:
    return {str(case): trained(case, sharded(case, device), device, [rank]) for case in CASES}


def states(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Any]:
    both = get_state_dict(model, optimizer)
    return dict(zip(("model", "optimizer"), both, strict=True))


def saved_and_loaded(device: str, rank: int, case: Case, folder: Path) -> list[Tensor]:
    """y and the weights of a model that trained on after its checkpoint, and of another that was loaded from it.

    The other had trained otherwise, so that all that it keeps is of other weights.
    """
    found = []
    models = sharded(case, device), sharded(case, device)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    with case.running(device):
        for seed, model, optimizer in zip((1, 2), models, optimizers, strict=True):
            case.backward(model, HOT, device, seed)
            optimizer.step()
            optimizer.zero_grad()
        dcp.save(states(optimizers[0], models[0]), checkpoint_id=folder)
        loaded = states(optimizers[1], models[1])
        dcp.load(loaded, checkpoint_id=folder)
        set_state_dict(models[1], optimizers[1], model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
        for model, optimizer in zip(models, optimizers, strict=True):
            y = case.backward(model, WARM, device, 3)
            optimizer.step()
            found += [y, *map(whole, model.parameters())]
    return found


def otherwise(device: str, rank: int) -> dict[str, Any]:
    """What else is done with a sharded model."""
    case, found = Case("fp8", BLOCK), {}
    inputs = case.inputs(HOT, device, 7)
    inputs.x.requires_grad_()
    with case.running(device):
        assert eights_saved(lambda: case.forward(sharded(case, device), inputs)) == 0
        assert eights_saved(lambda: case.forward(case.build(device), inputs)) == 3 * (128 * 128 + 64 * 128)
        model = sharded(case, device)
        y = case.forward(model, inputs)
        y.backward(inputs.dy)
        found["direct"] = [y.detach(), *[whole(p.grad) for p in model.parameters()]]
        model.zero_grad()
        y = checkpoint(case.forward, model, inputs, use_reentrant=False)
        y.backward(inputs.dy)
        found["checkpointed"] = [y.detach(), *[whole(p.grad) for p in model.parameters()]]

        meta = case.mlp.build(HOT, "meta", torch.bfloat16)
        fully_shard(meta)
        meta.to_empty(device=device)
        with torch.no_grad():
            for mine, theirs in zip(meta.parameters(), model.parameters(), strict=True):
                mine.copy_(theirs)
        found["materialised"] = case.forward(meta, inputs).detach()
        found["y"] = y.detach()

        alone = case.build(device)
        fully_shard(alone[0])
        with pytest.raises(RuntimeError, match="apply fully_shard to the Sequential"):
            case.forward(alone, inputs)
    return found


def eights_saved(run: Callable[[], object]) -> int:
    """Bytes of weights in FP8 that are kept for backward."""
    sizes = []

    def pack(t: Tensor) -> Tensor:
        if t.dtype == torch.float8_e4m3fn and t.dim() == 3:
            sizes.append(t.numel())
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        run()
    return sum(sizes)


def all_of_it(device: str, rank: int, folder: Path) -> dict[str, Any]:
    return {
        "ddp": data_parallel(device, rank),
        "fsdp": fully_sharded(device, rank),
        "bf16 checkpoint": saved_and_loaded(device, rank, CASES[0], folder / "bf16"),
        "fp8 checkpoint": saved_and_loaded(device, rank, CASES[3], folder / "fp8"),
        "delayed checkpoint": saved_and_loaded(device, rank, DELAYED, folder / "delayed"),
        "otherwise": otherwise(device, rank),
    }


# ----------------------------------------------------------------------------------------------------------------------
# Here


@dataclass
class Ranks:
    """What each rank found, and where its checkpoints are."""

    device: str
    found: list[dict[str, Any]]
    folder: Path


@pytest.fixture(scope="module", params=DEVICES)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    folder = tmp_path_factory.mktemp("ranks")
    return Ranks(request.param, on_ranks(all_of_it, RANKS, request.param, folder, folder), folder)


@cache
def alone(case: Case, device: str) -> tuple[list[Tensor], int]:
    """`trained` in this process with what all ranks have, and how many parameters there are."""
    model = Rounded(case.build(device)) if case.mixed else case.build(device)
    return [t.cpu() for t in trained(case, model, device, range(RANKS))], len(list(model.parameters()))


def assert_as_alone(case: Case, device: str, found: list[list[Tensor]]) -> None:
    """found: `trained` of each rank."""
    want, count = alone(case, device)
    for rank, mine in enumerate(found):
        own, at = [], 0
        for _ in STEPS:
            own += [want[at + rank], *want[at + RANKS : at + RANKS + count]]
            at += RANKS + count
        own += want[at:]
        for i, (got, wanted) in enumerate(zip(mine, own, strict=True)):
            assert_bitwise_equal(got, wanted, f"{case}, rank {rank}, result {i}")


class Rounded(nn.Module):
    """A BF16 layer whose parameters are kept in FP32, in one process."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.full = nn.ParameterList([p.detach().clone() for p in model.parameters()])
        self.layer = [model.bfloat16()]

    def forward(self, *args: Any) -> Tensor:
        (layer,) = self.layer
        rounded = {name: p.bfloat16() for (name, _), p in zip(layer.named_parameters(), self.full, strict=True)}
        return torch.func.functional_call(layer, rounded, args)


@pytest.mark.parametrize("case", DDP_CASES, ids=str)
def test_ddp_trains_as_one_process(ranks: Ranks, case: Case) -> None:
    """Also where a rank has no token: nobody waits for ever, and every gradient is reduced."""
    assert_as_alone(case, ranks.device, [found["ddp"][str(case)] for found in ranks.found])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_fsdp_trains_as_one_process(ranks: Ranks, case: Case) -> None:
    """Weights that are quantised once per update are those of the last one, whoever made it."""
    assert_as_alone(case, ranks.device, [found["fsdp"][str(case)] for found in ranks.found])


@pytest.mark.parametrize("name", ["bf16", "fp8", "delayed"])
def test_a_checkpoint_of_shards_resumes(ranks: Ranks, name: str) -> None:
    for found in ranks.found:
        results = found[f"{name} checkpoint"]
        half = len(results) // 2
        for i, (got, want) in enumerate(zip(results[half:], results[:half], strict=True)):
            assert_bitwise_equal(got, want, f"{name}, result {i}")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_of_shards_loads_into_one_process(ranks: Ranks) -> None:
    case = CASES[0]
    model = case.build(ranks.device)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=ranks.folder / "bf16", no_dist=True)
    model.load_state_dict(state["model"])
    with case.running(ranks.device):
        y = case.forward(model, case.inputs(WARM, ranks.device, 3))
    assert_bitwise_equal(y.detach().cpu(), ranks.found[0]["bf16 checkpoint"][0])


def test_activation_checkpointing_over_shards(ranks: Ranks) -> None:
    for found in ranks.found:
        for got, want in zip(found["otherwise"]["checkpointed"], found["otherwise"]["direct"], strict=True):
            assert_bitwise_equal(got, want)


def test_shards_without_values_become_real(ranks: Ranks) -> None:
    for found in ranks.found:
        assert_bitwise_equal(found["otherwise"]["materialised"], found["otherwise"]["y"])
