"""The experts of a MoE layer on several GPUs: a training step's time, and what scheduling and margins are for there.

    torchrun --standalone --nproc-per-node 2 -m tests.bench.bench_expert_parallel --json FILE       on GPUs
    python -m tests.bench.bench_expert_parallel                     on one GPU: rows travel in its own memory
    python -m tests.bench.bench_expert_parallel --json FILE --plot FILE.png                         anywhere: draws it

Rows travel by `examples/expert_parallel.py` with a fixed capacity, so the host waits for nothing. "in one": all tokens
of a rank at once, so experts wait for what arrives. "in halves": the rows of one half travel beside the products of the
other, on SMs that those hold or leave free: static and dynamic scheduling, each with margins.
"alone": the experts' own products, on as many rows, and the travel of all rows there and back, forward and backward.
Forward and backward, as after an update of the weights; milliseconds on the slowest rank; medians of 7, in turn. On
GPUs each is a CUDA graph, so that the host's launches are not what is measured; with --eager it is not. A graph keeps
no quantised weights from one forward to the next: in halves FP8 quantises them twice.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fusible_ops as ops
from fusible_ops import casts

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SHAPES = {
    # width, expert width, experts, experts of a token, tokens of each rank
    "tiny": (64, 64, 4, 2, 32),
    "gptoss": (2880, 2880, 32, 4, 8192),
    "dsv3": (7168, 2048, 64, 8, 4096),
    "qwen3": (2048, 768, 128, 8, 8192),
}
MARGINS = (0, 8, 16, 32)
RECIPES = {"bf16": None, "fp8": ops.Float8BlockScaling()}


class Layer:
    """This rank's experts and tokens, and the ways to run them. slack: the capacity, in shares of an even spread."""

    def __init__(self, shape: str, recipe: ops.Recipe | None, slack: float, device: torch.device) -> None:
        sys.path.insert(0, str(EXAMPLES))
        import expert_parallel
        from moe_lm import ModelConfig

        width, expert_width, experts, top_k, tokens = SHAPES[shape]
        config = ModelConfig(
            width=width, heads=1, layers=1, experts=experts, top_k=top_k, expert_width=expert_width, context=1,
            expert_dtype=torch.bfloat16, recipe=recipe,
        )  # fmt: skip
        torch.manual_seed(dist.get_rank())
        self.ranks, self.rows = dist.get_world_size(), tokens * top_k
        self.experts = expert_parallel.ParallelExperts(config, device, int(slack * self.rows / self.ranks))
        self.travel = expert_parallel.all_to_all
        self.x, self.dy = (torch.randn(tokens, width, device=device, dtype=torch.bfloat16) for _ in range(2))
        self.x.requires_grad_()
        self.wanted = [self.x, *self.experts.parameters()]
        self.experts.router.bfloat16()
        even = torch.full((experts // self.ranks,), self.rows // (experts // self.ranks), device=device)
        self.sorted = torch.randn(self.rows, width, device=device, dtype=torch.bfloat16, requires_grad=True)
        self.sizes, self.weights = even, torch.rand(self.rows, device=device)

    def share(self, scheduler: str | None, margin: int) -> None:
        self.experts.mlp.scheduler, self.experts.mlp.sm_margin = scheduler, margin

    def update(self) -> None:
        """As after an optimizer's step: what is kept of the weights is not of these."""
        for linear in (self.experts.mlp[0], self.experts.mlp[2]):
            casts.forget(linear.weight_parameters())

    def step(self, parts: int) -> None:
        """Forward and backward of all tokens, which travel in so many parts."""
        self.update()
        self.experts.parts = parts
        torch.autograd.grad(self.experts(self.x)[0], self.wanted, self.dy)

    def products(self) -> None:
        """The experts alone, on as many rows as a rank gets if they are spread evenly."""
        self.update()
        experts = self.experts
        with ops.autocast(enabled=experts.recipe is not None, recipe=experts.recipe):
            y = experts.mlp(self.sorted, self.sizes, self.weights, self.sizes)
        torch.autograd.grad(y, [self.sorted, *experts.mlp.parameters()], y.detach())

    def travels(self) -> None:
        """The rows there and back, forward and backward, nothing else."""
        rows = self.sorted.detach()[: self.rows // self.ranks * self.ranks]
        for _ in range(4):
            rows = self.travel(rows, None, None)()


def cases(layer: Layer) -> dict[tuple[str, str, int], Callable[[], None]]:
    """What is measured: (way, scheduler, margin) -> a function."""

    def shared(run: Callable[[], None], scheduler: str | None, margin: int) -> Callable[[], None]:
        def call() -> None:
            layer.share(scheduler, margin)
            run()

        return call

    found = {
        ("products alone", "", 0): shared(layer.products, None, 0),
        ("travel alone", "", 0): layer.travels,
        ("in one", "static", 0): shared(lambda: layer.step(1), "static", 0),
    }
    for scheduler in ("static", "dynamic"):
        for margin in MARGINS:
            found["in halves", scheduler, margin] = shared(lambda: layer.step(2), scheduler, margin)
    return found


def slowest(run: Callable[[], None], device: torch.device) -> float:
    """Milliseconds on the rank that takes longest; all start together."""
    dist.barrier()
    if device.type == "cuda":
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        torch.cuda.synchronize()
        ms = start.elapsed_time(stop)
    else:
        begin = datetime.datetime.now()
        run()
        ms = (datetime.datetime.now() - begin).total_seconds() * 1e3
    longest = torch.tensor(ms, device=device)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return longest.item()


def graph_of(run: Callable[[], None], pool: Any) -> Callable[[], None]:
    """Replays `run`, whose exchanges run beside its products there as they do eagerly.

    pool: memory of all graphs, which run one after the other and of which nothing is kept.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool):
        run()
    return graph.replay


def measure(
    shape: str, name: str, slack: float, device: torch.device, rounds: int, graphs: bool
) -> list[dict[str, Any]]:
    """A row for each configuration."""
    layer = Layer(shape, RECIPES[name], slack, device)
    runs = cases(layer)
    if graphs:
        pool = torch.cuda.graph_pool_handle()
        runs = {case: graph_of(run, pool) for case, run in runs.items()}
    times: dict[tuple, list[float]] = {case: [] for case in runs}
    for run in runs.values():
        slowest(run, device)
    for turn in range(rounds):
        order = list(runs)
        order = order[turn % len(order) :] + order[: turn % len(order)]
        for case in order:
            slowest(runs[case], device)
            times[case].append(slowest(runs[case], device))
    if graphs:
        torch.cuda.synchronize()
        dist.barrier()  # no rank lets go of a graph that another still runs
    columns = "way", "scheduler", "sm_margin"
    return [
        {"shape": shape, "dtype": name, **dict(zip(columns, case, strict=True)), "ms": statistics.median(found)}
        for case, found in times.items()
    ]


def plot(rows: list[dict[str, Any]], heading: str, file: Path) -> None:
    """For each layer the step in halves over the margin, static and dynamic; lines: in one, and each part alone."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shapes, dtypes = (list(dict.fromkeys(row[key] for row in rows)) for key in ("shape", "dtype"))
    size = 4.6 * len(shapes), 3.8 * len(dtypes)
    figure, axes = plt.subplots(len(dtypes), len(shapes), figsize=size, squeeze=False)
    for panel, (dtype, shape) in zip(axes.flat, itertools.product(dtypes, shapes), strict=True):
        own = [row for row in rows if (row["shape"], row["dtype"]) == (shape, dtype)]
        for scheduler, colour in (("static", "tab:orange"), ("dynamic", "tab:blue")):
            points = [(r["sm_margin"], r["ms"]) for r in own if r["way"] == "in halves" and r["scheduler"] == scheduler]
            panel.plot(*zip(*points, strict=True), marker="o", color=colour, label=f"in halves, {scheduler}")
        for way, style in (("in one", "-"), ("products alone", "--"), ("travel alone", ":")):
            (ms,) = (row["ms"] for row in own if row["way"] == way)
            panel.axhline(ms, color="grey", linestyle=style, label=way)
        panel.set(title=f"{shape}, {dtype}", xlabel="SMs left free", ylabel="ms, forward and backward", ylim=(0, None))
        panel.legend(fontsize=7)
    figure.suptitle(heading, fontsize=8)
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file for what is measured; read, not written, with --plot")
    parser.add_argument("--plot", type=Path, help="draw the JSON into this file")
    parser.add_argument("--shapes", default="gptoss,dsv3,qwen3", help="comma-separated, of: " + ", ".join(SHAPES))
    parser.add_argument("--dtypes", default=",".join(RECIPES), help="comma-separated, of: " + ", ".join(RECIPES))
    parser.add_argument("--slack", type=float, default=1.25, help="rows from each rank to each, in even shares")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    args = parser.parse_args()
    if args.plot:
        if not args.json:
            parser.error("--plot draws what --json holds: give both")
        report = json.loads(args.json.read_text())
        plot(report["rows"], report["heading"], args.plot)
        return
    has_gpu = torch.cuda.is_available()
    alone = {} if dist.is_torchelastic_launched() else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)
        # Its kernels get the SMs that become free before the experts' next one does.
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        dist.init_process_group("nccl", device_id=device, pg_options=options, **alone)
    else:
        dist.init_process_group("gloo", **alone)
    graphs = has_gpu and not args.eager
    name = torch.cuda.get_device_name() if has_gpu else "CPU"
    heading = f"{dist.get_world_size()} x {name}, torch {torch.__version__}, {datetime.date.today()}"
    heading += ", CUDA graphs" if graphs else ""
    rows = []
    for shape in args.shapes.split(","):
        for dtype in args.dtypes.split(","):
            rows += measure(shape, dtype, args.slack, device, args.rounds, graphs)
            if dist.get_rank() == 0:
                for row in rows[-(3 + 2 * len(MARGINS)) :]:
                    print("  ".join(f"{value!s:>14}" for value in row.values()), flush=True)
    if dist.get_rank() == 0 and args.json:
        args.json.write_text(json.dumps({"heading": heading, "rows": rows}, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
