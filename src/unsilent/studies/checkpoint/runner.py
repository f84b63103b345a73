"""Runs the trials of ``unsilent checkpoint study``: corrupts a copy of the checkpoint and resumes from it."""

from __future__ import annotations

import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from unsilent.basics.errors import UsageError
from unsilent.basics.printable import escape_unprintable
from unsilent.campaigns.code import code_fingerprint, versions
from unsilent.campaigns.codec import faults_text
from unsilent.campaigns.runner import Runner
from unsilent.campaigns.spec import TrialId, WorkerSettings, campaign_hash, sorted_json_text, trial_seed
from unsilent.checkpoints.checkpoint import Checkpoint
from unsilent.checkpoints.drawing import DrawOptions, draw_faults
from unsilent.checkpoints.hashes import hash_tensors
from unsilent.checkpoints.names import BUFFERS
from unsilent.checkpoints.stored_tensors import Patch, StoredTensor
from unsilent.engine.forking.golden import METRIC
from unsilent.faults.models import FaultModel, fault_model
from unsilent.faults.population import Region
from unsilent.faults.record import Fault
from unsilent.outcomes import Outcome
from unsilent.studies.checkpoint.spec import (
    COLLECTIVES,
    LOADED_BY,
    CheckpointBaseline,
    CheckpointRow,
    CheckpointSpec,
    CheckpointTarget,
    CleanResume,
)
from unsilent.workloads import load_training
from unsilent.workloads.distributed import Gang, ResumeRecord
from unsilent.workloads.distributed.orders import Payload
from unsilent.workloads.model_fitting import Progress
from unsilent.workloads.trainings import Seeds
from unsilent.workloads.trainings.base import TrainingWorkload


def _is_weight(tensor: StoredTensor) -> bool:
    return tensor.section == "model" and not tensor.name.endswith(BUFFERS)


BELONGS: Mapping[str, Callable[[StoredTensor], bool]] = {
    "weights": _is_weight,
    "statistics": lambda tensor: tensor.name.endswith(("running_mean", "running_var")),
    "first_moment": lambda tensor: tensor.name.endswith(("/exp_avg", "/momentum_buffer")),
    "second_moment": lambda tensor: tensor.name.endswith("/exp_avg_sq"),
    "scheduler": lambda tensor: tensor.is_number and tensor.section in ("scheduler", "optimizer"),
}
"""Section of the file -> function that tells whether a tensor or number belongs to it."""


def regions_of(checkpoint: Checkpoint, section: str) -> list[Region]:
    """Regions of a section of the checkpoint that can be corrupted; empty if the training has no such state."""
    return [
        Region(tensor.site, tensor.dtype, tensor.shape)
        for tensor in checkpoint.tensors.values()
        if BELONGS[section](tensor) and not tensor.reason_not_editable and tensor.codec.kind == "float" and tensor.numel
    ]


EVALUATIONS = 4
"""Approximate number of evaluations of each resume, in addition to the one right after the restart."""
_ENDS = {
    "finished": "finished",
    "loss not finite": "not-finite",
    "raised": "raised",
    "rank lost": "crash",
    "deadline": "hang",
}


