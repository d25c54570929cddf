"""The `_extra_state` of an op as bytes: Transformer Engine's pickle of delayed scales, written and read without it.

What is written, Transformer Engine 2.20 loads (it asks for NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE=1, as for its own):

    {"forward": {"recipe": DelayedScaling, "scale_fwd": [tensors], "amax_history_fwd": [length, tensors],
                 "extra_fp8_variables": {}}, "backward": {… "_bwd" …}}

What is read may have been written there. A pickle can name any function to be called; the reader here knows those that
make tensors, gives a thing that does nothing for what is Transformer Engine's, and refuses the rest, so no code of a
checkpoint runs.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusible_ops.recipe import DelayedScaling

RECIPES = "transformer_engine.common.recipe"


class _Named(NamedTuple):
    """Something that the reader's process has under this name."""

    module: str
    name: str


class _Made(NamedTuple):
    """An object of this class with these attributes."""

    kind: _Named
    state: dict[str, Any]


class _Got(NamedTuple):
    """`getattr(owner, name)`."""

    owner: _Named
    name: str


_InPython: Any = pickle._Pickler


class _Writer(_InPython):
    """In Python, so that it can write names of what is not here. A value has the same bytes wherever it lies in memory:
    a checkpoint of shards is loaded only into a state of its size.
    """

    dispatch: dict[Any, Any] = _InPython.dispatch.copy()

    def memoize(self, obj: object) -> None:
        """Nothing: pickle looks up by its address what was written before."""

    def save_tensor(self, t: Tensor) -> None:
        """As an archive, not by its storage, which is named after its address."""
        file = io.BytesIO()
        torch.save(t.clone(memory_format=torch.contiguous_format), file)
        self.save(_Named("torch.storage", "_load_from_bytes"))
        self.save((file.getvalue(),))
        self.write(pickle.REDUCE)

    def save_named(self, named: _Named) -> None:
        self.write(pickle.GLOBAL + f"{named.module}\n{named.name}\n".encode())

    def save_made(self, made: _Made) -> None:
        self.save(made.kind)
        self.write(pickle.EMPTY_TUPLE + pickle.NEWOBJ)
        self.save(made.state)
        self.write(pickle.BUILD)

    def save_got(self, got: _Got) -> None:
        self.save(_Named("builtins", "getattr"))
        self.save(got.owner)
        self.save(got.name)
        self.write(pickle.TUPLE2 + pickle.REDUCE)

    dispatch[Tensor] = save_tensor
    dispatch[_Named] = save_named
    dispatch[_Made] = save_made
    dispatch[_Got] = save_got


def written(scales: Mapping[str, Mapping[str, Tensor]], recipes: Mapping[str, DelayedScaling]) -> bytes:
    """scales: {"forward": {"scale_fwd": …, "amax_history_fwd": …}, "backward": …}. recipes: of each direction."""
    state = {
        mode: {"recipe": _theirs(recipes[mode]), **tensors, "extra_fp8_variables": {}}
        for mode, tensors in scales.items()
    }
    file = io.BytesIO()
    _Writer(file, protocol=4).dump(state)
    return file.getvalue()


def _theirs(recipe: DelayedScaling) -> _Made:
    """Transformer Engine's recipe with these fields; functions among them are left at its defaults."""
    algorithm = recipe.amax_compute_algo
    return _Made(
        _Named(RECIPES, "DelayedScaling"),
        {
            "margin": recipe.margin,
            "fp8_format": _Got(_Named(RECIPES, "Format"), recipe.fp8_format.name),
            "amax_history_len": recipe.amax_history_len,
            "amax_compute_algo": algorithm if isinstance(algorithm, str) else "max",
            "scaling_factor_compute_algo": None,
            "reduce_amax": recipe.reduce_amax,
            "fp8_dpa": recipe.fp8_dpa,
            "fp8_mha": recipe.fp8_mha,
            "backward_override": recipe.backward_override,
        },
    )


def read(data: bytes) -> dict[str, dict[str, Any]]:
    """What `written`, or Transformer Engine, wrote; what is no tensor in it means nothing.

    `pickle.UnpicklingError` for a name that is not known, whatever pickle raises for what is no pickle.
    """
    state = _Reader(io.BytesIO(data)).load()
    if not isinstance(state, dict):
        raise pickle.UnpicklingError(f"a {type(state).__name__} is no state of an op")
    return state


class _Inert:
    """Anything of Transformer Engine's: made from whatever, and ignored."""

    def __new__(cls, *args: Any, **kwargs: Any) -> _Inert:
        return object.__new__(cls)

    def __setstate__(self, state: Any) -> None:
        pass


def _stored(data: bytes) -> Any:
    """A storage, or a tensor."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _tensor(storage: Any, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: Any) -> Tensor:
    return torch.empty(0, dtype=storage.dtype).set_(storage, offset, size, stride)


_KNOWN = {
    ("builtins", "getattr"): lambda owner, name: _Inert(),
    ("collections", "OrderedDict"): OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch.storage", "_load_from_bytes"): _stored,
}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] == "transformer_engine":
            return _Inert
        if (module, name) in _KNOWN:
            return _KNOWN[module, name]
        raise pickle.UnpicklingError(f"{module}.{name} is nothing that an op's state is made of")
