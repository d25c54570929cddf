"""QuantizedTensor: its bytes are the format's, its values are seen by everything, and it is a tensor in every way."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn import Parameter

from cute_kernels.quantization.formats import E4M3, E5M2, Format, fp8_block, fp8_tensor, mxfp8, nvfp4
from cute_kernels.quantization.groups import dequantize_groups, group_multiple, padded_offsets, quantize_groups
from cute_kernels.quantization.quantize import dequantize, quantize
from cute_kernels.quantization.scale_layout import storage_shape, to_storage
from cute_kernels.reference import group_offsets, tokens_only
from fusible_ops.groups import Groups
from fusible_ops.quantized_tensor import QuantizedTensor, quantized
from tests.cases import SMALL_SPLITS, Splits
from tests.compare import assert_bitwise_equal
from tests.oracle_values import values

FORMATS = [fp8_tensor(), fp8_tensor(E5M2), fp8_block(), fp8_block(dims=2), fp8_block(E4M3, 1, False)]
BLOCKS = [*FORMATS, mxfp8(), mxfp8(dims=2), nvfp4(), nvfp4(2)]
SQUARE = fp8_block(dims=2)


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.view(torch.uint8)


def same(a: QuantizedTensor, b: QuantizedTensor) -> None:
    """The same shape, dtype, format and bytes."""
    assert (a.shape, a.dtype, a.format) == (b.shape, b.dtype, b.format)
    assert a._parts().keys() == b._parts().keys()
    for name, part in a._parts().items():
        assert_bitwise_equal(part, b._parts()[name], name)


# ----------------------------------------------------------------------------------------------------------------------
# Bytes and values


@pytest.mark.parametrize("format", BLOCKS, ids=str)
@pytest.mark.parametrize("shape", [(160, 320), (3, 64, 96)])
def test_bytes_are_those_of_quantize_and_scales_lie_in_storage(format: Format, shape: tuple[int, ...]) -> None:
    x = values(*shape[-2:]).expand(shape).bfloat16()
    q = quantized(x, format)
    for columnwise, held in ((False, q.rowwise), (True, q.columnwise)):
        want = quantize(x, format, columnwise)
        assert_bitwise_equal(bits(held.data), bits(want.data), "data")
        if format.block is None:
            assert_bitwise_equal(held.scale, want.scale, "scale")
        else:
            assert held.scale.shape[-2:] == storage_shape(format, *shape[-2:], columnwise)
            lines = shape[-1] if columnwise else shape[-2]
            assert_bitwise_equal(bits(held.scale), bits(to_storage(want.scale, format, lines, columnwise)), "scale")
        assert_bitwise_equal(q.values(columnwise), dequantize(want, format, columnwise), "values")
    assert_bitwise_equal(q.dequantize(), q.values().bfloat16(), "dequantize")
    assert_bitwise_equal(quantized(x, format, rowwise=False).dequantize(torch.float32), q.values(True), "column-wise")


@pytest.mark.parametrize("format", [*FORMATS, mxfp8(), nvfp4()], ids=str)
@pytest.mark.parametrize("splits", SMALL_SPLITS, ids=str)
def test_rows_of_groups(format: Format, splits: Splits) -> None:
    """Each direction is `quantize_groups`'s; rows come back where they were, zero in the tail."""
    x = torch.randn(2, splits.rows // 2, 64).bfloat16() if splits.rows % 2 == 0 else torch.randn(splits.rows, 64)
    offsets = group_offsets(splits.tensor(), splits.rows)
    rows = x.reshape(-1, 64)
    rows[splits.used :] = float("nan")
    q = quantized(x, format, groups=Groups(offsets))
    assert q.shape == x.shape and q.dtype == x.dtype
    for columnwise in (False, True):
        want = quantize_groups(rows, offsets, format, columnwise)
        held = q.columnwise if columnwise else q.rowwise
        assert_bitwise_equal(bits(held.data), bits(want.data), "data")
        assert_bitwise_equal(q.values(columnwise), dequantize_groups(want, format, columnwise), "values")
        padded = columnwise or (format.block is not None and format.block[0] > 1)
        places = q.value_offsets(columnwise)
        want = padded_offsets(offsets, group_multiple(format)) if padded else offsets
        assert_bitwise_equal(places, want, "offsets")
        if padded or format.block is None:
            back = QuantizedTensor(
                x.shape, x.dtype, format, *((None, held) if columnwise else (held, None)), Groups(offsets)
            )
            assert_bitwise_equal(
                tokens_only(back.dequantize().reshape(-1, 64), offsets), back.dequantize().reshape(-1, 64), "tail"
            )
    if format.is_square:
        assert_bitwise_equal(q.with_usage(rowwise=False).dequantize(), q.dequantize(), "both directions")


def test_nominal_dtype_and_source() -> None:
    """What is quantised is the FP32 source; the dtype is only that of the values that come back."""
    x = torch.full((4, 128), 1.0 + 2**-10)
    q = quantized(x, fp8_tensor(), groups=Groups.of(None, 4, x.device), dtype=torch.bfloat16)
    assert q.dtype == q.dequantize().dtype == torch.bfloat16
    assert_bitwise_equal(q.rowwise.scale, quantize(x, fp8_tensor()).scale.view(1), "scale")
    assert_bitwise_equal(bits(q.rowwise.data), bits(quantize(x, fp8_tensor()).data), "data")


def test_poisoned_padding_of_scales_is_never_looked_at() -> None:
    x = values(161, 323)
    for format in (fp8_block(), SQUARE):
        q = quantized(x, format)
        want = q.values(), q.values(True)
        for held, lines, blocks in ((q.rowwise, 161, 3), (q.columnwise, 323, 2)):
            real = to_storage(torch.ones(lines if format != SQUARE else -(-lines // 128), blocks), format, lines)
            held.scale.masked_fill_(real == 0, float("nan"))
            assert held.scale.isnan().any()
        assert_bitwise_equal(q.values(), want[0], "row-wise")
        assert_bitwise_equal(q.values(True), want[1], "column-wise")


def test_missing_copies() -> None:
    x = values(64, 96)
    q = quantized(x, fp8_block(), columnwise=False)
    with pytest.raises(
        ValueError, match=r"QuantizedTensor FP8 E4M3 1x128.*bfloat16 \(64, 96\) has no column-wise copy"
    ):
        q.values(columnwise=True)
    both = q.with_usage()
    assert both.rowwise is q.rowwise
    assert_bitwise_equal(
        bits(both.columnwise.data), bits(quantize(q.values(), fp8_block(), True).data), "from the values"
    )
    assert q.with_usage(columnwise=False).columnwise is None
    with pytest.raises(ValueError, match="needs a row-wise or a column-wise copy"):
        QuantizedTensor((4, 4), torch.float32, fp8_block(), None, None)


def test_it_prints_itself() -> None:
    q = quantized(torch.ones(4, 2).bfloat16(), SQUARE)
    assert repr(q) == str(q) and f"{q}" == repr(q)
    title, _, shown = repr(q).partition("\n")
    assert (
        title
        == "QuantizedTensor FP8 E4M3 128x128, FP32 power of two scales, bfloat16 (4, 2), row-wise and column-wise:"
    )
    assert shown == repr(torch.ones(4, 2).bfloat16())
    offsets = torch.tensor([0, 1, 4], dtype=torch.int32)
    assert "row-wise, 2 groups" in repr(
        quantized(torch.ones(4, 2), fp8_block(), columnwise=False, groups=Groups(offsets))
    )


# ----------------------------------------------------------------------------------------------------------------------
# As a tensor


def test_operations_see_the_values() -> None:
    x = torch.randn(32, 64)
    q = quantized(x, fp8_block())
    v = q.dequantize()
    for fn in (
        lambda t: t + 1,
        lambda t: t @ t.t(),
        lambda t: t[3, :5],
        lambda t: t.view(-1),
        torch.zeros_like,
        torch.exp,
    ):
        assert_bitwise_equal(fn(q), fn(v), "values")
        assert type(fn(q)) is torch.Tensor
    assert_bitwise_equal(torch.zeros(32, 64).copy_(q), v, "copied out")
    with pytest.raises(AttributeError, match="no attribute 'main_grad'"):
        _ = q.main_grad


def test_copies_keep_the_bytes() -> None:
    q = quantized(torch.randn(32, 64).bfloat16(), SQUARE)
    same(q.clone(), q)
    same(q.detach(), q)
    same(copy.deepcopy(q), q)
    same(q.to("cpu", copy=True), q)
    assert q.clone().rowwise.data.data_ptr() != q.rowwise.data.data_ptr() == q.detach().rowwise.data.data_ptr()
    half = q.half()
    assert half.dtype == half.dequantize().dtype == torch.float16
    assert_bitwise_equal(bits(half.rowwise.data), bits(q.rowwise.data), "another nominal dtype")
    assert q.to("meta").rowwise.data.is_meta


def test_changes_in_place_quantise_anew() -> None:
    w = torch.randn(200, 300).bfloat16()
    p = Parameter(quantized(w, SQUARE))
    version, places = p._version, [t.data_ptr() for t in p._parts().values()]
    with torch.no_grad():
        p.mul_(3)
    same(p.detach(), quantized(quantized(w, SQUARE).dequantize() * 3, SQUARE))
    with torch.no_grad():
        p.copy_(w)
    same(p.detach(), quantized(w, SQUARE))
    p.data = w * 2
    same(p.detach(), quantized(w * 2, SQUARE))
    p.data.zero_()
    assert (p == 0).all()
    assert p._version >= version + 3
    assert [t.data_ptr() for t in p._parts().values()] == places
    nn.init.constant_(p, 0.5)
    assert (p == 0.5).all()
    p.data = quantized(w, SQUARE)
    same(p.detach(), quantized(w, SQUARE))
    with pytest.raises(ValueError, match=r"the source must have that shape, got \(3, 4\)"):
        p.quantize_(torch.zeros(3, 4))


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam])
def test_optimizers_train_it(make) -> None:
    """One step equals the same step on the plain values, quantised (each change in place once)."""
    w, grad = torch.randn(64, 64), torch.randn(64, 64)
    p = Parameter(quantized(w, SQUARE))
    plain = Parameter(p.dequantize().detach())
    for parameter in (p, plain):
        parameter.grad = grad.clone()
        make([parameter], lr=0.1).step()
    same(p.detach(), quantized(plain.detach(), SQUARE))


def test_gradients_pass_through() -> None:
    p = Parameter(quantized(torch.randn(8, 8).bfloat16(), SQUARE))
    assert isinstance(p, Parameter) and p.is_leaf and p.requires_grad
    (p.dequantize(torch.float32) * 3).sum().backward()
    assert type(p.grad) is torch.Tensor and p.grad.dtype == torch.bfloat16 and (p.grad == 3).all()
    p.grad = None
    (p * 2).sum().backward()
    assert (p.grad == 2).all()


class _QuantizeBothWays(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return quantized(x, fp8_block())

    @staticmethod
    def backward(ctx, grad):
        return quantized(grad, fp8_block(E5M2))


def test_results_and_gradients_may_be_quantised() -> None:
    x = torch.randn(16, 32).bfloat16().requires_grad_()
    y = _QuantizeBothWays.apply(x)
    assert isinstance(y, QuantizedTensor) and y.requires_grad
    y.float().square().mean().backward()
    assert isinstance(x.grad, QuantizedTensor) and x.grad.format.element == E5M2
    first = x.grad.dequantize()
    _QuantizeBothWays.apply(x).float().square().mean().backward()
    torch.testing.assert_close(x.grad + 0, 2 * first)  # gradients add up as values


# ----------------------------------------------------------------------------------------------------------------------
# Modules and checkpoints


def module(w: torch.Tensor) -> nn.Module:
    made = nn.Module()
    made.weight = Parameter(w)
    return made


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_state_dict_both_ways(format: Format) -> None:
    """Quantised to quantised is exact; quantised to plain gives the values; plain to quantised quantises."""
    w = torch.randn(130, 60).bfloat16()
    source = module(quantized(w, format))
    file = io.BytesIO()
    torch.save(source.state_dict(), file)
    file.seek(0)
    state = torch.load(file)
    same(state["weight"], source.weight.detach())
    target, plain = module(quantized(torch.zeros_like(w), format)), module(torch.zeros_like(w))
    target.load_state_dict(state)
    same(target.weight.detach(), source.weight.detach())
    plain.load_state_dict(state)
    assert type(plain.weight) is Parameter
    assert_bitwise_equal(plain.weight.detach(), source.weight.dequantize(), "plain")
    target.load_state_dict({"weight": w * 2})
    same(target.weight.detach(), quantized(w * 2, format))
    other = module(quantized(torch.zeros_like(w), fp8_tensor(E5M2, True)))
    other.load_state_dict(state)
    same(other.weight.detach(), quantized(source.weight.dequantize(), other.weight.format))


def test_modules_are_copied_pickled_and_moved() -> None:
    source = module(quantized(torch.randn(64, 32).bfloat16(), SQUARE))
    for made in (copy.deepcopy(source), pickle.loads(pickle.dumps(source))):
        assert isinstance(made.weight, Parameter) and made.weight.requires_grad
        same(made.weight.detach(), source.weight.detach())
        assert made.weight.rowwise.data.data_ptr() != source.weight.rowwise.data.data_ptr()
    held = source.weight
    before = held.detach().clone()
    source.to(torch.float32)
    assert source.weight is held and held.dtype == torch.float32 and isinstance(held, QuantizedTensor)
    same(source.to(torch.bfloat16).weight.detach(), before)
    assert source.to("meta").weight.is_meta


def test_groups_survive_a_pickle() -> None:
    offsets = torch.tensor([0, 3, 3, 8], dtype=torch.int32)
    q = quantized(torch.randn(10, 64).bfloat16(), fp8_block(), groups=Groups(offsets)).requires_grad_()
    made = pickle.loads(pickle.dumps(q))
    same(made.detach(), q.detach())
    assert made.requires_grad and not isinstance(made, Parameter)
