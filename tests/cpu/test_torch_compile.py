"""torch.compile(fullgraph=True) over models that hold a Sequential: few graphs, the same numbers, true shapes."""

from __future__ import annotations

import contextlib
import copy
import shutil
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.source import ConstantSource
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import fusible_ops as ops
from cute_kernels.activation import Activation
from cute_kernels.activation_reference import activation_backward, activation_forward
from tests.cases import Splits
from tests.compare import assert_bitwise_equal
from tests.models import MLP, as_if_on

BF16 = torch.bfloat16
SIZES = (256, 300, 512)


@pytest.fixture(params=[False, True], ids=["unfused", "fused"])
def fused(request: pytest.FixtureRequest) -> Iterator[bool]:
    torch._dynamo.reset()
    with as_if_on("sm_90a") if request.param else contextlib.nullcontext():
        yield request.param


class Block(nn.Module):
    """x + mlp(norm(x)), the mlp grouped or dense."""

    def __init__(self, mlp: MLP, **options: object) -> None:
        super().__init__()
        self.kind = mlp
        self.norm = nn.LayerNorm(mlp.hidden, dtype=BF16)
        self.mlp = mlp.build(Splits("any", (1, 1, 1, 1), 4), "cpu", BF16, **options)

    def forward(self, x: Tensor, splits: Tensor, probs: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x), *self.kind.extras(splits, probs))


