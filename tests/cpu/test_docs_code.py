"""The documentation's code runs: every block that is marked `python`, page by page; its figures are up to date; every
public name is in the reference.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fusible_ops
from fusible_ops.bench.report import Report, chart
from tests.house.sources import ROOT

PAGES = sorted(path for path in (ROOT / "docs").glob("*.md") if "```python" in path.read_text())
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_code_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if page.stem == "huggingface":
        pytest.importorskip("transformers", reason="transformers is not installed")
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    text = page.read_text()
    from cute_kernels import launch

    packs, forbidden = list(launch._packs), launch._forbidden
    try:
        for block in BLOCK.finditer(text):
            line = text.count("\n", 0, block.start()) + 1
            exec(compile("\n" * line + block[1], str(page), "exec"), namespace)
    finally:
        launch._packs[:], launch._forbidden = packs, forbidden


def test_pages_are_found() -> None:
    wanted = {"quickstart", "explain", "recipes", "warmup", "numerics", "migrating", "huggingface"}
    assert wanted <= {path.stem for path in PAGES}


def test_example_of_the_tutorial_runs() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "own_rule.py")], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    shown = (ROOT / "docs" / "extending.md").read_text()
    assert all(f"    {line}\n" in shown for line in done.stdout.splitlines())


def test_every_public_name_is_in_the_reference() -> None:
    text = (ROOT / "docs" / "ops.md").read_text() + (ROOT / "docs" / "recipes.md").read_text()
    modules_and_queries = {"basic", "fused", "Format", "Recipe", "FusibleOperation", "CompileForbiddenError"}
    wanted = {name for name in fusible_ops.__all__ if not name.startswith(("is_", "get_"))} - modules_and_queries
    aliases = {name for name in wanted if getattr(getattr(fusible_ops, name), "__name__", name) != name}
    missing = {name for name in wanted - aliases if not re.search(rf"\b{name}\b", text)}
    assert not missing, f"docs/ops.md does not list {sorted(missing)}"


def test_chart_is_that_of_the_recorded_run() -> None:
    report = Report.read(ROOT / "docs" / "bench_h200.json")
    assert (ROOT / "docs" / "figures" / "bench_h200.svg").read_text() == chart(report)
