"""A guard around a training loop: it detects faults by large values, restores a state and repeats the steps.

    guard = Guard(model, optimizer, scheduler)
    for batch in guard.iterate(loader):      # instead of: for batch in loader
        ...

After each iteration the largest magnitudes of moments, moving statistics and parameters are compared with their bounds, for all
tensors or, with ``spread``, for one part of them after another. If a bound is exceeded, the oldest kept state is restored bit for
bit (parameters, buffers, gradients, optimizers, schedulers, random generators), and the batches since then are yielded again,
twice, each with the same states of the generators as before. A step that is a function is guarded by ``guard.step(function)``. If
a bound is exceeded again meanwhile, the oldest state is restored and `GuardStop` is raised.

The state is kept before every fourth step (on CUDA every sixteenth); iterations that only accumulate gradients belong to the step
after them. Enough states are kept to undo a fault however late a check notices it (`guard_plan`). If a loop turns out not to be
repeatable, a `RepeatabilityWarning` names the cause (with ``strict=True``: `NotRepeatable`). On CUDA checks are delayed: the
magnitudes of a step are read after the next step, so that nothing waits for the device.
"""

from __future__ import annotations

import logging
import sys
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn, Self, TypeVar, cast

import numpy as np
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

from unsilent.basics.errors import UsageError, wrong_value_error
from unsilent.checkpoints.recent_loads import loads_so_far
from unsilent.detectors.moment_bounds import FACTOR, Floats
from unsilent.events.event_kinds import Alarm
from unsilent.guard.alarms import (
    LOOP_LEFT_MESSAGE,
    GuardOverhead,
    GuardStop,
    NotRepeatable,
    RepeatabilityWarning,
)
from unsilent.guard.analytic import AnalyticBounds
from unsilent.guard.execution_record import (
    ExecutionRecord,
    ExecutionRecorder,
    RepeatableStep,
    ReplayableIteration,
    SnapshotSegment,
    repetition_differences,
)
from unsilent.guard.guard_plan import make_plan
from unsilent.guard.live_steps import LiveSteps
from unsilent.guard.loop_state import (
    LoopVariables,
    find_objects,
    is_put_back,
    variables_of_function,
    variables_of_loop,
)
from unsilent.guard.loop_watch import LoopWatch, differing_values, some_names
from unsilent.guard.magnitude_check import MagnitudeCheck, StepCheck
from unsilent.guard.monitored import checked_optimizers
from unsilent.guard.pending_magnitudes import Ranks, any_rank, differs_between_ranks, process_group_for
from unsilent.guard.watched_tensors import find_watched_tensors, magnitudes_of
from unsilent.recovery.digests import digest_text, state_tensors
from unsilent.recovery.ring import SnapshotLocation, SnapshotRing
from unsilent.sites.modules import parameters_of
from unsilent.workloads.trainings.randomness import GENERATORS, generator_state, save_generator_states

__all__ = ["Alarm", "Guard", "GuardStop"]

Batch = TypeVar("Batch")
Result = TypeVar("Result")
Replay = Callable[[Alarm, LiveSteps], Iterator[Any]]
"""Yields the items of iterations, so that their bodies are executed."""
SEARCHES = 2
"""Number of a loop's iterations in which random generators are searched: the body may create some in the first one."""
ENDED = "no loop is running whose steps could be"
LOGGER = "unsilent.guard"
log = logging.getLogger(LOGGER)
_guarded: weakref.WeakSet[nn.Module | Optimizer] = weakref.WeakSet()


