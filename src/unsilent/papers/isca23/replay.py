"""Replays a published injection in its training, and writes the log in the published layout.

The published runs start from a checkpoint of TensorFlow, which cannot be read here. The user's own weights can replace it.
Without any, the training starts at the target step (or some steps before) with a fresh network, and the log reports this. Then
the operation, the tensor, the position and the value are as published, but not the state of the corrupted network.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from unsilent.basics.errors import UsageError
from unsilent.basics.strictjson import as_json_values
from unsilent.faults.corruption_log import corrupted_log_lines
from unsilent.papers.isca23 import log as lines
from unsilent.papers.isca23.geometry import IMAGE
from unsilent.papers.isca23.injections import EPOCHS, STEPS, PublishedInjection
from unsilent.papers.isca23.log import PublishedStepRecord
from unsilent.papers.isca23.mapping import convolution_of, fault_from_injection, victims

if TYPE_CHECKING:
    from unsilent.basics.fault_trace import FaultTrace
    from unsilent.faults import Fault
    from unsilent.faults.sampling import Ints
    from unsilent.workloads.model_fitting import Progress

DIGITS = "digits"
"""Value of ``data`` that selects the images of `unsilent.papers.isca23.training` instead of a file."""
HELD_OUT = 6
"""One of this many images is kept for the evaluation, like 10,000 of 60,000."""
MOST_HELD_OUT = 10_000


@dataclass(frozen=True)
class InjectionReplayResult:
    """The result of replaying a published injection.

    ``records_before`` and ``records_after`` are the steps before and after the fault; ``golden_step`` and ``faulty_step`` its
    step without and with it, from the same state. ``held_out_loss_and_accuracy``: mean loss and accuracy on the held-out images
    at the end (``None`` if the training had stopped). ``elements_corrupted``: number of corrupted elements. ``trace``:
    propagation of the fault through its step, if requested. ``notes``: notes about the images.
    """

    log: str
    weights: str
    fault: Fault
    elements_corrupted: int
    records_before: tuple[PublishedStepRecord, ...]
    golden_step: PublishedStepRecord
    faulty_step: PublishedStepRecord
    records_after: tuple[PublishedStepRecord, ...]
    held_out_loss_and_accuracy: tuple[float, float] | None
    trace: FaultTrace | None = None
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The result as JSON; numbers that are not finite are null."""
        values = {
            "log": self.log,
            "weights": self.weights,
            "fault": self.fault.to_json(),
            "hits": self.elements_corrupted,
            "valid": self.held_out_loss_and_accuracy,
            "notes": list(self.notes),
        }
        steps = {
            "before": self.records_before,
            "golden": (self.golden_step,),
            "faulty": (self.faulty_step,),
            "after": self.records_after,
        }
        keys = ("epoch", "step", "loss", "accuracy")
        values |= {name: [{key: getattr(r, key) for key in keys} for r in records] for name, records in steps.items()}
        if self.trace is not None:
            values["trace"] = self.trace.to_json()
        return dict(as_json_values(values))

    def __str__(self) -> str:
        parts = [f"weights: {self.weights}", f"fault: {self.fault.describe()}"]
        twins = [("without the fault", (self.golden_step,)), ("with the fault", (self.faulty_step,))]
        shown = [("before", self.records_before[-1:]), *twins, ("after", self.records_after)]
        for name, records in shown:
            parts += [f"{name}: {record.line}" for record in records]
        if not (self.faulty_step, *self.records_after)[-1].finite:
            parts.append("the training stopped, because the loss is not finite")
        if self.held_out_loss_and_accuracy is not None:
            parts.append(
                f"held-out images at the end: loss {self.held_out_loss_and_accuracy[0]:.5f}, accuracy "
                f"{self.held_out_loss_and_accuracy[1]:.5f}"
            )
        return "\n".join([*parts, *(f"Note: {note}" for note in self.notes)])


