"""Importing a package needs torch alone: optional packages are blocked, and none is even asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.sources import OPTIONAL, PACKAGES, ROOT

PROGRAM = """
import sys

class Blocked:
    asked = []
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            self.asked.append(name)
            raise ModuleNotFoundError(f"{name} is blocked", name=name)

BLOCKED = set(sys.argv[2].split(","))
import torch
BLOCKED -= set(sys.modules)
sys.meta_path.insert(0, Blocked())
before = {name.partition(".")[0] for name in sys.modules}
__import__(sys.argv[1])
after = {name.partition(".")[0] for name in sys.modules}
print("asked:", *Blocked.asked)
print("new:", *sorted(after - before - set(sys.stdlib_module_names)))
print("cuda:", torch.cuda.is_initialized())
"""

MOST_SECONDS = 0.3
"""Processor time that importing a package may add to that of importing torch."""

ALLOWED = {*PACKAGES, "torch", "torchgen", "filelock", "functorch"}


@pytest.mark.parametrize("package", PACKAGES)
def test_import_needs_torch_alone(package: str) -> None:
    command = [sys.executable, "-W", "error", "-c", PROGRAM, package, ",".join(OPTIONAL)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, f"import {package} failed:\n{result.stderr}"
    report = dict(line.split(":", 1) for line in result.stdout.splitlines())
    assert not report["asked"].split(), f"import {package} looks for {report['asked']}"
    others = set(report["new"].split()) - ALLOWED
    assert not others, f"import {package} also imports {sorted(others)}"
    assert report["cuda"].strip() == "False", f"import {package} initialises CUDA"


@pytest.mark.parametrize("package", PACKAGES)
def test_import_adds_little_to_that_of_torch(package: str, tmp_path: Path) -> None:
    """As after an installation, which compiles the sources: the first run here writes the bytecode, unmeasured."""
    program = f"import torch, time; t = time.process_time(); import {package}; print(time.process_time() - t)"
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path)}
    command = [sys.executable, "-c", program]
    taken = []
    for run in range(4):
        result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
        if run > 0:
            taken.append(float(result.stdout))
    assert min(taken) <= MOST_SECONDS, f"import {package} takes {taken} s"
