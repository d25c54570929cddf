"""Quantised rows of groups: each group as if it were alone, padded without a sync, zero where nobody's rows are."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch.nn import functional as F

from cute_kernels.quantization.formats import E4M3, E5M2, Format, fp8_block, fp8_tensor, mxfp8, nvfp4
from cute_kernels.quantization.groups import (
    GroupedQuantized,
    dequantize_groups,
    group_amax,
    group_multiple,
    is_padded,
    pad_groups,
    padded_offsets,
    padded_rows,
    quantize_groups,
    quantize_padded,
    unpad_groups,
)
from cute_kernels.quantization.quantize import dequantize, quantize
from cute_kernels.reference import group_offsets
from tests.cases import SPLITS, Splits
from tests.compare import assert_bitwise_equal
from tests.oracle_values import values

K = 64
FORMATS = [
    fp8_tensor(),
    fp8_tensor(E5M2, True),
    fp8_block(),
    fp8_block(E5M2, 2),
    mxfp8(),
    mxfp8(E4M3, 2),
    nvfp4(),
    nvfp4(2),
    nvfp4(hadamard=True),
]


def rows_of(splits: Splits) -> tuple[torch.Tensor, torch.Tensor]:
    """(x with NaN and infinities in the tail, offsets); every group has its own range of magnitudes."""
    x = values(splits.rows, K)
    for g, rows in enumerate(splits.slices()):
        x[rows] *= 2.0 ** (3 * g)
    x[splits.used :] = float("nan")
    x[splits.used :, 0] = float("inf")
    return x, group_offsets(splits.tensor(), splits.rows)


def groups_of(quantized: GroupedQuantized, format: Format, columnwise: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(data, scale) of each group, cut from the whole along the tokens."""
    data, scale, _, offsets = quantized
    bounds, cut = offsets.tolist(), []
    token_dim = 1 if columnwise and format.transposes else 0
    for g in range(len(bounds) - 1):
        packed = format.element.packed if token_dim else 1
        rows = slice(bounds[g] // packed, bounds[g + 1] // packed)
        part = data[:, rows] if token_dim else data[rows]
        if format.block is None:
            cut.append((part, scale[g]))
            continue
        along = format.block[1] if columnwise or format.is_square else format.block[0]
        blocks = slice(bounds[g] // along, bounds[g + 1] // along)
        cut.append((part, scale[:, blocks] if token_dim else scale[blocks]))
    return cut


@pytest.mark.parametrize("splits", SPLITS, ids=str)
@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("columnwise", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_each_group_is_as_if_alone(format: Format, splits: Splits, columnwise: bool, padded: bool) -> None:
    x, offsets = rows_of(splits)
    quantized = quantize_groups(x, offsets, format, columnwise, padded)
    back = dequantize_groups(quantized, format, columnwise)
    padded = padded or is_padded(format, columnwise)
    for g, ((data, scale), rows) in enumerate(
        zip(groups_of(quantized, format, columnwise), splits.slices(), strict=True)
    ):
        alone = x[rows]
        if padded:
            alone = F.pad(alone, (0, 0, 0, -len(alone) % group_multiple(format)))
        want = quantize(alone, format, columnwise)
        assert_bitwise_equal(data, want.data, f"data of group {g}")
        assert_bitwise_equal(scale, want.scale, f"scale of group {g}")
        if want.amax is not None:
            assert quantized.amax is not None
            assert_bitwise_equal(quantized.amax[g], want.amax, f"amax of group {g}")
        lies = slice(int(quantized.offsets[g]), int(quantized.offsets[g + 1]))
        assert_bitwise_equal(back[lies], dequantize(want, format, columnwise), f"group {g} dequantised")
    end = int(quantized.offsets[-1])
    assert (back[end:] == 0).all()
    if columnwise and format.transposes:
        assert (quantized.data[:, end // format.element.packed :].float() == 0).all()
    else:
        assert (quantized.data[end:].float() == 0).all()
    assert quantized.scale.float().isfinite().all()


def test_what_groups_are_padded_to() -> None:
    """MXFP8's blocks of 32 need no more; elsewhere a block, a tile of scales or a transposed copy's rows do."""
    assert [group_multiple(format) for format in FORMATS] == [128, 128, 128, 128, 32, 32, 128, 128, 128]


@pytest.mark.parametrize("splits", SPLITS, ids=str)
@pytest.mark.parametrize("multiple", [32, 128])
def test_padding(splits: Splits, multiple: int) -> None:
    x, offsets = rows_of(splits)
    padded, moved = pad_groups(x, offsets, multiple)
    back = unpad_groups(padded, offsets, splits.rows, multiple)
    starts = moved.tolist()
    assert [start % multiple for start in starts] == [0] * len(starts)
    assert [b - a for a, b in pairwise(starts)] == [-(-size // multiple) * multiple for size in splits.sizes]
    assert starts[-1] <= len(padded) == padded_rows(splits.rows, splits.groups, multiple)
    assert int((padded != 0).sum()) == int((x[: splits.used] != 0).sum())
    for g, rows in enumerate(splits.slices()):
        assert_bitwise_equal(padded[starts[g] : starts[g] + splits.sizes[g]], x[rows], f"group {g}")
    assert_bitwise_equal(back[: splits.used], x[: splits.used], "back")
    assert (back[splits.used :] == 0).all()


@pytest.mark.parametrize("format", [nvfp4(), nvfp4(hadamard=True), mxfp8()], ids=str)
@pytest.mark.parametrize("columnwise", [False, True])
def test_rows_that_are_padded_already_and_maxima_that_are_known(format: Format, columnwise: bool) -> None:
    x, offsets = rows_of(SPLITS[1])
    want = quantize_groups(x, offsets, format, columnwise, padded=True)
    padded, places = pad_groups(x, offsets, group_multiple(format))
    for amax in (None, want.amax):
        got = quantize_padded(padded, places, format, columnwise, amax=amax)
        for a, b in zip(got, want, strict=True):
            assert (a is None) == (b is None)
            if a is not None and b is not None:
                assert_bitwise_equal(a, b)


def test_worst_case_is_reached_and_never_passed() -> None:
    assert padded_rows(0, 8) == 0
    assert padded_rows(1, 8) == 128  # only one group can have a row
    assert padded_rows(8, 8) == 8 * 128
    assert padded_rows(1000, 4) == 1000 // 128 * 128 + 4 * 128
    assert padded_rows(1000, 4, 32) == (1000 // 32 + 4) * 32
    for sizes in ((1, 1, 1, 997), (129, 129, 129, 613), (1000, 0, 0, 0)):
        for multiple in (32, 128):
            ends = padded_offsets(group_offsets(torch.tensor(sizes), 1000), multiple)
            assert ends[-1] <= padded_rows(1000, 4, multiple)
    assert padded_offsets(torch.tensor([0, 3, 3, 40], dtype=torch.int32), 32).tolist() == [0, 32, 32, 96]


def test_amax_of_groups() -> None:
    offsets = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    lines = torch.tensor([1.0, 3.0, 2.0, float("nan"), 1.0, 9.0])
    amax = group_amax(lines, offsets)
    assert amax[:2].tolist() == [3.0, 0.0] and amax[2].isnan()


def test_nan_of_one_group_stays_there() -> None:
    x, offsets = values(96, K), torch.tensor([0, 40, 96], dtype=torch.int32)
    clean = x.clone()
    x[50, 3] = float("nan")
    for format in FORMATS:
        for columnwise in (False, True):
            bad = groups_of(quantize_groups(x, offsets, format, columnwise), format, columnwise)
            good = groups_of(quantize_groups(clean, offsets, format, columnwise), format, columnwise)
            assert_bitwise_equal(bad[0][0], good[0][0], f"{format}: data of the other group")
            assert_bitwise_equal(bad[0][1], good[0][1], f"{format}: scale of the other group")


def test_errors() -> None:
    offsets = torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(ValueError, match="K is 40, needs a multiple of 32"):
        quantize_groups(torch.zeros(4, 40), offsets, mxfp8())
    with pytest.raises(ValueError, match=r"offsets are \[1\] on cpu, needs x \[T, K\] and offsets \[G\+1\] on cpu"):
        quantize_groups(torch.zeros(4, 32), offsets[:1], mxfp8())
    with pytest.raises(ValueError, match="state is None"):
        quantize_groups(torch.zeros(4, 32), offsets, nvfp4(stochastic=True))
