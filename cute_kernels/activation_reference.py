"""What every activation computes, forward and backward, in plain PyTorch. See `reference` for the numerics."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from cute_kernels.activation import QUICK, Activation
from cute_kernels.facts import WITHOUT_MEMORY


def rows_of(t: Tensor) -> int:
    """The rows of t [..., C]. A symbol stays one, where a compiler knows no number; `Size.numel` makes it one."""
    return math.prod(t.shape[:-1])


AT_ONCE = 1 << 22
"""Elements of a pre-activation that are held in FP32 at a time: what the unfused path needs beside its results."""


def widened(t: Tensor) -> Tensor:
    """FP32, or FP64 for FP64."""
    return t.to(torch.promote_types(t.dtype, torch.float32))


_GELU_C = 0.7978845608028654  # sqrt(2/pi)


def _gelu(x: Tensor) -> tuple[Tensor, Tensor]:
    """(gelu_tanh(x), its derivative)."""
    t = torch.tanh(_GELU_C * x * (1 + 0.044715 * x * x))
    derivative = 0.5 * x * (1 - t * t) * _GELU_C * (1 + 3 * 0.044715 * x * x) + 0.5 * (1 + t)
    return F.gelu(x, approximate="tanh"), derivative


def _silu(x: Tensor, alpha: float = 1.0) -> tuple[Tensor, Tensor]:
    """(x·σ(αx), its derivative)."""
    s = torch.sigmoid(alpha * x)
    return x * s, s + alpha * x * s * (1 - s)


def _relu(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.relu(), (x > 0).to(x.dtype)


def _srelu(x: Tensor) -> tuple[Tensor, Tensor]:
    r = x.relu()
    return r * r, 2 * r


def _quick_gelu(x: Tensor) -> tuple[Tensor, Tensor]:
    return _silu(x, QUICK)


def _sigmoid(x: Tensor) -> tuple[Tensor, Tensor]:
    s = torch.sigmoid(x)
    return s, s * (1 - s)


def _bounded(x: Tensor, bound: float) -> tuple[Tensor, Tensor]:
    """(bound·tanh(x/bound), its derivative)."""
    t = torch.tanh(x / bound)
    return bound * t, 1 - t * t


def _tanh_srelu(x: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    value, slope = _bounded(x.relu(), scale)
    return value * value, 2 * value * slope


_CURVES = {
    "swiglu": _silu,
    "glu": _sigmoid,
    "geglu": _gelu,
    "qgeglu": _quick_gelu,
    "reglu": _relu,
    "sreglu": _srelu,
    "silu": _silu,
    "gelu": _gelu,
    "qgelu": _quick_gelu,
    "relu": _relu,
    "srelu": _srelu,
}


def _activation(preact: Tensor, activation: Activation) -> tuple[Tensor, Tensor, Tensor | None]:
    """(f, ∂f/∂gate or ∂f/∂x, ∂f/∂linear or None), all FP32 [T, I]; preact is `[gate | linear]`."""
    z = widened(preact)
    if activation.kind == "tanh_srelu":
        return (*_tanh_srelu(z, activation.clamp_scale), None)  # type: ignore[arg-type]
    if not activation.is_glu:
        value, slope = _CURVES[activation.kind](z)
        return value, slope, None
    gate, linear = z.chunk(2, -1)
    if activation.kind == "situglu":
        (bounded, bounded_slope), (s, s_slope) = _bounded(gate, activation.beta1), _sigmoid(gate)  # type: ignore[arg-type]
        up, up_slope = _bounded(linear, activation.beta2)  # type: ignore[arg-type]
        value = bounded * s
        return value * up, (bounded_slope * s + bounded * s_slope) * up, value * up_slope
    if activation.kind != "clamped_swiglu":
        value, slope = _CURVES[activation.kind](gate)
        return value * linear, slope * linear, value
    limit = float("inf") if activation.limit is None else activation.limit
    value, slope = _silu(gate.clamp(max=limit), activation.alpha)
    shifted = linear.clamp(-limit, limit) + activation.offset
    inside = (linear >= -limit) & (linear <= limit)
    return value * shifted, slope * shifted * (gate <= limit), value * inside


def _row_factor(probs: Tensor | None, preact: Tensor) -> Tensor | float:
    """probs as a FP32 column, rounded to the compute dtype first; 1 if absent."""
    return 1.0 if probs is None else widened(probs.to(preact.dtype)).unsqueeze(-1)


def _parts(preact: Tensor) -> list[slice]:
    """Slices of the rows, of at most AT_ONCE elements if a row has no more."""
    rows, step = rows_of(preact), max(1, AT_ONCE // max(1, preact.shape[-1]))
    if isinstance(preact, WITHOUT_MEMORY):  # a compiler chooses what to hold by itself, and its rows stay a symbol
        return [slice(0, rows)]
    return [slice(first, first + step) for first in range(0, rows, step)]


def _part(t: Tensor | None, rows: slice) -> Tensor | None:
    return None if t is None else t[rows]


def activation_forward(
    preact: Tensor, activation: Activation, probs: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """round(f(preact)·p); [..., I] in preact's dtype. preact: [..., 2I] as `[gate | linear]`, or [..., I].

    dtype: of the result instead; FP32 leaves it unrounded.
    """
    dtype = dtype or preact.dtype
    parts = _parts(preact)
    if len(parts) < 2:
        return (_activation(preact, activation)[0] * _row_factor(probs, preact)).to(dtype)
    act = preact.new_empty(*preact.shape[:-1], preact.shape[-1] // activation.halves, dtype=dtype)
    flat, rows, factors = preact.flatten(0, -2), act.view(-1, act.shape[-1]), None if probs is None else probs.flatten()
    for part in parts:
        rows[part] = activation_forward(flat[part], activation, _part(factors, part), dtype)
    return act


def activation_backward(
    dact: Tensor,
    preact: Tensor,
    activation: Activation,
    probs: Tensor | None = None,
    need_dprobs: bool = False,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None]:
    """(dpreact in preact's dtype, dprobs FP32 or None): (dact·p)·∂f, and Σ_columns dact·f of the unscaled f.

    dtype: of dpreact instead; FP32 leaves it unrounded.
    """
    dtype = dtype or preact.dtype
    parts = _parts(preact)
    if len(parts) > 1:
        dpreact = preact.new_empty(preact.shape, dtype=dtype)
        dprobs = widened(preact.new_empty(0)).new_empty(preact.shape[:-1]) if need_dprobs else None
        columns = preact.shape[-1]
        flat, grads, factors = preact.flatten(0, -2), dact.flatten(0, -2), None if probs is None else probs.flatten()
        for part in parts:
            factor = _part(factors, part)
            some, sums = activation_backward(grads[part], flat[part], activation, factor, need_dprobs, dtype)
            dpreact.view(-1, columns)[part] = some
            if dprobs is not None and sums is not None:
                dprobs.view(-1)[part] = sums
        return dpreact, dprobs
    value, slope, linear_slope = _activation(preact, activation)
    grad = widened(dact)
    scaled = grad * _row_factor(probs, preact)
    slopes = [slope] if linear_slope is None else [slope, linear_slope]
    dprobs = (grad * value).sum(-1) if need_dprobs else None
    return torch.cat([scaled * s for s in slopes], -1).to(dtype), dprobs
