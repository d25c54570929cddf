"""Transformer Engine's operation fuser for tests: the real package where it is whole and has a GPU, else the Python of
its wheel.

The wheel `transformer-engine` has all of the Python (`pip install --no-deps transformer-engine==2.20.2`), but what it
calls is compiled and comes in others. Without those, `load` puts objects in their place that do nothing, so that the
fuser, the ops and their parameters are Transformer Engine's own, while their arithmetic is missing: what can be tested
is what our operations replace.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import sys
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._triton import has_triton_package

COMPILED = "transformer_engine_torch"
ABSENT = (COMPILED, "triton", "onnxscript", "onnx", "nvdlfw_inspect", "pydantic", "einops", "cudnn", "flash_attn")
DTYPES = ["kByte", "kInt32", "kFloat32", "kFloat16", "kBFloat16", "kFloat8E4M3", "kFloat8E5M2", "kFloat4E2M1"]
ATTENTION = ["NVTE_No_Backend", "NVTE_F16_arbitrary_seqlen", "NVTE_FP8"]
PARTS = ("tensor", "constants", "module", "ops")
"""Of `transformer_engine.pytorch`, in an order in which their imports do not go round."""


@cache
def load() -> Any:
    """`transformer_engine.pytorch.ops`. Skips the test where there is no Transformer Engine."""
    if importlib.util.find_spec("transformer_engine") is None:
        pytest.skip("needs transformer-engine (pip install --no-deps transformer-engine==2.20.2 will do)")
    if is_real():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what its imports use that torch has deprecated
            return importlib.import_module("transformer_engine.pytorch.ops")
    with _nothing_compiled():
        for name in PARTS:
            importlib.import_module(f"transformer_engine.pytorch.{name}")
    return sys.modules["transformer_engine.pytorch.ops"]


def is_real() -> bool:
    """Whether `load` gives the package with its compiled parts: they are there, and a GPU."""
    spec = importlib.util.find_spec("transformer_engine")
    folders = [] if spec is None else [Path(each) for each in spec.submodule_search_locations or ()]
    return torch.cuda.is_available() and any(map(_has_compiled, folders))


def _has_compiled(folder: Path) -> bool:
    """Whether the package in this folder has its extension for torch: beside it, in it, or as wheels have it, where
    Transformer Engine alone finds it and `import` does not.
    """
    places = folder.parent, folder, folder / "wheel_lib"
    return any(file for place in places for file in place.glob(f"{COMPILED}*.so"))


class _Nothing(type):
    """A class that stands for anything: calling it, or asking for what it has, gives more of the kind."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _nothing(name)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args and callable(args[0]) else type.__call__(cls)

    def __iter__(cls) -> Iterator[Any]:
        return iter(())

    def __int__(cls) -> int:
        return sum(map(ord, cls.__name__))

    def __or__(cls, other: Any) -> Any:
        return cls

    def __ror__(cls, other: Any) -> Any:
        return cls

    def __getitem__(cls, item: Any) -> Any:
        return cls


def _nothing(name: str) -> Any:
    members = {
        "__getattr__": lambda self, name: _nothing(name),
        "__call__": lambda self, *args, **kwargs: args[0] if args and callable(args[0]) else self,
        "__getitem__": lambda self, item: self,
    }
    return _Nothing(name, (), members)


class _Module(types.ModuleType):
    __path__: list[str] = []  # noqa: RUF012 (a package)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _nothing(name)


class _Finder:
    """Finds the absent packages, empty."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.split(".")[0] in ABSENT:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _package(name: str, folder: str) -> types.ModuleType:
    """A package without running its `__init__`, which would load libraries."""
    made = types.ModuleType(name)
    made.__path__ = [folder]
    made.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    sys.modules[name] = made
    return made


@contextmanager
def _nothing_compiled() -> Iterator[None]:
    spec = importlib.util.find_spec("transformer_engine")
    (folder,) = spec.submodule_search_locations  # type: ignore[union-attr, misc]
    has_triton_package()  # torch remembers the answer, and would compile as if the empty package were one
    finder, known = _Finder(), {name for name in sys.modules if name.split(".")[0] in ABSENT}
    sys.meta_path.insert(0, finder)  # type: ignore[arg-type]
    device = mock.patch.multiple(
        torch.cuda, get_device_capability=lambda *_: (9, 0), current_device=lambda: 0, get_device_properties=mock.Mock()
    )
    try:
        with device, mock.patch.dict(os.environ, {"NVTE_PROJECT_BUILDING": "1"}):
            compiled = importlib.import_module(COMPILED)
            compiled.DType = enum.IntEnum("DType", DTYPES, start=0)  # type: ignore[attr-defined, misc]
            compiled.NVTE_Fused_Attn_Backend = enum.IntEnum(  # type: ignore[attr-defined, misc]
                "NVTE_Fused_Attn_Backend", ATTENTION, start=-1
            )
            importlib.import_module("pydantic").dataclasses = dataclasses  # type: ignore[attr-defined]
            sys.modules["pydantic.dataclasses"] = dataclasses
            top = _package("transformer_engine", folder)
            top.__version__ = importlib.metadata.version("transformer_engine")
            top.common = importlib.import_module("transformer_engine.common")  # type: ignore[attr-defined]
            top.common.load_framework_extension = lambda *_: None
            top.pytorch = _package("transformer_engine.pytorch", f"{folder}/pytorch")  # type: ignore[attr-defined]
            yield
    finally:
        sys.meta_path.remove(finder)  # type: ignore[arg-type]
        for name in [name for name in sys.modules if name.split(".")[0] in ABSENT and name not in known]:
            if name != COMPILED:
                del sys.modules[name]