class Guard:
    """Watches one training and recovers from faults; as a context manager, it checks the last step and closes itself.

    Args:
        model: Model that is trained, with its parameters, buffers and moving statistics.
        optimizers: One optimizer, or several.
        stateful_objects: Schedulers, loss scalers and similar objects with ``state_dict`` and ``load_state_dict``, and random
            generators that the loop uses. Those that can be reached from variables of the loop are found without being given.
        factor: Factor of the calibrated bounds.
        bounds: Largest magnitudes by name of the tensor (see `names`), or `AnalyticBounds`; the bounds of all other tensors are
            calibrated.
        snapshot_location: Location of kept states: ``device``, ``host`` or ``file``.
        snapshot_gradients: Whether gradients are kept, too; False if every step begins by setting them to zero.
        snapshot_interval: Number of steps from one kept state to the next. None: 4, or 16 on CUDA. After an alarm, at most
            ``snapshot_interval * snapshot_count`` steps are executed again; their batches stay in memory.
        snapshot_count: Number of states that are kept. None: as many as are needed (`states_needed`), at least 2.
        spread: Number of steps in which every watched tensor is checked once; each step checks one of this many parts. None: 1,
            or 8 on CUDA.
        delayed_check: Whether the magnitudes of a step are read after the next step. None: only on CUDA.
        ranks: Ranks that share their magnitudes and go back together: ``all`` ranks of torch.distributed if it is in use,
            ``alone``, or a process group.
        strict: Whether a recovery that may not be exact is an error instead of a warning.
        on_alarm: Called with every alarm.
        check: Check that finds alarms; None: the magnitudes of parameters, moments and moving statistics.
        replay: Executes steps again only to compare them. None: steps are executed again and the training continues from there.

    Raises:
        UsageError: the model or an optimizer is guarded already, an optimizer keeps no moments of gradients, or a part cannot be
            restored.

    Attributes:
        alarms: Alarms so far.
        recoveries: Number of times that steps were executed again.
        overhead: Time that the guard took.
        plan: Intervals of checks and kept states (`GuardPlan`); logged before the first state is kept.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Optimizer | Sequence[Optimizer],
        *stateful_objects: Any,
        factor: float = FACTOR,
        bounds: Mapping[str, float] | AnalyticBounds | None = None,
        snapshot_location: SnapshotLocation = "device",
        snapshot_gradients: bool = True,
        snapshot_interval: int | None = None,
        snapshot_count: int | None = None,
        spread: int | None = None,
        delayed_check: bool | None = None,
        ranks: Ranks = "all",
        strict: bool = False,
        on_alarm: Callable[[Alarm], None] | None = None,
        check: StepCheck | None = None,
        replay: Replay | None = None,
    ) -> None:
        self._model = model
        further = [value for value in stateful_objects if isinstance(value, Optimizer)]
        stateful_objects = tuple(value for value in stateful_objects if not isinstance(value, Optimizer))
        checked = checked_optimizers("Guard", model, optimizers, _guarded.__contains__)
        self._optimizers = _with_bases([*checked, *further])
        if any(isinstance(p, UninitializedParameter) for p in model.parameters()):
            raise UsageError(
                "the model has parameters without a shape (lazy modules); run one batch through it before making the Guard"
            )
        if on_alarm is not None and not callable(on_alarm):
            raise wrong_value_error("on_alarm", on_alarm, "a function that is called with each alarm")
        if check is not None and not callable(getattr(check, "check_last", None)):
            raise wrong_value_error("check", check, "an object with the methods of StepCheck, or None")
        self._on_alarm, self._ranks, self._strict, self._replay = on_alarm, ranks, strict, replay
        process_group_for(ranks)
        on_cuda = any(p.is_cuda for p in model.parameters())
        self.plan = make_plan(snapshot_interval, spread, delayed_check, snapshot_count, on_cuda)
        self._where = snapshot_location
        self._ring = SnapshotRing(
            model,
            self._optimizers,
            stateful_objects,
            snapshot_count=self.plan.states,
            snapshot_location=snapshot_location,
            snapshot_gradients=snapshot_gradients,
        )
        self._generators: dict[str, Any] = {f"generator {n}": g for n, g in enumerate(self._ring.generators)}
        self._variables: Callable[[], LoopVariables] = LoopVariables
        self._watch = LoopWatch(model, self._optimizers, self._ring)
        self._is_repeating = False
        self._searches, self._loads = 0, loads_so_far()
        self._segments: list[SnapshotSegment] = []
        self._results: deque[Any] = deque(maxlen=1)
        self._alarm_when_left: Alarm | None = None
        self._in_loop = self._loop_was_left = self._closed = False
        self._recorder = ExecutionRecorder(model, self._optimizers, snapshot_gradients)
        self.alarms: list[Alarm] = []
        self.recoveries = 0
        self.overhead = GuardOverhead()
        self._check_steps: StepCheck = check or MagnitudeCheck(
            model, self._optimizers, factor, bounds, ranks, self.overhead, self.plan.spread
        )
        # Last, so that a model that could not be guarded can be given to another Guard.
        _guarded.update((model, *self._optimizers))

    def close(self) -> None:
        """Remove all hooks, so that another guard can be created; a second call has no effect."""
        if self._closed:
            return
        self._closed = True
        _guarded.difference_update((self._model, *self._optimizers))
        self._recorder.close()
        self._check_steps.close()
        self.discard_snapshots()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            if kind is None and not self._closed:
                self.check_pending_steps()
        finally:
            self.close()

    @property
    def nbytes(self) -> int:
        """Memory of all kept states in bytes, without that of ``stateful_objects``."""
        return self._ring.nbytes

    def names(self) -> list[str]:
        """Names of the tensors watched now, such as ``fc.weight/exp_avg``; moments exist only after a step."""
        return [part.name for part in find_watched_tensors(self._model, self._optimizers)]

    def magnitudes(self) -> Floats:
        """The largest magnitude of each tensor in `names`, float64[n], on this rank."""
        return np.asarray(magnitudes_of(find_watched_tensors(self._model, self._optimizers)).cpu(), dtype=np.float64)

    def learn(self, names: Sequence[str], largest: Floats) -> None:
        """Learn the bounds from clean steps of an earlier run whose training is continued here.

        Args:
            names: Tensor names, as in `names`; bounds of tensors that do not exist yet are learnt for later.
            largest: `magnitudes` after each step, float64[steps, n]; NaN for a tensor that did not exist yet.

        Raises:
            UsageError: the shape does not fit, a name comes twice, a value is infinite or negative.
        """
        if not isinstance(self._check_steps, MagnitudeCheck):
            raise UsageError("this guard has a check of its own; learn() is for the bounds of magnitudes")
        self._check_steps.bounds.learn(names, largest)

    def lengthen(self, steps: int) -> None:
        """Raise the interval between kept states to at least ``steps`` steps."""
        self.plan = replace(self.plan, interval=max(self.plan.interval, steps))

    # -- what a loop calls -------------------------------------------------------------------------------------

    def iterate(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches; after an alarm, yield the batches of the last steps again.

        The loop's body is one iteration.
        """
        if self._loop_was_left:
            self.check_pending_steps()
        self._start_loop(lambda: variables_of_loop(sys._getframe(1)))
        self._watch.start(batches)
        self._in_loop = True
        try:
            for batch in batches:
                self._begin(batch)
                yield batch
                if (alarm := self._end()) is not None:
                    yield from self._execute_again(alarm)
            if (alarm := self._check_steps.check_last()) is not None:
                after = save_generator_states(self._ring.generators)  # the loader may have drawn at its end
                yield from self._execute_again(alarm)
                after()
            self.discard_snapshots()  # batches and states
        except GeneratorExit:  # by break, return or an exception in the body
            self._loop_was_left = True
            if self._alarm_when_left is not None:
                warnings.warn(
                    LOOP_LEFT_MESSAGE.format(self._alarm_when_left.summary), RepeatabilityWarning, stacklevel=2
                )
            raise
        finally:
            self._in_loop = False

    def step(self, run: Callable[..., Result], *arguments: Any) -> Result:
        """Run a step as ``run(*arguments)``, again after an alarm; returns the value of the last run."""
        again = RepeatableStep(run, arguments, self._results)
        self.begin(again, variables=run)
        again()
        self.end()
        return cast(Result, self._results.pop())

    def begin(self, again: Callable[[], object], variables: Callable[..., Any] | None = None) -> None:
        """Report the start of a step, for loops without `iterate`; ``again`` must execute the whole step.

        ``variables``: the function whose variables are searched for generators, ``again`` itself by default.
        """
        self._require_open()
        function = variables or again

        def look_up() -> LoopVariables:
            reachable = variables_of_function(function)
            return LoopVariables(reachable, reachable, function)

        self._variables = look_up
        self._begin(again)

    def end(self) -> None:
        """Report the end of the current step; raises `GuardStop`."""
        self._run_again(self._end())

    def check_pending_steps(self) -> None:
        """Check all steps not checked yet, before a checkpoint or after a loop; not inside a loop of `iterate`.

        Raises:
            GuardStop: a fault occurred again, or the loop was left and its last step cannot be executed again.
            UsageError: called inside a loop of `iterate`.
        """
        self._require_open()
        if self._in_loop:
            raise UsageError(
                "check_pending_steps() was called inside the loop of guard.iterate; call it after the loop, and first close() a "
                "named iterator of guard.iterate that you left early"
            )
        if not self._loop_was_left:
            self._run_again(self._check_steps.check_last())
            return
        self._loop_was_left = False
        left, self._alarm_when_left = self._alarm_when_left, None
        if left is not None and self._strict:
            self._give_up(NotRepeatable(LOOP_LEFT_MESSAGE.format(left.summary)))
        if self._segments and (alarm := self._check(whole=True)) is not None:
            self._report(alarm)
            self._give_up(GuardStop(alarm, alarm))

    def why_not_repeatable(self) -> str:
        """The reason why repeating the last steps would change the training; empty if none is known.

        All ranks get the same reason.
        """
        if self._is_repeating:
            return ""
        if not self._segments or self._loop_was_left:
            return ENDED
        count = sum(len(segment.iterations) for segment in self._segments)
        if differs_between_ranks(count, process_group_for(self._ranks), next(self._model.parameters()).device):
            return "the ranks made different numbers of iterations since a state was kept; one of them may have loaded a state"
        names = self.changes()
        if not self._any_rank(bool(names)):
            return ""
        return cannot_be_put_back(names) or "the loop of another rank changes what cannot be put back"

    def changes(self) -> list[str]:
        """Names of everything that this rank's loop changed since the oldest state and that the guard cannot undo."""
        return self._watch.changed_since(self._segments[0].variables, self._variables()) if self._segments else []

    def batches(self) -> Sequence[Any]:
        """Batches of the iterations since the oldest state, if they are known."""
        return self._live_steps().batches()

    def discard_snapshots(self) -> None:
        """Drop all kept states but not the bounds, so that earlier steps cannot be repeated."""
        self._ring.clear()
        self._segments.clear()
        self._check_steps.restart()
        self._loop_was_left = False

    def _require_open(self) -> None:
        if self._closed:
            raise UsageError("this guard is closed; make a new Guard(model, optimizer)")

    def _run_again(self, first: Alarm | None) -> None:
        if first is not None:
            for again in self._execute_again(first):
                again()

    # -- one iteration -----------------------------------------------------------------------------------------

    def _start_loop(self, variables: Callable[[], LoopVariables]) -> None:
        self._require_open()
        self.discard_snapshots()  # the user's code between two epochs cannot be executed again
        self._variables, self._searches = variables, 0

    def _begin(self, item: Any, fresh: bool | None = None) -> None:
        """Begin an iteration; ``fresh``: whether to keep a new state (None: if the plan requires one)."""
        begun = time.perf_counter()
        if self._searches < SEARCHES:
            self._searches += 1
            self._search()
        updates = self._updates()
        if (loads := loads_so_far()) != self._loads and not self._is_repeating:
            self._loads = loads
            self.discard_snapshots()  # repeating steps from before a load does not lead to the loaded state
        if fresh is None:
            fresh = not self._segments or self._segments[-1].steps_ended(updates) >= self.plan.interval
        if fresh:
            if not self._ring.nbytes:
                log.info("guard: %s", self.plan.sentence(self._ring.live_tensors(), self._where))
            variables = self._watch.keep(self._variables())
            put_back = save_generator_states(self._ring.generators)
            self._recorder.current_execution = ExecutionRecord()
            segment = SnapshotSegment(self._recorder.current_execution, updates, variables)
            self._segments = [*self._segments, segment][-self.plan.states :]
        else:
            put_back = save_generator_states(self._ring.generators)
        self._segments[-1].begin_iteration(ReplayableIteration(item, put_back, self._variables), updates)
        self._recorder.record_iteration_start(item, self._ring.stateful_objects)
        self.overhead.snapshot += time.perf_counter() - begun

    def _end(self, whole: bool = False) -> Alarm | None:
        """End an iteration, and return the alarm of this one or, with late checks, of the previous one.

        ``whole``: check all tensors after this iteration, without delay.
        """
        if self._segments:
            begun = time.perf_counter()
            self._segments[-1].execution.record_end(self._generators)
            self.overhead.snapshot += time.perf_counter() - begun
        return self._check(whole)

    def _updates(self) -> int:
        """A number that grows with every update of the parameters, by an optimizer or in another way."""
        return self._recorder.updates + sum(p._version for p in self._model.parameters())

    def _search(self) -> None:
        """Find random generators, schedulers and scalers that the loop can reach, so that they are restored as well."""
        known = {id(value) for value in (*self._generators.values(), *self._ring.stateful_objects)}
        objects = find_objects(self._variables().reachable, lambda value: is_put_back(value, self._optimizers))
        for name, used in objects.items():
            if id(used) in known:
                continue
            if not isinstance(used, GENERATORS):
                self._ring.stateful_objects.append(used)
                continue
            try:
                generator_state(used)
            except UsageError as error:
                self._not_repeatable([f"{name}: {error}"])
                continue
            self._generators[name] = used
            self._ring.generators.append(used)

    # -- recovery ----------------------------------------------------------------------------------------------

    def _execute_again(self, alarm: Alarm) -> Iterator[Any]:
        return self._recover(alarm) if self._replay is None else self._compare(alarm, self._replay)

    def _compare(self, alarm: Alarm, replay: Replay) -> Iterator[Any]:
        """Repeat the iterations since the oldest state for a comparison, and restore the present state afterwards."""
        self._report(alarm)
        execution, updates = self._recorder.current_execution, self._updates()
        returned, variables = list(self._results), self._variables
        now = self._ring.hold()
        self._recorder.current_execution = ExecutionRecord()
        self._is_repeating = True
        try:
            yield from replay(alarm, self._live_steps())
        finally:
            self._is_repeating = False
            now.restore()
            self._loads = loads_so_far()
            self._check_steps.drop_pending()
            self._recorder.current_execution, self._variables = execution, variables
            self._results.extend(returned)
            self._segments[-1].updates += self._updates() - updates

    def _live_steps(self) -> LiveSteps:
        return LiveSteps(self._model, self._optimizers, self._ring, self._segments, self._check_steps)

    def _recover(self, first: Alarm) -> Iterator[Any]:
        """Restore the oldest state, and yield the items of the iterations since then twice, to be executed again.

        The first execution may be faulty; its inputs are compared with those of the second execution. All results of the second
        and the third are compared, because neither has the fault.
        """
        self._report(first)
        self.recoveries += 1
        causes = self._found_late()
        tensors, values = self._watch.not_restored(self._segments[0].variables, self._variables())
        hooks = self._watch.hooks_changed(self._segments[0].variables)
        first_end = second_end = self._watch.contents(self._variables())
        self._is_repeating = True
        try:
            segments = self._go_back()
            count = sum(len(segment.iterations) for segment in segments)
            yield from self._again(segments, first, count)
            digest = self._digest()
            second_end = self._watch.contents(self._variables())
            second = self._go_back()
            yield from self._again(second, first, count)
        except GeneratorExit:  # the loop was left during a repetition, which is reported afterwards
            self._alarm_when_left = first
            raise
        finally:
            self._is_repeating = False
        third = self._segments
        causes += repetition_differences(segments, second, third, digest == self._digest())
        more_tensors, counted = differing_values(first_end, second_end, self._watch.contents(self._variables()), values)
        tensors = list(dict.fromkeys((*tensors, *more_tensors)))
        if tensors:
            causes.append(
                f"tensors that the loop changes are not restored: {some_names(tensors)} (create them before the loop and change "
                "them in place, or give Guard an object that has them in its state_dict)"
            )
        if hooks:
            causes.append(
                f"hooks are not restored: {some_names(hooks)} (register and remove hooks outside of the loop)"
            )
        if self._any_rank(bool(causes)):
            elsewhere = ["the repeated steps of another rank differed from their first execution"]
            self._not_repeatable(list(dict.fromkeys(causes)) or elsewhere, first)
        if counted:
            text = (
                f"variables of the loop are not restored: {some_names(counted)}. If the training depends on such a variable, "
                "take it from the batch: guard.iterate(enumerate(loader))"
            )
            warnings.warn(text, RepeatabilityWarning, stacklevel=2)
        work = f"{count} iterations and executed them" if count > 1 else "1 iteration and executed it"
        differed = "; the repeated steps differed, see the warning" if causes else ""
        unrestored = [*tensors, *hooks, *counted]
        rest = f"; not restored: {some_names(unrestored)}" if unrestored else ""
        log.warning("%s: went back %s again%s%s", first.summary, work, differed, rest)

    def _found_late(self) -> list[str]:
        """Schedulers and scalers that are missing in the kept states because they were created later."""
        known = {id(value) for value in self._ring.stateful_objects}
        self._search()
        names = [type(value).__name__ for value in self._ring.stateful_objects if id(value) not in known]
        return [f"{', '.join(names)} was created after the loop began (give it to Guard)"] if names else []

    def _go_back(self) -> list[SnapshotSegment]:
        """Restore the oldest state, and return the segments since then."""
        begun = time.perf_counter()
        self._ring.restore_snapshot(len(self._ring))
        segments, self._segments = self._segments, []
        self._check_steps.drop_pending()
        self.overhead.steps -= sum(len(segment.iterations) for segment in segments)
        self.overhead.recovery += time.perf_counter() - begun
        return segments

    def _again(self, segments: Sequence[SnapshotSegment], first: Alarm, count: int) -> Iterator[Any]:
        for segment in segments:
            for number, (item, put_back, self._variables) in enumerate(segment.iterations):
                put_back()
                self._begin(item, fresh=number == 0)
                self._check_steps.before_again(item)
                yield item
                if (alarm := self._end(whole=True)) is not None:
                    self._give_up(GuardStop(alarm, first, count))

    def _digest(self) -> str:
        return digest_text(state_tensors(self._model, self._optimizers))

    def _any_rank(self, flag: bool) -> bool:
        tensor = next(self._model.parameters(), None)  # a model may have none, and moving statistics alone
        device = (parameters_of(self._optimizers)[0] if tensor is None else tensor).device
        return any_rank(flag, process_group_for(self._ranks), device)

    def _report(self, alarm: Alarm) -> None:
        self.alarms.append(alarm)
        if self._on_alarm is not None:
            self._on_alarm(alarm)

    def _not_repeatable(self, causes: Sequence[str], alarm: Alarm | None = None) -> None:
        """Warn that a recovery may not be exact, or in strict mode restore the oldest state and raise."""
        after = f"after the alarm at {alarm.summary if alarm else None}, the repeated steps differed from their first execution"
        text = f"{after if alarm else 'this loop is not repeatable'}: {'; '.join(causes)}"
        if not self._strict:
            warnings.warn(text, RepeatabilityWarning, stacklevel=2)
            return
        self._give_up(NotRepeatable(text))

    def _give_up(self, error: GuardStop | NotRepeatable) -> NoReturn:
        """Restore the oldest state and raise the error."""
        if len(self._ring):
            self._ring.restore_snapshot(len(self._ring))
        self.discard_snapshots()
        log.error("%s", error)
        raise error

    # -- checking ----------------------------------------------------------------------------------------------

    def _check(self, whole: bool = False) -> Alarm | None:
        return self._check_steps.check(self.plan.late and not whole, self._stepped, whole)

    def _stepped(self) -> bool:
        return bool(self._segments) and self._segments[-1].steps_ended(self._updates()) > 0


def cannot_be_put_back(names: Sequence[str]) -> str:
    """A sentence on changes by a loop that a guard cannot undo; empty if there are none."""
    return f"the loop changes what cannot be put back: {some_names(names)}" if names else ""


def _with_bases(optimizers: Sequence[Optimizer]) -> list[Optimizer]:
    """The optimizers and those wrapped inside of them, each once, as in sharpness-aware minimisation."""
    bases = [v for o in optimizers for v in vars(o).values() if isinstance(v, Optimizer) and v.state is not o.state]
    return list({id(optimizer): optimizer for optimizer in (*optimizers, *bases)}.values())
