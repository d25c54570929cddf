"""MXFP8 kernels compile for SM90 without a GPU: no spills, products in flight."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest

from cute_kernels import launch
from cute_kernels.activation import Activation
from cute_kernels.hopper import mxfp8_grouped_gemm, mxfp8_quantize
from cute_kernels.hopper.configs import DACT_MXFP8, DACT_MXFP8_SUMS, Options, deepest
from cute_kernels.hopper.mxfp8_grouped_gemm import SlotSumsOptions
from cute_kernels.hopper.mxfp8_quantize import RestoreOptions
from cute_kernels.hopper.mxfp8_quantize_configs import RESTORE_WARPS, WARPS, QuantizeOptions

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed: nothing can be compiled")

PRODUCTS = "cute_kernels.hopper.grouped_gemm_kernel"
SWIGLU, CLAMPED = Activation("swiglu"), Activation("clamped_swiglu", 7.0, 1.702, 1.0)
QUANTIZE = (
    *(QuantizeOptions(*wanted) for wanted in itertools.product((False, True), repeat=3) if any(wanted)),
    QuantizeOptions(True, False, False, True),
    RestoreOptions(),
)


def options(kind: str, tile: tuple[int, int], activation: Activation, **facts) -> Options:
    gradient = DACT_MXFP8_SUMS if facts.get("has_dbias") else DACT_MXFP8
    config = deepest(*tile, gradient if kind == "dact" else kind, activation.is_glu)
    same = {"contracts_rows": kind == "dact", "zero_tail": False, "mxfp8": True}
    return Options(kind, "bfloat16", config, activation=activation, **same, **facts)


GRADIENTS = {"factor": "float32", "has_dprobs": True}
CASES = {
    "act_swiglu": options("act", (128, 192), SWIGLU, factor="float32"),
    "act_clamped_everything": options(
        "act", (128, 192), CLAMPED, has_bias=True, factor="float32", glu_interleave=32, separate=True, dynamic=True
    ),
    "act_low": options("act", (64, 128), SWIGLU, factor="bfloat16"),
    "dact_swiglu": options("dact", (128, 128), SWIGLU, **GRADIENTS),
    "dact_clamped": options("dact", (128, 128), CLAMPED, dynamic=True, **GRADIENTS),
    "dact_geglu": options("dact", (128, 128), Activation("geglu"), **GRADIENTS),
    "dact_gelu": options("dact", (128, 128), Activation("gelu"), **GRADIENTS),
    "dact_low_swiglu": options("dact", (64, 128), SWIGLU, **GRADIENTS),
    "dact_rows_alone": options("dact", (128, 128), SWIGLU, columnwise=False, keeps=False),
    "dact_low_sums": options("dact", (64, 128), SWIGLU, has_dbias=True, **GRADIENTS),
    "dact_low_clamped_sums": options(
        "dact", (64, 128), CLAMPED, has_dbias=True, separate=True, dynamic=True, **GRADIENTS
    ),
    "dact_small_gelu_sums": options("dact", (64, 64), Activation("gelu"), has_dbias=True),
    "dact_act_alone": options("dact", (128, 128), SWIGLU, rowwise=False, columnwise=False),
    "act_kept": options("act", (128, 192), SWIGLU, factor="float32", quantized_preact=True),
    "act_kept_everything": options(
        *("act", (128, 192), CLAMPED),
        **{"has_bias": True, "factor": "float32", "glu_interleave": 32, "separate": True, "dynamic": True},
        quantized_preact=True,
    ),
    "act_kept_small_srelu": options("act", (64, 64), Activation("srelu"), quantized_preact=True),
    "dact_kept": options("dact", (128, 128), SWIGLU, quantized_preact=True, **GRADIENTS),
    "dact_kept_clamped": options("dact", (128, 128), CLAMPED, quantized_preact=True, dynamic=True, **GRADIENTS),
    "dact_kept_geglu": options("dact", (128, 128), Activation("geglu"), quantized_preact=True, **GRADIENTS),
    "dact_kept_gelu": options("dact", (128, 128), Activation("gelu"), quantized_preact=True, **GRADIENTS),
    "dact_kept_small_srelu": options("dact", (64, 64), Activation("srelu"), quantized_preact=True, **GRADIENTS),
    "dact_kept_rows_alone": options(
        "dact", (128, 128), SWIGLU, columnwise=False, keeps=False, quantized_preact=True, **GRADIENTS
    ),
    "dact_kept_low_clamped_sums": options(
        "dact", (64, 128), CLAMPED, has_dbias=True, separate=True, dynamic=True, quantized_preact=True, **GRADIENTS
    ),
    "dact_kept_act_alone": options(
        "dact", (128, 128), SWIGLU, rowwise=False, columnwise=False, quantized_preact=True, **GRADIENTS
    ),
}


def compiled(module: str, asked: Any, capfd: pytest.CaptureFixture[str], folder: Path) -> str:
    """Without spills, nothing serialised; returns the PTX."""
    made = launch.compile_only(module, asked, "sm_90a", f"remarks{{ptx}} --keep-ptx --dump-dir {folder}")
    captured = capfd.readouterr()
    said = captured.out + captured.err
    spilled = [int(count) for count in re.findall(r"(\d+) bytes spill", said)]
    assert spilled and not any(spilled), f"spilled bytes: {spilled}"
    assert "C75" not in said, "ptxas serialised a WGMMA"
    return made.__ptx__


@pytest.mark.parametrize("asked", QUANTIZE, ids=str)
def test_quantize(asked, capfd, tmp_path):
    ptx = compiled(mxfp8_quantize.MODULE, asked, capfd, tmp_path)
    restores = isinstance(asked, RestoreOptions)
    assert ("cp.async.bulk.tensor" in ptx) != restores, "pieces come by TMA"
    assert f".reqntid {32 * (RESTORE_WARPS if restores else WARPS)}, 1, 1" in ptx


@pytest.mark.parametrize("case", CASES)
def test_products(case, capfd, tmp_path):
    ptx = compiled(PRODUCTS, CASES[case], capfd, tmp_path)
    config = CASES[case].config
    assert len(re.findall(r"wgmma\.mma_async", ptx)) == 2 * (config.tile_m // 64) * config.tile_k // 16


@pytest.mark.parametrize("interleaved", [False, True])
def test_sums(interleaved, capfd, tmp_path):
    compiled(mxfp8_grouped_gemm.MODULE, SlotSumsOptions(interleaved, not interleaved), capfd, tmp_path)


def test_host_and_device_agree():
    from cute_kernels.hopper.epilogues import epilogue

    assert mxfp8_grouped_gemm.SLOT == epilogue.ROWS
    from cute_kernels.hopper import mxfp8_quantize_kernel as kernel

    assert mxfp8_quantize.SPAN == kernel.SPAN
    assert mxfp8_quantize.RESTORED_SPAN == 32 * kernel.COLUMNS
