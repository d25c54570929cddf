"""plan(chain, target, rules) -> Plan: which rule takes which ops, and every refusal that was met on the way.

Pure and deterministic. At each position the rules are tried in table order; the first that matches, and whose
conditions all hold, takes its ops. An op that no rule takes is a step of its own and runs unfused; so is each of those
that a rule took before whose kernels turned out not to compile.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from cute_kernels.catalog import DEVICE_OFFSETS
from cute_kernels.limits import Refusal
from cute_kernels.target import Target
from patterns.chain import Chain, OpSpec
from patterns.rule import Bound, Rule, check_rules
from patterns.rules import RULES


@dataclass(frozen=True)
class Step:
    """Ops `start` to `stop` of the chain run as one: by a rule's program, or unfused (rule None, one op).

    labels: what the rule's pattern calls each of the ops. kernels: those of the rule's that this chain needs.
    """

    rule: Rule | None
    start: int
    stop: int
    labels: tuple[str, ...] = ()
    kernels: tuple[Bound, ...] = ()

    @property
    def program(self) -> str | None:
        """Dotted name of the fused operation; None if unfused."""
        return None if self.rule is None else self.rule.program


@dataclass(frozen=True)
class Refused:
    """A rule tried at `start` that did not take ops `start` to `stop` (as far as its pattern fits), and all reasons."""

    rule: str
    start: int
    stop: int
    reasons: tuple[Refusal, ...]

    @property
    def first(self) -> Refusal:
        """The first condition that is not met."""
        return self.reasons[0]

    @property
    def progress(self) -> tuple[int, int]:
        """How near: 2 if a condition failed, 1 if the machine differs, 0 if ops or recipe do; then how many ops fit."""
        return {"chain": 0, "recipe": 0, "target": 1}.get(self.first.stage, 2), self.stop - self.start


@dataclass(frozen=True)
class Plan:
    """What runs what. `steps` cover the chain in order; `refusals` are in the order they were met."""

    chain: Chain
    target: Target
    steps: tuple[Step, ...]
    refusals: tuple[Refused, ...]

    @property
    def is_fused(self) -> bool:
        """Whether a rule takes every op."""
        return all(step.rule is not None for step in self.steps)

    @property
    def unfused(self) -> tuple[OpSpec, ...]:
        """The ops that run unfused."""
        return tuple(op for step in self.steps if step.rule is None for op in self.chain.ops[step.start : step.stop])

    def why_not(self, start: int, stop: int) -> tuple[Refused, ...]:
        """Why no rule, or no longer rule, took ops `start` to `stop`: each rule's nearest miss, the nearest first."""
        nearest: dict[str, Refused] = {}
        for refused in self.refusals:
            if start <= refused.start < stop or refused.start <= start < refused.stop:
                known = nearest.get(refused.rule)
                if known is None or refused.progress > known.progress:
                    nearest[refused.rule] = refused
        return tuple(sorted(nearest.values(), key=_furthest_first))

    def host_reads(self) -> tuple[tuple[OpSpec, Refusal], ...]:
        """Unfused grouped linears that on a GPU wait for the device to read the splits on the host; and why."""
        if self.target.arch == "cpu":
            return ()
        found = []
        for op in self.unfused:
            if op.kind == "grouped_linear":
                dtype, name = self.chain.dtype if self.chain.autocast else op.facts.get("dtype"), "dtype"
                if self.chain.recipe is not None:
                    dtype, name = self.chain.recipe.product_dtype(str(dtype)), "dtype under the recipe"
                letters = {"K": "in_features", "N": "out_features", "G": "num_groups"}
                facts = {"dtype": dtype, **{letter: op.facts.get(fact) for letter, fact in letters.items()}}
                refusals = [limit.check(facts, {**letters, "dtype": name}) for limit in DEVICE_OFFSETS]
                found += [(op, refusal) for refusal in refusals if refusal is not None][:1]
        return tuple(found)

    def first_unmet(self) -> Refusal | None:
        """The condition that kept the first unfused op from being fused; None if all are fused."""
        for step in self.steps:
            if step.rule is None:
                near = self.why_not(step.start, step.stop)
                return near[0].first if near else None
        return None

    def as_data(self) -> dict[str, object]:
        """The same as dicts and lists of strings, numbers and None."""
        return {
            "chain": [{"kind": op.kind, "name": op.name} for op in self.chain.ops],
            "dtype": self.chain.dtype,
            "recipe": None if self.chain.recipe is None else self.chain.recipe.name,
            "target": self.target.arch,
            "steps": [_step_as_data(step, self.chain) for step in self.steps],
            "refusals": [_refused_as_data(refused) for refused in self.refusals],
            "host_reads": [{"op": op.name, "reason": str(reason)} for op, reason in self.host_reads()],
        }


