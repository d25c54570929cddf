"""The demo's model with its experts spread over ranks: each rank has its own tokens and its own experts, rows travel.

    torchrun --standalone --nproc-per-node 2 examples/expert_parallel.py --check       on CPUs (gloo), a few seconds
    torchrun --standalone --nproc-per-node 2 examples/expert_parallel.py --device cuda      on GPUs (NCCL)

Everything but the experts is there on every rank, and its gradients are added up. How rows travel is an `Exchange`:

dynamic     as many rows as there are. NCCL takes counts from the host, which waits for the device once a layer.
fixed       `--capacity C`: each rank sends each other one C rows, used or not. The host never waits, so that a CUDA
            graph can hold a whole training step. Rows beyond C are dropped: their experts answer zero. How many is
            printed.

In both, the counts that the experts' kernels need stay on the device. `--parts 2` sends the tokens in two parts, so
that one travels beside the products of the other; `--sm-margin` leaves SMs to NCCL for that.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import text_corpus
import torch
import torch.distributed as dist
import torch.nn.functional as F
from moe_lm import BYTES, Experts, ModelConfig, MoELanguageModel
from row_order import Order, by_expert, sorted_by, with_room
from torch import Tensor
from training import DTYPES, ON_CPU, ON_CUDA, RECIPES, Optimizer, TrainConfig, learning_rate

# ----------------------------------------------------------------------------------------------------------------------
# How rows travel. Letters: S ranks, L experts on each, R rows of this rank.


@dataclass
class Way:
    """How many rows go to and come from each rank (None: to all alike), and the exchange under way."""

    sent: list[int] | None
    arriving: list[int] | None
    result: Tensor | None = None
    work: Any = None

    def start(self, t: Tensor, sent: list[int] | None, arriving: list[int] | None) -> None:
        """Send the i-th part of t to rank i."""
        self.result = t.new_empty(len(t) if arriving is None else sum(arriving), *t.shape[1:])
        self.work = dist.all_to_all_single(self.result, t.contiguous(), arriving, sent, async_op=True)

    def finish(self) -> Tensor:
        """What has arrived, in the order of ranks. On a GPU it is the stream that waits, not the host."""
        self.work.wait()
        result, self.result, self.work = self.result, None, None
        return result


class Start(torch.autograd.Function):
    """Begin an all-to-all. Backward ends the one of the gradients, and does not look at what it is given."""

    @staticmethod
    def forward(ctx, t: Tensor, way: Way) -> Tensor:
        ctx.way = way
        way.start(t, way.sent, way.arriving)
        return way.result.view_as(way.result)

    @staticmethod
    def backward(ctx, _: Tensor) -> tuple[Tensor, None]:
        return ctx.way.finish(), None


class End(torch.autograd.Function):
    """Wait for an all-to-all. Backward begins the one of the gradients, the other way."""

    @staticmethod
    def forward(ctx, _: Tensor, way: Way) -> Tensor:
        ctx.way = way
        return way.finish()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        ctx.way.start(grad, ctx.way.arriving, ctx.way.sent)
        return grad, None  # of the right shape; the gradient itself is on its way


def all_to_all(t: Tensor, sent: list[int] | None, arriving: list[int] | None) -> Callable[[], Tensor]:
    """The exchange begins now; the function waits for it and gives what has arrived. Sizes as in `Way`."""
    way = Way(sent, arriving)
    started = Start.apply(t, way)
    return lambda: End.apply(started, way)


@dataclass
class Route:
    """How one batch of rows travels to the experts' ranks.

    order: in which this rank's rows leave. counts [S, L or L + 1]: rows that arrive from each rank for each expert
    here, then those that are none's; rows: all that arrive. sent, arriving: as in `Way`.
    """

    order: Order
    counts: Tensor
    rows: int
    sent: list[int] | None = None
    arriving: list[int] | None = None

    def there(self, t: Tensor) -> Callable[[], Tensor]:
        """Rows go to the experts' ranks; -> [rows, ...] there, in the order in which they arrive."""
        return all_to_all(t, self.sent, self.arriving)

    def back(self, t: Tensor) -> Callable[[], Tensor]:
        """The inverse."""
        return all_to_all(t, self.arriving, self.sent)


