"""The folder of an incident, part by part: what can be read, what is missing, and files that nobody of ours wrote."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest

from triage import made_triage as made
from unsilent.basics.errors import UsageError
from unsilent.events.incident_folder import INCIDENT_FILE, SavedCheckpoint
from unsilent.triage.bundle import Bundle
from unsilent.triage.findings import Blanks, Outcome, Query
from unsilent.triage.investigation import investigate
from unsilent.triage.queries.table import TEMPLATES, execute
from unsilent.triage.triage_report import Triage


def change(file, **values):
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def test_all_parts_are_read(tmp_path):
    bundle = Bundle(made.folder(tmp_path))
    series, missing = bundle.series()
    assert (sorted(series), missing) == ([0, 1], ())
    assert series[1].steps.tolist() == list(made.STEPS)
    np.testing.assert_array_equal(series[1].values, made.values(1))
    states, _ = bundle.states(1)
    assert "model/fc.weight" in states[1].tensors
    assert not [name for name in states[1].tensors if "generators" in name]
    assert states[1].values["optimizers/0/groups/0/lr"] == 0.1


def test_checkpoints_are_found_from_the_folder_of_the_incident(tmp_path):
    elsewhere = str(tmp_path / "60.pt")
    saved = [SavedCheckpoint(path=one, time=0.0, manifest=f"{one}.manifest.json") for one in ("saved/80.pt", elsewhere)]
    path = made.folder(tmp_path, checkpoints=tuple(saved))
    found = Bundle(path).incident.checkpoints
    assert [one.path for one in found] == [str(path / "saved/80.pt"), elsewhere]
    assert found[0].manifest == str(path / "saved/80.pt.manifest.json")


def test_a_step_that_was_executed_again_counts_as_the_first_time(tmp_path):
    path = made.folder(tmp_path)
    steps = [*made.STEPS]
    steps[-1] = made.STEPS[-2]
    change(path / "rank0" / "rank.json", series_steps=steps)
    series, _ = Bundle(path).series(0)
    assert len(series[0].steps) == len(steps) - 1
    np.testing.assert_array_equal(series[0].values, made.values(0)[:-1])


def test_what_is_missing_is_said(tmp_path):
    path = made.folder(tmp_path, world_size=3)
    (path / "rank1" / "series.npz").unlink()
    series, missing = Bundle(path).series()
    assert list(series) == [0]
    assert len(missing) == 2
    assert "rank 1: there is no series.npz" in missing[0]
    assert "no part of 1 of 3 ranks" in missing[1]


FILES = ("rank.json", "series.npz", "batch.safetensors", "state.safetensors")


def damage(file, how):
    content = file.read_bytes()
    if how == "missing":
        file.unlink()
    elif how == "half":
        file.write_bytes(content[: len(content) // 2])
    elif how == "flipped":
        file.write_bytes(bytes(byte ^ (0xFF if n % 50 == 7 else 0) for n, byte in enumerate(content)))
    elif how == "pickle":
        file.write_bytes(pickle.dumps({"a": 1}))
    elif how == "link":
        file.rename(file.with_name("elsewhere"))
        file.symlink_to("elsewhere")
    elif how == "folder":
        file.unlink()
        file.mkdir()
    else:
        file.write_bytes(b"")


@pytest.mark.parametrize("how", ["missing", "half", "flipped", "pickle", "link", "folder", "empty"])
@pytest.mark.parametrize("name", FILES)
def test_no_query_raises_on_a_damaged_part(tmp_path, name, how):
    path = made.folder(tmp_path)
    damage(path / "rank1" / name, how)
    bundle = Bundle(path)
    found = [execute(bundle, Query(template)) for template in TEMPLATES]
    assert any("rank 1" in text for one in found for text in one.missing)
    assert Triage(investigate(path, is_run=True), 5).report().headline


@pytest.mark.parametrize(
    "values",
    [
        {"series_steps": [10**30] * 40}, {"series_steps": [-1] * 40}, {"series_steps": []}, {"state_step": "x"}, {"rank": None},
        {"alarms": [{"kind": "alarm"}]}, {"schema": 9},
    ],
)  # fmt: skip
def test_no_query_raises_on_fields_that_no_monitor_writes(tmp_path, values):
    path = made.folder(tmp_path)
    change(path / "rank0" / "rank.json", **values)
    bundle = Bundle(path)
    assert any("rank 0" in text for name in TEMPLATES for text in execute(bundle, Query(name)).missing)


def test_an_incident_without_any_part_says_what_is_missing(tmp_path):
    path = made.folder(tmp_path, ranks=0, world_size=2)
    bundle = Bundle(path)
    for name in ("find-onset", "compare-gradients", "scan-nonfinite", "inspect-batch", "inspect-state"):
        found = execute(bundle, Query(name))
        assert found.outcome is Outcome.UNANSWERED
        assert "no part of 2 of 2 ranks" in found.missing[0]
    assert execute(bundle, Query("inspect-batch", Blanks(rank=5))).missing


@pytest.mark.parametrize("how", ["missing", "half", "schema"])
def test_without_the_first_file_there_is_no_incident(tmp_path, how):
    path = made.folder(tmp_path)
    if how == "schema":
        change(path / INCIDENT_FILE, schema=2)
    else:
        damage(path / INCIDENT_FILE, how)
    with pytest.raises(UsageError) as error:
        Bundle(path)
    assert "\n" not in str(error.value)