class CheckpointRunner(Runner[CheckpointSpec, CheckpointBaseline, CheckpointRow]):
    """Runs trials with one gang of ranks per strategy, which stays alive from trial to trial.

    Args:
        spec: Spec of the campaign.
        progress: Called with the strategy that is being prepared.

    Raises:
        UsageError: the training lacks a section or has too few steps, or its clean resume does not finish.
    """

    def __init__(
        self, spec: CheckpointSpec, progress: Progress | None = None, worker_settings: WorkerSettings | None = None
    ) -> None:
        super().__init__(spec)
        self.workload: TrainingWorkload = load_training(
            spec.workload, dict(spec.options), data=spec.data, progress=progress
        )
        self.steps = self.workload.steps if spec.steps is None else spec.steps
        self.step = self.steps // 2 if spec.step is None else spec.step
        if not 1 <= self.step < self.steps:
            raise UsageError(
                f"--step is {self.step}, but the training has {self.steps} steps; expected 1 to {self.steps - 1}"
            )
        self._folder = tempfile.TemporaryDirectory(prefix="unsilent-checkpoints-")
        self._gangs: dict[str, Gang] = {}
        self._progress = progress
        self._resumes: dict[str, CleanResume] = {}
        self._targets: list[CheckpointTarget] = []
        self._layers: tuple[str, ...] = ()
        self._start_seconds = 0.0
        self._collectives: dict[str, tuple[Payload, ...]] = {}
        for number, strategy in enumerate(spec.strategies):
            if progress is not None:
                progress(f"the fault-free run of {spec.workload} ({strategy})", number, len(spec.strategies))
            self._resumes[strategy] = self._prepare(strategy)
        if not self._targets:
            raise UsageError(
                f"no collective of torch runs under {', '.join(spec.strategies)}, so there is nothing to corrupt; add another "
                "--section, or a --strategy like ddp"
            )
        # All strategies get the same faults, because the draw does not depend on the strategy.
        self._design = campaign_hash(spec, {"checkpoint": self._resumes[spec.strategies[0]].checkpoint_hash})

    def close(self) -> None:
        """End the ranks of all strategies."""
        for gang in self._gangs.values():
            gang.close()
        self._folder.cleanup()

    def make_baseline(self) -> CheckpointBaseline:
        """The facts that are established before the first trial."""
        return CheckpointBaseline.of(
            self.spec,
            self._fingerprint(),
            name=self.workload.name,
            targets=tuple(self._targets),
            step=self.step,
            steps=self.steps,
            layers=self._layers,
            resumes=tuple(self._resumes.values()),
            # Lost ranks are started again within a trial, and the time for this must not count as a hang.
            golden_seconds=max(run.seconds for run in self._resumes.values()) + self._start_seconds,
            info=dict(self.workload.info),
            versions=versions(),
        )

    def run_trial(self, trial: TrialId, rng: object) -> CheckpointRow:
        """Run one trial.

        ``rng`` is not used: faults are drawn with another generator, so that they are equal for every strategy.
        """
        begun = time.perf_counter()
        target, faults = self.baseline.target(trial.target), self.draw(trial)
        strategy = target.strategy
        clean, altered = self._clean_file(strategy), Path(self._folder.name) / f"{strategy}-altered.pt"
        if target.section == COLLECTIVES:
            record = self._resume(strategy, [clean], comm_faults=faults)
            return self._row(trial, strategy, faults, record, time.perf_counter() - begun)
        shutil.copyfile(clean, altered)
        with Checkpoint(altered) as checkpoint:
            patches, receipt = checkpoint.plan(faults, "fixed")
        _write(altered, patches)
        others = [] if target.loaded_by == "all" else [clean] * (self._gangs[strategy].world_size - 1)
        record = self._resume(strategy, [*others, altered], target.loaded_by)
        return self._row(
            trial, strategy, [hit.fault for hit in receipt.applied_faults], record, time.perf_counter() - begun
        )

    def draw(self, trial: TrialId) -> tuple[Fault, ...]:
        """Draw the faults of a trial; strategies with the same checkpoint get the same faults."""
        target = self.baseline.target(trial.target)
        seed = trial_seed(self._design, self.spec.seed, trial._replace(target=target.section)) % 2**63
        model = fault_model(self.spec.fault).with_count(trial.flips or 1)
        if target.section == COLLECTIVES:
            return self._draw_in_payloads(target.strategy, model, np.random.default_rng(seed))
        with Checkpoint(self._clean_file(target.strategy)) as checkpoint:
            options = DrawOptions(law=self.spec.law, seed=seed)
            return draw_faults(checkpoint, regions_of(checkpoint, target.section), model, options)

    def _draw_in_payloads(self, strategy: str, model: FaultModel, rng: np.random.Generator) -> tuple[Fault, ...]:
        """Draw faults in the data that one rank sends in one collective of one step.

        The first step is left out, because DDP's gradients are in other buckets there. Faults are in one collective only, because
        a fault in an earlier collective may prevent a later one from being called. Collectives with too few elements are left
        out; raises ``UsageError`` if all have too few.
        """
        step = int(rng.integers(min(self.step + 1, self.steps - 1), self.steps))
        rank = int(rng.integers(self._gangs[strategy].world_size))
        regions = [Region(*payload, step=step) for payload in self._collectives[strategy]]
        large = [region for region in regions if region.eligible_count >= (model.count or 1)] or regions
        sizes = np.array(
            [region.eligible_count if self.spec.law == "per-element" else 1 for region in large], np.float64
        )
        chosen = large[int(rng.choice(len(large), p=sizes / sizes.sum()))]
        return tuple(replace(fault, rank=rank) for fault in model.draw([chosen], rng, self.spec.law))

    def lost_trial_row(self, trial: TrialId, ended: Outcome, seconds: float, reason: str) -> CheckpointRow:
        """The row of a trial during which the worker process was lost."""
        return _ended_row(trial, self.draw(trial), "hang" if ended is Outcome.HANG else "crash", reason, seconds)

    def verify_restored_state(self) -> None:
        """Check that the clean resume of every strategy still ends with the same bits.

        Raises:
            UsageError: a clean resume ends with other bits, because ranks keep state from earlier resumes.
        """
        for strategy, clean in self._resumes.items():
            record = self._resume(strategy, [self._clean_file(strategy)])
            if _final_hashes(record) != clean.final_hashes:
                raise UsageError(
                    f"the clean resume under {strategy} ended with other bits after some trials than before them; the training "
                    "keeps state outside of its model and optimizers: run unsilent explain to find it"
                )

    # -- fault-free runs ---------------------------------------------------------------------------------------------

    def _clean_file(self, strategy: str) -> Path:
        return Path(self._folder.name) / f"{strategy}.pt"

    def _prepare(self, strategy: str) -> CleanResume:
        """Start the ranks of a strategy, save its checkpoint, and make the clean resume."""
        spec, begun = self.spec, time.perf_counter()
        gang = self._gangs[strategy] = Gang(
            spec.workload, dict(spec.options), data=spec.data, strategy=strategy,
            world_size=1 if strategy == "single" else spec.ranks, seeds=Seeds.same_for_all(spec.init),
            folder=Path(self._folder.name),
        )  # fmt: skip
        self._start_seconds = max(self._start_seconds, time.perf_counter() - begun)
        file = gang.train_to(self.step, self._clean_file(strategy))
        record = self._resume(strategy, [file], remember_clean=True)
        if record.end != "finished":
            raise UsageError(f"the fault-free resume under {strategy} did not finish: {record.end} {record.detail}")
        self._collectives[strategy], self._layers = record.collectives, record.layers
        with Checkpoint(file) as checkpoint:
            self._targets += self._targets_of(strategy, checkpoint)
            content = {name: digests.xxh3_128 for name, digests in hash_tensors(checkpoint).items()}
        return CleanResume(
            strategy=strategy,
            ranks=gang.world_size,
            **{name: tuple(curve.tolist()) for name, curve in _curves(record).items()},
            evaluated_at=tuple(record.evaluated_at.tolist()),
            checkpoint_hash=xxhash.xxh3_128_hexdigest(sorted_json_text(content).encode()),
            final_hashes=_final_hashes(record),
            elements=tuple(map(tuple, record.by_layer(record.parameter_elements()).tolist())),
            seconds=record.seconds,
        )

    def _targets_of(self, strategy: str, checkpoint: Checkpoint) -> Iterator[CheckpointTarget]:
        """The targets of a strategy: its sections, each with every way to load the file.

        Raises ``UsageError`` if the checkpoint has no such section.
        """
        spec = self.spec
        for section in spec.sections:
            if section == COLLECTIVES:
                elements = sum(math.prod(shape) for _, _, shape in self._collectives[strategy])
                if elements:
                    yield CheckpointTarget(f"{strategy}/{section}", strategy, section, "all", elements)
                continue
            elements = sum(region.eligible_count for region in regions_of(checkpoint, section))
            if not elements:
                raise UsageError(f"the checkpoint of {spec.workload} has no {section}; leave it out of --section")
            for loaded_by in spec.loaded_by if strategy != "single" else ("all",):
                name = f"{strategy}/{section}" + ("" if loaded_by == "all" else f"/{loaded_by}")
                yield CheckpointTarget(name, strategy, section, loaded_by, elements)

    def _resume(
        self,
        strategy: str,
        files: list[Path],
        loaded_by: str = "all",
        comm_faults: Sequence[Fault] = (),
        remember_clean: bool = False,
    ) -> ResumeRecord:
        """Resume from files, and once again if a rank was lost, since something else may have killed it."""
        restart, broadcast = LOADED_BY[loaded_by]
        for _ in range(2):
            record = self._gangs[strategy].resume(
                files,
                until_step=self.steps,
                restart=restart,
                broadcast_optimizer=broadcast,
                evaluate_every=max(1, (self.steps - self.step) // EVALUATIONS),
                comm_faults=comm_faults,
                remember_clean=remember_clean,
            )
            if record.end != "rank lost":
                break
        return record

    def _fingerprint(self) -> dict[str, str]:
        resumes = sorted_json_text([(run.strategy, run.losses, run.final_hashes) for run in self._resumes.values()])
        return {
            "golden": xxhash.xxh3_128_hexdigest(resumes.encode()),
            "code": code_fingerprint(self.spec.workload, self.workload, None),
            "torch": str(torch.__version__),
            "numpy": ".".join(np.__version__.split(".")[:2]),
        }

    def _row(
        self, trial: TrialId, strategy: str, faults: Sequence[Fault], record: ResumeRecord, seconds: float
    ) -> CheckpointRow:
        end = _ENDS[record.end]
        if end not in ("finished", "not-finite"):
            return _ended_row(trial, faults, end, record.detail, seconds)
        return CheckpointRow(
            trial=trial,
            faults=faults_text(faults),
            end=end,
            steps_run=record.losses.shape[1],
            evaluations=len(record.evaluated_at),
            bit_identical=_final_hashes(record) == self._resumes[strategy].final_hashes,
            final_hash=record.hashes[0]["all"],
            error="",
            **_curves(record),
            nonfinite=record.by_layer(record.nonfinite.sum(0)),
            extreme=record.by_layer(record.extreme.sum(0)),
            changed=record.changed_parameters(),
            seconds=seconds,
        )


def _ended_row(trial: TrialId, faults: Sequence[Fault], end: str, error: str, seconds: float) -> CheckpointRow:
    """The row of a trial that has no result besides how it ended."""
    text = escape_unprintable(error)[:500]
    return CheckpointRow.without_result(trial, faults=faults_text(faults), end=end, error=text, seconds=seconds)


def _final_hashes(record: ResumeRecord) -> tuple[str, ...]:
    return tuple(hashes["all"] for hashes in record.hashes)


def _mean(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The mean over ranks."""
    with np.errstate(all="ignore"):
        result: NDArray[np.float64] = values.mean(0)
    return result


def _curves(record: ResumeRecord) -> dict[str, Any]:
    """Losses and metrics of a resume, by step and by evaluation; NaN where a metric is missing."""
    losses, evaluations = _mean(record.losses), len(record.evaluated_at)
    return {
        "losses": losses,
        "metric": _mean(record.metrics[METRIC]) if METRIC in record.metrics else -losses,
        "accuracy": record.held_out.get(METRIC, np.full(evaluations, np.nan)),
        "held_out_loss": record.held_out["loss"],
    }


def _write(file: Path, patches: Sequence[Patch]) -> None:
    """Apply patches to a private copy of the checkpoint."""
    with open(file, "r+b") as opened:
        for patch in patches:
            opened.seek(patch.offset)
            opened.write(patch.after)
