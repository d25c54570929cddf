"""Transformer Engine's basic ops as ours: ops that act on the same parameters, so that rules and kernels know them.

Nothing here imports Transformer Engine: an op of its is known by its class's name and module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fusible_ops import activations, casts, scaled_activations
from fusible_ops.grouped_linear import GroupedLinear
from fusible_ops.linear import BasicLinear, Bias, Linear
from fusible_ops.op import BasicOperation, FusibleOperation
from fusible_ops.small_ops import Quantize

TE_MODULE = "transformer_engine.pytorch.ops."


class Parameters(dict[str, Any]):
    """An op's parameters, watched as `casts.ParameterOwner` watches ours: FSDP2 writes into the dictionary itself.

    Copies are plain.
    """

    def __setitem__(self, name: str, param: nn.Parameter | None) -> None:
        former = self.get(name)
        if former is not None and former is not param:
            casts.forget([former])
        super().__setitem__(name, param)

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


@dataclass(frozen=True)
class Unlike:
    """Why an op of Transformer Engine's has no counterpart here."""

    reason: str


def _plain(op: Any, keys: Sequence[str]) -> Unlike | None:
    """Unless these parameters are plain ones of a device."""
    for key in keys:
        p = op._parameters.get(key)
        if type(p) is not nn.Parameter:
            return Unlike(f"{key} is a {type(p).__name__}, needs a plain parameter")
        if p.is_meta:
            return Unlike(f"{key} has no values yet")
        if getattr(p, "is_distributed_weight", False):
            return Unlike(f"{key} is distributed")
    return None


def _grouped_linear(op: Any) -> BasicOperation | Unlike:
    if op.single_grouped_weight or op.single_grouped_bias:
        return Unlike("its parameters are GroupedTensors")
    keys = [f"weight{g}" for g in range(op.num_groups)] + [f"bias{g}" for g in range(op.num_groups * op.has_bias)]
    return _plain(op, keys) or GroupedLinear(
        op.num_groups,
        op.in_features,
        op.out_features,
        bias=op.has_bias,
        device="meta",
        dtype=op.weight0.dtype,
        accumulate_into_main_grad=op._accumulate_into_main_grad,
        delay_wgrad_compute=op.need_backward_dw(),
        scale_bias=op._scale_bias,
    )


def _basic_linear(op: Any) -> BasicOperation | Unlike:
    if op.tensor_parallel_mode is not None or op._userbuffers_options is not None:
        return Unlike("it is tensor parallel")
    accumulates = op._accumulate_into_main_grad
    return _plain(op, ["weight"]) or BasicLinear(
        op.in_features, op.out_features, device="meta", dtype=op.weight.dtype, accumulate_into_main_grad=accumulates
    )


def _bias(op: Any) -> BasicOperation | Unlike:
    if op.tensor_parallel:
        return Unlike("it is tensor parallel")
    return _plain(op, ["bias"]) or Bias(op.local_size, device="meta", dtype=op.bias.dtype)


def _cached(name: str, *more: str) -> Callable[[Any], BasicOperation]:
    """An unscaled activation of this name, with these arguments besides."""
    return lambda op: getattr(activations, name)(**{key: getattr(op, key) for key in ("cache_quantized_input", *more)})


def _scaled_clamped(op: Any) -> BasicOperation:
    clamped = op._clamped
    return scaled_activations.ScaledClampedQGeGLU(
        op.glu_interleave_size, limit=clamped.limit, alpha=clamped.alpha, glu_linear_offset=clamped.glu_linear_offset
    )


