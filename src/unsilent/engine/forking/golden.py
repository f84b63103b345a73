"""The fault-free run of a training, from which faulty runs are forked.

It keeps records and state hashes of all steps, some snapshots, and the final evaluation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from unsilent.basics.errors import UsageError
from unsilent.basics.nested import tensors_in
from unsilent.engine.digests import tensors_hasher
from unsilent.engine.running_out import unusable_if_raised
from unsilent.workloads.trainings.base import Evaluation, Seeds, StepRecord, TrainingState, TrainingWorkload
from unsilent.workloads.trainings.snapshots import model_tensors

MEMORY = 1 << 28
"""Bytes that snapshots may take."""
METRIC = "accuracy"
MeasureState = Callable[[TrainingState], NDArray[np.float64]]


class GoldenTraining:
    """Runs the training once without faults and keeps its records and snapshots.

    Args:
        steps: Number of steps of the run; None: all.
        memory: Bytes that all snapshots may take together; snapshots are spread evenly.
        watch: Function that is called after every step and returns values to store for it, float64[k].
        evaluation_interval: Number of steps between interim evaluations.
        progress: Function that is called with the number of steps done and of all steps.

    Raises:
        UsageError: an invalid number of steps, or a loss that is not finite.

    Attributes:
        losses, metric: float64[steps], values before each update; the metric is the accuracy of the batch, or the
            negative loss if there is no accuracy.
        hashes: Hash of the state after each step.
        watched: float64[steps, k], results of ``watch``.
        evaluation: Evaluation at the end.
        snapshot_interval: Number of steps between two snapshots.
        epochs: Number of the epoch of each step.
        interim_evaluations: Evaluations during the run, by step.
    """

    def __init__(
        self,
        workload: TrainingWorkload,
        seeds: Seeds,
        steps: int | None = None,
        *,
        memory: int = MEMORY,
        watch: MeasureState | None = None,
        evaluation_interval: int | None = None,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        self.workload = workload
        self.steps = workload.steps if steps is None else steps
        if self.steps < 1:
            raise UsageError(f"steps is {self.steps}; expected at least 1")
        state = workload.start(seeds)
        self._snapshots: dict[int, Mapping[str, Any]] = {}
        self.snapshot_interval = 1
        self.look = evaluation_interval
        self.interim_evaluations: dict[int, Evaluation] = {}
        losses, metric, hashes, settings, watched, epochs = [], [], [], [], [], []
        for step in range(self.steps):
            if step % self.snapshot_interval == 0:
                self._snapshots[step] = workload.snapshot(state)
                if step == 1:  # optimizers have created their state now
                    self.snapshot_interval = self._spacing(memory)
            epochs.append(state.epoch)
            record = workload.step(state)
            if not np.isfinite(record.loss):
                raise UsageError(
                    f"the fault-free run of {workload.name} has a loss of {record.loss} in step {step}; expected a finite loss"
                )
            losses.append(record.loss)
            metric.append(metric_of(record))
            hashes.append(state_hash(state))
            settings.append(settings_hash(state))
            watched.append(np.zeros(0) if watch is None else watch(state))
            if self.is_evaluated_after(step):
                self.interim_evaluations[step] = workload.evaluate(state)
            progress(step + 1, self.steps)
        self.losses, self.metric = np.array(losses), np.array(metric)
        self.hashes, self.watched, self.epochs = hashes, np.array(watched), epochs
        self._settings = settings
        self.evaluation: Evaluation = workload.evaluate(state)
        self._state = state

    def is_golden_state(self, state: TrainingState, step: int) -> bool:
        """Whether a state is bit-identical to the golden state after a step."""
        return state_hash(state) == self.hashes[step] and settings_hash(state) == self._settings[step]

    def is_evaluated_after(self, step: int) -> bool:
        """Whether the golden run is evaluated after a step."""
        return self.look is not None and (step + 1) % self.look == 0

    def state_before_step(self, step: int) -> TrainingState:
        """The golden state before a step, in the tensors that all forks share.

        Restores the nearest earlier snapshot and runs golden steps from it. Raises ``ProcessUnusable`` if a step that
        has run before raises now.
        """
        if not 0 <= step < self.steps:
            raise UsageError(f"step is {step}; expected 0 to {self.steps - 1}")
        # From an earlier state if there is one: running a step proves that steps still give golden's bits.
        start = max(known for known in self._snapshots if known < step or step == known == 0)
        with unusable_if_raised():
            self.workload.restore_into(self._state, self._snapshots[start])
            for _ in range(start, step):
                self.workload.step(self._state)
            same = not step or self.is_golden_state(self._state, step - 1)
        if not same:
            raise UsageError(
                f"{self.workload.name} does not reach the same bits before step {step} when it is run again; find the cause: "
                "unsilent explain FILE.py:LOOP"
            )
        return self._state

    def _spacing(self, memory: int) -> int:
        """The smallest number of steps between snapshots for which all snapshots fit into memory."""
        size = max(1, sum(t.numel() * t.element_size() for t in tensors_in(self._snapshots[1])))
        return max(1, -(-self.steps * size // memory))


def metric_of(record: StepRecord) -> float:
    """The accuracy of a step, or its negative loss if it has no accuracy.

    A larger value is better.
    """
    return float(record.metrics.get(METRIC, -record.loss))


def state_hash(state: TrainingState) -> int:
    """A 64-bit hash of all bits of parameters, buffers, optimizer state and loss scale."""
    tensors = list(model_tensors(state.model).values())
    for optimizer in state.optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                entries = optimizer.state.get(parameter, {})
                tensors += [value for value in entries.values() if isinstance(value, Tensor)]
    digest = tensors_hasher(tensors)
    if state.scaler is not None:
        digest.update(repr(state.scaler.get_scale()).encode())
    return int(digest.intdigest())


def settings_hash(state: TrainingState) -> int:
    """A 64-bit hash of the other state that steps change.

    It covers settings and counters of optimizers, schedules and the loss scaler.
    """
    parts: list[Any] = [
        [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        for optimizer in state.optimizers
    ]
    parts += [[list(entries.values()) for entries in optimizer.state.values()] for optimizer in state.optimizers]
    parts += [scheduler.state_dict() for scheduler in state.schedulers]
    parts += [] if state.scaler is None else [state.scaler.state_dict()]
    return xxhash.xxh3_64_intdigest(_text(parts).encode())


def _text(value: Any) -> str:
    """A text that is equal for equal values.

    Functions and objects are represented by their type. Larger tensors are left out, as they are hashed elsewhere.
    """
    if isinstance(value, Tensor):
        return repr(value.item()) if value.numel() == 1 else ""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key!r}:{_text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple, deque)):
        return "[" + ",".join(map(_text, value)) + "]"
    plain = isinstance(value, (str, bytes, int, float, complex, bool, type(None), np.generic))
    return repr(value) if plain else type(value).__qualname__
