"""Charts of a run as SVG files, drawn without any library."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from silva.monitoring.report import charts
from silva.ports import FILES

WIDTH, HEIGHT = 720, 300
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 40, 40
LOOK = (resources.files("silva.monitoring") / "template" / "look.css").read_text("utf-8")
COLOURS = re.findall(r"--s\d: light-dark\((#[0-9a-f]{6})", LOOK)


def write_plots(folder: Path, rows: Sequence[Mapping[str, Any]]) -> list[Path]:
    """One file for each chart of the report that has values. Raises OSError if they cannot be written."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for chart in charts(rows):
        if not chart["more"]:
            path = folder / f"{re.sub(r'[^a-z0-9]+', '_', chart['title'].lower()).strip('_')}.svg"
            FILES.write_atomic(path, svg(chart["title"], chart["series"]).encode())
            written.append(path)
    return written


def svg(title: str, series: Sequence[Mapping[str, Any]]) -> str:
    """Lines over steps; an interval, where there is one, is a shade behind its line."""
    xs = [x for each in series for x in each["x"]]
    ys = [y for each in series for name in ("y", "low", "high") for y in each.get(name, ()) if y is not None]
    across = _scale(min(xs), max(xs), LEFT, WIDTH - RIGHT)
    up = _scale(min(ys), max(ys), HEIGHT - BOTTOM, TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="12"><rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="18" font-size="14" font-weight="bold">{html.escape(title)}</text>',
    ]
    for value in ticks(min(ys), max(ys)):
        y = up(value)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.4g}</text>')
    for value in ticks(min(xs), max(xs)):
        if value == int(value):
            x, y = across(value), HEIGHT - BOTTOM + 18
            parts.append(f'<text x="{x:.1f}" y="{y}" text-anchor="middle">{value:.0f}</text>')
    for index, each in enumerate(series):
        colour = COLOURS[index % len(COLOURS)]
        points = [(across(x), up(y)) for x, y in zip(each["x"], each["y"], strict=True)]
        if "low" in each:
            ends = [(across(x), up(low), up(high)) for x, low, high
                    in zip(each["x"], each["low"], each["high"], strict=True) if low is not None]  # fmt: skip
            outline = [(x, low) for x, low, _ in ends] + [(x, high) for x, _, high in reversed(ends)]
            parts.append(f'<polygon points="{_points(outline)}" fill="{colour}" opacity="0.15"/>')
        parts.append(f'<polyline points="{_points(points)}" fill="none" stroke="{colour}" stroke-width="2"/>')
        if len(points) == 1:
            parts.append(f'<circle cx="{points[0][0]:.1f}" cy="{points[0][1]:.1f}" r="3" fill="{colour}"/>')
        name = html.escape(str(each["name"]))
        x = LEFT + 130 * (index % 5)
        parts.append(f'<text x="{x}" y="{32 + 12 * (index // 5)}" fill="{colour}">{name[:20]}</text>')
    return "".join([*parts, "</svg>\n"])


def ticks(low: float, high: float) -> list[float]:
    """Three to six round values from `low` to `high`."""
    if low == high:
        return [low]
    size = 10 ** math.floor(math.log10(high - low))
    step = next(s for s in (size * 2, size, size / 2, size / 5) if (high - low) / s >= 3 or s == size / 5)
    return [n * step for n in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _scale(low: float, high: float, start: float, end: float) -> Any:
    wide = (high - low) or 1.0
    return lambda value: start + (end - start) * (value - low) / wide


def _points(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