class Sent(NamedTuple):
    """Rows on their way to `experts` experts on each rank, with their weights [rows, 1]."""

    route: Route
    experts: int
    rows: Callable[[], Tensor]
    weights: Callable[[], Tensor]


def dynamic_routes(orders: Sequence[Order], counts: Tensor) -> list[Route]:
    """Of n batches: all rows, no others. counts [S, n, L]: rows of this rank for each expert."""
    arriving = exchanged(counts)
    sent, got = torch.stack([counts.sum(dim=2), arriving.sum(dim=2)]).transpose(1, 2).tolist()  # the one wait
    return [Route(o, arriving[:, i], sum(got[i]), sent[i], got[i]) for i, o in enumerate(orders)]


def fixed_routes(orders: Sequence[Order], counts: Tensor, capacity: int) -> list[Route]:
    """Of each batch `capacity` rows from each rank to each. Arguments as `dynamic_routes`."""
    kept = F.pad(counts.cumsum(dim=2).clamp(max=capacity), (1, 0)).diff(dim=2)
    arriving = exchanged(kept)
    arriving = torch.cat([arriving, capacity - arriving.sum(dim=2, keepdim=True)], dim=2)
    return [
        Route(with_room(o, counts[:, i], capacity), arriving[:, i], len(counts) * capacity)
        for i, o in enumerate(orders)
    ]


def exchanged(counts: Tensor) -> Tensor:
    """Row i of counts goes to rank i."""
    result = torch.empty_like(counts)
    dist.all_to_all_single(result, counts.contiguous())
    return result


