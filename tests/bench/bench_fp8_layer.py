"""The grouped MLP layer in FP8 blocks on one GPU, beside BF16 and Transformer Engine's FP8, all in turn in one run.

    LD_PRELOAD=<a current cuBLAS> python -m tests.bench.bench_fp8_layer [--shapes dsv3_ep32,gptoss_ep4,qwen3_30b]
    python -m tests.bench.bench_fp8_layer --rows 512,2048,8192,32768        where FP8 begins to pay
    python -m tests.bench.bench_fp8_layer --kernels                         what each launch takes within the layer

"fp8": weights are quantised once per update, and this is a call between two; "fp8, update": the first after an update,
which quantises them. Transformer Engine's ops quantise them in every forward. Prints milliseconds, TFLOP/s, and each
one's time over that of "fp8, update" (above 1: that is faster); launches, by the profiler.
"""

from __future__ import annotations

import argparse
import datetime

import torch
from torch import Tensor

import fusible_ops as ops
from fusible_ops.bench.grouped_mlp import layer_of
from fusible_ops.bench.peers import Calls, Problem, te_fp8_layer
from tests.bench.bench_grouped_mlp import SHAPES, make_problem
from tests.bench.timing import launch_times, launches, medians

PARTS = ("forward", "forward + backward")
RECIPE, KEPT = ops.Float8BlockScaling(), ops.Float8BlockScaling(preactivation="quantized")


class Layer:
    """Ours, with stacked weights."""

    def __init__(self, p: Problem) -> None:
        self.mlp, self.p = layer_of(p), p
        self.x, self.probs = p.x.detach().requires_grad_(), p.probs.detach().requires_grad_()

    def forward(self, recipe: ops.Recipe | None, keep: bool = True) -> Tensor:
        """keep: whether quantised weights are kept for the next call."""
        torch.set_autocast_cache_enabled(keep)
        with ops.autocast(enabled=recipe is not None, recipe=recipe):
            return self.mlp(self.x, self.p.splits, self.probs, self.p.splits)

    def both(self, recipe: ops.Recipe | None, keep: bool = True) -> tuple[Tensor, ...]:
        y = self.forward(recipe, keep)
        return torch.autograd.grad(y, [self.x, self.probs, *self.mlp.parameters()], self.p.dy)

    def inference(self, recipe: ops.Recipe | None, keep: bool = True) -> Tensor:
        with torch.no_grad():
            return self.forward(recipe, keep)

    def report_launches(self, shape: str) -> None:
        self.both(RECIPE)
        y: list[Tensor] = []
        forward = len(launches(lambda: y.append(self.forward(RECIPE))))
        wanted = [self.x, self.probs, *self.mlp.parameters()]
        backward = len(launches(lambda: torch.autograd.grad(y[0], wanted, self.p.dy)))
        print(f"{shape:11s} fp8 launches: {forward} forward, {backward} backward", flush=True)


def calls_of(p: Problem) -> dict[str, Calls]:
    """Each way has a layer of its own over the same memory: a forward that does not use what is kept drops it."""
    ways = {"fp8, update": (RECIPE, False), "fp8": (RECIPE, True), "fp8, kept": (KEPT, True), "bf16": (None, True)}
    layers = {name: Layer(p) for name in ways}
    runs = {PARTS[0]: Layer.inference, PARTS[1]: Layer.both}
    return {
        part: {name: lambda run=run, layer=layers[name], way=way: run(layer, *way) for name, way in ways.items()}
        for part, run in runs.items()
    }


def bench(shape: str) -> None:
    p = make_problem(*SHAPES[shape])
    Layer(p).report_launches(shape)
    ours, theirs = calls_of(p), te_fp8_layer(p)
    for part in PARTS:
        times = medians(ours[part] | theirs.get(part, {}))
        for name, ms in times.items():
            rate = p.flops()[part] / ms / 1e9
            ratio = ms / times["fp8, update"]
            print(f"{shape:11s} {part:19s} {name:12s} {ms:8.3f} ms {rate:6.0f} TF  x{ratio:.3f}", flush=True)


def bench_kernels(shape: str) -> None:
    for name, call in calls_of(make_problem(*SHAPES[shape]))[PARTS[1]].items():
        times = launch_times(call)
        print(
            f"{shape:11s} {PARTS[1]} {name}: {sum(ms for _, ms in times):.3f} ms in {len(times)} launches", flush=True
        )
        for kernel, ms in times:
            print(f"    {ms:7.3f} ms  {kernel[:90]}", flush=True)


def bench_rows(shape: str, counts: list[int]) -> None:
    hidden, width, groups, _ = SHAPES[shape]
    for rows in counts:
        calls = calls_of(make_problem(hidden, width, groups, rows))["forward + backward"]
        times = medians(calls, rounds=9)
        ratios = {name: times["bf16"] / ms for name, ms in times.items() if name != "bf16"}
        shown = ", ".join(f"{name} x{ratio:.3f}" for name, ratio in ratios.items())
        print(f"{shape:11s} {rows:6d} rows  bf16 {times['bf16']:7.3f} ms: {shown}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES), help="comma-separated, of: " + ", ".join(SHAPES))
    parser.add_argument("--rows", help="comma-separated: compare with BF16 alone, at these row counts")
    parser.add_argument("--kernels", action="store_true", help="every launch of the layer, one after the other")
    args = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {datetime.date.today()}", flush=True)
    for shape in args.shapes.split(","):
        if args.kernels:
            bench_kernels(shape)
        elif args.rows:
            bench_rows(shape, [int(rows) for rows in args.rows.split(",")])
        else:
            bench(shape)


if __name__ == "__main__":
    main()
