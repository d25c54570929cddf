"""cuDNN Frontend's grouped product with a GLU's gradient (`GroupedGemmDgluSm100`): BF16, MXFP8 and NVFP4."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_kernels.activation import Activation
from cute_kernels.blackwell.frontend import ones, run
from cute_kernels.blackwell.operands import (
    TILE_COLUMNS,
    Operand,
    Quantised,
    act_func,
    check_scaled,
    constants,
    empty_quantised,
    glu_letters,
    scale_settings,
    weight_and_major,
)


class Dglu(NamedTuple):
    """dpreact: [M, 2I], of MXFP8 in FP8, else BF16, interleaved. dprobs: FP32 [M] or None. dbias: BF16 [E, 2I] or None.
    amax: FP32 [E] of a BF16 dpreact, where scales are.
    """

    dpreact: Tensor | Quantised
    dprobs: Tensor | None
    dbias: Tensor | None
    amax: Tensor | None


def dglu(
    dy: Operand,
    weight: Operand,
    ends: Tensor,
    preact: Tensor,
    activation: Activation,
    probs: Tensor | None = None,
    need_dprobs: bool = False,
    need_dbias: bool = False,
    deterministic: bool = True,
    alpha: Tensor | None = None,
    norm_const: Tensor | None = None,
    dpreact_dtype: torch.dtype = torch.bfloat16,
    sm_margin: int = 0,
) -> Dglu:
    """dA = α_g·dy W_gᵀ, dpreact = (dA·p)·∂f, dprobs = Σ_columns dA·f, dbias = Σ_rows dpreact.

    dy [M, K], weight [E, I, K]: contiguous or the transposed view of [E, K, I], which is how the forward weight of the
    layer after the activation lies. preact [M, 2I] BF16, interleaved. Others as in `glu.glu`.
    deterministic: NotImplementedError for what they sum with atomics: dbias always; dprobs of BF16. Of the other
    formats dprobs has one value for each tile of 256 columns, summed afterwards.
    """
    check_scaled(dy=dy, weight=weight)
    rows, (experts, n), k = dy.data.shape[0], weight.data.shape[:2], dy.columns
    device, quantised = dy.data.device, dpreact_dtype.itemsize == 1
    if deterministic and (need_dbias or (need_dprobs and dy.scale is None)):
        what = "dbias" if need_dbias else "dprobs of BF16"
        raise NotImplementedError(
            f"cuDNN Frontend sums {what} with atomics; compute it outside, or deterministic=False"
        )
    data, major = weight_and_major(weight.rows_as_they_lie())
    by_tile = deterministic and need_dprobs
    slots = -(-n // TILE_COLUMNS) if by_tile else 1
    sums_shape = (rows, slots, 1) if by_tile else (rows,)
    sums = torch.zeros(sums_shape, dtype=torch.float32, device=device)
    operands: dict[str, Any] = {
        "a": dy.rows_as_they_lie(), "b": data, "c": preact, "sfa": dy.scale, "sfb": weight.scale,
        "padded_offsets": ends, "beta": ones(experts, device), "alpha": ones(experts, device),
        "prob": ones(rows, device) if probs is None else probs, "dprob": sums,
        "d_col": None, "sfd_row": None, "sfd_col": None, "norm_const": None, "amax": None, "dbias": None,
    }  # fmt: skip
    if alpha is not None:
        operands["alpha"] = alpha.sqrt()  # they multiply by its square
    if need_dbias:
        operands["dbias"] = torch.zeros(experts, 2 * n, 1, dtype=torch.bfloat16, device=device)
    if quantised:
        dpreact: Tensor | Quantised = empty_quantised(rows, 2 * n, dpreact_dtype, dy)
        (operands["d_row"], operands["sfd_row"]), (operands["d_col"], operands["sfd_col"]) = dpreact
        operands["norm_const"] = ones(1, device) if norm_const is None else norm_const
    else:
        dpreact = operands["d_row"] = torch.empty(rows, 2 * n, dtype=dpreact_dtype, device=device)
        if dy.scale is not None:
            operands["d_col"] = torch.empty_like(dpreact)
            operands["amax"] = torch.full((experts, 2, 1), float("-inf"), dtype=torch.float32, device=device)
    if rows:
        settings = {"act_func": f"d{act_func(activation)}", "b_major": major, **constants(activation)}
        settings |= {"_deterministic": by_tile, "discrete_col_sfd": quantised, **scale_settings(dy)}
        kernel, limits = dy.row("dglu")
        limits |= glu_letters(activation, major) | {"I": n, "H": k, "G": experts}
        run(kernel, limits, "GroupedGemmDgluSm100", (experts, n, k, slots), operands, settings, sm_margin)
    amax, dbias = operands["amax"], operands["dbias"]
    return Dglu(
        dpreact,
        (sums.sum((1, 2)) if by_tile else sums) if need_dprobs else None,
        None if dbias is None else dbias.squeeze(2),
        None if amax is None else amax.amax((1, 2)).clamp_(min=0),
    )
