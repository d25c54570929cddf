"""Memory of the BF16 grouped MLP layer, forward and backward, on one GPU beside PyTorch and QuACK.

    python -m tests.bench.bench_memory [--shapes dsv3_ep32,gptoss_ep4,qwen3_30b]

Beside the input, its gradient's seed and the weights: MiB that lie there between forward and backward (y included), and
MiB at the peak of both (all gradients included). QuACK's are its calls with outputs made when needed and dropped when
used, as an autograd function would; it computes dprobs and recomputes the activation, as ours does. PyTorch's layer has
no probs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from fusible_ops.bench.grouped_mlp import layer_of
from fusible_ops.bench.peers import Problem, compiled_swiglu
from tests.bench.bench_grouped_mlp import SHAPES, make_problem
from tests.bench.timing import MIB, requested_bytes

Step = Callable[[], Iterator[None]]
"""Forward, then a yield, then backward."""


def our_step(p: Problem, fused: bool) -> Step:
    mlp = layer_of(p) if fused else layer_of(p, rules=())
    x, probs = p.x.detach().requires_grad_(), p.probs.detach().requires_grad_()

    def step() -> Iterator[None]:
        y = mlp(x, p.splits, probs, p.splits)
        yield
        torch.autograd.grad(y, [x, probs, *mlp.parameters()], p.dy)

    return step


def torch_step(p: Problem) -> Step:
    swiglu, ends = compiled_swiglu(), p.offsets[1:]
    x, w1, w2 = (t.detach().requires_grad_() for t in (p.x, p.w1, p.w2))

    def step() -> Iterator[None]:
        h = torch.nn.functional.grouped_mm(x, w1.transpose(1, 2), offs=ends)
        y = torch.nn.functional.grouped_mm(swiglu(h), w2.transpose(1, 2), offs=ends)
        del h
        yield
        torch.autograd.grad(y, [x, w1, w2], p.dy)

    return step


def quack_step(p: Problem) -> Step | None:
    try:
        from quack.gemm_interface import gemm, gemm_dgated, gemm_gated
    except ImportError:
        return None
    options = {"dynamic_scheduler": False, "tuned": False}
    rows, offsets = p.x.shape[0], p.offsets
    w1, w2 = p.w1.transpose(1, 2), p.w2.transpose(1, 2)
    like = lambda *shape: p.x.new_empty(*shape)  # noqa: E731

    def step() -> Iterator[None]:
        h, act, y = like(rows, 2 * p.intermediate), like(rows, p.intermediate), like(*p.x.shape)
        glu = {"activation": "swiglu", "preact_out": h, "postact_out": act, "store_preact": True}
        gemm_gated(p.x, w1, cu_seqlens_m=offsets, **glu, **options)
        gemm(act, w2, out=y, cu_seqlens_m=offsets, **options)
        del act, glu
        yield
        dh, act = like(*h.shape), like(rows, p.intermediate)
        outputs = {"activation": "swiglu", "dx_out": dh, "postact_out": act, "PreAct": h}
        sums = {"colvec_scale": p.probs, "colvec_reduce": True}
        dprobs = gemm_dgated(p.dy, p.w2, cu_seqlens_m=offsets, **outputs, **sums, **options)
        dw2, dw1 = torch.empty_like(p.w2), torch.empty_like(p.w1)
        gemm(p.dy.t(), act, out=dw2, cu_seqlens_k=offsets, **options)
        del act, outputs
        gemm(dh.t(), p.x, out=dw1, cu_seqlens_k=offsets, **options)
        dx = like(*p.x.shape)
        gemm(dh, p.w1, out=dx, cu_seqlens_m=offsets, **options)
        del dprobs, y

    return step


def measure(step: Step) -> tuple[float, float]:
    """MiB kept between forward and backward, MiB at the peak."""
    kept = peak = 0
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = requested_bytes()
        both = step()
        next(both)
        kept = requested_bytes() - before
        next(both, None)
        peak = requested_bytes("peak") - before
    return kept / MIB, peak / MIB


def bench(shape: str) -> None:
    hidden, intermediate, groups, rows = SHAPES[shape]
    p = make_problem(hidden, intermediate, groups, rows)
    sizes: dict[str, Tensor | int] = {"y": p.x.nbytes, "pre-activation": 4 * rows * intermediate}
    sizes |= {"act": 2 * rows * intermediate, "dx": p.x.nbytes, "weight gradients": p.w1.nbytes + p.w2.nbytes}
    print(f"{shape:11s} " + ", ".join(f"{name} {size / MIB:.0f} MiB" for name, size in sizes.items()))
    steps = {"ours": our_step(p, True), "ours, unfused": our_step(p, False), "torch": torch_step(p)}
    quack = quack_step(p)
    if quack is not None:
        steps["quack"] = quack
    for name, step in steps.items():
        kept, peak = measure(step)
        print(
            f"{shape:11s} {name:14s} kept for backward, y included {kept:7.0f} MiB   peak {peak:7.0f} MiB", flush=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES), help="comma-separated, of: " + ", ".join(SHAPES))
    args = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    for shape in args.shapes.split(","):
        bench(shape)


if __name__ == "__main__":
    main()
