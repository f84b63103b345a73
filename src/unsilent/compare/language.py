"""Measures of two language models on the same texts (teacher forcing), and their greedy continuations.

Sequences are independent, but positions within one are not, so intervals are over sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unsilent.basics.errors import UsageError
from unsilent.basics.interval import Interval
from unsilent.compare.disagreement import kl_divergence, log_probabilities
from unsilent.compare.tokens import real_positions, with_tokens
from unsilent.outcomes.decision_judges import Doubles, decision_tensor, doubles
from unsilent.outcomes.judges import JUDGES
from unsilent.statistics import clopper_pearson, ratio_of_means

QUANTILE = 0.999
_JUDGE = JUDGES["next-token"]()


@dataclass(frozen=True, eq=False)
class SequenceRecord:
    """Results for one text that two models read.

    ``kl`` is in nats at each position, float64[t]; the other fields are about predictions of the next tokens.

    Attributes:
        same: Whether the most likely token is the same, bool[t].
        right_before, right_after: Whether each model's most likely token is the next token of the text, bool[t - 1].
        loss_before, loss_after: Negative logarithm of each model's probability of the next token of the text, float64[t - 1].
    """

    kl: Doubles
    same: NDArray[np.bool_]
    right_before: NDArray[np.bool_]
    right_after: NDArray[np.bool_]
    loss_before: Doubles
    loss_after: Doubles


@dataclass(frozen=True, eq=False)
class GreedyRuns:
    """Comparison of the greedy continuations of ``prompts`` prompts, ``tokens`` tokens each.

    ``first_differences``: number of the first token that differs, from 0, for each prompt with a difference.
    """

    prompts: int
    tokens: int
    first_differences: tuple[int, ...]

    def differing(self, confidence: float) -> Interval:
        """Share of prompts whose continuations differ."""
        return clopper_pearson(len(self.first_differences), self.prompts, confidence)


@dataclass(frozen=True, eq=False)
class LanguageComparison:
    """The comparison of two language models on the same texts.

    ``without_greedy``: why some or all texts were not continued greedily.
    """

    sequences: tuple[SequenceRecord, ...]
    greedy: GreedyRuns | None
    without_greedy: str = ""

    @property
    def positions(self) -> int:
        """Number of positions in all texts."""
        return sum(len(record.kl) for record in self.sequences)

    @property
    def kl(self) -> Doubles:
        """Kullback-Leibler divergence at each position in nats, float64[positions]."""
        return np.concatenate([record.kl for record in self.sequences])

    def shares(self, confidence: float) -> dict[str, Interval]:
        """Shares of positions by name.

        They are the shares with the same most likely token, and with a lost or gained next token of the text.
        """
        counted = {
            "same top-1 token": [(record.same.sum(), len(record.same)) for record in self.sequences],
            "lost next token": [((b & ~a).sum(), len(b)) for b, a in self._right],
            "gained next token": [((~b & a).sum(), len(b)) for b, a in self._right],
        }
        return {name: _over_sequences(pairs, confidence) for name, pairs in counted.items()}

    @property
    def perplexities(self) -> tuple[float, float]:
        """Perplexities of the original and the deployed model on the texts."""
        before, after = (
            float(np.mean(np.concatenate([getattr(record, name) for record in self.sequences])))
            for name in ("loss_before", "loss_after")
        )
        return _exp(before), _exp(after)

    def perplexity_ratio(self, confidence: float) -> Interval:
        """Perplexity of the deployed model over that of the original, with its interval.

        All tokens have the same weight; the interval is over sequences.
        """
        from scipy.stats import t

        gaps = np.array([(record.loss_after - record.loss_before).sum() for record in self.sequences])
        lengths = np.array([len(record.loss_before) for record in self.sequences])
        n, middle = len(gaps), float(gaps.sum() / lengths.sum())
        wide = math.inf
        if n > 1:
            deviation = (gaps - middle * lengths).std(ddof=1)
            wide = float(t.ppf((1 + confidence) / 2, n - 1) * deviation * math.sqrt(n) / lengths.sum())
        return Interval(
            _exp(middle), _exp(middle - wide), _exp(middle + wide), confidence, n, "Student's t, ratio over sequences"
        )

    @property
    def _right(self) -> list[tuple[NDArray[np.bool_], NDArray[np.bool_]]]:
        return [(record.right_before, record.right_after) for record in self.sequences]


def compare_texts(
    batch: Any, tokens: Tensor, original: Any, deployed: Any, probabilities: bool
) -> list[SequenceRecord]:
    """Results for each text of a batch, without padding.

    ``probabilities``: whether the outputs are already probabilities.
    """
    outputs = [decision_tensor(output, _JUDGE, 3) for output in (original, deployed)]
    mask = real_positions(batch, tokens)
    return [
        _sequence(
            tokens[i][mask[i]].cpu().numpy(),
            *(log_probabilities(doubles(output[i].cpu()[mask[i].cpu()]), probabilities) for output in outputs),
        )
        for i in range(len(tokens))
        if int(mask[i].sum()) > 1
    ]


@torch.no_grad()
def run_greedily(
    original: Callable[[Any], Any], deployed: Callable[[Any], Any], batch: Any, tokens: Tensor
) -> GreedyRuns | None:
    """Continue the first half of each text greedily with both models, and compare.

    The continuation is as long as the second half. ``None`` for padded texts.

    Up to the first difference both models read the same tokens, so that one row of tokens serves both.

    Raises any error of a model that cannot read texts of these lengths.
    """
    if not bool(real_positions(batch, tokens).all()):
        return None
    length = tokens.shape[1] // 2
    read, steps = tokens[:, :length], tokens.shape[1] - length
    first = np.full(len(tokens), -1)
    for step in range(steps):
        chosen = [_next_tokens(run(with_tokens(batch, read)), read) for run in (original, deployed)]
        first[(first < 0) & (chosen[0] != chosen[1]).numpy()] = step
        if (first >= 0).all():
            break
        read = torch.cat([read, chosen[0][:, None].to(read.device, read.dtype)], 1)
    return GreedyRuns(len(tokens), steps, tuple(int(i) for i in first if i >= 0))


def _next_tokens(output: Any, read: Tensor) -> Tensor:
    """The most likely next token of each row, int64[n]."""
    scores = decision_tensor(output, _JUDGE, 3)
    if scores.shape[:2] != read.shape:
        raise UsageError(f"a text of {read.shape[1]} tokens has scores at {scores.shape[1]} positions")
    return scores[:, -1].argmax(-1).cpu()


def first_differences(original: Tensor, deployed: Tensor) -> GreedyRuns:
    """Compare two outputs of generated tokens, int64 [n, t] and [n, u].

    If one ends earlier, its end counts as a difference.
    """
    common = min(original.shape[1], deployed.shape[1])
    differ = (original[:, :common].cpu() != deployed[:, :common].cpu()).numpy()
    longer = np.full((len(differ), 1), original.shape[1] != deployed.shape[1])
    differ = np.concatenate([differ, longer], 1)
    places = tuple(int(row.argmax()) for row in differ if row.any())
    return GreedyRuns(len(differ), max(original.shape[1], deployed.shape[1]), places)


def joined_runs(parts: Sequence[GreedyRuns]) -> GreedyRuns | None:
    """The runs of several batches, joined, or None without runs."""
    if not parts:
        return None
    differences = tuple(i for part in parts for i in part.first_differences)
    return GreedyRuns(sum(part.prompts for part in parts), max(part.tokens for part in parts), differences)


def _sequence(tokens: NDArray[Any], before: Doubles, after: Doubles) -> SequenceRecord:
    """Results for one text, from its tokens int64[t] and log-probabilities float64[t, vocabulary]."""
    best, following, rows = [x.argmax(1) for x in (before, after)], tokens[1:], np.arange(len(tokens) - 1)
    return SequenceRecord(
        kl=kl_divergence(before, after),
        same=np.asarray(best[0] == best[1]),
        right_before=np.asarray(best[0][:-1] == following),
        right_after=np.asarray(best[1][:-1] == following),
        loss_before=-before[rows, following],
        loss_after=-after[rows, following],
    )


def _over_sequences(pairs: Sequence[tuple[Any, int]], confidence: float) -> Interval:
    parts, wholes = [float(part) for part, _ in pairs], [float(whole) for _, whole in pairs]
    return ratio_of_means(parts, wholes, max(wholes), confidence)


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf
