"""Weight-gradient, row-wise and table kernels compile for SM90 without a GPU: no spills, nothing serialised."""

from __future__ import annotations

import re
from typing import Any

import pytest

from cute_kernels import launch
from cute_kernels.activation import KINDS, Activation
from cute_kernels.hopper import device_table, grouped_wgrad, rowwise
from cute_kernels.hopper.device_table import TableOptions
from cute_kernels.hopper.grouped_wgrad import WgradOptions
from cute_kernels.hopper.rowwise import ColumnSumsOptions, DactOptions, GroupOffsetsOptions, RowDotsOptions

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed: nothing can be compiled")

SMEM_BYTES = 232_448  # that one CTA may use
WGRAD = (
    WgradOptions("bfloat16", "bfloat16"),
    WgradOptions("float16", "float16", interleaved=True),
    WgradOptions("bfloat16", "float32", separate=True),
    WgradOptions("bfloat16", "float32", accumulate=True),
    WgradOptions("bfloat16", "float32", interleaved=True, separate=True, accumulate=True),
    WgradOptions("bfloat16", "bfloat16", accumulate=True, interleaved=True, separate=True),
    WgradOptions("float16", "float16", accumulate=True),
)
ROWWISE = (
    GroupOffsetsOptions("int32"),
    GroupOffsetsOptions("int64"),
    *(DactOptions("bfloat16", Activation(kind), "float32", True) for kind in KINDS),
    DactOptions("float16", Activation("clamped_swiglu", 7.0, 1.702, 1.0), None, False),
    ColumnSumsOptions("bfloat16", None, False),
    ColumnSumsOptions("float16", "float32", True),
    RowDotsOptions("bfloat16"),
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
    said, _ = compile_and_read(grouped_wgrad.MODULE, options, capfd)
    assert_clean(said)


@pytest.mark.parametrize("options", ROWWISE, ids=str)
def test_rowwise(options, capfd):
    said, _ = compile_and_read(rowwise.MODULE, options, capfd)
    assert_clean(said)


def test_table(capfd):
    said, _ = compile_and_read(device_table.MODULE, TableOptions(), capfd)
    assert_clean(said)


def test_operands_and_staging_fit_shared_memory():
    from cute_kernels.hopper import grouped_wgrad_kernel as kernel

    operands = kernel.STAGES * (kernel.TILE_M + kernel.TILE_N) * kernel.TILE_K * 2
    assert operands + kernel.TILE_M * kernel.ROW_BYTES + 16 * kernel.STAGES <= SMEM_BYTES


def test_host_and_device_agree():
    from cute_kernels.hopper import grouped_wgrad_kernel as kernel
    from cute_kernels.hopper import rowwise_kernel

    assert (grouped_wgrad.TILE_ROWS, grouped_wgrad.TILE_COLUMNS) == (kernel.TILE_M, kernel.TILE_N)
    assert rowwise.CHUNK == rowwise_kernel.CHUNK