def plan(chain: Chain, target: Target, rules: tuple[Rule, ...] = RULES, failed: tuple[Refused, ...] = ()) -> Plan:
    """The plan for `chain` on `target`; the same object again for equal arguments. failed: steps of earlier plans that
    could not run there.

    `TypeError` or `ValueError` for a rule set that is not a tuple of `Rule` with distinct names.
    """
    return _plan(chain, target, check_rules(rules), failed)


@functools.lru_cache(maxsize=1024)
def _plan(chain: Chain, target: Target, rules: tuple[Rule, ...], failed: tuple[Refused, ...]) -> Plan:
    lost = {(refused.rule, refused.start, refused.stop): refused for refused in failed}
    steps: list[Step] = []
    refusals: list[Refused] = []
    position = 0
    while position < len(chain.ops):
        step = Step(None, position, position + 1)
        for rule in rules:
            verdict = _attempt(rule, chain, position, target)
            if isinstance(verdict, Step):
                step = verdict
                break
            refusals.append(verdict)
        refused = None if step.rule is None else lost.get((step.rule.name, step.start, step.stop))
        if refused is None:
            steps.append(step)
        else:
            refusals.append(refused)
            steps += [Step(None, i, i + 1) for i in range(step.start, step.stop)]
        position = step.stop
    return Plan(chain, target, tuple(steps), tuple(refusals))


def _attempt(rule: Rule, chain: Chain, start: int, target: Target) -> Step | Refused:
    other_recipe = rule.wrong_recipe(chain)
    if other_recipe is not None:
        return Refused(rule.name, start, start, (other_recipe,))
    match = rule.match(chain, start)
    if isinstance(match, tuple):
        stopped, refusal = match
        return Refused(rule.name, start, stopped, (refusal,))
    facts = match.facts()
    reasons = rule.unmet(facts, target, match.words())
    if reasons:
        return Refused(rule.name, start, match.stop, tuple(_strictest(reasons)))
    labels = tuple(label for label, op in match.ops if op is not None)
    return Step(rule, start, match.stop, labels, rule.used(facts))


def _strictest(reasons: tuple[Refusal, ...]) -> Iterator[Refusal]:
    """Without those that say of the same number that it is no multiple of a divisor of what another one names."""
    for one in reasons:
        implied = (
            other.found == one.found and other.multiple > one.multiple and other.multiple % one.multiple == 0
            for other in reasons
            if one.multiple
        )
        if not any(implied):
            yield one


def _furthest_first(refused: Refused) -> tuple[int, int]:
    stage, reach = refused.progress
    return -stage, -reach


def _step_as_data(step: Step, chain: Chain) -> dict[str, object]:
    return {
        "rule": None if step.rule is None else step.rule.name,
        "program": step.program,
        "start": step.start,
        "stop": step.stop,
        "ops": [op.name for op in chain.ops[step.start : step.stop]],
        "kernels": [{"name": bound.kernel.name, "use": bound.use} for bound in step.kernels],
    }


def _refused_as_data(refused: Refused) -> dict[str, object]:
    return {
        "rule": refused.rule,
        "start": refused.start,
        "stop": refused.stop,
        "reasons": [
            {"stage": r.stage, "wanted": r.wanted, "found": r.found, "fix": r.fix, "text": str(r)}
            for r in refused.reasons
        ],
    }
