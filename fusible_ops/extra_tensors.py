"""Ops that hand a tensor out of a run, or take one in: MakeExtraOutput, AddExtraInput."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fusible_ops.op import BasicOperation, OperationContext, ParamGrads
from patterns.chain import OpSpec


class MakeExtraOutput(BasicOperation):
    """y = x, and x is an extra output besides: of the run, or of a channel.

    Backward: dx = dy + d_extra, where an extra output that nobody uses has none. in_place: dy is added into d_extra's
    memory, which becomes dx; whoever holds that gradient sees it change. What a channel gives is copied before, and an
    expanded gradient is left alone.
    Source: the interface is that of transformer_engine.pytorch.ops.MakeExtraOutput (2.20).
    """

    num_extra_outputs = 1
    known_kwargs = ()
    graph_facts = ("in_place",)
    keeps_zero_rows = True

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()
        self.in_place = in_place

    @property
    def overwrites_extra_grads(self) -> bool:  # type: ignore[override]
        return self.in_place

    def describe(self) -> OpSpec:
        return OpSpec("make_extra_output", self.name, {"in_place": self.in_place})

    def output_width(self, incoming: int | None) -> int | None:
        return incoming

    def fuser_forward(
        self, basic_op_ctxs: list[OperationContext], input_: Tensor, **_: Any
    ) -> tuple[Tensor, Sequence[Sequence[Tensor]]]:
        return input_, [(input_,)]

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: Tensor,
        *,
        basic_op_grad_extra_outputs: Sequence[Sequence[Tensor | None]] = ((None,),),
    ) -> tuple[Tensor | None, Sequence[ParamGrads], Sequence[ParamGrads]]:
        extra = basic_op_grad_extra_outputs[0][0]
        if extra is None:
            return grad_output, [()], [()]
        in_place = self.in_place and 0 not in extra.stride()
        return extra.add_(grad_output) if in_place else extra + grad_output, [()], [()]


class AddExtraInput(BasicOperation):
    """y = extra + x. Its extra input: a tensor that adds to x.

    Backward: dx = d_extra = dy. in_place: x is added into the memory of `extra`, which y is. What a channel gives,
    or what is also the input of the run, is copied before, since ops in between may keep it for backward.
    Source: the interface is that of transformer_engine.pytorch.ops.AddExtraInput (2.20).
    """

    num_extra_inputs = 1
    known_kwargs = ()
    graph_facts = ("in_place",)

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()
        self.in_place = in_place

    @property
    def overwrites_extra_inputs(self) -> bool:  # type: ignore[override]
        return self.in_place

    def describe(self) -> OpSpec:
        return OpSpec("add_extra_input", self.name, {"in_place": self.in_place})

    def output_width(self, incoming: int | None) -> int | None:
        return incoming

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: Tensor,
        *,
        basic_op_extra_inputs: Sequence[Sequence[Tensor]],
        **_: Any,
    ) -> tuple[Tensor, Sequence[Sequence[Tensor]]]:
        extra = basic_op_extra_inputs[0][0]
        return extra.detach().add_(input_) if self.in_place else extra + input_, [()]

    def fuser_backward(
        self, basic_op_ctxs: list[OperationContext], grad_output: Tensor, **_: Any
    ) -> tuple[Tensor | None, Sequence[ParamGrads], Sequence[ParamGrads]]:
        wanted = basic_op_ctxs[0].extra_wants[0]
        return grad_output, [()], [(grad_output if wanted else None,)]
