"""The monitor of a training: reads signals, applies rules, agrees with the other ranks, and acts on alarms.

    with Monitor(model, optimizer):
        ...                         # any training loop

A step is all backward passes up to an optimizer step; with several optimizers, up to the steps of all of them or to the next
backward pass. ``mode="lagged"``: the signals of a step are judged after it, and all ranks know the verdict before the next one
is made (on CUDA one step later still, so that the CPU does not wait for the device). ``mode="strict"``: the verdict comes before
the optimizer step, which can then be left out; every step waits for the device and for the other ranks, and updates are part of
the next step. An error of the monitor itself is logged once, and the training goes on without it (``strict=True``: it is raised).
"""

from __future__ import annotations

import logging
import os
import secrets
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from unsilent.basics.argument_names import names_arguments
from unsilent.basics.errors import UsageError, kind_and_line, wrong_value_error
from unsilent.checkpoints.recent_loads import loads_so_far, note_load, take_loads
from unsilent.detectors.rule import ALARM, WARNING
from unsilent.detectors.rules import make_rule, rules_of_preset
from unsilent.detectors.series import GRADIENT, Series
from unsilent.events.event_files import path_of_rank
from unsilent.events.event_kinds import DONE, ERROR, LOGGER, MOST_NAMES, STOPPED, UNRECORDED, Alarm, Verdict
from unsilent.events.host import host_name
from unsilent.events.incident_folder import FOLDER as INCIDENTS_FOLDER
from unsilent.events.sinks import Sink, isolated, make_sinks
from unsilent.guard.guard import ENDED, Guard, cannot_be_put_back
from unsilent.guard.guard_plan import SNAPSHOT_INTERVAL
from unsilent.guard.live_steps import LiveSteps
from unsilent.guard.loop_code import is_plain_loop
from unsilent.guard.loop_state import is_of_library
from unsilent.guard.monitored import MONITORED, checked_optimizers
from unsilent.monitor.actions import CONFIRMED, NO_LOOP, NO_RERUN, UNCONFIRMED, AlarmAction, MonitorStop
from unsilent.monitor.agreement import Agreement
from unsilent.monitor.alarm_replay import MOST_REPLAYS, TOO_MANY, AlarmReplay, FaultJudge
from unsilent.monitor.exchange import (
    LEAVING_SECONDS,
    Exchange,
    RankInfo,
    RankRow,
    RanksApart,
    device_name,
    settings_by_name,
)
from unsilent.monitor.incident_writer import STEPS_BEFORE, IncidentWriter, training_state
from unsilent.monitor.recorder import Recorder
from unsilent.monitor.reporter import Reporter
from unsilent.monitor.rerun_check import RerunCheck, alarm_of
from unsilent.monitor.rule_streams import RuleStreams
from unsilent.monitor.sampling import MOST_ROWS_OF_RANKS, CostMeter, SampleIntervals, SamplingControl
from unsilent.monitor.settings import EXECUTE_AGAIN, MonitorSettings, settings_of
from unsilent.monitor.signals.collector import SignalCollector
from unsilent.monitor.signals.row import SignalRow
from unsilent.monitor.signals.trained_parameters import begins_alike
from unsilent.monitor.step_checks import StepChecks
from unsilent.monitor.step_judge import StepJudge, full_name
from unsilent.monitor.suspicion import Suspicion
from unsilent.recovery.earlier_incidents import DEVICES_FILE
from unsilent.recovery.evidence import Evidence
from unsilent.recovery.rank_link import RankLink

Batch = TypeVar("Batch")
Result = TypeVar("Result")
NOT_PLAIN = (
    "monitor.iterate(…) is not looped over directly, so that a counter would go on; write `for batch in monitor.iterate(…)`, "
    "with enumerate or zip inside"
)
NEVER = 2**62
"""A step number that is never reached."""
FIRST_READ = 1
"""Step after which several ranks read their first step, unless all steps are read."""
LOOP_IS_KNOWN = 2
"""Step from which on it is known whether steps can be executed again: under ``unsilent run`` from the second batch on."""
log = logging.getLogger(LOGGER)
_open: weakref.WeakSet[Monitor] = weakref.WeakSet()


