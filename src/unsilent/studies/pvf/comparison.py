"""Compares two stored campaigns row by row: differences and ratios with intervals.

Limits come from the limits of the two rows (`statistics.comparing`). If every trial of a row had the same fault in both
campaigns, they come from the differences trial by trial, which vary less. Tests of whether rows differ are corrected for the
number of rows of their level (Holm): the probability that any of the equal rows is called different is at most 1 - confidence.
"""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import xxhash

from unsilent.basics.errors import UsageError
from unsilent.basics.interval import PART_OF_LIST
from unsilent.campaigns.spec import differences as changed
from unsilent.campaigns.spec import spec_value_text
from unsilent.faults.fault_texts import without_folder
from unsilent.outcomes.tallies import PvfEstimator, StratifiedTrials
from unsilent.statistics import Interval
from unsilent.statistics.comparing import difference, holm, p_value, paired_strata, ratio
from unsilent.statistics.interim import confidence_at
from unsilent.studies.pvf.analysis import analyse, dtype_of, non_default_question_options
from unsilent.studies.pvf.kind import PvfStore
from unsilent.studies.pvf.memory_comparison import ComparedFit, compared_fits
from unsilent.studies.pvf.records import PvfResult, PvfRow
from unsilent.studies.pvf.row_scopes import (
    RowScope,
    StoredTrials,
    layer_groups,
    rows_by_layer,
    single_element_trials,
    target_groups,
)
from unsilent.studies.pvf.spec import PvfSpec, PvfTrialRow

RowKey = tuple[str, str, str, int | None]
LEAST_CONFIDENCE = 0.5
"""Least confidence of an interval; a p value above one half is therefore reported as 1."""


@dataclass(frozen=True, slots=True)
class ComparedRow:
    """The comparison of one target at one number of flips."""

    a: PvfRow
    b: PvfRow
    difference: Interval
    """B - A, from -1 to 1."""
    ratio: Interval
    """B / A; None if A is 0. The upper limit may be infinite.

    Limits are computed as if A and B were independent; for paired trials they are therefore wide."""
    p: float | None
    """p value of the hypothesis that A and B are equal; 1 if it is above 0.5, None if A or B has no estimate."""
    adjusted_p: float | None
    """p value after Holm's correction for all rows of this level."""
    differs: bool
    is_paired: bool
    """Whether both campaigns had the same faults, so that the difference is taken trial by trial."""
    method: str

    @property
    def level(self) -> str:
        """The level of the target."""
        return self.a.level

    @property
    def parent(self) -> str:
        """The target that this target belongs to."""
        return self.a.parent

    @property
    def target(self) -> str:
        """The name of the target."""
        return self.a.target

    @property
    def flips(self) -> int | None:
        """The number of faults drawn per trial."""
        return self.a.flips


@dataclass(frozen=True, slots=True)
class CampaignDifference:
    """A setting or fact that differs between two campaigns."""

    what: str
    a: str
    b: str


@dataclass(frozen=True, slots=True, repr=False)
class Comparison:
    """The comparison of two campaigns."""

    a: PvfResult
    b: PvfResult
    rows: tuple[ComparedRow, ...]
    changes: tuple[CampaignDifference, ...]
    only_a: tuple[PvfRow, ...]
    only_b: tuple[PvfRow, ...]
    """Rows that the other campaign lacks."""
    command: str
    identical: bool
    """Whether both have the same trials with the same outcomes, and the same rates of memories."""
    notes: tuple[str, ...] = ()
    fits: tuple[ComparedFit, ...] = ()
    """FIT of the model, the memories and the components, if both campaigns have memories."""

    @property
    def confidence(self) -> float:
        """The confidence of every interval.

        Rows of a level are called different with an error of at most one minus the confidence.
        """
        return self.a.confidence


