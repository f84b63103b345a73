"""Records of campaigns of ``unsilent training``: settings, baseline and trial row.

`TrainingSpec` defines the training and its faults, `TrainingBaseline` has the facts that a worker finds first, and `TrainingRow`
has the result of a trial.

The records do not include how a run is judged: a row has the curves, and thresholds that may change later give its class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from unsilent.basics.errors import UsageError, unknown_name_error
from unsilent.basics.lazy_numpy import np, npt
from unsilent.basics.options import (
    CONFIDENCE,
    EXECUTION_PANEL,
    FAULTS_PANEL,
    LARGEST,
    NOT_AN_OPTION,
    OUTPUT_PANEL,
    PRECISION_PANEL,
    WORKLOAD_PANEL,
    Option,
    Request,
    check_count,
)
from unsilent.campaigns import codec
from unsilent.campaigns.codec import RUN_SPECIFIC, Seconds, StoredRow
from unsilent.campaigns.options import DATA, SEED, WORKLOAD_OPTION, Budget
from unsilent.campaigns.spec import SpecOfTraining, StoredBaseline, TrialId
from unsilent.outcomes.training import Thresholds
from unsilent.replicas.spec import MOST_REPLICAS, MOST_STEPS

RANDOM = "random"
"""The target of faults in operations, whose step, fault model, layer and phase are all drawn."""
GUARDED_PREFIX = "guarded:"
"""Prefix of the target of a trial that is repeated under the guard."""
PER = ("component", "layer", "tensor", "kind")
"""Values of ``per``: one target per component, layer or tensor of the model, or per kind of memory."""
MOMENTS: dict[str, Literal["start", "update", "end"]] = {
    "start": "start",
    "update": "update",
    "end": "end",
    "between": "start",
}
"""Moment at which faults corrupt memory -> moment of a step injection. Under a guard the four moments are: after its snapshot,
between the backward pass and the update, between the update and the check, between the check and the next snapshot."""
PHASES = ("fwd", "grad_in", "grad_wt")
HISTORY_KINDS = ("first", "second", "moving")
"""Values recorded after a step: the largest magnitudes of first moments, second moments and moving statistics."""
WATCHED_STEPS = 3
"""Number of steps with recorded values: the step of the fault and two more."""
END_REASONS = (
    "end", "same-bits", "not-finite", "horizon", "raised", "crash", "hang", "not-injected", "recovered", "missed", "stopped",
)  # fmt: skip
"""Reasons why a run ended; the first four are for runs with curves, the last three for guarded runs."""
OBSERVED_END_REASONS, GUARDED_END_REASONS = END_REASONS[:4], END_REASONS[-3:]
NOT_INJECTED = "not-injected"
"""End reason of a trial without a fault, because the drawn operation does not run in the drawn step."""
OPERATION_FAULT_OPTIONS = ("phases", "accelerator", "value")
"""Options that only apply to faults in operations."""


@dataclass(frozen=True, slots=True)
class EarlyEndRule:
    """The rule for ending a run early and counting it as masked, if it stays close to the golden run.

    Attributes:
        steps: Number of steps that the run must have been inside the band.
        window: Number of steps that losses are averaged over.
        loss: Largest allowed difference of the mean loss from golden, for each window of the run.
        test: Largest allowed difference of held-out accuracy, a share.
    """

    steps: int
    window: int
    loss: tuple[float, ...]
    test: float


def parse_weighted_models(text_or_list: Any) -> tuple[tuple[str, float], ...]:
    """Parse fault models with optional weights, like ``RD`` and ``2*RD``; raises ``UsageError``."""
    return tuple(
        _preset_and_weight(item) for item in ([text_or_list] if isinstance(text_or_list, str) else text_or_list)
    )


def weighted_models_text(faults: Any) -> list[str]:
    """The option texts of weighted fault models."""
    return [name if weight == 1 else f"{weight:.15g}*{name}" for name, weight in faults]


def _preset_and_weight(text: str) -> tuple[str, float]:
    from unsilent.faults.fault_texts import from_text, split_from, split_weight
    from unsilent.faults.hardware.presets import PRESETS
    from unsilent.faults.mixtures import lasting_fault_model
    from unsilent.faults.values import VALUES

    weight, name = split_weight(str(text))
    preset, begins = split_from(name)
    if preset in PRESETS:
        return ":".join(filter(None, (preset, from_text(begins)))), weight
    if name.partition(":")[0] not in VALUES:
        raise unknown_name_error("fault model", name, [*VALUES, *PRESETS])
    return lasting_fault_model(name).text, weight


def read_phases(text_or_list: Any) -> tuple[str, ...]:
    """Parse names of phases and remove repetitions; raises ``UsageError``."""
    names = tuple(dict.fromkeys([text_or_list] if isinstance(text_or_list, str) else text_or_list))
    for name in names:
        if name not in PHASES:
            raise unknown_name_error("phase", name, PHASES)
    return names


TRAINING_OPTION = Option(
    "A training: built-in name, file.py:name or package.module:name.",
    WORKLOAD_PANEL,
    missing_error="no training was named; give one like train-resnet (see unsilent workloads)",
)
PHASE_OPTION = Option(
    "Phase: fwd (forward), grad_in (input gradients) or grad_wt (weight gradients); repeat for more.",
    FAULTS_PANEL,
    "phase",
    default_text="all three",
    parser=read_phases,
    is_repeatable=True,
)
LAYER_OPTION = Option(
    "Modules to inject into, like block1.*; repeat for more.",
    FAULTS_PANEL,
    "layer",
    default_text="all",
    is_repeatable=True,
)
"""Option of every study that injects faults into the steps of a training."""


@dataclass(frozen=True, slots=True)
class TrainingSpec(SpecOfTraining):
    """The settings of a campaign of faulty training runs.

    Attributes:
        faults: Fault models and their weights (``RD``, ``bitflip:bits=30``); if empty, all published ones with
            equal weights, or those of ``accelerator``.
        value: New value of corrupted elements, instead of the fault model's own.
        phases: Phases that faults corrupt.
        layers: Globs of the layers that faults corrupt.
        per: ``None`` for random faults in operations; ``component``, ``layer`` or ``tensor`` for faults in
            parameters and optimizer state; ``kind`` for faults in each kind of memory.
        moment: Moment in a step at which memory is corrupted (see `MOMENTS`).
        init: Seed of the training itself.
        steps: Number of steps of a run; ``None`` for all.
        horizon: Rule for ending runs early; ``None`` if every run goes to its end.
    """

    FILES: ClassVar[tuple[str, ...]] = ("data", "accelerator")
    workload: Annotated[str, TRAINING_OPTION]
    options: Annotated[tuple[tuple[str, str], ...], WORKLOAD_OPTION] = ()
    data: Annotated[str | None, DATA] = None
    faults: Annotated[tuple[tuple[str, float], ...], Option(
        "A published fault model, like RD, or any model that unsilent faults lists; 2*RD doubles its weight; repeat for more.",
        FAULTS_PANEL, "fault",
        default_text="the 18 published fault models, "
                     "equally weighted",
        parser=parse_weighted_models, formatter=weighted_models_text, is_repeatable=True)] = ()  # fmt: skip
    accelerator: Annotated[str | None, Option(
        "Use the fault models and weights of nvdla, systolic, tensor-core or FILE.toml.", FAULTS_PANEL)] = None  # fmt: skip
    value: Annotated[str | None, Option(
        "What injected elements become, like uniform:low=1e16,high=1e18.", FAULTS_PANEL,
        default_text="the model's own")] = None  # fmt: skip
    phases: Annotated[tuple[str, ...], PHASE_OPTION] = PHASES
    layers: Annotated[tuple[str, ...], LAYER_OPTION] = ("*",)
    per: Annotated[str | None, Option(
        "Measure training PVF: inject into the parameters and optimizer state of each component, layer or tensor, or into each "
        "kind of memory, instead of into operations.", FAULTS_PANEL)] = None  # fmt: skip
    moment: Annotated[str, Option(
        "With --per, the moment in a step when faults are injected: start (after the guard's snapshot), update (just before the "
        "optimizer's update), end (just before the guard's check) or between (after the check, before the next snapshot).",
        FAULTS_PANEL)] = "start"  # fmt: skip
    seed: Annotated[int, SEED] = 0
    init: Annotated[int, Option("Seed of the training itself.", WORKLOAD_PANEL)] = 0
    steps: Annotated[int | None, Option("Steps of each run.", WORKLOAD_PANEL, default_text="all of the training")] = (
        None
    )
    horizon: Annotated[EarlyEndRule | None, NOT_AN_OPTION] = None
    threads: Annotated[int, NOT_AN_OPTION] = 1
    study: Annotated[str, NOT_AN_OPTION] = "training"


@dataclass(frozen=True, slots=True)
class TrainingTarget:
    """A target of trials: ``random``, or the memory of one kind in a part of the model."""

    name: str
    memory_kind: str = ""
    """``param`` or ``optim``; empty for ``random``."""
    part: str = ""
    """Name of the component, layer or tensor, or the kind of memory."""
    elements: int = 0
    slots: int = 0


@dataclass(frozen=True, slots=True)
class OperationPhase:
    """An operation in one phase, like ``conv1#convolution.0`` in ``grad_in``."""

    operation: str
    phase: str
    layer: str


