"""The record of the first alarm of a run: what it holds, that it is made once, and that it never harms a job."""

from __future__ import annotations

import contextlib
import pickle
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from conftest import few
from events import made_events
from monitor.unreachable import Unreachable
from unsilent.checkpoints.verified_saving import verified_save
from unsilent.detectors.series import load_recording
from unsilent.events.event_files import read_events
from unsilent.events.event_kinds import Alarm, AlarmExplained, IncidentBegan, Started, Verdict
from unsilent.events.host import FIRST_STEP
from unsilent.events.incident_folder import read_incident, read_rank_part
from unsilent.monitor import incident_writer
from unsilent.monitor.actions import MonitorStop
from unsilent.monitor.monitor import Monitor
from unsilent.recovery.fault_verdict import FaultVerdict
from unsilent.recovery.tensor_files import read_tensors
from unsilent.workloads.trainings.snapshots import first_snapshot_difference

AT, STEPS = 40, 60


class Count(Unreachable):
    """Nothing leads to it: it is no part of the loop."""


class Keep(Unreachable):
    """States at the beginning of each step; no part of the loop either."""

    def __init__(self):
        self.states = []

    def __call__(self, model, optimizer):
        self.states.append(incident_writer.host_copy(incident_writer.training_state(model, [optimizer])))


