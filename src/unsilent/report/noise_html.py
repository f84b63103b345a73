"""Run-to-run variation as one self-contained HTML file; see `pages` for what keeps it harmless."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from unsilent.report.noise_figures import figures
from unsilent.report.noise_info import (
    MEASURES,
    called,
    cells,
    effect_how,
    effect_text,
    findings,
    headline,
    how,
    limits,
    spreading,
    training_name,
)
from unsilent.report.pages import capitalised, render_page, write_page
from unsilent.report.tables import Cell, Line
from unsilent.report.text import chance, clean
from unsilent.statistics.replicas import greatest_sd
from unsilent.studies.noise_records import NoiseResult

TEMPLATE = "noise.html.jinja"
COLUMNS = (
    "group",
    "variant",
    "samples",
    "error %",
    "sd, points",
    "by size",
    "sd / by size",
    "in common",
    "p",
    "p, Holm",
)


def write_noise(result: NoiseResult, path: str | os.PathLike[str]) -> Path:
    """Write the page to ``path`` (replacing it in one step) and return the path; raises ``UsageError``."""
    return write_page(render_page(TEMPLATE, page(result), figures(result)), path)


def page(result: NoiseResult) -> dict[str, Any]:
    """Everything the template shows."""
    columns = [cells(found) for found in result.variants]
    return {
        "title": f"Run-to-run variation of {training_name(result)}",
        "headline": capitalised(headline(result)),
        "findings": [capitalised(line) for line in findings(result)],
        "numbers": numbers(result),
        "names": [clean(found.name) for found in result.variants],
        "switches": [clean(found.switches) for found in result.variants],
        "measures": [(name.strip(), [column[i] for column in columns]) for i, name in enumerate(MEASURES)],
        "columns": COLUMNS,
        "rows": _groups(result),
        "effects": [(e.switch, e.kind, effect_text(e.changes), effect_how(e)) for e in result.effects],
        "how": how(result),
        "facts": _facts(result),
    }


def numbers(result: NoiseResult) -> list[tuple[str, str, str]]:
    """The few numbers at the head of the page: term, text, and what is set smaller."""
    found = [("replicas", f"{sum(one.n for one in result.variants):,}", f"of {result.steps:,} steps")]
    found += [
        (f"churn, {clean(one.name)}", f"{100 * (one.churn.estimate or 0):.2g} %", "") for one in spreading(result)[:4]
    ]
    return [*found, ("parameters", f"{result.parameters:,}", ""), ("held-out samples", f"{result.samples:,}", "")]


def _groups(result: NoiseResult) -> list[Line]:
    lines = []
    for one in spreading(result):
        for g in one.groups:
            sd = g.sd.estimate or 0.0
            ratio = sd / g.by_size if g.by_size else 0.0
            cell = (
                Cell(clean(one.name)),
                Cell(f"{g.n:,}", float(g.n)),
                Cell(f"{100 * g.error:.2f}", g.error),
                Cell(limits(g.sd, 100, greatest_sd(one.n)), sd),
                Cell(f"{100 * g.by_size:.2f}", g.by_size),
                Cell(f"{ratio:.2f}", ratio),
                Cell(limits(g.common, 100, greatest_sd(one.n)), g.common.estimate),
                Cell(chance(g.p), g.p),
                Cell(chance(g.corrected), g.corrected),
            )
            lines.append(Line(clean(g.name), "model" if called(g) else "", cell))
    return lines


def _facts(result: NoiseResult) -> list[tuple[str, str]]:
    told = {"command": result.command, "base seed": result.seed, "device": result.device, "store": result.store}
    told |= {"training": result.training, **result.machine, **result.versions}
    return [(term, clean(text)) for term, text in told.items()]
