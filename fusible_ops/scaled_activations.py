"""The scaled activations: each row of the result times its router probability. Formulas: `activations.py`.

`activation_recompute_in_mlp` is Transformer Engine's: the gated ones refuse it, the others take it without an effect,
since fused chains always recompute the activation. The gated ones have the attribute too, always False.
"""

from __future__ import annotations

import math

from cute_kernels.activation import Activation
from fusible_ops.activations import ClampedSwiGLU, ScaledActivation, clamped


def _refuse_recompute(owner: str, activation_recompute_in_mlp: bool) -> None:
    if activation_recompute_in_mlp:
        raise ValueError(f"{owner} does not support activation recomputation (activation_recompute_in_mlp=True)")


class ScaledSwiGLU(ScaledActivation):
    """y = a·σ(a)·b·s. See `ScaledActivation`; glu_interleave_size as `SwiGLU`'s."""

    def __init__(self, glu_interleave_size: int | None = None, *, activation_recompute_in_mlp: bool = False) -> None:
        _refuse_recompute("ScaledSwiGLU", activation_recompute_in_mlp)
        super().__init__(Activation("swiglu"), glu_interleave_size=glu_interleave_size)


class ScaledGeGLU(ScaledActivation):
    """y = gelu_tanh(a)·b·s. See `ScaledActivation`; glu_interleave_size as `SwiGLU`'s."""

    def __init__(self, glu_interleave_size: int | None = None, *, activation_recompute_in_mlp: bool = False) -> None:
        _refuse_recompute("ScaledGeGLU", activation_recompute_in_mlp)
        super().__init__(Activation("geglu"), glu_interleave_size=glu_interleave_size)


class ScaledSiTUGLU(ScaledActivation):
    """y = SiTUGLU(x)·s. See `ScaledActivation` and `SiTUGLU`; glu_interleave_size as `SwiGLU`'s."""

    def __init__(
        self,
        glu_interleave_size: int | None = None,
        *,
        activation_recompute_in_mlp: bool = False,
        beta1: float = 4.0,
        beta2: float = 25.0,
    ) -> None:
        _refuse_recompute("ScaledSiTUGLU", activation_recompute_in_mlp)
        activation = Activation("situglu", beta1=float(beta1), beta2=float(beta2))
        super().__init__(activation, glu_interleave_size=glu_interleave_size)


class ScaledClampedQGeGLU(ScaledActivation):
    """y = ClampedSwiGLU(x)·s. See `ScaledActivation` and `ClampedSwiGLU`.

    The child `_clamped` holds no parameters; it is there for its state_dict key, which Transformer Engine's op has.
    """

    def __init__(
        self,
        glu_interleave_size: int | None = None,
        *,
        activation_recompute_in_mlp: bool = False,
        limit: float | None = 7.0,
        alpha: float = 1.702,
        glu_linear_offset: float = 1.0,
    ) -> None:
        _refuse_recompute("ScaledClampedQGeGLU", activation_recompute_in_mlp)
        super().__init__(clamped(limit, alpha, glu_linear_offset), glu_interleave_size=glu_interleave_size)
        self._clamped = ClampedSwiGLU(limit=limit, alpha=alpha, glu_linear_offset=glu_linear_offset)


class ScaledSReLU(ScaledActivation):
    """y = max(x, 0)²·s. See `ScaledActivation`."""

    def __init__(self, *, activation_recompute_in_mlp: bool = False) -> None:
        super().__init__(Activation("srelu"))
        self.activation_recompute_in_mlp = activation_recompute_in_mlp


class ScaledTanhSReLU(ScaledActivation):
    """y = (c·tanh(max(x, 0)/c))²·s, c = tanh_clamp_scale. See `ScaledActivation`.

    Errors: ValueError for a tanh_clamp_scale that is not finite and positive.
    """

    def __init__(self, *, tanh_clamp_scale: float, activation_recompute_in_mlp: bool = False) -> None:
        if not 0 < tanh_clamp_scale < math.inf:
            raise ValueError(f"ScaledTanhSReLU: tanh_clamp_scale must be finite and positive, got {tanh_clamp_scale}")
        super().__init__(Activation("tanh_srelu", clamp_scale=float(tanh_clamp_scale)))
        self.tanh_clamp_scale = float(tanh_clamp_scale)
        self.activation_recompute_in_mlp = activation_recompute_in_mlp
