"""The work of each launch, what is kept for backward, and the page that shows them."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from torch import nn

import fusible_ops as ops
from cute_kernels.catalog import KERNELS
from fusible_ops.cli import main
from fusible_ops.cli.models import mlp
from fusible_ops.picture import as_data, picture
from patterns.work import MACHINES, Launch

T, H, I, G = 4096, 256, 128, 8  # noqa: E741


class Page(HTMLParser):
    """Texts of a page by class of the innermost element that has one, and whether every element was closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.stack: list[tuple[str, str]] = []
        self.texts: list[tuple[str, str]] = []
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag != "meta":
            self.stack.append((tag, found.get("class") or ""))

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        kind = next((kind for _, kind in reversed(self.stack) if kind), "")
        self.texts.append((kind, data))

    def of(self, kind: str) -> list[str]:
        return [text for found, text in self.texts if found == kind]


def launches(model: ops.Sequential, **how: object) -> dict[str, dict]:
    return {one["use"]: one for run in as_data(model, rows=T, **how) for step in run["launches"] for one in step}


def test_work_of_a_grouped_mlp():
    """Numbers worked out by hand: BF16, N = 2I columns out of FC1."""
    found = launches(mlp(H, I, G, linear={"bias": True}))
    weights = G * 2 * I * H
    assert found["fc1 and act forward"]["flops"] == 2 * T * H * 2 * I
    assert found["fc1 and act forward"]["bytes"] == 2 * (T * H + weights + T * 2 * I + T * I)
    assert found["fc2 forward"]["flops"] == 2 * T * I * H
    assert found["fc1 weight gradient"]["bytes"] == 2 * (T * H + T * 2 * I + weights)
    assert found["fc2 input gradient and act backward"]["bytes"] == 2 * (T * H + weights // 2 + T * 5 * I)
    assert found["fc1 bias gradient"] == {
        "kernel": "grouped_dbias", "use": "fc1 bias gradient", "backward": True, "flops": 0.0, "bytes": 2 * T * 2 * I,
        "seconds": 2 * T * 2 * I / MACHINES["sm_90a"].bytes, "binds": "memory",
    }  # fmt: skip


def test_time_is_the_longer_of_arithmetic_and_bytes():
    machine = MACHINES["sm_90a"]
    busy, waiting = Launch("grouped_gemm", "", False, 1e12, 1.0), Launch("grouped_gemm", "", False, 1.0, 1e9)
    assert busy.seconds(machine) == 1e12 / machine.flops and busy.binds(machine) == "arithmetic"
    assert waiting.seconds(machine) == 1e9 / machine.bytes and waiting.binds(machine) == "memory"
    assert Launch("fp8_grouped_gemm", "", False, 1e12, 1.0).seconds(machine) == 1e12 / machine.fp8_flops
    assert busy.seconds(None) is None and Launch("?", "", False, None, None).seconds(machine) is None


def test_work_is_known_of_every_kernel():
    from patterns.work import _WORK

    assert {kernel.name for kernel in KERNELS.values()} <= set(_WORK)


def test_work_on_another_machine_is_the_same_and_its_times_are_not():
    """cuDNN Frontend's four kernels do what ours do, on gate and up in blocks of 32."""
    ours = launches(mlp(H, I, G, activation="SwiGLU"))
    theirs = launches(mlp(H, I, G, activation="SwiGLU", act={"glu_interleave_size": 32}), target="sm_100a")
    for use in ("fc1 and act forward", "fc2 forward", "fc2 input gradient and act backward", "fc1 weight gradient"):
        act = 2 * T * I if "backward" in use else 0  # which ours computes again, and theirs does not
        assert ours[use]["flops"] == theirs[use]["flops"] and ours[use]["bytes"] == theirs[use]["bytes"] + act
        assert ours[use]["seconds"] > theirs[use]["seconds"]


def test_what_is_kept_is_what_autograd_saves():
    kept = as_data(mlp(H, I, G), rows=T)[0]["kept"]
    assert {(one["what"], one["bytes"]) for one in kept} == {
        ("the input", 2 * T * H),
        ("what GroupedLinear 0 gives", 2 * T * 2 * I),
        ("extra input", 4 * T),
        ("where groups start", 4 * (G + 1)),
    }
    dense = as_data(mlp(H, I), rows=T)[0]["kept"]
    assert [one["bytes"] for one in dense if one["what"] == "what Linear 0 gives"] == [2 * T * 2 * I]


def test_what_is_kept_in_fp8():
    """Rows in FP8 for the weight gradients, weights for the input's, and the pre-activation, not the input in BF16."""
    kept = as_data(mlp(H, I, G), rows=T, recipe=ops.Float8BlockScaling())[0]["kept"]
    names = {one["what"] for one in kept}
    assert names >= {"rows in FP8", "scales of FP8", "weights in FP8, the same until an update"}
    assert "the input" not in names and "made in between" not in names


@pytest.mark.parametrize(
    ("sizes", "wanted"),
    [((7168, 2048, 8), [0.80, 0.62, 0.69, 0.52]), ((2880, 2880, 32), [1.05, 0.73, 0.84, 0.52])],
)
def test_the_bytes_that_the_readme_states(sizes: tuple[int, int, int], wanted: list[float]):
    """Without weights, over those in BF16."""
    preacts = ("high_precision", "quantized")
    recipes = [r(preactivation=kept) for r in (ops.Float8BlockScaling, ops.MXFP8BlockScaling) for kept in preacts]
    kept = [as_data(mlp(*sizes), rows=32768, recipe=recipe)[0]["kept"] for recipe in (None, *recipes)]
    plain, *others = [sum(one["bytes"] for one in each if len(one["shape"]) != 3) for each in kept]
    assert [round(other / plain, 2) for other in others] == wanted
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    assert " | ".join(f"{share:.2f}" for share in wanted) in text


def test_page_shows_ops_regions_and_reasons_and_needs_nothing_else():
    how = {"dtype": torch.bfloat16, "device": "meta"}
    fc1, fc2 = ops.Linear(64, 64, **how), ops.GroupedLinear(4, 32, 20, **how)
    page = Page(picture(ops.Sequential(fc1, ops.SwiGLU(), nn.LayerNorm(32), fc2, ops.GELU())))
    assert not page.stack and not page.links
    assert page.of("op") == ["Linear [0]", "SwiGLU [1]", "LayerNorm", "GroupedLinear [3]", "GELU [4]"]
    assert page.of("rule") == ["linear_activation", "unfused", "unfused"]
    assert any("[3].out_features is 20, needs a multiple of 8" in text for text in page.of("why"))


def test_page_of_what_has_names_that_are_markup():
    page = Page(picture(ops.Sequential({"<b>": ops.GELU()})))
    assert page.of("op") == ["GELU <b>"]


def test_the_command_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["explain", "64,32,4", "--html", str(tmp_path / "page.html"), "--rows", "100"]) == 0
    assert capsys.readouterr().out == mlp(64, 32, 4).explain("sm_90a") + "\n"
    assert "100 rows" in (tmp_path / "page.html").read_text()
    assert main(["explain", "64,32,4", "--json", "--arch", "sm_80"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data[0][0]["target"] == "sm_80" and data[0][0]["launches"] == [[], [], []]
