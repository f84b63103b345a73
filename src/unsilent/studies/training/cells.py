"""What tables and sentences say of struck trainings, piece by piece: shares, classes, groups, and the words for them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from unsilent.outcomes.training import TrainingOutcome
from unsilent.report.text import clean, counted, shown
from unsilent.statistics.intervals import Interval
from unsilent.studies.training.records import Group, Part, TrainingResult
from unsilent.studies.training.spec import PHASES

ANY = "any"
KINDS = {"first": "first moment", "second": "second moment", "moving": "moving statistic", ANY: "any of these"}
TOLD = {
    TrainingOutcome.MASKED_BITWISE: "ends with golden's bits",
    TrainingOutcome.MASKED_BENIGN: "other bits, nothing that counts beyond both noise floors",
    TrainingOutcome.IMMEDIATE_NAN: "loss not finite in the fault's step",
    TrainingOutcome.SHORT_TERM_NAN: "loss not finite within {short_term} steps",
    TrainingOutcome.SHARP_DEGRADE: "drops at once, low at the end",
    TrainingOutcome.SLOW_DEGRADE: "declines over more steps, or loses its loss later",
    TrainingOutcome.SHARP_SLOW_DEGRADE: "drops at once, declines on",
    TrainingOutcome.LOW_TEST: "trains as it should, low on held-out samples",
    TrainingOutcome.IMPROVED: "beyond noise the better way",
    TrainingOutcome.CRASHED: "died, raised, or hung",
}
BRIEF = {
    TrainingOutcome.MASKED_BITWISE: "golden's bits",
    TrainingOutcome.MASKED_BENIGN: "no difference beyond noise",
    TrainingOutcome.IMMEDIATE_NAN: "loss lost in that step",
    TrainingOutcome.SHORT_TERM_NAN: "loss lost in {short_term} steps",
    TrainingOutcome.SHARP_DEGRADE: "drops at once, stays low",
    TrainingOutcome.SLOW_DEGRADE: "declines in more steps",
    TrainingOutcome.SHARP_SLOW_DEGRADE: "drops at once, declines on",
    TrainingOutcome.LOW_TEST: "low on held-out data alone",
    TrainingOutcome.IMPROVED: "better, beyond noise",
    TrainingOutcome.CRASHED: "died, raised, or hung",
}
"""`TOLD` for a narrow column."""
SOURCES = {
    "short_term": ("steps after the fault's in which a lost loss is short-term", "ours"),
    "window": ("steps that the training metric is averaged over", "ours"),
    "sharp_within": ("steps after the fault's in which a drop is sharp", "ours"),
    "drop": (
        "share of golden's metric that a sharp drop takes",
        "ours; a published slow decline loses 0.18 in one step",
    ),
    "gap": ("of the training metric at the end that is low", "README of He et al.'s artifact: masked is about 2 %"),
    "end": ("last steps that the metric is averaged over for that", "ours"),
    "test_gap": ("of held-out accuracy that is low", "ours, as gap"),
}
"""What each threshold is, and where its default comes from."""


def told(outcome: str, result: TrainingResult, brief: bool = False) -> str:
    """What a class is, in a few words."""
    words = BRIEF if brief else TOLD
    return words[TrainingOutcome(outcome)].format(short_term=result.thresholds.short_term)


def rate(found: Interval) -> str:
    """``3.8 % [2.5, 5.6]``; of no event or of nothing but events the one limit that there is."""
    if found.estimate is None:
        return "no trial"
    text = shown(found.estimate, found.low, found.high)
    if found.estimate == 0:
        return f"none (at most {text.high} %)"
    if found.estimate == 1:
        return f"all (at least {text.low} %)"
    return f"{text.estimate} % {text.limits}"


def events(found: Interval) -> int:
    """Of ``n`` trials how many; 0 where there is none."""
    return round((found.estimate or 0.0) * found.n)


def of_all(found: Interval, noun: str = "trial") -> str:
    """``10 of 679 trials, 1.5 % [0.70, 2.7]``, ``none of 679 trials (at most 0.55 %)``."""
    if not found.n:
        return f"no {noun}"
    count, text = events(found), shown(found.estimate, found.low, found.high)
    if not count:
        return f"none of {counted(found.n, noun)} (at most {text.high} %)"
    if count == found.n:
        return f"all of {counted(found.n, noun)} (at least {text.low} %)"
    return f"{count:,} of {counted(found.n, noun)}, {text.estimate} % {text.limits}"


def thresholds(result: TrainingResult) -> list[tuple[str, str, str, str]]:
    """Name, value, what it is, and where its default comes from."""
    return [(name, f"{getattr(result.thresholds, name):g}", *SOURCES[name]) for name in SOURCES]


def part_name(part: Part) -> str:
    """``block1 (param)``."""
    return clean(part.part or part.target) + (f" ({clean(part.what)})" if part.what else "")


def example(result: TrainingResult, outcome: str) -> str:
    """The first stored example of a class; nothing where there is none."""
    found = next((curve for curve in result.curves if curve.outcome == outcome), None)
    if found is None:
        return ""
    return clean(found.trial) + (" (made by hand)" if found.made else "")


def plainly(share: Interval) -> str:
    """``3.8 [2.5, 5.6]`` in percent, ``0 [0, 31]``; ``–`` of no trial."""
    return in_percent(share).replace(" %", "") if share.n else "–"


def counts_text(counts: Mapping[str, int]) -> str:
    """``8×immediate-nan, 9×low-test``: of all classes but the masked ones; no blank parts a count from its class."""
    return ", ".join(f"{counts[name]:,}×{name}" for name in seen(counts) if not name.startswith("masked"))


def ordered_groups(result: TrainingResult) -> dict[str, list[Group]]:
    """Groups by what trials are told apart, in the order of reading: phases as a step has them, parts of the run by number."""
    found = {}
    for kind, groups in result.groups.items():
        name = "what was struck" if kind == "phase" and result.parts else kind
        found[name] = sorted(groups, key=_phase) if kind == "phase" else list(groups)
        if kind == "part of the run":
            found[name] = sorted(groups, key=_numbers)
    return found


def worst_first(groups: Sequence[Group]) -> list[Group]:
    """Groups with the largest harmful share first; among equals those with more different trials, then with more trials."""

    def order(group: Group) -> tuple[float, float, int, str]:
        return -(group.harmful.estimate or 0.0), -(group.different.estimate or 0.0), -group.n, group.name

    return sorted(groups, key=order)


def _phase(group: Group) -> int:
    return PHASES.index(group.name) if group.name in PHASES else len(PHASES)


def _numbers(group: Group) -> list[int]:
    return [int(number) for number in re.findall(r"[0-9]{1,12}", group.name)]


def seen(counts: Mapping[str, int]) -> list[str]:
    """Classes with at least one trial, in their order."""
    return [str(outcome) for outcome in TrainingOutcome if counts.get(str(outcome))]


def in_percent(found: Interval) -> str:
    """``3.8 % [2.5, 5.6]``, ``0 % [0, 31]``."""
    text = shown(found.estimate, found.low, found.high)
    return f"{text.estimate if found.estimate else 0} % {text.limits}"


def top(found: Interval) -> str:
    return shown(found.estimate, found.low, found.high).high
