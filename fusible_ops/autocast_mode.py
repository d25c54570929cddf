"""Which quantisation recipe is active: `autocast(recipe=...)` around forward, `quantized_model_init(recipe=...)` around
construction.

One state for the process, as Transformer Engine has it. Ops read it at forward and keep what their backward needs, so
backward may run anywhere. Source: the interface is that of transformer_engine.pytorch (2.20): `autocast`,
`quantized_model_init`, `is_fp8_available`, `get_default_recipe`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from fusible_ops.delayed_scaling import DelayedScales, update_all
from fusible_ops.recipe import AUTO, DelayedScaling, Recipe


@dataclass(frozen=True)
class _State:
    """What the innermost `autocast` asks for. depth: how many are open. used: scales that forwards have used since the
    outermost was entered; one list for all of them.
    """

    recipe: Recipe | str | None = None
    group: Any = None
    depth: int = 0
    used: list[DelayedScales] = field(default_factory=list)


@dataclass(frozen=True)
class ModelInit:
    """What `quantized_model_init` asks for."""

    recipe: Recipe
    preserve_high_precision_init_val: bool


_state = _State()
_model_init: ModelInit | None = None


def current_recipe() -> Recipe | str | None:
    """The active recipe, or "auto"; None where nothing is to be quantised."""
    return _state.recipe


def current_group() -> Any:
    """The ranks that share largest magnitudes, as the innermost `autocast` was told."""
    return _state.group


def current_model_init() -> ModelInit | None:
    """What parameters are to be made as; None for plain ones."""
    return _model_init


def use_in_forward(scales: DelayedScales) -> None:
    """Have these scales updated when the outermost `autocast` is left, if one is entered."""
    if _state.depth and not any(scales is known for known in _state.used):
        _state.used.append(scales)


def get_default_recipe() -> Recipe:
    """The recipe of an `autocast` that is given none."""
    return DelayedScaling()


def is_fp8_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Whether FP8 recipes run: everywhere. What no kernel takes runs as plain PyTorch, and `explain` says so.

    return_reason: give (answer, why not) instead.
    """
    return (True, "") if return_reason else True


def is_fp8_block_scaling_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Whether `Float8BlockScaling` runs. See `is_fp8_available`."""
    return is_fp8_available(return_reason)


def is_mxfp8_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Whether `MXFP8BlockScaling` runs. See `is_fp8_available`."""
    return is_fp8_available(return_reason)


def is_nvfp4_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Whether `NVFP4BlockScaling` runs. See `is_fp8_available`."""
    return is_fp8_available(return_reason)


class autocast:
    """While it is entered, linears and `Quantize` ops run under a quantisation recipe.

    enabled: False switches quantisation off inside another. recipe: None means `get_default_recipe()`; "auto" means
    `Float8BlockScaling` where ops are fused under it and `patterns.break_even` says that it pays for that many rows,
    none elsewhere: it looks at widths, row counts and the device, never at values.
    amax_reduction_group: ranks whose largest magnitudes delayed scaling shares (None: all, if there are several).
    calibrating: not supported, NotImplementedError.

    The innermost counts. An instance may be entered again after it was left, not while it is entered (RuntimeError).
    Leaving the outermost updates the scales of delayed scaling, if gradients are being recorded and nothing was raised.
    """

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: Recipe | str | None = None,
        amax_reduction_group: Any = None,
    ) -> None:
        _check_enabled("autocast", enabled)
        if calibrating:
            raise NotImplementedError("autocast: calibrating=True is not supported; run the recipe itself instead")
        self._recipe = named(recipe) if enabled else None
        self._group = amax_reduction_group
        self._outer: _State | None = None

    def __enter__(self) -> None:
        global _state
        if self._outer is not None:
            raise RuntimeError("this autocast is entered already; nest another instance instead")
        self._outer = _state
        used = _state.used if _state.depth else []
        _state = _State(self._recipe, self._group, _state.depth + 1, used)

    def __exit__(self, kind: Any, *_: Any) -> None:
        global _state
        assert self._outer is not None
        left, _state, self._outer = _state, self._outer, None
        if _state.depth == 0 and kind is None and torch.is_grad_enabled():
            update_all(left.used)


@contextlib.contextmanager
def quantized_model_init(
    enabled: bool = True, recipe: Recipe | None = None, preserve_high_precision_init_val: bool = False
) -> Iterator[None]:
    """Linears made inside hold their weights in the recipe's format alone, as `QuantizedTensor` parameters.

    With the column-wise copy if gradients are being recorded. recipe: None means `get_default_recipe()`.
    preserve_high_precision_init_val: keep the first values on the CPU; `weight.get_high_precision_init_val()` gives
    them, `weight.clear_high_precision_init_val()` drops them.
    """
    global _model_init
    _check_enabled("quantized_model_init", enabled)
    outer = _model_init
    _model_init = ModelInit(_checked(recipe), preserve_high_precision_init_val) if enabled else None
    try:
        yield
    finally:
        _model_init = outer


def _check_enabled(owner: str, enabled: object) -> None:
    """TypeError unless it is a bool: a recipe that is given by position would only switch on the default one."""
    if not isinstance(enabled, bool):
        raise TypeError(f"{owner}: enabled must be a bool, got {enabled!r}; a recipe is given by name: recipe=...")


def named(recipe: Recipe | str | None) -> Recipe | str:
    """ "auto", the recipe, or the default one for None. TypeError for anything else."""
    return AUTO if isinstance(recipe, str) and recipe == AUTO else _checked(recipe)


def _checked(recipe: object) -> Recipe:
    """The recipe, or the default one for None. TypeError for anything else."""
    if recipe is not None and not isinstance(recipe, Recipe):
        raise TypeError(f"recipe must be a fusible_ops recipe such as Float8BlockScaling(), got {recipe!r}")
    return recipe or get_default_recipe()
