"""Records of campaigns of ``unsilent pvf``: settings, budget, baseline and trial row.

`PvfSpec` has the settings, `PvfBudget` the number of trials, `PvfBaseline` the facts established before the first trial, and
`PvfTrialRow` the result of one trial.

The fingerprint of such a campaign covers weights, inputs, golden outputs, judge, kind of device, threads and versions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Ge, Lt

from unsilent.basics.errors import UsageError, unknown_name_error
from unsilent.basics.options import (
    FAULTS_PANEL,
    NOT_AN_OPTION,
    PRECISION_PANEL,
    WORKLOAD_PANEL,
    Option,
    Request,
    check_count,
)
from unsilent.basics.sizes import parse_whole_number
from unsilent.campaigns import codec
from unsilent.campaigns.codec import RUN_SPECIFIC, StoredRow
from unsilent.campaigns.options import DATA, SEED, SHARD, WORKLOAD_OPTION, Budget, known_device
from unsilent.campaigns.spec import Spec, StoredBaseline, TrialId
from unsilent.campaigns.stored_values import MOST_THREADS, MOST_TRIALS
from unsilent.faults.naming import is_transient, parse_site
from unsilent.outcomes.base import Outcome
from unsilent.outcomes.pvf_options import PvfAnalysisOptions
from unsilent.studies.pvf.memory_records import MemoryFacts, MemoryPart
from unsilent.studies.pvf.wanted_precision import Precision

if TYPE_CHECKING:
    from unsilent.faults.mixtures import Mixture
    from unsilent.faults.models import FaultModel

STRATA = ("none", "bits", "dtype")
FROM_LIST = "list"
"""Stands for the fault model and the sampling law if faults are given, not drawn."""
FROM_ACCELERATOR = "accelerator"
"""Stands for the fault model and the sampling law if faults come from the described memories of an accelerator."""
DEFAULT_TRIALS, DEFAULT_MOST_TRIALS = 1000, 200_000
"""Trials per target and number of flips: of a campaign without a requested precision, and the maximum with one."""
DRAWN_FAULT_OPTIONS = ("trials", "ci", "rel", "strata", "samples", "flips", "fault", "at", "law")
"""Options that have no effect if faults are given."""
DESCRIBED_FAULT_OPTIONS = ("strata", "samples", "flips", "fault", "at", "law", "faults")
"""Options that have no effect if an accelerator is described."""


ALL = 0
"""Stands for ``all`` as a number of trials or samples."""


def _number_or_all(option: str, noun: str, most: int) -> Callable[[int | str], int]:
    """A parser of an option that takes a number or ``all``; it raises ``UsageError``."""

    def read(value: int | str) -> int:
        if value == "all":
            return ALL
        count = parse_whole_number(value) if isinstance(value, str) else value
        if isinstance(count, int) and not isinstance(count, bool):
            return check_count(option, count, 1, most)
        raise UsageError(f"{option} is {value!r}; expected a number of {noun} of 1 or more, or all")

    return read


def _text_or_all(number: int) -> list[str]:
    """The option text of a number; ``all`` for `ALL`."""
    return ["all" if number == ALL else str(number)]


def read_width(width: float | str) -> str:
    """The value of ``--ci`` or ``--rel``, as text."""
    return str(width)


@dataclass(frozen=True, slots=True)
class PvfSpec(Spec):
    """The settings of a campaign, without those that change only its cost.

    ``flips`` is (None,) if the fault model determines the number of flips (a rate, a run). ``fault`` and ``law`` are `FROM_LIST`
    if faults are given, and `FROM_ACCELERATOR` if memories are described. ``strata`` "dtype" means one stratum for each dtype.
    ``samples`` is the number that each trial evaluates: 0 for all of all batches, None if it depends on the trial
    (`TrialId.sample_count`).
    """

    FILES: ClassVar[tuple[str, ...]] = ("data", "weights", "faults", "accelerator")
    workload: Annotated[str, Option(
        "A model with inputs: built-in name, file.py:name, package.module:name, hf:DIR or FILE.pt2.", WORKLOAD_PANEL,
        missing_error="no workload was named; give one like digits-cnn (see unsilent workloads)")]  # fmt: skip
    options: Annotated[tuple[tuple[str, str], ...], WORKLOAD_OPTION] = ()
    data: Annotated[str | None, DATA] = None
    weights: Annotated[str | None, Option("Weights file for workloads that take one.", WORKLOAD_PANEL)] = None
    fault: Annotated[str, Option(
        "Fault model, like bitflip:bits=exponent (see unsilent faults); a mixture, like '0.7*bitflip + 0.3*burst'; or "
        "FILE.py:NAME, a function of the old bits.", FAULTS_PANEL,
        parser=lambda value: str(getattr(value, "text", value)))] = "bitflip"  # fmt: skip
    flips: Annotated[tuple[int | None, ...], Option(
        "Faults per trial, or several such numbers to compare, like 1,8,128.", FAULTS_PANEL,
        default_text="1", unset_value=None, separator=",")] = (1,)  # fmt: skip
    at: Annotated[tuple[str, ...], Option(
        "Where faults are injected: parameters like 'layer1.*', or values of a run: 'op:*', 'op:layer1.*', 'input:*', "
        "'kv:*'. Repeat for more.", FAULTS_PANEL, is_repeatable=True)] = ("param:*",)  # fmt: skip
    per: Annotated[str, Option("What counts as one target: component, layer, tensor or bit.", FAULTS_PANEL)] = (
        "component"
    )
    law: Annotated[str, Option(
        "How faults are drawn: per-element (uniform over elements) or per-tensor (uniform over tensors first).",
        FAULTS_PANEL)] = "per-element"  # fmt: skip
    judge: Annotated[str | None, Option(
        "Rule that decides whether an output is incorrect, like topk:k=3.", WORKLOAD_PANEL,
        default_text="the workload's own")] = None  # fmt: skip
    seed: Annotated[int, SEED] = 0
    device: Annotated[str, Option("Device: auto, cpu, cuda or cuda:0.", WORKLOAD_PANEL, unset_value="auto")] = "cpu"
    dtype: Annotated[str | None, Option("Run the model in this floating-point type.", WORKLOAD_PANEL)] = None
    threads: Annotated[int, Option(
        "CPU threads per worker (part of a campaign's identity: results depend on it).", WORKLOAD_PANEL)] = 1  # fmt: skip
    study: Annotated[str, NOT_AN_OPTION] = "pvf"
    strata: Annotated[str, Option(
        "Stratify trials with one flip by bits (classes of bits), or none.", PRECISION_PANEL,
        default_text="none; bits for one flip with --ci or --rel", unset_value=None)] = "none"  # fmt: skip
    samples: Annotated[int | None, Option(
        "Samples that each trial evaluates, drawn at random from one batch: a number, or all.", PRECISION_PANEL,
        default_text="all; with --ci or --rel a pilot chooses for each target",
        parser=_number_or_all("--samples", "samples", MOST_TRIALS),
        formatter=_text_or_all)] = None  # fmt: skip
    exhaustive: Annotated[bool, NOT_AN_OPTION] = False
    faults: Annotated[str | None, Option(
        "Try each fault of this file once: JSON lines of faults, or a list of SCI-FI, PyTorchALFI or hdf5_corrupter.",
        FAULTS_PANEL)] = None  # fmt: skip
    faults_as: Annotated[str | None, Option(
        "Format of --faults, if the file does not tell it: unsilent, sci-fi, "
        "pytorchalfi:…, hdf5-corrupter", FAULTS_PANEL)] = None  # fmt: skip
    accelerator: Annotated[str | None, Option(
        "Draw faults by the memories of an accelerator (TOML file or name, like tpu-v4), and give their failure rates (FIT).",
        FAULTS_PANEL)] = None  # fmt: skip

    @property
    def is_transient(self) -> bool:
        """Whether faults corrupt values of one evaluation rather than only parameters.

        Faults in an accelerator's memories count as such, since their unit is an inference call.
        """
        return self.accelerator is not None or any(map(is_transient, self.at))

    @property
    def is_enumerated(self) -> bool:
        """Whether the trials try all possible faults, or all faults of a list."""
        return self.exhaustive or self.faults is not None


@dataclass(frozen=True, slots=True)
class TargetInfo:
    """Facts about one target: names, size and share of the sampling law."""

    name: str
    level: str
    component: str
    layer: str
    share: float
    elements: int
    bits_by_width: tuple[tuple[int, int], ...]
    """Pairs of an element width and the bits that may be corrupted in elements of it."""
    group: str = ""
    """Reported target: this target itself, or the target of which it is a stratum."""
    bits: tuple[int, ...] | None = None
    """Bit positions that are corrupted; None for all of them."""
    dtype: str = ""
    """Dtype of all elements, if it is known."""
    elements_by_site: Mapping[str, int] = field(default_factory=dict)
    """Elements of each site, if a stratum has only some of them."""
    slots: int = 0
    """Number of all possible or listed faults if the campaign tries each of them."""
    flips: tuple[int, ...] = ()
    """Numbers of flips of its trials; empty for all numbers of the campaign."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Facts about one corrupted tensor."""

    site: str
    component: str
    dtype: str
    shape: tuple[int, ...]
    """Largest shape over the batches if the tensor occurs once in each batch."""
    elements: int
    """Elements that may be corrupted, over all batches."""
    width: int
    """Bits of one element."""

    @property
    def layer(self) -> str:
        """The owner of the tensor: a module, an input, or a layer of the cache."""
        return parse_site(self.site).layer


