"""Processes of one job for tests: NCCL between GPUs; gloo between CPU processes, or such that share a GPU."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.models import as_if_on

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu("sm_90a"))]
ONE_GPU = pytest.param("cuda:0", marks=pytest.mark.gpu("sm_90a"))
"""All ranks on one GPU, for what does not need NCCL."""


def on_ranks(run: Callable[..., Any], ranks: int, device: str, folder: Path, *args: Any) -> list[Any]:
    """What `run(device of the rank, rank, *args)` gives on each rank, with all tensors on the CPU.

    Skips where there are fewer GPUs. A rank that waits long for the others fails.
    """
    if device == "cuda" and torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} CUDA devices, there are {torch.cuda.device_count()}")
    folder.mkdir(exist_ok=True)
    mp.spawn(_rank, args=(run, ranks, device, folder, args), nprocs=ranks)
    return [torch.load(folder / f"{rank}.pt", map_location="cpu", weights_only=False) for rank in range(ranks)]


def _rank(rank: int, run: Callable[..., Any], ranks: int, device: str, folder: Path, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    # As torchrun does; transformers places a model by them.
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    place = f"cuda:{rank}" if device == "cuda" else device
    if device != "cpu":
        torch.cuda.set_device(place)
    store = f"file://{folder}/store"
    wait = timedelta(seconds=60 if device == "cpu" else 300)  # GPUs may have to wait for kernels to be compiled
    dist.init_process_group("nccl" if device == "cuda" else "gloo", store, wait, ranks, rank)
    torch.save(run(place, rank, *args), folder / f"{rank}.pt")
    dist.destroy_process_group()


def planned(device: str, fused: bool) -> contextlib.AbstractContextManager[None]:
    """Fused as on a Hopper GPU: there by its kernels, on a CPU by their reference."""
    return as_if_on("sm_90a") if fused and device == "cpu" else contextlib.nullcontext()
