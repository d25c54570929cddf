"""Options to compiled function: `kernel(module, options, arch)(*tensors, stream)`, from memory, disk or the compiler.

A device module (`cute_kernels.hopper.*_kernel`, or a third party's) has `build(options) -> (jit function, fake
arguments)`; `options` is a frozen dataclass of static facts, dtypes included. The function that comes back takes torch
tensors in the order of the fake arguments and, last, the stream as an integer (`current_stream(device)`); it makes the
tensors' own device current, checks dtypes, ranks and shape relations, and launches.

CUTLASS is imported when a kernel is first asked for. The architecture goes to the compiler as an option, so the user's
environment is neither read nor changed, and `precompile` works on a machine without a GPU. A compile is always exported
and loaded back: what runs is byte for byte what the cache holds.

Everything here may be called from several threads: the first caller compiles, the others wait. As with other PyTorch
code, run a step once before capturing it in a CUDA graph: a kernel's machine code is loaded at its first launch.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from cute_kernels import cache, target

_PACKAGES = {  # import name -> distribution
    "cutlass": "nvidia-cutlass-dsl",
    "tvm_ffi": "apache-tvm-ffi",
    "filelock": "filelock",
}

Function = Callable[..., None]
Spec = tuple[str, Any, str]

_functions: dict[Spec, Function] = {}
_failures: dict[Spec, str] = {}
_lock = threading.RLock()  # held while compiling: the DSL keeps its state in globals
_compiled = 0
_forbidden = 0


class MissingPackageError(RuntimeError):
    """A package that compiling or loading kernels needs is not installed."""


class CompileError(RuntimeError):
    """A kernel did not compile. The same options are not tried again in this process."""


class CompileForbiddenError(RuntimeError):
    """A kernel was asked for under `no_compile()` and is neither in memory nor on disk."""


def kernel(module: str, options: Any, arch: str) -> Function:
    """The compiled kernel `module` for `options` on `arch` ("sm_90a").

    Raises MissingPackageError, CompileError, or CompileForbiddenError under `no_compile()`.
    """
    found = _functions.get((module, options, arch))
    return found if found is not None else _first_use((module, options, arch))


def precompile(module: str, options: Any, arch: str) -> bool:
    """Have the kernel on disk; needs no GPU. True if it was compiled now, False if it was there."""
    with _lock:
        before = _compiled
        _functions[module, options, arch] = _obtain((module, options, arch))
        return _compiled != before


def compile_count() -> int:
    """How many kernels this process has compiled (loads from disk do not count)."""
    return _compiled


@contextmanager
def no_compile() -> Iterator[None]:
    """Within it, in every thread, a kernel that would have to be compiled raises CompileForbiddenError."""
    global _forbidden
    with _lock:
        _forbidden += 1
    try:
        yield
    finally:
        with _lock:
            _forbidden -= 1


def forget() -> None:
    """Drop the kernels and failures held in memory; the disk is left alone."""
    with _lock:
        _functions.clear()
        _failures.clear()


def current_stream(device: torch.device) -> int:
    """The handle of the current stream of a CUDA device with an index."""
    return torch._C._cuda_getCurrentRawStream(device.index)


def compile_only(module: str, options: Any, arch: str, extra: str = "") -> Any:
    """Compile past every cache and return the DSL's compiled object; for tests that read PTX or SASS.

    extra: further compiler options, such as "--keep-ptx --keep-cubin --dump-dir /tmp".
    """
    _require_packages()
    import cutlass.cute as cute

    global _compiled
    with _lock:
        function, arguments = importlib.import_module(module).build(options)
        compiled = cute.compile(function, *arguments, options=f"--enable-tvm-ffi --gpu-arch {arch} {extra}".strip())
        _compiled += 1
    return compiled


def _first_use(spec: Spec) -> Function:
    with _lock:
        if spec not in _functions:
            _functions[spec] = _obtain(spec)
        return _functions[spec]


def _obtain(spec: Spec) -> Function:
    """From disk, else compiled and stored. The caller holds the lock."""
    if spec in _failures:
        raise CompileError(_failures[spec])
    versions = _require_packages()
    module, options, arch = spec
    key = cache.entry_key(module, options, arch, versions)
    facts = {"module": module, "options": repr(options), "arch": arch, "versions": versions}
    name = f"fusible_{key[:24]}"
    return cache.get_or_build(
        Path(target.cache_dir()),
        key,
        facts,
        load=lambda path: _load(path, name),
        build=lambda path: _export(spec, key, name, path),
    )


def _export(spec: Spec, key: str, name: str, path: Path) -> None:
    module, options, arch = spec
    if _forbidden:
        raise CompileForbiddenError(
            f"{module} is not compiled for {arch} with {options!r} (cache key {key}), and no_compile() is in force; "
            "compile it ahead of time with launch.precompile"
        )
    began = time.perf_counter()
    try:
        compile_only(module, options, arch).export_to_c(str(path), function_name=name)
    except Exception as error:  # whatever the compiler raises: name the kernel, keep the cause, never try again
        _failures[spec] = f"{module} does not compile for {arch} with {options!r}: {error}"
        raise CompileError(_failures[spec]) from error
    cache.log.info("compiled %s for %s in %.1f s", module, arch, time.perf_counter() - began)


def _load(path: Path, name: str) -> Function:
    import cutlass.cute as cute

    return cute.runtime.load_module(str(path), enable_tvm_ffi=True)[name]


def _require_packages() -> dict[str, str]:
    """Versions of the packages that shape an object; raises where one is missing."""
    modules = {}
    for name, distribution in _PACKAGES.items():
        try:
            modules[name] = importlib.import_module(name)
        except ImportError as error:
            raise MissingPackageError(
                f"compiled kernels need the package {distribution}, which cannot be imported ({error}); "
                f"install it with: pip install {distribution}"
            ) from error
    return {_PACKAGES[name]: str(modules[name].__version__) for name in ("cutlass", "tvm_ffi")}
