"""Where FP8 pays: the estimate, what explain says of it, and what the recipe "auto" does."""

from __future__ import annotations

import pytest
import torch

import fusible_ops as ops
from fusible_ops import fuser
from patterns.break_even import Linear, bf16_seconds, break_even, fp8_seconds, least_rows, linears_of
from patterns.examples import FFN, MOE
from tests.bench.bench_grouped_mlp import SHAPES
from tests.cases import full
from tests.compare import assert_bitwise_equal
from tests.models import MLP, Inputs, as_if_on, step

BLOCK = ops.Float8BlockScaling()
TINY = (Linear(8, 128, 128), Linear(8, 64, 128))


def mlp_of(shape: str) -> tuple[Linear, ...]:
    hidden, width, groups, _ = SHAPES[shape]
    return Linear(groups, hidden, 2 * width), Linear(groups, width, hidden)


def test_seconds_by_hand() -> None:
    """One linear 1024 x 1024, 2^20 rows: arithmetic binds in all products."""
    linear, rows = (Linear(1, 1024, 1024),), 2**20
    assert bf16_seconds(linear, rows) == pytest.approx(6 * rows * 2**20 / 700e12)
    quantise = 4 * rows * 2048 / 2.4e12
    assert fp8_seconds(linear, rows, False) == pytest.approx(18e-6 + quantise + 6 * rows * 2**20 / 960e12)
    assert fp8_seconds(linear, rows, True) - fp8_seconds(linear, rows, False) == pytest.approx(4 * 2**20 / 2.4e12)


@pytest.mark.parametrize("shape", SHAPES)
def test_from_the_break_even_on_it_is_faster(shape: str) -> None:
    linears = mlp_of(shape)
    least = least_rows(linears)
    assert least is not None
    for rows, pays in ((least, True), (4 * least, True), (least // 2, False)):
        assert (fp8_seconds(linears, rows, True) < bf16_seconds(linears, rows)) is pays
    assert least_rows(linears, updates=False) < least


def test_narrow_layers_never_pay() -> None:
    assert least_rows(TINY) is None
    assert break_even(TINY) == "never pays over bfloat16: quantising costs more than the products save"


def test_linears_of_a_chain() -> None:
    facts = [op.facts for op in (MOE.ops[0], MOE.ops[2], FFN.ops[0], FFN.ops[2])]
    sizes = [(f.get("num_groups", 1), f["in_features"], f["out_features"]) for f in facts]
    assert [*linears_of(MOE.ops), *linears_of(FFN.ops)] == sizes


def layer(shape: str, **options: object) -> ops.Sequential:
    hidden, width, groups, _ = SHAPES[shape]
    common = {"bias": False, "device": "meta", "dtype": torch.bfloat16}
    fc1 = ops.GroupedLinear(groups, hidden, 2 * width, **common)
    fc2 = ops.GroupedLinear(groups, width, hidden, **common)
    return ops.Sequential(fc1, ops.ScaledSwiGLU(), fc2, **options)


@pytest.mark.parametrize("shape", SHAPES)
def test_explain_states_it(shape: str) -> None:
    model, least = layer(shape), least_rows(mlp_of(shape))
    assert f"pays over bfloat16 from about {least:,} rows on" in model.explain("sm_90a", recipe=BLOCK)
    automatic = model.explain("sm_90a", recipe="auto")
    assert automatic.startswith(f"recipe auto: Float8BlockScaling from {least:,} rows on, none below\n")
    assert "pays over" not in model.explain("sm_90a")
    assert model.explain("sm_90a", recipe="auto", as_data=True)[0]["auto"] == {"least_rows": least}
    on_cpu = model.explain("cpu", recipe="auto")
    assert on_cpu.startswith("recipe auto: none\n") and "no recipe" in on_cpu


def test_auto_chooses_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Below the break-even the bits of BF16, from it on those of FP8 blocks."""
    monkeypatch.setattr(fuser, "least_rows", lambda linears: 40)
    mlp = MLP(hidden=64, intermediate=128)
    for rows, recipe in ((30, None), (40, BLOCK), (57, BLOCK)):
        splits = full("two", 9, rows - 9)
        model = mlp.build(splits, "cpu", torch.bfloat16, on_unfused="error")
        inputs = Inputs.random(splits, mlp.hidden, "cpu", torch.bfloat16)
        with as_if_on("sm_90a"):
            with ops.autocast(recipe="auto"):
                got = step(model, mlp, inputs)
            with ops.autocast(enabled=recipe is not None, recipe=recipe):
                want = step(model, mlp, inputs)
        for name, t in want.items():
            assert_bitwise_equal(got[name], t, name)


def test_auto_is_no_recipe_where_fp8_does_not_fuse() -> None:
    """Another activation layout, another dtype, another machine: BF16 as without a recipe."""
    for model, arch in (
        (MLP(hidden=1024, intermediate=1024, interleave=32), "sm_90a"),
        (MLP(hidden=1024, intermediate=1024), "sm_100a"),
    ):
        built = model.build(full("one", 1), "cpu", torch.bfloat16)
        assert built.explain(arch, recipe="auto").startswith("recipe auto: none\n")


def test_other_words_are_no_recipes() -> None:
    for wrong in ("Auto", "fp8"):
        with pytest.raises(TypeError, match="recipe must be a fusible_ops recipe"):
            ops.autocast(recipe=wrong)
        with pytest.raises(TypeError, match="recipe must be a fusible_ops recipe"):
            layer("qwen3_30b").explain("sm_90a", recipe=wrong)
