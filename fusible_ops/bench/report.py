"""Figures of one run: as a table, as JSON, as a chart, and compared with those of another run.

Only ratios within one run are compared: the clock of a GPU moves with power and from day to day.
"""

from __future__ import annotations

import dataclasses
import html
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

OURS = "ours"


@dataclass(frozen=True)
class Row:
    """One part of one shape by one library. x_ours: its time over ours, above 1 where ours is faster."""

    shape: str
    part: str
    library: str
    ms: float
    tflops: float
    x_ours: float | None

    def __str__(self) -> str:
        ratio = "" if self.x_ours is None else f"x{self.x_ours:.3f}"
        return (
            f"{self.shape:22} {self.part:19} {self.library:22} {self.ms:9.3f} ms {self.tflops:7.0f} TFLOP/s {ratio:>8}"
        )


@dataclass(frozen=True)
class Report:
    """A run: on what, when, with which versions, and its rows."""

    gpu: str
    date: str
    versions: dict[str, str]
    rows: list[Row]

    def heading(self) -> str:
        """On what, when, with what."""
        return f"{self.gpu}, {self.date}, " + ", ".join(f"{name} {version}" for name, version in self.versions.items())

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")

    @staticmethod
    def read(path: Path) -> Report:
        """ValueError for a file that is no report."""
        try:
            found = json.loads(path.read_text())
            return Report(**{**found, "rows": [Row(**row) for row in found["rows"]]})
        except (TypeError, KeyError, ValueError) as error:
            raise ValueError(f"{path} is no report of fusible-ops bench: {error}") from error


def slower(now: Report, before: Report, tolerance: float) -> list[str]:
    """Where ours has lost more than `tolerance` (0.05: 5 %) against a peer since `before`, in words; and what of
    `before` is not in `now`.
    """
    known = {(row.shape, row.part, row.library): row for row in now.rows}
    lost = []
    for old in before.rows:
        if old.x_ours is None or old.library == OURS:
            continue
        new = known.get((old.shape, old.part, old.library))
        where = f"{old.shape} {old.part} beside {old.library}"
        if new is None or new.x_ours is None:
            lost.append(f"{where}: not in this run")
        elif new.x_ours < old.x_ours * (1 - tolerance):
            lost.append(f"{where}: x{new.x_ours:.3f}, was x{old.x_ours:.3f}")
    return lost


# ----------------------------------------------------------------------------------------------------------------------
# Chart

_WIDTH, _BAR, _GAP, _LEFT = 860, 14, 10, 250
_COLOURS = ("#2f6f4f", "#9a9a9a", "#c98b2b", "#5a7fb5", "#a05a7f")


def chart(report: Report) -> str:
    """TFLOP/s of every row as bars, one group for each part of each shape: an SVG that needs nothing else."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in report.rows:
        groups.setdefault((row.shape, row.part), []).append(row)
    libraries = list(dict.fromkeys(row.library for row in report.rows))
    colour = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(libraries)}
    most = max((row.tflops for row in report.rows), default=1.0)
    parts, y = [], 62
    for i, name in enumerate(libraries):
        x = 10 + i * 165
        parts.append(f'<rect x="{x}" y="34" width="12" height="12" fill="{colour[name]}"/>')
        parts.append(_text(x + 18, 44, name))
    for (shape, part), rows in groups.items():
        parts.append(_text(_LEFT - 8, y + len(rows) * _BAR / 2 + 4, f"{shape}  {part}", "end"))
        for row in rows:
            length = (_WIDTH - _LEFT - 90) * row.tflops / most
            parts.append(
                f'<rect x="{_LEFT}" y="{y}" width="{length:.1f}" height="{_BAR - 2}" fill="{colour[row.library]}">'
                f"<title>{html.escape(str(row))}</title></rect>"
            )
            parts.append(_text(_LEFT + length + 5, y + _BAR - 4, f"{row.tflops:.0f}"))
            y += _BAR
        y += _GAP
    heading = _text(10, 20, f"TFLOP/s, {report.gpu}, {report.date}")
    return _svg(_WIDTH, y + 10, [heading, *parts])


def _svg(width: int, height: float, parts: Iterable[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height:.0f}" font-family="sans-serif" '
        f'font-size="11" fill="#222">\n<rect width="100%" height="100%" fill="white"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'
