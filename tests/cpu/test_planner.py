"""Which rule takes which ops, and what was refused on the way."""

from __future__ import annotations

import copy
import json
import pickle
from dataclasses import dataclass, replace

import pytest

from cute_kernels.catalog import ACTIVATIONS, GLU_ACTIVATIONS, SM90_ACTIVATIONS
from cute_kernels.target import Target
from patterns import RULES, Chain, FrozenFacts, Match, OpSpec, Plan, RecipeSpec, Rule, plan, slot
from patterns.examples import FFN, MOE, MOE_LINEAR, MOE_MXFP8, QUANTIZE, activation, grouped_linear, linear
from patterns.guards import Guard, absent

H200 = Target.named("sm_90a")
DROPOUT = OpSpec("dropout", "drop")


def taken(result: Plan) -> list[tuple[str | None, int, int]]:
    return [(step.rule and step.rule.name, step.start, step.stop) for step in result.steps]


def mlp(kind: str, make=grouped_linear, **act: object) -> Chain:
    halves = 2 if kind in GLU_ACTIVATIONS else 1
    return Chain((make("fc1", 64, halves * 96), activation(kind, **act), make("fc2", 96, 64)), "bfloat16")


def reasons(result: Plan, rule: str, start: int = 0) -> list[str]:
    (refused,) = [refused for refused in result.refusals if (refused.rule, refused.start) == (rule, start)]
    return [str(reason) for reason in refused.reasons]


# ----------------------------------------------------------------------------------------------------------------------
# What fuses


@pytest.mark.parametrize("kind", SM90_ACTIVATIONS)
@pytest.mark.parametrize("scaled", [False, True])
def test_every_activation_fuses_between_grouped_linears(kind: str, scaled: bool) -> None:
    assert taken(plan(mlp(kind, scaled=scaled), H200)) == [("grouped_mlp", 0, 3)]


@pytest.mark.parametrize("kind", SM90_ACTIVATIONS)
def test_linear_activation_linear_is_a_dense_pattern(kind: str) -> None:
    result = plan(mlp(kind, make=linear), H200)
    assert taken(result) == [("mlp", 0, 3)]
    names = {bound.kernel.name for bound in result.steps[0].kernels}
    assert "grouped_dbias" in names and "grouped_dscale" not in names


def test_of_multiples_of_one_width_the_largest_is_said() -> None:
    """Kernels of one rule want multiples of 8 and of 32; of other widths each says what it wants."""
    chain = replace(
        MOE_MXFP8, ops=(grouped_linear("fc1", 12, 192), activation("swiglu"), grouped_linear("fc2", 96, 68))
    )
    assert reasons(plan(chain, H200), "grouped_mlp_mxfp8") == [
        f"{width}, needs a multiple of 32; pad the layer's features"
        for width in ("fc1.in_features is 12", "fc2.out_features is 68")
    ]
    (rule,) = [rule for rule in RULES if rule.name == "grouped_mlp_mxfp8"]
    match = rule.match(chain, 0)
    assert isinstance(match, Match)
    every = [refusal.multiple for refusal in rule.unmet(match.facts(), H200, match.words())]
    assert sorted(every) == [8, 8, 32, 32]


@pytest.mark.parametrize("kind", sorted({*ACTIVATIONS} - {*SM90_ACTIVATIONS}))
def test_an_activation_without_a_kernel_is_refused_in_words(kind: str) -> None:
    result = plan(mlp(kind), H200)
    assert taken(result) == [("grouped_linear", 0, 1), (None, 1, 2), ("grouped_linear", 2, 3)]
    assert reasons(result, "grouped_mlp") == [f"act.kind is {kind}, needs {' or '.join(SM90_ACTIVATIONS)}"]


@pytest.mark.parametrize("size", [0, 1, 2, 4, 8, 16, 32])
def test_interleaves_that_divide_fuse(size: int) -> None:
    assert plan(mlp("swiglu", glu_interleave=size), H200).is_fused


