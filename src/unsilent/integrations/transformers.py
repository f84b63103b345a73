"""Callbacks of the monitor, the guard and verified checkpoints for transformers' Trainer.

    trainer = Trainer(..., callbacks=[MonitorCallback()])
    trainer.add_callback(GuardCallback(trainer))         # this one needs the Trainer
    trainer.train()

An update with all its micro-batches is one step of the guard. After an alarm the callback repeats the last updates as the
Trainer runs them: its own ``training_step``, clipping, optimizer and schedule. Losses that the Trainer has already summed for
its log are not subtracted.
"""

from __future__ import annotations

import functools
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback

from unsilent.basics.errors import UsageError
from unsilent.checkpoints.last_good import last_good_checkpoint
from unsilent.checkpoints.verified_saving import CheckpointDamaged, verified_load, verify_saved
from unsilent.guard.guard import Guard
from unsilent.monitor.monitor import Monitor

Done = list[tuple[Any, Any]]
"""Inputs and number of items of the micro-batches of one update."""


class MonitorCallback(TrainerCallback):
    """Monitors every training of a Trainer.

    A Trainer does not notify callbacks of an error. After one, the monitor ends with the next training, with the callback,
    or with the process.

    Args:
        options: Options of `Monitor` (``preset``, ``on_alarm``, ``events`` …).

    Attributes:
        monitor: Monitor, made when training begins; ``None`` before.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._end: Callable[[], object] = lambda: None
        self.monitor: Monitor | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Start to monitor the model and its optimizer."""
        self._end()
        self.monitor = Monitor(objects["model"], _without_wrapper(objects["optimizer"]), **self._options)
        self._end = weakref.finalize(self, self.monitor.close)

    def on_train_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """End the monitor."""
        self._end()


def _without_wrapper(optimizer: Any) -> Any:
    """The optimizer inside accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


class GuardCallback(TrainerCallback):
    """Guards one training of a Trainer.

    Args:
        trainer: Trainer that the callback is added to.
        options: Options of `Guard` (``factor``, ``snapshot_location``, ``on_alarm`` …).

    Attributes:
        guard: Guard, made when training begins; ``None`` before.
    """

    def __init__(self, trainer: Trainer, **options: Any) -> None:
        self._trainer: Any = trainer
        self._options = options
        self._update: Done = []
        self._evaluated = False
        self.guard: Guard | None = None
        if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
            raise UsageError("GuardCallback supports one process or DDP; this Trainer uses FSDP or DeepSpeed")

    def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Start to guard the model and its optimizer."""
        trainer = self._trainer
        optimizer = _without_wrapper(trainer.optimizer)
        others = [trainer.lr_scheduler] + ([s] if (s := trainer.accelerator.scaler) is not None else [])
        self.guard = Guard(trainer.accelerator.unwrap_model(trainer.model), optimizer, *others, **self._options)
        plain = self._plain = trainer.training_step

        @functools.wraps(plain)
        def training_step(model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            self._update.append((inputs, num_items_in_batch))
            return plain(model, inputs, num_items_in_batch)

        trainer.training_step = training_step
        self._model = trainer.model_wrapped

    def on_step_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Begin an update, whose batches have been loaded already."""
        assert self.guard is not None
        if self._evaluated:  # a schedule may have been notified of it, which would not be repeated
            self.guard.discard_snapshots()
            self._evaluated = False
        self._update = update = list[tuple[Any, Any]]()
        self.guard.begin(self._again(update))

    def on_step_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """End an update, and check pending steps before a checkpoint or an evaluation."""
        assert self.guard is not None
        self.guard.end()
        if control.should_save or control.should_evaluate or control.should_training_stop:
            self.guard.check_pending_steps()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Check the pending steps, since all batches of the epoch have been read."""
        assert self.guard is not None
        self.guard.check_pending_steps()

    def on_evaluate(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Note that an evaluation ran, so that snapshots from before it are discarded."""
        self._evaluated = True

    def on_train_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Detach the guard and restore the Trainer."""
        if self.guard is not None:
            del self._trainer.training_step  # the method of its class is visible again
            self.guard.close()

    def _again(self, update: Done) -> Callable[[], None]:
        """A function that executes an update again in the same way as the Trainer."""
        trainer = self._trainer

        def again() -> None:
            for number, (inputs, items) in enumerate(update, 1):
                trainer.accelerator.gradient_state._set_sync_gradients(number == len(update))
                self._plain(self._model, inputs, items)
            if trainer.args.max_grad_norm > 0:
                trainer._clip_grad_norm(self._model)
            trainer.optimizer.step()
            plateau = isinstance(trainer.lr_scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
            if not (plateau or trainer.accelerator.optimizer_step_was_skipped):
                trainer.lr_scheduler.step()
            self._model.zero_grad()

        return again


_SAVED = {
    "model": re.compile(r"(model|pytorch_model)(-\d+-of-\d+)?\.(safetensors|bin)"),
    "optimizer": re.compile(r"optimizer\.(pt|bin)"),
}
"""Files of a checkpoint's folder that hold a whole state; adapters, and Trainers that save the model alone, have other files."""


class VerifiedSavingCallback(TrainerCallback):
    """Verifies every checkpoint that a Trainer saves, and writes its manifest.

    Weights and the optimizer's state are compared with the memory. The manifest, ``OUTPUT/checkpoint-500.manifest.json``, covers
    every file of the folder, also those of schedulers and random generators: ``unsilent checkpoint verify OUTPUT/checkpoint-500``
    later checks whether the files have changed since.

    Args:
        trainer: Trainer that the callback is added to.

    Raises:
        CheckpointDamaged: The files on disk differ from the values in memory. The exception ends training.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer: Any = trainer

    def on_save(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Verify the checkpoint of this step."""
        model = self._trainer.accelerator.unwrap_model(self._trainer.model)
        states = {"model": model.state_dict(), "optimizer": self._trainer.optimizer.state_dict()}
        self._trainer.accelerator.wait_for_everyone()  # other ranks write files of their own into the folder
        if not state.is_world_process_zero:
            return
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        names = [path.name for path in folder.iterdir()]
        saved = {key: states[key] for key, file in _SAVED.items() if any(file.fullmatch(name) for name in names)}
        verify_saved(saved, folder, step=state.global_step)


class VerifiedResumeCallback(TrainerCallback):
    """Makes a Trainer resume only from a checkpoint that matches its manifest.

    ``trainer.train(resume_from_checkpoint=True)`` resumes from the newest checkpoint that matches its manifest. A checkpoint
    given by name is compared with its manifest first. `VerifiedSavingCallback` writes manifests.

    Args:
        trainer: Trainer that the callback is added to. Its ``train`` is wrapped, as no callback is called before a Trainer
            loads.

    Raises:
        CheckpointDamaged: Raised by ``train`` if the checkpoint has changed since it was saved, or no checkpoint matches its
            manifest.
        UsageError: Raised by ``train`` if the named checkpoint has no manifest.
    """

    def __init__(self, trainer: Trainer) -> None:
        wrapped: Any = trainer
        plain = wrapped.train

        @functools.wraps(plain)
        def train(resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
            if resume_from_checkpoint is True:
                result = last_good_checkpoint(wrapped.args.output_dir)
                if result.good is None:
                    raise CheckpointDamaged(result.headline())
                resume_from_checkpoint = str(result.good.path)
            elif resume_from_checkpoint:
                verified_load(resume_from_checkpoint)  # for a folder, which is compared and not loaded
            return plain(resume_from_checkpoint, *args, **kwargs)

        wrapped.train = train
