"""The kernels as data: one row each. Importing this imports no kernel.

A row's limits are stated here once: the planner refuses by them, `explain` prints them, and `Kernel.require` raises
them before a launch. Letters: K in, N out, H hidden, I intermediate (columns of one GLU half), G groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cute_kernels.activation import GLU_KINDS, KINDS
from cute_kernels.limits import (
    DTYPES,
    Facts,
    Installed,
    Limit,
    Refusal,
    Words,
    at_least,
    at_most,
    fixed_for,
    given_for,
    interleave_fits,
    multiple_of,
    not_transposed_for,
    one_of,
    raise_refusal,
    stored_interleave_fits,
)
from cute_kernels.target import CUDNN_FRONTEND, CUTLASS_DSL, TVM_FFI, Package, Target

ACTIVATIONS = KINDS
GLU_ACTIVATIONS = GLU_KINDS
SM90_ACTIVATIONS = tuple(kind for kind in KINDS if kind not in ("situglu", "tanh_srelu"))
"""Those that have a module in `hopper/epilogues`."""
SM100_ACTIVATIONS = ("swiglu", "clamped_swiglu")


@dataclass(frozen=True, eq=False)
class Kernel:
    """A row: what the kernel is called, where it lives, and what it needs. Rows are constants, equal if the same.

    name: of the operator it implements. arch: the architecture that it is compiled for. also: others that it is for.
    module: dotted name of its host side, loaded when first launched. limits: on the letters of one call.
    packages: needed to compile it. missing: why it cannot be launched at all; empty if it can. is_kept: whether a
    compiled one can be kept on disk, and so be made ahead of time.
    """

    name: str
    arch: str
    module: str
    limits: tuple[Limit, ...]
    packages: tuple[Package, ...]
    missing: str = ""
    also: tuple[str, ...] = ()
    is_kept: bool = True

    @property
    def archs(self) -> tuple[str, ...]:
        """Every architecture that it is for."""
        return (self.arch, *self.also)

    def letters(self) -> tuple[str, ...]:
        """Every letter that the limits read, in order of first use."""
        return tuple(dict.fromkeys(letter for limit in self.limits for letter in limit.letters()))

    def unmet_by(self, facts: Facts, words: Words | None = None) -> tuple[Refusal, ...]:
        """Every limit that `facts` (the letters' values) do not meet, in order; last, that the kernel is missing."""
        found = [limit.check(facts, words, self.name) for limit in self.limits]
        if self.missing:
            found.append(Refusal(self.name, "limit", "a later version of this library", self.missing))
        return tuple(refusal for refusal in found if refusal is not None)

    def unmet_on(self, target: Target) -> tuple[Refusal, ...]:
        """What `target` lacks: the architecture alone if that differs, else each package."""
        arch = one_of("arch", self.archs, stage="target").check(target.facts(), rule=self.name)
        if arch is not None:
            return (arch,)
        found = (Installed(package).check(target.facts(), rule=self.name) for package in self.packages)
        return tuple(refusal for refusal in found if refusal is not None)

    def require(self, **facts: object) -> None:
        """Raises `ValueError` for the first limit that a call with these letters does not meet."""
        for refusal in self.unmet_by(facts):
            raise_refusal(refusal)


DEVICE_OFFSETS: tuple[Limit, ...] = (
    one_of("dtype", ("bfloat16",)),
    multiple_of("K", 8),
    multiple_of("N", 8),
    at_most("G", 1023),
)
"""Limits of `torch.nn.functional.grouped_mm`. An unfused grouped product beyond them reads the splits on the host."""

SEPARATE_SPAN_BYTES = 16 * (2**31 - 1)
"""How far apart separate weights may lie: kernels address them from the lowest, in 16-byte units that fit 31 bits."""

_DSL = (CUTLASS_DSL, TVM_FFI)
_DTYPE = one_of("dtype", DTYPES)
_ACTIVATION = one_of("activation", SM90_ACTIVATIONS)
_INTERLEAVE = interleave_fits("glu_interleave", "I")


def _eights(*letters: str) -> tuple[Limit, ...]:
    """16-byte rows of 2-byte elements: what TMA can address."""
    return tuple(multiple_of(letter, 8, fix="pad the layer's features") for letter in letters)


def _sm90(name: str, module: str, *limits: Limit) -> Kernel:
    return Kernel(name, "sm_90a", f"cute_kernels.hopper.{module}", limits, _DSL)


SM90_GROUP_OFFSETS = _sm90("group_offsets", "rowwise", at_least("G", 1))
SM90_GROUPED_GEMM = _sm90("grouped_gemm", "grouped_gemm", _DTYPE, *_eights("K", "N"))
SM90_GROUPED_GEMM_DGRAD = _sm90("grouped_gemm_dgrad", "grouped_gemm", _DTYPE, *_eights("K", "N"))
SM90_GROUPED_GEMM_ACT = _sm90(
    "grouped_gemm_act",
    "grouped_gemm",
    _DTYPE,
    *_eights("K", "N", "I"),
    _ACTIVATION,
    _INTERLEAVE,
    stored_interleave_fits("transposed_weight", "glu_interleave"),
)
SM90_GROUPED_GEMM_DACT = _sm90("grouped_gemm_dact", "grouped_gemm", _DTYPE, *_eights("H", "I"), _ACTIVATION)
SM90_DACT = _sm90("dact", "rowwise", _DTYPE, *_eights("I"), _ACTIVATION)
SM90_GROUPED_WGRAD = _sm90("grouped_wgrad", "grouped_wgrad", _DTYPE, *_eights("K", "N"))
SM90_GROUPED_DBIAS = _sm90("grouped_dbias", "rowwise", _DTYPE, *_eights("N"))
SM90_GROUPED_DSCALE = _sm90("grouped_dscale", "rowwise", _DTYPE, *_eights("N"))


def _sixteens(*letters: str) -> tuple[Limit, ...]:
    """16-byte rows of 1-byte elements."""
    return tuple(multiple_of(letter, 16, fix="pad the layer's features") for letter in letters)


def _chunks(*letters: str) -> tuple[Limit, ...]:
    """64 columns have one scale of a weight, also where two blocks of 128 rows meet between gate and up."""
    return tuple(multiple_of(letter, 64, fix="pad the layer's features") for letter in letters)


SM90_PADDED_GROUP_OFFSETS = _sm90("padded_group_offsets", "rowwise", at_least("G", 1))
SM90_FP8_QUANTIZE = _sm90("fp8_quantize", "fp8_quantize", _DTYPE, *_sixteens("K"))
SM90_FP8_QUANTIZE_WEIGHT = _sm90("fp8_quantize_weight", "fp8_quantize", _DTYPE, *_sixteens("N", "K"))
SM90_FP8_GROUPED_GEMM = _sm90("fp8_grouped_gemm", "fp8_grouped_gemm", *_sixteens("K", "N"))
SM90_FP8_GROUPED_GEMM_ACT = _sm90(
    "fp8_grouped_gemm_act", "fp8_grouped_gemm", *_sixteens("K"), *_chunks("I"), _ACTIVATION
)
SM90_FP8_GROUPED_GEMM_DACT = _sm90(
    "fp8_grouped_gemm_dact", "fp8_grouped_gemm", *_sixteens("H"), *_chunks("I"), _ACTIVATION
)
SM90_FP8_GROUPED_WGRAD = _sm90("fp8_grouped_wgrad", "fp8_wgrad", *_sixteens("N", "K"))

_BF16 = one_of("dtype", ("bfloat16",))


def _thirty_twos(*letters: str) -> tuple[Limit, ...]:
    """32 values with a scale, 16-byte rows of 4-bit elements, columns that a thread writes at once."""
    return tuple(multiple_of(letter, 32, fix="pad the layer's features") for letter in letters)


_BLOCKS_OF_HALVES = interleave_fits("glu_interleave", "I", (32,), fix="pack_glu_weights_(interleave=32) does it")
SM90_MXFP8_QUANTIZE = _sm90("mxfp8_quantize", "mxfp8_quantize", _BF16, *_thirty_twos("K"))
SM90_MXFP8_DEQUANTIZE = _sm90("mxfp8_dequantize", "mxfp8_quantize", *_thirty_twos("K"))
SM90_MXFP8_QUANTIZE_WEIGHT = _sm90("mxfp8_quantize_weight", "mxfp8_quantize", _BF16, *_thirty_twos("N", "K"))
SM90_MXFP8_GROUPED_GEMM_ACT = _sm90(
    "mxfp8_grouped_gemm_act",
    "mxfp8_grouped_gemm",
    _BF16,
    *_thirty_twos("K", "I"),
    *_eights("N"),
    _ACTIVATION,
    _BLOCKS_OF_HALVES,
)
SM90_MXFP8_GROUPED_GEMM_DACT = _sm90(
    "mxfp8_grouped_gemm_dact", "mxfp8_grouped_gemm", _BF16, *_thirty_twos("H", "I"), _ACTIVATION
)

SM90_NVFP4_AMAX = _sm90("nvfp4_amax", "nvfp4_quantize", _BF16, *_sixteens("K"))
SM90_NVFP4_QUANTIZE = _sm90("nvfp4_quantize", "nvfp4_quantize", _BF16, *_sixteens("K"))
SM90_NVFP4_DEQUANTIZE = _sm90("nvfp4_dequantize", "nvfp4_quantize", *_sixteens("K"))
SM90_NVFP4_QUANTIZE_WEIGHT = _sm90("nvfp4_quantize_weight", "nvfp4_quantize", _BF16, *_sixteens("N", "K"))
SM90_NVFP4_GROUPED_GEMM = _sm90("nvfp4_grouped_gemm", "nvfp4_grouped_gemm", _BF16, *_sixteens("K", "N"))
SM90_NVFP4_GROUPED_GEMM_DGRAD = _sm90("nvfp4_grouped_gemm_dgrad", "nvfp4_grouped_gemm", _BF16, *_sixteens("K", "N"))
SM90_NVFP4_GROUPED_GEMM_ACT = _sm90(
    "nvfp4_grouped_gemm_act",
    "nvfp4_grouped_gemm",
    _BF16,
    *_sixteens("K", "N", "I"),
    _ACTIVATION,
    _BLOCKS_OF_HALVES,
)
SM90_NVFP4_GROUPED_GEMM_DACT = _sm90(
    "nvfp4_grouped_gemm_dact", "nvfp4_grouped_gemm", _BF16, *_sixteens("H", "I"), _ACTIVATION
)
SM90_NVFP4_GROUPED_WGRAD = _sm90("nvfp4_grouped_wgrad", "nvfp4_grouped_wgrad", _BF16, *_sixteens("K", "N"))

# ----------------------------------------------------------------------------------------------------------------------
# Blackwell, by cuDNN Frontend. Compiled and call-checked without one, not run. Its architecture check also lets SM120
# pass, for which its kernels then do not compile.

BLACKWELL = ("sm_100a", "sm_103a")
PACKING = "pack_glu_weights_(interleave=32) does it"
NO_TANH_GEGLU = "cuDNN Frontend's geglu is the clamped SwiGLU; it has no kernel for gelu_tanh"
BUILT_IN = "it is built into cuDNN Frontend's kernel"
FORMATS = ("bfloat16", "mxfp8", "nvfp4")

SM100_ACTIVATION = one_of("activation", SM100_ACTIVATIONS, fix=NO_TANH_GEGLU)
_HAS_CLAMP = given_for("limit", "activation", "clamped_swiglu", fix="cuDNN Frontend's kernel always clamps")
_SRELU = one_of("activation", ("srelu", "tanh_srelu"))
_GROUPS = at_most("G", 1024)
_HALVES = multiple_of("I", 32, fix="gate and up lie in blocks of 32 columns")
_INTERLEAVED = interleave_fits("glu_interleave", "I", (32,), plain=False, fix=PACKING)
_ROWS_OF_FC1 = not_transposed_for("transposed_weight", "activation", GLU_ACTIVATIONS)


def _clamp(**constants: float) -> tuple[Limit, ...]:
    """The clamped SwiGLU has these constants."""
    return tuple(
        fixed_for(name, value, "activation", "clamped_swiglu", fix=BUILT_IN) for name, value in constants.items()
    )


def _sums(format: str, *letters: str) -> tuple[Limit, ...]:
    """Dimensions that are summed over."""
    return _eights(*letters) if format == "bfloat16" else _thirty_twos(*letters)


def _sm100(name: str, format: str, module: str, *limits: Limit) -> Kernel:
    """dtype: what the layer computes in, and what pre-activations and results are in, whatever the format."""
    arch, *also = BLACKWELL
    full, place = name if format == "bfloat16" else f"{name}_{format}", f"cute_kernels.blackwell.{module}"
    packages = (CUDNN_FRONTEND, *_DSL)
    return Kernel(full, arch, place, (_BF16, *limits), packages, also=tuple(also), is_kept=False)


def _sm100_rows(format: str) -> Mapping[str, Kernel]:
    """The rows of a format by what they do."""
    glu = (_HALVES, _INTERLEAVED, *_sums(format, "K"), _GROUPS, _ROWS_OF_FC1)
    dglu = (SM100_ACTIVATION, _HAS_CLAMP, _HALVES, *_sums(format, "H"), _GROUPS)
    product = (*_thirty_twos("N"), *_sums(format, "K"), _GROUPS)
    wgrad = _sm100("cudnn_wgrad", format, "wgrad", *_sums(format, "K", "N"), _GROUPS)
    rows = {
        "dglu": _sm100("cudnn_dglu", format, "dglu", *dglu),
        "wgrad": wgrad,
        "dense_swiglu": _sm100("cudnn_dense_swiglu", format, "dense", _HALVES, *_sums(format, "K")),
    }
    if format == "bfloat16":
        clamp = _clamp(limit=7.0, alpha=1.702)
        rows["glu"] = _sm100("cudnn_glu", format, "glu", SM100_ACTIVATION, *clamp, *glu)
        rows["gemm"] = _sm100("cudnn_gemm", format, "gemm", *product)
        return rows
    rows["glu"] = _sm100("cudnn_glu", format, "glu", SM100_ACTIVATION, _HAS_CLAMP, *glu)
    rows["gemm"] = _sm100("cudnn_quant", format, "quant", *product)
    for name in ("srelu", "dsrelu"):
        rows[name] = _sm100(f"cudnn_{name}", format, "srelu", _SRELU, *product)
    rows["dense_srelu"] = _sm100("cudnn_dense_srelu", format, "dense", *product[:-1])
    if format == "nvfp4":
        clamp = _clamp(limit=7.0, alpha=1.702, offset=1.0)
        hadamard = (SM100_ACTIVATION, *clamp, *glu)
        rows["glu_hadamard"] = _sm100("cudnn_glu_hadamard", format, "glu_hadamard", *hadamard)
    return rows


SM100: Mapping[str, Mapping[str, Kernel]] = {format: _sm100_rows(format) for format in FORMATS}
"""Format -> what it does -> row."""

KERNELS: Mapping[str, Kernel] = {
    f"{kernel.arch}/{kernel.name}": kernel
    for kernel in (
        SM90_GROUP_OFFSETS,
        SM90_GROUPED_GEMM,
        SM90_GROUPED_GEMM_DGRAD,
        SM90_GROUPED_GEMM_ACT,
        SM90_GROUPED_GEMM_DACT,
        SM90_DACT,
        SM90_GROUPED_WGRAD,
        SM90_GROUPED_DBIAS,
        SM90_GROUPED_DSCALE,
        SM90_PADDED_GROUP_OFFSETS,
        SM90_FP8_QUANTIZE,
        SM90_FP8_QUANTIZE_WEIGHT,
        SM90_FP8_GROUPED_GEMM,
        SM90_FP8_GROUPED_GEMM_ACT,
        SM90_FP8_GROUPED_GEMM_DACT,
        SM90_FP8_GROUPED_WGRAD,
        SM90_MXFP8_QUANTIZE,
        SM90_MXFP8_DEQUANTIZE,
        SM90_MXFP8_QUANTIZE_WEIGHT,
        SM90_MXFP8_GROUPED_GEMM_ACT,
        SM90_MXFP8_GROUPED_GEMM_DACT,
        SM90_NVFP4_AMAX,
        SM90_NVFP4_QUANTIZE,
        SM90_NVFP4_DEQUANTIZE,
        SM90_NVFP4_QUANTIZE_WEIGHT,
        SM90_NVFP4_GROUPED_GEMM,
        SM90_NVFP4_GROUPED_GEMM_DGRAD,
        SM90_NVFP4_GROUPED_GEMM_ACT,
        SM90_NVFP4_GROUPED_GEMM_DACT,
        SM90_NVFP4_GROUPED_WGRAD,
        *(kernel for rows in SM100.values() for kernel in rows.values()),
    )
}
