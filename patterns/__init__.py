"""Chains in, plans out: descriptions, rules, planner and explanation. No tensors, no modules, no GPU.

plan(Chain(ops, "bfloat16"), Target.named("sm_90a")) -> Plan
print(explain(plan))
"""

from cute_kernels.limits import Refusal
from cute_kernels.target import Target
from patterns.chain import Chain, FrozenFacts, OpSpec, RecipeSpec
from patterns.explain import explain
from patterns.planner import Plan, Refused, Step, plan
from patterns.rule import Bound, Match, Rule, Slot, bind, check_rules, slot
from patterns.rules import RULES

__all__ = [
    "RULES",
    "Bound",
    "Chain",
    "FrozenFacts",
    "Match",
    "OpSpec",
    "Plan",
    "RecipeSpec",
    "Refusal",
    "Refused",
    "Rule",
    "Slot",
    "Step",
    "Target",
    "bind",
    "check_rules",
    "explain",
    "plan",
    "slot",
]
