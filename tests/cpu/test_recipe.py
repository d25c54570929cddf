"""Recipes: Transformer Engine's fields and defaults, the format of each operand, and what is refused."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest

from cute_kernels.quantization.formats import E4M3, E5M2, fp8_block, fp8_tensor, mxfp8, nvfp4
from fusible_ops.recipe import (
    ROLES,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MMParams,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)

FAST, SPLIT = MMParams(False), MMParams(True)


@pytest.mark.parametrize(
    ("recipe", "fields"),
    [
        (
            DelayedScaling(),
            {
                "margin": 0,
                "fp8_format": Format.HYBRID,
                "amax_history_len": 1024,
                "amax_compute_algo": "max",
                "scaling_factor_compute_algo": None,
                "reduce_amax": True,
            },
        ),
        (
            Float8CurrentScaling(),
            {
                "use_power_2_scales": False,
                "fp8_format": Format.HYBRID,
                "fp8_gemm_fprop": FAST,
                "fp8_gemm_dgrad": SPLIT,
                "fp8_gemm_wgrad": SPLIT,
            },
        ),
        (
            Float8BlockScaling(),
            {
                "use_f32_scales": False,
                "fp8_format": Format.E4M3,
                "x_block_scaling_dim": 1,
                "w_block_scaling_dim": 2,
                "grad_block_scaling_dim": 1,
                "fp8_gemm_fprop": SPLIT,
                "fp8_gemm_dgrad": SPLIT,
                "fp8_gemm_wgrad": SPLIT,
                "preactivation": "high_precision",
            },
        ),
        (
            MXFP8BlockScaling(),
            {
                "margin": 0,
                "fp8_format": Format.E4M3,
                "enable_2d_quantization": False,
                "preactivation": "high_precision",
            },
        ),
        (
            NVFP4BlockScaling(),
            {
                "disable_rht": False,
                "disable_stochastic_rounding": False,
                "disable_2d_quantization": False,
                "row_scaled_activation": False,
                "nvfp4_4over6": "none",
                "nvfp4_4over6_e4m3_use_256": "all",
                "nvfp4_4over6_err_mode": "MAE",
                "fp4_format": Format.E2M1,
                "fp8_format": Format.E4M3,
            },
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_fields_and_defaults(recipe: Recipe, fields: dict) -> None:
    common = {"fp8_dpa": False, "fp8_mha": False, "backward_override": None}
    assert {f.name: getattr(recipe, f.name) for f in dataclasses.fields(recipe)} == fields | common


@pytest.mark.parametrize(
    ("recipe", "formats"),
    [
        (DelayedScaling(), (fp8_tensor(), fp8_tensor(), fp8_tensor(E5M2))),
        (Float8CurrentScaling(fp8_format=Format.E4M3), (fp8_tensor(),) * 3),
        (Float8CurrentScaling(use_power_2_scales=True), (*[fp8_tensor(E4M3, True)] * 2, fp8_tensor(E5M2, True))),
        (Float8BlockScaling(), (fp8_block(), fp8_block(dims=2), fp8_block())),
        (Float8BlockScaling(use_f32_scales=True), [fp8_block(E4M3, dims, False) for dims in (1, 2, 1)]),
        (Float8BlockScaling(fp8_format=Format.HYBRID), (fp8_block(), fp8_block(dims=2), fp8_block(E5M2))),
        (Float8BlockScaling(w_block_scaling_dim=1), (fp8_block(),) * 3),
        (
            Float8BlockScaling(x_block_scaling_dim=2, w_block_scaling_dim=1),
            (fp8_block(dims=2), fp8_block(), fp8_block()),
        ),
        (MXFP8BlockScaling(), (mxfp8(), mxfp8(), mxfp8())),
        (MXFP8BlockScaling(enable_2d_quantization=True), (mxfp8(), mxfp8(dims=2), mxfp8())),
        (MXFP8BlockScaling(fp8_format=Format.HYBRID), (mxfp8(), mxfp8(), mxfp8(E5M2))),
        (NVFP4BlockScaling(), (nvfp4(hadamard=True), nvfp4(2), nvfp4(hadamard=True, stochastic=True))),
        (NVFP4BlockScaling(disable_rht=True), (nvfp4(), nvfp4(2), nvfp4(stochastic=True))),
        (NVFP4BlockScaling(disable_stochastic_rounding=True), (nvfp4(hadamard=True), nvfp4(2), nvfp4(hadamard=True))),
        (
            NVFP4BlockScaling(disable_2d_quantization=True),
            (nvfp4(hadamard=True), nvfp4(), nvfp4(hadamard=True, stochastic=True)),
        ),
    ],
    ids=str,
)
def test_format_of_each_operand(recipe: Recipe, formats: tuple) -> None:
    assert [recipe.operand_format(role) for role in ROLES] == list(formats)


@pytest.mark.parametrize(
    ("make", "format"),
    [
        (Float8BlockScaling, fp8_block()),
        (
            lambda **how: Float8BlockScaling(use_f32_scales=True, fp8_format=Format.HYBRID, **how),
            fp8_block(E4M3, 1, False),
        ),
        (lambda **how: Float8BlockScaling(grad_block_scaling_dim=2, w_block_scaling_dim=1, **how), fp8_block()),
        (lambda **how: MXFP8BlockScaling(enable_2d_quantization=True, **how), mxfp8()),
    ],
)
def test_format_of_a_kept_pre_activation(make, format) -> None:
    recipe = make(preactivation="quantized")
    assert recipe.preactivation_format == recipe.describe().facts["preactivation"] == format
    assert make().preactivation_format is None and make() != recipe and hash(make()) != hash(recipe)
    again = pickle.loads(pickle.dumps(recipe))
    assert again == recipe and again.preactivation_format == format


@pytest.mark.parametrize("make", [DelayedScaling, Float8CurrentScaling, NVFP4BlockScaling])
def test_other_recipes_keep_no_quantised_pre_activation(make) -> None:
    with pytest.raises(TypeError, match="preactivation"):
        make(preactivation="quantized")
    assert make().preactivation_format is None


def test_largest_elements() -> None:
    largest = {f.name: (f.value.max_fwd, f.value.max_bwd) for f in Format}
    assert largest == {"E2M1": (6, 6), "E4M3": (448, 448), "E5M2": (57344, 57344), "HYBRID": (448, 57344)}


def test_recipes_are_data() -> None:
    """Equal ones are one key; copies and pickles are equal; none can be changed."""
    for make in (DelayedScaling, Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling):
        assert make() == make() and hash(make()) == hash(make())
        assert pickle.loads(pickle.dumps(make())) == copy.deepcopy(make()) == make()
        with pytest.raises(dataclasses.FrozenInstanceError):
            make().fp8_format = Format.E4M3
    assert Float8CurrentScaling() != Float8CurrentScaling(use_power_2_scales=True)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Float8BlockScaling(fp8_format=Format.E5M2),
            "fp8_format is Format.E5M2, needs Format.E4M3 or Format.HY",
        ),
        (lambda: DelayedScaling(fp8_format="E4M3"), "fp8_format is 'E4M3', needs Format.E4M3"),
        (lambda: DelayedScaling(backward_override="dequantized"), "backward_override is 'dequantized', needs None"),
        (lambda: DelayedScaling(amax_history_len=0), "amax_history_len is 0, needs an int of at least 1"),
        (lambda: DelayedScaling(amax_history_len=True), "amax_history_len is True, needs an int of at least 1"),
        (lambda: DelayedScaling(amax_history_len=1.5), "amax_history_len is 1.5, needs an int of at least 1"),
        (lambda: DelayedScaling(margin="a"), "margin is 'a', needs a number from -127 to 127"),
        (lambda: DelayedScaling(margin=None), "margin is None, needs a number from -127 to 127"),
        (lambda: DelayedScaling(margin=True), "margin is True, needs a number from -127 to 127"),
        (lambda: DelayedScaling(margin=float("nan")), "margin is nan, needs a number from -127 to 127"),
        (lambda: DelayedScaling(margin=2000), "margin is 2000, needs a number from -127"),
        (lambda: DelayedScaling(scaling_factor_compute_algo="x"), "compute_algo is 'x', needs None or a function"),
        (lambda: DelayedScaling(reduce_amax="no"), "reduce_amax is 'no', needs a bool"),
        (lambda: DelayedScaling(backward_override=[]), "backward_override is \\[\\], needs None"),
        (lambda: Float8CurrentScaling(use_power_2_scales=[]), "use_power_2_scales is \\[\\], needs a bool"),
        (lambda: Float8CurrentScaling(fp8_gemm_fprop={}), "fp8_gemm_fprop is {}, needs an MMParams"),
        (lambda: Float8CurrentScaling(fp8_dpa=1), "fp8_dpa is 1, needs a bool"),
        (lambda: Float8BlockScaling(use_f32_scales="yes"), "use_f32_scales is 'yes', needs a bool"),
        (lambda: Float8BlockScaling(fp8_gemm_wgrad=None), "fp8_gemm_wgrad is None, needs an MMParams"),
        (lambda: Float8BlockScaling(x_block_scaling_dim=True), "x_block_scaling_dim is True, needs 1 .1x128. or 2"),
        (lambda: Float8BlockScaling(w_block_scaling_dim="2"), "w_block_scaling_dim is '2', needs 1 .1x128. or 2"),
        (lambda: MXFP8BlockScaling(margin=1), "margin is 1, needs 0"),
        (lambda: MXFP8BlockScaling(enable_2d_quantization=1), "enable_2d_quantization is 1, needs a bool"),
        (lambda: MXFP8BlockScaling(fp8_format=Format.E2M1), "fp8_format is Format.E2M1, needs Format.E4M3"),
        (lambda: NVFP4BlockScaling(disable_rht="no"), "disable_rht is 'no', needs a bool"),
        (lambda: NVFP4BlockScaling(fp4_format=Format.E4M3), "fp4_format is Format.E4M3, needs Format.E2M1"),
        (lambda: NVFP4BlockScaling(row_scaled_activation=True), "row_scaled_activation is True, needs False"),
        (lambda: NVFP4BlockScaling(nvfp4_4over6="all"), "nvfp4_4over6 is 'all', needs 'none'"),
        (lambda: NVFP4BlockScaling(backward_override=1), "backward_override is 1, needs None"),
        (
            lambda: MXFP8BlockScaling(preactivation="fp8"),
            "preactivation is 'fp8', needs 'high_precision' or 'quantized'",
        ),
        (
            lambda: Float8BlockScaling(preactivation="quantized", backward_override="high_precision"),
            "preactivation is 'quantized', needs 'high_precision' with backward_override='high_precision'",
        ),
        (lambda: MMParams(None), "use_split_accumulator is None, needs a bool"),
        (lambda: DelayedScaling(amax_compute_algo="mean"), "amax_compute_algo is 'mean', needs 'max', 'most_recent'"),
        (lambda: Float8CurrentScaling(backward_override="none"), "backward_override is 'none', needs None, 'high_pre"),
        (lambda: Float8BlockScaling(x_block_scaling_dim=3), "x_block_scaling_dim is 3, needs 1 .1x128. or 2 .128x128."),
        (
            lambda: Float8BlockScaling(x_block_scaling_dim=2),
            "x_block_scaling_dim = w_block_scaling_dim is 2, needs 1 in",
        ),
        (lambda: Float8BlockScaling(grad_block_scaling_dim=2), "no product takes 128x128 from both sides"),
        (lambda: Float8BlockScaling(fp8_gemm_dgrad=FAST), "fp8_gemm_dgrad is .*, needs a split accumulator"),
        (lambda: Float8BlockScaling(fp8_dpa=True), "fp8_dpa or fp8_mha is True, needs False"),
        (
            lambda: DelayedScaling().operand_format("output"),
            "role is 'output', needs one of: input, weight, grad_output",
        ),
    ],
)
def test_bad_fields_are_refused_with_words(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
