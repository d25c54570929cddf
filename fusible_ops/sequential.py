"""Sequential: a list of modules in which runs of adjacent ops are fused."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from cute_kernels.scheduling import Sharing
from cute_kernels.target import Target
from fusible_ops import fusions
from fusible_ops.autocast_mode import current_recipe, named
from fusible_ops.fuser import AUTOMATIC, ON_UNFUSED, OperationFuser
from fusible_ops.named import own_name
from fusible_ops.op import BasicOperation, FusibleOperation
from fusible_ops.packing import pack_glu_weights_
from fusible_ops.planning import foreseen
from fusible_ops.recipe import Recipe
from patterns import RULES, Rule, check_rules, explain

Group = OperationFuser | nn.Module
OPTIONS = ("rules", "on_unfused", "scheduler", "sm_margin", "deterministic")
"""What a Sequential is made with beside its modules; a change makes its runs anew."""


def _require_module(module: object) -> None:
    """TypeError unless it is an nn.Module."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"a Sequential holds nn.Modules, got {type(module).__name__}")


class Sequential(nn.Module):
    """Modules one after another; maximal runs of adjacent ops are planned together and run as one autograd function.

    `Sequential(*modules)` or `Sequential({name: module})`. Modules that are no ops are called with the one tensor.

    Call: `seq(x, *extra_inputs, op_kwargs=None)`. Extra inputs go to the ops in order, each taking its own: a grouped
    MLP `Sequential(GroupedLinear, ScaledSwiGLU, GroupedLinear)` is called as `mlp(x, split_sizes, probs, split_sizes)`.
    op_kwargs: {index or op: {name: value}}, keyword arguments for single ops.

    rules: the rule set, a tuple of `patterns.Rule`; `()` fuses nothing. on_unfused: what happens if an op of a run is
    not fused: "allow", "warn" or "error" (RuntimeError at the first call, with the reason).
    scheduler, sm_margin: how the kernels of fused ops share the device (`cute_kernels.scheduling.Sharing`). "dynamic"
    lets SMs take tiles as they go, so that those which something else holds or slows down get fewer; "static" deals
    them out beforehand; None chooses. sm_margin: SMs that every kernel leaves free. Results are the same bits.
    deterministic: the same bits run after run. False lets cuDNN Frontend's kernels (Blackwell) sum gradients of probs
    and biases by atomics, which saves a pass; elsewhere it changes nothing.

    Errors: ValueError for missing or surplus extra inputs, for widths that do not chain (naming the two ops), for an
    unknown on_unfused or scheduler, for a margin that is negative or, at the first call, leaves no SM; TypeError for a
    rule set that is no tuple of rules, a margin that is no int, a `deterministic` that is no bool.
    Source: the interface is that of transformer_engine.pytorch.ops.Sequential (2.20).
    """

    def __init__(
        self,
        *modules: nn.Module | Mapping[str, nn.Module],
        rules: tuple[Rule, ...] = RULES,
        on_unfused: str = "allow",
        scheduler: str | None = None,
        sm_margin: int = 0,
        deterministic: bool = True,
    ) -> None:
        super().__init__()
        self.own_name = own_name(self)
        self.rules = check_rules(rules)
        self.on_unfused = on_unfused
        self.scheduler, self.sm_margin, self.deterministic = scheduler, sm_margin, deterministic
        self._module_groups: list[Group] | None = None
        self._num_extra_inputs = 0  # of all groups together; known once they are made
        if len(modules) == 1 and isinstance(modules[0], Mapping):
            for name, module in modules[0].items():
                self.add_module(name, module)
        else:
            self.extend(modules)  # type: ignore[arg-type]

    # -- list interface --------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._modules.values())  # type: ignore[arg-type]

    def _key(self, index: int) -> str:
        """The key of the module at `index`."""
        if not isinstance(index, int):
            raise TypeError(f"a Sequential is indexed by int or slice, got {type(index).__name__}")
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} is out of range for {len(self)} modules")
        return list(self._modules)[index]

    def __getitem__(self, index: int | slice) -> nn.Module:
        if isinstance(index, slice):
            return self._like(list(self)[index])
        return self._modules[self._key(index)]  # type: ignore[return-value]

    def __setitem__(self, index: int, module: nn.Module) -> None:
        self.add_module(self._key(index), module)

    def __delitem__(self, index: int | slice) -> None:
        keys = list(self._modules)[index] if isinstance(index, slice) else [self._key(index)]
        for key in keys:
            delattr(self, key)

    def _like(self, modules: Iterable[nn.Module]) -> Sequential:
        """A new container with the same options over the same module objects."""
        return Sequential(*modules, **{name: getattr(self, name) for name in OPTIONS})

    def append(self, module: nn.Module) -> Sequential:
        """Add a module at the end."""
        numbers = [int(key) for key in self._modules if key.isdigit()]
        self.add_module(str(max(numbers, default=-1) + 1), module)
        return self

    def extend(self, modules: Iterable[nn.Module]) -> Sequential:
        """Add modules at the end."""
        for module in list(modules):
            self.append(module)
        return self

    def insert(self, index: int, module: nn.Module) -> Sequential:
        """Put a module before position `index`; keys are numbered anew."""
        _require_module(module)
        modules = list(self)
        modules.insert(index, module)
        self._modules.clear()
        return self.extend(modules)

    def pop(self, index: int = -1) -> nn.Module:
        """Remove and return the module at `index`."""
        module = self[index]
        del self[index]
        return module

    def __add__(self, other: Iterable[nn.Module]) -> Sequential:
        return self._like([*self, *other])

    def __iadd__(self, other: Iterable[nn.Module]) -> Sequential:
        return self.extend(other)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        _require_module(module)
        super().add_module(name, module)
        self._module_groups = None

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "on_unfused" and value not in ON_UNFUSED:
            raise ValueError(f"on_unfused must be one of {', '.join(ON_UNFUSED)}; got {value!r}")
        if name in ("scheduler", "sm_margin", "deterministic"):
            Sharing(**{name: value})  # raises ValueError, TypeError
        super().__setattr__(name, value)
        if isinstance(value, nn.Module) or name in OPTIONS:
            self._module_groups = None
        if name in OPTIONS:
            known = getattr(self, "rules", RULES) is RULES
            options = [f"{key}={getattr(self, key, None)!r}" for key in OPTIONS if key != "rules"]
            self.__dict__["options_key"] = ", ".join(options) if known else self.own_name

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        self._module_groups = None

    def __getstate__(self) -> dict[str, Any]:
        """Plans are made anew after a copy or unpickling; the default rules are those of the reader's version."""
        rules = None if self.rules is RULES else self.rules
        return {**self.__dict__, "_module_groups": None, "rules": rules}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "rules": RULES if state["rules"] is None else state["rules"]})
        self.own_name = own_name(self)
        self.on_unfused = self.on_unfused  # says `options_key` anew

    # -- running ---------------------------------------------------------------------------------------------------

    def _make_module_groups(self) -> list[Group]:
        """Runs of ops as fusers, other modules as they are."""
        groups: list[Group] = []
        run: dict[str, FusibleOperation] = {}

        def close_run() -> None:
            if run:
                sharing = Sharing(self.scheduler, self.sm_margin, self.deterministic)
                fuser = OperationFuser(list(run.values()), list(run), self.rules, self.on_unfused, sharing)
                groups.append(fuser)
                run.clear()

        for name, module in self._modules.items():
            if isinstance(module, FusibleOperation):
                run[name] = module
                continue
            close_run()
            groups.append(module)  # type: ignore[arg-type]
        close_run()
        return groups

    def groups(self) -> list[Group]:
        """The runs and modules in order; made when first asked and after every change."""
        if self._module_groups is None:
            groups = self._make_module_groups()
            self._num_extra_inputs = sum(
                group.num_extra_inputs for group in groups if isinstance(group, OperationFuser)
            )
            self._module_groups = groups
        return self._module_groups

    def named_basic_ops(self) -> list[list[tuple[BasicOperation, str]]]:
        """The basic ops of each run, with what errors call them."""
        return [group.named for group in self.groups() if isinstance(group, OperationFuser)]

    def forget_plans(self) -> None:
        """Plan anew at the next call: something that ops say of themselves has changed."""
        self._module_groups = None

    def pack_glu_weights_(self, interleave: int = 32, optimizers: Iterable[torch.optim.Optimizer] = ()) -> Sequential:
        """Reorder the weight rows before gated activations in memory, in blocks of `interleave` gate rows and as many
        up rows, as cuDNN Frontend's Blackwell kernels want them; checkpoints stay as they were. See
        `fusible_ops.packing.pack_glu_weights_` for arguments and errors. Returns self.
        """
        pack_glu_weights_(self, interleave, optimizers)
        return self

    def forward(
        self, x: Tensor, *extra_inputs: Tensor, op_kwargs: Mapping[int | nn.Module, dict[str, Any]] | None = None
    ) -> Any:
        if torch.compiler.is_dynamo_compiling():
            from fusible_ops import compiled

            return compiled.forward(self, x, extra_inputs, op_kwargs)
        groups = self._module_groups or self.groups()
        if len(extra_inputs) != self._num_extra_inputs:
            counts = f"Expected {self._num_extra_inputs} extra inputs but got {len(extra_inputs)}"
            raise ValueError(f"{counts}; {self._slots()}")
        kwargs = self._resolve_kwargs(op_kwargs) if op_kwargs else {}
        at = 0
        extra_outputs: list[Tensor] = []
        for group in groups:
            if not isinstance(group, OperationFuser):
                x = group(x)
                continue
            given = extra_inputs[at : at + group.num_extra_inputs]
            at += group.num_extra_inputs
            own = [kwargs.get(op, {}) for op in group.basic_ops] if kwargs else None
            x = group(x, *given, basic_op_kwargs=own)
            if group.num_extra_outputs:
                x, *more = x
                extra_outputs += more
        return (x, *extra_outputs) if extra_outputs else x

    def _slots(self) -> str:
        """Which op takes how many extra inputs, in words."""
        slots = [
            f"{type(op).__name__} {name} takes {op.num_extra_inputs}"
            for name, op in self._modules.items()
            if isinstance(op, FusibleOperation) and op.num_extra_inputs
        ]
        return ", ".join(slots) if slots else "none of its ops takes any"

    def _resolve_kwargs(
        self, op_kwargs: Mapping[int | nn.Module, dict[str, Any]]
    ) -> dict[BasicOperation, dict[str, Any]]:
        """op_kwargs by op object. ValueError for a target that is no basic op of this container."""
        resolved: dict[BasicOperation, dict[str, Any]] = {}
        for target, kwargs in op_kwargs.items():
            op = self[target] if isinstance(target, int) else target
            if not isinstance(op, BasicOperation):
                raise ValueError(f"op_kwargs: {target!r} is not a basic op, but a {type(op).__name__}")
            if not any(op is own for own in self):
                raise ValueError(f"op_kwargs: {type(op).__name__} is not in this Sequential")
            resolved[op] = kwargs
        return resolved

    # -- explaining ------------------------------------------------------------------------------------------------

    def explain(
        self,
        target: str | Target | torch.device | None = None,
        *,
        dtype: torch.dtype | None = None,
        recipe: Recipe | str | None = None,
        as_data: bool = False,
    ) -> Any:
        """Which kernel runs what, and where none does, which condition failed.

        target: an architecture ("sm_90a", "sm_100a", "cpu", …: an ideal machine, needs no GPU), a `Target`, a device,
        or None for the device of the parameters. dtype: as under `torch.autocast` in it; None: as the weights are.
        recipe: as under `autocast(recipe=recipe)`; None: as it is now. "auto" is shown as for very many rows, with the
        row count from which on it chooses so.
        Fusions that were registered for all runs stand first: of their ops the rules get nothing, whatever follows.
        Then comes what calls will raise whatever input they are given (weights of one op in formats unlike each other).
        Returns text, or with as_data=True a list of dicts, one for each run of ops or plain module.
        """
        machine = self._target(target)
        parts: list[Any] = []
        for group in self.groups():
            if isinstance(group, OperationFuser):
                asked = current_recipe() if recipe is None else named(recipe)
                told = _explained(group, machine, dtype, asked, as_data)
                first = fusions.told(group.basic_ops, None if isinstance(asked, str) else asked)
                if first:
                    told = {**told, "registered": first} if as_data else "\n".join([*first, told])
                parts.append(told)
            elif as_data:
                parts.append({"module": type(group).__name__})
            else:
                parts.append(f"{type(group).__name__}: a plain module, called as it is")
        return parts if as_data else "\n\n".join(parts)

    def _target(self, target: str | Target | torch.device | None) -> Target:
        if isinstance(target, Target):
            return target
        if isinstance(target, str):
            return Target.named(target)
        if target is None:
            parameter = next(self.parameters(), None)
            target = torch.device("cpu") if parameter is None or parameter.is_meta else parameter.device
        return Target.of(target)


def _explained(
    run: OperationFuser, target: Target, dtype: torch.dtype | None, recipe: Recipe | str | None, as_data: bool
) -> Any:
    least, chosen = None, recipe
    if isinstance(recipe, str):
        least = run.least_rows(target, dtype)
        chosen = None if least is None else AUTOMATIC
    assert not isinstance(chosen, str)
    made = run.plan(target, dtype, chosen)
    errors = foreseen(run, made, chosen)
    if as_data:
        auto = {"auto": {"least_rows": least}} if isinstance(recipe, str) else {}
        return {**made.as_data(), "raises": errors, **auto}
    lines = [f"raises in {error}" for error in errors]
    if isinstance(recipe, str):
        when = "none" if chosen is None else f"{chosen.describe().name} from {least:,} rows on, none below"
        lines.append(f"recipe auto: {when}")
    return "\n".join([*lines, explain(made)])
