"""Line charts and bars in SVG and HTML. Text is escaped; colours are those of style.css."""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from html import escape

# Little wider than a column of charts, so that the text is not much smaller than that of the page.
WIDTH, HEIGHT = 480, 220
SQUARE = 300
LEFT, RIGHT, TOP, BOTTOM = 48, 12, 12, 34
NUM_TICKS = 5
MAX_DOTS = 30  # of a curve in a square, where its points are not looked at one by one

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


def chart(title: str, lines: Sequence[Line], *, mark: float | None = None, x_name: str = "") -> str:
    """A figure with lines over the number of the model, or, with a name of x, in a square of shares
    from 0 to 1. mark: x of a vertical line, the best model."""
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points]
    ys += [y for line in lines for _, low, high in line.band for y in (low, high)]
    margin = (max(ys) - min(ys)) * 0.08 or abs(max(ys)) * 0.1 or 1.0
    low, high = min(ys) - margin, max(ys) + margin
    width, height = WIDTH, HEIGHT
    x_ticks: Sequence[float] = _whole_ticks(min(xs), max(xs))
    if x_name:
        width = height = SQUARE
        xs, low, high, x_ticks = [0.0, 1.0], 0.0, 1.0, _ticks(0.0, 1.0)
    x_at = _scale(min(xs), max(xs), LEFT, width - RIGHT)
    y_at = _scale(low, high, height - BOTTOM, TOP)
    parts = [
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title, quote=True)}">'
    ]
    for y in _ticks(low, high):
        at = y_at(y)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{width - RIGHT}" y1="{at}" y2="{at}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{at + 4}" text-anchor="end">{number(y)}</text>')
    parts += [
        f'<text x="{x_at(tick)}" y="{height - 18}" text-anchor="middle">{number(tick)}</text>'
        for tick in x_ticks
    ]
    label = escape(x_name or "model")
    parts.append(f'<text x="{width / 2}" y="{height - 4}" text-anchor="middle">{label}</text>')
    if mark is not None:
        at = x_at(mark)
        parts.append(f'<line class="mark" x1="{at}" x2="{at}" y1="{TOP}" y2="{height - BOTTOM}"/>')
    for line in lines:
        if len(line.band) > 1:
            above = [(x, high) for x, _, high in line.band]
            below = [(x, low) for x, low, _ in reversed(line.band)]
            corners = _points([*above, *below], x_at, y_at)
            parts.append(f'<polygon class="band {line.kind}" points="{corners}"/>')
        points = _points(line.points, x_at, y_at)
        parts.append(f'<polyline class="{line.kind}" points="{points}"/>')
        if x_name and len(line.points) > MAX_DOTS:
            continue
        for x, y in line.points:
            tip = f"{line.name}, {x_name or 'model'} {x:.4g}: {number(y)}"
            parts.append(
                f'<circle class="{line.kind}" cx="{x_at(x)}" cy="{y_at(y)}" r="2.5">'
                f"<title>{escape(tip)}</title></circle>"
            )
    parts.append("</svg>")
    names = [(line.kind, line.name) for line in lines]
    names += [] if mark is None else [("mark", "best model")]
    keys = "".join(f'<span class="key {kind}">{escape(name)}</span>' for kind, name in names)
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


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, texts: Collection[int] = ()
) -> str:
    """A table of escaped cells. texts: columns of text beside the first one; others are numbers."""
    styles = [' class="reason"' if at in texts else ' class="num"' for at in range(len(head))]
    heads = "".join(
        f"<th{'' if at == 0 else style}>{name}</th>"
        for at, (name, style) in enumerate(zip(head, styles, strict=True))
    )
    body = "".join(
        f'<tr><th scope="row">{first}</th>'
        + "".join(f"<td{s}>{cell}</td>" for s, cell in zip(styles[1:], others, strict=True))
        + "</tr>"
        for first, *others in rows
    )
    return (
        f'<div class="wide"><table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody>'
        "</table></div>"
    )


def number(value: float) -> str:
    """A number as text with four significant digits."""
    return f"{value:.4g}"


def _scale(low: float, high: float, start: float, end: float) -> _Scale:
    """A function from values between two bounds to coordinates between two others."""

    def at(value: float) -> float:
        share = (value - low) / (high - low) if high > low else 0.5
        return round(start + share * (end - start), 2)

    return at


def _points(points: Sequence[tuple[float, float]], x_at: _Scale, y_at: _Scale) -> str:
    """Points as coordinates of SVG."""
    return " ".join(f"{x_at(x)},{y_at(y)}" for x, y in points)


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers between two bounds."""
    rough = (high - low) / NUM_TICKS
    power = 10 ** math.floor(math.log10(rough))
    step = next(f * power for f in (1, 2, 5, 10) if f * power >= rough)
    first = math.ceil(low / step)
    return [round(k * step, 12) for k in range(first, math.floor(high / step) + 1)]


def _whole_ticks(low: float, high: float) -> list[int]:
    """At most some nine whole numbers between two bounds."""
    step = max(1, math.ceil((high - low) / 8))
    return list(range(math.ceil(low), math.floor(high) + 1, step))
