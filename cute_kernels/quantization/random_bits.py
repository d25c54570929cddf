"""Counter-based random bits: Philox 4x32 with 7 rounds, in plain PyTorch, the same on CPU and CUDA.

A bit depends on the state (a seed and an offset on the device) and on where it is used, on nothing else. So the same
state repeats the same bits, as a recomputed forward or backward needs it, whatever the launch, order or machine.

Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (SC 2011), by whom 7 rounds are the fewest that pass
BigCrush; checked against Random123's known answers.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDS = 7
_WORD = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)


def random_state(device: torch.device | str = "cpu", generator: torch.Generator | None = None) -> Tensor:
    """A fresh int64 [2] = (seed, offset) on `device`, drawn from `generator` or torch's own. No host sync.

    Drawn inside a CUDA graph, it is fresh at every replay. Keep it and pass it again to repeat the bits.
    """
    return torch.randint(0, 2**62, (2,), dtype=torch.int64, device=device, generator=generator)


def _multiply(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """(high, low) words of the 64-bit product of two 32-bit numbers, without overflow in int64."""
    upper, lower = a * (b >> 16), a * (b & 0xFFFF)
    middle = upper + (lower >> 16)
    return middle >> 16, ((middle & 0xFFFF) << 16) | (lower & 0xFFFF)


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Philox4x32-7: four 32-bit counter words and two key words -> four random words. All int64 in [0, 2^32),
    broadcast against each other.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        high0, low0 = _multiply(MULTIPLIERS[0], c0)
        high1, low1 = _multiply(MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + WEYL[0]) & _WORD, (k1 + WEYL[1]) & _WORD
    return c0, c1, c2, c3


def random_bytes(blocks: int, state: Tensor, stream: int = 0) -> Tensor:
    """uint8 [blocks, 16]: sixteen random bytes for each block of sixteen values. No host sync.

    Key: the two words of state[0] (seed). Counter: block (low word), block (high word) + stream · 2^31, the two words
    of state[1] (offset), low words first. Byte j of a block is byte j % 4, least significant first, of word j // 4.

    state: int64 [2], as `random_state` gives it. stream: 0 or 1, for two independent uses of one state.
    """
    if stream not in (0, 1):
        raise ValueError(f"stream is {stream!r}, needs 0 or 1")
    block = torch.arange(blocks, dtype=torch.int64, device=state.device)
    words = state & _WORD, (state >> 32) & _WORD
    counter = (block & _WORD, (block >> 32) + (stream << 31), words[0][1], words[1][1])
    drawn = torch.stack(philox(counter, (words[0][0], words[1][0])), -1)
    shifts = torch.arange(0, 32, 8, dtype=torch.int64, device=state.device)
    return ((drawn.unsqueeze(-1) >> shifts) & 0xFF).to(torch.uint8).flatten(-2)
