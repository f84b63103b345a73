"""Replicas with what the study asks of them and makes of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from unsilent.campaigns.options import Budget, ExecutionOptions
from unsilent.errors import unknown
from unsilent.options import MEANS, PRECISION, RUNS, Asked, Option
from unsilent.replicas import REPLICAS, VARIANTS, ReplicaSpec, ReplicaStore, Switches
from unsilent.report.model import Report

if TYPE_CHECKING:
    from unsilent.studies.noise.records import NoiseResult
    from unsilent.studies.noise.study import Question

ABOUT = """Measure how much fault-free runs of a training differ, and why.

By accuracy, churn, distance of weights, and parts of the data. Resumable: the same command goes on where it stopped, more
continues where it stopped; more. Ends in a table and an HTML report.
"""


def read_variants(given: Any) -> tuple[str, ...]:
    """Names of variants joined by commas, or a list of them; raises ``UsageError``."""
    names = tuple(name.strip().lower() for name in (given.split(",") if isinstance(given, str) else given))
    for name in names:
        if name not in VARIANTS:
            raise unknown("variant", name, VARIANTS)
    return names


@dataclass(frozen=True)
class NoiseBudget:
    """Which replicas, and how many."""

    replicas: Annotated[int, Option("Runs of each variant.", PRECISION)] = 20
    variants: Annotated[tuple[str, ...], Option(
        "Named sets of switches: control, algo, impl, algo+impl.", RUNS, usual="all four", read=read_variants,
        write=lambda names: [",".join(names)])] = ()  # fmt: skip
    switches: Annotated[tuple[str, ...], Option(
        "A variant of your own, like within, threads=2 or init+order; repeat for more. See docs/noise.md.", RUNS, "switch",
        repeated=True)] = ()  # fmt: skip
    level: Annotated[float | None, Option(
        "Refuse to run too few replicas for a rank test at this level, like 0.05.", PRECISION)] = None  # fmt: skip

    @property
    def chosen(self) -> tuple[Switches, ...]:
        """The variants that were asked for, each once; all named ones where nothing was said. Raises ``UsageError``."""
        names = self.variants or (() if self.switches else tuple(VARIANTS))
        return tuple(dict.fromkeys([*(VARIANTS[name] for name in names), *map(Switches.parse, self.switches)]))

    def resolve(self) -> Budget:
        """The most runs of a variant."""
        return Budget(self.replicas)


@dataclass(frozen=True)
class RunOptions(ExecutionOptions):
    """Where runs are made."""

    deadline: Annotated[float | None, Option(
        "Seconds that one run may take.", MEANS, usual="no limit; 600 with --explain and --control")] = None  # fmt: skip


def question(asked: Asked) -> Question:
    """What is run and how it is read; raises ``UsageError``."""
    from unsilent.studies.noise.study import Question

    budget = asked.make(NoiseBudget)
    return Question(resolve(asked), budget.chosen, budget.replicas, asked["confidence"], budget.level)


def resolve(asked: Asked) -> ReplicaSpec:
    """A checked spec; raises ``UsageError``."""
    spec = asked.make(ReplicaSpec)
    spec.check()
    return spec


def size(store: ReplicaStore) -> int:
    """Replicas that the question of a store asks for."""
    from unsilent.studies.noise.study import asked_of

    return len(set(asked_of(store).wanted(store.description)))


def analyse(store: ReplicaStore, confidence: float = 0.95) -> NoiseResult:
    """What the replicas of a store say; raises ``UsageError`` where some are missing."""
    from unsilent.studies.noise.study import asked_of, read_noise

    return read_noise(asked_of(store, confidence), store)


def report(result: NoiseResult) -> Report:
    """What is shown of it."""
    from unsilent.studies.noise.report import report

    return report(result)


NOISE = replace(
    REPLICAS,
    analyse=analyse,
    report=report,
    size=size,
    about=ABOUT,
    budget=NoiseBudget,
    means=RunOptions,
    resolve=resolve,
)
