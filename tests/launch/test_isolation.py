"""What follows from an incident of an isolated job: on which devices and from which checkpoint it is started again, if at all."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from unsilent.basics.errors import UsageError
from unsilent.checkpoints.verified_saving import verified_save
from unsilent.events.host import host_name
from unsilent.events.incident_folder import FOLDER, INCIDENT_FILE, Incident, write_record
from unsilent.launch import isolation
from unsilent.launch.cordon_file import NAME, read_record
from unsilent.launch.isolation import IsolatedJob, Isolation
from unsilent.recovery.fault_verdict import FaultVerdict

CODES = {"device": 17, "transient": 16, "undetermined": 16, "checkpoint": 1, "data": 1, "numerics": 1, "benign": 0}


class Ended:
    """A process that has ended."""

    def __init__(self, code):
        self.code = code

    def poll(self):
        return self.code


class Job:
    """Runs scenes in the place of ranks: ``scene(job)`` is what one start does, and returns torchrun's exit code."""

    def __init__(self, folder, monkeypatch):
        self.folder, self.checkpoints = folder, folder / "checkpoints"
        self.checkpoints.mkdir()
        self.starts, self.said, self.tests, self.test_codes = [], [], [], [0]
        monkeypatch.setattr(isolation, "start_ranks", self._start)
        monkeypatch.setattr(isolation, "start_self_test", self._test)
        monkeypatch.setattr(isolation, "POLL_SECONDS", 0.0)

    def _start(self, words, slots, resume_from, first_step):
        assert first_step == int(resume_from.stem.removeprefix("step-") if resume_from else 0)
        self.starts.append((list(slots), resume_from and resume_from.name))
        return Ended(self.scenes.pop(0)(self))

    def _test(self, slot, minutes):
        self.tests.append(slot)
        return Ended(self.test_codes.pop(0))

    def run(self, *scenes, ranks=4, spares=0, restarts=3, test_minutes=0.0):
        self.scenes = [*scenes]
        job = IsolatedJob(
            words=("run", "train.py"), events=self.folder / "events.jsonl", checkpoints=self.checkpoints, ranks=ranks,
            spares=spares, restarts=restarts, test_minutes=test_minutes,
        )  # fmt: skip
        code = Isolation(job, self.said.append).run()
        assert self.scenes == []
        return code

    def save(self, *steps):
        for step in steps:
            verified_save({"weight": torch.full((3,), float(step))}, self.checkpoints / f"step-{step}.pt", step=step)

    def incident(self, kind, step, rank, run, exit_code=None, code="", **more):
        folder = self.folder / FOLDER / f"{step}-{run}"
        verdict = None
        if kind:
            verdict = FaultVerdict(
                kind=kind, step=step, rank=rank, host=host_name(), device="cpu", reason="it was planted", code=code,
                exit_code=CODES[kind] if exit_code is None else exit_code,
            )  # fmt: skip
        record = Incident(
            run=run, step=step, suspect=rank, reason="own history", tensor="weight", host=host_name(), device="cpu",
            world_size=4, time=float(len(self.starts)), versions={}, fault_verdict=verdict,
            **{"settings": {"on_alarm": "replay"}, **more},
        )  # fmt: skip
        write_record(folder, record)
        return 1

    @property
    def record(self):
        return read_record(self.folder / NAME)


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return Job(tmp_path, monkeypatch)


def fails(kind, step, rank, *saves, run=None, **more):
    """A start that saves checkpoints, and is stopped by an incident."""

    def scene(job):
        job.save(*saves)
        return job.incident(kind, step, rank, run or f"run{len(job.starts)}", **more)

    return scene


def ends(job):
    return 0


def test_a_device_is_left_out_and_a_spare_takes_its_place(job):
    assert job.run(fails("device", 25, 1, 10, 20, 30), ends, spares=1) == 0
    assert job.starts == [([0, 1, 2, 3], None), ([0, 2, 3, 4], "step-20.pt")]
    (cordon,) = job.record.cordons
    assert (cordon.slot, cordon.host, cordon.step, cordon.reason) == (1, host_name(), 25, "it was planted")
    assert (cordon.incident, cordon.status) == ("25-run1", "suspected")


