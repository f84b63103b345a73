"""Planted incidents: all of one follows from its arguments, and the real monitor and its verdict name what was planted."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from unsilent.basics.errors import UsageError
from unsilent.events.incident_folder import BATCH_FILE, STATE_FILE, read_incident, read_rank_part
from unsilent.incidents.plant import VARIETIES, WORKLOADS, plant
from unsilent.incidents.planted_job import changed_batch, run_planted
from unsilent.incidents.planted_workloads import draw_batch
from unsilent.monitor.reporter import NO_ALARM
from unsilent.recovery import step_replay
from unsilent.recovery.tensor_files import read_tensors

ROOT = Path(__file__).parents[2]


def test_an_incident_follows_from_its_arguments():
    for kind in VARIETIES:
        for workload in WORKLOADS:
            made = [plant(kind, world_size=4, seed=seed, workload=workload) for seed in range(30)]
            assert made == [plant(kind, world_size=4, seed=seed, workload=workload) for seed in range(30)]
            assert {one.rank for one in made} == {0, 1, 2, 3}
            assert {one.variety for one in made} == set(VARIETIES[kind])
            assert len({one.draws for one in made}) == 30


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({"kind": "cosmic"}, "kind of incident"),
        ({"kind": "undetermined"}, "kind of incident"),
        ({"kind": "device", "probability": 0}, "probability is 0"),
        ({"kind": "device", "probability": float("nan")}, "probability is nan"),
        ({"kind": "benign", "probability": 0.5}, "probability is 0.5"),
        ({"kind": "data", "world_size": 0}, "world_size"),
        ({"kind": "data", "seed": -1}, "seed"),
        ({"kind": "data", "workload": "resnet"}, "workload of planted incidents"),
    ],
)
def test_what_cannot_be_planted_is_one_line(arguments, what):
    with pytest.raises(UsageError, match=what) as error:
        plant(**arguments)
    assert "\n" not in str(error.value)


def test_batches_are_changed_as_the_variety_says():
    batch = draw_batch(0, 5, 1)
    assert torch.equal(draw_batch(0, 5, 1).images, batch.images)
    assert not torch.equal(draw_batch(0, 6, 1).images, batch.images)
    incident = plant("data")
    changed = {name: changed_batch(batch, replace(incident, variety=name)) for name in VARIETIES["data"]}
    assert changed["NaN"].images.isnan().sum() == 1
    assert not batch.images.isnan().any()
    assert (changed["exchanged labels"].labels != batch.labels).all()
    assert torch.equal(changed["inputs times 1e6"].images, batch.images * 1e6)


@pytest.mark.parametrize(
    ("kind", "seed", "found"),
    [("checkpoint", 2, "checkpoint"), ("data", 0, "data"), ("numerics", 0, "numerics"), ("benign", 0, "undetermined")],
)
def test_one_rank_names_what_it_can(monkeypatch, kind, seed, found):
    monkeypatch.setattr(step_replay, "SECONDS", 0.0)
    outcome = run_planted(plant(kind, seed=seed))
    assert (outcome.kind, outcome.suspect) == (found, 0)


@pytest.mark.slow
def test_two_ranks_tell_a_device_from_the_data(tmp_path):
    """One gang of processes; the file goes on where it was ended."""
    command = [sys.executable, "-m", "benchmarks.incident_verdicts", "rows.jsonl", "--ranks", "2", "--per-kind"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "src"))), "OMP_NUM_THREADS": "1"}
    for count in (1, 1):
        done = subprocess.run(
            [*command, str(count)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500
        )
        assert done.returncode == 0, done.stderr
    table = {line.split("|")[1].strip(): line.split("|")[2:6] for line in done.stdout.splitlines() if line[:1] == "|"}
    for name in ("device, p = 1", "checkpoint", "numerics", "benign"):
        assert table[name][3].strip().startswith("100.0"), done.stdout
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 9


def test_the_training_without_the_anomaly_is_recorded_in_a_step_that_somebody_noticed(tmp_path):
    incident = plant("data", seed=0)
    assert incident.variety == "NaN"
    outcome = run_planted(incident, has_anomaly=False, noticed=incident.step, events=tmp_path / "events.jsonl")
    recorded = read_incident(tmp_path)
    assert outcome.alarm_step is None
    assert (recorded.step, recorded.suspect, recorded.reason, recorded.alarms) == (incident.step, -1, NO_ALARM, ())
    part = read_rank_part(recorded.folder, 0)
    assert (part.state_step, part.series_steps[-1]) == (incident.step, incident.step)
    batch, state = (read_tensors(part.file(name)) for name in (BATCH_FILE, STATE_FILE))
    torch.testing.assert_close(batch[0][0][0], draw_batch(incident.seed, incident.step, 0).images, rtol=0, atol=0)
    assert state["optimizers"][0]["state"]["scores.bias"]["step"] == incident.step


@pytest.mark.slow
def test_an_alarm_before_the_step_that_somebody_notices_is_the_incident(tmp_path):
    incident = plant("data", seed=0)
    run_planted(incident, noticed=incident.step + 3, events=tmp_path / "events.jsonl")
    recorded = read_incident(tmp_path)
    assert (recorded.step, recorded.suspect) == (incident.step, 0)
    assert len(recorded.alarms) > 0
