"""Laws that every row of the table keeps, tested for each row by itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cute_kernels.catalog import KERNELS, Kernel
from cute_kernels.limits import Limit, multiple_of
from cute_kernels.target import Target
from patterns import RULES, Bound, Chain, Match, OpSpec, Refused, Rule, bind, check_rules, plan, slot
from patterns.guards import recipe_is

IDEAL = {rule.name: Target.named(rule.kernels[0].kernel.arch) for rule in RULES}
MISSING = {rule.name for rule in RULES if any(bound.kernel.missing for bound in rule.kernels)}

GUARDS = [(rule, guard) for rule in RULES for guard in rule.guards]
LIMITS = [(rule, bound, limit) for rule in RULES for bound in rule.kernels for limit in bound.kernel.limits]
PACKAGES = sorted({(rule.name, package.name) for rule in RULES for b in rule.kernels for package in b.kernel.packages})


def matched(rule: Rule) -> Match:
    match = rule.match(rule.example, 0)
    assert isinstance(match, Match), match
    return match


def unmet(rule: Rule, changes: dict[str, object]) -> list[str]:
    """The texts of what the rule's example does not meet, with these facts replaced."""
    match = matched(rule)
    return [str(refusal) for refusal in rule.unmet(match.facts() | changes, IDEAL[rule.name], match.words())]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_example_is_matched_whole_and_by_no_earlier_row(rule: Rule) -> None:
    result = plan(rule.example, IDEAL[rule.name])
    if rule.name in MISSING:
        (refused,) = [refused for refused in result.refusals if refused.rule == rule.name and refused.start == 0]
        assert refused.stop == len(rule.example.ops)
        assert [reason.wanted for reason in refused.reasons] == ["a later version of this library"]
        return
    (step,) = result.steps
    assert (step.rule, step.start, step.stop) == (rule, 0, len(rule.example.ops))
    assert result.is_fused and step.program == rule.program


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_longer_rows_stand_first(rule: Rule) -> None:
    later = RULES[RULES.index(rule) :]
    assert all(len(rule.pattern) >= len(other.pattern) for other in later)


@pytest.mark.parametrize(("rule", "guard"), GUARDS, ids=[f"{rule.name}: {guard}" for rule, guard in GUARDS])
def test_each_guard_refuses_its_counterexample_and_says_so(rule: Rule, guard: Limit) -> None:
    changes = guard.counterexample()
    match = matched(rule)
    refusal = guard.check(match.facts() | changes, match.words(), rule.name)
    assert refusal is not None and refusal.stage in ("guard", "recipe")
    assert str(refusal) in unmet(rule, changes)
    assert str(refusal) not in unmet(rule, {})


@pytest.mark.parametrize("recipe", [None, "MXFP8BlockScaling", "Float8BlockScaling"])
def test_a_recipe_s_counterexample_is_none_of_the_recipes(recipe: str | None) -> None:
    guard = recipe_is(recipe)
    assert guard.check(guard.counterexample()) is not None


@pytest.mark.parametrize(
    ("rule", "bound", "limit"), LIMITS, ids=[f"{rule.name}, {bound.use}: {limit}" for rule, bound, limit in LIMITS]
)
def test_each_kernel_limit_refuses_its_counterexample_in_the_chain_s_words(
    rule: Rule, bound: Bound, limit: Limit
) -> None:
    fact_of = {letter: str(fact) for letter, fact in bound.letters.items()}
    changes = {fact_of[letter]: value for letter, value in limit.counterexample().items()}
    words = {letter: matched(rule).words().get(fact, fact) for letter, fact in fact_of.items()}
    text = str(limit.check(limit.counterexample(), words))
    used: dict[str, object] = {bound.when: True} if bound.when else {}
    assert text in unmet(rule, used | changes)
    assert text not in unmet(rule, used)


