"""RULES: the table, in priority order; nothing else in the file but what its rows share.

At each position the first row that matches and whose conditions all hold takes its ops. Longer patterns stand first.
The table is a constant: it never depends on the machine or on import order; what a machine lacks is a refusal.
"""

from __future__ import annotations

from cute_kernels import catalog
from cute_kernels.limits import one_of
from cute_kernels.quantization.formats import fp8_block, mxfp8, nvfp4
from patterns import examples
from patterns.guards import absent, clamp_is_legal, even_for_glu, feeds, recipe_format, recipe_is, same
from patterns.rule import Bound, Rule, bind, slot

GROUPED_MLP_FP8 = "fusible_ops.fused.grouped_mlp_fp8:GroupedMLPFp8"
LINEAR_ACTIVATION_FP8 = "fusible_ops.fused.grouped_linear_fp8:GroupedLinearActivationFp8"
LINEAR_FP8 = "fusible_ops.fused.grouped_linear_fp8:GroupedLinearFp8"
GROUPED_MLP = "fusible_ops.fused.grouped_mlp:GroupedMLP"
PADDED_MLP = "fusible_ops.fused.padded_mlp:PaddedMLP"
PADDED_MLP_MXFP8 = "fusible_ops.fused.padded_mlp_mxfp8:PaddedMLPMxfp8"
LINEAR_ACTIVATION = "fusible_ops.fused.grouped_linear:GroupedLinearActivation"
LINEAR = "fusible_ops.fused.grouped_linear:FusedGroupedLinear"

# ----------------------------------------------------------------------------------------------------------------------
# Slots and guards

_ACTIVATION = slot("act", *catalog.ACTIVATIONS, title="an activation")
_QUANTIZE = slot("quantize", "quantize", optional=True)
_GLU = slot("act", *catalog.GLU_ACTIVATIONS, title="a GLU")
_SRELU = slot("act", "srelu", "tanh_srelu", title="a squared ReLU")

_NO_RECIPE = recipe_is(None)
_FP8_ROWS = tuple(fp8_block(force_pow_2_scales=powers) for powers in (True, False))
_FP8_BLOCKS = (
    recipe_is("Float8BlockScaling"),
    recipe_format("input", _FP8_ROWS),
    recipe_format("weight", tuple(fp8_block(dims=2, force_pow_2_scales=powers) for powers in (True, False))),
    recipe_format("grad_output", _FP8_ROWS),
    absent("recipe.backward_override", "a quantised backward: no backward_override", "dequantized"),
)
_MXFP8 = (
    recipe_is("MXFP8BlockScaling"),
    recipe_format("input", (mxfp8(),)),
    recipe_format("weight", (mxfp8(), mxfp8(dims=2))),
    recipe_format("grad_output", (mxfp8(),)),
    absent("recipe.backward_override", "a quantised backward: no backward_override", "dequantized"),
)
_NVFP4 = (
    recipe_is("NVFP4BlockScaling"),
    recipe_format("input", (nvfp4(hadamard=True),)),
    recipe_format("weight", (nvfp4(), nvfp4(dims=2))),
    recipe_format("grad_output", tuple(nvfp4(hadamard=True, stochastic=random) for random in (True, False))),
    absent("recipe.backward_override", "a quantised backward: no backward_override", "dequantized"),
)
_ACT = (
    absent("act.cache_quantized_input", "an activation that does not cache a quantised input"),
    clamp_is_legal("act"),
)
_SAME_GROUPS = same("fc1.num_groups", "fc2.num_groups")
_FITS = feeds("fc1.out_features", "act.kind", "fc2.in_features")
_EVEN = even_for_glu("fc1.out_features", "act.kind")
_PLAIN_FC1_BIAS = absent("fc1.scale_bias", "an FC1 bias that is not scaled")

_FP8_OUT = one_of("fc.compute_dtype", ("bfloat16",), stage="guard")
_FP8_ACT = (
    *_ACT,
    absent("act.glu_interleave", "gate and up rows as [gate | up]", 32),
    one_of("fc1.compute_dtype", ("bfloat16",), stage="guard"),
)
_QUANTIZES = one_of("quantize.forward", (True,), stage="guard")
_PLAIN_BACKWARD = absent("quantize.backward", "a Quantize whose gradient stays as it is")

