"""A report as every command shows it: tables, plain columns or JSON on stdout, and the page."""

from __future__ import annotations

import json
from pathlib import Path

from unsilent.report.model import Report


def show_report(report: Report, page: Path | None, as_json: bool, plain: bool) -> None:
    """Print the report and write its page, where it has one; JSON names the page as well."""
    if as_json:
        from unsilent.render.report_json import report_json

        print(json.dumps(report_json(report) | ({} if page is None else {"report": str(page)}), indent=2))
    else:
        print_report(report, plain)
    if page is not None:
        from unsilent.render.report_page import write_report

        write_report(report, page)


def print_report(report: Report, plain: bool) -> None:
    """The report on stdout, as tables or plain columns."""
    from rich.console import Console

    from unsilent.render.report_terminal import render_report

    render_report(report, Console(), plain)
