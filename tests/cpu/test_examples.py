"""The examples run as a person would run them, on the CPU, with a short text."""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


def run(*command: str) -> str:
    """Standard output of an example, with warnings as errors and no GPU to be seen."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-W", "error", *command],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text((ROOT / "LICENSE").read_text() * 6)
    return path


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """An example's module, which finds its neighbours as when it is run."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def test_quickstart() -> None:
    output = run("examples/quickstart.py")
    assert "y (64, 128), dx (64, 128), dprobs (64,)" in output
    shown = "\n".join(f"    {line}".rstrip() for line in output.strip().split("\n"))
    assert shown in (ROOT / "README.md").read_text(), "the README shows another output than the quickstart prints"


def test_lora_of_experts() -> None:
    for package in ("transformers", "peft"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    # PEFT imports Transformer Engine if that can be found, which fails where only the Python of its wheel is.
    program = "import runpy, sys; sys.modules['transformer_engine'] = None; runpy.run_path('examples/lora_moe.py')"
    first, last, changed, *told = run("-W", "ignore::FutureWarning", "-c", program).splitlines()
    losses = [float(line.split()[-1]) for line in (first, last)]
    assert losses[1] < losses[0] - 1
    assert changed == "8 of 45 parameters changed, all of them LoRA's: True"
    assert told[-1] == "3 of 3 ops fused" and "ScaledClampedSwiGLU" in told[1]


def test_demo_trains_and_draws(text: Path, tmp_path: Path) -> None:
    command = ["--text", str(text), "--device", "cpu", "--steps", "5", "--sample", "8", "--out", str(tmp_path)]
    output = run("examples/train_moe_lm.py", *command)
    assert "GroupedLinear [0] -> ScaledSwiGLU [1] -> GroupedLinear [2]" in output
    assert "5 steps" in output and "bigram entropy" in output and "layer 1:" in output
    assert "8 bytes that it writes after 'def '" in output
    assert (tmp_path / "loss_curve.png").read_bytes().startswith(b"\x89PNG")


def test_demo_compares_and_says_that_a_cpu_fuses_nothing(text: Path, tmp_path: Path) -> None:
    command = [
        "--text",
        str(text),
        "--device",
        "cpu",
        "--steps",
        "3",
        "--sample",
        "0",
        "--out",
        str(tmp_path),
        "--compare",
    ]
    output = run("examples/train_moe_lm.py", *command)
    assert "No kernel is fused on a CPU" in output
    last = next(line for line in output.splitlines() if line.split()[:2] == ["last", "3"])
    assert last.split()[2] == last.split()[3], f"the same seed must give the same losses: {last}"


@pytest.mark.parametrize("recipe", ["block", "current", "delayed"])
def test_demo_compares_with_a_recipe(text: Path, tmp_path: Path, recipe: str) -> None:
    command = ["--text", str(text), "--device", "cpu", "--dtype", "bf16", "--steps", "3", "--sample", "0"]
    output = run(
        "examples/train_moe_lm.py", *command, "--out", str(tmp_path), "--recipe", recipe, "--compare", "recipe"
    )
    assert {"block": "Float8BlockScaling", "current": "Float8CurrentScaling", "delayed": "Delayed"}[recipe] in output
    last = next(line for line in output.splitlines() if line.split()[:2] == ["last", "3"])
    mine, plain = (float(value) for value in last.split()[2:4])
    assert mine != plain and abs(mine / plain - 1) < 0.02


def test_demo_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forty steps on bytes that follow a rule: far better than chance, and every step's loss is there."""
    demo = load("train_moe_lm", monkeypatch)
    tiny = demo.ModelConfig(width=32, heads=2, layers=1, experts=4, top_k=2, expert_width=32, context=32)
    config = demo.TrainConfig(steps=40, batch=8, learning_rate=1e-2, warmup=5)
    rule = torch.arange(4096, dtype=torch.uint8) % 7 + 65
    done = demo.train("tiny", tiny, config, rule, torch.device("cpu"))
    assert len(done.losses) == 40
    assert done.losses[0] == pytest.approx(8.0, abs=0.01), "an untrained model knows nothing: 8 bits per byte"
    assert demo.bits_per_byte(done.model, rule) < 1.0


def test_experts_are_the_weighted_sum_of_the_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and gradients, the router's among them, against every expert run on every token."""
    lm = load("moe_lm", monkeypatch)
    torch.manual_seed(0)
    config = lm.ModelConfig(width=16, heads=2, layers=1, experts=4, top_k=2, expert_width=8, context=8)
    experts = lm.Experts(config, torch.device("cpu"))
    x = torch.randn(24, 16, requires_grad=True)
    y, _, sizes = experts(x)

    weights, chosen = torch.softmax(experts.router(x), dim=-1).topk(2, dim=-1)
    gates = torch.zeros(24, 4).scatter(1, chosen, weights / weights.sum(dim=-1, keepdim=True))
    every = [torch.tensor([24 * (i == g) for i in range(4)]) for g in range(4)]
    answers = torch.stack([experts.mlp(x, rows, torch.ones(24), rows) for rows in every], dim=1)
    expected = (gates[..., None] * answers).sum(dim=1)
    assert sizes.tolist() == (gates > 0).sum(dim=0).tolist()
    torch.testing.assert_close(y, expected)

    inputs = [x, *experts.parameters()]
    dy = torch.randn_like(y)
    for ours, theirs in zip(torch.autograd.grad(y, inputs, dy), torch.autograd.grad(expected, inputs, dy), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_bigram_entropy(monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = load("text_corpus", monkeypatch)
    alternating = torch.tensor([1, 2] * 50, dtype=torch.uint8)
    assert corpus.bigram_entropy(alternating) == pytest.approx(0.0, abs=1e-9)
    after_zero = torch.tensor([0, 1, 0, 2] * 1000 + [0], dtype=torch.uint8)  # after 0 one of two, after those always 0
    assert corpus.bigram_entropy(after_zero) == pytest.approx(0.5, abs=1e-9)


def test_master_weights_keep_what_bf16_would_round_away(monkeypatch: pytest.MonkeyPatch) -> None:
    demo = load("train_moe_lm", monkeypatch)
    weight = torch.ones(4, dtype=torch.bfloat16, requires_grad=True)
    config = demo.TrainConfig(steps=1, batch=1, learning_rate=0.0, weight_decay=0.0)
    optimizer = demo.Optimizer([weight], config)
    for _ in range(20):
        weight.grad = torch.full_like(weight, 0.1)
        optimizer.step(1e-3)
    assert math.isclose(optimizer.masters[0][0].item(), 0.98, abs_tol=1e-4)
    assert weight[0].item() == pytest.approx(0.98, abs=2**-8)
