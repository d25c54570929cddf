"""Calls of Transformer Engine's fuser whose plan is one operation of ours, without its walks over all parameters.

Its fuser marks every parameter at every call, has PyTorch look at each once more where it records the call, and under
a recipe sets the quantizers of every expert, which our kernels do not use. `replace` puts a function before the fuser's
own that does for such a plan all else that the fuser does. Other calls are the fuser's, and all of them where
Transformer Engine is of a version that is not known here.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fusible_ops.call import Call, let_go, owned
from fusible_ops.integrations.te_fused import Joint, needs_of, saved_of
from fusible_ops.shortcut import ShortCall

KNOWN = "2.20."
"""The version of Transformer Engine whose fuser is known here."""

_theirs: dict[Any, Any] = {}
"""Of their class of fusers, while `_called` comes before it, its own `__call__`."""


def replace(fuser: Any, version: str) -> None:
    """Put `_called` before the `__call__` of this class of fusers, if it is of a version that is known. Again: no
    change.
    """
    if not version.startswith(KNOWN) or fuser in _theirs:
        return
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager as State

    theirs = _theirs[fuser] = fuser.__call__

    @functools.wraps(theirs)
    def call(self: Any, input: Any, *extra_inputs: Any, basic_op_kwargs: Any = None) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return apart(self, input, *extra_inputs, basic_op_kwargs=basic_op_kwargs)
        made = None if basic_op_kwargs and any(basic_op_kwargs) else _called(self, State, input, extra_inputs)
        return theirs(self, input, *extra_inputs, basic_op_kwargs=basic_op_kwargs) if made is None else made

    apart = torch.compiler.disable(call)  # planning and guards are not for a compiler's graph
    fuser.__call__ = call


def put_back(fuser: Any) -> None:
    """Give the class its own `__call__` again."""
    if fuser in _theirs:
        fuser.__call__ = _theirs.pop(fuser)


def _called(fuser: Any, state: Any, x: Any, extra_inputs: Sequence[Any]) -> Tensor | None:
    """What the call gives, and the fuser as the call leaves it; None, and nothing has changed, for what goes to it.

    state: their `FP8GlobalStateManager`.
    """
    if torch._C._are_functorch_transforms_active():
        return None
    records = torch.is_grad_enabled()
    if not isinstance(x, Tensor) or (records and not x.requires_grad):
        return None
    recipe = state.get_fp8_recipe() if state.is_fp8_enabled() else None
    kind, override = type(recipe), None if recipe is None else recipe.backward_override
    first = 0 if records else fuser._num_basic_ops
    plan = fuser._fused_ops_cache.get((kind, first, override))
    if plan is None or fuser.recipe_type is not kind or fuser.backward_override != override:
        return None
    if len(plan[0]) != 1 or plan[0] != plan[1] or not isinstance(joint := plan[0][0][0], Joint):
        return None
    if not Joint.is_installed or not len(extra_inputs) == fuser.num_extra_inputs == joint.fuser.num_extra_inputs:
        return None
    extras = list(extra_inputs)
    call = joint.begin(x, extras, records, records)
    if call is None:
        return None
    fuser.first_op_requiring_backward = first
    fuser._forward_ops, fuser._backward_ops = plan
    if records:
        y = _record(x, joint, call, extras, state, *fuser._flat_basic_op_params, *extra_inputs)
    else:
        y = joint.forward_of(call, x, extras, needs_of(call, extras, False), False)
    for t in (x, *extra_inputs, y):
        t._do_not_clear = True
    return y


class _Run(torch.autograd.Function):
    """A call of `Joint`'s as an autograd node. `tensors`: all parameters, all extra inputs, for autograd."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        joint: Joint,
        call: Call | ShortCall,
        extras: Sequence[Tensor],
        state: Any,
        *tensors: Tensor,
    ) -> Tensor:
        # Others may have taken the places of the parameters that the fuser knows: `ctx.needs_input_grad` is of those.
        y = owned(joint.forward_of(call, x, extras, needs_of(call, extras, True), True), x)
        ctx.joint, ctx.call = joint, call
        ctx.state = state if state.is_first_fp8_module() else None
        ctx.save_for_backward(*saved_of(call))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        saved = list(ctx.saved_tensors)
        ctx.call.check_backward()
        let_go(ctx)
        dx, *rest = ctx.joint.backward_of(ctx.call, saved, dy)
        if ctx.state is not None:
            _update_scales(ctx.state)
        return dx, None, None, None, None, *rest


_record = super(torch.autograd.Function, _Run).apply
"""As `fusible_ops.call.record`."""


def _update_scales(state: Any) -> None:
    """What the first node of a region of their autocast does when its backward has run, for ops of delayed scaling."""
    from transformer_engine.pytorch.graph import is_graph_capturing

    if not is_graph_capturing():
        state.reduce_and_update_fp8_tensors(forward=False)
