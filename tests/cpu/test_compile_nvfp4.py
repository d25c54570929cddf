"""NVFP4 kernels compile for SM90 without a GPU: no spills, products in flight."""

from __future__ import annotations

import itertools
import re

import pytest

from cute_kernels.activation import Activation
from cute_kernels.hopper import grouped_wgrad, nvfp4_quantize
from cute_kernels.hopper.configs import SMEM_BYTES, Options, deepest
from cute_kernels.hopper.grouped_wgrad import WgradOptions
from cute_kernels.hopper.grouped_wgrad_configs import choose
from cute_kernels.hopper.nvfp4_quantize import AmaxOptions, RestoreOptions
from cute_kernels.hopper.nvfp4_quantize_configs import AMAX_WARPS, RESTORE_WARPS, QuantizeOptions, warps_of
from tests.cpu.test_compile_mxfp8 import compiled

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed: nothing can be compiled")

PRODUCTS = "cute_kernels.hopper.grouped_gemm_kernel"
SWIGLU, CLAMPED = Activation("swiglu"), Activation("clamped_swiglu", 7.0, 1.702, 1.0)
KINDS = [kind for kind in itertools.product((False, True), repeat=5) if any(kind[:3]) and not (kind[1] and kind[2])]
QUANTIZE = (
    AmaxOptions(False),
    AmaxOptions(True),
    *(QuantizeOptions(*kind) for kind in KINDS if any(kind[1:3]) or not kind[3]),  # columns alone are rotated
    QuantizeOptions(True, False, False, square=True),
    RestoreOptions(),
)


def options(kind: str, tile: tuple[int, int], activation: Activation | None = None, **facts) -> Options:
    config = deepest(*tile, kind, activation is not None and activation.is_glu)
    same = {
        "contracts_rows": kind == "dact",
        "zero_tail": kind == "store",
        "two_level": True,
        "rotates": kind != "store",
    }
    return Options(kind, "bfloat16", config, activation=activation, **same | facts)


GRADIENTS = {"factor": "float32", "has_dprobs": True, "keeps": False}
CASES = {
    "store": options("store", (128, 192)),
    "store_everything": options("store", (128, 192), has_bias=True, factor="float32", separate=True, dynamic=True),
    "dgrad": options("store", (128, 192), contracts_rows=True),
    "act_swiglu": options("act", (128, 192), SWIGLU, factor="float32"),
    "act_clamped_everything": options(
        "act", (128, 192), CLAMPED, has_bias=True, factor="float32", glu_interleave=32, separate=True, dynamic=True
    ),
    "act_not_rotated": options("act", (128, 192), SWIGLU, rotates=False),
    "act_low": options("act", (64, 128), SWIGLU, factor="bfloat16", keeps=False),
    "dact_swiglu": options("dact", (128, 192), SWIGLU, **GRADIENTS),
    "dact_clamped": options("dact", (128, 192), CLAMPED, dynamic=True, **GRADIENTS),
    "dact_not_rotated": options("dact", (128, 192), CLAMPED, dynamic=True, rotates=False, **GRADIENTS),
    "dact_geglu": options("dact", (128, 192), Activation("geglu"), **GRADIENTS),
    "dact_low": options("dact", (64, 128), SWIGLU, **GRADIENTS),
}


@pytest.mark.parametrize("asked", QUANTIZE, ids=str)
def test_quantize(asked, capfd, tmp_path):
    ptx = compiled(nvfp4_quantize.MODULE, asked, capfd, tmp_path)
    assert ("cp.async.bulk.tensor" in ptx) != isinstance(asked, RestoreOptions), "pieces come by TMA"
    warps = {AmaxOptions: AMAX_WARPS, RestoreOptions: RESTORE_WARPS}.get(type(asked)) or warps_of(asked)
    assert f".reqntid {32 * warps}, 1, 1" in ptx


@pytest.mark.parametrize("asked", [asked for asked in QUANTIZE if isinstance(asked, QuantizeOptions)], ids=str)
def test_pieces_fit_shared_memory(asked):
    from cute_kernels.hopper.nvfp4_quantize_kernel import QuantizeRows

    kernel = QuantizeRows(asked)
    assert 64 * 1024 < kernel.pieces.storage(kernel.kept).size_in_bytes() <= SMEM_BYTES


@pytest.mark.parametrize("case", CASES)
def test_products(case, capfd, tmp_path):
    ptx = compiled(PRODUCTS, CASES[case], capfd, tmp_path)
    config = CASES[case].config
    assert len(re.findall(r"wgmma\.mma_async", ptx)) == 2 * (config.tile_m // 64) * config.tile_k // 16
    wanted = 0 if CASES[case].kind == "store" else 1 + CASES[case].rotates
    assert len(re.findall(r"red\.relaxed\.gpu\.global\.max", ptx)) == wanted, "of largest magnitudes"


@pytest.mark.parametrize(
    ("out", "accumulate", "dynamic"),
    [("bfloat16", False, False), ("bfloat16", True, True), ("float32", False, True), ("float32", True, False)],
)
def test_weight_gradients(out, accumulate, dynamic, capfd, tmp_path):
    block = 32 if dynamic else 0
    config = choose(2048, 4 if out == "float32" else 2, accumulate, block, False).config
    asked = WgradOptions("bfloat16", out, config, accumulate, block > 0, dynamic, dynamic, two_level=True)
    module = grouped_wgrad.MODULE_ADD if accumulate else grouped_wgrad.MODULE
    assert "wgmma" in compiled(module, asked, capfd, tmp_path)


def test_host_and_device_agree():
    from cute_kernels.hopper import nvfp4_quantize_kernel as kernel

    assert nvfp4_quantize.COLUMNS == kernel.COLUMNS
    assert (nvfp4_quantize.RESTORED_COLUMNS, nvfp4_quantize.BLOCK) == (kernel.RESTORED_COLUMNS, kernel.BLOCK)
