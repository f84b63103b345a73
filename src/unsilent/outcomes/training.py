"""Outcome class of a faulty training run compared with its fault-free twin, by adjustable thresholds.

| class | meaning |
|---|---|
| `masked-bitwise` | the final state has the bits of the golden one |
| `masked-benign` | bits differ, but nothing that matters |
| `immediate-nan` | the loss is not finite in the step of the fault |
| `short-term-nan` | the loss is not finite within a few steps |
| `sharp-degrade` | the training metric drops at once and is low at the end |
| `slow-degrade` | the training metric declines over more steps, or the loss is not finite later |
| `sharp-slow-degrade` | the training metric drops at once, declines further, and is low at the end |
| `low-test` | the training metric is normal, held-out accuracy is low |
| `improved` | held-out accuracy is better, beyond noise |
| `crashed` | the process crashed, raised or hung |

Names and the 2 % of *masked* are those of the artifact of He et al. (ISCA 2023, DOI 10.1145/3579371.3589105): its
README distinguishes masked, immediate and slow degrade; the other names are those of its files, whose definitions are
not published. Thresholds without a published value are ours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import TYPE_CHECKING

from unsilent.basics.errors import UsageError
from unsilent.basics.lazy_numpy import np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Curve = NDArray[np.float64]


class TrainingOutcome(StrEnum):
    """Outcome class of a faulty training run."""

    MASKED_BITWISE = "masked-bitwise"
    MASKED_BENIGN = "masked-benign"
    IMMEDIATE_NAN = "immediate-nan"
    SHORT_TERM_NAN = "short-term-nan"
    SHARP_DEGRADE = "sharp-degrade"
    SLOW_DEGRADE = "slow-degrade"
    SHARP_SLOW_DEGRADE = "sharp-slow-degrade"
    LOW_TEST = "low-test"
    IMPROVED = "improved"
    CRASHED = "crashed"

    @property
    def masked(self) -> bool:
        """Whether the run ended like the golden one, or without a difference that matters."""
        return self in _MASKED

    @property
    def harmful(self) -> bool:
        """Whether the fault made the training run worse or ended it."""
        return not self.masked and self is not TrainingOutcome.IMPROVED

    @property
    def latent(self) -> bool:
        """Whether the run was harmed without an error message."""
        return self in _LATENT


_MASKED = (TrainingOutcome.MASKED_BITWISE, TrainingOutcome.MASKED_BENIGN)
_LATENT = (
    TrainingOutcome.SHARP_DEGRADE,
    TrainingOutcome.SLOW_DEGRADE,
    TrainingOutcome.SHARP_SLOW_DEGRADE,
    TrainingOutcome.LOW_TEST,
)


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Thresholds of the outcome classes; shares are fractions of 1, so 0.02 is two points of accuracy.

    Attributes:
        short_term: Number of steps after the step of the fault within which a loss that is not finite counts as
            short-term (ours).
        window: Number of steps over which the training metric is averaged (ours).
        sharp_within: Number of steps after the step of the fault within which a drop counts as sharp (ours).
        drop: Share of golden's metric that a sharp drop exceeds (ours; the artifact's slow sample loses 18 % in the first
            step after the fault, 44 % by the second, 67 % by the fourth).
        gap: Gap of the training metric, averaged over the last ``end`` steps, from which it counts as low (the
            artifact's README: masked is within about 2 %).
        end: Number of steps at the end over which ``gap`` is averaged (ours).
        test_gap: Gap of held-out accuracy from which it counts as low (ours, the same as ``gap``).
    """

    short_term: int = 10
    window: int = 10
    sharp_within: int = 1
    drop: float = 0.3
    gap: float = 0.02
    end: int = 50
    test_gap: float = 0.02

    def __post_init__(self) -> None:
        for part in fields(self):
            value = getattr(self, part.name)
            if not (math.isfinite(value) and value > 0):
                raise UsageError(f"threshold {part.name} is {value}; expected more than 0")


@dataclass(frozen=True, eq=False, slots=True)
class TrainingCurves:
    """Metric and losses of a training run from the step of the fault to its end.

    Attributes:
        metric: float64[n], the training metric of each step from the step of the fault on, higher is better; shorter
            than the golden one if the run ended early.
        losses: float64[n], the loss of each step.
        test_accuracy: Held-out accuracy at the end.
        same_bits: Whether the final state has the bits of the golden twin's.
    """

    metric: Curve
    losses: Curve
    test_accuracy: float
    same_bits: bool = False


def classify_training(
    golden: TrainingCurves,
    faulty: TrainingCurves,
    thresholds: Thresholds | None = None,
    *,
    beyond_noise: bool = True,
    training_metric: bool = True,
) -> TrainingOutcome:
    """The outcome class of one faulty training run.

    Args:
        beyond_noise: Whether the run differs from golden by more than fault-free runs do. If not, no difference at the
            end counts as harm or improvement.

    >>> flat = TrainingCurves(np.full(100, 0.9), np.full(100, 0.3), 0.9)
    >>> low = TrainingCurves(np.r_[0.9, np.full(99, 0.2)], np.full(100, 2.0), 0.2)
    >>> classify_training(flat, low).value
    'sharp-degrade'
    """
    t = thresholds or Thresholds()
    if faulty.same_bits:
        return TrainingOutcome.MASKED_BITWISE
    finite = np.isfinite(faulty.losses)
    if len(finite) and not finite[-1]:
        # A single loss may recover, with a loss scaler.
        first = int(np.flatnonzero(finite)[-1]) + 1 if finite.any() else 0
        if first == 0:
            return TrainingOutcome.IMMEDIATE_NAN
        return TrainingOutcome.SHORT_TERM_NAN if first <= t.short_term else TrainingOutcome.SLOW_DEGRADE
    length = min(len(golden.metric), len(faulty.metric))
    if not length:
        raise ValueError(
            "a run has no metric from the step of the fault on; give the metric of this step and later steps"
        )
    below = golden.metric[:length] - faulty.metric[:length]
    test = golden.test_accuracy - faulty.test_accuracy
    if not beyond_noise:
        return TrainingOutcome.MASKED_BENIGN
    if test < -t.test_gap:
        return TrainingOutcome.IMPROVED
    after = length - 1  # the faulty step itself, and a few batches, do not show how the training goes on
    if training_metric and after >= t.window and not float(below[-min(t.end, after) :].mean()) <= t.gap:
        return _degrade(below, golden.metric[:length], t)
    return TrainingOutcome.MASKED_BENIGN if test <= t.test_gap else TrainingOutcome.LOW_TEST


def _degrade(below: Curve, golden: Curve, t: Thresholds) -> TrainingOutcome:
    """The class of a degraded run: sharp, slow, or sharp and then slow."""
    share = below / np.where(golden > 0, golden, np.inf)
    at_once = float(share[1 : t.sharp_within + 1].max(initial=0.0))
    if not at_once > t.drop:
        return TrainingOutcome.SLOW_DEGRADE
    later = averaged(share[t.sharp_within + 1 :], t.window)
    falls_on = len(later) > 0 and float(later.max()) > at_once + t.drop
    return TrainingOutcome.SHARP_SLOW_DEGRADE if falls_on else TrainingOutcome.SHARP_DEGRADE


def averaged(curve: Curve, window: int) -> Curve:
    """Moving mean over ``window`` steps, float64[max(n - window + 1, 1)]; the mean of all if there are fewer."""
    if not len(curve):
        return curve
    width = min(window, len(curve))
    sums = np.cumsum(np.concatenate([[0.0], curve]))
    result: Curve = (sums[width:] - sums[:-width]) / width
    return result
