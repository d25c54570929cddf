"""Extra outputs, extra inputs, the channels between them, and the caller's own buffers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fusible_ops as ops
from fusible_ops.basic.grouped_linear import GRAD_INPUT_BUFFER_KEY, OUTPUT_BUFFER_KEY
from tests.cases import TAIL
from tests.compare import assert_bitwise_equal
from tests.models import MLP, Inputs, as_if_on
from tests.places import Place


def tensors(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("in_place", [False, True])
def test_make_extra_output(in_place: bool) -> None:
    model = ops.Sequential(ops.ConstantScale(2.0), ops.MakeExtraOutput(in_place=in_place), ops.ConstantScale(3.0))
    (x,) = tensors((4, 8))
    y, extra = model(x)
    assert_bitwise_equal(y, 6 * x.detach())
    assert_bitwise_equal(extra, 2 * x.detach())
    dy, dextra = torch.randn(4, 8), torch.randn(4, 8)
    (y * dy).sum().add((extra * dextra).sum()).backward()
    torch.testing.assert_close(x.grad, 6 * dy + 2 * dextra)


@pytest.mark.parametrize("used", ["y", "extra"])
def test_an_output_that_nobody_uses_has_no_gradient(used: str) -> None:
    (x,) = tensors((4, 8))
    y, extra = ops.Sequential(ops.MakeExtraOutput(), ops.ConstantScale(3.0))(x)
    (y if used == "y" else extra).sum().backward()
    assert_bitwise_equal(x.grad, torch.full_like(x, 3.0 if used == "y" else 1.0))


@pytest.mark.parametrize("in_place", [False, True])
def test_add_extra_input(in_place: bool) -> None:
    model = ops.Sequential(ops.ConstantScale(2.0), ops.AddExtraInput(in_place=in_place), ops.ConstantScale(3.0))
    x, leaf = tensors((4, 8), (4, 8))
    extra = leaf * 1.0
    before = extra.detach().clone()
    y = model(x, extra)
    torch.testing.assert_close(y, 6 * x.detach() + 3 * before)
    assert_bitwise_equal(extra, before + 2 * x.detach() if in_place else before)
    y.sum().backward()
    assert (x.grad == 6).all() and (leaf.grad == 3).all()


@pytest.mark.parametrize("in_place", [False, True])
def test_a_residual_leaves_what_ops_in_between_keep(in_place: bool) -> None:
    """In place too: the linear's weight gradient needs x as it was, and so does the caller."""
    model = ops.Sequential(
        ops.MakeExtraOutput(in_place=in_place).set_extra_output_channel(0, "residual", output_to_caller=False),
        ops.Linear(8, 8, bias=False, device="cpu"),
        ops.AddExtraInput(in_place=in_place).set_extra_input_channel(0, "residual"),
    )
    (x,) = tensors((4, 8))
    before = x.detach().clone()
    y = model(x)
    y.sum().backward()
    (weight,) = model.parameters()
    assert_bitwise_equal(x.detach(), before)
    torch.testing.assert_close(y, before @ weight.T + before)
    torch.testing.assert_close(weight.grad, torch.ones(4, 8).T @ before)


def test_the_input_as_an_extra_input_in_place() -> None:
    model = ops.Sequential(ops.Linear(8, 8, bias=False, device="cpu"), ops.AddExtraInput(in_place=True))
    x = torch.randn(4, 8)
    before, (weight,) = x.clone(), model.parameters()
    y = model(x, x)
    y.sum().backward()
    assert_bitwise_equal(x, before)
    torch.testing.assert_close(y, before @ weight.T + before)
    torch.testing.assert_close(weight.grad, torch.ones(4, 8).T @ before)


def test_one_buffer_for_two_outputs_is_refused() -> None:
    model = ops.Sequential(*[ops.GroupedLinear(2, 16, 16, bias=False, device="cpu") for _ in range(2)])
    out, splits = torch.empty(4, 16), torch.tensor([2, 2])
    with pytest.raises(ValueError, match="shares memory"):
        model(torch.randn(4, 16), splits, splits, op_kwargs={i: {OUTPUT_BUFFER_KEY: out} for i in range(2)})


