"""The picture: predicted against measured step time of every row, both logarithmic, as an SVG drawn by hand."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from planner.ir.counting import counted
from planner.ir.errors import JobError
from planner.ir.replacing import replacing
from planner.validate.predict import RowPrediction

SIZE, LEFT, TOP, BOTTOM, LEGEND = 640, 70, 44, 56, 190
GAP, LETTER = 22, 8
"""Pixels from the frame to the legend, and of a letter there, about: few are wider."""
COLOURS = (
    "#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#999999", "#000000", "#994455", "#997700", "#004488",
)
"""Paul Tol's bright scheme, then his high-contrast and medium-contrast ones: told apart by colour-blind readers too."""
BAND = 0.10
WIDE = 2
"""Decades of an axis from which on powers of ten are ticks enough."""


@dataclass(frozen=True)
class _Scale:
    """Seconds from 10^low to 10^high over SIZE pixels."""

    low: float
    high: float

    def along(self, seconds: float) -> float:
        return SIZE * (math.log10(seconds) - self.low) / (self.high - self.low)

    def x(self, seconds: float) -> float:
        return LEFT + self.along(seconds)

    def y(self, seconds: float) -> float:
        return TOP + SIZE - self.along(seconds)

    def ticks(self) -> list[float]:
        """Seconds of the powers of ten; below two decades, of twice and five times them too."""
        return _ticks(self.low, self.high, (1,) if self.high - self.low >= WIDE else (1, 2, 5))


def _ticks(low: float, high: float, steps: Sequence[int]) -> list[float]:
    """Numbers from 10^low to 10^high that are a power of ten times one of the ``steps``."""
    every = (step * 10.0**decade for decade in range(math.floor(low), math.ceil(high) + 1) for step in steps)
    return [tick for tick in every if low <= math.log10(tick) <= high]


def _scale_of(seconds: Sequence[float]) -> _Scale:
    """A scale with all of the seconds inside; one below two decades begins and ends at a tick."""
    low, high = math.log10(min(seconds)) - 0.1, math.log10(max(seconds)) + 0.1
    if high - low >= WIDE:
        return _Scale(low, high)
    around = [math.log10(tick) for tick in _ticks(low - 1, high + 1, (1, 2, 5))]
    return _Scale(max(tick for tick in around if tick <= low), min(tick for tick in around if tick >= high))


def write_picture(path: Path, predictions: Sequence[RowPrediction]) -> None:
    """Write the picture. Raises JobError where the file cannot be written."""
    try:
        with replacing() as files:
            files.write(path, draw(predictions))
    except OSError as error:
        raise JobError(f"--picture {path}", f"cannot be written ({error.strerror})", "give a path that is writable") from error


def draw(predictions: Sequence[RowPrediction]) -> str:
    """The SVG of all rows with a measured step time, coloured by engine as the tables name it."""
    points = [
        (item.row.engine, item.row.step_s, item.step_s, item.row.row_id)
        for item in predictions if item.row.step_s is not None
    ]
    seconds = [value for _, measured, predicted, _ in points for value in (measured, predicted)] or [1.0]
    scale = _scale_of(seconds)
    drawn = Counter(engine for engine, _, _, _ in points)
    engines = sorted(drawn)
    legend = {engine: f"{engine} ({drawn[engine]})" for engine in engines}
    colour = {engine: COLOURS[index % len(COLOURS)] for index, engine in enumerate(engines)}
    beside = max(LEGEND, 2 * GAP + LETTER * max(map(len, legend.values()), default=0))
    title = f"Predicted against measured step time, {counted(len(points), 'measured run')}"
    width, height = LEFT + SIZE + beside, TOP + SIZE + BOTTOM
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
        ' font-family="sans-serif" font-size="13">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{LEFT}" y="26" font-size="16">{title}</text>',
        *_frame(scale),
        *(
            f'<circle cx="{scale.x(measured):.1f}" cy="{scale.y(predicted):.1f}" r="3" fill="{colour[engine]}" '
            f'fill-opacity="0.65"><title>{escape(row)}: {measured:.4g} s measured, {predicted:.4g} s predicted</title></circle>'
            for engine, measured, predicted, row in points
        ),
        *_legend(legend, colour),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _frame(scale: _Scale) -> Iterator[str]:
    """Axes, ticks, the diagonal and the band around it."""
    low, high = 10**scale.low, 10**scale.high
    yield f'<clipPath id="inside"><rect x="{LEFT}" y="{TOP}" width="{SIZE}" height="{SIZE}"/></clipPath>'
    corners = [(low, low * (1 - BAND)), (low, low * (1 + BAND)), (high, high * (1 + BAND)), (high, high * (1 - BAND))]
    band = " ".join(f"{scale.x(x):.1f},{scale.y(y):.1f}" for x, y in corners)
    yield f'<polygon points="{band}" fill="#d3e2f0" clip-path="url(#inside)"/>'
    for tick in scale.ticks():
        x, y, label = scale.x(tick), scale.y(tick), f"{tick:g}"
        yield f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{TOP + SIZE}" stroke="#dddddd"/>'
        yield f'<line x1="{LEFT}" y1="{y:.1f}" x2="{LEFT + SIZE}" y2="{y:.1f}" stroke="#dddddd"/>'
        yield f'<text x="{x:.1f}" y="{TOP + SIZE + 18}" text-anchor="middle">{label}</text>'
        yield f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{label}</text>'
    yield (
        f'<line x1="{scale.x(low):.1f}" y1="{scale.y(low):.1f}" x2="{scale.x(high):.1f}" y2="{scale.y(high):.1f}"'
        ' stroke="#555555"/>'
    )
    yield f'<rect x="{LEFT}" y="{TOP}" width="{SIZE}" height="{SIZE}" fill="none" stroke="#555555"/>'
    yield f'<text x="{LEFT + SIZE / 2:.0f}" y="{TOP + SIZE + 42}" text-anchor="middle">measured step time, s</text>'
    yield (
        f'<text x="20" y="{TOP + SIZE / 2:.0f}" text-anchor="middle" transform="rotate(-90 20 {TOP + SIZE / 2:.0f})">'
        "predicted step time, s</text>"
    )


def _legend(legend: Mapping[str, str], colour: Mapping[str, str]) -> Iterator[str]:
    """What each engine's colour is called, and the band."""
    x = LEFT + SIZE + GAP
    for index, (engine, text) in enumerate(legend.items()):
        y = TOP + 12 + 22 * index
        yield f'<circle cx="{x}" cy="{y}" r="5" fill="{colour[engine]}"/>'
        yield f'<text x="{x + 12}" y="{y + 4}">{escape(text)}</text>'
    y = TOP + 12 + 22 * len(legend)
    yield f'<rect x="{x - 6}" y="{y - 6}" width="12" height="12" fill="#d3e2f0" stroke="#cccccc"/>'
    yield f'<text x="{x + 12}" y="{y + 4}">within {BAND:.0%}</text>'
