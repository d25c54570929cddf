"""Activations: unary and gated ones, and what those have in common that multiply each row by its router probability.

Formulas, with gate a (the first half of the columns), linear half b, σ the logistic function:

| op | y | source |
|---|---|---|
| GELU, QGELU | gelu_tanh(x), x·σ(1.702x) | Hendrycks, Gimpel 2016, arXiv:1606.08415 |
| SiLU, ReLU, SReLU | x·σ(x), max(x, 0), max(x, 0)² | |
| SwiGLU, GLU | a·σ(a)·b, σ(a)·b | Shazeer 2020, arXiv:2002.05202 |
| GeGLU, QGeGLU, ReGLU, SReGLU | gelu_tanh(a)·b, a·σ(1.702a)·b, max(a, 0)·b, max(a, 0)²·b | the same |
| ClampedSwiGLU | a'·σ(αa')·b', a' = min(a, limit), b' = clamp(b, ±limit) + offset | GPT-OSS |
| SiTUGLU | β1·tanh(a/β1)·σ(a)·β2·tanh(b/β2) | Transformer Engine |
| Scaled… (`scaled_activations.py`) | the same times `scales`, one per row | |

Everything is evaluated in FP32 (FP64 for FP64 inputs) and rounded once; scales are rounded to the compute dtype first.
Interfaces as in transformer_engine.pytorch.ops (2.20); ScaledGeGLU and limit=None are ours.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from cute_kernels import reference
from cute_kernels.activation import CONSTANTS, Activation
from cute_kernels.quantization.formats import Format, fp8_tensor
from cute_kernels.quantization.quantize import Quantized, dequantize, quantize
from fusible_ops import checks
from fusible_ops.op import BasicOperation, OperationContext, ParamGrads
from fusible_ops.quantized_tensor import QuantizedTensor
from fusible_ops.quantizer import may_stay_unrounded, unrounded
from patterns.chain import OpSpec


def _block(owner: str, glu_interleave_size: int | None) -> int:
    """The interleave as kernels take it: 0 for plain halves."""
    if not glu_interleave_size:
        return 0
    checks.positive(owner, glu_interleave_size=glu_interleave_size)
    return glu_interleave_size


class ActivationOperation(BasicOperation):
    """The common part: `activation` says which function, `glu_interleave` how the input's columns lie (0: `[a | b]`).

    Input [..., I] (unary) or [..., 2I] (gated), output [..., I]; the input's gradient lies as the input does.
    cache_quantized_input: keep the input for backward in E4M3, with one scale from its largest magnitude. Without it
    a recipe says how the input is kept (`Recipe`'s preactivation).
    Errors: ValueError for an odd gated width or an interleave that does not divide I; TypeError for a dtype that is
    not a float.
    """

    scaled = False
    known_kwargs = ()
    keeps_zero_rows = True
    graph_facts = ("activation", "glu_interleave", "cache_quantized_input")

    def __init__(
        self, activation: Activation, *, cache_quantized_input: bool = False, glu_interleave_size: int | None = None
    ) -> None:
        super().__init__()
        self.activation = activation
        self.cache_quantized_input = cache_quantized_input
        self.glu_interleave = _block(type(self).__name__, glu_interleave_size)

    @property
    def glu_interleave_size(self) -> int | None:
        """As it was given; None for plain halves. `pack_glu_weights_` alone changes it, with the weights."""
        return self.glu_interleave or None

    def describe(self) -> OpSpec:
        kind = self.activation
        facts: dict[str, object] = {
            "scaled": self.scaled,
            "glu_interleave": self.glu_interleave,
            **kind.constants(),
            "cache_quantized_input": self.cache_quantized_input,
        }
        return OpSpec(kind.kind, self.name, facts)

    def extra_repr(self) -> str:
        own = CONSTANTS.get(self.activation.kind, ())
        shown = [f"{name}={getattr(self.activation, name)}" for name in own]
        if self.glu_interleave:
            shown.append(f"glu_interleave_size={self.glu_interleave}")
        return ", ".join(shown)

    def output_width(self, incoming: int | None) -> int | None:
        if incoming is not None:
            self.check_width(incoming)
        return None if incoming is None else incoming // self.activation.halves

    def check_width(self, width: int, owner: str = "") -> None:
        """ValueError unless `width` input columns split into two halves and those into interleave blocks."""
        if not self.activation.is_glu:
            return
        owner = owner or self.label()
        if width % 2:
            raise ValueError(f"{owner}: a gated activation needs an even number of columns, got {width}")
        if self.glu_interleave and (width // 2) % self.glu_interleave:
            raise ValueError(
                f"{owner}: glu_interleave_size={self.glu_interleave} does not divide {width // 2}, half of "
                f"{width} columns"
            )

    def plain_input(self, ctx: OperationContext, x: Tensor) -> Tensor:
        """The checked input in the compute dtype, laid out as `[a | b]`."""
        checks.float_input(ctx.owner, x)
        if x.dim() == 0:
            raise ValueError(f"{ctx.owner}: the input must have at least one dimension")
        self.check_width(x.shape[-1], ctx.owner)
        return reference.deinterleave(x.to(ctx.compute_dtype(x.dtype)), self.glu_interleave, -1)

    def op_forward(
        self,
        ctx: OperationContext,
        input_: Tensor,
        *,
        prev_op_grad_output_quantizer: Any = None,
        next_op_input_quantizer: Any = None,
        **_: Any,
    ) -> Tensor:
        preact = self.plain_input(ctx, input_)
        if ctx.requires_grad:
            ctx.grad_is_unrounded = may_stay_unrounded(prev_op_grad_output_quantizer)
            ctx.save_for_backward(*self.kept(ctx, preact))
        return self.act(preact, None, may_stay_unrounded(next_op_input_quantizer))

    def op_backward(self, ctx: OperationContext, grad_output: Tensor) -> tuple[Tensor | None, Iterable[Tensor | None]]:
        if not ctx.input_requires_grad:
            return None, []
        return self.dpreact(ctx, grad_output, self.restored(ctx, ctx.saved_tensors))[0], []

    def kept_format(self, ctx: OperationContext) -> Format | None:
        """The format in which the input is kept for backward, each of its halves by itself; None: as it is."""
        if self.cache_quantized_input:
            return fp8_tensor()
        return None if ctx.recipe is None else ctx.recipe.preactivation_format

    def kept(self, ctx: OperationContext, preact: Tensor) -> Sequence[Tensor]:
        """What backward needs of the input."""
        ctx.preact_dtype = preact.dtype
        format = self.kept_format(ctx)
        if format is None:
            return [preact]
        width = preact.shape[-1] // self.activation.halves
        checks.divides(ctx.owner, "the columns of its result", width, format, format.multiple()[1])
        data, scale, _ = quantize(preact.reshape(-1, width), format)
        return [data.view(preact.shape), scale]

    def restored(self, ctx: OperationContext, kept: Sequence[Tensor]) -> Tensor:
        """The input, from what `kept` gave; of blocks in FP32."""
        format = self.kept_format(ctx)
        if format is None:
            return kept[0]
        data, scale = kept
        rows = data.view(-1, data.shape[-1] // self.activation.halves)
        dtype = ctx.preact_dtype if format.block is None else torch.float32
        return dequantize(Quantized(rows, scale), format, dtype=dtype).view(data.shape)

    def act(self, preact: Tensor, rows: Tensor | None, stays_unrounded: bool) -> Tensor:
        """f(preact)·rows, rounded to preact's dtype; not rounded if the next op quantises it from FP32."""
        if not stays_unrounded:
            return reference.activation_forward(preact, self.activation, rows)
        return unrounded(reference.activation_forward(preact, self.activation, rows, torch.float32), preact.dtype)

    def dpreact(
        self, ctx: OperationContext, grad: Tensor, preact: Tensor, rows: Tensor | None = None, need_drows: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """(gradient of the input, of `rows`); the first is not rounded if the op before quantises it so."""
        plain = grad.dequantize(torch.float32) if isinstance(grad, QuantizedTensor) else grad
        dtype = torch.float32 if ctx.grad_is_unrounded else ctx.preact_dtype
        rows = None if rows is None else rows.to(ctx.preact_dtype)
        dx, drows = reference.activation_backward(plain, preact, self.activation, rows, need_drows, dtype)
        dx = reference.interleave(dx, self.glu_interleave, -1)
        return unrounded(dx, ctx.preact_dtype) if ctx.grad_is_unrounded else dx, drows


class ScaledActivation(ActivationOperation):
    """An activation times `scales`, its extra input: float, one value for each row of the input, on the input's device.

    y = round(f(x)·s). Gradients: (dy·s)·∂f for the input, Σ_columns dy·f in FP32 for the scales (only if they require
    it).
    """

    scaled = True
    activation_recompute_in_mlp = False
    num_extra_inputs = 1

    def check_call(self, x: Tensor | None, extra_inputs: Sequence[Tensor], owner: str) -> None:
        checks.row_scales(owner, "scales", extra_inputs[0], x)

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: Tensor,
        *,
        basic_op_extra_inputs: Sequence[Sequence[Tensor]],
        prev_op_grad_output_quantizer: Any = None,
        next_op_input_quantizer: Any = None,
        **_: Any,
    ) -> tuple[Tensor, Sequence[Sequence[Tensor]]]:
        ctx, scales = basic_op_ctxs[0], basic_op_extra_inputs[0][0]
        preact = self.plain_input(ctx, input_)
        rows = scales.reshape(preact.shape[:-1])
        offsets = None
        if ctx.split_sizes is not None:  # rows of no group have zero pre-activations, but may have any scale
            offsets = reference.group_offsets(ctx.split_sizes, rows.numel())
            rows = reference.tokens_only(rows.reshape(-1), offsets).view(rows.shape)
        if ctx.requires_grad:
            ctx.grad_is_unrounded = may_stay_unrounded(prev_op_grad_output_quantizer)
            ctx.scales_require_grad, ctx.scales_shape = scales.requires_grad, scales.shape
            ctx.save_for_backward(rows, offsets, *self.kept(ctx, preact))
        return self.act(preact, rows, may_stay_unrounded(next_op_input_quantizer)), [()]

    def fuser_backward(
        self, basic_op_ctxs: list[OperationContext], grad_output: Tensor, **_: Any
    ) -> tuple[Tensor | None, Sequence[ParamGrads], Sequence[ParamGrads]]:
        ctx = basic_op_ctxs[0]
        rows, offsets, *kept = ctx.saved_tensors
        dx, dscales = self.dpreact(ctx, grad_output, self.restored(ctx, kept), rows, ctx.scales_require_grad)
        if dscales is not None:
            if offsets is not None:
                dscales = reference.tokens_only(dscales.reshape(-1), offsets)
            dscales = dscales.view(ctx.scales_shape)
        return dx if ctx.input_requires_grad else None, [[]], [[dscales]]


class GELU(ActivationOperation):
    """y = gelu_tanh(x). See `ActivationOperation`."""

    def __init__(self, *, cache_quantized_input: bool = False) -> None:
        super().__init__(Activation("gelu"), cache_quantized_input=cache_quantized_input)


class QGELU(ActivationOperation):
    """y = x·σ(1.702x). See `ActivationOperation`."""

    def __init__(self, *, cache_quantized_input: bool = False) -> None:
        super().__init__(Activation("qgelu"), cache_quantized_input=cache_quantized_input)


class SiLU(ActivationOperation):
    """y = x·σ(x). See `ActivationOperation`."""

    def __init__(self, *, cache_quantized_input: bool = False) -> None:
        super().__init__(Activation("silu"), cache_quantized_input=cache_quantized_input)


class ReLU(ActivationOperation):
    """y = max(x, 0). See `ActivationOperation`."""

    def __init__(self, *, cache_quantized_input: bool = False) -> None:
        super().__init__(Activation("relu"), cache_quantized_input=cache_quantized_input)


class SReLU(ActivationOperation):
    """y = max(x, 0)². See `ActivationOperation`."""

    def __init__(self, *, cache_quantized_input: bool = False) -> None:
        super().__init__(Activation("srelu"), cache_quantized_input=cache_quantized_input)


class SwiGLU(ActivationOperation):
    """y = a·σ(a)·b. glu_interleave_size = g: the columns lie as blocks of g of a, then g of b; None: `[a | b]`."""

    def __init__(self, *, cache_quantized_input: bool = False, glu_interleave_size: int | None = None) -> None:
        super().__init__(
            Activation("swiglu"), cache_quantized_input=cache_quantized_input, glu_interleave_size=glu_interleave_size
        )


class GeGLU(ActivationOperation):
    """y = gelu_tanh(a)·b. glu_interleave_size as `SwiGLU`'s."""

    def __init__(self, *, cache_quantized_input: bool = False, glu_interleave_size: int | None = None) -> None:
        super().__init__(
            Activation("geglu"), cache_quantized_input=cache_quantized_input, glu_interleave_size=glu_interleave_size
        )


GEGLU = GeGLU


class GLU(ActivationOperation):
    """y = σ(a)·b. See `ActivationOperation`."""

    def __init__(self, *, cache_quantized_input: bool = False) -> None:
        super().__init__(Activation("glu"), cache_quantized_input=cache_quantized_input)


class QGeGLU(ActivationOperation):
    """y = a·σ(1.702a)·b. See `ActivationOperation`."""

    def __init__(self, *, cache_quantized_input: bool = False) -> None:
        super().__init__(Activation("qgeglu"), cache_quantized_input=cache_quantized_input)


QGEGLU = QGeGLU


class ReGLU(ActivationOperation):
    """y = max(a, 0)·b. See `ActivationOperation`."""

    def __init__(self, *, cache_quantized_input: bool = False) -> None:
        super().__init__(Activation("reglu"), cache_quantized_input=cache_quantized_input)


class SReGLU(ActivationOperation):
    """y = max(a, 0)²·b. See `ActivationOperation`."""

    def __init__(self, *, cache_quantized_input: bool = False) -> None:
        super().__init__(Activation("sreglu"), cache_quantized_input=cache_quantized_input)


class SiTUGLU(ActivationOperation):
    """y = β1·tanh(a/β1)·σ(a)·β2·tanh(b/β2). glu_interleave_size as `SwiGLU`'s.

    Errors: ValueError for a beta1 or beta2 that is not finite and positive.
    """

    def __init__(
        self,
        *,
        beta1: float = 4.0,
        beta2: float = 25.0,
        cache_quantized_input: bool = False,
        glu_interleave_size: int | None = None,
    ) -> None:
        super().__init__(
            Activation("situglu", beta1=float(beta1), beta2=float(beta2)),
            cache_quantized_input=cache_quantized_input,
            glu_interleave_size=glu_interleave_size,
        )


class ClampedSwiGLU(ActivationOperation):
    """y = a'·σ(αa')·b', a' = min(a, limit), b' = clamp(b, -limit, limit) + glu_linear_offset.

    The gate is clamped from above only. limit=None: no clamp (with alpha=1 and offset 0 exactly SwiGLU). ValueError for
    limit <= 0. GPT-OSS has the defaults; DeepSeek-V4 limit=10, alpha=1, offset 0.
    """

    def __init__(
        self,
        *,
        limit: float | None = 7.0,
        alpha: float = 1.702,
        glu_linear_offset: float = 1.0,
        cache_quantized_input: bool = False,
        glu_interleave_size: int | None = None,
    ) -> None:
        super().__init__(
            clamped(limit, alpha, glu_linear_offset),
            cache_quantized_input=cache_quantized_input,
            glu_interleave_size=glu_interleave_size,
        )


def clamped(limit: float | None, alpha: float, offset: float) -> Activation:
    """The function of `ClampedSwiGLU`."""
    return Activation("clamped_swiglu", None if limit is None else float(limit), float(alpha), float(offset))
