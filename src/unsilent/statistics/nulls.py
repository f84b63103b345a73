"""Clean comparisons that another may be held against, and whether they may: what must be exchangeable with what.

A rank says something only where, were the fault without effect, the observed comparison could have been any of the clean ones.
Two designs have that, and nothing else is accepted:

*twin*: replicas 1 to R against one clean twin C, and the faulty run F against the same C. Given C, the replicas and F must be
exchangeable; C need not be like them. So F's seeds are those of C and of the replicas in all that is not the noise, and the
noise of F is drawn as theirs is (``source``). One C with another F is another comparison.

*pairs*: clean pairs of which no two share a run, and F with its own clean run, which is in none of them. Here the pairs must be
exchangeable as pairs. R runs give R // 2 of them; all R (R - 1) / 2 would share runs, and their number would promise a level
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

from unsilent.errors import UsageError


@dataclass(frozen=True, slots=True)
class Measure:
    """What is compared, and how much of it matters.

    Attributes:
        name: "accuracy". margin: the least change that matters, in its unit, at least 0. worse: which way is harm.
        distance: it says how far two runs are apart (churn, L2), never below 0, rather than the difference ``run - other``.
    """

    name: str
    margin: float
    worse: Literal["more", "less"] = "more"
    distance: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.margin) and self.margin >= 0):
            raise UsageError(
                f"the margin of {self.name} is {self.margin}; give the least change that matters, 0 or more"
            )
        if self.distance and self.worse == "less":
            raise ValueError(f"{self.name} is a distance: more of it cannot be better")


@dataclass(frozen=True, slots=True)
class Compared:
    """What was measured of one run held against another.

    Attributes:
        run, other: their names; ``other`` is the clean twin where there is one. values: by measure, ``run - other`` or distance.
        source: the noise in which the two may differ ("IMPL"). same_bits: nothing at all differs between them.
    """

    run: str
    other: str
    values: Mapping[str, float]
    source: str = ""
    same_bits: bool = False


@dataclass(frozen=True)
class Null:
    """Clean comparisons that are exchangeable with each other.

    Raises:
        UsageError: there are none, they share runs, differ in source or measures, or a value is not finite.
    """

    compared: Sequence[Compared]

    def __post_init__(self) -> None:
        if not self.compared:
            raise UsageError("no clean comparison to judge by; compare clean replicas with the clean twin first")
        first = self.compared[0]
        for one in self.compared:
            _same_kind(first, one)
            for name, value in one.values.items():
                if not math.isfinite(value):
                    raise UsageError(
                        f"{name} of clean run {one.run!r} is {value}; a floor is made of sound runs: "
                        "look at that run, or leave it out"
                    )
        often = Counter(c.run for c in self.compared)
        if self.twin is None:
            often.update(c.other for c in self.compared)
        else:
            often[self.twin] += 1
        run, times = often.most_common(1)[0]
        if times > 1:
            raise UsageError(
                f"clean run {run!r} is in {times} comparisons, which are then not exchangeable; compare each replica once with "
                "one clean twin, or put every run into one pair only (R runs give R // 2 pairs)"
            )

    @cached_property
    def twin(self) -> str | None:
        """The run all are compared with; None where they are pairs (one comparison alone is taken for that with a twin)."""
        others = {c.other for c in self.compared}
        return self.compared[0].other if len(others) == 1 else None

    @property
    def n(self) -> int:
        """Clean comparisons."""
        return len(self.compared)

    @cached_property
    def silent(self) -> bool:
        """There is no noise: every comparison is of equal bits."""
        return all(c.same_bits for c in self.compared)

    @cached_property
    def never_same(self) -> bool:
        """No clean comparison is of equal bits."""
        return not any(c.same_bits for c in self.compared)

    def values(self, measures: Sequence[Measure]) -> NDArray[np.float64]:
        """Float64[n, measures]."""
        return np.array([[c.values[m.name] for m in measures] for c in self.compared], dtype=np.float64)

    def spreadless(self, measure: Measure) -> bool:
        """All clean values of it are equal."""
        return len({c.values[measure.name] for c in self.compared}) == 1

    def accept(self, observed: Compared, measures: Sequence[Measure]) -> None:
        """Raise `UsageError` where an observed comparison cannot be held against these."""
        _same_kind(self.compared[0], observed)
        known = {c.run for c in self.compared}
        if missing := [m.name for m in measures if m.name not in observed.values]:
            raise UsageError(f"{missing[0]!r} was not measured; known: {', '.join(sorted(observed.values))}")
        if negative := [m.name for m in measures if m.distance and self._least(m, observed) < 0]:
            raise UsageError(f"{negative[0]!r} is below 0, which no distance is; declare it a difference")
        if observed.run in known:
            raise UsageError(f"run {observed.run!r} is among the clean runs it is judged by; leave it out of them")
        if self.twin is not None and observed.other != self.twin:
            raise UsageError(
                f"run {observed.run!r} is compared with {observed.other!r}, the clean runs with {self.twin!r}; "
                "compare all with one twin"
            )
        if self.twin is None and ({observed.run, observed.other} & (known | {c.other for c in self.compared})):
            raise UsageError(f"run {observed.other!r} is also in a clean pair; leave that pair out")

    def _least(self, measure: Measure, observed: Compared) -> float:
        return min(c.values[measure.name] for c in (*self.compared, observed))


def _same_kind(first: Compared, one: Compared) -> None:
    if first.source != one.source:
        raise UsageError(
            f"runs {first.run!r} and {one.run!r} differ from what they are compared with by noise of {first.source!r} and "
            f"{one.source!r}; only runs of one source can be held against each other"
        )
    if set(first.values) != set(one.values):
        raise UsageError(
            f"run {one.run!r} has measures {', '.join(sorted(one.values))}, "
            f"run {first.run!r} has {', '.join(sorted(first.values))}; measure the same of all"
        )
    if one.run == one.other:
        raise UsageError(f"run {one.run!r} is compared with itself; compare it with another run")