def compare_campaigns(store_a: PvfStore, store_b: PvfStore, question: PvfEstimator) -> Comparison:
    """Compare two stores.

    Raises ``UsageError`` if their numbers have different meanings.
    """
    a, b = analyse(store_a, question), analyse(store_b, question)
    _check(a, b)
    question = replace(question, unit=a.unit)
    sides_a, sides_b = _sides(store_a, question), _sides(store_b, question)
    known_a, known_b = {row_key(r): r for r in a.rows}, {row_key(r): r for r in b.rows}
    shared = [key for key in known_a if key in known_b]
    rows = compared_rows([(known_a[k], known_b[k], sides_a[k], sides_b[k]) for k in shared], question)
    same = a.trials_done == b.trials_done and len(shared) == len(known_a) == len(known_b)
    same = same and a.trials_done > 0 and store_a.baseline.memory_parts == store_b.baseline.memory_parts
    identical = same and all(_same_outcomes(sides_a[k], sides_b[k]) for k in shared)
    command = shlex.join(["unsilent", "diff", a.store, b.store])
    options = non_default_question_options(question, PvfEstimator().with_default_unit(a.transient))
    return Comparison(
        a=a,
        b=b,
        rows=tuple(rows),
        changes=tuple(_changes(store_a, store_b)),
        only_a=tuple(r for k, r in known_a.items() if k not in known_b),
        only_b=tuple(r for k, r in known_b.items() if k not in known_a),
        command=" ".join([command, *options]),
        identical=identical,
        notes=tuple(_notes(a, b, identical)),
        fits=compared_fits(a.memory_fit, b.memory_fit),
    )


def compared_rows(
    rows: Sequence[tuple[PvfRow, PvfRow, RowTrials, RowTrials]], question: PvfEstimator
) -> list[ComparedRow]:
    """Compare each pair of rows, and correct the p values for the number of rows of a level."""
    result = [_compared_row(*row, question) for row in rows]
    levels: dict[str, dict[int, float]] = defaultdict(dict)
    for i, row in enumerate(result):
        if row.p is not None:
            levels[row.level][i] = row.p
    for values in levels.values():
        for i, adjusted in zip(values, holm(list(values.values())), strict=True):
            result[i] = replace(result[i], adjusted_p=adjusted, differs=adjusted < 1 - question.confidence)
    return result


def row_key(row: PvfRow) -> RowKey:
    """The key of a row: rows with equal keys are compared."""
    return row.level, row.parent, row.target, row.flips


# -- one row ---------------------------------------------------------------------------------------------------------


def _compared_row(
    a: PvfRow, b: PvfRow, trials_a: RowTrials, trials_b: RowTrials, question: PvfEstimator
) -> ComparedRow:
    interval_at = difference_by_confidence(trials_a, trials_b, question)
    apart = interval_at(question.confidence)
    p = None if apart.estimate is None else p_value(interval_at)
    exact = trials_a.sample.exhaustive_of if trials_b.sample.exhaustive_of else ""  # both tried every possible fault
    return ComparedRow(
        a=a,
        b=b,
        difference=apart,
        ratio=_combined_estimates(ratio, trials_a, trials_b, question),
        p=p,
        adjusted_p=p,
        differs=False,
        is_paired=same_faults(trials_a, trials_b),
        method=exact or apart.method,
    )


def difference_by_confidence(
    trials_a: RowTrials, trials_b: RowTrials, question: PvfEstimator
) -> Callable[[float], Interval]:
    """A function from confidence to the interval of the difference; paired if both have the same faults."""
    samples = trials_a.sample, trials_b.sample
    drawn = not any(sample.exhaustive_of or sample.not_run_counts for sample in samples)
    if drawn and same_faults(trials_a, trials_b):
        return _paired_intervals(*samples)

    def interval_at(confidence: float) -> Interval:
        return _combined_estimates(
            difference, trials_a, trials_b, replace(question, confidence=max(confidence, LEAST_CONFIDENCE))
        )

    return interval_at


