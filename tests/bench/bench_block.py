"""A whole decoder block, GPT-OSS-like and DeepSeek-V3-like: what the fused MLP saves of a training step, on one GPU.

    [LD_PRELOAD=<a current cuBLAS>] python -m tests.bench.bench_block --json FILE       on a GPU
    python -m tests.bench.bench_block --json FILE --plot FILE.png                       anywhere: draws it

x + attention(norm(x)), then x + experts(norm(x)): attention by torch's scaled_dot_product_attention and compiled, the
router and the sorting of rows as in `examples/moe_lm.py`, and the experts' MLP (with DeepSeek's shared expert) by

torch       torch.nn.functional.grouped_mm and a compiled activation (BF16); biases by the group of each row, as
            transformers adds them
ours        this library, in BF16 and under Float8BlockScaling
unfused     the same ops with fusion off (BF16)
te          Transformer Engine's ops, if installed, in BF16 and under its Float8BlockScaling

all over the same weights and the same attention, compiled once. A step is forward and backward of the block, all
gradients; weights are quantised in each, as after an update. "mlp": forward and backward of the experts' MLP by itself,
on the rows of that step. Medians, in turn. Which experts a token goes to is drawn once, so that each expert's rows are
a multiple of 128: in FP8 blocks, with a cuBLAS of 13.6 or newer, Transformer Engine's kernel takes no others, and every
thread of it prints so.

What does not run is left out, with its words; so is what computes something else than torch, and then the exit status
is 1. The file is written whenever there is something new.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusible_ops as ops
from cute_kernels import launch
from cute_kernels.rehearsal import rehearsal
from fusible_ops.bench.timing import medians, uneven_splits
from tests.compare import relative_error

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import moe_lm

ALPHA, LIMIT = 1.702, 7.0
"""GPT-OSS's activation: min(gate, 7)·σ(1.702·gate)·(clamp(up, -7, 7) + 1)."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a block. latent: ranks of queries and of keys and values in DeepSeek's attention, (0, 0) for grouped
    queries; head: of queries and keys without positions, and of values; rope: the part with positions. shared: width of
    the expert that all tokens go to. clamped: GPT-OSS's activation and biases. multiple: of each expert's rows.
    """

    batch: int
    context: int
    hidden: int
    heads: int
    kv_heads: int
    head: int
    experts: int
    top_k: int
    width: int
    latent: tuple[int, int] = (0, 0)
    rope: int = 0
    shared: int = 0
    clamped: bool = False
    multiple: int = 128

    @property
    def tokens(self) -> int:
        return self.batch * self.context


SHAPES = {
    "gptoss": Shape(2, 4096, 2880, 64, 8, 64, experts=32, top_k=4, width=2880, clamped=True),
    "dsv3": Shape(
        1, 4096, 7168, 128, 128, 128, experts=64, top_k=8, width=2048, latent=(1536, 512), rope=64, shared=2048
    ),
}
"""dsv3: 64 of the 256 experts, as a rank of four has them."""


# ----------------------------------------------------------------------------------------------------------------------
# Attention


class Attention(nn.Module):
    """Causal, rotary; queries in groups that share keys and values, or DeepSeek's with latent projections."""

    def __init__(self, s: Shape, **factory: Any) -> None:
        super().__init__()
        self.s = s

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False, **factory)

        if s.rope:
            self.q_down, self.q_norm = linear(s.hidden, s.latent[0]), nn.RMSNorm(s.latent[0], **factory)
            self.q_up = linear(s.latent[0], s.heads * (s.head + s.rope))
            self.kv_down, self.kv_norm = linear(s.hidden, s.latent[1] + s.rope), nn.RMSNorm(s.latent[1], **factory)
            self.kv_up = linear(s.latent[1], s.heads * 2 * s.head)
        else:
            self.qkv = linear(s.hidden, (s.heads + 2 * s.kv_heads) * s.head)
        self.out = linear(s.heads * s.head, s.hidden)
        size = s.rope or s.head
        frequency = 150_000.0 ** (-torch.arange(0, size, 2, device=factory["device"]) / size)
        angle = torch.arange(s.context, device=factory["device"])[:, None] * frequency
        self.register_buffer("cos", angle.cos().to(factory["dtype"]), persistent=False)
        self.register_buffer("sin", angle.sin().to(factory["dtype"]), persistent=False)

    def rotate(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * self.cos - b * self.sin, a * self.sin + b * self.cos], dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.latent(x) if self.s.rope else self.grouped(x)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.s.kv_heads < self.s.heads)
        return self.out(y[..., : self.s.head].transpose(1, 2).flatten(2))

    def grouped(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        s = self.s
        heads = self.qkv(x).unflatten(-1, (-1, s.head)).transpose(1, 2)
        q, k, v = heads.split([s.heads, s.kv_heads, s.kv_heads], dim=1)
        return self.rotate(q), self.rotate(k), v

    def latent(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        s = self.s
        q = self.q_up(self.q_norm(self.q_down(x))).unflatten(-1, (s.heads, -1)).transpose(1, 2)
        latent, k_rope = self.kv_down(x).split([s.latent[1], s.rope], dim=-1)
        k, v = self.kv_up(self.kv_norm(latent)).unflatten(-1, (s.heads, -1)).transpose(1, 2).chunk(2, dim=-1)
        q = torch.cat([q[..., : s.head], self.rotate(q[..., s.head :])], dim=-1)
        k = torch.cat([k, self.rotate(k_rope[:, None]).expand(-1, s.heads, -1, -1)], dim=-1)
        return q, k, F.pad(v, (0, s.rope))  # kernels want one size of head


# ----------------------------------------------------------------------------------------------------------------------
# The MLP, by each library: rows [R, H] sorted by expert, sizes [G], probs [R] -> [R, H]; shared(x) -> [T, H]


class Weights:
    """The experts' parameters, stacked, and the shared expert's."""

    def __init__(self, s: Shape, device: str, dtype: torch.dtype) -> None:
        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, device=device, dtype=dtype).mul_(shape[-1] ** -0.5)

        self.w1, self.w2 = normal(s.experts, 2 * s.width, s.hidden), normal(s.experts, s.hidden, s.width)
        self.b1 = normal(s.experts, 2 * s.width) if s.clamped else None
        self.b2 = normal(s.experts, s.hidden) if s.clamped else None
        self.shared = [normal(2 * s.shared, s.hidden), normal(s.hidden, s.shared)] if s.shared else []

    def experts(self) -> list[Tensor]:
        return [t for t in (self.w1, self.b1, self.w2, self.b2) if t is not None]


class FromOps(nn.Module):
    """Our ops, or Transformer Engine's: the same names. separate: a parameter for each expert."""

    def __init__(
        self, s: Shape, weights: Weights, library: Any, autocast: Callable[[], Any], separate: bool, **how: Any
    ) -> None:
        super().__init__()
        self.autocast, self.clamped = autocast, s.clamped
        common = {"device": weights.w1.device, "dtype": weights.w1.dtype}
        one = {} if separate else {"single_grouped_weight": True, "single_grouped_bias": s.clamped}
        act = (
            library.ScaledClampedQGeGLU(limit=LIMIT, alpha=ALPHA, glu_linear_offset=1.0)
            if s.clamped
            else library.ScaledSwiGLU()
        )
        fc1 = library.GroupedLinear(s.experts, s.hidden, 2 * s.width, bias=s.clamped, **one, **common)
        fc2 = library.GroupedLinear(s.experts, s.width, s.hidden, bias=s.clamped, scale_bias=s.clamped, **one, **common)
        self.mlp = library.Sequential(fc1, act, fc2, **how)
        for linear, parts in ((fc1, (weights.w1, weights.b1)), (fc2, (weights.w2, weights.b2))):
            for name, whole in zip(("weight", "bias"), parts, strict=True):
                if whole is None:
                    continue
                for g, part in enumerate(whole.unbind(0)) if separate else [("", whole)]:
                    getattr(linear, f"{name}{g}").data = part
        if s.shared:
            dense = [
                library.Linear(s.hidden, 2 * s.shared, bias=False, **common),
                library.SwiGLU(),
                library.Linear(s.shared, s.hidden, bias=False, **common),
            ]
            self.dense = library.Sequential(*dense, **how)
            for p, w in zip(self.dense.parameters(), weights.shared, strict=True):
                p.data = w

    def forward(self, rows: Tensor, sizes: Tensor, probs: Tensor) -> Tensor:
        with self.autocast():
            return self.mlp(rows, sizes, probs, sizes, *([probs] if self.clamped else []))

    def shared(self, x: Tensor) -> Tensor:
        with self.autocast():
            return self.dense(x)


def swiglu(h: Tensor, probs: Tensor) -> Tensor:
    gate, up = h.chunk(2, dim=-1)
    return F.silu(gate) * up * probs[:, None].to(h.dtype)


def clamped(h: Tensor, bias: Tensor, group: Tensor, probs: Tensor) -> Tensor:
    gate, up = (h + bias[group]).chunk(2, dim=-1)
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return gate * torch.sigmoid(ALPHA * gate) * (up + 1) * probs[:, None].to(h.dtype)


def biased(y: Tensor, bias: Tensor, group: Tensor, probs: Tensor) -> Tensor:
    return y + bias[group] * probs[:, None].to(y.dtype)


class FromTorch(nn.Module):
    """torch.nn.functional.grouped_mm; what lies between is compiled on a GPU."""

    def __init__(self, s: Shape, weights: Weights) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(t) for t in weights.experts()])
        self.dense = nn.ParameterList([nn.Parameter(t) for t in weights.shared])
        on_gpu = weights.w1.is_cuda
        self.swiglu, self.clamped, self.biased = (
            torch.compile(f, dynamic=False) if on_gpu else f for f in (swiglu, clamped, biased)
        )

    def forward(self, rows: Tensor, sizes: Tensor, probs: Tensor) -> Tensor:
        ends = sizes.cumsum(0).int()
        if len(self.weights) == 2:
            w1, w2 = self.weights
            h = F.grouped_mm(rows, w1.mT, offs=ends)
            return F.grouped_mm(self.swiglu(h, probs), w2.mT, offs=ends)
        w1, b1, w2, b2 = self.weights
        group = torch.searchsorted(ends, torch.arange(len(rows), device=rows.device), right=True)
        h = F.grouped_mm(rows, w1.mT, offs=ends)
        y = F.grouped_mm(self.clamped(h, b1, group, probs), w2.mT, offs=ends)
        return self.biased(y, b2, group, probs)

    def shared(self, x: Tensor) -> Tensor:
        w1, w2 = self.dense
        return F.linear(self.swiglu(F.linear(x, w1), torch.ones_like(x[:, 0])), w2)


