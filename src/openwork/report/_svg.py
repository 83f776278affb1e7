"""Small charts as inline SVG; colours come from the page's style sheet through classes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

__all__ = ["bars", "budget_chart", "sparkline", "ticks"]

Point = tuple[float, float]


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers (1, 2, 2.5, 5 times a power of ten) that cover low to high, about `count` of them."""
    if high <= low:
        return [low]
    raw = (high - low) / max(1, count - 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def _path(points: Sequence[Point]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def budget_chart(curve: Sequence[Point], chosen: Point, target: float, width: int = 1060, height: int = 320) -> str:
    """Loss (percent of everything) against compression, with the target line and the chosen point."""
    left, right, top, bottom = 64, 24, 26, 46
    high_x = max(curve[-1][0], chosen[0]) * 1.02
    high_y = max(curve[-1][1], chosen[1], 1e-12) * 1.08

    def place(point: Point) -> Point:
        x = left + (point[0] - 1) / max(high_x - 1, 1e-12) * (width - left - right)
        return x, height - bottom - point[1] / high_y * (height - top - bottom)

    parts = [f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="Sensitivity removed against budget">']
    for value in ticks(0, high_y):
        y = place((1, value))[1]
        parts.append(f'<line class="grid" x1="{left}" x2="{width - right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{value:g}%</text>')
    for value in ticks(1, high_x, 8):
        x = place((value, 0))[0]
        parts.append(
            f'<text class="tick" x="{x:.1f}" y="{height - bottom + 18}" text-anchor="middle">{value:g}x</text>'
        )
    placed = [place(point) for point in curve]
    base = height - bottom
    area = f"{_path(placed)}L{placed[-1][0]:.1f} {base}L{placed[0][0]:.1f} {base}Z"
    parts.append(f'<path class="area" d="{area}"/><path class="line" d="{_path(placed)}"/>')
    x, y = place(chosen)
    aim = place((target, 0))[0]
    parts.append(f'<line class="target" x1="{aim:.1f}" x2="{aim:.1f}" y1="{top - 8}" y2="{base}"/>')
    parts.append(f'<text class="note" x="{aim - 6:.1f}" y="{top + 2}" text-anchor="end">target {target:g}x</text>')
    parts.append(f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="6"/>')
    beside = x < width * 0.75
    parts.append(
        f'<text class="label" x="{x + (12 if beside else -12):.1f}" y="{y - 10 if not beside else y + 18:.1f}" '
        f'text-anchor="{"start" if beside else "end"}">{chosen[0]:.3f}x, {chosen[1]:.2g}% removed</text>'
    )
    middle = left + (width - left - right) / 2
    parts.append(
        f'<text class="axis" x="{middle:.0f}" y="{height - 6}" text-anchor="middle">'
        "compression (cost before / after)</text></svg>"
    )
    return "".join(parts)


def bars(rows: Sequence[tuple[str, float, float]], labels: Sequence[tuple[str, str]], width: int = 1060) -> str:
    """Horizontal bars, before behind after, one for each layer.

    Args:
        rows: (name, before, after).
        labels: (before, after) as words, one pair for each row.
    """
    step, left, right = 22, 250, 190
    height = step * len(rows) + 6
    most = max((before for _, before, _ in rows), default=1.0) or 1.0
    room = width - left - right
    parts = [f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="Cost of each layer before and after">']
    for number, ((name, before, after), (was, now)) in enumerate(zip(rows, labels, strict=True)):
        y = number * step + 4
        wide, narrow = (max(1.0, cost / most * room) for cost in (before, after))
        shown = name if len(name) <= 36 else "..." + name[-33:]
        parts.append(f"<g><title>{escape(name)}: {escape(was)} to {escape(now)}</title>")
        parts.append(
            f'<text class="name" x="{left - 10}" y="{y + 12}" text-anchor="end">{escape(shown)}</text>'
            f'<rect class="before" x="{left}" y="{y}" width="{wide:.1f}" height="15" rx="3"/>'
            f'<rect class="after" x="{left}" y="{y}" width="{narrow:.1f}" height="15" rx="3"/>'
            f'<text class="tick" x="{left + wide + 8:.1f}" y="{y + 12}">'
            f"{escape(was)} → {escape(now)}</text></g>"
        )
    parts.append("</svg>")
    return "".join(parts)


def sparkline(curve: Sequence[tuple[float, float]], kept: int, width: int = 240, height: int = 104) -> str:
    """Sensitivity removed against channels removed for one layer, with the cut.

    Args:
        curve: (channels kept, sensitivity removed), from all channels down.
        kept: where it was cut.
    """
    left, right, top, bottom = 8, 8, 10, 20
    full = curve[0][0]
    # The last channels cost most by far; the curve is drawn to 2.5 times the cut, so that the cut is seen.
    cut = next(loss for channels, loss in curve if channels == kept)
    high = max(min(curve[-1][1], 2.5 * cut if cut else curve[-1][1]), 1e-300)

    def place(channels: float, loss: float) -> Point:
        x = left + (full - channels) / max(1, full) * (width - left - right)
        return x, height - bottom - min(loss, high) / high * (height - top - bottom)

    base = height - bottom
    points = [place(*point) for point in curve if point[1] <= high]
    if len(points) < len(curve):  # where the curve leaves the picture
        (before, low), (after, beyond) = curve[len(points) - 1], curve[len(points)]
        points.append(place(before + (after - before) * (high - low) / (beyond - low), high))
    x, y = place(kept, cut)
    removed = [point for point in points if point[0] <= x + 1e-6] or [points[0]]
    area = f"{_path(removed)}L{removed[-1][0]:.1f} {base}L{removed[0][0]:.1f} {base}Z"
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="Sensitivity curve">'
        f'<line class="grid" x1="{left}" x2="{width - right}" y1="{base}" y2="{base}"/>'
        f'<path class="area" d="{area}"/><path class="line thin" d="{_path(points)}"/>'
        f'<line class="target" x1="{x:.1f}" x2="{x:.1f}" y1="{top - 4}" y2="{base}"/>'
        f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>'
        f'<text class="tick" x="{left}" y="{height - 6}">0 removed</text>'
        f'<text class="tick" x="{width - right}" y="{height - 6}" text-anchor="end">{full}</text></svg>'
    )
