"""The norm of clipping is checked in every step."""

import math

import pytest
import torch

from unsilent.detectors.robust_z import RobustZ
from unsilent.detectors.rules import rules_of_preset
from unsilent.monitor.step_checks import StepChecks

NORM = (1, 2)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("at", [0, 1, 2, 5, 12, 19, 22, 40])
def test_a_norm_that_is_not_finite_is_found_in_every_step(at, bad):
    checks = StepChecks(rules_of_preset("all"))
    for step in range(60):
        checks.add_norm(step, NORM, torch.tensor(bad if step == at else 1.0), False)
    ((step, finding),) = checks.take()
    assert (step, finding.rule) == (at, "nonfinite")


def test_a_norm_that_is_not_finite_is_found_while_a_level_is_learnt_anew():
    rules = rules_of_preset("all")
    relearn = next(rule.relearn for rule in rules if isinstance(rule, RobustZ))
    checks = StepChecks(rules)
    norms = [1.0] * 40 + [1e6] * (relearn + 3) + [math.inf]
    for step, norm in enumerate(norms):
        checks.add_norm(step, NORM, torch.tensor(norm), False)
    first, second = checks.take()
    assert (first[0], first[1].rule) == (40, "robust-z")
    assert (second[0], second[1].rule) == (len(norms) - 1, "nonfinite")
