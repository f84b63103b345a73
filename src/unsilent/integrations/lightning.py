"""Callbacks of the monitor and the guard for Lightning's Trainer.

    trainer = Trainer(callbacks=[MonitorCallback()])     # or GuardCallback()
    trainer.fit(module, loader)

A batch is one step of the guard. After an alarm the callback repeats the last batches as Lightning's loop runs them: the
module's ``on_train_batch_start``, its ``training_step`` with backward, clipping and optimizer, and the schedules. Lightning's
own counts of steps are reset, too. Values logged in a repeated batch are logged twice, and other callbacks are not notified of
the repetition; put this callback before those that change weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from unsilent.basics.errors import UsageError
from unsilent.guard.guard import Guard
from unsilent.monitor.monitor import Monitor


@dataclass
class _Batch:
    """One batch and its results, recorded so that the guard can execute it again."""

    batch: Any
    number: int
    run: tuple[Any, ...] | None = None
    """Arguments of the loop's optimization; ``None`` if the batch was skipped."""
    outputs: list[Any] = field(default_factory=list)
    ends_epoch: bool = False


class MonitorCallback(Callback):
    """Monitors every ``fit`` of a Trainer.

    Args:
        options: Options of `Monitor` (``preset``, ``on_alarm``, ``events`` …).

    Attributes:
        monitor: Monitor, made when training begins; ``None`` before.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self.monitor: Monitor | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start to monitor the model and its optimizers."""
        self.monitor = Monitor(pl_module, list(trainer.optimizers), **self._options)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """End the monitor."""
        if self.monitor is not None:
            self.monitor.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Detach the monitor, as at the end of training."""
        self.on_train_end(trainer, pl_module)


class GuardCallback(Callback):
    """Guards every ``fit`` of a Trainer.

    Args:
        options: Options of `Guard` (``factor``, ``snapshot_location``, ``on_alarm`` …).

    Raises:
        UsageError: Raised when training begins if it uses manual optimization, accumulated gradients, a strategy with sharded
            parameters, or a schedule by step that needs a metric.

    Attributes:
        guard: Guard, made when training begins; ``None`` before.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._now = _Batch(None, 0)
        self.guard: Guard | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start to guard the model and its optimizers."""
        _check(trainer, pl_module)
        loop = trainer.fit_loop.epoch_loop
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        others = [config.scheduler for config in trainer.lr_scheduler_configs]
        # Lightning counts the steps of its optimizers.
        others += [loop.automatic_optimization.optim_progress, loop.scheduler_progress]
        others += [scaler] if scaler is not None else []
        self.guard = Guard(pl_module, list(trainer.optimizers), *others, **self._options)
        plain = loop.automatic_optimization.run

        @functools.wraps(plain)
        def run(*arguments: Any) -> Any:
            self._now.run = arguments
            return plain(*arguments)

        loop.automatic_optimization.run, self._plain = run, plain

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Discard snapshots, since hooks that ran between two epochs cannot be repeated."""
        assert self.guard is not None
        self.guard.discard_snapshots()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Begin a step."""
        assert self.guard is not None
        self._now = now = _Batch(batch, batch_idx)
        self.guard.begin(self._again(trainer, pl_module, now))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """End a step, and check pending steps if validation or a checkpoint may follow."""
        assert self.guard is not None
        loop = trainer.fit_loop.epoch_loop
        self._now.ends_epoch = loop._num_ready_batches_reached()
        self._now.outputs.append(outputs)
        self.guard.end()
        if self._now.ends_epoch or _may_be_followed(trainer):
            self.guard.check_pending_steps()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Detach the guard and restore the training loop."""
        self._leave(trainer)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Detach the guard, as at the end of training."""
        self._leave(trainer)

    def _leave(self, trainer: Any) -> None:
        if self.guard is not None and trainer.fit_loop.epoch_loop.automatic_optimization.__dict__.pop("run", None):
            self.guard.close()

    def _again(self, trainer: Any, module: Any, done: _Batch) -> Callable[[], None]:
        """A function that executes a batch again in the same way as the training loop."""
        loop = trainer.fit_loop.epoch_loop

        def again() -> None:
            module.on_train_batch_start(done.batch, done.number)
            if done.run is not None:
                result = self._plain(*done.run)
                for outputs in done.outputs:  # later callbacks see the final result of the batch
                    if isinstance(outputs, dict) and isinstance(result, dict):
                        outputs.clear()
                        outputs.update(result)
            loop.update_lr_schedulers("step", update_plateau_schedulers=False)
            if done.ends_epoch:
                loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)

        return again


def _may_be_followed(trainer: Any) -> bool:
    """Whether validation or a checkpoint may follow directly after this batch."""
    saved = any(getattr(c, "_every_n_train_steps", 0) for c in trainer.checkpoint_callbacks)
    return bool(saved or trainer.fit_loop.epoch_loop._should_check_val_fx(trainer.fit_loop._data_fetcher))


def _check(trainer: Any, module: Any) -> None:
    if not module.automatic_optimization:
        raise UsageError(
            "GuardCallback supports only automatic optimization, but this module optimizes manually; "
            "guard the training step with Guard.step"
        )
    if trainer.accumulate_grad_batches != 1:
        raise UsageError(
            f"accumulate_grad_batches is {trainer.accumulate_grad_batches}; expected 1, because GuardCallback does not "
            "support gradient accumulation; train with larger batches"
        )
    if not isinstance(trainer.strategy, (SingleDeviceStrategy, DDPStrategy)):
        raise UsageError(
            f"GuardCallback supports one device or DDP; this Trainer uses {type(trainer.strategy).__name__}"
        )
    if any(c.reduce_on_plateau and c.interval == "step" for c in trainer.lr_scheduler_configs):
        raise UsageError(
            "GuardCallback cannot repeat a scheduler that follows a metric and is updated between steps; "
            "update the scheduler once per epoch (interval: 'epoch')"
        )
