"""The fused MLP of Blackwell on the CPU, where its functions are their reference: rows, gradients, modes.

What cuDNN Frontend's kernels make of the calls: `test_blackwell_adapters` and `test_blackwell_calls`.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import fusible_ops as ops
from tests.cases import SMALL_SPLITS, SPLITS, Splits, full
from tests.compare import assert_as_accurate, assert_bitwise_equal
from tests.models import ACTIVATIONS, MLP, Inputs, as_if_on, step

WIDE = (full("tiles", 255, 257, 0, 300), Splits("tail", (96, 0, 130, 74), 512))
BUILDERS = {
    "swiglu": ops.SwiGLU,
    "scaled_swiglu": ops.ScaledSwiGLU,
    "clamped_swiglu": ops.ClampedSwiGLU,
    "scaled_clamped": ops.ScaledClampedQGeGLU,
}


@pytest.fixture(autouse=True)
def constants_of_cudnn(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The clamped activations with their own constants, which the BF16 kernel has built in."""
    for name, make in BUILDERS.items():
        monkeypatch.setitem(ACTIVATIONS, name, make)
    yield


def build(mlp: MLP, splits: Splits, **sequential: object) -> ops.Sequential:
    model = mlp.build(splits, "cpu", torch.bfloat16, on_unfused="error", **sequential)
    return model if mlp.interleave else model.pack_glu_weights_()


def compare(mlp: MLP, every: tuple[Splits, ...]) -> None:
    """Fused as accurate as unfused against FP64 over all the splits; and zero in the tail."""
    results: dict[str, list[list[Tensor]]] = {}
    for splits in every:
        model = build(mlp, splits)
        inputs = Inputs.random(splits, mlp.hidden, "cpu", torch.bfloat16)
        with as_if_on("sm_100a"):
            fused = step(model, mlp, inputs)
        model.rules = ()
        model.on_unfused = "allow"
        unfused = step(model, mlp, inputs)
        exact = step(copy.deepcopy(model).double(), mlp, inputs.to(torch.float64))
        assert fused.keys() == unfused.keys() == exact.keys()
        for name in fused:
            assert fused[name].shape == unfused[name].shape and fused[name].dtype == unfused[name].dtype, name
            flat = [t[name].flatten().float() for t in (fused, unfused, exact)]
            results.setdefault(name.split(".")[0] + name.split(".")[-1][:4], []).append(flat)
        for name in ("y", "dx", "dprobs"):
            assert name not in fused or (fused[name][splits.used :] == 0).all(), f"{name} is not zero in the tail"
    for name, pieces in results.items():
        assert_as_accurate(*(torch.cat(same) for same in zip(*pieces, strict=True)), name)


@pytest.mark.parametrize("activation", BUILDERS)
@pytest.mark.parametrize("interleave", [None, 32])
@pytest.mark.parametrize("bias", [False, True])
def test_fused_equals_unfused(activation: str, interleave: int | None, bias: bool) -> None:
    compare(MLP(activation, 64, 64, bias=bias, scale_bias=bias, interleave=interleave), (*SMALL_SPLITS, *WIDE))


def test_every_split() -> None:
    compare(MLP("scaled_swiglu", 32, 32, bias=True, scale_bias=True), SPLITS)


@pytest.mark.parametrize(
    "linear",
    [{"single_grouped_weight": True}, {"single_grouped_bias": True}, {"delay_wgrad_compute": True}],
    ids=str,
)
def test_other_parameters(linear: dict) -> None:
    mlp, splits = MLP("scaled_swiglu", 64, 32, bias=True, linear=linear), WIDE[1]
    if "delay_wgrad_compute" not in linear:
        compare(mlp, (splits,))
        return
    model = build(mlp, splits)
    inputs = Inputs.random(splits, mlp.hidden, "cpu", torch.bfloat16)
    with as_if_on("sm_100a"):
        assert "dfc1.weight0" not in step(model, mlp, inputs)
    for linear_op in (model[0], model[2]):
        linear_op.backward_dw()
    later = {name: p.grad for name, p in model.named_parameters()}
    direct = build(MLP("scaled_swiglu", 64, 32, bias=True), splits)
    direct.load_state_dict(model.state_dict())
    with as_if_on("sm_100a"):
        now = step(direct, mlp, inputs)
    for name, grad in later.items():
        assert_bitwise_equal(grad, now[f"d{name}"], name)


