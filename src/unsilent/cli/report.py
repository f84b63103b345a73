"""``unsilent report``: a stored campaign again, two stores compared, or a card."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from unsilent.cli import typer_options as o
from unsilent.cli.card import CARDS, card_paths, show_card, write_card
from unsilent.cli.paths import report_path, writable_page
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
        Path | None,
        typer.Argument(
            metavar="OTHER", help="A second store (B), to be compared with the first (A).", show_default=False
        ),
    ] = None,
    unit: o.Unit = None,
    confidence: o.Confidence = 0.95,
    interval: o.Interval = "clopper-pearson",
    fit_per_bit: o.FitPerBit = None,
    card: Annotated[
        bool,
        typer.Option(
            "--card",
            help="Instead of the report page, write a card to share: STORE.card.json and STORE.card.html.",
        ),
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            *o.OUTPUT_FLAGS,
            help="Path of the report page or card to write. [default: next to the store]",
            show_default=False,
        ),
    ] = None,
    canonical: Annotated[
        bool,
        typer.Option(
            "--canonical", help="With --json: leave out time, paths and versions, so that two reports can be compared."
        ),
    ] = False,
    as_json: o.Json = False,
    plain: o.Plain = False,
) -> int:
    """Show the results of a stored campaign as a table and an HTML report, in any unit and at any confidence.

    With two stores: show how their results differ. With a card: check its checksum and show its content.
    """
    from unsilent.cli.report_output import show_report
    from unsilent.studies.campaign_kinds import kind_of_store
    from unsilent.studies.pvf.card import is_card
    from unsilent.studies.pvf.kind import PVF

    if not as_json:
        o.reject_if_given(context, ("canonical",), "only used with --json")
    if is_card(store):
        if other is not None:
            raise UsageError(CARDS.format(store))
        o.reject_if_given(context, OF_STORES, "a card contains no trials, so its numbers cannot be computed again")
        show_card(store, as_json, plain)
        return 0
    if other is not None and is_card(other):
        raise UsageError(CARDS.format(other))
    kind = kind_of_store(store)
    known = (*kind.analysis_option_names, *kind.report_choices, *(("card",) if kind is PVF else ()))
    o.reject_if_given(
        context, [name for name in OF_PVF if name not in known], "only available for stores of unsilent pvf"
    )
    if other is not None:
        o.reject_if_given(context, ("card", *kind.report_choices), "not available when two stores are compared")
    given = {"unit": unit, "confidence": confidence, "interval": interval, "fit_per_bit": fit_per_bit}
    made = card_paths(store, output) if card else None
    page = None if card else writable_page(page_path(store, other, output), output)
    result = report_of(store, other, given, canonical)
    if made:
        write_card(store, {name: given[name] for name in kind.analysis_option_names}, *made)
    files = dict(zip(("Card", "Page"), made or (), strict=False))
    show_report(result, page, as_json, plain, files, canonical=canonical)
    return 0


def report_of(store: Path, other: Path | None, given: Mapping[str, Any], canonical: bool) -> Report:
    """What a store of any kind holds, or how ``other`` differs from it.

    Args:
        given: Choices, of which each kind takes its own.
        canonical: Without the folders of files.
    """
    from unsilent.campaigns.store import open_store
    from unsilent.studies.campaign_kinds import kind_of_store

    kind = kind_of_store(store)
    choices = {name: given[name] for name in kind.analysis_option_names if name in given}
    with open_store(store, kind, canonical=canonical) as one:
        if other is None:
            shown = {name: given[name] for name in kind.report_choices}
            return kind.report(kind.analyse(one, **choices), **shown)
        if kind.compare is None:
            raise UsageError(f"stores of unsilent {kind.name}, like {store}, cannot be compared; give one store")
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
