"""Composable ops for (MoE) MLPs; chains that the rules recognise run as fused kernels, the rest as PyTorch.

    mlp = Sequential(GroupedLinear(8, 1024, 4096), ScaledSwiGLU(), GroupedLinear(8, 2048, 1024))
    y = mlp(x, split_sizes, probs, split_sizes)
    print(mlp.explain())

Importing it needs torch alone.
"""

from cute_kernels.launch import CompileForbiddenError, use_kernels
from fusible_ops import basic, functional, fused
from fusible_ops.activations import (
    GEGLU,
    GELU,
    GLU,
    QGEGLU,
    QGELU,
    ClampedSwiGLU,
    GeGLU,
    QGeGLU,
    ReGLU,
    ReLU,
    SiLU,
    SiTUGLU,
    SReGLU,
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
from fusible_ops.basic.grouped_linear import is_op_fuser_grouped_tensor_path_supported
from fusible_ops.extra_tensors import AddExtraInput, MakeExtraOutput
from fusible_ops.fusions import (
    register_backward_fusion,
    register_forward_backward_fusion,
    register_forward_fusion,
)
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
from fusible_ops.scaled_activations import (
    ScaledClampedQGeGLU,
    ScaledGeGLU,
    ScaledSiTUGLU,
    ScaledSReLU,
    ScaledSwiGLU,
    ScaledTanhSReLU,
)
from fusible_ops.sequential import Sequential
from fusible_ops.small_ops import ConstantScale, Dropout, Identity, Quantize, Reshape

__version__ = "0.1.0"

__all__ = [
    "GEGLU",
    "GELU",
    "GLU",
    "QGEGLU",
    "QGELU",
    "AddExtraInput",
    "BasicLinear",
    "BasicOperation",
    "Bias",
    "ClampedSwiGLU",
    "CompileForbiddenError",
    "ConstantScale",
    "DelayedScaling",
    "Dropout",
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
    "MakeExtraOutput",
    "NVFP4BlockScaling",
    "OperationContext",
    "QGeGLU",
    "Quantize",
    "QuantizedTensor",
    "ReGLU",
    "ReLU",
    "Recipe",
    "Reshape",
    "SReGLU",
    "SReLU",
    "ScaledClampedQGeGLU",
    "ScaledGeGLU",
    "ScaledSReLU",
    "ScaledSiTUGLU",
    "ScaledSwiGLU",
    "ScaledTanhSReLU",
    "Sequential",
    "SiLU",
    "SiTUGLU",
    "SwiGLU",
    "autocast",
    "basic",
    "functional",
    "fused",
    "get_default_recipe",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
    "is_op_fuser_grouped_tensor_path_supported",
    "quantized_model_init",
    "register_backward_fusion",
    "register_forward_backward_fusion",
    "register_forward_fusion",
    "use_kernels",
]
