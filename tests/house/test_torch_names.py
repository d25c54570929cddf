"""Every private name of torch that the packages use: listed here, and there in the torch that is installed."""

from __future__ import annotations

import ast
import operator

import pytest
import torch

from tests.house.sources import PACKAGES, name, python_files

NAMES = (
    "_C._are_functorch_transforms_active",
    "_C._autograd._profiler_enabled",
    "_C._cuda_getCurrentRawStream",
    "_C._current_graph_task_id",
    "_C._dynamo.guards.TensorGuards",
    "_C._is_any_autocast_enabled",
    "_C._len_torch_dispatch_stack",
    "_foreach_copy_",
    "_foreach_zero_",
    "_subclasses.fake_tensor.FakeTensor",
    "_subclasses.functional_tensor.FunctionalTensor",
    "ops.aten._unsafe_view",
    "utils._python_dispatch._disable_current_modes",
    "utils._pytree.tree_map",
)
"""Of the module torch."""

ATTRIBUTES = {
    "Tensor": (torch.Tensor, ("_is_view", "_make_wrapper_subclass", "_version")),
    "UntypedStorage": (torch.UntypedStorage, ("_cdata",)),
    "Module": (
        torch.nn.Module(),
        ("_apply", "_load_from_state_dict", "_modules", "_parameters", "_save_to_state_dict"),
    ),
    "Function": (torch.autograd.Function, ("maybe_clear_saved_tensors",)),  # undocumented; looked for before each use
    "OpOverload": (torch.ops.aten.add.Tensor, ("_schema",)),
}
"""Of its objects."""

OURS = {"_values"}
"""Attributes of our classes that some object of torch has too."""


def _needs_cuda(dotted: str) -> bool:
    return "_cuda_" in dotted and not torch.backends.cuda.is_built()


@pytest.mark.parametrize("dotted", NAMES)
def test_torch_has_it(dotted: str) -> None:
    if _needs_cuda(dotted):
        pytest.skip("a build of torch without CUDA")
    assert operator.attrgetter(dotted)(torch) is not None


@pytest.mark.parametrize(("kind", "attribute"), [(k, a) for k, (_, names) in ATTRIBUTES.items() for a in names])
def test_its_objects_have_it(kind: str, attribute: str) -> None:
    assert hasattr(ATTRIBUTES[kind][0], attribute)


def test_the_list_is_complete_and_no_longer_than_that() -> None:
    names, attributes = set(), set()
    for path in python_files(*PACKAGES):
        for node in ast.walk(ast.parse(path.read_text(), name(path))):
            if isinstance(node, ast.ImportFrom) and not node.level:
                names.update(f"{node.module}.{alias.name}" for alias in node.names)
            elif isinstance(node, ast.Attribute):
                names.add(ast.unparse(node))
                attributes.add(node.attr)
    private = {n.removeprefix("torch.") for n in names if n.startswith("torch.") and any(map(_private, n.split(".")))}
    whole = {n for n in private if not any(other.startswith(f"{n}.") for other in private)}
    assert whole == set(NAMES)
    listed = {attribute for _, names in ATTRIBUTES.values() for attribute in names}
    theirs = {attribute for kind, _ in ATTRIBUTES.values() for attribute in dir(kind)}
    assert {a for a in attributes & theirs if _private(a)} - OURS == {a for a in listed if _private(a)}


def _private(word: str) -> bool:
    return word.startswith("_") and not word.startswith("__")
