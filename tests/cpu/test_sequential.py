"""Sequential: list interface, extra inputs, what training code does to modules, and clear refusals."""

from __future__ import annotations

import copy
import io
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fusible_ops as ops
from patterns import RULES
from tests.cases import TAIL
from tests.compare import assert_bitwise_equal
from tests.models import MLP, Inputs, as_if_on, step

CPU = {"device": "cpu"}


def _mlp(**kwargs) -> tuple[MLP, ops.Sequential, Inputs]:
    mlp = MLP(bias=True, scale_bias=True)
    model = mlp.build(TAIL, "cpu", torch.float32, **kwargs)
    return mlp, model, Inputs.random(TAIL, mlp.hidden, "cpu", torch.float32)


def _same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert_bitwise_equal(a[name], b[name], name)


def test_list_interface() -> None:
    a, b, c, d = ops.GELU(), ops.ReLU(), nn.Tanh(), ops.SiLU()
    model = ops.Sequential(a, b)
    assert len(model) == 2 and list(model) == [a, b] and model[-1] is b
    assert model.append(c) is model and list(model._modules) == ["0", "1", "2"]
    assert list(model[1:]) == [b, c] and list(model[1:]._modules) == ["0", "1"]
    model[0] = d
    assert model[0] is d
    assert model.insert(1, a) is model and list(model) == [d, a, b, c]
    assert model.pop(2) is b and list(model) == [d, a, c]
    del model[0]
    assert list(model + [b]) == [a, c, b] and list(model) == [a, c]
    model += [d]
    assert list(model) == [a, c, d]
    del model[1:]
    assert list(model) == [a]
    with pytest.raises(IndexError, match=r"out of range"):
        model[5]
    with pytest.raises(TypeError, match=r"holds nn.Modules"):
        model.append("gelu")


def test_edits_reach_the_next_forward() -> None:
    model, x = ops.Sequential(ops.ReLU()), torch.randn(4, 8)
    assert_bitwise_equal(model(x), x.relu())
    model.append(ops.ConstantScale(2.0))
    assert_bitwise_equal(model(x), x.relu() * 2)
    model[1] = ops.ConstantScale(3.0)
    assert_bitwise_equal(model(x), x.relu() * 3)


def test_named_modules_and_plain_modules_between() -> None:
    model = ops.Sequential({"up": ops.Linear(8, 16, **CPU), "norm": nn.LayerNorm(16), "act": ops.SwiGLU()})
    assert list(model.state_dict()) == [
        "up.basic_ops.0.weight",
        "up.basic_ops.0._extra_state",
        "up.basic_ops.1.bias",
        "up.basic_ops.1._extra_state",
        "norm.weight",
        "norm.bias",
        "act._extra_state",
    ]
    x = torch.randn(2, 3, 8)
    h = model.norm(torch.nn.functional.linear(x, model.up.weight, model.up.bias))
    torch.testing.assert_close(model(x), torch.nn.functional.silu(h[..., :8]) * h[..., 8:])
    assert "LayerNorm: a plain module" in model.explain()


def test_extra_inputs_go_to_the_ops_in_order() -> None:
    mlp, model, inputs = _mlp()
    splits = TAIL.tensor()
    with pytest.raises(ValueError, match=r"Expected 4 extra inputs but got 3.*GroupedLinear fc1 takes 1"):
        model(inputs.x, splits, inputs.probs, splits)
    with pytest.raises(ValueError, match=r"Expected 4 extra inputs but got 5"):
        model(inputs.x, *mlp.extras(splits, inputs.probs), splits)


