"""Line charts as inline SVG. Colours and dashes come from the style sheet, so that a chart follows the light and the dark scheme."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ddp_pitfalls.evidence.markup import text

WIDTH, HEIGHT = 340, 220
LEFT, TOP, RIGHT, BOTTOM = 48, 46, 12, 38  # room around the plot for numbers, title and legend
STYLES = 4  # line styles in the style sheet
LEGEND = (WIDTH - LEFT) // STYLES
REFERENCE = "one process"  # the label of a line with which the others are to be compared

Lines = Mapping[str, Sequence[float | None]]  # by label; None is a number that is not finite


@dataclass(frozen=True)
class Axes:
    """The ranges that all panels of a figure share."""

    steps: int
    low: float
    high: float

    def x(self, step: float) -> float:
        return LEFT + step / max(self.steps, 1) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.low) / (self.high - self.low) * (HEIGHT - TOP - BOTTOM)


def axes(panels: Sequence[Lines]) -> Axes:
    """Axes that hold every point of every panel, and zero."""
    curves = [points for lines in panels for points in lines.values()]
    finite = [p for points in curves for p in points if p is not None] or [0.0]
    low, high = min(0.0, *finite), max(0.0, *finite)
    margin = (high - low) * 0.05 or 1.0
    return Axes(max(len(points) for points in curves) - 1, low - margin if low < 0 else low, high + margin)


def figure(caption: str, x: str, panels: Mapping[str, Lines], uid: str) -> str:
    """One panel by title, all with the same axes. ``uid`` begins the ids of the figure's elements."""
    shared = axes(list(panels.values()))
    drawn = [panel(title, lines, shared, x, caption, f"{uid}-{n}") for n, (title, lines) in enumerate(panels.items())]
    note = " Both charts have the same axes." if len(panels) > 1 else ""
    caption = f"<figcaption>{text(caption[:1].upper() + caption[1:])}, by {text(x)}.{note}</figcaption>"
    return "\n".join(['<figure class="plot" data-search-exclude>', caption, '<div class="panels">', *drawn, "</div>", "</figure>"])


def panel(title: str, lines: Lines, shared: Axes, x: str, y: str, uid: str) -> str:
    """One chart, with a title and a description for those who do not see it."""
    parts = [
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="{uid}-t {uid}-d">',
        f'<title id="{uid}-t">{text(title)}: {text(y)}</title><desc id="{uid}-d">{text(described(lines))}</desc>',
        f'<text class="c-h" x="{LEFT}" y="16">{text(title)}</text>',
    ]
    for value in ticks(shared.low, shared.high):
        at = f"{shared.y(value):.1f}"
        parts.append(f'<line class="c-g" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at}" y2="{at}"/>')
        parts.append(f'<text class="c-l" x="{LEFT - 6}" y="{shared.y(value) + 4:.1f}" text-anchor="end">{value:g}</text>')
    for step in ticks(0, shared.steps, 6, whole=True):
        parts.append(f'<text class="c-l" x="{shared.x(step):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{step:g}</text>')
    parts.append(f'<line class="c-a" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{HEIGHT - BOTTOM}" y2="{HEIGHT - BOTTOM}"/>')
    for n, (label, points) in enumerate(lines.items()):
        style = "c-s c-ref" if label == REFERENCE else f"c-s c-{n % STYLES}"
        start = LEFT + n % STYLES * LEGEND
        parts.append(f'<line class="{style}" x1="{start}" x2="{start + 20}" y1="32" y2="32"/>')
        parts.append(f'<text class="c-l" x="{start + 25}" y="36">{text(label)}</text>')
        parts += [f'<polyline class="{style}" points="{run}"/>' for run in _runs(points, shared)]
    parts.append(f'<text class="c-l" x="{(LEFT + WIDTH - RIGHT) / 2:g}" y="{HEIGHT - 6}" text-anchor="middle">{text(x)}</text></svg>')
    return "".join(parts)


def described(lines: Lines) -> str:
    """The curves in a sentence."""
    told = []
    for label, points in lines.items():
        finite = [p for p in points if p is not None]
        gaps = ", with points that are not finite" if len(finite) < len(points) else ""
        said = f"starts at {finite[0]:g}, ends at {finite[-1]:g}, between {min(finite):g} and {max(finite):g}" if finite else "no number"
        told.append(f"{label}: {said}{gaps}")
    return "; ".join(told)


def ticks(low: float, high: float, most: int = 5, whole: bool = False) -> Iterator[float]:
    """At most about ``most`` round numbers from low to high."""
    raw = (high - low) / most or 1.0
    step = 10.0 ** math.floor(math.log10(raw))
    step *= next(m for m in (1, 2, 5, 10) if raw <= step * m * 1.0001)
    step = max(step, 1.0) if whole else step
    first = math.ceil(low / step - 1e-9)
    for n in range(first, math.floor(high / step + 1e-9) + 1):
        yield n * step


def _runs(points: Sequence[float | None], shared: Axes) -> Iterator[str]:
    """The coordinates of each stretch of finite points; a lone point becomes a short line."""
    run: list[str] = []
    for step, value in enumerate([*points, None]):
        if value is not None:
            run.append(f"{shared.x(step):.1f},{shared.y(value):.1f}")
        elif run:
            yield " ".join(run * 2 if len(run) == 1 else run)
            run = []
