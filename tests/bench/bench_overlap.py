"""The BF16 grouped MLP beside a kernel that moves memory on a few SMs, as communication does: what scheduling is for.

    python -m tests.bench.bench_overlap                                                 # on a GPU
    python -m tests.bench.bench_overlap --csv docs/overlap.csv                          # and writes this
    python -m tests.bench.bench_overlap --csv docs/overlap.csv --plot docs/overlap.png  # anywhere: draws it

Forward and backward of the layer on one stream; on another a copy by so many CTAs (`--ctas`), which take an SM each as
our kernels leave no room beside them, and which take as long as the layer takes alone. Either starts first. Static
and dynamic scheduling, without a margin and with one of as many SMs; milliseconds until the layer, the copy, and both
are done; medians of 9, configurations in turn.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import statistics
from pathlib import Path

import torch

from fusible_ops.bench.grouped_mlp import make_mlp
from tests.bench.bench_grouped_mlp import SHAPES, make_problem

COLUMNS = ("first", "scheduler", "sm_margin", "layer_ms", "copy_ms", "both_ms")


def make_copy(ctas: int, megabytes: int = 1024):
    """A function that copies `megabytes` so many times on `ctas` CTAs of 1024 threads."""
    import triton
    import triton.language as tl

    @triton.jit
    def copy(source, target, count, passes, BLOCK: tl.constexpr):
        for _ in range(passes):
            for start in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
                at = start + tl.arange(0, BLOCK)
                tl.store(target + at, tl.load(source + at))

    source, target = (torch.empty(megabytes * 2**18, dtype=torch.float32, device="cuda") for _ in range(2))
    return lambda passes: copy[(ctas,)](source, target, source.numel(), passes, BLOCK=16384, num_warps=32)


def make_layer(shape: str):
    """(the module, a function that runs its forward and backward)."""
    hidden, intermediate, groups, rows = SHAPES[shape]
    p = make_problem(hidden, intermediate, groups, rows)
    mlp = make_mlp(hidden, intermediate, groups)
    mlp[0].weight.data, mlp[2].weight.data = p.w1, p.w2
    x, probs = p.x.requires_grad_(), p.probs.requires_grad_()
    wanted = [x, probs, *mlp.parameters()]
    return mlp, lambda: torch.autograd.grad(mlp(x, p.splits, probs, p.splits), wanted, p.dy)


def once(layer, copy, first: str, side: torch.cuda.Stream) -> tuple[float, float, float]:
    """Milliseconds until the layer, the copy, and both are done; either may be None."""
    here = torch.cuda.current_stream()
    start, layer_done, copy_done = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    start.record()
    side.wait_event(start)

    def run_copy() -> None:
        with torch.cuda.stream(side):
            if copy is not None:
                copy()
            copy_done.record()

    if first == "copy":
        run_copy()
    if layer is not None:
        layer()
    layer_done.record()
    if first != "copy":
        run_copy()
    here.wait_stream(side)
    torch.cuda.synchronize()
    times = start.elapsed_time(layer_done), start.elapsed_time(copy_done)
    return (*times, max(times))


def measure(shape: str, ctas: int, rounds: int = 9) -> list[dict[str, object]]:
    """A row for each configuration; first each alone."""
    mlp, layer = make_layer(shape)
    copy_passes, side = make_copy(ctas), torch.cuda.Stream()
    for scheduler in ("dynamic", "static"):
        mlp.scheduler = scheduler
        layer()
    copy_passes(1)
    torch.cuda.synchronize()
    alone = statistics.median(once(layer, None, "layer", side)[0] for _ in range(5))
    one, three = (
        statistics.median(once(None, lambda: copy_passes(n), "copy", side)[1] for _ in range(3))  # noqa: B023
        for n in (1, 3)
    )
    passes = max(1, round(alone / ((three - one) / 2)))

    def copy() -> None:
        copy_passes(passes)

    cases = [("layer alone", "static", 0), ("copy alone", "", 0)]
    cases += itertools.product(("copy", "layer"), ("static", "dynamic"), (0, ctas))
    times: dict[tuple, list[tuple[float, float, float]]] = {case: [] for case in cases}
    for turn in range(rounds):
        for case in cases[turn % len(cases) :] + cases[: turn % len(cases)]:
            first, scheduler, margin = case
            if scheduler:
                mlp.scheduler, mlp.sm_margin = scheduler, margin
                mlp.groups()
            runs = layer if first != "copy alone" else None, copy if first != "layer alone" else None
            once(*runs, first, side)
            times[case].append(once(*runs, first, side))
    rows = []
    for case, found in times.items():
        medians = [round(statistics.median(column), 3) for column in zip(*found, strict=True)]
        rows.append(dict(zip(COLUMNS, (*case, *medians), strict=True)))
    return rows


def plot(rows: list[dict[str, str]], file: Path) -> None:
    """Bars: when layer and copy are done in each configuration; lines: each alone, and one after the other."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    alone = {row["first"]: float(row["both_ms"]) for row in rows if row["first"].endswith("alone")}
    rows = [row for row in rows if not row["first"].endswith("alone")]
    figure, axes = plt.subplots(figsize=(9, 4.2))
    for at, row in enumerate(rows):
        for offset, column, colour in ((-0.2, "layer_ms", "tab:blue"), (0.2, "copy_ms", "tab:orange")):
            height = float(row[column])
            axes.bar(at + offset, height, 0.38, color=colour)
            axes.text(at + offset, height + 0.3, f"{height:.1f}", ha="center", fontsize=8)
    axes.axhline(alone["layer alone"], color="tab:blue", linestyle=":", label="layer alone")
    axes.axhline(alone["copy alone"], color="tab:orange", linestyle=":", label="copy alone")
    axes.axhline(sum(alone.values()), color="grey", linestyle=":", label="one after the other")
    axes.set_xticks(range(len(rows)))
    axes.set_xticklabels([f"{r['scheduler']}\nmargin {r['sm_margin']}\n{r['first']} first" for r in rows], fontsize=8)
    axes.set_ylabel("ms until done (layer, copy)")
    axes.legend(fontsize=8, loc="upper left")
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, help="file for what is measured; read, not written, with --plot")
    parser.add_argument("--plot", type=Path, help="draw the CSV into this file")
    parser.add_argument("--shape", default="dsv3_ep32", help="one of: " + ", ".join(SHAPES))
    parser.add_argument("--ctas", type=int, default=16, help="CTAs of the copy, and the margin")
    args = parser.parse_args()
    if args.plot and not args.csv:
        parser.error("--plot draws what --csv holds: give both")
    if args.plot:
        with args.csv.open(newline="") as file:
            plot(list(csv.DictReader(file)), args.plot)
        return
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {args.shape}, {args.ctas} CTAs", flush=True)
    rows = measure(args.shape, args.ctas)
    if args.csv:
        with args.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)
    for row in rows:
        print("  ".join(f"{row[column]!s:>11}" for column in COLUMNS))


if __name__ == "__main__":
    main()
