"""Host time, launches, and the cost of unused rows of the BF16 grouped MLP on one GPU.

    python -m tests.bench.bench_host

Host time: one eager layer call at H = I = 128, T = 64, so that the device never makes the host wait; microseconds,
median of 200. The floor is an autograd function with the same number of parameters that does nothing.
Launches: kernels, copies and memsets that the profiler counts for one forward and one backward.
Unused rows: a buffer of 32768 rows of which 2048 belong to groups, against one of 2048 rows.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import fusible_ops as ops
from tests.bench.timing import medians

BF16 = {"device": "cuda", "dtype": torch.bfloat16}


def make_mlp(groups: int, hidden: int, intermediate: int, stacked: bool) -> ops.Sequential:
    """GroupedLinear -> ScaledSwiGLU -> GroupedLinear without bias."""
    common = {"bias": False, "single_grouped_weight": stacked, **BF16}
    return ops.Sequential(
        ops.GroupedLinear(groups, hidden, 2 * intermediate, **common),
        ops.ScaledSwiGLU(),
        ops.GroupedLinear(groups, intermediate, hidden, **common),
        on_unfused="error",
    )


class Nothing(torch.autograd.Function):
    """Takes parameters and returns zero gradients for them: what autograd itself costs."""

    @staticmethod
    def forward(ctx, x: Tensor, grads: list[Tensor], *parameters: Tensor) -> Tensor:
        ctx.grads = grads
        return x.clone()

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, ...]:
        return dy, None, *ctx.grads[0].unbind(0), *ctx.grads[1].unbind(0)


def host_microseconds(
    forward: Callable[[], Tensor], parameters: list[Tensor], rounds: int = 200
) -> tuple[float, float]:
    """(forward, backward) host time in microseconds, medians; gradients are dropped between rounds."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for p in parameters:
            p.grad = None
        torch.cuda.synchronize()
        start = time.perf_counter()
        y = forward()
        middle = time.perf_counter()
        y.backward(y.detach())
        end = time.perf_counter()
        times[0].append(middle - start)
        times[1].append(end - middle)
    return statistics.median(times[0]) * 1e6, statistics.median(times[1]) * 1e6


def bench_host_time() -> None:
    hidden, rows = 128, 64
    for groups in (8, 64, 256):
        splits = torch.zeros(groups, dtype=torch.int32, device="cuda")
        splits[: min(groups, rows)] = rows // min(groups, rows)
        x = torch.randn(rows, hidden, **BF16, requires_grad=True)
        probs = torch.rand(rows, device="cuda", requires_grad=True)
        for stacked in (True, False):
            mlp = make_mlp(groups, hidden, hidden, stacked)
            parameters = list(mlp.parameters())
            took = host_microseconds(lambda: mlp(x, splits, probs, splits), parameters)  # noqa: B023
            name = "stacked" if stacked else "discrete"
            print(
                f"G={groups:3d} {name:8s} weights   forward {took[0]:6.0f} us   backward {took[1]:6.0f} us", flush=True
            )
            if not stacked:
                grads = [torch.zeros(groups, n, hidden, **BF16) for n in (2 * hidden, hidden)]
                floor = host_microseconds(lambda: Nothing.apply(x, grads, *parameters), parameters)  # noqa: B023
                print(f"G={groups:3d} autograd's own floor forward {floor[0]:6.0f} us   backward {floor[1]:6.0f} us")


def bench_launches() -> None:
    mlp = make_mlp(8, 256, 128, stacked=True)
    x = torch.randn(512, 256, **BF16, requires_grad=True)
    probs = torch.rand(512, device="cuda", requires_grad=True)
    splits = torch.full((8,), 64, dtype=torch.int32, device="cuda")
    y = mlp(x, splits, probs, splits)
    y.backward(y.detach())
    torch.cuda.synchronize()
    for name, run in (("forward", lambda: mlp(x, splits, probs, splits)), ("backward", None)):
        grads = torch.randn_like(y)
        if run is None:
            for t in (x, probs, *mlp.parameters()):
                t.grad = None
            out = mlp(x, splits, probs, splits)
            torch.cuda.synchronize()
            run = lambda: out.backward(grads)  # noqa: B023, E731
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            run()
            torch.cuda.synchronize()
        events = [e.name for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        print(f"{name}: {len(events)} launches")
        for event in events:
            print(f"    {event[:100]}")


def bench_unused_rows() -> None:
    for hidden, intermediate, groups in ((7168, 2048, 8), (2048, 768, 128)):
        mlp = make_mlp(groups, hidden, intermediate, stacked=True)
        splits = torch.full((groups,), 2048 // groups, dtype=torch.int32, device="cuda")
        calls = {}
        for rows in (2048, 32768):
            x = torch.randn(rows, hidden, **BF16, requires_grad=True)
            probs = torch.rand(rows, device="cuda", requires_grad=True)
            dy = torch.randn(rows, hidden, **BF16)
            wanted = [x, probs, *mlp.parameters()]

            def forward(x=x, probs=probs) -> Tensor:
                return mlp(x, splits, probs, splits)  # noqa: B023

            def both(forward=forward, wanted=wanted, dy=dy) -> object:
                return torch.autograd.grad(forward(), wanted, dy)

            calls[f"forward {rows}"], calls[f"both {rows}"] = forward, both
        times = medians(calls)
        for what in ("forward", "both"):
            few, many = times[f"{what} 2048"], times[f"{what} 32768"]
            case = f"H={hidden} I={intermediate} G={groups} {what}"
            print(f"{case}: {few:.3f} ms, 32768-row buffer {many:.3f} ms, x{many / few:.2f}")


if __name__ == "__main__":
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    bench_host_time()
    bench_launches()
    bench_unused_rows()