_SAME_DTYPE = same("fc1.compute_dtype", "fc2.compute_dtype", ("float16", "bfloat16"))

# ----------------------------------------------------------------------------------------------------------------------
# Kernels, with their letters bound to facts of the chain


def _linear(label: str, *, act_columns: str = "") -> tuple[Bound, ...]:
    """A linear, or with `act_columns` (a fact: columns out of "act") its half of one that an activation follows."""
    k, n, dtype = f"{label}.in_features", f"{label}.out_features", f"{label}.compute_dtype"
    act = {"I": act_columns, "activation": "act.kind", "glu_interleave": "act.glu_interleave"}
    act["transposed_weight"] = f"{label}.transposed_weight"
    if act_columns:
        forward = bind(catalog.SM90_GROUPED_GEMM_ACT, f"{label} and act forward", K=k, N=n, dtype=dtype, **act)
    else:
        forward = bind(catalog.SM90_GROUPED_GEMM, f"{label} forward", K=k, N=n, dtype=dtype)
    return (
        bind(catalog.SM90_GROUP_OFFSETS, f"{label} rows of each group", G=f"{label}.num_groups"),
        forward,
        bind(catalog.SM90_GROUPED_WGRAD, f"{label} weight gradient", K=k, N=n, dtype=dtype),
        bind(catalog.SM90_GROUPED_DBIAS, f"{label} bias gradient", when=f"{label}.has_bias", N=n, dtype=dtype),
        bind(catalog.SM90_GROUPED_DSCALE, f"{label} scale gradient", when=f"{label}.scale_bias", N=n, dtype=dtype),
    )


def _dgrad(label: str) -> Bound:
    k, n, dtype = f"{label}.in_features", f"{label}.out_features", f"{label}.compute_dtype"
    return bind(catalog.SM90_GROUPED_GEMM_DGRAD, f"{label} input gradient", K=k, N=n, dtype=dtype)


_LINEAR = (*_linear("fc"), _dgrad("fc"))
_LINEAR_ACT = (
    *_linear("fc1", act_columns="act.columns"),
    bind(catalog.SM90_DACT, "act backward", I="act.columns", activation="act.kind", dtype="fc1.compute_dtype"),
    _dgrad("fc1"),
)
_MLP = (
    *_linear("fc1", act_columns="fc2.in_features"),
    *_linear("fc2"),
    bind(
        catalog.SM90_GROUPED_GEMM_DACT,
        "fc2 input gradient and act backward",
        H="fc2.out_features",
        I="fc2.in_features",
        activation="act.kind",
        dtype="fc1.compute_dtype",
    ),
    _dgrad("fc1"),
)


def _sm100_mlp(format: str) -> tuple[Bound, ...]:
    """The kernels of an MLP with a GLU on Blackwell, in "bfloat16", "mxfp8" or "nvfp4"."""
    rows = catalog.SM100[format]
    glu = rows.get("glu_hadamard", rows["glu"])  # NVFP4 needs the maxima of what it quantises next
    fc1, fc2 = ({"G": f"{label}.num_groups", "dtype": f"{label}.compute_dtype"} for label in ("fc1", "fc2"))
    act = {"I": "fc2.in_features", "activation": "act.kind"}
    constants = {name: f"act.{name}" for name in ("limit", "alpha", "offset", "glu_interleave")}
    transposed = {"transposed_weight": "fc1.transposed_weight"}
    return (
        bind(glu, "fc1 and act forward", K="fc1.in_features", **act, **constants, **transposed, **fc1),
        bind(rows["gemm"], "fc2 forward", K="fc2.in_features", N="fc2.out_features", **fc2),
        bind(rows["dglu"], "fc2 input gradient and act backward", H="fc2.out_features", **act, **constants, **fc2),
        bind(rows["gemm"], "fc1 input gradient", K="fc1.out_features", N="fc1.in_features", **fc1),
        bind(rows["wgrad"], "fc1 weight gradient", K="fc1.in_features", N="fc1.out_features", **fc1),
        bind(rows["wgrad"], "fc2 weight gradient", K="fc2.in_features", N="fc2.out_features", **fc2),
    )


