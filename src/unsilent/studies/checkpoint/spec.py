"""Records of ``unsilent checkpoint study``: settings, baseline and trial row."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from annotated_types import Ge

from unsilent.basics.errors import UsageError, unknown_name_error
from unsilent.basics.lazy_numpy import np, npt
from unsilent.basics.options import (
    EXECUTION_PANEL,
    FAULTS_PANEL,
    NOT_AN_OPTION,
    PRECISION_PANEL,
    WORKLOAD_PANEL,
    Option,
    Request,
)
from unsilent.campaigns.codec import FAULTS_JSON, RUN_SPECIFIC, Seconds, StoredRow
from unsilent.campaigns.options import DATA, SEED, WORKLOAD_OPTION, AnalysisOptions
from unsilent.campaigns.spec import Spec, StoredBaseline, TrialId
from unsilent.workloads.distributed.strategy_names import STRATEGIES

if TYPE_CHECKING:
    from unsilent.workloads.distributed.orders import Restart

SECTIONS: Mapping[str, str] = {
    "weights": "parameters of the model",
    "statistics": "running means and variances of norm layers",
    "first_moment": "first moments of the optimizer (Adam), or its momentum (SGD)",
    "second_moment": "second moments of the optimizer (Adam)",
    "scheduler": "learning rates and other numbers of the optimizer's groups and of schedulers",
    "collectives": "what one rank sends in a collective of one step after the restart; the file stays as it is",
}
"""Parts that can be corrupted (sections of the checkpoint, and payloads of collectives) -> their descriptions."""
COLLECTIVES = "collectives"
LOADED_BY: Mapping[str, tuple[Restart, bool]] = {
    "all": ("after", False),
    "one-after": ("after", False),
    "one-before": ("before", False),
    "one-after-broadcast": ("after", True),
    "one-before-broadcast": ("before", True),
}
"""Ranks that load the corrupted file (``one``: the last rank) -> whether they load it before or after the model is wrapped, and
whether rank 0's optimizer state is then sent to all ranks."""
ENDS = ("finished", "not-finite", "raised", "crash", "hang")
FOLLOWED = ENDS[:2]
"""Ends of runs whose steps were recorded."""


def read_names(known: Collection[str], noun: str) -> Any:
    """A parser of comma-separated names, which raises ``UsageError`` for unknown ones."""

    def read(value: Any) -> tuple[str, ...]:
        names = tuple(part.strip() for part in (value.split(",") if isinstance(value, str) else value))
        for name in names:
            if name not in known:
                raise unknown_name_error(noun, str(name), known)
        if not names or len(set(names)) < len(names):
            raise UsageError(
                f"{','.join(names) or 'nothing'} is given as {noun}; expected each name once, joined by commas"
            )
        return names

    return read


def joined(names: Any) -> list[str]:
    """The option text of names: joined by commas, in a list of one element."""
    return [",".join(names)]