_COUNTERPARTS: dict[str, Callable[[Any], BasicOperation | Unlike]] = {
    "GroupedLinear": _grouped_linear,
    "BasicLinear": _basic_linear,
    "Bias": _bias,
    "Quantize": lambda op: Quantize(op._quantize_forward, op._quantize_backward),
    **{name: _cached(name) for name in ("GELU", "QGELU", "SiLU", "ReLU", "SReLU", "GLU", "QGEGLU", "ReGLU", "SReGLU")},
    "GEGLU": _cached("GEGLU"),
    "SwiGLU": _cached("SwiGLU", "glu_interleave_size"),
    "SiTUGLU": _cached("SiTUGLU", "glu_interleave_size", "beta1", "beta2"),
    "ClampedSwiGLU": _cached("ClampedSwiGLU", "glu_interleave_size", "limit", "alpha", "glu_linear_offset"),
    "ScaledSwiGLU": lambda op: scaled_activations.ScaledSwiGLU(op.glu_interleave_size),
    "ScaledSiTUGLU": lambda op: scaled_activations.ScaledSiTUGLU(
        op.glu_interleave_size, beta1=op.beta1, beta2=op.beta2
    ),
    "ScaledClampedQGeGLU": _scaled_clamped,
    "ScaledSReLU": lambda op: scaled_activations.ScaledSReLU(),
    "ScaledTanhSReLU": lambda op: scaled_activations.ScaledTanhSReLU(tanh_clamp_scale=op.tanh_clamp_scale),
}


def counterpart(op: Any) -> BasicOperation | Unlike:
    """Our op that does what `op` does with the same parameters, or why there is none."""
    kind = type(op)
    make = _COUNTERPARTS.get(kind.__name__) if kind.__module__.startswith(TE_MODULE) else None
    if make is None:
        return Unlike("no rule knows it")
    made = make(op)
    if isinstance(made, BasicOperation):
        if not isinstance(op._parameters, Parameters):
            op.__dict__["_parameters"] = Parameters(op._parameters)
        made.__dict__["_parameters"] = op._parameters  # one dictionary: whoever replaces a parameter replaces it here
    return made


@dataclass(frozen=True)
class Run:
    """Adjacent ops of Transformer Engine's that have counterparts, from `start` on.

    ops: theirs. ours: the counterparts, a linear with its bias as one `Linear`. counts: how many of theirs each is.
    """

    start: int
    ops: list[Any]
    ours: list[FusibleOperation]
    counts: list[int]

    @property
    def names(self) -> list[str]:
        """The place of each of `ours` among all ops."""
        return [str(self.start + sum(self.counts[:i])) for i in range(len(self.ours))]

    def part(self, start: int, stop: int) -> Run:
        """The same for `ours[start:stop]`."""
        first = sum(self.counts[:start])
        taken = self.ops[first : first + sum(self.counts[start:stop])]
        return Run(self.start + first, taken, self.ours[start:stop], self.counts[start:stop])


def runs_of(ops: Sequence[Any]) -> tuple[list[Run], dict[int, Unlike]]:
    """Maximal runs, and for each op that is in none why."""
    runs: list[Run] = []
    unlike: dict[int, Unlike] = {}
    for i, op in enumerate(ops):
        made = counterpart(op)
        if isinstance(made, Unlike):
            unlike[i] = made
            continue
        if not runs or runs[-1].start + len(runs[-1].ops) != i:
            runs.append(Run(i, [], [], []))
        run = runs[-1]
        linear = run.ours[-1] if run.ours else None
        run.ops.append(op)
        if isinstance(made, Bias) and isinstance(linear, Linear) and len(linear.basic_ops) == 1:
            linear.basic_ops.append(made)
            run.counts[-1] = 2
            continue
        run.ours.append(_alone(made) if isinstance(made, BasicLinear) else made)
        run.counts.append(1)
    return runs, unlike


def _alone(linear: BasicLinear) -> Linear:
    """A container around this linear."""
    made = Linear(linear.in_features, linear.out_features, bias=False, device="meta", dtype=linear.weight.dtype)
    made.basic_ops[0] = linear
    return made


def is_plain(t: Any) -> bool:
    """Whether it is a tensor of no special class."""
    return type(t) in (Tensor, nn.Parameter)
