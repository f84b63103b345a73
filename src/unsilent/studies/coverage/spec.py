"""Records of ``unsilent coverage``: settings, baseline and trial row."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, ClassVar, NamedTuple

from annotated_types import Ge

from unsilent.basics.errors import UsageError, unknown_name_error
from unsilent.basics.lazy_numpy import np, npt
from unsilent.basics.options import (
    FAULTS_PANEL,
    LARGEST,
    NOT_AN_OPTION,
    PRECISION_PANEL,
    WORKLOAD_PANEL,
    Option,
    Request,
    check_count,
)
from unsilent.campaigns.codec import FAULTS_JSON, RUN_SPECIFIC, Seconds, StoredRow
from unsilent.campaigns.options import DATA, SEED, WORKLOAD_OPTION, AnalysisOptions, Budget
from unsilent.campaigns.spec import SpecOfTraining, StoredBaseline, TrialId
from unsilent.replicas.spec import MOST_STEPS
from unsilent.studies.training.spec import (
    LAYER_OPTION,
    PHASE_OPTION,
    PHASES,
    TRAINING_OPTION,
    InjectionPoint,
    TrainingSpec,
    parse_weighted_models,
    weighted_models_text,
)

OPERATION, MEMORY = PLACES = ("operation", "memory")
"""Places of faults: in an operation of a step, or in parameters and optimizer state between two steps."""
NONFINITE = "nonfinite"
EDGES = (1e-4, 1e-2, 1.0, 100.0)
CLASSES = ("0..1e-4", "1e-4..1e-2", "1e-2..1", "1..100", "100..inf", NONFINITE)
"""Classes of severity; each includes its lower limit and excludes its upper limit."""
LARGE_CLASSES = CLASSES[-3:]
"""Classes of severity that a random bit flip seldom reaches."""
GOLDEN = TrialId("golden", None, 0)
"""Trial that records the fault-free run."""
CLEAN = "clean"
CHANGES = ("batch-size", "learning-rate", "data")
"""Changes that can be made halfway through a fault-free run."""
FOLLOWED, NOT_FOUND, RECORDED, JUDGED = ENDS_OF_RUNS = ("followed", "not-found", "recorded", "judged")
ENDS = (*ENDS_OF_RUNS, "raised", "crash", "hang")
"""Ends of trials. ``followed``: a fault of the class was found and its steps were recorded; ``not-found``: none of the faults
tried is in the class; ``recorded``: the golden run; ``judged``: a fault-free run."""
MOST_FOLLOWED, MOST_TRIES, MOST_SAMPLING = 1000, 10**6, 10**5
_CLEAN_NAME = re.compile(
    rf"({'|'.join((CLEAN, *CHANGES))})-([0-9]{{1,9}})-([0-9]{{1,6}})-([0-9]{{1,6}})-([0-9]{{1,6}})-([0-9a-f]{{8}})"
)


def severity_class(severity: float) -> str:
    """The class of a severity; empty for NaN.

    Infinity is the severity of gradients or parameters that are not finite.
    """
    if math.isnan(severity):
        return ""
    return NONFINITE if math.isinf(severity) else CLASSES[sum(severity >= edge for edge in EDGES)]


class CleanTarget(NamedTuple):
    """A kind of fault-free run that rules judge.

    Attributes:
        kind: `CLEAN` or one of `CHANGES`.
        steps: Number of steps of each run.
        sampling, value_sampling, update_sampling: Number of steps for reading all gradients, all values inside the model, and
            all updates once.
        digest: Digest of the rules.
    """

    kind: str
    steps: int
    sampling: int
    value_sampling: int
    update_sampling: int
    digest: str

    @property
    def name(self) -> str:
        """The name of the target in a trial."""
        return "-".join(map(str, self))


def parse_clean_target(name: str) -> CleanTarget | None:
    """The kind of fault-free run that a target name encodes; None for any other target."""
    match = _CLEAN_NAME.fullmatch(name)
    if not match:
        return None
    steps, gradients, values, updates = map(int, match.group(2, 3, 4, 5))
    return CleanTarget(match[1], steps, gradients, values, updates, match[6])


@dataclass(frozen=True, slots=True)
class CoverageSpec(SpecOfTraining):
    """The settings of a campaign that scores rules of a training."""

    FILES: ClassVar[tuple[str, ...]] = ("data",)
    workload: Annotated[str, TRAINING_OPTION]
    options: Annotated[tuple[tuple[str, str], ...], WORKLOAD_OPTION] = ()
    data: Annotated[str | None, DATA] = None
    faults: Annotated[tuple[tuple[str, float], ...], Option(
        "A fault model for faults in operations: any that unsilent faults lists, or a published one, like RD; 2*RD doubles its "
        "weight; repeat for more.", FAULTS_PANEL, "fault", default_text="bitflip",
        parser=parse_weighted_models, formatter=weighted_models_text, is_repeatable=True)] = ()  # fmt: skip
    large_fault: Annotated[str, Option(
        "The fault model for the classes of severity 1 and more, which other faults seldom reach; in operations and in memory.",
        FAULTS_PANEL)] = "bitflip:bits=exponent"  # fmt: skip
    memory_fault: Annotated[str, NOT_AN_OPTION] = "bitflip"
    phases: Annotated[tuple[str, ...], PHASE_OPTION] = PHASES
    layers: Annotated[tuple[str, ...], LAYER_OPTION] = ("*",)
    only: Annotated[tuple[str, ...], Option(
        "Which faults to draw, as PLACE:SEVERITY, like operation:* or memory:1..100; repeat for more.", FAULTS_PANEL,
        default_text="all", is_repeatable=True)] = ("*",)  # fmt: skip
    follow: Annotated[
        int, Option("Number of steps, from that of the fault on, in which a rule can detect it.", FAULTS_PANEL)
    ] = 5
    tries: Annotated[int, Option(
        "Maximum number of faults that a trial draws until one is of its class of severity.", FAULTS_PANEL)] = 300  # fmt: skip
    seed: Annotated[int, SEED] = 0
    init: Annotated[int, Option("Seed of the training itself.", WORKLOAD_PANEL)] = 0
    steps: Annotated[
        int | None, Option("Steps of the training.", WORKLOAD_PANEL, default_text="all of the training")
    ] = None
    threads: Annotated[int, NOT_AN_OPTION] = 1
    study: Annotated[str, NOT_AN_OPTION] = "coverage"

    @property
    def targets(self) -> tuple[CoverageTarget, ...]:
        """The targets that trials are drawn for."""
        return tuple(target for target in TARGETS if any(fnmatchcase(target.name, glob) for glob in self.only))

    def training_spec(self, place: str, large: bool = False) -> TrainingSpec:
        """Settings of a training study that draws faults in one place; ``large`` selects large faults."""
        in_operations = place == OPERATION
        usual = (self.faults or (("bitflip", 1.0),)) if in_operations else ((self.memory_fault, 1.0),)
        return TrainingSpec(
            self.workload,
            self.options,
            self.data,
            ((self.large_fault, 1.0),) if large else usual,
            phases=self.phases if in_operations else PHASES,
            layers=self.layers,
            per=None if in_operations else "kind",
            seed=self.seed,
            init=self.init,
            steps=self.steps,
            threads=self.threads,
        )


@dataclass(frozen=True, slots=True)
class CoverageTarget:
    """A target that trials are drawn for: faults of one class of severity in one place."""

    name: str
    place: str
    severity: str
    slots: int = 0


TARGETS = tuple(CoverageTarget(f"{place}:{name}", place, name) for place in PLACES for name in CLASSES)


@dataclass(frozen=True, slots=True)
class CoverageBaseline(StoredBaseline):
    """Facts that a worker establishes before the first trial.

    Attributes:
        name: Name of the training.
        series: Fields of each recorded `unsilent.detectors.series.Series`.
        steps: Number of steps of the training.
        changes: Changes of `CHANGES` that are possible in the training.
        golden_seconds: Duration of a fault-free run in seconds.
    """

    name: str
    targets: tuple[CoverageTarget, ...]
    series: tuple[tuple[str, str, str, int, int], ...]
    steps: int
    changes: tuple[str, ...]
    parameters: int
    optimizers: tuple[str, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False, slots=True)
class CoverageRow(StoredRow):
    """The stored result of a trial: a faulty step and the next ones, the golden run, or a fault-free run.

    Attributes:
        injection: Step and site of the fault.
        faults: JSON list of the injected faults, or its digest if the list is very long.
        end: End of the trial, one of `ENDS`.
        tried: Number of faults that were drawn until one was in the class.
        severity: Relative change of the step's gradients, or of the update if memory was corrupted; infinity if a value is
            not finite, NaN without a fault.
        steps: Number of steps that were recorded.
        rules: JSON list of the names of the detectors that judged a fault-free run.
        signals: Signals, float64[steps, series].
        seen: Whether each signal is present, uint8[steps, series].
        events: Number of series of consecutive steps with an alarm, and with an alarm or a warning, in the first half of the
            training and then in the second half, int64[rules, 4].
        scores: Number of steps whose largest score is in each bin of `scoring.SCORE_EDGES`, int64[rules, bins].
        error: Text of the error that was raised.
        seconds, worker: Duration and worker of the trial, which are not compared between stores.
    """

    trial: TrialId
    injection: InjectionPoint
    faults: Annotated[str, FAULTS_JSON]
    end: str
    tried: Annotated[int, Ge(0)]
    severity: float
    steps: Annotated[int, Ge(0)]
    rules: str
    signals: npt.NDArray[np.float64]
    seen: npt.NDArray[np.uint8]
    events: npt.NDArray[np.int64]
    scores: npt.NDArray[np.int64]
    error: str = ""
    seconds: Seconds = 0.0
    worker: Annotated[int, RUN_SPECIFIC] = 0


# -- further options -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CoverageBudget(Budget):
    """The number of trials and of fault-free runs."""

    trials: Annotated[int, Option(
        "Faults of each class of severity, in operations and in memory.", PRECISION_PANEL)] = 150  # fmt: skip
    shard: Annotated[tuple[int, int], NOT_AN_OPTION] = (1, 1)
    clean_runs: Annotated[
        int, Option("Fault-free runs with other seeds, in which false alarms are counted.", PRECISION_PANEL)
    ] = 20
    clean_steps: Annotated[int | None, Option(
        "Steps of each fault-free run.", PRECISION_PANEL, default_text="as many as the training has")] = None  # fmt: skip
    changed_runs: Annotated[int, Option(
        "Fault-free runs with each change made on purpose half way: batch size, learning rate, data.",
        PRECISION_PANEL)] = 5  # fmt: skip

    def __post_init__(self) -> None:
        Budget.__post_init__(self)
        check_count("--clean-runs", self.clean_runs, 0, MOST_STEPS)
        check_count("--changed-runs", self.changed_runs, 0, MOST_STEPS)
        if self.clean_steps is not None:
            check_count("--clean-steps", self.clean_steps, 1, MOST_STEPS)


@dataclass(frozen=True)
class CoverageAnalysisOptions(AnalysisOptions):
    """Options of the analysis of a store."""

    rate: Annotated[float, Option(
        "False alarms per step to which thresholds are scaled, so that rules can be compared.",
        PRECISION_PANEL)] = 1e-3  # fmt: skip

    sampling: Annotated[tuple[int, ...], Option(
        "Number of steps in which a monitor reads every value once, a part of them in each step: one number, or three for "
        "gradients, gradients of norm layers' inputs, and updates, like 1,5,8.",
        PRECISION_PANEL, separator=",")] = (1,)  # fmt: skip

    def __post_init__(self) -> None:
        AnalysisOptions.__post_init__(self)
        if len(self.sampling) not in (1, 3):
            raise UsageError(
                f"--sampling is {','.join(map(str, self.sampling))}; expected one number or three, like 1,5,8"
            )
        for interval in self.sampling:
            check_count("--sampling", interval, 1, MOST_SAMPLING)
        if not 0 < self.rate < 1:
            raise UsageError(f"rate is {self.rate}; expected a share of steps between 0 and 1, like 0.001")

    @property
    def intervals(self) -> tuple[int, int, int]:
        """How many steps it takes to read all gradients, all gradients of norm inputs, and all updates."""
        gradients, values, updates = self.sampling if len(self.sampling) == 3 else 3 * self.sampling
        return gradients, values, updates


def make_coverage_spec(request: Request) -> CoverageSpec:
    """The settings of a request, checked as far as possible without the training; raises ``UsageError``."""
    spec = request[CoverageSpec]
    check_count("--follow", spec.follow, 1, MOST_FOLLOWED)
    check_count("--tries", spec.tries, 1, MOST_TRIES)
    for name in ("seed", "init"):
        check_count(f"--{name}", getattr(spec, name), 0, LARGEST)
    if spec.steps is not None:
        check_count("--steps", spec.steps, spec.follow + 1, MOST_STEPS)
    for glob in spec.only:
        if not any(fnmatchcase(target.name, glob) for target in TARGETS):
            raise unknown_name_error("class of faults", glob, [target.name for target in TARGETS])
    return spec
