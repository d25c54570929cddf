"""Models of Hugging Face transformers: training steps on our experts and on their own, on one GPU, in turn in one run.

    python -m tests.bench.bench_huggingface [--models mixtral,qwen3,gpt_oss,deepseek_v3] [--layers 2] [--compile]
        [--implementations fusible_ops,grouped_mm] [--batch 16] [--length 1024]

Widths of Mixtral 8x7B, Qwen3-30B-A3B, GPT-OSS-20B and DeepSeek-V3 (64 of its 256 experts), few layers, random BF16
weights, a small vocabulary. First one experts module of each is held against the model's own, in FP32: relative errors
of y and of all gradients; ours must be below 0.02, else the model is left out and the exit status is 1. GPT-OSS's bias
gradients are sums of thousands of rows, which `grouped_mm` adds up in BF16, and is 0.05 away.

Prints for each implementation milliseconds, and its time over that of ours, of

- `experts`: one experts module, forward and backward, on random tokens and choices;
- `step`: the whole model, forward, loss and backward (attention is the same for all; no optimizer);

then the most memory that a step asks for, and how many launches one experts module makes; and what adding up each
token's rows takes, as we do it (gather, sum) and by an embedding bag (both at once, without the gathered rows).
`sonicmoe`, of transformers too, wants the package `kernels` and a kernel from the hub.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import gc
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from fusible_ops.bench.timing import MIB, medians
from fusible_ops.integrations import huggingface
from fusible_ops.integrations.hf_routing import route, to_tokens
from tests.bench.timing import launches, requested_bytes
from tests.compare import relative_error
from tests.hf_models import CONFIGS, experts_of

VOCABULARY = 1024


@dataclass(frozen=True)
class Widths:
    """H, I, experts, choices of a token, and what else the config of the model is told."""

    hidden: int
    intermediate: int
    experts: int
    choices: int
    more: dict[str, Any]


MODELS = {
    "mixtral": Widths(4096, 14336, 8, 2, {"num_attention_heads": 32, "num_key_value_heads": 8}),
    "qwen3": Widths(2048, 768, 128, 8, {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}),
    "gpt_oss": Widths(2880, 2880, 32, 4, {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64}),
    "deepseek_v3": Widths(7168, 2048, 64, 8, {"num_attention_heads": 128, "num_key_value_heads": 128}),
}


class Case:
    """A model, and what its calls are given."""

    def __init__(self, name: str, layers: int, batch: int, length: int, device: str, widths: Widths) -> None:
        sizes = widths.hidden, widths.intermediate, widths.experts, widths.choices
        config = CONFIGS[name](layers, *sizes, vocab_size=VOCABULARY, **widths.more)
        torch.manual_seed(0)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
            self.ids = torch.randint(VOCABULARY, (batch, length))
            rows = batch * length
            self.x = torch.randn(rows, widths.hidden, dtype=torch.bfloat16, requires_grad=True)
            self.dy = torch.randn(rows, widths.hidden, dtype=torch.bfloat16)
            self.choices = torch.rand(rows, widths.experts).topk(widths.choices).indices
            self.weights = torch.rand(rows, widths.choices, dtype=torch.bfloat16, requires_grad=True)
        self.model: Any = model.train()
        self.run: Any = model
        self.experts = experts_of(model)[0]

    def compile(self) -> None:
        """Have the whole model compiled, without a break."""
        self.run = torch.compile(self.model, fullgraph=True)

    def use(self, implementation: str) -> None:
        if self.model.config._experts_implementation != implementation:
            self.model.set_experts_implementation(implementation)

    def one_layer(self, implementation: str) -> tuple[Tensor, ...]:
        self.use(implementation)
        y = self.experts(self.x, self.choices, self.weights)
        return y, *torch.autograd.grad(y, [self.x, self.weights, *self.experts.parameters()], self.dy)

    def step(self, implementation: str) -> Tensor:
        self.use(implementation)
        self.model.zero_grad()
        loss = self.run(input_ids=self.ids, labels=self.ids).loss
        loss.backward()
        return loss.detach()

    def exact(self) -> dict[str, Tensor]:
        """What `one_layer` gives, by the model's own experts in FP32, one after the other."""
        self.use("eager")
        experts = copy.deepcopy(self.experts).float()
        x, weights = (t.detach().float().requires_grad_() for t in (self.x, self.weights))
        y = experts(x, self.choices, weights)
        return self.named(y, *torch.autograd.grad(y, [x, weights, *experts.parameters()], self.dy.float()))

    def named(self, *results: Tensor) -> dict[str, Tensor]:
        names = ["y", "dx", "dweights", *(f"d{name}" for name, _ in self.experts.named_parameters())]
        return dict(zip(names, results, strict=True))

    def errors(self, implementations: list[str]) -> dict[str, dict[str, float]]:
        """Relative errors of each result against FP32, of those implementations that run; says which do not."""
        exact, found = self.exact(), {}
        for each in implementations:
            try:
                results = self.named(*self.one_layer(each))
            except Exception as refused:  # the others are measured without it
                print(f"{each} does not run: {type(refused).__name__}: {str(refused)[:200]}", flush=True)
                continue
            found[each] = {name: relative_error(t, exact[name]) for name, t in results.items()}
        return found