def _fp8_linear(label: str, *, act_columns: str = "") -> tuple[Bound, ...]:
    """The same in E4M3 blocks."""
    k, n = f"{label}.in_features", f"{label}.out_features"
    forward = bind(catalog.SM90_FP8_GROUPED_GEMM, f"{label} forward", K=k, N=n)
    if act_columns:
        use = f"{label}, act and quantise forward"
        forward = bind(catalog.SM90_FP8_GROUPED_GEMM_ACT, use, K=k, N=n, I=act_columns, activation="act.kind")
    weight = f"{label} weights, once per update"
    return (
        bind(catalog.SM90_FP8_QUANTIZE_WEIGHT, weight, K=k, N=n, dtype=f"{label}.compute_dtype"),
        forward,
        bind(catalog.SM90_FP8_GROUPED_WGRAD, f"{label} weight gradient", K=k, N=n),
        bind(
            catalog.SM90_GROUPED_DBIAS,
            f"{label} bias gradient, scaled",
            when=f"{label}.scale_bias",
            N=n,
            dtype=f"{label}.compute_dtype",
        ),
        bind(
            catalog.SM90_GROUPED_DSCALE,
            f"{label} scale gradient",
            when=f"{label}.scale_bias",
            N=n,
            dtype=f"{label}.compute_dtype",
        ),
    )


def _fp8_rows(label: str) -> tuple[Bound, ...]:
    """What the first of the ops, a linear, does with its rows, and the last step of its backward."""
    k, n, dtype = f"{label}.in_features", f"{label}.out_features", f"{label}.compute_dtype"
    return (
        bind(catalog.SM90_PADDED_GROUP_OFFSETS, "rows of each group, plain and padded", G=f"{label}.num_groups"),
        bind(catalog.SM90_FP8_QUANTIZE, f"{label} input, in both orientations", K=k, dtype=dtype),
        bind(catalog.SM90_FP8_GROUPED_GEMM, f"{label} input gradient", K=n, N=k),
    )


def _fp8_gradient(of: str, columns: str, dtype: str) -> Bound:
    return bind(catalog.SM90_FP8_QUANTIZE, f"{of}, in both orientations, with its sums", K=columns, dtype=dtype)


_FP8_LINEAR = (
    *_fp8_rows("fc"),
    *_fp8_linear("fc"),
    _fp8_gradient("output gradient", "fc.out_features", "fc.compute_dtype"),
)
_FP8_LINEAR_ACT = (
    *_fp8_rows("fc1"),
    *_fp8_linear("fc1", act_columns="act.columns"),
    bind(catalog.SM90_DACT, "act backward", I="act.columns", activation="act.kind", dtype="fc1.compute_dtype"),
    _fp8_gradient("pre-activation gradient", "fc1.out_features", "fc1.compute_dtype"),
)
_FP8_MLP = (
    *_fp8_rows("fc1"),
    *_fp8_linear("fc1", act_columns="fc2.in_features"),
    *_fp8_linear("fc2"),
    _fp8_gradient("output gradient", "fc2.out_features", "fc2.compute_dtype"),
    bind(
        catalog.SM90_FP8_GROUPED_GEMM_DACT,
        "fc2 input gradient, act backward and quantise",
        H="fc2.out_features",
        I="fc2.in_features",
        activation="act.kind",
    ),
)


def _sm100_srelu_mlp(format: str) -> tuple[Bound, ...]:
    """The same with a squared ReLU, in "mxfp8" or "nvfp4"."""
    rows = catalog.SM100[format]
    _, fc2, _, dx, *wgrads = _sm100_mlp(format)
    act = {"activation": "act.kind"}
    out, back = ({"G": f"{label}.num_groups", "dtype": f"{label}.compute_dtype"} for label in ("fc1", "fc2"))
    return (
        bind(rows["srelu"], "fc1 and act forward", K="fc1.in_features", N="fc1.out_features", **act, **out),
        fc2,
        bind(
            rows["dsrelu"],
            "fc2 input gradient and act backward",
            K="fc2.out_features",
            N="fc2.in_features",
            **act,
            **back,
        ),
        dx,
        *wgrads,
    )


