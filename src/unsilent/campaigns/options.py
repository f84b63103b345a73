"""What is asked of campaigns of every kind beside their spec: how many trials, where they run, how their store is read."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from unsilent.campaigns.spec import Means, Spec
from unsilent.errors import UsageError, unknown
from unsilent.options import CONFIDENCE, MEANS, PRECISION, RUNS, Option
from unsilent.sizes import read_bytes

if TYPE_CHECKING:
    from unsilent.campaigns.executors import Executor
    from unsilent.campaigns.observer import Observer

ENGINES = ("auto", "plain")


def read_pairs(given: Any) -> tuple[tuple[str, str], ...]:
    """Options of a workload, sorted, from texts ``key=value`` or from a mapping; raises ``UsageError``."""
    if isinstance(given, Mapping):
        return tuple(sorted((str(key), str(value)) for key, value in given.items()))
    items = [given] if isinstance(given, str) else given
    for item in items:
        if isinstance(item, str) and "=" not in item:
            raise UsageError(f"cannot read --with {item!r}; expected key=value")
    try:
        return tuple(
            sorted(dict(item.partition("=")[::2] if isinstance(item, str) else item for item in items).items())
        )
    except (TypeError, ValueError):
        raise UsageError(f"cannot read options {given!r} of a workload; expected key=value, or a mapping") from None


def write_pairs(pairs: Any) -> list[str]:
    """The reverse."""
    return [f"{key}={value}" for key, value in pairs]


WITH = Option(
    "Option of the workload, key=value; repeat for more.",
    RUNS,
    "with",
    read=read_pairs,
    write=write_pairs,
    repeated=True,
)
DATA = Option("Data file for workloads that take one.", RUNS)
SEED = Option("Campaign seed; every trial's randomness derives from it.", RUNS)
SHARD = Option("Run part I of N, like 2/4; unsilent merge joins the stores.", PRECISION, usual="1/1, all", joined="/")


@dataclass(frozen=True)
class Budget:
    """How much may be spent; raising it extends a campaign. ``trials`` is per stratum (target and number of flips).

    ``shard``, part I of N: of every stratum the trials I-1, I-1+N, I-1+2N …, so that each part is a fair sample of the whole.
    """

    trials: Annotated[int, Option("Trials of each target.", PRECISION)] = 1000
    shard: Annotated[tuple[int, int], SHARD] = (1, 1)

    def __post_init__(self) -> None:
        if self.trials < 1:
            raise UsageError(f"--trials is {self.trials}; expected 1 or more")
        part, parts = self.shard if len(self.shard) == 2 else (0, 0)
        if not 1 <= part <= parts:
            raise UsageError(f"--shard is {'/'.join(map(str, self.shard))}; expected I/N with I from 1 to N, like 2/4")
        if part > self.trials:
            raise UsageError(f"--shard {part}/{parts} of --trials {self.trials} is empty; ask for fewer parts")

    def resolve(self) -> Budget:
        """Itself; of a kind that decides it from other options, what was decided."""
        return self

    def numbers(self, slots: int | None) -> range:
        """Which trials of a stratum: of all its ``slots``, or as many as are asked."""
        part, parts = self.shard
        return range(part - 1, self.trials if slots is None else slots, parts)


@dataclass(frozen=True)
class Reading:
    """How a store is read: what may change without a trial being run again."""

    confidence: Annotated[float, CONFIDENCE] = 0.95

    def __post_init__(self) -> None:
        if not 0 < self.confidence < 1:
            raise UsageError(f"confidence is {self.confidence}; expected a share between 0 and 1, like 0.95")


@dataclass(frozen=True)
class ExecutionOptions:
    """Where trials are run."""

    jobs: Annotated[int, Option("Worker processes.", MEANS)] = 1
    executor: Annotated[str | None, Option("serial, processes or ray.", MEANS, usual="by --jobs")] = None
    ray: Annotated[str | None, Option(
        "A Ray cluster to run trials on, like 10.0.0.1:6379.", MEANS,
        usual="--executor ray makes its own here")] = None  # fmt: skip
    deadline: Annotated[float | None, Option(
        "Seconds after which a trial hangs.", MEANS, usual="20x golden, at least 10")] = None  # fmt: skip

    def check(self) -> None:
        """Raise ``UsageError``, before anything is loaded, for what does not fit together."""
        from unsilent.campaigns.executors import checked

        checked(self.executor, jobs=self.jobs, deadline=self.deadline, address=self.ray)

    @property
    def means(self) -> Means:
        """What a worker knows of it."""
        return Means(jobs=self.jobs)

    def open(self, spec: Spec, observer: Observer | None = None) -> Executor:
        """What runs the trials of a campaign."""
        from unsilent.campaigns.executors import make_executor

        return make_executor(
            self.executor, spec, jobs=self.jobs, deadline=self.deadline, observer=observer, means=self.means, address=self.ray
        )  # fmt: skip


@dataclass(frozen=True)
class EngineOptions(ExecutionOptions):
    """The same where an engine has shortcuts."""

    engine: Annotated[str, Option(
        "auto (run only what a fault changes) or plain; rows are the same, bit for bit.", MEANS)] = "auto"  # fmt: skip
    memory: Annotated[int | None, Option(
        "Memory for values kept for shortcuts, all workers together, like 2GB.", MEANS, read=read_bytes,
        usual="a quarter of what is free")] = None  # fmt: skip

    def check(self) -> None:
        """Raise ``UsageError`` for an engine that there is not as well."""
        if self.engine not in ENGINES:
            raise unknown("--engine", self.engine, ENGINES)
        super().check()

    @property
    def means(self) -> Means:
        """What a worker knows of it."""
        return Means(self.engine, self.memory, self.jobs)


@contextmanager
def kept(store: str | Path | None, name: str = "campaign.sqlite") -> Iterator[Path]:
    """The file that is asked for, or one that is removed afterwards."""
    if store is not None:
        yield Path(store)
        return
    with tempfile.TemporaryDirectory(prefix="unsilent-") as folder:
        yield Path(folder) / name
