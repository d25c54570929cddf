"""The registered operators: schemas, shape functions, and that CPU tensors get the reference."""

from __future__ import annotations

import pytest
import torch

from cute_kernels import ops, reference
from cute_kernels.activation import Activation
from tests.compare import assert_bitwise_equal

OFFSETS = torch.tensor([0, 5, 5, 9], dtype=torch.int32)
X, DY = torch.randn(12, 16), torch.randn(12, 24)
W = torch.randn(3, 24, 16)
ACT = Activation("swiglu").encode()

CALLS = {
    "group_offsets": (torch.tensor([5, 0, 4]), 12),
    "group_offsets_and_counters": (torch.tensor([5, 0, 4]), 12, 6),
    "grouped_gemm": (X, [W], OFFSETS, torch.randn(3, 24), torch.rand(12)),
    "grouped_gemm_": (torch.zeros(12, 24), X, [W], OFFSETS, torch.randn(3, 24), torch.rand(12)),
    "grouped_gemm_dgrad": (DY, [W], OFFSETS, 4),
    "grouped_gemm_act": (X, [W], OFFSETS, ACT, None, torch.rand(12), 0, True, True, torch.ones(12, 8)),
    "grouped_gemm_dact": (DY, [W], OFFSETS, torch.randn(12, 32), ACT, torch.rand(12), True, True, True),
    "dact": (torch.randn(12, 16), torch.randn(12, 32), OFFSETS, None, ACT, False),
    "grouped_wgrad": (DY, X, OFFSETS, 0),
    "grouped_wgrad_": ([torch.zeros(3, 24, 16)], DY, X, OFFSETS, 0, True),
    "grouped_dbias": (DY, OFFSETS, torch.rand(12), 0),
    "grouped_dscale": (DY, torch.randn(3, 24), OFFSETS),
}


ENDS, PADDED = torch.tensor([256, 256, 512], dtype=torch.int32), torch.randn(512, 16)
W1, W2, PREACT = torch.randn(3, 64, 16), torch.randn(3, 16, 32), torch.randn(512, 64)

CALLS |= {
    "padded_gemm": (PADDED, [W1], ENDS, torch.randn(3, 64), torch.rand(512)),
    "padded_gemm_act": (PADDED, [W1], ENDS, ACT, torch.randn(3, 64), torch.rand(512)),
    "padded_gemm_dact": (PADDED, [W2], ENDS, PREACT, ACT, torch.rand(512), True, True),
    "padded_wgrad": (PREACT, PADDED, ENDS),
    "padded_wgrad_": ([torch.zeros(3, 64, 16)], PREACT, PADDED, ENDS, True),
}

SHARING = {"sm_margin": 4, "counter": torch.zeros(1, dtype=torch.int32)}


@pytest.mark.parametrize("name", CALLS)
def test_operator_is_well_formed(name: str) -> None:
    """Schema, mutation and the shape function, by PyTorch's own checker."""
    operator = getattr(torch.ops.fusible_ops, name).default
    sharing = {a.name: SHARING[a.name] for a in operator._schema.arguments if a.name in SHARING}
    for how in ({}, sharing):
        torch.library.opcheck(operator, CALLS[name], how, test_utils=("test_schema", "test_faketensor"))


def test_cpu_tensors_get_the_reference() -> None:
    assert_bitwise_equal(ops.grouped_gemm(X, [W], OFFSETS), reference.grouped_gemm(X, [W], OFFSETS))
    act, preact = ops.grouped_gemm_act(X, [W], OFFSETS, Activation("swiglu"), save_preact=False)
    assert preact is None
    assert_bitwise_equal(act, reference.grouped_gemm_act(X, [W], OFFSETS, Activation("swiglu"))[0])


def test_results_not_asked_for_are_none() -> None:
    dpre, act, dprobs = ops.grouped_gemm_dact(
        DY, [W], OFFSETS, torch.randn(12, 32), Activation("swiglu"), need_act=False
    )
    assert dpre.shape == (12, 32) and act is None and dprobs is None


@pytest.mark.parametrize("activation", [Activation("srelu"), Activation("clamped_swiglu", 7.0, -1.5, 0.25)])
def test_activation_survives_its_string(activation: Activation) -> None:
    assert Activation.decode(activation.encode()) == activation


def test_activation_refuses_bad_constants() -> None:
    with pytest.raises(ValueError, match="limit must be positive"):
        Activation("clamped_swiglu", 0.0)
    with pytest.raises(ValueError, match="unknown activation"):
        Activation("mish")
    with pytest.raises(ValueError, match="belong to clamped_swiglu"):
        Activation("swiglu", alpha=2.0)