@dataclass(frozen=True, slots=True)
class TrainingBaseline(StoredBaseline):
    """Facts that a worker establishes before the first trial.

    Attributes:
        steps: Number of steps of a run.
        epochs: Epoch of each step.
        losses, metric: Loss and metric of each step of the golden run.
        history_magnitudes: Largest magnitudes after each step of the golden run (see `HISTORY_KINDS`); ``None`` for
            a kind that does not exist.
        test_accuracy, test_loss: Final accuracy and loss of the golden run on ``samples`` held-out samples.
        operation_phases: Operations and phases that faults can corrupt.
        models: Fault models with their weights.
        golden_seconds: Duration of a whole run in seconds.
        optimizers: Names of the optimizers.
        raw_fit: Failures in 1e9 hours of each group of flip-flops in use, before any masking; empty if the
            accelerator does not define it.
    """

    name: str
    targets: tuple[TrainingTarget, ...]
    operation_phases: tuple[OperationPhase, ...]
    models: tuple[tuple[str, float], ...]
    steps: int
    epochs: tuple[int, ...]
    losses: tuple[float, ...]
    metric: tuple[float, ...]
    history_magnitudes: tuple[tuple[float | None, ...], ...]
    test_accuracy: float
    test_loss: float
    samples: int
    optimizers: tuple[str, ...]
    parameters: int
    notes: tuple[str, ...] = ()
    raw_fit: Mapping[str, float] = field(default_factory=dict)


