"""The training in one rank's process: start, restart, steps with faults in collectives, measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed, nn

from unsilent.basics.errors import UsageError
from unsilent.basics.lazy_module import load_named
from unsilent.faults.receipts import AppliedFault
from unsilent.faults.unresolved_fault import faults_in_step
from unsilent.sites.modules import named_parameters
from unsilent.sites.training.step import StepInjection
from unsilent.sites.training.step_survey import StepSurvey
from unsilent.workloads.distributed.measuring import CleanModels, count_changed, count_values, own_tensors, state_hashes
from unsilent.workloads.distributed.orders import GangSettings, Payload, RankPart, ResumeOrder, ResumeStart
from unsilent.workloads.distributed.strategies import Strategy
from unsilent.workloads.distributed.strategy_names import STRATEGIES
from unsilent.workloads.registry import load_training
from unsilent.workloads.trainings import StepRecord, Training, TrainingState
from unsilent.workloads.trainings.snapshots import model_tensors, put_into_model, snapshot_misfit

if TYPE_CHECKING:
    from collections.abc import Iterator

    from unsilent.sites.landing import FaultOrDraw


# The layout is the same for all strategies, so that the same fault can be written into the checkpoint of each. A
# snapshot has a list of optimizers; in the file each has its own key, by which the checkpoint tools recognise it.

OPTIMIZER = "optimizer"


def save_snapshot(snapshot: Mapping[str, Any], path: Path) -> None:
    """Write a snapshot with ``torch.save``, in a form that can be read with ``weights_only=True``."""
    parts = {key: value for key, value in snapshot.items() if key not in ("optimizers", "schedulers")}
    for number, optimizer in enumerate(snapshot["optimizers"]):
        parts[OPTIMIZER if number == 0 else f"{OPTIMIZER} {number + 1}"] = optimizer
    torch.save({**parts, "scheduler": snapshot["schedulers"]}, path)


def load_snapshot(path: Path) -> dict[str, Any]:
    """Read a snapshot from a file.

    The file may be damaged, so any exception of the reader may be raised.
    """
    parts = dict(torch.load(path, weights_only=True))
    optimizers = [parts.pop(key) for key in list(parts) if key.partition(" ")[0] == OPTIMIZER]
    schedulers = parts.pop("scheduler", [])
    return {**parts, "optimizers": optimizers, "schedulers": schedulers}


class FaultEffect(Exception):
    """Raised when a fault caused an exception while reading a file, restarting, stepping or evaluating."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class RankTraining:
    """The training and the strategy of one rank."""

    def __init__(self, settings: GangSettings, number: int) -> None:
        hold_determinism()
        self._number, self._ranks = number, settings.world_size
        self._seeds = settings.seeds
        self._training = load_shared_training(settings, number)
        if settings.strategy != "single":
            where = f"file://{settings.meeting_place}"
            distributed.init_process_group("gloo", init_method=where, rank=number, world_size=self._ranks)
        self._strategy = make_strategy(settings.strategy, self._ranks)
        self._clean = CleanModels(settings.folder / f"clean-{number}.pt")
        self._whole: TrainingState | None = None
        self._survey = False
        self.collectives: tuple[Payload, ...] = ()

    def survey_next_step(self) -> None:
        """Make the next step list its collectives in ``collectives``.

        No bit of the step changes.
        """
        self._survey = True

    def started(self) -> TrainingState:
        """The state of a new training."""
        return self._prepared_state(self._training.start(self._seeds, self._strategy.wrap))

    def restarted(self, order: ResumeOrder) -> TrainingState:
        """The state of a training that continues from this rank's file.

        Raises `FaultEffect`, also if the file does not fit the training.
        """
        with _fault_effects(Exception):
            snapshot = load_snapshot(order.files[self._number if len(order.files) > 1 else 0])
            if order.broadcast_optimizer and self._ranks > 1:
                snapshot["optimizers"] = self._strategy.sent_from_rank_0(snapshot["optimizers"])

            def load_and_wrap(model: nn.Module) -> nn.Module:
                if text := snapshot_misfit(snapshot["model"], model):
                    raise UsageError(f"the checkpoint {text}; give one of this training")
                put_into_model(model, snapshot["model"])
                return self._strategy.wrap(model)

            before = order.restart == "before"
            state = self._prepared_state(
                self._training.start(self._seeds, load_and_wrap if before else self._strategy.wrap)
            )
            part = dict(self._strategy.own_part(snapshot, state))
            if before:
                part["model"] = model_tensors(state.model)  # the model is not changed after wrapping
            self._training.restore_into(state, part)
            self._strategy.after_loading(state)
            return state

    def _prepared_state(self, state: TrainingState) -> TrainingState:
        self._strategy.prepare(state, self._training.settings["clip"])
        return state

    def step(self, state: TrainingState, faults: Sequence[FaultOrDraw] = ()) -> tuple[StepRecord, list[AppliedFault]]:
        """Run one step with the faults that act in it on this rank.

        Returns the record of the step and the applied faults.
        """
        mine = [fault for fault in faults_in_step(faults, state.step) if fault.rank == self._number]
        with _fault_effects(RuntimeError, ValueError, IndexError, ArithmeticError):
            if self._survey:
                self._survey = False
                with StepSurvey(state.model, state.optimizers) as survey:
                    record = self._training.step(state)
                if "comm" in survey.kinds:
                    regions = survey.select_regions("comm:*")
                    self.collectives = tuple((region.site, region.dtype, region.shape) for region in regions)
                return record, []
            if not mine:
                return self._training.step(state), []
            with StepInjection(state.model, mine, state.optimizers, number=state.step) as injection:
                record = self._training.step(state)
            return record, injection.applied_faults

    def is_true_anywhere(self, value: bool) -> bool:
        """Whether the value is true on at least one rank.

        Must be called on all ranks at once.
        """
        if self._ranks == 1:
            return value
        flag = torch.tensor([int(value)])
        distributed.all_reduce(flag, distributed.ReduceOp.MAX)
        return bool(flag.item())

    def full_snapshot(self, state: TrainingState) -> dict[str, Any]:
        """A snapshot of the full state, gathered from all ranks.

        Must be called on all ranks at once.
        """
        snapshot: dict[str, Any] = self._strategy.gathered(self._training.snapshot(state), state)
        return snapshot

    def save(self, snapshot: Mapping[str, Any], path: Path) -> None:
        """Write the snapshot to a file if this is rank 0."""
        if self._number == 0:
            save_snapshot(snapshot, path)

    def began(self, state: TrainingState, order: ResumeOrder) -> ResumeStart:
        """Description of the state of a restarted training.

        Raises ``UsageError`` if the order cannot be carried out from this state.
        """
        if state.step > order.until_step:
            raise UsageError(
                f"the checkpoint has {state.step} steps done; expected at most until_step={order.until_step}"
            )
        for fault in order.comm_faults:
            if not any(faults_in_step([fault], step) for step in range(state.step, order.until_step)):
                last = order.until_step - 1
                raise UsageError(f"{fault.site} acts in no step that is run; expected one of {state.step} to {last}")
        if order.remember_clean:
            self._clean.start()
        tensors, parameters = own_tensors(state.model)
        sizes = torch.tensor([tensor.numel() for tensor in tensors.values()]).numpy()
        return ResumeStart(state.step, tuple(tensors), parameters, sizes)

    def evaluated(self, state: TrainingState, records: Sequence[StepRecord], order: ResumeOrder) -> RankPart:
        """Records of the steps since the last evaluation, and measurements of the current model.

        Must be called on all ranks at once.
        """
        tensors, _ = own_tensors(state.model)
        if order.remember_clean:
            self._clean.add(state.step, tensors)
        nonfinite, extreme = count_values(tensors)
        losses, metrics = tuple(record.loss for record in records), tuple(record.metrics for record in records)
        changed = count_changed(tensors, self._clean.at(state.step))
        return RankPart(state.step, losses, metrics, nonfinite, extreme, changed, self._held_out(state))

    def finish(self, state: TrainingState, order: ResumeOrder) -> dict[str, str]:
        """Save the files of the order, end the training and return hashes of its full state."""
        if order.remember_clean:
            self._clean.save()
        snapshot = self.full_snapshot(state)
        if order.save_to is not None:
            self.save(snapshot, order.save_to)
        self._strategy.release(state)
        return state_hashes(snapshot, {name for name, _ in named_parameters(state.model)})

    def _held_out(self, state: TrainingState) -> Mapping[str, float]:
        """Loss and metrics on the held-out data on rank 0; empty on the other ranks."""
        with _fault_effects(RuntimeError, ValueError, IndexError, ArithmeticError):
            if self._strategy.holds_whole_model:
                if self._number:
                    return {}
                evaluation = self._training.evaluate(state)
            else:
                whole = self._strategy.gathered({n: t.detach() for n, t in model_tensors(state.model).items()}, state)
                if self._number:
                    return {}
                self._whole = self._whole or self._training.start(self._seeds)
                put_into_model(self._whole.model, whole)
                evaluation = self._training.evaluate(replace(self._whole, step=state.step))
        return {"loss": float(evaluation.loss), **{name: float(v) for name, v in evaluation.metrics.items()}}


