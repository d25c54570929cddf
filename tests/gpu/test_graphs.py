"""CUDA graphs: a training step captured once and replayed with other data and splits, graphs and eager interleaved."""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import fusible_ops as ops
from fusible_ops import casts
from tests.cases import Splits, full
from tests.compare import assert_bitwise_equal
from tests.models import MLP, Inputs

pytestmark = [
    pytest.mark.gpu("sm_90a"),
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream"),
]
BF16 = {"device": "cuda", "dtype": torch.bfloat16}
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(autouse=True)
def optimizers(monkeypatch: pytest.MonkeyPatch) -> None:
    """An optimizer step in a graph is remembered for the rest of the process; here, of the test."""
    monkeypatch.setattr(casts, "_optimizers", casts._Optimizers())


def captured(run: Callable[[], object], warmups: int = 2) -> tuple[torch.cuda.CUDAGraph, object]:
    """The graph of `run`, which has run `warmups` times, and what it returned while captured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warmups):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    return graph, result


class Training:
    """The demo's layer of experts with AdamW: one step on `x`, towards `target`, that a graph can hold."""

    def __init__(self, layer: torch.nn.Module, autocast: bool) -> None:
        self.layer, self.autocast = layer, autocast
        self.x, self.target = (torch.randn(512, 128, device="cuda") for _ in range(2))
        self.optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2, capturable=True)

    def forward(self) -> tuple[Tensor, Tensor, Tensor]:
        with torch.autocast("cuda", torch.bfloat16) if self.autocast else contextlib.nullcontext():
            return self.layer(self.x)

    def step(self) -> list[Tensor]:
        """Output, rows of each expert, and gradients."""
        self.optimizer.zero_grad()
        y, balance, sizes = self.forward()
        ((y.float() - self.target).square().mean() + 0.01 * balance).backward()
        self.optimizer.step()
        return [y.detach(), sizes, *(p.grad for p in self.layer.parameters())]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "autocast"])
