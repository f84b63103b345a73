"""Numerical features of incidents and of query candidates, by name, without rank numbers or tensor names.

Unknown values are 0, and another feature shows whether the value is known. Names are phrases that are used in reasons.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from unsilent.detectors.series import FEATURES, GRADIENT, LOSS, Bools, Floats
from unsilent.events.event_kinds import FINGERPRINT, REPLICAS
from unsilent.events.incident_folder import BATCH_FILE
from unsilent.timeline.stragglers import differences_from_others
from unsilent.triage.bundle import Bundle, RankSeries
from unsilent.triage.findings import Blanks, Query
from unsilent.triage.history import FAR, past_end, past_gaps, past_scores
from unsilent.triage.possible_queries import PossibleQuery
from unsilent.triage.queries.compare_settings import differing_settings
from unsilent.triage.runbook import DIFFER, DISK, LOSS_ROSE, NONFINITE, SLOW, STUCK, Signals

Numbers = dict[str, float]
T = TypeVar("T")
LOGGED = {
    "no space": "no space left", "time": "timed out|timeout|watchdog", "memory": "out of memory", "not finite": r"\bnan\b",
    "peer": "by peer|broken pipe|connection", "end of a process": "killed|aborted|segmentation|core dumped|sigterm|signal #",
}  # fmt: skip
"""Words that a masked line may contain, by feature."""
SYMPTOMS = (SLOW, STUCK, NONFINITE, LOSS_ROSE, DIFFER, DISK)
LARGEST = 1e12
"""Largest number; larger and infinite ones count as this."""


def incident_features(signals: Signals) -> Numbers:
    """Features of an incident, with equal names in equal order for all incidents."""
    bundle, world = signals.bundle, max(1, signals.bundle.incident.world_size)
    alarms, known = bundle.alarms(), [candidate.features for candidate in signals.candidates.ranks]
    peers = sorted((features.peer_score for features in known), reverse=True)
    onsets = [features.onset for features in known if features.onset is not None]
    named = Counter(alarm.feature for alarm in alarms)
    return {
        **{f"alarms of {name}": _log(named[name]) for name in (*FEATURES, FINGERPRINT, REPLICAS)},
        "alarms of other kinds": _log(sum(named.values()) - sum(named[kind] for kind in (*FEATURES, FINGERPRINT, REPLICAS))),
        "tensors with alarms": _log(len({alarm.tensor for alarm in alarms})),
        "share of ranks with alarms": len({alarm.rank for alarm in alarms}) / world,
        "ranks": math.log2(world),
        "whether the alarm names a rank": float(bundle.incident.suspect >= 0),
        "distance from other ranks": _log(peers[0] if peers else 0.0),
        "distance of the second rank from others": _log(peers[1] if len(peers) > 1 else 0.0),
        "factor to its own past": _log(max((features.past_ratio for features in known), default=1.0) - 1),
        "share of values that are not finite": max((features.nonfinite for features in known), default=0.0),
        "share of ranks with such values": sum(features.nonfinite > 0 for features in known) / world,
        "whether something left its past": float(bool(onsets)),
        "steps from the alarm to the first unusual one": float(min(onsets, default=0)),
        "share of ranks that left their past": len(onsets) / world,
        "share of ranks that left it first": onsets.count(min(onsets)) / world if onsets else 0.0,
        "whether one rank is apart": float(signals.apart),
        **_series_features(bundle),
        **_folder_part_features(signals, world),
    }  # fmt: skip


def _series_features(bundle: Bundle) -> Numbers:
    """Features of how long unusual values last, and in which direction they changed."""
    series, before = bundle.series()[0], past_end(bundle, Blanks())
    last = max((int(rank_series.steps[-1]) for rank_series in series.values() if len(rank_series.steps)), default=0)
    ends = [last - int(rank_series.steps[-1]) if len(rank_series.steps) else last for rank_series in series.values()]
    runs = [_run(rank_series, before) for rank_series in series.values()]
    longest = max(runs, default=(0.0, 0.0, 0.0))
    result = {
        "share of series that left their past": longest[0],
        "share of later steps that are unusual": longest[1],
        "whether one step alone is unusual": longest[2],
        "whether series of a rank end early": float(any(end > 0 for end in ends)),
        "steps by which they end early": _log(max(ends, default=0)),
    }
    for feature in (GRADIENT, LOSS):
        gaps = [_shift(rank_series, before, bundle.incident.step, feature) for rank_series in series.values()]
        at, after = (np.array([gap[place] for gap in gaps if math.isfinite(gap[place])]) for place in (0, 1))
        result |= {
            f"change of {feature} at the alarm": _largest_change(at), f"change of {feature} after it": _largest_change(after),
            f"difference between ranks in it, {feature}": _log(float(np.ptp(after)) if len(after) else 0.0),
        }  # fmt: skip
    return result


def _run(series: RankSeries, before: int) -> tuple[float, float, float]:
    """Three features of how long the values of a rank are unusual.

    They are the share of unusual series in the first unusual step, the share of unusual steps from there on, and 1 if
    only one step is unusual.
    """
    is_late = series.steps >= before
    is_far: Bools = np.greater_equal(past_scores(series, before)[is_late], FAR)
    steps: Bools = np.asarray(is_far.any(1))
    if not steps.any():
        return 0.0, 0.0, 0.0
    first = int(steps.argmax())
    return float(is_far[first].mean()), float(steps[first:].mean()), float(steps.sum() == 1)


def _shift(series: RankSeries, before: int, step: int, feature: str) -> tuple[float, float]:
    """Largest logarithmic change of a feature near the alarm, and its median change afterwards.

    NaN if unknown.
    """
    columns = [place for place, name in enumerate(series.names) if name[0] == feature]
    gaps = past_gaps(series, before)[:, columns]
    near, after = (gaps[rows] for rows in (abs(series.steps - step) <= 2, series.steps > step + 2))
    near, after = (gaps_there[np.isfinite(gaps_there)] for gaps_there in (near, after))
    largest = near[np.abs(near).argmax()] if near.size else math.nan
    return float(largest), float(np.median(after)) if after.size else math.nan


def _largest_change(changes: Floats) -> float:
    """The change with the largest magnitude, with its sign, or 0 if there is none."""
    return float(np.clip(changes[np.abs(changes).argmax()], -30, 30)) if len(changes) else 0.0


def _folder_part_features(signals: Signals, world: int) -> Numbers:
    """Features of the available parts, logs, settings and symptoms in the report."""
    bundle = signals.bundle
    parts, logs, report = bundle.parts()[0], bundle.logs()[0], bundle.report()[0]
    lines = [error for errors in logs.values() for error in errors]
    logged = " ".join(dict.fromkeys(error.masked.lower() for error in lines))
    return {
        "share of ranks with series": len(bundle.series()[0]) / world,
        "share of ranks with a batch": sum(part.file(BATCH_FILE) is not None for part in parts.values()) / world,
        "share of ranks with a log": len(logs) / world,
        "share of ranks with a flight record": len(bundle.dumps()[0]) / world,
        "whether there is a report": float(bool(report)),
        "checkpoints": float(len(bundle.incident.checkpoints)),
        "whether there is a verdict": float(bundle.incident.fault_verdict is not None),
        "settings that are not those of the earlier job": _log(len(differing_settings(bundle))),
        "share of ranks that logged an error": sum(bool(errors) for errors in logs.values()) / world,
        "share of errors that name their rank": sum(error.names_rank for error in lines) / max(1, len(lines)),
        **{f"whether a log has: {name}": float(re.search(words, logged) is not None) for name, words in LOGGED.items()},
        **{f"whether the report says: {name}": float(name in signals.symptoms) for name in SYMPTOMS},
        **_time_features(bundle),
    }


def _time_features(bundle: Bundle) -> Numbers:
    """Features of late ranks in the last half of the steps, and of the growth of step times."""
    times, _ = bundle.times()
    result = {
        "excess of a rank in a part of the step": 0.0,
        "excess of a rank in the loader": 0.0,
        "growth of steps": 0.0,
    }
    if times is not None and len(times.steps) > 3:
        seconds = np.maximum(np.nan_to_num(times.seconds), 0)
        whole = np.maximum(np.median(seconds.sum(2), 0), 1e-9)
        half, usual = len(whole) // 2, float(np.median(whole))
        if len(times.ranks) > 1:
            late = np.array([differences_from_others(seconds[:, half:], place) for place in range(len(seconds))])
            excess = np.median(late, 1).max(0) / usual
            result["excess of a rank in a part of the step"] = _log(float(excess.max()))
            of_loader = [float(value) for name, value in zip(times.parts, excess, strict=True) if name == "loader"]
            result["excess of a rank in the loader"] = _log(max(of_loader, default=0.0))
        result["growth of steps"] = math.log(float(np.median(whole[half:]) / np.median(whole[:half])))
    return {"whether seconds of steps are known": float(times is not None), **result}


def candidate_features(query: PossibleQuery, signals: Signals, report: str) -> Numbers:
    """Features of a query's candidate, with equal names in equal order for all queries."""
    own_features, known = query.features, [candidate.features for candidate in signals.candidates.ranks]
    return {
        **{f"a {name}": float(query.blank == name) for name in ("rank", "steps", "tensor")},
        "place": float(query.place),
        "alarms": _log(own_features.alarms if own_features else 0),
        "distance from others": _log(own_features.peer_score if own_features else 0.0),
        "position": own_features.position if own_features else 0.0,
        "whether it left its past": float(own_features is not None and own_features.onset is not None),
        "steps from the alarm to its first unusual one": float(own_features.onset or 0) if own_features else 0.0,
        "factor to its past": _log(own_features.past_ratio - 1 if own_features else 0.0),
        "share not finite": own_features.nonfinite if own_features else 0.0,
        "whether the report names it": float(is_mentioned(query.query, report)),
        "whether one rank is apart": float(signals.apart),
        "ranks": math.log2(max(1, signals.bundle.incident.world_size)),
        "share of ranks that left their past": sum(features.onset is not None for features in known)
        / max(1, len(known)),
        "share of ranks with alarms": len(signals.ranks) / max(1, signals.bundle.incident.world_size),
    }


def is_mentioned(query: Query, report: str) -> bool:
    """Whether a report mentions the query's rank, its tensor or layer, or a step of its window."""
    blanks = query.blanks
    if blanks.rank is not None:
        return (
            re.search(rf"\b(?:rank|worker|process|gpu|device)[ #-]*{blanks.rank}\b", report, re.IGNORECASE) is not None
        )
    if blanks.tensor is not None:
        names = {blanks.tensor, blanks.tensor.rpartition(".")[0]} - {""}
        return any(re.search(rf"(?<![\w.]){re.escape(name)}(?!\w)", report) for name in names)
    if blanks.steps is not None:
        first, last = blanks.steps
        return any(
            first <= int(number) <= last
            for number in re.findall(r"\b(?:step|iteration) #?(\d{1,9})\b", report, re.IGNORECASE)
        )
    return False


def one_hot(value: T, of: Sequence[T]) -> list[float]:
    """A list with 1 at the position of the value and 0 elsewhere."""
    return [float(entry == value) for entry in of]


def _log(value: float) -> float:
    """The logarithm of 1 + the value, or 0 for a value that is not positive."""
    return math.log1p(min(value, LARGEST)) if value > 0 else 0.0
