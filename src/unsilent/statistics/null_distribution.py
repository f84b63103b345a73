"""Clean comparisons of runs as a null distribution, with checks that they are exchangeable.

A rank is valid only if the observed comparison would be exchangeable with the clean ones for a fault without effect.
Two designs ensure this, and no others are accepted:

*twin*: replicas 1 to R against one clean twin C, and the faulty run F against the same C. Given C, the replicas and F must be
exchangeable; C need not be exchangeable with them. So F has the same seeds as C and the replicas for everything except the
noise, and its noise is drawn like theirs (``noise_source``). Another F against the same C is a separate comparison.

*pairs*: clean pairs without a common run, and F with its own clean run, which is in none of these pairs. Here the pairs must be
exchangeable as pairs. R runs give R // 2 pairs. All R (R - 1) / 2 pairs would share runs, so their number would suggest a level
that they do not have.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from unsilent.basics.errors import UsageError


@dataclass(frozen=True, slots=True)
class Measure:
    """A number by which runs are compared, and the least change of it that matters.

    Attributes:
        name: Name of the measure, for example "accuracy".
        margin: Smallest change that matters, in the unit of the measure, at least 0.
        worse_direction: Whether more or less of the measure is worse.
        is_distance: Whether the measure is a distance between two runs (churn, L2), at least 0, instead of the difference
            ``run - other``.
    """

    name: str
    margin: float
    worse_direction: Literal["more", "less"] = "more"
    is_distance: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.margin) and self.margin >= 0):
            raise UsageError(
                f"the margin of {self.name} is {self.margin}; expected the smallest change that matters, 0 or more"
            )
        if self.is_distance and self.worse_direction == "less":
            raise ValueError(f"{self.name} is a distance, so its worse direction must be 'more'")


@dataclass(frozen=True, slots=True)
class RunComparison:
    """Measured differences between one run and another.

    Attributes:
        run, other: Names of the two runs; ``other`` is the clean twin if there is one.
        values: Difference ``run - other`` or distance, by name of the measure.
        noise_source: Source of the noise by which the two runs may differ, for example "IMPL".
        same_bits: Whether the results of both runs have equal bits.
    """

    run: str
    other: str
    values: Mapping[str, float]
    noise_source: str = ""
    same_bits: bool = False


@dataclass(frozen=True)
class NullDistribution:
    """Clean comparisons that are exchangeable with each other.

    Raises:
        UsageError: there are no comparisons, they share runs, they differ in source or measures, or a value is not finite.
    """

    clean_comparisons: Sequence[RunComparison]

    def __post_init__(self) -> None:
        if not self.clean_comparisons:
            raise UsageError(
                "there is no clean comparison to measure noise from; compare clean replicas with the clean twin first"
            )
        first = self.clean_comparisons[0]
        for comparison in self.clean_comparisons:
            _same_kind(first, comparison)
            for name, value in comparison.values.items():
                if not math.isfinite(value):
                    raise UsageError(
                        f"{name} of clean run {comparison.run!r} is {value}; a noise floor needs valid runs: "
                        "inspect that run, or leave it out"
                    )
        often = Counter(c.run for c in self.clean_comparisons)
        if self.clean_twin is None:
            often.update(c.other for c in self.clean_comparisons)
        else:
            often[self.clean_twin] += 1
        run, times = often.most_common(1)[0]
        if times > 1:
            raise UsageError(
                f"clean run {run!r} is in {times} comparisons, so the comparisons are not exchangeable; compare each replica "
                "once with one clean twin, or use every run in one pair only (R runs make R // 2 pairs)"
            )

    @cached_property
    def clean_twin(self) -> str | None:
        """The run that all others are compared with; None if the comparisons have no run in common."""
        other_runs = {c.other for c in self.clean_comparisons}
        return self.clean_comparisons[0].other if len(other_runs) == 1 else None

    @property
    def n(self) -> int:
        """Number of clean comparisons."""
        return len(self.clean_comparisons)

    @cached_property
    def has_no_noise(self) -> bool:
        """Whether every clean comparison is of runs with equal bits."""
        return all(c.same_bits for c in self.clean_comparisons)

    @cached_property
    def has_no_identical(self) -> bool:
        """Whether no clean comparison is of runs with equal bits."""
        return not any(c.same_bits for c in self.clean_comparisons)

    def values(self, measures: Sequence[Measure]) -> NDArray[np.float64]:
        """The values of the measures, float64[n, measures]."""
        return np.array([[c.values[m.name] for m in measures] for c in self.clean_comparisons], dtype=np.float64)

    def is_constant(self, measure: Measure) -> bool:
        """Whether all clean values of a measure are equal."""
        return len({c.values[measure.name] for c in self.clean_comparisons}) == 1

    def check_comparable(self, observed: RunComparison, measures: Sequence[Measure]) -> None:
        """Raise `UsageError` if a comparison cannot be tested against these clean ones."""
        _same_kind(self.clean_comparisons[0], observed)
        known = {c.run for c in self.clean_comparisons}
        if missing := [m.name for m in measures if m.name not in observed.values]:
            raise UsageError(f"{missing[0]!r} was not measured; known: {', '.join(sorted(observed.values))}")
        if negative := [m.name for m in measures if m.is_distance and self._least(m, observed) < 0]:
            raise UsageError(f"{negative[0]!r} has a value below 0, so it is not a distance; declare it a difference")
        if observed.run in known:
            raise UsageError(f"run {observed.run!r} is also one of the clean runs; remove it from the clean runs")
        if self.clean_twin is not None and observed.other != self.clean_twin:
            raise UsageError(
                f"run {observed.run!r} is compared with {observed.other!r}, but the clean runs with {self.clean_twin!r}; "
                "compare all runs with one clean twin"
            )
        if self.clean_twin is None and (
            {observed.run, observed.other} & (known | {c.other for c in self.clean_comparisons})
        ):
            raise UsageError(f"run {observed.other!r} is also in a clean pair; leave this pair out")

    def _least(self, measure: Measure, observed: RunComparison) -> float:
        return min(c.values[measure.name] for c in (*self.clean_comparisons, observed))


def _same_kind(first: RunComparison, second: RunComparison) -> None:
    if first.noise_source != second.noise_source:
        raise UsageError(
            f"runs {first.run!r} and {second.run!r} have different noise sources, {first.noise_source!r} and "
            f"{second.noise_source!r}; compare only runs with the same noise source"
        )
    if set(first.values) != set(second.values):
        raise UsageError(
            f"run {second.run!r} has measures {', '.join(sorted(second.values))}, "
            f"but run {first.run!r} has {', '.join(sorted(first.values))}; record equal measures for all runs"
        )
    if second.run == second.other:
        raise UsageError(f"run {second.run!r} is compared with itself; compare it with another run")
