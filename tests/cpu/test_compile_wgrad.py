"""Weight-gradient, row-wise and table kernels compile for SM90 without a GPU: no spills, nothing serialised."""

from __future__ import annotations

import re
from typing import Any

import pytest

from cute_kernels import launch
from cute_kernels.activation import Activation
from cute_kernels.catalog import SM90_ACTIVATIONS
from cute_kernels.hopper import device_table, grouped_wgrad, rowwise
from cute_kernels.hopper.device_table import TableOptions
from cute_kernels.hopper.grouped_wgrad import WgradOptions
from cute_kernels.hopper.grouped_wgrad_configs import choose
from cute_kernels.hopper.rowwise import ColumnSumsOptions, DactOptions, GroupOffsetsOptions, RowDotsOptions

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed: nothing can be compiled")

PAIRED, ODD = 256, 128  # rows of a gradient: two row tiles, one


def wgrad(element: str, out: str, rows: int, accumulate=False, block=0, separate=False, dynamic=False) -> WgradOptions:
    config = choose(rows, 4 if out == "float32" else 2, accumulate, block).config
    return WgradOptions(element, out, config, accumulate, block > 0, separate, dynamic)


WGRAD = (
    wgrad("bfloat16", "bfloat16", PAIRED),
    wgrad("bfloat16", "bfloat16", ODD),
    wgrad("float16", "float16", PAIRED, block=32),
    wgrad("float16", "float16", ODD, block=3),
    wgrad("bfloat16", "float32", PAIRED, separate=True),
    wgrad("bfloat16", "float32", PAIRED, True),
    wgrad("bfloat16", "float32", ODD, True, separate=True),
    wgrad("bfloat16", "float32", PAIRED, True, 32, True),
    wgrad("bfloat16", "float32", PAIRED, True, 4, True),
    wgrad("bfloat16", "bfloat16", ODD, True, 4, True),
    wgrad("float16", "float16", PAIRED, True),
    wgrad("bfloat16", "bfloat16", PAIRED, dynamic=True),
    wgrad("bfloat16", "bfloat16", ODD, dynamic=True),
    wgrad("bfloat16", "float32", PAIRED, True, separate=True, dynamic=True),
    wgrad("bfloat16", "float32", ODD, True, 4, dynamic=True),
)
ROWWISE = (
    GroupOffsetsOptions("int32"),
    GroupOffsetsOptions("int64"),
    *(DactOptions("bfloat16", Activation(kind), "float32", True) for kind in SM90_ACTIVATIONS),
    DactOptions("float16", Activation("clamped_swiglu", 7.0, 1.702, 1.0), None, False),
    DactOptions("bfloat16", Activation("clamped_swiglu", 7.0, 1.702, 1.0), "float32", True, preact_interleave=1),
    DactOptions("bfloat16", Activation("swiglu"), None, True, preact_interleave=8),
    ColumnSumsOptions("bfloat16", None, False),
    ColumnSumsOptions("float16", "float32", True),
    RowDotsOptions("bfloat16"),
    GroupOffsetsOptions("int64", counts=True),
    GroupOffsetsOptions("int32", padded=True),
    DactOptions("bfloat16", Activation("swiglu"), "float32", True, alone=True),
    ColumnSumsOptions("bfloat16", "float32", True, alone=True),
    RowDotsOptions("bfloat16", alone=True),
)


def compile_and_read(module: str, options: Any, capfd: pytest.CaptureFixture[str]) -> tuple[str, Any]:
    """(what ptxas said, the compiled object)."""
    compiled = launch.compile_only(module, options, "sm_90a", "remarks{ptx}")
    captured = capfd.readouterr()
    said = captured.out + captured.err
    assert "bytes spill stores" in said, "ptxas said nothing"
    return said, compiled


def assert_clean(said: str) -> None:
    spilled = [int(count) for count in re.findall(r"(\d+) bytes spill", said)]
    assert not any(spilled), f"spilled bytes: {spilled}"
    assert "C75" not in said, "ptxas serialised a WGMMA"


@pytest.mark.parametrize("options", WGRAD, ids=str)
def test_grouped_wgrad(options, capfd):
    module = grouped_wgrad.MODULE_ADD if options.accumulate else grouped_wgrad.MODULE
    said, _ = compile_and_read(module, options, capfd)
    assert_clean(said)


@pytest.mark.parametrize("options", ROWWISE, ids=str)
def test_rowwise(options, capfd):
    said, _ = compile_and_read(rowwise.MODULE, options, capfd)
    assert_clean(said)


def test_table(capfd):
    said, _ = compile_and_read(device_table.MODULE, TableOptions(), capfd)
    assert_clean(said)


def test_host_and_device_agree():
    from cute_kernels.hopper import rowwise_kernel

    assert rowwise.CHUNK == rowwise_kernel.CHUNK
