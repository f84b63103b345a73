"""What each figure shows, as plain values: pure functions of a `PvfResult`, tested without any plotting
library.

Invariants: nothing with trials is dropped silently (what is left out is counted in ``left_out`` or named in
``missing``); an estimate of zero stays a point, marked as an upper limit; no data is None, never zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from unsilent.interval import PART
from unsilent.studies.pvf.records import HeatMap, PvfResult, PvfRow

SERIES = 8
"""Lines that one figure can tell apart."""
BARS = 40
"""Bars that one figure can hold."""
EVERYTHING = "param:*"
"""Where faults fall unless it is said: every parameter of the model."""
PLACES = {
    EVERYTHING: "the parameters",
    "op:*": "the outputs of operations",
    "input:*": "the inputs",
    "kv:*": "the key/value cache",
}
"""Addresses that select all of a kind, in words."""
OUTCOMES = ("masked", "benign", "sdc", "due")
LEVELS = ("component", "layer", "tensor")


@dataclass(frozen=True, slots=True)
class Series:
    """One target at its numbers of flips, ascending; rows without a trial are not in it."""

    name: str
    level: str
    rows: tuple[PvfRow, ...]


@dataclass(frozen=True, slots=True)
class Curves:
    """PVF against the number of flips; the model is the last series."""

    series: tuple[Series, ...]
    level: str
    flips: tuple[int | None, ...]
    left_out: int
    missing: tuple[str, ...]

    @property
    def drawn(self) -> int:
        """Series beside the model."""
        return sum(s.level != "model" for s in self.series)

    @property
    def against_flips(self) -> bool:
        """Whether there is anything to draw along the axis of flips."""
        return len([f for f in self.flips if f is not None]) > 1


@dataclass(frozen=True, slots=True)
class Split:
    """Units of one target at one number of flips by how they ended: shares weighted by the law, or counts."""

    target: str
    flips: int | None
    counts: dict[str, float]

    @property
    def total(self) -> float:
        """All units judged."""
        return sum(self.counts.values())


@dataclass(frozen=True, slots=True)
class Heat:
    """Layer x bit of one dtype, the highest bit first, with the runs of columns that belong to one field."""

    dtype: str
    trials: int
    layers: tuple[str, ...]
    bits: tuple[int, ...]
    fields: tuple[tuple[str, int, int], ...]
    """Name, first and last column of each run."""
    estimate: tuple[tuple[float | None, ...], ...]
    n: tuple[tuple[int, ...], ...]

    @property
    def peak(self) -> float:
        """The largest estimate; 0 where no fault mattered."""
        return max((v for row in self.estimate for v in row if v is not None), default=0.0)


def main_level(result: PvfResult) -> str:
    """The level that figures compare: components, else layers, else tensors; ``model`` where there is nothing else."""
    present = {row.level for row in result.rows}
    return next((level for level in LEVELS if level in present), "model")


def rows_of(result: PvfResult, level: str) -> list[PvfRow]:
    """The rows of one level: targets in the order of the result, each with its numbers of flips ascending."""
    rows = [row for row in result.rows if row.level == level]
    place = {name: i for i, name in enumerate(dict.fromkeys(row.target for row in rows))}
    return sorted(rows, key=lambda row: (place[row.target], row.flips is None, row.flips or 0))


def first_flips(rows: Sequence[PvfRow]) -> int | None:
    """The number of flips a single sentence is about: 1 where tried, else the smallest, None for a rate."""
    known = {row.flips for row in rows if row.flips is not None}
    return (1 if 1 in known else min(known)) if known else None


def rank(row: PvfRow) -> tuple[float, float]:
    """Sort key: vulnerability; no estimate counts as lowest, ties go by the upper limit."""
    return (-1.0 if row.estimate is None else row.estimate, row.high)


def pooled(result: PvfResult) -> bool:
    """Whether a row sums up several targets or strata: its counts are plain sums, its shares weighted by the law."""
    return (
        result.spec.get("strata", "none") != "none"
        or len({row.target for row in rows_of(result, main_level(result))}) > 1
    )


class Limited(Protocol):
    """What every row has whose limits are told."""

    @property
    def estimate(self) -> float | None: ...
    @property
    def low(self) -> float: ...
    @property
    def high(self) -> float: ...
    @property
    def method(self) -> str: ...


def is_exact(row: Limited) -> bool:
    """Whether every fault there is was tried, so that nothing is estimated."""
    return row.estimate is not None and row.low == row.high


def is_bounded(row: Limited) -> bool:
    """Whether the limits are what the rest of a list could make of the row, not an interval."""
    return not is_exact(row) and row.method.endswith(PART)


def is_drawn(rows: Iterable[Limited]) -> bool:
    """Whether any row has an interval."""
    return not all(is_exact(row) or is_bounded(row) for row in rows)


def limits_text(rows: Iterable[Limited], confidence: float) -> str:
    """What the limits of these rows are: intervals, bounds, or none because rows are exact."""
    rows = list(rows)
    exact, bounded = sum(map(is_exact, rows)), sum(map(is_bounded, rows))
    told = [f"{100 * confidence:g} % intervals"] if is_drawn(rows) or not rows else []
    told += ["bounds: what the other faults of the list could make of it"] if bounded else []
    if exact:
        told.append(
            "rows are exact: every fault was tried" if exact == len(rows) else "exact where every fault was tried"
        )
    return "; ".join(told)


def bars_text(rows: Iterable[Limited], confidence: float) -> str:
    """`limits_text` as a sentence of a page, about bars where there are any."""
    rows = list(rows)
    told = limits_text(rows, confidence)
    return f"Bars are {told}." if not rows or not all(map(is_exact, rows)) else f"{told[:1].upper()}{told[1:]}."


def itself(result: PvfResult) -> frozenset[str]:
    """Components with layers beside one of their own name, which is what happens in the component itself."""
    layers = [(row.target, row.parent) for row in result.rows if row.level == "layer"]
    others = {parent for target, parent in layers if target != parent}
    return frozenset(target for target, parent in layers if target == parent and parent in others)


def name_of(row: PvfRow, own: frozenset[str]) -> str:
    """The target's name, told apart from its component's; ``own`` is what `itself` found."""
    return f"{row.target} (itself)" if row.level == "layer" and row.target == row.parent in own else row.target


def curves(result: PvfResult) -> Curves:
    """Series of the main level (the `SERIES` - 1 most vulnerable ones) and of the model."""
    level = main_level(result)
    named = _series(rows_of(result, level)) if level != "model" else []
    missing = sorted({row.target for row in rows_of(result, level) if row.estimate is None})
    ranked = sorted(named, key=lambda s: max(rank(row) for row in s.rows), reverse=True)[: SERIES - 1]
    kept = [s for s in named if s in ranked] + _series(rows_of(result, "model"))
    seen = {row.flips for s in kept for row in s.rows}
    order = sorted(f for f in seen if f is not None) + ([None] if None in seen else [])
    return Curves(tuple(kept), level, tuple(order), len(named) - len(ranked), tuple(missing))


def split_rows(result: PvfResult) -> tuple[list[PvfRow], int]:
    """The rows of the main level whose outcomes are drawn (at most `BARS`, the most vulnerable), and how many are not.

    The model is left out where its parts are shown: its counts pool strata that were not sampled in
    proportion.
    """
    rows = [row for row in rows_of(result, main_level(result)) if row.units > 0]
    least = sorted(map(rank, rows), reverse=True)[:BARS][-1:]
    kept = [row for row in rows if rank(row) >= least[0]][:BARS]
    return kept, len(rows) - len(kept)


def outcome_split(result: PvfResult) -> tuple[Split, ...]:
    """Masked, benign, silent and detectable units of each row drawn."""
    rows, _ = split_rows(result)

    def parts(row: PvfRow) -> dict[str, float]:
        if not row.mix:
            return {k: float(getattr(row, k)) for k in OUTCOMES}
        due = sum(row.mix[k] for k in row.due_kinds)
        return {**{k: row.mix[k] for k in OUTCOMES if k != "due"}, "due": due}

    return tuple(Split(r.target, r.flips, parts(r)) for r in rows)


def due_split(result: PvfResult) -> tuple[Split, ...]:
    """Incorrect units only: silent against each kind of detectable error; rows without one are left out."""
    rows = [r for r in split_rows(result)[0] if r.sdc + r.due > 0]
    kinds = list(dict.fromkeys(kind for r in rows for kind in r.due_kinds))
    return tuple(
        Split(
            r.target, r.flips, {k: float((r.mix or {"sdc": r.sdc, **r.due_kinds}).get(k, 0)) for k in ("sdc", *kinds)}
        )
        for r in rows
    )


def heat(heat_map: HeatMap) -> Heat:
    """The heat map in reading order: sign bit on the left, as a number is written."""
    order = sorted(range(len(heat_map.bits)), key=lambda i: -heat_map.bits[i])
    bits = tuple(heat_map.bits[i] for i in order)
    runs: list[tuple[str, int, int]] = []
    for column, bit in enumerate(bits):
        name = heat_map.fields.get(bit, "")
        if runs and runs[-1][0] == name:
            runs[-1] = (name, runs[-1][1], column)
        else:
            runs.append((name, column, column))
    return Heat(
        heat_map.dtype,
        heat_map.trials,
        heat_map.layers,
        bits,
        tuple(runs),
        tuple(tuple(row[i] for i in order) for row in heat_map.estimate),
        tuple(tuple(row[i] for i in order) for row in heat_map.n),
    )


def heats(result: PvfResult) -> tuple[Heat, ...]:
    """The heat maps that have something to show."""
    return tuple(heat(found) for found in result.heat_maps if found.layers and found.bits)


def _series(rows: Sequence[PvfRow]) -> list[Series]:
    found: dict[str, list[PvfRow]] = {}
    for row in rows:
        if row.estimate is not None:
            found.setdefault(row.target, []).append(row)
    return [Series(name, group[0].level, tuple(group)) for name, group in found.items()]
