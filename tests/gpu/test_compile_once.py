"""Compiled once per kernel: not per row count, split, stream, rank or start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fusible_ops as fo
from cute_kernels import launch, target
from fusible_ops.cli.models import mlp
from tests.house.sources import ROOT

pytestmark = pytest.mark.gpu("sm_90a")

PROGRAM = """
import hashlib, json, sys
import torch
torch.zeros(1, device="cuda").add_(1)
import time
began = time.perf_counter()
import fusible_ops as fo
from cute_kernels import launch
from fusible_ops.cli.models import mlp
if "--no-compile" in sys.argv:
    fo.use_kernels(no_compile=True)
torch.manual_seed(0)
model = mlp(256, 128, 8, device="cuda")
x, probs = torch.randn(300, 256, device="cuda", dtype=torch.bfloat16), torch.rand(300, device="cuda")
splits = torch.tensor([40, 0, 60, 1, 99, 20, 50, 10], device="cuda")
with torch.no_grad():
    y = model(x, splits, probs, splits)
torch.cuda.synchronize()
seconds = time.perf_counter() - began
digest = hashlib.sha256(y.float().cpu().numpy().tobytes()).hexdigest()
cutlass = "cutlass" in sys.modules
print(json.dumps({"compiled": launch.compile_count(), "y": digest, "seconds": seconds, "cutlass": cutlass}))
"""


def start(directory: Path, *arguments: str, pack: Path | str = "") -> subprocess.Popen[str]:
    environment = {**os.environ, target.CACHE_VARIABLE: str(directory), target.PACKS_VARIABLE: str(pack)}
    command = [sys.executable, "-c", PROGRAM, *arguments]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str], what: str) -> dict:
    """What PROGRAM printed; `pytest -s` shows it."""
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    found = json.loads(out.splitlines()[-1])
    print(f"{what}: {found['seconds']:.2f} s, {found['compiled']} compiled, CUTLASS imported: {found['cutlass']}")
    return found


def assert_quick(found: dict) -> None:
    """Nothing compiled, and the first call soon after the import."""
    assert found["compiled"] == 0 and found["seconds"] < (2 if target.c_linker() else 6)
    assert target.c_linker() is None or not found["cutlass"]


def test_ranks_starts_and_damage(tmp_path: Path) -> None:
    """Eight processes on an empty directory; a second start; a file cut short; a start after that."""
    ranks = [ended(process, "empty, of 8") for process in [start(tmp_path / "c") for _ in range(8)]]
    kernels = len(list((tmp_path / "c").glob("*.json")))
    assert sum(rank["compiled"] for rank in ranks) == kernels == 3
    second = ended(start(tmp_path / "c", "--no-compile"), "second start")
    assert_quick(second)
    victim = sorted((tmp_path / "c").glob("*.so" if target.c_linker() else "*.o"))[0]
    victim.write_bytes(victim.read_bytes()[:1000])
    repaired = ended(start(tmp_path / "c"), "one damaged")
    assert repaired["compiled"] == 1
    last = ended(start(tmp_path / "c", "--no-compile"), "last start")
    assert {run["y"] for run in (*ranks, second, repaired, last)} == {ranks[0]["y"]}


def test_a_pack_made_without_a_gpu(tmp_path: Path) -> None:
    made = [sys.executable, "-m", "fusible_ops", "warmup", "256,128,8", "--inference", "--arch", "sm_90a"]
    without = {**os.environ, "CUDA_VISIBLE_DEVICES": "", target.CACHE_VARIABLE: str(tmp_path / "made")}
    subprocess.run([*made, "--out", str(tmp_path / "pack")], cwd=ROOT, env=without, check=True)
    assert_quick(ended(start(tmp_path / "empty", "--no-compile", pack=tmp_path / "pack"), "with a pack"))


def test_rows_splits_and_streams_add_no_kernel() -> None:
    """Row counts may differ in tiles, of which there are a few; whatever else changes, nothing is compiled."""
    model = mlp(256, 128, 8, device="cuda")

    def step(rows: int, kind: int) -> None:
        sizes = [[rows, *[0] * 7], [*[0] * 7, rows], [rows // 8] * 8, [0, rows // 3] * 3 + [0, 0], [0] * 8][kind]
        splits, probs = torch.tensor(sizes, device="cuda"), torch.rand(rows, device="cuda", requires_grad=True)
        x = torch.randn(rows, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        model(x, splits, probs, splits).sum().backward()

    for rows in (1, 64, 300, 4096, 4097):
        step(rows, 0)
        with fo.use_kernels(no_compile=True):
            for kind in range(5):
                for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
                    with torch.cuda.stream(stream):
                        step(rows, kind)
                    stream.synchronize()
        if rows == 4096:
            known = launch.compile_count()
    assert launch.compile_count() == known, "one row more took another kernel"
