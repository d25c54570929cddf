"""How the demo trains: sizes, learning rate, and an optimizer that keeps FP32 copies of low-precision parameters."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from moe_lm import ModelConfig
from torch import Tensor

import fusible_ops as fo


@dataclass(frozen=True)
class TrainConfig:
    steps: int
    batch: int
    learning_rate: float
    seed: int = 0
    warmup: int = 40
    weight_decay: float = 0.05
    balance: float = 0.01
    max_seconds: float | None = None


ON_CPU = (
    ModelConfig(width=128, heads=4, layers=2, experts=8, top_k=2, expert_width=128, context=128),
    TrainConfig(steps=800, batch=8, learning_rate=5e-3, max_seconds=85.0),
)
ON_CUDA = (
    ModelConfig(width=512, heads=8, layers=4, experts=32, top_k=4, expert_width=512, context=256),
    TrainConfig(steps=300, batch=64, learning_rate=5e-4, warmup=75),
)
"""The learning rate is low so that --compare compares kernels: the higher it is, the further rounding alone drives two
runs of the same model apart."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
RECIPES = {
    "block": fo.Float8BlockScaling(),
    "current": fo.Float8CurrentScaling(),
    "delayed": fo.DelayedScaling(),
    "mxfp8": fo.MXFP8BlockScaling(),
    "nvfp4": fo.NVFP4BlockScaling(),
}


class Optimizer:
    """AdamW over FP32 copies of the parameters: a step that BF16 would round away is kept until it counts."""

    def __init__(self, parameters: list[Tensor], config: TrainConfig) -> None:
        self.parameters = parameters
        self.low = [p for p in parameters if p.dtype != torch.float32]
        self.masters = [p.detach().float() for p in self.low]
        full = [p for p in parameters if p.dtype == torch.float32]
        self.adamw = torch.optim.AdamW(
            full + self.masters, lr=0.0, betas=(0.9, 0.98), weight_decay=config.weight_decay, fused=True
        )

    def norm(self) -> Tensor:
        """Of all gradients together."""
        return torch.nn.utils.get_total_norm([p.grad for p in self.parameters])

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        torch.nn.utils.clip_grads_with_norm_(self.parameters, 1.0, self.norm())
        for low, master in zip(self.low, self.masters, strict=True):
            master.grad = low.grad.float()
        for group in self.adamw.param_groups:
            group["lr"] = learning_rate
        self.adamw.step()
        for low, master in zip(self.low, self.masters, strict=True):
            low.copy_(master)
        for p in self.parameters:
            p.grad = None


def learning_rate(step: int, config: TrainConfig) -> float:
    """Linear warm-up, then linear to zero."""
    rise = (step + 1) / min(config.warmup, max(1, config.steps // 4))
    return config.learning_rate * min(1.0, rise) * (1 - step / config.steps)
