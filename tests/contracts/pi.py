"""A study as small as can be: pi, from points thrown at a square. Its own spec, row, runner, analysis and report."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from annotated_types import Ge, Lt

from unsilent.basics.errors import UsageError
from unsilent.basics.interval import Interval
from unsilent.basics.options import WORKLOAD_PANEL, Option
from unsilent.campaigns.code import code_hash
from unsilent.campaigns.codec import RUN_SPECIFIC, StoredRow
from unsilent.campaigns.kinds import Kind
from unsilent.campaigns.options import SEED
from unsilent.campaigns.runner import Runner
from unsilent.campaigns.spec import PlainBaseline, Spec, Target, TrialId
from unsilent.campaigns.store import Store
from unsilent.report.estimates import Estimate, machine_table, rows_across
from unsilent.report.model import Column, Report, Section, Table


@dataclass(frozen=True)
class PiSpec(Spec, study="pi"):
    """What is asked: how many points a trial throws."""

    points: Annotated[int, Option("Points of a trial.", WORKLOAD_PANEL)] = 100
    seed: Annotated[int, SEED] = 0


@dataclass(frozen=True)
class PiRow(StoredRow):
    """How many points of a trial fell into the circle."""

    trial: TrialId
    inside: Annotated[int, Ge(0)]
    seconds: Annotated[float, Ge(0), Lt(math.inf), RUN_SPECIFIC] = 0.0
    worker: Annotated[int, RUN_SPECIFIC] = 0


class PiRunner(Runner[PiSpec, PlainBaseline, PiRow]):
    """Throws points."""

    def make_baseline(self) -> PlainBaseline:
        fingerprint = {"numpy": np.__version__, "code": code_hash(__name__)}
        return PlainBaseline.of(self.spec, fingerprint, targets=(Target("square"),))

    def run_trial(self, trial: TrialId, rng: np.random.Generator) -> PiRow:
        return PiRow(trial, int((np.hypot(*rng.random((2, self.spec.points))) < 1).sum()))


PiStore = Store[PiSpec, PlainBaseline, PiRow]


def analyse(store: PiStore, confidence: float = 0.95) -> Interval:
    """Pi, with limits from the spread between trials."""
    from scipy.stats import norm

    found = np.array([4 * row.inside / store.spec.points for row in store.rows()])
    if len(found) < 2:
        raise UsageError(f"{store.path} has {len(found)} trials, but an interval needs 2; run the command again")
    half = norm.ppf((1 + confidence) / 2) * found.std(ddof=1) / math.sqrt(len(found))
    return Interval(found.mean(), found.mean() - half, found.mean() + half, confidence, len(found), "normal")


def report(found: Interval) -> Report:
    """One number."""
    return _report("unsilent/pi/1", "Pi", f"pi is {found.estimate:.3f}, by {found.n} trials", {"pi": found})


def compare(one: PiStore, other: PiStore, confidence: float = 0.95) -> Report:
    """Two of them."""
    both = {name: analyse(store, confidence) for name, store in (("A", one), ("B", other))}
    return _report("unsilent/pi-comparison/1", "Pi twice", "Two of pi", both)


def _report(schema: str, title: str, headline: str, found: dict[str, Interval]) -> Report:
    """The numbers as the table for machines, and as a table of the page."""
    estimates = [Estimate({"what": name, "measure": "estimate of pi"}, value) for name, value in found.items()]
    columns = (Column.text("what"), Column("estimate of pi", "estimate"))
    table = Table.of(rows_across(estimates, "measure"), columns)
    machine = machine_table(estimates, ("what", ""))
    return Report(schema, "A toy", title, headline, machine, sections=(Section("Pi", "", (table,)),))


PI = Kind(
    name="pi", application_id=0x556E7370, spec=PiSpec, row=PiRow, runner=PiRunner,
    analyse=analyse, report=report, compare=compare, command_help="Estimate pi from random points.",
)  # fmt: skip
