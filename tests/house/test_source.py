"""Rules for single files: where the machine is probed, how long a file may be, what it may be called."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.house.sources import PACKAGES, ROOT, name, python_files

TARGET = "cute_kernels/target.py"
PROBES = {
    # dotted name -> why only target.py may say it
    "os.environ": "the environment",
    "os.getenv": "the environment",
    "os.putenv": "the environment",
    "importlib.metadata": "installed versions",
    "torch.cuda.get_device_capability": "the device",
    "torch.cuda.get_device_properties": "the device",
    "get_device_capability": "the device",
    "get_device_properties": "the device",
}

LINES = 400
LINES_KERNEL_OR_TEST = 700
LONGER_BY_REVIEW: dict[str, int] = {}
"""File -> its own limit. One line per exception, with the reason beside it."""


@pytest.mark.parametrize("path", python_files(*PACKAGES), ids=name)
def test_machine_and_environment_are_probed_in_one_file(path: Path) -> None:
    if name(path) == TARGET:
        return
    wrong = [f"line {line}: {what} ({PROBES[what]})" for line, what in _dotted_names(path) if what in PROBES]
    assert not wrong, f"{name(path)} probes what only {TARGET} may: {'; '.join(wrong)}"


@pytest.mark.parametrize("path", python_files(*PACKAGES, "tests", "examples"), ids=name)
def test_file_is_short_and_named_for_what_it_holds(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    is_long_kind = path.stem.endswith("_kernel") or path.is_relative_to(ROOT / "tests")
    limit = LONGER_BY_REVIEW.get(name(path), LINES_KERNEL_OR_TEST if is_long_kind else LINES)
    assert lines <= limit, f"{name(path)} has {lines} lines, more than {limit}: split it"
    assert path.stem not in ("utils", "util", "helpers", "helper", "misc", "common"), f"{name(path)}: say what it holds"


@pytest.mark.parametrize("path", python_files(*PACKAGES, "examples"), ids=name)
def test_file_says_what_it_is(path: Path) -> None:
    source = path.read_text()
    assert not source.strip() or ast.get_docstring(ast.parse(source)), f"{name(path)} has no module docstring"


def test_every_exception_is_still_needed() -> None:
    for file, limit in LONGER_BY_REVIEW.items():
        assert (ROOT / file).is_file(), f"{file} is gone: remove its exception"
        assert limit > LINES


def _dotted_names(path: Path) -> list[tuple[int, str]]:
    """(line, dotted name) of every attribute chain, bare name, and imported name of a file."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute | ast.Name):
            found.append((node.lineno, ast.unparse(node)))
        elif isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.append((node.lineno, str(node.module)))
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return found
