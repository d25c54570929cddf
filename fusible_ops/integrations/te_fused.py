"""The fused operation that Transformer Engine's fuser runs: our kernels over its ops, or its own ops one by one.

`FusibleOpsRun` is made when first asked for, since its base is a class of Transformer Engine's.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from fusible_ops.call import Call, autocast_dtype_on, without_autocast
from fusible_ops.fuser import OperationFuser
from fusible_ops.grouped_linear import GroupedLinear
from fusible_ops.integrations.te_parts import is_plain, runs_of
from fusible_ops.parameters import parameters_of
from fusible_ops.recipe import Recipe
from fusible_ops.shortcut import ShortCall

Grads = tuple[Tensor | None, list[Any], list[Any]]
SPLITS = (torch.int32, torch.int64)
"""Types of split sizes that kernels read."""


class Joint:
    """Several ops as one, forward and backward: what `FusibleOpsRun` adds to Transformer Engine's FusedOperation.

    What a call must be for our kernels: plain tensors on the input's device, no keyword arguments, all ops in one fused
    operation for its dtype and recipe. Other calls replay the ops themselves. Split sizes may be any integers and lie
    anywhere, as Transformer Engine takes them: Megatron-Core has them on the CPU.
    """

    basic_ops: Any
    is_installed = True

    def take(self, basic_ops: Sequence[Any], recipe: Recipe | None) -> None:
        """Prepare for these ops under this recipe."""
        (run,), _ = runs_of(basic_ops)
        self.fuser, self.recipe = OperationFuser(run.ours, run.names), recipe
        self.counts = [len(parameters_of(op)) for op in self.fuser.basic_ops]
        self.splits_at: list[int] = []
        at = 0
        for op, theirs in zip(self.fuser.basic_ops, basic_ops, strict=True):
            if isinstance(op, GroupedLinear):
                self.splits_at.append(at + op.split_sizes_slot)
            at += theirs.num_extra_inputs

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return type(self)([copy.deepcopy(op, memo) for op in self.basic_ops], self.recipe)  # type: ignore[call-arg]

    def __reduce__(self) -> Any:
        return type(self), (list(self.basic_ops), self.recipe)

    # -- forward ---------------------------------------------------------------------------------------------------

    def fuser_forward(
        self,
        basic_op_ctxs: list[Any],
        input_: Tensor,
        *,
        basic_op_extra_inputs: Sequence[Sequence[Any]],
        prev_op_grad_output_quantizer: Any,
        next_op_input_quantizer: Any,
        basic_op_kwargs: Sequence[dict[str, Any]],
    ) -> tuple[Tensor, Sequence[Sequence[Any]]]:
        head, x = basic_op_ctxs[0], input_
        call = None
        recorded = any(ctx.requires_grad for ctx in basic_op_ctxs)
        # Inside the fuser's node intermediate tensors require nothing; its inputs carry the mark that they are kept.
        wants_dx = head.requires_grad and (x.requires_grad or not getattr(x, "_do_not_clear", False))
        if Joint.is_installed and not any(basic_op_kwargs):
            extras = [t for own in basic_op_extra_inputs for t in own]
            call = self.begin(x, extras, wants_dx, recorded)
        head.call = call
        if call is None:
            quantizers = prev_op_grad_output_quantizer, next_op_input_quantizer
            return self._replay(basic_op_ctxs, x, basic_op_extra_inputs, quantizers, basic_op_kwargs)
        y = self.forward_of(call, x, extras, needs_of(call, extras, wants_dx), recorded)
        if recorded:
            head.save_for_backward(*saved_of(call))
        return y, [()] * len(basic_op_ctxs)

    def begin(self, x: Tensor, extras: list[Any], wants_dx: bool, recorded: bool) -> Call | ShortCall | None:
        """The call by our kernels, of which nothing has run; None if they do not take it.

        extras: the extra inputs, in which split sizes are then as kernels read them. wants_dx, recorded: whether x gets
        a gradient, and whether anything does.
        """
        self._put_splits_on(x.device, extras)
        if self.recipe is None and wants_dx == recorded:  # shortcuts that record give all gradients
            short = self.fuser.short_call(x, extras, recorded)
            if short is not None:
                return short
        if not self._takes(x, extras):
            return None
        return self.fuser.call_for(x, extras, autocast_dtype_on(x.device), self.recipe)[0]

    def forward_of(
        self, call: Call | ShortCall, x: Tensor, extras: Sequence[Tensor], needs: tuple[bool, ...], recorded: bool
    ) -> Tensor:
        """y of a call that has begun with these, where autograd records nothing. needs: from `needs_of`."""
        if not isinstance(call, Call):
            return call.forward(x, extras)
        with without_autocast(x.device, call.route.autocast_dtype):
            y = call.forward(x, needs, recorded)
        if needs[0] == recorded:
            self.fuser.shorten(call, x, extras, recorded)
        return y

    def _takes(self, x: Any, extras: Sequence[Any]) -> bool:
        if not all(map(is_plain, (x, *extras))) or any(t.device != x.device for t in extras):
            return False
        steps, _ = self.fuser.steps(x.device, autocast_dtype_on(x.device), self.recipe)
        return len(steps) == 1 and steps[0].op.is_fused_op

    def _put_splits_on(self, device: torch.device, extras: list[Any]) -> None:
        """Make split sizes among the extra inputs int32 or int64 on `device`; a tensor given twice stays one."""
        made: dict[int, Tensor] = {}
        for at in self.splits_at:
            splits = extras[at]
            if not is_plain(splits) or (splits.device == device and splits.dtype in SPLITS):
                continue
            if not (splits.is_floating_point() or splits.is_complex()):
                dtype = splits.dtype if splits.dtype in SPLITS else torch.int64
                extras[at] = made.setdefault(id(splits), splits.to(device, dtype, non_blocking=device.type == "cuda"))

    def _replay(
        self,
        ctxs: list[Any],
        x: Tensor,
        extras: Sequence[Sequence[Any]],
        quantizers: tuple[Any, Any],
        kwargs: Sequence[dict[str, Any]],
    ) -> tuple[Tensor, Sequence[Sequence[Any]]]:
        """The ops themselves, one by one."""
        ops, outputs = list(self.basic_ops), []
        before = [quantizers[0], *[op.get_grad_output_quantizer() for op in ops[:-1]]]
        after = [*[op.get_input_quantizer() for op in ops[1:]], quantizers[1]]
        for i, op in enumerate(ops):
            x, made = op.fuser_forward(
                [ctxs[i]],
                x,
                basic_op_extra_inputs=[extras[i]],
                prev_op_grad_output_quantizer=before[i],
                next_op_input_quantizer=after[i],
                basic_op_kwargs=[kwargs[i]],
            )
            outputs.append(tuple(made[0]))
        return x, outputs

    # -- backward --------------------------------------------------------------------------------------------------

    def fuser_backward(
        self,
        basic_op_ctxs: list[Any],
        grad_output: Tensor,
        *,
        basic_op_grad_extra_outputs: Sequence[Sequence[Tensor | None]],
    ) -> Grads:
        head = basic_op_ctxs[0]
        call = head.call
        if call is None:
            return self._replay_backward(basic_op_ctxs, grad_output, basic_op_grad_extra_outputs)
        saved = list(head.saved_tensors)
        call.check_backward()
        dx, *rest = self.backward_of(call, saved, grad_output)
        flat = iter(rest)
        params = [list(islice(flat, count)) for count in self.counts]
        extras = [tuple(islice(flat, op.num_extra_inputs)) for op in self.basic_ops]
        return dx, params, extras

    def backward_of(self, call: Call | ShortCall, saved: list[Tensor | None], dy: Any) -> list[Tensor | None]:
        """Gradients of x, all parameters, all extra inputs. `saved` is emptied."""
        grad = dy if is_plain(dy) else dy.dequantize()
        with without_autocast(grad.device, autocast_dtype_on(grad.device)):
            grads = call.backward(saved, grad)
        self._hand_over_delayed()
        return grads

    def _replay_backward(self, ctxs: list[Any], dy: Any, output_grads: Sequence[Sequence[Any]]) -> Grads:
        ops = list(self.basic_ops)
        params: list[Any] = [None] * len(ops)
        extras: list[Any] = [(None,) * op.num_extra_inputs for op in ops]
        for i in reversed(range(len(ops))):
            if not ctxs[i].requires_grad:
                return None, params, extras
            dy, own_params, own_extras = ops[i].fuser_backward(
                [ctxs[i]], dy, basic_op_grad_extra_outputs=[output_grads[i]]
            )
            (params[i],), (extras[i],) = own_params, own_extras
        return dy, params, extras

    def _hand_over_delayed(self) -> None:
        """Put weight gradients that wait where Transformer Engine's `backward_dw` looks for them."""
        for ours, theirs in zip(self.fuser.basic_ops, self.basic_ops, strict=True):
            while isinstance(ours, GroupedLinear) and ours._delayed:
                theirs.wgrad_store.put([[], [], []], _Later(ours, ours._delayed.popleft()))


