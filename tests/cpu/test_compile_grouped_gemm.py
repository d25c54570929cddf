"""Every kind of grouped product compiles for sm_90a without a GPU, spills nothing and keeps WGMMA asynchronous.

Spills and serialisation come from ptxas: a spill shows as a stack frame of the kernel, a serialised WGMMA as more waits
in the machine code than the source has. Skipped where CUTLASS, or the tools that read a cubin, are not installed.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from cute_kernels import launch
from cute_kernels.activation import Activation
from cute_kernels.hopper.configs import Options, deepest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl to compile")

MODULE = "cute_kernels.hopper.grouped_gemm_kernel"
SWIGLU = Activation("swiglu")
CLAMPED = Activation("clamped_swiglu", 7.0, 1.702, 1.0)


def options(kind: str, tile: tuple[int, int] = (128, 192), dtype: str = "bfloat16", **facts) -> Options:
    activation = facts.get("activation")
    config = deepest(*tile, kind, activation is not None and activation.is_glu)
    return Options(kind, dtype, config, contracts_rows=facts.pop("contracts_rows", kind == "dact"), **facts)


SQUARE, LOW, SMALL = (128, 128), (64, 128), (64, 64)
EVERYTHING = {"separate": True, "has_bias": True, "factor": "float32"}
GRADIENTS = {"factor": "float32", "has_dprobs": True}
CASES = {
    "store": options("store"),
    "store_square": options("store", SQUARE),
    "store_low": options("store", LOW),
    "store_small_bias_scale": options("store", SMALL, has_bias=True, factor="float32"),
    "store_bias_scale_fp16": options("store", dtype="float16", has_bias=True, factor="float32"),
    "dgrad": options("store", contracts_rows=True),
    "dgrad_square_interleaved": options("store", SQUARE, contracts_rows=True, glu_interleave=32),
    "dgrad_low": options("store", LOW, contracts_rows=True),
    "dgrad_small_interleaved_separate": options("store", SMALL, contracts_rows=True, glu_interleave=1, separate=True),
    "dgrad_interleaved_separate_fp16": options(
        "store", dtype="float16", contracts_rows=True, glu_interleave=32, separate=True
    ),
    "act_swiglu": options("act", activation=SWIGLU, factor="float32"),
    "act_square_swiglu": options("act", SQUARE, activation=SWIGLU, factor="float32"),
    "act_low_swiglu": options("act", LOW, activation=SWIGLU, factor="float32"),
    "act_small_swiglu": options("act", SMALL, activation=SWIGLU, factor="float32"),
    "act_clamped_everything": options("act", activation=CLAMPED, glu_interleave=1, **EVERYTHING),
    "act_square_clamped_everything": options("act", SQUARE, activation=CLAMPED, glu_interleave=32, **EVERYTHING),
    "act_low_clamped_everything": options("act", LOW, activation=CLAMPED, glu_interleave=128, **EVERYTHING),
    "act_geglu": options("act", activation=Activation("geglu"), glu_interleave=64, factor="bfloat16"),
    "act_srelu_bias": options("act", activation=Activation("srelu"), has_bias=True),
    "act_small_gelu": options("act", SMALL, activation=Activation("gelu"), has_bias=True, factor="float32"),
    "act_qgelu": options("act", activation=Activation("qgelu"), factor="float32"),
    "act_sreglu": options("act", activation=Activation("sreglu"), factor="float32"),
    "dact_sreglu": options("dact", activation=Activation("sreglu"), **GRADIENTS),
    "dact_qgeglu": options("dact", activation=Activation("qgeglu"), **GRADIENTS),
    "act_gelu": options("act", activation=Activation("gelu"), has_bias=True, factor="float32"),
    "dact_swiglu": options("dact", activation=SWIGLU, **GRADIENTS),
    "dact_square_swiglu": options("dact", SQUARE, activation=SWIGLU, **GRADIENTS),
    "dact_low_swiglu": options("dact", LOW, activation=SWIGLU, **GRADIENTS),
    "dact_small_swiglu": options("dact", SMALL, activation=SWIGLU, **GRADIENTS),
    "dact_clamped_separate": options("dact", activation=CLAMPED, separate=True, **GRADIENTS),
    "dact_geglu": options("dact", activation=Activation("geglu"), **GRADIENTS),
    "dact_gelu": options("dact", activation=Activation("gelu"), **GRADIENTS),
    "dact_square_gelu": options("dact", SQUARE, activation=Activation("gelu"), **GRADIENTS),
    "act_zeroes_later": options("act", activation=SWIGLU, factor="float32", zero_tail=False, zeroes_later=True),
    "dynamic_store_low_bias_scale": options("store", LOW, has_bias=True, factor="float32", dynamic=True),
    "dynamic_dgrad_interleaved_separate": options(
        "store", contracts_rows=True, glu_interleave=32, separate=True, dynamic=True
    ),
    "dynamic_act_swiglu": options("act", activation=SWIGLU, factor="float32", dynamic=True),
    "dynamic_dact_swiglu": options("dact", activation=SWIGLU, dynamic=True, **GRADIENTS),
    "store_transposed_bias_scale": options("store", contracts_rows=True, has_bias=True, factor="float32"),
    "act_transposed_srelu": options("act", activation=Activation("srelu"), contracts_rows=True, **EVERYTHING),
    "act_transposed_clamped": options("act", activation=CLAMPED, contracts_rows=True, **EVERYTHING),
    "act_pairs": options("act", activation=CLAMPED, contracts_rows=True, preact_interleave=1, **EVERYTHING),
    "act_small_blocks_of_8": options("act", SMALL, activation=SWIGLU, contracts_rows=True, preact_interleave=8),
    "act_blocks_of_32": options("act", activation=SWIGLU, contracts_rows=True, preact_interleave=32, factor="float32"),
    "dact_pairs": options("dact", activation=CLAMPED, contracts_rows=False, preact_interleave=1, **GRADIENTS),
    "dact_square_pairs": options("dact", SQUARE, activation=CLAMPED, preact_interleave=1, **GRADIENTS),
    "dact_blocks_of_16": options("dact", activation=SWIGLU, preact_interleave=16, separate=True, **GRADIENTS),
    "dact_srelu_least": options("dact", activation=Activation("srelu"), keeps=False, zero_tail=False),
}


def tool(name: str) -> str:
    """A CUDA binary tool: from its wheel beside CUTLASS, else from the path."""
    import nvidia

    for folder in nvidia.__path__:
        found = Path(folder) / "cu13" / "bin" / name
        if found.is_file():
            return str(found)
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"needs {name} (pip install nvidia-cuda-{name})")
    return found


def read(name: str, arguments: list[str]) -> str:
    return subprocess.run([tool(name), *arguments], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("case", CASES)
def test_compiles_without_spills_and_keeps_products_in_flight(case: str, tmp_path: Path) -> None:
    compiled = launch.compile_only(MODULE, CASES[case], "sm_90a", f"--keep-ptx --keep-cubin --dump-dir {tmp_path}")
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(compiled.__cubin__)
    usage = read("cuobjdump", ["--dump-resource-usage", str(cubin)])
    (stack,) = re.findall(r"STACK:(\d+)", usage)
    (local,) = re.findall(r"LOCAL:(\d+)", usage)
    assert (stack, local) == ("0", "0"), usage
    sass = read("nvdisasm", ["-c", str(cubin)])
    assert not re.findall(r"\b(?:LDL|STL)\b", sass)
    waits = len(re.findall(r"wgmma\.wait_group", compiled.__ptx__))
    assert waits == 2
    assert len(re.findall(r"WARPGROUP\.DEPBAR", sass)) == waits, "ptxas serialised the WGMMA pipeline (C75xx)"
    products = len(re.findall(r"wgmma\.mma_async", compiled.__ptx__))
    config = CASES[case].config
    assert products == len(re.findall(r"\bHGMMA\b", sass)) == 2 * (config.tile_m // 64) * config.tile_k // 16
