"""Grouped MLPs on Hopper: fused as accurate as unfused against FP32, in y, dx, dprobs and all parameter gradients."""

from __future__ import annotations

import copy

import pytest
import torch

import fusible_ops as ops
from cute_kernels import ops as kernels
from cute_kernels.activation import Activation
from tests.cases import Splits, full
from tests.compare import assert_as_accurate, assert_bitwise_equal
from tests.models import ACTIVATIONS, INTERLEAVED, MLP, Inputs, no_host_sync, step

pytestmark = pytest.mark.gpu("sm_90a")
BF16 = {"device": "cuda", "dtype": torch.bfloat16}


def _many(groups: int, seed: int) -> tuple[int, ...]:
    """Random sizes from 0 to 90, a third of the groups empty."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(0, 90, (groups,), generator=generator) * (torch.rand(groups, generator=generator) > 0.33)
    return tuple(sizes.tolist())


GPU_SPLITS = (
    full("one", 200),
    full("zeros", 0, 130, 0, 257),
    full("all_in_one", 0, 0, 300, 0),
    Splits("tail", (96, 0, 130, 74), 512),
    Splits("no_tokens", (0, 0, 0, 0), 64),
    Splits("no_rows", (0, 0, 0, 0), 0),
    full("33_groups", *_many(33, 1)),
    Splits("129_groups", _many(129, 2), sum(_many(129, 2)) + 77),
)


def compare(mlp: MLP, splits: Splits, dtype: torch.dtype = torch.bfloat16, on_unfused: str = "error") -> None:
    """A training step of the fused layer: as accurate as unfused against FP32, and zero in the tail."""
    model = mlp.build(splits, "cuda", dtype, on_unfused=on_unfused)
    plain = mlp.build(splits, "cuda", dtype, rules=())
    plain.load_state_dict(model.state_dict())
    exact = copy.deepcopy(plain).float()
    inputs = Inputs.random(splits, mlp.hidden, "cuda", dtype)
    fused, unfused = step(model, mlp, inputs, torch.int32), step(plain, mlp, inputs)
    reference = step(exact, mlp, inputs.to(torch.float32))
    assert fused.keys() == unfused.keys() == reference.keys()
    for name, value in fused.items():
        assert value.dtype == unfused[name].dtype, name
        assert_as_accurate(value, unfused[name], reference[name].to(value.dtype).float(), f"{splits} {name}")
    for name in ("y", "dx", "dprobs"):
        if name in fused:
            assert (fused[name][splits.used :] == 0).all(), f"{name} is not zero in the tail"


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("interleave", [None, 1, 32])
def test_every_activation(activation: str, interleave: int | None, bias: bool) -> None:
    if interleave and activation not in INTERLEAVED:
        pytest.skip("this activation has no halves, or takes them plain")
    mlp = MLP(activation, hidden=136, intermediate=160, bias=bias, scale_bias=bias, interleave=interleave)
    for splits in (GPU_SPLITS[1], GPU_SPLITS[3]):
        compare(mlp, splits)


@pytest.mark.parametrize("splits", GPU_SPLITS, ids=str)
@pytest.mark.parametrize("activation", ["scaled_swiglu", "srelu"])
def test_every_split(splits: Splits, activation: str) -> None:
    compare(MLP(activation, hidden=320, intermediate=296, bias=True, scale_bias=True), splits)


@pytest.mark.parametrize(("hidden", "intermediate"), [(8, 8), (64, 128), (72, 200), (1024, 512), (520, 1032)])
def test_awkward_widths(hidden: int, intermediate: int) -> None:
    compare(MLP(hidden=hidden, intermediate=intermediate), GPU_SPLITS[3])


@pytest.mark.parametrize("linear", [{"single_grouped_weight": True}, {"single_grouped_bias": True}])
def test_single_grouped_parameters(linear: dict) -> None:
    compare(MLP(hidden=256, intermediate=128, bias=True, linear=linear), GPU_SPLITS[3])


def test_parameters_with_storage_of_their_own() -> None:
    """Separate weight tensors, as a sharding framework leaves them: the same bits as packed ones, nothing copied."""
    mlp, splits = MLP(hidden=256, intermediate=128, bias=True), GPU_SPLITS[3]
    model = mlp.build(splits, "cuda", torch.bfloat16, on_unfused="error")
    inputs = Inputs.random(splits, mlp.hidden, "cuda", torch.bfloat16)
    packed = step(model, mlp, inputs)
    for p in reversed(list(model.parameters())):
        p.data = p.data.clone()
    separate = step(model, mlp, inputs)
    for name, want in packed.items():
        assert_bitwise_equal(separate[name], want, name)
    for p in model.parameters():
        p.data = torch.zeros_like(p)
    assert (step(model, mlp, inputs)["y"] == 0).all()


@pytest.mark.parametrize(
    "build",
    [
        lambda d: ops.Sequential(ops.GroupedLinear(4, 136, 200, **d), on_unfused="error"),
        lambda d: ops.Sequential(ops.GroupedLinear(4, 136, 200, **d), ops.Quantize(), on_unfused="error"),
        lambda d: ops.Sequential(ops.GroupedLinear(4, 136, 400, **d), ops.SwiGLU(), ops.Quantize()),
        lambda d: ops.Sequential(ops.GroupedLinear(4, 136, 200, bias=False, **d), ops.SReLU()),
    ],
)
def test_shorter_chains(build) -> None:
    splits = GPU_SPLITS[3]
    model = build({"device": "cuda", "dtype": torch.bfloat16})
    x = torch.randn(splits.rows, 136, device="cuda", dtype=torch.bfloat16)
    x[splits.used :] = float("nan")
    _compare_runs(model, x, splits.tensor("cuda"))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("act", [ops.SwiGLU, ops.GELU, ops.ClampedSwiGLU])
def test_dense_mlp(bias: bool, act: type[ops.FusibleOperation]) -> None:
    common = {"bias": bias, "device": "cuda", "dtype": torch.bfloat16}
    wide = 400 if act is not ops.GELU else 200
    model = ops.Sequential(ops.Linear(136, wide, **common), act(), ops.Linear(200, 72, **common), on_unfused="error")
    _compare_runs(model, torch.randn(3, 50, 136, device="cuda", dtype=torch.bfloat16))


def _compare_runs(model: ops.Sequential, x: torch.Tensor, *extras: torch.Tensor) -> None:
    plain = ops.Sequential(*copy.deepcopy(list(model)), rules=())
    exact = ops.Sequential(*copy.deepcopy(list(model)), rules=()).float()
    results, dy = [], None
    for runner, dtype in ((model, x.dtype), (plain, x.dtype), (exact, torch.float32)):
        leaf = x.detach().clone().to(dtype).requires_grad_()
        y = runner(leaf, *extras)
        dy = torch.randn_like(y) if dy is None else dy
        y.backward(dy.to(dtype))
        results.append([y.detach(), leaf.grad, *(p.grad for p in runner.parameters())])
    for fused, unfused, reference in zip(*results, strict=True):
        assert_as_accurate(fused, unfused, reference)


def test_no_host_sync_and_same_bits_every_time() -> None:
    mlp, splits = MLP(hidden=256, intermediate=128, bias=True, scale_bias=True), GPU_SPLITS[3]
    inputs = Inputs.random(splits, mlp.hidden, "cuda", torch.bfloat16)
    for rules in ({}, {"rules": ()}):
        model = mlp.build(splits, "cuda", torch.bfloat16, **rules)
        first = step(model, mlp, inputs)
        sizes = splits.tensor("cuda")
        torch.cuda.synchronize()
        for _ in range(3):
            model.zero_grad()
            x, probs = inputs.x.clone().requires_grad_(), inputs.probs.clone().requires_grad_()
            with no_host_sync("cuda"):
                y = model(x, *mlp.extras(sizes, probs))
                y.backward(inputs.dy)
            assert_bitwise_equal(y.detach(), first["y"])
            assert_bitwise_equal(x.grad, first["dx"])
            assert_bitwise_equal(probs.grad, first["dprobs"])
            for name, p in model.named_parameters():
                assert_bitwise_equal(p.grad, first[f"d{name}"], name)


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
def test_one_graph_replays_with_other_splits() -> None:
    """Forward and backward captured once; replays with other splits give exactly what eager gives."""
    mlp, splits = MLP(hidden=256, intermediate=128, bias=True), full("even", 128, 128, 128, 128)
    model = mlp.build(splits, "cuda", torch.bfloat16, on_unfused="error")
    inputs = Inputs.random(splits, mlp.hidden, "cuda", torch.bfloat16)
    sizes = splits.tensor("cuda")
    x, probs = inputs.x.clone().requires_grad_(), inputs.probs.clone().requires_grad_()
    params = list(model.parameters())

    def run() -> list[torch.Tensor]:
        y = model(x, *mlp.extras(sizes, probs))
        return [y, *torch.autograd.grad(y, [x, probs, *params], inputs.dy)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for other in ((512, 0, 0, 0), (0, 0, 0, 512), (7, 121, 256, 64), (100, 0, 3, 0)):
        sizes.copy_(torch.tensor(other))
        for _ in range(3):
            graph.replay()
        replayed = [t.detach().clone() for t in captured]
        for got, want in zip(replayed, run(), strict=True):
            assert_bitwise_equal(got, want.detach())


def test_hostile_splits_stay_in_bounds() -> None:
    """A sum above T and negative sizes: what fits is computed, nothing outside the buffers is touched."""
    mlp = MLP(hidden=256, intermediate=128, bias=True)
    model = mlp.build(full("rows", 100, 100), "cuda", torch.bfloat16, on_unfused="error")
    x = torch.randn(200, 256, device="cuda", dtype=torch.bfloat16)
    probs = torch.rand(200, device="cuda")
    for hostile, same_as in (((150, 2**31 - 1), (150, 50)), ((-5, 120), (0, 120)), ((2**31 - 1, 7), (200, 0))):
        outputs = []
        for sizes in (hostile, same_as):
            s = torch.tensor(sizes, device="cuda", dtype=torch.int32)
            y = model(x, s, probs, s)
            grads = torch.autograd.grad(y, list(model.parameters()), torch.ones_like(y))
            outputs.append([y.detach(), *grads])
        for got, want in zip(*outputs, strict=True):
            assert_bitwise_equal(got, want)


def test_hostile_splits_leave_the_memory_around_the_outputs_alone() -> None:
    """The operators that write rows, between guard rows: hostile splits change nothing outside."""
    rows, hidden, wide = 1024, 64, 128
    act = Activation("swiglu")
    x, w = torch.randn(rows, hidden, **BF16), torch.randn(2, wide, hidden, **BF16)
    for sizes in ((1500, 2**31 - 1), (-5, 1200), (2**62, 2**62)):
        offsets = kernels.group_offsets(torch.tensor(sizes, device="cuda"), rows)
        pool = torch.full((8, 1024, wide), 7.0, **BF16)  # freed below: outputs land among its values
        copies = [pool[i].clone() for i in range(8)]
        del copies[1::2]
        kernels.grouped_gemm(x, [w], offsets)
        kernels.grouped_gemm_act(x, [w], offsets, act)
        torch.cuda.synchronize()
        assert all((kept == 7.0).all() for kept in copies)


def test_another_stream_than_the_default_one() -> None:
    """Inputs made and results read on a side stream only, while the default stream is busy."""
    mlp, splits = MLP(hidden=256, intermediate=128, bias=True), GPU_SPLITS[3]
    model = mlp.build(splits, "cuda", torch.bfloat16, on_unfused="error")
    inputs = Inputs.random(splits, mlp.hidden, "cuda", torch.bfloat16)
    expected = step(model, mlp, inputs)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)  # the default stream waits; work put there by mistake would come too late
    with torch.cuda.stream(stream):
        got = {name: t.clone() for name, t in step(model, mlp, inputs).items()}
        stream.synchronize()
        for name, want in expected.items():
            assert_bitwise_equal(got[name], want, name)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_the_second_device_while_the_first_is_current() -> None:
    mlp, splits = MLP(hidden=256, intermediate=128, bias=True), GPU_SPLITS[3]
    model = mlp.build(splits, "cuda:0", torch.bfloat16, on_unfused="error")
    other = copy.deepcopy(model).to("cuda:1")
    inputs = Inputs.random(splits, mlp.hidden, "cuda:0", torch.bfloat16)
    there = Inputs(inputs.x.to("cuda:1"), inputs.probs.to("cuda:1"), inputs.dy.to("cuda:1"), splits)
    with torch.cuda.device(0):
        got = step(other, mlp, there)
    for name, want in step(model, mlp, inputs).items():
        assert got[name].device == torch.device("cuda:1")
        assert_bitwise_equal(got[name].to("cuda:0"), want, name)


def test_sliced_splits_and_wide_index_types() -> None:
    mlp, splits = MLP(hidden=128, intermediate=64), full("rows", 60, 68)
    model = mlp.build(splits, "cuda", torch.bfloat16, on_unfused="error")
    x, probs = torch.randn(128, 128, device="cuda", dtype=torch.bfloat16), torch.rand(128, device="cuda")
    outputs = []
    for dtype in (torch.int32, torch.int64):
        sliced = torch.tensor([60, -1, 68, -1], device="cuda", dtype=dtype)[::2]
        outputs.append(model(x, sliced, probs, sliced).detach())
    outputs.append(model(x, splits.tensor("cuda"), probs, splits.tensor("cuda")).detach())
    assert_bitwise_equal(outputs[0], outputs[1])
    assert_bitwise_equal(outputs[0], outputs[2])