@pytest.mark.parametrize("mode", ["add", "overwrite"])
@pytest.mark.parametrize("separate", [False, True])
def test_main_grads(mode: str, separate: bool) -> None:
    """Three steps with the same input; an expert without tokens stays as it was, or becomes zero."""
    splits = WIDE[1]
    mlp = MLP("scaled_swiglu", 64, 32, linear={"accumulate_into_main_grad": True})
    model, plain = build(mlp, splits), build(MLP("scaled_swiglu", 64, 32), splits)
    plain.load_state_dict(model.state_dict())
    plain.on_unfused = "allow"
    inputs = Inputs.random(splits, mlp.hidden, "cpu", torch.bfloat16)
    for linear in (model[0], model[2]):
        weights = linear.weight_parameters()
        whole = torch.full((len(weights), *weights[0].shape), 3.0)
        for w, part in zip(weights, whole.unbind(0), strict=True):
            w.main_grad = part.clone() if separate else part
            w.overwrite_main_grad, w.grad_added_to_main_grad = mode == "overwrite", False
    with as_if_on("sm_100a"):
        for _ in range(3):
            step(model, mlp, inputs)
    want = step(plain, mlp, inputs)
    exact = step(copy.deepcopy(plain).float(), mlp, inputs.to(torch.float32))
    for name, w in model.named_parameters():
        base, times = (3.0, 3) if mode == "add" else (0.0, 1)
        assert w.grad_added_to_main_grad is True
        if name.endswith("1"):
            assert (w.main_grad == base).all(), name
        else:
            got = (w.main_grad - base) / times
            assert_as_accurate(got, want[f"d{name}"].float(), exact[f"d{name}"], name)


def test_frozen_parts_and_inputs() -> None:
    """Whatever wants a gradient gets the one that all together get."""
    mlp, splits = MLP("scaled_swiglu", 32, 32, bias=True), WIDE[1]
    inputs = Inputs.random(splits, mlp.hidden, "cpu", torch.bfloat16)
    sizes = splits.tensor("cpu")
    model = build(mlp, splits)
    with as_if_on("sm_100a"):
        want = step(model, mlp, inputs)
        for first, second, x_wants, probs_want in itertools.product((True, False), repeat=4):
            if not (first or second or x_wants or probs_want):
                continue
            for linear, wants in ((model[0], first), (model[2], second)):
                linear.requires_grad_(wants)
            model.zero_grad()
            x, probs = inputs.x.clone().requires_grad_(x_wants), inputs.probs.clone().requires_grad_(probs_want)
            model(x, sizes, probs, sizes).backward(inputs.dy)
            got = {"dx": x.grad, "dprobs": probs.grad, **{f"d{n}": p.grad for n, p in model.named_parameters()}}
            for name, grad in got.items():
                if grad is not None:
                    assert_bitwise_equal(grad, want[name], name)
            assert (x.grad is not None) == x_wants and (probs.grad is not None) == probs_want
            assert all((p.grad is not None) == first for p in model[0].parameters())
            assert all((p.grad is not None) == second for p in model[2].parameters())


def test_two_linears_with_different_splits() -> None:
    mlp = MLP("scaled_swiglu", 32, 32, bias=True)
    for first, second in itertools.permutations([(4, 0, 9), (6, 7, 1), (0, 2, 2)], 2):
        splits = Splits("rows", first, 20)
        model = build(mlp, splits)
        inputs = Inputs.random(splits, mlp.hidden, "cpu", torch.bfloat16)
        s1, s2 = torch.tensor(first), torch.tensor(second)
        results = []
        for arch, dtype in (("sm_100a", torch.bfloat16), ("cpu", torch.bfloat16), ("cpu", torch.float64)):
            model.to(dtype)
            model.on_unfused = "error" if arch != "cpu" else "allow"
            model.zero_grad()
            x = inputs.x.clone().to(dtype).requires_grad_()
            probs = inputs.probs.clone().requires_grad_()
            with as_if_on(arch):
                y = model(x, s1, probs, s2)
                y.backward(torch.ones_like(y))
            results.append([y.detach(), x.grad, probs.grad, *(p.grad for p in model.parameters())])
        for fused, unfused, exact in zip(*results, strict=True):
            assert_as_accurate(fused, unfused, exact.float())


