"""Attacks by name, run on inputs that all models get right and scored on the deployed models.

There are two rules for the success of an attack: at some step (the published rule: the search stops at the first success), or at
its last step (`Found.last`). An input is evasive if the deployed model is wrong and the original right. By the top-5 rule the
wrong answer must also not be one of the original's five most likely classes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from unsilent.basics.errors import UsageError, unknown_name_error
from unsilent.compare.attacks.apgd import apgd
from unsilent.compare.attacks.objectives import CROSS_ENTROPY, CROSS_ENTROPY_OF_ORIGINAL, DLR, Objective, diva
from unsilent.compare.attacks.pgd import noise, pgd
from unsilent.compare.attacks.search import Ball, Budget, Classifier, Found, Pair, no_parameter_gradients
from unsilent.report.text import count_text


class Attack(NamedTuple):
    """A search method with its objective.

    If the objective is ``None``, it is that of the task, for example DIVA's.
    """

    search: Callable[[Pair, Objective, Tensor, Tensor, Ball, Budget], Found]
    objective: Objective | None = None


ATTACKS = {
    "diva": Attack(pgd),
    "apgd-diva": Attack(apgd),
    "pgd": Attack(pgd, CROSS_ENTROPY),
    "apgd-ce": Attack(apgd, CROSS_ENTROPY),
    "apgd-dlr": Attack(apgd, DLR),
    "pgd-original": Attack(pgd, CROSS_ENTROPY_OF_ORIGINAL),
    "noise": Attack(noise, CROSS_ENTROPY),
}
"""Attacks by name: ascent with fixed or adaptive step sizes, or random corners of the ball."""
CONTROLS = ("pgd", "pgd-original", "noise")
"""Control attacks that every attack is compared with."""
ANY_STEP, LAST_STEP = RULES = ("any step", "last step")
WHITEBOX_AGREEMENT = 0.99
"""Least agreement of the attacked twin with the deployed model for an attack to be called whitebox."""
BATCH = 100
"""Number of inputs that are attacked together."""


@dataclass(frozen=True, eq=False)
class AttackTask:
    """The models and inputs of an attack, and its budget.

    Attributes:
        pair: Models that the attacker has.
        original, deployed: Models that are scored.
        inputs: Clean inputs [n, …] that all models get right.
        labels: Right answers, int64[n].
        valid: Least and largest valid value of an input.
    """

    pair: Pair
    original: Classifier
    deployed: Classifier
    inputs: Tensor
    labels: Tensor
    valid: tuple[Tensor, Tensor]
    budget: Budget = field(default_factory=Budget)
    objective: Objective = field(default_factory=diva)


@dataclass(frozen=True, eq=False)
class Scores:
    """The result of an attack for each of n inputs, scored on the deployed models.

    Attributes:
        attack: Name of the attack.
        evasive, evasive_top5, wrong: Whether each input is a success, by rule, bool[n]; ``wrong``: whether the deployed model
            gets it wrong, whatever the original answers.
        confidence_change: Original's minus deployed model's confidence in the label at the last step, float64[n].
        largest_change: Largest change of a value in any scored input, as a share of the valid range.
        steps: Mean number of steps to the first evasive input, over the inputs that have one; NaN if there is none.
        seconds: CPU time in seconds.
        gradients: Number of computed gradients, each of one input.
    """

    attack: str
    evasive: Mapping[str, Tensor]
    evasive_top5: Mapping[str, Tensor]
    wrong: Mapping[str, Tensor]
    confidence_change: Tensor
    largest_change: float
    steps: float
    seconds: float
    gradients: int


def check_attack(name: str) -> str:
    """Return the name of an attack if the attack is known.

    Raises ``UsageError`` for an unknown attack.
    """
    if name not in ATTACKS:
        raise unknown_name_error("attack", name, ATTACKS)
    return name


def run_attack(name: str, task: AttackTask) -> Found:
    """Run an attack in batches of `BATCH`, and return the inputs that it finds.

    Raises ``UsageError`` for an unknown attack.
    """
    attack, parts = ATTACKS[check_attack(name)], []
    with no_parameter_gradients(task.pair.original, task.pair.adapted):
        for x, labels in zip(task.inputs.split(BATCH), task.labels.split(BATCH), strict=True):
            ball, start = Ball.around(x, task.valid, task.budget.eps), time.process_time()
            results = attack.search(task.pair, attack.objective or task.objective, x, labels, ball, task.budget)
            results.seconds = time.process_time() - start
            parts.append(results)
    return Found.joined(parts)


@torch.no_grad()
def score(name: str, task: AttackTask, adversarial: Found) -> Scores:
    """Scores of the inputs that an attack found, on the deployed models.

    By the rule of any step, the first success on the attacker's pair of models counts if it is also one on the deployed models.
    """
    evasive, top5, wrong = {}, {}, {}
    for rule, x in ((ANY_STEP, adversarial.evasive), (LAST_STEP, adversarial.last)):
        original, deployed = classify(task.original, x), classify(task.deployed, x)
        answers = deployed.argmax(1)
        wrong[rule] = answers != task.labels
        evasive[rule] = wrong[rule] & (original.argmax(1) == task.labels)
        likely = original.topk(min(5, original.shape[1]), 1).indices
        top5[rule] = evasive[rule] & (likely != answers[:, None]).all(1)
    wrong[ANY_STEP] = classify(task.deployed, adversarial.wrong).argmax(1) != task.labels
    sure = [scores.double().softmax(1).gather(1, task.labels[:, None])[:, 0] for scores in (original, deployed)]
    low, high = task.valid
    every_input = (adversarial.evasive, adversarial.wrong, adversarial.last)
    steps = adversarial.evasive_step[adversarial.evasive_step > 0].double()
    return Scores(
        name, evasive, top5, wrong, sure[0] - sure[1],
        max(float(((x - task.inputs).abs() / (high - low)).max()) for x in every_input),
        float(steps.mean()) if len(steps) else float("nan"),
        adversarial.seconds, adversarial.gradients,
    )  # fmt: skip


@torch.no_grad()
def classify(model: Classifier, inputs: Tensor) -> Tensor:
    """Class scores [n, classes], computed in batches.

    Raises ``UsageError`` if the model is not a classifier.
    """
    scores = torch.cat([model(x) for x in inputs.split(BATCH)])
    if not isinstance(scores, Tensor) or scores.ndim != 2 or len(scores) != len(inputs) or scores.shape[1] < 2:
        raise UsageError(
            f"the model is no classifier: it returns {list(scores.shape)} for {count_text(len(inputs), 'input')}; expected class "
            "scores [inputs, 2 or more]"
        )
    return scores


def agreed_rows(models: list[Classifier], inputs: Tensor, labels: Tensor, wanted: int | None = None) -> Tensor:
    """Indices of inputs that all models get right, int64, at most ``wanted``.

    Raises:
        UsageError: there are fewer than ``wanted``.
    """
    right = torch.stack([classify(model, inputs).argmax(1) == labels for model in models]).all(0)
    rows = right.nonzero()[:, 0]
    if not len(rows) or (wanted is not None and len(rows) < wanted):
        raise UsageError(
            f"{len(rows):,} of {len(inputs):,} inputs are classified right by all models: the original, the adapted one and its "
            f"twin; expected {wanted or 1:,} or more: lower --samples, or give more inputs"
        )
    return rows if wanted is None else rows[:wanted]
