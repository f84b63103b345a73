"""Defences against evasive inputs, and attacks that are adapted to them.

Adversarial training, an agreement gate, and a detector of divergence.

The *gate* sends a share of the inputs to the original as well, and raises an alarm if its answer differs: it finds that share of
the evasive inputs. Even if all inputs are sent, it does not find inputs for which both models give the same wrong answer. The
*detector* compares the divergence of both models' probabilities for every input with a threshold from clean inputs. An attack
that knows a defence includes the defence's criterion in its objective.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from unsilent.compare.adapters.fake_quant import quantised_layers
from unsilent.compare.adapters.pruning import zeros_stay
from unsilent.compare.attacks.evaluation import LAST_STEP, RULES, AttackTask, classify, run_attack, score
from unsilent.compare.attacks.objectives import CROSS_ENTROPY, Objective, diva, is_evasive
from unsilent.compare.attacks.pgd import pgd
from unsilent.compare.attacks.search import Ball, Budget, Classifier, Pair, no_parameter_gradients
from unsilent.statistics.conformal import conformal_threshold
from unsilent.workloads.model_fitting import Schedule, fit, isolated_training

TRAINING_STEPS = 5
"""Number of attack steps within a step of adversarial training."""
ADAPTIVE_STEPS, ADAPTIVE_RESTARTS = 4, 5
"""Factor on the number of steps, and number of restarts, for an attack that knows the defence."""
PENALTY = 10.0
"""Weight of the detector's criterion in the objective of the attack that knows it."""


def adversarially_trained(
    model: nn.Module,
    inputs: Tensor,
    labels: Tensor,
    valid: tuple[Tensor, Tensor],
    eps: float,
    schedule: Schedule,
    seed: int = 0,
) -> nn.Module:
    """A copy trained further on inputs that PGD makes of the training inputs (Madry et al., ICLR 2018)."""
    result = copy.deepcopy(model)
    budget = Budget(eps, TRAINING_STEPS, step=eps / 2, random_start=True, seed=seed)

    def attacked(rows: Tensor) -> tuple[Tensor, Tensor]:
        x, y = inputs[rows], labels[rows]
        result.eval()  # batch norms are attacked in the mode in which they will answer
        with no_parameter_gradients(result):
            x = pgd(Pair(result, result), CROSS_ENTROPY, x, y, Ball.around(x, valid, eps), budget).last
        result.train()
        return x, y

    with zeros_stay(result):
        train(result, attacked, len(inputs), cross_entropy, schedule, seed)
    return result


def train(
    model: nn.Module,
    sample: Callable[[Tensor], tuple[Any, Any]],
    count: int,
    loss: Callable[[Any, Any], Tensor],
    schedule: Schedule,
    seed: int,
) -> None:
    """Train a model in place with `fit`, and then compute the scales of quantised weights anew."""
    model.requires_grad_(True)  # a model that only answers may have switched this off
    with isolated_training(seed):
        fit(model, sample, count, loss, schedule, seed=seed, description="training")
    for layer in quantised_layers(model):
        layer.fit_weights()


def divergence(original: Tensor, adapted: Tensor) -> Tensor:
    """Jensen-Shannon divergence between the probabilities of both models, [n], in nats from 0 to ln 2."""
    first, second = original.log_softmax(1), adapted.log_softmax(1)
    middle = torch.logaddexp(first, second) - math.log(2)
    return ((first.exp() * (first - middle)).sum(1) + (second.exp() * (second - middle)).sum(1)) / 2


@dataclass(frozen=True)
class DivergenceDetector:
    """Detects inputs for which the probabilities of two models differ more than for clean inputs."""

    threshold: float

    @classmethod
    def calibrated(
        cls, original: Classifier, deployed: Classifier, clean: Tensor, rate: float = 0.01
    ) -> DivergenceDetector:
        """A detector with at most this rate of false alarms for clean inputs like these."""
        return cls(conformal_threshold(divergence(classify(original, clean), classify(deployed, clean)).tolist(), rate))

    def alarms(self, original: Tensor, deployed: Tensor) -> Tensor:
        """Whether each input has an alarm, bool[n], from the class scores of both models."""
        return divergence(original, deployed) > self.threshold

    def evading(self) -> Objective:
        """The objective DIVA with a penalty for divergence above the threshold.

        The attack succeeds with an evasive input without an alarm.
        """
        ascent = diva()
        return Objective(
            lambda o, a, y: ascent.function(o, a, y) - PENALTY * (divergence(o, a) - self.threshold).clamp_min(0),
            reads_original=True,
            success=lambda o, a, y: is_evasive(o, a, y) & ~self.alarms(o, a),
        )


def unseen_by_gate(original: Tensor, deployed: Tensor, labels: Tensor) -> Tensor:
    """Whether both models give the same wrong answer to each input, bool[n].

    No agreement gate detects such an input.
    """
    return (deployed.argmax(1) != labels) & (original.argmax(1) == deployed.argmax(1))


EVADING_GATE = Objective(
    lambda o, a, y: cross_entropy(a, y, reduction="none") + cross_entropy(o, y, reduction="none"),
    reads_original=True,
    success=unseen_by_gate,
)
"""Ascent on the cross-entropy of both models: the attack that knows the gate."""


def adaptive(task: AttackTask, objective: Objective) -> AttackTask:
    """The task of an attack adapted to a defence: another objective, more steps and restarts."""
    budget = replace(task.budget, steps=ADAPTIVE_STEPS * task.budget.steps, restarts=ADAPTIVE_RESTARTS)
    return replace(task, objective=objective, budget=budget)


def passed(task: AttackTask, found_inputs: Tensor, objective: Objective) -> Tensor:
    """Whether each input is a success of an objective against the deployed models, bool[n]."""
    with torch.no_grad():
        return objective.success(
            classify(task.original, found_inputs), classify(task.deployed, found_inputs), task.labels
        )


def defence_scores(task: AttackTask, detector: DivergenceDetector) -> dict[str, dict[str, int]]:
    """Numbers of inputs that pass each defence, by attack: adapted attacks first, then others.

    Attacks that know the defence, and a search of the same length, are APGD on their own objectives. A success at any step counts
    if the deployed models confirm it.
    """
    evading, result = detector.evading(), {}
    for attack, success, objective in (
        ("longer search", "evasive", task.objective),
        ("knows the detector", "past the detector", evading),
        ("knows the gate", "past the gate", EVADING_GATE),
    ):
        known = adaptive(task, objective)
        passes = passed(known, run_attack("apgd-diva", known).evasive, objective)
        result[attack] = {success: int(passes.sum())}
    for name in ("diva", "pgd"):
        results = run_attack(name, task)
        scores = score(name, task, results)
        result[name] = {f"evasive, {rule}": int(scores.evasive[rule].sum()) for rule in RULES} | {
            f"past the {defence}, {LAST_STEP}": int(passed(task, results.last, objective).sum())
            for defence, objective in (("detector", evading), ("gate", EVADING_GATE))
        }
    return result
