"""FP8 grouped products and what is fused into them, on one GPU, in turn in one run, beside PyTorch's product alone.

    python -m tests.bench.bench_fp8_products [--shapes dsv3_ep32,gptoss_ep4,qwen3_30b]

Prints milliseconds, TFLOP/s and, for FC1, torch._scaled_grouped_mm / ours (above 1: ours is faster). That peer has one
scale a row and stores the product in BF16; ours has block scales, stores the pre-activation and both quantised copies.
"""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Callable

import torch
from torch import Tensor

from cute_kernels import fp8_reference as fp8
from cute_kernels.activation import Activation
from cute_kernels.hopper.fp8_grouped_gemm import fp8_grouped_gemm, fp8_grouped_gemm_act, fp8_grouped_gemm_dact
from tests.bench.bench_grouped_mlp import SHAPES
from tests.bench.timing import medians, uneven_splits

Calls = dict[str, Callable[[], object]]
SWIGLU = Activation("swiglu")


def scales(*shape: int) -> Tensor:
    return 2.0 ** torch.randint(-9, -7, shape, device="cuda")


def data(*shape: int) -> Tensor:
    """Random normal values as a block that was quantised has them: up to 448."""
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16).mul_(130).clamp_(-448, 448).to(torch.float8_e4m3fn)


def rows_of(rows: int, columns: int, halves: int = 1) -> tuple[Tensor, Tensor]:
    return data(rows, columns), scales(halves * -(-columns // halves // 128), fp8.scales_in_row(rows))


def weights_of(groups: int, n: int, k: int) -> tuple[Tensor, Tensor]:
    return data(groups, n, k), scales(groups, -(-n // 128), fp8.scales_in_row(-(-k // 128))) * k**-0.5


def make_calls(hidden: int, intermediate: int, groups: int, rows: int) -> tuple[Calls, dict[str, float]]:
    """Each part's call, and its FLOPs."""
    splits = torch.tensor(uneven_splits(groups, rows), device="cuda", dtype=torch.int32)
    offsets, padded = fp8.padded_group_offsets(splits, rows)
    x, dy, act = rows_of(rows, hidden), rows_of(rows, hidden), rows_of(rows, intermediate)
    dpreact = rows_of(rows, 2 * intermediate, 2)
    w1, w1_t = weights_of(groups, 2 * intermediate, hidden), weights_of(groups, hidden, 2 * intermediate)
    w2, w2_t = weights_of(groups, hidden, intermediate), weights_of(groups, intermediate, hidden)
    preact = torch.randn(rows, 2 * intermediate, device="cuda", dtype=torch.bfloat16)
    probs, ones = torch.rand(rows, device="cuda"), torch.ones(groups, 2 * intermediate, device="cuda")
    calls: Calls = {
        "fc1 + swiglu + quantise": lambda: fp8_grouped_gemm_act(*x, *w1, offsets, padded, SWIGLU, None, probs),
        "fc1, torch": lambda: torch._scaled_grouped_mm(
            x[0], w1[0].mT, probs, ones, offs=offsets[1:], out_dtype=torch.bfloat16, use_fast_accum=True
        ),
        "fc1 alone": lambda: fp8_grouped_gemm(*x, *w1, offsets),
        "fc2": lambda: fp8_grouped_gemm(*act, *w2, offsets),
        "dact + quantise": lambda: fp8_grouped_gemm_dact(
            *dy, *w2_t, offsets, padded, preact, SWIGLU, probs, need_dprobs=True
        ),
        "dgrad": lambda: fp8_grouped_gemm(*dpreact, *w1_t, offsets, halves=2),
    }
    flops = 2.0 * rows * hidden * intermediate
    return calls, {name: flops * (2 if name.startswith(("fc1", "dgrad")) else 1) for name in calls}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES), help="comma-separated, of: " + ", ".join(SHAPES))
    args = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {datetime.date.today()}", flush=True)
    torch.manual_seed(0)
    for shape in args.shapes.split(","):
        calls, flops = make_calls(*SHAPES[shape])
        times = medians(calls)
        for name, ms in times.items():
            ratio = f"  x{times['fc1, torch'] / ms:.3f}" if name.startswith("fc1") else ""
            print(f"{shape:11s} {name:24s} {ms:8.4f} ms {flops[name] / ms / 1e9:6.0f} TF{ratio}", flush=True)


if __name__ == "__main__":
    main()
