"""Expert parallelism on two GPUs: a training step as one CUDA graph; outputs complete while NCCL runs beside."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fusible_ops as ops
from tests.cases import full
from tests.compare import assert_bitwise_equal
from tests.gpu.test_graphs import captured
from tests.models import MLP, Inputs
from tests.ranks import on_ranks
from tests.test_expert_parallel import example

pytestmark = pytest.mark.gpu("sm_90a")
SENTINEL = 777.0


class Training:
    """A training step of this rank's experts with a fixed capacity, that a graph can hold."""

    def __init__(self, rank: int, recipe: ops.Recipe | None, parts: int) -> None:
        moe_lm, parallel = example("moe_lm"), example("expert_parallel")
        config = moe_lm.ModelConfig(
            width=128, heads=2, layers=1, experts=8, top_k=2, expert_width=64, context=64,
            expert_dtype=torch.bfloat16, recipe=recipe,
        )  # fmt: skip
        torch.manual_seed(0)
        self.layer = parallel.ParallelExperts(config, torch.device("cuda", rank), 640 * parts, parts)
        self.layer.mlp.on_unfused = "error"
        self.x, self.target = (torch.randn(512, 128, device="cuda") for _ in range(2))
        self.optimizer = torch.optim.AdamW(self.layer.parameters(), lr=1e-2, capturable=True)

    def feed(self, seed: int) -> None:
        generator = torch.Generator("cuda").manual_seed(seed)
        self.x.copy_(torch.randn(512, 128, generator=generator, device="cuda"))
        self.x += torch.randn(128, generator=generator, device="cuda")

    def step(self) -> list[Tensor]:
        self.optimizer.zero_grad()
        y, balance, load = self.layer(self.x)
        ((y.float() - self.target).square().mean() + 0.01 * balance).backward()
        dist.all_reduce(self.layer.router.weight.grad)
        self.optimizer.step()
        return [y.detach(), load, *(p.grad for p in self.layer.parameters())]


def graphed(device: str, rank: int) -> dict[str, list]:
    """Results of replays and of the same steps run eagerly."""
    found = {}
    block = ops.Float8BlockScaling()
    for name, (recipe, parts) in {"bf16": (None, 1), "fp8": (block, 1), "bf16 in halves": (None, 2)}.items():
        eager, replayed = Training(rank, recipe, parts), Training(rank, recipe, parts)
        for _ in range(2):
            eager.step()
        graph, results = captured(replayed.step)
        pairs = []
        for seed in range(4):
            for training in (eager, replayed):
                training.feed(100 * rank + seed)
            graph.replay()
            pairs.append(([t.clone() for t in results], [t.clone() for t in eager.step()]))
        found[name] = pairs
        torch.cuda.synchronize()
        dist.barrier()
        del graph
    return found


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
def test_a_training_step_is_one_graph(tmp_path: Path) -> None:
    """Collectives in it, also beside products; each replay has other tokens that go elsewhere; all bits are eager's."""
    for found in on_ranks(graphed, 2, "cuda", tmp_path):
        for name, pairs in found.items():
            for step, (got, want) in enumerate(pairs):
                for i, (a, b) in enumerate(zip(got, want, strict=True)):
                    assert_bitwise_equal(a, b, f"{name}, step {step}, result {i}")


def beside_nccl(device: str, rank: int, times: int) -> dict[str, tuple[int, int]]:
    """For each way to share the GPU: how many of so many runs left a sentinel, how many other bits than alone."""
    mlp, splits = MLP(hidden=2048, intermediate=512), full("uneven", 1500, 0, 2100, 1, 495)
    model = mlp.build(splits, device, torch.bfloat16, on_unfused="error")
    inputs = Inputs.random(splits, mlp.hidden, device, torch.bfloat16)
    x, dx, y = inputs.x.requires_grad_(), torch.empty_like(inputs.x), torch.empty_like(inputs.x)
    part = torch.randn(1 << 25, device=device)  # so that it takes about as long as the layer
    whole, side, sizes = part.new_empty(2 * len(part)), torch.cuda.Stream(), splits.tensor(device)
    buffers = {0: {"grad_input": dx}, 2: {"output": y}}

    def run() -> list[Tensor]:
        dx.fill_(SENTINEL)
        y.fill_(SENTINEL)
        out = model(x, *mlp.extras(sizes, inputs.probs), op_kwargs=buffers)
        return [y, dx, *torch.autograd.grad(out, [x, *model.parameters()], inputs.dy)]

    found = {}
    for scheduler, margin in (("static", 0), ("dynamic", 0), ("static", 16), ("dynamic", 16)):
        model.scheduler, model.sm_margin = scheduler, margin
        want = [t.clone() for t in run()]
        counts = torch.zeros(2, dtype=torch.int64, device=device)
        side.wait_stream(torch.cuda.current_stream())
        for _ in range(times):
            with torch.cuda.stream(side):
                dist.all_gather_into_tensor(whole, part)
            got = run()
            counts[0] += torch.stack([(t == SENTINEL).any() for t in (y, dx)]).any()
            counts[1] += torch.stack([(a != b).any() for a, b in zip(got, want, strict=True)]).any()
        torch.cuda.current_stream().wait_stream(side)
        found[f"{scheduler}, margin {margin}"] = tuple(counts.tolist())
    return found


def test_outputs_are_complete_beside_an_all_gather(tmp_path: Path) -> None:
    for found in on_ranks(beside_nccl, 2, "cuda", tmp_path, 1000):
        assert found == dict.fromkeys(found, (0, 0)) and len(found) == 4
