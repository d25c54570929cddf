"""A model of Transformer Engine's before and after one line, on one GPU, all in turn in one run.

    [LD_PRELOAD=<a current cuBLAS>] python -m tests.bench.bench_te_plugin [--shapes dsv3_ep32,gptoss_ep4,qwen3_30b]

One layer, three containers over the same parameters: Transformer Engine's own ops ("before"), with our fusion installed
("after"), and our own Sequential ("ours"); in BF16 and under Float8BlockScaling. Prints milliseconds, and each one's
time over that of "after". With more than 64 groups a cuBLAS of 13.4 or newer makes Transformer Engine refuse, and then
its column is left out, with its words.
"""

from __future__ import annotations

import argparse
import datetime
from typing import Any

import torch
from torch import Tensor

import fusible_ops as ops
from fusible_ops.bench.grouped_mlp import make_problem
from fusible_ops.bench.peers import Calls, Problem
from fusible_ops.bench.timing import medians
from fusible_ops.integrations import te_fused
from fusible_ops.integrations import transformer_engine as plugin
from tests.bench.bench_grouped_mlp import SHAPES

PARTS = ("forward", "forward + backward")


class Layer:
    """The containers, each with its plans made."""

    def __init__(self, p: Problem, te: Any, block: bool) -> None:
        from transformer_engine.common.recipe import Float8BlockScaling

        groups, hidden, width = p.w2.shape
        common = {"bias": False, "device": "cuda", "dtype": torch.bfloat16}
        self.p, self.te, self.recipe = p, te, Float8BlockScaling() if block else None
        sizes = (groups, hidden, 2 * width), (groups, width, hidden)
        fc1, fc2 = (te.ops.GroupedLinear(*each, **common) for each in sizes)
        own1, own2 = (ops.GroupedLinear(*each, **common) for each in sizes)
        with torch.no_grad():
            for theirs, mine, weights in ((fc1, own1, p.w1), (fc2, own2, p.w2)):
                for g in range(groups):
                    getattr(theirs, f"weight{g}").copy_(weights[g])
                mine.load_state_dict(theirs.state_dict())
        self.x, self.probs = p.x.detach().requires_grad_(), p.probs.detach().requires_grad_()
        self.models: dict[str, Any] = {}
        plugin.uninstall()
        self.add("before", te.ops.Sequential(fc1, te.ops.ScaledSwiGLU(), fc2))
        plugin.install()
        self.add("after", te.ops.Sequential(fc1, te.ops.ScaledSwiGLU(), fc2))
        self.add("ours", ops.Sequential(own1, ops.ScaledSwiGLU(), own2, on_unfused="error"))

    def add(self, name: str, model: Any) -> None:
        """A container, whose plans for all parts are made now: Transformer Engine makes one for each grad mode."""
        self.models[name] = model
        try:
            for part in PARTS:
                self.calls(part)[name]()
            torch.cuda.synchronize()
        except (RuntimeError, ValueError) as refused:
            print(f"{name} refuses: {str(refused).splitlines()[0]}", flush=True)
            del self.models[name]

    def forward(self, name: str) -> Tensor:
        mine = name == "ours"
        recipe = ops.Float8BlockScaling() if mine and self.recipe else self.recipe
        with (ops if mine else self.te).autocast(enabled=recipe is not None, recipe=recipe):
            return self.models[name](self.x, self.p.splits, self.probs, self.p.splits)

    def inference(self, name: str) -> Tensor:
        with torch.no_grad():
            return self.forward(name)

    def both(self, name: str) -> tuple[Tensor, ...]:
        wanted = [self.x, self.probs, *self.models[name].parameters()]
        return torch.autograd.grad(self.forward(name), wanted, self.p.dy)

    def calls(self, part: str) -> Calls:
        run = self.inference if part == "forward" else self.both
        return {name: lambda name=name: run(name) for name in self.models}

    def check(self) -> None:
        """What one line changes is the time."""
        if {"before", "after"} <= {*self.models}:
            for a, b in zip(self.both("before"), self.both("after"), strict=True):
                error = ((a - b).norm() / a.norm()).item()
                assert error < (0.05 if self.recipe else 0.01), error

    def check_plans(self) -> None:
        """No plan of "before" holds an operation of ours, and each of "after" does."""
        for name, ours in (("before", False), ("after", True)):
            if name in self.models:
                (run,) = self.models[name]._module_groups
                found = plans_with_ours(run)
                assert found == [ours] * len(PARTS), (name, found)


def plans_with_ours(run: Any) -> list[bool]:
    """Of the plans that a run of Transformer Engine's has made, which hold an operation of ours."""
    plans = run._fused_ops_cache.values()
    return [any(isinstance(op, te_fused.Joint) for ops in plan for op, _ in ops) for plan in plans]


def bench(shape: str, te: Any) -> None:
    p = make_problem(*SHAPES[shape])
    for block in (False, True):
        layer = Layer(p, te, block)
        layer.check()
        for part in PARTS:
            times = medians(layer.calls(part))
            for name, ms in times.items():
                what = "block" if block else "bf16"
                print(f"{shape:11s} {what:5s} {part:19s} {name:7s} {ms:8.3f} ms x{ms / times['after']:.3f}", flush=True)
        layer.check_plans()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shapes", default=",".join(SHAPES))
    chosen = parser.parse_args().shapes.split(",")
    try:
        import transformer_engine
        import transformer_engine.pytorch as te
    except ImportError as missing:
        print(f"needs transformer-engine[pytorch]: {missing}")
        return

    versions = f"torch {torch.__version__}, transformer-engine {transformer_engine.__version__}"
    print(f"{torch.cuda.get_device_name()}, {versions}, {datetime.date.today()}")
    for shape in chosen:
        bench(shape, te)


if __name__ == "__main__":
    main()
