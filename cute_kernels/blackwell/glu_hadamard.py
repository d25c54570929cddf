"""cuDNN Frontend's grouped product with a GLU and the amax that NVFP4 needs next (`GroupedGemmGluHadamardSm100`)."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_kernels.activation import Activation
from cute_kernels.blackwell.frontend import ones, run
from cute_kernels.blackwell.operands import (
    Operand,
    act_func,
    check_scaled,
    glu_letters,
    scale_settings,
    weight_and_major,
)
from cute_kernels.catalog import SM100
from cute_kernels.quantization.hadamard import rotate


class GluHadamard(NamedTuple):
    """preact: [M, N] BF16, interleaved. act: [M, N/2] BF16. amax, rotated_amax: FP32 [E], the largest magnitudes of
    each group of act, and of its transpose once that is rotated (`quantization.hadamard.rotate`, along the rows M).
    """

    preact: Tensor
    act: Tensor
    amax: Tensor
    rotated_amax: Tensor


def glu_hadamard(
    x: Operand,
    weight: Operand,
    ends: Tensor,
    activation: Activation,
    probs: Tensor | None = None,
    bias: Tensor | None = None,
    alpha: Tensor | None = None,
    sm_margin: int = 0,
) -> GluHadamard:
    """`glu.glu` of NVFP4 operands into BF16, with both maxima, so that no further pass reads memory for them.

    Without being given the matrix of the rotation they rotate without its signs. They multiply by its 1/4 themselves.
    """
    check_scaled(x=x, weight=weight)
    rows, (experts, n), k = x.data.shape[0], weight.data.shape[:2], x.columns
    device = x.data.device
    preact, act = (torch.empty(rows, width, dtype=torch.bfloat16, device=device) for width in (n, n // 2))
    amax, rotated = (torch.zeros(experts, 1, dtype=torch.float32, device=device) for _ in range(2))
    data, major = weight_and_major(weight.rows_as_they_lie())
    operands: dict[str, Any] = {
        "a": x.rows_as_they_lie(), "b": data, "sfa": x.scale, "sfb": weight.scale, "padded_offsets": ends,
        "alpha": ones(experts, device) if alpha is None else alpha,
        "prob": ones(rows, device) if probs is None else probs, "bias": None if bias is None else bias.t(),
        "c": preact, "d": act, "amax": amax, "post_rht_amax": rotated, "hadamard": _rotation(device),
    }  # fmt: skip
    if rows:
        settings = {"act_func": act_func(activation), "use_tmem_post_rht_amax": True, **scale_settings(x)}
        kernel, limits = x.row("glu_hadamard")
        limits |= glu_letters(activation, major) | {"I": n // 2, "K": k, "G": experts}
        run(kernel, limits, "GroupedGemmGluHadamardSm100", (experts, n, k), operands, settings, sm_margin)
    return GluHadamard(preact, act, amax.squeeze(1), rotated.squeeze(1))


def fits(activation: Activation) -> bool:
    """Whether the kernel has this activation, with these constants."""
    return not any(limit.check(glu_letters(activation, "k")) for limit in _OF_THE_ACTIVATION)


_OF_THE_ACTIVATION = [limit for limit in SM100["nvfp4"]["glu_hadamard"].limits if "activation" in limit.letters()]


@functools.cache
def _rotation(device: torch.device) -> Tensor:
    """4 R, with R the matrix of `rotate(x) = x R`, transposed: ±1, BF16 [16, 16]."""
    return 4 * rotate(torch.eye(16, dtype=torch.bfloat16, device=device)).t().contiguous()
