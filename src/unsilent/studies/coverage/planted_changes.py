"""Fault-free runs with an optional change halfway through: of batch size, learning rate or data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from unsilent.basics.nested import map_tensors
from unsilent.studies.coverage.spec import CHANGES, CLEAN, CoverageSpec
from unsilent.workloads import TRAININGS, load_training
from unsilent.workloads.trainings.base import TrainingState, TrainingWorkload

Change = Callable[[TrainingState], TrainingWorkload]
"""Function that changes the state and returns the training that continues with it."""
BATCH, RATE, DATA = CHANGES
BATCH_FACTOR, RATE_FACTOR, INPUT_FACTOR = 2, 0.1, 0.5
CHANGE_TEXTS = {
    BATCH: f"batches of {BATCH_FACTOR} times as many rows",
    RATE: f"{RATE_FACTOR:g} times the learning rate",
    DATA: f"inputs multiplied by {INPUT_FACTOR:g}, or token ids in reverse order",
}


def possible_changes(spec: CoverageSpec) -> tuple[str, ...]:
    """Names of the changes that can be planted in the training.

    The batch size can change only in a built-in training that has such an option.
    """
    return CHANGES if _has_option(spec, "batch") else (RATE, DATA)


def workload_and_change(spec: CoverageSpec, workload: Any, kind: str, steps: int) -> tuple[TrainingWorkload, Change]:
    """The training of a fault-free run, and the function that makes the change halfway through.

    For a run that is longer than the training, the schedule is stretched if the training has an option for the number of steps.
    """
    more = {"steps": str(steps)} if steps > workload.steps and _has_option(spec, "steps") else {}
    plain: Any = _load_changed_training(spec, **more) if more else workload
    if kind == BATCH:
        larger = _load_changed_training(spec, **more, batch=str(BATCH_FACTOR * plain.settings["batch"]))
        return plain, lambda state: _begin_epoch(state, larger)
    change = {CLEAN: lambda state: None, RATE: _lower_rates, DATA: _change_inputs}[kind]

    def go_on(state: TrainingState) -> Any:
        change(state)
        return plain

    return plain, go_on


def _has_option(spec: CoverageSpec, name: str) -> bool:
    return spec.workload in TRAININGS and name in TRAININGS[spec.workload].options


def _load_changed_training(spec: CoverageSpec, **more: str) -> Any:
    return load_training(spec.workload, {**dict(spec.options), **more}, data=spec.data)


def _begin_epoch(state: TrainingState, workload: TrainingWorkload) -> TrainingWorkload:
    state.epoch, state.cursor = state.epoch + 1, 0
    state.cached_values.clear()
    return workload


def _lower_rates(state: TrainingState) -> None:
    for optimizer in state.optimizers:
        for group in optimizer.param_groups:
            group["lr"] *= RATE_FACTOR
    for scheduler in state.schedulers:
        scheduler.base_lrs = [RATE_FACTOR * rate for rate in scheduler.base_lrs]


def _change_inputs(state: TrainingState) -> None:
    def changed(_: Any, tensor: Tensor) -> Tensor:
        return tensor * INPUT_FACTOR if tensor.is_floating_point() else tensor.flip(-1) if tensor.ndim > 1 else tensor

    def before(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        return map_tensors((inputs, named), changed)

    state.model.register_forward_pre_hook(before, with_kwargs=True)
