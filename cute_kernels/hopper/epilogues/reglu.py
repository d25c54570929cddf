"""reglu(gate, up) = max(gate, 0)·up."""

from cute_kernels.hopper.epilogues.curves import relu

GATED = True


def forward(facts, gate, up):
    return relu(gate)[0] * up


def backward(facts, gate, up):
    value, slope = relu(gate)
    return value * up, slope * up, value
