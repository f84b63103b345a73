"""Campaigns that stop when every reported row is precise enough: which trials a look asks for next.

A pilot of every stratum shows where outcomes vary, and goes on where it saw too little to plan by; what it shows fixes the trials
of look 0 (Neyman's allocation, and enough everywhere for what the pilot did not show). If a row then is not precise enough, its
strata grow from look to look by a fixed factor. All is decided from complete rounds, so it depends on neither jobs nor executor
nor interruptions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from unsilent.campaigns.driver import ROUND
from unsilent.campaigns.rounds import Cell, CellPlan, current, trials_of
from unsilent.campaigns.spec import Json, TrialId
from unsilent.errors import UsageError
from unsilent.outcomes.tallies import Question
from unsilent.statistics import Interval, Stratum, stratified
from unsilent.statistics.interim import GROWTH, confidence_at
from unsilent.statistics.planning import allocate, expected_half_width, foreseen
from unsilent.studies.pvf.kind import PvfStore
from unsilent.studies.pvf.records import at_flips
from unsilent.studies.pvf.rows import Group, Stored, target_groups

PILOT = 24
"""Trials of each stratum before anything is decided, at least."""
PILOT_OF_ALL = 144
"""Trials of all strata of a target together before anything is decided, at least."""
LONGER = 4
"""A pilot that saw too little is made so many times longer, until a plan is no more than ``MOST_AHEAD`` times its pilot."""
MOST_AHEAD = 8
VAGUE = 0.5
"""Relative standard error of an estimate above which its pilot saw too little."""
MARGIN = 0.9
"""A plan aims a little below what is asked, since the pilot's variances are estimates."""
FLOOR = 0.0002
"""Half-width that is enough where a relative one is asked: a share of zero has none."""
AFRESH = 3.0
"""A tighter precision that needs so many times more trials is planned anew, with all that is known as its pilot."""
_FARTHEST = 40
_NUMBER = re.compile(r"\s*([0-9.]+(?:[eE][+-]?[0-9]+)?)\s*(%?)\s*")


@dataclass(frozen=True)
class Precision:
    """The half-width asked of every reported row: ``max(relative * estimate, absolute)``."""

    absolute: float
    relative: float = 0.0

    @classmethod
    def parse(cls, ci: str | None, rel: str | None) -> Precision | None:
        """From the texts of ``--ci`` and ``--rel`` (``0.1%``, ``0.001``); None where neither is given."""
        if ci is None and rel is None:
            return None
        absolute = FLOOR if ci is None else _share("--ci", ci, "0.1% or 0.001")
        return cls(absolute, 0.0 if rel is None else _share("--rel", rel, "20% or 0.2"))

    def aim(self, estimate: float) -> float:
        """The half-width that is enough for this estimate."""
        return max(self.absolute, self.relative * estimate)

    def met(self, interval: Interval) -> bool:
        """Whether an interval is narrow enough."""
        return interval.estimate is not None and interval.half_width <= self.aim(interval.estimate)

    def __str__(self) -> str:
        floor = f"±{100 * self.absolute:.4g} points"
        return f"±{100 * self.relative:.4g} % of the estimate, at least {floor}" if self.relative else floor


def _share(option: str, text: str, like: str) -> float:
    match = _NUMBER.fullmatch(text)
    try:
        value = float(match[1]) / (100 if match[2] else 1) if match else -1.0
    except ValueError:
        value = -1.0
    if not 0 < value < 1:
        raise UsageError(f"{option} is {text!r}; expected a share between 0 and 1, like {like}")
    return value


