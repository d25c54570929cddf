"""Host time and launches of the BF16 grouped MLP on one GPU.

    python -m tests.bench.bench_host

Host time: one eager layer call at H = I = 128, T = 64, with autograd; microseconds, medians, twice: with the device
idle before each call, and of 20 calls in a row. The floor is an autograd function with the same inputs that returns
empty gradients; rounds of the layer and of the floor take turns. The split by cause times apart what a call is made of:
the floor without what it allocates, the allocation of the layer's results, and its launches again with the arguments it
gave; what is left is the Python of this library. It is also made with backward on the caller's thread: otherwise the
engine's thread and the caller's wake each other, which on a virtual machine takes longer than all else.
Launches: kernels, copies and memsets that the profiler counts for one forward and one backward.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from unittest import mock

import torch
from torch import Tensor

from cute_kernels import launch
from fusible_ops.bench.grouped_mlp import make_mlp
from tests.bench.timing import launches

BF16 = {"device": "cuda", "dtype": torch.bfloat16}
HIDDEN = INTERMEDIATE = 128
ROWS = 64
IN_A_ROW = 20
WEIGHTS = ("stacked", "discrete", "apart")
"""One tensor a linear; one a group, views of one buffer; one a group, each in memory of its own."""


class Nothing(torch.autograd.Function):
    """Takes what the layer takes and returns empty gradients: what autograd itself costs."""

    @staticmethod
    def forward(ctx, x: Tensor, shapes: list[tuple[int, ...]], stacked: bool, *others: Tensor) -> Tensor:
        ctx.shapes, ctx.stacked = shapes, stacked
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, ...]:
        grads, dprobs = empty_gradients(dy, ctx.shapes)
        grads = grads if ctx.stacked else [g for grad in grads for g in grad.unbind(0)]
        return dy, None, None, *grads, None, dprobs, None


def empty_gradients(dy: Tensor, shapes: list[tuple[int, ...]]) -> tuple[list[Tensor], Tensor]:
    """(of the weights, of probs)."""
    return [torch.empty(shape, **BF16) for shape in shapes], dy.new_empty(dy.shape[:1], dtype=torch.float32)


def host_microseconds(
    calls: list[Callable[[], Tensor]], leaves: list[Tensor], in_a_row: int
) -> list[tuple[float, float]]:
    """(forward, backward) host time of each call in microseconds: medians over rounds that begin with an idle device.

    in_a_row: calls in a round. All forwards of a round come before its backwards. Gradients are dropped before each
    backward, as a training step does: else PyTorch adds to them, in a launch for each leaf.
    """
    times: list[tuple[list[float], list[float]]] = [([], []) for _ in calls]
    for _ in range(300 // in_a_row + 25):
        for forward, (forwards, backwards) in zip(calls, times, strict=True):
            torch.cuda.synchronize()
            start = time.perf_counter()
            results = [forward() for _ in range(in_a_row)]
            middle = time.perf_counter()
            grad = torch.empty_like(results[0])
            torch.cuda.synchronize()
            spent = 0.0
            for y in results:
                for leaf in leaves:
                    leaf.grad = None
                again = time.perf_counter()
                y.backward(grad)
                spent += time.perf_counter() - again
            forwards.append((middle - start) / in_a_row)
            backwards.append(spent / in_a_row)
    return [(statistics.median(f) * 1e6, statistics.median(b) * 1e6) for f, b in times]


def repeated(call: Callable[[], object]) -> float:
    """Microseconds of a call that leaves the device behind: the median of rounds of 20 in a row."""
    times = []
    for _ in range(20):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(IN_A_ROW):
            call()
        times.append((time.perf_counter() - start) / IN_A_ROW)
    return statistics.median(times) * 1e6


def captured_launches(run: Callable[[], object]) -> list[Callable[[], object]]:
    """Every kernel launch of `run`, to be made again with the same arguments."""
    found: list[Callable[[], object]] = []
    real = launch.kernel

    def kernel(module: str, options: object, arch: str) -> Callable[..., None]:
        function = real(module, options, arch)

        def call(*arguments: object) -> None:
            found.append(lambda: function(*arguments))
            function(*arguments)

        return call

    with mock.patch.object(launch, "kernel", kernel):
        run()
    return found


def layer(groups: int, weights: str) -> tuple[Callable[[], Tensor], Callable[[], Tensor], list[Tensor]]:
    """(forward of the layer, forward of the floor, leaves that get gradients). weights: of `WEIGHTS`."""
    stacked = weights == "stacked"
    splits = torch.zeros(groups, dtype=torch.int32, device="cuda")
    splits[: min(groups, ROWS)] = ROWS // min(groups, ROWS)
    x = torch.randn(ROWS, HIDDEN, **BF16, requires_grad=True)
    probs = torch.rand(ROWS, device="cuda", requires_grad=True)
    mlp = make_mlp(HIDDEN, INTERMEDIATE, groups, stacked=stacked)
    parameters = list(mlp.parameters())
    if weights == "apart":
        for p in reversed(parameters):
            p.data = p.data.clone()
    shapes = [(groups, 2 * INTERMEDIATE, HIDDEN), (groups, HIDDEN, INTERMEDIATE)]

    def forward() -> Tensor:
        return mlp(x, splits, probs, splits)

    def floor() -> Tensor:
        return Nothing.apply(x, shapes, stacked, *parameters, splits, probs, splits)

    return forward, floor, [x, probs, *parameters]


def measure(groups: int, weights: str, how: str = "") -> None:
    """Measure the layer and its floor, and print both."""
    forward, floor, leaves = layer(groups, weights)
    idle, row = (host_microseconds([forward, floor], leaves, count) for count in (1, IN_A_ROW))
    for i, name in enumerate(("layer", "floor")):
        print(
            f"G={groups:3d} {weights} {name}{how}  forward / backward, idle device: "
            f"{idle[i][0]:5.0f} / {idle[i][1]:5.0f} us, 20 in a row: {row[i][0]:5.0f} / {row[i][1]:5.0f} us",
            flush=True,
        )


def bench_host_time() -> None:
    for groups in (8, 64, 256):
        for weights in WEIGHTS:
            measure(groups, weights)


def bench_one_thread() -> None:
    """The same with backward on the caller's thread."""
    with torch.autograd.set_multithreading_enabled(False):
        measure(64, "stacked", ", one thread")
        bench_causes()


