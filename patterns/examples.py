"""Chains that the rows of the table match: shapes of small MoE and dense layers. Tests alter them; docs show them."""

from __future__ import annotations

from dataclasses import replace

from cute_kernels.quantization.formats import fp8_block, mxfp8, nvfp4
from patterns.chain import Chain, OpSpec, RecipeSpec

DTYPE = "bfloat16"


def grouped_linear(name: str, in_features: int, out_features: int, **more: object) -> OpSpec:
    """A grouped linear of 8 groups with bias; `more` replaces facts."""
    facts: dict[str, object] = {"num_groups": 8, "in_features": in_features, "out_features": out_features}
    facts |= {"has_bias": True, "scale_bias": False, "dtype": DTYPE, "accumulate_into_main_grad": False}
    facts |= {"delay_wgrad": False, "single_grouped_weight": False, "single_grouped_bias": False}
    facts |= {"transposed_weight": False}
    return OpSpec("grouped_linear", name, facts | more)


def linear(name: str, in_features: int, out_features: int, **more: object) -> OpSpec:
    """A dense linear with bias."""
    facts: dict[str, object] = {"in_features": in_features, "out_features": out_features}
    facts |= {"has_bias": True, "dtype": DTYPE, "accumulate_into_main_grad": False}
    return OpSpec("linear", name, facts | more)


def activation(kind: str, name: str = "act", **more: object) -> OpSpec:
    """An activation without probs or clamp, on plain halves."""
    facts: dict[str, object] = {"scaled": False, "glu_interleave": 0, "cache_quantized_input": False}
    facts |= {"limit": None, "alpha": 1.0, "offset": 0.0}
    return OpSpec(kind, name, facts | more)


FP8_BLOCKS = RecipeSpec(
    "Float8BlockScaling",
    {"input": fp8_block(), "weight": fp8_block(dims=2), "grad_output": fp8_block(), "backward_override": None},
)
QUANTIZE = OpSpec("quantize", "quantize", {"forward": True, "backward": False})

_MOE = (
    grouped_linear("fc1", 1024, 5632),
    activation("swiglu", scaled=True),
    grouped_linear("fc2", 2816, 1024, scale_bias=True),
)
_FFN = (linear("fc1", 1024, 5632), activation("swiglu"), linear("fc2", 2816, 1024))

MOE = Chain(_MOE, DTYPE)
MOE_INTERLEAVED = Chain((_MOE[0], activation("swiglu", scaled=True, glu_interleave=32), _MOE[2]), DTYPE)
MOE_SRELU = Chain((grouped_linear("fc1", 1024, 2816), activation("srelu", scaled=True), _MOE[2]), DTYPE)
MOE_ACTIVATION_QUANTIZE = Chain((*_MOE[:2], QUANTIZE), DTYPE)
MOE_LINEAR_QUANTIZE = Chain((_MOE[0], QUANTIZE), DTYPE)
MOE_LINEAR = Chain(_MOE[:1], DTYPE)
FFN = Chain(_FFN, DTYPE)
FFN_INTERLEAVED = Chain((_FFN[0], activation("swiglu", glu_interleave=32), _FFN[2]), DTYPE)
FFN_ACTIVATION_QUANTIZE = Chain((*_FFN[:2], QUANTIZE), DTYPE)
FFN_LINEAR_QUANTIZE = Chain((_FFN[0], QUANTIZE), DTYPE)
FFN_LINEAR = Chain(_FFN[:1], DTYPE)

MOE_FP8 = replace(MOE, recipe=FP8_BLOCKS)
MOE_ACTIVATION_QUANTIZE_FP8 = replace(MOE_ACTIVATION_QUANTIZE, recipe=FP8_BLOCKS)
MOE_LINEAR_FP8 = replace(MOE_LINEAR, recipe=FP8_BLOCKS)
_MX = dict.fromkeys(("input", "weight", "grad_output"), mxfp8())
_NV = {"input": nvfp4(hadamard=True), "weight": nvfp4(2), "grad_output": nvfp4(hadamard=True, stochastic=True)}
MXFP8 = RecipeSpec("MXFP8BlockScaling", {**_MX, "backward_override": None})
NVFP4 = RecipeSpec("NVFP4BlockScaling", {**_NV, "backward_override": None})
MOE_LINEAR_MXFP8 = replace(MOE_LINEAR, recipe=MXFP8)
MOE_LINEAR_NVFP4 = replace(MOE_LINEAR, recipe=NVFP4)
_CLAMPED = activation("clamped_swiglu", glu_interleave=32, limit=10.0)
SM100 = {
    (kind, format, what): replace(chain, recipe=recipe)
    for format, recipe in (("mxfp8", MXFP8), ("nvfp4", NVFP4))
    for kind, what, chain in (
        ("grouped_linear", "", MOE_INTERLEAVED),
        ("grouped_linear", "_any_clamp", Chain((_MOE[0], _CLAMPED, _MOE[2]), DTYPE)),
        ("grouped_linear", "_srelu", MOE_SRELU),
        ("linear", "", FFN_INTERLEAVED),
        ("linear", "_any_clamp", Chain((_FFN[0], _CLAMPED, _FFN[2]), DTYPE)),
        ("linear", "_srelu", Chain((linear("fc1", 1024, 2816), activation("srelu"), _FFN[2]), DTYPE)),
    )
}
"""(Kind of linear, format, what distinguishes the activation) -> an MLP for Blackwell."""
MOE_MXFP8 = replace(MOE, recipe=MXFP8)
FFN_MXFP8 = replace(FFN, recipe=MXFP8)
MOE_NVFP4 = replace(MOE, recipe=NVFP4)
FFN_NVFP4 = replace(FFN, recipe=NVFP4)
FFN_FP8 = replace(FFN, recipe=FP8_BLOCKS)
FFN_ACTIVATION_QUANTIZE_FP8 = replace(FFN_ACTIVATION_QUANTIZE, recipe=FP8_BLOCKS)
FFN_LINEAR_MXFP8 = replace(FFN_LINEAR, recipe=MXFP8)
FFN_LINEAR_NVFP4 = replace(FFN_LINEAR, recipe=NVFP4)
FFN_LINEAR_FP8 = replace(FFN_LINEAR, recipe=FP8_BLOCKS)
