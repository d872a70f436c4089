"""Line charts and bars as SVG. All text is escaped; colours come from the page's style sheet."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

# Little wider than a column of charts, so that the text is not much smaller than that of the page.
WIDTH, HEIGHT = 480, 220
LEFT, RIGHT, TOP, BOTTOM = 48, 12, 12, 34
NUM_TICKS = 5


@dataclass(frozen=True, slots=True)
class Line:
    """A curve. points: (x, y), finite, in order of x. kind: its class in the style sheet.

    band: (x, low, high) for a shaded range around it.
    """

    name: str
    kind: str
    points: Sequence[tuple[float, float]]
    band: Sequence[tuple[float, float, float]] = ()


def chart(title: str, lines: Sequence[Line], *, mark: float | None = None) -> str:
    """A figure with these lines over rounds. mark: an x at which a vertical line stands."""
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points]
    ys += [y for line in lines for _, low, high in line.band for y in (low, high)]
    x_axis, y_axis = _Axis(min(xs), max(xs), LEFT, WIDTH - RIGHT), _Axis.padded(ys)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title, quote=True)}">'
    ]
    for y in _ticks(y_axis.low, y_axis.high):
        at = y_axis.at(y)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at}" y2="{at}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{at + 4}" text-anchor="end">{number(y)}</text>')
    parts += [
        f'<text x="{x_axis.at(tick)}" y="{HEIGHT - 14}" text-anchor="middle">{tick}</text>'
        for tick in _whole_ticks(x_axis.low, x_axis.high)
    ]
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 1}" text-anchor="middle">model</text>')
    if mark is not None:
        at = x_axis.at(mark)
        parts.append(f'<line class="mark" x1="{at}" x2="{at}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
    for line in lines:
        if len(line.band) > 1:
            above = [(x, high) for x, _, high in line.band]
            below = [(x, low) for x, low, _ in reversed(line.band)]
            corners = _points([*above, *below], x_axis, y_axis)
            parts.append(f'<polygon class="band {line.kind}" points="{corners}"/>')
        points = _points(line.points, x_axis, y_axis)
        parts.append(f'<polyline class="{line.kind}" points="{points}"/>')
        for x, y in line.points:
            tip = f"{line.name}, model {x:g}: {number(y)}"
            parts.append(
                f'<circle class="{line.kind}" cx="{x_axis.at(x)}" cy="{y_axis.at(y)}" r="2.5">'
                f"<title>{escape(tip)}</title></circle>"
            )
    parts.append("</svg>")
    keys = "".join(f'<span class="key {line.kind}">{escape(line.name)}</span>' for line in lines)
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>{''.join(parts)}"
        f'<p class="keys">{keys}</p></figure>'
    )


def timeline(spans: Sequence[tuple[str, float, float, str]]) -> str:
    """A bar for each span. spans: (label, beginning, end, text at the end of the row)."""
    first = min((start for _, start, _, _ in spans), default=0.0)
    whole = max((end for _, _, end, _ in spans), default=0.0) - first or 1.0
    rows = "".join(
        f'<tr><th scope="row">{escape(label)}</th><td class="bar">'
        f'<span style="margin-left:{100 * (start - first) / whole:.2f}%;'
        f'width:{100 * (end - start) / whole:.2f}%"></span></td>'
        f"<td>{escape(text)}</td></tr>"
        for label, start, end, text in spans
    )
    return f'<div class="wide"><table class="bars">{rows}</table></div>'


def number(value: float) -> str:
    """Four digits."""
    return f"{value:.4g}"


@dataclass(frozen=True, slots=True)
class _Axis:
    low: float
    high: float
    start: float
    end: float

    @classmethod
    def padded(cls, values: Sequence[float]) -> "_Axis":
        low, high = min(values), max(values)
        room = (high - low) * 0.08 or abs(high) * 0.1 or 1.0
        return cls(low - room, high + room, HEIGHT - BOTTOM, TOP)

    def at(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low) if self.high > self.low else 0.5
        return round(self.start + share * (self.end - self.start), 2)


def _points(points: Sequence[tuple[float, float]], x_axis: _Axis, y_axis: _Axis) -> str:
    return " ".join(f"{x_axis.at(x)},{y_axis.at(y)}" for x, y in points)


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers between two bounds."""
    rough = (high - low) / NUM_TICKS
    power = 10 ** math.floor(math.log10(rough))
    step = next(f * power for f in (1, 2, 5, 10) if f * power >= rough)
    first = math.ceil(low / step)
    return [round(k * step, 12) for k in range(first, math.floor(high / step) + 1)]


def _whole_ticks(low: float, high: float) -> list[int]:
    step = max(1, math.ceil((high - low) / 8))
    return list(range(math.ceil(low), math.floor(high) + 1, step))