def test_a_kernel_that_is_not_used_refuses_nothing() -> None:
    odd = Kernel("odd", "sm_90a", "m", (multiple_of("N", 8),), ())
    rule = _rule(kernels=(bind(odd, "a's bias", when="a.has_bias", N="a.columns"),))
    facts = {"a.columns": 7}
    assert rule.unmet(facts | {"a.has_bias": False}, IDEAL["linear"], {}) == ()
    (refusal,) = rule.unmet(facts | {"a.has_bias": True}, IDEAL["linear"], {})
    assert str(refusal) == "a.columns is 7, needs a multiple of 8" and refusal.rule == "r"


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("arch", ["cpu", "sm_80", "sm_89", "sm_120a"])
def test_other_machines_are_refused_for_being_other_machines(rule: Rule, arch: str) -> None:
    (refused,) = [r for r in plan(rule.example, Target.named(arch)).refusals if r.rule == rule.name and r.start == 0]
    assert [str(reason) for reason in refused.reasons] == [
        f"needs {' or '.join(rule.kernels[0].kernel.archs)}; this is {arch}"
    ]
    assert refused.first.stage == "target"


@pytest.mark.parametrize(("name", "package"), PACKAGES)
def test_a_missing_package_is_named(name: str, package: str) -> None:
    (rule,) = [rule for rule in RULES if rule.name == name]
    ideal = IDEAL[name]
    without = replace(ideal, packages=tuple((p, None if p == package else version) for p, version in ideal.packages))
    refused = _only(plan(rule.example, without).refusals, name)
    (reason,) = [reason for reason in refused.reasons if reason.stage == "package"]
    assert package in reason.wanted and reason.found == "it is not installed"


def _only(refusals: tuple[Refused, ...], name: str) -> Refused:
    (refused,) = [refused for refused in refusals if refused.rule == name and refused.start == 0]
    return refused


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_every_kernel_is_a_row_of_the_catalogue(rule: Rule) -> None:
    assert all(bound.kernel in KERNELS.values() for bound in rule.kernels)
    assert len({bound.kernel.arch for bound in rule.kernels}) == 1


# ----------------------------------------------------------------------------------------------------------------------
# Rows and rule sets that are not legal


def test_a_pattern_begins_with_something() -> None:
    with pytest.raises(ValueError, match="rule r: a pattern begins with an element that is not optional"):
        _rule(pattern=(slot("a", "a", optional=True),))


def test_program_is_a_dotted_name_of_a_class() -> None:
    with pytest.raises(ValueError, match=r"program is 'm.C', needs 'package.module:Class'"):
        _rule(program="m.C")


def test_covers_both_passes() -> None:
    with pytest.raises(ValueError, match="covers is 'forward', needs 'forward_and_backward'"):
        _rule(covers="forward")


def test_every_letter_is_bound() -> None:
    with pytest.raises(ValueError, match=r"grouped_gemm \(fc forward\): no fact is bound to dtype, N"):
        bind(KERNELS["sm_90a/grouped_gemm"], "fc forward", K="fc.in_features")


@pytest.mark.parametrize(
    ("rules", "error", "text"),
    [
        ([], TypeError, "rules is a list, needs a tuple of Rule"),
        (RULES[0], TypeError, "rules is a Rule, needs a tuple of Rule"),
        (("grouped_mlp",), TypeError, "rules holds a str, needs Rule"),
        ((*RULES, RULES[0]), ValueError, "two rules named grouped_mlp"),
    ],
)
def test_rule_set_that_is_none(rules: object, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        check_rules(rules)
    with pytest.raises(error, match=text):
        plan(RULES[0].example, Target.named("sm_90a"), rules)  # type: ignore[arg-type]


def _rule(**changes: object) -> Rule:
    legal: dict[str, object] = {"name": "r", "pattern": (slot("a", "a"),), "guards": (), "program": "m:C"}
    legal |= {"kernels": (), "example": Chain((OpSpec("a", "a"),), "bfloat16")}
    return Rule(**(legal | changes))  # type: ignore[arg-type]
