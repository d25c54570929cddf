"""The door to cuDNN Frontend: its operation objects, built once for all row counts, and called on the current stream.

Its `*_wrapper_sm100` functions are not used: they keep an entry for every row count for ever, and read the margin from
the environment at every call. Its classes, on which they stand, do neither: constructed from sample tensors, checked
(`check_support`), compiled, executed. They have no interface to save a compiled kernel, so every process compiles anew,
1 to 5 s each, at the first call.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from cute_kernels import launch
from cute_kernels.catalog import Kernel
from cute_kernels.target import CUDNN_FRONTEND, environment

MARGIN_VARIABLE = "CUDNNFE_CLUSTER_OVERLAP_MARGIN"
"""Clusters that a kernel leaves free: read when an operation is constructed, and part of it ever after."""
CLUSTER_SMS = 2
"""SMs of a cluster, in the configuration that every adapter uses: 256 x 256 tiles, two CTAs each."""


def run(
    kernel: Kernel,
    letters: Mapping[str, object],
    name: str,
    sizes: tuple[int, ...],
    operands: Mapping[str, Tensor | None],
    settings: Mapping[str, Any],
    sm_margin: int = 0,
    **more: Any,
) -> None:
    """Call cuDNN Frontend's operation `name` on the current stream of the operands' device.

    kernel, letters: its row, and the values that the row's limits are on; asked of others than before, built or not.
    sizes: whatever shapes there are beside the number of rows; operands: by their names there, without "_tensor";
    settings: what the operation is compiled for; more: what each call is given. sm_margin: SMs to leave free, in whole
    clusters.
    Errors: ValueError that names the limit; ValueError for other operands that it does not take and RuntimeError for a
    device before SM100, both in its own words;
    `launch`'s for a package that is missing or a kernel that does not compile.
    """
    device = next(t.device for t in operands.values() if t is not None)
    dtypes = tuple((operand, t.dtype) for operand, t in operands.items() if t is not None)
    _require(kernel, tuple(letters.items()))
    spec = (name, sizes, dtypes, tuple(settings.items()), device, -(-sm_margin // CLUSTER_SMS))
    with on(device):
        made = launch.built(spec)
        if made is None:
            made = _build(spec, name, operands, settings)
        if hasattr(made, "scratch_workspace_bytes"):
            more["workspace"] = torch.empty(made.scratch_workspace_bytes(), dtype=torch.uint8, device=device)
        made.execute(**{_argument(operand): t for operand, t in operands.items()}, **more)


@functools.lru_cache(maxsize=4096)
def _require(kernel: Kernel, letters: tuple[tuple[str, object], ...]) -> None:
    """`kernel.require`, once for each combination: constants that a kernel has built in are in no key of theirs."""
    kernel.require(**dict(letters))


def _build(spec: tuple, name: str, operands: Mapping[str, Tensor | None], settings: Mapping[str, Any]) -> Any:
    """The operation, constructed from the operands as samples, checked and compiled."""
    samples = {f"sample_{operand}": t for operand, t in operands.items()}
    with launch.one_at_a_time(), environment(MARGIN_VARIABLE, str(spec[-1])):
        made = getattr(library(), name)(**samples, **settings)
        made.check_support()

        def build() -> Any:
            made.compile()
            return made

        return launch.build_once(spec, f"cuDNN Frontend's {name} ({spec[1:4]})", build)


_AS_THEY_ARE = ("padded_offsets", "global_scale_a", "global_scale_b")


def _argument(operand: str) -> str:
    """What `execute` calls an operand."""
    return operand if operand in _AS_THEY_ARE else f"{operand}_tensor"


def on(device: torch.device) -> AbstractContextManager:
    """Makes a device the current one, whose current stream a call then runs on."""
    return torch.cuda.device(device)


def library() -> Any:
    """The package. MissingPackageError if it is not there."""
    try:
        return importlib.import_module("cudnn")
    except ImportError as error:
        raise launch.MissingPackageError(
            f"Blackwell kernels need the package {CUDNN_FRONTEND.name}, which cannot be imported ({error}); install it "
            f"with: pip install {CUDNN_FRONTEND.name}"
        ) from error


def ones(count: int, device: torch.device) -> Tensor:
    """FP32 [count]: the scale factors that every call must be given."""
    return torch.ones(count, dtype=torch.float32, device=device)
