"""Compares the failure rates of memories in two campaigns.

P(incorrect) of such campaigns counts only events that come through the protection, so it does not show the effect of protection.
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
    """The FIT of one kind (silent, detectable or incorrect) of one row in both campaigns."""

    level: str
    name: str
    kind: str
    a: Interval
    b: Interval
    difference: Interval
    """B - A."""

    @property
    def direction(self) -> str:
        """Whether the FIT ``rises`` or ``falls`` from A to B; empty if no difference is shown."""
        return "rises" if self.difference.low > 0 else "falls" if self.difference.high < 0 else ""


def compared_fits(a: Sequence[MemoryFitRow], b: Sequence[MemoryFitRow]) -> tuple[ComparedFit, ...]:
    """The FIT of all rows that both campaigns have, compared."""
    known = {(row.level, row.name): row for row in b}
    pairs = [(row, known[row.level, row.name]) for row in a if row.level in LEVELS and (row.level, row.name) in known]
    result = []
    for row_a, row_b in pairs:
        for kind in KINDS:
            mine, theirs = getattr(row_a, kind), getattr(row_b, kind)
            result.append(ComparedFit(row_a.level, row_a.name, kind, mine, theirs, difference(theirs, mine)))
    return tuple(result)


def fit_difference_headline(fits: Sequence[ComparedFit]) -> str:
    """Sentences on the silent and the detectable FIT of the model in A and B."""
    return " ".join(_sentence(fit) for fit in fits if fit.level == "model" and fit.kind != "incorrect")


def _sentence(fit: ComparedFit) -> str:
    a, b = (rate_text(rate).in_sentence for rate in (fit.a, fit.b))
    what = f"{fit.kind} FIT of the model"
    apart = f"difference {signed(fit.difference, 1.0).in_sentence}"
    if fit.direction:
        return f"{what[:1].upper()}{what[1:]} {fit.direction} from {a} to {b}, {apart}."
    return f"No difference is shown in {what}: A {a}, B {b}, {apart}."


def missing_fit_text(a: Sequence[MemoryFitRow], b: Sequence[MemoryFitRow]) -> Iterator[str]:
    """Sentences on the memories that only one of the campaigns has."""
    mine, theirs = ({row.name for row in rows if row.level == "memory"} for rows in (a, b))
    for side, names in (("A", mine - theirs), ("B", theirs - mine)):
        if names and mine and theirs:
            yield f"memories only in {side}: {listed(sorted(map(escape_unprintable, names)))}"


def fit_difference_numbers(fits: Sequence[ComparedFit]) -> Iterator[tuple[str, str, str]]:
    """Key numbers on the FIT of the model, for the head of the page: term, value and small text."""
    for fit in fits:
        if fit.level == "model" and fit.kind != "incorrect":
            for name, text in (
                ("A", rate_text(fit.a)),
                ("B", rate_text(fit.b)),
                ("B − A", signed(fit.difference, 1.0)),
            ):
                yield f"{fit.kind} FIT, {name}", text.estimate, text.limits


def fit_difference_section(fits: Sequence[ComparedFit]) -> Section:
    """The section with a table for each kind of FIT."""
    heads = columns(
        "level", "of", "FIT A", "interval", "FIT B", "interval ", "B - A", "interval  ", left=("level", "of")
    )
    tables = []
    for kind in KINDS:
        rows = tuple(_row(fit) for fit in fits if fit.kind == kind)
        tables.append(Table(heads, rows, f"{kind[:1].upper()}{kind[1:]} FIT", terminal_rows=len(rows), sortable=True))
    return Section("Difference of failure rates of memories (FIT)", LEAD, tuple(tables))


def _row(fit: ComparedFit) -> TableRow:
    cells = [escape_unprintable(fit.level), escape_unprintable(fit.name)]
    texts = (rate_text(fit.a), fit.a), (rate_text(fit.b), fit.b), (signed(fit.difference, 1.0), fit.difference)
    numbers = [cell for text, interval in texts for cell in _cells(text, interval)]
    hint = f"A {fit.a.n:,} faults, B {fit.b.n:,} faults"
    return TableRow((*cells, *numbers), fit.level == "model", hint)


def _cells(text: EstimateText, interval: Interval) -> tuple[TextCell, TextCell]:
    return TextCell(text.estimate, interval.estimate or 0.0), TextCell(text.limits, interval.high)


def fit_difference_estimates(fits: Sequence[ComparedFit]) -> Iterator[Estimate]:
    """The differences of FIT as machine-readable estimates."""
    for fit in fits:
        keys = {"level": fit.level, "target": fit.name, "measure": f"{fit.kind} FIT"}
        further = {
            "a": fit.a.estimate, "a_low": fit.a.low, "a_high": fit.a.high,
            "b": fit.b.estimate, "b_low": fit.b.low, "b_high": fit.b.high,
        }  # fmt: skip
        yield Estimate(keys, fit.difference, further=further)