def libraries(s: Shape, weights: Weights) -> dict[str, nn.Module]:
    """The MLPs, by names of library and dtype ("bf16", "fp8")."""
    strict = {"on_unfused": "error"} if weights.w1.is_cuda else {}
    block = partial(ops.autocast, recipe=ops.Float8BlockScaling())
    found: dict[str, nn.Module] = {
        "torch bf16": FromTorch(s, weights),
        "ours bf16": FromOps(s, weights, ops, contextlib.nullcontext, separate=False, **strict),
        "unfused bf16": FromOps(s, weights, ops, contextlib.nullcontext, separate=False, rules=()),
        "ours fp8": FromOps(s, weights, ops, block, separate=False, **strict),
    }
    if weights.w1.is_cuda:
        try:
            import transformer_engine.pytorch as te
            from transformer_engine.common.recipe import Float8BlockScaling

            theirs = partial(te.autocast, enabled=True, recipe=Float8BlockScaling())
            found["te bf16"] = FromOps(s, weights, te.ops, contextlib.nullcontext, separate=True)
            found["te fp8"] = FromOps(s, weights, te.ops, theirs, separate=True)
        except Exception as missing:  # the others are measured without it
            print(f"te does not run: {type(missing).__name__}: {str(missing)[:200]}", flush=True)
    return found


