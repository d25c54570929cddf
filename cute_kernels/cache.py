"""Compiled kernels on disk: `key -> files`, compiled once, checked whenever they are read.

An entry lies in one directory, every file written to a temporary name and moved into place:

    <key>.so, <key>.o    the kernel, in the order in which loading is tried; what there is of them
    <key>.json           size and sha256 of each, and, for people, what it was compiled from

**Trust.** These files are code. Directories are made for their user alone; one that others may write to, or that
belongs to another user, is not used, and the log says which. A pack (a directory that the user named, only read) may
belong to somebody else.

**Failures.** A damaged entry is rebuilt, a directory that cannot be written is read and otherwise done without; both
leave a note in the log of `cute_kernels`. Ranks that start together compile once: entries are locked while they are
built. Beyond `MOST_BYTES` the entries used least recently go.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

LOCK_TIMEOUT_SECONDS = 900.0
MOST_BYTES = 2**30
USE_IS_NOTED_EVERY = 24 * 3600.0
"""Seconds; so that reading a shared directory writes little."""

log = logging.getLogger("cute_kernels")
Loaded = TypeVar("Loaded")
Load = Callable[[Path], Loaded]
Build = Callable[[Path], Sequence[Path]]


def get_or_build(
    directory: Path,
    key: str,
    facts: dict[str, Any],
    load: Load[Loaded],
    build: Build,
    most_bytes: int | None = MOST_BYTES,
) -> Loaded:
    """Load the entry `key`; where there is none, or it is damaged, build it, store it and load it.

    facts: kept in the entry for people to read. load: a file to the function in it. build: makes the files, named by
    the key, in the folder it is given, and says in which order loading is to be tried; what it raises is passed on.
    """
    found = find(directory, key, load)
    if found is None:
        with _locked(directory, key) as writable:
            found = find(directory, key, load) if writable else None
            if found is None:
                found = _build(directory if writable else None, key, facts, load, build)
                if writable and most_bytes is not None:
                    _prune(directory, most_bytes, key)
    return found


def find(directory: Path, key: str, load: Load[Loaded], is_pack: bool = False) -> Loaded | None:
    """Load the entry `key`; None where there is none that is whole, loads, and may be trusted."""
    why = "there is no such directory" if is_pack and not directory.is_dir() else distrust(directory, is_pack)
    if why is not None:
        _note_unusable(str(directory), why)
        return None
    for path in _whole_files(directory, key, is_pack):
        try:
            found = load(path)
        except Exception as error:  # a foreign loader: whatever it raises, the file is of no use here
            log.warning("kernel cache: %s does not load (%s)", path, error)
            continue
        if not is_pack:
            _note_use(directory / f"{key}.json")
        return found
    return None


def distrust(path: Path, is_pack: bool = False) -> str | None:
    """Why what lies at `path`, a directory or a file, must not be run; None if it may, or is not there."""
    try:
        status = path.stat()
    except OSError:
        return None
    if os.name != "posix":
        return None
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others may write to it, and compiled kernels are code: chmod go-w {path}"
    if not is_pack and status.st_uid not in (0, os.geteuid()):
        return f"it belongs to user {status.st_uid}, and compiled kernels are code: name a directory of your own"
    return None


def state(directory: Path, is_pack: bool = False) -> dict[str, Any]:
    """The directory in figures: its path, entries, bytes; whether it can be written; why it is refused, or None."""
    entries = [_Entry(key, paths) for key, paths in _files_by_key(directory).items()]
    return {
        "path": str(directory),
        "entries": len(entries),
        "bytes": sum(entry.bytes for entry in entries),
        "writable": os.access(_nearest_that_exists(directory), os.W_OK),
        "refused": "there is no such directory" if is_pack and not directory.is_dir() else distrust(directory, is_pack),
    }


def _whole_files(directory: Path, key: str, is_pack: bool) -> list[Path]:
    """The files of the entry, the best first; none, and a note why, unless all are as they were written."""
    record_path = directory / f"{key}.json"
    try:
        files = dict(json.loads(record_path.read_text())["files"])
        paths = [directory / name for name in files]
        for path in paths:
            why = distrust(path, is_pack)
            if why is not None:
                raise PermissionError(why)
            if hashlib.sha256(path.read_bytes()).hexdigest() != files[path.name]["sha256"]:
                raise ValueError(f"the sha256 of {path.name} is not the recorded one")
    except FileNotFoundError as error:
        if error.filename == str(record_path):
            return []
        why = f"{error.filename} is missing"
    except (OSError, ValueError, TypeError, KeyError) as error:
        why = str(error) or type(error).__name__
    else:
        return paths
    log.warning("kernel cache: the entry %s is damaged (%s)%s", record_path, why, "" if is_pack else "; it is rebuilt")
    return []


def _build(directory: Path | None, key: str, facts: dict[str, Any], load: Load[Loaded], build: Build) -> Loaded:
    with tempfile.TemporaryDirectory(prefix="cute_kernels-") as scratch:
        paths = build(Path(scratch))
        if directory is not None:
            _store(directory, key, facts, paths)
        return load(paths[0])


def _store(directory: Path, key: str, facts: dict[str, Any], paths: Sequence[Path]) -> None:
    contents = {path.name: path.read_bytes() for path in paths}
    files = {name: {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)} for name, data in contents.items()}
    try:
        for name, data in contents.items():
            _replace(directory / name, data)
        _replace(directory / f"{key}.json", json.dumps({"files": files, **facts}, indent=1).encode())
    except OSError as error:
        _note_unusable(str(directory), str(error))


def _replace(path: Path, data: bytes) -> None:
    """Write so that a reader sees the old file or the new one, never a part. Who may read, the directory says."""
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
    """Hold the lock of entries that start like this one; gives False where the directory cannot be written or trusted,
    and then holds nothing. Lock files stay: there are at most 256.
    """
    from filelock import FileLock, Timeout

    lock = None
    try:
        if distrust(directory) is None:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = FileLock(str(directory / f"{key[:2]}.lock"), timeout=LOCK_TIMEOUT_SECONDS, mode=0o600)
            lock.acquire()
    except (OSError, NotImplementedError, Timeout) as error:
        _note_unusable(str(directory), str(error))
        lock = None
    try:
        yield lock is not None
    finally:
        if lock is not None:
            lock.release()


def _note_use(record: Path) -> None:
    """Let `_prune` know that the entry is in use."""
    with contextlib.suppress(OSError):
        if time.time() - record.stat().st_mtime > USE_IS_NOTED_EVERY:
            os.utime(record)


def _prune(directory: Path, most_bytes: int, keep: str) -> None:
    """Remove the entries used least recently until the rest fit, and what writers that died have left."""
    with contextlib.suppress(OSError):
        found = [_Entry(key, paths) for key, paths in _files_by_key(directory).items()]
        too_many = sum(entry.bytes for entry in found) - most_bytes
        for entry in sorted(found, key=lambda entry: entry.last_use):
            is_left_over = entry.key.startswith(".") and time.time() - entry.last_use > USE_IS_NOTED_EVERY
            if entry.key != keep and (too_many > 0 or is_left_over):
                for path in entry.paths:
                    path.unlink(missing_ok=True)
                too_many -= entry.bytes


class _Entry:
    """The files of one key, or one temporary file."""

    def __init__(self, key: str, paths: list[Path]) -> None:
        status = {path.suffix: path.stat() for path in paths}
        self.key, self.paths, self.bytes = key, paths, sum(s.st_size for s in status.values())
        self.last_use = status[".json"].st_mtime if ".json" in status else max(s.st_mtime for s in status.values())


def _files_by_key(directory: Path) -> dict[str, list[Path]]:
    """The files of each entry, and by its whole name each temporary one; no locks."""
    found: dict[str, list[Path]] = {}
    for path in directory.iterdir() if directory.is_dir() else ():
        if path.suffix != ".lock":
            key = path.name if path.name.startswith(".") else path.name.partition(".")[0]
            found.setdefault(key, []).append(path)
    return found


def _nearest_that_exists(path: Path) -> Path:
    return next(place for place in (path, *path.parents) if place.exists())


@functools.cache
def _note_unusable(directory: str, reason: str) -> None:
    """Say it once for each directory and reason."""
    log.warning("kernel cache: %s is not usable (%s)", directory, reason)
