"""Products of row groups on SM90, with bias, activation or its gradient in the epilogue. Formulas: `reference`.

Shapes: x, dy [T, ·] bf16 or fp16, widths multiples of 8; offsets int32 [G+1] on the device, never read here. Rows that
16-byte loads cannot address (a transposed view, an expanded gradient) are copied first; weights never are.
Weights: one contiguous [G, N, K], or G contiguous [N, K] at multiples of 16 bytes within 32 GiB of each other.
Errors: ValueError, before anything is launched, that names the argument and the limit.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cute_kernels import launch
from cute_kernels.activation import Activation
from cute_kernels.catalog import (
    SEPARATE_SPAN_BYTES,
    SM90_GROUPED_GEMM,
    SM90_GROUPED_GEMM_ACT,
    SM90_GROUPED_GEMM_DACT,
    SM90_GROUPED_GEMM_DGRAD,
    Kernel,
)
from cute_kernels.hopper.configs import Options, choose, grid_size
from cute_kernels.hopper.device_table import addresses, device_table
from cute_kernels.hopper.operands import VECTOR_BYTES, check_offsets, check_shape, multiprocessors, readable
from cute_kernels.limits import dtype_name

MODULE = "cute_kernels.hopper.grouped_gemm_kernel"
ARCH = SM90_GROUPED_GEMM.arch
FACTOR_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def grouped_gemm(
    x: Tensor,
    weights: Sequence[Tensor],
    offsets: Tensor,
    bias: Tensor | None = None,
    bias_scale: Tensor | None = None,
    sm_margin: int = 0,
) -> Tensor:
    """`reference.grouped_gemm`: y [T, N]. sm_margin: SMs to leave free."""
    kernel = SM90_GROUPED_GEMM
    rows, (n, k) = x.shape[0], _sizes(kernel, weights)
    groups = _check_product(kernel, "x", x, k, weights, offsets)
    bias = _check_bias(kernel, bias, groups, n, x)
    scale = _check_factor(kernel, "bias_scale", bias_scale if bias is not None else None, x)
    options = _options(
        kernel, "store", x.dtype, n, K=k, N=n,
        separate=_separate(weights), has_bias=bias is not None, factor=_name(scale),
    )  # fmt: skip
    y = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    _run(kernel, options, x, weights, offsets, (y, bias, scale), n, sm_margin)
    return y


def grouped_gemm_dgrad(
    dy: Tensor, weights: Sequence[Tensor], offsets: Tensor, glu_interleave: int = 0, sm_margin: int = 0
) -> Tensor:
    """`reference.grouped_gemm_dgrad`: dx [T, K]. sm_margin: SMs to leave free."""
    kernel = SM90_GROUPED_GEMM_DGRAD
    rows, (n, k) = dy.shape[0], _sizes(kernel, weights)
    _check_product(kernel, "dy", dy, n, weights, offsets)
    _check_interleave(kernel, glu_interleave, n)
    options = _options(
        kernel, "store", dy.dtype, k, K=k, N=n,
        contracts_rows=True, separate=_separate(weights), glu_interleave=glu_interleave,
    )  # fmt: skip
    dx = torch.empty(rows, k, dtype=dy.dtype, device=dy.device)
    _run(kernel, options, dy, weights, offsets, (dx, None, None), k, sm_margin)
    return dx


def grouped_gemm_act(
    x: Tensor,
    weights: Sequence[Tensor],
    offsets: Tensor,
    activation: Activation,
    bias: Tensor | None = None,
    probs: Tensor | None = None,
    glu_interleave: int = 0,
    save_preact: bool = True,
    zero_tail: bool = True,
    sm_margin: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """`reference.grouped_gemm_act`: (act [T, I], preact [T, N] or None). sm_margin: SMs to leave free.

    zero_tail=False leaves the tail rows of both undefined.
    """
    kernel = SM90_GROUPED_GEMM_ACT
    rows, (n, k) = x.shape[0], _sizes(kernel, weights)
    groups = _check_product(kernel, "x", x, k, weights, offsets)
    bias = _check_bias(kernel, bias, groups, n, x)
    probs = _check_factor(kernel, "probs", probs, x)
    if n % activation.halves:
        raise ValueError(f"{kernel.name}: N is {n}, needs gate and up halves of the same size for {activation.kind}")
    width = n // activation.halves
    options = _options(
        kernel, "act", x.dtype, n, K=k, N=n, I=width, activation=activation, glu_interleave=glu_interleave,
        separate=_separate(weights), has_bias=bias is not None, factor=_name(probs),
        keeps=save_preact, zero_tail=zero_tail,
    )  # fmt: skip
    act = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    preact = torch.empty(rows, n, dtype=x.dtype, device=x.device) if save_preact else None
    _run(kernel, options, x, weights, offsets, (act, preact, bias, probs), n, sm_margin)
    return act, preact


def grouped_gemm_dact(
    dy: Tensor,
    weights: Sequence[Tensor],
    offsets: Tensor,
    preact: Tensor,
    activation: Activation,
    probs: Tensor | None = None,
    need_act: bool = True,
    need_dprobs: bool = False,
    zero_tail: bool = True,
    sm_margin: int = 0,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """`reference.grouped_gemm_dact`: (dpreact, act or None, dprobs FP32 [T] or None). sm_margin: SMs to leave free.

    zero_tail=False leaves the tail rows of dpreact and act undefined; those of dprobs are always zero.
    """
    kernel = SM90_GROUPED_GEMM_DACT
    rows, (h, width) = dy.shape[0], _sizes(kernel, weights)
    _check_product(kernel, "dy", dy, h, weights, offsets)
    check_shape(kernel.name, "preact", preact, (rows, activation.halves * width), dy, (dy.dtype,))
    probs = _check_factor(kernel, "probs", probs, dy)
    options = _options(
        kernel, "dact", dy.dtype, width, H=h, I=width, activation=activation, contracts_rows=True,
        separate=_separate(weights), factor=_name(probs), keeps=need_act, has_dprobs=need_dprobs, zero_tail=zero_tail,
    )  # fmt: skip
    dpreact = torch.empty(preact.shape, dtype=dy.dtype, device=dy.device)
    act = torch.empty(rows, width, dtype=dy.dtype, device=dy.device) if need_act else None
    tiles = options.config.column_tiles(width)
    partial = torch.empty(rows, tiles, dtype=torch.float32, device=dy.device) if need_dprobs else None
    outputs = (dpreact, act, partial, readable(preact), probs)
    _run(kernel, options, dy, weights, offsets, outputs, width, sm_margin)
    return dpreact, act, None if partial is None else partial.sum(1)


def _run(
    kernel: Kernel,
    options: Options,
    x: Tensor,
    weights: Sequence[Tensor],
    offsets: Tensor,
    epilogue: tuple[Tensor | None, ...],
    columns: int,
    sm_margin: int,
) -> None:
    """Launch on the current stream of x's device; nothing where there are no rows."""
    sms = multiprocessors(kernel, x.device)
    grid = grid_size(x.shape[0], offsets.shape[0] - 1, options.config.column_tiles(columns), sms, sm_margin)
    if x.shape[0] == 0:
        return
    stream = launch.current_stream(x.device)
    base, table = weights[0], None
    if options.separate:
        base, table = _table(kernel.name, weights, x.device, stream)
    launch.kernel(MODULE, options, ARCH)(readable(x), base, table, offsets, epilogue, grid, stream)


