"""GroupedLinear alone: parameters and their storage, initialisation, main_grad, delayed gradients, bad input."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fusible_ops as ops
from fusible_ops import parameters
from fusible_ops.parameters import are_packed
from tests.compare import assert_bitwise_equal

CPU = {"device": "cpu"}
SPLITS = torch.tensor([3, 0, 5])


def _linear(**kwargs) -> ops.GroupedLinear:
    return ops.GroupedLinear(3, 16, 24, **{**CPU, **kwargs})


def test_initialisation_is_nn_linears() -> None:
    torch.manual_seed(7)
    op = ops.GroupedLinear(4, 64, 64, **CPU)
    torch.manual_seed(7)
    for g in range(4):
        assert_bitwise_equal(getattr(op, f"weight{g}").detach(), nn.Linear(64, 64, bias=False).weight.detach())
        assert (getattr(op, f"bias{g}") == 0).all()


def test_same_weights_as_separate_linears_give_the_same_output() -> None:
    """Exact in FP32: the same first steps as G separate nn.Linear."""
    op, linears = ops.GroupedLinear(4, 64, 64, bias=False, **CPU), [nn.Linear(64, 64, bias=False) for _ in range(4)]
    with torch.no_grad():
        for g, linear in enumerate(linears):
            linear.weight.copy_(getattr(op, f"weight{g}"))
    x, splits = torch.randn(40, 64), torch.tensor([10, 4, 20, 6])
    expected = torch.cat([linear(rows) for linear, rows in zip(linears, x.split(splits.tolist()), strict=True)])
    assert_bitwise_equal(op(x, splits).detach(), expected.detach())
    low = op.bfloat16()(x.bfloat16(), splits).float()
    assert (low - expected).norm() <= 1e-2 * expected.norm()


@pytest.mark.parametrize("change", ["new", "double", "bfloat16", "deepcopy", "load"])
def test_parameters_stay_views_of_one_buffer(change: str) -> None:
    op = _linear()
    if change == "deepcopy":
        op = copy.deepcopy(op)
    elif change == "load":
        op.load_state_dict(_linear().state_dict())
    elif change != "new":
        op = op.to(getattr(torch, {"double": "float64"}.get(change, change)))
    assert are_packed(op.weight_parameters()) and are_packed(op.bias_parameters())


def test_replaced_storage_is_used() -> None:
    op, x = _linear(bias=False), torch.randn(8, 16)
    assert (op(x, SPLITS) != 0).any()
    for w in op.weight_parameters():
        w.data = torch.zeros_like(w)
    assert (op(x, SPLITS) == 0).all()


def test_weights_too_far_apart_for_the_kernels_are_stacked(monkeypatch: pytest.MonkeyPatch) -> None:
    op = _linear(bias=False)
    for w in op.weight_parameters():
        w.data = w.data.clone()
    assert len(op.hold("").operands(torch.float32, False)) == 3
    monkeypatch.setattr(parameters, "SEPARATE_SPAN_BYTES", 16)
    (stacked,) = op.hold("").operands(torch.float32, False)
    assert_bitwise_equal(stacked, torch.stack([w.detach() for w in op.weight_parameters()]))


@pytest.mark.parametrize("weight", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_either_layout_loads_into_either(weight: bool, bias: bool) -> None:
    separate, single = _linear(), _linear(single_grouped_weight=weight, single_grouped_bias=bias)
    for p in separate.parameters():
        nn.init.normal_(p)
    x = torch.randn(8, 16)
    single.load_state_dict(separate.state_dict(), strict=True)
    assert_bitwise_equal(single(x, SPLITS).detach(), separate(x, SPLITS).detach())
    other = _linear()
    other.load_state_dict(single.state_dict(), strict=True)
    assert_bitwise_equal(other(x, SPLITS).detach(), separate(x, SPLITS).detach())


def test_parameter_order_is_transformer_engines() -> None:
    names = [name for name, _ in _linear(single_grouped_weight=True).named_parameters()]
    assert names == ["bias0", "bias1", "bias2", "weight"]
    names = [name for name, _ in _linear(single_grouped_weight=True, single_grouped_bias=True).named_parameters()]
    assert names == ["weight", "bias"]


@pytest.mark.parametrize("single", [False, True])
def test_gradients_of_both_layouts_agree(single: bool) -> None:
    op, reference = _linear(single_grouped_weight=single, single_grouped_bias=single), _linear()
    reference.load_state_dict(op.state_dict())
    x, dy = torch.randn(8, 16), torch.randn(8, 24)
    op(x, SPLITS).backward(dy)
    reference(x, SPLITS).backward(dy)
    grads = torch.stack([p.grad for p in reference.weight_parameters()])
    mine = op.weight.grad if single else torch.stack([p.grad for p in op.weight_parameters()])
    assert_bitwise_equal(mine, grads)


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("delay", [False, True])
def test_main_grad(single: bool, overwrite: bool, delay: bool) -> None:
    """Three micro-batches add up in main_grad (the last one stays if it overwrites); .grad gets a zeroed dummy."""
    op = _linear(bias=False, accumulate_into_main_grad=True, single_grouped_weight=single, delay_wgrad_compute=delay)
    x, dy = torch.randn(8, 16), torch.randn(8, 24)
    expected = torch.stack([dy[r].t() @ x[r] for r in (slice(0, 3), slice(3, 3), slice(3, 8))])
    y = op(x, SPLITS)
    for w in op.weight_parameters():  # only now, between forward and backward
        w.main_grad = torch.full_like(w, 3.0)
        w.overwrite_main_grad, w.grad_added_to_main_grad, w.zero_out_wgrad = overwrite, False, True
    for i in range(3):
        (op(x, SPLITS) if i else y).backward(dy)
        op.backward_dw()
    got = torch.cat([w.main_grad.view(-1, 24, 16) for w in op.weight_parameters()])
    torch.testing.assert_close(got, expected if overwrite else 3.0 + 3 * expected)
    for w in op.weight_parameters():
        assert w.grad_added_to_main_grad is True
        assert w.grad is None or (w.grad == 0).all()


def test_main_grad_missing_is_an_error_that_names_it() -> None:
    op = _linear(accumulate_into_main_grad=True)
    y = op(torch.randn(8, 16), SPLITS)
    with pytest.raises(RuntimeError, match="valid main_grad attribute"):
        y.sum().backward()


def test_delayed_weight_gradients_add_to_grad() -> None:
    op, plain = _linear(delay_wgrad_compute=True), _linear()
    plain.load_state_dict(op.state_dict())
    x, dy, calls = torch.randn(8, 16), torch.randn(8, 24), []
    op.register_wgrad_accumulation_and_reduce_hooks(lambda: calls.append(1))
    op.backward_dw()
    for _ in range(2):
        op(x, SPLITS).backward(dy)
        plain(x, SPLITS).backward(dy)
    assert op.weight0.grad is None and op.bias0.grad is not None
    op.backward_dw()
    op.backward_dw()
    assert len(calls) == 2
    for mine, theirs in zip(op.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


@pytest.mark.parametrize("shape", [(8,), (2, 4), (2, 2, 2)])
def test_leading_dimensions_are_kept(shape: tuple[int, ...]) -> None:
    op = _linear()
    y = op(torch.randn(*shape, 16, requires_grad=True), SPLITS)
    assert y.shape == (*shape, 24)


def test_meta_device_materialises() -> None:
    op = _linear(device="meta")
    assert op.weight0.is_meta
    op.to_empty(device="cpu")
    op.reset_parameters()
    assert are_packed(op.weight_parameters()) and op(torch.randn(8, 16), SPLITS).isfinite().all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 8, 8), "num_groups must be a positive integer, got 0"),
        ((2, -1, 8), "in_features must be a positive integer, got -1"),
        ((2, 8, 0), "out_features must be a positive integer, got 0"),
    ],
)
def test_bad_sizes(arguments: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ops.GroupedLinear(*arguments, **CPU)


def test_bad_dtype() -> None:
    with pytest.raises(ValueError, match="dtype must be"):
        _linear(dtype=torch.int32)


X = torch.randn(8, 16)


@pytest.mark.parametrize(
    ("x", "splits", "error", "message"),
    [
        (X, torch.tensor([3, 5]), ValueError, "Expected 3 splits, but got"),
        (X, SPLITS.view(3, 1), ValueError, "Expected 3 splits, but got"),
        (X, SPLITS.float(), TypeError, "must be int32 or int64, got torch.float32"),
        (X, SPLITS.to("meta"), ValueError, "split_sizes must be on cpu, got meta"),
        (X, [3, 0, 5], TypeError, "must be a tensor"),
        (torch.randn(8, 17), SPLITS, ValueError, "last dimension must be 16"),
        (X.int(), SPLITS, TypeError, "must be float32, float16, bfloat16 or float64, got torch.int32"),
        (X.to("meta"), SPLITS, ValueError, "must be on cpu, got meta"),
    ],
)
def test_bad_input_raises_before_anything_runs(x, splits, error, message) -> None:
    op = _linear()
    before = copy.deepcopy(op.state_dict())
    with pytest.raises(error, match=message):
        op(x, splits)
    for key, value in op.state_dict().items():
        assert_bitwise_equal(value, before[key])


def test_bad_scales() -> None:
    op, act = _linear(scale_bias=True), ops.ScaledSwiGLU()
    with pytest.raises(ValueError, match="one value for each of 8 rows"):
        op(X, SPLITS, torch.rand(7))
    with pytest.raises(TypeError, match="must be a float tensor"):
        act(X, torch.ones(8, dtype=torch.int64))
    with pytest.raises(ValueError, match="one value for each of 8 rows"):
        act(X, torch.rand(9))


@pytest.mark.parametrize("build", [ops.ClampedSwiGLU, ops.ScaledClampedQGeGLU])
@pytest.mark.parametrize("limit", [0, -1.0])
def test_clamp_limit_must_be_positive(build, limit: float) -> None:
    with pytest.raises(ValueError, match="limit must be positive"):
        build(limit=limit)


@pytest.mark.parametrize("build", [ops.ScaledSwiGLU, ops.ScaledGeGLU, ops.ScaledClampedQGeGLU])
def test_scaled_glu_refuses_recompute(build) -> None:
    with pytest.raises(ValueError, match="does not support activation recomputation"):
        build(activation_recompute_in_mlp=True)


@pytest.mark.parametrize("which", ["weight0", "weight2", "bias0", "bias1"])
@pytest.mark.parametrize("how", ["requires_grad", "dtype", "shape"])
def test_parameters_that_disagree_are_an_error(which: str, how: str) -> None:
    op = _linear()
    p = getattr(op, which)
    if how == "requires_grad":
        p.requires_grad_(False)
    elif how == "dtype":
        p.data = p.data.double()
    else:
        p.data = p.data[:-1].clone()
    with pytest.raises(RuntimeError, match="must agree with weight 0"):
        op(X, SPLITS)


@pytest.mark.parametrize("kind", ["transposed", "short", "int", "unaligned", "strided", "double"])
def test_odd_main_grad_buffers(kind: str) -> None:
    """What cannot hold the gradient is refused before anything is written; what can, holds it."""
    op = _linear(bias=False, accumulate_into_main_grad=True)
    x, dy = torch.randn(8, 16), torch.randn(8, 24)
    make = {
        "transposed": lambda: torch.zeros(16, 24),
        "short": lambda: torch.zeros(24, 15),
        "int": lambda: torch.zeros(24, 16, dtype=torch.int32),
        "unaligned": lambda: torch.zeros(24 * 16 + 1)[1:],
        "strided": lambda: torch.zeros(24, 32)[:, ::2],
        "double": lambda: torch.zeros(24, 16, dtype=torch.float64),
    }[kind]
    for w in op.weight_parameters():
        w.main_grad = make()
    y = op(x, SPLITS)
    if kind in ("transposed", "short", "int"):
        with pytest.raises(RuntimeError, match="main_grad is"):
            y.backward(dy)
        return
    y.backward(dy)
    torch.testing.assert_close(op.weight2.main_grad.view(24, 16).float(), dy[3:].t() @ x[3:])


@pytest.mark.parametrize("name", ["weight0", "weight2"])
def test_parametrised_weights_are_refused(name: str) -> None:
    """Their originals would get no gradient, or a wrong one."""
    op = _linear(bias=False)
    nn.utils.parametrizations.weight_norm(op, name, dim=0)
    with pytest.raises(RuntimeError, match="parametrised weights are not supported"):
        op(X, SPLITS)
    linear = ops.BasicLinear(16, 8, **CPU)
    nn.utils.parametrizations.weight_norm(linear, "weight")
    with pytest.raises(RuntimeError, match="parametrised weights are not supported"):
        linear(X)


@pytest.mark.parametrize("name", ["weight0", "weight2"])
@pytest.mark.parametrize("copied", [False, True])
def test_a_weight_changed_before_backward_is_noticed(name: str, copied: bool) -> None:
    op = copy.deepcopy(_linear()) if copied else _linear()
    x = torch.randn(8, 16, requires_grad=True)
    y = op(x, SPLITS)
    with torch.no_grad():
        getattr(op, name).mul_(2)
    with pytest.raises(RuntimeError, match=r"changed in place|modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("shape", [(8, 1), (2, 4), (8,)])
def test_scales_of_any_shape_get_gradients_of_that_shape(shape: tuple[int, ...]) -> None:
    op, scales = _linear(scale_bias=True), torch.rand(shape, requires_grad=True)
    op(X, SPLITS, scales).sum().backward()
    assert scales.grad.shape == shape


def test_gradients_follow_the_experts_whatever_the_order_of_registration() -> None:
    op = _linear(bias=False)
    value = op.weight0
    del op.weight0
    op.weight0 = value
    assert next(iter(op.parameters())) is op.weight1
    op(X, torch.tensor([0, 0, 8])).sum().backward()
    assert (op.weight0.grad == 0).all() and (op.weight1.grad == 0).all() and (op.weight2.grad != 0).any()


def test_a_failed_backward_leaves_nothing_behind() -> None:
    """The changed weight of the first linear is noticed before the second one's gradient is queued or added."""
    first, second = copy.deepcopy(_linear(bias=False)), ops.GroupedLinear(3, 24, 8, delay_wgrad_compute=True, **CPU)
    model = ops.Sequential(first, second)
    y = model(torch.randn(8, 16, requires_grad=True), SPLITS, SPLITS)
    with torch.no_grad():
        first.weight1.mul_(2)
    with pytest.raises(RuntimeError, match="changed in place"):
        y.sum().backward()
    second.backward_dw()
    assert second.weight0.grad is None