def test_op_kwargs_are_checked() -> None:
    model, x = ops.Sequential(ops.ReLU(), ops.Linear(8, 8, **CPU)), torch.randn(2, 8)
    with pytest.raises(TypeError, match=r"takes no keyword argument 'speed'"):
        model(x, op_kwargs={0: {"speed": 1}})
    with pytest.raises(ValueError, match=r"not a basic op"):
        model(x, op_kwargs={1: {}})
    with pytest.raises(ValueError, match=r"not in this Sequential"):
        model(x, op_kwargs={ops.ReLU(): {}})


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(use_reentrant: bool) -> None:
    mlp, model, inputs = _mlp()
    plain = step(model, mlp, inputs)
    wrapped = _Checkpointed(model, use_reentrant)
    _same(step(wrapped, mlp, inputs), {name.replace("d", "dinner.", 1) if name[1:4] in ("fc1", "fc2") else name: t
                                       for name, t in plain.items()})  # fmt: skip


class _Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, use_reentrant: bool) -> None:
        super().__init__()
        self.inner, self.use_reentrant = inner, use_reentrant

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, *tensors, use_reentrant=self.use_reentrant)


def test_retain_graph_gives_the_same_gradients_again() -> None:
    mlp, model, inputs = _mlp()
    x = inputs.x.clone().requires_grad_()
    y = model(x, *mlp.extras(TAIL.tensor(), inputs.probs))
    first = torch.autograd.grad(y, [x, *model.parameters()], inputs.dy, retain_graph=True)
    second = torch.autograd.grad(y, [x, *model.parameters()], inputs.dy)
    for a, b in zip(first, second, strict=True):
        assert_bitwise_equal(a, b)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_between_steps(mode) -> None:
    mlp, model, inputs = _mlp()
    before = step(model, mlp, inputs)
    with mode():
        y = model(inputs.x, *mlp.extras(TAIL.tensor(), inputs.probs))
    assert not y.requires_grad
    assert_bitwise_equal(y.clone(), before["y"])
    _same(step(model, mlp, inputs), before)


@pytest.mark.parametrize("warm", [False, True], ids=["before_forward", "after_forward"])
@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch_save", "state_dict"])
def test_copies_compute_the_same(way: str, warm: bool) -> None:
    mlp, model, inputs = _mlp()
    expected = step(model, mlp, inputs) if warm else None
    if way == "deepcopy":
        other = copy.deepcopy(model)
    elif way == "pickle":
        other = pickle.loads(pickle.dumps(model))
    elif way == "torch_save":
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        other = torch.load(buffer, weights_only=False)
    else:
        other = mlp.build(TAIL, "cpu", torch.float32)
        other.load_state_dict(model.state_dict(), strict=True)
    _same(step(other, mlp, inputs), expected or step(model, mlp, inputs))
    with torch.no_grad():
        other[0].weight0.zero_()
    assert (model[0].weight0 != 0).any()


def test_state_dict_keys_are_transformer_engines() -> None:
    _, model, _ = _mlp()
    groups = range(TAIL.groups)
    fc1 = [*(f"fc1.weight{g}" for g in groups), *(f"fc1.bias{g}" for g in groups), "fc1._extra_state"]
    assert list(model.state_dict()) == [*fc1, "act._extra_state", *(key.replace("fc1", "fc2") for key in fc1)]
    assert list(ops.ScaledClampedQGeGLU().state_dict()) == ["_extra_state", "_clamped._extra_state"]


def test_double_backward_raises() -> None:
    model, x = ops.Sequential(ops.GELU()), torch.randn(3, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"has no double backward"):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)


def test_functorch_raises() -> None:
    model = ops.Sequential(ops.GELU())
    with pytest.raises(RuntimeError, match=r"does not run under torch.func"):
        torch.func.grad(lambda x: model(x).sum())(torch.randn(3))
    with pytest.raises(RuntimeError, match=r"does not run under torch.func"):
        torch.vmap(model)(torch.randn(3, 4))


def test_export_raises() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(Exception, match=r"cannot be exported"):
            torch.export.export(ops.Sequential(ops.GELU()), (torch.randn(3, 4),), strict=False)


