"""The FP8 reference: layouts worked out by hand, groups that never mix, gradients of exact sums."""

from __future__ import annotations

import pytest
import torch

from cute_kernels import fp8_reference as fp8
from cute_kernels.activation import Activation
from cute_kernels.quantization.groups import padded_rows
from tests.cases import OFF_TILE, SPLITS, TAIL, Splits
from tests.compare import assert_bitwise_equal

NAN = float("nan")


def offsets_of(splits: Splits) -> tuple[torch.Tensor, torch.Tensor]:
    return fp8.padded_group_offsets(splits.tensor(), splits.rows)


def small_integers(rows: int, columns: int) -> torch.Tensor:
    """Values that E4M3 holds exactly at any scale that is a power of two."""
    return torch.randint(-3, 4, (rows, columns)).bfloat16()


def test_padded_offsets_by_hand():
    offsets, padded = fp8.padded_group_offsets(torch.tensor([1, 0, 128, 129, 5]), 262)
    assert offsets.tolist() == [0, 1, 1, 129, 258, 262]
    assert padded.tolist() == [0, 128, 128, 256, 512, 640]
    assert padded.dtype == torch.int32
    assert fp8.padded_group_offsets(torch.tensor([1, 0, 33]), 40, 32)[1].tolist() == [0, 32, 32, 96]
    for multiple in (0, -32, 129):
        with pytest.raises(ValueError, match=f"multiple is {multiple}, needs 1 to 128"):
            fp8.padded_group_offsets(torch.tensor([1]), 1, multiple)


