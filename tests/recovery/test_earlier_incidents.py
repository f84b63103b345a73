"""Incidents add up over jobs, and a job is started again at most once for a step and a device."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest

from unsilent.basics.errors import UsageError
from unsilent.recovery.earlier_incidents import (
    MOST_BYTES,
    MOST_INCIDENTS,
    EarlierIncident,
    incident_of,
    read_earlier_incidents,
    with_earlier_incidents,
    write_earlier_incidents,
)
from unsilent.recovery.evidence import SAME_DEVICE, Evidence, Execution
from unsilent.recovery.fault_verdict import judge

CLEAN = Execution(place=SAME_DEVICE, rank=0, is_equal=False, has_alarm=False, digest="a")
AGAIN = replace(CLEAN, is_equal=True, has_alarm=True)


def evidence(*executions, step=5, host="node1", device="cuda:0 GPU-1", rank=0):
    return Evidence(step=step, rank=rank, host=host, device=device, feature="gradient", executions=executions)


def job(path, known):
    """A job that ends with an alarm, beside the incidents of earlier ones."""
    earlier = read_earlier_incidents(path)
    verdict = judge(with_earlier_incidents(known, earlier))
    if (incident := incident_of(verdict)) is not None:
        write_earlier_incidents(path, [*earlier, incident])
    return verdict


def test_a_second_transient_fault_of_a_device_is_the_device(tmp_path):
    path = tmp_path / "incidents" / "devices.json"
    assert job(path, evidence(CLEAN, CLEAN)).exit_code == 16
    assert job(path, evidence(CLEAN, CLEAN, device="cuda:1 GPU-2", step=90)).kind == "transient"
    again = job(path, evidence(CLEAN, CLEAN, step=900))
    assert (again.kind, again.exit_code) == ("device", 17)
    assert "one incident before" in again.reason


def test_a_step_is_started_again_once_and_then_on_another_device(tmp_path):
    path = tmp_path / "devices.json"
    codes = [job(path, evidence(AGAIN, AGAIN)).exit_code for _ in range(4)]
    assert codes == [16, 17, 17, 17]
    moved = job(path, evidence(AGAIN, AGAIN, device="cuda:0 GPU-2"))
    assert (moved.kind, moved.exit_code) == ("data", 1)


def test_a_device_with_a_uuid_is_the_same_under_another_number(tmp_path):
    path, unique = tmp_path / "devices.json", "GPU-0a1b2c3d-0000-1111-2222-333344445555"
    assert job(path, evidence(CLEAN, CLEAN, device=f"cuda:0 NVIDIA H100 {unique}")).kind == "transient"
    assert job(path, evidence(CLEAN, CLEAN, device=f"cuda:3 NVIDIA H100 {unique}", step=9)).kind == "device"


def test_a_step_that_cannot_be_executed_again_is_started_again_once(tmp_path):
    path = tmp_path / "devices.json"
    assert [job(path, evidence()).exit_code for _ in range(3)] == [16, 17, 17]
    assert job(path, evidence(step=6)).exit_code == 16


def test_what_no_device_is_suspected_for_is_not_remembered(tmp_path):
    path = tmp_path / "devices.json"
    job(path, evidence(CLEAN, CLEAN, rank=-1))
    job(path, replace(evidence(AGAIN, AGAIN), batch_problem="NaN in the batch"))
    assert not path.exists()


def test_the_file_does_not_grow_for_ever(tmp_path):
    path = tmp_path / "devices.json"
    earlier = [EarlierIncident("\ud800" * 300, n, "device") for n in range(MOST_INCIDENTS)]
    write_earlier_incidents(path, [*earlier, incident_of(judge(evidence(CLEAN, CLEAN)))])
    again = read_earlier_incidents(path)
    assert len(again) == MOST_INCIDENTS
    assert again[-1].device == "node1 cuda:0 GPU-1"
    assert path.stat().st_size < MOST_BYTES


GOOD = {"device": "node1 cuda:0", "step": 5, "kind": "transient"}
HOSTILE = {
    "no object": [],
    "another schema": {"schema": 2, "incidents": []},
    "no list": {"schema": 1, "incidents": {"a": 1}},
    "no incident": {"schema": 1, "incidents": [None]},
    "a device that is a number": {"schema": 1, "incidents": [GOOD | {"device": 7}]},
    "a long device": {"schema": 1, "incidents": [GOOD | {"device": "x" * 10_000}]},
    "a step that is true": {"schema": 1, "incidents": [GOOD | {"step": True}]},
    "a huge step": {"schema": 1, "incidents": [GOOD | {"step": 10**30}]},
    "an unknown kind": {"schema": 1, "incidents": [GOOD | {"kind": ["device"]}]},
    "a kind without a suspicion": {"schema": 1, "incidents": [GOOD | {"kind": "benign"}]},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_one_line(tmp_path, name):
    path = tmp_path / "devices.json"
    path.write_text(json.dumps(HOSTILE[name]))
    with pytest.raises(UsageError, match="no file of earlier incidents") as error:
        read_earlier_incidents(path)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500 + len(str(path))


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff", b"[" * 100_000, b'{"schema": 1, "incidents": [' + b"9" * 5000 + b"]}"]
)
def test_a_file_that_is_no_json_is_one_line(tmp_path, content):
    path = tmp_path / "devices.json"
    path.write_bytes(content)
    with pytest.raises(UsageError, match="no file of earlier incidents"):
        read_earlier_incidents(path)


def test_a_large_file_or_a_pipe_is_not_read(tmp_path):
    path = tmp_path / "devices.json"
    path.write_bytes(b" " * (MOST_BYTES + 1))
    with pytest.raises(UsageError, match="larger than"):
        read_earlier_incidents(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(UsageError, match="not a regular file"):
        read_earlier_incidents(path)
