"""Functions over the caller's weights: LoRA beside frozen experts, merged weights, adapters in a chain."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fusible_ops as ops
from fusible_ops import functional, offload
from fusible_ops.functional import grouped_linear, grouped_mlp
from tests.cases import TAIL, Splits, full
from tests.compare import assert_as_accurate, assert_bitwise_equal
from tests.models import MLP, Inputs, step
from tests.places import Place

FOUR = full("four", 24, 0, 7, 33)
RANK = 16


@pytest.fixture(autouse=True)
def nothing_kept() -> None:
    """Plans are kept by device, and these tests take one for another."""
    functional._local.__dict__.clear()


def grads(y: Tensor, dy: Tensor, *tensors: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(y, tensors, dy))


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_it_is_the_op_over_the_callers_weights(place: Place, separate: bool, transposed: bool) -> None:
    layout = {"single_grouped_weight": not separate, "single_grouped_bias": not separate}
    common = {"device": place.device, "dtype": torch.bfloat16}
    op = ops.GroupedLinear(4, 64, 96, transposed_weight=transposed, scale_bias=True, **layout, **common)
    weight, bias = op.weight_parameters(), op.bias_parameters()
    x = torch.randn(FOUR.used, 64, requires_grad=True, **common)
    scales = torch.rand(FOUR.used, device=place.device, requires_grad=True)
    dy, sizes = torch.randn(FOUR.used, 96, **common), FOUR.tensor(place.device)
    one = lambda tensors: tensors if separate else tensors[0]  # noqa: E731
    y = grouped_linear(x, one(weight), sizes, one(bias), scales=scales, transposed_weight=transposed)
    wanted = ops.Sequential(op)(x, sizes, scales)
    assert_bitwise_equal(y, wanted.detach())
    given = (x, scales, *weight, *bias)
    for a, b in zip(grads(y, dy, *given), grads(wanted, dy, *given), strict=True):
        assert_bitwise_equal(a, b)


@pytest.mark.parametrize("activation", ["scaled_swiglu", "srelu"])
def test_the_mlp(place: Place, activation: str) -> None:
    mlp = MLP(activation, bias=True, scale_bias=True)
    model = mlp.build(TAIL, place.device, torch.bfloat16)  # fused where functions are
    inputs = Inputs.random(TAIL, mlp.hidden, place.device, torch.bfloat16)
    wanted = step(model, mlp, inputs)
    x, probs = inputs.x.clone().requires_grad_(), inputs.probs.clone().requires_grad_()
    fc1, act, fc2 = model
    y = grouped_mlp(
        x, fc1.weight_parameters(), fc2.weight_parameters(), TAIL.tensor(place.device), act,
        probs if mlp.scaled else None, fc1_bias=fc1.bias_parameters(), fc2_bias=fc2.bias_parameters(), scales=probs,
    )  # fmt: skip
    model.zero_grad()
    y.backward(inputs.dy)
    assert_bitwise_equal(y, wanted["y"])
    got = {"dx": x.grad, "dprobs": probs.grad, **{f"d{name}": p.grad for name, p in model.named_parameters()}}
    for name, t in got.items():
        assert_bitwise_equal(t, wanted[name], name)


def lora(x: Tensor, w: Tensor, a: Tensor, b: Tensor, splits: Splits) -> Tensor:
    """The reference in the dtype of its tensors, expert by expert."""
    rows = [x[each] for each in splits.slices()]
    return torch.cat([F.linear(r, w[g]) + F.linear(F.linear(r, a[g]), b[g]) for g, r in enumerate(rows)])


@pytest.mark.parametrize("merged", [False, True])
def test_lora_beside_frozen_experts(place: Place, merged: bool) -> None:
    """Gradients reach A and B, beside the weight or merged into it; the weight itself is frozen."""
    common = {"device": place.device, "dtype": torch.bfloat16}
    w, x, dy = torch.randn(4, 96, 64, **common) / 8, torch.randn(FOUR.used, 64, **common), None
    a, b = torch.randn(4, RANK, 64, **common) / 8, torch.randn(4, 96, RANK, **common) / 4
    dy = torch.randn(FOUR.used, 96, **common)
    for t in (a, b, x):
        t.requires_grad_()
    sizes = FOUR.tensor(place.device)
    if merged:
        y = grouped_linear(x, w + b @ a, sizes)
    else:
        y = grouped_linear(x, w, sizes) + grouped_linear(grouped_linear(x, a, sizes), b, sizes)
    got = [y.detach(), *grads(y, dy, x, a, b)]
    plain = [t.detach().clone().requires_grad_() for t in (x, a, b)]
    exact = [t.detach().double().requires_grad_() for t in (x, a, b)]
    y, z = lora(plain[0], w, *plain[1:], FOUR), lora(exact[0], w.double(), *exact[1:], FOUR)
    same = [y.detach(), *grads(y, dy, *plain)]
    truth = [z.detach(), *grads(z, dy.double(), *exact)]
    assert w.grad is None
    for ours, theirs, true in zip(got, same, truth, strict=True):
        if merged:  # one more rounding, of the merged weight
            torch.testing.assert_close(ours.double(), true, rtol=3e-2, atol=3e-2 * true.abs().max().item())
        else:
            assert_as_accurate(ours, theirs, true)


def test_views_of_a_checkpoint_are_read_where_they_lie(place: Place) -> None:
    """A slice of somebody's tensor, and a weight that changes between calls."""
    common = {"device": place.device, "dtype": torch.bfloat16}
    whole, sizes = torch.randn(8, 96, 64, **common), FOUR.tensor(place.device)
    x = torch.randn(FOUR.used, 64, **common)
    first = grouped_linear(x, whole[:4], sizes)
    assert_bitwise_equal(grouped_linear(x, whole[4:], sizes), grouped_linear(x, list(whole[4:]), sizes))
    whole[:4] *= 2
    assert_bitwise_equal(grouped_linear(x, whole[:4], sizes), first * 2)