def test_a_gradient_that_a_weight_gradient_waits_for_stays() -> None:
    model = ops.Sequential(
        ops.MakeExtraOutput(in_place=True).set_extra_output_channel(0, "residual", output_to_caller=False),
        ops.GroupedLinear(1, 8, 8, bias=False, device="cpu", delay_wgrad_compute=True),
        ops.AddExtraInput().set_extra_input_channel(0, "residual"),
    )
    (x,), dy = tensors((4, 8)), torch.randn(4, 8)
    model(x, torch.tensor([4])).backward(dy)
    model[1].backward_dw()
    torch.testing.assert_close(model[1].weight0.grad, dy.T @ x.detach())
    torch.testing.assert_close(x.grad, dy @ model[1].weight0 + dy)


def test_results_come_in_the_order_of_ops_and_lie_where_they_are_said_to() -> None:
    model = ops.Sequential(
        ops.MakeExtraOutput(), ops.Bias(8, device="cpu"), ops.MakeExtraOutput(),
        torch.nn.Identity(), ops.AddExtraInput(in_place=True), ops.MakeExtraOutput(),
    )  # fmt: skip
    with torch.no_grad():
        model[1].bias.fill_(10.0)
    x, other = torch.randn(4, 8), torch.randn(4, 8)
    for grad_mode in (torch.enable_grad, torch.no_grad):
        added = other.clone()
        with grad_mode():
            y, first, second, third = model(x, added)
        assert_bitwise_equal(first, x)
        assert_bitwise_equal(second, x + 10)
        torch.testing.assert_close(third, other + x + 10)
        assert_bitwise_equal(y, third)
        assert first.data_ptr() == x.data_ptr() and third.data_ptr() == added.data_ptr() == y.data_ptr()


# ----------------------------------------------------------------------------------------------------------------------
# Channels


def residual(output_to_caller: bool) -> ops.Sequential:
    """y = 2x + b, by a channel round the bias."""
    return ops.Sequential(
        ops.MakeExtraOutput().set_extra_output_channel(0, "residual", output_to_caller=output_to_caller),
        ops.Bias(8, device="cpu"),
        ops.AddExtraInput().set_extra_input_channel(0, "residual"),
    )


@pytest.mark.parametrize("output_to_caller", [False, True])
def test_residual_connection(output_to_caller: bool) -> None:
    model = residual(output_to_caller)
    (x,) = tensors((4, 8))
    with torch.no_grad():
        model[1].bias.normal_()
    result = model(x)
    y, extra = result if output_to_caller else (result, None)
    torch.testing.assert_close(y, 2 * x + model[1].bias)
    dy, dextra = torch.randn(4, 8), torch.randn(4, 8)
    loss = (y * dy).sum()
    if extra is not None:
        assert_bitwise_equal(extra, x.detach())
        loss = loss + (extra * dextra).sum()
    loss.backward()
    torch.testing.assert_close(x.grad, 2 * dy + (dextra if extra is not None else 0))
    torch.testing.assert_close(model[1].bias.grad, dy.sum(0))
    with torch.no_grad():
        again = model(x)
    torch.testing.assert_close(again[0] if output_to_caller else again, y.detach())


def test_one_output_feeds_several_ops_and_others_are_the_callers() -> None:
    source = ops.MakeExtraOutput().set_extra_output_channel(0, "x", output_to_caller=False)
    adds = [ops.AddExtraInput().set_extra_input_channel(0, "x"), ops.AddExtraInput(), ops.AddExtraInput()]
    adds[2].set_extra_input_channel(0, "x")
    model = ops.Sequential(source, ops.ConstantScale(5.0), *adds)
    x, other = tensors((4, 8), (4, 8))
    y = model(x, other)
    torch.testing.assert_close(y, 7 * x + other)
    y.sum().backward()
    assert (x.grad == 7).all() and (other.grad == 1).all()