def bench_causes() -> None:
    """One call with 64 stacked weights, 20 in a row, split by cause."""
    forward, floor, leaves = layer(64, "stacked")
    x, rows, weights = leaves[0], ROWS, [w.shape for w in leaves[2:]]

    def results_of_forward() -> list[Tensor]:
        offsets = torch.empty(65, dtype=torch.int32, device="cuda")
        return [offsets, *[x.new_empty(rows, n) for n in (INTERMEDIATE, 2 * INTERMEDIATE, HIDDEN)]]

    def results_of_backward() -> list[Tensor]:
        partial = x.new_empty(rows, 1, dtype=torch.float32)
        row_shaped = [x.new_empty(rows, n) for n in (2 * INTERMEDIATE, INTERMEDIATE, HIDDEN)]
        return [partial, *row_shaped, *[torch.empty(shape, **BF16) for shape in weights]]

    for _ in range(4):
        y = forward()
        y.backward(torch.empty_like(y))
    y = forward()
    grad = torch.empty_like(y)
    calls = {"forward": captured_launches(forward), "backward": captured_launches(lambda: y.backward(grad))}
    whole, floors = host_microseconds([forward, floor], leaves, IN_A_ROW)
    of_floor = repeated(lambda: torch.empty_like(x)), repeated(lambda: empty_gradients(grad, weights))
    for i, (name, results) in enumerate((("forward", results_of_forward), ("backward", results_of_backward))):
        launching, made = sum(repeated(call) for call in calls[name]), repeated(results)
        autograd = floors[i] - of_floor[i]
        ours = whole[i] - autograd - launching - made
        print(
            f"{name}: {whole[i]:.0f} us = autograd {autograd:.0f} + {len(calls[name])} launches {launching:.0f} + "
            f"results {made:.0f} + Python of this library {ours:.0f}"
        )
    print("    a launch, us:", ", ".join(f"{repeated(call):.1f}" for call in calls["forward"] + calls["backward"]))


def bench_launches() -> None:
    mlp = make_mlp(256, 128, 8)
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
        events = launches(run)
        print(f"{name}: {len(events)} launches")
        for event in events:
            print(f"    {event[:100]}")


if __name__ == "__main__":
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    bench_host_time()
    bench_one_thread()
    bench_causes()
    bench_launches()
