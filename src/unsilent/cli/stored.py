"""Verbs on a stored campaign: ``report``, ``export``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from unsilent.cli import options as o
from unsilent.errors import UsageError

OF_STORES = ("unit", "confidence", "interval", "fit_per_bit", "card", "output", "canonical")
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
        bool,
        typer.Option(
            "--card", help="Write a card to share instead of the page: STORE.card.json, and STORE.card.html beside it."
        ),
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(*o.OUTPUT_FLAGS, help="Where the page, or the card, is written.", show_default="beside the store"),
    ] = None,
    canonical: Annotated[
        bool, typer.Option("--canonical", help="With --json: for comparison, without time, paths and versions.")
    ] = False,
    as_json: o.Json = False,
    plain: o.Plain = False,
) -> int:
    """Show a stored campaign again: table and HTML report, in any unit and at any confidence.

    With two stores: what differs between them. With a card: what it says, once its checksum holds.
    """
    from unsilent.cli import showing
    from unsilent.cli.reporting import show_report
    from unsilent.studies.pvf.card import is_card
    from unsilent.studies.pvf.kind import PVF
    from unsilent.studies.registered import kind_of

    if not as_json:
        o.refuse(context, ("canonical",), "only --json has that")
    if is_card(store):
        if other is not None:
            raise UsageError(showing.CARDS.format(store))
        o.refuse(context, OF_STORES, "a card is shown as it is, it holds no trials")
        showing.show_card(store, as_json, plain)
        return 0
    if other is not None and is_card(other):
        raise UsageError(showing.CARDS.format(other))
    kind = kind_of(store)
    known = (*kind.choices, *kind.report_choices, *(("card",) if kind is PVF else ()))
    o.refuse(context, [name for name in OF_PVF if name not in known], "that belongs to stores of unsilent pvf")
    if other is not None:
        o.refuse(context, ("card", *kind.report_choices), "two stores are compared")
    given = {"unit": unit, "confidence": confidence, "interval": interval, "fit_per_bit": fit_per_bit}
    made = showing.card_paths(store, output) if card else None
    page = None if card else showing.page_path(store, other, output)
    found = showing.report_of(store, other, given, canonical)
    if made:
        showing.write_card(store, {name: given[name] for name in kind.choices}, *made)
    files = dict(zip(("Card", "Page"), made or (), strict=False))
    show_report(found, page, as_json, plain, files, canonical=canonical)
    return 0


def export(
    store: o.StoreFile,
    output: Annotated[
        Path | None,
        typer.Option(
            *o.OUTPUT_FLAGS,
            help="File; .csv, .json, .jsonl or .parquet says the format.",
            show_default="JSON lines on stdout",
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
        export_store(opened, output, canonical=canonical)
    return 0
