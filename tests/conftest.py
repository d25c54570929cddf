"""Skips tests marked `gpu` where there is no CUDA device, and says so."""

from __future__ import annotations

import pytest
import torch


def _reason_without_gpu() -> str | None:
    if not torch.cuda.is_available():
        return "needs a CUDA device; torch finds none"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = _reason_without_gpu()
    if reason is None:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test starts from the same random state."""
    torch.manual_seed(0)
