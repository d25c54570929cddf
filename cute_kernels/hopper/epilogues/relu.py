"""relu(x) = max(x, 0)."""

from cute_kernels.hopper.epilogues import curves

GATED = False


def forward(facts, x):
    return curves.relu(x)[0]


def backward(facts, x):
    return curves.relu(x)