def test_a_training_step_of_the_demo(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward, backward and AdamW in one graph; each replay routes other data otherwise; all bits are eager's.

    Under autocast the graph casts the weights that it updates; so does every eager forward beside it.
    """
    monkeypatch.syspath_prepend(str(EXAMPLES))
    moe_lm = importlib.import_module("moe_lm")
    config = moe_lm.ModelConfig(
        width=128, heads=2, layers=1, experts=8, top_k=2, expert_width=64, context=64, expert_dtype=dtype
    )
    layer = moe_lm.Experts(config, torch.device("cuda"))
    autocast = dtype == torch.float32
    eager, graphed = Training(copy.deepcopy(layer), autocast), Training(layer, autocast)
    eager.x, eager.target = graphed.x, graphed.target
    for _ in range(2):
        eager.step()
    graph, results = captured(graphed.step)
    routed = set()
    for _ in range(4):
        graphed.x.copy_(torch.randn_like(graphed.x) + torch.randn(128, device="cuda"))
        graphed.target.normal_()
        graph.replay()
        for got, want in zip(results, eager.step(), strict=True):
            assert_bitwise_equal(got, want)
        for got, want in zip(graphed.layer.parameters(), eager.layer.parameters(), strict=True):
            assert_bitwise_equal(got.detach(), want.detach())
        with torch.no_grad():  # an eager forward of the weights that the replay changed
            assert_bitwise_equal(graphed.forward()[0], eager.forward()[0])
        routed.add(tuple(results[1].tolist()))
    assert len(routed) == 4


class Case:
    """A model's forward and backward for one row count, its buffers, and what eager gives for them."""

    def __init__(self, model: ops.Sequential, mlp: MLP, splits: Splits, seed: int) -> None:
        self.model, self.mlp = model, mlp
        inputs = Inputs.random(splits, mlp.hidden, "cuda", torch.bfloat16, seed)
        self.x, self.probs, self.dy = inputs.x.requires_grad_(), inputs.probs.requires_grad_(), inputs.dy
        self.sizes = splits.tensor("cuda")

    def run(self) -> list[Tensor]:
        y = self.model(self.x, *self.mlp.extras(self.sizes, self.probs))
        return [y, *torch.autograd.grad(y, [self.x, self.probs, *self.model.parameters()], self.dy)]

    def change(self, sizes: tuple[int, ...]) -> None:
        self.sizes.copy_(torch.tensor(sizes))
        with torch.no_grad():
            self.x.normal_()
            self.dy.normal_()


@pytest.mark.parametrize("packed", [False, True], ids=["separate", "packed"])
def test_graphs_and_eager_calls_interleaved(packed: bool) -> None:
    """Two graphs and an eager call share a module (and its tables of addresses); another module runs between them."""
    mlp = MLP(hidden=256, intermediate=128, bias=True)
    splits = [full("a", 128, 128, 128, 128), full("b", 64, 0, 64, 128), full("c", 10, 20, 30, 40)]
    model, other = (mlp.build(splits[0], on_unfused="error", **BF16) for _ in range(2))
    if not packed:
        for p in reversed(list(model.parameters())):
            p.data = p.data.clone()
    first, second, third = (Case(model, mlp, s, seed) for seed, s in enumerate(splits))
    elsewhere = Case(other, mlp, splits[0], 5)
    graphs = [captured(case.run) for case in (first, second)]
    changes = [((512, 0, 0, 0), (1, 2, 3, 250)), ((7, 121, 256, 64), (0, 0, 0, 0)), ((0, 0, 1, 500), (256, 0, 0, 0))]
    for sizes in changes:
        for case, new in zip((first, second), sizes, strict=True):
            case.change(new)
        eager_before = [t.detach().clone() for t in third.run()]
        graphs[0][0].replay()
        elsewhere.run()
        graphs[1][0].replay()
        eager_after = third.run()
        for got, want in zip(eager_after, eager_before, strict=True):
            assert_bitwise_equal(got.detach(), want)
        for case, (_, replayed) in zip((first, second), graphs, strict=True):
            copies = [t.detach().clone() for t in replayed]
            for got, want in zip(copies, case.run(), strict=True):
                assert_bitwise_equal(got, want.detach())


def test_a_module_deleted_while_another_is_captured() -> None:
    """Its weights, tables and plans go in the middle of the capture, which neither fails nor keeps them."""
    mlp, splits = MLP(hidden=256, intermediate=128, bias=True), full("a", 128, 0, 384)
    doomed, kept = (mlp.build(splits, on_unfused="error", **BF16) for _ in range(2))
    for p in doomed.parameters():
        p.data = p.data.clone()
    dying, case = [Case(doomed, mlp, splits, 1)], Case(kept, mlp, splits, 2)
    dying[0].run()
    del doomed, p

    def run() -> list[Tensor]:
        y = case.model(case.x, *mlp.extras(case.sizes, case.probs))
        dying.clear()
        gc.collect()
        return [y, *torch.autograd.grad(y, [case.x, case.probs, *case.model.parameters()], case.dy)]

    case.run()
    graph, replayed = captured(run, warmups=0)
    for sizes in ((0, 512, 0), (3, 500, 9)):
        case.change(sizes)
        graph.replay()
        for got, want in zip([t.detach().clone() for t in replayed], case.run(), strict=True):
            assert_bitwise_equal(got, want.detach())


def test_a_deleted_graph_leaves_the_module_as_it_was() -> None:
    """The graph's memory, tables among it, is not what eager calls use."""
    mlp, splits = MLP(hidden=256, intermediate=128, bias=True), full("a", 128, 0, 384)
    model = mlp.build(splits, on_unfused="error", **BF16)
    for p in model.parameters():
        p.data = p.data.clone()
    case = Case(model, mlp, splits, 1)
    expected = [t.detach().clone() for t in case.run()]
    graph, replayed = captured(case.run)
    graph.replay()
    del graph, replayed
    gc.collect()
    torch.cuda.empty_cache()
    scratch = torch.full((1 << 24,), float("nan"), device="cuda")
    for got, want in zip(case.run(), expected, strict=True):
        assert_bitwise_equal(got.detach(), want)
    del scratch
