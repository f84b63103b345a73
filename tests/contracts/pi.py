"""A study as small as can be: pi, from points thrown at a square. Its own spec, baseline, row, runner, analysis and report."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge, Lt

from unsilent.basics.errors import UsageError
from unsilent.basics.interval import Interval
from unsilent.basics.options import NOT_AN_OPTION, WORKLOAD_PANEL, Option
from unsilent.campaigns.code import code_hash
from unsilent.campaigns.codec import RUN_SPECIFIC, StoredRow
from unsilent.campaigns.kinds import Kind
from unsilent.campaigns.options import SEED
from unsilent.campaigns.spec import Json, Runner, TrialId, WorkerSettings, campaign_hash, trial_seed
from unsilent.campaigns.store import Store
from unsilent.report.estimates import Estimate, machine_table, rows_across
from unsilent.report.model import Column, Report, Section, Table


@dataclass(frozen=True)
class PiSpec:
    """What is asked: how many points a trial throws."""

    points: Annotated[int, Option("Points of a trial.", WORKLOAD_PANEL)] = 100
    seed: Annotated[int, SEED] = 0
    workload: Annotated[str, NOT_AN_OPTION] = "pi"
    options: Annotated[tuple[tuple[str, str], ...], NOT_AN_OPTION] = ()
    flips: Annotated[tuple[int | None, ...], NOT_AN_OPTION] = (None,)
    threads: Annotated[int, NOT_AN_OPTION] = 1
    device: Annotated[str, NOT_AN_OPTION] = "cpu"
    is_enumerated: Annotated[bool, NOT_AN_OPTION] = False
    study: Annotated[str, NOT_AN_OPTION] = "pi"

    def to_json(self) -> Json:
        return asdict(self)

    identity = to_json

    def make_runner(self, told: object, worker_settings: WorkerSettings) -> Runner:
        return PiRunner(self)


@dataclass(frozen=True)
class Square:
    """A target."""

    name: str = "square"
    slots: int = 0


@dataclass(frozen=True)
class PiBaseline:
    """What is known before the first trial."""

    campaign: str
    fingerprint: Mapping[str, str]
    targets: tuple[Square, ...] = (Square(),)
    golden_seconds: float = 1e-6
    info: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> Json:
        return asdict(self)


@dataclass(frozen=True)
class PiRow(StoredRow):
    """How many points of a trial fell into the circle."""

    trial: TrialId
    inside: Annotated[int, Ge(0)]
    seconds: Annotated[float, Ge(0), Lt(math.inf), RUN_SPECIFIC] = 0.0
    worker: Annotated[int, RUN_SPECIFIC] = 0


class PiRunner:
    """Throws points."""

    max_trials_together = 1
    unverified_row_count = 0
    name = "pi"

    def __init__(self, spec: PiSpec) -> None:
        self.spec, self.workload = spec, self
        fingerprint = {"numpy": np.__version__, "code": code_hash(__name__)}
        self.baseline = PiBaseline(campaign_hash(spec, fingerprint), fingerprint)

    def establish_baseline(self) -> PiBaseline:
        return self.baseline

    def run_all(self, trials: Sequence[TrialId], alone: bool = False) -> Iterator[PiRow]:
        for trial in trials:
            rng = np.random.default_rng(trial_seed(self.baseline.campaign, self.spec.seed, trial))
            yield PiRow(trial, int((np.hypot(*rng.random((2, self.spec.points))) < 1).sum()))

    def lost_trial_row(self, trial: TrialId, ended: object, seconds: float, reason: str) -> PiRow:
        return PiRow(trial, 0, seconds)

    def verify_restored_state(self) -> None: ...


PiStore = Store[PiSpec, PiBaseline, PiRow]


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
    name="pi", application_id=0x556E7370, spec=PiSpec, baseline=PiBaseline, row=PiRow,
    analyse=analyse, report=report, compare=compare, builtin_values={"workload": ("pi",)},
    command_help="Estimate pi from random points.",
)  # fmt: skip
