"""Every kind of FP8 grouped product compiles for sm_90a without a GPU, spills nothing and keeps WGMMA asynchronous."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cute_kernels import launch
from cute_kernels.activation import Activation
from cute_kernels.catalog import SM90_ACTIVATIONS
from cute_kernels.hopper.fp8_configs import Options, OwnTiles, choose
from cute_kernels.hopper.fp8_grouped_gemm import MODULES
from tests.cpu.test_compile_grouped_gemm import read

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl to compile")

SWIGLU, GELU = Activation("swiglu"), Activation("gelu")
CLAMPED = Activation("clamped_swiglu", 7.0, 1.702, 1.0)
BOTH = {"rowwise": True, "columnwise": True, "factor": "float32"}
EVERYTHING = {**BOTH, "has_bias": True, "keeps": True}
GRADIENTS = {**BOTH, "has_dprobs": True, "has_dbias": True}
OTHERS = [kind for kind in SM90_ACTIVATIONS if kind not in ("clamped_swiglu", "geglu", "relu")]


def options(kind: str, columns: int = 1024, **facts) -> Options:
    kept = facts.get("quantized_preact", False)
    return Options(kind, choose(kind, columns, 0, facts.get("activation"), kept), **facts)


CASES = {
    "store": options("store"),
    "store_narrow_bias_scale": options("store", 2880, has_bias=True, factor="float32"),
    "store_halves": options("store", 2880, halves=2),
    "store_wide_halves": options("store", halves=2),
    "act_swiglu": options("act", activation=SWIGLU, keeps=True, **BOTH),
    "act_clamped_everything_straddling": options("act", activation=CLAMPED, straddles=True, **EVERYTHING),
    "act_gelu_fp32_scales": options("act", activation=GELU, power_of_two=False, **EVERYTHING),
    "dact_swiglu": options("dact", activation=SWIGLU, **BOTH),
    "dact_clamped_everything": options("dact", activation=CLAMPED, **GRADIENTS),
    "dact_margin": options("dact", activation=SWIGLU, alone=True, **GRADIENTS),
    "dact_geglu_fp32_scales": options("dact", activation=Activation("geglu"), power_of_two=False, **GRADIENTS),
    "dact_relu_columns": options("dact", activation=Activation("relu"), columnwise=True),
    **{f"dact_{kind}": options("dact", activation=Activation(kind), **GRADIENTS) for kind in OTHERS},
    "act_kept_clamped_straddling": options(
        "act", activation=CLAMPED, straddles=True, quantized_preact=True, **EVERYTHING
    ),
    "act_kept_gelu_fp32_scales": options(
        "act", activation=GELU, power_of_two=False, quantized_preact=True, **EVERYTHING
    ),
    "dact_kept_swiglu": options("dact", activation=SWIGLU, quantized_preact=True, **GRADIENTS),
    "dact_kept_clamped": options("dact", activation=CLAMPED, quantized_preact=True, **GRADIENTS),
    "dact_kept_geglu": options("dact", activation=Activation("geglu"), quantized_preact=True, **GRADIENTS),
    "dact_kept_gelu_fp32_scales": options(
        "dact", activation=GELU, power_of_two=False, quantized_preact=True, **GRADIENTS
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_compiles_without_spills_and_keeps_products_in_flight(case: str, tmp_path: Path) -> None:
    config = CASES[case].config
    compiled = launch.compile_only(
        MODULES[type(config)], CASES[case], "sm_90a", f"--keep-ptx --keep-cubin --dump-dir {tmp_path}"
    )
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(compiled.__cubin__)
    usage = read("cuobjdump", ["--dump-resource-usage", str(cubin)])
    assert set(re.findall(r"(?:STACK|LOCAL):(\d+)", usage)) == {"0"}, usage
    sass = read("nvdisasm", ["-c", str(cubin)])
    assert not re.findall(r"\b(?:LDL|STL)\b", sass)
    chunks, halves = 2 if isinstance(config, OwnTiles) else len(config.chunks), CASES[case].halves
    waits = len(re.findall(r"wgmma\.wait_group", compiled.__ptx__))
    assert waits == chunks * (3 if halves == 2 else 1)  # a second half's chunks are two products each
    assert len(re.findall(r"WARPGROUP\.DEPBAR", sass)) == waits, "ptxas serialised the WGMMA pipeline (C75xx)"
    products = len(re.findall(r"wgmma\.mma_async", compiled.__ptx__))
    assert products == len(re.findall(r"\bQGMMA\b", sass)) == 4 * chunks * halves
