"""What commands call a model: a shape, a JSON file, or something in a Python module or file; as an nn.Module."""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import inspect
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fusible_ops
from fusible_ops.activations import ActivationOperation

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}
RECIPES = tuple(
    name
    for name, kind in vars(fusible_ops).items()
    if isinstance(kind, type) and issubclass(kind, fusible_ops.Recipe) and kind is not fusible_ops.Recipe
)
HELP = """\
MODEL is one of
  H,I,G                 a grouped MLP in BF16 without bias: hidden, intermediate, experts; G = 0: a dense one
  model.json            {"hidden": H, "intermediate": I, "experts": G, "activation": "ScaledSwiGLU",
                        "dtype": "bfloat16", "linear": {"bias": true, ...}, "act": {"glu_interleave_size": 32}},
                        or a list of such
  package.module:name   an nn.Module, or a function that makes one (given device="meta" if it takes a device)
  path/to/file.py:name  the same"""


class NoModel(ValueError):
    """What was given to a command names no model."""


def mlp(
    hidden: int,
    intermediate: int,
    experts: int = 0,
    activation: str = "",
    dtype: str = "bfloat16",
    linear: dict[str, Any] | None = None,
    act: dict[str, Any] | None = None,
    device: str = "meta",
) -> fusible_ops.Sequential:
    """Linear, activation, linear. experts: 0 for a dense one. activation: name of an op, by default ScaledSwiGLU, or
    SwiGLU if dense. linear, act: further arguments of the linears (bias is off) and of the activation.
    """
    name = activation or ("ScaledSwiGLU" if experts else "SwiGLU")
    middle = getattr(fusible_ops, name, None)
    if not (isinstance(middle, type) and issubclass(middle, ActivationOperation)):
        raise NoModel(f"activation is {name!r}, needs the name of an activation op, ScaledSwiGLU say")
    op = middle(**(act or {}))
    wide = intermediate * op.activation.halves
    how = {"bias": False, "device": device, "dtype": getattr(torch, dtype), **(linear or {})}
    make: Any = functools.partial(fusible_ops.GroupedLinear, experts) if experts else fusible_ops.Linear
    return fusible_ops.Sequential(make(hidden, wide, **how), op, make(intermediate, hidden, **how))


def load(text: str) -> nn.Module:
    """The model that `text` (see `HELP`) names; modules are found in the current directory too. Raises NoModel."""
    if text.endswith(".json"):
        return _described(text)
    if text.replace(",", "").isdigit():
        sizes = [int(size) for size in text.split(",") if size]
        if len(sizes) != 3:
            raise NoModel(f"{text!r} has {len(sizes)} sizes, needs three: hidden, intermediate, experts")
        return _layer(text, dict(zip(("hidden", "intermediate", "experts"), sizes, strict=True)))
    place, _, name = text.rpartition(":")
    if not place:
        raise NoModel(f"{text!r} is no model\n{HELP}")
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)  # as `python -m` has it
    found = getattr(_file(Path(place)) if place.endswith(".py") else _module(place), name, None)
    if not isinstance(found, nn.Module):
        if not callable(found):
            raise NoModel(f"{place} has no {name!r} that is an nn.Module, or a function that makes one")
        parameters = _parameters(text, found)
        if missing := [p.name for p in parameters if _must_be_given(p) and p.name != "device"]:
            raise NoModel(f"{text} wants arguments ({', '.join(missing)}); name a function that wants none")
        found = found(device="meta") if any(p.name == "device" for p in parameters) else found()
    if not isinstance(found, nn.Module):
        raise NoModel(f"{text} gave a {type(found).__name__}, needs an nn.Module")
    return found


def _described(file: str) -> nn.Module:
    """The layers of a JSON file."""
    try:
        described = json.loads(Path(file).read_text())
    except (OSError, ValueError) as error:
        raise NoModel(f"{file} cannot be read: {error}") from None
    return nn.ModuleList(_layer(file, layer) for layer in (described if isinstance(described, list) else [described]))


def _layer(source: str, described: Any) -> fusible_ops.Sequential:
    try:
        return mlp(**described)
    except (TypeError, ValueError, AttributeError) as error:
        raise NoModel(f"{source}: {error}") from None


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # it is there, and something that it imports is not
        raise NoModel(f"there is no Python module {name}") from None


def _parameters(text: str, function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except ValueError:
        raise NoModel(f"{text} is no function that makes an nn.Module") from None


def _must_be_given(p: inspect.Parameter) -> bool:
    return p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)


def _file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.exists():
        raise NoModel(f"there is no Python file {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def positive(text: str) -> int:
    """An option that is a count."""
    if (count := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return count
