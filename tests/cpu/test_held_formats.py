"""Weights that are held in one format, under recipes of any: products take them as they are, fused or not."""

from __future__ import annotations

import re

import pytest
import torch
from torch.nn import Parameter

import fusible_ops as ops
from cute_kernels.quantization.formats import Format, fp8_block, mxfp8, nvfp4
from fusible_ops import picture
from fusible_ops.quantized_tensor import quantized
from tests.cases import EVEN
from tests.compare import assert_bitwise_equal, relative_error
from tests.models import MLP, Inputs, as_if_on, step

BF16 = torch.bfloat16
HELD: dict[str, ops.Recipe] = {
    "blocks": ops.Float8BlockScaling(),
    "f32_blocks": ops.Float8BlockScaling(use_f32_scales=True),
    "current": ops.Float8CurrentScaling(),
    "mxfp8": ops.MXFP8BlockScaling(),
    "mxfp8_square": ops.MXFP8BlockScaling(enable_2d_quantization=True),
    "nvfp4": ops.NVFP4BlockScaling(),
    "nvfp4_lines": ops.NVFP4BlockScaling(disable_2d_quantization=True),
}
RECIPES: dict[str, ops.Recipe] = {
    "fp8": ops.Float8BlockScaling(),
    "current": ops.Float8CurrentScaling(),
    "mxfp8": ops.MXFP8BlockScaling(),
    "nvfp4": ops.NVFP4BlockScaling(disable_stochastic_rounding=True),
}
FAMILIES = {
    "fp8": ("blocks", "f32_blocks"),
    "mxfp8": ("mxfp8", "mxfp8_square"),
    "nvfp4": ("nvfp4", "nvfp4_lines"),
    "current": (),
}
"""What kernels of each recipe's own format read."""
FUSED = {"sm_90a": ("fp8", "mxfp8", "nvfp4"), "sm_100a": ("mxfp8", "nvfp4")}
NEAR_Y, NEAR = 0.04, {"fp8": 0.03, "mxfp8": 0.03, "nvfp4": 0.1}
"""Values are rounded to BF16 where their scales are no powers of two, which tips what is quantised after them; weights
that were quantised anew are 0.06 off in y.
"""


def build(arch: str, held: ops.Recipe) -> tuple[MLP, ops.Sequential, Inputs]:
    torch.manual_seed(0)
    mlp = MLP(hidden=160, intermediate=128, bias=True, interleave=32 if arch == "sm_100a" else None)
    with ops.quantized_model_init(recipe=held):
        model = mlp.build(EVEN, "cpu", BF16)
    return mlp, model, Inputs.random(EVEN, mlp.hidden, "cpu", BF16)


@pytest.mark.parametrize("arch", FUSED)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("held", HELD)
def test_every_format_under_every_recipe(arch: str, held: str, recipe: str) -> None:
    """Hopper's MXFP8 and NVFP4 take any, in BF16; kernels that read one format take that, else `explain` says so. What
    Blackwell's make of weights of their own, test_padded_mlp_scaled.py asks.
    """
    mlp, model, inputs = build(arch, HELD[held])
    takes = arch == "sm_90a" and recipe in ("mxfp8", "nvfp4")
    fuses = recipe in FUSED[arch] and (takes or held in FAMILIES[recipe])
    format = HELD[held].operand_format("weight")
    with ops.autocast(recipe=RECIPES[recipe]):
        want = step(ops.Sequential(dict(model.named_children()), rules=()), mlp, inputs)
        with as_if_on(arch):
            got = step(model, mlp, inputs)
    told = model.explain(target=arch, recipe=RECIPES[recipe])
    refused = f"fc1 holds its weights in {format}, needs "
    assert ("unfused" not in told) == fuses, told
    assert "quantize_weight" not in told  # nor does a kernel quantise them
    if recipe in FUSED[arch]:
        assert (refused in told) == (not fuses), told
    assert got.keys() == want.keys()
    for name, t in want.items():
        if name != "y" and fuses and arch == "sm_100a":
            continue
        error = relative_error(got[name].float(), t.float())
        assert error <= (0 if not fuses else NEAR_Y if name == "y" else NEAR[recipe]), f"{name}: {error:.4f}"


def test_explain_names_what_kernels_read() -> None:
    _, model, _ = build("sm_90a", HELD["mxfp8"])
    formats = " or ".join(str(fp8_block(dims=2, force_pow_2_scales=powers)) for powers in (True, False))
    told = model.explain(target="sm_90a", recipe=RECIPES["fp8"])
    assert f"fc1 holds its weights in MXFP8 E4M3 1x32, needs {formats} or high precision" in told
    assert f"fc2 holds its weights in MXFP8 E4M3 1x32, needs {formats} or high precision" in told


@pytest.mark.parametrize("arch", FUSED)
def test_explain_says_that_a_mix_raises(arch: str) -> None:
    """As the call says it, by the same check; so do its data and the page."""
    mlp, model, inputs = build(arch, HELD["mxfp8"])
    recipe = RECIPES["mxfp8"]
    assert "raises" not in model.explain(target=arch, recipe=recipe)
    assert model.explain(target=arch, recipe=recipe, as_data=True)[0]["raises"] == []
    model[2].weight1 = Parameter(model[2].weight1.dequantize(BF16))
    with ops.autocast(recipe=recipe), as_if_on(arch), pytest.raises(RuntimeError) as raised:
        step(model, mlp, inputs)
    assert "fc2: weight 1 is in high precision, weight 0 is MXFP8 E4M3 1x32" in str(raised.value)
    for asked in (recipe, None, "auto"):
        (told,) = model.explain(target=arch, recipe=asked, as_data=True)
        assert told["raises"] == [f"any call: {raised.value}"]
        assert model.explain(target=arch, recipe=asked).startswith(f"raises in any call: {raised.value}\n")
    (pictured,) = picture.as_data(model, target=arch, recipe=recipe)
    assert pictured["raises"] == told["raises"]
    assert f"raises in any call: {raised.value}" in picture.picture(model, target=arch, recipe=recipe)


@pytest.mark.parametrize("assigned", ["parameter", "data"])
@pytest.mark.parametrize("other", [nvfp4(2), mxfp8(dims=2)], ids=str)
def test_a_format_that_changes_between_calls(assigned: str, other: Format) -> None:
    """The next call is planned anew: nothing else tells the two apart, all addresses are the same."""
    mlp, model, inputs = build("sm_100a", HELD["mxfp8"])
    recipe = RECIPES["mxfp8"]
    with ops.autocast(recipe=recipe):
        with as_if_on("sm_100a"):
            for _ in range(3):
                step(model, mlp, inputs)
        for op in (model[0], model[2]):
            for g in range(EVEN.groups):
                weight = getattr(op, f"weight{g}")
                held = quantized(weight.dequantize(BF16), other)
                if assigned == "data":
                    weight.data = held
                else:
                    setattr(op, f"weight{g}", Parameter(held))
        want = step(ops.Sequential(dict(model.named_children()), rules=()), mlp, inputs)
        with as_if_on("sm_100a"):
            got = step(model, mlp, inputs)
    if other == nvfp4(2):
        for name, t in want.items():
            assert_bitwise_equal(got[name], t, name)
    assert relative_error(got["y"].float(), want["y"].float()) <= NEAR_Y
    assert re.search("MXFP8 E4M3 32x32" if other == mxfp8(dims=2) else "NVFP4 16x16", model[0].weight0.title)
