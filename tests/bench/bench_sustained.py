"""The grouped MLP layer, forward + backward, each way by itself without a pause, as a training run has it.

    LD_PRELOAD=<a current cuBLAS> python -m tests.bench.bench_sustained [--shapes dsv3_ep32,gptoss_ep4,qwen3_30b]
    python -m tests.bench.bench_sustained --only fp8,mxfp8                    these beside our BF16

The other benches take ways in turn, so that one is timed at the clock that the ones before it left. Here each has the
GPU for a second, and the power limit sets the clock for what it does itself; L2 is not emptied. Medians of three turns.
Prints milliseconds, TFLOP/s, how many times as fast as our BF16, and the clock and power at the end of a turn.
"""

from __future__ import annotations

import argparse
import datetime
import functools

import torch

import fusible_ops as ops
from fusible_ops.bench.peers import Calls, Problem, quack_layer, te_fp8_layer, torch_layer
from tests.bench.bench_fp8_layer import Layer
from tests.bench.bench_grouped_mlp import SHAPES, make_problem
from tests.bench.timing import sustained

PART = "forward + backward"
RECIPES = {
    "bf16": None,
    "fp8": ops.Float8BlockScaling(),
    "mxfp8": ops.MXFP8BlockScaling(),
    "nvfp4": ops.NVFP4BlockScaling(),
}


def calls_of(p: Problem) -> Calls:
    """Ours under each recipe, between two updates of the weights; the peers."""
    ours: Calls = {name: functools.partial(Layer(p).both, recipe) for name, recipe in RECIPES.items()}
    for peer in (torch_layer(p), quack_layer(p), te_fp8_layer(p)):
        ours |= peer.get(PART, {})
    return ours


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES), help="comma-separated, of: " + ", ".join(SHAPES))
    parser.add_argument("--only", help="comma-separated names of ways; bf16 is always there")
    args = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {datetime.date.today()}", flush=True)
    for shape in args.shapes.split(","):
        p = make_problem(*SHAPES[shape])
        calls = calls_of(p)
        if args.only:
            wanted = {"bf16", *args.only.split(",")}
            if unknown := wanted - calls.keys():
                parser.error(f"no way is called {', '.join(sorted(unknown))}; there are {', '.join(calls)}")
            calls = {name: call for name, call in calls.items() if name in wanted}
        found = sustained(calls)
        for name, (ms, clock, watts) in found.items():
            rate, ratio = p.flops()[PART] / ms / 1e9, found["bf16"][0] / ms
            state = f"{clock:5.0f} MHz {watts:4.0f} W"
            print(f"{shape:11s} {name:12s} {ms:8.3f} ms {rate:6.0f} TF  x{ratio:.3f}  {state}", flush=True)
        del p, calls
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