def _sm100_rules() -> tuple[Rule, ...]:
    """Grouped MLPs on Blackwell under the recipes that it has kernels for."""
    grouped = (_SAME_GROUPS, _FITS, _SAME_DTYPE, _PLAIN_FC1_BIAS, *_ACT)
    made = []
    for format, recipe, glu, srelu in (
        ("mxfp8", _MXFP8, examples.MOE_MXFP8, examples.MOE_SRELU_MXFP8),
        ("nvfp4", _NVFP4, examples.MOE_NVFP4, examples.MOE_SRELU_NVFP4),
    ):
        for name, act, kernels, example in (
            (f"grouped_mlp_{format}_sm100", _GLU, _sm100_mlp(format), glu),
            (f"grouped_mlp_srelu_{format}_sm100", _SRELU, _sm100_srelu_mlp(format), srelu),
        ):
            pattern = (slot("fc1", "grouped_linear"), act, slot("fc2", "grouped_linear"))
            program, missing = PADDED_MLP_MXFP8, ""
            if (format, act) != ("mxfp8", _GLU):
                program = PADDED_MLP
                missing = (
                    f"the fused operation that would call these kernels in {format.upper()} is not in this version"
                )
            made.append(Rule(name, pattern, (*recipe, *grouped), program, kernels, example, missing=missing))
    return tuple(made)


# ----------------------------------------------------------------------------------------------------------------------
# The table

