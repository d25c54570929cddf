"""NVFP4 on one GPU, all in turn in one run: quantise beside a device copy, products and the layer beside BF16.

    python -m tests.bench.bench_nvfp4 [--shapes dsv3_ep32,gptoss_ep4,qwen3_30b] [--parts quantise,products,layer]

Rows as in `bench_mxfp8`. Wanted: 0.80 of copies' bandwidth, 0.7 times BF16's speed of the layer.
"""

from __future__ import annotations

import argparse
import datetime

import torch

import fusible_ops as ops
from cute_kernels.hopper.grouped_gemm import grouped_gemm_act, grouped_gemm_dact
from cute_kernels.hopper.grouped_wgrad import grouped_wgrad
from cute_kernels.hopper.nvfp4_grouped_gemm import nvfp4_grouped_gemm_act, nvfp4_grouped_gemm_dact
from cute_kernels.hopper.nvfp4_grouped_wgrad import nvfp4_grouped_wgrad
from cute_kernels.hopper.nvfp4_quantize import nvfp4_amax, nvfp4_dequantize, nvfp4_quantize, nvfp4_quantize_weight
from cute_kernels.quantization.random_bits import random_state
from tests.bench.bench_fp8 import Calls, normal, offsets_of, report_bandwidth
from tests.bench.bench_fp8_layer import Layer
from tests.bench.bench_grouped_mlp import SHAPES, make_problem
from tests.bench.bench_mxfp8 import SWIGLU, TASKS, report
from tests.bench.timing import launches, medians

RECIPE = ops.NVFP4BlockScaling()


def quantise(shape: str) -> None:
    hidden, intermediate, groups, rows = SHAPES[shape]
    x, w = normal(rows, hidden), normal(groups, 2 * intermediate, hidden)
    calls: Calls = {}
    sizes: dict[str, float] = {}
    one, state = 0.5 + 1 / 16, random_state("cuda")
    for multiple in (128, 1):
        offsets, padded = offsets_of(groups, rows, multiple)
        both, real = nvfp4_amax(x, offsets, padded, True), int(padded[-1]) * hidden
        unaligned = ", unaligned" if multiple == 1 else ""
        calls["amax" + unaligned] = lambda o=offsets, p=padded: nvfp4_amax(x, o, p, True)
        sizes["amax" + unaligned] = 2.0 * x.numel()
        for name, flags, bits, written in (
            ("rows and stored", (True, False, True), None, 2.0 * x.numel() + one * real),
            ("rows and columns", (True, True, False), state, 2.0 * x.numel() + 2.0 * real),
        ):
            how = (offsets, padded, *both, bits, *flags, True)
            calls[name + unaligned] = lambda how=how: nvfp4_quantize(x, *how)
            sizes[name + unaligned] = 2.0 * x.numel() + written
        _, _, data, scale = nvfp4_quantize(x, offsets, padded, *both, None, False, False, True, True)
        calls["restore" + unaligned] = lambda d=data, s=scale, p=padded: nvfp4_dequantize(d, s, p)
        sizes["restore" + unaligned] = (one + 2.0) * real
    calls["weights, square"] = lambda: nvfp4_quantize_weight([w], square=True)
    sizes["weights, square"] = 6.0 * w.numel()
    report_bandwidth(shape, x, calls, sizes)


def products(shape: str) -> None:
    hidden, intermediate, groups, rows = SHAPES[shape]
    offsets, _ = offsets_of(groups, rows)
    x, dy = normal(rows, hidden), normal(rows, hidden)
    w1 = (normal(groups, 2 * intermediate, hidden).float() * hidden**-0.5).bfloat16()
    w2 = (normal(groups, hidden, intermediate).float() * hidden**-0.5).bfloat16()
    probs, one = torch.rand(rows, device="cuda"), torch.full((groups,), 2688.0, device="cuda")
    _, preact = grouped_gemm_act(x, [w1], offsets, SWIGLU, None, probs)
    how = {"zero_tail": False, "need_dprobs": True, "need_act": False}
    flops = 2.0 * rows * hidden * intermediate
    for name, count, calls in (
        (
            "fc1 and act",
            2 * flops,
            {
                "bf16": lambda: grouped_gemm_act(x, [w1], offsets, SWIGLU, None, probs, zero_tail=False),
                "nvfp4": lambda: nvfp4_grouped_gemm_act(x, [w1], offsets, one, one, SWIGLU, None, probs, rotated=True),
                "not rotated": lambda: nvfp4_grouped_gemm_act(x, [w1], offsets, one, one, SWIGLU, None, probs),
            },
        ),
        (
            "dact",
            flops,
            {
                "bf16": lambda: grouped_gemm_dact(dy, [w2], offsets, preact, SWIGLU, probs, **how),
                "nvfp4": lambda: nvfp4_grouped_gemm_dact(
                    dy, [w2], offsets, one, one, preact, SWIGLU, probs, need_dprobs=True, rotated=True
                ),
                "not rotated": lambda: nvfp4_grouped_gemm_dact(
                    dy, [w2], offsets, one, one, preact, SWIGLU, probs, need_dprobs=True
                ),
            },
        ),
        (
            "fc1 weight gradient",
            2 * flops,
            {
                "bf16": lambda: grouped_wgrad(preact, x, offsets),
                "nvfp4": lambda: nvfp4_grouped_wgrad(preact, x, offsets, one, one),
            },
        ),
    ):
        report(shape, name, count, medians(calls))


def layer(shape: str) -> None:
    p = make_problem(*SHAPES[shape])
    watched = Layer(p)
    watched.both(RECIPE)
    y: list[torch.Tensor] = []
    forward = len(launches(lambda: y.append(watched.forward(RECIPE))))
    wanted = [watched.x, watched.probs, *watched.mlp.parameters()]
    backward = len(launches(lambda: torch.autograd.grad(y[0], wanted, p.dy)))
    print(f"{shape:11s} nvfp4 launches: {forward} forward, {backward} backward", flush=True)
    ways = {"bf16": (None, True), "nvfp4": (RECIPE, True), "nvfp4, update": (RECIPE, False)}
    layers = {name: Layer(p) for name in ways}
    for task, run in zip(TASKS, (Layer.inference, Layer.both), strict=True):
        calls = {name: lambda run=run, own=layers[name], way=way: run(own, *way) for name, way in ways.items()}
        report(shape, task, p.flops()[task], medians(calls))


PARTS = {"quantise": quantise, "products": products, "layer": layer}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES), help="comma-separated, of: " + ", ".join(SHAPES))
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated, of: " + ", ".join(PARTS))
    args = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {datetime.date.today()}", flush=True)
    for part in args.parts.split(","):  # layers last: they leave a low clock
        for shape in args.shapes.split(","):
            PARTS[part](shape)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
