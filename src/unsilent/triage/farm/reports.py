"""Writes synthetic reports in words from what the recorded incident shows, without its cause.

A report has one of several styles: empty, with a hypothesis that nothing supports, vague, with a place (which is sometimes
wrong), with typing errors, or plain. A quarter is empty or misleading. Families of templates share no words, so that a model
trained on the words of one can be tested on the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from unsilent.detectors.series import GRADIENT, LOSS
from unsilent.triage.bundle import Bundle
from unsilent.triage.candidates import candidates_of
from unsilent.triage.findings import Blanks
from unsilent.triage.history import FAR, past_end, past_scores, window

ROSE = 2.0
"""Least factor over the usual value that a person would describe as a rise."""
SLOW = 1.15
"""Least factor over the seconds of the fastest rank at which a person would notice a slower one."""
_EMPTY, _HYPOTHESIS, _WRONG_PLACE, _PLACE, _VAGUE, _TYPING = 0.10, 0.20, 0.25, 0.40, 0.60, 0.75
"""Cumulative shares of styles; the rest is plain."""
TEMPLATES: dict[str, dict[str, tuple[str, ...]]] = {
    "terse": {
        "nonfinite": ("loss is nan since step {step}", "nan at step {step}"),
        "loss": ("the loss jumped {factor}x at step {step}", "loss blew up near step {step}"),
        "gradient": ("grad norm spiked {factor}x at step {step}", "huge grads since step {step}"),
        "silent": ("a rank has no output since step {step}", "log ends early for some rank"),
        "slow": ("steps are slow since step {step}", "slow steps near {step}"),
        "alarm": ("got an alarm at step {step}", "alarm near step {step}"),
        "nothing": ("the run looks odd", "is this run ok?"),
        "vague": ("something is wrong with this run", "the run is broken"),
        "place": ("it is rank {rank}", "look at rank {rank}", "it is in {tensor}"),
        "hypothesis": ("it must be the driver", "bet it is the cable", "we got new nodes, it must be those"),
    },
    "wordy": {
        "nonfinite": ("objective turned invalid around iteration {step}", "undefined numbers appear after iteration {step}"),
        "loss": ("objective climbs roughly {factor}-fold after iteration {step}", "curves went upwards, iteration {step}"),
        "gradient": ("backward magnitudes explode {factor}-fold around iteration {step}",
                     "very large derivatives after iteration {step}"),
        "silent": ("one worker went quiet after iteration {step}", "worker messages cease"),
        "slow": ("throughput dropped after iteration {step}", "iterations take longer, from {step} onwards"),
        "alarm": ("monitoring complained during iteration {step}", "there were warnings around iteration {step}"),
        "nothing": ("unsure whether my experiment trains properly", "curves seem strange"),
        "vague": ("my experiment misbehaves", "help, results seem strange"),
        "place": ("suspect worker {rank}", "probably worker {rank}", "mostly around {tensor}"),
        "hypothesis": ("probably our switch firmware", "someone upgraded cuda yesterday", "cooling seems poor"),
    },
}  # fmt: skip
REPORT_FAMILIES = tuple(TEMPLATES)


@dataclass(frozen=True)
class Symptoms:
    """Symptoms that a person watching the run can see.

    Attributes:
        seen: Names of `TEMPLATES`, with the factor of each.
        ranks: Ranks of the job, the most unusual one first.
        tensor: The most unusual tensor; empty if none is known.
    """

    seen: dict[str, float]
    ranks: tuple[int, ...]
    tensor: str
    step: int


def symptoms_of(bundle: Bundle) -> Symptoms:
    """The symptoms of an incident, from the parts that can be read."""
    candidates, incident = candidates_of(bundle), bundle.incident
    seen: dict[str, float] = {}
    if any(candidate.features.nonfinite > 0 for candidate in candidates.ranks):
        seen["nonfinite"] = 1.0
    for name, feature in (("loss", LOSS), ("gradient", GRADIENT)):
        if (factor := _rise(bundle, feature)) >= ROSE:
            seen[name] = factor
    series, _ = bundle.series()
    ends = {int(rank_series.steps[-1]) for rank_series in series.values() if len(rank_series.steps)}
    if len(incident.ranks) < incident.world_size or len(ends) > 1:
        seen["silent"] = 1.0
    if (factor := _slowness(bundle)) >= SLOW:
        seen["slow"] = factor
    if bundle.alarms():
        seen["alarm"] = 1.0
    tensor = candidates.tensors[0].value if candidates.tensors else ""
    return Symptoms(seen, tuple(candidate.value for candidate in candidates.ranks), tensor, incident.step)


def _rise(bundle: Bundle, feature: str) -> float:
    """The largest factor by which a feature rose above its usual value around the alarm, or 0."""
    before, (first, last) = past_end(bundle, Blanks()), window(bundle, Blanks())
    largest = 0.0
    for rank_series in bundle.series()[0].values():
        columns = [place for place, name in enumerate(rank_series.names) if name[0] == feature]
        rows = (rank_series.steps >= first) & (rank_series.steps <= last)
        is_far = (past_scores(rank_series, before)[rows] >= FAR)[:, columns]
        values = np.where(rank_series.seen & np.isfinite(rank_series.values), np.abs(rank_series.values), np.nan)[
            :, columns
        ]
        for past, now in zip(
            values[rank_series.steps < before].T, np.where(is_far, values[rows], np.nan).T, strict=True
        ):
            known, peaks = past[np.isfinite(past)], now[np.isfinite(now)]
            if len(peaks) and (usual := float(np.median(known))) > 0:
                largest = max(largest, float(peaks.max()) / usual)
    return largest


def _slowness(bundle: Bundle) -> float:
    """Median step time of the slowest rank divided by that of the fastest, or 0 if unknown."""
    times, _ = bundle.times()
    if times is None or not len(times.steps):
        return 0.0
    medians = np.median(np.nansum(times.seconds, 2), 1)
    return float(medians.max() / medians.min()) if medians.min() > 0 else 0.0


def report_of(bundle: Bundle, rng: np.random.Generator, family: str) -> str:
    """A random report on an incident in the words of a report family; may be empty."""
    return report_text(symptoms_of(bundle), rng, family)


def report_text(symptoms: Symptoms, rng: np.random.Generator, family: str) -> str:
    """A random report on symptoms in the words of a report family; may be empty."""
    templates, style = TEMPLATES[family], rng.random()

    def say(name: str, rank: int = 0) -> str:
        text = str(rng.choice(templates[name]))
        factor = symptoms.seen.get(name, 1.0)
        return text.format(step=symptoms.step, factor=f"{factor:.0g}", rank=rank, tensor=symptoms.tensor or "fc")

    seen = [*rng.permutation([*symptoms.seen])[:2].tolist()] or ["nothing"]
    if style < _EMPTY:
        return ""
    if style < _HYPOTHESIS:
        return _joined_sentences(say("vague"), say("hypothesis"))
    if style < _PLACE:
        ranks = symptoms.ranks[1:] if style < _WRONG_PLACE and len(symptoms.ranks) > 1 else symptoms.ranks[:1]
        return _joined_sentences(say(seen[0]), say("place", int(rng.choice(ranks)) if ranks else 0))
    if style < _VAGUE:
        return _joined_sentences(say("vague"))
    text = _joined_sentences(*map(say, seen))
    return _with_typing_errors(text, rng) if style < _TYPING else text


def _joined_sentences(*sentences: str) -> str:
    return ". ".join(sentences) + "\n"


def _with_typing_errors(text: str, rng: np.random.Generator) -> str:
    """The text with two neighbouring letters swapped in some words."""
    words = text.split(" ")
    for place, word in enumerate(words):
        if word.isalpha() and len(word) > 3 and rng.random() < 0.4:
            at = int(rng.integers(len(word) - 1))
            words[place] = word[:at] + word[at + 1] + word[at] + word[at + 2 :]
    return " ".join(words)
