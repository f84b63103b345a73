"""A hand-written runbook that orders the queries on an incident by its signals.

The runbook was written by hand, from publications on incidents of trainings, before any collection of incidents existed to
which it could have been fitted. A model that learns from executed queries has to be better than this order.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from unsilent.detectors.series import LOSS
from unsilent.events.event_kinds import FINGERPRINT, REPLICAS
from unsilent.triage.bundle import Bundle
from unsilent.triage.candidates import Candidates
from unsilent.triage.findings import Query
from unsilent.triage.history import FAR
from unsilent.triage.possible_queries import possible_queries
from unsilent.triage.queries.compare_settings import differing_settings
from unsilent.triage.queries.table import TEMPLATES

SLOW, STUCK, NONFINITE, LOSS_ROSE, DIFFER, DISK = "slow", "stuck", "not finite", "loss rose", "ranks differ", "disk"
_SYMPTOMS = {
    SLOW: r"\bslow\w*|\bstraggl\w+|throughput|longer than|takes long",
    STUCK: r"\bstuck\b|\bhang\w*|\bhung\b|\bfroze\w*|\bfrozen\b|deadlock\w*|no progress|\btime[ds]? ?out\b|\bdied\b|\bkilled\b",
    NONFINITE: r"\bnans?\b|\binf\b|\binfinit\w+|not finite|non-?finite|overflow\w*",
    LOSS_ROSE: r"loss\W+(?:\w+\W+){0,3}(?:rose|ris\w+|spik\w+|jump\w*|diverg\w+|went up|goes up|higher|explod\w+|blew up)"
    r"|(?:spike|jump|rise) (?:in|of) (?:the )?loss",
    DIFFER: r"\breplicas?\b|ranks (?:\w+ )?(?:differ|disagree|diverge)\w*|out of sync|desync\w*",
    DISK: r"\bdisks?\b|no space|\bquota\b|\bfile ?system\b",
}  # fmt: skip
_PATTERNS = {name: re.compile(pattern, re.IGNORECASE) for name, pattern in _SYMPTOMS.items()}


def symptoms_in(report: str) -> frozenset[str]:
    """Symptoms that a report mentions, even if it denies them."""
    return frozenset(name for name, pattern in _PATTERNS.items() if pattern.search(report))


NEXT_RULE, NEXT_QUERY, NEXT_CANDIDATE = 0.9, 0.85, 0.8
"""Factors of the score of each next rule, next query of a rule and next candidate of a blank."""


@dataclass(frozen=True)
class Signals:
    """Signals of an incident that are known before any query.

    Attributes:
        features: Features of alarms.
        ranks: Ranks that have alarms.
        nonfinite: Whether an alarm reports a value that is not finite, or a series has one.
        apart: Whether only one rank left its own past first, and is far from the others.
        early: Whether something left its own past before the alarm.
        ended: Whether series of a rank end before those of another one.
        logged: Whether a log has a line that looks like an error.
        settings_differ: Whether the configuration differs from that of the earlier job.
        symptoms: Symptoms named in the report.
    """

    bundle: Bundle
    candidates: Candidates
    features: frozenset[str]
    ranks: frozenset[int]
    nonfinite: bool
    apart: bool
    early: bool
    ended: bool
    logged: bool
    settings_differ: bool
    symptoms: frozenset[str]


def signals_of(bundle: Bundle, candidates: Candidates) -> Signals:
    """The signals of an incident."""
    alarms = bundle.alarms()
    known = [candidate.features for candidate in candidates.ranks]
    onsets = [features.onset for features in known if features.onset is not None]
    ends = [int(rank_series.steps[-1]) for rank_series in bundle.series()[0].values() if len(rank_series.steps)]
    begin = [features for features in known if features.onset is not None and features.onset == min(onsets)]
    return Signals(
        bundle, candidates, features=frozenset(alarm.feature for alarm in alarms),
        ranks=frozenset(alarm.rank for alarm in alarms),
        nonfinite=any(not math.isfinite(alarm.value) for alarm in alarms) or any(features.nonfinite > 0 for features in known),
        apart=len(begin) == 1 and begin[0].peer_score >= FAR, early=min(onsets, default=0) < 0,
        ended=max(ends, default=0) - min(ends, default=0) > 1, logged=any(bundle.logs()[0].values()),
        settings_differ=bool(differing_settings(bundle)), symptoms=symptoms_in(bundle.report()[0] or ""),
    )  # fmt: skip


@dataclass(frozen=True)
class Rule:
    """A rule that puts some queries first if a signal is present.

    Attributes:
        signal: Signal in words, which is the reason for the queries.
        applies: Function that returns whether the signal is present.
        queries: Names of templates, the most useful one first.
    """

    signal: str
    applies: Callable[[Signals], bool]
    queries: tuple[str, ...]


READ_VERDICT = "read-verdict"


def has_fault_verdict(bundle: Bundle) -> bool:
    """Whether the monitor recorded a fault verdict other than "undetermined"."""
    verdict = bundle.incident.fault_verdict
    return verdict is not None and verdict.kind != "undetermined"


RULES = (
    Rule(
        "the monitor executed the step again and named a kind of fault",
        lambda s: has_fault_verdict(s.bundle), (READ_VERDICT,),
    ),
    Rule(
        "bits of a parameter changed between two steps",
        lambda s: FINGERPRINT in s.features or s.bundle.incident.reason == FINGERPRINT,
        ("compare-parameters", "inspect-state", "test-device", "verify-checkpoints"),
    ),
    Rule(
        "parameters of ranks differ, or the report says so", lambda s: REPLICAS in s.features or DIFFER in s.symptoms,
        ("compare-parameters", "inspect-state", "compare-gradients", "find-onset", "verify-checkpoints"),
    ),
    Rule("series of a rank end before those of another one", lambda s: s.ended, ("read-log", "read-flight-record", "find-onset")),
    Rule(
        "the report says that it hangs or ended", lambda s: STUCK in s.symptoms,
        ("read-flight-record", "read-log", "find-straggler"),
    ),
    Rule(
        "the report says that it is slow", lambda s: SLOW in s.symptoms,
        ("find-straggler", "read-flight-record", "read-log", "compare-settings"),
    ),
    Rule(
        "the report names the disk", lambda s: DISK in s.symptoms, ("read-log", "verify-checkpoints", "compare-checkpoints"),
    ),
    Rule("a log has an error", lambda s: s.logged, ("read-log", "read-flight-record", "scan-nonfinite")),
    Rule(
        "a value is not finite, or the report says so", lambda s: s.nonfinite or NONFINITE in s.symptoms,
        ("scan-nonfinite", "inspect-batch", "inspect-state", "compare-gradients", "compare-checkpoints", "replay-step"),
    ),
    Rule(
        "one rank is far from the others", lambda s: s.apart,
        ("compare-gradients", "inspect-batch", "inspect-state", "replay-step", "test-device"),
    ),
    Rule("settings are not those of the earlier job", lambda s: s.settings_differ, ("compare-settings", "find-onset")),
    Rule(
        "several ranks have alarms", lambda s: len(s.ranks) > 1,
        ("inspect-state", "compare-gradients", "find-onset", "compare-checkpoints", "verify-checkpoints", "compare-settings"),
    ),
    Rule(
        "only the loss has an alarm, or the report says that it rose",
        lambda s: s.features == {LOSS} or (not s.features and LOSS_ROSE in s.symptoms),
        ("inspect-batch", "find-onset", "compare-checkpoints", "compare-settings"),
    ),
    Rule(
        "something left its own past before the alarm", lambda s: s.early, ("find-onset", "inspect-state", "verify-checkpoints"),
    ),
    Rule(
        "there is one rank, and none to compare it with", lambda s: s.bundle.incident.world_size == 1,
        ("inspect-batch", "inspect-state", "find-onset", "replay-step", "rerun-seeded"),
    ),
    Rule(
        "it is cheap, and says where to look", lambda s: s.candidates.has_series,
        ("find-onset", "compare-gradients", "scan-nonfinite", "inspect-batch", "inspect-state"),
    ),
    Rule(
        "there is no alarm", lambda s: not s.features,
        ("read-log", "find-straggler", "read-flight-record", "compare-settings", "verify-checkpoints"),
    ),
    Rule("nothing else was seen", lambda _: True, tuple(TEMPLATES)),
)  # fmt: skip
"""Rules in order; the first one that applies and has a query gives the query's score and reason."""


@dataclass(frozen=True)
class ScoredQuery:
    """A query, its score from 0 to 1 for how informative it is expected to be, and the reason."""

    query: Query
    score: float
    reason: str


def scored_queries(signals: Signals) -> list[ScoredQuery]:
    """Every possible query, the most informative one first."""
    templates = scored_templates(signals)
    result = []
    for query in possible_queries(signals.bundle, signals.candidates):
        score, rule = templates[query.query.template]
        reason = "; ".join(filter(None, (rule.signal, query.reason)))
        result.append(ScoredQuery(query.query, score * NEXT_CANDIDATE**query.place, reason))
    return sorted(result, key=lambda query: (-query.score, TEMPLATES[query.query.template].seconds))


def scored_templates(signals: Signals) -> dict[str, tuple[float, Rule]]:
    """The score of each template, and the rule that determines it."""
    applying = [rule for rule in RULES if rule.applies(signals)]
    result = {}
    for name in TEMPLATES:
        place, rule = next((place, rule) for place, rule in enumerate(applying) if name in rule.queries)
        result[name] = NEXT_RULE**place * NEXT_QUERY ** rule.queries.index(name), rule
    return result
