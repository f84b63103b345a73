"""Objectives that an attack maximises, as functions of the class scores of both models.

Sources: DIVA: Hao et al., "A Tale of Two Models: Constructing Evasive Attacks on Edge Models" (MLSys 2022), in the authors'
code ``p_original[y] - c * p_adapted[y]``; DLR: Croce & Hein, "Reliable evaluation of adversarial robustness with an ensemble
of diverse parameter-free attacks" (ICML 2020).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from unsilent.basics.errors import UsageError, unknown_name_error

Function = Callable[[Tensor, Tensor, Tensor], Tensor]


def is_evasive(original: Tensor, adapted: Tensor, labels: Tensor) -> Tensor:
    """Whether the adapted model is wrong and the original right for each input, bool[n]."""
    return (adapted.argmax(1) != labels) & (original.argmax(1) == labels)


@dataclass(frozen=True)
class Objective:
    """A function that an attack maximises, and its criterion of success.

    Both take the scores [n, classes] of the original and of the adapted model, and labels [n].

    Attributes:
        function: Function to maximise, [n].
        reads_original: Whether it needs a gradient through the original.
        reads_adapted: Whether it needs a gradient through the adapted model.
        success: Function that returns whether each input is a success, bool[n], among those that the adapted model gets wrong.
    """

    function: Function
    reads_original: bool = False
    reads_adapted: bool = True
    success: Function = is_evasive


def margin(scores: Tensor, labels: Tensor) -> Tensor:
    """Score of the label minus the highest other score, [n]; negative for a wrong answer."""
    true_score = scores.gather(1, labels[:, None])
    others = scores.scatter(1, labels[:, None], -torch.inf)
    return true_score[:, 0] - others.amax(1)


def _probability(scores: Tensor, labels: Tensor) -> Tensor:
    return scores.softmax(1).gather(1, labels[:, None])[:, 0]


def _log_probability(scores: Tensor, labels: Tensor) -> Tensor:
    return scores.log_softmax(1).gather(1, labels[:, None])[:, 0]


LOSSES = {"prob": _probability, "logprob": _log_probability, "margin": margin}
"""Measures of a model's confidence in the label for DIVA; ``prob`` is the authors' choice."""


def diva(loss: str = "logprob", c: float = 1.0, temperature: float = 1.0) -> Objective:
    """Objective DIVA: confidence of the original in the label, minus ``c`` times that of the adapted model.

    Args:
        loss: One of `LOSSES`.
        temperature: Divisor of scores; above 1 keeps probabilities away from 0 and 1, where gradients vanish.

    Raises:
        UsageError: the loss is unknown, or a number is not above 0.
    """
    if loss not in LOSSES:
        raise unknown_name_error("loss", loss, LOSSES)
    for name, value in (("c", c), ("temperature", temperature)):
        if not 0 < value < float("inf"):
            raise UsageError(f"--{name} is {value:g}; expected a number above 0")
    sureness = LOSSES[loss]

    def difference(original: Tensor, adapted: Tensor, labels: Tensor) -> Tensor:
        return sureness(original / temperature, labels) - c * sureness(adapted / temperature, labels)

    return Objective(difference, reads_original=True)


def dlr(scores: Tensor, labels: Tensor) -> Tensor:
    """Difference of logits ratio: negative margin over the gap between the highest and the third score.

    It does not depend on the scale of the scores.
    """
    if scores.shape[1] < 3:
        raise UsageError(f"the model has {scores.shape[1]} classes; expected 3 or more for apgd-dlr: use apgd-ce")
    highest = scores.topk(3, 1).values
    return -margin(scores, labels) / (highest[:, 0] - highest[:, 2] + 1e-12)


CROSS_ENTROPY = Objective(lambda _, adapted, labels: cross_entropy(adapted, labels, reduction="none"))
CROSS_ENTROPY_OF_ORIGINAL = Objective(
    lambda original, _, labels: cross_entropy(original, labels, reduction="none"),
    reads_original=True,
    reads_adapted=False,
)
DLR = Objective(lambda _, adapted, labels: dlr(adapted, labels))