def test_backward_dw_may_be_repeated_after_an_error() -> None:
    op = _linear(bias=False, delay_wgrad_compute=True, accumulate_into_main_grad=True)
    op(X, SPLITS).sum().backward()
    with pytest.raises(RuntimeError, match="valid main_grad"):
        op.backward_dw()
    for w in op.weight_parameters():
        w.main_grad = torch.zeros_like(w)
    op.backward_dw()
    assert (op.weight0.main_grad != 0).any()


def test_a_bias_changed_before_the_scale_gradient_is_noticed() -> None:
    op, scales = copy.deepcopy(_linear(scale_bias=True)), torch.rand(8, requires_grad=True)
    y = op(X, SPLITS, scales)
    with torch.no_grad():
        op.bias1.add_(1)
    with pytest.raises(RuntimeError, match="changed in place"):
        y.sum().backward()


def test_an_infinite_gradient_stays_in_its_group() -> None:
    op, dy = _linear(), torch.ones(8, 24)
    dy[0, 0] = float("inf")
    op(X, SPLITS).backward(dy)
    assert op.bias0.grad[0] == float("inf") and (op.bias2.grad == 5).all()


def test_another_dtype_between_forward_and_backward() -> None:
    for op, extras in ((ops.Linear(16, 8, **CPU), ()), (_linear(), (SPLITS,))):
        x = torch.randn(8, 16, requires_grad=True)
        y = op(x, *extras)
        op.double()
        y.sum().backward()
        assert x.grad.dtype == torch.float32 and x.grad.isfinite().all()


