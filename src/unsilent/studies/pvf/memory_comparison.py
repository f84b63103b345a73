"""Failure rates of memories in two campaigns: the difference B - A of their FIT, its section, sentences and numbers.

P(incorrect) of such campaigns is of the events that come through the protection alone, so it does not say what protection does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from unsilent.basics.interval import Interval
from unsilent.report.estimates import Estimate
from unsilent.report.model import Section, Table, TableRow, TextCell, columns
from unsilent.report.text import EstimateText, escape_unprintable, listed, rate_text, signed
from unsilent.statistics.comparing import difference
from unsilent.studies.pvf.memory_records import MemoryFitRow

LEVELS = ("memory", "component", "model")
KINDS = ("silent", "detectable", "incorrect")
FIT_DIFFERENCE_NAMES = ("level", "target", "measure", "a", "a_low", "a_high", "b", "b_low", "b_high", "")
LEAD = (
    "Failures in 10⁹ device hours (FIT) of B minus those of A. Silent: a call is incorrect and nothing reports it. Detectable: "
    "the memory reports an error, or the call ends with an error or a number that is not finite. Incorrect: "
    "silent calls, and those that end with an error; without what the memories report. Limits of a difference are computed from "
    "those of A and B, which are treated as independent (Zou and Donner 2008). They hold for each row alone."
)


@dataclass(frozen=True, slots=True)
class ComparedFit:
    """FIT of one kind (silent, detectable or incorrect) of the model, a memory or a component, in both campaigns."""

    level: str
    name: str
    kind: str
    a: Interval
    b: Interval
    difference: Interval
    """B - A."""

    @property
    def direction(self) -> str:
        """Whether it ``rises`` or ``falls`` from A to B; empty where the interval of the difference has 0 in it."""
        return "rises" if self.difference.low > 0 else "falls" if self.difference.high < 0 else ""


def compared_fits(a: Sequence[MemoryFitRow], b: Sequence[MemoryFitRow]) -> tuple[ComparedFit, ...]:
    """The rows that both campaigns have; empty where one of them has no memories."""
    known = {(row.level, row.name): row for row in b}
    pairs = [(row, known[row.level, row.name]) for row in a if row.level in LEVELS and (row.level, row.name) in known]
    result = []
    for one, other in pairs:
        for kind in KINDS:
            mine, theirs = getattr(one, kind), getattr(other, kind)
            result.append(ComparedFit(one.level, one.name, kind, mine, theirs, difference(theirs, mine)))
    return tuple(result)


def fit_difference_headline(fits: Sequence[ComparedFit]) -> str:
    """Silent and detectable FIT of the model in A and B, and the direction where one is shown."""
    return " ".join(_sentence(one) for one in fits if one.level == "model" and one.kind != "incorrect")


def _sentence(one: ComparedFit) -> str:
    a, b = (rate_text(rate).in_sentence for rate in (one.a, one.b))
    what = f"{one.kind} FIT of the model"
    apart = f"difference {signed(one.difference, 1.0).in_sentence}"
    if one.direction:
        return f"{what[:1].upper()}{what[1:]} {one.direction} from {a} to {b}, {apart}."
    return f"No difference is shown in {what}: A {a}, B {b}, {apart}."


def missing_fit_text(a: Sequence[MemoryFitRow], b: Sequence[MemoryFitRow]) -> Iterator[str]:
    """Which memories only one of two campaigns has."""
    mine, theirs = ({row.name for row in rows if row.level == "memory"} for rows in (a, b))
    for side, names in (("A", mine - theirs), ("B", theirs - mine)):
        if names and mine and theirs:
            yield f"memories only in {side}: {listed(sorted(map(escape_unprintable, names)))}"


def fit_difference_numbers(fits: Sequence[ComparedFit]) -> Iterator[tuple[str, str, str]]:
    """FIT of the model for the head of the page: term, text, and what is set smaller."""
    for one in fits:
        if one.level == "model" and one.kind != "incorrect":
            for name, text in (
                ("A", rate_text(one.a)),
                ("B", rate_text(one.b)),
                ("B − A", signed(one.difference, 1.0)),
            ):
                yield f"{one.kind} FIT, {name}", text.estimate, text.limits


def fit_difference_section(fits: Sequence[ComparedFit]) -> Section:
    """One table for each kind of FIT."""
    heads = columns(
        "level", "of", "FIT A", "interval", "FIT B", "interval ", "B - A", "interval  ", left=("level", "of")
    )
    tables = []
    for kind in KINDS:
        rows = tuple(_row(one) for one in fits if one.kind == kind)
        tables.append(Table(heads, rows, f"{kind[:1].upper()}{kind[1:]} FIT", terminal_rows=len(rows), sortable=True))
    return Section("Difference of failure rates of memories (FIT)", LEAD, tuple(tables))


def _row(one: ComparedFit) -> TableRow:
    cells = [escape_unprintable(one.level), escape_unprintable(one.name)]
    texts = (rate_text(one.a), one.a), (rate_text(one.b), one.b), (signed(one.difference, 1.0), one.difference)
    numbers = [cell for text, interval in texts for cell in _cells(text, interval)]
    hint = f"A {one.a.n:,} faults, B {one.b.n:,} faults"
    return TableRow((*cells, *numbers), one.level == "model", hint)


def _cells(text: EstimateText, interval: Interval) -> tuple[TextCell, TextCell]:
    return TextCell(text.estimate, interval.estimate or 0.0), TextCell(text.limits, interval.high)


def fit_difference_estimates(fits: Sequence[ComparedFit]) -> Iterator[Estimate]:
    """The differences, for machines, with both FIT."""
    for one in fits:
        keys = {"level": one.level, "target": one.name, "measure": f"{one.kind} FIT"}
        further = {
            "a": one.a.estimate, "a_low": one.a.low, "a_high": one.a.high,
            "b": one.b.estimate, "b_low": one.b.low, "b_high": one.b.high,
        }  # fmt: skip
        yield Estimate(keys, one.difference, further=further)
