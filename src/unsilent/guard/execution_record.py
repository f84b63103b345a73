"""Records the inputs of an execution of steps, for comparison with a second execution.

A record contains the inputs of the model (a fingerprint, computed on their device), the numbers in ``param_groups`` at each step
of an optimizer, and the states of random generators at the end of the step. Nothing waits for a device before two executions are
compared.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from unsilent.basics.closing import Hooked
from unsilent.guard.loop_state import LoopVariables
from unsilent.outcomes.tensors import leaves
from unsilent.recovery.digests import fingerprint
from unsilent.sites.modules import parameters_of
from unsilent.workloads.trainings.randomness import generator_state

if TYPE_CHECKING:
    from unsilent.guard.loop_watch import KeptVariables


class IterationStart(NamedTuple):
    """Fingerprints and settings at the start of an iteration."""

    batch: Tensor
    settings: list[dict[str, Any]]
    gradients: int
    schedules: dict[str, int | float]


@dataclass(eq=False)
class ExecutionRecord:
    """Record of one execution of some steps.

    Attributes:
        iteration_starts: Start of each iteration: a fingerprint of its batch, the settings of all parameter groups, the number of
            parameters with a gradient, and numbers of schedulers.
        inputs: Fingerprint of each forward pass of the model, int64 tensors.
        settings: Number of the optimizer and settings of each parameter group, at each optimizer step.
        generators: States at the end, by name.
    """

    iteration_starts: list[IterationStart] = field(default_factory=list)
    inputs: list[Tensor] = field(default_factory=list)
    settings: list[tuple[int, list[Mapping[str, Any]]]] = field(default_factory=list)
    generators: dict[str, Any] = field(default_factory=dict)

    def record_end(self, generators: Mapping[str, Any]) -> None:
        """Record the final states of the global random generators and of ``generators``."""
        self.generators = {name: generator_state(generator) for name, generator in generators.items()}
        self.generators["torch's global generator"] = torch.random.get_rng_state()
        self.generators["numpy's global generator"] = np.random.get_state()
        self.generators["Python's global generator"] = random.getstate()


class ReplayableIteration(NamedTuple):
    """Start of an iteration: its item, a function that restores the random generators, and its variables."""

    item: Any
    restore_generators: Callable[[], None]
    variables: Callable[[], LoopVariables]


class RepeatableStep:
    """A step function with its arguments; ``results`` keeps only the value that it returned last."""

    def __init__(self, run: Callable[..., Any], arguments: Sequence[Any], results: deque[Any]) -> None:
        self.run, self.arguments, self.results = run, arguments, results

    def __call__(self) -> None:
        self.results.append(self.run(*self.arguments))


LONGEST_STEP = 256
"""Number of iterations without an optimizer step after which each iteration counts as a step."""


@dataclass(eq=False)
class SnapshotSegment:
    """The iterations between one kept state and the next.

    Attributes:
        execution: Record of the inputs of these iterations.
        variables: Record of the loop's variables when the state was kept.
        updates: Number of optimizer steps so far when the last iteration began.
        iterations: Iterations since the state was kept.
        steps: Number of steps that had ended when the last iteration began.
    """

    execution: ExecutionRecord
    updates: int
    variables: KeptVariables
    iterations: list[ReplayableIteration] = field(default_factory=list)
    steps: int = 0

    def steps_ended(self, updates: int) -> int:
        """Number of steps that have ended when the count of updates is ``updates``."""
        return self.steps + (updates != self.updates or len(self.iterations) >= LONGEST_STEP)

    def begin_iteration(self, iteration: ReplayableIteration, updates: int) -> None:
        """Add an iteration that begins when the count of updates is ``updates``."""
        self.steps, self.updates = self.steps_ended(updates), updates
        self.iterations.append(iteration)


def input_differences(first: ExecutionRecord, again: ExecutionRecord) -> Iterator[str]:
    """Yield differences between the inputs of two executions that began with the same state, in words.

    A fault in the first execution does not change these inputs, so even a faulty execution can be compared.
    """
    if len(first.inputs) != len(again.inputs):
        yield (
            f"the model was called {len(again.inputs)} times instead of {len(first.inputs)}: if a counter ends the "
            "step, take it from the batch, guard.iterate(enumerate(loader))"
        )
    elif first.inputs and torch.stack(first.inputs).tolist() != torch.stack(again.inputs).tolist():
        yield (
            "the model received other inputs (the loop changes data in place, or uses a random generator that Guard "
            "did not find: give the generator to Guard)"
        )
    if len(first.settings) == len(again.settings):  # a loss scaler may have skipped a step in a faulty execution
        for (_, groups), (_, groups_again) in zip(first.settings, again.settings, strict=True):
            for text in settings_differ(groups, groups_again):
                yield f"{text} (give Guard the scheduler, or take the number that sets it from the batch)"
    for start, start_again in zip(first.iteration_starts, again.iteration_starts, strict=False):
        yield from _begun_differently(start, start_again)


BETWEEN = "work between steps is not executed again: make it part of the step"


def _begun_differently(start: IterationStart, start_again: IterationStart) -> Iterator[str]:
    """Differences of two starts of an iteration, in words."""
    if int(start.batch) != int(start_again.batch):
        yield "a batch was changed in place (change a copy of the batch instead)"
    for text in settings_differ(start.settings, start_again.settings):
        yield f"before a step {text} ({BETWEEN})"
    if start.gradients != start_again.gradients:
        yield (
            f"before a step {start_again.gradients} parameters had gradients instead of {start.gradients} (zero_grad() outside "
            "of the step is not executed again: call it in the step)"
        )
    for name, number in start.schedules.items():
        if not _equal_records(number, now := start_again.schedules.get(name, number)):
            yield f"before a step {name} was {now!r} instead of {number!r} ({BETWEEN})"


def settings_differ(groups: Sequence[Mapping[str, Any]], again: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Differences of the settings of parameter groups, in words."""
    if len(groups) != len(again):
        yield f"there were {len(again)} parameter groups instead of {len(groups)}"
        return
    for number, (settings, settings_again) in enumerate(zip(groups, again, strict=True)):
        for key in settings:
            if not _equal_records(settings[key], settings_again.get(key)):
                yield f"parameter group {number} had {key}={_text(settings_again.get(key))} instead of {_text(settings[key])}"


