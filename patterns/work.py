"""What each launch of a plan does: floating-point operations, bytes moved, and the least time that can take.

Bytes are those of operands and results, each once, as if nothing was read again; a time is that of the arithmetic or of
the bytes, whichever is longer, at the machine's rates on paper. So it is a bound that no kernel beats, to hold a
measured time against, not a forecast.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cute_kernels.catalog import GLU_ACTIVATIONS, SM100
from patterns.planner import Plan, Step
from patterns.rule import Bound, Match


@dataclass(frozen=True)
class Machine:
    """Rates of a product on paper, dense: operations a second in 16, 8 and 4 bits, bytes a second."""

    name: str
    flops: float
    fp8_flops: float
    bytes: float
    fp4_flops: float = 0.0


MACHINES: Mapping[str, Machine] = {
    "sm_90a": Machine("H200", 989.5e12, 1979e12, 4.8e12),
    "sm_100a": Machine("B200", 2250e12, 4500e12, 8e12, 9000e12),
}


@dataclass(frozen=True)
class Launch:
    """One kernel of a step, for one row count. flops and bytes are None where they are not known."""

    kernel: str
    use: str
    backward: bool
    flops: float | None
    bytes: float | None

    def seconds(self, machine: Machine | None) -> float | None:
        """The least time it takes; None where something is not known."""
        if machine is None or self.flops is None or self.bytes is None:
            return None
        return max(self.flops / self._rate(machine), self.bytes / machine.bytes)

    def binds(self, machine: Machine | None) -> str:
        """What it waits for: "arithmetic" or "memory"; empty where that is not known."""
        if machine is None or self.flops is None or self.bytes is None:
            return ""
        return "arithmetic" if self.flops / self._rate(machine) > self.bytes / machine.bytes else "memory"

    def _rate(self, machine: Machine) -> float:
        if self.kernel.endswith("_nvfp4"):
            return machine.fp4_flops
        return machine.fp8_flops if self.kernel.startswith("fp8_") or self.kernel.endswith("_mxfp8") else machine.flops


@dataclass(frozen=True)
class _Sizes:
    """Letters of one launch, as the catalogue names them. halves: of the activation's input."""

    T: int
    G: int = 1
    K: int = 0
    N: int = 0
    I: int = 0  # noqa: E741
    H: int = 0
    halves: int = 1


def _product(s: _Sizes) -> tuple[float, float]:
    return 2.0 * s.T * s.K * s.N, 2.0 * (s.T * (s.K + s.N) + s.G * s.K * s.N)


def _product_and_gradient(s: _Sizes) -> tuple[float, float]:
    """dy [T, H] and the pre-activation in, its gradient and the activation [T, I] out."""
    return 2.0 * s.T * s.H * s.I, 2.0 * (s.T * (s.H + s.I * (2 * s.halves + 1)) + s.G * s.H * s.I)


def _scaled(elements: float) -> float:
    """Bytes of E4M3 with a scale of 4 bytes for 128 of them."""
    return elements * (1 + 4 / 128)


def _cudnn(
    format: str, operand: float, result: float, copies: int = 1
) -> dict[str, Callable[[_Sizes], tuple[float, float]]]:
    """cuDNN Frontend's kernels: bytes of a value of an operand, and of an activation's result in all its copies, with
    their scales. Pre-activations and the results of other products are BF16.
    """

    def forward(s: _Sizes, n: int) -> tuple[float, float]:
        return 2.0 * s.T * s.K * n, operand * (s.T * s.K + s.G * s.K * n) + 2.0 * s.T * n

    def with_act(s: _Sizes, n: int, act: int) -> tuple[float, float]:
        flops, moved = forward(s, n)
        return flops, moved + result * s.T * act

    def dglu(s: _Sizes) -> tuple[float, float]:
        moved = operand * (s.T * s.H + s.G * s.H * s.I) + s.T * s.I * s.halves * (2.0 + result)
        return 2.0 * s.T * s.H * s.I, moved

    def glu(s: _Sizes) -> tuple[float, float]:
        return with_act(s, s.I * s.halves, s.I)

    def srelu(s: _Sizes) -> tuple[float, float]:
        return with_act(s, s.N, s.N)

    def dsrelu(s: _Sizes) -> tuple[float, float]:
        """The activation too, once."""
        flops, moved = srelu(s)
        return flops, moved + result / copies * s.T * s.N

    known = {
        "gemm": lambda s: forward(s, s.N),
        "wgrad": lambda s: (2.0 * s.T * s.K * s.N, operand * s.T * (s.K + s.N) + 2.0 * s.G * s.K * s.N),
        "glu": glu, "glu_hadamard": glu, "dense_swiglu": glu, "dglu": dglu,
        "srelu": srelu, "dense_srelu": srelu, "dsrelu": dsrelu,
    }  # fmt: skip
    return {kernel.name: known[what] for what, kernel in SM100[format].items()}


