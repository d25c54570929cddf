"""cuDNN Frontend's operation classes as their documentation and sources describe them, in PyTorch, on the CPU.

A double for tests of the adapters: what is called even and odd, alpha and alpha squared, what prob multiplies. It
shares no formula with `cute_kernels`. Whether the real kernels compute this, only a Blackwell can show (tests/gpu).
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

MARGIN = "CUDNNFE_CLUSTER_OVERLAP_MARGIN"
BLOCK = 32


class Operation:
    """What the classes have in common. `made` are those that exist, in order; `calls` counts executions."""

    made: ClassVar[list[Operation]] = []

    def __init__(self, **arguments: Any) -> None:
        self.samples = {n.removeprefix("sample_"): v for n, v in arguments.items() if n.startswith("sample_")}
        self.settings = {n: v for n, v in arguments.items() if not n.startswith("sample_")}
        self.margin, self.checked, self.compiled, self.calls = os.environ.get(MARGIN), False, False, 0
        self.made.append(self)

    def check_support(self) -> bool:
        self.checked = True
        return True

    def compile(self) -> None:
        assert self.checked and os.environ.get(MARGIN) == self.margin
        self.compiled = True

    def execute(self, **arguments: Any) -> None:
        assert self.compiled
        self.calls += 1
        given = {name.removesuffix("_tensor"): value for name, value in arguments.items()}
        for name, sample in self.samples.items():
            assert (sample is None) == (given.get(name) is None), name
        for name, value in given.items():
            if isinstance(value, Tensor):
                assert value.data_ptr() % 16 == 0, name
        self.compute(SimpleNamespace(**given))

    def compute(self, given: Any) -> None:
        raise NotImplementedError

    def b(self, given: Any) -> Tensor:
        """The weight as [E, n, k] in FP32."""
        data = given.b.float()
        return data.mT if self.settings.get("b_major") == "n" else data

    def products(self, a: Tensor, b: Tensor, given: Any) -> tuple[Tensor, Tensor]:
        """(acc [M, n], the group of each row); rows past the last end are NaN."""
        ends = given.padded_offsets.tolist()
        assert all(end % 256 == 0 for end in ends) and ends == sorted(ends)
        acc, group = torch.full((a.shape[0], b.shape[1]), float("nan")), torch.zeros(a.shape[0], dtype=torch.int64)
        for g, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            acc[start:end] = a[start:end].float() @ b[g].T
            group[start:end] = g
        return acc, group


def halves(t: Tensor) -> tuple[Tensor, Tensor]:
    """(even blocks of 32 columns: gate, odd blocks: up)."""
    blocks = t.view(t.shape[0], -1, 2, BLOCK)
    return blocks[:, :, 0].flatten(1), blocks[:, :, 1].flatten(1)


def woven(gate: Tensor, up: Tensor) -> Tensor:
    return torch.stack([gate.unflatten(1, (-1, BLOCK)), up.unflatten(1, (-1, BLOCK))], 2).flatten(1)


def glu_value(gate: Tensor, up: Tensor, act: str, offset: float, alpha: float, high: float, low: float) -> Tensor:
    if act == "geglu":
        gate, up = gate.clamp(max=high), up.clamp(low, high) + offset
        return up * gate * torch.sigmoid(alpha * gate)
    return up * gate * torch.sigmoid(gate)


class GroupedGemmSm100(Operation):
    def compute(self, given: Any) -> None:
        acc, group = self.products(given.a, self.b(given), given)
        acc, prob = acc * given.alpha[group, None], given.prob[:, None]
        given.d.copy_(acc * prob if given.bias is None else acc + given.bias.T[group].float() * prob)


class GroupedGemmGluSm100(Operation):
    def compute(self, given: Any) -> None:
        acc, group = self.products(given.a, self.b(given), given)
        acc = acc * given.alpha[group, None]
        if given.bias is not None:
            acc = acc + given.bias.T[group].float()
        given.c.copy_(acc)
        clamp = (1.702, 7.0, -7.0)  # BF16 forbids others
        assert (getattr(given, "geglu_alpha", 1.702), getattr(given, "glu_clamp_max", 7.0)) == clamp[:2]
        value = glu_value(*halves(acc), self.settings["act_func"], given.linear_offset, *clamp)
        given.d.copy_(value * given.prob[:, None])


class GroupedGemmDgluSm100(Operation):
    def scratch_workspace_bytes(self) -> int:
        return 128

    def compute(self, given: Any) -> None:
        assert given.workspace.numel() >= 128 and not given.dprob.any()
        acc, group = self.products(given.a, self.b(given), given)
        grad = acc * given.alpha[group, None] ** 2
        with torch.enable_grad():
            gate, up = (t.float().requires_grad_() for t in halves(given.c.float() * given.beta[group, None]))
            s = self.settings
            constants = (s.get("geglu_alpha"), s.get("glu_clamp_max"), s.get("glu_clamp_min"))
            value = glu_value(gate, up, s["act_func"].removeprefix("d"), s["linear_offset"], *constants)
            dgate, dup = torch.autograd.grad(value, (gate, up), grad * given.prob[:, None])
        given.d_row.copy_(woven(dgate, dup))
        given.dprob += (grad * value.detach()).sum(1)


class GroupedGemmWgradSm100(Operation):
    def compute(self, given: Any) -> None:
        ends = given.offsets.tolist()
        assert ends[-1] == given.b.shape[0]
        for g, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            product = given.a[:, start:end].float() @ given.b[start:end].float()
            given.wgrad[g].copy_(product + (given.wgrad[g].float() if self.settings["accumulate_on_output"] else 0))
