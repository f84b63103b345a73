"""Runs the trials of a training campaign in this process.

Each trial starts from a state of the golden run, which is checked bit for bit, so a row needs no later check. A training whose
steps are not repeatable is rejected before the first trial.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import torch
import xxhash

from unsilent.basics.errors import InternalError, UsageError, UserCodeError, first_line
from unsilent.basics.printable import escape_unprintable
from unsilent.basics.user_code import user_code
from unsilent.campaigns.code import code_fingerprint, versions
from unsilent.campaigns.codec import faults_text
from unsilent.campaigns.runner import Runner
from unsilent.campaigns.spec import DeferredTrial, TrialId, WorkerSettings, campaign_hash
from unsilent.engine.forking import Forked, ForkEngine, GoldenTraining
from unsilent.engine.forking.forks import FaultFreeBand, NotInjected
from unsilent.engine.forking.golden import MEMORY
from unsilent.engine.running_out import out_of_memory, release_cached_memory, unusable_if_raised
from unsilent.faults.hardware.description_file import load_accelerator
from unsilent.faults.receipts import AppliedFault
from unsilent.outcomes.base import Outcome
from unsilent.replicas.runner import apply_switches
from unsilent.replicas.switches import Switches
from unsilent.sites.modules import named_parameters
from unsilent.sites.targets import default_components
from unsilent.sites.training.step_survey import StepSurvey
from unsilent.studies.training.fault_sampler import FaultSampler, SampledFault
from unsilent.studies.training.guarding import GoldenHistory, GuardedRunResult, run_guarded_trial
from unsilent.studies.training.spec import (
    GUARDED_PREFIX,
    MOMENTS,
    WATCHED_STEPS,
    TrainingBaseline,
    TrainingRow,
    TrainingSpec,
)
from unsilent.workloads import load_training
from unsilent.workloads.model_fitting import Progress
from unsilent.workloads.process_side_effects import check_no_returned_fork, take_notes
from unsilent.workloads.trainings.base import Evaluation, Seeds, TrainingWorkload
from unsilent.workloads.trainings.restore_check import check_restorable

GOLDEN_EVALUATIONS = 2
"""Number of evaluations of the golden run within one horizon."""


class TrainingRunner(Runner[TrainingSpec, TrainingBaseline, TrainingRow]):
    """Runs the trials of one training, with its golden run.

    Args:
        spec: Spec of the campaign.
        progress: Called with the progress of the golden run.
        worker_settings: Settings of the worker, including its memory.

    Raises:
        UsageError: the spec does not fit the training, or the training is not repeatable.
    """

    def __init__(
        self, spec: TrainingSpec, progress: Progress | None = None, worker_settings: WorkerSettings | None = None
    ) -> None:
        worker_settings = worker_settings or WorkerSettings()
        super().__init__(spec)
        self._settings = ExitStack()
        self.workload: TrainingWorkload = load_training(
            spec.workload, dict(spec.options), data=spec.data, progress=progress
        )
        self._settings.enter_context(apply_switches(Switches()))  # like the replicas that it is compared with
        self._check_repeatable()
        self._history = GoldenHistory()
        memory = MEMORY if worker_settings.memory is None else worker_settings.memory // worker_settings.jobs

        def tell(done: int, total: int) -> None:
            if progress is not None:
                progress(f"the fault-free run of {spec.workload}", done, total)

        begun = time.perf_counter()
        with user_code(spec.workload):
            self.golden = GoldenTraining(
                self.workload,
                Seeds.same_for_all(spec.init),
                spec.steps,
                memory=memory,
                watch=self._history.record_step,
                evaluation_interval=None if spec.horizon is None else max(1, spec.horizon.steps // GOLDEN_EVALUATIONS),
                progress=tell,
            )
        check_no_returned_fork(self.workload.name)
        self._golden_seconds = time.perf_counter() - begun
        self._forks = ForkEngine(self.golden, self._history.largest_by_kind, self._band(), WATCHED_STEPS)
        self.sampler = self._drawing()
        self.fingerprint = self._fingerprint()
        self.campaign = campaign_hash(spec, self.fingerprint)
        self._design = campaign_hash(replace(spec, horizon=None), self.fingerprint)  # the horizon does not matter

    def close(self) -> None:
        """Restore the torch settings from before the campaign."""
        self._settings.close()

    def make_baseline(self) -> TrainingBaseline:
        """The facts that are established before the first trial."""
        golden, sampler = self.golden, self.sampler
        state = golden.state_before_step(0)
        return TrainingBaseline(
            campaign=self.campaign,
            fingerprint=self.fingerprint,
            name=self.workload.name,
            targets=sampler.targets,
            operation_phases=tuple(sampler.places),
            models=tuple((kind.name, kind.weight) for kind in sampler.kinds),
            raw_fit={} if self.spec.accelerator is None else load_accelerator(self.spec.accelerator).raw_fit_by_group,
            steps=golden.steps,
            epochs=tuple(golden.epochs),
            losses=tuple(golden.losses.tolist()),
            metric=tuple(golden.metric.tolist()),
            history_magnitudes=tuple(tuple(None if np.isnan(x) else x for x in row) for row in golden.watched.tolist()),
            test_accuracy=accuracy(golden.evaluation),
            test_loss=golden.evaluation.loss,
            samples=len(golden.evaluation.labels),
            golden_seconds=self._golden_seconds,
            optimizers=tuple(type(o).__name__ for o in state.optimizers),
            parameters=sum(p.numel() for p in state.model.parameters()),
            info=dict(self.workload.info),
            versions=versions(),
            notes=(*sampler.notes, *take_notes(self.workload.name)),
        )

    def run_all(self, trials: Sequence[TrialId], alone: bool = False) -> Iterator[TrainingRow | DeferredTrial]:
        """Run trials in order.

        ``alone``: whether no other trial of the campaign runs at the same time, so that running out of memory counts as an
        outcome.
        """
        for trial in trials:
            yield self._run_once(trial, alone)

    def _run_once(self, trial: TrialId, alone: bool) -> TrainingRow | DeferredTrial:
        """Run one trial; an error in user code becomes its outcome.

        Raises:
            ProcessUnusable: the golden run cannot be restored, before or after the error of the trial.
        """
        if alone:
            release_cached_memory()
        begun = time.perf_counter()
        drawn = self.draw(trial)
        check_no_returned_fork(self.workload.name)
        try:
            with user_code(self.spec.workload):
                if trial.target.startswith(GUARDED_PREFIX):
                    row = guarded_row(
                        trial, drawn, run_guarded_trial(self.golden, drawn, self._history, self.spec.moment)
                    )
                else:
                    row = self.run_faults(trial, drawn)
        except (UserCodeError, InternalError) as error:  # a built-in training's code is ours
            short = out_of_memory(error.__context__)
            with unusable_if_raised(first_line(error), known=not short):
                self.verify_restored_state()
            if short and not alone:
                return DeferredTrial(trial, first_line(error))
            row = end_only_row(trial, drawn, "raised", first_line(error))
        except NotInjected as error:
            row = end_only_row(trial, drawn, "not-injected", first_line(error))
        return replace(row, seconds=time.perf_counter() - begun)

    def lost_trial_row(self, trial: TrialId, ended: Outcome, seconds: float, reason: str) -> TrainingRow:
        """The row of a trial during which the worker process was lost."""
        return replace(end_only_row(trial, self.draw(trial), ended.name.lower(), reason), seconds=seconds)

    def verify_restored_state(self) -> None:
        """Check that the last step of the golden run still gives the same bits."""
        self.golden.state_before_step(self.golden.steps - 1)

    def draw(self, trial: TrialId) -> SampledFault:
        """Draw the faults of a trial, from its identity alone."""
        plain = trial._replace(target=trial.target.removeprefix(GUARDED_PREFIX))
        return self.sampler.draw(self._design, plain)

    def fork(self, injected: SampledFault) -> Forked:
        """Run the training with the given faults, from the step of the faults on."""
        step, moment = injected.injection.step, MOMENTS[self.spec.moment]
        return self._forks.run(step, injected.faults, moment, injected.lasts)

    def run_faults(self, trial: TrialId, injected: SampledFault) -> TrainingRow:
        """Run the training with the given faults, and return the row of the trial."""
        return self._row(trial, injected, self.fork(injected))

    def _check_repeatable(self) -> None:
        try:
            with user_code(self.spec.workload):
                check_restorable(self.workload, seeds=Seeds.same_for_all(self.spec.init), new_process=False)
        except UsageError as error:
            raise UsageError(
                f"{error}; a faulty run is compared with a golden run, which must be repeatable: run unsilent explain to "
                "find the cause"
            ) from None

    def _band(self) -> FaultFreeBand | None:
        horizon = self.spec.horizon
        if horizon is None:
            return None
        steps = np.arange(self.golden.steps) // horizon.window
        loss = np.array(horizon.loss)[np.minimum(steps, len(horizon.loss) - 1)]
        return FaultFreeBand(loss, horizon.steps, horizon.test, horizon.window)

    def _drawing(self) -> FaultSampler:
        state = self.golden.state_before_step(min(1, self.golden.steps - 1))
        with StepSurvey(state.model, state.optimizers) as survey, user_code(self.spec.workload):
            self.workload.step(state)
        names = [name for name, _ in named_parameters(state.model)]
        state_there = ("optim:*",) if "optim" in survey.kinds else ()
        gradients = ("gradient:*",) if "gradient" in survey.kinds else ()
        regions = survey.select_regions("op:*/*/*", "param:*", *state_there, *gradients)
        return FaultSampler(self.spec, regions, names, default_components(state.model), self.golden.steps)

    def _fingerprint(self) -> dict[str, str]:
        golden, known = self.golden, self.golden.evaluation
        hashes = np.array(golden.hashes, dtype=np.uint64).tobytes()
        described = {}
        if self.spec.accelerator is not None:  # a file, whose content may change
            models = repr([kind.source for kind in self.sampler.kinds])
            described = {"accelerator": xxhash.xxh3_128_hexdigest(models.encode())}
        return {
            **described,
            "golden": xxhash.xxh3_128_hexdigest(hashes + golden.losses.tobytes()),
            "held-out": xxhash.xxh3_128_hexdigest(
                b"".join(part.tobytes() for part in (known.labels, known.predictions)) + repr(known.loss).encode()
            ),
            "code": code_fingerprint(self.spec.workload, self.workload, None),
            "device": str(next(golden.state_before_step(0).model.parameters()).device.type),
            "torch": str(torch.__version__),
            "numpy": ".".join(np.__version__.split(".")[:2]),
        }

    def _row(self, trial: TrialId, drawn: SampledFault, forked: Forked) -> TrainingRow:
        result, golden, ran = forked.evaluation, self.golden.evaluation, forked.steps_run
        return TrainingRow(
            trial=trial,
            injection=drawn.injection,
            faults=faults_text([hit.fault for hit in forked.applied_faults]),
            injected_max=injected_max(forked.applied_faults),
            reference_max=forked.reference_max,
            end_reason=str(forked.reason),
            steps_run=ran,
            losses=forked.ending.losses[:ran],
            metric=forked.ending.metric[:ran],
            history_magnitudes=forked.measurements,
            test_accuracy=np.nan if result is None else accuracy(result),
            test_loss=np.nan if result is None else result.loss,
            churn=np.nan if result is None else float(np.mean(result.predictions != golden.predictions)),
            bit_identical=forked.ending.same_bits,
        )


def guarded_row(trial: TrialId, drawn: SampledFault, result: GuardedRunResult) -> TrainingRow:
    """The row of a trial under the guard, which has no curves."""
    return replace(
        end_only_row(trial, drawn, result.end_reason, result.alarm),
        faults=faults_text([hit.fault for hit in result.applied_faults]),
        injected_max=injected_max(result.applied_faults),
        steps_run=result.steps_run,
        detected_after=result.detected_after,
        bit_identical=result.bit_identical,
    )


def end_only_row(trial: TrialId, drawn: SampledFault, reason: str, error: str) -> TrainingRow:
    """The row of a trial that has no result besides how it ended."""
    return TrainingRow.without_result(
        trial, injection=drawn.injection, end_reason=reason, error=escape_unprintable(error)
    )


def accuracy(evaluation: Evaluation) -> float:
    """The share of held-out samples that are predicted correctly."""
    return float(np.mean(evaluation.predictions == evaluation.labels))


def injected_max(hits: Sequence[AppliedFault]) -> float:
    """The largest magnitude that was injected; infinity if a value is NaN."""
    values = [np.abs(np.asarray(hit.fault.codec.decode(hit.after), dtype=np.float64)) for hit in hits if len(hit.after)]
    return max((float(np.where(np.isnan(v), np.inf, v).max()) for v in values), default=0.0)