def test_without_a_spare_there_are_fewer_ranks_and_ranks_are_mapped_to_slots(job):
    assert job.run(fails("device", 25, 1, 10, 20), fails("device", 3, 1), ends) == 0
    assert [slots for slots, _ in job.starts] == [[0, 1, 2, 3], [0, 2, 3], [0, 3]]
    assert [one.slot for one in job.record.cordons] == [1, 2]
    assert "3 ranks instead of 4 on slots 0, 2, 3" in job.said[2]


def test_steps_count_from_the_checkpoint_that_a_start_began_with(job):
    assert job.run(fails("device", 25, 1, 10, 20), fails("device", 15, 0, 30, 40), ends) == 0
    assert [one.step for one in job.record.handled] == [25, 35]
    assert [name for _, name in job.starts] == [None, "step-20.pt", "step-30.pt"]


def test_a_checkpoint_of_after_the_fault_is_not_used_later_either(job):
    with pytest.raises(KeyboardInterrupt):
        job.run(fails("device", 25, 1, 10, 20, 30), interrupted)
    assert job.run(ends) == 0
    assert job.starts[-1] == ([0, 2, 3], "step-20.pt")
    job.save(30)  # by the good run
    assert job.run(ends) == 0
    assert job.starts[-1] == ([0, 2, 3], "step-30.pt")


def interrupted(job):
    raise KeyboardInterrupt


def test_after_a_transient_fault_all_devices_are_used_again(job):
    assert job.run(fails("transient", 25, 1, 10, 20, 30), ends) == 0
    assert job.starts[1] == ([0, 1, 2, 3], "step-20.pt")
    assert job.record.cordons == ()


def test_a_suspected_checkpoint_is_never_loaded_again(job):
    job.save(10, 20, 30)
    scenes = [fails("checkpoint", 2, -1), fails("checkpoint", 2, -1), fails("checkpoint", 2, -1)]
    with pytest.raises(UsageError, match="No checkpoint was found|is known to be older than"):
        job.run(*scenes, restarts=9)
    assert [name for _, name in job.starts] == ["step-30.pt", "step-20.pt", "step-10.pt"]


@pytest.mark.parametrize("kind", ["data", "numerics"])
def test_what_every_device_would_do_again_is_not_started_again(kind, job):
    assert job.run(fails(kind, 25, 1, 10)) == 1
    assert job.record.cordons == ()


def test_a_batch_that_is_not_finite_accuses_no_device(job):
    assert job.run(fails("data", 25, 1, 10, code="UNSILENT-S01")) == 1
    assert [one.slot for one in job.record.handled] == [-1]
    assert "step 25: data (UNSILENT-S01) in the batch of rank 1; see" in job.said[1]
    assert "slot 1" not in " ".join(job.said[1:])


def test_an_undetermined_fault_is_started_again_once_for_a_step_and_device(job):
    scenes = [fails("undetermined", 25, 1, 20), fails("undetermined", 7, 1), fails("undetermined", 5, 1)]
    assert job.run(*scenes, restarts=9) == 17
    assert [one.step for one in job.record.handled] == [25, 27, 25]


def test_a_spare_device_decides_what_is_undetermined_for_the_second_time(job):
    again = fails("undetermined", 5, 1, code="UNSILENT-U04", exit_code=17)
    assert job.run(fails("undetermined", 25, 1, 20), again, fails("data", 5, 1), spares=1, restarts=9) == 1
    assert [slots for slots, _ in job.starts] == [[0, 1, 2, 3], [0, 1, 2, 3], [0, 2, 3, 4]]
    (cordon,) = job.record.cordons
    assert (cordon.slot, cordon.status) == (1, "suspected")
    assert "nothing is confirmed for the device in slot 1: the step is tried on a spare one" in " ".join(job.said)


