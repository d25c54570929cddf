"""Names of modules, by which a graph of torch.compile finds them again: a graph holds strings and tensors alone."""

from __future__ import annotations

import itertools
import weakref

from torch import nn

_modules: weakref.WeakValueDictionary[str, nn.Module] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def name_of(module: nn.Module) -> str:
    """A new name for it, of this process, by which `module_called` finds it as long as it lives."""
    name = f"{type(module).__name__} {next(_numbers)}"
    _modules[name] = module
    return name


def module_called(name: str) -> nn.Module:
    """The module with this name. RuntimeError if it is gone."""
    found = _modules.get(name)
    if found is None:
        raise RuntimeError(f"{name}, which a compiled graph calls, is gone")
    return found