RULES: tuple[Rule, ...] = (
    Rule(
        name="grouped_mlp_fp8",
        pattern=(slot("fc1", "grouped_linear"), _ACTIVATION, _QUANTIZE, slot("fc2", "grouped_linear")),
        guards=(*_FP8_BLOCKS, _SAME_GROUPS, _FITS, _SAME_DTYPE, _PLAIN_FC1_BIAS, *_FP8_ACT, _PLAIN_BACKWARD),
        program=GROUPED_MLP_FP8,
        kernels=_FP8_MLP,
        example=examples.MOE_FP8,
    ),
    Rule(
        name="mlp_fp8",
        pattern=(slot("fc1", "linear"), _ACTIVATION, _QUANTIZE, slot("fc2", "linear")),
        guards=(*_FP8_BLOCKS, _FITS, _SAME_DTYPE, *_FP8_ACT, _PLAIN_BACKWARD),
        program=GROUPED_MLP_FP8,
        kernels=_FP8_MLP,
        example=examples.FFN_FP8,
    ),
    Rule(
        name="grouped_mlp",
        pattern=(slot("fc1", "grouped_linear"), _ACTIVATION, slot("fc2", "grouped_linear")),
        guards=(_NO_RECIPE, _SAME_GROUPS, _FITS, _SAME_DTYPE, _PLAIN_FC1_BIAS, *_ACT),
        program=GROUPED_MLP,
        kernels=_MLP,
        example=examples.MOE,
    ),
    Rule(
        name="grouped_mlp_sm100",
        pattern=(slot("fc1", "grouped_linear"), _GLU, slot("fc2", "grouped_linear")),
        guards=(_NO_RECIPE, _SAME_GROUPS, _FITS, _SAME_DTYPE, _PLAIN_FC1_BIAS, *_ACT),
        program=PADDED_MLP,
        kernels=_sm100_mlp("bfloat16"),
        example=examples.MOE_INTERLEAVED,
    ),
    *_sm100_rules(),
    Rule(
        name="mlp",
        pattern=(slot("fc1", "linear"), _ACTIVATION, slot("fc2", "linear")),
        guards=(_NO_RECIPE, _FITS, _SAME_DTYPE, *_ACT),
        program=GROUPED_MLP,
        kernels=_MLP,
        example=examples.FFN,
    ),
    Rule(
        name="mlp_sm100",
        pattern=(slot("fc1", "linear"), _GLU, slot("fc2", "linear")),
        guards=(_NO_RECIPE, _FITS, _SAME_DTYPE, *_ACT),
        program=PADDED_MLP,
        kernels=_sm100_mlp("bfloat16"),
        example=examples.FFN_INTERLEAVED,
    ),
    Rule(
        name="grouped_linear_activation_fp8",
        pattern=(slot("fc1", "grouped_linear"), _ACTIVATION, slot("quantize", "quantize")),
        guards=(*_FP8_BLOCKS, _EVEN, _PLAIN_FC1_BIAS, *_FP8_ACT, _QUANTIZES, _PLAIN_BACKWARD),
        program=LINEAR_ACTIVATION_FP8,
        kernels=_FP8_LINEAR_ACT,
        example=examples.MOE_ACTIVATION_QUANTIZE_FP8,
    ),
    Rule(
        name="linear_activation_fp8",
        pattern=(slot("fc1", "linear"), _ACTIVATION, slot("quantize", "quantize")),
        guards=(*_FP8_BLOCKS, _EVEN, *_FP8_ACT, _QUANTIZES, _PLAIN_BACKWARD),
        program=LINEAR_ACTIVATION_FP8,
        kernels=_FP8_LINEAR_ACT,
        example=examples.FFN_ACTIVATION_QUANTIZE_FP8,
    ),
    Rule(
        name="grouped_linear_activation",
        pattern=(slot("fc1", "grouped_linear"), _ACTIVATION, slot("quantize", "quantize", optional=True)),
        guards=(_NO_RECIPE, _EVEN, _PLAIN_FC1_BIAS, *_ACT),
        program=LINEAR_ACTIVATION,
        kernels=_LINEAR_ACT,
        example=examples.MOE_ACTIVATION_QUANTIZE,
    ),
    Rule(
        name="linear_activation",
        pattern=(slot("fc1", "linear"), _ACTIVATION, slot("quantize", "quantize", optional=True)),
        guards=(_NO_RECIPE, _EVEN, *_ACT),
        program=LINEAR_ACTIVATION,
        kernels=_LINEAR_ACT,
        example=examples.FFN_ACTIVATION_QUANTIZE,
    ),
    Rule(
        name="grouped_linear_quantize",
        pattern=(slot("fc", "grouped_linear"), slot("quantize", "quantize")),
        guards=(_NO_RECIPE,),
        program=LINEAR,
        kernels=_LINEAR,
        example=examples.MOE_LINEAR_QUANTIZE,
    ),
    Rule(
        name="linear_quantize",
        pattern=(slot("fc", "linear"), slot("quantize", "quantize")),
        guards=(_NO_RECIPE,),
        program=LINEAR,
        kernels=_LINEAR,
        example=examples.FFN_LINEAR_QUANTIZE,
    ),
    Rule(
        name="grouped_linear_fp8",
        pattern=(slot("fc", "grouped_linear"),),
        guards=(*_FP8_BLOCKS, _FP8_OUT),
        program=LINEAR_FP8,
        kernels=_FP8_LINEAR,
        example=examples.MOE_LINEAR_FP8,
    ),
    Rule(
        name="linear_fp8",
        pattern=(slot("fc", "linear"),),
        guards=(*_FP8_BLOCKS, _FP8_OUT),
        program=LINEAR_FP8,
        kernels=_FP8_LINEAR,
        example=examples.FFN_LINEAR_FP8,
    ),
    Rule(
        name="grouped_linear",
        pattern=(slot("fc", "grouped_linear"),),
        guards=(_NO_RECIPE,),
        program=LINEAR,
        kernels=_LINEAR,
        example=examples.MOE_LINEAR,
    ),
    Rule(
        name="linear",
        pattern=(slot("fc", "linear"),),
        guards=(_NO_RECIPE,),
        program=LINEAR,
        kernels=_LINEAR,
        example=examples.FFN_LINEAR,
    ),
)
