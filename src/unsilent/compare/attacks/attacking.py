"""Attack on an adapted copy of a workload's model, together with control attacks.

Invariant: attacked inputs are not used for calibration; labels are the workload's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unsilent.basics.errors import UsageError
from unsilent.basics.interval import Interval
from unsilent.compare.adapters.fake_quant import converted
from unsilent.compare.adapters.names import adapt, describe
from unsilent.compare.attacks.evaluation import (
    CONTROLS,
    WHITEBOX_AGREEMENT,
    AttackTask,
    Scores,
    agreed_rows,
    check_attack,
    classify,
    run_attack,
    score,
)
from unsilent.compare.attacks.objectives import Objective
from unsilent.compare.attacks.search import Budget, Pair
from unsilent.outcomes.decision_judges import decision_tensor
from unsilent.report.shown import Shown
from unsilent.report.text import count_text
from unsilent.statistics.intervals import clopper_pearson
from unsilent.workloads.base import CALIBRATION, CalibratedWorkload, InferenceWorkload, labels_of

CALIBRATION_SAMPLES = 200
CALIBRATION_STRIDE = 5
"""One in so many inputs is set apart for calibration if a workload has no other inputs for it."""


@dataclass(frozen=True, eq=False)
class ModelsUnderAttack:
    """A deployed model, and its differentiable twin that supplies the gradients of the attack.

    Attributes:
        twin: Module whose outputs have gradients with respect to its inputs.
        deployed: Scored model, a module or a function of a batch; for example a model that computes in integers.
        name: Name of the deployed model in the report.
        how: Sentences on how the deployed model was made.
    """

    twin: nn.Module
    deployed: Callable[[Any], Any]
    name: str = "the deployed model"
    how: tuple[str, ...] = ()


@dataclass(frozen=True, repr=False)
class AttackResult(Shown):
    """The scores of an attack and of its control attacks.

    Attributes:
        workload, adapter, attack: Names of the workload, adapter and attack.
        n: Number of attacked inputs; the original, the deployed model and its twin get them right.
        accuracy: Accuracy of the original and of the deployed model, over all clean inputs not used for calibration.
        clean: Share of these inputs that the original gets right and the deployed model wrong.
        twin_agreement: Share of these inputs for which the attacked twin gives the answer of the deployed model.
        scores: Scores of the attack and of the controls.
        how: Sentences on how the deployed model was made.
    """

    REPORT = "unsilent.compare.attacks.report:report"
    workload: str
    adapter: str
    attack: str
    n: int
    budget: Budget
    accuracy: tuple[Interval, Interval]
    clean: Interval
    twin_agreement: Interval
    scores: dict[str, Scores]
    confidence: float
    how: tuple[str, ...] = ()

    @property
    def is_whitebox(self) -> bool:
        """Whether the twin agrees with the deployed model so often that the attack counts as whitebox."""
        return (self.twin_agreement.estimate or 0.0) >= WHITEBOX_AGREEMENT


class WorkloadClassifier(nn.Module):
    """A model run and judged as in a workload: inputs [n, …] -> class scores [n, classes]."""

    def __init__(self, model: Any, workload: InferenceWorkload) -> None:
        super().__init__()
        self.model, self.run, self.judge = model, workload.run, workload.judge

    def forward(self, inputs: Tensor) -> Tensor:
        """The output tensor that the judge reads."""
        return decision_tensor(self.run(self.model, inputs), self.judge)


def attack_workload(
    workload: InferenceWorkload,
    adapter: str,
    attack: str,
    objective: Objective,
    budget: Budget,
    *,
    name: str | None = None,
    samples: int | None = None,
    confidence: float = 0.95,
) -> AttackResult:
    """Attack an adapted copy of the workload's model.

    Args:
        name: Name of the workload in the report; ``None`` for its own name.
        samples: Number of inputs to attack; ``None`` for all that the original, the deployed model and its twin get right.

    Raises:
        UsageError: the workload has no labels, no input range or no inputs to attack; the adapter or attack is unknown; a model
            has no gradients of inputs; or there are fewer inputs than ``samples``.
    """
    check_attack(attack)
    name = name or workload.name
    inputs, labels = labelled_inputs(workload, name)
    calibration, attacked, calibrated_on = calibration_inputs(workload, inputs, name)
    twin = adapt(workload.model(), adapter, calibration.split(100), workload.run)
    how = tuple(filter(None, (describe(twin), calibrated_on)))
    examples = inputs[attacked], labels[attacked]
    models = ModelsUnderAttack(twin, converted(twin), adapter, how)
    return _attack(workload, models, examples, attack, objective, budget, name, samples, confidence)


def attack_models(
    workload: InferenceWorkload,
    models: ModelsUnderAttack,
    attack: str,
    objective: Objective,
    budget: Budget,
    *,
    samples: int | None = None,
    confidence: float = 0.95,
) -> AttackResult:
    """Attack a deployed model of the user's on all inputs of a workload.

    The model of the workload is the original. Arguments and errors are those of `attack_workload`.
    """
    check_attack(attack)
    examples, name = labelled_inputs(workload, workload.name), workload.name
    return _attack(workload, models, examples, attack, objective, budget, name, samples, confidence)


def _attack(
    workload: InferenceWorkload,
    models: ModelsUnderAttack,
    examples: tuple[Tensor, Tensor],
    attack: str,
    objective: Objective,
    budget: Budget,
    name: str,
    samples: int | None,
    confidence: float,
) -> AttackResult:
    inputs, labels = examples
    original, twin, deployed = (
        WorkloadClassifier(model, workload) for model in (workload.model(), models.twin, models.deployed)
    )
    answers = [classify(model, inputs).argmax(1) for model in (original, deployed, twin)]
    right = [answer == labels for answer in answers]
    rows = agreed_rows([original, deployed, twin], inputs, labels, samples)
    valid = valid_range(workload, name)
    task = AttackTask(Pair(original, twin), original, deployed, inputs[rows], labels[rows], valid, budget, objective)
    names = dict.fromkeys([attack, *CONTROLS])

    def share(events: Tensor) -> Interval:
        return clopper_pearson(int(events.sum()), len(events), confidence)

    return AttackResult(
        name, models.name, attack, len(rows), budget, (share(right[0]), share(right[1])),
        share(right[0] & ~right[1]), share(answers[1] == answers[2]),
        {attack: score(attack, task, run_attack(attack, task)) for attack in names}, confidence, models.how,
    )  # fmt: skip


def labelled_inputs(workload: InferenceWorkload, name: str) -> tuple[Tensor, Tensor]:
    """All inputs [n, …] and their labels int64[n].

    Raises ``UsageError`` if the workload is not a classifier with labels.
    """
    batches, labels = workload.batches(), labels_of(workload)
    if not all(isinstance(batch, Tensor) and batch.is_floating_point() for batch in batches):
        raise UsageError(
            f"a batch of workload {name!r} is not one tensor of real numbers; only such inputs have gradients: choose another "
            "workload"
        )
    classes = classify(WorkloadClassifier(workload.model(), workload), batches[0]).shape[1]
    if labels is None:
        raise UsageError(
            f"workload {name!r} has no labels, which say what a right answer is; give Workload(…, labels=…), or "
            "labelled=True where the batches contain them"
        )
    inputs, truth = torch.cat(list(batches)), torch.cat([torch.as_tensor(part).flatten() for part in labels]).long()
    if len(truth) != len(inputs):
        raise UsageError(f"workload {name!r} has {len(truth):,} labels for {len(inputs):,} inputs; expected one each")
    if truth.min() < 0 or truth.max() >= classes:
        raise UsageError(
            f"labels of workload {name!r} range from {truth.min():,} to {truth.max():,}, but its model has {classes:,} classes; "
            f"expected labels from 0 to {classes - 1:,}"
        )
    return inputs, truth


def calibration_inputs(workload: InferenceWorkload, inputs: Tensor, name: str) -> tuple[Tensor, Tensor, str]:
    """Inputs to calibrate on, a mask bool[n] of the inputs left to attack, and a sentence about them.

    Raises:
        UsageError: the workload has a single input, and no other inputs for calibration.
    """
    attacked = torch.ones(len(inputs), dtype=torch.bool)
    if isinstance(workload, CalibratedWorkload):
        try:
            calibration = torch.cat(list(workload.clean_batches(CALIBRATION, CALIBRATION_SAMPLES)))
        except UsageError:  # there are no other inputs, or all are evaluated: some of these are set apart
            pass
        else:
            return (
                calibration,
                attacked,
                f"calibration: {count_text(len(calibration), 'clean input')} that the workload provides for calibration",
            )
    if len(inputs) < 2:
        raise UsageError(
            f"workload {name!r} has 1 input; expected 2 or more: every fifth calibrates and is not attacked"
        )
    attacked[::CALIBRATION_STRIDE] = False  # spread over all inputs, which may be sorted by class
    calibration = inputs[~attacked]
    note = f"calibration: every fifth input of the workload, {len(calibration):,} of {len(inputs):,}; these are not attacked"
    return calibration, attacked, note


def valid_range(workload: InferenceWorkload, name: str) -> tuple[Tensor, Tensor]:
    """Smallest and largest valid value of an input.

    Raises ``UsageError`` if the workload does not state them.
    """
    limits = getattr(workload, "input_range", None)
    if limits is None:
        raise UsageError(
            f"workload {name!r} has no range of valid inputs; give Workload(…, input_range=(least, largest))"
        )
    low, high = (torch.as_tensor(limit, dtype=torch.float32) for limit in limits)
    if not bool((low < high).all()):
        raise UsageError(f"workload {name!r} has an input_range whose least number is not below the largest")
    return low, high
