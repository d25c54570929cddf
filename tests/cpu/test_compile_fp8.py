"""FP8 kernels compile for SM90 without a GPU: no spills, products in flight, one fused multiply-add a sum."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from cute_kernels import launch
from cute_kernels.hopper import fp8_quantize, fp8_wgrad
from cute_kernels.hopper.configs import SMEM_BYTES
from cute_kernels.hopper.fp8_quantize import QuantizeOptions, QuantizeWeightOptions, deepest
from cute_kernels.hopper.fp8_wgrad import Fp8WgradOptions
from cute_kernels.hopper.fp8_wgrad_configs import TILE_COLUMNS, choose

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed: nothing can be compiled")


def rows(element: str, asked: str, power_of_two: bool = True) -> QuantizeOptions:
    columnwise, sums = asked != "rows", asked == "sums"
    return QuantizeOptions(element, asked != "columns", columnwise, sums, power_of_two, deepest(columnwise, sums))


def weights(element: str, columnwise: bool, separate: bool, power_of_two: bool = True) -> QuantizeWeightOptions:
    return QuantizeWeightOptions(element, columnwise, separate, power_of_two, deepest(columnwise, False))


def wgrad(out: str, accumulate=False, block=0, separate=False) -> Fp8WgradOptions:
    config = choose(4 if out == "float32" else 2, accumulate, 768, block)
    return Fp8WgradOptions(out, config, accumulate, block > 0, separate)


QUANTIZE = (
    *(rows("bfloat16", asked) for asked in ("both", "rows", "columns", "sums")),
    rows("bfloat16", "sums", False),
    rows("float16", "both"),
    rows("float16", "sums", False),
    weights("bfloat16", True, False),
    weights("bfloat16", True, True, False),
    weights("float16", False, True),
)
WGRAD = (
    wgrad("bfloat16"),
    wgrad("float16", block=32),
    wgrad("float16", block=3, separate=True),
    wgrad("float32"),
    wgrad("float32", True),
    wgrad("float32", True, 4, True),
    wgrad("bfloat16", True),
    wgrad("bfloat16", True, 32, True),
)


def assert_compiles(module: str, options: Any, capfd: pytest.CaptureFixture[str], folder: Path) -> str:
    """Without spills, nothing serialised; returns the PTX."""
    compiled = launch.compile_only(module, options, "sm_90a", f"remarks{{ptx}} --keep-ptx --dump-dir {folder}")
    captured = capfd.readouterr()
    said = captured.out + captured.err
    spilled = [int(count) for count in re.findall(r"(\d+) bytes spill", said)]
    assert spilled and not any(spilled), f"spilled bytes: {spilled}"
    assert "C75" not in said, "ptxas serialised a WGMMA"
    return compiled.__ptx__


@pytest.mark.parametrize("options", QUANTIZE, ids=str)
def test_quantize(options, capfd, tmp_path):
    assert_compiles(fp8_quantize.MODULE, options, capfd, tmp_path)


@pytest.mark.parametrize("options", WGRAD, ids=str)
def test_wgrad(options, capfd, tmp_path):
    ptx = assert_compiles(fp8_wgrad.MODULE, options, capfd, tmp_path)
    products = re.findall(r"wgmma\.mma_async\S*\.m64n(\d+)k32\S*\.e4m3\.e4m3", ptx)
    assert sum(int(columns) for columns in products) == 4 * TILE_COLUMNS  # 128 tokens, 32 at a time


@pytest.mark.parametrize("options", QUANTIZE, ids=str)
def test_stages_fit(options):
    """Whole rounds of the teams; another would not fit."""
    sums = isinstance(options, QuantizeOptions) and options.sums
    team = 16384 * options.columnwise + 4096 + 2048 * sums + 1024
    used = options.stages * 32768 + 3 * team + 1024
    assert options.stages % 3 == 0 and used <= 232_448 < used + 3 * 32768


@pytest.mark.parametrize("options", WGRAD, ids=str)
def test_wgrad_fits(options):
    assert options.config.smem_bytes() <= SMEM_BYTES


def test_host_and_device_agree():
    from cute_kernels.hopper import fp8_quantize_kernel

    assert fp8_quantize.TEAMS == fp8_quantize_kernel.TEAMS
