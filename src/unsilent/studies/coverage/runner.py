"""Runs the trials of a coverage campaign: faulty steps, the golden run, and fault-free runs.

A trial of a class of severity draws random steps and faults until a fault is in the class, so that all classes have equally many
faults. Estimates for a class are conditional on the class.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar, NamedTuple

import numpy as np

from unsilent.basics.errors import InjectionError, UsageError, UserCodeError
from unsilent.campaigns.codec import faults_text
from unsilent.campaigns.spec import TrialId, WorkerSettings, campaign_hash, trial_seed
from unsilent.detectors.series import Bools, Floats
from unsilent.faults.receipts import AppliedFault
from unsilent.sites.modules import named_parameters
from unsilent.sites.training.step import StepInjection
from unsilent.studies.coverage.planted_changes import possible_changes, workload_and_change
from unsilent.studies.coverage.recording import StepRecorder, relative_difference
from unsilent.studies.coverage.scoring import (
    FalseAlarmCounter,
    Sampling,
    applications,
    current_digest,
    named_rules,
)
from unsilent.studies.coverage.spec import (
    FOLLOWED,
    GOLDEN,
    JUDGED,
    LARGE_CLASSES,
    NOT_FOUND,
    OPERATION,
    PLACES,
    RECORDED,
    CleanTarget,
    CoverageBaseline,
    CoverageRow,
    CoverageSpec,
    parse_clean_target,
    severity_class,
)
from unsilent.studies.coverage.trial_runner import TrialRunner
from unsilent.studies.training.fault_sampler import FaultSampler, SampledFault
from unsilent.studies.training.runner import TrainingRunner
from unsilent.studies.training.spec import RANDOM
from unsilent.workloads.model_fitting import Progress
from unsilent.workloads.trainings.base import Seeds, StepRecord, TrainingState, TrainingWorkload

TRIES_IN_A_STEP = 30
"""Number of faults that are tried in a step before another step is drawn."""


class CoverageRunner(TrialRunner[CoverageSpec, CoverageBaseline, CoverageRow]):
    """Runs the trials of one training, with its golden run.

    Args:
        spec: Spec of the campaign.
        progress: Called with the progress of the golden run.
        worker_settings: Settings of the worker, including its memory.

    Raises:
        UsageError: the spec does not fit the training, or the training is not repeatable.
    """

    row_type = CoverageRow
    empty_values: ClassVar[Mapping[str, str]] = {"rules": "[]"}

    def __init__(
        self, spec: CoverageSpec, progress: Progress | None = None, worker_settings: WorkerSettings | None = None
    ) -> None:
        super().__init__(spec)
        self._training = TrainingRunner(spec.training_spec(OPERATION), progress, worker_settings)
        self.workload: TrainingWorkload = self._training.workload
        self.golden = self._training.golden
        if self.golden.steps <= spec.follow:
            raise UsageError(
                f"the training has {self.golden.steps} steps, but --follow records {spec.follow} of them from that of a fault "
                "on; choose fewer or train longer"
            )
        state, sampler = self.golden.state_before_step(0), self._training.sampler
        names = [name for name, _ in named_parameters(state.model)]
        self._samplers = {
            (place, large): FaultSampler(
                spec.training_spec(place, large), sampler.regions, names, {}, self.golden.steps
            )
            for place in PLACES
            for large in (False, True)
        }
        with StepRecorder(state) as recorder:
            self._series = recorder.series
        self._campaign = campaign_hash(spec, self._training.fingerprint)

    def close(self) -> None:
        """Restore the torch settings from before the campaign."""
        self._training.close()

    def make_baseline(self) -> CoverageBaseline:
        """The facts that are established before the first trial."""
        known = self._training.establish_baseline()
        return CoverageBaseline(
            campaign=self._campaign,
            fingerprint=known.fingerprint,
            name=known.name,
            targets=self.spec.targets,
            series=self._series,
            steps=known.steps,
            changes=possible_changes(self.spec),
            golden_seconds=known.golden_seconds,
            parameters=known.parameters,
            optimizers=known.optimizers,
            info=known.info,
            versions=known.versions,
            notes=known.notes,
        )

    def try_trial(self, trial: TrialId, rng: np.random.Generator) -> CoverageRow:
        """Run a trial with a fault, a fault-free trial or the golden run."""
        if trial == GOLDEN:
            return self._golden_row()
        clean = parse_clean_target(trial.target)
        return self._fault_row(trial, rng) if clean is None else self._clean_row(trial, clean)

    def verify_restored_state(self) -> None:
        """Check that the last step of the golden run still gives the same bits."""
        self._training.verify_restored_state()

    # -- faults ------------------------------------------------------------------------------------------------------

    def _fault_row(self, trial: TrialId, rng: np.random.Generator) -> CoverageRow:
        place, _, wanted = trial.target.partition(":")
        end = self.golden.steps - self.spec.follow + 1
        for first in range(1, self.spec.tries + 1, TRIES_IN_A_STEP):
            step = int(rng.integers(1, end))  # optimizers make their state in step 0
            state = self.golden.state_before_step(step)
            numbers = range(first, min(first + TRIES_IN_A_STEP, self.spec.tries + 1))
            with StepRecorder(state) as recorder:
                faults = self._faults_in_step(recorder, state, place, wanted, rng)
                for number, fault in zip(numbers, faults, strict=False):
                    if severity_class(fault.severity) == wanted:
                        further = [recorder.record(self.workload.step) for _ in range(1, self.spec.follow)]
                        return replace(
                            self._recorded_row(trial, FOLLOWED, [fault.signals, *further]),
                            injection=fault.drawn.injection._replace(step=step),
                            faults=faults_text([hit.fault for hit in fault.applied_faults]),
                            tried=number,
                            severity=fault.severity,
                        )
        return self._row(trial, NOT_FOUND, tried=self.spec.tries)

    def _faults_in_step(
        self, recorder: StepRecorder, state: TrainingState, place: str, wanted: str, rng: np.random.Generator
    ) -> Iterator[FaultInStep]:
        """An endless stream of random faults, each injected into the same step.

        After each fault, the training state is the one after the faulty step.
        """
        snapshot = self.workload.snapshot(state)
        before = [p.detach().clone() for p in recorder.parameters]
        recorder.record(self.workload.step)
        golden, gradients = [p.detach().clone() for p in recorder.parameters], recorder.gradients
        update = [after - start for after, start in zip(golden, before, strict=True)]
        while True:
            self.workload.restore_into(state, snapshot)
            drawn = self._draw(place, wanted in LARGE_CLASSES, rng)
            applied_faults: list[AppliedFault] = []
            try:
                signals = recorder.record(partial(self._faulty_step, drawn, applied_faults))
            except (UserCodeError, InjectionError, UsageError):  # it raised, or the operation does not run in this step
                yield FaultInStep(drawn, (), float("nan"), (np.zeros(0), np.zeros(0, np.bool_)))
                continue
            if place == OPERATION:
                severity = relative_difference(recorder.gradients, gradients, gradients)
            else:
                severity = relative_difference([p.detach() for p in recorder.parameters], golden, update)
            yield FaultInStep(drawn, tuple(applied_faults), severity, signals)

    def _faulty_step(self, drawn: SampledFault, applied_faults: list[AppliedFault], state: TrainingState) -> StepRecord:
        """Run a step with faults, and add the faults that were applied to ``applied_faults``."""
        with StepInjection(state.model, drawn.faults, state.optimizers) as injection:
            record = self.workload.step(state)
        applied_faults += injection.applied_faults
        return record

    def _draw(self, place: str, large: bool, rng: np.random.Generator) -> SampledFault:
        """Draw a fault; the step of the drawn fault is not used."""
        sampler = self._samplers[place, large]
        target = RANDOM if place == OPERATION else sampler.targets[int(rng.integers(len(sampler.targets)))].name
        return sampler.draw(self._campaign, TrialId(target, None, int(rng.integers(2**62))))

    # -- fault-free runs ---------------------------------------------------------------------------------------------

    def _golden_row(self) -> CoverageRow:
        state = self.workload.start(Seeds.same_for_all(self.spec.init))
        with StepRecorder(state) as recorder:
            recorded = [recorder.record(self.workload.step) for _ in range(self.golden.steps)]
        if not self.golden.is_golden_state(state, self.golden.steps - 1):
            raise UsageError(
                f"{self.workload.name} ends with other bits when its signals are read; its steps must not depend on hooks"
            )
        return self._recorded_row(GOLDEN, RECORDED, recorded)

    def _clean_row(self, trial: TrialId, target: CleanTarget) -> CoverageRow:
        rules, steps = named_rules(), target.steps
        if target.digest != current_digest(rules):
            raise UsageError(
                f"{trial} was judged by other rules than those of this version; run unsilent coverage again"
            )
        workload, change = workload_and_change(self.spec, self.workload, target.kind, steps)
        state = workload.start(Seeds.same_for_all(trial_seed(self._campaign, self.spec.seed, trial) % 2**31))
        events = []
        with StepRecorder(state) as recorder:
            counters = [FalseAlarmCounter(application) for application in applications(rules, recorder.series)]
            sampling = Sampling(target.sampling, target.value_sampling, target.update_sampling)
            for step in range(steps):
                if step == steps // 2:
                    events = [counter.events.copy() for counter in counters]
                    workload = change(state)
                values, seen = recorder.record(workload.step)
                seen &= sampling.is_read(recorder.series, np.array([step]))[0]
                for counter in counters:
                    counter.count_step(values, seen, step)
        counts = [np.hstack([first, c.events - first]) for first, c in zip(events, counters, strict=True)]
        names = [str(detector) for counter in counters for detector in counter.application.detectors]
        scores = np.vstack([counter.scores for counter in counters])
        return self._row(trial, JUDGED, rules=json.dumps(names), events=np.vstack(counts), scores=scores)

    def _recorded_row(self, trial: TrialId, end: str, recorded: Sequence[tuple[Floats, Bools]]) -> CoverageRow:
        columns = len(self._series)
        return self._row(
            trial,
            end,
            steps=len(recorded),
            signals=np.array([values for values, _ in recorded]).reshape(-1, columns),
            seen=np.array([seen for _, seen in recorded], np.uint8).reshape(-1, columns),
        )


class FaultInStep(NamedTuple):
    """A fault that was injected into a step: what was applied, its severity and the recorded signals.

    The severity is NaN if the step raised an error.
    """

    drawn: SampledFault
    applied_faults: tuple[AppliedFault, ...]
    severity: float
    signals: tuple[Floats, Bools]
