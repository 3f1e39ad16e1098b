"""report.html: curves and samples of a run in one file that needs no network."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 68rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
pre { background: #f6f6f4; padding: .8rem 1rem; overflow-x: auto; border-radius: 6px; }
.curves { display: grid; grid-template-columns: repeat(auto-fill, minmax(19rem, 1fr)); gap: 1rem; }
figure { margin: 0; border: 1px solid #e4e4e0; border-radius: 6px; padding: .6rem; }
figcaption { font-size: .85rem; display: flex; justify-content: space-between; }
svg { width: 100%; height: 8rem; display: block; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
td, th { border-bottom: 1px solid #e4e4e0; padding: .3rem .5rem; text-align: left; vertical-align: top; }
td { white-space: pre-wrap; overflow-wrap: anywhere; }
"""
_FIRST = (
    "reward",
    "eval/",
    "reverse_kl",
    "loss",
    "nll",
    "validation/loss",
    "validation/perplexity",
    "entropy",
    "response_tokens",
    "truncated",
)


def write_report(
    path: Path, *, title: str, metrics: Sequence[Mapping[str, float]], objective: str, rollouts: Path | None
) -> None:
    """Write the page: the objective, one curve per metric, and samples of the last step."""
    write_page(path, title, objective, curves("Curves", metrics, _names(metrics)), _samples(rollouts))


def write_page(path: Path, title: str, text: str, *sections: str) -> None:
    """Write a page of its own: a title, a text as it stands, and sections that are HTML already."""
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body><h1>{html.escape(title)}</h1>",
        f"<pre>{html.escape(text.strip())}</pre>",
        *sections,
        "</body></html>",
    ]
    path.write_text("\n".join(parts), encoding="utf-8")


def curves(heading: str, rows: Sequence[Mapping[str, float]], names: Sequence[str], *, across: str = "step") -> str:
    """A section with one curve for each name, over the column `across`."""
    drawn = "\n".join(_curve(name, rows, across) for name in names)
    return f"<h2>{html.escape(heading)}</h2><div class='curves'>\n{drawn}\n</div>"


def _names(metrics: Sequence[Mapping[str, float]]) -> list[str]:
    """Metrics in the order in which people look at them."""
    found = dict.fromkeys(name for row in metrics for name in row if name != "step")
    shown = [n for n in found if not n.endswith(("_reward_low", "_reward_high"))]  # the band of another curve
    ordered = [n for first in _FIRST for n in shown if n == first or (first.endswith("/") and n.startswith(first))]
    return ordered + sorted(n for n in shown if n not in ordered)


def _curve(name: str, metrics: Sequence[Mapping[str, float]], across: str) -> str:
    rows = [row for row in metrics if name in row and math.isfinite(row[name])]
    if not rows:
        return ""
    steps, values = [row[across] for row in rows], [row[name] for row in rows]
    lows, highs = zip(*(_band(row, name) for row in rows), strict=True)
    low, high = min(lows), max(highs)
    width, height = max(steps[-1] - steps[0], 1), (high - low) or 1.0

    def places_of(values: Sequence[float]) -> list[tuple[float, float]]:
        xs = (300 * (step - steps[0]) / width for step in steps)
        return [(x, 96 - 92 * (v - low) / height) for x, v in zip(xs, values, strict=True)]

    places, path = places_of(values), _path(places_of(values))
    area = _path(places_of(lows) + places_of(highs)[::-1]) if lows != highs else ""
    band = f"<polygon points='{area}' fill='#b4552d' fill-opacity='.15'/>" if area else ""
    dots = (
        "".join(f"<circle cx='{x:.1f}' cy='{y:.1f}' r='2' fill='#b4552d'/>" for x, y in places)
        if len(places) < 40
        else ""
    )
    ends = f"{html.escape(across)}s {steps[0]:g}&ndash;{steps[-1]:g}"
    return (
        f"<figure><figcaption><b>{html.escape(name)}</b><span>{values[0]:.4g} &rarr; {values[-1]:.4g}</span></figcaption>"
        f"<svg viewBox='0 0 300 100' preserveAspectRatio='none'>{band}<polyline points='{path}' fill='none' stroke='#b4552d' "
        f"stroke-width='1.5' vector-effect='non-scaling-stroke'/>{dots}</svg>"
        f"<figcaption><span>{ends}</span><span>{low:.4g} &hellip; {high:.4g}</span>"
        "</figcaption></figure>"
    )


def _path(places: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)


def _band(row: Mapping[str, float], name: str) -> tuple[float, float]:
    """The 95 % interval of a value, where the row has one that is finite; else the value itself."""
    ends = (row.get(f"{name}_low", math.nan), row.get(f"{name}_high", math.nan))
    return ends if all(map(math.isfinite, ends)) else (row[name], row[name])


def _samples(rollouts: Path | None, count: int = 12) -> str:
    files = sorted(rollouts.glob("step_*.jsonl")) if rollouts is not None else []
    if not files:
        return ""
    rows = [json.loads(line) for line in files[-1].read_text(encoding="utf-8").splitlines()[:count]]
    cells = "".join(
        f"<tr><td>{html.escape(str(r['prompt']))}</td><td>{html.escape(str(r['response']))}</td>"
        f"<td>{html.escape(str(r['label']))}</td><td>{html.escape(str(r['reward']))}</td><td>{html.escape(r['finish_reason'])}</td></tr>"
        for r in rows
    )
    head = "<tr><th>prompt</th><th>response</th><th>label</th><th>reward</th><th>end</th></tr>"
    return f"<h2>Samples of {html.escape(files[-1].stem.replace('_', ' '))}</h2><table>{head}{cells}</table>"
