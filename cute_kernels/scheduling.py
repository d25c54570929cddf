"""How the kernels of a layer share a device: who deals out their tiles, how many SMs they leave alone, and whether CTAs
may add up by atomics. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass

SCHEDULERS = ("static", "dynamic")


@dataclass(frozen=True)
class Sharing:
    """scheduler: "static", tiles dealt out before a kernel starts; "dynamic", taken by CTAs as they go, through a
    counter; None: as `choose_scheduler` says, and of weight gradients `choose_wgrad_scheduler`. sm_margin: SMs that
    every kernel leaves free. deterministic: the same bits run after run; False lets kernels that can sum by atomics do
    so (cuDNN Frontend's; ours have none).

    Errors: ValueError for an unknown scheduler, a negative margin; TypeError for a margin that is no int, for a
    `deterministic` that is no bool.
    """

    scheduler: str | None = None
    sm_margin: int = 0
    deterministic: bool = True

    def __post_init__(self) -> None:
        if self.scheduler is not None and self.scheduler not in SCHEDULERS:
            raise ValueError(f"scheduler must be None or one of {', '.join(SCHEDULERS)}; got {self.scheduler!r}")
        if not isinstance(self.sm_margin, int) or isinstance(self.sm_margin, bool):
            raise TypeError(f"sm_margin must be an int of at least 0; got {self.sm_margin!r}")
        if self.sm_margin < 0:
            raise ValueError(f"sm_margin must be at least 0; got {self.sm_margin}")
        if not isinstance(self.deterministic, bool):
            raise TypeError(f"deterministic must be True or False; got {self.deterministic!r}")


ALONE = Sharing()
"""Nothing runs beside."""


def choose_scheduler(asked: str | None, sm_margin: int) -> tuple[str, str]:
    """(the scheduler, why), if `asked` is what the user said."""
    if asked is not None:
        return asked, "it was asked for"
    if sm_margin > 0:
        return (
            "dynamic",
            "a margin says that something runs beside: if it takes more SMs than that, no tile waits for them",
        )
    return "static", "alone on the device neither is faster by more than 1 to 3 %, and static needs no counter"


LONG_ROWS = 8192
"""Rows from which weight gradients are dealt out as CTAs go."""


def choose_wgrad_scheduler(asked: str | None, sm_margin: int, rows: int) -> tuple[str, str]:
    """(the scheduler of weight gradients that sum over so many rows, why), if `asked` is what the user said."""
    scheduler, why = choose_scheduler(asked, sm_margin)
    if asked is None and rows >= LONG_ROWS:
        return (
            "dynamic",
            "long sums: CTAs that fall behind take fewer tiles; up to 16 % faster, with 16384 rows a group",
        )
    return scheduler, why
