"""Small SVG charts: bars in groups, lines and points on labelled axes. Text in, text out: no library, no network."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Final

COLOURS: Final = ("#3b6fb6", "#d9822b", "#3d9a5f", "#b8473d", "#7a5ba8", "#8a6d3b", "#4a9fa8", "#777777")
"""Told apart by most readers with a weakness of colour sight; the legend repeats them in order."""

WIDTH: Final = 860
HEIGHT: Final = 380
LEFT: Final = 64
RIGHT: Final = 190
TOP: Final = 34
BOTTOM: Final = 52

Points = Sequence[tuple[float, float]]


class Chart:
    """A frame with a title, axes and a legend at its right side. Marks are added, then `svg` gives the text."""

    def __init__(
        self, title: str, x_label: str, y_label: str, *, x: tuple[float, float], y: tuple[float, float]
    ) -> None:
        """`x` and `y` are the ranges that the frame shows."""
        self._x, self._y = x, y
        self._parts: list[str] = [
            _text(LEFT, 20, title, size=15, weight="bold"),
            _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, x_label, anchor="middle"),
            f'<g transform="translate(16 {(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)">'
            + _text(0, 0, y_label, anchor="middle")
            + "</g>",
        ]
        self._legend: list[tuple[str, str]] = []
        for value in ticks(*y):
            at = self._at_y(value)
            self._parts.append(_line(LEFT, at, WIDTH - RIGHT, at, "#dddddd"))
            self._parts.append(_text(LEFT - 6, at + 4, _number(value), anchor="end"))
        self._parts.append(_line(LEFT, HEIGHT - BOTTOM, WIDTH - RIGHT, HEIGHT - BOTTOM, "#333333"))
        self._parts.append(_line(LEFT, TOP, LEFT, HEIGHT - BOTTOM, "#333333"))

    def x_ticks(self, names: Mapping[float, str]) -> None:
        """Names below places of the axis."""
        for value, name in names.items():
            self._parts.append(_text(self._at_x(value), HEIGHT - BOTTOM + 18, name, anchor="middle"))

    def level(self, y: float) -> None:
        """A dashed line across, where a value means something by itself."""
        at = self._at_y(y)
        self._parts.append(_line(LEFT, at, WIDTH - RIGHT, at, "#333333", dashed=True))

    def bar(self, left: float, right: float, y: float, colour: str, told: str) -> None:
        """From zero to `y`; its value stands above it, `told` is what pointing at it says."""
        x1, x2, top = self._at_x(left), self._at_x(right), self._at_y(y)
        shape = f'x="{x1:.1f}" y="{top:.1f}" width="{x2 - x1:.1f}" height="{self._at_y(0) - top:.1f}"'
        self._parts.append(f'<rect {shape} fill="{colour}"><title>{escape(told)}</title></rect>')
        self._parts.append(_text((x1 + x2) / 2, top - 3, f"{y:.2g}", anchor="middle", size=9))

    def line(self, points: Points, colour: str, *, dashed: bool = False) -> None:
        path = " ".join(f"{self._at_x(x):.1f},{self._at_y(y):.1f}" for x, y in points)
        dash = ' stroke-dasharray="4 4"' if dashed else ""
        width = 1 if dashed else 2
        self._parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"{dash}/>')

    def point(self, x: float, y: float, colour: str, told: str, name: str = "") -> None:
        at_x, at_y = self._at_x(x), self._at_y(y)
        circle = f'cx="{at_x:.1f}" cy="{at_y:.1f}" r="5" fill="{colour}" fill-opacity="0.8"'
        self._parts.append(f"<circle {circle}><title>{escape(told)}</title></circle>")
        if name:
            self._parts.append(_text(at_x, at_y - 7, name, anchor="middle", size=9))

    def note(self, x: float, y: float, text: str) -> None:
        """Small text that ends at a place of the frame."""
        at_x, at_y = self._at_x(x) - 3, self._at_y(y) - 4
        self._parts.append(_text(at_x, at_y, text, anchor="end", size=10, colour="#888888"))

    def name(self, name: str, colour: str) -> None:
        """A line of the legend."""
        self._legend.append((name, colour))

    def svg(self) -> str:
        parts = list(self._parts)
        for place, (name, colour) in enumerate(self._legend):
            top = TOP + 8 + 20 * place
            parts.append(f'<rect x="{WIDTH - RIGHT + 18}" y="{top}" width="12" height="12" fill="{colour}"/>')
            parts.append(_text(WIDTH - RIGHT + 36, top + 10, name))
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}">'
        return head + '<rect width="100%" height="100%" fill="white"/>' + "".join(parts) + "</svg>"

    def _at_x(self, value: float) -> float:
        low, high = self._x
        return LEFT + (value - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def _at_y(self, value: float) -> float:
        low, high = self._y
        return HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM)


def ticks(low: float, high: float, about: int = 6) -> list[float]:
    """Round values from low to high, about as many as asked for."""
    assert low < high
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough)
    first = math.ceil(low / step - 1e-9)
    return [round(number * step, 10) for number in range(first, math.floor(high / step + 1e-9) + 1)]


def _number(value: float) -> str:
    return f"{value:g}"


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", size: int = 12, weight: str = "", colour: str = "#222222"
) -> str:
    style = f'font-family="sans-serif" font-size="{size}" fill="{colour}" text-anchor="{anchor}"'
    bold = f' font-weight="{weight}"' if weight else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}{bold}>{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, *, dashed: bool = False) -> str:
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"{dash}/>'