class _Later:
    """A weight gradient that `WeightGradStore.pop` computes: into `main_grad`, or into the list it is given."""

    def __init__(self, op: GroupedLinear, grad: Any) -> None:
        self.op, self.grad = op, grad

    def __call__(self, inputs: list[Any], grads: list[Any], out: list[Tensor]) -> None:
        out += self.op.computed_later(self.grad)


def needs_of(call: Call | ShortCall, extras: Sequence[Tensor], wants_dx: bool) -> tuple[bool, ...]:
    """What `Call.forward` is told of gradients; nothing for a shortcut's call, which knows."""
    if not isinstance(call, Call):
        return ()
    return wants_dx, False, *[t.requires_grad for t in (*call.parameters, *extras)]


def saved_of(call: Call | ShortCall) -> list[Tensor | None]:
    """What backward needs. Activations may go to the CPU until then, where that is asked for; weights may not."""
    from transformer_engine.pytorch import cpu_offload

    saved = call.take_saved()
    if cpu_offload.is_cpu_offload_enabled():
        weights = {p.untyped_storage().data_ptr() for p in call.parameters}
        for t in saved:
            if t is not None:
                held = t.untyped_storage().data_ptr() in weights
                (cpu_offload.mark_not_offload if held else cpu_offload.mark_activation_offload)(t)
    return saved


_made: list[type] = []


def __getattr__(name: str) -> Any:
    """`FusibleOpsRun`, so that it is found by its name, as pickle looks for it."""
    if name != "FusibleOpsRun":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if not _made:
        from transformer_engine.pytorch.ops import FusedOperation

        def __init__(self: Any, basic_ops: Sequence[Any], recipe: Recipe | None = None) -> None:
            FusedOperation.__init__(self, basic_ops)
            self.take(list(self.basic_ops), recipe)

        members = {"__init__": __init__, "__module__": __name__, "__qualname__": name}
        _made.append(type(name, (Joint, FusedOperation), members))
    return _made[0]