class Doubled(ops.BasicOperation):
    """Its extra output is 2x, a tensor that did not exist before."""

    num_extra_outputs = 1

    def fuser_forward(self, basic_op_ctxs, input_, **_):
        return input_, [(2 * input_,)]

    def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
        (extra,) = basic_op_grad_extra_outputs[0]
        return grad_output if extra is None else grad_output + 2 * extra, [()], [()]


def test_a_channel_carries_probs_into_a_fused_mlp() -> None:
    """The router's probabilities are made in the run itself; their gradient comes back to it."""

    class Router(ops.BasicOperation):
        """Probabilities: the sigmoid of the first column."""

        num_extra_outputs = 1

        def fuser_forward(self, basic_op_ctxs, input_, **_):
            probs = torch.sigmoid(input_[:, 0].float())
            basic_op_ctxs[0].save_for_backward(probs)
            return input_, [(probs,)]

        def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
            ((grad,),) = basic_op_grad_extra_outputs
            (probs,) = basic_op_ctxs[0].saved_tensors
            dx = grad_output.clone()
            dx[:, 0] += (grad * probs * (1 - probs)).to(dx.dtype)
            return dx, [()], [()]

        def output_width(self, incoming):
            return incoming

    mlp = MLP("scaled_swiglu")
    plain = mlp.build(TAIL, "cpu", torch.bfloat16)
    router = Router().set_extra_output_channel(0, "probs", output_to_caller=False)
    act = ops.ScaledSwiGLU().set_extra_input_channel(0, "probs")
    routed = ops.Sequential(router, plain[0], act, plain[2])
    inputs, sizes = Inputs.random(TAIL, 64, "cpu", torch.bfloat16), TAIL.tensor()
    for arch in ("cpu", "sm_90a"):
        with as_if_on(arch):
            x = inputs.x.clone().requires_grad_()
            y = routed(x, sizes, sizes)
            y.backward(inputs.dy)
            other = inputs.x.clone().requires_grad_()
            wanted = plain(other, sizes, torch.sigmoid(other[:, 0].float()), sizes)
            wanted.backward(inputs.dy)
        assert_bitwise_equal(y, wanted.detach())
        torch.testing.assert_close(x.grad[: TAIL.used], other.grad[: TAIL.used], rtol=2e-2, atol=2e-2)
        assert not x.grad[TAIL.used :].any()
        routed._module_groups = plain._module_groups = None


def test_what_no_channel_may_be() -> None:
    add, make = ops.AddExtraInput(), ops.MakeExtraOutput()
    for call in (add.set_extra_input_channel, make.set_extra_output_channel):
        for index in (-1, 1):
            with pytest.raises(IndexError, match="out of range"):
                call(index, "x")
        for channel in ("", 3):
            with pytest.raises(ValueError, match="non-empty string"):
                call(0, channel)
    with pytest.raises(TypeError, match="output_to_caller must be a bool"):
        make.set_extra_output_channel(0, "x", output_to_caller=1)
    with pytest.raises(ValueError, match="has no producer"):
        ops.Sequential(ops.AddExtraInput().set_extra_input_channel(0, "x"))(torch.ones(2))
    consumer, producer = ops.AddExtraInput(), ops.MakeExtraOutput()
    with pytest.raises(ValueError, match="has no earlier producer"):
        model = [consumer.set_extra_input_channel(0, "x"), producer.set_extra_output_channel(0, "x")]
        ops.Sequential(*model)(torch.ones(2))
    with pytest.raises(ValueError, match="multiple producers"):
        ops.Sequential(*[ops.MakeExtraOutput().set_extra_output_channel(0, "x") for _ in range(2)])(torch.ones(2))


def test_channels_cannot_change_once_a_run_has_them() -> None:
    op = ops.MakeExtraOutput()
    op.set_extra_output_channel(0, "x").set_extra_output_channel(0, None)
    op(torch.ones(2))
    with pytest.raises(RuntimeError, match="already captured its channel routing"):
        op.set_extra_output_channel(0, "x")


