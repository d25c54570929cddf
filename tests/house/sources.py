"""The repository's own files and their imports, read as text and as syntax trees; nothing is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("cute_kernels", "patterns", "fusible_ops")
OPTIONAL = ("cutlass", "cuda", "tvm_ffi", "cudnn", "transformer_engine", "transformers", "peft", "triton")
"""Import names of packages that may be absent, or are slow to import."""


def python_files(*folders: str) -> list[Path]:
    """Every .py file under the folders, in a fixed order."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def module(path: Path) -> str:
    """The dotted name that a file is imported by."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path, *, module_level_only: bool = False) -> set[str]:
    """Dotted names of the modules that a file imports, relative ones resolved.

    `from a import b` yields both `a` and `a.b`. What stands under `if TYPE_CHECKING:` is no import. With
    `module_level_only`, neither is what stands in a function.
    """
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    found = set()
    for node in _walk(ast.parse(path.read_text()), module_level_only):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            origin = ".".join((*base, *(node.module or "").split("."))).strip(".")
            found.add(origin)
            found.update(f"{origin}.{alias.name}" for alias in node.names)
    return found


def imports_any(path: Path, *modules: str, module_level_only: bool = False) -> set[str]:
    """Those imports of a file that are one of `modules` or lie in one."""
    return {
        found
        for found in imports(path, module_level_only=module_level_only)
        if any(found == module or found.startswith(module + ".") for module in modules)
    }


def _walk(node: ast.AST, module_level_only: bool) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            continue
        if module_level_only and isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        yield child
        yield from _walk(child, module_level_only)
