"""Skips tests marked `gpu` where there is no fitting CUDA device, and says what there is instead.

`@pytest.mark.gpu` wants any CUDA device, `@pytest.mark.gpu("sm_90a", ...)` one of these architectures.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from cute_kernels.target import Target
from fusible_ops import casts
from tests.places import PLACES, Place

torch.set_num_threads(1)  # the shapes are small, and threads that wait for each other are slow on a busy machine


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [(item, mark) for item in items if (mark := item.get_closest_marker("gpu"))]
    if not marked:
        return
    here = Target.of("cuda" if torch.cuda.is_available() else "cpu").arch
    for item, mark in marked:
        if here == "cpu" or (mark.args and here not in mark.args):
            wanted = f"a device of {' or '.join(mark.args)}" if mark.args else "a CUDA device"
            item.add_marker(pytest.mark.skip(reason=f"needs {wanted}; this is {here}"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What the checks of Blackwell calls noted (`record_property("call", ...)`): each call and its seconds, and what is
    said of each wrong one.
    """
    passed = terminalreporter.getreports("passed")
    noted = [value for report in passed for name, value in report.user_properties if name == "call"]
    if noted:
        terminalreporter.section(f"{len(noted)} calls of cuDNN Frontend, checked without a Blackwell")
        for line in sorted(map(str, noted)):
            terminalreporter.write_line(line)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test starts from the same random state."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def no_captured_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process keeps no casts once a CUDA graph holds an optimizer step; one test's is none of the next one's."""
    monkeypatch.setattr(casts._optimizers, "is_captured", False)


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """A device, fused or not; see `tests.places`."""
    with request.param.context():
        yield request.param
