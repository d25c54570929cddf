"""Options to compiled function: `kernel(module, options, arch)(*tensors, stream)`, from memory, disk or the compiler.

A device module (`cute_kernels.hopper.*_kernel`, or a third party's) has `build(options) -> (jit function, fake
arguments)`; `options` is a frozen dataclass of static facts, dtypes included. The function that comes back takes torch
tensors in the order of the fake arguments and, last, the stream as an integer (`current_stream(device)`); it makes the
tensors' own device current, checks dtypes, ranks and shape relations, and launches.

Looked for in this order: memory; packs (`use_kernels`, then $FUSIBLE_OPS_KERNELS); the cache directory; the compiler.
CUTLASS is imported to compile, and to load where no C linker was at hand when the kernel was compiled. The architecture
goes to the compiler as an option, so the user's environment is neither read nor changed, and `precompile` works on a
machine without a GPU. A compile is always exported and loaded back: what runs is byte for byte what the cache holds.

Everything here may be called from several threads: the first caller compiles, the others wait. As with other PyTorch
code, run a step once before capturing it in a CUDA graph: a kernel's machine code is loaded at its first launch.
"""

from __future__ import annotations

import functools
import importlib
import threading
import time
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from cute_kernels import cache, objects, target
from cute_kernels.cache_key import entry_key

Function = Callable[..., None]
Spec = tuple[str, Any, str]

_functions: dict[Spec, Function] = {}
_failures: dict[Spec, str] = {}
_built: dict[Hashable, Any] = {}
_build_failures: dict[Hashable, str] = {}
_lock = threading.RLock()
_compiled = 0
_forbidden = 0  # how many `use_kernels` in force forbid compiling
_packs: list[Path] = []  # of those in force, the latest first


class NoKernelError(RuntimeError):
    """A kernel that was asked for cannot be had on this machine."""


class MissingPackageError(NoKernelError):
    """A package that compiling or loading kernels needs is not installed."""


class CompileError(NoKernelError):
    """A kernel did not compile, or what was compiled does not load. The same options are not tried again in this
    process.
    """


class CompileForbiddenError(RuntimeError):
    """A kernel was asked for under `no_compile()` and is neither in memory nor on disk."""


def kernel(module: str, options: Any, arch: str) -> Function:
    """The compiled kernel `module` for `options` on `arch` ("sm_90a").

    Raises MissingPackageError, CompileError, or CompileForbiddenError under `no_compile()`.
    """
    found = _functions.get((module, options, arch))
    return found if found is not None else _first_use((module, options, arch))


def precompile(module: str, options: Any, arch: str, pack: Path | None = None) -> bool:
    """Have the kernel on disk, in the directory `pack` if one is given; needs no GPU. True if it was compiled now,
    False if it was there.
    """
    spec = module, options, arch
    with _lock:
        before = _compiled
        _functions[spec] = _obtain(spec) if pack is None else _stored(spec, pack, None)
        return _compiled != before


def built(spec: Hashable) -> Any | None:
    """What `build_once` has built for `spec`, None if nothing."""
    return _built.get(spec)


def one_at_a_time() -> AbstractContextManager:
    """Held while something is compiled: the DSL keeps its state in globals, others theirs in the environment."""
    return _lock


def build_once(spec: Hashable, what: str, build: Callable[[], Any]) -> Any:
    """What `build()` gives, a kernel of another library that cannot be kept on disk: once a process for each `spec`.

    what: how errors call it. Counts as a compile; raises CompileError (once built in vain, without another try) or
    CompileForbiddenError under `no_compile()`.
    """
    global _compiled
    with _lock:
        if spec in _built:
            return _built[spec]
        if spec in _build_failures:
            raise CompileError(_build_failures[spec])
        if _forbidden:
            raise CompileForbiddenError(
                f"{what} is not compiled in this process, and no_compile() is in force; it cannot be kept on disk, so "
                "call it once before"
            )
        began = time.perf_counter()
        try:
            _built[spec] = build()
        except Exception as error:  # as above
            _build_failures[spec] = f"{what} does not compile: {error}"
            raise CompileError(_build_failures[spec]) from error
        _compiled += 1
        cache.log.info("compiled %s in %.1f s", what, time.perf_counter() - began)
        return _built[spec]


def compile_count() -> int:
    """How many kernels this process has compiled (loads from disk do not count)."""
    return _compiled