@dataclass(frozen=True)
class CheckpointSpec(Spec):
    """The settings of a campaign, from which the identity of the campaign derives."""

    FILES: ClassVar[tuple[str, ...]] = ("data",)
    workload: Annotated[str, Option(
        "A training: built-in name, file.py:name or package.module:name.", WORKLOAD_PANEL,
        missing_error="no training was named; give one like train-resnet (see unsilent workloads)")]  # fmt: skip
    options: Annotated[tuple[tuple[str, str], ...], WORKLOAD_OPTION] = ()
    data: Annotated[str | None, DATA] = None
    strategies: Annotated[tuple[str, ...], Option(
        "How the training is distributed: single, ddp, fsdp2, horovod, zero1; several joined by commas.", WORKLOAD_PANEL,
        "strategy", parser=read_names(STRATEGIES, "strategy"), formatter=joined)] = ("single", "ddp")  # fmt: skip
    ranks: Annotated[int, Option("Processes of every strategy but single.", WORKLOAD_PANEL)] = 2
    step: Annotated[int | None, Option(
        "Steps before the checkpoint is saved.", WORKLOAD_PANEL, default_text="half of --steps")] = None  # fmt: skip
    steps: Annotated[int | None, Option(
        "Steps of the whole training.", WORKLOAD_PANEL, default_text="all of the training")] = None  # fmt: skip
    init: Annotated[int, Option("Seed of the training itself.", WORKLOAD_PANEL)] = 0
    sections: Annotated[tuple[str, ...], Option(
        "What is corrupted: weights, statistics, first_moment, second_moment, scheduler, collectives; several joined by commas.",
        FAULTS_PANEL, "section", parser=read_names(SECTIONS, "section"),
        formatter=joined)] = ("weights", "first_moment", "second_moment")  # fmt: skip
    fault: Annotated[str, Option("Fault model, without a count, like bitflip:bits=0-29.", FAULTS_PANEL)] = "bitflip"
    flips: Annotated[tuple[int, ...], Option(
        "Numbers of flips (or elements) in one checkpoint.", FAULTS_PANEL, separator=",")] = (1, 10, 100)  # fmt: skip
    law: Annotated[str, Option(
        "How faults are drawn: per-element (uniform over elements) or per-tensor (uniform over tensors first).",
        FAULTS_PANEL)] = "per-element"  # fmt: skip
    loaded_by: Annotated[tuple[str, ...], Option(
        "Who loads the corrupted file: all ranks, or only the last one, after or before the model is wrapped (one-after, "
        "one-before; with -broadcast added, rank 0's optimizer state is then sent to all); several joined by commas.",
        FAULTS_PANEL, parser=read_names(LOADED_BY, "way to load"),
        formatter=joined)] = ("all",)  # fmt: skip
    seed: Annotated[int, SEED] = 0
    threads: Annotated[int, NOT_AN_OPTION] = 1
    study: Annotated[str, NOT_AN_OPTION] = "checkpoint-study"


def make_checkpoint_spec(request: Request) -> CheckpointSpec:
    """The checked settings of a request; raises ``UsageError``."""
    from unsilent.faults.models import fault_model
    from unsilent.faults.population import check_law

    spec = request[CheckpointSpec]
    if fault_model(spec.fault).has_explicit_count:
        raise UsageError(f"--fault {spec.fault} sets how many are corrupted, as --flips does; give one of them")
    check_law(spec.law)
    if spec.ranks < 2:
        raise UsageError(f"--ranks is {spec.ranks}; expected 2 or more (use --strategy single for one process)")
    if not spec.flips or len(set(spec.flips)) < len(spec.flips) or min(spec.flips) < 1:
        raise UsageError(f"--flips is {','.join(map(str, spec.flips))}; expected different numbers, 1 or more")
    if spec.strategies == ("single",) and (COLLECTIVES in spec.sections or "all" not in spec.loaded_by):
        raise UsageError(
            "one process has no collectives and no other ranks; choose a --strategy with several, like ddp"
        )
    return spec


@dataclass(frozen=True)
class CheckpointAnalysisOptions(AnalysisOptions):
    """Options of the analysis, which can change without running a trial again."""

    gap: Annotated[float, Option(
        "A resume is harmful if it loses more accuracy than this, as a share or like 2%, and more than the noise of seeds.",
        PRECISION_PANEL)] = 0.02  # fmt: skip


@dataclass(frozen=True)
class FloorOptions:
    """Options of the fault-free runs that a resume is compared with."""

    replicas: Annotated[int, Option("Fault-free runs of each noise floor.", PRECISION_PANEL)] = 20
    floor: Annotated[Path | None, Option(
        "File that stores the fault-free runs.", EXECUTION_PANEL,
        default_text="unsilent-noise-….sqlite in the current folder")] = None  # fmt: skip


@dataclass(frozen=True, slots=True)
class CheckpointTarget:
    """A target: a strategy, a section, and the ranks that load the corrupted file."""

    name: str
    strategy: str
    section: str
    loaded_by: str
    elements: int
    slots: int = 0


