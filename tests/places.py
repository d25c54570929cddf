"""Where a contract is tested: on a CPU and on a Hopper GPU, unfused and through the fused operations.

A test that takes the fixture `place` runs in all four (tests/conftest.py). On the CPU the fused operations run the
operators' reference. `RECIPE_PLACES` are the same under quantisation recipes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

import fusible_ops as ops
from tests.cases import Splits
from tests.models import MLP, as_if_on

HOPPER = pytest.mark.gpu("sm_90a")


@dataclass(frozen=True)
class Place:
    """Where a case runs: a device, whether the chain is fused there, and under which recipe."""

    device: str
    fused: bool
    recipe: ops.Recipe | None = None

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if self.device == "cpu" and self.fused:
                stack.enter_context(as_if_on("sm_90a"))
            stack.enter_context(ops.autocast(enabled=self.recipe is not None, recipe=self.recipe))
            yield

    @property
    def bound(self) -> float:
        """How far a gradient may be from that of the unfused ops. Those round the activation's gradient to BF16; where
        the next is E4M3, that moves some of its values by a step.
        """
        return 2.5e-2 if self.fused and self.recipe is not None else 1e-2

    def options(self) -> dict[str, object]:
        """Arguments of `Sequential` that make it fused, all of it, or unfused."""
        if not self.fused:
            return {"rules": ()}
        return {"on_unfused": "error"}

    def build(self, mlp: MLP, splits: Splits, dtype: torch.dtype = torch.bfloat16, **kwargs: object) -> ops.Sequential:
        return mlp.build(splits, self.device, dtype, **self.options(), **kwargs)


PLACES = [
    pytest.param(Place("cpu", False), id="cpu"),
    pytest.param(Place("cpu", True), id="cpu-fused"),
    pytest.param(Place("cuda", False), id="cuda", marks=HOPPER),
    pytest.param(Place("cuda", True), id="cuda-fused", marks=HOPPER),
]
BLOCK, CURRENT = ops.Float8BlockScaling(), ops.Float8CurrentScaling()
RECIPE_PLACES = [
    pytest.param(Place("cpu", False, BLOCK), id="cpu-block"),
    pytest.param(Place("cpu", True, BLOCK), id="cpu-block-fused"),
    pytest.param(Place("cpu", False, CURRENT), id="cpu-current"),
    pytest.param(Place("cuda", False, BLOCK), id="cuda-block", marks=HOPPER),
    pytest.param(Place("cuda", True, BLOCK), id="cuda-block-fused", marks=HOPPER),
]
