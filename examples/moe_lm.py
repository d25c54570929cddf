"""A byte-level language model: causal attention and a mixture of SwiGLU experts, the experts as fusible ops.

    token -> embedding -> blocks of [x + attention(norm(x)); x + experts(norm(x))] -> norm -> 256 logits

The part that this project is about is `Experts`. Letters: T tokens, k experts per token, G experts, H width.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from row_order import sorted_by
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import fusible_ops as fo

BYTES = 256


@dataclass(frozen=True)
class ModelConfig:
    width: int
    heads: int
    layers: int
    experts: int
    top_k: int
    expert_width: int
    context: int
    expert_dtype: torch.dtype = torch.float32
    fused: bool = True
    recipe: fo.Recipe | None = None  # how the experts are quantised


class Experts(nn.Module):
    """Send each token to its top-k experts, and add up their answers weighted by the router's probabilities.

    Rows are sorted by expert, so that each expert's rows are adjacent; the expert MLP takes the sorted rows, the number
    of rows of each expert (on the device; the host never reads it) and one probability per row.

    here: how many of the experts this process holds, if not all (examples/expert_parallel.py).
    """

    def __init__(self, config: ModelConfig, device: torch.device, here: int | None = None) -> None:
        super().__init__()
        self.experts, self.top_k, self.dtype = config.experts, config.top_k, config.expert_dtype
        self.recipe = config.recipe
        self.router = nn.Linear(config.width, config.experts, bias=False, device=device)
        factory = {"bias": False, "device": device, "dtype": config.expert_dtype}
        here = config.experts if here is None else here
        self.mlp = fo.Sequential(
            fo.GroupedLinear(here, config.width, 2 * config.expert_width, **factory),
            fo.ScaledSwiGLU(),
            fo.GroupedLinear(here, config.expert_width, config.width, **factory),
            **({} if config.fused else {"rules": ()}),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, H] -> (y [T, H], load-balance loss [], rows of each expert [G])."""
        probabilities = F.softmax(self.router(x), dim=-1)
        weights, chosen = probabilities.topk(self.top_k, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        y, split_sizes = self.mixed(x, chosen, weights)

        load = self.load(split_sizes)
        share = load / load.sum()
        balance = self.experts * (share * probabilities.mean(dim=0)).sum()
        return y, balance, load

    def mixed(self, x: Tensor, chosen: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, H], its experts and their weights [T, k] -> (y [T, H], rows of each expert [G])."""
        order, split_sizes = sorted_by(chosen), self.sizes(chosen)
        rows = order.spread(x.to(self.dtype))
        y = self.answers(rows, split_sizes, order.each().spread(weights.view(-1, 1)).squeeze(1))
        return order.collected(y, x.dtype), split_sizes

    def sizes(self, chosen: Tensor) -> Tensor:
        """Rows of each expert."""
        sizes = torch.zeros(self.experts, dtype=torch.int64, device=chosen.device)
        return sizes.scatter_add_(0, chosen.flatten(), torch.ones_like(chosen.flatten()))

    def answers(self, rows: Tensor, split_sizes: Tensor, weight_of_row: Tensor) -> Tensor:
        """What the experts make of their rows [R, H], sorted by expert, each times its weight."""
        with fo.autocast(enabled=self.recipe is not None, recipe=self.recipe):
            return self.mlp(rows, split_sizes, weight_of_row, split_sizes)

    def load(self, split_sizes: Tensor) -> Tensor:
        """Rows of each expert in the whole batch, which is to be balanced."""
        return split_sizes


MakeExperts = Callable[[ModelConfig, torch.device], Experts]


class Attention(nn.Module):
    """Causal self-attention with rotary positions.

    On a GPU the kernel that PyTorch would choose for FP32 adds up the gradient of q in an order that varies from run to
    run. Plain matrix products, which a context this short allows, leave the order to no chance.
    """

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False, device=device)
        self.out = nn.Linear(config.width, config.width, bias=False, device=device)
        size = config.width // config.heads
        frequency = 10_000.0 ** (-torch.arange(0, size, 2, device=device) / size)
        angle = torch.arange(config.context, device=device)[:, None] * frequency
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        with sdpa_kernel(SDPBackend.MATH) if x.is_cuda else nullcontext():
            y = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))

    def rotate(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        cos, sin = self.cos[: x.shape[-2]], self.sin[: x.shape[-2]]
        return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class Block(nn.Module):
    def __init__(self, config: ModelConfig, device: torch.device, experts: MakeExperts) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, device=device)
        self.attention = Attention(config, device)
        self.experts_norm = nn.RMSNorm(config.width, device=device)
        self.experts = experts(config, device)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = x + self.attention(self.attention_norm(x))
        y, balance, load = self.experts(self.experts_norm(x).flatten(0, 1))
        return x + y.view_as(x), balance, load


class MoELanguageModel(nn.Module):
    def __init__(self, config: ModelConfig, device: torch.device, experts: MakeExperts = Experts) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(BYTES, config.width, device=device)
        self.blocks = nn.ModuleList(Block(config, device, experts) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, device=device)
        self.head = nn.Linear(config.width, BYTES, bias=False, device=device)
        nn.init.normal_(self.embedding.weight, std=0.5)
        nn.init.zeros_(self.head.weight)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """tokens [B, S] -> (logits [B, S, 256], mean load-balance loss [], rows of each expert [layers, G])."""
        x = self.embedding(tokens)
        balances, loads = [], []
        for block in self.blocks:
            x, balance, load = block(x)
            balances.append(balance)
            loads.append(load)
        return self.head(self.norm(x)), torch.stack(balances).mean(), torch.stack(loads)

    @torch.no_grad()
    def sample(self, prompt: bytes, count: int, temperature: float, generator: torch.Generator) -> bytes:
        """`count` more bytes after the prompt."""
        device = self.embedding.weight.device
        tokens = torch.tensor(list(prompt), device=device)[None]
        for _ in range(count):
            logits, _, _ = self(tokens[:, -self.config.context :])
            weights = F.softmax(logits[:, -1].float() / temperature, dim=-1)
            tokens = torch.cat([tokens, torch.multinomial(weights, 1, generator=generator)], dim=1)
        return bytes(tokens[0].tolist())
