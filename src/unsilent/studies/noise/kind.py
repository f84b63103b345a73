"""Defines the kind of campaign that ``unsilent noise`` runs, and its options."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any

from unsilent.basics.errors import unknown_name_error
from unsilent.basics.lazy_module import LazyFunction
from unsilent.basics.options import EXECUTION_PANEL, PRECISION_PANEL, WORKLOAD_PANEL, Option, Request, check_count
from unsilent.campaigns.campaign_run import DryRun
from unsilent.campaigns.options import Budget, ExecutionOptions
from unsilent.replicas import REPLICAS, VARIANTS, ReplicaSpec, Switches
from unsilent.replicas.spec import MOST_REPLICAS

ABOUT = """Measure how much fault-free runs of a training differ, and why.

Compares accuracy, churn (predictions that differ between two runs), distances between weights, and groups of held-out samples.
Resumable: the same command continues where it stopped; more --replicas extend it. Ends in a table and an HTML report.
"""

NOTES = (
    "if runs differ, some steps run again to find the first operation that differs",
    "the time estimate does not include steps that run again",
)
"""Notes of a dry run."""


def read_variants(text_or_list: Any) -> tuple[str, ...]:
    """Parse names of variants, given as a list or joined by commas; raises ``UsageError``."""
    names = tuple(
        name.strip().lower() for name in (text_or_list.split(",") if isinstance(text_or_list, str) else text_or_list)
    )
    for name in names:
        if name not in VARIANTS:
            raise unknown_name_error("variant", name, VARIANTS)
    return names


@dataclass(frozen=True)
class NoiseBudget:
    """Options on which replicas to run, and how many."""

    replicas: Annotated[int, Option("Runs of each variant.", PRECISION_PANEL)] = 20
    variants: Annotated[tuple[str, ...], Option(
        "Named sets of switches (sources of variation): control, algo, impl, algo+impl.", WORKLOAD_PANEL,
        default_text="all four", parser=read_variants, formatter=lambda names: [",".join(names)])] = ()  # fmt: skip
    switches: Annotated[tuple[str, ...], Option(
        "A variant made of one or more switches, like within, threads=2 or init+order; repeat the option for more variants. "
        "See docs/concepts/noise.md.",
        WORKLOAD_PANEL, "switch", is_repeatable=True)] = ()  # fmt: skip
    level: Annotated[float | None, Option(
        "Refuse to start if --replicas is too small for a rank test at this level, like 0.05.",
        PRECISION_PANEL)] = None  # fmt: skip

    def __post_init__(self) -> None:
        check_count("--replicas", self.replicas, 1, MOST_REPLICAS)

    @property
    def chosen_variants(self) -> tuple[Switches, ...]:
        """The requested variants without repetitions, or all named variants if none was requested.

        Raises ``UsageError`` for an invalid switch.
        """
        names = self.variants or (() if self.switches else tuple(VARIANTS))
        return tuple(dict.fromkeys([*(VARIANTS[name] for name in names), *map(Switches.parse, self.switches)]))

    def resolve(self) -> Budget:
        """The maximum number of runs per variant."""
        return Budget(self.replicas)


@dataclass(frozen=True)
class RunOptions(ExecutionOptions):
    """Options on where and how long runs may execute."""

    deadline: Annotated[float | None, Option(
        "Seconds that one run may take.", EXECUTION_PANEL, default_text="no limit")] = None  # fmt: skip


def make_noise_spec(request: Request) -> ReplicaSpec:
    """The checked settings of a request; raises ``UsageError``."""
    spec = request[ReplicaSpec]
    spec.check()
    return spec


NOISE = replace(
    REPLICAS,
    analyse=LazyFunction("unsilent.studies.noise.study:analyse"),
    report=LazyFunction("unsilent.studies.noise.report:report"),
    count_planned_trials=LazyFunction("unsilent.studies.noise.study:planned_replica_count"),
    command_help=ABOUT,
    budget=NoiseBudget,
    execution_options=RunOptions,
    resolve_spec=make_noise_spec,
    check_options=LazyFunction("unsilent.studies.noise.study:check_options"),
    run=LazyFunction("unsilent.studies.noise.study:run_noise_campaign"),
    dry_run=DryRun(
        trial_numbers=LazyFunction("unsilent.studies.noise.study:trial_numbers"),
        fault_free_seconds=lambda baseline: baseline.run_seconds,
        notes=lambda run, baseline, path: NOTES,
    ),
    example_arguments="train-resnet --replicas 5",
)
