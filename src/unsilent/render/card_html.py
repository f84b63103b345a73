"""A PVF card as one small self-contained HTML file, without scripts of others: to be put beside the JSON."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from unsilent.render.card_terminal import HASHES, header, ordered
from unsilent.render.pages import Cell, Line, render_page, write_page
from unsilent.report.estimates import limits_text
from unsilent.report.text import clean, counted, flips_count, flips_text, share, shown
from unsilent.studies.card import Card, CardRow
from unsilent.studies.pvf_report.sentences import accuracy_text

TEMPLATE = "card.html.jinja"


def write_card_page(card: Card, path: str | os.PathLike[str]) -> Path:
    """Write the page to ``path`` (replacing it in one step) and return the path; raises ``UsageError``."""
    return write_page(render_card_html(card), path)


def render_card_html(card: Card) -> str:
    """The whole page as text."""
    return render_page(TEMPLATE, page(card), {})


def page(card: Card) -> dict[str, Any]:
    """Everything the template shows."""
    _, what, how = header(card)
    most = max((row.high for row in card.rows), default=0.0) or 1.0
    return {
        "card": card,
        "what": what,
        "how": how,
        "numbers": numbers(card),
        "limits": limits_text(card.rows, card.confidence),
        "rows": [_line(row, most) for row in ordered(card)],
        "most": f"{100 * most:.3g}",
        "is_command": card.command.startswith("unsilent "),
        "facts": facts(card),
        "footer": clean(card.versions.get("unsilent", "")),
    }


def numbers(card: Card) -> list[tuple[str, str, str]]:
    """The few numbers at the head of the page: term, text, and what is set smaller."""
    found = []
    for row in card.rows:
        if row.level == "model":
            text = shown(row.estimate, row.low, row.high)
            value = text.estimate if row.estimate is None else f"{text.estimate} %"
            where = "" if row.flips is None else f", {flips_text(row.flips)}"
            found.append((f"{clean(card.measure)}{where}", value, text.limits if row.estimate else ""))
    found.append(("faults tried", f"{card.trials:,}", ""))
    accuracy = accuracy_text(card.info)
    return [*found, ("fault-free", accuracy, "")] if accuracy else found


def facts(card: Card) -> list[tuple[str, str]]:
    """All that makes this measurement this one, as pairs of term and text."""
    versions = ", ".join(f"{clean(name)} {clean(version)}" for name, version in card.versions.items())
    options = ", ".join(f"{clean(key)}={clean(value)}" for key, value in card.spec.options)
    asked = [
        ("options", options),
        ("data", card.spec.data),
        ("weights", card.spec.weights),
        ("faults", card.spec.faults),
    ]
    return [
        ("campaign", clean(card.campaign)),
        *((name, clean(value)) for name, value in asked if value),
        *((f"fingerprint of {key}", clean(card.fingerprint[key])) for key in HASHES if key in card.fingerprint),
        ("device", f"{clean(card.device)}, {clean(card.dtype)}, {counted(card.threads, 'thread')}"),
        ("versions", versions),
        *(
            (clean(key), clean(value))
            for key, value in card.info.items()
            if key != "accuracy" or not accuracy_text(card.info)
        ),
    ]


def _line(row: CardRow, most: float) -> Line:
    text = shown(row.estimate, row.low, row.high)
    told = (
        clean(row.parent),
        flips_count(row.flips),
        text.estimate,
        text.limits,
        f"{row.n:,}",
        share(row.silent_share),
    )
    title = f"{counted(row.elements, 'element')}, {counted(row.bits, 'bit')}; {clean(row.method)}"
    return Line(clean(row.target), row.level, tuple(map(Cell, told)), (row.low / most, row.high / most), title)
