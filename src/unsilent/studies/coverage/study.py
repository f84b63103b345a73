"""The study of detection rules: the recording of the golden run, faults, fault-free runs, and everything read from the store."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from unsilent.argument_names import names_arguments
from unsilent.campaigns.driver import run_campaign, run_trials
from unsilent.campaigns.executors import Executor
from unsilent.campaigns.observer import Observer
from unsilent.campaigns.options import ExecutionOptions, store_or_temporary
from unsilent.campaigns.spec import TrialId
from unsilent.options import Asked
from unsilent.studies.coverage.analysis import CoverageResult, analyse
from unsilent.studies.coverage.kind import COVERAGE, CoverageStore
from unsilent.studies.coverage.scoring import current_digest, named_rules
from unsilent.studies.coverage.spec import (
    CLEAN,
    GOLDEN,
    CleanTarget,
    CoverageAnalysisOptions,
    CoverageBaseline,
    CoverageBudget,
    CoverageSpec,
    make_coverage_spec,
)
from unsilent.studies.training.spec import PHASES


@names_arguments
def coverage(
    workload: str,
    *,
    trials: int = 150,
    fault: str | Sequence[str] = (),
    large_fault: str = "bitflip:bits=exponent",
    phase: str | Sequence[str] = PHASES,
    layer: str | Sequence[str] = ("*",),
    only: str | Sequence[str] = ("*",),
    follow: int = 5,
    tries: int = 300,
    steps: int | None = None,
    clean_runs: int = 20,
    clean_steps: int | None = None,
    changed_runs: int = 5,
    confidence: float = 0.95,
    rate: float = 1e-3,
    sampling: int | str | Sequence[int] = (1,),
    options: Mapping[str, object] | Sequence[str] = (),
    data: str | Path | None = None,
    seed: int = 0,
    init: int = 0,
    jobs: int | None = None,
    executor: str | None = None,
    ray: str | None = None,
    deadline: float | None = None,
    store: str | Path | None = None,
    observer: Observer | None = None,
) -> CoverageResult:
    """Which rule detects which faults of a training, with how many false alarms, how late and at what cost.

    Arguments are the options of ``unsilent coverage``, by the same names and with the same defaults.

    Args:
        workload: A built-in training, ``file.py:name`` or ``package.module:name``.
        options, data: Of the workload.
        trials: Faults of each class of severity.
        steps, init: Of the training, and its seed.
        fault, large_fault, phase, layer, only, tries: Which faults are injected.
        follow: Steps that a rule has to detect one.
        clean_runs, clean_steps, changed_runs: Fault-free runs.
        confidence, rate: How rules are judged.
        sampling: Steps in which a monitor reads all values once: a number, or those of gradients, of gradients of norm layers'
            inputs, and of updates, like ``(1, 5, 8)``.
        store: File to keep and resume from; default none.

    Raises:
        UsageError: input that does not fit. StoreError: the store cannot be used.
    """
    asked = Asked.from_call(COVERAGE.option_classes, dict(locals()))
    spec, budget, reading, execution = (
        make_coverage_spec(asked),
        asked[CoverageBudget],
        asked[CoverageAnalysisOptions],
        asked[ExecutionOptions],
    )
    execution.check()
    with (
        store_or_temporary(store) as path,
        CoverageStore(path, write=True) as opened,
        execution.open_executor(spec, observer) as running,
    ):
        return run_coverage(
            spec, budget, running, opened, reading,
            observer=observer, command=asked.command_line("coverage", CoverageBudget, CoverageSpec, CoverageAnalysisOptions),
        )  # fmt: skip


def run_coverage(
    spec: CoverageSpec,
    budget: CoverageBudget,
    executor: Executor,
    store: CoverageStore,
    options: CoverageAnalysisOptions,
    *,
    observer: Observer | None = None,
    command: str = "",
) -> CoverageResult:
    """Run (or resume) a campaign, and apply all rules to what it recorded; raises ``UsageError``."""
    baseline = executor.establish_baseline()
    assert isinstance(baseline, CoverageBaseline)
    store.bind_campaign(spec, baseline)
    run_trials([GOLDEN], executor, store, observer)
    run_campaign(spec, budget, executor, store, observer=observer, command=command)
    run_trials(fault_free_trials(budget, options, baseline), executor, store, observer)
    return analyse(store, options)


def fault_free_trials(
    budget: CoverageBudget, options: CoverageAnalysisOptions, baseline: CoverageBaseline
) -> Iterator[TrialId]:
    """Plain runs and those with a planted change, judged by the present rules."""
    digest, steps = current_digest(named_rules()), budget.clean_steps or baseline.steps
    for kind in (CLEAN, *baseline.changes):
        count = budget.clean_runs if kind == CLEAN else budget.changed_runs
        target = CleanTarget(kind, steps, *options.intervals, digest)
        yield from (TrialId(target.name, None, k) for k in range(count))
