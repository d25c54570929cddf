"""The NVFP4 operators for Hopper: shape functions, the reference's meaning, what is rounded how."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from cute_kernels import nvfp4_reference, ops
from cute_kernels.activation import Activation
from cute_kernels.fp8_reference import padded_group_offsets
from cute_kernels.hopper import mxfp8_quantize as mxfp8_host
from cute_kernels.hopper import nvfp4_quantize as host
from cute_kernels.hopper.nvfp4_quantize_configs import AMAX_WARPS, RESTORE_WARPS, warps_of
from cute_kernels.nvfp4_reference import alpha_of
from cute_kernels.quantization import formats
from cute_kernels.quantization.groups import pad_groups
from cute_kernels.quantization.hadamard import rotate
from cute_kernels.quantization.quantize import dequantize, quantize
from cute_kernels.quantization.random_bits import random_state
from fusible_ops.sharing import BOUNDED, COUNTED, WGRADS
from tests.cases import SPLITS, Splits
from tests.compare import assert_bitwise_equal
from tests.launches import recorded_launches

T, K, N, WIDTH = 24, 160, 192, 96
OFFSETS, PADDED = padded_group_offsets(torch.tensor([9, 0, 11]), T)
SWIGLU, SRELU = Activation("swiglu"), Activation("srelu")
X, DY = torch.randn(T, K).bfloat16(), torch.randn(T, K).bfloat16()
W1, W2 = torch.randn(3, N, K).bfloat16(), torch.randn(3, K, WIDTH).bfloat16()
PREACT, PROBS, AMAX = torch.randn(T, N).bfloat16(), torch.rand(T), torch.rand(3) + 1
STATE = random_state()
STORED = nvfp4_reference.nvfp4_quantize(X, OFFSETS, PADDED, None, AMAX, None, False, False, True)[2:]
COLUMNS = nvfp4_reference.nvfp4_dequantize(*STORED, PADDED)
AMAXES = (AMAX, AMAX)
CALLS = {
    "nvfp4_amax": (X, OFFSETS, PADDED, True),
    "nvfp4_quantize": (X, OFFSETS, PADDED, AMAX, AMAX, STATE, True, True, True, True),
    "nvfp4_dequantize": (*STORED, PADDED),
    "nvfp4_quantize_weight": ([*W1.unbind(0)], True, False),
    "nvfp4_grouped_gemm": (X, [W1], OFFSETS, *AMAXES, torch.randn(3, N).bfloat16(), PROBS),
    "nvfp4_grouped_gemm_dgrad": (PREACT, [*W1.unbind(0)], OFFSETS, *AMAXES, 32),
    "nvfp4_grouped_gemm_act": (
        *(X, [W1], OFFSETS, *AMAXES, SWIGLU.encode()),
        *(torch.randn(3, N).bfloat16(), PROBS, 32, True, True),
    ),
    "nvfp4_grouped_gemm_dact": (DY, [*W2.unbind(0)], OFFSETS, *AMAXES, PREACT, SWIGLU.encode(), PROBS, True, True),
    "nvfp4_grouped_wgrad": (COLUMNS, COLUMNS, PADDED, *AMAXES, 0),
    "nvfp4_grouped_wgrad_": ([torch.zeros(3, K, K)], COLUMNS, COLUMNS, PADDED, *AMAXES, 0, True),
}


@pytest.mark.parametrize("name", CALLS)
def test_operator_is_well_formed(name: str) -> None:
    """The shape function, by PyTorch's own checker."""
    operator = getattr(torch.ops.fusible_ops, name).default
    shares = {"sm_margin": 4, **({"counter": torch.zeros(1, dtype=torch.int32)} if name in COUNTED | WGRADS else {})}
    assert name in BOUNDED and list(shares) == [a.name for a in operator._schema.arguments if a.kwarg_only]
    for how in ({}, shares):
        torch.library.opcheck(operator, CALLS[name], how, test_utils=("test_faketensor",))
        operator(*CALLS[name], **how)


def bits(t: Tensor) -> Tensor:
    """One-byte floats as bytes, which can be compared."""
    return t.view(torch.uint8) if t.element_size() == 1 else t


