"""Experts modules of transformers beyond the four models: which formula each has, what runs then, and what is said."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cute_kernels.activation import Activation
from cute_kernels.rehearsal import rehearsal
from fusible_ops import functional
from fusible_ops.integrations import huggingface
from fusible_ops.integrations.hf_experts import formula_of
from fusible_ops.integrations.huggingface import NAME
from tests.compare import relative_error
from tests.models import as_if_on

pytest.importorskip("transformers", reason="transformers is not installed")

from transformers import AutoModelForCausalLM
from transformers.activations import ACT2FN
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, use_experts_implementation

from tests.bench.bench_huggingface import MODELS
from tests.hf_models import CONFIGS, experts_of, small

HIDDEN, INTERMEDIATE, EXPERTS = 16, 24, 3


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    """Plans are kept by device, and these tests take one for another."""
    functional._local.__dict__.clear()
    huggingface._told.clear()
    huggingface.install()
    yield
    huggingface.uninstall()


def experts_class(**layout: bool) -> type[nn.Module]:
    """An experts module of this layout, as the decorator makes them."""

    class Experts(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.num_experts = EXPERTS
            gated, turned = layout.get("has_gate", True), layout.get("is_transposed", False)
            wide = INTERMEDIATE * (2 if gated else 1)
            for name, (n, k) in {
                "gate_up_proj" if gated else "up_proj": (wide, HIDDEN),
                "down_proj": (HIDDEN, INTERMEDIATE),
            }.items():
                weight = torch.randn(EXPERTS, k, n) if turned else torch.randn(EXPERTS, n, k)
                self.register_parameter(name, nn.Parameter(weight * k**-0.5))
                if layout.get("has_bias"):
                    self.register_parameter(f"{name}_bias", nn.Parameter(torch.randn(EXPERTS, n)))
            self.act_fn = ACT2FN[config.hidden_act]
            if layout.get("has_post_expert_norm"):
                self.post_expert_norm = nn.LayerNorm(HIDDEN)
            for key, value in config.constants.items():
                setattr(self, key, value)

        def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            raise NotImplementedError

    return use_experts_implementation(Experts, **layout)


def made(act: str = "silu", gate: Any = None, constants: dict[str, Any] | None = None, **layout: bool) -> Any:
    kind = experts_class(**layout)
    if gate is not None:
        kind._apply_gate = gate  # type: ignore[attr-defined]
    return kind(SimpleNamespace(hidden_act=act, constants=constants or {}, _experts_implementation=NAME))


@pytest.mark.parametrize(
    ("act", "has_gate", "kind"),
    [
        ("silu", True, "swiglu"),
        ("swish", True, "swiglu"),
        ("sigmoid", True, "glu"),
        ("gelu_pytorch_tanh", True, "geglu"),
        ("gelu_new", True, "geglu"),
        ("quick_gelu", True, "qgeglu"),
        ("relu", True, "reglu"),
        ("relu2", True, "sreglu"),
        ("silu", False, "silu"),
        ("relu2", False, "srelu"),
        ("gelu_pytorch_tanh", False, "gelu"),
        ("gelu", True, ""),  # by the error function
        ("gelu_10", True, ""),
        ("mish", True, ""),
        ("xielu", True, ""),  # has parameters
    ],
)
def test_activations_are_known_by_their_values(act: str, has_gate: bool, kind: str) -> None:
    formula = formula_of(made(act, has_gate=has_gate))
    assert formula.activation == kind and bool(formula.why) is not bool(kind)


def clamped(self: Any, gate_up: Tensor) -> Tensor:
    """DeepSeek-V4's."""
    gate, up = gate_up.chunk(2, dim=-1)
    return self.act_fn(gate.clamp(max=self.limit)) * up.clamp(-self.limit, self.limit)


def clamped_late(self: Any, gate_up: Tensor) -> Tensor:
    """Step-3.7's, which clamps what the activation gives."""
    gate, up = gate_up.chunk(2, dim=-1)
    return self.act_fn(gate).clamp(max=self.limit) * up.clamp(-self.limit, self.limit)


def with_offset(self: Any, gate_up: Tensor) -> Tensor:
    """MiniMax-M3's."""
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=self.swiglu_limit), up.clamp(-self.swiglu_limit, self.swiglu_limit)
    return (up + 1.0) * gate * torch.sigmoid(gate * self.swiglu_alpha)


def in_pairs(self: Any, gate_up: Tensor) -> Tensor:
    return self.act_fn(gate_up[..., ::2]) * gate_up[..., 1::2]


def upside_down(self: Any, gate_up: Tensor) -> Tensor:
    up, gate = gate_up.chunk(2, dim=-1)
    return self.act_fn(gate) * up


