"""A call of a run that has more than extra inputs of the caller's: extra outputs, channels, keyword arguments of single
ops (the caller's buffers among them), steps that differ between forward and backward, ops that keep what backward needs
in host memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from cute_kernels.launch import NoKernelError
from cute_kernels.ops import are_plain
from fusible_ops import offload
from fusible_ops.call import (
    Call,
    autocast_dtype_on,
    let_go,
    offsets_in,
    owned,
    saved_for,
    tokens_only,
    without_autocast,
)
from fusible_ops.fallback import run_unfused, spare
from fusible_ops.op import FusedOperation
from fusible_ops.ranges import shown

OUTPUT_BUFFER_KEY = "output"
GRAD_INPUT_BUFFER_KEY = "grad_input"
Outputs = Sequence[Tensor | None]
BUFFERS = (OUTPUT_BUFFER_KEY, GRAD_INPUT_BUFFER_KEY)
"""Keyword arguments of a grouped linear: where its output is to lie, and the gradient of its input."""


class FullCall(Call):
    """As `Call`. Its forward gives [y, *the caller's extra outputs], and its backward takes all their gradients."""

    def forward(self, x: Tensor, needs: tuple[bool, ...], recorded: bool) -> list[Tensor]:
        self.extra_inputs = [list(given) for given in self.extra_inputs]
        self.begin(x, needs, recorded)
        fuser, routing, contexts, given = self.fuser, self.fuser.routing, self.contexts, self.extra_inputs
        places = range(len(contexts))
        self.grad_buffers = [own.get(GRAD_INPUT_BUFFER_KEY) for own in self.kwargs]
        output_buffers = [own.get(OUTPUT_BUFFER_KEY) for own in self.kwargs]
        parameters = [*chain(*[own.parameters for own in self.held])]
        for i, op in enumerate(fuser.basic_ops):
            if op.overwrites_extra_inputs:
                others = [x, *chain(*given[:i], *given[i + 1 :]), *parameters]
                given[i] = [t.clone() if any(_overlap(t, other) for other in others) else t for t in given[i]]
        read = [x, *chain(*given), *parameters]
        self.lead_offsets = self._offsets(fuser.lead, x)
        x = tokens_only(x, self.lead_offsets)
        outputs: list[Outputs] = [()] * len(contexts)
        at = 0
        while at < len(self.route.steps):
            step = self.route.steps[at]
            span = places[step.span]
            for i in span:
                for j, source in enumerate(routing.sources[i]):
                    if source is not None and source[0] not in span:
                        t = _fed(outputs[source[0]][source[1]], contexts[i].extra_wants[j])
                        given[i][j] = t.clone() if fuser.basic_ops[i].overwrites_extra_inputs else t  # type: ignore
            for i in span:
                source_of_splits = fuser.split_sources[i]
                contexts[i].split_sizes = None if source_of_splits is None else self._splits(source_of_splits)
            try:
                with shown(step.name, "forward"):
                    x, made = step.op.fuser_forward(
                        contexts[step.span],
                        x,
                        basic_op_extra_inputs=given[step.span],
                        prev_op_grad_output_quantizer=step.before,
                        next_op_input_quantizer=step.after,
                        basic_op_kwargs=self.kwargs[step.span],
                    )
                at += 1
            except NoKernelError as error:
                self.route = run_unfused(self, step, error, recorded)
                continue
            outputs[step.span] = self._checked(step.op, span, made)
            x = self._into(OUTPUT_BUFFER_KEY, output_buffers, span, span[-1], x, read)
            read.append(output_buffers[span[-1]])
        self.trail_offsets = self._offsets(fuser.trail, x)
        x = tokens_only(x, self.trail_offsets)
        self.result_like = x.shape, x.dtype, x.device
        return [x, *[self._outside(outputs[i][j], i) for i, j in routing.public_outputs]]  # type: ignore[arg-type]

    def take_saved(self) -> list[Tensor | None]:
        for step in self.route.steps:
            own = self.contexts[step.span]
            if isinstance(step.op, FusedOperation):
                keeps = step.op.keeps()
                own[0].to_save = tuple(
                    offload.in_host_memory(t) if i in keeps and self._offloads(step.span.start + keeps[i]) else t
                    for i, t in enumerate(own[0].to_save)
                )
            elif self._offloads(step.span.start):
                own[0].to_save = tuple(
                    offload.in_host_memory(t) if t is not None and t.dim() > 1 and not own[0].held.holds(t) else t
                    for t in own[0].to_save
                )
        return super().take_saved()

    def _offloads(self, index: int) -> bool:
        return self.fuser.basic_ops[index].offload

    def restore(self, saved: list[Tensor | None], grad: Tensor | None) -> Tensor | None:
        device = None if grad is None else grad.device
        if device is not None:
            saved[:] = [t if t is None or t.device == device else t.to(device, non_blocking=True) for t in saved]
        return super().restore(saved, grad)

    def _offsets(self, grouped: int | None, x: Tensor) -> Tensor | None:
        """Those of basic op `grouped`, if there is one and it is known already which rows its groups have."""
        splits = None if grouped is None else self._splits(grouped)
        return None if splits is None else offsets_in(splits, x)

    def _outside(self, t: Tensor, index: int) -> Tensor:
        """An extra output of basic op `index` as the caller gets it: zero in rows of no group."""
        after = self.fuser.trail is not None and index > self.fuser.trail
        return tokens_only(t, self.trail_offsets) if after else t

    def _checked(
        self, op: Any, span: range, made: Sequence[Sequence[Tensor | None]]
    ) -> Sequence[Sequence[Tensor | None]]:
        """Extra outputs of the ops in `span`. RuntimeError if there are too many or too few, or one is missing that
        somebody outside wants.
        """
        ops, routing, name = self.fuser.basic_ops, self.fuser.routing, type(op).__name__
        counts, wanted = [len(outputs) for outputs in made], [ops[i].num_extra_outputs for i in span]
        if counts != wanted:
            raise RuntimeError(f"{name} gave {counts} extra outputs for its ops, which have {wanted}")
        for i, outputs in zip(span, made, strict=True):
            for j, output in enumerate(outputs):
                if output is None and (i, j) in routing.public_outputs:
                    raise RuntimeError(f"extra output {j} of op {i} is public, but {name} returned None")
                if output is None and not set(routing.consumers[i][j]) <= set(span):
                    raise RuntimeError(
                        f"extra output {j} of op {i} goes to an op outside its forward fusion, but {name} returned None"
                    )
        return made

    def _into(
        self,
        key: str,
        buffers: Sequence[Tensor | None],
        span: range,
        at: int,
        t: Tensor,
        read: Sequence[Tensor | None] = (),
    ) -> Tensor:
        """t, moved into the buffer that the caller gave for op `at`, if there is one. read: what must stay as it is."""
        owners = [owner for _, owner in self.fuser.named]
        for i in span:
            if buffers[i] is not None and i != at:
                raise ValueError(f"{owners[i]}: {key!r} lies inside {owners[span[0]]} to {owners[span[-1]]}, fused")
        buffer = buffers[at]
        if buffer is None:
            return t
        _check_buffer(owners[at], key, buffer, t)
        if any(_overlap(buffer, other) for other in read):  # backward would take it for what it was
            raise ValueError(f"{owners[at]}: {key!r} shares memory with an input, parameter or buffer of the run")
        with torch.no_grad():
            buffer.copy_(t)
        return torch.ops.aten._unsafe_view(buffer, buffer.shape)

    def backward(
        self, saved: list[Tensor | None], grad: Tensor | None, *output_grads: Tensor | None
    ) -> list[Tensor | None]:
        routing, contexts = self.fuser.routing, self.contexts
        if grad is None:
            shape, dtype, device = self.result_like
            grad = torch.zeros(shape, dtype=dtype, device=device)
        self.trail_offsets = saved[0]
        grads: list[list[Tensor | None]] = [[None] * op.num_extra_outputs for op in self.fuser.basic_ops]
        for given, (i, j) in zip(output_grads, routing.public_outputs, strict=True):
            grads[i][j] = None if given is None else self._outside(given, i)
        dx, known = self.restore(saved, grad), self.needs in self.route.went_back
        param_grads: list[Sequence[Tensor | None] | None] = [None] * len(contexts)
        extra_grads: list[Sequence[Tensor | None] | None] = [None] * len(contexts)
        for step in reversed(self.route.backward_steps):
            own, span = contexts[step.span], range(len(contexts))[step.span]
            if dx is None or not any(ctx.requires_grad for ctx in own):
                dx = None
                break
            if not known:
                spare(self.fuser, self.route, step, own)
            with shown(step.name, "backward"):
                dx, param_grads[step.span], extra_grads[step.span] = step.op.fuser_backward(
                    own, dx, basic_op_grad_extra_outputs=grads[step.span]
                )
            for i in span:
                contexts[i].saved_tensors = ()
                for given, source in zip(extra_grads[i] or (), routing.sources[i], strict=False):
                    if given is not None and source is not None and source[0] not in span:
                        i_source, j_source = source
                        before = grads[i_source][j_source]
                        if before is None and self.fuser.basic_ops[i_source].overwrites_extra_grads:
                            given = given.clone()  # it may be what another op reads yet
                        grads[i_source][j_source] = given if before is None else before + given
            if dx is not None:
                dx = self._into(GRAD_INPUT_BUFFER_KEY, self.grad_buffers, span, span[0], dx)
        if dx is not None:
            dx = tokens_only(dx, self.lead_offsets)
        if not self.route.failed:
            self.route.went_back.add(self.needs)
        return self.flat(dx, param_grads, [self._public(i, own) for i, own in enumerate(extra_grads)])

    def _public(self, index: int, grads: Sequence[Tensor | None] | None) -> list[Tensor | None]:
        """Of gradients of extra inputs those of the caller's. RuntimeError if there are too many or too few."""
        sources = self.fuser.routing.sources[index]
        grads = [None] * len(sources) if grads is None else list(grads)
        if len(grads) != len(sources):
            raise RuntimeError(f"an op returned {len(grads)} gradients of extra inputs, but it has {len(sources)}")
        return [given for given, source in zip(grads, sources, strict=True) if source is None]


def _fed(t: Tensor | None, wanted: bool) -> Tensor | None:
    """What a channel gives: the tensor by itself, which says whether a gradient is wanted for it."""
    if t is None or not t.is_floating_point():
        return t
    return t.detach().requires_grad_(wanted)


def _check_buffer(owner: str, key: str, buffer: Tensor, t: Tensor) -> None:
    """ValueError unless t can be moved there, TypeError for what is no tensor."""
    if not isinstance(buffer, Tensor):
        raise TypeError(f"{owner}: {key!r} must be a tensor, got {type(buffer).__name__}")
    wanted, found = (t.shape, t.dtype, t.device), (buffer.shape, buffer.dtype, buffer.device)
    if wanted != found or not buffer.is_contiguous() or buffer.requires_grad:
        raise ValueError(
            f"{owner}: {key!r} must be contiguous, {tuple(t.shape)}, {t.dtype}, on {t.device}, no parameter; got "
            f"{tuple(buffer.shape)}, {buffer.dtype}, on {buffer.device}, requires_grad={buffer.requires_grad}"
        )


def _overlap(a: object, b: object) -> bool:
    """Whether both are plain tensors that reach over common bytes."""
    if not (isinstance(a, Tensor) and isinstance(b, Tensor) and are_plain((a, b))):
        return False
    if a.is_meta or not a.numel() or not b.numel():
        return False
    spans = [range(t.data_ptr(), t.data_ptr() + (_reach(t) + 1) * t.element_size()) for t in (a, b)]
    return a.device == b.device and max(s.start for s in spans) < min(s.stop for s in spans)


def _reach(t: Tensor) -> int:
    """How many elements lie between the first and the last of t."""
    return sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))


