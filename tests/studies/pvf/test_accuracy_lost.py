"""Accuracy lost per fault: against answers of the model under each stored fault, compared with the labels here."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import unsilent
from conftest import in_process
from unsilent.faults import Fault
from unsilent.sites import Parameters
from unsilent.studies.pvf.kind import PvfStore

LABELLED = """

def labelled(shift=0):
    torch.manual_seed(3)
    labels = [(one.sum(1) > shift).long() for one in batches()]
    return unsilent.Workload(Tiny().eval(), batches(), labels=labels, judge="top1", name="labelled")
"""


@pytest.fixture
def labelled(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("tiny.py").write_text(Path("tiny.py").read_text() + LABELLED)
    return "tiny.py:labelled"


def campaign(*words):
    done = in_process("pvf", *words, "--store", "s.sqlite", "--quiet", "-o", "page.html")
    assert done.returncode == 0, done.stderr
    shown = in_process("report", "s.sqlite", "--json")
    return {row["target"]: row for row in json.loads(shown.stdout)["results"]}


@pytest.mark.slow
def test_right_answers_that_are_lost(labelled):
    rows = campaign(labelled, "--trials", 40, "--fault", "random:count=3", "--per", "tensor")
    workload = unsilent.load(labelled)
    model, truth = workload.model(), torch.cat(workload.labels()).numpy()

    def answers():
        with torch.no_grad():
            output = torch.cat([model(batch) for batch in workload.batches()])
        return output.argmax(1).numpy(), output.isfinite().all(1).numpy()

    right = answers()[0] == truth
    assert 0 < right.sum() < right.size
    lost = {}
    with PvfStore("s.sqlite") as store:
        for row in store.rows():
            faults = [Fault.from_json(one) for one in json.loads(row.faults)]
            with Parameters(model).inject(faults):
                answer, finite = answers()
            lost.setdefault(row.trial.target, []).append((right & ((answer != truth) | ~finite)).mean())
    for target, shares in lost.items():
        assert rows[target]["score_lost"]["estimate"] == pytest.approx(np.mean(shares))
        assert rows[target]["score_lost"]["estimate"] <= rows[target]["estimate"]
    assert max(row["score_lost"]["estimate"] for row in rows.values()) > 0
    assert "accuracy lost" in Path("page.html").read_text()


def test_no_labels_no_accuracy(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = campaign(f"{tiny}:make", "--trials", 5)
    assert all(row["score_lost"] is None for row in rows.values())
    assert "accuracy lost" not in Path("page.html").read_text()


def test_labels_that_do_not_fit_are_noted(labelled):
    source = Path("tiny.py").read_text().replace(".long() for one", ".float() * 0.5 for one")
    Path("tiny.py").write_text(source)
    rows = campaign(labelled, "--trials", 5)
    assert all(row["score_lost"] is None for row in rows.values())
    assert "The accuracy lost is not computed, because the labels of a batch are float32[" in in_process(
        "report", "s.sqlite"
    ).stdout.replace("\n", " ")


def test_labels_of_other_batches_are_noted(labelled):
    source = Path("tiny.py").read_text().replace("labels=labels, judge", "labels=[torch.cat(labels)], judge")
    Path("tiny.py").write_text(source)
    rows = campaign(labelled, "--trials", 5)
    assert all(row["score_lost"] is None for row in rows.values())
    assert "there are labels of 1 batch, but 2 batches of inputs" in Path("page.html").read_text()
