"""Warm-up: compile the kernels that a model needs ahead of time, also on a machine without a GPU.

On the machine that has one, set FUSIBLE_OPS_KERNELS to the directory, or call fusible_ops.use_kernels(directory); with
no_compile=True whatever the pack lacks raises an error that names it. The pack fits the versions of CUTLASS DSL and
tvm-ffi that made it, and this version of fusible-ops.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import torch

import fusible_ops
from cute_kernels.target import KNOWN_ARCHS
from fusible_ops.cli.models import DTYPES, HELP, RECIPES, load, positive
from fusible_ops.meta_run import Use
from fusible_ops.warmup import Compiled, compile_pack, compiled_at_first_call, kernels_of

AT_FIRST_CALL = (
    "cuDNN Frontend cannot save kernels, so every process compiles these at their first call, 1 to 5 s each: run a "
    "step before a clock is started or a CUDA graph captured"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = HELP
    parser.add_argument("model", metavar="MODEL", help="see below")
    parser.add_argument("--arch", default="sm_90a", choices=[arch for arch in KNOWN_ARCHS if arch != "cpu"])
    parser.add_argument("--out", type=Path, metavar="DIR", help="the pack; made if it is not there")
    parser.add_argument("--inference", action="store_true", help="no backward")
    parser.add_argument("--autocast", choices=DTYPES, help="as under torch.autocast in this dtype")
    parser.add_argument("--recipe", choices=RECIPES, help="as under fusible_ops.autocast(recipe=...), its defaults")
    parser.add_argument("--probs", choices=DTYPES, default="float32", help="dtype of router probabilities")
    parser.add_argument("--splits", choices=("int64", "int32"), default="int64", help="dtype of split sizes")
    parser.add_argument("--jobs", type=positive, default=os.cpu_count() or 1, help="compilers at a time")
    parser.add_argument("--list", action="store_true", help="name the kernels; compile nothing")


def run(arguments: argparse.Namespace) -> int:
    if arguments.out is None and not arguments.list:
        print("--out DIR must say where the pack goes; --list needs none, and compiles nothing", file=sys.stderr)
        return 2
    use = Use(
        training=not arguments.inference,
        probs=DTYPES[arguments.probs],
        splits=getattr(torch, arguments.splits),
        autocast=DTYPES.get(arguments.autocast),
        recipe=getattr(fusible_ops, arguments.recipe)() if arguments.recipe else None,
    )
    model = load(arguments.model)
    specs, later = kernels_of(model, arguments.arch, use), compiled_at_first_call(model, arguments.arch, use)
    if not specs and not later:
        print(f"{arguments.model} needs no kernels on {arguments.arch}: nothing is fused there (`explain` says why)")
        return 1
    if arguments.list:
        print(*(f"{module} {options}" for module, options, _ in specs), sep="\n", end="\n" if specs else "")
    if later:
        print(AT_FIRST_CALL)
        for title, kernels in later:
            print(f"  {title}", *(f"    {bound.kernel.name}  {bound.use}" for bound in kernels), sep="\n")
    if arguments.list or not specs:
        return 0
    bar, began = Bar(len(specs)), time.perf_counter()
    made = compile_pack(specs, arguments.out, arguments.jobs, bar.advance)
    new, seconds = sum(kernel.new for kernel in made), time.perf_counter() - began
    size = sum(path.stat().st_size for path in arguments.out.iterdir())
    print(
        f"{len(made)} kernels for {arguments.arch}, {new} compiled now in {seconds:.0f} s; {arguments.out} has "
        f"{size / 2**20:.1f} MiB"
    )
    return 0


class Bar:
    """Progress on standard error: a bar on a terminal, else a line for each kernel."""

    def __init__(self, total: int) -> None:
        self.total, self.done = total, 0

    def advance(self, made: Compiled) -> None:
        self.done += 1
        name = f"{made.spec[0].rpartition('.')[2]} {getattr(made.spec[1], 'kind', '')}".rstrip()
        text = (
            f"{self.done}/{self.total}  {name}  {made.seconds:.1f} s"
            if made.new
            else f"{self.done}/{self.total}  {name}"
        )
        if sys.stderr.isatty():
            filled = 30 * self.done // self.total
            end = "\n" if self.done == self.total else ""
            print(f"\r[{'#' * filled}{'.' * (30 - filled)}] {text:60.60}", end=end, file=sys.stderr, flush=True)
        else:
            print(text, file=sys.stderr, flush=True)
