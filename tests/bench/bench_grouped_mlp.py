"""The BF16 grouped MLP layer beside PyTorch and QuACK at three models' shapes: `fusible-ops bench`, with their names.

python -m tests.bench.bench_grouped_mlp [--shapes dsv3_ep32,gptoss_ep4,qwen3_30b] [--parts all] [--json FILE]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from fusible_ops.bench.grouped_mlp import PARTS, Shape, make_problem, measure

__all__ = ["SHAPES", "make_problem"]

SHAPES = {
    "dsv3_ep32": Shape(7168, 2048, 8, 32768),
    "gptoss_ep4": Shape(2880, 2880, 32, 32768),
    "qwen3_30b": Shape(2048, 768, 128, 65536),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES), help="comma-separated, of: " + ", ".join(SHAPES))
    parser.add_argument("--parts", default="all", help="comma-separated, of: " + ", ".join(PARTS))
    parser.add_argument("--json", type=Path, help="write the figures there")
    args = parser.parse_args()
    parts = PARTS if args.parts == "all" else args.parts.split(",")
    report = measure([SHAPES[name] for name in args.shapes.split(",")], parts, lambda row: print(row, flush=True))
    print(report.heading())
    if args.json:
        report.write(args.json)


if __name__ == "__main__":
    main()
