"""The MXFP8 operators for Hopper: shape functions, the reference's meaning, and what host functions refuse."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from cute_kernels import mxfp8_reference, ops
from cute_kernels.activation import Activation
from cute_kernels.fp8_reference import padded_group_offsets
from cute_kernels.hopper import mxfp8_quantize as host
from cute_kernels.hopper.configs import DACT_MXFP8, DACT_MXFP8_SUMS, SMEM_BYTES, TILES, choose, deepest
from cute_kernels.hopper.mxfp8_quantize_configs import RESTORE_WARPS, RESTORED_ROWS, WARPS
from cute_kernels.quantization.quantize import Quantized, parts_of
from fusible_ops.sharing import BOUNDED, COUNTED
from tests.cases import SPLITS, Splits
from tests.compare import assert_bitwise_equal
from tests.launches import recorded_launches

T, K, N, WIDTH = 24, 160, 192, 96
OFFSETS, PADDED = padded_group_offsets(torch.tensor([9, 0, 11]), T, 32)
SWIGLU, SRELU = Activation("swiglu"), Activation("srelu")
X, DY = torch.randn(T, K).bfloat16(), torch.randn(T, K).bfloat16()
W1, W2 = torch.randn(3, N, K).bfloat16(), torch.randn(3, K, WIDTH).bfloat16()
PREACT, PROBS = torch.randn(T, N).bfloat16(), torch.rand(T)
KEPT = mxfp8_reference.kept(PREACT, 2)
STORED = mxfp8_reference.mxfp8_quantize(X, OFFSETS, PADDED, stored=True)[2:]
CALLS = {
    "mxfp8_quantize": (X, OFFSETS, PADDED, True, True, True),
    "mxfp8_dequantize": (*STORED, OFFSETS, PADDED, T),
    "mxfp8_quantize_weight": ([*W1.unbind(0)], True, False),
    "mxfp8_grouped_gemm_act": (X, [W1], OFFSETS, SWIGLU.encode(), torch.randn(3, N).bfloat16(), PROBS, 32, True, False),
    "mxfp8_grouped_gemm_dact": (
        *(DY, [*W2.unbind(0)], OFFSETS, PREACT, None, SWIGLU.encode(), PROBS),
        *(True, True, True, True, True, 32),
    ),
}
QUANTISED = {
    "mxfp8_grouped_gemm_act": (*CALLS["mxfp8_grouped_gemm_act"][:-1], True),
    "mxfp8_grouped_gemm_dact": (DY, [W2], OFFSETS, *KEPT[:2], *CALLS["mxfp8_grouped_gemm_dact"][5:]),
}


@pytest.mark.parametrize("name", CALLS)
def test_operator_is_well_formed(name: str) -> None:
    """The shape function, by PyTorch's own checker."""
    operator = getattr(torch.ops.fusible_ops, name).default
    shares = {"sm_margin": 4, **({"counter": torch.zeros(1, dtype=torch.int32)} if name in COUNTED else {})}
    assert name in BOUNDED and list(shares) == [a.name for a in operator._schema.arguments if a.kwarg_only]
    for calls, how in itertools.product((CALLS, QUANTISED), ({}, shares)):
        if name in calls:
            torch.library.opcheck(operator, calls[name], how, test_utils=("test_faketensor",))
            operator(*calls[name], **how)


def bits(t: Tensor) -> Tensor:
    """One-byte floats as bytes, which can be compared."""
    return t.view(torch.uint8) if t.element_size() == 1 else t


def flat(results: tuple) -> list[Tensor]:
    """The tensors of results that may be quantised or None."""
    parts = (t for result in results for t in parts_of(result))
    return [t for t in parts if t is not None]


@pytest.mark.parametrize("flags", [(True, True, True), (True, False, False), (False, True, True)], ids=str)
@pytest.mark.parametrize("activation", [SWIGLU, SRELU], ids=lambda activation: activation.kind)
def test_cpu_tensors_get_the_reference(flags: tuple[bool, bool, bool], activation: Activation) -> None:
    """Every function, whatever is asked for; what is not is None."""
    preact = PREACT[:, : WIDTH * activation.halves].contiguous()
    kept = mxfp8_reference.kept(preact, activation.halves)
    calls: tuple[Callable, ...] = (
        lambda m: m.mxfp8_quantize(X, OFFSETS, PADDED, *flags),
        lambda m: m.mxfp8_quantize_weight([W1], *flags[:2]),
        lambda m: m.mxfp8_grouped_gemm_act(X, [W1], OFFSETS, activation, None, PROBS, save_preact=flags[1]),
        lambda m: m.mxfp8_grouped_gemm_dact(DY, [W2], OFFSETS, preact, activation, PROBS, *flags, *flags[1:2] * 2),
        lambda m: m.mxfp8_grouped_gemm_act(X, [W1], OFFSETS, activation, None, PROBS, 0, flags[1], True),
        lambda m: m.mxfp8_grouped_gemm_dact(DY, [W2], OFFSETS, kept, activation, PROBS, *flags, *flags[1:2] * 2),
    )
    for call in calls:
        got, want = call(ops), call(mxfp8_reference)
        assert [type(t) for t in got] == [type(t) for t in want]
        for a, b in zip(flat(got), flat(want), strict=True):
            assert_bitwise_equal(bits(a), bits(b))


