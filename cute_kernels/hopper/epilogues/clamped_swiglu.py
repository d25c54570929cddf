"""clamped_swiglu(gate, up) = g·σ(αg)·(u + offset), g = min(gate, limit), u = clamp(up, ±limit); limit None: no clamp.

Slopes are zero where the clamp holds the input (the limit itself passes).
"""

from cutlass import Float32

from cute_kernels.hopper.epilogues.curves import silu, where

GATED = True


def clamped(facts, gate, up):
    """(min(gate, limit), clamp(up, ±limit) + offset)."""
    if facts.limit is not None:
        high, low = Float32(facts.limit), Float32(-facts.limit)
        gate = where(gate > high, high, gate)
        up = where(up > high, high, where(up < low, low, up))
    return gate, up + Float32(facts.offset)


def forward(facts, gate, up):
    gate, up = clamped(facts, gate, up)
    return silu(gate, facts.alpha)[0] * up


def backward(facts, gate, up):
    held_gate, held_up = clamped(facts, gate, up)
    value, slope = silu(held_gate, facts.alpha)
    gate_slope, up_slope = slope * held_up, value
    if facts.limit is not None:
        high, low = Float32(facts.limit), Float32(-facts.limit)
        gate_slope = where(gate > high, 0.0, gate_slope)
        up_slope = where(up > high, 0.0, where(up < low, 0.0, up_slope))
    return value * held_up, gate_slope, up_slope