@pytest.mark.parametrize("limit", [None, 7.0])
def test_clamped_swiglu_fuses_with_all_its_constants(limit: float | None) -> None:
    assert plan(mlp("clamped_swiglu", limit=limit, alpha=1.702, offset=1.0), H200).is_fused


@pytest.mark.parametrize(
    ("ops", "rules"),
    [
        (MOE.ops[:2], [("grouped_linear_activation", 0, 2)]),
        ((*MOE.ops[:2], QUANTIZE), [("grouped_linear_activation", 0, 3)]),
        ((MOE.ops[0], QUANTIZE), [("grouped_linear_quantize", 0, 2)]),
        ((MOE.ops[0],), [("grouped_linear", 0, 1)]),
        (FFN.ops[:2], [("linear_activation", 0, 2)]),
        ((FFN.ops[0], QUANTIZE), [("linear_quantize", 0, 2)]),
        ((FFN.ops[0],), [("linear", 0, 1)]),
        ((*MOE.ops, *FFN.ops), [("grouped_mlp", 0, 3), ("mlp", 3, 6)]),
        ((MOE.ops[0], DROPOUT, MOE.ops[2]), [("grouped_linear", 0, 1), (None, 1, 2), ("grouped_linear", 2, 3)]),
        ((MOE.ops[1], MOE.ops[2]), [(None, 0, 1), ("grouped_linear", 1, 2)]),
        ((MOE.ops[0], MOE.ops[1], FFN.ops[2]), [("grouped_linear_activation", 0, 2), ("linear", 2, 3)]),
        ((), []),
    ],
)
def test_longest_first_and_matched_ops_are_consumed(ops: tuple[OpSpec, ...], rules: list) -> None:
    assert taken(plan(Chain(ops, "bfloat16"), H200)) == rules


def test_quantize_between_activation_and_second_linear_is_taken_with_the_first() -> None:
    ops = (*MOE.ops[:2], QUANTIZE, MOE.ops[2])
    assert taken(plan(Chain(ops, "bfloat16"), H200)) == [("grouped_linear_activation", 0, 3), ("grouped_linear", 3, 4)]


# ----------------------------------------------------------------------------------------------------------------------
# What does not, and why


def test_groups_that_differ() -> None:
    chain = Chain((MOE.ops[0], MOE.ops[1], grouped_linear("fc2", 2816, 1024, num_groups=4)), "bfloat16")
    result = plan(chain, H200)
    assert reasons(result, "grouped_mlp") == ["fc1.num_groups is 8, needs 4 (fc2.num_groups)"]
    assert taken(result) == [("grouped_linear_activation", 0, 2), ("grouped_linear", 2, 3)]


@pytest.mark.parametrize("start", [0, 1])
def test_recipe_and_position(start: int) -> None:
    ops = (OpSpec("identity", "i"),) * start + MOE.ops
    result = plan(Chain(ops, "bfloat16", RecipeSpec("DelayedScaling")), H200)
    assert not any(step.rule for step in result.steps)
    assert reasons(result, "grouped_mlp", start) == ["the recipe is DelayedScaling, needs no quantisation recipe"]


def test_cached_quantised_input() -> None:
    result = plan(mlp("swiglu", cache_quantized_input=True), H200)
    wanted = "act.cache_quantized_input is True, needs an activation that does not cache a quantised input"
    assert reasons(result, "grouped_mlp") == reasons(result, "grouped_linear_activation") == [wanted]


def test_scaled_fc1_bias() -> None:
    chain = Chain((grouped_linear("fc1", 64, 128, scale_bias=True), *mlp("swiglu").ops[1:]), "bfloat16")
    result = plan(replace(chain, ops=(chain.ops[0], chain.ops[1], grouped_linear("fc2", 64, 64))), H200)
    assert reasons(result, "grouped_mlp") == ["fc1.scale_bias is True, needs an FC1 bias that is not scaled"]
    assert taken(result)[0] == ("grouped_linear", 0, 1)


