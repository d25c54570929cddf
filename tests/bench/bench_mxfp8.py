"""MXFP8 on one GPU, all in turn in one run: quantise beside a device copy, products and the layer beside BF16.

    python -m tests.bench.bench_mxfp8 [--shapes dsv3_ep32,gptoss_ep4,qwen3_30b] [--parts quantise,products,layer]

Quantise rows: milliseconds, bytes read and written per second, and that over what copies of 1 GiB, and of as many bytes
as the source, move in that run. Wanted: 0.80.
Other rows: milliseconds, TFLOP/s, and how many times as fast as BF16. Wanted of the layer: 0.85. "mxfp8, update": the
first call after an update, which quantises the weights. "mxfp8, kept": the pre-activation is kept in MXFP8.
"""

from __future__ import annotations

import argparse
import datetime

import torch

import fusible_ops as ops
from cute_kernels.activation import Activation
from cute_kernels.hopper.grouped_gemm import grouped_gemm_act, grouped_gemm_dact
from cute_kernels.hopper.mxfp8_grouped_gemm import mxfp8_grouped_gemm_act, mxfp8_grouped_gemm_dact
from cute_kernels.hopper.mxfp8_quantize import mxfp8_dequantize, mxfp8_quantize, mxfp8_quantize_weight
from cute_kernels.mxfp8_reference import BLOCK
from tests.bench.bench_fp8 import Calls, normal, offsets_of, report_bandwidth
from tests.bench.bench_fp8_layer import Layer
from tests.bench.bench_grouped_mlp import SHAPES, make_problem
from tests.bench.timing import launches, medians

RECIPE, KEPT = ops.MXFP8BlockScaling(), ops.MXFP8BlockScaling(preactivation="quantized")
SWIGLU = Activation("swiglu")
TASKS = ("forward", "forward + backward")


def quantise(shape: str) -> None:
    hidden, intermediate, groups, rows = SHAPES[shape]
    x, w = normal(rows, hidden), normal(groups, 2 * intermediate, hidden)
    calls: Calls = {}
    sizes: dict[str, float] = {}
    one = 1 + 1 / 32
    for multiple in (128, 1):
        offsets, padded = offsets_of(groups, rows, multiple, BLOCK)
        real = int(padded[-1]) * hidden
        unaligned = ", unaligned" if multiple == 1 else ""
        for name, flags, written in (
            ("rows and stored", (True, False, True), 2.0 * x.numel() + one * real),
            ("rows and columns", (True, True, False), 4.0 * x.numel()),
        ):
            calls[name + unaligned] = lambda o=offsets, p=padded, f=flags: mxfp8_quantize(x, o, p, *f)
            sizes[name + unaligned] = 2.0 * x.numel() + written
        _, _, data, scale = mxfp8_quantize(x, offsets, padded, False, False, True)
        calls["restore" + unaligned] = lambda d=data, s=scale, o=offsets, p=padded: mxfp8_dequantize(d, s, o, p, rows)
        sizes["restore" + unaligned] = (one + 2.0) * x.numel()
    calls["weights"] = lambda: mxfp8_quantize_weight([w])
    calls["weights, square"] = lambda: mxfp8_quantize_weight([w], square=True)
    sizes |= {"weights": 6.0 * w.numel(), "weights, square": 4.0 * w.numel()}
    report_bandwidth(shape, x, calls, sizes)


def products(shape: str) -> None:
    hidden, intermediate, groups, rows = SHAPES[shape]
    offsets, padded = offsets_of(groups, rows, padding=BLOCK)
    x, dy = (mxfp8_quantize(normal(rows, hidden), offsets, padded).rows for _ in range(2))
    w1 = (normal(groups, 2 * intermediate, hidden).float() * hidden**-0.5).bfloat16()
    w2 = (normal(groups, hidden, intermediate).float() * hidden**-0.5).bfloat16()
    probs = torch.rand(rows, device="cuda")
    _, preact = grouped_gemm_act(x, [w1], offsets, SWIGLU, None, probs)
    _, kept = mxfp8_grouped_gemm_act(x, [w1], offsets, SWIGLU, None, probs, quantize_preact=True)
    how = {"need_dprobs": True}
    for name, flops, calls in (
        (
            "fc1 and act",
            4.0 * rows * hidden * intermediate,
            {
                "bf16": lambda: grouped_gemm_act(x, [w1], offsets, SWIGLU, None, probs, zero_tail=False),
                "mxfp8": lambda: mxfp8_grouped_gemm_act(x, [w1], offsets, SWIGLU, None, probs),
                "mxfp8, kept": lambda: mxfp8_grouped_gemm_act(
                    x, [w1], offsets, SWIGLU, None, probs, quantize_preact=True
                ),
            },
        ),
        (
            "dact",
            2.0 * rows * hidden * intermediate,
            {
                "bf16": lambda: grouped_gemm_dact(dy, [w2], offsets, preact, SWIGLU, probs, zero_tail=False, **how),
                "mxfp8": lambda: mxfp8_grouped_gemm_dact(dy, [w2], offsets, preact, SWIGLU, probs, **how),
                "mxfp8, kept": lambda: mxfp8_grouped_gemm_dact(dy, [w2], offsets, kept, SWIGLU, probs, **how),
            },
        ),
    ):
        report(shape, name, flops, medians(calls))


def layer(shape: str) -> None:
    p = make_problem(*SHAPES[shape])
    watched = Layer(p)
    watched.both(RECIPE)
    y: list[torch.Tensor] = []
    forward = len(launches(lambda: y.append(watched.forward(RECIPE))))
    wanted = [watched.x, watched.probs, *watched.mlp.parameters()]
    backward = len(launches(lambda: torch.autograd.grad(y[0], wanted, p.dy)))
    print(f"{shape:11s} mxfp8 launches: {forward} forward, {backward} backward", flush=True)
    ways = {
        "bf16": (None, True),
        "mxfp8": (RECIPE, True),
        "mxfp8, kept": (KEPT, True),
        "mxfp8, update": (RECIPE, False),
    }
    layers = {name: Layer(p) for name in ways}
    for task, run in zip(TASKS, (Layer.inference, Layer.both), strict=True):
        calls = {name: lambda run=run, own=layers[name], way=way: run(own, *way) for name, way in ways.items()}
        report(shape, task, p.flops()[task], medians(calls))


def report(shape: str, what: str, flops: float, times: dict[str, float]) -> None:
    for name, ms in times.items():
        rate, ratio = flops / ms / 1e9, times["bf16"] / ms
        print(f"{shape:11s} {what:19s} {name:14s} {ms:8.3f} ms {rate:6.0f} TF  x{ratio:.3f}", flush=True)


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