def inputs(rows: int, hidden: int = 64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, split sizes (their sum below the rows), probs, dy."""
    splits = torch.randint(0, rows // 4, (4,))
    return torch.randn(rows, hidden).to(BF16), splits, torch.rand(rows), torch.randn(rows, hidden).to(BF16)


def train(model: nn.Module, call: nn.Module, x: Tensor, splits: Tensor, probs: Tensor, dy: Tensor) -> list[Tensor]:
    """y, dx, dprobs and the gradients of the model's parameters, those that are there."""
    model.zero_grad()
    x, probs = x.clone().requires_grad_(), probs.clone().requires_grad_()
    y = call(x, splits, probs)
    y.backward(dy)
    return [t for t in (y.detach(), x.grad, probs.grad, *(p.grad for p in model.parameters())) if t is not None]


def assert_alike(got: list[Tensor], wanted: list[Tensor]) -> None:
    for a, b in zip(got, wanted, strict=True):
        assert a.shape == b.shape and a.stride() == b.stride()
        assert_bitwise_equal(a, b)


CASES = {
    "scaled_swiglu": {"bias": True, "scale_bias": True},
    "srelu": {},
    "single": {"linear": {"single_grouped_weight": True, "single_grouped_bias": True}, "bias": True},
    "transposed": {"linear": {"transposed_weight": True}},
    "interleaved": {"interleave": 8},
}


@pytest.mark.parametrize("case", CASES)
def test_two_graphs_for_all_row_counts_and_splits(fused: bool, case: str) -> None:
    """Forward and gradients are eager's bits, with its strides. Calls that record nothing have as many of their own."""
    activation = case if case in ("srelu", "scaled_swiglu") else "swiglu"
    model = Block(MLP(activation, **CASES[case]))
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for rows in (*SIZES, 300):
        given = inputs(rows)
        got = train(model, compiled, *given)
        assert_alike(got, train(model, model, *given))
        x, splits, probs, _ = given
        assert_bitwise_equal(compiled(x.requires_grad_(), splits, probs.requires_grad_()).detach(), got[0])
    assert counter.frame_count <= 2
    with torch.no_grad():
        for rows in (300, 512, 256):
            given = inputs(rows)[:3]
            assert_bitwise_equal(compiled(*given), model(*given))
    assert counter.frame_count <= 4


@pytest.mark.parametrize("kind", ["swiglu", "srelu"])
def test_row_counts_stay_symbols_in_formulas(kind: str) -> None:
    """Where nothing says that something compiles, too: some versions of torch do not."""
    shapes, symbol = ShapeEnv(), DimDynamic.DYNAMIC
    mode = FakeTensorMode(shape_env=shapes)
    rows = StatelessSymbolicContext([symbol, DimDynamic.STATIC])
    preact = mode.from_tensor(torch.randn(300, 64), symbolic_context=rows, source=ConstantSource("preact"))
    with mode:
        act = activation_forward(preact, Activation(kind))
        dpreact, _ = activation_backward(act, preact, Activation(kind))
    assert all(isinstance(t.shape[0], torch.SymInt) for t in (preact, act, dpreact))
    assert not shapes.guards


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor's own imports
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor(fused: bool) -> None:
    """The operators give the same bits; what inductor fuses around them is bound by the tolerance of its type."""
    model = Block(MLP("scaled_swiglu", bias=True)).float() if not fused else Block(MLP("scaled_swiglu", bias=True))
    compiled = torch.compile(model, fullgraph=True)
    x, splits, probs, dy = inputs(300)
    dtype = torch.float32 if not fused else BF16
    given = x.to(dtype), splits, probs, dy.to(dtype)
    bound = {"rtol": 1e-4, "atol": 1e-4} if not fused else {"rtol": 5e-2, "atol": 0.25}
    for a, b in zip(train(model, compiled, *given), train(model, model, *given), strict=True):
        assert a.shape == b.shape and a.stride() == b.stride()
        torch.testing.assert_close(a, b, **bound)


def test_evaluation_and_autocast(fused: bool) -> None:
    model = Block(MLP("scaled_swiglu", bias=True)).float()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x, splits, probs, _ = inputs(64)
    x = x.float()
    with torch.no_grad():
        assert_bitwise_equal(compiled(x, splits, probs), model(x, splits, probs))
    with torch.autocast("cpu", BF16):
        y, expected = compiled(x, splits, probs), model(x, splits, probs)
        assert_bitwise_equal(y, expected)
    for result in (y, expected):
        result.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_frozen_parts_get_no_gradient(fused: bool) -> None:
    model = Block(MLP("scaled_swiglu"))
    model.mlp[0].requires_grad_(False)
    given = inputs(64)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_alike(train(model, compiled, *given), train(model, model, *given))
    assert model.mlp[0].weight0.grad is None


def test_copies_are_models_of_their_own(fused: bool) -> None:
    model = Block(MLP("scaled_swiglu"))
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.mlp[0].weight0.mul_(2)
    x, splits, probs, _ = inputs(64)
    for each in (model, other):
        y = torch.compile(each, backend="aot_eager", fullgraph=True)(x, splits, probs)
        assert_bitwise_equal(y, each(x, splits, probs))


def test_small_ops_and_plain_modules_between_runs(fused: bool) -> None:
    common = {"device": "cpu", "dtype": BF16}
    model = ops.Sequential(
        ops.Linear(64, 96, **common), ops.SwiGLU(), ops.Reshape((-1, 2, 48)), nn.Softplus(),
        ops.Linear(48, 64, **common), ops.Dropout(0.0), ops.Identity(),
    )  # fmt: skip
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for rows in SIZES:
        x = torch.randn(rows, 64).to(BF16)
        results = []
        for call in (compiled, model):
            model.zero_grad()
            given = x.clone().requires_grad_()
            y = call(given)
            y.float().square().sum().backward()
            results.append([y.detach(), given.grad, *(p.grad for p in model.parameters())])
        assert_alike(*results)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo's, when it breaks a graph
def test_what_no_graph_holds_breaks_it_and_says_why(fused: bool) -> None:
    model = Block(MLP("swiglu", linear={"accumulate_into_main_grad": True}))
    for p in model.parameters():
        p.main_grad = torch.zeros_like(p, dtype=torch.float32)
    given = inputs(64)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="main_grad"):
        torch.compile(model, backend="aot_eager", fullgraph=True)(*given[:3])
    torch._dynamo.reset()
    train(model, torch.compile(model, backend="aot_eager"), *given)
    assert model.mlp[0].weight0.main_grad.any()
    plain = Block(MLP("swiglu"))
    with ops.autocast(recipe=ops.Float8CurrentScaling()):
        y = torch.compile(plain, backend="aot_eager")(*given[:3])
        assert_bitwise_equal(y, plain(*given[:3]))


def test_too_many_extra_inputs(fused: bool) -> None:
    model = MLP("swiglu").build(Splits("any", (1, 1), 2), "cpu", BF16)
    sizes = torch.tensor([3, 4])
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with pytest.raises((ValueError, torch._dynamo.exc.Unsupported), match="extra inputs"):
        compiled(torch.randn(8, 64).to(BF16), sizes, sizes, sizes)


