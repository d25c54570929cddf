"""Dense linears: BasicLinear (a weight), Bias, and Linear, which is the two together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn import functional as F

from cute_kernels import reference
from cute_kernels.limits import dtype_name
from fusible_ops import checks
from fusible_ops.autocast_mode import current_model_init
from fusible_ops.op import BasicOperation, FusedOperation, FusibleOperation, OperationContext, ParamGrads
from fusible_ops.parameters import Held, WeightGrad, accumulate_main_grads, main_grads
from fusible_ops.quantized_parameters import hold_quantized, new_values, tie_quantizers
from fusible_ops.quantized_tensor import format_of
from patterns.chain import OpSpec


def _no_parallelism(owner: str, tensor_parallel_mode: str | None, **others: object) -> None:
    """NotImplementedError for arguments of Transformer Engine's that ask for tensor parallelism."""
    if tensor_parallel_mode not in (None, "column", "row"):
        raise ValueError(f"{owner}: tensor_parallel_mode must be None, 'column' or 'row', got {tensor_parallel_mode!r}")
    for name, value in {"tensor_parallel_mode": tensor_parallel_mode, **others}.items():
        if value:
            raise NotImplementedError(f"{owner}: {name}={value!r} is not supported; there is no tensor parallelism")


class BasicLinear(BasicOperation):
    """y = x Wᵀ. Input [..., K], weight [N, K], output [..., N] in the weight's dtype (or autocast's).

    in_features, out_features: K, N. device: None means CUDA if there is one, else CPU. accumulate_into_main_grad: add
    the weight gradient to `weight.main_grad` instead of returning it. rng_state_tracker_function: its `.fork()`
    surrounds the initialisation, which is `torch.nn.Linear`'s (kaiming_uniform, a=√5).
    Errors: ValueError for sizes <= 0, a wrong last dimension or device; TypeError for a dtype that is not a float.
    Source: the interface is that of transformer_engine.pytorch.ops.BasicLinear (2.20), without tensor parallelism.
    """

    known_kwargs = ()
    graph_facts = ("in_features", "out_features")
    quantized_program = "fusible_ops.quantized_linear:QuantizedLinear"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        tensor_parallel_mode: str | None = None,
        tensor_parallel_group: object = None,
        sequence_parallel: bool = False,
        rng_state_tracker_function: Callable[[], Any] | None = None,
        accumulate_into_main_grad: bool = False,
        userbuffers_options: object = None,
    ) -> None:
        checks.positive(type(self).__name__, in_features=in_features, out_features=out_features)
        others = {"sequence_parallel": sequence_parallel, "userbuffers_options": userbuffers_options}
        _no_parallelism("BasicLinear", tensor_parallel_mode, tensor_parallel_group=tensor_parallel_group, **others)
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.accumulate_into_main_grad = accumulate_into_main_grad
        self._rng_state_tracker_function = rng_state_tracker_function
        self._model_init = current_model_init()
        dtype = checks.float_dtype("BasicLinear", dtype or torch.get_default_dtype())
        self.weight = Parameter(
            torch.empty(out_features, in_features, device=checks.default_device(device), dtype=dtype)
        )
        if not self.weight.is_meta:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight as `torch.nn.Linear` does. Under `quantized_model_init` it is quantised then."""
        if self.weight.is_meta:
            self.to_empty(device=checks.default_device(None))
        tracker = self._rng_state_tracker_function
        with tracker().fork() if tracker else nullcontext(), torch.no_grad(), new_values([self.weight]) as (values,):
            nn.init.kaiming_uniform_(values, a=math.sqrt(5))
        hold_quantized(self, ["weight"], self._model_init)

    @property
    def weight_dtype(self) -> torch.dtype:
        return self.weight.dtype

    @property
    def first_weight(self) -> Parameter:
        return self.weight

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"

    def describe(self) -> OpSpec:
        return OpSpec("basic_linear", self.name, {**self.facts(), "has_bias": False})

    def facts(self) -> dict[str, object]:
        """What the rules may know of this weight."""
        return {
            "in_features": self.in_features,
            "out_features": self.out_features,
            "dtype": dtype_name(self.weight.dtype),
            "held": format_of(self.weight),
            "accumulate_into_main_grad": self.accumulate_into_main_grad,
        }

    def num_quantizers(self, mode: str) -> int:
        return 2 if mode == "forward" else 1

    def input_width(self) -> int | None:
        return self.in_features

    def output_width(self, incoming: int | None) -> int | None:
        return self.out_features

    def check_input(self, x: Tensor, owner: str) -> None:
        """Raise for an input that this op cannot take. owner: how the error calls this op."""
        checks.float_input(owner, x)
        checks.last_dimension(owner, x, self.in_features)
        checks.same_device(owner, "the input", x, self.weight.device)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        tie_quantizers(self, ["weight"], self._model_init)

    def output_dim(self, name: str) -> int:
        return -2

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        tie_quantizers(self, ["weight"], self._model_init)

    def hold(self, owner: str) -> Held:
        if "weight" not in self._parameters:
            raise RuntimeError(f"{owner}: weight is no parameter any more; parametrised weights are not supported")
        return Held([self.weight], [self.weight])

    def check_backward(self, ctx: OperationContext) -> None:
        if self.accumulate_into_main_grad and ctx.wants[0]:
            main_grads(ctx.held.weights, ctx.owner)

    def op_forward(self, ctx: OperationContext, input_: Tensor, **_: Any) -> Tensor:
        return self.product(ctx, input_, None)

    def product(self, ctx: OperationContext, input_: Tensor, bias: Held | None) -> Tensor:
        """x Wᵀ (+ b, before the one rounding)."""
        self.check_input(input_, ctx.owner)
        dtype = ctx.compute_dtype(self.weight.dtype)
        x, weight = input_.to(dtype), ctx.held.operands(dtype, ctx.requires_grad)[0][0]
        if ctx.requires_grad:
            ctx.dtype = dtype
            ctx.save_for_backward(x if ctx.wants[0] else None, weight if ctx.input_requires_grad else None)
        b = None if bias is None else bias.bias(dtype, ctx.requires_grad)
        return F.linear(x, weight, b if b is None else b[0])

    def op_backward(self, ctx: OperationContext, grad_output: Tensor) -> tuple[Tensor | None, Iterable[Tensor | None]]:
        x, weight = ctx.saved_tensors
        dy = grad_output.to(ctx.dtype)
        dx = dy @ weight if ctx.input_requires_grad else None
        if x is None:
            return dx, [None]
        x2d, dy2d = x.reshape(-1, self.in_features), dy.reshape(-1, self.out_features)
        if not self.accumulate_into_main_grad:
            return dx, [dy2d.t() @ x2d]
        rows = torch.full((1,), x2d.shape[0], dtype=torch.int32, device=x.device)
        grad = WeightGrad(reference, dy2d, x2d, reference.group_offsets(rows, x2d.shape[0]))
        return dx, accumulate_main_grads(ctx.held.weights, grad, ctx.owner)


class Bias(BasicOperation):
    """y = x + b. Input and output [..., N], bias [N], zero at first.

    size: N. device: None means CUDA if there is one, else CPU.
    Errors: ValueError for a size <= 0, a wrong last dimension or device.
    Source: the interface is that of transformer_engine.pytorch.ops.Bias (2.20), without tensor parallelism.
    """

    known_kwargs = ()
    graph_facts = ("size",)

    def __init__(
        self,
        size: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        tensor_parallel: bool = False,
        tensor_parallel_group: object = None,
    ) -> None:
        checks.positive("Bias", size=size)
        _no_parallelism("Bias", None, tensor_parallel=tensor_parallel, tensor_parallel_group=tensor_parallel_group)
        super().__init__()
        self.size = size
        dtype = checks.float_dtype("Bias", dtype or torch.get_default_dtype())
        self.bias = Parameter(torch.zeros(size, device=checks.default_device(device), dtype=dtype))

    def reset_parameters(self) -> None:
        """Set the bias to zero."""
        if self.bias.is_meta:
            self.to_empty(device=checks.default_device(None))
        with torch.no_grad():
            self.bias.zero_()

    def extra_repr(self) -> str:
        return f"size={self.size}"

    def describe(self) -> OpSpec:
        return OpSpec("bias", self.name, {"features": self.size, "dtype": dtype_name(self.bias.dtype)})

    def input_width(self) -> int | None:
        return self.size

    def output_width(self, incoming: int | None) -> int | None:
        return self.size

    def output_dim(self, name: str) -> int:
        return -1

    def hold(self, owner: str) -> Held:
        return Held([self.bias], (), [self.bias])

    def op_forward(self, ctx: OperationContext, input_: Tensor, **_: Any) -> Tensor:
        checks.float_input(ctx.owner, input_)
        checks.last_dimension(ctx.owner, input_, self.size)
        checks.same_device(ctx.owner, "the input", input_, self.bias.device)
        (bias,) = ctx.held.bias(ctx.compute_dtype(self.bias.dtype), ctx.requires_grad)  # type: ignore[misc]
        return input_ + bias

    def op_backward(self, ctx: OperationContext, grad_output: Tensor) -> tuple[Tensor | None, Iterable[Tensor | None]]:
        db = grad_output.reshape(-1, self.size).sum(0) if ctx.wants[0] else None
        return grad_output, [db]


class DenseLinear(FusedOperation):
    """A BasicLinear and its Bias as one unfused step, so that the sum is rounded once, after the bias."""

    def __init__(self, basic_ops: Iterable[BasicOperation]) -> None:
        super().__init__(basic_ops)
        linear, bias = self.basic_ops
        if not (isinstance(linear, BasicLinear) and isinstance(bias, Bias)):
            raise TypeError("DenseLinear takes a BasicLinear and a Bias")
        self._linear, self._bias = linear, bias

    def keeps(self) -> dict[int, int]:
        return {0: 0}

    def fuser_forward(
        self, basic_op_ctxs: list[OperationContext], input_: Tensor, **_: Any
    ) -> tuple[Tensor, Sequence[Sequence[Tensor]]]:
        return self._linear.product(basic_op_ctxs[0], input_, basic_op_ctxs[1].held), [(), ()]

    def fuser_backward(
        self, basic_op_ctxs: list[OperationContext], grad_output: Tensor, **_: Any
    ) -> tuple[Tensor | None, Sequence[ParamGrads], Sequence[ParamGrads]]:
        bias_grads = self._bias.op_backward(basic_op_ctxs[1], grad_output)[1]
        if not basic_op_ctxs[0].requires_grad:  # a frozen weight, and an input that wants no gradient
            return None, [[None], list(bias_grads)], [(), ()]
        dx, weight_grads = self._linear.op_backward(basic_op_ctxs[0], grad_output)
        return dx, [list(weight_grads), list(bias_grads)], [(), ()]


class Linear(FusibleOperation):
    """y = x Wᵀ + b: a `BasicLinear` and, if `bias`, a `Bias`, under the keys `basic_ops.0`, `basic_ops.1`.

    `weight` and `bias` are the inner ops' parameters. Arguments as `BasicLinear`'s.
    Source: the interface is that of transformer_engine.pytorch.ops.Linear (2.20), without tensor parallelism.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        tensor_parallel_mode: str | None = None,
        tensor_parallel_group: object = None,
        sequence_parallel: bool = False,
        rng_state_tracker_function: Callable[[], Any] | None = None,
        accumulate_into_main_grad: bool = False,
    ) -> None:
        super().__init__()
        others = {"tensor_parallel_group": tensor_parallel_group, "sequence_parallel": sequence_parallel}
        _no_parallelism("Linear", tensor_parallel_mode, **others)
        checks.positive("Linear", in_features=in_features, out_features=out_features)
        parts: list[BasicOperation] = [
            BasicLinear(
                in_features,
                out_features,
                device=device,
                dtype=dtype,
                rng_state_tracker_function=rng_state_tracker_function,
                accumulate_into_main_grad=accumulate_into_main_grad,
            )
        ]
        if bias:
            parts.append(Bias(out_features, device=device, dtype=dtype))
        self.basic_ops = nn.ModuleList(parts)

    num_extra_inputs = 0
    quantized_program = BasicLinear.quantized_program

    def fusible_parts(self) -> list[BasicOperation]:
        return list(self.basic_ops)  # type: ignore[arg-type]

    def unfused_steps(self) -> Sequence[BasicOperation | FusedOperation]:
        parts = self.fusible_parts()
        return parts if len(parts) == 1 else [DenseLinear(parts)]

    @property
    def weight(self) -> Parameter:
        return self.basic_ops[0].weight  # type: ignore[return-value]

    @property
    def bias(self) -> Parameter | None:
        return self.basic_ops[1].bias if len(self.basic_ops) > 1 else None  # type: ignore[return-value]

    def reset_parameters(self) -> None:
        """Draw the weight as `torch.nn.Linear` does; the bias becomes zero."""
        for op in self.basic_ops:
            op.reset_parameters()  # type: ignore[operator]

    def describe(self) -> OpSpec:
        linear: BasicLinear = self.basic_ops[0]  # type: ignore[assignment]
        return OpSpec("linear", self.name, {**linear.facts(), "has_bias": len(self.basic_ops) > 1})
