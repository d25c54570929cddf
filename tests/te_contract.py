"""What Transformer Engine 2.20.2's `pytorch.ops` offers for MLPs, as data: names, arguments, state_dict keys, errors.

Written down from its documented behaviour; where the package is installed, `tests/cpu/test_te_contract.py` holds this
file against it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

NAMES = [
    "Sequential",
    "Linear",
    "FusibleOperation",
    "BasicOperation",
    "FusedOperation",
    "register_forward_fusion",
    "register_backward_fusion",
    "register_forward_backward_fusion",
    "GELU",
    "GEGLU",
    "GLU",
    "QGELU",
    "QGEGLU",
    "ReLU",
    "ReGLU",
    "SReLU",
    "SReGLU",
    "SiLU",
    "ScaledSReLU",
    "ScaledTanhSReLU",
    "SwiGLU",
    "SiTUGLU",
    "ClampedSwiGLU",
    "ScaledSwiGLU",
    "ScaledSiTUGLU",
    "ScaledClampedQGeGLU",
    "GroupedLinear",
    "BasicLinear",
    "Bias",
    "Quantize",
    "ConstantScale",
    "Identity",
    "Dropout",
    "Reshape",
    "MakeExtraOutput",
    "AddExtraInput",
    "is_op_fuser_grouped_tensor_path_supported",
    "fused",
    "basic",
]
"""Those that concern MLPs: not the norms, nor the collectives of tensor parallelism."""

DOTTED = [
    "fuser.OperationFuser",
    "op.OperationContext",
    "op.BasicOperation",
    "op.FusedOperation",
    "sequential.Sequential",
    "linear.Linear",
    "basic.GroupedLinear",
    "basic.grouped_linear.GroupedLinear",
    "basic.grouped_linear.OUTPUT_BUFFER_KEY",
    "basic.grouped_linear.GRAD_INPUT_BUFFER_KEY",
]

_LINEAR = "device=None, dtype=None, tensor_parallel_mode=None, tensor_parallel_group=None, sequence_parallel=False, \
rng_state_tracker_function=None, accumulate_into_main_grad=False"
_CACHED = "*, cache_quantized_input=False"
_INTERLEAVED = f"{_CACHED}, glu_interleave_size=None"
_SCALED = "glu_interleave_size=None, *, activation_recompute_in_mlp=False"
SIGNATURES = {
    "GroupedLinear": "num_groups, in_features, out_features, *, bias=True, device=None, dtype=None, "
    "rng_state_tracker_function=None, accumulate_into_main_grad=False, single_grouped_weight=False, "
    "single_grouped_bias=False, delay_wgrad_compute=False, scale_bias=False",
    "BasicLinear": f"in_features, out_features, *, {_LINEAR}, userbuffers_options=None",
    "Linear": f"in_features, out_features, *, bias=True, {_LINEAR}",
    "Bias": "size, *, device=None, dtype=None, tensor_parallel=False, tensor_parallel_group=None",
    **dict.fromkeys(["GELU", "GEGLU", "GLU", "QGELU", "QGEGLU", "ReLU", "ReGLU", "SReLU", "SReGLU", "SiLU"], _CACHED),
    "SwiGLU": _INTERLEAVED,
    "SiTUGLU": "*, beta1=4.0, beta2=25.0, cache_quantized_input=False, glu_interleave_size=None",
    "ClampedSwiGLU": "*, limit=7.0, alpha=1.702, glu_linear_offset=1.0, cache_quantized_input=False, "
    "glu_interleave_size=None",
    "ScaledSwiGLU": _SCALED,
    "ScaledSiTUGLU": f"{_SCALED}, beta1=4.0, beta2=25.0",
    "ScaledClampedQGeGLU": f"{_SCALED}, limit=7.0, alpha=1.702, glu_linear_offset=1.0",
    "ScaledSReLU": "*, activation_recompute_in_mlp=False",
    "ScaledTanhSReLU": "*, tanh_clamp_scale, activation_recompute_in_mlp=False",
    "Quantize": "forward=True, backward=False",
    "ConstantScale": "scale",
    "Dropout": "p",
    "Reshape": "shape",
    "MakeExtraOutput": "*, in_place=False",
    "AddExtraInput": "*, in_place=False",
    "register_forward_fusion": "op_fusion_func, prepend=False",
    "register_backward_fusion": "op_fusion_func, prepend=False",
    "register_forward_backward_fusion": "op_fusion_func, prepend=False",
}
METHODS = {
    "BasicOperation": {
        "num_quantizers": "mode",
        "set_extra_input_channel": "index, channel",
        "set_extra_output_channel": "index, channel, *, output_to_caller=True",
    },
    "GroupedLinear": {
        "need_backward_dw": "",
        "backward_dw": "",
        "register_wgrad_accumulation_and_reduce_hooks": "hook",
        "reset_parameters": "",
    },
    "Sequential": {"append": "module", "extend": "modules", "insert": "idx, module", "pop": "idx"},
}
"""Of public methods the arguments that callers pass; names of positional ones may differ."""

CPU: dict[str, Any] = {"device": "cpu", "dtype": torch.float32}
Make = Callable[[Any], Any]
STATE_KEYS: dict[str, tuple[Make, list[str]]] = {
    "GroupedLinear": (
        lambda k: k.GroupedLinear(2, 4, 8, **CPU),
        ["weight0", "weight1", "bias0", "bias1", "_extra_state"],
    ),
    "GroupedLinear without bias": (
        lambda k: k.GroupedLinear(2, 4, 8, bias=False, **CPU),
        ["weight0", "weight1", "_extra_state"],
    ),
    "BasicLinear": (lambda k: k.BasicLinear(4, 8, **CPU), ["weight", "_extra_state"]),
    "Bias": (lambda k: k.Bias(4, **CPU), ["bias", "_extra_state"]),
    "Linear": (
        lambda k: k.Linear(4, 8, **CPU),
        [f"basic_ops.{i}.{key}" for i, name in enumerate(("weight", "bias")) for key in (name, "_extra_state")],
    ),
    "SwiGLU": (lambda k: k.SwiGLU(), ["_extra_state"]),
    "ScaledClampedQGeGLU": (lambda k: k.ScaledClampedQGeGLU(), ["_extra_state", "_clamped._extra_state"]),
    "Sequential": (
        lambda k: k.Sequential(k.Quantize(), k.Linear(4, 8, bias=False, **CPU)),
        ["0._extra_state", "1.basic_ops.0.weight", "1.basic_ops.0._extra_state"],
    ),
}

_SPLITS = torch.tensor([1, 2, 3])
ERRORS: dict[str, tuple[Make, type[Exception], str | None]] = {
    "no groups": (lambda k: k.GroupedLinear(0, 4, 8, **CPU), ValueError, None),
    "no columns": (lambda k: k.GroupedLinear(2, 4, -8, **CPU), ValueError, None),
    "an integer weight": (lambda k: k.GroupedLinear(2, 4, 8, device="cpu", dtype=torch.int32), ValueError, None),
    "a parallel mode that is none": (
        lambda k: k.BasicLinear(4, 8, tensor_parallel_mode="diagonal", **CPU),
        ValueError,
        None,
    ),
    "splits of other groups": (
        lambda k: k.Sequential(k.GroupedLinear(2, 4, 8, **CPU))(torch.ones(6, 4), _SPLITS),
        ValueError,
        "Expected 2 splits, but got",
    ),
    "missing extra inputs": (
        lambda k: k.Sequential(k.ScaledSwiGLU())(torch.ones(6, 4)),
        ValueError,
        "Expected 1 extra inputs but got 0",
    ),
    "a gated op that recomputes": (
        lambda k: k.ScaledSwiGLU(activation_recompute_in_mlp=True),
        ValueError,
        "does not support activation recomputation",
    ),
    "beta1": (lambda k: k.SiTUGLU(beta1=0.0), ValueError, "beta1"),
    "beta2": (lambda k: k.ScaledSiTUGLU(beta2=float("inf")), ValueError, "beta2"),
    "tanh_clamp_scale": (lambda k: k.ScaledTanhSReLU(tanh_clamp_scale=0.0), ValueError, "tanh_clamp_scale"),
    "a fused op of nothing": (lambda k: k.FusedOperation([]), ValueError, None),
    "keyword arguments for a stranger": (
        lambda k: k.Sequential(k.Identity())(torch.ones(2), op_kwargs={k.Identity(): {}}),
        ValueError,
        None,
    ),
    "keyword arguments for a Linear": (
        lambda k: k.Sequential(k.Linear(4, 8, **CPU))(torch.ones(2, 4), op_kwargs={0: {}}),
        ValueError,
        None,
    ),
    "an index past the end": (lambda k: k.Sequential(k.Identity())[1], IndexError, None),
    "a channel slot past the end": (
        lambda k: k.MakeExtraOutput().set_extra_output_channel(1, "x"),
        IndexError,
        "out of range",
    ),
    "a channel without a name": (
        lambda k: k.AddExtraInput().set_extra_input_channel(0, ""),
        ValueError,
        "non-empty string",
    ),
    "output_to_caller": (
        lambda k: k.MakeExtraOutput().set_extra_output_channel(0, "x", output_to_caller=1),
        TypeError,
        "output_to_caller must be a bool",
    ),
    "a channel bound too late": (
        lambda k: [(op := k.MakeExtraOutput())(torch.ones(2)), op.set_extra_output_channel(0, "x")],
        RuntimeError,
        "already captured its channel routing",
    ),
    "a consumer alone": (
        lambda k: k.fuser.OperationFuser([k.AddExtraInput().set_extra_input_channel(0, "x")]),
        ValueError,
        "has no producer",
    ),
    "a consumer before its producer": (
        lambda k: k.fuser.OperationFuser(
            [k.AddExtraInput().set_extra_input_channel(0, "x"), k.MakeExtraOutput().set_extra_output_channel(0, "x")]
        ),
        ValueError,
        "has no earlier producer",
    ),
    "two producers": (
        lambda k: k.fuser.OperationFuser([k.MakeExtraOutput().set_extra_output_channel(0, "x") for _ in range(2)]),
        ValueError,
        "multiple producers",
    ),
}
"""What raises: the type, and the part of the text that callers match, if any."""