def bench(case: Case, name: str, implementations: list[str]) -> None:
    errors = case.errors(implementations)
    for each, own in errors.items():
        worst = max(own, key=lambda result: own[result])
        print(f"{name:12s} {each:12s} at most {own[worst]:.4f} away from FP32, in {worst}", flush=True)
    ours = errors.get(huggingface.NAME, {})
    assert all(error < 0.02 for error in ours.values()), ours
    implementations = list(errors)
    case.use(implementations[0])
    print(huggingface.explain(case.model).splitlines()[-1], flush=True)
    parts: dict[str, Callable[[str], object]] = {"experts": case.one_layer, "step": case.step}
    for part, run in parts.items():
        times = medians({each: partial(run, each) for each in implementations})
        ours = times.get(huggingface.NAME, float("nan"))
        for each, ms in times.items():
            print(f"{name:12s} {part:8s} {each:12s} {ms:9.3f} ms x{ms / ours:.3f}", flush=True)
    for each in implementations:
        count = len(launches(partial(case.one_layer, each)))
        case.model.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        held = requested_bytes()
        case.step(each)
        most = (requested_bytes("peak") - held) / MIB
        print(f"{name:12s} {each:12s} {count:4d} launches of experts, a step asks for {most:8.0f} MiB", flush=True)


def bench_sums(case: Case, name: str) -> None:
    """Sums of each token's rows: [S, H] to [T, H]."""
    routing = route(case.choices, case.experts.num_experts)
    y = torch.randn(routing.order.shape[0], case.x.shape[1], dtype=torch.bfloat16, device=case.x.device)
    ways: dict[str, Callable[[], Tensor]] = {
        "gather and sum": lambda: to_tokens(y, routing),
        "embedding bag": lambda: F.embedding_bag(routing.places, y, mode="sum"),
    }
    assert relative_error(ways["embedding bag"](), ways["gather and sum"]()) < 0.01
    for way, ms in medians(ways).items():
        print(f"{name:12s} sums     {way:14s} {ms:9.3f} ms", flush=True)


def measure(name: str, args: argparse.Namespace) -> None:
    case = Case(name, args.layers, args.batch, args.length, "cuda", MODELS[name])
    if args.compile:
        case.compile()
    bench(case, name, args.implementations.split(","))
    bench_sums(case, name)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--implementations", default=f"{huggingface.NAME},grouped_mm")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("needs a CUDA device")
        return
    huggingface.install(on_unfused="warn")
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    print(f"{torch.cuda.get_device_name()}, {versions}, {datetime.date.today()}")
    compiled = ", compiled" if args.compile else ""
    print(f"{args.layers} layers, {args.batch} x {args.length} tokens{compiled}", flush=True)
    failed: list[str] = []
    for name in args.models.split(","):
        try:
            measure(name, args)
        except Exception:  # the other models are measured
            traceback.print_exc()
            failed.append(name)
        gc.collect()
        torch.cuda.empty_cache()
    if failed:
        sys.exit(f"stopped: {', '.join(failed)}")


if __name__ == "__main__":
    main()
