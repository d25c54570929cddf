"""Models of Hugging Face transformers on our fused operations: one name more among its experts implementations.

    from fusible_ops.integrations import huggingface

    huggingface.install()
    model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="fusible_ops")
    print(huggingface.explain(model))

Weights are the model's own parameters, read where they lie, as every model has them: [E, 2I, H], or [E, H, 2I] with
gate and up in pairs (GPT-OSS); so checkpoints, optimizers, adapters and sharding know nothing of it.
Source: the interface is transformers.integrations.moe (5.24): `ALL_EXPERTS_FUNCTIONS`, `use_experts_implementation`.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from cute_kernels.target import Target
from fusible_ops import functional
from fusible_ops.call import autocast_dtype_on
from fusible_ops.fuser import ON_UNFUSED
from fusible_ops.integrations.hf_experts import Formula, formula_at, formula_of, is_experts
from fusible_ops.integrations.hf_routing import route, to_experts, to_tokens
from fusible_ops.recipe import Recipe
from patterns import explain as told

__all__ = ["NAME", "experts_forward", "explain", "install", "uninstall"]

NAME = "fusible_ops"


def install(on_unfused: str = "allow") -> None:
    """Let models of this process ask for `experts_implementation="fusible_ops"`. Again: the last on_unfused holds.

    on_unfused: what happens where an experts module does not run fused: "allow", "warn" or "error" (RuntimeError at its
    first call, with the reason).
    ImportError, with words, if transformers is not installed or has no experts implementations; ValueError for an
    unknown on_unfused.
    """
    if on_unfused not in ON_UNFUSED:
        raise ValueError(f"on_unfused must be one of {', '.join(ON_UNFUSED)}; got {on_unfused!r}")
    _implementations()[NAME] = functools.partial(experts_forward, on_unfused=on_unfused)


def uninstall() -> None:
    """Take the name away. A model that has it raises KeyError at its next call, or `set_experts_implementation`."""
    _implementations().pop(NAME, None)


def _implementations() -> dict[str, Any]:
    """Those that all models of the process know."""
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        return ALL_EXPERTS_FUNCTIONS._global_mapping
    except (ImportError, AttributeError) as missing:
        raise ImportError(
            "fusible_ops.integrations.huggingface needs transformers 5, with experts implementations to choose from: "
            f"{missing}"
        ) from missing


def experts_forward(
    experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, on_unfused: str = "allow"
) -> Tensor:
    """out_t = Σ_k w_tk · (W2_e act(W1_e x_t + b1_e) + b2_e), e = index_tk: what an experts module does.

    hidden_states [T, H], top_k_index [T, K] (ids of no expert here, `num_experts` or more or negative, add nothing),
    top_k_weights [T, K] float. Out [T, H] in hidden_states' dtype; between them the weights' dtype, or autocast's. The
    host reads nothing of the device. Errors: as `fusible_ops.functional.grouped_mlp`.
    """
    is_compiling = torch.compiler.is_dynamo_compiling()
    formula = formula_at(id(experts)) if is_compiling else formula_of(experts)
    first, second = _linear(experts, formula.first, formula), _linear(experts, "down_proj", formula)
    x = hidden_states.to(autocast_dtype_on(hidden_states.device) or first[0][0].dtype)
    routing = route(top_k_index, experts.num_experts)
    x, probs = to_experts(x, top_k_weights, routing)
    runs, splits, transposed = functional.runs(), routing.splits, formula.is_transposed
    kept_for = "" if is_compiling else str(id(experts))
    if formula.activation:
        rows = None if formula.has_norm else probs
        scales = rows if formula.has_bias else None
        how = formula.activation, formula.interleave, transposed, kept_for, on_unfused
        y = runs.run_mlp(x, *first, *second, splits, rows, scales, *how)
    else:
        if on_unfused != "allow":
            _tell(experts, formula, on_unfused)
        y = runs.run_linear(x, first[0], splits, first[1], None, transposed, kept_for)
        y = experts._apply_gate(y) if experts.has_gate else experts.act_fn(y)
        y = runs.run_linear(y, second[0], splits, second[1], None, transposed, kept_for)
    if formula.has_norm:
        y = experts.post_expert_norm(y)
    if formula.has_norm or not formula.activation:
        y = y * probs.unsqueeze(-1)
    return to_tokens(y, routing).to(hidden_states.dtype)


def _linear(experts: Any, name: str, formula: Formula) -> tuple[list[Tensor], list[Tensor]]:
    """Weight and bias, each in a list. An attribute is read once: an adapter may work it out."""
    weight = getattr(experts, name)
    if not formula.has_bias:
        return [weight], []
    bias = getattr(experts, f"{name}_bias")
    if weight.requires_grad is not bias.requires_grad:
        weight, bias = _WithGrad.apply(weight, bias), _WithGrad.apply(bias, weight)
    return [weight], [bias]


class _WithGrad(torch.autograd.Function):
    """A tensor beside which another one requires a gradient, so that it seems to. It gets one if it does itself."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, other: Tensor) -> Tensor:
        return t.view_as(t)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


