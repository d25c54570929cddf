"""Plain PyTorch quantisation gives the same bits on CUDA as on the CPU, and never makes the host wait."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from cute_kernels.quantization import hadamard
from cute_kernels.quantization.formats import E4M3, E5M2, Format, fp8_block, fp8_tensor, mxfp8, nvfp4
from cute_kernels.quantization.groups import dequantize_groups, quantize_groups
from cute_kernels.quantization.quantize import dequantize, quantize
from cute_kernels.quantization.random_bits import random_bytes, random_state
from cute_kernels.quantization.scale_layout import from_storage, swizzled_scale, to_storage
from cute_kernels.reference import group_offsets
from tests.cases import SPLITS, Splits
from tests.compare import assert_bitwise_equal
from tests.models import no_host_sync
from tests.oracle_values import values

pytestmark = pytest.mark.gpu

STATE = torch.tensor([123456789012345, 678])
FORMATS = [
    *(fp8_tensor(element, power_of_2) for element in (E4M3, E5M2) for power_of_2 in (False, True)),
    *(fp8_block(element, dims, power) for element in (E4M3, E5M2) for dims in (1, 2) for power in (False, True)),
    *(mxfp8(element, dims) for element in (E4M3, E5M2) for dims in (1, 2)),
    nvfp4(),
    nvfp4(2),
    nvfp4(hadamard=True, stochastic=True),
]


def one_nan(t: torch.Tensor) -> torch.Tensor:
    """Every FP32 NaN the same one; those of stored bytes are compared as they are."""
    return t.masked_fill(t.isnan(), float("nan")) if t.dtype == torch.float32 else t


def assert_same_on_cuda(compute: Callable[..., tuple[torch.Tensor | None, ...]], *tensors: torch.Tensor | None) -> None:
    there = [None if t is None else t.cuda() for t in tensors]
    with no_host_sync("cuda"):
        found = compute(*there)
    for i, (mine, want) in enumerate(zip(found, compute(*tensors), strict=True)):
        assert (mine is None) == (want is None)
        if mine is not None and want is not None:
            assert_bitwise_equal(one_nan(mine.cpu()), one_nan(want), f"result {i}")


def state_for(format: Format) -> torch.Tensor | None:
    return STATE if format.rounding == "stochastic" else None


@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("columnwise", [False, True])
@pytest.mark.parametrize("kind", ["values", "wide", "denormal", "bad"])
def test_quantize(format: Format, columnwise: bool, kind: str) -> None:
    x = {"values": values(160, 288), "wide": values(160, 288, 1, -60, 60).float()}.get(
        kind, values(160, 288, 2).float()
    )
    if kind == "denormal":
        x = x * 1e-38
    if kind == "bad":
        x[3, 5], x[70, 200], x[:, 32:64] = float("nan"), float("inf"), 0

    def compute(x: torch.Tensor, state: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        quantized = quantize(x, format, columnwise, state)
        return *quantized, dequantize(quantized, format, columnwise)

    assert_same_on_cuda(compute, x, state_for(format))


@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("splits", SPLITS, ids=str)
def test_quantize_groups(format: Format, splits: Splits) -> None:
    x = values(splits.rows, 64)
    x[splits.used :] = float("nan")

    def compute(x: torch.Tensor, offsets: torch.Tensor, state: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        rows = quantize_groups(x, offsets, format, state=state)
        columns = quantize_groups(x, offsets, format, True, state=state)
        return *rows, dequantize_groups(rows, format), *columns, dequantize_groups(columns, format, True)

    assert_same_on_cuda(compute, x, group_offsets(splits.tensor(), splits.rows), state_for(format))


def test_storage_rotation_and_random_bytes() -> None:
    def compute(x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scale = quantize(x, mxfp8()).scale
        stored = to_storage(scale, mxfp8(), 160)
        swizzled = swizzled_scale(scale, mxfp8(), 160)
        back = from_storage(stored, mxfp8(), 160, 288)
        return stored, swizzled, back, hadamard.rotate(x), hadamard.rotate_back(x), random_bytes(1000, state, 1)

    assert_same_on_cuda(compute, values(160, 288), STATE)


def test_replayed_graph_draws_fresh_bits_and_a_kept_state_repeats() -> None:
    x, format = torch.full((64, 64), 0.3, device="cuda"), nvfp4(stochastic=True)
    x[:, ::16] = 6.0  # so that 0.3 lies between two codes, 0 and 0.5; alone it would be the largest, and exact
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        quantize(x, format, state=random_state("cuda"))
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        state = random_state("cuda")
        first, again = quantize(x, format, state=state).data, quantize(x, format, state=state).data
    drawn = []
    for _ in range(2):
        graph.replay()
        torch.cuda.synchronize()
        assert_bitwise_equal(again, first, "recomputed")
        drawn.append(first.clone())
    assert not torch.equal(*drawn)
