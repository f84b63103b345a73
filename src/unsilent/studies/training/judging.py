"""Trials beside golden: which class each is of, groups of them with intervals, and examples with their curves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from unsilent.outcomes.training import Ending, Thresholds, TrainingOutcome, averaged, judge_ending
from unsilent.statistics.comparing import joint_differences
from unsilent.statistics.intervals import Interval, clopper_pearson
from unsilent.studies.training.floor import Noise
from unsilent.studies.training.kind import Floors
from unsilent.studies.training.records import Contrast, Curve, Group, Judged
from unsilent.studies.training.spec import Floats, TrainingFound, TrainingRow, bare

CRASHED = ("crash", "hang", "raised")
BACKWARD, FORWARD = ("grad_in", "grad_wt"), ("fwd",)
EXAMPLES = 3
"""Curves that are shown of each class."""
QUARTERS = 4
SHARES: Mapping[str, Callable[[Judged], bool]] = {
    "different": lambda one: one.different,
    "harmful": lambda one: one.harmful,
    "latent": lambda one: one.outcome.latent,
}
"""The shares that are reported of every group of trials, in the order of `Group`."""


class Judge:
    """Gives each trial its class.

    Args:
        found: the golden run. floors: a run must be beyond both to be of any class but the masked ones, unless it was lost.
        thresholds: see `Thresholds`.
    """

    def __init__(self, found: TrainingFound, floors: Floors, thresholds: Thresholds) -> None:
        self._found, self._thresholds = found, thresholds
        self._losses, self._metric = np.array(found.losses), np.array(found.metric)
        self._implementation, self._seeds = (Noise(f, thresholds) for f in (floors.implementation, floors.seeds))
        self.told_accuracy = not np.array_equal(self._metric, -self._losses)
        """Whether steps tell an accuracy; a loss has no scale that thresholds could be of."""

    def golden(self, step: int) -> Ending:
        """What golden did from a step on."""
        return Ending(self._metric[step:], self._losses[step:], self._found.test, same_bits=True)

    def ending(self, row: TrainingRow) -> Ending:
        """The whole run from the fault on: where it was not followed to its end, golden's values follow."""
        after = row.struck.step + row.ran
        rest = slice(after, None) if row.reason in ("same-bits", "horizon") else slice(0, 0)
        return Ending(
            np.concatenate([row.metric, self._metric[rest]]),
            np.concatenate([row.losses, self._losses[rest]]),
            row.test,
            same_bits=row.bits,
        )

    def judge(self, row: TrainingRow) -> Judged:
        """The class of one trial."""
        if row.reason in CRASHED:
            return Judged(bare(row), TrainingOutcome.CRASHED, TrainingOutcome.CRASHED)
        golden, ending = self.golden(row.struck.step), self.ending(row)
        gap = row.test_loss - self._found.test_loss
        different = self._implementation.beyond(golden, ending, gap)
        harmful = different and self._seeds.beyond(golden, ending, gap)
        return Judged(bare(row), *(self._class(golden, ending, beyond) for beyond in (harmful, different)))

    def _class(self, golden: Ending, ending: Ending, beyond: bool) -> TrainingOutcome:
        return judge_ending(golden, ending, self._thresholds, beyond_noise=beyond, training_metric=self.told_accuracy)

    def curve(self, row: TrainingRow, judged: Judged, made: bool = False) -> Curve:
        """A trial as it is drawn: metrics averaged over the window of the thresholds."""
        golden, ending = self.golden(row.struck.step), self.ending(row)
        window = self._thresholds.window
        s = row.struck
        return Curve(
            outcome=str(judged.outcome),
            trial=str(row.trial),
            told=f"{s.model} at {s.site}, step {s.step}",
            step=s.step,
            metric=_rounded(averaged(ending.metric, window)),
            golden=_rounded(averaged(golden.metric, window)),
            losses=tuple(x if np.isfinite(x) else None for x in ending.losses.tolist()),
            test=None if np.isnan(row.test) else row.test,
            made=made,
        )


def grouped(trials: Iterable[Judged], key: Callable[[Judged], str], confidence: float) -> tuple[Group, ...]:
    """Trials by what ``key`` says, the largest group first."""
    found: dict[str, list[Judged]] = {}
    for one in trials:
        found.setdefault(key(one), []).append(one)
    names = sorted(found, key=lambda name: (-len(found[name]), name))
    return tuple(group(name, found[name], confidence) for name in names)


def group(name: str, trials: Sequence[Judged], confidence: float) -> Group:
    """Counts and shares of some trials."""
    counts = Counter(str(one.outcome) for one in trials)
    return Group(name, len(trials), dict(counts), *(share(trials, is_so, confidence) for is_so in SHARES.values()))


def share(trials: Sequence[Judged], is_so: Callable[[Judged], bool], confidence: float) -> Interval:
    """The share of trials for which ``is_so`` holds, with limits."""
    return clopper_pearson(sum(map(is_so, trials)), len(trials), confidence)


def groups_of(trials: Sequence[Judged], found: TrainingFound, confidence: float) -> dict[str, tuple[Group, ...]]:
    """By what trials are told apart: phase, layer, fault model, epoch, part of the run."""
    optimizers = " and ".join(dict.fromkeys(found.optimizers)) or "none"
    keys: dict[str, Callable[[Judged], str]] = {
        "phase": lambda one: one.row.struck.phase,
        "layer": lambda one: one.row.struck.layer,
        "fault model": lambda one: one.row.struck.model,
        "part of the run": lambda one: _part(one.row.struck.step, found.steps),
        "optimizer": lambda one: optimizers,
    }
    return {name: grouped(trials, key, confidence) for name, key in keys.items()}


def _part(step: int, steps: int) -> str:
    quarter = step * QUARTERS // steps
    first, last = -(-quarter * steps // QUARTERS), -(-(quarter + 1) * steps // QUARTERS) - 1
    return f"steps {first} to {last}"


def backward_against_forward(trials: Sequence[Judged], confidence: float) -> Iterator[Contrast]:
    """Backward phases against the forward one, by each of `SHARES`, among fault models that were drawn in both.

    Fault models are drawn before the phase, so in both phases they have the same law. Limits of the differences hold
    for all three rows together.
    """
    models = [{one.row.struck.model for one in trials if one.row.struck.phase in side} for side in (BACKWARD, FORWARD)]
    both = models[0] & models[1]
    sides = [
        [one for one in trials if one.row.struck.phase in side and one.row.struck.model in both]
        for side in (BACKWARD, FORWARD)
    ]
    if not all(sides):
        return
    counts = [tuple((sum(map(is_so, side)), len(side)) for side in sides) for is_so in SHARES.values()]
    gaps = joint_differences([(one, other) for one, other in counts], confidence)
    for name, pair, gap in zip(SHARES, counts, gaps, strict=True):
        one, other = (clopper_pearson(*side, confidence) for side in pair)
        yield Contrast(name, "backward", "forward", one, other, gap)


def _rounded(curve: Floats) -> tuple[float, ...]:
    return tuple(np.round(curve, 5).tolist())
