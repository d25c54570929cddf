"""The command `fusible-ops`: doctor, explain, warmup, bench. `main` parses; each command has a file of its own."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from fusible_ops.cli.models import NoModel

COMMANDS = ("doctor", "explain", "warmup", "bench")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the arguments (default: of the process) name; its exit code."""
    parser = argparse.ArgumentParser(prog="fusible-ops", description="Tools of the package fusible-ops.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name in COMMANDS:
        module = import_module(f"fusible_ops.cli.{name}")
        text = module.__doc__ or ""
        command = commands.add_parser(
            name,
            help=text.splitlines()[0].partition(": ")[2].rstrip("."),
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    chosen = parser.parse_args(arguments)
    try:
        return chosen.run(chosen)
    except NoModel as error:
        print(f"fusible-ops: {error}", file=sys.stderr)
        return 2
