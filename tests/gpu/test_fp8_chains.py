"""FP8 chains on Hopper: fused as accurate as unfused against FP32; bytes; no host sync; graphs; long sums."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

import fusible_ops as ops
from tests.cases import Splits, full
from tests.compare import assert_bitwise_equal, floor, relative_error
from tests.models import MLP, Inputs, no_host_sync, step
from tests.places import HOPPER

pytestmark = HOPPER
BLOCK = ops.Float8BlockScaling()
F32 = ops.Float8BlockScaling(use_f32_scales=True)
BF16 = {"device": "cuda", "dtype": torch.bfloat16}
WORSE = 1.05
SPLITS = (
    full("one", 200),
    full("zeros", 0, 130, 0, 257),
    Splits("tail", (96, 0, 130, 74), 512),
    Splits("no_tokens", (0, 0, 0, 0), 64),
    Splits("no_rows", (0, 0, 0, 0), 0),
    Splits("129_groups", tuple(int(i * 37 % 61) for i in range(129)), 129 * 61),
)


def all_experts(results: dict[str, Tensor]) -> dict[str, Tensor]:
    """Results in FP32, those of all experts' weights as one: of an expert with few tokens any error may be small."""
    joined: dict[str, list[Tensor]] = {}
    for name, t in results.items():
        joined.setdefault(name.rstrip("0123456789"), []).append(t.flatten().float())
    return {name: torch.cat(parts) for name, parts in joined.items()}


def compare(mlp: MLP, splits: Splits, recipe: ops.Recipe = BLOCK, on_unfused: str = "error") -> None:
    """Errors against FP32 of every result: at most 1.05 times those of the unfused ops; zero in the tail."""
    model = mlp.build(splits, "cuda", torch.bfloat16, on_unfused=on_unfused)
    plain = mlp.build(splits, "cuda", torch.bfloat16, rules=())
    plain.load_state_dict(model.state_dict())
    inputs = Inputs.random(splits, mlp.hidden, "cuda", torch.bfloat16)
    exact = step(copy.deepcopy(plain).float(), mlp, inputs.to(torch.float32))
    with ops.autocast(recipe=recipe):
        fused, unfused = step(model, mlp, inputs), step(plain, mlp, inputs)
    assert fused.keys() == unfused.keys()
    for name, t in fused.items():
        assert t.isfinite().all() and t.dtype == unfused[name].dtype, name
    together = [all_experts(results) for results in (fused, unfused, exact)]
    for name, truth in together[2].items():
        mine, theirs = (relative_error(results[name], truth) for results in together[:2])
        assert mine <= WORSE * theirs + floor(torch.bfloat16), f"{name}: {mine:.4f}, unfused {theirs:.4f}"
    for name in {"y", "dx", "dprobs"} & fused.keys():
        assert (fused[name][splits.used :] == 0).all(), f"{name} is not zero in the tail"


@pytest.mark.parametrize("splits", SPLITS, ids=str)
@pytest.mark.parametrize("activation", ["scaled_swiglu", "srelu"])
def test_every_split(splits: Splits, activation: str) -> None:
    compare(MLP(activation, hidden=320, intermediate=192, bias=True, scale_bias=True), splits)


@pytest.mark.parametrize(
    ("activation", "recipe"),
    [("swiglu", F32), ("scaled_geglu", BLOCK), ("scaled_clamped", BLOCK), ("gelu", F32), ("scaled_srelu", BLOCK)],
)
def test_several_activations(activation: str, recipe: ops.Recipe) -> None:
    compare(MLP(activation, hidden=256, intermediate=320), SPLITS[2], recipe)


@pytest.mark.parametrize(("hidden", "intermediate"), [(2880, 2880), (2688, 1856), (2048, 768), (16, 64)])
def test_widths_that_are_no_multiples_of_128(hidden: int, intermediate: int) -> None:
    compare(MLP(hidden=hidden, intermediate=intermediate), Splits("two", (128, 256), 400))


@pytest.mark.parametrize("linear", [{"single_grouped_weight": True}, {"transposed_weight": True}], ids=str)
def test_weights_however_they_lie(linear: dict) -> None:
    compare(MLP(hidden=256, intermediate=192, linear=linear), SPLITS[1])