def test_gates_are_known_by_their_values() -> None:
    constants = {"limit": 10.0}
    assert formula_of(made(gate=clamped, constants=constants)).activation == Activation("clamped_swiglu", 10.0).encode()
    assert formula_of(made(gate=clamped_late, constants=constants)).activation == ""
    own = {"swiglu_limit": 7.0, "swiglu_alpha": 1.702}
    wanted = Activation("clamped_swiglu", 7.0, 1.702, 1.0).encode()
    assert formula_of(made(gate=with_offset, constants=own)).activation == wanted
    pairs = formula_of(made(gate=in_pairs))
    assert (pairs.activation, pairs.interleave) == ("swiglu", 1)
    assert formula_of(made(gate=upside_down)).activation == ""


def test_a_constant_that_changes_is_seen() -> None:
    experts = made(gate=clamped, constants={"limit": 10.0})
    formula_of(experts)
    experts.limit = 3.0
    assert formula_of(experts).activation == Activation("clamped_swiglu", 3.0).encode()
    experts._apply_gate = lambda columns: columns.chunk(2, dim=-1)[0].exp()
    assert formula_of(experts).activation == ""
    del experts._apply_gate
    assert formula_of(experts).activation
    experts.act_fn = nn.ReLU()
    assert formula_of(experts).activation == ""


