"""Which activation, with which constants, as hashable data shared by the reference, the kernels and the rules.

| kind | f, with gate a, linear half b (`x` where there is one half) |
|---|---|
| swiglu | a·σ(a) · b |
| geglu | gelu_tanh(a) · b |
| clamped_swiglu | a'·σ(αa') · b', a' = min(a, limit), b' = clamp(b, ±limit) + offset |
| gelu, silu, relu | gelu_tanh(x), x·σ(x), max(x, 0) |
| srelu | max(x, 0)² |

Formulas in `activation_reference.activation_forward` and `activation_reference.activation_backward`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

GLU_KINDS = ("swiglu", "geglu", "clamped_swiglu")
UNARY_KINDS = ("gelu", "silu", "relu", "srelu")
KINDS = GLU_KINDS + UNARY_KINDS


@dataclass(frozen=True)
class Activation:
    """An activation function and its constants.

    kind: one of `KINDS`. limit, alpha, offset: only for `clamped_swiglu`; `limit=None` means no clamp.
    Raises ValueError for an unknown kind, a limit that is not positive, constants that are not finite, or constants
    on another kind.
    """

    kind: str
    limit: float | None = None
    alpha: float = 1.0
    offset: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"unknown activation {self.kind!r}; known are {', '.join(KINDS)}")
        if not (math.isfinite(self.alpha) and math.isfinite(self.offset)):
            raise ValueError(f"alpha and offset must be finite; got {self.alpha} and {self.offset}")
        if self.limit is not None and not self.limit > 0:
            raise ValueError(f"limit must be positive, or None for no clamp; got {self.limit}")
        if self.kind != "clamped_swiglu" and (self.limit, self.alpha, self.offset) != (None, 1.0, 0.0):
            raise ValueError(f"limit, alpha and offset belong to clamped_swiglu; got them for {self.kind}")
        object.__setattr__(self, "_hash", hash((self.kind, self.limit, self.alpha, self.offset)))

    def __hash__(self) -> int:
        """Computed once: every launch looks its plan up."""
        return self._hash  # type: ignore[attr-defined]

    @property
    def is_glu(self) -> bool:
        """Whether f takes a gate half and a linear half."""
        return self.kind in GLU_KINDS

    @property
    def halves(self) -> int:
        """Input columns for each output column: 2 for a GLU, 1 otherwise."""
        return 2 if self.is_glu else 1

    def encode(self) -> str:
        """One string that `decode` turns back, for operator schemas."""
        if self.kind != "clamped_swiglu":
            return self.kind
        return f"{self.kind}:{self.limit!r}:{self.alpha!r}:{self.offset!r}"

    @staticmethod
    @lru_cache(maxsize=256)
    def decode(text: str) -> Activation:
        """The Activation that `encode` wrote as `text`."""
        kind, *constants = text.split(":")
        if not constants:
            return Activation(kind)
        limit, alpha, offset = constants
        return Activation(kind, None if limit == "None" else float(limit), float(alpha), float(offset))
