"""The same grouped MLP layer on other libraries: plain PyTorch, QuACK and Transformer Engine where they are installed.

Layer: x [T, H] -> W1 [G, 2I, H] -> SwiGLU -> W2 [G, H, I] -> y [T, H], no bias. Each factory gives {name: callable}.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

Calls = dict[str, Callable[[], object]]


@dataclass
class Problem:
    """One layer's tensors in BF16. offsets: int32 [G+1] with a leading zero."""

    x: Tensor
    w1: Tensor
    w2: Tensor
    probs: Tensor
    dy: Tensor
    splits: Tensor
    offsets: Tensor

    @property
    def intermediate(self) -> int:
        return self.w2.shape[2]

    def flops(self) -> dict[str, float]:
        """Floating-point operations of one FC1-sized product and of the whole layer."""
        rows, hidden = self.x.shape
        return {
            "fc1": 4.0 * rows * hidden * self.intermediate,
            "forward": 6.0 * rows * hidden * self.intermediate,
            "forward + backward": 18.0 * rows * hidden * self.intermediate,
        }


def _swiglu(h: Tensor) -> Tensor:
    gate, up = h.chunk(2, -1)
    return F.silu(gate) * up


def compiled_swiglu() -> Callable[[Tensor], Tensor]:
    """silu(gate)·up of `[gate | up]`, compiled."""
    return torch.compile(_swiglu, dynamic=False)


def torch_layer(p: Problem) -> dict[str, Calls]:
    """torch.nn.functional.grouped_mm and a compiled SwiGLU, without probs."""
    swiglu = compiled_swiglu()
    ends = p.offsets[1:]
    x = p.x.detach().requires_grad_()
    w1, w2 = p.w1.detach().requires_grad_(), p.w2.detach().requires_grad_()

    def forward() -> Tensor:
        h = F.grouped_mm(x, w1.transpose(1, 2), offs=ends)
        return F.grouped_mm(swiglu(h), w2.transpose(1, 2), offs=ends)

    def fc1() -> Tensor:
        with torch.no_grad():
            return swiglu(F.grouped_mm(x, w1.transpose(1, 2), offs=ends))

    def forward_only() -> Tensor:
        with torch.no_grad():
            return forward()

    def both() -> object:
        return torch.autograd.grad(forward(), [x, w1, w2], p.dy)

    h = F.grouped_mm(p.x, p.w1.transpose(1, 2), offs=ends)
    act = swiglu(h)
    return {
        "fc1 + swiglu": {"torch": fc1},
        "dact": {"torch (product alone)": lambda: F.grouped_mm(p.dy, p.w2, offs=ends)},
        "wgrad fc1": {"torch": lambda: F.grouped_mm(h.t(), p.x, offs=ends)},
        "wgrad fc2": {"torch": lambda: F.grouped_mm(p.dy.t(), act, offs=ends)},
        "dgrad fc1": {"torch": lambda: F.grouped_mm(h, p.w1, offs=ends)},
        "fc2": {"torch": lambda: F.grouped_mm(act, p.w2.transpose(1, 2), offs=ends)},
        "forward": {"torch": forward_only},
        "forward + backward": {"torch": both},
    }


def quack_layer(p: Problem) -> dict[str, Calls]:
    """QuACK's fused products, untuned (pairwise gate and up columns): probs, their gradient, recomputed activation."""
    try:
        from quack.gemm_interface import gemm, gemm_dgated, gemm_gated
    except ImportError:
        return {}
    offsets, rows = p.offsets, p.x.shape[0]
    options = {"dynamic_scheduler": False, "tuned": False}
    h = p.x.new_empty(rows, 2 * p.intermediate)
    act, again = p.x.new_empty(rows, p.intermediate), p.x.new_empty(rows, p.intermediate)
    dh, dx, y = torch.empty_like(h), torch.empty_like(p.x), torch.empty_like(p.x)
    dw1, dw2 = torch.empty_like(p.w1), torch.empty_like(p.w2)
    w1, w2 = p.w1.transpose(1, 2), p.w2.transpose(1, 2)

    def fc1() -> None:
        gemm_gated(
            p.x,
            w1,
            activation="swiglu",
            cu_seqlens_m=offsets,
            preact_out=h,
            postact_out=act,
            store_preact=True,
            **options,
        )

    def fc2() -> None:
        gemm(act, w2, out=y, cu_seqlens_m=offsets, **options)

    def dact() -> object:
        return gemm_dgated(
            p.dy,
            p.w2,
            PreAct=h,
            activation="swiglu",
            dx_out=dh,
            postact_out=again,
            colvec_scale=p.probs,
            colvec_reduce=True,
            cu_seqlens_m=offsets,
            **options,
        )

    def wgrad1() -> None:
        gemm(dh.t(), p.x, out=dw1, cu_seqlens_k=offsets, **options)

    def wgrad2() -> None:
        gemm(p.dy.t(), again, out=dw2, cu_seqlens_k=offsets, **options)

    def dgrad() -> None:
        gemm(dh, p.w1, out=dx, cu_seqlens_m=offsets, **options)

    def forward() -> None:
        fc1()
        fc2()

    def both() -> None:
        forward()
        dact()
        wgrad2()
        wgrad1()
        dgrad()

    forward()
    dact()
    parts = {
        "fc1 + swiglu": fc1,
        "fc2": fc2,
        "dact": dact,
        "wgrad fc1": wgrad1,
        "wgrad fc2": wgrad2,
        "dgrad fc1": dgrad,
        "forward": forward,
        "forward + backward": both,
    }
    return {name: {"quack": call} for name, call in parts.items()}


def te_fp8_layer(p: Problem) -> dict[str, Calls]:
    """Transformer Engine's ops under its two FP8 recipes for Hopper, with probs: unfused, weights quantised each time.

    Without a host sync if cuBLAS is 13.6 or newer; then it refuses more than 64 groups.
    """
    try:
        import transformer_engine.pytorch as te
        from transformer_engine.common.recipe import Float8BlockScaling, Float8CurrentScaling
    except ImportError:
        return {}
    groups, hidden, width = p.w2.shape
    common = {"bias": False, "device": "cuda", "dtype": torch.bfloat16}
    fc1 = te.ops.GroupedLinear(groups, hidden, 2 * width, **common)
    fc2 = te.ops.GroupedLinear(groups, width, hidden, **common)
    mlp = te.ops.Sequential(fc1, te.ops.ScaledSwiGLU(), fc2)
    with torch.no_grad():
        for op, weights in ((fc1, p.w1), (fc2, p.w2)):
            for g in range(groups):
                getattr(op, f"weight{g}").copy_(weights[g])
    x, probs = p.x.detach().requires_grad_(), p.probs.detach().requires_grad_()
    wanted = [x, probs, *mlp.parameters()]

    def forward(recipe: object) -> Tensor:
        with te.autocast(enabled=True, recipe=recipe):
            return mlp(x, p.splits, probs, p.splits)

    def forward_only(recipe: object) -> Tensor:
        with torch.no_grad():
            return forward(recipe)

    def both(recipe: object) -> object:
        return torch.autograd.grad(forward(recipe), wanted, p.dy)

    recipes = {"te block": Float8BlockScaling(), "te current": Float8CurrentScaling()}
    return {
        part: {name: functools.partial(call, recipe) for name, recipe in recipes.items()}
        for part, call in (("forward", forward_only), ("forward + backward", both))
    }
