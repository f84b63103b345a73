"""What verbs that trace have in common: the table and the page of a trace."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from unsilent.errors import UsageError

if TYPE_CHECKING:
    from unsilent.render.trace_info import TraceInfo


def show_trace(info: TraceInfo, page: Path, as_json: bool, plain: bool) -> None:
    """The table of a trace (unless JSON says all) and its page."""
    from unsilent.render.trace_html import write_trace

    if not as_json:
        from rich.console import Console

        from unsilent.render.trace_terminal import render_trace

        print("#" if plain else "")
        render_trace(info, Console(), plain)
    write_trace(info, page)
    if not as_json:
        print(f"\n{'# ' if plain else ''}Report: {page}")


def trace_path(store: Path, name: str, html: Path | None) -> Path:
    """Where the page of a trace goes: as asked, else beside the store; raises ``UsageError`` as `report_path` does."""
    from unsilent.cli.paths import report_beside, report_path

    if html is not None:
        if os.path.realpath(html) == os.path.realpath(report_beside(store)):
            raise UsageError(f"{html} is the report of {store}; give another --html")
        return report_path(store, html)
    slug = re.sub(r"[^A-Za-z0-9.-]+", "-", name).strip("-")[:80]
    stem = f"{store.stem}-{slug}" if slug else store.stem
    return report_path(store.with_name(f"{stem}.trace.sqlite"), None)