def _combined_estimates(
    combine: Callable[[Interval, Interval], Interval], trials_a: RowTrials, trials_b: RowTrials, question: PvfEstimator
) -> Interval:
    """The difference or ratio of two estimates, B against A.

    If a list of faults was run in part, its limits are not statistical, so both ends are combined.
    """
    b, a = question.estimate(trials_b.sample), question.estimate(trials_a.sample)
    result = combine(b, a)
    if not (trials_a.sample.not_run_counts or trials_b.sample.not_run_counts):
        return result
    bounds = combine(replace(b, estimate=None), replace(a, estimate=None))
    return replace(bounds, estimate=result.estimate, method=f"{result.method}, {PART_OF_LIST}")


def _paired_intervals(sample_a: StratifiedTrials, sample_b: StratifiedTrials) -> Callable[[float], Interval]:
    whole = sum(s.share for s in sample_a.strata)
    pairs = zip(sample_a.strata, sample_b.strata, strict=True)
    strata = [
        (u.share / whole, v.tally.incorrect_share_per_trial - u.tally.incorrect_share_per_trial) for u, v in pairs
    ]
    looks = [sample.look_number for sample in (sample_a, sample_b) if sample.look_number is not None]

    def interval_at(confidence: float) -> Interval:
        level = max(confidence, LEAST_CONFIDENCE)
        return paired_strata(strata, confidence_at(max(looks), level) if looks else level)

    return interval_at


def same_faults(trials_a: RowTrials, trials_b: RowTrials) -> bool:
    """Whether both rows have the same faults in the same trials, with the same weights."""
    if (
        len(trials_a.sample.strata) != len(trials_b.sample.strata)
        or trials_a.sample.not_run_counts != trials_b.sample.not_run_counts
        or trials_a.trials != trials_b.trials
        or not all(trials_a.trials)
    ):
        return False
    mine, theirs = ([s.share for s in side.sample.strata] for side in (trials_a, trials_b))
    return bool(np.allclose(np.divide(mine, sum(mine)), np.divide(theirs, sum(theirs)), rtol=1e-12))


def _same_outcomes(trials_a: RowTrials, trials_b: RowTrials) -> bool:
    """Whether both rows have the same trials with the same outcomes."""
    pairs = zip(trials_a.sample.strata, trials_b.sample.strata, strict=False)
    return trials_a.trials == trials_b.trials and all(
        np.array_equal(u.tally.outcome_counts, v.tally.outcome_counts) for u, v in pairs
    )


# -- the trials behind a row -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RowTrials:
    """The trials behind a row: its strata, and a digest of each counted trial and its faults."""

    sample: StratifiedTrials
    trials: tuple[tuple[bytes, ...], ...]


def _sides(store: PvfStore, question: PvfEstimator) -> dict[RowKey, RowTrials]:
    """The trials behind each row of a store."""
    stored = StoredTrials(store, question.unit or "sample")
    groups = [g for flips in stored.spec.flips for g in target_groups(stored, flips)]
    sides = {
        _key_of_group(g): RowTrials(g.sample, tuple(_trials(_counting(stored, g, t.name)) for t in g.targets))
        for g in groups
    }
    if stored.spec.per == "component" and 1 in stored.spec.flips:
        rows = (row for (_, flips), mine in stored.rows.items() if flips == 1 for row in mine if stored.is_counted(row))
        hits = single_element_trials(rows, stored.description)
        fell = rows_by_layer(hits)
        for group in layer_groups(hits, stored):
            parts = (fell[group.parent, group.name][target.name] for target in group.targets)
            sides[_key_of_group(group)] = RowTrials(group.sample, tuple(map(_trials, parts)))
    return sides


def _counting(stored: StoredTrials, group: RowScope, stratum: str) -> list[PvfTrialRow]:
    rows = stored.rows.get((stratum, group.flips), [])
    plan = next((p for p in stored.plans.values() if stratum in p.pilot_trials and p.flips == group.flips), None)
    return rows if plan is None else [r for r in rows if plan.is_counted(r.trial, group.sample.look_number)]


def _trials(rows: Sequence[PvfTrialRow]) -> tuple[bytes, ...]:
    return tuple(xxhash.xxh3_128_digest(f"{row.trial}|{row.faults}".encode()) for row in rows)


def _key_of_group(group: RowScope) -> RowKey:
    return group.level, group.parent, group.name, group.flips


