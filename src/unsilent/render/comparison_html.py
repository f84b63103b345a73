"""A comparison as one self-contained HTML file: the finding, a forest plot of differences, all rows, what is not the same."""

from __future__ import annotations

import html
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unsilent.render.comparison_info import (
    TOP,
    cells,
    headline,
    how_many,
    limits,
    missing,
    pairing,
    rows_at,
    second_line,
    surprise,
    top_rows,
    verdict,
)
from unsilent.render.info import BARS, itself, main_level, name_of
from unsilent.render.pages import capitalised, render_page, write_page
from unsilent.render.tables import Cell, Line
from unsilent.render.terminal import dtype_text, meaning
from unsilent.report.look import INK, SERIES_COLOURS, Figure, figure, label, labels
from unsilent.report.text import chance, clean, counted, factor, flips_count, flips_text, shown, signed
from unsilent.studies.pvf.comparison import ComparedRow, Comparison
from unsilent.studies.pvf.records import PvfResult

TEMPLATE = "comparison.html.jinja"
HIGHER, LOWER, SAME = SERIES_COLOURS[1], SERIES_COLOURS[0], "#8a97a3"
COLOURS = {"higher": HIGHER, "lower": LOWER, "": SAME}
NAMES = {"higher": "B higher", "lower": "B lower", "": "no difference shown"}
COLUMNS = (
    "target",
    "level",
    "part of",
    "flips",
    "A %",
    "B %",
    "B - A",
    "interval",
    "B / A",
    "interval",
    "p",
    "B is",
    "paired",
)


def write_comparison(found: Comparison, path: str | os.PathLike[str]) -> Path:
    """Write the page to ``path`` (replacing it in one step) and return the path; raises ``UsageError``."""
    return write_page(render_comparison_html(found), path)


def render_comparison_html(found: Comparison) -> str:
    """The whole page as text."""
    return render_page(TEMPLATE, page(found), figures(found))


def page(found: Comparison) -> dict[str, Any]:
    """Everything the template shows."""
    level = main_level(found.a)
    return {
        "found": found,
        "measure": found.a.measure,
        "meaning": capitalised(meaning(found.a)),
        "confidence": f"{100 * found.confidence:g}",
        "limits": limits(found),
        "headline": headline(found),
        "second_line": second_line(found),
        "numbers": numbers(found),
        "level": level,
        "flips_counts": [(f"forest-{i}", flips_text(f)) for i, f in enumerate(_flips(found, level))],
        "left": max((len(_of(found, level, f)) - BARS for f in _flips(found, level)), default=0),
        "bars": BARS,
        "layers": TOP,
        "how_many": how_many(found),
        "pairing": capitalised(pairing(found)),
        "missing": missing(found),
        "columns": COLUMNS,
        "rows": table(found),
        "sides": list(zip(_facts(found.a), _facts(found.b), strict=True)),
        "footer": clean(found.a.versions.get("unsilent", "")),
    }


def numbers(found: Comparison) -> list[tuple[str, str, str]]:
    """The few numbers at the head of the page: term, text, and what is set smaller."""
    told = []
    for row in rows_at(found, "model")[:1]:
        where = "" if row.flips is None else f", {flips_text(row.flips)}"
        for name, one in (("A", row.a), ("B", row.b)):
            text = shown(one.estimate, one.low, one.high)
            told.append((f"{name}{where}", f"{text.estimate} %", text.limits))
        apart = signed(row.difference.estimate, row.difference.low, row.difference.high)
        times = factor(row.ratio.estimate, row.ratio.low, row.ratio.high)
        told += [("B − A, points", apart.estimate, apart.limits), ("B / A", times.estimate, times.limits)]
    return [*told, ("faults tried", f"{found.a.trials_done:,}", f"and {found.b.trials_done:,}")]


def table(found: Comparison) -> list[Line]:
    """All rows, in the order of A."""
    own = itself(found.a)
    return [Line(clean(name_of(row.a, own)), row.level, _cells(row), title=_title(row)) for row in found.rows]


def figures(found: Comparison) -> dict[str, Figure]:
    """Forest plots: the main level and the model at each number of flips, then the layers least like chance."""
    level = main_level(found.a)
    drawn = {}
    for number, flips in enumerate(_flips(found, level)):
        kept = sorted(_of(found, level, flips), key=surprise)[:BARS]
        rows = [row for row in _of(found, level, flips) if row in kept]
        drawn[f"forest-{number}"] = forest(rows + (_of(found, "model", flips) if level != "model" else []))
    layers = [row for row in top_rows(found)[0] if row.level != level]
    if layers:
        drawn["layers"] = forest(layers, several=len({row.flips for row in layers}) > 1)
    return drawn