def test_main_grad_of_a_sharded_parameter_is_asked_for_anew() -> None:
    """`__fsdp_param__`: the buffer comes from `get_main_grad()` at every backward, and dummies share their memory."""
    op = ops.GroupedLinear(2, 8, 16, bias=False, accumulate_into_main_grad=True, device="cpu", dtype=torch.bfloat16)
    buffers = {id(w): torch.zeros(w.shape) for w in op.parameters()}
    for w in op.parameters():
        w.__fsdp_param__, w.get_main_grad = True, lambda w=w: buffers[id(w)]
        w.grad_added_to_main_grad, w.zero_out_wgrad = False, True
    x, sizes = torch.randn(6, 8).bfloat16(), torch.tensor([2, 4])
    for times in (1, 2):
        op(x, sizes).sum().backward()
        for w in op.parameters():
            assert w.main_grad is buffers[id(w)] and w.grad_added_to_main_grad and not w.grad.any()
        assert buffers[id(op.weight0)].abs().sum() > 0, times
    first = {key: t.clone() for key, t in buffers.items()}
    for w in op.parameters():
        buffers[id(w)] = torch.zeros(w.shape)
    op(x, sizes).sum().backward()
    for w in op.parameters():
        torch.testing.assert_close(buffers[id(w)] * 2, first[id(w)])
