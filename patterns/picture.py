"""page(data) -> HTML: chains as boxes, fused regions around them, their launches, what is kept; no script, no links."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Data = Mapping[str, Any]

STYLE = """
body{font:14px/1.45 system-ui,sans-serif;color:#1d2329;margin:2em auto;max-width:1060px;padding:0 1em}
h1{font-size:1.3em} h2{font-size:1.05em;margin:2em 0 .6em} h2.run{border-top:1px solid #c5cbd0;padding-top:1em}
.chain{display:flex;flex-wrap:wrap;align-items:stretch;gap:26px}
.chain>*{position:relative;border:2px solid #8a949c;border-radius:10px;padding:26px 12px 10px;display:flex;gap:14px}
.chain>.fused{border-color:#2f6f4f;background:#e9f4ee} .chain>.unfused{border:2px dashed #b07a1c;background:#fdf5e6}
.rule{position:absolute;top:4px;left:12px;font-size:12px;font-weight:600;color:#2f6f4f} .unfused>.rule{color:#8f5f0c}
.op{background:#fff;border:1px solid #8a949c;border-radius:6px;padding:8px 12px;white-space:nowrap}
.chain>*:not(:last-child):after{content:"\\2192";position:absolute;right:-22px;top:42%}
.why{display:none;position:fixed;z-index:2;bottom:16px;left:16px;right:16px;background:#1d2329;color:#fff;
padding:8px 12px;border-radius:6px;font:12px/1.5 ui-monospace,monospace;white-space:pre-wrap;box-shadow:0 2px 8px #0006}
.chain>*:hover>.why,.chain>*:focus>.why{display:block}
table{border-collapse:collapse;margin:.4em 0 1em;font-variant-numeric:tabular-nums}
th{font-weight:600;text-align:left;border-bottom:1px solid #8a949c} td,th{padding:2px 14px 2px 0;white-space:nowrap}
td.n,th.n{text-align:right} td.bar{width:220px} .bar i{display:block;height:11px;border-radius:2px;background:#2f6f4f}
.bar i.memory{background:#5a7fb5} .dim{color:#66707a} .raises{color:#a02c2c}
"""


def page(runs: Sequence[Data]) -> str:
    """One page for the runs of a Sequential, as `fusible_ops.picture.as_data` gives them."""
    first = next((run for run in runs if "steps" in run), None)
    heading = "no ops" if first is None else (
        f"{first['target']}{' (' + first['machine'] + ')' if first['machine'] else ''}, {first['dtype']}, "
        f"{first['recipe'] or 'no recipe'}, {first['rows']:,} rows"
    )  # fmt: skip
    body = [f"<h1>{_text(heading)}</h1>", '<div class="chain">', *map(_boxes, runs), "</div>"]
    planned = [run for run in runs if "steps" in run]
    for run in planned:
        name = f'<h2 class="run">{_text(" -> ".join(run["titles"]))}</h2>' if len(planned) > 1 else ""
        body += [name, *(f'<p class="raises">raises in {_text(error)}</p>' for error in run["raises"])]
        body += [_launches(run), _kept(run)]
    head = f'<meta charset="utf-8"><title>{_text(heading)}</title><style>{STYLE}</style>'
    return f"<!doctype html><html lang=en><head>{head}</head><body>\n" + "\n".join(body) + "\n</body></html>\n"


def _boxes(run: Data) -> str:
    if "steps" not in run:
        return f'<div><div class="op">{_text(run["module"])}</div></div>'
    parts = []
    for step, why in zip(run["steps"], run["why_not"], strict=True):
        ops = "".join(f'<div class="op">{_text(title)}</div>' for title in run["titles"][step["start"] : step["stop"]])
        rule = step["rule"] or "unfused"
        hint = f'<div class="why">{_text(chr(10).join(why))}</div>' if why and not step["rule"] else ""
        kind = "fused" if step["rule"] else "unfused"
        parts.append(f'<div class="{kind}" tabindex="0"><span class="rule">{_text(rule)}</span>{ops}{hint}</div>')
    return "".join(parts)


def _launches(run: Data) -> str:
    rows = [launch for step in run["launches"] for launch in step]
    if not rows:
        return "<p>No kernel of ours runs here. Rest the pointer on a box to see why.</p>"
    longest = max((launch["seconds"] or 0.0 for launch in rows), default=0.0) or 1.0
    parts = []
    for name, backward in (("forward", False), ("backward", True)):
        some = [launch for launch in rows if launch["backward"] is backward]
        times = [launch["seconds"] for launch in some]
        total = None if None in times else sum(times)
        parts.append(f"<h2>{name}: {len(some)} launches, by the machine's limits at least {_time(total)}</h2>")
        parts.append(
            _table(
                ("kernel", "for", ".operations", ".bytes", ".at least", "", "bound by"),
                (
                    (
                        launch["kernel"],
                        launch["use"],
                        _number(launch["flops"], "FLOP", 1000.0),
                        _number(launch["bytes"], "B", 1024.0),
                        _time(launch["seconds"]),
                        _bar((launch["seconds"] or 0.0) / longest, launch["binds"]),
                        launch["binds"],
                    )
                    for launch in some
                ),
            )
        )
    return "\n".join(parts)


def _kept(run: Data) -> str:
    kept = run["kept"]
    if kept is None:
        why = "not known: an op here needs values, or its own machine, to run"
        return f'<h2>kept for backward</h2><p class="dim">{why}</p>'
    total = sum(one["bytes"] for one in kept)
    rows = ((one["what"], " x ".join(map(str, one["shape"])), one["dtype"], _number(one["bytes"], "B", 1024.0))
            for one in sorted(kept, key=lambda one: -one["bytes"]))  # fmt: skip
    heading = f"<h2>kept for backward, beside parameters: {_number(total, 'B', 1024.0)}</h2>"
    return heading + _table(("what", "shape", "dtype", ".bytes"), rows)


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns that start with a dot hold numbers; an entry that starts with "<" is markup."""
    numeric = [column.startswith(".") for column in columns]
    kinds = [' class="n"' if is_number else ' class="bar"' if not name else ""
             for name, is_number in zip(columns, numeric, strict=True)]  # fmt: skip
    cells = "".join(f"<th{kind}>{_text(name.lstrip('.'))}</th>" for name, kind in zip(columns, kinds, strict=True))
    lines = [f"<tr>{cells}</tr>"]
    for row in rows:
        entries = (entry if entry.startswith("<i ") else _text(entry) for entry in row)
        cells = "".join(f"<td{kind}>{entry}</td>" for entry, kind in zip(entries, kinds, strict=True))
        lines.append(f"<tr>{cells}</tr>")
    return "<table>" + "".join(lines) + "</table>"


def _bar(share: float, binds: str) -> str:
    return f'<i class="{binds}" style="width:{100 * share:.1f}%"></i>'


def _number(value: float | None, unit: str, step: float) -> str:
    """ "412 GFLOP", "1.3 GiB"."""
    if not value:
        return "not known" if value is None else ""
    infix = "i" if step == 1024.0 else ""
    for prefix in ("", "K", "M", "G", "T"):
        if value < step or prefix == "T":
            break
        value /= step
    shown = f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.1f}"
    return f"{shown} {prefix}{infix if prefix else ''}{unit}"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "unknown"
    return f"{seconds * 1e3:.3f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"


def _text(text: str) -> str:
    return html.escape(text)
