"""A mixture-of-experts layer of Megatron-Core on one GPU, before and after one line: forward + backward, milliseconds.

    python -m tests.bench.bench_megatron [--tokens 8192]

"modules": Transformer Engine's GroupedLinear modules (use_transformer_engine_op_fuser=False). "ops": its operation
fuser without our plug-in. "ours": the same with it. Router and permutation are in all three. In turn in one run. A way
that does not run is left out, with its words.
"""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Callable
from importlib.metadata import version

import torch

from fusible_ops.integrations import transformer_engine as plugin
from tests import megatron_layer
from tests.bench.timing import medians

LAYERS = {
    "qwen3, 128 experts": ("swiglu", {"hidden": 2048, "intermediate": 768, "experts": 128, "topk": 8}),
    "gpt_oss": ("gpt_oss", {"hidden": 2880, "intermediate": 2880, "experts": 32, "topk": 4}),
}


def step_of(layer: torch.nn.Module, tokens: int, hidden: int) -> Callable[[], object]:
    x, dy = (torch.randn(tokens, 1, hidden, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    x.requires_grad_()
    leaves = [x, *layer.parameters()]

    def step() -> object:
        y, _ = layer(x)
        return torch.autograd.grad(y, leaves, dy, allow_unused=True)

    return step


def ways_of(name: str, tokens: int) -> dict[str, Callable[[], object]]:
    """A step of each way that runs. Our fusion is installed for the last, and after it."""
    kind, sizes = LAYERS[name]
    steps: dict[str, Callable[[], object]] = {}
    for way in ("modules", "ops", "ours"):
        if way == "ours":
            plugin.install()
        torch.manual_seed(0)
        try:
            layer = megatron_layer.make(kind, fused=True, by_ops=way != "modules", **sizes)
            step = step_of(layer, tokens, sizes["hidden"])
            step()  # the fuser keeps the plan that it makes now
            torch.cuda.synchronize()
            steps[way] = step
        except Exception as error:  # the others are measured without it
            print(f"{name}: {way} does not run: {type(error).__name__}: {str(error)[:200]}", flush=True)
    return steps


def measure(name: str, tokens: int) -> None:
    """Print the milliseconds of each way of this layer."""
    try:
        times = medians(ways_of(name, tokens))
    finally:
        plugin.uninstall()
    ours = times.get("ours", float("nan"))
    ratios = ", ".join(f"{way} {ms:.3f} ms (x{ms / ours:.2f})" for way, ms in times.items())
    print(f"{name}, {tokens} tokens: {ratios}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    tokens = parser.parse_args().tokens
    megatron_layer.load()
    versions = [f"{name} {version(name)}" for name in ("torch", "megatron-core", "transformer-engine")]
    print(f"{torch.cuda.get_device_name()}, {', '.join(versions)}, {datetime.date.today()}", flush=True)
    with megatron_layer.process_group():
        for name in LAYERS:
            measure(name, tokens)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
