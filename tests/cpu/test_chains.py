"""Chains on the CPU: unfused against autograd in FP64, and fused (on the operators' reference) against unfused."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn import functional as F

import fusible_ops as ops
from tests.cases import SMALL_SPLITS, SPLITS, TAIL, Splits
from tests.compare import assert_as_accurate
from tests.models import ACTIVATIONS, INTERLEAVED, MLP, UNFUSED_ACTIVATIONS, Inputs, as_if_on, step


@pytest.mark.parametrize("splits", SPLITS, ids=str)
def test_unfused_mlp_equals_a_loop_of_torch_ops(splits: Splits) -> None:
    """Forward and every gradient in FP64, against autograd through torch.nn.functional, expert by expert."""
    mlp = MLP(bias=True, scale_bias=True)
    model = mlp.build(splits, "cpu", torch.float64)
    inputs = Inputs.random(splits, mlp.hidden, "cpu", torch.float64)
    got = step(model, mlp, inputs)
    x, probs = inputs.x.clone().requires_grad_(), inputs.probs.clone().requires_grad_()
    model.zero_grad()
    outputs = []
    for g, rows in enumerate(splits.slices()):
        fc1, fc2 = model[0], model[2]
        gate, up = F.linear(x[rows], getattr(fc1, f"weight{g}"), getattr(fc1, f"bias{g}")).chunk(2, -1)
        act = F.silu(gate) * up * probs[rows, None]
        outputs.append(
            F.linear(act, getattr(fc2, f"weight{g}")) + probs[rows, None].double() * getattr(fc2, f"bias{g}")
        )
    y = torch.cat(outputs)
    y.backward(inputs.dy[: splits.used])
    torch.testing.assert_close(got["y"][: splits.used], y.detach())
    torch.testing.assert_close(got["dx"], torch.nan_to_num(x.grad), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(got["dprobs"][: splits.used], probs.grad[: splits.used], rtol=1e-5, atol=1e-5)
    for name, p in model.named_parameters():
        torch.testing.assert_close(got[f"d{name}"], p.grad, msg=name)
    for name in ("y", "dx", "dprobs"):
        assert (got[name][splits.used :] == 0).all(), f"{name} is not zero in the tail"


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("interleave", [None, 1, 4])
@pytest.mark.parametrize("bias", [False, True])
def test_fused_equals_unfused(activation: str, interleave: int | None, bias: bool) -> None:
    """The fused operation, run on the operators' CPU reference, against the unfused ops, both in BF16, and FP64."""
    if interleave and activation not in INTERLEAVED:
        pytest.skip("this activation has no halves, or takes them plain")
    mlp = MLP(activation, bias=bias, scale_bias=bias, interleave=interleave)
    results: dict[str, list[list[torch.Tensor]]] = {}
    for splits in SMALL_SPLITS:
        model = mlp.build(splits, "cpu", torch.bfloat16)
        inputs = Inputs.random(splits, mlp.hidden, "cpu", torch.bfloat16)
        unfused = step(model, mlp, inputs)
        model.append(ops.Identity())
        del model[-1]
        with as_if_on("sm_90a"):
            assert model.groups()[0].plan(model._target("sm_90a")).is_fused
            fused = step(model, mlp, inputs)
        exact = step(model.double(), mlp, inputs.to(torch.float64))
        assert fused.keys() == unfused.keys() == exact.keys()
        for name in fused:
            assert fused[name].shape == unfused[name].shape == exact[name].shape, name
            flat = [t[name].flatten().float() for t in (fused, unfused, exact)]
            results.setdefault(name.split(".")[0] + name.split(".")[-1][:4], []).append(flat)
    for name, pieces in results.items():  # over all splits: one token alone may happen to be exact in either
        assert_as_accurate(*(torch.cat(same) for same in zip(*pieces, strict=True)), name)


