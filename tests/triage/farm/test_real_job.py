"""Incidents of two real processes: what is planned, and one of each sort made."""

from __future__ import annotations

import pytest

from triage.farm import made_incidents as made
from unsilent.triage.bundle import Bundle
from unsilent.triage.farm.collection import make_collection
from unsilent.triage.farm.real_job import real_incidents


def test_planned_ones_are_the_same_for_the_same_seed_and_two_of_seven_are_healthy():
    some, more = real_incidents(7, 1, 600), real_incidents(14, 1, 600)
    assert more[:7] == some
    assert [one.number for one, _ in some] == list(range(600, 607))
    assert sum(one.is_healthy for one, _ in more) == 4
    assert {one.rank for one, anomaly in more if anomaly.kind == "checkpoint"} == {-1}
    assert all(one.family == f"real {anomaly.kind}" and one.world_size == 2 for one, anomaly in more)


@pytest.mark.slow
def test_each_has_a_twin_that_is_recorded_at_the_same_step_without_an_alarm(tmp_path):
    incidents = make_collection(tmp_path / "farm", 0, 2, real=6)
    assert [one.planned.number for one in incidents] == list(range(6))
    for one in incidents:
        bundle, twin = Bundle(one.folder / "incident"), Bundle(one.folder / "twin")
        assert not made.missing(bundle) + made.missing(twin)
        assert bundle.incident.world_size == 2
        assert bundle.incident.step >= one.planned.step
        if not one.twin_alarms:
            assert twin.incident.step == bundle.incident.step
        assert set(bundle.series()[0][0].names) == set(twin.series()[0][0].names)
    assert sum(one.twin_alarms == 0 for one in incidents) >= 5
    assert sum(one.alarms > 0 for one in incidents if not one.planned.is_healthy) >= 4
