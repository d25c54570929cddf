"""The basic ops under the names that `transformer_engine.pytorch.ops.basic` (2.20) has for them."""

from fusible_ops.activations import (
    GEGLU,
    GELU,
    GLU,
    QGEGLU,
    QGELU,
    ClampedSwiGLU,
    ReGLU,
    ReLU,
    SiLU,
    SiTUGLU,
    SReGLU,
    SReLU,
    SwiGLU,
)
from fusible_ops.basic import grouped_linear
from fusible_ops.basic.grouped_linear import GroupedLinear, is_op_fuser_grouped_tensor_path_supported
from fusible_ops.extra_tensors import AddExtraInput, MakeExtraOutput
from fusible_ops.linear import BasicLinear, Bias
from fusible_ops.scaled_activations import (
    ScaledClampedQGeGLU,
    ScaledSiTUGLU,
    ScaledSReLU,
    ScaledSwiGLU,
    ScaledTanhSReLU,
)
from fusible_ops.small_ops import ConstantScale, Dropout, Identity, Quantize, Reshape

__all__ = [
    "GEGLU",
    "GELU",
    "GLU",
    "QGEGLU",
    "QGELU",
    "AddExtraInput",
    "BasicLinear",
    "Bias",
    "ClampedSwiGLU",
    "ConstantScale",
    "Dropout",
    "GroupedLinear",
    "Identity",
    "MakeExtraOutput",
    "Quantize",
    "ReGLU",
    "ReLU",
    "Reshape",
    "SReGLU",
    "SReLU",
    "ScaledClampedQGeGLU",
    "ScaledSReLU",
    "ScaledSiTUGLU",
    "ScaledSwiGLU",
    "ScaledTanhSReLU",
    "SiLU",
    "SiTUGLU",
    "SwiGLU",
    "grouped_linear",
    "is_op_fuser_grouped_tensor_path_supported",
]
