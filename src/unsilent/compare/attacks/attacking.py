"""An attack on an adapted copy of a workload's model, with its controls: what `unsilent attack` runs.

Invariant: no input that is attacked was calibrated on; labels are the workload's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from unsilent.compare.adapters.fake_quant import converted
from unsilent.compare.adapters.names import adapt
from unsilent.compare.attacks.evaluation import (
    CONTROLS,
    Scores,
    Task,
    agreed_rows,
    check_attack,
    classify,
    run_attack,
    score,
)
from unsilent.compare.attacks.objectives import Objective
from unsilent.compare.attacks.search import Budget, Pair
from unsilent.errors import UsageError
from unsilent.interval import Interval
from unsilent.report.shown import Shown
from unsilent.statistics.intervals import clopper_pearson
from unsilent.workloads.base import CALIBRATION, CalibratedWorkload, InferenceWorkload, labels_of

if TYPE_CHECKING:
    from unsilent.report.model import Report

CALIBRATION_SAMPLES = 200
CALIBRATION_SHARE = 0.2
"""Of the inputs, where a workload has no others to calibrate on."""
WHITEBOX_AGREEMENT = 0.99
"""With less agreement of the attacked twin and the deployed model, an attack is not called whitebox."""


@dataclass(frozen=True, repr=False)
class AttackResult(Shown):
    """What an attack and its controls achieved.

    Attributes:
        workload, adapter, attack: Names.
        n: Inputs that were attacked: both models get them right.
        accuracy: Of the original and of the deployed model, over all clean inputs that are not calibrated on.
        clean: Share of these that the original gets right and the deployed model wrong.
        twin_agreement: Share of these for which the attacked twin answers as the deployed model.
        scores: Of the attack and of the controls.
    """

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

    @property
    def is_whitebox(self) -> bool:
        """Whether the twin answers so often as the deployed model that attacking it is attacking that."""
        return (self.twin_agreement.estimate or 0.0) >= WHITEBOX_AGREEMENT

    def report(self) -> Report:
        """A row for each attack."""
        from unsilent.compare.attacks.report import report

        return report(self)


def attack_workload(
    workload: InferenceWorkload,
    adapter: str,
    attack: str,
    objective: Objective,
    budget: Budget,
    *,
    samples: int | None = None,
    confidence: float = 0.95,
) -> AttackResult:
    """Attack an adapted copy of the workload's model.

    Args:
        samples: Inputs to attack; None: all that both models get right.

    Raises:
        UsageError: the workload has no labels, no input range or no inputs to attack; an unknown adapter or attack; a model
            without gradients of inputs; fewer inputs than wanted.
    """
    check_attack(attack)
    original = workload.model()
    inputs, labels, calibration = labelled_inputs(workload)
    twin = adapt(original, adapter, calibration.split(100))
    deployed = converted(twin)
    answers = [classify(model, inputs).argmax(1) for model in (original, deployed, twin)]
    right = [answer == labels for answer in answers]
    rows = agreed_rows([original, deployed, twin], inputs, labels, samples)
    task = Task(
        Pair(original, twin), original, deployed, inputs[rows], labels[rows], valid_range(workload), budget, objective
    )
    names = dict.fromkeys([attack, *CONTROLS])

    def share(events: Tensor) -> Interval:
        return clopper_pearson(int(events.sum()), len(events), confidence)

    return AttackResult(
        workload.name, adapter, attack, len(rows), budget, (share(right[0]), share(right[1])),
        share(right[0] & ~right[1]), share(answers[1] == answers[2]),
        {name: score(name, task, run_attack(name, task)) for name in names}, confidence,
    )  # fmt: skip


def labelled_inputs(workload: InferenceWorkload) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs to attack [n, …], their labels int64[n], and other inputs to calibrate on; raises ``UsageError``."""
    batches, labels = workload.batches(), labels_of(workload)
    if not all(isinstance(batch, Tensor) and batch.is_floating_point() for batch in batches):
        raise UsageError(
            f"a batch of workload {workload.name!r} is not one tensor of real numbers; only such inputs have gradients"
        )
    if labels is None:
        raise UsageError(
            f"workload {workload.name!r} has no labels, which say what a right answer is; give Workload(…, labels=…), or "
            "labelled=True where the batches contain them"
        )
    inputs, truth = torch.cat(list(batches)), torch.cat([torch.as_tensor(part).flatten() for part in labels]).long()
    if len(truth) != len(inputs):
        raise UsageError(
            f"workload {workload.name!r} has {len(truth):,} labels for {len(inputs):,} inputs; expected one each"
        )
    if isinstance(workload, CalibratedWorkload):
        try:
            return inputs, truth, torch.cat(list(workload.clean_batches(CALIBRATION, CALIBRATION_SAMPLES)))
        except UsageError:  # it has none, or all are evaluated: some of these are set apart
            pass
    count = round(CALIBRATION_SHARE * len(inputs))
    if not count:
        raise UsageError(
            f"workload {workload.name!r} has {len(inputs):,} inputs; expected 3 or more: a fifth calibrates"
        )
    return inputs[count:], truth[count:], inputs[:count]


def valid_range(workload: InferenceWorkload) -> tuple[Tensor, Tensor]:
    """Least and largest valid number of an input; raises ``UsageError`` where the workload does not say."""
    limits = getattr(workload, "input_range", None)
    if limits is None:
        raise UsageError(
            f"workload {workload.name!r} has no range of valid inputs; give Workload(…, input_range=(least, largest))"
        )
    low, high = (torch.as_tensor(limit, dtype=torch.float32) for limit in limits)
    if not bool((low < high).all()):
        raise UsageError(f"workload {workload.name!r} has an input_range whose least number is not below the largest")
    return low, high
