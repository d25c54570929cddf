"""Benches that compare libraries compute the same with each, and write what they say they write."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.bench import bench_block

TINY = {
    "gptoss": replace(
        bench_block.SHAPES["gptoss"], batch=2, context=8, hidden=64, heads=4, kv_heads=2, head=16, experts=4, top_k=2,
        width=64,
    ),
    "dsv3": replace(
        bench_block.SHAPES["dsv3"], context=8, hidden=64, heads=4, kv_heads=4, head=16, experts=4, top_k=2, width=64,
        latent=(48, 32), rope=16, shared=64,
    ),
}  # fmt: skip


@pytest.mark.parametrize("shape", TINY)
def test_blocks_of_all_libraries_are_one_block(shape: str) -> None:
    bench = bench_block.Bench(TINY[shape], "bf16", "cpu", torch.float32)
    assert int(bench.sizes.sum()) == len(bench.rows)
    results = {}
    for name, block in bench.blocks.items():
        y, dx, *grads = bench.step(name)
        places = [p.data_ptr() for p in block.parameters()]  # all are over the same weights
        results[name] = {"y": y, "dx": dx, **dict(zip(places, grads, strict=True))}
    assert results["ours"].keys() == results["unfused"].keys() == results["torch"].keys()
    for name in ("unfused", "torch"):
        for key, want in results["ours"].items():
            torch.testing.assert_close(results[name][key], want)
    bench.check(1e-5)
    weight = bench.blocks["torch"].experts.mlp.weights[0]
    weight.data = weight.data * 1.1
    with pytest.raises(RuntimeError, match=r"torch is .* away from ours"):
        bench.check(1e-5)


def test_a_report_and_a_chart(tmp_path: Path) -> None:
    rows = [row for only in ("bf16", "fp8") for row in bench_block.measure("dsv3", TINY["dsv3"], only, "cpu")]
    assert [(r["library"], r["dtype"]) for r in rows] == [
        ("ours", "bf16"), ("unfused", "bf16"), ("torch", "bf16"), ("ours", "fp8"),
    ]  # fmt: skip
    assert torch.is_autocast_cache_enabled(), "a bench leaves things as they were"
    assert min(r[key] for r in rows for key in ("ms", "mlp_ms")) > 0
    rows = [{**r, "ms": ms, "mlp_ms": 1.0} for r, ms in zip(rows, (3.0, 6.0, 4.0, 2.0), strict=True)]
    text = bench_block.report(rows)
    assert "ours in bf16 saves 25.0%, ours in fp8 saves 50.0%" in text[2]
    bench_block.plot(rows, "none", tmp_path / "block.png")
    assert (tmp_path / "block.png").read_bytes().startswith(b"\x89PNG")