def test_what_is_no_weight() -> None:
    x, sizes = torch.randn(4, 8), torch.tensor([1, 3])
    for weight in (torch.randn(2, 8), torch.randn(1, 2, 3, 4)):
        with pytest.raises(ValueError, match="one tensor for all groups has 3 dimensions"):
            grouped_linear(x, weight, sizes)
    for weight in ([], [torch.randn(4, 8), torch.randn(5, 8)]):
        with pytest.raises(ValueError, match=r"weight must be one tensor \[G, N, K\]"):
            grouped_linear(x, weight, sizes)
    for weight, bias in (([None, None], None), (torch.randn(2, 4, 8), [None, None]), (torch.randn(2, 4, 8), "none")):
        with pytest.raises(TypeError, match="must be a tensor or a sequence of tensors, got one of"):
            grouped_linear(x, weight, sizes, bias)
    with pytest.raises(ValueError, match=r"must be \[2, 4\]"):
        grouped_linear(x, torch.randn(2, 4, 8), sizes, torch.randn(2, 5))
    with pytest.raises(ValueError, match="Expected 3 splits"):
        grouped_linear(x, torch.randn(3, 4, 8), sizes)
    with pytest.raises(ValueError, match="takes probs"):
        grouped_mlp(x, torch.randn(2, 8, 8), torch.randn(2, 8, 4), sizes, ops.ScaledSwiGLU())


@pytest.mark.parametrize("fused", [False, True], ids=["cpu", "cpu-fused"])
def test_in_a_graph(fused: bool) -> None:
    torch._dynamo.reset()
    with Place("cpu", fused).context():
        w, a, b = (torch.randn(shape).bfloat16() for shape in ((4, 96, 64), (4, RANK, 64), (4, 96, RANK)))
        v = torch.randn(4, 64, 48).bfloat16()

        def layer(x: Tensor, a: Tensor, b: Tensor, sizes: Tensor) -> Tensor:
            return grouped_mlp(x, w + b @ a, v, sizes, ops.SwiGLU())

        results = []
        for call in (torch.compile(layer, backend="aot_eager", fullgraph=True), layer):
            torch.manual_seed(3)
            given = [t.clone().requires_grad_() for t in (torch.randn(FOUR.used, 64).bfloat16(), a, b)]
            y = call(*given, FOUR.tensor())
            results.append([y.detach(), *grads(y, torch.ones_like(y), *given)])
        for got, want in zip(*results, strict=True):
            assert_bitwise_equal(got, want)


@pytest.mark.parametrize("first", [False, True], ids=["plain_first", "recipe_first"])
def test_a_recipe_breaks_the_graph(first: bool) -> None:
    """What was compiled under one recipe, or under none, does not run under another."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    x, fc1, fc2 = (torch.randn(shape).bfloat16() for shape in ((FOUR.used, 64), (4, 96, 64), (4, 64, 48)))

    def layer(x: Tensor) -> Tensor:
        y = grouped_mlp(x, fc1, fc2, FOUR.tensor(), ops.SwiGLU())
        return grouped_linear(y, fc2.mT.contiguous(), FOUR.tensor())

    compiled = torch.compile(layer, backend="aot_eager")
    for quantised in (first, not first, first):
        with ops.autocast(enabled=quantised, recipe=ops.Float8BlockScaling()):
            assert_bitwise_equal(compiled(x), layer(x))


def test_delayed_scaling_has_no_owner_here() -> None:
    """Scales that another caller's magnitudes have made would turn these into zeros."""
    x, fc1, fc2, sizes = torch.randn(8, 64), torch.randn(2, 96, 64), torch.randn(2, 64, 48), torch.tensor([3, 5])
    for call in (
        lambda: grouped_linear(x, fc1, sizes),
        lambda: grouped_mlp(x, fc1, fc2, sizes, ops.SwiGLU()),
    ):
        with ops.autocast(recipe=ops.DelayedScaling()), pytest.raises(RuntimeError, match="does not keep"):
            call()
        call()


