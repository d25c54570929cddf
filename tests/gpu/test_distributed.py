"""Two ranks with a GPU each, one of them without a single token: every gradient is reduced, as on one GPU."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from tests.cases import Splits, full
from tests.compare import assert_bitwise_equal
from tests.models import MLP, Inputs, step

pytestmark = pytest.mark.gpu("sm_90a")

HOT, COLD = full("hot", 50, 0, 90, 20), Splits("cold", (0, 0, 0, 0), 0)
LAYER = MLP("scaled_swiglu", hidden=128, intermediate=64, bias=True, scale_bias=True)


def _step(device: str, splits: Splits, parallel: bool) -> dict[str, Tensor]:
    """One training step from one seed."""
    torch.manual_seed(0)
    model = LAYER.build(HOT, device, torch.bfloat16, on_unfused="error")
    inputs = Inputs.random(splits, LAYER.hidden, device, torch.bfloat16)
    found = step(DistributedDataParallel(model, device_ids=[device]) if parallel else model, LAYER, inputs)
    assert found.pop("y").shape == (splits.rows, LAYER.hidden)
    return {name.replace("dmodule.", "d"): t.cpu() for name, t in found.items() if "." in name}


def _rank(rank: int, folder: str) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    torch.save(_step(f"cuda:{rank}", (HOT, COLD)[rank], True), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_rank_without_tokens_takes_part_in_the_reduction(tmp_path: Path) -> None:
    mp.spawn(_rank, args=(str(tmp_path),), nprocs=2)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    alone = _step("cuda:0", HOT, False)
    assert len(alone) == 16 and alone.keys() == ranks[0].keys()
    for name, want in alone.items():
        for found in ranks:
            assert_bitwise_equal(found[name], want / 2, name)  # the mean with zeros
