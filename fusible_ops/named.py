"""Names by which a graph of torch.compile finds a Sequential again: a graph holds strings and tensors alone.

Sequentials that do the same with their parameters have the same name, so that layers which are compiled one by one
share a graph. Only where an op, or a rule set, is somebody else's has a Sequential a name of its own.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import TypeVar

from torch import nn

_modules: weakref.WeakValueDictionary[str, nn.Module] = weakref.WeakValueDictionary()
_numbers = itertools.count()

Module = TypeVar("Module", bound=nn.Module)


def own_name(module: nn.Module) -> str:
    """A name that no other module of this process has. The module is known by it as long as it lives."""
    name = f"{type(module).__name__} {next(_numbers)}"
    _modules[name] = module
    return name


def module_called(name: str, name_of: Callable[[nn.Module], str]) -> nn.Module:
    """The newest living module whose name, as `name_of` says it, is this one. RuntimeError if there is none."""
    for module in reversed(list(_modules.values())):
        if name_of(module) == name:
            return module
    raise RuntimeError(f"no module is like the one that this graph was made for: {name}")