class Adapter(ops.BasicOperation):
    """An op of somebody else's between two of ours: y = x + x A_g B_g."""

    def output_width(self, incoming: int | None) -> int | None:
        return incoming


def test_an_adapter_unfuses_its_pattern_alone_and_explain_says_so() -> None:
    common = {"device": "cpu", "dtype": torch.bfloat16}
    fc1, fc2 = ops.GroupedLinear(4, 64, 96, **common), ops.GroupedLinear(4, 48, 64, **common)
    model = ops.Sequential({"fc1": fc1, "adapter": Adapter(), "act": ops.ScaledSwiGLU(), "fc2": fc2})
    text = model.explain("sm_90a")
    assert "unfused: adapter adapter, ScaledSwiGLU act" in text and text.endswith("2 of 4 ops fused")
    assert "grouped_linear: fc = GroupedLinear fc1" in text and "grouped_linear: fc = GroupedLinear fc2" in text
    (data,) = model.explain("sm_90a", as_data=True)
    texts = [reason["text"] for refused in data["refusals"] for reason in refused["reasons"]]
    assert "wants an activation at position 1; found adapter adapter" in texts


def test_experts_are_views_with_names() -> None:
    op = ops.GroupedLinear(4, 64, 96, single_grouped_weight=True, device="cpu")
    views = list(op.expert_weights())
    assert [v.shape for v in views] == [(96, 64)] * 4
    with torch.no_grad():
        views[2].fill_(3.0)
    assert (op.weight[2] == 3).all() and not (op.weight[1] == 3).any()


def test_a_fused_mlp_keeps_the_input_and_the_output_of_its_first_linear(place: Place) -> None:
    """Recomputing the activation is what fused chains do: nothing else of the size of the rows is kept."""
    mlp = MLP("scaled_swiglu", hidden=64, intermediate=48)
    model = place.build(mlp, FOUR)
    inputs = Inputs.random(FOUR, 64, place.device, torch.bfloat16)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = model(inputs.x.clone().requires_grad_(), *mlp.extras(FOUR.tensor(place.device), inputs.probs))
    rows = [t for t in kept if t.dim() == 2 and t.shape[0] == FOUR.rows]
    widths = sorted(t.shape[1] for t in rows)
    assert widths == ([64, 96] if place.fused else [48, 64, 96])
    y.backward(inputs.dy)


def test_what_is_kept_may_wait_on_the_cpu(place: Place) -> None:
    """`save_on_cpu` sees what ops keep, fused or not."""
    mlp = MLP("scaled_swiglu", bias=True)
    model = place.build(mlp, TAIL)
    inputs = Inputs.random(TAIL, mlp.hidden, place.device, torch.bfloat16)
    wanted = step(model, mlp, inputs)
    with torch.autograd.graph.save_on_cpu():
        got = step(model, mlp, inputs)
    for name, want in wanted.items():
        assert_bitwise_equal(got[name], want, name)


OFFLOADED = {"fc1": [64], "act": [96], "fc2": [48], "none": []}


@pytest.mark.parametrize("marked", OFFLOADED)
def test_what_a_marked_op_keeps_waits_in_host_memory(
    place: Place, marked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its input alone, in a fused chain too (where the second linear's is not kept at all); gradients are the same."""
    moved: list[Tensor] = []
    real = offload.in_host_memory
    monkeypatch.setattr(offload, "in_host_memory", lambda t: moved.append(t) or real(t))
    mlp = MLP("scaled_swiglu", hidden=64, intermediate=48, bias=True)
    model = place.build(mlp, FOUR)
    inputs = Inputs.random(FOUR, 64, place.device, torch.bfloat16)
    wanted = step(model, mlp, inputs)
    if marked != "none":
        model.get_submodule(marked).offload_saved()
    model._module_groups = None
    for _ in range(2):
        moved.clear()
        got = step(model, mlp, inputs)
        widths = sorted({t.shape[1] for t in moved if t is not None})
        assert widths == ([] if place.fused and marked == "fc2" else OFFLOADED[marked])
        for name, want in wanted.items():
            assert_bitwise_equal(got[name], want, name)


@pytest.mark.gpu("sm_90a")
def test_host_memory_is_pinned_and_the_device_s_is_free() -> None:
    place = Place("cuda", True)
    mlp = MLP("scaled_swiglu", hidden=1024, intermediate=512)
    splits = full("two", 4096, 4096)
    model = place.build(mlp, splits)
    inputs = Inputs.random(splits, 1024, "cuda", torch.bfloat16)
    kept = []
    for marked in (False, True):
        if marked:
            model.act.offload_saved()
            model._module_groups = None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        y = model(inputs.x.requires_grad_(), *mlp.extras(splits.tensor("cuda"), inputs.probs))
        kept.append(torch.cuda.memory_allocated() - before)
        y.backward(inputs.dy)
        del y
    assert kept[0] - kept[1] == 8192 * 1024 * 2  # the pre-activation
