"""Incidents add up over runs, also where a run continues from a checkpoint, so that its own count of steps begins anew."""

from __future__ import annotations

import pytest

from unsilent.events.host import FIRST_STEP
from unsilent.monitor.alarm_replay import FaultJudge
from unsilent.recovery.evidence import Evidence
from unsilent.recovery.rank_link import RankLink


@pytest.fixture
def verdict(tmp_path, monkeypatch):
    """``verdict(first, step, device)``: of a step that cannot be executed again, in a run that begins with step ``first``."""

    def judged(first, step, device):
        monkeypatch.setenv(FIRST_STEP, str(first))
        evidence = Evidence(step=step, rank=1, host="node-7", device=device, feature="gradient", problem="no loop")
        found = FaultJudge(RankLink(), tmp_path / "devices.json").judge(evidence)
        assert found.step == step
        reasons.append(found.reason)
        return found.kind, found.exit_code

    reasons = judged.reasons = []
    return judged


def test_a_step_of_the_training_comes_again_on_the_same_device(verdict):
    assert verdict(0, 25, "cpu slot 1") == ("undetermined", 16)
    assert verdict(20, 5, "cpu slot 1") == ("undetermined", 17)
    assert "in the same step of the training (25)" in verdict.reasons[-1]


def test_a_step_of_the_training_comes_again_on_another_device(verdict):
    assert verdict(0, 25, "cpu slot 1") == ("undetermined", 16)
    assert verdict(20, 5, "cpu slot 2") == ("data", 1)
    assert "step 25 of the training had one incident on another device" in verdict.reasons[-1]


def test_the_same_number_after_a_checkpoint_is_another_step(verdict):
    assert verdict(0, 25, "cpu slot 1") == ("undetermined", 16)
    assert verdict(20, 25, "cpu slot 2") == ("undetermined", 16)
    assert verdict("x", 26, "cpu slot 1") == ("undetermined", 16)
