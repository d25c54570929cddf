"""Chains as plain data: what each op is and what the host knows of it. Frozen and hashable, so plans can be cached.

Kinds that the built-in rules know, and their facts:

| kind | facts |
|---|---|
| grouped_linear | num_groups, in_features, out_features, has_bias, scale_bias, dtype, held (the format of quantised \
weights, else None), accumulate_into_main_grad, delay_wgrad, single_grouped_weight, single_grouped_bias, \
transposed_weight (stored [K, N]) |
| linear | in_features, out_features, has_bias, dtype, held, accumulate_into_main_grad |
| the activations (`cute_kernels.activation.KINDS`) | scaled (takes probs), glu_interleave (0: plain halves), \
cache_quantized_input, all constants (limit, alpha, offset, …) |
| quantize | forward, backward |

Any other kind is legal: it runs unfused unless a rule that the caller passes knows it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from cute_kernels.catalog import GLU_ACTIVATIONS
from cute_kernels.quantization.formats import Format

TITLES: Mapping[str, str] = {
    "grouped_linear": "GroupedLinear",
    "linear": "Linear",
    "basic_linear": "BasicLinear",
    "bias": "Bias",
    "swiglu": "SwiGLU",
    "geglu": "GeGLU",
    "clamped_swiglu": "ClampedSwiGLU",
    "gelu": "GELU",
    "silu": "SiLU",
    "relu": "ReLU",
    "srelu": "SReLU",
    "qgelu": "QGELU",
    "tanh_srelu": "TanhSReLU",
    "glu": "GLU",
    "qgeglu": "QGeGLU",
    "reglu": "ReGLU",
    "sreglu": "SReGLU",
    "situglu": "SiTUGLU",
    "quantize": "Quantize",
    "constant_scale": "ConstantScale",
    "identity": "Identity",
    "reshape": "Reshape",
    "dropout": "Dropout",
    "make_extra_output": "MakeExtraOutput",
    "add_extra_input": "AddExtraInput",
}
LINEAR_KINDS = ("grouped_linear", "linear", "basic_linear")


class FrozenFacts(Mapping[str, object]):
    """A read-only mapping that hashes. Equal whatever the order. `TypeError` for a value that does not hash."""

    __slots__ = ("_hash", "_values")

    def __init__(self, values: Mapping[str, object] | None = None, **more: object) -> None:
        self._values = {**(values or {}), **more}
        for name, value in self._values.items():
            try:
                hash(value)
            except TypeError:
                raise TypeError(f"fact {name} is a {type(value).__name__}, needs a value that hashes") from None
        self._hash = hash(frozenset(self._values.items()))

    def __getitem__(self, name: str) -> object:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type[FrozenFacts], tuple[dict[str, object]]]:
        return FrozenFacts, (self._values,)  # hashes of strings differ between processes

    def __repr__(self) -> str:
        return f"FrozenFacts({self._values!r})"


@dataclass(frozen=True)
class OpSpec:
    """One op: its kind, its name in the chain ("fc1", "0"), and its facts, of which any mapping will do."""

    kind: str
    name: str
    facts: Mapping[str, object] = field(default_factory=FrozenFacts)

    def __post_init__(self) -> None:
        if not isinstance(self.facts, FrozenFacts):
            object.__setattr__(self, "facts", FrozenFacts(self.facts))

    @property
    def word(self) -> str:
        """Its name as the reader would write it: "fc1", or "[0]" for an op that is known by its index."""
        return f"[{self.name}]" if self.name.isdigit() else self.name

    @property
    def title(self) -> str:
        """As the reader knows it: "ScaledSwiGLU act"."""
        return f"{'Scaled' if self.facts.get('scaled') else ''}{TITLES.get(self.kind, self.kind)} {self.word}".rstrip()

    def columns(self, incoming: int | None) -> int | None:
        """Columns of its output, given those of its input; None where they are not known."""
        if self.kind in LINEAR_KINDS:
            out = self.facts.get("out_features")
            return out if isinstance(out, int) else None
        if self.kind in GLU_ACTIVATIONS:
            return None if incoming is None else incoming // 2
        return incoming


@dataclass(frozen=True)
class RecipeSpec:
    """A quantisation recipe: its name, and its facts, of which any mapping will do.

    Facts: input, weight, grad_output (the `cute_kernels.quantization.formats.Format` of each), backward_override,
    preactivation (the format in which activations keep their input for backward; None: as it is).
    """

    name: str
    facts: Mapping[str, object] = field(default_factory=FrozenFacts)

    def __post_init__(self) -> None:
        if not isinstance(self.facts, FrozenFacts):
            object.__setattr__(self, "facts", FrozenFacts(self.facts))

    def product_dtype(self, dtype: str) -> str:
        """The dtype in which an unfused product of quantised values runs, given the compute dtype."""
        formats = [value for value in self.facts.values() if isinstance(value, Format)]
        exact = dtype == "bfloat16" and all(format.exact_in_bfloat16 for format in formats)
        return "bfloat16" if exact else "float32"

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Chain:
    """Ops in order, the compute dtype ("bfloat16"), and the active quantisation recipe, if any.

    autocast: whether `dtype` holds for every linear, as under torch.autocast; else each computes in its weights' dtype.
    """

    ops: tuple[OpSpec, ...]
    dtype: str
    recipe: RecipeSpec | None = None
    autocast: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "ops", tuple(self.ops))
        for op in self.ops:
            if not isinstance(op, OpSpec):
                raise TypeError(f"a chain holds OpSpec; found {type(op).__name__}")

    def __str__(self) -> str:
        return " -> ".join(op.title for op in self.ops) or "(no ops)"
