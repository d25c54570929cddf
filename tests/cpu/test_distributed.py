"""Two ranks, one of them without a single token: every gradient is reduced, nobody waits for ever."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.cases import Splits, full
from tests.compare import assert_bitwise_equal
from tests.models import MLP, Inputs, as_if_on, step

HOT, COLD = full("hot", 5, 0, 9, 2), Splits("cold", (0, 0, 0, 0), 0)
LAYER = MLP("scaled_swiglu", hidden=16, intermediate=8, bias=True, scale_bias=True)
ARCHITECTURES = ("cpu", "sm_90a")


def _step(arch: str, splits: Splits, wrap: type[nn.Module] | None = None) -> dict[str, Tensor]:
    """One training step from one seed, unfused or as on a Hopper GPU."""
    torch.manual_seed(0)
    model = LAYER.build(HOT, "cpu", torch.bfloat16)
    with as_if_on(arch):
        found = step(wrap(model) if wrap else model, LAYER, Inputs.random(splits, LAYER.hidden, "cpu", torch.bfloat16))
    assert found.pop("y").shape == (splits.rows, LAYER.hidden)
    return {name.replace("dmodule.", "d"): t for name, t in found.items() if "." in name}


def _rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store, wait = f"file://{folder}/store", timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=wait)
    found = {arch: _step(arch, (HOT, COLD)[rank], DistributedDataParallel) for arch in ARCHITECTURES}
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_a_rank_without_tokens_takes_part_in_the_reduction(tmp_path: Path) -> None:
    mp.spawn(_rank, args=(str(tmp_path),), nprocs=2)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for arch in ARCHITECTURES:
        alone = _step(arch, HOT)
        assert len(alone) == 16 and alone.keys() == ranks[0][arch].keys()
        for name, want in alone.items():
            for found in ranks:
                assert_bitwise_equal(found[arch][name], want / 2, name)  # the mean with zeros
