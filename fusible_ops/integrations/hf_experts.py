"""What an experts module of Hugging Face transformers computes, in the words of our ops.

Its decorator `use_experts_implementation` states the layout of the weights. What stands between its two linears is
found by value: the module's own gate, on numbers, against the formulas that we know. So a name may mean anything, and a
gate that a release changes is not taken for the one that it was.

Nothing here imports transformers.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from cute_kernels import reference
from cute_kernels.activation import CONSTANTS, GLU_KINDS, UNARY_KINDS, Activation

LAYOUT = ("has_gate", "has_bias", "has_post_expert_norm", "is_transposed")
"""What the decorator states of a module."""
LIMITS, ALPHAS = ("limit", "swiglu_limit"), ("alpha", "swiglu_alpha")
"""The attributes in which models keep the constants of a clamped SwiGLU."""


@dataclass(frozen=True)
class Formula:
    """What an experts module computes.

    activation: `Activation.encode()`, empty if it is none of ours. interleave: 0 for `[gate | up]`, 1 for pairs.
    first: the name of the first linear's weight. has_bias, is_transposed: of the linears. has_norm: a norm follows the
    second. why: if activation is empty, the reason.
    """

    activation: str
    interleave: int
    first: str
    has_bias: bool
    is_transposed: bool
    has_norm: bool
    why: str = ""


def is_experts(module: nn.Module) -> bool:
    """Whether `use_experts_implementation` made it."""
    return all(hasattr(module, name) for name in (*LAYOUT, "num_experts", "config"))


_known: WeakKeyDictionary[nn.Module, tuple[Any, Formula]] = WeakKeyDictionary()


def formula_of(experts: Any) -> Formula:
    """What this experts module computes; found out again when its activation or a constant is another one."""
    asked = (
        getattr(experts, "act_fn", None),
        vars(experts).get("_apply_gate", getattr(type(experts), "_apply_gate", None)),
        *_numbers(experts, (*LIMITS, *ALPHAS)),
    )
    known = _known.get(experts)
    if known is None or known[0] != asked:
        with _disable_current_modes():  # numbers are compared, also where tensors are fake
            known = _known[experts] = asked, _formula(experts)
    return known[1]


@torch.compiler.assume_constant_result
def formula_at(address: int) -> Formula:
    """Of the experts module with this `id`, for Dynamo: that of torch 2.11 computes no constant of a module, but guards
    an id, so that the module lives.
    """
    return formula_of(ctypes.cast(address, ctypes.py_object).value)


def _formula(experts: Any) -> Formula:
    found = _activation(experts)
    activation, interleave = ("", 0) if found is None else found
    title = "its gate" if hasattr(type(experts), "_apply_gate") and experts.has_gate else "its activation"
    return Formula(
        activation,
        interleave,
        "gate_up_proj" if experts.has_gate else "up_proj",
        experts.has_bias,
        experts.is_transposed,
        experts.has_post_expert_norm,
        ""
        if activation
        else f"{title} ({type(getattr(experts, 'act_fn', experts)).__name__}) is none of our activations",
    )


def _activation(experts: Any) -> tuple[str, int] | None:
    """The activation of ours that gives what the module's own gives, encoded, and the interleave; None if none does."""
    values = _values()
    if experts.has_gate:
        # I = 2, so that halves and pairs differ: [gate, gate, up, up] and [gate, up, gate, up].
        gates = torch.cartesian_prod(values, values)
        plain = torch.cat([gates[:, :1], gates.roll(7, 0)[:, :1], gates[:, 1:], gates.roll(7, 0)[:, 1:]], dim=1)
    else:
        plain = values
    for interleave in (0, 1) if experts.has_gate else (0,):
        theirs = _theirs(experts, reference.interleave(plain, interleave, -1))
        if theirs is None:
            return None
        for kind in _candidates(experts):
            ours = reference.activation_forward(plain, kind, None)
            if theirs.shape == ours.shape and torch.allclose(theirs, ours, rtol=1e-5, atol=1e-6):
                return kind.encode(), interleave
    return None


def _values() -> Tensor:
    """Gate and up values to compare at, FP64: dense where curves bend, and far out, where only a clamp shows."""
    far = torch.logspace(-2, 5, 36, dtype=torch.float64, device="cpu")
    return torch.cat([-far, torch.linspace(-8, 8, 49, dtype=torch.float64, device="cpu"), far])


@torch.no_grad()
def _theirs(experts: Any, columns: Tensor) -> Tensor | None:
    """What the module makes of a first linear's result; None if it cannot be asked on numbers of a CPU."""
    act = getattr(experts, "act_fn", None)
    if isinstance(act, nn.Module) and any(True for _ in itertools.chain(act.parameters(), act.buffers())):
        return None
    with torch.autocast("cpu", enabled=False):
        try:
            return (experts._apply_gate if experts.has_gate else experts.act_fn)(columns).double()
        except Exception:  # code of anybody's, which may want anything
            return None


def _candidates(experts: Any) -> Iterator[Activation]:
    """The activations that it may be, with the constants that the module has."""
    for kind in GLU_KINDS if experts.has_gate else UNARY_KINDS:
        if kind not in CONSTANTS:
            yield Activation(kind)
    if experts.has_gate:
        limits, alphas = (_numbers(experts, names) for names in (LIMITS, ALPHAS))
        for limit, alpha, offset in itertools.product(limits, (*alphas, 1.0), (0.0, 1.0)):
            if limit > 0:
                yield Activation("clamped_swiglu", limit, alpha, offset)


def _numbers(experts: Any, names: tuple[str, ...]) -> list[float]:
    """Those of these attributes that are numbers."""
    values = [getattr(experts, name, None) for name in names]
    return [float(value) for value in values if isinstance(value, (int, float))]
