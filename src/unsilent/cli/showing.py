"""What ``unsilent report`` does beside showing one store: two stores compared, cards written and shown."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from unsilent.cli.paths import report_beside, report_path
from unsilent.errors import UsageError

if TYPE_CHECKING:
    from unsilent.outcomes.tallies import Question


CARDS = (
    "{0} is a card, it holds no trials to compare; two cards of one campaign are the same file, else run the command that "
    "`unsilent report {0}` shows on each and compare the stores"
)


def show_store(
    store: Path, other: Path | None, choices: Mapping[str, object], html: Path | None, as_json: bool, plain: bool
) -> None:
    """Print what a store of any kind holds, or how ``other`` differs from it, and write the page."""
    from unsilent.campaigns.store import open_store
    from unsilent.cli.reporting import show_report
    from unsilent.studies.registered import kind_of

    kind = kind_of(store)
    if other is None:
        page = report_path(store, html)
        with open_store(store, kind) as opened:
            report = kind.report(kind.analyse(opened, **choices))
    elif kind.compare is None:
        raise UsageError(f"{store} is a store of unsilent {kind.name}, whose stores are not compared")
    else:
        page = comparison_path(store, other, html)
        with open_store(store, kind) as one, open_store(other, kind) as two:
            report = kind.compare(one, two, **choices)
    show_report(report, page, as_json, plain)


def comparison_path(store: Path, other: Path, html: Path | None) -> Path:
    """Where a comparison goes: as asked, else ``A-vs-B.html`` beside A; raises ``UsageError`` as `report_path` does."""
    if html is None:
        return report_path(store.with_name(f"{store.stem}-vs-{other.stem}.sqlite"), None)
    report_path(other, html)
    return report_path(store, html)


def card_paths(store: Path, card: Path) -> tuple[Path, Path]:
    """Where a card and its page go; checked before anything is read.

    Raises ``UsageError`` for a name that does not end in ``.json``, the store itself or its report, a folder that is not
    there, or a page of somebody else in the way.
    """
    from unsilent.render.pages import is_ours

    if card.suffix != ".json":
        raise UsageError(
            f"--card is {str(card)!r}; expected a name that ends in .json (the page beside it ends in .card.html)"
        )
    page = card.with_name(f"{card.stem.removesuffix('.card')}.card.html")
    if os.path.realpath(page) == os.path.realpath(report_beside(store)):
        raise UsageError(f"the card's page and the report of {store} would both be {page}; give another --card")
    if os.path.realpath(store) in (os.path.realpath(card), os.path.realpath(page)):
        raise UsageError(f"the card would overwrite the store {store}; give another --card")
    if not card.parent.is_dir() or card.is_dir() or page.is_dir():
        raise UsageError(f"cannot write the card {card}: no such folder, or it is one; give another --card")
    if page.exists() and not is_ours(page):
        raise UsageError(f"{page} is there and is no page of ours; give another --card")
    return card, page


def write_card(store: Path, question: Question, card: Path, page: Path) -> None:
    """Write a card and its page."""
    from unsilent.render.pages import write_file
    from unsilent.render.report_page import write_report
    from unsilent.studies.pvf.card import card_text, make_card, report
    from unsilent.studies.pvf.kind import PvfStore

    with PvfStore(store) as opened:
        made = make_card(opened, question)
    write_file(card_text(made).encode(), card, "the card")
    write_report(report(made), page)


def show_card(path: Path, as_json: bool, plain: bool) -> None:
    """Print a card that somebody shared."""
    from unsilent.cli.reporting import print_report
    from unsilent.studies.pvf.card import card_json, read_card, report

    card = read_card(path)
    if as_json:
        print(json.dumps(card_json(card), indent=2))
    else:
        print_report(report(card), plain)
