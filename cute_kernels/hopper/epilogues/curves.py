"""FP32 building blocks of the activations: selection that keeps NaN, a sigmoid accurate at both ends.

sigmoid(x) = 1 / (1 + 2^(-x log2 e)): two approximate instructions of relative error about 1e-7, and no cancellation,
so x·sigmoid(x) keeps its relative accuracy at very negative x, where tanh-based forms lose all of it.
"""

import cutlass.cute as cute
from cutlass import Float32
from cutlass.cutlass_dsl import select_

LOG2_E = 1.4426950408889634
GELU_LINEAR = 0.7978845608028654
"""sqrt(2/pi)"""
GELU_CUBIC = 0.044715 * GELU_LINEAR


def where(condition, yes, no):
    """`yes` or `no`, both FP32 scalars, without a branch."""
    return Float32(select_(condition, Float32(yes), Float32(no)))


def sigmoid(x):
    """1 / (1 + e^-x)."""
    return cute.arch.rcp_approx(Float32(1.0) + cute.math.exp2(x * Float32(-LOG2_E), fastmath=True))


def silu(x, alpha: float = 1.0):
    """(x·σ(αx), its derivative σ + αxσ(1 - σ))."""
    s = sigmoid(x if alpha == 1.0 else x * Float32(alpha))
    value = x * s
    scaled = value if alpha == 1.0 else value * Float32(alpha)
    return value, s + scaled * (Float32(1.0) - s)


def gelu(x):
    """(x·σ(2u), its derivative), u = x (c + 0.044715 c x²): ½x (1 + tanh u) without the cancelling sum."""
    square = x * x
    s = sigmoid(Float32(2.0) * x * (Float32(GELU_LINEAR) + Float32(GELU_CUBIC) * square))
    value = x * s
    slope = Float32(2.0 * GELU_LINEAR) + Float32(6.0 * GELU_CUBIC) * square
    return value, s + value * (Float32(1.0) - s) * slope


def relu(x):
    """(max(x, 0), its derivative)."""
    return where(x <= Float32(0.0), 0.0, x), where(x > Float32(0.0), 1.0, 0.0)
