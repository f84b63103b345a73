"""Candidates for the blanks of queries: ranks, tensors and windows of an incident, described by features."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np

from unsilent.detectors.series import Floats
from unsilent.triage.bundle import Bundle, SeriesName
from unsilent.triage.findings import Blanks
from unsilent.triage.history import FAR, past_end, past_gaps, past_scores, peer_scores, window

V = TypeVar("V", bound=Hashable)
NARROW, WIDE = 2, 8
"""Steps before and after an onset in a window, which is a part of the window that queries examine by default."""


@dataclass(frozen=True, kw_only=True)
class Features:
    """Features of a candidate, computed over the steps around the alarm.

    Attributes:
        peer_score: Largest number of deviations from other ranks; infinite if only this candidate is not finite; 0 if unknown.
        position: Position from 1, the most unusual candidate, to 0, among those of the incident.
        onset: Steps from the alarm to the first value far from its own past (negative: before); ``None`` if there is none.
        past_ratio: Largest factor between a value and the usual one of its past, up or down; 1 if unknown.
        nonfinite: Share of values that are not finite.
        alarms: Number of alarms that name the candidate.
    """

    peer_score: float = 0.0
    position: float = 0.0
    onset: int | None = None
    past_ratio: float = 1.0
    nonfinite: float = 0.0
    alarms: int = 0

    @property
    def unusual(self) -> tuple[bool, float, bool, float, float]:
        """Sort key that is larger for more unusual candidates: alarms first, then an early onset."""
        onset = math.inf if self.onset is None else self.onset
        return self.alarms > 0, -onset, self.nonfinite > 0, self.peer_score, self.past_ratio


@dataclass(frozen=True)
class Candidate(Generic[V]):
    """A possible value of a blank, with its features."""

    value: V
    features: Features


@dataclass(frozen=True)
class Candidates:
    """All candidates of an incident, the most unusual ones first.

    Attributes:
        windows: Windows of steps around the onset and around the alarm.
        has_series: Whether any series could be read.
    """

    ranks: tuple[Candidate[int], ...]
    tensors: tuple[Candidate[str], ...]
    windows: tuple[Candidate[tuple[int, int]], ...]
    has_series: bool


def candidates_of(bundle: Bundle) -> Candidates:
    """The candidates of an incident, from the parts that can be read."""
    series, _ = bundle.series()
    before, (first, last) = past_end(bundle, Blanks()), window(bundle, Blanks())
    peers = dict.fromkeys(series, np.zeros((0, 0)))
    steps = np.zeros(0, np.int64)
    names: tuple[SeriesName, ...] = ()
    if len(series) > 1:
        steps, names, peers = peer_scores(series, before)
    by_rank: dict[int, list[Features]] = defaultdict(list)
    by_tensor: dict[str, list[Features]] = defaultdict(list)
    for rank, rank_series in series.items():
        rows = (rank_series.steps >= first) & (rank_series.steps <= last)
        scores, numbers = past_scores(rank_series, before)[rows], rank_series.steps[rows]
        near = peers[rank][(steps >= first) & (steps <= last)]
        of_peers = dict(zip(names, _largest(near), strict=False))
        bad = (rank_series.seen & ~np.isfinite(rank_series.values))[rows].sum(0) / np.maximum(
            1, rank_series.seen[rows].sum(0)
        )
        # The first row of each column.
        far = np.vstack([scores >= FAR, np.ones(len(rank_series.names), np.bool_)]).argmax(0).tolist()
        onsets = [int(numbers[row]) - bundle.incident.step if row < len(numbers) else None for row in far]
        with np.errstate(over="ignore"):
            ratios = np.exp(_largest(np.abs(past_gaps(rank_series, before)[rows]))).tolist()
        columns = zip(rank_series.names, onsets, ratios, bad.tolist(), strict=True)
        for name, onset, ratio, share in columns:
            series_features = Features(
                peer_score=of_peers.get(name, 0.0), onset=onset, past_ratio=ratio, nonfinite=share
            )
            by_rank[rank].append(series_features)
            if name[1]:
                by_tensor[name[1]].append(series_features)
    alarms = bundle.alarms()
    rank_alarms = Counter(alarm.rank for alarm in alarms)
    rank_alarms.update(rank for alarm in alarms for rank in alarm.ranks)
    ranks = _sorted_candidates({rank: by_rank.get(rank, []) for rank in bundle.incident.ranks}, rank_alarms)
    tensors = _sorted_candidates(by_tensor, Counter(alarm.tensor for alarm in alarms if alarm.tensor))
    begin = min((candidate.features.onset for candidate in ranks if candidate.features.onset is not None), default=None)
    middle = bundle.incident.step + (begin or 0)
    features = Features(onset=begin, alarms=len(alarms), position=1.0)
    spans = dict.fromkeys((max(0, first, middle - width), min(last, middle + width)) for width in (NARROW, WIDE))
    return Candidates(ranks, tensors, tuple(Candidate(span, features) for span in spans), bool(series))


def _sorted_candidates(parts: Mapping[V, list[Features]], alarms: Mapping[V, int]) -> tuple[Candidate[V], ...]:
    """Candidates with the combined features of their series, the most unusual one first."""
    every = [
        Candidate(value, Features(
            peer_score=max((features.peer_score for features in features_of_value), default=0.0),
            onset=min((features.onset for features in features_of_value if features.onset is not None), default=None),
            past_ratio=max((features.past_ratio for features in features_of_value), default=1.0),
            nonfinite=sum(features.nonfinite for features in features_of_value) / max(1, len(features_of_value)),
            alarms=alarms.get(value, 0),
        ))
        for value, features_of_value in parts.items()
    ]  # fmt: skip
    every.sort(key=lambda candidate: candidate.features.unusual, reverse=True)
    last = max(1, len(every) - 1)
    return tuple(
        Candidate(candidate.value, replace(candidate.features, position=1 - place / last))
        for place, candidate in enumerate(every)
    )


def _largest(values: Floats) -> Floats:
    """The largest known value of each column, or 0 if none is known."""
    result: Floats = np.nan_to_num(values, nan=0.0, posinf=np.inf).max(0, initial=0.0)
    return result
