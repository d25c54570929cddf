"""What the rows of the table launch: kernels, with their letters bound to facts of the chain."""

from __future__ import annotations

from cute_kernels import catalog
from patterns.rule import Bound, bind


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


LINEAR_KERNELS = (*_linear("fc"), _dgrad("fc"))
LINEAR_ACT_KERNELS = (
    *_linear("fc1", act_columns="act.columns"),
    bind(catalog.SM90_DACT, "act backward", I="act.columns", activation="act.kind", dtype="fc1.compute_dtype"),
    _dgrad("fc1"),
)
MLP_KERNELS = (
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


def sm100_mlp(format: str, any_clamp: bool = False) -> tuple[Bound, ...]:
    """The kernels of an MLP with a GLU on Blackwell, in "bfloat16", "mxfp8" or "nvfp4".

    In NVFP4 `glu_hadamard` also gives both maxima that quantising its result needs; any_clamp: by the kernel that gives
    one of them, and has no constants of a clamp built in.
    """
    rows = catalog.SM100[format]
    glu = rows["glu"] if any_clamp else rows.get("glu_hadamard", rows["glu"])
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


def _weights(kernel: catalog.Kernel, label: str) -> Bound:
    """What quantises a linear's weights, unless they are held so."""
    letters = {"K": f"{label}.in_features", "N": f"{label}.out_features", "dtype": f"{label}.compute_dtype"}
    return bind(kernel, f"{label} weights, once per update", when=f"{label}.quantizes_weight", **letters)


def _fp8_linear(label: str, *, act_columns: str = "") -> tuple[Bound, ...]:
    """The same in E4M3 blocks."""
    k, n = f"{label}.in_features", f"{label}.out_features"
    forward = bind(catalog.SM90_FP8_GROUPED_GEMM, f"{label} forward", K=k, N=n)
    if act_columns:
        use = f"{label}, act and quantise forward"
        forward = bind(catalog.SM90_FP8_GROUPED_GEMM_ACT, use, K=k, N=n, I=act_columns, activation="act.kind")
    return (
        _weights(catalog.SM90_FP8_QUANTIZE_WEIGHT, label),
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


FP8_LINEAR_KERNELS = (
    *_fp8_rows("fc"),
    *_fp8_linear("fc"),
    _fp8_gradient("output gradient", "fc.out_features", "fc.compute_dtype"),
)
FP8_LINEAR_ACT_KERNELS = (
    *_fp8_rows("fc1"),
    *_fp8_linear("fc1", act_columns="act.columns"),
    bind(catalog.SM90_DACT, "act backward", I="act.columns", activation="act.kind", dtype="fc1.compute_dtype"),
    _fp8_gradient("pre-activation gradient", "fc1.out_features", "fc1.compute_dtype"),
)
FP8_MLP_KERNELS = (
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


def sm100_linear(format: str) -> tuple[Bound, ...]:
    """The kernels of a linear alone."""
    rows = catalog.SM100[format]
    k, n, own = "fc.in_features", "fc.out_features", {"G": "fc.num_groups", "dtype": "fc.compute_dtype"}
    return (
        bind(rows["gemm"], "fc forward", K=k, N=n, **own),
        bind(rows["gemm"], "fc input gradient", K=n, N=k, **own),
        bind(rows["wgrad"], "fc weight gradient", K=k, N=n, **own),
    )


def sm100_srelu_mlp(format: str) -> tuple[Bound, ...]:
    """The same with a squared ReLU, in "mxfp8" or "nvfp4"."""
    rows = catalog.SM100[format]
    _, fc2, _, dx, *wgrads = sm100_mlp(format)
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


def _mxfp8_mlp() -> tuple[Bound, ...]:
    """An MLP whose BF16 operands hold MXFP8 values."""
    (k1, n1), (k2, n2) = ((f"{label}.in_features", f"{label}.out_features") for label in ("fc1", "fc2"))
    dtype, activation = {"dtype": "fc1.compute_dtype"}, {"I": k2, "activation": "act.kind"}
    return (
        bind(catalog.SM90_PADDED_GROUP_OFFSETS, "rows of each group, plain and padded", G="fc1.num_groups"),
        bind(catalog.SM90_MXFP8_QUANTIZE, "fc1 input, in both orientations", K=k1, **dtype),
        *(_weights(catalog.SM90_MXFP8_QUANTIZE_WEIGHT, label) for label in ("fc1", "fc2")),
        bind(
            catalog.SM90_MXFP8_GROUPED_GEMM_ACT,
            "fc1, act and quantise forward",
            K=k1,
            N=n1,
            glu_interleave="act.glu_interleave",
            **activation,
            **dtype,
        ),
        bind(catalog.SM90_GROUPED_GEMM, "fc2 forward", K=k2, N=n2, **dtype),
        bind(catalog.SM90_MXFP8_QUANTIZE, "output gradient, in both orientations", K=n2, **dtype),
        bind(catalog.SM90_GROUPED_DBIAS, "fc2 bias gradient", when="fc2.has_bias", N=n2, **dtype),
        bind(catalog.SM90_GROUPED_DSCALE, "fc2 scale gradient", when="fc2.scale_bias", N=n2, **dtype),
        bind(
            catalog.SM90_MXFP8_GROUPED_GEMM_DACT,
            "fc2 input gradient, act backward and quantise",
            H=n2,
            **activation,
            **dtype,
        ),
        bind(catalog.SM90_GROUPED_WGRAD, "fc2 weight gradient", K=k2, N=n2, **dtype),
        bind(catalog.SM90_MXFP8_DEQUANTIZE, "fc1 input, for its weight gradient", K=k1),
        bind(catalog.SM90_GROUPED_WGRAD, "fc1 weight gradient", K=k1, N=n1, **dtype),
        bind(catalog.SM90_GROUPED_GEMM_DGRAD, "fc1 input gradient", K=k1, N=n1, **dtype),
    )


MXFP8_MLP_KERNELS = _mxfp8_mlp()


def _mxfp8_linear() -> tuple[Bound, ...]:
    """A linear alone, likewise."""
    k, n, dtype = "fc.in_features", "fc.out_features", {"dtype": "fc.compute_dtype"}
    return (
        bind(catalog.SM90_PADDED_GROUP_OFFSETS, "rows of each group, plain and padded", G="fc.num_groups"),
        bind(catalog.SM90_MXFP8_QUANTIZE, "fc input, in both orientations", K=k, **dtype),
        _weights(catalog.SM90_MXFP8_QUANTIZE_WEIGHT, "fc"),
        bind(catalog.SM90_GROUPED_GEMM, "fc forward", K=k, N=n, **dtype),
        bind(catalog.SM90_MXFP8_QUANTIZE, "output gradient, in both orientations", K=n, **dtype),
        bind(catalog.SM90_GROUPED_DBIAS, "fc bias gradient", when="fc.has_bias", N=n, **dtype),
        bind(catalog.SM90_GROUPED_DSCALE, "fc scale gradient", when="fc.scale_bias", N=n, **dtype),
        bind(catalog.SM90_MXFP8_DEQUANTIZE, "fc input, for its weight gradient", K=k),
        bind(catalog.SM90_GROUPED_WGRAD, "fc weight gradient", K=k, N=n, **dtype),
        bind(catalog.SM90_GROUPED_GEMM_DGRAD, "fc input gradient", K=k, N=n, **dtype),
    )


MXFP8_LINEAR_KERNELS = _mxfp8_linear()


def _nvfp4_quantize(what: str, **k_and_dtype: str) -> Bound:
    return bind(catalog.SM90_NVFP4_QUANTIZE, f"{what}, in both orientations", **k_and_dtype)


def _nvfp4_operand(what: str, **k_and_dtype: str) -> tuple[Bound, ...]:
    """Of one whose largest magnitudes no product has left."""
    largest = bind(catalog.SM90_NVFP4_AMAX, f"largest magnitudes of the {what}", **k_and_dtype)
    return largest, _nvfp4_quantize(what, **k_and_dtype)


def _nvfp4_linear(label: str) -> tuple[Bound, ...]:
    """What a linear's weights and its own gradients need, its BF16 operands holding elements times scales."""
    k, n, dtype = f"{label}.in_features", f"{label}.out_features", {"dtype": f"{label}.compute_dtype"}
    return (
        _weights(catalog.SM90_NVFP4_QUANTIZE_WEIGHT, label),
        bind(catalog.SM90_GROUPED_DBIAS, f"{label} bias gradient", when=f"{label}.has_bias", N=n, **dtype),
        bind(catalog.SM90_GROUPED_DSCALE, f"{label} scale gradient", when=f"{label}.scale_bias", N=n, **dtype),
        bind(catalog.SM90_NVFP4_DEQUANTIZE, f"{label} input, for its weight gradient", K=k),
        bind(catalog.SM90_NVFP4_GROUPED_WGRAD, f"{label} weight gradient", K=k, N=n, **dtype),
    )


def _nvfp4_one() -> tuple[Bound, ...]:
    k, n, dtype = "fc.in_features", "fc.out_features", {"dtype": "fc.compute_dtype"}
    return (
        bind(catalog.SM90_PADDED_GROUP_OFFSETS, "rows of each group, plain and padded", G="fc.num_groups"),
        *_nvfp4_operand("fc input", K=k, **dtype),
        bind(catalog.SM90_NVFP4_GROUPED_GEMM, "fc forward", K=k, N=n, **dtype),
        *_nvfp4_operand("output gradient", K=n, **dtype),
        *_nvfp4_linear("fc"),
        bind(catalog.SM90_NVFP4_GROUPED_GEMM_DGRAD, "fc input gradient", K=k, N=n, **dtype),
    )


NVFP4_LINEAR_KERNELS = _nvfp4_one()


def _nvfp4_mlp() -> tuple[Bound, ...]:
    (k1, n1), (k2, n2) = ((f"{label}.in_features", f"{label}.out_features") for label in ("fc1", "fc2"))
    dtype, activation = {"dtype": "fc1.compute_dtype"}, {"I": k2, "activation": "act.kind"}
    block = {"glu_interleave": "act.glu_interleave"}
    return (
        bind(catalog.SM90_PADDED_GROUP_OFFSETS, "rows of each group, plain and padded", G="fc1.num_groups"),
        *_nvfp4_operand("fc1 input", K=k1, **dtype),
        bind(catalog.SM90_NVFP4_GROUPED_GEMM_ACT, "fc1 and act forward", K=k1, N=n1, **block, **activation, **dtype),
        _nvfp4_quantize("activation", K=k2, **dtype),
        bind(catalog.SM90_NVFP4_GROUPED_GEMM, "fc2 forward", K=k2, N=n2, **dtype),
        *_nvfp4_operand("output gradient", K=n2, **dtype),
        *_nvfp4_linear("fc2"),
        bind(catalog.SM90_NVFP4_GROUPED_GEMM_DACT, "fc2 input gradient and act backward", H=n2, **activation, **dtype),
        _nvfp4_quantize("gradient of the pre-activation", K=n1, **dtype),
        *_nvfp4_linear("fc1"),
        bind(catalog.SM90_NVFP4_GROUPED_GEMM_DGRAD, "fc1 input gradient", K=k1, N=n1, **dtype),
    )


NVFP4_MLP_KERNELS = _nvfp4_mlp()
