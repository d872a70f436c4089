"""Line charts and bars in SVG and HTML. Text is escaped; colours are those of style.css."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

# Little wider than a column of charts, so that the text is not much smaller than that of the page.
WIDTH, HEIGHT = 480, 220
LEFT, RIGHT, TOP, BOTTOM = 48, 12, 12, 34
NUM_TICKS = 5

_Scale = Callable[[float], float]


@dataclass(frozen=True, slots=True)
class Line:
    """A curve of a chart.

    kind: class in the style sheet. points: (x, y), finite, in order of x. band: (x, low, high) of a
    shaded range around the curve.
    """

    name: str
    kind: str
    points: Sequence[tuple[float, float]]
    band: Sequence[tuple[float, float, float]] = ()


def chart(title: str, lines: Sequence[Line], *, mark: float | None = None) -> str:
    """A figure with lines over the number of the model. mark: x of a vertical line."""
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points]
    ys += [y for line in lines for _, low, high in line.band for y in (low, high)]
    margin = (max(ys) - min(ys)) * 0.08 or abs(max(ys)) * 0.1 or 1.0
    low, high = min(ys) - margin, max(ys) + margin
    x_at = _scale(min(xs), max(xs), LEFT, WIDTH - RIGHT)
    y_at = _scale(low, high, HEIGHT - BOTTOM, TOP)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title, quote=True)}">'
    ]
    for y in _ticks(low, high):
        at = y_at(y)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at}" y2="{at}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{at + 4}" text-anchor="end">{number(y)}</text>')
    parts += [
        f'<text x="{x_at(tick)}" y="{HEIGHT - 14}" text-anchor="middle">{tick}</text>'
        for tick in _whole_ticks(min(xs), max(xs))
    ]
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 1}" text-anchor="middle">model</text>')
    if mark is not None:
        at = x_at(mark)
        parts.append(f'<line class="mark" x1="{at}" x2="{at}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
    for line in lines:
        if len(line.band) > 1:
            above = [(x, high) for x, _, high in line.band]
            below = [(x, low) for x, low, _ in reversed(line.band)]
            corners = _points([*above, *below], x_at, y_at)
            parts.append(f'<polygon class="band {line.kind}" points="{corners}"/>')
        points = _points(line.points, x_at, y_at)
        parts.append(f'<polyline class="{line.kind}" points="{points}"/>')
        for x, y in line.points:
            tip = f"{line.name}, model {x:g}: {number(y)}"
            parts.append(
                f'<circle class="{line.kind}" cx="{x_at(x)}" cy="{y_at(y)}" r="2.5">'
                f"<title>{escape(tip)}</title></circle>"
            )
    parts.append("</svg>")
    keys = "".join(f'<span class="key {line.kind}">{escape(line.name)}</span>' for line in lines)
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>{''.join(parts)}"
        f'<p class="keys">{keys}</p></figure>'
    )


def timeline(spans: Sequence[tuple[str, float, float, str]]) -> str:
    """A row with a bar for each span: (label, beginning, end, text at the end of the row)."""
    first = min(start for _, start, _, _ in spans)
    whole = max(end for _, _, end, _ in spans) - first or 1.0
    rows = "".join(
        f'<tr><th scope="row">{escape(label)}</th><td class="bar">'
        f'<span style="margin-left:{100 * (start - first) / whole:.2f}%;'
        f'width:{100 * (end - start) / whole:.2f}%"></span></td>'
        f"<td>{escape(text)}</td></tr>"
        for label, start, end, text in spans
    )
    return f'<div class="wide"><table class="bars">{rows}</table></div>'


def number(value: float) -> str:
    """A number as text with four significant digits."""
    return f"{value:.4g}"


def _scale(low: float, high: float, start: float, end: float) -> _Scale:
    def at(value: float) -> float:
        share = (value - low) / (high - low) if high > low else 0.5
        return round(start + share * (end - start), 2)

    return at


def _points(points: Sequence[tuple[float, float]], x_at: _Scale, y_at: _Scale) -> str:
    return " ".join(f"{x_at(x)},{y_at(y)}" for x, y in points)


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
