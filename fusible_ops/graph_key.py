"""What an op does with its parameters, in words: ops of the same key may share a graph of torch.compile."""

from __future__ import annotations

from typing import Any

import torch

OURS = frozenset(
    f"fusible_ops.{name}"
    for name in ("activations", "scaled_activations", "grouped_linear", "linear", "small_ops", "extra_tensors")
)
"""Where ops are defined whose `graph_facts` say all. A class elsewhere that inherits them may do something else."""

LAYOUT = ("single_grouped_weight", "single_grouped_bias", "transposed_weight")
"""How a grouped linear holds its parameters."""


class GraphKey:
    """graph_facts: attributes that, with the parameters, say all that the op does; None: nobody knows. graph_key: their
    values in words, kept up to date; empty where nobody knows, and of an op that is made inside a graph.
    """

    graph_facts: tuple[str, ...] | None = None
    graph_key: str = ""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if self.graph_facts is None or name not in self.graph_facts or torch.compiler.is_compiling():
            return
        if type(self).__module__ in OURS:
            facts = [f"{fact}={getattr(self, fact, None)!r}" for fact in self.graph_facts]
            self.__dict__["graph_key"] = f"{type(self).__name__}({', '.join(facts)})"