def forest(rows: Sequence[ComparedRow], several: bool = False) -> Figure:
    """One line a row, first at the top: the difference in points with its interval; ``several`` numbers of flips are told."""
    rows = [row for row in rows if row.difference.estimate is not None]
    ends = [100 * end for row in rows for end in (row.difference.low, row.difference.high)]
    reach = max((abs(end) for end in ends), default=1.0) * 1.08
    names = labels([clean(row.target) for row in rows], 26)
    names = [name + (f" · {flips_count(row.flips)}" if several else "") for name, row in zip(names, rows, strict=True)]
    traces = [_points(rows, kind) for kind in ("higher", "lower", "")]
    zero = {"type": "line", "x0": 0, "x1": 0, "y0": 0, "y1": 1, "yref": "paper", "line": {"color": INK, "width": 1.2}}
    low, high = min([0.0, *ends]), max([0.0, *ends])
    return figure(
        [trace for trace in traces if trace["x"]],
        112 + 32 * len(rows),
        showlegend=True,
        shapes=[zero],
        xaxis={
            "range": [low - 0.06 * reach, high + 0.06 * reach],
            "title": {"text": "← lower in B · percentage points · higher in B →"},
        },
        yaxis={
            "tickvals": list(range(len(rows))),
            "ticktext": names,
            "range": [len(rows) - 0.4, -0.6],
            "showgrid": False,
            "automargin": True,
        },
    )


def _points(every: Sequence[ComparedRow], kind: str) -> Figure:
    """The rows of one verdict; a diamond where the difference is taken trial by trial."""
    rows = [row for row in every if verdict(row) == kind]
    values = [100 * (row.difference.estimate or 0.0) for row in rows]
    bars = {
        "type": "data",
        "symmetric": False,
        "array": [100 * row.difference.high - value for row, value in zip(rows, values, strict=True)],
        "arrayminus": [value - 100 * row.difference.low for row, value in zip(rows, values, strict=True)],
        "color": COLOURS[kind],
        "thickness": 1.6,
        "width": 4,
    }
    return {
        "type": "scatter",
        "mode": "markers",
        "name": NAMES[kind],
        "x": values,
        "y": [i for i, row in enumerate(every) if verdict(row) == kind],
        "error_x": bars,
        "marker": {
            "color": COLOURS[kind],
            "size": 9,
            "symbol": ["diamond" if row.paired else "circle" for row in rows],
        },
        "hoverinfo": "text",
        "hovertext": [_hover(row) for row in rows],
    }


def _hover(row: ComparedRow) -> str:
    # The only markup in these strings is what stands here: names are escaped, numbers hold none but "<".
    a, b, apart, limits, times, ratio, p, _ = (html.escape(cell, quote=False) for cell in cells(row))
    head = f"<b>{label(row.target, 60)}</b> · {flips_text(row.flips)}"
    both = f"A {a} %, n = {row.a.n:,}; B {b} %, n = {row.b.n:,}"
    return f"{head}<br>B − A {apart} points {limits}<br>{both}<br>B / A {times} {ratio}, p {p}"


def _of(found: Comparison, level: str, flips: int | None) -> list[ComparedRow]:
    return [row for row in rows_at(found, level) if row.flips == flips and row.difference.estimate is not None]


def _flips(found: Comparison, level: str) -> list[int | None]:
    """Numbers of flips that have something to draw."""
    known = dict.fromkeys(row.flips for row in rows_at(found, level))
    return [flips for flips in sorted(known, key=lambda f: f or 0) if _of(found, level, flips)]


def _cells(row: ComparedRow) -> tuple[Cell, ...]:
    a, b, apart, limits, times, ratio, p, differs = cells(row)
    nothing = -9.0
    return (
        Cell(clean(row.parent)),
        Cell(flips_count(row.flips), float(row.flips or 0)),
        Cell(a, -1.0 if row.a.estimate is None else row.a.estimate, _one(row.a.n)),
        Cell(b, -1.0 if row.b.estimate is None else row.b.estimate, _one(row.b.n)),
        Cell(apart, nothing if row.difference.estimate is None else row.difference.estimate),
        Cell(limits, row.difference.high),
        Cell(times, nothing if row.ratio.estimate is None else row.ratio.estimate),
        Cell(ratio, min(row.ratio.high, 1e300)),
        Cell(p, nothing if row.adjusted is None else row.adjusted, f"before correction {chance(row.p)}"),
        Cell(differs),
        Cell("yes" if row.paired else "no"),
    )


def _one(n: int) -> str:
    return f"n {n:,}"


def _title(row: ComparedRow) -> str:
    return f"A {counted(row.a.n, 'fault')}, B {counted(row.b.n, 'fault')}; {clean(row.method)}"


def _facts(result: PvfResult) -> list[tuple[str, str]]:
    """What one side is, as pairs of term and text."""
    versions = ", ".join(f"{clean(name)} {clean(version)}" for name, version in result.versions.items())
    return [
        ("store", clean(result.store)),
        ("campaign", clean(result.campaign)),
        ("workload", clean(result.workload)),
        ("where", clean(result.at)),
        ("trials", f"{result.trials_done:,} of {result.trials_planned:,} planned"),
        ("evaluation", f"{counted(result.samples, 'sample')} in {counted(result.batches, 'batch')}"),
        ("seed", str(result.seed)),
        ("device", f"{clean(result.device)}, {dtype_text(result)}, {counted(result.threads, 'thread')}"),
        ("versions", versions),
        ("command", clean(result.command)),
    ]