def test_widths_that_do_not_chain_name_the_two_ops() -> None:
    model = ops.Sequential({"fc1": ops.Linear(8, 32, **CPU), "act": ops.SwiGLU(), "fc2": ops.Linear(32, 8, **CPU)})
    with pytest.raises(ValueError, match=r"SwiGLU act gives 16 columns, but Linear fc2, which follows it, takes 32"):
        model(torch.randn(2, 8))
    with pytest.raises(ValueError, match=r"SwiGLU 1, after Linear 0: .*even number of columns, got 33"):
        ops.Sequential(ops.Linear(8, 33, bias=False, **CPU), ops.SwiGLU())(torch.randn(2, 8))
    with pytest.raises(ValueError, match=r"glu_interleave_size=3 does not divide 16"):
        ops.Sequential(ops.Linear(8, 32, **CPU), ops.SwiGLU(glu_interleave_size=3)).explain("sm_90a")


def test_rules_and_on_unfused_are_checked() -> None:
    with pytest.raises(TypeError, match=r"rules"):
        ops.Sequential(ops.GELU(), rules="fast")
    with pytest.raises(ValueError, match=r"on_unfused must be one of"):
        ops.Sequential(ops.GELU(), on_unfused="explode")
    with pytest.raises(ValueError, match=r"on_unfused must be one of"):
        ops.Sequential(ops.GELU()).on_unfused = "explode"


def test_on_unfused_error_and_warn_say_why() -> None:
    mlp, strict, inputs = _mlp(on_unfused="error")
    with pytest.raises(RuntimeError, match=r"(?s)run unfused.*needs sm_90a; this is cpu"):
        strict(inputs.x, *mlp.extras(TAIL.tensor(), inputs.probs))
    mlp, chatty, inputs = _mlp(on_unfused="warn")
    with pytest.warns(UserWarning, match=r"needs sm_90a; this is cpu"):
        chatty(inputs.x, *mlp.extras(TAIL.tensor(), inputs.probs))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chatty(inputs.x, *mlp.extras(TAIL.tensor(), inputs.probs))


def test_autocast_computes_in_its_dtype() -> None:
    mlp, model, inputs = _mlp()
    x = inputs.x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x, *mlp.extras(TAIL.tensor(), inputs.probs))
    assert y.dtype == torch.bfloat16
    y.backward(inputs.dy.bfloat16())
    assert x.grad.dtype == torch.float32 and all(p.grad.dtype == torch.float32 for p in model.parameters())
    exact = model(inputs.x, *mlp.extras(TAIL.tensor(), inputs.probs))
    assert (y.float() - exact).norm() < 0.02 * exact.norm()


def test_a_third_partys_op() -> None:
    class Shift(ops.BasicOperation):
        def op_forward(self, ctx, input_, *, prev_op_grad_output_quantizer, next_op_input_quantizer, by=1.0):
            return input_ + by

        def op_backward(self, ctx, grad_output):
            return grad_output, ()

    model = ops.Sequential(ops.ReLU(), Shift())
    x = torch.randn(3, requires_grad=True)
    y = model(x, op_kwargs={1: {"by": 2.0}})
    assert_bitwise_equal(y.detach(), x.detach().relu() + 2)
    y.sum().backward()
    assert_bitwise_equal(x.grad, (x > 0).float())
    assert "shift" in model.explain("sm_90a").lower()


def test_bad_input_of_a_later_op_raises_before_anything_runs() -> None:
    class Count(ops.Identity):
        ran = 0

        def op_forward(self, ctx, input_, **kwargs):
            Count.ran += 1
            return input_

    mlp, model, inputs = _mlp()
    counted = ops.Sequential(Count(), *model)
    splits = TAIL.tensor()
    bad_calls = [
        (splits, inputs.probs, splits[:2], inputs.probs),
        (splits, inputs.probs[:3], splits, inputs.probs),
        (splits, inputs.probs, splits, inputs.probs.long()),
        (splits, inputs.probs, splits.float(), inputs.probs),
    ]
    for extras in bad_calls:
        with pytest.raises((ValueError, TypeError), match=r"GroupedLinear 3|ScaledSwiGLU 2"):
            counted(inputs.x, *extras)
    assert Count.ran == 0
    counted(inputs.x, *mlp.extras(splits, inputs.probs))
    assert Count.ran == 1


