"""Small models, their inputs, and one training step whose every result is collected, for tests of chains."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest import mock

import torch
from torch import Tensor

import fusible_ops as ops
from cute_kernels.target import Target
from tests.cases import Splits

ACTIVATIONS: dict[str, Callable[..., ops.FusibleOperation]] = {
    "swiglu": ops.SwiGLU,
    "geglu": ops.GeGLU,
    "clamped_swiglu": lambda **k: ops.ClampedSwiGLU(limit=1.0, **k),
    "gelu": ops.GELU,
    "silu": ops.SiLU,
    "relu": ops.ReLU,
    "srelu": ops.SReLU,
    "qgelu": ops.QGELU,
    "glu": ops.GLU,
    "qgeglu": ops.QGeGLU,
    "reglu": ops.ReGLU,
    "sreglu": ops.SReGLU,
    "scaled_swiglu": ops.ScaledSwiGLU,
    "scaled_geglu": ops.ScaledGeGLU,
    "scaled_clamped": lambda **k: ops.ScaledClampedQGeGLU(limit=1.0, **k),
    "scaled_srelu": ops.ScaledSReLU,
}
UNFUSED_ACTIVATIONS: dict[str, Callable[..., ops.FusibleOperation]] = {
    "situglu": ops.SiTUGLU,
    "scaled_situglu": lambda **k: ops.ScaledSiTUGLU(beta1=1.5, beta2=2.0, **k),
    "scaled_tanh_srelu": lambda **k: ops.ScaledTanhSReLU(tanh_clamp_scale=0.75, **k),
}
"""Those that no kernel has yet."""
INTERLEAVED = ("swiglu", "geglu", "clamped_swiglu", "scaled_swiglu", "scaled_geglu", "scaled_clamped", "situglu")
INTERLEAVED += ("scaled_situglu",)
GATED = (*INTERLEAVED, "glu", "qgeglu", "reglu", "sreglu")


@dataclass(frozen=True)
class MLP:
    """GroupedLinear -> activation -> GroupedLinear, and how it is called. H hidden, I intermediate.

    bias: of both linears, or of the second alone.
    """

    activation: str = "scaled_swiglu"
    hidden: int = 64
    intermediate: int = 48
    bias: bool | str = False
    scale_bias: bool = False
    interleave: int | None = None
    linear: dict = field(default_factory=dict)

    @property
    def gated(self) -> bool:
        return self.activation in GATED

    @property
    def scaled(self) -> bool:
        return self.activation.startswith("scaled")

    def build(self, splits: Splits, device: str, dtype: torch.dtype, **sequential: object) -> ops.Sequential:
        """The module with random weights and biases of a size that keeps activations near 1."""
        make = (ACTIVATIONS | UNFUSED_ACTIVATIONS)[self.activation]
        act = make(glu_interleave_size=self.interleave) if self.activation in INTERLEAVED else make()
        wide = self.intermediate * (2 if self.gated else 1)
        common = {"bias": bool(self.bias), "device": device, "dtype": dtype, **self.linear}
        fc1 = ops.GroupedLinear(splits.groups, self.hidden, wide, **common | {"bias": self.bias is True})
        fc2 = ops.GroupedLinear(splits.groups, self.intermediate, self.hidden, scale_bias=self.scale_bias, **common)
        with torch.no_grad():
            for p in (*fc1.parameters(), *fc2.parameters()):
                p.copy_(torch.randn(p.shape) * (0.5 if p.dim() == 1 or p.shape[0] == 1 else p.shape[-1] ** -0.5))
        return ops.Sequential({"fc1": fc1, "act": act, "fc2": fc2}, **sequential)

    def extras(self, splits: Tensor, probs: Tensor) -> list[Tensor]:
        """The extra inputs in slot order."""
        middle = [probs] if self.scaled else []
        return [splits, *middle, splits, *([probs] if self.scale_bias and self.bias else [])]


@dataclass
class Inputs:
    """x [T, H], probs [T] and dy [T, H]; the tail rows of all three hold NaN."""

    x: Tensor
    probs: Tensor
    dy: Tensor
    splits: Splits

    @staticmethod
    def random(splits: Splits, hidden: int, device: str, dtype: torch.dtype, seed: int = 1) -> Inputs:
        generator = torch.Generator().manual_seed(seed)
        x, dy = (torch.randn(splits.rows, hidden, generator=generator).to(device, dtype) for _ in range(2))
        probs = torch.rand(splits.rows, generator=generator).to(dtype).float().to(device)
        for t in (x, dy, probs):
            t[splits.used :] = float("nan")
        return Inputs(x, probs, dy, splits)

    def to(self, dtype: torch.dtype) -> Inputs:
        return Inputs(self.x.to(dtype), self.probs, self.dy.to(dtype), self.splits)


def step(model: ops.Sequential, mlp: MLP, inputs: Inputs, split_dtype: torch.dtype = torch.int64) -> dict[str, Tensor]:
    """One forward and backward; y, dx, dprobs, and every parameter's gradient by name."""
    model.zero_grad()
    x = inputs.x.clone().requires_grad_()
    probs = inputs.probs.clone().requires_grad_()
    y = model(x, *mlp.extras(inputs.splits.tensor(x.device, split_dtype), probs))
    y.backward(inputs.dy)
    results = {"y": y.detach(), "dx": x.grad, "dprobs": probs.grad}
    results |= {f"d{name}": p.grad for name, p in model.named_parameters()}
    return {name: t for name, t in results.items() if t is not None}


@contextmanager
def as_if_on(arch: str) -> Iterator[None]:
    """Plan as if every device were an ideal machine of `arch`. CPU tensors then run the operators' reference."""
    with mock.patch.object(Target, "of", lambda device: Target.named(arch)):
        yield


@contextmanager
def formed_from_kept(op: ops.FusibleOperation) -> Iterator[None]:
    """The activation's result, too, is formed from what it keeps of its input."""

    def plain_input(ctx, x: Tensor) -> Tensor:
        preact = type(op).plain_input(op, ctx, x)
        return op.restored(ctx, op.kept(ctx, preact)).to(preact.dtype)

    with mock.patch.object(op, "plain_input", plain_input):
        yield


@contextmanager
def no_host_sync(device: str) -> Iterator[None]:
    """On CUDA, any wait of the host for the device that PyTorch knows of raises RuntimeError."""
    if device != "cuda":
        yield
        return
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
