"""How entry points become operators `torch.ops.fusible_ops.*`: one schema, a CPU and a CUDA side, a shape function."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cute_kernels.activation import Activation
from cute_kernels.catalog import BLACKWELL
from cute_kernels.target import Target

_LIBRARY = torch.library.Library("fusible_ops", "DEF")

MARGIN = "*, int sm_margin=0"
"""What the schemas of kernels end with that use more than one SM."""
TILED = f"{MARGIN}, Tensor? counter=None"
"""What those of kernels end with that take tiles, also as they go."""
SUMS = "bool deterministic=True"
"""What follows in those of kernels that can add up by atomics."""
Pick = Callable[[str], Callable]
"""Gives the function of a name, of a reference or of an architecture."""


@functools.cache
def host_functions(device: torch.device) -> Any:
    """The host functions of a CUDA device."""
    return host_functions_for(Target.of(device).arch)


def host_functions_for(arch: str) -> Any:
    """The host functions of an architecture: Blackwell's, or Hopper's for any other."""
    from cute_kernels import blackwell, hopper

    return (blackwell if arch in BLACKWELL else hopper).host_functions()


@functools.cache
def hopper(name: str) -> Callable[..., object]:
    """The Hopper host function called `name`; `NotImplementedError` if this version has none."""
    from cute_kernels import hopper

    found = getattr(hopper.host_functions(), name, None)
    if found is None:
        raise NotImplementedError(f"{name}: no CUDA kernel for it is in this version")
    return found


@functools.cache
def blackwell(name: str) -> Callable[..., object]:
    """The Blackwell host function called `name`."""
    from cute_kernels import blackwell

    return getattr(blackwell.host_functions(), name)


def of_module(module: Any) -> Pick:
    """The functions of `module`; they ignore how a kernel shares the device."""

    def pick(name: str) -> Callable[..., object]:
        formula = getattr(module, name)
        return lambda *args, **sharing: formula(*args)

    return pick


def none_as_empty(results: tuple[Tensor | None, ...], like: Tensor) -> tuple[Tensor, ...]:
    """Operators have no optional results: what was not asked for is an empty tensor inside them."""
    return tuple(like.new_empty(0) if t is None else t for t in results)


def empty_as_none(t: Tensor, wanted: bool) -> Tensor | None:
    """The way back."""
    return t if wanted else None


def plain(name: str, pick: Pick) -> Callable:
    """The operator that is exactly the function `name`."""

    def run(*args, **sharing):
        return pick(name)(*args, **sharing)

    return run


def with_optional_results(name: str, pick: Pick) -> Callable:
    """The operator of the function `name`, whose results are optional, of the device of its first argument."""

    def run(x, *args, **sharing):
        return none_as_empty(pick(name)(x, *args, **sharing), x)

    return run


def of_weights(name: str, pick: Pick) -> Callable:
    """The operator of the function `name`, which gives weights in rows, in columns, and more of them. Of square blocks
    there is one result: an operator's may not share memory.
    """

    def run(weights, columnwise, square, **sharing):
        rows, columns, *more = pick(name)(weights, columnwise, square, **sharing)
        return none_as_empty((rows, None if square else columns, *more), rows)

    return run


def with_activation(name: str, pick: Pick) -> Callable:
    """The operator of the function `name`, whose activation is encoded (its only string) and results are optional."""

    def run(*args, **sharing):
        decoded = [Activation.decode(a) if isinstance(a, str) else a for a in args]
        return none_as_empty(pick(name)(*decoded, **sharing), args[0])

    return run


def register(schema: str, cpu: Callable, cuda: Callable, fake: Callable) -> None:
    """Define one operator with its CPU and CUDA kernels and its shape function.

    Keyword arguments say how a kernel shares the device; shapes do not depend on them.
    """
    name = schema.split("(", 1)[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, cpu, "CPU")
    _LIBRARY.impl(name, cuda, "CUDA")
    torch.library.register_fake(f"fusible_ops::{name}", lambda *args, **sharing: fake(*args), lib=_LIBRARY)
