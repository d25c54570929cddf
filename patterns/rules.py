"""RULES: the table, in priority order; nothing else in the file but what its rows share.

At each position the first row that matches and whose conditions all hold takes its ops. Longer patterns stand first.
The table is a constant: it never depends on the machine or on import order; what a machine lacks is a refusal.
"""

from __future__ import annotations

from itertools import product

from cute_kernels import catalog
from cute_kernels.limits import one_of
from cute_kernels.quantization.formats import Format, fp8_block, mxfp8, nvfp4
from patterns import examples
from patterns.guards import HeldIn, absent, clamp_is_legal, even_for_glu, feeds, held_in, recipe_format, recipe_is, same
from patterns.kernels import (
    FP8_LINEAR_ACT_KERNELS,
    FP8_LINEAR_KERNELS,
    FP8_MLP_KERNELS,
    LINEAR_ACT_KERNELS,
    LINEAR_KERNELS,
    MLP_KERNELS,
    MXFP8_LINEAR_KERNELS,
    MXFP8_MLP_KERNELS,
    NVFP4_LINEAR_KERNELS,
    NVFP4_MLP_KERNELS,
    sm100_linear,
    sm100_mlp,
    sm100_srelu_mlp,
)
from patterns.rule import Rule, slot

GROUPED_MLP_FP8 = "fusible_ops.fused.grouped_mlp_fp8:GroupedMLPFp8"
LINEAR_ACTIVATION_FP8 = "fusible_ops.fused.grouped_linear_fp8:GroupedLinearActivationFp8"
LINEAR_FP8 = "fusible_ops.fused.grouped_linear_fp8:GroupedLinearFp8"
LINEAR_MXFP8 = "fusible_ops.fused.grouped_linear_mxfp8:GroupedLinearMxfp8"
GROUPED_MLP_MXFP8 = "fusible_ops.fused.grouped_mlp_mxfp8:GroupedMLPMxfp8"
LINEAR_NVFP4 = "fusible_ops.fused.grouped_linear_nvfp4:GroupedLinearNvfp4"
GROUPED_MLP_NVFP4 = "fusible_ops.fused.grouped_mlp_nvfp4:GroupedMLPNvfp4"
GROUPED_MLP = "fusible_ops.fused.grouped_mlp:GroupedMLP"
PADDED_MLP = "fusible_ops.fused.padded_mlp:PaddedMLP"
PADDED_MLP_SCALED = "fusible_ops.fused.padded_mlp_scaled:PaddedMLPScaled"
LINEAR_ACTIVATION = "fusible_ops.fused.grouped_linear:GroupedLinearActivation"
LINEAR = "fusible_ops.fused.grouped_linear:FusedGroupedLinear"
PADDED_LINEAR = "fusible_ops.fused.padded_linear:PaddedLinear"
PADDED_LINEAR_SCALED = "fusible_ops.fused.padded_linear_scaled:PaddedLinearScaled"

# ----------------------------------------------------------------------------------------------------------------------
# Slots and guards

_ACTIVATION = slot("act", *catalog.ACTIVATIONS, title="an activation")
_QUANTIZE = slot("quantize", "quantize", optional=True)
_GLU = slot("act", *catalog.GLU_ACTIVATIONS, title="a GLU")
_CLAMPED = slot("act", "clamped_swiglu")
_SRELU = slot("act", "srelu", "tanh_srelu", title="a squared ReLU")

_NO_RECIPE = recipe_is(None)
_FP8_ROWS = tuple(fp8_block(force_pow_2_scales=powers) for powers in (True, False))
_FP8_WEIGHTS = tuple(fp8_block(dims=2, force_pow_2_scales=powers) for powers in (True, False))
_FP8_BLOCKS = (
    recipe_is("Float8BlockScaling"),
    recipe_format("input", _FP8_ROWS),
    recipe_format("weight", _FP8_WEIGHTS),
    recipe_format("grad_output", _FP8_ROWS),
    absent("recipe.backward_override", "a quantised backward: no backward_override", "dequantized"),
)
_MXFP8_WEIGHTS = mxfp8(), mxfp8(dims=2)
_MXFP8 = (
    recipe_is("MXFP8BlockScaling"),
    recipe_format("input", (mxfp8(),)),
    recipe_format("weight", _MXFP8_WEIGHTS),
    recipe_format("grad_output", (mxfp8(),)),
    absent("recipe.backward_override", "a quantised backward: no backward_override", "dequantized"),
)
_NVFP4_WEIGHTS = nvfp4(), nvfp4(dims=2)
_NVFP4 = (
    recipe_is("NVFP4BlockScaling"),
    recipe_format("input", (nvfp4(hadamard=True), nvfp4())),
    recipe_format("weight", _NVFP4_WEIGHTS),
    recipe_format("grad_output", tuple(nvfp4(1, *how) for how in product((True, False), repeat=2))),
    absent("recipe.backward_override", "a quantised backward: no backward_override", "dequantized"),
)
_ACT = (
    absent("act.cache_quantized_input", "an activation that does not cache a quantised input"),
    clamp_is_legal("act"),
)
_SAME_GROUPS = same("fc1.num_groups", "fc2.num_groups")
_FITS = feeds("fc1.out_features", "act.kind", "fc2.in_features")
_EVEN = even_for_glu("fc1.out_features", "act.kind")
_PLAIN_PREACT = absent("recipe.preactivation", "preactivation='high_precision'")
_PLAIN_FC1_BIAS = absent("fc1.scale_bias", "an FC1 bias that is not scaled")

