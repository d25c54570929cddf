"""gelu(x) = ½x (1 + tanh(√(2/π) (x + 0.044715 x³)))."""

from cute_kernels.hopper.epilogues import curves

GATED = False


def forward(facts, x):
    return curves.gelu(x)[0]


def backward(facts, x):
    return curves.gelu(x)
