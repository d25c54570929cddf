"""Megatron-Core's mixture of experts, unchanged, on our kernels: through the plug-in for Transformer Engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fusible_ops.integrations import transformer_engine as plugin
from tests import megatron_layer
from tests.ranks import on_ranks, planned

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


def _agrees(device: str, rank: int) -> None:
    megatron_layer.load()
    plugin.install()
    with megatron_layer.process_group():
        for kind in megatron_layer.KINDS:
            megatron_layer.assert_agrees(kind, device)


@pytest.mark.gpu("sm_90a")
def test_experts_of_two_ranks(tmp_path: Path) -> None:
    """Expert parallelism, Megatron's all-to-all."""
    megatron_layer.load()
    on_ranks(_agrees, 2, "cuda", tmp_path / "ranks")