@pytest.mark.parametrize("rows", SIZES)
def test_shapes_and_strides_without_memory(fused: bool, rows: int) -> None:
    """On tensors of FakeTensorMode, forward and backward give what they give on real ones."""
    mlp = MLP("scaled_swiglu", bias=True, scale_bias=True)
    model = mlp.build(Splits("any", (1, 1, 1, 1), 4), "cpu", BF16)
    given = inputs(rows)
    call = lambda x, splits, probs: model(x, *mlp.extras(splits, probs))  # noqa: E731
    real = train(model, call, *given)
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(t) for t in given]
    parameters = {n: mode.from_tensor(p.detach()) for n, p in model.named_parameters()}
    with mode:
        for p in parameters.values():
            p.requires_grad_()
        x, probs = fakes[0].requires_grad_(), fakes[2].requires_grad_()
        y = torch.func.functional_call(model, parameters, (x, *mlp.extras(fakes[1], probs)))
        y.backward(fakes[3])
        fake = [y, x.grad, probs.grad, *(p.grad for p in parameters.values())]
    for a, b in zip(fake, real, strict=True):
        assert (a.shape, a.stride(), a.dtype, a.device) == (b.shape, b.stride(), b.dtype, b.device)


def test_channels_and_extra_outputs(fused: bool) -> None:
    common = {"device": "cpu", "dtype": BF16}
    model = ops.Sequential(
        ops.MakeExtraOutput().set_extra_output_channel(0, "residual"),
        ops.Linear(64, 64, **common),
        ops.AddExtraInput().set_extra_input_channel(0, "residual"),
    )
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.randn(24, 64).to(BF16)
    results = []
    for call in (compiled, model):
        given = x.clone().requires_grad_()
        y, extra = call(given)
        (y.float().square().sum() + extra.float().sum()).backward()
        results.append([y.detach(), extra.detach(), given.grad])
    assert_alike(*results)


def _layers(count: int, **options: object) -> list[ops.Sequential]:
    return [MLP("scaled_swiglu").build(Splits("any", (1, 1, 1, 1), 4), "cpu", BF16, **options) for _ in range(count)]


def test_layers_that_are_alike_share_a_graph(fused: bool) -> None:
    """More of them than Dynamo compiles one function for; each gives its own values."""
    counter = CompileCounterWithBackend("aot_eager")
    x, splits, probs, dy = inputs(24)
    for layer in _layers(12):
        compiled = torch.compile(layer, backend=counter, fullgraph=True)
        results = []
        for call in (compiled, layer):
            layer.zero_grad()
            given = x.clone().requires_grad_()
            y = call(given, splits, probs, splits)
            y.backward(dy)
            results.append([y.detach(), given.grad, *(p.grad for p in layer.parameters())])
        assert_alike(*results)
    assert counter.frame_count == 1


def test_what_differs_does_not_share(fused: bool) -> None:
    """A constant, an option, a rule set, training: another graph, and the right numbers."""
    counter = CompileCounterWithBackend("aot_eager")
    makers = [
        lambda: ops.Sequential(ops.ConstantScale(2.0)),
        lambda: ops.Sequential(ops.ConstantScale(3.0)),
        lambda: ops.Sequential(ops.SwiGLU()),
        lambda: ops.Sequential(ops.ClampedSwiGLU()),
        lambda: ops.Sequential(ops.ClampedSwiGLU(limit=0.5)),
        lambda: ops.Sequential(ops.SwiGLU(), rules=()),
        lambda: ops.Sequential(ops.Dropout(1.0)),
        lambda: ops.Sequential(ops.Dropout(1.0)).eval(),
    ]
    x = torch.randn(6, 16).to(BF16)
    for make in makers:
        model = make()
        assert_bitwise_equal(torch.compile(model, backend=counter, fullgraph=True)(x), model(x))
    assert counter.frame_count == len(makers)
    torch._dynamo.reset()
    alike, changed = ops.Sequential(ops.ConstantScale(2.0)), ops.Sequential(ops.ConstantScale(2.0))
    changed[0].scale = 5.0
    assert_bitwise_equal(torch.compile(alike, backend=counter, fullgraph=True)(x), 2.0 * x)
    assert_bitwise_equal(torch.compile(changed, backend=counter, fullgraph=True)(x), 5.0 * x)


def test_ops_of_somebody_elses_have_graphs_of_their_own(fused: bool) -> None:
    class Power(ops.BasicOperation):
        def __init__(self, exponent: int) -> None:
            super().__init__()
            self.exponent = exponent

        def op_forward(self, ctx, input_, **_):
            return input_**self.exponent

    class Tripled(ops.ConstantScale):
        def op_forward(self, ctx, input_, **_):
            return 3 * input_

    x = torch.randn(6, 16)
    for model, wanted in ((Power(2), x**2), (Power(3), x**3), (Tripled(1.0), 3 * x)):
        compiled = torch.compile(ops.Sequential(model), backend="aot_eager", fullgraph=True)
        assert_bitwise_equal(compiled(x), wanted)