def separate(results: Sequence[Tensor], x: Tensor, call: FullCall) -> list[Tensor]:
    """Results that autograd may give histories of their own: no tensor twice, no view, none that is an input."""
    y, *extra = results
    first = y if call.kwargs and any(OUTPUT_BUFFER_KEY in own for own in call.kwargs) else owned(y, x)
    made: list[Tensor] = [first]
    for t in extra:
        known = t is x or t._is_view() or any(t is other for other in (y, *made))
        made.append(torch.ops.aten._unsafe_view(t, t.shape) if known else t)
    return made


class _FullRun(torch.autograd.Function):
    """A `FullCall` as one autograd node. Arguments after `call`: all parameters, then all extra inputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: FullCall, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        results = separate(call.forward(x, ctx.needs_input_grad, True), x, call)
        ctx.call = call
        ctx.save_for_backward(*call.take_saved())
        ctx.mark_non_differentiable(*[t for t in results if not t.is_floating_point()])
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = saved_for(ctx)
        ctx.call.check_backward()
        let_go(ctx)
        device = next(g.device for g in grads if g is not None)
        with without_autocast(device, autocast_dtype_on(device)):
            dx, *rest = ctx.call.backward(saved, *grads)
        return dx, None, *rest


record_fully = super(torch.autograd.Function, _FullRun).apply
"""`_FullRun.apply`, as `call.record`."""
