"""A rule: pattern -> guards -> program and kernels. The pattern is structure only; all else is a limit with a name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cute_kernels.catalog import Kernel
from cute_kernels.limits import Limit, Refusal
from cute_kernels.target import Target
from patterns.chain import LINEAR_KINDS, TITLES, Chain, FrozenFacts, OpSpec

FORWARD_AND_BACKWARD = "forward_and_backward"
CHAIN_WORDS = {
    "dtype": "the compute dtype",
    "recipe": "the recipe",
    "recipe.input": "the recipe's input format",
    "recipe.weight": "the recipe's weight format",
    "recipe.grad_output": "the recipe's backward format",
    "recipe.backward_override": "the recipe's backward_override",
}


@dataclass(frozen=True)
class Slot:
    """One element of a pattern.

    label: its name in guards. kinds: the kinds of op that fit. optional: whether it may be left out.
    title: for messages; by default the kinds.
    """

    label: str
    kinds: tuple[str, ...]
    optional: bool = False
    title: str = ""

    def __str__(self) -> str:
        text = self.title or " or ".join(TITLES.get(kind, kind) for kind in self.kinds)
        return f"[{text}]" if self.optional else text


def slot(label: str, *kinds: str, optional: bool = False, title: str = "") -> Slot:
    """`slot("act", "swiglu", "geglu", title="a GLU")`."""
    return Slot(label, kinds, optional, title)


@dataclass(frozen=True)
class Bound:
    """A kernel as a rule uses it.

    use: what for. letters: which fact of the chain each letter of its limits is. when: a fact; where it is false or not
    stated the kernel is not used, and its limits do not matter. Empty: always used.
    """

    kernel: Kernel
    use: str
    letters: FrozenFacts
    when: str = ""


def bind(kernel: Kernel, use: str, *, when: str = "", **letters: str) -> Bound:
    """`bind(SM90_GROUPED_GEMM, "fc2 forward", K="fc2.in_features", N="fc2.out_features", dtype="fc2.compute_dtype")`.

    `ValueError` if a letter of the kernel's limits is left out.
    """
    left_out = [letter for letter in kernel.letters() if letter not in letters]
    if left_out:
        raise ValueError(f"{kernel.name} ({use}): no fact is bound to {', '.join(left_out)}")
    return Bound(kernel, use, FrozenFacts(letters), when)


@dataclass(frozen=True)
class Match:
    """The ops that a pattern takes, `start` to `stop`: one per slot, None for an optional slot left out."""

    chain: Chain
    start: int
    stop: int
    ops: tuple[tuple[str, OpSpec | None], ...]

    def facts(self) -> dict[str, object]:
        """The chain's dtype, the recipe's name and facts; for each op, under its label, its facts and kind, and what
        follows from them: columns out, and for a linear its compute dtype and whether its weights are still to be
        quantised, not held so. A dense linear has one group, and a weight [N, K].
        """
        recipe = self.chain.recipe
        facts: dict[str, object] = {"dtype": self.chain.dtype, "recipe": None if recipe is None else recipe.name}
        if recipe is not None:
            facts |= {f"recipe.{name}": value for name, value in recipe.facts.items()}
        columns: int | None = None
        for label, op in self.ops:
            if op is None:
                continue
            columns = op.columns(columns)
            facts |= {f"{label}.{name}": value for name, value in op.facts.items()}
            facts[f"{label}.kind"] = op.kind
            if columns is not None:
                facts[f"{label}.columns"] = columns
            if op.kind in LINEAR_KINDS:
                facts[f"{label}.compute_dtype"] = self.chain.dtype if self.chain.autocast else op.facts.get("dtype")
                facts[f"{label}.quantizes_weight"] = op.facts.get("held") is None
                facts.setdefault(f"{label}.num_groups", 1)
                facts.setdefault(f"{label}.transposed_weight", False)
        return facts

    def words(self) -> dict[str, str]:
        """The reader's name for each fact: the op's own in place of the label, if it has one."""
        words = dict(CHAIN_WORDS)
        names = {label: (op.word if op is not None else "") or label for label, op in self.ops}
        for fact in self.facts():
            label, dot, rest = fact.partition(".")
            if dot and label in names:
                words[fact] = f"{names[label]}.{rest}"
        return words | names


@dataclass(frozen=True)
class Rule:
    """A row of the table.

    program: "package.module:Class" of the fused operation, loaded when first used. kernels: what it launches.
    covers: which passes it replaces; "forward_and_backward" is the only one so far. example: a chain that it matches.
    """

    name: str
    pattern: tuple[Slot, ...]
    guards: tuple[Limit, ...]
    program: str
    kernels: tuple[Bound, ...]
    example: Chain
    covers: str = FORWARD_AND_BACKWARD

    def __post_init__(self) -> None:
        if not self.pattern or self.pattern[0].optional:
            raise ValueError(f"rule {self.name}: a pattern begins with an element that is not optional")
        if self.program.count(":") != 1:
            raise ValueError(f"rule {self.name}: program is {self.program!r}, needs 'package.module:Class'")
        if self.covers != FORWARD_AND_BACKWARD:
            raise ValueError(f"rule {self.name}: covers is {self.covers!r}, needs {FORWARD_AND_BACKWARD!r}")

    def wrong_recipe(self, chain: Chain) -> Refusal | None:
        """Why the rule is for other recipes than the chain's, None if it is not: asked before anything else."""
        facts = {"recipe": None if chain.recipe is None else chain.recipe.name}
        found = (guard.check(facts, CHAIN_WORDS, self.name) for guard in self.guards if guard.stage == "recipe")
        return next((refusal for refusal in found if refusal is not None), None)

    def match(self, chain: Chain, start: int) -> Match | tuple[int, Refusal]:
        """The ops from `start` on that the pattern takes; else the position where it stopped, and why."""
        position = start
        taken: list[tuple[str, OpSpec | None]] = []
        for element in self.pattern:
            op = chain.ops[position] if position < len(chain.ops) else None
            if op is not None and op.kind in element.kinds:
                taken.append((element.label, op))
                position += 1
            elif element.optional:
                taken.append((element.label, None))
            else:
                found = "the end of the chain" if op is None else op.title
                return position, Refusal(self.name, "chain", f"{element} at position {position}", found)
        return Match(chain, start, position, tuple(taken))

    def used(self, facts: Mapping[str, object]) -> tuple[Bound, ...]:
        """The kernels that a chain with these facts needs."""
        return tuple(bound for bound in self.kernels if not bound.when or facts.get(bound.when))

    def unmet(self, facts: Mapping[str, object], target: Target, words: Mapping[str, str]) -> tuple[Refusal, ...]:
        """Every condition that a match does not meet: guards, then kernel limits, then packages, in table order.

        On another architecture that is the one thing reported: the rest would be about a machine that is not there.
        """
        used = self.used(facts)
        lacks = [refusal.named(self.name) for bound in used for refusal in bound.kernel.unmet_on(target)]
        elsewhere = tuple(refusal for refusal in lacks if refusal.stage == "target")
        if elsewhere:
            return elsewhere[:1]
        refused = [guard.check(facts, words, self.name) for guard in self.guards]
        for bound in used:
            known = {letter: facts[fact] for letter, fact in _pairs(bound) if fact in facts}
            called = {letter: words.get(fact, fact) for letter, fact in _pairs(bound)}
            refused += [refusal.named(self.name) for refusal in bound.kernel.unmet_by(known, called)]
        return tuple(dict.fromkeys([refusal for refusal in refused if refusal is not None] + lacks))

    def __str__(self) -> str:
        return f"{self.name}: {' -> '.join(str(element) for element in self.pattern)}"


def _pairs(bound: Bound) -> list[tuple[str, str]]:
    return [(letter, str(fact)) for letter, fact in bound.letters.items()]


def check_rules(rules: object) -> tuple[Rule, ...]:
    """`rules` itself if it is a tuple of `Rule` with distinct names; else `TypeError` or `ValueError`."""
    if not isinstance(rules, tuple):
        raise TypeError(f"rules is a {type(rules).__name__}, needs a tuple of Rule; (MY_RULE, *RULES) adds one")
    for rule in rules:
        if not isinstance(rule, Rule):
            raise TypeError(f"rules holds a {type(rule).__name__}, needs Rule")
    names = [rule.name for rule in rules]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"rules holds two rules named {', '.join(twice)}: names must differ")
    return rules
