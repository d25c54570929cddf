"""Never slower than PyTorch: forward, and forward + backward, over row counts, group counts, widths and splits.

    python -m tests.bench.bench_sweep [--limit 0.98] [--rows 256,2048] [--splits "one group"] [--forward]

Prints a row for every case, and at the end those where ours is slower than PyTorch / limit. Layer as in `peers`,
through the operators (no autograd), since the smallest cases would otherwise time the host.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable

import torch
from torch.nn import functional as F

from cute_kernels import ops as kernels
from cute_kernels.activation import Activation
from tests.bench.timing import medians

ROWS = (256, 2048, 16384, 131072)
GROUPS = (1, 8, 64, 256)
WIDTHS = ((1024, 512), (2048, 1408), (4096, 1536), (7168, 2048))
SPLITS = ("even", "random", "one group")
SWIGLU = Activation("swiglu")
MOST_BYTES = 60 * 2**30


def make_splits(kind: str, groups: int, rows: int) -> torch.Tensor:
    """Group sizes; random ones are multinomial over random shares."""
    if kind == "one group":
        sizes = torch.zeros(groups, dtype=torch.int64)
        sizes[groups // 2] = rows
        return sizes
    share = torch.ones(groups) if kind == "even" else torch.rand(groups, generator=torch.Generator().manual_seed(0))
    ends = (share.cumsum(0) / share.sum() * rows).round().long()
    return ends.diff(prepend=torch.zeros(1, dtype=torch.int64))


def _swiglu(h: torch.Tensor) -> torch.Tensor:
    gate, up = h.chunk(2, -1)
    return F.silu(gate) * up


def _dswiglu(d: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    gate, up = h.chunk(2, -1)
    s = torch.sigmoid(gate)
    return torch.cat([d * up * s * (1 + gate * (1 - s)), d * gate * s], -1), F.silu(gate) * up


def layer_calls(rows: int, groups: int, hidden: int, intermediate: int, kind: str) -> dict[str, Callable[[], object]]:
    """Forward and forward + backward of both libraries on the same tensors."""
    splits = make_splits(kind, groups, rows)
    offsets = F.pad(splits.cumsum(0), (1, 0)).int().cuda()
    ends = offsets[1:]
    normal = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    x, dy, probs = normal(rows, hidden), normal(rows, hidden), torch.ones(rows, device="cuda")
    w1, w2 = normal(groups, 2 * intermediate, hidden).mul_(hidden**-0.5), normal(groups, hidden, intermediate)
    swiglu, dswiglu = torch.compile(_swiglu, dynamic=True), torch.compile(_dswiglu, dynamic=True)

    def ours_forward() -> tuple[torch.Tensor, torch.Tensor]:
        act, preact = kernels.grouped_gemm_act(x, [w1], offsets, SWIGLU, None, probs, zero_tail=False)
        return kernels.grouped_gemm(act, [w2], offsets), preact

    def ours_both() -> object:
        _, preact = ours_forward()
        dpre, act, _ = kernels.grouped_gemm_dact(dy, [w2], offsets, preact, SWIGLU, probs, zero_tail=False)
        dw2 = kernels.grouped_wgrad(dy, act, offsets)
        return kernels.grouped_gemm_dgrad(dpre, [w1], offsets), kernels.grouped_wgrad(dpre, x, offsets), dw2

    def torch_forward() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        h = F.grouped_mm(x, w1.transpose(1, 2), offs=ends)
        act = swiglu(h)
        return F.grouped_mm(act, w2.transpose(1, 2), offs=ends), h, act

    def torch_both() -> object:
        _, h, act = torch_forward()
        dw2 = F.grouped_mm(dy.t(), act, offs=ends)
        dh, _ = dswiglu(F.grouped_mm(dy, w2, offs=ends), h)
        return F.grouped_mm(dh, w1, offs=ends), F.grouped_mm(dh.t(), x, offs=ends), dw2

    return {"ours f": ours_forward, "torch f": torch_forward, "ours fb": ours_both, "torch fb": torch_both}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=float, default=0.98, help="least torch time / our time")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rows", default=",".join(map(str, ROWS)), help="comma-separated row counts")
    parser.add_argument("--splits", default=",".join(SPLITS), help="comma-separated, of: " + ", ".join(SPLITS))
    parser.add_argument("--forward", action="store_true", help="forward alone")
    args = parser.parse_args()
    slow, count = [], 0
    for (hidden, intermediate), groups, rows in itertools.product(WIDTHS, GROUPS, map(int, args.rows.split(","))):
        weight_bytes = 2 * 2 * 3 * groups * hidden * intermediate  # weights and their gradients
        if weight_bytes + 20 * rows * (hidden + 3 * intermediate) > MOST_BYTES:
            continue
        for kind in args.splits.split(",") if groups > 1 else SPLITS[:1]:
            calls = layer_calls(rows, groups, hidden, intermediate, kind)
            if args.forward:
                calls = {name: call for name, call in calls.items() if name.endswith(" f")}
            times = medians(calls, rounds=args.rounds, warmups=2)
            ratios = [
                times[f"torch {what}"] / times[f"ours {what}"] for what in ("f", "fb") if f"torch {what}" in times
            ]
            case = f"H={hidden} I={intermediate} G={groups} T={rows} {kind}"
            shown = "  ".join(f"{name} {ms:.3f}" for name, ms in times.items())
            print(f"{case:42s} {shown}   x {' '.join(f'{r:.2f}' for r in ratios)}", flush=True)
            count += 1
            if min(ratios) < args.limit:
                slow.append((min(ratios), case))
    print(f"{count} cases, {len(slow)} below {args.limit}")
    for ratio, case in sorted(slow):
        print(f"    x{ratio:.2f}  {case}")


if __name__ == "__main__":
    main()
