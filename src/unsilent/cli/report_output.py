"""Output of a report by any command: tables or JSON on stdout, and an HTML page."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unsilent.report.model import Report


def show_report(
    report: Report,
    page: Path | None,
    as_json: bool,
    plain: bool,
    files: Mapping[str, object] | None = None,
    *,
    canonical: bool = False,
    **more: Any,
) -> None:
    """Print a report, write its page if a path is given, and print the path.

    Args:
        files: Other files that were written, by the name shown in a terminal.
        canonical: Whether to leave out of the JSON object values that differ between two runs of the same campaign.
        more: Further fields of the JSON object.
    """
    if as_json:
        from unsilent.render.report_json import report_json, without_run_details

        result = report_json(report)
        values = without_run_details(result) if canonical else {**result, "report": page and str(page), **more}
        print(json.dumps(values, indent=2))
    else:
        print_report(report, plain)
    if page is not None:
        from unsilent.render.report_page import write_report

        write_report(report, page)
    if not as_json:
        for name, path in {"Report": page, **(files or {})}.items():
            if path:
                print(f"{'# ' if plain else ''}{name}: {path}")


def print_report(report: Report, plain: bool) -> None:
    """Print a report on stdout, as tables or plain columns."""
    from rich.console import Console

    from unsilent.render.report_terminal import render_report

    render_report(report, Console(), plain)
