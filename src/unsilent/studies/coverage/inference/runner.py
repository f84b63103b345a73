"""Runs the trials of inference coverage: faults that change answers, clean samples, and detector costs.

A trial of an error model draws independent faults until one changes the answer of a sample (`FaultSearch`). This fault is then
injected into one plain run in which the layers are recorded, and all detectors judge this record. The run must give the same bits
as the engine. Thresholds are applied when the store is read.

Faults act in batches of the clean samples on which false alarms are counted, not in the workload's own evaluation batches, so
that detection and false alarms are measured on the same inputs.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from unsilent.basics.errors import InjectionError, UnsilentError, UsageError
from unsilent.basics.nested import tensors_in
from unsilent.campaigns.code import code_fingerprint, code_hash, versions
from unsilent.campaigns.codec import faults_text
from unsilent.campaigns.spec import DeferredTrial, TrialId, WorkerSettings, campaign_hash, trial_seed
from unsilent.detectors.activations.rule import Floats
from unsilent.engine import PlainEngine, make_engine
from unsilent.engine.device_placement import resolve_device
from unsilent.engine.digests import tensors_hasher
from unsilent.engine.plain import RANDOM_SEED, same_outputs
from unsilent.engine.running_out import unusable_if_raised
from unsilent.faults import Fault
from unsilent.outcomes import judge, judge_text
from unsilent.outcomes.base import Outcome
from unsilent.outcomes.classify import classify
from unsilent.protection.combination import Combination
from unsilent.protection.detector import InferenceDetector, make_detector
from unsilent.protection.layer_watch import find_layers
from unsilent.protection.recorded_pass import RecordedPass, record_pass
from unsilent.studies.coverage.inference.clean_batches import EvaluatedOn, read_clean_batches
from unsilent.studies.coverage.inference.detector_rows import AFTER_CALL, name_rows
from unsilent.studies.coverage.inference.fault_search import BENIGN, DUE, MASKED, FaultSearch, fault_of_operation
from unsilent.studies.coverage.inference.mitigations import Mitigations
from unsilent.studies.coverage.inference.spec import (
    CLEAN_TARGETS,
    FOUND,
    JUDGED,
    MOST_FAULT_BATCHES,
    NOT_FOUND,
    TEST,
    TIMED,
    TIMING,
    DetectorInfo,
    InferenceCoverageBaseline,
    InferenceCoverageRow,
    InferenceCoverageSpec,
)
from unsilent.studies.coverage.inference.timing import flops_by_layer, seconds_of_detectors
from unsilent.studies.coverage.trial_runner import TrialRunner
from unsilent.workloads.base import CalibratedWorkload
from unsilent.workloads.batch_samples import count_samples
from unsilent.workloads.model_fitting import Progress
from unsilent.workloads.process_side_effects import contain_user_process
from unsilent.workloads.registry import load

CHUNK = 1000
"""Approximate number of clean samples of a trial."""
PROOF_EVERY, PROOF_GOLDENS = 100, 300
"""Number of trials, or time as a multiple of a golden run, after which the independence of trials is verified again."""


class InferenceCoverageRunner(TrialRunner[InferenceCoverageSpec, InferenceCoverageBaseline, InferenceCoverageRow]):
    """Runs the trials of one workload, with its golden run and calibrated detectors.

    Args:
        spec: Spec of the campaign.
        progress: Called with the progress of training.
        worker_settings: Settings of the worker.

    Raises:
        UsageError: the spec does not fit the workload, or the workload has no clean samples.
    """

    row_type = InferenceCoverageRow

    def __init__(
        self,
        spec: InferenceCoverageSpec,
        progress: Progress | None = None,
        worker_settings: WorkerSettings | None = None,
    ) -> None:
        # Long because each part needs the earlier ones: batches, engine, detectors, and the rest.
        settings = worker_settings or WorkerSettings()
        super().__init__(spec)
        self.detectors = [make_detector(text) for text in spec.detectors]
        workload = load(spec.workload, dict(spec.options), data=spec.data, weights=spec.weights, progress=progress)
        if not isinstance(workload, CalibratedWorkload):
            raise UsageError(
                f"{workload.name} has no clean samples besides its batches; give it a method clean_batches(part, samples) (see "
                "unsilent.workloads.base.CalibratedWorkload)"
            )
        self.workload: CalibratedWorkload = workload
        torch.set_num_threads(spec.threads)
        self._device = resolve_device(spec.device)
        profile, self._clean = read_clean_batches(workload, spec, self._device)
        faulty = EvaluatedOn(workload, self._clean[TEST].evenly_chosen(MOST_FAULT_BATCHES))
        self.engine: PlainEngine = make_engine(
            faulty, engine=settings.engine, memory=settings.memory, worker_count=settings.jobs, device=self._device,
            judge=judge(spec.judge) if spec.judge else None,
        )  # fmt: skip
        for detector in self.detectors:
            detector.calibrate(self.engine.model, profile, self._run)
        self._mitigations = Mitigations(self.engine, profile, self._run)
        self._search = FaultSearch(self.engine, spec)
        self._layers = frozenset(find_layers(self.engine.model))
        self._infos = self._describe_detectors()
        self.unverified_row_count, self._proven_at = 0, time.monotonic()
        self.fingerprint = self.engine.fingerprint() | {
            "device": self._device.partition(":")[0],
            "versions": repr(sorted(versions().items())),
            "code": code_fingerprint(spec.workload, workload, self.engine.judge),
            "detectors": code_hash(
                __name__, "unsilent.protection", "unsilent.detectors.activations", *_further_modules(self.detectors)
            ),
            "clean inputs": tensors_hasher(
                tensors_in([profile, [part.batches for part in self._clean.values()]])
            ).hexdigest(),
            "clean": repr([(d.layers, d.nbytes) for d in self._infos]),
        }
        self._campaign = campaign_hash(spec, self.fingerprint)

    def _run(self, model: nn.Module, batch: Any) -> Any:
        """Evaluate the model on a batch without faults, under the same conditions as the engine."""
        if self.engine.seeded:
            torch.manual_seed(RANDOM_SEED)
        with torch.no_grad(), contain_user_process():
            return self.workload.run(model, batch)

    # -- clean samples -----------------------------------------------------------------------------------------------

    def _chunks(self, part: str) -> list[range]:
        """The clean batches of a part, divided into one range of batch numbers per trial."""
        batches = self._clean[part].batches
        count, each = len(batches), max(1, CHUNK // max(1, count_samples(batches[0])))
        return [range(first, min(first + each, count)) for first in range(0, count, each)]

    # -- before trials -----------------------------------------------------------------------------------------------

    def _describe_detectors(self) -> tuple[DetectorInfo, ...]:
        """Facts about each detector, from a recorded golden pass.

        Raises ``UsageError`` if recording a pass changes its output bits.
        """
        engine = self.engine
        recorded = record_pass(engine.model, self._run, engine.batches[0])
        if not same_outputs(engine.golden[0], recorded.output):
            raise UsageError(
                f"the outputs of {self.workload.name} change in some bits when hooks read its layers; use layers that compute "
                "the same with and without hooks"
            )
        flops = flops_by_layer(engine.model, self._run, engine.batches[0])
        infos = []
        for detector in self.detectors:
            rows, columns = detector.margins(recorded).shape
            if columns != engine.samples[0]:
                raise UsageError(
                    f"{detector.name} judges {columns} samples of a batch, but {judge_text(engine.judge)} {engine.samples[0]}; "
                    "expected batches with samples in the first dimension"
                )
            names = name_rows(detector, recorded)
            assert len(names) == rows, f"{detector.name} gives {rows} rows of margins for {len(names)} layers"
            shares = [1.0 if name == AFTER_CALL else flops[name] for name in names]
            infos.append(DetectorInfo(detector.name, tuple(names), tuple(shares), detector.nbytes))
        return tuple(infos)

    def make_baseline(self) -> InferenceCoverageBaseline:
        """The facts that are established before the first trial."""
        engine, integrity = self.engine, self._mitigations.integrity
        return InferenceCoverageBaseline(
            campaign=self._campaign,
            fingerprint=self.fingerprint,
            name=self.workload.name,
            targets=self.spec.targets,
            detectors=self._infos,
            samples=tuple(engine.samples),
            clean_trials={part: len(self._chunks(part)) for part in CLEAN_TARGETS},
            clean_samples={part: sum(map(len, clean.originals)) for part, clean in self._clean.items()},
            golden_seconds=max(engine.golden_seconds, self.spec.tries * engine.golden_seconds / len(engine.batches)),
            parameters=sum(p.numel() for p in engine.model.parameters()),
            model_bytes=integrity.model_bytes,
            parity_bytes=integrity.nbytes,
            judge=judge_text(engine.judge),
            info=dict(self.workload.info),
            versions=versions(),
            notes=tuple(engine.notes),
        )

    # -- trials ------------------------------------------------------------------------------------------------------

    def run_all(self, trials: Sequence[TrialId], alone: bool = False) -> Iterator[InferenceCoverageRow | DeferredTrial]:
        """Run trials in order."""
        for row in super().run_all(trials, alone):
            self.unverified_row_count += 1
            since = time.monotonic() - self._proven_at
            if self.unverified_row_count >= PROOF_EVERY or since > max(2.0, PROOF_GOLDENS * self.engine.golden_seconds):
                self.verify_restored_state()
            yield row

    def try_trial(self, trial: TrialId, rng: object) -> InferenceCoverageRow:
        """Run a trial of a fault, of clean samples or of timing; ``rng`` is not used."""
        if trial == TIMING:
            return self._timing_row()
        return self._clean_row(trial) if trial.target in CLEAN_TARGETS else self._fault_row(trial)

    def verify_restored_state(self) -> None:
        """Check that weights, inputs and golden outputs are unchanged since the start."""
        with unusable_if_raised():
            self.engine.check_intact()
        changed = [key for key, value in self.engine.fingerprint().items() if self.fingerprint[key] != value]
        if changed:
            raise InjectionError(f"the model was changed during the campaign ({', '.join(changed)} differ)")
        self.unverified_row_count, self._proven_at = 0, time.monotonic()

    def _fault_row(self, trial: TrialId) -> InferenceCoverageRow:
        search = self._search.find(trial.target, trial_seed(self._campaign, self.spec.seed, trial))
        tries = search.tries
        row = self._row(
            trial,
            NOT_FOUND,
            batch=search.batch,
            tried=tries.total(),
            masked=tries[MASKED],
            benign=tries[BENIGN],
            due=tries[DUE],
        )
        if not search.faults:
            return row
        recorded, margins = self._faulty_pass(search.batch, search.faults)
        engine, batch = self.engine, search.batch
        codes = classify(
            engine.judge, engine.golden[batch], recorded.output, engine.batches[batch], engine.samples[batch]
        ).codes
        changed = np.asarray(codes == Outcome.SDC)
        restored, seconds = self._mitigations.try_all(batch, search.faults, changed)
        layer = fault_of_operation(search.faults)
        return replace(
            row, end=FOUND, faults=faults_text(search.faults), layer=layer if layer in self._layers else "",
            samples=len(codes), changed=int(changed.sum()), flags=changed.astype(np.uint8),
            margins=np.vstack([rows[:, changed] for rows in margins]).astype(np.float32), restored=restored,
            rung_seconds=seconds,
        )  # fmt: skip

    def _faulty_pass(self, batch: int, faults: Sequence[Fault]) -> tuple[RecordedPass, list[Floats]]:
        """Record one run with faults, and compute the margins of all detectors, float64[layers, samples] each.

        Raises ``UnsilentError`` if the run gives other bits than the engine.
        """
        engine = self.engine
        with engine.inject_parameter_faults(faults):
            recorded = record_pass(
                engine.model, lambda model, inputs: PlainEngine._evaluate(engine, batch, faults), engine.batches[batch]
            )
            recorded = replace(recorded, run=self._run)
            margins = [
                fixed_rows(detector.margins(recorded), len(info.layers))
                for detector, info in zip(self.detectors, self._infos, strict=True)
            ]
        if not same_outputs(engine.output(batch, faults), recorded.output):
            raise UnsilentError(
                f"a recorded run gives other bits than the engine ({faults[0].describe()}); use --engine plain, and report this "
                "as a bug"
            )
        return recorded, margins

    def _clean_row(self, trial: TrialId) -> InferenceCoverageRow:
        chunks = self._chunks(trial.target)
        if trial.k >= len(chunks):
            raise UsageError(f"trial {trial} does not exist; there are {len(chunks)} of {trial.target}")
        clean, numbers = self._clean[trial.target], chunks[trial.k]
        largest = np.hstack([self._largest_margins(clean.batches[number]) for number in numbers])
        originals = np.concatenate([np.asarray(clean.originals[number], np.int64) for number in numbers])
        return self._row(
            trial, JUDGED, samples=largest.shape[1], margins=largest.astype(np.float32), originals=originals
        )

    def _largest_margins(self, batch: Any) -> Floats:
        """The largest margin over layers of each sample, float64[detectors, samples]."""
        recorded = record_pass(self.engine.model, self._run, batch)
        return np.array([detector.margins(recorded).max(0) for detector in self.detectors])

    def _timing_row(self) -> InferenceCoverageRow:
        engine = self.engine
        times = seconds_of_detectors(engine.model, self._run, engine.batches[0], self.detectors)
        return self._row(TIMING, TIMED, times=times)


def _further_modules(detectors: Iterable[InferenceDetector]) -> list[str]:
    """The modules that define detectors outside of this package."""
    parts = (part for each in detectors for part in (each.parts if isinstance(each, Combination) else (each,)))
    return sorted({name for part in parts if not (name := type(part).__module__).startswith("unsilent.")})


def fixed_rows(margins: Floats, rows: int) -> Floats:
    """Margins with exactly ``rows`` rows.

    If the pass took another path, rows are cut or repeated, and the last row has the largest of all margins.
    """
    if len(margins) == rows:
        return margins
    missing = np.repeat(margins[-1:], max(0, rows - len(margins)), axis=0)
    result = np.vstack([margins[:rows], missing])
    result[-1] = margins.max(0)
    return result
