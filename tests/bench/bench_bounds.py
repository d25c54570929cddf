"""Ratios that must stay below a bound: what users of such libraries had to report as slow.

    python -m tests.bench.bench_bounds

loop        a grouped linear, and a grouped MLP, over a loop of torch.nn.functional.linear (4 experts; the loop knows
            the splits on the host)
uneven      splits that miss the tile size by a few rows, over even ones
bias        with bias and its gradients, over without
buffer      2048 rows in a buffer of 32768, over a buffer of 2048
launch      microseconds of host time of one cached call, as the fused operations make it
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

import fusible_ops as ops
from cute_kernels import ops as kernels
from fusible_ops.bench.grouped_mlp import make_mlp
from tests.bench.timing import medians

BF16 = {"device": "cuda", "dtype": torch.bfloat16}
Calls = dict[str, Callable[[], object]]


def report(name: str, value: float, bound: float, detail: str = "") -> None:
    verdict = "" if value <= bound else "   ABOVE"
    print(f"{name:58s} {value:6.3f}   bound {bound:5.2f}{verdict}   {detail}", flush=True)


def layer(
    groups: int, hidden: int, intermediate: int, rows: int, sizes: list[int], bias: bool = False
) -> tuple[ops.Sequential, Calls]:
    """GroupedLinear -> SwiGLU -> GroupedLinear with stacked weights; its forward, and forward + backward."""
    mlp = make_mlp(hidden, intermediate, groups, ops.SwiGLU(), bias)
    x, dy = torch.randn(rows, hidden, **BF16, requires_grad=True), torch.randn(rows, hidden, **BF16)
    splits = torch.tensor(sizes, device="cuda")

    def forward() -> Tensor:
        with torch.no_grad():
            return mlp(x, splits, splits)

    def both() -> object:
        return torch.autograd.grad(mlp(x, splits, splits), [x, *mlp.parameters()], dy)

    return mlp, {"forward": forward, "forward + backward": both}


def loop_calls(sizes: list[int]) -> Calls:
    """A grouped linear and a grouped MLP of 4 experts, and the same as loops of F.linear."""
    rows, hidden, intermediate = sum(sizes), 4096, 14336
    mlp, ours = layer(len(sizes), hidden, intermediate, rows, sizes)
    fc1, grad = ops.Sequential(mlp[0], on_unfused="error"), torch.autograd.grad
    weight = mlp[0].weight
    w1, w2 = (mlp[i].weight.detach().clone().requires_grad_() for i in (0, 2))
    x = torch.randn(rows, hidden, **BF16, requires_grad=True)
    dy, dh = torch.randn(rows, hidden, **BF16), torch.randn(rows, 2 * intermediate, **BF16)
    splits = torch.tensor(sizes, device="cuda")

    def linears() -> Tensor:
        return torch.cat([F.linear(part, w) for part, w in zip(x.split(sizes), w1, strict=True)])

    def mlps() -> Tensor:
        done = []
        for part, up, down in zip(x.split(sizes), w1, w2, strict=True):
            gate, linear = F.linear(part, up).chunk(2, -1)
            done.append(F.linear(F.silu(gate) * linear, down))
        return torch.cat(done)

    return {
        "linear": torch.no_grad()(lambda: fc1(x, splits)),
        "linear loop": torch.no_grad()(linears),
        "linear + backward": lambda: grad(fc1(x, splits), [x, weight], dh),
        "linear + backward loop": lambda: grad(linears(), [x, w1], dh),
        "mlp": ours["forward"],
        "mlp loop": torch.no_grad()(mlps),
        "mlp + backward": ours["forward + backward"],
        "mlp + backward loop": lambda: grad(mlps(), [x, w1, w2], dy),
    }


def against_loop() -> None:
    for sizes in ([16384] * 4, [20000, 9000, 16536, 20000]):
        times = medians(loop_calls(sizes), rounds=5, warmups=1)
        for what in ("linear", "linear + backward", "mlp", "mlp + backward"):
            ms, loop = times[what], times[f"{what} loop"]
            report(f"loop     {what}, {sizes}", ms / loop, 1.0, f"{ms:.2f} ms, loop {loop:.2f} ms")


def uneven_splits() -> None:
    for groups, hidden, intermediate in ((4, 4096, 1536), (4, 7168, 2048)):
        even, odd = [1024] * groups, [1030, 1020, 1026, 1020]
        calls: Calls = {}
        for name, sizes in (("even", even), ("odd", odd)):
            calls |= {f"{name} {what}": c for what, c in layer(groups, hidden, intermediate, 4096, sizes)[1].items()}
        times = medians(calls)
        for what in ("forward", "forward + backward"):
            ratio = times[f"odd {what}"] / times[f"even {what}"]
            report(f"uneven   H={hidden} I={intermediate} {what}", ratio, 1.15, f"{times[f'even {what}']:.3f} ms even")


def bias_gradients() -> None:
    for groups, hidden, intermediate, rows in (
        (8, 7168, 2048, 32768),
        (32, 2880, 2880, 32768),
        (128, 2048, 768, 65536),
    ):
        calls: Calls = {}
        for bias in (False, True):
            sizes = [rows // groups] * groups
            _, both = layer(groups, hidden, intermediate, rows, sizes, bias)
            calls |= {f"{bias} {what}": call for what, call in both.items()}
        times = medians(calls, rounds=9)
        for what in ("forward", "forward + backward"):
            ratio = times[f"True {what}"] / times[f"False {what}"]
            report(
                f"bias     H={hidden} I={intermediate} G={groups} {what}", ratio, 1.3, f"{times[f'True {what}']:.3f} ms"
            )


def unused_rows() -> None:
    for groups, hidden, intermediate in ((8, 7168, 2048), (128, 2048, 768)):
        calls: Calls = {}
        for rows in (2048, 32768):
            _, both = layer(groups, hidden, intermediate, rows, [2048 // groups] * groups)
            calls |= {f"{rows} {what}": call for what, call in both.items()}
        times = medians(calls)
        for what in ("forward", "forward + backward"):
            ratio = times[f"32768 {what}"] / times[f"2048 {what}"]
            report(f"buffer   H={hidden} I={intermediate} {what}", ratio, 1.3, f"{times[f'2048 {what}']:.3f} ms")


def launch_time() -> None:
    sizes = torch.full((8,), 8, dtype=torch.int32, device="cuda")
    offsets = kernels.group_offsets(sizes, 64)
    x, w = torch.randn(64, 128, **BF16), torch.randn(8, 128, 128, **BF16)
    host = kernels.entry_points(x)
    calls = {"group_offsets": lambda: host.group_offsets(sizes, 64)}
    calls["grouped_gemm"] = lambda: host.grouped_gemm(x, [w], offsets)
    for name, call in calls.items():
        best = float("inf")
        for _ in range(20):
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(50):
                call()
            best = min(best, (time.perf_counter() - began) / 50)
        report(f"launch   {name}, microseconds", best * 1e6, 10.0)


if __name__ == "__main__":
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    launch_time()
    uneven_splits()
    bias_gradients()
    unused_rows()
    against_loop()
