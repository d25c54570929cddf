"""Grouped linears and MLPs as functions, over weights that the caller owns: adapters, merged weights, weights from
elsewhere.

    y = grouped_linear(x, weight, split_sizes) + grouped_linear(grouped_linear(x, a, split_sizes), b, split_sizes)

They are the ops of the same names, so they fuse where those do, and gradients go to whatever the caller passed, leaf or
not. A weight is one tensor [G, N, K] (read where it lies) or a sequence of G tensors [N, K].
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from cute_kernels.activation import Activation
from fusible_ops.activations import ActivationOperation, ScaledActivation
from fusible_ops.autocast_mode import current_recipe
from fusible_ops.fuser import OperationFuser
from fusible_ops.grouped_linear import GroupedLinear
from fusible_ops.op import BasicOperation
from fusible_ops.recipe import DelayedScaling

Weight = Tensor | Sequence[Tensor]


def grouped_linear(
    x: Tensor,
    weight: Weight,
    split_sizes: Tensor,
    bias: Weight | None = None,
    *,
    scales: Tensor | None = None,
    transposed_weight: bool = False,
) -> Tensor:
    """y = x W_gᵀ (+ s·b_g) for the rows of group g.

    x [..., K], y [..., N] in the weights' dtype (or autocast's), split_sizes int32 or int64 [G] on x's device, bias
    [G, N] or G tensors [N], scales (of the bias) float, one for each row. transposed_weight: weights are [K, N].
    A weight and its bias require gradients alike. Errors: as `fusible_ops.GroupedLinear`; ValueError for weights that
    are not G matrices of one shape; RuntimeError under `DelayedScaling`, since a function keeps no scales of earlier
    steps.
    """
    return runs().run_linear(x, _listed(weight, 3), split_sizes, _listed(bias, 2), scales, transposed_weight)


def grouped_mlp(
    x: Tensor,
    fc1_weight: Weight,
    fc2_weight: Weight,
    split_sizes: Tensor,
    activation: ActivationOperation,
    probs: Tensor | None = None,
    *,
    fc1_bias: Weight | None = None,
    fc2_bias: Weight | None = None,
    scales: Tensor | None = None,
    transposed_weight: bool = False,
) -> Tensor:
    """y = W2_g act(W1_g x + b1_g)·p + s·b2_g for the rows of group g: the fused MLP over weights of the caller's.

    activation: an op such as `ScaledSwiGLU()`, which takes `probs`, one for each row, or `SwiGLU()`, which takes none.
    The rest as `grouped_linear`; scales are of the second bias.
    """
    if isinstance(activation, ScaledActivation) != (probs is not None):
        raise ValueError(f"{type(activation).__name__} takes {'probs' if probs is None else 'no probs'}")
    how: tuple[str, int] = activation.activation.encode(), activation.glu_interleave_size or 0
    first, second = (_listed(fc1_weight, 3), _listed(fc1_bias, 2)), (_listed(fc2_weight, 3), _listed(fc2_bias, 2))
    return runs().run_mlp(x, *first, *second, split_sizes, probs, scales, *how, transposed_weight)


def _listed(weight: Weight | None, dims: int) -> list[Tensor]:
    """What the op's parameters are to be; nothing for None. dims: of one tensor for all groups."""
    if not isinstance(weight, Tensor):
        listed = [] if weight is None else list(weight)
        if not all(isinstance(t, Tensor) for t in listed):
            kinds = sorted({type(t).__name__ for t in listed})
            raise TypeError(
                f"weights and biases must be a tensor or a sequence of tensors, got one of {', '.join(kinds)}"
            )
        return listed
    if weight.dim() != dims:
        raise ValueError(f"one tensor for all groups has {dims} dimensions, got shape {tuple(weight.shape)}")
    return [weight]


def runs() -> Any:
    """The module with `run_linear` and `run_mlp`: this one, or inside torch.compile that of those which it takes, one
    call each, into which AOTAutograd looks; there under a recipe, whatever breaks the graph and has those.
    """
    if not torch.compiler.is_dynamo_compiling():
        return sys.modules[__name__]
    from fusible_ops import compiled

    return compiled if current_recipe() is None else compiled.Outside


# What follows takes tensors and constants alone.


def run_linear(
    x: Tensor,
    weight: list[Tensor],
    split_sizes: Tensor,
    bias: list[Tensor],
    scales: Tensor | None,
    transposed: bool,
    kept_for: str = "",
) -> Tensor:
    """`grouped_linear`. kept_for: whose calls these are; what is remembered of a call serves the same caller's next."""
    _check_recipe()
    with lent_linear(weight, bias, scales is not None, transposed, kept_for) as fuser:
        return fuser(x, split_sizes, *([] if scales is None else [scales]))


def run_mlp(
    x: Tensor,
    weight1: list[Tensor],
    bias1: list[Tensor],
    weight2: list[Tensor],
    bias2: list[Tensor],
    split_sizes: Tensor,
    probs: Tensor | None,
    scales: Tensor | None,
    activation: str,
    interleave: int,
    transposed: bool,
    kept_for: str = "",
    on_unfused: str = "allow",
) -> Tensor:
    """`grouped_mlp`. kept_for: as in `run_linear`; on_unfused: as `Sequential`'s."""
    _check_recipe()
    has = probs is not None, scales is not None
    linears = (weight1, bias1), (weight2, bias2)
    extras = [split_sizes, *([] if probs is None else [probs]), split_sizes, *([] if scales is None else [scales])]
    with lent_mlp(*linears, *has, activation, interleave, transposed, kept_for, on_unfused) as fuser:
        return fuser(x, *extras)


