"""Reading, writing and printing of result cards, for ``unsilent report``."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unsilent.basics.errors import UsageError
from unsilent.basics.options import Request
from unsilent.cli.paths import default_report_path


def card_paths(store: Path, output: Path | None) -> tuple[Path, Path]:
    """The paths of a card and its page: the given path, or one next to the store.

    Raises ``UsageError`` if the name does not end in ``.json`` or is the store itself or its report, the folder does not exist,
    or a page of another origin already exists.
    """
    from unsilent.render.pages import is_unsilent_page

    card = output or store.with_suffix(".card.json")
    if card.suffix != ".json":
        name = "a name that ends in .json (an HTML page gets the same name with .card.html)"
        raise UsageError(f"--output is {str(card)!r}; expected {name}")
    page = card.with_name(f"{card.stem.removesuffix('.card')}.card.html")
    if os.path.realpath(page) == os.path.realpath(default_report_path(store)):
        raise UsageError(
            f"the card's page and the report of {store} would both be written to {page}; give another --output"
        )
    if os.path.realpath(store) in (os.path.realpath(card), os.path.realpath(page)):
        raise UsageError(f"the card would overwrite the store {store}; give another --output")
    if not card.parent.is_dir() or card.is_dir() or page.is_dir():
        raise UsageError(
            f"cannot write the card {card}: its folder does not exist, or a folder has that name; give another --output"
        )
    if page.exists() and not is_unsilent_page(page):
        raise UsageError(f"{page} exists and is not an Unsilent page; give another --output")
    return card, page


def write_card(store: Path, question: Mapping[str, Any], card: Path, page: Path) -> None:
    """Write a card and its page.

    ``question`` are the fields of a `Question`.
    """
    from unsilent.outcomes.tallies import PvfEstimator
    from unsilent.render.pages import write_file
    from unsilent.render.report_page import write_report
    from unsilent.studies.pvf.card import card_text, make_card, report
    from unsilent.studies.pvf.kind import PvfStore

    with PvfStore(store) as opened:
        pvf_card = make_card(opened, PvfEstimator(**question))
    write_file(card_text(pvf_card).encode(), card, "the card")
    write_report(report(pvf_card), page)


def take_card(request: Request, path: Path) -> None:
    """Use the options in a card as defaults for a command, and find the card's files by their content.

    Raises ``UsageError`` for commands other than ``unsilent pvf``, as only this one has ``--find``, and if files are not found.
    """
    from unsilent.studies.pvf.card import read_card
    from unsilent.studies.pvf.card_files import card_options

    if "find" not in request.options:
        raise UsageError(f"{path} is a card of unsilent pvf; give it to unsilent pvf --config {path} --find DIR")
    folder = request.value("find")
    if folder is not None and not folder.is_dir():
        raise UsageError(f"--find is {str(folder)!r}; expected a folder")
    for name, text in card_options(read_card(path), str(path), folder, request.given_values).items():
        if name not in request.given_values:
            request.given_values[name] = request.options[name].parse_value(text, request.options[name].flag)


def show_card(path: Path, as_json: bool, plain: bool) -> None:
    """Print a card."""
    from unsilent.cli.report_output import print_report
    from unsilent.studies.pvf.card import card_json, read_card, report

    card = read_card(path)
    if as_json:
        print(json.dumps(card_json(card), indent=2))
    else:
        print_report(report(card), plain)
