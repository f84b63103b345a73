"""A report as one self-contained HTML file; see `pages` for what keeps it harmless."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from unsilent.render.cells import cell_key, head, texts
from unsilent.render.pages import capitalised, render_page, write_page
from unsilent.report.model import Plot, Report, Table
from unsilent.report.text import clean

TEMPLATE = "report.html.jinja"


def write_report(report: Report, path: str | os.PathLike[str]) -> Path:
    """Write the page to ``path`` (replacing it in one step) and return the path; raises ``UsageError``."""
    plots = [part for section in report.sections for part in section.parts if isinstance(part, Plot)]
    return write_page(render_page(TEMPLATE, page(report), {plot.name: plot.figure for plot in plots}), path)


def page(report: Report) -> dict[str, Any]:
    """Everything the template shows."""
    return {
        "title": clean(report.title),
        "kicker": clean(report.kicker),
        "headline": capitalised(clean(report.headline)),
        "numbers": [tuple(map(clean, number)) for number in report.numbers],
        "findings": [capitalised(clean(line)) for line in report.findings],
        "sections": [
            {"title": clean(s.title), "lead": clean(s.lead), "parts": [_part(part) for part in s.parts]}
            for s in report.sections
        ],
        "notes": [clean(line) for line in report.notes],
        "facts": [(clean(term), clean(text)) for term, text in report.facts],
        "method": clean(report.method),
    }


def _part(part: Table | Plot) -> dict[str, Any]:
    if isinstance(part, Plot):
        return {"kind": "plot", "name": part.name, "label": clean(part.label)}
    rows = [
        {"strong": row.strong, "cells": list(zip(texts(part.columns, row), map(cell_key, row.cells), strict=True))}
        for row in part.rows
    ]
    heads = [(head(column), bool(column.left) or not number) for number, column in enumerate(part.columns)]
    return {"kind": "table", "title": clean(part.title), "heads": heads, "rows": rows, "long": part.long}