@pytest.mark.parametrize(
    "build",
    [
        lambda d: ops.Sequential(ops.GroupedLinear(3, 16, 32, **d)),
        lambda d: ops.Sequential(ops.GroupedLinear(3, 16, 32, **d), ops.Quantize()),
        lambda d: ops.Sequential(ops.GroupedLinear(3, 16, 32, **d), ops.SwiGLU(glu_interleave_size=8)),
        lambda d: ops.Sequential(ops.GroupedLinear(3, 16, 32, bias=False, **d), ops.SReLU(), ops.Quantize()),
    ],
)
def test_shorter_grouped_chains(build) -> None:
    model = build({"device": "cpu", "dtype": torch.bfloat16})
    x, splits = torch.randn(TAIL.rows, 16).bfloat16(), TAIL.tensor()
    x[TAIL.used :] = float("nan")
    _compare_fused_and_unfused(model, x, splits)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "middle",
    [(), (ops.SwiGLU,), (ops.GELU,), (ops.ReLU, ops.Quantize), (ops.ClampedSwiGLU, "down"), (ops.SiLU, "down")],
)
def test_dense_chains(bias: bool, middle: tuple) -> None:
    common = {"bias": bias, "device": "cpu", "dtype": torch.bfloat16}
    layers = [ops.Linear(16, 48, **common)]
    layers += [make() for make in middle if make != "down"]
    if "down" in middle:
        layers.append(ops.Linear(24 if middle[0] is ops.ClampedSwiGLU else 48, 8, **common))
    _compare_fused_and_unfused(ops.Sequential(*layers), torch.randn(2, 5, 16).bfloat16())


def _compare_fused_and_unfused(model: ops.Sequential, x: torch.Tensor, *extras: torch.Tensor) -> None:
    """y, dx and all parameter gradients: fused as accurate as unfused against FP64. Also that the whole chain fuses."""
    results = []
    dy = None
    for arch, dtype in (("sm_90a", torch.bfloat16), ("cpu", torch.bfloat16), ("cpu", torch.float64)):
        model.to(dtype)
        model._module_groups = None
        model.zero_grad()
        leaf = x.detach().clone().to(dtype).requires_grad_()
        with as_if_on(arch):
            if arch != "cpu":
                assert model.groups()[0].plan(model._target(arch)).is_fused
            y = model(leaf, *extras)
        dy = torch.randn_like(y) if dy is None else dy
        y.backward(dy.to(dtype))
        results.append([y.detach(), leaf.grad, *(p.grad for p in model.parameters())])
    assert results[0][0].shape[:-1] == x.shape[:-1]
    for fused, unfused, exact in zip(*results, strict=True):
        assert_as_accurate(fused, unfused, exact.float())


def test_two_linears_with_different_splits() -> None:
    """Each linear uses its own splits, whichever sum is larger; fused and unfused alike."""
    mlp = MLP("scaled_geglu", bias=True)
    for first, second in itertools.permutations([(4, 0, 9), (6, 7, 1), (0, 2, 2)], 2):
        splits = Splits("rows", first, 20)
        model = mlp.build(splits, "cpu", torch.float64)
        x, probs = torch.randn(20, mlp.hidden, dtype=torch.float64), torch.rand(20, dtype=torch.float64)
        x[sum(first) :] = probs[sum(first) :] = float("nan")
        x.requires_grad_()
        probs.requires_grad_()
        s1, s2 = torch.tensor(first), torch.tensor(second)
        results = []
        for arch in ("cpu", "sm_90a"):
            model.to(torch.float64 if arch == "cpu" else torch.bfloat16)
            model._module_groups = None
            with as_if_on(arch):
                y = model(x, s1, probs, s2)
            grads = torch.autograd.grad(y.float().square().sum(), [x, probs, *model.parameters()])
            results.append([y.detach(), *grads])
        for unfused, fused in zip(*results, strict=True):
            assert unfused.isfinite().all()
            error = (unfused - fused.double()).norm() / unfused.norm().clamp(min=1e-30)
            assert error < 0.05 and fused.isfinite().all()


@pytest.mark.parametrize("needs", list(itertools.product([False, True], repeat=3)), ids=str)
def test_only_wanted_gradients(needs: tuple[bool, bool, bool]) -> None:
    """Any mix of frozen FC1, frozen FC2 and an input that wants no gradient; fused gives what unfused gives."""
    want_x, want_fc1, want_fc2 = needs
    mlp = MLP(bias=True, scale_bias=True)
    model = mlp.build(TAIL, "cpu", torch.bfloat16)
    model[0].requires_grad_(want_fc1)
    model[2].requires_grad_(want_fc2)
    inputs = Inputs.random(TAIL, mlp.hidden, "cpu", torch.bfloat16)
    outcomes = []
    for arch in ("cpu", "sm_90a"):
        model._module_groups = None
        model.zero_grad()
        x = inputs.x.clone().requires_grad_(want_x)
        with as_if_on(arch):
            y = model(x, *mlp.extras(TAIL.tensor(), inputs.probs))
        assert y.requires_grad == any(needs)
        if any(needs):
            y.backward(inputs.dy)
        outcomes.append([x.grad, *(p.grad for p in model.parameters())])
    for unfused, fused in zip(*outcomes, strict=True):
        assert (unfused is None) == (fused is None)
        if fused is not None:
            assert (unfused - fused).norm() <= 0.02 * unfused.norm()