def test_a_spare_device_is_of_no_use_where_no_device_is_suspected(job):
    scenes = [fails("undetermined", 25, -1, 20), fails("undetermined", 5, -1, code="UNSILENT-U04", exit_code=17)]
    assert job.run(*scenes, spares=1, restarts=9) == 17
    assert "nothing is confirmed for a device" in job.said[-2]


def test_a_spare_device_that_is_in_cordon_is_none(job):
    scenes = [fails("device", 22, 2, 20), fails("undetermined", 5, 1), fails("undetermined", 5, 1)]
    assert job.run(*scenes, spares=1, restarts=9) == 17


def test_after_values_that_are_not_finite_soon_after_a_load_nothing_of_that_run_is_loaded(job):
    job.save(10, 20)
    assert job.run(fails("undetermined", 35, -1, 30, 40, code="UNSILENT-U05"), ends) == 0
    assert [name for _, name in job.starts] == ["step-20.pt", "step-10.pt"]
    assert sorted(one.step for one in job.record.avoided) == [20, 30, 40]


def test_a_link_is_no_incident(job, tmp_path_factory):
    elsewhere = Job.__new__(Job)
    elsewhere.folder, elsewhere.starts = tmp_path_factory.mktemp("elsewhere"), []
    elsewhere.incident("device", 35, 1, "other")

    def scene(job):
        job.save(10)
        (job.folder / FOLDER).mkdir()
        (job.folder / FOLDER / "35-link").symlink_to(elsewhere.folder / FOLDER / "35-other")
        return 1

    assert job.run(scene) == 1
    assert job.record.handled == ()
    assert "no incident says" in job.said[-1]


def test_a_transient_fault_that_comes_again_in_its_step_is_none(job):
    assert job.run(fails("transient", 25, 1, 20), fails("transient", 5, 1)) == 17


def test_a_job_that_stops_on_any_alarm_is_started_again_once(job):
    stop = {"settings": {"on_alarm": "stop"}}
    assert job.run(fails(None, 25, 1, 20, **stop), fails(None, 5, 1, **stop)) == 17


def test_a_failure_without_an_incident_that_stopped_the_job_is_passed_on(job):
    assert job.run(lambda job: 3) == 3
    assert job.run(fails("benign", 25, 1, run="a")) == 1
    assert job.run(fails(None, 25, 1, run="b")) == 1
    assert len(job.starts) == 3
    assert "no incident says that the monitor stopped the job" in job.said[-1]


def test_the_number_of_restarts_is_limited(job):
    scenes = [fails("transient", 25, 1, 10), fails("transient", 7, 1), fails("transient", 9, 1)]
    assert job.run(*scenes, restarts=2) == 16
    assert "2 times, as often as --restarts allows" in job.said[-2]


def test_one_line_where_no_device_is_left(job):
    with pytest.raises(UsageError, match=r"no device is left: 1 device of this host is in cordon; .*cordon\.json"):
        job.run(fails("device", 25, 0, 20), ranks=1)


def test_one_line_where_no_checkpoint_is_good_and_then_a_start_from_the_beginning(job):
    with pytest.raises(UsageError, match=r"No checkpoint .*; run the command again to train from the beginning"):
        job.run(fails("device", 25, 1, 30))
    assert job.run(ends) == 0
    assert job.starts[-1] == ([0, 2, 3], None)


def test_of_a_corrupt_newest_checkpoint_the_one_before_is_taken(job):
    def scene(job):
        fails("device", 25, 1, 10, 20)(job)
        path = job.checkpoints / "step-20.pt"
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
        return 1

    assert job.run(scene, ends) == 0
    assert job.starts[1] == ([0, 2, 3], "step-10.pt")