@contextmanager
def _fault_effects(*kinds: type[Exception]) -> Iterator[None]:
    """Context in which exceptions of the given types are raised as `FaultEffect`."""
    try:
        yield
    except kinds as error:
        raise FaultEffect(error) from error


def hold_determinism() -> None:
    """Set one thread and deterministic algorithms for this process."""
    torch.set_num_threads(1)
    deterministic: Any = torch.utils.deterministic
    # Memory is filled for debugging only; it would cost time.
    deterministic.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(True, warn_only=True)


def load_shared_training(settings: GangSettings, number: int) -> Training:
    """The training on this rank's share of the rows.

    Raises ``UsageError`` if the training cannot be divided among ranks.
    """
    training = load_training(settings.workload, settings.options, data=settings.data)
    if not isinstance(training, Training):
        raise UsageError(
            f"workload {settings.workload!r} is a {type(training).__name__}; expected an unsilent.Training, whose batches ranks "
            "can share"
        )
    if training.device.type != "cpu":
        raise UsageError(
            f"workload {settings.workload!r} trains on {training.device}; ranks run on the CPU: set device=cpu"
        )
    if settings.world_size > 1:
        training.shard = number, settings.world_size
    return training


def make_strategy(name: str, ranks: int) -> Strategy:
    """The strategy of a name that `check_strategy` has accepted.

    The process group must be initialised.
    """
    strategy: Strategy = load_named(STRATEGIES[name])(ranks)
    return strategy
