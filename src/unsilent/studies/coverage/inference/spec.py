"""Records of ``unsilent inference-coverage``: settings, baseline and trial row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Annotated, ClassVar

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
from unsilent.campaigns.options import DATA, SEED, SHARD, WORKLOAD_OPTION, AnalysisOptions, Budget, known_device
from unsilent.campaigns.spec import Spec, StoredBaseline, Target, TrialId

WEIGHT_FLIP, WEIGHT_RATE, OUTPUT_FLIP, OUTPUT_BURST = ERROR_MODELS = (
    "weight-flip",
    "weight-rate",
    "output-flip",
    "output-burst",
)
"""Error models: one flipped bit of a parameter; bits of parameters flipped at a rate; one flipped bit of an operation's output;
random values or a burst in an operation's output."""
IN_WEIGHTS = (WEIGHT_FLIP, WEIGHT_RATE)
CALIBRATION, TEST, SHIFTED = CLEAN_TARGETS = ("calibration", "test", "shifted")
"""Parts of the clean samples: for thresholds; for faults and false alarms; unusual but correct samples."""
MOST_FAULT_BATCHES = 8
"""Maximum number of batches of test samples in which faults act."""
TIMING = TrialId("timing", None, 0)
"""Trial that measures the cost of detectors."""
FOUND, NOT_FOUND, JUDGED, TIMED = ENDS_OF_RUNS = ("found", "not-found", "judged", "timed")
ENDS = (*ENDS_OF_RUNS, "raised", "crash", "hang")
"""Ends of trials. ``found``: a fault changed an answer; ``not-found``: no fault changed one; ``judged``: clean samples."""
CLAMP, ZERO, RERUN, REPAIR, GOLDEN, CLAMP_IN_RUN, ZERO_IN_RUN = RUNGS = (
    "clamp", "zero", "rerun", "repair", "golden", "clamp-in-run", "zero-in-run",
)  # fmt: skip
"""Mitigations of changed answers, each tried alone; see `unsilent.studies.coverage.inference.mitigations`."""
TIMED_BATCHES = (1, 32)
"""Numbers of samples in the batches whose time is measured."""
DEFAULT_DETECTORS = (
    "dr-dna", "ranger", "clip-act", "quantiles", "symptom", "nonfinite", "abft", "weight-integrity", "golden-test",
    "duplication:share=0.5", "duplication", "dr-dna+weight-integrity", "dr-dna+weight-integrity+abft",
)  # fmt: skip
DEFAULT_BURSTS = ("random", "random:count=8,stride=16")
MOST_TRIES, MOST_CLEAN = 10**6, 10**7


