"""Charts of what other benches found: reads their JSON lines, writes one HTML file that needs no network."""

import argparse
import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, Final

from tests.bench.charts import COLOURS, Chart
from tests.bench.decoding import METHODS

ORDER: Final = (*METHODS, "transformers", "transformers_lookup")
LEVELS: Final = (5, 10, 20, 40, 80, 160, 320)
"""Tokens a second of the curves in the last chart."""

Figures = Mapping[str, float]


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="scripts/bench report",
        description=f"{__doc__} A file holds what `--json` printed: its last line that is an object of a bench counts.",
    )
    result.add_argument("files", nargs="+", type=Path, metavar="FILE")
    result.add_argument("--out", type=Path, default=Path("bench.html"), help="where to write (default bench.html)")
    return result


def main(arguments: Sequence[str]) -> None:
    options = parser().parse_args(arguments)
    sections = []
    for file in options.files:
        found = last_object(file)
        if found is None:
            parser().error(f"{file}: no line with what a bench says with --json")
        charts = charts_of(found["figures"])
        if not charts:
            parser().error(f"{file}: {found['bench']} has no figures that this draws; `decode` has")
        told = ", ".join(f"{name} {value}" for name, value in found["method"].items())
        sections.append(f"<h2>{escape(file.stem)}</h2><p>{escape(told)}</p>{''.join(charts)}")
    style = "body{font-family:sans-serif;margin:24px;color:#222;max-width:900px} p{color:#555;font-size:13px}"
    page = f"<!doctype html><html lang=en><meta charset=utf-8><title>Benches of sdcpd</title><style>{style}</style>"
    options.out.write_text(f"{page}{''.join(sections)}</html>\n", encoding="utf-8")
    print(options.out)


def last_object(file: Path) -> dict[str, Any] | None:
    """What a bench said at its end, None when the file holds none of it. Raises OSError."""
    for line in reversed(file.read_text(encoding="utf-8").splitlines()):
        if line.startswith('{"bench"'):
            found: dict[str, Any] = json.loads(line)
            return found
    return None


def charts_of(figures: Figures) -> list[str]:
    """The charts of one run of `decode`, as SVG; none for figures of another bench."""
    measured = _by_family(figures)
    if not measured:
        return []
    methods = [method for method in ORDER if any(method in rows for rows in measured.values())]
    colours = dict(zip(ORDER, COLOURS, strict=False))
    charts = [_speed_up(measured, methods, colours), _cycles(measured, methods, colours)]
    return charts + [chart for method in methods if (chart := _acceptance(figures, measured, method))]


def _by_family(figures: Figures) -> dict[str, dict[str, dict[str, float]]]:
    """figures[FAMILY.METHOD.name] as [family][method][name]; those of further precisions are families of their own."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name, value in figures.items():
        family, _, rest = name.rpartition(".")[0].rpartition(".")
        if rest in ORDER and family:
            found.setdefault(family, {}).setdefault(rest, {})[name.rpartition(".")[2]] = value
    return found


def _speed_up(measured: Mapping[str, Mapping[str, Figures]], methods: Sequence[str], colours: Mapping[str, str]) -> str:
    values = [row.get("ratio_to_plain", 0.0) for rows in measured.values() for row in rows.values()]
    chart = Chart(
        "Speed-up by family and method",
        "family of prompts",
        "tokens a second, times plain decoding",
        x=(0, len(measured)),
        y=(0, max(1.2, 1.12 * max(values))),
    )
    width = 0.86 / len(methods)
    for place, (family, rows) in enumerate(measured.items()):
        for number, method in enumerate(methods):
            ratio = rows.get(method, {}).get("ratio_to_plain")
            if ratio is not None:
                left = place + 0.07 + number * width
                chart.bar(left, left + 0.92 * width, ratio, colours[method], f"{family}, {method}: {ratio:.2f}")
    chart.x_ticks({place + 0.5: family for place, family in enumerate(measured)})
    chart.level(1.0)
    for method in methods:
        chart.name(method, colours[method])
    return chart.svg()


def _cycles(measured: Mapping[str, Mapping[str, Figures]], methods: Sequence[str], colours: Mapping[str, str]) -> str:
    points = [
        (row["cycles_per_1k"], row["ms_per_cycle"], family, method)
        for family, rows in measured.items()
        for method, row in rows.items()
    ]
    highest = 1.15 * max(ms for _, ms, _, _ in points)
    furthest = max(1100.0, 1.05 * max(cycles for cycles, _, _, _ in points))
    chart = Chart(
        "Fewer cycles against dearer ones (points bear the first letters of the family)",
        "cycles for 1,000 tokens",
        "ms a cycle",
        x=(0, furthest),
        y=(0, highest),
    )
    chart.x_ticks({float(cycles): f"{cycles}" for cycles in range(0, 1001, 200)})
    for tokens_per_s in LEVELS:
        # 1,000 tokens take cycles * ms, so equal speed is a hyperbola.
        curve = [(cycles, 1e6 / tokens_per_s / cycles) for cycles in range(20, int(furthest), 10)]
        curve = [(cycles, ms) for cycles, ms in curve if ms <= highest]
        if len(curve) > 1 and curve[-1][1] > 0.04 * highest:
            chart.line(curve, "#bbbbbb", dashed=True)
            chart.note(*curve[-1], f"{tokens_per_s} tokens/s")
    for cycles, ms, family, method in points:
        chart.point(cycles, ms, colours[method], f"{family}, {method}: {cycles:.0f} cycles of {ms:.3g} ms", family[:2])
    for method in methods:
        chart.name(method, colours[method])
    return chart.svg()


def _acceptance(figures: Figures, measured: Mapping[str, Mapping[str, Figures]], method: str) -> str:
    """By position, a line a family; empty where nothing was proposed."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for family in measured:
        head = f"{family}.{method}.acceptance_by_position."
        points = [(float(name.removeprefix(head)), value) for name, value in figures.items() if name.startswith(head)]
        if points:
            lines[family] = sorted(points)
    if not lines:
        return ""
    furthest = max(x for points in lines.values() for x, _ in points)
    chart = Chart(
        f"Acceptance by position: {method}",
        "position in the proposal",
        "accepted, share of proposals that long",
        x=(0.5, furthest + 0.5),
        y=(0, 1.05),
    )
    chart.x_ticks({x: f"{x:g}" for x in sorted({x for points in lines.values() for x, _ in points})})
    for colour, (family, points) in zip(COLOURS * 8, lines.items(), strict=False):
        chart.line(points, colour)
        for x, y in points:
            chart.point(x, y, colour, f"{family}, position {x:g}: {y:.2f}")
        chart.name(family, colour)
    return chart.svg()
