"""``unsilent report``: a stored campaign again, two stores compared, or a card."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from unsilent.cli import options as o
from unsilent.cli.card import CARDS, card_paths, show_card, write_card
from unsilent.cli.paths import report_path
from unsilent.errors import UsageError
from unsilent.report.model import Report

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
            "--card", help="Write a card to share instead of the page: STORE.card.json, and STORE.card.html next to it."
        ),
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            *o.OUTPUT_FLAGS, help="Where the page, or the card, is written.", show_default="next to the store"
        ),
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
    from unsilent.cli.reporting import show_report
    from unsilent.studies.pvf.card import is_card
    from unsilent.studies.pvf.kind import PVF
    from unsilent.studies.registered import kind_of

    if not as_json:
        o.refuse(context, ("canonical",), "only --json has that")
    if is_card(store):
        if other is not None:
            raise UsageError(CARDS.format(store))
        o.refuse(context, OF_STORES, "a card is shown as it is, it holds no trials")
        show_card(store, as_json, plain)
        return 0
    if other is not None and is_card(other):
        raise UsageError(CARDS.format(other))
    kind = kind_of(store)
    known = (*kind.choices, *kind.report_choices, *(("card",) if kind is PVF else ()))
    o.refuse(context, [name for name in OF_PVF if name not in known], "that belongs to stores of unsilent pvf")
    if other is not None:
        o.refuse(context, ("card", *kind.report_choices), "two stores are compared")
    given = {"unit": unit, "confidence": confidence, "interval": interval, "fit_per_bit": fit_per_bit}
    made = card_paths(store, output) if card else None
    page = None if card else page_path(store, other, output)
    result = report_of(store, other, given, canonical)
    if made:
        write_card(store, {name: given[name] for name in kind.choices}, *made)
    files = dict(zip(("Card", "Page"), made or (), strict=False))
    show_report(result, page, as_json, plain, files, canonical=canonical)
    return 0


def report_of(store: Path, other: Path | None, given: Mapping[str, Any], canonical: bool) -> Report:
    """What a store of any kind holds, or how ``other`` differs from it.

    Args:
        given: choices, of which each kind takes its own. canonical: without the folders of files.
    """
    from unsilent.campaigns.store import open_store
    from unsilent.studies.registered import kind_of

    kind = kind_of(store)
    choices = {name: given[name] for name in kind.choices if name in given}
    with open_store(store, kind, canonical=canonical) as one:
        if other is None:
            shown = {name: given[name] for name in kind.report_choices}
            return kind.report(kind.analyse(one, **choices), **shown)
        if kind.compare is None:
            raise UsageError(f"{store} is a store of unsilent {kind.name}, whose stores are not compared")
        with open_store(other, kind, canonical=canonical) as two:
            return kind.compare(one, two, **choices)


def page_path(store: Path, other: Path | None, output: Path | None) -> Path:
    """Where the page goes: as asked, else beside the store, as ``A-vs-B.html`` for two; raises as `report_path` does."""
    if other is None:
        return report_path(store, output)
    if output is None:
        return report_path(store.with_name(f"{store.stem}-vs-{other.stem}.sqlite"), None)
    report_path(other, output)
    return report_path(store, output)
