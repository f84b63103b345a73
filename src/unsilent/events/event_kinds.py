"""Kinds of events that a monitor reports: one frozen dataclass for each, written as a line of JSON.

Everything shown about a job comes from these events.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from unsilent.recovery.fault_codes import DATA_BATCH
from unsilent.report.text import count_text, listed, short

FINGERPRINT = "fingerprint"
"""Name of the rule, and of the feature, for bits that changed between two steps."""
MOST_TEXT = 1000
"""Largest number of characters of a text in a file of events; the middle of a longer text is left out."""
MOST_NAMES = 100
"""Largest number of names of never seen series in the last event."""
REPLICAS = "replicas"
"""Name of the rule, and of the feature, for parameters that differ between ranks but should be equal."""
UNRECORDED = "a change that torch did not record: a memory fault, or a write through .data or numpy"
ONE_RANK = "one rank"
"""Reason of a verdict if there is no other rank to compare with."""
DONE, ERROR, STOPPED = "done", "error", "stopped"
"""Ways in which a monitor ends."""
ENDS = {ERROR: " after an error or an interrupt", STOPPED: " because it stopped the job"}

LOGGER = "unsilent.monitor"
"""Name of the logger for reports of a monitor."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """Base class of events that a monitor reports; ``str`` gives a one-line text.

    Attributes:
        time: Seconds since 1970, UTC.
        rank: Rank that reports it.
        step: Step of the monitor, from 0: all backward passes up to an optimizer step.
    """

    kind: ClassVar[str] = ""
    log_level: ClassVar[int] = logging.INFO
    time: float
    rank: int
    step: int

    @property
    def repeats_other_rank(self) -> bool:
        """Whether another rank reports the same event with the same text."""
        return False

    def to_json(self) -> dict[str, Any]:
        """The event as a JSON object, with its kind; numbers that are not finite are strings ("nan", "inf", "-inf").

        Texts have at most `MOST_TEXT` characters.
        """
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {"kind": self.kind, **{name: _plain_json(value) for name, value in values.items()}}


@dataclass(frozen=True, kw_only=True)
class AgreedEvent(Event):
    """Base class of events that all ranks agree on and each of them reports."""

    log_level: ClassVar[int] = logging.WARNING

    @property
    def repeats_other_rank(self) -> bool:
        return self.rank != 0


@dataclass(frozen=True, kw_only=True)
class Started(Event):
    """Reports that a monitor has started.

    Attributes:
        host, device: Host and device of the rank.
        process: Number of the process on the host.
        world_size: Number of ranks.
        settings: All settings of the monitor.
        series: Number of series of each feature.
        versions: Versions of Unsilent and of packages.
        notes: Further sentences for the user.
        pid_namespace: PID namespace in which the number of the process is valid, on Linux.
        first_step: Step of the training at which this run continues; its own steps count from 0. None if it is unknown.
    """

    kind: ClassVar[str] = "started"
    host: str
    device: str
    process: int
    world_size: int
    settings: Mapping[str, Any]
    series: Mapping[str, int]
    versions: Mapping[str, str]
    notes: tuple[str, ...] = ()
    pid_namespace: str = ""
    first_step: int | None = None

    def __str__(self) -> str:
        series = ", ".join(f"{count:,} of {feature}" for feature, count in self.series.items())
        where = f"rank {self.rank} of {self.world_size} ({self.host}, {self.device})"
        return f"monitoring {where}, series: {'; '.join([series or 'none', *self.notes])}{self._first_step_text}"

    @property
    def _first_step_text(self) -> str:
        return f"; step 0 of this run is step {self.first_step} of the training" if self.first_step else ""


@dataclass(frozen=True, kw_only=True)
class StepSummary(Event):
    """Reports numbers of a step, about once a second, for each step with an alarm, and for the last step.

    After ten hours, it is written only once in ten seconds.

    Attributes:
        loss: Loss; None if it was not seen.
        gradient_norm: Norm over the tensors in the sample of this step, in this rank; None if there were none.
        score: The largest score of any rule since the last summary (1: an alarm); None if no rule judged a value.
        cost: The monitor's share of the time of the steps since the last summary.
        health: ``ok`` or ``warning``.
    """

    kind: ClassVar[str] = "step"
    loss: float | None
    gradient_norm: float | None
    score: float | None
    cost: float
    health: str

    def __str__(self) -> str:
        numbers = {"loss": self.loss, "gradient norm": self.gradient_norm, "largest score": self.score}
        known = ", ".join(f"{name} {value:.4g}" for name, value in numbers.items() if value is not None)
        return f"step {self.step}: {known}, health {self.health}"


@dataclass(frozen=True, kw_only=True)
class SamplingChanged(Event):
    """Reports that the share of tensors read in each step has changed.

    Attributes:
        interval: Number of steps between two reads of a tensor, and until every tensor was seen. 0: no tensor is read so far.
        reason: Reason in words.
    """

    kind: ClassVar[str] = "sampling"
    interval: int
    reason: str

    def __str__(self) -> str:
        within = "no tensor is read so far"
        if self.interval:
            within = f"each tensor is read at least once in {count_text(self.interval, 'step')}"
        return f"step {self.step}: {within} ({self.reason})"


@dataclass(frozen=True, kw_only=True)
class Alarm(Event):
    """Reports that a rule found an anomaly on this rank.

    Each rule raises at most one alarm in a step, if its level for some series rises: for the one of these series with the highest
    score. If parameters differ between ranks, each rank that differs from the majority raises an alarm, or all ranks if there is
    no majority. It is repeated about once a minute as long as they differ.

    Attributes:
        host, device: Host and device of the rank.
        rule: Name of the rule.
        feature: Observed feature; ``fingerprint`` for bits that changed between two steps, ``replicas`` for parameters that
            differ between ranks.
        tensor: Name of the parameter, layer or value; empty for the loss.
        statistic: Number computed from the tensor, for example a norm.
        level: ``alarm`` or ``warning``.
        value: Value of the statistic in this step.
        baseline: Value that the rule expected; for a bound, the bound itself.
        score: Measure of how unusual the value is; 1 or more is an alarm.
        series_flagged, series_judged: Numbers of series with a finding of the rule, and of judged series, in this step; for
            fingerprints, of changed and compared tensors; for replicas, of differing and compared ranks.
        ranks: Ranks whose replicas differ; all compared ranks if there is no majority.
        since: Beginning of the run's incident: ``step 90, rank 1, fingerprint of fc.weight``; empty in its first alarm.
    """

    kind: ClassVar[str] = "alarm"
    log_level: ClassVar[int] = logging.ERROR
    host: str
    device: str
    rule: str
    feature: str
    tensor: str
    statistic: str
    level: str
    value: float
    baseline: float
    score: float
    series_flagged: int = 1
    series_judged: int = 1
    ranks: tuple[int, ...] = ()
    since: str = ""

    def __str__(self) -> str:
        if self.names_no_rank:  # every compared rank reports this
            return f"{self.summary}{_since(self.since)}"
        return f"{self.summary}, in rank {self.rank} ({self.host}, {self.device}){_since(self.since)}"

    @property
    def names_no_rank(self) -> bool:
        """Whether the compared replicas differ without a majority, so that no rank can be blamed."""
        return self.feature == REPLICAS and not self._has_majority

    @property
    def repeats_other_rank(self) -> bool:
        return self.names_no_rank and self.rank != min(self.ranks, default=self.rank)

    @property
    def summary(self) -> str:
        """A text about the alarm without its place, equal on every machine."""
        if self.feature == FINGERPRINT:
            share = f" ({self._share} tensors)" if self.series_flagged > 1 else ""
            return f"step {self.step}: bits of {self.tensor} changed between two steps{share}, {UNRECORDED}"
        if self.feature == REPLICAS:
            unknown = "" if self._has_majority else "; this comparison does not tell which of them is wrong"
            return f"step {self.step}: {self.series_name}{unknown}"
        subject = f"{self.feature} of {self.tensor}" if self.tensor else self.feature
        share = f"; {self._share} series" if self.series_flagged > 1 else ""
        if not math.isfinite(self.value) and self.tensor:  # norms and largest magnitudes of finite elements are finite
            value = f"{self.statistic} is {self.value:g}"
            return f"step {self.step}: {subject} has an element that is not finite ({value}; {self.rule}{share})"
        baseline = "" if math.isnan(self.baseline) else f", baseline {self.baseline:.4g}"
        return f"step {self.step}: {subject} ({self.statistic}) is {self.value:.4g}{baseline} ({self.rule}{share})"

    @property
    def _share(self) -> str:
        return f"{self.series_flagged:,} of {self.series_judged:,}"

    @property
    def series_name(self) -> str:
        """Feature, tensor and statistic in one text, as in a verdict."""
        if self.feature == FINGERPRINT:
            return f"{FINGERPRINT} of {self.tensor}"
        if self.feature == REPLICAS:
            ranks = listed(map(str, self.ranks))
            if not self._has_majority:
                return f"parameters differ between ranks {ranks}"
            return f"parameters of rank{'s' * (len(self.ranks) != 1)} {ranks} differ from those of other ranks"
        return join_names(self.feature, self.tensor, self.statistic)

    @property
    def _has_majority(self) -> bool:
        """Whether a majority of the replicas agrees, so that only the others count as differing."""
        return self.series_flagged < self.series_judged


@dataclass(frozen=True, kw_only=True)
class Verdict(AgreedEvent):
    """Reports the result that all ranks agreed on after an alarm on any of them.

    Attributes:
        suspect: Rank that is suspected; -1: undetermined.
        reason: Evidence: ``fingerprint``, ``own history``, ``vote``, ``one rank``, or the reason why it is undetermined.
        action: Action that was taken: ``log``, ``skip``, ``rerun``, ``save`` or ``stop``.
        outcome: Outcome in words.
        host, device, tensor: Host, device and tensor of the suspect.
        ranks: Ranks that raised an alarm.
        since: Beginning of the incident, as in an alarm.
    """

    kind: ClassVar[str] = "verdict"
    suspect: int
    reason: str
    action: str
    outcome: str
    host: str
    device: str
    tensor: str
    ranks: tuple[int, ...]
    since: str = ""

    def __str__(self) -> str:
        who = f"rank {self.suspect} ({self.host}, {self.device}) is suspected"
        who = "the faulty rank is undetermined" if self.suspect < 0 else who
        suspicion = f"{who}{f', {self.tensor}' if self.tensor else ''} ({self.reason})"
        return f"step {self.step}: {self.tensor if self.reason == ONE_RANK else suspicion}; {self.outcome}{_since(self.since)}"

    @property
    def repeats_alarm(self) -> bool:
        """Whether the verdict adds nothing to the alarm, because there is one rank and no action."""
        return self.reason == ONE_RANK and self.action == "log"


@dataclass(frozen=True, kw_only=True)
class IncidentBegan(AgreedEvent):
    """Reports the first verdict of a run, and the folder in which the incident is recorded.

    Attributes:
        folder: Folder in which the incident is recorded.
        suspect, tensor, reason: Values from the verdict.
    """

    kind: ClassVar[str] = "incident"
    folder: str
    suspect: int
    tensor: str
    reason: str

    @property
    def since(self) -> str:
        """The place where the incident began, such as ``step 90, rank 1, fingerprint of fc.weight``."""
        return since_text(self.step, self.suspect, self.tensor or self.reason)

    def __str__(self) -> str:
        return f"{self.since}: the incident is recorded in {self.folder}"


@dataclass(frozen=True, kw_only=True)
class AlarmExplained(AgreedEvent):
    """Reports the kind of fault behind an alarm, determined from evidence.

    Attributes:
        fault: The kind: ``transient``, ``device``, ``checkpoint``, ``numerics``, ``benign``, ``data`` or ``undetermined``.
        suspect, host, device: Values from the alarm; suspect is -1 if no rank is named.
        code, level: Entries of the table of fault codes.
        action: Advice in words.
        reason: Evidence for it, in one sentence.
        exit_code: Exit code of a job that stops on it; 0 if the job may continue.
    """

    kind: ClassVar[str] = "fault-verdict"
    fault: str
    suspect: int
    host: str
    device: str
    code: str
    level: str
    action: str
    reason: str
    exit_code: int

    @property
    def kind_text(self) -> str:
        """The kind of fault as text, such as ``kind of fault: transient (UNSILENT-T01, minor)``."""
        return f"kind of fault: {self.fault}{f' ({self.code}, {self.level})' if self.code else ''}"

    def __str__(self) -> str:
        place = ", ".join(filter(None, (self.host, self.device)))
        where = f", rank {self.suspect}{f' ({place})' if place else ''}" if self.suspect >= 0 else ""
        if self.code == DATA_BATCH.code and self.suspect >= 0:
            where = f", batch of rank {self.suspect}"  # its device is not suspected
        parts = [f"{self.kind_text}{where}", self.reason, self.action]
        return f"step {self.step}: {'; '.join(part.rstrip('.') for part in parts if part)}"


@dataclass(frozen=True, kw_only=True)
class MonitorFailed(Event):
    """Reports an internal error that stopped the monitor; the job continues without it.

    Attributes:
        error: Type and first line of the error.
    """

    kind: ClassVar[str] = "monitor-failed"
    log_level: ClassVar[int] = logging.WARNING
    error: str

    def __str__(self) -> str:
        return f"step {self.step}: the monitor of rank {self.rank} failed, the job goes on without it: {self.error}"


@dataclass(frozen=True, kw_only=True)
class Ended(Event):
    """Reports that the monitor has ended.

    Attributes:
        steps, alarms: Number of steps and of alarms in this rank.
        seconds, cost: Duration of the whole job in seconds, and the monitor's share of it.
        longest_wait: Largest number of steps until every tensor was seen.
        unseen: The first `MOST_NAMES` series that were never seen; ``unseen_count``: number of all of them.
        unjudged: Number of series that were seen, but too rarely for their rules to judge a value.
        how: ``done``; ``error``: the training raised an error or was interrupted; ``stopped``: the monitor stopped it.
    """

    kind: ClassVar[str] = "ended"
    steps: int
    alarms: int
    seconds: float
    cost: float
    longest_wait: int
    unseen: tuple[str, ...] = field(default=())
    unseen_count: int = 0
    unjudged: int = 0
    how: str = DONE

    def __str__(self) -> str:
        alarms = count_text(self.alarms, "alarm") if self.alarms else "no alarm"
        return (
            f"the monitor of rank {self.rank} ended{ENDS.get(self.how, '')}: {alarms} in {count_text(self.steps, 'step')}, "
            f"{100 * self.cost:.2g} % of the time, {self.coverage}"
        )

    @property
    def coverage(self) -> str:
        """A sentence on the share of the training that was read and judged."""
        often = f"at least once every {self.longest_wait:,} steps" if self.longest_wait > 1 else "in every step"
        unseen = f" except {self.unseen_count:,} series, which were never read" if self.unseen_count else ""
        parts = [f"each tensor was read {often}{unseen}" if self.longest_wait else "no step was read"]
        parts += [f"{self.unjudged:,} series had too few values to be judged"] if self.unjudged else []
        return ", ".join(parts)


EVENTS: Mapping[str, type[Event]] = {
    kind.kind: kind
    for kind in (
        Started, StepSummary, SamplingChanged, Alarm, Verdict, IncidentBegan, AlarmExplained, MonitorFailed, Ended,
    )
}  # fmt: skip
"""Classes of events by kind."""


def join_names(*names: str) -> str:
    """Feature, tensor and statistic of a series as one name; the loss has no tensor."""
    return " ".join(filter(None, names))


def since_text(step: int, suspect: int, subject: str) -> str:
    """Text for the place where an incident began: step, rank and subject."""
    return ", ".join(filter(None, (f"step {step}", f"rank {suspect}" if suspect >= 0 else "no rank named", subject)))


def _since(since: str) -> str:
    return f"; incident since {since}" if since else ""


def _plain_json(value: Any) -> Any:
    if isinstance(value, float) and value - value != 0:
        return str(value)
    if isinstance(value, str):
        return short(value, MOST_TEXT)
    if isinstance(value, Mapping):
        return {short(str(key), MOST_TEXT): _plain_json(item) for key, item in value.items()}
    return [_plain_json(item) for item in value] if isinstance(value, (list, tuple)) else value
