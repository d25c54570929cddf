"""Train a small byte-level mixture-of-experts language model on real text, and say which kernels its experts run on.

    python examples/train_moe_lm.py                             about a minute on one CPU core
    python examples/train_moe_lm.py --device cuda --compare     fused and unfused from the same seed, curves and speeds
    python examples/train_moe_lm.py --device cuda --recipe block --compare recipe      experts in FP8, and without

The measure is bits per byte on held-out text. A model that knows only pairs of bytes cannot get below the conditional
bigram entropy of that text, which is printed beside it.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean

import text_corpus
import torch
import torch.nn.functional as F
from curves import draw
from moe_lm import BYTES, ModelConfig, MoELanguageModel
from torch import Tensor
from tqdm import tqdm
from training import DTYPES, ON_CPU, ON_CUDA, RECIPES, Optimizer, TrainConfig, learning_rate

LOG_EVERY = 10
"""Steps between two looks at the loss: on a GPU each look waits for the device, and nothing else does."""
TAIL = 50
"""Steps at the end whose mean loss is compared."""


@dataclass
class Run:
    """What one training run leaves: losses are bits per byte of each step's batch."""

    name: str
    model: MoELanguageModel
    losses: list[float] = field(default_factory=list)
    load: Tensor | None = None
    seconds: float = 0.0
    tokens_per_second: float = 0.0
    held_out: float = math.nan

    @property
    def last(self) -> float:
        return mean(self.losses[-TAIL:])


def train(name: str, model_config: ModelConfig, config: TrainConfig, text: Tensor, device: torch.device) -> Run:
    """Train from scratch. The same seed gives the same weights and batches; nothing but the log reads the device."""
    torch.manual_seed(config.seed)
    model = MoELanguageModel(model_config, device)
    batches = torch.Generator(device).manual_seed(config.seed)
    window = torch.arange(model_config.context + 1, device=device)
    optimizer = Optimizer(list(model.parameters()), config)
    run, waiting, loads = Run(name, model), [], 0

    is_terminal = sys.stderr.isatty()
    bar = tqdm(total=config.steps, desc=name, unit="step", mininterval=0.2 if is_terminal else 10, dynamic_ncols=True)
    start = warm = time.perf_counter()
    for step in range(config.steps):
        first = torch.randint(text.numel() - window.numel(), (config.batch, 1), generator=batches, device=device)
        tokens = text[first + window].long()
        logits, balance, load = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.reshape(-1, BYTES), tokens[:, 1:].reshape(-1))
        (loss + config.balance * balance).backward()
        optimizer.step(learning_rate(step, config))
        waiting.append(loss.detach())
        loads = loads + load
        if (step + 1) % LOG_EVERY and step + 1 < config.steps:
            continue

        run.losses += (torch.stack(waiting) / math.log(2)).tolist()
        now = time.perf_counter()
        done, run.seconds, run.load = len(run.losses), now - start, loads / loads.sum(dim=1, keepdim=True)
        if done == LOG_EVERY:
            warm = now
        else:
            run.tokens_per_second = (done - LOG_EVERY) * config.batch * model_config.context / (now - warm)
        share = run.load * model_config.experts
        bar.set_postfix_str(
            f"loss {run.losses[-1] * math.log(2):.3f}, {run.losses[-1]:.3f} bits/byte, "
            f"{run.tokens_per_second:,.0f} tokens/s, expert load {share.min():.2f}-{share.max():.2f}x",
            refresh=False,
        )
        bar.update(len(waiting))
        waiting, loads = [], 0
        if config.max_seconds is not None and run.seconds > config.max_seconds and done < config.steps:
            bar.write(f"stopped after {done} of {config.steps} steps: {config.max_seconds:.0f} s are over")
            break
    bar.close()
    return run


@torch.no_grad()
def bits_per_byte(model: MoELanguageModel, text: Tensor) -> float:
    """Mean of -log2 p(byte). Windows side by side: every byte is predicted once, from at most one context before it."""
    context = model.config.context
    count = (text.numel() - 1) // context
    inputs = text[: count * context].long().view(count, context)
    targets = text[1 : count * context + 1].long().view(count, context)
    total = torch.zeros((), dtype=torch.float64, device=text.device)
    for x, y in zip(inputs.split(64), targets.split(64), strict=True):
        total += F.cross_entropy(model(x)[0].flatten(0, 1), y.flatten(), reduction="sum").double()
    return total.item() / math.log(2) / targets.numel()


