"""Sequentials inside a graph of torch.compile.

Dynamo meets a run of ops as one opaque call, `run`, whose arguments are a name, tensors and parameters; AOTAutograd
then runs it on tensors without memory and records what it calls, forward and backward: operators of `cute_kernels.ops`
(the functions of `reference` too, where ops are unfused) and PyTorch's. So a graph has no break, row counts stay
symbols, and gradients are those of the ops' own backward.

Importing it imports Dynamo: only a `Sequential` that is being compiled does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fusible_ops import functional
from fusible_ops.autocast_mode import current_recipe
from fusible_ops.named import module_called
from fusible_ops.op import BasicOperation, FusibleOperation
from fusible_ops.quantized_tensor import QuantizedTensor

if TYPE_CHECKING:
    from fusible_ops.sequential import Sequential


def forward(sequential: Sequential, x: Tensor, extra_inputs: Sequence[Tensor], op_kwargs: Any) -> Any:
    """What `sequential` does, as Dynamo may trace it. Where it has to, it breaks the graph and runs as it is."""
    runs = _runs(sequential)
    if op_kwargs or current_recipe() is not None or any(_acts_beside(op) for _, ops in runs for op in ops):
        return _outside(sequential, x, *extra_inputs, op_kwargs=op_kwargs)
    name, at = name_of(sequential), 0
    extra_outputs: list[Tensor] = []
    for index, (module, ops) in enumerate(runs):
        if module is not None:
            x = module(x)
            continue
        count = sum([op._extra_input_channels.count(None) for op in ops])
        parameters = [p for op in ops for p in op.parameters()]
        x = run(name, index, x, list(extra_inputs[at : at + count]), parameters)
        at += count
        if any([any(op._extra_output_to_caller) for op in ops]):
            x, *more = x
            extra_outputs += more
    if at != len(extra_inputs):
        raise ValueError(f"Expected {at} extra inputs but got {len(extra_inputs)}")
    return (x, *extra_outputs) if extra_outputs else x


def _runs(sequential: Sequential) -> list[tuple[nn.Module | None, list[BasicOperation]]]:
    """(a plain module, nothing) or (None, the basic ops of a run), in order."""
    runs: list[tuple[nn.Module | None, list[BasicOperation]]] = []
    for module in sequential._modules.values():
        if not isinstance(module, FusibleOperation):
            runs.append((module, []))
        elif runs and runs[-1][0] is None:
            runs[-1][1].extend(module.fusible_parts())
        else:
            runs.append((None, list(module.fusible_parts())))
    return runs


def name_of(sequential: Any) -> str:
    """What is behind this Sequential, in words: all that, with its parameters, says what it does."""
    name = sequential.options_key
    for module, ops in _runs(sequential):
        name += " |" if module is None else " | module"
        for op in ops:
            if not op.graph_key:
                return sequential.own_name
            name += " " + op.graph_key
            for channel in (*op._extra_input_channels, *op._extra_output_channels):
                name += " " + (channel or "-")
            for public in op._extra_output_to_caller:
                name += " public" if public else " hidden"
    return name


def _acts_beside(op: BasicOperation) -> bool:
    """Whether it does what no graph holds: writes into `main_grad`, puts work off, keeps tensors in host memory, or has
    quantised parameters.
    """
    if op.offload or getattr(op, "accumulate_into_main_grad", False) or getattr(op, "delay_wgrad_compute", False):
        return True
    return any([isinstance(p, QuantizedTensor) for p in op.parameters()])


_REASON = "in fusible_ops, recipes, op_kwargs, main_grad, delayed gradients and quantised parameters need eager mode"


@torch.compiler.disable(reason=_REASON)
def _outside(sequential: Sequential, x: Tensor, *extra_inputs: Tensor, op_kwargs: Mapping[Any, Any] | None) -> Any:
    return sequential(x, *extra_inputs, op_kwargs=op_kwargs)


@torch.compiler.allow_in_graph
def run(name: str, index: int, x: Tensor, extra_inputs: list[Tensor], parameters: list[Tensor]) -> Any:
    """Run number `index` of a Sequential of this name, with these tensors as its parameters."""
    group = module_called(name, name_of).groups()[index]  # type: ignore[operator]
    with _parameters_are(group.basic_ops, parameters):
        return group(x, *extra_inputs)


run_linear = torch.compiler.allow_in_graph(functional.run_linear)
run_mlp = torch.compiler.allow_in_graph(functional.run_mlp)


class Outside:
    """The same two under a recipe: each breaks the graph and runs as it is."""

    run_linear = staticmethod(torch.compiler.disable(functional.run_linear, reason=_REASON))
    run_mlp = staticmethod(torch.compiler.disable(functional.run_mlp, reason=_REASON))


@contextlib.contextmanager
def _parameters_are(ops: Sequence[nn.Module], tensors: Sequence[Tensor]) -> Iterator[None]:
    """While it is entered, the ops have these tensors as parameters, in the order of `parameters()`."""
    places = [(module, key) for op in ops for module in op.modules() for key in _own(module)]
    former = [module._parameters[key] for module, key in places]
    try:
        for (module, key), tensor in zip(places, tensors, strict=True):
            module._parameters[key] = tensor  # type: ignore[assignment]
        yield
    finally:
        for (module, key), parameter in zip(places, former, strict=True):
            module._parameters[key] = parameter


def _own(module: nn.Module) -> list[str]:
    return [key for key, p in module._parameters.items() if p is not None]
