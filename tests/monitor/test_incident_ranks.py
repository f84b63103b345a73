"""Two real processes record one incident in one folder, and say once what all of them know."""

from __future__ import annotations

import pytest
import torch.distributed

from conftest import in_process
from monitor.two_ranks import run_two_ranks
from unsilent.events.event_files import read_events
from unsilent.events.event_kinds import IncidentBegan, Verdict
from unsilent.events.incident_folder import read_incident, read_rank_part
from unsilent.events.run_history import RunHistory

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed"),
]


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("incident")
    stderr = run_two_ranks("incident_ranks.py", folder)
    return folder, stderr


def test_both_ranks_write_one_folder(job):
    folder, _ = job
    incident = read_incident(folder)
    assert (incident.step, incident.suspect, incident.reason, incident.world_size) == (40, 1, "own history", 2)
    assert incident.ranks == [0, 1]
    parts = [read_rank_part(incident.folder, rank) for rank in incident.ranks]
    assert [len(one.alarms) > 0 for one in parts] == [False, True]
    assert all(one.file("series.npz") for one in parts)
    assert incident.fault_verdict.kind == "transient"


def test_all_ranks_report_the_same_incident_and_later_verdicts_refer_to_it(job):
    folder, _ = job
    events = read_events(folder / "e.jsonl")
    began = [one for one in events if isinstance(one, IncidentBegan)]
    assert {one.rank for one in began} == {0, 1}
    assert {(one.folder, one.since) for one in began} == {(str(read_incident(folder).folder), began[0].since)}
    verdicts = [one for one in events if isinstance(one, Verdict)]
    assert {(one.step, one.since) for one in verdicts} == {(40, ""), (50, began[0].since)}
    assert RunHistory(events).incident.folder == began[0].folder


@pytest.mark.parametrize("text", ["step 40: rank 1 ", "is recorded in", "kind of fault: transient", "step 50: rank 1 "])
def test_what_all_ranks_know_is_logged_once(text, job):
    assert job[1].count(text) == 1


def test_the_incident_is_shown(job):
    done = in_process("incident", "show", job[0], "--rank", "1", "--steps", "38..42", "--plain")
    assert done.returncode == 0, done.stderr
    assert "kind of fault: transient (UNSILENT-T01)" in done.stdout
