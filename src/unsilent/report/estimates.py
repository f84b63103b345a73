"""Estimates as reports show them: the record, its tables and texts, and what limits are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from unsilent.basics.interval import PART_OF_LIST, Interval
from unsilent.report import text
from unsilent.report.model import Cell, Column, Table, TextCell
from unsilent.report.text import EstimateWithLimits

NO_ESTIMATE_KEY = -9.0
"""Number by which a cell without an estimate is sorted: below every share and every difference."""
FEW_TRIALS = 20
"""With fewer trials an estimate says too little to be listed among the highest ones: such rows come last."""


class LimitsWithMethod(EstimateWithLimits, Protocol):
    """An estimate with limits that also says how they were made."""

    @property
    def method(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number that a study estimated, with what it is of.

    Attributes:
        keys: Subject of the estimate, by name: columns of the table for machines, fields of ``results`` of JSON.
        interval: The number with the limits that hold for it alone, their confidence and method; n.
        unit: Unit that n counts, like ``sample``; empty where the report says it.
        joint: Limits that hold for it and others together; None where there are none.
        further: Further facts, by name, like counts of outcomes.
    """

    keys: Mapping[str, Cell]
    interval: Interval
    unit: str = ""
    joint: Interval | None = None
    further: Mapping[str, Cell] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """The subject of the estimate in words: the values of its keys."""
        return [str(value) for value in self.keys.values() if value not in ("", None)]

    @property
    def row(self) -> dict[str, Cell]:
        """All fields by name; the interval has no name, as its fields have their own."""
        unit = {"unit": self.unit} if self.unit else {}
        joint = {"joint_low": self.joint.low, "joint_high": self.joint.high} if self.joint else {}
        return {**self.keys, "": self.interval, **unit, **joint, **self.further}


def measured(keys: Mapping[str, Cell], measures: Mapping[str, Interval], unit: str = "") -> list[Estimate]:
    """Estimates of several measures of one thing: its keys and, as a further one, the name of the measure."""
    return [Estimate({**keys, "measure": name}, interval, unit) for name, interval in measures.items()]


def machine_table(estimates: Iterable[Estimate], names: Sequence[str]) -> Table:
    """The table for machines, a row for each estimate.

    ``names`` are the columns of plain mode, in their order and whatever rows there are; the interval is the one without a
    name. What else an estimate has (its unit, joint limits, further facts) is in ``results`` of JSON alone.
    """
    rows = [estimate.row for estimate in estimates]
    every = dict.fromkeys([*names, *(name for row in rows for name in row)])
    return Table.of(rows, [Column(n, "text" if n else "estimate", priority=n not in names) for n in every])


def rows_across(estimates: Iterable[Estimate], across: str) -> list[dict[str, Cell]]:
    """Estimates that differ in the key ``across`` alone as one row: the other keys, and intervals by the values of that one."""
    rows: dict[tuple[tuple[str, Cell], ...], dict[str, Cell]] = {}
    for estimate in estimates:
        other_keys = {name: value for name, value in estimate.keys.items() if name != across}
        row, name = rows.setdefault(tuple(other_keys.items()), other_keys), str(estimate.keys[across])
        if name in row:
            raise ValueError(f"two estimates of {', '.join(estimate.names)}")
        row[name] = estimate.interval
    return list(rows.values())


def is_exact(row: EstimateWithLimits) -> bool:
    """Whether every fault there is was tried, so that nothing is estimated."""
    return row.estimate is not None and row.low == row.high


def has_few_trials(row: EstimateWithLimits, trials: int) -> bool:
    """Whether the estimate is from fewer than `FEW_TRIALS` trials and not exact."""
    return trials < FEW_TRIALS and not is_exact(row)


def has_list_bounds(row: LimitsWithMethod) -> bool:
    """Whether the limits are what the rest of a list could make of the row, not an interval."""
    return not is_exact(row) and row.method.endswith(PART_OF_LIST)


def has_any_interval(rows: Iterable[LimitsWithMethod]) -> bool:
    """Whether any row has an interval."""
    return not all(is_exact(row) or has_list_bounds(row) for row in rows)


def limits_text(rows: Iterable[LimitsWithMethod], confidence: float) -> str:
    """Kind of the limits of these rows: intervals, bounds, or none because rows are exact."""
    rows = list(rows)
    exact, bounded = sum(map(is_exact, rows)), sum(map(has_list_bounds, rows))
    parts = [f"{100 * confidence:g} % intervals"] if has_any_interval(rows) or not rows else []
    parts += ["for partly run fault lists, bounds that allow any outcome of the remaining faults"] if bounded else []
    if exact == len(rows) > 0:
        parts.append("all rows are exact, because every fault was tried")
    elif exact:
        parts.append("rows are exact where every fault was tried")
    return "; ".join(parts)


def estimate_cells(texts: text.EstimateText, row: EstimateWithLimits) -> tuple[TextCell, TextCell]:
    """Estimate and limits as two cells; no limits where nothing was tried."""
    limits = "–" if texts.estimate == text.NO_TRIAL else texts.limits
    key = NO_ESTIMATE_KEY if row.estimate is None else row.estimate
    return TextCell(texts.estimate, key), TextCell(limits, row.high)


def share_cells(row: EstimateWithLimits) -> tuple[TextCell, TextCell]:
    """`cells` of a share, in percent."""
    return estimate_cells(text.estimate_text(row), row)
