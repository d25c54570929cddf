"""Object files that the DSL exports: linked into shared libraries, and both loaded.

A shared library loads in milliseconds without CUTLASS (tvm-ffi, and the DSL's small runtime library beside it); an
object file needs CUTLASS, which links it in memory. Libraries are linked against nothing and name no path, so they may
be moved; what they need is put into the process before.
"""

from __future__ import annotations

import ctypes
import functools
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cute_kernels import target

LINK_TIMEOUT_SECONDS = 60.0


def link(path: Path, linker: str | None) -> Path | None:
    """The object file as a shared library beside it; None without a C linker, or if it does not link."""
    if linker is None:
        return None
    made = path.with_suffix(".so")
    command = [linker, "-shared", "-nostdlib", "-o", str(made), str(path)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=LINK_TIMEOUT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return made if done.returncode == 0 else None


def load(path: Path, name: str) -> Callable[..., None]:
    """The function `name` of a file: of a `.so` without CUTLASS, of a `.o` with it."""
    if path.suffix == ".so":
        import tvm_ffi

        _load_runtime()
        module: Any = tvm_ffi.load_module(str(path))
    else:
        import cutlass.cute as cute

        module = cute.runtime.load_module(str(path), enable_tvm_ffi=True)
    return module[name]


@functools.cache
def _load_runtime() -> None:
    """The DSL's runtime library, for all that is loaded after it."""
    runtime = target.dsl_runtime()
    if runtime is None:
        raise OSError("the runtime library of nvidia-cutlass-dsl is not installed")
    ctypes.CDLL(str(runtime.path), ctypes.RTLD_GLOBAL)
