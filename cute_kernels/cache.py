"""Exported kernel objects on disk: `key -> object file`, compiled once, checked whenever it is read.

An entry is two files in one directory, both written to a temporary name and moved into place:

    <key>.o      the exported object
    <key>.json   sha256 and size of the object, and, for people, what it was compiled from

**Key.** sha256 over what decides the machine code and nothing else: the text of the device sources, the options, the
GPU architecture, the host's processor type, the DSL and tvm-ffi versions, and the format of this cache. Never a row
count, a stream, a device index or a path.

**Sources.** The device module and every project module that its text reaches: imports (also inside functions), relative
imports, and dotted names in strings (a table of epilogues, say). A package named in a string counts with its files.

**Failures.** A damaged entry is rebuilt and a directory that cannot be written is done without; both leave a note in
the log of `cute_kernels`. Ranks that start together compile once: the entry is locked while it is built.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import json
import logging
import os
import platform
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

FORMAT_VERSION = 1
LOCK_TIMEOUT_SECONDS = 900.0

log = logging.getLogger("cute_kernels")
Loaded = TypeVar("Loaded")


def entry_key(module: str, options: Any, arch: str, versions: dict[str, str]) -> str:
    """Name of an entry: 64 hexadecimal digits.

    options: frozen dataclass whose repr states every field. versions: package name to version.
    """
    facts = {
        "format": FORMAT_VERSION,
        "sources": source_digest(module),
        "module": module,
        "options": repr(options),
        "arch": arch,
        "host": platform.machine(),
        "versions": versions,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


@functools.cache
def source_digest(module: str) -> str:
    """sha256 over the text of `module` and of all project modules it is built from, by dotted name."""
    digest = hashlib.sha256()
    for name, path in sorted(sources_of(module).items()):
        text = path.read_bytes()
        digest.update(f"{name} {len(text)}\n".encode())
        digest.update(text)
    return digest.hexdigest()


def sources_of(module: str) -> dict[str, Path]:
    """Dotted name to file, for `module` and everything of its own top-level package and of ours that it reaches."""
    roots = {module.partition(".")[0], __name__.partition(".")[0]}
    found: dict[str, Path] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name in found or name.partition(".")[0] not in roots:
            continue
        path = _file_of(name)
        if path is not None:
            found[name] = path
            waiting.extend(_names_in(path, name))
    if module not in found:
        raise ModuleNotFoundError(f"there is no device module {module!r}", name=module)
    return found


def _file_of(name: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    return Path(spec.origin) if spec is not None and spec.origin and spec.origin.endswith(".py") else None


def _names_in(path: Path, name: str) -> Iterator[str]:
    """Dotted names that may be modules: of import statements, and of strings that look like one of ours."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    ours = __name__.partition(".")[0] + "."
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = package.rsplit(".", node.level - 1)[0] if node.level > 1 else package
                base = f"{parent}.{base}".rstrip(".")
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and str(node.value).startswith(ours):
            yield from _with_members(str(node.value).rstrip("."))


def _with_members(name: str) -> Iterator[str]:
    """The module, or the package with each of its files; nothing for a text that is no dotted name."""
    if not name.replace(".", "").isidentifier():
        return
    yield name
    path = _file_of(name)
    if path is not None and path.name == "__init__.py":
        yield from (f"{name}.{member.stem}" for member in sorted(path.parent.glob("*.py")) if member.stem != "__init__")


def get_or_build(
    directory: Path,
    key: str,
    facts: dict[str, Any],
    load: Callable[[Path], Loaded],
    build: Callable[[Path], None],
) -> Loaded:
    """Load the entry `key`; where there is none, or it is damaged, build it, store it and load it.

    facts: kept in the entry for people to read. load: object file to function. build: writes the object file it is
    given; what it raises is passed on.
    """
    found = _read(directory, key, load)
    if found is None:
        with _locked(directory, key) as writable:
            found = _read(directory, key, load) if writable else None
            if found is None:
                found = _build(directory if writable else None, key, facts, load, build)
    return found


def is_stored(directory: Path, key: str) -> bool:
    """Whether an undamaged entry is there."""
    return _read(directory, key, lambda path: True) is not None


def _read(directory: Path, key: str, load: Callable[[Path], Loaded]) -> Loaded | None:
    path = directory / f"{key}.o"
    try:
        record = json.loads((directory / f"{key}.json").read_text())
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log.warning("kernel cache: entry %s cannot be read (%s); it will be rebuilt", path, error)
        return None
    if not isinstance(record, dict) or record.get("sha256") != hashlib.sha256(data).hexdigest():
        log.warning("kernel cache: entry %s is damaged (its sha256 is not the recorded one); it will be rebuilt", path)
        return None
    try:
        return load(path)
    except Exception as error:  # a foreign loader: whatever it raises, the entry is of no use here
        log.warning("kernel cache: entry %s does not load (%s); it will be rebuilt", path, error)
        return None


def _build(
    directory: Path | None,
    key: str,
    facts: dict[str, Any],
    load: Callable[[Path], Loaded],
    build: Callable[[Path], None],
) -> Loaded:
    with tempfile.TemporaryDirectory(prefix="cute_kernels-") as scratch:
        path = Path(scratch) / f"{key}.o"
        build(path)
        if directory is not None:
            _store(directory, key, facts, path.read_bytes())
        return load(path)


def _store(directory: Path, key: str, facts: dict[str, Any], data: bytes) -> None:
    record = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data), **facts}
    try:
        _replace(directory / f"{key}.o", data)
        _replace(directory / f"{key}.json", json.dumps(record, indent=1, sort_keys=True).encode())
    except OSError as error:
        _note_unusable(str(directory), str(error))


def _replace(path: Path, data: bytes) -> None:
    """Write so that a reader sees the old file or the new one, never a part."""
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


@contextmanager
def _locked(directory: Path, key: str) -> Iterator[bool]:
    """Hold the entry's lock; gives False where the directory cannot be written, and then holds nothing."""
    from filelock import FileLock, Timeout

    lock = None
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = FileLock(str(directory / f"{key}.lock"), timeout=LOCK_TIMEOUT_SECONDS)
        lock.acquire()
    except (OSError, NotImplementedError, Timeout) as error:
        _note_unusable(str(directory), str(error))
        lock = None
    try:
        yield lock is not None
    finally:
        if lock is not None:
            lock.release()


@functools.cache
def _note_unusable(directory: str, reason: str) -> None:
    """Say it once for each directory and reason."""
    log.warning("kernel cache: %s is not usable (%s); kernels are compiled and kept in memory only", directory, reason)
