"""The reference against torch.nn.functional, hand-computed values, and its own loop over groups."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from cute_kernels import activation_reference, reference
from cute_kernels.activation import KINDS, Activation
from tests.cases import SPLITS, Splits
from tests.compare import assert_bitwise_equal

G64 = torch.float64


def some_activation(kind: str) -> Activation:
    """One of this kind, with constants that its values notice."""
    constants = {
        "clamped_swiglu": {"limit": 0.8, "alpha": 1.3, "offset": 0.5},
        "situglu": {"beta1": 1.5, "beta2": 2.0},
        "tanh_srelu": {"clamp_scale": 0.75},
    }
    return Activation(kind, **constants.get(kind, {}))


def _weights(splits: Splits, rows: int, cols: int) -> torch.Tensor:
    return torch.randn(splits.groups, rows, cols, dtype=G64)


def _poisoned(splits: Splits, cols: int) -> torch.Tensor:
    x = torch.randn(splits.rows, cols, dtype=G64)
    x[splits.used :] = float("nan")
    return x


@pytest.mark.parametrize("splits", SPLITS, ids=str)
def test_products_equal_a_loop_over_torch_linear(splits: Splits) -> None:
    w, b, s = _weights(splits, 24, 16), torch.randn(splits.groups, 24, dtype=G64), torch.rand(splits.rows, dtype=G64)
    x, dy = _poisoned(splits, 16), _poisoned(splits, 24)
    offsets = reference.group_offsets(splits.tensor(), splits.rows)
    y = reference.grouped_gemm(x, [w], offsets, b, s)
    dx = reference.grouped_gemm_dgrad(dy, list(w), offsets)
    dw = reference.grouped_wgrad(dy, x, offsets)
    db = reference.grouped_dbias(dy, offsets, s)
    ds = reference.grouped_dscale(dy, b, offsets)
    for g, rows in enumerate(splits.slices()):
        torch.testing.assert_close(y[rows], F.linear(x[rows], w[g]) + s[rows, None] * b[g])
        torch.testing.assert_close(dx[rows], dy[rows] @ w[g])
        torch.testing.assert_close(dw[g], dy[rows].t() @ x[rows])
        torch.testing.assert_close(db[g], (s[rows, None] * dy[rows]).sum(0))
        torch.testing.assert_close(ds[rows], (dy[rows] * b[g]).sum(1))
    for row_shaped in (y, dx, ds):
        assert (row_shaped[splits.used :] == 0).all()


def test_group_offsets_never_leave_the_buffer() -> None:
    assert reference.group_offsets(torch.tensor([4, -3, 5]), 20).tolist() == [0, 4, 4, 9]
    assert reference.group_offsets(torch.tensor([4, 2**31, 5]), 20).tolist() == [0, 4, 20, 20]
    assert reference.group_offsets(torch.tensor([2**62] * 4), 40).tolist() == [0, 40, 40, 40, 40]
    assert reference.group_offsets(torch.tensor([3, 3], dtype=torch.int32), 4).dtype == torch.int32


def test_interleave_blocks() -> None:
    plain = torch.arange(12)
    assert reference.interleave(plain, 1, 0).tolist() == [0, 6, 1, 7, 2, 8, 3, 9, 4, 10, 5, 11]
    assert reference.interleave(plain, 3, 0).tolist() == [0, 1, 2, 6, 7, 8, 3, 4, 5, 9, 10, 11]
    for block in (0, 1, 2, 3, 6):
        assert reference.deinterleave(reference.interleave(plain, block, 0), block, 0).tolist() == plain.tolist()


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("swiglu", lambda z: F.silu(z[..., :8]) * z[..., 8:]),
        ("geglu", lambda z: F.gelu(z[..., :8], approximate="tanh") * z[..., 8:]),
        ("gelu", lambda z: F.gelu(z, approximate="tanh")),
        ("silu", F.silu),
        ("relu", F.relu),
        ("srelu", lambda z: F.relu(z).square()),
        ("qgelu", lambda z: z * torch.sigmoid(1.702 * z)),
        ("glu", lambda z: F.glu(z.roll(8, -1), -1)),  # torch's gate is the second half
        ("qgeglu", lambda z: z[..., :8] * torch.sigmoid(1.702 * z[..., :8]) * z[..., 8:]),
        ("reglu", lambda z: F.relu(z[..., :8]) * z[..., 8:]),
        ("sreglu", lambda z: F.relu(z[..., :8]).square() * z[..., 8:]),
        (
            "situglu",
            lambda z: 1.5 * torch.tanh(z[..., :8] / 1.5) * torch.sigmoid(z[..., :8]) * 2.0 * torch.tanh(z[..., 8:] / 2),
        ),
        ("tanh_srelu", lambda z: (0.75 * torch.tanh(F.relu(z) / 0.75)).square()),
    ],
)
def test_activations_equal_torch(kind, expected) -> None:
    z = torch.randn(5, 16, dtype=G64)
    torch.testing.assert_close(reference.activation_forward(z, some_activation(kind)), expected(z))


@pytest.mark.parametrize(
    ("constants", "gate", "linear", "expected"),
    [
        ((7.0, 1.702, 1.0), 10.0, -9.0, -41.99972),
        ((7.0, 1.702, 1.0), -8.0, 2.0, -2.92993e-5),
        ((7.0, 1.702, 1.0), 3.0, 8.0, 23.85543),
        ((10.0, 1.0, 0.0), 10.0, -9.0, -89.99591),
    ],
)
def test_clamped_swiglu_hand_computed(constants, gate, linear, expected) -> None:
    z = torch.tensor([[gate, linear]])
    value = reference.activation_forward(z, Activation("clamped_swiglu", *constants))
    torch.testing.assert_close(value.item(), expected, rtol=1e-5, atol=0)


def test_clamped_swiglu_gradient_stops_at_the_clamp() -> None:
    act = Activation("clamped_swiglu", 7.0, 1.702, 1.0)
    grads, _ = reference.activation_backward(torch.ones(2, 1), torch.tensor([[10.0, 1.0], [1.0, -9.0]]), act)
    assert grads[0, 0] == 0 and grads[0, 1] != 0
    assert grads[1, 1] == 0 and grads[1, 0] != 0


def test_clamped_without_constants_is_swiglu_exactly() -> None:
    z = torch.randn(7, 32, dtype=torch.bfloat16)
    plain, free = Activation("swiglu"), Activation("clamped_swiglu", None, 1.0, 0.0)
    assert_bitwise_equal(reference.activation_forward(z, free), reference.activation_forward(z, plain))
    dy = torch.randn(7, 16, dtype=torch.bfloat16)
    for a, b in zip(
        reference.activation_backward(dy, z, free, need_dprobs=True),
        reference.activation_backward(dy, z, plain, need_dprobs=True),
        strict=True,
    ):
        assert_bitwise_equal(a, b)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scaled", [False, True])
def test_activation_gradients_equal_autograd(kind: str, scaled: bool) -> None:
    act = some_activation(kind)
    z = torch.randn(6, 16, dtype=G64, requires_grad=True)
    p = torch.rand(6, dtype=G64, requires_grad=True) if scaled else None
    y = reference.activation_forward(z, act, p)
    dy = torch.randn_like(y)
    wanted = torch.autograd.grad(y, [z, *([p] if scaled else [])], dy)
    dz, dp = reference.activation_backward(dy, z.detach(), act, p, need_dprobs=scaled)
    torch.testing.assert_close(dz, wanted[0])
    if scaled:
        torch.testing.assert_close(dp, wanted[1])


@pytest.mark.parametrize("block", [0, 1, 4])
def test_fused_products_are_their_parts(block: int) -> None:
    """grouped_gemm_act and grouped_gemm_dact against autograd through a per-group loop, weights interleaved."""
    splits = SPLITS[0]
    act, offsets = Activation("swiglu"), reference.group_offsets(splits.tensor(), splits.rows)
    x, w1, w2 = torch.randn(splits.rows, 16, dtype=G64), _weights(splits, 16, 16), _weights(splits, 12, 8)
    probs = torch.rand(splits.rows, dtype=G64, requires_grad=True)
    pre = torch.cat([x[r] @ reference.deinterleave(w1[g], block, 0).t() for g, r in enumerate(splits.slices())])
    pre.requires_grad_()
    out = F.silu(pre[:, :8]) * pre[:, 8:] * probs[:, None]
    y = torch.cat([out[r] @ w2[g].t() for g, r in enumerate(splits.slices())])
    dy = torch.randn_like(y)
    wanted = torch.autograd.grad(y, [pre, probs], dy)
    got_act, got_pre = reference.grouped_gemm_act(x, [w1], offsets, act, None, probs.detach(), block)
    torch.testing.assert_close(got_pre, pre.detach())
    torch.testing.assert_close(got_act, out.detach())
    dpre, again, dprobs = reference.grouped_gemm_dact(dy, [w2], offsets, got_pre, act, probs.detach(), need_dprobs=True)
    torch.testing.assert_close(dpre, wanted[0])
    torch.testing.assert_close(dprobs, wanted[1])
    assert_bitwise_equal(again, got_act)
    dw = reference.grouped_wgrad(dpre, x, offsets, block)
    rows = splits.slices()[1]
    torch.testing.assert_close(reference.deinterleave(dw[1], block, 0), dpre[rows].t() @ x[rows])


def test_preactivation_is_rounded_once_after_the_bias() -> None:
    """The sum is just above half a BF16 step over 1, so it rounds up; rounding the product first would lose it."""
    x, w = torch.tensor([[1.0, 2**-9]]).bfloat16(), torch.tensor([[[1.0, 1.0]]]).bfloat16()
    bias = torch.tensor([[2**-9 + 2**-12]]).bfloat16()
    y = reference.grouped_gemm(x, [w], torch.tensor([0, 1], dtype=torch.int32), bias)
    assert y.item() == 1 + 2**-7


def test_wgrad_into_callers_buffers() -> None:
    splits = SPLITS[2]
    offsets = reference.group_offsets(splits.tensor(), splits.rows)
    dy, x = torch.randn(splits.rows, 8).bfloat16(), torch.randn(splits.rows, 16).bfloat16()
    dw = torch.stack([dy[r].float().t() @ x[r].float() for r in splits.slices()])
    stacked = torch.full((splits.groups, 8, 16), 3.0)
    separate = [torch.full((8, 16), 3.0) for _ in range(splits.groups)]
    reference.grouped_wgrad_([stacked], dy, x, offsets, accumulate=True)
    reference.grouped_wgrad_(separate, dy, x, offsets, accumulate=False)
    torch.testing.assert_close(stacked, dw + 3)
    torch.testing.assert_close(torch.stack(separate), dw)


@pytest.mark.parametrize("shape", [(37, 24), (5, 7, 24), (0, 24)])
@pytest.mark.parametrize("kind", KINDS)
def test_large_activations_are_computed_in_parts(
    kind: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    act = some_activation(kind)
    z, p = torch.randn(shape).bfloat16(), torch.rand(shape[:-1])
    dy = torch.randn(*shape[:-1], 24 // act.halves).bfloat16()
    runs = []
    for limit in (1 << 22, 60):
        monkeypatch.setattr(activation_reference, "AT_ONCE", limit)
        for probs in (None, p):
            dpreact, dprobs = reference.activation_backward(dy, z, act, probs, need_dprobs=True)
            runs.append((reference.activation_forward(z, act, probs), dpreact, dprobs))
    for whole, parts in ((runs[0], runs[2]), (runs[1], runs[3])):
        for got, want in zip(parts, whole, strict=True):
            torch.testing.assert_close(got, want)


def test_a_product_into_a_buffer_whose_tail_another_zeroed() -> None:
    offsets = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    x, w1, w2 = torch.randn(7, 4), torch.randn(3, 6, 4), torch.randn(3, 8, 3)
    y = torch.full((7, 8), float("nan"))
    act, _ = reference.grouped_gemm_act(x, [w1], offsets, Activation("swiglu"), zero_tail_of=y)
    assert y[:5].isnan().all() and not y[5:].any()
    reference.grouped_gemm_(y, act, [w2], offsets)
    assert_bitwise_equal(y, reference.grouped_gemm(act, [w2], offsets))
    y[5:] = 1
    reference.grouped_gemm_(y, act, [w2], offsets)
    assert (y[5:] == 1).all()
