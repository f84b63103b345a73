"""Options of campaigns of every kind: budget, execution, analysis and report."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from unsilent.basics.errors import UsageError, unknown_name_error
from unsilent.basics.options import (
    CONFIDENCE,
    EXECUTION_PANEL,
    PRECISION_PANEL,
    WORKLOAD_PANEL,
    Option,
    check_count,
    check_path,
)
from unsilent.basics.sizes import as_byte_count
from unsilent.campaigns.spec import Spec, WorkerSettings
from unsilent.campaigns.stored_values import MOST_TRIALS

if TYPE_CHECKING:
    from unsilent.campaigns.executors import Executor
    from unsilent.campaigns.observer import Observer
    from unsilent.campaigns.runner import MakeRunner

ENGINES = ("auto", "plain")
MOST_PARTS = 10**9 - 1
"""Largest number of parts of a campaign."""


def read_pairs(pairs: Mapping[str, object] | Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Options of a workload, sorted, from texts ``key=value`` or a mapping; raises ``UsageError``."""
    if isinstance(pairs, Mapping):
        return tuple(sorted((str(key), str(value)) for key, value in pairs.items()))
    items = [pairs] if isinstance(pairs, str) else pairs
    for item in items:
        if isinstance(item, str) and "=" not in item:
            raise UsageError(f"cannot read --with {item!r}; expected key=value")
    try:
        return tuple(
            sorted(dict(item.partition("=")[::2] if isinstance(item, str) else item for item in items).items())
        )
    except (TypeError, ValueError):
        raise UsageError(f"cannot read the workload options {pairs!r}; expected key=value, or a mapping") from None


def write_pairs(pairs: Any) -> list[str]:
    """Options of a workload as texts ``key=value``: the inverse of `read_pairs`."""
    return [f"{key}={value}" for key, value in pairs]


WORKLOAD_OPTION = Option(
    "Option of the workload, as key=value. Can be given more than once.",
    WORKLOAD_PANEL,
    "with",
    parser=read_pairs,
    formatter=write_pairs,
    is_repeatable=True,
)
DATA = Option("Data file, for workloads that use one.", WORKLOAD_PANEL)
WEIGHTS = Option("Weights file, for workloads that use one.", WORKLOAD_PANEL)
SEED = Option("Seed of the campaign, which determines all random choices of its trials.", WORKLOAD_PANEL)
SHARD = Option(
    "Run only part I of N, like 2/4. unsilent merge joins the stores of all parts.",
    PRECISION_PANEL,
    default_text="1/1, all trials",
    separator="/",
)


@dataclass(frozen=True)
class Budget:
    """The number of trials of each stratum (target and number of flips).

    A larger budget extends a campaign.

    ``shard`` selects part I of N: the trials I-1, I-1+N, I-1+2N … of every stratum, so that each part is a fair sample of all
    trials.
    """

    trials: Annotated[int, Option("Number of trials of each target and number of flips.", PRECISION_PANEL)] = 1000
    shard: Annotated[tuple[int, int], SHARD] = (1, 1)

    def __post_init__(self) -> None:
        check_count("--trials", self.trials, 1, MOST_TRIALS - 1)
        part, parts = self.shard if len(self.shard) == 2 else (0, 0)
        if not 1 <= part <= parts <= MOST_PARTS:
            raise UsageError(f"--shard is {'/'.join(map(str, self.shard))}; expected I/N with I from 1 to N, like 2/4")
        if part > self.trials:
            raise UsageError(
                f"--shard {part}/{parts} has no trials, because --trials is {self.trials}; use fewer parts"
            )

    def resolve(self) -> Budget:
        """The budget itself.

        Kinds that derive the budget from other options override this.
        """
        return self

    def trial_numbers(self, slots: int | None) -> range:
        """The trial numbers of a stratum: all of its ``slots``, or ``trials`` of them if ``slots`` is None."""
        part, parts = self.shard
        return range(part - 1, self.trials if slots is None else slots, parts)


