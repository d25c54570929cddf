"""Quantisation recipes: in which low-precision format each operand of a linear's three products is held.

| recipe | input | weight | gradient of the output | where the scale comes from |
|---|---|---|---|---|
| `Float8BlockScaling` | 1x128 | 128x128 | 1x128 | the largest magnitude of each block |
| `Float8CurrentScaling` | per tensor | per tensor | per tensor | the tensor's own largest magnitude |
| `DelayedScaling` | per tensor | per tensor | per tensor | the largest magnitudes of earlier steps |
| `MXFP8BlockScaling` | 1x32 | 1x32 or 32x32 | 1x32 | the largest magnitude of each block |
| `NVFP4BlockScaling` | 1x16 | 16x16 | 1x16 | the largest magnitudes of each block and of the tensor |

Blocks of one row lie along the dimension that a product sums over. `Format` says which elements: E4M3 in forward, in
backward E4M3 or E5M2; E2M1 in all of NVFP4. Formulas: `cute_kernels.quantization`; those of delayed scaling:
`fusible_ops.delayed_scaling`.

Recipes are frozen and hash: equal ones share plans. Names, fields, defaults and refused combinations are those of
`transformer_engine.common.recipe` (2.20), with ValueError where it asserts, and no environment variables; but for
`preactivation`, which is ours. `fp8_dpa` and `fp8_mha` are about attention, which is not here, and do nothing. The
products always accumulate in FP32, so the `fp8_gemm_*` fields do nothing either.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from cute_kernels.quantization import formats
from patterns.chain import RecipeSpec

ROLES = ("input", "weight", "grad_output")
BACKWARD_OVERRIDES = (None, "high_precision", "dequantized")
PREACTIVATIONS = ("high_precision", "quantized")


class Elements(NamedTuple):
    """What values are stored as: inputs and weights in forward, gradients in backward."""

    forward: formats.Element
    backward: formats.Element

    @property
    def max_fwd(self) -> float:
        return self.forward.max

    @property
    def max_bwd(self) -> float:
        return self.backward.max


class Format(enum.Enum):
    """Which elements: E4M3 (largest 448), E5M2 (57344), HYBRID: E4M3 in forward and E5M2 in backward; E2M1 (6)."""

    E2M1 = Elements(formats.E2M1, formats.E2M1)
    E4M3 = Elements(formats.E4M3, formats.E4M3)
    E5M2 = Elements(formats.E5M2, formats.E5M2)
    HYBRID = Elements(formats.E4M3, formats.E5M2)

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True)
class MMParams:
    """use_split_accumulator: whether a product adds up in FP32. Ours always do. ValueError unless it is a bool."""

    use_split_accumulator: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.use_split_accumulator, bool):
            raise ValueError(f"MMParams: use_split_accumulator is {self.use_split_accumulator!r}, needs a bool")


MOST_MARGIN = 127  # 2^127 is the largest power of two in FP32
_FAST = MMParams(use_split_accumulator=False)
_SPLIT = MMParams(use_split_accumulator=True)


def _is_number(value: object, kind: type | tuple[type, ...] = (int, float)) -> bool:
    """Whether it is one of that kind; a bool is none."""
    return isinstance(value, kind) and not isinstance(value, bool)


AUTO = "auto"
"""In place of a recipe: `Float8BlockScaling` for runs of ops that it makes faster, none for others."""


class Recipe:
    """The common part of all recipes. `Recipe.operand_format` says which format an operand has.

    backward_override: None: backward runs in low precision. "high_precision": input and weight are kept as they were
    and backward runs in high precision. "dequantized": it runs in high precision on what was quantised in forward.
    preactivation, of recipes that have it: what activations keep of their input for backward. "high_precision": what
    they were given. "quantized": each of its halves (gate and linear; its only one) in the row-wise format of an
    input's elements, about half the bytes. Forward is the same to the last bit; the gradient of the activation, and of
    its scales, is taken at the values that were kept. Not together with backward_override="high_precision".
    """

    fp8_format: Format
    backward_override: str | None
    preactivation = "high_precision"

    def __post_init__(self) -> None:
        for name, field in self.__dataclass_fields__.items():  # type: ignore[attr-defined]
            for kind, wanted in ((bool, "a bool"), (MMParams, "an MMParams")):
                if isinstance(field.default, kind) and not isinstance(getattr(self, name), kind):
                    self._refuse(name, getattr(self, name), wanted)
        if self.fp8_format not in (Format.E4M3, Format.HYBRID):
            self._refuse("fp8_format", self.fp8_format, "Format.E4M3 or Format.HYBRID: E5M2 is too coarse for forward")
        if self.backward_override not in BACKWARD_OVERRIDES:
            self._refuse("backward_override", self.backward_override, "None, 'high_precision' or 'dequantized'")
        if self.preactivation not in PREACTIVATIONS:
            self._refuse("preactivation", self.preactivation, "'high_precision' or 'quantized'")
        if self.backward_override == "high_precision" and self.preactivation == "quantized":
            self._refuse(
                "preactivation", self.preactivation, "'high_precision' with backward_override='high_precision'"
            )

    def __getstate__(self) -> dict[str, object]:
        """The fields alone, without what was worked out from them."""
        return {name: value for name, value in self.__dict__.items() if not name.startswith("_")}

    def __hash__(self) -> int:
        known = self.__dict__.get("_hash")
        if known is None:
            known = self.__dict__["_hash"] = hash((type(self), *self.__getstate__().values()))
        return known

    def operand_format(self, role: str) -> formats.Format:
        """The format of an operand with this role, one of `ROLES`."""
        known = self.__dict__.get(f"_{role}")
        if known is None:
            known = self.__dict__[f"_{role}"] = self._format(role, self.element(role))
        return known

    @property
    def preactivation_format(self) -> formats.Format | None:
        """The format in which activations keep their input for backward; None: as it is."""
        known = self.__dict__.get("_preactivation")
        if known is None and self.preactivation == "quantized":
            known = self.__dict__["_preactivation"] = self._format("preactivation", self.element("input"))
        return known

    def _format(self, role: str, element: formats.Element) -> formats.Format:
        raise NotImplementedError

    def element(self, role: str) -> formats.Element:
        """The element of an operand with this role. ValueError for a role that is none."""
        if role not in ROLES:
            raise ValueError(f"role is {role!r}, needs one of: {', '.join(ROLES)}")
        elements = self.fp8_format.value
        return elements.backward if role == "grad_output" else elements.forward

    def describe(self) -> RecipeSpec:
        """This recipe as plain data, for the rules."""
        facts = {role: self.operand_format(role) for role in ROLES}
        more = {"backward_override": self.backward_override, "preactivation": self.preactivation_format}
        return RecipeSpec(type(self).__name__, {**facts, **more})

    def _refuse(self, field: str, found: object, wanted: str) -> None:
        raise ValueError(f"{type(self).__name__}: {field} is {found!r}, needs {wanted}")


@dataclass(frozen=True)
class DelayedScaling(Recipe):
    """One scale per tensor, from the largest magnitudes that it had in earlier steps.

    margin: the scale is made 2^margin smaller. amax_history_len: steps that are remembered. amax_compute_algo: "max" of
    them, the "most_recent", or a function of the history [length, tensors] that gives [tensors].
    scaling_factor_compute_algo: None, or a function (amax, scale, largest element, recipe) -> scale. reduce_amax: take
    the largest magnitude of all ranks of `autocast`'s amax_reduction_group.
    """

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable[[Tensor], Tensor] = "max"
    scaling_factor_compute_algo: Callable[[Tensor, Tensor, float, Recipe], Tensor] | None = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    __hash__ = Recipe.__hash__

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.backward_override is not None:
            self._refuse("backward_override", self.backward_override, "None")
        if not _is_number(self.margin) or not abs(self.margin) <= MOST_MARGIN:
            self._refuse("margin", self.margin, f"a number from -{MOST_MARGIN} to {MOST_MARGIN}")
        if not _is_number(self.amax_history_len, int) or self.amax_history_len < 1:
            self._refuse("amax_history_len", self.amax_history_len, "an int of at least 1")
        if not callable(self.amax_compute_algo) and self.amax_compute_algo not in ("max", "most_recent"):
            self._refuse("amax_compute_algo", self.amax_compute_algo, "'max', 'most_recent' or a function")
        if not (self.scaling_factor_compute_algo is None or callable(self.scaling_factor_compute_algo)):
            self._refuse("scaling_factor_compute_algo", self.scaling_factor_compute_algo, "None or a function")

    def _format(self, role: str, element: formats.Element) -> formats.Format:
        return formats.fp8_tensor(element)


@dataclass(frozen=True)
class Float8CurrentScaling(Recipe):
    """One scale per tensor, from its own largest magnitude. use_power_2_scales: rounded down to a power of two."""

    use_power_2_scales: bool = False
    fp8_format: Format = Format.HYBRID
    fp8_gemm_fprop: MMParams = _FAST
    fp8_gemm_dgrad: MMParams = _SPLIT
    fp8_gemm_wgrad: MMParams = _SPLIT
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    __hash__ = Recipe.__hash__

    def _format(self, role: str, element: formats.Element) -> formats.Format:
        return formats.fp8_tensor(element, power_of_2=self.use_power_2_scales)


@dataclass(frozen=True)
class Float8BlockScaling(Recipe):
    """Scales for blocks: DeepSeek-V3's recipe.

    use_f32_scales: any FP32 scale; else powers of two. x_block_scaling_dim, w_block_scaling_dim and
    grad_block_scaling_dim: 1 for blocks of 1x128, 2 for 128x128, of inputs, weights and gradients; no product takes
    128x128 from both sides. preactivation: see `Recipe`; quantised in blocks of 1x128.
    """

    use_f32_scales: bool = False
    fp8_format: Format = Format.E4M3
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1
    fp8_gemm_fprop: MMParams = _SPLIT
    fp8_gemm_dgrad: MMParams = _SPLIT
    fp8_gemm_wgrad: MMParams = _SPLIT
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None
    preactivation: str = "high_precision"

    __hash__ = Recipe.__hash__

    def __post_init__(self) -> None:
        super().__post_init__()
        dims = {f"{who}_block_scaling_dim": getattr(self, f"{who}_block_scaling_dim") for who in ("x", "w", "grad")}
        for field, dim in dims.items():
            if not _is_number(dim, int) or dim not in (1, 2):
                self._refuse(field, dim, "1 (1x128) or 2 (128x128)")
        square = [field for field, dim in dims.items() if dim == 2]
        if len(square) > 1:
            self._refuse(" = ".join(square), 2, "1 in all but one: no product takes 128x128 from both sides")
        for product in ("fprop", "dgrad", "wgrad"):
            if not getattr(self, f"fp8_gemm_{product}").use_split_accumulator:
                self._refuse(f"fp8_gemm_{product}", _FAST, "a split accumulator")
        if self.fp8_dpa or self.fp8_mha:
            self._refuse("fp8_dpa or fp8_mha", True, "False: there is no attention in blocks")

    def _format(self, role: str, element: formats.Element) -> formats.Format:
        dims = {
            "input": self.x_block_scaling_dim,
            "weight": self.w_block_scaling_dim,
            "grad_output": self.grad_block_scaling_dim,
        }
        return formats.fp8_block(element, dims.get(role, 1), not self.use_f32_scales)


@dataclass(frozen=True)
class MXFP8BlockScaling(Recipe):
    """A power of two for each 32 values: OCP's MX formats.

    enable_2d_quantization: one scale for 32x32 of a weight, so that both its orientations hold the same values.
    margin: 0, as nothing reads it. preactivation: see `Recipe`; quantised in blocks of 1x32.
    """

    margin: int = 0
    fp8_format: Format = Format.E4M3
    enable_2d_quantization: bool = False
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None
    preactivation: str = "high_precision"

    __hash__ = Recipe.__hash__

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.margin != 0:
            self._refuse("margin", self.margin, "0: scales are powers of two, rounded up, so nothing overflows")

    def _format(self, role: str, element: formats.Element) -> formats.Format:
        return formats.mxfp8(element, 2 if role == "weight" and self.enable_2d_quantization else 1)


@dataclass(frozen=True)
class NVFP4BlockScaling(Recipe):
    """Four bits: E2M1 with an E4M3 scale for each 16 values and one FP32 scale for the tensor, of each expert.

    disable_rht: else inputs and gradients are rotated by a random Hadamard transform in the copies that make weight
    gradients. disable_stochastic_rounding: else gradients are rounded up or down at random, right in the mean; the
    bits are drawn in forward, so a repeated forward whose generator was restored (activation checkpointing) repeats
    them. disable_2d_quantization: else a weight has one scale for 16x16.
    row_scaled_activation and nvfp4_4over6 (with its nvfp4_4over6_* fields): not supported, ValueError.
    """

    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False
    row_scaled_activation: bool = False
    nvfp4_4over6: str = "none"
    nvfp4_4over6_e4m3_use_256: str = "all"
    nvfp4_4over6_err_mode: str = "MAE"
    fp4_format: Format = Format.E2M1
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    __hash__ = Recipe.__hash__

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fp4_format is not Format.E2M1:
            self._refuse("fp4_format", self.fp4_format, "Format.E2M1")
        if self.row_scaled_activation:
            self._refuse("row_scaled_activation", True, "False: products take one scale for each expert's rows")
        if self.nvfp4_4over6 != "none":
            self._refuse("nvfp4_4over6", self.nvfp4_4over6, "'none': every block's largest value maps to 6")

    def element(self, role: str) -> formats.Element:
        super().element(role)
        return self.fp4_format.value.forward

    def _format(self, role: str, element: formats.Element) -> formats.Format:
        if role == "weight":
            return formats.nvfp4(1 if self.disable_2d_quantization else 2)
        stochastic = role == "grad_output" and not self.disable_stochastic_rounding
        return formats.nvfp4(hadamard=not self.disable_rht, stochastic=stochastic)
