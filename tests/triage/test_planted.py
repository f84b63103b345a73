"""Incidents that the real monitor wrote of trainings with a planted fault, without the fault verdict that it recorded."""

from __future__ import annotations

import json

import pytest

from unsilent.events.incident_folder import INCIDENT_FILE, find_incident
from unsilent.incidents.plant import plant
from unsilent.incidents.planted_job import run_planted
from unsilent.recovery import step_replay
from unsilent.triage.findings import FindingKind
from unsilent.triage.investigation import investigate


@pytest.mark.parametrize(
    ("kind", "seed", "found", "tensor"),
    [("checkpoint", 2, FindingKind.STATE, "model/body.second.bias"), ("data", 0, FindingKind.BATCH, "0/0/0")],
)
def test_the_cause_is_named_without_the_verdict(tmp_path, monkeypatch, kind, seed, found, tensor):
    monkeypatch.setattr(step_replay, "SECONDS", 0.0)
    incident = plant(kind, seed=seed)
    run_planted(incident, events=tmp_path / "events.jsonl")
    folder = find_incident(tmp_path)
    with_verdict = investigate(folder, is_run=True)
    assert [one.query.query.template for one in with_verdict.executed] == ["read-verdict"]
    assert with_verdict.localised.kind is FindingKind[kind.upper()]
    values = json.loads((folder / INCIDENT_FILE).read_text())
    del values["fault_verdict"]
    (folder / INCIDENT_FILE).write_text(json.dumps(values))
    localised = investigate(folder, is_run=True).localised
    assert (localised.kind, localised.tensor, localised.ranks, localised.step) == (found, tensor, (0,), incident.step)
