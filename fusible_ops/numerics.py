"""Where numbers go wrong: every op of a Sequential by itself, unfused, and what its results and gradients hold.

    for seen in survey(mlp, x, split_sizes, probs, split_sizes, grad_output=dy):
        print(seen)
    print(first_wrong(...))

This waits for the device after each op, and runs each on its own: a tool for a step that has gone wrong, not for
training. Under a recipe each op quantises what it is given, as ever.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from fusible_ops.op import FusibleOperation
from fusible_ops.sequential import Sequential


@dataclass(frozen=True)
class Seen:
    """What one tensor holds. amax: its largest finite magnitude. not_finite: how many NaN and infinities; row: of the
    first of them, None if there are none. zeros: share of exact zeros.
    """

    op: str
    what: str
    shape: tuple[int, ...]
    amax: float
    not_finite: int
    row: int | None
    zeros: float

    def __str__(self) -> str:
        wrong = f"{self.not_finite} not finite, the first in row {self.row}" if self.not_finite else ""
        size = "x".join(map(str, self.shape))
        return (
            f"{self.op:24} {self.what:22} {size:>16}  amax {self.amax:10.4g}  zeros {self.zeros:6.1%}  {wrong}".rstrip()
        )


def look(op: str, what: str, t: Tensor) -> Seen:
    """What `t` holds."""
    values = t.detach().float().reshape(t.shape or (1,))
    finite = values.isfinite()
    count = int((~finite).sum())
    rows = (~finite).reshape(values.shape[0], -1).any(1).nonzero().flatten().tolist() if count else []
    amax = float(values.where(finite, torch.zeros_like(values)).abs().max()) if values.numel() else 0.0
    zeros = float((values == 0).float().mean()) if values.numel() else 0.0
    return Seen(op, what, tuple(t.shape), amax, count, rows[0] if rows else None, zeros)


def survey(model: Sequential, x: Tensor, *extra_inputs: Tensor, grad_output: Tensor | None = None) -> list[Seen]:
    """The input, every parameter and every op's result, in order; with a `grad_output` then every gradient from the
    last op back: of results, then of parameters. `.grad` of nothing is touched.

    Arguments are those of `model`. Errors: as the model's.
    """
    seen, results, extras = [look("", "input", x)], [], list(extra_inputs)
    with torch.set_grad_enabled(grad_output is not None):
        y = x.detach().requires_grad_(grad_output is not None)
        results.append(("", y))
        for name, module in model.named_children():
            title = f"{type(module).__name__} {name}"
            seen += [look(title, key, p) for key, p in module.named_parameters()]
            if isinstance(module, FusibleOperation):
                own = [extras.pop(0) for _ in range(module.num_extra_inputs)]
                y = Sequential(module, rules=())(y, *own)
            else:
                y = module(y)
            seen.append(look(title, "result", y))
            results.append((title, y))
    if grad_output is None:
        return seen
    parameters = [(title, key, p) for title, key, p in _parameters(model) if p.requires_grad]
    wanted = [t for _, t in results] + [p for *_, p in parameters]
    grads = torch.autograd.grad(y, wanted, grad_output, allow_unused=True)
    seen += [
        look(title, "gradient of the result" if title else "gradient of the input", g)
        for (title, _), g in reversed(list(zip(results, grads, strict=False)))
        if g is not None
    ]
    of_parameters = zip(parameters, grads[len(results) :], strict=True)
    return seen + [look(title, f"gradient of {key}", g) for (title, key, _), g in of_parameters if g is not None]


def _parameters(model: Sequential) -> Iterable[tuple[str, str, Tensor]]:
    for name, module in model.named_children():
        for key, p in module.named_parameters():
            yield f"{type(module).__name__} {name}", key, p


def first_wrong(seen: Iterable[Seen]) -> Seen | None:
    """The first that is not finite throughout; None if all are."""
    return next((one for one in seen if one.not_finite), None)
