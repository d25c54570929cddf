"""Models of Hugging Face transformers over two ranks, on our experts: FSDP2, and transformers' own expert parallelism.

Against one process with the model's own implementation. Between CPU processes by gloo, between two GPUs by NCCL.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fusible_ops.integrations import huggingface
from fusible_ops.integrations.huggingface import NAME
from tests.compare import relative_error
from tests.ranks import DEVICES, on_ranks, planned

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from transformers.distributed import DistributedConfig  # noqa: E402

from tests.hf_models import VOCABULARY, experts_of, small, step  # noqa: E402

RANKS = 2


def tokens(seed: int, device: str = "cpu") -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (2, 12), generator=generator).to(device)


def sharded(device: str, rank: int) -> dict[str, Tensor]:
    """Three steps under FSDP2: parameters are FP32 shards, gathered in BF16."""
    huggingface.install(on_unfused="error")
    with planned(torch.device(device).type, True):
        model = small("gpt_oss", torch.float32, device, NAME)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in model.model.layers:
            fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for seed in range(3):
            optimizer.zero_grad()
            loss = model(input_ids=tokens(RANKS * seed + rank, device), labels=tokens(RANKS * seed + rank, device)).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    return {"losses": torch.stack(losses), **{n: p.full_tensor().detach() for n, p in model.named_parameters()}}


@pytest.mark.parametrize("device", DEVICES)
def test_fsdp2(tmp_path: Path, device: str) -> None:
    results = on_ranks(sharded, RANKS, device, tmp_path / "ranks")
    model = small("gpt_oss")
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for seed in range(3):
        model.zero_grad()
        for rank in range(RANKS):
            ids = tokens(RANKS * seed + rank)
            loss = model(input_ids=ids, labels=ids).loss
            (loss / RANKS).backward()
            assert float(results[rank]["losses"][seed]) == pytest.approx(loss.item(), rel=1e-2)
        optimizer.step()
    for n, p in model.named_parameters():
        if ".experts." in n:
            moved, wanted = results[0][n] - before[n], p.detach() - before[n]
            assert relative_error(moved, wanted) < 0.1, n  # BF16 through two layers and three steps
            assert torch.equal(results[0][n], results[1][n]), n


def parallel(device: str, rank: int, path: Path, how: str) -> dict[str, Tensor]:
    """A step with half of the experts on each rank, which share the batch."""
    huggingface.install()
    config = DistributedConfig(tp_size=RANKS, ep_size=RANKS, ep_implementation=how)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, distributed_config=config, experts_implementation=NAME, dtype=torch.float32
    )
    own = experts_of(model)[0]
    assert own._is_expert_parallel and own.num_experts == 4 and model.config._experts_implementation == NAME
    results = step(model, tokens(0, device), NAME)
    return {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in results.items()}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", ["all_reduce", "all_to_all"])
def test_expert_parallelism(tmp_path: Path, device: str, how: str) -> None:
    model = small("gpt_oss")
    model.save_pretrained(tmp_path / "model")
    results = on_ranks(parallel, RANKS, device, tmp_path / "ranks", tmp_path / "model", how)
    wanted = step(model, tokens(0), "eager")
    for got in results:
        assert got.keys() == wanted.keys()
        for n, t in wanted.items():
            assert relative_error(got[n], t) < 5e-5, n