@pytest.mark.parametrize(
    ("constants", "found"),
    [
        ({"limit": -1.0}, "act has limit=-1.0, alpha=1.0, offset=0.0"),
        ({"limit": 7.0, "alpha": float("inf")}, "act has limit=7.0, alpha=inf, offset=0.0"),
        ({"limit": 7.0, "offset": None}, "act has limit=7.0, alpha=1.0, offset=None"),
    ],
)
def test_clamp_that_lacks_a_constant_is_declined(constants: dict[str, object], found: str) -> None:
    wanted = "a limit that is None or positive, and finite alpha and offset"
    assert reasons(plan(mlp("clamped_swiglu", **constants), H200), "grouped_mlp") == [f"{found}, needs {wanted}"]


def test_dtype_of_the_weights_and_under_autocast() -> None:
    fp32 = Chain(tuple(OpSpec(op.kind, op.name, {**op.facts, "dtype": "float32"}) for op in MOE.ops), "bfloat16")
    text = "fc1.compute_dtype is float32, needs bfloat16 or float16"
    assert reasons(plan(fp32, H200), "grouped_mlp")[0] == text
    assert taken(plan(replace(fp32, autocast=True), H200)) == [("grouped_mlp", 0, 3)]
    assert not plan(replace(MOE, dtype="float32", autocast=True), H200).is_fused
    mixed = Chain((*MOE.ops[:2], grouped_linear("fc2", 2816, 1024, dtype="float16")), "bfloat16")
    text = "fc1.compute_dtype is bfloat16, needs float16 (fc2.compute_dtype)"
    assert reasons(plan(mixed, H200), "grouped_mlp") == [text]
    assert taken(plan(mixed, H200)) == [("grouped_linear_activation", 0, 2), ("grouped_linear", 2, 3)]


def test_ops_known_by_index_are_named_by_index() -> None:
    ops = tuple(replace(op, name=str(i)) for i, op in enumerate(mlp("swiglu", glu_interleave=64).ops))
    assert reasons(plan(Chain(ops, "bfloat16"), H200), "grouped_mlp") == [
        "[1].glu_interleave_size is 64, needs a divisor of [2].in_features (96)"
    ]


def test_glu_of_an_odd_width() -> None:
    chain = Chain((grouped_linear("fc1", 64, 129), activation("swiglu")), "bfloat16")
    assert "fc1.out_features is 129, needs an even number: swiglu takes gate and up" in reasons(
        plan(chain, H200), "grouped_linear_activation"
    )


def test_a_fact_left_out_is_refused_not_assumed() -> None:
    facts = {name: value for name, value in MOE.ops[0].facts.items() if name != "in_features"}
    result = plan(Chain((OpSpec("grouped_linear", "fc1", facts),), "bfloat16"), H200)
    (first, *_) = reasons(result, "grouped_linear")
    assert first == "fc.in_features is not stated, needs K is a multiple of 8; pad the layer's features"


def test_chain_refusals_name_position_and_both_kinds() -> None:
    result = plan(MOE, Target.named("sm_80"))
    assert reasons(result, "mlp") == ["wants Linear at position 0; found GroupedLinear fc1"]
    assert reasons(result, "grouped_linear_quantize") == ["wants Quantize at position 1; found ScaledSwiGLU act"]
    shorter = plan(Chain(MOE.ops[:2], "bfloat16"), H200)
    assert reasons(shorter, "grouped_mlp") == ["wants GroupedLinear at position 2; found the end of the chain"]


# ----------------------------------------------------------------------------------------------------------------------
# Plans as values


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("arch", ["cpu", "sm_80", "sm_90a", "sm_100a"])
def test_same_chain_and_target_give_the_same_plan(rule: Rule, arch: str) -> None:
    chain = rule.example
    again = Chain(
        tuple(OpSpec(op.kind, op.name, dict(sorted(op.facts.items(), reverse=True))) for op in chain.ops),
        chain.dtype,
        chain.recipe and RecipeSpec(chain.recipe.name, dict(sorted(chain.recipe.facts.items(), reverse=True))),
    )
    assert again == chain and hash(again) == hash(chain)
    assert plan(again, Target.named(arch)) is plan(chain, Target.named(arch))


