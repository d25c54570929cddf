"""One call of a run of ops: forward and backward over its steps, as one autograd node."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

from cute_kernels import reference
from cute_kernels.activation_reference import rows_of
from cute_kernels.facts import WITHOUT_MEMORY
from cute_kernels.launch import NoKernelError
from cute_kernels.ops import are_plain, entry_points
from cute_kernels.scheduling import ALONE, LONG_ROWS, Sharing
from fusible_ops.fallback import run_unfused, spare
from fusible_ops.op import OperationContext
from fusible_ops.parameters import Held
from fusible_ops.quantized_tensor import QuantizedTensor
from fusible_ops.ranges import shown
from fusible_ops.route import Route
from fusible_ops.sharing import shared, shared_as

if TYPE_CHECKING:
    from fusible_ops.fuser import OperationFuser


def forward_kernels(x: Tensor, plain: bool, sharing: Sharing, records: bool) -> Any:
    """Where the ops of one call on tensors like x find kernels. plain: all tensors are (`ops.are_plain`). records:
    whether gradients are recorded."""
    kernels, rows = entry_points(x.device, plain), rows_of(x)
    if sharing is ALONE and (not records or rows < LONG_ROWS):
        return kernels
    return shared(kernels, sharing, rows, records)


def backward_kernels(former: Any, grad: Tensor, plain: bool) -> Any:
    """The same for the backward of a forward that ran with `former`."""
    return shared_as(former, entry_points(grad.device, plain))


class Call:
    """One forward of a run, and what its backward needs."""

    def __init__(
        self,
        fuser: OperationFuser,
        route: Route,
        held: list[Held],
        extra_inputs: Sequence[Sequence[Any]],
        kwargs: Sequence[dict[str, Any]],
    ) -> None:
        self.fuser, self.route = fuser, route
        self.held, self.extra_inputs, self.kwargs = held, extra_inputs, kwargs
        self.contexts: list[OperationContext] = []
        self.trail_offsets: Tensor | None = None

    @property
    def parameters(self) -> list[Parameter]:
        """Of all ops, as the call found them."""
        return [p for own in self.held for p in own.parameters]

    def begin(self, x: Tensor, needs: tuple[bool, ...], recorded: bool) -> None:
        """Make the contexts. needs, recorded: as `OperationFuser.context_kinds`."""
        fuser, route, self.needs = self.fuser, self.route, needs
        made = route.contexts.get((needs, recorded))
        if made is None:
            kinds = fuser.context_kinds(route, self.held, needs, recorded)
            made = route.contexts[needs, recorded] = [(kind, route.plans(i)) for i, kind in enumerate(kinds)]
        kernels = self.kernels = forward_kernels(x, route.plain, fuser.sharing, recorded)
        contexts = self.contexts = []
        for (kind, plans), held, source in zip(made, self.held, fuser.split_sources, strict=True):
            ctx = kind()
            ctx.held, ctx.kernels, ctx.plans = held, kernels, plans
            if source is not None:
                ctx.split_sizes = self._splits(source)
            contexts.append(ctx)

    def forward(self, x: Tensor, needs: tuple[bool, ...], recorded: bool) -> Any:
        """needs, recorded: as `OperationFuser.context_kinds`."""
        self.begin(x, needs, recorded)
        fuser, contexts = self.fuser, self.contexts
        if fuser.lead is not None:
            x = tokens_only(x, offsets_in(self._splits(fuser.lead), x))
        at = 0
        while at < len(self.route.steps):
            step = self.route.steps[at]
            span = step.span
            try:
                with shown(step.name, "forward"):
                    x, _ = step.op.fuser_forward(
                        contexts[span],
                        x,
                        basic_op_extra_inputs=self.extra_inputs[span],
                        prev_op_grad_output_quantizer=step.before,
                        next_op_input_quantizer=step.after,
                        basic_op_kwargs=self.kwargs[span],
                    )
                at += 1
            except NoKernelError as error:
                self.route = run_unfused(self, step, error, recorded)
        if fuser.trail is not None:
            self.trail_offsets = offsets_in(self._splits(fuser.trail), x)
            x = tokens_only(x, self.trail_offsets)
        return x

    def _splits(self, index: int) -> Tensor:
        """The split sizes that basic op `index` was given."""
        return self.extra_inputs[index][self.fuser.basic_ops[index].split_sizes_slot]  # type: ignore[index]

    def take_saved(self) -> list[Tensor | None]:
        """What all ops asked to keep, in order; the call itself keeps nothing."""
        saved: list[Tensor | None] = [self.trail_offsets]
        self.counts = []
        for ctx in self.contexts:
            saved += ctx.to_save
            self.counts.append(len(ctx.to_save))
            ctx.to_save, ctx.split_sizes = (), None
        self.extra_inputs, self.kwargs, self.trail_offsets = [], [], None
        return saved

    def check_backward(self) -> None:
        """Raise for what backward will not find, or not find as it was; nothing has run yet."""
        for op, ctx in zip(self.fuser.basic_ops, self.contexts, strict=True):
            if ctx.requires_grad:
                op.check_backward(ctx)
            if ctx.unchanged is not None:
                ctx.unchanged.check(ctx.owner)

    def restore(self, saved: list[Tensor | None], grad: Tensor | None) -> Tensor | None:
        """Give the contexts what was kept, and empty `saved`. The gradient, zero in rows of no group."""
        contexts, kernels = self.contexts, None
        if grad is not None:
            kernels = backward_kernels(self.kernels, grad, self.route.plain and are_plain((grad, *saved)))
            grad = tokens_only(grad, saved[0])
        at = 1
        for ctx, count in zip(contexts, self.counts, strict=True):
            ctx.kernels, ctx.saved_tensors = kernels, tuple(saved[at : at + count])
            at += count
        saved.clear()
        return grad

    def backward(self, saved: list[Tensor | None], grad: Tensor | None) -> list[Tensor | None]:
        """Gradients of (x, all parameters, all extra inputs). `saved` is emptied: the ops let go of what they used."""
        contexts, grad, known = self.contexts, self.restore(saved, grad), self.needs in self.route.went_back
        param_grads: list[Sequence[Tensor | None] | None] = [None] * len(contexts)
        extra_grads: list[Sequence[Tensor | None] | None] = [None] * len(contexts)
        for step in reversed(self.route.steps):
            own = contexts[step.span]
            if grad is None or not any(ctx.requires_grad for ctx in own):
                grad = None
                break
            if not known:
                spare(self.fuser, self.route, step, own)
            with shown(step.name, "backward"):
                grad, param_grads[step.span], extra_grads[step.span] = step.op.fuser_backward(
                    own, grad, basic_op_grad_extra_outputs=[()] * len(own)
                )
            for ctx in own:
                ctx.saved_tensors = ()
        if not self.route.failed:
            self.route.went_back.add(self.needs)
        return self.flat(grad, param_grads, extra_grads)

    def flat(
        self,
        grad: Tensor | None,
        param_grads: Sequence[Sequence[Tensor | None] | None],
        extra_grads: Sequence[Sequence[Tensor | None] | None],
    ) -> list[Tensor | None]:
        """The gradient of x, then of all parameters, then of all extra inputs."""
        result = [grad]
        for grads, ctx in zip(param_grads, self.contexts, strict=True):
            grads = [None] * len(ctx.wants) if grads is None else grads
            if len(grads) != len(ctx.wants):
                raise RuntimeError(
                    f"an op returned {len(grads)} parameter gradients, but it has {len(ctx.wants)} parameters"
                )
            result += grads
        for grads, ctx in zip(extra_grads, self.contexts, strict=True):
            result += [None] * len(ctx.extra_wants) if grads is None else grads
        return result


def offsets_in(split_sizes: Tensor, x: Tensor) -> Tensor:
    """The offsets of groups in the rows of x."""
    return reference.group_offsets(split_sizes, rows_of(x))


def tokens_only(t: Tensor, offsets: Tensor | None) -> Tensor:
    """t [..., C] with the rows past the last group exactly zero; t itself if there are no groups."""
    if offsets is None or t.dim() == 0 or (rows := rows_of(t)) == 0:
        return t
    return reference.tokens_only(t.reshape(rows, t.shape[-1]), offsets).view(t.shape)


_NOTHING = contextlib.nullcontext()


def without_autocast(device: torch.device, active: torch.dtype | None) -> contextlib.AbstractContextManager[Any]:
    """Ops choose their compute dtype themselves, so autocast (`active`) must not touch the products inside them."""
    return _NOTHING if active is None else torch.autocast(device.type, enabled=False)


def autocast_dtype_on(device: torch.device) -> torch.dtype | None:
    """The dtype of an active autocast on this kind of device, else None."""
    if not torch._C._is_any_autocast_enabled():
        return None
    kind = device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return None


def owned(y: Tensor, x: Tensor) -> Tensor:
    """y as a result that the caller may change in place: no view, and no memory of x (a run of identities)."""
    if y is x or (y._is_view() and isinstance(y, WITHOUT_MEMORY)):
        return y.clone()
    if not y._is_view() or isinstance(y, QuantizedTensor):
        return y
    if y.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() != 0:
        return y.clone()
    return torch.ops.aten._unsafe_view(y, y.shape)


def saved_for(ctx: Any) -> list[Tensor | None]:
    """What an autograd node kept. RuntimeError if its own backward is to be differentiated."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "fusible_ops has no double backward: gradients cannot be taken with create_graph=True through these ops"
        )
    return list(ctx.saved_tensors)


def let_go(ctx: Any) -> None:
    """Drop what an autograd node kept, unless the graph is kept."""
    clear = getattr(ctx, "maybe_clear_saved_tensors", None)  # torch does not document it
    if clear is not None:
        clear()


class _Run(torch.autograd.Function):
    """A `Call` as one autograd node. Arguments after `call`: all parameters, then all extra inputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Call, *tensors: Tensor) -> Any:
        y = owned(call.forward(x, ctx.needs_input_grad, True), x)
        ctx.call = call
        ctx.save_for_backward(*call.take_saved())
        return y

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        saved = saved_for(ctx)
        ctx.call.check_backward()
        let_go(ctx)
        with without_autocast(grad_output.device, autocast_dtype_on(grad_output.device)):
            dx, *rest = ctx.call.backward(saved, grad_output)
        return dx, None, *rest


record = super(torch.autograd.Function, _Run).apply
"""`_Run.apply` without its walk over all arguments for what functorch left behind; under functorch no run gets here."""
