"""torch.compile(fullgraph=True) on a Hopper GPU through inductor: two graphs, our kernels in them, eager gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import fusible_ops as ops
from tests.cases import Splits
from tests.compare import assert_bitwise_equal
from tests.models import MLP, no_host_sync

pytestmark = [
    pytest.mark.gpu("sm_90a"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # inductor's own imports
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

BF16 = torch.bfloat16
SIZES = (256, 300, 512)


class Block(nn.Module):
    """x + 2 mlp(x): something for inductor on both sides."""

    def __init__(self, mlp: MLP, **options: object) -> None:
        super().__init__()
        self.kind = mlp
        self.mlp = mlp.build(Splits("any", (1, 1, 1, 1), 4), "cuda", BF16, **options)

    def forward(self, x: Tensor, splits: Tensor, probs: Tensor) -> Tensor:
        return x + 2 * self.mlp(x, *self.kind.extras(splits, probs))


def train(model: nn.Module, call: nn.Module, x: Tensor, splits: Tensor, probs: Tensor, dy: Tensor) -> list[Tensor]:
    model.zero_grad()
    x, probs = x.clone().requires_grad_(), probs.clone().requires_grad_()
    y = call(x, splits, probs)
    y.backward(dy)
    return [y.detach(), x.grad, probs.grad, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("single", [True, False])
def test_two_graphs(fused: bool, single: bool) -> None:
    torch._dynamo.reset()
    linear = {"single_grouped_weight": single, "single_grouped_bias": single}
    mlp = MLP("scaled_swiglu", hidden=256, intermediate=128, bias=True, linear=linear)
    model = Block(mlp, **({"on_unfused": "error"} if fused else {"rules": ()}))
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for rows in SIZES:
        splits = torch.randint(0, rows // 4, (4,), device="cuda")
        given = (torch.randn(rows, 256, device="cuda", dtype=BF16), splits, torch.rand(rows, device="cuda"))
        dy = torch.randn(rows, 256, device="cuda", dtype=BF16)
        got, wanted = train(model, compiled, *given, dy), train(model, model, *given, dy)
        for a, b in zip(got[1:], wanted[1:], strict=True):
            assert a.shape == b.shape and a.stride() == b.stride()
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2 * b.float().abs().max().item())
        torch.testing.assert_close(got[0], wanted[0], rtol=2e-2, atol=2e-2)
        x, splits, probs = given
        with no_host_sync("cuda"):  # as in training: calls that record nothing would have graphs of their own
            y = compiled(x.requires_grad_(), splits, probs.requires_grad_())
        assert_bitwise_equal(y.detach(), got[0])
    assert counter.frame_count <= 2


def test_our_kernels_are_what_runs() -> None:
    torch._dynamo.reset()
    model = Block(MLP("scaled_swiglu", hidden=256, intermediate=128), on_unfused="error")
    compiled = torch.compile(model, fullgraph=True)
    x = torch.randn(512, 256, device="cuda", dtype=BF16, requires_grad=True)
    splits = torch.tensor([100, 0, 300, 50], device="cuda")
    probs = torch.rand(512, device="cuda")
    compiled(x, splits, probs).sum().backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        compiled(x, splits, probs).sum().backward()
    found = {e.name for e in profiler.events() if e.name.startswith("fusible_ops::")}
    wanted = {"grouped_gemm_act", "grouped_gemm_", "grouped_gemm_dact", "grouped_wgrad", "grouped_gemm_dgrad"}
    assert {f"fusible_ops::{name}" for name in wanted} <= found


def test_functional_forms_in_a_graph() -> None:
    torch._dynamo.reset()
    common = {"device": "cuda", "dtype": BF16}
    w, v = torch.randn(4, 256, 256, **common) / 16, torch.randn(4, 256, 128, **common) / 16
    a, b = (torch.randn(shape, **common).mul_(0.1).requires_grad_() for shape in ((4, 16, 256), (4, 256, 16)))

    def layer(x: Tensor, sizes: Tensor) -> Tensor:
        return ops.functional.grouped_mlp(x, w + b @ a, v, sizes, ops.SwiGLU())

    compiled = torch.compile(layer, fullgraph=True)
    x, sizes = torch.randn(300, 256, **common), torch.tensor([100, 0, 150, 50], device="cuda")
    results = []
    for call in (compiled, layer):
        y = call(x, sizes)
        results.append([y.detach(), *torch.autograd.grad(y.float().square().sum(), (a, b))])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=3e-2, atol=3e-2 * want.float().abs().max().item())
