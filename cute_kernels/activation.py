"""Which activation, with which constants, as hashable data shared by the reference, the kernels and the rules.

| kind | f, with gate a, linear half b (`x` where there is one half) |
|---|---|
| swiglu, glu | a·σ(a) · b, σ(a) · b |
| geglu, qgeglu | gelu_tanh(a) · b, a·σ(1.702a) · b |
| reglu, sreglu | max(a, 0) · b, max(a, 0)² · b |
| clamped_swiglu | a'·σ(αa') · b', a' = min(a, limit), b' = clamp(b, ±limit) + offset |
| situglu | β1·tanh(a/β1)·σ(a) · β2·tanh(b/β2) |
| gelu, qgelu, silu, relu | gelu_tanh(x), x·σ(1.702x), x·σ(x), max(x, 0) |
| srelu | max(x, 0)² |
| tanh_srelu | (c·tanh(max(x, 0)/c))², c = clamp_scale |

Formulas in `activation_reference.activation_forward` and `activation_reference.activation_backward`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from cute_kernels.hashing import hashed_once

GLU_KINDS = ("swiglu", "geglu", "clamped_swiglu", "glu", "qgeglu", "reglu", "sreglu", "situglu")
UNARY_KINDS = ("gelu", "silu", "relu", "srelu", "qgelu", "tanh_srelu")
KINDS = GLU_KINDS + UNARY_KINDS
CONSTANTS = {
    "clamped_swiglu": ("limit", "alpha", "offset"),
    "situglu": ("beta1", "beta2"),
    "tanh_srelu": ("clamp_scale",),
}
"""The constants of those kinds that have some."""
QUICK = 1.702
"""Of qgelu and qgeglu: x·σ(1.702x) is close to gelu(x)."""
_POSITIVE = ("beta1", "beta2", "clamp_scale")


@hashed_once
@dataclass(frozen=True)
class Activation:
    """An activation function and its constants.

    kind: one of `KINDS`. limit, alpha, offset: only for `clamped_swiglu`; `limit=None` means no clamp. beta1, beta2:
    only for `situglu`, clamp_scale: only for `tanh_srelu`; finite and positive.
    Raises ValueError for an unknown kind, a limit that is not positive, constants that are not finite, or constants
    on another kind.
    """

    kind: str
    limit: float | None = None
    alpha: float = 1.0
    offset: float = 0.0
    beta1: float | None = None
    beta2: float | None = None
    clamp_scale: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"unknown activation {self.kind!r}; known are {', '.join(KINDS)}")
        own = CONSTANTS.get(self.kind, ())
        for owner, names in CONSTANTS.items():
            defaults = [type(self).__dataclass_fields__[name].default for name in names]
            if owner != self.kind and [getattr(self, name) for name in names] != defaults:
                raise ValueError(f"{', '.join(names)} belong to {owner}; got them for {self.kind}")
        if not (math.isfinite(self.alpha) and math.isfinite(self.offset)):
            raise ValueError(f"alpha and offset must be finite; got {self.alpha} and {self.offset}")
        if self.limit is not None and not self.limit > 0:
            raise ValueError(f"limit must be positive, or None for no clamp; got {self.limit}")
        for name in own:
            value = getattr(self, name)
            if name in _POSITIVE and not (value is not None and 0 < value < math.inf):
                raise ValueError(f"{name} must be finite and positive; got {value}")

    def constants(self) -> dict[str, float | None]:
        """Every constant by name, those of other kinds included."""
        return {name: getattr(self, name) for names in CONSTANTS.values() for name in names}

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
        return ":".join([self.kind, *(repr(getattr(self, name)) for name in CONSTANTS.get(self.kind, ()))])

    @staticmethod
    @lru_cache(maxsize=256)
    def decode(text: str) -> Activation:
        """The Activation that `encode` wrote as `text`."""
        kind, *values = text.split(":")
        names = CONSTANTS.get(kind, ())
        constants = {n: None if v == "None" else float(v) for n, v in zip(names, values, strict=True)}
        return Activation(kind, **constants)  # type: ignore[arg-type]
