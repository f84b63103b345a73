"""The study of detectors of inference: clean samples, faults that change answers, and everything read from the store."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from unsilent.argument_names import names_arguments
from unsilent.campaigns.driver import run_campaign, run_trials
from unsilent.campaigns.executors import Executor
from unsilent.campaigns.observer import Observer
from unsilent.campaigns.options import Budget, EngineOptions, store_or_temporary
from unsilent.campaigns.spec import TrialId
from unsilent.options import Asked
from unsilent.studies.coverage.inference.analysis import InferenceCoverageResult, analyse
from unsilent.studies.coverage.inference.kind import INFERENCE_COVERAGE, InferenceCoverageStore
from unsilent.studies.coverage.inference.scoring import check_clean_samples
from unsilent.studies.coverage.inference.spec import (
    CALIBRATION,
    CLEAN_TARGETS,
    DEFAULT_BURSTS,
    DEFAULT_DETECTORS,
    TEST,
    TIMING,
    InferenceCoverageBaseline,
    InferenceCoverageBudget,
    InferenceCoverageOptions,
    InferenceCoverageSpec,
    make_inference_spec,
)


@names_arguments
def inference_coverage(
    workload: str,
    *,
    trials: int = 200,
    shard: str | tuple[int, int] = (1, 1),
    detector: str | Sequence[str] = DEFAULT_DETECTORS,
    only: str | Sequence[str] = ("*",),
    flip_rate: float = 1e-5,
    output_flip: str = "bitflip",
    burst: str | Sequence[str] = DEFAULT_BURSTS,
    tries: int = 3000,
    profile_samples: int = 600,
    clean_samples: int = 2000,
    confidence: float = 0.95,
    rate: float = 0.01,
    options: Mapping[str, object] | Sequence[str] = (),
    data: str | Path | None = None,
    weights: str | Path | None = None,
    judge: str | None = None,
    device: str = "auto",
    seed: int = 0,
    jobs: int | None = None,
    executor: str | None = None,
    ray: str | None = None,
    deadline: float | None = None,
    engine: str = "auto",
    memory: int | str | None = None,
    store: str | Path | None = None,
    observer: Observer | None = None,
) -> InferenceCoverageResult:
    """Which detector finds which faults of an inference, with how many false alarms, how early, and what repairs answers.

    Arguments are the options of ``unsilent inference-coverage``, by the same names and with the same defaults.

    Args:
        workload: A built-in workload, ``file.py:name`` or ``package.module:name``, with clean batches.
        options, data, weights, judge, device: Of the workload.
        trials, shard: Faults of each error model that change an answer.
        only, flip_rate, output_flip, burst, tries: Which faults are injected.
        detector, profile_samples, clean_samples: What is calibrated, and with how many clean samples.
        confidence, rate: How the store is read.
        store: File to keep and resume from; default none.

    Raises:
        UsageError: input that does not fit. StoreError: the store cannot be used.
    """
    asked = Asked.from_call(INFERENCE_COVERAGE.option_classes, dict(locals()))
    spec, budget, reading, execution = (
        make_inference_spec(asked),
        asked[InferenceCoverageBudget],
        asked[InferenceCoverageOptions],
        asked[EngineOptions],
    )
    execution.check()
    with (
        store_or_temporary(store) as path,
        InferenceCoverageStore(path, write=True) as opened,
        execution.open_executor(spec, observer) as running,
    ):
        return run_inference_coverage(
            spec, budget, running, opened, reading, observer=observer,
            command=asked.command_line(
                "inference-coverage", InferenceCoverageBudget, InferenceCoverageSpec, InferenceCoverageOptions
            ),
        )  # fmt: skip


def run_inference_coverage(
    spec: InferenceCoverageSpec,
    budget: Budget,
    executor: Executor,
    store: InferenceCoverageStore,
    options: InferenceCoverageOptions,
    *,
    observer: Observer | None = None,
    command: str = "",
) -> InferenceCoverageResult:
    """Run (or resume) a campaign, and compare detectors by what it recorded; raises ``UsageError``."""
    baseline = executor.establish_baseline()
    assert isinstance(baseline, InferenceCoverageBaseline)
    available = min(baseline.clean_samples[part] for part in (CALIBRATION, TEST))
    check_clean_samples(spec.clean_samples, options.rate, available)
    store.bind_campaign(spec, baseline)
    run_trials(fault_free_trials(baseline), executor, store, observer)
    run_campaign(spec, budget, executor, store, observer=observer, command=command)
    return analyse(store, options)


def fault_free_trials(baseline: InferenceCoverageBaseline) -> Iterator[TrialId]:
    """Clean samples, and the times of detectors."""
    for part in CLEAN_TARGETS:
        yield from (TrialId(part, None, k) for k in range(baseline.clean_trials[part]))
    yield TIMING