@dataclass(frozen=True, slots=True)
class InferenceCoverageSpec(Spec):
    """The settings of a campaign that scores detectors of inference."""

    FILES: ClassVar[tuple[str, ...]] = ("data", "weights")
    workload: Annotated[str, Option(
        "A model with inputs: built-in name, file.py:name, package.module:name, hf:DIR or FILE.pt2.",
        WORKLOAD_PANEL, missing_error="no workload was named; give one like digits-cnn (see unsilent workloads)")]  # fmt: skip
    options: Annotated[tuple[tuple[str, str], ...], WORKLOAD_OPTION] = ()
    data: Annotated[str | None, DATA] = None
    weights: Annotated[str | None, Option("Weights file for workloads that take one.", WORKLOAD_PANEL)] = None
    judge: Annotated[str | None, Option(
        "Rule that decides whether an output is incorrect, like topk:k=3.", WORKLOAD_PANEL,
        default_text="the workload's own")] = None  # fmt: skip
    detectors: Annotated[tuple[str, ...], Option(
        "A detector, like dr-dna or dr-dna:bins=64; repeat for more.", FAULTS_PANEL, "detector",
        default_text=" ".join(DEFAULT_DETECTORS), is_repeatable=True)] = DEFAULT_DETECTORS  # fmt: skip
    only: Annotated[tuple[str, ...], Option(
        f"Error models to draw faults of: {', '.join(ERROR_MODELS)}, or globs over them; repeat for more.", FAULTS_PANEL,
        default_text="all", is_repeatable=True)] = ("*",)  # fmt: skip
    flip_rate: Annotated[float, Option("Share of the bits of all parameters that weight-rate flips.", FAULTS_PANEL)] = (
        1e-5
    )
    output_flip: Annotated[str, Option(
        "The fault model of output-flip; bitflip:bits=sign+exponent takes fewer tries.", FAULTS_PANEL)] = "bitflip"  # fmt: skip
    bursts: Annotated[tuple[str, ...], Option(
        "A fault model of output-burst; repeat for more: each fault is of one of them, drawn at random.", FAULTS_PANEL, "burst",
        default_text=" ".join(DEFAULT_BURSTS), is_repeatable=True)] = DEFAULT_BURSTS  # fmt: skip
    tries: Annotated[int, Option(
        "Maximum number of faults that a trial draws until one changes an answer.", FAULTS_PANEL)] = 3000  # fmt: skip
    profile_samples: Annotated[int, Option("Clean samples that detectors learn from.", PRECISION_PANEL)] = 600
    clean_samples: Annotated[int, Option(
        "Clean samples for thresholds; as many again for false alarms, and as many unusual (shifted) ones.",
        PRECISION_PANEL)] = 2000  # fmt: skip
    seed: Annotated[int, SEED] = 0
    device: Annotated[str, Option("Device: auto, cpu, cuda or cuda:0.", WORKLOAD_PANEL, unset_value="auto")] = "cpu"
    threads: Annotated[int, NOT_AN_OPTION] = 1
    study: Annotated[str, NOT_AN_OPTION] = "inference-coverage"

    @property
    def targets(self) -> tuple[Target, ...]:
        """The targets that trials are drawn for."""
        return tuple(Target(name) for name in ERROR_MODELS if any(fnmatchcase(name, glob) for glob in self.only))


@dataclass(frozen=True, slots=True)
class DetectorInfo:
    """Facts about a calibrated detector.

    Attributes:
        layers: Run of a layer for each row of the margins, see `unsilent.studies.coverage.inference.detector_rows`.
        flops: Share of a pass's FLOPs that have run when each row is known.
        nbytes: Memory of the profile in bytes.
    """

    name: str
    layers: tuple[str, ...]
    flops: tuple[float, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class InferenceCoverageBaseline(StoredBaseline):
    """Facts that a worker establishes before the first trial.

    Attributes:
        samples: Number of samples in each batch in which faults act.
        clean_trials, clean_samples: Numbers of trials and of samples for each of `CLEAN_TARGETS`.
        golden_seconds: Estimated maximum duration of a trial with all of its tries, in seconds.
        model_bytes: Bytes of parameters and buffers.
        parity_bytes: Bytes of checksums and parity of the rung ``repair``.
    """

    name: str
    targets: tuple[Target, ...]
    detectors: tuple[DetectorInfo, ...]
    samples: tuple[int, ...]
    clean_trials: Mapping[str, int]
    clean_samples: Mapping[str, int]
    parameters: int
    model_bytes: int
    parity_bytes: int
    judge: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False, slots=True)