def test_facts_are_values() -> None:
    facts = FrozenFacts({"a": 1, "b": None})
    assert facts == FrozenFacts(b=None, a=1) and hash(facts) == hash(FrozenFacts(b=None, a=1))
    assert pickle.loads(pickle.dumps(MOE)) == copy.deepcopy(MOE) == MOE
    with pytest.raises(TypeError, match="fact a is a list, needs a value that hashes"):
        OpSpec("kind", "name", {"a": []})
    with pytest.raises(TypeError, match="a chain holds OpSpec; found str"):
        Chain(("swiglu",), "bfloat16")  # type: ignore[arg-type]


@pytest.mark.parametrize("target", [H200, Target.named("sm_100a")], ids=str)
def test_as_data_is_json_and_says_what_the_plan_says(target: Target) -> None:
    result = plan(MOE, target)
    data = json.loads(json.dumps(result.as_data()))
    assert data["target"] == target.arch and data["dtype"] == "bfloat16" and data["recipe"] is None
    assert [(step["rule"], step["start"], step["stop"]) for step in data["steps"]] == taken(result)
    assert [op["name"] for op in data["chain"]] == ["fc1", "act", "fc2"]
    texts = [reason["text"] for refused in data["refusals"] for reason in refused["reasons"]]
    assert texts == [str(reason) for refused in result.refusals for reason in refused.reasons]


def test_why_not_puts_the_nearest_miss_first() -> None:
    result = plan(MOE, Target.named("sm_100a"))
    misses = result.why_not(0, 3)
    assert [refused.rule for refused in misses[:2]] == ["grouped_mlp_sm100", "grouped_mlp"]
    assert {refused.rule for refused in misses} == {rule.name for rule in RULES}
    assert result.first_unmet() is misses[0].first
    assert plan(MOE, H200).first_unmet() is None


# ----------------------------------------------------------------------------------------------------------------------
# A third party's kind, guard and rule


@dataclass(frozen=True)
class Ragged(Guard):
    """A guard of somebody else's: the router's top-k is 1 or 2."""

    def letters(self) -> tuple[str, ...]:
        return ("router.top_k",)

    def holds(self, facts) -> bool:
        return facts["router.top_k"] in (1, 2)

    def wanted(self, facts, words) -> str:
        return "1 or 2"

    def counterexample(self) -> dict[str, object]:
        return {"router.top_k": 3}


def test_a_third_party_adds_a_kind_and_a_rule() -> None:
    router = OpSpec("their_router", "router", {"top_k": 2})
    chain = Chain((router, *MOE.ops), "bfloat16")
    rule = Rule(
        name="their_moe",
        pattern=(slot("router", "their_router"), *RULES[0].pattern),
        guards=(Ragged(), absent("recipe", "no recipe")),
        program="theirs.moe:FusedMoE",
        kernels=(),
        example=chain,
    )
    assert taken(plan(chain, H200)) == [(None, 0, 1), ("grouped_mlp", 1, 4)]
    result = plan(chain, Target.named("cpu"), (rule, *RULES))
    assert taken(result) == [("their_moe", 0, 4)] and result.steps[0].program == "theirs.moe:FusedMoE"
    other = Chain((OpSpec("their_router", "router", {"top_k": 3}), *MOE.ops), "bfloat16")
    assert reasons(plan(other, H200, (rule, *RULES)), "their_moe") == ["router.top_k is 3, needs 1 or 2"]


def test_no_rules_fuse_nothing() -> None:
    result = plan(MOE_LINEAR, H200, ())
    assert taken(result) == [(None, 0, 1)] and result.refusals == () and result.first_unmet() is None
    assert [op.name for op in result.unfused] == ["fc1"]
