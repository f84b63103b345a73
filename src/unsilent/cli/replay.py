"""``unsilent replay``: one stored trial again, and how its fault spread."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from unsilent.cli import options as o
from unsilent.errors import UsageError

if TYPE_CHECKING:
    from unsilent.campaigns.replay import Replay
    from unsilent.report.trace_info import TraceInfo

OF_TRACES = ("batch", "html", "plain")
"""Parameters that mean nothing without --trace."""


def replay(
    context: typer.Context,
    store: o.StoreFile,
    trial: Annotated[str, typer.Argument(help="Which one, like top_mlp/x8/17.", show_default=False)],
    workload: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            help="The workload, if it is code of your own: a store may name any file, so none is run unasked."
        ),
    ] = None,
    trace: Annotated[
        bool,
        typer.Option("--trace", help="Show how the fault spread: every operation of one batch beside the golden run."),
    ] = False,
    batch: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="The batch to trace, from 0.", show_default="the first whose output changed"),
    ] = None,
    html: o.Html = None,
    as_json: o.Json = False,
    plain: o.Plain = False,
) -> int:
    """Run one stored trial again and check that it ends the same; exit 1 when it does not."""
    if not trace:
        o.refuse(context, OF_TRACES, "only --trace has that")
    return replay_stored(store, trial, workload, trace, batch, html, as_json, plain)


def replay_stored(
    store: Path,
    trial: str,
    workload: str | None,
    trace: bool,
    batch: int | None,
    html: Path | None,
    as_json: bool,
    plain: bool,
) -> int:
    """A trial of a campaign."""
    from unsilent.campaigns import Store, TrialId
    from unsilent.campaigns.replay import replay_trial

    number = TrialId.parse(trial)
    page = trace_path(store, str(number), html) if trace else None
    with Store(store) as opened:
        again = replay_trial(opened, number, workload, trace=trace, batch=batch)
        info = _info(opened, again)
    if as_json:
        print(json.dumps(again.to_json() | ({} if page is None else {"report": str(page)}), indent=2))
    else:
        print("\n".join(f"{'# ' if plain else ''}{line}" for line in str(again).splitlines()))
    if info is not None and page is not None:
        show_trace(info, page, as_json, plain)
    return 0 if again.same else 1


def show_trace(info: TraceInfo, page: Path, as_json: bool, plain: bool) -> None:
    """The table of a trace (unless JSON says all) and its page."""
    from unsilent.report.trace_html import write_trace

    if not as_json:
        from rich.console import Console

        from unsilent.report.trace_terminal import render_trace

        print("#" if plain else "")
        render_trace(info, Console(), plain)
    write_trace(info, page)
    if not as_json:
        print(f"\n{'# ' if plain else ''}Report: {page}")


def trace_path(store: Path, name: str, html: Path | None) -> Path:
    """Where the page of a trace goes: as asked, else beside the store; raises ``UsageError`` as `report_path` does."""
    from unsilent.cli.pvf import report_beside, report_path

    if html is not None:
        if html.resolve() == report_beside(store).resolve():
            raise UsageError(f"{html} is the report of {store}; give another --html")
        return report_path(store, html)
    slug = re.sub(r"[^A-Za-z0-9.-]+", "-", name).strip("-")[:80]
    return report_path(store.with_name(f"{store.stem}-{slug}.trace.sqlite"), None)


def _info(store: object, again: Replay) -> TraceInfo | None:
    from unsilent.campaigns import Store
    from unsilent.report.text import counted
    from unsilent.report.trace_info import TraceInfo

    if again.trace is None:
        return None
    assert isinstance(store, Store)
    spec, found = store.spec, store.description
    trial, samples = str(again.stored.trial), found.samples[again.batch or 0]
    facts = (
        ("workload", spec.workload),
        ("store", str(store.path)),
        ("trial", trial),
        ("batch", f"{again.batch} of {counted(len(found.samples), 'batch')}, {counted(samples, 'sample')}"),
        ("ended", again.ended),
        ("versions", ", ".join(f"{name} {version}" for name, version in found.versions.items())),
    )
    return TraceInfo(again.trace, f"how the fault of {trial} spreads: batch {again.batch} of {spec.workload}", facts)
