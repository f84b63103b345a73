"""The published equations as an order: trained on made incidents, they rank the right template first on others."""

from __future__ import annotations

import pytest
import torch

from triage.ranking import made_labels as labels
from unsilent.triage.farm.naming import HEALTHY
from unsilent.triage.possible_queries import possible_queries
from unsilent.triage.ranking.equations import fit_equations
from unsilent.triage.ranking.examples import examples_of
from unsilent.triage.ranking.words import fit_words


@pytest.fixture(scope="module")
def order():
    return fitted(0)


def fitted(seed):
    examples = examples_of(labels.collection())
    return fit_equations(examples, fit_words([one.report for one in examples]), seed)


def test_the_right_template_comes_first_on_other_incidents(order):
    for one in labels.collection(2, 100):
        signals = labels.signals(one)
        scored = order.scored_queries(signals)
        assert len(scored) == len(possible_queries(signals.bundle, signals.candidates))
        assert sum(each.score for each in scored) == pytest.approx(1, abs=1e-5)
        if one.planned.family != HEALTHY:
            assert scored[0].query.template == labels.TEMPLATES[one.planned.family]


@pytest.mark.slow
def test_a_seed_decides_and_the_generator_of_the_program_is_left_alone(order):
    before, signals = torch.get_rng_state(), labels.signals(labels.collection()[0])

    def scores(seed):
        return [one.score for one in fitted(seed).scored_queries(signals)]

    assert scores(0) == [one.score for one in order.scored_queries(signals)]
    assert scores(1) != scores(0)
    assert torch.equal(torch.get_rng_state(), before)
