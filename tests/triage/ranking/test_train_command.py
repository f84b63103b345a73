"""``unsilent triage train``: a model of a collection that was graded."""

from __future__ import annotations

import json

import pytest

from conftest import in_process
from triage.ranking import made_labels as labels
from unsilent.triage.farm.labelled import LABELS_FILE, write_labels
from unsilent.triage.ranking.model_file import read_model


@pytest.mark.slow
def test_it_learns_from_a_collection(tmp_path):
    incidents = labels.collection()
    path = labels.ROOT_PATH / LABELS_FILE
    write_labels(path, incidents)
    done = in_process("triage", "train", path.parent, "-o", tmp_path / "m.npz", "--json")
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert shown["headline"].startswith("Learned from 24 incidents; 0 more are masked")
    rows = {one["query"]: (one["incidents"], one["right"]) for one in shown["results"]}
    assert rows["scan-nonfinite"] == (24, 6)
    assert rows["test-device"] == (24, 0)
    twice = in_process("triage", "train", path.parent, path.parent, "-o", tmp_path / "twice.npz", "--json")
    assert json.loads(twice.stdout)["headline"].startswith("Learned from 48 incidents")
    signals = labels.signals(incidents[0])
    assert read_model(tmp_path / "m.npz").scored_queries(signals) == labels.model().scored_queries(signals)


@pytest.mark.parametrize(
    ("words", "message"),
    [((), "no collection was given"), (("absent",), "labels.jsonl"), ((".", "--seed", -1), "--seed is -1")],
)
def test_errors_are_one_line(tmp_path, words, message):
    done = in_process("triage", "train", *words, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_folder_that_cannot_be_written_is_an_error_in_one_line(tmp_path):
    path = labels.ROOT_PATH / LABELS_FILE
    write_labels(path, labels.collection())
    done = in_process("triage", "train", path.parent, "-o", tmp_path / "absent" / "m.npz")
    assert done.returncode == 2
    assert "cannot write" in done.stderr