def generators_that_differ(first: ExecutionRecord, again: ExecutionRecord) -> list[str]:
    """Random generators whose final states differ between two executions, in words."""
    names = [n for n, state in first.generators.items() if not _equal_records(state, again.generators.get(n, state))]
    return [f"{name} ended in another state" for name in names]


def repetition_differences(
    first: Sequence[SnapshotSegment],
    second: Sequence[SnapshotSegment],
    third: Sequence[SnapshotSegment],
    same_end: bool,
) -> list[str]:
    """The reasons why three executions of the same segments differ, in words; an empty list if they do not.

    The first execution may be faulty, so only its inputs and its random generators before the last segment are compared.
    ``same_end``: whether the second and the third ended with the same bits.
    """
    causes: list[str] = []
    for segment, segment_again in zip(first, second, strict=True):
        causes += input_differences(segment.execution, segment_again.execution)
    for segment, segment_again in zip(first[:-1], second, strict=False):
        causes += generators_that_differ(segment.execution, segment_again.execution)
    for segment, segment_again in zip(second, third, strict=True):
        causes += input_differences(segment.execution, segment_again.execution)
        causes += generators_that_differ(segment.execution, segment_again.execution)
    if not causes and not same_end:
        causes.append(
            "repeating the steps from the same state gave other bits (they use an object that Guard was not given, a random "
            "generator that Guard did not find, or a nondeterministic operation)"
        )
    return list(dict.fromkeys(causes))


class ExecutionRecorder(Hooked):
    """Records executions of a model's training steps with hooks, which `close` removes.

    Args:
        gradients: Whether steps may begin with gradients; their number is then compared as well.

    Attributes:
        current_execution: Record of the current execution.
        updates: Number of optimizer steps since the recorder was made.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], gradients: bool = True) -> None:
        self.current_execution = ExecutionRecord()
        self._gradients = gradients
        self.updates = 0
        self._optimizers = list(optimizers)
        self._hooks = [model.register_forward_pre_hook(self._inputs_of(model), with_kwargs=True)]
        for number, optimizer in enumerate(optimizers):
            self._hooks.append(optimizer.register_step_pre_hook(self._settings_of(number)))

    def record_iteration_start(self, item: Any, stateful_objects: Sequence[Any]) -> None:
        """Record the start of an iteration with its batch.

        ``stateful_objects``: schedulers and similar objects.
        """
        settings = [settings_of_group(group) for optimizer in self._optimizers for group in optimizer.param_groups]
        parameters = parameters_of(self._optimizers) if self._gradients else []
        gradients = sum(parameter.grad is not None for parameter in parameters)
        schedules: dict[str, Any] = {}
        for stateful in stateful_objects:
            if isinstance(stateful, (LRScheduler, GradScaler)):
                numbers = {key: value for key, value in stateful.state_dict().items() if type(value) in (int, float)}
                schedules |= {f"{type(stateful).__name__} {key}": value for key, value in numbers.items()}
        start = IterationStart(fingerprint(list(leaves(item))), settings, gradients, schedules)
        self.current_execution.iteration_starts.append(start)

    def _inputs_of(self, model: nn.Module) -> Any:
        """A hook that records the inputs of a model.

        It is a function because copying a model with a bound method as hook would copy the recorder.
        """

        def note(called: nn.Module, arguments: Any, named: Any) -> None:
            if called is model and not torch.compiler.is_compiling():
                self.current_execution.inputs.append(fingerprint([*leaves(arguments), *leaves(named)]))

        return note

    def _settings_of(self, number: int) -> Any:
        def note(optimizer: Optimizer, *_: Any) -> None:
            if not torch.compiler.is_compiling():
                self.updates += 1
                settings: list[Mapping[str, Any]] = [settings_of_group(group) for group in optimizer.param_groups]
                self.current_execution.settings.append((number, settings))

        return note


@torch.no_grad()
def settings_of_group(group: Mapping[str, Any]) -> dict[str, Any]:
    """The numeric settings of a parameter group, copied."""
    kinds = (bool, int, float, tuple, Tensor)
    numbers = {key: value for key, value in group.items() if key != "params" and isinstance(value, kinds)}
    return {key: value.detach().clone() if isinstance(value, Tensor) else value for key, value in numbers.items()}


def _equal_records(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return torch.equal(first, second)
    if isinstance(first, np.ndarray) and isinstance(second, np.ndarray):
        return np.array_equal(first, second)
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return first.keys() == second.keys() and all(_equal_records(first[key], second[key]) for key in first)
    if isinstance(first, tuple) and isinstance(second, tuple):
        return len(first) == len(second) and (
            first == second if len(first) > 100 else all(map(_equal_records, first, second))
        )
    return bool(first == second) or (first != first and second != second)


def _text(value: Any) -> str:
    return f"{value.item():g}" if isinstance(value, Tensor) and value.numel() == 1 else f"{value!r:.60}"
