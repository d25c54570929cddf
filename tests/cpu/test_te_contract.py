"""Names, signatures, state_dict keys and errors of Transformer Engine's ops (`tests/te_contract.py`): ours have them.

Where the package is installed (`tests/te_wheel.py`), the same data is held against it.
"""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import fusible_ops
from tests.te_contract import DOTTED, ERRORS, METHODS, NAMES, SIGNATURES, STATE_KEYS
from tests.te_wheel import load


@pytest.fixture(params=["ours", "theirs"])
def kit(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Our package, or theirs."""
    yield fusible_ops if request.param == "ours" else load()


def stated(text: str) -> dict[str, inspect.Parameter]:
    """The parameters of `def f(text)`."""
    scope: dict[str, Any] = {}
    exec(f"def f({text}): ...", scope)
    return dict(inspect.signature(scope["f"]).parameters)


def test_the_data_is_about_what_there_is() -> None:
    assert set(SIGNATURES) | {"Sequential", "Identity"} <= {*NAMES} and len(NAMES) == len(set(NAMES))


@pytest.mark.parametrize("name", [*NAMES, *DOTTED])
def test_it_is_there(kit: Any, name: str) -> None:
    for module in ("fuser", "op", "sequential", "linear"):
        assert hasattr(kit, module)
    assert operator.attrgetter(name)(kit) is not None


@pytest.mark.parametrize("name", SIGNATURES)
def test_it_takes_the_same_arguments(kit: Any, name: str) -> None:
    """Same names, kinds, defaults and order; ours may take more, by keyword."""
    found = dict(inspect.signature(getattr(kit, name)).parameters)
    wanted = stated(SIGNATURES[name])
    more = {key: p for key, p in found.items() if key not in wanted}
    assert [(p.name, p.kind, p.default) for p in found.values() if p.name in wanted] == [
        (p.name, p.kind, p.default) for p in wanted.values()
    ]
    assert all(p.kind is p.KEYWORD_ONLY and p.default is not p.empty for p in more.values()), more
    assert not more or kit is fusible_ops


@pytest.mark.parametrize(("owner", "method"), [(owner, method) for owner, own in METHODS.items() for method in own])
def test_methods_take_the_same_arguments(kit: Any, owner: str, method: str) -> None:
    wanted = stated(METHODS[owner][method]).values()
    _, *found = inspect.signature(getattr(getattr(kit, owner), method)).parameters.values()
    assert [p.kind for p in found] == [p.kind for p in wanted]
    by_name = [(p.name, p.default) for p in wanted if p.kind is p.KEYWORD_ONLY]
    assert [(p.name, p.default) for p in found if p.kind is p.KEYWORD_ONLY] == by_name


@pytest.mark.parametrize("name", STATE_KEYS)
def test_state_dict_keys(kit: Any, name: str) -> None:
    make, keys = STATE_KEYS[name]
    state = make(kit).state_dict()
    assert list(state) == keys
    for key, value in state.items():
        if key.endswith("_extra_state"):
            assert value.dtype is torch.uint8 and value.numel() == 0


@pytest.mark.parametrize("name", ERRORS)
def test_errors(kit: Any, name: str) -> None:
    call, error, text = ERRORS[name]
    with pytest.raises(error, match=text and re.escape(text)):
        call(kit)


def test_the_keys_of_buffers(kit: Any) -> None:
    keys = kit.basic.grouped_linear
    assert (keys.OUTPUT_BUFFER_KEY, keys.GRAD_INPUT_BUFFER_KEY) == ("output", "grad_input")
