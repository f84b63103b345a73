"""Disagreement of two models for each input: changed, lost and gained answers, and distances of scores.

The judge decides on the unchanged outputs. Its verdict depends on position, so swapped classes are different answers. Class
scores of both models are read in the same way: as probabilities if all rows of both are already distributions, otherwise through
a softmax in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from unsilent.basics.errors import UsageError
from unsilent.compare.tokens import scores_at_tokens, without_padding
from unsilent.outcomes.base import Judge, Outcome
from unsilent.outcomes.classify import classify, sample_count
from unsilent.outcomes.decision_judges import (
    DecisionJudge,
    Doubles,
    ExactSequence,
    NextToken,
    Top1,
    TopK,
    decision_tensor,
    host_rows,
    label_array,
    right_answers,
)
from unsilent.outcomes.detections import DetectionSet
from unsilent.outcomes.judges import Tolerance

MOST_OVERLAP = 5
"""Maximum number of the most likely classes that are compared."""
_OF_SCORES = (Top1, TopK, NextToken)
"""Judges that decide by class scores."""
_TINY = np.finfo(np.float64).tiny
_SLACK = 2.0**-6
"""Largest distance of a sum of probabilities from 1: rounding to bfloat16 changes it by up to 2^-8, and a softmax made of
operations in bfloat16 by a few times as much. Adapters return float32, so the dtype of a row does not show this."""


@dataclass(frozen=True, eq=False)
class SampleRecords:
    """Results of a comparison of two models' answers, one value for each of n inputs.

    Fields about classes and their scores are ``None`` if the judge does not read class scores.

    Attributes:
        identical: Whether the outputs have the same bits, bool[n].
        changed: Whether the judge finds a different answer, bool[n].
        severity: Severity in the judge's own unit, float64[n].
        right_before, right_after: Whether the original and the deployed model are right, bool[n]; ``None`` without labels.
        classes: The label, or without labels the original's class, int64[n].
        confidence_delta: Difference of the probabilities of that class, float64[n].
        kl: Divergence of the deployed model's distribution from the original's in nats, float64[n].
        js: Jensen-Shannon divergence of the two in bits, from 0 to 1, float64[n].
        overlap: Share of the original's most likely classes that are among the deployed model's, float64[n].
    """

    identical: NDArray[np.bool_]
    changed: NDArray[np.bool_]
    severity: Doubles
    right_before: NDArray[np.bool_] | None = None
    right_after: NDArray[np.bool_] | None = None
    classes: NDArray[np.int64] | None = None
    confidence_delta: Doubles | None = None
    kl: Doubles | None = None
    js: Doubles | None = None
    overlap: Doubles | None = None

    @property
    def lost(self) -> NDArray[np.bool_] | None:
        """Whether only the original answers each input correctly, bool[n]; None without labels."""
        return None if self.right_before is None or self.right_after is None else self.right_before & ~self.right_after

    @property
    def gained(self) -> NDArray[np.bool_] | None:
        """Whether only the deployed model answers each input correctly, bool[n]; None without labels."""
        return None if self.right_before is None or self.right_after is None else ~self.right_before & self.right_after

    @classmethod
    def joined(cls, parts: Sequence[SampleRecords]) -> SampleRecords:
        """Records of several batches, joined in order.

        A field that one of them lacks becomes None.
        """
        joined: dict[str, Any] = {}
        for field in fields(cls):
            values = [getattr(part, field.name) for part in parts]
            joined[field.name] = None if any(value is None for value in values) else np.concatenate(values)
        return cls(**joined)

    def worst(self, count: int) -> list[int]:
        """Numbers of the inputs whose outputs differ most, at most ``count``.

        Lost answers come first, then changed ones; within each group, the most severe come first.
        """
        lost = self.changed if self.lost is None else self.lost
        order = np.lexsort((-self.severity, ~self.changed, ~lost))
        return [int(i) for i in order if not self.identical[i]][:count]


def compare_outputs(
    judge: Judge, original: Any, deployed: Any, batch: Any, labels: Any = None, probabilities: bool | None = None
) -> SampleRecords:
    """The records for the outputs of both models for one batch.

    Args:
        judge: Judge that decides whether an answer differs.
        original, deployed: The outputs of both models.
        batch: The inputs.
        labels: Right answers for the batch; ``None`` if they are unknown.
        probabilities: Whether scores are already probabilities; ``None`` to decide with `are_probabilities` for this batch.

    Raises:
        UsageError: the outputs do not fit the judge, each other or the labels.
    """
    samples = sample_count(judge, original, batch)
    _check_alike(judge, original, deployed)
    before, after = (without_padding(judge, output, batch) for output in (original, deployed))
    outcome = classify(judge, before, after, batch, samples)
    whole = outcome if before is original else classify(judge, original, deployed, batch, samples)
    records = {
        "identical": whole.codes == Outcome.MASKED,
        "changed": outcome.codes >= Outcome.SDC,
        "severity": outcome.severity,
        **_right(judge, before, after, labels, samples),
    }
    if isinstance(judge, _OF_SCORES):
        scores = [_scores(judge, output) for output in (before, after)]
        classes = scores[0].argmax(1) if labels is None else label_array(labels, samples)
        if classes.min() < 0 or classes.max() >= scores[0].shape[1]:
            raise UsageError(
                f"labels range from {classes.min()} to {classes.max()}; the models answer with classes 0 to "
                f"{scores[0].shape[1] - 1}"
            )
        if probabilities is None:
            probabilities = are_probabilities(judge, original, deployed, batch)
        records |= {
            "classes": classes,
            **_divergences(
                log_probabilities(scores[0], probabilities), log_probabilities(scores[1], probabilities), classes
            ),
        }
    return SampleRecords(**records)


def are_probabilities(judge: Judge, original: Any, deployed: Any, batch: Any) -> bool:
    """Whether the scores of both models for a batch are probabilities.

    ``False`` if the judge does not read class scores.
    """
    if not isinstance(judge, _OF_SCORES):
        return False
    tensors = (decision_tensor(output, judge, judge.DIMENSIONS) for output in (original, deployed))
    return all(_are_distributions(scores_at_tokens(scores, batch)) for scores in tensors)


def _are_distributions(scores: Tensor) -> bool:
    return bool((scores.double() >= 0).all()) and bool(((scores.double().sum(-1) - 1).abs() <= _SLACK).all())


def log_probabilities(scores: Doubles, probabilities: bool) -> Doubles:
    """Logarithms of probabilities from rows of scores, float64[n, classes].

    ``probabilities``: whether the scores are already probabilities, up to rounding.
    """
    values = np.log(np.maximum(scores, _TINY)) if probabilities else scores
    shifted = values - values.max(1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(1, keepdims=True)))


def kl_divergence(before: Doubles, after: Doubles) -> Doubles:
    """Kullback-Leibler divergence of each row in nats, from log-probabilities [n, classes]."""
    return np.asarray(np.maximum((np.exp(before) * (before - after)).sum(1), 0.0))


def _divergences(before: Doubles, after: Doubles, classes: NDArray[np.int64]) -> dict[str, Doubles]:
    """Divergences by name, from log-probabilities [n, classes] of both models."""
    # exact if both are equal
    middle = np.maximum(before, after) + np.log((1 + np.exp(-np.abs(before - after))) / 2)
    rows, top = np.arange(len(before)), TopK(min(MOST_OVERLAP, before.shape[1] - 1))
    overlap = top.compare(*(np.argsort(-x, axis=1, kind="stable")[:, : top.k] for x in (before, after)))
    js = (kl_divergence(before, middle) + kl_divergence(after, middle)) / (2 * np.log(2))
    return {
        "confidence_delta": np.abs(np.exp(before[rows, classes]) - np.exp(after[rows, classes])),
        "kl": kl_divergence(before, after),
        "js": np.clip(js, 0.0, 1.0),
        "overlap": 1 - overlap.severity,
    }


def _scores(judge: Top1 | TopK | NextToken, output: Any) -> Doubles:
    """Class scores that the judge reads in an output, float64[n, classes]."""
    tensor = decision_tensor(output, judge, judge.DIMENSIONS)
    return np.asarray(host_rows((tensor[:, -1] if isinstance(judge, NextToken) else tensor).double()), np.float64)


def _right(judge: Judge, original: Any, deployed: Any, labels: Any, samples: int) -> dict[str, Any]:
    """Whether the answers of each model are correct.

    Empty without labels, or if they do not fit the judge.
    """
    before, after = (right_answers(judge, output, labels, samples) for output in (original, deployed))
    return {} if before is None else {"right_before": before, "right_after": after}


def _check_alike(judge: Judge, original: Any, deployed: Any) -> None:
    """Raise ``UsageError`` if the outputs of the two models have different shapes."""
    if isinstance(judge, DetectionSet):
        shapes = [[len(x)] if isinstance(x, list) else [] for x in (original, deployed)]
    elif isinstance(judge, (DecisionJudge, Tolerance)):
        shapes = [list(decision_tensor(x, judge, 1).shape) for x in (original, deployed)]
        shapes = [shape[:1] for shape in shapes] if isinstance(judge, ExactSequence) else shapes
    else:
        return
    if shapes[0] != shapes[1]:
        raise UsageError(
            f"the original answers with a tensor {shapes[0]} and the deployed model with {shapes[1]}; expected two models with "
            "the same inputs and the same classes"
        )
