"""The text of explain: what runs what, and the first condition that is not met."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest

from cute_kernels.quantization.formats import E5M2, mxfp8
from cute_kernels.target import CUDNN_FRONTEND, Target
from patterns import RULES, Chain, OpSpec, RecipeSpec, Rule, examples, explain, plan
from patterns.examples import MOE, activation, grouped_linear

PLAIN = Chain((grouped_linear("fc1", 256, 1024), activation("swiglu"), grouped_linear("fc2", 512, 256)), "bfloat16")


def told(chain: Chain, arch: str) -> str:
    return explain(plan(chain, Target.named(arch)))


def unwrapped(text: str) -> list[str]:
    """Its lines, each list of names on one."""
    return re.sub(r",\n +", ", ", text).splitlines()


def test_fused() -> None:
    assert told(MOE, "sm_90a") == (
        "GroupedLinear fc1 -> ScaledSwiGLU act -> GroupedLinear fc2    on sm_90a, bfloat16, no recipe\n"
        "grouped_mlp: GroupedLinear fc1, ScaledSwiGLU act, GroupedLinear fc2\n"
        "    group_offsets       fc1 rows of each group\n"
        "    grouped_gemm_act    fc1 and act forward\n"
        "    grouped_wgrad       fc1 weight gradient\n"
        "    grouped_dbias       fc1 bias gradient\n"
        "    group_offsets       fc2 rows of each group\n"
        "    grouped_gemm        fc2 forward\n"
        "    grouped_wgrad       fc2 weight gradient\n"
        "    grouped_dbias       fc2 bias gradient\n"
        "    grouped_dscale      fc2 scale gradient\n"
        "    grouped_gemm_dact   fc2 input gradient and act backward\n"
        "    grouped_gemm_dgrad  fc1 input gradient\n"
        "3 of 3 ops fused"
    )


PACKED = replace(PLAIN, ops=(PLAIN.ops[0], activation("swiglu", glu_interleave=32), PLAIN.ops[2]))


def test_blackwell_names_the_interleave_first() -> None:
    """The linears are fused by themselves meanwhile."""
    packing = "limit    act.glu_interleave_size is None, needs 32; pack_glu_weights_(interleave=32) does it"
    linear = [
        "    cudnn_gemm   fc forward",
        "    cudnn_gemm   fc input gradient",
        "    cudnn_wgrad  fc weight gradient",
        f"    x grouped_mlp_sm100  {packing}",
    ]
    lines = unwrapped(told(PLAIN, "sm_100a"))
    assert lines[1:8] == [
        "grouped_linear_sm100: fc = GroupedLinear fc1",
        *linear,
        "unfused: SwiGLU act",
        f"    x grouped_mlp_sm100          {packing}",
    ]
    assert lines[10].startswith(
        "    x start with other ops: mlp, mlp_sm100, linear_activation, grouped_linear_quantize,"
    )
    assert lines[11].startswith("    x are for another recipe: grouped_mlp_fp8, mlp_fp8, ")
    assert lines[12:] == ["grouped_linear_sm100: fc = GroupedLinear fc2", *linear, "2 of 3 ops fused"]


def test_blackwell_fuses_what_is_packed() -> None:
    assert told(PACKED, "sm_100a") == (
        "GroupedLinear fc1 -> SwiGLU act -> GroupedLinear fc2    on sm_100a, bfloat16, no recipe\n"
        "grouped_mlp_sm100: GroupedLinear fc1, SwiGLU act, GroupedLinear fc2\n"
        "    cudnn_glu    fc1 and act forward\n"
        "    cudnn_gemm   fc2 forward\n"
        "    cudnn_dglu   fc2 input gradient and act backward\n"
        "    cudnn_gemm   fc1 input gradient\n"
        "    cudnn_wgrad  fc1 weight gradient\n"
        "    cudnn_wgrad  fc2 weight gradient\n"
        "3 of 3 ops fused"
    )
    assert plan(PACKED, Target.named("sm_103a")).is_fused and plan(PACKED, Target.named("sm_90a")).is_fused


CLAMPED = {"limit": 7.0, "alpha": 1.702, "offset": 0.5, "glu_interleave": 32}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"kind": "geglu"}, "act.kind is geglu, needs swiglu or clamped_swiglu; cuDNN Frontend's geglu is the clamped"),
        ({"kind": "clamped_swiglu", "limit": 10.0}, "act.limit is 10.0, needs 7.0 with clamped_swiglu; it is built in"),
        ({"kind": "clamped_swiglu", "alpha": 1.0}, "act.alpha is 1.0, needs 1.702 with clamped_swiglu; it is built in"),
        ({"kind": "clamped_swiglu"}, ""),
        ({"kind": "srelu"}, "wants a GLU at position 1; found SReLU act"),
        ({"dtype": "float16"}, "fc1.compute_dtype is float16, needs bfloat16"),
        ({"num_groups": 1025}, "fc1.num_groups is 1025, needs at most 1024"),
        ({"transposed_weight": True}, "fc1.transposed_weight is True, needs False with swiglu"),
        ({"width": 80}, "fc2.in_features is 80, needs a multiple of 32; gate and up lie in blocks of 32 columns"),
        ({"hidden": 248}, "fc2.out_features is 248, needs a multiple of 32; pad the layer's features"),
        ({"glu_interleave": 1}, "act.glu_interleave_size is 1, needs 32; pack_glu_weights_(interleave=32) does it"),
    ],
)
def test_blackwell_names_what_cudnn_frontend_does_not_take(changes: dict, text: str) -> None:
    act = {"kind": "swiglu", "glu_interleave": 32} | (CLAMPED if changes.get("kind") == "clamped_swiglu" else {})
    act |= {name: value for name, value in changes.items() if name in (*CLAMPED, "kind")}
    linear = {name: value for name, value in changes.items() if name in ("dtype", "num_groups")}
    width, hidden = changes.get("width", 512), changes.get("hidden", 256)
    first = {"transposed_weight": changes.get("transposed_weight", False)}
    kind = act.pop("kind")
    fc1 = grouped_linear("fc1", hidden, width * (1 if kind == "srelu" else 2), **linear, **first)
    chain = Chain((fc1, activation(kind, **act), grouped_linear("fc2", width, hidden, **linear)), "bfloat16")
    found = plan(chain, Target.named("sm_100a"))
    (refused,) = [r for r in found.refusals if r.rule == "grouped_mlp_sm100" and r.start == 0] or [None]
    assert (refused is None) == (not text) == found.is_fused
    if refused is not None:
        assert str(refused.first).startswith(text)


CLAMPED_MOE = examples.SM100["grouped_linear", "nvfp4", "_any_clamp"]


@pytest.mark.parametrize("format", ["mxfp8", "nvfp4"])
@pytest.mark.parametrize(
    ("act", "text"),
    [
        ({}, "act.glu_interleave_size is None, needs 32; pack_glu_weights_(interleave=32) does it"),
        (
            {"kind": "geglu", "glu_interleave": 32},
            "act.kind is geglu, needs swiglu or clamped_swiglu; cuDNN Frontend's geglu is the clamped SwiGLU; it has "
            "no kernel for gelu_tanh",
        ),
    ],
)
def test_blackwell_names_what_is_not_taken_in_mxfp8_and_nvfp4(format: str, act: dict, text: str) -> None:
    changed = activation(**{"kind": "swiglu", "scaled": True} | act)
    chain = replace(examples.SM100["grouped_linear", format, ""], ops=(MOE.ops[0], changed, MOE.ops[2]))
    found = plan(chain, Target.named("sm_100a")).refusals
    (refused,) = [r for r in found if r.rule == f"grouped_mlp_{format}_sm100" and r.start == 0]
    assert [str(reason) for reason in refused.reasons] == [text]


@pytest.mark.parametrize(
    ("constants", "rule", "text"),
    [
        ({"limit": 7.0, "alpha": 1.702, "offset": 1.0}, "grouped_mlp_nvfp4_sm100", ""),
        (
            {"limit": 7.0, "alpha": 1.702, "offset": 0.0},
            "grouped_mlp_any_clamp_nvfp4_sm100",
            "act.offset is 0.0, needs 1.0 with clamped_swiglu; it is built into cuDNN Frontend's kernel",
        ),
        ({}, "", "act.limit is None, needs 7.0 with clamped_swiglu; it is built into cuDNN Frontend's kernel"),
    ],
    ids=["built in", "another", "no clamp"],
)
def test_blackwell_takes_any_clamp_in_nvfp4(constants: dict, rule: str, text: str) -> None:
    """By the kernel that gives both maxima where it has the constants, else by one that gives one; not without any."""
    changed = activation("clamped_swiglu", scaled=True, glu_interleave=32, **constants)
    chain = replace(CLAMPED_MOE, ops=(CLAMPED_MOE.ops[0], changed, CLAMPED_MOE.ops[2]))
    found = plan(chain, Target.named("sm_100a"))
    assert (found.steps[0].rule.name == rule) == bool(rule)
    first = [r for r in found.refusals if r.rule == "grouped_mlp_nvfp4_sm100" and r.start == 0]
    assert [str(r.first) for r in first] == ([text] if text else [])
    if not rule:
        (refused,) = [r for r in found.refusals if r.rule == "grouped_mlp_any_clamp_nvfp4_sm100" and r.start == 0]
        assert str(refused.first).startswith("act.limit is None, needs a number with clamped_swiglu")


def test_blackwell_takes_no_gradients_in_e5m2() -> None:
    recipe = RecipeSpec("MXFP8BlockScaling", {**examples.MXFP8.facts, "grad_output": mxfp8(E5M2)})
    chain = replace(examples.SM100["grouped_linear", "mxfp8", ""], recipe=recipe)
    found = plan(chain, Target.named("sm_100a")).refusals
    (refused,) = [r for r in found if r.rule == "grouped_mlp_mxfp8_sm100" and r.start == 0]
    assert "E5M2" in str(refused.first)


def test_sm120_is_declined_by_name_and_so_are_versions_that_are_known_to_be_wrong() -> None:
    refused = plan(PACKED, Target.named("sm_120a")).why_not(0, 3)
    assert "needs sm_100a or sm_103a; this is sm_120a" in [str(r.first) for r in refused if "sm100" in r.rule]
    for version in ("1.27.0", "1.31.1", "1.33.0"):
        packages = (*Target.named("sm_100a").packages, (CUDNN_FRONTEND.name, version))
        (refusal,) = plan(PACKED, Target("sm_100a", 148, packages)).why_not(0, 3)[0].reasons
        assert str(refusal) == f"needs nvidia-cudnn-frontend>=1.32,<1.33; {version} is installed"


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("arch", ["cpu", "sm_80", "sm_100a"])
def test_the_first_unmet_condition_is_the_first_reason_shown(rule: Rule, arch: str) -> None:
    result = plan(rule.example, Target.named(arch))
    lines = explain(result).splitlines()
    if result.is_fused:
        used = [bound.kernel for step in result.steps for bound in step.kernels]
        assert all(arch in kernel.archs for kernel in used) and result.first_unmet() is None
        return
    (line,) = [after for line, after in itertools.pairwise(lines) if line.startswith("unfused: ")]
    assert line.startswith("    x ") and line.endswith(str(result.first_unmet()))


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_every_rule_has_its_verdict(rule: Rule) -> None:
    lines = unwrapped(told(rule.example, "sm_80"))
    together = ("    x start with other ops: ", "    x are for another recipe: ")
    elsewhere = [name for line in lines if line.startswith(together) for name in line.partition(": ")[2].split(", ")]
    verdicts = [line.split()[1] for line in lines if line.startswith("    x ")]
    for other in RULES:
        assert other.name in verdicts or other.name in elsewhere


def test_host_syncs_are_named() -> None:
    narrow = Chain(
        (grouped_linear("fc", 64, 64, num_groups=4), grouped_linear("fc2", 64, 60, num_groups=4)), "bfloat16"
    )
    assert told(narrow, "sm_80").splitlines()[-2] == (
        "host sync: unfused GroupedLinear fc2 reads its splits on the host; out_features is 60, needs a multiple of 8"
    )
    many = Chain((grouped_linear("fc", 64, 64, num_groups=1024),), "bfloat16")
    assert "num_groups is 1024, needs at most 1023" in told(many, "sm_80")
    assert "host sync" not in told(many, "sm_90a") and "host sync" not in told(many, "cpu")
    under = replace(narrow, recipe=examples.NVFP4)
    assert "on the host; dtype under the recipe is float32, needs bfloat16" in told(under, "sm_80")


def test_partly_fused_shows_what_kept_the_longer_rule_out() -> None:
    chain = Chain((*PLAIN.ops[:2], grouped_linear("fc2", 512, 256, num_groups=4), OpSpec("dropout", "3")), "bfloat16")
    text = told(chain, "sm_90a")
    assert "grouped_linear_activation: fc1 = " not in text
    assert "    x grouped_mlp  guard    fc1.num_groups is 8, needs 4 (fc2.num_groups)\n" in text
    assert "grouped_linear: fc = GroupedLinear fc2\n" in text
    assert "unfused: Dropout [3]\n" in text and text.endswith("3 of 4 ops fused")
    assert "sm100" not in text.split("unfused")[0]


def test_index_names_show_which_op_has_which_label() -> None:
    ops = tuple(replace(op, name=str(i)) for i, op in enumerate(PLAIN.ops))
    line = told(Chain(ops, "bfloat16"), "sm_90a").splitlines()[1]
    assert line == "grouped_mlp: fc1 = GroupedLinear [0], act = SwiGLU [1], fc2 = GroupedLinear [2]"


def test_recipe_and_no_rules_and_no_ops() -> None:
    assert "on sm_90a, bfloat16, MXFP8BlockScaling\n" in told(
        replace(PLAIN, recipe=RecipeSpec("MXFP8BlockScaling")), "sm_90a"
    )
    assert explain(plan(PLAIN, Target.named("sm_90a"), ())).endswith("GroupedLinear fc2\n0 of 3 ops fused")
    assert told(Chain((), "bfloat16"), "cpu") == "(no ops)    on cpu, bfloat16, no recipe\n0 of 0 ops fused"