_BF16_FC = one_of("fc.compute_dtype", ("bfloat16",), stage="guard")
_BF16_FC1 = one_of("fc1.compute_dtype", ("bfloat16",), stage="guard")
_FP8_ACT = (*_ACT, absent("act.glu_interleave", "gate and up rows as [gate | up]", 32), _BF16_FC1)
_QUANTIZES = one_of("quantize.forward", (True,), stage="guard")
_PLAIN_BACKWARD = absent("quantize.backward", "a Quantize whose gradient stays as it is")

_ROWS = "weights [N, K], from whose rows blocks are cut"


def _held(formats: tuple[Format, ...], *labels: str) -> tuple[HeldIn, ...]:
    """Where products take weights as they are held, and read nothing but these formats."""
    return tuple(held_in(label, formats) for label in labels)


_FP8_FC, _FP8_FC1, _FP8_BOTH = (_held(_FP8_WEIGHTS, *labels) for labels in (("fc",), ("fc1",), ("fc1", "fc2")))

_SAME_DTYPE = same("fc1.compute_dtype", "fc2.compute_dtype", ("float16", "bfloat16"))

# ----------------------------------------------------------------------------------------------------------------------
# Blackwell under recipes


def _sm100_rules() -> tuple[Rule, ...]:
    """MLPs on Blackwell under the recipes that it has kernels for."""
    made = []
    for linear, name, guards in (
        ("grouped_linear", "grouped_mlp", (_SAME_GROUPS, _FITS, _SAME_DTYPE, _PLAIN_FC1_BIAS, *_ACT)),
        ("linear", "mlp", (_FITS, _SAME_DTYPE, *_ACT)),
    ):
        for format, recipe, weights in (("mxfp8", _MXFP8, _MXFP8_WEIGHTS), ("nvfp4", _NVFP4, _NVFP4_WEIGHTS)):
            kept = (*((_PLAIN_PREACT,) if format == "mxfp8" else ()), *_held(weights, "fc1", "fc2"))
            for what, act, kernels in (
                ("", _GLU, sm100_mlp(format)),
                ("_any_clamp", _CLAMPED, sm100_mlp(format, any_clamp=True)),
                ("_srelu", _SRELU, sm100_srelu_mlp(format)),
            ):
                if (format, what) == ("mxfp8", "_any_clamp"):
                    continue  # its first row takes any
                pattern = (slot("fc1", linear), act, slot("fc2", linear))
                example = examples.SM100[linear, format, what]
                row = f"{name}{what}_{format}_sm100"
                made.append(Rule(row, pattern, (*recipe, *guards, *kept), PADDED_MLP_SCALED, kernels, example))
    return tuple(made)


def _sm100_linears() -> tuple[Rule, ...]:
    """Linears alone on Blackwell under the same recipes. Without one a dense linear is PyTorch's."""
    made = []
    for format, recipe, weights, grouped, dense in (
        ("mxfp8", _MXFP8, _MXFP8_WEIGHTS, examples.MOE_LINEAR_MXFP8, examples.FFN_LINEAR_MXFP8),
        ("nvfp4", _NVFP4, _NVFP4_WEIGHTS, examples.MOE_LINEAR_NVFP4, examples.FFN_LINEAR_NVFP4),
    ):
        for kind, example in (("grouped_linear", grouped), ("linear", dense)):
            pattern, row, guards = (slot("fc", kind),), f"{kind}_{format}_sm100", (*recipe, *_held(weights, "fc"))
            made.append(Rule(row, pattern, guards, PADDED_LINEAR_SCALED, sm100_linear(format), example))
    return tuple(made)


# ----------------------------------------------------------------------------------------------------------------------
# Hopper under recipes for which it has no tensor cores: the formats' values, multiplied in BF16


