"""Megatron-Core's mixture of experts, unchanged, on our kernels: through the plug-in for Transformer Engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import multiprocessing

from fusible_ops.integrations import transformer_engine as plugin
from tests import megatron_layer
from tests.models import as_if_on

DEVICE = "cuda" if megatron_layer.on_gpu() else "cpu"


@pytest.fixture
def megatron() -> Iterator[None]:
    megatron_layer.load()
    plugin.install()
    try:
        with megatron_layer.process_group():
            if DEVICE == "cpu":
                with as_if_on("sm_90a"):
                    yield
            else:
                yield
    finally:
        plugin.uninstall()


@pytest.mark.parametrize("kind", megatron_layer.KINDS)
def test_an_unchanged_layer_agrees_with_megatrons_own_experts(megatron: None, kind: str) -> None:
    megatron_layer.assert_agrees(kind, DEVICE)


def _rank(rank: int, port: int) -> None:
    torch.cuda.set_device(rank)
    megatron_layer.load()
    plugin.install()
    with megatron_layer.process_group(rank, 2, port):
        for kind in megatron_layer.KINDS:
            megatron_layer.assert_agrees(kind, "cuda")


@pytest.mark.gpu("sm_90a")
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_experts_of_two_ranks() -> None:
    """Expert parallelism, Megatron's all-to-all."""
    megatron_layer.load()
    multiprocessing.spawn(_rank, (megatron_layer.free_port(),), nprocs=2)