@dataclass(frozen=True, slots=True)
class GoldenScores:
    """The possible range of the score, and the range and mean of the fault-free scores."""

    name: str
    lowest: float
    highest: float
    mean: float
    least: float
    most: float

    @property
    def loss_limits(self) -> tuple[float, float]:
        """The least and the most score that samples can lose.

        The least is at most 0, since a faulty score may be better.
        """
        return self.least - self.highest, self.most - self.lowest


@dataclass(frozen=True, slots=True)
class PvfBaseline(StoredBaseline):
    """The facts that a worker establishes before the first trial."""

    targets: tuple[TargetInfo, ...]
    tensors: tuple[TensorInfo, ...]
    samples: tuple[int, ...]
    judge: str
    notes: tuple[str, ...] = ()
    lookups: Mapping[str, list[int]] = field(default_factory=dict)
    memory_parts: tuple[MemoryPart, ...] = ()
    memories: tuple[MemoryFacts, ...] = ()
    trial_seconds: Annotated[float, Ge(0), Lt(math.inf)] = 0.0
    """Expected fixed seconds of a trial on one batch; ``sample_seconds`` adds those for each sample. Counted, not measured."""
    sample_seconds: Annotated[float, Ge(0), Lt(math.inf)] = 0.0
    right_answers: str = ""
    """For each sample, 1 if the fault-free answer equals its label, else 0; empty without labels, or with a score."""
    scores: GoldenScores | None = None
    """Scores of golden outputs; None for a workload without a score."""
    files: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of the named files, by option, so that they can be found again."""

    def targets_at(self, flips: int | None) -> tuple[TargetInfo, ...]:
        """The targets whose trials may have this number of flips; their shares sum to 1."""
        return tuple(t for t in self.targets if not t.flips or flips in t.flips)


@dataclass(frozen=True, slots=True)
class PvfTrialRow(StoredRow):
    """The stored row of one trial.

    ``outcome_codes`` has one `Outcome` byte per sample. Time and worker are not part of the row's content.
    """

    trial: TrialId
    faults: Annotated[str, codec.FAULTS_JSON]
    """JSON list of resolved faults, or their digest if there are very many elements."""
    outcome_codes: bytes
    incorrect_batches: Annotated[int, Ge(0)]
    severity: float
    error: str
    seconds: Annotated[float, Ge(0), Lt(math.inf), RUN_SPECIFIC]
    worker: Annotated[int, RUN_SPECIFIC] = 0
    graphed: Annotated[bool, RUN_SPECIFIC] = False
    """Whether CUDA graphs evaluated the trial; they do not change its outcome."""
    score_lost: float = math.nan
    """Mean over the evaluated samples of fault-free minus faulty score; NaN without a score or without evaluated samples."""

    def derived(self) -> dict[str, int]:
        """The number of samples by outcome."""
        return {o.name.lower(): self.outcome_codes.count(o) for o in Outcome}


# -- the request with its further options, and the spec made from it ------------------------------------------------------


@dataclass(frozen=True)
class PvfBudget:
    """The number of trials, or the precision that every row must reach."""

    trials: Annotated[int | None, Option(
        "Trials per target and number of flips; with --ci or --rel the maximum, pilot included. all: every possible single bit "
        "flip, narrowed with --at or bits=.", PRECISION_PANEL, default_text="1000; 200000 with --ci or --rel",
        parser=_number_or_all("--trials", "trials", MOST_TRIALS - 1), formatter=_text_or_all)] = None  # fmt: skip
    ci: Annotated[str | None, Option(
        "Run until every row's interval has this half-width, like 0.1%; model=0.1% asks it only of rows with this name or glob.",
        PRECISION_PANEL, parser=read_width)] = None  # fmt: skip
    rel: Annotated[str | None, Option(
        "Run until every half-width is this share of its estimate, like 20%, or that of --ci (default 0.02%) if that is wider; "
        "model=20% asks it only of rows with this name or glob.",
        PRECISION_PANEL,
        parser=read_width)] = None  # fmt: skip
    shard: Annotated[tuple[int, int], SHARD] = (1, 1)

    @property
    def precision(self) -> Precision | None:
        """The precision that rows must reach; None if none is requested. Raises ``UsageError``."""
        return Precision.parse(self.ci, self.rel)

    def resolve(self) -> Budget:
        """The maximum number of trials; raises ``UsageError``."""
        most = DEFAULT_TRIALS if self.precision is None else DEFAULT_MOST_TRIALS
        return Budget(self.trials or most, self.shard)


def make_pvf_spec(options: Request) -> PvfSpec:
    """The checked settings of a request, with texts in canonical form.

    Raises ``UsageError`` for options that would be ignored, and if flips are repeated, below 1, or also given in the fault model.
    """
    from unsilent.faults.mixtures import asked_fault_model

    adaptive = options[PvfBudget].precision is not None
    spec = replace(options[PvfSpec], exhaustive=options[PvfBudget].trials == ALL)
    if spec.faults is not None:
        options.refuse_given(DRAWN_FAULT_OPTIONS, "--faults lists the faults to try")
    elif spec.faults_as is not None:
        raise UsageError(
            f"--faults-as {spec.faults_as} is the format of a list of faults; give --faults FILE, or omit --faults-as"
        )
    if spec.accelerator is not None:
        options.refuse_given(DESCRIBED_FAULT_OPTIONS, "--accelerator describes the faults and what they corrupt")
    if spec.exhaustive:
        options.refuse_given(("ci", "rel"), "--trials all runs every possible fault")
    if adaptive:
        options.refuse_given(("shard",), "--ci and --rel need all trials in one store to decide when to stop")
    check_count("--threads", spec.threads, 1, MOST_THREADS)
    device = known_device(spec.device)
    if device != "cpu":
        options.given_values["device"] = device  # a command for another machine has to name it
    spec = replace(spec, samples=_samples(spec, options[PvfAnalysisOptions].unit or "sample", adaptive))
    if spec.faults is not None:
        from unsilent.faults.lists import kind_of_list

        at = (f"{kind_of_list(spec.faults, spec.faults_as)}:*",)
        return replace(spec, device=device, fault=FROM_LIST, law=FROM_LIST, flips=(None,), at=at)
    if spec.accelerator is not None:
        held = _held_sites(spec.accelerator)
        if spec.per == "bit":
            raise UsageError("--per bit splits flips by bit, but --accelerator draws whole events; use --per tensor")
        return replace(
            spec, device=device, fault=FROM_ACCELERATOR, law=FROM_ACCELERATOR, flips=(None,), at=held, samples=0
        )
    model = asked_fault_model(spec.fault)
    flips = _flips_of_model(spec, model, options.given_values.get("flips"))
    strata = options.given_values.get("strata")
    if strata is None:
        single = model.text == "bitflip" and 1 in flips and spec.per != "bit"
        strata = "dtype" if spec.exhaustive else "bits" if adaptive and single else "none"
    if strata not in STRATA:
        raise unknown_name_error("--strata", strata, STRATA)
    return replace(spec, device=device, fault=model.text, flips=flips, strata=strata)


def _flips_of_model(
    spec: PvfSpec, model: FaultModel | Mixture, flips: tuple[int, ...] | None
) -> tuple[int | None, ...]:
    """The numbers of faults per trial, for a fault model or a mixture; see `_flips`."""
    from unsilent.faults.mixtures import Mixture

    if not isinstance(model, Mixture):
        return _flips(flips, model.has_explicit_count, model.pattern.text)
    if spec.per == "bit":
        raise UsageError("--per bit splits flips by bit, but --fault is a mixture; use --per tensor")
    return _flips(flips, True, "mixture")


def _held_sites(accelerator: str) -> tuple[str, ...]:
    """The addresses of everything that the memories of an accelerator hold.

    Raises ``UsageError`` if the accelerator describes no memories.
    """
    from unsilent.faults.hardware.description_file import load_accelerator

    memories = load_accelerator(accelerator).description.memories
    if not memories:
        raise UsageError(
            f"--accelerator {accelerator} describes no memories; add a table [memories.NAME] for each, or use --fault"
        )
    return tuple(dict.fromkeys(address for memory in memories.values() for address in memory.holds))


def _samples(spec: PvfSpec, unit: str, adaptive: bool) -> int | None:
    """The number of samples per trial; None if a pilot chooses it.

    Raises ``UsageError`` if the number cannot be chosen for these faults.
    """
    if spec.samples and unit == "batch":
        raise UsageError(
            f"--samples is {spec.samples}, but --unit batch judges whole batches; use --unit sample, or --samples all"
        )
    if spec.is_enumerated or spec.is_transient:
        if spec.samples:
            what = "a fault in a value of a run acts in all samples of one batch"
            if spec.exhaustive:
                what = "--trials all evaluates all samples"
            raise UsageError(
                f"--samples {spec.samples} is the number of samples of each trial, but {what}; omit --samples"
            )
        return 0
    return None if spec.samples is None and adaptive and unit == "sample" else spec.samples or 0


def _flips(flips: tuple[int, ...] | None, counted: bool, pattern: str) -> tuple[int | None, ...]:
    """The numbers of faults per trial; None if the fault model sets its own count (``counted``)."""
    if flips is None:
        return (None,) if counted else (1,)
    if counted:
        raise UsageError(f"--flips and the {pattern} of --fault both set the number of flips; give only one")
    if any(count < 1 for count in flips):
        raise UsageError(f"--flips contains {min(flips)}; expected 1 or more")
    if len(set(flips)) != len(flips) or not flips:
        raise UsageError(f"--flips is {','.join(map(str, flips))!r}; expected each number once, like 1,8,128")
    return flips
