"""state_dicts between Transformer Engine's ops and ours, strictly, both ways; delayed scales among them.

Theirs are real (`tests/te_wheel.py`). Without the package `tests/cpu/test_te_contract.py`
has the keys as data.
"""

from __future__ import annotations

import importlib
import os
import pickle
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

import fusible_ops as ops
from tests.compare import assert_bitwise_equal
from tests.te_wheel import load

COMMON: dict[str, Any] = {"device": "cpu", "dtype": torch.bfloat16}
SUFFIXES = {"forward": "fwd", "backward": "bwd"}
MODELS = {
    "grouped_linear": lambda k: k.GroupedLinear(3, 16, 24, **COMMON),
    "no_bias": lambda k: k.GroupedLinear(3, 16, 24, bias=False, **COMMON),
    "linear": lambda k: k.Linear(16, 24, **COMMON),
    "linear_no_bias": lambda k: k.Linear(16, 24, bias=False, **COMMON),
    "basic_linear": lambda k: k.BasicLinear(16, 24, **COMMON),
    "bias": lambda k: k.Bias(24, **COMMON),
    "mlp": lambda k: k.Sequential(
        k.GroupedLinear(2, 16, 64, **COMMON), k.ScaledClampedQGeGLU(), k.GroupedLinear(2, 32, 16, **COMMON)
    ),
    "small": lambda k: k.Sequential(
        k.MakeExtraOutput(), k.Quantize(), k.ConstantScale(2.0), k.Dropout(0.1), k.Reshape((-1, 8)), k.Identity(),
        k.AddExtraInput(), k.SwiGLU(), k.ScaledSReLU(), k.SiTUGLU(), k.GELU(),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def te() -> Any:
    return load()


@pytest.mark.parametrize("name", MODELS)
def test_strict_both_ways(te: Any, name: str) -> None:
    theirs, ours = MODELS[name](te), MODELS[name](ops)
    assert list(theirs.state_dict()) == list(ours.state_dict())
    # A Linear of theirs without a bias does not load even its own state_dict strictly.
    back = [] if name == "linear_no_bias" else [(ours, theirs)]
    for source, target in ((theirs, ours), *back):
        with torch.no_grad():
            for p in source.parameters():
                p.normal_()
        target.load_state_dict(source.state_dict(), strict=True)
        for a, b in zip(source.parameters(), target.parameters(), strict=True):
            assert_bitwise_equal(a.detach(), b.detach())


@pytest.mark.parametrize("single", [False, True])
def test_their_experts_into_one_weight_and_back(te: Any, single: bool) -> None:
    theirs = te.GroupedLinear(3, 16, 24, bias=False, **COMMON)
    ours = ops.GroupedLinear(3, 16, 24, bias=False, single_grouped_weight=single, **COMMON)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    for g, w in enumerate(ours.expert_weights()):
        assert_bitwise_equal(w.detach(), getattr(theirs, f"weight{g}").detach())


class _OnCpu:
    """torch for a module of theirs that makes its tensors on "cuda"."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def device(self, *_: Any) -> torch.device:
        return torch.device("cpu")


@pytest.fixture
def their_scales(te: Any) -> Iterator[Any]:
    """The module of their recipes; their scales live on a CPU while it is in use, and may be loaded."""
    if torch.cuda.is_available():
        pytest.skip("this is about bytes, and takes a process without CUDA")
    quantization = importlib.import_module("transformer_engine.pytorch.quantization")
    with (
        mock.patch.multiple(quantization, torch=_OnCpu(), check_recipe_support=lambda _: None, _FP8_SUPPORT=(True, "")),
        mock.patch.multiple(torch.cuda, synchronize=lambda: None, is_current_stream_capturing=lambda: False),
        mock.patch.dict(os.environ, {"NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE": "1"}),
    ):
        yield importlib.import_module("transformer_engine.common.recipe")


def test_delayed_scales_both_ways(te: Any, their_scales: Any) -> None:
    """What they save we read, and what we save they load, with the recipe's fields."""
    theirs = te.GroupedLinear(3, 16, 24, **COMMON)
    theirs.reset_recipe_state(recipe=their_scales.DelayedScaling(margin=2, amax_history_len=4))
    found = {mode: theirs._fp8_metas[mode][f"scaling_{suffix}"] for mode, suffix in SUFFIXES.items()}
    for state in found.values():
        state.scale.uniform_(1, 2)
        state.amax_history.uniform_(0, 5)
    ours = ops.GroupedLinear(3, 16, 24, **COMMON)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    for mode, state in found.items():
        assert_bitwise_equal(ours._scales[mode].scale, state.scale)
        assert_bitwise_equal(ours._scales[mode].amax_history, state.amax_history)
    recipe = ops.DelayedScaling(margin=3, fp8_format=ops.Format.E4M3, amax_history_len=4)
    x, sizes = torch.randn(32, 16).bfloat16(), torch.tensor([7, 9, 16])
    with ops.autocast(recipe=recipe):
        y = ours(x.requires_grad_(), sizes)
    y.sum().backward()
    other = te.GroupedLinear(3, 16, 24, **COMMON)
    other.load_state_dict(ours.state_dict(), strict=True)
    for mode, suffix in SUFFIXES.items():
        meta = other._fp8_metas[mode]
        assert_bitwise_equal(meta[f"scaling_{suffix}"].scale, ours._scales[mode].scale)
        assert_bitwise_equal(meta[f"scaling_{suffix}"].amax_history, ours._scales[mode].amax_history)
        wanted = their_scales.DelayedScaling(margin=3, fp8_format=their_scales.Format.E4M3, amax_history_len=4)
        assert meta["recipe"] == wanted


def test_an_empty_state_of_theirs_is_no_state(te: Any) -> None:
    """As older versions wrote it where a recipe has none."""
    op = ops.GroupedLinear(2, 16, 24, **COMMON)
    op.set_extra_state(torch.frombuffer(bytearray(pickle.dumps({})), dtype=torch.uint8))
    assert op.get_extra_state().numel() == 0
