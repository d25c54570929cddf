"""Checks of what a caller passed, made before anything runs. None of them waits for the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cute_kernels.activation_reference import rows_of
from cute_kernels.quantization.formats import Format
from cute_kernels.quantization.quantize import SOURCES
from fusible_ops.casts import is_shard

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def positive(owner: str, **sizes: int) -> None:
    """ValueError unless every size is a positive int."""
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size <= 0:
            raise ValueError(f"{owner}: {name} must be a positive integer, got {size!r}")


def float_dtype(owner: str, dtype: torch.dtype) -> torch.dtype:
    """`dtype`, or ValueError if it is not one that parameters may have."""
    if dtype not in FLOAT_DTYPES:
        raise ValueError(f"{owner}: dtype must be float32, float16, bfloat16 or float64, got {dtype}")
    return dtype


def default_device(device: torch.device | str | None) -> torch.device:
    """`device`; None means the current CUDA device if there is one, else the CPU."""
    if device is not None:
        return torch.device(device)
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def float_input(owner: str, x: Tensor) -> None:
    """TypeError unless x is a tensor of a float dtype that the ops compute in."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{owner}: the input must be a tensor, got {type(x).__name__}")
    if x.dtype not in FLOAT_DTYPES:
        raise TypeError(f"{owner}: the input must be float32, float16, bfloat16 or float64, got {x.dtype}")


def quantizable(owner: str, dtype: torch.dtype) -> None:
    """TypeError for a dtype that no recipe can quantise."""
    if dtype not in SOURCES:
        raise TypeError(f"{owner}: a recipe quantises bfloat16, float16 and float32, not {dtype}; leave its autocast")


def divides(owner: str, what: str, size: int, format: Format, multiple: int) -> None:
    """ValueError unless the format's blocks, of `multiple` values in this direction, divide `size`."""
    if size % multiple:
        raise ValueError(f"{owner}: {format} needs {what} to be a multiple of {multiple}, got {size}")


def last_dimension(owner: str, x: Tensor, width: int) -> None:
    """ValueError unless x is [..., width]."""
    if x.dim() == 0 or x.shape[-1] != width:
        raise ValueError(f"{owner}: the input's last dimension must be {width}, got shape {tuple(x.shape)}")


def same_device(owner: str, what: str, t: Tensor, device: torch.device) -> None:
    """ValueError unless t is on `device`."""
    if t.device != device:
        raise ValueError(f"{owner}: {what} must be on {device}, got {t.device}; move it with .to({str(device)!r})")


def split_sizes(owner: str, splits: Tensor, num_groups: int, device: torch.device) -> None:
    """Unless `splits` is an int32 or int64 tensor [num_groups] on `device`: TypeError (dtype) or ValueError (the
    rest).
    """
    if not isinstance(splits, Tensor):
        raise TypeError(f"{owner}: split_sizes must be a tensor of {num_groups} ints, got {type(splits).__name__}")
    if splits.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{owner}: split_sizes must be int32 or int64, got {splits.dtype}")
    if splits.dim() != 1 or splits.numel() != num_groups:
        raise ValueError(f"{owner}: Expected {num_groups} splits, but got shape {tuple(splits.shape)}")
    same_device(owner, "split_sizes", splits, device)


def row_scales(owner: str, what: str, scales: Tensor, x: Tensor | None) -> None:
    """Unless `scales` holds one float for each row of x (if known), on x's device: TypeError (dtype) or ValueError
    (the rest).
    """
    if not isinstance(scales, Tensor) or scales.dtype not in FLOAT_DTYPES:
        raise TypeError(
            f"{owner}: {what} must be a float tensor, got {getattr(scales, 'dtype', type(scales).__name__)}"
        )
    if x is None:
        return
    rows = rows_of(x)
    if scales.numel() != rows:
        raise ValueError(
            f"{owner}: {what} must hold one value for each of {rows} rows, got shape {tuple(scales.shape)}"
        )
    same_device(owner, what, scales, x.device)


def whole(owner: str, parameters: Sequence[Tensor]) -> None:
    """RuntimeError for a DTensor: a parameter that is sharded and was not gathered."""
    if any(map(is_shard, parameters)):
        raise RuntimeError(
            f"{owner}: a parameter is a DTensor, of which this rank holds a part; apply fully_shard to the Sequential "
            "or to a module around it: that gathers the parameters of all ops, which are not called one by one"
        )


def alike(owner: str, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> None:
    """RuntimeError unless all agree in dtype, device and requires_grad, and weights and biases each in shape."""
    first = weights[0]
    dtype, device, wants = first.dtype, first.device, first.requires_grad
    for kind, parameters in (("weight", weights), ("bias", biases)):
        for i, p in enumerate(parameters):
            shape = parameters[0].shape
            if p.dtype != dtype or p.device != device or p.requires_grad != wants or p.shape != shape:
                raise RuntimeError(
                    f"{owner}: {kind} {i} is {p.dtype} {tuple(p.shape)} on {p.device}, "
                    f"requires_grad={p.requires_grad}; weights and biases must agree with weight 0, "
                    f"{dtype} {tuple(first.shape)} on {device}, requires_grad={wants}"
                )


def lost(owner: str, missing: KeyError) -> RuntimeError:
    """The error for a parameter that is none any more."""
    return RuntimeError(
        f"{owner}: {missing} is no parameter of this op any more; parametrised weights are not supported (their "
        "gradients would be lost), pass new values with torch.func.functional_call instead"
    )