def test_an_incident_that_nobody_answered_before_a_kill_is_answered_first(job):
    def killed(job):
        fails("device", 25, 1, 10, 20)(job)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        job.run(killed)
    assert job.record.cordons == ()
    assert job.run(ends) == 0
    assert job.starts[-1] == ([0, 2, 3], "step-20.pt")


def test_incidents_of_a_job_that_was_not_isolated_are_left_alone(job):
    job.save(10)
    job.incident("device", 5, 1, "earlier")
    assert job.run(ends) == 0
    assert job.starts == [([0, 1, 2, 3], "step-10.pt")]
    assert "is of an earlier job" in job.said[0]


def test_a_self_test_confirms_or_lifts_a_cordon(job):
    job.test_codes = [17, 0, 2]
    scenes = [fails("device", 25, 1, 10, 20), fails("device", 3, 1), fails("device", 2, 1), ends]
    assert job.run(*scenes, test_minutes=1.0) == 0
    assert [(one.slot, one.status) for one in job.record.cordons] == [(1, "confirmed"), (2, "lifted"), (3, "suspected")]
    assert job.tests == [1, 2, 3]


def test_a_cordon_of_the_only_device_is_lifted_once(job):
    assert job.run(fails("device", 25, 0, 20), ends, ranks=1, test_minutes=1.0) == 0
    job.test_codes = [0]
    with pytest.raises(UsageError, match="no device is left"):
        job.run(fails("device", 25, 0, run="again"), ranks=1, test_minutes=1.0)
    assert [(one.status, one.incidents) for one in job.record.cordons] == [("kept", 2)]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{}",
        b'{"schema": 1, "cordons": [{"slot": "x"}]}',
        b'{"schema": 1, "handled": 3}',
        b'{"schema": 1, "first_step": -7}',
        b'{"schema": 1, "slots": [-1]}',
        b'{"schema": 1, "handled": [{"folder": "a", "kind": "device", "step": -1, "slot": 0}]}',
        b'{"schema": 1, "avoided": [{"path": "a", "written": 1, "step": -1}]}',
        b"[" * 100_000,
        b"\xff",
    ],
)
def test_one_line_for_a_file_that_is_not_ours(content, job):
    (job.folder / NAME).write_bytes(content)
    with pytest.raises(
        UsageError, match=r"cordon\.json is not what unsilent run --isolate writes: [^\n]*; correct or remove it$"
    ):
        job.run()


def test_one_line_for_an_incident_that_is_none(job):
    def scene(job):
        fails("device", 25, 1)(job)
        (job.folder / FOLDER / "25-run1" / INCIDENT_FILE).write_text("{")
        return 1

    with pytest.raises(UsageError, match=r"no record of an incident: [^\n]*; mend or remove it[^\n]*$"):
        job.run(scene)


def test_a_verdict_of_a_rank_that_there_is_not_puts_nothing_in_cordon(job):
    assert job.run(fails("device", 25, 3, 20), ends, ranks=2) == 0
    assert job.record.cordons == ()
    assert "which device rank 3 had is not known: none was put in cordon" in " ".join(job.said)


def test_the_last_line_says_which_incidents_were_answered(job):
    job.test_codes = [0]
    assert job.run(fails("device", 25, 1, 10, 20), fails("transient", 15, 2), ends, test_minutes=1.0) == 0
    assert job.said[-1] == (
        "the job ended with exit code 0; incidents so far: "
        "device fault in slot 1 (step 25), transient fault in slot 3 (step 35); "
        f"records: {job.folder / FOLDER}"
    )
    assert "self-test" in " ".join(job.said[:-1])


def test_a_job_without_incidents_says_nothing_of_them(job):
    assert job.run(ends) == 0
    assert len(job.said) == 1


def test_the_file_is_json_for_others(job):
    job.run(fails("device", 25, 1, 10, 20, 30), ends)
    values = json.loads((job.folder / NAME).read_text())
    assert {"slot", "host", "device", "reason", "step", "time", "incident", "status"} <= values["cordons"][0].keys()
    assert replace(job.record) == job.record
