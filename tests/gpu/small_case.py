"""Every Hopper kernel once on small inputs, to run under compute-sanitizer; under a recipe with an argument, "fp8",
"mxfp8" or "nvfp4":

    for tool in memcheck racecheck synccheck; do
        compute-sanitizer --tool $tool --report-api-errors no python -m tests.gpu.small_case; done

Numbers after it choose among CASES; racecheck takes minutes for all of them, one after the other.

Ragged and empty groups with a tail, all rows but a few in one group, many groups of which most are empty, no rows at
all; widths that fill no tile, and 768; plain and interleaved weights, bias, probs, scales, main_grad, weights apart;
weights stored [K, N]; alone on the device, and with tiles taken as they go on few SMs.
"""

from __future__ import annotations

import sys

import torch

import fusible_ops as ops
from tests.cases import Splits, full
from tests.models import MLP, Inputs, step

RAGGED = Splits("ragged", (70, 0, 130), rows=220)
SKEWED = full("skewed", 1, 0, 509, 1, 1, 0, 2, 1)
MANY = Splits("many", tuple((g * 7) % 4 if g % 3 == 0 else 0 for g in range(64)), rows=50)
STORED = {"transposed_weight": True}
CASES = (
    (MLP("scaled_swiglu", hidden=328, intermediate=136, bias=True, scale_bias=True), (RAGGED, SKEWED)),
    (MLP("geglu", hidden=200, intermediate=256, interleave=32), (RAGGED,)),
    (MLP("srelu", hidden=136, intermediate=200), (RAGGED, Splits("empty", (0, 0, 0), rows=0))),
    (MLP("scaled_swiglu", hidden=768, intermediate=384, interleave=1), (SKEWED, MANY)),
    (MLP("scaled_clamped", hidden=136, intermediate=200, bias=True, interleave=1, linear=STORED), (RAGGED,)),
    (MLP("geglu", hidden=136, intermediate=136, linear=STORED), (SKEWED,)),
)


FP8_CASES = (
    (MLP("scaled_swiglu", hidden=336, intermediate=192, bias=True, scale_bias=True), (RAGGED, SKEWED)),
    (MLP("srelu", hidden=144, intermediate=320), (RAGGED, Splits("empty", (0, 0, 0), rows=0))),
    (MLP("scaled_swiglu", hidden=768, intermediate=256), (SKEWED, MANY)),
)
BLOCK_CASES = (
    (MLP("scaled_swiglu", hidden=352, intermediate=160, scale_bias=True), (RAGGED, SKEWED)),
    (MLP("srelu", hidden=160, intermediate=320), (RAGGED, Splits("empty", (0, 0, 0), rows=0))),
    (MLP("scaled_swiglu", hidden=768, intermediate=256), (SKEWED, MANY)),
)
RECIPES = {
    "fp8": (ops.Float8BlockScaling(), FP8_CASES),
    "mxfp8": (ops.MXFP8BlockScaling(), BLOCK_CASES),
    "nvfp4": (ops.NVFP4BlockScaling(), BLOCK_CASES),
}
SHARINGS = ({}, {"scheduler": "dynamic", "sm_margin": 128})


def run(mlp: MLP, splits: Splits, sharing: dict, quantised: bool) -> None:
    """quantised: also a chain that ends with `Quantize`, which MXFP8 and NVFP4 have no kernel for."""
    model = mlp.build(splits, "cuda", torch.bfloat16, on_unfused="error", **sharing)
    inputs = Inputs.random(splits, mlp.hidden, "cuda", torch.bfloat16)
    results = step(model, mlp, inputs)
    for linear in (model[0], model[2]):
        linear.accumulate_into_main_grad = True
        for w in reversed(linear.weight_parameters()):
            w.data = w.data.clone()
            w.main_grad = torch.zeros(w.shape, dtype=torch.float32, device="cuda")
    step(model, mlp, inputs)
    if quantised:
        shorter = model[:2].append(ops.Quantize())
        shorter(inputs.x, *mlp.extras(splits.tensor("cuda"), inputs.probs)[: 1 + mlp.scaled])
    assert all(t.isfinite().all() for t in results.values())


def main() -> None:
    words = sys.argv[1:]
    recipe, cases = next((RECIPES[word] for word in words if word in RECIPES), (None, CASES))
    numbers = [int(word) for word in words if word not in RECIPES]
    for mlp, several in map(cases.__getitem__, numbers or range(len(cases))):
        for splits in several:
            for sharing in SHARINGS:
                with ops.autocast(enabled=recipe is not None, recipe=recipe):
                    run(mlp, splits, sharing, quantised=cases is not BLOCK_CASES)
    torch.cuda.synchronize()
    print("done")


if __name__ == "__main__":
    main()
