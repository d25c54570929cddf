"""Dynamic scheduling and SM margins on the GPU: the bits of static, counters zero again, graphs, streams, launches."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from cute_kernels import reference
from cute_kernels.activation import Activation
from cute_kernels.hopper import host_functions
from tests.bench.timing import launches
from tests.cases import Splits, full
from tests.compare import assert_bitwise_equal
from tests.gpu.test_graphs import BF16, Case, captured
from tests.models import MLP, Inputs, step

pytestmark = [
    pytest.mark.gpu("sm_90a"),
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream"),
]
SWIGLU = Activation("swiglu")
SPLITS = (
    Splits("ragged", (300, 0, 5, 128, 0, 77), rows=600),
    Splits("many_groups", tuple((i * 7) % 4 for i in range(1000)), rows=1700),
    Splits("long", (5000, 1, 0, 3000), rows=9000),
    Splits("nothing", (0, 0), rows=100),
    Splits("one_row", (1,), rows=1),
)
WIDTHS = ((200, 400), (64, 2048), (2000, 1152))
MARGINS = (0, 100)


@pytest.fixture
def counter() -> Iterator[Tensor]:
    """A counter, which whoever used it must leave at zero."""
    word = torch.zeros(1, dtype=torch.int32, device="cuda")
    yield word
    assert int(word) == 0


def products(splits: Splits, k: int, n: int) -> dict[str, Callable[..., tuple[Tensor | None, ...]]]:
    """Every kernel that takes tiles, as a function of how it shares the device."""
    kernels = host_functions()
    torch.manual_seed(0)
    x, dy, preact = (torch.randn(splits.rows, columns, **BF16) for columns in (k, n, 2 * k))
    for t in (x, dy, preact):
        t[splits.used :] = float("nan")
    w = [(torch.randn(splits.groups, n, k, **BF16) / k**0.5)]
    separate = list(w[0].clone().unbind(0))
    probs, sums = torch.rand(splits.rows, device="cuda"), torch.randn(splits.groups, n, k, device="cuda")
    bias = torch.randn(splits.groups, n, **BF16)
    offsets = reference.group_offsets(splits.tensor("cuda"), splits.rows)

    def accumulated(**how) -> tuple[Tensor]:
        out = sums.clone()
        kernels.grouped_wgrad_([out], dy, x, offsets, 0, True, **how)
        return (out,)

    return {
        "gemm": lambda **how: (kernels.grouped_gemm(x, w, offsets, bias, probs, **how),),
        "dgrad": lambda **how: (kernels.grouped_gemm_dgrad(dy, separate, offsets, **how),),
        "act": lambda **how: kernels.grouped_gemm_act(x, w, offsets, SWIGLU, None, probs, **how),
        "dact": lambda **how: kernels.grouped_gemm_dact(dy, w, offsets, preact, SWIGLU, probs, True, True, **how),
        "wgrad": lambda **how: (kernels.grouped_wgrad(dy, x, offsets, **how),),
        "accumulated": accumulated,
    }


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.parametrize("splits", SPLITS, ids=str)
def test_dynamic_gives_the_bits_of_static(splits: Splits, widths: tuple[int, int], counter: Tensor) -> None:
    if splits.groups > 100 and widths[0] > 1000:
        pytest.skip("4.6 GB of weights")
    for name, run in products(splits, *widths).items():
        want = run()
        for margin in MARGINS:
            for how in ({}, {"counter": counter}, {"counter": counter}, {"counter": counter}):
                for index, (mine, theirs) in enumerate(zip(run(sm_margin=margin, **how), want, strict=True)):
                    assert_bitwise_equal(mine, theirs, f"{name}[{index}], margin {margin}, {how}")


def test_row_wise_kernels_with_a_margin() -> None:
    kernels, splits, width = host_functions(), Splits("uneven", (700, 0, 1, 2500), rows=3300), 1032
    dy, preact = torch.randn(splits.rows, width, **BF16), torch.randn(splits.rows, 2 * width, **BF16)
    scale, bias = torch.rand(splits.rows, device="cuda"), torch.randn(splits.groups, width, **BF16)
    offsets = reference.group_offsets(splits.tensor("cuda"), splits.rows)
    calls = {
        "dbias": lambda **how: (kernels.grouped_dbias(dy, offsets, scale, 4, **how),),
        "dscale": lambda **how: (kernels.grouped_dscale(dy, bias, offsets, **how),),
        "dact": lambda **how: kernels.dact(dy, preact, offsets, scale, SWIGLU, True, **how),
    }
    for name, run in calls.items():
        want = run()
        for margin in (1, 60, 131):
            for mine, theirs in zip(run(sm_margin=margin), want, strict=True):
                assert_bitwise_equal(mine, theirs, f"{name}, margin {margin}")


def test_a_margin_that_leaves_no_sm() -> None:
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    mlp, splits = MLP(hidden=128, intermediate=64), full("two", 64, 64)
    model = mlp.build(splits, on_unfused="error", sm_margin=sms, **BF16)
    with pytest.raises(ValueError, match=f"sm_margin is {sms}, needs 0 to {sms - 1}"):
        step(model, mlp, Inputs.random(splits, mlp.hidden, **BF16))


SHARINGS = ({"scheduler": "dynamic"}, {"scheduler": "static", "sm_margin": 32}, {"sm_margin": 101})
LAYERS = (
    MLP("scaled_swiglu", hidden=328, intermediate=136, bias=True, scale_bias=True),
    MLP("geglu", hidden=200, intermediate=256, interleave=32, linear={"single_grouped_weight": True}),
    MLP("srelu", hidden=136, intermediate=200),
)


@pytest.mark.parametrize("sharing", SHARINGS, ids=str)
@pytest.mark.parametrize("mlp", LAYERS, ids=lambda mlp: mlp.activation)
def test_a_layer_gives_the_same_bits(mlp: MLP, sharing: dict) -> None:
    splits = Splits("uneven", (130, 0, 257, 1), rows=420)
    model, inputs = mlp.build(splits, on_unfused="error", **BF16), Inputs.random(splits, mlp.hidden, **BF16)
    want = step(model, mlp, inputs)
    for name, value in sharing.items():
        setattr(model, name, value)
    for _ in range(3):
        for name, got in step(model, mlp, inputs).items():
            assert_bitwise_equal(got, want[name], name)


def test_a_second_backward_and_delayed_weight_gradients_on_another_stream() -> None:
    mlp = MLP("scaled_swiglu", hidden=512, intermediate=384, linear={"delay_wgrad_compute": True})
    splits, side = full("four", 700, 0, 1300, 48), torch.cuda.Stream()
    model, inputs = mlp.build(splits, on_unfused="error", **BF16), Inputs.random(splits, mlp.hidden, **BF16)
    results = []
    for scheduler in ("static", "dynamic"):
        model.scheduler = scheduler
        x, probs = inputs.x.clone().requires_grad_(), inputs.probs.clone().requires_grad_()
        model.zero_grad()
        y = model(x, *mlp.extras(splits.tensor("cuda"), probs))
        y.backward(inputs.dy, retain_graph=True)
        in_use = list(model[2]._delayed)  # until the streams meet again
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            model[2].backward_dw()
        y.backward(inputs.dy)
        model[0].backward_dw()
        torch.cuda.current_stream().wait_stream(side)
        for linear in (model[2], model[0]):
            linear.backward_dw()
        torch.cuda.synchronize()
        in_use.clear()
        results.append([y.detach(), x.grad, probs.grad, *(p.grad.clone() for p in model.parameters())])
    for static, dynamic in zip(*results, strict=True):
        assert_bitwise_equal(dynamic, static)


def test_graphs_with_other_splits_and_eager_calls_between() -> None:
    """Two graphs and an eager call of one dynamic module, some at once on two streams; all bits are those of static."""
    mlp, splits = MLP(hidden=512, intermediate=256, bias=True), full("even", 256, 256, 256, 256)
    model = mlp.build(splits, on_unfused="error", scheduler="dynamic", **BF16)
    first, second, third = (Case(model, mlp, splits, seed) for seed in range(3))
    graphs = [captured(case.run) for case in (first, second)]
    side = torch.cuda.Stream()
    for sizes in ((1024, 0, 0, 0), (7, 121, 640, 256), (0, 0, 0, 0), (0, 0, 1, 1023)):
        for case in (first, second, third):
            case.change(sizes)
        side.wait_stream(torch.cuda.current_stream())
        for _ in range(3):
            graphs[0][0].replay()
            with torch.cuda.stream(side):
                graphs[1][0].replay()
            eager = third.run()
        torch.cuda.current_stream().wait_stream(side)
        found = [*(results for _, results in graphs), eager]
        kept = [[t.detach().clone() for t in results] for results in found]
        model.scheduler = "static"
        for case, results in zip((first, second, third), kept, strict=True):
            for got, want in zip(results, case.run(), strict=True):
                assert_bitwise_equal(got, want.detach())
        model.scheduler = "dynamic"


def test_it_takes_no_more_launches() -> None:
    mlp, splits = MLP(hidden=256, intermediate=128, linear={"single_grouped_weight": True}), full("even", *[64] * 8)
    model, inputs = mlp.build(splits, on_unfused="error", **BF16), Inputs.random(splits, mlp.hidden, **BF16)
    x, probs = inputs.x.requires_grad_(), inputs.probs.requires_grad_()
    counts, sizes = [], splits.tensor("cuda")
    for scheduler in ("static", "dynamic"):
        model.scheduler = scheduler
        for _ in range(2):
            results: list[Tensor] = []
            model.zero_grad()
            x.grad = probs.grad = None
            forward = launches(lambda: results.append(model(x, *mlp.extras(sizes, probs))))  # noqa: B023
            backward = launches(lambda: results[0].backward(inputs.dy))  # noqa: B023
        counts.append((len(forward), len(backward)))
    assert counts[0] == counts[1] and all(counts[0]), counts
