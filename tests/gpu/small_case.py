"""Every Hopper kernel once on small inputs, to run under compute-sanitizer:

    compute-sanitizer --tool memcheck --report-api-errors no python -m tests.gpu.small_case
    compute-sanitizer --tool racecheck --report-api-errors no python -m tests.gpu.small_case

Uneven groups, one of them empty, and a tail; plain and interleaved weights, bias, probs, scales, main_grad.
"""

from __future__ import annotations

import torch

from tests.cases import Splits
from tests.models import MLP, Inputs, step

SPLITS = Splits("small", (70, 0, 130), rows=220)
CASES = (
    MLP("scaled_swiglu", hidden=328, intermediate=136, bias=True, scale_bias=True),
    MLP("geglu", hidden=200, intermediate=256, interleave=32),
    MLP("srelu", hidden=136, intermediate=200),
)


def main() -> None:
    for mlp in CASES:
        model = mlp.build(SPLITS, "cuda", torch.bfloat16, on_unfused="error")
        inputs = Inputs.random(SPLITS, mlp.hidden, "cuda", torch.bfloat16)
        results = step(model, mlp, inputs)
        for linear in (model[0], model[2]):
            linear.accumulate_into_main_grad = True
            for w in linear.weight_parameters():
                w.main_grad = torch.zeros(w.shape, dtype=torch.float32, device="cuda")
        step(model, mlp, inputs)
        model[:2](inputs.x, *mlp.extras(SPLITS.tensor("cuda"), inputs.probs)[: 1 + mlp.scaled])
        assert all(t.isfinite().all() for t in results.values())
    torch.cuda.synchronize()
    print("done")


if __name__ == "__main__":
    main()