class Monitor:
    """Monitors one training; a context manager that removes its hooks at the end.

    Args:
        model: Model that is trained, wrapped or not.
        optimizers: One optimizer or several.
        settings: All settings; ``None`` to take them from ``options``, which are fields of `MonitorSettings`.
        sinks: Sinks that get every event, besides those that the settings name.
        ranks: Ranks that agree: ``all`` (all ranks if torch.distributed is in use), ``alone``, or a process group.
        notes: Sentences that are logged at the start.
        compatibility: Whether alarms in the log carry the codes of MindSpore's accuracy-sensitive detection.

    Attributes:
        load_earlier: Function that loads the checkpoint before the one that was loaded last into the model and the optimizers.
            With ``on_alarm="replay"`` it is called after an alarm soon after a load, and undone afterwards. ``None`` if that
            state is not known.
        stops: List that gets the `MonitorStop` of a monitor that was dropped without being closed.

    Raises:
        UsageError: settings that make no sense, or that differ between ranks; a module to watch that does not exist; a model or
            an optimizer that is monitored already.
    """

    @names_arguments
    def __init__(
        self,
        model: nn.Module,
        optimizers: Optimizer | Sequence[Optimizer],
        *,
        settings: MonitorSettings | None = None,
        sinks: Sequence[Sink] = (),
        ranks: Any = "all",
        notes: Sequence[str] = (),
        compatibility: bool = False,
        **options: Any,
    ) -> None:
        self.settings = settings = settings_of(settings, options)
        _check_sinks(sinks)
        self._optimizers = checked_optimizers("Monitor", model, optimizers)
        rules = [make_rule(rule) for rule in settings.rule] or rules_of_preset(settings.preset)
        self._streams, self._checks = RuleStreams(rules), StepChecks(rules)
        self._closed = True  # until it is made
        self._failed = self._is_off = self._has_stopped = False
        self.stops: list[MonitorStop] = []
        self._collector = SignalCollector(
            model,
            self._optimizers,
            values=settings.watch,
            fingerprint=settings.fingerprint != "off",
            full_fingerprint=settings.fingerprint == "full",
            on_error=self._fail,
            on_end=self._end_step,
            before_step=self._before_step,
            after_step=self._after_step,
            checks=self._checks,
        )
        self._model = self._collector.model
        device = next((p.device for p in self._model.parameters()), torch.device("cpu"))
        self._has_not_begun = True
        self._is_late = device.type == "cuda" and settings.mode == "lagged"
        self._pending: deque[tuple[SignalRow, bool]] = deque()  # and whether it is comparable
        self._guard: Guard | None = None
        self._loop_problem, self._has_judged_loop = "", False
        self._due: Alarm | None = None
        self._replay: AlarmReplay | None = None
        self.load_earlier: Callable[[], object] | None = None
        self._replays = 0
        self._load_hook = self._model.register_load_state_dict_post_hook(lambda *_: note_load())
        self._loads = loads_so_far()
        self._loaded_at = 0 if take_loads() else None
        self._costs = CostMeter(self._collector.seconds)
        parameters = sum(entry.feature == GRADIENT for entry in self._collector.series)
        self._sampling = SamplingControl(settings, self._costs, parameters)
        if not self._sampling.reads_all:
            self._collector.reads_all, self._collector.next_read = False, NEVER
        self._collector.intervals = self.intervals
        try:
            self._ranks = ranks
            self._exchange = Exchange(ranks)
            names, run = tuple(map(full_name, self._collector.series)), secrets.token_hex(4)
            place = (self._exchange.rank, host_name(), device_name(device))
            info = RankInfo(*place, settings_by_name(settings), names, run)
            everybody = self._exchange.introduce(info)
            rank, world_size = self._exchange.rank, self._exchange.world_size
            if world_size > 1:
                self._sampling.most_rows = MOST_ROWS_OF_RANKS
            own_sinks = make_sinks(settings, rank, world_size, compatibility)
            recorder = None if settings.on_alarm != "replay" else Recorder(most=STEPS_BEFORE)
            if settings.record is not None:
                recorder = Recorder(path_of_rank(settings.record, rank, world_size))
        except BaseException:
            self._collector.close()
            raise
        self._agreement = Agreement(self._exchange, settings)
        alike = len({rank_info.series for rank_info in everybody}) == 1
        lowest = ALARM if settings.act_on == "alarm" else WARNING
        self._suspicion = Suspicion(alike, lowest, begins_alike=begins_alike(model))
        program_sinks = sinks if settings.strict else [isolated(sink) for sink in sinks]
        incident: IncidentWriter | None = None
        if settings.events is not None and settings.incident != "off":
            folder, has_tensors = settings.events.parent / INCIDENTS_FOLDER, settings.incident == "full"
            incident = IncidentWriter(folder, everybody[0].run, device, has_tensors)
        earlier = settings.events.parent / INCIDENTS_FOLDER / DEVICES_FILE if settings.events and incident else None
        self._faults = FaultJudge(self._exchange.link if settings.on_alarm == "replay" else RankLink(), earlier)
        self._reporter = Reporter(info, everybody, [*program_sinks, *own_sinks], incident)
        self._judge = StepJudge(self._collector, self._streams, self._costs, self._reporter, recorder)
        self._action = AlarmAction(settings, self._model, self._optimizers, self._exchange.rank)
        MONITORED.update((self._model, *self._optimizers))
        self._closed = False
        _open.add(self)
        try:
            with self._safely():
                self._reporter.start(info.settings, self._collector.series, notes)
                self._reporter.sampling(0, *self._sampling.at_start)
        except BaseException:
            self._closed = True
            self._remove_hooks()
            raise

    def close(self, wait: bool = True) -> None:
        """Judge the remaining steps, remove all hooks and close all sinks.

        Closing twice does nothing.

        ``wait``: whether to wait for the other ranks, which end as well; not if an exception ends this rank alone.

        Raises:
            MonitorStop: the last step raised an alarm, with ``on_alarm="stop"``.
        """
        if self._closed:
            return
        self._loop_problem = ENDED
        alone, is_error = self._exchange.world_size == 1, not wait or sys.exc_info()[0] is not None
        wait = alone or (not is_error and self._exchange.is_open())
        stop: MonitorStop | None = None
        try:
            with self._safely():
                try:
                    if not self._is_off:
                        self._judge_rest(wait)
                except MonitorStop as raised:
                    stop = raised
                is_last = wait and not self._is_off
                self._exchange.close(RankRow(self._collector.step, ended=1) if is_last else None)
        finally:
            self._closed = True
            self._remove_hooks()
        with self._safely():
            self._end(STOPPED if stop or self._has_stopped else ERROR if is_error else DONE)
        if stop is not None:
            raise stop

    def __del__(self) -> None:
        """Close the monitor when the program has dropped the last reference to it."""
        if sys.is_finalizing() or getattr(self, "_closed", True):
            return
        try:
            if not self._is_off and self._exchange.world_size > 1 and self._exchange.is_open():
                self._agree(0.0)
                self._exchange.begin(RankRow(self._collector.step, ended=1))
            self.close(wait=False)
        except MonitorStop as stop:
            self.stops.append(stop)

    def _leave_to_parent(self) -> None:
        """Disable the monitor in a forked child process.

        Its files and servers belong to the parent.
        """
        self._closed = self._is_off = self._collector.is_off = True

    def _judge_rest(self, wait: bool) -> None:
        """Judge the steps that are not judged yet.

        ``wait``: whether to wait for the verdict of all ranks on them.
        """
        if self._checks.findings:
            self._report_checks()
        if self._collector.is_over and not self._collector.is_reading:
            self._collector.skip_row()
        elif self._collector.is_over:
            self._pending.append((self._collector.take_row(), not self._agreement.is_behind))
        if wait:
            self._judge_pending(flush=True)
            self._agree(None if self._agreement.must_act_alike else LEAVING_SECONDS)
        for row, _ in self._pending:
            self._judge.judge(row)

    def _remove_hooks(self) -> None:
        if self._guard is not None:
            self._guard.close()
        self._collector.close()
        self._load_hook.remove()
        take_loads()
        MONITORED.difference_update((self._model, *self._optimizers))

    def _end(self, how: str) -> None:
        """Report the last event, and write the recording."""
        if self._collector.backwards and not self._collector.step:
            log.warning("no step of an optimizer was seen after a backward pass, so that nothing was judged")
        unseen = self._judge.unseen()
        longest_wait = max(self._sampling.longest_wait, self._judge.waits.longest)
        self._reporter.end(
            self._collector.step, seconds=time.perf_counter() - self._costs.begun, cost=self.cost, longest_wait=longest_wait,
            unseen=tuple(unseen[:MOST_NAMES]), unseen_count=len(unseen), unjudged=self._judge.unjudged(), how=how,
        )  # fmt: skip
        self._judge.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            if kind is None and self._guard is not None and not self._closed:
                self._guard.check_pending_steps()
        finally:
            self.close(wait=kind is None)

    @property
    def model(self) -> nn.Module:
        """The model that is trained, without wrappers such as DDP."""
        return self._model

    @property
    def intervals(self) -> SampleIntervals:
        """Sampling intervals: numbers of steps within which every tensor is read."""
        return self._sampling.intervals

    @property
    def series(self) -> list[Series]:
        """The series of numbers that the monitor reads."""
        return self._collector.series

    @property
    def alarms(self) -> list[Alarm]:
        """Alarms of the rules in this rank so far."""
        return self._reporter.alarms

    @property
    def verdicts(self) -> list[Verdict]:
        """Verdicts of all ranks so far."""
        return self._reporter.verdicts

    @property
    def cost(self) -> float:
        """Share of the run time so far that the monitor has used."""
        return self._costs.share()

    # -- executing steps again ---------------------------------------------------------------------------------

    def iterate(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches, and after an alarm the last batches again.

        Works like `Guard.iterate`; for ``on_alarm="rerun"`` and ``on_alarm="replay"``.
        """
        frame, guard = sys._getframe(1), self._rerunning()
        is_plain = is_of_library(frame.f_code.co_filename) or is_plain_loop(frame.f_code, frame.f_lasti, "CALL")
        self._loop_problem = "" if is_plain else NOT_PLAIN
        return guard.iterate(batches)

    def step(self, run: Callable[..., Result], *arguments: Any) -> Result:
        """Run a step with `Guard.step`, and again after an alarm.

        For ``on_alarm="rerun"`` and ``on_alarm="replay"``.
        """
        self._loop_problem = ""
        return self._rerunning().step(run, *arguments)

    def _rerunning(self) -> Guard:
        """The guard that keeps states and executes steps again, created on first use."""
        if self.settings.on_alarm not in EXECUTE_AGAIN:
            raise UsageError(
                f"on_alarm is {self.settings.on_alarm!r}; expected 'rerun' or 'replay' for steps that are executed again"
            )
        if self._guard is None:
            interval = max(SNAPSHOT_INTERVAL, self.intervals.longest)
            self._guard = Guard(
                self._model, self._optimizers, self, check=RerunCheck(self), ranks=self._ranks, snapshot_interval=interval,
                delayed_check=self._is_late, spread=1,
                replay=self._execute_again if self.settings.on_alarm == "replay" else None,
            )  # fmt: skip
        return self._guard

    def _execute_again(self, alarm: Alarm, steps: LiveSteps) -> Iterator[Any]:
        """Yield the item of each iteration that is executed again for an alarm.

        Everything learnt meanwhile is forgotten, except for the verdict on the alarm.
        """
        replay, judge = self._replay, self._judge
        assert replay is not None
        was_off, failed = self._is_off, ""
        self._judge = judge.apart(self._reporter.silent(), replay.recorder)
        try:
            yield from replay.run(steps)
        except Exception as error:  # bodies of the loop run outside of this: it is an error of the monitor
            if self.settings.strict:
                raise
            failed = f"the step could not be executed again: {kind_and_line(error)}"
            log.error("%s", failed, exc_info=error)
        finally:
            self._judge, self._replay = judge, None
        if self._is_off and not was_off:
            failed = "the monitor ended while the step was executed again"
        self._report_fault(replay.evidence(failed))

    def _report_fault(self, evidence: Evidence) -> None:
        """Report the kind of fault.

        Raises `MonitorStop` if the job must end because of it.
        """
        verdict = self._faults.judge(evidence)
        self._reporter.fault_verdict(verdict)
        if verdict.exit_code:
            self._has_stopped = True
            raise MonitorStop(  # all ranks together have reported the reason and the action
                f"the monitor stopped the job after an alarm in step {verdict.step}"
                f"{self._faults.training_step_text(verdict.step)}: {verdict.kind} ({verdict.code})",
                verdict.exit_code,
            )

    def _warn_of_loop(self, why: str) -> None:
        """Warn, before there is any alarm, that steps cannot be executed again and what an alarm does instead."""
        self._has_judged_loop = True
        consequence = "an alarm is only logged"
        if self.settings.mode == "strict":
            consequence = "the step of an alarm is left out"
        elif self.settings.on_alarm == "replay":
            consequence = "an alarm ends the job without executing its step again"
        log.warning("%s%s %s", NO_RERUN, why, consequence)

    def _judge_loop(self, guard: Guard) -> None:
        """Warn once, early, if the loop has changed objects that cannot be restored.

        Each rank warns for itself, without the other ranks.
        """
        if not self._has_judged_loop and self._collector.step >= LOOP_IS_KNOWN:
            self._has_judged_loop = True
            if why := self._loop_problem or cannot_be_put_back(guard.changes()):
                self._warn_of_loop(f"{why}; as long as it does,")

    def take_alarm(self, flush: bool) -> Alarm | None:
        """An alarm of any rank for which steps are executed again, or None.

        ``flush``: whether alarms in the last step count as well.
        """
        if not self._is_off:
            with self._safely():
                if self._collector.is_over:  # an optimizer made no step
                    self._take_row(flush)
                self._judge_pending(flush)
                self._agree()
                if self._guard is not None and self._due is None:
                    self._judge_loop(self._guard)
        due, self._due = self._due, None
        if due is not None and (why := self._why_no_rerun()):  # the verdict may have come in the middle of the step
            log.warning("%s: %s%s", due.summary, NO_RERUN, why)
            if self._replay is not None:
                self._report_fault(self._replay.not_executed(why, self._last_batches()))
                self._replay = None
            return None
        return due

    def _why_no_rerun(self) -> str:
        """Reason why the last steps cannot be executed again, or an empty text if they can."""
        if self.settings.on_alarm == "replay" and self._replays > MOST_REPLAYS:
            return TOO_MANY
        return NO_LOOP if self._guard is None else self._loop_problem or self._guard.why_not_repeatable()

    def _last_batches(self) -> Sequence[Any]:
        """Batches since the oldest state that is kept, or none if the loop is unknown."""
        return [] if self._guard is None else self._guard.batches()

    def drop_pending(self) -> None:
        """Forget the steps that are not judged yet."""
        if self._reporter.incident is not None:
            self._reporter.incident.begin_again()
        self._pending.clear()
        self._agreement.drop()
        self._due = None
        self._collector.start_at(self._collector.step, self._collector.steps_of_optimizers)

    def record_iteration(self, batch: Any) -> None:
        """Called before an iteration is executed again; record it if it belongs to an incident."""
        if self._reporter.incident is not None:
            self._reporter.incident.add_iteration(
                self._collector.step, lambda: training_state(self._model, self._optimizers), batch
            )

    def record_incident(self, step: int, state: Any, batch: Any) -> None:
        """Record the last step as an incident although there was no alarm.

        Called after the step, in every rank. Does nothing after another incident.

        Args:
            step: Number of the last step.
            state: State before that step, as from `incident_writer.training_state`.
            batch: Batch of the step.
        """
        with self._safely():
            self._reporter.notice(step)
            if self._reporter.incident is not None:
                self._reporter.incident.add_iteration(step, lambda: state, batch)

    def state_dict(self) -> dict[str, Any]:
        """State of the monitor that is restored when steps are executed again."""
        steps_of_optimizers = self._collector.steps_of_optimizers
        return {
            "step": self._collector.step,
            "steps of optimizers": steps_of_optimizers,
            "rules": self._streams.state,
            "checks": self._checks.state,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""
        self._collector.start_at(state["step"], state["steps of optimizers"])
        self._streams.state, self._checks.state = state["rules"], state["checks"]

    # -- steps of the optimizers -------------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer) -> None:
        collector = self._collector
        if self._is_off or not (collector.step >= collector.next_read or self._exchange.sent or self._checks.findings):
            return
        with self._safely():
            if self._checks.findings:
                self._report_checks()
            if self._collector.has_pass:  # the first optimizer after a backward pass
                self._action.begin_backward()
                if self.settings.mode == "strict":
                    self._action.can_skip = True
                    self._take_row(flush=True)
            self._agree()
            self._action.can_skip = False
            if self._action.begin_step(optimizer):
                self._collector.forget_update()

    def _after_step(self, optimizer: Optimizer) -> None:
        with self._safely():
            self._action.end_step(optimizer)
            if not self._is_off and self._collector.is_complete:  # in mode strict: backward passes during the step
                self._take_row(flush=False)

    def _end_step(self) -> None:
        """Called when a step is over that is not read, or in which some optimizers made no step.

        Either it is not read, or the next step begins before all optimizers have made their steps.
        """
        collector = self._collector
        if collector.step >= collector.next_read:
            with self._safely():
                self._take_row(flush=False)
            return
        collector.skip_row()
        if self._pending:  # a row of a device: it has arrived by now
            with self._safely():
                self._judge_pending(flush=True)
        elif self._has_not_begun and self._may_begin():
            self._has_not_begun = False
            collector.next_read = collector.step + 1

    def _may_begin(self) -> bool:
        """Whether reading of signals may begin with the next step.

        If there are several ranks, they begin with the same step.
        """
        if self._exchange.world_size > 1:
            return self._collector.step == FIRST_READ
        return self._sampling.may_begin()

    def _report_checks(self) -> None:
        """Report the findings of `StepChecks` at once.

        A single rank acts on them at once, several ranks with the next step that is read.
        """
        findings = self._checks.take()
        row = self._judge.report_checks(findings)
        if self._exchange.world_size > 1 or self._sampling.reads_all:
            self._judge.keep_for_next_row(findings)
        else:
            self._conclude([row])

    def _take_row(self, flush: bool) -> None:
        """Judge the signals of a step that is complete.

        On a CUDA device in mode ``lagged``, the signals of the step before are judged.
        """
        self._pending.append((self._collector.take_row(), not self._agreement.is_behind))
        if (loads := loads_so_far()) != self._loads:
            self._loads, self._loaded_at = loads, self._collector.step - 1
        if self._collector.step == LOOP_IS_KNOWN and self.settings.on_alarm in EXECUTE_AGAIN and self._guard is None:
            self._warn_of_loop(f"{NO_LOOP};")
        if not self._collector.reads_all:
            self._collector.next_read = NEVER  # until all ranks have agreed
        self._judge_pending(flush)

    @contextmanager
    def _safely(self) -> Iterator[None]:
        """Context that keeps errors of the monitor from the job, and measures the monitor's time."""
        self._begun = time.perf_counter()
        try:
            yield
        except MonitorStop:
            raise
        except Exception as error:
            self._fail(error)
        finally:
            self._book_time()

    def _book_time(self) -> None:
        """Add the time since the last call to the cost of the monitor."""
        now = time.perf_counter()
        self._costs.fixed += now - self._begun
        self._begun = now

    def _fail(self, error: Exception) -> None:
        """Switch the monitor off after its own error.

        The error is logged once, and the other ranks learn of it with the next row.
        """
        if self.settings.strict:
            raise error
        if self._failed:
            return
        self._failed = True
        log.error("the monitor failed and is switched off; the job goes on: %s", kind_and_line(error), exc_info=error)
        try:
            self._reporter.failure(self._collector.step, kind_and_line(error))
            if not self._is_off and not self._closed:
                self._exchange.begin(RankRow(self._collector.step, failed=1))
        except Exception:
            log.exception("the other ranks could not be notified")
        self._turn_off()

    def _turn_off(self) -> None:
        """Switch the monitor off.

        Hooks stay until the end, because one of them may be running.
        """
        self._is_off = self._collector.is_off = True
        self._pending.clear()

    # -- one step ----------------------------------------------------------------------------------------------

    def _judge_pending(self, flush: bool) -> None:
        """Apply the rules to the signals that have arrived, and send the results to the other ranks."""
        while len(self._pending) > (1 if self._is_late and not flush else 0):
            if self._agreement.must_act_alike:
                self._agree()  # if no optimizer step came between two rows
            signals, is_comparable = self._pending.popleft()
            row = self._judge.judge(signals)
            self._book_time()
            self._sampling.look(self._collector.step)
            self._agreement.send(row._replace(**vars(self._sampling.wanted)), is_comparable)

    def _agree(self, seconds: float | None = None) -> None:
        """Receive the rows of all ranks, if there are any, and act on them.

        Waits like `Agreement.receive`.
        """
        before = self._agreement.seconds_waited
        try:
            for rows in self._agreement.receive(seconds, self._collector.step):
                self._act_on_rows(rows)
                if self._is_off:
                    break
        except RanksApart as error:
            self._end_apart(str(error))
        finally:
            waited = self._agreement.seconds_waited - before
            self._costs.fixed -= waited  # waiting for another rank does not count as the monitor's work

    def _act_on_rows(self, rows: list[RankRow]) -> None:
        """Act on the rows of all ranks for one step."""
        if (gone := next((rank for rank, row in enumerate(rows) if row.failed or row.ended), None)) is not None:
            how = "failed" if rows[gone].failed else "ended"
            log.info("the monitor of rank %d %s, and so this one ends", gone, how)
            self._turn_off()
            return
        if self._replay is not None and self._replay.is_running:
            self._replay.add(self._suspicion.relevant(rows))
            return
        parts = ("gradients", "values", "state", "rows")
        self._set_intervals(SampleIntervals(*(max(getattr(row, part) for row in rows) for part in parts)))
        self._plan_next_read(max(row.step for row in rows))
        self._conclude(rows)

    def _end_apart(self, reason: str) -> None:
        """Switch this monitor off because the ranks cannot agree.

        The others learn of it with their next row.
        """
        log.warning(
            "%s: the ranks do not make the same steps, so the monitor of this rank ends; the job goes on", reason
        )
        self._exchange.begin(RankRow(self._collector.step, ended=1))
        self._turn_off()

    def _conclude(self, rows: Sequence[RankRow]) -> None:
        """Report the rank that is suspected, and carry out the action on an alarm.

        All ranks do the same.
        """
        rows = self._suspicion.relevant(rows)
        interval = self.intervals.state * self.intervals.rows * self._collector.rows_per_step
        is_new = self._suspicion.follow(rows, interval)
        suspect, action, step = self._suspicion.suspect, self.settings.on_alarm, rows[0].step
        differing, versions = self._suspicion.differing, len({row.replicas for row in rows})
        self._reporter.replicas(step, differing, versions, self._suspicion.is_difference_new)
        if suspect is None or not (is_new or action in ("skip", "rerun")):
            return
        self._replays += action == "replay"
        no_rerun = self._why_no_rerun() if action in EXECUTE_AGAIN else ""
        outcome = self._action.act(step, no_rerun)
        is_rerun = action in EXECUTE_AGAIN and not no_rerun
        if is_new or is_rerun:
            names = self._collector.state_names
            verdict = self._reporter.verdict(step, rows, differing, suspect, names, action, outcome)
            if is_rerun:
                self._due = alarm_of(verdict, rows, self._reporter.alarms)
            if action == "replay":
                since_load = None if self._loaded_at is None else step - self._loaded_at + 1
                link, series, recorder = self._exchange.link, self._collector.series, self._judge.recorder or Recorder()
                self._replay = AlarmReplay(verdict, since_load, link, series, recorder, self.load_earlier)
                if not is_rerun:
                    self._report_fault(self._replay.not_executed(no_rerun, self._last_batches()))
                    self._replay = None
        if action == "stop":
            self._has_stopped, has_changed = True, any(row.changed for row in rows)
            why = f": bits changed between two steps, {UNRECORDED}" if has_changed else ""
            exit_code = CONFIRMED if has_changed else UNCONFIRMED
            raise MonitorStop(f"the monitor stopped the job after an alarm in step {step}{why}", exit_code)

    def _set_intervals(self, agreed: SampleIntervals) -> None:
        if (reason := self._sampling.agree(agreed, self._collector.step)) is None:
            return
        self._collector.intervals = agreed
        if self._guard is not None:
            self._guard.lengthen(agreed.longest)
        self._reporter.sampling(self._collector.step, agreed.longest, reason)

    def _plan_next_read(self, step: int) -> None:
        """Choose the next step that is read, after all ranks have answered for this step."""
        collector, rows = self._collector, self.intervals.rows
        was_reading = collector.is_reading
        collector.reads_all = rows == 1
        if rows > 1 or not was_reading:
            collector.next_read = max(step + rows, collector.step + 1)


def _check_sinks(sinks: Any) -> None:
    if isinstance(sinks, str) or not isinstance(sinks, Sequence) or not all(map(callable, sinks)):
        raise wrong_value_error("sinks", sinks, "functions that are called with each event, in a list")


def _leave_all_to_parent() -> None:
    for monitor in tuple(_open):
        monitor._leave_to_parent()
    _open.clear()
    MONITORED.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_all_to_parent)
