"""The folder of an incident: what is written is read again, and what nobody of ours wrote is refused in one line."""

from __future__ import annotations

import json
import os

import pytest

from events import made_incidents as made
from unsilent.basics.errors import UsageError
from unsilent.events.incident_folder import (
    INCIDENT_FILE,
    MOST_BYTES,
    RANK_FILE,
    add_fault_verdict,
    find_incident,
    ranks_in,
    read_incident,
    read_rank_part,
)
from unsilent.recovery.fault_verdict import FaultVerdict

VERDICT = FaultVerdict(
    kind="transient", step=90, rank=1, host="node-7", device="cuda:1", code="UNSILENT-T01", action="go on",
    reason="5 clean replays", exit_code=0,
)  # fmt: skip


def test_what_is_written_is_read_again(tmp_path):
    folder = made.folder(tmp_path)
    assert read_incident(folder) == made.incident(folder=folder)
    assert read_rank_part(folder, 1) == made.part(1, folder=folder / "rank1")
    assert read_incident(folder).ranks == [0, 1]
    assert read_incident(folder).since == "step 90, rank 1, gradient fc.weight l2"


def test_the_fault_verdict_is_added_and_replaced(tmp_path):
    folder = made.folder(tmp_path)
    add_fault_verdict(folder, FaultVerdict(kind="undetermined", step=90, rank=-1))
    add_fault_verdict(folder, VERDICT)
    assert read_incident(folder) == made.incident(folder=folder, fault_verdict=VERDICT)
    assert {one.name for one in folder.iterdir()} == {INCIDENT_FILE, "rank0", "rank1"}  # no drafts


def test_a_fault_verdict_that_cannot_be_written_leaves_the_old_record(tmp_path, monkeypatch):
    folder = made.folder(tmp_path)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UsageError, match="No space left on device; check the folder and its disk"):
        add_fault_verdict(folder, VERDICT)
    assert read_incident(folder).fault_verdict is None
    assert {one.name for one in folder.iterdir()} == {INCIDENT_FILE, "rank0", "rank1"}


def test_the_incident_of_a_job_is_found_in_its_folder(tmp_path):
    folder = made.folder(tmp_path)
    assert find_incident(tmp_path) == find_incident(folder.parent) == find_incident(folder) == folder
    (tmp_path / "incidents" / "unfinished").mkdir()
    assert find_incident(tmp_path) == folder


def test_several_incidents_of_a_job_are_listed(tmp_path):
    folder = made.folder(tmp_path)
    made.write_record(folder.with_name("95-ffff0000"), made.incident())
    with pytest.raises(UsageError, match=r"has 2 incidents; give one of .*90-0a1b2c3d.*95-ffff0000"):
        read_incident(tmp_path)


@pytest.mark.parametrize("path", ["nothing", "empty"])
def test_no_incident_is_one_line(path, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError) as error:
        read_incident(tmp_path / path)
    assert "\n" not in str(error.value)


BAD = {
    "empty": b"",
    "truncated": b'{"schema": 1, "run": "0a1b',
    "a list": b"[]",
    "not text": b"\xff\xfe\x00",
    "deep": b'{"schema": 1, "settings": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    "too large": b" " * (MOST_BYTES + 1),
    "a pickle": b"\x80\x04\x95\x10\x00",
}