class ParallelExperts(Experts):
    """`Experts` of which this rank holds one of `dist.get_world_size()` equal parts, in order.

    capacity: rows from each rank to each other one, or None for as many as there are. Of all R rows of a rank R is the
    most that can go to one other. parts: the tokens are dealt out to so many parts, each with its share of the
    capacity; the rows of one travel beside the products of another.
    dropped: rows of this rank that were beyond the capacity, of all calls, on the device.
    ValueError unless ranks divide experts, and capacity and parts are at least 1.
    """

    def __init__(self, config: ModelConfig, device: torch.device, capacity: int | None = None, parts: int = 1) -> None:
        self.ranks, self.capacity, self.parts = dist.get_world_size(), capacity, parts
        if config.experts % self.ranks:
            raise ValueError(f"{config.experts} experts cannot be shared equally by {self.ranks} ranks")
        for name, value in (("capacity", capacity), ("parts", parts)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1; got {value}")
        super().__init__(config, device, config.experts // self.ranks)
        self.register_buffer("dropped", torch.zeros((), dtype=torch.int64, device=device), persistent=False)

    def mixed(self, x: Tensor, chosen: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        parts = [t.tensor_split(self.parts) for t in (x.to(self.dtype), weights, chosen)]
        sizes = [self.sizes(own) for own in parts[2]]
        routes = self.routes([sorted_by(own) for own in parts[2]], sizes)
        sent = [self.send(route, *own) for route, *own in zip(routes, *parts[:2], strict=True)]
        replies = [self.reply(part) for part in sent]  # the second part arrives while the first is answered, and so on
        y = [route.order.collected(arrived(), x.dtype) for route, arrived in zip(routes, replies, strict=True)]
        return torch.cat(y), torch.stack(sizes).sum(dim=0)

    def answers(self, rows: Tensor, split_sizes: Tensor, weight_of_row: Tensor) -> Tensor:
        here = torch.arange(len(rows), device=rows.device)
        (route,) = self.routes([Order(here, here, 1)], [split_sizes])
        arrived = self.reply(self.send(route, rows, weight_of_row[:, None]))
        return route.order.collected(arrived(), rows.dtype)

    def routes(self, orders: Sequence[Order], sizes: Sequence[Tensor]) -> list[Route]:
        """Of each part. sizes: rows of this rank for each expert."""
        counts = torch.stack([own.view(self.ranks, -1) for own in sizes], dim=1)
        if self.capacity is None:
            return dynamic_routes(orders, counts)
        routes = fixed_routes(orders, counts, -(-self.capacity // len(orders)))
        self.dropped += sum((route.order.place == route.rows).sum() for route in routes)
        return routes

    def send(self, route: Route, x: Tensor, weights: Tensor) -> Sent:
        """Each token leaves for the ranks of its experts. x [T, H], weights [T, k]."""
        experts = self.experts // self.ranks
        weights = route.order.each().spread(weights.reshape(-1, 1))
        return Sent(route, experts, route.there(route.order.spread(x)), route.there(weights))

    def reply(self, sent: Sent) -> Callable[[], Tensor]:
        """What the experts here answer to all ranks leaves for them."""
        route = sent.route
        order = by_expert(route.counts, route.rows)
        split_sizes = route.counts[:, : sent.experts].sum(dim=0)
        rows, weights = order.spread(sent.rows()), order.spread(sent.weights())
        y = super().answers(rows, split_sizes, weights.squeeze(1))
        return route.back(order.collected(y, y.dtype))

    def load(self, split_sizes: Tensor) -> Tensor:
        """Of the batches of all ranks."""
        total = split_sizes.clone()
        dist.all_reduce(total)
        return total


# ----------------------------------------------------------------------------------------------------------------------
# Training


def is_expert(name: str) -> bool:
    """Whether this parameter belongs to one expert, and so to one rank."""
    return ".experts.mlp." in name


def part_of(state: dict[str, Tensor], experts: int, rank: int, ranks: int) -> dict[str, Tensor]:
    """A rank's part of a whole model's state_dict: of the experts its own, numbered from 0."""
    here, part = experts // ranks, {}
    for name, value in state.items():
        if not is_expert(name) or name.endswith("_extra_state"):
            part[name] = value
            continue
        stem, number = name.rsplit("weight", 1)
        if int(number) // here == rank:
            part[f"{stem}weight{int(number) % here}"] = value
    return part


class ParallelOptimizer(Optimizer):
    """`Optimizer` of a model whose experts are on several ranks: gradients are clipped by the norm of all of them."""

    def __init__(self, model: MoELanguageModel, config: TrainConfig) -> None:
        named = list(model.named_parameters())
        super().__init__([p for _, p in named], config)
        self.own = [p for name, p in named if is_expert(name)]
        self.shared = [p for name, p in named if not is_expert(name)]

    def add_up(self) -> None:
        """Gradients of what every rank has: the sum over ranks. An expert's is complete already, as rows travelled."""
        flat = torch.cat([p.grad.flatten() for p in self.shared])
        dist.all_reduce(flat)
        for p, grad in zip(self.shared, flat.split([p.numel() for p in self.shared]), strict=True):
            p.grad = grad.view_as(p)

    def norm(self) -> Tensor:
        experts, shared = (torch.nn.utils.get_total_norm([p.grad for p in ps]) for ps in (self.own, self.shared))
        squares = experts.to(shared.dtype).square()
        dist.all_reduce(squares)
        return (squares + shared.square()).sqrt()


def loss_of(model: MoELanguageModel, tokens: Tensor, balance: float) -> Tensor:
    """Mean cross entropy of the next byte, and the routers' balance."""
    logits, uneven, _ = model(tokens[:, :-1])
    return F.cross_entropy(logits.reshape(-1, BYTES), tokens[:, 1:].reshape(-1)) + balance * uneven


def accumulate(model: MoELanguageModel, optimizer: ParallelOptimizer, tokens: Tensor, balance: float) -> Tensor:
    """The loss over the batches of all ranks, of which `tokens` is this rank's; its gradients into `.grad`."""
    loss = loss_of(model, tokens, balance) / dist.get_world_size()
    loss.backward()
    optimizer.add_up()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total


def models(
    config: ModelConfig, device: torch.device, seed: int, **parallel: Any
) -> tuple[MoELanguageModel, MoELanguageModel]:
    """The whole model, and this rank's part of it. parallel: arguments of `ParallelExperts`."""
    torch.manual_seed(seed)
    whole = MoELanguageModel(config, device)
    torch.nn.init.normal_(whole.head.weight, std=0.02)  # the demo's zeros would stop the first gradient there
    part = MoELanguageModel(config, device, functools.partial(ParallelExperts, **parallel))
    part.load_state_dict(part_of(whole.state_dict(), config.experts, dist.get_rank(), dist.get_world_size()))
    return whole, part


def differences(whole: MoELanguageModel, part: MoELanguageModel) -> dict[str, tuple[Tensor, Tensor]]:
    """This rank's gradient of each parameter, and that of the whole model."""
    experts, rank, ranks = whole.config.experts, dist.get_rank(), dist.get_world_size()
    wanted = part_of({name: p.grad for name, p in whole.named_parameters()}, experts, rank, ranks)
    return {name: (p.grad, wanted[name]) for name, p in part.named_parameters()}


def compare(whole: MoELanguageModel, part: MoELanguageModel, loss: Tensor, batch: Tensor, balance: float) -> str:
    """What one process makes of the whole batch, beside what the ranks made of their parts."""
    alone = loss_of(whole, batch, balance)
    alone.backward()
    worst = max(
        ((got - want).norm() / want.norm().clamp(min=1e-12)).item() for got, want in differences(whole, part).values()
    )
    largest = torch.tensor(worst, device=loss.device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return (
        f"loss {loss.item():.6f}, of one process {alone.item():.6f}; largest relative difference of a gradient, "
        f"all ranks: {largest.item():.1e}"
    )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--dtype", choices=tuple(DTYPES), help="of the experts: bf16 on GPUs, fp32 on CPUs unless given")
    add("--recipe", choices=tuple(RECIPES), help="quantise the experts")
    add("--steps", type=int, default=20)
    add("--batch", type=int, default=2, help="sequences of each rank")
    add("--capacity", type=float, help="rows from each rank to each other one, in shares of an even spread; 2, say")
    add("--parts", type=int, default=1, help="tokens travel in so many parts, one beside the products of another")
    add("--scheduler", choices=("static", "dynamic"), help="how the experts' kernels share the GPU")
    add("--sm-margin", type=int, default=0, help="SMs that they leave to NCCL")
    add("--seed", type=int, default=0)
    add("--check", action="store_true", help="compare the first step with one process that has it all")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", dist.get_node_local_rank())
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    config, training = ON_CUDA if device.type == "cuda" else ON_CPU
    dtype = DTYPES[options.dtype or ("bf16" if device.type == "cuda" else "fp32")]
    config = replace(config, expert_dtype=dtype, recipe=RECIPES.get(options.recipe))
    training = replace(training, steps=options.steps, batch=options.batch * ranks, warmup=5)
    rows = options.batch * config.context * config.top_k
    capacity = None if options.capacity is None else min(rows, int(options.capacity * rows / ranks))
    whole, part = models(config, device, options.seed, capacity=capacity, parts=options.parts)
    for block in part.blocks:
        block.experts.mlp.scheduler, block.experts.mlp.sm_margin = options.scheduler, options.sm_margin
    optimizer = ParallelOptimizer(part, training)

    text = text_corpus.load(None).train.to(device)
    window = torch.arange(config.context + 1, device=device)
    batches = torch.Generator(device).manual_seed(options.seed)
    for step in range(training.steps):
        first = torch.randint(text.numel() - window.numel(), (training.batch, 1), generator=batches, device=device)
        batch = text[first + window].long()
        loss = accumulate(part, optimizer, batch.chunk(ranks)[rank], training.balance)
        if step == 0 and options.check:
            found = compare(whole, part, loss, batch, training.balance)
            if rank == 0:
                print(found, flush=True)
        optimizer.step(learning_rate(step, training))
        if step % 5 == 0 or step + 1 == training.steps:
            dropped = sum(block.experts.dropped for block in part.blocks)
            dist.all_reduce(dropped)
            if rank == 0:
                lost = "" if capacity is None else f", rows dropped until now: {dropped.item()}"
                print(f"step {step}: loss {loss.item():.4f}{lost}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