@pytest.mark.parametrize("arch", ["cpu", "sm_90a"])
@pytest.mark.parametrize("probs_dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_chain_that_ends_in_a_scaled_activation(arch: str, probs_dtype: torch.dtype) -> None:
    """Fused and unfused alike: NaN in the tail of x, probs and dy reaches nothing; any float dtype of probs."""
    model = ops.Sequential(ops.GroupedLinear(3, 16, 32, device="cpu", dtype=torch.bfloat16), ops.ScaledSwiGLU())
    x, dy = torch.randn(TAIL.rows, 16).bfloat16(), torch.randn(TAIL.rows, 16).bfloat16()
    probs = torch.rand(TAIL.rows).to(probs_dtype)
    for t in (x, dy, probs):
        t[TAIL.used :] = float("nan")
    x.requires_grad_()
    probs.requires_grad_()
    with as_if_on(arch):
        y = model(x, TAIL.tensor(), probs)
    y.backward(dy)
    for result in (y, x.grad, probs.grad):
        assert (result[TAIL.used :] == 0).all() and result.isfinite().all()
    assert probs.grad.dtype == probs_dtype and (probs.grad[: TAIL.used] != 0).any()


def test_dense_linear_rounds_once_fused_and_unfused() -> None:
    model = ops.Sequential(ops.Linear(64, 48, device="cpu", dtype=torch.bfloat16))
    torch.nn.init.normal_(model[0].bias)
    x = torch.randn(37, 64).bfloat16()
    once = F.linear(x.float(), model[0].weight.float(), model[0].bias.float()).bfloat16()
    for arch in ("cpu", "sm_90a"):
        model._module_groups = None
        with as_if_on(arch):
            y = model(x)
        assert (y != once).float().mean() < 0.01  # sums in another order may cross a rounding boundary


@pytest.mark.parametrize("activation", [*ACTIVATIONS, *UNFUSED_ACTIVATIONS])
def test_gradcheck(activation: str) -> None:
    """Numerical gradients in FP64 with respect to x, probs and every parameter; one group is empty, one row is tail."""
    mlp = MLP(activation, hidden=4, intermediate=4, bias=True, scale_bias=True, interleave=2)
    splits = Splits("small", (2, 0, 1), rows=4)
    model = mlp.build(splits, "cpu", torch.float64)
    names = [name for name, _ in model.named_parameters()]
    x = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    probs = torch.rand(4, dtype=torch.float64, requires_grad=True)

    def run(x: torch.Tensor, probs: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        values = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(model, values, (x, *mlp.extras(splits.tensor(), probs)))

    parameters = [p.detach().clone().requires_grad_() for p in model.parameters()]
    assert torch.autograd.gradcheck(run, (x, probs, *parameters), atol=1e-5)


def _dense_mlp(factory: dict, grouped: ops.GroupedLinear) -> ops.Sequential:
    return ops.Sequential(ops.Linear(16, 16, **factory), ops.ScaledSwiGLU(), ops.Linear(8, 8, **factory), grouped)


def _tail_chains() -> list[tuple[str, ops.Sequential, int]]:
    """Chains with ops before and after the grouped linear, and how many probs they take before and after the splits."""
    factory = {"device": "cpu", "dtype": torch.float64}
    make = lambda k, n: ops.GroupedLinear(3, k, n, **factory)  # noqa: E731
    return [
        ("activation first", ops.Sequential(ops.SwiGLU(), make(8, 16)), 0),
        ("scaled activation first", ops.Sequential(ops.ScaledSwiGLU(), make(8, 16)), 1),
        ("linear first", ops.Sequential(ops.Linear(16, 8, **factory), make(8, 16)), 0),
        ("bias last", ops.Sequential(make(16, 16), ops.GELU(), ops.Bias(16, **factory)), 0),
        ("dense mlp first", _dense_mlp(factory, make(8, 16)), 1),
        ("linear last", ops.Sequential(make(16, 16), ops.Linear(16, 16, **factory)), 0),
    ]


@pytest.mark.parametrize(("name", "model", "leading_probs"), _tail_chains(), ids=lambda value: str(value)[:24])
def test_tails_reach_nothing_wherever_the_grouped_linear_stands(name, model, leading_probs: int) -> None:
    """Results with NaN in the tail equal those of the rows alone, and the tail of y, dx and dprobs is zero."""
    for p in model.parameters():
        torch.nn.init.normal_(p)
    x, dy = (torch.randn(TAIL.rows, 16, dtype=torch.float64) for _ in range(2))
    probs = torch.rand(TAIL.rows, dtype=torch.float64)
    for t in (x, dy, probs):
        t[TAIL.used :] = float("nan")
    outcomes = []
    for rows in (TAIL.rows, TAIL.used):
        model.zero_grad()
        leaf, weight = x[:rows].clone().requires_grad_(), probs[:rows].clone().requires_grad_()
        y = model(leaf, *[weight] * leading_probs, TAIL.tensor())
        y.backward(dy[:rows])
        row_shaped = [y.detach(), leaf.grad, *[weight.grad] * leading_probs]
        outcomes.append((row_shaped, [p.grad for p in model.parameters()]))
    for long, short in zip(outcomes[0][0], outcomes[1][0], strict=True):
        torch.testing.assert_close(long[: TAIL.used], short)
        assert (long[TAIL.used :] == 0).all()
    for long, short in zip(outcomes[0][1], outcomes[1][1], strict=True):
        torch.testing.assert_close(long, short)


@pytest.mark.parametrize("arch", ["cpu", "sm_90a"])
def test_a_frozen_weight_with_a_trained_bias(arch: str) -> None:
    model = ops.Sequential(ops.Linear(16, 8, device="cpu", dtype=torch.bfloat16))
    model[0].weight.requires_grad_(False)
    with as_if_on(arch):
        model(torch.randn(5, 16).bfloat16()).sum().backward()
    assert (model[0].bias.grad == 5).all() and model[0].weight.grad is None


@pytest.mark.parametrize("arch", ["cpu", "sm_90a"])
def test_probs_of_a_dense_activation_beside_a_grouped_linear(arch: str) -> None:
    """NaN probs in rows of no group reach no weight, fused or not."""
    factory = {"device": "cpu", "dtype": torch.bfloat16}
    after = ops.Sequential(ops.GroupedLinear(2, 16, 16, **factory), ops.Linear(16, 32, **factory), ops.ScaledSwiGLU())
    before = _dense_mlp(factory, ops.GroupedLinear(2, 8, 16, **factory))
    splits, probs = torch.tensor([2, 3]), torch.rand(8)
    probs[5:] = float("nan")
    for model, extras in ((after, (splits, probs)), (before, (probs, splits))):
        x = torch.randn(8, 16).bfloat16().requires_grad_()
        with as_if_on(arch):
            y = model(x, *extras)
        y.sum().backward()
        assert y.isfinite().all() and x.grad.isfinite().all()
        assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("arch", ["cpu", "sm_90a"])
def test_trainable_tensors_over_a_frozen_module(arch: str) -> None:
    """torch.func.functional_call: what required a gradient at forward gets one."""
    mlp = MLP(bias=True, scale_bias=True)
    model = mlp.build(TAIL, "cpu", torch.bfloat16).requires_grad_(False)
    dense = ops.Sequential(ops.Linear(16, 8, device="cpu", dtype=torch.bfloat16)).requires_grad_(False)
    inputs = Inputs.random(TAIL, mlp.hidden, "cpu", torch.bfloat16)
    calls = (
        (model, (inputs.x, *mlp.extras(TAIL.tensor(), inputs.probs))),
        (dense, (torch.randn(5, 16).bfloat16(),)),
    )
    for module, arguments in calls:
        trainable = {name: p.detach().clone().requires_grad_() for name, p in module.named_parameters()}
        with as_if_on(arch):
            y = torch.func.functional_call(module, trainable, arguments)
        y.nan_to_num().sum().backward()
        assert all(t.grad is not None for t in trainable.values())
