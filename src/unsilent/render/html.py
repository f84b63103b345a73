"""A result as one self-contained HTML file that works offline; see `pages` for what keeps it harmless."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from unsilent.render.figures import curves_figure, heat_figure, heat_floor, lookup_figure, split_figure
from unsilent.render.fit import NEEDS, check_rate, fit_rows, surprise
from unsilent.render.headline import headline
from unsilent.render.info import (
    BARS,
    bars_text,
    curves,
    due_split,
    heats,
    is_drawn,
    is_exact,
    outcome_split,
    pooled,
    split_rows,
)
from unsilent.render.pages import capitalised, render_page, write_page
from unsilent.render.tables import facts, fit_table, lookup_table, numbers, result_columns, result_table
from unsilent.render.terminal import meaning
from unsilent.report.look import Figure
from unsilent.report.text import clean, counted, listed
from unsilent.studies.pvf.records import PvfResult

TEMPLATE = "pvf.html.jinja"


def write_html(result: PvfResult, path: str | os.PathLike[str], *, fit_per_bit: float | None = None) -> Path:
    """Write the report to ``path`` (replacing it in one step) and return the path.

    Raises ``UsageError`` where the file cannot be written; a file that was there before is then untouched.
    """
    return write_page(render_html(result, fit_per_bit=fit_per_bit), path)


def render_html(result: PvfResult, *, fit_per_bit: float | None = None) -> str:
    """The whole page as text."""
    if fit_per_bit is not None:
        check_rate(fit_per_bit)
    return render_page(TEMPLATE, page(result, fit_per_bit), figures(result))


def page(result: PvfResult, fit_per_bit: float | None) -> dict[str, Any]:
    """Everything the template shows."""
    lines = curves(result)
    fits = fit_rows(result, fit_per_bit) if fit_per_bit is not None else ()
    return {
        "result": result,
        "measure": result.measure,
        "meaning": capitalised(meaning(result)),
        "is_command": result.command.startswith("unsilent "),
        "units": _units(result),
        "headline": headline(result),
        "numbers": numbers(result),
        "limits": bars_text(result.rows, result.confidence),
        "drawn": is_drawn(result.rows),
        "all_exact": all(map(is_exact, result.rows)),
        "zeros": any(is_exact(row) and row.estimate == 0 for one in lines.series for row in one.rows),
        "curves": lines,
        "missing": listed(clean(name) for name in lines.missing),
        "heats": [(f"heat-{i}", clean(one.dtype), counted(one.trials, "trial")) for i, one in enumerate(heats(result))],
        "heat_trials": counted(sum(one.trials for one in result.heat_maps), "trial"),
        "judged_once": result.unit == "batch" and (result.transient or result.batches == 1),
        "pooled": pooled(result),
        "bars": BARS,
        "splits_left": split_rows(result)[1],
        "fit_per_bit": fit_per_bit,
        "fit_needs": NEEDS,
        "fits": fit_table(fits),
        "fit_surprise": surprise(fits),
        "lookups": lookup_table(result),
        "columns": result_columns(result),
        "rows": result_table(result),
        "facts": facts(result),
    }


def figures(result: PvfResult) -> dict[str, Figure]:
    """The figures that have something to show, by the id of their place in the page."""
    found: dict[str, Figure] = {}
    lines, splits, dues = curves(result), outcome_split(result), due_split(result)
    if lines.series:
        found["curves"] = curves_figure(lines, result.measure)
    maps = heats(result)
    for number, one in enumerate(maps):
        found[f"heat-{number}"] = heat_figure(one, heat_floor(maps), result.measure)
    if splits:
        found["outcomes"] = split_figure(splits, f"share of {_units(result)}")
    if dues:
        found["due"] = split_figure(dues, f"share of incorrect {_units(result)}")
    if any(row.estimate is not None for row in result.lookups):
        found["lookups"] = lookup_figure(result.lookups)
    return found


def _units(result: PvfResult) -> str:
    return "batches" if result.unit == "batch" else "samples"
