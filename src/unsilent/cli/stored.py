"""Verbs on a stored campaign: ``report``, ``replay``, ``export``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Optional

import typer

from unsilent.cli import options as o


def report(
    store: o.StoreFile,
    unit: o.Unit = None,
    confidence: o.Confidence = 0.95,
    interval: o.Interval = "wilson",
    fit_per_bit: o.FitPerBit = None,
    html: o.Html = None,
    as_json: o.Json = False,
    plain: o.Plain = False,
) -> int:
    """Show a stored campaign again: table and HTML report, in any unit and at any confidence."""
    from unsilent.campaigns import Store
    from unsilent.cli.pvf import report_path, show
    from unsilent.report.fit import check_rate
    from unsilent.studies.analysis import analyse
    from unsilent.studies.tallies import Question

    page = report_path(store, html)
    question = Question.asked(unit, confidence, interval)
    with Store(store) as opened:
        if fit_per_bit is not None:
            check_rate(fit_per_bit, opened.spec.transient)
        result = analyse(opened, question)
    show(result, page, as_json=as_json, plain=plain, fit_per_bit=fit_per_bit)
    if not as_json:
        print(f"\n{'# ' if plain else ''}Report: {page}")
    return 0


def replay(
    store: o.StoreFile,
    trial: Annotated[str, typer.Argument(help="Which one, like top_mlp/x8/17.", show_default=False)],
    workload: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            help="The workload, if it is code of your own: a store may name any file, so none is run unasked."
        ),
    ] = None,
    as_json: o.Json = False,
) -> int:
    """Run one stored trial again and check that it ends the same; exit 1 when it does not."""
    from unsilent.campaigns import Store, TrialId
    from unsilent.campaigns.replay import replay_trial

    with Store(store) as opened:
        again = replay_trial(opened, TrialId.parse(trial), workload)
    if as_json:
        print(json.dumps(again.to_json(), indent=2))
    else:
        print(again)
    return 0 if again.same else 1


def export(
    store: o.StoreFile,
    to: Annotated[
        Path | None,
        typer.Option(
            "--to", help="File; .csv, .json, .jsonl or .parquet says the format.", show_default="JSON lines on stdout"
        ),
    ] = None,
    canonical: Annotated[
        bool, typer.Option("--canonical", help="For comparison: sorted, without time, path, host and worker.")
    ] = False,
) -> int:
    """Export every trial of a campaign."""
    from unsilent.campaigns import Store
    from unsilent.campaigns.export import export_store

    with Store(store) as opened:
        export_store(opened, to, canonical=canonical)
    return 0
