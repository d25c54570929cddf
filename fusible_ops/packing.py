"""pack_glu_weights_: gate and up rows of weights in blocks, as some kernels want them; checkpoints stay as they were.

The rows of the linear before a gated activation are reordered in memory, once, and with them its bias, gradients,
`main_grad` and the state of optimizers. `state_dict` and `load_state_dict` turn them back and forth, so that a
checkpoint does not tell whether a model is packed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from cute_kernels.limits import INTERLEAVES
from fusible_ops.activations import ActivationOperation
from fusible_ops.grouped_linear import GroupedLinear
from fusible_ops.linear import BasicLinear, Bias
from fusible_ops.op import BasicOperation, Packing
from fusible_ops.quantized_tensor import QuantizedTensor


@dataclass(frozen=True)
class _Pair:
    """A gated activation, the linear before it and that one's Bias, if there is one. owner: how errors call them."""

    linears: tuple[BasicOperation, ...]
    act: ActivationOperation
    width: int
    owner: str

    def refusal(self, block: int) -> str | None:
        """Why its rows cannot be packed in blocks of `block`."""
        if any(op.packing for op in self.linears):
            return "is packed already"
        if self.act.glu_interleave == block:
            return f"needs no packing: its rows lie in blocks of {block}, as glu_interleave_size says"
        if (self.width // 2) % block:
            return f"has {self.width // 2} gate columns, needs a multiple of {block}"
        if any(isinstance(p, QuantizedTensor) for op in self.linears for p in op.parameters()):
            return "holds quantised weights; pack before they are quantised"
        return None


def pack_glu_weights_(model: nn.Module, interleave: int = 32, optimizers: Iterable[torch.optim.Optimizer] = ()) -> None:
    """Reorder the rows before every gated activation of the model's `Sequential`s: blocks of `interleave` gate rows,
    then as many up rows. The model computes what it did; its state_dict, and those of optimizers, stay as they were.

    optimizers: those that hold its parameters. One that is made later: see `follow_packing`.
    Errors: ValueError, naming the ops, for rows that are packed, lie so already or do not divide, for quantised
    weights, for an op or a parameter that is also used where its rows must stay, if there is no gated activation, for a
    block size that no kernel has; nothing is changed then.
    """
    from fusible_ops.sequential import Sequential

    optimizers = list(optimizers)
    if interleave not in INTERLEAVES:
        raise ValueError(f"interleave is {interleave!r}, needs one of {', '.join(map(str, INTERLEAVES))}")
    sequentials = [module for module in model.modules() if isinstance(module, Sequential)]
    runs = [run for s in sequentials for run in s.named_basic_ops()]
    pairs = list(_pairs(runs))
    if not pairs:
        _refuse("there is no gated activation after a linear")
    for pair in pairs:
        why = pair.refusal(interleave)
        if why is not None:
            _refuse(f"{pair.owner} {why}")
    _check_shared(model, runs, pairs)
    turned: set[int] = set()
    with torch.no_grad():
        for pair, packing in [(pair, Packing(pair.act.glu_interleave, interleave)) for pair in pairs]:
            for op in pair.linears:
                for name, p in op.named_parameters():
                    if id(p) not in turned:
                        _pack_parameter_(p, packing.into_memory, op.output_dim(name), optimizers)
                        turned.add(id(p))
                op.packing = packing
            pair.act.glu_interleave = interleave
    for s in sequentials:
        s.forget_plans()
    for optimizer in optimizers:
        follow_packing(model, optimizer)


def follow_packing(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """From now on the optimizer's `state_dict` gives, and `load_state_dict` takes, the state of packed parameters in
    the order that the model's own state_dict has.
    """

    def turned(state_dict: dict[str, Any], into_memory: bool) -> dict[str, Any]:
        packed = {id(p): (packing, op.output_dim(name)) for packing, op, name, p in _packed(model)}
        numbers = [n for group in state_dict["param_groups"] for n in group["params"]]
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        state = dict(state_dict["state"])
        for number, p in zip(numbers, parameters, strict=False):
            if id(p) in packed and number in state:
                packing, dim = packed[id(p)]
                turn = packing.into_memory if into_memory else packing.out_of_memory
                state[number] = {
                    name: turn(value, dim) if _is_like(value, p) else value for name, value in state[number].items()
                }
        return {**state_dict, "state": state}

    optimizer.register_state_dict_post_hook(lambda _, state_dict: turned(state_dict, into_memory=False))
    optimizer.register_load_state_dict_pre_hook(lambda _, state_dict: turned(state_dict, into_memory=True))


_Named = list[tuple[BasicOperation, str]]
"""The basic ops of a run, with what errors call them."""


def _pairs(named: Iterable[_Named]) -> Iterator[_Pair]:
    """Every gated activation that follows a linear, of each run of basic ops."""
    for run in named:
        for at, (act, title) in enumerate(run):
            if not (isinstance(act, ActivationOperation) and act.activation.is_glu):
                continue
            count = 2 if at > 1 and isinstance(run[at - 1][0], Bias) else 1
            linears = [op for op, _ in run[max(at - count, 0) : at]]
            if linears and isinstance(linears[0], GroupedLinear | BasicLinear):
                owner = f"{run[at - count][1]}, before {title},"
                yield _Pair(tuple(linears), act, linears[0].out_features, owner)


def _refuse(why: str) -> NoReturn:
    raise ValueError(f"pack_glu_weights_: {why}")


def _check_shared(model: nn.Module, runs: Sequence[_Named], pairs: Sequence[_Pair]) -> None:
    """ValueError if an op or a parameter of a pair is also used where its rows would have to lie otherwise."""
    uses = Counter(op for run in runs for op, _ in run)
    packed = Counter(op for pair in pairs for op in (*pair.linears, pair.act))
    rows: dict[int, tuple[object, ...]] = {}
    for pair in pairs:
        for op in (*pair.linears, pair.act):
            if uses[op] != packed[op]:
                _refuse(f"{pair.owner} shares {op.label()} with a run that is not packed")
            for name, p in op.named_parameters():
                how = pair.act.glu_interleave, op.output_dim(name), pair.width
                if rows.setdefault(id(p), how) != how:
                    _refuse(f"{pair.owner} shares {name} with an op whose rows lie otherwise")
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            if module not in packed and id(p) in rows:
                _refuse(f"{name} of a {type(module).__name__}, which is not packed, is a parameter of one that is")


def _pack_parameter_(
    p: Parameter, turn: Callable[[Tensor, int], Tensor], dim: int, optimizers: Iterable[torch.optim.Optimizer]
) -> None:
    """Turn a parameter's values and all that lies as it does, in place."""
    held = [p, p.grad, getattr(p, "main_grad", None)]
    held += [value for o in optimizers for value in o.state.get(p, {}).values() if _is_like(value, p)]
    for t in held:
        if t is not None:
            values = t.view(p.shape)
            values.copy_(turn(values.clone(), dim))


def _packed(model: nn.Module) -> Iterator[tuple[Packing, BasicOperation, str, Parameter]]:
    """(how, op, name in it, parameter) of all that is packed."""
    for op in model.modules():
        if isinstance(op, BasicOperation) and op.packing is not None:
            for name, p in op.named_parameters(recurse=False):
                yield op.packing, op, name, p


def _is_like(value: object, p: Parameter) -> bool:
    return isinstance(value, Tensor) and value.shape == p.shape
