"""Bench: time the BF16 grouped MLP on this GPU beside the peers that are installed (PyTorch, QuACK).

Prints milliseconds, TFLOP/s and the peer's time over ours (above 1: ours is faster); data are random, L2 is emptied
between calls, times are medians. With --check the exit code is 1 if ours has lost ground against a peer.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from fusible_ops.bench.grouped_mlp import PARTS, Shape, measure
from fusible_ops.bench.report import Report, chart, slower


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shape", dest="shapes", action="append", type=Shape.read, metavar="H,I,G,T",
        help="hidden, intermediate, experts, rows; may be given several times (default: 2048,768,128,65536)",
    )  # fmt: skip
    parser.add_argument("--part", dest="parts", action="append", choices=PARTS, help="only these parts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw them there")
    parser.add_argument("--check", type=_recorded, metavar="FILE", help="compare with figures that --json wrote")
    parser.add_argument("--tolerance", type=float, default=0.05, help="what --check lets go (default: 0.05, 5 %%)")
    parser.add_argument("--from", dest="source", type=_recorded, metavar="FILE", help="figures of --json; run nothing")


def _recorded(file: str) -> Report:
    """What --json wrote there; known to be whole before anything is measured."""
    try:
        return Report.read(Path(file))
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def run(arguments: argparse.Namespace) -> int:
    if arguments.source:
        report = arguments.source
        print(report.heading(), *report.rows, sep="\n")
    elif torch.cuda.is_available():
        shapes = arguments.shapes or [Shape(2048, 768, 128, 65536)]
        report = measure(shapes, arguments.parts or PARTS, lambda row: print(row, flush=True))
        print(report.heading())
    else:
        print("fusible-ops bench needs a CUDA device; --from FILE shows figures that were recorded", file=sys.stderr)
        return 2
    for path in filter(None, (arguments.json, arguments.plot)):
        path.parent.mkdir(parents=True, exist_ok=True)
    if arguments.json:
        report.write(arguments.json)
    if arguments.plot:
        arguments.plot.write_text(chart(report))
    if arguments.check is None:
        return 0
    before = arguments.check
    lost = slower(report, before, arguments.tolerance)
    print(f"against {before.heading()}: " + ("no ground lost" if not lost else f"{len(lost)} lost"), *lost, sep="\n")
    return 1 if lost else 0