def _hopper_mlps() -> tuple[Rule, ...]:
    """MLPs in these formats; dense linears are stored [N, K], are not scaled, and have one group."""
    grouped = (_SAME_GROUPS, _PLAIN_FC1_BIAS, *(absent(f"{fc}.transposed_weight", _ROWS) for fc in ("fc1", "fc2")))
    made = []
    for format, recipe, program, kernels, of_grouped, of_dense in (
        ("mxfp8", _MXFP8, GROUPED_MLP_MXFP8, MXFP8_MLP_KERNELS, examples.MOE_MXFP8, examples.FFN_MXFP8),
        ("nvfp4", _NVFP4, GROUPED_MLP_NVFP4, NVFP4_MLP_KERNELS, examples.MOE_NVFP4, examples.FFN_NVFP4),
    ):
        for linear, row, more, example in (
            ("grouped_linear", "grouped_mlp", grouped, of_grouped),
            ("linear", "mlp", (), of_dense),
        ):
            pattern = (slot("fc1", linear), _ACTIVATION, _QUANTIZE, slot("fc2", linear))
            guards = (*recipe, *more, _FITS, _SAME_DTYPE, *_ACT, _BF16_FC1, _PLAIN_BACKWARD)
            made.append(Rule(f"{row}_{format}", pattern, guards, program, kernels, example))
    return tuple(made)


def _hopper_linears() -> tuple[Rule, ...]:
    """Linears alone in these formats."""
    made = []
    for format, recipe, program, kernels, of_grouped, of_dense in (
        ("mxfp8", _MXFP8, LINEAR_MXFP8, MXFP8_LINEAR_KERNELS, examples.MOE_LINEAR_MXFP8, examples.FFN_LINEAR_MXFP8),
        ("nvfp4", _NVFP4, LINEAR_NVFP4, NVFP4_LINEAR_KERNELS, examples.MOE_LINEAR_NVFP4, examples.FFN_LINEAR_NVFP4),
    ):
        for kind, more, example in (
            ("grouped_linear", (absent("fc.transposed_weight", _ROWS),), of_grouped),
            ("linear", (), of_dense),
        ):
            guards = (*recipe, _BF16_FC, *more)
            made.append(Rule(f"{kind}_{format}", (slot("fc", kind),), guards, program, kernels, example))
    return tuple(made)


# ----------------------------------------------------------------------------------------------------------------------
# The table

