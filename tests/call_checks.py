"""Calls of cuDNN Frontend's Blackwell kernels, compiled for sm_100a and checked up to the missing driver, with no GPU.

Within `as_if_on_blackwell()` the package finds an SM100, and host tensors are handed to the compiled functions as if
they lay on it. The compiled function then checks dtype, rank, shape, stride and divisibility of every operand, as it
does in earnest, and only then asks for the driver: `cudaErrorInsufficientDriver` is the proof that the call is well
formed. Nothing here replaces a check of theirs. What no check sees: values on the device (offsets), the order of scales
in memory, what alpha and clamps mean, numerics.

It must never run where there is a driver: a kernel would be launched on addresses of the host. `no_driver()` is asked
first, every time, and asks the driver's own library, not PyTorch.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from cute_kernels import launch
from cute_kernels.target import CUDNN_FRONTEND, package_version

SMS = 148
REACHED = "cudaErrorInsufficientDriver"
CUDA = 2  # DLPack's number of the device type
_is_active = False
_passed: list[None] | None = None  # one for every call that got to the driver, while calls go on past it


def no_driver() -> bool:
    """Whether this machine has no usable CUDA driver."""
    for name in ("libcuda.so.1", "libcuda.so", "nvcuda.dll"):
        with contextlib.suppress(OSError):
            return ctypes.CDLL(name).cuInit(0) != 0
    return True


needs_no_driver = pytest.mark.skipif(not no_driver(), reason="there is a CUDA driver: host addresses must not reach it")
needs_frontend = pytest.mark.skipif(
    not CUDNN_FRONTEND.fits(package_version(CUDNN_FRONTEND.name)), reason=f"needs {CUDNN_FRONTEND}"
)


@dataclass(frozen=True)
class Check:
    """What a call did: seconds in all, and how many kernels it compiled."""

    seconds: float
    compiled: int


def checked(call: Callable[[], Any]) -> Check:
    """Run a call that must be well formed: it must get to the driver, and no further."""
    assert no_driver()
    began, before = time.perf_counter(), launch.compile_count()
    with as_if_on_blackwell(), pytest.raises(RuntimeError, match=REACHED):
        call()
    return Check(time.perf_counter() - began, launch.compile_count() - before)


@contextlib.contextmanager
def past_the_driver() -> Iterator[list[None]]:
    """As if on a Blackwell, but a call that gets to the driver returns, with its results unwritten. One None for each
    such call.
    """
    global _passed
    with as_if_on_blackwell():
        _passed = found = []
        try:
            yield found
        finally:
            _passed = None


@contextlib.contextmanager
def as_if_on_blackwell() -> Iterator[None]:
    """cuDNN Frontend sees an SM100; whatever it compiles takes host tensors for device tensors."""
    global _is_active
    assert no_driver(), "there is a CUDA driver: host addresses must not reach it"
    import cutlass
    import cutlass.cute as cute
    import cutlass.cute.runtime as runtime

    if not hasattr(runtime.from_dlpack, "unwrapped"):
        runtime.from_dlpack = _from_dlpack(runtime.from_dlpack)  # others import it by name: it stays, and looks
    hardware = SimpleNamespace(get_max_active_clusters=lambda cluster_size: SMS // cluster_size)
    compile_kernel, empty = cute.compile, torch.empty

    def compiled(*args: Any, **kwargs: Any) -> Callable[..., Any]:
        function = compile_kernel(*args, **kwargs)
        return lambda *a, **k: _called(
            function, *map(_handed, a), **{name: _handed(value) for name, value in k.items()}
        )

    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (torch.cuda, "is_available", lambda: True),
            (torch.cuda, "current_device", lambda: 0),
            (torch.cuda, "get_device_capability", lambda *_: (10, 0)),
            (torch.cuda, "current_stream", lambda *_: SimpleNamespace(cuda_stream=0)),
            (torch.cuda, "device", lambda *_: contextlib.nullcontext()),
            (torch, "empty", lambda *a, **k: _on_host(empty, *a, **k)),
            (cutlass.utils, "HardwareInfo", lambda: hardware),
            (cute, "compile", compiled),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        _is_active = True
        try:
            yield
        finally:
            _is_active = False


def _called(function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    try:
        function(*args, **kwargs)
    except RuntimeError as error:
        if _passed is None or REACHED not in str(error):
            raise
        _passed.append(None)


class _AsIfOnDevice:
    """A host tensor that DLPack describes as a CUDA tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __dlpack__(self, **_: Any) -> object:
        capsule = self._tensor.__dlpack__()
        address = ctypes.pythonapi.PyCapsule_GetPointer
        address.restype, address.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        _DLTensor.from_address(address(capsule, b"dltensor")).device_type = CUDA
        return capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA, 0


class _DLTensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32)]


def _handed(value: Any) -> Any:
    import tvm_ffi

    return tvm_ffi.from_dlpack(_AsIfOnDevice(value)) if isinstance(value, torch.Tensor) else value


def _from_dlpack(original: Callable[..., Any]) -> Callable[..., Any]:
    def from_dlpack(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_active and isinstance(tensor, torch.Tensor):
            tensor = _AsIfOnDevice(tensor)
        return original(tensor, *args, **kwargs)

    from_dlpack.unwrapped = original  # type: ignore[attr-defined]
    return from_dlpack


def _on_host(empty: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
    """`torch.empty` on the host, scratch bytes at a multiple of 128 bytes as CUDA's allocator gives them."""
    if torch.device(kwargs.get("device") or "cpu").type == "cuda":
        kwargs["device"] = "cpu"
    if kwargs.get("dtype") is not torch.uint8 or len(args) != 1 or not isinstance(args[0], int):
        return empty(*args, **kwargs)
    room = empty(args[0] + 128, **kwargs)
    return room[-room.data_ptr() % 128 :][: args[0]]