class InjectionPoint(NamedTuple):
    """The step, the site and the fault model of one trial."""

    step: int
    site: str
    phase: str
    layer: str
    model: str


@dataclass(frozen=True, eq=False, slots=True)
class TrainingRow(StoredRow):
    """The stored result of one faulty training run.

    Attributes:
        injection: The step and the operation (or memory) of the fault.
        faults: JSON list of the injected faults, or its digest if the list is very long.
        injected_max: Largest injected magnitude; inf if a value is NaN or infinite.
        reference_max: Largest magnitude in the same tensor before the fault.
        end_reason: Reason why the run ended (see `END_REASONS`).
        steps_run: Number of steps run, from the step of the fault on.
        losses, metric: Loss and metric of each step run, float64[steps_run].
        history_magnitudes: Largest magnitudes after the fault (see `HISTORY_KINDS`), float64[<= WATCHED_STEPS, 3];
            inf if a value is NaN or infinite, NaN for a kind that does not exist.
        test_accuracy, test_loss: Accuracy and loss on held-out samples at the end; NaN if the run did not reach
            its end.
        churn: Share of held-out predictions that differ from the fault-free run's.
        detected_after: Number of steps from the fault to the alarm in a guarded run; ``None`` without an alarm.
        error: Text of the error that was raised, or of the alarm.
        seconds, worker: Duration and worker of the trial, which are not compared between stores.
        bit_identical: Whether the final state is identical to the fault-free run's.
    """

    trial: TrialId
    injection: InjectionPoint
    faults: Annotated[str, codec.FAULTS_JSON]
    injected_max: float
    reference_max: float
    end_reason: str
    steps_run: int
    losses: npt.NDArray[np.float64]
    metric: npt.NDArray[np.float64]
    history_magnitudes: npt.NDArray[np.float64]
    test_accuracy: float
    test_loss: float
    churn: float
    detected_after: int | None = None
    error: str = ""
    seconds: Seconds = 0.0
    worker: Annotated[int, RUN_SPECIFIC] = 0
    bit_identical: bool = field(default=False)

    def unguarded_trial(self) -> TrialId:
        """The trial without the guard that has the same fault."""
        return self.trial._replace(target=self.trial.target.removeprefix(GUARDED_PREFIX))


def row_without_curves(row: TrainingRow) -> TrainingRow:
    """A copy of a row without its curves."""
    return replace(row, losses=np.empty(0), metric=np.empty(0))


# -- further options, and how a request becomes a spec --------------------------------------------------------------------


def parse_thresholds(pairs: Mapping[str, float] | Sequence[str]) -> Thresholds:
    """Parse thresholds, given as a mapping or as texts like ``gap=0.05``; raises ``UsageError``.

    Other thresholds keep their defaults.
    """
    usual = Thresholds()
    texts = [pairs] if isinstance(pairs, str) else pairs
    result = {}
    for name, number in pairs.items() if isinstance(pairs, Mapping) else (text.partition("=")[::2] for text in texts):
        kinds = {part.name: type(getattr(usual, part.name)) for part in fields(Thresholds)}
        if name not in kinds:
            raise unknown_name_error("threshold", name, kinds)
        try:
            result[name] = kinds[name](str(number))
        except ValueError:
            noun = "a whole number" if kinds[name] is int else "a number"
            text = f"{name}={number}".rstrip("=")
            raise UsageError(f"--threshold {text!r}: expected {noun}, like {name}={getattr(usual, name)}") from None
    return Thresholds(**result)