@pytest.mark.parametrize("splits", SPLITS, ids=str)
@pytest.mark.parametrize("power_of_two", [True, False])
def test_both_copies_stand_for_x(splits, power_of_two):
    columns = 200
    x = torch.randn(splits.rows, columns).bfloat16()
    x[splits.used :] = NAN
    offsets, padded = offsets_of(splits)
    copies = fp8.fp8_quantize(x, offsets, padded, column_sums=True, power_of_two=power_of_two)
    assert copies.data.shape == x.shape and copies.data.dtype == torch.float8_e4m3fn
    assert copies.scale.shape == (2, fp8.scales_in_row(splits.rows))
    room = padded_rows(splits.rows, splits.groups)
    assert copies.data_t.shape == (columns, room) and copies.scale_t.shape == (room // 128, columns)
    factor = copies.scale[:, : splits.rows].t().repeat_interleave(128, 1)[:, :columns]
    values, values_t = copies.data.float() * factor, fp8.dequantized_t(copies.data_t, copies.scale_t)
    for g, part in enumerate(splits.slices()):
        there = slice(int(padded[g]), int(padded[g]) + splits.sizes[g])
        for got in (values[part], values_t[:, there].t()):
            assert ((got - x[part].float()).abs() <= x[part].float().abs() / 16 + 1e-2).all()
        filled = values_t[:, there.stop : int(padded[g + 1])]
        assert_bitwise_equal(filled, torch.zeros_like(filled))
        torch.testing.assert_close(copies.sums[g], x[part].float().sum(0))


def test_only_what_was_asked_for():
    x, (offsets, padded) = small_integers(TAIL.rows, 16), offsets_of(TAIL)
    assert fp8.fp8_quantize(x, offsets, padded, columnwise=False)[2:] == (None, None, None)
    assert fp8.fp8_quantize(x, offsets, padded, rowwise=False)[:2] == (None, None)
    assert fp8.fp8_quantize_weight([x], columnwise=False)[2:] == (None, None)


def test_weights_hold_the_same_values_in_both_copies():
    weights = [torch.randn(144, 272).bfloat16() for _ in range(3)]
    separate, stacked = fp8.fp8_quantize_weight(weights), fp8.fp8_quantize_weight([torch.stack(weights)])
    for a, b in zip(separate, stacked, strict=True):
        assert_bitwise_equal(a, b)
    data, scale, data_t, scale_t = stacked
    assert scale.shape == (3, 2, 4) and scale_t.shape == (3, 3, 4)
    assert_bitwise_equal(data_t, data.mT.contiguous())
    assert_bitwise_equal(scale_t[..., :2], scale[..., :3].mT.contiguous())
    assert scale[..., 3:].isnan().all() and scale_t[..., 2:].isnan().all()


@pytest.mark.parametrize("splits", SPLITS, ids=str)
@pytest.mark.parametrize("block", [0, 4])
def test_weight_gradients_of_exact_sums(splits, block):
    dy, x = small_integers(splits.rows, 48), small_integers(splits.rows, 32)
    dy[splits.used :] = x[splits.used :] = NAN
    offsets, padded = offsets_of(splits)
    dy_t, x_t = (fp8.fp8_quantize(t, offsets, padded, rowwise=False)[2:4] for t in (dy, x))
    dw = fp8.fp8_grouped_wgrad(*dy_t, *x_t, padded, block)
    want = torch.stack([dy[part].float().t() @ x[part].float() for part in splits.slices()])
    want = fp8.reference.interleave(want, block, 1)
    assert torch.equal(dw, want.bfloat16())
    buffers = [torch.ones(48, 32) for _ in splits.sizes]
    fp8.fp8_grouped_wgrad_(buffers, *dy_t, *x_t, padded, block, accumulate=True)
    assert torch.equal(torch.stack(buffers), want + 1)


def test_groups_do_not_mix():
    """A huge value, and NaN, in one group leave the others' bytes alone."""
    x, (offsets, padded) = torch.randn(OFF_TILE.rows, 32).bfloat16(), offsets_of(OFF_TILE)
    before = fp8.fp8_quantize(x, offsets, padded)
    spoiled = x.clone()
    spoiled[OFF_TILE.slices()[1]] = torch.tensor([NAN, 1e30]).bfloat16().repeat(16)
    after = fp8.fp8_quantize(spoiled, offsets, padded)
    for g in (0, 2, 3):
        rows, tokens = OFF_TILE.slices()[g], slice(int(padded[g]), int(padded[g + 1]))
        assert_bitwise_equal(after.data[rows], before.data[rows])
        assert_bitwise_equal(after.data_t[:, tokens], before.data_t[:, tokens])


def rows_of(x, splits):
    return fp8.fp8_quantize(x, *offsets_of(splits), columnwise=False)[:2]


@pytest.mark.parametrize("splits", SPLITS, ids=str)
def test_products_of_exact_sums(splits):
    x, w = small_integers(splits.rows, 144), small_integers(splits.groups * 160, 144).view(-1, 160, 144)
    x[splits.used :] = NAN
    bias, (offsets, _) = small_integers(splits.groups, 160), offsets_of(splits)
    want = fp8.reference.grouped_gemm(x, [w], offsets, bias)
    assert_bitwise_equal(
        fp8.fp8_grouped_gemm(*rows_of(x, splits), *fp8.fp8_quantize_weight([w])[:2], offsets, bias), want
    )


def test_product_of_the_transposed_copy_and_of_halves():
    dy, w = small_integers(TAIL.rows, 384), small_integers(2 * 384, 48).view(2, 384, 48)
    splits, offsets = Splits("two", (20, 9), TAIL.rows), torch.tensor([0, 20, 29], dtype=torch.int32)
    w_t = fp8.fp8_quantize_weight([w])[2:]
    want = fp8.reference.grouped_gemm_dgrad(dy, [w], offsets)
    assert_bitwise_equal(fp8.fp8_grouped_gemm(*rows_of(dy, splits), *w_t, offsets), want)
    halves = [rows_of(half.contiguous(), splits) for half in dy.chunk(2, 1)]
    data = torch.cat([half[0].view(torch.uint8) for half in halves], 1).view(torch.float8_e4m3fn)
    scale = torch.cat([half[1] for half in halves])
    assert scale.shape == (4, 40)  # each half of 192 columns has two blocks
    assert_bitwise_equal(fp8.fp8_grouped_gemm(data, scale, *w_t, offsets, halves=2), want)


@pytest.mark.parametrize("activation", [Activation("srelu"), Activation("swiglu")], ids=lambda a: a.kind)
def test_activation_and_gradient_are_quantised_from_fp32(activation):
    splits, halves = OFF_TILE, activation.halves
    x, w1 = small_integers(splits.rows, 48), torch.randn(splits.groups, halves * 192, 48).bfloat16()
    w2, dy = torch.randn(splits.groups, 48, 192).bfloat16(), small_integers(splits.rows, 48)
    offsets, padded = offsets_of(splits)
    weights, probs = fp8.fp8_quantize_weight([w1])[:2], torch.rand(splits.rows)
    act, preact = fp8.fp8_grouped_gemm_act(*rows_of(x, splits), *weights, offsets, padded, activation, None, probs)
    assert_bitwise_equal(preact, fp8.fp8_grouped_gemm(*rows_of(x, splits), *weights, offsets))
    p = probs.bfloat16()
    value = fp8.reference.activation_forward(preact.float(), activation, p)
    for mine, want in zip(act[:4], fp8.fp8_quantize(value, offsets, padded), strict=False):
        assert_bitwise_equal(mine, want)
    w2_t = fp8.fp8_quantize_weight([w2])[2:]
    copies, dprobs = fp8.fp8_grouped_gemm_dact(
        *rows_of(dy, splits), *w2_t, offsets, padded, preact, activation, probs, need_dprobs=True, need_dbias=True
    )
    exact = fp8.reference.grouped_gemm(fp8.dequantized(*rows_of(dy, splits)), [fp8.dequantized_weights(*w2_t)], offsets)
    dpreact, want = fp8.reference.dact(exact, preact.float(), offsets, p, activation, True)
    assert_bitwise_equal(dprobs, want)
    assert copies.scale.shape[0] == 2 * halves and copies.data.shape == dpreact.shape
    error = fp8.dequantized(copies.data, copies.scale, halves) - dpreact
    assert error.norm() <= 0.04 * dpreact.norm()
    assert_bitwise_equal(copies.data_t, fp8.fp8_quantize(dpreact, offsets, padded, False).data_t)
    torch.testing.assert_close(copies.sums, fp8.reference.grouped_dbias(dpreact, offsets))