def test_a_module_in_between_ends_a_channel() -> None:
    made = ops.MakeExtraOutput().set_extra_output_channel(0, "x")
    model = ops.Sequential(made, torch.nn.Identity(), ops.AddExtraInput().set_extra_input_channel(0, "x"))
    with pytest.raises(ValueError, match="has no producer"):
        model(torch.ones(2))


# ----------------------------------------------------------------------------------------------------------------------
# Buffers


@pytest.mark.parametrize("fused", [False, True])
def test_the_callers_buffers(fused: bool) -> None:
    place = Place("cpu", fused)
    mlp = MLP("scaled_swiglu", bias=True)
    with place.context():
        model = place.build(mlp, TAIL)
        inputs = Inputs.random(TAIL, mlp.hidden, "cpu", torch.bfloat16)
        results = []
        for buffers in (False, True):
            out, dx = torch.full_like(inputs.x, 7.0), torch.full_like(inputs.x, 7.0)
            kwargs = {0: {GRAD_INPUT_BUFFER_KEY: dx}, model[2]: {OUTPUT_BUFFER_KEY: out}} if buffers else None
            x = inputs.x.clone().requires_grad_()
            y = model(x, *mlp.extras(TAIL.tensor(), inputs.probs), op_kwargs=kwargs)
            y.backward(inputs.dy)
            results.append((y.detach(), x.grad))
            if buffers:
                assert y.data_ptr() == out.data_ptr() and not out.requires_grad
                assert_bitwise_equal(dx, x.grad)
        for plain, own in zip(*results, strict=True):
            assert_bitwise_equal(own, plain)
        wrong = [inputs.x[:-1].clone(), inputs.x.float(), inputs.x.clone().requires_grad_(), inputs.x.clone().t()]
        for buffer in wrong:
            with pytest.raises(ValueError, match="'output' must be contiguous"):
                model(inputs.x, *mlp.extras(TAIL.tensor(), inputs.probs), op_kwargs={2: {"output": buffer}})
        if fused:
            with pytest.raises(ValueError, match="'output' lies inside"):
                model(inputs.x, *mlp.extras(TAIL.tensor(), inputs.probs), op_kwargs={0: {"output": inputs.x}})
        with pytest.raises(TypeError, match="takes no keyword argument"):
            model(inputs.x, *mlp.extras(TAIL.tensor(), inputs.probs), op_kwargs={0: {"outptu": inputs.x}})


@pytest.mark.parametrize("fused", [False, True])
def test_an_output_buffer_in_memory_that_the_run_reads_is_refused(fused: bool) -> None:
    """Backward would take what lies there then for the input."""
    place, mlp = Place("cpu", fused), MLP("scaled_swiglu")
    with place.context():
        model, inputs = place.build(mlp, TAIL), Inputs.random(TAIL, mlp.hidden, "cpu", torch.bfloat16)
        extras = mlp.extras(TAIL.tensor("cpu"), inputs.probs)
        with pytest.raises(ValueError, match="shares memory with an input, parameter or buffer"):
            model(inputs.x, *extras, op_kwargs={2: {OUTPUT_BUFFER_KEY: inputs.x}})
        both = torch.empty(2, *inputs.x.shape, dtype=torch.bfloat16)
        x = both[0].copy_(inputs.x)
        y = model(x, *extras, op_kwargs={2: {OUTPUT_BUFFER_KEY: both[1]}})
        assert_bitwise_equal(y, model(inputs.x, *extras))


@pytest.mark.parametrize("key", [OUTPUT_BUFFER_KEY, GRAD_INPUT_BUFFER_KEY])
def test_a_buffer_that_is_no_tensor(key: str) -> None:
    model, x = ops.GroupedLinear(2, 16, 16, device="cpu"), torch.randn(4, 16, requires_grad=True)
    with pytest.raises(TypeError, match="must be a tensor, got int"):
        ops.Sequential(model)(x, torch.tensor([2, 2]), op_kwargs={0: {key: 5}}).sum().backward()
