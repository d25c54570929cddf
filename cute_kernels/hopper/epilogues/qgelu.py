"""qgelu(x) = x·σ(1.702x)."""

from cute_kernels.activation import QUICK
from cute_kernels.hopper.epilogues.curves import silu

GATED = False


def forward(facts, x):
    return silu(x, QUICK)[0]


def backward(facts, x):
    return silu(x, QUICK)