def report_comparison(one: Run, other: Run, device: torch.device) -> None:
    steps = min(len(one.losses), len(other.losses))
    print("\nbits per byte (mean of 10 steps) and speed")
    print(f"{'step':>12}  {one.name:>9}  {other.name:>9}  {'difference':>10}")
    marks = sorted({max(1, steps * i // 10) for i in range(1, 11)})
    for mark in marks:
        a, b = (mean(run.losses[max(0, mark - LOG_EVERY) : mark]) for run in (one, other))
        print(f"{mark:>12}  {a:>9.4f}  {b:>9.4f}  {a / b - 1:>+10.3%}")
    difference = one.last / other.last - 1
    print(f"{f'last {min(TAIL, steps)}':>12}  {one.last:>9.4f}  {other.last:>9.4f}  {difference:>+10.3%}")
    print(f"{'held out':>12}  {one.held_out:>9.4f}  {other.held_out:>9.4f}")
    speeds = one.tokens_per_second, other.tokens_per_second
    print(f"{'tokens/s':>12}  {speeds[0]:>9,.0f}  {speeds[1]:>9,.0f}  (after the first {LOG_EVERY} steps)")
    if device.type == "cpu" and other.name == "unfused":
        print("No kernel is fused on a CPU: both runs took the unfused path, so this compares it with itself.")


def report(run: Run, entropy: float) -> None:
    print(f"\n{run.name}: {len(run.losses)} steps in {run.seconds:.1f} s, {run.tokens_per_second:,.0f} tokens/s")
    if run.load is not None:
        for layer, shares in enumerate(run.load.tolist()):
            spread = f"{min(shares):.1%} to {max(shares):.1%}"
            print(f"  layer {layer}: an expert has {spread} of the rows; fair is {1 / len(shares):.1%}")
    print(f"  held-out text: {run.held_out:.3f} bits per byte; its conditional bigram entropy: {entropy:.3f}")
    side = "below" if run.held_out < entropy else "ABOVE"
    print(f"  that is {abs(entropy - run.held_out):.3f} bits {side} the bigram entropy")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--text", type=Path, help="file to train on instead of the Python standard library's source")
    add("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    add("--dtype", choices=tuple(DTYPES), help="of the expert MLP: bf16 on a GPU, fp32 on a CPU unless given")
    add("--steps", type=int, help=f"{ON_CPU[1].steps} on a CPU, {ON_CUDA[1].steps} on a GPU unless given")
    add("--max-seconds", type=float, help="stop training then, whatever --steps says; 85 on a CPU unless given")
    add(
        "--threads",
        type=int,
        default=1,
        help="CPU threads; of the host",
    )
    add("--seed", type=int, default=0)
    add(
        "--recipe",
        choices=tuple(RECIPES),
        help="quantise the experts: E4M3 in blocks, current or delayed scales, MXFP8, NVFP4",
    )
    add(
        "--compare",
        nargs="?",
        const="kernels",
        choices=("kernels", "recipe"),
        help="train twice from the same seed: fused and unfused, or with the recipe and without",
    )
    add("--no-fuse", action="store_true", help="run the experts unfused")
    add("--sample", type=int, default=400, help="bytes of text to write at the end")
    add("--prompt", default="def ", help="how that text begins")
    add("--out", type=Path, default=Path("out"), help="folder for the loss curve")
    options = parser.parse_args(arguments)
    if options.steps is not None and options.steps < 1:
        parser.error("--steps must be at least 1")
    if options.compare == "kernels" and options.no_fuse:
        parser.error("--compare trains both ways; leave --no-fuse out")
    if options.compare == "recipe" and options.recipe is None:
        parser.error("--compare recipe needs a --recipe")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device; use --device cpu")
    return options


def configure(options: argparse.Namespace) -> tuple[ModelConfig, TrainConfig]:
    model_config, config = ON_CUDA if options.device == "cuda" else ON_CPU
    dtype = DTYPES[options.dtype or ("bf16" if options.device == "cuda" else "fp32")]
    given = {"steps": options.steps, "max_seconds": options.max_seconds}
    config = replace(config, seed=options.seed, **{name: value for name, value in given.items() if value is not None})
    recipe = RECIPES.get(options.recipe)
    return replace(model_config, expert_dtype=dtype, fused=not options.no_fuse, recipe=recipe), config


def runs_to_compare(options: argparse.Namespace, config: ModelConfig) -> dict[str, ModelConfig]:
    """The runs by name: one, or the two that are compared."""
    if options.compare == "kernels":
        return {"fused": config, "unfused": replace(config, fused=False)}
    if options.compare == "recipe":
        return {options.recipe: config, "plain": replace(config, recipe=None)}
    return {"training" if config.fused else "unfused": config}


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    torch.set_num_threads(options.threads)  # a second one gains a third at this size, and stalls on a busy machine
    torch.set_float32_matmul_precision("high")  # on a GPU, TF32 for what is not in the experts
    device = torch.device(options.device)
    model_config, config = configure(options)
    corpus = text_corpus.load(options.text)
    entropy = text_corpus.bigram_entropy(corpus.held_out)
    print(f"text: {corpus.source}; {corpus.train.numel():,} bytes to train on, {corpus.held_out.numel():,} held out")
    print(f"conditional bigram entropy H(X_t | X_t-1) of the held-out text: {entropy:.3f} bits per byte")

    model = MoELanguageModel(model_config, device)
    count = sum(p.numel() for p in model.parameters())
    print(
        f"model: {count:,} parameters, {model_config.layers} layers of {model_config.experts} experts, "
        f"top {model_config.top_k}; experts in {str(model_config.expert_dtype).removeprefix('torch.')} on {device}\n"
    )
    print("what the expert MLP of each layer runs on:")
    print(model.blocks[0].experts.mlp.explain(recipe=model_config.recipe), "\n")
    del model

    train_text, held_out = corpus.train.to(device), corpus.held_out.to(device)
    runs = []
    for name, variant in runs_to_compare(options, model_config).items():
        run = train(name, variant, config, train_text, device)
        run.held_out = bits_per_byte(run.model, held_out)
        report(run, entropy)
        runs.append(run)
    if options.compare:
        report_comparison(runs[0], runs[1], device)

    picture = draw(options.out, {run.name: run.losses for run in runs}, entropy, runs[0].held_out)
    print(f"\nloss curve: {picture}")
    if options.sample:
        generator = torch.Generator(device).manual_seed(config.seed)
        text = runs[0].model.sample(options.prompt.encode(), options.sample, 0.7, generator)
        print(f"\n--- {options.sample} bytes that it writes after {options.prompt!r} ---")
        print(text.decode(errors="replace"))


if __name__ == "__main__":
    main()