@dataclass(frozen=True, slots=True)
class CleanResume:
    """The fault-free resume of one strategy, with which the faulty resumes are compared.

    Attributes:
        strategy: Name of the strategy.
        ranks: Number of processes.
        losses, metric: Mean over ranks for each step; the metric is the accuracy of the batch, or the negative loss.
        evaluated_at: Number of steps done at each evaluation.
        accuracy, held_out_loss: Accuracy and loss on held-out samples at each evaluation.
        checkpoint_hash: Hash of all tensors of the checkpoint, by name; equal for strategies whose states have the same bits.
        final_hashes: Hash of the final state of each rank; ranks may differ in running statistics.
        elements: Number of parameter elements that each rank has of each layer (for fsdp2, of its shard).
        seconds: Duration of the resume in seconds.
    """

    strategy: str
    ranks: int
    losses: tuple[float, ...]
    metric: tuple[float, ...]
    evaluated_at: tuple[int, ...]
    accuracy: tuple[float, ...]
    held_out_loss: tuple[float, ...]
    checkpoint_hash: str
    final_hashes: tuple[str, ...]
    elements: tuple[tuple[int, ...], ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class CheckpointBaseline(StoredBaseline):
    """Facts that a worker establishes before the first trial.

    Attributes:
        step, steps: Number of steps before the checkpoint, and of the whole training.
        layers: Modules with floating-point parameters or buffers.
        resumes: Clean resume of each strategy.
        golden_seconds: Duration of the longest clean resume in seconds, including the start of its ranks.
    """

    name: str
    targets: tuple[CheckpointTarget, ...]
    step: int
    steps: int
    layers: tuple[str, ...]
    resumes: tuple[CleanResume, ...]

    def resume(self, strategy: str) -> CleanResume:
        """The clean resume of a strategy."""
        return next(resume for resume in self.resumes if resume.strategy == strategy)

    def target(self, name: str) -> CheckpointTarget:
        """The target with the given name."""
        return next(target for target in self.targets if target.name == name)


@dataclass(frozen=True, eq=False, slots=True)
class CheckpointRow(StoredRow):
    """The stored result of one resume from a corrupted checkpoint.

    Attributes:
        faults: JSON list of the faults in the checkpoint.
        end: Reason why the run ended, one of `ENDS`.
        steps_run: Number of steps run after the checkpoint.
        evaluations: Number of evaluations of the model; the first is right after the restart.
        bit_identical: Whether all ranks ended with the bits of the clean resume.
        final_hash: Hash of rank 0's final state; empty if the run did not end by itself.
        error: Text of the error that was raised.
        losses, metric: Mean over ranks for each step, float64[steps_run].
        accuracy, held_out_loss: Accuracy and loss of rank 0 on held-out samples, float64[evaluations].
        nonfinite, extreme: Number of elements in all ranks' models that are NaN or infinite, or have a magnitude above 1e6,
            int64[evaluations, layers].
        changed: Number of parameter elements with other bits than in the clean resume, int64[ranks, evaluations, layers]; -1
            if it is not known, because the clean resume had no evaluation at this step.
    """

    trial: TrialId
    faults: Annotated[str, FAULTS_JSON]
    end: str
    steps_run: Annotated[int, Ge(0)]
    evaluations: Annotated[int, Ge(0)]
    bit_identical: bool
    final_hash: str
    error: str
    losses: npt.NDArray[np.float64]
    metric: npt.NDArray[np.float64]
    accuracy: npt.NDArray[np.float64]
    held_out_loss: npt.NDArray[np.float64]
    nonfinite: npt.NDArray[np.int64]
    extreme: npt.NDArray[np.int64]
    changed: npt.NDArray[np.int64]
    seconds: Seconds = 0.0
    worker: Annotated[int, RUN_SPECIFIC] = 0
