"""The monitor of a training: reads signals, applies rules, agrees with the other ranks, and acts.

    with Monitor(model, optimizer):
        ...                         # any training loop

A step is all backward passes up to an optimizer step. ``mode="lagged"``: the signals of a step are judged after it, and all ranks
know the verdict before the next one is made (on CUDA one step later still, so that nobody waits for the device).
``mode="strict"``: the verdict comes before the optimizer step, which can then be left out; every step waits for the device and
for the other ranks.
An error of the monitor itself is logged once, and the training goes on without it (``strict=True``: it is raised).
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self, TypeVar

import numpy as np
import torch
import xxhash
from torch import nn
from torch.optim import Optimizer

from unsilent.detectors.rule import ALARM, NORMAL, WARNING
from unsilent.detectors.rules import make_rule, rules_of_preset
from unsilent.detectors.series import UPDATE, Series
from unsilent.errors import UsageError, kind_and_line
from unsilent.monitor.actions import CONFIRMED, UNCONFIRMED, MonitorStop, SkippedStep, save_state
from unsilent.monitor.attribution import Suspect, divergent_replicas, suspect_of
from unsilent.monitor.events import Alarm, Verdict
from unsilent.monitor.exchange import Exchange, RankInfo, RankRow, host_name, settings_by_name
from unsilent.monitor.guard import SNAPSHOT_INTERVAL, Guard
from unsilent.monitor.recorder import Recorder
from unsilent.monitor.reporter import Reporter, Sink
from unsilent.monitor.rerun_check import RerunCheck
from unsilent.monitor.rule_streams import RuleStreams, fingerprint_finding
from unsilent.monitor.sampling import LONGEST, CostMeter, SampleIntervals, exceeds_limit, fitting_intervals, is_look
from unsilent.monitor.settings import MonitorSettings
from unsilent.monitor.signals.collector import Intervals, SignalCollector
from unsilent.monitor.signals.row import SignalRow
from unsilent.monitor.sinks import LOGGER, make_sinks

Batch = TypeVar("Batch")
Result = TypeVar("Result")
NO_RERUN = "logged; steps cannot be executed again, because the loop does not use Monitor.iterate or Monitor.step"
RANK_SETTINGS = frozenset({"events", "record", "metrics_port", "tensorboard", "save_to"})
"""Settings that may differ from rank to rank."""
log = logging.getLogger(LOGGER)


class Monitor:
    """Watches one training; a context manager that removes its hooks.

    Args:
        model: What is trained, wrapped or not.
        optimizers: One, or several.
        settings: All settings; None: from ``options``, which are fields of `MonitorSettings`.
        sinks: Are called with every event, besides those that the settings name.
        ranks: Who agrees: ``all`` of torch.distributed where it is in use, ``alone``, or a process group.
        notes: Sentences that the log gets at the start.
        compatibility: Alarms in the log carry the codes of MindSpore's accuracy-sensitive detection.

    Raises:
        UsageError: settings that make no sense, or that differ between ranks; a module to watch that does not exist.

    Attributes:
        intervals: Steps after which every tensor was read.
    """

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
        self.settings = settings = settings or MonitorSettings(**options)
        self._optimizers = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
        if not self._optimizers or not all(isinstance(one, Optimizer) for one in self._optimizers):
            raise UsageError("Monitor needs a torch optimizer, or a list of them: Monitor(model, optimizer)")
        self._streams = RuleStreams([make_rule(text) for text in settings.rules] or rules_of_preset(settings.preset))
        self._collector = SignalCollector(
            model,
            self._optimizers,
            values=settings.values,
            fingerprint=settings.fingerprint != "off",
            full_fingerprint=settings.fingerprint == "full",
            on_error=self._fail,
        )
        self._model = self._collector.model
        device = next((p.device for p in self._model.parameters()), torch.device("cpu"))
        self._is_late = device.type == "cuda" and settings.mode == "lagged"
        self._pending: deque[SignalRow] = deque()
        self._taken = 0  # backward passes up to the last row
        self._skips = self._closed = self._failed = self._is_off = self._said_too_dear = False
        self._skipped: dict[int, SkippedStep] = {}
        self._suspected: Suspect | None = None
        self._divergent: set[int] = set()
        self._guard: Guard | None = None
        self._due: Alarm | None = None
        self._costs = CostMeter(self._collector.seconds)
        self._ever_seen = np.zeros(0, np.bool_)
        self._recorder = None if settings.record is None else Recorder(settings.record)
        fixed = settings.sampling_interval
        self.intervals = self._wanted = SampleIntervals() if fixed is None else SampleIntervals(fixed, fixed)
        self._longest_wait = self.intervals.longest
        self._collector.intervals = Intervals(self.intervals.gradients, self.intervals.state)
        try:
            self._ranks = ranks
            self._exchange = Exchange(ranks)
            own = RankInfo(
                self._exchange.rank,
                host_name(),
                _device_name(device),
                settings_by_name(settings),
                tuple(" ".join(filter(None, one[:3])) for one in self._collector.series),
            )
            everybody = self._exchange.introduce(own, RANK_SETTINGS)
            self._replicas_count = len({one.series for one in everybody}) == 1
            own_sinks = make_sinks(settings, self._exchange.rank, self._exchange.world_size, compatibility)
        except BaseException:
            self._collector.close()
            raise
        self._reporter = Reporter(own, everybody, [*sinks, *own_sinks])
        self._hooks = [
            hook
            for one in self._optimizers
            for hook in (one.register_step_pre_hook(self._before_step), one.register_step_post_hook(self._after_step))
        ]
        self._reporter.start(own.settings, self._collector.series, notes)

    def close(self) -> None:
        """Judge what is not judged yet, remove all hooks and end all sinks; closing twice does nothing."""
        if self._closed:
            return
        if not self._is_off:
            with self._safely(may_stop=False):
                self._judge_pending(flush=True)
                self._agree()
        self._closed = True
        if self._guard is not None:
            self._guard.close()
        for hook in self._hooks:
            hook.remove()
        self._collector.close()
        series = self._collector.series
        if self._recorder is not None:
            self._recorder.save(series)
        unseen = [
            " ".join(filter(None, one[:3])) for one, seen in zip(series, self._ever_seen, strict=False) if not seen
        ]
        elapsed = time.perf_counter() - self._costs.begun
        self._reporter.end(self._collector.step, elapsed, self._costs.share(), self._longest_wait, unseen)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def model(self) -> nn.Module:
        """What is trained, without wrappers."""
        return self._model

    @property
    def series(self) -> list[Series]:
        """What is read."""
        return self._collector.series

    @property
    def alarms(self) -> list[Alarm]:
        """What the rules found in this rank, so far."""
        return self._reporter.alarms

    @property
    def verdicts(self) -> list[Verdict]:
        """What all ranks agreed on, so far."""
        return self._reporter.verdicts

    @property
    def cost(self) -> float:
        """Share of the time so far that the monitor itself took."""
        return self._costs.share()

    # -- executing steps again ---------------------------------------------------------------------------------

    def iterate(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The batches, as `Guard.iterate`: those of the last steps come again after an alarm. For ``on_alarm="rerun"``."""
        return self._rerunning().iterate(batches)

    def step(self, run: Callable[..., Result], *arguments: Any) -> Result:
        """One step, as `Guard.step`: it is run again after an alarm. For ``on_alarm="rerun"``."""
        return self._rerunning().step(run, *arguments)

    def _rerunning(self) -> Guard:
        """What keeps states and executes steps again; made at first use."""
        if self.settings.on_alarm != "rerun":
            raise UsageError(
                f"on_alarm is {self.settings.on_alarm!r}; expected 'rerun' for steps that are executed again"
            )
        if self._guard is None:
            interval = max(SNAPSHOT_INTERVAL, self.intervals.longest)
            self._guard = Guard(
                self._model, self._optimizers, self, check=RerunCheck(self), ranks=self._ranks, snapshot_interval=interval,
                delayed_check=self._is_late,
            )  # fmt: skip
        return self._guard

    def take_alarm(self, flush: bool) -> Alarm | None:
        """An alarm of any rank that steps are executed again for; ``flush``: in the last step as well."""
        with self._safely():
            self._judge_pending(flush)
            self._agree()
        due, self._due = self._due, None
        return due

    def drop_pending(self) -> None:
        """Forget steps that are not judged yet."""
        self._pending.clear()
        self._exchange.end()
        self._due = None
        self._collector.start_at(self._collector.step)

    def state_dict(self) -> dict[str, Any]:
        """What goes back with the training when steps are executed again."""
        return {"step": self._collector.step, "rules": self._streams.state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back."""
        self._collector.start_at(state["step"])
        self._streams.state = state["rules"]

    # -- hooks of the optimizers -------------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        if self._is_off or torch.compiler.is_compiling():
            return
        with self._safely():
            if self._collector.backwards != self._taken:  # the first optimizer after a backward pass
                self._skips = False
                if self.settings.mode == "strict":
                    self._pending.append(self._collector.take_row())
                    self._judge_pending(flush=True)
                self._agree()
            if self._skips:
                self._skipped[id(optimizer)] = SkippedStep(optimizer)
                self._collector.forget_update()

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if (skipped := self._skipped.pop(id(optimizer), None)) is not None:
            skipped.end()
        if self._is_off or torch.compiler.is_compiling():
            return
        with self._safely():
            if self._collector.backwards != self._taken:
                self._taken = self._collector.backwards
                if self.settings.mode == "lagged":
                    self._pending.append(self._collector.take_row())
                    self._judge_pending(flush=False)
                self._look_at_costs()

    @contextmanager
    def _safely(self, may_stop: bool = True) -> Iterator[None]:
        """An error of the monitor is no error of the job; the time counts as the monitor's."""
        begun = time.perf_counter()
        try:
            yield
        except MonitorStop:
            if may_stop:
                raise
        except Exception as error:
            self._fail(error)
        finally:
            self._costs.fixed += time.perf_counter() - begun

    def _fail(self, error: Exception) -> None:
        """The monitor itself raised an error: log it once, and let the other ranks know with the next row."""
        if self.settings.strict:
            raise error
        if self._failed:
            return
        self._failed = True
        log.error("the monitor failed and is switched off; the job goes on: %s", kind_and_line(error), exc_info=error)
        try:
            self._reporter.failure(self._collector.step, kind_and_line(error))
            self._exchange.end()
            self._exchange.begin(RankRow(self._collector.step, failed=1))
        except Exception:
            log.exception("the other ranks could not be notified")
        self._turn_off()

    def _turn_off(self) -> None:
        self._is_off = True
        self._collector.turn_off()

    # -- one step ----------------------------------------------------------------------------------------------

    def _judge_pending(self, flush: bool) -> None:
        """Apply the rules to what has arrived, and tell the other ranks."""
        while len(self._pending) > (1 if self._is_late and not flush else 0):
            self._agree()  # where no optimizer step came between two rows
            row = self._pending.popleft()
            self._exchange.begin(self._judge(row))

    def _judge(self, row: SignalRow) -> RankRow:
        series = self._collector.series
        signals = row.read(len(series))
        seconds = time.perf_counter() - self._costs.begun
        if self._recorder is not None:
            self._recorder.add(signals, seconds)
        changed = fingerprint_finding(signals, self._collector.state_names)
        findings = ([changed] if changed else []) + self._streams.judge(series, signals, seconds)
        self._ever_seen = np.pad(self._ever_seen, (0, len(series) - len(self._ever_seen))) | signals.seen
        self._reporter.findings(row.step, findings)
        self._reporter.summary(row.step, series, signals, self._streams.take_largest_score, self._costs.share())
        worst = max(findings, key=lambda one: (one.level, one.series.feature != UPDATE, one.score), default=None)
        return RankRow(
            step=row.step,
            level=worst.level if worst else NORMAL,
            score=worst.score if worst else 0.0,
            series=worst.number if worst else -1,
            is_shared=int(worst is not None and worst.series.feature == UPDATE),
            changed=len(signals.changed),
            replicas=xxhash.xxh3_64_intdigest(signals.replica_sums.tobytes()) >> 1,
            gradients=self._wanted.gradients,
            state=self._wanted.state,
        )

    def _agree(self) -> None:
        """Take the rows of all ranks, where there are any, and act on them."""
        begun = time.perf_counter()
        rows = self._exchange.end()
        self._costs.fixed -= time.perf_counter() - begun  # waiting for another rank is not work of the monitor
        if rows is None:
            return
        if any(row.failed for row in rows):
            self._turn_off()
            return
        self._set_intervals(SampleIntervals(max(row.gradients for row in rows), max(row.state for row in rows)))
        self._conclude(rows)

    def _conclude(self, rows: Sequence[RankRow]) -> None:
        """Say which rank is suspected, and do what is to be done on an alarm; the same in every rank."""
        lowest = ALARM if self.settings.act_on == "alarm" else WARNING
        rows = [row if row.level >= lowest else row._replace(level=NORMAL) for row in rows]
        step = rows[0].step
        divergent = set(divergent_replicas([row.replicas for row in rows])) if self._replicas_count else set()
        if divergent and step <= self.intervals.state + 1:
            self._replicas_count = False
            log.info("parameters differ between the ranks from the start, so they are not compared")
            divergent = set()
        is_new = not divergent <= self._divergent
        self._divergent |= divergent
        suspect, before = suspect_of(rows, self._replicas_count and is_new), self._suspected
        self._suspected = suspect
        if suspect is None:
            return
        is_proof = any(row.changed for row in rows)
        outcome = self._act(step)
        action = self.settings.on_alarm
        names = self._collector.state_names
        if suspect != before or self._guard is not None:
            verdict = self._reporter.verdict(step, rows, suspect, names, action, outcome)
            if self._guard is not None:
                self._due = self._alarm_of(verdict, rows)
        if action == "stop":
            raise MonitorStop(
                f"the monitor stopped the job after an alarm in step {step}", CONFIRMED if is_proof else UNCONFIRMED
            )

    def _act(self, step: int) -> str:
        """Do it; what was done, in words."""
        action = self.settings.on_alarm
        if action == "skip" or (action == "rerun" and self.settings.mode == "strict" and self._guard is None):
            self._skips = True
            return "the optimizer step is left out"
        if action == "save":
            assert self.settings.save_to is not None
            path = save_state(self.settings.save_to, self._model, self._optimizers, step, self._exchange.rank)
            return f"the state was saved to {path}"
        if action == "rerun":
            return "the last steps are executed again" if self._guard else NO_RERUN
        return {"stop": "the job stops"}.get(action, "logged; the training goes on")

    def _alarm_of(self, verdict: Verdict, rows: Sequence[RankRow]) -> Alarm:
        """The alarm that all ranks execute steps again for: of this rank, or of the one that is suspected."""
        if self._reporter.alarms and self._reporter.alarms[-1].step == verdict.step:
            return self._reporter.alarms[-1]
        return Alarm(
            time=verdict.time, rank=verdict.suspect, step=verdict.step, host=verdict.host, device=verdict.device,
            rule=verdict.reason, feature="signal", tensor=verdict.tensor, statistic="verdict", level="alarm",
            value=math.nan, baseline=math.nan, score=max(row.score for row in rows),
        )  # fmt: skip

    # -- cost --------------------------------------------------------------------------------------------------

    def _look_at_costs(self) -> None:
        """Find the intervals that this rank needs; all ranks then take the longest."""
        step = self._collector.step
        if self.settings.sampling_interval is not None or not is_look(step):
            return
        costs = self._costs.since_last_look(step)
        if costs.steps > 0:
            self._wanted = fitting_intervals(self.intervals, costs, self.settings.budget)
            if exceeds_limit(costs) and self._wanted.longest == LONGEST and not self._said_too_dear:
                self._said_too_dear = True
                log.warning(
                    "steps take %.2g ms, so that the monitor takes %.1f %% of them at least; its budget is %g %%",
                    1000 * costs.step / costs.steps, 100 * costs.fixed / costs.step, self.settings.budget,
                )  # fmt: skip

    def _set_intervals(self, wanted: SampleIntervals) -> None:
        if wanted == self.intervals:
            return
        self.intervals = self._wanted = wanted
        self._longest_wait = max(self._longest_wait, wanted.longest)
        self._collector.intervals = Intervals(wanted.gradients, wanted.state)
        self._reporter.sampling(
            self._collector.step,
            wanted.longest,
            self._guard is not None and wanted.longest <= self._guard.steps_covered,
            f"gradients and values are read every {wanted.gradients} steps, updates and fingerprints every "
            f"{wanted.state}, to stay within {self.settings.budget:g} % of the time",
        )


def _device_name(device: torch.device) -> str:
    return f"{device} {torch.cuda.get_device_name(device)}" if device.type == "cuda" else str(device)