def through_mxfp8(block: Tensor) -> Tensor:
    """One block, by its definition: the least power of two that brings its largest magnitude to 448 or below."""
    amax = block.float().abs().max()
    scale = torch.exp2(torch.ceil(torch.log2(amax.double() / 448))) if amax > 0 else torch.tensor(1.0)
    return ((block.double() / scale).float().to(torch.float8_e4m3fn).double() * scale).bfloat16()


@pytest.mark.parametrize("splits", SPLITS, ids=str)
def test_copies_by_definition(splits: Splits) -> None:
    """Blocks begin at a group's first row and never span two; what no group has does not count."""
    x = torch.randn(splits.rows, 64).bfloat16() * torch.randint(-9, 9, (splits.rows, 1)).float().exp2().bfloat16()
    x[splits.used :] = float("nan")
    offsets, padded = padded_group_offsets(splits.tensor(), splits.rows, 32)
    copies = mxfp8_reference.mxfp8_quantize(x, offsets, padded, stored=True)
    assert copies.data is not None and copies.scale is not None
    for part in splits.slices():
        for row in range(part.start, part.stop, max(1, (part.stop - part.start) // 5)):
            want = torch.cat([through_mxfp8(block) for block in x[row].split(32)])
            assert_bitwise_equal(copies.rows[row], want)
        for column in (0, 33, 63) if part.stop > part.start else ():
            want = torch.cat([through_mxfp8(block) for block in x[part, column].split(32)])
            assert_bitwise_equal(torch.cat([copies.columns[part, column]]), want)
    restored = mxfp8_reference.mxfp8_dequantize(copies.data, copies.scale, offsets, padded, splits.rows)
    assert_bitwise_equal(restored[: splits.used], copies.columns[: splits.used])


def test_a_kept_pre_activation_by_definition() -> None:
    """Blocks of 32 of a row; act is formed from what was quantised, its gradient at the values that are kept."""
    act, kept = mxfp8_reference.mxfp8_grouped_gemm_act(X, [W1], OFFSETS, SWIGLU, None, PROBS, quantize_preact=True)
    plain = mxfp8_reference.mxfp8_grouped_gemm_act(X, [W1], OFFSETS, SWIGLU, None, PROBS)
    assert_bitwise_equal(act, plain[0])
    assert isinstance(kept, Quantized) and isinstance(plain[1], Tensor)
    assert [t.shape for t in kept[:2]] == [*map(torch.Size, mxfp8_reference.kept_shapes(T, N, 2))]
    values = mxfp8_reference.kept_values(kept, 2).bfloat16()
    for row in (0, 8, 13):
        assert_bitwise_equal(values[row], torch.cat([through_mxfp8(block) for block in plain[1][row].split(32)]))
    got, want = (
        mxfp8_reference.mxfp8_grouped_gemm_dact(DY, [W2], OFFSETS, p, SWIGLU, PROBS, need_dprobs=True, need_dbias=True)
        for p in (kept, values)
    )
    for a, b in zip(got, want, strict=True):
        assert_bitwise_equal(a, b)


def test_weights_in_square_blocks_are_the_same_in_both_directions() -> None:
    rows, columns = ops.mxfp8_quantize_weight([W1], True, True)
    assert columns is not None
    assert_bitwise_equal(rows, columns)
    block = rows[1, 32:64, 64:96]
    assert_bitwise_equal(block, through_mxfp8(W1[1, 32:64, 64:96]))


@pytest.mark.parametrize("gated", [False, True])
def test_every_tile_of_the_gradient_fits(gated: bool) -> None:
    for tile in TILES[1:]:
        config = deepest(*tile, DACT_MXFP8, gated)
        assert config.smem_bytes() <= SMEM_BYTES and not config.refusals(DACT_MXFP8, gated)
    assert "registers" in str(deepest(128, 192, "dact", gated).refusals(DACT_MXFP8, gated))
    assert "registers" in str(deepest(128, 128, DACT_MXFP8, gated).refusals(DACT_MXFP8_SUMS, gated))
    for kind, rows in ((DACT_MXFP8, 128), (DACT_MXFP8_SUMS, 64)):
        config = choose(kind, 2048, gated=gated).config
        assert (config.tile_m, config.tile_n) == (rows, 128)


def test_launches_have_a_piece_for_each_warp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of as many warps as the kernel in question has; nothing runs."""
    launched = recorded_launches(monkeypatch, host)
    x, places = torch.zeros(96 * 32, 128).bfloat16(), torch.tensor([0, 96 * 32], dtype=torch.int32)
    pieces = mxfp8_reference.stored_shapes(96 * 32, 1, 128)[0][0] // 32
    kinds = [kind for kind in itertools.product((False, True), repeat=3) if any(kind)]
    for kind in kinds:
        host.mxfp8_quantize(x, places, places, *kind)
    assert [options for options, _ in launched] == [host.QuantizeOptions(*kind) for kind in kinds]
    assert [grid for _, grid in launched] == [-(-pieces // WARPS)] * len(kinds)
    launched.clear()
    for columnwise, square in itertools.product((False, True), repeat=2):
        host.mxfp8_quantize_weight([x], columnwise, square)
    assert [grid for _, grid in launched] == [8] * 4
    data, scale = mxfp8_reference.mxfp8_quantize(x, places, places, False, False, True)[2:]
    host.mxfp8_dequantize(data, scale, places, places, len(x))
    host.mxfp8_quantize(x, places, places, sm_margin=130)
    assert [grid for _, grid in launched[-2:]] == [-(-(pieces * 32 // RESTORED_ROWS) // RESTORE_WARPS), 2]