def kernels_of(s: Shape) -> list[launch.Spec]:
    """Our kernels in a step of this shape, in both dtypes."""
    with rehearsal("sm_90a") as kernels, torch.device("meta"):
        mlps = libraries(s, Weights(s, "meta", torch.bfloat16))
        count = s.tokens * s.top_k
        rows, tokens = (torch.empty(n, s.hidden, dtype=torch.bfloat16, requires_grad=True) for n in (count, s.tokens))
        sizes, probs = torch.empty(s.experts, dtype=torch.int64), torch.empty(count, requires_grad=True)
        for name in ("ours bf16", "ours fp8"):
            mlps[name](rows, sizes, probs).sum().backward()
            if s.shared:
                mlps[name].shared(tokens).sum().backward()
    return list(kernels)


def compile_ahead(shapes: list[str]) -> None:
    """Fill the cache of kernels, all cores at work: one by one, as steps ask for them, takes minutes."""
    begin = time.perf_counter()
    kernels = list(dict.fromkeys(kernel for shape in shapes for kernel in kernels_of(SHAPES[shape])))
    jobs = min(len(kernels), os.cpu_count() or 1)
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        new = sum(pool.map(launch.precompile, *zip(*kernels, strict=True)))
    print(f"{len(kernels)} kernels, {new} compiled now; {time.perf_counter() - begin:.0f} s", flush=True)