@dataclass
class PrecisionPlanner:
    """Decides the rounds of a campaign.

    Attributes:
        most: trials that a target may have at a number of flips, its pilot included.
        short: rows that stay wider than asked because of ``most``, as sentences.
    """

    precision: Precision
    question: Question
    most: int
    short: tuple[str, ...] = ()

    def trials(self, store: PvfStore) -> Iterator[TrialId]:
        """All trials of the rounds so far."""
        return trials_of(current(store.records(ROUND)).values())

    def decide(self, store: PvfStore) -> list[Json]:
        """The next round; empty where all rows are precise enough, or would need more than ``most``.

        Raises:
            UsageError: the plan of look 0 needs more than ``most``; says what is needed and what can be had.
        """
        unit = self.question.of(store.spec.transient).unit or "sample"
        return [plan.to_json() for plan in self.after(Stored(store, unit))]

    def after(self, stored: Stored) -> list[CellPlan]:
        """The next round after these trials."""
        question = self.question.of(stored.spec.transient)
        asked = f"{self.precision} at {question.confidence:g} per {question.unit}"
        if not stored.plans:
            return self._pilots(stored, asked)
        groups = [g for flips in stored.spec.flips for g in target_groups(stored, flips)]
        if any(not plan.first for plan in stored.plans.values()):
            return self._planned(stored, groups, asked)
        wide = [g for g in groups if not self.precision.met(question.estimate(g.sample))]
        self.short = ()
        if not wide:
            return []
        growing = dict.fromkeys(stored.plans, 0)
        for group in wide:
            looks = self._looks(group)
            for target in group.targets:
                cell = target.group, group.flips
                growing[cell] = max(growing[cell], looks)
        renewed = any(plan.asked != asked for plan in stored.plans.values())
        if renewed and GROWTH ** max(growing.values()) > AFRESH:
            return self._planned(stored, groups, asked)
        return self._grown(stored, wide, growing)

    def _pilots(self, stored: Stored, asked: str) -> list[CellPlan]:
        strata: dict[str, list[str]] = {}
        for target in stored.description.targets:
            strata.setdefault(target.group, []).append(target.name)
        pilots = {
            g: dict.fromkeys(names, max(PILOT, math.ceil(PILOT_OF_ALL / len(names)))) for g, names in strata.items()
        }
        group, pilot = max(pilots.items(), key=lambda item: sum(item[1].values()))
        if sum(pilot.values()) > self.most:
            raise UsageError(
                f"--trials allows {self.most:,} of a target, and a precision needs a pilot of {sum(pilot.values())} in {group!r} "
                "before it can plan; ask for more, or for --trials without --ci and --rel"
            )
        return [
            CellPlan(group, flips, asked, pilot, {}, {})
            for flips in stored.spec.flips
            for group, pilot in pilots.items()
        ]

    def _planned(self, stored: Stored, groups: Sequence[Group], asked: str) -> list[CellPlan]:
        """Look 0 of every cell, from all trials so far."""
        pilots = {(name, flips): p.counting(name).stop for (_, flips), p in stored.plans.items() for name in p.start}
        known = {cell: stored.pilot(*cell, upto) for cell, upto in pilots.items()}
        sizes = dict.fromkeys(known, 0)
        for group in groups:
            cells = [(t.name, group.flips) for t in group.targets]
            total = sum(t.share for t in group.targets)
            strata = [
                replace(known[c], weight=t.share / total, centre=known[c].mean)
                for c, t in zip(cells, group.targets, strict=True)
            ]
            aim = MARGIN * self.precision.aim(_cautious(strata))
            for cell, n in zip(cells, self._enough(strata, [sizes[c] for c in cells], aim), strict=True):
                sizes[cell] = n
        plans = [
            CellPlan(
                group_name,
                flips,
                asked,
                {name: pilots[name, flips] for name in plan.start},
                {name: sizes[name, flips] for name in plan.start},
                {name: known[name, flips].mean for name in plan.start},
            )
            for (group_name, flips), plan in stored.plans.items()
        ]
        if longer := self._longer(plans, known, groups):
            return longer
        return [self._affordable(plan, known, stored, groups) for plan in plans]

    def _longer(
        self, plans: Sequence[CellPlan], known: Mapping[Cell, Stratum], groups: Sequence[Group]
    ) -> list[CellPlan]:
        """Pilots that go on: a relative precision hangs on an estimate that is hardly known, and much would be run for it."""
        vague = set()
        for group in groups if self.precision.relative else ():
            total = sum(t.share for t in group.targets)
            strata = [replace(known[t.name, group.flips], weight=t.share / total) for t in group.targets]
            error = math.sqrt(sum(s.weight**2 * s.variance / s.n for s in strata))
            if error >= VAGUE * sum(s.weight * s.mean for s in strata):
                vague |= {(t.group, group.flips) for t in group.targets}
        result = []
        for plan in plans:
            pilot = sum(plan.start.values())
            if plan.cell in vague and plan.size > MOST_AHEAD * pilot and MOST_AHEAD * LONGER * pilot <= self.most:
                start = {name: LONGER * n for name, n in plan.start.items()}
                result.append(replace(plan, start=start, first={}, centre={}))
        return result

    def _enough(self, strata: Sequence[Stratum], sizes: Sequence[int], aim: float) -> list[int]:
        """These sizes where they reach the aim already, else at least those of the best allocation."""
        level = confidence_at(0, self.question.confidence)
        if all(sizes) and foreseen(strata, sizes, level).half_width <= aim:
            return list(sizes)
        return [max(a, b) for a, b in zip(sizes, allocate(strata, aim, level), strict=True)]

    def _affordable(
        self, plan: CellPlan, known: Mapping[Cell, Stratum], stored: Stored, groups: Sequence[Group]
    ) -> CellPlan:
        """The plan, or as much of it as there may be where that might do; raises ``UsageError`` where it cannot."""
        needed = plan.size
        if needed <= self.most:
            return plan
        shares = {t.name: t.share for t in stored.description.targets}
        total = sum(shares[name] for name in plan.first)
        strata = [
            replace(known[name, plan.flips], weight=shares[name] / total, centre=plan.centre[name])
            for name in plan.first
        ]
        scale = (self.most - sum(plan.start.values())) / sum(plan.first.values())
        sizes = {name: max(1, math.floor(scale * n)) for name, n in plan.first.items()}
        level = confidence_at(0, self.question.confidence)
        if scale > 0 and self._may_do(strata, list(sizes.values()), level):
            return replace(plan, first=sizes)
        widths = [foreseen(strata, list(sizes.values()), level).half_width] if scale > 0 else []
        question = self.question.of(stored.spec.transient)
        mine = [g for g in groups if (g.name, g.flips) == (plan.group, plan.flips)]
        widths += [question.estimate(g.sample).half_width for g in mine]
        at = at_flips(plan.flips) if len(stored.spec.flips) > 1 else ""
        raise UsageError(
            f"{self.precision} of {plan.group!r}{at} needs about {_round(needed):,} trials, --trials allows {self.most:,}, "
            f"which give about ±{100 * min(widths):.2g} points; ask for --trials {_round(1.5 * needed)} (half as many again, as "
            "this is a forecast) or a coarser --ci or --rel"
        )

    def _may_do(self, strata: Sequence[Stratum], sizes: Sequence[int], level: float) -> bool:
        """Whether so few trials are enough should the estimate be as large as the pilot allows, as a relative width is then."""
        seen = stratified(strata, level)
        mean = sum(s.weight * s.mean for s in strata)
        variance = sum(
            s.weight**2 * (s.variance * seen.high / mean if mean else seen.high * (1 - seen.high)) / n
            for s, n in zip(strata, sizes, strict=True)
        )
        coarsest = max(s.weight / n for s, n in zip(strata, sizes, strict=True))
        return expected_half_width(variance, coarsest, level) <= self.precision.aim(seen.high)

    def _looks(self, group: Group) -> int:
        """After how many more looks a row is expected to be precise enough."""
        now = group.sample.look or 0
        total = sum(s.share for s in group.sample.strata)
        strata = [Stratum.of(s.tally.shares, s.share / total, s.centre) for s in group.sample.strata]
        aim = self.precision.aim(sum(s.weight * s.mean for s in strata))
        for more in range(1, _FARTHEST):
            level = confidence_at(now + more, self.question.confidence)
            sizes = [math.ceil(s.n * GROWTH**more) for s in strata]
            if foreseen(strata, sizes, level).half_width <= aim:
                return more
        return _FARTHEST

    def _grown(self, stored: Stored, wide: Sequence[Group], growing: dict[Cell, int]) -> list[CellPlan]:
        """The cells of wide rows some looks on, as far as they may."""
        result = []
        for cell, plan in stored.plans.items():
            look = plan.look + growing[cell]
            while look > plan.look and replace(plan, look=look).size > self.most:
                look -= 1
            if look > plan.look:
                result.append(replace(plan, look=look))
        if not result:
            self.short = tuple(f"{g.name}{at_flips(g.flips)}" for g in wide)
        return result


def _round(trials: float) -> int:
    """To two digits: it is a forecast."""
    return int(float(f"{trials:.2g}"))


def _cautious(strata: Sequence[Stratum]) -> float:
    """The estimate less its standard error: a relative half-width must suffice for what it may turn out to be."""
    estimate = sum(s.weight * s.mean for s in strata)
    return max(0.0, estimate - math.sqrt(sum(s.weight**2 * s.variance / s.n for s in strata)))
