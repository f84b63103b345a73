"""Verbs on a stored campaign: ``report``, ``export``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from unsilent.cli import options as o
from unsilent.errors import UsageError
from unsilent.studies.pvf.kind import PvfStore

OF_STORES = ("unit", "confidence", "interval", "fit_per_bit", "card", "html")
"""Parameters that mean nothing where a card is shown."""
OF_PVF = ("unit", "interval", "fit_per_bit", "card")
"""Parameters that mean nothing where another kind of campaign is shown."""


def report(
    context: typer.Context,
    store: o.StoreOrCard,
    other: Annotated[
        Path | None, typer.Argument(help="A second store: it is B, and compared with the first.", show_default=False)
    ] = None,
    unit: o.Unit = None,
    confidence: o.Confidence = 0.95,
    interval: o.Interval = "clopper-pearson",
    fit_per_bit: o.FitPerBit = None,
    card: Annotated[
        Path | None,
        typer.Option(
            "--card", help="Write a card to share instead of the report: FILE.json, and FILE.card.html beside it."
        ),
    ] = None,
    html: o.Html = None,
    as_json: o.Json = False,
    plain: o.Plain = False,
) -> int:
    """Show a stored campaign again: table and HTML report, in any unit and at any confidence.

    With two stores: what differs between them. With a card: what it says, once its checksum holds.
    """
    from unsilent.cli import showing
    from unsilent.cli.paths import report_path
    from unsilent.cli.reporting import show_report
    from unsilent.outcomes.tallies import Question
    from unsilent.studies.pvf.analysis import check_rate
    from unsilent.studies.pvf.card import is_card
    from unsilent.studies.pvf.kind import PVF
    from unsilent.studies.pvf.report import report as pvf_report
    from unsilent.studies.registered import kind_of

    if is_card(store):
        if other is not None:
            raise UsageError(showing.CARDS.format(store))
        o.refuse(context, OF_STORES, "a card is shown as it is, it holds no trials")
        showing.show_card(store, as_json, plain)
        return 0
    if other is not None and is_card(other):
        raise UsageError(showing.CARDS.format(other))
    kind = kind_of(store)
    if kind is not PVF:
        o.refuse(
            context, [name for name in OF_PVF if name not in kind.choices], "that belongs to stores of unsilent pvf"
        )
    elif other is not None:
        o.refuse(context, ("card", "fit_per_bit"), "two stores are compared")
    if kind is not PVF or other is not None:
        chosen = {"unit": unit, "confidence": confidence, "interval": interval}
        chosen = {name: value for name, value in chosen.items() if name in kind.choices}
        showing.show_store(store, other, chosen, html, as_json, plain)
        return 0
    question = Question(unit, confidence, interval)
    made = showing.card_paths(store, card) if card else None
    page = report_path(store, html) if html or not card else None
    if made and page and os.path.realpath(page) == os.path.realpath(made[1]):
        raise UsageError(f"the card's page and the report would both be {page}; give another --html")
    with PvfStore(store) as opened:
        if fit_per_bit is not None:
            check_rate(fit_per_bit, opened.spec.transient)
        result = PVF.analyse(opened, unit=unit, confidence=confidence, interval=interval)
    if made:
        showing.write_card(store, question, *made)
    show_report(
        pvf_report(result, fit_per_bit),
        page,
        as_json,
        plain,
        {"Card": card, "Page": made and made[1]},
        failed_assertions=[],
    )
    return 0


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
    from unsilent.campaigns.export import export_store
    from unsilent.campaigns.store import Store
    from unsilent.studies.registered import kind_of

    with Store(store, kind_of(store)) as opened:
        export_store(opened, to, canonical=canonical)
    return 0
