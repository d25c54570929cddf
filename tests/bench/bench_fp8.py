"""The FP8 kernels on one GPU, in turn in one run: quantise beside a device copy, products beside their BF16 kernels.

    python -m tests.bench.bench_fp8 [--shapes dsv3_ep32,gptoss_ep4,qwen3_30b] [--parts quantise,weights,wgrad]

Quantise rows: milliseconds, bytes read and written per second, and that over what copies of 1 GiB, and of as many bytes
as the source, move in that run.
Other rows: milliseconds, TFLOP/s, and how many times faster than BF16.
"""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Callable

import torch
from torch import Tensor

from cute_kernels.fp8_reference import padded_group_offsets
from cute_kernels.hopper.fp8_quantize import fp8_quantize, fp8_quantize_weight
from cute_kernels.hopper.fp8_wgrad import fp8_grouped_wgrad, fp8_grouped_wgrad_
from cute_kernels.hopper.grouped_wgrad import grouped_wgrad, grouped_wgrad_
from tests.bench.bench_grouped_mlp import SHAPES
from tests.bench.timing import medians, uneven_splits

Calls = dict[str, Callable[[], object]]
GIB = 2**30


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def offsets_of(groups: int, rows: int, multiple: int = 128, padding: int = 128) -> tuple[Tensor, Tensor]:
    """Of groups of multiples of so many rows, padded to multiples of so many."""
    splits = torch.tensor(uneven_splits(groups, rows, multiple), device="cuda", dtype=torch.int32)
    return padded_group_offsets(splits, rows, padding)


def moved(x: Tensor, results: tuple, end: int) -> int:
    """Bytes of x and of what is defined in the results; end: where the last group's padded tokens end."""
    tensors = [t for t in results if t is not None]
    total = sum(t.nbytes for t in (x, *tensors))
    for t in tensors:
        if t.dtype == torch.float8_e4m3fn and t.shape[0] == x.shape[-1]:  # the transposed copy of rows
            total -= (t.shape[1] - end) * t.shape[0]
    return total


def report_bandwidth(shape: str, x: Tensor, calls: Calls, sizes: dict[str, int]) -> None:
    """x: the source."""
    source = torch.empty(GIB, dtype=torch.int8, device="cuda").random_()
    target, like_x = torch.empty_like(source), torch.empty_like(x)
    copies: Calls = {"copy of 1 GiB": lambda: target.copy_(source), "copy": lambda: like_x.copy_(x)}
    sizes = {"copy of 1 GiB": 2 * GIB, "copy": 2 * x.nbytes, **sizes}
    speeds = {name: sizes[name] / ms for name, ms in medians({**copies, **calls}).items()}
    for name, speed in speeds.items():
        shares = ", ".join(f"{speed / speeds[copy]:.3f} of {copy}" for copy in copies)
        print(f"{shape:11s} {name:30s} {sizes[name] / speed:8.4f} ms {speed / 1e9:6.2f} TB/s  {shares}", flush=True)


def quantise(shape: str) -> None:
    hidden, _, groups, rows = SHAPES[shape]
    x = normal(rows, hidden)
    calls: Calls = {}
    sizes = {}
    asked = {"both": {}, "rows": {"columnwise": False}, "columns": {"rowwise": False}, "sums": {"column_sums": True}}
    for multiple in (128, 1):
        offsets, padded = offsets_of(groups, rows, multiple)
        for name, flags in asked.items():
            if multiple == 1 and name not in ("both", "sums"):
                continue
            label = f"quantise {name}" + (", unaligned" if multiple == 1 else "")
            calls[label] = lambda o=offsets, p=padded, f=flags: fp8_quantize(x, o, p, **f)
            sizes[label] = moved(x, fp8_quantize(x, offsets, padded, **flags)[:4], int(padded[-1]))
    report_bandwidth(shape, x, calls, sizes)


def weights(shape: str) -> None:
    hidden, intermediate, groups, _ = SHAPES[shape]
    w = normal(groups, 2 * intermediate, hidden)
    separate = list(w.unbind(0))
    calls: Calls = {
        "weights both": lambda: fp8_quantize_weight([w]),
        "weights rows": lambda: fp8_quantize_weight([w], columnwise=False),
        "weights both, separate": lambda: fp8_quantize_weight(separate),
    }
    both = sum(t.nbytes for t in (w, *fp8_quantize_weight([w])))
    rows = sum(t.nbytes for t in (w, *fp8_quantize_weight([w], columnwise=False)[:2]))
    report_bandwidth(shape, w, calls, dict(zip(calls, (both, rows, both), strict=True)))


def wgrad(shape: str) -> None:
    hidden, intermediate, groups, rows = SHAPES[shape]
    offsets, padded = offsets_of(groups, rows)
    for name, n, k in (("fc1", 2 * intermediate, hidden), ("fc2", hidden, intermediate)):
        dy, x = normal(rows, n), normal(rows, k)
        operands = [t for m in (dy, x) for t in fp8_quantize(m, offsets, padded, rowwise=False)[2:4]]
        buffer = torch.zeros(groups, n, k, device="cuda")
        calls: Calls = {
            "bf16": lambda dy=dy, x=x: grouped_wgrad(dy, x, offsets),
            "fp8": lambda o=operands: fp8_grouped_wgrad(*o, padded),
            "bf16 += fp32": lambda dy=dy, x=x, b=buffer: grouped_wgrad_([b], dy, x, offsets, accumulate=True),
            "fp8 += fp32": lambda o=operands, b=buffer: fp8_grouped_wgrad_([b], *o, padded, accumulate=True),
        }
        times = medians(calls)
        for call, ms in times.items():
            base = times[call.replace("fp8", "bf16", 1)]
            tflops = 2.0 * rows * n * k / ms / 1e9
            print(f"{shape:11s} wgrad {name} {call:24s} {ms:8.4f} ms {tflops:6.0f} TF  x{base / ms:.3f}", flush=True)


PARTS = {"quantise": quantise, "weights": weights, "wgrad": wgrad}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES), help="comma-separated, of: " + ", ".join(SHAPES))
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated, of: " + ", ".join(PARTS))
    args = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {datetime.date.today()}", flush=True)
    torch.manual_seed(0)
    for shape in args.shapes.split(","):
        for part in args.parts.split(","):
            PARTS[part](shape)


if __name__ == "__main__":
    main()
