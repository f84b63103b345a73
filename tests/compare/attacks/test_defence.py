"""Defences see what they say, and attacks that know them look at what they look at."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.spatial.distance import jensenshannon

from compare.attacks.test_attacks import VALID, near, net
from unsilent.basics.errors import UsageError
from unsilent.compare.adapters.pruning import pruned
from unsilent.compare.attacks.defence import (
    EVADING_GATE,
    DivergenceDetector,
    adaptive,
    adversarially_trained,
    defence_scores,
    divergence,
    unseen_by_gate,
)
from unsilent.compare.attacks.evaluation import AttackTask, agreed_rows, run_attack, score
from unsilent.compare.attacks.search import Budget, Pair
from unsilent.workloads.model_fitting import Schedule


@pytest.fixture
def clean():
    return torch.rand(400, 1, 4, 4, generator=torch.Generator().manual_seed(2)) * 2 - 1


@pytest.fixture
def task(clean):
    original = net(3)
    adapted, labels = near(original), original(clean).argmax(1)
    rows = agreed_rows([original, adapted], clean[200:], labels[200:])
    return AttackTask(
        Pair(original, adapted),
        original,
        adapted,
        clean[200:][rows],
        labels[200:][rows],
        VALID,
        Budget(eps=0.1, steps=5),
    )


def test_divergence_is_that_of_scipy():
    one, other = torch.randn(2, 20, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = jensenshannon(one.softmax(1).numpy(), other.softmax(1).numpy(), axis=1) ** 2
    assert np.allclose(divergence(one, other).numpy(), expected)
    assert divergence(one, one).abs().max() < 1e-12
    far = divergence(torch.tensor([[99.0, -99.0]]), torch.tensor([[-99.0, 99.0]]))
    assert float(far) == pytest.approx(math.log(2))


def test_the_detector_has_the_chosen_rate_of_false_alarms(task, clean):
    detector = DivergenceDetector.calibrated(task.original, task.deployed, clean[:200], rate=0.05)
    with torch.no_grad():
        assert detector.alarms(task.original(clean[:200]), task.deployed(clean[:200])).double().mean() <= 0.05
    with pytest.raises(UsageError, match="expected 99 or more"):
        DivergenceDetector.calibrated(task.original, task.deployed, clean[:50])


def test_the_gate_does_not_see_what_both_models_get_wrong_alike():
    original, deployed = (torch.eye(3)[answers] for answers in ([0, 1, 1, 0], [0, 1, 2, 1]))
    assert unseen_by_gate(original, deployed, torch.tensor([0, 0, 0, 0])).tolist() == [False, True, False, False]


@pytest.mark.slow
def test_an_attack_that_knows_the_detector_passes_it_more_often(task, clean):
    detector = DivergenceDetector.calibrated(task.original, task.deployed, clean[:200], rate=0.05)
    counts = defence_scores(task, detector)
    assert [*counts] == ["longer search", "knows the detector", "knows the gate", "diva", "pgd"]
    assert counts["diva"]["evasive, last step"] > 0
    assert counts["diva"]["past the detector, last step"] <= counts["diva"]["evasive, last step"]
    assert counts["knows the detector"]["past the detector"] >= counts["diva"]["past the detector, last step"]
    assert counts["knows the gate"]["past the gate"] >= counts["diva"]["past the gate, last step"]
    assert counts["knows the gate"]["past the gate"] > 0
    budget = adaptive(task, EVADING_GATE).budget
    assert (budget.steps, budget.restarts) == (20, 5)


@pytest.mark.slow
def test_adversarial_training_makes_attacks_fail_more_often_and_keeps_zeros(clean):
    """On labels that a wide margin separates, so that there is something to gain."""
    teacher = net(7)
    with torch.no_grad():
        scores = teacher(clean)
    labels = scores.argmax(1)
    start = pruned(net(3), 0.3, [clean])
    zero = start[1].weight == 0
    plain = adversarially_trained(start, clean[:300], labels[:300], VALID, 0.0, Schedule(30, 50, 0.01))
    hard = adversarially_trained(start, clean[:300], labels[:300], VALID, 0.1, Schedule(30, 50, 0.01))
    assert torch.equal(hard[1].weight == 0, zero)
    wrong = []
    for model in (plain, hard):
        task = AttackTask(Pair(model, model), model, model, clean[300:], labels[300:], VALID, Budget(eps=0.1))
        wrong.append(int(score("pgd", task, run_attack("pgd", task)).wrong["last step"].sum()))
    assert wrong[1] < wrong[0]
