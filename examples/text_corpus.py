"""Real text as bytes: the Python standard library's source files, or a file of your own; and what a bigram model knows.

The text is split into training and held-out bytes. Of the standard library every 24th file is held out, of a single
file its last twentieth; of the held-out bytes at most 256 KiB are kept.
"""

from __future__ import annotations

import math
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

SKIPPED = {
    "test",
    "tests",
    "idle_test",
    "idlelib",
    "lib2to3",
    "site-packages",
    "dist-packages",
    "encodings",
    "pydoc_data",
}
HOLD_OUT_EVERY = 24
HELD_OUT_BYTES = 256 * 1024


@dataclass(frozen=True)
class Corpus:
    """Bytes as uint8 tensors, and in words where they come from."""

    train: Tensor
    held_out: Tensor
    source: str


def load(file: Path | None) -> Corpus:
    """The corpus of `file`, or of the standard library. `SystemExit` if there is too little text."""
    if file is not None:
        text = file.read_bytes()
        cut = len(text) - len(text) // 20
        train, held_out, source = text[:cut], text[cut:], str(file)
    else:
        root = Path(sysconfig.get_path("stdlib"))
        files = sorted(path for path in root.rglob("*.py") if not SKIPPED & set(path.relative_to(root).parts))
        texts = [path.read_bytes() for path in files]
        held_out = b"".join(texts[HOLD_OUT_EVERY - 1 :: HOLD_OUT_EVERY])
        train = b"".join(text for i, text in enumerate(texts) if i % HOLD_OUT_EVERY != HOLD_OUT_EVERY - 1)
        source = f"the Python standard library, {len(files)} files"
    if len(held_out) < 2048:
        raise SystemExit(f"{source}: {len(train) + len(held_out)} bytes are too few to train on; 40 KiB is the least")
    return Corpus(_tensor(train), _tensor(held_out[:HELD_OUT_BYTES]), source)


def bigram_entropy(text: Tensor) -> float:
    """H(X_t | X_t-1) in bits, of the byte pairs counted in this text: no table of pairs predicts this text better."""
    pairs = text[:-1].long() * 256 + text[1:].long()
    joint = torch.bincount(pairs, minlength=256 * 256).double().view(256, 256) / pairs.numel()
    return _entropy(joint) - _entropy(joint.sum(dim=1))


def _entropy(p: Tensor) -> float:
    return -torch.special.xlogy(p, p).sum().item() / math.log(2)


def _tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)