def threshold_texts(thresholds: Any) -> list[str]:
    """The option texts of the thresholds that are not the defaults."""
    return [
        f"{name}={value:.15g}" for name, value in asdict(thresholds).items() if value != getattr(Thresholds(), name)
    ]


@dataclass(frozen=True)
class TrainingBudget(Budget):
    """The number of trials.

    A campaign cannot be split over machines, since the guarded trials depend on all other trials.
    """

    trials: Annotated[int, Option("Faulty runs; with --per, faulty runs of each target.", PRECISION_PANEL)] = 200
    shard: Annotated[tuple[int, int], NOT_AN_OPTION] = (1, 1)


@dataclass(frozen=True)
class TrainingAnalysisOptions:
    """Options of the analysis, which can change without running a trial again.

    ``margin``: how far held-out accuracy must be below the worst fault-free replica for a convergence failure.
    """

    thresholds: Annotated[Thresholds, Option(
        "A threshold of the outcome classes, like gap=0.05; repeat for more. See docs/concepts/trainings.md.",
        PRECISION_PANEL, "threshold", unset_value=(), parser=parse_thresholds, formatter=threshold_texts,
        is_repeatable=True)] = field(default_factory=Thresholds)  # fmt: skip
    confidence: Annotated[float, CONFIDENCE] = 0.95
    margin: Annotated[float, Option(
        "With --per, how far below the worst fault-free accuracy a run must end to be a convergence failure.",
        PRECISION_PANEL)] = 0.02  # fmt: skip

    def __post_init__(self) -> None:
        if not 0 < self.confidence < 1:
            raise UsageError(f"confidence is {self.confidence}; expected a share between 0 and 1, like 0.95")
        if not 0 <= self.margin < 1:
            raise UsageError(f"margin is {self.margin}; expected a share from 0 to below 1")


@dataclass(frozen=True)
class ReferenceRunOptions:
    """Options of the runs that faulty runs are compared with."""

    horizon: Annotated[int | None, Option(
        "End a run and count it as masked once its loss and accuracy have stayed close to the fault-free run's for this many "
        "steps.", PRECISION_PANEL,
        default_text="never")] = None  # fmt: skip
    replicas: Annotated[int, Option(
        "Number of fault-free runs for each of the two noise floors: implementation noise, and other seeds.",
        PRECISION_PANEL)] = 20  # fmt: skip
    noise: Annotated[
        str,
        Option(
            "What the runs of the implementation-noise floor vary: switches, as for unsilent noise.", PRECISION_PANEL
        ),
    ] = "impl"
    floor: Annotated[Path | None, Option(
        "File that stores the fault-free runs of the noise floors.", OUTPUT_PANEL,
        default_text="unsilent-noise-….sqlite here")] = None  # fmt: skip
    guard: Annotated[bool, Option(
        "Repeat under the guard every trial that ended different, and report what the guard caught.",
        EXECUTION_PANEL)] = False  # fmt: skip


def make_training_spec(request: Request) -> TrainingSpec:
    """The settings of a request, checked as far as possible without the training; raises ``UsageError``."""
    from unsilent.faults.fault_texts import split_from, split_lasts
    from unsilent.faults.hardware.presets import PRESETS

    spec = request[TrainingSpec]
    if spec.per is not None:
        if spec.per not in PER:
            raise unknown_name_error("--per", spec.per, PER)
        request.refuse_given(OPERATION_FAULT_OPTIONS, "--per corrupts parameters and optimizer state, not operations")
        for name, _ in spec.faults:
            if split_from(name)[0] in PRESETS:
                raise UsageError(
                    f"--fault {name} corrupts operations, but --per corrupts memory; choose a fault model like bitflip or zero"
                )
    else:
        request.refuse_given(("margin",), "--margin applies to convergence failures, which only --per counts")
        request.refuse_given(("moment",), "--moment applies to faults in memory, which only --per injects")
    if spec.moment not in MOMENTS:
        raise unknown_name_error("moment", spec.moment, MOMENTS)
    references = request[ReferenceRunOptions]
    if spec.accelerator is not None:
        from unsilent.faults.hardware.description_file import load_accelerator

        _ = load_accelerator(spec.accelerator).weighted_presets  # refused before the training runs
    lasting = next((name for name, _ in spec.faults if split_lasts(name)[1] != 1), None)
    if lasting is not None and references.guard:
        raise UsageError(
            f"--guard repeats trials with a fault in one step, but --fault is {lasting}; leave out lasts, or --guard"
        )
    for name, value, least, most in (
        ("steps", spec.steps, 1, MOST_STEPS), ("horizon", references.horizon, 2, MOST_STEPS),
        ("replicas", references.replicas, 1, MOST_REPLICAS), ("seed", spec.seed, 0, LARGEST), ("init", spec.init, 0, LARGEST),
    ):  # fmt: skip
        if value is not None:
            check_count(f"--{name}", value, least, most)
    return spec
