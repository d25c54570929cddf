"""What host functions ask of their tensors before a launch: rows that 16-byte vectors can address, int32 offsets.

Checks read no more than facts. What follows from the facts of all operands (options, grid, shapes of results) is worked
out once for each combination: host functions keep it with `functools.lru_cache`, which keeps no refusal.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels.catalog import Kernel
from cute_kernels.facts import VECTOR_BYTES, TensorFacts, facts
from cute_kernels.hopper.configs import sms_left
from cute_kernels.limits import dtype_name, raise_refusal
from cute_kernels.target import Target

MOST_ROWS = 1 << 30  # rows lie in ragged tensors of that extent
KEPT = 2048  # combinations of facts that a host function keeps; every row count makes new ones

_multiprocessors: dict[tuple[str, torch.device], int] = {}  # by kernel and device that fit each other


def readable(t: Tensor) -> Tensor:
    """`t` [rows, columns] if its rows are contiguous and start at multiples of 16 bytes, else a copy that is so."""
    return t if is_readable(facts(t)) else torch.empty(t.shape, dtype=t.dtype, device=t.device).copy_(t)


def is_readable(t: TensorFacts) -> bool:
    """Whether 16-byte vectors can address the rows of `t` [rows, columns]."""
    stride, step = t.strides
    return step == 1 and stride >= t.shape[1] and stride * t.dtype.itemsize % VECTOR_BYTES == 0 and t.aligned


def check_offsets(name: str, offsets: Tensor | TensorFacts, like: Tensor | TensorFacts) -> int:
    """The number of groups. Raises ValueError unless offsets is int32 [G+1], contiguous, on the device of `like`."""
    right = offsets.dtype == torch.int32 and len(offsets.shape) == 1 and offsets.shape[0] > 1
    if not right or not offsets.is_contiguous() or offsets.device != like.device:
        raise ValueError(
            f"{name}: offsets is {_told(offsets)}, needs contiguous int32 [G+1] with G >= 1 on {like.device}; "
            "group_offsets(split_sizes, rows) makes it"
        )
    if like.shape[0] >= MOST_ROWS:
        raise ValueError(f"{name}: T is {like.shape[0]}, needs less than {MOST_ROWS}")
    return offsets.shape[0] - 1


def check_shape(
    name: str, letter: str, t: Tensor | TensorFacts, shape: tuple[int, ...], like: Tensor | TensorFacts, dtypes: tuple
) -> None:
    """Raises ValueError unless `t` has that shape, one of those dtypes, and the device of `like`."""
    if t.shape != shape or t.dtype not in dtypes or t.device != like.device:
        kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"{name}: {letter} is {_told(t)}, needs {kinds} {list(shape)} on {like.device}")


def check_plain_weights(kernel: Kernel, weights: tuple[TensorFacts, ...]) -> tuple[int, int]:
    """(rows of what one launch takes, columns). Raises ValueError unless they are one contiguous [G, N, K] or G
    contiguous [N, K], at multiples of 16 bytes, of sizes and of a dtype that the kernel takes.
    """
    if not weights or not all(w.shape[0] for w in weights):
        raise ValueError(f"{kernel.name}: weights are none, needs one [G, N, K] with G >= 1 or G tensors [N, K]")
    first = weights[0]
    if len(first.shape) != (3 if len(weights) == 1 and len(first.shape) == 3 else 2):
        found = [list(w.shape) for w in weights[:2]]
        raise ValueError(f"{kernel.name}: weights start with {found}, needs one [G, N, K] or G tensors [N, K]")
    rows, columns = first.shape[-2:]
    kernel.require(dtype=dtype_name(first.dtype), N=rows, K=columns)
    for w in weights:
        check_shape(kernel.name, "weights", w, first.shape, first, (first.dtype,))
        if not w.is_contiguous() or not w.aligned:
            raise ValueError(
                f"{kernel.name}: weights need to be contiguous [N, K] from a multiple of {VECTOR_BYTES} bytes on"
            )
    return rows * (first.shape[0] if len(first.shape) == 3 else 1), columns


def _told(t: Tensor | TensorFacts) -> str:
    dtype = str(t.dtype).removeprefix("torch.")
    return f"{dtype} {list(t.shape)} on {t.device}" + ("" if t.is_contiguous() else ", not contiguous")


def check_counter(name: str, counter: TensorFacts | None, like: TensorFacts) -> bool:
    """Whether there is a counter. Raises ValueError unless it is int32 [1] on the device of `like`."""
    if counter is not None:
        check_shape(name, "counter", counter, (1,), like, (torch.int32,))
    return counter is not None


def grid_of(kernel: Kernel, device: torch.device, pieces: int, warps: int, sm_margin: int) -> int:
    """CTAs of so many warps, one an SM that the margin leaves; no more than have a piece for each warp."""
    return min(multiprocessors(kernel, device, sm_margin), -(-pieces // warps))


def multiprocessors(kernel: Kernel, device: torch.device, sm_margin: int = 0, cluster: int = 1) -> int:
    """SMs of the device that the margin leaves, in whole clusters.

    Raises ValueError if there are none, or if the kernel cannot run there, with what is missing.
    """
    known = _multiprocessors.get((kernel.name, device))
    if known is None:
        found = Target.of(device)
        for refusal in kernel.unmet_on(found):
            raise_refusal(refusal)
        known = _multiprocessors[kernel.name, device] = found.sms
    return sms_left(known, sm_margin, cluster)
