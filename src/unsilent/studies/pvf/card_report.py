"""The report of a card: its numbers, and all that is needed to measure them again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from unsilent.interval import Interval
from unsilent.report.estimates import limits_text, share_cells
from unsilent.report.model import Column, Report, Row, Section, Shown, Table
from unsilent.report.text import counted, flips_count, flips_text, share, shown
from unsilent.studies.pvf.card import SCHEMA, Card, CardRow

HASHES = ("weights", "inputs", "golden", "code", "components")
"""Fingerprints that are shown; the others are the device, threads and versions."""
POINT = "Point at a row for its size and method."
METHOD = (
    "With the same files, versions and kind of device, that {} makes the same campaign, and unsilent report STORE --card "
    "-o FILE.json the same card, byte for byte, where it is read in the same unit and at the same confidence."
)


def report(card: Card) -> Report:
    """All that is shown of a card."""
    spec, rows = card.spec, ordered(card)
    trials = f"{counted(card.trials, 'trial')} on {counted(card.samples, 'sample')} in {counted(card.batches, 'batch')}"
    most = max((row.high for row in rows), default=0.0) or 1.0
    said = {(row.target, row.flips, row.estimate, row.n) for row in rows if row.level == "component"}
    # A component that is one layer has no row for that layer.
    layers = [
        r
        for r in rows
        if r.level == "layer" and (r.target != r.parent or (r.target, r.flips, r.estimate, r.n) not in said)
    ]
    lead = (
        f"How often an output is wrong, given a fault there ({limits_text(rows, card.confidence)}); n counts faults. "
    )
    lead += f"Bars go from the lower to the upper limit, on a scale from 0 to {100 * most:.3g} %. {POINT}"
    found, known = [_table(card, most, [row for row in rows if row.level != "layer"])], tuple(facts(card))
    again = Table(
        (Column(""), Column("", left=True)),
        tuple(map(Row, known)),
        "to measure it again",
        on_page=False,
        sentence="{0}: {1}",
    )
    return Report(
        schema=SCHEMA,
        kicker="A measurement to share",
        title=f"PVF card of {spec.workload}",
        headline=f"{card.measure} of {spec.workload}: {spec.fault} at {' '.join(spec.at)}, per {spec.per}; {trials}",
        estimates=_estimates(rows, card.confidence),
        numbers=tuple(numbers(card)),
        findings=card.notes,
        sections=(
            Section(card.measure, lead, (*found, *([_table(card, most, layers, "Layers")] if layers else []))),
            Section("To measure it again", "", (again,)),
        ),
        facts=known,
        notes=(
            f"{limits_text(card.rows, card.confidence)}, n counts faults",
            f"PVF card, version {card.version}, whose checksum holds: {card.sha256}",
        ),
        again=card.command,
        method=METHOD.format("command" if card.command.startswith("unsilent ") else "Python call"),
    )


def ordered(card: Card) -> list[CardRow]:
    """Components, the model, layers; each target with its numbers of flips ascending."""
    levels = ("component", "model", "layer")
    place = {key: i for i, key in enumerate(dict.fromkeys((row.level, row.parent, row.target) for row in card.rows))}
    return sorted(card.rows, key=lambda r: (levels.index(r.level), place[r.level, r.parent, r.target], r.flips or 0))


def _estimates(rows: Sequence[CardRow], confidence: float) -> Table:
    names = ("level", "target", "parent", "flips", "", "silent")
    columns = tuple(Column(name, "text" if name else "estimate") for name in names)
    values = [Interval(r.estimate, r.low, r.high, confidence, r.n, r.method) for r in rows]
    cells = [
        (r.level, r.target, r.parent, r.flips, value, r.silent_share) for r, value in zip(rows, values, strict=True)
    ]
    return Table(columns, tuple(map(Row, cells)))


def _table(card: Card, most: float, rows: Sequence[CardRow], title: str = "") -> Table:
    heads = ("target", "part of", "flips", f"{card.measure} %", "interval %", "n", "silent")
    columns = [Column(head, left=head == "part of", priority=int(head == "part of")) for head in heads]
    without = 0 if title else 1  # only layers are part of something
    lines = []
    for row in rows:
        value, limits = share_cells(row)
        numbers = value, replace(limits, bar=(row.low / most, row.high / most)), row.n
        cells = (row.target, row.parent, Shown(flips_count(row.flips), row.flips), *numbers, share(row.silent_share))
        hint = f"{counted(row.elements, 'element')}, {counted(row.bits, 'bit')}; {row.method}"
        lines.append(Row((cells[0], *cells[1 + without :]), row.level == "model", hint))
    return Table(
        (columns[0], *columns[1 + without :]), tuple(lines), title, terminal_rows=len(lines), long=len(lines) > 12
    )


def numbers(card: Card) -> Iterator[tuple[str, str, str]]:
    """The few numbers at the head of the page: term, text, and what is set smaller."""
    for row in card.rows:
        if row.level == "model":
            text = shown(row.estimate, row.low, row.high)
            where = "" if row.flips is None else f", {flips_text(row.flips)}"
            value = text.estimate if row.estimate is None else f"{text.estimate} %"
            yield f"{card.measure}{where}", value, text.limits if row.estimate else ""
    yield "faults tried", f"{card.trials:,}", ""
    if accuracy := accuracy_text(card.info):
        yield "fault-free", accuracy, ""


def facts(card: Card) -> Iterator[tuple[str, str]]:
    """All that makes this measurement this one, as pairs of term and text."""
    spec = card.spec
    yield "read as", f"unit {card.unit}, judge {card.judge}, law {spec.law}, seed {spec.seed}"
    yield "campaign", card.campaign
    options = ", ".join(f"{key}={value}" for key, value in spec.options)
    asked = {"options": options, "data": spec.data, "weights": spec.weights, "faults": spec.faults}
    yield from ((name, value) for name, value in asked.items() if value)
    yield from ((f"fingerprint of {key}", card.fingerprint[key]) for key in HASHES if key in card.fingerprint)
    yield "device", f"{card.device}, {card.dtype}, {counted(card.threads, 'thread')}"
    yield "versions", ", ".join(f"{name} {version}" for name, version in card.versions.items())
    accuracy = accuracy_text(card.info)
    yield from ((key, str(value)) for key, value in card.info.items() if key != "accuracy" or not accuracy)


def accuracy_text(info: Mapping[str, Any]) -> str:
    """``accuracy 0.95``, where the workload states it as a number or as ``{"name": …, "value": …}``."""
    found = info.get("accuracy")
    name, value = (
        (found.get("name", "accuracy"), found.get("value")) if isinstance(found, Mapping) else ("accuracy", found)
    )
    return "" if value is None else f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
