"""Models of Hugging Face transformers with random weights, from configs: of sizes that tests want, or that users have.

Needs transformers: `pytest.importorskip("transformers")` first.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen3MoeConfig,
)

VOCABULARY = 96


def mixtral(layers: int, hidden: int, intermediate: int, experts: int, choices: int, **more: Any) -> PretrainedConfig:
    return MixtralConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_local_experts=experts,
        num_experts_per_tok=choices,
        **more,
    )


def qwen3(layers: int, hidden: int, intermediate: int, experts: int, choices: int, **more: Any) -> PretrainedConfig:
    return Qwen3MoeConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=2 * intermediate,
        moe_intermediate_size=intermediate,
        num_experts=experts,
        num_experts_per_tok=choices,
        norm_topk_prob=True,
        **more,
    )


def gpt_oss(layers: int, hidden: int, intermediate: int, experts: int, choices: int, **more: Any) -> PretrainedConfig:
    return GptOssConfig(
        num_hidden_layers=layers,
        layer_types=["full_attention"] * layers,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_local_experts=experts,
        num_experts_per_tok=choices,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        **more,
    )


def deepseek_v3(
    layers: int, hidden: int, intermediate: int, experts: int, choices: int, **more: Any
) -> PretrainedConfig:
    return DeepseekV3Config(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=2 * intermediate,
        moe_intermediate_size=intermediate,
        n_routed_experts=experts,
        num_experts_per_tok=choices,
        first_k_dense_replace=0,
        **more,
    )


_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4}
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
CONFIGS: dict[str, Callable[..., PretrainedConfig]] = {
    "mixtral": mixtral,
    "qwen3": qwen3,
    "gpt_oss": gpt_oss,
    "deepseek_v3": deepseek_v3,
}
_OWN: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "qwen3": {"head_dim": 16},
    "gpt_oss": {"head_dim": 16},
    "deepseek_v3": {"n_shared_experts": 1, "n_group": 2, "topk_group": 1, **_LATENT},
}


def small_config(name: str) -> PretrainedConfig:
    """Two layers, H = 64, I = 64, 8 experts of which a token takes 2."""
    return CONFIGS[name](2, 64, 64, 8, 2, vocab_size=VOCABULARY, max_position_embeddings=128, **_HEADS, **_OWN[name])


def small(name: str, dtype: torch.dtype = torch.float32, device: str = "cpu", implementation: str = "eager") -> Any:
    """A model of `small_config`, with experts of the size of the rest. Token v goes to experts v % 8 and its neighbour,
    by a wide margin: rounding does not change what routers choose.
    """
    config = small_config(name)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(5)
        how = {
            "experts_implementation": "eager",
            "attn_implementation": "eager",
        }  # of which the bits are the same again
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **how)
        for key, p in model.named_parameters():
            if ".experts." in key:
                p.normal_(std=0.5 if "bias" in key else p.shape[-1] ** -0.5)
            elif key.endswith("embed_tokens.weight"):
                first = torch.arange(VOCABULARY) % 8
                p.normal_(std=0.3)
                p += 16 * F.one_hot(first, p.shape[1]) + 12 * F.one_hot(first ^ 1, p.shape[1])
            elif key.endswith((".gate.weight", ".router.weight")):
                p.normal_(std=0.02)
                p += torch.eye(*p.shape) / 2
    model.set_experts_implementation(implementation)
    return model.to(device, dtype)


def experts_of(model: nn.Module) -> list[Any]:
    """The experts modules of each layer."""
    return [module for name, module in model.named_modules() if name.endswith(".experts")]


def step(model: Any, ids: Tensor, implementation: str) -> dict[str, Tensor]:
    """Logits, loss, and the gradient of every parameter that has one, by name."""
    model.set_experts_implementation(implementation)
    model.zero_grad()
    result = model(input_ids=ids, labels=ids)
    result.loss.backward()
    grads = {f"d{name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": result.logits.detach(), "loss": result.loss.detach(), **grads}


@cache
def load_peft() -> Any:
    """PEFT. It imports Transformer Engine if that can be found, which fails where only the Python of its wheel is."""
    if importlib.util.find_spec("peft") is None:
        pytest.skip("needs peft")
    known = sys.modules.get("transformer_engine")
    sys.modules["transformer_engine"] = None  # type: ignore[assignment]
    try:
        return importlib.import_module("peft")
    finally:
        del sys.modules["transformer_engine"]
        if known is not None:
            sys.modules["transformer_engine"] = known


def with_lora(model: Any) -> Any:
    """The model with PEFT's adapters on both weights of all experts, everything else frozen. Skips without PEFT."""
    peft = load_peft()
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=[], target_parameters=names, init_lora_weights=False)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*is deprecated and will be removed", FutureWarning)  # between those two
        torch.manual_seed(7)
        return peft.get_peft_model(model, config)


@contextmanager
def choices_of(model: nn.Module) -> Iterator[list[Tensor]]:
    """The expert ids that each call of an experts module is given, while it is entered."""
    seen: list[Tensor] = []
    hooks = [e.register_forward_pre_hook(lambda _, args: seen.append(args[1].clone())) for e in experts_of(model)]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