def result(experts: Any, implementation: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Output and all gradients."""
    experts.config._experts_implementation = implementation
    experts.zero_grad()
    generator = torch.Generator().manual_seed(2)
    x, dy = (torch.randn(20, HIDDEN, generator=generator).to(dtype) for _ in range(2))
    weights = torch.rand(20, 2, generator=generator).to(dtype).requires_grad_()
    index = torch.stack([torch.randperm(EXPERTS, generator=generator)[:2] for _ in range(20)])
    x.requires_grad_()
    y = experts(x, index, weights)
    y.backward(dy)
    grads = {n: p.grad.clone() for n, p in experts.named_parameters()}
    return {"y": y.detach(), "dx": x.grad, "dweights": weights.grad, **grads}  # type: ignore[dict-item]


@pytest.mark.parametrize("act", ["silu", "mish"])  # ours, and one that stays the model's own
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gate", [True, False, "pairs"])
@pytest.mark.parametrize("norm", [False, True])
def test_every_layout(act: str, turned: bool, bias: bool, gate: bool | str, norm: bool) -> None:
    layout = {"is_transposed": turned, "has_bias": bias, "has_gate": bool(gate), "has_post_expert_norm": norm}
    experts = made(act, gate=in_pairs if gate == "pairs" else None, **layout)
    got, wanted = result(experts, NAME, torch.float32), result(experts, "batched_mm", torch.float32)
    for name, t in wanted.items():
        assert relative_error(got[name], t) < 1e-5, name
    assert bool(formula_of(experts).activation) is (act == "silu")


def test_what_does_not_fuse_warns_or_raises() -> None:
    with as_if_on("sm_90a"):
        huggingface.install(on_unfused="error")
        result(made().bfloat16(), NAME, torch.bfloat16)
        with pytest.raises(RuntimeError, match=r"on_unfused='error': Experts: its gate \(MishActivation\) is none of"):
            result(made("mish").bfloat16(), NAME, torch.bfloat16)
        with pytest.raises(RuntimeError, match=r"compute_dtype is float32, needs bfloat16 or float16"):
            result(made(), NAME, torch.float32)
        huggingface.install(on_unfused="warn")
        experts = made("mish").bfloat16()
        with pytest.warns(UserWarning, match="between two grouped linears"):
            result(experts, NAME, torch.bfloat16)
        result(experts, NAME, torch.bfloat16)  # once
    with pytest.raises(ValueError, match="on_unfused must be one of allow, warn, error"):
        huggingface.install(on_unfused="never")


def test_installing_is_idempotent_and_undone() -> None:
    others = set(ALL_EXPERTS_FUNCTIONS.keys()) - {NAME}
    assert "grouped_mm" in others
    huggingface.install()
    model = small("mixtral", implementation=NAME)
    huggingface.uninstall()
    huggingface.uninstall()
    assert set(ALL_EXPERTS_FUNCTIONS.keys()) == others
    with pytest.raises(KeyError, match="not a valid experts implementation"):
        model(input_ids=torch.tensor([[1, 2]]))
    with pytest.raises(ValueError, match="is not supported"):
        small("mixtral", implementation=NAME)
    model.set_experts_implementation("eager")
    model(input_ids=torch.tensor([[1, 2]]))


def test_without_transformers_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers.integrations.moe", None)
    with pytest.raises(ImportError, match="needs transformers 5"):
        huggingface.install()
    monkeypatch.undo()


def test_explain_says_what_each_layer_runs() -> None:
    model = small("gpt_oss", torch.bfloat16, implementation=NAME)
    text = huggingface.explain(model, "sm_90a")
    assert text.startswith("model.layers.0.mlp.experts … model.layers.1.mlp.experts (2 layers): GptOssExperts\n")
    assert "grouped_mlp: fc1 = GroupedLinear [0], act = ScaledClampedSwiGLU [1], fc2 = GroupedLinear [2]" in text
    assert text.endswith("3 of 3 ops fused")
    assert "needs sm_90a; this is cpu" in huggingface.explain(model)
    with torch.autocast("cpu", torch.bfloat16):
        assert huggingface.explain(model.float(), "sm_90a").endswith("3 of 3 ops fused")
    assert huggingface.explain(model, "sm_90a").endswith("0 of 3 ops fused")
    model.set_experts_implementation("grouped_mm")
    assert 'GptOssExperts runs "grouped_mm"; model.set_experts_implementation("fusible_ops")' in huggingface.explain(
        model
    )
    assert huggingface.explain(nn.Linear(2, 2)).startswith("no experts modules")
    other = huggingface.explain(nn.Sequential(made("mish").bfloat16()), "sm_90a")
    assert "its gate (MishActivation) is none of our activations, so it runs as it is" in other
    assert other.count("1 of 1 ops fused") == 2


@pytest.mark.parametrize("name", list(MODELS))
def test_all_fuses_at_the_widths_of_the_bench(name: str) -> None:
    """And which kernels run then: with biases those of their gradients too, and of the gradient of their scales."""
    huggingface.install(on_unfused="error")
    widths, rows = MODELS[name], 4096
    sizes = widths.hidden, widths.intermediate, widths.experts, widths.choices
    with torch.device("meta"):
        config = CONFIGS[name](1, *sizes, vocab_size=8, **widths.more)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, experts_implementation=NAME)
    assert huggingface.explain(model, "sm_90a").endswith("3 of 3 ops fused")
    (experts,) = experts_of(model)
    with rehearsal("sm_90a") as kernels, torch.device("meta"):
        x = torch.empty(rows, widths.hidden, dtype=torch.bfloat16, requires_grad=True)
        weights = torch.empty(rows, widths.choices, dtype=torch.bfloat16, requires_grad=True)
        y = experts(x, torch.empty(rows, widths.choices, dtype=torch.int64), weights)
        y.backward(torch.empty_like(y))
    kinds = [getattr(options, "kind", type(options).__name__) for _, options, *_ in kernels]
    bias = ["ColumnSumsOptions", "ColumnSumsOptions", "RowDotsOptions"] if name == "gpt_oss" else []
    wanted = ["GroupOffsetsOptions", "WgradOptions", "act", "dact", "store", "store", *bias]
    assert sorted(kinds) == sorted(wanted)


def experts_of_transformers() -> Iterator[Any]:
    """An experts module, without memory, of each class that transformers decorates and a default config makes."""
    folder = Path(importlib.util.find_spec("transformers").origin).parent / "models"  # type: ignore[union-attr, arg-type]
    for path in sorted(folder.glob("*/modeling_*.py")):
        for name in re.findall(r"\n@use_experts_implementation[^\n]*\nclass (\w+)", path.read_text()):
            module = importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}")
            configs = importlib.import_module(module.__name__.replace(".modeling_", ".configuration_"))
            own = [
                kind for _, kind in inspect.getmembers(configs, inspect.isclass) if kind.__module__ == configs.__name__
            ]
            made = [experts for config in own if (experts := _made_of(getattr(module, name), config)) is not None]
            yield from made[:1]


def _made_of(kind: type[nn.Module], config: Any) -> nn.Module | None:
    """The module with this config's defaults, without memory; None if it is the config of something else."""
    with contextlib.suppress(Exception), torch.device("meta"):
        return kind(config())
    return None


def test_experts_of_all_models_that_transformers_has() -> None:
    """All have an activation of ours, but for two whose sums are capped softly."""
    formulas = {type(experts).__name__: formula_of(experts) for experts in experts_of_transformers()}
    unlike = {name for name, formula in formulas.items() if not formula.activation}
    assert len(formulas) >= 60 and unlike <= {"Inkling2Experts", "Inkling2LoopExperts"}, unlike
    assert {"MixtralExperts", "NemotronHExperts", "AriaExperts", "DeepseekV4Experts"} <= formulas.keys()
