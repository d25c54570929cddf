"""The BF16 grouped MLP layer and its parts on one GPU, beside the peers that are installed, all in turn in one run.

Peers are timed as their calls alone; ours through the public `Sequential`, autograd and allocations included, for the
two layer rows, and through the operators for the parts.
"""

from __future__ import annotations

import datetime
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

import fusible_ops as ops
from cute_kernels import ops as kernels
from cute_kernels import target
from cute_kernels.activation import Activation
from fusible_ops.bench.peers import Calls, Problem, quack_layer, torch_layer
from fusible_ops.bench.report import Report, Row
from fusible_ops.bench.timing import medians, uneven_splits

PARTS = ("fc1 + swiglu", "fc2", "dact", "wgrad fc1", "wgrad fc2", "dgrad fc1", "forward", "forward + backward")
SWIGLU = Activation("swiglu")


class Shape(NamedTuple):
    """Sizes of a layer. Written "H,I,G,T"."""

    hidden: int
    intermediate: int
    experts: int
    rows: int

    @staticmethod
    def read(text: str) -> Shape:
        """From "H,I,G,T". ValueError unless that is four positive integers."""
        sizes = [int(size) for size in text.split(",")]
        if len(sizes) != 4 or min(sizes) < 1:
            raise ValueError(f"shape is {text!r}, needs four positive sizes: hidden, intermediate, experts, rows")
        return Shape(*sizes)

    def __str__(self) -> str:
        return ",".join(map(str, self))


def make_problem(hidden: int, intermediate: int, groups: int, rows: int) -> Problem:
    """Random normal data; weights scaled so that activations stay near 1."""
    torch.manual_seed(0)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16).mul_(scale)

    splits = torch.tensor(uneven_splits(groups, rows), device="cuda", dtype=torch.int32)
    return Problem(
        x=normal(rows, hidden),
        w1=normal(groups, 2 * intermediate, hidden, scale=hidden**-0.5),
        w2=normal(groups, hidden, intermediate, scale=intermediate**-0.5),
        probs=torch.rand(rows, device="cuda"),
        dy=normal(rows, hidden),
        splits=splits,
        offsets=torch.nn.functional.pad(splits.cumsum(0), (1, 0)).int(),
    )


def make_mlp(
    hidden: int,
    intermediate: int,
    groups: int,
    activation: ops.FusibleOperation | None = None,
    bias: bool = False,
    stacked: bool = True,
    **sequential: Any,
) -> ops.Sequential:
    """GroupedLinear, a GLU (ScaledSwiGLU), GroupedLinear in BF16 on the GPU. sequential: arguments of the Sequential,
    which raises for what does not fuse unless they say otherwise.
    """
    linear = functools.partial(
        ops.GroupedLinear,
        groups,
        bias=bias,
        device="cuda",
        dtype=torch.bfloat16,
        single_grouped_weight=stacked,
        single_grouped_bias=stacked and bias,
    )
    fc1, fc2 = linear(hidden, 2 * intermediate), linear(intermediate, hidden)
    middle = ops.ScaledSwiGLU() if activation is None else activation
    return ops.Sequential(fc1, middle, fc2, **(sequential or {"on_unfused": "error"}))


def layer_of(p: Problem, **sequential: Any) -> ops.Sequential:
    """`make_mlp` over the problem's own weights."""
    mlp = make_mlp(p.x.shape[1], p.intermediate, p.w1.shape[0], **sequential)
    for parameter, weight in zip(mlp.parameters(), (p.w1, p.w2), strict=True):
        parameter.data = weight
    return mlp


def our_layer(p: Problem) -> dict[str, Calls]:
    """The public module for the layer rows, the operators for the parts."""
    mlp, offsets = layer_of(p), p.offsets
    x, probs, weights = p.x.detach().requires_grad_(), p.probs.detach().requires_grad_(), list(mlp.parameters())

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return mlp(x, p.splits, probs, p.splits)

    def both() -> object:
        return torch.autograd.grad(mlp(x, p.splits, probs, p.splits), [x, probs, *weights], p.dy)

    act, preact = kernels.grouped_gemm_act(p.x, [p.w1], offsets, SWIGLU, None, p.probs, zero_tail=False)
    assert preact is not None
    dpreact = kernels.grouped_gemm_dact(p.dy, [p.w2], offsets, preact, SWIGLU, p.probs, zero_tail=False)[0]
    parts = {
        "fc1 + swiglu": lambda: kernels.grouped_gemm_act(p.x, [p.w1], offsets, SWIGLU, None, p.probs, zero_tail=False),
        "fc2": lambda: kernels.grouped_gemm(act, [p.w2], offsets),
        "dact": lambda: kernels.grouped_gemm_dact(
            p.dy, [p.w2], offsets, preact, SWIGLU, p.probs, need_dprobs=True, zero_tail=False
        ),
        "wgrad fc1": lambda: kernels.grouped_wgrad(dpreact, p.x, offsets),
        "wgrad fc2": lambda: kernels.grouped_wgrad(p.dy, act, offsets),
        "dgrad fc1": lambda: kernels.grouped_gemm_dgrad(dpreact, [p.w1], offsets),
        "forward": forward,
        "forward + backward": both,
    }
    return {name: {"ours": call} for name, call in parts.items()}


def dense_product(p: Problem) -> Calls:
    """One dense matmul of FC1's FLOPs: the practical limit."""
    w = p.w1[0].t()
    return {"dense matmul": lambda: p.x @ w}


def flops_of(p: Problem, part: str) -> float:
    """FLOPs of one part: FC1-sized products have twice FC2's."""
    all_flops = p.flops()
    if part in ("forward", "forward + backward"):
        return all_flops[part]
    return all_flops["fc1"] if part in ("fc1 + swiglu", "wgrad fc1", "dgrad fc1") else all_flops["fc1"] / 2


def measure(
    shapes: Sequence[Shape], parts: Sequence[str] = PARTS, tell: Callable[[Row], None] = lambda row: None
) -> Report:
    """Time the parts of each shape beside the peers; `tell` hears of every row as it is known. Needs a CUDA device."""
    rows = []
    for shape in shapes:
        p = make_problem(*shape)
        sources = [our_layer(p), torch_layer(p), quack_layer(p)]
        for part in parts:
            calls: Calls = {name: call for source in sources for name, call in source.get(part, {}).items()}
            if part == "fc1 + swiglu":
                calls |= dense_product(p)
            times = medians(calls)
            for name, ms in times.items():
                rows.append(
                    Row(
                        shape=str(shape),
                        part=part,
                        library=name,
                        ms=round(ms, 4),
                        tflops=round(flops_of(p, part) / ms / 1e9, 1),
                        x_ours=round(ms / times["ours"], 4) if "ours" in times else None,
                    )
                )
                tell(rows[-1])
        torch.cuda.empty_cache()
    return Report(
        gpu=torch.cuda.get_device_name(),
        date=str(datetime.date.today()),
        versions={
            "fusible-ops": ops.__version__,
            "torch": torch.__version__,
            **_versions({row.library for row in rows}),
        },
        rows=rows,
    )


def _versions(libraries: set[str]) -> dict[str, str]:
    """Versions of what our figures depend on, and of the peers that ran."""
    names = [target.CUTLASS_DSL.name, target.TVM_FFI.name, *(["quack-kernels"] if "quack" in libraries else [])]
    found = {name: target.package_version(name) or "unknown" for name in names}
    return {"fusible-ops": ops.__version__, "torch": torch.__version__, **found}