@pytest.mark.parametrize("bias", [False, True])
def test_dense(bias: bool) -> None:
    """One group that holds every row; 3-D in, 3-D out."""
    common = {"bias": bias, "device": "cpu", "dtype": torch.bfloat16}
    model = ops.Sequential(ops.Linear(32, 128, **common), ops.SwiGLU(), ops.Linear(64, 32, **common))
    model.pack_glu_weights_()
    assert "mlp_sm100: " in model.explain("sm_100a") and "3 of 3 ops fused" in model.explain("sm_100a")
    x, dy, results = torch.randn(2, 65, 32).bfloat16(), torch.randn(2, 65, 32).bfloat16(), []
    for arch, dtype in (("sm_100a", torch.bfloat16), ("cpu", torch.bfloat16), ("cpu", torch.float64)):
        model.to(dtype)
        model.forget_plans()
        model.zero_grad()
        leaf = x.clone().to(dtype).requires_grad_()
        with as_if_on(arch):
            y = model(leaf)
        y.backward(dy.to(dtype))
        assert y.shape == x.shape == leaf.grad.shape
        results.append([y.detach(), leaf.grad, *(p.grad for p in model.parameters())])
    for fused, unfused, exact in zip(*results, strict=True):
        assert_as_accurate(fused, unfused, exact.float())


@pytest.mark.parametrize("rows", [0, 256])
def test_a_rank_without_tokens(rows: int) -> None:
    splits = Splits("cold", (0, 0, 0, 0), rows)
    mlp = MLP("scaled_swiglu", 64, 32, bias=True, scale_bias=True)
    with as_if_on("sm_100a"):
        results = step(build(mlp, splits), mlp, Inputs.random(splits, 64, "cpu", torch.bfloat16))
    assert results["y"].shape == (rows, 64)
    for name, t in results.items():
        assert (t == 0).all(), name


def test_garbage_in_the_tail_never_leaks() -> None:
    """The same bits as in a buffer that fits."""
    mlp = MLP("scaled_swiglu", 64, 64, bias=True, scale_bias=True)
    long, short = Splits("long", (96, 0, 130, 74), 512), Splits("short", (96, 0, 130, 74), 300)
    model = build(mlp, long)
    inputs = Inputs.random(long, mlp.hidden, "cpu", torch.bfloat16)
    cut = Inputs(inputs.x[:300].clone(), inputs.probs[:300].clone(), inputs.dy[:300].clone(), short)
    with as_if_on("sm_100a"):
        want, got = step(model, mlp, cut), step(model, mlp, inputs)
    for name, value in want.items():
        rows = slice(0, 300) if name in ("y", "dx", "dprobs") else slice(None)
        assert_bitwise_equal(got[name][rows], value, name)


def test_a_margin_reaches_every_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also under the dynamic scheduler that a margin makes the default: tiles are dealt out statically all the same."""
    from cute_kernels import ops as kernels

    asked: list[tuple[str, int]] = []
    for name in ("padded_gemm", "padded_gemm_act", "padded_gemm_dact", "padded_wgrad"):
        original = getattr(kernels, name)

        def watched(*args, _name=name, _original=original, sm_margin=0, **kwargs):
            asked.append((_name, sm_margin))
            return _original(*args, sm_margin=sm_margin, **kwargs)

        monkeypatch.setattr(kernels, name, watched)
    mlp = MLP("scaled_swiglu", 32, 32)
    with as_if_on("sm_100a"):
        step(build(mlp, WIDE[1], sm_margin=16), mlp, Inputs.random(WIDE[1], 32, "cpu", torch.bfloat16))
    assert asked == [
        ("padded_gemm_act", 16),
        ("padded_gemm", 16),
        ("padded_gemm_dact", 16),
        ("padded_wgrad", 16),
        ("padded_wgrad", 16),
        ("padded_gemm", 16),
    ]


def test_in_a_graph_of_torch_compile() -> None:
    """Whole, for any number of rows, with eager's bits."""
    mlp = MLP("scaled_swiglu", 64, 64, bias=True, scale_bias=True)
    torch._dynamo.reset()
    with as_if_on("sm_100a"):
        model = build(mlp, WIDE[1])
        compiled = torch.compile(copy.deepcopy(model), backend="aot_eager", fullgraph=True)
        for rows in (512, 600, 700):
            splits = Splits("rows", WIDE[1].sizes, rows)
            inputs = Inputs.random(splits, 64, "cpu", torch.bfloat16)
            want, got = step(model, mlp, inputs), step(compiled, mlp, inputs)
            for name, value in want.items():
                assert_bitwise_equal(got[name.replace("d", "d_orig_mod.", 1) if "." in name else name], value, name)