class InjectionReplay:
    """The training around one published injection.

    Args:
        injection: Injection that was read from a file.
        data: ``.npz`` file of images, or ``digits`` for the images that need no file; the last sixth is held out.
        weights: Initial weights (state dict or safetensors of the network here); ``None`` for a fresh network.
        batch: Batch size of all eight workers together.
        images: Number of images to use, the first ones.

    Raises:
        UsageError: The injection does not fit the network or the batch, or a file cannot be read.
    """

    def __init__(
        self,
        injection: PublishedInjection,
        data: str | Path,
        weights: str | Path | None = None,
        *,
        batch: int = 1024,
        images: int | None = None,
        width: int = 64,
    ) -> None:
        self.injection = injection
        self.fault = fault_from_injection(injection, batch=batch, width=width)
        if not (injection.target_epoch < EPOCHS and injection.target_step < STEPS):
            place = injection.file_position("target_epoch" if injection.target_epoch >= EPOCHS else "target_step")
            raise UsageError(
                f"{place}: expected an epoch below {EPOCHS} and a step below {STEPS}, the limits of published trainings"
            )
        self._conv = convolution_of(self.fault, model=injection.model, batch=batch, width=width)

        from unsilent.papers.isca23.training import PublishedTraining, digits_as_images, split_and_normalise
        from unsilent.workloads.saved_files import read_images, read_weights

        pictures, labels = digits_as_images() if str(data) == DIGITS else read_images(str(data), 10)
        count = len(labels) if images is None else images
        if not HELD_OUT <= count <= len(labels):
            raise UsageError(
                f"{count} images were requested of {data}, which has {len(labels)}; expected {HELD_OUT} to {len(labels)}"
            )
        known, self.held_out = split_and_normalise(
            pictures[:count], labels[:count], count - min(count // HELD_OUT, MOST_HELD_OUT)
        )
        self.notes: tuple[str, ...] = ()
        if _is_sorted_by_class(labels[:count].numpy()):
            self.notes = (
                f"the images of {data} are sorted by class, so the held-out ones, the last {len(self.held_out):,}, do not have "
                "the classes of those that are trained on; shuffle the file before you judge their loss and accuracy",
            )
        rate = float(injection.learning_rate)
        self.training = PublishedTraining(
            injection.model, known, rate=rate, batch=batch, width=width, seed=injection.seed
        )
        # The gradient of the images is not needed, but a fault in it must be injected somewhere.
        self.training.input_gradients = self._conv.size == IMAGE and injection.phase == "grad_in"
        self.weights = f"none (a fresh network with seed {injection.seed}; the epochs before the fault are not trained)"
        if weights is not None:
            self.training.load(read_weights(str(weights)), str(weights))
            self.weights = str(weights)
        self._state: dict[str, Any] | None = None
        self.position = injection.target_epoch * STEPS + injection.target_step

    @property
    def model(self) -> Any:
        """The trained network."""
        return self.training.model

    def train_before_target(self, count: int) -> Iterable[PublishedStepRecord]:
        """Train the given number of steps just before the target step, also in earlier epochs."""
        for position in range(max(self.position - count, 0), self.position):
            yield self.training.step(*divmod(position, STEPS))

    def run_target_step(
        self, faulty: bool = True, inner_context: AbstractContextManager[Any] | None = None
    ) -> PublishedStepRecord:
        """Run the target step, from the same state in every call.

        ``inner_context`` is entered inside the mode that injects the fault. Raises ``InjectionError`` if the fault cannot be
        injected.
        """
        if self._state is None:
            self._state = self.training.snapshot()
        else:
            self.training.restore(self._state)
        faults = [self.fault] if faulty else []
        epoch, step = divmod(self.position, STEPS)
        return self.training.step(epoch, step, faults, inner_context or nullcontext())

    def trace_target_step(self) -> FaultTrace:
        """Trace of how the fault spreads through the operations of the target step."""
        from unsilent.engine.trace import trace

        hits: list[tuple[Fault, int | None]] = []

        def run(faulty: bool, tracer: AbstractContextManager[Any]) -> None:
            record = self.run_target_step(faulty, tracer)
            if record.receipt is not None:
                hits[:] = [(hit.fault, hit.changed_bits) for hit in record.receipt.applied_faults]

        return trace(self.model, run, faults=lambda: hits)

    def train_after_target(self, count: int) -> Iterable[PublishedStepRecord]:
        """Train the given number of steps after the target step, at most to the end of the last epoch."""
        for position in range(self.position + 1, min(self.position + 1 + count, EPOCHS * STEPS)):
            yield self.training.step(*divmod(position, STEPS))

    def evaluate(self) -> tuple[float, float]:
        """Mean loss and accuracy on the held-out images."""
        return self.training.evaluate(self.held_out)

    def corrupted_log_lines(self, record: PublishedStepRecord) -> list[str]:
        """The log lines on the corrupted elements."""
        assert record.receipt is not None
        mapped = victims(self.fault, self._conv, self.fault.operands)
        published = dict(zip(self.injection.inj_pos, self.injection.inj_values, strict=True))
        values = [float(published[index]) for index in map(tuple, mapped.positions.tolist())]
        worker, layer = self.injection.target_worker, self.injection.target_layer
        return corrupted_log_lines(record.receipt, worker, layer, mapped.shape, mapped.positions, values)


def replay_injection(
    injection: PublishedInjection,
    data: str | Path,
    weights: str | Path | None = None,
    *,
    steps: int = 5,
    steps_before: int | None = None,
    batch: int = 1024,
    images: int | None = None,
    width: int = 64,
    log: str | Path | None = None,
    trace: bool = False,
    progress: Progress | None = None,
) -> InjectionReplayResult:
    """Replay a published injection and write its log.

    Args:
        steps: Number of training steps after the fault.
        steps_before: Number of training steps before the fault. The default is, as published, all earlier steps of its epoch if
            weights are given, and otherwise none.
        log: Path of the log; by default ``replay_….txt`` with the name of the injection's file, in the current folder.
        trace: Whether to compare every operation of the faulty step with the golden one. The other arguments and the exceptions
            are those of `InjectionReplay`.
    """
    if steps_before is None:
        steps_before = 0 if weights is None else injection.target_step
    for name, count in (("steps", steps), ("steps_before", steps_before)):
        if count < 0:
            raise UsageError(f"{name} is {count}; expected 0 or more")
    replay = InjectionReplay(injection, data, weights, batch=batch, images=images, width=width)
    path = Path(log) if log is not None else Path(f"replay_{Path(injection.name).stem}.txt")
    try:
        with path.expanduser().open("w", encoding="utf-8", newline="\n") as file:
            return _Run(replay, file, str(path), steps_before + 1 + steps, progress, trace).go(steps_before, steps)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from None


def _is_sorted_by_class(labels: Ints) -> bool:
    """Whether images of the same class are adjacent; False if there are too few images.

    ``labels`` are int64[n].
    """
    classes = len(np.unique(labels))
    return 1 < classes <= len(labels) / 3 and np.count_nonzero(np.diff(labels)) == classes - 1


class _Run:
    """One replay from its first step to its last, with its log file."""

    def __init__(
        self, replay: InjectionReplay, file: IO[str], path: str, total: int, progress: Progress | None, trace: bool
    ) -> None:
        self._trace = trace
        self._replay, self._file, self._path = replay, file, path
        self._total, self._progress, self._done = total, progress, 0
        self._epoch: list[PublishedStepRecord] = []
        self._stopped = False

    def go(self, steps_before: int, steps: int) -> InjectionReplayResult:
        replay, injection = self._replay, self._replay.injection
        self._write(*lines.header(injection.target_epoch, injection.target_step, replay.weights))
        self._tell("the first step")
        before = self._all(replay.train_before_target(steps_before))
        if self._stopped:
            raise UsageError(
                "the loss is not finite before the fault; start from other weights, or train fewer steps before the fault"
            )
        golden = replay.run_target_step(faulty=False)
        spread, record = replay.trace_target_step() if self._trace else None, replay.run_target_step()
        self._write(*replay.corrupted_log_lines(record))
        faulty = self._one(record)
        after = () if self._stopped else self._all(replay.train_after_target(steps))
        assert record.receipt is not None
        valid = None if self._stopped else replay.evaluate()
        subject = self._path, replay.weights, replay.fault, record.receipt.verified_elements
        return InjectionReplayResult(*subject, before, golden, faulty, after, valid, spread, replay.notes)

    def _all(self, records: Iterable[PublishedStepRecord]) -> tuple[PublishedStepRecord, ...]:
        seen = []
        for record in records:
            seen.append(self._one(record))
            if self._stopped:
                break
        return tuple(seen)

    def _one(self, record: PublishedStepRecord) -> PublishedStepRecord:
        self._write(record.line)
        self._epoch.append(record)
        self._done += 1
        self._tell(record.line)
        self._stopped = not record.finite
        if not self._stopped and record.step == STEPS - 1:
            self._end_of_epoch(record.epoch)
        if self._stopped:
            self._write(lines.NOT_FINITE)
        return record

    def _end_of_epoch(self, epoch: int) -> None:
        count = len(self._epoch)
        train = sum(m.loss for m in self._epoch) / count, sum(m.accuracy for m in self._epoch) / count
        valid = self._replay.evaluate()
        self._write(lines.epoch_line(epoch, train, valid))
        self._epoch, self._stopped = [], not math.isfinite(valid[0])

    def _write(self, *written: str) -> None:
        self._file.writelines(f"{line}\n" for line in written)
        self._file.flush()

    def _tell(self, description: str) -> None:
        if self._progress is not None:
            self._progress(description, self._done, self._total)
