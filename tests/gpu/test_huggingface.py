"""Experts modules of Hugging Face transformers on a Hopper GPU: nothing read by the host, graphs, the same bits again.

What they compute is compared in tests/test_huggingface.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fusible_ops import functional
from fusible_ops.integrations import huggingface
from fusible_ops.integrations.huggingface import NAME
from tests.bench.timing import launches
from tests.compare import assert_bitwise_equal, relative_error
from tests.models import no_host_sync

pytest.importorskip("transformers", reason="transformers is not installed")

from tests.hf_models import CONFIGS, experts_of, small

pytestmark = pytest.mark.gpu("sm_90a")
MODELS = list(CONFIGS)
TOKENS = 512


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    functional._local.__dict__.clear()
    huggingface.install(on_unfused="error")
    yield
    huggingface.uninstall()


class Layer:
    """An experts module, and inputs that may be drawn anew in place."""

    def __init__(self, name: str) -> None:
        self.experts: Any = experts_of(small(name, torch.bfloat16, "cuda", NAME))[0]
        common = {"device": "cuda", "dtype": torch.bfloat16}
        self.x = torch.randn(TOKENS, 64, requires_grad=True, **common)
        self.weights = torch.rand(TOKENS, 2, requires_grad=True, **common)
        self.choices = torch.zeros(TOKENS, 2, dtype=torch.int64, device="cuda")
        self.dy = torch.randn(TOKENS, 64, **common)
        self.draw(0)

    def draw(self, seed: int) -> None:
        generator = torch.Generator("cuda").manual_seed(seed)
        scores = torch.rand(TOKENS, 8, generator=generator, device="cuda")
        scores[:, seed % 8] = 0  # an expert without tokens, another one each time
        self.choices.copy_(scores.topk(2).indices)
        with torch.no_grad():
            self.x.normal_(generator=generator)

    def run(self) -> list[Tensor]:
        """Output and all gradients."""
        y = self.experts(self.x, self.choices, self.weights)
        wanted = [self.x, self.weights, *self.experts.parameters()]
        return [y.detach(), *torch.autograd.grad(y, wanted, self.dy)]


@pytest.mark.parametrize("name", MODELS)
def test_the_host_reads_nothing(name: str) -> None:
    layer = Layer(name)
    layer.run()
    with no_host_sync("cuda"):
        for _ in range(4):
            layer.run()


@pytest.mark.parametrize("name", MODELS)
def test_one_graph_for_all_that_a_router_chooses(name: str) -> None:
    layer, stream = Layer(name), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            layer.run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = layer.run()
    for seed in range(1, 5):
        layer.draw(seed)
        graph.replay()
        replayed = [t.clone() for t in held]
        for got, wanted in zip(replayed, layer.run(), strict=True):
            assert_bitwise_equal(got, wanted)


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_the_same_bits_again(name: str) -> None:
    layer = Layer(name)
    wanted = layer.run()
    for _ in range(50):
        for got, first in zip(layer.run(), wanted, strict=True):
            assert_bitwise_equal(got, first)


@pytest.mark.parametrize("name", MODELS)
def test_launches_of_a_layer(name: str) -> None:
    """Fewer than theirs, and nothing that scatters sums: tokens are gathered both ways."""
    layer, names = Layer(name), {}
    for implementation in (NAME, "grouped_mm"):
        layer.experts.config._experts_implementation = implementation
        for _ in range(4):
            layer.run()
        names[implementation] = launches(layer.run)
    assert len(names[NAME]) < len(names["grouped_mm"]), names
    assert not any("indexing_backward" in each or "index_put" in each for each in names[NAME]), names[NAME]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo instantiates Functions
def test_compiled() -> None:
    torch._dynamo.reset()
    layer = Layer("gpt_oss")
    wanted = layer.run()
    layer.experts.compile(fullgraph=True)
    for got, t in zip(layer.run(), wanted, strict=True):
        assert relative_error(got, t) < 2**-7  # the compiler may keep in FP32 what is rounded between two kernels
    torch._dynamo.reset()
