"""The picture of a training run."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np


def draw(folder: Path, losses: dict[str, list[float]], entropy: float, held_out: float) -> Path:
    """Write loss_curve.png: bits per byte of each step (thin) and their mean over 25 steps, one colour per run."""
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for name, values in losses.items():
        (thin,) = axes.plot(range(1, len(values) + 1), values, alpha=0.25, linewidth=0.8)
        span = min(25, len(values))
        mean = np.convolve(values, np.ones(span) / span, mode="valid")
        axes.plot(range(span, len(values) + 1), mean, color=thin.get_color(), label=f"{name}, mean of {span} steps")
    axes.axhline(entropy, color="black", linestyle="--", linewidth=1, label=f"bigram entropy, {entropy:.2f}")
    axes.axhline(held_out, color="black", linestyle=":", linewidth=1, label=f"held-out text at the end, {held_out:.2f}")
    axes.set(xlabel="step", ylabel="bits per byte", title="Byte-level mixture-of-experts language model")
    axes.set_ylim(min([held_out, *min(losses.values(), key=min)]) - 0.2, 8.2)
    axes.grid(alpha=0.3)
    axes.legend()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "loss_curve.png"
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path
