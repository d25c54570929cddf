"""Megatron-Core's mixture of experts, unchanged, on our kernels: through the plug-in for Transformer Engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fusible_ops.integrations import transformer_engine as plugin
from tests import megatron_layer
from tests.ranks import DEVICES, ONE_GPU, on_ranks, planned

DEVICE = "cuda" if megatron_layer.on_gpu() else "cpu"


@pytest.fixture
def megatron() -> Iterator[None]:
    megatron_layer.load()
    plugin.install()
    try:
        with megatron_layer.process_group(), planned(DEVICE, fused=True):
            yield
    finally:
        plugin.uninstall()


@pytest.mark.parametrize("kind", megatron_layer.KINDS)
def test_an_unchanged_layer_agrees_with_megatrons_own_experts(megatron: None, kind: str) -> None:
    megatron_layer.assert_agrees(kind, DEVICE)


def _differences(device: str, rank: int) -> list[str]:
    """Of all kinds: a rank that stopped at one would leave the other waiting."""
    megatron_layer.load()
    plugin.install()
    found = []
    with megatron_layer.process_group(), planned(torch.device(device).type, fused=True):
        for kind in megatron_layer.KINDS:
            try:
                megatron_layer.assert_agrees(kind, device)
            except AssertionError as error:
                found.append(f"rank {rank}, {error}")
    return found


@pytest.mark.parametrize("device", [*DEVICES, ONE_GPU])
def test_experts_of_two_ranks(tmp_path: Path, device: str) -> None:
    """Expert parallelism; on GPUs, also on one that both share, Megatron's all-to-all."""
    if device == "cpu" and DEVICE != "cpu":
        pytest.skip("where there is a GPU, Megatron uses it")
    megatron_layer.load()
    wrong = [each for found in on_ranks(_differences, 2, device, tmp_path / "ranks") for each in found]
    assert not wrong, "\n".join(wrong)