RULES: tuple[Rule, ...] = (
    Rule(
        name="grouped_mlp_fp8",
        pattern=(slot("fc1", "grouped_linear"), _ACTIVATION, _QUANTIZE, slot("fc2", "grouped_linear")),
        guards=(
            *_FP8_BLOCKS,
            _SAME_GROUPS,
            _FITS,
            _SAME_DTYPE,
            _PLAIN_FC1_BIAS,
            *_FP8_ACT,
            _PLAIN_BACKWARD,
            *_FP8_BOTH,
        ),
        program=GROUPED_MLP_FP8,
        kernels=FP8_MLP_KERNELS,
        example=examples.MOE_FP8,
    ),
    Rule(
        name="mlp_fp8",
        pattern=(slot("fc1", "linear"), _ACTIVATION, _QUANTIZE, slot("fc2", "linear")),
        guards=(*_FP8_BLOCKS, _FITS, _SAME_DTYPE, *_FP8_ACT, _PLAIN_BACKWARD, *_FP8_BOTH),
        program=GROUPED_MLP_FP8,
        kernels=FP8_MLP_KERNELS,
        example=examples.FFN_FP8,
    ),
    *_hopper_mlps(),
    Rule(
        name="grouped_mlp",
        pattern=(slot("fc1", "grouped_linear"), _ACTIVATION, slot("fc2", "grouped_linear")),
        guards=(_NO_RECIPE, _SAME_GROUPS, _FITS, _SAME_DTYPE, _PLAIN_FC1_BIAS, *_ACT),
        program=GROUPED_MLP,
        kernels=MLP_KERNELS,
        example=examples.MOE,
    ),
    Rule(
        name="grouped_mlp_sm100",
        pattern=(slot("fc1", "grouped_linear"), _GLU, slot("fc2", "grouped_linear")),
        guards=(_NO_RECIPE, _SAME_GROUPS, _FITS, _SAME_DTYPE, _PLAIN_FC1_BIAS, *_ACT),
        program=PADDED_MLP,
        kernels=sm100_mlp("bfloat16"),
        example=examples.MOE_INTERLEAVED,
    ),
    *_sm100_rules(),
    Rule(
        name="mlp",
        pattern=(slot("fc1", "linear"), _ACTIVATION, slot("fc2", "linear")),
        guards=(_NO_RECIPE, _FITS, _SAME_DTYPE, *_ACT),
        program=GROUPED_MLP,
        kernels=MLP_KERNELS,
        example=examples.FFN,
    ),
    Rule(
        name="mlp_sm100",
        pattern=(slot("fc1", "linear"), _GLU, slot("fc2", "linear")),
        guards=(_NO_RECIPE, _FITS, _SAME_DTYPE, *_ACT),
        program=PADDED_MLP,
        kernels=sm100_mlp("bfloat16"),
        example=examples.FFN_INTERLEAVED,
    ),
    Rule(
        name="grouped_linear_activation_fp8",
        pattern=(slot("fc1", "grouped_linear"), _ACTIVATION, slot("quantize", "quantize")),
        guards=(*_FP8_BLOCKS, _EVEN, _PLAIN_FC1_BIAS, *_FP8_ACT, _PLAIN_PREACT, _QUANTIZES, _PLAIN_BACKWARD, *_FP8_FC1),
        program=LINEAR_ACTIVATION_FP8,
        kernels=FP8_LINEAR_ACT_KERNELS,
        example=examples.MOE_ACTIVATION_QUANTIZE_FP8,
    ),
    Rule(
        name="linear_activation_fp8",
        pattern=(slot("fc1", "linear"), _ACTIVATION, slot("quantize", "quantize")),
        guards=(*_FP8_BLOCKS, _EVEN, *_FP8_ACT, _PLAIN_PREACT, _QUANTIZES, _PLAIN_BACKWARD, *_FP8_FC1),
        program=LINEAR_ACTIVATION_FP8,
        kernels=FP8_LINEAR_ACT_KERNELS,
        example=examples.FFN_ACTIVATION_QUANTIZE_FP8,
    ),
    Rule(
        name="grouped_linear_activation",
        pattern=(slot("fc1", "grouped_linear"), _ACTIVATION, slot("quantize", "quantize", optional=True)),
        guards=(_NO_RECIPE, _EVEN, _PLAIN_FC1_BIAS, *_ACT),
        program=LINEAR_ACTIVATION,
        kernels=LINEAR_ACT_KERNELS,
        example=examples.MOE_ACTIVATION_QUANTIZE,
    ),
    Rule(
        name="linear_activation",
        pattern=(slot("fc1", "linear"), _ACTIVATION, slot("quantize", "quantize", optional=True)),
        guards=(_NO_RECIPE, _EVEN, *_ACT),
        program=LINEAR_ACTIVATION,
        kernels=LINEAR_ACT_KERNELS,
        example=examples.FFN_ACTIVATION_QUANTIZE,
    ),
    Rule(
        name="grouped_linear_quantize",
        pattern=(slot("fc", "grouped_linear"), slot("quantize", "quantize")),
        guards=(_NO_RECIPE,),
        program=LINEAR,
        kernels=LINEAR_KERNELS,
        example=examples.MOE_LINEAR_QUANTIZE,
    ),
    Rule(
        name="linear_quantize",
        pattern=(slot("fc", "linear"), slot("quantize", "quantize")),
        guards=(_NO_RECIPE,),
        program=LINEAR,
        kernels=LINEAR_KERNELS,
        example=examples.FFN_LINEAR_QUANTIZE,
    ),
    Rule(
        name="grouped_linear_sm100",
        pattern=(slot("fc", "grouped_linear"), _QUANTIZE),
        guards=(_NO_RECIPE,),
        program=PADDED_LINEAR,
        kernels=sm100_linear("bfloat16"),
        example=examples.MOE_LINEAR,
    ),
    Rule(
        name="grouped_linear_fp8",
        pattern=(slot("fc", "grouped_linear"),),
        guards=(*_FP8_BLOCKS, _BF16_FC, *_FP8_FC),
        program=LINEAR_FP8,
        kernels=FP8_LINEAR_KERNELS,
        example=examples.MOE_LINEAR_FP8,
    ),
    Rule(
        name="linear_fp8",
        pattern=(slot("fc", "linear"),),
        guards=(*_FP8_BLOCKS, _BF16_FC, *_FP8_FC),
        program=LINEAR_FP8,
        kernels=FP8_LINEAR_KERNELS,
        example=examples.FFN_LINEAR_FP8,
    ),
    *_sm100_linears(),
    *_hopper_linears(),
    Rule(
        name="grouped_linear",
        pattern=(slot("fc", "grouped_linear"),),
        guards=(_NO_RECIPE,),
        program=LINEAR,
        kernels=LINEAR_KERNELS,
        example=examples.MOE_LINEAR,
    ),
    Rule(
        name="linear",
        pattern=(slot("fc", "linear"),),
        guards=(_NO_RECIPE,),
        program=LINEAR,
        kernels=LINEAR_KERNELS,
        example=examples.FFN_LINEAR,
    ),
)
