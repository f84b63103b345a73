"""A PVF card in the terminal."""

from __future__ import annotations

from collections.abc import Set
from typing import TYPE_CHECKING

from unsilent.render.console import print_columns, print_lines, print_table
from unsilent.report.estimates import limits_text
from unsilent.report.text import clean, counted, flips_count, share, shown
from unsilent.studies.card import Card, CardRow

if TYPE_CHECKING:
    from rich.console import Console

PLAIN = ("level", "target", "parent", "flips", "low%", "high%", "n", "silent")
AGAIN = "again: "
HASHES = ("weights", "inputs", "golden", "code", "components")
"""Fingerprints that are shown; the others are told as device, threads and versions."""


def render_card(card: Card, console: Console, plain: bool) -> None:
    """Write the card to the console."""
    rows = ordered(card)
    print_lines(console, header(card), plain, "bold")
    if plain:
        names = (*PLAIN[:4], f"{clean(card.measure).lower()}%", *PLAIN[4:])
        print_columns(console, names, [_plain(row) for row in rows])
    else:
        columns = ("flips", f"{clean(card.measure)} %", "interval %", "n", "silent")
        print_table(console, [row for row in rows if row.level != "layer"], columns, _cells)
        said = {(row.target, row.flips, row.estimate, row.n) for row in rows if row.level == "component"}
        layers = [row for row in rows if row.level == "layer" and _is_more(row, said)]
        if layers:
            print_table(console, layers, columns, _cells, "Layers")
    for line in footer(card):  # a command is copied, so it is one line
        print_lines(console, [line], plain, whole=line.startswith(AGAIN))


def ordered(card: Card) -> list[CardRow]:
    """Components, the model, layers; each target with its numbers of flips ascending."""
    levels = {"component": 0, "model": 1, "layer": 2}
    place = {key: i for i, key in enumerate(dict.fromkeys((row.level, row.parent, row.target) for row in card.rows))}
    return sorted(
        card.rows, key=lambda row: (levels[row.level], place[row.level, row.parent, row.target], row.flips or 0)
    )


def _is_more(row: CardRow, said: Set[tuple[object, ...]]) -> bool:
    """Whether a layer is not just a component of one layer again."""
    return row.target != row.parent or (row.target, row.flips, row.estimate, row.n) not in said


def header(card: Card) -> list[str]:
    """What was measured."""
    spec, at = card.spec, clean(" ".join(card.spec.at))
    trials = f"{card.trials:,} trials on {counted(card.samples, 'sample')} in {counted(card.batches, 'batch')}"
    return [
        f"PVF card, version {card.version}: {clean(spec.workload)}",
        f"{clean(card.measure)} of {clean(spec.fault)} at {at}, per {clean(spec.per)}; {trials}",
        f"unit {clean(card.unit)}, judge {clean(card.judge)}, law {clean(spec.law)}, seed {spec.seed}",
    ]


def footer(card: Card) -> list[str]:
    """How to measure it again, and what limits it."""
    prints = ", ".join(f"{key} {clean(card.fingerprint[key])}" for key in HASHES if key in card.fingerprint)
    versions = ", ".join(f"{clean(name)} {clean(version)}" for name, version in card.versions.items())
    return [
        f"{limits_text(card.rows, card.confidence)}, n counts faults",
        f"{AGAIN}{clean(card.command)}",
        f"campaign {clean(card.campaign)}; {prints}",
        f"{clean(card.device)}, {clean(card.dtype)}, {counted(card.threads, 'thread')}; {versions}",
        *(f"note: {clean(note)}" for note in card.notes),
        f"checksum holds: {clean(card.sha256)}",
    ]


def _cells(row: CardRow) -> list[str]:
    text = shown(row.estimate, row.low, row.high)
    return [flips_count(row.flips), text.estimate, text.limits, f"{row.n:,}", share(row.silent_share)]


def _plain(row: CardRow) -> list[str]:
    text = shown(row.estimate, row.low, row.high)
    names = [row.level, clean(row.target), clean(row.parent), flips_count(row.flips)]
    return [*names, text.estimate, text.low, text.high, str(row.n), share(row.silent_share)]
