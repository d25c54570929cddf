"""GroupedLinear: one linear map for each group of rows."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from cute_kernels.facts import NO_PLANS, Plans
from cute_kernels.limits import dtype_name
from fusible_ops import checks
from fusible_ops.autocast_mode import current_model_init
from fusible_ops.graph_key import LAYOUT
from fusible_ops.op import BasicOperation, OperationContext, ParamGrads
from fusible_ops.parameters import Held, Unchanged, WeightGrad, accumulate_main_grads, main_grads, pack_, signal_added
from fusible_ops.quantized_parameters import check_alike, hold_quantized, new_values, pack_quantized_, tie_quantizers
from fusible_ops.quantized_tensor import QuantizedTensor, format_of
from patterns.chain import OpSpec


class GroupedLinear(BasicOperation):
    """y = x W_gᵀ + b_g for the rows of group g; with `scale_bias`, y = x W_gᵀ + s_row·b_g.

    Extra inputs: `split_sizes`, int32 or int64 [G] on the input's device: rows of each group, in order. Then
    `scales`, float, one per row, if `scale_bias` (and `bias`). Splits stay on the device; their sum may be below the
    row count T, and the rows past it come out as exactly zero (and get a zero gradient).

    Input [..., K], output [..., N] in the weights' dtype (or autocast's: the weights are then cast once per update, see
    `casts`). Sums are FP32, rounded once after the bias.

    num_groups, in_features, out_features: G, K, N. bias: whether there is one. device: None means CUDA if there is one,
    else CPU. dtype: float32, float16, bfloat16 or float64 (None: torch's default). accumulate_into_main_grad: add
    weight gradients to `weight.main_grad` instead of returning them. single_grouped_weight, single_grouped_bias: one
    parameter `weight [G, N, K]`, `bias [G, N]` instead of `weight{i}`, `bias{i}`. transposed_weight: weights are stored
    and shaped [K, N] (a single one [G, K, N]), as Hugging Face's GPT-OSS has them. delay_wgrad_compute: weight
    gradients wait for `backward_dw()`. rng_state_tracker_function: its `.fork()` surrounds the initialisation.

    Keyword arguments (`op_kwargs`): output, grad_input: buffers of the caller's for the output and for the input's
    gradient, of exactly their shape, dtype and device.

    Errors: ValueError for sizes <= 0, a wrong buffer, a wrong split count, last dimension or device; TypeError
    for wrong dtypes.
    Source: the interface is that of transformer_engine.pytorch.ops.GroupedLinear (2.20).
    """

    known_kwargs = ("output", "grad_input")
    split_sizes_slot = 0
    graph_facts = ("num_groups", "in_features", "out_features", "has_bias", "scale_bias", *LAYOUT)
    quantized_program = "fusible_ops.quantized_linear:QuantizedLinear"

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        rng_state_tracker_function: Callable[[], Any] | None = None,
        accumulate_into_main_grad: bool = False,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        delay_wgrad_compute: bool = False,
        scale_bias: bool = False,
        transposed_weight: bool = False,
    ) -> None:
        checks.positive("GroupedLinear", num_groups=num_groups, in_features=in_features, out_features=out_features)
        self.num_extra_inputs = 2 if scale_bias and bias else 1
        super().__init__()
        self.num_groups, self.in_features, self.out_features = num_groups, in_features, out_features
        self.has_bias = bias
        self.scale_bias = scale_bias and bias
        self.accumulate_into_main_grad = accumulate_into_main_grad
        self.delay_wgrad_compute = delay_wgrad_compute
        self.single_grouped_weight = single_grouped_weight
        self.single_grouped_bias = single_grouped_bias and bias
        self.transposed_weight = transposed_weight
        self._rng_state_tracker_function = rng_state_tracker_function
        self._weight_keys = self._keys("weight", self.single_grouped_weight)
        self._bias_keys = self._keys("bias", self.single_grouped_bias) if bias else []
        self._model_init = current_model_init()
        if self._model_init is not None and transposed_weight:
            raise NotImplementedError(
                "GroupedLinear: transposed_weight=True inside quantized_model_init is not supported"
            )
        self._delayed: deque[WeightGrad] = deque()
        self._wgrad_hooks: list[Callable[[], Any]] = []
        device = checks.default_device(device)
        dtype = checks.float_dtype("GroupedLinear", dtype or torch.get_default_dtype())
        shape = (in_features, out_features) if transposed_weight else (out_features, in_features)
        weight = torch.empty(num_groups, *shape, device=device, dtype=dtype)
        self._biases_first = single_grouped_weight and not single_grouped_bias  # Transformer Engine's order
        if not self._biases_first:
            self._register("weight", weight, self.single_grouped_weight)
        if bias:
            self._register(
                "bias", torch.empty(num_groups, out_features, device=device, dtype=dtype), self.single_grouped_bias
            )
        if self._biases_first:
            self._register("weight", weight, self.single_grouped_weight)
        if not weight.is_meta:
            self.reset_parameters()
        self._mark_delayed()

    def _register(self, name: str, buffer: Tensor, single: bool) -> None:
        """`name` as one parameter, or `name{g}` as views of the buffer."""
        for g, key in enumerate(self._keys(name, single)):
            self.register_parameter(key, Parameter(buffer if single else buffer[g]))

    def _mark_delayed(self) -> None:
        """Tell data parallelism, by an attribute, that backward is not when these weights' gradients are there."""
        if self.delay_wgrad_compute:
            for w in self.weight_parameters():
                w.skip_backward_post_hook = True  # type: ignore[attr-defined]

    def _keys(self, name: str, single: bool) -> list[str]:
        return [name] if single else [f"{name}{g}" for g in range(self.num_groups)]

    def reset_parameters(self) -> None:
        """Each expert as `torch.nn.Linear` draws it (kaiming_uniform, a=√5), in order; biases zero.

        Under `quantized_model_init` the weights are quantised then.
        """
        if next(self.parameters()).is_meta:
            self.to_empty(device=checks.default_device(None))
        tracker, weights = self._rng_state_tracker_function, self.weight_parameters()
        with tracker().fork() if tracker else nullcontext(), torch.no_grad(), new_values(weights) as values:
            for w in self._experts(values):
                w.copy_(
                    nn.init.kaiming_uniform_(torch.empty_like(w, memory_format=torch.contiguous_format), math.sqrt(5))
                )
            for b in self.bias_parameters():
                b.zero_()
        hold_quantized(self, self._weight_keys, self._model_init)

    # -- parameters ------------------------------------------------------------------------------------------------

    def hold(self, owner: str) -> Held:
        weights = self.weight_parameters()
        if not self.has_bias:
            return Held(weights, weights, (), self.transposed_weight)
        biases = self.bias_parameters()
        parameters = [*biases, *weights] if self._biases_first else [*weights, *biases]
        return Held(parameters, weights, biases, self.transposed_weight)

    def weight_parameters(self) -> list[Parameter]:
        """`[weight]`, or `[weight0, …]`."""
        try:
            return list(map(self._parameters.__getitem__, self._weight_keys))  # type: ignore[arg-type]
        except KeyError as missing:
            raise checks.lost(self.label(), missing) from None

    def bias_parameters(self) -> list[Parameter]:
        """`[bias]`, `[bias0, …]`, or nothing."""
        try:
            return list(map(self._parameters.__getitem__, self._bias_keys))  # type: ignore[arg-type]
        except KeyError as missing:
            raise checks.lost(self.label(), missing) from None

    def output_dim(self, name: str) -> int:
        return -1 if name.startswith("bias") or self.transposed_weight else -2

    @property
    def first_weight(self) -> Parameter:
        """`weight`, or `weight0`."""
        first = self._parameters.get(self._weight_keys[0])
        return self.weight_parameters()[0] if first is None else first

    def expert_weights(self) -> Iterator[Tensor]:
        """Each expert's [N, K] weight, as a view."""
        return iter(self._experts(self.weight_parameters()))

    def _experts(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """Each expert's [N, K] part, as a view, of tensors like the weight parameters."""
        experts = weights[0].unbind(0) if self.single_grouped_weight else weights
        return [w.mT for w in experts] if self.transposed_weight else list(experts)

    @property
    def weight_dtype(self) -> torch.dtype:
        return self.first_weight.dtype

    def _pack(self) -> None:
        if any(isinstance(p, QuantizedTensor) for p in self.weight_parameters()):
            pack_quantized_(self.weight_parameters())
        elif not self.single_grouped_weight:
            pack_(self.weight_parameters())
        if self.has_bias and not self.single_grouped_bias:
            pack_(self.bias_parameters())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> GroupedLinear:
        super()._apply(fn, recurse)
        self._pack()
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Weight gradients that wait belong to a graph, not to the op: a copy has none."""
        return {**self.__dict__, "_delayed": deque()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._mark_delayed()
        self._pack()
        tie_quantizers(self, self._weight_keys, self._model_init)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Takes either layout, `weight{i}` or one `weight`, whichever this op itself has."""
        for name, single in (("weight", self.single_grouped_weight), ("bias", self.single_grouped_bias)):
            keys = [prefix + key for key in self._keys(name, False)]
            if single and all(key in state_dict for key in keys):
                state_dict[f"{prefix}{name}"] = torch.stack([state_dict.pop(key) for key in keys])
            elif not single and getattr(state_dict.get(f"{prefix}{name}"), "shape", [None])[0] == self.num_groups:
                state_dict.update(zip(keys, state_dict.pop(f"{prefix}{name}").unbind(0), strict=True))
        super()._load_from_state_dict(state_dict, prefix, *args)
        tie_quantizers(self, self._weight_keys, self._model_init)

    def extra_repr(self) -> str:
        return (
            f"num_groups={self.num_groups}, in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.has_bias}"
            + (", scale_bias=True" if self.scale_bias else "")
            + (", transposed_weight=True" if self.transposed_weight else "")
        )

    def describe(self) -> OpSpec:
        return OpSpec(
            "grouped_linear",
            self.name,
            {
                "num_groups": self.num_groups,
                "in_features": self.in_features,
                "out_features": self.out_features,
                "has_bias": self.has_bias,
                "scale_bias": self.scale_bias,
                "dtype": dtype_name(self.weight_dtype),
                "held": format_of(self.first_weight),
                "accumulate_into_main_grad": self.accumulate_into_main_grad,
                "delay_wgrad": self.delay_wgrad_compute,
                "single_grouped_weight": self.single_grouped_weight,
                "single_grouped_bias": self.single_grouped_bias,
                "transposed_weight": self.transposed_weight,
            },
        )

    def num_quantizers(self, mode: str) -> int:
        return 2 * self.num_groups if mode == "forward" else self.num_groups

    # -- forward and backward --------------------------------------------------------------------------------------

    def input_width(self) -> int | None:
        return self.in_features

    def output_width(self, incoming: int | None) -> int | None:
        return self.out_features

    def check_input(self, x: Tensor, owner: str) -> None:
        """Raise for an input that this op cannot take. owner: how the error calls this op."""
        checks.float_input(owner, x)
        checks.last_dimension(owner, x, self.in_features)
        checks.same_device(owner, "the input", x, self.first_weight.device)

    def check_call(self, x: Tensor | None, extra_inputs: Sequence[Tensor], owner: str) -> None:
        checks.split_sizes(owner, extra_inputs[0], self.num_groups, self.first_weight.device)
        if self.scale_bias:
            checks.row_scales(owner, "scales", extra_inputs[1], x)

    def check_parameters(self, held: Held, owner: str) -> None:
        first_of = slice(1 if held.is_packed else None)  # those that are packed are alike: the first speaks for all
        checks.alike(owner, held.weights[first_of], held.biases[first_of])
        check_alike(held.weights, held.transposed, owner)

    def check_wants(self, held: Held, wants: Sequence[bool], owner: str) -> None:
        checks.alike(owner, held.weights, held.biases)

    def check_backward(self, ctx: OperationContext) -> None:
        if self.accumulate_into_main_grad and ctx.wants[0]:
            self.check_main_grads(ctx.held.weights, ctx.owner)

    def check_main_grads(self, weights: Sequence[Parameter], owner: str) -> None:
        """Raise for weights without the buffer that their gradients are to be added to."""
        if self.accumulate_into_main_grad and not self.delay_wgrad_compute:
            main_grads(weights, owner)

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: Tensor,
        *,
        basic_op_extra_inputs: Sequence[Sequence[Tensor]],
        **_: Any,
    ) -> tuple[Tensor, Sequence[Sequence[Tensor]]]:
        ctx, extras = basic_op_ctxs[0], basic_op_extra_inputs[0]
        self.check_input(input_, ctx.owner)
        dtype = ctx.compute_dtype(self.weight_dtype)
        x = input_.reshape(-1, self.in_features).to(dtype)
        offsets = ctx.formulas.group_offsets(extras[0], x.shape[0])
        weights, bias = ctx.held.operands(dtype, ctx.requires_grad), ctx.held.bias(dtype, ctx.requires_grad)
        scales = extras[1].reshape(-1) if self.scale_bias else None
        y = ctx.formulas.grouped_gemm(x, weights, offsets, bias, scales)
        if ctx.requires_grad:
            ctx.input_shape, ctx.dtype = input_.shape, dtype
            ctx.scales_shape = extras[1].shape if scales is not None and extras[1].requires_grad else None
            read_weights = ctx.held.weights if ctx.input_requires_grad else []
            read_biases = ctx.held.biases if ctx.scales_shape is not None else []
            ctx.unchanged = Unchanged([*read_weights, *read_biases])
            keep_x = x if ctx.wants[0] else None
            keep_bias = bias if ctx.scales_shape is not None else None
            keep_weights = weights if ctx.input_requires_grad else []
            ctx.save_for_backward(keep_x, offsets, scales, keep_bias, *keep_weights)
        return y.view(*input_.shape[:-1], self.out_features), [()]

    def fuser_backward(
        self, basic_op_ctxs: list[OperationContext], grad_output: Tensor, **_: Any
    ) -> tuple[Tensor | None, Sequence[ParamGrads], Sequence[ParamGrads]]:
        ctx = basic_op_ctxs[0]
        x, offsets, scales, bias, *weights = ctx.saved_tensors
        dy = grad_output.reshape(-1, self.out_features).to(ctx.dtype).contiguous()
        dx = None
        if ctx.input_requires_grad:
            dx = ctx.formulas.grouped_gemm_dgrad(dy, weights, offsets).view(ctx.input_shape)
        dscales = None
        if ctx.scales_shape is not None:
            dscales = ctx.formulas.grouped_dscale(dy, bias, offsets).view(ctx.scales_shape)
        grads = self.parameter_grads(ctx, ctx.formulas, dy, x, offsets, scales)
        return dx, [grads], [[None, dscales] if self.scale_bias else [None]]

    def parameter_grads(
        self,
        ctx: OperationContext,
        kernels: Any,
        dy: Tensor,
        x: Tensor | None,
        offsets: Tensor,
        scales: Tensor | None = None,
        glu_interleave: int = 0,
        db: Tensor | None = None,
        plans: Plans = NO_PLANS,
    ) -> ParamGrads:
        """Gradients in the order of `ctx.held`, or None for weights whose gradient went elsewhere or waits.

        dy [T, N] (as `[gate | linear]` if glu_interleave), x [T, K] (None if the weights are frozen). db: the gradient
        of the bias [G, N], where it is known already. plans: of these kernels, for calls that are alike.
        """
        if x is None:
            return [None] * (len(self._weight_keys) + len(self._bias_keys))
        pair = (x, dy) if self.transposed_weight else (dy, x)
        weight_grads = self.weight_grads(ctx.held.weights, WeightGrad(kernels, *pair, offsets, glu_interleave, plans))
        if not self.has_bias:
            return weight_grads
        db = kernels.grouped_dbias(dy, offsets, scales, glu_interleave) if db is None else db
        db = db.to(ctx.held.biases[0].dtype)
        bias_grads = [db] if self.single_grouped_bias else db.unbind(0)
        first, second = (bias_grads, weight_grads) if self._biases_first else (weight_grads, bias_grads)
        return [*first, *second]

    def weight_grads(self, weights: Sequence[Parameter], grad: WeightGrad) -> Sequence[Tensor | None]:
        """Those of the weights; None for each whose gradient went elsewhere or waits."""
        if self.delay_wgrad_compute:
            self._delayed.append(grad)
            return signal_added(weights) if self.accumulate_into_main_grad else [None] * len(weights)
        if self.accumulate_into_main_grad:
            return accumulate_main_grads(weights, grad, self.label())
        return grad.compute(weights)

    # -- delayed weight gradients ----------------------------------------------------------------------------------

    def need_backward_dw(self) -> bool:
        """Whether weight gradients may be delayed to `backward_dw`."""
        return self.delay_wgrad_compute

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], Any]) -> None:
        """Call `hook()` after each `backward_dw`."""
        self._wgrad_hooks.append(hook)

    @torch.no_grad()
    def computed_later(self, grad: WeightGrad) -> list[Tensor]:
        """A weight gradient that has waited, for each weight; nothing if it went into `main_grad`."""
        weights = self.weight_parameters()
        if not self.accumulate_into_main_grad:
            return grad.compute(weights)
        accumulate_main_grads(weights, grad, self.label())
        return []

    def backward_dw(self) -> None:
        """Compute the oldest weight gradient that waits, into `main_grad` or added to `.grad`; nothing if none does."""
        if not self._delayed:
            return
        for w, dw in zip(self.weight_parameters(), self.computed_later(self._delayed[0]), strict=False):
            w.grad = (dw if w.grad is None else w.grad + dw).to(w.dtype)
        self._delayed.popleft()  # only now: a call that raised may be repeated
        for hook in self._wgrad_hooks:
            hook()
