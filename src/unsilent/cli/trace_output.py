"""Output of commands that trace a trial: a table and an HTML page."""

from __future__ import annotations

import os
import re
from pathlib import Path

from unsilent.basics.errors import UsageError
from unsilent.basics.options import OUTPUT_PANEL, Option
from unsilent.report.model import Report

TRACE = Option("Show how the fault spreads: compare every operation with the golden run.", OUTPUT_PANEL)
LOG = Option("Write what was injected to this file, in the log format of the published injections.", OUTPUT_PANEL)


def show_trace(report: Report, page: Path, as_json: bool, plain: bool) -> None:
    """Print the table of a trace, unless JSON is printed, and write its page."""
    from unsilent.cli.report_output import show_report
    from unsilent.render.report_page import write_report

    if as_json:
        write_report(report, page)
    else:
        print("#" if plain else "")
        show_report(report, page, as_json, plain)


def trace_path(store: Path, name: str, output: Path | None) -> Path:
    """The path of a trace's page: the given one, or one next to the store.

    Raises the same errors as `report_path`.
    """
    from unsilent.cli.paths import default_report_path, report_path

    if output is not None:
        if os.path.realpath(output) == os.path.realpath(default_report_path(store)):
            raise UsageError(f"{output} is the report of {store}; give another --output")
        return report_path(store, output)
    slug = re.sub(r"[^A-Za-z0-9.-]+", "-", name).strip("-")[:80]
    stem = f"{store.stem}-{slug}" if slug else store.stem
    return report_path(store.with_name(f"{stem}.trace.sqlite"), None)