class InferenceCoverageRow(StoredRow):
    """The stored result of a trial: of a fault that changed answers, of clean samples, or of timing.

    Attributes:
        end: One of `ENDS`.
        batch: Number of the batch in which the fault acts.
        faults: JSON list of the injected faults, or its digest if the list is very long.
        layer: Layer whose own operation was corrupted; empty if there is none.
        tried, masked, benign, due: Number of faults drawn, and outcomes of those before the fault that was found.
        samples: Number of samples of the batch, or of clean samples.
        changed: Number of samples whose answer the fault changed.
        flags: Whether the fault changed each sample's answer, uint8[samples].
        margins: Margins, float32; for a fault [layers of all detectors, changed], for clean samples the largest ones,
            [detectors, samples].
        originals: Number of each clean sample's original, int64; different parts have different originals.
        restored: Whether each changed answer is golden again, for each of `RUNGS`, uint8[rungs, changed].
        rung_seconds: CPU time of each rung in seconds, float64[rungs].
        times: CPU seconds of a pass alone and with each detector, for `TIMED_BATCHES`, float64[1 + detectors, 2].
        error: Text of the error that was raised.
        seconds, worker: Duration and worker of the trial, which are not compared between stores.
    """

    trial: TrialId
    end: str
    batch: Annotated[int, Ge(0)]
    faults: Annotated[str, FAULTS_JSON]
    layer: str
    tried: Annotated[int, Ge(0)]
    masked: Annotated[int, Ge(0)]
    benign: Annotated[int, Ge(0)]
    due: Annotated[int, Ge(0)]
    samples: Annotated[int, Ge(0)]
    changed: Annotated[int, Ge(0)]
    flags: npt.NDArray[np.uint8]
    margins: npt.NDArray[np.float32]
    originals: npt.NDArray[np.int64]
    restored: npt.NDArray[np.uint8]
    rung_seconds: Annotated[npt.NDArray[np.float64], RUN_SPECIFIC]
    times: Annotated[npt.NDArray[np.float64], RUN_SPECIFIC]
    error: str = ""
    seconds: Seconds = 0.0
    worker: Annotated[int, RUN_SPECIFIC] = 0


@dataclass(frozen=True)
class InferenceCoverageBudget(Budget):
    """The number of trials."""

    trials: Annotated[int, Option("Faults of each error model that change an answer.", PRECISION_PANEL)] = 200
    shard: Annotated[tuple[int, int], SHARD] = (1, 1)


@dataclass(frozen=True)
class InferenceCoverageOptions(AnalysisOptions):
    """Options of the analysis of a store."""

    rate: Annotated[float, Option(
        "False alarms per sample at which detectors are compared.", PRECISION_PANEL)] = 0.01  # fmt: skip

    def __post_init__(self) -> None:
        AnalysisOptions.__post_init__(self)
        if not 0 < self.rate < 1:
            raise UsageError(f"rate is {self.rate}; expected a share of samples between 0 and 1, like 0.01")


def make_inference_spec(request: Request) -> InferenceCoverageSpec:
    """The settings of a request, checked as far as possible without the workload; raises ``UsageError``."""
    from unsilent.faults import fault_model
    from unsilent.protection.detector import make_detector

    spec = request[InferenceCoverageSpec]
    check_count("--tries", spec.tries, 1, MOST_TRIES)
    check_count("--seed", spec.seed, 0, LARGEST)
    check_count("--profile-samples", spec.profile_samples, 10, MOST_CLEAN)
    check_count("--clean-samples", spec.clean_samples, 1, MOST_CLEAN)
    if not 0 < spec.flip_rate <= 1:
        raise UsageError(f"--flip-rate is {spec.flip_rate}; expected a share of bits above 0, like 1e-6")
    for glob in spec.only:
        if not any(fnmatchcase(name, glob) for name in ERROR_MODELS):
            raise unknown_name_error("error model", glob, ERROR_MODELS)
    names = spec.detectors
    if len(set(names)) < len(names) or not names:
        raise UsageError(f"--detector is {' '.join(names) or 'empty'}; expected each detector once, at least one")
    if stateful := [name for name in names if "slices=" in name or "every=" in name]:
        raise UsageError(
            f"--detector {stateful[0]} acts in some calls only, so that trials would depend on each other; leave out slices "
            "and every"
        )
    for name in names:
        make_detector(name)
    for text in (spec.output_flip, *spec.bursts):
        fault_model(text)
    if not spec.bursts:
        raise UsageError("--burst is empty; expected at least one fault model, like random")
    device = known_device(spec.device)
    if device != "cpu":
        request.given_values["device"] = device  # a command for another machine has to name it
    return replace(spec, device=device)
