"""Benches that compare libraries compute the same with each, and write what they say they write."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from fusible_ops.bench.timing import FLUSH_BYTES, L2Flush
from tests.bench import bench_block

TINY = {
    "gptoss": replace(
        bench_block.SHAPES["gptoss"], batch=2, context=8, hidden=64, heads=4, kv_heads=2, head=16, experts=4, top_k=2,
        width=64, multiple=4,
    ),
    "dsv3": replace(
        bench_block.SHAPES["dsv3"], context=8, hidden=64, heads=4, kv_heads=4, head=16, experts=4, top_k=2, width=64,
        latent=(48, 32), rope=16, shared=64, multiple=2,
    ),
}  # fmt: skip


@pytest.mark.parametrize("shape", TINY)
def test_blocks_of_all_libraries_are_one_block(shape: str, capsys: pytest.CaptureFixture[str]) -> None:
    bench = bench_block.Bench(TINY[shape], "cpu", torch.float32)
    assert int(bench.sizes.sum()) == len(bench.rows)
    results = {}
    for name, block in bench.blocks.items():
        y, dx, *grads = bench.step(name)
        places = [p.data_ptr() for p in block.parameters()]  # all are over the same weights
        results[name] = {"y": y, "dx": dx, **dict(zip(places, grads, strict=True))}
    want = results["torch bf16"]
    assert all(found.keys() == want.keys() for found in results.values())
    for name in ("ours bf16", "unfused bf16"):
        for key, each in want.items():
            torch.testing.assert_close(results[name][key], each)
    bounds = {"bf16": 1e-5, "fp8": 0.2}
    bench.check(bounds)
    assert list(bench.blocks) == list(results) and not bench.wrong
    weight = bench.blocks["unfused bf16"].experts.mlp.mlp[0].weight
    weight.data = weight.data * 1.1
    bench.blocks["ours fp8"].experts.mlp.mlp = None
    bench.check(bounds)
    assert list(bench.blocks) == ["torch bf16", "ours bf16"] and bench.wrong == ["unfused bf16"]
    told = capsys.readouterr().out
    assert "unfused bf16 is wrong" in told and "ours fp8 does not run: TypeError" in told


@pytest.mark.parametrize("shape", bench_block.SHAPES)
def test_experts_get_the_rows_that_they_were_dealt(shape: str) -> None:
    s = bench_block.SHAPES[shape]
    chosen, sizes = bench_block.dealt(s)
    assert chosen.shape == (s.tokens, s.top_k) and all(size and size % 128 == 0 for size in sizes)
    assert torch.equal(chosen.flatten().bincount(), torch.tensor(sizes))
    assert (chosen.sort(dim=1).values.diff(dim=1) > 0).all()
    tiny = bench_block.Bench(TINY[shape], "cpu", torch.float32)
    experts = tiny.blocks["torch bf16"].experts
    assert torch.equal(experts(tiny.x.flatten(0, 1))[2], tiny.sizes)


@pytest.mark.parametrize("shape", bench_block.SHAPES)
def test_kernels_that_are_compiled_ahead(shape: str) -> None:
    modules = {module.split(".")[-1] for module, _, _ in bench_block.kernels_of(bench_block.SHAPES[shape])}
    assert {"grouped_gemm_kernel", "grouped_wgrad_kernel", "fp8_grouped_gemm_kernel", "fp8_wgrad_kernel"} <= modules


def test_a_report_and_a_chart(tmp_path: Path) -> None:
    first, rows = [
        [dict(row) for row in found]
        for found in bench_block.measure("dsv3", bench_block.Bench(TINY["dsv3"], "cpu", torch.bfloat16))
    ]
    assert [(r["library"], r["dtype"]) for r in rows] == [
        ("torch", "bf16"), ("ours", "bf16"), ("unfused", "bf16"), ("ours", "fp8"),
    ]  # fmt: skip
    assert torch.is_autocast_cache_enabled(), "a bench leaves things as they were"
    assert min(r[key] for r in rows for key in ("ms", "mlp_ms")) > 0
    assert [{**r, "mlp_ms": None} for r in rows] == first
    bench_block.plot(first, "none", tmp_path / "first.png")
    assert "mlp" not in bench_block.report(first)[0]
    rows = [{**r, "ms": ms, "mlp_ms": 1.0} for r, ms in zip(rows, (4.0, 3.0, 6.0, 2.0), strict=True)]
    text = bench_block.report(rows)
    assert "of it mlp     1.000 ms  ours in bf16 saves 25.0%, ours in fp8 saves 50.0%" in text[0]
    bench_block.plot(rows, "none", tmp_path / "block.png")
    assert (tmp_path / "block.png").read_bytes().startswith(b"\x89PNG")


def test_our_experts_in_a_model_are_held_against_fp32() -> None:
    """Where transformers' own sum of many rows is far off, ours is not; where ours is wrong, nothing is measured."""
    pytest.importorskip("transformers")
    from tests.bench import bench_huggingface as hf

    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    hf.huggingface.install()
    try:
        case = hf.Case("gpt_oss", 1, 1, 1024, "cpu", hf.Widths(64, 64, 4, 2, heads))
        errors = case.errors(["fusible_ops", "grouped_mm", "nobodys"])
        assert list(errors) == ["fusible_ops", "grouped_mm"]
        assert max(errors["fusible_ops"].values()) < 0.005
        assert all(errors["grouped_mm"][f"d{name}_proj_bias"] > 0.02 for name in ("gate_up", "down"))
        right = case.one_layer
        case.one_layer = lambda each: tuple(1.03 * t for t in right(each))  # type: ignore[method-assign]
        with pytest.raises(AssertionError, match="dgate_up_proj"):
            hf.bench(case, "gpt_oss", ["fusible_ops"])
    finally:
        hf.huggingface.uninstall()


class Passes(TorchDispatchMode):
    """(operator, storage, bytes) of each operator that was called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append((str(func), id(args[0].untyped_storage()), args[0].nbytes))
        return func(*args, **(kwargs or {}))


def test_l2_is_emptied_by_writes_and_then_by_reads_of_other_memory() -> None:
    """In this order: what was written last waits in L2 to be written back, unless something is read after it."""
    with FakeTensorMode():
        flush = L2Flush()
        with Passes() as passes:
            flush()
    (write, written, wrote), (read, unwritten, took) = passes.seen
    assert write == "aten.random_.default" and read == "aten.amax.default"
    assert written != unwritten and wrote == took == FLUSH_BYTES
