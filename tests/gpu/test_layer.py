"""The whole layer on Hopper: the same bits every time, few launches, the fallback's memory, widths of real models."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fusible_ops as ops
from cute_kernels import launch
from tests.bench.timing import launches, requested_bytes
from tests.cases import Splits, full
from tests.gpu.test_chains import compare
from tests.gpu.test_fp8_chains import compare as compare_fp8
from tests.models import ACTIVATIONS, MLP, Inputs

pytestmark = pytest.mark.gpu("sm_90a")
BF16 = {"device": "cuda", "dtype": torch.bfloat16}


def _uneven(groups: int, rows: int) -> Splits:
    """Random sizes, some zero, with a tail."""
    generator = torch.Generator().manual_seed(groups)
    share = torch.rand(groups, generator=generator) * (torch.rand(groups, generator=generator) > 0.2)
    sizes = (share / share.sum() * (rows - 100)).long().tolist()
    return Splits(f"{groups} groups", tuple(sizes), rows)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_half_precision(activation: str) -> None:
    splits = full("zeros", 0, 130, 0, 257)
    mlp = MLP(activation, hidden=136, intermediate=160, bias=True, scale_bias=True)
    compare(mlp, splits, torch.float16)


@pytest.mark.parametrize(
    ("activation", "hidden", "intermediate", "interleave"),
    [("scaled_clamped", 2880, 2880, 1), ("scaled_swiglu", 2880, 2880, None), ("srelu", 2688, 1856, None)],
)
def test_widths_that_are_no_multiples_of_128(
    activation: str, hidden: int, intermediate: int, interleave: int | None
) -> None:
    """GPT-OSS and Nemotron: 2880 is 22.5 and 1856 is 14.5 times 128."""
    mlp = MLP(activation, hidden=hidden, intermediate=intermediate, bias=True, interleave=interleave)
    compare(mlp, full("two", 128, 256))
    compare(mlp, Splits("two_and_tail", (17, 0), 200))


def _different(a: Tensor, b: Tensor) -> Tensor:
    """How many elements differ in their bits, on the device."""
    kind = torch.int16 if a.element_size() == 2 else torch.int32
    return (a.view(kind) != b.view(kind)).sum()


@pytest.mark.parametrize("activation", ["scaled_swiglu", "scaled_srelu"])
def test_same_bits_in_200_runs(activation: str) -> None:
    """y, dx, dprobs, the scales' gradient, weight and bias gradients of 16 uneven groups in 8192 rows."""
    splits = _uneven(16, 8192)
    single = {"single_grouped_weight": True, "single_grouped_bias": True}
    mlp = MLP(activation, hidden=512, intermediate=384, bias=True, scale_bias=True, linear=single)
    model = mlp.build(splits, on_unfused="error", **BF16)
    inputs, sizes = Inputs.random(splits, mlp.hidden, "cuda", torch.bfloat16), splits.tensor("cuda")
    x, probs = inputs.x.requires_grad_(), inputs.probs.requires_grad_()
    scales = probs.detach().clone().requires_grad_()
    wanted = [x, probs, scales, *model.parameters()]

    def run() -> list[Tensor]:
        y = model(x, sizes, probs, sizes, scales)
        return [y.detach(), *torch.autograd.grad(y, wanted, inputs.dy)]

    first = run()
    different = torch.zeros(len(first), dtype=torch.int64, device="cuda")
    for _ in range(200):
        different += torch.stack([_different(a, b) for a, b in zip(run(), first, strict=True)])
    assert different.tolist() == [0] * len(first)


def test_launches_of_a_layer() -> None:
    """Without bias at most 3 forward (offsets, product and activation, product) and 5 backward, memsets included."""
    splits = full("even", *[64] * 8)
    mlp = MLP("scaled_swiglu", hidden=256, intermediate=128, linear={"single_grouped_weight": True})
    model = mlp.build(splits, on_unfused="error", **BF16)
    inputs, sizes = Inputs.random(splits, mlp.hidden, "cuda", torch.bfloat16), splits.tensor("cuda")
    x, probs = inputs.x.requires_grad_(), inputs.probs.requires_grad_()
    results: list[Tensor] = []
    for _ in range(2):
        results.clear()
        model.zero_grad()
        x.grad = probs.grad = None
        forward = launches(lambda: results.append(model(x, sizes, probs, sizes)))
        backward = launches(lambda: results[0].backward(inputs.dy))
    assert 0 < len(forward) <= 3, forward
    assert 0 < len(backward) <= 5, backward


def _peak_bytes(model: ops.Sequential, mlp: MLP, splits: Splits) -> int:
    """The most that forward and backward hold beside what was there."""
    x, dy = (torch.randn(splits.rows, mlp.hidden, **BF16) for _ in range(2))
    probs, sizes = torch.rand(splits.rows, device="cuda", requires_grad=True), splits.tensor("cuda")
    x.requires_grad_()
    peak = 0
    for _ in range(2):
        x.grad = probs.grad = None
        model.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = requested_bytes()
        model(x, *mlp.extras(sizes, probs)).backward(dy)
        peak = requested_bytes("peak") - before
    return peak


def test_peak_memory() -> None:
    """y, the pre-activation, its gradient and the activation; or, later, y and all gradients with the former's."""
    splits = full("even", *[4096] * 4)
    mlp = MLP("scaled_swiglu", hidden=2048, intermediate=1024, linear={"single_grouped_weight": True})
    model = mlp.build(splits, on_unfused="error", **BF16)
    y = dx = splits.rows * mlp.hidden * 2
    act, preact = splits.rows * mlp.intermediate * 2, splits.rows * mlp.intermediate * 4
    weights = sum(p.numel() * 2 for p in model.parameters())
    most = max(y + 2 * preact + act, y + preact + weights + dx)
    assert _peak_bytes(model, mlp, splits) <= most + 64 * splits.rows


@pytest.mark.parametrize("activation", ["scaled_clamped", "clamped_swiglu"])
def test_peak_memory_of_the_fallback(activation: str) -> None:
    """Unfused needs the activation for backward, and no more than that beside what fused needs."""
    splits = full("even", *[16384] * 4)
    mlp = MLP(activation, hidden=2880, intermediate=2880, linear={"single_grouped_weight": True})
    fused = _peak_bytes(mlp.build(splits, on_unfused="error", **BF16), mlp, splits)
    torch.cuda.empty_cache()
    unfused = _peak_bytes(mlp.build(splits, rules=(), **BF16), mlp, splits)
    assert unfused <= fused + splits.rows * mlp.intermediate * 2, (unfused, fused)


@pytest.mark.parametrize("compared", [compare, compare_fp8])
def test_a_backward_kernel_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch, compared: Callable[..., None]) -> None:
    """Its formula runs on the device, on what the fused forward kept."""
    former = launch.kernel

    def kernel(module: str, options: object, arch: str) -> launch.Function:
        if "dact" in module or getattr(options, "kind", "") == "dact":
            raise launch.CompileError("no registers left")
        return former(module, options, arch)

    monkeypatch.setattr(launch, "kernel", kernel)
    with pytest.warns(UserWarning, match="backward: no registers left"):
        compared(MLP(hidden=256, intermediate=128, bias=True), full("uneven", 130, 0, 257, 65), on_unfused="allow")
