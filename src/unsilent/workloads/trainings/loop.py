"""`Training`: a training workload made from a few functions.

The built-in trainings use it too. One step: the batch, its augmentation, the permutation of its rows, forward,
backward, clipping, the update (through the loss scaler), the schedule. Each part draws from its own stream; see
`randomness`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unsilent.basics.error_origin import call_user_code
from unsilent.basics.errors import UsageError
from unsilent.basics.nested import map_tensors
from unsilent.sites.modules import named_parameters
from unsilent.workloads.base import UNNAMED
from unsilent.workloads.trainings import snapshots
from unsilent.workloads.trainings.base import Evaluation, Seeds, StepRecord, TrainingState
from unsilent.workloads.trainings.dropout import ChosenRows, rows_chosen_by
from unsilent.workloads.trainings.evaluating import evaluator, kind_and_shape, row_count
from unsilent.workloads.trainings.randomness import GLOBALS, isolated_randomness, seed_globals, stream_seed
from unsilent.workloads.trainings.sources import source_of

AMPS = {"none": None, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Training:
    """A training workload made from functions for the model, the optimizer, the batches, the loss and the evaluation.

    Args:
        model: Function that returns a new model; its random numbers are seeded from ``init``.
        optimizer: Function of the model that returns one optimizer, or several.
        batches: A list of batches (in a new random order in each epoch); a data loader, or a function that returns one;
            a generator function; or a function from the number of a step to its batch.
        loss: ``loss(model, batch)`` -> the loss, or the loss and metrics of the batch by name.
        evaluate: Held-out batches ``(inputs, labels)``, for a model that takes the inputs alone and returns scores
            (logits), one row for each label, in which the largest score is the answer; for other models, a function of
            the model that returns an `Evaluation`.
        schedule: Function of an optimizer that returns its learning-rate scheduler, which is stepped after each update.
        augment: ``augment(batch, generator)`` -> batch; its random numbers, also from the global generators, depend
            only on the seed.
        clip: Largest norm of all gradients together.
        amp: ``bfloat16`` or ``float16``: forward passes under autocast, with a loss scaler.
        growth: Number of updates after which the loss scaler doubles its scale.
        steps: Number of steps of a full run.
        device: Device of the model and the batches.
        settings: Settings that affect the run besides the code (JSON values); a snapshot taken with other settings is
            refused.
        streams: The seeds that have an effect (None: not known).
        info: JSON values for reports.

    Attributes:
        shard: (rank, ranks) if several processes train together: this process trains on rows rank, rank + ranks, … of
            each batch (None: on all rows). The random numbers for a row do not depend on the shard.
    """

    world_size = 1
    shard: tuple[int, int] | None = None

    def __init__(
        self,
        *,
        model: Callable[[], nn.Module],
        optimizer: Callable[[nn.Module], Optimizer | Sequence[Optimizer]],
        batches: Any,
        loss: Callable[[nn.Module, Any], Any],
        evaluate: Any,
        schedule: Callable[[Optimizer], Any] | None = None,
        augment: Callable[[Any, torch.Generator], Any] | None = None,
        clip: float | None = None,
        amp: str = "none",
        growth: int = 200,
        steps: int = 1000,
        device: str = "cpu",
        name: str = UNNAMED,
        settings: Mapping[str, Any] | None = None,
        streams: Sequence[str] | None = None,
        info: Mapping[str, Any] | None = None,
    ) -> None:
        for part, value in (("model", model), ("optimizer", optimizer), ("loss", loss)):
            # A module is also callable, but a training needs a new model for each run.
            if not callable(value) or (part != "loss" and isinstance(value, (nn.Module, Optimizer))):
                raise UsageError(
                    f"training {name!r}: {part} is {type(value).__name__}; expected a function that returns a model: lambda: …"
                    if part == "model"
                    else f"training {name!r}: {part} is {type(value).__name__}; expected a function that takes the model"
                )
        if amp not in AMPS:
            raise UsageError(f"training {name!r}: amp is {amp!r}; expected {', '.join(AMPS)}")
        if steps < 1:
            raise UsageError(f"training {name!r}: steps is {steps}; expected at least 1")
        self.name, self.steps, self.device = name, steps, _device(name, device)
        self.settings = {**(settings or {}), "steps": steps, "clip": clip, "amp": amp, "device": self.device.type}
        self.streams = None if streams is None else tuple(streams)
        self.info = {**(info or {}), "settings": self.settings, "streams": None if streams is None else list(streams)}
        self._model, self._optimizer, self._schedule = model, optimizer, schedule
        self._source, self._augment, self._loss = source_of(batches), augment, loss
        self._evaluate = evaluator(name, evaluate, loss)
        self._clip, self._amp, self._growth = clip, AMPS[amp], growth

    def start(self, seeds: int | Seeds = 0, wrap: Callable[[nn.Module], nn.Module] | None = None) -> TrainingState:
        """The state of a new training.

        ``wrap`` takes the model and returns the module that a step calls instead; it is called before the optimizers
        are made.
        """
        seeds = seeds if isinstance(seeds, Seeds) else Seeds.same_for_all(seeds)
        with isolated_randomness():
            seed_globals(stream_seed(seeds, "init"))
            model = call_user_code(self._model)
            if not isinstance(model, nn.Module):
                raise UsageError(f"training {self.name!r}: expected a torch.nn.Module, got {type(model).__name__}")
            model = model.to(self.device)
            wrapped = wrap(model) if wrap else None
            result = call_user_code(self._optimizer, model)
            optimizers = [result] if isinstance(result, Optimizer) else list(result)
            schedulers = [call_user_code(self._schedule, o) for o in optimizers] if self._schedule else []
        scaler = None
        if self._amp is not None:
            scaler = torch.amp.GradScaler(self.device.type, growth_interval=self._growth)
        return TrainingState(model, optimizers, schedulers, scaler, seeds, wrapped_model=wrapped)

    def step(self, state: TrainingState) -> StepRecord:
        """Run one update and return its record."""
        with isolated_randomness():
            batch, rows = self._batch(state)
            for optimizer in state.optimizers:
                optimizer.zero_grad(set_to_none=True)
            seed_globals(stream_seed(state.seeds, "dropout", state.step))
            with rows_chosen_by(rows), self._autocast():
                result = call_user_code(self._loss, state.wrapped_model or state.model, batch)
            loss, metrics = result if isinstance(result, tuple) else (result, {})
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                raise UsageError(
                    f"training {self.name!r}: loss returned {kind_and_shape(loss)}; expected a tensor with one element"
                )
            call_user_code((loss if state.scaler is None else state.scaler.scale(loss)).backward)
            self._update(state)
            record = StepRecord(state.step, float(loss.detach()), {name: float(v) for name, v in metrics.items()})
        state.step += 1
        state.cursor += 1
        return record

    def evaluate(self, state: TrainingState) -> Evaluation:
        """Evaluate the model in eval mode on the held-out data."""
        modes = [(module, module.training) for module in state.model.modules()]
        with isolated_randomness(), torch.no_grad():
            seed_globals(0)
            state.model.eval()
            try:
                evaluation: Evaluation = call_user_code(self._evaluate, state.model, self._placed)
                return evaluation
            finally:
                for module, mode in modes:
                    module.training = mode

    def snapshot(self, state: TrainingState) -> dict[str, Any]:
        """A snapshot of the full state; see `snapshots`."""
        names = _names(state.model)
        return {
            "format": snapshots.FORMAT,
            "workload": self.name,
            "settings": snapshots.snapshot_copy(self.settings, "settings"),
            "seeds": state.seeds.to_json(),
            "step": state.step,
            "epoch": state.epoch,
            "cursor": state.cursor,
            "model": snapshots.snapshot_copy(snapshots.model_tensors(state.model), "model"),
            "optimizers": [snapshots.optimizer_snapshot(optimizer, names) for optimizer in state.optimizers],
            "schedulers": [snapshots.snapshot_copy(s.state_dict(), type(s).__name__) for s in state.schedulers],
            "scaler": None if state.scaler is None else state.scaler.state_dict(),
        }

    def restore(self, snapshot: Mapping[str, Any]) -> TrainingState:
        """The state of a snapshot in new objects."""
        snapshots.check_header(snapshot, self.name, self.settings)
        state = self.start(Seeds(**snapshot["seeds"]))
        self.restore_into(state, snapshot)
        return state

    def restore_into(self, state: TrainingState, snapshot: Mapping[str, Any]) -> None:
        """Restore a snapshot into the existing objects of a state."""
        snapshots.check_header(snapshot, self.name, self.settings)
        snapshots.check_fit(snapshot, self.name, state.model, state.optimizers, state.schedulers)
        names = _names(state.model)
        snapshots.put_into_model(state.model, snapshot["model"])
        for optimizer, saved in zip(state.optimizers, snapshot["optimizers"], strict=True):
            snapshots.put_into_optimizer(optimizer, saved, names)
        for scheduler, saved in zip(state.schedulers, snapshot["schedulers"], strict=True):
            scheduler.load_state_dict(snapshots.restored_value(scheduler.state_dict(), saved))
        if state.scaler is not None:
            state.scaler.load_state_dict(dict(snapshot["scaler"]))
        state.seeds = Seeds(**snapshot["seeds"])
        state.step, state.epoch, state.cursor = (snapshot[key] for key in ("step", "epoch", "cursor"))
        state.cached_values.clear()

    def _batch(self, state: TrainingState) -> tuple[Any, ChosenRows | None]:
        """The batch of the state's step and the rows to use, or None for all rows in their original order."""
        batch = call_user_code(self._source.batch, state)
        if self._augment is not None:
            seed_globals(stream_seed(state.seeds, "augment", state.step, GLOBALS))
            generator = state.generators["augment"].manual_seed(stream_seed(state.seeds, "augment", state.step))
            batch = call_user_code(self._augment, batch, generator)
        count = row_count(batch)
        rows = self._rows(state, count)
        if rows is None:
            return self._placed(batch), None
        batch = map_tensors(batch, lambda _, tensor: tensor[rows] if tensor.ndim else tensor)
        return self._placed(batch), ChosenRows(rows.to(self.device), count)

    def _rows(self, state: TrainingState, count: int) -> Tensor | None:
        """The rows to train on, in order, out of the ``count`` rows of a batch.

        None for all rows in their original order.
        """
        rows = None
        if state.seeds.within is not None and count:
            generator = state.generators["within"].manual_seed(stream_seed(state.seeds, "within", state.step))
            rows = torch.randperm(count, generator=generator)
        if self.shard is not None:
            rank, ranks = self.shard
            if not count or count % ranks:
                raise UsageError(
                    f"training {self.name!r}: a batch has {count or 'no common number of'} rows; expected a multiple of the "
                    f"{ranks} ranks that share it: choose another batch size or number of ranks"
                )
            rows = (torch.arange(count) if rows is None else rows)[rank::ranks]
        return rows

    def _placed(self, batch: Any) -> Any:
        return map_tensors(batch, lambda _, tensor: tensor.to(self.device)) if self.device.type != "cpu" else batch

    def _autocast(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._amp is None else torch.autocast(self.device.type, self._amp)

    def _update(self, state: TrainingState) -> None:
        """Clip the gradients, step the optimizers, and advance the loss scaler and the schedules."""
        scaler = state.scaler
        for optimizer in state.optimizers:
            if scaler is not None:
                scaler.unscale_(optimizer)
        if self._clip is not None:
            call_user_code(nn.utils.clip_grad_norm_, state.model.parameters(), self._clip)
        if scaler is None:
            for optimizer in state.optimizers:
                call_user_code(optimizer.step)
        else:
            before = scaler.get_scale()
            for optimizer in state.optimizers:
                call_user_code(scaler.step, optimizer)
            scaler.update()
            if scaler.get_scale() < before:
                return  # the update was skipped because gradients were not finite
        for scheduler in state.schedulers:
            call_user_code(scheduler.step)


def _names(model: nn.Module) -> dict[int, str]:
    return {id(p): name for name, p in named_parameters(model)}


def _device(name: str, text: str) -> torch.device:
    try:
        device = torch.device(text)
    except RuntimeError:
        raise UsageError(f"training {name!r}: device is {text!r}; expected cpu, cuda or cuda:N") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"training {name!r}: device is {text!r}, but torch finds no CUDA device here; use device=cpu")
    return device
