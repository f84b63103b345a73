"""Alarms with ``on_alarm="replay"``: the verdict, how the job ends, and what is remembered of it."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from torch import nn

from events import made_events as made
from monitor.unreachable import Unreachable
from unsilent.checkpoints.recent_loads import note_load
from unsilent.events.event_kinds import AlarmExplained
from unsilent.events.host import FIRST_STEP
from unsilent.monitor import Monitor, MonitorStop
from unsilent.monitor.alarm_replay import AlarmReplay
from unsilent.monitor.exchange import RankRow
from unsilent.monitor.recorder import Recorder
from unsilent.recovery import step_replay
from unsilent.recovery.rank_link import RankLink

FAULTY, STEPS = 30, 36


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(step_replay, "SECONDS", 0.0)  # three executions


class Executions(Unreachable):
    """Executions of a step, counted; nothing leads to the number, so that it is not put back."""

    def __init__(self):
        self.count = 0


class Training:
    """A small training; ``spoil`` gets the number of each execution of a step and the output of the model."""

    def __init__(self, spoil=lambda number, x: x):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.spoil, self.executions = spoil, Executions()
        self.explained = []

    def step(self, x, rate):
        self.executions.count += 1
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad()
        out = self.spoil(self.executions.count, self.model(x))
        (out - x[:, :3]).square().mean().backward()
        self.optimizer.step()

    def run(self, before_step=lambda number: None, **options):
        """Train; where a verdict ends it, its `MonitorStop`."""
        batches = torch.randn(STEPS, 8, 6)
        sinks = [lambda event: self.explained.append(event) if isinstance(event, AlarmExplained) else None]
        try:
            with Monitor(
                self.model, self.optimizer, sinks=sinks, **{"on_alarm": "replay", "sampling": "fixed:1", **options}
            ) as self.monitor:
                for number in range(STEPS):
                    before_step(number)
                    self.monitor.step(self.step, batches[number], 1e-2)
        except MonitorStop as stop:
            return stop
        return None


def once(number, x):
    return x * 1e9 if number == FAULTY else x


def always(number, x):
    return x * 1e9 if number >= FAULTY else x


def test_a_transient_fault_ends_the_job_with_16_and_the_second_one_with_17(tmp_path):
    first = Training(once).run(events=tmp_path / "a.jsonl")
    assert first.exit_code == 16
    assert "transient (UNSILENT-T01)" in str(first)
    second = Training(once).run(events=tmp_path / "b.jsonl")
    assert second.exit_code == 17
    assert "UNSILENT-D04" in str(second)
    remembered = json.loads((tmp_path / "incidents" / "devices.json").read_text())
    assert [(one["kind"], one["step"]) for one in remembered["incidents"]] == [("transient", 29), ("device", 29)]


@pytest.mark.slow
def test_an_undetermined_alarm_ends_the_job_with_16_once(tmp_path):
    codes = [Training(always).run(events=tmp_path / f"{n}.jsonl").exit_code for n in range(3)]
    assert codes == [16, 17, 17]


def test_a_file_of_earlier_incidents_that_cannot_be_read_is_left_alone(tmp_path, caplog):
    path = tmp_path / "incidents" / "devices.json"
    path.parent.mkdir()
    path.write_text("{")
    with caplog.at_level(logging.WARNING):
        assert Training(once).run(events=tmp_path / "a.jsonl").exit_code == 16
    assert path.read_text() == "{"
    assert caplog.text.count("earlier incidents are not counted") == 1


def test_stopping_without_replay_stays_16():
    training = Training(once)

    def train():
        with Monitor(training.model, training.optimizer, on_alarm="stop", sampling="fixed:1"):
            for _ in range(STEPS):
                training.step(torch.randn(8, 6), 1e-2)

    with pytest.raises(MonitorStop) as stop:
        train()
    assert stop.value.exit_code == 16


def test_the_end_of_a_job_names_the_kind_and_both_steps_and_leaves_the_reason_to_the_log(monkeypatch):
    monkeypatch.setenv(FIRST_STEP, "40")
    training = Training(once)
    stop = training.run()
    assert str(stop) == (
        "the monitor stopped the job after an alarm in step 29 (step 69 of the training): transient (UNSILENT-T01)"
    )
    assert training.explained[0].reason


def damage(model):
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state["2.weight"][0, 0] = 1e30
    model.load_state_dict(state)


def test_a_damaged_checkpoint_is_found_by_the_one_before():
    training = Training()
    kept = {}

    def before_step(number):
        if number == FAULTY - 10:
            kept["state"] = {name: tensor.clone() for name, tensor in training.model.state_dict().items()}
            training.monitor.load_earlier = lambda: training.model.load_state_dict(kept["state"])
        if number == FAULTY:
            damage(training.model)

    stop = training.run(before_step)
    assert (stop.exit_code, training.explained[0].fault) == (1, "checkpoint")
    assert "in step 1 after" in training.explained[-1].reason


def test_a_load_between_steps_is_not_taken_for_a_transient_fault():
    training = Training()
    training.run(lambda number: damage(training.model) if number == FAULTY else None)
    assert training.explained[0].code == "UNSILENT-U05"
    assert "3 of 3" in training.explained[0].reason


def test_a_setting_changed_between_steps_is_not_taken_for_a_transient_fault():
    """The states that are kept are older than the change, which would not be made again."""
    training = Training()
    plain = training.step
    training.step = lambda x, rate: plain(x, training.optimizer.param_groups[0]["lr"])

    def before_step(number):
        if number == FAULTY - 1:
            training.optimizer.param_groups[0]["lr"] = 1e6

    training.run(before_step)
    assert training.explained[0].fault == "undetermined"
    assert "had lr=" in training.explained[0].reason


def test_a_batch_far_from_the_others_is_data():
    batches = [torch.ones(3, 4), torch.ones(3, 4) * 2, torch.ones(3, 4) * 3e3, torch.ones(3, 4)]
    assert "3e+03 times" in step_replay.batch_problem([(one,) for one in batches])
    assert step_replay.batch_problem([(one,) for one in batches[:2]]) == ""
    assert step_replay.batch_problem([(one.mean(),) for one in batches]) == ""  # a number is a setting
    assert step_replay.batch_problem([(torch.zeros(3),), (torch.ones(3),)]) == ""


def test_loads_of_an_earlier_training_in_this_process_do_not_count():
    training = Training()
    training.run(lambda number: damage(training.model) if number == FAULTY else None)
    after = Training(always)
    after.run()
    assert after.explained[0].code == "UNSILENT-U02"


def test_a_load_before_the_monitor_begins_counts():
    training = Training(lambda number, x: x * 1e30 if number >= FAULTY else x)
    earlier = Training()
    with Monitor(earlier.model, earlier.optimizer):
        pass
    note_load()  # as verified loading does
    training.run()
    assert training.explained[0].code == "UNSILENT-U05"
    assert "in step 30 after a checkpoint was loaded" in training.explained[0].reason


def test_a_device_that_spoils_the_weights_of_all_ranks_is_not_found_in_its_neighbour():
    """An execution has several iterations; after the first faulty one the other rank has an alarm as well."""
    clean, alarm = RankRow(30), RankRow(30, level=2)
    replay, found = findings_of([clean, clean], [alarm, clean], [alarm, alarm])
    assert (found.ranks, found.are_own, found.clean) == ({0}, True, 1)
    assert replay._take_findings()[:3] == (set(), True, 0)


def findings_of(*iterations):
    replay = AlarmReplay(made.verdict(30), None, RankLink(), (), Recorder())
    for rows in iterations:
        replay.add(rows)
    return replay, replay._take_findings()


def test_a_finding_in_what_ranks_share_says_nothing_of_the_ranks():
    """A device that puts NaN into a sum over ranks spoils the update of all, and then what they compute themselves."""
    own, update = RankRow(30, level=2), RankRow(30, level=2, is_shared=1, has_shared=1)
    assert findings_of([own, own])[1].are_own
    assert not findings_of([update, update], [own, own])[1].are_own
    assert not findings_of([own, own._replace(has_shared=1)])[1].are_own


def test_an_alarm_of_a_step_before_the_loop_is_not_taken_for_one_that_does_not_come_again(caplog):
    """Under ``unsilent run`` states are kept from the second batch on."""
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    def step(x):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    def train():
        with Monitor(model, optimizer, on_alarm="replay", sampling="fixed:1") as monitor:
            step(torch.full((8, 6), 1e15))  # the norm of the gradients overflows
            for batch in monitor.iterate([torch.randn(8, 6) for _ in range(4)]):
                step(batch)

    with pytest.raises(MonitorStop) as stop:
        train()
    assert stop.value.exit_code == 16
    assert "UNSILENT-U01" in str(stop.value)
    assert "began before the oldest state that is kept" in caplog.text