def _table(name: str, weights: Sequence[Tensor], device: torch.device, stream: int) -> tuple[Tensor, Tensor]:
    """(the tensor at the lowest address, int64 [G] distances from it in units of 16 bytes, on the device)."""
    lowest, distances = _distances(name, addresses(weights))
    return weights[lowest], device_table(distances, device, stream, ARCH)


@functools.lru_cache(maxsize=512)
def _distances(name: str, places: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """(which address is lowest, distances from it in units of 16 bytes)."""
    lowest = min(places)
    span = max(places) - lowest
    if span > SEPARATE_SPAN_BYTES:
        raise ValueError(
            f"{name}: separate weights lie {span} bytes apart, needs at most {SEPARATE_SPAN_BYTES} (32 GiB); "
            "allocate them together or stack them"
        )
    return places.index(lowest), tuple((place - lowest) // VECTOR_BYTES for place in places)


@functools.lru_cache(maxsize=4096)
def _options(
    kernel: Kernel,
    kind: str,
    dtype: torch.dtype,
    columns: int,
    *,
    activation: Activation | None = None,
    glu_interleave: int = 0,
    K: int = 0,
    N: int = 0,
    I: int = 0,  # noqa: E741
    H: int = 0,
    **facts: Any,
) -> Options:
    """Checks what does not depend on the call's memory, once for each shape, and gathers it."""
    interleave = glu_interleave if activation is None or activation.is_glu else 0
    kind_of_f = activation and activation.kind
    kernel.require(dtype=dtype_name(dtype), K=K, N=N, I=I, H=H, glu_interleave=interleave, activation=kind_of_f)
    config = choose(kind, columns, activation is not None and activation.is_glu, interleave).config
    return Options(kind, dtype_name(dtype), config, activation=activation, glu_interleave=interleave, **facts)


def _separate(weights: Sequence[Tensor]) -> bool:
    return len(weights) != 1 or weights[0].dim() != 3


def _name(factor: Tensor | None) -> str:
    return "" if factor is None else dtype_name(factor.dtype)


def _sizes(kernel: Kernel, weights: Sequence[Tensor]) -> tuple[int, int]:
    """(rows, columns) of one group's weight."""
    if not weights or weights[0].dim() != 2 + (not _separate(weights)):
        shapes = [list(w.shape) for w in weights[:1]]
        raise ValueError(f"{kernel.name}: weights starts with {shapes}, needs one [G, N, K] or G tensors [N, K]")
    rows, columns = weights[0].shape[-2:]
    return rows, columns


def _check_product(
    kernel: Kernel, letter: str, x: Tensor, contracted: int, weights: Sequence[Tensor], offsets: Tensor
) -> int:
    """The number of groups, if operands fit each other and memory is as the kernel reads it."""
    groups = check_offsets(kernel.name, offsets, x)
    if x.dim() != 2:
        raise ValueError(f"{kernel.name}: {letter} has {x.dim()} dimensions, needs 2: [T, {contracted}]")
    check_shape(kernel.name, letter, x, (x.shape[0], contracted), weights[0], (weights[0].dtype,))
    separate = _separate(weights)
    if separate and len(weights) != groups:
        raise ValueError(f"{kernel.name}: weights has {len(weights)} tensors, needs one [G, N, K] or {groups} [N, K]")
    shape = tuple(weights[0].shape) if separate else (groups, *weights[0].shape[1:])
    fit = torch.Size(shape), x.dtype, x.device
    for w in weights:
        if (w.shape, w.dtype, w.device) != fit:
            check_shape(kernel.name, "weights", w, shape, x, (x.dtype,))
        if not w.is_contiguous() or w.data_ptr() % VECTOR_BYTES:
            wanted = f"contiguous and starting at a multiple of {VECTOR_BYTES} bytes"
            raise ValueError(f"{kernel.name}: weights need to be {wanted}")
    return groups


def _check_bias(kernel: Kernel, bias: Tensor | None, groups: int, columns: int, x: Tensor) -> Tensor | None:
    if bias is None:
        return None
    check_shape(kernel.name, "bias", bias, (groups, columns), x, (x.dtype,))
    whole = bias.is_contiguous() and bias.data_ptr() % VECTOR_BYTES == 0
    return bias if whole else bias.clone(memory_format=torch.contiguous_format)


def _check_factor(kernel: Kernel, letter: str, factor: Tensor | None, x: Tensor) -> Tensor | None:
    if factor is None:
        return None
    check_shape(kernel.name, letter, factor, (x.shape[0],), x, FACTOR_DTYPES)
    return factor.contiguous()


def _check_interleave(kernel: Kernel, block: int, rows: int) -> None:
    """A gradient's weight rows are in blocks that tile both halves, and blocks and contraction tiles of 64 nest."""
    if block < 0 or (block and (rows % (2 * block) or (64 % block and block % 64))):
        raise ValueError(
            f"{kernel.name}: glu_interleave is {block}, needs 0 or a divisor of I = N / 2 = {rows // 2} "
            "that divides 64 or is a multiple of it"
        )
