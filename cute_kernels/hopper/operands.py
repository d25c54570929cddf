"""What host functions ask of their tensors before a launch: rows that 16-byte vectors can address, int32 offsets."""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels.catalog import Kernel
from cute_kernels.limits import raise_refusal
from cute_kernels.target import Target

VECTOR_BYTES = 16
MOST_ROWS = 1 << 30  # rows lie in ragged tensors of that extent

_multiprocessors: dict[tuple[str, torch.device], int] = {}  # by kernel and device that fit each other


def readable(t: Tensor) -> Tensor:
    """`t` [rows, columns] if its rows are contiguous and start at multiples of 16 bytes, else a copy that is so."""
    stride, step = t.stride()
    aligned = stride * t.element_size() % VECTOR_BYTES == 0 and t.data_ptr() % VECTOR_BYTES == 0
    if step == 1 and stride >= t.shape[1] and aligned:
        return t
    return torch.empty(t.shape, dtype=t.dtype, device=t.device).copy_(t)


def check_offsets(name: str, offsets: Tensor, like: Tensor) -> int:
    """The number of groups. Raises ValueError unless offsets is int32 [G+1], contiguous, on the device of `like`."""
    right = offsets.dtype == torch.int32 and offsets.dim() == 1 and offsets.is_contiguous() and offsets.numel() > 1
    if not right or offsets.device != like.device:
        raise ValueError(
            f"{name}: offsets is {_told(offsets)}, needs contiguous int32 [G+1] with G >= 1 on {like.device}; "
            "group_offsets(split_sizes, rows) makes it"
        )
    if like.shape[0] >= MOST_ROWS:
        raise ValueError(f"{name}: T is {like.shape[0]}, needs less than {MOST_ROWS}")
    return offsets.shape[0] - 1


def check_shape(name: str, letter: str, t: Tensor, shape: tuple[int, ...], like: Tensor, dtypes: tuple) -> None:
    """Raises ValueError unless `t` has that shape, one of those dtypes, and the device of `like`."""
    if t.shape != shape or t.dtype not in dtypes or t.device != like.device:
        kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"{name}: {letter} is {_told(t)}, needs {kinds} {list(shape)} on {like.device}")


def _told(t: Tensor) -> str:
    dtype = str(t.dtype).removeprefix("torch.")
    return f"{dtype} {list(t.shape)} on {t.device}" + ("" if t.is_contiguous() else ", not contiguous")


def multiprocessors(kernel: Kernel, device: torch.device) -> int:
    """SMs of the device. Raises ValueError if the kernel cannot run there, with what is missing."""
    known = _multiprocessors.get((kernel.name, device))
    if known is None:
        found = Target.of(device)
        for refusal in kernel.unmet_on(found):
            raise_refusal(refusal)
        known = _multiprocessors[kernel.name, device] = found.sms
    return known
