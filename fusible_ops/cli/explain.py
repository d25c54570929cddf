"""Explain: say which kernels a model's ops run on, with what work, and why not where they do not; also as a page.

Text is what Sequential.explain() gives; --json and --html add, for so many rows, the work of each launch beside the
machine's limits, and what forward keeps for backward.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import fusible_ops
from cute_kernels.target import KNOWN_ARCHS
from fusible_ops.cli.models import DTYPES, HELP, RECIPES, NoModel, load, positive
from fusible_ops.picture import ROWS, as_data, picture
from fusible_ops.sequential import Sequential


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = HELP
    parser.add_argument("model", metavar="MODEL", help="see below")
    parser.add_argument("--arch", default="sm_90a", choices=list(KNOWN_ARCHS))
    parser.add_argument("--rows", type=positive, default=ROWS, help=f"row count (default: {ROWS})")
    parser.add_argument("--autocast", choices=DTYPES, help="as under torch.autocast in this dtype")
    parser.add_argument("--recipe", choices=RECIPES, help="as under fusible_ops.autocast(recipe=...), its defaults")
    parser.add_argument("--json", action="store_true", help="data instead of text")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the page there")


def run(arguments: argparse.Namespace) -> int:
    dtype = DTYPES.get(arguments.autocast)
    recipe = getattr(fusible_ops, arguments.recipe)() if arguments.recipe else None
    chains = [module for module in load(arguments.model).modules() if isinstance(module, Sequential)]
    if not chains:
        raise NoModel(f"{arguments.model} has no Sequential of ops in it")
    how = (arguments.arch, arguments.rows, dtype, recipe)
    if arguments.html:
        arguments.html.parent.mkdir(parents=True, exist_ok=True)
        arguments.html.write_text("\n".join(picture(chain, *how) for chain in chains))
    if arguments.json:
        print(json.dumps([as_data(chain, *how) for chain in chains], indent=1))
    else:
        print("\n\n".join(chain.explain(arguments.arch, dtype=dtype, recipe=recipe) for chain in chains))
    return 0