def _check_recipe() -> None:
    """Ops are lent to whoever calls next with the same shapes, and scales of earlier steps would be somebody else's."""
    if isinstance(current_recipe(), DelayedScaling):
        raise RuntimeError(
            "DelayedScaling takes scales from earlier steps, which a function over weights of the caller's does not "
            "keep; use another recipe, such as Float8BlockScaling or Float8CurrentScaling, or fusible_ops.Sequential"
        )


@contextmanager
def lent_linear(
    weight: list[Tensor], bias: list[Tensor], has_scales: bool, transposed: bool, kept_for: str = ""
) -> Iterator[OperationFuser]:
    """The op that `run_linear` calls, as a run, with this weight and bias while it is entered."""
    shape = _shape("weight", weight, bias, transposed)
    made = _kept((kept_for, shape, has_scales), lambda: _fuser([_op(shape, has_scales)]))
    with _with(made.basic_ops, [(weight, bias)]):
        yield made


@contextmanager
def lent_mlp(
    fc1: tuple[list[Tensor], list[Tensor]],
    fc2: tuple[list[Tensor], list[Tensor]],
    has_probs: bool,
    has_scales: bool,
    activation: str,
    interleave: int,
    transposed: bool,
    kept_for: str = "",
    on_unfused: str = "allow",
) -> Iterator[OperationFuser]:
    """The run of ops that `run_mlp` calls, with these weights and biases while it is entered."""
    shapes = _shape("fc1_weight", *fc1, transposed), _shape("fc2_weight", *fc2, transposed)

    def fuser() -> OperationFuser:
        kind = ScaledActivation if has_probs else ActivationOperation
        act = kind(Activation.decode(activation), glu_interleave_size=interleave or None)
        return _fuser([_op(shapes[0], False), act, _op(shapes[1], has_scales)], on_unfused)

    made = _kept((kept_for, on_unfused, shapes, has_probs, has_scales, activation, interleave), fuser)
    with _with(made.basic_ops[::2], [fc1, fc2]):
        yield made


Shape = tuple[int, int, int, bool, bool, bool, bool]
"""G, K, N; whether weights are one tensor, whether there is a bias, whether it is one tensor, whether weights are
[K, N].
"""


def _shape(name: str, weight: list[Tensor], bias: list[Tensor], transposed: bool) -> Shape:
    single = len(weight) == 1 and weight[0].dim() == 3
    if not weight or any(w.dim() != (3 if single else 2) or w.shape != weight[0].shape for w in weight):
        shapes = [tuple(w.shape) for w in weight]
        raise ValueError(f"{name} must be one tensor [G, N, K], or G of one shape [N, K]; got {shapes}")
    groups = weight[0].shape[0] if single else len(weight)
    n, k = weight[0].shape[-2:]
    if transposed:
        n, k = k, n
    single_bias = len(bias) == 1 and bias[0].dim() == 2
    if bias and (bias[0].shape[0] if single_bias else len(bias), bias[0].shape[-1]) != (groups, n):
        raise ValueError(f"the bias of {name} must be [{groups}, {n}], or {groups} of [{n}]")
    return int(groups), int(k), int(n), single, bool(bias), single_bias, transposed


def _op(shape: Shape, scale_bias: bool) -> GroupedLinear:
    groups, k, n, single, has_bias, single_bias, transposed = shape
    return GroupedLinear(
        groups,
        k,
        n,
        bias=has_bias,
        device="meta",
        scale_bias=scale_bias,
        single_grouped_weight=single,
        single_grouped_bias=single_bias,
        transposed_weight=transposed,
    )


_local = threading.local()
MOST = 256
"""Fusers that a thread keeps."""


def _fuser(ops: list[BasicOperation], on_unfused: str = "allow") -> OperationFuser:
    return OperationFuser(ops, [str(i) for i in range(len(ops))], on_unfused=on_unfused)


def _kept(key: Any, fuser: Callable[[], OperationFuser]) -> OperationFuser:
    """The fuser with this key; made when first asked for. A thread has its own, since it lends them weights."""
    fusers = _local.__dict__.setdefault("fusers", {})
    if key not in fusers:
        if len(fusers) >= MOST:
            fusers.clear()
        fusers[key] = fuser()
    return fusers[key]


@contextmanager
def _with(ops: Sequence[Any], tensors: Sequence[tuple[list[Tensor], list[Tensor]]]) -> Iterator[None]:
    """While it is entered, the ops have these weights and biases."""
    lent = []
    for op, (weight, bias) in zip(ops, tensors, strict=True):
        lent.append((op, op.__dict__["_parameters"]))
        own = dict(zip(op._weight_keys, weight, strict=True)) | dict(zip(op._bias_keys, bias, strict=True))
        op.__dict__["_parameters"] = own
    try:
        yield
    finally:
        for op, parameters in lent:
            op.__dict__["_parameters"] = parameters