def test_bytes_of_the_fused_activation() -> None:
    """At most 2 % of the E4M3 values differ from those of the unfused ops where scales agree: by one step, or less than
    2^-8 of what a block can hold. (The tensor cores keep 13 bits of a sum of 128 products.)
    """
    splits, mlp = SPLITS[1], MLP(hidden=512, intermediate=384)
    model = mlp.build(splits, "cuda", torch.bfloat16)
    inputs = Inputs.random(splits, mlp.hidden, "cuda", torch.bfloat16)
    parts = [model[0], model[1], ops.Quantize()]
    with ops.autocast(recipe=BLOCK), torch.no_grad():
        got = ops.Sequential(*parts, on_unfused="error")(inputs.x, splits.tensor("cuda"), inputs.probs)
        want = ops.Sequential(*parts, rules=())(inputs.x, splits.tensor("cuda"), inputs.probs)
    rows = slice(0, splits.used)
    same_scale = (got.rowwise.scale == want.rowwise.scale).T[rows].repeat_interleave(128, 1)
    a, b = (t.rowwise.data[rows].float() for t in (got, want))
    assert same_scale.float().mean() >= 0.98
    differ = (a != b) & same_scale
    print(f"{differ.float().mean():.3%} of the values and {1 - same_scale.float().mean():.3%} of the scales differ")
    assert differ.float().mean() <= 0.02
    step = torch.exp2(torch.maximum(a.abs(), b.abs()).log2().floor().clamp(min=-6) - 3)
    assert ((a - b).abs() <= step.clamp(min=448 / 256))[differ].all()


def test_no_host_sync_and_the_same_bits_again() -> None:
    splits, mlp = SPLITS[2], MLP(hidden=256, intermediate=192, bias=True, scale_bias=True)
    model = mlp.build(splits, "cuda", torch.bfloat16, on_unfused="error")
    inputs = Inputs.random(splits, mlp.hidden, "cuda", torch.bfloat16)
    with ops.autocast(recipe=BLOCK):
        want = step(model, mlp, inputs)
        for _ in range(3):
            x, probs = inputs.x.clone().requires_grad_(), inputs.probs.clone().requires_grad_()
            extras = mlp.extras(splits.tensor("cuda"), probs)
            model.zero_grad()
            with no_host_sync("cuda"):
                y = model(x, *extras)
                y.backward(inputs.dy)
            assert_bitwise_equal(y.detach(), want["y"], "y")
            assert_bitwise_equal(x.grad, want["dx"], "dx")
            for name, p in model.named_parameters():
                assert_bitwise_equal(p.grad, want[f"d{name}"], name)


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
@pytest.mark.parametrize("held", [False, True], ids=["plain", "held"])
def test_a_graph_replays_with_other_splits_and_weights(held: bool) -> None:
    """The graph quantises the weights itself, so what changes them between replays is seen."""
    mlp, splits = MLP(hidden=256, intermediate=192), full("even", 128, 128, 128, 128)
    with ops.quantized_model_init(enabled=held, recipe=BLOCK):
        model = mlp.build(splits, "cuda", torch.bfloat16, on_unfused="error")
    inputs = Inputs.random(splits, mlp.hidden, "cuda", torch.bfloat16)
    x, probs, sizes = inputs.x.requires_grad_(), inputs.probs.requires_grad_(), splits.tensor("cuda")

    def run() -> list[Tensor]:
        with ops.autocast(recipe=BLOCK):
            y = model(x, *mlp.extras(sizes, probs))
        return [y, *torch.autograd.grad(y, [x, probs, *model.parameters()], inputs.dy)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    for other in ((512, 0, 0, 0), (0, 0, 0, 512), (7, 121, 256, 64)):
        sizes.copy_(torch.tensor(other))
        with torch.no_grad():
            x.copy_(torch.randn_like(x))
            for p in model.parameters():
                p.mul_(1.5)
        graph.replay()
        for got, want in zip(results, run(), strict=True):
            assert_bitwise_equal(got.detach(), want.detach(), str(other))


def test_long_sums_do_not_drift() -> None:
    """x = w = 1.125, K = 16384: 20736 exactly; tensor cores alone keep too few bits."""
    op = ops.GroupedLinear(2, 16384, 256, bias=False, **BF16)
    with torch.no_grad():
        for p in op.parameters():
            p.fill_(1.125)
    x = torch.full((200, 16384), 1.125, **BF16)
    with ops.autocast(recipe=BLOCK), torch.no_grad():
        y = ops.Sequential(op, on_unfused="error")(x, torch.tensor([50, 150], device="cuda"))
    assert (y == torch.tensor(20736.0).bfloat16().item()).all()