class use_kernels:
    """Where kernels come from, from here on and in every thread; in a `with` statement, until its end.

    packs: directories of kernels compiled beforehand, looked through first. no_compile: a kernel that would have to be
    compiled raises CompileForbiddenError with its key and the places that were looked through.
    Errors: NotADirectoryError, and PermissionError for a directory that others may write to (kernels are code).
    """

    def __init__(self, *packs: str | Path, no_compile: bool = False) -> None:
        global _forbidden
        self._packs, self._no_compile = [Path(pack) for pack in packs], no_compile
        for pack in self._packs:
            if not pack.is_dir():
                raise NotADirectoryError(f"there is no directory of kernels {pack}")
            if why := cache.distrust(pack, is_pack=True):
                raise PermissionError(f"kernels in {pack} are not used: {why}")
        with _lock:
            _packs[:0] = self._packs
            _forbidden += no_compile

    def __enter__(self) -> use_kernels:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _forbidden
        with _lock:
            for pack in self._packs:
                _packs.remove(pack)
            _forbidden -= self._no_compile


no_compile = functools.partial(use_kernels, no_compile=True)
"""Within `with no_compile():` nothing is compiled."""


def forget() -> None:
    """Drop the kernels and failures held in memory; the disk is left alone."""
    with _lock:
        for held in (_functions, _failures, _built, _build_failures):
            held.clear()
        toolchain.cache_clear()


def current_stream(device: torch.device) -> int:
    """The handle of the current stream of a CUDA device with an index."""
    return torch._C._cuda_getCurrentRawStream(device.index)


def compile_only(module: str, options: Any, arch: str, extra: str = "") -> Any:
    """Compile past every cache and return the DSL's compiled object; for tests that read PTX or SASS.

    extra: further compiler options, such as "--keep-ptx --keep-cubin --dump-dir /tmp".
    """
    cute = _imported("cutlass.cute", target.CUTLASS_DSL)
    _imported("tvm_ffi", target.TVM_FFI)

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
    key, load = _key_and_load(spec)
    places = (*_packs, *target.packs())
    for pack in places:
        found = cache.find(pack, key, load, is_pack=True)
        if found is not None:
            return found
    directory = target.cache_dir()
    if not _forbidden:
        return _stored(spec, directory, cache.MOST_BYTES)
    found = cache.find(directory, key, load)
    if found is None:
        module, options, arch = spec
        raise CompileForbiddenError(
            f"{module} is not compiled for {arch} with {options!r} (cache key {key}), and no_compile is in force; "
            f"looked in {', '.join(map(str, (*places, directory)))}. Compile it ahead of time: fusible-ops warmup"
        )
    return found


def _stored(spec: Spec, directory: Path, most_bytes: int | None) -> Function:
    """From the directory; compiled into it if it is not there."""
    key, load = _key_and_load(spec)
    module, options, arch = spec
    facts = {"module": module, "options": repr(options), "arch": arch, "versions": toolchain()}
    try:
        return cache.get_or_build(directory, key, facts, load, lambda folder: _export(spec, key, folder), most_bytes)
    except NoKernelError:
        raise
    except Exception as error:  # a foreign loader, and what it loads
        raise _failed(spec, "load", error) from error


def _failed(spec: Spec, does_not: str, error: Exception) -> CompileError:
    """The error that names the kernel and keeps the cause, remembered so that it is never tried again."""
    module, options, arch = spec
    _failures[spec] = f"{module} does not {does_not} for {arch} with {options!r}: {error}"
    return CompileError(_failures[spec])


def _key_and_load(spec: Spec) -> tuple[str, Callable[[Path], Function]]:
    """The kernel's key, and what loads its files."""
    module, options, arch = spec
    key = entry_key(module, options, arch, toolchain())
    return key, functools.partial(objects.load, name=_name(key))


def _name(key: str) -> str:
    """What the function of an entry is called in its files."""
    return f"fusible_{key[:24]}"


def _export(spec: Spec, key: str, folder: Path) -> list[Path]:
    """Compile into `folder`: the files, the one to load first."""
    module, options, arch = spec
    began = time.perf_counter()
    path = folder / f"{key}.o"
    try:
        compile_only(module, options, arch).export_to_c(str(path), function_name=_name(key))
    except MissingPackageError:
        raise
    except Exception as error:  # whatever the compiler raises
        raise _failed(spec, "compile", error) from error
    cache.log.info("compiled %s for %s in %.1f s", module, arch, time.perf_counter() - began)
    library = objects.link(path, target.c_linker())
    return [path] if library is None else [library, path]


@functools.cache
def toolchain() -> dict[str, str]:
    """What shapes an object beside its sources: versions by name. Raises MissingPackageError where one is missing."""
    found = {}
    for package in (target.CUTLASS_DSL, target.TVM_FFI):
        version = target.package_version(package.name)
        if version is None:
            raise MissingPackageError(_missing(package, "is not installed"))
        found[package.name] = version
    runtime = target.dsl_runtime()
    return {**found, "cuda": "unknown" if runtime is None else runtime.cuda}


def _imported(name: str, package: target.Package) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingPackageError(_missing(package, f"cannot be imported ({error})")) from error


def _missing(package: target.Package, why: str) -> str:
    return f"compiled kernels need the package {package.name}, which {why}; install it with: pip install {package.name}"
