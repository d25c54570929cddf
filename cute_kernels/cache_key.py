"""What names a compiled kernel: sha256 over all that decides its machine code, and nothing else.

That is the text of the device sources, the options, the GPU architecture, the host's processor type, the versions of
what compiles, and the format of the cache. Never a row count, a stream, a device index or a path.

**Sources.** The device module and every project module that its text reaches: imports (also inside functions), relative
imports, and dotted names in strings (a table of epilogues, say). A package named in a string counts with its files.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import json
import platform
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

FORMAT_VERSION = 2


def entry_key(module: str, options: Any, arch: str, versions: Mapping[str, str]) -> str:
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
        "versions": dict(versions),
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
    """The source of a module, found without importing a package on the way: device modules import CUTLASS."""
    top, *rest = name.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin)
    if rest:
        if path.name != "__init__.py":
            return None
        path = path.parent.joinpath(*rest)
        path = path / "__init__.py" if path.is_dir() else path.with_name(f"{path.name}.py")
    return path if path.suffix == ".py" and path.is_file() else None


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