# -- required and optional agreement of two campaigns ----------------------------------------------------------------


def _check(a: PvfResult, b: PvfResult) -> None:
    """Raise ``UsageError`` if the numbers of two results have different meanings."""

    def said(result: PvfResult) -> dict[str, str]:
        flips = ",".join("as drawn" if f is None else str(f) for f in result.spec["flips"])
        corrupted = "values of a run" if result.transient else "parameters"
        return {
            "judge": result.judge, "unit": result.unit, "law": result.law, "per": result.per,
            "fault model": without_folder(result.fault), "flips": flips, "what is corrupted": corrupted,
        }  # fmt: skip

    mine, theirs = said(a), said(b)
    apart = [f"{key} is {mine[key]} in A and {theirs[key]} in B" for key in mine if mine[key] != theirs[key]]
    if apart:
        raise UsageError(
            f"{a.store} (A) and {b.store} (B) cannot be compared: {'; '.join(apart)}; "
            "expected two campaigns in which these are the same"
        )


FILES = {"weights": "file of weights", "data": "file of data"}
REFUSED = ("judge", "law", "per", "fault", "flips")


def _changes(store_a: PvfStore, store_b: PvfStore) -> list[CampaignDifference]:
    """Differences between two campaigns: in their settings, hashes and versions."""
    there, here = store_a.baseline, store_b.baseline
    by_name: dict[str, CampaignDifference] = {}
    for key, values in changed((store_a.spec, there), (store_b.spec, here)):
        name = FILES.get(key, key) if values else key
        if values:
            both = spec_value_text(PvfSpec, key, values[0]), spec_value_text(PvfSpec, key, values[1])
            if key == "dtype":
                both = _dtypes(store_a, store_b)
        else:
            both = _text(there.fingerprint.get(key)), _text(here.fingerprint.get(key))
        if key not in REFUSED:
            by_name.setdefault(name, CampaignDifference(name, *both))
    for key in {**there.versions, **here.versions}:
        a, b = there.versions.get(key), here.versions.get(key)
        if a != b:
            by_name.setdefault(key, CampaignDifference(key, _text(a), _text(b)))
    return list(by_name.values())


def _dtypes(store_a: PvfStore, store_b: PvfStore) -> tuple[str, str]:
    """The dtypes of two campaigns: those in use if they differ, otherwise the requested ones."""
    requested = (
        spec_value_text(PvfSpec, "dtype", store_a.spec.dtype),
        spec_value_text(PvfSpec, "dtype", store_b.spec.dtype),
    )
    if store_a.spec.is_transient or store_b.spec.is_transient:  # corrupted values do not show the dtype of the model
        return requested
    result = dtype_of(store_a.spec, store_a.baseline), dtype_of(store_b.spec, store_b.baseline)
    return result if result[0] != result[1] else requested


def _text(value: object) -> str:
    return "none" if value in (None, "") else str(value)


def _notes(a: PvfResult, b: PvfResult, identical: bool) -> list[str]:
    notes = []
    if a.campaign == b.campaign and a.trials_done and not identical:
        notes.append("A and B are runs of the same campaign, so they differ only by chance or in the number of trials.")
    if a.at != b.at:
        notes.append(
            f"Faults were injected into {a.at} in A and into {b.at} in B, so a row that combines several targets may combine "
            "different targets in A and B."
        )
    if a.unit == "batch" and a.samples * b.batches != b.samples * a.batches:
        sizes = [f"{r.samples / r.batches:g}" for r in (a, b)]
        notes.append(
            f"A batch holds {sizes[0]} samples in A and {sizes[1]} in B: {a.measure} per batch grows with the batch size."
        )
    for name, result in (("A", a), ("B", b)):
        if result.trials_done < result.trials_planned:
            notes.append(f"{name} is not complete: {result.trials_done:,} of {result.trials_planned:,} trials.")
    for note in dict.fromkeys((*a.notes, *b.notes)):
        sides = [name for name, result in (("A", a), ("B", b)) if note in result.notes]
        notes.append(f"{' and '.join(sides)}: {note}")
    return notes