@pytest.mark.parametrize("flags", [(True, True, True), (True, False, False), (False, True, True)], ids=str)
@pytest.mark.parametrize("activation", [SWIGLU, SRELU], ids=lambda activation: activation.kind)
def test_cpu_tensors_get_the_reference(flags: tuple[bool, bool, bool], activation: Activation) -> None:
    """Every function with optional results, whatever is asked for; what is not is None."""
    preact = PREACT[:, : WIDTH * activation.halves].contiguous()
    calls: tuple[Callable, ...] = (
        lambda m: m.nvfp4_amax(X, OFFSETS, PADDED, flags[1]),
        lambda m: m.nvfp4_quantize(X, OFFSETS, PADDED, *AMAXES, None, *flags, True),
        lambda m: m.nvfp4_quantize_weight([W1], *flags[:2]),
        lambda m: m.nvfp4_grouped_gemm_act(X, [W1], OFFSETS, *AMAXES, activation, None, PROBS, 0, *flags[1:]),
        lambda m: m.nvfp4_grouped_gemm_dact(DY, [W2], OFFSETS, *AMAXES, preact, activation, PROBS, *flags[1:]),
    )
    for call in calls:
        got, want = call(ops), call(nvfp4_reference)
        assert [t is None for t in got] == [t is None for t in want]
        for a, b in zip(got, want, strict=True):
            if b is not None:
                assert_bitwise_equal(bits(a), bits(b))


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("splits", SPLITS, ids=str)
def test_copies_by_the_format(splits: Splits, rotated: bool) -> None:
    """With its group's alpha, each copy is what the format says of the group alone; tails do not count."""
    x = torch.randn(splits.rows, 64).bfloat16() * torch.randint(-9, 9, (splits.rows, 1)).float().exp2().bfloat16()
    x[splits.used :] = float("nan")
    offsets, padded = padded_group_offsets(splits.tensor(), splits.rows)
    amax, turned = nvfp4_reference.nvfp4_amax(x, offsets, padded, rotated)
    column_amax = amax if turned is None else turned
    how = (amax, column_amax, None, True, True, True, rotated)
    copies = nvfp4_reference.nvfp4_quantize(x, offsets, padded, *how)
    assert copies.rows is not None and copies.columns is not None
    assert copies.data is not None and copies.scale is not None
    format = formats.nvfp4(hadamard=rotated)
    for group, part in enumerate(splits.slices()):
        if part.stop == part.start:
            continue
        alone, _ = pad_groups(x[part], torch.tensor([0, part.stop - part.start], dtype=torch.int32))
        for mine, columnwise, places, largest in (
            (copies.rows, False, part, amax),
            (copies.columns, True, slice(int(padded[group]), int(padded[group + 1])), column_amax),
        ):
            want = dequantize(quantize(alone, format, columnwise), format, columnwise)
            got = mine[places].float() * (largest[group] * (1 / 2688))
            torch.testing.assert_close(got, want[: got.shape[0]], rtol=2**-22, atol=0)
    used = int(padded[-1])
    assert_bitwise_equal(
        nvfp4_reference.nvfp4_dequantize(copies.data, copies.scale, padded)[:used], copies.columns[:used]
    )


def test_rotated_products_are_those_of_the_values() -> None:
    """A group's rotation is orthogonal on its padded rows, so a product over them is that over the rows."""
    wide, places = pad_groups(X, OFFSETS)
    turned = rotate(wide.float().mT.contiguous()).mT.contiguous()
    for group in range(3):
        part, there = slice(int(OFFSETS[group]), int(OFFSETS[group + 1])), slice(*places[group : group + 2].tolist())
        want = X[part].float().mT @ X[part].float()
        torch.testing.assert_close(turned[there].mT @ turned[there], want, rtol=1e-4, atol=1e-4)


def test_stochastic_rounding_is_right_in_the_mean_and_repeats() -> None:
    x = torch.rand(1, 64).bfloat16().expand(64, 64).contiguous()
    offsets, padded = padded_group_offsets(torch.tensor([64]), 64)
    amax, _ = nvfp4_reference.nvfp4_amax(x, offsets, padded, False)

    def rows(state: Tensor) -> Tensor:
        made = nvfp4_reference.nvfp4_quantize(x, offsets, padded, amax, None, state, True, False)
        assert made.rows is not None
        return made.rows * (amax / 2688)

    states = [random_state() for _ in range(64)]
    assert_bitwise_equal(rows(states[0]), rows(states[0]))
    assert not torch.equal(rows(states[0]), rows(states[1]))
    mean = torch.stack([rows(state).mean(0) for state in states]).mean(0)
    below = (x[0].view(-1, 16) < 0.9 * x[0].view(-1, 16).amax(1, keepdim=True)).flatten()  # what no scale saturates
    torch.testing.assert_close(mean[below], x[0].float()[below], atol=0.01, rtol=0)