_WORK: Mapping[str, Callable[[_Sizes], tuple[float, float]]] = {
    "group_offsets": lambda s: (0.0, 12.0 * s.G),
    "padded_group_offsets": lambda s: (0.0, 16.0 * s.G),
    "grouped_gemm": _product,
    "grouped_gemm_dgrad": _product,
    "grouped_wgrad": _product,
    "grouped_gemm_act": lambda s: (_product(s)[0], _product(s)[1] + 2.0 * s.T * s.I),
    "grouped_gemm_dact": _product_and_gradient,
    "dact": lambda s: (0.0, 2.0 * s.T * s.I * (1 + 2 * s.halves)),
    "grouped_dbias": lambda s: (0.0, 2.0 * s.T * s.N),
    "grouped_dscale": lambda s: (0.0, 2.0 * (s.T + s.G) * s.N),
    "fp8_quantize": lambda s: (0.0, 2.0 * s.T * s.K + 2 * _scaled(s.T * s.K)),
    "fp8_quantize_weight": lambda s: (0.0, 4.0 * s.G * s.K * s.N),
    "fp8_grouped_gemm": lambda s: (2.0 * s.T * s.K * s.N, _scaled(s.T * s.K) + s.G * s.K * s.N + 2.0 * s.T * s.N),
    "fp8_grouped_gemm_act": lambda s: (
        2.0 * s.T * s.K * s.N,
        _scaled(s.T * s.K) + s.G * s.K * s.N + 2 * _scaled(s.T * s.I) + 2.0 * s.T * s.N,
    ),
    "fp8_grouped_gemm_dact": lambda s: (
        2.0 * s.T * s.H * s.I,
        _scaled(s.T * s.H) + s.G * s.H * s.I + s.T * s.I * s.halves * 2.0 + 2 * _scaled(s.T * s.I * s.halves),
    ),
    "fp8_grouped_wgrad": lambda s: (2.0 * s.T * s.K * s.N, _scaled(s.T * (s.K + s.N)) + 2.0 * s.G * s.K * s.N),
    "mxfp8_quantize": lambda s: (0.0, (2.0 + 2.0 + 1 + 1 / 32) * s.T * s.K),
    "mxfp8_dequantize": lambda s: (0.0, (1 + 1 / 32 + 2.0) * s.T * s.K),
    "mxfp8_quantize_weight": lambda s: (0.0, 6.0 * s.G * s.K * s.N),
    "mxfp8_grouped_gemm_act": lambda s: (_product(s)[0], _product(s)[1] + 2.0 * s.T * s.I),
    "mxfp8_grouped_gemm_dact": lambda s: (
        _product_and_gradient(s)[0],
        _product_and_gradient(s)[1] + 2.0 * s.T * s.I * s.halves,
    ),
    "nvfp4_amax": lambda s: (0.0, 2.0 * s.T * s.K),
    "nvfp4_quantize": lambda s: (0.0, (2.0 + 2.0 + 0.5 + 1 / 16) * s.T * s.K),
    "nvfp4_dequantize": lambda s: (0.0, (0.5 + 1 / 16 + 2.0) * s.T * s.K),
    "nvfp4_quantize_weight": lambda s: (0.0, 8.0 * s.G * s.K * s.N),
    "nvfp4_grouped_gemm": _product,
    "nvfp4_grouped_gemm_dgrad": _product,
    "nvfp4_grouped_wgrad": _product,
    "nvfp4_grouped_gemm_act": lambda s: (_product(s)[0], _product(s)[1] + 2.0 * s.T * s.I),
    "nvfp4_grouped_gemm_dact": lambda s: (_product_and_gradient(s)[0], _product_and_gradient(s)[1] - 2.0 * s.T * s.I),
    **_cudnn("bfloat16", 2.0, 2.0),
    **_cudnn("mxfp8", 1 + 1 / 32, 2 * (1 + 1 / 32), copies=2),
    **_cudnn("nvfp4", 0.5 + 1 / 16, 2.0),
}
"""Kernel -> (operations, bytes) of a launch. Those that it does not list are not known."""


def launches(plan: Plan, step: Step, rows: int) -> tuple[Launch, ...]:
    """The kernels of a fused step in the order of its rule, for so many rows; none for an unfused one."""
    ops = plan.chain.ops[step.start : step.stop]
    if step.rule is None:
        return ()
    facts = Match(plan.chain, step.start, step.stop, tuple(zip(step.labels, ops, strict=True))).facts()
    return tuple(_launch(bound, facts, rows) for bound in step.kernels)


def _launch(bound: Bound, facts: Mapping[str, object], rows: int) -> Launch:
    backward = "gradient" in bound.use or "backward" in bound.use
    work = _WORK.get(bound.kernel.name)
    if work is None:
        return Launch(bound.kernel.name, bound.use, backward, None, None)
    sizes: dict[str, Any] = {
        letter: facts.get(str(fact)) for letter, fact in bound.letters.items() if letter in "GKNIH"
    }
    labels = [str(fact).partition(".")[0] for fact in bound.letters.values()]
    groups = [facts[f"{label}.num_groups"] for label in labels if f"{label}.num_groups" in facts]
    sizes.setdefault("G", groups[0] if groups else 1)
    kind = facts.get(str(bound.letters.get("activation")))
    halves = 2 if kind in GLU_ACTIVATIONS else 1
    flops, moved = work(_Sizes(rows, halves=halves, **sizes))
    return Launch(bound.kernel.name, bound.use, backward, flops, moved)
