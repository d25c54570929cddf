"""A mixture-of-experts layer of Megatron-Core's, as its users make it: with Transformer Engine's operation fuser, which
our plug-in serves, and with Megatron's own experts in plain PyTorch beside it.

On a GPU with the real packages. On a CPU with the Python of Transformer Engine's wheel (`tests/te_wheel.py`): there
Megatron's router and dispatcher and our reference run, and what is compiled is not called.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests import te_wheel
from tests.compare import assert_as_accurate, assert_bitwise_equal, relative_error

GLU_VARIABLE = "NVTE_CUTEDSL_FUSED_GROUPED_MLP"
"""Megatron asks for it where experts are gated, on every architecture."""
KINDS: dict[str, dict[str, Any]] = {
    "swiglu": {"gated_linear_unit": True, "activation": "silu"},
    "gpt_oss": {
        "gated_linear_unit": True,
        "activation": "quick_gelu",
        "activation_func_clamp_value": 7.0,
        "glu_linear_offset": 1.0,
        "bias": True,
    },
    "squared_relu": {"activation": "squared_relu", "use_fused_weighted_squared_relu": True},
}


def on_gpu() -> bool:
    return torch.cuda.is_available()


def load() -> None:
    """Import Megatron-Core and Transformer Engine. Skips the test where one is missing."""
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("needs megatron-core 0.19, and Python 3.12 for it")
    ops = te_wheel.load()
    if on_gpu() and not te_wheel.is_real():
        pytest.skip("needs transformer-engine[pytorch] with its compiled parts: on a GPU Megatron's router calls them")
    te = sys.modules["transformer_engine.pytorch"]
    if not hasattr(te, "ops") or not hasattr(te, "GroupedLinear"):
        te.ops = ops  # type: ignore[attr-defined]
        te.__getattr__ = _of_its_parts  # type: ignore[method-assign, assignment]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it imports the compiler of torch.compile, which is deprecated here and there
        importlib.import_module("megatron.core.parallel_state")


def _of_its_parts(name: str) -> Any:
    """What `transformer_engine.pytorch` would export of what is imported, else something that does nothing."""
    if name.startswith("__"):
        raise AttributeError(name)
    parts = (sys.modules[f"transformer_engine.pytorch.{part}"] for part in te_wheel.PARTS)
    return next((getattr(part, name) for part in parts if hasattr(part, name)), te_wheel._nothing(name))


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    """Megatron's groups: the ranks of the job (`tests.ranks`) share the experts; outside of one, this process alone."""
    from megatron.core import parallel_state

    is_job = dist.is_initialized()
    patches = contextlib.ExitStack()
    with patches, warnings.catch_warnings(), mock.patch.dict(os.environ, {GLU_VARIABLE: "1"}):
        warnings.simplefilter("ignore")
        if not on_gpu():
            from megatron.core.transformer.moe import moe_utils

            patches.enter_context(mock.patch.object(torch.cuda, "current_device", lambda: "cpu"))
            patches.enter_context(mock.patch.object(moe_utils, "te_general_gemm", None))  # the router's product
        # Of one rank this is the identity; as it is, Megatron's own experts with biases fail on it.
        alone = mock.patch("megatron.core.tensor_parallel.layers.reduce_from_tensor_model_parallel_region", _itself)
        patches.enter_context(alone)
        if not is_job:
            dist.init_process_group("nccl" if on_gpu() else "gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            parallel_state.initialize_model_parallel(expert_model_parallel_size=dist.get_world_size())
            if on_gpu():
                from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

                model_parallel_cuda_manual_seed(1)
            yield
        finally:
            parallel_state.destroy_model_parallel()
            if not is_job:
                dist.destroy_process_group()


def _itself(t: Tensor, group: Any = None) -> Tensor:
    return t.clone()


def make(
    kind: str, fused: bool, hidden: int = 64, intermediate: int = 48, experts: int = 4, topk: int = 2,
    dtype: torch.dtype = torch.bfloat16, by_ops: bool = True,
) -> nn.Module:  # fmt: skip
    """The layer of this kind. fused: experts by Transformer Engine, with its operation fuser or, unless by_ops, its
    modules; else Megatron's own, one by one.
    """
    from megatron.core.activations import squared_relu
    from megatron.core.fusions.fused_bias_geglu import quick_gelu
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    facts = dict(KINDS[kind])
    functions = {"silu": nn.functional.silu, "quick_gelu": quick_gelu, "squared_relu": squared_relu}
    config = TransformerConfig(
        num_layers=1,
        hidden_size=hidden,
        num_attention_heads=1,
        num_moe_experts=experts,
        moe_router_topk=topk,
        moe_ffn_hidden_size=intermediate,
        activation_func=functions[facts.pop("activation")],
        add_bias_linear=facts.pop("bias", False),
        bias_activation_fusion=False,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        moe_grouped_gemm=fused,
        use_transformer_engine_op_fuser=fused and by_ops,
        moe_token_dispatcher_type="alltoall" if on_gpu() else "allgather",
        moe_router_load_balancing_type="none",
        moe_router_dtype="fp32",
        use_cpu_initialization=not on_gpu(),
        gradient_accumulation_fusion=False,
        expert_model_parallel_size=dist.get_world_size(),
        **facts,
    )
    spec = get_moe_module_spec(use_te=fused, num_experts=experts, moe_grouped_gemm=fused)
    with contextlib.nullcontext() if on_gpu() else mock.patch.object(torch.cuda, "is_available", lambda: True):
        return spec(config=config, layer_number=1)


def copy_experts(source: nn.Module, target: nn.Module) -> None:
    """The values of the fused layer's parameters into Megatron's own experts, and the router's."""
    with torch.no_grad():
        for mine, given in zip(target.router.parameters(), source.router.parameters(), strict=True):
            mine.copy_(given)
        for i, expert in enumerate(target.experts.local_experts):
            for name in ("linear_fc1", "linear_fc2"):
                for kind in ("weight", "bias"):
                    given = getattr(getattr(source.experts, name), f"{kind}{i}", None)
                    if given is not None and given.numel():
                        getattr(getattr(expert, name), kind).copy_(given)


def results(layer: nn.Module, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """y, dx, and the gradients of the router and of every expert, by names that both kinds of experts share."""
    layer.zero_grad()
    x = x.detach().clone().requires_grad_()
    y, _ = layer(x)
    y.backward(dy)
    found = {"y": y.detach(), "dx": x.grad, "router": layer.router.weight.grad}
    for name in ("linear_fc1", "linear_fc2"):
        for kind in ("weight", "bias"):
            found |= _expert_gradients(layer.experts, name, kind)
    return found


def _expert_gradients(experts: nn.Module, name: str, kind: str) -> dict[str, Tensor]:
    if hasattr(experts, "local_experts"):
        given = [getattr(getattr(expert, name), kind) for expert in experts.local_experts]
    else:
        linear = getattr(experts, name)
        given = [getattr(linear, f"{kind}{i}", None) for i in range(linear.num_gemms)]
    return {
        f"{name}.{kind}{i}": torch.zeros_like(p) if p.grad is None else p.grad
        for i, p in enumerate(given)
        if p is not None and p.numel()
    }


def assert_agrees(kind: str, device: str) -> None:
    """The layer by Transformer Engine's fuser is as accurate as Megatron's own experts in the same dtype, both against
    those in FP32, and one of our operations has run it. On every rank of a process group.

    Routers multiply by PyTorch. By Transformer Engine, which adds the bias too, three with the same BF16 bias sent the
    same tokens to different experts, on an H200.
    """
    from megatron.core.transformer.moe import moe_utils

    with mock.patch.object(moe_utils, "te_general_gemm", None):
        _assert_agrees(kind, device)


def _assert_agrees(kind: str, device: str) -> None:
    torch.manual_seed(dist.get_rank())
    layer, plain = (make(kind, fused).to(device) for fused in (True, False))
    exact = make(kind, fused=False, dtype=torch.float32).to(device)
    for other in (plain, exact):
        copy_experts(layer, other)
    x, dy = (torch.randn(24, 2, 64, device=device, dtype=torch.bfloat16) for _ in range(2))
    chosen: list[Tensor] = []
    for each in (layer, plain, exact):
        each.router.register_forward_hook(lambda module, inputs, outputs: chosen.append(outputs[1].clone()))
    found = results(layer, x, dy)
    assert fused_names(layer) == ["FusibleOpsRun"]
    theirs, reference = results(plain, x, dy), results(exact, x.float(), dy.float())
    assert found.keys() == theirs.keys() == reference.keys()
    for other in chosen[1:]:
        assert_bitwise_equal(other, chosen[0], f"{kind}: where tokens go, without which there is nothing to compare")
    errors = {n: tuple(f"{relative_error(t[n], reference[n]):.1e}" for t in (found, theirs)) for n in found}
    for name, t in found.items():
        assert_as_accurate(t, theirs[name], reference[name].float(), f"{kind}: of ours and theirs {errors}; {name}")


def fused_names(layer: nn.Module) -> list[str]:
    """What runs the experts, by the names of its classes."""
    (chain,) = layer.experts._fused_ops
    return [type(op).__name__ for op, _ in chain._module_groups[0]._forward_ops]