@dataclass(frozen=True)
class AnalysisOptions:
    """Options of the analysis of a store, which can change without running a trial again."""

    confidence: Annotated[float, CONFIDENCE] = 0.95

    def __post_init__(self) -> None:
        if not 0 < self.confidence < 1:
            raise UsageError(f"confidence is {self.confidence}; expected a number between 0 and 1, like 0.95")


@dataclass(frozen=True)
class ReportOptions:
    """Options of a report: none, unless a kind has a dataclass of its own."""


@dataclass(frozen=True)
class ExecutionOptions:
    """Options for where and how trials are run."""

    jobs: Annotated[int | None, Option(
        "Number of worker processes.", EXECUTION_PANEL,
        default_text="one less than the cores, fewer if memory is short; 1 with CUDA or Ray")] = None  # fmt: skip
    executor: Annotated[
        str | None,
        Option("Where trials run: serial, processes or ray.", EXECUTION_PANEL, default_text="depends on --jobs"),
    ] = None
    ray: Annotated[str | None, Option(
        "Address of the Ray cluster to run trials on, like 10.0.0.1:6379.", EXECUTION_PANEL,
        default_text="with --executor ray, a new cluster on this machine")] = None  # fmt: skip
    deadline: Annotated[float | None, Option(
        "Seconds after which a trial counts as a hang.", EXECUTION_PANEL,
        default_text="20 times the seconds of the golden run, at least 10")] = None  # fmt: skip

    def check(self) -> None:
        """Raise ``UsageError`` for options that contradict each other.

        Nothing is loaded.
        """
        from unsilent.campaigns.executors import resolve_executor_name

        resolve_executor_name(self.executor, jobs=self.jobs, deadline=self.deadline, address=self.ray)

    @property
    def worker_settings(self) -> WorkerSettings:
        """The worker settings that these options give."""
        return WorkerSettings(jobs=self.jobs or 1)

    def open_executor(self, make_runner: MakeRunner, spec: Spec, observer: Observer | None = None) -> Executor:
        """The executor that runs the trials of a campaign."""
        from unsilent.campaigns.executors import make_executor

        return make_executor(
            self.executor, make_runner, spec, jobs=self.jobs, deadline=self.deadline, observer=observer,
            worker_settings=self.worker_settings, address=self.ray,
        )  # fmt: skip


@dataclass(frozen=True)
class EngineOptions(ExecutionOptions):
    """Options of execution for kinds whose engine can skip operations that a fault does not affect."""

    engine: Annotated[str, Option(
        "auto (runs only operations that a fault affects) or plain (runs the whole model). Both give identical results.",
        EXECUTION_PANEL)] = "auto"  # fmt: skip
    memory: Annotated[int | None, Option(
        "Memory for the cached activations of all workers together, like 2GB.", EXECUTION_PANEL, parser=as_byte_count,
        default_text="a quarter of the free memory")] = None  # fmt: skip

    def check(self) -> None:
        """Raise ``UsageError`` for an unknown engine and for options that contradict each other."""
        if self.engine not in ENGINES:
            raise unknown_name_error("--engine", self.engine, ENGINES)
        super().check()

    @property
    def worker_settings(self) -> WorkerSettings:
        """The worker settings that these options give."""
        return WorkerSettings(self.engine, self.memory, self.jobs or 1)


def known_device(device: str) -> str:
    """The actual device for an option value such as ``auto``.

    Torch is loaded only if a CUDA driver is present or another device is named.
    """
    if device == "cpu" or (device == "auto" and not Path("/proc/driver/nvidia/version").exists()):
        return "cpu"
    from unsilent.engine.device_placement import resolve_device

    return resolve_device(device)


@contextmanager
def store_or_temporary(store: str | Path | None, name: str = "campaign.sqlite") -> Iterator[Path]:
    """The path of the given store, or of a temporary one that is removed afterwards."""
    if store is not None:
        yield check_path("--store", store)
        return
    with tempfile.TemporaryDirectory(prefix="unsilent-") as folder:
        yield Path(folder) / name
