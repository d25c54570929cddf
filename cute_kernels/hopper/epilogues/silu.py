"""silu(x) = x·σ(x)."""

from cute_kernels.hopper.epilogues import curves

GATED = False


def forward(facts, x):
    return curves.silu(x)[0]


def backward(facts, x):
    return curves.silu(x)