def train(folder, faults=(AT,), loop="plain", steps=STEPS, at_start=None, **options):
    """The monitor of a training in whose gradient there are faults; ``at_start`` gets model and optimizer before each step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Dropout(0.1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    count = Count()
    count.backwards = 0

    def spoil(gradient):
        count.backwards += 1
        return gradient * 1e15 if count.backwards - 1 in faults else gradient

    model[0].weight.register_hook(spoil)
    batches = [torch.randn(16, 8) for _ in range(steps)]

    def step(batch):
        if at_start is not None:
            at_start(model, optimizer)
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    options = {"events": folder / "e.jsonl", "sampling": 1, **options}
    with Monitor(model, optimizer, **options) as monitor:
        for sink in options.get("sinks", ()):
            sink.monitor = monitor
        if loop == "iterate":
            for batch in monitor.iterate(batches):
                step(batch)
        else:
            for batch in batches:
                monitor.step(step, batch) if loop == "step" else step(batch)
    return monitor


def events(folder, kind):
    return [one for one in read_events(folder / "e.jsonl") if isinstance(one, kind)]


def test_the_first_alarm_is_recorded_and_later_ones_refer_to_it(tmp_path):
    train(tmp_path, faults=(AT, AT + 15))
    incident, (began,) = read_incident(tmp_path), events(tmp_path, IncidentBegan)
    first, *later = events(tmp_path, Verdict)
    since = f"step {AT}, rank 0, {first.tensor}"
    assert (began.folder, began.step, began.since) == (str(incident.folder), AT, since)
    assert incident.folder.name == f"{AT}-{incident.run}"
    assert (incident.step, incident.suspect, incident.world_size, incident.since) == (AT, 0, 1, since)
    assert incident.verdicts == (first, *later)
    assert (
        {one.since for one in later} == {one.since for one in events(tmp_path, Alarm) if one.step > AT + 5} == {since}
    )
    assert {one.since for one in events(tmp_path, Alarm) if one.step == AT} == {first.since} == {""}
    assert incident.alarms == tuple(one for one in events(tmp_path, Alarm) if one.step == AT)
    assert incident.settings["preset"] == "robust-z"
    assert incident.versions["torch"] == torch.__version__
    part = read_rank_part(incident.folder, 0)
    assert part.alarms == incident.alarms
    assert set(part.generators) == {"torch", "numpy", "python"}
    assert part.device_facts == {}  # of a processor nothing is said


def test_series_around_the_alarm_are_recorded(tmp_path):
    train(tmp_path)
    part = read_rank_part(read_incident(tmp_path).folder, 0)
    recording = load_recording(part.file("series.npz"))
    assert part.series_steps == tuple(range(AT + incident_writer.STEPS_AFTER + 1))
    values = recording.values[:, [one[:3] for one in recording.series].index(("gradient", "0.weight", "l2"))]
    assert values[AT] > 1e6 * values[AT - 1]


def test_a_healthy_run_writes_nothing(tmp_path):
    before = threading.active_count()
    train(tmp_path, faults=())
    assert [one.name for one in tmp_path.iterdir()] == ["e.jsonl"]
    assert threading.active_count() == before


@pytest.mark.parametrize("options", [{"incident": "off"}, {"events": None}])
def test_it_can_be_switched_off_and_needs_events(options, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monitor = train(tmp_path, **options)
    assert monitor.alarms
    assert not list(tmp_path.rglob("incidents"))


@pytest.mark.parametrize("loop", few(["iterate", "step"], "iterate"))
@pytest.mark.parametrize("on_alarm", few(["rerun", "replay"], "rerun"))
def test_state_and_batch_of_the_step_are_recorded_where_it_is_executed_again(loop, on_alarm, tmp_path):
    keep = Keep()
    with contextlib.suppress(MonitorStop):  # of a replay
        train(tmp_path, loop=loop, on_alarm=on_alarm, at_start=keep)
    part = read_rank_part(read_incident(tmp_path).folder, 0)
    assert (part.state_step, part.problems) == (AT, ())
    assert part.state_since is None or part.state_since < AT
    state, batch = read_tensors(part.file("state.safetensors")), read_tensors(part.file("batch.safetensors"))
    assert first_snapshot_difference(keep.states[AT], state) is None
    torch.manual_seed(0)
    nn.Linear(8, 4)
    wanted = [torch.randn(16, 8) for _ in range(STEPS)][AT]
    assert first_snapshot_difference([(wanted,)] if loop == "step" else [wanted], batch) is None


def test_a_state_that_steps_were_executed_again_for_says_since_when(tmp_path):
    writer = incident_writer.IncidentWriter(tmp_path, "0a1b2c3d", torch.device("cpu"))
    verdict = made_events.verdict(7)
    writer.begin(verdict, (), made_events.started())
    writer.begin_again()
    for step in (5, 6, 7):
        writer.add_iteration(step, lambda: {"weight": torch.ones(2)}, torch.ones(1))
    writer.close()
    part = read_rank_part(writer.path, 0)
    assert (part.state_step, part.state_since) == (7, 5)


@pytest.mark.parametrize("options", [{"incident": "small"}, {"loop": "plain"}])
def test_no_state_is_written_where_none_is_wanted_or_known(options, tmp_path):
    options = {"loop": "iterate", **options}
    train(tmp_path, on_alarm="rerun", **options)
    part = read_rank_part(read_incident(tmp_path).folder, 0)
    assert part.state_step is None
    assert part.file("state.safetensors") is None


def test_a_state_that_is_too_large_is_left_out_and_named(tmp_path, monkeypatch):
    monkeypatch.setattr(incident_writer, "MOST_TENSOR_BYTES", 100)
    monitor = train(tmp_path, loop="iterate", on_alarm="rerun")
    assert len(monitor.verdicts) == 1
    part = read_rank_part(read_incident(tmp_path).folder, 0)
    assert part.file("state.safetensors") is None
    assert part.problems[0].startswith("UsageError: state.safetensors is not written, as it would be ")


def test_nothing_is_a_pickle(tmp_path):
    train(tmp_path, loop="iterate", on_alarm="rerun")
    files = [one for one in read_incident(tmp_path).folder.rglob("*") if one.is_file()]
    assert {one.name for one in files} == {
        "incident.json",
        "rank.json",
        "series.npz",
        "batch.safetensors",
        "state.safetensors",
    }
    for file in files:
        with pytest.raises((pickle.UnpicklingError, ValueError, EOFError, KeyError, IndexError)):
            pickle.loads(file.read_bytes())
        if file.suffix == ".npz":
            load_recording(file)  # whose arrays are no pickles


def test_checkpoints_of_this_process_are_named(tmp_path):
    saved = []

    def save(model, optimizer):
        if len(saved) < 7:
            saved.append(verified_save(model.state_dict(), tmp_path / f"{len(saved)}.pt", step=len(saved)))

    train(tmp_path, at_start=save)
    checkpoints = read_incident(tmp_path).checkpoints
    assert [one.step for one in checkpoints] == [2, 3, 4, 5, 6]
    assert [Path(one.manifest) for one in checkpoints] == saved[2:]
    assert all(one.files for one in checkpoints)


def test_a_run_that_continues_a_training_records_the_step_of_the_training(tmp_path, monkeypatch):
    monkeypatch.setenv(FIRST_STEP, "60")
    train(tmp_path)
    (folder,) = (tmp_path / "incidents").iterdir()
    assert folder.name.startswith(f"{60 + AT}-")
    found = read_incident(tmp_path)
    assert (found.step, found.first_step, found.training_step) == (AT, 60, 60 + AT)
    (started,) = events(tmp_path, Started)
    assert str(started).endswith("; step 0 of this run is step 60 of the training")


def test_a_fault_verdict_is_reported_and_recorded(tmp_path):
    verdict = FaultVerdict(
        kind="transient", step=AT, rank=0, host="node", code="UNSILENT-T01", reason="it went away", exit_code=0
    )

    class Explains:
        def __call__(self, event):
            if isinstance(event, IncidentBegan):
                self.monitor._reporter.fault_verdict(verdict)

    train(tmp_path, sinks=[Explains()])
    assert read_incident(tmp_path).fault_verdict == verdict
    ((fault, suspect, code),) = [(one.fault, one.suspect, one.code) for one in events(tmp_path, AlarmExplained)]
    assert (fault, suspect, code) == ("transient", 0, "UNSILENT-T01")


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def test_a_full_disk_is_logged_once_and_the_job_goes_on(tmp_path, caplog, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    for name in ("write_record", "replace_file", "write_tensors"):
        monkeypatch.setattr(incident_writer, name, full)
    monitor = train(tmp_path, faults=(AT, AT + 15), loop="iterate", on_alarm="rerun")
    assert len(monitor.verdicts) == 2
    (text,) = [one.getMessage() for one in caplog.records if "cannot record the incident" in one.getMessage()]
    assert text.endswith("No space left on device; the job goes on")


def test_an_error_in_the_record_leaves_the_monitor_on(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(incident_writer, "generator_states", lambda: 1 / 0)
    monitor = train(tmp_path, faults=(AT, AT + 15))
    assert len(monitor.verdicts) == 2
    (text,) = [one.getMessage() for one in caplog.records if "cannot record the incident" in one.getMessage()]
    assert text == "cannot record the incident: ZeroDivisionError: division by zero; the job goes on"


def test_a_file_in_the_place_of_the_folder_is_logged_once(tmp_path, caplog):
    (tmp_path / "incidents").write_text("not ours")
    assert train(tmp_path).verdicts
    assert sum("cannot record the incident" in one.getMessage() for one in caplog.records) == 1
    assert (tmp_path / "incidents").read_text() == "not ours"


def test_a_disk_that_does_not_answer_is_not_waited_for(tmp_path, caplog, monkeypatch):
    answers = threading.Event()
    monkeypatch.setattr(incident_writer, "write_record", lambda *_: answers.wait(60))
    monkeypatch.setattr(incident_writer, "CLOSING_SECONDS", 0.1)
    try:
        monitor = train(tmp_path, faults=(AT, AT + 15))  # steps go on after the alarm
        assert len(monitor.verdicts) == 2
    finally:
        answers.set()
    assert "is not complete, as its disk does not answer" in caplog.text


def test_the_job_may_change_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    train(tmp_path, events=Path("e.jsonl"), at_start=lambda *_: monkeypatch.chdir(tmp_path / "sub"))
    assert read_incident(tmp_path).step == AT
