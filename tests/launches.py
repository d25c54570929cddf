"""Launches of host functions for Hopper, recorded where nothing can run."""

from __future__ import annotations

from typing import Any

import pytest

from cute_kernels.hopper import operands


def recorded_launches(monkeypatch: pytest.MonkeyPatch, host: Any) -> list[tuple[Any, int]]:
    """(options, grid) of each launch of a host module to come, as on 132 SMs. The grid is the last argument but one."""
    launched: list[tuple[Any, int]] = []
    monkeypatch.setattr(operands, "multiprocessors", lambda kernel, device, sm_margin=0: 132 - sm_margin)
    monkeypatch.setattr(host.launch, "current_stream", lambda device: 7)
    monkeypatch.setattr(
        host.launch, "kernel", lambda module, options, arch: lambda *given: launched.append((options, given[-2]))
    )
    return launched
