"""Timing callables beside one another: in turn, L2 emptied before each, CUDA events, medians."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping

import torch

MIB = 2**20
FLUSH_BYTES = 96 * MIB


class L2Flush:
    """Called, it writes 96 MiB of random bytes and then reads 96 MiB of others: no input stays in L2, and nothing waits
    there to be written back.

    Without the reading L2 is left full of lines to be written, and calls that read much and write little pay for them:
    on an H200 15 % for reading 188 MB, 3 % for copying as much (docs/performance.md).
    """

    def __init__(self) -> None:
        self.written, self.read = (torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda") for _ in range(2))
        self.read.random_()

    def __call__(self) -> None:
        self.written.random_()
        self.read.amax()


def medians(
    callables: Mapping[str, Callable[[], object]], rounds: int = 15, warmups: int = 3, flush: bool = True
) -> dict[str, float]:
    """Median milliseconds of each callable, run in turn (A B C, B C A, …); one that raises is reported and left out.

    Before each timed call L2 is emptied (`L2Flush`), so that no input is there.
    """
    empty_l2 = L2Flush()
    alive: dict[str, Callable[[], object]] = {}
    for name, call in callables.items():
        try:
            for _ in range(warmups):
                call()
            torch.cuda.synchronize()
            alive[name] = call
        except Exception as error:  # a peer that does not run is no reason to stop
            print(f"  {name} does not run: {type(error).__name__}: {str(error)[:200]}", flush=True)
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in alive}
    for round_index in range(rounds if alive else 0):
        names = list(alive)
        shift = round_index % len(names)
        for name in names[shift:] + names[:shift]:
            if flush:
                empty_l2()
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            alive[name]()
            stop.record()
            events[name].append((start, stop))
        torch.cuda.synchronize()
    return {name: statistics.median(a.elapsed_time(b) for a, b in pairs) for name, pairs in events.items()}


def uneven_splits(groups: int, rows: int, multiple: int = 128, seed: int = 0) -> list[int]:
    """Random group sizes from about half to one and a half times the mean, multiples of `multiple`, summing to rows."""
    generator = torch.Generator().manual_seed(seed)
    share = torch.rand(groups, generator=generator) + 0.5
    sizes = (share / share.sum() * rows / multiple).floor().long() * multiple
    order = torch.randperm(groups, generator=generator)
    left = (rows - int(sizes.sum())) // multiple
    sizes[order[torch.arange(left) % groups]] += 0 if left == 0 else multiple
    sizes[order[0]] += rows - int(sizes.sum())
    return sizes.tolist()
