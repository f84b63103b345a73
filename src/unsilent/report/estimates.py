"""Estimates in reports: their record, and their tables and texts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from unsilent.basics.interval import PART_OF_LIST, Interval
from unsilent.report import text
from unsilent.report.model import Cell, Column, Table, TextCell
from unsilent.report.text import EstimateWithLimits

NO_ESTIMATE_KEY = -9.0
"""Sort key of a cell without an estimate, below every share and every difference."""
FEW_TRIALS = 20
"""Number of trials below which an estimate is too uncertain to be listed among the highest ones; such rows come last."""


class LimitsWithMethod(EstimateWithLimits, Protocol):
    """The interface of an estimate with limits and the method of the limits."""

    @property
    def method(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Estimate:
    """An estimated number with the names of its subject.

    Attributes:
        keys: Subject of the estimate, by name: columns of the machine-readable table, fields of ``results`` in JSON.
        interval: Estimate with its individual limits, their confidence and method, and n.
        unit: Unit that n counts, like ``sample``; empty if the report names it.
        joint: Joint limits with other estimates; None if there are none.
        further: Further facts by name, like counts of outcomes.
    """

    keys: Mapping[str, Cell]
    interval: Interval
    unit: str = ""
    joint: Interval | None = None
    further: Mapping[str, Cell] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """The values of the keys, as words that name the subject of the estimate."""
        return [str(value) for value in self.keys.values() if value not in ("", None)]

    @property
    def row(self) -> dict[str, Cell]:
        """All fields by name.

        The interval has an empty name, since its fields have names of their own.
        """
        unit = {"unit": self.unit} if self.unit else {}
        joint = {"joint_low": self.joint.low, "joint_high": self.joint.high} if self.joint else {}
        return {**self.keys, "": self.interval, **unit, **joint, **self.further}


def measured(keys: Mapping[str, Cell], measures: Mapping[str, Interval], unit: str = "") -> list[Estimate]:
    """Estimates of several measures of one subject.

    Each has the subject's keys and the key ``measure``.
    """
    return [Estimate({**keys, "measure": name}, interval, unit) for name, interval in measures.items()]


def machine_table(estimates: Iterable[Estimate], names: Sequence[str]) -> Table:
    """A machine-readable table with a row for each estimate.

    ``names`` are the columns of plain mode in order, whatever the rows; an empty name stands for the interval. Other facts of
    an estimate (unit, joint limits, further facts) are only in ``results`` of the JSON object.
    """
    rows = [estimate.row for estimate in estimates]
    every = dict.fromkeys([*names, *(name for row in rows for name in row)])
    return Table.of(rows, [Column(n, "text" if n else "estimate", priority=n not in names) for n in every])


def rows_across(estimates: Iterable[Estimate], across: str) -> list[dict[str, Cell]]:
    """Rows that each combine the estimates that differ only in the key ``across``.

    A row has the other keys, and an interval for each value of ``across``.
    """
    rows: dict[tuple[tuple[str, Cell], ...], dict[str, Cell]] = {}
    for estimate in estimates:
        other_keys = {name: value for name, value in estimate.keys.items() if name != across}
        row, name = rows.setdefault(tuple(other_keys.items()), other_keys), str(estimate.keys[across])
        if name in row:
            raise ValueError(f"two estimates of {', '.join(estimate.names)}")
        row[name] = estimate.interval
    return list(rows.values())


def is_exact(row: EstimateWithLimits) -> bool:
    """Whether every possible fault was tried, so that the value is exact."""
    return row.estimate is not None and row.low == row.high


def has_few_trials(row: EstimateWithLimits, trials: int) -> bool:
    """Whether an estimate has fewer than `FEW_TRIALS` trials and is not exact."""
    return trials < FEW_TRIALS and not is_exact(row)


def has_list_bounds(row: LimitsWithMethod) -> bool:
    """Whether the limits are bounds for a partly run fault list instead of an interval."""
    return not is_exact(row) and row.method.endswith(PART_OF_LIST)


def has_any_interval(rows: Iterable[LimitsWithMethod]) -> bool:
    """Whether any row has an interval."""
    return not all(is_exact(row) or has_list_bounds(row) for row in rows)


def limits_text(rows: Iterable[LimitsWithMethod], confidence: float) -> str:
    """A text on the sort of limits in these rows: intervals, bounds or exact values."""
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
    """Two table cells for an estimate and its limits, without limits if nothing was tried."""
    limits = "–" if texts.estimate == text.NO_TRIAL else texts.limits
    key = NO_ESTIMATE_KEY if row.estimate is None else row.estimate
    return TextCell(texts.estimate, key), TextCell(limits, row.high)


def share_cells(row: EstimateWithLimits) -> tuple[TextCell, TextCell]:
    """Two table cells for a share in percent and its limits."""
    return estimate_cells(text.estimate_text(row), row)
