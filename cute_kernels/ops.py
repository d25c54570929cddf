"""The kernels' entry points, registered as `torch.ops.fusible_ops.*` with shape functions.

On CPU tensors each runs `reference`; on CUDA the kernels of the device's architecture. The public functions below
carry the signatures of `reference`; see there for formulas, shapes and numerics. A call that a kernel cannot take
raises ValueError that names the limit, before anything is launched.

`entry_points` gives eager callers the same functions without the operators' dispatch, where nothing would see it.

`sm_margin` and `counter` say how a kernel shares the device, not what it computes, and the reference ignores them.
sm_margin: SMs to leave free. counter: int32 [1] of zero, from `group_offsets_and_counters`, through which CTAs take
tiles as they go (dynamic scheduling); zero again afterwards, so that other launches may use it that do not overlap.
Without one tiles are dealt out beforehand (static).

Optional results (`preact`, `act`, `dprobs`) that were not asked for come back as None; inside the operators they
are empty tensors, since operator schemas have no optional results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from cute_kernels import fp8_reference, mxfp8_reference, nvfp4_reference, reference
from cute_kernels.activation import Activation
from cute_kernels.blackwell import mxfp8_reference as padded_mxfp8_reference
from cute_kernels.blackwell import nvfp4_reference as padded_nvfp4_reference
from cute_kernels.blackwell import reference as padded_reference
from cute_kernels.facts import NO_PLANS, Plans
from cute_kernels.fp8_ops import fp8_grouped_gemm as fp8_grouped_gemm
from cute_kernels.fp8_ops import fp8_grouped_gemm_act as fp8_grouped_gemm_act
from cute_kernels.fp8_ops import fp8_grouped_gemm_dact as fp8_grouped_gemm_dact
from cute_kernels.fp8_ops import fp8_grouped_wgrad as fp8_grouped_wgrad
from cute_kernels.fp8_ops import fp8_grouped_wgrad_ as fp8_grouped_wgrad_
from cute_kernels.fp8_ops import fp8_quantize as fp8_quantize
from cute_kernels.fp8_ops import fp8_quantize_weight as fp8_quantize_weight
from cute_kernels.fp8_ops import padded_group_offsets as padded_group_offsets
from cute_kernels.mxfp8_ops import mxfp8_dequantize as mxfp8_dequantize
from cute_kernels.mxfp8_ops import mxfp8_grouped_gemm_act as mxfp8_grouped_gemm_act
from cute_kernels.mxfp8_ops import mxfp8_grouped_gemm_dact as mxfp8_grouped_gemm_dact
from cute_kernels.mxfp8_ops import mxfp8_quantize as mxfp8_quantize
from cute_kernels.mxfp8_ops import mxfp8_quantize_weight as mxfp8_quantize_weight
from cute_kernels.nvfp4_ops import nvfp4_amax as nvfp4_amax
from cute_kernels.nvfp4_ops import nvfp4_dequantize as nvfp4_dequantize
from cute_kernels.nvfp4_ops import nvfp4_grouped_gemm as nvfp4_grouped_gemm
from cute_kernels.nvfp4_ops import nvfp4_grouped_gemm_act as nvfp4_grouped_gemm_act
from cute_kernels.nvfp4_ops import nvfp4_grouped_gemm_dact as nvfp4_grouped_gemm_dact
from cute_kernels.nvfp4_ops import nvfp4_grouped_gemm_dgrad as nvfp4_grouped_gemm_dgrad
from cute_kernels.nvfp4_ops import nvfp4_grouped_wgrad as nvfp4_grouped_wgrad
from cute_kernels.nvfp4_ops import nvfp4_grouped_wgrad_ as nvfp4_grouped_wgrad_
from cute_kernels.nvfp4_ops import nvfp4_quantize as nvfp4_quantize
from cute_kernels.nvfp4_ops import nvfp4_quantize_weight as nvfp4_quantize_weight
from cute_kernels.padded_mxfp8_ops import padded_mxfp8_gemm as padded_mxfp8_gemm
from cute_kernels.padded_mxfp8_ops import padded_mxfp8_gemm_act as padded_mxfp8_gemm_act
from cute_kernels.padded_mxfp8_ops import padded_mxfp8_gemm_dact as padded_mxfp8_gemm_dact
from cute_kernels.padded_mxfp8_ops import padded_mxfp8_wgrad as padded_mxfp8_wgrad
from cute_kernels.padded_mxfp8_ops import padded_mxfp8_wgrad_ as padded_mxfp8_wgrad_
from cute_kernels.padded_nvfp4_ops import padded_nvfp4_gemm as padded_nvfp4_gemm
from cute_kernels.padded_nvfp4_ops import padded_nvfp4_gemm_act as padded_nvfp4_gemm_act
from cute_kernels.padded_nvfp4_ops import padded_nvfp4_gemm_dact as padded_nvfp4_gemm_dact
from cute_kernels.padded_nvfp4_ops import padded_nvfp4_wgrad as padded_nvfp4_wgrad
from cute_kernels.padded_nvfp4_ops import padded_nvfp4_wgrad_ as padded_nvfp4_wgrad_
from cute_kernels.padded_ops import padded_gemm as padded_gemm
from cute_kernels.padded_ops import padded_gemm_act as padded_gemm_act
from cute_kernels.padded_ops import padded_gemm_dact as padded_gemm_dact
from cute_kernels.padded_ops import padded_wgrad as padded_wgrad
from cute_kernels.padded_ops import padded_wgrad_ as padded_wgrad_
from cute_kernels.registry import (
    MARGIN,
    TILED,
    empty_as_none,
    hopper,
    host_functions,
    of_module,
    plain,
    register,
    with_activation,
)

_REFERENCE = of_module(reference)


def _weight_shape(weights: Sequence[Tensor]) -> tuple[int, int]:
    """(N, K) of one group."""
    return weights[0].shape[-2], weights[0].shape[-1]


# ----------------------------------------------------------------------------------------------------------------------
# Shape functions


def _fake_group_offsets(split_sizes, rows):
    return split_sizes.new_empty(split_sizes.shape[0] + 1, dtype=torch.int32)


def _fake_group_offsets_and_counters(split_sizes, rows, counters):
    return _fake_group_offsets(split_sizes, rows), split_sizes.new_empty(counters, dtype=torch.int32)


def _fake_gemm(x, weights, offsets, bias=None, bias_scale=None):
    return x.new_empty(x.shape[0], _weight_shape(weights)[0])


def _fake_gemm_(out, x, weights, offsets, bias=None, bias_scale=None):
    return None


def _fake_dgrad(dy, weights, offsets, glu_interleave=0):
    return dy.new_empty(dy.shape[0], _weight_shape(weights)[1])


def _fake_gemm_act(
    x, weights, offsets, activation, bias, probs, glu_interleave, save_preact, zero_tail, later=None, order=0
):
    rows, columns = x.shape[0], _weight_shape(weights)[0]
    act = x.new_empty(rows, columns // Activation.decode(activation).halves)
    return act, x.new_empty(rows, columns) if save_preact else x.new_empty(0)


def _fake_gemm_dact(dy, weights, offsets, preact, activation, probs, need_act, need_dprobs, zero_tail, order=0):
    rows = dy.shape[0]
    act = dy.new_empty(rows, _weight_shape(weights)[1]) if need_act else dy.new_empty(0)
    dprobs = dy.new_empty(rows if need_dprobs else 0, dtype=torch.float32 if need_dprobs else dy.dtype)
    return torch.empty_like(preact), act, dprobs


def _fake_dact(dact, preact, offsets, probs, activation, need_dprobs, order=0):
    dprobs = dact.new_empty(dact.shape[0] if need_dprobs else 0, dtype=torch.float32 if need_dprobs else dact.dtype)
    return torch.empty_like(preact), dprobs


def _fake_wgrad(dy, x, offsets, glu_interleave=0):
    return x.new_empty(offsets.shape[0] - 1, dy.shape[1], x.shape[1])


def _fake_wgrad_(out, dy, x, offsets, glu_interleave=0, accumulate=False):
    return None


def _fake_dbias(dy, offsets, scale=None, glu_interleave=0):
    return dy.new_empty(offsets.shape[0] - 1, dy.shape[1], dtype=torch.float32)


def _fake_dscale(dy, bias, offsets):
    return dy.new_empty(dy.shape[0], dtype=torch.float32)


_OPERATORS = (
    ("group_offsets(Tensor split_sizes, SymInt rows) -> Tensor", plain, _fake_group_offsets),
    (
        "group_offsets_and_counters(Tensor split_sizes, SymInt rows, int counters) -> (Tensor, Tensor)",
        plain,
        _fake_group_offsets_and_counters,
    ),
    (
        "grouped_gemm(Tensor x, Tensor[] weights, Tensor offsets, Tensor? bias=None, Tensor? bias_scale=None, "
        f"{TILED}) -> Tensor",
        plain,
        _fake_gemm,
    ),
    (
        "grouped_gemm_(Tensor(a!) out, Tensor x, Tensor[] weights, Tensor offsets, Tensor? bias=None, "
        f"Tensor? bias_scale=None, {TILED}) -> ()",
        plain,
        _fake_gemm_,
    ),
    (
        f"grouped_gemm_dgrad(Tensor dy, Tensor[] weights, Tensor offsets, int glu_interleave=0, {TILED}) -> Tensor",
        plain,
        _fake_dgrad,
    ),
    (
        "grouped_gemm_act(Tensor x, Tensor[] weights, Tensor offsets, str activation, Tensor? bias, Tensor? probs, "
        "int glu_interleave, bool save_preact, bool zero_tail, Tensor(a!)? zero_tail_of=None, "
        f"int preact_interleave=0, {TILED}) -> (Tensor, Tensor)",
        with_activation,
        _fake_gemm_act,
    ),
    (
        "grouped_gemm_dact(Tensor dy, Tensor[] weights, Tensor offsets, Tensor preact, str activation, Tensor? probs, "
        f"bool need_act, bool need_dprobs, bool zero_tail, int preact_interleave=0, {TILED}) "
        "-> (Tensor, Tensor, Tensor)",
        with_activation,
        _fake_gemm_dact,
    ),
    (
        "dact(Tensor dact, Tensor preact, Tensor offsets, Tensor? probs, str activation, bool need_dprobs, "
        f"int preact_interleave=0, {MARGIN}) -> (Tensor, Tensor)",
        with_activation,
        _fake_dact,
    ),
    (
        f"grouped_wgrad(Tensor dy, Tensor x, Tensor offsets, int glu_interleave=0, {TILED}) -> Tensor",
        plain,
        _fake_wgrad,
    ),
    (
        "grouped_wgrad_(Tensor(a!)[] out, Tensor dy, Tensor x, Tensor offsets, int glu_interleave=0, "
        f"bool accumulate=False, {TILED}) -> ()",
        plain,
        _fake_wgrad_,
    ),
    (
        f"grouped_dbias(Tensor dy, Tensor offsets, Tensor? scale=None, int glu_interleave=0, {MARGIN}) -> Tensor",
        plain,
        _fake_dbias,
    ),
    (f"grouped_dscale(Tensor dy, Tensor bias, Tensor offsets, {MARGIN}) -> Tensor", plain, _fake_dscale),
)

for _schema, _make, _fake in _OPERATORS:
    _name = _schema.split("(", 1)[0]
    register(_schema, _make(_name, _REFERENCE), _make(_name, hopper), _fake)
    if _make is plain:  # what unfused ops call where the host knows shapes alone
        register(f"reference_{_schema}", _REFERENCE(_name), _REFERENCE(_name), _fake)

_OPS = torch.ops.fusible_ops

# ----------------------------------------------------------------------------------------------------------------------
# Public functions

group_offsets = _OPS.group_offsets.default
group_offsets_and_counters = _OPS.group_offsets_and_counters.default
grouped_gemm = _OPS.grouped_gemm.default
grouped_gemm_ = _OPS.grouped_gemm_.default
grouped_gemm_dgrad = _OPS.grouped_gemm_dgrad.default
grouped_wgrad = _OPS.grouped_wgrad.default
grouped_wgrad_ = _OPS.grouped_wgrad_.default
grouped_dbias = _OPS.grouped_dbias.default
grouped_dscale = _OPS.grouped_dscale.default


def grouped_gemm_act(
    x: Tensor,
    weights: Sequence[Tensor],
    offsets: Tensor,
    activation: Activation,
    bias: Tensor | None = None,
    probs: Tensor | None = None,
    glu_interleave: int = 0,
    save_preact: bool = True,
    zero_tail: bool = True,
    zero_tail_of: Tensor | None = None,
    preact_interleave: int = 0,
    **sharing: Any,
) -> tuple[Tensor, Tensor | None]:
    """`reference.grouped_gemm_act`. zero_tail=False leaves the tail rows of both results undefined."""
    act, preact = _OPS.grouped_gemm_act(
        x, weights, offsets, activation.encode(), bias, probs, glu_interleave, save_preact, zero_tail, zero_tail_of,
        preact_interleave, **sharing,
    )  # fmt: skip
    return act, empty_as_none(preact, save_preact)


def grouped_gemm_dact(
    dy: Tensor,
    weights: Sequence[Tensor],
    offsets: Tensor,
    preact: Tensor,
    activation: Activation,
    probs: Tensor | None = None,
    need_act: bool = True,
    need_dprobs: bool = False,
    zero_tail: bool = True,
    preact_interleave: int = 0,
    **sharing: Any,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """`reference.grouped_gemm_dact`. zero_tail=False leaves the tail of dpreact and act undefined (not dprobs')."""
    dpreact, act, dprobs = _OPS.grouped_gemm_dact(
        dy, weights, offsets, preact, activation.encode(), probs, need_act, need_dprobs, zero_tail, preact_interleave,
        **sharing,
    )  # fmt: skip
    return dpreact, empty_as_none(act, need_act), empty_as_none(dprobs, need_dprobs)


def dact(
    dact: Tensor,
    preact: Tensor,
    offsets: Tensor,
    probs: Tensor | None,
    activation: Activation,
    need_dprobs: bool = False,
    preact_interleave: int = 0,
    **sharing: Any,
) -> tuple[Tensor, Tensor | None]:
    """`reference.dact`."""
    dpreact, dprobs = _OPS.dact(
        dact, preact, offsets, probs, activation.encode(), need_dprobs, preact_interleave, **sharing
    )
    return dpreact, empty_as_none(dprobs, need_dprobs)


# ----------------------------------------------------------------------------------------------------------------------
# Calls past the dispatcher

_PLAIN = frozenset({Tensor, Parameter, type(None)})


def are_plain(tensors: Iterable[Any]) -> bool:
    """Whether all are tensors (or None) of no class of somebody else's."""
    return _PLAIN.issuperset(map(type, tensors))


def entry_points(device: torch.device, plain: bool) -> Any:
    """Where a caller finds the functions above by name; products and weight gradients take a further argument `plans`
    (`cute_kernels.facts`).

    The host functions themselves, which spares each call the dispatcher's 10 to 50 us, or the operators: on a CPU, for
    tensors that are not plain, and while something is to see them: a compiler, a dispatch mode, functorch, a profiler.
    """
    host = _HOSTS.get(device.type) if plain else None
    if (
        host is None
        or torch.compiler.is_dynamo_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or torch._C._autograd._profiler_enabled()
    ):
        return _operators
    return host(device)


_HOSTS: dict[str, Callable[[torch.device], Any]] = {"cuda": host_functions}


class _Operators:
    """The public functions of this module. Plans are for host functions."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = globals()[name]

        def call(*args: Any, plans: Plans = NO_PLANS, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        return call


_operators = _Operators()


class _ReferenceOperators:
    """The functions of `reference` as operators; those without an activation."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return getattr(_OPS, f"reference_{name}").default


_reference_operators = _ReferenceOperators()


def formulas(plain: bool) -> Any:
    """Where unfused ops find the functions of `reference` by name: there, or, for tensors that are not plain (a
    compiler's have no values, and host code that reads offsets cannot run on them), as operators.
    """
    return reference if plain else _reference_operators


_PADDED = padded_reference, padded_mxfp8_reference, padded_nvfp4_reference
REFERENCES = (reference, fp8_reference, mxfp8_reference, nvfp4_reference, *_PADDED)
"""The modules that say what the functions above compute."""


def formula(name: str) -> Callable[..., Any]:
    """What the function above called `name` computes, in plain PyTorch on the tensors' own device: its reference."""
    return next(getattr(module, name) for module in REFERENCES if hasattr(module, name))
