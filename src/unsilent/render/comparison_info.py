"""What is shown of a comparison, as plain values and sentences: shared by terminal, HTML and JSON."""

from __future__ import annotations

from collections.abc import Sequence

from unsilent.render.headline import Part
from unsilent.render.info import EVERYTHING, first_flips, limits_text, main_level, rows_of
from unsilent.report.text import chance, clean, factor, flips_text, shown, signed
from unsilent.statistics import Interval
from unsilent.studies.pvf.comparison import ComparedRow, Comparison

NAMED = 4
"""Targets that a sentence names."""
TOP = 20
"""Layers and tensors that are shown where there are many."""


def rows_at(found: Comparison, level: str) -> list[ComparedRow]:
    """The rows of one level: targets in the order of A, each with its numbers of flips ascending."""
    place = {id(row): i for i, row in enumerate(rows_of(found.a, level))}
    return sorted((row for row in found.rows if row.level == level), key=lambda row: place[id(row.a)])


def top_rows(found: Comparison, repeats: bool = False) -> tuple[list[ComparedRow], int]:
    """The `TOP` layer and tensor rows that are least like chance, grouped by component, and how many rows are left.

    A component that is one layer of the same name and numbers is said already, unless ``repeats``.
    """
    said = set() if repeats else {_numbers(row) for row in rows_at(found, "component")}
    rows = [*rows_at(found, "layer"), *rows_at(found, "tensor")]
    rows = [row for row in rows if row.target != row.parent or _numbers(row) not in said]
    kept = sorted((row for row in rows if row.p is not None), key=surprise)[:TOP]
    groups = list(dict.fromkeys(row.parent for row in kept))
    return sorted(kept, key=lambda row: groups.index(row.parent)), len(rows) - len(kept) + len(rows_at(found, "bit"))


def surprise(row: ComparedRow) -> tuple[float, float]:
    """Sort key: what is least like chance first, among equals the greater difference."""
    return 1.0 if row.p is None else row.p, -abs(row.difference.estimate or 0.0)


def verdict(row: ComparedRow) -> str:
    """What B is against A: ``higher``, ``lower``, or nothing where no difference is shown."""
    if not row.differs:
        return ""
    return "higher" if (row.difference.estimate or 0.0) > 0 else "lower"


def cells(row: ComparedRow) -> list[str]:
    """A row as text: both estimates in percent, difference in points, ratio, p after correction, verdict."""
    apart = signed(row.difference.estimate, row.difference.low, row.difference.high)
    times = factor(row.ratio.estimate, row.ratio.low, row.ratio.high)
    both = [shown(r.estimate, r.low, r.high).estimate for r in (row.a, row.b)]
    return [*both, apart.estimate, apart.limits, times.estimate, times.limits, chance(row.adjusted), verdict(row)]


def headline(found: Comparison) -> tuple[Part, ...]:
    """The finding for all that was struck; names are parts of their own."""
    if found.identical:
        return (Part("Every trial of A and B is the same: all differences are 0."),)
    model = rows_at(found, "model")
    first = [row for row in model if row.flips == first_flips([row.a for row in model]) and row.p is not None]
    return _whole(found, first[0]) if first else (Part("Nothing was struck in both A and B."),)


def second_line(found: Comparison) -> tuple[Part, ...]:
    """Which rows of the main level differ; nothing where that is said already."""
    level = main_level(found.a)
    rows = [row for row in rows_at(found, level) if row.p is not None and level != "model"]
    if found.identical or not rows:
        return ()
    apart = sorted((row for row in rows if row.differs), key=surprise)
    start = f"After correction, {len(apart):,} of {len(rows):,} {level} rows differ"
    if not apart:
        return (Part(f"{start}."),)
    parts = [Part(f"{start} (points): ")]
    for number, row in enumerate(apart[:NAMED]):
        parts += [Part(", ")] if number else []
        points = signed(row.difference.estimate, row.difference.low, row.difference.high).estimate
        parts += [Part(clean(row.target), True), Part(f"{_flips(row.flips)} {points}")]
    more = f" and {len(apart) - NAMED:,} more" if len(apart) > NAMED else ""
    return (*parts, Part(f"{more}."))


def sentence(parts: Sequence[Part]) -> str:
    """Pieces as plain text, names in backquotes."""
    return "".join(f"`{part.text}`" if part.name else part.text for part in parts)


def how_many(found: Comparison) -> list[str]:
    """One line a level: how many of its rows differ after correction."""
    lines = []
    for level in dict.fromkeys(row.level for row in found.rows):
        rows = [row for row in found.rows if row.level == level and row.p is not None]
        if rows:
            lines.append(f"{level}: {sum(row.differs for row in rows):,} of {len(rows):,} rows differ")
    return lines


def pairing(found: Comparison) -> str:
    """Which rows rest on the same faults in both campaigns."""
    paired = sum(row.paired for row in found.rows)
    if not paired:
        return "no row is paired: A and B struck faults of their own"
    rows = "every row is" if paired == len(found.rows) else f"{paired:,} of {len(found.rows):,} rows are"
    return f"{rows} paired: the same faults struck A and B, and differences are taken trial by trial"


def limits(found: Comparison) -> str:
    """What the limits of the differences are."""
    rows = [(row.difference, row.method) for row in found.rows]
    told = [Interval(d.estimate, d.low, d.high, found.confidence, 0, method) for d, method in rows]
    return limits_text(told, found.confidence)


def missing(found: Comparison) -> list[str]:
    """Which rows only one of both has, one line a side."""
    lines = []
    for side, rows in (("A", found.only_a), ("B", found.only_b)):
        names = [f"{clean(row.target)} ({row.level}{_flips(row.flips)})" for row in rows]
        more = f" and {len(names) - NAMED:,} more" if len(names) > NAMED else ""
        if names:
            lines.append(f"only {side} has {', '.join(names[:NAMED])}{more}")
    return lines


def _whole(found: Comparison, row: ComparedRow) -> tuple[Part, ...]:
    where = "the whole model" if found.a.at == found.b.at == EVERYTHING else "all that was struck"
    where += "" if row.flips is None else f" at {flips_text(row.flips)}"
    a, b = (shown(r.estimate, r.low, r.high).estimate for r in (row.a, row.b))
    apart = signed(row.difference.estimate, row.difference.low, row.difference.high)
    points = f"{apart.estimate} points{apart.behind}"
    if row.differs:
        return (Part(f"{found.a.measure} of {where} is {verdict(row)} in B: {b} % against {a} %, {points}."),)
    return (Part(f"No difference is shown in {found.a.measure} of {where}: A {a} %, B {b} %, {points}."),)


def _flips(flips: int | None) -> str:
    return "" if flips is None else f" x{flips:,}"


def _numbers(row: ComparedRow) -> tuple[object, ...]:
    return row.target, row.flips, row.difference, row.ratio, row.a.n, row.b.n