@pytest.mark.parametrize("content", BAD.values(), ids=BAD)
@pytest.mark.parametrize("name", [INCIDENT_FILE, f"rank1/{RANK_FILE}"])
def test_a_record_that_is_none_is_refused_in_one_line(name, content, tmp_path):
    folder = made.folder(tmp_path)
    (folder / name).write_bytes(content)
    with pytest.raises(UsageError) as error:
        read_incident(folder) if name == INCIDENT_FILE else read_rank_part(folder, 1)
    assert "\n" not in str(error.value)
    assert str(folder / name) in str(error.value)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"schema": 2}, "its schema is '2', and this version reads 1"),
        ({"schema": None}, "its schema is 'None'"),
        ({"step": "many"}, "step is 'many'; expected a whole number"),
        ({"step": 2**70}, "step is "),
        ({"alarms": [{"kind": "alarm"}]}, "missing"),
        ({"alarms": [[]]}, "alarms is"),
        ({"verdicts": {"a": 1}}, "verdicts is"),
        (
            {"fault_verdict": {"kind": "bad luck", "step": 1, "rank": 1}},
            "kind is 'bad luck'; expected transient, device, ",
        ),
        (
            {"fault_verdict": {"kind": "device", "step": 1, "rank": 1, "exit_code": 10**9}},
            "exit_code is 1000000000; expected 0 to 255",
        ),
        ({"fault_verdict": {"kind": "device", "step": -1, "rank": 1}}, "step is -1; expected 0 to"),
        ({"world_size": 10**18}, "world_size is 1000000000000000000; expected 1 to"),
        ({"step": -3}, "step is -3; expected 0 to"),
        ({"first_step": -3}, "first_step is -3; expected 0 to"),
        ({"suspect": -2}, "suspect is -2; expected -1 to"),
        ({"fault_verdict": "transient"}, "fault_verdict is"),
        ({"settings": {"a": [[[[[[[[[[1]]]]]]]]]]}}, "settings is"),
    ],
)
def test_a_field_that_is_none_is_named(values, said, tmp_path):
    folder = made.folder(tmp_path)
    made.change(folder / INCIDENT_FILE, **values)
    with pytest.raises(UsageError) as error:
        read_incident(folder)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_fields_of_later_versions_are_left_out_and_a_folder_in_the_record_is_not_believed(tmp_path):
    folder = made.folder(tmp_path)
    made.change(folder / INCIDENT_FILE, further=[1, 2], folder="/etc")
    assert read_incident(folder) == made.incident(folder=folder)


def test_texts_are_harmless(tmp_path):
    folder = made.folder(tmp_path)
    made.change(folder / INCIDENT_FILE, host="a\x1b[31m\nb" + "x" * 5000)
    host = read_incident(folder).host
    assert host.isprintable()
    assert len(host) < 1100


def test_links_are_not_followed(tmp_path):
    folder, secret = made.folder(tmp_path), tmp_path / "secret.json"
    secret.write_bytes((folder / INCIDENT_FILE).read_bytes())
    (folder / INCIDENT_FILE).unlink()
    (folder / INCIDENT_FILE).symlink_to(secret)
    with pytest.raises(UsageError, match="is a link"):
        read_incident(folder)
    (folder / "rank2").symlink_to(folder / "rank1")
    (folder / "rank0" / "series.npz").unlink()
    (folder / "rank0" / "series.npz").symlink_to(folder / "rank1" / "series.npz")
    assert ranks_in(folder) == [0, 1]
    assert read_rank_part(folder, 0).file("series.npz") is None
    with pytest.raises(UsageError, match=r"has no part of rank 2; it has those of ranks 0(,| and) 1"):
        read_rank_part(folder, 2)


def test_a_pipe_is_not_waited_for(tmp_path):
    folder = made.folder(tmp_path)
    (folder / INCIDENT_FILE).unlink()
    os.mkfifo(folder / INCIDENT_FILE)
    with pytest.raises(UsageError, match="is not a regular file"):
        read_incident(folder)


@pytest.mark.parametrize("name", ["rank", "rank-1", "rank1x", "rank٣", "rank9999999", "..rank1"])
def test_other_folders_are_no_ranks(name, tmp_path):
    folder = made.folder(tmp_path)
    (folder / name).mkdir()
    assert ranks_in(folder) == [0, 1]


def test_nothing_written_is_a_pickle(tmp_path):
    folder = made.folder(tmp_path)
    json.loads((folder / INCIDENT_FILE).read_text())
    for file in folder.rglob("*"):
        assert file.suffix in ("", ".json", ".npz")