def test_sums_are_scaled_before_a_bias_is_added() -> None:
    bias = torch.randn(3, N).bfloat16()
    y = ops.nvfp4_grouped_gemm(X, [W1], OFFSETS, *AMAXES, bias)
    alpha = alpha_of(AMAX, AMAX)
    want = alpha[2] * (X[9].float() @ W1[2].float().mT) + bias[2].float()
    torch.testing.assert_close(y[9].float(), want, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("splits", SPLITS, ids=str)
def test_products_leave_the_largest_magnitudes_of_what_they_store(splits: Splits, rotated: bool) -> None:
    x, dy, preact = (torch.randn(splits.rows, width).bfloat16() for width in (K, K, N))
    for t in (x, dy, preact):
        t[splits.used :] = float("nan")
    offsets, padded = padded_group_offsets(splits.tensor(), splits.rows)
    w1, w2 = torch.randn(splits.groups, N, K).bfloat16(), torch.randn(splits.groups, K, WIDTH).bfloat16()
    amaxes = torch.rand(splits.groups) + 1, torch.rand(splits.groups) + 1
    act, _, *of_act = ops.nvfp4_grouped_gemm_act(x, [w1], offsets, *amaxes, SWIGLU, rotated=rotated)
    dpreact, _, *of_dpreact = ops.nvfp4_grouped_gemm_dact(dy, [w2], offsets, *amaxes, preact, SWIGLU, rotated=rotated)
    for t, found in ((act, of_act), (dpreact, of_dpreact)):
        for a, b in zip(found, ops.nvfp4_amax(t, offsets, padded, rotated), strict=True):
            assert (a is None) == (b is None)
            if a is not None and b is not None:
                assert_bitwise_equal(a, b)


def test_launches_have_a_piece_for_each_warp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of as many warps as the kernel in question has; nothing runs."""
    launched = recorded_launches(monkeypatch, host)
    x, places = torch.zeros(100 * 16, 128).bfloat16(), torch.tensor([0, 100 * 16], dtype=torch.int32)
    amax, pieces = torch.ones(1), nvfp4_reference.stored_shapes(100 * 16, 1, 128)[0][0] // 16
    host.nvfp4_amax(x, places, places, True)
    assert launched.pop() == (host.AmaxOptions(True), -(-pieces // AMAX_WARPS))
    for columnwise, stored in ((True, False), (False, True), (True, True)):
        host.nvfp4_quantize(x, places, places, amax, amax, None, True, columnwise, stored)
    assert len(launched) == 4 and len({options for options, _ in launched}) == 3
    assert all(grid == -(-pieces // warps_of(options)) for options, grid in launched)
    launched.clear()
    host.nvfp4_quantize_weight([x])
    host.nvfp4_quantize_weight([x], square=True)
    assert [grid for _, grid in launched] == [-(-100 // warps) for warps in (24, 8, 24, 24)]
    data, scale = nvfp4_reference.nvfp4_quantize(x, places, places, None, amax, None, False, False, True)[2:]
    host.nvfp4_dequantize(data, scale, places)
    host.nvfp4_quantize(x, places, places, amax, None, columnwise=False, sm_margin=130)
    assert [grid for _, grid in launched[-2:]] == [-(-pieces // RESTORE_WARPS), 2]


def test_the_host_names_what_it_cannot_take() -> None:
    """No weights at all; largest magnitudes that lie apart."""
    for none in ([], [torch.empty(0, 32, 32, dtype=torch.bfloat16)]):
        for quantise in (host.nvfp4_quantize_weight, mxfp8_host.mxfp8_quantize_weight):
            with pytest.raises(ValueError, match="weights are none"):
                quantise(none)
    x, places = torch.zeros(32, 32).bfloat16(), torch.tensor([0, 16, 32], dtype=torch.int32)
    with pytest.raises(ValueError, match="column_amax needs to be contiguous"):
        host.nvfp4_quantize(x, places, places, torch.ones(2), torch.ones(2, 2)[:, 0])
