"""Task metrics of single samples, such as the intersection over union of an image, and their loss by a fault.

Rule for outputs without an answer: a sample has the lowest score if it ends as due, or if its faulty score is not
finite or cannot be computed. Accuracy has the same rule: a right answer that ends as due is lost. A sample whose output
is bit-identical loses nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unsilent.basics.error_origin import call_user_code
from unsilent.basics.errors import UsageError
from unsilent.outcomes.base import Outcome
from unsilent.outcomes.tensors import array_of

SCORE_RANGE = (0.0, 1.0)
Doubles = NDArray[np.float64]


@dataclass(frozen=True)
class Score:
    """A task metric: how a workload scores the samples of an output.

    Attributes:
        name: Name of the metric, for readers.
        function: ``score(output, batch)`` -> a number for each sample that depends on that sample alone; higher is
            better.
        lowest, highest: Lowest and highest possible score.
        batches: Second argument of ``function`` for each batch; None for the input of the model.
    """

    name: str
    function: Callable[[Any, Any], Any]
    lowest: float = SCORE_RANGE[0]
    highest: float = SCORE_RANGE[1]
    batches: Sequence[Any] | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.lowest) and math.isfinite(self.highest) and self.lowest < self.highest):
            raise UsageError(
                f"score_range is ({self.lowest}, {self.highest}); expected two finite numbers, the lowest score first"
            )

    def of_samples(self, output: Any, batch: Any, samples: int) -> Doubles:
        """The score of each sample in an output, float64[samples]; raises ``UsageError`` for a wrong shape."""
        scores = array_of(call_user_code(self.function, output, batch))
        if scores.shape != (samples,) or scores.dtype.kind not in "biuf":
            raise UsageError(
                f"the score returned {scores.dtype}{list(scores.shape)}; expected a number for each of the {samples} samples"
            )
        return scores.astype(np.float64)

    def of_golden(self, output: Any, batch: Any, samples: int) -> Doubles:
        """Scores of a golden output; raises ``UsageError`` if they are out of range or not repeatable."""
        result = self.of_samples(output, batch, samples)
        outside = result[~((result >= self.lowest) & (result <= self.highest))]
        if outside.size:
            raise UsageError(
                f"the {self.name} of a fault-free sample is {outside[0]:g}; expected {self.lowest:g} to {self.highest:g}: "
                "give score_range=(lowest, highest)"
            )
        if not np.array_equal(result, self.of_samples(output, batch, samples)):
            raise UsageError(f"the {self.name} of one output differs when it is computed again; use a repeatable score")
        return result


def lost_score(codes: NDArray[np.uint8], faulty: Doubles, golden: Doubles, lowest: float, highest: float) -> float:
    """Mean difference of golden and faulty score over evaluated samples; NaN if none was evaluated.

    Args:
        codes: One `Outcome` per sample, uint8[n].
        faulty: Scores of the faulty outputs, float64[n]; only those of samples that end as benign or sdc matter.
        golden: Scores of the golden outputs, float64[n].
        lowest, highest: Faulty scores are limited to this range; those that are not finite count as the lowest.
    """
    evaluated = codes != Outcome.SPARED
    if not evaluated.any():
        return math.nan
    bounded = np.where(np.isfinite(faulty), np.clip(faulty, lowest, highest), lowest)
    answered = (codes == Outcome.BENIGN) | (codes == Outcome.SDC)
    after = np.where(codes == Outcome.MASKED, golden, np.where(answered, bounded, lowest))
    return math.fsum((golden - after)[evaluated]) / int(evaluated.sum())
