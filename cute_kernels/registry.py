"""How entry points become operators `torch.ops.fusible_ops.*`: one schema, a CPU and a CUDA side, a shape function."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("fusible_ops", "DEF")

MARGIN = "*, int sm_margin=0"
"""What the schemas of kernels end with that use more than one SM."""
Pick = Callable[[str], Callable]
"""Gives the function of a name, of a reference or of an architecture."""


@functools.cache
def hopper_host() -> Any:
    """The host functions of CUDA devices."""
    from cute_kernels import hopper

    return hopper.host_functions()


def hopper(name: str) -> Callable[..., object]:
    """The Hopper host function called `name`; `NotImplementedError` if this version has none."""
    found = getattr(hopper_host(), name, None)
    if found is None:
        raise NotImplementedError(f"{name}: no CUDA kernel for it is in this version")
    return found


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


def register(schema: str, cpu: Callable, cuda: Callable, fake: Callable) -> None:
    """Define one operator with its CPU and CUDA kernels and its shape function.

    Keyword arguments say how a kernel shares the device; shapes do not depend on them.
    """
    name = schema.split("(", 1)[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, cpu, "CPU")
    _LIBRARY.impl(name, cuda, "CUDA")
    torch.library.register_fake(f"fusible_ops::{name}", lambda *args, **sharing: fake(*args), lib=_LIBRARY)
