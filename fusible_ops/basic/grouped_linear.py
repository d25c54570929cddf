"""GroupedLinear, and whether it leaves the split sizes on the device."""

from __future__ import annotations

import torch

from cute_kernels.limits import dtype_name
from cute_kernels.target import Target
from fusible_ops import checks
from fusible_ops.full_call import GRAD_INPUT_BUFFER_KEY, OUTPUT_BUFFER_KEY
from fusible_ops.grouped_linear import GroupedLinear
from fusible_ops.recipe import Recipe
from patterns import Chain, OpSpec, plan

__all__ = ["GRAD_INPUT_BUFFER_KEY", "OUTPUT_BUFFER_KEY", "GroupedLinear", "is_op_fuser_grouped_tensor_path_supported"]


def is_op_fuser_grouped_tensor_path_supported(recipe: Recipe | None, dtype: torch.dtype) -> bool:
    """Whether a GroupedLinear that computes in `dtype` under `recipe` never reads its split sizes on the host.

    Asked of ordinary sizes (multiples of 128) and of the device that ops are made on by default; always so without a
    GPU.
    """
    facts = {"num_groups": 8, "in_features": 128, "out_features": 128, "dtype": dtype_name(dtype)}
    named = dict.fromkeys(("has_bias", "scale_bias", "transposed_weight"), False)
    chain = Chain(
        (OpSpec("grouped_linear", "0", facts | named),),
        dtype_name(dtype),
        None if recipe is None else recipe.describe(),
    )
    return not plan(chain, Target.of(checks.default_device(None))).host_reads()
