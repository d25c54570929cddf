"""Composable ops for (MoE) MLPs; chains that the rules recognise run as fused kernels, the rest as PyTorch.

    mlp = Sequential(GroupedLinear(8, 1024, 4096), ScaledSwiGLU(), GroupedLinear(8, 2048, 1024))
    y = mlp(x, split_sizes, probs, split_sizes)
    print(mlp.explain())

Importing it needs torch alone.
"""

from fusible_ops.activations import (
    GEGLU,
    GELU,
    ClampedSwiGLU,
    GeGLU,
    ReLU,
    ScaledClampedQGeGLU,
    ScaledGeGLU,
    ScaledSReLU,
    ScaledSwiGLU,
    SiLU,
    SReLU,
    SwiGLU,
)
from fusible_ops.autocast_mode import (
    autocast,
    get_default_recipe,
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
    is_nvfp4_available,
    quantized_model_init,
)
from fusible_ops.basic import ConstantScale, Identity, Quantize
from fusible_ops.grouped_linear import GroupedLinear
from fusible_ops.linear import BasicLinear, Bias, Linear
from fusible_ops.op import BasicOperation, FusedOperation, FusibleOperation, OperationContext
from fusible_ops.quantized_tensor import QuantizedTensor
from fusible_ops.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)
from fusible_ops.sequential import Sequential

__version__ = "0.1.0"

__all__ = [
    "GEGLU",
    "GELU",
    "BasicLinear",
    "BasicOperation",
    "Bias",
    "ClampedSwiGLU",
    "ConstantScale",
    "DelayedScaling",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Format",
    "FusedOperation",
    "FusibleOperation",
    "GeGLU",
    "GroupedLinear",
    "Identity",
    "Linear",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
    "OperationContext",
    "Quantize",
    "QuantizedTensor",
    "ReLU",
    "Recipe",
    "SReLU",
    "ScaledClampedQGeGLU",
    "ScaledGeGLU",
    "ScaledSReLU",
    "ScaledSwiGLU",
    "Sequential",
    "SiLU",
    "SwiGLU",
    "autocast",
    "get_default_recipe",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
    "quantized_model_init",
]