def test_missing_main_grad_raises_before_another_is_written() -> None:
    mlp = MLP(linear={"accumulate_into_main_grad": True})
    model = mlp.build(TAIL, "cpu", torch.float32)
    for w in model[2].parameters():
        w.main_grad = torch.zeros_like(w)
    inputs = Inputs.random(TAIL, mlp.hidden, "cpu", torch.float32)
    for arch in ("cpu", "sm_90a"):
        with as_if_on(arch), pytest.raises(RuntimeError, match=r"GroupedLinear fc1: .*valid main_grad"):
            step(model, mlp, inputs)
        assert all((w.main_grad == 0).all() for w in model[2].parameters())


def test_a_cast_of_one_linear_is_planned_anew() -> None:
    """FC2 alone becomes FP32 after a fused BF16 call: the next call is what a fresh module computes."""
    mlp = MLP("swiglu")
    model = mlp.build(TAIL, "cpu", torch.bfloat16)
    x, splits = torch.randn(TAIL.rows, mlp.hidden).bfloat16(), TAIL.tensor()
    with as_if_on("sm_90a"):
        assert model(x, splits, splits).dtype == torch.bfloat16
        model[2].float()
        y, fresh = model(x, splits, splits), copy.deepcopy(model)(x, splits, splits)
    assert y.dtype == torch.float32
    assert_bitwise_equal(y, fresh)


@pytest.mark.parametrize("arch", ["cpu", "sm_90a"])
@pytest.mark.parametrize("shape", [(8, 16), (2, 4, 16)])
def test_outputs_may_be_changed_in_place(arch: str, shape: tuple[int, ...]) -> None:
    x, splits = torch.randn(shape, requires_grad=True), torch.tensor([3, 5])
    factory = {"device": "cpu", "dtype": torch.bfloat16}
    for model, extras in (
        (ops.Sequential(ops.GroupedLinear(2, 16, 16, **factory)), (splits,)),
        (ops.Sequential(ops.GroupedLinear(2, 16, 32, **factory), ops.SwiGLU()), (splits,)),
        (ops.Sequential(ops.Linear(16, 16, **factory), ops.ReLU(), ops.Linear(16, 16, **factory)), ()),
        (ops.Sequential(ops.Identity(), ops.Quantize()), ()),
    ):
        with as_if_on(arch):
            y = model(x, *extras)
            with torch.no_grad():
                before = x.clone()
                model(x, *extras).zero_()
                assert_bitwise_equal(x.detach(), before)
        y += 1
        y.sum().backward()
    assert torch.isfinite(x.grad).all()


def test_sequential_edits_that_fail_change_nothing() -> None:
    model = ops.Sequential(ops.GELU(), ops.ReLU())
    with pytest.raises(TypeError, match=r"holds nn.Modules"):
        model.insert(0, 3)
    assert [type(op).__name__ for op in model] == ["GELU", "ReLU"]


def test_rules_may_be_changed_after_a_call() -> None:
    mlp, model, inputs = _mlp()
    model.to(torch.bfloat16)
    with as_if_on("sm_90a"):
        step(model, mlp, inputs.to(torch.bfloat16))
        assert model.explain("sm_90a").endswith("3 of 3 ops fused")
        model.rules = ()
        assert model.explain("sm_90a").endswith("0 of 3 ops fused")
    assert pickle.loads(pickle.dumps(model)).rules == ()
    assert pickle.loads(pickle.dumps(_mlp()[1])).rules is RULES


@pytest.mark.parametrize("compiled_first", [True, False])
def test_torch_compile_gives_the_same(compiled_first: bool) -> None:
    """With the backend that runs what Dynamo found as it is."""
    mlp, model, inputs = _mlp()
    extras = mlp.extras(TAIL.tensor(), inputs.probs)
    expected = None if compiled_first else model(inputs.x, *extras).detach()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        y = torch.compile(model, backend="eager")(inputs.x, *extras)
    assert_bitwise_equal(y, model(inputs.x, *extras).detach() if expected is None else expected)
