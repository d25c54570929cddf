"""explain(plan) -> text: which rule and kernels run what, and where none does, which condition failed first.

Renders what the planner found; decides nothing.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from cute_kernels.quantization.formats import Format
from patterns.break_even import FP8_BLOCKS, break_even, linears_of
from patterns.chain import Chain
from patterns.planner import Plan, Refused, Step
from patterns.rule import Rule

INDENT = "    "
WIDTH = 140
"""Most columns of a list of names; a condition stands on one line, however long."""


def explain(plan: Plan) -> str:
    """The plan as text, e.g.

    GroupedLinear fc1 -> SwiGLU act -> GroupedLinear fc2    on sm_100a, bfloat16, no recipe
    unfused: GroupedLinear fc1, SwiGLU act, GroupedLinear fc2
        x grouped_mlp_sm100   limit    act.glu_interleave_size is None, needs 32; ...
    """
    chain, target = plan.chain, plan.target
    lines = [f"{chain}    on {target}, {chain.dtype}, {chain.recipe or 'no recipe'}"]
    for steps in _runs(plan.steps):
        first, last = steps[0], steps[-1]
        if first.rule is None:
            lines.append(f"unfused: {', '.join(op.title for op in chain.ops[first.start : last.stop])}")
        else:
            lines += _fused(plan.chain, first, first.rule)
        lines += [INDENT + line for line in _reasons(_shown(plan, first, last))]
        if first.rule is None:
            for what, misses in (
                ("start with other ops", _elsewhere(plan, first, last)),
                ("are for another recipe", _other_recipes(plan, first, last)),
            ):
                lines += _listed(f"x {what}: ", [refused.rule for refused in misses]) if misses else []
    lines += [f"host sync: unfused {op.title} reads its splits on the host; {why}" for op, why in plan.host_reads()]
    count = len(chain.ops) - len(plan.unfused)
    lines.append(f"{count} of {len(chain.ops)} ops fused")
    return "\n".join(lines)


def _listed(what: str, names: list[str]) -> list[str]:
    """Lines of at most WIDTH columns."""
    return textwrap.wrap(
        what + ", ".join(names),
        width=WIDTH,
        initial_indent=INDENT,
        subsequent_indent=INDENT + " " * len(what),
        break_long_words=False,
    )


def _runs(steps: Iterable[Step]) -> list[list[Step]]:
    """Neighbouring unfused steps together, each fused step by itself."""
    runs: list[list[Step]] = []
    for step in steps:
        if step.rule is None and runs and runs[-1][-1].rule is None:
            runs[-1].append(step)
        else:
            runs.append([step])
    return runs


def _fused(chain: Chain, step: Step, rule: Rule) -> list[str]:
    """The rule and its ops, each with its label where that is not its name; then the kernels and what each is for."""
    ops = zip(step.labels, chain.ops[step.start : step.stop], strict=True)
    names = ", ".join(op.title if op.name == label else f"{label} = {op.title}" for label, op in ops)
    width = max((len(bound.kernel.name) for bound in step.kernels), default=0)
    lines = [f"{rule.name}: {names}"] + [f"{INDENT}{b.kernel.name:{width}}  {b.use}" for b in step.kernels]
    linears = linears_of(chain.ops[step.start : step.stop])
    if chain.recipe is not None and chain.recipe.name == FP8_BLOCKS and linears:
        lines.append(f"{INDENT}{break_even(linears)} (training, estimated for an H200)")
    format = None if chain.recipe is None else chain.recipe.facts.get("preactivation")
    if isinstance(format, Format) and len(linears) == 2:
        columns = linears[0][2]
        kept = f"{columns * format.bytes_per_element:.0f} bytes a row ({2 * columns} in bfloat16)"
        lines.append(f"{INDENT}keeps the pre-activation for backward in {format}: {kept}")
    return lines


def _shown(plan: Plan, first: Step, last: Step) -> list[Refused]:
    """For unfused ops, misses that fit at least one op; for a fused step, longer rules that a condition kept out.

    Without those for another recipe.
    """
    misses = plan.why_not(first.start, last.stop)
    if first.rule is None:
        elsewhere = _elsewhere(plan, first, last)
        return [refused for refused in misses if refused not in elsewhere and refused.first.stage != "recipe"]
    return [refused for refused in misses if refused.first.stage not in ("chain", "target", "recipe")]


def _elsewhere(plan: Plan, first: Step, last: Step) -> list[Refused]:
    """Rules whose pattern does not fit even the first op."""
    return [r for r in plan.why_not(first.start, last.stop) if r.first.stage == "chain" and r.stop == r.start]


def _other_recipes(plan: Plan, first: Step, last: Step) -> list[Refused]:
    """Rules for another recipe than the chain's, or for none."""
    return [refused for refused in plan.why_not(first.start, last.stop) if refused.first.stage == "recipe"]


def _reasons(misses: list[Refused]) -> list[str]:
    """One line per rule and its first reason; further reasons below it."""
    width = max((len(refused.rule) for refused in misses), default=0)
    lines = []
    for refused in misses:
        name = f"x {refused.rule}"
        for reason in refused.reasons:
            lines.append(f"{name:{width + 2}}  {reason.stage:7}  {reason}")
            name = ""
    return lines