# ----------------------------------------------------------------------------------------------------------------------
# The block


def dealt(s: Shape) -> tuple[Tensor, list[int]]:
    """The experts of each token [T, K], no two the same, and the rows of each expert: from about half to one and a half
    times the mean.
    """
    sizes = uneven_splits(s.experts, s.tokens * s.top_k, s.multiple)
    assert max(sizes) <= s.tokens, "a token would get an expert twice"
    hands = torch.arange(s.experts).repeat_interleave(torch.tensor(sizes)).view(s.top_k, s.tokens)
    return hands.T[torch.randperm(s.tokens)], sizes


class Router(nn.Linear):
    """Scores of the experts that a token was dealt; the others' are minus infinity."""

    def __init__(self, chosen: Tensor, s: Shape, **factory: Any) -> None:
        super().__init__(s.hidden, s.experts, bias=False, **factory)
        others = torch.ones(s.tokens, s.experts, dtype=torch.bool).scatter_(1, chosen, False)
        self.register_buffer("others", others.to(self.weight.device), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).masked_fill(self.others, -torch.inf)


class Experts(moe_lm.Experts):
    """Router and sorting of rows, over an MLP of any library."""

    def __init__(self, s: Shape, mlp: nn.Module, router: Router) -> None:
        nn.Module.__init__(self)
        self.experts, self.top_k, self.dtype, self.router, self.mlp = (
            s.experts,
            s.top_k,
            router.weight.dtype,
            router,
            mlp,
        )

    def answers(self, rows: Tensor, split_sizes: Tensor, weight_of_row: Tensor) -> Tensor:
        return self.mlp(rows, split_sizes, weight_of_row)


