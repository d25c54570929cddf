"""The BF16 grouped MLP layer and its parts on one GPU, beside PyTorch and QuACK, all in turn in one run.

    python -m tests.bench.bench_grouped_mlp [--shapes dsv3_ep32,gptoss_ep4,qwen3_30b] [--parts all] [--csv FILE]

Prints milliseconds, TFLOP/s and the ratio peer / ours (above 1: ours is faster) for every part. QuACK is timed as its
calls alone with outputs given; ours through the public `Sequential`, autograd and allocations included, for the two
layer rows.
"""

from __future__ import annotations

import argparse
import csv
import datetime
from pathlib import Path

import torch

import fusible_ops as ops
from cute_kernels import ops as kernels
from cute_kernels.activation import Activation
from tests.bench.peers import Calls, Problem, quack_layer, torch_layer
from tests.bench.timing import medians, uneven_splits

SHAPES = {  # hidden, intermediate, groups, rows
    "dsv3_ep32": (7168, 2048, 8, 32768),
    "gptoss_ep4": (2880, 2880, 32, 32768),
    "qwen3_30b": (2048, 768, 128, 65536),
}
PARTS = ("fc1 + swiglu", "fc2", "dact", "wgrad fc1", "wgrad fc2", "dgrad fc1", "forward", "forward + backward")
SWIGLU = Activation("swiglu")


def make_problem(hidden: int, intermediate: int, groups: int, rows: int) -> Problem:
    """Random normal data; weights scaled so that activations stay near 1."""
    torch.manual_seed(0)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16).mul_(scale)

    splits = torch.tensor(uneven_splits(groups, rows), device="cuda", dtype=torch.int32)
    return Problem(
        x=normal(rows, hidden),
        w1=normal(groups, 2 * intermediate, hidden, scale=hidden**-0.5),
        w2=normal(groups, hidden, intermediate, scale=intermediate**-0.5),
        probs=torch.rand(rows, device="cuda"),
        dy=normal(rows, hidden),
        splits=splits,
        offsets=torch.nn.functional.pad(splits.cumsum(0), (1, 0)).int(),
    )


def our_layer(p: Problem) -> dict[str, Calls]:
    """The public module for the layer rows, the operators for the parts."""
    groups, hidden = p.w1.shape[0], p.x.shape[1]
    common = {"bias": False, "device": "cuda", "dtype": torch.bfloat16, "single_grouped_weight": True}
    mlp = ops.Sequential(
        ops.GroupedLinear(groups, hidden, 2 * p.intermediate, **common),
        ops.ScaledSwiGLU(),
        ops.GroupedLinear(groups, p.intermediate, hidden, **common),
        on_unfused="error",
    )
    mlp[0].weight.data, mlp[2].weight.data = p.w1, p.w2
    x, probs = p.x.detach().requires_grad_(), p.probs.detach().requires_grad_()
    weights, offsets = [mlp[0].weight, mlp[2].weight], p.offsets

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return mlp(x, p.splits, probs, p.splits)

    def both() -> object:
        return torch.autograd.grad(mlp(x, p.splits, probs, p.splits), [x, probs, *weights], p.dy)

    act, preact = kernels.grouped_gemm_act(p.x, [p.w1], offsets, SWIGLU, None, p.probs, zero_tail=False)
    dpreact = kernels.grouped_gemm_dact(p.dy, [p.w2], offsets, preact, SWIGLU, p.probs, zero_tail=False)[0]
    parts = {
        "fc1 + swiglu": lambda: kernels.grouped_gemm_act(p.x, [p.w1], offsets, SWIGLU, None, p.probs, zero_tail=False),
        "fc2": lambda: kernels.grouped_gemm(act, [p.w2], offsets),
        "dact": lambda: kernels.grouped_gemm_dact(
            p.dy, [p.w2], offsets, preact, SWIGLU, p.probs, need_dprobs=True, zero_tail=False
        ),
        "wgrad fc1": lambda: kernels.grouped_wgrad(dpreact, p.x, offsets),
        "wgrad fc2": lambda: kernels.grouped_wgrad(p.dy, act, offsets),
        "dgrad fc1": lambda: kernels.grouped_gemm_dgrad(dpreact, [p.w1], offsets),
        "forward": forward,
        "forward + backward": both,
    }
    return {name: {"ours": call} for name, call in parts.items()}


def dense_product(p: Problem) -> Calls:
    """One dense matmul of FC1's FLOPs: the practical limit."""
    w = p.w1[0].t()
    return {"dense matmul": lambda: p.x @ w}


def flops_of(p: Problem, part: str) -> float:
    """FLOPs of one part: FC1-sized products have twice FC2's."""
    all_flops = p.flops()
    if part in ("forward", "forward + backward"):
        return all_flops[part]
    return all_flops["fc1"] if part in ("fc1 + swiglu", "wgrad fc1", "dgrad fc1") else all_flops["fc1"] / 2


def bench(shape: str, parts: list[str]) -> list[dict[str, object]]:
    """Time the parts of one shape; a row for each part and library."""
    p = make_problem(*SHAPES[shape])
    sources = [our_layer(p), torch_layer(p), quack_layer(p)]
    rows: list[dict[str, object]] = []
    for part in parts:
        calls: Calls = {name: call for source in sources for name, call in source.get(part, {}).items()}
        if part == "fc1 + swiglu":
            calls |= dense_product(p)
        flops = flops_of(p, part)
        times = medians(calls)
        ours = times.get("ours", float("nan"))
        for name, ms in times.items():
            print(
                f"{shape:11s} {part:19s} {name:22s} {ms:8.3f} ms {flops / ms / 1e9:6.0f} TF  x{ms / ours:.3f}",
                flush=True,
            )
            rows.append(
                {"shape": shape, "part": part, "library": name, "ms": round(ms, 4), "x_ours": round(ms / ours, 3)}
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES), help="comma-separated, of: " + ", ".join(SHAPES))
    parser.add_argument("--parts", default="all", help="comma-separated, of: " + ", ".join(PARTS))
    parser.add_argument("--csv", type=Path, help="append the rows to this file")
    args = parser.parse_args()
    parts = list(PARTS) if args.parts == "all" else args.parts.split(",")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {datetime.date.today()}", flush=True)
    rows = [row for shape in args.shapes.split(",") for row in bench(shape, parts)]
    if args.csv:
        stamp = {"date": str(datetime.date.today()), "gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
        new = not args.csv.exists()
        with args.csv.open("a", newline="") as file:
            writer = csv.DictWriter(file, [*stamp, *rows[0]])
            if new:
                writer.writeheader()
            writer.writerows({**stamp, **row} for row in rows)


if __name__ == "__main__":
    main()