_told: set[str] = set()


def _tell(experts: Any, formula: Formula, on_unfused: str) -> None:
    text = _unlike(experts, formula)
    if on_unfused == "error":
        raise RuntimeError(f"some ops run unfused, and on_unfused='error': {text}")
    if text not in _told:
        _told.add(text)
        warnings.warn(f"some ops run unfused: {text}", stacklevel=6)  # the caller of the module


def _unlike(experts: Any, formula: Formula) -> str:
    return f"{type(experts).__name__}: {formula.why}, so it runs as it is, between two grouped linears"


# ----------------------------------------------------------------------------------------------------------------------
# Explaining


def explain(model: nn.Module, target: str | Target | torch.device | None = None, recipe: Recipe | None = None) -> str:
    """Which kernel runs what in the experts of each layer, where none does why, and which layers run something else.

    Layers that are alike are told together. target: as `fusible_ops.Sequential.explain`; None: the parameters' device.
    recipe: as under `autocast(recipe=recipe)`; None: as under none. A `torch.autocast` that is active counts.
    """
    texts: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        if is_experts(module):
            texts.setdefault(_explained(module, target, recipe), []).append(name)
    if not texts:
        return "no experts modules that transformers lets choose an implementation"
    return "\n\n".join(f"{_named(names)}: {text}" for text, names in texts.items())


def _named(names: Iterable[str]) -> str:
    """The modules' names; of many the first and the last."""
    first, *others = names
    return first if not others else f"{first} … {others[-1]} ({1 + len(others)} layers)"


def _explained(experts: Any, target: str | Target | torch.device | None, recipe: Recipe | None) -> str:
    chosen, title = experts.config._experts_implementation, type(experts).__name__
    if chosen != NAME:
        return f'{title} runs "{chosen}"; model.set_experts_implementation("{NAME}") changes that'
    is_compiling = torch.compiler.is_dynamo_compiling()
    formula = formula_at(id(experts)) if is_compiling else formula_of(experts)
    first, second = _linear(experts, formula.first, formula), _linear(experts, "down_proj", formula)
    if (dtype := first[0][0].dtype).itemsize < 2:
        return (
            f"{title} holds weights in {str(dtype).removeprefix('torch.')}, for which transformers has experts "
            "implementations of its own; load the model dequantised: from_pretrained(quantization_config=...) with "
            "dequantize=True"
        )
    device = first[0][0].device
    machine = Target.named(target) if isinstance(target, str) else target
    machine = machine if isinstance(machine, Target) else Target.of(machine or device)
    asked = machine, autocast_dtype_on(device), recipe
    kept_for = str(id(experts))
    if formula.activation:
        has_scales = formula.has_bias and not formula.has_norm
        how = not formula.has_norm, has_scales, formula.activation, formula.interleave, formula.is_transposed
        with functional.lent_mlp(first, second, *how, kept_for) as fuser:
            return f"{title}\n{told(fuser.plan(*asked))}"
    texts = [_unlike(experts, formula)]
    for each in (first, second):
        with functional.lent_linear(*each, False, formula.is_transposed, kept_for) as fuser:
            texts.append(told(fuser.plan(*asked)))
    return "\n".join(texts)
