"""What commands call a model: a shape, a JSON file, or something in a Python module or file; as an nn.Module."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import json
import os
import sys
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
        described = json.loads(Path(text).read_text())
        return nn.ModuleList(mlp(**layer) for layer in (described if isinstance(described, list) else [described]))
    if text.replace(",", "").isdigit():
        sizes = [int(size) for size in text.split(",")]
        if len(sizes) != 3:
            raise NoModel(f"{text!r} has {len(sizes)} sizes, needs three: hidden, intermediate, experts")
        return mlp(sizes[0], sizes[1], sizes[2])
    place, _, name = text.rpartition(":")
    if not place:
        raise NoModel(f"{text!r} is no model\n{HELP}")
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)  # as `python -m` has it
    found = getattr(_file(Path(place)) if place.endswith(".py") else importlib.import_module(place), name)
    if not isinstance(found, nn.Module):
        found = found(device="meta") if "device" in inspect.signature(found).parameters else found()
    if not isinstance(found, nn.Module):
        raise NoModel(f"{text} gave a {type(found).__name__}, needs an nn.Module")
    return found


def _file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.exists():
        raise NoModel(f"there is no Python file {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