class Before(nn.Module):
    """What comes before the experts: x + attention(norm(x)), and the norm of that."""

    def __init__(self, s: Shape, **factory: Any) -> None:
        super().__init__()
        self.attention = Attention(s, **factory)
        self.attention_norm, self.experts_norm = (nn.RMSNorm(s.hidden, **factory) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.attention(self.attention_norm(x))
        return x, self.experts_norm(x)


class Block(nn.Module):
    """A decoder block. Everything but the MLP is shared by all that are compared."""

    def __init__(self, s: Shape, before: nn.Module, router: Router, mlp: nn.Module) -> None:
        super().__init__()
        self.s, self.before, self.experts = s, before, Experts(s, mlp, router)

    def forward(self, x: Tensor) -> Tensor:
        x, normal = self.before(x)
        tokens = normal.flatten(0, 1)
        y = self.experts(tokens)[0]
        if self.s.shared:
            y = y + self.experts.mlp.shared(tokens)
        return x + y.view_as(x)


class Bench:
    """All libraries' blocks of one shape, over the same weights. wrong: those that computed something else."""

    def __init__(self, s: Shape, device: str, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        factory = {"device": device, "dtype": dtype}
        before: Any = Before(s, **factory)
        if device != "cpu":
            before = torch.compile(before, dynamic=False)
        chosen, sizes = dealt(s)
        router = Router(chosen, s, **factory)
        mlps = libraries(s, Weights(s, device, dtype))
        self.blocks = {name: Block(s, before, router, mlp) for name, mlp in mlps.items()}
        self.wrong: list[str] = []
        self.x, self.dy = (torch.randn(s.batch, s.context, s.hidden, **factory) for _ in range(2))
        self.x.requires_grad_()
        rows = s.tokens * s.top_k
        self.rows = torch.randn(rows, s.hidden, **factory).requires_grad_()
        self.drows, self.probs = (
            torch.randn(rows, s.hidden, **factory),
            torch.rand(rows, device=device).requires_grad_(),
        )
        self.sizes = torch.tensor(sizes, device=device)

    def step(self, name: str) -> tuple[Tensor, ...]:
        """The block's output and all gradients."""
        block = self.blocks[name]
        y = block(self.x)
        return y, *torch.autograd.grad(y, [self.x, *block.parameters()], self.dy)

    def mlp(self, name: str) -> object:
        mlp = self.blocks[name].experts.mlp
        wanted = [self.rows, self.probs, *(p for n, p in mlp.named_parameters() if not n.startswith("dense"))]
        return torch.autograd.grad(mlp(self.rows, self.sizes, self.probs), wanted, self.drows)

    def check(self, bounds: dict[str, float]) -> None:
        """Leave out what does not run, and what gives another output or gradient of x than the first block; say so, and
        how long each one's first step took. bounds: of the relative errors, by dtype.
        """
        want: tuple[Tensor, ...] = ()
        for name in list(self.blocks):
            begin = time.perf_counter()
            try:
                found = self.step(name)[:2]
                want = want or found
                errors = [relative_error(*each) for each in zip(found, want, strict=True)]
            except Exception as refused:  # the others are measured without it
                print(f"{name} does not run: {type(refused).__name__}: {str(refused)[:200]}", flush=True)
                del self.blocks[name]
                continue
            seconds = f"first step {time.perf_counter() - begin:.1f} s"
            away = ", ".join(f"{error:.1e}" for error in errors)
            print(f"{name}: {seconds}, {away} away from {next(iter(self.blocks))}", flush=True)
            if not all(error < bounds[name.split()[1]] for error in errors):
                print(f"{name} is wrong, and left out", flush=True)
                self.wrong.append(name)
                del self.blocks[name]

    def times(self, run: Callable[[str], object]) -> dict[str, float]:
        """Milliseconds of each library."""
        calls = {name: (lambda name=name: run(name)) for name in self.blocks}
        if self.x.is_cuda:
            return medians(calls, rounds=9, warmups=2)
        found = {}
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            found[name] = (time.perf_counter() - begin) * 1e3
        return found


def measure(shape: str, bench: Bench) -> Iterator[list[dict[str, Any]]]:
    """A row for each library and dtype: milliseconds of the step; then, once more, with those of the MLP alone."""
    keeps = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)  # weights are quantised at every step
    try:
        bench.check({"bf16": 0.02, "fp8": 0.2})
        rows: list[dict[str, Any]] = []
        for name, ms in bench.times(bench.step).items():
            library, dtype = name.split()
            rows.append({"shape": shape, "dtype": dtype, "library": library, "ms": round(ms, 3), "mlp_ms": None})
        yield rows
        mlps = bench.times(bench.mlp)
        for row in rows:
            ms = mlps.get(f"{row['library']} {row['dtype']}")
            row["mlp_ms"] = ms and round(ms, 3)
        yield rows
    finally:
        torch.set_autocast_cache_enabled(keeps)


def report(rows: list[dict[str, Any]]) -> list[str]:
    """Each row in words, with the share of its step that ours in the same dtype, and ours in FP8, saves."""
    ours = {(r["shape"], r["dtype"]): r["ms"] for r in rows if r["library"] == "ours"}
    lines = []
    for r in rows:
        saved = [
            f"ours in {dtype} saves {1 - ms / r['ms']:.1%}"
            for (shape, dtype), ms in ours.items()
            if shape == r["shape"] and (r["library"], r["dtype"]) != ("ours", dtype)
        ]
        part = "" if r["mlp_ms"] is None else f", of it mlp {r['mlp_ms']:9.3f} ms"
        what = f"{r['shape']:8} {r['dtype']:5} {r['library']:8} step {r['ms']:9.3f} ms{part}"
        lines.append(f"{what}  {', '.join(saved)}")
    return lines


def plot(rows: list[dict[str, Any]], heading: str, file: Path) -> None:
    """A bar for each library and dtype: the step, and the MLP's part of it."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shapes = list(dict.fromkeys(r["shape"] for r in rows))
    figure, axes = plt.subplots(1, len(shapes), figsize=(5.2 * len(shapes), 3.8), squeeze=False)
    for panel, shape in zip(axes[0], shapes, strict=True):
        own = [r for r in rows if r["shape"] == shape]
        for at, r in enumerate(own):
            colour = "tab:green" if r["library"] == "ours" else "tab:grey"
            mlp = r["mlp_ms"] or 0.0
            panel.bar(at, mlp, color=colour)
            panel.bar(at, r["ms"] - mlp, bottom=mlp, color=colour, alpha=0.4)
            panel.text(at, r["ms"], f"{r['ms']:.1f}", ha="center", va="bottom", fontsize=8)
        panel.set_xticks(range(len(own)), [f"{r['library']}\n{r['dtype']}" for r in own], fontsize=8)
        panel.set(title=f"{shape}: dark the MLP, light the rest", ylabel="ms, forward and backward")
    figure.suptitle(heading, fontsize=8)
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def versions() -> str:
    found = [f"torch {torch.__version__}"]
    with contextlib.suppress(PackageNotFoundError):
        found.append(f"transformer-engine {version('transformer-engine')}")
    return ", ".join(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file for what is measured; read, not written, with --plot")
    parser.add_argument("--plot", type=Path, help="draw the JSON into this file")
    parser.add_argument("--shapes", default=",".join(SHAPES), help="comma-separated, of: " + ", ".join(SHAPES))
    args = parser.parse_args()
    if args.plot:
        if not args.json:
            parser.error("--plot draws what --json holds: give both")
        found = json.loads(args.json.read_text())
        plot(found["rows"], found["heading"], args.plot)
        return
    shapes = args.shapes.split(",")
    compile_ahead(shapes)
    heading = f"{torch.cuda.get_device_name()}, {versions()}, {datetime.date.today()}"
    print(heading, flush=True)
    rows: list[dict[str, Any]] = []
    wrong: list[str] = []
    for shape in shapes:
        bench = Bench(SHAPES[shape], "cuda", torch.bfloat16)
        found: list[dict[str, Any]] = []
        for found in measure(shape, bench):
            print(*report(found), sep="\n", flush=True)
            if args.json:
                args.json.write_text(json.dumps({"heading": heading, "rows": rows + found}, indent=1) + "\n")
        rows += found
        wrong += bench.wrong
        del bench
        torch.cuda.empty_cache()
    if wrong:
        sys.exit(1)


if __name__ == "__main__":
    main()
