"""pack_glu_weights_: the same results, rows of weights in blocks, checkpoints as before."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

import fusible_ops as ops
from fusible_ops.packing import follow_packing, pack_glu_weights_
from tests.cases import Splits
from tests.compare import assert_as_accurate, assert_bitwise_equal
from tests.house.sources import ROOT
from tests.models import MLP, Inputs, as_if_on, step

SPLITS = Splits("three", (5, 0, 9), 16)
ORDER = [*range(32), *range(64, 96), *range(32, 64), *range(96, 128)]  # of 64 gate and 64 up rows
LAYOUTS = [
    {},
    {"single_grouped_weight": True, "single_grouped_bias": True},
    {"transposed_weight": True},
    {"single_grouped_weight": True, "transposed_weight": True},
]


def model(layout: dict | None = None, **more: object) -> ops.Sequential:
    mlp = MLP("scaled_swiglu", hidden=16, intermediate=64, bias=True, linear=layout or {}, **more)
    return mlp.build(SPLITS, "cpu", torch.float32)


def dense(bias: bool = True) -> ops.Sequential:
    factory = {"bias": bias, "device": "cpu", "dtype": torch.float32}
    return ops.Sequential(ops.Linear(16, 128, **factory), ops.SwiGLU(), ops.Linear(64, 16, **factory))


def rows(p: Tensor, transposed: bool, is_weight: bool) -> Tensor:
    """[..., rows]: one value for each row of a weight or bias."""
    return p if not is_weight else p[..., 0, :] if transposed else p[..., 0]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_rows_lie_in_blocks_and_the_state_dict_is_as_before(layout: dict) -> None:
    m, transposed = model(layout), "transposed_weight" in layout
    values = torch.arange(128.0)
    with torch.no_grad():
        for name, p in m[0].named_parameters():
            p.copy_(values if "bias" in name else values if transposed else values[:, None])
    before = copy.deepcopy(m.state_dict())
    m.pack_glu_weights_(interleave=32)
    for name, p in m[0].named_parameters():
        held = rows(p, transposed, "weight" in name).reshape(-1, 128)
        assert (held == torch.tensor(ORDER).float()).all(), name
    for name, value in m.state_dict().items():
        assert_bitwise_equal(value, before[name], name)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_results_and_gradients_are_the_same(layout: dict) -> None:
    m = model(layout)
    packed, exact = copy.deepcopy(m).pack_glu_weights_(), copy.deepcopy(m).double()
    mlp = MLP("scaled_swiglu", hidden=16, intermediate=64, bias=True)
    inputs = Inputs.random(SPLITS, 16, "cpu", torch.float32)
    want, got, wide = step(m, mlp, inputs), step(packed, mlp, inputs), step(exact, mlp, inputs.to(torch.float64))
    for name, value in want.items():
        if name.startswith("dfc1"):
            key = name.removeprefix("dfc1.")
            got[name] = packed[0].packing.out_of_memory(got[name], packed[0].output_dim(key))
        assert_as_accurate(got[name], value, wide[name], name)


def test_the_interleave_goes_with_the_weights() -> None:
    """Set by itself it would say something else of the same rows, and plans are made already."""
    with pytest.raises(AttributeError, match="glu_interleave_size"):
        ops.SwiGLU().glu_interleave_size = 32


def test_dense_and_without_bias() -> None:
    for bias in (True, False):
        m = dense(bias)
        x, before = torch.randn(4, 16), copy.deepcopy(m.state_dict())
        y = m(x)
        m.pack_glu_weights_()
        assert m[1].glu_interleave_size == 32 and m[0].weight[32, 0] == before["0.basic_ops.0.weight"][64, 0]
        assert_bitwise_equal(m(x), y, "y")
        for name, value in m.state_dict().items():
            assert_bitwise_equal(value, before[name], name)


@pytest.mark.parametrize("saver", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("loader", [False, True], ids=["plain", "packed"])
def test_a_checkpoint_goes_either_way(saver: bool, loader: bool) -> None:
    one, other = model(), model({"single_grouped_weight": True})
    for m, packs in ((one, saver), (other, loader)):
        if packs:
            m.pack_glu_weights_()
    saved = one.state_dict()
    other.load_state_dict(saved)
    back = model()
    back.load_state_dict(other.state_dict())
    for name, value in back.state_dict().items():
        assert_bitwise_equal(value, saved[name], name)
    x, sizes, probs = torch.randn(16, 16), torch.tensor(SPLITS.sizes), torch.rand(16)
    assert_bitwise_equal(other(x, sizes, probs, sizes), one(x, sizes, probs, sizes), "y")


def test_rows_that_a_pairwise_model_stores_are_packed_too() -> None:
    """GPT-OSS stores g0, u0, g1, u1, ...: interleave 1, which runs as it is, and which its checkpoint keeps."""
    m = model(interleave=1)
    with torch.no_grad():
        m[0].weight0.copy_(torch.arange(128.0)[:, None])
    m.pack_glu_weights_()
    assert m[0].weight0[:3, 0].tolist() == [0, 2, 4] and m[0].weight0[32:35, 0].tolist() == [1, 3, 5]
    assert (m.state_dict()["fc1.weight0"][:, 0] == torch.arange(128.0)).all()


def test_gradients_main_grads_and_optimizer_state_are_packed_with_the_weights() -> None:
    plain, packed = model(), None
    packed = copy.deepcopy(plain)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.1) for m in (plain, packed)]
    mlp = MLP("scaled_swiglu", hidden=16, intermediate=64, bias=True)
    inputs = Inputs.random(SPLITS, 16, "cpu", torch.float32)
    for i in range(3):
        for m, optimizer in zip((plain, packed), optimizers, strict=True):
            step(m, mlp, inputs)
            optimizer.step()
        if i == 0:
            for m in (plain, packed):
                m[0].weight0.main_grad = torch.arange(128.0).repeat_interleave(16)  # flat, as some keep it
            packed.pack_glu_weights_(optimizers=[optimizers[1]])
            assert (packed[0].weight0.main_grad[::16] == torch.tensor(ORDER).float()).all()
            assert_bitwise_equal(packed[0].weight0.grad, plain[0].weight0.grad[ORDER], "grad")
    for (name, value), other in zip(packed.state_dict().items(), plain.state_dict().values(), strict=True):
        assert_bitwise_equal(value, other, name)
    one, two = (optimizer.state_dict() for optimizer in optimizers)
    for number, state in one["state"].items():
        for key, value in state.items():
            assert_bitwise_equal(two["state"][number][key], value, key)


def test_an_optimizer_s_checkpoint_goes_either_way() -> None:
    m = model()
    mlp = MLP("scaled_swiglu", hidden=16, intermediate=64, bias=True)
    optimizer = torch.optim.Adam(m.parameters())
    step(m, mlp, Inputs.random(SPLITS, 16, "cpu", torch.float32))
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    other = copy.deepcopy(m).pack_glu_weights_()
    later = torch.optim.Adam(other.parameters())
    follow_packing(other, later)
    later.load_state_dict(saved)
    weight = other[0].weight0
    assert_bitwise_equal(later.state[weight]["exp_avg"], optimizer.state[m[0].weight0]["exp_avg"][ORDER], "exp_avg")
    for number, state in later.state_dict()["state"].items():
        for key, value in state.items():
            assert_bitwise_equal(value, saved["state"][number][key], key)


def test_what_cannot_be_packed_is_named_and_nothing_changes() -> None:
    good, bad = ops.Linear(16, 128, device="cpu"), ops.Linear(64, 160, device="cpu")
    m = ops.Sequential(good, ops.SwiGLU(), bad, ops.SwiGLU(), ops.Linear(80, 8, device="cpu"))
    before = copy.deepcopy(m.state_dict())
    with pytest.raises(ValueError, match=r"Linear 2, before SwiGLU 3, has 80 gate columns, needs a multiple of 32"):
        m.pack_glu_weights_()
    for name, value in m.state_dict().items():
        assert_bitwise_equal(value, before[name], name)
    assert m[1].glu_interleave_size is None and good.basic_ops[0].packing is None


def test_errors() -> None:
    m = model().pack_glu_weights_()
    with pytest.raises(ValueError, match="GroupedLinear fc1, before ScaledSwiGLU act, is packed already"):
        m.pack_glu_weights_()
    with pytest.raises(ValueError, match="needs no packing: its rows lie in blocks of 32, as glu_interleave_size says"):
        model(interleave=32).pack_glu_weights_()
    with pytest.raises(ValueError, match="there is no gated activation after a linear"):
        ops.Sequential(ops.Linear(8, 8, device="cpu"), ops.SReLU()).pack_glu_weights_()
    with pytest.raises(ValueError, match="interleave is 3, needs one of 1, 2, 4"):
        model().pack_glu_weights_(interleave=3)
    with ops.quantized_model_init(recipe=ops.Float8BlockScaling()):
        quantised = dense()
    with pytest.raises(ValueError, match="holds quantised weights; pack before they are quantised"):
        quantised.pack_glu_weights_()


def test_a_packed_model_is_planned_anew() -> None:
    m = MLP("scaled_swiglu", hidden=64, intermediate=64).build(SPLITS, "cpu", torch.bfloat16)
    assert "glu_interleave_size is None, needs 32; pack_glu_weights_(interleave=32) does it" in m.explain("sm_100a")
    m.pack_glu_weights_()
    assert "grouped_mlp_sm100" in m.explain("sm_100a") and "3 of 3 ops fused" in m.explain("sm_100a")
    with as_if_on("sm_100a"):
        copy.deepcopy(m)(torch.randn(16, 64).bfloat16(), *_extras())


NOT_PACKED = "glu_interleave_size is None, needs 32; pack_glu_weights_(interleave=32) does it"
RECIPES = {"": None, "mxfp8_": ops.MXFP8BlockScaling(), "nvfp4_": ops.NVFP4BlockScaling()}


@pytest.mark.parametrize("format", RECIPES)
@pytest.mark.parametrize("grouped", [True, False], ids=["grouped", "dense"])
def test_what_explain_says_on_blackwell_before_and_after(grouped: bool, format: str) -> None:
    """The interleave is the first condition named; packed, the whole chain is fused. The page on Blackwell has the
    table.
    """
    factory, recipe = {"device": "cpu", "dtype": torch.bfloat16}, RECIPES[format]
    if grouped:
        mlp = MLP("scaled_swiglu", hidden=64, intermediate=64).build(SPLITS, "cpu", torch.bfloat16)
    else:
        mlp = ops.Sequential(ops.Linear(64, 128, **factory), ops.SwiGLU(), ops.Linear(64, 64, **factory))
    rule = f"{'grouped_mlp' if grouped else 'mlp'}_{format}sm100"
    told = mlp.explain("sm_100a", recipe=recipe).splitlines()
    after = told[next(i for i, line in enumerate(told) if line.startswith("unfused: ")) + 1]
    assert after.split()[:2] == ["x", rule] and after.endswith(NOT_PACKED)
    alone = [line.partition(":")[0] for line in told if line.startswith(("grouped_linear", "linear"))]
    name = "grouped_linear" if grouped else "linear"
    assert alone == [f"{name}_{format}sm100"] * (2 if grouped or format else 0)
    assert told[-1] == f"{len(alone)} of 3 ops fused"
    told = mlp.pack_glu_weights_().explain("sm_100a", recipe=recipe).splitlines()
    assert told[1].startswith(f"{rule}: ") and told[-1] == "3 of 3 ops fused"
    page = (ROOT / "docs" / "blackwell.md").read_text()
    before = ", ".join(f"`{name}`" for name in alone[:1]) or "unfused"
    assert f"| {before} | `{rule}` |\n" in page


def _extras() -> list[Tensor]:
    sizes = torch.tensor(SPLITS.sizes)
    return [sizes, torch.rand(16), sizes]


def shared_layers(what: str) -> torch.nn.ModuleList:
    """Two layers that have an op or weights in common."""
    first, second = model(), model()
    if what == "activation":
        second[1] = first[1]
    elif what == "linear":
        second[0] = first[0]
    else:
        for name, p in first[0].named_parameters():
            setattr(second[0], name, p)
    return torch.nn.ModuleList([first, second])


@pytest.mark.parametrize("what", ["activation", "linear", "weights"])
def test_what_layers_share_is_packed_once(what: str) -> None:
    layers, mlp = shared_layers(what), MLP("scaled_swiglu", hidden=16, intermediate=64)
    inputs, before = Inputs.random(SPLITS, 16, "cpu", torch.float32), copy.deepcopy(layers.state_dict())
    extras = mlp.extras(SPLITS.tensor("cpu"), inputs.probs)
    want = [layer(inputs.x, *extras) for layer in layers]
    pack_glu_weights_(layers, 32)
    for layer, y in zip(layers, want, strict=True):
        assert_bitwise_equal(layer(inputs.x, *extras), y)
    for name, value in layers.state_dict().items():
        assert_bitwise_equal(value, before[name], name)


def test_what_is_shared_with_rows_that_stay_is_refused() -> None:
    packed, linear = model(), model()[0]
    linear.weight1 = packed[0].weight1
    blocks = ops.Sequential(packed[0], ops.ScaledSwiGLU(glu_interleave_size=16))
    weights = copy.deepcopy(packed.state_dict())
    for other, why in [
        (ops.Sequential(packed[0]), "shares GroupedLinear with a run that is not packed"),
        (ops.Sequential(packed[1]), "shares ScaledSwiGLU with a run that is not packed"),
        (ops.Sequential(linear), "weight1 of a GroupedLinear, which is not packed"),
        (blocks, "weight0 with an op whose rows lie otherwise"),
    ]:
        with pytest.raises(ValueError, match=why):
            pack_glu_weights_(torch.nn.ModuleList([packed, other]), 32)
    for name, p in packed.named_parameters():
        assert_bitwise_equal(p, weights[name], name)


def test_optimizers_may_come_from_a_generator() -> None:
    m = dense()
    optimizer = torch.optim.AdamW(m.parameters())
    m(torch.randn(4, 16)).sum().backward()
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict()["state"])
    m.pack_glu_weights_(32, (o for o in [optimizer]))
    for number, state in optimizer.state_dict()["state"].items():
        for name, value in state.items():
            assert_bitwise_equal(value, before[number][name], name)
