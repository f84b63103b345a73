"""A report as every command shows it: tables, plain columns or JSON on stdout, and the page."""

from __future__ import annotations

import json
from pathlib import Path

from unsilent.report.model import Report


def show_report(report: Report, page: Path, as_json: bool, plain: bool) -> None:
    """Print the report and write its page; JSON names the page as well."""
    from unsilent.render.report_page import write_report

    if as_json:
        from unsilent.render.report_json import report_json

        print(json.dumps({**report_json(report), "report": str(page)}, indent=2))
    else:
        from rich.console import Console

        from unsilent.render.report_terminal import render_report

        render_report(report, Console(), plain)
    write_report(report, page)
